"""Online softmax in base 2: the method, and the parts that all families share.

Scores stay as the product left them; the scale (times log2 e) is folded into the one fused
multiply-add that precedes each exponential: ``p = 2 ** (s * scale_log2 - m * scale_log2)``, with m
the running row maximum (Milakov and Gimelshein, arXiv:1805.02867; Dao, arXiv:2307.08691).
"""

import math
from typing import NamedTuple

import cutlass
from cutlass import Float32, cute

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
SPAN = 2.0**8
"""Range of exponents. ``sm100/row_softmax.py`` divides by it, so that saturation clamps them."""


@cute.jit
def cap(acc: cute.Tensor, inner_log2: Float32) -> None:
    """Replaces scores s by ``tanh(x)``, with ``2 * log2(e) * x = s * inner_log2``.

    tanh(x) = 1 - 2 / (1 + e ** 2x) takes two operations of the special function unit and has an
    absolute error of 1e-7. The hardware's tanh has 5e-4; a cap of 50 makes that 0.02 in the logits.
    """
    for i in cutlass.range_constexpr(cute.size(acc)):
        power = cute.math.exp2(acc[i] * inner_log2, fastmath=True)
        acc[i] = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + power)


class RowResult(NamedTuple):
    """The results of a row: the factor of its accumulator, and its log-sum-exp."""

    factor: Float32
    lse: Float32


@cute.jit
def finish_whole_row(maximum_log2: Float32, total: Float32, sink: Float32) -> RowResult:
    """The result of a row from its scaled maximum and the sum relative to that maximum.

    ``sink`` is one more logit in the denominator, -inf for none.
    """
    sink_log2 = sink * LOG2_E
    largest = cute.arch.fmax(maximum_log2, sink_log2)
    reference = Float32(0.0) if largest == -Float32.inf else largest
    own = cute.math.exp2(maximum_log2 - reference, fastmath=True)
    denominator = total * own + cute.math.exp2(sink_log2 - reference, fastmath=True)
    is_empty = denominator == 0.0
    factor = Float32(0.0) if is_empty else own * cute.arch.rcp_approx(denominator)
    lse = (reference + cute.math.log2(denominator, fastmath=True)) * LN_2
    return RowResult(factor, -Float32.inf if is_empty else lse)
