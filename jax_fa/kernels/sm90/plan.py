"""Hopper forward: roles, edges, shared memory and barriers. Read this first.

One warp loads with TMA; two or three warpgroups each own 64 query rows and compute both products
and the softmax between them. Keys and values arrive in two rings, newest block first. For most
masks (``finds_ahead``), three more warps determine the work of each tile ahead of time.
"""

from __future__ import annotations

from jax_fa.kernels.edges import WARP, WARPGROUP, Buffer, Edge, NamedBarrier, Plan, Role, check
from jax_fa.spec.config_sm90 import HopperForward
from jax_fa.spec.division import FOUND_WORDS
from jax_fa.spec.key import KernelKey

ELEMENT_BYTES = 2
WGMMA_ROWS = 64
"""Rows of a consumer warpgroup's products: the M of one wgmma."""
GROUP_BITS = WARPGROUP - 1
"""The bits of a thread's number in its warpgroup. What they mask is known not to be negative."""

WORK_WORDS = 23
"""Words that hold a tile's ``Work`` (``fwd_lists.py``)."""
TOLD_WORDS = FOUND_WORDS + 1 + WORK_WORDS
"""Words of a tile's list: what segments and a mask say, whether there is a tile, and its work."""


def finds_ahead(key: KernelKey, config: HopperForward) -> bool:
    """Whether find determines the work of tiles to come.

    Under a causal mask, their order takes divisions, which delayed every tile (H200, us: 64 x 128
    tokens, D = 128, 50 -> 40). Where nothing is masked, it is one, and nothing was gained.
    """
    return key.mask == "general" or (key.mask == "causal" and config.is_persistent)


def num_lists(key: KernelKey, config: HopperForward) -> int:
    """The number of tile lists in shared memory: if several, three in work and one to come."""
    return 4 if finds_ahead(key, config) and config.is_persistent else 1


def step_slots(key: KernelKey, config: HopperForward) -> int:
    """Of how many steps, a power of two, load keeps a word for consumers: ``fwd_steps.py``."""
    return 1 << (2 * config.stages - 1).bit_length() if key.mask == "general" else 0


def forward_plan(key: KernelKey, config: HopperForward) -> Plan:
    """The checked plan of the forward kernel for ``key`` under ``config``."""
    consumers, each = config.num_consumers, range(config.num_consumers)
    q_bytes = config.block_q * key.head_dim * ELEMENT_BYTES
    k_bytes = config.block_kv * key.head_dim * ELEMENT_BYTES
    v_bytes = config.block_kv * key.value_dim * ELEMENT_BYTES
    out_bytes = config.block_q * key.value_dim * ELEMENT_BYTES
    lists = num_lists(key, config)
    work = Edge("work", "find", ("load", "consume"), lists, 0, "work in smem", "read", "threads")
    plan = Plan(
        roles=(
            Role("load", range(0, 1), config.producer_registers),
            Role("find", range(1, 4), config.producer_registers),  # idle if nothing is masked
            Role("consume", range(4, 4 + 4 * consumers), config.consumer_registers),
        ),
        edges=(
            Edge("q", "load", "consume", config.q_stages, q_bytes, "queries in smem", "out stored"),
            Edge("k", "load", "consume", config.stages, k_bytes, "keys in smem", "S retired"),
            Edge("v", "load", "consume", config.stages, v_bytes, "values in smem", "PV retired"),
            *((work,) if finds_ahead(key, config) else ()),
        ),
        buffers=(
            Buffer("zero_fill", 8),  # mbarrier of a value block that is zero-filled before use
            Buffer("found", 4 * TOLD_WORDS * lists),  # the tile lists: ``TOLD_WORDS`` each
            Buffer("steps", 4 * step_slots(key, config)),
            Buffer("q", q_bytes * config.q_stages),
            Buffer("k", k_bytes * config.stages),
            Buffer("v", v_bytes * config.stages),
            Buffer("out", out_bytes, "q", "a consumer's rows of q are dead after its last S"),
        ),
        barriers=(
            *(NamedBarrier(f"pingpong{i}", 1 + i, 2 * WARPGROUP, "turn to multiply") for i in each),
            *(NamedBarrier(f"out{i}", 1 + consumers + i, WARPGROUP, "rows of out") for i in each),
            NamedBarrier("made", 1 + 2 * consumers, 3 * WARP, "a tile's list is made"),
        ),
    )
    check(plan)
    return plan
