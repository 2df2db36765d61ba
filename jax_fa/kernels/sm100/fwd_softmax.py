"""Blackwell forward: the roles softmax and correction, between the two products.

``fwd_roles.py`` has the other roles, and shows how the role mma waits for these two.
"""

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.kernels import dense_mask, edges, primitives, softmax, tiles
from jax_fa.kernels.forward_work import (
    Variant,
    Work,
    batch_of_part,
    below,
    sink_of,
    work_on,
)
from jax_fa.kernels.sm100 import arithmetic, row_softmax, shell, umma
from jax_fa.kernels.sm100.fwd_roles import (
    ForwardContext,
    scores_at,
    stores_whole_tile,
    tile_at,
    tiling_of,
)
from jax_fa.kernels.sm100.plan import (
    CHUNK,
    HANDED_OVER_FIRST,
    MMA_ROWS,
    O_COLUMNS,
    RESCALE_LOG2,
)
from jax_fa.kernels.sm100.shell import signal
from jax_fa.kernels.unmasked import unmasked_blocks
from jax_fa.spec.band import Blocks, key_range, kv_blocks
from jax_fa.spec.division import WORD_KEYS

MAXIMUM_STEP = 2.0**-14
"""A row's maximum is rounded down to a multiple of this. That is fine enough for P of the largest
score to round to 1: a row that one key dominates returns that key's value, and its delta cancels dP
in the backward. It is coarse enough to add to a share of exponents exactly (``row_softmax``)."""


@cute.jit
def blocks_of_rows(
    variant: cutlass.Constexpr, x: ForwardContext, work: Work, index: Int32
) -> Blocks:
    """The blocks of ``work``, with the "full" range of query tile ``index`` alone."""
    block_kv = variant.config.block_kv
    start, _, _, end = work.blocks
    first, last = (
        tiles.row_at(x.packing, work.tile, work.span.first_row, row)
        for row in (index * MMA_ROWS, (index + 1) * MMA_ROWS - 1)
    )
    rows = last.position - first.position + 1
    own = kv_blocks(work.window, first.position, rows, block_kv, tiles.EXTREMES)
    blocks = Blocks(start, own.full_start, own.full_end, end)
    return unmasked_blocks(variant, x.scalars, blocks, x.smem.found, block_kv)


class SoftmaxPipes(NamedTuple):
    """Ends held by one softmax role."""

    s: PipelineConsumer
    p: PipelineProducer
    p_rest: PipelineProducer
    stats: PipelineProducer


def _first_thread() -> Int32:
    """The number, within its role, of this warp's first thread.

    Tensor memory is addressed by warp. An address that is uniform across the warp occupies no
    per-thread register, and takes no instruction to move it out of one.
    """
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return warp % edges.WARPS_PER_GROUP * edges.WARP


def _loads_of_s(
    variant: Variant, x: ForwardContext, index: Int32, stage: Int32, thread: Int32
) -> umma.TmemCopy:
    """Loads of S of query tile ``index``, a row per lane, by the warp that starts at ``thread``."""
    first = scores_at(variant, "s", index, stage)
    rows = umma.tmem_rows(x.tmem, first, variant.config.block_kv)
    return umma.tmem_load(rows, CHUNK, thread)


def _stores_of_p(
    variant: Variant, x: ForwardContext, index: Int32, stage: Int32, thread: Int32
) -> umma.TmemCopy:
    """Stores of P of query tile ``index``, by the same lanes."""
    words = CHUNK * variant.dtype.width // 32
    first = scores_at(variant, "p", index, stage)
    rows = umma.tmem_rows(x.tmem, first, variant.plan.columns("p0").cols)
    return umma.tmem_store(rows, words, thread)


