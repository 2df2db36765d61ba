"""Blackwell backward: the role compute, which turns S into P and dP into dS.

The schedule of all roles: ``bwd.py``. Roles, edges and memory: ``plan_bwd.py``.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.kernels import (
    backward_rows,
    dense_mask,
    dense_mask_columns,
    edges,
    primitives,
    softmax,
    tiles,
)
from jax_fa.kernels.backward_work import Step, Work, first_step, next_step, tile_at, work_on
from jax_fa.kernels.sm100 import bwd_pair, row_softmax, shell, umma
from jax_fa.kernels.sm100.bwd_work import (
    BackwardContext,
    BackwardVariant,
    first_key,
)
from jax_fa.spec.band_of_keys import row_range
from jax_fa.spec.division import WORD_KEYS

CHUNK = WORD_KEYS
"""Columns of S that a thread masks and turns into P at a time."""
DS_CHUNK = 16
"""Columns of dP that a thread turns into dS at a time; twice as many, beside 64 of P, spill."""
GRADIENT_COLUMNS = 16
"""Columns of dK or dV that a thread has in registers at a time."""
STATS_AT_ONCE = 4
"""Floats of a 16-byte access."""


class ComputePipes(NamedTuple):
    """The ends that the role compute holds."""

    s: PipelineConsumer
    p: PipelineProducer
    dp: PipelineConsumer
    ds: PipelineProducer
    stats: PipelineConsumer
    dv: PipelineConsumer
    dk: PipelineConsumer
    half: PipelineProducer | None = None  # only in a pair


class ComputeEnds(NamedTuple):
    """The ends of ``ComputePipes`` that advance with every query tile."""

    s: PipelineConsumer
    p: PipelineProducer
    dp: PipelineConsumer
    ds: PipelineProducer
    stats: PipelineConsumer


class Lane(NamedTuple):
    """The share of one thread: a key of the tile, and half the queries of each query tile.

    Attributes:
        row: the number of the key among this CTA's 128, and its lane of tensor memory.
        first_query: 0, or ``config.half_q``.
        s: loads of S, 32 columns at a time.
        p: stores of P, 32 columns at a time, two to a word.
        dp: loads of dP, 16 columns at a time.
        ds: stores of dS, 16 columns at a time, two to a word.
        ds_part: in a pair, the part of ``BackwardSmem.ds_parts`` that dS is written to.
        half: in a pair, the end of the edge by which dS is sent to the other CTA.
    """

    row: Int32
    first_query: Int32
    s: umma.TmemCopy
    p: umma.TmemCopy
    dp: umma.TmemCopy
    ds: umma.TmemCopy
    ds_part: Int32 | None = None
    half: PipelineProducer | None = None


def _make_lane(
    variant: BackwardVariant, x: BackwardContext, half_end: PipelineProducer | None
) -> Lane:
    """The share of this thread."""
    plan, half_q = variant.plan, variant.config.half_q
    thread = cute.arch.thread_idx()[0] - plan.role("compute").warps.start * edges.WARP
    half = cute.arch.make_warp_uniform(thread // edges.WARPGROUP)
    row, own = thread % edges.WARPGROUP, half * half_q
    s, dp = (umma.tmem_rows(x.tmem + own, plan.columns(name).start, half_q) for name in ("s", "dp"))
    p, ds = (_own_words(variant, x, name, half) for name in ("p", "ds"))
    return Lane(
        row,
        own,
        umma.tmem_load(s, CHUNK, row),
        umma.tmem_store(p, CHUNK // 2, row),
        umma.tmem_load(dp, DS_CHUNK, row),
        umma.tmem_store(ds, DS_CHUNK // 2, row),
        None if plan.ctas == 1 else bwd_pair.part_of_ds(variant, own),
        half_end,
    )


def _own_words(variant: BackwardVariant, x: BackwardContext, name: str, half: Int32) -> cute.Tensor:
    """The half ``half`` of P or dS in tensor memory."""
    first, second = (variant.plan.columns(f"{name}{i}") for i in range(2))
    own = x.tmem + half * (second.start - first.start)
    return umma.tmem_rows(own, first.start, first.cols)


@cute.jit
def compute(variant: cutlass.Constexpr, x: BackwardContext, pipes: ComputePipes):
    """Turns S into P and dP into dS for every query tile, then writes dK and dV. Eight warps.

    Each thread has one key, and half the queries of each query tile.

    waits   s, dp, dv, dk full (mma), stats full (load); in a pair, ds empty (mma)
    signals p, ds full, dv, dk empty (mma), stats empty (load); in a pair, half full (relay)
    """
    lane = _make_lane(variant, x, pipes.half)
    ends = ComputeEnds(pipes.s, pipes.p, pipes.dp, pipes.ds, pipes.stats)
    dv, dk = pipes.dv, pipes.dk
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        if const_expr(variant.config.sweeps == 1):
            ends = _sweep(variant, "p ds", x, lane, work, ends)
            dv = _write_gradient(variant, x, lane, work, "dv", dv)
        else:
            ends = _sweep(variant, "p", x, lane, work, ends)
            dv = _write_gradient(variant, x, lane, work, "dv", dv)
            ends = _sweep(variant, "ds", x, lane, work, ends)
        dk = _write_gradient(variant, x, lane, work, "dk", dk)
        tile = tile_at(variant, x, tile.slot + 1)
    if const_expr(variant.plan.ctas > 1):
        # HAZARD: the CTA may not end while the tensor core still has arrivals to make here.
        ends.ds.tail()


@cute.jit
def _sweep(
    variant: cutlass.Constexpr,
    made: cutlass.Constexpr[str],
    x: BackwardContext,
    lane: Lane,
    work: Work,
    ends: ComputeEnds,
) -> ComputeEnds:
    """Computes P ("p"), dS ("ds") or both ("p ds") of every query tile; returns advanced ends."""
    start, full_start, full_end, end = work.blocks
    leading = end - full_end if work.stride < 0 else full_start - start
    leading, full = leading * work.num_heads, (full_end - full_start) * work.num_heads
    if work.is_partial:
        leading, full = work.num_steps, Int32(0)
    if const_expr(variant.is_general):
        if dense_mask.is_present(x.scalars.mask):
            # It may hide any key: the first of the loops below, which masks, takes all blocks.
            leading, full = work.num_steps, Int32(0)
    at = first_step(work, Int32(0))
    # Separate loops: if one loop tested whether to mask each query tile, the compiler would issue
    # the instructions of the mask, predicated, for all of them.
    for _ in cutlass.range(leading, unroll=1):
        ends = _step(variant, made, True, x, lane, work, at, ends)
        at = next_step(variant, x, work, at)
    for _ in cutlass.range(full, unroll=1):
        ends = _step(variant, made, False, x, lane, work, at, ends)
        at = next_step(variant, x, work, at)
    if const_expr(variant.key.mask != "full"):
        for _ in cutlass.range(work.num_steps - leading - full, unroll=1):
            ends = _step(variant, made, True, x, lane, work, at, ends)
            at = next_step(variant, x, work, at)
    return ends


@cute.jit
def _step(
    variant: cutlass.Constexpr,
    made: cutlass.Constexpr[str],
    is_masked: cutlass.Constexpr[bool],
    x: BackwardContext,
    lane: Lane,
    work: Work,
    at: Step,
    ends: ComputeEnds,
) -> ComputeEnds:
    """Computes P, dS or both of a query tile, as ``_sweep`` does; returns advanced ends."""
    s, p, dp, ds, stats = ends
    half_q = variant.config.half_q
    rS = lane.s.whole_row()  # (half_q)
    stats_full = stats.wait_and_advance()
    s.wait_and_advance()
    umma.after_thread_sync()
    # In the first of two sweeps, S alternates between its own columns and those of dP.
    shift = 0
    if const_expr(made == "p"):
        shift = at.parity * (variant.plan.columns("dp").start - variant.plan.columns("s").start)
    cute.copy(lane.s.copy, _shifted(lane.s.tmem, shift), rS)
    cute.arch.fence_view_async_tmem_load()
    if const_expr(variant.p_moves):
        # HAZARD: P of the second warpgroup overwrites S of the first, which must have been read.
        umma.before_thread_sync()
        primitives.meet(variant, "read")
        umma.after_thread_sync()
    lse2 = x.smem.stats[None, 0, stats_full.index]
    for j in cutlass.range_constexpr(half_q // CHUNK):
        scores = rS[None, None, j]
        if const_expr(variant.key.has_soft_cap):
            softmax.cap(scores, x.scalars.cap_inner_log2)
        if const_expr(is_masked):
            _mask(variant, x, lane, scores, work, at, j * CHUNK)
        words = lane.p.piece()  # (16)
        stored = words if "p" in made else None
        _exponentiate(variant, x, lane, scores, lse2, j * CHUNK, stored)
        if const_expr("p" in made):
            cute.copy(lane.p.copy, words, _shifted(lane.p.tmem, shift)[None, None, j])
    if const_expr("p" in made):
        cute.arch.fence_view_async_tmem_store()
        umma.before_thread_sync()
        shell.signal(p)
        p.advance()
    if const_expr("ds" in made):
        delta = x.smem.stats[None, 1, stats_full.index]
        dp.wait_and_advance()
        umma.after_thread_sync()
        pieces: list = []
        factors = cute.make_tensor(rS.iterator, cute.make_layout((DS_CHUNK, half_q // DS_CHUNK)))
        for j in cutlass.range_constexpr(half_q // DS_CHUNK):
            rDp = lane.dp.piece()  # (16)
            cute.copy(lane.dp.copy, lane.dp.tmem[None, None, j], rDp)
            cute.arch.fence_view_async_tmem_load()
            words = _differentiate(variant, lane, factors[None, j], rDp, delta, j * DS_CHUNK)
            cute.copy(lane.ds.copy, words, lane.ds.tmem[None, None, j])
            rounded = cute.recast_tensor(words, variant.dtype)
            if const_expr(variant.plan.ctas == 1):
                first = lane.first_query + j * DS_CHUNK
                umma.copy_row(rounded, x.smem.ds[lane.row, None], first)
            else:
                pieces.append(rounded)
        if const_expr(variant.plan.ctas > 1):
            ds.acquire()
            for j in cutlass.range_constexpr(len(pieces)):
                row = x.smem.ds_parts[lane.row, None, lane.ds_part]
                umma.copy_row(pieces[j], row, j * DS_CHUNK)
        # HAZARD: dS in smem was written through the generic proxy, but the tensor core reads it
        # through the async proxy; stores to tensor memory are not complete until waited for.
        cute.arch.fence_view_async_shared()
        cute.arch.fence_view_async_tmem_store()
        umma.before_thread_sync()
        shell.signal(ds)
        if const_expr(variant.plan.ctas > 1):
            ds.advance()
            bwd_pair.send_ds(variant, x, lane.ds_part, lane.half)
    stats_full.release()
    return ComputeEnds(s, p, dp, ds, stats)


def _shifted(tensor: cute.Tensor, columns: Int32 | int) -> cute.Tensor:
    """``tensor``, a view of tensor memory, moved by ``columns`` columns."""
    if isinstance(columns, int) and columns == 0:
        return tensor
    return cute.make_tensor(tensor.iterator + columns, tensor.layout)


def _four_stats(lane: Lane, stats: cute.Tensor, first: int) -> cute.Tensor:
    """Statistics of four of this thread's queries; all lanes of a warp read the same four."""
    four = cute.make_rmem_tensor((STATS_AT_ONCE,), Float32)
    place = lane.first_query // STATS_AT_ONCE + first // STATS_AT_ONCE
    cute.autovec_copy(cute.local_tile(stats, (STATS_AT_ONCE,), (place,)), four)
    return four


