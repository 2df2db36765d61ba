"""Results of the forward: out and lse of a warp's rows.

All rows are finished together, by code without branches, so that their latencies overlap: with few
key blocks they count (D = 64, 512 tokens: 15 % of a warp's time row by row; H200, sm_90 build).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from jax_fa.kernels import edges, fragment_softmax, fragments, primitives, softmax, tiles
from jax_fa.kernels.forward_work import Work, batch_of_part, sink_of
from jax_fa.kernels.fragment_rows import rows_of_thread, store_part
from jax_fa.kernels.mma_sync import products
from jax_fa.kernels.mma_sync.fwd_work import (
    ForwardContext,
    RowTile,
    first_row,
    row_step,
    tiles_of,
)
from jax_fa.kernels.mma_sync.loads import address_of_row
from jax_fa.kernels.mma_sync.panels import PIECE, PIECE_BYTES
from jax_fa.spec.config_mma_sync import WARP_ROWS


@cute.jit
def store(variant: cutlass.Constexpr, x: ForwardContext, rows: list[RowTile], work: Work) -> None:
    """Normalises the accumulators of a warp, and writes out and lse of its rows, or a part."""
    positions = [rows_of_thread(variant, x, one, work) for one in rows]
    finish_rows(variant, x, rows, work, positions)
    if const_expr(variant.is_split):
        batch = batch_of_part(variant, x, work)
        for i in cutlass.range_constexpr(len(rows)):
            store_part(x, rows[i], work, positions[i], batch)
    else:
        # HAZARD: out overwrites the warp's queries, which all its lanes have multiplied by now.
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(len(rows)):
            put_rounded(variant, x, rows[i], i)
        cute.arch.sync_warp()
        copy_rows(variant, x, work)


@cute.jit
def finish_rows(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    rows: list[RowTile],
    work: Work,
    positions: list[list[tiles.RowAt]],
) -> None:
    """Normalises the accumulators of ``rows``, which hold ``positions``, and writes their lse."""
    span, batch = work.span, batch_of_part(variant, x, work)
    sink, results = sink_of(variant, x, work, positions[0][0].head), []
    for i in cutlass.range_constexpr(len(rows)):
        state = rows[i].state
        for r in cutlass.range_constexpr(fragments.ROWS):
            if const_expr(variant.config.packs_heads):
                sink = sink_of(variant, x, work, positions[i][r].head)
            total = fragment_softmax.quad_sum(state.total[r])
            maximum_log2 = state.maximum[r] * x.scalars.scale_log2
            results.append(softmax.finish_whole_row(maximum_log2, total, sink))
    for i in cutlass.range_constexpr(len(rows)):
        factors, out_rows = [], fragments.by_row(rows[i].out)
        for r in cutlass.range_constexpr(fragments.ROWS):
            row = positions[i][r]
            # Not in one statement: the compiler (DSL 4.8.1) overlooks names in nested targets, and
            # the branch below would not change them.
            factor, lse = results[i * fragments.ROWS + r]
            if const_expr(variant.is_general):
                if row.position >= span.own_len:
                    factor, lse = Float32(0.0), -Float32.inf
                    # The query may hold anything here, even NaN.
                    for j in cutlass.range_constexpr(cute.size(out_rows, mode=[1])):
                        out_rows[r, j] = Float32(0.0)
            factors.append(factor)
            is_written = row.is_there & (row.position < span.own_slot)
            place = cute.crd2idx(
                (span.own_start + row.position, row.head, batch), x.arrays.lse.layout
            )
            target = cute.make_tensor(x.arrays.lse.iterator + place, cute.make_layout(1))
            if (fragments.first_column(rows[i].thread) == 0) & is_written:
                target[0] = lse
        fragment_softmax.scale_rows(rows[i].out, factors)


@cute.jit
def put_rounded(
    variant: cutlass.Constexpr, x: ForwardContext, rows: RowTile, number: cutlass.Constexpr[int]
) -> None:
    """Rounds the accumulator of a warp's ``number``-th tile, and writes it to shared memory."""
    tile, lane = tiles_of(variant).out, cute.arch.lane_idx()
    rounded = cute.make_rmem_tensor_like(rows.out, variant.dtype)
    primitives.narrow(rows.out, rounded)
    pairs = fragments.pairs_by_row(rounded)
    first = first_row(products.thread_index()) + number * row_step(variant)
    for r in cutlass.range_constexpr(fragments.ROWS):
        row = first + lane // 4 + 8 * r
        for i in cutlass.range_constexpr(cute.size(pairs, mode=[1])):
            panel, piece = divmod(i, tile.pieces)
            place = x.smem.q + tile.place(row, piece) + panel * tile.panel_bytes
            products.store_word(place + lane % 4 * 4, pairs[r, i])


@cute.jit
def copy_rows(variant: cutlass.Constexpr, x: ForwardContext, work: Work) -> None:
    """Copies a warp's rows of out from shared memory, in whole lines of global memory."""
    tile, lane, span = tiles_of(variant).out, cute.arch.lane_idx(), work.span
    step = tile.rows_of_pass(edges.WARP)
    own, piece = first_row(products.thread_index()) + lane // tile.pieces, lane % tile.pieces
    offsets = [
        i * row_step(variant) + j
        for i in range(variant.config.row_tiles)
        for j in range(0, WARP_ROWS, step)
    ]
    out = x.arrays.out_rows[None, None, work.tile.head, work.tile.batch]
    columns = cute.size(out, mode=[1]) - piece * PIECE
    first = address_of_row(out, span.own_start + span.first_row + own) + piece * PIECE_BYTES
    row_bytes = address_of_row(out, Int32(step)) - address_of_row(out, Int32(0))
    for i in cutlass.range_constexpr(len(offsets)):
        row = own + offsets[i]
        place = x.smem.q + tile.place(row, piece)
        target = first + row_bytes * (offsets[i] // step)
        is_there = span.first_row + row < span.own_slot
        for panel in cutlass.range_constexpr(tile.num_panels):
            four = products.load_piece(place + panel * tile.panel_bytes)
            if is_there & (panel * tile.panel < columns):
                products.store_piece(target + panel * tile.width, four)
