"""Query rows of a forward whose scores are fragments (``fragments.py``): masks and results.

An argument ``c`` is anything with the accumulator ``out``, the statistics ``state``, ``index``,
which tells the 64 rows of the CTA's tile, and ``thread``, the calling thread among those that own
these rows.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from jax_fa.kernels import (
    dense_mask,
    fragment_softmax,
    fragments,
    primitives,
    segments,
    softmax,
    tiles,
)
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
    variant: cutlass.Constexpr, x: Any, c: Any, work: Work, scores: cute.Tensor, block: Int32
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
    variant: cutlass.Constexpr, x: Any, c: Any, work: Work, scores: cute.Tensor, block: Int32
) -> None:
    """Masks the keys of a block that the band or the segments hide."""
    rows = [at.position for at in rows_of_thread(variant, x, c, work)]
    first_key = block * variant.config.block_kv + fragments.first_column(c.thread)
    has_segments = False
    if const_expr(variant.is_general):
        has_segments = tiles.is_present(x.scalars.q_segments)
    # Two paths: without segments, code to skip cost a window of 1024 keys 1 to 3 %.
    if has_segments:
        _mask_by_segments(variant, x, work, scores, rows, first_key)
    else:
        for r in cutlass.range_constexpr(fragments.ROWS):
            keys = key_range(work.window, rows[r], tiles.EXTREMES)
            start, end = keys.lo - first_key, keys.hi - first_key
            fragment_softmax.mask_row(scores, r, start, end, variant.is_general)


@cute.jit
def _mask_by_segments(
    variant: cutlass.Constexpr,
    x: Any,
    work: Work,
    scores: cute.Tensor,
    rows: list[Int32],
    first_key: Int32,
) -> None:
    """Masks what the band or the segments hide; ``first_key`` is that of the first column."""
    scalars, found = x.scalars, x.smem.found
    for r in cutlass.range_constexpr(fragments.ROWS):
        seen = tiles.Stretch(*key_range(work.window, rows[r], tiles.EXTREMES))
        seen = segments.within_run(found, segment_of(x, work, rows[r]), seen)
        # Opaque: what ptxas derives from them took 50 registers (mma.sync, D = 256, a bias).
        start, end = (primitives.opaque(at - first_key) for at in seen)
        fragment_softmax.mask_row(scores, r, start, end, True)
    if not segments.are_runs(found):
        key = work.tile.batch * scalars.sequences.rows.swept + work.span.swept_start
        keys = scalars.kv_segments + (key + first_key)
        last = cutlass.max(work.span.swept_len - 1 - first_key, -first_key)
        ids = [segment_of(x, work, row) for row in rows]
        fragment_softmax.mask_segments(scores, ids, keys, last)


def segment_of(x: Any, work: Work, row: Int32) -> Int32:
    """The segment of a row of the tile, or of the last one."""
    first = work.tile.batch * x.scalars.sequences.rows.own + work.span.own_start
    # 0 in a tile beyond all sequences: it has no rows.
    present = cutlass.max(cutlass.min(row, work.span.own_slot - 1), 0)
    return tiles.element(x.scalars.q_segments, first + present)


@cute.jit
def finish_rows(
    variant: cutlass.Constexpr, x: Any, parts: list, work: Work, positions: list[list[tiles.RowAt]]
) -> None:
    """Normalises the accumulators of ``parts``, each a ``c``, and writes lse at their positions.

    By code without branches, so that the latencies of all rows overlap: with few key blocks they
    count (mma.sync, D = 64, 512 tokens: 15 % of a warp's time row by row; H200, sm_90 build).
    """
    span, batch = work.span, batch_of_part(variant, x, work)
    sink, results = sink_of(variant, x, work, positions[0][0].head), []
    for i in cutlass.range_constexpr(len(parts)):
        state = parts[i].state
        for r in cutlass.range_constexpr(fragments.ROWS):
            if const_expr(variant.config.packs_heads):
                sink = sink_of(variant, x, work, positions[i][r].head)
            total = fragment_softmax.quad_sum(state.total[r])
            maximum_log2 = state.maximum[r] * x.scalars.scale_log2
            results.append(softmax.finish_whole_row(maximum_log2, total, sink))
    for i in cutlass.range_constexpr(len(parts)):
        c = parts[i]
        factors, out_rows = [], fragments.by_row(c.out)
        for r in cutlass.range_constexpr(fragments.ROWS):
            row = positions[i][r]
            factor, lse = results[i * fragments.ROWS + r]
            if const_expr(variant.is_general):
                if row.position >= span.own_len:
                    factor, lse = Float32(0.0), -Float32.inf
                    # The query may hold anything here, even NaN.
                    for j in cutlass.range_constexpr(cute.size(out_rows, mode=[1])):
                        out_rows[r, j] = Float32(0.0)
            factors.append(factor)
            is_written = row.is_there & (row.position < span.own_slot)
            place = span.own_start + row.position, row.head, batch
            place = cute.crd2idx(place, x.arrays.lse.layout)
            target = cute.make_tensor(x.arrays.lse.iterator + place, cute.make_layout(1))
            if (fragments.first_column(c.thread) == 0) & is_written:
                target[0] = lse
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
