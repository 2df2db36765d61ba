"""Blackwell backward: who does what, over which data, in which memory. Read this first.

A CTA owns 128 keys and lets query tiles of 128 rows pass by (of 64, twice, where heads have 256:
Note [Two sweeps]), those of every head that shares the keys. Scores are computed transposed, keys
by queries: lane r of tensor memory holds key r, so P and dS lie there as dV += P^T dO and dK +=
dS^T Q want their A operand, and neither leaves tensor memory for them. Only dQ = dS K, which sums
over keys, wants dS in shared memory. Sixteen warps, one CTA per SM: one warpgroup takes dQ away,
two turn S into P and dP into dS, single warps multiply and load (kernel design after
FlashAttention-4, arXiv:2603.05451). With D = 128, CTAs work in pairs.

# Note [Halves]
The first warpgroup of the role attend works on the first half of the queries of a tile, the second
on the others, 64 of 128. P and dS take half the columns of the S and dP that they come from, and
each half of them lies over its own half of those: columns 0-31 and 64-95. So a thread overwrites
only what it alone reads, and has read, and the warpgroups never wait for each other. The A operand
then has a gap after its first four slabs, which costs nothing: each tcgen05.mma takes one slab and
its address.

# Note [P overwrites S]
S of the next tile, which overwrites P, is issued after dV, which reads P, by the same warp to a
tensor core that works in order. And S is issued only after p was waited for, which says that all of
the last S has been read. Hence the edges s and p need no "empty" barrier; nor do dp and ds, by the
same argument with dK in place of dV.

# Note [dS in shared memory]
One buffer is enough: dP of a tile is issued after dQ of the tile before, so whoever has waited for
dp knows that dQ has retired, and with it the last reader of dS.

# Note [dQ overwrites dP]
From D = 96 on, all four accumulators and dQ do not fit 512 columns, and dQ takes the place of dP
and dS. dK, which reads dS, is issued before. The next dP is issued once dQ is in registers: the
role add has room for all of its row, and hands the columns back before it writes a word to shared
memory. With smaller heads dQ has columns of its own, and only the next dQ waits.

# Note [In turn]
With D/Dv of 192/128, dV and dK leave 192 columns, which dQ takes all. S, then dP over the second
half of S, then dQ over both take turns there, and every product waits for what threads make of the
one before. P lies over the first half of S, so that dP may overwrite the second: the second
warpgroup's P is stored over the first one's S, after a barrier of both behind their loads. Serial
as it is, it spares users the fallback, which builds the score matrix.

# Note [Two sweeps]
With D/Dv of 256/256, dV and dK of 128 keys would be all 512 columns. They share 256 of them: a CTA
sweeps over its queries twice, in tiles of 64 rows. The first sweep makes S, P and dV; the second,
which begins once dV has been read, S again, dP, dS, dK and dQ: six products for five. dQ is
transposed (dQ^T = K^T dS), so that its 256 rows are two accumulators of 64 columns; 64 rows of dQ
would run at half the rate of the tensor core and take 256 columns. The edges dv and dk need no
"empty" barrier: the first dK is issued after ds, the first dV after p, and the role attend has read
the accumulator that they overwrite before it makes either.

Shared memory has room for the keys and four tiles of 32 KB, in two rings. In the first sweep, where
values are not needed, one holds queries and one dO, so that S is computed a tile ahead of dV, in
the columns of S and dP in turn (two stages of the edges s and p). In the second, one ring holds the
two halves of the values, and dO and queries take turns in the other: a tile of queries is there
from S to dK, the next arrives while the tensor core works on dQ and on the next dP. Hence dP comes
before S there, and what lies between S and dK is as short as it can be.
"""

from __future__ import annotations

from jax_fa import roofline
from jax_fa.config import BlackwellBackward, KernelKey, blackwell_backward
from jax_fa.kernels.edges import (
    TMEM_COLS,
    WARP,
    Buffer,
    Edge,
    NamedBarrier,
    Plan,
    PlanError,
    Role,
    TmemRange,
    check,
    ledger,
)
from jax_fa.kernels.sm100.plan import (
    ELEMENT_BYTES,
    FLOAT_BYTES,
    ROWS,
    SMEM_CAPACITY_BYTES,
)

STATS = 2
"""Floats by query row: log2-sum-exp2 and delta."""
ADD_STAGES = 2
"""Pieces of dQ in shared memory, by warp."""
ADD_WARPS = 4
WORDS_BYTES = 28
"""One more mbarrier, the address of tensor memory, four words (``kernels/segments.py``)."""


STATS_STAGES = 2
"""Query rows' statistics in shared memory of a pair: the next are there when S is."""


