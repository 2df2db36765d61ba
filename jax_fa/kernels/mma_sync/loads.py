"""Copies of rows from global to shared memory by cp.async, 16 bytes a thread at a time."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from jax_fa.kernels.mma_sync import products
from jax_fa.kernels.mma_sync.panels import ELEMENT_BYTES, PIECE_BYTES, Panels


class Piece(NamedTuple):
    """A thread's place in a pass over the rows of a tile: its row, and the piece of a panel."""

    row: Int32
    piece: Int32


def piece_of_thread(tile: Panels) -> Piece:
    """That of the calling thread in the first pass."""
    thread = products.thread_index()
    return Piece(thread // tile.pieces, thread % tile.pieces)


@cute.jit
def copy_row(tile: cutlass.Constexpr, target: Int32, source: Int64, is_there: Boolean) -> None:
    """Starts the copies of a thread's pieces of a row, zeros if it is not there.

    Args:
        tile: where it goes.
        target: place of the piece of the first panel.
        source: address of the same piece; of no meaning where nothing is read.
        is_there: whether to read it.
    """
    size_bytes = Int32(PIECE_BYTES) if is_there else Int32(0)
    for panel in cutlass.range_constexpr(tile.num_panels):
        piece = source + panel * tile.width
        products.copy_piece(target + panel * tile.panel_bytes, piece, size_bytes)


def address_of_row(array: cute.Tensor, row: Int32) -> Int64:
    """The address of a row of (rows, width), of no meaning if there is no such row."""
    # One instruction; a row has fewer than 2 ** 32 bytes.
    row_bytes = (array.stride[0] * ELEMENT_BYTES).to(Uint32)
    return array.iterator.toint() + row.to(Uint32).to(Int64) * row_bytes.to(Int64)
