"""Bundles that the steps of the forward share, and the loads of its tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from jax_fa.kernels import edges, fragment_softmax, tiles
from jax_fa.kernels.forward_work import Arrays, Scalars, Variant, Work, row_of_tile
from jax_fa.kernels.mma_sync import products
from jax_fa.kernels.mma_sync.panels import PIECE, PIECE_BYTES, Panels


class ForwardTiles(NamedTuple):
    """Layouts of the tiles in shared memory."""

    q: Panels
    k: Panels
    v: Panels
    out: Panels


class ForwardSmem(NamedTuple):
    """Shared memory: addresses of tiles, and a tensor."""

    q: Int32
    k: Int32  # of the first of ``stages``
    v: Int32  # of the first of ``stages``
    found: cute.Tensor  # (FOUND_WORDS,) segments.py, dense_mask.py


class ForwardContext(NamedTuple):
    """The kernel's arguments and shared memory."""

    arrays: Arrays
    scalars: Scalars
    order: tiles.Order
    smem: ForwardSmem
    packing: Any  # division.Packing, or None if the variant does not pack heads


def tiles_of(variant: Variant) -> ForwardTiles:
    """The tiles of a variant."""
    key, config = variant.key, variant.config
    return ForwardTiles(
        q=Panels(config.block_q, key.head_dim),
        k=Panels(config.block_kv, key.head_dim),
        v=Panels(config.block_kv, key.value_dim),
        out=Panels(config.block_q, key.value_dim),
    )


class RowTile(NamedTuple):
    """16 query rows of a warp: accumulator and statistics.

    Of every 64 rows of the CTA's tile, four warps have 16 each, as the warps of a warpgroup have.
    """

    scores: cute.Tensor  # accumulator of 16 x block_kv
    out: cute.Tensor  # accumulator of 16 x Dv
    state: fragment_softmax.RowState
    index: Int32  # which 64 rows
    thread: Int32  # in the four warps


def make_row_tiles(variant: Variant) -> list[RowTile]:
    """The tiles of the calling warp, yet to be reset."""
    config = variant.config
    thread = cute.arch.thread_idx()[0]
    groups = config.warps // edges.WARPS_PER_GROUP
    group = cute.arch.make_warp_uniform(thread // edges.WARPGROUP)
    return [
        RowTile(
            scores=products.accumulator(config.block_kv),
            out=products.accumulator(variant.key.value_dim),
            state=fragment_softmax.make_row_state(),
            index=group + i * groups,
            thread=thread % edges.WARPGROUP,
        )
        for i in range(config.row_tiles)
    ]


def first_row(rows: RowTile) -> Int32:
    """The first of a warp's 16 rows in the CTA's tile."""
    warp = cute.arch.make_warp_uniform(rows.thread // edges.WARP)
    return rows.index * (products.DEPTH * edges.WARPS_PER_GROUP) + warp * products.DEPTH


class Piece(NamedTuple):
    """A thread's place in a pass over the rows of a tile: its row, and the piece of a panel."""

    row: Int32
    piece: Int32


def piece_of_thread(tile: Panels) -> Piece:
    """That of the calling thread in the first pass."""
    thread = cute.arch.thread_idx()[0]
    return Piece(thread // tile.pieces, thread % tile.pieces)


@cute.jit
def copy_row(
    tile: cutlass.Constexpr, target: Int32, row: cute.Tensor, piece: Int32, is_there: Boolean
) -> None:
    """Starts the copies of a thread's pieces of a row, zeros if it is not there.

    Args:
        tile: where it goes.
        target: place of the piece of the first panel.
        row: an existing row in global memory.
        piece: of every panel.
        is_there: whether to read it.
    """
    size_bytes = Int32(PIECE_BYTES) if is_there else Int32(0)
    source = row.iterator.toint() + piece * PIECE_BYTES
    for panel in cutlass.range_constexpr(tile.num_panels):
        products.copy_piece(target + panel * tile.panel_bytes, source, size_bytes)
        source = source + tile.width


@cute.jit
def load_q(variant: cutlass.Constexpr, x: ForwardContext, work: Work) -> None:
    """Starts the load of the query tile. All threads."""
    tile, span = tiles_of(variant).q, work.span
    mine = piece_of_thread(tile)
    step = tile.rows_of_pass(variant.plan.threads)
    for i in cutlass.range_constexpr(tile.rows // step):
        row = mine.row + i * step
        at = row_of_tile(variant, x, work, row)
        is_there = at.is_there & (at.position < span.own_slot)
        # A row that exists, where this one does not.
        position = span.own_start + (at.position if is_there else Int32(0))
        position = cutlass.min(position, x.scalars.sequences.rows.own - 1)
        source = x.arrays.q[position, None, at.head, work.tile.batch]
        copy_row(tile, x.smem.q + tile.place(row, mine.piece), source, mine.piece, is_there)


@cute.jit
def load_rows(
    variant: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    target: Int32,
    array: cute.Tensor,
    work: Work,
    block: Int32,
) -> None:
    """Starts the load of a block of keys or values, zeros behind the sequence's last. All threads.

    Probabilities of absent rows are 0, but 0 * NaN is not: hence the zeros.

    Args:
        variant: the variant.
        tile: where it goes.
        target: address of that.
        array: (S, width, K, B).
        work: whose keys they are.
        block: which of them.
    """
    mine, span = piece_of_thread(tile), work.span
    step = tile.rows_of_pass(variant.plan.threads)
    rows = array[None, None, work.tile.kv_head, work.tile.batch]
    first = block * tile.rows + mine.row
    place = target + tile.place(mine.row, mine.piece)
    for i in cutlass.range_constexpr(tile.rows // step):
        row = first + i * step
        # HAZARD: where segments leave a tile without keys, its block may be of any number.
        is_there = (row >= 0) & (row < span.swept_len)
        source = rows[span.swept_start + (row if is_there else Int32(0)), None]
        copy_row(tile, place + i * step * tile.width, source, mine.piece, is_there)
