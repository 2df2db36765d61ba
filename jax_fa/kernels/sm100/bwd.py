"""Blackwell backward: dq, dk and dv from one more pass over all visible pairs.

    prepare       delta, log2-sum-exp2 by query row; dQ sums = 0               (backward_rows.py)
    main  load    k q(n) v dO(n) | q(n-1) dO(n-1) | q(n-2) dO(n-2) ...
          mma     S dP(n) dV(n) | S(n-1) dK dQ(n) dP dV(n-1) | S(n-2) dK dQ(n-1) ... | dK dQ(0)
          attend    [P(n)][dS(n)]       [P(n-1)]   [dS(n-1)]       ...              dV dK
          add                                   [dQ(n) += ]            [dQ(n-1) += ]
    finish        dQ sums -> dq; dsinks; parts of dK, dV -> dk, dv             (backward_rows.py)

A column of tensor memory, from left to right (D = 128):

    0        64       128              256      320      384              512
    |  S^T(t)         |  dV            |  dP^T(t)        |  dK            |
    |P0      |P1      |                |dS0     |dS1     |                |
                                       |  dQ(t)          |

The exponentials of a query tile run beside dK and dQ of the tile before. Host entry, memory,
dispatch of roles; those are in ``bwd_roles.py`` (for two sweeps, ``bwd_sweeps.py``) and in
``bwd_attend.py``, roles, edges and memory as data in ``plan_bwd.py``. Conventions:
``jax_fa/problem.py``.
"""

from types import ModuleType

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from jax_fa.config import BlackwellBackward, KernelKey
from jax_fa.kernels import edges, host, primitives, segments, tiles
from jax_fa.kernels.backward_rows import Scratch
from jax_fa.kernels.backward_work import Arrays, Scalars, Tma, find_segment_rows
from jax_fa.kernels.sm100 import bwd_roles as roles
from jax_fa.kernels.sm100 import bwd_sweeps as sweeps
from jax_fa.kernels.sm100.bwd_attend import AttendPipes, attend
from jax_fa.kernels.sm100.bwd_work import Context, Smem, Variant, make_layouts
from jax_fa.kernels.sm100.plan_bwd import backward_plan


@cute.kernel
def kernel(
    variant: cutlass.Constexpr,
    tma: Tma,
    arrays: Arrays,
    scratch: Scratch,
    scalars: Scalars,
    order: tiles.Order,
):
    """Device entry: shared and tensor memory, pipelines, dispatch of roles."""
    plan, layouts, dtype = variant.plan, make_layouts(variant), variant.dtype
    is_swept_once = variant.config.sweeps == 1
    # Else values lie where dO was.
    v_elements = cute.cosize(layouts.v) if const_expr(is_swept_once) else 0

    @cute.struct
    class Storage:
        mbarriers: cute.struct.MemRange[Int64, plan.num_mbarriers]
        scrub: cute.struct.MemRange[Int64, 1]
        tmem: cute.struct.MemRange[Int32, 1]
        segment_rows: cute.struct.MemRange[Int32, segments.WORDS]
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.k)], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, v_elements], 1024]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.q)], 1024]
        dout: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.dout)], 1024]
        ds: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.ds)], 1024]
        dq: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(layouts.dq)], 128]
        stats: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(layouts.stats)], 128]

    storage = SmemAllocator().allocate(Storage)
    smem = Smem(
        k=primitives.smem_tensor(storage.k, layouts.k),
        v=primitives.smem_tensor(storage.v if is_swept_once else storage.dout, layouts.v),
        q=primitives.smem_tensor(storage.q, layouts.q),
        dout=primitives.smem_tensor(storage.dout, layouts.dout),
        ds=primitives.smem_tensor(storage.ds, layouts.ds),
        dq=storage.dq.get_tensor(layouts.dq),
        stats=storage.stats.get_tensor(layouts.stats),
        scrub=storage.scrub.data_ptr(),
        segment_rows=storage.segment_rows.get_tensor(cute.make_layout(segments.WORDS)),
    )
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        for atom in tma:
            cpasync.prefetch_descriptor(atom)
        if const_expr(variant.is_general):
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(smem.scrub, 1)
                segments.reset(smem.segment_rows)

    ends = {
        edge.data: edges.make_edge(
            plan, edge.data, storage.mbarriers.data_ptr() + plan.first_mbarrier(edge.data)
        )
        for edge in plan.edges
    }
    tmem_address = storage.tmem.data_ptr()
    if warp == plan.role("add").warps.start:
        cute.arch.alloc_tmem(edges.TMEM_COLS, tmem_address)
        cute.arch.relinquish_tmem_alloc_permit()
    cute.arch.mbarrier_init_fence()
    primitives.before_thread_sync()
    cute.arch.sync_threads()
    primitives.after_thread_sync()

    # All columns are this CTA's, so the first is number 0: known at compile time, unlike what was
    # written to tmem_address, and no registers need be spent on sums with it.
    tmem = cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)
    x = Context(tma, arrays, scratch, scalars, order, smem, tmem)
    if const_expr(variant.is_general):
        if tiles.is_present(scalars.q_segments):
            find_segment_rows(variant, x)
            cute.arch.sync_threads()
    producers = {data: pair[0] for data, pair in ends.items()}
    consumers = {data: pair[1] for data, pair in ends.items()}
    _dispatch(variant, x, warp, tuple(producers.values()), tuple(consumers.values()))


