"""Tensor memory of one CTA: 128 lanes of 512 32-bit columns, and what is known about every cell."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jax_fa.emulator.faults import AsyncHazardError, TensorMemoryError, UninitializedReadError

ROWS, COLUMNS = 128, 512

Cells = tuple[slice | np.ndarray, slice | np.ndarray]


class User(NamedTuple):
    """An issued and unfinished operation that will "read" or "write" cells.

    Attributes:
      who: for messages.
      cells: where.
      access: what for.
      issued: what the matrix unit knows of it.
    """

    who: str
    cells: Cells
    access: str
    issued: Any


class TensorMemory:
    """Data, allocation and state.

    Attributes:
      data: uint32 (lane, column).
      written: whether anything was ever stored in a cell.
      writes, reads: how many issued and unfinished operations write or read a cell.
      unsettled: 1 + the warp whose tcgen05.st no wait::st has covered yet.
      writers: the operations counted in `writes` and `reads`, for messages.
    """

    def __init__(self) -> None:
        self.data = np.full((ROWS, COLUMNS), 0xFFFFFFFF, np.uint32)
        self.written = np.zeros((ROWS, COLUMNS), np.bool_)
        self.writes = np.zeros((ROWS, COLUMNS), np.uint16)
        self.reads = np.zeros((ROWS, COLUMNS), np.uint16)
        self.unsettled = np.zeros((ROWS, COLUMNS), np.uint8)
        self.owner = np.zeros(COLUMNS, np.bool_)
        self.blocks: dict[int, int] = {}
        self.users: dict[object, User] = {}
        self.may_allocate = True

    def allocate(self, columns: int) -> int | None:
        """First column of a fresh block; None when there is no room."""
        if not self.may_allocate:
            raise TensorMemoryError("tcgen05.alloc after relinquish_alloc_permit")
        if columns not in (32, 64, 128, 256, 512):
            raise TensorMemoryError(
                f"tcgen05.alloc of {columns} columns; needs a power of two from 32 to 512"
            )
        for start in range(0, COLUMNS, columns):
            if not self.owner[start : start + columns].any():
                self.owner[start : start + columns] = True
                self.written[:, start : start + columns] = False
                self.blocks[start] = columns
                return start
        return None

    def free(self, address: int, columns: int) -> None:
        """Returns a block."""
        if self.blocks.get(address) != columns:
            raise TensorMemoryError(
                f"tcgen05.dealloc of {columns} columns at {address:#x}; allocated are {self.blocks}"
            )
        busy = [
            user.who
            for user in self.users.values()
            if self._mark(user.cells)[:, address : address + columns].any()
        ]
        if busy:
            raise TensorMemoryError(f"tcgen05.dealloc of columns that {busy[0]} still uses")
        del self.blocks[address]
        self.owner[address : address + columns] = False

    def allocated(self) -> dict[int, int]:
        """First column and size of the blocks in use."""
        return dict(self.blocks)

    def cells(self, lane: int, column: int, lanes: int, columns: int) -> Cells:
        """A rectangle, which must be allocated."""
        if lane + lanes > ROWS or column + columns > COLUMNS:
            raise TensorMemoryError(
                f"TMEM lanes {lane}..{lane + lanes - 1}, columns {column}.."
                f"{column + columns - 1} do not exist"
            )
        if not self.owner[column : column + columns].all():
            raise TensorMemoryError(
                f"TMEM columns {column}..{column + columns - 1} are not "
                f"allocated (blocks: {self.blocks})"
            )
        return slice(lane, lane + lanes), slice(column, column + columns)

    def load(self, cells: Cells, who: str) -> np.ndarray:
        """Cells that are stable and were written."""
        self.check_stable(cells, f"{who} reads")
        self.check_written(cells, who)
        return self.data[cells]

    def store(self, cells: Cells, values: np.ndarray, warp: int, who: str) -> None:
        """tcgen05.st of a warp: unsettled until its wait::st."""
        if self.writes[cells].any() or self.reads[cells].any():
            self._hazard(cells, f"{who} overwrites")
        self.data[cells] = values
        self.written[cells] = True
        self.unsettled[cells] = warp + 1

    def settle(self, warp: int) -> None:
        """tcgen05.wait::st of a warp."""
        self.unsettled[self.unsettled == warp + 1] = 0

    def check_written(self, cells: Cells, who: str) -> None:
        """Refuses to read cells that nothing wrote."""
        if not self.written[cells].all():
            lane, column = (int(x[0]) for x in np.nonzero(self._mark(cells) & ~self.written))
            raise UninitializedReadError(
                f"{who} reads TMEM lane {lane} column {column}, which nothing wrote"
            )

    def check_stable(self, cells: Cells, what: str) -> None:
        """Refuses cells that an operation may still write or that a st has not settled."""
        if self.writes[cells].any():
            self._hazard(cells, what, only="write")
        self.check_settled(cells, what)

    def check_settled(self, cells: Cells, what: str) -> None:
        """Refuses cells that a tcgen05.st has not settled.

        Enough for the matrix unit, whose own operations run in order.
        """
        if self.unsettled[cells].any():
            owner = int(self.unsettled[cells].max()) - 1
            raise AsyncHazardError(
                f"{what} TMEM columns that warp {owner} stored without tcgen05.wait::st"
            )

    def begin(self, key: object, user: User) -> None:
        """An operation is issued."""
        (self.writes if user.access == "write" else self.reads)[user.cells] += 1
        self.users[key] = user

    def sharers(self, user: User) -> list[User]:
        """Other unfinished operations that meet a new one in a cell, unless both read."""
        wanted = self._mark(user.cells)
        return [
            other
            for other in self.users.values()
            if other.issued is not user.issued
            and "write" in (other.access, user.access)
            and (wanted & self._mark(other.cells)).any()
        ]

    def end(self, key: object) -> None:
        """The operation is complete."""
        _, cells, access, _ = self.users.pop(key)
        (self.writes if access == "write" else self.reads)[cells] -= 1
        if access == "write":
            self.written[cells] = True

    def _mark(self, cells: Cells) -> np.ndarray:
        marked = np.zeros((ROWS, COLUMNS), np.bool_)
        marked[cells] = True
        return marked

    def _hazard(self, cells: Cells, what: str, only: str | None = None) -> None:
        wanted = self._mark(cells)
        for who, theirs, access, _ in self.users.values():
            if only in (None, access) and (both := wanted & self._mark(theirs)).any():
                lane, column = (int(x[0]) for x in np.nonzero(both))
                raise AsyncHazardError(
                    f"{what} TMEM lane {lane} column {column} while {who} may "
                    f"still {access} it (its commit was not observed)"
                )
        raise AsyncHazardError(f"{what} TMEM cells in use")
