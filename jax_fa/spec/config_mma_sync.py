"""The compile-time parameters of the kernels for mma.sync that are chosen for speed.

Tiles, warps and stages. Each choice comes with the counts behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jax_fa.spec.arch import arch_of_target, capability_number
from jax_fa.spec.division import GRANULE
from jax_fa.spec.key import KernelKey

WARP_ROWS = 16
"""Rows of a warp's product: the M of one mma.sync."""


def _capability(key: KernelKey) -> int:
    return capability_number(arch_of_target(key.arch).capabilities[0])


def _carries_pairs(key: KernelKey) -> bool:
    """Whether the compiler carries floats through loops in pairs, which spill earlier.

    It does for targets of 10.0 and later (DSL 4.8.1), which have instructions for pairs.
    """
    return _capability(key) >= 100


@dataclass(frozen=True)
class MmaSyncForward:
    """A forward kernel's tile and resources.

    Attributes:
        block_kv: keys per step.
        warps: warps of a CTA.
        row_tiles: tiles of 16 query rows that a warp owns; they share what it reads of K and V.
        stages: blocks of keys that shared memory holds, one or two. With one, keys are loaded while
            values are multiplied.
        value_stages: blocks of values that it holds, at most ``stages``. With one, values are
            loaded while scores are computed.
        q_in_registers: query fragments stay in registers; else each step reads them again.
        packs_heads: query heads of a group share tiles where that saves tiles (``Packing``).
        branches_steps: a step has separate code for blocks that hide keys (general masks only).
        opt_level: the compiler's level. At 1 it reorders little and so needs fewer registers.
    """

    block_kv: int
    warps: int = 4
    row_tiles: int = 2
    stages: int = 2
    value_stages: int = 2
    q_in_registers: bool = False
    packs_heads: bool = False
    branches_steps: bool = False
    opt_level: int = 3

    @property
    def block_q(self) -> int:
        """Query rows of one tile."""
        return WARP_ROWS * self.warps * self.row_tiles

    @property
    def granule(self) -> int:
        """Rows of a head that stay together where heads share a tile."""
        return GRANULE

    @property
    def is_persistent(self) -> bool:
        """Whether CTAs take several tiles: no, but CTAs share an SM: one starts as another ends."""
        return False


def mma_sync_forward(key: KernelKey) -> MmaSyncForward:
    """The forward configuration for ``key``.

    One product of 16 rows reads 256 bytes of K or V for 4096 operations. An A100's SM does 2048
    operations and reads 128 bytes per cycle, so warps of 16 rows would keep shared memory as busy
    as the tensor core; with 32 rows it is half as busy. A thread's registers then hold D elements
    of O and ``block_kv`` scores: 128 + 64 with D = 128. D = 256 leaves room for 16 rows only.

    An SM needs eight such warps, two CTAs: products of one CTA run beside exponentials of the other
    (H200, sm_90 build, one CTA per SM against two, D = 96 and 128: 22 to 38 % slower). Registers
    allow two; shared memory, with about 1 KB per CTA more than the tiles take, has to: 164 KB of
    8.0, 100 KB of 8.6, 8.9 and 12.x. KB of Q, keys and values: D = 64: 16 + 16 + 16, two CTAs
    everywhere; 96: 24 + 12 + 12, likewise; 128: 32 + 32 + 16, two on 8.0, and on 12.x 32 + 8 + 8,
    two; 192/128: 48 + 18 + 12, two on 8.0. With D = 256, a CTA has eight warps, and 64 + 16 + 16.
    """
    packs_heads = key.is_split
    if key.has_bias:
        return _forward_with_bias(key)
    if key.head_dim <= 64:
        # General, H100 (sm_90 build): this takes 4 to 6 % less time. With D = 128, 8 bytes spill.
        return MmaSyncForward(
            64,
            q_in_registers=True,
            packs_heads=packs_heads,
            branches_steps=key.mask == "general",
        )
    if key.head_dim <= 96:
        return _one_stage(64, packs_heads=packs_heads)
    # A general mask takes registers: with 64 keys per step, some spill. On 12.x, pairs of floats
    # spill earlier; products take four times as many cycles there as on an A100, so that smaller
    # steps cost less (DSL 4.8.1).
    is_general, is_small = key.mask == "general", key.arch == "sm_120"
    if key.head_dim <= 128:
        if is_small:
            return _one_stage(32, packs_heads=packs_heads)
        # At the higher level, 24 bytes spill (DSL 4.8.1).
        return MmaSyncForward(
            48 if is_general else 64,
            value_stages=1,
            packs_heads=packs_heads,
            opt_level=3 if is_general else 1,
        )
    if key.head_dim <= 192:
        return _one_stage(32 if is_general and is_small else 48, packs_heads=packs_heads)
    opt_level = 1 if is_general and is_small else 3
    return _one_stage(32, warps=8, row_tiles=1, packs_heads=packs_heads, opt_level=opt_level)


