"""Bundles and layouts that the roles of the Hopper forward share."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.kernels import edges, fragment_softmax, fragments, primitives, tiles
from jax_fa.kernels.forward_work import Arrays, Scalars, Tma, Variant
from jax_fa.kernels.sm90.plan import GROUP_BITS, WGMMA_ROWS


class ForwardLayouts(NamedTuple):
    """Shared memory layouts; modes 0 and 1 are a tile of 64 query rows or one key block."""

    q: cute.ComposedLayout  # (64, D, consumers * q_stages)
    k: cute.ComposedLayout  # (block_kv, D, stages)
    v: cute.ComposedLayout  # (block_kv, Dv, stages)
    out: cute.ComposedLayout  # (64, Dv)
    bias: Any  # (block_q, halves, bias_stages), or None without one


class ForwardPipes(NamedTuple):
    """One end of each edge."""

    q: PipelineProducer | PipelineConsumer
    k: PipelineProducer | PipelineConsumer
    v: PipelineProducer | PipelineConsumer


class KvPipes(NamedTuple):
    """One end of the edges of keys and values."""

    k: PipelineProducer | PipelineConsumer
    v: PipelineProducer | PipelineConsumer


class ForwardSmem(NamedTuple):
    """Shared memory."""

    q: cute.Tensor  # (64, D, consumers * q_stages)
    k: cute.Tensor  # (block_kv, D, stages)
    v: cute.Tensor  # (block_kv, Dv, stages)
    bias: Any  # (block_q, halves, bias_stages), or None without one
    zero_fill: cute.Pointer  # one mbarrier, for ``loads.Detour``
    lists: cute.Tensor  # (TOLD_WORDS, stages) fwd_lists.py
    found: cute.Tensor  # (TOLD_WORDS,) one of the lists: segments.py, dense_mask.py
    sorted: Any  # (MAX_BLOCKS,) fwd_order.py, or None where blocks are not sorted
    steps: Any  # (2 * stages,) fwd_steps.py, or None unless the mask is general


class ForwardContext(NamedTuple):
    """The kernel's arguments and shared memory, which every role is given."""

    tma: Tma
    arrays: Arrays
    scalars: Scalars
    order: tiles.Order
    smem: ForwardSmem
    packing: Any  # division.Packing, or None if the variant does not pack heads
    granules: Any  # primitives.TmaArray, or None likewise
    bias: Any  # primitives.TmaArray of the bias, or None without one
    ring: Any  # the PipelineAsync of lists, or None if the variant has none
    chunks: Any  # the pipelines of a bias, made by its module, or None without one


def make_layouts(variant: Variant) -> ForwardLayouts:
    """The layouts of a variant's shared memory."""
    key, config, dtype = variant.key, variant.config, variant.dtype
    q_tiles = config.num_consumers * config.q_stages
    return ForwardLayouts(
        q=primitives.smem_layout(dtype, (WGMMA_ROWS, key.head_dim, q_tiles)),
        k=primitives.smem_layout(dtype, (config.block_kv, key.head_dim, config.stages)),
        v=primitives.smem_layout(dtype, (config.block_kv, key.value_dim, config.stages)),
        out=primitives.smem_layout(dtype, (WGMMA_ROWS, key.value_dim)),
        bias=variant.bias.layout(config) if key.has_bias else None,
    )


class ForwardConsumer(NamedTuple):
    """Operands, accumulator, statistics and place of one consumer warpgroup."""

    qk: cute.TiledMma
    pv: cute.TiledMma
    q: cute.Tensor  # A descriptors, (_, 1, D / 16, consumers * q_stages), or registers
    k: cute.Tensor  # B descriptors, (_, 1, D / 16, stages)
    v: cute.Tensor  # B descriptors, (_, 1, block_kv / 16, stages)
    p: cute.Tensor  # A registers, (8, 1, block_kv / 16)
    out: cute.Tensor  # accumulator of 64 x Dv
    state: fragment_softmax.RowState
    shrink: cute.Tensor  # (2,) factor by which the accumulator shrinks before PV of ``p``
    index: Int32
    thread: Int32


def make_consumer(variant: Variant, x: ForwardContext) -> ForwardConsumer:
    """The consumer that the calling thread belongs to, with its fragments."""
    key, config, dtype = variant.key, variant.config, variant.dtype
    thread = cute.arch.thread_idx()[0] - variant.plan.role("consume").warps.start * edges.WARP
    columns = config.columns or config.block_kv
    qk = fragments.make_mma(dtype, columns, OperandMajorMode.K, config.q_in_registers)
    pv = fragments.make_mma(dtype, key.value_dim, OperandMajorMode.MN, a_in_registers=True)
    qk_slice, pv_slice = qk.get_slice(0), pv.get_slice(0)
    q_source = qk_slice.partition_A(x.smem.q)
    if config.q_in_registers:
        q_source = qk.partition_shape_A((WGMMA_ROWS, key.head_dim))
    return ForwardConsumer(
        qk=qk,
        pv=pv,
        q=qk.make_fragment_A(q_source),
        k=qk.make_fragment_B(qk_slice.partition_B(x.smem.k)),
        v=pv.make_fragment_B(pv_slice.partition_B(primitives.transposed(x.smem.v))),
        p=pv.make_fragment_A(pv.partition_shape_A((WGMMA_ROWS, config.block_kv))),
        out=pv.make_fragment_C(pv.partition_shape_C((WGMMA_ROWS, key.value_dim))),
        state=fragment_softmax.make_row_state(),
        shrink=cute.make_rmem_tensor((fragments.ROWS,), Float32),
        index=cute.arch.make_warp_uniform(thread // edges.WARPGROUP),
        thread=thread % edges.WARPGROUP,
    )


def thread_anew(variant: Variant, c: ForwardConsumer) -> ForwardConsumer:
    """``c``; with lists ahead, loops keep no values derived from its ``thread`` in registers."""
    return c._replace(thread=primitives.opaque(c.thread) & GROUP_BITS) if variant.lists_ahead else c
