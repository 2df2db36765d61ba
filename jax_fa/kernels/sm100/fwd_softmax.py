"""Blackwell forward: the roles softmax and correct, between the two products.

The other roles, and how the role mma waits for these: ``fwd_roles.py``.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.band import Blocks, key_range, kv_blocks
from jax_fa.kernels import edges, primitives, softmax, tiles
from jax_fa.kernels.forward_work import (
    Variant,
    Work,
    batch_of_part,
    sink_of,
    tile_at,
    work_on,
)
from jax_fa.kernels.sm100.fwd_roles import (
    Context,
    scores_at,
    signal,
    stores_whole_tile,
    tiling_of,
)
from jax_fa.kernels.sm100.plan import (
    BLOCK_KV,
    CHUNK,
    HANDED_OVER_FIRST,
    O_COLUMNS,
    RESCALE_LOG2,
    ROWS,
)
from jax_fa.kernels.whole import whole_blocks

MAXIMUM_STEP = 2.0**-14
"""A row's maximum is rounded down to a multiple of this. Fine enough for P of the largest score to
round to 1: what one key dominates is then that key's value, and its delta cancels dP in the
backward. Coarse enough for ``softmax.exponentials`` to add it to a share of exponents exactly."""


@cute.jit
def blocks_of_rows(
    variant: cutlass.Constexpr, x: Context, work: Work, index: cutlass.Constexpr[int]
) -> Blocks:
    """The blocks of ``work``, with "full" as it holds for query tile ``index`` alone."""
    start, _, _, end = work.blocks
    ends = (index * ROWS, (index + 1) * ROWS - 1)
    first, last = (tiles.row_at(x.packing, work.tile, work.span.first_row, row) for row in ends)
    rows = last.position - first.position + 1
    own = kv_blocks(
        work.window, first.position, rows, BLOCK_KV, minimum=cutlass.min, maximum=cutlass.max
    )
    blocks, ids = Blocks(start, own.full_start, own.full_end, end), x.scalars.q_segments
    return whole_blocks(variant, blocks, ids, x.smem.segment_keys, BLOCK_KV)


class SoftmaxPipes(NamedTuple):
    """The ends that one softmax role holds."""

    s: PipelineConsumer
    p: PipelineProducer
    p_rest: PipelineProducer
    stats: PipelineProducer


def _first_thread() -> Int32:
    """The first thread of this warp among those of its role.

    Tensor memory is addressed by warp; an address the same for a warp takes no register of a thread
    and no instruction to get out of it.
    """
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return warp % edges.WARPS_PER_GROUP * edges.WARP


def _loads_of_s(variant: Variant, x: Context, at: tuple) -> primitives.TmemCopy:
    """How a warp loads its rows of S; ``at`` is (query tile, stage, first thread)."""
    index, stage, thread = at
    rows = primitives.tmem_rows(x.tmem, scores_at(variant, "s", index, stage), BLOCK_KV)
    return primitives.tmem_load(rows, CHUNK, thread)


def _stores_of_p(variant: Variant, x: Context, at: tuple) -> primitives.TmemCopy:
    """How a warp stores its rows of P; ``at`` is as for ``_loads_of_s``."""
    index, stage, thread = at
    words = CHUNK * variant.dtype.width // 32
    first = scores_at(variant, "p", index, stage)
    rows = primitives.tmem_rows(x.tmem, first, variant.plan.columns(f"p{index}").cols)
    return primitives.tmem_store(rows, words, thread)


@cute.jit
def attend(
    variant: cutlass.Constexpr, x: Context, index: cutlass.Constexpr[int], pipes: SoftmaxPipes
):
    """S -> P of query tile ``index``, newest key block first. Four warps, a row per thread.

    waits   s full (mma), stats empty (correct)
    signals p, p_rest full (mma), stats full (correct)
    """
    thread = cute.arch.thread_idx()[0] % edges.WARPGROUP
    row = softmax.make_whole_row()
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        blocks = blocks_of_rows(variant, x, work, index)
        softmax.reset_whole_row(row)
        number = index * ROWS + thread
        number = tiles.row_at(x.packing, work.tile, work.span.first_row, number).position
        sight = _sight_of(variant, x, work, number)
        pipes.stats.acquire()
        # Loops of their own: if one loop asked each block whether to mask it, the compiler would
        # issue the instructions of the mask under a predicate for all of them.
        for i in cutlass.range(blocks.end - blocks.full_end, unroll=1):
            at = (index, sight, blocks.end - 1 - i)
            pipes = _step(variant, True, x, row, at, pipes)
        for i in cutlass.range(blocks.full_end - blocks.full_start, unroll=1):
            at = (index, sight, blocks.full_end - 1 - i)
            pipes = _step(variant, False, x, row, at, pipes)
        if const_expr(variant.is_general):
            for i in cutlass.range(blocks.full_start - blocks.start, unroll=1):
                at = (index, sight, blocks.full_start - 1 - i)
                pipes = _step(variant, True, x, row, at, pipes)
        stats = pipes.stats
        x.smem.stats[thread, 0, index] = row.total[0] + row.total[1]
        x.smem.stats[thread, 1, index] = row.maximum[0]
        signal(stats.current_handle())
        stats.advance()
        pipes = pipes._replace(stats=stats)
        tile = tile_at(variant, x, tile.slot + 1)
    pipes.stats.tail()


@cute.jit
def _signal_p(slot, is_pair: cutlass.Constexpr[bool]):
    """Hands P, as far as it is stored, to the role mma."""
    cute.arch.fence_view_async_tmem_store()
    primitives.before_thread_sync()
    with cute.arch.elect_one():
        if const_expr(is_pair):
            slot.commit()
        else:
            primitives.arrive(slot.barrier)


@cute.jit
def _raise_maximum(row: softmax.WholeRow, block: Float32, scale_log2: Float32) -> Float32:
    """Takes in the maximum of another block; keeps the old one while it is not exceeded by much.

    Called by whole warps. Returns the factor by which all that is relative to the old maximum, the
    total too, has to shrink.
    """
    scaled = block * scale_log2
    shrink = Float32(1.0)
    # -inf exceeds nothing: -inf - (-inf) is NaN.
    exceeds = primitives.minus(scaled, row.maximum[0]) > RESCALE_LOG2
    # A loop of one pass at most, since of a branch the compiler would issue all instructions under
    # a predicate. HAZARD: it ends because the difference is that of rounded numbers: of a product
    # not rounded, some 2 ** 30, it could exceed the tolerance for ever.
    while cute.arch.vote_any_sync(exceeds):
        before = row.maximum[0]
        rounded = primitives.floor(scaled * (1.0 / MAXIMUM_STEP)) * MAXIMUM_STEP
        maximum = rounded if exceeds else before
        row.maximum[0] = maximum
        row.offset[0] = Float32(0.0) if maximum == -Float32.inf else -maximum
        shrink = cute.math.exp2(before - maximum, fastmath=True) if exceeds else shrink
        exceeds = primitives.minus(scaled, maximum) > RESCALE_LOG2
    return shrink


@cute.jit
def _step(
    variant: cutlass.Constexpr,
    is_masked: cutlass.Constexpr[bool],
    x: Context,
    row: softmax.WholeRow,
    at: tuple,
    pipes: SoftmaxPipes,
) -> SoftmaxPipes:
    """S -> P of one block; returns the advanced ends. ``at`` is (query tile, sight, block)."""
    index, sight, block = at
    s, p, p_rest, stats = pipes
    thread = cute.arch.thread_idx()[0] % edges.WARPGROUP
    scale_log2 = x.scalars.scale_log2
    s_full = s.wait_and_advance()
    where = (index, s_full.index, _first_thread())
    loads, stores = _loads_of_s(variant, x, where), _stores_of_p(variant, x, where)
    rS = loads.whole_row()  # (128)
    primitives.after_thread_sync()
    cute.copy(loads.copy, loads.tmem, rS)
    cute.arch.fence_view_async_tmem_load()
    if const_expr(variant.key.has_soft_cap):
        softmax.cap(rS, x.scalars.cap_inner_log2)
    if const_expr(is_masked):
        _mask(variant, x, sight, rS, block)
    shrink = _raise_maximum(row, softmax.whole_row_max(rS), scale_log2)
    x.smem.stats[thread, 0, index] = shrink
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        primitives.arrive(stats.current_handle().barrier)
    stats.advance()
    # Where a mask takes registers too, polynomials would spill; few blocks are masked.
    polynomials = 0 if is_masked else variant.config.polynomials
    sums = softmax.no_sums()
    for j in cutlass.range_constexpr(BLOCK_KV // CHUNK):
        chunk = rS[None, None, j]
        pairs = range(j * CHUNK // 2, (j + 1) * CHUNK // 2)
        by_polynomial = tuple(softmax.takes_polynomial(i, polynomials, BLOCK_KV) for i in pairs)
        softmax.exponentials(chunk, scale_log2, x.scalars.scale_share, row.offset[0], by_polynomial)
        words = stores.piece()
        primitives.narrow(chunk, cute.recast_tensor(words, variant.dtype))
        cute.copy(stores.copy, words, stores.tmem[None, None, j])
        if const_expr(j + 1 == HANDED_OVER_FIRST):
            _signal_p(p.current_handle(), variant.plan.ctas == 2)
            # For the next block. Here, since the compiler moves nothing across a wait: all in one
            # piece, it would hand over three quarters of P when the last is as good as done.
            stats.acquire()
        if const_expr((j + 1) * CHUNK == BLOCK_KV):
            _signal_p(p_rest.current_handle(), variant.plan.ctas == 2)
        # P first; but summed up at the very end, all 128 values would stay in registers.
        sums = softmax.add_pairs(sums, chunk)
    softmax.add_to_total(row, shrink, sums)
    p.advance()
    p_rest.advance()
    return SoftmaxPipes(s, p, p_rest, stats)


class Sight(NamedTuple):
    """What a row sees: keys ``lo <= j < hi``, of its segment where there are segments."""

    lo: Int32
    hi: Int32
    segment: Int32
    kv_row: Int32  # of key 0 in kv_segments
    kv_len: Int32
    diagonal: Int32  # the row's position among the keys


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
    return Sight(keys.lo, keys.hi, segment, kv_row, span.kv_len, number + work.window.shift)


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
        if const_expr(variant.key.mask_mod is not None):
            pair = (sight.diagonal, first_key + first)
            bits = bits & softmax.bits_by_function(variant.key.mask_mod, pair, (0, 1))
        softmax.mask_by_bits(rS, bits, first)


class CorrectPipes(NamedTuple):
    """The ends that the role correct holds; tuples are by query tile."""

    stats: tuple[PipelineConsumer, ...]
    scaled: tuple[PipelineProducer, ...]
    o: PipelineConsumer
    out: PipelineProducer


@cute.jit
def correct(variant: cutlass.Constexpr, x: Context, pipes: CorrectPipes):
    """Keeps O relative to the maximum of P; at the end divides it by the sum. Four warps.

    waits   stats full (softmax), o full (mma), out empty (store)
    signals scaled full (mma), stats empty (softmax), out full (store)
    """
    cut = tiling_of(variant)
    stats0, stats1 = pipes.stats[0], pipes.stats[-1]
    scaled0, scaled1 = pipes.scaled[0], pipes.scaled[-1]
    o, out = pipes.o, pipes.out
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        stats0 = _rescale(variant, x, 0, False, (stats0, scaled0))
        if const_expr(cut.q_tiles == 2):
            stats1 = _rescale(variant, x, 1, False, (stats1, scaled1))
        for _ in cutlass.range(work.blocks.end - work.blocks.start - 1, unroll=1):
            if const_expr(cut.q_tiles == 1):
                # HAZARD: the scores that raise a maximum were issued before the last PV.
                o.wait_and_advance()
            stats0 = _rescale(variant, x, 0, True, (stats0, scaled0))
            if const_expr(cut.q_tiles == 2):
                stats1 = _rescale(variant, x, 1, True, (stats1, scaled1))
        stats0, o, out = _finish(variant, x, 0, work, (stats0, o, out))
        if const_expr(cut.q_tiles == 2):
            stats1, o, out = _finish(variant, x, 1, work, (stats1, o, out))
        tile = tile_at(variant, x, tile.slot + 1)
    out.tail()


@cute.jit
def _rescale(
    variant: cutlass.Constexpr,
    x: Context,
    index: cutlass.Constexpr[int],
    is_started: cutlass.Constexpr[bool],
    ends: tuple,
):
    """Shrinks O of one query tile where a maximum was raised; returns the advanced end of stats.

    O holds all PV of the blocks before: of two query tiles since the scores that raised the maximum
    were issued after them, of one since its edge o was waited for. Before the first block there are
    none (``is_started``), and that O is free again is told instead.
    """
    stats, scaled = ends
    thread = cute.arch.thread_idx()[0] % edges.WARPGROUP
    full = stats.wait_and_advance()
    shrink = x.smem.stats[thread, 0, index]
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        full.release()
    if const_expr(is_started):
        if cute.arch.vote_any_sync(shrink < 1.0):
            _shrink(variant, x, (index, thread), shrink)
    primitives.before_thread_sync()
    with cute.arch.elect_one():
        scaled.commit()
    return stats


@cute.jit
def _shrink(variant: cutlass.Constexpr, x: Context, at: tuple, factor: Float32):
    """Multiplies a row of O by ``factor``; ``at`` is (query tile, row of it)."""
    index, thread = at
    columns = variant.plan.columns(f"o{index}")
    tO = primitives.tmem_rows(x.tmem, columns.start, columns.cols)
    loads = primitives.tmem_load(tO, O_COLUMNS, thread)
    stores = primitives.tmem_store(tO, O_COLUMNS, thread)
    primitives.after_thread_sync()
    for j in cutlass.range_constexpr(columns.cols // O_COLUMNS):
        rO = loads.piece()  # (16)
        cute.copy(loads.copy, loads.tmem[None, None, j], rO)
        cute.arch.fence_view_async_tmem_load()
        for i in cutlass.range_constexpr(0, O_COLUMNS, 2):
            rO[i], rO[i + 1] = cute.arch.mul_packed_f32x2((rO[i], rO[i + 1]), (factor, factor))
        cute.copy(stores.copy, rO, stores.tmem[None, None, j])
    cute.arch.fence_view_async_tmem_store()


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
    at = tiles.row_at(x.packing, tile, span.first_row, index * ROWS + thread)
    full = stats.wait_and_advance()
    total, maximum = x.smem.stats[thread, 0, index], x.smem.stats[thread, 1, index]
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        full.release()
    sink = sink_of(variant, x, work, at.head)
    factor, lse = softmax.finish_whole_row(maximum, total, sink)
    is_used = Boolean(True)
    if const_expr(variant.is_general):
        is_used = at.position < span.q_len
        lse = lse if is_used else -Float32.inf
    if at.is_there & (at.position < span.q_slot):
        batch = batch_of_part(variant, x, work)
        x.arrays.lse[span.q_start + at.position, at.head, batch] = lse
    o.wait_and_advance()
    primitives.after_thread_sync()
    cut, columns = tiling_of(variant), variant.plan.columns(f"o{index}")
    tO = primitives.tmem_rows(x.tmem, columns.start, columns.cols)
    loads = primitives.tmem_load(tO, O_COLUMNS, thread)
    pieces = cut.out_columns // O_COLUMNS
    for part in cutlass.range_constexpr(cut.out_parts):
        if const_expr(not variant.is_split):
            slot = out.acquire_and_advance()
        for j in cutlass.range_constexpr(part * pieces, (part + 1) * pieces):
            rO = loads.piece()  # (16)
            cute.copy(loads.copy, loads.tmem[None, None, j], rO)
            cute.arch.fence_view_async_tmem_load()
            for i in cutlass.range_constexpr(O_COLUMNS):
                # An unused query may hold anything, NaN too.
                rO[i] = rO[i] * factor if is_used else Float32(0.0)
            if const_expr(variant.is_split):
                _put_globally(variant, x, work, at, (rO, j * O_COLUMNS))
            else:
                rounded = cute.make_rmem_tensor((O_COLUMNS,), variant.dtype)
                primitives.narrow(rO, rounded)
                _put(variant, x, work, (index, at, slot.index), (rounded, j * O_COLUMNS))
        if const_expr(not variant.is_split):
            # HAZARD: these stores went through the generic proxy, TMA reads through the async one.
            cute.arch.fence_view_async_shared()
            signal(slot)
    return stats, o, out


@cute.jit
def _put(variant: cutlass.Constexpr, x: Context, work: Work, where: tuple, piece: tuple):
    """Writes some columns of a row: to shared memory, for TMA, or where that may not be, globally.

    ``where`` is (query tile, ``tiles.RowAt``, stage of out), ``piece`` (rounded registers, first
    column).
    """
    index, at, stage = where
    rounded, first = piece
    if stores_whole_tile(variant, x, work, index):
        row = x.smem.out[cute.arch.thread_idx()[0] % edges.WARPGROUP, None, stage]
        primitives.copy_row(rounded, row, first % tiling_of(variant).out_columns)
    else:
        _put_globally(variant, x, work, at, piece)


@cute.jit
def _put_globally(
    variant: cutlass.Constexpr, x: Context, work: Work, at: tiles.RowAt, piece: tuple
):
    """Writes some columns of a row to global memory, if the sequence and the group have that row.

    ``piece`` is (registers, first column).
    """
    registers, first = piece
    if at.is_there & (at.position < work.span.q_slot):
        batch = batch_of_part(variant, x, work)
        row = x.arrays.out_rows[work.span.q_start + at.position, None, at.head, batch]
        primitives.copy_row(registers, row, first)
