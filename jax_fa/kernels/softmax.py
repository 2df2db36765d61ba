"""Online softmax over score fragments, in base 2.

Scores stay as the product left them; the scale (times log2 e) is folded into the one fused
multiply-add that precedes each exponential: ``p = 2 ** (s * scale_log2 - m * scale_log2)``, with m
the running row maximum (Milakov and Gimelshein, arXiv:1805.02867; Dao, arXiv:2307.08691).
"""

import math
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from jax_fa import mask_mods
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
def copy(state: RowState) -> RowState:
    """The same statistics in registers of their own."""
    other = make_row_state()
    other.maximum.store(state.maximum.load())
    other.total.store(state.total.load())
    return other


@cute.jit
def reset(state: RowState) -> None:
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


class RowResult(NamedTuple):
    """What a row comes to: the factor of its accumulator, and its log-sum-exp."""

    factor: Float32
    lse: Float32


@cute.jit
def finish_row(maximum: Float32, total: Float32, scale_log2: Float32, sink: Float32) -> RowResult:
    """The result of a row from its statistics, ``total`` being this thread's part of the sum.

    ``sink`` is one more logit in the denominator, -inf for none.
    """
    return finish_whole_row(maximum * scale_log2, quad_sum(total), sink)


@cute.jit
def finish_whole_row(maximum_log2: Float32, total: Float32, sink: Float32) -> RowResult:
    """``finish_row`` where ``maximum_log2`` is scaled and ``total`` the whole sum."""
    sink_log2 = sink * LOG2_E
    largest = cute.arch.fmax(maximum_log2, sink_log2)
    reference = Float32(0.0) if largest == -Float32.inf else largest
    own = cute.math.exp2(maximum_log2 - reference, fastmath=True)
    denominator = total * own + cute.math.exp2(sink_log2 - reference, fastmath=True)
    is_empty = denominator == 0.0
    factor = Float32(0.0) if is_empty else own * cute.arch.rcp_approx(denominator)
    lse = (reference + cute.math.log2(denominator, fastmath=True)) * LN_2
    return RowResult(factor, -Float32.inf if is_empty else lse)


@cute.jit
def scale_rows(acc: cute.Tensor, factors: cute.Tensor) -> None:
    """Multiplies each row of an accumulator by its factor."""
    rows = primitives.by_row(acc)
    for row in cutlass.range_constexpr(ROWS):
        for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            rows[row, i] = rows[row, i] * factors[row]


@cute.jit
def cap(acc: cute.Tensor, inner_log2: Float32) -> None:
    """Replaces scores s by ``tanh(x)``, with ``2 * log2(e) * x = s * inner_log2``.

    tanh(x) = 1 - 2 / (1 + e ** 2x): two operations of the special function unit, absolute error
    1e-7; the hardware's tanh has 5e-4, which a cap of 50 would turn into 0.02 in the logits.
    """
    for i in cutlass.range_constexpr(cute.size(acc)):
        power = cute.math.exp2(acc[i] * inner_log2, fastmath=True)
        acc[i] = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + power)


class Visible(NamedTuple):
    """Columns ``first <= column < end`` of one row, relative to this thread's first column."""

    first: Int32 | int
    end: Int32


@cute.jit
def mask(acc: cute.Tensor, rows: list, two_sided: cutlass.Constexpr[bool]) -> None:
    """Sets the scores outside each row's ``Visible`` columns to -inf.

    ``two_sided`` is False where no row has invisible columns before its visible ones.
    """
    scores = primitives.by_row(acc)
    for row in cutlass.range_constexpr(ROWS):
        for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            column = primitives.column_of(i)
            is_visible = column < rows[row].end
            if cutlass.const_expr(two_sided):
                is_visible = is_visible & (column >= rows[row].first)
            scores[row, i] = scores[row, i] if is_visible else -Float32.inf


@cute.jit
def mask_segments(acc: cute.Tensor, row_ids: list, ids: cute.Pointer, last: Int32) -> None:
    """Sets the scores of keys of another segment than their row's to -inf.

    Args:
        acc: score fragment.
        row_ids: segment of each of this thread's rows.
        ids: segments of the keys, from this thread's first column on.
        last: offset of the last key from there; nothing beyond it is read.
    """
    scores = primitives.by_row(acc)
    keys = cute.make_tensor(ids, cute.make_layout(1 << 16))
    for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        key = keys[cutlass.min(primitives.column_of(i), last)]
        for row in cutlass.range_constexpr(ROWS):
            scores[row, i] = scores[row, i] if key == row_ids[row] else -Float32.inf


