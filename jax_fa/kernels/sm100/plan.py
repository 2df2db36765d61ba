"""Blackwell forward: who does what, over which data, in which memory. Read this first.

A CTA owns two query tiles of 128 rows and works on both against the same key blocks, so that the
tensor core multiplies for one while the softmax of the other is computed. Sixteen warps, one CTA
per SM: two warpgroups do the softmax of one tile each, one corrects the accumulators, and single
warps load, multiply and store. Heads of 256 have one query tile: Note [One query tile].

# Note [P overwrites S]
The probabilities P of a block take the upper half of the columns of its scores S: 16-bit elements
need half the columns of 32-bit ones. Three facts make that safe. (1) Lane r of tensor memory holds
row r, one softmax thread owns it, and has its whole row of S in registers before it stores any P.
(2) PV of a block, which reads P, and the next S in its place, which overwrites it, are issued in
that order by one warp to one tensor core, which works in order. (3) That S is issued only after
both parts of P have been waited for, so no thread still stores to it. Hence the edges s and p
need no "empty" barrier, and each query tile can start its next S without regard to the other.

# Note [A pair of CTAs]
With ``ctas`` = 2, two CTAs work on query blocks that see the same key/value head, be they of one
query head or of two, and each product is one for both: 256 rows of Q or P, of which each CTA has
its 128, times a block of which each CTA holds half, K by rows and V by columns, since both are cut
along the product's N. S, P and O of a CTA's rows are in its own tensor memory, so the softmax,
correction and store roles do not know the difference. Every CTA loads its halves; the first issues
the products. tensor_plan.py defines the arrivals; ``_PAIRED_HEADS`` in config_sm100.py says where
pairs pay (kernel design after FlashAttention-4, arXiv:2603.05451).

# Note [One row per thread]
The 32x32b shape of tcgen05.ld gives every thread one row, where Hopper's accumulator spreads a row
over four: maxima and sums need no shuffles, statistics one word per thread.

# Note [Rescaling late]
The maximum that P is relative to is raised only when a row's scores exceed it by more than
``RESCALE_LOG2`` in base 2. Until then P may reach 2 ** 8, which float16 and bfloat16 hold without
loss of precision, and the sum and the accumulator, in float32, are relative to the same maximum. So
the accumulator is seldom touched, and when it is, by the role correction, not by the softmax roles,
whose time bounds the kernel (kernel design after FlashAttention-4, arXiv:2603.05451).

# Note [One query tile]
With D = Dv = 256, O of two query tiles would fill tensor memory, so a CTA has one, and S is a block
of keys ahead of PV instead: the tensor core computes S of the next block during the softmax of this
one. A block takes it 2048 cycles, half of them for S. One softmax role needs 1024 cycles (1 - f) of
the special function unit, or 571 issue slots, and a few hundred of latency, so that it waits for
the tensor core and not the reverse. Two softmax roles would not shorten the bound, and they would
have to agree on a maximum: all P go into one O, so they are relative to one maximum, which would
pass from role to role with every block. Hence twelve warps, with registers to spare. Two things
differ from two query tiles. S of a block no longer follows PV of the block before, so the role
correction waits for that PV itself (edge o, by block) before it scales O; it has the 1024 cycles of
the next S for it. And K and V are read for 128 rows, not 256: 128 KB by block and SM, 64 bytes a
cycle, twice what other head sizes ask of the L2 cache; only CTAs that share a block could halve it.

# Note [Parts of a block]
The ring of keys and values has stages of 128 keys x 64 columns for heads of more than 128, a stage
of values being some rows of all Dv columns in as many bytes. Whole blocks would be 48 or 64 KB, two
of which fit: one in use, and the next arrives too late. Parts are freed one by one as the tensor
core is done with them. Keys are cut by columns, so that S still has 128 columns (with 64 its
operands would have to come from shared memory at 192 bytes a cycle of 128), values by rows, so that
PV keeps all of its columns. Out has a ring of two such stages for the same reason.
"""

from __future__ import annotations

from typing import NamedTuple

from jax_fa.kernels.edges import (
    SMEM_CAPACITY_BYTES,
    WARPGROUP,
    WARPS_PER_GROUP,
    Buffer,
    Edge,
    NamedBarrier,
    PlanError,
    Role,
)
from jax_fa.kernels.sm100.tensor_plan import TensorPlan, TmemRange, check
from jax_fa.spec import division
from jax_fa.spec.config_sm100 import BlackwellForward
from jax_fa.spec.key import KernelKey

