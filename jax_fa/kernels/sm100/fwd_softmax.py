"""Blackwell forward: the roles softmax and correct, between the two products.

The other roles, and how the role mma waits for these: ``fwd_roles.py``.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.band import Blocks, key_range, kv_blocks
from jax_fa.kernels import edges, primitives, segments, softmax, tiles
from jax_fa.kernels.forward_work import (
    Variant,
    Work,
    tile_at,
    work_on,
)
from jax_fa.kernels.sm100.fwd_roles import Context, signal, stores_whole_tile
from jax_fa.kernels.sm100.plan import (
    BLOCK_KV,
    CHUNK,
    HANDED_OVER_FIRST,
    O_COLUMNS,
    RESCALE_LOG2,
    ROWS,
)


@cute.jit
def blocks_of_rows(
    variant: cutlass.Constexpr, x: Context, work: Work, index: cutlass.Constexpr[int]
) -> Blocks:
    """The blocks of ``work``, with "full" as it holds for query tile ``index`` alone."""
    start, _, _, end = work.blocks
    first_row = work.span.first_row + index * ROWS
    own = kv_blocks(
        work.window, first_row, ROWS, BLOCK_KV, minimum=cutlass.min, maximum=cutlass.max
    )
    full_start = cutlass.min(cutlass.max(own.full_start, start), end)
    full_end = cutlass.min(cutlass.max(own.full_end, full_start), end)
    if const_expr(variant.is_general):
        if tiles.is_present(x.scalars.q_segments):
            first_alike, end_alike = segments.alike(x.smem.segment_keys, BLOCK_KV)
            full_start = cutlass.min(cutlass.max(full_start, first_alike), end)
            full_end = cutlass.max(cutlass.min(full_end, end_alike), full_start)
    return Blocks(start, full_start, full_end, end)


class SoftmaxPipes(NamedTuple):
    """The ends that one softmax role holds."""

    s: PipelineConsumer
    p: PipelineProducer
    p_rest: PipelineProducer
    stats: PipelineProducer


class Row(NamedTuple):
    """What one thread knows of its row."""

    thread: Int32
    maximum: cute.Tensor  # (1,) unscaled
    total: cute.Tensor  # (1,) relative to maximum
    s: primitives.TmemCopy
    p: primitives.TmemCopy


def _make_row(variant: Variant, x: Context, index: int) -> Row:
    thread = cute.arch.thread_idx()[0] % edges.WARPGROUP
    s, p = (variant.plan.columns(f"{name}{index}") for name in "sp")
    p_words = CHUNK * variant.dtype.width // 32
    return Row(
        thread,
        cute.make_rmem_tensor((1,), Float32),
        cute.make_rmem_tensor((1,), Float32),
        primitives.tmem_load(primitives.tmem_rows(x.tmem, s.start, s.cols), CHUNK, thread),
        primitives.tmem_store(primitives.tmem_rows(x.tmem, p.start, p.cols), p_words, thread),
    )


@cute.jit
def attend(
    variant: cutlass.Constexpr, x: Context, index: cutlass.Constexpr[int], pipes: SoftmaxPipes
):
    """S -> P of query tile ``index``, newest key block first. Four warps, a row per thread.

    waits   s full (mma), stats empty (correct)
    signals p, p_rest full (mma), stats full (correct)
    """
    s, stats = pipes.s, pipes.stats
    row = _make_row(variant, x, index)
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        blocks = blocks_of_rows(variant, x, work, index)
        row.maximum[0] = -Float32.inf
        row.total[0] = Float32(0.0)
        number = work.span.first_row + index * ROWS + row.thread
        sight = _sight_of(variant, x, work, number)
        # Loops of their own: if one loop asked each block whether to mask it, the compiler would
        # issue the instructions of the mask under a predicate for all of them.
        for i in cutlass.range(blocks.end - blocks.full_end, unroll=1):
            at = (index, sight, blocks.end - 1 - i)
            s, stats = _step(variant, True, x, row, at, (pipes, s, stats))
        for i in cutlass.range(blocks.full_end - blocks.full_start, unroll=1):
            at = (index, sight, blocks.full_end - 1 - i)
            s, stats = _step(variant, False, x, row, at, (pipes, s, stats))
        if const_expr(variant.is_general):
            for i in cutlass.range(blocks.full_start - blocks.start, unroll=1):
                at = (index, sight, blocks.full_start - 1 - i)
                s, stats = _step(variant, True, x, row, at, (pipes, s, stats))
        stats_slot = stats.acquire_and_advance()
        x.smem.stats[row.thread, 0, index] = row.total[0]
        x.smem.stats[row.thread, 1, index] = row.maximum[0]
        signal(stats_slot)
        tile = tile_at(variant, x, tile.slot + 1)
    stats.tail()


@cute.jit
def _signal_p(end):
    """Hands P, as far as it is stored, to the role mma."""
    cute.arch.fence_view_async_tmem_store()
    primitives.before_thread_sync()
    with cute.arch.elect_one():
        end.commit()


@cute.jit
def _step(
    variant: cutlass.Constexpr,
    is_masked: cutlass.Constexpr[bool],
    x: Context,
    row: Row,
    at: tuple,
    ends: tuple,
):
    """S -> P of one block; returns the advanced ends of s and stats.

    ``at`` is (query tile, sight, block), ``ends`` (pipes, s, stats).
    """
    index, sight, block = at
    pipes, s, stats = ends
    scale_log2 = x.scalars.scale_log2
    rS = row.s.whole_row()  # (128)
    s.wait_and_advance()
    primitives.after_thread_sync()
    cute.copy(row.s.copy, row.s.tmem, rS)
    cute.arch.fence_view_async_tmem_load()
    if const_expr(variant.key.has_soft_cap):
        softmax.cap(rS, x.scalars.cap_inner_log2)
    if const_expr(is_masked):
        _mask(variant, x, sight, rS, block)
    maximum, shrink = softmax.raise_maximum(
        row.maximum[0], softmax.whole_row_max(rS), scale_log2, RESCALE_LOG2
    )
    row.maximum[0] = maximum
    stats_slot = stats.acquire_and_advance()
    x.smem.stats[row.thread, 0, index] = shrink
    signal(stats_slot)
    reference = softmax.reference_log2(maximum, scale_log2)
    # Where a mask takes registers too, polynomials would spill; few blocks are masked.
    polynomials = 0 if is_masked else variant.config.polynomials
    sums = softmax.no_sums()
    for j in cutlass.range_constexpr(BLOCK_KV // CHUNK):
        chunk = rS[None, None, j]
        softmax.exponentials(chunk, scale_log2, reference, polynomials)
        words = row.p.piece()
        primitives.narrow(chunk, cute.recast_tensor(words, variant.dtype))
        cute.copy(row.p.copy, words, row.p.tmem[None, None, j])
        if const_expr(j + 1 == HANDED_OVER_FIRST):
            _signal_p(pipes.p)
        if const_expr((j + 1) * CHUNK == BLOCK_KV):
            _signal_p(pipes.p_rest)
        # P first; but summed up at the very end, all 128 values would stay in registers.
        sums = softmax.add_pairs(sums, chunk)
    row.total[0] = row.total[0] * shrink + softmax.sum_of(sums)
    return s, stats


class Sight(NamedTuple):
    """What a row sees: keys ``lo <= j < hi``, of its segment where there are segments."""

    lo: Int32
    hi: Int32
    segment: Int32
    kv_row: Int32  # of key 0 in kv_segments
    kv_len: Int32


@cute.jit
def _sight_of(variant: cutlass.Constexpr, x: Context, work: Work, number: Int32) -> Sight:
    """What row ``number`` of the tile's sequence sees."""
    span, sequences = work.span, x.scalars.sequences
    keys = key_range(work.window, number, minimum=cutlass.min, maximum=cutlass.max)
    segment = Int32(0)
    if const_expr(variant.is_general):
        if tiles.is_present(x.scalars.q_segments):
            row = cutlass.max(cutlass.min(number, span.q_slot - 1), 0)
            row = work.tile.batch * sequences.q_len + span.q_start + row
            segment = tiles.element(x.scalars.q_segments, row)
    kv_row = work.tile.batch * sequences.kv_len + span.kv_start
    return Sight(keys.lo, keys.hi, segment, kv_row, span.kv_len)