@cute.jit
def mask_by_function(
    acc: cute.Tensor, mask_mod: cutlass.Constexpr[str], rows: list, first_key: Int32
) -> None:
    """Sets the scores of keys that the mask function of this name hides to -inf.

    ``rows`` are the positions of this thread's rows, ``first_key`` that of its first column.
    """
    scores, function = primitives.by_row(acc), mask_mods.resolve(mask_mod)
    for row in cutlass.range_constexpr(ROWS):
        for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            key = first_key + primitives.column_of(i)
            is_visible = function(Int32(0), Int32(0), rows[row], key)
            scores[row, i] = scores[row, i] if is_visible else -Float32.inf


# What follows is for threads that hold one whole row each, in column order.


CHAINS = 4
"""Independent maxima, or sums, of a row: as many as hide the latency of one instruction."""


@cute.jit
def whole_row_max(scores: cute.Tensor) -> Float32:
    """Maximum of a row, by instructions of three operands, over independent chains."""
    first = 3 * CHAINS
    chains = [
        primitives.max3(scores[3 * i], scores[3 * i + 1], scores[3 * i + 2]) for i in range(CHAINS)
    ]
    for i in cutlass.range_constexpr((cute.size(scores) - first) // 2):
        pair = first + 2 * i
        chains[i % CHAINS] = primitives.max3(chains[i % CHAINS], scores[pair], scores[pair + 1])
    return cute.arch.fmax(primitives.max3(chains[0], chains[1], chains[2]), chains[3])


class WholeRow(NamedTuple):
    """Running statistics of one row.

    Attributes:
        maximum: (1,) base 2 logarithm of what ``total`` is relative to: not far below the maximum
            of the scaled scores, or -inf while no key was visible.
        offset: (1,) what is added in the exponent: -``maximum``, or 0 where that is infinite.
        total: (2,) sums of the probabilities of even and of odd columns.
    """

    maximum: cute.Tensor
    offset: cute.Tensor
    total: cute.Tensor


def make_whole_row() -> WholeRow:
    """Statistics in registers, yet to be reset."""
    return WholeRow(*(cute.make_rmem_tensor((size,), Float32) for size in (1, 1, 2)))


@cute.jit
def reset_whole_row(row: WholeRow) -> None:
    """Statistics of no keys at all."""
    row.maximum[0] = -Float32.inf
    row.offset.fill(0.0)
    row.total.fill(0.0)


# 1 + c1 f + c2 f^2 + c3 f^3 + c4 f^4 is within 2.9e-6 of 2 ** f on [0, 1], relatively (minimax fit
# with p(0) = 1). The best cubic has 8.6e-5 and saves half an instruction: enough for P, which is
# rounded to 16 bits, but it would show in the sum, hence in the LSE, which is a float32.
POWER_OF_TWO = (0.69304484, 0.24128021, 0.05224245, 0.0134267)
SMALLEST_LOG2 = -127.0
"""Here the sum of the exponent fields is 0: the result is exactly 0, as it must be for -inf."""
SPAN = 2.0**8
"""Exponents from ``SMALLEST_LOG2`` on, as a share of which saturation clamps them."""
ROUND_TO_INTEGER = 1.5 * 2.0**23 / SPAN + SMALLEST_LOG2 / SPAN
"""Added to such a share, rounding down, it leaves the floor of the exponent in the low bits."""


@cute.jit
def exp2_by_polynomial(share0: Float32, share1: Float32) -> tuple:
    """2 ** (SMALLEST_LOG2 + SPAN * share) of two shares, without the special function unit.

    Results are 0 up to 2 ** -127, and right up to 2 ** 127. Exponent and fraction apart (Cody and
    Waite, 1980); FlashAttention-4, arXiv:2603.05451, brought it to this place.
    """
    share = (share0, share1)
    magic = (Float32(ROUND_TO_INTEGER), Float32(ROUND_TO_INTEGER))
    whole = cute.arch.add_packed_f32x2(share, magic, rnd="rm")
    floor = cute.arch.sub_packed_f32x2(whole, magic, rnd="rn")
    fraction = cute.arch.sub_packed_f32x2(share, floor, rnd="rn")
    terms = [c * SPAN**power for power, c in enumerate((1.0, *POWER_OF_TWO))]
    *others, power = ((Float32(c), Float32(c)) for c in terms)
    for c in reversed(others):
        power = cute.arch.fma_packed_f32x2(power, fraction, c)
    return (
        primitives.add_to_exponent(power[0], whole[0]),
        primitives.add_to_exponent(power[1], whole[1]),
    )


def takes_polynomial(pair: int, polynomials: int, scores: int) -> bool:
    """Whether a pair of a row's scores is among the ``polynomials``, which are spread evenly."""
    pairs, chosen = scores // 2, polynomials // 2
    return (pair + 1) * chosen // pairs > pair * chosen // pairs


@cute.jit
def exponentials(
    scores: cute.Tensor,
    scale_log2: Float32,
    scale_share: Float32,
    offset: Float32,
    by_polynomial: cutlass.Constexpr[tuple],
):
    """Replaces scores by ``2 ** (score * scale_log2 + offset)``, which is at most 2 ** 127.

    ``by_polynomial`` tells for each pair of them whether the special function unit is spared;
    ``scale_share`` is ``scale_log2 / SPAN``.
    """
    factor, offsets = (scale_log2, scale_log2), (offset, offset)
    share_offset = offset * (1.0 / SPAN) - SMALLEST_LOG2 / SPAN
    for i in cutlass.range_constexpr(cute.size(scores) // 2):
        pair = (scores[2 * i], scores[2 * i + 1])
        if cutlass.const_expr(by_polynomial[i]):
            shares = [primitives.fma_saturated(x, scale_share, share_offset) for x in pair]
            scores[2 * i], scores[2 * i + 1] = exp2_by_polynomial(*shares)
        else:
            x0, x1 = cute.arch.fma_packed_f32x2(pair, factor, offsets)
            scores[2 * i] = cute.math.exp2(x0, fastmath=True)
            scores[2 * i + 1] = cute.math.exp2(x1, fastmath=True)


def no_sums() -> list:
    """What ``add_pairs`` adds to at first."""
    return []


def add_pairs(sums: list, values: cute.Tensor) -> list:
    """Up to four independent sums of pairs, with the values of a part of a row added."""
    sums = list(sums)
    for i in range(cute.size(values) // 2):
        pair = (values[2 * i], values[2 * i + 1])
        chain = i % CHAINS
        if chain == len(sums):
            sums.append(pair)
        else:
            sums[chain] = cute.arch.add_packed_f32x2(sums[chain], pair)
    return sums


@cute.jit
def add_to_total(row: WholeRow, shrink: Float32, sums: list):
    """Shrinks the total, and adds what ``add_pairs`` made of the scores of a block."""
    low = cute.arch.add_packed_f32x2(sums[0], sums[1])
    high = cute.arch.add_packed_f32x2(sums[2], sums[3])
    block = cute.arch.add_packed_f32x2(low, high)
    total = (row.total[0], row.total[1])
    row.total[0], row.total[1] = cute.arch.fma_packed_f32x2(total, (shrink, shrink), block)


WORD = 32


def visible_bits(visible: Visible, first: int) -> Int32:
    """Bit i tells whether column ``first + i`` of a row is visible."""
    begin = cutlass.max(visible.first - first, 0)
    end = cutlass.max(visible.end - first, 0)
    return primitives.bits_from(begin) & ~primitives.bits_from(end)


@cute.jit
def same_segment_bits(row_id: Int32, ids: cute.Pointer, last: Int32) -> Int32:
    """Bit i tells whether key i, or key ``last`` if that comes before, has the segment ``row_id``.

    All rows of a warp see the same keys: its lanes share the reading. Called by whole warps.
    """
    mine = cute.make_tensor(ids, cute.make_layout(WORD))[cutlass.min(cute.arch.lane_idx(), last)]
    bits = Int32(0)
    # Rolled: unrolled, the compiler has all words in registers at once, beside the scores.
    for i in cutlass.range(WORD, unroll=1):
        bits = bits | (Int32(cute.arch.shuffle_sync(mine, i) == row_id) << i)
    return bits


@cute.jit
def bits_by_function(
    mask_mod: cutlass.Constexpr[str], pair: tuple[Int32, Int32], step: cutlass.Constexpr[tuple]
) -> Int32:
    """Bit i tells whether the mask function of this name shows pair i of a row or column.

    ``pair`` is the first (query position, key), ``step`` leads to the next: (0, 1) or (1, 0).
    """
    function = mask_mods.resolve(mask_mod)
    position, key = pair
    bits = Int32(0)
    # Rolled, as in same_segment_bits.
    for i in cutlass.range(WORD, unroll=1):
        is_visible = function(Int32(0), Int32(0), position + i * step[0], key + i * step[1])
        bits = bits | (Int32(is_visible) << i)
    return bits


@cute.jit
def mask_by_bits(scores: cute.Tensor, bits: Int32, first: cutlass.Constexpr[int]):
    """Sets those of the scores from column ``first`` on to -inf whose bit is 0."""
    for i in cutlass.range_constexpr(WORD):
        is_visible = (bits & (1 << i if i < WORD - 1 else -(1 << i))) != 0
        scores[first + i] = scores[first + i] if is_visible else -Float32.inf
