"""Hopper forward: out = softmax(mask(scale q k^T)) v, and its log-sum-exp, in one pass over keys.

    load (1 warp)   q  k(n-1) | k(n-2) v(n-1) | k(n-3) v(n-2) | ... | q' k'(m-1) v(0) | k'(m-2) ...
    attend i           S(n-1) | S(n-2) PV(n-1) softmax(n-2) | ... | S'(m-1) PV(0) softmax'(m-1) ...
    attend j                  |         (its softmax)  S(n-2) PV(n-1) softmax(n-2) | ...

Within a consumer warpgroup the product S of the next key block is issued before PV of the current
one, so that softmax of the next overlaps PV of the current, across the border of tiles too;
between consumers, named barriers make one compute its softmax while another occupies the tensor
cores (Shah et al., arXiv:2407.08608). Roles, edges and memory: ``plan.py``. Conventions:
``jax_fa/problem.py``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator

from jax_fa.band import key_range
from jax_fa.config import HopperForward, KernelKey
from jax_fa.kernels import edges, host, primitives, segments, softmax, tiles
from jax_fa.kernels.forward_work import (
    Arrays,
    Scalars,
    Tma,
    Variant,
    Work,
    batch_of_part,
    find_segment_keys,
    load_granules,
    load_partial_v,
    row_of_tile,
    sink_of,
    tile_at,
    work_on,
)
from jax_fa.kernels.sm90.fwd_work import Context, Layouts, Pipes, Smem, make_layouts
from jax_fa.kernels.sm90.plan import ROWS, forward_plan


class Consumer(NamedTuple):
    """What one consumer warpgroup works with, beside its pipes."""

    qk: cute.TiledMma
    pv: cute.TiledMma
    q: cute.Tensor  # A descriptors, (_, 1, D / 16, consumers * q_stages), or registers
    k: cute.Tensor  # B descriptors, (_, 1, D / 16, stages)
    v: cute.Tensor  # B descriptors, (_, 1, block_kv / 16, stages)
    p: cute.Tensor  # A registers, (8, 1, block_kv / 16)
    out: cute.Tensor  # accumulator of 64 x Dv
    state: softmax.RowState
    index: Int32
    thread: Int32


@cute.jit
def load(variant: cutlass.Constexpr, x: Context, pipes: Pipes) -> None:
    """Fetches the query tile and its key and value blocks, newest first. One warp."""
    q, k, v = pipes.q, pipes.k, pipes.v
    phase = Int32(0)
    work = work_on(variant, x, tile_at(variant, x, Int32(0)))
    if work.tile.is_valid:
        slot = q.acquire_and_advance()
        load_q(variant, x, work, slot)
        slot = k.acquire_and_advance()
        load_k(variant, x, work, work.blocks.end - 1, slot)
        if const_expr(variant.config.is_persistent):
            following = tile_at(variant, x, work.tile.slot + 1)
            while following.is_valid:
                # Before the long loop, which hides the latency of lengths read from memory.
                upcoming = work_on(variant, x, following)
                k, v, phase = load_middle(variant, x, work, Pipes(q, k, v), phase)
                before, work = work, upcoming
                slot = q.acquire_and_advance()
                load_q(variant, x, work, slot)
                slot = k.acquire_and_advance()
                load_k(variant, x, work, work.blocks.end - 1, slot)
                slot = v.acquire_and_advance()
                phase = load_v(variant, x, (before, before.blocks.start), slot, phase)
                following = tile_at(variant, x, work.tile.slot + 1)
        k, v, phase = load_middle(variant, x, work, Pipes(q, k, v), phase)
        slot = v.acquire_and_advance()
        load_v(variant, x, (work, work.blocks.start), slot, phase)
        # HAZARD: the CTA may not end while consumers still have arrivals to make here.
        q.tail()
        k.tail()
        v.tail()


@cute.jit
def load_middle(
    variant: cutlass.Constexpr, x: Context, work: Work, pipes: Pipes, phase: Int32
) -> tuple:
    """Keys of all blocks but the newest, each followed by the values of the one before."""
    k, v = pipes.k, pipes.v
    for i in cutlass.range(work.blocks.end - work.blocks.start - 1, unroll=1):
        block = work.blocks.end - 1 - i
        slot = k.acquire_and_advance()
        load_k(variant, x, work, block - 1, slot)
        slot = v.acquire_and_advance()
        phase = load_v(variant, x, (work, block), slot, phase)
    return k, v, phase


@cute.jit
def load_q(variant: cutlass.Constexpr, x: Context, work: Work, slot: Any) -> None:
    """The query tile, 64 rows at a time."""
    if const_expr(variant.config.packs_heads):
        if x.packing.heads == 1:
            load_q_of_head(variant, x, work, slot)
        else:
            consumers = variant.config.num_consumers
            for i in cutlass.range_constexpr(consumers):
                at = (i * ROWS, slot.index * consumers + i)
                load_granules(variant, x, work, at, slot.barrier)
    else:
        load_q_of_head(variant, x, work, slot)


@cute.jit
def load_q_of_head(variant: cutlass.Constexpr, x: Context, work: Work, slot: Any) -> None:
    """The query tile of a single head."""
    consumers = variant.config.num_consumers
    rows = x.arrays.q[None, None, work.tile.q_head, work.tile.batch]
    rows = cute.domain_offset((work.span.q_start + work.span.first_row, 0), rows)
    gQ = cute.local_tile(rows, (ROWS, variant.key.head_dim), (None, 0))
    sQ, gQ = primitives.tma_views(x.tma.q, x.smem.q, gQ)
    for i in cutlass.range_constexpr(consumers):
        target = sQ[None, slot.index * consumers + i]
        cute.copy(x.tma.q, gQ[None, i], target, tma_bar_ptr=slot.barrier)


@cute.jit
def load_k(variant: cutlass.Constexpr, x: Context, work: Work, block: Int32, slot: Any) -> None:
    """One block of keys."""
    rows = x.arrays.k[None, None, work.tile.kv_head, work.tile.batch]
    rows = cute.domain_offset((work.span.kv_start, 0), rows)
    gK = cute.local_tile(rows, (variant.config.block_kv, variant.key.head_dim), (None, 0))
    sK, gK = primitives.tma_views(x.tma.k, x.smem.k, gK)
    cute.copy(x.tma.k, gK[None, block], sK[None, slot.index], tma_bar_ptr=slot.barrier)


@cute.jit
def load_v(variant: cutlass.Constexpr, x: Context, at: tuple, slot: Any, phase: Int32) -> Int32:
    """One block of values; rows beyond the sequence's keys become zero; ``at`` is (work, block).

    Returns the phase that the scrub barrier is in then.
    """
    work, block = at
    block_kv, dv = variant.config.block_kv, variant.key.value_dim
    rows = x.arrays.v[None, None, work.tile.kv_head, work.tile.batch]
    rows = cute.domain_offset((work.span.kv_start, 0), rows)
    gV = cute.local_tile(rows, (block_kv, dv), (None, 0))
    sV, gV = primitives.tma_views(x.tma.v, x.smem.v, gV)
    if const_expr(not variant.is_general):
        # Behind the array's last row TMA fills with zeros by itself.
        cute.copy(x.tma.v, gV[None, block], sV[None, slot.index], tma_bar_ptr=slot.barrier)
    else:
        used = work.span.kv_len - block * block_kv
        if used >= block_kv:
            cute.copy(x.tma.v, gV[None, block], sV[None, slot.index], tma_bar_ptr=slot.barrier)
        else:
            copied = (gV[None, block], sV[None, slot.index])
            load_partial_v(variant, x, copied, used, slot, phase)
            phase = phase ^ 1
    return phase


@cute.jit
def take_turn(variant: cutlass.Constexpr, c: Consumer) -> None:
    """Waits until the consumer before this one has issued its products."""
    first = variant.plan.barrier("turn0")
    cute.arch.barrier(barrier_id=first.index + c.index, number_of_threads=first.threads)


@cute.jit
def pass_turn(variant: cutlass.Constexpr, c: Consumer) -> None:
    """Lets the next consumer issue its products."""
    first = variant.plan.barrier("turn0")
    following = (c.index + 1) % variant.config.num_consumers
    cute.arch.barrier_arrive(barrier_id=first.index + following, number_of_threads=first.threads)


@cute.jit
def mask_block(
    variant: cutlass.Constexpr,
    x: Context,
    c: Consumer,
    work: Work,
    scores: cute.Tensor,
    block: Int32,
) -> None:
    """Hides the keys of a block that a row does not see."""
    scalars = x.scalars
    rows = [at.position for at in rows_of_thread(variant, x, c, work)]
    first_key = block * variant.config.block_kv + primitives.first_column(c.thread)
    visible = []
    for row in rows:
        keys = key_range(work.window, row, minimum=cutlass.min, maximum=cutlass.max)
        visible.append(softmax.Visible(keys.lo - first_key, keys.hi - first_key))
    softmax.mask(scores, visible, variant.is_general)
    if const_expr(variant.is_general):
        if tiles.is_present(scalars.q_segments):
            sequences = scalars.sequences
            q_base = work.tile.batch * sequences.q_len + work.span.q_start
            kv_base = work.tile.batch * sequences.kv_len + work.span.kv_start
            row_ids = []
            for row in rows:
                # 0 in a tile beyond all sequences, which has no rows.
                present = cutlass.max(cutlass.min(row, work.span.q_slot - 1), 0)
                row_ids.append(tiles.element(scalars.q_segments, q_base + present))
            last = cutlass.max(work.span.kv_len - 1 - first_key, -first_key)
            softmax.mask_segments(
                scores, row_ids, scalars.kv_segments + (kv_base + first_key), last
            )
    if const_expr(variant.key.mask_mod is not None):
        diagonals = [row + work.window.shift for row in rows]
        softmax.mask_by_function(scores, variant.key.mask_mod, diagonals, first_key)


def rows_of_thread(variant: Variant, x: Context, c: Consumer, work: Work) -> list[tiles.RowAt]:
    """What the calling thread's rows are about."""
    row = c.index * ROWS + primitives.row_in_tile(c.thread)
    return [row_of_tile(variant, x, work, row + 8 * r) for r in range(softmax.ROWS)]