@cute.jit
def _exponentiate(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    lane: Lane,
    scores: cute.Tensor,
    lse2: cute.Tensor,
    first: int,
    words: cute.Tensor | None,
):
    """Computes P of 32 queries from ``first`` on, into ``words`` for tensor memory if given.

    Replaces ``scores`` by the factor of dP - delta: P, times the slope of the cap if there is one.
    """
    p = cute.make_rmem_tensor((CHUNK,), Float32)
    scale = (-x.scalars.score_log2, -x.scalars.score_log2)
    for i in cutlass.range_constexpr(0, CHUNK, STATS_AT_ONCE):
        four = _four_stats(lane, lse2, first + i)
        for pair in cutlass.range_constexpr(0, STATS_AT_ONCE, 2):
            j = i + pair
            logits = (scores[j], scores[j + 1])
            y0, y1 = cute.arch.fma_packed_f32x2(logits, scale, (four[pair], four[pair + 1]))
            p[j] = cute.math.exp2(-y0, fastmath=True)
            p[j + 1] = cute.math.exp2(-y1, fastmath=True)
    if const_expr(words is not None):
        primitives.narrow(p, cute.recast_tensor(words, variant.dtype))
    for i in cutlass.range_constexpr(CHUNK):
        if const_expr(variant.key.has_soft_cap):
            # Masked scores are -inf here: their slope has to be 0, since 0 * inf is NaN.
            slope = cute.arch.fmax(1.0 - scores[i] * scores[i], 0.0)
            scores[i] = p[i] * slope
        else:
            scores[i] = p[i]


