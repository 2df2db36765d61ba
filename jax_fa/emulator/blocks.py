"""Straight runs of arithmetic as single steps of the compiled core (ffi/emulator_block.cc).

A run reads registers, computes in a memory of its own, and writes those registers that something
may read afterwards: creating 32-lane arrays is what most of the time goes into. Only full warps
take it, and runs are compiled when they are met first. Without the extension nothing is joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from jax_fa.emulator import mufu, native
from jax_fa.emulator.loadstore import loaded_kind
from jax_fa.emulator.operands import OperandDecoder
from jax_fa.emulator.program import Segment
from jax_fa.emulator.ptx import (
    Immediate,
    Instruction,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from jax_fa.emulator.registry import Pure, Unit
from jax_fa.emulator.values import DTYPES, LANES, SIZES, Value

SHORTEST = 3
"""Instructions from which on a run is worth its call."""


def _operations() -> dict[tuple[str, int], str]:
    """The operation of each opcode, by opcode and number of operands."""
    found: dict[tuple[str, int], str] = {}

    def add(opcodes: str, operands: int, operation: str) -> None:
        found.update({(opcode, operands): operation for opcode in opcodes.split()})

    for bits, size in (("32", "4"), ("64", "8")):
        for name in ("add", "sub"):
            add(f"{name}.s{bits} {name}.u{bits} {name}.b{bits}", 2, f"{name}.u{size}")
        add(f"mul.lo.s{bits} mul.lo.u{bits}", 2, f"mul.u{size}")
        add(f"mad.lo.s{bits} mad.lo.u{bits}", 3, f"mad.u{size}")
        for name in ("and", "or", "xor"):
            add(f"{name}.b{bits}", 2, f"{name}.u{size}")
        add(f"shl.b{bits}", 2, f"shl.u{size}")
        add(f"shr.u{bits} shr.b{bits}", 2, f"shr.u{size}")
        add(f"shr.s{bits}", 2, f"shr.i{size}")
        for name in ("eq", "ne"):
            add(
                " ".join(f"setp.{name}.{sign}{bits}" for sign in "sub"),
                2,
                f"{name}.u{size}",
            )
        for name in ("lt", "le", "gt", "ge"):
            add(f"setp.{name}.s{bits}", 2, f"{name}.i{size}")
            add(f"setp.{name}.u{bits}", 2, f"{name}.u{size}")
    for sign, kind in (("s", "i4"), ("u", "u4")):
        for name in ("min", "max", "div", "rem"):
            add(f"{name}.{sign}32", 2, f"{name}.{kind}")
        add(f"mul.wide.{sign}32", 2, f"mulwide.{kind}")
        add(f"cvt.rn.f32.{sign}32", 1, f"f4.{kind}")
    add("min.relu.s32", 2, "minrelu.i4")
    add("max.relu.s32", 2, "maxrelu.i4")
    add("neg.s32", 1, "neg.u4")
    add("not.b32", 1, "not.u4")
    for name in ("and", "or", "xor"):
        add(f"{name}.pred", 2, f"{name}.pred")
    add("not.pred", 1, "not.pred")
    for name in ("eq", "lt", "le", "gt", "ge", "ne", "neu"):
        add(f"setp.{name}.f32", 2, f"{name}.f4")
    for name in ("add", "sub", "mul"):
        add(f"{name}.f32 {name}.rn.f32 {name}.f32x2 {name}.rn.f32x2", 2, f"{name}.f4")
    add("fma.rn.f32 fma.rn.f32x2", 3, "fma.f4")
    add("fms.rn.f32", 3, "fms.f4")
    add("fnma.rn.f32", 3, "fnma.f4")
    add("add.rm.f32 add.rm.f32x2 add.rm.ftz.f32 add.rm.ftz.f32x2", 2, "adddown.f4")
    add("neg.f32", 1, "neg.f4")
    add("abs.f32", 1, "abs.f4")
    for name in ("min", "max"):
        add(f"{name}.f32 {name}.ftz.f32", 2, f"{name}.f4")
        add(f"{name}.f32 {name}.ftz.f32", 3, f"{name}3.f4")
    for name in ("ex2", "lg2", "rcp"):
        add(f"{name}.approx.ftz.f32", 1, f"{name}.f4")
    add("cvt.rn.bf16.f32", 1, "bf16.f4")
    add("cvt.rn.bf16x2.f32", 2, "bf16x2.f4")
    add("cvt.rn.f16x2.f32", 2, "f16x2.f4")
    add("cvt.f32.bf16", 1, "f4.bf16")
    add("cvt.f32.f16", 1, "f4.f16")
    add("cvt.s64.s32", 1, "i8.i4")
    add("cvt.u64.u32", 1, "u8.u4")
    add("cvt.u32.u64 cvt.s32.s64 cvt.u32.s64 cvt.s32.u64", 1, "u4.u8")
    return found


OPERATIONS = _operations()
_MOVES = {f"mov.{type_}" for type_ in "b32 b64 u32 s32 u64 s64 f32 f64 pred b16 u16 s16".split()}
_SELECTS = {f"selp.{type_}" for type_ in "b32 b64 u32 s32 u64 s64 f32".split()}
# Size of a part of a register of so many bytes, and what joins two of them, or takes one.
_JOINS = {4: (2, "join.u2", "u2.u4", "high.u4"), 8: (4, "join.u4", "u4.u8", "high.u8")}
_RESIZE = {(2, 4): "u4.u2", (4, 8): "u8.u4", (8, 4): "u4.u8", (4, 2): "u2.u4"}


def _codes() -> dict[str, int]:
    """Numbers of the core's operations; none when there is no core."""
    core = native.core
    if core is None:
        return {}
    for name, table in mufu.TABLES.items():
        core.set_interpolation(
            name,
            table.first.tolist(),
            table.slope.tolist(),
            table.curve.tolist(),
            table.square.tolist(),
        )
    return {name: code for code, name in enumerate(core.block_operations())}