@cute.jit
def softmax_role(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    index: Int32,
    pipes: SoftmaxPipes,
):
    """Turns S of query tile ``index`` into P, newest block first. Four warps, a row per thread.

    waits   s full (mma), stats empty (correction)
    signals p, p_rest full (mma), stats full (correction)
    """
    thread = cute.arch.thread_idx()[0] % edges.WARPGROUP
    row = row_softmax.make_whole_row()
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        blocks = blocks_of_rows(variant, x, work, index)
        row_softmax.reset_whole_row(row)
        number = index * MMA_ROWS + thread
        own = tiles.row_at(x.packing, work.tile, work.span.first_row, number)
        visible = _visible_keys(variant, x, work, own)
        pipes.stats.acquire()
        # Masked and full blocks have separate loops: for a branch in a single loop, the compiler
        # would issue the instructions of the mask, under a predicate, for every block.
        block, masked = blocks.end - 1, blocks.end - blocks.full_end
        full = blocks.full_end - blocks.full_start
        if const_expr(variant.is_general):
            if dense_mask.is_present(x.scalars.mask):
                # A dense mask may hide keys in any block: the first loop takes all blocks.
                masked, full = work.num_blocks, Int32(0)
        remaining = work.num_blocks
        while remaining > 0:
            for _ in cutlass.range(masked, unroll=1):
                pipes = _step(variant, True, x, row, index, visible, block, pipes)
                block = below(variant, x, block)
            for _ in cutlass.range(full, unroll=1):
                pipes = _step(variant, False, x, row, index, visible, block, pipes)
                block = block - 1
            # In a second pass, the masked blocks that a window leaves.
            remaining = remaining - masked - full
            masked, full = remaining, Int32(0)
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
    """Signals to the role mma the part of P that is stored so far."""
    cute.arch.fence_view_async_tmem_store()
    umma.before_thread_sync()
    with cute.arch.elect_one():
        if const_expr(is_pair):
            slot.commit()
        else:
            shell.arrive(slot.barrier)


@cute.jit
def _raise_maximum(row: row_softmax.WholeRow, block: Float32, scale_log2: Float32) -> Float32:
    """Raises the maximum of a row if that of another block exceeds it by much, else keeps it.

    Called by whole warps. Returns the factor by which everything relative to the old maximum,
    including the total, has to shrink.
    """
    scaled = block * scale_log2
    shrink = Float32(1.0)
    # -inf exceeds nothing: -inf - (-inf) is NaN.
    exceeds = arithmetic.minus(scaled, row.maximum[0]) > RESCALE_LOG2
    # A loop of at most one pass, since for a branch the compiler would issue all instructions under
    # a predicate. HAZARD: it ends because the difference is that of rounded numbers. With an
    # unrounded product of some 2 ** 30, the difference could exceed the tolerance for ever.
    while cute.arch.vote_any_sync(exceeds):
        before = row.maximum[0]
        rounded = arithmetic.floor(scaled * (1.0 / MAXIMUM_STEP)) * MAXIMUM_STEP
        maximum = rounded if exceeds else before
        row.maximum[0] = maximum
        row.offset[0] = Float32(0.0) if maximum == -Float32.inf else -maximum
        shrink = cute.math.exp2(before - maximum, fastmath=True) if exceeds else shrink
        exceeds = arithmetic.minus(scaled, maximum) > RESCALE_LOG2
    return shrink


class VisibleKeys(NamedTuple):
    """Keys that a row sees: ``lo <= j < hi``, and of the row's segment if there are segments."""

    lo: Int32
    hi: Int32
    segment: Int32
    kv_row: Int32  # where kv_segments has key 0
    kv_len: Int32
    mask_row: Int32  # number of the row in a dense mask


