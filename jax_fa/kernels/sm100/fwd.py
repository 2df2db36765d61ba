"""Blackwell forward: softmax(mask(scale q k^T)) v and its log-sum-exp, in one pass over keys.

    load      k(n-1) q0 q1 v(n-1) | k(n-2) v(n-2) | k(n-3) v(n-3) | ...
    mma          S0   S1 | PV0(n-1) S0(n-2)  PV1(n-1) S1(n-2) | PV0(n-2) S0(n-3) ...
    softmax0          [  P0(n-1)  ]        [  P0(n-2)  ]
    softmax1               [  P1(n-1)  ]          [  P1(n-2)  ]
    correct                                [O0]     [O1]                      ... out0 out1
    store                                                                         ... out0 out1

The tensor core multiplies for one query tile while the softmax of the other is computed. Here are
host entry, memory and the dispatch of roles; the roles are in ``fwd_roles.py`` and
``fwd_softmax.py``; roles, edges and memory as data in ``plan.py``. Conventions:
``jax_fa/problem.py``.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from jax_fa.config import BlackwellForward, KernelKey
from jax_fa.kernels import edges, host, primitives, segments, tiles
from jax_fa.kernels.forward_work import Arrays, Scalars, Tma, Variant, find_segment_keys
from jax_fa.kernels.sm100 import fwd_roles as roles
from jax_fa.kernels.sm100 import fwd_softmax
from jax_fa.kernels.sm100.fwd_roles import Context, Smem
from jax_fa.kernels.sm100.plan import BLOCK_KV, Q_TILES, ROWS, TILE_EDGES, forward_plan


class Layouts(NamedTuple):
    """Shared memory layouts. Of a pair, a CTA has half the rows of k and half the columns of v."""

    q: cute.ComposedLayout  # (128, D, 2)
    k: cute.ComposedLayout  # (128 / ctas, D, stages)
    v: cute.ComposedLayout  # (128, Dv / ctas, stages), a stage as large as one of k
    out: cute.ComposedLayout  # (128, Dv, 2)


def make_layouts(variant: Variant) -> Layouts:
    """The layouts of a variant's shared memory."""
    key, dtype = variant.key, variant.dtype
    stages, ctas = variant.plan.edge("kv").stages, variant.plan.ctas
    v = primitives.smem_layout(dtype, (BLOCK_KV, key.value_dim // ctas, stages))
    if key.value_dim < key.head_dim:
        rows, columns, _ = v.outer.shape
        row_stride, column_stride, _ = v.outer.stride
        outer = cute.make_layout(
            (rows, columns, stages),
            stride=(row_stride, column_stride, BLOCK_KV // ctas * key.head_dim),
        )
        v = cute.make_composed_layout(v.inner, 0, outer)
    return Layouts(
        q=primitives.smem_layout(dtype, (ROWS, key.head_dim, Q_TILES)),
        k=primitives.smem_layout(dtype, (BLOCK_KV // ctas, key.head_dim, stages)),
        v=v,
        out=primitives.smem_layout(dtype, (ROWS, key.value_dim, Q_TILES)),
    )


def _view(like: cute.Tensor, layout: cute.ComposedLayout) -> cute.Tensor:
    """Other data in the bytes of ``like``."""
    pointer = cute.recast_ptr(like.iterator, layout.inner)
    return cute.make_tensor(pointer, layout.outer)


@cute.kernel
def kernel(
    variant: cutlass.Constexpr,
    tma: Tma,
    arrays: Arrays,
    scalars: Scalars,
    order: tiles.Order,
):
    """Device entry: shared and tensor memory, pipelines, dispatch of roles."""
    plan, layouts, dtype = variant.plan, make_layouts(variant), variant.dtype
    out_buffer = next(buffer for buffer in plan.buffers if buffer.name == "out")
    out_elements = 0 if out_buffer.alias_of else cute.cosize(layouts.out)
    is_pair = plan.ctas == 2

    @cute.struct
    class Storage:
        mbarriers: cute.struct.MemRange[Int64, plan.num_mbarriers]
        scrub: cute.struct.MemRange[Int64, 1]
        tmem: cute.struct.MemRange[Int32, 1]
        segment_keys: cute.struct.MemRange[Int32, segments.WORDS]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.q)], 1024]
        kv: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.k)], 1024]
        out: cute.struct.Align[cute.struct.MemRange[dtype, out_elements], 1024]
        stats: cute.struct.MemRange[Float32, ROWS * 2 * Q_TILES]

    storage = SmemAllocator().allocate(Storage)
    sQ = primitives.smem_tensor(storage.q, layouts.q)
    sK = primitives.smem_tensor(storage.kv, layouts.k)
    sOut = _view(sQ, layouts.out)
    if const_expr(out_elements > 0):
        sOut = primitives.smem_tensor(storage.out, layouts.out)
    smem = Smem(
        q=sQ,
        k=sK,
        v=primitives.smem_tensor(storage.kv, layouts.v),
        out=sOut,
        stats=storage.stats.get_tensor(cute.make_layout((ROWS, 2, Q_TILES))),
        scrub=storage.scrub.data_ptr(),
        segment_keys=storage.segment_keys.get_tensor(cute.make_layout(segments.WORDS)),
    )
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        for atom in tma:
            cpasync.prefetch_descriptor(atom)
        if const_expr(variant.is_general):
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(smem.scrub, 1)
                segments.reset(smem.segment_keys)

    def make_edge(data: str) -> tuple:
        first = storage.mbarriers.data_ptr() + plan.first_mbarrier(data)
        return edges.make_edge(plan, data, first)

    q, kv, o, out, room = (make_edge(data) for data in ("q", "kv", "o", "out", "room"))
    s0, p0, p_rest0, stats0, scaled0 = (make_edge(f"{data}0") for data in TILE_EDGES)
    s1, p1, p_rest1, stats1, scaled1 = (make_edge(f"{data}1") for data in TILE_EDGES)
    tmem_address = storage.tmem.data_ptr()
    if warp == plan.role("correct").warps.start:
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
    x = Context(tma, arrays, scalars, order, smem, tmem)
    if const_expr(variant.is_general):
        if tiles.is_present(scalars.q_segments):
            find_segment_keys(variant, x)
            cute.arch.sync_threads()
    edges_of_tiles = ((s0, p0, p_rest0, stats0, scaled0), (s1, p1, p_rest1, stats1, scaled1))
    _dispatch(variant, x, warp, (q, kv, o, out, room), edges_of_tiles)


