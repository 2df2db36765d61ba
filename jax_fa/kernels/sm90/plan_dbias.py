"""Hopper's gradient of a bias: roles, edges, shared memory and barriers. Read this first.

One warp loads with TMA. Two warpgroups each own 64 query rows of a tile of the bias, and keep their
gradient in registers over all batches and heads (and tiles of rows and keys) that share it.
"""

from __future__ import annotations

from jax_fa.kernels.edges import WARP, WARPGROUP, Buffer, Edge, NamedBarrier, Plan, Role, check
from jax_fa.kernels.sm90.plan import ELEMENT_BYTES
from jax_fa.spec.config_sm90_dbias import HopperBiasGradient
from jax_fa.spec.key import KernelKey

FLOAT_BYTES = 4


def dbias_plan(key: KernelKey, config: HopperBiasGradient) -> Plan:
    """The checked plan of the kernel for ``key`` under ``config``."""
    consumers, stages = config.num_consumers, config.stages
    rows = config.block_q + config.block_kv
    qk_bytes = rows * key.head_dim * ELEMENT_BYTES
    dov_bytes = rows * key.value_dim * ELEMENT_BYTES
    warps = consumers * WARPGROUP // WARP
    plan = Plan(
        roles=(
            Role("load", range(0, 4), config.producer_registers),
            Role("consume", range(4, 4 + 4 * consumers), config.consumer_registers),
        ),
        edges=(
            Edge("qk", "load", "consume", stages, qk_bytes, "queries, keys in smem", "S retired"),
            Edge("dov", "load", "consume", stages, dov_bytes, "dO, values in smem", "dP retired"),
        ),
        buffers=(
            Buffer("q", config.block_q * key.head_dim * ELEMENT_BYTES * stages),
            Buffer("k", config.block_kv * key.head_dim * ELEMENT_BYTES * stages),
            Buffer("dout", config.block_q * key.value_dim * ELEMENT_BYTES * stages),
            Buffer("v", config.block_kv * key.value_dim * ELEMENT_BYTES * stages),
            Buffer("words", config.block_q * config.block_kv * FLOAT_BYTES),
            Buffer("columns", warps * config.block_kv * FLOAT_BYTES),
        ),
        barriers=(
            NamedBarrier("columns", 1, consumers * WARPGROUP, "sums of all warps are in smem"),
            NamedBarrier("summed", 2, consumers * WARPGROUP, "they have been read"),
        ),
    )
    check(plan)
    return plan
