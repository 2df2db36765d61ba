"""Online softmax over score fragments, in base 2.

Scores stay as the product left them; the scale (times log2 e) is folded into the one fused
multiply-add that precedes each exponential: ``p = 2 ** (s * scale_log2 - m * scale_log2)``, with m
the running row maximum (Milakov and Gimelshein, arXiv:1805.02867; Dao, arXiv:2307.08691).
"""

import math
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from jax_fa.kernels import primitives

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
ROWS = 2
"""Rows of a tile in one thread."""


class RowState(NamedTuple):
    """Running statistics of a thread's rows.

    Attributes:
        maximum: (2,) maximum of the scores so far, unscaled; equal in all threads of a row.
        total: (2,) sum of this thread's probabilities so far, relative to ``maximum``.
    """

    maximum: cute.Tensor
    total: cute.Tensor


def make_row_state() -> RowState:
    """Statistics in registers, yet to be reset."""
    return RowState(
        cute.make_rmem_tensor((ROWS,), Float32), cute.make_rmem_tensor((ROWS,), Float32)
    )


@cute.jit
def reset(state: RowState):
    """Statistics of no keys at all."""
    state.maximum.fill(-Float32.inf)
    state.total.fill(0.0)


@cute.jit
def quad_max(value: Float32) -> Float32:
    """Maximum over the four threads of a row."""
    value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=2))


@cute.jit
def quad_sum(value: Float32) -> Float32:
    """Sum over the four threads of a row."""
    value = value + cute.arch.shuffle_sync_bfly(value, offset=1)
    return value + cute.arch.shuffle_sync_bfly(value, offset=2)


@cute.jit
def row_max(scores: cute.Tensor, row: cutlass.Constexpr[int]) -> Float32:
    """Maximum of this thread's scores of one row, over four independent chains."""
    columns = cute.size(scores, mode=[1])
    chains = [scores[row, i] for i in range(4)]
    for i in cutlass.range_constexpr(4, columns):
        chains[i % 4] = cute.arch.fmax(chains[i % 4], scores[row, i])
    return cute.arch.fmax(
        cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3])
    )


@cute.jit
def update(acc: cute.Tensor, state: RowState, scale_log2: Float32) -> cute.Tensor:
    """Replaces scores by probabilities and brings ``state`` up to date.

    Args:
        acc: score fragment; probabilities relative to the new maximum on return.
        state: statistics before, and after, these scores.
        scale_log2: factor of a score in base 2.

    Returns:
        (2,) factor by which everything accumulated so far shrinks.
    """
    scores = primitives.by_row(acc)
    columns = cute.size(scores, mode=[1])
    shrink = cute.make_rmem_tensor((ROWS,), Float32)
    for row in cutlass.range_constexpr(ROWS):
        before = state.maximum[row]
        maximum = cute.arch.fmax(before, quad_max(row_max(scores, row)))
        state.maximum[row] = maximum
        # A row that has seen no key: (-inf) - (-inf) would be NaN, 2 ** (-inf - 0) is 0.
        reference = Float32(0.0) if maximum == -Float32.inf else maximum * scale_log2
        shrink[row] = cute.math.exp2(before * scale_log2 - reference, fastmath=True)
        sums = [Float32(0.0) for _ in range(4)]
        for i in cutlass.range_constexpr(columns):
            p = cute.math.exp2(scores[row, i] * scale_log2 - reference, fastmath=True)
            scores[row, i] = p
            sums[i % 4] = sums[i % 4] + p
        state.total[row] = state.total[row] * shrink[row] + (
            (sums[0] + sums[1]) + (sums[2] + sums[3])
        )
    return shrink


@cute.jit
def scale_rows(acc: cute.Tensor, factors: cute.Tensor):
    """Multiplies each row of an accumulator by its factor."""
    rows = primitives.by_row(acc)
    for row in cutlass.range_constexpr(ROWS):
        for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            rows[row, i] = rows[row, i] * factors[row]


@cute.jit
def mask(acc: cute.Tensor, beyond: list):
    """Sets the scores from column ``beyond[row]`` on to -inf.

    Columns are relative to this thread's first.
    """
    scores = primitives.by_row(acc)
    for row in cutlass.range_constexpr(ROWS):
        for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            is_visible = primitives.column_of(i) < beyond[row]
            scores[row, i] = scores[row, i] if is_visible else -Float32.inf
