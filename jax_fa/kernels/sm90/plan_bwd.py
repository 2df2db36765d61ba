"""Hopper backward: roles, edges, shared memory and barriers. Read this first.

One warp loads with TMA. Two warpgroups own 64 keys each and keep their dK and dV in registers while
they sweep the queries. Scores are computed transposed, keys by queries, so that P and dS are left
in the accumulators in the order that dV += P^T dO and dK += dS^T Q need for their A operand; only
dQ = dS K, which sums over the keys of all consumers, needs dS in shared memory. Where registers are
scarce (``HopperBackward.is_lean``), dK reads it there as well.

Where a mask makes tiles unequal (``HopperBackward.claims_tiles``), a warp claims one after the
other for its CTA, and tells the others: ``bwd_claims.py``.

Where a general mask leaves too few registers (``HopperBackward.tells_steps``), the loading warp
tells consumers of each step through shared memory: ``bwd_steps.py``.

Where dK and dV of 64 keys do not fit the registers of one warpgroup
(``HopperBackward.splits_keys`` is False), the consumers work on the same 64 keys and divide the
columns among themselves.
"""

from __future__ import annotations

from jax_fa.kernels.edges import (
    WARP,
    WARPGROUP,
    Buffer,
    Edge,
    NamedBarrier,
    Plan,
    PlanError,
    Role,
    check,
)
from jax_fa.kernels.sm90.plan import ELEMENT_BYTES
from jax_fa.kernels.sm90.plan_bias import CHUNK_BYTES, FACTORS_BYTES, num_words
from jax_fa.spec.config_sm90_bwd import HopperBackward, may_cap
from jax_fa.spec.division import FOUND_WORDS
from jax_fa.spec.key import KernelKey

STAT_BYTES = 4
SUM_BYTES = 4
STEP_WORDS = 4
"""Words by which load tells consumers of a step (``bwd_steps.py``)."""
WORK_WORDS = 28
"""Words of a tile's ``Work``, rounded up to whole loads of four: compilers widen smaller ones."""
ITEMS = 2
"""Tiles that a CTA has claimed: the one that consumers work on, and the next."""


def work_words(config: HopperBackward) -> int:
    """The number of words that the work of a CTA's tiles takes."""
    return WORK_WORDS * ITEMS if config.claims_tiles else 0


def step_slots(config: HopperBackward) -> int:
    """The number of steps that ``STEP_WORDS`` are kept of."""
    return 2 * config.q_stages if config.tells_steps else 0


DS_STAGES = 2
"""Passing the barrier ``ds`` of one step means that every consumer's dQ of the step before has
retired, so with two buffers dS may be written without a further wait. No other consumer's dK reads
it."""


