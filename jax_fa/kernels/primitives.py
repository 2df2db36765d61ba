"""Layouts of shared memory, TMA and register fragments, and every inline PTX.

Fragments follow the accumulator of ``wgmma.m64nNk16``: thread ``t`` of a warpgroup holds, of the
64 x N tile, rows ``16 * (t // 32) + (t % 32) // 4 + 8 * r`` for r in {0, 1} and columns
``2 * (t % 4) + c + 8 * g`` for c in {0, 1}, in the order (c, r, g), c fastest. The register A
operand of the next product wants its 16-column slabs in that very order, so P never moves.
"""

from typing import NamedTuple

import cutlass
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05, warpgroup
from cutlass.cute.runtime import make_fake_stream, nullptr
from cutlass.utils import LayoutEnum
from cutlass.utils.hopper_helpers import get_smem_layout_atom

from jax_fa.kernels import abi

DTYPES = {"bfloat16": BFloat16, "float16": Float16}
VECTOR_BITS = 128
"""Of the widest access."""


def smem_layout(
    dtype: type, shape: tuple[int, ...], panel: int | None = None
) -> cute.ComposedLayout:
    """Swizzled layout of row-major tiles ``(rows, columns[, stages])``, fit for TMA and wgmma.

    Columns can be cut at multiples of ``panel`` (default: not at all).
    """
    atom = warpgroup.make_smem_layout_atom(
        get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, panel or shape[1]), dtype
    )
    return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))


def smem_tensor(storage: object, layout: cute.ComposedLayout) -> cute.Tensor:
    """The tensor of ``layout`` in a ``MemRange``, its swizzle carried by the pointer."""
    return storage.get_tensor(layout.outer, swizzle=layout.inner)


def by_granules(layout: cute.Layout) -> cute.Layout:
    """(rows, columns, stages), made by ``smem_layout``, as (8, columns, rows / 8, stages)."""
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


def make_mma(
    dtype: type,
    columns: int,
    b_major: OperandMajorMode,
    a_in_registers: bool,
    a_major: OperandMajorMode = OperandMajorMode.K,
) -> object:
    """One warpgroup's 64 x ``columns`` product with float32 accumulation."""
    source = warpgroup.OperandSource.RMEM if a_in_registers else warpgroup.OperandSource.SMEM
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (64, columns, 16), source, a_major, b_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op))


