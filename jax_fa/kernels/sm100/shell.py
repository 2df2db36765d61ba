"""What surrounds the roles of a Blackwell kernel, in the forward and the backward alike.

First words of shared memory, mbarriers of all edges, tensor memory, synchronisation of a CTA or a
pair, the scan for segments, and the ends of edges that each role holds. All of it follows from the
plan.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from jax_fa.kernels import dense_mask, edges, primitives, segments
from jax_fa.kernels.sm100 import tensor_plan, umma
from jax_fa.spec import division


class Control(NamedTuple):
    """The first words of a CTA's shared memory."""

    mbarriers: cute.Pointer  # those of all edges
    zero_fill: cute.Pointer  # one mbarrier, for loads whose last rows become zero
    tmem_address: cute.Pointer
    found: cute.Tensor  # (FOUND_WORDS,) segments.py, dense_mask.py


def control_storage(plan: edges.Plan) -> type:
    """The struct behind ``Control``, with which a kernel's shared memory begins."""

    @cute.struct
    class Storage:
        mbarriers: cute.struct.MemRange[Int64, plan.num_mbarriers]
        zero_fill: cute.struct.MemRange[Int64, 1]
        tmem_address: cute.struct.MemRange[Int32, 1]
        found: cute.struct.MemRange[Int32, division.FOUND_WORDS]

    return Storage


def control_of(storage: Any) -> Control:
    """Pointers into a ``control_storage``."""
    return Control(
        storage.mbarriers.data_ptr(),
        storage.zero_fill.data_ptr(),
        storage.tmem_address.data_ptr(),
        storage.found.get_tensor(cute.make_layout(division.FOUND_WORDS)),
    )


Rings = Mapping[str, Any]
"""The pipelines of all edges, by the names of these."""


class Started(NamedTuple):
    """A CTA that is ready for its roles."""

    warp: Int32  # number of this warp, the same in all its lanes
    rings: Rings
    tmem: cute.Pointer  # all columns


def _make_rings(plan: edges.Plan, mbarriers: cute.Pointer) -> Rings:
    """Initialises the mbarriers of all edges: those of the CTA, then those of its query tiles."""
    made = {}
    for edge in sorted(plan.edges, key=lambda edge: edge.data[-1].isdigit()):
        first = mbarriers + plan.first_mbarrier(edge.data)
        made[edge.data] = tensor_plan.make_ring(plan, edge, first)
    return made


