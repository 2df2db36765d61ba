"""Instructions across the lanes of a warp: shuffles, votes, reductions, elect, match."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jax_fa.emulator.cta import Warp
from jax_fa.emulator.faults import DivergenceError
from jax_fa.emulator.operands import OperandDecoder
from jax_fa.emulator.ptx import Both, Instruction, Operand, Sink
from jax_fa.emulator.registry import Modifiers, Run, effect
from jax_fa.emulator.sync import bits_of, lanes_of
from jax_fa.emulator.values import FULL, LANES

_LANE = np.arange(LANES)


def two_results(operand: Operand) -> tuple[Operand, Operand]:
    """d|p, or d alone with nobody wanting p."""
    return (operand.first, operand.second) if isinstance(operand, Both) else (operand, Sink())


def need_members(warp: Warp, members: np.ndarray, mask: np.ndarray, what: str) -> None:
    """Refuses a .sync instruction when a live lane of its member mask is not executing it."""
    if mask is FULL:
        return
    lane = int(mask.argmax())
    wanted = lanes_of(int(members[lane])) & warp.live
    if (wanted & ~mask).any():
        raise DivergenceError(
            f"{what} with member mask {int(members[lane]):#x} is executed by "
            f"lanes {np.flatnonzero(mask).tolist()} only"
        )


def shuffle_sources(mode: str, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Source lane of every lane and whether it lies in range, as the PTX ISA defines shfl."""
    segment, clamp = (c >> 8) & 31, c & 31
    b = b & 31
    high = (_LANE & segment) | (clamp & ~segment & 31)
    low = _LANE & segment
    source, inside = {
        "up": (_LANE - b, _LANE - b >= high),
        "down": (_LANE + b, _LANE + b <= high),
        "bfly": (_LANE ^ b, (_LANE ^ b) <= high),
        "idx": (low | (b & ~segment & 31), (low | (b & ~segment & 31)) <= high),
    }[mode]
    return np.where(inside, source, _LANE), inside


@effect("shfl.sync")
def shuffle(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """shfl.sync.{up,down,bfly,idx}.b32 d|p, a, b, c, membermask."""
    mode = mods.need("up down bfly idx")
    mods.drop("b32").done()
    value, flag = two_results(ins.operands[0])
    kind = decoder.home(value) if not isinstance(value, Sink) else "u4"
    write, write_flag = decoder.write(value, kind), decoder.write(flag, "pred")
    read = decoder.read(ins.operands[1], kind)
    b, c, members = (decoder.read(o, "u4") for o in ins.operands[2:])
    cache: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}

    def run(warp: Warp, mask: np.ndarray) -> None:
        slots = warp.slots
        need_members(warp, members(slots), mask, ins.opcode)
        shift, limit = b(slots), c(slots)
        key = shift.tobytes() + limit.tobytes()
        if key not in cache:
            if len(cache) > 256:
                cache.clear()
            cache[key] = shuffle_sources(mode, shift.astype(np.int64), limit.astype(np.int64))
        source, inside = cache[key]
        write(slots, read(slots)[source], mask)
        write_flag(slots, inside, mask)

    return run


