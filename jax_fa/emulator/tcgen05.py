"""tcgen05 (sm_100 family): tensor memory allocation, loads and stores, the matrix unit.

Multiplies, copies and commits issued by one CTA (or, for cta_group::2, by one pair) form a FIFO
that the scheduler works off. Operands and accumulators are claimed from issue to completion.

PTX promises less than a FIFO: multiplies keep their order if they have accumulator, shape and kind
in common, copies come before the multiplies behind them, commits behind everything. With
``Options.ordered_products`` False only that holds: every accumulator, shape and kind has a FIFO of
its own, and an operation that shares cells with an unfinished one that it may overtake is a
``ProductOrderError``. Without ``Options.strict`` such operations are collected, and wait.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jax_fa.emulator.barriers import Mbarrier
from jax_fa.emulator.cta import Cta, InFlight, Wait, Warp
from jax_fa.emulator.dot import Factors, Rule, multiply_add
from jax_fa.emulator.faults import (
    OutOfBoundsError,
    ProductOrderError,
    TensorMemoryError,
    UnknownInstructionError,
)
from jax_fa.emulator.layouts import Tile, matrix_descriptor
from jax_fa.emulator.loadstore import address_reader
from jax_fa.emulator.machine import Machine, Operation
from jax_fa.emulator.matrix import SharedOperand
from jax_fa.emulator.memory import CHUNK, OFFSET_MASK, RANK_SHIFT
from jax_fa.emulator.numerics import matrix_values
from jax_fa.emulator.operands import OperandDecoder
from jax_fa.emulator.ptx import Address, Instruction, Register, Vector
from jax_fa.emulator.registry import Modifiers, Run, control, effect
from jax_fa.emulator.sync import signalled_mbarrier
from jax_fa.emulator.tmem import Cells, User
from jax_fa.emulator.values import LANES


def _group(mods: Modifiers) -> int:
    return int(mods.need("cta_group::1 cta_group::2")[-1])


def _pipe(warp: Warp, group: int) -> tuple:
    """Key of the FIFO of the CTA or pair."""
    rank = warp.cta.rank
    return ("tcgen05", id(warp.cta.cluster), rank & ~1 if group == 2 else rank)


def _pair(warp: Warp, group: int) -> list[Cta]:
    """The CTAs an instruction of the group works on, even rank first."""
    if group == 1:
        return [warp.cta]
    ctas, first = warp.cta.cluster.ctas, warp.cta.rank & ~1
    if first + 1 >= len(ctas):
        raise OutOfBoundsError("cta_group::2 needs a cluster with an even number of CTAs")
    return ctas[first : first + 2]


# Order.


class Issued:
    """A multiply or copy from its issue on: its claims in tensor memory, and what it waits for.

    Attributes:
      line: in the PTX.
      who: for messages.
      pipe: of the CTA or pair.
      stream: what it has in common with the operations that it keeps its order with: kind, shape
        and address of the accumulator. None for a copy.
      a: column of A, None if A is in shared memory.
      operation: what was submitted.
    """

    def __init__(self, warp: Warp, ins: Instruction, group: int) -> None:
        self.line = ins.line
        self.who = f"the {ins.opcode} issued by {warp} at line {ins.line}"
        self.pipe = _pipe(warp, group)
        self.stream: tuple[str, tuple[int, int, int], int] | None = None
        self.a: int | None = None
        self.operation: Operation | None = None
        self._warp = warp
        self._claims: list[tuple[Cta, object]] = []
        self._before: list[Issued] = []

    def hold(self, cta: Cta, cells: Cells, access: str) -> None:
        """Claims cells until completion."""
        user = User(self.who, cells, access, self)
        if not self._warp.machine.options.ordered_products:
            for other in cta.tmem.sharers(user):
                self._follow(other, access)
        key = object()
        cta.tmem.begin(key, user)
        self._claims.append((cta, key))

    def submit(self, run: Callable[[], None]) -> None:
        """Hands ``run`` to the matrix unit."""
        machine = self._warp.machine

        def work() -> None:
            for first in self._before:
                machine.finish(first.operation, first.key(machine))
            self._before.clear()
            run()
            for cta, key in self._claims:
                cta.tmem.end(key)

        self.operation = Operation(self.who, (work,), self._warp.place)
        machine.submit(self.operation, self.key(machine))

    def key(self, machine: Machine) -> tuple:
        """Key of the FIFO that it is in."""
        return self.pipe if machine.options.ordered_products else (*self.pipe, self.stream)

    def _follow(self, other: User, access: str) -> None:
        """Stays behind an operation that it shares cells with, by a promise or not."""
        first = other.issued
        if first.pipe == self.pipe and first.stream == self.stream is not None:
            return
        self._before.append(first)
        if first.stream is None and self.stream is not None:
            return
        error = ProductOrderError(
            f"{self.who} may {access} TMEM cells before {first.who} {other.access}s them: PTX "
            "keeps the order of multiplies of one accumulator, shape and kind only",
            first,
            self,
        )
        self._warp.machine.report(error, self._warp.place)


# Allocation.


@control("tcgen05.alloc")
def allocate(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """tcgen05.alloc [shared], columns: blocks until there is room."""
    _group(mods)
    mods.drop("sync aligned shared::cta shared b32").done()
    at = address_reader(decoder, ins.operands[0], "shared")
    columns = decoder.read(ins.operands[1], "u4")

    def run(warp: Warp, mask: np.ndarray) -> Wait | None:
        warp.need_full(mask, ins.opcode)
        tmem, shared = warp.cta.tmem, warp.cta.shared
        count, address = int(columns(warp.slots)[0]), int(at(warp.slots)[0])

        def take() -> bool:
            start = tmem.allocate(count)
            if start is None:
                return False
            offset = address & OFFSET_MASK
            shared.views[4][offset // 4] = start
            shared.written[offset : offset + 4] = 1
            return True

        if take():
            return None
        return Wait(take, lambda: f"waits for {count} free TMEM columns; {tmem.blocks} in use")

    return run


@effect("tcgen05.dealloc")
def deallocate(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """tcgen05.dealloc address, columns."""
    _group(mods)
    mods.drop("sync aligned b32").done()
    address, columns = (decoder.read(o, "u4") for o in ins.operands)

    def run(warp: Warp, mask: np.ndarray) -> None:
        warp.need_full(mask, ins.opcode)
        warp.cta.tmem.free(int(address(warp.slots)[0]), int(columns(warp.slots)[0]))
        warp.machine.progress += 1

    return run


@effect("tcgen05.relinquish_alloc_permit")
def relinquish(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """No further tcgen05.alloc from this CTA."""
    _group(mods)
    mods.drop("sync aligned").done()

    def run(warp: Warp, mask: np.ndarray) -> None:
        warp.need_full(mask, ins.opcode)
        warp.cta.tmem.may_allocate = False

    return run


@effect("tcgen05.fence::before_thread_sync tcgen05.fence::after_thread_sync")
def tcgen05_fence(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """Orders tcgen05 operations around thread synchronisation, which is in order here."""
    mods.done()
    return lambda warp, mask: None


# Loads and stores.


@lru_cache(maxsize=64)
def fragment_cells(shape: str, registers: int, packed: bool) -> tuple[np.ndarray, np.ndarray]:
    """(lane, column) of register i of lane l, relative to the address, as [i, l] arrays.

    With `packed` (pack::16b) the column is that of the low half; the high half is the next one.
    """
    i, lane = np.arange(registers)[:, None], np.arange(LANES)[None, :]
    t, q = lane // 4, lane % 4
    if shape == "32x32b":
        row, column = lane + 0 * i, i + 0 * lane
    elif shape == "16x256b":
        row, column = t + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * q + i % 2
    elif shape == "16x128b":
        row, column = t + 8 * (i % 2), 4 * (i // 2) + q
    else:
        row, column = t + 8 * (q % 2) + 0 * i, 2 * i + q // 2
    return row, column * 2 if packed else column


_PER_REPEAT = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}
_REPEATS = "x1 x2 x4 x8 x16 x32 x64 x128"


class _Transfer(NamedTuple):
    """The common part of ld and st."""

    shape: str
    registers: int
    packed: bool
    address: Callable[[list], np.ndarray]
    opcode: str

    def cells(self, warp: Warp) -> tuple[Cells, tuple | None]:
        """The rectangle touched, and for irregular shapes the (lanes, columns) per register."""
        address = int(self.address(warp.slots)[0])
        lane, column = address >> 16, address & 0xFFFF
        rows = 32 if self.shape == "32x32b" else 16
        first = 32 * (warp.index % 4)
        if not first <= lane <= first + 32 - rows:
            raise TensorMemoryError(
                f"{self.opcode} of warp {warp.index} at TMEM lane {lane}: the "
                f"warp reaches lanes {first}..{first + 31} only"
            )
        row, offset = fragment_cells(self.shape, self.registers, self.packed)
        width = int(offset.max()) + 1 + self.packed
        cells = warp.cta.tmem.cells(lane, column, rows, width)
        if self.shape == "32x32b" and not self.packed:
            return cells, None
        return cells, (lane + row, column + offset)


def _transfer(
    decoder: OperandDecoder, ins: Instruction, mods: Modifiers, address: Address
) -> _Transfer:
    mods.drop("sync aligned")
    shape = mods.need("32x32b 16x64b 16x128b 16x256b")
    repeat = int(mods.need(_REPEATS)[1:])
    packed = mods.take("pack::16b", "unpack::16b") is not None
    mods.drop("b32").done()
    return _Transfer(
        shape,
        _PER_REPEAT[shape] * repeat,
        packed,
        address_reader(decoder, address, "shared"),
        ins.opcode,
    )


# A control instruction, so that with strict_ld what follows is checked for its registers.
@control("tcgen05.ld")
def tmem_load(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """tcgen05.ld.sync.aligned.shape.xN registers, [address]."""
    transfer = _transfer(decoder, ins, mods, ins.operands[1])
    target = ins.operands[0]
    items = target.items if isinstance(target, Vector) else (target,)
    if len(items) != transfer.registers:
        raise mods.error(f"needs {transfer.registers} registers")
    kinds = ["f4" if decoder.home(item) == "f4" else "u4" for item in items]
    write = decoder.write_rows(target, kinds)
    are_floats = set(kinds) == {"f4"}
    written = sum({1 << r.number for r in items if isinstance(r, Register)})

    def run(warp: Warp, mask: np.ndarray) -> None:
        warp.need_full(mask, ins.opcode)
        tmem = warp.cta.tmem
        cells, scattered = transfer.cells(warp)
        block = tmem.load(cells, ins.opcode)
        if scattered is None:
            values = np.ascontiguousarray(block.T)
        elif transfer.packed:
            lanes, columns = scattered
            values = (tmem.data[lanes, columns] & 0xFFFF) | (tmem.data[lanes, columns + 1] << 16)
        else:
            values = tmem.data[scattered]
        floats = values.view(np.float32)
        rows = (
            floats
            if are_floats
            else [floats[i] if kind == "f4" else values[i] for i, kind in enumerate(kinds)]
        )
        write(warp.slots, rows, mask)
        warp.machine.count("bytes TMEM load", 4 * values.size)
        if warp.machine.options.strict_ld:
            what = f"tcgen05.ld at line {ins.line}"
            flight = InFlight(written, 0, what, "tcgen05.wait::ld")
            warp.hold(flight)
            warp.state.setdefault("tcgen05.ld", []).append(flight)

    return run


@effect("tcgen05.st")
def tmem_store(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """tcgen05.st.sync.aligned.shape.xN [address], registers."""
    transfer = _transfer(decoder, ins, mods, ins.operands[0])
    reads = decoder.read_all(ins.operands[1], "u4")
    if len(reads) != transfer.registers:
        raise mods.error(f"needs {transfer.registers} registers")

    def run(warp: Warp, mask: np.ndarray) -> None:
        warp.need_full(mask, ins.opcode)
        tmem, slots = warp.cta.tmem, warp.slots
        values = np.concatenate([read(slots) for read in reads]).reshape(-1, LANES)
        cells, scattered = transfer.cells(warp)
        who = f"tcgen05.st of warp {warp.index}"
        if scattered is None:
            tmem.store(cells, values.T, warp.index, who)
        elif transfer.packed:
            lanes, columns = scattered
            tmem.store((lanes, columns), values & 0xFFFF, warp.index, who)
            tmem.store((lanes, columns + 1), values >> 16, warp.index, who)
        else:
            tmem.store(scattered, values, warp.index, who)
        warp.machine.count("bytes TMEM store", 4 * values.size)

    return run


@effect("tcgen05.wait::ld tcgen05.wait::st")
def tmem_wait(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """tcgen05.wait::ld gives registers back; wait::st makes the warp's stores visible."""
    mods.drop("sync aligned").done()
    loads = "wait::ld" in ins.opcode

    def run(warp: Warp, mask: np.ndarray) -> None:
        warp.need_full(mask, ins.opcode)
        if loads:
            warp.release(warp.state.pop("tcgen05.ld", []))
        else:
            warp.cta.tmem.settle(warp.index)

    return run


