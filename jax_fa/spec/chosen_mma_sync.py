"""The configurations of the kernels for mma.sync, chosen for speed: tiles, warps, stages.

Each choice comes with the counts behind it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax_fa.spec.arch import arch_of_target, capability_number
from jax_fa.spec.config_mma_sync import (
    SWEEP_WORDS,
    FewQueries,
    MmaSyncBackward,
    MmaSyncBiasGradient,
    MmaSyncForward,
    smem_capacity,
)
from jax_fa.spec.key import KernelKey


def _capability(key: KernelKey) -> int:
    return capability_number(arch_of_target(key.arch).capabilities[0])


def _is_roomy(key: KernelKey) -> bool:
    """Whether an SM has 164 KB of shared memory or more, and not 100."""
    return smem_capacity(key.arch) > 100 * 1024


def _carries_pairs(key: KernelKey) -> bool:
    """Whether the compiler carries floats through loops in pairs, which spill earlier.

    It does for targets of 10.0 and later (DSL 4.8.1), which have instructions for pairs.
    """
    return _capability(key) >= 100


def mma_sync_forward(key: KernelKey) -> MmaSyncForward:
    """The forward configuration for ``key``.

    One product of 16 rows reads 256 bytes of K or V for 4096 operations. An A100's SM does 2048
    operations and reads 128 bytes per cycle, so warps of 16 rows would keep shared memory as busy
    as the tensor core; with 32 rows it is half as busy. A thread's registers then hold D elements
    of O and ``block_kv`` scores: 128 + 64 with D = 128, 64 + 128 with D = 64, where 128 keys a step
    are 5 % faster than 64 with queries in registers: fewer instructions, fewer barriers (H200,
    sm_90 build). D = 256 leaves room for 16 rows only.

    An SM needs eight such warps, two CTAs: products of one CTA run beside exponentials of the other
    (H200, sm_90 build, one CTA per SM against two, D = 96 and 128: 22 to 38 % slower). Registers
    allow two; shared memory, with about 1 KB per CTA more than the tiles take, has to: 164 KB of
    8.0, 100 KB of 8.6, 8.9 and 12.x. KB of Q, keys and values: D = 64: 16 + 16 + 16, two CTAs
    everywhere; 96: 24 + 12 + 12, likewise; 128: 32 + 32 + 16, two on 8.0; 192/128: 48 + 18 + 12,
    two on 8.0. With D = 256, a CTA has eight warps, and 64 + 32 + 32 on 8.0, which is 1.16 to 1.24
    times as fast as 64 + 16 + 16, which fits in 100 KB (H200, sm_90 build).

    For 100 KB, D = 128 has tiles of its own, as those of 8.0 leave room for one CTA. Two CTAs with
    32 + 8 + 8 KB are 1.10 to 1.18 times as fast as that one, and with a window of 256 keys 1.25 to
    1.32. One CTA of eight warps with 64 + 16 + 16 KB is 1.20 to 1.24 times as fast where nothing is
    masked, but no faster with that window. (H200, sm_90 build, as many CTAs per SM as 100 KB hold;
    on 12.x, the eight warps spill.)
    """
    packs_heads = key.is_split
    if key.has_bias:
        return _forward_with_bias(key)
    if key.head_dim <= 64:
        if key.mask != "general":
            return _one_stage(128, packs_heads=packs_heads, opt_level=1)
        # H100 (sm_90 build): a branch takes 4 to 6 % less time. With D = 128, 8 bytes spill, and
        # so they do with a soft cap, if the compiler carries pairs and optimises more.
        opt_level = 1 if key.has_soft_cap and _carries_pairs(key) else 3
        return MmaSyncForward(
            64,
            q_in_registers=True,
            packs_heads=packs_heads,
            branches_steps=True,
            opt_level=opt_level,
        )
    if key.head_dim <= 96:
        return _one_stage(64, packs_heads=packs_heads)
    is_roomy = _is_roomy(key)
    is_tight = key.mask == "general" and _carries_pairs(key)
    if key.head_dim <= 128:
        if key.arch == "sm_86" and key.mask == "full":
            return _one_stage(64, warps=8, opt_level=1)
        if not is_roomy:
            return _one_stage(32, packs_heads=packs_heads, opt_level=1 if is_tight else 3)
        # A general mask takes registers: with 64 keys per step, some spill (DSL 4.8.1).
        block_kv = 48 if key.mask == "general" else 64
        return MmaSyncForward(block_kv, value_stages=1, packs_heads=packs_heads, opt_level=1)
    if key.head_dim <= 192:
        return _one_stage(48, packs_heads=packs_heads, opt_level=1)
    return _one_stage(
        64 if is_roomy else 32,
        warps=8,
        row_tiles=1,
        packs_heads=packs_heads,
        opt_level=1 if is_tight else 3,
    )


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


def mma_sync_backward(key: KernelKey) -> MmaSyncBackward:
    """The backward configuration for ``key``.

    A product of a warp's 16 keys with 16 queries reads 16 columns of both, 1024 bytes, for 8192
    operations, one of 32 keys with 32 queries twice as many bytes for four times as many. A step of
    64 keys by 64 queries with D = 128 takes an A100's tensor core 2,560 cycles, and its shared
    memory 3,200 cycles if warps own 16 keys, and 2,050 if pairs of warps own 32 and share columns.
    With D = 64, warps own 32 keys, with all columns. On 12.x, where products take four times as
    many cycles, eight warps of 16 keys hide more latency.

    With D = 128, a CTA of eight warps on 8.0 has 128 keys, not 64: so Q and dO are loaded, and dQ
    is added to memory, half as often. Beside two CTAs of 64 keys, forward and backward together are
    1.03 to 1.08 times as fast under a full mask and 0.99 to 1.06 times under a causal one. General
    masks keep 64 keys: windows would take 2 to 9 % longer (H200, sm_90 build, 512 to 16384 tokens).

    D = 96 has eight warps of 16 keys; before 12.x, a bias makes them share columns. Where an SM
    holds one CTA, as on 8.6 and 8.9, they make forward and backward together 1.10 to 1.19 times as
    fast as four warps that own 32 keys and share columns; where it holds two CTAs of these, as on
    8.0, 0.91 to 1.03 times (H200, sm_90 build, no bias).

    A thread holds a share of dK and dV, 128 elements with D = 64 and 128, and 32 elements each of
    P and dP. KB of shared memory: D = 64: 32 for K and V, 16 for a block of Q and dO, 16 for dS;
    96: 48 + 24 + 16; 128: 32 + 32 + 16 for P and dS, or 64 + two times 32 + 32. Of 64, and of 128
    with 64 keys, two CTAs fit on 8.0, see ``mma_sync_forward``. 192/128: 40 + 40 + 16; a second
    stage of Q and dO makes it 2 to 5 % slower (H200, sm_90 build). With D = 256, dK and dV of 16
    keys are 256 elements of a thread, so one warp has dK and another dV: 64 + 64 + 8 KB; or, for
    100 KB, 64 + two times 16 + 2, which takes 1.36 to 1.44 times as long (the same build). With a
    bias, 8.6 and 8.9 run the kernels of 8.0.
    """
    adds_four, is_12 = _capability(key) >= 90, _capability(key) >= 120
    bias_parts = 2 if key.has_bias else 1
    plain = MmaSyncBackward(8, work_words=SWEEP_WORDS, adds_four=adds_four)
    if is_12 and key.head_dim <= 64:
        return replace(plain, stages=2, parts=2, work_words=0)
    if 64 < key.head_dim <= 96 and (is_12 or not key.has_bias):
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
        whole = replace(plain, splits_results=True, num_consumers=2)
        has_room = _is_roomy(key) and not key.has_bias
        return whole if has_room else replace(whole, stages=2, parts=4)
    if key.head_dim > 128 or key.has_bias or is_12:
        # Otherwise 192/128, D = 128 on 12.x, and with a bias on 10.x, spill (DSL 4.8.1).
        return replace(plain, parts=bias_parts, splits_columns=True)
    pairs = replace(plain, row_tiles=2, splits_columns=True)
    has_wide_tiles = _is_roomy(key) and key.mask != "general"
    return replace(pairs, stages=2) if has_wide_tiles else replace(pairs, warps=4)


def mma_sync_bias_gradient(key: KernelKey) -> MmaSyncBiasGradient:
    """The configuration for ``key``.

    KB of shared memory for Q and dO, K and V, and the bias: D = 64: 16 + 16 + 16, so that two CTAs
    share an SM; 96: 24 + 24 + 16; 128: 32 + 16 + 8; 192/128: 40 + 20 + 8; 256: 64 + 16 + 4. With 64
    keys, D = 128 spills 8 bytes, and 192/128 spills 24 (DSL 4.8.1).
    """
    if key.head_dim <= 96:
        return MmaSyncBiasGradient(block_kv=64)
    return MmaSyncBiasGradient(block_kv=32 if key.head_dim <= 192 else 16)