@cute.jit
def fetch_q(variant: cutlass.Constexpr, x: Context, c: Consumer, q_index: Int32) -> None:
    """Copies 64 query rows to registers, if that is where the product wants them."""
    if const_expr(variant.config.q_in_registers):
        atom = cute.make_copy_atom(cute.nvgpu.warp.LdMatrix8x8x16bOp(False, 4), variant.dtype)
        copy = cute.make_tiled_copy_A(atom, c.qk).get_slice(c.thread)
        cute.copy(copy, copy.partition_S(x.smem.q[None, None, q_index]), copy.retile(c.q))


@cute.jit
def multiply_qk(
    variant: cutlass.Constexpr, c: Consumer, scores: cute.Tensor, q_index: Int32, k_index: Int32
) -> None:
    """Issues ``scores = Q K^T``."""
    keys = c.k[None, None, None, k_index]
    if const_expr(variant.config.q_in_registers):
        primitives.multiply(c.qk, scores, (c.q, keys), False)
    else:
        primitives.multiply(c.qk, scores, (c.q[None, None, None, q_index], keys), False)


@cute.jit
def products(variant: cutlass.Constexpr, c: Consumer, q_index: Int32, pipes: Pipes) -> tuple:
    """S of the next block and PV of the current one, issued in this consumer's turn.

    Returns the scores, which are there, the handle of the values, which PV still reads, and the
    advanced pipes.
    """
    k, v = pipes.k, pipes.v
    scores = c.qk.make_fragment_C(c.qk.partition_shape_C((ROWS, variant.config.block_kv)))
    k_full = k.wait_and_advance()
    take_turn(variant, c)
    multiply_qk(variant, c, scores, q_index, k_full.index)
    v_full = v.wait_and_advance()
    primitives.multiply(c.pv, c.out, (c.p, c.v[None, None, None, v_full.index]), True)
    pass_turn(variant, c)
    warpgroup.wait_group(1)
    k_full.release()
    return scores, v_full, k, v


