"""Instructions: mbarriers, named barriers, the cluster barrier, fences, warp-level barriers."""

from __future__ import annotations

import numpy as np

from jax_fa.emulator.barriers import Mbarrier, NamedBarrier
from jax_fa.emulator.cta import Cta, Wait, Warp
from jax_fa.emulator.faults import BarrierError, ProxyFenceError
from jax_fa.emulator.operands import OperandDecoder
from jax_fa.emulator.ptx import Address, Immediate, Instruction, Sink
from jax_fa.emulator.registry import Modifiers, Run, control, effect
from jax_fa.emulator.values import FULL, LANES


def mbarrier_at(warp: Warp, address: int, *, window: str = "shared::cluster") -> Mbarrier:
    """The mbarrier at a 32-bit shared address, in whichever CTA of the cluster that is."""
    cta = warp.cta.cluster.cta_at(address)
    offset = address & 0xFFFFFF
    barrier = cta.mbarriers.get(offset)
    if barrier is None:
        raise BarrierError(
            f"no mbarrier is initialised at {window} offset {offset} of CTA "
            f"{cta.number} (live: {sorted(cta.mbarriers)})"
        )
    return barrier


def signalled_mbarrier(warp: Warp, address: int) -> Mbarrier:
    """The mbarrier at an address that an asynchronous unit is going to signal."""
    barrier = mbarrier_at(warp, address)
    if not barrier.published:
        raise ProxyFenceError(
            f"an asynchronous operation signals {barrier}, and no fence.mbarrier_init or "
            "fence.proxy.async followed its mbarrier.init"
        )
    return barrier


def _lanes(decoder: OperandDecoder, operand: Address) -> object:
    """Reader of a 32-bit shared address, for every lane (64-bit registers are narrowed)."""
    base, offset = decoder.read(operand.base, "u4"), np.uint32(operand.offset & 0xFFFFFFFF)
    return (lambda slots: base(slots) + offset) if operand.offset else base


def _by_address(addresses: np.ndarray, mask: np.ndarray) -> list[tuple[int, int]]:
    """(address, number of lanes) for the active lanes."""
    found, counts = np.unique(addresses[mask], return_counts=True)
    return [(int(a), int(c)) for a, c in zip(found, counts, strict=True)]