FIRST_PAGE_BYTES = 1024
"""Mbarriers and single words share the first page of shared memory; swizzled tiles start behind."""
WORDS_BYTES = 8 + 4 + 4 * division.FOUND_WORDS
"""One more mbarrier, the address of tensor memory, what segments and a mask tell of a tile."""
ELEMENT_BYTES = 2
FLOAT_BYTES = 4
MMA_ROWS = 128
"""Rows of a CTA in one tcgen05.mma, and lanes of tensor memory: a query tile has as many."""
CHUNK = 32
"""Scores that are turned into probabilities, and stored, at a time."""
CHUNKS = 4
"""Chunks of a block of keys."""
HANDED_OVER_FIRST = 3
"""Chunks of P after which PV may start."""
RESCALE_LOG2 = 8.0
"""By as much scores may exceed the maximum that P is relative to: Note [Rescaling late]."""
IN_FLIGHT = 2
"""Blocks of S in tensor memory: of two query tiles, or two of one."""
SLAB = 16
"""Depth of one tcgen05.mma of 16-bit elements."""
O_COLUMNS = 16
"""Columns of O that the role correction has in registers at a time; twice as many spill."""
NARROW = 64
"""Columns of a row that heads of more than 128 are cut into, to be copied piece by piece."""
OUT_STAGES = 2


class Tiling(NamedTuple):
    """The cut of a kernel's arrays; all of it follows from the head sizes and the config.

    Attributes:
        q_tiles: query tiles of a CTA.
        s_stages: blocks of S that each query tile has in tensor memory.
        kv_columns: columns of 128 keys that a stage of the ring holds; of a pair, a CTA holds them
            of 64 keys.
        kv_rows: rows of values, all Dv columns, that a stage holds instead; of a pair, a CTA holds
            half of the columns.
        kv_stages: stages of the ring, as many as fit.
        k_parts: stages that a block of keys takes.
        v_parts: stages that a block of values takes.
        out_columns: columns of out that a stage of its ring holds.
        out_parts: stages that the out of a query tile takes.
    """

    q_tiles: int
    s_stages: int
    kv_columns: int
    kv_rows: int
    kv_stages: int
    k_parts: int
    v_parts: int
    out_columns: int
    out_parts: int


def tiling(key: KernelKey, config: BlackwellForward) -> Tiling:
    """The cut of the arrays of the kernel for ``key``."""
    q_tiles = config.block_q // MMA_ROWS
    is_wide = key.head_dim > MMA_ROWS
    kv_columns = NARROW if is_wide else key.head_dim
    out_columns = NARROW if is_wide else key.value_dim
    stats_bytes = q_tiles * MMA_ROWS * 2 * FLOAT_BYTES
    out_stages = 0 if key.is_split else OUT_STAGES
    q_and_out = MMA_ROWS * (q_tiles * key.head_dim + out_stages * out_columns) * ELEMENT_BYTES
    room = SMEM_CAPACITY_BYTES - FIRST_PAGE_BYTES - stats_bytes - q_and_out
    return Tiling(
        q_tiles=q_tiles,
        s_stages=IN_FLIGHT // q_tiles,
        kv_columns=kv_columns,
        kv_rows=config.block_kv * kv_columns // key.value_dim,
        kv_stages=room // (config.block_kv // config.ctas * kv_columns * ELEMENT_BYTES),
        k_parts=key.head_dim // kv_columns,
        v_parts=key.value_dim // kv_columns,
        out_columns=out_columns,
        out_parts=key.value_dim // out_columns,
    )


