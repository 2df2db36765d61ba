"""Asynchronous copies: TMA tensor copies and reductions, bulk copies, and cp.async."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from jax_fa.emulator.barriers import Mbarrier
from jax_fa.emulator.cta import Cta, Wait, Warp
from jax_fa.emulator.faults import OutOfBoundsError
from jax_fa.emulator.groups import groups_of
from jax_fa.emulator.layouts import packed_chunks
from jax_fa.emulator.loadstore import address_reader, combine_values, load_at
from jax_fa.emulator.machine import Operation
from jax_fa.emulator.memory import CHUNK, OFFSET_MASK, RANK_SHIFT, Claim, Memory, words_of
from jax_fa.emulator.operands import OperandDecoder
from jax_fa.emulator.ptx import Address, Instruction, Operand, Vector
from jax_fa.emulator.registry import Modifiers, Run, control, effect
from jax_fa.emulator.sync import mbarrier_at, signalled_mbarrier
from jax_fa.emulator.tensor_map import (
    Part,
    TensorMap,
    box_shape,
    decode_tensor_map,
    in_range,
    load_box,
)
from jax_fa.emulator.values import DTYPES, LANES, UNSIGNED

_REDUCTIONS = "add min max inc dec and or xor"


def _issue(
    warp: Warp, what: str, *phases: Callable[[], None], signals: Iterable[Mbarrier] = ()
) -> Operation:
    return warp.machine.submit(Operation(what, phases, warp.place, signals))


def _who(warp: Warp, ins: Instruction, what: str) -> str:
    warp.line = ins.line
    return f"the {what} issued by CTA {warp.cta.number} warp {warp.index} at line {ins.line}"


def _read_chunks(cta: Cta, chunks: np.ndarray) -> np.ndarray:
    return cta.shared.wide[chunks].reshape(-1).view(np.uint8)


def _write_chunks(cta: Cta, chunks: np.ndarray, data: np.ndarray) -> None:
    cta.shared.wide[chunks] = data.view(np.uint64).reshape(-1, 2)


def _targets(warp: Warp, address: int, mask: int | None) -> list[Cta]:
    """CTAs a copy into shared memory goes to."""
    cluster = warp.cta.cluster
    if mask is None:
        return [cluster.cta_at(address)]
    ranks = [rank for rank in range(16) if mask >> rank & 1]
    if not ranks or ranks[-1] >= len(cluster.ctas):
        raise OutOfBoundsError(f"multicast mask {mask:#x} in a cluster of {len(cluster.ctas)}")
    return [cluster.ctas[rank] for rank in ranks]


def _signal_address(barrier: int, target: Cta, *, multicast: bool, pair: bool) -> int:
    """The mbarrier that hears of the bytes landing in `target`.

    Without multicast it is the one named. With it, the one at the same offset in the target
    CTA; for .cta_group::2 in that CTA of the target's pair that has the named one's parity.
    """
    if not multicast:
        return barrier
    rank = target.rank
    if pair:
        rank = rank & ~1 | (barrier >> RANK_SHIFT) & 1
    return rank << RANK_SHIFT | barrier & OFFSET_MASK


class _Issue:
    """One lane's copy into shared memory: fetches its bytes when it lands."""

    def __init__(self, warp: Warp, what: str, size: int, fetch: Callable[[], np.ndarray]) -> None:
        self.warp, self.what, self.size, self.fetch = warp, what, size, fetch

    def send(self, target: Cta, chunks: np.ndarray, barrier_address: int) -> None:
        """Copies to one CTA, then completes `size` bytes on an mbarrier."""
        barrier = signalled_mbarrier(self.warp, barrier_address)
        claim = target.shared.begin_write(chunks, self.what)

        def land() -> None:
            _write_chunks(target, chunks, self.fetch())
            target.shared.end(claim)
            barrier.complete(self.size)

        _issue(self.warp, self.what, land, signals=[barrier])


def _lanes(mask: np.ndarray) -> list[int]:
    return [int(lane) for lane in np.flatnonzero(mask)]


def _one(lane: int) -> np.ndarray:
    only = np.zeros(LANES, np.bool_)
    only[lane] = True
    return only


def tensor_map_at(warp: Warp, addresses: np.ndarray, lane: int) -> TensorMap:
    """Decodes the TMA descriptor at a generic address."""
    words = load_at(warp, "generic", addresses, _one(lane), 8, 8)[lane]
    return decode_tensor_map(words.tobytes())


