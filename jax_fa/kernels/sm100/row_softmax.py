"""Online softmax and masks over rows of scores, by threads that hold one whole row each.

In the backward, threads likewise hold columns of the scores, which are transposed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from jax_fa.kernels.sm100 import arithmetic
from jax_fa.kernels.softmax import SPAN
from jax_fa.kernels.tiles import Stretch
from jax_fa.spec.division import WORD_KEYS

CHAINS = 4
"""Independent maxima, or sums, of a row: enough to hide the latency of one instruction."""


@cute.jit
def whole_row_max(scores: cute.Tensor) -> Float32:
    """The maximum of a row, by three-operand instructions over independent chains."""
    first = 3 * CHAINS
    chains = [
        arithmetic.max3(scores[3 * i], scores[3 * i + 1], scores[3 * i + 2]) for i in range(CHAINS)
    ]
    for i in cutlass.range_constexpr((cute.size(scores) - first) // 2):
        pair = first + 2 * i
        chains[i % CHAINS] = arithmetic.max3(chains[i % CHAINS], scores[pair], scores[pair + 1])
    return cute.arch.fmax(arithmetic.max3(chains[0], chains[1], chains[2]), chains[3])


class WholeRow(NamedTuple):
    """Running statistics of one row.

    Attributes:
        maximum: (1,) base 2 logarithm of what ``total`` is relative to: not far below the maximum
            of the scaled scores, or -inf until a key is visible.
        offset: (1,) what is added to the exponent: -``maximum``, or 0 if that is infinite.
        total: (2,) sums of the probabilities of even and of odd columns.
    """

    maximum: cute.Tensor
    offset: cute.Tensor
    total: cute.Tensor


def make_whole_row() -> WholeRow:
    """Registers for the statistics of a row, to be reset before use."""
    return WholeRow(*(cute.make_rmem_tensor((size,), Float32) for size in (1, 1, 2)))


@cute.jit
def reset_whole_row(row: WholeRow) -> None:
    """Resets the statistics to those of a row without keys."""
    row.maximum[0] = -Float32.inf
    row.offset.fill(0.0)
    row.total.fill(0.0)


# 1 + c1 f + c2 f^2 + c3 f^3 + c4 f^4 is within a relative 2.9e-6 of 2 ** f on [0, 1] (minimax fit
# with p(0) = 1). The best cubic has 8.6e-5 and saves half an instruction. That is enough for P,
# which is rounded to 16 bits, but would show in the sum, and so in the LSE, which is a float32.
POWER_OF_TWO = (0.69304484, 0.24128021, 0.05224245, 0.0134267)
SMALLEST_LOG2 = -127.0
"""At this exponent the fields add up to 0: the result is exactly 0, as it must be for -inf."""
ROUND_TO_INTEGER = 1.5 * 2.0**23 / SPAN + SMALLEST_LOG2 / SPAN
"""Added to a share with rounding down, it leaves the floor of the exponent in the low bits."""


@cute.jit
def exp2_by_polynomial(share0: Float32, share1: Float32) -> tuple[Float32, Float32]:
    """2 ** (SMALLEST_LOG2 + SPAN * share) of two shares, without the special function unit.

    Results up to 2 ** -127 are 0; others, up to 2 ** 127, are right. Splits exponents into integer
    and fraction (Cody and Waite, 1980); FlashAttention-4, arXiv:2603.05451, first did so here.
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
        arithmetic.add_to_exponent(power[0], whole[0]),
        arithmetic.add_to_exponent(power[1], whole[1]),
    )


def takes_polynomial(pair: int, polynomials: int, scores: int) -> bool:
    """Whether a pair of scores takes a polynomial; a row's ``polynomials`` are spread evenly."""
    pairs, chosen = scores // 2, polynomials // 2
    return (pair + 1) * chosen // pairs > pair * chosen // pairs


@cute.jit
def exponentials(
    scores: cute.Tensor,
    scale_log2: Float32,
    scale_share: Float32,
    offset: Float32,
    by_polynomial: cutlass.Constexpr[Sequence[bool]],
):
    """Replaces scores by ``2 ** (score * scale_log2 + offset)``, which is at most 2 ** 127.

    ``by_polynomial`` says for each pair of scores whether a polynomial replaces the special
    function unit; ``scale_share`` is ``scale_log2 / SPAN``.
    """
    factor, offsets = (scale_log2, scale_log2), (offset, offset)
    share_offset = offset * (1.0 / SPAN) - SMALLEST_LOG2 / SPAN
    for i in cutlass.range_constexpr(cute.size(scores) // 2):
        pair = (scores[2 * i], scores[2 * i + 1])
        if cutlass.const_expr(by_polynomial[i]):
            shares = [arithmetic.fma_saturated(x, scale_share, share_offset) for x in pair]
            scores[2 * i], scores[2 * i + 1] = exp2_by_polynomial(*shares)
        else:
            x0, x1 = cute.arch.fma_packed_f32x2(pair, factor, offsets)
            scores[2 * i] = cute.math.exp2(x0, fastmath=True)
            scores[2 * i + 1] = cute.math.exp2(x1, fastmath=True)


def no_sums() -> list:
    """The empty sums that ``add_pairs`` starts from."""
    return []


def add_pairs(sums: list, values: cute.Tensor) -> list:
    """Returns up to four independent sums of pairs, with the values of part of a row added."""
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
    """Shrinks the total, and adds the sums that ``add_pairs`` returned for a block."""
    low = cute.arch.add_packed_f32x2(sums[0], sums[1])
    high = cute.arch.add_packed_f32x2(sums[2], sums[3])
    block = cute.arch.add_packed_f32x2(low, high)
    total = (row.total[0], row.total[1])
    row.total[0], row.total[1] = cute.arch.fma_packed_f32x2(total, (shrink, shrink), block)


def visible_bits(visible: Stretch, first: int) -> Int32:
    """A word whose bit i says whether column ``first + i`` of a row is visible."""
    begin = cutlass.max(visible.start - first, 0)
    end = cutlass.max(visible.end - first, 0)
    return arithmetic.bits_from(begin) & ~arithmetic.bits_from(end)


@cute.jit
def same_segment_bits(row_id: Int32, ids: cute.Pointer, last: Int32) -> Int32:
    """A word whose bit i says whether key min(i, ``last``) is in the segment ``row_id``.

    All rows of a warp see the same keys, so its lanes share the loads. Called by whole warps.
    """
    mine = cute.make_tensor(ids, cute.make_layout(WORD_KEYS))[
        cutlass.min(cute.arch.lane_idx(), last)
    ]
    bits = Int32(0)
    # Rolled: if unrolled, the compiler keeps all words in registers at once, beside the scores.
    for i in cutlass.range(WORD_KEYS, unroll=1):
        bits = bits | (Int32(cute.arch.shuffle_sync(mine, i) == row_id) << i)
    return bits


@cute.jit
def mask_by_bits(scores: cute.Tensor, bits: Int32, first: cutlass.Constexpr[int]):
    """Sets to -inf the scores, from column ``first`` on, whose bit is 0."""
    for i in cutlass.range_constexpr(WORD_KEYS):
        is_visible = (bits & (1 << i if i < WORD_KEYS - 1 else -(1 << i))) != 0
        scores[first + i] = cutlass.select_(is_visible, scores[first + i], -Float32.inf)
