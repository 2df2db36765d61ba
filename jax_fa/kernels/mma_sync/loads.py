"""Copies of rows from global to shared memory by cp.async, 16 bytes per thread at a time."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from jax_fa.kernels.mma_sync import products
from jax_fa.kernels.mma_sync.panels import ELEMENT_BYTES, PIECE_BYTES, Panels


class Piece(NamedTuple):
    """A thread's place in a pass over the rows of a tile: its row, and its piece of a panel.

    The panel is the first of ``num_panels // panels`` that the thread copies from.
    """

    row: Int32
    piece: Int32
    panel: Int32 | int
    panels: int

    def place(self, tile: Panels, row: Int32) -> Int32:
        """The byte of a tile to which the thread's first piece of a row goes."""
        return tile.place(row, self.piece) + self.panel * tile.panel_bytes

    def column_bytes(self, tile: Panels) -> Int32:
        """The byte of a row at which the thread's first piece begins."""
        return self.piece * PIECE_BYTES + self.panel * tile.width


class Limits(NamedTuple):
    """Rows and columns that an array has; zeros take the place of what is beyond them."""

    rows: Int32
    columns: Int32


def piece_of_thread(tile: Panels, threads: int) -> Piece:
    """The piece of the calling thread, one of ``threads``, in the first pass."""
    thread, panels = products.thread_index(), tile.panels_of_pass(threads)
    row, piece = thread // tile.pieces, thread % tile.pieces
    if panels == 1:
        return Piece(row, piece, 0, 1)
    return Piece(row % tile.rows, piece, row // tile.rows, panels)


@cute.jit
def copy_row(
    tile: cutlass.Constexpr,
    mine: Piece,
    target: Int32,
    source: Int64,
    row: Int32,
    limits: Limits,
) -> None:
    """Starts the copies of a thread's pieces of a row, with zeros beyond the array's limits.

    Args:
        tile: the layout in shared memory.
        mine: the thread's place in a pass.
        target: the address there of its first piece.
        source: the global address of that piece; meaningless if nothing is read.
        row: the number of the row among those that ``limits`` counts; may be any number.
        limits: the limits of the array.
    """
    columns = limits.columns - mine.column_bytes(tile) // ELEMENT_BYTES
    for panel in cutlass.range_constexpr(0, tile.num_panels, mine.panels):
        # The same for every row, so a row costs one comparison: unsigned, it excludes rows < 0.
        num_rows = cutlass.max(limits.rows, 0) if panel * tile.panel < columns else Int32(0)
        is_read = row.to(Uint32) < num_rows.to(Uint32)
        size_bytes = Int32(PIECE_BYTES) if is_read else Int32(0)
        piece = source + panel * tile.width
        products.copy_piece(target + panel * tile.panel_bytes, piece, size_bytes)


def address_of_row(array: cute.Tensor, row: Int32) -> Int64:
    """The address of a row of a (rows, width) array; meaningless if there is no such row."""
    # One instruction; a row has fewer than 2 ** 32 bytes.
    row_bytes = (array.stride[0] * ELEMENT_BYTES).to(Uint32)
    return array.iterator.toint() + row.to(Uint32).to(Int64) * row_bytes.to(Int64)
