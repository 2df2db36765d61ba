"""Hopper backward: dq, dk and dv from one more pass over all visible pairs.

    prepare            delta, log2-sum-exp2 by query row; dQ sums = 0        (bwd_rows.py)
    main   load        k  q(0)  v  do(0)  q(1)  do(1) ...
           attend i    S dP(0)  P dS |barrier| dV dQ dK(0)  dq += | S dP(1)  P dS |barrier| ...
           attend j    the same for 64 other keys
    finish             dQ sums -> dq; parts of dK, dV -> dk, dv; dsinks      (bwd_rows.py)

The method is FlashAttention's (Dao, arXiv:2307.08691; Shah et al., arXiv:2407.08608); roles, edges
and memory: ``plan_bwd.py``; conventions: ``jax_fa/problem.py``.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.band import UNBOUNDED, Band, Blocks, Window, ceil_div, last_kv_block, q_blocks, row_range
from jax_fa.config import BwdConfig, KernelKey
from jax_fa.kernels import abi, edges, primitives, softmax, tiles
from jax_fa.kernels.sm90 import bwd_rows
from jax_fa.kernels.sm90.plan import ROWS
from jax_fa.kernels.sm90.plan_bwd import DS_STAGES, backward_plan


ROUNDS_PER_BAND = 2


class Variant(NamedTuple):
    """What is fixed at compile time."""

    key: KernelKey
    config: BwdConfig
    plan: edges.Plan

    @property
    def dtype(self) -> type:
        """Element type of the arrays."""
        return primitives.DTYPES[self.key.dtype]

    @property
    def is_general(self) -> bool:
        """Everything that can hide a key may be there."""
        return self.key.mask == "general"

    @property
    def dq_shape(self) -> tuple[int, int]:
        """Rows and columns of dQ that one consumer computes."""
        config, head_dim = self.config, self.key.head_dim
        if config.splits_dq_rows:
            return ROWS, head_dim
        return config.block_q, head_dim // config.num_consumers


class Layouts(NamedTuple):
    """Shared memory layouts."""

    k: cute.ComposedLayout  # (block_kv, D)
    v: cute.ComposedLayout  # (block_kv, Dv)
    q: cute.ComposedLayout  # (block_q, D, q_stages)
    dout: cute.ComposedLayout  # (block_q, Dv, dout_stages)
    ds: cute.ComposedLayout  # (block_q, block_kv, DS_STAGES)


def make_layouts(variant: Variant) -> Layouts:
    """The layouts of a variant's shared memory."""
    key, config, dtype = variant.key, variant.config, variant.dtype
    return Layouts(
        k=primitives.smem_layout(dtype, (config.block_kv, key.head_dim), variant.dq_shape[1]),
        v=primitives.smem_layout(dtype, (config.block_kv, key.value_dim)),
        q=primitives.smem_layout(dtype, (config.block_q, key.head_dim, config.q_stages)),
        dout=primitives.smem_layout(dtype, (config.block_q, key.value_dim, config.dout_stages)),
        ds=primitives.smem_layout(dtype, (config.block_q, config.block_kv, DS_STAGES), ROWS),
    )


class Tma(NamedTuple):
    """TMA descriptors."""

    k: cute.CopyAtom
    v: cute.CopyAtom
    q: cute.CopyAtom
    dout: cute.CopyAtom


class Arrays(NamedTuple):
    """Global arrays; the first four as TMA sees them."""

    k: cute.Tensor  # (S, D, K, B)
    v: cute.Tensor  # (S, Dv, K, B)
    q: cute.Tensor  # (T, D, N, B)
    dout: cute.Tensor  # (T, Dv, N, B)
    dk: cute.Tensor  # (S, D, K, B)
    dv: cute.Tensor  # (S, Dv, K, B)


class Smem(NamedTuple):
    """Shared memory."""

    k: cute.Tensor  # (block_kv, D)
    v: cute.Tensor  # (block_kv, Dv)
    q: cute.Tensor  # (block_q, D, q_stages)
    dout: cute.Tensor  # (block_q, Dv, dout_stages)
    ds: cute.Tensor  # (block_q, block_kv, DS_STAGES)
    lse2: cute.Tensor  # (block_q, q_stages)
    delta: cute.Tensor  # (block_q, dout_stages)


