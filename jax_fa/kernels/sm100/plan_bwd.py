"""Blackwell backward: its roles, the data they pass on, the memory they use. Read this first.

A CTA owns 128 keys and sweeps the queries of every head that shares the keys, in tiles of 128 rows
(where heads have 256, twice, in tiles of 64: Note [Two sweeps]). Scores are computed transposed,
keys by queries: lane r of tensor memory holds key r. So P and dS already lie where dV += P^T dO and
dK += dS^T Q read their A operand, and need not leave tensor memory. Only the product dQ = dS K,
which sums over keys, needs dS in shared memory. Sixteen warps, one CTA per SM: one warpgroup, the
role reduce, adds dQ to global memory; two, the role compute, turn S into P and dP into dS; single
warps multiply and load (kernel design after FlashAttention-4, arXiv:2603.05451). With D = 128, CTAs
work in pairs.

# Note [Halves]
The first warpgroup of the role compute works on the first half of a tile's queries, the second on
the rest: 64 of 128. P and dS take half the columns of the S and dP that they come from, each half
over its own half of those: columns 0-31 and 64-95. So a thread overwrites only what it alone reads,
and has read, and the warpgroups never wait for each other. The A operand then has a gap after its
first four slabs, which costs nothing: each tcgen05.mma takes one slab and its address.

# Note [P overwrites S]
S of the next tile, which overwrites P, is issued after dV, which reads P; the same warp issues
both, to a tensor core that works in order. S is also issued only after a wait for p, which says
that all of the last S has been read. Hence the edges s and p need no "empty" barrier; nor do dp and
ds, by the same argument with dK in place of dV.

# Note [dS in shared memory]
One buffer is enough: dP of a tile is issued after dQ of the previous tile, so whoever has waited
for dp knows that this dQ, the last reader of dS, has retired.

# Note [dQ overwrites dP]
From D = 96 on, the four accumulators and dQ do not fit in 512 columns together: dQ takes the place
of dP and dS. dK, which reads dS, is issued before dQ. The next dP is issued once dQ is in
registers: the role reduce can hold all of its row, and releases the columns before it writes any to
shared memory. With smaller heads dQ has columns of its own, and only the next dQ waits.

# Note [In turn]
With D/Dv of 192/128, dV and dK leave 192 columns, all of which dQ takes. S, then dP over the second
half of S, then dQ over both take turns there, and every product waits for what threads compute from
the one before. P lies over the first half of S, so that dP may overwrite the second half: the
second warpgroup stores its P over the first one's S, after a barrier of both that follows their
loads. This is serial, but it spares users the fallback, which builds the score matrix.

# Note [Two sweeps]
With D/Dv of 256/256, dV and dK of 128 keys would fill all 512 columns. Instead they share 256: a
CTA sweeps over its queries twice, in tiles of 64 rows. The first sweep computes S, P and dV. The
second computes S again, dP, dS, dQ and, once dV has been read, dK: six products instead of five. dQ
is transposed (dQ^T = K^T dS), so that its 256 rows are two accumulators of 64 columns; 64 rows of
dQ would run at half the rate of the tensor core and take 256 columns. The edges dv and dk need no
"empty" barrier: the first dK is issued after ds, the first dV after p, and the role compute signals
these only after it has read the accumulator that they overwrite.

Shared memory has room for the keys and four tiles of 32 KB, in two rings. In the first sweep, which
needs no values, one ring holds queries and the other dO, so that S is computed a tile ahead of dV,
alternately in the columns of S and of dP (two stages of the edges s and p). In the second, one ring
holds the two halves of the values, and dO and queries alternate in the other: a tile of queries
stays from S to dK, and the next arrives while the tensor core works on dQ and on the next dP. Hence
dP comes before S there, and as little as possible lies between S and dK.

# Note [A pair of CTAs]
With D = 128, one CTA would be bound by shared memory: 3328 cycles per tile, against 2560 of the
tensor core (model). So two CTAs of a cluster share their products (``.cta_group::2``). Each owns
128 of a tile's 256 keys, with their S, dP, dV and dK in its own tensor memory, and holds and reads
one half of every second operand: for S and dP half the rows of q and dO, 64; for dV and dK half
their columns (edges dout_columns, q_columns). So each CTA loads halves of both kinds.

dQ has 128 rows, one per query, and sums over the keys of both CTAs: each computes 64 of its rows,
from 64 columns of all 256 keys (k_columns), and from dS of 256 keys and 64 queries. The other CTA
computes half of that dS: its warpgroup with these queries writes it to ``ds_out`` and sends it
through distributed shared memory (edge half); then the role relay tells the first CTA, which issues
the products, that it has arrived (edge halves). Meanwhile the tensor core multiplies dK and the
next dP. Thus dQ of a query is added to global memory once per 256 keys.

# Note [dQ overwrites half of S]
64 rows of dQ lie in all 128 lanes, the first half of their columns in lanes 0 to 63, the second in
the others. So they take 64 columns of tensor memory: the second half of S. P takes the first half,
its own two halves side by side, so the second warpgroup stores its P over the first one's S, after
a barrier of both that follows their loads (``read``). dQ is issued after p, which says that all of
S has been read; the next S, which overwrites P and dQ, is issued after dV, and once dQ is in
registers. Two warps of the role reduce share 32 rows of dQ, each with one half of their columns.
"""

