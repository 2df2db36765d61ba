"""Hopper forward: out = softmax(mask(scale q k^T)) v, and its log-sum-exp, in one pass over keys.

    load (1 warp)      q        k(n-1)   k(n-2)  v(n-1)   k(n-3)  v(n-2)   ...
    attend 0           S(n-1) | S(n-2) PV(n-1) | softmax(n-2) | S(n-3) PV(n-2) | softmax(n-3) ...
    attend 1                         (its softmax) | S(n-2) PV(n-1) | softmax(n-2) | ...

Within a consumer warpgroup the product S of the next key block is issued before PV of the current
one, so that softmax of the next overlaps PV of the current; between consumers, named barriers make
one compute its softmax while another occupies the tensor cores (Shah et al., arXiv:2407.08608).
Roles, edges and memory: ``plan.py``. Conventions: ``jax_fa/problem.py``.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, nullptr
from cutlass.memory import SmemAllocator
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.band import UNBOUNDED, Blocks, Window, key_range, kv_blocks
from jax_fa.config import FwdConfig, KernelKey
from jax_fa.kernels import edges, primitives, softmax, tiles
from jax_fa.kernels.sm90.plan import ROWS, forward_plan


class Layouts(NamedTuple):
    """Shared memory layouts, a tile of 64 query rows or one key block in modes 0 and 1."""

    q: cute.ComposedLayout  # (64, D, consumers)
    k: cute.ComposedLayout  # (block_kv, D, stages)
    v: cute.ComposedLayout  # (block_kv, Dv, stages)
    out: cute.ComposedLayout  # (64, Dv, consumers)


class Variant(NamedTuple):
    """What is fixed at compile time."""

    key: KernelKey
    config: FwdConfig
    plan: edges.Plan


def make_layouts(variant: Variant) -> Layouts:
    """The layouts of a variant's shared memory."""
    key, config = variant.key, variant.config
    dtype = primitives.DTYPES[key.dtype]
    return Layouts(
        q=primitives.smem_layout(dtype, (ROWS, key.head_dim, config.num_consumers)),
        k=primitives.smem_layout(dtype, (config.block_kv, key.head_dim, config.stages)),
        v=primitives.smem_layout(dtype, (config.block_kv, key.value_dim, config.stages)),
        out=primitives.smem_layout(dtype, (ROWS, key.value_dim, config.num_consumers)),
    )


class Tma(NamedTuple):
    """TMA descriptors."""

    q: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom
    out: cute.CopyAtom


class Arrays(NamedTuple):
    """Global arrays; all but lse as TMA sees them."""

    q: cute.Tensor  # (T, D, N, B)
    k: cute.Tensor  # (S, D, K, B)
    v: cute.Tensor  # (S, Dv, K, B)
    out: cute.Tensor  # (T, Dv, N, B)
    lse: cute.Tensor  # (T, N, B)


class Scalars(NamedTuple):
    """Run-time values that every tile shares."""

    q_len: Int32
    kv_len: Int32
    shift: Int32
    scale_log2: Float32
    sinks: cute.Pointer


class Pipes(NamedTuple):
    """One end of each edge."""

    q: PipelineProducer | PipelineConsumer
    k: PipelineProducer | PipelineConsumer
    v: PipelineProducer | PipelineConsumer


class Smem(NamedTuple):
    """Shared memory tiles."""

    q: cute.Tensor  # (64, D, consumers)
    k: cute.Tensor  # (block_kv, D, stages)
    v: cute.Tensor  # (block_kv, Dv, stages)
    out: cute.Tensor  # (64, Dv, consumers)


class Context(NamedTuple):
    """What both roles work with."""

    tma: Tma
    arrays: Arrays
    scalars: Scalars
    order: tiles.Order
    smem: Smem


class Consumer(NamedTuple):
    """What one consumer warpgroup works with, beside its pipes."""

    qk: cute.TiledMma
    pv: cute.TiledMma
    q: cute.Tensor  # A descriptors, (_, 1, D / 16)
    k: cute.Tensor  # B descriptors, (_, 1, D / 16, stages)
    v: cute.Tensor  # B descriptors, (_, 1, block_kv / 16, stages)
    p: cute.Tensor  # A registers, (8, 1, block_kv / 16)
    out: cute.Tensor  # accumulator of 64 x Dv
    state: softmax.RowState
    scale_log2: Float32
    index: Int32
    thread: Int32


def first_tile(variant: Variant, order: tiles.Order) -> tiles.Tile:
    """The first tile of this CTA."""
    if variant.key.mask == "causal":
        return tiles.longest_first(order, Int32(0))
    return tiles.row_order(order, Int32(0))


