"""The roles of the Hopper backward: load, attend, keep_turns. ``bwd.py`` has the picture."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from jax_fa.band import row_range
from jax_fa.kernels import backward_rows, edges, primitives, softmax, tiles
from jax_fa.kernels.backward_work import (
    Step,
    Work,
    await_turn,
    first_step,
    following,
    pass_turn,
    tile_at,
    work_on,
)
from jax_fa.kernels.sm90.bwd_work import Consumer, Context, Pipes, Variant
from jax_fa.kernels.sm90.plan import ROWS


@cute.jit
def load(variant: cutlass.Constexpr, x: Context, pipes: Pipes):
    """Fetches a tile's keys and values, and for each of its heads all query blocks. One warp."""
    k, v, q, dout = pipes.k, pipes.v, pipes.q, pipes.dout
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        if work.num_steps > 0:
            slot = k.acquire_and_advance()
            load_keys(variant, (x.tma.k, x.arrays.k, x.smem.k), work, slot)
            slot = v.acquire_and_advance()
            load_keys(variant, (x.tma.v, x.arrays.v, x.smem.v), work, slot)
            block = work.first_block
            for _ in cutlass.range(work.blocks.end - work.blocks.start, unroll=1):
                for head in cutlass.range(work.num_heads, unroll=1):
                    slot = q.acquire_and_advance()
                    load_queries(variant, x, work, (head, block), slot)
                    slot = dout.acquire_and_advance()
                    load_douts(variant, x, work, (head, block), slot)
                block = block + work.stride
        tile = tile_at(variant, x, tile.slot + 1)
    # HAZARD: the CTA may not end while consumers still have arrivals to make here.
    k.tail()
    v.tail()
    q.tail()
    dout.tail()


@cute.jit
def load_keys(variant: cutlass.Constexpr, copied: tuple, work: Work, slot):
    """The tile's block of keys, or of values: ``copied`` is (TMA, array, smem)."""
    tma, array, smem = copied
    rows = array[None, None, work.tile.kv_head, work.tile.batch]
    rows = cute.domain_offset((work.kv_start, 0), rows)
    shape = (variant.config.block_kv, cute.size(smem, mode=[1]))
    target, source = primitives.tma_views(tma, smem, cute.local_tile(rows, shape, (None, 0)))
    cute.copy(tma, source[None, work.tile.q_block], target, tma_bar_ptr=slot.barrier)


@cute.jit
def load_queries(variant: cutlass.Constexpr, x: Context, work: Work, at: tuple, slot):
    """Queries and their lse2; ``at`` is (head of the tile, query block)."""
    load_rows(variant, (x.tma.q, x.arrays.q, x.smem.q), work, at, slot)
    load_stats(variant, (x.scratch.lse2, x.smem.lse2), x, work, at, slot)


@cute.jit
def load_douts(variant: cutlass.Constexpr, x: Context, work: Work, at: tuple, slot):
    """Rows of dO and their delta; ``at`` is (head of the tile, query block)."""
    load_rows(variant, (x.tma.dout, x.arrays.dout, x.smem.dout), work, at, slot)
    load_stats(variant, (x.scratch.delta, x.smem.delta), x, work, at, slot)


@cute.jit
def load_rows(variant: cutlass.Constexpr, copied: tuple, work: Work, at: tuple, slot):
    """A block of query rows of one head: ``copied`` is (TMA, array, smem)."""
    tma, array, smem = copied
    head, block = at
    rows = array[None, None, work.first_head + head, work.tile.batch]
    rows = cute.domain_offset((work.q_start, 0), rows)
    shape = (variant.config.block_q, cute.size(smem, mode=[1]))
    target, source = primitives.tma_views(tma, smem, cute.local_tile(rows, shape, (None, 0)))
    cute.copy(tma, source[None, block], target[None, slot.index], tma_bar_ptr=slot.barrier)


