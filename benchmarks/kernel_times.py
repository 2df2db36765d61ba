"""``python -m benchmarks.kernel_times``: kernels beside those of PyTorch's FlashAttention-2.

Times of kernels alone, at the clocks that ncu sets, so that neither launches nor the power limit of
the card come into it. Needs ncu, PyTorch and a GPU. Prints microseconds of a forward, and of
forward and backward, and how many times as fast as FlashAttention-2 jax_fa is, with geometric means
by head size. For the kernels of 8.x on a Hopper GPU: an installation made with
``tests/gpu/mma_sync_on_hopper.py``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

REPEATS = 3
TOKENS = 16384
_UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3}
_KERNELS = "regex:cutlass|flash"


class Point(NamedTuple):
    """Self-attention of ``TOKENS`` tokens in sequences of one length."""

    head_dim: int
    heads: int
    length: int
    is_causal: bool


POINTS = tuple(
    Point(*heads, length, is_causal)
    for heads in ((64, 32), (128, 16))
    for length in (512, 1024, 2048, 4096, 8192, 16384)
    for is_causal in (False, True)
)


def run_jax_fa() -> None:
    """Calls forward and backward of every point."""
    import jax
    import jax.numpy as jnp

    import jax_fa

    for point in POINTS:
        shape = (TOKENS // point.length, point.length, point.heads, point.head_dim)
        x = jax.random.normal(jax.random.key(0), (4, *shape), jnp.bfloat16)
        attend = functools.partial(jax_fa.attention, is_causal=point.is_causal)
        differentiate = jax.jit(lambda *x, attend=attend: jax.vjp(attend, *x[:3])[1](x[3]))
        for _ in range(REPEATS):
            jax.block_until_ready(differentiate(*x))


def run_torch() -> None:
    """The same in PyTorch."""
    import torch
    from torch.nn import attention
    from torch.nn.functional import scaled_dot_product_attention

    for point in POINTS:
        shape = (TOKENS // point.length, point.heads, point.length, point.head_dim)
        x: Any = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        for operand in x[:3]:
            operand.requires_grad_()
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            for _ in range(REPEATS):
                out = scaled_dot_product_attention(*x[:3], is_causal=point.is_causal)
                out.backward(x[3])
    torch.cuda.synchronize()


_RUNS = {"jax_fa": run_jax_fa, "torch": run_torch}


def durations(text: str) -> list[float]:
    """Microseconds of each kernel that ncu tells of."""
    found = re.findall(r"gpu__time_duration\.sum +(ns|us|ms) +([\d.,]+)", text)
    return [float(value.replace(",", "")) * _UNITS[unit] for unit, value in found]


class Times(NamedTuple):
    """Microseconds of a point, each the least of all repeats; or ratios of them."""

    forward: float
    both: float


def times_of(found: Sequence[float]) -> list[Times]:
    """The times of all points, from those of their kernels; a forward is one kernel."""
    kernels, rest = divmod(len(found), REPEATS * len(POINTS))
    if rest or not kernels:
        raise SystemExit(f"{len(found)} kernels ran, not as many for each point")
    calls = [found[i : i + kernels] for i in range(0, len(found), kernels)]
    return [
        Times(min(call[0] for call in repeats), min(map(sum, repeats)))
        for repeats in (calls[i : i + REPEATS] for i in range(0, len(calls), REPEATS))
    ]


def measure(who: str) -> list[Times]:
    """The times of each point."""
    program = [sys.executable, "-m", "benchmarks.kernel_times", "--run", who]
    command = ["ncu", "--metrics", "gpu__time_duration.sum", "-k", _KERNELS, *program]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return times_of(durations(done.stdout))


def table(ours: Sequence[Times], theirs: Sequence[Times]) -> str:
    """The table, and geometric means below it."""
    lines = ["| D | T | mask | jax_fa us | FlashAttention-2 us | ratio |"]
    lines.append("| ---: | ---: | --- | ---: | ---: | ---: |")
    ratios = [
        Times(other.forward / own.forward, other.both / own.both)
        for own, other in zip(ours, theirs, strict=True)
    ]
    for point, own, other, ratio in zip(POINTS, ours, theirs, ratios, strict=True):
        cells = [f"{point.head_dim}", f"{point.length}", "causal" if point.is_causal else "full"]
        cells += [f"{times.forward:.0f} / {times.both:.0f}" for times in (own, other)]
        cells += [f"{ratio.forward:.2f} / {ratio.both:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    by_size = itertools.groupby(zip(POINTS, ratios, strict=True), lambda pair: pair[0].head_dim)
    for head_dim, pairs in by_size:
        found = [ratio for _, ratio in pairs]
        lines.append("")
        for name in Times._fields:
            these = [getattr(ratio, name) for ratio in found]
            mean = f"geometric mean {statistics.geometric_mean(these):.3f}"
            lines.append(f"D = {head_dim}, {name}: {mean}, least {min(these):.3f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.kernel_times", description=__doc__)
    parser.add_argument("--run", choices=_RUNS, help=argparse.SUPPRESS)
    run = parser.parse_args(argv).run
    if run:
        _RUNS[run]()
    else:
        print(table(measure("jax_fa"), measure("torch")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
