"""Layouts of arrays and shared memory, TMA, and the inline PTX that kernels of all families use."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, tcgen05, warpgroup
from cutlass.utils import LayoutEnum
from cutlass.utils.hopper_helpers import get_smem_layout_atom

from jax_fa.spec.key import HEAD_STEP

DTYPES = {"bfloat16": BFloat16, "float16": Float16}
Shape = tuple[int, ...]
"""The number of elements in each mode, as CuTe takes them."""


class Extents(NamedTuple):
    """Run-time extents of an array of rows by head.

    Attributes:
        batch: batches.
        length: rows of a batch.
        heads: heads of a row.
    """

    batch: Int32
    length: Int32
    heads: Int32


class Widths(NamedTuple):
    """Columns of a head in arrays: no more than a kernel is compiled for, and multiples of 8.

    TMA and ``cp.async`` fill the columns behind them with zeros; stores end there.

    Attributes:
        qk: columns of queries and keys, D.
        v: columns of values and outputs, Dv.
    """

    qk: Int32
    v: Int32


def widths_of(head_dim: Int32, value_dim: Int32) -> Widths:
    """The widths of a call."""
    return Widths(*[cute.assume(x, divby=HEAD_STEP) for x in (head_dim, value_dim)])


def dense(pointer: cute.Pointer, extents: Extents, width: Int32) -> cute.Tensor:
    """A dense [batch, length, heads, width] array as (length, width, heads, batch)."""
    batch, length, heads = extents
    row = heads.to(Int64) * width
    return cute.make_tensor(
        pointer,
        cute.make_layout((length, width, heads, batch), stride=(row, 1, width, row * length)),
    )


def dense_stats(pointer: cute.Pointer, extents: Extents) -> cute.Tensor:
    """A dense [batch, length, heads] array as (length, heads, batch)."""
    batch, length, heads = extents
    row = heads.to(Int64)
    return cute.make_tensor(
        pointer, cute.make_layout((length, heads, batch), stride=(row, 1, row * length))
    )


def smem_layout(dtype: type, shape: Shape, panel: int | None = None) -> cute.ComposedLayout:
    """Swizzled layout of row-major tiles ``(rows, columns[, stages])``, fit for TMA and wgmma.

    Columns can be cut at multiples of ``panel`` (default: not at all).
    """
    atom = warpgroup.make_smem_layout_atom(
        get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, panel or shape[1]), dtype
    )
    return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))


def smem_tensor(storage: object, layout: cute.ComposedLayout) -> cute.Tensor:
    """The tensor of ``layout`` in a ``MemRange``; its pointer carries the swizzle."""
    return storage.get_tensor(layout.outer, swizzle=layout.inner)


def by_granules(layout: cute.Layout) -> cute.Layout:
    """Splits a ``smem_layout`` (rows, columns, stages) into (8, columns, rows / 8, stages)."""
    (inner, outer), columns, stages = layout.shape
    (inner_stride, outer_stride), column_stride, stage_stride = layout.stride
    return cute.make_layout(
        (inner, columns, outer, stages),
        stride=(inner_stride, column_stride, outer_stride, stage_stride),
    )


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """The view with modes 0 and 1 exchanged."""
    order = [1, 0, *range(2, cute.rank(tensor))]
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=order))


@cute.jit
def narrow(source: cute.Tensor, target: cute.Tensor) -> None:
    """Rounds float32 ``source`` into 16-bit ``target``, element i to element i, in pairs."""
    pairs = cute.recast_tensor(target, Int32)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        pairs[i] = narrow_pair(source[2 * i], source[2 * i + 1], target.element_type)


def narrow_pair(low: Float32, high: Float32, dtype: type) -> Int32:
    """A word that holds ``low`` and ``high``, rounded to ``dtype``."""
    kind = "bf16x2" if dtype is BFloat16 else "f16x2"
    return cute.arch.inline_ptx(
        "cvt.rn." + kind + ".f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Int32],
        read_only_args=[low, high],
    )


def widen(word: Int32, dtype: type) -> tuple[Float32, Float32]:
    """The two elements of type ``dtype`` in a word, the low half first."""
    if dtype is BFloat16:
        code = "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000;"
    else:
        code = (
            "{ .reg .f16 low, high; mov.b32 {low, high}, {$r0}; "
            "cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }"
        )
    return cute.arch.inline_ptx(code, write_only_types=[Float32, Float32], read_only_args=[word])


def opaque(value: Int32) -> Int32:
    """The same value; nothing derived from it is computed ahead of a loop and kept in registers."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