def next_tile(variant: Variant, order: tiles.Order, tile: tiles.Tile) -> tiles.Tile:
    """The tile after ``tile`` of this CTA."""
    if variant.key.mask == "causal":
        return tiles.longest_first(order, tile.slot + 1)
    return tiles.row_order(order, tile.slot + 1)


def window_of(variant: Variant, scalars: Scalars) -> Window:
    """The band of the sequence that a tile belongs to."""
    right = 0 if variant.key.mask == "causal" else UNBOUNDED
    return Window(scalars.shift, UNBOUNDED, right, scalars.q_len, scalars.kv_len)


def blocks_of(variant: Variant, window: Window, tile: tiles.Tile) -> Blocks:
    """The key blocks of a tile."""
    config = variant.config
    return kv_blocks(
        window,
        tile.q_block * config.block_q,
        config.block_q,
        config.block_kv,
        minimum=cutlass.min,
        maximum=cutlass.max,
    )


@cute.jit
def load(variant: cutlass.Constexpr, x: Context, pipes: Pipes):
    """Fetches the query tile and its key and value blocks, newest first. One warp."""
    config = variant.config
    q, k, v = pipes.q, pipes.k, pipes.v
    tile = first_tile(variant, x.order)
    while tile.is_valid:
        blocks = blocks_of(variant, window_of(variant, x.scalars), tile)
        d, dv = variant.key.head_dim, variant.key.value_dim
        gQ = cute.local_tile(
            x.arrays.q[None, None, tile.q_head, tile.batch], (ROWS, d), (None, 0)
        )
        gK = cute.local_tile(
            x.arrays.k[None, None, tile.kv_head, tile.batch], (config.block_kv, d), (None, 0)
        )
        gV = cute.local_tile(
            x.arrays.v[None, None, tile.kv_head, tile.batch], (config.block_kv, dv), (None, 0)
        )
        sQ, gQ = primitives.tma_views(x.tma.q, x.smem.q, gQ)
        sK, gK = primitives.tma_views(x.tma.k, x.smem.k, gK)
        sV, gV = primitives.tma_views(x.tma.v, x.smem.v, gV)
        slot = q.acquire_and_advance()
        for i in cutlass.range_constexpr(config.num_consumers):
            source = gQ[None, tile.q_block * config.num_consumers + i]
            cute.copy(x.tma.q, source, sQ[None, i], tma_bar_ptr=slot.barrier)
        for _ in cutlass.range(cutlass.min(blocks.end - blocks.start, 1), unroll=1):
            slot = k.acquire_and_advance()
            cute.copy(
                x.tma.k, gK[None, blocks.end - 1], sK[None, slot.index], tma_bar_ptr=slot.barrier
            )
        for i in cutlass.range(blocks.end - blocks.start - 1, unroll=1):
            block = blocks.end - 1 - i
            slot = k.acquire_and_advance()
            cute.copy(
                x.tma.k, gK[None, block - 1], sK[None, slot.index], tma_bar_ptr=slot.barrier
            )
            slot = v.acquire_and_advance()
            cute.copy(x.tma.v, gV[None, block], sV[None, slot.index], tma_bar_ptr=slot.barrier)
        for _ in cutlass.range(cutlass.min(blocks.end - blocks.start, 1), unroll=1):
            slot = v.acquire_and_advance()
            cute.copy(
                x.tma.v, gV[None, blocks.start], sV[None, slot.index], tma_bar_ptr=slot.barrier
            )
        tile = next_tile(variant, x.order, tile)
    # HAZARD: the CTA may not end while a consumer still has arrivals for these barriers to come.
    q.tail()
    k.tail()
    v.tail()


@cute.jit
def take_turn(variant: cutlass.Constexpr, c: Consumer):
    """Waits until the consumer before this one has issued its products."""
    if const_expr(variant.config.ping_pong):
        first = variant.plan.barrier("turn0")
        cute.arch.barrier(barrier_id=first.index + c.index, number_of_threads=first.threads)


@cute.jit
def pass_turn(variant: cutlass.Constexpr, c: Consumer):
    """Lets the next consumer issue its products."""
    if const_expr(variant.config.ping_pong):
        first = variant.plan.barrier("turn0")
        following = (c.index + 1) % variant.config.num_consumers
        cute.arch.barrier_arrive(
            barrier_id=first.index + following, number_of_threads=first.threads
        )