def backward_plan(key: KernelKey, config: HopperBackward) -> Plan:
    """The checked plan of the backward kernel for ``key`` under ``config``."""
    if config.tells_steps and (config.q_stages != DS_STAGES or key.has_bias):
        raise PlanError("a told step takes its buffer of dS from that of its queries, and no bias")
    if key.multiplies_bias and config.bias_stages != DS_STAGES:
        raise PlanError("dS takes the place of a bias that is multiplied")
    if not {*config.elects} <= {"q", "dout"}:
        raise PlanError(f"elected lanes give back stages of q and dout, not of {config.elects}")
    all_or_none = config.loads_statistics or config.is_lean
    if config.early_statistics and (all_or_none or config.rounds_slope or may_cap(key)):
        raise PlanError("statistics are early only where they are not loaded anyway, nor P rounded")
    consumers = config.num_consumers
    k_bytes = config.block_kv * key.head_dim * ELEMENT_BYTES
    v_bytes = config.block_kv * key.value_dim * ELEMENT_BYTES
    q_bytes = config.block_q * key.head_dim * ELEMENT_BYTES
    dout_bytes = config.block_q * key.value_dim * ELEMENT_BYTES
    stat_bytes = config.block_q * STAT_BYTES
    ds_bytes = config.block_q * config.block_kv * ELEMENT_BYTES
    q_stages, dout_stages = config.q_stages, config.dout_stages
    q, dout = q_bytes + stat_bytes, dout_bytes + stat_bytes
    dq_bytes = config.block_q * key.head_dim * SUM_BYTES if config.stages_dq != "never" else 0
    bias_bytes = config.bias_chunks * config.block_q * CHUNK_BYTES
    bias = Edge(
        "bias",
        "load_bias",
        ("consume", "store_dbias"),
        config.bias_stages,
        bias_bytes,
        "chunks in smem",
        "added, and dS in their place stored",
    )
    bias_roles = (
        Role("load_bias", range(2, 3), config.producer_registers),
        Role("store_dbias", range(3, 4), config.producer_registers),
    )
    products = [Buffer("factors", FACTORS_BYTES), Buffer("words", 4 * num_words(config))]
    odd = (
        NamedBarrier(f"odd{i}", 5 + i, WARPGROUP, "whether P of any thread is odd")
        for i in range(consumers if key.multiplies_bias else 0)
    )
    has_ring = config.bias_stages > 0
    if (config.claims_tiles and key.has_bias) or (config.tells_steps and not config.claims_tiles):
        raise PlanError("only steps of claimed tiles are told; a bias takes the warp that claims")
    claim_roles = (
        Role("hold_dq_semaphore", range(1, 2), config.producer_registers),
        Role("claim", range(2, 3), config.producer_registers),
        Role("idle", range(3, 4), config.producer_registers),
    )
    users, few = ("load", "consume"), "few loads of a tile left"
    claim_edges = (
        Edge("work", "claim", users, ITEMS, 0, "tile in smem", "tile done", kind="threads"),
        Edge("loaded", "load", "claim", ITEMS, 0, few, "next claimed", kind="threads"),
    )
    further = claim_roles if config.claims_tiles else bias_roles if has_ring else ()
    of_load = range(0, 1 if config.claims_tiles else 2 if has_ring else 4)
    ds_threads = consumers * WARPGROUP + (WARP if has_ring else 0)
    plan = Plan(
        roles=(
            Role("load", of_load, config.producer_registers),
            *further,
            Role("consume", range(4, 4 + 4 * consumers), config.consumer_registers),
        ),
        edges=(
            Edge("k", "load", "consume", 1, k_bytes, "keys in smem", "last dQ of the tile retired"),
            Edge("v", "load", "consume", 1, v_bytes, "values in smem", "last dP retired"),
            Edge("q", "load", "consume", q_stages, q, "queries, lse2 in smem", "dK retired"),
            Edge("dout", "load", "consume", dout_stages, dout, "dO, delta in smem", "dV retired"),
            *((bias,) if has_ring else ()),
            *(claim_edges if config.claims_tiles else ()),
        ),
        buffers=(
            Buffer("k", k_bytes),
            Buffer("v", v_bytes),
            Buffer("q", q_bytes * q_stages),
            Buffer("dout", dout_bytes * dout_stages),
            *(products if key.multiplies_bias else [Buffer("ds", ds_bytes * DS_STAGES)]),
            Buffer("p", 0 if config.splits_keys else ds_bytes * DS_STAGES),
            Buffer("dq", dq_bytes),
            Buffer("bias", bias_bytes * config.bias_stages),
            Buffer("found", 4 * FOUND_WORDS),
            Buffer("work", 4 * work_words(config)),
            Buffer("steps", 4 * STEP_WORDS * step_slots(config)),
            Buffer("lse2", stat_bytes * q_stages),
            Buffer("delta", stat_bytes * dout_stages),
        ),
        barriers=(
            NamedBarrier("ds", 1, ds_threads, "dS of all keys in smem, that before stored"),
            NamedBarrier("zero_filled", 2, consumers * WARPGROUP, "absent rows of a tile are zero"),
            *turn_barriers(config),
            *odd,
        ),
    )
    check(plan)
    return plan


def turn_barriers(config: HopperBackward) -> tuple[NamedBarrier, ...]:
    """The barriers that consumers and hold_dq_semaphore share in a deterministic run."""
    threads = config.num_consumers * WARPGROUP + WARP
    if config.stages_dq == "never":
        return (
            NamedBarrier("dq_acquired", 3, threads, "the dQ semaphore is held"),
            NamedBarrier("dq_reduced", 4, threads, "dQ has been reduced"),
        )
    return (
        NamedBarrier("dq_free", 3, threads, "TMA has read the dQ of the step before"),
        NamedBarrier("dq_staged", 4, threads, "dQ of all consumers in smem"),
    )
