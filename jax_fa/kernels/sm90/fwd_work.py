"""What the roles of the Hopper forward share beyond ``kernels/forward_work.py``: memory, pipes."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.kernels import primitives, tiles
from jax_fa.kernels.forward_work import Arrays, Scalars, Tma, Variant
from jax_fa.kernels.sm90.plan import ROWS


class Layouts(NamedTuple):
    """Shared memory layouts, a tile of 64 query rows or one key block in modes 0 and 1."""

    q: cute.ComposedLayout  # (64, D, consumers * q_stages)
    k: cute.ComposedLayout  # (block_kv, D, stages)
    v: cute.ComposedLayout  # (block_kv, Dv, stages)
    out: cute.ComposedLayout  # (64, Dv)


class Pipes(NamedTuple):
    """One end of each edge."""

    q: PipelineProducer | PipelineConsumer
    k: PipelineProducer | PipelineConsumer
    v: PipelineProducer | PipelineConsumer


class Smem(NamedTuple):
    """Shared memory."""

    q: cute.Tensor  # (64, D, consumers * q_stages)
    k: cute.Tensor  # (block_kv, D, stages)
    v: cute.Tensor  # (block_kv, Dv, stages)
    scrub: cute.Pointer  # one mbarrier
    segment_keys: cute.Tensor  # (4,) kernels/segments.py


class Context(NamedTuple):
    """What both roles work with."""

    tma: Tma
    arrays: Arrays
    scalars: Scalars
    order: tiles.Order
    smem: Smem
    packing: Any  # tiles.Packing, or None if the variant does not pack heads
    granules: Any  # Granules, or None likewise


def make_layouts(variant: Variant) -> Layouts:
    """The layouts of a variant's shared memory."""
    key, config, dtype = variant.key, variant.config, variant.dtype
    q_tiles = config.num_consumers * config.q_stages
    return Layouts(
        q=primitives.smem_layout(dtype, (ROWS, key.head_dim, q_tiles)),
        k=primitives.smem_layout(dtype, (config.block_kv, key.head_dim, config.stages)),
        v=primitives.smem_layout(dtype, (config.block_kv, key.value_dim, config.stages)),
        out=primitives.smem_layout(dtype, (ROWS, key.value_dim)),
    )