@cute.jit
def middle(variant: cutlass.Constexpr, x: Context, c: Consumer, at: tuple, pipes: Pipes) -> tuple:
    """All blocks but the newest of a tile, up to and without the oldest PV.

    ``at`` is (work, index of the query tile).
    """
    work, q_index = at
    blocks, k, v = work.blocks, pipes.k, pipes.v
    newest = blocks.end - 1
    if const_expr(variant.is_general):
        # One loop that asks each block: three loops of masked, full and masked blocks spill.
        for i in cutlass.range(newest - blocks.start, unroll=1):
            block = newest - 1 - i
            k, v = step(variant, "maybe", x, c, (work, q_index, block), Pipes(pipes.q, k, v))
    else:
        if const_expr(variant.key.mask == "causal"):
            for i in cutlass.range(newest - blocks.full_end, unroll=1):
                block = newest - 1 - i
                k, v = step(variant, "always", x, c, (work, q_index, block), Pipes(pipes.q, k, v))
        last = cutlass.min(newest, blocks.full_end)
        for i in cutlass.range(last - blocks.full_start, unroll=1):
            block = last - 1 - i
            k, v = step(variant, "never", x, c, (work, q_index, block), Pipes(pipes.q, k, v))
    return k, v


@cute.jit
def step(
    variant: cutlass.Constexpr,
    masked: cutlass.Constexpr,
    x: Context,
    c: Consumer,
    at: tuple,
    pipes: Pipes,
) -> tuple:
    """S and softmax of a block, PV of the one before; ``at`` is (work, query tile, block)."""
    work, q_index, block = at
    scores, v_full, k, v = products(variant, c, q_index, pipes)
    shrink = to_probabilities(variant, masked, x, c, (work, block), scores)
    warpgroup.wait_group(0)
    v_full.release()
    # HAZARD: P is the A operand of PV until the wait above; rewriting it earlier corrupts PV.
    primitives.narrow(scores, c.p)
    softmax.scale_rows(c.out, shrink)
    return k, v


