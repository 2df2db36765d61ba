"""Blackwell forward: who does what, over which data, in which memory. Read this first.

A CTA owns two query tiles of 128 rows and works on both against the same key blocks, so that the
tensor core multiplies for one while the softmax of the other is computed. Sixteen warps, one per
CTA and SM: two warpgroups do the softmax of one tile each, one keeps the accumulators to scale, and
single warps load, multiply and store.

# Note [P overwrites S]
The probabilities P of a block take the upper half of the columns of its scores S: 16-bit elements
need half the columns of 32-bit ones. Three facts make that safe. (1) Lane r of tensor memory holds
row r, one softmax thread owns it, and has its whole row of S in registers before it stores any P.
(2) PV of a block, which reads P, and S of the next block, which overwrites it, are issued in that
order by one warp to one tensor core, which works in order. (3) S of the next block is issued only
after both parts of P have been waited for, so no thread still stores to it. Hence the edges s and p
need no "empty" barrier, and each query tile can start its next S without regard to the other.

# Note [A pair of CTAs]
With ``ctas`` = 2, two CTAs work on neighbouring query blocks of a head against the same key blocks,
and each product is one for both: 256 rows of Q or P, of which each CTA has its 128, times a block
of which each CTA holds half, K by rows and V by columns, since both are cut along the product's N.
S, P and O of a CTA's rows are in its own tensor memory, so the softmax, correct and store roles do
not know the difference. Every CTA loads its halves; the first issues the products; who arrives
where is said in edges.py, what for in config.py, at ``_PAIRED_HEADS`` (kernel design after
FlashAttention-4, arXiv:2603.05451).

# Note [One row per thread]
The 32x32b shape of tcgen05.ld gives every thread one row, where Hopper's accumulator spreads a row
over four: maxima and sums need no shuffles, statistics one word per thread.

# Note [Rescaling late]
The maximum that P is relative to is raised only when a row's scores exceed it by more than
``RESCALE_LOG2`` in base 2. Until then P may reach 2 ** 8, which float16 and bfloat16 hold without
loss of precision, and the sum and the accumulator, in float32, are relative to the same maximum. So
the accumulator is seldom touched, and when it is, the correct role does it, not the softmax roles,
whose time bounds the kernel (kernel design after FlashAttention-4, arXiv:2603.05451).
"""

from __future__ import annotations

