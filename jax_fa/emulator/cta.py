"""CTAs and clusters: their warps, memories and barriers, and what they must not leave behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jax_fa.emulator.faults import (
    AsyncHazardError,
    BarrierError,
    EmulationError,
    OutOfBoundsError,
    TensorMemoryError,
)
from jax_fa.emulator.memory import OFFSET_MASK, RANK_SHIFT, SharedMemory
from jax_fa.emulator.sync import ClusterBarrier, Mbarrier, NamedBarrier
from jax_fa.emulator.tmem import TensorMemory
from jax_fa.emulator.values import LANES
from jax_fa.emulator.warp import Warp

if TYPE_CHECKING:
    from jax_fa.emulator.machine import Machine


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
        self.warps = [Warp(self, w, machine.program) for w in range(-(-machine.threads // LANES))]

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
        """What is wrong with the state a finished CTA leaves behind."""
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
            for groups in warp.state.get("bulk", ()):
                found += [
                    AsyncHazardError(
                        f"CTA {self.number} exits and nothing waited for {operation.what} to "
                        "read its shared memory (commit_group and wait_group)"
                    )
                    for operation in groups.forgotten()
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
        return sum(int(w.live.sum()) for w in self.all_warps)
