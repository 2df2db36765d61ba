"""Blackwell forward: softmax(mask(scale q k^T)) v and its log-sum-exp, in one pass over keys.

    load      k(n-1) q0 q1 v(n-1) | k(n-2) v(n-2) | k(n-3) v(n-3) | ...
    mma          S0   S1 | PV0(n-1) S0(n-2)  PV1(n-1) S1(n-2) | PV0(n-2) S0(n-3) ...
    softmax0          [  P0(n-1)  ]        [  P0(n-2)  ]
    softmax1               [  P1(n-1)  ]          [  P1(n-2)  ]
    correct                                [O0]     [O1]                      ... out0 out1
    store                                                                         ... out0 out1

With heads of 256 there is one query tile, and S is a block of keys ahead of PV:

    load      k(n-1) q0 k(n-2) v(n-1) | k(n-3) v(n-2) | ...
    mma          S0 S0(n-2) | PV0(n-1) S0(n-3) | PV0(n-2) S0(n-4) | ...
    softmax0       [ P0(n-1) ]   [ P0(n-2) ]   [ P0(n-3) ]
    correct                             [O0]          [O0]

The tensor core multiplies for one query tile, or block, while the softmax of another is computed.
Here are host entry, memory and the dispatch of roles; the roles are in ``fwd_roles.py`` and
``fwd_softmax.py``; roles, edges and memory as data in ``plan.py``. Conventions:
``jax_fa/problem.py``.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from jax_fa.config import BlackwellForward, KernelKey
from jax_fa.kernels import edges, host, primitives, segments, tiles
from jax_fa.kernels.forward_work import Arrays, Granules, Scalars, Tma, Variant, find_segment_keys
from jax_fa.kernels.sm100 import fwd_roles as roles
from jax_fa.kernels.sm100 import fwd_softmax
from jax_fa.kernels.sm100.fwd_roles import Context, Smem
from jax_fa.kernels.sm100.plan import BLOCK_KV, OUT_STAGES, ROWS, forward_plan, tiling


class TileEdges(NamedTuple):
    """The (producer, consumer) ends of the edges that each query tile has for itself."""

    s: tuple
    p: tuple
    p_rest: tuple
    stats: tuple
    scaled: tuple


class Layouts(NamedTuple):
    """Shared memory layouts; the sizes are those of ``plan.Tiling``.

    Of a pair, a CTA has half the rows of k and half the columns of v.
    """

    q: cute.ComposedLayout  # (128, D, q_tiles)
    k: cute.ComposedLayout  # (128 / ctas, kv_columns, kv_stages)
    v: cute.ComposedLayout  # (kv_rows, Dv / ctas, kv_stages), a stage as large as one of k
    out: cute.ComposedLayout  # (128, out_columns, 2)


def make_layouts(variant: Variant) -> Layouts:
    """The layouts of a variant's shared memory."""
    key, cut, ctas = variant.key, tiling(variant.key, variant.config), variant.plan.ctas
    shapes = {
        "q": (ROWS, key.head_dim, cut.q_tiles),
        "k": (BLOCK_KV // ctas, cut.kv_columns, cut.kv_stages),
        "v": (cut.kv_rows, key.value_dim // ctas, cut.kv_stages),
        "out": (ROWS, cut.out_columns, OUT_STAGES),
    }
    return Layouts(
        **{name: primitives.smem_layout(variant.dtype, shape) for name, shape in shapes.items()}
    )


@cute.kernel
def kernel(
    variant: cutlass.Constexpr,
    tma: Tma,
    arrays: Arrays,
    scalars: Scalars,
    order: tiles.Order,
    packing: tiles.Packing,
    granules: Granules,
):
    """Device entry: shared and tensor memory, pipelines, dispatch of roles."""
    plan, layouts, dtype = variant.plan, make_layouts(variant), variant.dtype
    cut, is_pair = tiling(variant.key, variant.config), plan.ctas == 2
    out_elements = 0 if variant.is_split else cute.cosize(layouts.out)

    @cute.struct
    class Storage:
        mbarriers: cute.struct.MemRange[Int64, plan.num_mbarriers]
        scrub: cute.struct.MemRange[Int64, 1]
        tmem: cute.struct.MemRange[Int32, 1]
        segment_keys: cute.struct.MemRange[Int32, segments.WORDS]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.q)], 1024]
        kv: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.k)], 1024]
        out: cute.struct.Align[cute.struct.MemRange[dtype, out_elements], 1024]
        stats: cute.struct.MemRange[Float32, ROWS * 2 * cut.q_tiles]

    storage = SmemAllocator().allocate(Storage)
    smem = Smem(
        q=primitives.smem_tensor(storage.q, layouts.q),
        k=primitives.smem_tensor(storage.kv, layouts.k),
        v=primitives.smem_tensor(storage.kv, layouts.v),
        # Never used where keys are split.
        out=primitives.smem_tensor(storage.q if variant.is_split else storage.out, layouts.out),
        stats=storage.stats.get_tensor(cute.make_layout((ROWS, 2, cut.q_tiles))),
        scrub=storage.scrub.data_ptr(),
        segment_keys=storage.segment_keys.get_tensor(cute.make_layout(segments.WORDS)),
    )
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        primitives.prefetch_descriptors(tma)
        if const_expr(variant.is_general):
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(smem.scrub, 1)
                segments.reset(smem.segment_keys)

    def make_edge(data: str) -> tuple:
        first = storage.mbarriers.data_ptr() + plan.first_mbarrier(data)
        return edges.make_edge(plan, data, first)

    shared = tuple(make_edge(data) for data in ("q", "kv", "o", "out"))
    of_tiles = [
        TileEdges(*(make_edge(f"{data}{tile}") for data in TileEdges._fields))
        for tile in range(cut.q_tiles)
    ]
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
    x = Context(tma, arrays, scalars, order, packing, granules, smem, tmem)
    if const_expr(variant.is_general):
        if tiles.is_present(scalars.q_segments):
            find_segment_keys(variant, x)
            cute.arch.sync_threads()
    _dispatch(variant, x, warp, shared, tuple(of_tiles))


