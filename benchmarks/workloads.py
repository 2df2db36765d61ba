"""Named attention problems, the same for every platform and implementation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

Direction = Literal["forward", "backward", "forward+backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "forward+backward")

_PRODUCTS = {"forward": (1, 1), "backward": (3, 2), "forward+backward": (4, 3)}
"""T x S products over D and over Dv: QK, PV; the backward has QK, dQ and dK, and dV and dP."""


@dataclass(frozen=True)
class Workload:
    """An attention problem by its sizes (letters as in ``jax_fa.attention``).

    Attributes:
        name: stable; results of different runs are compared by it.
        batch: B.
        q_len: T.
        kv_len: S.
        num_q_heads: N.
        num_kv_heads: K.
        head_dim: D.
        is_causal: no key beyond the diagonal, which starts at key 0.
        window: keys seen before and beyond the diagonal, or None.
        num_documents: each sequence is that many documents of equal length, told apart by segment
            ids; a query sees the keys of its own.
        is_deterministic: gradients are the same bits in every run.
        value_dim: Dv if that is not D.
    """

    name: str
    batch: int
    q_len: int
    kv_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    is_causal: bool = True
    window: tuple[int, int] | None = None
    num_documents: int = 1
    is_deterministic: bool = False
    value_dim: int | None = None

    @property
    def out_dim(self) -> int:
        """Dv."""
        return self.value_dim or self.head_dim

    def shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """Shapes of q, k, v and of the output's cotangent."""
        q = (self.batch, self.q_len, self.num_q_heads, self.head_dim)
        k = (self.batch, self.kv_len, self.num_kv_heads, self.head_dim)
        return {"q": q, "k": k, "v": (*k[:3], self.out_dim), "dout": (*q[:3], self.out_dim)}

    def visible_pairs(self) -> int:
        """Number of (query, key) pairs that are computed for one head of one sequence."""
        q_len, kv_len = self.q_len // self.num_documents, self.kv_len // self.num_documents
        diagonal = np.arange(q_len)
        left, right = self.window or (q_len, kv_len)
        right = min(right, 0) if self.is_causal else right
        first = np.maximum(diagonal - left, 0)
        end = np.minimum(diagonal + right + 1, kv_len)
        return self.num_documents * int(np.maximum(end - first, 0).sum())

    def flops(self, direction: Direction) -> int:
        """Floating point operations of the products over visible pairs."""
        over_d, over_dv = _PRODUCTS[direction]
        per_pair = 2 * (self.head_dim * over_d + self.out_dim * over_dv)
        return per_pair * self.visible_pairs() * self.batch * self.num_q_heads

    def with_length(self, length: int) -> Workload:
        """The same problem over ``length`` queries and keys, named after it."""
        return replace(self, name=f"{self.name}_{length}", q_len=length, kv_len=length)


_SCALING_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)

MAIN = Workload("causal_4k", 1, 4096, 4096, 8, 8, 64)
"""The workload of the acceptance figures of the CPU platform."""

CPU = (
    MAIN,
    replace(MAIN, name="full_4k", is_causal=False),
    replace(MAIN, name="gqa_4k", num_kv_heads=2),
    replace(MAIN, name="window_4k", window=(255, 0)),
    Workload("short_batch", 8, 512, 512, 8, 8, 64),
    Workload("wide_head_2k", 1, 2048, 2048, 4, 4, 128),
)

CPU_SCALING = tuple(
    Workload("scaling", 1, 0, 0, 2, 2, 64).with_length(length) for length in _SCALING_LENGTHS
)
"""Two heads, so that the T x S array of an unfused implementation fits at the longest length."""

_GPU_TOKENS = 16384
_HEADS = {128: (16, 16), 64: (32, 32), 256: (8, 8), 96: (16, 16), 192: (16, 16)}
"""Query and key/value heads by head size."""


def _gpu(
    name: str, length: int, head_dim: int, heads: tuple[int, int], is_causal: bool
) -> Workload:
    mask = "causal" if is_causal else "full"
    batch = _GPU_TOKENS // length
    return Workload(f"{name}_{mask}_{length}", batch, length, length, *heads, head_dim, is_causal)


GPU = tuple(
    _gpu(f"d{head_dim}", length, head_dim, _HEADS[head_dim], is_causal)
    for head_dim in (128, 64)
    for is_causal in (False, True)
    for length in _SCALING_LENGTHS
)
"""16384 tokens at every length."""

GPU_SIZES = tuple(
    replace(
        _gpu(f"d{head_dim}", length, head_dim, _HEADS[head_dim], is_causal),
        value_dim=128 if head_dim == 192 else None,
    )
    for head_dim in (96, 192, 256)
    for is_causal in (False, True)
    for length in (2048, 8192)
)
"""Other head sizes, D / Dv = 192 / 128 among them."""

GPU_GROUPED = tuple(
    _gpu("gqa" if kv_heads < 32 else "mha", 8192, 128, (32, kv_heads), is_causal)
    for is_causal in (False, True)
    for kv_heads in (32, 8)
)
"""The same work with and without shared key/value heads."""

GPU_WINDOWED = tuple(
    replace(_gpu(name, length, 128, (16, 16), True), batch=1, window=(size - 1, 0))
    for name, size, length in (
        ("window", 256, 4096),
        ("window", 256, 8192),
        ("window", 256, 16384),
        ("window1k", 1024, 16384),
    )
)
"""Few keys for each query: work should grow with the length, not with its square."""

GPU_PACKED = tuple(
    replace(_gpu(f"packed{number}", 16384, 128, (16, 16), True), num_documents=number)
    for number in (2, 8, 32)
)
"""Documents in one sequence: work should be in proportion to the visible pairs."""

GPU_SHORT = tuple(
    Workload(f"short_{mask}_{length}", 64, length, length, 16, 16, 64, is_causal=mask == "causal")
    for mask in ("full", "causal")
    for length in (128, 256, 512)
)
"""Large batches of short sequences: tiles have a few steps, so that their ends count."""

GPU_DECODE = tuple(
    Workload(f"decode_b{batch}_{kv_len}", batch, 1, kv_len, 32, 8, 128, is_causal=False)
    for batch, lengths in (
        (1, (4096, 16384, 65536)),
        (4, (4096, 16384, 65536)),
        (64, (512, 4096)),
    )
    for kv_len in lengths
)
"""One query over a cache: keys are split while multiprocessors lie idle (batch 1), and where query
heads then share tiles (batch 64)."""

GPU_DETERMINISTIC = tuple(
    replace(
        _gpu(f"det_d{head_dim}", length, head_dim, _HEADS[head_dim], is_causal),
        is_deterministic=True,
    )
    for head_dim in (128, 64, 256)
    for is_causal in (False, True)
    for length in (1024, 4096, 16384)
)
"""The cost of bitwise-reproducible gradients."""
