"""Blackwell forward: softmax(mask(scale q k^T)) v and its log-sum-exp, in one pass over keys.

    load      k(n-1) q0 q1 v(n-1) | k(n-2) v(n-2) | k(n-3) v(n-3) | ...
    mma          S0   S1 | PV0(n-1) S0(n-2)  PV1(n-1) S1(n-2) | PV0(n-2) S0(n-3) ...
    softmax0          [  P0(n-1)  ]        [  P0(n-2)  ]
    softmax1               [  P1(n-1)  ]          [  P1(n-2)  ]
    correct                                [O0]     [O1]                      ... out0 out1
    store                                                                         ... out0 out1

The tensor core multiplies for one query tile while the softmax of the other is computed. Host
entry, memory, dispatch of roles; the roles are in ``fwd_roles.py``, roles, edges and memory as data
in ``plan.py``. Conventions: ``jax_fa/problem.py``.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from jax_fa.band import UNBOUNDED
from jax_fa.config import KernelKey
from jax_fa.kernels import abi, edges, primitives, softmax, tiles
from jax_fa.kernels.sm100 import fwd_roles as roles
from jax_fa.kernels.sm100.fwd_roles import Arrays, Context, Scalars, Smem, Tma, Variant
from jax_fa.kernels.sm100.plan import (
    BLOCK_KV,
    Q_TILES,
    ROWS,
    TILE_EDGES,
    Config,
    forward_plan,
)


class Layouts(NamedTuple):
    """Shared memory layouts, 128 rows in mode 0."""

    q: cute.ComposedLayout  # (128, D, 2)
    k: cute.ComposedLayout  # (128, D, stages)
    v: cute.ComposedLayout  # (128, Dv, stages), a stage as large as one of k
    out: cute.ComposedLayout  # (128, Dv, 2)


def make_layouts(variant: Variant) -> Layouts:
    """The layouts of a variant's shared memory."""
    key, stages, dtype = variant.key, variant.config.kv_stages, variant.dtype
    v = primitives.smem_layout(dtype, (BLOCK_KV, key.value_dim, stages))
    if key.value_dim < key.head_dim:
        rows, columns, _ = v.outer.shape
        row_stride, column_stride, _ = v.outer.stride
        outer = cute.make_layout(
            (rows, columns, stages),
            stride=(row_stride, column_stride, BLOCK_KV * key.head_dim),
        )
        v = cute.make_composed_layout(v.inner, 0, outer)
    return Layouts(
        q=primitives.smem_layout(dtype, (ROWS, key.head_dim, Q_TILES)),
        k=primitives.smem_layout(dtype, (BLOCK_KV, key.head_dim, stages)),
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

    @cute.struct
    class Storage:
        mbarriers: cute.struct.MemRange[Int64, plan.num_mbarriers]
        scrub: cute.struct.MemRange[Int64, 1]
        tmem: cute.struct.MemRange[Int32, 1]
        segment_keys: cute.struct.MemRange[Int32, 2]
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
        segment_keys=storage.segment_keys.get_tensor(cute.make_layout(2)),
    )
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        for atom in tma:
            cpasync.prefetch_descriptor(atom)
        if const_expr(variant.is_general):
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(smem.scrub, 1)
                smem.segment_keys[0] = Int32(UNBOUNDED)
                smem.segment_keys[1] = Int32(0)

    def make_edge(data: str) -> tuple:
        first = storage.mbarriers.data_ptr() + plan.first_mbarrier(data)
        return edges.make_edge(plan, data, first)

    q, kv, o, out, room = (make_edge(data) for data in ("q", "kv", "o", "out", "room"))
    s0, p0, p_rest0, stats0, scaled0 = (make_edge(f"{data}0") for data in TILE_EDGES)
    s1, p1, p_rest1, stats1, scaled1 = (make_edge(f"{data}1") for data in TILE_EDGES)
    tmem_address = storage.tmem.data_ptr()
    if warp == plan.role("correct").warps.start:
        cute.arch.alloc_tmem(edges.TMEM_COLS, tmem_address)
        cute.arch.relinquish_tmem_alloc_permit()
    cute.arch.mbarrier_init_fence()
    primitives.before_thread_sync()
    cute.arch.sync_threads()
    primitives.after_thread_sync()

    # All columns are this CTA's, so the first is number 0: known at compile time, unlike what was
    # written to tmem_address, and no registers need be spent on sums with it.
    tmem = cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)
    x = Context(tma, arrays, scalars, order, smem, tmem)
    if const_expr(variant.is_general):
        if tiles.is_present(scalars.q_segments):
            _find_segment_keys(variant, x)
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
            ends = roles.SoftmaxPipes(s0[1], p0[0], p_rest0[0], stats0[0])
            roles.attend(variant, x, 0, ends)
        else:
            ends = roles.SoftmaxPipes(s1[1], p1[0], p_rest1[0], stats1[0])
            roles.attend(variant, x, 1, ends)
    elif warp < plan.role("mma").warps.start:
        cute.arch.setmaxregister_decrease(plan.role("correct").registers)
        ends = roles.CorrectPipes((stats0[1], stats1[1]), (scaled0[0], scaled1[0]), o[1], out[0])
        roles.correct(variant, x, ends)
        # HAZARD: tensor memory is given back when nobody reads it any more; its last readers are
        # the four warps of this role.
        done = plan.barrier("correct")
        cute.arch.barrier(barrier_id=done.index, number_of_threads=done.threads)
        if warp == plan.role("correct").warps.start:
            cute.arch.dealloc_tmem(x.tmem, edges.TMEM_COLS)
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
            roles.mma(variant, x, ends)
        elif warp == plan.role("store").warps.start:
            roles.store(variant, x, roles.StorePipes(out[1], room[0]))
        elif warp == plan.role("load").warps.start:
            roles.load(variant, x, roles.LoadPipes(q[0], kv[0], room[1]))


