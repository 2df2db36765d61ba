"""What the tensor core of Blackwell adds to the plans of ``edges.py``.

The tensor core arrives at mbarriers by itself, when all work issued to it before has retired; it
has a memory of its own, whose columns a plan allocates; and two CTAs can share its products.

# Note [Edges that cross a pair]
Two CTAs of a cluster can share tcgen05 products (``.cta_group::2``). The first CTA, the leader,
issues them. The role that does so is ``leader_only``; an edge with this role at one end crosses the
pair. Every CTA has barriers of its own, at the same offsets. Edges towards the leader use only its
barriers: TMA loads of both CTAs count their bytes there, threads of both arrive there, and expected
counts double. On edges from the leader, its tensor core arrives in both CTAs at once. All else
stays within a CTA, except copies from the shared memory of one CTA to that of the other: each CTA
expects on its own edge what the same role of the other sends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jax_fa.kernels import edges
from jax_fa.kernels.edges import BY_HARDWARE, Edge, Plan, PlanError

TMEM_COLS = 512
LEADER = 0
"""The rank, within a pair, of the CTA that issues the products of both, and at whose barriers the
threads of both arrive."""
BOTH_CTAS = 0b11
"""The CTAs of a pair at whose barriers the tensor core arrives, as a mask of ranks."""


@dataclass(frozen=True)
class TmemRange:
    """Columns of tensor memory; ``alias_of`` is the only overlap allowed, ``why`` it is safe."""

    name: str
    start: int
    cols: int
    alias_of: str | None = None
    why: str = ""

    @property
    def end(self) -> int:
        """The first column after the range."""
        return self.start + self.cols


@dataclass(frozen=True)
class TensorPlan(Plan):
    """A plan with tensor memory."""

    tmem: tuple[TmemRange, ...] = ()

    def columns(self, name: str) -> TmemRange:
        """The range of tensor memory called ``name``."""
        return edges.named(self.tmem, "name", name)


def check(plan: TensorPlan) -> None:
    """Raises ``PlanError`` where the plan contradicts itself or the hardware."""
    edges.check(plan)
    _check_pair(plan)
    _check_tmem(plan)


def _check_pair(plan: Plan) -> None:
    if plan.ctas not in (1, 2):
        raise PlanError(f"tcgen05 joins 1 or 2 CTAs, not {plan.ctas}")
    for role in plan.roles:
        if role.leader_only and plan.ctas == 1:
            raise PlanError(f"{role.name} is for the first CTA of a pair, and there are no pairs")
    for edge in plan.edges:
        if not plan.crosses(edge):
            continue
        if edge.kind == "tma":
            raise PlanError(f"{edge.data} crosses the pair, where only tcgen05 drains a TMA load")
        by_threads = {"full": (edge.producer,), "empty": edge.consumers if edge.empty else ()}
        for side, names in by_threads.items():
            leaders = [name for name in names if plan.role(name).leader_only]
            if leaders and side not in BY_HARDWARE[edge.kind]:
                raise PlanError(
                    f"{edge.data}: threads of {leaders[0]} arrive in one CTA, not in both"
                )


def _check_tmem(plan: TensorPlan) -> None:
    for one in plan.tmem:
        if one.start < 0 or one.end > TMEM_COLS:
            raise PlanError(f"tmem {one.name}: columns {one.start} to {one.end} of {TMEM_COLS}")
        for other in plan.tmem:
            overlap = one is not other and one.start < other.end and other.start < one.end
            declared = one.name in _hosts(plan, other) or other.name in _hosts(plan, one)
            if overlap and not declared:
                raise PlanError(f"tmem {one.name} and {other.name} overlap, which neither declares")


def _hosts(plan: TensorPlan, range_: TmemRange) -> set[str]:
    """Names of the ranges that ``range_`` may overlap: what it overlays, and what that overlays."""
    names: set[str] = set()
    while range_.alias_of is not None and range_.alias_of not in names:
        names.add(range_.alias_of)
        range_ = plan.columns(range_.alias_of)
    return names


def make_ring(plan: Plan, edge: Edge, barrier_storage: Any) -> Any:
    """Does for edges of every kind what ``edges.make_ring`` does."""
    from cutlass import cute, pipeline

    ctas = plan.ctas if plan.crosses(edge) else 1
    if "umma" in edge.kind:
        shared = edges.shared_arguments(plan, edge, barrier_storage)
        shared["cta_layout_vmnk"] = cute.make_layout((ctas, 1, 1, 1))
        if edge.kind == "tma_umma":
            ring = pipeline.PipelineTmaUmma.create(tx_count=ctas * edge.stage_bytes, **shared)
        elif edge.kind == "umma":
            ring = pipeline.PipelineUmmaAsync.create(**shared)
        else:
            ring = pipeline.PipelineAsyncUmma.create(**shared)
    else:
        ring = edges.make_ring(plan, edge, barrier_storage)
    if ctas > 1:
        # The pipelines compute from the CTA's rank which CTAs to signal. Constants take no
        # registers: with D = 128, the rank was needed everywhere, and was spilled.
        by_hardware = BY_HARDWARE[edge.kind]
        ring = replace(
            ring,
            producer_mask=BOTH_CTAS if "full" in by_hardware else LEADER,
            consumer_mask=BOTH_CTAS if "empty" in by_hardware else LEADER,
        )
    return ring
