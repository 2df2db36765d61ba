"""Tiles of 16-bit elements in shared memory, as ldmatrix reads them without bank conflicts.

A tile is cut into panels of 64 columns (32 or 16 where 64 do not divide it), a row of which has 128
(64, 32) bytes. Panels lie one behind the other. The 16-byte pieces of a row change places with the
number of the row, so that eight rows of one column lie in different banks: the swizzle of TMA and
wgmma.
Standard library only; places are ints or traced values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ELEMENT_BYTES = 2
PIECE_BYTES = 16
"""What a lane copies, and what one lane addresses in ldmatrix: a row of an 8 x 8 matrix."""
PIECE = PIECE_BYTES // ELEMENT_BYTES
"""Elements of a piece."""
BANKS_BYTES = 128
"""A word of each bank."""
ALIGNMENT_BYTES = 1024
"""Of a tile: the swizzle repeats after so many bytes."""


@dataclass(frozen=True)
class Panels:
    """The layout of a tile.

    Attributes:
        rows: of the tile, a multiple of 16.
        columns: of the tile, a multiple of 16.
    """

    rows: int
    columns: int

    @property
    def panel(self) -> int:
        """Columns of a panel."""
        return next(width for width in (64, 32, 16) if self.columns % width == 0)

    @property
    def width(self) -> int:
        """Bytes of a row of a panel."""
        return self.panel * ELEMENT_BYTES

    @property
    def num_panels(self) -> int:
        """Panels of the tile."""
        return self.columns // self.panel

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel."""
        return self.rows * self.width

    @property
    def elements(self) -> int:
        """Elements of the tile."""
        return self.rows * self.columns

    @property
    def size_bytes(self) -> int:
        """Bytes of the tile."""
        return self.elements * ELEMENT_BYTES

    @property
    def pieces(self) -> int:
        """Pieces of a row of a panel."""
        return self.width // PIECE_BYTES

    def rows_of_pass(self, threads: int) -> int:
        """Rows of a panel that so many threads copy together, a piece each."""
        return min(threads // self.pieces, self.rows)

    def panels_of_pass(self, threads: int) -> int:
        """Panels of whose rows they copy pieces at the same time."""
        return threads // self.pieces // self.rows_of_pass(threads)

    def place(self, row: Any, piece: Any) -> Any:
        """Byte of a piece of the first panel."""
        # With 128 bytes, the row's last 3 bits; with 64, two rows of which fill the banks, 2 bits.
        rows_of_banks = BANKS_BYTES // self.width
        moved = row // rows_of_banks % self.pieces if rows_of_banks > 1 else row % self.pieces
        return row * self.width + (piece ^ moved) * PIECE_BYTES

    def beside(self, place: Any, column: Any) -> Any:
        """The place of the piece ``column`` columns, a multiple of 16, to the right of ``place``.

        That is at an even piece of its panel, or at the odd one behind it.
        """
        panel, within = column // self.panel, column % self.panel
        # An exclusive or with an even number of pieces goes before or after the swizzle's.
        return (place ^ (within * ELEMENT_BYTES)) + panel * self.panel_bytes
