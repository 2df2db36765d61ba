"""Groups of asynchronous copies, which a lane commits and waits for: bulk and cp.async."""

from __future__ import annotations

from collections import deque
from copy import copy

import numpy as np

from jax_fa.emulator.cta import Warp
from jax_fa.emulator.machine import Operation
from jax_fa.emulator.sync import bits_of
from jax_fa.emulator.values import LANES


class Groups:
    """Groups of lanes that did the same: operations not yet committed, and the groups.

    Attributes:
      lanes: a bit for each of these lanes.
    """

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.open: list[Operation] = []
        self.committed: deque[list[Operation]] = deque()

    def commit(self) -> None:
        """Closes the open group."""
        self.committed.append(self.open)
        self.open = []

    def cover(self, newest: int, phases: int | None) -> list[Operation]:
        """Waits for all but the `newest` groups: those of their operations not far enough yet.

        `phases` is how many phases must have run, None for all.
        """
        count = max(len(self.committed) - newest, 0)
        covered = [o for group in list(self.committed)[:count] for o in group]
        for operation in covered:
            operation.waited = True
        while len(self.committed) > newest and all(o.finished for o in self.committed[0]):
            self.committed.popleft()
        return [o for o in covered if not o.finished and (phases is None or o.done < phases)]

    def operations(self) -> list[Operation]:
        """Those of all groups that are kept, in the order of their issue."""
        return [o for group in (*self.committed, self.open) for o in group]

    def split(self, lanes: int) -> Groups:
        """Gives some of its lanes away, which did the same so far."""
        other = copy(self)
        other.lanes, other.open, other.committed = lanes, self.open.copy(), self.committed.copy()
        self.lanes &= ~lanes
        return other


class WarpGroups:
    """The groups of a warp: of all lanes together for as long as they do the same."""

    def __init__(self) -> None:
        self.parts = [Groups((1 << LANES) - 1)]

    def of(self, mask: np.ndarray) -> list[Groups]:
        """The groups of these lanes, and of no others."""
        lanes = bits_of(mask)
        for part in self.parts.copy():
            if 0 != part.lanes & lanes != part.lanes:
                self.parts.append(part.split(part.lanes & lanes))
        return [part for part in self.parts if part.lanes & lanes]

    def add(self, operation: Operation, mask: np.ndarray) -> None:
        """Puts an operation into the open group of these lanes."""
        for part in self.of(mask):
            part.open.append(operation)

    def at(self, lane: int) -> Groups:
        """The groups of a lane, for reading: others may share them."""
        return next(part for part in self.parts if part.lanes >> lane & 1)

    def forgotten(self) -> list[Operation]:
        """Operations that nothing waited for."""
        return [o for part in self.parts for o in part.operations() if not o.waited]


def groups_of(warp: Warp, unit: str) -> WarpGroups:
    """The groups of "bulk" or "cp.async"."""
    if unit not in warp.state:
        warp.state[unit] = WarpGroups()
    return warp.state[unit]