@cute.jit
def load_stats(variant: cutlass.Constexpr, copied: tuple, x: Context, work: Work, at: tuple, slot):
    """One float of each row of a query block: ``copied`` is (scratch array, smem)."""
    array, smem = copied
    head, block = at
    row = work.scratch_row + block * variant.config.block_q
    source = cute.domain_offset((row,), array[None, work.first_head + head])
    primitives.bulk_load(source, smem[None, slot.index], slot.barrier)


@cute.jit
def attend(variant: cutlass.Constexpr, x: Context, pipes: Pipes):
    """All five products of 64 keys, and what lies between them. One warpgroup of several."""
    thread = cute.arch.thread_idx()[0] - variant.plan.role("load").threads
    index = cute.arch.make_warp_uniform(thread // edges.WARPGROUP)
    c = make_consumer(variant, x, index, thread % edges.WARPGROUP)
    k, v, q, dout = pipes.k, pipes.v, pipes.q, pipes.dout
    parity = Int32(0)
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        c.dk.fill(0.0)
        c.dv.fill(0.0)
        if work.num_steps > 0:
            k_full = k.wait_and_advance()
            v_full = v.wait_and_advance()
            if const_expr(variant.is_general):
                if work.is_partial:
                    used = work.window.kv_len - work.tile.q_block * variant.config.block_kv
                    scrub(variant, c, x.smem.k, used)
                    scrub(variant, c, x.smem.v, used)
            at = first_step(work, parity)
            if x.scalars.deterministic != 0:
                for _ in cutlass.range(work.num_steps, unroll=1):
                    q, dout = step(variant, True, x, c, (q, dout), (work, at))
                    at = following(work, at)
            else:
                for _ in cutlass.range(work.num_steps, unroll=1):
                    q, dout = step(variant, False, x, c, (q, dout), (work, at))
                    at = following(work, at)
            parity = at.parity
            v_full.release()
            k_full.release()
        store(variant, x, c, work)
        tile = tile_at(variant, x, tile.slot + 1)


@cute.jit
def scrub(variant: cutlass.Constexpr, c: Consumer, tile: cute.Tensor, used: Int32):
    """Sets the rows of a tile from ``used`` on to zero.

    Absent rows have P = 0 and dS = 0, but may hold anything, and 0 * NaN is not 0.
    """
    words = cute.recast_tensor(tile, Int32)
    rows, columns = cute.size(words, mode=[0]), cute.size(words, mode=[1])
    threads = edges.WARPGROUP * variant.config.num_consumers
    first = c.index * edges.WARPGROUP + c.thread
    for i in cutlass.range(
        cutlass.max(used, 0) * columns + first, rows * columns, threads, unroll=1
    ):
        words[i // columns, i % columns] = Int32(0)
    # HAZARD: these writes go through the generic proxy, wgmma reads through the async one.
    cute.arch.fence_view_async_shared()
    barrier = variant.plan.barrier("scrub")
    cute.arch.barrier(barrier_id=barrier.index, number_of_threads=barrier.threads)


@cute.jit
def step(
    variant: cutlass.Constexpr,
    deterministic: cutlass.Constexpr[bool],
    x: Context,
    c: Consumer,
    pipes: tuple,
    where: tuple,
) -> tuple:
    """One query block: its part of dK and dV to the accumulators, of dQ to global memory.

    Products retire in the order of issue, so ``wait_group(n)`` leaves the n youngest running. None
    runs across the border of two steps: ptxas would give up on asynchrony (C7514, CUDA 13.0). dQ
    goes first, so that dV and dK run while it is added: adding is what limits this kernel (on an
    H200, D = 128, T = 16384: 557 TFLOP/s, without adding 753; dV before the barrier of dS 529).
    """
    has_soft_cap = variant.key.has_soft_cap
    q, dout = pipes
    work, at = where
    used = work.window.q_len - at.q_block * variant.config.block_q
    q_full = q.wait_and_advance()
    if const_expr(variant.is_general):
        if used < variant.config.block_q:
            scrub(variant, c, x.smem.q[None, None, q_full.index], used)
    primitives.multiply(c.s_mma, c.s, (c.k, c.q[None, None, None, q_full.index]), False)
    dp = c.s_mma.make_fragment_C(c.s.shape)
    if const_expr(has_soft_cap):
        warpgroup.wait_group(0)
        softmax.cap(c.s, x.scalars.cap_inner_log2)
    else:
        dout, dout_full = start_dp(variant, x, c, dout, (used, dp))
        warpgroup.wait_group(1)
    is_edge = (at.q_block < work.blocks.full_start) | (at.q_block >= work.blocks.full_end)
    if is_edge | work.is_partial:
        mask_block(variant, x, c, work, at)
    p, ds = (cute.make_rmem_tensor_like(c.s, variant.dtype) for _ in range(2))
    slope = cute.make_rmem_tensor_like(p) if const_expr(has_soft_cap) else p
    exponentiate(variant, c, x.smem.lse2[None, q_full.index], x.scalars.score_log2, (p, slope))
    if const_expr(has_soft_cap):
        # P and slope take the room of S; there is none for dP beside that.
        dout, dout_full = start_dp(variant, x, c, dout, (used, dp))
    if const_expr(not variant.config.splits_keys):
        cute.copy(c.store, c.store.retile(p), c.p_target[None, None, None, at.parity])
    warpgroup.wait_group(0)
    differentiate(c, x.smem.delta[None, dout_full.index], slope, dp)
    primitives.narrow(dp, ds)
    cute.copy(c.store, c.store.retile(ds), c.ds_target[None, None, None, at.parity])
    # HAZARD: stmatrix writes through the generic proxy, wgmma reads through the async one.
    cute.arch.fence_view_async_shared()
    barrier = variant.plan.barrier("ds")
    cute.arch.barrier(barrier_id=barrier.index, number_of_threads=barrier.threads)

    dq = c.dq_mma.make_fragment_C(c.dq_mma.partition_shape_C(variant.dq_shape))
    primitives.multiply(c.dq_mma, dq, (c.ds[None, None, None, at.parity], c.k_rows), False)
    if const_expr(variant.config.splits_keys):
        p_keys, ds_keys = as_operand(variant, c.dv_mma, p), as_operand(variant, c.dk_mma, ds)
    else:
        p_keys = c.p_keys[None, None, None, at.parity]
        ds_keys = c.ds_keys[None, None, None, at.parity]
    dout_rows = c.dout_rows[None, None, None, dout_full.index]
    primitives.multiply(c.dv_mma, c.dv, (p_keys, dout_rows), True)
    q_rows = c.q_rows[None, None, None, q_full.index]
    primitives.multiply(c.dk_mma, c.dk, (ds_keys, q_rows), True)
    warpgroup.wait_group(2)
    if const_expr(deterministic):
        turn = variant.plan.barrier("turn")
        cute.arch.barrier(barrier_id=turn.index, number_of_threads=turn.threads)
    add_dq(variant, x, c, work, at, dq)
    if const_expr(deterministic):
        added = variant.plan.barrier("added")
        cute.arch.barrier_arrive(barrier_id=added.index, number_of_threads=added.threads)
    warpgroup.wait_group(1)
    dout_full.release()
    warpgroup.wait_group(0)
    q_full.release()
    return q, dout


@cute.jit
def start_dp(variant: cutlass.Constexpr, x: Context, c: Consumer, dout: object, into: tuple):
    """Issues dP = V dO^T once dO is there; ``into`` is (rows that are present, accumulator)."""
    used, dp = into
    dout_full = dout.wait_and_advance()
    if const_expr(variant.is_general):
        if used < variant.config.block_q:
            scrub(variant, c, x.smem.dout[None, None, dout_full.index], used)
    primitives.multiply(c.s_mma, dp, (c.v, c.dout[None, None, None, dout_full.index]), False)
    return dout, dout_full


def as_operand(variant: Variant, mma: cute.TiledMma, rounded: cute.Tensor) -> cute.Tensor:
    """A rounded accumulator as the A operand of ``mma``, in the same registers."""
    operand = mma.make_fragment_A(mma.partition_shape_A((ROWS, variant.config.block_q)))
    return cute.make_tensor(rounded.iterator, operand.layout)


def column_pair(c: Consumer, stats: cute.Tensor, group: int) -> cute.Tensor:
    """The two floats of ``stats`` that belong to this thread's columns in a group of 8."""
    place = c.first_query // 2 + c.thread % 4 + 4 * group
    return cute.zipped_divide(stats, (2,))[None, place].load()


@cute.jit
def exponentiate(
    variant: cutlass.Constexpr,
    c: Consumer,
    lse2: cute.Tensor,
    score_log2: Float32,
    rounded: tuple,
):
    """P from the scores, and dP/dS of the softmax's inner score: P times the slope of the cap.

    Both go to ``rounded``, which without a cap names one tensor twice. They are rounded pair by
    pair: floats of a whole block beside dP are more than there are registers.
    """
    by_key = primitives.by_row(c.s)
    p_words, slope_words = (cute.recast_tensor(tensor, Int32) for tensor in rounded)
    for group in cutlass.range_constexpr(cute.size(by_key, mode=[1]) // 2):
        pair = column_pair(c, lse2, group)
        for r in cutlass.range_constexpr(softmax.ROWS):
            scores = [by_key[r, 2 * group + i] for i in range(2)]
            p = [cute.math.exp2(scores[i] * score_log2 - pair[i], fastmath=True) for i in range(2)]
            word = softmax.ROWS * group + r
            p_words[word] = primitives.narrow_pair(p[0], p[1], variant.dtype)
            if const_expr(variant.key.has_soft_cap):
                # Masked scores are -inf here: their slope is to be 0, for 0 * inf is not.
                slope = [cute.arch.fmax(1.0 - s * s, 0.0) for s in scores]
                slope_words[word] = primitives.narrow_pair(
                    p[0] * slope[0], p[1] * slope[1], variant.dtype
                )


@cute.jit
def differentiate(c: Consumer, delta: cute.Tensor, slope: cute.Tensor, dp: cute.Tensor):
    """Computes dS = slope (dP - delta), in place of dP.

    Without a cap the slope is P as dV uses it, rounded: the float32 one would occupy registers
    that the next S needs.
    """
    by_key = primitives.by_row(dp)
    words = cute.recast_tensor(slope, Int32)
    for group in cutlass.range_constexpr(cute.size(by_key, mode=[1]) // 2):
        pair = column_pair(c, delta, group)
        for r in cutlass.range_constexpr(softmax.ROWS):
            factors = primitives.widen(words[softmax.ROWS * group + r], slope.element_type)
            for i in cutlass.range_constexpr(2):
                at = (r, 2 * group + i)
                by_key[at] = factors[i] * (by_key[at] - pair[i])


@cute.jit
def mask_block(variant: cutlass.Constexpr, x: Context, c: Consumer, work: Work, at: Step):
    """Sets the scores of pairs that the band or the segments do not show to -inf."""
    config, window = variant.config, work.window
    first_key = work.tile.q_block * config.block_kv + c.first_key
    first_column = at.q_block * config.block_q + c.first_query
    first_column = first_column + primitives.first_column(c.thread)
    visible = []
    for r in cutlass.range_constexpr(softmax.ROWS):
        key = first_key + primitives.row_in_tile(c.thread) + 8 * r
        rows = row_range(window, key, minimum=cutlass.min, maximum=cutlass.max)
        end = rows.hi if key < window.kv_len else 0
        visible.append(softmax.Visible(rows.lo - first_column, end - first_column))
    softmax.mask(c.s, visible, two_sided=True)
    if const_expr(variant.is_general):
        if tiles.is_present(x.scalars.q_segments):
            mask_segments(x, c, work, (first_key, first_column))


@cute.jit
def mask_segments(x: Context, c: Consumer, work: Work, at: tuple):
    """Sets the scores of pairs of different segments to -inf; ``at`` is (first key, column)."""
    first_key, first_column = at
    keys, last_key = x.scalars.keys, work.window.kv_len - 1
    key_ids = x.scalars.kv_segments + (work.tile.batch * keys.q_len + work.kv_start)
    own = first_key + primitives.row_in_tile(c.thread)
    row_ids = [
        tiles.element(key_ids, cutlass.min(own + 8 * r, last_key)) for r in range(softmax.ROWS)
    ]
    row = work.tile.batch * keys.kv_len + work.q_start + first_column
    last = work.window.q_len - 1 - first_column
    softmax.mask_segments(c.s, row_ids, x.scalars.q_segments + row, last)


@cute.jit
def keep_turns(variant: cutlass.Constexpr, x: Context):
    """In a deterministic run, says when dQ may be added: Note [Turns] in ``backward_work.py``.

    One warp. A second one, that hands a turn on while the first awaits the next, made it no faster.
    """
    plan = variant.plan
    turn, added = plan.barrier("turn"), plan.barrier("added")
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        at = first_step(work, Int32(0))
        for _ in cutlass.range(work.num_steps, unroll=1):
            await_turn(variant, x, work, at, 1)
            cute.arch.barrier_arrive(barrier_id=turn.index, number_of_threads=turn.threads)
            cute.arch.barrier(barrier_id=added.index, number_of_threads=added.threads)
            # HAZARD: all that the consumers added must be visible before the next one's turn. They
            # added it before the barrier, hence before this release.
            pass_turn(variant, x, work, at)
            at = following(work, at)
        tile = tile_at(variant, x, tile.slot + 1)


@cute.jit
def add_dq(
    variant: cutlass.Constexpr, x: Context, c: Consumer, work: Work, at: Step, dq: cute.Tensor
):
    """Adds this consumer's part of dQ to the sums, four floats at a time."""
    row = work.scratch_row + at.q_block * variant.config.block_q
    fours = cute.size(dq) // 4
    place = row * (variant.key.head_dim // 4) + c.index * fours * edges.WARPGROUP + c.thread
    first = backward_rows.address_of(x.scratch.dq_sum[None, place, at.head])
    for i in cutlass.range_constexpr(fours):
        values = [dq[4 * i + j] for j in range(4)]
        primitives.add_to_global(first + i * (edges.WARPGROUP * 16), values)


def make_consumer(variant: Variant, x: Context, index: Int32, thread: Int32) -> Consumer:
    """Fragments of consumer ``index``."""
    key, config, dtype, smem = variant.key, variant.config, variant.dtype, x.smem
    owns_keys, k_major, mn_major = config.splits_keys, OperandMajorMode.K, OperandMajorMode.MN
    dk_columns, dv_columns = variant.dkv_columns
    dq_rows, dq_columns = variant.dq_shape
    a_major = k_major if owns_keys else mn_major
    s_mma = primitives.make_mma(dtype, variant.s_columns, k_major, a_in_registers=False)
    dk_mma = primitives.make_mma(dtype, dk_columns, mn_major, owns_keys, a_major)
    dv_mma = primitives.make_mma(dtype, dv_columns, mn_major, owns_keys, a_major)
    dq_mma = primitives.make_mma(dtype, dq_columns, mn_major, a_in_registers=False)
    s, dk, dv, dq = (mma.get_slice(0) for mma in (s_mma, dk_mma, dv_mma, dq_mma))
    zero = Int32(0)
    own_keys, own_columns = (index, zero) if owns_keys else (zero, index)

    k = cute.local_tile(smem.k, (ROWS, key.head_dim), (own_keys, 0))
    v = cute.local_tile(smem.v, (ROWS, key.value_dim), (own_keys, 0))
    q = cute.local_tile(smem.q, (variant.s_columns, key.head_dim), (own_columns, 0, None))
    dout = cute.local_tile(smem.dout, (variant.s_columns, key.value_dim), (own_columns, 0, None))
    q_rows = cute.local_tile(smem.q, (config.block_q, dk_columns), (0, own_columns, None))
    dout_rows = cute.local_tile(smem.dout, (config.block_q, dv_columns), (0, own_columns, None))
    by_rows = config.splits_dq_rows
    ds = cute.local_tile(smem.ds, (dq_rows, config.block_kv), (index if by_rows else 0, 0, None))
    k_part = (0, 0 if by_rows else index)
    k_rows = cute.local_tile(smem.k, (config.block_kv, dq_columns), k_part)
    own_part = (own_columns, own_keys, None)
    own_ds, own_p = (
        primitives.transposed(cute.local_tile(tile, (variant.s_columns, ROWS), own_part))
        for tile in (smem.ds, smem.p)
    )
    ds_keys, p_keys = (primitives.transposed(tile) for tile in (smem.ds, smem.p))
    store = cute.make_tiled_copy_C(
        cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(True, 4), dtype), s_mma
    ).get_slice(thread)
    return Consumer(
        s_mma=s_mma,
        dk_mma=dk_mma,
        dv_mma=dv_mma,
        dq_mma=dq_mma,
        k=s_mma.make_fragment_A(s.partition_A(k)),
        v=s_mma.make_fragment_A(s.partition_A(v)),
        q=s_mma.make_fragment_B(s.partition_B(q)),
        dout=s_mma.make_fragment_B(s.partition_B(dout)),
        q_rows=dk_mma.make_fragment_B(dk.partition_B(primitives.transposed(q_rows))),
        dout_rows=dv_mma.make_fragment_B(dv.partition_B(primitives.transposed(dout_rows))),
        ds=dq_mma.make_fragment_A(dq.partition_A(ds)),
        k_rows=dq_mma.make_fragment_B(dq.partition_B(primitives.transposed(k_rows))),
        store=store,
        ds_target=store.partition_D(own_ds),
        p_target=store.partition_D(own_p),
        ds_keys=None if owns_keys else dk_mma.make_fragment_A(dk.partition_A(ds_keys)),
        p_keys=None if owns_keys else dv_mma.make_fragment_A(dv.partition_A(p_keys)),
        s=s_mma.make_fragment_C(s_mma.partition_shape_C((ROWS, variant.s_columns))),
        dk=dk_mma.make_fragment_C(dk_mma.partition_shape_C((ROWS, dk_columns))),
        dv=dv_mma.make_fragment_C(dv_mma.partition_shape_C((ROWS, dv_columns))),
        first_key=own_keys * ROWS,
        first_query=own_columns * variant.s_columns,
        index=index,
        thread=thread,
    )


@cute.jit
def store(variant: cutlass.Constexpr, x: Context, c: Consumer, work: Work):
    """Writes this consumer's gradients of 64 keys, or a part of a group's share in them."""
    key = work.tile.q_block * variant.config.block_kv + c.first_key
    place = (None, None, work.tile.kv_head, work.tile.batch)
    at = (c.thread, work.kv_slot - key)
    column = Int32(0) if const_expr(variant.config.splits_keys) else c.index
    dk_at = (work.kv_start + key, column * variant.dkv_columns[0])
    dv_at = (work.kv_start + key, column * variant.dkv_columns[1])
    if x.scalars.splits == 1:
        dk = cute.domain_offset(dk_at, x.arrays.dk[place])
        backward_rows.store_rows(c.dk, x.scalars.scale, dk, at)
        dv = cute.domain_offset(dv_at, x.arrays.dv[place])
        backward_rows.store_rows(c.dv, Float32(1.0), dv, at)
    else:
        part = work.tile.q_head % x.scalars.splits
        sums = x.scratch.dkv_sums + part.to(Int64) * backward_rows.dkv_elements(x.arrays)
        dk = backward_rows.like(x.arrays.dk, sums)
        backward_rows.store_floats(c.dk, x.scalars.scale, cute.domain_offset(dk_at, dk[place]), at)
        dv = backward_rows.like(x.arrays.dv, sums + cute.size(x.arrays.dk.shape))
        backward_rows.store_floats(c.dv, Float32(1.0), cute.domain_offset(dv_at, dv[place]), at)
