"""Operands of instructions: where their values lie in a warp, and how they are read and written."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from jax_fa.emulator.faults import UnknownInstructionError
from jax_fa.emulator.machine import Frame
from jax_fa.emulator.memory import PARAM_WINDOW
from jax_fa.emulator.ptx import (
    Address,
    Immediate,
    Kernel,
    Negated,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from jax_fa.emulator.values import FULL, POISON, SIZES, Value, constant, converter, merge

Reader = Callable[[list], Value]
Writer = Callable[[list, Value, np.ndarray], None]

# Shared memory the system keeps for itself at the start of every CTA's window.
RESERVED_SHARED = 1024


class Source(NamedTuple):
    """The slot of an operand's value, and the conversion to the wanted kind (None: none)."""

    slot: int
    convert: Callable | None

    def reader(self) -> Reader:
        """A function from the warp's slots to the value."""
        slot, convert = self
        if convert is None:
            return operator.itemgetter(slot)
        return lambda slots: convert(slots[slot])


class OperandDecoder:
    """Places a kernel's operands in the slots of warps; instruction builders read and write by it.

    Attributes:
      homes: the kind in which each register is kept.
    """

    def __init__(self, kernel: Kernel, homes: list[str]) -> None:
        self.kernel = kernel
        self.homes = homes
        self.slots: list[np.ndarray | str] = []
        self.slot_of: dict[tuple, int] = {}
        self.params = _param_offsets(kernel)
        self.shared = _shared_offsets(kernel)
        self.local, self.local_bytes = _local_offsets(kernel)

    def source(self, operand: Operand, kind: str) -> Source:
        """Slot and conversion for reading an operand as `kind`."""
        if isinstance(operand, Register):
            return Source(operand.number, converter(self.homes[operand.number], kind))
        if isinstance(operand, Immediate):
            return Source(self._slot((operand.bits, kind), constant(operand.bits, kind)), None)
        if isinstance(operand, Negated):
            inner = self.source(operand.register, "pred")
            return Source(inner.slot, np.logical_not)
        if isinstance(operand, Special):
            have = self.kind_of(operand, kind)
            return Source(self._slot(operand.name, operand.name), converter(have, kind))
        if isinstance(operand, Symbol):
            return self._symbol(operand.name, kind)
        raise UnknownInstructionError(f"operand {operand} cannot be read as a value")

    def kind_of(self, operand: Operand, kind: str) -> str:
        """The kind of the value in the slot of what is read as `kind`."""
        if isinstance(operand, Register):
            return self.homes[operand.number]
        if isinstance(operand, Special):
            return "u8" if operand.name in ("clock64", "globaltimer") else "u4"
        is_shared = isinstance(operand, Symbol) and operand.name in self.shared
        return "u4" if is_shared and operand.name not in self.params else kind

    def read(self, operand: Operand, kind: str) -> Reader:
        """A function from the warp's slots to the operand's value as `kind`."""
        return self.source(operand, kind).reader()

    def write(self, operand: Operand, kind: str) -> Writer:
        """A function (slots, value of `kind`, mask) that stores into the operand."""
        if isinstance(operand, Sink):
            return lambda slots, value, mask: None
        if not isinstance(operand, Register):
            raise UnknownInstructionError(f"operand {operand} cannot be written")
        slot, convert = operand.number, converter(kind, self.homes[operand.number])

        def put(slots: list, value: Value, mask: np.ndarray) -> None:
            if convert is not None:
                value = convert(value)
            slots[slot] = value if mask is FULL else merge(mask, value, slots[slot])

        return put

    def home(self, operand: Operand) -> str:
        """The kind in which the operand's register is kept."""
        return self.homes[operand.number] if isinstance(operand, Register) else "u4"

    def read_all(self, operand: Operand, kind: str) -> list[Reader]:
        """Readers of a vector's items, or of the single operand."""
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return [self.read(item, kind) for item in items]

    def write_all(self, operand: Operand, kind: str) -> list[Writer]:
        """Writers of a vector's items, or of the single operand."""
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return [self.write(item, kind) for item in items]

    def word_slots(self, operand: Operand) -> list[int] | None:
        """Slots of a vector's items; None if one of them is not 32 lanes of 4 bytes."""
        items = operand.items if isinstance(operand, Vector) else (operand,)
        if any(isinstance(item, Sink | Negated) for item in items):
            return None
        sources = [self.source(item, "u4") for item in items]
        is_plain = all(SIZES[self.kind_of(item, "u4")] == 4 for item in items)
        return [source.slot for source in sources] if is_plain else None

    def parameters(self, address: Address, kind: str, count: int) -> list[int] | None:
        """Slots of consecutive values at an address in a parameter; None if it is elsewhere.

        They are there from the start of a warp: every lane of every warp reads the same.
        """
        if not isinstance(address.base, Symbol) or address.base.name not in self.params:
            return None
        (size,) = (p.size for p in self.kernel.params if p.name == address.base.name)
        if not 0 <= address.offset <= size - SIZES[kind] * count:
            return None
        first = self.params[address.base.name] + address.offset
        names = (f"param {first + SIZES[kind] * index} {kind}" for index in range(count))
        return [self._slot(name, name) for name in names]

    def write_rows(self, operand: Operand, kinds: list[str]) -> Callable:
        """A function (slots, arrays, mask) that stores an array into each item of a vector.

        Args:
          operand: the vector, or a single operand.
          kinds: of the arrays.
        """
        items = operand.items if isinstance(operand, Vector) else (operand,)
        writes = [self.write(item, kind) for item, kind in zip(items, kinds, strict=True)]
        numbers = [
            item.number
            for item, kind in zip(items, kinds, strict=True)
            if isinstance(item, Register) and converter(kind, self.homes[item.number]) is None
        ]
        is_plain = len(numbers) == len(items)

        def put(slots: list, rows: Iterable[np.ndarray], mask: np.ndarray) -> None:
            if is_plain and mask is FULL:
                for number, row in zip(numbers, rows, strict=True):
                    slots[number] = row
            else:
                for write, row in zip(writes, rows, strict=True):
                    write(slots, row, mask)

        return put

    def _slot(self, key: object, initial: np.ndarray | str) -> int:
        if key not in self.slot_of:
            self.slot_of[key] = len(self.homes) + len(self.slots)
            self.slots.append(initial)
        return self.slot_of[key]

    def _symbol(self, name: str, kind: str) -> Source:
        if name in self.params:
            address = PARAM_WINDOW + self.params[name]
            return Source(self._slot((address, kind), constant(address, kind)), None)
        if name in self.shared:
            return Source(self._slot(f"shared {name}", f"shared {name}"), converter("u4", kind))
        if name in self.local:
            offset = self.local[name]
            return Source(self._slot((offset, kind), constant(offset, kind)), None)
        raise UnknownInstructionError(f"variable {name} is in a space that is not supported")

    def frame(self) -> Frame:
        """The state in which warps start; complete once everything is decoded."""
        return Frame(
            self.kernel,
            [POISON[home] for home in self.homes],
            self.slots,
            self.shared,
            self.params,
            self.local_bytes,
        )


def _align(offset: int, align: int) -> int:
    return -(-offset // align) * align


def _param_offsets(kernel: Kernel) -> dict[str, int]:
    offsets, end = {}, 0
    for param in kernel.params:
        offsets[param.name] = _align(end, param.align)
        end = offsets[param.name] + param.size
    return offsets


def _shared_offsets(kernel: Kernel) -> dict[str, int]:
    """Static variables first, then the unsized ones (dynamic shared memory) after them."""
    offsets, end = {}, RESERVED_SHARED
    shared = [v for v in kernel.variables if v.space == "shared"]
    for variable in sorted(shared, key=lambda v: v.size == 0):
        offsets[variable.name] = _align(end, variable.align)
        end = offsets[variable.name] + variable.size
    return offsets | {"": end}


def _local_offsets(kernel: Kernel) -> tuple[dict[str, int], int]:
    offsets, end = {}, 0
    for variable in kernel.variables:
        if variable.space == "local":
            offsets[variable.name] = _align(end, variable.align)
            end = offsets[variable.name] + variable.size
    return offsets, end
