"""The instruction set: how an instruction is added, and how a decoded one is found.

Three kinds of instruction, each added by one statement in the file of its unit:

`define(names, result, operands, function)` for a pure one: `function` maps operand values (32-lane
arrays of the kinds listed, see values.py) to the result. The rest (conversions, guards, partial
warps) is the decoder's business.

    define("add.f32 add.rn.f32", "f4", "f4 f4", np.add)

`@effect(names)` for one that touches memory or several registers: a builder gets the decoder and
the instruction and returns `run(warp, mask)`. Names are dotted prefixes of the opcode; what
follows is read from `Modifiers`, so that an unknown modifier is refused by name.

`@control(names)` for one that may block or must be a scheduling point: as an effect, but the
builder's `run(warp, mask)` may return a `Wait`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from jax_fa.emulator.cta import Wait, Warp
from jax_fa.emulator.faults import UnknownInstructionError
from jax_fa.emulator.operands import OperandDecoder
from jax_fa.emulator.ptx import Instruction, Vector

Run = Callable[[Warp, np.ndarray], Wait | None]
Builder = Callable[[OperandDecoder, Instruction, "Modifiers"], Run]


class Pure(NamedTuple):
    """An instruction without side effects.

    Kind "any" in `result` and `operands` stands for the home kind of the destination.
    """

    result: str
    operands: tuple[str, ...]
    function: Callable


class Unit(NamedTuple):
    """An instruction with side effects; `blocks` when it may wait or is a scheduling point."""

    build: Builder
    blocks: bool
    prefix: str


PURE: dict[str, dict[int, Pure]] = {}
UNITS: dict[str, Unit] = {}


def define(names: str, result: str, operands: str, function: Callable) -> None:
    """Adds pure instructions under all the (space separated) full names.

    A name may be defined once for every number of operands (max.f32 takes two or three).
    """
    kinds = tuple(operands.split())
    for name in names.split():
        PURE.setdefault(name, {})[len(kinds)] = Pure(result, kinds, function)


def effect(names: str) -> Callable[[Builder], Builder]:
    """Registers the builder of an instruction with side effects."""
    return _unit(names, blocks=False)


def control(names: str) -> Callable[[Builder], Builder]:
    """Registers the builder of an instruction that may block."""
    return _unit(names, blocks=True)


def _unit(names: str, *, blocks: bool) -> Callable[[Builder], Builder]:
    def register(build: Builder) -> Builder:
        for name in names.split():
            UNITS[name] = Unit(build, blocks, name)
        return build

    return register


def find(instruction: Instruction) -> Pure | Unit:
    """The implementation of an instruction.

    Raises:
      UnknownInstructionError: names the opcode and the line.
    """
    opcode = instruction.opcode
    pure = PURE.get(opcode, {}).get(len(instruction.operands) - 1)
    if pure is not None and not any(o.__class__ is Vector for o in instruction.operands):
        return pure
    unit = _unit_of(opcode)
    if unit is not None:
        return unit
    near = difflib.get_close_matches(opcode, [*PURE, *UNITS], 4)
    hint = f"; similar ones: {', '.join(near)}" if near else ""
    raise UnknownInstructionError(
        f"instruction {opcode} at line {instruction.line} is not implemented{hint}"
    )


@cache
def _unit_of(opcode: str) -> Unit | None:
    """The unit with the longest name that the opcode begins with."""
    parts = opcode.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((UNITS[name] for name in names if name in UNITS), None)


class Modifiers:
    """The dotted parts of an opcode after its registered name, to be taken one by one."""

    def __init__(self, instruction: Instruction, prefix: str) -> None:
        self.instruction = instruction
        rest = instruction.opcode[len(prefix) :]
        self.left = [part for part in rest.split(".") if part]

    def take(self, *names: str) -> str | None:
        """Removes and returns the first of the names that is present."""
        for name in names:
            if name in self.left:
                self.left.remove(name)
                return name
        return None

    def drop(self, names: str) -> Modifiers:
        """Removes modifiers that change nothing here (caching, ordering, redundancy)."""
        for name in names.split():
            self.take(name)
        return self

    def need(self, names: str) -> str:
        """As take, but one of the (space separated) names must be there."""
        found = self.take(*names.split())
        if found is None:
            raise self.error(f"needs one of .{names.replace(' ', ', .')}")
        return found

    def done(self) -> None:
        """Refuses whatever nobody took."""
        if self.left:
            raise self.error(f"modifier .{self.left[0]} is not implemented")

    def error(self, message: str) -> UnknownInstructionError:
        """An error about the instruction, to be raised."""
        return UnknownInstructionError(
            f"{self.instruction.opcode} at line {self.instruction.line}: {message}"
        )