@cute.jit
def to_probabilities(
    variant: cutlass.Constexpr,
    masked: cutlass.Constexpr,
    x: Context,
    c: Consumer,
    at: tuple,
    scores: cute.Tensor,
) -> cute.Tensor:
    """Caps, masks and exponentiates a block's scores; returns how much ``c.out`` shrinks.

    ``at`` is (work, block); ``masked`` says whether the block hides keys: "always", "never" or
    "maybe".
    """
    work, block = at
    if const_expr(variant.key.has_soft_cap):
        softmax.cap(scores, x.scalars.cap_inner_log2)
    if const_expr(masked == "always"):
        mask_block(variant, x, c, work, scores, block)
    if const_expr(masked == "maybe"):
        if (block >= work.blocks.full_end) | (block < work.blocks.full_start):
            mask_block(variant, x, c, work, scores, block)
    return softmax.update(scores, c.state, x.scalars.scale_log2)


@cute.jit
def attend(variant: cutlass.Constexpr, x: Context, pipes: Pipes) -> None:
    """Both products and the softmax of 64 query rows. One warpgroup of several."""
    config = variant.config
    work = work_on(variant, x, tile_at(variant, x, Int32(0)))
    if work.tile.is_valid:
        c = make_consumer(variant, x)
        q, k, v = pipes.q, pipes.k, pipes.v
        if c.index == config.num_consumers - 1:
            pass_turn(variant, c)
        q_full = q.wait_and_advance()
        k_full = k.wait_and_advance()
        scores = c.qk.make_fragment_C(c.qk.partition_shape_C((ROWS, config.block_kv)))
        q_index = q_full.index * config.num_consumers + c.index
        fetch_q(variant, x, c, q_index)
        multiply_qk(variant, c, scores, q_index, k_full.index)
        warpgroup.wait_group(0)
        k_full.release()
        softmax.reset(c.state)
        newest = work.blocks.end - 1
        to_probabilities(variant, "maybe", x, c, (work, newest), scores)
        primitives.narrow(scores, c.p)
        c.out.fill(0.0)
        if const_expr(config.is_persistent):
            following = tile_at(variant, x, work.tile.slot + 1)
            while following.is_valid:
                # Early: at the border, between two products, its latency would show.
                upcoming = work_on(variant, x, following)
                k, v = middle(variant, x, c, (work, q_index), Pipes(q, k, v))
                before, before_index = work, q_index
                work = upcoming
                q_next = q.wait_and_advance()
                q_index = q_next.index * config.num_consumers + c.index
                fetch_q(variant, x, c, q_index)
                scores, v_full, k, v = products(variant, c, q_index, Pipes(q, k, v))
                finished = softmax.copy(c.state)
                softmax.reset(c.state)
                newest = work.blocks.end - 1
                to_probabilities(variant, "maybe", x, c, (work, newest), scores)
                warpgroup.wait_group(0)
                v_full.release()
                primitives.narrow(scores, c.p)
                store(variant, x, c, (before, before_index), finished)
                c.out.fill(0.0)
                release_q(c, q_full)
                q_full = q_next
                following = tile_at(variant, x, work.tile.slot + 1)
        k, v = middle(variant, x, c, (work, q_index), Pipes(q, k, v))
        v_full = v.wait_and_advance()
        take_turn(variant, c)
        primitives.multiply(c.pv, c.out, (c.p, c.v[None, None, None, v_full.index]), True)
        pass_turn(variant, c)
        warpgroup.wait_group(0)
        v_full.release()
        store(variant, x, c, (work, q_index), c.state)
        release_q(c, q_full)
        # The turn that the last consumer passed is open; taking it leaves the barrier at rest.
        if c.index == 0:
            take_turn(variant, c)


