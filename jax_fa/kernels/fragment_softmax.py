"""Online softmax and masks over score fragments (``fragments.py``): four threads share a row.

# Note [Raising late]
P, its sum and the accumulator are relative to a maximum that is raised only once a score exceeds it
by more than ``RESCALE_LOG2`` in base 2. Until then P may reach 2 ** 8, which float16 and bfloat16
hold without loss of precision (FlashAttention-4, arXiv:2603.05451). So the threads of a row seldom
have to exchange their maxima, and the accumulator is seldom rescaled: in each block after the first
a warp only asks whether a score of its rows exceeds that. Hopper's forward, whose consumers take
longer for their softmax than for products, gained 1 to 7 % (H200; ``docs/measured.md``).
"""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute

from jax_fa.kernels.fragments import ROWS, by_row, column_of
from jax_fa.spec.division import WORD_KEYS

RESCALE_LOG2 = 8.0
"""How far scores may exceed the maximum that P is relative to: Note [Raising late]."""
LARGEST_TOLERANCE = 2.0**127
"""Finite: -inf plus it is -inf, so that the first key that a row sees raises its maximum."""


class RowState(NamedTuple):
    """Running statistics of a thread's rows.

    Attributes:
        maximum: (2,) maximum of the scores so far, unscaled, or up to ``RESCALE_LOG2`` in base 2
            less than that; equal in all threads of a row.
        total: (2,) sum of this thread's probabilities so far, relative to ``maximum``.
        top: (2,) ``Rise.top`` of ``maximum``, kept by ``update`` unless scores are wide.
    """

    maximum: cute.Tensor
    total: cute.Tensor
    top: cute.Tensor


def make_row_state() -> RowState:
    """Uninitialised statistics in registers; ``reset`` them before use."""
    return RowState(*(cute.make_rmem_tensor((ROWS,), Float32) for _ in RowState._fields))


def copy(state: RowState) -> RowState:
    """A copy of the statistics in other registers."""
    other = make_row_state()
    for to, source in zip(other, state, strict=True):
        to.store(source.load())
    return other


@cute.jit
def reset(state: RowState) -> None:
    """Sets the statistics to those of no keys."""
    state.maximum.fill(-Float32.inf)
    state.total.fill(0.0)
    state.top.fill(0.0)


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
    """Maximum of this thread's scores of one row, computed in four independent chains."""
    columns = cute.size(scores, mode=[1])
    chains = [scores[row, i] for i in range(4)]
    for i in cutlass.range_constexpr(4, columns):
        chains[i % 4] = cute.arch.fmax(chains[i % 4], scores[row, i])
    return cute.arch.fmax(
        cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3])
    )


@cute.jit
def update(
    acc: cute.Tensor,
    state: RowState,
    shrink: cute.Tensor,
    scale_log2: Float32,
    are_wide: cutlass.Constexpr[bool] = False,
) -> Boolean:
    """Replaces scores by probabilities and brings ``state`` up to date. Called by whole warps.

    Args:
        acc: score fragment; on return, probabilities relative to ``state.maximum``.
        state: statistics before these scores; on return, after them.
        shrink: (2,); on return, the factors by which everything accumulated so far shrinks.
        scale_log2: factor that turns a score into an exponent of 2.
        are_wide: whether scores may be so large that products with the factor overflow, or are
            rounded by more than the scores differ. A product that overflows to -inf hides its key.

    Returns:
        Whether a factor of a row of the warp may differ from 1.
    """
    scores = by_row(acc)
    highest = [row_max(scores, row) for row in range(ROWS)]
    shrink.fill(1.0)
    shrinks = exceed_maximum(highest, state, scale_log2)
    if shrinks:
        for row in cutlass.range_constexpr(ROWS):
            rise = raise_maximum(highest[row], state, row, scale_log2, are_wide)
            state.top[row] = rise.top
            state.total[row] = state.total[row] * rise.shrink
            shrink[row] = rise.shrink
    for row in cutlass.range_constexpr(ROWS):
        sums = [Float32(0.0) for _ in range(4)]
        top = state.top[row]
        if const_expr(are_wide):  # With D = 256, no register is left to keep it in.
            top = top_of(state.maximum[row], scale_log2, are_wide)
        for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            p = power(scores[row, i], top, scale_log2, are_wide)
            scores[row, i] = p
            sums[i % 4] = sums[i % 4] + p
        state.total[row] = state.total[row] + ((sums[0] + sums[1]) + (sums[2] + sums[3]))
    return shrinks