from __future__ import annotations

from jax_fa.kernels.edges import (
    WARP,
    Buffer,
    Edge,
    NamedBarrier,
    PlanError,
    Role,
)
from jax_fa.kernels.sm100.plan import ELEMENT_BYTES, FLOAT_BYTES, MMA_ROWS
from jax_fa.kernels.sm100.tensor_plan import TMEM_COLS, TensorPlan, TmemRange, check
from jax_fa.spec import division
from jax_fa.spec.config_sm100 import BlackwellBackward
from jax_fa.spec.key import KernelKey

STATS = 2
"""Floats per query row: log2-sum-exp2 and delta."""
REDUCE_STAGES = 2
"""Pieces of dQ in shared memory, per warp."""
REDUCE_WARPS = 4
VALUE_HALVES = 2
"""Halves by columns that two sweeps load the values in; each is as large as a query tile."""
WORDS_BYTES = 8 + 4 + 4 * division.FOUND_WORDS
"""One more mbarrier, the address of tensor memory, what segments and a mask say about a tile."""
STATS_STAGES = 2
"""Stages of the query rows' statistics in a pair, so that the next are there when S is."""


def dq_overlays(key: KernelKey) -> str:
    """The accumulators whose columns dQ takes: "" for none, "dp", or "s" for both S and dP.

    Notes [dQ overwrites dP], [In turn], [Two sweeps].
    """
    if key.value_dim > MMA_ROWS:
        return ""
    accumulators = key.head_dim + key.value_dim
    if accumulators + 2 * MMA_ROWS + key.head_dim <= TMEM_COLS:
        return ""
    return "dp" if accumulators + 2 * MMA_ROWS <= TMEM_COLS else "s"


def backward_plan(key: KernelKey, config: BlackwellBackward) -> TensorPlan:
    """The checked plan of the backward kernel for ``key`` under ``config``."""
    if config.ctas == 2:
        return _pair_plan(key, config)
    key_bytes, value_bytes = key.head_dim * ELEMENT_BYTES, key.value_dim * ELEMENT_BYTES
    dq_bytes = REDUCE_STAGES * MMA_ROWS * config.reduce_columns * FLOAT_BYTES
    others, read = config.other_registers, "read" if config.sweeps == 1 else ""
    plan = TensorPlan(
        roles=(
            Role("reduce", range(0, 4), config.reduce_registers),
            Role("compute", range(4, 12), config.compute_registers),
            Role("mma", range(12, 13), others),
            Role("load", range(13, 14), others),
            Role("idle", range(14, 16), others),
        ),
        edges=(
            *(_loaded_edges if config.sweeps == 1 else _swept_edges)(key, config),
            *_score_edges(config),
            *_gradient_edges(read),
        ),
        buffers=(
            Buffer("k", MMA_ROWS * key_bytes),
            *([Buffer("v", MMA_ROWS * value_bytes)] if config.sweeps == 1 else []),
            Buffer("q", config.q_stages * config.block_q * key_bytes),
            Buffer("dout", config.dout_stages * config.block_q * value_bytes),
            Buffer("ds", MMA_ROWS * config.block_q * ELEMENT_BYTES),
            Buffer("dq", dq_bytes),
            Buffer("stats", config.q_stages * _stats_bytes(config)),
            Buffer("words", WORDS_BYTES),
        ),
        barriers=_barriers(key),
        tmem=_tmem(key, config),
    )
    check(plan)
    return plan


