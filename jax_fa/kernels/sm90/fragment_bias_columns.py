"""Bias as a backward reads it, whose fragments have keys for rows (``fragment_bias.py``)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from jax_fa.kernels import bias as biases
from jax_fa.kernels import fragments, primitives
from jax_fa.kernels.bias import Bias
from jax_fa.kernels.sm90.fragment_bias import add_words


@cute.jit
def load_columns(
    words: cute.Tensor, bias: Bias, head: Int64, first_row: Int32, first_key: Int32
) -> None:
    """Starts the loads for a fragment whose rows are keys and whose columns are queries.

    Args:
        words: one for each score.
        bias: where they come from.
        head: address of the bias of the query head.
        first_row: query of the thread's first column.
        first_key: that of the thread's first row.
    """
    # D = 256 spilled 16 bytes of addresses computed ahead of the steps (DSL 4.8.1).
    first_row, first_key, own_rows, own_keys = (
        primitives.opaque(value) for value in (first_row, first_key, bias.rows, bias.keys)
    )
    bias = bias._replace(rows=own_rows, keys=own_keys)
    keys = [biases.key_of(bias, first_key + 8 * r) for r in range(fragments.ROWS)]
    if bias.size_bytes == 2:
        for i in cutlass.range_constexpr(cute.size(words) // fragments.ROWS):
            row = biases.clamped_row(bias, first_row + fragments.column_of(i))
            address = head + row.to(Int64) * bias.row_bytes
            for r in cutlass.range_constexpr(fragments.ROWS):
                at = i // 2 * 4 + 2 * r + i % 2
                words[at] = biases.load_half(address + keys[r].to(Int64) * 2)
    else:
        for i in cutlass.range_constexpr(cute.size(words) // fragments.ROWS):
            row = biases.clamped_row(bias, first_row + fragments.column_of(i))
            address = head + row.to(Int64) * bias.row_bytes
            for r in cutlass.range_constexpr(fragments.ROWS):
                at = i // 2 * 4 + 2 * r + i % 2
                words[at] = biases.load_word(address + keys[r].to(Int64) * 4)


@cute.jit
def add_columns(acc: cute.Tensor, words: cute.Tensor, bias: Bias, dtype: cutlass.Constexpr) -> None:
    """Makes sums of scores: ``scale`` times the score plus what ``load_columns`` loaded, capped."""
    if bias.size_bytes == 2:
        for i in cutlass.range_constexpr(cute.size(acc)):
            element = primitives.widen(words[i], dtype)[0]
            acc[i] = acc[i] * bias.scale + element
    else:
        add_words(acc, words, bias)
    biases.cap(bias, acc)
