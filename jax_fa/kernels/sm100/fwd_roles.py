"""Blackwell forward: its roles as data flows, load, mma, softmax, correct, store.

Every role walks the same tiles in the same order by itself. Roles, edges and memory: ``plan.py``.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.band import Blocks, key_range, kv_blocks
from jax_fa.kernels import edges, primitives, softmax, tiles
from jax_fa.kernels.forward_work import (
    Arrays,
    Scalars,
    Tma,
    Variant,
    Work,
    load_partial_v,
    tile_at,
    work_on,
)
from jax_fa.kernels.sm100.plan import (
    BLOCK_KV,
    CHUNK,
    HANDED_OVER_FIRST,
    O_COLUMNS,
    Q_TILES,
    RESCALE_LOG2,
    ROWS,
    SLAB,
    out_overlays_q,
)


class Smem(NamedTuple):
    """Shared memory."""

    q: cute.Tensor  # (128, D, 2)
    k: cute.Tensor  # (128, D, stages)
    v: cute.Tensor  # (128, Dv, stages), the same bytes
    out: cute.Tensor  # (128, Dv, 2)
    stats: cute.Tensor  # (128, 2, 2) row, {shrink or sum, maximum}, query tile
    scrub: cute.Pointer  # one mbarrier
    segment_keys: cute.Tensor  # (2,) first key, and last key + 1, of the tile's segments


class Context(NamedTuple):
    """What all roles work with."""

    tma: Tma
    arrays: Arrays
    scalars: Scalars
    order: tiles.Order
    smem: Smem
    tmem: cute.Pointer


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
            full_start, full_end = start, start
    return Blocks(start, full_start, full_end, end)


class LoadPipes(NamedTuple):
    """The ends that the role load holds."""

    q: PipelineProducer
    kv: PipelineProducer
    room: PipelineConsumer


@cute.jit
def load(variant: cutlass.Constexpr, x: Context, pipes: LoadPipes):
    """Fetches keys, both query tiles, values; then key and value blocks, newest first. One warp.

    waits   q, kv empty (mma), room full (store)     signals q, kv full (mma)
    """
    q, kv, room = pipes
    phase = Int32(0)
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        span, newest = work.span, work.blocks.end - 1
        queries = x.arrays.q[None, None, work.tile.q_head, work.tile.batch]
        keys = x.arrays.k[None, None, work.tile.kv_head, work.tile.batch]
        slot = kv.acquire_and_advance()
        _load_rows(x.tma.k, keys, x.smem.k, (span.kv_start, newest), slot)
        if const_expr(out_overlays_q(variant.key)):
            # HAZARD: mma is done with q long before correct and store are with out.
            room.wait_and_advance()
        for i in cutlass.range_constexpr(Q_TILES):
            slot = q.acquire_and_advance()
            at = (span.q_start + span.first_row, i)
            _load_rows(x.tma.q, queries, x.smem.q, at, slot)
        slot = kv.acquire_and_advance()
        phase = _load_v(variant, x, (work, newest), slot, phase)
        for i in cutlass.range(newest - work.blocks.start, unroll=1):
            block = newest - 1 - i
            slot = kv.acquire_and_advance()
            _load_rows(x.tma.k, keys, x.smem.k, (span.kv_start, block), slot)
            slot = kv.acquire_and_advance()
            phase = _load_v(variant, x, (work, block), slot, phase)
        tile = tile_at(variant, x, tile.slot + 1)
    # HAZARD: the CTA may not end while the tensor core still has arrivals to make here.
    q.tail()
    kv.tail()


@cute.jit
def _load_rows(atom: cute.CopyAtom, head: cute.Tensor, sRows: cute.Tensor, at: tuple, slot):
    """128 rows of one head; ``at`` is (first row of the sequence, number of the 128 rows)."""
    first, number = at
    head = cute.domain_offset((first, 0), head)
    gRows = cute.local_tile(head, (ROWS, cute.size(sRows, mode=[1])), (None, 0))
    sRows, gRows = primitives.tma_views(atom, sRows, gRows)
    cute.copy(atom, gRows[None, number], sRows[None, slot.index], tma_bar_ptr=slot.barrier)


@cute.jit
def _load_v(variant: cutlass.Constexpr, x: Context, at: tuple, slot, phase: Int32) -> Int32:
    """One block of values; rows beyond the sequence's keys become zero; ``at`` is (work, block).

    Returns the phase that the scrub barrier is in then.
    """
    work, block = at
    key = variant.key
    rows = x.arrays.v[None, None, work.tile.kv_head, work.tile.batch]
    rows = cute.domain_offset((work.span.kv_start, 0), rows)
    gV = cute.local_tile(rows, (BLOCK_KV, key.value_dim), (None, 0))
    sV, gV = primitives.tma_views(x.tma.v, x.smem.v, gV)
    if const_expr(key.value_dim < key.head_dim):
        # The ring announces a block of keys, which is larger.
        missing = BLOCK_KV * (key.head_dim - key.value_dim) * variant.dtype.width // 8
        with cute.arch.elect_one():
            primitives.complete_tx(slot.barrier, missing)
    if const_expr(not variant.is_general):
        # Behind the array's last row TMA fills with zeros by itself.
        cute.copy(x.tma.v, gV[None, block], sV[None, slot.index], tma_bar_ptr=slot.barrier)
    else:
        used = work.span.kv_len - block * BLOCK_KV
        if used >= BLOCK_KV:
            cute.copy(x.tma.v, gV[None, block], sV[None, slot.index], tma_bar_ptr=slot.barrier)
        else:
            copied = (gV[None, block], sV[None, slot.index])
            load_partial_v(variant, x, copied, used, slot, phase)
            phase = phase ^ 1
    return phase


class MmaPipes(NamedTuple):
    """The ends that the role mma holds; pairs are those of the query tiles."""

    q: PipelineConsumer
    kv: PipelineConsumer
    s: tuple[PipelineProducer, PipelineProducer]
    p: tuple[PipelineConsumer, PipelineConsumer]
    p_rest: tuple[PipelineConsumer, PipelineConsumer]
    scaled: tuple[PipelineConsumer, PipelineConsumer]
    o: PipelineProducer


class Products(NamedTuple):
    """Operands and accumulators of both products; pairs are those of the query tiles."""

    qk: cute.TiledMma
    pv: cute.TiledMma
    q: cute.Tensor  # A descriptors, (_, 1, D / 16, 2)
    k: cute.Tensor  # B descriptors, (_, 1, D / 16, stages)
    v: cute.Tensor  # B descriptors, (_, 1, 128 / 16, stages)
    s: tuple[cute.Tensor, cute.Tensor]  # (_, 1, 1)
    p: tuple[cute.Tensor, cute.Tensor]  # A in TMEM, (_, 1, 128 / 16)
    o: tuple[cute.Tensor, cute.Tensor]  # (_, 1, 1)


class Answers(NamedTuple):
    """What PV of one query tile waits for."""

    scaled: PipelineConsumer
    p: PipelineConsumer
    p_rest: PipelineConsumer


def _make_products(variant: Variant, x: Context) -> Products:
    key, plan, dtype = variant.key, variant.plan, variant.dtype
    qk = primitives.make_umma(dtype, BLOCK_KV, OperandMajorMode.K, a_in_tmem=False)
    pv = primitives.make_umma(dtype, key.value_dim, OperandMajorMode.MN, a_in_tmem=True)
    qk_slice, pv_slice = qk.get_slice(0), pv.get_slice(0)
    s = qk.make_fragment_C(qk.partition_shape_C((ROWS, BLOCK_KV))).layout
    o = pv.make_fragment_C(pv.partition_shape_C((ROWS, key.value_dim))).layout
    p = pv.make_fragment_A(pv.partition_shape_A((ROWS, BLOCK_KV))).layout
    both = range(Q_TILES)
    start = {name: [plan.columns(f"{name}{i}").start for i in both] for name in "sop"}
    return Products(
        qk=qk,
        pv=pv,
        q=qk.make_fragment_A(qk_slice.partition_A(x.smem.q)),
        k=qk.make_fragment_B(qk_slice.partition_B(x.smem.k)),
        v=pv.make_fragment_B(pv_slice.partition_B(primitives.transposed(x.smem.v))),
        s=tuple(cute.make_tensor(x.tmem + start["s"][i], s) for i in both),
        p=tuple(
            cute.make_tensor(cute.recast_ptr(x.tmem + start["p"][i], dtype=dtype), p) for i in both
        ),
        o=tuple(cute.make_tensor(x.tmem + start["o"][i], o) for i in both),
    )


@cute.jit
def mma(variant: cutlass.Constexpr, x: Context, pipes: MmaPipes):
    """Issues all products: S0 S1, then (PV0 S0 PV1 S1) per block, then PV0 PV1. One warp.

    waits   q, kv full (load), p, p_rest full (softmax), scaled full (correct)
    signals s full (softmax), o full (correct), q, kv empty (load)
    """
    q, kv, o = pipes.q, pipes.kv, pipes.o
    s0, s1 = pipes.s
    answers0 = Answers(pipes.scaled[0], pipes.p[0], pipes.p_rest[0])
    answers1 = Answers(pipes.scaled[1], pipes.p[1], pipes.p_rest[1])
    products = _make_products(variant, x)
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        k_full = kv.wait_and_advance()
        q0_full = q.wait_and_advance()
        _multiply_qk(products, 0, k_full)
        s0.commit()
        q1_full = q.wait_and_advance()
        _multiply_qk(products, 1, k_full)
        s1.commit()
        k_full.release()
        steps = work.blocks.end - work.blocks.start - 1
        for i in cutlass.range(steps, unroll=1):
            v_full = kv.wait_and_advance()
            answers0 = _multiply_pv(products, 0, v_full, i > 0, answers0)
            k_full = kv.wait_and_advance()
            _multiply_qk(products, 0, k_full)
            s0.commit()
            answers1 = _multiply_pv(products, 1, v_full, i > 0, answers1)
            v_full.release()
            _multiply_qk(products, 1, k_full)
            s1.commit()
            k_full.release()
        q0_full.release()
        q1_full.release()
        v_full = kv.wait_and_advance()
        answers0 = _multiply_pv(products, 0, v_full, steps > 0, answers0)
        o.commit()
        o.advance()
        answers1 = _multiply_pv(products, 1, v_full, steps > 0, answers1)
        o.commit()
        o.advance()
        v_full.release()
        tile = tile_at(variant, x, tile.slot + 1)


@cute.jit
def _multiply_qk(products: Products, index: cutlass.Constexpr[int], k_full):
    """Issues S of one query tile."""
    q, k = products.q[None, None, None, index], products.k[None, None, None, k_full.index]
    acc, slabs = products.s[index], range(cute.size(q, mode=[2]))
    primitives.issue_umma(products.qk, acc, q, k, False, slabs)


@cute.jit
def _multiply_pv(
    products: Products,
    index: cutlass.Constexpr[int],
    v_full,
    accumulate: Boolean,
    answers: Answers,
) -> Answers:
    """Issues PV of one query tile: three quarters of the keys, then the others."""
    scaled, p, p_rest = answers
    pv, acc = products.pv, products.o[index]
    a, b = products.p[index], products.v[None, None, None, v_full.index]
    first = HANDED_OVER_FIRST * CHUNK // SLAB
    scaled.wait_and_advance()
    p.wait_and_advance()
    primitives.after_thread_sync()
    primitives.issue_umma(pv, acc, a, b, accumulate, range(first))
    p_rest.wait_and_advance()
    primitives.after_thread_sync()
    primitives.issue_umma(pv, acc, a, b, accumulate, range(first, BLOCK_KV // SLAB))
    return Answers(scaled, p, p_rest)


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
        _signal(stats_slot)
        tile = tile_at(variant, x, tile.slot + 1)
    stats.tail()


@cute.jit
def _signal(slot):
    """One arrival for this warp, after what all its lanes did."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        slot.commit()


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
    _signal(stats_slot)
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
    _signal(slot)
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