from jax_fa.config import BlackwellForward, KernelKey, blackwell_forward
from jax_fa.kernels.edges import (
    WARPGROUP,
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

SMEM_CAPACITY_BYTES = 227 * 1024
FIRST_PAGE_BYTES = 1024
"""Mbarriers and single words share the first page of shared memory; swizzled tiles start behind."""
WORDS_BYTES = 24
"""One more mbarrier, the address of tensor memory, what is known of segments."""
ELEMENT_BYTES = 2
FLOAT_BYTES = 4
Q_TILES = 2
ROWS = 128
"""Query rows of a tile: the lanes of tensor memory, and the M of one tcgen05.mma of one CTA."""
BLOCK_KV = 128
CHUNK = 32
"""Scores that are turned into probabilities, and stored, at a time."""
HANDED_OVER_FIRST = BLOCK_KV // CHUNK * 3 // 4
"""Chunks of P after which PV may start."""
RESCALE_LOG2 = 8.0
"""How far scores may exceed the maximum that P is relative to: Note [Rescaling late]."""
TILE_EDGES = ("s", "p", "p_rest", "stats", "scaled")
"""Edges that each query tile has for itself."""
SLAB = 16
"""Depth of one tcgen05.mma of 16-bit elements."""
O_COLUMNS = 16
"""Columns of O that the role correct has in registers at a time; twice as many spill."""


def out_overlays_q(key: KernelKey) -> bool:
    """True where out takes the place of q, since the ring has no room otherwise."""
    return key.head_dim > ROWS


def _fixed_bytes(key: KernelKey) -> int:
    """Shared memory of a kernel but for its ring."""
    width = key.head_dim + (0 if out_overlays_q(key) else key.value_dim)
    return Q_TILES * ROWS * (width * ELEMENT_BYTES + 2 * FLOAT_BYTES)


def forward_plan(key: KernelKey, config: BlackwellForward) -> Plan:
    """The checked plan of the forward kernel for ``key`` under ``config``.

    The ring of key and value blocks is as deep as shared memory allows.

    Raises:
        PlanError: the configuration fits neither the hardware nor the kernel.
    """
    if config.ctas > 1 and key.mask != "full":
        raise PlanError(f"a pair works on one block of keys; under a {key.mask} mask CTAs differ")
    q_bytes = ROWS * key.head_dim * ELEMENT_BYTES
    out_bytes = ROWS * key.value_dim * ELEMENT_BYTES
    kv_bytes = BLOCK_KV * key.head_dim * ELEMENT_BYTES // config.ctas
    others = config.other_registers
    kv_stages = (SMEM_CAPACITY_BYTES - FIRST_PAGE_BYTES - _fixed_bytes(key)) // kv_bytes
    out = Buffer("out", Q_TILES * out_bytes)
    if out_overlays_q(key):
        out = Buffer("out", Q_TILES * out_bytes, "q", "all S of a tile retire before its last PV")
    done = NamedBarrier("correct", 1, WARPGROUP, "the role is done with tensor memory")
    plan = Plan(
        roles=(
            Role("softmax0", range(0, 4), config.softmax_registers),
            Role("softmax1", range(4, 8), config.softmax_registers),
            Role("correct", range(8, 12), config.correct_registers),
            Role("mma", range(12, 13), others, leader_only=config.ctas > 1),
            Role("store", range(13, 14), others),
            Role("load", range(14, 15), others),
            Role("idle", range(15, 16), others),
        ),
        edges=(
            _q_edge(key, q_bytes),
            Edge(
                "kv",
                "load",
                "mma",
                kv_stages,
                kv_bytes,
                "keys or values in smem",
                "the products that read them retired",
                "tma_umma",
            ),
            *(edge for tile in range(Q_TILES) for edge in _tile_edges(tile)),
            Edge("o", "mma", "correct", Q_TILES, 0, "all PV of a tile retired", "", "umma"),
            Edge("out", "correct", "store", Q_TILES, 0, "out in smem", "read by TMA", "threads"),
            Edge("room", "store", "load", 1, 0, "no out where q belongs", "", "threads"),
        ),
        buffers=(
            Buffer("q", Q_TILES * q_bytes),
            Buffer("kv", kv_stages * kv_bytes),
            out,
            Buffer("stats", Q_TILES * 2 * ROWS * FLOAT_BYTES),
            Buffer("words", WORDS_BYTES),
        ),
        barriers=() if config.ctas > 1 else (done,),
        smem_capacity_bytes=SMEM_CAPACITY_BYTES,
        tmem=_tmem(key),
        ctas=config.ctas,
    )
    check(plan)
    return plan


def _q_edge(key: KernelKey, q_bytes: int) -> Edge:
    full, empty = "a query tile in smem", "every S of it retired"
    return Edge("q", "load", "mma", Q_TILES, q_bytes, full, empty, "tma_umma")


def _tile_edges(tile: int) -> tuple[Edge, ...]:
    """The edges that each query tile has for itself."""
    softmax = f"softmax{tile}"
    return (
        Edge(
            f"s{tile}",
            "mma",
            softmax,
            1,
            0,
            "S in TMEM, and the PV issued before it retired",
            "",
            "umma",
        ),
        Edge(
            f"p{tile}",
            softmax,
            "mma",
            1,
            0,
            "three quarters of P in TMEM, all of S read",
            "",
            "threads",
        ),
        Edge(f"p_rest{tile}", softmax, "mma", 1, 0, "all of P in TMEM", "", "threads"),
        Edge(
            f"stats{tile}",
            softmax,
            "correct",
            1,
            0,
            "factor by which O shrinks; after the last block, sum and maximum",
            "read",
            "threads",
        ),
        Edge(
            f"scaled{tile}",
            "correct",
            "mma",
            1,
            0,
            "O relative to the maximum of P, or, for the first block, free",
            "",
            "threads",
        ),
    )


def _tmem(key: KernelKey) -> tuple[TmemRange, ...]:
    """S0 S1 O0 O1, and P over the upper half of its S."""
    p_cols = BLOCK_KV * ELEMENT_BYTES // FLOAT_BYTES
    upper = BLOCK_KV - p_cols
    why = "Note [P overwrites S]"
    return (
        TmemRange("s0", 0, BLOCK_KV),
        TmemRange("s1", BLOCK_KV, BLOCK_KV),
        TmemRange("o0", 2 * BLOCK_KV, key.value_dim),
        TmemRange("o1", 2 * BLOCK_KV + key.value_dim, key.value_dim),
        TmemRange("p0", upper, p_cols, "s0", why),
        TmemRange("p1", BLOCK_KV + upper, p_cols, "s1", why),
    )


def main() -> None:
    """Prints the ledgers of bfloat16 D = 128 kernels: of one CTA, and of a pair."""
    for mask in ("causal", "full"):
        key = KernelKey("sm_100f", "bfloat16", 128, 128, mask)
        print(ledger(forward_plan(key, blackwell_forward(key))), end="\n\n")  # noqa: T201


if __name__ == "__main__":
    main()