def multiply(mma: object, acc: cute.Tensor, operands: tuple, accumulate: bool) -> None:
    """Issues ``acc (+)= A B`` as one committed group of asynchronous wgmma.

    ``operands`` are the fragments A and B, the K mode last. The caller waits, and until then
    touches neither ``acc`` nor A.
    """
    a, b = operands
    atom = cute.make_mma_atom(mma.op)
    warpgroup.fence()
    for k in range(cute.size(a, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, accumulate or k > 0)
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
    warpgroup.commit_group()


def by_row(acc: cute.Tensor) -> cute.Tensor:
    """View of an accumulator as (2 rows, columns / 4), both this thread's own."""
    (pair, rows, groups), *_ = acc.layout.shape
    layout = cute.make_layout((rows, (pair, groups)), stride=(pair, (1, pair * rows)))
    return cute.make_tensor(acc.iterator, layout)


def pairs_by_row(rounded: cute.Tensor) -> cute.Tensor:
    """View of a 16-bit fragment as (2 rows, column pairs), a pair being one 32-bit word."""
    (pair, rows, groups), *_ = rounded.layout.shape
    words = cute.recast_tensor(rounded, Int32)
    layout = cute.make_layout((rows, groups), stride=(1, rows))
    return cute.make_tensor(words.iterator, layout)


def column_of(index: int) -> int:
    """Column of element ``index`` of a row in ``by_row``, less that of element 0."""
    return index // 2 * 8 + index % 2


def row_in_tile(thread: Int32) -> Int32:
    """Row of ``by_row``'s row 0 in the warpgroup's 64, for a thread of it; row 1 is 8 below."""
    return thread // 32 * 16 + thread % 32 // 4


def first_column(thread: Int32) -> Int32:
    """Column of element 0 of ``by_row`` in the tile."""
    return thread % 4 * 2


@cute.jit
def narrow(source: cute.Tensor, target: cute.Tensor) -> None:
    """Rounds float32 ``source`` into 16-bit ``target``, element i to element i, in pairs."""
    pairs = cute.recast_tensor(target, Int32)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        pairs[i] = narrow_pair(source[2 * i], source[2 * i + 1], target.element_type)


def narrow_pair(low: Float32, high: Float32, dtype: type) -> Int32:
    """A word of two elements of type ``dtype``, rounded."""
    kind = "bf16x2" if dtype is BFloat16 else "f16x2"
    return cute.arch.inline_ptx(
        "cvt.rn." + kind + ".f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Int32],
        read_only_args=[low, high],
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
def scrub_rows(tile: cute.Tensor, used: Int32) -> None:
    """Sets the rows of ``tile``, in shared memory, to zero from ``used`` on. One warp."""
    words = cute.recast_tensor(tile, Int32)
    rows, width = (cute.size(words, mode=[mode]) for mode in (0, 1))
    lane = cute.arch.lane_idx()
    for row in cutlass.range(cutlass.max(used, 0), rows, unroll=1):
        for first in cutlass.range_constexpr(0, width, cute.arch.WARP_SIZE):
            if lane + first < width:
                words[row, lane + first] = Int32(0)
    # HAZARD: the tensor core reads through the async proxy what these lanes wrote through the
    # generic one, and TMA must have finished before they wrote.
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()


@cute.jit
def complete_tx_of(rank: int, barrier: cute.Pointer, size_bytes: int) -> None:
    """``complete_tx`` at the counterpart of ``barrier`` in CTA ``rank`` of the cluster."""
    cute.arch.fence_acq_rel_cluster()
    cute.arch.inline_ptx(
        "{ .reg .b32 barrier; mapa.shared::cluster.u32 barrier, {$r0}, {$r2}; "
        "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [barrier], {$r1}; }",
        read_only_args=[barrier.toint(), Int32(size_bytes), Int32(rank)],
    )


def arrive(barrier: cute.Pointer):
    """One arrival at an mbarrier of this CTA, without a register for the number of arrivals."""
    cute.arch.inline_ptx(
        "mbarrier.arrive.shared::cta.b64 _, [{$r0}];", read_only_args=[barrier.toint()]
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


def tma_load(
    tensor: cute.Tensor, layout: cute.ComposedLayout, tile: tuple[int, int], ctas: int = 1
) -> object:
    """TMA descriptor and coordinate tensor that load ``tile`` of modes 0 and 1 of ``tensor``.

    Of two ``ctas``, both load to their own shared memory and count at the first's barriers.
    """
    op = cpasync.CopyBulkTensorTileG2SOp(_cta_group(ctas))
    return cpasync.make_tiled_tma_atom(op, tensor, layout, tile)


def prefetch_descriptors(atoms: tuple) -> None:
    """Fetches the TMA descriptors of ``atoms`` ahead of use; None stands for one that is absent."""
    for atom in atoms:
        if atom is not None:
            cpasync.prefetch_descriptor(atom)


def tma_store(tensor: cute.Tensor, layout: cute.ComposedLayout, tile: tuple[int, int]) -> object:
    """TMA descriptor and coordinate tensor that store ``tile`` of modes 0 and 1 of ``tensor``."""
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, layout, tile)


def tma_views(atom: cute.CopyAtom, smem: cute.Tensor, gmem: cute.Tensor) -> tuple:
    """``smem`` and ``gmem`` as TMA copies them: (tile, rest...), modes 0 and 1 being the tile."""
    return cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(smem, 0, 2),
        cute.group_modes(gmem, 0, 2),
    )


@cute.jit
def bulk_load(source: cute.Tensor, target: cute.Tensor, barrier: cute.Pointer):
    """Starts the copy of a contiguous piece of global memory, ``target``'s size, to ``target``.

    The bytes count on ``barrier``. Called by a whole warp; addresses are multiples of 16 bytes.
    """
    size_bytes = cute.size(target) * target.element_type.width // 8
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[
                target.iterator.toint(),
                source.iterator.toint(),
                Int32(size_bytes),
                barrier.toint(),
            ],
        )


@cute.jit
def bulk_send(
    places: tuple, size_bytes: cutlass.Constexpr[int], barrier: cute.Pointer, rank: Int32
):
    """Starts the copy of shared memory to that of CTA ``rank`` of the cluster.

    ``places`` are (source, target), the latter, as ``barrier``, where the bytes count, given by its
    counterpart in this CTA. Called by a whole warp; addresses and size are multiples of 16 bytes.
    """
    source, target = places
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "{ .reg .b32 target, barrier; "
            "mapa.shared::cluster.u32 target, {$r0}, {$r4}; "
            "mapa.shared::cluster.u32 barrier, {$r3}, {$r4}; "
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
            "[target], [{$r1}], {$r2}, [barrier]; }",
            read_only_args=[
                target.toint(),
                source.toint(),
                Int32(size_bytes),
                barrier.toint(),
                Int32(rank),
            ],
        )


