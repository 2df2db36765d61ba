"""Keys of a backward whose scores are fragments (``fragments.py``), transposed: a row is a key.

An argument ``c`` is anything with the accumulators ``s``, of such scores, ``dk`` and ``dv``; with
``first_key`` and ``first_query``, where ``s`` begins in the tile and in the query block; and with
``index``, the number of the consumer, and ``thread``, the calling one of its 128 threads.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from jax_fa.kernels import (
    backward_rows,
    dense_mask,
    fragment_softmax,
    fragments,
    primitives,
    segments,
    tiles,
)
from jax_fa.kernels.backward_rows import Destination
from jax_fa.kernels.backward_work import Step, Work
from jax_fa.spec import division
from jax_fa.spec.band_of_keys import row_range


def own_columns(c: Any, stats: cute.Tensor) -> cute.Tensor:
    """The ``stats`` of this thread's two columns in every group, as a view (2, groups)."""
    columns = (2, 4, cute.size(stats) // 8)
    by_group = cute.make_tensor(stats.iterator, cute.make_layout(columns, stride=(1, 2, 8)))
    own = cute.domain_offset((0, 0, c.first_query // 8), by_group)
    return own[None, c.thread % 4, None]


@cute.jit
def loaded_columns(c: Any, stats: cute.Tensor, acc: cute.Tensor) -> cute.Tensor:
    """``own_columns`` for the columns of ``acc``, in registers."""
    own = own_columns(c, stats)
    groups = cute.size(fragments.by_row(acc), mode=[1]) // 2
    loaded = cute.make_rmem_tensor((2, groups), own.element_type)
    for group in cutlass.range_constexpr(groups):
        cute.autovec_copy(own[None, group], loaded[None, group])
    return loaded


@cute.jit
def exponentiate(
    variant: cutlass.Constexpr,
    s: cute.Tensor,
    lse2: cute.Tensor,
    score_log2: Float32,
    p: cute.Tensor | None,
    slope: cute.Tensor | None,
):
    """Computes P from the scores, and the factor ``slope`` of dS: P times the slope of the cap.

    Either may be left out; without a cap they are the same numbers.

    Args:
        variant: the variant.
        s: the scores.
        lse2: LSE of this thread's columns in base 2: (2, groups), in shared memory or registers.
        score_log2: factor that turns ``s`` into logits in base 2.
        p: P, rounded.
        slope: the factor of dS, in float32 or rounded. May be ``s``.
    """
    by_key = fragments.by_row(s)
    rounds_slope = const_expr(slope is not None and slope.element_type is not Float32)
    if const_expr(p is not None):
        p_words = cute.recast_tensor(p, Int32)
    if const_expr(rounds_slope):
        slope_words = cute.recast_tensor(slope, Int32)
    elif const_expr(slope is not None):
        slope_by_key = fragments.by_row(slope)
    for group in cutlass.range_constexpr(cute.size(by_key, mode=[1]) // 2):
        pair = lse2[None, group].load()
        for r in cutlass.range_constexpr(fragments.ROWS):
            scores = [by_key[r, 2 * group + i] for i in range(2)]
            powers = [
                cute.math.exp2(scores[i] * score_log2 - pair[i], fastmath=True) for i in range(2)
            ]
            if const_expr(variant.key.has_bias and not variant.key.multiplies_bias):
                powers = [backward_rows.probability(power) for power in powers]
            word = fragments.ROWS * group + r
            if const_expr(p is not None):
                p_words[word] = primitives.narrow_pair(powers[0], powers[1], variant.dtype)
            if const_expr(variant.key.has_soft_cap):
                # Masked scores are -inf here. Their slope is set to 0, because 0 * inf is NaN.
                slopes = [cute.arch.fmax(1.0 - score * score, 0.0) for score in scores]
                powers = [powers[i] * slopes[i] for i in range(2)]
            if const_expr(rounds_slope):
                slope_words[word] = primitives.narrow_pair(powers[0], powers[1], variant.dtype)
            elif const_expr(slope is not None):
                for i in cutlass.range_constexpr(2):
                    slope_by_key[r, 2 * group + i] = powers[i]


@cute.jit
def differentiate(delta: cute.Tensor, slope: cute.Tensor, dp: cute.Tensor):
    """Computes dS = slope (dP - delta), in place of dP; ``delta`` is as ``lse2`` above.

    The slope is in float32, or rounded, which makes the error of dS larger.
    """
    by_key = fragments.by_row(dp)
    is_rounded = const_expr(slope.element_type is not Float32)
    words = cute.recast_tensor(slope, Int32) if const_expr(is_rounded) else fragments.by_row(slope)
    for group in cutlass.range_constexpr(cute.size(by_key, mode=[1]) // 2):
        pair = delta[None, group].load()
        for r in cutlass.range_constexpr(fragments.ROWS):
            if const_expr(is_rounded):
                factors = primitives.widen(words[fragments.ROWS * group + r], slope.element_type)
            else:
                factors = [words[r, 2 * group + i] for i in range(2)]
            for i in cutlass.range_constexpr(2):
                at = (r, 2 * group + i)
                by_key[at] = factors[i] * (by_key[at] - pair[i])


@cute.jit
def mask_block(variant: cutlass.Constexpr, x: Any, c: Any, work: Work, at: Step):
    """Sets the scores of pairs that band, segments or a dense mask hide to -inf."""
    config, window, thread = variant.config, work.window, primitives.opaque(c.thread)
    first_key = work.tile.block * config.block_kv + c.first_key
    first_column = at.q_block * config.block_q + c.first_query
    first_column = first_column + fragments.first_column(thread)
    for r in cutlass.range_constexpr(fragments.ROWS):
        key = first_key + fragments.row_in_tile(thread) + 8 * r
        rows = row_range(window, key, tiles.EXTREMES)
        seen = tiles.Stretch(rows.lo, Int32(rows.hi if key < window.kv_len else 0))
        if const_expr(variant.is_general):
            if tiles.is_present(x.scalars.q_segments):
                seen = segments.within_run(x.smem.found, segment_of(x, work, key), seen)
        start, end = seen.start - first_column, seen.end - first_column
        fragment_softmax.mask_row(c.s, r, start, end, two_sided=True)
    if const_expr(variant.is_general):
        if tiles.is_present(x.scalars.q_segments):
            if not segments.are_runs(x.smem.found):
                own = first_key + fragments.row_in_tile(thread)
                first = work.tile.batch * x.scalars.sequences.rows.swept + work.q_start
                fragment_softmax.mask_segments(
                    c.s,
                    [segment_of(x, work, own + 8 * r) for r in range(fragments.ROWS)],
                    x.scalars.q_segments + (first + first_column),
                    window.q_len - 1 - first_column,
                )
        if dense_mask.is_present(x.scalars.mask):
            if dense_mask.hides(x.smem.found, at.q_block):
                first_query = at.q_block * config.block_q + c.first_query
                mask_by_columns(x, c, work, at.head, first_key, first_query)


def segment_of(x: Any, work: Work, key: Int32) -> Int32:
    """The segment of a key of the tile, or of the last one."""
    first = work.tile.batch * x.scalars.sequences.rows.own + work.kv_start
    key = cutlass.min(key, work.window.kv_len - 1)
    return tiles.element(x.scalars.kv_segments + first, key)


@cute.jit
def mask_by_columns(
    x: Any,
    c: Any,
    work: Work,
    head: Int32,
    first_key: Int32,
    first_query: Int32,
):
    """Sets the scores of pairs that a dense mask hides to -inf. Whole warps call.

    ``first_key`` and ``first_query`` are those of the consumer's first row and first column.
    """
    mask, scores = x.scalars.mask, fragments.by_row(c.s)
    key = first_key + fragments.row_in_tile(c.thread)
    # The rows of a warp lie in one word: its lanes share the loads, one query each.
    columns = fragments.column_of(cute.size(scores, mode=[1]) - 1) + 1
    queries = [
        cutlass.min(first_query + first + cute.arch.lane_idx(), work.window.q_len - 1)
        for first in range(0, columns, division.WORD_KEYS)
    ]
    rows = [dense_mask.row_of(mask, work.tile.batch, head, query) for query in queries]
    words = [dense_mask.word_of(mask, row, key // division.WORD_KEYS) for row in rows]
    shift, own = key % division.WORD_KEYS, fragments.first_column(c.thread)
    for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        number, lane = divmod(fragments.column_of(i), division.WORD_KEYS)
        word = cute.arch.shuffle_sync(words[number], own + lane) >> shift
        for r in cutlass.range_constexpr(fragments.ROWS):
            is_visible = (word & (1 << 8 * r)) != 0
            scores[r, i] = cutlass.select_(is_visible, scores[r, i], -Float32.inf)


@cute.jit
def store(
    variant: cutlass.Constexpr,
    x: Any,
    c: Any,
    work: Work,
    owned: cutlass.Constexpr = ("dk", "dv"),
):
    """Writes this consumer's dK and dV of 64 keys, or their sums over a part of a group's heads.

    Only those of the two that are ``owned`` are written.
    """
    key = work.tile.block * variant.config.block_kv + c.first_key
    place = (None, None, work.tile.kv_head, work.tile.batch)
    num_rows = work.kv_slot - key
    column = Int32(0) if const_expr(variant.config.splits_keys) else c.index
    dk_at = (work.kv_start + key, column * variant.dk_columns)
    dv_at = (work.kv_start + key, column * variant.dv_columns)
    dk_left = cute.size(x.arrays.dk, mode=[1]) - dk_at[1]
    dv_left = cute.size(x.arrays.dv, mode=[1]) - dv_at[1]
    if x.scalars.splits == 1:
        if const_expr("dk" in owned):
            dk = cute.domain_offset(dk_at, x.arrays.dk[place])
            backward_rows.store_rows(
                c.dk, x.scalars.scale, Destination(dk, c.thread, num_rows, dk_left)
            )
        if const_expr("dv" in owned):
            dv = cute.domain_offset(dv_at, x.arrays.dv[place])
            backward_rows.store_rows(
                c.dv, Float32(1.0), Destination(dv, c.thread, num_rows, dv_left)
            )
    else:
        part = work.tile.head % x.scalars.splits
        sums = x.scratch.dkv_sums + part.to(Int64) * backward_rows.dkv_elements(x.arrays)
        if const_expr("dk" in owned):
            dk = cute.domain_offset(dk_at, backward_rows.like(x.arrays.dk, sums)[place])
            backward_rows.store_floats(
                c.dk, x.scalars.scale, Destination(dk, c.thread, num_rows, dk_left)
            )
        if const_expr("dv" in owned):
            dv = backward_rows.like(x.arrays.dv, sums + cute.size(x.arrays.dk.shape))
            dv = cute.domain_offset(dv_at, dv[place])
            backward_rows.store_floats(
                c.dv, Float32(1.0), Destination(dv, c.thread, num_rows, dv_left)
            )
