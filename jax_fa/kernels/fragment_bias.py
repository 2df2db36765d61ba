"""Bias in the order of score fragments (``fragments.py``): loads ahead of use, and the addition.

A thread loads the elements for its own scores into 32-bit words in registers. These loads are in
flight while products run. A word holds two elements if they have 16 bits and are neighbours along a
fragment's row, otherwise one.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from jax_fa.kernels import bias as biases
from jax_fa.kernels import fragments, primitives
from jax_fa.kernels.bias import Bias
from jax_fa.kernels.forward_work import Work
from jax_fa.kernels.fragment_rows import rows_of_thread


@cute.jit
def load_rows(
    words: cute.Tensor,
    bias: Bias,
    rows: list[Int64],
    first_key: Int32,
    columns: cutlass.Constexpr[int],
) -> None:
    """Starts the loads for a fragment whose rows are queries.

    Args:
        words: one for each score; elements of 16 bits need only half of them.
        bias: the bias to load from.
        rows: addresses of the bias rows of the thread's rows of scores.
        first_key: key of the thread's first column.
        columns: columns of the fragment.
    """
    # Neighbours are aligned if rows have an even number of elements.
    in_pairs = (first_key + (columns - 6) <= bias.keys) & (bias.keys % 2 == 0)
    groups = columns // 8
    if bias.size_bytes == 2:
        if in_pairs:
            for r in cutlass.range_constexpr(fragments.ROWS):
                address = rows[r] + first_key * 2
                for g in cutlass.range_constexpr(groups):
                    words[fragments.ROWS * g + r] = biases.load_word(address + 16 * g)
        else:
            for g in cutlass.range_constexpr(groups):
                keys = [biases.key_of(bias, first_key + 8 * g + c) * 2 for c in range(2)]
                for r in cutlass.range_constexpr(fragments.ROWS):
                    low, high = [biases.load_half(rows[r] + key) for key in keys]
                    words[fragments.ROWS * g + r] = low | (high << 16)
    else:
        if in_pairs:
            for r in cutlass.range_constexpr(fragments.ROWS):
                address = rows[r] + first_key * 4
                for g in cutlass.range_constexpr(groups):
                    pair = biases.load_pair(address + 32 * g)
                    for c in cutlass.range_constexpr(2):
                        words[4 * g + 2 * r + c] = pair[c]
        else:
            for g in cutlass.range_constexpr(groups):
                for c in cutlass.range_constexpr(2):
                    key = biases.key_of(bias, first_key + 8 * g + c).to(Int64) * 4
                    for r in cutlass.range_constexpr(fragments.ROWS):
                        words[4 * g + 2 * r + c] = biases.load_word(rows[r] + key)


@cute.jit
def load(
    variant: cutlass.Constexpr, x: Any, c: Any, work: Work, block: Int32, words: cute.Tensor
) -> None:
    """Starts the loads of the bias of a block's scores; ``c`` is as in ``fragment_rows.py``."""
    bias, block_kv, addresses = x.scalars.bias, variant.config.block_kv, []
    for at in rows_of_thread(variant, x, c, work):
        row = biases.row_of(bias, work.tile.batch, at.head, at.position)
        addresses.append(biases.address_of(bias, row))
    first_key = block * block_kv + fragments.first_column(c.thread)
    load_rows(words, bias, addresses, first_key, block_kv)


@cute.jit
def add_rows(acc: cute.Tensor, words: cute.Tensor, bias: Bias, dtype: cutlass.Constexpr) -> None:
    """Replaces each score by ``scale`` times it plus what ``load_rows`` loaded, capped."""
    if bias.size_bytes == 2:
        for i in cutlass.range_constexpr(cute.size(acc) // 2):
            pair = primitives.widen(words[i], dtype)
            for c in cutlass.range_constexpr(2):
                acc[2 * i + c] = acc[2 * i + c] * bias.scale + pair[c]
    else:
        add_words(acc, words, bias)
    biases.cap(bias, acc)


@cute.jit
def add_words(acc: cute.Tensor, words: cute.Tensor, bias: Bias) -> None:
    """Replaces each score by ``scale`` times it plus a word, which is one float32 element."""
    for i in cutlass.range_constexpr(cute.size(acc)):
        acc[i] = acc[i] * bias.scale + biases.as_float(words[i])