def forward_plan(key: KernelKey, config: BlackwellForward) -> TensorPlan:
    """The checked plan of the forward kernel for ``key`` under ``config``.

    Where keys are split, parts of results go from registers to global memory: the edge out is idle.

    Raises:
        PlanError: the configuration fits neither the hardware nor the kernel.
    """
    if config.block_kv != CHUNKS * CHUNK:
        raise PlanError(f"the roles take {CHUNKS * CHUNK} keys at a time, not {config.block_kv}")
    if config.ctas > 1 and key.mask != "full":
        raise PlanError(f"a pair works on one block of keys; under a {key.mask} mask CTAs differ")
    cut = tiling(key, config)
    q_bytes = MMA_ROWS * key.head_dim * ELEMENT_BYTES
    kv_bytes = config.block_kv // config.ctas * cut.kv_columns * ELEMENT_BYTES
    out_bytes = MMA_ROWS * cut.out_columns * ELEMENT_BYTES
    done = NamedBarrier("done", 1, WARPGROUP, "the role correction is done with tensor memory")
    plan = TensorPlan(
        roles=_roles(cut, config),
        edges=(
            Edge(
                "q",
                "load",
                "mma",
                cut.q_tiles,
                q_bytes,
                "a query tile in smem",
                "every S of it retired",
                "tma_umma",
            ),
            Edge(
                "kv",
                "load",
                "mma",
                cut.kv_stages,
                kv_bytes,
                "a part of keys or values in smem",
                "the products that read it retired",
                "tma_umma",
            ),
            *(edge for tile in range(cut.q_tiles) for edge in _tile_edges(tile, cut)),
            Edge("o", "mma", "correction", cut.q_tiles, 0, _O_FULL[cut.q_tiles], "", "umma"),
            Edge(
                "out",
                "correction",
                "store",
                OUT_STAGES,
                0,
                "out in smem",
                "read by TMA",
                "threads",
            ),
        ),
        buffers=(
            Buffer("q", cut.q_tiles * q_bytes),
            Buffer("kv", cut.kv_stages * kv_bytes),
            Buffer("out", 0 if key.is_split else OUT_STAGES * out_bytes),
            Buffer("stats", cut.q_tiles * 2 * MMA_ROWS * FLOAT_BYTES),
            Buffer("words", WORDS_BYTES),
        ),
        barriers=() if config.ctas > 1 else (done,),
        tmem=_tmem(key, cut, config.block_kv),
        ctas=config.ctas,
    )
    check(plan)
    return plan


_O_FULL = {1: "PV of a block retired", 2: "all PV of a tile retired"}
"""By number of query tiles: Note [One query tile]."""


def _roles(cut: Tiling, config: BlackwellForward) -> tuple[Role, ...]:
    """One softmax role by query tile, correction, and four roles of one warp each."""
    groups = [(f"softmax{tile}", config.softmax_registers) for tile in range(cut.q_tiles)]
    groups.append(("correction", config.correction_registers))
    first_single = len(groups) * WARPS_PER_GROUP
    singles = enumerate(("mma", "store", "load", "idle"), first_single)
    others, is_pair = config.other_registers, config.ctas > 1
    return (
        *(
            Role(name, range(i * WARPS_PER_GROUP, (i + 1) * WARPS_PER_GROUP), registers)
            for i, (name, registers) in enumerate(groups)
        ),
        *(
            Role(name, range(warp, warp + 1), others, leader_only=is_pair and name == "mma")
            for warp, name in singles
        ),
    )


def _tile_edges(tile: int, cut: Tiling) -> tuple[Edge, ...]:
    """The edges that each query tile has for itself."""
    softmax, stages = f"softmax{tile}", cut.s_stages
    return (
        Edge(
            f"s{tile}",
            "mma",
            softmax,
            stages,
            0,
            "S in TMEM, and the PV issued before it retired",
            "",
            "umma",
        ),
        Edge(
            f"p{tile}",
            softmax,
            "mma",
            stages,
            0,
            "three quarters of P in TMEM, all of S read",
            "",
            "threads",
        ),
        Edge(f"p_rest{tile}", softmax, "mma", stages, 0, "all of P in TMEM", "", "threads"),
        Edge(
            f"stats{tile}",
            softmax,
            "correction",
            1,
            0,
            "factor by which O shrinks; after the last block, sum and maximum",
            "read",
            "threads",
        ),
        Edge(
            f"scaled{tile}",
            "correction",
            "mma",
            1,
            0,
            "O relative to the maximum of P, or, for the first block, free",
            "",
            "threads",
        ),
    )


def _tmem(key: KernelKey, cut: Tiling, block_kv: int) -> tuple[TmemRange, ...]:
    """S0 S1, then O of each query tile; P over the upper half of its S."""
    p_cols = block_kv * ELEMENT_BYTES // FLOAT_BYTES
    why = "Note [P overwrites S]"
    scores = [TmemRange(f"s{i}", i * block_kv, block_kv) for i in range(IN_FLIGHT)]
    return (
        *scores,
        *(
            TmemRange(f"o{tile}", IN_FLIGHT * block_kv + tile * key.value_dim, key.value_dim)
            for tile in range(cut.q_tiles)
        ),
        *(TmemRange(f"p{i}", s.end - p_cols, p_cols, s.name, why) for i, s in enumerate(scores)),
    )