@cute.jit
def bulk_add(source: cute.Pointer, target: cute.Pointer, size_bytes: cutlass.Constexpr[int]):
    """Starts the addition of floats in shared memory to as many in global memory, atomically each.

    Part of the bulk group of the elected lane. Called by a whole warp; addresses and size are
    multiples of 16 bytes.
    """
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
            read_only_args=[target.toint(), source.toint(), Int32(size_bytes)],
        )


def add_to_global(address: Int64, values: list):
    """Adds four consecutive floats to global memory, each atomically, in no order."""
    cute.arch.inline_ptx(
        "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *values],
    )


@cute.jit
def gather_columns(words: list, width: cutlass.Constexpr[int]) -> list:
    """Transposes ``width`` words across the ``width`` neighbouring lanes of a quad.

    Word i of a lane is its pair of columns in column group i of a row. Afterwards the lane holds
    the words of group ``lane % width``, in the order of columns.
    """
    lane = cute.arch.lane_idx()
    step = 1
    while cutlass.const_expr(step < width):
        is_high = (lane & step) != 0
        for i in cutlass.range_constexpr(width):
            if cutlass.const_expr(i & step == 0):
                low, high = words[i], words[i | step]
                received = cute.arch.shuffle_sync_bfly(low if is_high else high, offset=step)
                words[i] = received if is_high else low
                words[i | step] = high if is_high else received
        step = step * 2
    return words


def stand_ins(params: tuple, element: dict[str, type]) -> tuple:
    """Arguments to compile a host entry with: its ``abi`` parameters, and what pointers point at.

    Pointers that ``element`` does not name are to 32-bit integers.
    """
    arguments = []
    for name, kind in params:
        if kind == "pointer":
            dtype = element.get(name, Int32)
            is_wide = name in abi.ALIGNED
            align = abi.ALIGNMENT_BYTES if is_wide else 4
            arguments.append(nullptr(dtype, cute.AddressSpace.gmem, assumed_align=align))
        elif kind == "stream":
            arguments.append(make_fake_stream())
        else:
            arguments.append(Float32(1.0) if kind == "float32" else Int32(1))
    return tuple(arguments)


def _cta_group(ctas: int) -> tcgen05.CtaGroup:
    return tcgen05.CtaGroup.TWO if ctas == 2 else tcgen05.CtaGroup.ONE


def make_umma(
    dtype: type,
    columns: int,
    b_major: OperandMajorMode,
    a_in_tmem: bool = False,
    ctas: int = 1,
    a_major: OperandMajorMode = OperandMajorMode.K,
    rows: int = 128,
) -> object:
    """A 128 x ``columns`` tcgen05 product with float32 accumulation in tensor memory.

    Of two ``ctas`` each has ``rows`` rows of A and of the result, and one half of B's columns, of
    which both use all. 64 rows of the result lie in all 128 lanes: the first half of their columns
    in lanes 0 to 63, the second in the others (PTX ISA, "Data Path Layout Organization").
    """
    source = tcgen05.OperandSource.TMEM if a_in_tmem else tcgen05.OperandSource.SMEM
    op = tcgen05.MmaF16BF16Op(
        dtype,
        Float32,
        (rows * ctas, columns, 16),
        _cta_group(ctas),
        source,
        a_major,
        b_major,
    )
    return cute.make_tiled_mma(cute.make_mma_atom(op))


def umma_operand(smem: cute.Tensor) -> cute.Tensor:
    """A view of (rows, depth, stages) in shared memory as one CTA's operand of a product."""
    slabs = cute.flat_divide(smem, (cute.size(smem, mode=[0]), 16))
    return cute.group_modes(slabs, 0, 2)  # ((rows, 16), 1, depth / 16, stages)


@cute.jit
def issue_umma(
    mma: object,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    accumulate: Boolean | bool,
    slabs: cutlass.Constexpr[range],
    first_of_b: cutlass.Constexpr[int] = 0,
):
    """Issues the tcgen05.mma of ``acc (+)= A B`` for some 16-wide slabs of the K mode.

    ``slabs`` are numbers in A; B holds those from ``first_of_b`` on. The first slab of A starts a
    new sum unless ``accumulate``. The K mode of the fragments ``a`` and ``b`` is the last. Called
    by a whole warp. Work of one CTA is done in the order of issue; an edge's commit tells when.
    """
    # Rolled: the tensor core takes 64 cycles for a slab of 128 x 128, ample for computing the next
    # descriptors, which the compiler, if unrolled, keeps for all slabs at once, and spills.
    for k in cutlass.range(slabs.start, slabs.stop, unroll=1):
        atom = cute.make_mma_atom(mma.op)
        atom.set(tcgen05.Field.ACCUMULATE, Boolean(accumulate) | (k > 0))
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k - first_of_b], acc)