def dq_overlays(key: KernelKey) -> str:
    """What dQ has no columns beside: "" for nothing, "dp", or "s" and "dp".

    Notes [dQ overwrites dP], [In turn], [Two sweeps].
    """
    if key.value_dim > ROWS:
        return ""
    accumulators = key.head_dim + key.value_dim
    if accumulators + 2 * ROWS + key.head_dim <= TMEM_COLS:
        return ""
    return "dp" if accumulators + 2 * ROWS <= TMEM_COLS else "s"


def backward_plan(key: KernelKey, config: BlackwellBackward) -> Plan:
    """The checked plan of the backward kernel for ``key`` under ``config``."""
    if config.ctas == 2:
        return _pair_plan(key, config)
    key_bytes, value_bytes = key.head_dim * ELEMENT_BYTES, key.value_dim * ELEMENT_BYTES
    add_bytes = ROWS * config.add_columns * FLOAT_BYTES
    others, read = config.other_registers, "read" if config.sweeps == 1 else ""
    plan = Plan(
        roles=(
            Role("add", range(0, 4), config.add_registers),
            Role("attend", range(4, 12), config.attend_registers),
            Role("mma", range(12, 13), others),
            Role("load", range(13, 14), others),
            Role("idle", range(14, 16), others),
        ),
        edges=(
            *(_loaded_edges if config.sweeps == 1 else _swept_edges)(key, config),
            *_score_edges(config),
            Edge("dq", "mma", "add", 1, 0, "dQ in TMEM", "dQ in registers", "umma"),
            Edge("dv", "mma", "attend", 1, 0, "all dV of a tile retired", read, "umma"),
            Edge("dk", "mma", "attend", 1, 0, "all dK of a tile retired", read, "umma"),
        ),
        buffers=(
            Buffer("k", ROWS * key_bytes),
            *([Buffer("v", ROWS * value_bytes)] if config.sweeps == 1 else []),
            Buffer("q", config.q_stages * config.block_q * key_bytes),
            Buffer("dout", config.dout_stages * config.block_q * value_bytes),
            Buffer("ds", ROWS * config.block_q * ELEMENT_BYTES),
            Buffer("dq", ADD_STAGES * add_bytes),
            Buffer("stats", config.q_stages * _stats_bytes(config)),
            Buffer("words", WORDS_BYTES),
        ),
        barriers=_barriers(key),
        smem_capacity_bytes=SMEM_CAPACITY_BYTES,
        tmem=_tmem(key, config),
    )
    check(plan)
    return plan


def _stats_bytes(config: BlackwellBackward) -> int:
    return config.block_q * STATS * FLOAT_BYTES


def _loaded_edges(key: KernelKey, config: BlackwellBackward) -> tuple[Edge, ...]:
    """What TMA brings: the operands of the products, and the statistics of query rows."""
    key_bytes, value_bytes = key.head_dim * ELEMENT_BYTES, key.value_dim * ELEMENT_BYTES
    k, v = ROWS * key_bytes, ROWS * value_bytes
    q, dout, stats = config.block_q * key_bytes, config.block_q * value_bytes, _stats_bytes(config)
    q_stages, dout_stages = config.q_stages, config.dout_stages
    return (
        Edge("k", "load", "mma", 1, k, "keys in smem", "last dQ retired", "tma_umma"),
        Edge("v", "load", "mma", 1, v, "values in smem", "last dP retired", "tma_umma"),
        Edge("q", "load", "mma", q_stages, q, "queries in smem", "dK retired", "tma_umma"),
        Edge("dout", "load", "mma", dout_stages, dout, "dO in smem", "dV retired", "tma_umma"),
        Edge("stats", "load", "attend", q_stages, stats, "lse2, delta in smem", "read"),
    )


def _swept_edges(key: KernelKey, config: BlackwellBackward) -> tuple[Edge, ...]:
    """``_loaded_edges`` of two sweeps: two rings, for other data in the second."""
    k = ROWS * key.head_dim * ELEMENT_BYTES
    rows, stats = config.block_q * key.head_dim * ELEMENT_BYTES, _stats_bytes(config)
    q_stages, dout_stages = config.q_stages, config.dout_stages
    q, q_empty = "queries in smem; in the second sweep, dO and queries", "S, dP or dK retired"
    dout, dout_empty = "dO in smem; then the halves of the values", "dV or last dP retired"
    return (
        Edge("k", "load", "mma", 1, k, "keys in smem", "last dQ retired", "tma_umma"),
        Edge("q", "load", "mma", q_stages, rows, q, q_empty, "tma_umma"),
        Edge("dout", "load", "mma", dout_stages, rows, dout, dout_empty, "tma_umma"),
        Edge("stats", "load", "attend", q_stages, stats, "lse2, delta in smem", "read"),
    )


