"""A parsed kernel -> segments of Python closures, ready to run.

A segment is a straight run of instructions that ends at a branch target, a branch, or a control
instruction (one that may block). Every instruction is decoded once, into two closures: one for
the full warp and one that merges its result under the warp's mask.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import numpy as np

from jax_fa.emulator import blocks, flow
from jax_fa.emulator.contract import contracted
from jax_fa.emulator.faults import UnknownInstructionError
from jax_fa.emulator.memory import PARAM_WINDOW
from jax_fa.emulator.ptx import (
    TYPE_BYTES,
    Address,
    Immediate,
    Instruction,
    Kernel,
    Negated,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from jax_fa.emulator.registry import Modifiers, Pure, Run, Unit, find
from jax_fa.emulator.values import (
    FULL,
    POISON,
    UNSIGNED,
    Value,
    constant,
    converter,
    identity,
    merge,
)

Reader = Callable[[list], Value]
Writer = Callable[[list, Value, np.ndarray], None]
Step = Callable[["object"], None]


class Source(NamedTuple):
    """Where an operand's value lies, and the conversion to the wanted kind (None: none)."""

    slot: int
    convert: Callable | None

    def reader(self) -> Reader:
        """A function from the warp's slots to the value."""
        slot, convert = self
        if convert is None:
            return operator.itemgetter(slot)
        return lambda slots: convert(slots[slot])


class Branch(NamedTuple):
    """End of a segment: where the taken lanes go."""

    target: int
    fall: int
    join: int
    guard: tuple[int, bool] | None


class RegisterUse(NamedTuple):
    """Bit sets of registers.

    Attributes:
      touched: those that an instruction names at all.
      written: its destinations.
      read: those whose value may matter to it.
      replaced: those whose value is lost to the lanes that execute it.
      is_multiply: whether it is a multiply of a warpgroup.
    """

    touched: int
    written: int
    read: int
    replaced: int
    is_multiply: bool


_NO_USE = RegisterUse(0, 0, 0, 0, False)


