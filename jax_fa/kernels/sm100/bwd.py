"""Blackwell backward: dq, dk and dv from one more pass over all visible pairs.

    prepare       delta, log2-sum-exp2 by query row; dQ sums = 0               (backward_rows.py)
    main  load    k q(n) v dO(n) | q(n-1) dO(n-1) | q(n-2) dO(n-2) ...
          mma     S dP(n) dV(n) | S(n-1) dK dQ(n) dP dV(n-1) | S(n-2) dK dQ(n-1) ... | dK dQ(0)
          attend    [P(n)][dS(n)]       [P(n-1)]   [dS(n-1)]       ...              dV dK
          add                                   [dQ(n) += ]            [dQ(n-1) += ]
    finish        dQ sums -> dq; dsinks; parts of dK, dV -> dk, dv             (backward_rows.py)

A lane of tensor memory, from left to right (D = 96):

    0        64       128          224      288      352          448   512
    |  S^T(t)         |  dV         |  dP^T(t)        |  dK         |
    |P0      |P1      |             |dS0     |dS1     |             |
                                    |  dQ(t)      |

A pair of CTAs (``bwd_pair.py``) has dQ over S, since dS changes hands before dQ; a stage of a ring,
and qt, dout_t and kt for the columns of q, dO and k:

    load    k q(n) v dO(n) dO_t(n) kt | q(n-1) qt(n) dO(n-1) dO_t(n-1) | ...
    mma     S dP(n) dV(n) | S(n-1) dK dP dQ(n) dV(n-1) | S(n-2) dK dP dQ(n-1) ... | dK dQ(0)
    attend    [P(n)][dS(n) ->]  [P(n-1)]    [dS(n-1) ->]    ...                     dV dK
    relay                 -> told

    0   32  64       128              256      320      384              512
    |  S^T(t)         |  dV            |  dP^T(t)        |  dK            |
    |P0 |P1 |  dQ(t)  |                |dS0     |dS1     |                |

The exponentials of a query tile run beside products of the tile before. Host entry, memory,
dispatch of roles; those are in ``bwd_roles.py`` (of two sweeps, ``bwd_sweeps.py``, of a pair,
``bwd_pair.py``) and in ``bwd_attend.py``, roles, edges and memory as data in ``plan_bwd.py``.
Conventions: ``jax_fa/problem.py``.
"""

from types import ModuleType

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from jax_fa.config import BlackwellBackward, KernelKey
from jax_fa.kernels import edges, host, primitives, segments, tiles
from jax_fa.kernels.backward_rows import Scratch
from jax_fa.kernels.backward_work import Arrays, Scalars, Tma, find_segment_rows
from jax_fa.kernels.sm100 import bwd_pair as pair
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
    lone_tma: Tma | None,
):
    """Device entry: shared and tensor memory, pipelines, dispatch of roles."""
    plan, layouts, dtype = variant.plan, make_layouts(variant), variant.dtype
    is_swept_once, is_pair = variant.config.sweeps == 1, plan.ctas == 2
    # Else values lie where dO was.
    v_elements = cute.cosize(layouts.v) if const_expr(is_swept_once) else 0
    by_columns = {name: getattr(layouts, name) for name in ("kt", "qt", "dout_t") if is_pair}
    of_kt, of_qt, of_dout_t = map(cute.cosize, by_columns.values()) if is_pair else (0, 0, 0)
    of_ds = cute.cosize(layouts.ds_parts if is_pair else layouts.ds)

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
        kt: cute.struct.Align[cute.struct.MemRange[dtype, of_kt], 1024]
        qt: cute.struct.Align[cute.struct.MemRange[dtype, of_qt], 1024]
        dout_t: cute.struct.Align[cute.struct.MemRange[dtype, of_dout_t], 1024]
        ds: cute.struct.Align[cute.struct.MemRange[dtype, of_ds], 1024]
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
        **{
            name: primitives.smem_tensor(getattr(storage, name), layout)
            for name, layout in by_columns.items()
        },
        ds_parts=primitives.smem_tensor(storage.ds, layouts.ds_parts) if is_pair else None,
    )
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        primitives.prefetch_descriptors(tma)
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
        cute.arch.alloc_tmem(edges.TMEM_COLS, tmem_address, is_pair)
        cute.arch.relinquish_tmem_alloc_permit(is_pair)
    cute.arch.mbarrier_init_fence()
    primitives.before_thread_sync()
    if const_expr(is_pair):
        # HAZARD: nobody may arrive at the other CTA's barriers before they exist.
        primitives.cluster_sync()
    else:
        cute.arch.sync_threads()
    primitives.after_thread_sync()

    # All columns are this CTA's, so the first is number 0: known at compile time, unlike what was
    # written to tmem_address, and no registers need be spent on sums with it.
    tmem = cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)
    x = Context(tma, arrays, scratch, scalars, order, smem, tmem, lone_tma)
    if const_expr(variant.is_general):
        if tiles.is_present(scalars.q_segments):
            find_segment_rows(variant, x)
            cute.arch.sync_threads()
    producers = {data: pair[0] for data, pair in ends.items()}
    consumers = {data: pair[1] for data, pair in ends.items()}
    _dispatch(variant, x, warp, tuple(producers.values()), tuple(consumers.values()))


