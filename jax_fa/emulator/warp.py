"""Warps: registers of 32 lanes, and the fragments into which a diverged warp splits.

A divergent branch splits a fragment in two and records a `Join` at the branch's immediate
post-dominator. A fragment that reaches its innermost join waits there until all lanes of the join
have arrived or exited; then they go on as one. Fragments of a warp are scheduled independently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from jax_fa.emulator.faults import AsyncHazardError, DivergenceError, Place
from jax_fa.emulator.ptx import Instruction
from jax_fa.emulator.values import FULL, LANES

if TYPE_CHECKING:
    from jax_fa.emulator.cta import Cta
    from jax_fa.emulator.decode import Program, RegisterUse
    from jax_fa.emulator.sync import Mbarrier

Special = Callable[["Warp", str], np.ndarray]


class Wait:
    """Why a fragment does not run.

    Attributes:
      ready: whether it may go on.
      reason: says what is waited for, for the deadlock table.
      resume: called when it goes on, with True, or with False when `polls` and time ran out.
      polls: the instruction may give up and report failure (mbarrier.try_wait).
      needs: mbarriers and asynchronous operations that could end the wait.
    """

    __slots__ = ("ready", "reason", "resume", "polls", "needs")

    def __init__(
        self,
        ready: Callable[[], bool],
        reason: Callable[[], str],
        resume: Callable[[bool], None] | None = None,
        *,
        polls: bool = False,
        needs: Iterable[object] = (),
    ) -> None:
        self.ready = ready
        self.reason = reason
        self.resume = resume
        self.polls = polls
        self.needs = frozenset(needs)


class Join:
    """A meeting point of diverged lanes."""

    __slots__ = ("segment", "mask", "arrived", "outer")

    def __init__(self, segment: int, mask: np.ndarray) -> None:
        self.segment = segment
        self.mask = mask
        self.arrived = np.zeros(LANES, dtype=np.bool_)
        self.outer: tuple[Join, ...] = ()


class Fragment:
    """Lanes of one warp that run together."""

    __slots__ = ("warp", "segment", "mask", "joins", "wait")

    def __init__(self, warp: Warp, segment: int, mask: np.ndarray, joins: tuple[Join, ...]) -> None:
        self.warp = warp
        self.segment = segment
        self.mask = FULL if mask.all() else mask
        self.joins = joins
        self.wait: Wait | None = None


class InFlight:
    """Registers that an asynchronous instruction still reads or writes.

    Attributes:
      written, read: bit sets of register numbers.
      what: the instruction and its line, for messages.
      until: the instruction that gives the registers back, for messages.
    """

    __slots__ = ("written", "read", "what", "until")

    def __init__(self, written: int, read: int, what: str, until: str) -> None:
        self.written = written
        self.read = read
        self.what = what
        self.until = until

    def check(self, instruction: Instruction, use: RegisterUse) -> None:
        """Refuses an instruction that touches registers in use."""
        touched = use.touched
        if use.is_multiply:
            # Multiplies of one warp run in order, so the next may add to the same accumulators.
            touched &= ~use.written
        if touched & self.written or use.written & self.read:
            raise AsyncHazardError(
                f"{instruction} touches registers of {self.what} before {self.until}"
            )


class Warp:
    """Thirty-two lanes of a CTA."""

    def __init__(self, cta: Cta, index: int, program: Program) -> None:
        self.cta = cta
        self.index = index
        self.machine = cta.cluster.machine
        threads = cta.cluster.machine.threads
        self.live = np.arange(LANES) + index * LANES < threads
        self.mask = FULL
        self.slots: list = program.unwritten.copy()
        self.slots += [self._initial(s) if isinstance(s, str) else s for s in program.slots]
        self.fragments = [Fragment(self, 0, self.live.copy(), ())]
        self.visits: dict[int, int] = {}
        self.in_flight: list[InFlight] = []
        self.busy = 0
        # mbarriers this warp initialised and no fence has published yet.
        self.initialised: list[Mbarrier] = []
        # Registers computed since the last wgmma.fence; kept for kernels with wgmma only.
        self.unfenced = 0
        self.local = (
            np.full((LANES, max(program.local_bytes, 1)), 0xFF, dtype=np.uint8)
            if program.local_bytes
            else None
        )
        self.line = 0
        self.registers: int | None = None
        # State of the units that keep something per warp or per lane; each unit owns its entry.
        self.state: dict[str, object] = {}

    def _initial(self, name: str) -> np.ndarray:
        """Value of a special register or of a shared variable's address."""
        if name.startswith("shared "):
            offset = self.cta.cluster.machine.program.shared[name[len("shared ") :]]
            return np.full(LANES, self.cta.shared.base + offset, dtype=np.uint32)
        return self.cta.special(self, name)

    def snapshot(self) -> tuple:
        """Where its lanes are and what they hold: equal ones are followed by the same."""
        places = {(f.segment, f.mask.tobytes(), f.wait is None) for f in self.fragments}
        held = [s.tobytes() if isinstance(s, np.ndarray) else s for s in self.slots]
        return places, held, None if self.local is None else self.local.tobytes()

    def hold(self, operation: InFlight) -> None:
        """Registers go to an asynchronous instruction."""
        self.in_flight.append(operation)
        self.busy |= operation.written | operation.read

    def release(self, operations: list[InFlight]) -> None:
        """Registers come back."""
        self.in_flight = [o for o in self.in_flight if o not in operations]
        self.busy = 0
        for operation in self.in_flight:
            self.busy |= operation.written | operation.read

    def check_registers(self, instruction: Instruction, use: RegisterUse) -> None:
        """Refuses an instruction that touches registers in use."""
        if use.touched & self.busy:
            for operation in self.in_flight:
                operation.check(instruction, use)

    def need_full(self, mask: np.ndarray, what: str) -> None:
        """Refuses an instruction that all live lanes must execute together."""
        if mask is not FULL and not np.array_equal(mask, self.live):
            raise DivergenceError(
                f"{what} is executed by {int(mask.sum())} of {int(self.live.sum())} live lanes; "
                "all must execute it together"
            )

    @property
    def place(self) -> Place:
        """Where the warp is."""
        return Place(self.machine.program.kernel.name, self.cta.number, self.index, self.line)

    def __str__(self) -> str:
        return f"CTA {self.cta.number} warp {self.index}"