@cute.jit
def _mask(variant: cutlass.Constexpr, x: Context, sight: Sight, rS: cute.Tensor, block: Int32):
    """Hides what this thread's row may not see of a block."""
    first_key = block * BLOCK_KV
    visible = softmax.Visible(sight.lo - first_key, sight.hi - first_key)
    for first in cutlass.range_constexpr(0, BLOCK_KV, softmax.WORD):
        bits = softmax.visible_bits(visible, first)
        if const_expr(variant.is_general):
            if tiles.is_present(x.scalars.q_segments):
                # Beyond the last key nothing may be read; those columns are invisible anyway.
                at = cutlass.min(first_key + first, sight.kv_len - 1)
                ids = x.scalars.kv_segments + sight.kv_row + cutlass.max(at, 0)
                last = sight.kv_len - 1 - cutlass.max(at, 0)
                bits = bits & softmax.same_segment_bits(sight.segment, ids, cutlass.max(last, 0))
        softmax.mask_by_bits(rS, bits, first)


class CorrectPipes(NamedTuple):
    """The ends that the role correct holds; pairs are those of the query tiles."""

    stats: tuple[PipelineConsumer, PipelineConsumer]
    scaled: tuple[PipelineProducer, PipelineProducer]
    o: PipelineConsumer
    out: PipelineProducer