CODES = _codes()


def serves(decoder: OperandDecoder, instruction: Instruction, unit: Pure | Unit) -> bool:
    """True if a run may hold the instruction."""
    if not CODES or instruction.guard is not None:
        return False
    if isinstance(unit, Unit):
        if unit.prefix == "mov":
            return _is_join_or_split(decoder, *instruction.operands)
        return _parameters(decoder, instruction) is not None
    target, *operands = instruction.operands
    opcode = instruction.opcode
    is_known = (opcode, len(operands)) in OPERATIONS or opcode in _MOVES or opcode in _SELECTS
    if not is_known or not isinstance(target, Register):
        return False
    same = _same(decoder, target)
    if opcode in _SELECTS and same == "pair":
        return False
    kinds = [same if kind == "any" else kind for kind in unit.operands]
    result = same if unit.result == "any" else unit.result
    return all(
        _reads(decoder, operand, kind) for operand, kind in zip(operands, kinds, strict=True)
    ) and _converts(result, decoder.home(target))


def _same(decoder: OperandDecoder, target: Register) -> str:
    """The kind that "any" stands for."""
    return decoder.homes[target.number]


class _Loaded(NamedTuple):
    """An item of what a load writes, and the slot and kind of its value."""

    target: Operand
    slot: int
    kind: str


def _parameters(decoder: OperandDecoder, instruction: Instruction) -> list[_Loaded] | None:
    """What a load from parameters finds in slots; None for any other instruction."""
    if not instruction.opcode.startswith("ld.param."):
        return None
    target, address = instruction.operands
    items = target.items if isinstance(target, Vector) else (target,)
    kind = loaded_kind(instruction.opcode.rpartition(".")[2])
    slots = decoder.parameters(address, kind, len(items))
    if slots is None:
        return None
    are_served = all(
        isinstance(item, Sink) or isinstance(item, Register) and _converts(kind, decoder.home(item))
        for item in items
    )
    found = zip(items, slots, strict=True)
    return [_Loaded(item, slot, kind) for item, slot in found] if are_served else None