# Multiply.

_TYPES = {"f16": {0: "f16", 1: "bf16"}, "tf32": {2: "tf32"}, "f8f6f4": {0: "e4m3", 1: "e5m2"}}


class Shape(NamedTuple):
    """A decoded instruction descriptor; rows and columns are those of the whole pair."""

    half: bool
    a_type: str
    b_type: str
    is_negative: bool
    a_mn: bool
    b_mn: bool
    columns: int
    rows: int
    depth: int


def instruction_descriptor(bits: int, kind: str) -> Shape:
    """Decodes the 32-bit instruction descriptor of kind f16, tf32 or f8f6f4."""
    types = _TYPES[kind]
    a_code, b_code, d_code = bits >> 7 & 7, bits >> 10 & 7, bits >> 4 & 3
    if a_code not in types or b_code not in types or d_code > 1 or bits & 0xF:
        raise UnknownInstructionError(
            f"instruction descriptor {bits:#x} of kind::{kind}: types "
            f"{d_code}, {a_code}, {b_code} or sparsity/saturation are "
            "not implemented"
        )
    return Shape(
        d_code == 0,
        types[a_code],
        types[b_code],
        bool((bits >> 13 ^ bits >> 14) & 1),
        bool(bits >> 15 & 1),
        bool(bits >> 16 & 1),
        (bits >> 17 & 63) * 8,
        (bits >> 24 & 31) * 16,
        {"f16": 16, "tf32": 8, "f8f6f4": 32}[kind],
    )


