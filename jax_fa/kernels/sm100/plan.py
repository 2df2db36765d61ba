"""Blackwell forward: who does what, over which data, in which memory. Read this first.

A CTA owns two query tiles of 128 rows and works on both against the same key blocks, so that the
tensor core multiplies for one while the softmax of the other is computed. It has sixteen warps and
an SM to itself: two warpgroups do the softmax of one tile each, one rescales the accumulators, and
single warps load, multiply and store. Heads of 256 have one query tile: Note [One query tile].

# Note [P overwrites S]
The probabilities P of a block take the upper half of the columns of its scores S: 16-bit elements
need half the columns of 32-bit ones. Three facts make that safe. (1) Lane r of tensor memory holds
row r. One softmax thread owns it, and has its whole row of S in registers before it stores any P.
(2) PV of a block reads P, and the next S in the same columns overwrites P. One warp issues them in
that order to one tensor core, which works in order. (3) That S is issued only after the wait for
both parts of P, so no thread is still storing P. Hence the edges s and p need no "empty" barrier,
and each query tile can start its next S independently of the other.

# Note [A pair of CTAs]
With ``ctas`` = 2, two CTAs work on query blocks of one key/value head, whether they are of one
query head or of two, and share every product: 256 rows of Q or P, 128 of each CTA, times a block of
K or V, of which each CTA holds half. K is cut by rows and V by columns: both along the product's N.
S, P and O of a CTA's rows are in its own tensor memory, so the softmax, correction and store roles
work as they do without a pair. Every CTA loads its halves; the first issues the products.
tensor_plan.py defines the arrivals; ``_PAIRED_HEADS`` in config_sm100.py says where pairs pay
(kernel design after FlashAttention-4, arXiv:2603.05451).

# Note [One row per thread]
The 32x32b shape of tcgen05.ld gives every thread one row, whereas Hopper's accumulator spreads a
row over four threads. So maxima and sums need no shuffles, and statistics take a word per thread.

# Note [Rescaling late]
The maximum that P is relative to is raised only when a row's scores exceed it by more than
``RESCALE_LOG2`` in base 2. Until then P may reach 2 ** 8, which float16 and bfloat16 hold without
loss of precision, and the sum and the accumulator, in float32, are relative to the same maximum. So
the accumulator is seldom rescaled. The role correction does that, not the softmax roles, whose time
bounds the kernel (kernel design after FlashAttention-4, arXiv:2603.05451).

# Note [One query tile]
With D = Dv = 256, O of two query tiles would fill tensor memory, so a CTA has one query tile, and S
is a block of keys ahead of PV: the tensor core computes S of the next block during the softmax of
this one. A block takes the tensor core 2048 cycles, half of them for S. One softmax role needs 1024
cycles (1 - f) of the special function unit, or 571 issue slots, and a few hundred cycles of
latency, so it waits for the tensor core and not the reverse. Two softmax roles would not lower the
bound, and would have to agree on a maximum: all P go into one O and are relative to one maximum,
which would pass from role to role with every block. Hence twelve warps, with registers to spare.
Two things differ from two query tiles. S of a block no longer follows PV of the block before, so
the role correction waits for that PV itself (edge o, per block) before it scales O; it has the 1024
cycles of the next S to do so. And K and V are read for 128 rows, not 256: 128 KB per block and SM,
64 bytes a cycle, twice the L2 traffic of other head sizes; only CTAs that share a block halve it.

# Note [Parts of a block]
For heads of more than 128, a stage of the ring of keys and values holds 128 keys x 64 columns of K,
or as many bytes of V: some rows with all Dv columns. Whole blocks would take 48 or 64 KB, and two
would fit: one would be in use, and the next would arrive too late. Parts are freed one by one as
the tensor core finishes with them. Keys are cut by columns, so that S still has 128 columns (with
64, its operands would need 192 bytes a cycle of shared memory, which delivers 128), values by rows,
so that PV keeps all of its columns. Out has a ring of two such stages for the same reason.
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
"""Mbarriers and single words share the first page of shared memory; swizzled tiles come after."""
WORDS_BYTES = 8 + 4 + 4 * division.FOUND_WORDS
"""One more mbarrier, the address of tensor memory, what segments and a mask say about a tile."""
ELEMENT_BYTES = 2
FLOAT_BYTES = 4
MMA_ROWS = 128
"""Rows of a CTA in one tcgen05.mma, lanes of tensor memory, and rows of a query tile."""
CHUNK = 32
"""Scores of a row that are turned into probabilities and stored at a time."""
CHUNKS = 4
"""Chunks of a block of keys."""
HANDED_OVER_FIRST = 3
"""Chunks of P after which PV may start."""
RESCALE_LOG2 = 8.0
"""How far scores may exceed the maximum that P is relative to: Note [Rescaling late]."""
IN_FLIGHT = 2
"""Blocks of S in tensor memory: one of each of two query tiles, or two of a single one."""
SLAB = 16
"""Depth of one tcgen05.mma of 16-bit elements."""
O_COLUMNS = 16
"""Columns of O that the role correction holds in registers at a time; twice as many spill."""
NARROW = 64
"""Columns of the pieces into which rows of heads of more than 128 are cut for copies."""
OUT_STAGES = 2


class Tiling(NamedTuple):
    """How a kernel's arrays are cut; all of it follows from the key and the config.

    Attributes:
        q_tiles: query tiles of a CTA.
        s_stages: blocks of S that each query tile has in tensor memory.
        kv_columns: columns that a stage of the ring holds, of 128 keys, or of 64 keys in each CTA
            of a pair.
        kv_rows: rows of values that a stage holds instead, with all Dv columns, or half of them in
            each CTA of a pair.
        kv_stages: stages of the ring, as many as fit.
        k_parts: stages that a block of keys takes.
        v_parts: stages that a block of values takes.
        out_columns: columns of ``out`` that a stage of its ring holds.
        out_parts: stages that ``out`` of a query tile takes.
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
    """How the arrays of the kernel for ``key`` are cut under ``config``."""
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

    Where keys are split, partial results go from registers to global memory; edge out is unused.

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
"""What a passed full barrier of the edge o promises, by query tiles: Note [One query tile]."""


def _roles(cut: Tiling, config: BlackwellForward) -> tuple[Role, ...]:
    """One softmax role per query tile, correction, and four roles of one warp each."""
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
    """The edges of one query tile."""
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
