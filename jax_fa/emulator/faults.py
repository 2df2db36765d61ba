"""Everything the emulator can complain about, one exception class per kind of fault."""

from __future__ import annotations

from typing import Any, NamedTuple


class Place(NamedTuple):
    """A place in a run."""

    kernel: str
    cta: int
    warp: int
    line: int

    def __str__(self) -> str:
        return f"kernel {self.kernel[:60]}, CTA {self.cta}, warp {self.warp}, PTX line {self.line}"


class EmulationError(Exception):
    """A fault of the emulated program, or a program that cannot be emulated.

    Attributes:
      message: what went wrong, without the place.
      place: kernel, CTA, warp and PTX line, or None while the fault travels to the run loop.
    """

    def __init__(self, message: str, place: Place | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.place = place

    def __str__(self) -> str:
        where = "" if self.place is None else f" [{self.place}]"
        return f"{self.message}{where}"


class PtxSyntaxError(EmulationError):
    """The text is not PTX as this parser understands it."""


class UnknownInstructionError(EmulationError):
    """An instruction, modifier or operand form that the emulator does not implement."""


class LaunchError(EmulationError):
    """The launch record and the PTX do not fit together."""


class DeadlockError(EmulationError):
    """No warp can run and no asynchronous operation is left to complete."""


class RunawayError(EmulationError):
    """The instruction budget is used up."""


class OutOfBoundsError(EmulationError):
    """A global, shared, local or parameter address that belongs to nothing, or is misaligned."""


class UninitializedReadError(EmulationError):
    """Shared or tensor memory that nothing wrote is read."""


class AsyncHazardError(EmulationError):
    """Data that an asynchronous unit may still read or write is touched too early."""


class ProductOrderError(AsyncHazardError):
    """A product or copy meets TMEM columns of an unfinished one that it may overtake.

    Attributes:
      first: the `tcgen05.Issued` that was issued before.
      second: the one that may overtake it.
    """

    def __init__(self, message: str, first: Any, second: Any) -> None:
        super().__init__(message)
        self.first = first
        self.second = second


class ProxyFenceError(EmulationError):
    """The asynchronous proxy reads a generic write that no fence.proxy.async published."""


class BarrierError(EmulationError):
    """An mbarrier, named barrier or cluster barrier is used inconsistently."""


class TensorMemoryError(EmulationError):
    """TMEM is used unallocated, leaked, freed twice or reached from the wrong warp."""


class DivergenceError(EmulationError):
    """An instruction that needs the whole warp is executed by a part of it."""


class TrapError(EmulationError):
    """The program executed trap."""