@cute.jit
def _differentiate(
    variant: cutlass.Constexpr,
    lane: Lane,
    factors: cute.Tensor,
    dp: cute.Tensor,
    delta: cute.Tensor,
    first: int,
) -> cute.Tensor:
    """Returns the words of dS = P (dP - delta) of 16 queries from ``first`` on."""
    words = lane.ds.piece()  # (8)
    for i in cutlass.range_constexpr(0, DS_CHUNK, STATS_AT_ONCE):
        four = _four_stats(lane, delta, first + i)
        for pair in cutlass.range_constexpr(0, STATS_AT_ONCE, 2):
            j = i + pair
            difference = cute.arch.sub_packed_f32x2(
                (dp[j], dp[j + 1]), (four[pair], four[pair + 1]), rnd="rn"
            )
            dp[j], dp[j + 1] = cute.arch.mul_packed_f32x2(difference, (factors[j], factors[j + 1]))
    primitives.narrow(dp, cute.recast_tensor(words, variant.dtype))
    return words


@cute.jit
def _mask(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    lane: Lane,
    scores: cute.Tensor,
    work: Work,
    at: Step,
    first: int,
):
    """Hides this thread's key from each of 32 queries, from ``first`` on, that may not see it."""
    window = work.window
    number = first_key(variant, work.tile) + lane.row
    first_row = at.q_block * variant.config.block_q + lane.first_query + first
    rows = row_range(window, number, tiles.EXTREMES)
    end = rows.hi if number < window.kv_len else 0
    bits = row_softmax.visible_bits(tiles.Stretch(rows.lo - first_row, end - first_row), 0)
    if const_expr(variant.is_general):
        if tiles.is_present(x.scalars.q_segments):
            present = cutlass.min(number, window.kv_len - 1)
            present += work.tile.batch * x.scalars.sequences.rows.own + work.kv_start
            segment = tiles.element(x.scalars.kv_segments, present)
            # Ids beyond the last query may not be read; such queries see nothing anyway.
            query = cutlass.min(first_row, window.q_len - 1)
            ids = work.tile.batch * x.scalars.sequences.rows.swept + work.q_start + query
            ids, last = x.scalars.q_segments + ids, window.q_len - 1 - query
            bits = bits & row_softmax.same_segment_bits(segment, ids, last)
        if dense_mask.is_present(x.scalars.mask):
            if dense_mask.hides(x.smem.found, at.q_block):
                row = cutlass.min(first_row + cute.arch.lane_idx(), window.q_len - 1)
                row = dense_mask.row_of(x.scalars.mask, work.tile.batch, at.head, row)
                bits = bits & dense_mask_columns.column_bits(x.scalars.mask, row, number)
    row_softmax.mask_by_bits(scores, bits, 0)