def _is_join_or_split(decoder: OperandDecoder, target: Operand, source: Operand) -> bool:
    vector, whole = (target, source) if isinstance(target, Vector) else (source, target)
    if not isinstance(vector, Vector) or len(vector.items) != 2 or not isinstance(whole, Register):
        return False
    size = SIZES[decoder.home(whole)]
    if size not in _JOINS:
        return False
    part = f"u{_JOINS[size][0]}"
    if vector is target:
        return all(
            isinstance(item, Sink)
            or isinstance(item, Register)
            and _converts(part, decoder.home(item))
            for item in vector.items
        )
    return all(_reads(decoder, item, part) for item in vector.items)


def _reads(decoder: OperandDecoder, operand: Operand, kind: str) -> bool:
    if isinstance(operand, Register):
        return _converts(decoder.home(operand), kind)
    if isinstance(operand, Immediate):
        decoder.source(operand, kind)  # so that its slot exists when warps are made
        return True
    if isinstance(operand, Special | Symbol):
        decoder.source(operand, kind)
        return _converts(decoder.kind_of(operand, kind), kind)
    return False


def _converts(have: str, want: str) -> bool:
    """True if a run can do what values.converter does."""
    if have == want:
        return True
    if "pred" in (have, want) or 1 in (SIZES[have], SIZES[want]):
        return False
    return have[0] != "i" or SIZES[have] >= SIZES[want]


class _Input(NamedTuple):
    """A slot's value at the start of a run, or one half of a pair."""

    slot: int
    part: int
    kind: str


class _Computed(NamedTuple):
    """A value in scratch memory."""

    offset: int
    size: int


_Lanes = _Input | _Computed
_Any = _Lanes | tuple[_Lanes, _Lanes]


