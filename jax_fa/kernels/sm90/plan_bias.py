"""What a bias adds to the plan of the Hopper forward: a warp that loads chunks of it to a ring."""

from __future__ import annotations

from dataclasses import replace

from jax_fa.kernels.edges import WARP, Buffer, Edge, Plan, PlanError, Role, check
from jax_fa.kernels.sm90.plan import WGMMA_ROWS, forward_plan
from jax_fa.spec.config_sm90 import HopperForward
from jax_fa.spec.config_sm90_bwd import HopperBackward
from jax_fa.spec.config_sm90_dbias import HopperBiasGradient
from jax_fa.spec.key import KernelKey

CHUNK_BYTES = 128
"""Bytes of each row in a chunk: ``bias_chunks.py``."""
ANY, HALF, FLOAT = range(3)
"""What a step is compiled for: any bias; one without cap that TMA reads, of 16 bits or float32."""
FACTORS_BYTES = 2 * WGMMA_ROWS * CHUNK_BYTES
"""The matrices that a bias is multiplied by: ``bias_product.py``."""
WORDS_IN_TURN = 2
"""Words of a consumer of the forward: ``fwd_bias_product.py``."""


def chunks_of_stage(key: KernelKey, config: HopperForward) -> int:
    """The number of chunks in a stage of the ring: one, or all of a block."""
    return config.block_kv * 2 // CHUNK_BYTES if key.multiplies_bias else 1


def num_words(config: HopperForward | HopperBackward | HopperBiasGradient, of_each: int = 1) -> int:
    """Words beside the factors: whether they are rounded, and some ``of_each`` consumer."""
    return 1 + of_each * config.num_consumers


def biased_plan(key: KernelKey, config: HopperForward) -> Plan:
    """The checked plan of the forward kernel with a bias for ``key`` under ``config``."""
    if config.bias_stages.bit_count() != 1:
        raise PlanError("the ring of a bias holds a power of two: consumers mask numbers of chunks")
    plan = forward_plan(key, config)
    stage_bytes = chunks_of_stage(key, config) * config.block_q * CHUNK_BYTES
    load, find, consume = plan.roles
    finders = find.warps[:-1]
    load_bias = Role("load_bias", find.warps[-1:], config.producer_registers)
    chunks = Edge(
        "bias", "load_bias", "consume", config.bias_stages, stage_bytes, "chunk in smem", "added"
    )
    buffers = [Buffer("bias", stage_bytes * config.bias_stages)]
    if key.multiplies_bias:
        buffers += [
            Buffer("factors", FACTORS_BYTES),
            Buffer("words", 4 * num_words(config, WORDS_IN_TURN)),
        ]
    readers = ("load", "load_bias", "consume")
    plan = replace(
        plan,
        roles=(load, replace(find, warps=finders), load_bias, consume),
        edges=(
            *(replace(x, consumer=readers) if x.data == "work" else x for x in plan.edges),
            chunks,
        ),
        buffers=(*plan.buffers, *buffers),
        barriers=tuple(
            replace(x, threads=WARP * len(finders)) if x.name == "made" else x
            for x in plan.barriers
        ),
    )
    check(plan)
    return plan