@cute.jit
def _write_gradient(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    lane: Lane,
    work: Work,
    name: cutlass.Constexpr[str],
    end: PipelineConsumer,
) -> PipelineConsumer:
    """Writes this thread's half of its key's row of "dk" or "dv", or of a part's sums for it.

    Returns the advanced ``end`` of the edge ``name``.
    """
    columns = variant.plan.columns(name)
    own = columns.cols // 2
    half = lane.first_query // variant.config.half_q
    tGradient = umma.tmem_rows(x.tmem + half * own, columns.start, own)
    loads = umma.tmem_load(tGradient, GRADIENT_COLUMNS, lane.row)
    if work.num_steps > 0:
        end.wait()
        umma.after_thread_sync()
    for j in cutlass.range_constexpr(own // GRADIENT_COLUMNS):
        rGradient = loads.piece()  # (16)
        if work.num_steps > 0:
            cute.copy(loads.copy, loads.tmem[None, None, j], rGradient)
            cute.arch.fence_view_async_tmem_load()
        else:
            rGradient.fill(0.0)
        if const_expr(name == "dk"):
            for i in cutlass.range_constexpr(GRADIENT_COLUMNS):
                rGradient[i] = rGradient[i] * x.scalars.scale
        first = half * own + j * GRADIENT_COLUMNS
        _put_gradient(variant, x, lane, work, name, rGradient, first)
    if work.num_steps > 0:
        umma.before_thread_sync()
        if const_expr(variant.config.sweeps == 1):
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                end.release()
        end.advance()
    return end


@cute.jit
def _put_gradient(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    lane: Lane,
    work: Work,
    name: cutlass.Constexpr[str],
    values: cute.Tensor,
    first: Int32,
):
    """Writes ``values`` to columns of a key's row, from column ``first`` on."""
    array = x.arrays.dk if const_expr(name == "dk") else x.arrays.dv
    number, left = first_key(variant, work.tile) + lane.row, cute.size(array, mode=[1]) - first
    if number < work.kv_slot:
        place = (work.kv_start + number, None, work.tile.kv_head, work.tile.batch)
        if x.scalars.splits == 1:
            rounded = cute.make_rmem_tensor((GRADIENT_COLUMNS,), variant.dtype)
            primitives.narrow(values, rounded)
            _write(backward_rows.address_of(array[place]) + first * 2, rounded, left)
        else:
            part = (work.tile.head % x.scalars.splits).to(Int64)
            sums = x.scratch.dkv_sums + part * backward_rows.dkv_elements(x.arrays)
            if const_expr(name == "dv"):
                sums = sums + cute.size(x.arrays.dk.shape)
            row = backward_rows.like(array, sums)[place]
            _write(backward_rows.address_of(row) + first * 4, values, left)


@cute.jit
def _write(address: Int64, values: cute.Tensor, num_columns: Int32):
    """Stores registers to at most ``num_columns`` of global memory, 16 bytes at a time."""
    count = backward_rows.VECTOR_BYTES * 8 // values.element_type.width
    for i in cutlass.range_constexpr(cute.size(values) // count):
        place = address + i * backward_rows.VECTOR_BYTES
        if i * count < num_columns:
            target = backward_rows.vector_at(values.element_type, place, backward_rows.VECTOR_BYTES)
            for j in cutlass.range_constexpr(count):
                target[j] = values[i * count + j]