class Scalars(NamedTuple):
    """Run-time values that every tile shares."""

    keys: tiles.Sequences  # with queries and keys exchanged: tiles are cut from keys here
    q_offset: cute.Pointer
    q_segments: cute.Pointer
    kv_segments: cute.Pointer
    window_left: Int32
    window_right: Int32
    bottom_right: Int32
    group: Int32
    splits: Int32
    scale: Float32
    score_log2: Float32  # factor of a score, capped or not, that makes it a logit in base 2
    cap_inner_log2: Float32  # factor of a score inside the tanh; see softmax.cap
    deterministic: Int32


class Context(NamedTuple):
    """What both roles work with."""

    tma: Tma
    arrays: Arrays
    scratch: bwd_rows.Scratch
    scalars: Scalars
    order: tiles.Order
    smem: Smem


class Pipes(NamedTuple):
    """One end of each edge."""

    k: PipelineProducer | PipelineConsumer
    v: PipelineProducer | PipelineConsumer
    q: PipelineProducer | PipelineConsumer
    dout: PipelineProducer | PipelineConsumer


class Consumer(NamedTuple):
    """What one consumer warpgroup works with, beside its pipes."""

    s_mma: cute.TiledMma  # 64 keys x block_q, both operands in smem
    dk_mma: cute.TiledMma  # 64 keys x D, A in registers
    dv_mma: cute.TiledMma  # 64 keys x Dv, A in registers
    dq_mma: cute.TiledMma
    k: cute.Tensor  # A of S
    v: cute.Tensor  # A of dP
    q: cute.Tensor  # B of S
    dout: cute.Tensor  # B of dP
    q_rows: cute.Tensor  # B of dK
    dout_rows: cute.Tensor  # B of dV
    ds: cute.Tensor  # A of dQ
    k_rows: cute.Tensor  # B of dQ
    ds_store: cute.TiledCopy
    ds_target: cute.Tensor  # where ds_store writes
    s: cute.Tensor  # accumulator of 64 x block_q
    dk: cute.Tensor  # accumulator of 64 x D
    dv: cute.Tensor  # accumulator of 64 x Dv
    index: Int32
    thread: Int32


class Work(NamedTuple):
    """A tile, with all that follows from it.

    Attributes:
        tile: ``q_block`` counts key blocks of the sequence here.
        window: the band of the sequence.
        blocks: its query blocks.
        is_partial: it has keys beyond the sequence.
        kv_start: first key of the sequence in the array.
        kv_slot: keys of the sequence that are written.
        q_start: first query of the sequence in the array.
        scratch_row: first row of the sequence in ``Scratch``.
        first_head: its first query head.
        num_heads: its query heads.
        num_steps: query blocks of all its heads.
    """

    tile: tiles.Tile
    window: Window
    blocks: Blocks
    is_partial: Boolean
    kv_start: Int32
    kv_slot: Int32
    q_start: Int32
    scratch_row: Int32
    first_head: Int32
    num_heads: Int32
    num_steps: Int32


class Step(NamedTuple):
    """Where in a tile's work a consumer is.

    Attributes:
        q_block: query block.
        head: query head.
        parity: which of the two dS buffers.
        owed: element of ``Scratch.turns`` that the step before has yet to pass on; -1 for none.
    """

    q_block: Int32
    head: Int32
    parity: Int32
    owed: Int32


@cute.jit
def tile_at(variant: cutlass.Constexpr, x: Context, slot: Int32) -> tiles.Tile:
    """The tile at a position of this CTA's list.

    With a causal mask the first key block has the most queries and comes first. A deterministic
    run starts at the last one, which waits for no other (``await_turn``).
    """
    tile = tiles.row_order(x.order, slot)
    if const_expr(variant.key.mask == "causal"):
        tile = tiles.longest_first(x.order, slot)
    if const_expr(variant.is_general):
        tile = tiles.one_per_cta(x.order, slot)
    block = x.order.num_q_blocks - 1 - tile.q_block
    if x.scalars.deterministic != 0:
        block = tile.q_block
    return tile._replace(q_block=block)


