"""Query rows of a forward whose scores are fragments (``fragments.py``): masks and results.

An argument ``c`` is anything with the accumulator ``out``, with ``index``, which tells the 64 rows
of the CTA's tile, and with ``thread``, the calling thread among those that own these rows.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from jax_fa.kernels import dense_mask, fragment_softmax, fragments, softmax, tiles
from jax_fa.kernels.forward_work import Variant, Work, batch_of_part, row_of_tile, sink_of
from jax_fa.spec.band import key_range

GROUP_ROWS = 64
"""Rows that one ``index`` covers."""


def rows_of_thread(variant: Variant, x: Any, c: Any, work: Work) -> list[tiles.RowAt]:
    """The query position and head of each of the calling thread's rows."""
    row = c.index * GROUP_ROWS + fragments.row_in_tile(c.thread)
    return [row_of_tile(variant, x, work, row + 8 * r) for r in range(fragments.ROWS)]


@cute.jit
def mask_by_words(
    variant: cutlass.Constexpr,
    x: Any,
    c: Any,
    work: Work,
    scores: cute.Tensor,
    block: Int32,
) -> None:
    """Masks the keys of a block that a dense mask hides."""
    words = []
    for at in rows_of_thread(variant, x, c, work):
        row = dense_mask.row_of(x.scalars.mask, work.tile.batch, at.head, at.position)
        block_kv = variant.config.block_kv
        words.append(dense_mask.words_of_block(x.scalars.mask, row, block, block_kv))
    fragment_softmax.mask_by_words(scores, words, fragments.first_column(c.thread))


@cute.jit
def mask_by_place(
    variant: cutlass.Constexpr,
    x: Any,
    c: Any,
    work: Work,
    scores: cute.Tensor,
    block: Int32,
) -> None:
    """Masks the keys of a block that the band or the segments hide."""
    scalars = x.scalars
    rows = [at.position for at in rows_of_thread(variant, x, c, work)]
    first_key = block * variant.config.block_kv + fragments.first_column(c.thread)
    visible = []
    for row in rows:
        keys = key_range(work.window, row, tiles.EXTREMES)
        visible.append(tiles.Stretch(keys.lo - first_key, keys.hi - first_key))
    fragment_softmax.mask(scores, visible, variant.is_general)
    if const_expr(variant.is_general):
        if tiles.is_present(scalars.q_segments):
            sequences = scalars.sequences
            q_base = work.tile.batch * sequences.rows.own + work.span.own_start
            kv_base = work.tile.batch * sequences.rows.swept + work.span.swept_start
            row_ids = []
            for row in rows:
                # 0 in a tile beyond all sequences: it has no rows.
                present = cutlass.max(cutlass.min(row, work.span.own_slot - 1), 0)
                row_ids.append(tiles.element(scalars.q_segments, q_base + present))
            last = cutlass.max(work.span.swept_len - 1 - first_key, -first_key)
            fragment_softmax.mask_segments(
                scores, row_ids, scalars.kv_segments + (kv_base + first_key), last
            )


@cute.jit
def finish_rows(
    variant: cutlass.Constexpr,
    x: Any,
    c: Any,
    work: Work,
    rows: list[tiles.RowAt],
    state: fragment_softmax.RowState,
) -> None:
    """Normalises the accumulator of ``rows`` and writes their lse."""
    span = work.span
    sinks = [sink_of(variant, x, work, rows[0].head)] * fragments.ROWS
    if const_expr(variant.config.packs_heads):
        sinks = [sink_of(variant, x, work, row.head) for row in rows]
    batch = batch_of_part(variant, x, work)
    factors = cute.make_rmem_tensor((fragments.ROWS,), Float32)
    out_rows = fragments.by_row(c.out)
    for r in cutlass.range_constexpr(fragments.ROWS):
        row, maximum_log2 = rows[r], state.maximum[r] * x.scalars.scale_log2
        total = fragment_softmax.quad_sum(state.total[r])
        factor, lse = softmax.finish_whole_row(maximum_log2, total, sinks[r])
        if const_expr(variant.is_general):
            if row.position >= span.own_len:
                factor, lse = Float32(0.0), -Float32.inf
                # The query may hold anything here, even NaN.
                for i in cutlass.range_constexpr(cute.size(out_rows, mode=[1])):
                    out_rows[r, i] = Float32(0.0)
        factors[r] = factor
        is_written = row.is_there & (row.position < span.own_slot)
        if (fragments.first_column(c.thread) == 0) & is_written:
            x.arrays.lse[span.own_start + row.position, row.head, batch] = lse
    fragment_softmax.scale_rows(c.out, factors)


@cute.jit
def store_part(x: Any, c: Any, work: Work, rows: list[tiles.RowAt], batch: Int32) -> None:
    """Writes the accumulator of ``rows`` as it is, in float32."""
    values = fragments.by_row(c.out)
    first = fragments.first_column(c.thread)
    for r in cutlass.range_constexpr(fragments.ROWS):
        row = rows[r]
        if row.is_there & (row.position < work.span.own_slot):
            gOut = x.arrays.out_rows[work.span.own_start + row.position, None, row.head, batch]
            for i in cutlass.range_constexpr(cute.size(values, mode=[1])):
                if fragments.column_of(i) // 8 * 8 < cute.size(gOut):
                    gOut[first + fragments.column_of(i)] = values[r, i]