@cute.jit
def release_q(c: Consumer, q_full: Any) -> None:
    """Gives the query tile back, once the output staged in it has been read."""
    if c.thread < edges.WARP:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    q_full.release()


def make_consumer(variant: Variant, x: Context) -> Consumer:
    """Fragments of the consumer that the calling thread belongs to."""
    key, config = variant.key, variant.config
    thread = cute.arch.thread_idx()[0] - variant.plan.role("load").threads
    qk = primitives.make_mma(
        variant.dtype, config.block_kv, OperandMajorMode.K, config.q_in_registers
    )
    pv = primitives.make_mma(variant.dtype, key.value_dim, OperandMajorMode.MN, a_in_registers=True)
    qk_slice, pv_slice = qk.get_slice(0), pv.get_slice(0)
    q_source = qk_slice.partition_A(x.smem.q)
    if config.q_in_registers:
        q_source = qk.partition_shape_A((ROWS, key.head_dim))
    return Consumer(
        qk=qk,
        pv=pv,
        q=qk.make_fragment_A(q_source),
        k=qk.make_fragment_B(qk_slice.partition_B(x.smem.k)),
        v=pv.make_fragment_B(pv_slice.partition_B(primitives.transposed(x.smem.v))),
        p=pv.make_fragment_A(pv.partition_shape_A((ROWS, config.block_kv))),
        out=pv.make_fragment_C(pv.partition_shape_C((ROWS, key.value_dim))),
        state=softmax.make_row_state(),
        index=cute.arch.make_warp_uniform(thread // edges.WARPGROUP),
        thread=thread % edges.WARPGROUP,
    )


@cute.jit
def store(
    variant: cutlass.Constexpr, x: Context, c: Consumer, at: tuple, state: softmax.RowState
) -> None:
    """Normalises the accumulator; writes 64 rows of out and of lse; ``at`` is (work, q tile)."""
    work, q_index = at
    span = work.span
    rows = rows_of_thread(variant, x, c, work)
    sinks = [sink_of(variant, x, work, rows[0].head)] * softmax.ROWS
    if const_expr(variant.config.packs_heads):
        sinks = [sink_of(variant, x, work, row.head) for row in rows]
    batch = batch_of_part(variant, x, work)
    factors = cute.make_rmem_tensor((softmax.ROWS,), Float32)
    out_rows = primitives.by_row(c.out)
    for r in cutlass.range_constexpr(softmax.ROWS):
        row, maximum, total = rows[r], state.maximum[r], state.total[r]
        factor, lse = softmax.finish_row(maximum, total, x.scalars.scale_log2, sinks[r])
        if const_expr(variant.is_general):
            if row.position >= span.q_len:
                factor, lse = Float32(0.0), -Float32.inf
                # The query may hold anything here, NaN too.
                for i in cutlass.range_constexpr(cute.size(out_rows, mode=[1])):
                    out_rows[r, i] = Float32(0.0)
        factors[r] = factor
        is_written = row.is_there & (row.position < span.q_slot)
        if (primitives.first_column(c.thread) == 0) & is_written:
            x.arrays.lse[span.q_start + row.position, row.head, batch] = lse
    softmax.scale_rows(c.out, factors)
    if const_expr(variant.is_split):
        store_part(x, c, work, rows, batch)
    else:
        store_rounded(variant, x, c, at, rows)


@cute.jit
def store_part(x: Context, c: Consumer, work: Work, rows: list, batch: Int32) -> None:
    """Writes ``rows`` as they are, in float32."""
    values = primitives.by_row(c.out)
    first = primitives.first_column(c.thread)
    for r in cutlass.range_constexpr(softmax.ROWS):
        row = rows[r]
        if row.is_there & (row.position < work.span.q_slot):
            gOut = x.arrays.out_rows[work.span.q_start + row.position, None, row.head, batch]
            for i in cutlass.range_constexpr(cute.size(values, mode=[1])):
                gOut[first + primitives.column_of(i)] = values[r, i]


@cute.jit
def store_rounded(
    variant: cutlass.Constexpr, x: Context, c: Consumer, at: tuple, rows: list
) -> None:
    """Rounds and writes rows, by TMA where all 64 are the sequence's; ``at`` is (work, q tile)."""
    work, _ = at
    rounded = cute.make_rmem_tensor_like(c.out, variant.dtype)
    primitives.narrow(c.out, rounded)
    end_of_rows = work.span.first_row + (c.index + 1) * ROWS
    if const_expr(variant.is_general):
        if tiles.is_present(x.scalars.sequences.cu_seqlens_q) & (end_of_rows > work.span.q_slot):
            store_rows(x, c, work, rows, rounded)
        else:
            store_tile(variant, x, c, at, rounded)
    else:
        store_tile(variant, x, c, at, rounded)


@cute.jit
def store_rows(x: Context, c: Consumer, work: Work, rows: list, rounded: cute.Tensor) -> None:
    """Writes rows one by one, leaving those of the next packed sequence alone."""
    span, tile = work.span, work.tile
    gOut = cute.recast_tensor(x.arrays.out_rows[None, None, tile.q_head, tile.batch], Int32)
    pairs = primitives.pairs_by_row(rounded)
    first = primitives.first_column(c.thread) // 2
    for r in cutlass.range_constexpr(softmax.ROWS):
        position = rows[r].position
        if position < span.q_slot:
            for i in cutlass.range_constexpr(cute.size(pairs, mode=[1])):
                gOut[span.q_start + position, first + 4 * i] = pairs[r, i]


@cute.jit
def store_tile(
    variant: cutlass.Constexpr, x: Context, c: Consumer, at: tuple, rounded: cute.Tensor
) -> None:
    """Writes 64 rows through shared memory; TMA leaves out those behind the array's last."""
    work, q_index = at
    barrier = variant.plan.barrier("out0")
    layout = make_layouts(variant).out
    sOut = cute.make_tensor(x.smem.q[None, None, q_index].iterator, layout.outer)
    copy = cute.make_tiled_copy_C(
        cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(False, 4), variant.dtype), c.pv
    ).get_slice(c.thread)
    # HAZARD: out is staged over the rows of q, which all four warps have multiplied by now.
    cute.arch.barrier(barrier_id=barrier.index + c.index, number_of_threads=barrier.threads)
    cute.copy(copy, copy.retile(rounded), copy.partition_D(sOut))
    # HAZARD: stmatrix writes through the generic proxy, TMA reads through the async one.
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=barrier.index + c.index, number_of_threads=barrier.threads)
    if c.thread < edges.WARP:
        rows = x.arrays.out[None, None, work.tile.q_head, work.tile.batch]
        rows = cute.domain_offset((work.span.q_start + work.span.first_row, 0), rows)
        gOut = cute.local_tile(rows, (ROWS, variant.key.value_dim), (None, 0))
        tile_smem, tiles_gmem = primitives.tma_views(x.tma.out, sOut, gOut)
        cute.copy(x.tma.out, tile_smem, tiles_gmem[None, c.index])
        cute.arch.cp_async_bulk_commit_group()


