"""Bundles and layouts that the roles of Hopper's gradient of a bias share."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.pipeline import PipelineAsync, PipelineConsumer, PipelineProducer, PipelineTmaAsync

from jax_fa.kernels import edges, fragments, primitives
from jax_fa.kernels.dbias_work import Arrays, Tiles
from jax_fa.kernels.forward_work import Scalars, Variant
from jax_fa.kernels.sm90 import bias_chunks
from jax_fa.kernels.sm90.plan import GROUP_BITS, WGMMA_ROWS


class Tma(NamedTuple):
    """TMA descriptors."""

    q: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom
    dout: cute.CopyAtom


class DbiasLayouts(NamedTuple):
    """Shared memory layouts."""

    q: cute.ComposedLayout  # (block_q, D, stages)
    k: cute.ComposedLayout  # (block_kv, D, stages)
    v: cute.ComposedLayout  # (block_kv, Dv, stages)
    dout: cute.ComposedLayout  # (block_q, Dv, stages)
    bias: cute.ComposedLayout  # (block_q, halves, bias_stages)


class DbiasSmem(NamedTuple):
    """Shared memory."""

    q: cute.Tensor  # (block_q, D, stages)
    k: cute.Tensor  # (block_kv, D, stages)
    v: cute.Tensor  # (block_kv, Dv, stages)
    dout: cute.Tensor  # (block_q, Dv, stages)
    bias: cute.Tensor  # (block_q, halves, bias_stages)
    words: cute.Tensor  # (4, threads, block_kv / 8): each thread keeps the bias of its own scores
    columns: cute.Tensor  # (block_kv, warps): sums over the rows of a warp
    factors: Any  # F of ``bias_product.py``, or None
    odd: Any  # (1 + consumers,) ``bias_product.write_factors``, or None likewise
    steps: cute.Tensor  # (STEP_WORDS, step_stages)
    stats: cute.Tensor  # (STATISTICS, block_q, step_stages)
    found: None = None  # nobody scans for segments


class DbiasContext(NamedTuple):
    """The kernel's arguments and shared memory, which every role is given."""

    tma: Tma
    arrays: Arrays
    scalars: Scalars
    grid: Tiles
    smem: DbiasSmem
    bias: primitives.TmaArray
    chunks: PipelineTmaAsync  # of the bias
    steps: PipelineAsync


class DbiasPipes(NamedTuple):
    """One end of each edge of which a role knows the stage without being told."""

    qk: PipelineProducer | PipelineConsumer
    dov: PipelineProducer | PipelineConsumer


def make_layouts(variant: Variant) -> DbiasLayouts:
    """The layouts of a variant's shared memory."""
    key, config, dtype = variant.key, variant.config, variant.dtype
    q_rows, kv_rows, stages = config.block_q, config.block_kv, config.stages
    return DbiasLayouts(
        q=primitives.smem_layout(dtype, (q_rows, key.head_dim, stages)),
        k=primitives.smem_layout(dtype, (kv_rows, key.head_dim, stages)),
        v=primitives.smem_layout(dtype, (kv_rows, key.value_dim, stages)),
        dout=primitives.smem_layout(dtype, (q_rows, key.value_dim, stages)),
        bias=bias_chunks.layout(q_rows, config.bias_stages),
    )


def columns_at(variant: Variant, x: DbiasContext, chunk: Int32) -> DbiasContext:
    """The context with its ``columns`` in the place of a chunk of the bias."""
    pointer = cute.recast_ptr(x.smem.bias[None, None, chunk].iterator, dtype=Float32)
    warps = variant.plan.role("consume").threads // edges.WARP
    layout = cute.make_layout((variant.config.block_kv, warps))
    return x._replace(smem=x.smem._replace(columns=cute.make_tensor(pointer, layout)))


class DbiasConsumer(NamedTuple):
    """Operands, accumulator and place of one consumer warpgroup."""

    s_mma: cute.TiledMma
    q: cute.Tensor  # A descriptors of S, (_, 1, D / 16, stages)
    k: cute.Tensor  # B descriptors of S
    dout: cute.Tensor  # A descriptors of dP
    v: cute.Tensor  # B descriptors of dP
    sums: cute.Tensor  # sums of dS, as an accumulator of 64 x block_kv
    bias: cute.Tensor | None  # words of a bias that TMA cannot read, (block_kv / 2,)
    kept: cute.Tensor  # the same in shared memory, (4, block_kv / 8)
    index: Int32
    thread: Int32


def make_consumer(variant: Variant, x: DbiasContext) -> DbiasConsumer:
    """The consumer that the calling thread belongs to, with its fragments."""
    key, config, smem = variant.key, variant.config, x.smem
    # By bits: a division rounds down, which leaves more values in registers.
    first = variant.plan.role("consume").warps.start // edges.WARPS_PER_GROUP
    thread = cute.arch.thread_idx()[0] & (edges.WARPGROUP - 1)
    group = cute.arch.thread_idx()[0] >> (edges.WARPGROUP.bit_length() - 1)
    index = cute.arch.make_warp_uniform(group - first)
    s_mma = fragments.make_mma(variant.dtype, config.block_kv, OperandMajorMode.K, False)
    part = s_mma.get_slice(0)
    q = cute.local_tile(smem.q, (WGMMA_ROWS, key.head_dim), (index, 0, None))
    dout = cute.local_tile(smem.dout, (WGMMA_ROWS, key.value_dim), (index, 0, None))
    sums = s_mma.make_fragment_C(s_mma.partition_shape_C((WGMMA_ROWS, config.block_kv)))
    return DbiasConsumer(
        s_mma=s_mma,
        q=s_mma.make_fragment_A(part.partition_A(q)),
        k=s_mma.make_fragment_B(part.partition_B(smem.k)),
        dout=s_mma.make_fragment_A(part.partition_A(dout)),
        v=s_mma.make_fragment_B(part.partition_B(smem.v)),
        sums=sums,
        bias=None,
        kept=smem.words[None, index * edges.WARPGROUP + thread, None],
        index=index,
        thread=thread,
    )


def thread_anew(c: DbiasConsumer) -> DbiasConsumer:
    """``c``; loops keep no values derived from its ``thread`` in registers."""
    return c._replace(thread=primitives.opaque(c.thread) & GROUP_BITS)
