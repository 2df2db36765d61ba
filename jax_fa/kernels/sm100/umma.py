"""Products by tcgen05, copies of rows of tensor memory, and stores by threads that hold a row."""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from jax_fa.kernels.primitives import cta_group

VECTOR_BITS = 128
"""Bits of the widest memory access."""


def make_umma(
    dtype: type,
    columns: int,
    b_major: OperandMajorMode,
    a_in_tmem: bool = False,
    ctas: int = 1,
    a_major: OperandMajorMode = OperandMajorMode.K,
    rows: int = 128,
) -> object:
    """A ``rows`` x ``columns`` tcgen05 product with float32 accumulation in tensor memory.

    With two ``ctas``, each has ``rows`` rows of A and of the result, and half of B's columns; both
    use all of these. 64 rows of the result then lie in all 128 lanes: the first half of the columns
    in lanes 0 to 63, the second in the others (PTX ISA, "Data Path Layout Organization").
    """
    source = tcgen05.OperandSource.TMEM if a_in_tmem else tcgen05.OperandSource.SMEM
    op = tcgen05.MmaF16BF16Op(
        dtype,
        Float32,
        (rows * ctas, columns, 16),
        cta_group(ctas),
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

    ``slabs`` are numbers of slabs in A; B starts with slab ``first_of_b``. Slab 0 starts a new sum
    unless ``accumulate``. The K mode of ``a`` and ``b`` is the last mode. Called by a whole warp.
    The products of a CTA are executed in issue order; an edge's commit signals their completion.
    """
    # Rolled: the tensor core takes 64 cycles for a slab of 128 x 128, ample time to compute the
    # next descriptors. If unrolled, the compiler keeps those of all slabs at once, and spills.
    for k in cutlass.range(slabs.start, slabs.stop, unroll=1):
        atom = cute.make_mma_atom(mma.op)
        atom.set(tcgen05.Field.ACCUMULATE, Boolean(accumulate) | (k > 0))
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k - first_of_b], acc)


def tmem_rows(tmem: cute.Pointer, first_column: int, columns: int) -> cute.Tensor:
    """A (128, columns) view of tensor memory, in 32-bit words; a lane is a row."""
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
    """Loads of ``rows``, ``width`` columns at a time, by the ``thread``-th of 128 threads."""
    op = tcgen05.copy.Ld32x32bOp(tcgen05.copy.Repetition(width))
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), rows)
    return TmemCopy(copy, copy.get_slice(thread).partition_S(rows))


def tmem_store(rows: cute.Tensor, width: int, thread: Int32) -> TmemCopy:
    """Stores to ``rows``, ``width`` columns at a time, by the ``thread``-th of 128 threads."""
    op = tcgen05.copy.St32x32bOp(tcgen05.copy.Repetition(width))
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), rows)
    return TmemCopy(copy, copy.get_slice(thread).partition_D(rows))


def before_thread_sync():
    """Orders this thread's earlier tcgen05 operations before the synchronisation that follows."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def after_thread_sync():
    """Orders this thread's later tcgen05 operations after the synchronisation just passed."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def aligned(row: cute.Tensor) -> cute.Tensor:
    """A row of an array, as one that begins at a multiple of 16 bytes: its strides do not say so.

    Without that, ``copy_row`` would store element by element.
    """
    address, space = row.iterator.toint(), cute.AddressSpace.gmem
    start = cute.make_ptr(row.element_type, address, space, assumed_align=VECTOR_BITS // 8)
    return cute.make_tensor(start, row.layout)


@cute.jit
def copy_row(source: cute.Tensor, row: cute.Tensor, first: Int32 | int) -> None:
    """Stores registers to a row from column ``first`` on, 16 bytes at a time, up to its end."""
    width = VECTOR_BITS // source.element_type.width
    source = cute.make_tensor(source.iterator, cute.make_layout(cute.size(source)))
    for i in cutlass.range_constexpr(cute.size(source) // width):
        if first + i * width < cute.size(row):
            target = cute.local_tile(row, (width,), (first // width + i,))
            cute.autovec_copy(cute.local_tile(source, (width,), (i,)), target)
