"""``python -m benchmarks.kernel_times``: kernels beside those of PyTorch's FlashAttention-2.

Times of kernels alone, at the clocks that ncu sets, so that neither launches nor the power limit of
the card come into it. Needs ncu, PyTorch and a GPU. Prints microseconds of a forward, and of
forward and backward, and how many times as fast as FlashAttention-2 jax_fa is, with geometric means
by head size; the same where query heads share keys; and which share of the work that a window or
documents skip is gained. For the kernels of 8.x on a Hopper GPU: an installation made with
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
    """Self-attention of ``TOKENS`` tokens in sequences of one length.

    Attributes:
        head_dim: D.
        heads: query heads.
        length: tokens of a sequence, or of a document.
        is_causal: whether the mask is causal.
        group: query heads that share a key/value head.
        window: keys that a query sees, itself included; 0 if it sees all.
        is_packed: whether the sequences lie in one array, with borders.
    """

    head_dim: int
    heads: int
    length: int
    is_causal: bool
    group: int = 1
    window: int = 0
    is_packed: bool = False

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.heads // self.group

    def pairs(self) -> int:
        """Visible pairs of query and key, of a causal mask, in all sequences of a head."""
        seen = min(self.window or self.length, self.length)
        hidden = seen * (seen - 1) // 2
        return TOKENS // self.length * (seen * self.length - hidden)


_HEADS = ((64, 32), (128, 16))
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
POINTS = tuple(
    Point(*heads, length, is_causal)
    for heads in _HEADS
    for length in _LENGTHS
    for is_causal in (False, True)
)
WIDE = tuple(Point(256, 8, length, is_causal) for length in _LENGTHS for is_causal in (False, True))
GROUPED = tuple(
    Point(*heads, length, True, group=4) for heads in _HEADS for length in (2048, 16384)
)
WHOLE = tuple(Point(*heads, TOKENS, True) for heads in _HEADS)
WINDOWS = tuple(point._replace(window=window) for point in WHOLE for window in (256, 1024, 4096))
PACKED = tuple(
    point._replace(length=length, is_packed=True) for point in WHOLE for length in (512, 2048, 8192)
)
_SETS = {
    "points": POINTS,
    "wide": WIDE,
    "grouped": GROUPED,
    "whole": WHOLE,
    "windows": WINDOWS,
    "packed": PACKED,
}
"""By name; all points of a set launch as many kernels."""


def run_jax_fa(points: Sequence[Point]) -> None:
    """Calls forward and backward of every point."""
    import jax
    import jax.numpy as jnp

    import jax_fa

    for point in points:
        size = (TOKENS // point.length, point.length)
        options: dict[str, Any] = {"is_causal": point.is_causal}
        attend = jax_fa.attention
        if point.window:
            options["local_window_size"] = (point.window - 1, 0)
        if point.is_packed:
            borders = jnp.arange(0, TOKENS + 1, point.length, jnp.int32)
            options |= {"cu_seqlens_q": borders, "cu_seqlens_k": borders}
            attend, size = jax_fa.attention_varlen, (TOKENS,)
        x = [
            jax.random.normal(jax.random.key(i), (*size, heads, point.head_dim), jnp.bfloat16)
            for i, heads in enumerate((point.heads, point.kv_heads, point.kv_heads, point.heads))
        ]
        attend = functools.partial(attend, **options)
        differentiate = jax.jit(lambda *x, attend=attend: jax.vjp(attend, *x[:3])[1](x[3]))
        for _ in range(REPEATS):
            jax.block_until_ready(differentiate(*x))


def run_torch(points: Sequence[Point]) -> None:
    """The same in PyTorch, of points without a window that are not packed."""
    import torch
    from torch.nn import attention
    from torch.nn.functional import scaled_dot_product_attention

    for point in points:
        x: Any = [
            torch.randn(
                (TOKENS // point.length, heads, point.length, point.head_dim),
                device="cuda",
                dtype=torch.bfloat16,
            )
            for heads in (point.heads, point.kv_heads, point.kv_heads, point.heads)
        ]
        for operand in x[:3]:
            operand.requires_grad_()
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            for _ in range(REPEATS):
                out = scaled_dot_product_attention(
                    *x[:3], is_causal=point.is_causal, enable_gqa=point.group > 1
                )
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

    def shown(self, form: str) -> str:
        """Both in a cell of a table, as ``format`` writes each in ``form``."""
        return " / ".join(format(value, form) for value in self)


def times_of(found: Sequence[float], number: int) -> list[Times]:
    """The times of ``number`` points, from those of their kernels; a forward is one kernel."""
    kernels, rest = divmod(len(found), REPEATS * number)
    if rest or not kernels:
        raise SystemExit(f"{len(found)} kernels ran, not as many for each point")
    calls = [found[i : i + kernels] for i in range(0, len(found), kernels)]
    return [
        Times(min(call[0] for call in repeats), min(map(sum, repeats)))
        for repeats in (calls[i : i + REPEATS] for i in range(0, len(calls), REPEATS))
    ]


def measure(who: str, name: str) -> list[Times]:
    """The times of each point of a set."""
    program = [sys.executable, "-m", "benchmarks.kernel_times", "--run", who, name]
    command = ["ncu", "--metrics", "gpu__time_duration.sum", "-k", _KERNELS, *program]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return times_of(durations(done.stdout), len(_SETS[name]))


def table(points: Sequence[Point], ours: Sequence[Times], theirs: Sequence[Times]) -> str:
    """The table, and geometric means below it."""
    lines = ["| D | heads | T | mask | jax_fa us | FlashAttention-2 us | ratio |"]
    lines.append("| ---: | ---: | ---: | --- | ---: | ---: | ---: |")
    ratios = [
        Times(other.forward / own.forward, other.both / own.both)
        for own, other in zip(ours, theirs, strict=True)
    ]
    for point, own, other, ratio in zip(points, ours, theirs, ratios, strict=True):
        mask = "causal" if point.is_causal else "full"
        cells = [f"{point.head_dim}", f"{point.heads}:{point.kv_heads}", f"{point.length}", mask]
        cells += [own.shown(".0f"), other.shown(".0f"), ratio.shown(".2f")]
        lines.append(f"| {' | '.join(cells)} |")
    by_size = itertools.groupby(zip(points, ratios, strict=True), lambda pair: pair[0].head_dim)
    for head_dim, pairs in by_size:
        found = [ratio for _, ratio in pairs]
        lines.append("")
        for name in Times._fields:
            these = [getattr(ratio, name) for ratio in found]
            mean = f"geometric mean {statistics.geometric_mean(these):.3f}"
            lines.append(f"D = {head_dim}, {name}: {mean}, least {min(these):.3f}")
    return "\n".join(lines)


def skipped(points: Sequence[Point], ours: Sequence[Times], whole: Sequence[Times]) -> str:
    """A table of the share of the skipped work that is gained.

    It is 1 where a point takes the time of one causal sequence of all tokens (``WHOLE``), times its
    share of that sequence's pairs.
    """
    lines = ["| D | T | keys of a query | jax_fa us | share of the pairs | gained |"]
    lines.append("| ---: | ---: | --- | ---: | ---: | ---: |")
    of_size = dict(zip([point.head_dim for point in WHOLE], whole, strict=True))
    for point, own in zip(points, ours, strict=True):
        share = point.pairs() / WHOLE[0].pairs()
        most = of_size[point.head_dim]
        gained = Times(*((1 - a / b) / (1 - share) for a, b in zip(own, most, strict=True)))
        keys = f"{point.window}" if point.window else "all of its document"
        cells = [f"{point.head_dim}", f"{point.length}", keys, own.shown(".0f")]
        cells += [f"{share:.3f}", gained.shown(".3f")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.kernel_times", description=__doc__)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    run = parser.parse_args(argv).run
    if run:
        who, name = run
        _RUNS[who](_SETS[name])
        return 0
    for name in ("points", "wide", "grouped"):
        print(table(_SETS[name], measure("jax_fa", name), measure("torch", name)), end="\n\n")
    whole = measure("jax_fa", "whole")
    for name in ("windows", "packed"):
        print(skipped(_SETS[name], measure("jax_fa", name), whole), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