@cute.jit
def work_on(variant: cutlass.Constexpr, x: Context, tile: tiles.Tile) -> Work:
    """What there is to do for ``tile``. Called by whole warps."""
    config, scalars = variant.config, x.scalars
    keys = scalars.keys
    left, right = UNBOUNDED, 0 if variant.key.mask == "causal" else UNBOUNDED
    zero = Int32(0)
    # Roles are exchanged: q_* are keys, kv_* are queries.
    span = tiles.Span(tile.batch, zero, zero, keys.q_len, keys.q_len, keys.kv_len, zero, zero)
    if const_expr(variant.is_general):
        span = tiles.locate(keys, tile, config.block_kv)
        tile = tile._replace(q_block=span.first_row // config.block_kv)
        left, right = scalars.window_left, scalars.window_right
    q_len, kv_len = span.kv_len, span.q_len
    aligned = Band(alignment="bottom_right").shift(q_len, kv_len)
    shift = tiles.element_or(scalars.q_offset, span.sequence, zero)
    window = Window(shift + scalars.bottom_right * aligned, left, right, q_len, kv_len)
    first_key = tile.q_block * config.block_kv
    blocks = q_blocks(
        window,
        first_key,
        config.block_kv,
        config.block_q,
        minimum=cutlass.min,
        maximum=cutlass.max,
    )
    if first_key >= kv_len:
        blocks = Blocks(zero, zero, zero, zero)
    if const_expr(variant.is_general):
        if tiles.is_present(scalars.q_segments):
            blocks = Blocks(blocks.start, blocks.start, blocks.start, blocks.end)
    per_part = ceil_div(scalars.group, scalars.splits)
    first = tile.q_head % scalars.splits * per_part
    num_heads = cutlass.max(cutlass.min(per_part, scalars.group - first), 0)
    q_start = span.kv_start
    return Work(
        tile,
        window,
        blocks,
        first_key + config.block_kv > kv_len,
        span.q_start,
        span.q_slot,
        q_start,
        bwd_rows.first_row(config.block_q, span.sequence, q_start + tile.batch * keys.kv_len),
        tile.kv_head * scalars.group + first,
        num_heads,
        num_heads * (blocks.end - blocks.start),
    )


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
            for head in cutlass.range(work.num_heads, unroll=1):
                for block in cutlass.range(work.blocks.start, work.blocks.end, unroll=1):
                    slot = q.acquire_and_advance()
                    load_queries(variant, x, work, (head, block), slot)
                    slot = dout.acquire_and_advance()
                    load_douts(variant, x, work, (head, block), slot)
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
def load_stats(
    variant: cutlass.Constexpr, copied: tuple, x: Context, work: Work, at: tuple, slot
):
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
            at = Step(work.blocks.start, work.first_head, parity, Int32(-1))
            for _ in cutlass.range(work.num_steps, unroll=1):
                q, dout = step(variant, x, c, (q, dout), (work, at))
                at = following(variant, x, work, at)
            parity = at.parity
            v_full.release()
            k_full.release()
            pass_last_turn(variant, x, c, at)
        store(variant, x, c, work)
        tile = tile_at(variant, x, tile.slot + 1)


@cute.jit
def following(variant: cutlass.Constexpr, x: Context, work: Work, at: Step) -> Step:
    """The step after ``at``: the next query block, or the first one of the next head."""
    block = at.q_block + 1
    is_last = block == work.blocks.end
    return Step(
        work.blocks.start if is_last else block,
        at.head + 1 if is_last else at.head,
        1 - at.parity,
        turn_index(variant, x, work, at),
    )


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
    variant: cutlass.Constexpr, x: Context, c: Consumer, pipes: tuple, where: tuple
) -> tuple:
    """One query block: its part of dK and dV to the accumulators, of dQ to global memory.

    Products retire in the order of issue, so ``wait_group(n)`` leaves the n youngest running. None
    runs across the border of two steps: ptxas would give up on asynchrony (C7514, CUDA 13.0). dV
    comes after the barrier of dS: 5 % faster than before it (H200, D = 128, T = 16384, 2026-11).
    """
    q, dout = pipes
    work, at = where
    used = work.window.q_len - at.q_block * variant.config.block_q
    q_full = q.wait_and_advance()
    if const_expr(variant.is_general):
        if used < variant.config.block_q:
            scrub(variant, c, x.smem.q[None, None, q_full.index], used)
    primitives.multiply(c.s_mma, c.s, (c.k, c.q[None, None, None, q_full.index]), False)
    dout_full = dout.wait_and_advance()
    if const_expr(variant.is_general):
        if used < variant.config.block_q:
            scrub(variant, c, x.smem.dout[None, None, dout_full.index], used)
    dp = c.s_mma.make_fragment_C(c.s.shape)
    primitives.multiply(c.s_mma, dp, (c.v, c.dout[None, None, None, dout_full.index]), False)
    warpgroup.wait_group(1)
    if const_expr(variant.key.has_soft_cap):
        softmax.cap(c.s, x.scalars.cap_inner_log2)
    is_edge = (at.q_block < work.blocks.full_start) | (at.q_block >= work.blocks.full_end)
    if is_edge | work.is_partial:
        mask_block(variant, x, c, work, at)
    p = c.dv_mma.make_fragment_A(c.dv_mma.partition_shape_A((ROWS, variant.config.block_q)))
    exponentiate(variant, c, x.smem.lse2[None, q_full.index], x.scalars.score_log2, p)
    warpgroup.wait_group(0)
    ds = c.dk_mma.make_fragment_A(c.dk_mma.partition_shape_A((ROWS, variant.config.block_q)))
    differentiate(c, x.smem.delta[None, dout_full.index], p, dp)
    if const_expr(variant.key.has_soft_cap):
        dp.store(dp.load() * c.s.load())
    primitives.narrow(dp, ds)
    rounded = cute.make_tensor(ds.iterator, dp.layout)
    target = c.ds_target[None, None, None, at.parity]
    cute.copy(c.ds_store, c.ds_store.retile(rounded), target)
    primitives.multiply(c.dv_mma, c.dv, (p, c.dout_rows[None, None, None, dout_full.index]), True)
    # HAZARD: stmatrix writes through the generic proxy, wgmma reads through the async one.
    cute.arch.fence_view_async_shared()
    await_turn(variant, x, c, work, at)
    barrier = variant.plan.barrier("ds")
    cute.arch.barrier(barrier_id=barrier.index, number_of_threads=barrier.threads)
    pass_turn(variant, x, c, at)

    dq = c.dq_mma.make_fragment_C(c.dq_mma.partition_shape_C(variant.dq_shape))
    primitives.multiply(c.dq_mma, dq, (c.ds[None, None, None, at.parity], c.k_rows), False)
    primitives.multiply(c.dk_mma, c.dk, (ds, c.q_rows[None, None, None, q_full.index]), True)
    warpgroup.wait_group(1)
    dout_full.release()
    add_dq(variant, x, c, work, at, dq)
    warpgroup.wait_group(0)
    q_full.release()
    return q, dout