@cute.kernel
def kernel(
    variant: cutlass.Constexpr,
    tma: Tma,
    arrays: Arrays,
    scalars: Scalars,
    order: tiles.Order,
    packing: Any,
    granules: Any,
) -> None:
    """Device entry: shared memory, pipelines, dispatch of roles."""
    plan, layouts, dtype = variant.plan, make_layouts(variant), variant.dtype

    @cute.struct
    class Storage:
        q_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("q").stages]
        k_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("k").stages]
        v_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("v").stages]
        scrub: cute.struct.MemRange[Int64, 1]
        segment_keys: cute.struct.MemRange[Int32, segments.WORDS]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.q)], 1024]
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.k)], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.v)], 1024]

    storage = SmemAllocator().allocate(Storage)
    smem = Smem(
        q=primitives.smem_tensor(storage.q, layouts.q),
        k=primitives.smem_tensor(storage.k, layouts.k),
        v=primitives.smem_tensor(storage.v, layouts.v),
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
    q_in, q_out = edges.make_edge(plan, "q", storage.q_barriers.data_ptr())
    k_in, k_out = edges.make_edge(plan, "k", storage.k_barriers.data_ptr())
    v_in, v_out = edges.make_edge(plan, "v", storage.v_barriers.data_ptr())
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    x = Context(tma, arrays, scalars, order, smem, packing, granules)
    if const_expr(variant.is_general):
        if tiles.is_present(scalars.q_segments):
            find_segment_keys(variant, x)
            cute.arch.sync_threads()
    if warp < plan.role("attend").warps.start:
        cute.arch.setmaxregister_decrease(plan.role("load").registers)
        if warp == 0:
            load(variant, x, Pipes(q_in, k_in, v_in))
    else:
        cute.arch.setmaxregister_increase(plan.role("attend").registers)
        attend(variant, x, Pipes(q_out, k_out, v_out))


def make_entry(key: KernelKey, config: HopperForward) -> tuple[Callable, tuple]:
    """The flat host entry of one variant, and the stand-in arguments it is compiled with."""
    return host.forward_entry(Variant(key, config, forward_plan(key, config)), launch)


@cute.jit
def launch(variant: cutlass.Constexpr, call: host.ForwardCall) -> None:
    """Describes the arrays to TMA and launches the kernel."""
    layouts, one = make_layouts(variant), (None, None, 0)
    copied = Layouts(*[cute.slice_(layout, one) for layout in layouts[:3]], out=layouts.out)
    tma, arrays = host.forward_arrays(variant, call, copied)
    packing, granules = None, None
    if const_expr(variant.config.packs_heads):
        packing = host.forward_packing(variant, call)
        granules = host.forward_granules(variant, call, layouts.q)
    order, num_ctas = host.forward_order(variant, call, packing)
    kernel(variant, tma, arrays, call.scalars, order, packing, granules).launch(
        grid=(num_ctas, 1, 1),
        block=(variant.plan.threads, 1, 1),
        stream=call.stream,
        min_blocks_per_mp=1,
    )