def _roles(variant: Variant) -> ModuleType:
    """Where the roles load and mma are."""
    if variant.plan.ctas == 2:
        return pair
    return roles if variant.config.sweeps == 1 else sweeps


def _pipes(variant: Variant, role: str, bundle: type, producers: tuple, consumers: tuple):
    """The ends that a role holds, in its ``bundle``, whose fields are called like edges.

    None for edges that the kernel has not.
    """
    held = {
        edge.data: producers[i] if edge.producer == role else consumers[i]
        for i, edge in enumerate(variant.plan.edges)
    }
    return bundle(*(held.get(name) for name in bundle._fields))


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
        # HAZARD: tensor memory is given back when nobody reads it any more. A pair gives it back
        # together, when neither CTA has anything left to do with it or with the other's shared
        # memory.
        if const_expr(plan.ctas == 2):
            primitives.cluster_sync()
        else:
            done = plan.barrier("done")
            cute.arch.barrier(barrier_id=done.index, number_of_threads=done.threads)
        if warp == plan.role("add").warps.start:
            cute.arch.dealloc_tmem(x.tmem, edges.TMEM_COLS, plan.ctas == 2)
    else:
        cute.arch.setmaxregister_decrease(plan.role("mma").registers)
        if warp == plan.role("mma").warps.start:
            if tiles.rank_in_cluster(plan.ctas) == edges.LEADER:
                mma_pipes = _pipes(variant, "mma", _roles(variant).MmaPipes, *ends)
                _roles(variant).mma(variant, x, mma_pipes)
        elif warp == plan.role("load").warps.start:
            _roles(variant).load(
                variant, x, _pipes(variant, "load", _roles(variant).LoadPipes, *ends)
            )
        if const_expr(plan.ctas == 2):
            if warp == plan.role("relay").warps.start:
                pair.relay(variant, x, _pipes(variant, "relay", pair.RelayPipes, *ends))


def make_entry(key: KernelKey, config: BlackwellBackward):
    """The flat host entry of one variant, and the stand-in arguments it is compiled with."""
    return host.backward_entry(Variant(key, config, backward_plan(key, config)), launch)


@cute.jit
def launch(variant: cutlass.Constexpr, call: host.BackwardCall):
    """Describes the arrays to TMA and launches the main kernel."""
    ctas, layouts, lone_tma = variant.plan.ctas, make_layouts(variant), None
    if const_expr(variant.config.sweeps == 2):
        layouts = layouts._replace(v=cute.slice_(layouts.v, (None, None, 0)))
    tma, arrays = host.backward_arrays(variant, call, layouts, ctas)
    if const_expr(ctas > 1 and variant.is_general):
        lone_tma, _ = host.backward_arrays(variant, call, layouts)
    order, num_ctas = host.backward_order(variant, call)
    kernel(variant, tma, arrays, call.scratch, call.scalars, order, lone_tma).launch(
        grid=(num_ctas, 1, 1),
        block=(variant.plan.threads, 1, 1),
        cluster=(ctas, 1, 1) if ctas > 1 else None,
        stream=call.stream,
        min_blocks_per_mp=1,
    )