class _Compiler:
    """Executes a run on symbols."""

    def __init__(self, decoder: OperandDecoder) -> None:
        self.decoder = decoder
        self.steps: list[tuple[int, int, int, int, int]] = []
        self.size = 0
        self.offsets: dict[_Input, int] = {}
        self.values: dict[int, _Any] = {}
        self.written: dict[int, None] = {}

    def _set(self, register: Register, value: _Any) -> None:
        self.values[register.number] = value
        self.written[register.number] = None

    def add(self, instruction: Instruction, unit: Pure | Unit) -> None:
        """One instruction."""
        for item, slot, kind in _parameters(self.decoder, instruction) or ():
            if isinstance(item, Register):
                value = self._convert(self._value(slot, kind), kind, self.decoder.home(item))
                self._set(item, value)
        target, *operands = instruction.operands
        if isinstance(unit, Unit):
            if unit.prefix == "mov":
                self._move_vector(target, operands[0])
            return
        home = self.decoder.home(target)
        opcode = instruction.opcode
        if opcode in _MOVES:
            self._set(target, self._read(operands[0], home))
            return
        if opcode in _SELECTS:
            first, second, which = operands
            taken = [self._read(first, home), self._read(second, home), self._read(which, "pred")]
            size = SIZES[home]
            self._set(target, self._emit(f"select.u{size}", size, taken))
            return
        operation = OPERATIONS[opcode, len(operands)]
        read = [self._read(o, kind) for o, kind in zip(operands, unit.operands, strict=True)]
        result: _Any
        if unit.result == "pair":
            low, high = (self._emit(operation, 4, [pair[half] for pair in read]) for half in (0, 1))
            result = (low, high)
        else:
            result = self._emit(operation, SIZES[unit.result], read)
        self._set(target, self._convert(result, unit.result, home))

    def _move_vector(self, target: Operand, source: Operand) -> None:
        if isinstance(target, Vector):
            home = self.decoder.home(source)
            part, _, low, high = _JOINS[SIZES[home]]
            whole = self._value(source.number, home)
            halves = (
                whole
                if home == "pair"
                else tuple(self._emit(operation, part, [whole]) for operation in (low, high))
            )
            for item, half in zip(target.items, halves, strict=True):
                if isinstance(item, Register):
                    self._set(item, self._convert(half, f"u{part}", self.decoder.home(item)))
            return
        home = self.decoder.home(target)
        part, join, _, _ = _JOINS[SIZES[home]]
        first, second = (self._read(item, f"u{part}") for item in source.items)
        is_pair = home == "pair"
        whole = (first, second) if is_pair else self._emit(join, SIZES[home], [first, second])
        self._set(target, whole)

    def _read(self, operand: Operand, kind: str) -> _Any:
        """An operand as `kind`."""
        if isinstance(operand, Register):
            home = self.decoder.home(operand)
            return self._convert(self._value(operand.number, home), home, kind)
        slot = self.decoder.source(operand, kind).slot
        have = self.decoder.kind_of(operand, kind)
        return self._convert(self._value(slot, have), have, kind)

    def _value(self, slot: int, kind: str) -> _Any:
        if slot not in self.values:
            self.values[slot] = (
                (_Input(slot, 0, "f4"), _Input(slot, 1, "f4"))
                if kind == "pair"
                else _Input(slot, -1, kind)
            )
        return self.values[slot]

    def _convert(self, value: _Any, have: str, want: str) -> _Any:
        if have == want:
            return value
        if have == "pair":
            return self._convert(self._emit("join.u4", 8, list(value)), "u8", want)
        if want == "pair":
            whole = self._convert(value, have, "u8")
            return self._emit("u4.u8", 4, [whole]), self._emit("high.u8", 4, [whole])
        size, wanted = SIZES[have], SIZES[want]
        while size != wanted:
            following = size * 2 if wanted > size else size // 2
            value = self._emit(_RESIZE[size, following], following, [value])
            size = following
        return value

    def _emit(self, operation: str, size: int, operands: list[_Any]) -> _Computed:
        places = [self._offset(operand) for operand in operands]
        result = _Computed(self._allocate(size), size)
        a, b, c = (places + [0, 0])[:3]
        self.steps.append((CODES[operation], result.offset, a, b, c))
        return result

    def _offset(self, value: _Lanes) -> int:
        if isinstance(value, _Computed):
            return value.offset
        if value not in self.offsets:
            self.offsets[value] = self._allocate(SIZES[value.kind])
        return self.offsets[value]

    def _allocate(self, size: int) -> int:
        offset = self.size
        self.size += size * LANES
        return offset

    def _constant(self, value: _Input) -> np.ndarray | None:
        """The constant in a slot; None for registers and for values that differ between warps."""
        index = value.slot - len(self.decoder.homes)
        held: Value | str = self.decoder.slots[index] if index >= 0 else ""
        if isinstance(held, str):
            return None
        return held[value.part] if isinstance(held, tuple) else held

    def block(self, written: list[int]) -> object:
        """The run, which leaves behind the registers listed."""
        leaves: dict[tuple, int] = {}
        rows: dict[str, list[int]] = {}
        outputs = []
        for number in written:
            home, value = self.decoder.homes[number], self.values[number]
            halves = value if home == "pair" else (value,)
            kind = "f4" if home == "pair" else home
            places = [self._leaf(half, kind, rows, leaves) for half in halves]
            outputs.append((number, places[0], places[1] if len(places) > 1 else -1))
        groups = list(rows)
        scratch = np.zeros(self.size, np.uint8)
        inputs = []
        for value, offset in self.offsets.items():
            constant = self._constant(value)
            if constant is None:
                inputs.append((value.slot, value.part, SIZES[value.kind], offset))
            else:
                raw = np.ascontiguousarray(constant).view(np.uint8)
                scratch[offset : offset + len(raw)] = raw
        return native.core.Block(
            self.steps,
            scratch.tobytes(),
            inputs,
            [
                (partial(np.empty, (len(places), LANES), DTYPES[kind]), SIZES[kind], places)
                for kind, places in rows.items()
            ],
            [(groups.index(a) if isinstance(a, str) else a, b, c) for a, b, c in leaves],
            outputs,
        )

    def _leaf(
        self, value: _Lanes, kind: str, rows: dict[str, list[int]], leaves: dict[tuple, int]
    ) -> int:
        """Number of what goes into a slot: an array that is there already, or a new row."""
        if isinstance(value, _Input) and value.kind == kind:
            key: tuple = (-1, value.slot, value.part)
        else:
            offset = self._offset(value)
            places = rows.setdefault(kind, [])
            if offset not in places:
                places.append(offset)
            key = (kind, places.index(offset), -1)
        return leaves.setdefault(key, len(leaves))


