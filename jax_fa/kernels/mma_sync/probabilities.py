"""The second half of an online softmax, a few keys at a time, once ``raise_maximum`` has seen all.

``fragment_softmax.update`` does both halves at once.
"""

import cutlass
from cutlass import Float32, cute

from jax_fa.kernels.fragment_softmax import Rise, RowState, power


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