@cute.jit
def correct(variant: cutlass.Constexpr, x: Context, pipes: CorrectPipes):
    """Keeps O relative to the maximum of P; at the end divides it by the sum. Four warps.

    waits   stats full (softmax), o full (mma), out empty (store)
    signals scaled full (mma), stats empty (softmax), out full (store)
    """
    stats0, stats1 = pipes.stats
    scaled0, scaled1 = pipes.scaled
    o, out = pipes.o, pipes.out
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        for i in cutlass.range(work.blocks.end - work.blocks.start, unroll=1):
            stats0 = _rescale(variant, x, 0, i > 0, (stats0, scaled0))
            stats1 = _rescale(variant, x, 1, i > 0, (stats1, scaled1))
        stats0, o, out = _finish(variant, x, 0, work, (stats0, o, out))
        stats1, o, out = _finish(variant, x, 1, work, (stats1, o, out))
        tile = tile_at(variant, x, tile.slot + 1)
    out.tail()


@cute.jit
def _rescale(
    variant: cutlass.Constexpr,
    x: Context,
    index: cutlass.Constexpr[int],
    is_started: Boolean,
    ends: tuple,
):
    """Shrinks O of one query tile where a maximum was raised; returns the advanced end of stats.

    The scores that raised it were issued after PV of the block before, whose result O thus holds;
    before the first block there is none (``is_started``), and that O is free again is told instead.
    """
    stats, scaled = ends
    thread = cute.arch.thread_idx()[0] % edges.WARPGROUP
    full = stats.wait_and_advance()
    shrink = x.smem.stats[thread, 0, index]
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        full.release()
    columns = variant.plan.columns(f"o{index}")
    tO = primitives.tmem_rows(x.tmem, columns.start, columns.cols)
    loads = primitives.tmem_load(tO, O_COLUMNS, thread)
    stores = primitives.tmem_store(tO, O_COLUMNS, thread)
    if cute.arch.vote_any_sync(is_started & (shrink < 1.0)):
        primitives.after_thread_sync()
        for j in cutlass.range_constexpr(variant.key.value_dim // O_COLUMNS):
            rO = loads.piece()  # (16)
            cute.copy(loads.copy, loads.tmem[None, None, j], rO)
            cute.arch.fence_view_async_tmem_load()
            for i in cutlass.range_constexpr(0, O_COLUMNS, 2):
                rO[i], rO[i + 1] = cute.arch.mul_packed_f32x2((rO[i], rO[i + 1]), (shrink, shrink))
            cute.copy(stores.copy, rO, stores.tmem[None, None, j])
        cute.arch.fence_view_async_tmem_store()
    primitives.before_thread_sync()
    with cute.arch.elect_one():
        scaled.commit()
    return stats


@cute.jit
def _finish(
    variant: cutlass.Constexpr,
    x: Context,
    index: cutlass.Constexpr[int],
    work: Work,
    ends: tuple,
):
    """Writes out, through shared memory, and lse of one query tile; returns the advanced ends."""
    stats, o, out = ends
    span, tile = work.span, work.tile
    thread = cute.arch.thread_idx()[0] % edges.WARPGROUP
    number = span.first_row + index * ROWS + thread
    full = stats.wait_and_advance()
    total, maximum = x.smem.stats[thread, 0, index], x.smem.stats[thread, 1, index]
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        full.release()
    sink = -Float32.inf
    if tiles.is_present(x.scalars.sinks):
        sink = tiles.element(x.scalars.sinks, span.sequence * x.order.num_q_heads + tile.q_head)
    factor, lse = softmax.finish_whole_row(maximum, total, x.scalars.scale_log2, sink)
    is_used = Boolean(True)
    if const_expr(variant.is_general):
        is_used = number < span.q_len
        lse = lse if is_used else -Float32.inf
    if number < span.q_slot:
        x.arrays.lse[span.q_start + number, tile.q_head, tile.batch] = lse
    o.wait_and_advance()
    primitives.after_thread_sync()
    slot = out.acquire_and_advance()
    columns = variant.plan.columns(f"o{index}")
    tO = primitives.tmem_rows(x.tmem, columns.start, columns.cols)
    loads = primitives.tmem_load(tO, O_COLUMNS, thread)
    for j in cutlass.range_constexpr(columns.cols // O_COLUMNS):
        rO = loads.piece()  # (16)
        cute.copy(loads.copy, loads.tmem[None, None, j], rO)
        cute.arch.fence_view_async_tmem_load()
        for i in cutlass.range_constexpr(O_COLUMNS):
            # An unused query may hold anything, NaN too.
            rO[i] = rO[i] * factor if is_used else Float32(0.0)
        rounded = cute.make_rmem_tensor((O_COLUMNS,), variant.dtype)
        primitives.narrow(rO, rounded)
        _put(variant, x, work, (index, thread), (rounded, j * O_COLUMNS))
    # HAZARD: these stores went through the generic proxy, TMA reads through the async one.
    cute.arch.fence_view_async_shared()
    signal(slot)
    return stats, o, out


@cute.jit
def _put(variant: cutlass.Constexpr, x: Context, work: Work, at: tuple, piece: tuple):
    """Writes some columns of a row: to shared memory, for TMA, or where that may not be, globally.

    ``at`` is (query tile, row of it), ``piece`` (rounded registers, first column).
    """
    index, thread = at
    rounded, first = piece
    if const_expr(not variant.is_general):
        primitives.copy_row(rounded, x.smem.out[thread, None, index], first)
    else:
        number = work.span.first_row + index * ROWS + thread
        if stores_whole_tile(x, work, index):
            primitives.copy_row(rounded, x.smem.out[thread, None, index], first)
        elif number < work.span.q_slot:
            tile, row = work.tile, work.span.q_start + number
            row = x.arrays.out_rows[row, None, tile.q_head, tile.batch]
            primitives.copy_row(rounded, row, first)
