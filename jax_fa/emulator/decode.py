"""A parsed kernel -> segments of Python closures, ready to run.

A segment is a straight run of instructions that ends at a branch target, a branch, or a control
instruction (one that may block). Every instruction is decoded once, into two closures: one for
the full warp and one that merges its result under the warp's mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from jax_fa.emulator import blocks, flow
from jax_fa.emulator.contract import contracted
from jax_fa.emulator.faults import UnknownInstructionError
from jax_fa.emulator.operands import OperandDecoder, Reader, Source
from jax_fa.emulator.program import Branch, Program, Segment, Step, register_use
from jax_fa.emulator.ptx import TYPE_BYTES, Instruction, Kernel, Register, Sink, Vector
from jax_fa.emulator.registry import Modifiers, Pure, Run, Unit, find
from jax_fa.emulator.values import UNSIGNED, Value, converter, identity, merge


def decode(kernel: Kernel) -> Program:
    """Decodes a kernel; every unknown instruction is refused here, executed or not."""
    return _KernelDecoder(contracted(kernel)).decode()


class _KernelDecoder:
    """The state of decoding one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.units = [
            None if flow.is_branch(i) or flow.is_exit(i) else find(i) for i in kernel.instructions
        ]
        self.operands = OperandDecoder(kernel, _home_kinds(kernel, self.units))

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
        blocks.join_runs(self.operands, segments, following)
        return Program(
            self.operands.frame(),
            segments,
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
            segment.last_use = register_use(instruction)
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
            segment.run = unit.build(
                self.operands, instruction, Modifiers(instruction, unit.prefix)
            )
            segment.last_use = register_use(instruction)
            if not segment.last_use.is_multiply:
                segment.computed |= segment.last_use.written
        else:
            is_deferred = blocks.serves(self.operands, instruction, unit)
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
        """The closures that full warps and others execute."""
        if isinstance(unit, Pure):
            return self._pure(instruction, unit)
        run = unit.build(self.operands, instruction, Modifiers(instruction, unit.prefix))
        guard = instruction.guard
        step = _effect_step(run, None if guard is None else (guard.register.number, guard.negated))
        return step, step

    def _pure(self, instruction: Instruction, unit: Pure) -> tuple[Step, Step]:
        target, *operands = instruction.operands
        if isinstance(target, Sink):
            return _nothing, _nothing
        if not isinstance(target, Register):
            raise UnknownInstructionError(f"{instruction}: the result operand is not implemented")
        home = self.operands.homes[target.number]
        same = "u8" if home == "pair" and unit.function is not identity else home
        sources = [
            self.operands.source(o, same if kind == "any" else kind)
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
