"""What the roles of the Blackwell backward share: bundles, operands, layouts."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode

from jax_fa.config import BlackwellBackward, KernelKey
from jax_fa.kernels import edges, primitives, tiles
from jax_fa.kernels.backward_rows import FLOATS, Scratch
from jax_fa.kernels.backward_work import Arrays, Scalars, Tma
from jax_fa.kernels.sm100.plan_bwd import ADD_STAGES, ADD_WARPS, ROWS, STATS


class Variant(NamedTuple):
    """What is fixed at compile time."""

    key: KernelKey
    config: BlackwellBackward
    plan: edges.Plan

    @property
    def is_general(self) -> bool:
        """Everything that can hide a key may be there."""
        return self.key.mask == "general"

    @property
    def p_moves(self) -> bool:
        """P of the second warpgroup of attend lies over S of the first."""
        return any(barrier.name == "read" for barrier in self.plan.barriers)

    @property
    def dq_order(self) -> str:
        """Order of the sums of dQ (``backward_rows``)."""
        return "rows" if self.config.sweeps == 1 else "columns"

    @property
    def dtype(self) -> type:
        """Element type of the arrays."""
        return primitives.DTYPES[self.key.dtype]


class Layouts(NamedTuple):
    """Shared memory layouts; the last four are of a pair of CTAs."""

    k: cute.ComposedLayout  # (128, D)
    v: cute.ComposedLayout  # (128, Dv); of two sweeps, of either half: (128, Dv / 2, 2)
    q: cute.ComposedLayout  # (block_q / ctas, D, q_stages)
    dout: cute.ComposedLayout  # (block_q / ctas, Dv, dout_stages)
    ds: cute.ComposedLayout  # (128 keys, block_q), of a pair (256 keys, 64 queries)
    dq: cute.Layout  # (4, lane, add_columns / 4, stage, warp), as in ``Scratch.dq_sum``
    stats: cute.Layout  # (block_q, {lse2, delta}, stages)
    kt: cute.ComposedLayout | None = None  # (256, D / 2)
    qt: cute.ComposedLayout | None = None  # (128, D / 2, q_stages)
    dout_t: cute.ComposedLayout | None = None  # (128, Dv / 2, dout_stages)
    ds_parts: cute.ComposedLayout | None = None  # (128 keys, 64 queries, {ds, ds, ds_out})


def make_layouts(variant: Variant) -> Layouts:
    """The layouts of a variant's shared memory."""
    key, config, dtype = variant.key, variant.config, variant.dtype
    fours, ctas = config.add_columns // FLOATS, variant.plan.ctas
    stats = cute.make_layout((config.block_q, STATS, variant.plan.edge("stats").stages))
    dq = cute.make_layout((FLOATS, edges.WARP, fours, ADD_STAGES, ADD_WARPS))
    if ctas > 1:
        shapes = {
            "k": (ROWS, key.head_dim),
            "v": (ROWS, key.value_dim),
            "q": (ROWS // ctas, key.head_dim, config.q_stages),
            "dout": (ROWS // ctas, key.value_dim, config.dout_stages),
            "ds": (ROWS * ctas, ROWS // ctas),
            "kt": (ROWS * ctas, key.head_dim // ctas),
            "qt": (ROWS, key.head_dim // ctas, config.q_stages),
            "dout_t": (ROWS, key.value_dim // ctas, config.dout_stages),
            "ds_parts": (ROWS, ROWS // ctas, ctas + 1),
        }
        swizzled = {name: primitives.smem_layout(dtype, shape) for name, shape in shapes.items()}
        return Layouts(**swizzled, dq=dq, stats=stats)
    v = (ROWS, key.value_dim) if config.sweeps == 1 else (ROWS, key.value_dim // 2, 2)
    return Layouts(
        k=primitives.smem_layout(dtype, (ROWS, key.head_dim)),
        v=primitives.smem_layout(dtype, v),
        q=primitives.smem_layout(dtype, (config.block_q, key.head_dim, config.q_stages)),
        dout=primitives.smem_layout(dtype, (config.block_q, key.value_dim, config.dout_stages)),
        ds=primitives.smem_layout(dtype, (ROWS, config.block_q)),
        dq=dq,
        stats=stats,
    )


class Smem(NamedTuple):
    """Shared memory, as in ``Layouts``; the last four are of a pair."""

    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    dout: cute.Tensor
    ds: cute.Tensor
    dq: cute.Tensor
    stats: cute.Tensor
    scrub: cute.Pointer  # one mbarrier
    segment_rows: cute.Tensor  # (4,) kernels/segments.py
    kt: Any = None
    qt: Any = None
    dout_t: Any = None
    ds_parts: Any = None


class Context(NamedTuple):
    """What all roles work with."""

    tma: Tma
    arrays: Arrays
    scratch: Scratch
    scalars: Scalars
    order: tiles.Order
    smem: Smem
    tmem: cute.Pointer
    lone_tma: Tma | None = None  # of a pair: counts at this CTA's barriers, not at the first's


def first_key(variant: Variant, tile: tiles.Tile) -> Int32:
    """Number in its sequence of this CTA's first key of a tile."""
    ctas = variant.plan.ctas
    return (tile.q_block * ctas + tiles.rank_in_cluster(ctas)) * ROWS


class Product(NamedTuple):
    """A matrix product: its instruction, accumulator and operands, the last mode being K."""

    mma: cute.TiledMma
    acc: cute.Tensor
    a: cute.Tensor
    b: cute.Tensor


class Products(NamedTuple):
    """All five. ``b`` of the products with queries or dO has one more mode, of stages."""

    s: Product  # (keys, queries) = k q^T
    dp: Product  # (keys, queries) = v dO^T
    dv: Product  # (keys, Dv) += P^T dO, A in tensor memory
    dk: Product  # (keys, D) += dS^T q, A in tensor memory
    dq: Product  # (queries, D) = dS k; of two sweeps (D, queries) = k^T dS


def make_products(variant: Variant, x: Context) -> Products:
    """The products of a variant, with their memory.

    Of two sweeps, ``a`` of dP has a mode of the halves of the values, and ``b`` is in the ring of
    queries.
    """
    key, dtype, smem, block_q = variant.key, variant.dtype, x.smem, variant.config.block_q
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    is_swept_once = variant.config.sweeps == 1
    scores = primitives.make_umma(dtype, block_q, k_major)
    dv = primitives.make_umma(dtype, key.value_dim, mn_major, a_in_tmem=True)
    dk = primitives.make_umma(dtype, key.head_dim, mn_major, a_in_tmem=True)
    dq_columns = key.head_dim if is_swept_once else block_q
    dq = primitives.make_umma(dtype, dq_columns, mn_major, a_major=mn_major)

    def a_in_smem(mma: cute.TiledMma, tile: cute.Tensor) -> cute.Tensor:
        return mma.make_fragment_A(mma.get_slice(0).partition_A(tile))

    def b_in_smem(mma: cute.TiledMma, tile: cute.Tensor) -> cute.Tensor:
        return mma.make_fragment_B(mma.get_slice(0).partition_B(tile))

    q_rows, dout_rows = primitives.transposed(smem.q), primitives.transposed(smem.dout)
    ds_rows, k_rows = primitives.transposed(smem.ds), primitives.transposed(smem.k)
    dq_operands = a_in_smem(dq, ds_rows), b_in_smem(dq, k_rows)
    dq_rows = ROWS
    if not is_swept_once:
        dq_operands = a_in_smem(dq, k_rows), b_in_smem(dq, ds_rows)
        dq_rows = key.head_dim
    return Products(
        Product(
            scores,
            accumulator(variant, x, scores, ("s", ROWS, block_q)),
            a_in_smem(scores, smem.k),
            b_in_smem(scores, smem.q),
        ),
        Product(
            scores,
            accumulator(variant, x, scores, ("dp", ROWS, block_q)),
            a_in_smem(scores, smem.v),
            b_in_smem(scores, smem.dout if is_swept_once else smem.q),
        ),
        Product(
            dv,
            accumulator(variant, x, dv, ("dv", ROWS, key.value_dim)),
            halves(variant, x.tmem, dv, "p"),
            b_in_smem(dv, dout_rows),
        ),
        Product(
            dk,
            accumulator(variant, x, dk, ("dk", ROWS, key.head_dim)),
            halves(variant, x.tmem, dk, "ds"),
            b_in_smem(dk, q_rows),
        ),
        Product(dq, accumulator(variant, x, dq, ("dq", dq_rows, dq_columns)), *dq_operands),
    )


def accumulator(variant: Variant, x: Context, mma: cute.TiledMma, what: tuple) -> cute.Tensor:
    """A result in tensor memory; ``what`` is its (name, rows, columns)."""
    name, *shape = what
    layout = mma.make_fragment_C(mma.partition_shape_C(tuple(shape))).layout
    return cute.make_tensor(x.tmem + variant.plan.columns(name).start, layout)


def halves(variant: Variant, tmem: cute.Pointer, mma: cute.TiledMma, name: str) -> cute.Tensor:
    """P or dS, in tensor memory from ``tmem`` on, as A operand, in two halves."""
    rows = ROWS * variant.plan.ctas
    half = mma.make_fragment_A(mma.partition_shape_A((rows, variant.config.half_q))).layout
    *modes, slabs = half.shape
    *strides, slab = half.stride
    first, second = (variant.plan.columns(f"{name}{i}").start for i in range(2))
    gap = (second - first) * 32 // variant.dtype.width
    layout = cute.make_layout((*modes, (slabs, 2)), stride=(*strides, (slab, gap)))
    pointer = cute.recast_ptr(tmem + first, dtype=variant.dtype)
    return cute.make_tensor(pointer, layout)


def place_of_dq(variant: Variant, warp: Int32, column: int) -> tuple[Int32, Int32]:
    """Which 32 rows of a query tile a warp of a pair adds to, and where in them its ``column`` is.

    Two warps share 32 of the CTA's 64 rows: Note [dQ overwrites half of S].
    """
    ctas = variant.plan.ctas
    groups = ADD_WARPS // ctas
    rows = tiles.rank_in_cluster(ctas) * groups + warp % groups
    return rows, warp // groups * (variant.key.head_dim // ctas) + column


def slot_of(variant: Variant, scratch: Scratch, row: Int32, head: Int32) -> cute.Tensor:
    """(4, block_q * D / 4) sums of dQ of the query tile at ``row`` of ``Scratch``."""
    fours = variant.key.head_dim // FLOATS
    sums = cute.domain_offset((0, row * fours), scratch.dq_sum[None, None, head])
    return cute.make_tensor(
        sums.iterator, cute.make_layout((FLOATS, variant.config.block_q * fours))
    )