class Segment:
    """A straight run of instructions and how it ends.

    Exactly one of these ends a segment: `branch`, `run` (a control instruction), `exits`, or
    nothing (it falls through to `next`). `touched` is the bit set of the registers that its steps
    name; `computed` that of those it writes other than by moves, which compilers add and remove at
    will.

    `full` and `masked` hold a closure per step, for full warps and for others; None where the step
    is `deferred` until it is met. `fast` is what a full warp executes while no registers are in
    flight: runs of steps are one there, whose first line is in `fast_lines`.
    """

    __slots__ = (
        "full",
        "masked",
        "fast",
        "fast_lines",
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
        self.fast: list[Step] = []
        self.fast_lines: list[int] = []
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
        use = _register_use(instruction, is_pure=is_pure)
        self.uses.append(use)
        self.touched |= use.touched
        if not instruction.opcode.startswith("mov."):
            self.computed |= use.written


class Program(NamedTuple):
    """A decoded kernel.

    Attributes:
      kernel: what was decoded.
      segments: in program order; the entry is the first.
      unwritten: what every register holds before it is written.
      slots: initial value of the slots after the registers: an array, or a name that the warp
        resolves at its start (special registers, shared variables).
      shared: offset of every shared variable, and the end of the static ones under "".
      params: offset of every parameter in the parameter block.
      local_bytes: local memory of one thread.
      has_wgmma: whether wgmma.fence matters.
    """

    kernel: Kernel
    segments: list[Segment]
    unwritten: list[Value]
    slots: list[np.ndarray | str]
    shared: dict[str, int]
    params: dict[str, int]
    local_bytes: int
    has_wgmma: bool


def decode(kernel: Kernel) -> Program:
    """Decodes a kernel; every unknown instruction is refused here, executed or not."""
    return Decoder(contracted(kernel)).decode()


# Shared memory the system keeps for itself at the start of every CTA's window.
RESERVED_SHARED = 1024


class Decoder:
    """The state of decoding one kernel, and the services that instruction builders use."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.units = [
            None if flow.is_branch(i) or flow.is_exit(i) else find(i) for i in kernel.instructions
        ]
        self.homes = _home_kinds(kernel, self.units)
        self.slots: list[np.ndarray | str] = []
        self.slot_of: dict[tuple, int] = {}
        self.params = _param_offsets(kernel)
        self.shared = _shared_offsets(kernel)
        self.local, self.local_bytes = _local_offsets(kernel)

    # Services for builders.

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

    # Decoding proper.

    def decode(self) -> Program:
        """Builds all segments."""
        instructions = self.kernel.instructions
        starts = self._segment_starts()
        index_of = {start: index for index, start in enumerate(starts)}
        index_of[len(instructions)] = len(starts)
        following = flow.successors(instructions, starts)
        joins = flow.join_blocks(following)
        segments = []
        for index, start in enumerate(starts):
            end = starts[index + 1] if index + 1 < len(starts) else len(instructions)
            segment = Segment()
            segment.next = index + 1
            segment.join = joins[index]
            for position in range(start, end):
                self._add(segment, position, index_of)
            segments.append(segment)
        blocks.join_runs(self, segments, following)
        return Program(
            self.kernel,
            segments,
            [POISON[home] for home in self.homes],
            self.slots,
            self.shared,
            self.params,
            self.local_bytes,
            any(i.opcode.startswith("wgmma.mma_async") for i in instructions),
        )

    def _segment_starts(self) -> list[int]:
        instructions = self.kernel.instructions
        starts = {0}
        for index, instruction in enumerate(instructions):
            if flow.is_branch(instruction):
                starts.add(flow.branch_target(instruction))
                starts.add(index + 1)
            elif (
                flow.is_exit(instruction)
                or self.units[index].__class__ is Unit
                and self.units[index].blocks
            ):
                starts.add(index + 1)
        return sorted(s for s in starts if s < len(instructions))

    def _add(self, segment: Segment, position: int, index_of: dict[int, int]) -> None:
        instruction, unit = self.kernel.instructions[position], self.units[position]
        guard = instruction.guard
        segment.guard = None if guard is None else (guard.register.number, guard.negated)
        if unit is None:
            segment.last_use = _register_use(instruction)
            segment.last = instruction
            if flow.is_exit(instruction):
                segment.exits = True
            else:
                segment.branch = Branch(
                    index_of[flow.branch_target(instruction)],
                    segment.next,
                    segment.join,
                    segment.guard,
                )
        elif isinstance(unit, Unit) and unit.blocks:
            segment.last = instruction
            segment.run = unit.build(self, instruction, Modifiers(instruction, unit.prefix))
            segment.last_use = _register_use(instruction)
            if not segment.last_use.is_multiply:
                segment.computed |= segment.last_use.written
        else:
            is_deferred = blocks.serves(self, instruction, unit)
            if is_deferred:
                segment.deferred[len(segment.steps)] = unit
                segment.prepare = partial(self._prepare, segment)
            full, masked = (None, None) if is_deferred else self._closures(instruction, unit)
            segment.steps.append(instruction)
            segment.add_use(instruction, is_pure=is_deferred or isinstance(unit, Pure))
            segment.full.append(full)
            segment.masked.append(masked)

    def _prepare(self, segment: Segment, position: int) -> tuple[Step, Step]:
        """The closures of a deferred step."""
        return self._closures(segment.steps[position], segment.deferred[position])

    def _closures(self, instruction: Instruction, unit: Pure | Unit) -> tuple[Step, Step]:
        """What full warps and what others execute."""
        if isinstance(unit, Pure):
            return self._pure(instruction, unit)
        run = unit.build(self, instruction, Modifiers(instruction, unit.prefix))
        guard = instruction.guard
        step = _effect_step(run, None if guard is None else (guard.register.number, guard.negated))
        return step, step

    def _pure(self, instruction: Instruction, unit: Pure) -> tuple[Step, Step]:
        target, *operands = instruction.operands
        if isinstance(target, Sink):
            return _nothing, _nothing
        if not isinstance(target, Register):
            raise UnknownInstructionError(f"{instruction}: the result operand is not implemented")
        home = self.homes[target.number]
        same = "u8" if home == "pair" and unit.function is not identity else home
        sources = [
            self.source(o, same if kind == "any" else kind)
            for o, kind in zip(operands, unit.operands, strict=True)
        ]
        result = same if unit.result == "any" else unit.result
        compute = _call(unit.function, sources, converter(result, home))
        guard = instruction.guard
        masked = _masked_step(compute, target.number, guard)
        if guard is not None:
            return masked, masked
        return _full_step(
            unit.function, sources, compute, target.number, direct=result == home
        ), masked


def _nothing(warp: object) -> None:
    """A step whose result goes nowhere."""


def _call(function: Callable, sources: list[Source], finish: Callable | None) -> Reader:
    """function(operands) as a function of the slots."""
    reads = [s.reader() for s in sources]
    if len(reads) == 1:
        (first,) = reads

        def apply(slots: list) -> Value:
            return function(first(slots))
    elif len(reads) == 2:
        first, second = reads

        def apply(slots: list) -> Value:
            return function(first(slots), second(slots))
    else:

        def apply(slots: list) -> Value:
            return function(*[read(slots) for read in reads])

    if finish is None:
        return apply
    return lambda slots: finish(apply(slots))


def _full_step(
    function: Callable, sources: list[Source], compute: Reader, target: int, *, direct: bool
) -> Step:
    """The step for a full warp, unrolled for the operand counts that matter for speed."""
    count = len(sources)
    if not direct or any(s.convert is not None for s in sources) or not 1 <= count <= 3:

        def general(warp: object) -> None:
            slots = warp.slots
            slots[target] = compute(slots)

        return general
    a, b, c = (s.slot for s in (sources + sources[:1] * 2)[:3])
    if function is identity:

        def step(warp: object) -> None:
            slots = warp.slots
            slots[target] = slots[a]
    elif count == 1:

        def step(warp: object) -> None:
            slots = warp.slots
            slots[target] = function(slots[a])
    elif count == 2:

        def step(warp: object) -> None:
            slots = warp.slots
            slots[target] = function(slots[a], slots[b])
    else:

        def step(warp: object) -> None:
            slots = warp.slots
            slots[target] = function(slots[a], slots[b], slots[c])

    return step


def _masked_step(compute: Reader, target: int, guard: object) -> Step:
    """The step that leaves lanes outside the mask (and the guard) alone."""
    if guard is None:

        def step(warp: object) -> None:
            slots = warp.slots
            slots[target] = merge(warp.mask, compute(slots), slots[target])

        return step
    register, negated = guard.register.number, guard.negated

    def guarded(warp: object) -> None:
        slots = warp.slots
        mask = warp.mask & (~slots[register] if negated else slots[register])
        slots[target] = merge(mask, compute(slots), slots[target])

    return guarded


def _effect_step(run: Run, guard: tuple[int, bool] | None) -> Step:
    if guard is None:
        return lambda warp: run(warp, warp.mask)
    register, negated = guard

    def guarded(warp: object) -> None:
        mask = warp.mask & (~warp.slots[register] if negated else warp.slots[register])
        if np.count_nonzero(mask):
            run(warp, mask)

    return guarded


def _register_use(instruction: Instruction, *, is_pure: bool = False) -> RegisterUse:
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


def _home_kinds(kernel: Kernel, units: list[Pure | Unit | None]) -> list[str]:
    """Chooses the kind in which each register is kept: what most of its typed uses want.

    Registers joined by untyped moves and selects share one kind. A 64-bit register used by f32x2
    instructions, and otherwise only packed and unpacked, is kept as a pair.
    """
    vote = _Vote(len(kernel.register_types))
    for instruction, unit in zip(kernel.instructions, units, strict=True):
        if isinstance(unit, Pure):
            vote.pure(instruction, unit)
    for instruction in kernel.instructions:
        if instruction.opcode == "mov.b64":
            vote.halves(instruction)
    paired = {vote.root(index) for index in vote.pairs}
    totals: dict[int, int] = {}
    for index, count in enumerate(vote.counts):
        totals[vote.root(index)] = totals.get(vote.root(index), 0) + count
    homes = []
    for index, type_ in enumerate(kernel.register_types):
        size, total = TYPE_BYTES[type_], totals[vote.root(index)]
        if type_ == "pred":
            homes.append("pred")
        elif size == 8 and vote.root(index) in paired and total >= 0:
            homes.append("pair")
        elif size in (4, 8) and total > 0:
            homes.append(f"f{size}")
        else:
            homes.append(UNSIGNED[max(size, 2)])
    return homes


class _Vote:
    """Counts floating (+1) and integer (-1) uses of every register, and joins registers."""

    def __init__(self, registers: int) -> None:
        self.counts = [0] * registers
        self.parent = list(range(registers))
        self.pairs: set[int] = set()

    def root(self, index: int) -> int:
        while self.parent[index] != index:
            self.parent[index] = self.parent[self.parent[index]]
            index = self.parent[index]
        return index

    def pure(self, instruction: Instruction, unit: Pure) -> None:
        linked = []
        kinds = (unit.result, *unit.operands)
        for operand, kind in zip(instruction.operands, kinds, strict=False):
            if not isinstance(operand, Register):
                continue
            if kind == "any":
                linked.append(operand.number)
            elif kind == "pair":
                self.pairs.add(operand.number)
            elif kind != "pred":
                self.counts[operand.number] += 1 if kind in ("f4", "f8") else -1
        for index in linked[1:]:
            self.parent[self.root(index)] = self.root(linked[0])

    def halves(self, instruction: Instruction) -> None:
        """mov.b64 between a pair and its halves: the halves are floats."""
        a, b = instruction.operands
        whole, vector = (a, b) if isinstance(b, Vector) else (b, a)
        if (
            isinstance(vector, Vector)
            and isinstance(whole, Register)
            and whole.number in self.pairs
        ):
            for item in vector.items:
                if isinstance(item, Register):
                    self.counts[item.number] += 1


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
