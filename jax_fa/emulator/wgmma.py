"""wgmma (sm_90a): warpgroup matrix multiply, executed per warp on its 16 of the 64 rows.

Issue claims the shared-memory operands and takes the accumulators and A registers away from the
warp; they come back at the wgmma.wait_group that covers them. In between they may be computed at
any time: at issue ("eager"), at the wait ("lazy"), or either ("random").
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from jax_fa.emulator.cta import InFlight, Warp
from jax_fa.emulator.dot import Factors, Rule, hopper_rule, multiply_add
from jax_fa.emulator.faults import AsyncHazardError, DivergenceError
from jax_fa.emulator.layouts import Tile, matrix_descriptor
from jax_fa.emulator.matrix import ELEMENT_BYTES, SharedOperand
from jax_fa.emulator.memory import Claim
from jax_fa.emulator.numerics import matrix_values
from jax_fa.emulator.operands import OperandDecoder
from jax_fa.emulator.ptx import Immediate, Instruction, Register, Vector
from jax_fa.emulator.registry import Modifiers, Run, control, effect
from jax_fa.emulator.values import DTYPES, UNSIGNED

_ROWS = 16


class Accumulator:
    """The registers of a D fragment, and how they map to the warp's (16, N) matrix."""

    def __init__(self, decoder: OperandDecoder, vector: Vector, type_: str, columns: int) -> None:
        kind = "f4" if type_ == "f32" else "u4"
        self.columns, self.half = columns, type_ == "f16"
        self.reads = decoder.read_all(vector, kind)
        self.write = decoder.write_rows(vector, [kind] * len(self.reads))
        self.key = tuple(r.number for r in vector.items if isinstance(r, Register))

    def load(self, slots: list) -> np.ndarray:
        """Registers -> (16, N) float32."""
        raw = np.concatenate([read(slots) for read in self.reads])
        if self.half:
            parts = raw.view(np.float16).reshape(self.columns // 8, 2, 8, 4, 2)
            return parts.transpose(1, 2, 0, 3, 4).reshape(_ROWS, -1).astype(np.float32)
        parts = raw.reshape(self.columns // 8, 2, 2, 8, 4)
        return parts.transpose(1, 3, 0, 4, 2).reshape(_ROWS, -1)

    def store(self, slots: list, matrix: np.ndarray, mask: np.ndarray) -> None:
        """(16, N) float32 -> registers."""
        if self.half:
            parts = matrix.astype(np.float16).reshape(2, 8, self.columns // 8, 4, 2)
            parts = np.ascontiguousarray(parts.transpose(2, 0, 1, 3, 4))
            rows = parts.view(np.uint32).reshape(-1, 32)
        else:
            parts = matrix.reshape(2, 8, self.columns // 8, 4, 2)
            rows = np.ascontiguousarray(parts.transpose(2, 0, 4, 1, 3)).reshape(-1, 32)
        self.write(slots, rows, mask)


def a_fragment(registers: list[np.ndarray], type_: str) -> np.ndarray:
    """A registers (rows r and r + 8 of each column block) -> (16, K) float32."""
    size = ELEMENT_BYTES[type_]
    bits = np.concatenate(registers).view(DTYPES[UNSIGNED[size]]).reshape(-1, 2, 8, 4, 4 // size)
    return matrix_values(bits.transpose(1, 2, 0, 3, 4).reshape(_ROWS, -1), type_)


class _Multiply:
    """One issued wgmma of one warp."""

    def __init__(self, accumulator: Accumulator, flight: InFlight, rule: Rule) -> None:
        self.accumulator = accumulator
        self.flight = flight
        self.rule = rule
        self.a: Callable[[], Factors] | None = None
        self.b: Callable[[], Factors] | None = None
        self.adds = True
        self.is_negative = False
        self.claims: list[tuple[SharedOperand, Claim]] = []
        self.done = False


class _Pipeline:
    """A warp's wgmma: issued and not committed, and the committed groups."""

    def __init__(self) -> None:
        self.open: list[_Multiply] = []
        self.groups: list[list[_Multiply]] = []


def _pipeline(warp: Warp) -> _Pipeline:
    return warp.state.setdefault("wgmma", _Pipeline())


def _compute(warp: Warp, multiplies: list[_Multiply]) -> None:
    """Computes multiplies in order; a chain on the same registers converts them only once."""
    pending: dict[tuple, tuple[Accumulator, np.ndarray]] = {}
    for multiply in multiplies:
        if multiply.done:
            continue
        accumulator = multiply.accumulator
        addend = None
        if multiply.adds:
            held = pending.get(accumulator.key)
            addend = accumulator.load(warp.slots) if held is None else held[1]
        a = multiply.a()
        if multiply.is_negative:
            a = a.negated()
        total = multiply_add(a, multiply.b(), addend, multiply.rule)
        pending[accumulator.key] = (accumulator, total)
        multiply.done = True
        for operand, claim in multiply.claims:
            operand.shared.end(claim)
    for accumulator, matrix in pending.values():
        accumulator.store(warp.slots, matrix, warp.mask)


# A control instruction, so that whatever follows it is checked for the registers it holds.
@control("wgmma.mma_async.sync.aligned")
def multiply(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """wgmma.mma_async m64nNkK: D (+)= A B, A from shared memory or registers."""
    shape = mods.left.pop(0)
    match = re.match(r"m64n(\d+)k(\d+)$", shape)
    if match is None or len(mods.left) != 3:
        raise mods.error(f"shape {shape} or types are not implemented")
    columns, depth = int(match.group(1)), int(match.group(2))
    d_type, a_type, b_type = mods.left
    if d_type not in ("f32", "f16") or {a_type, b_type} - ELEMENT_BYTES.keys():
        raise mods.error("types are not implemented")
    d, a, b, scale, *rest = ins.operands
    values = [o.bits if isinstance(o, Immediate) else None for o in rest]
    if None in values:
        raise mods.error("scale and transpose operands must be immediates")
    from_registers = isinstance(a, Vector)
    majors = values[2:]
    a_mn = bool(majors[0]) if len(majors) == 2 else False
    b_mn = bool(majors[-1]) if majors else False
    accumulator = Accumulator(decoder, d, d_type, columns)
    adds = decoder.read(scale, "pred")
    a_reads = decoder.read_all(a, "u4") if from_registers else [decoder.read(a, "u8")]
    b_read = decoder.read(b, "u8")
    a_tile = Tile(64, depth, ELEMENT_BYTES[a_type], a_mn)
    b_tile = Tile(columns, depth, ELEMENT_BYTES[b_type], b_mn)
    written = sum(1 << index for index in accumulator.key)
    read = sum(1 << r.number for r in a.items) if from_registers else 0
    is_negative = values[0] * values[1] < 0
    rule = hopper_rule(a_type, d_type)

    def run(warp: Warp, mask: np.ndarray) -> None:
        warp.need_full(mask, ins.opcode)
        warp.line = ins.line
        if warp.index // 4 * 4 + 4 > len(warp.cta.warps):
            raise DivergenceError("wgmma needs a whole warpgroup of four warps")
        if warp.unfenced & (written | read):
            raise AsyncHazardError(
                "wgmma.mma_async uses registers written since the last wgmma.fence"
            )
        slots, shared = warp.slots, warp.cta.shared
        who = f"the wgmma issued by CTA {warp.cta.number} warp {warp.index} at line {ins.line}"
        flight = InFlight(written, read, who, "wgmma.wait_group")
        issued = _Multiply(accumulator, flight, rule)
        issued.adds, issued.is_negative = bool(adds(slots)[0]), is_negative
        descriptor = matrix_descriptor(int(b_read(slots)[0]), "wgmma")
        operand = SharedOperand(shared, descriptor, b_tile, b_type)
        issued.claims.append((operand, shared.begin_read(operand.chunks, who)))
        issued.b = operand.factors
        if from_registers:
            fragment = [r(slots) for r in a_reads]
            issued.a = lambda: Factors.of(a_fragment(fragment, a_type), a_type)
        else:
            descriptor = matrix_descriptor(int(a_reads[0](slots)[0]), "wgmma")
            whole = SharedOperand(shared, descriptor, a_tile, a_type)
            issued.claims.append((whole, shared.begin_read(whole.chunks, who)))
            rows = slice(_ROWS * (warp.index % 4), _ROWS * (warp.index % 4) + _ROWS)
            issued.a = lambda: whole.factors().rows(rows)
        _pipeline(warp).open.append(issued)
        warp.hold(issued.flight)
        machine = warp.machine
        machine.count("flops wgmma", 2 * _ROWS * columns * depth)
        completion = machine.options.completion
        if completion == "eager" or completion == "random" and machine.random.chance(0.25):
            pipeline = _pipeline(warp)
            _compute(warp, [m for group in (*pipeline.groups, pipeline.open) for m in group])

    return run


@control("wgmma.fence.sync.aligned")
def wgmma_fence(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """wgmma.fence: registers written so far may be used by wgmma.mma_async."""
    mods.done()

    def run(warp: Warp, mask: np.ndarray) -> None:
        warp.need_full(mask, ins.opcode)
        warp.unfenced = 0

    return run


@effect("wgmma.commit_group.sync.aligned")
def commit(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """wgmma.commit_group: the multiplies issued since the last one form a group."""
    mods.done()

    def run(warp: Warp, mask: np.ndarray) -> None:
        warp.need_full(mask, ins.opcode)
        pipeline = _pipeline(warp)
        pipeline.groups.append(pipeline.open)
        pipeline.open = []

    return run


@control("wgmma.wait_group.sync.aligned")
def wait(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """wgmma.wait_group N: all but the newest N groups are complete."""
    mods.done()
    newest = ins.operands[0].bits

    def run(warp: Warp, mask: np.ndarray) -> None:
        warp.need_full(mask, ins.opcode)
        pipeline = _pipeline(warp)
        count = max(len(pipeline.groups) - newest, 0)
        finished = [m for group in pipeline.groups[:count] for m in group]
        pipeline.groups = pipeline.groups[count:]
        _compute(warp, finished)
        warp.release([m.flight for m in finished])
        warp.machine.progress += 1

    return run
