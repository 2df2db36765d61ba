"""Roles, edges and buffers of a warp-specialised kernel, as data that checks itself.

A *role* is a set of warps with one job. An *edge* is a ring of buffers that one role fills and
another drains, named after what it carries, guarded by a pair of mbarriers per stage. A kernel's
``plan.py`` states its roles, edges, buffers and named barriers; ``check`` finds contradictions
without a GPU; ``make_edge`` turns an edge into pipeline handles on the device. Standard library
only, but for that last function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

WARP = 32
WARPGROUP = 128
REGISTERS_PER_SM = 65536
NAMED_BARRIERS = 16
MBARRIER_BYTES = 8


class PlanError(Exception):
    """A plan contradicts itself or the hardware: a bug of ours, never of a caller."""


@dataclass(frozen=True)
class Role:
    """Warps ``warps`` do ``name`` with ``registers`` per thread (after setmaxnreg)."""

    name: str
    warps: range
    registers: int

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
        consumer: role that drains it.
        stages: buffers in the ring.
        stage_bytes: what one TMA load adds to the full barrier.
        full: what a passed full barrier promises the consumer.
        empty: what a passed empty barrier promises the producer.
    """

    data: str
    producer: str
    consumer: str
    stages: int
    stage_bytes: int
    full: str
    empty: str


@dataclass(frozen=True)
class Buffer:
    """Shared memory ``name``; ``alias_of`` is the only overlap allowed, and ``why`` it is safe."""

    name: str
    size_bytes: int
    alias_of: str | None = None
    why: str = ""


@dataclass(frozen=True)
class NamedBarrier:
    """A hardware barrier: ``threads`` of them arrive, and what passing it means."""

    name: str
    index: int
    threads: int
    meaning: str


@dataclass(frozen=True)
class Plan:
    """Who does what, over which data, in which memory."""

    roles: tuple[Role, ...]
    edges: tuple[Edge, ...]
    buffers: tuple[Buffer, ...]
    barriers: tuple[NamedBarrier, ...]
    smem_capacity_bytes: int

    def role(self, name: str) -> Role:
        """The role called ``name``."""
        return _named(self.roles, "name", name)

    def edge(self, data: str) -> Edge:
        """The edge that carries ``data``."""
        return _named(self.edges, "data", data)

    def barrier(self, name: str) -> NamedBarrier:
        """The named barrier called ``name``."""
        return _named(self.barriers, "name", name)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return sum(role.threads for role in self.roles)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: buffers that alias nothing, and two mbarriers per stage."""
        buffers = sum(buffer.size_bytes for buffer in self.buffers if buffer.alias_of is None)
        return buffers + sum(2 * MBARRIER_BYTES * edge.stages for edge in self.edges)


def _named(items: tuple[Any, ...], field: str, name: str) -> Any:
    for item in items:
        if getattr(item, field) == name:
            return item
    known = ", ".join(getattr(item, field) for item in items)
    raise PlanError(f"the plan has no {name!r}; it has {known}")


def arrivals(plan: Plan, edge: Edge, side: Literal["full", "empty"]) -> int:
    """Arrivals that complete a phase of one of the edge's barriers.

    A full barrier gets one arrival, which announces the bytes of the TMA load; an empty barrier
    gets one from each warp of the consumer.
    """
    return 1 if side == "full" else len(plan.role(edge.consumer).warps)


def check(plan: Plan) -> None:
    """Raises ``PlanError`` where the plan contradicts itself or the hardware."""
    warps = sorted(warp for role in plan.roles for warp in role.warps)
    if warps != list(range(len(warps))):
        raise PlanError(f"warps are no partition of 0..{len(warps) - 1}: {warps}")
    registers = sum(role.threads * role.registers for role in plan.roles)
    if registers > REGISTERS_PER_SM:
        raise PlanError(f"roles ask for {registers} registers of {REGISTERS_PER_SM}")
    for role in plan.roles:
        if role.registers % 8 or not 24 <= role.registers <= 256:
            raise PlanError(f"{role.name}: {role.registers} registers; 24 to 256, multiple of 8")
        if role.threads % WARPGROUP:
            raise PlanError(f"{role.name}: setmaxnreg works on warpgroups, not {role.warps}")
    if plan.smem_bytes > plan.smem_capacity_bytes:
        raise PlanError(f"{plan.smem_bytes} bytes of smem of {plan.smem_capacity_bytes}")
    for buffer in plan.buffers:
        if buffer.alias_of is not None:
            host = _named(plan.buffers, "name", buffer.alias_of)
            if buffer.size_bytes > host.size_bytes:
                raise PlanError(f"{buffer.name} is larger than {host.name}, which it overlays")
    for edge in plan.edges:
        plan.role(edge.producer), plan.role(edge.consumer)
    indices = [barrier.index for barrier in plan.barriers]
    if len(set(indices)) != len(indices) or any(not 0 < i < NAMED_BARRIERS for i in indices):
        raise PlanError(f"named barriers need distinct numbers 1 to 15, not {indices}")
    for names in ([edge.data for edge in plan.edges], [b.name for b in plan.barriers]):
        if len(set(names)) != len(names):
            raise PlanError(f"a name appears twice in {names}")


def ledger(plan: Plan) -> str:
    """The plan as text: roles, edges with their arrive counts, buffers, barriers."""
    lines = [f"{role.name:9s} warps {role.warps.start}-{role.warps.stop - 1}  "
             f"{role.registers} registers" for role in plan.roles]
    for edge in plan.edges:
        full, empty = (arrivals(plan, edge, side) for side in ("full", "empty"))
        lines.append(
            f"{edge.data:4s} {edge.producer} -> {edge.consumer}  {edge.stages} x "
            f"{edge.stage_bytes} bytes  full({full}): {edge.full}  empty({empty}): {edge.empty}"
        )
    for buffer in plan.buffers:
        where = f" over {buffer.alias_of}: {buffer.why}" if buffer.alias_of else ""
        lines.append(f"smem {buffer.name} {buffer.size_bytes} bytes{where}")
    lines += [f"barrier {b.index} {b.name} ({b.threads}): {b.meaning}" for b in plan.barriers]
    lines.append(f"smem {plan.smem_bytes} of {plan.smem_capacity_bytes} bytes")
    return "\n".join(lines)


def make_edge(plan: Plan, data: str, barrier_storage: Any) -> tuple[Any, Any]:
    """Initialises the mbarriers of edge ``data``; returns its (producer, consumer) handles.

    ``barrier_storage`` points at ``2 * stages`` mbarriers in shared memory. The caller fences and
    synchronises once after making all edges.
    """
    from cutlass import pipeline

    edge = plan.edge(data)
    threads = pipeline.Agent.Thread
    ring = pipeline.PipelineTmaAsync.create(
        num_stages=edge.stages,
        producer_group=pipeline.CooperativeGroup(threads, arrivals(plan, edge, "full")),
        consumer_group=pipeline.CooperativeGroup(threads, arrivals(plan, edge, "empty")),
        tx_count=edge.stage_bytes,
        barrier_storage=barrier_storage,
        defer_sync=True,
    )
    return ring.make_participants()