def hold_until(bits: Int32, where: cute.Pointer) -> None:
    """Keeps waits that follow behind the computation of ``bits``, one of which is 0.

    ptxas moves a wait for products ahead of all that does not depend on it, but not ahead of a
    store: this one, to shared memory, never happens. (It knows powers as not negative.)
    """
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.eq.s32 p, {$r0}, -1; @p st.shared.b32 [{$r1}], {$r0}; }",
        read_only_args=[bits, where],
    )


@cute.jit
def complete_tx(barrier: cute.Pointer, size_bytes: int) -> None:
    """Counts ``size_bytes`` as arrived at an mbarrier, in place of a copy that skipped it.

    The caller's earlier writes to shared memory are visible to whoever passes the barrier.
    """
    cute.arch.fence_acq_rel_cta()
    cute.arch.inline_ptx(
        "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [{$r0}], {$r1};",
        read_only_args=[barrier, Int32(size_bytes)],
    )


@cute.jit
def zero_fill_rows(tile: cute.Tensor, used: Int32) -> None:
    """Zeroes the rows of ``tile``, in shared memory, from row ``used`` on. One warp calls."""
    words = cute.recast_tensor(tile, Int32)
    rows, width = (cute.size(words, mode=[mode]) for mode in (0, 1))
    lane = cute.arch.lane_idx()
    for row in cutlass.range(cutlass.max(used, 0), rows, unroll=1):
        for first in cutlass.range_constexpr(0, width, cute.arch.WARP_SIZE):
            if lane + first < width:
                words[row, lane + first] = Int32(0)
    # HAZARD: these lanes write through the generic proxy what the tensor core reads through the
    # async proxy, hence the fence. TMA must have finished before they write.
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()


class TmaArray(NamedTuple):
    """A global array for TMA: the copy with its descriptor, and the coordinate tensor."""

    atom: cute.CopyAtom
    array: cute.Tensor


def cta_group(ctas: int) -> tcgen05.CtaGroup:
    """The group of ``ctas`` CTAs, 1 or 2, that share an operation of TMA or of the tensor core."""
    return tcgen05.CtaGroup.TWO if ctas == 2 else tcgen05.CtaGroup.ONE


def tma_load(
    tensor: cute.Tensor, layout: cute.ComposedLayout, tile: Shape, ctas: int = 1
) -> TmaArray:
    """Loads of tiles of modes 0 and 1 of ``tensor`` to shared memory of ``layout``.

    With two ``ctas``, each loads to its own shared memory and counts at the first CTA's barriers.
    """
    op = cpasync.CopyBulkTensorTileG2SOp(cta_group(ctas))
    return TmaArray(*cpasync.make_tiled_tma_atom(op, tensor, layout, tile))


def prefetch_descriptors(atoms: Iterable[cute.CopyAtom | None]) -> None:
    """Prefetches the TMA descriptors of ``atoms``; None stands for an absent one."""
    for atom in atoms:
        if atom is not None:
            cpasync.prefetch_descriptor(atom)


def tma_store(tensor: cute.Tensor, layout: cute.ComposedLayout, tile: Shape) -> TmaArray:
    """Stores of tiles of modes 0 and 1 of ``tensor`` from shared memory of ``layout``."""
    op = cpasync.CopyBulkTensorTileS2GOp()
    return TmaArray(*cpasync.make_tiled_tma_atom(op, tensor, layout, tile))


class TmaViews(NamedTuple):
    """Both ends of a copy as TMA sees them: (tile, rest...)."""

    smem: cute.Tensor
    gmem: cute.Tensor


def tma_views(atom: cute.CopyAtom, smem: cute.Tensor, gmem: cute.Tensor) -> TmaViews:
    """``smem`` and ``gmem``, whose modes 0 and 1 are the tile, as TMA copies them."""
    return TmaViews(
        *cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(smem, 0, 2),
            cute.group_modes(gmem, 0, 2),
        )
    )


def meet(variant: Any, name: str, further: Int32 | int = 0) -> None:
    """Arrives at the barrier ``further`` numbers after ``name`` and waits there for the others."""
    barrier = variant.plan.barrier(name)
    cute.arch.barrier(barrier_id=barrier.index + further, number_of_threads=barrier.threads)


def arrive(variant: Any, name: str, further: Int32 | int = 0) -> None:
    """Arrives at a named barrier, chosen as in ``meet``, without waiting."""
    barrier = variant.plan.barrier(name)
    cute.arch.barrier_arrive(barrier_id=barrier.index + further, number_of_threads=barrier.threads)
