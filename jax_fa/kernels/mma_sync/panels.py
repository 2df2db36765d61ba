"""Tiles of 16-bit elements in shared memory, as ldmatrix reads them without bank conflicts.

A tile is cut into panels of 64 columns (32 or 16 if 64 does not divide its width); a row of a panel
has 128 (64, 32) bytes. Panels lie one after the other. The 16-byte pieces of a row are permuted by
the row's number, so that eight rows of one column lie in different banks. This is the swizzle of
TMA and wgmma.
Standard library only; places are ints or traced values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ELEMENT_BYTES = 2
PIECE_BYTES = 16
"""Bytes that a lane copies, or addresses in ldmatrix: a row of an 8 x 8 matrix."""
PIECE = PIECE_BYTES // ELEMENT_BYTES
"""Elements in a piece."""
BANKS_BYTES = 128
"""Bytes of all banks together, a word each."""
ALIGNMENT_BYTES = 1024
"""Alignment of a tile: the swizzle repeats after this many bytes."""


@dataclass(frozen=True)
class Panels:
    """The layout of a tile.

    Attributes:
        rows: rows of the tile, a multiple of 16.
        columns: columns of the tile, a multiple of 16.
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
        """Rows of a panel that ``threads`` threads copy together, one piece each."""
        return min(threads // self.pieces, self.rows)

    def panels_of_pass(self, threads: int) -> int:
        """Panels of which ``threads`` threads copy pieces at the same time."""
        return threads // self.pieces // self.rows_of_pass(threads)

    def place(self, row: Any, piece: Any) -> Any:
        """The byte offset of a piece of the first panel."""
        # Rows of 128 bytes: the row's last 3 bits. Of 64 bytes, two rows fill the banks: 2 bits.
        rows_of_banks = BANKS_BYTES // self.width
        moved = row // rows_of_banks % self.pieces if rows_of_banks > 1 else row % self.pieces
        return row * self.width + (piece ^ moved) * PIECE_BYTES

    def beside(self, place: Any, column: Any) -> Any:
        """The place of the piece ``column`` columns, a multiple of 16, to the right of ``place``.

        That is at an even piece of its panel, or at the odd one behind it.
        """
        panel, within = column // self.panel, column % self.panel
        # An exclusive or with an even number of pieces commutes with that of the swizzle.
        return (place ^ (within * ELEMENT_BYTES)) + panel * self.panel_bytes
