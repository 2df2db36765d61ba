"""CTAs and clusters: their warps, memories and barriers, and what they must not leave behind.

A warp has registers of 32 lanes. A divergent branch splits it into fragments and records a `Join`
at the branch's immediate post-dominator. A fragment that reaches its innermost join waits there
until all lanes of the join have arrived or exited; then they go on as one. Fragments of a warp are
scheduled independently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from jax_fa.emulator.barriers import ClusterBarrier, Mbarrier, NamedBarrier
from jax_fa.emulator.faults import (
    AsyncHazardError,
    BarrierError,
    DivergenceError,
    EmulationError,
    OutOfBoundsError,
    Place,
    TensorMemoryError,
)
from jax_fa.emulator.machine import Frame, Machine
from jax_fa.emulator.memory import OFFSET_MASK, RANK_SHIFT, SharedMemory
from jax_fa.emulator.ptx import Instruction
from jax_fa.emulator.tmem import TensorMemory
from jax_fa.emulator.values import FULL, LANES


class Wait:
    """The reason why a fragment does not run.

    Attributes:
      ready: whether it may go on.
      reason: says what is waited for, for the deadlock table.
      resume: called when it goes on, with True, or with False when `polls` and time ran out.
      polls: the instruction may give up and report failure (mbarrier.try_wait).
      needs: mbarriers and asynchronous operations that could end the wait.
    """

    __slots__ = ("ready", "reason", "resume", "polls", "needs")

    def __init__(
        self,
        ready: Callable[[], bool],
        reason: Callable[[], str],
        resume: Callable[[bool], None] | None = None,
        *,
        polls: bool = False,
        needs: Iterable[object] = (),
    ) -> None:
        self.ready = ready
        self.reason = reason
        self.resume = resume
        self.polls = polls
        self.needs = frozenset(needs)


class Join:
    """A meeting point of diverged lanes."""

    __slots__ = ("segment", "mask", "arrived", "outer")

    def __init__(self, segment: int, mask: np.ndarray) -> None:
        self.segment = segment
        self.mask = mask
        self.arrived = np.zeros(LANES, dtype=np.bool_)
        self.outer: tuple[Join, ...] = ()


class Fragment:
    """Lanes of one warp that run together."""

    __slots__ = ("warp", "segment", "mask", "joins", "wait")

    def __init__(self, warp: Warp, segment: int, mask: np.ndarray, joins: tuple[Join, ...]) -> None:
        self.warp = warp
        self.segment = segment
        self.mask = FULL if mask.all() else mask
        self.joins = joins
        self.wait: Wait | None = None


class RegisterUse(NamedTuple):
    """Bit sets of registers.

    Attributes:
      touched: those that an instruction names at all.
      written: its destinations.
      read: those whose value may matter to it.
      replaced: those whose value is lost to the lanes that execute it.
      is_multiply: whether it is a multiply of a warpgroup.
    """

    touched: int
    written: int
    read: int
    replaced: int
    is_multiply: bool


class InFlight:
    """Registers that an asynchronous instruction still reads or writes.

    Attributes:
      written, read: bit sets of register numbers.
      what: the instruction and its line, for messages.
      until: the instruction that gives the registers back, for messages.
    """

    __slots__ = ("written", "read", "what", "until")

    def __init__(self, written: int, read: int, what: str, until: str) -> None:
        self.written = written
        self.read = read
        self.what = what
        self.until = until

    def check(self, instruction: Instruction, touched: int, written: int) -> None:
        """Refuses an instruction that touches or writes registers in use."""
        if touched & self.written or written & self.read:
            raise AsyncHazardError(
                f"{instruction} touches registers of {self.what} before {self.until}"
            )


class Warp:
    """Thirty-two lanes of a CTA."""

    def __init__(self, cta: Cta, index: int, frame: Frame) -> None:
        self.cta = cta
        self.index = index
        self.machine = cta.cluster.machine
        threads = cta.cluster.machine.threads
        self.live = np.arange(LANES) + index * LANES < threads
        self.mask = FULL
        self.slots: list = frame.unwritten.copy()
        self.slots += [self._initial(s) if isinstance(s, str) else s for s in frame.slots]
        self.fragments = [Fragment(self, 0, self.live.copy(), ())]
        self.visits: dict[int, int] = {}
        self.in_flight: list[InFlight] = []
        # Registers that those write, that they read, and both.
        self.written_in_flight = self.read_in_flight = self.busy = 0
        # mbarriers this warp initialised and no fence has published yet.
        self.initialised: list[Mbarrier] = []
        # Registers computed since the last wgmma.fence; kept for kernels with wgmma only.
        self.unfenced = 0
        self.local = (
            np.full((LANES, max(frame.local_bytes, 1)), 0xFF, dtype=np.uint8)
            if frame.local_bytes
            else None
        )
        self.line = 0
        self.registers: int | None = None
        # State of the units that keep something per warp or per lane; each unit owns its entry.
        self.state: dict[str, object] = {}

    def _initial(self, name: str) -> np.ndarray:
        """Value of a special register, of a parameter or of a shared variable's address."""
        if name.startswith("param "):
            return self.machine.parameter(name)
        if name.startswith("shared "):
            offset = self.machine.frame.shared[name[len("shared ") :]]
            return np.full(LANES, self.cta.shared.base + offset, dtype=np.uint32)
        return self.cta.special(self, name)

    def snapshot(self) -> tuple:
        """Places and registers of its lanes: from equal snapshots the same follows."""
        places = {(f.segment, f.mask.tobytes(), f.wait is None) for f in self.fragments}
        held = [s.tobytes() if isinstance(s, np.ndarray) else s for s in self.slots]
        return places, held, None if self.local is None else self.local.tobytes()

    def hold(self, operation: InFlight) -> None:
        """Registers go to an asynchronous instruction."""
        self.in_flight.append(operation)
        self.written_in_flight |= operation.written
        self.read_in_flight |= operation.read
        self.busy |= operation.written | operation.read

    def release(self, operations: list[InFlight]) -> None:
        """Registers come back."""
        left = [o for o in self.in_flight if o not in operations]
        self.in_flight = []
        self.written_in_flight = self.read_in_flight = self.busy = 0
        for operation in left:
            self.hold(operation)

    def check_registers(self, instruction: Instruction, use: RegisterUse) -> None:
        """Refuses an instruction that touches registers in use."""
        # Multiplies of one warp run in order, so the next may add to the same accumulators.
        touched = use.touched & ~use.written if use.is_multiply else use.touched
        if touched & self.written_in_flight or use.written & self.read_in_flight:
            for operation in self.in_flight:
                operation.check(instruction, touched, use.written)

    def need_full(self, mask: np.ndarray, what: str) -> None:
        """Refuses an instruction that all live lanes must execute together."""
        if mask is not FULL and not np.array_equal(mask, self.live):
            raise DivergenceError(
                f"{what} is executed by {int(mask.sum())} of {int(self.live.sum())} live lanes; "
                "all must execute it together"
            )

    @property
    def place(self) -> Place:
        """The place of the warp."""
        return Place(self.machine.frame.kernel.name, self.cta.number, self.index, self.line)

    def __str__(self) -> str:
        return f"CTA {self.cta.number} warp {self.index}"