@cute.jit
def mask_block(
    variant: cutlass.Constexpr, c: Consumer, scores: cute.Tensor, window: Window, at: tuple
):
    """Hides the keys of a block that the band does not show; ``at`` is (first row, block)."""
    row, block = at
    first_key = block * variant.config.block_kv + primitives.first_column(c.thread)
    limits = []
    for r in cutlass.range_constexpr(softmax.ROWS):
        keys = key_range(window, row + 8 * r, minimum=cutlass.min, maximum=cutlass.max)
        limits.append(keys.hi - first_key)
    softmax.mask(scores, limits)


@cute.jit
def step(
    variant: cutlass.Constexpr,
    masked: cutlass.Constexpr,
    c: Consumer,
    pipes: Pipes,
    window: Window,
    at: tuple,
):
    """S of the block at ``at`` and PV of the one before, then softmax of the former."""
    k, v = pipes.k, pipes.v
    scores = c.qk.make_fragment_C(c.qk.partition_shape_C((ROWS, variant.config.block_kv)))
    k_full = k.wait_and_advance()
    take_turn(variant, c)
    primitives.multiply(c.qk, scores, (c.q, c.k[None, None, None, k_full.index]), False)
    v_full = v.wait_and_advance()
    primitives.multiply(c.pv, c.out, (c.p, c.v[None, None, None, v_full.index]), True)
    pass_turn(variant, c)
    warpgroup.wait_group(1)
    k_full.release()
    if const_expr(masked):
        mask_block(variant, c, scores, window, at)
    shrink = softmax.update(scores, c.state, c.scale_log2)
    warpgroup.wait_group(0)
    v_full.release()
    # HAZARD: P is the A operand of PV until the wait above; rewriting it earlier corrupts PV.
    primitives.narrow(scores, c.p)
    softmax.scale_rows(c.out, shrink)
    return k, v


