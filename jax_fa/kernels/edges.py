"""Roles, edges and buffers of a warp-specialised kernel, as data that checks itself.

A *role* is a set of warps with one job. An *edge* is a ring of buffers that one role fills and
another drains, named after what it carries, guarded by a pair of mbarriers per stage. A kernel's
``plan.py`` states its roles, edges, buffers and named barriers; ``check`` finds contradictions
without a GPU; ``make_edge`` turns an edge into pipeline handles on the device. All but the last
needs only the standard library. The tensor core of Blackwell arrives at mbarriers by itself, also
in pairs of CTAs, and has a memory of its own: ``sm100/tensor_plan.py`` adds that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

WARP = 32
WARPGROUP = 128
WARPS_PER_GROUP = WARPGROUP // WARP
REGISTERS_PER_SM = 65536
NAMED_BARRIERS = 16
SMEM_CAPACITY_BYTES = 227 * 1024
"""Shared memory that a CTA may have on sm90 and sm100; ``mma_sync/plan.py`` has its own."""
MBARRIER_BYTES = 8

EdgeKind = Literal["tma", "tma_umma", "umma", "threads", "threads_umma"]

BY_HARDWARE: dict[EdgeKind, tuple[str, ...]] = {
    "tma": ("full",),
    "tma_umma": ("full", "empty"),
    "umma": ("full",),
    "threads": (),
    "threads_umma": ("empty",),
}
"""The barriers of an edge at which a hardware unit arrives, once per phase: TMA when its bytes have
landed, the tensor core when all operations issued to it before have retired."""


class PlanError(Exception):
    """A plan contradicts itself or the hardware: a bug in this library, never in a caller."""


@dataclass(frozen=True)
class Role:
    """The warps that do the job ``name``, with ``registers`` per thread (after setmaxnreg).

    Where CTAs work in pairs, the warps of the first CTA do a ``leader_only`` job for both.
    """

    name: str
    warps: range
    registers: int
    leader_only: bool = False

    @property
    def threads(self) -> int:
        """Threads of the role."""
        return WARP * len(self.warps)


@dataclass(frozen=True)
class Edge:
    """A ring of ``stages`` buffers from ``producer`` to ``consumer``.

    Attributes:
        data: what it carries; the name by which roles know it.
        producer: role that fills it.
        consumer: role that drains it, or several roles that all do.
        stages: buffers in the ring.
        stage_bytes: bytes that the TMA load of each CTA adds to the full barrier; 0 without TMA.
        full: what a passed full barrier promises the consumer; required.
        empty: what a passed empty barrier promises the producer; "" if another edge makes that
            promise, so that nobody arrives or waits here.
        kind: who fills and who drains it (``BY_HARDWARE``).
    """

    data: str
    producer: str
    consumer: str | tuple[str, ...]
    stages: int = 1
    stage_bytes: int = 0
    full: str = ""
    empty: str = ""
    kind: EdgeKind = "tma"

    @property
    def consumers(self) -> tuple[str, ...]:
        """Roles that drain it."""
        return (self.consumer,) if isinstance(self.consumer, str) else self.consumer


@dataclass(frozen=True)
class Buffer:
    """Shared memory; ``alias_of`` is the only buffer it may overlap, ``why`` that is safe."""

    name: str
    size_bytes: int
    alias_of: str | None = None
    why: str = ""


@dataclass(frozen=True)
class NamedBarrier:
    """A hardware barrier: how many threads arrive at it, and what passing it means."""

    name: str
    index: int
    threads: int
    meaning: str


@dataclass(frozen=True)
class Plan:
    """Who does what, over which data, in which memory.

    Everything is per CTA. With two ``ctas``, every buffer and all roles that are not
    ``leader_only`` exist in both CTAs of a pair.
    """

    roles: tuple[Role, ...]
    edges: tuple[Edge, ...]
    buffers: tuple[Buffer, ...]
    barriers: tuple[NamedBarrier, ...]
    ctas: int = 1

    def role(self, name: str) -> Role:
        """The role called ``name``."""
        return named(self.roles, "name", name)

    def edge(self, data: str) -> Edge:
        """The edge that carries ``data``."""
        return named(self.edges, "data", data)

    def barrier(self, name: str) -> NamedBarrier:
        """The named barrier called ``name``."""
        return named(self.barriers, "name", name)

    def crosses(self, edge: Edge) -> bool:
        """Whether an edge connects a role of the first CTA alone with a role of both CTAs."""
        ends = {self.role(name).leader_only for name in (edge.producer, *edge.consumers)}
        return self.ctas > 1 and len(ends) > 1

    @property
    def tmem(self) -> tuple[Any, ...]:
        """Ranges of tensor memory; only a ``tensor_plan.TensorPlan`` has any."""
        return ()

    @property
    def num_mbarriers(self) -> int:
        """Mbarriers of all edges."""
        return sum(2 * edge.stages for edge in self.edges)

    def first_mbarrier(self, data: str) -> int:
        """Index of the first mbarrier of an edge; edges are laid out in order."""
        before = self.edges[: self.edges.index(self.edge(data))]
        return sum(2 * edge.stages for edge in before)

    @property
    def warps(self) -> range:
        """Warps of a CTA."""
        return range(self.threads // WARP)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return sum(role.threads for role in self.roles)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: buffers that alias nothing, and two mbarriers per stage."""
        buffers = sum(buffer.size_bytes for buffer in self.buffers if buffer.alias_of is None)
        return buffers + MBARRIER_BYTES * self.num_mbarriers