@effect("vote.sync vote")
def vote(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """vote.sync.{all,any,uni,ballot} d, p, membermask."""
    mode = mods.need("all any uni ballot")
    mods.drop("pred b32").done()
    write = decoder.write(ins.operands[0], "u4" if mode == "ballot" else "pred")
    read = decoder.read(ins.operands[1], "pred")
    members = decoder.read(ins.operands[2], "u4")
    functions: dict[str, Callable] = {
        "all": np.all,
        "any": np.any,
        "uni": lambda p: p.all() or not p.any(),
    }

    def run(warp: Warp, mask: np.ndarray) -> None:
        member = members(warp.slots)
        need_members(warp, member, mask, ins.opcode)
        taking = lanes_of(int(member[int(mask.argmax())])) & mask
        votes = read(warp.slots)
        if mode == "ballot":
            write(warp.slots, np.full(LANES, bits_of(votes & taking), np.uint32), mask)
        else:
            write(warp.slots, np.full(LANES, bool(functions[mode](votes[taking]))), mask)

    return run


@effect("elect.sync")
def elect(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """elect.sync d|p, membermask: the lowest member is elected."""
    mods.done()
    lane_of, flag = two_results(ins.operands[0])
    write, write_flag = decoder.write(lane_of, "u4"), decoder.write(flag, "pred")
    members = decoder.read(ins.operands[1], "u4")

    def run(warp: Warp, mask: np.ndarray) -> None:
        member = members(warp.slots)
        need_members(warp, member, mask, ins.opcode)
        leader = int((lanes_of(int(member[int(mask.argmax())])) & mask).argmax())
        write(warp.slots, np.full(LANES, leader, np.uint32), mask)
        write_flag(warp.slots, leader == _LANE, mask)

    return run


_REDUCE: dict[str, Callable] = {
    "add": lambda v: v.sum(dtype=v.dtype),
    "min": np.min,
    "max": np.max,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}


@effect("redux.sync")
def reduce_lanes(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """redux.sync.op.type d, a, membermask: every member gets the combination of all."""
    operation = mods.need("add min max and or xor")
    absolute, propagates = mods.take("abs"), mods.take("NaN")
    type_ = mods.need("u32 s32 b32 f32")
    mods.done()
    kind = {"u32": "u4", "b32": "u4", "s32": "i4", "f32": "f4"}[type_]
    function = _REDUCE[operation]
    if type_ == "f32" and not propagates:
        function = {"min": np.fmin.reduce, "max": np.fmax.reduce}[operation]
    write = decoder.write(ins.operands[0], kind)
    read = decoder.read(ins.operands[1], kind)
    members = decoder.read(ins.operands[2], "u4")

    def run(warp: Warp, mask: np.ndarray) -> None:
        member = members(warp.slots)
        need_members(warp, member, mask, ins.opcode)
        taking = lanes_of(int(member[int(mask.argmax())])) & mask
        values = read(warp.slots)[taking]
        result = function(np.abs(values) if absolute else values)
        write(warp.slots, np.full(LANES, result, values.dtype), mask)

    return run


@effect("activemask")
def active_mask(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """activemask.b32 d."""
    mods.drop("b32").done()
    write = decoder.write(ins.operands[0], "u4")

    def run(warp: Warp, mask: np.ndarray) -> None:
        write(warp.slots, np.full(LANES, bits_of(warp.mask), np.uint32), mask)

    return run


@effect("match.any.sync match.all.sync")
def match(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """match.{any,all}.sync d|p, a, membermask: lanes that hold the same value."""
    kind = {"b32": "u4", "b64": "u8"}[mods.need("b32 b64")]
    mods.done()
    every = ins.opcode.startswith("match.all")
    target, flag = two_results(ins.operands[0])
    write, write_flag = decoder.write(target, "u4"), decoder.write(flag, "pred")
    read = decoder.read(ins.operands[1], kind)
    members = decoder.read(ins.operands[2], "u4")

    def run(warp: Warp, mask: np.ndarray) -> None:
        member = members(warp.slots)
        need_members(warp, member, mask, ins.opcode)
        taking = lanes_of(int(member[int(mask.argmax())])) & mask
        values = read(warp.slots)
        same = (values[:, None] == values[None, :]) & taking[None, :]
        bits = np.packbits(same, axis=1, bitorder="little").view(np.uint32).reshape(LANES)
        if every:
            agree = bool((same[mask] == taking[None, :]).all())
            bits = bits if agree else np.zeros(LANES, np.uint32)
            write_flag(warp.slots, np.full(LANES, agree), mask)
        write(warp.slots, bits, mask)

    return run