@cute.jit
def attend(variant: cutlass.Constexpr, x: Context, pipes: Pipes):
    """Both products and the softmax of 64 query rows. One warpgroup of several."""
    config = variant.config
    thread = cute.arch.thread_idx()[0] - variant.plan.role("load").threads
    index = cute.arch.make_warp_uniform(thread // edges.WARPGROUP)
    c = make_consumer(variant, x, index, thread % edges.WARPGROUP)
    q, k, v = pipes.q, pipes.k, pipes.v
    if const_expr(config.ping_pong):
        if index == config.num_consumers - 1:
            pass_turn(variant, c)
    tile = first_tile(variant, x.order)
    while tile.is_valid:
        window = window_of(variant, x.scalars)
        blocks = blocks_of(variant, window, tile)
        row = tile.q_block * config.block_q + index * ROWS + primitives.row_in_tile(c.thread)
        softmax.reset(c.state)
        c.out.fill(0.0)
        q_full = q.wait_and_advance()
        for _ in cutlass.range(cutlass.min(blocks.end - blocks.start, 1), unroll=1):
            k_full = k.wait_and_advance()
            scores = c.qk.make_fragment_C(c.qk.partition_shape_C((ROWS, config.block_kv)))
            primitives.multiply(c.qk, scores, (c.q, c.k[None, None, None, k_full.index]), False)
            warpgroup.wait_group(0)
            k_full.release()
            if blocks.end > blocks.full_end:
                mask_block(variant, c, scores, window, (row, blocks.end - 1))
            softmax.update(scores, c.state, c.scale_log2)
            primitives.narrow(scores, c.p)

            if const_expr(variant.key.mask != "full"):
                for i in cutlass.range(blocks.end - 1 - blocks.full_end, unroll=1):
                    at = (row, blocks.end - 2 - i)
                    k, v = step(variant, True, c, Pipes(q, k, v), window, at)
            last_full = cutlass.min(blocks.end - 1, blocks.full_end)
            for i in cutlass.range(last_full - blocks.full_start, unroll=1):
                k, v = step(variant, False, c, Pipes(q, k, v), window, (row, last_full - 1 - i))
            v_full = v.wait_and_advance()
            primitives.multiply(c.pv, c.out, (c.p, c.v[None, None, None, v_full.index]), True)
            warpgroup.wait_group(0)
            v_full.release()
        if const_expr(not config.out_aliases_q):
            q_full.release()
        store(variant, x, c, tile, row)
        if const_expr(config.out_aliases_q):
            finish_store(variant, c)
            q_full.release()
        tile = next_tile(variant, x.order, tile)
    if const_expr(config.ping_pong):
        # The turn passed to consumer 0 last is still open; taking it leaves the barrier at rest.
        if index == 0:
            take_turn(variant, c)
    finish_store(variant, c)


@cute.jit
def finish_store(variant: cutlass.Constexpr, c: Consumer):
    """Waits until this consumer's TMA store has read its rows of ``out``."""
    barrier = variant.plan.barrier("out0")
    if c.thread < edges.WARP:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.barrier(barrier_id=barrier.index + c.index, number_of_threads=barrier.threads)


def make_consumer(variant: Variant, x: Context, index: Int32, thread: Int32) -> Consumer:
    """Fragments of consumer ``index``."""
    key, config = variant.key, variant.config
    dtype = primitives.DTYPES[key.dtype]
    qk = primitives.make_mma(dtype, config.block_kv, OperandMajorMode.K, a_in_registers=False)
    pv = primitives.make_mma(dtype, key.value_dim, OperandMajorMode.MN, a_in_registers=True)
    qk_slice, pv_slice = qk.get_slice(0), pv.get_slice(0)
    p_shape = pv.partition_shape_A((ROWS, config.block_kv))
    return Consumer(
        qk=qk,
        pv=pv,
        q=qk.make_fragment_A(qk_slice.partition_A(x.smem.q[None, None, index])),
        k=qk.make_fragment_B(qk_slice.partition_B(x.smem.k)),
        v=pv.make_fragment_B(pv_slice.partition_B(primitives.transposed(x.smem.v))),
        p=pv.make_fragment_A(p_shape),
        out=pv.make_fragment_C(pv.partition_shape_C((ROWS, key.value_dim))),
        state=softmax.make_row_state(),
        scale_log2=x.scalars.scale_log2,
        index=index,
        thread=thread,
    )


@cute.jit
def store(variant: cutlass.Constexpr, x: Context, c: Consumer, tile: tiles.Tile, row: Int32):
    """Normalises the accumulator; writes 64 rows of out, and of lse."""
    dtype = primitives.DTYPES[variant.key.dtype]
    factors = cute.make_rmem_tensor((softmax.ROWS,), Float32)
    for r in cutlass.range_constexpr(softmax.ROWS):
        total = softmax.quad_sum(c.state.total[r])
        is_empty = total == 0.0
        factors[r] = Float32(0.0) if is_empty else cute.arch.rcp_approx(total)
        lse = -Float32.inf
        if not is_empty:
            lse = (
                c.state.maximum[r] * c.scale_log2 + cute.math.log2(total, fastmath=True)
            ) * softmax.LN_2
        if (primitives.first_column(c.thread) == 0) & (row + 8 * r < x.scalars.q_len):
            x.arrays.lse[row + 8 * r, tile.q_head, tile.batch] = lse
    softmax.scale_rows(c.out, factors)
    rounded = cute.make_rmem_tensor_like(c.out, dtype)
    primitives.narrow(c.out, rounded)

    barrier = variant.plan.barrier("out0")
    # HAZARD: the previous tile's TMA store must have read the stage before it is written again.
    if const_expr(not variant.config.out_aliases_q):
        finish_store(variant, c)
    sOut = x.smem.out[None, None, c.index]
    copy = cute.make_tiled_copy_C(
        cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(False, 4), dtype), c.pv
    ).get_slice(c.thread)
    cute.copy(copy, copy.retile(rounded), copy.partition_D(sOut))
    # HAZARD: stmatrix writes through the generic proxy, TMA reads through the async one.
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=barrier.index + c.index, number_of_threads=barrier.threads)
    if c.thread < edges.WARP:
        gOut = cute.local_tile(
            x.arrays.out[None, None, tile.q_head, tile.batch],
            (ROWS, variant.key.value_dim),
            (None, 0),
        )
        tile_smem, tiles_gmem = primitives.tma_views(x.tma.out, sOut, gOut)
        block = tile.q_block * variant.config.num_consumers + c.index
        cute.copy(x.tma.out, tile_smem, tiles_gmem[None, block])
        cute.arch.cp_async_bulk_commit_group()