def exceed_maximum(highest: list[Float32], state: RowState, scale_log2: Float32) -> Boolean:
    """Whether a row of the warp has a score that exceeds its maximum: Note [Raising late]."""
    exceed, tolerance = Boolean(False), tolerance_of(scale_log2)
    for row in range(ROWS):
        exceed = exceed | (highest[row] > state.maximum[row] + tolerance)
    return Boolean(cute.arch.vote_any_sync(exceed))


def tolerance_of(scale_log2: Float32) -> Float32:
    """By how much scores, unscaled, may exceed a maximum."""
    return cutlass.min(RESCALE_LOG2 * cute.arch.rcp_approx(scale_log2), Float32(LARGEST_TOLERANCE))


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
    highest: Float32,
    state: RowState,
    row: cutlass.Constexpr[int],
    scale_log2: Float32,
    are_wide: cutlass.Constexpr[bool],
) -> Rise:
    """Raises the maximum of one row to the ``highest`` of its scores in any of its threads."""
    before = state.maximum[row]
    maximum = cute.arch.fmax(before, quad_max(highest))
    state.maximum[row] = maximum
    top = top_of(maximum, scale_log2, are_wide)
    return Rise(top, power(before, top, scale_log2, are_wide))


@cute.jit
def top_of(maximum: Float32, scale_log2: Float32, are_wide: cutlass.Constexpr[bool]) -> Float32:
    """``Rise.top`` of a maximum."""
    # For a row that has seen no key, (-inf) - (-inf) would be NaN; 2 ** (-inf - 0) is 0.
    if const_expr(are_wide):
        top = Float32(0.0) if maximum * scale_log2 == -Float32.inf else maximum
    else:
        top = Float32(0.0) if maximum == -Float32.inf else maximum * scale_log2
    return top


def power(
    score: Float32, top: Float32, scale_log2: Float32, are_wide: cutlass.Constexpr[bool]
) -> Float32:
    """2 ** (scaled score - scaled row maximum); ``top`` is the maximum, scaled unless wide."""
    if are_wide:
        return cute.math.exp2((score - top) * scale_log2, fastmath=True)
    return cute.math.exp2(score * scale_log2 - top, fastmath=True)


@cute.jit
def scale_rows(acc: cute.Tensor, factors: cute.Tensor) -> None:
    """Multiplies each row of an accumulator by its factor."""
    rows = by_row(acc)
    for row in cutlass.range_constexpr(ROWS):
        for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            rows[row, i] = rows[row, i] * factors[row]


@cute.jit
def mask_row(
    acc: cute.Tensor,
    row: cutlass.Constexpr[int],
    start: Int32,
    end: Int32,
    two_sided: cutlass.Constexpr[bool],
) -> None:
    """Sets the scores of a row outside its columns ``start`` to ``end - 1`` to -inf.

    Columns count from this thread's first; without ``two_sided``, all before a visible one are
    visible. ``select_``: of a conditional expression, the DSL would trace both sides twice.
    """
    scores = by_row(acc)
    for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        is_visible = column_of(i) < end
        if const_expr(two_sided):
            is_visible = is_visible & (column_of(i) >= start)
        scores[row, i] = cutlass.select_(is_visible, scores[row, i], -Float32.inf)


@cute.jit
def mask_segments(acc: cute.Tensor, row_ids: list, ids: cute.Pointer, last: Int32) -> None:
    """Sets scores to -inf where the segments of key and row differ.

    Args:
        acc: score fragment.
        row_ids: segment of each of this thread's rows.
        ids: segments of the keys, from this thread's first column on.
        last: offset of the last key from that column; nothing beyond it is read.
    """
    scores = by_row(acc)
    keys = cute.make_tensor(ids, cute.make_layout(1 << 16))
    for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        key = keys[cutlass.min(column_of(i), last)]
        for row in cutlass.range_constexpr(ROWS):
            scores[row, i] = cutlass.select_(key == row_ids[row], scores[row, i], -Float32.inf)


@cute.jit
def mask_by_words(acc: cute.Tensor, words: list, first_column: Int32) -> None:
    """Sets the scores whose bit is 0 to -inf.

    Args:
        acc: the scores.
        words: for each of this thread's rows, words of 32 columns each.
        first_column: this thread's first column.
    """
    scores = by_row(acc)
    own = [[word >> first_column for word in of_row] for of_row in words]
    for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        number, bit = divmod(column_of(i), WORD_KEYS)
        for row in cutlass.range_constexpr(ROWS):
            is_visible = (own[row][number] & (1 << bit)) != 0
            scores[row, i] = cutlass.select_(is_visible, scores[row, i], -Float32.inf)
