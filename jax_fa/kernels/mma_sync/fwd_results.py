"""Results of the forward: out and lse of a warp's rows."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from jax_fa.kernels import edges, fragments, primitives
from jax_fa.kernels.forward_work import Work, batch_of_part
from jax_fa.kernels.fragment_rows import finish_rows, rows_of_thread, store_part
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