def _cluster_sync():
    """Waits for all threads of the cluster that have not exited."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def start(
    variant: cutlass.Constexpr, tma: Any, control: Control, tmem_role: cutlass.Constexpr[str]
) -> Started:
    """Initialises mbarriers, and has the role ``tmem_role`` allocate all of tensor memory.

    Called by all threads of the CTA, or of both CTAs of a pair; all see the results afterwards.
    """
    plan, is_pair = variant.plan, variant.plan.ctas == 2
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        primitives.prefetch_descriptors(tma)
        if const_expr(variant.is_general):
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(control.zero_fill, 1)
                segments.reset(control.found)
    rings = _make_rings(plan, control.mbarriers)
    if warp == plan.role(tmem_role).warps.start:
        cute.arch.alloc_tmem(tensor_plan.TMEM_COLS, control.tmem_address, is_pair)
        cute.arch.relinquish_tmem_alloc_permit(is_pair)
    cute.arch.mbarrier_init_fence()
    umma.before_thread_sync()
    if const_expr(is_pair):
        # HAZARD: no thread may arrive at the other CTA's barriers before they are initialised.
        _cluster_sync()
    else:
        cute.arch.sync_threads()
    umma.after_thread_sync()
    # The CTA has all columns, so the first is number 0. Unlike the value at tmem_address, that is
    # known at compile time, so that addresses relative to it cost no registers.
    tmem = cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)
    return Started(warp, rings, tmem)


@cute.jit
def narrow(
    variant: cutlass.Constexpr, x: Any, scan: cutlass.Constexpr[Callable[..., None]]
) -> None:
    """Runs ``scan(variant, x)`` if it is of use; its result is visible to the whole CTA."""
    if const_expr(variant.is_general):
        if dense_mask.narrows(x.scalars):
            scan(variant, x)
            cute.arch.sync_threads()


def pipes_of(
    plan: edges.Plan, role: str, bundle: type, rings: Rings, tile: int | None = None
) -> Any:
    """The ends that ``role`` holds, as its ``bundle``, a NamedTuple with fields named after edges.

    With ``tile``, the ends of that query tile: for tile 0, the field ``s`` is the edge ``s0``. The
    field of an edge that the kernel does not have is None.
    """
    number, held = "" if tile is None else str(tile), {}
    for edge in plan.edges:
        if role in (edge.producer, *edge.consumers):
            producer, consumer = rings[edge.data].make_participants()
            held[edge.data] = producer if edge.producer == role else consumer
    return bundle(*(held.get(name + number) for name in bundle._fields))


def rings_of_tile(plan: edges.Plan, rings: Rings, tile: Int32) -> Rings:
    """The pipelines with those of query tile ``tile``, a run-time value, in place of tile 0's.

    For roles that run the same instructions on different tiles. Edges of each tile have the same
    barriers in the same order, so that one distance leads from those of tile 0 to the others'.
    """
    moved = dict(rings)
    for edge in plan.edges:
        following = edge.data.removesuffix("0") + "1"
        if edge.data.endswith("0") and following in rings:
            distance = plan.first_mbarrier(following) - plan.first_mbarrier(edge.data)
            moved[edge.data] = _moved(rings[edge.data], distance * tile)
    return moved


def _moved(ring: Any, num_mbarriers: Int32) -> Any:
    """A pipeline whose barriers lie ``num_mbarriers`` after those of ``ring``."""
    moved = {}
    for side in ("sync_object_full", "sync_object_empty"):
        barriers = getattr(ring, side)
        # A copy, which initialises nothing.
        moved[side] = barriers.recast_to_new_op_type(barriers.op_type)
        moved[side].mbarrier_base = barriers.mbarrier_base + num_mbarriers
    return dataclasses.replace(ring, **moved)


@cute.jit
def free_tmem(
    variant: cutlass.Constexpr,
    tmem: cute.Pointer,
    warp: Int32,
    tmem_role: cutlass.Constexpr[str],
) -> None:
    """Frees tensor memory. The warps counted by the plan's barrier "done" call when done with it.

    HAZARD: no thread may read it any more. A pair frees it together, when neither CTA still uses
    it or the other's shared memory (PTX ISA, "Issue Granularity" of tcgen05).
    """
    plan = variant.plan
    if const_expr(plan.ctas == 2):
        _cluster_sync()
    else:
        primitives.meet(variant, "done")
    if warp == plan.role(tmem_role).warps.start:
        cute.arch.dealloc_tmem(tmem, tensor_plan.TMEM_COLS, plan.ctas == 2)


def arrive(barrier: cute.Pointer):
    """Arrives once at an mbarrier of this CTA, without a register for the number of arrivals."""
    cute.arch.inline_ptx(
        "mbarrier.arrive.shared::cta.b64 _, [{$r0}];", read_only_args=[barrier.toint()]
    )


@cute.jit
def signal(slot: Any) -> None:
    """Arrives once for this warp at the barrier of ``slot``, after all its lanes' earlier work."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        slot.commit()


def launch(made: Any, variant: Any, num_ctas: Int32, stream: Any) -> None:
    """Launches a kernel, one CTA per multiprocessor, with the clusters that its plan asks for."""
    plan = variant.plan
    made.launch(
        grid=(num_ctas, 1, 1),
        block=(plan.threads, 1, 1),
        cluster=(plan.ctas, 1, 1) if plan.ctas > 1 else None,
        stream=stream,
        min_blocks_per_mp=1,
    )