def _stats_bytes(config: BlackwellBackward) -> int:
    return config.block_q * STATS * FLOAT_BYTES


def _loaded_edges(key: KernelKey, config: BlackwellBackward) -> tuple[Edge, ...]:
    """The edges of the operands that TMA loads, and of the statistics of query rows."""
    key_bytes, value_bytes = key.head_dim * ELEMENT_BYTES, key.value_dim * ELEMENT_BYTES
    k, v = MMA_ROWS * key_bytes, MMA_ROWS * value_bytes
    q, dout = config.block_q * key_bytes, config.block_q * value_bytes
    q_stages, dout_stages = config.q_stages, config.dout_stages
    return (
        _operand_edge("k", 1, k, "keys in smem", "last dQ retired"),
        _operand_edge("v", 1, v, "values in smem", "last dP retired"),
        _operand_edge("q", q_stages, q, "queries in smem", "dK retired"),
        _operand_edge("dout", dout_stages, dout, "dO in smem", "dV retired"),
        _stats_edge(q_stages, config),
    )


def _swept_edges(key: KernelKey, config: BlackwellBackward) -> tuple[Edge, ...]:
    """``_loaded_edges`` for two sweeps; in the second sweep q and dout hold other data."""
    k = MMA_ROWS * key.head_dim * ELEMENT_BYTES
    rows = config.block_q * key.head_dim * ELEMENT_BYTES
    q_stages, dout_stages = config.q_stages, config.dout_stages
    q, q_empty = "queries in smem; in the second sweep, dO and queries", "S, dP or dK retired"
    dout, dout_empty = "dO in smem; then the halves of the values", "dV or last dP retired"
    return (
        _operand_edge("k", 1, k, "keys in smem", "last dQ retired"),
        _operand_edge("q", q_stages, rows, q, q_empty),
        _operand_edge("dout", dout_stages, rows, dout, dout_empty),
        _stats_edge(q_stages, config),
    )


def _operand_edge(data: str, stages: int, stage_bytes: int, full: str, empty: str) -> Edge:
    return Edge(
        data,
        "load",
        "mma",
        stages=stages,
        stage_bytes=stage_bytes,
        full=full,
        empty=empty,
        kind="tma_umma",
    )


def _stats_edge(stages: int, config: BlackwellBackward) -> Edge:
    return Edge(
        "stats",
        "load",
        "compute",
        stages=stages,
        stage_bytes=_stats_bytes(config),
        full="lse2, delta in smem",
        empty="read",
    )


def _product_edge(data: str, consumer: str, full: str, empty: str = "", stages: int = 1) -> Edge:
    """The edge of a result in tensor memory."""
    return Edge(
        data, "mma", consumer, stages=stages, stage_bytes=0, full=full, empty=empty, kind="umma"
    )


def _signal_edge(data: str, producer: str, full: str, stages: int = 1) -> Edge:
    """The edge by which threads tell the role mma something, without an "empty" barrier."""
    return Edge(
        data, producer, "mma", stages=stages, stage_bytes=0, full=full, empty="", kind="threads"
    )


def _score_edges(config: BlackwellBackward) -> tuple[Edge, ...]:
    """The edges between tensor core and threads, passed once per query tile and sweep."""
    stages = config.sweeps
    return (
        _product_edge("s", "compute", "S in TMEM", stages=stages),
        _signal_edge("p", "compute", "P in TMEM, all of S read", stages=stages),
        _product_edge("dp", "compute", "dP in TMEM; the last dQ retired"),
        _signal_edge("ds", "compute", "dS in TMEM and smem, all of dP read"),
    )


def _gradient_edges(read: str) -> tuple[Edge, ...]:
    """The edges of the gradients; ``read`` is the promise ``Edge.empty`` of dV and dK."""
    return (
        _product_edge("dq", "reduce", "dQ in TMEM", "dQ in registers"),
        _product_edge("dv", "compute", "all dV of a tile retired", read),
        _product_edge("dk", "compute", "all dK of a tile retired", read),
    )


