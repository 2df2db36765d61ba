"""The machine that instructions see: memory, asynchronous operations, counters."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jax_fa.emulator.barriers import Mbarrier
from jax_fa.emulator.faults import EmulationError, LaunchError, Place
from jax_fa.emulator.launch import Launch
from jax_fa.emulator.memory import Memory
from jax_fa.emulator.ptx import Kernel
from jax_fa.emulator.random_source import RandomSource
from jax_fa.emulator.values import DTYPES, LANES, SIZES, Value

COMPLETIONS = ("lazy", "eager", "random")


class Frame(NamedTuple):
    """The variables of a decoded kernel, and what its warps hold at their start.

    Attributes:
      kernel: what was decoded.
      unwritten: what every register holds before it is written.
      slots: initial value of the slots after the registers: an array, or a name that the warp
        resolves at its start (special registers, shared variables, what lies in parameters).
      shared: offset of every shared variable, and the end of the static ones under "".
      params: offset of every parameter in the parameter block.
      local_bytes: local memory of one thread.
    """

    kernel: Kernel
    unwritten: list[Value]
    slots: list[np.ndarray | str]
    shared: dict[str, int]
    params: dict[str, int]
    local_bytes: int


@dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
      completion: when asynchronous operations complete: "eager" at their issue, "lazy" only
        when nothing else can run and a warp waits for it, "random" at any time.
      strict: raise at the first fault found at the exit of a CTA (leaks, unbalanced barriers);
        False collects those in the report.
      strict_ld: tcgen05.ld results may not be used before tcgen05.wait::ld. Off by default,
        since compilers leave that wait to ptxas.
      ordered_products: the matrix unit works off all that a CTA issued in its order. False leaves
        it only the order that PTX promises: what may overtake and shares TMEM columns is a fault.
      starved: index of a warp, in every CTA, that runs only when no other can, or when the others
        only spin, and lets others run at every synchronisation instruction; finds what is right
        only while warps keep pace.
      held: a line of the PTX: the asynchronous operations that it issues complete only when nothing
        else can run or complete, and those behind them in the same unit wait; finds what is right
        only because one unit outruns another.
      resident: clusters that the machine holds at a time. Another is admitted, in the order of
        their numbers, when one of them has exited, and not before, as where a GPU is full: a
        kernel whose clusters wait for later ones than that is a deadlock.
      max_segments: budget of straight runs of instructions, against endless loops.
    """

    completion: str = "random"
    strict: bool = True
    strict_ld: bool = False
    ordered_products: bool = True
    starved: int | None = None
    held: int | None = None
    resident: int = 1
    max_segments: int = 50_000_000

    def __post_init__(self) -> None:
        if self.completion not in COMPLETIONS:
            raise ValueError(f"completion {self.completion!r} is not one of {COMPLETIONS}")
        if self.resident < 1:
            raise ValueError(f"resident is {self.resident}; a machine holds at least one cluster")


class Operation:
    """Something an asynchronous unit does: phases that run one after the other, later.

    Attributes:
      what: for messages, with the line that issued it.
      phases: functions; a store has two (its source is read, its destination is written).
      done: phases that have run.
      waited: whether a wait_group covered it.
      signals: mbarriers that hear of its completion.
    """

    __slots__ = ("what", "phases", "done", "place", "waited", "signals")

    def __init__(
        self,
        what: str,
        phases: tuple[Callable[[], None], ...],
        place: Place,
        signals: Iterable[Mbarrier] = (),
    ) -> None:
        self.what = what
        self.phases = phases
        self.done = 0
        self.place = place
        self.waited = False
        self.signals = tuple(signals)

    @property
    def finished(self) -> bool:
        """True if all phases have run."""
        return self.done == len(self.phases)