def named(items: Sequence[Any], field: str, name: str) -> Any:
    """Returns the item whose ``field`` is ``name``."""
    for item in items:
        if getattr(item, field) == name:
            return item
    known = ", ".join(getattr(item, field) for item in items)
    raise PlanError(f"the plan has no {name!r}; it has {known}")


def arrivals(plan: Plan, edge: Edge, side: Literal["full", "empty"]) -> int:
    """The number of arrivals that complete a phase of one of the edge's barriers.

    Hardware arrives once; a role arrives once per warp. Where an edge crosses a pair, the warps of
    both CTAs arrive in the first CTA.
    """
    if side in BY_HARDWARE[edge.kind]:
        return 1
    if side == "empty" and not edge.empty:
        return 0
    names = (edge.producer,) if side == "full" else edge.consumers
    warps = sum(len(plan.role(name).warps) for name in names)
    return warps * (plan.ctas if plan.ctas > 1 and plan.crosses(edge) else 1)


def check(plan: Plan) -> None:
    """Raises ``PlanError`` where the plan contradicts itself or the hardware."""
    warps = sorted(warp for role in plan.roles for warp in role.warps)
    if warps != list(range(len(warps))):
        raise PlanError(f"warps are no partition of 0..{len(warps) - 1}: {warps}")
    if len(plan.roles) > 1 and len(warps) % WARPS_PER_GROUP:
        raise PlanError(f"setmaxnreg works on warpgroups, not on {len(warps)} warps")
    _check_registers(plan)
    if plan.smem_bytes > SMEM_CAPACITY_BYTES:
        raise PlanError(f"{plan.smem_bytes} bytes of smem of {SMEM_CAPACITY_BYTES}")
    for buffer in plan.buffers:
        if buffer.alias_of is not None:
            host = named(plan.buffers, "name", buffer.alias_of)
            if buffer.size_bytes > host.size_bytes:
                raise PlanError(f"{buffer.name} is larger than {host.name}, which it overlays")
    for edge in plan.edges:
        for name in (edge.producer, *edge.consumers):
            plan.role(name)
        if not edge.full:
            raise PlanError(f"{edge.data}: a passed full barrier has to promise something")
    indices = [barrier.index for barrier in plan.barriers]
    if len(set(indices)) != len(indices) or any(not 0 < i < NAMED_BARRIERS for i in indices):
        raise PlanError(f"named barriers need distinct numbers 1 to 15, not {indices}")
    for names in ([edge.data for edge in plan.edges], [b.name for b in plan.barriers]):
        if len(set(names)) != len(names):
            raise PlanError(f"a name appears twice in {names}")


def _check_registers(plan: Plan) -> None:
    # setmaxnreg moves registers between warpgroups of a CTA. It cannot give out more than the CTA
    # is launched with: as many per thread as fit, in steps of 8. Beyond that it waits forever
    # (240 + 240 + 32 registers for 384 threads, launched with 168 each, hung an H200).
    pool = plan.threads * (REGISTERS_PER_SM // plan.threads // 8 * 8)
    registers = sum(role.threads * role.registers for role in plan.roles)
    if registers > pool:
        raise PlanError(f"roles ask for {registers} registers; the CTA is launched with {pool}")
    for role in plan.roles:
        if role.registers % 8 or not 24 <= role.registers <= 256:
            raise PlanError(f"{role.name}: {role.registers} registers; 24 to 256, multiple of 8")
        for other in plan.roles:
            groups = [{warp // WARPS_PER_GROUP for warp in r.warps} for r in (role, other)]
            if groups[0] & groups[1] and role.registers != other.registers:
                raise PlanError(
                    f"{role.name} and {other.name} share a warpgroup, on which setmaxnreg works, "
                    f"with {role.registers} and {other.registers} registers"
                )


class Ends(NamedTuple):
    """The handles through which an edge is filled and drained."""

    producer: Any
    consumer: Any


def make_edge(plan: Plan, data: str, barrier_storage: Any) -> Ends:
    """Initialises the mbarriers of edge ``data``; returns its ends.

    ``barrier_storage`` points at ``2 * stages`` mbarriers in shared memory. The caller fences and
    synchronises once after making all edges.
    """
    return Ends(*make_ring(plan, plan.edge(data), barrier_storage).make_participants())


def make_ring(plan: Plan, edge: Edge, barrier_storage: Any) -> Any:
    """The pipeline of an edge that threads drain."""
    from cutlass import pipeline

    shared = shared_arguments(plan, edge, barrier_storage)
    if edge.kind == "tma":
        return pipeline.PipelineTmaAsync.create(tx_count=edge.stage_bytes, **shared)
    return pipeline.PipelineAsync.create(**shared)


def shared_arguments(plan: Plan, edge: Edge, barrier_storage: Any) -> dict[str, Any]:
    """The constructor arguments that all kinds of pipelines share, by name."""
    from cutlass import pipeline

    counts = {
        "producer_group": arrivals(plan, edge, "full"),
        "consumer_group": arrivals(plan, edge, "empty"),
    }
    groups = {
        group: pipeline.CooperativeGroup(pipeline.Agent.Thread, max(count, 1))
        for group, count in counts.items()
    }
    return {
        "num_stages": edge.stages,
        "barrier_storage": barrier_storage,
        "defer_sync": True,
        **groups,
    }