def column_pair(c: Consumer, stats: cute.Tensor, group: int) -> cute.Tensor:
    """The two floats of ``stats`` that belong to this thread's columns in a group of 8."""
    return cute.zipped_divide(stats, (2,))[None, c.thread % 4 + 4 * group].load()


@cute.jit
def exponentiate(
    variant: cutlass.Constexpr,
    c: Consumer,
    lse2: cute.Tensor,
    score_log2: Float32,
    p: cute.Tensor,
):
    """P from the scores; of capped scores, the slope of the cap is left in their place."""
    by_key = primitives.by_row(c.s)
    probabilities = cute.make_rmem_tensor_like(c.s)
    p_by_key = primitives.by_row(probabilities)
    for group in cutlass.range_constexpr(cute.size(by_key, mode=[1]) // 2):
        pair = column_pair(c, lse2, group)
        for r in cutlass.range_constexpr(softmax.ROWS):
            for i in cutlass.range_constexpr(2):
                score = by_key[r, 2 * group + i]
                z = score * score_log2 - pair[i]
                p_by_key[r, 2 * group + i] = cute.math.exp2(z, fastmath=True)
                if const_expr(variant.key.has_soft_cap):
                    # Masked scores are -inf here: their slope is to be 0, for 0 * inf is not.
                    by_key[r, 2 * group + i] = cute.arch.fmax(1.0 - score * score, 0.0)
    primitives.narrow(probabilities, p)


@cute.jit
def differentiate(c: Consumer, delta: cute.Tensor, p: cute.Tensor, dp: cute.Tensor):
    """dS = P (dP - delta), in place of dP.

    P is what dV uses, rounded: the float32 one would occupy registers that the next S needs.
    """
    by_key = primitives.by_row(dp)
    words = cute.recast_tensor(p, Int32)
    for group in cutlass.range_constexpr(cute.size(by_key, mode=[1]) // 2):
        pair = column_pair(c, delta, group)
        for r in cutlass.range_constexpr(softmax.ROWS):
            p_pair = primitives.widen(words[softmax.ROWS * group + r], p.element_type)
            for i in cutlass.range_constexpr(2):
                at = (r, 2 * group + i)
                by_key[at] = p_pair[i] * (by_key[at] - pair[i])


@cute.jit
def mask_block(
    variant: cutlass.Constexpr, x: Context, c: Consumer, work: Work, at: Step
):
    """Sets the scores of pairs that the band or the segments do not show to -inf."""
    config, window = variant.config, work.window
    first_key = work.tile.q_block * config.block_kv + c.index * ROWS
    first_column = at.q_block * config.block_q + primitives.first_column(c.thread)
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
def turn_index(variant: cutlass.Constexpr, x: Context, work: Work, at: Step) -> Int32:
    """The element of ``Scratch.turns`` of a step's query block."""
    block = work.scratch_row // variant.config.block_q + at.q_block
    return at.head * cute.size(x.scratch.turns, mode=[0]) + block


@cute.jit
def await_turn(
    variant: cutlass.Constexpr, x: Context, c: Consumer, work: Work, at: Step
):
    """In a deterministic run, waits until all later key blocks have added to this query block."""
    if x.scalars.deterministic != 0:
        # HAZARD: what the step before has added must be visible before ``pass_turn`` says so.
        cute.arch.fence_acq_rel_gpu()
        if (c.index == 0) & (c.thread == 0):
            last = last_kv_block(
                work.window,
                at.q_block,
                variant.config.block_kv,
                variant.config.block_q,
                minimum=cutlass.min,
            )
            counter = x.scratch.turns.iterator + turn_index(variant, x, work, at)
            taken = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
            while taken != last - work.tile.q_block:
                taken = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")


@cute.jit
def pass_turn(variant: cutlass.Constexpr, x: Context, c: Consumer, at: Step):
    """Tells the key block before that the step before ``at`` has added its dQ."""
    if (x.scalars.deterministic != 0) & (at.owed >= 0):
        if (c.index == 0) & (c.thread == 0):
            counter = x.scratch.turns.iterator + at.owed
            cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


@cute.jit
def pass_last_turn(variant: cutlass.Constexpr, x: Context, c: Consumer, at: Step):
    """``pass_turn`` after the last step of a tile."""
    barrier = variant.plan.barrier("scrub")
    if x.scalars.deterministic != 0:
        cute.arch.fence_acq_rel_gpu()
        cute.arch.barrier(barrier_id=barrier.index, number_of_threads=barrier.threads)
        pass_turn(variant, x, c, at)


@cute.jit
def add_dq(
    variant: cutlass.Constexpr, x: Context, c: Consumer, work: Work, at: Step, dq: cute.Tensor
):
    """Adds this consumer's part of dQ to the sums, four floats at a time."""
    row = work.scratch_row + at.q_block * variant.config.block_q
    fours = cute.size(dq) // 4
    place = row * (variant.key.head_dim // 4) + c.index * fours * edges.WARPGROUP + c.thread
    first = bwd_rows.address_of(x.scratch.dq_sum[None, place, at.head])
    for i in cutlass.range_constexpr(fours):
        values = [dq[4 * i + j] for j in range(4)]
        primitives.add_to_global(first + i * (edges.WARPGROUP * 16), values)


def make_consumer(variant: Variant, x: Context, index: Int32, thread: Int32) -> Consumer:
    """Fragments of consumer ``index``."""
    key, config, dtype, smem = variant.key, variant.config, variant.dtype, x.smem
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    s_mma = primitives.make_mma(dtype, config.block_q, k_major, a_in_registers=False)
    dk_mma = primitives.make_mma(dtype, key.head_dim, mn_major, a_in_registers=True)
    dv_mma = primitives.make_mma(dtype, key.value_dim, mn_major, a_in_registers=True)
    dq_rows, dq_columns = variant.dq_shape
    dq_mma = primitives.make_mma(dtype, dq_columns, mn_major, a_in_registers=False)
    s, dk, dv, dq = (mma.get_slice(0) for mma in (s_mma, dk_mma, dv_mma, dq_mma))
    own_keys = (index, 0)
    k = cute.local_tile(smem.k, (ROWS, key.head_dim), own_keys)
    v = cute.local_tile(smem.v, (ROWS, key.value_dim), own_keys)
    by_rows = config.splits_dq_rows
    ds_part = (index if by_rows else 0, 0, None)
    ds = cute.local_tile(smem.ds, (dq_rows, config.block_kv), ds_part)
    k_part = (0, 0 if by_rows else index)
    k_columns = cute.local_tile(smem.k, (config.block_kv, dq_columns), k_part)
    own_ds = cute.local_tile(smem.ds, (config.block_q, ROWS), (0, index, None))
    ds_store = cute.make_tiled_copy_C(
        cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(True, 4), dtype), s_mma
    ).get_slice(thread)
    return Consumer(
        s_mma=s_mma,
        dk_mma=dk_mma,
        dv_mma=dv_mma,
        dq_mma=dq_mma,
        k=s_mma.make_fragment_A(s.partition_A(k)),
        v=s_mma.make_fragment_A(s.partition_A(v)),
        q=s_mma.make_fragment_B(s.partition_B(smem.q)),
        dout=s_mma.make_fragment_B(s.partition_B(smem.dout)),
        q_rows=dk_mma.make_fragment_B(dk.partition_B(primitives.transposed(smem.q))),
        dout_rows=dv_mma.make_fragment_B(dv.partition_B(primitives.transposed(smem.dout))),
        ds=dq_mma.make_fragment_A(dq.partition_A(ds)),
        k_rows=dq_mma.make_fragment_B(dq.partition_B(primitives.transposed(k_columns))),
        ds_store=ds_store,
        ds_target=ds_store.partition_D(primitives.transposed(own_ds)),
        s=s_mma.make_fragment_C(s_mma.partition_shape_C((ROWS, config.block_q))),
        dk=dk_mma.make_fragment_C(dk_mma.partition_shape_C((ROWS, key.head_dim))),
        dv=dv_mma.make_fragment_C(dv_mma.partition_shape_C((ROWS, key.value_dim))),
        index=index,
        thread=thread,
    )


@cute.jit
def store(variant: cutlass.Constexpr, x: Context, c: Consumer, work: Work):
    """Writes the gradients of 64 keys, or this part of a group's share in them."""
    key = work.tile.q_block * variant.config.block_kv + c.index * ROWS
    place = (None, None, work.tile.kv_head, work.tile.batch)
    at = (c.thread, work.kv_slot - key)
    if x.scalars.splits == 1:
        dk = cute.domain_offset((work.kv_start + key, 0), x.arrays.dk[place])
        bwd_rows.store_rows(c.dk, x.scalars.scale, dk, at)
        dv = cute.domain_offset((work.kv_start + key, 0), x.arrays.dv[place])
        bwd_rows.store_rows(c.dv, Float32(1.0), dv, at)
    else:
        part = work.tile.q_head % x.scalars.splits
        sums = x.scratch.dkv_sums + part.to(Int64) * bwd_rows.dkv_elements(x.arrays)
        dk = bwd_rows.like(x.arrays.dk, sums)
        dk = cute.domain_offset((work.kv_start + key, 0), dk[place])
        bwd_rows.store_floats(c.dk, x.scalars.scale, dk, at)
        dv = bwd_rows.like(x.arrays.dv, sums + cute.size(x.arrays.dk.shape))
        dv = cute.domain_offset((work.kv_start + key, 0), dv[place])
        bwd_rows.store_floats(c.dv, Float32(1.0), dv, at)


@cute.kernel
def kernel(
    variant: cutlass.Constexpr,
    tma: Tma,
    arrays: Arrays,
    scratch: bwd_rows.Scratch,
    scalars: Scalars,
    order: tiles.Order,
):
    """Device entry: shared memory, pipelines, dispatch of roles."""
    plan, layouts, dtype = variant.plan, make_layouts(variant), variant.dtype
    config = variant.config

    @cute.struct
    class Storage:
        k_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("k").stages]
        v_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("v").stages]
        q_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("q").stages]
        dout_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("dout").stages]
        lse2: cute.struct.Align[
            cute.struct.MemRange[Float32, config.block_q * config.q_stages], 128
        ]
        delta: cute.struct.Align[
            cute.struct.MemRange[Float32, config.block_q * config.dout_stages], 128
        ]
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.k)], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.v)], 1024]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.q)], 1024]
        dout: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.dout)], 1024]
        ds: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.ds)], 1024]

    storage = SmemAllocator().allocate(Storage)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        for atom in tma:
            cpasync.prefetch_descriptor(atom)
    k_in, k_out = edges.make_edge(plan, "k", storage.k_barriers.data_ptr())
    v_in, v_out = edges.make_edge(plan, "v", storage.v_barriers.data_ptr())
    q_in, q_out = edges.make_edge(plan, "q", storage.q_barriers.data_ptr())
    dout_in, dout_out = edges.make_edge(plan, "dout", storage.dout_barriers.data_ptr())
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    smem = Smem(
        k=primitives.smem_tensor(storage.k, layouts.k),
        v=primitives.smem_tensor(storage.v, layouts.v),
        q=primitives.smem_tensor(storage.q, layouts.q),
        dout=primitives.smem_tensor(storage.dout, layouts.dout),
        ds=primitives.smem_tensor(storage.ds, layouts.ds),
        lse2=storage.lse2.get_tensor(cute.make_layout((config.block_q, config.q_stages))),
        delta=storage.delta.get_tensor(cute.make_layout((config.block_q, config.dout_stages))),
    )
    x = Context(tma, arrays, scratch, scalars, order, smem)
    if warp < plan.role("attend").warps.start:
        cute.arch.setmaxregister_decrease(plan.role("load").registers)
        if warp == 0:
            load(variant, x, Pipes(k_in, v_in, q_in, dout_in))
    else:
        cute.arch.setmaxregister_increase(plan.role("attend").registers)
        attend(variant, x, Pipes(k_out, v_out, q_out, dout_out))