def tmem_rows(tmem: cute.Pointer, first_column: int, columns: int) -> cute.Tensor:
    """(128, columns) of tensor memory, in 32-bit words; a lane is a row."""
    layout = cute.make_layout((128, columns), stride=(1 << 16, 1))
    return cute.make_tensor(tmem + first_column, layout)


class TmemCopy(NamedTuple):
    """How a thread of a warpgroup moves its row of tensor memory, some columns at a time.

    Attributes:
        copy: the tiled copy.
        tmem: (32 x columns of a piece, 1, number of pieces), the rows of this thread's warp.
    """

    copy: cute.TiledCopy
    tmem: cute.Tensor

    @property
    def width(self) -> int:
        """Columns of a piece."""
        return cute.size(self.tmem, mode=[0]) // 32

    def whole_row(self) -> cute.Tensor:
        """Registers for all pieces of this thread's row; a linear index is a column."""
        return cute.make_rmem_tensor(((self.width, 1), 1, cute.size(self.tmem, mode=[2])), Float32)

    def piece(self) -> cute.Tensor:
        """Registers for one piece."""
        return cute.make_rmem_tensor(((self.width, 1), 1), Float32)


def tmem_load(rows: cute.Tensor, width: int, thread: Int32) -> TmemCopy:
    """Loads of ``width`` columns of ``rows`` by the ``thread``-th of 128 threads."""
    op = tcgen05.copy.Ld32x32bOp(tcgen05.copy.Repetition(width))
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), rows)
    return TmemCopy(copy, copy.get_slice(thread).partition_S(rows))


def tmem_store(rows: cute.Tensor, width: int, thread: Int32) -> TmemCopy:
    """Stores of ``width`` columns of ``rows`` by the ``thread``-th of 128 threads."""
    op = tcgen05.copy.St32x32bOp(tcgen05.copy.Repetition(width))
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), rows)
    return TmemCopy(copy, copy.get_slice(thread).partition_D(rows))


def copy_row(source: cute.Tensor, row: cute.Tensor, first: Int32 | int) -> None:
    """Stores registers from column ``first`` of a row on, 16 bytes at a time."""
    width = VECTOR_BITS // source.element_type.width
    source = cute.make_tensor(source.iterator, cute.make_layout(cute.size(source)))
    for i in range(cute.size(source) // width):
        target = cute.local_tile(row, (width,), (first // width + i,))
        cute.autovec_copy(cute.local_tile(source, (width,), (i,)), target)


def cluster_sync():
    """Waits for all threads of the cluster that have not ended."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def before_thread_sync():
    """Orders this thread's tcgen05 operations before what it does next to synchronise."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def after_thread_sync():
    """Orders this thread's tcgen05 operations after the synchronisation it has just passed."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def max3(a: Float32, b: Float32, c: Float32) -> Float32:
    """The largest of three."""
    return cute.arch.inline_ptx(
        "max.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


def minus(a: Float32, b: Float32) -> Float32:
    """``a - b``, never made one instruction with the product that ``a`` may be."""
    return cute.arch.inline_ptx(
        "sub.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def floor(a: Float32) -> Float32:
    """The largest integer not above ``a``, computed where this is called: never before a loop."""
    return cute.arch.inline_ptx(
        "cvt.rmi.f32.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a]
    )


def fma_saturated(a: Float32, b: Float32, c: Float32) -> Float32:
    """``a * b + c``, clamped to [0, 1]; 0 for NaN."""
    return cute.arch.inline_ptx(
        "fma.rn.sat.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


def bits_from(first: Int32) -> Int32:
    """The word in which all bits from number ``first`` >= 0 on are set; 0 from 32 on."""
    return cute.arch.inline_ptx(
        "shl.b32 {$w0}, -1, {$r0};", write_only_types=[Int32], read_only_args=[first]
    )


def add_to_exponent(value: Float32, whole: Float32) -> Float32:
    """``value`` times two to the integer in the low bits of ``whole``'s representation."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 shifted; shl.b32 shifted, {$r1}, 23; add.s32 {$w0}, {$r0}, shifted; }",
        write_only_types=[Float32],
        read_only_args=[value, whole],
    )