@cute.jit
def _step(
    variant: cutlass.Constexpr,
    is_masked: cutlass.Constexpr[bool],
    x: ForwardContext,
    row: row_softmax.WholeRow,
    index: Int32,
    visible: VisibleKeys,
    block: Int32,
    pipes: SoftmaxPipes,
) -> SoftmaxPipes:
    """Turns S of one block into P for query tile ``index``; returns the advanced ends."""
    s, p, p_rest, stats = pipes
    thread = cute.arch.thread_idx()[0] % edges.WARPGROUP
    scale_log2 = x.scalars.scale_log2
    s_full = s.wait_and_advance()
    stage, first = s_full.index, _first_thread()
    loads = _loads_of_s(variant, x, index, stage, first)
    stores = _stores_of_p(variant, x, index, stage, first)
    rS = loads.whole_row()  # (128)
    umma.after_thread_sync()
    cute.copy(loads.copy, loads.tmem, rS)
    cute.arch.fence_view_async_tmem_load()
    if const_expr(variant.key.has_soft_cap):
        softmax.cap(rS, x.scalars.cap_inner_log2)
    if const_expr(is_masked):
        _mask(variant, x, visible, rS, block)
    shrink = _raise_maximum(row, row_softmax.whole_row_max(rS), scale_log2)
    x.smem.stats[thread, 0, index] = shrink
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        shell.arrive(stats.current_handle().barrier)
    stats.advance()
    # A mask takes registers too, so that polynomials would spill; few blocks are masked.
    polynomials = 0 if is_masked else variant.config.polynomials
    sums, block_kv = row_softmax.no_sums(), variant.config.block_kv
    for j in cutlass.range_constexpr(block_kv // CHUNK):
        chunk = rS[None, None, j]
        pairs = range(j * CHUNK // 2, (j + 1) * CHUNK // 2)
        by_polynomial = tuple(row_softmax.takes_polynomial(i, polynomials, block_kv) for i in pairs)
        row_softmax.exponentials(
            chunk, scale_log2, x.scalars.scale_share, row.offset[0], by_polynomial
        )
        words = stores.piece()
        primitives.narrow(chunk, cute.recast_tensor(words, variant.dtype))
        cute.copy(stores.copy, words, stores.tmem[None, None, j])
        if const_expr(j + 1 == HANDED_OVER_FIRST):
            _signal_p(p.current_handle(), variant.plan.ctas == 2)
            # For the next block. It stands here since the compiler moves nothing across a wait:
            # without one, three quarters of P would be signalled when the last is nearly done.
            stats.acquire()
        if const_expr((j + 1) * CHUNK == block_kv):
            _signal_p(p_rest.current_handle(), variant.plan.ctas == 2)
        # After the store of P, but not after the loop: all 128 values would stay in registers.
        sums = row_softmax.add_pairs(sums, chunk)
    row_softmax.add_to_total(row, shrink, sums)
    p.advance()
    p_rest.advance()
    return SoftmaxPipes(s, p, p_rest, stats)


@cute.jit
def _visible_keys(
    variant: cutlass.Constexpr, x: ForwardContext, work: Work, own: tiles.RowAt
) -> VisibleKeys:
    """The keys that a row of the tile's sequence sees."""
    span, sequences, number = work.span, x.scalars.sequences, own.position
    keys = key_range(work.window, number, tiles.EXTREMES)
    segment, mask_row = Int32(0), Int32(0)
    if const_expr(variant.is_general):
        mask_row = dense_mask.row_of(x.scalars.mask, work.tile.batch, own.head, number)
        if tiles.is_present(x.scalars.q_segments):
            row = cutlass.max(cutlass.min(number, span.own_slot - 1), 0)
            row = work.tile.batch * sequences.rows.own + span.own_start + row
            segment = tiles.element(x.scalars.q_segments, row)
    kv_row = work.tile.batch * sequences.rows.swept + span.swept_start
    return VisibleKeys(keys.lo, keys.hi, segment, kv_row, span.swept_len, mask_row)


@cute.jit
def _mask(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    keys: VisibleKeys,
    rS: cute.Tensor,
    block: Int32,
):
    """Hides the keys of a block that this thread's row does not see."""
    block_kv = variant.config.block_kv
    first_key = block * block_kv
    visible = tiles.Stretch(keys.lo - first_key, keys.hi - first_key)
    for first in cutlass.range_constexpr(0, block_kv, WORD_KEYS):
        bits = row_softmax.visible_bits(visible, first)
        if const_expr(variant.is_general):
            if tiles.is_present(x.scalars.q_segments):
                # Nothing beyond the last key may be read; those columns are invisible anyway.
                at = cutlass.min(first_key + first, keys.kv_len - 1)
                ids = x.scalars.kv_segments + keys.kv_row + cutlass.max(at, 0)
                last = keys.kv_len - 1 - cutlass.max(at, 0)
                bits = bits & row_softmax.same_segment_bits(keys.segment, ids, cutlass.max(last, 0))
            if dense_mask.is_present(x.scalars.mask):
                if dense_mask.hides(x.smem.found, block):
                    number = (first_key + first) // WORD_KEYS
                    bits = bits & dense_mask.word_of(x.scalars.mask, keys.mask_row, number)
        row_softmax.mask_by_bits(rS, bits, first)


class CorrectionPipes(NamedTuple):
    """Ends held by the role correction, except those of single query tiles."""

    o: PipelineConsumer
    out: PipelineProducer


class CorrectionTilePipes(NamedTuple):
    """Ends held by the role correction for one query tile."""

    stats: PipelineConsumer
    scaled: PipelineProducer


@cute.jit
def correction(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    pipes: CorrectionPipes,
    of_tiles: Sequence[CorrectionTilePipes],
):
    """Keeps O relative to the maximum of P and finally divides it by the sum. Four warps.

    waits   stats full (softmax), o full (mma), out empty (store)
    signals scaled full (mma), stats empty (softmax), out full (store)
    """
    cut = tiling_of(variant)
    stats0, scaled0 = of_tiles[0]
    stats1, scaled1 = of_tiles[-1]
    o, out = pipes
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        stats0 = _rescale(variant, x, 0, False, stats0, scaled0)
        if const_expr(cut.q_tiles == 2):
            stats1 = _rescale(variant, x, 1, False, stats1, scaled1)
        for _ in cutlass.range(work.num_blocks - 1, unroll=1):
            if const_expr(cut.q_tiles == 1):
                # HAZARD: the last PV, issued after the scores that raise a maximum, may still run.
                o.wait_and_advance()
            stats0 = _rescale(variant, x, 0, True, stats0, scaled0)
            if const_expr(cut.q_tiles == 2):
                stats1 = _rescale(variant, x, 1, True, stats1, scaled1)
        stats0, o, out = _finish(variant, x, 0, work, stats0, o, out)
        if const_expr(cut.q_tiles == 2):
            stats1, o, out = _finish(variant, x, 1, work, stats1, o, out)
        tile = tile_at(variant, x, tile.slot + 1)
    out.tail()


@cute.jit
def _rescale(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    index: cutlass.Constexpr[int],
    is_started: cutlass.Constexpr[bool],
    stats: PipelineConsumer,
    scaled: PipelineProducer,
):
    """Shrinks O of one query tile where a maximum was raised; returns the advanced end of stats.

    O holds PV of all earlier blocks: with two query tiles because the scores that raised the
    maximum were issued after them, with one because the caller waited at the edge o. For the first
    block (not ``is_started``), O is empty, and the signal says that it may be overwritten.
    """
    thread = cute.arch.thread_idx()[0] % edges.WARPGROUP
    full = stats.wait_and_advance()
    shrink = x.smem.stats[thread, 0, index]
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        full.release()
    if const_expr(is_started):
        if cute.arch.vote_any_sync(shrink < 1.0):
            _shrink(variant, x, index, thread, shrink)
    umma.before_thread_sync()
    with cute.arch.elect_one():
        scaled.commit()
    return stats


@cute.jit
def _shrink(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    index: cutlass.Constexpr[int],
    thread: Int32,
    factor: Float32,
):
    """Multiplies row ``thread`` of O of query tile ``index`` by ``factor``."""
    columns = variant.plan.columns(f"o{index}")
    tO = umma.tmem_rows(x.tmem, columns.start, columns.cols)
    loads = umma.tmem_load(tO, O_COLUMNS, thread)
    stores = umma.tmem_store(tO, O_COLUMNS, thread)
    umma.after_thread_sync()
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
    x: ForwardContext,
    index: cutlass.Constexpr[int],
    work: Work,
    stats: PipelineConsumer,
    o: PipelineConsumer,
    out: PipelineProducer,
):
    """Writes ``out``, through shared memory, and ``lse`` of a query tile; returns advanced ends."""
    span, tile = work.span, work.tile
    thread = cute.arch.thread_idx()[0] % edges.WARPGROUP
    at = tiles.row_at(x.packing, tile, span.first_row, index * MMA_ROWS + thread)
    full = stats.wait_and_advance()
    total, maximum = x.smem.stats[thread, 0, index], x.smem.stats[thread, 1, index]
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        full.release()
    sink = sink_of(variant, x, work, at.head)
    factor, lse = softmax.finish_whole_row(maximum, total, sink)
    is_used = Boolean(True)
    if const_expr(variant.is_general):
        is_used = at.position < span.own_len
        lse = lse if is_used else -Float32.inf
    if at.is_there & (at.position < span.own_slot):
        batch = batch_of_part(variant, x, work)
        x.arrays.lse[span.own_start + at.position, at.head, batch] = lse
    o.wait_and_advance()
    umma.after_thread_sync()
    cut, columns = tiling_of(variant), variant.plan.columns(f"o{index}")
    tO = umma.tmem_rows(x.tmem, columns.start, columns.cols)
    loads = umma.tmem_load(tO, O_COLUMNS, thread)
    pieces = cut.out_columns // O_COLUMNS
    for part in cutlass.range_constexpr(cut.out_parts):
        if const_expr(not variant.is_split):
            slot = out.acquire_and_advance()
        for j in cutlass.range_constexpr(part * pieces, (part + 1) * pieces):
            rO = loads.piece()  # (16)
            cute.copy(loads.copy, loads.tmem[None, None, j], rO)
            cute.arch.fence_view_async_tmem_load()
            for i in cutlass.range_constexpr(O_COLUMNS):
                # The row of an unused query may hold anything, including NaN.
                rO[i] = cutlass.select_(is_used, rO[i] * factor, Float32(0.0))
            if const_expr(variant.is_split):
                _put_globally(variant, x, work, at, rO, j * O_COLUMNS)
            else:
                rounded = cute.make_rmem_tensor((O_COLUMNS,), variant.dtype)
                primitives.narrow(rO, rounded)
                _put(variant, x, work, index, at, slot.index, rounded, j * O_COLUMNS)
        if const_expr(not variant.is_split):
            # HAZARD: these stores use the generic proxy, but TMA reads through the async proxy.
            cute.arch.fence_view_async_shared()
            signal(slot)
    return stats, o, out


@cute.jit
def _put(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    work: Work,
    index: cutlass.Constexpr[int],
    at: tiles.RowAt,
    stage: Int32,
    rounded: cute.Tensor,
    first: cutlass.Constexpr[int],
):
    """Writes columns of a row from ``first`` on to stage ``stage`` of out, for TMA to store.

    If TMA cannot store query tile ``index``, writes them to global memory instead.
    """
    if stores_whole_tile(variant, x, work, index):
        row = x.smem.out[cute.arch.thread_idx()[0] % edges.WARPGROUP, None, stage]
        umma.copy_row(rounded, row, first % tiling_of(variant).out_columns)
    else:
        _put_globally(variant, x, work, at, rounded, first)


@cute.jit
def _put_globally(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    work: Work,
    at: tiles.RowAt,
    registers: cute.Tensor,
    first: cutlass.Constexpr[int],
):
    """Writes columns of a row from ``first`` on to global memory, if sequence and group have it."""
    if at.is_there & (at.position < work.span.own_slot):
        batch = batch_of_part(variant, x, work)
        row = x.arrays.out_rows[work.span.own_start + at.position, None, at.head, batch]
        umma.copy_row(registers, umma.aligned(row), first)