def join_runs(decoder: OperandDecoder, segments: list[Segment], following: list[list[int]]) -> None:
    """Lets full warps execute the runs of all segments in one step each."""
    live = _live_at_end(segments, following) if CODES else []
    for index, segment in enumerate(segments):
        segment.fast, segment.fast_lines = [], []
        runs = dict(_runs(segment)) if segment.deferred else {}
        needed = _live_after(segment, live[index], set(runs.values())) if runs else {}
        position = 0
        while position < len(segment.steps):
            end = runs.get(position)
            if end is None:
                segment.fast.append(segment.step(position, is_full=True))
                segment.fast_lines.append(segment.steps[position].line)
                position += 1
                continue
            segment.fast.append(_lazy_step(decoder, segment, (position, end), needed[end]))
            segment.fast_lines.append(segment.steps[position].line)
            position = end


def _runs(segment: Segment) -> Iterator[tuple[int, int]]:
    """(first, end) of runs of deferred instructions."""
    first = 0
    for position in range(len(segment.steps) + 1):
        if position == len(segment.steps) or position not in segment.deferred:
            if position - first >= SHORTEST:
                yield first, position
            first = position + 1


def _live_at_end(segments: list[Segment], following: list[list[int]]) -> list[int]:
    """Bit sets of the registers that something may read after each segment."""
    used, killed = [], []
    for segment in segments:
        live = segment.last_use.touched
        kills = 0
        for use in reversed(segment.uses):
            live = live & ~use.replaced | use.read
            kills |= use.replaced
        used.append(live)
        killed.append(kills)
    at_start, at_end = list(used), [0] * len(segments)
    before: list[list[int]] = [[] for _ in range(len(segments) + 1)]
    for index, targets in enumerate(following):
        for target in targets:
            before[target].append(index)
    changed = set(range(len(segments)))
    while changed:
        index = max(changed)
        changed.remove(index)
        live = 0
        for target in following[index]:
            if target < len(segments):
                live |= at_start[target]
        at_end[index] = live
        start = used[index] | live & ~killed[index]
        if start != at_start[index]:
            at_start[index] = start
            changed.update(before[index])
    return at_end


def _live_after(segment: Segment, live: int, places: set[int]) -> dict[int, int]:
    """Bit sets of the registers that are read from some places of a segment on."""
    live |= segment.last_use.touched
    found = {}
    for position in range(len(segment.steps), -1, -1):
        if position in places:
            found[position] = live
        if position:
            use = segment.uses[position - 1]
            live = live & ~use.replaced | use.read
    return found


def _lazy_step(
    decoder: OperandDecoder, segment: Segment, where: tuple[int, int], live: int
) -> Callable[[object], None]:
    """The step of a run, compiled at its first execution."""
    first, end = where
    run: Callable[[list], bool] | None = None

    def step(warp: object) -> None:
        nonlocal run
        if run is None:
            compiler = _Compiler(decoder)
            for position in range(first, end):
                compiler.add(segment.steps[position], segment.deferred[position])
            run = compiler.block([n for n in compiler.written if live >> n & 1]).run
        if not run(warp.slots):
            for position in range(first, end):
                segment.step(position, is_full=True)(warp)

    return step
