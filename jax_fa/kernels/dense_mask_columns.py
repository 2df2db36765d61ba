"""Dense masks by columns, for a backward, whose threads hold keys."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa.kernels.dense_mask import DenseMask, word_of
from jax_fa.spec.division import WORD_KEYS


@cute.jit
def column_bits(mask: DenseMask, row: Int32, key: Int32) -> Int32:
    """Bit i tells whether the row of lane i sees this lane's key.

    Whole warps call, for 32 keys that begin at a multiple of 32.
    """
    lane = cute.arch.lane_idx()
    word = word_of(mask, row, key // WORD_KEYS)
    bits = Int32(0)
    # Rolled, as in ``same_segment_bits`` of ``sm100/row_softmax.py``.
    for i in cutlass.range(WORD_KEYS, unroll=1):
        column = cute.arch.vote_ballot_sync(((word >> i) & 1) != 0)
        bits = column if lane == i else bits
    return bits