def make_entry(key: KernelKey, config: BwdConfig):
    """The flat host entry of one variant, and the stand-in arguments it is compiled with.

    The entry's parameters are those of ``abi.BACKWARD``.
    """
    variant = Variant(key, config, backward_plan(key, config))

    @cute.jit
    def backward(
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        dout: cute.Pointer,
        dlse: cute.Pointer,
        dq: cute.Pointer,
        dk: cute.Pointer,
        dv: cute.Pointer,
        dsinks: cute.Pointer,
        dq_sum: cute.Pointer,
        row_stats: cute.Pointer,
        dkv_sums: cute.Pointer,
        turns: cute.Pointer,
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
        deterministic: Int32,
        stream: cuda.CUstream,
    ):
        queries, keys = (batch, q_len, num_q_heads), (batch, kv_len, num_kv_heads)
        d = key.head_dim
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
        rows = bwd_rows.Rows(
            out=bwd_rows.dense(out, queries, key.value_dim),
            dout=bwd_rows.dense(dout, queries, key.value_dim),
            dq=bwd_rows.dense(dq, queries, d),
            lse=bwd_rows.dense_stats(lse, queries),
            dlse=bwd_rows.dense_stats(dlse, queries),
            sinks=sinks,
            dsinks=dsinks,
            sequences=sequences,
            deterministic=deterministic,
        )
        scratch = bwd_rows.make_scratch(
            (dq_sum, row_stats, dkv_sums, turns), (batch, num_sequences, q_len, num_q_heads), d
        )
        num_tiles = abi.kv_tiles(batch, num_sequences, kv_len) * num_kv_heads
        group = num_q_heads // num_kv_heads
        scalars = Scalars(
            keys=exchanged(sequences),
            q_offset=q_offset,
            q_segments=q_segments,
            kv_segments=kv_segments,
            window_left=window_left,
            window_right=window_right,
            bottom_right=bottom_right,
            group=group,
            splits=abi.head_splits(
                num_tiles, group, minimum=cutlass.min, maximum=cutlass.max
            ),
            scale=scale,
            score_log2=(soft_cap if key.has_soft_cap else scale) * softmax.LOG2_E,
            cap_inner_log2=scale / soft_cap * (2.0 * softmax.LOG2_E),
            deterministic=deterministic,
        )
        bwd_rows.prepare(variant, rows, scratch, stream)
        arrays = (q, k, v, dout, dk, dv)
        launch_main(variant, arrays, scratch, scalars, (queries, keys), (num_sms, stream))
        bwd_rows.finish(variant, rows, scratch, scale, stream)
        gradients = (
            bwd_rows.dense(dk, keys, d),
            bwd_rows.dense(dv, keys, key.value_dim),
        )
        bwd_rows.merge(gradients, dkv_sums, scalars.splits, stream)

    return backward, fake_arguments(variant.dtype)


