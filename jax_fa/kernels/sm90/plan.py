"""Hopper forward: roles, edges, shared memory and barriers. Read this first.

One warpgroup loads with TMA; two or three warpgroups each own 64 query rows and do both products
and the softmax between them. Keys and values arrive in two rings, newest block first.
"""

from __future__ import annotations

from jax_fa.kernels.edges import (
    WARPGROUP,
    Buffer,
    Edge,
    NamedBarrier,
    Plan,
    Role,
    check,
)
from jax_fa.spec import division
from jax_fa.spec.config_sm90 import HopperForward
from jax_fa.spec.key import KernelKey

ELEMENT_BYTES = 2
WGMMA_ROWS = 64
"""Rows of a consumer warpgroup's products: the M of one wgmma."""


def forward_plan(key: KernelKey, config: HopperForward) -> Plan:
    """The checked plan of the forward kernel for ``key`` under ``config``."""
    consumers = config.num_consumers
    q_bytes = config.block_q * key.head_dim * ELEMENT_BYTES
    k_bytes = config.block_kv * key.head_dim * ELEMENT_BYTES
    v_bytes = config.block_kv * key.value_dim * ELEMENT_BYTES
    out_bytes = config.block_q * key.value_dim * ELEMENT_BYTES
    plan = Plan(
        roles=(
            Role("load", range(0, 4), config.producer_registers),
            Role("consume", range(4, 4 + 4 * consumers), config.consumer_registers),
        ),
        edges=(
            Edge(
                "q", "load", "consume", config.q_stages, q_bytes, "query tile in smem", "out stored"
            ),
            Edge("k", "load", "consume", config.stages, k_bytes, "keys in smem", "S retired"),
            Edge("v", "load", "consume", config.stages, v_bytes, "values in smem", "PV retired"),
        ),
        buffers=(
            Buffer("zero_fill", 8),  # mbarrier of a value block that is zero-filled before use
            Buffer("found", 4 * division.FOUND_WORDS),  # what segments and a mask tell of a tile
            Buffer("q", q_bytes * config.q_stages),
            Buffer("k", k_bytes * config.stages),
            Buffer("v", v_bytes * config.stages),
            Buffer("out", out_bytes, "q", "a consumer's rows of q are dead after its last S"),
        ),
        barriers=(
            *(
                NamedBarrier(
                    f"pingpong{i}", 1 + i, 2 * WARPGROUP, f"consumer {i} may issue products"
                )
                for i in range(consumers)
            ),
            *(
                NamedBarrier(f"out{i}", 1 + consumers + i, WARPGROUP, f"rows of consumer {i}")
                for i in range(consumers)
            ),
        ),
    )
    check(plan)
    return plan