@cute.jit
def _dispatch(variant: cutlass.Constexpr, x: Context, warp: Int32, shared: tuple, of_tiles: tuple):
    """Sends every warp to its role, with the registers and the ends of edges that it has."""
    plan = variant.plan
    q, kv, o, out = shared
    # setmaxnreg works on warpgroups: the four single warps share a value.
    if warp < plan.role("correct").warps.start:
        cute.arch.setmaxregister_increase(plan.role("softmax0").registers)
        if const_expr(len(of_tiles) == 1):
            fwd_softmax.attend(variant, x, 0, _softmax_pipes(of_tiles[0]))
        elif warp < plan.role("softmax1").warps.start:
            fwd_softmax.attend(variant, x, 0, _softmax_pipes(of_tiles[0]))
        else:
            fwd_softmax.attend(variant, x, 1, _softmax_pipes(of_tiles[1]))
    elif warp < plan.role("mma").warps.start:
        cute.arch.setmaxregister_decrease(plan.role("correct").registers)
        stats, scaled = zip(*((tile.stats[1], tile.scaled[0]) for tile in of_tiles), strict=True)
        fwd_softmax.correct(variant, x, fwd_softmax.CorrectPipes(stats, scaled, o[1], out[0]))
        # HAZARD: tensor memory is given back when nobody reads it any more; its last readers are
        # the four warps of this role. A pair gives it back together, when neither CTA has anything
        # left to do with it (PTX ISA, "Issue Granularity" of tcgen05).
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
            s = tuple(tile.s[0] for tile in of_tiles)
            answers = tuple(
                roles.Answers(tile.scaled[1], tile.p[1], tile.p_rest[1]) for tile in of_tiles
            )
            if tiles.rank_in_cluster(plan.ctas) == edges.LEADER:
                roles.mma(variant, x, roles.MmaPipes(q[1], kv[1], s, answers, o[0]))
        elif warp == plan.role("store").warps.start:
            if const_expr(not variant.is_split):
                roles.store(variant, x, out[1])
        elif warp == plan.role("load").warps.start:
            roles.load(variant, x, roles.LoadPipes(q[0], kv[0]))


def _softmax_pipes(tile: TileEdges) -> fwd_softmax.SoftmaxPipes:
    return fwd_softmax.SoftmaxPipes(tile.s[1], tile.p[0], tile.p_rest[0], tile.stats[0])


def make_entry(key: KernelKey, config: BlackwellForward) -> tuple[Callable, tuple]:
    """The flat host entry of one variant, and the stand-in arguments it is compiled with."""
    return host.forward_entry(Variant(key, config, forward_plan(key, config)), launch)


@cute.jit
def launch(variant: cutlass.Constexpr, call: host.ForwardCall):
    """Describes the arrays to TMA and launches the kernel."""
    one = (None, None, 0)
    layouts = make_layouts(variant)
    copied = Layouts(*[cute.slice_(layout, one) for layout in layouts])
    tma, arrays = host.forward_arrays(variant, call, copied)
    granules = host.forward_granules(variant, call, layouts.q)
    packing = host.forward_packing(variant, call)
    order, num_ctas = host.forward_order(variant, call, packing)
    kernel(variant, tma, arrays, call.scalars, order, packing, granules).launch(
        grid=(num_ctas, 1, 1),
        block=(variant.plan.threads, 1, 1),
        cluster=(variant.plan.ctas, 1, 1) if variant.plan.ctas > 1 else None,
        stream=call.stream,
        min_blocks_per_mp=1,
    )