def _one_stage(block_kv: int, **rest: Any) -> MmaSyncForward:
    """A forward that holds one block of keys and one of values at a time."""
    return MmaSyncForward(block_kv, stages=1, value_stages=1, **rest)


def _forward_with_bias(key: KernelKey) -> MmaSyncForward:
    """With a bias, which a thread holds beside its scores, a warp has only 16 rows."""
    if key.head_dim <= 128:
        return MmaSyncForward(64, warps=8, row_tiles=1)
    if key.head_dim <= 192:
        return _one_stage(64, warps=8, row_tiles=1)
    opt_level = 1 if _carries_pairs(key) else 3
    return _one_stage(32, warps=8, row_tiles=1, opt_level=opt_level)


@dataclass(frozen=True)
class FewQueries:
    """A forward kernel's tile and resources, for few query rows.

    Attributes:
        block_kv: keys per step, which the warps divide among them.
        warps: warps of a CTA.
        stages: blocks of keys and values that shared memory holds.
        q_in_registers: query fragments stay in registers; else each step reads them again.
        scales_always: each step scales O; else it does so in a loop of one turn or none.
    """

    block_kv: int
    warps: int = 4
    stages: int = 2
    q_in_registers: bool = True
    scales_always: bool = False

    @property
    def block_q(self) -> int:
        """Query rows of one tile."""
        return WARP_ROWS

    @property
    def own_keys(self) -> int:
        """Keys of a block that each warp owns."""
        return self.block_kv // self.warps

    @property
    def packs_heads(self) -> bool:
        """Whether query heads of a group share tiles (``Packing``): they always do."""
        return True

    @property
    def granule(self) -> int:
        """Rows of a head that stay together where heads share a tile: threads copy single rows."""
        return 1

    @property
    def is_persistent(self) -> bool:
        """Whether CTAs take several tiles: no, each takes one."""
        return False


def few_queries(key: KernelKey) -> FewQueries:
    """The configuration for few query rows.

    An SM's share of an H200's 4.8 TB/s is 36 KB in a microsecond, about the time that a load takes
    to arrive: at least that much has to be in flight. Blocks of 32 KB (24 with D = 96, 40 with
    192/128), one of which is loaded while the other is multiplied, leave room for two or three CTAs
    in 227 KB. With D = 256, two warps have 16 keys each. If the compiler carries pairs of floats,
    a loop that scales O spills 40 bytes.
    """
    if key.head_dim <= 64:
        return FewQueries(128)
    if key.head_dim <= 192:
        return FewQueries(64)
    return FewQueries(32, warps=2, q_in_registers=False, scales_always=_carries_pairs(key))


SWEEP_WORDS = 21
"""Words of its work that a backward's sweep uses, at most."""


@dataclass(frozen=True)
class MmaSyncBackward:
    """A backward kernel's tile and resources.

    Attributes:
        warps: warps of a CTA.
        row_tiles: tiles of 16 keys that a warp owns; they share what it reads of Q and dO.
        stages: blocks of queries and of dO that shared memory holds. With one, both are loaded once
            the last product of a step that reads either is done.
        parts: parts of a block of queries; their scores are computed one after the other.
        work_words: words of its work that a sweep reads from shared memory, not from registers.
        splits_columns: two warps own the same keys: each computes the scores of half of the queries
            and half of the columns of dK and dV. P and dS pass through shared memory.
        splits_results: two warps own the same keys: one computes P and dV, the other dS and dK. One
            part of a block is loaded at a time, and ``stages`` counts parts.
        num_consumers: groups of four warps that divide the columns of dQ where it is rounded.
        adds_four: dQ is added to global memory four floats at a time, not one.
        opt_level: the compiler's level. At 1 it reorders little and so needs fewer registers.
    """

    warps: int
    row_tiles: int = 1
    stages: int = 1
    parts: int = 1
    work_words: int = 0
    splits_columns: bool = False
    splits_results: bool = False
    num_consumers: int = 1
    adds_four: bool = False
    opt_level: int = 3

    @property
    def block_kv(self) -> int:
        """Keys of one tile."""
        return self.warp_rows * self.warps // self.sharing

    @property
    def column_shares(self) -> int:
        """Warps that share the columns of dK and dV of the same keys."""
        return 2 if self.splits_columns else 1

    @property
    def sharing(self) -> int:
        """Warps that own the same keys."""
        return 2 if self.splits_columns or self.splits_results else 1

    @property
    def warp_rows(self) -> int:
        """Keys that a warp owns, and queries whose dQ it computes at a time."""
        return WARP_ROWS * self.row_tiles

    def first_row(self, warp: Any) -> Any:
        """The first row of a tile that a warp owns; rows are keys."""
        if self.splits_results:
            return warp * self.warp_rows % self.block_kv
        return warp // self.sharing * self.warp_rows

    @property
    def loads(self) -> int:
        """Loads of a block of queries, one after the other."""
        return self.parts if self.splits_results else 1

    @property
    def loaded_rows(self) -> int:
        """Query rows that are loaded at a time."""
        return self.block_q // self.loads

    @property
    def block_q(self) -> int:
        """Query rows per step."""
        return 64

    @property
    def splits_keys(self) -> bool:
        """Whether warps own keys, with all columns of dK, of dV or of both."""
        return not self.splits_columns

    @property
    def splits_dq_rows(self) -> bool:
        """Whether groups of four warps split the rows of dQ: no, they split its columns."""
        return False