def _barriers(key: KernelKey) -> tuple[NamedBarrier, ...]:
    done = NamedBarrier("done", 1, 12 * WARP, "all that is read of tensor memory has been")
    if dq_overlays(key) != "s":
        return (done,)
    return done, NamedBarrier("read", 2, 8 * WARP, "all of S is in registers: Note [In turn]")


def _tmem(key: KernelKey, config: BlackwellBackward) -> tuple[TmemRange, ...]:
    """S dV dP dK, dQ if there is room, and the halves of P and dS over those of S and dP."""
    d, dv, columns, half = key.head_dim, key.value_dim, config.block_q, config.half_q
    if config.sweeps == 2:
        return _tmem_of_sweeps(key, config)
    if dq_overlays(key) == "s":
        return _tmem_in_turn(key, config)
    dp = columns + dv
    dk = dp + columns
    dq, ds_over = TmemRange("dq", dk + d, d), "dp"
    if dq_overlays(key) == "dp":
        dq, ds_over = TmemRange("dq", dp, d, "dp", "Note [dQ overwrites dP]"), "dq"
    return (
        TmemRange("s", 0, columns),
        TmemRange("dv", columns, dv),
        TmemRange("dp", dp, columns),
        TmemRange("dk", dk, d),
        dq,
        *_halves(config, "p", 0, half, "s", "Note [P overwrites S]"),
        *_halves(config, "ds", dp, dp + half, ds_over, "Note [P overwrites S]"),
    )


def _tmem_in_turn(key: KernelKey, config: BlackwellBackward) -> tuple[TmemRange, ...]:
    """Columns of dV and dK, then those that S, dP and dQ take in turn."""
    d, dv, columns, half = key.head_dim, key.value_dim, config.block_q, config.half_q
    s, dp, why = dv + d, dv + d + half, "Note [In turn]"
    return (
        TmemRange("dv", 0, dv),
        TmemRange("dk", dv, d),
        TmemRange("dq", s, d),
        TmemRange("s", s, columns, "dq", why),
        TmemRange("dp", dp, columns, "s", why),
        *_halves(config, "p", s, s + _half_words(config), "s", why),
        *_halves(config, "ds", dp, dp + half, "dp", "Note [P overwrites S]"),
    )


