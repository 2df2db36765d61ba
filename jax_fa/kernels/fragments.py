"""Products by wgmma, and the register fragments that they leave.

A fragment has the layout of the accumulator of ``wgmma.m64nNk16``; a warp's part of it has that of
mma.sync. Of the 64 x N tile, thread ``t`` of a warpgroup holds rows
``16 * (t // 32) + (t % 32) // 4 + 8 * r`` for r in {0, 1} and columns ``2 * (t % 4) + c + 8 * g``
for c in {0, 1}, in the order (c, r, g), c fastest. The register A operand of the next product takes
its 16-column slabs in the same order, so P never moves.
"""

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

ROWS = 2
"""Rows of a tile that one thread holds."""


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


def multiply(
    mma: object, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: bool
) -> None:
    """Issues ``acc (+)= A B`` as one committed group of asynchronous wgmma.

    The K mode of the fragments ``a`` and ``b`` is the last. The caller must wait for the group
    and must not access ``acc`` or ``a`` until then.
    """
    atom = cute.make_mma_atom(mma.op)
    warpgroup.fence()
    for k in range(cute.size(a, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, accumulate or k > 0)
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
    warpgroup.commit_group()


@cute.jit
def multiply_filled(
    mma: cutlass.Constexpr, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, columns: Int32
) -> None:
    """Issues ``acc = A B`` over the first half of the head, if no more is used, or all of it."""
    half = cute.size(a, mode=[2]) // 2  # in instructions of 16 columns
    divided, first = (None, None, half), (None, None, (None, 0))
    half_a, half_b = [cute.logical_divide(x, divided)[first] for x in (a, b)]
    if columns > half * 16:
        multiply(mma, acc, a, b, False)
    else:
        multiply(mma, acc, half_a, half_b, False)


def accumulator(columns: int) -> cute.Tensor:
    """A thread's part of an accumulator in registers, ((2, 2, columns / 8), 1, 1)."""
    return cute.make_rmem_tensor(cute.make_layout(((2, 2, columns // 8), 1, 1)), Float32)


def by_row(acc: cute.Tensor) -> cute.Tensor:
    """View of an accumulator as (2 rows, columns / 4): the elements of this thread."""
    (pair, rows, groups), *_ = acc.layout.shape
    layout = cute.make_layout((rows, (pair, groups)), stride=(pair, (1, pair * rows)))
    return cute.make_tensor(acc.iterator, layout)


def pairs_by_row(rounded: cute.Tensor) -> cute.Tensor:
    """View of a 16-bit fragment as (2 rows, column pairs); a pair is one 32-bit word."""
    (pair, rows, groups), *_ = rounded.layout.shape
    words = cute.recast_tensor(rounded, Int32)
    layout = cute.make_layout((rows, groups), stride=(1, rows))
    return cute.make_tensor(words.iterator, layout)


def column_of(index: int) -> int:
    """Column of element ``index`` of a row in ``by_row``, relative to that of element 0."""
    return index // 2 * 8 + index % 2


def row_in_tile(thread: Int32) -> Int32:
    """Row of the warpgroup's 64 that is row 0 in a thread's ``by_row``; row 1 is 8 below it."""
    return thread // 32 * 16 + thread % 32 // 4


def first_column(thread: Int32) -> Int32:
    """Column of element 0 of ``by_row`` in the tile."""
    return thread % 4 * 2