@cute.jit
def _dispatch(variant: cutlass.Constexpr, x: Context, warp: Int32, shared: tuple, of_tiles: tuple):
    """Sends every warp to its role, with the registers and the ends of edges that it has."""
    plan = variant.plan
    q, kv, o, out, room = shared
    (s0, p0, p_rest0, stats0, scaled0), (s1, p1, p_rest1, stats1, scaled1) = of_tiles
    # setmaxnreg works on warpgroups: the four single warps share a value.
    if warp < plan.role("correct").warps.start:
        cute.arch.setmaxregister_increase(plan.role("softmax0").registers)
        if warp < plan.role("softmax1").warps.start:
            ends = fwd_softmax.SoftmaxPipes(s0[1], p0[0], p_rest0[0], stats0[0])
            fwd_softmax.attend(variant, x, 0, ends)
        else:
            ends = fwd_softmax.SoftmaxPipes(s1[1], p1[0], p_rest1[0], stats1[0])
            fwd_softmax.attend(variant, x, 1, ends)
    elif warp < plan.role("mma").warps.start:
        cute.arch.setmaxregister_decrease(plan.role("correct").registers)
        ends = fwd_softmax.CorrectPipes(
            (stats0[1], stats1[1]), (scaled0[0], scaled1[0]), o[1], out[0]
        )
        fwd_softmax.correct(variant, x, ends)
        # HAZARD: tensor memory is given back when nobody reads it any more; its last readers are
        # the four warps of this role. A pair gives back together; and neither of its CTAs may end
        # while the other still arrives at its barriers.
        if const_expr(plan.ctas == 2):
            primitives.cluster_sync()
        else:
            done = plan.barrier("correct")
            cute.arch.barrier(barrier_id=done.index, number_of_threads=done.threads)
        if warp == plan.role("correct").warps.start:
            cute.arch.dealloc_tmem(x.tmem, edges.TMEM_COLS, plan.ctas == 2)
    else:
        cute.arch.setmaxregister_decrease(plan.role("mma").registers)
        if warp == plan.role("mma").warps.start:
            ends = roles.MmaPipes(
                q[1],
                kv[1],
                (s0[0], s1[0]),
                (p0[1], p1[1]),
                (p_rest0[1], p_rest1[1]),
                (scaled0[1], scaled1[1]),
                o[0],
            )
            if tiles.rank_in_cluster(plan.ctas) == edges.LEADER:
                roles.mma(variant, x, ends)
        elif warp == plan.role("store").warps.start:
            roles.store(variant, x, roles.StorePipes(out[1], room[0]))
        elif warp == plan.role("load").warps.start:
            roles.load(variant, x, roles.LoadPipes(q[0], kv[0], room[1]))


def make_entry(key: KernelKey, config: BlackwellForward) -> tuple[Callable, tuple]:
    """The flat host entry of one variant, and the stand-in arguments it is compiled with."""
    return host.forward_entry(Variant(key, config, forward_plan(key, config)), launch)


@cute.jit
def launch(variant: cutlass.Constexpr, call: host.ForwardCall):
    """Describes the arrays to TMA and launches the kernel."""
    one = (None, None, 0)
    copied = Layouts(*[cute.slice_(layout, one) for layout in make_layouts(variant)])
    tma, arrays = host.forward_arrays(variant, call, copied)
    order, num_ctas = host.forward_order(variant, call)
    kernel(variant, tma, arrays, call.scalars, order).launch(
        grid=(num_ctas, 1, 1),
        block=(variant.plan.threads, 1, 1),
        cluster=(variant.plan.ctas, 1, 1) if variant.plan.ctas > 1 else None,
        stream=call.stream,
        min_blocks_per_mp=1,
    )