@effect("cp.async.bulk.tensor cp.reduce.async.bulk.tensor")
def tensor_copy(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """TMA tile load, store and reduction, of one to five dimensions."""
    mods.need("1d 2d 3d 4d 5d")
    loads = mods.left[0].startswith("shared")
    reduction = mods.take(*_REDUCTIONS.split()) if ins.opcode.startswith("cp.reduce") else None
    multicast = mods.take("multicast::cluster") is not None
    pair = mods.take("cta_group::1", "cta_group::2") == "cta_group::2"
    mods.drop("L2::cache_hint")
    mods.drop("tile shared::cluster shared::cta global mbarrier::complete_tx::bytes bulk_group")
    mods.done()
    first, second, *rest = ins.operands
    map_operand, shared_operand = (second, first) if loads else (first, second)
    descriptor = address_reader(decoder, Address(map_operand.base, map_operand.offset), "generic")
    coordinates = decoder.read_all(map_operand.rest[0], "i4")
    shared = address_reader(decoder, shared_operand, "shared")
    if loads:
        barrier = address_reader(decoder, rest[0], "shared")
        mask_of = decoder.read(rest[1], "u2") if multicast else None
        return _tensor_load(ins, descriptor, coordinates, shared, _Signal(barrier, mask_of, pair))

    return _tensor_store(ins, descriptor, coordinates, shared, reduction)


class _Signal:
    """Operands that say where a load goes and whom it tells."""

    def __init__(self, barrier: Callable, mask_of: Callable | None, pair: bool) -> None:
        self.barrier, self.mask_of, self.pair = barrier, mask_of, pair

    def send(
        self, issue: _Issue, lane: int, address: int, chunks: Callable[[int], np.ndarray]
    ) -> None:
        """Sends an issue to all its targets."""
        slots = issue.warp.slots
        mask = None if self.mask_of is None else int(self.mask_of(slots)[lane])
        barrier = int(self.barrier(slots)[lane])
        where = chunks(address & OFFSET_MASK)
        for target in _targets(issue.warp, address, mask):
            issue.send(
                target,
                where,
                _signal_address(barrier, target, multicast=mask is not None, pair=self.pair),
            )


def _tensor_load(
    ins: Instruction,
    descriptor: Callable,
    coordinates: list[Callable],
    shared: Callable,
    signal: _Signal,
) -> Run:
    def run(warp: Warp, mask: np.ndarray) -> None:
        slots, memory = warp.slots, warp.machine.memory
        for lane in _lanes(mask):
            tensor = tensor_map_at(warp, descriptor(slots), lane)
            corner = tuple(int(c(slots)[lane]) for c in coordinates)
            what = _who(warp, ins, f"TMA load of box {corner}")
            issue = _Issue(
                warp, what, tensor.box_bytes, lambda t=tensor, c=corner: load_box(t, c, memory)
            )
            signal.send(
                issue,
                lane,
                int(shared(slots)[lane]),
                lambda at, t=tensor: packed_chunks(at, t.box_bytes, t.swizzle),
            )
            warp.machine.count("bytes TMA load", tensor.box_bytes)

    return run


def _tensor_store(
    ins: Instruction,
    descriptor: Callable,
    coordinates: list[Callable],
    shared: Callable,
    reduction: str | None,
) -> Run:
    def run(warp: Warp, mask: np.ndarray) -> None:
        slots = warp.slots
        issued: dict[tuple, Operation] = {}
        for lane in _lanes(mask):
            tensor = tensor_map_at(warp, descriptor(slots), lane)
            corner = tuple(int(c(slots)[lane]) for c in coordinates)
            address = int(shared(slots)[lane])
            # Compilers let a whole warp issue one store: equal stores are one, equal sums are not.
            key = (tensor, corner, address, lane if reduction else 0)
            if key not in issued:
                verb = "reduction" if reduction else "store"
                what = _who(warp, ins, f"TMA {verb} of box {corner}")
                cta = warp.cta.cluster.cta_at(address)
                chunks = packed_chunks(address & OFFSET_MASK, tensor.box_bytes, tensor.swizzle)
                part = in_range(tensor, corner, warp.machine.memory)
                claim = cta.shared.begin_read(chunks, what, _used_chunks(tensor, part, chunks))
                write = _box_writer(tensor, part, reduction)
                issued[key] = _read_then(warp, what, cta, claim, write)
                warp.machine.count(f"bytes TMA {verb}", tensor.box_bytes)
            groups_of(warp, "bulk").add(issued[key], _one(lane))

    return run


def _used_chunks(tensor: TensorMap, part: Part | None, chunks: np.ndarray) -> np.ndarray:
    """The chunks of a box that hold elements inside the tensor; the others are not stored."""
    inside = np.zeros(box_shape(tensor), np.bool_)
    if part is not None:
        inside[part.place] = True
    return chunks[inside.reshape(-1, CHUNK).any(axis=1)]


def _read_then(
    warp: Warp, what: str, cta: Cta, claim: Claim, write: Callable[[np.ndarray], None]
) -> Operation:
    """An operation that first reads the shared memory it claimed, then passes the bytes on."""
    taken: list[np.ndarray] = []

    def take() -> None:
        taken.append(_read_chunks(cta, claim.chunks).copy())
        cta.shared.end(claim)

    return _issue(warp, what, take, lambda: write(taken.pop()))


def _box_writer(
    tensor: TensorMap, part: Part | None, reduction: str | None
) -> Callable[[np.ndarray], None]:
    """A function that stores a packed box where it lies inside the tensor."""

    def write(data: np.ndarray) -> None:
        if part is None:
            return
        new = data[: tensor.box_bytes].reshape(box_shape(tensor))[part.place]
        if reduction is not None:
            bits = DTYPES[UNSIGNED[tensor.element_bytes]]
            old = np.ascontiguousarray(part.view).view(bits)
            new = combine_values(
                reduction, tensor.type, old, np.ascontiguousarray(new).view(bits)
            ).view(np.uint8)
        part.view[...] = new

    return write


@effect("cp.async.bulk cp.reduce.async.bulk")
def bulk_copy(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """cp.async.bulk and cp.reduce.async.bulk between global and shared memory."""
    target, source = mods.left[:2]
    mods.left = mods.left[2:]
    reduction = type_ = None
    if ins.opcode.startswith("cp.reduce"):
        reduction = mods.need(_REDUCTIONS)
        type_ = mods.need("f32 f16 bf16 u32 s32 u64 s64 b32 b64 f64")
        mods.drop("noftz")
    multicast = mods.take("multicast::cluster") is not None
    mods.drop("mbarrier::complete_tx::bytes bulk_group L2::cache_hint").done()
    if isinstance(ins.operands[-1], Vector):
        raise mods.error("operands are not implemented")
    spaces = ["shared" if s.startswith("shared") else "global" for s in (target, source)]
    to = address_reader(decoder, ins.operands[0], spaces[0])
    from_ = address_reader(decoder, ins.operands[1], spaces[1])
    size = decoder.read(ins.operands[2], "u4")
    if spaces[0] == "global":
        return _bulk_store(ins, to, from_, size, (reduction, type_))
    barrier = address_reader(decoder, ins.operands[3], "shared")
    mask_of = decoder.read(ins.operands[4], "u2") if multicast else None
    signal = _Signal(barrier, mask_of, False)
    if spaces[1] == "global":
        return _bulk_load(ins, to, from_, size, signal)
    return _bulk_exchange(ins, to, from_, size, (barrier, reduction, type_))


def _check_bulk(size: int, *addresses: int) -> None:
    if size % CHUNK or any(a % CHUNK for a in addresses):
        raise OutOfBoundsError(
            f"bulk copy of {size} bytes between "
            f"{', '.join(hex(a) for a in addresses)}: all must be multiples "
            "of 16"
        )


def _bulk_load(
    ins: Instruction, to: Callable, from_: Callable, size: Callable, signal: _Signal
) -> Run:
    def run(warp: Warp, mask: np.ndarray) -> None:
        slots, memory = warp.slots, warp.machine.memory
        for lane in _lanes(mask):
            source, count = int(from_(slots)[lane]), int(size(slots)[lane])
            address = int(to(slots)[lane])
            _check_bulk(count, source, address)
            region = memory.region(source, source + count)
            begin = source - region.base
            what = _who(warp, ins, f"bulk load of {count} bytes from {region.name!r}")
            issue = _Issue(
                warp, what, count, lambda r=region, b=begin, n=count: r.data[b : b + n].copy()
            )
            signal.send(issue, lane, address, lambda at, n=count: packed_chunks(at, n, "none"))
            warp.machine.count("bytes bulk load", count)

    return run


def _bulk_store(
    ins: Instruction,
    to: Callable,
    from_: Callable,
    size: Callable,
    reduction: tuple[str | None, str | None],
) -> Run:
    def run(warp: Warp, mask: np.ndarray) -> None:
        slots, memory = warp.slots, warp.machine.memory
        for lane in _lanes(mask):
            address, count = int(from_(slots)[lane]), int(size(slots)[lane])
            goal = int(to(slots)[lane])
            _check_bulk(count, goal, address)
            region = memory.region(goal, goal + count)
            view = region.data[goal - region.base : goal - region.base + count]
            cta = warp.cta.cluster.cta_at(address)
            verb = "reduction" if reduction[0] else "store"
            what = _who(warp, ins, f"bulk {verb} of {count} bytes to {region.name!r}")
            chunks = packed_chunks(address & OFFSET_MASK, count, "none")
            operation = _read_then(
                warp,
                what,
                cta,
                cta.shared.begin_read(chunks, what),
                lambda data, v=view: _combine_into(v, data, *reduction),
            )
            groups_of(warp, "bulk").add(operation, _one(lane))
            warp.machine.count(f"bytes bulk {verb}", count)

    return run


def _combine_into(
    view: np.ndarray, data: np.ndarray, operation: str | None, type_: str | None
) -> None:
    """Stores bytes, or combines them with what is there."""
    if operation is None:
        view[:] = data
        return
    bits = DTYPES[
        UNSIGNED[{"f16": 2, "bf16": 2, "u64": 8, "s64": 8, "b64": 8, "f64": 8}.get(type_, 4)]
    ]
    old, new = view.view(bits), np.ascontiguousarray(data).view(bits)
    view.view(bits)[:] = combine_values(operation, type_, old, new)


def _bulk_exchange(
    ins: Instruction,
    to: Callable,
    from_: Callable,
    size: Callable,
    how: tuple[Callable, str | None, str | None],
) -> Run:
    """Shared memory of this CTA to that of another CTA of the cluster."""
    barrier_of, reduction, type_ = how

    def run(warp: Warp, mask: np.ndarray) -> None:
        slots, cluster = warp.slots, warp.cta.cluster
        for lane in _lanes(mask):
            source, goal = int(from_(slots)[lane]), int(to(slots)[lane])
            count = int(size(slots)[lane])
            _check_bulk(count, source, goal)
            here, there = cluster.cta_at(source), cluster.cta_at(goal)
            what = _who(warp, ins, f"bulk copy of {count} bytes to CTA {there.number}")
            read = here.shared.begin_read(packed_chunks(source & OFFSET_MASK, count, "none"), what)
            write = there.shared.begin_write(packed_chunks(goal & OFFSET_MASK, count, "none"), what)
            barrier = signalled_mbarrier(warp, int(barrier_of(slots)[lane]))

            def land(
                here: Cta = here,
                there: Cta = there,
                read: Claim = read,
                write: Claim = write,
                barrier: object = barrier,
                count: int = count,
            ) -> None:
                data = _read_chunks(here, read.chunks).copy()
                if reduction:
                    old = _read_chunks(there, write.chunks).copy()
                    _combine_into(old, data, reduction, type_)
                    data = old
                _write_chunks(there, write.chunks, data)
                here.shared.end(read)
                there.shared.end(write)
                barrier.complete(count)

            _issue(warp, what, land, signals=[barrier])
            warp.machine.count("bytes cluster copy", count)

    return run


@effect("cp.async.bulk.commit_group cp.async.commit_group")
def commit_group(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """Closes the group of the operations issued since the last one."""
    mods.done()
    unit = "bulk" if "bulk" in ins.opcode else "cp.async"

    def run(warp: Warp, mask: np.ndarray) -> None:
        for groups in groups_of(warp, unit).of(mask):
            groups.commit()

    return run


@control("cp.async.bulk.wait_group cp.async.wait_group cp.async.wait_all")
def wait_group(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """Waits until all but the newest N groups are complete (.read: have read their source)."""
    phases = 1 if mods.take("read") else None
    mods.done()
    unit = "bulk" if "bulk" in ins.opcode else "cp.async"
    everything = ins.opcode.startswith("cp.async.wait_all")
    newest = 0 if everything else decoder.read(ins.operands[0], "u4")

    def run(warp: Warp, mask: np.ndarray) -> Wait | None:
        parts = groups_of(warp, unit).of(mask)
        keep = 0 if everything else int(newest(warp.slots)[mask.argmax()])
        if everything:
            for groups in parts:
                groups.commit()
        pending = {o for groups in parts for o in groups.cover(keep, phases)}
        if not pending:
            return None
        return Wait(
            lambda: all(o.finished or (phases is not None and o.done >= phases) for o in pending),
            lambda: f"waits for {len(pending)} operations of {unit} groups",
            needs=pending,
        )

    return run


@effect("cp.async.ca cp.async.cg")
def small_copy(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """cp.async.{ca,cg}.shared.global [dst], [src], size{, src_size | ignore-src}{, policy}."""
    has_policy = mods.take("L2::cache_hint") is not None
    mods.drop("shared shared::cta global L2::64B L2::128B L2::256B").done()
    to = address_reader(decoder, ins.operands[0], "shared")
    from_ = address_reader(decoder, ins.operands[1], "global")
    size = int(ins.operands[2].bits)
    if size not in ((16,) if ins.opcode.startswith("cp.async.cg") else (4, 8, 16)):
        raise mods.error(f"copies of {size} bytes do not exist")
    more = ins.operands[3 : len(ins.operands) - has_policy]
    limits_of = _bytes_to_read(decoder, more, size)

    def run(warp: Warp, mask: np.ndarray) -> None:
        slots, machine, shared = warp.slots, warp.machine, warp.cta.shared
        targets = (to(slots)[mask] & np.uint32(OFFSET_MASK)).astype(np.int64)
        sources = from_(slots)[mask]
        limits = limits_of(slots)[mask]
        what = _who(warp, ins, "cp.async")
        _check_small(what, size, targets, sources, limits)
        if (last := int(targets.max()) + size - 1) >= shared.size:
            raise OutOfBoundsError(f"{what}: shared offset {last} is out of range")
        chunks = targets // CHUNK
        if size == CHUNK:
            claim = shared.begin_write(chunks, what)
        else:
            claim = shared.begin_word_write(words_of(targets, size), what)

        def land() -> None:
            data = _zero_filled(machine.memory, sources, limits, size)
            shared.views[data.itemsize].reshape(-1, data.shape[1])[targets // size] = data
            shared.end(claim)
            # Unlike bulk copies these write through the generic proxy.
            shared.mark_generic(chunks, warp.cta.rank * 64 + warp.index)

        groups_of(warp, "cp.async").add(_issue(warp, what, land), mask)
        machine.count("bytes cp.async", size * len(targets))

    return run


def _bytes_to_read(
    decoder: OperandDecoder, operands: tuple[Operand, ...], size: int
) -> Callable[[list], np.ndarray]:
    """How many bytes each lane's copy reads; the others become zero."""
    if not operands:
        return lambda slots: np.full(LANES, size)
    (operand,) = operands
    if decoder.home(operand) == "pred":
        is_ignored = decoder.read(operand, "pred")
        return lambda slots: np.where(is_ignored(slots), 0, size)
    return decoder.read(operand, "u4")


def _check_small(
    what: str, size: int, targets: np.ndarray, sources: np.ndarray, limits: np.ndarray
) -> None:
    """Refuses copies that are misaligned, or that read more than they write."""
    if (targets % size).any() or (sources[limits > 0] % np.uint64(size)).any():
        raise OutOfBoundsError(f"{what} of {size} bytes is misaligned")
    if (limits > size).any():
        raise OutOfBoundsError(f"{what} of {size} bytes reads {int(limits.max())}")


def _zero_filled(memory: Memory, sources: np.ndarray, limits: np.ndarray, size: int) -> np.ndarray:
    """`size` bytes from each source, zero from `limits` on: a row for each, in units of up to 8."""
    unit = min(size, 8)
    whole = limits >= size
    if whole.all():
        return memory.load(sources, unit, size // unit)
    data = np.zeros((len(sources), size // unit), DTYPES[UNSIGNED[unit]])
    if whole.any():
        data[whole] = memory.load(sources[whole], unit, size // unit)
    for row in np.flatnonzero(~whole & (limits > 0)):
        source, limit = int(sources[row]), int(limits[row])
        region = memory.region(source, source + limit)
        begin = source - region.base
        data[row].view(np.uint8)[:limit] = region.data[begin : begin + limit]
    return data


@effect("cp.async.mbarrier.arrive")
def copy_arrive(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """Arrives on an mbarrier when the lane's cp.async copies so far are complete."""
    without_increment = mods.take("noinc") is not None
    mods.drop("shared shared::cta b64").done()
    at = address_reader(decoder, ins.operands[0], "shared")

    def run(warp: Warp, mask: np.ndarray) -> None:
        groups = groups_of(warp, "cp.async")
        for lane in _lanes(mask):
            barrier = mbarrier_at(warp, int(at(warp.slots)[lane]))
            if not without_increment:
                barrier.pending += 1
            pending = [o for o in groups.at(lane).operations() if not o.finished]

            def arrive(pending: list = pending, barrier: object = barrier) -> None:
                for operation in pending:
                    warp.machine.finish(operation)
                barrier.arrive()

            what = _who(warp, ins, "cp.async.mbarrier.arrive")
            _issue(warp, what, arrive, signals=[barrier])

    return run
