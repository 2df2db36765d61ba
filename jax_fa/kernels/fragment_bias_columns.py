"""Bias for a backward, where the rows of fragments are keys (see ``fragment_bias.py``)."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from jax_fa.kernels import bias as biases
from jax_fa.kernels import fragments, primitives
from jax_fa.kernels.backward_work import Step, Work
from jax_fa.kernels.bias import Bias
from jax_fa.kernels.fragment_bias import add_words
from jax_fa.kernels.fragment_keys import exponentiate


@cute.jit
def load_columns(
    words: cute.Tensor, bias: Bias, head: Int64, first_row: Int32, first_key: Int32
) -> None:
    """Starts the loads for a fragment whose rows are keys and whose columns are queries.

    Args:
        words: one for each score.
        bias: the bias to load from.
        head: address of the bias of the query head.
        first_row: query of the thread's first column.
        first_key: key of the thread's first row.
    """
    # Otherwise D = 256 spills 16 bytes of addresses computed ahead of the steps (DSL 4.8.1).
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
    """Does ``add_uncapped`` and applies the cap."""
    add_uncapped(acc, words, bias, dtype)
    biases.cap(bias, acc)


@cute.jit
def add_uncapped(
    acc: cute.Tensor, words: cute.Tensor, bias: Bias, dtype: cutlass.Constexpr
) -> None:
    """Replaces each score by ``scale`` times it plus what ``load_columns`` loaded."""
    if bias.size_bytes == 2:
        for i in cutlass.range_constexpr(cute.size(acc)):
            element = primitives.widen(words[i], dtype)[0]
            acc[i] = acc[i] * bias.scale + element
    else:
        add_words(acc, words, bias)


@cute.jit
def load(
    variant: cutlass.Constexpr, x: Any, c: Any, work: Work, at: Step, words: cute.Tensor
) -> None:
    """Starts the loads of the bias of a step's scores; ``c`` is as in ``fragment_keys.py``."""
    bias, config = x.scalars.bias, variant.config
    head = biases.address_of(bias, biases.row_of(bias, work.tile.batch, at.head, Int32(0)))
    first_row = at.q_block * config.block_q + c.first_query + fragments.first_column(c.thread)
    first_key = work.tile.block * config.block_kv + c.first_key
    first_key = first_key + fragments.row_in_tile(c.thread)
    load_columns(words, bias, head, first_row, first_key)


@cute.jit
def to_slopes(
    variant: cutlass.Constexpr,
    x: Any,
    c: Any,
    p: cute.Tensor,
    slope: cute.Tensor,
) -> None:
    """Computes P times the slope of a cap that is a run-time value."""
    slope.store(p.load())
    if x.scalars.bias.soft_cap != 0.0:
        times_slope(variant, c, slope)


@cute.jit
def exponentiate_exactly(
    variant: cutlass.Constexpr,
    x: Any,
    c: Any,
    lse2: cute.Tensor,
    p: cute.Tensor,
) -> None:
    """Computes P, rounded, from the scores, and replaces these by P times the slope of the cap.

    Arguments are as for ``fragment_keys.exponentiate``. Without a cap, P in float32 replaces them.
    """
    score_log2, slope = x.scalars.score_log2, c.s
    if x.scalars.bias.soft_cap != 0.0:
        exponentiate(variant, c.s, lse2, score_log2, p, None)
        rounded = cute.make_rmem_tensor_like(p)
        to_slopes(variant, x, c, p, rounded)
        slope.store(rounded.load().to(Float32))
    else:
        exponentiate(variant, c.s, lse2, score_log2, None, slope)
        primitives.narrow(slope, p)


@cute.jit
def times_slope(variant: cutlass.Constexpr, c: Any, p: cute.Tensor) -> None:
    """Multiplies P, rounded, by the slope of the cap; the scores hold the results of the cap."""
    by_key, words = fragments.by_row(c.s), cute.recast_tensor(p, Int32)
    for group in cutlass.range_constexpr(cute.size(by_key, mode=[1]) // 2):
        for r in cutlass.range_constexpr(fragments.ROWS):
            word = fragments.ROWS * group + r
            powers = primitives.widen(words[word], variant.dtype)
            scores = [by_key[r, 2 * group + i] for i in range(2)]
            # Masked scores are -inf here. Their slope is set to 0, because 0 * inf is NaN.
            slopes = [cute.arch.fmax(1.0 - s * s, 0.0) for s in scores]
            words[word] = primitives.narrow_pair(
                powers[0] * slopes[0], powers[1] * slopes[1], variant.dtype
            )