def mma_sync_backward(key: KernelKey) -> MmaSyncBackward:
    """The backward configuration for ``key``.

    A product of a warp's 16 keys with 16 queries reads 16 columns of both, 1024 bytes, for 8192
    operations, one of 32 keys with 32 queries twice as many bytes for four times as many. A step of
    64 keys by 64 queries with D = 128 takes an A100's tensor core 2,560 cycles, and its shared
    memory 3,200 cycles if warps own 16 keys, and 2,050 if pairs of warps own 32 and share columns.
    With D = 64, warps own 32 keys, with all columns. On 12.x, where products take four times as
    many cycles, eight warps of 16 keys hide more latency.

    A thread holds a share of dK and dV, 128 elements with D = 64 and 128, and 32 elements each of
    P and dP. KB of shared memory: D = 64: 32 for K and V, 16 for a block of Q and dO, 16 for dS;
    96: 24 + 24 + 16 for P and dS; 128: 32 + 32 + 16; so far two CTAs on 8.0, see
    ``mma_sync_forward``. 192/128: 40 + 40 + 16. With D = 256, dK and dV of 16 keys are 256 elements
    of a thread, so one warp has dK and another dV: 64 + two times 16 + 2 KB.
    """
    adds_four, is_small = _capability(key) >= 90, key.arch == "sm_120"
    bias_parts = 2 if key.has_bias else 1
    plain = MmaSyncBackward(8, work_words=SWEEP_WORDS, adds_four=adds_four)
    if is_small and key.head_dim <= 64:
        return replace(plain, stages=2, parts=2, work_words=0)
    if is_small and key.head_dim <= 96:
        return replace(plain, parts=bias_parts)
    if key.head_dim <= 64:
        # At the higher level, 8 bytes spill where nothing is masked (DSL 4.8.1).
        return replace(
            plain,
            warps=4,
            row_tiles=2,
            parts=2 * bias_parts,
            opt_level=1 if key.mask == "full" else 3,
        )
    if key.head_dim > 192:
        return replace(plain, stages=2, parts=4, splits_results=True, num_consumers=2)
    if key.head_dim > 128 or key.has_bias or is_small:
        # Otherwise 192/128, D = 128 on 12.x, and with a bias on 10.x, spill (DSL 4.8.1).
        return replace(plain, parts=bias_parts, splits_columns=True)
    return replace(plain, warps=4, row_tiles=2, splits_columns=True)


@dataclass(frozen=True)
class MmaSyncBiasGradient:
    """The tile and resources of a kernel that computes the gradient of a bias.

    Attributes:
        block_kv: keys of a tile.
        warps: warps of a CTA; each owns 16 query rows.
    """

    block_kv: int
    warps: int = 4
    packs_heads: bool = False
    is_persistent: bool = True

    @property
    def block_q(self) -> int:
        """Query rows of one tile."""
        return WARP_ROWS * self.warps

    @property
    def balances_parts(self) -> bool:
        """No: how many CTAs share a multiprocessor is not known where parts are chosen."""
        return False

    def first_row(self, warp: Any) -> Any:
        """The first row of a tile that a warp owns; rows are queries."""
        return warp * WARP_ROWS


def mma_sync_bias_gradient(key: KernelKey) -> MmaSyncBiasGradient:
    """The configuration for ``key``.

    KB of shared memory for Q and dO, K and V, and the bias: D = 64: 16 + 16 + 16, so that two CTAs
    share an SM; 96: 24 + 24 + 16; 128: 32 + 16 + 8; 192/128: 40 + 20 + 8; 256: 64 + 16 + 4. With 64
    keys, D = 128 spills 8 bytes, and 192/128 spills 24 (DSL 4.8.1).
    """
    if key.head_dim <= 96:
        return MmaSyncBiasGradient(block_kv=64)
    return MmaSyncBiasGradient(block_kv=32 if key.head_dim <= 192 else 16)
