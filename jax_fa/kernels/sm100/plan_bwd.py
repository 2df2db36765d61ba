"""Blackwell backward: who does what, over which data, in which memory. Read this first.

A CTA owns 128 keys and lets query tiles of 128 rows pass by, those of every head that shares the
keys. Scores are computed transposed, keys by queries: lane r of tensor memory holds key r, so P and
dS lie there as dV += P^T dO and dK += dS^T Q want their A operand, and neither leaves tensor memory
for them. Only dQ = dS K, which sums over keys, wants dS in shared memory. Sixteen warps, one CTA
per SM: one warpgroup takes dQ away, two turn S into P and dP into dS, single warps multiply and
load (kernel design after FlashAttention-4, arXiv:2603.05451).

# Note [Halves]
The first warpgroup of the role attend works on the first half of the queries of a tile, the second
on the others, 64 of 128. P and dS take half the columns of the S and dP that they come from,
and each half of them lies over its own half of those: columns 0-31 and 64-95. So a thread
overwrites only what it alone reads, and has read, and the warpgroups never wait for each other. The
A operand then has a gap after its first four slabs, which costs nothing: each tcgen05.mma takes one
slab and its address.

# Note [P overwrites S]
S of the next tile, which overwrites P, is issued after dV, which reads P, by the same warp to a
tensor core that works in order. And S is issued only after p was waited for, which says that all of
the last S has been read. Hence the edges s and p need no "empty" barrier; nor do dp and ds, by the
same argument with dK in place of dV.

# Note [dS in shared memory]
One buffer is enough: dP of a tile is issued after dQ of the tile before, so whoever has waited for
dp knows that dQ has retired, and with it the last reader of dS.

# Note [dQ overwrites dP]
From D = 128 on, all four accumulators and dQ do not fit 512 columns, and dQ takes the place of dP
and dS. dK, which reads dS, is issued before. The next dP is issued once dQ is in registers: the
role add has room for all of its row, and hands the columns back before it writes a word to shared
memory. With smaller heads dQ has columns of its own, and only the next dQ waits.

# Note [In turn]
With D/Dv of 192/128, dV and dK leave 192 columns, which dQ takes all. S, then dP over the second
half of S, then dQ over both take turns there, and every product waits for what threads make of the
one before. P lies over the first half of S, so that dP may overwrite the second: the second
warpgroup's P is stored over the first one's S, after a barrier of both behind their loads. Serial
as it is, it spares users the fallback, which builds the score matrix.
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
WORDS_BYTES = 24
"""One more mbarrier, the address of tensor memory, three words (``kernels/segments.py``)."""


def dq_overlays(key: KernelKey) -> str:
    """What dQ has no columns beside: "" for nothing, "dp", or "s" and "dp".

    Notes [dQ overwrites dP], [In turn].
    """
    accumulators = key.head_dim + key.value_dim
    if accumulators + 2 * ROWS + key.head_dim <= TMEM_COLS:
        return ""
    return "dp" if accumulators + 2 * ROWS <= TMEM_COLS else "s"


def backward_plan(key: KernelKey, config: BlackwellBackward) -> Plan:
    """The checked plan of the backward kernel for ``key`` under ``config``."""
    key_bytes, value_bytes = key.head_dim * ELEMENT_BYTES, key.value_dim * ELEMENT_BYTES
    add_bytes = ROWS * config.add_columns * FLOAT_BYTES
    others = config.other_registers
    plan = Plan(
        roles=(
            Role("add", range(0, 4), config.add_registers),
            Role("attend", range(4, 12), config.attend_registers),
            Role("mma", range(12, 13), others),
            Role("load", range(13, 14), others),
            Role("idle", range(14, 16), others),
        ),
        edges=(
            *_loaded_edges(key, config),
            *_score_edges(),
            Edge("dq", "mma", "add", 1, 0, "dQ in TMEM", "dQ in registers", "umma"),
            Edge("dv", "mma", "attend", 1, 0, "all dV of a tile retired", "read", "umma"),
            Edge("dk", "mma", "attend", 1, 0, "all dK of a tile retired", "read", "umma"),
        ),
        buffers=(
            Buffer("k", ROWS * key_bytes),
            Buffer("v", ROWS * value_bytes),
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


def _score_edges() -> tuple[Edge, ...]:
    """Between tensor core and threads, once per query tile."""
    return (
        Edge("s", "mma", "attend", 1, 0, "S in TMEM", "", "umma"),
        Edge("p", "attend", "mma", 1, 0, "P in TMEM, all of S read", "", "threads"),
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


def _half_words(config: BlackwellBackward) -> int:
    return config.half_q * ELEMENT_BYTES // FLOAT_BYTES


def _halves(
    config: BlackwellBackward, name: str, starts: tuple[int, int], over: tuple[str, str]
) -> tuple[TmemRange, ...]:
    """Both halves of P or dS; ``over`` says over what, and which note excuses it."""
    columns = _half_words(config)
    return tuple(TmemRange(f"{name}{i}", start, columns, *over) for i, start in enumerate(starts))


def main() -> None:
    """Prints the ledger of the default bfloat16 D = 128 kernel, and what bounds it."""
    key = KernelKey("sm_100f", "bfloat16", 128, 128, "causal")
    gpu, heads = roofline.gpu_of("sm100"), (key.head_dim, key.value_dim)
    smem, bound = roofline.backward_smem_cycles(gpu, heads), roofline.backward(gpu, heads)
    lines = [f"{count:6.0f}  {what}" for what, count in smem.items()]
    lines.append(f"{bound.smem:6.0f}  of smem, {bound.mma:.0f} of MMA per 128 x 128 tile (model)")
    print("\n".join([ledger(backward_plan(key, blackwell_backward(key))), *lines]))  # noqa: T201


if __name__ == "__main__":
    main()