@effect("mbarrier.init")
def mbarrier_init(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """mbarrier.init [address], count."""
    mods.drop("shared shared::cta b64").done()
    at, count = _lanes(decoder, ins.operands[0]), decoder.read(ins.operands[1], "u4")

    def run(warp: Warp, mask: np.ndarray) -> None:
        addresses, counts = at(warp.slots)[mask], count(warp.slots)[mask]
        for address, expected in zip(addresses, counts, strict=True):
            cta, offset = warp.cta.cluster.cta_at(int(address)), int(address) & 0xFFFFFF
            if not 1 <= int(expected) < 1 << 20:
                raise BarrierError(f"mbarrier.init at offset {offset} with count {int(expected)}")
            barrier = Mbarrier(f"at offset {offset} of CTA {cta.number}", int(expected))
            cta.mbarriers[offset] = barrier
            warp.initialised.append(barrier)
            cta.shared.written[offset : offset + 8] = 1

    return run


@effect("mbarrier.inval")
def mbarrier_inval(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """mbarrier.inval [address]."""
    mods.drop("shared shared::cta b64").done()
    at = _lanes(decoder, ins.operands[0])

    def run(warp: Warp, mask: np.ndarray) -> None:
        for address, _ in _by_address(at(warp.slots), mask):
            mbarrier_at(warp, address)
            del warp.cta.cluster.cta_at(address).mbarriers[address & 0xFFFFFF]

    return run


@control("mbarrier.arrive mbarrier.arrive_drop mbarrier.expect_tx mbarrier.complete_tx")
def mbarrier_arrive(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """mbarrier.arrive{.expect_tx}, .expect_tx, .complete_tx; the state result is the phase."""
    drop = "arrive_drop" in ins.opcode
    transaction = mods.take("expect_tx", "complete_tx") or (
        ins.opcode.split(".")[1] if "_tx" in ins.opcode.split(".")[1] else None
    )
    arrives = ins.opcode.startswith("mbarrier.arrive")
    mods.drop("shared shared::cta shared::cluster b64 release relaxed cta cluster noComplete")
    mods.done()
    index = next(i for i, o in enumerate(ins.operands) if isinstance(o, Address))
    target = ins.operands[0] if index else Sink()
    write = decoder.write(target, "u8")
    at = _lanes(decoder, ins.operands[index])
    rest = ins.operands[index + 1 :]
    amount = decoder.read(rest[0], "u4") if rest else None

    def run(warp: Warp, mask: np.ndarray) -> None:
        addresses = at(warp.slots)
        amounts = np.ones(LANES, np.uint32) if amount is None else amount(warp.slots)
        state = np.zeros(LANES, np.uint64)
        for address in np.unique(addresses[mask]):
            barrier = mbarrier_at(warp, int(address))
            lanes = mask & (addresses == address)
            state[lanes] = barrier.phase
            total, count = int(amounts[lanes].sum()), int(lanes.sum())
            if transaction == "expect_tx":
                barrier.expect(total)
            elif transaction == "complete_tx":
                barrier.complete(total)
            if drop:
                barrier.count -= count
            if arrives:
                barrier.arrive(count if transaction else total)
        warp.machine.progress += 1
        write(warp.slots, state, mask)

    return run


@control("mbarrier.try_wait mbarrier.test_wait")
def mbarrier_wait(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """mbarrier.{try,test}_wait{.parity}: try_wait blocks, and now and then gives up early."""
    parity = mods.take("parity")
    mods.drop("shared shared::cta b64 acquire relaxed cta cluster").done()
    blocks = ins.opcode.startswith("mbarrier.try_wait")
    write = decoder.write(ins.operands[0], "pred")
    at = _lanes(decoder, ins.operands[1])
    which = decoder.read(ins.operands[2], "u4" if parity else "u8")

    def run(warp: Warp, mask: np.ndarray) -> Wait | None:
        addresses, phases = at(warp.slots)[mask], which(warp.slots)[mask]
        pairs = (
            {(int(a), int(p)) for a, p in zip(addresses, phases, strict=True)}
            if np.count_nonzero(addresses != addresses[0]) or np.count_nonzero(phases != phases[0])
            else {(int(addresses[0]), int(phases[0]))}
        )
        waits = [(mbarrier_at(warp, a), p) for a, p in pairs]
        barriers = [barrier for barrier, _ in waits]

        def over() -> bool:
            return all(b.passed(p) if parity else b.phase > p for b, p in waits)

        def finish(passed: bool) -> None:
            value = np.full(LANES, passed)
            if not passed and len(waits) > 1:
                now = {
                    a: b.passed(p) if parity else b.phase > p
                    for (a, p), (b, _) in zip(pairs, waits, strict=True)
                }
                value[mask] = [now[int(a)] for a in addresses]
            write(warp.slots, value, mask)

        if over():
            finish(True)
            return None
        if not blocks or warp.machine.gives_up():
            finish(False)
            if not blocks:
                return Wait(over, lambda: f"polls {waits[0][0]}", polls=True, needs=barriers)
            return None
        warp.machine.count_wait(warp.index)
        return Wait(
            over,
            lambda: ", ".join(
                f"waits for phase with parity {p} of {b}"
                if parity
                else f"waits for phase {p} of {b}"
                for b, p in waits
            ),
            finish,
            polls=True,
            needs=barriers,
        )

    return run


@effect("mbarrier.pending_count")
def mbarrier_pending_count(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """Refused: the state is opaque here."""
    raise mods.error("the state's pending count is not kept")


def _named(cta: Cta, number: int) -> NamedBarrier:
    if number > 15:
        raise BarrierError(f"barrier {number}: a CTA has barriers 0 to 15")
    return cta.named.setdefault(number, NamedBarrier(number))


@control(
    "bar.sync bar.arrive bar.cta.sync bar.cta.arrive barrier.sync barrier.arrive "
    "barrier.cta.sync barrier.cta.arrive"
)
def named_barrier(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """Named barriers: bar / barrier.cta .sync and .arrive."""
    aligned = mods.take("aligned") or ins.opcode.startswith("bar.")
    mods.done()
    blocks = "sync" in ins.opcode
    number = decoder.read(ins.operands[0], "u4")
    count = decoder.read(ins.operands[1], "u4") if len(ins.operands) > 1 else None

    def run(warp: Warp, mask: np.ndarray) -> Wait | None:
        if aligned:
            warp.need_full(mask, ins.opcode)
        lane = int(mask.argmax())
        barrier = _named(warp.cta, int(number(warp.slots)[lane]))
        expected = warp.cta.live_warps() * LANES if count is None else int(count(warp.slots)[lane])
        if expected % LANES or not expected:
            raise BarrierError(f"{barrier}: thread count {expected} is no multiple of {LANES}")
        generation = barrier.generation
        threads = LANES if aligned or np.array_equal(mask, warp.live) else int(mask.sum())
        barrier.arrive(threads, expected, f"warp {warp.index} line {ins.line}")
        warp.machine.progress += 1
        if not blocks or barrier.generation != generation:
            return None
        warp.machine.count_wait(warp.index)
        return Wait(lambda: barrier.generation != generation, lambda: f"waits at {barrier}")

    return run


@control("barrier.cluster.arrive")
def cluster_arrive(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """barrier.cluster.arrive: the threads' arrival at the cluster's barrier."""
    aligned = mods.take("aligned")
    mods.drop("release relaxed").done()

    def run(warp: Warp, mask: np.ndarray) -> None:
        if aligned:
            warp.need_full(mask, ins.opcode)
        cluster = warp.cta.cluster
        generations = warp.state.setdefault("cluster", np.full(LANES, -1))
        if (generations[mask] >= 0).any():
            raise BarrierError("barrier.cluster.arrive twice without a wait in between")
        generations[mask] = cluster.barrier.generation
        cluster.barrier.arrived |= {
            (warp.cta.rank, warp.index, int(lane)) for lane in np.flatnonzero(mask)
        }
        cluster.barrier.settle(cluster.live_threads())
        warp.machine.progress += 1

    return run


@control("barrier.cluster.wait")
def cluster_wait(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """barrier.cluster.wait: until every live thread of the cluster has arrived."""
    aligned = mods.take("aligned")
    mods.drop("acquire").done()

    def run(warp: Warp, mask: np.ndarray) -> Wait | None:
        if aligned:
            warp.need_full(mask, ins.opcode)
        cluster = warp.cta.cluster
        generations = warp.state.setdefault("cluster", np.full(LANES, -1))
        if (generations[mask] < 0).any():
            raise BarrierError("barrier.cluster.wait without barrier.cluster.arrive")
        last = int(generations[mask].max())
        generations[mask] = -1
        if cluster.barrier.generation > last:
            return None
        warp.machine.count_wait(warp.index)
        return Wait(
            lambda: cluster.barrier.generation > last,
            lambda: (
                f"waits at the cluster barrier ({len(cluster.barrier.arrived)} of "
                f"{cluster.live_threads()} threads)"
            ),
        )

    return run


@control("bar.warp.sync")
def warp_barrier(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """bar.warp.sync mask: waits until every live lane of the mask is here."""
    mods.done()
    members = decoder.read(ins.operands[0], "u4")

    def run(warp: Warp, mask: np.ndarray) -> Wait | None:
        if mask is FULL or np.array_equal(mask, warp.live):
            return None
        wanted = lanes_of(int(members(warp.slots)[int(mask.argmax())])) & warp.live
        if not (wanted & ~mask).any():
            return None
        key = ("warp barrier", wanted.tobytes())
        meeting = warp.state.setdefault(key, {"arrived": np.zeros(LANES, np.bool_), "round": 0})
        now = meeting["round"]
        meeting["arrived"] = meeting["arrived"] | mask
        if not (wanted & warp.live & ~meeting["arrived"]).any():
            meeting["round"] += 1
            meeting["arrived"] = np.zeros(LANES, np.bool_)
            return None
        return Wait(
            lambda: meeting["round"] != now,
            lambda: "waits at bar.warp.sync for other lanes of the warp",
        )

    return run


def lanes_of(bits: int) -> np.ndarray:
    """A 32-bit lane mask as booleans."""
    return (np.uint32(bits & 0xFFFFFFFF) >> np.arange(LANES, dtype=np.uint32)) & 1 == 1


def bits_of(lanes: np.ndarray) -> int:
    """Booleans of 32 lanes as a lane mask."""
    return int(np.packbits(lanes, bitorder="little").view(np.uint32)[0])


# Ordering between threads is sequentially consistent here, so most fences have nothing to do.
_FENCE_SUFFIX = "acq_rel sc release acquire cta cluster gpu sys aligned sync_restrict::shared::cta"


@effect("fence membar")
def fence(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """fence, fence.proxy, fence.mbarrier_init: publishes generic stores to the async proxy."""
    publishes = ins.opcode.startswith("fence.proxy.async") or "proxy.alias" in ins.opcode
    shows_barriers = publishes or "mbarrier_init" in ins.opcode
    mods.drop(
        "proxy async async::generic generic tensormap::generic alias mbarrier_init "
        "shared::cta shared::cluster shared global gl "
        f"sync_restrict::shared::cluster {_FENCE_SUFFIX}"
    ).done()

    def run(warp: Warp, mask: np.ndarray) -> None:
        if publishes:
            warp.cta.cluster.publish(warp)
        if shows_barriers:
            for barrier in warp.initialised:
                barrier.published = True
            warp.initialised.clear()

    return run


@control("nanosleep griddepcontrol")
def pause(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """A scheduling point without effect."""
    mods.drop("u32 wait launch_dependents").done()
    return lambda warp, mask: None


@effect("setmaxnreg")
def set_registers(decoder: OperandDecoder, ins: Instruction, mods: Modifiers) -> Run:
    """setmaxnreg.{inc,dec}: the warp's register budget, reported and otherwise ignored."""
    mods.need("inc dec")
    mods.drop("sync aligned u32").done()
    amount = ins.operands[0]
    if not isinstance(amount, Immediate) or amount.bits % 8 or not 24 <= amount.bits <= 256:
        raise mods.error("needs a multiple of 8 in 24..256")

    def run(warp: Warp, mask: np.ndarray) -> None:
        warp.need_full(mask, ins.opcode)
        warp.registers = amount.bits

    return run
