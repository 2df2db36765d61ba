"""Loads, stores, atomics, address conversions and moves between vectors and wide registers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from jax_fa.emulator.cta import Warp
from jax_fa.emulator.faults import OutOfBoundsError
from jax_fa.emulator.memory import LOCAL_WINDOW, OFFSET_MASK, PARAM_WINDOW, SHARED_WINDOW
from jax_fa.emulator.numerics import NARROW, pack_halves, split_halves
from jax_fa.emulator.operands import OperandDecoder
from jax_fa.emulator.ptx import TYPE_BYTES, Address, Instruction, Operand, Register, Vector
from jax_fa.emulator.registry import Modifiers, Run, control, define, effect
from jax_fa.emulator.values import DTYPES, FULL, LANES, UNSIGNED

_TYPES = "b8 u8 s8 b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64 b128 f16 bf16 f16x2 bf16x2"
_SPACES = (
    "global",
    "shared",
    "shared::cta",
    "shared::cluster",
    "local",
    "param",
    "param::entry",
    "const",
)
# Cache and ordering hints; memory is sequentially consistent here.
_HINTS = (
    "weak relaxed acquire release volatile cta cluster gpu sys nc ca cg cs lu cv wb wt "
    "L1::no_allocate L1::evict_first L1::evict_last L1::evict_unchanged L1::evict_normal "
    "L2::cache_hint L2::64B L2::128B L2::256B L2::evict_first L2::evict_last "
    "L2::evict_normal mmio"
)


def space_of(mods: Modifiers) -> str:
    """The state space of a memory instruction; "generic" when none is named."""
    space = mods.take(*_SPACES) or "generic"
    return {
        "shared::cta": "shared",
        "shared::cluster": "shared",
        "param::entry": "param",
        "const": "param",
    }.get(space, space)


def address_reader(
    decoder: OperandDecoder, operand: Address, space: str
) -> Callable[[list], np.ndarray]:
    """Reader of an address as uint64 (uint32 in shared space), offset included."""
    kind = "u4" if space == "shared" else "u8"
    base = decoder.read(operand.base, kind)
    if not operand.offset:
        return base
    offset = np.array(operand.offset).astype(DTYPES[kind])
    return lambda slots: base(slots) + offset


def load_at(
    warp: Warp, space: str, addresses: np.ndarray, mask: np.ndarray, size: int, count: int = 1
) -> np.ndarray:
    """`count` consecutive elements of `size` bytes at every address: (addresses, count).

    There is an address per lane, or several times that many. Those outside the mask give 0.
    """
    active = addresses if mask is FULL else addresses[mask]
    if space == "generic":
        space, active = _resolve(active)
    if space == "shared":
        found = _shared_access(warp, active, lambda cta, at, _: cta.shared.load(at, size, count))
    elif space == "global":
        found = warp.machine.memory.load(active, size, count)
        warp.machine.count("bytes global load", found.nbytes)
    elif space == "param":
        found = _param_load(warp, active, size, count)
    else:
        found = _local_view(warp, active, size, count)[
            np.flatnonzero(mask), active.astype(np.int64) // (size * count)
        ]
    if mask is FULL:
        return found
    result = np.zeros((len(addresses), count), found.dtype)
    result[mask] = found
    return result


def store_at(
    warp: Warp, space: str, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray
) -> None:
    """Stores values of shape (addresses,) or (addresses, count) in the lanes of the mask."""
    values = values.reshape(len(addresses), -1)
    if mask is not FULL:
        addresses, values = addresses[mask], values[mask]
    if space == "generic":
        space, addresses = _resolve(addresses)
    if space == "shared":
        who = warp.cta.rank * 64 + warp.index
        _shared_access(
            warp, addresses, lambda cta, at, part: cta.shared.store(at, values[part], who)
        )
    elif space == "global":
        warp.machine.memory.store(addresses, values)
        warp.machine.count("bytes global store", values.nbytes)
    elif space == "local":
        size, count = values.dtype.itemsize, values.shape[1]
        view = _local_view(warp, addresses, size, count)
        view[np.flatnonzero(mask), addresses.astype(np.int64) // (size * count)] = values
    else:
        raise OutOfBoundsError(f"store to {space} space")


def _resolve(addresses: np.ndarray) -> tuple[str, np.ndarray]:
    """State space and address in it of generic addresses (all lanes in one space)."""
    first = int(addresses[0])
    for window, space in (
        (LOCAL_WINDOW, "local"),
        (SHARED_WINDOW, "shared"),
        (PARAM_WINDOW, "param"),
    ):
        if first >= window:
            if (addresses < np.uint64(window)).any():
                raise OutOfBoundsError("lanes of one generic access are in different spaces")
            if space == "param":
                return space, addresses
            inside = addresses - np.uint64(window)
            return space, inside.astype(np.uint32) if space == "shared" else inside
    return "global", addresses


def _shared_access(warp: Warp, addresses: np.ndarray, access: Callable) -> np.ndarray | None:
    """Calls access(cta, offsets, lanes) for every CTA the shared addresses lie in."""
    own = warp.cta
    base = own.shared.base
    if base <= int(addresses[0]) and int(np.maximum.reduce(addresses)) - base <= OFFSET_MASK:
        return access(own, addresses - np.uint32(base) if base else addresses, slice(None))
    result = None
    for rank in np.unique(addresses >> np.uint32(24)):
        part = addresses >> np.uint32(24) == rank
        cta = own.cluster.cta_at(int(addresses[part][0]))
        found = access(cta, addresses[part] & np.uint32(OFFSET_MASK), part)
        if found is not None:
            if result is None:
                result = np.zeros((len(addresses), found.shape[1]), found.dtype)
            result[part] = found
    return result


def _param_load(warp: Warp, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
    block = warp.machine.params
    offset = int(addresses[0]) - PARAM_WINDOW
    if np.count_nonzero(addresses != addresses[0]):
        raise OutOfBoundsError("lanes load different parameters")
    if not 0 <= offset <= len(block) - size * count:
        raise OutOfBoundsError(f"parameter offset {offset} of {len(block)} bytes")
    one = block[offset : offset + size * count].view(DTYPES[UNSIGNED[size]])
    return np.tile(one, (len(addresses), 1))


def _local_view(warp: Warp, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
    """Local memory as (LANES, n, count) elements."""
    width = size * count
    if warp.local is None or int(addresses.max()) + width > warp.local.shape[1]:
        raise OutOfBoundsError(
            f"local address {int(addresses.max())} is outside the thread's local memory"
        )
    usable = warp.local.shape[1] // width * width
    elements = warp.local[:, :usable].view(DTYPES[UNSIGNED[size]])
    return elements.reshape(LANES, -1, count)


@effect("ld ldu")
def load(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """ld{.space}{.v2,.v4,.v8}.type dst, [address]."""
    return _load(decoder, ins, mods)


@control("ld.acquire ld.volatile ld.relaxed")
def polling_load(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """A load that may be part of a spin loop: also a scheduling point."""
    return _load(decoder, ins, mods)


def loaded_kind(type_: str) -> str:
    """The kind of what a load of a type gives."""
    return ("i" if type_[0] == "s" else "u") + str(min(TYPE_BYTES[type_], 8))


def _load(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    space = space_of(mods)
    mods.take("v2", "v4", "v8")
    type_ = mods.need(_TYPES)
    mods.drop(_HINTS).done()
    size, kind = TYPE_BYTES[type_], loaded_kind(type_)
    target = ins.operands[0]
    count = len(target.items) if isinstance(target, Vector) else 1
    write = decoder.write_rows(target, [kind] * count)
    if size == 16:
        raise mods.error("128-bit registers are not implemented")
    if space == "param" and (numbers := decoder.parameters(ins.operands[1], kind, count)):
        return lambda warp, mask: write(warp.slots, [warp.slots[n] for n in numbers], mask)
    at = address_reader(decoder, ins.operands[1], space)
    dtype = DTYPES[kind]

    def run(warp: Warp, mask: np.ndarray) -> None:
        slots = warp.slots
        values = load_at(warp, space, at(slots), mask, size, count)
        write(slots, np.ascontiguousarray(values.T).view(dtype), mask)

    return run


@effect("st")
def store(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """st{.space}{.v2,.v4,.v8}.type [address], source."""
    space = space_of(mods)
    mods.take("v2", "v4", "v8")
    size = TYPE_BYTES[mods.need(_TYPES)]
    mods.drop(_HINTS).done()
    if size == 16:
        raise mods.error("128-bit registers are not implemented")
    reads = decoder.read_all(ins.operands[1], UNSIGNED[size])
    at = address_reader(decoder, ins.operands[0], space)

    def run(warp: Warp, mask: np.ndarray) -> None:
        slots = warp.slots
        values = [read(slots) for read in reads]
        store_at(
            warp,
            space,
            at(slots),
            values[0] if len(values) == 1 else np.stack(values, axis=1),
            mask,
        )
        if space != "local":
            warp.machine.progress += 1

    return run


# Atomics: lanes with the same address take effect one after the other, in lane order.
COMBINE: dict[str, Callable] = {
    "add": lambda old, new: old + new,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "min": np.minimum,
    "max": np.maximum,
    "exch": lambda old, new: new,
    "inc": lambda old, new: np.where(old >= new, 0, old + 1).astype(old.dtype),
    "dec": lambda old, new: np.where((old == 0) | (old > new), new, old - 1).astype(old.dtype),
}


def combine_values(operation: str, type_: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """`old` combined with `new`, both as bits of a type such as f32, bf16x2, u32."""
    if type_ in ("f16x2", "bf16x2"):
        halves = zip(split_halves(old), split_halves(new), strict=True)
        return pack_halves(*(combine_values(operation, type_[:-2], a, b) for a, b in halves))
    function = COMBINE[operation]
    if type_ in NARROW:
        load_, store_ = NARROW[type_].load, NARROW[type_].store
        return store_(function(load_(old), load_(new)))
    kind = {"b": "u"}.get(type_[0], type_[0].replace("s", "i")) + str(TYPE_BYTES[type_])
    dtype = DTYPES[kind]
    return function(old.view(dtype), new.view(dtype)).view(old.dtype)


@control("atom red")
def atomic(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """Handles atom and red of every operation, scalar or .v2/.v4/.v8; and atom.cas."""
    space = space_of(mods)
    operation = mods.need("add and or xor min max exch inc dec cas")
    mods.take("v2", "v4", "v8")
    type_ = mods.need(_TYPES)
    mods.drop(_HINTS + " noftz").done()
    returns = ins.opcode.startswith("atom")
    size = TYPE_BYTES[type_]
    kind = UNSIGNED[size]
    target, address, *values = ins.operands if returns else (None, *ins.operands)
    writes = decoder.write_all(target, kind) if returns else []
    at = address_reader(decoder, address, space)
    reads = [decoder.read_all(v, kind) for v in values]

    def run(warp: Warp, mask: np.ndarray) -> None:
        slots = warp.slots
        addresses = at(slots)
        operands = [np.stack([read(slots) for read in r], axis=1) for r in reads]
        before = np.zeros((LANES, len(reads[0])), DTYPES[kind])
        for part in _rounds(addresses, mask):
            old = load_at(warp, space, addresses, part, size, len(reads[0]))
            if operation == "cas":
                new = np.where(old == operands[0], operands[1], old)
            else:
                new = combine_values(operation, type_, old, operands[0])
            store_at(warp, space, addresses, new, part)
            before[part] = old[part]
        for column, write in zip(np.ascontiguousarray(before.T), writes, strict=False):
            write(slots, column, mask)
        if space != "local":
            warp.machine.progress += 1

    return run


def _rounds(addresses: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    """Splits the lanes of the mask so that no part has two lanes with the same address.

    Lanes with equal addresses come in lane order.
    """
    lanes = np.flatnonzero(mask)
    if len(set(addresses[lanes].tolist())) == len(lanes):
        return [mask]
    seen: Counter[int] = Counter()
    turn = np.full(LANES, -1)
    for lane in lanes:
        address = int(addresses[lane])
        turn[lane] = seen[address]
        seen[address] += 1
    return [turn == number for number in range(max(seen.values()))]


# Address conversions: generic shared addresses are the 32-bit ones plus the window's base.
_SHARED_BASE, _LOCAL_BASE = np.uint64(SHARED_WINDOW), np.uint64(LOCAL_WINDOW)
for _name in ("shared", "shared::cta", "shared::cluster"):
    define(f"cvta.{_name}.u64", "u8", "u8", lambda a: a + _SHARED_BASE)
    define(f"cvta.to.{_name}.u64", "u8", "u8", lambda a: a - _SHARED_BASE)
    define(f"cvta.{_name}.u32 cvta.to.{_name}.u32", "u4", "u4", lambda a: a)
    define(
        f"mapa.{_name}.u32",
        "u4",
        "u4 u4",
        lambda a, rank: (a & np.uint32(OFFSET_MASK)) | (rank << np.uint32(24)),
    )
    define(
        f"mapa.{_name}.u64",
        "u8",
        "u8 u4",
        lambda a, rank: (a & np.uint64(OFFSET_MASK)) | (rank.astype(np.uint64) << np.uint64(24)),
    )
    define(f"getctarank.{_name}.u32", "u4", "u4", lambda a: a >> np.uint32(24))
define(
    "mapa.u64",
    "u8",
    "u8 u4",
    lambda a, rank: (a & ~np.uint64(0xFF000000)) | (rank.astype(np.uint64) << np.uint64(24)),
)
define("cvta.local.u64", "u8", "u8", lambda a: a + _LOCAL_BASE)
define("cvta.to.local.u64", "u8", "u8", lambda a: a - _LOCAL_BASE)
for _name in ("global", "const", "param"):
    define(f"cvta.{_name}.u64 cvta.to.{_name}.u64", "u8", "u8", lambda a: a)
for _name, _low, _high in (
    ("shared", SHARED_WINDOW, LOCAL_WINDOW),
    ("global", 0, PARAM_WINDOW),
    ("local", LOCAL_WINDOW, 1 << 63),
):
    define(
        f"isspacep.{_name}",
        "pred",
        "u8",
        lambda a, low=_low, high=_high: (a >= np.uint64(low)) & (a < np.uint64(high)),
    )


@effect(
    "prefetch prefetchu discard applypriority createpolicy cp.async.bulk.prefetch "
    "cp.async.bulk.prefetch.tensor"
)
def hint(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """Hints to the caches: nothing happens; a policy is the number 0."""
    if not ins.opcode.startswith("createpolicy"):
        return lambda warp, mask: None
    write = decoder.write(ins.operands[0], "u8")
    return lambda warp, mask: write(warp.slots, np.zeros(LANES, np.uint64), mask)


def _whole(operand: Operand) -> bool:
    return not isinstance(operand, Vector)


@effect("mov")
def move_vector(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """Handles mov between a wide register and the vector of its parts, low part first."""
    mods.need("b16 b32 b64 u32 u64")
    mods.done()
    target, source = ins.operands
    if _whole(target) and _whole(source):
        raise mods.error("operands are not implemented")
    vector, whole = (source, target) if _whole(target) else (target, source)
    size = int(ins.opcode[-2:]) // 8
    part = size // len(vector.items)
    if size == 8 and len(vector.items) == 2:
        return (
            _split_pair(decoder, vector, whole)
            if whole is source
            else _join_pair(decoder, vector, whole)
        )
    kind, wide = UNSIGNED[part], UNSIGNED[size]
    if whole is source:
        read, writes = decoder.read(whole, wide), decoder.write_all(vector, kind)

        def split(warp: Warp, mask: np.ndarray) -> None:
            parts = read(warp.slots).view(DTYPES[kind]).reshape(LANES, -1)
            for index, write in enumerate(writes):
                write(warp.slots, parts[:, index].copy(), mask)

        return split
    reads, write = decoder.read_all(vector, kind), decoder.write(whole, wide)

    def join(warp: Warp, mask: np.ndarray) -> None:
        parts = np.stack([read(warp.slots) for read in reads], axis=1)
        write(warp.slots, parts.view(DTYPES[wide]).reshape(LANES), mask)

    return join


def _join_pair(decoder: OperandDecoder, vector: Vector, whole: Register) -> Run:
    """mov.b64 d, {lo, hi}: free when d is kept as a pair."""
    if decoder.home(whole) == "pair":
        low, high = decoder.read_all(vector, "f4")
        write = decoder.write(whole, "pair")
        return lambda warp, mask: write(warp.slots, (low(warp.slots), high(warp.slots)), mask)
    low, high = decoder.read_all(vector, "u4")
    write = decoder.write(whole, "u8")

    def join(warp: Warp, mask: np.ndarray) -> None:
        both = np.empty((LANES, 2), np.uint32)
        both[:, 0], both[:, 1] = low(warp.slots), high(warp.slots)
        write(warp.slots, both.view(np.uint64).reshape(LANES), mask)

    return join


def _split_pair(decoder: OperandDecoder, vector: Vector, whole: Operand) -> Run:
    """mov.b64 {lo, hi}, s: free when s is kept as a pair."""
    if decoder.home(whole) == "pair":
        read, (low, high) = decoder.read(whole, "pair"), decoder.write_all(vector, "f4")

        def run(warp: Warp, mask: np.ndarray) -> None:
            first, second = read(warp.slots)
            low(warp.slots, first, mask)
            high(warp.slots, second, mask)

        return run
    read, (low, high) = decoder.read(whole, "u8"), decoder.write_all(vector, "u4")

    def split(warp: Warp, mask: np.ndarray) -> None:
        parts = read(warp.slots).view(np.uint32).reshape(LANES, 2)
        low(warp.slots, parts[:, 0].copy(), mask)
        high(warp.slots, parts[:, 1].copy(), mask)

    return split
