"""What one launch of a small kernel takes, on a GPU as on the emulator. Needs NumPy alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Unit(NamedTuple):
    """One kernel launch.

    Attributes:
      ptx: a kernel named "test", whose parameters are the addresses of the arrays.
      arrays: uint32; the last one is the result.
      grid: CTAs.
      block: threads of each.
      cluster: CTAs of a cluster; the kernel says it, too.
    """

    ptx: str
    arrays: tuple[np.ndarray, ...]
    grid: int
    block: int
    cluster: int = 1


def kernel(
    names: str, body: str, shared: int = 0, cluster: int = 1, target: str | None = None
) -> str:
    """PTX; %NAME is the address of each buffer, %thread the thread and %cta the CTA.

    Without a ``target`` for Hopper only, but with a ``cluster``: such kernels run on what comes
    after it, too.
    """
    target = target or ("sm_90a" if cluster == 1 else "sm_90")
    buffers = names.split()
    loads = "\n".join(f".reg .b64 %{n};\nld.param.u64 %{n}, [p_{n}];" for n in buffers)
    memory = f".shared .align 1024 .b8 smem[{shared}];" if shared else ""
    return f""".version 8.0
.target {target}
.address_size 64
.visible .entry test({", ".join(f".param .u64 p_{n}" for n in buffers)})
{f".reqnctapercluster {cluster}, 1, 1" if cluster > 1 else ""}
{{
.reg .pred %p<2>;
.reg .b32 %r<64>;
.reg .b64 %d<8>;
.reg .b32 %thread, %cta;
{memory}
mov.u32 %thread, %tid.x;
mov.u32 %cta, %ctaid.x;
{loads}
{body}
ret;
}}
"""
