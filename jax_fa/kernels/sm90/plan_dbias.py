"""Hopper's gradient of a bias: roles, edges, shared memory and barriers. Read this first.

Two warps describe each step: which blocks it multiplies, and the statistics of their rows. One
loads these blocks, one the bias of tiles to come. Two or three warpgroups each own 64 query
rows of a tile of the bias, and keep their gradient in registers over all batches and heads (and
tiles of rows and keys) that share it.
"""

from __future__ import annotations

from jax_fa.kernels.edges import (
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
from jax_fa.spec.config_sm90_dbias import HopperBiasGradient
from jax_fa.spec.key import KernelKey

FLOAT_BYTES = 4
STEP_WORDS = 32
"""Of the description of a step: ``dbias_steps.py``."""
STATISTICS = 2
"""Of a row: its log-sum-exp in base 2, and delta."""


def dbias_plan(key: KernelKey, config: HopperBiasGradient) -> Plan:
    """The checked plan of the kernel for ``key`` under ``config``."""
    consumers, stages = config.num_consumers, config.stages
    rows = config.block_q + config.block_kv
    qk_bytes = rows * key.head_dim * ELEMENT_BYTES
    dov_bytes = rows * key.value_dim * ELEMENT_BYTES
    chunk_bytes = config.block_q * CHUNK_BYTES
    for chunks in (config.half_chunks, config.float_chunks):
        # A tile's chunks lie side by side, and are counted from the first.
        if config.bias_stages % chunks:
            raise PlanError(f"{config.bias_stages} chunks are no multiple of {chunks}")
    registers, steps = config.producer_registers, config.step_stages
    products, odd = (), ()
    if key.multiplies_bias:
        products = (Buffer("factors", FACTORS_BYTES), Buffer("odd", 4 * num_words(config)))
        odd = (
            NamedBarrier(f"tile{i}", 4 + i, WARPGROUP, "what a tile is; all its steps done")
            for i in range(consumers)
        )
    plan = Plan(
        roles=(
            Role("load", range(0, 1), registers),
            Role("load_bias", range(1, 2), registers),
            Role("find", range(2, 4), registers),
            Role("consume", range(4, 4 + 4 * consumers), config.consumer_registers),
        ),
        edges=(
            Edge("qk", "load", "consume", stages, qk_bytes, "queries, keys in smem", "S retired"),
            Edge("dov", "load", "consume", stages, dov_bytes, "dO, values in smem", "dP retired"),
            Edge(
                "bias",
                "load_bias",
                "consume",
                config.bias_stages,
                chunk_bytes,
                "chunk in smem",
                "all steps of the tile have added it",
            ),
            Edge(
                "steps",
                "find",
                ("load", "consume"),
                steps,
                0,
                "a step is described in smem",
                "its description has been read",
                kind="threads",
            ),
        ),
        buffers=(
            Buffer("steps", STEP_WORDS * FLOAT_BYTES * steps),
            Buffer("stats", config.block_q * STATISTICS * FLOAT_BYTES * steps),
            Buffer("q", config.block_q * key.head_dim * ELEMENT_BYTES * stages),
            Buffer("k", config.block_kv * key.head_dim * ELEMENT_BYTES * stages),
            Buffer("dout", config.block_q * key.value_dim * ELEMENT_BYTES * stages),
            Buffer("v", config.block_kv * key.value_dim * ELEMENT_BYTES * stages),
            Buffer("bias", chunk_bytes * config.bias_stages),
            *products,
            Buffer(
                "words",
                config.block_q * config.block_kv * FLOAT_BYTES,
                "bias",
                "holds a bias that TMA cannot read, so that no chunk arrives",
            ),
            Buffer(
                "columns",
                4 * consumers * config.block_kv * FLOAT_BYTES,
                "bias",
                "overwrites the bias of a tile after its last step, before the chunks are released",
            ),
        ),
        barriers=(
            NamedBarrier("read", 1, consumers * WARPGROUP, "nobody reads the tile's bias again"),
            NamedBarrier("columns", 2, consumers * WARPGROUP, "sums of all warps are in smem"),
            NamedBarrier("summed", 3, consumers * WARPGROUP, "they have been read"),
            *odd,
        ),
    )
    check(plan)
    return plan
