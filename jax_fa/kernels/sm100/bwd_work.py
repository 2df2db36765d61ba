"""What the roles of the Blackwell backward share: bundles, layouts, loads, products."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.pipeline import PipelineProducer

from jax_fa.kernels import edges, primitives, tiles
from jax_fa.kernels.backward_rows import FLOATS, Scratch
from jax_fa.kernels.backward_work import Arrays, Scalars, Step, Tma, Work, bulk_load
from jax_fa.kernels.sm100 import bwd_instructions, clusters, tensor_plan, umma
from jax_fa.kernels.sm100.plan import MMA_ROWS
from jax_fa.kernels.sm100.plan_bwd import (
    REDUCE_STAGES,
    REDUCE_WARPS,
    STATS,
    VALUE_HALVES,
)
from jax_fa.spec.config_sm100 import BlackwellBackward
from jax_fa.spec.key import KernelKey


class BackwardVariant(NamedTuple):
    """All that is fixed at compile time."""

    key: KernelKey
    config: BlackwellBackward
    plan: edges.Plan

    @property
    def claims_tiles(self) -> bool:
        """Whether CTAs may claim one tile after the other."""
        return False

    @property
    def is_general(self) -> bool:
        """Whether anything that can hide a key may be present."""
        return self.key.mask == "general"

    @property
    def p_moves(self) -> bool:
        """Whether P of the second warpgroup of the role compute overwrites S of the first."""
        return any(barrier.name == "read" for barrier in self.plan.barriers)

    @property
    def dq_order(self) -> str:
        """The order of the sums of dQ in memory (``backward_rows``)."""
        return "rows" if self.config.sweeps == 1 else "columns"

    @property
    def dtype(self) -> type:
        """Element type of the arrays."""
        return primitives.DTYPES[self.key.dtype]


COLUMN_HALVES = ("k_columns", "q_columns", "dout_columns")
"""Operands whose columns the CTAs of a pair divide between them; of the others, the rows."""


class BackwardLayouts(NamedTuple):
    """Shared memory layouts; only a pair of CTAs has the last four."""

    k: cute.ComposedLayout  # (128, D)
    v: cute.ComposedLayout  # (128, Dv); with two sweeps, two halves: (128, Dv / 2, 2)
    q: cute.ComposedLayout  # (block_q / ctas, D, q_stages)
    dout: cute.ComposedLayout  # (block_q / ctas, Dv, dout_stages)
    ds: cute.ComposedLayout  # (128 keys, block_q); in a pair (256 keys, 64 queries)
    dq: cute.Layout  # (4, lane, reduce_columns / 4, stage, warp), as in ``Scratch.dq_sum``
    stats: cute.Layout  # (block_q, {lse2, delta}, stages)
    k_columns: cute.ComposedLayout | None = None  # (256, D / 2)
    q_columns: cute.ComposedLayout | None = None  # (128, D / 2, q_stages)
    dout_columns: cute.ComposedLayout | None = None  # (128, Dv / 2, dout_stages)
    ds_parts: cute.ComposedLayout | None = None  # (128 keys, 64 queries, {ds, ds, ds_out})


def make_layouts(variant: BackwardVariant) -> BackwardLayouts:
    """The layouts of a variant's shared memory."""
    key, config, dtype = variant.key, variant.config, variant.dtype
    fours, ctas = config.reduce_columns // FLOATS, variant.plan.ctas
    stats = cute.make_layout((config.block_q, STATS, variant.plan.edge("stats").stages))
    dq = cute.make_layout((FLOATS, edges.WARP, fours, REDUCE_STAGES, REDUCE_WARPS))
    rows = config.block_q // ctas
    shapes = {
        "k": (MMA_ROWS, key.head_dim),
        "v": (MMA_ROWS, key.value_dim),
        "q": (rows, key.head_dim, config.q_stages),
        "dout": (rows, key.value_dim, config.dout_stages),
        "ds": (MMA_ROWS * ctas, rows),
    }
    if config.sweeps == 2:
        shapes["v"] = (MMA_ROWS, key.value_dim // VALUE_HALVES, VALUE_HALVES)
    if ctas > 1:
        shapes |= {
            "k_columns": (MMA_ROWS * ctas, key.head_dim // ctas),
            "q_columns": (config.block_q, key.head_dim // ctas, config.q_stages),
            "dout_columns": (config.block_q, key.value_dim // ctas, config.dout_stages),
            "ds_parts": (MMA_ROWS, rows, ctas + 1),
        }
    swizzled = {name: primitives.smem_layout(dtype, shape) for name, shape in shapes.items()}
    return BackwardLayouts(**swizzled, dq=dq, stats=stats)


class BackwardSmem(NamedTuple):
    """Shared memory, laid out by ``BackwardLayouts``; only a pair has the last four."""

    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    dout: cute.Tensor
    ds: cute.Tensor
    dq: cute.Tensor
    stats: cute.Tensor
    zero_fill: cute.Pointer  # one mbarrier, for loads whose last rows are zeroed
    found: cute.Tensor  # (FOUND_WORDS,) segments.py, dense_mask.py
    k_columns: Any = None
    q_columns: Any = None
    dout_columns: Any = None
    ds_parts: Any = None


class BackwardContext(NamedTuple):
    """All that the roles work with."""

    tma: Tma
    arrays: Arrays
    scratch: Scratch
    scalars: Scalars
    order: tiles.Order
    smem: BackwardSmem
    tmem: cute.Pointer
    lone_tma: Tma | None = None  # in a pair: counts at this CTA's barriers, not the first's


def first_key(variant: BackwardVariant, tile: tiles.Tile) -> Int32:
    """The position in the sequence of this CTA's first key of a tile."""
    ctas = variant.plan.ctas
    return (tile.block * ctas + clusters.rank_in_cluster(ctas)) * MMA_ROWS


# ------------------------------------------------------------------------------------------- loads


class Operand(NamedTuple):
    """An operand that TMA loads block by block.

    Attributes:
        array: (rows, columns, heads, batches), as TMA sees them.
        tma: its descriptor.
        lone_tma: in a pair, the descriptor that counts at this CTA's barriers.
        ring: (rows, columns, stages) of shared memory; with one stage, (rows, columns).
        has_columns: whether the CTAs of a pair divide its columns, instead of its rows.
    """

    array: cute.Tensor
    tma: cute.CopyAtom
    lone_tma: cute.CopyAtom | None
    ring: cute.Tensor
    has_columns: bool


def operand_of(x: BackwardContext, name: str) -> Operand:
    """The operand ``name`` of the products, which is loaded into the ring of the same name."""
    lone_tma = None if x.lone_tma is None else getattr(x.lone_tma, name)
    array, tma, ring = (getattr(bundle, name) for bundle in (x.arrays, x.tma, x.smem))
    return Operand(array, tma, lone_tma, ring, name in COLUMN_HALVES)


class Block(NamedTuple):
    """A block of a sequence.

    Attributes:
        rows: (rows, columns), from the first row of the sequence on.
        number: index of the block in the sequence.
        length: number of rows that the sequence uses.
    """

    rows: cute.Tensor
    number: Int32
    length: Int32


@cute.jit
def load_keys(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    operand: Operand,
    work: Work,
    slot: Any,
    phase: Int32,
) -> Int32:
    """Loads the tile's keys or values into the stage ``slot``; in a pair, this CTA's half.

    Returns the next phase of the barrier ``zero_fill``.
    """
    rows = operand.array[None, None, work.tile.kv_head, work.tile.batch]
    rows = cute.domain_offset((work.kv_start, 0), rows)
    block = Block(rows, work.tile.block, work.window.kv_len)
    return _load_block(variant, x, operand, block, slot, phase)


class Loaded(NamedTuple):
    """The results of a load.

    Attributes:
        end: the advanced end of the operand's edge.
        phase: the next phase of the barrier ``zero_fill``.
    """

    end: PipelineProducer
    phase: Int32


@cute.jit
def load_queries(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    operand: Operand,
    work: Work,
    at: Step,
    end: PipelineProducer,
    phase: Int32,
) -> Loaded:
    """Loads the rows of q or dO of a step into the next stage; in a pair, this CTA's half."""
    slot = end.acquire_and_advance()
    rows = operand.array[None, None, at.head, work.tile.batch]
    rows = cute.domain_offset((work.q_start, 0), rows)
    block = Block(rows, at.q_block, work.window.q_len)
    return Loaded(end, _load_block(variant, x, operand, block, slot, phase))


class LoadedWithStats(NamedTuple):
    """``Loaded``, plus the advanced end of the edge stats."""

    end: PipelineProducer
    stats: PipelineProducer
    phase: Int32


@cute.jit
def load_with_stats(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    operand: Operand,
    work: Work,
    at: Step,
    end: PipelineProducer,
    stats: PipelineProducer,
    phase: Int32,
) -> LoadedWithStats:
    """Does ``load_queries``, then ``load_stats``."""
    end, phase = load_queries(variant, x, operand, work, at, end, phase)
    stats = load_stats(variant, x, work, at, stats)
    return LoadedWithStats(end, stats, phase)


@cute.jit
def _load_block(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    operand: Operand,
    block: Block,
    slot: Any,
    phase: Int32,
) -> Int32:
    """Loads a block into the stage ``slot``; rows that the sequence does not use become zero.

    Their P and dS are 0, but 0 * NaN is NaN. TMA itself zero-fills rows beyond the array. A block
    with other unused rows is loaded by way of the barrier ``zero_fill``, then zeroed. A half by
    columns has all rows of the block. Returns the next phase of ``zero_fill``.
    """
    tile = operand.ring
    if const_expr(cute.rank(tile) > 2):
        tile = tile[None, None, slot.index]
    ctas, rank = variant.plan.ctas, clusters.rank_in_cluster(variant.plan.ctas)
    height, width = cute.product_each(tile.shape)
    row, column = block.number, rank
    if const_expr(not operand.has_columns):
        row, column = block.number * ctas + rank, 0
    used = block.length - row * height
    pieces = cute.local_tile(block.rows, (height, width), (None, column))
    target, source = primitives.tma_views(operand.tma, tile, pieces)
    if const_expr(not variant.is_general):
        cute.copy(operand.tma, source[None, row], target, tma_bar_ptr=slot.barrier)
    else:
        if used >= height:
            cute.copy(operand.tma, source[None, row], target, tma_bar_ptr=slot.barrier)
        else:
            size_bytes = height * width * variant.dtype.width // 8
            tma = operand.tma
            if const_expr(ctas > 1):
                tma = operand.lone_tma
                target, source = primitives.tma_views(tma, tile, pieces)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(x.smem.zero_fill, size_bytes)
            cute.copy(tma, source[None, row], target, tma_bar_ptr=x.smem.zero_fill)
            cute.arch.mbarrier_wait(x.smem.zero_fill, phase)
            phase = phase ^ 1
            primitives.zero_fill_rows(tile, used)
            with cute.arch.elect_one():
                if const_expr(ctas > 1):
                    bwd_instructions.complete_tx_of(tensor_plan.LEADER, slot.barrier, size_bytes)
                else:
                    primitives.complete_tx(slot.barrier, size_bytes)
    return phase


@cute.jit
def load_stats(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    work: Work,
    at: Step,
    stats: PipelineProducer,
) -> PipelineProducer:
    """Loads the statistics of all query rows of a step, in each CTA; returns ``stats`` advanced."""
    slot = stats.acquire_and_advance()
    row = work.scratch_row + at.q_block * variant.config.block_q
    for i, array in enumerate((x.scratch.lse2, x.scratch.delta)):
        source = cute.domain_offset((row,), array[None, at.head])
        bulk_load(source, x.smem.stats[None, i, slot.index], slot.barrier)
    return stats


# ---------------------------------------------------------------------------------------- products


class Product(NamedTuple):
    """A matrix product: its instruction, its accumulator, its operands, whose last mode is K."""

    mma: cute.TiledMma
    acc: cute.Tensor
    a: cute.Tensor
    b: cute.Tensor


class BackwardProducts(NamedTuple):
    """All five products. Where B is q or dO, ``b`` has one more mode, of stages."""

    s: Product  # (keys, queries) = k q^T
    dp: Product  # (keys, queries) = v dO^T
    dv: Product  # (keys, Dv) += P^T dO, A in tensor memory
    dk: Product  # (keys, D) += dS^T q, A in tensor memory
    dq: Product  # (queries, D) = dS k; with two sweeps (D, queries) = k^T dS


def make_products(variant: BackwardVariant, x: BackwardContext) -> BackwardProducts:
    """The products of a variant, with their memory; in a pair, as its first CTA issues them.

    Operands have the sizes of one CTA's share. With two sweeps, ``a`` of dP has one more mode, of
    the halves of the values, and ``b`` of dP is in the ring of queries.
    """
    key, dtype, smem, block_q = variant.key, variant.dtype, x.smem, variant.config.block_q
    ctas, is_swept_once = variant.plan.ctas, variant.config.sweeps == 1
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    scores = umma.make_umma(dtype, block_q, k_major, ctas=ctas)
    dv = umma.make_umma(dtype, key.value_dim, mn_major, a_in_tmem=True, ctas=ctas)
    dk = umma.make_umma(dtype, key.head_dim, mn_major, a_in_tmem=True, ctas=ctas)
    dq_columns = key.head_dim if is_swept_once else block_q
    dq = umma.make_umma(
        dtype, dq_columns, mn_major, ctas=ctas, a_major=mn_major, rows=MMA_ROWS // ctas
    )

    def a_in_smem(mma: cute.TiledMma, tile: cute.Tensor) -> cute.Tensor:
        own = mma.get_slice(0).partition_A(tile) if ctas == 1 else umma.umma_operand(tile)
        return mma.make_fragment_A(own)

    def b_in_smem(mma: cute.TiledMma, tile: cute.Tensor) -> cute.Tensor:
        own = mma.get_slice(0).partition_B(tile) if ctas == 1 else umma.umma_operand(tile)
        return mma.make_fragment_B(own)

    by_columns = smem.k, smem.q, smem.dout
    if ctas > 1:
        by_columns = smem.k_columns, smem.q_columns, smem.dout_columns
    k_t, q_t, dout_t = (primitives.transposed(tensor) for tensor in by_columns)
    ds_t = primitives.transposed(smem.ds)
    keys, dq_rows = MMA_ROWS * ctas, MMA_ROWS if is_swept_once else key.head_dim
    dq_a, dq_b = (ds_t, k_t) if is_swept_once else (k_t, ds_t)
    dq_operands = a_in_smem(dq, dq_a), b_in_smem(dq, dq_b)
    return BackwardProducts(
        Product(
            scores,
            accumulator(variant, x, scores, "s", keys, block_q),
            a_in_smem(scores, smem.k),
            b_in_smem(scores, smem.q),
        ),
        Product(
            scores,
            accumulator(variant, x, scores, "dp", keys, block_q),
            a_in_smem(scores, smem.v),
            b_in_smem(scores, smem.dout if is_swept_once else smem.q),
        ),
        Product(
            dv,
            accumulator(variant, x, dv, "dv", keys, key.value_dim),
            halves(variant, x.tmem, dv, "p"),
            b_in_smem(dv, dout_t),
        ),
        Product(
            dk,
            accumulator(variant, x, dk, "dk", keys, key.head_dim),
            halves(variant, x.tmem, dk, "ds"),
            b_in_smem(dk, q_t),
        ),
        Product(dq, accumulator(variant, x, dq, "dq", dq_rows, dq_columns), *dq_operands),
    )


def accumulator(
    variant: BackwardVariant,
    x: BackwardContext,
    mma: cute.TiledMma,
    name: str,
    rows: int,
    columns: int,
) -> cute.Tensor:
    """The result ``name`` in tensor memory, whose ``rows`` count those of all CTAs."""
    layout = mma.make_fragment_C(mma.partition_shape_C((rows, columns))).layout
    return cute.make_tensor(x.tmem + variant.plan.columns(name).start, layout)


def halves(
    variant: BackwardVariant, tmem: cute.Pointer, mma: cute.TiledMma, name: str
) -> cute.Tensor:
    """P or dS as an A operand of two halves, in tensor memory that begins at ``tmem``."""
    rows = MMA_ROWS * variant.plan.ctas
    half = mma.make_fragment_A(mma.partition_shape_A((rows, variant.config.half_q))).layout
    *modes, slabs = half.shape
    *strides, slab = half.stride
    first, second = (variant.plan.columns(f"{name}{i}").start for i in range(2))
    gap = (second - first) * 32 // variant.dtype.width
    layout = cute.make_layout((*modes, (slabs, 2)), stride=(*strides, (slab, gap)))
    pointer = cute.recast_ptr(tmem + first, dtype=variant.dtype)
    return cute.make_tensor(pointer, layout)


@cute.jit
def multiply(product: Product, accumulate: Boolean | bool, stage: Int32 | None = None):
    """Issues all slabs of a product; ``stage`` is that of its B operand, if B is in a ring."""
    b = product.b
    if const_expr(stage is not None):
        b = b[None, None, None, stage]
    slabs = range(cute.size(product.a, mode=[2]))
    umma.issue_umma(product.mma, product.acc, product.a, b, accumulate, slabs)