def accumulator_cells(cta: Cta, address: int, rows: int, columns: int, group: int) -> list[Cells]:
    """The places of D in one CTA, as rectangles to be put side by side along N."""
    lane, column = address >> 16, address & 0xFFFF
    if rows == 128:
        return [cta.tmem.cells(lane, column, 128, columns)]
    if rows == 64 and group == 2:
        return [cta.tmem.cells(64 * half, column, 64, columns // 2) for half in (0, 1)]
    if rows == 64:
        block = cta.tmem.cells(0, column, 128, columns)[1]
        lanes = (np.arange(4)[:, None] * 32 + np.arange(16)[None, :]).reshape(-1) + lane % 32
        return [(lanes[:, None], np.arange(block.start, block.stop)[None, :])]
    raise UnknownInstructionError(f"tcgen05.mma with {rows} rows per CTA")


def _read_accumulator(cta: Cta, cells: list[Cells], half: bool) -> np.ndarray:
    parts = [cta.tmem.data[c] for c in cells]
    raw = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    if half:
        return raw.astype(np.uint16).view(np.float16).astype(np.float32)
    return raw.view(np.float32)


def _write_accumulator(cta: Cta, cells: list[Cells], values: np.ndarray, half: bool) -> None:
    if half:
        raw = values.astype(np.float16).view(np.uint16).astype(np.uint32)
    else:
        raw = np.ascontiguousarray(values, np.float32).view(np.uint32)
    width = raw.shape[1] // len(cells)
    for index, where in enumerate(cells):
        cta.tmem.data[where] = raw[:, index * width : (index + 1) * width]


class _Half:
    """One CTA's part of a multiply: its rows of A and D."""

    def __init__(self, cta: Cta, cells: list[Cells]) -> None:
        self.cta = cta
        self.cells = cells
        self.a: Callable[[], Factors] | None = None


@effect("tcgen05.mma")
def multiply(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """tcgen05.mma [d], a, b, idesc{, disabled lanes}, accumulate: A from shared or TMEM."""
    group = _group(mods)
    kind = mods.need("kind::f16 kind::tf32 kind::f8f6f4").removeprefix("kind::")
    mods.drop("collector::a::discard collector::a::fill collector::a::use collector::a::lastuse")
    mods.done()
    d, a, b, idesc, *rest = ins.operands
    disabled = decoder.read_all(rest.pop(0), "u4") if isinstance(rest[0], Vector) else []
    if len(rest) != 1:
        raise mods.error("scale-input-d is not implemented")
    accumulate = decoder.read(rest[0], "pred")
    d_read = address_reader(decoder, d, "shared")
    from_tmem = isinstance(a, Address)
    a_read = address_reader(decoder, a, "shared") if from_tmem else decoder.read(a, "u8")
    b_read, idesc_read = decoder.read(b, "u8"), decoder.read(idesc, "u4")

    def one(warp: Warp, lane: int) -> None:
        slots = warp.slots
        if any(int(r(slots)[lane]) for r in disabled):
            raise UnknownInstructionError(f"{ins}: disabled output lanes are not implemented")
        shape = instruction_descriptor(int(idesc_read(slots)[lane]), kind)
        issued, adds = Issued(warp, ins, group), bool(accumulate(slots)[lane])
        who, d_address = issued.who, int(d_read(slots)[lane])
        issued.stream = kind, (shape.rows, shape.columns, shape.depth), d_address
        ctas = _pair(warp, group)
        halves, claims, b_parts = [], [], []
        for cta in ctas:
            half = _Half(
                cta,
                accumulator_cells(cta, d_address, shape.rows // group, shape.columns, group),
            )
            b_tile = Tile(shape.columns // group, shape.depth, _size(shape.b_type), shape.b_mn)
            operand = SharedOperand(
                cta.shared,
                matrix_descriptor(int(b_read(slots)[lane]), "tcgen05"),
                b_tile,
                shape.b_type,
            )
            claims.append(_claim(cta, operand, who))
            b_parts.append(operand)
            if from_tmem:
                half.a = _tmem_operand(half, int(a_read(slots)[lane]), shape, group, issued)
            else:
                tile = Tile(shape.rows // group, shape.depth, _size(shape.a_type), shape.a_mn)
                operand = SharedOperand(
                    cta.shared,
                    matrix_descriptor(int(a_read(slots)[lane]), "tcgen05"),
                    tile,
                    shape.a_type,
                )
                claims.append(_claim(cta, operand, who))
                half.a = operand.factors
            for cells in half.cells:
                if adds:
                    cta.tmem.check_settled(cells, f"{who} accumulates in")
                issued.hold(cta, cells, "write")
            halves.append(half)

        def compute() -> None:
            b = Factors.side_by_side([operand.factors() for operand in b_parts])
            for half in halves:
                _multiply_half(half, b, shape, who if adds else None)
            for cta, claim in claims:
                cta.shared.end(claim)

        issued.submit(compute)
        warp.machine.count("flops tcgen05.mma", 2 * shape.rows * shape.columns * shape.depth)

    def run(warp: Warp, mask: np.ndarray) -> None:
        warp.line = ins.line
        for lane in np.flatnonzero(mask):
            one(warp, int(lane))

    return run


def _claim(cta: Cta, operand: SharedOperand, who: str) -> tuple[Cta, int]:
    """Claims an operand for reading, until completion."""
    cta.cluster.machine.count("bytes tcgen05.mma operands", CHUNK * len(operand.chunks))
    return cta, cta.shared.begin_read(operand.chunks, who)


def _size(type_: str) -> int:
    return {"f16": 2, "bf16": 2, "tf32": 4}.get(type_, 1)


def _tmem_operand(
    half: _Half, address: int, shape: Shape, group: int, issued: Issued
) -> Callable[[], Factors]:
    """A from TMEM: row = lane, packed elements along the columns."""
    who = issued.who
    if shape.rows // group != 128:
        raise UnknownInstructionError(f"{who}: A from TMEM with {shape.rows // group} rows per CTA")
    tmem = half.cta.tmem
    size = _size(shape.a_type)
    cells = tmem.cells(address >> 16, address & 0xFFFF, 128, shape.depth * size // 4)
    tmem.check_settled(cells, f"{who} reads")
    issued.a = address & 0xFFFF
    issued.hold(half.cta, cells, "read")
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}[size]

    def factors() -> Factors:
        tmem.check_written(cells, who)
        values = matrix_values(np.ascontiguousarray(tmem.data[cells]).view(bits), shape.a_type)
        return Factors.of(values, shape.a_type)

    return factors


def _multiply_half(half: _Half, b: Factors, shape: Shape, adds: str | None) -> None:
    a, addend = half.a(), None
    if shape.is_negative:
        a = a.negated()
    if adds is not None:
        for cells in half.cells:
            half.cta.tmem.check_written(cells, f"{adds} (accumulating)")
        addend = _read_accumulator(half.cta, half.cells, shape.half)
    rule = Rule(shape.a_type, "f16" if shape.half else "f32")
    _write_accumulator(half.cta, half.cells, multiply_add(a, b, addend, rule), shape.half)


# Copy and commit.

_COPY_SHAPES = {
    "128x256b": (128, 32, 1),
    "128x128b": (128, 16, 1),
    "4x256b": (4, 32, 1),
    "32x128b": (32, 16, 4),
}


@effect("tcgen05.cp")
def copy(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """tcgen05.cp shared memory -> TMEM, without decompression."""
    group = _group(mods)
    rows, row_bytes, repeats = _COPY_SHAPES[mods.need(" ".join(_COPY_SHAPES))]
    mods.drop("warpx4").done()
    at = address_reader(decoder, ins.operands[0], "shared")
    source = decoder.read(ins.operands[1], "u8")
    tile = Tile(rows, row_bytes, 1, False)

    def one(warp: Warp, lane: int) -> None:
        slots = warp.slots
        issued = Issued(warp, ins, group)
        address, bits = int(at(slots)[lane]), int(source(slots)[lane])
        parts = []
        for cta in _pair(warp, group):
            placement = SharedOperand(cta.shared, matrix_descriptor(bits, "tcgen05"), tile, "e4m3")
            claim = cta.shared.begin_read(placement.chunks, issued.who)
            cells = cta.tmem.cells(address >> 16, address & 0xFFFF, rows * repeats, row_bytes // 4)
            issued.hold(cta, cells, "write")
            parts.append((cta, placement, claim, cells))

        def land() -> None:
            for cta, placement, claim, cells in parts:
                raw = cta.shared.data[placement.elements].view(np.uint32)
                cta.tmem.data[cells] = np.tile(raw, (repeats, 1))
                cta.shared.end(claim)

        issued.submit(land)

    def run(warp: Warp, mask: np.ndarray) -> None:
        warp.line = ins.line
        for lane in np.flatnonzero(mask):
            one(warp, int(lane))

    return run


def _commit(warp: Warp, pipe: tuple, barriers: list[Mbarrier], who: str) -> None:
    """Arrives at the barriers behind all that is in the FIFOs of a CTA or pair."""
    pipes = warp.machine.pipes
    if warp.machine.options.ordered_products:
        keys = [pipe]
    else:
        keys = [key for key in pipes if isinstance(key, tuple) and key[:-1] == pipe] or [pipe]
    left = len(keys)

    def arrive() -> None:
        nonlocal left
        left -= 1
        for barrier in barriers if left == 0 else ():
            barrier.arrive()

    for key in keys:
        warp.machine.submit(Operation(who, (arrive,), warp.place, barriers), key)


@control("tcgen05.commit")
def commit(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """tcgen05.commit: an arrival on mbarriers once everything issued before is complete."""
    group = _group(mods)
    multicast = mods.take("multicast::cluster") is not None
    mods.drop("mbarrier::arrive::one shared::cluster b64").done()
    operand = ins.operands[0]
    if not isinstance(operand, Address):
        operand = Address(operand, 0)
    at = address_reader(decoder, operand, "shared")
    mask_of = decoder.read(ins.operands[1], "u2") if multicast else None

    def run(warp: Warp, mask: np.ndarray) -> None:
        warp.line = ins.line
        for lane in np.flatnonzero(mask):
            address = int(at(warp.slots)[lane])
            addresses = [address]
            if mask_of is not None:
                ranks = int(mask_of(warp.slots)[lane])
                addresses = [
                    rank << RANK_SHIFT | address & OFFSET_MASK
                    for rank in range(16)
                    if ranks >> rank & 1
                ]
            barriers = [signalled_mbarrier(warp, a) for a in addresses]
            who = f"the tcgen05.commit issued by {warp} at line {ins.line}"
            _commit(warp, _pipe(warp, group), barriers, who)

    return run