def _roles(variant: Variant) -> ModuleType:
    """Where the roles load and mma are."""
    return roles if variant.config.sweeps == 1 else sweeps


def _pipes(variant: Variant, role: str, bundle: type, producers: tuple, consumers: tuple):
    """The ends that a role holds, in its ``bundle``, whose fields are called like edges."""
    held = {
        edge.data: producers[i] if edge.producer == role else consumers[i]
        for i, edge in enumerate(variant.plan.edges)
    }
    return bundle(*(held[name] for name in bundle._fields))


@cute.jit
def _dispatch(
    variant: cutlass.Constexpr, x: Context, warp: Int32, producers: tuple, consumers: tuple
):
    """Sends every warp to its role, with the registers and the ends of edges that it has."""
    plan, ends = variant.plan, (producers, consumers)
    # setmaxnreg works on warpgroups: the four single warps share a value.
    if warp < plan.role("mma").warps.start:
        if warp < plan.role("attend").warps.start:
            cute.arch.setmaxregister_increase(plan.role("add").registers)
            roles.add(variant, x, consumers[plan.edges.index(plan.edge("dq"))])
        else:
            cute.arch.setmaxregister_increase(plan.role("attend").registers)
            attend(variant, x, _pipes(variant, "attend", AttendPipes, *ends))
        # HAZARD: tensor memory is given back when nobody reads it any more.
        done = plan.barrier("done")
        cute.arch.barrier(barrier_id=done.index, number_of_threads=done.threads)
        if warp == plan.role("add").warps.start:
            cute.arch.dealloc_tmem(x.tmem, edges.TMEM_COLS)
    else:
        cute.arch.setmaxregister_decrease(plan.role("mma").registers)
        if warp == plan.role("mma").warps.start:
            _roles(variant).mma(variant, x, _pipes(variant, "mma", _roles(variant).MmaPipes, *ends))
        elif warp == plan.role("load").warps.start:
            _roles(variant).load(
                variant, x, _pipes(variant, "load", _roles(variant).LoadPipes, *ends)
            )


def make_entry(key: KernelKey, config: BlackwellBackward):
    """The flat host entry of one variant, and the stand-in arguments it is compiled with."""
    return host.backward_entry(Variant(key, config, backward_plan(key, config)), launch)


@cute.jit
def launch(variant: cutlass.Constexpr, call: host.BackwardCall):
    """Describes the arrays to TMA and launches the main kernel."""
    layouts = make_layouts(variant)
    if const_expr(variant.config.sweeps == 2):
        layouts = layouts._replace(v=cute.slice_(layouts.v, (None, None, 0)))
    tma, arrays = host.backward_arrays(variant, call, layouts)
    order, num_ctas = host.backward_order(variant, call)
    kernel(variant, tma, arrays, call.scratch, call.scalars, order).launch(
        grid=(num_ctas, 1, 1),
        block=(variant.plan.threads, 1, 1),
        stream=call.stream,
        min_blocks_per_mp=1,
    )