def _score_edges(config: BlackwellBackward) -> tuple[Edge, ...]:
    """Between tensor core and threads, once per query tile and sweep that makes them."""
    stages = config.sweeps
    return (
        Edge("s", "mma", "attend", stages, 0, "S in TMEM", "", "umma"),
        Edge("p", "attend", "mma", stages, 0, "P in TMEM, all of S read", "", "threads"),
        Edge("dp", "mma", "attend", 1, 0, "dP in TMEM; the last dQ retired", "", "umma"),
        Edge("ds", "attend", "mma", 1, 0, "dS in TMEM and smem, all of dP read", "", "threads"),
    )


def _barriers(key: KernelKey) -> tuple[NamedBarrier, ...]:
    done = NamedBarrier("done", 1, 12 * WARP, "all that is read of tensor memory has been")
    if dq_overlays(key) != "s":
        return (done,)
    return done, NamedBarrier("read", 2, 8 * WARP, "all of S is in registers: Note [In turn]")


def _tmem(key: KernelKey, config: BlackwellBackward) -> tuple[TmemRange, ...]:
    """S dV dP dK, dQ where there is room, and halves of P and dS over those of S and dP."""
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
        *_halves(config, "p", (0, half), ("s", "Note [P overwrites S]")),
        *_halves(config, "ds", (dp, dp + half), (ds_over, "Note [P overwrites S]")),
    )


def _tmem_in_turn(key: KernelKey, config: BlackwellBackward) -> tuple[TmemRange, ...]:
    """Columns of dV and dK, and behind them dQ over dP over S."""
    d, dv, columns, half = key.head_dim, key.value_dim, config.block_q, config.half_q
    s, dp, why = dv + d, dv + d + half, "Note [In turn]"
    return (
        TmemRange("dv", 0, dv),
        TmemRange("dk", dv, d),
        TmemRange("dq", s, d),
        TmemRange("s", s, columns, "dq", why),
        TmemRange("dp", dp, columns, "s", why),
        *_halves(config, "p", (s, s + _half_words(config)), ("s", why)),
        *_halves(config, "ds", (dp, dp + half), ("dp", "Note [P overwrites S]")),
    )