def stores_whole_tile(x: Context, work: Work, index: int) -> Boolean:
    """Whether all 128 rows are the sequence's, or lie behind the array's end, which TMA knows.

    Otherwise the rows of the next packed sequence are left alone, and no TMA store is issued.
    """
    end = work.span.first_row + (index + 1) * ROWS
    return (end <= work.span.q_slot) | (x.scalars.sequences.cu_seqlens_q.toint() == 0)


class StorePipes(NamedTuple):
    """The ends that the role store holds."""

    out: PipelineConsumer
    room: PipelineProducer


@cute.jit
def store(variant: cutlass.Constexpr, x: Context, pipes: StorePipes):
    """Writes finished tiles to global memory by TMA. One warp.

    waits   out full (correct)     signals out empty (correct), room full (load)
    """
    out, room = pipes
    if const_expr(out_overlays_q(variant.key)):
        _signal(room)
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        for i in cutlass.range_constexpr(Q_TILES):
            full = out.wait_and_advance()
            if const_expr(not variant.is_general):
                _store_tile(variant, x, work, i)
            elif stores_whole_tile(x, work, i):
                _store_tile(variant, x, work, i)
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            with cute.arch.elect_one():
                full.release()
        if const_expr(out_overlays_q(variant.key)):
            _signal(room)
        tile = tile_at(variant, x, tile.slot + 1)


@cute.jit
def _store_tile(variant: cutlass.Constexpr, x: Context, work: Work, index: cutlass.Constexpr[int]):
    """One query tile; TMA leaves out the rows behind the array's last."""
    rows = x.arrays.out[None, None, work.tile.q_head, work.tile.batch]
    rows = cute.domain_offset((work.span.q_start + work.span.first_row, 0), rows)
    gOut = cute.local_tile(rows, (ROWS, variant.key.value_dim), (None, 0))
    sOut, gOut = primitives.tma_views(x.tma.out, x.smem.out, gOut)
    cute.copy(x.tma.out, sOut[None, index], gOut[None, index])
    cute.arch.cp_async_bulk_commit_group()
