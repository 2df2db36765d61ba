"""Warp-level matrix instructions: ldmatrix, stmatrix and mma.sync."""

from __future__ import annotations

import re

import numpy as np

from jax_fa.emulator.cta import Warp
from jax_fa.emulator.dot import Factors, Rule, multiply_add
from jax_fa.emulator.faults import OutOfBoundsError
from jax_fa.emulator.loadstore import address_reader, load_at, space_of, store_at
from jax_fa.emulator.matrix import ELEMENT_BYTES
from jax_fa.emulator.numerics import matrix_values
from jax_fa.emulator.operands import OperandDecoder
from jax_fa.emulator.ptx import Instruction
from jax_fa.emulator.registry import Modifiers, Run, effect
from jax_fa.emulator.values import DTYPES, FULL, LANES, UNSIGNED
from jax_fa.emulator.wgmma import Accumulator, a_fragment

ROW_BYTES = 16
"""Of an 8 x 8 matrix of ldmatrix and stmatrix."""


@effect("ldmatrix.sync.aligned stmatrix.sync.aligned")
def matrix_move(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """Handles ldmatrix / stmatrix m8n8.xN{.trans}.b16: lane 8j+r addresses row r of matrix j."""
    mods.need("m8n8")
    count = int(mods.need("x1 x2 x4")[1:])
    transposed = mods.take("trans") is not None
    space = space_of(mods)
    mods.drop("b16").done()
    loads = ins.opcode.startswith("ldmatrix")
    registers, address = ins.operands if loads else reversed(ins.operands)
    at = address_reader(decoder, address, space)
    writes = decoder.write_all(registers, "u4") if loads else []
    reads = [] if loads else decoder.read_all(registers, "u4")
    if len(writes or reads) != count:
        raise mods.error(f"needs {count} registers")
    addressed = 8 * count

    def run(warp: Warp, mask: np.ndarray) -> None:
        warp.need_full(mask, ins.opcode)
        slots = warp.slots
        rows = at(slots)[:addressed]
        if np.count_nonzero(rows % rows.dtype.type(ROW_BYTES)):
            raise OutOfBoundsError(f"{ins.opcode}: rows of a matrix lie at multiples of 16 bytes")
        lanes = mask if mask is FULL else mask[:addressed]
        if loads:
            found = load_at(warp, space, rows, lanes, 8, 2)
            for write, words in zip(writes, _registers(found, transposed), strict=True):
                write(slots, words, mask)
        else:
            held = np.concatenate([read(slots) for read in reads])
            store_at(warp, space, rows, _rows(held, transposed), lanes)
        warp.machine.count(f"bytes {ins.opcode.split('.')[0]}", 4 * LANES * count)

    return run


def _registers(rows: np.ndarray, transposed: bool) -> np.ndarray:
    """Rows of matrices, (8 of each, 16 bytes) -> registers (one of each, 32)."""
    if transposed:
        # Lane 4 r + q has elements r of rows 2 q and 2 q + 1.
        halves = rows.view(np.uint16).reshape(-1, 4, 2, 8)
        rows = np.ascontiguousarray(halves.transpose(0, 3, 1, 2))
    return rows.view(np.uint32).reshape(-1, LANES)


def _rows(registers: np.ndarray, transposed: bool) -> np.ndarray:
    """The inverse of ``_registers``."""
    if transposed:
        halves = registers.view(np.uint16).reshape(-1, 8, 4, 2)
        registers = np.ascontiguousarray(halves.transpose(0, 2, 3, 1))
    return registers.view(np.uint64).reshape(-1, 2)


def b_fragment(registers: list[np.ndarray], type_: str) -> np.ndarray:
    """B registers of mma.sync -> (8, K) float32."""
    size = ELEMENT_BYTES[type_]
    bits = np.concatenate(registers).view(DTYPES[UNSIGNED[size]]).reshape(-1, 8, 4, 4 // size)
    return matrix_values(bits.transpose(1, 0, 2, 3).reshape(8, -1), type_)


@effect("mma.sync.aligned")
def multiply(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """mma.sync.aligned.m16n8kK.row.col.D.A.B.C d, a, b, c."""
    shape = mods.left.pop(0)
    match = re.match(r"m16n8k(\d+)$", shape)
    mods.take("kind::f8f6f4")
    if match is None or not (mods.take("row") and mods.take("col")) or len(mods.left) != 4:
        raise mods.error(f"shape {shape} or layout is not implemented")
    d_type, a_type, b_type, c_type = mods.left
    if {d_type, c_type} - {"f16", "f32"} or {a_type, b_type} - ELEMENT_BYTES.keys():
        raise mods.error("types are not implemented")
    d, a, b, c = ins.operands
    result, addend = Accumulator(decoder, d, d_type, 8), Accumulator(decoder, c, c_type, 8)
    a_reads, b_reads = decoder.read_all(a, "u4"), decoder.read_all(b, "u4")
    depth = int(match.group(1))
    words = depth * ELEMENT_BYTES[a_type] // 16
    if (len(a_reads), len(b_reads)) != (2 * words, words):
        raise mods.error(f"needs {2 * words} registers of A and {words} of B")
    rule = Rule(a_type, d_type)

    def run(warp: Warp, mask: np.ndarray) -> None:
        warp.need_full(mask, ins.opcode)
        warp.machine.count("flops mma.sync", 2 * 16 * 8 * depth)
        slots = warp.slots
        a_factors = Factors.of(a_fragment([r(slots) for r in a_reads], a_type), a_type)
        b_factors = Factors.of(b_fragment([r(slots) for r in b_reads], b_type), b_type)
        result.store(slots, multiply_add(a_factors, b_factors, addend.load(slots), rule), mask)

    return run
