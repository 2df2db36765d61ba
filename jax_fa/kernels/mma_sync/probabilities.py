"""Online softmax in two halves: maxima of all keys of a step, then exponentials of a few at a time.

``fragment_softmax.update`` does both at once.
"""

from typing import NamedTuple

import cutlass
from cutlass import Float32, cute

from jax_fa.kernels.fragment_softmax import RowState, power, quad_max, row_max


class Rise(NamedTuple):
    """What remains to be done once a row's maximum has risen.

    Attributes:
        top: the maximum, scaled unless scores are wide; 0 for a row that has seen no key.
        shrink: the factor by which everything accumulated so far shrinks.
    """

    top: Float32
    shrink: Float32


@cute.jit
def raise_maximum(
    scores: cute.Tensor,
    state: RowState,
    row: cutlass.Constexpr[int],
    scale_log2: Float32,
    are_wide: cutlass.Constexpr[bool],
) -> Rise:
    """Brings the maximum of a row up to date.

    Args:
        scores: (2, columns / 4) this thread's scores.
        state: statistics before these scores; on return, with the maximum after them.
        row: which of the two rows.
        scale_log2: factor that turns a score into an exponent of 2.
        are_wide: as in ``fragment_softmax.update``.
    """
    before = state.maximum[row]
    maximum = cute.arch.fmax(before, quad_max(row_max(scores, row)))
    state.maximum[row] = maximum
    # For a row that has seen no key, (-inf) - (-inf) would be NaN; 2 ** (-inf - 0) is 0.
    if cutlass.const_expr(are_wide):
        top = Float32(0.0) if maximum * scale_log2 == -Float32.inf else maximum
    else:
        top = Float32(0.0) if maximum == -Float32.inf else maximum * scale_log2
    return Rise(top, power(before, top, scale_log2, are_wide))


def no_sums() -> list[Float32]:
    """Sums of nothing yet. There are four, since each addition waits for the one before it."""
    return [Float32(0.0) for _ in range(4)]


def elements_of(first: int, number: int) -> range:
    """A thread's elements of a row among ``number`` columns from ``first``, multiples of 8."""
    return range(first // 4, (first + number) // 4)


@cute.jit
def exponentiate(
    scores: cute.Tensor,
    row: cutlass.Constexpr[int],
    elements: cutlass.Constexpr,
    rise: Rise,
    sums: list,
    scale_log2: Float32,
    are_wide: cutlass.Constexpr[bool],
) -> None:
    """Replaces some ``elements`` of a row by their probabilities, and adds these to ``sums``."""
    for i in cutlass.range_constexpr(elements.start, elements.stop):
        p = power(scores[row, i], rise.top, scale_log2, are_wide)
        scores[row, i] = p
        sums[i % len(sums)] = sums[i % len(sums)] + p


@cute.jit
def add_sums(state: RowState, row: cutlass.Constexpr[int], rise: Rise, sums: list) -> None:
    """Adds a row's probabilities, in ``sums``, to its total."""
    state.total[row] = state.total[row] * rise.shrink + ((sums[0] + sums[1]) + (sums[2] + sums[3]))
