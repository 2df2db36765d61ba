"""``python -m benchmarks.kernel_times``: a forward's kernel beside PyTorch's FlashAttention-2.

Times of kernels alone, at the clocks that ncu sets, so that neither launches nor the power limit of
the card come into it. Needs ncu, PyTorch and a GPU. Prints microseconds and how many times as fast
as FlashAttention-2 jax_fa is, with geometric means by head size. For the kernels of 8.x on a Hopper
GPU: an installation made with ``tests/gpu/mma_sync_on_hopper.py``.
"""

from __future__ import annotations

import argparse
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
    """Calls the forward of every point."""
    import jax
    import jax.numpy as jnp

    import jax_fa

    for point in POINTS:
        shape = (TOKENS // point.length, point.length, point.heads, point.head_dim)
        x = jax.random.normal(jax.random.key(0), (3, *shape), jnp.bfloat16)
        attend = jax.jit(jax_fa.attention, static_argnames="is_causal")
        for _ in range(REPEATS):
            jax.block_until_ready(attend(*x, is_causal=point.is_causal))


def run_torch() -> None:
    """The same in PyTorch."""
    import torch
    from torch.nn import attention, functional

    for point in POINTS:
        shape = (TOKENS // point.length, point.heads, point.length, point.head_dim)
        x: Any = torch.randn(3, *shape, device="cuda", dtype=torch.bfloat16)
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            for _ in range(REPEATS):
                functional.scaled_dot_product_attention(*x, is_causal=point.is_causal)
    torch.cuda.synchronize()


_RUNS = {"jax_fa": run_jax_fa, "torch": run_torch}


def durations(text: str) -> list[float]:
    """Microseconds of each kernel that ncu tells of."""
    found = re.findall(r"gpu__time_duration\.sum +(ns|us|ms) +([\d.,]+)", text)
    return [float(value.replace(",", "")) * _UNITS[unit] for unit, value in found]


def measure(who: str) -> list[float]:
    """The least duration of each point."""
    program = [sys.executable, "-m", "benchmarks.kernel_times", "--run", who]
    command = ["ncu", "--metrics", "gpu__time_duration.sum", "-k", _KERNELS, *program]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    times = durations(done.stdout)
    if len(times) != REPEATS * len(POINTS):
        raise SystemExit(f"{who}: {len(times)} kernels ran, not {REPEATS} for each point")
    return [min(times[i : i + REPEATS]) for i in range(0, len(times), REPEATS)]


def table(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The table, and geometric means below it."""
    lines = ["| D | T | mask | jax_fa us | FlashAttention-2 us | ratio |"]
    lines.append("| ---: | ---: | --- | ---: | ---: | ---: |")
    ratios = [other / own for own, other in zip(ours, theirs, strict=True)]
    for point, own, other, ratio in zip(POINTS, ours, theirs, ratios, strict=True):
        mask = "causal" if point.is_causal else "full"
        start = f"| {point.head_dim} | {point.length} | {mask}"
        lines.append(f"{start} | {own:.0f} | {other:.0f} | {ratio:.2f} |")
    by_size = itertools.groupby(zip(POINTS, ratios, strict=True), lambda pair: pair[0].head_dim)
    for head_dim, pairs in by_size:
        found = [ratio for _, ratio in pairs]
        mean = statistics.geometric_mean(found)
        lines.append(f"\nD = {head_dim}: geometric mean {mean:.3f}, least {min(found):.3f}")
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