def _tmem_of_sweeps(key: KernelKey, config: BlackwellBackward) -> tuple[TmemRange, ...]:
    """Columns that dV and dK share; S, dP, and dQ transposed, 128 of its rows beside the others."""
    d, columns, half = key.head_dim, config.block_q, config.half_q
    s, dp, dq = d, d + columns, d + 2 * columns
    return (
        TmemRange("dv", 0, d),
        TmemRange("dk", 0, d, "dv", "Note [Two sweeps]"),
        TmemRange("s", s, columns),
        TmemRange("dp", dp, columns),
        TmemRange("dq", dq, columns * d // ROWS),
        *_halves(config, "p", (s, s + half), ("s", "Note [P overwrites S]")),
        *_halves(config, "ds", (dp, dp + half), ("dp", "Note [P overwrites S]")),
    )


def _half_words(config: BlackwellBackward) -> int:
    return config.half_q * ELEMENT_BYTES // FLOAT_BYTES


def _halves(
    config: BlackwellBackward, name: str, starts: tuple[int, int], over: tuple[str, str]
) -> tuple[TmemRange, ...]:
    """Both halves of P or dS; ``over`` says over what, and which note excuses it."""
    columns = _half_words(config)
    return tuple(TmemRange(f"{name}{i}", start, columns, *over) for i, start in enumerate(starts))


def _pair_plan(key: KernelKey, config: BlackwellBackward) -> Plan:
    """The plan of two CTAs that share their products: Note [A pair of CTAs]."""
    sizes = key.head_dim, key.value_dim, config.block_q, config.block_kv
    if sizes != (ROWS, ROWS, ROWS, 2 * ROWS):
        raise PlanError(f"a pair takes D, Dv, block_q, block_kv of 128, 128, 128, 256, not {sizes}")
    tile = ROWS * ROWS * ELEMENT_BYTES
    others = config.other_registers
    plan = Plan(
        roles=(
            Role("add", range(0, 4), config.add_registers),
            Role("attend", range(4, 12), config.attend_registers),
            Role("mma", range(12, 13), others, leader_only=True),
            Role("load", range(13, 14), others),
            Role("relay", range(14, 15), others),
            Role("idle", range(15, 16), others),
        ),
        edges=(*_pair_loaded_edges(tile, _stats_bytes(config)), *_pair_score_edges(tile // 2)),
        buffers=(
            *(Buffer(name, tile) for name in ("k", "v", "kt")),
            *(Buffer(name, tile // 2) for name in ("q", "qt", "dout", "dout_t")),
            Buffer("ds", tile),
            Buffer("ds_out", tile // 2),
            Buffer("dq", ADD_STAGES * ROWS * config.add_columns * FLOAT_BYTES),
            Buffer("stats", STATS_STAGES * _stats_bytes(config)),
            Buffer("words", WORDS_BYTES),
        ),
        barriers=(
            NamedBarrier("read", 1, 8 * WARP, "all of S is in registers"),
            NamedBarrier("out", 2, 4 * WARP, "what is sent of dS is in smem"),
        ),
        smem_capacity_bytes=SMEM_CAPACITY_BYTES,
        tmem=_tmem_of_pair(config),
        ctas=2,
    )
    check(plan)
    return plan


def _pair_loaded_edges(tile_bytes: int, stats_bytes: int) -> tuple[Edge, ...]:
    """What TMA brings to each CTA of a pair; in the order of the role load."""
    half = tile_bytes // 2
    return (
        Edge("k", "load", "mma", 1, tile_bytes, "keys in smem", "last S retired", "tma_umma"),
        Edge("q", "load", "mma", 1, half, "64 queries in smem", "S retired", "tma_umma"),
        Edge("stats", "load", "attend", STATS_STAGES, stats_bytes, "lse2, delta in smem", "read"),
        Edge("v", "load", "mma", 1, tile_bytes, "values in smem", "last dP retired", "tma_umma"),
        Edge("dout", "load", "mma", 1, half, "64 rows of dO in smem", "dP retired", "tma_umma"),
        Edge(
            "dout_t", "load", "mma", 1, half, "64 columns of dO in smem", "dV retired", "tma_umma"
        ),
        Edge(
            "kt",
            "load",
            "mma",
            1,
            tile_bytes,
            "64 columns of the pair's keys in smem",
            "last dQ retired",
            "tma_umma",
        ),
        Edge("qt", "load", "mma", 1, half, "64 columns of q in smem", "dK retired", "tma_umma"),
    )


def _pair_score_edges(half_bytes: int) -> tuple[Edge, ...]:
    """Between tensor core and threads of a pair, and from CTA to CTA."""
    return (
        Edge("s", "mma", "attend", 1, 0, "S in TMEM", "", "umma"),
        Edge("p", "attend", "mma", 1, 0, "P in TMEM, all of S read", "", "threads"),
        Edge("dp", "mma", "attend", 1, 0, "dP in TMEM", "", "umma"),
        Edge(
            "ds",
            "attend",
            "mma",
            1,
            0,
            "dS in TMEM, own half in smem, all of dP read",
            "dQ retired",
            "threads_umma",
        ),
        Edge("half", "attend", "relay", 1, half_bytes, "the other CTA's half of dS in smem", ""),
        Edge("halves", "relay", "mma", 1, 0, "both CTAs have both halves", "", "threads"),
        Edge("dq", "mma", "add", 1, 0, "dQ in TMEM", "dQ in registers", "umma"),
        Edge("dv", "mma", "attend", 1, 0, "all dV of a tile retired", "read", "umma"),
        Edge("dk", "mma", "attend", 1, 0, "all dK of a tile retired", "read", "umma"),
    )


def _tmem_of_pair(config: BlackwellBackward) -> tuple[TmemRange, ...]:
    """S dV dP dK of a CTA's 128 keys; P and, of 64 queries, dQ share the columns of S."""
    why = "Note [dQ overwrites half of S]"
    dv, dp, dk, half = ROWS, 2 * ROWS, 3 * ROWS, config.half_q
    return (
        TmemRange("s", 0, ROWS),
        TmemRange("dv", dv, ROWS),
        TmemRange("dp", dp, ROWS),
        TmemRange("dk", dk, ROWS),
        TmemRange("dq", half, half, "s", why),
        *_halves(config, "p", (0, _half_words(config)), ("s", why)),
        *_halves(config, "ds", (dp, dp + half), ("dp", "Note [P overwrites S]")),
    )


def main() -> None:
    """Prints the ledgers of bfloat16 kernels: one CTA, a pair, two sweeps; and what bounds them."""
    gpu = roofline.gpu_of("sm100")
    for head_dim in (96, 128, 256):
        key = KernelKey("sm_100f", "bfloat16", head_dim, head_dim, "causal")
        config, heads = blackwell_backward(key), (key.head_dim, key.value_dim)
        shared = {"ctas": config.ctas, "sweeps": config.sweeps}
        smem = roofline.backward_smem_cycles(gpu, heads, config.staged, **shared)
        bound = roofline.backward(gpu, heads, config.staged, **shared)
        lines = [f"{count:6.0f}  {what}" for what, count in smem.items()]
        sums = f"{bound.smem:6.0f}  of smem, {bound.mma:.0f} of MMA per 128 x 128 tile (model)"
        text = [f"D = {head_dim}", ledger(backward_plan(key, config)), *lines, sums]
        print("\n".join(text), end="\n\n")  # noqa: T201


if __name__ == "__main__":
    main()