class Cta:
    """A thread block."""

    def __init__(self, cluster: Cluster, rank: int, index: tuple[int, int, int]) -> None:
        machine = cluster.machine
        grid = machine.launch.grid
        self.cluster = cluster
        self.rank = rank
        self.index = index
        self.number = index[0] + grid[0] * (index[1] + grid[1] * index[2])
        self.shared = SharedMemory(machine.shared_size, rank)
        self.tmem = TensorMemory()
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.warps = [Warp(self, w, machine.frame) for w in range(-(-machine.threads // LANES))]

    def special(self, warp: Warp, name: str) -> np.ndarray:
        """Value of a special register at the start of a warp."""
        base, _, axis = name.partition(".")
        launch, cluster = self.cluster.machine.launch, self.cluster
        thread = np.arange(LANES) + warp.index * LANES
        lane = np.arange(LANES)
        if base == "tid":
            x, y, _ = launch.block
            value = {"x": thread % x, "y": thread // x % y, "z": thread // (x * y)}[axis]
            return value.astype(np.uint32)
        clusters = tuple(g // c for g, c in zip(launch.grid, launch.cluster, strict=True))
        inside = tuple(i % c for i, c in zip(self.index, launch.cluster, strict=True))
        triples = {
            "ntid": launch.block,
            "ctaid": self.index,
            "nctaid": launch.grid,
            "clusterid": cluster.index,
            "nclusterid": clusters,
            "cluster_ctaid": inside,
            "cluster_nctaid": launch.cluster,
        }
        masks = {
            "eq": 1 << lane,
            "lt": (1 << lane) - 1,
            "le": (2 << lane) - 1,
            "gt": ~((2 << lane) - 1),
            "ge": ~((1 << lane) - 1),
        }
        size = int(np.prod(launch.cluster))
        single = {
            "laneid": lane,
            "warpid": warp.index,
            "nwarpid": -(-cluster.machine.threads // LANES),
            "smid": self.number % 132,
            "nsmid": 132,
            "gridid": 0,
            "cluster_ctarank": self.rank,
            "cluster_nctarank": size,
            "is_explicit_cluster": int(size > 1),
            "clock": 0,
            "clock_hi": 0,
            "globaltimer_lo": 0,
            "globaltimer_hi": 0,
            "dynamic_smem_size": launch.shared_bytes,
            "total_smem_size": cluster.machine.shared_size,
        }
        if base in ("clock64", "globaltimer"):
            return np.zeros(LANES, np.uint64)
        if axis:
            return np.full(LANES, triples[base]["xyz".index(axis)], np.uint32)
        if base.startswith("lanemask_"):
            return (masks[base[len("lanemask_") :]] & 0xFFFFFFFF).astype(np.uint32)
        return np.broadcast_to(np.asarray(single[base]), (LANES,)).astype(np.uint32)

    def live_warps(self) -> int:
        """Warps with a thread that has not exited."""
        return sum(bool(np.count_nonzero(w.live)) for w in self.warps)

    def check_exit(self) -> list[EmulationError]:
        """Faults in the state that a finished CTA leaves behind."""
        found: list[EmulationError] = []
        if self.tmem.allocated():
            found.append(
                TensorMemoryError(
                    f"CTA {self.number} exits with TMEM columns {self.tmem.allocated()} allocated "
                    "(first column: number)"
                )
            )
        for barrier in self.mbarriers.values():
            if barrier.bytes < 0:
                found.append(
                    BarrierError(
                        f"CTA {self.number} exits with {barrier}: more bytes "
                        "landed than were announced"
                    )
                )
        for warp in self.warps:
            groups = warp.state.get("bulk")
            found += [
                AsyncHazardError(
                    f"CTA {self.number} exits and nothing waited for {operation.what} to "
                    "read its shared memory (commit_group and wait_group)"
                )
                for operation in (groups.forgotten() if groups else ())
            ]
        for claim in self.shared.claims if not found else ():
            found.append(
                AsyncHazardError(
                    f"CTA {self.number} exits while {claim.who} may still "
                    f"{claim.access} its shared memory"
                )
            )
        return found

    def exit_notes(self) -> list[str]:
        """Oddities at exit that working kernels also show, e.g. a producer's last acquire."""
        notes = [
            f"an mbarrier at offset {offset} expects bytes that never land"
            for offset, barrier in self.mbarriers.items()
            if barrier.bytes > 0
        ]
        return notes + [
            f"named barrier {barrier.number} is left with {barrier.arrived} of "
            f"{barrier.expected} arrivals"
            for barrier in self.named.values()
            if barrier.arrived
        ]


class Cluster:
    """CTAs that share distributed shared memory and a barrier."""

    def __init__(self, machine: Machine, index: tuple[int, int, int]) -> None:
        self.machine = machine
        self.index = index
        self.barrier = ClusterBarrier()
        self.ctas: list[Cta] = []
        size = machine.launch.cluster
        for rank in range(int(np.prod(size))):
            inside = (rank % size[0], rank // size[0] % size[1], rank // (size[0] * size[1]))
            place = tuple(i * s + o for i, s, o in zip(index, size, inside, strict=True))
            self.ctas.append(Cta(self, rank, place))
        self.all_warps = [warp for cta in self.ctas for warp in cta.warps]

    def cta_at(self, address: int) -> Cta:
        """The CTA whose shared memory holds a 32-bit shared address."""
        rank, offset = address >> RANK_SHIFT, address & OFFSET_MASK
        if rank >= len(self.ctas) or offset >= self.ctas[rank].shared.size:
            raise OutOfBoundsError(
                f"shared address {address:#x} is offset {offset} of CTA rank "
                f"{rank}; the cluster has {len(self.ctas)} CTAs with "
                f"{self.ctas[0].shared.size} bytes each"
            )
        return self.ctas[rank]

    def publish(self, warp: Warp) -> None:
        """The warp's generic stores become visible to the asynchronous proxy."""
        for cta in self.ctas:
            cta.shared.publish(warp.cta.rank * 64 + warp.index)

    def live_threads(self) -> int:
        """Threads that have not exited."""
        return sum(int(np.count_nonzero(w.live)) for w in self.all_warps)

    def let_go(self) -> None:
        """Takes apart what refers to each other: a finished cluster is no cyclic garbage then."""
        for warp in self.all_warps:
            warp.state.clear()
        for cta in self.ctas:
            cta.warps.clear()
        self.all_warps.clear()
        self.ctas.clear()