def _tmem_of_sweeps(key: KernelKey, config: BlackwellBackward) -> tuple[TmemRange, ...]:
    """Columns that dV and dK share, S, dP, and transposed dQ, its halves of 128 rows abreast."""
    d, columns, half = key.head_dim, config.block_q, config.half_q
    s, dp, dq = d, d + columns, d + 2 * columns
    return (
        TmemRange("dv", 0, d),
        TmemRange("dk", 0, d, "dv", "Note [Two sweeps]"),
        TmemRange("s", s, columns),
        TmemRange("dp", dp, columns),
        TmemRange("dq", dq, columns * d // MMA_ROWS),
        *_halves(config, "p", s, s + half, "s", "Note [P overwrites S]"),
        *_halves(config, "ds", dp, dp + half, "dp", "Note [P overwrites S]"),
    )


def _half_words(config: BlackwellBackward) -> int:
    return config.half_q * ELEMENT_BYTES // FLOAT_BYTES


def _halves(
    config: BlackwellBackward, name: str, first: int, second: int, over: str, why: str
) -> tuple[TmemRange, ...]:
    """Both halves of P or dS, from these columns on; ``why`` is the note that allows ``over``."""
    starts, columns = (first, second), _half_words(config)
    return tuple(
        TmemRange(f"{name}{i}", start, columns, over, why) for i, start in enumerate(starts)
    )


def _pair_plan(key: KernelKey, config: BlackwellBackward) -> TensorPlan:
    """The plan of two CTAs that share their products: Note [A pair of CTAs]."""
    sizes = key.head_dim, key.value_dim, config.block_q, config.block_kv
    if sizes != (MMA_ROWS, MMA_ROWS, MMA_ROWS, 2 * MMA_ROWS):
        raise PlanError(f"a pair takes D, Dv, block_q, block_kv of 128, 128, 128, 256, not {sizes}")
    tile = MMA_ROWS * MMA_ROWS * ELEMENT_BYTES
    others = config.other_registers
    plan = TensorPlan(
        roles=(
            Role("reduce", range(0, 4), config.reduce_registers),
            Role("compute", range(4, 12), config.compute_registers),
            Role("mma", range(12, 13), others, leader_only=True),
            Role("load", range(13, 14), others),
            Role("relay", range(14, 15), others),
            Role("idle", range(15, 16), others),
        ),
        edges=(
            *_pair_loaded_edges(config, tile),
            *_pair_score_edges(tile // 2),
            *_gradient_edges("read"),
        ),
        buffers=(
            *(Buffer(name, tile) for name in ("k", "v", "k_columns")),
            *(Buffer(name, tile // 2) for name in ("q", "q_columns", "dout", "dout_columns")),
            Buffer("ds", tile),
            Buffer("ds_out", tile // 2),
            Buffer("dq", REDUCE_STAGES * MMA_ROWS * config.reduce_columns * FLOAT_BYTES),
            Buffer("stats", STATS_STAGES * _stats_bytes(config)),
            Buffer("words", WORDS_BYTES),
        ),
        barriers=(
            NamedBarrier("read", 1, 8 * WARP, "all of S is in registers"),
            NamedBarrier("out", 2, 4 * WARP, "what is sent of dS is in smem"),
        ),
        tmem=_tmem_of_pair(config),
        ctas=2,
    )
    check(plan)
    return plan


def _pair_loaded_edges(config: BlackwellBackward, tile: int) -> tuple[Edge, ...]:
    """``_loaded_edges`` for each CTA of a pair, in the order in which the role load fills them."""
    half, k_columns = tile // 2, "64 columns of the pair's keys in smem"
    return (
        _operand_edge("k", 1, tile, "keys in smem", "last S retired"),
        _operand_edge("q", 1, half, "64 queries in smem", "S retired"),
        _stats_edge(STATS_STAGES, config),
        _operand_edge("v", 1, tile, "values in smem", "last dP retired"),
        _operand_edge("dout", 1, half, "64 rows of dO in smem", "dP retired"),
        _operand_edge("dout_columns", 1, half, "64 columns of dO in smem", "dV retired"),
        _operand_edge("k_columns", 1, tile, k_columns, "last dQ retired"),
        _operand_edge("q_columns", 1, half, "64 columns of q in smem", "dK retired"),
    )


def _pair_score_edges(half: int) -> tuple[Edge, ...]:
    """The edges between tensor core and threads in a pair, and from CTA to CTA."""
    return (
        _product_edge("s", "compute", "S in TMEM"),
        _signal_edge("p", "compute", "P in TMEM, all of S read"),
        _product_edge("dp", "compute", "dP in TMEM"),
        Edge(
            "ds",
            "compute",
            "mma",
            stages=1,
            stage_bytes=0,
            full="dS in TMEM, own half in smem, all of dP read",
            empty="dQ retired",
            kind="threads_umma",
        ),
        Edge(
            "half",
            "compute",
            "relay",
            stages=1,
            stage_bytes=half,
            full="the other CTA's half of dS in smem",
            empty="",
        ),
        _signal_edge("halves", "relay", "both CTAs have both halves"),
    )


def _tmem_of_pair(config: BlackwellBackward) -> tuple[TmemRange, ...]:
    """S dV dP dK of a CTA's 128 keys; P, and dQ of 64 queries, share the columns of S."""
    why = "Note [dQ overwrites half of S]"
    dv, dp, dk, half = MMA_ROWS, 2 * MMA_ROWS, 3 * MMA_ROWS, config.half_q
    return (
        TmemRange("s", 0, MMA_ROWS),
        TmemRange("dv", dv, MMA_ROWS),
        TmemRange("dp", dp, MMA_ROWS),
        TmemRange("dk", dk, MMA_ROWS),
        TmemRange("dq", half, half, "s", why),
        *_halves(config, "p", 0, _half_words(config), "s", why),
        *_halves(config, "ds", dp, dp + half, "dp", "Note [P overwrites S]"),
    )
