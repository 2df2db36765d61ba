"""Straight runs of instructions as single steps of the compiled core (ffi/emulator_block.cc).

A run reads registers, computes in a memory of its own, and writes those registers that something
may read afterwards: creating 32-lane arrays is what most of the time goes into. It holds
arithmetic, and what else reads nothing but registers, parameters and the CTA's own shared memory,
so that it can be given up before it has changed anything: the steps one by one then find the fault.
What looks at other lanes, or loads, is in runs of full warps only. Runs are compiled when they are
met first. Without the extension nothing is joined.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from jax_fa.emulator import mufu, native
from jax_fa.emulator.cta import Warp
from jax_fa.emulator.faults import EmulationError
from jax_fa.emulator.lanes import two_results
from jax_fa.emulator.loadstore import loaded_kind
from jax_fa.emulator.operands import OperandDecoder
from jax_fa.emulator.program import FastStep, Segment, Step
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

SHORTEST = 2
"""Instructions from which on a run of arithmetic is worth its call; of others a single one is."""


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


def _narrow_operations() -> dict[tuple[str, int], str]:
    """Those on 16 bits and less."""
    logic = {(f"{name}.b16", 2): f"{name}.u2" for name in ("and", "or", "xor")}
    sums = {
        (f"{name}.{sign}16", 2): f"{name}.u2" for name in ("add", "sub") for sign in ("s", "u", "b")
    }
    return (
        logic
        | sums
        | {
            ("shl.b16", 2): "shl.u2",
            ("shr.b16", 2): "shr.u2",
            ("shr.u16", 2): "shr.u2",
            ("shr.s16", 2): "shr.i2",
            ("mul.wide.s16", 2): "mulwide.i2",
            ("mul.wide.u16", 2): "mulwide.u2",
            ("cvt.u32.u16", 1): "u4.u2",
            ("cvt.u16.u32", 1): "u2.u4",
            ("cvt.s32.s16", 1): "i4.i2",
            ("cvt.s16.s8", 1): "i2.i1",
            ("cvt.s8.s32", 1): "i1.i4",
        }
    )


OPERATIONS = _operations() | _narrow_operations()
_MOVES = {f"mov.{type_}" for type_ in "b32 b64 u32 s32 u64 s64 f32 f64 pred b16 u16 s16".split()}
_SELECTS = {f"selp.{type_}" for type_ in "b32 b64 u32 s32 u64 s64 f32".split()}
# Size of a part of a register of so many bytes, and what joins two of them, or takes one.
_JOINS = {4: (2, "join.u2", "u2.u4", "high.u4"), 8: (4, "join.u4", "u4.u8", "high.u8")}
_RESIZE = {
    (1, 2): "u2.u1",
    (2, 4): "u4.u2",
    (4, 8): "u8.u4",
    (8, 4): "u4.u8",
    (4, 2): "u2.u4",
    (2, 1): "u1.u2",
}

_SHUFFLE = re.compile(r"shfl\.sync\.(up|down|bfly|idx)\.b32")
_PRODUCT = re.compile(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32")
_MATRICES = re.compile(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")
_LOAD = re.compile(r"ld\.shared(?:\.v([24]))?\.([bfsu](?:16|32|64))")


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
        rule = _RULES.get(unit.prefix)
        return rule is not None and rule.serves(decoder, instruction)
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


def _items(operand: Operand) -> tuple[Operand, ...]:
    """What a vector consists of, or the single operand."""
    return operand.items if isinstance(operand, Vector) else (operand,)


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
    items = _items(target)
    kind = loaded_kind(instruction.opcode.rpartition(".")[2])
    slots = decoder.parameters(address, kind, len(items))
    if slots is None:
        return None
    return [_Loaded(item, slot, kind) for item, slot in zip(items, slots, strict=True)]


def _loaded(instruction: Instruction) -> tuple[str, tuple[Operand, ...]]:
    """The kind of what a load from shared memory gives, and where that goes."""
    return loaded_kind(_LOAD.fullmatch(instruction.opcode)[2]), _items(instruction.operands[0])


def _is_load(decoder: OperandDecoder, instruction: Instruction) -> bool:
    parameters = _parameters(decoder, instruction)
    if parameters is not None:
        return all(_takes(decoder, item, kind) for item, _, kind in parameters)
    match = _LOAD.fullmatch(instruction.opcode)
    if match is None:
        return False
    kind, items = _loaded(instruction)
    is_complete = len(items) == int(match[1] or 1)
    return is_complete and _reads_shared(decoder, instruction, kind)


def _is_matrix_load(decoder: OperandDecoder, instruction: Instruction) -> bool:
    match = _MATRICES.fullmatch(instruction.opcode)
    if match is None or len(_items(instruction.operands[0])) != int(match[1]):
        return False
    return _reads_shared(decoder, instruction, "u4")


def _reads_shared(decoder: OperandDecoder, instruction: Instruction, kind: str) -> bool:
    """True if a run can read the address of a load, and take what it gives."""
    target, address = instruction.operands
    are_taken = all(_takes(decoder, item, kind) for item in _items(target))
    return are_taken and _reads(decoder, address.base, "u4")


def _is_shuffle(decoder: OperandDecoder, instruction: Instruction) -> bool:
    target, *operands = instruction.operands
    value, flag = two_results(target)
    return (
        _SHUFFLE.fullmatch(instruction.opcode) is not None
        and _takes(decoder, value, "u4")
        and _takes(decoder, flag, "pred")
        and all(_reads(decoder, operand, "u4") for operand in operands)
    )


def _is_product(decoder: OperandDecoder, instruction: Instruction) -> bool:
    if _PRODUCT.fullmatch(instruction.opcode) is None:
        return False
    d, a, b, c = (_items(operand) for operand in instruction.operands)
    return (
        (len(d), len(a), len(b), len(c)) == (4, 4, 2, 4)
        and all(_takes(decoder, item, "f4") for item in d)
        and all(_reads(decoder, item, "u4") for item in (*a, *b))
        and all(_reads(decoder, item, "f4") for item in c)
    )


def _takes(decoder: OperandDecoder, item: Operand, kind: str) -> bool:
    """True if a run can put a value of a kind where an instruction wants it."""
    is_register = isinstance(item, Register)
    return isinstance(item, Sink) or is_register and _converts(kind, decoder.home(item))


def _is_join_or_split(decoder: OperandDecoder, instruction: Instruction) -> bool:
    target, source = instruction.operands
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
    if "pred" in (have, want):
        return False
    if 1 in (SIZES[have], SIZES[want]):
        return "u2" in (have, want)
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
    """Executes a run on symbols, for full warps or for masked ones."""

    def __init__(self, decoder: OperandDecoder, *, is_full: bool) -> None:
        self.decoder = decoder
        self.is_full = is_full
        self.steps: list[tuple[int, ...]] = []
        self.counts: list[tuple[str, int]] = []
        self.size = 0
        self.offsets: dict[_Input, int] = {}
        self.values: dict[int, _Any] = {}
        self.written: dict[int, None] = {}

    def _set(self, register: Register, value: _Any) -> None:
        self.values[register.number] = value
        self.written[register.number] = None

    def add(self, instruction: Instruction, unit: Pure | Unit) -> None:
        """One instruction."""
        if isinstance(unit, Unit):
            _RULES[unit.prefix].add(self, instruction)
            return
        target, *operands = instruction.operands
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

    def move_vector(self, instruction: Instruction) -> None:
        """Handles mov between a register and its halves."""
        target, source = instruction.operands
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

    def load(self, instruction: Instruction) -> None:
        """A load from parameters or from shared memory."""
        parameters = _parameters(self.decoder, instruction)
        if parameters is not None:
            for item, slot, kind in parameters:
                self._set_all([item], [self._value(slot, kind)], kind)
            return
        kind, items = _loaded(instruction)
        rows = self._emit_load(f"load.u{SIZES[kind]}", instruction, SIZES[kind], len(items))
        self._set_all(items, rows, kind)

    def load_matrices(self, instruction: Instruction) -> None:
        """Handles ldmatrix."""
        items = _items(instruction.operands[0])
        operation = "ldmatrix.trans" if ".trans." in instruction.opcode else "ldmatrix"
        self._set_all(items, self._emit_load(operation, instruction, 4, len(items)), "u4")
        self.counts.append(("bytes ldmatrix", 4 * LANES * len(items)))

    def shuffle(self, instruction: Instruction) -> None:
        """Handles shfl.sync, of a full warp."""
        target, source, shift, limit, _ = instruction.operands
        value, flag = two_results(target)
        mode = _SHUFFLE.fullmatch(instruction.opcode)[1]
        where = [self._read(shift, "u4"), self._read(limit, "u4")]
        taken = self._emit(f"shfl.{mode}", 4, [self._read(source, "u4"), *where])
        self._set_all([value], [taken], "u4")
        if isinstance(flag, Register):
            self._set(flag, self._emit(f"inside.{mode}", 1, where))

    def multiply(self, instruction: Instruction) -> None:
        """Handles mma.sync."""
        d, a, b, c = (_items(operand) for operand in instruction.operands)
        factors = [self._read(item, "u4") for item in (*a, *b)]
        addends = [self._read(item, "f4") for item in c]
        type_ = _PRODUCT.fullmatch(instruction.opcode)[1]
        first = self._emit(f"mma.{type_}", 4, [*factors, *addends], rows=len(d))
        self._set_all(d, self._rows(first, len(d)), "f4")
        self.counts.append(("flops mma.sync", 2 * 16 * 8 * 16))

    def _set_all(self, items: Sequence[Operand], values: Sequence[_Any], kind: str) -> None:
        """Values of a kind into what an instruction writes."""
        for item, value in zip(items, values, strict=True):
            if isinstance(item, Register):
                self._set(item, self._convert(value, kind, self.decoder.home(item)))

    def _emit_load(
        self, operation: str, instruction: Instruction, size: int, rows: int
    ) -> list[_Computed]:
        address = instruction.operands[1]
        place = self._offset(self._read(address.base, "u4"))
        result = _Computed(self._allocate(size * rows), size)
        self.steps.append((CODES[operation], result.offset, place, rows, address.offset))
        return self._rows(result, rows)

    def _rows(self, first: _Computed, count: int) -> list[_Computed]:
        """A result of several rows, row by row."""
        size = first.size
        return [_Computed(first.offset + size * LANES * row, size) for row in range(count)]

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
        if have == "i1":
            return self._emit("i2.i1", 2, [value])
        size, wanted = SIZES[have], SIZES[want]
        while size != wanted:
            following = size * 2 if wanted > size else size // 2
            value = self._emit(_RESIZE[size, following], following, [value])
            size = following
        return value

    def _emit(self, operation: str, size: int, operands: list[_Any], *, rows: int = 1) -> _Computed:
        places = [self._offset(operand) for operand in operands]
        result = _Computed(self._allocate(size * rows), size)
        self.steps.append((CODES[operation], result.offset, *places))
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
        """Number of what goes into a slot: an array that is there already, or a new row.

        A row of its own in masked warps, other lanes of which keep what is in the slot.
        """
        if not self.is_full:
            places = rows.setdefault(kind, [])
            places.append(self._offset(value))
            return leaves.setdefault((kind, len(places) - 1, -1), len(leaves))
        if isinstance(value, _Input) and value.kind == kind:
            key: tuple = (-1, value.slot, value.part)
        else:
            offset = self._offset(value)
            places = rows.setdefault(kind, [])
            if offset not in places:
                places.append(offset)
            key = (kind, places.index(offset), -1)
        return leaves.setdefault(key, len(leaves))


class _Rule(NamedTuple):
    """Whether a run may hold an instruction that is not pure, and how it is added."""

    serves: Callable[[OperandDecoder, Instruction], bool]
    add: Callable[[_Compiler, Instruction], None]


# By the name under which they are registered. What depends on the mask is for full warps.
_RULES = {
    "mov": _Rule(_is_join_or_split, _Compiler.move_vector),
    "ld": _Rule(_is_load, _Compiler.load),
    "ldmatrix.sync.aligned": _Rule(_is_matrix_load, _Compiler.load_matrices),
    "shfl.sync": _Rule(_is_shuffle, _Compiler.shuffle),
    "mma.sync.aligned": _Rule(_is_product, _Compiler.multiply),
}


def join_runs(decoder: OperandDecoder, segments: list[Segment], following: list[list[int]]) -> None:
    """Lets warps execute the runs of all segments in one step each."""
    live = _live_at_end(segments, following) if CODES else []
    for index, segment in enumerate(segments):
        for is_full, fast in ((True, segment.fast), (False, segment.fast_masked)):
            runs = dict(_runs(segment, is_full)) if segment.deferred else {}
            needed = _live_after(segment, live[index], set(runs.values())) if runs else {}
            position = 0
            while position < len(segment.steps):
                end = runs.get(position)
                line = segment.steps[position].line
                if end is None:
                    # Few of those that only masked warps execute one by one are ever met.
                    is_late = not is_full and position in segment.deferred
                    one = partial(_masked_step, segment, position)
                    fast.append(FastStep(one if is_late else segment.step(position, is_full), line))
                    position += 1
                    continue
                run = _Run(segment, position, end, needed[end], is_full)
                fast.append(FastStep(_lazy_step(decoder, run), line))
                position = end


def _masked_step(segment: Segment, position: int, warp: Warp) -> None:
    segment.step(position, is_full=False)(warp)


def _runs(segment: Segment, is_full: bool) -> Iterator[tuple[int, int]]:
    """(first, end) of runs of deferred instructions; those of masked warps are pure, or moves."""
    first, is_worth_it = 0, False
    for position in range(len(segment.steps) + 1):
        unit = segment.deferred.get(position)
        is_more = isinstance(unit, Unit) and unit.prefix != "mov"
        if unit is None or not is_full and is_more:
            if is_worth_it or position - first >= SHORTEST:
                yield first, position
            first, is_worth_it = position + 1, False
        else:
            is_worth_it |= is_more


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


class _Run(NamedTuple):
    """Steps of a segment that are one, and the registers that may be read afterwards."""

    segment: Segment
    first: int
    end: int
    live: int
    is_full: bool


def _run_one_by_one(segment: Segment, positions: range, warp: Warp, *, is_full: bool) -> None:
    """Executes the steps of a run that was given up; a fault is that of its own line."""
    for position in positions:
        try:
            segment.step(position, is_full)(warp)
        except EmulationError as error:
            warp.line = segment.steps[position].line
            error.place = error.place or warp.place
            raise


def _lazy_step(decoder: OperandDecoder, where: _Run) -> Step:
    """The step of a run, compiled at its first execution."""
    segment, is_full = where.segment, where.is_full
    positions = range(where.first, where.end)
    run: Callable[[list, object, np.ndarray | None], bool] | None = None
    counts: list[tuple[str, int]] = []

    def step(warp: Warp) -> None:
        nonlocal run, counts
        if run is None:
            compiler = _Compiler(decoder, is_full=is_full)
            for position in positions:
                compiler.add(segment.steps[position], segment.deferred[position])
            run = compiler.block([n for n in compiler.written if where.live >> n & 1]).run
            counts = compiler.counts
        if not run(warp.slots, warp.cta.shared.core, None if is_full else warp.mask):
            _run_one_by_one(segment, positions, warp, is_full=is_full)
            return
        for name, amount in counts:
            warp.machine.count(name, amount)

    return step
