"""A decoded kernel: segments of Python closures."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jax_fa.emulator.cta import RegisterUse
from jax_fa.emulator.machine import Frame
from jax_fa.emulator.ptx import Address, Immediate, Instruction, Register
from jax_fa.emulator.registry import Pure, Run, Unit

Step = Callable[["object"], None]


class Branch(NamedTuple):
    """End of a segment: where the taken lanes go."""

    target: int
    fall: int
    join: int
    guard: tuple[int, bool] | None


class FastStep(NamedTuple):
    """A step, or a run of steps, and its first line."""

    run: Step
    line: int


_NO_USE = RegisterUse(0, 0, 0, 0, False)


class Segment:
    """A straight run of instructions and how it ends.

    Exactly one of these ends a segment: `branch`, `run` (a control instruction), `exits`, or
    nothing (it falls through to `next`). `touched` is the bit set of the registers that its steps
    name; `computed` that of those it writes other than by moves, which compilers add and remove at
    will.

    `full` and `masked` hold a closure per step, for full warps and for others; None where the step
    is `deferred` until it is met. `fast` and `fast_masked` are what they execute while no registers
    are in flight: runs of steps are one there.
    """

    __slots__ = (
        "full",
        "masked",
        "fast",
        "fast_masked",
        "deferred",
        "prepare",
        "steps",
        "last",
        "branch",
        "run",
        "exits",
        "guard",
        "next",
        "uses",
        "last_use",
        "touched",
        "computed",
        "join",
    )

    def __init__(self) -> None:
        self.full: list[Step | None] = []
        self.masked: list[Step | None] = []
        self.fast: list[FastStep] = []
        self.fast_masked: list[FastStep] = []
        self.deferred: dict[int, Pure | Unit] = {}
        self.prepare: Callable[[int], tuple[Step, Step]] | None = None
        self.steps: list[Instruction] = []
        self.last: Instruction | None = None
        self.branch: Branch | None = None
        self.run: Run | None = None
        self.exits = False
        self.guard: tuple[int, bool] | None = None
        self.next = -1
        self.uses: list[RegisterUse] = []
        self.last_use = _NO_USE
        self.touched = 0
        self.computed = 0
        self.join = -1

    @property
    def first_line(self) -> int:
        """Line of the first instruction."""
        first = self.steps[0] if self.steps else self.last
        return 0 if first is None else first.line

    def all_steps(self, is_full: bool) -> list[Step]:
        """A closure per step."""
        steps = self.full if is_full else self.masked
        if self.deferred and None in steps:
            for position in self.deferred:
                self.step(position, is_full)
        return steps

    def step(self, position: int, is_full: bool) -> Step:
        """The closure of one step."""
        steps = self.full if is_full else self.masked
        if steps[position] is None:
            self.full[position], self.masked[position] = self.prepare(position)
        return steps[position]

    def add_use(self, instruction: Instruction, *, is_pure: bool) -> None:
        """Adds what the next step does to registers."""
        use = register_use(instruction, is_pure=is_pure)
        self.uses.append(use)
        self.touched |= use.touched
        if not instruction.opcode.startswith("mov."):
            self.computed |= use.written


class Program(NamedTuple):
    """A decoded kernel.

    Attributes:
      frame: its variables, and what its warps start with.
      segments: in program order; the entry is the first.
      has_wgmma: whether wgmma.fence matters.
    """

    frame: Frame
    segments: list[Segment]
    has_wgmma: bool


def register_use(instruction: Instruction, *, is_pure: bool = False) -> RegisterUse:
    """The registers that an instruction uses."""
    guard = 0 if instruction.guard is None else 1 << instruction.guard.register.number
    target, *rest = instruction.operands or (None,)
    named = _named_registers(target)
    written = 0 if isinstance(target, Address) else named
    sources = guard
    for operand in rest:
        sources |= _named_registers(operand)
    # Effects may read their destinations, or leave some lanes of them as they are.
    is_replaced = is_pure and not guard
    return RegisterUse(
        sources | named,
        written,
        sources if is_replaced else sources | named,
        written if is_replaced else 0,
        instruction.opcode.startswith("wgmma.mma_async"),
    )


def _named_registers(operand: object) -> int:
    """Bit set of the registers an operand names, at any depth."""
    if operand.__class__ is Register:
        return 1 << operand.number
    bits = 0
    if operand.__class__ is not Immediate and isinstance(operand, tuple):
        for part in operand:
            bits |= _named_registers(part)
    return bits