def exchanged(sequences: tiles.Sequences) -> tiles.Sequences:
    """``sequences`` with queries for keys and keys for queries."""
    return tiles.Sequences(
        sequences.kv_lengths,
        sequences.q_lengths,
        sequences.cu_seqlens_k,
        sequences.cu_seqlens_q,
        sequences.q_offset,
        sequences.num_sequences,
        sequences.kv_len,
        sequences.q_len,
    )


@cute.jit
def launch_main(
    variant: cutlass.Constexpr,
    pointers: tuple,
    scratch: bwd_rows.Scratch,
    scalars: Scalars,
    extents: tuple,
    launch: tuple,
):
    """Describes the arrays to TMA and launches the main kernel."""
    key, config = variant.key, variant.config
    q, k, v, dout, dk, dv = pointers
    queries, keys = extents
    num_sms, stream = launch
    (batch, q_len, _), (_, kv_len, num_kv_heads) = queries, keys
    layouts = make_layouts(variant)
    one = (None, None, 0)
    loads = {
        "k": (bwd_rows.dense(k, keys, key.head_dim), layouts.k),
        "v": (bwd_rows.dense(v, keys, key.value_dim), layouts.v),
        "q": (bwd_rows.dense(q, queries, key.head_dim), cute.slice_(layouts.q, one)),
        "dout": (bwd_rows.dense(dout, queries, key.value_dim), cute.slice_(layouts.dout, one)),
    }
    made = {
        name: primitives.tma_load(array, layout, cute.product_each(layout.outer.shape))
        for name, (array, layout) in loads.items()
    }
    arrays = Arrays(
        **{name: tensor for name, (_, tensor) in made.items()},
        dk=bwd_rows.dense(dk, keys, key.head_dim),
        dv=bwd_rows.dense(dv, keys, key.value_dim),
    )
    num_kv_blocks = ceil_div(kv_len, config.block_kv)
    if const_expr(variant.is_general):
        is_packed = tiles.is_present(scalars.keys.cu_seqlens_q).to(Int32)
        num_kv_blocks = num_kv_blocks + is_packed * (scalars.keys.num_sequences + 1)
    splits = scalars.splits
    order = tiles.make_order(
        batch * num_kv_heads * splits,
        num_kv_heads * splits,
        splits,
        num_kv_blocks,
        bytes_per_head(variant, (q_len, scalars.group, num_kv_blocks), num_sms),
        num_sms,
    )
    num_ctas = cutlass.min(num_sms, order.num_heads * num_kv_blocks)
    if const_expr(variant.is_general):
        num_ctas = order.num_heads * num_kv_blocks
    kernel(
        variant,
        Tma(**{name: atom for name, (atom, _) in made.items()}),
        arrays,
        scratch,
        scalars,
        order,
    ).launch(
        grid=(num_ctas, 1, 1),
        block=(variant.plan.threads, 1, 1),
        stream=stream,
        min_blocks_per_mp=1,
    )


def bytes_per_head(variant: Variant, extents: tuple, num_sms: Int32) -> Int32:
    """Queries, dO and dQ sums of one key/value head, as the work order counts them.

    Capped so that a band of heads gives every CTA ``ROUNDS_PER_BAND`` tiles: two tiles of unequal
    length balance each other, one cannot.
    """
    key = variant.key
    q_len, group, num_kv_blocks = extents
    size_bytes = q_len * group * (2 * (key.head_dim + key.value_dim) + 4 * key.head_dim)
    heads = ceil_div(ROUNDS_PER_BAND * num_sms, num_kv_blocks)
    return cutlass.min(size_bytes, tiles.L2_BUDGET_BYTES // heads)


def fake_arguments(dtype: type) -> tuple:
    """Stand-ins for the parameters of ``abi.BACKWARD``, in its order."""
    wide = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
    floats = ("lse", "dlse", "sinks", "dsinks", "dq_sum", "row_stats", "dkv_sums")
    element = {**dict.fromkeys(floats, Float32), **dict.fromkeys(wide, dtype)}
    return primitives.stand_ins(abi.BACKWARD, element)