class Machine:
    """The state of one launch of one kernel, and the services that instructions use."""

    def __init__(
        self, frame: Frame, launch: Launch, memory: Memory, seed: int, options: Options
    ) -> None:
        self.frame = frame
        self.launch = launch
        self.memory = memory
        self.options = options
        self.random = RandomSource(seed)
        self.threads = int(np.prod(launch.block))
        self.shared_size = frame.shared[""] + launch.shared_bytes
        self.params = self._parameter_block()
        self.pipes: dict[Hashable, deque[Operation]] = {}
        self.progress = 0
        self.counters: Counter[str] = Counter()
        self.issued: Counter[int] = Counter()
        self.waits: Counter[int] = Counter()
        self.findings: list[EmulationError] = []
        self.parameters: dict[str, np.ndarray] = {}

    def _parameter_block(self) -> np.ndarray:
        """The parameters of the launch at the offsets PTX gives them."""
        declared = self.frame.kernel.params
        if len(declared) != len(self.launch.params):
            raise LaunchError(
                f"the launch has {len(self.launch.params)} parameters, the "
                f"kernel declares {len(declared)}"
            )
        end = max((self.frame.params[p.name] + p.size for p in declared), default=0)
        block = np.zeros(end, np.uint8)
        for number, (param, raw) in enumerate(zip(declared, self.launch.params, strict=True)):
            if len(raw) < param.size:
                raise LaunchError(
                    f"parameter {number} has {len(raw)} bytes in the launch and "
                    f"{param.size} in the kernel"
                )
            at = self.frame.params[param.name]
            block[at : at + param.size] = np.frombuffer(raw[: param.size], np.uint8)
        return block

    def parameter(self, name: str) -> np.ndarray:
        """The value of a slot that is named "param OFFSET KIND"."""
        if name not in self.parameters:
            _, offset, kind = name.split()
            raw = self.params[int(offset) : int(offset) + SIZES[kind]]
            self.parameters[name] = np.full(LANES, raw.view(DTYPES[kind]))
        return self.parameters[name]

    # Services for instructions.

    def submit(self, operation: Operation, pipe: Hashable = None) -> Operation:
        """Takes an operation over; those of one pipe keep their order."""
        key = operation if pipe is None else pipe
        self.pipes.setdefault(key, deque()).append(operation)
        self.issued[operation.place.line] += 1
        if self.options.completion == "eager":
            while key in self.pipes and not self.is_held(key):
                self.advance(key)
        return operation

    def finish(self, operation: Operation, pipe: Hashable = None) -> None:
        """Completes an operation that another one waits for, and those before it in its pipe."""
        while not operation.finished:
            self.advance(operation if pipe is None else pipe)

    def gives_up(self) -> bool:
        """True if a polling wait reports failure at once."""
        return self.options.completion == "random" and self.random.chance(0.05)

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to a counter of the report."""
        self.counters[name] += amount

    def count_wait(self, warp: int) -> None:
        """A warp of this index blocks."""
        self.waits[warp] += 1

    def report(self, error: EmulationError, place: Place) -> None:
        """Raises a fault that execution could survive, or collects it."""
        error.place = place
        if self.options.strict:
            raise error
        self.findings.append(error)

    # Services for the scheduler.

    def advance(self, key: Hashable) -> None:
        """Runs the next phase of the oldest operation of a pipe."""
        pipe = self.pipes[key]
        operation = pipe[0]
        try:
            operation.phases[operation.done]()
        except EmulationError as error:
            if error.place is None:
                error.place = operation.place
                error.message = f"{operation.what}: {error.message}"
            raise
        operation.done += 1
        self.progress += 1
        if operation.finished:
            pipe.popleft()
            if not pipe:
                del self.pipes[key]

    def free_pipes(self) -> list[Hashable]:
        """The pipes whose next operation is not held back."""
        if self.options.held is None:
            return list(self.pipes)
        return [key for key in self.pipes if not self.is_held(key)]

    def is_held(self, key: Hashable) -> bool:
        """True if the next operation of a pipe is one of those to hold back."""
        return self.pipes[key][0].place.line == self.options.held