@cute.kernel
def kernel(
    variant: cutlass.Constexpr,
    tma: Tma,
    arrays: Arrays,
    scalars: Scalars,
    order: tiles.Order,
):
    """Device entry: shared memory, pipelines, dispatch of roles."""
    plan, layouts = variant.plan, make_layouts(variant)
    dtype = primitives.DTYPES[variant.key.dtype]
    out_elements = 0 if variant.config.out_aliases_q else cute.cosize(layouts.out)

    @cute.struct
    class Storage:
        q_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("q").stages]
        k_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("k").stages]
        v_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("v").stages]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.q)], 1024]
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.k)], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.v)], 1024]
        out: cute.struct.Align[cute.struct.MemRange[dtype, out_elements], 1024]

    storage = SmemAllocator().allocate(Storage)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        for atom in tma:
            cpasync.prefetch_descriptor(atom)
    q_in, q_out = edges.make_edge(plan, "q", storage.q_barriers.data_ptr())
    k_in, k_out = edges.make_edge(plan, "k", storage.k_barriers.data_ptr())
    v_in, v_out = edges.make_edge(plan, "v", storage.v_barriers.data_ptr())
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    out_storage = storage.q if variant.config.out_aliases_q else storage.out
    smem = Smem(
        q=primitives.smem_tensor(storage.q, layouts.q),
        k=primitives.smem_tensor(storage.k, layouts.k),
        v=primitives.smem_tensor(storage.v, layouts.v),
        out=primitives.smem_tensor(out_storage, layouts.out),
    )
    x = Context(tma, arrays, scalars, order, smem)
    if warp < plan.role("attend").warps.start:
        cute.arch.setmaxregister_decrease(plan.role("load").registers)
        if warp == 0:
            load(variant, x, Pipes(q_in, k_in, v_in))
    else:
        cute.arch.setmaxregister_increase(plan.role("attend").registers)
        attend(variant, x, Pipes(q_out, k_out, v_out))


def dense(pointer: cute.Pointer, heads: tuple, width: int) -> cute.Tensor:
    """A dense [batch, length, heads, width] array as (length, width, heads, batch)."""
    batch, length, num_heads = heads
    row = num_heads.to(Int64) * width
    return cute.make_tensor(
        pointer,
        cute.make_layout(
            (length, width, num_heads, batch), stride=(row, 1, width, row * length)
        ),
    )


def make_entry(key: KernelKey, config: FwdConfig):
    """The flat host entry of one variant, and the stand-in arguments it is compiled with.

    The entry's parameters are those of ``abi.FORWARD``.
    """
    dtype = primitives.DTYPES[key.dtype]
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
        q_rows, kv_rows = (ROWS, key.head_dim), (config.block_kv, key.head_dim)
        out_rows, v_rows = (ROWS, key.value_dim), (config.block_kv, key.value_dim)
        one = (None, None, 0)
        tma_q, mQ = primitives.tma_load(
            dense(q, queries, key.head_dim), cute.slice_(layouts.q, one), q_rows
        )
        tma_k, mK = primitives.tma_load(
            dense(k, keys, key.head_dim), cute.slice_(layouts.k, one), kv_rows
        )
        tma_v, mV = primitives.tma_load(
            dense(v, keys, key.value_dim), cute.slice_(layouts.v, one), v_rows
        )
        tma_out, mOut = primitives.tma_store(
            dense(out, queries, key.value_dim), cute.slice_(layouts.out, one), out_rows
        )
        mLse = cute.make_tensor(
            lse,
            cute.make_layout(
                (q_len, num_q_heads, batch),
                stride=(num_q_heads.to(Int64), 1, num_q_heads.to(Int64) * q_len),
            ),
        )
        num_q_blocks = cute.ceil_div(q_len, config.block_q)
        group = num_q_heads // num_kv_heads
        order = tiles.make_order(
            batch * num_q_heads,
            num_q_heads,
            group,
            num_q_blocks,
            kv_len * (2 * (key.head_dim + key.value_dim)) // group,
            num_sms,
        )
        scalars = Scalars(
            q_len, kv_len, bottom_right * (kv_len - q_len), scale * softmax.LOG2_E, sinks
        )
        kernel(
            variant,
            Tma(tma_q, tma_k, tma_v, tma_out),
            Arrays(mQ, mK, mV, mOut, mLse),
            scalars,
            order,
        ).launch(
            grid=(cutlass.min(num_sms, order.num_heads * num_q_blocks), 1, 1),
            block=(variant.plan.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    return forward, fake_arguments(dtype)


def fake_arguments(dtype: type) -> tuple:
    """Stand-ins for the parameters of ``abi.FORWARD``, in its order."""
    from jax_fa.kernels import abi

    element = {"lse": Float32, "sinks": Float32, **dict.fromkeys(("q", "k", "v", "out"), dtype)}
    wide = {"q", "k", "v", "out"}
    arguments = []
    for name, kind in abi.FORWARD:
        if kind == "pointer":
            align = abi.ALIGNMENT_BYTES if name in wide else 4
            arguments.append(
                nullptr(element.get(name, Int32), cute.AddressSpace.gmem, assumed_align=align)
            )
        elif kind == "stream":
            arguments.append(make_fake_stream())
        else:
            arguments.append(Float32(1.0) if kind == "float32" else Int32(1))
    return tuple(arguments)
