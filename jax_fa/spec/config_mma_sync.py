"""The compile-time parameters of the kernels for mma.sync that are chosen for speed.

Tiles, warps and stages. Each choice comes with the counts behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        stages: blocks of keys, and of values, that shared memory holds. With one, keys are loaded
            while values are multiplied, and vice versa.
        q_in_registers: query fragments stay in registers; else each step reads them again.
        packs_heads: query heads of a group share tiles where that saves tiles (``Packing``).
        branches_steps: a step has separate code for blocks that hide keys (general masks only).
        opt_level: the compiler's level. At 1 it reorders little and so needs fewer registers.
    """

    block_kv: int
    warps: int = 4
    row_tiles: int = 2
    stages: int = 2
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

    99 KB of shared memory (what capabilities 8.6, 8.9 and 12.x have) hold Q and ``stages`` blocks
    of K and V, in KB: D = 64: 16 + 2 * 16, two CTAs at a time; 96: 24 + 2 * 24; 128: 32 + 2 * 32;
    192/128: 48 + 40; 256: 64 + 32.
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
        return MmaSyncForward(64, packs_heads=packs_heads)
    # A general mask takes registers: with 64 keys per step, some spill. On 12.x, pairs of floats
    # spill earlier; products take four times as many cycles there as on an A100, so that smaller
    # steps cost less (DSL 4.8.1).
    is_general, is_small = key.mask == "general", key.arch == "sm_120"
    if key.head_dim <= 128:
        block_kv = 48 if is_general else 32 if is_small else 64
        # With split keys on 12.x, 56 bytes would spill at the higher level (DSL 4.8.1).
        opt_level = 1 if is_small and key.is_split else 3
        return MmaSyncForward(block_kv, packs_heads=packs_heads, opt_level=opt_level)
    if key.head_dim <= 192:
        block_kv = 48 if is_general != is_small else 32 if is_general else 64
        return MmaSyncForward(block_kv, stages=1, packs_heads=packs_heads)
    return MmaSyncForward(
        32,
        warps=8,
        row_tiles=1,
        stages=1,
        packs_heads=packs_heads,
        opt_level=1 if is_general and is_small else 3,
    )


def _forward_with_bias(key: KernelKey) -> MmaSyncForward:
    """With a bias, which a thread holds beside its scores, a warp has only 16 rows."""
    if key.head_dim <= 128:
        return MmaSyncForward(64, warps=8, row_tiles=1)
    if key.head_dim <= 192:
        return MmaSyncForward(64, warps=8, row_tiles=1, stages=1)
    opt_level = 1 if _carries_pairs(key) else 3
    return MmaSyncForward(32, warps=8, row_tiles=1, stages=1, opt_level=opt_level)


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


SWEEP_WORDS = 20
"""Words of its work that a backward's sweep uses, at most."""


@dataclass(frozen=True)
class MmaSyncBackward:
    """A backward kernel's tile and resources.

    Attributes:
        warps: warps of a CTA; each owns 16 keys.
        stages: blocks of queries and of dO that shared memory holds. With one, each is loaded as
            soon as its last product of a step is done.
        parts: parts of a block of queries; their scores are computed one after the other.
        work_words: words of its work that a sweep reads from shared memory, not from registers.
        splits_results: two groups of four warps own the same keys: one computes P and dV, the other
            dS and dK. One part of a block is loaded at a time, and ``stages`` counts parts.
        opt_level: the compiler's level. At 1 it reorders little and so needs fewer registers.
    """

    warps: int
    stages: int = 1
    parts: int = 1
    work_words: int = 0
    splits_results: bool = False
    opt_level: int = 3

    @property
    def block_kv(self) -> int:
        """Keys of one tile."""
        return WARP_ROWS * self.warps // (2 if self.splits_results else 1)

    @property
    def own_rows(self) -> int:
        """Rows of a tile that the warps own; these are keys."""
        return self.block_kv

    @property
    def loaded_rows(self) -> int:
        """Query rows that are loaded at a time."""
        return self.block_q // (self.parts if self.splits_results else 1)

    @property
    def block_q(self) -> int:
        """Query rows per step."""
        return 64

    @property
    def num_consumers(self) -> int:
        """Groups of four warps; each computes its share of the columns of 64 rows of dQ."""
        return self.warps // 4

    @property
    def splits_keys(self) -> bool:
        """Whether warps own keys, with all columns of dK, of dV or of both: they always do."""
        return True

    @property
    def splits_dq_rows(self) -> bool:
        """Whether groups of four warps split the rows of dQ: no, they split its columns."""
        return False


def mma_sync_backward(key: KernelKey) -> MmaSyncBackward:
    """The backward configuration for ``key``.

    A thread holds (D + Dv) / 2 elements of dK and dV and, for n queries in a part of a block, n / 2
    each of P and dP: 128 + 16 + 16 with D = 128. KB of shared memory: D = 64: 32 for K and V,
    32 for two blocks of Q and dO, 16 for dS; 96: 48 + 24 + 16; 128: 32 + 32 + 8; 192/128:
    40 + 40 + 8. With D = 256, dK and dV of 16 keys are 256 elements of a thread, so two warps share
    them: 128 + 8 + 4 elements, and 64 + two times 16 + 2 KB.
    """
    parts = 2 if key.has_bias else 1
    if key.head_dim <= 64:
        return MmaSyncBackward(warps=8, stages=2, parts=parts)
    # With the work of a sweep in registers, up to 32 bytes spill (ptxas 13.0).
    if key.head_dim <= 96:
        return MmaSyncBackward(warps=8, parts=parts, work_words=SWEEP_WORDS)
    if key.head_dim > 192:
        return MmaSyncBackward(8, stages=2, parts=4, work_words=SWEEP_WORDS, splits_results=True)
    # Spills (DSL 4.8.1): with 192/128 and halves of a block, some 400 bytes under a general mask,
    # and 8 bytes under any mask on 12.x; with D = 128 on 12.x, 8 bytes under a causal mask at the
    # higher level.
    is_large, is_small = key.head_dim > 128, key.arch == "sm_120"
    is_tight = key.has_bias or (is_large and (key.mask == "general" or is_small))
    parts = 4 if is_tight else 2
    # On 10.x, 192/128 in bfloat16 with a bias spills 8 bytes at the higher level.
    is_tighter = key.has_bias and is_large and _capability(key) // 10 == 10
    is_small_causal = is_small and key.mask == "causal" and not is_large
    opt_level = 1 if is_tighter or is_small_causal else 3
    return MmaSyncBackward(4, parts=parts, work_words=SWEEP_WORDS, opt_level=opt_level)


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

    @property
    def own_rows(self) -> int:
        """Rows of a tile that the warps own; these are queries."""
        return self.block_q


def mma_sync_bias_gradient(key: KernelKey) -> MmaSyncBiasGradient:
    """The configuration for ``key``.

    KB of shared memory for Q and dO, K and V, and the bias: D = 64: 16 + 16 + 16, so that two CTAs
    share an SM; 96: 24 + 24 + 16; 128: 32 + 16 + 8; 192/128: 40 + 20 + 8; 256: 64 + 16 + 4. With 64
    keys, D = 128 spills 8 bytes, and 192/128 spills 24 (DSL 4.8.1).
    """
    if key.head_dim <= 96:
        return MmaSyncBiasGradient(block_kv=64)
    return MmaSyncBiasGradient(block_kv=32 if key.head_dim <= 192 else 16)