@cute.jit
def _find_segment_keys(variant: cutlass.Constexpr, x: Context):
    """Narrows the tile's keys to those whose segment lies in the range of its queries' segments.

    All threads of the CTA share the scan; the result goes to ``smem.segment_keys``.
    """
    scalars, sequences = x.scalars, x.scalars.sequences
    thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
    threads, block_q = variant.plan.threads, variant.config.block_q
    tile = roles.tile_at(variant, x, Int32(0))
    span = tiles.locate(sequences, tile, block_q)
    lowest, highest = Int32(0x7FFFFFFF), Int32(-0x80000000)
    base = tile.batch * sequences.q_len + span.q_start
    for i in cutlass.range_constexpr(block_q // edges.WARP):
        row = cutlass.min(span.first_row + lane + i * edges.WARP, span.q_slot - 1)
        segment = tiles.element(scalars.q_segments, base + cutlass.max(row, 0))
        lowest, highest = cutlass.min(lowest, segment), cutlass.max(highest, segment)
    lowest = cute.arch.warp_redux_sync(lowest, "min")
    highest = cute.arch.warp_redux_sync(highest, "max")
    first, end = span.kv_len, Int32(0)
    base = tile.batch * sequences.kv_len + span.kv_start
    for key in cutlass.range(thread, span.kv_len, threads, unroll=4):
        segment = tiles.element(scalars.kv_segments, base + key)
        if (segment >= lowest) & (segment <= highest):
            first, end = cutlass.min(first, key), key + 1
    first = cute.arch.warp_redux_sync(first, "min")
    end = cute.arch.warp_redux_sync(end, "max")
    if lane == 0:
        cute.arch.atomic_min(x.smem.segment_keys.iterator, first, scope="cta")
        cute.arch.atomic_max(x.smem.segment_keys.iterator + 1, end, scope="cta")


def dense(pointer: cute.Pointer, heads: tuple, width: int) -> cute.Tensor:
    """A dense [batch, length, heads, width] array as (length, width, heads, batch)."""
    batch, length, num_heads = heads
    row = num_heads.to(Int64) * width
    return cute.make_tensor(
        pointer,
        cute.make_layout((length, width, num_heads, batch), stride=(row, 1, width, row * length)),
    )


def make_entry(key: KernelKey, config: Config):
    """The flat host entry of one variant, and the stand-in arguments it is compiled with.

    The entry's parameters are those of ``abi.FORWARD``.
    """
    variant = Variant(key, config, forward_plan(key, config))

    @cute.jit
    def forward(
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        q_lengths: cute.Pointer,
        kv_lengths: cute.Pointer,
        cu_seqlens_q: cute.Pointer,
        cu_seqlens_k: cute.Pointer,
        q_segments: cute.Pointer,
        kv_segments: cute.Pointer,
        q_offset: cute.Pointer,
        sinks: cute.Pointer,
        batch: Int32,
        num_sequences: Int32,
        q_len: Int32,
        kv_len: Int32,
        num_q_heads: Int32,
        num_kv_heads: Int32,
        scale: Float32,
        soft_cap: Float32,
        window_left: Int32,
        window_right: Int32,
        bottom_right: Int32,
        num_sms: Int32,
        stream: cuda.CUstream,
    ):
        layouts = make_layouts(variant)
        queries, keys = (batch, q_len, num_q_heads), (batch, kv_len, num_kv_heads)
        gOut = dense(out, queries, key.value_dim)
        one = (None, None, 0)
        q_tile, k_tile = (ROWS, key.head_dim), (BLOCK_KV, key.head_dim)
        v_tile, out_tile = (BLOCK_KV, key.value_dim), (ROWS, key.value_dim)
        gQ, gK = dense(q, queries, key.head_dim), dense(k, keys, key.head_dim)
        gV = dense(v, keys, key.value_dim)
        tma_q, mQ = primitives.tma_load(gQ, cute.slice_(layouts.q, one), q_tile)
        tma_k, mK = primitives.tma_load(gK, cute.slice_(layouts.k, one), k_tile)
        tma_v, mV = primitives.tma_load(gV, cute.slice_(layouts.v, one), v_tile)
        tma_out, mOut = primitives.tma_store(gOut, cute.slice_(layouts.out, one), out_tile)
        lse_row = num_q_heads.to(Int64)
        mLse = cute.make_tensor(
            lse,
            cute.make_layout((q_len, num_q_heads, batch), stride=(lse_row, 1, lse_row * q_len)),
        )
        num_q_blocks = cute.ceil_div(q_len, config.block_q)
        if const_expr(variant.is_general):
            if tiles.is_present(cu_seqlens_q):
                # Each sequence, and what lies behind the last, may end in a partly filled block.
                num_q_blocks = q_len // config.block_q + num_sequences + 1
        group = num_q_heads // num_kv_heads
        kv_bytes = kv_len * (2 * (key.head_dim + key.value_dim)) // group
        order = tiles.make_order(
            batch * num_q_heads, num_q_heads, group, num_q_blocks, kv_bytes, num_sms
        )
        score_scale = scale
        if const_expr(key.has_soft_cap):
            score_scale = soft_cap
        sequences = tiles.Sequences(
            q_lengths,
            kv_lengths,
            cu_seqlens_q,
            cu_seqlens_k,
            q_offset,
            num_sequences,
            q_len,
            kv_len,
        )
        scalars = Scalars(
            sequences,
            window_left,
            window_right,
            bottom_right,
            scale / soft_cap * (2.0 * softmax.LOG2_E),
            score_scale * softmax.LOG2_E,
            sinks,
            q_segments,
            kv_segments,
        )
        num_tiles = order.num_heads * num_q_blocks
        num_ctas = cutlass.min(num_sms, num_tiles)
        if const_expr(variant.is_general):
            if tiles.is_present(q_segments):
                num_ctas = num_tiles
        kernel(
            variant,
            Tma(tma_q, tma_k, tma_v, tma_out),
            Arrays(mQ, mK, mV, mOut, gOut, mLse),
            scalars,
            order,
        ).launch(
            grid=(num_ctas, 1, 1),
            block=(variant.plan.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    dtype = variant.dtype
    element = {"lse": Float32, "sinks": Float32, "q": dtype, "k": dtype, "v": dtype, "out": dtype}
    return forward, primitives.stand_ins(abi.FORWARD, element)
