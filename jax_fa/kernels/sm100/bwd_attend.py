"""Blackwell backward: the role attend, which turns S into P and dP into dS. ``bwd.py`` pictures it.

Roles, edges and memory: ``plan_bwd.py``.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.band import row_range
from jax_fa.kernels import backward_rows, edges, primitives, softmax, tiles
from jax_fa.kernels.backward_work import Work, first_step, following, tile_at, work_on
from jax_fa.kernels.sm100 import bwd_pair
from jax_fa.kernels.sm100.bwd_work import Context, Variant, first_key

CHUNK = softmax.WORD
"""Columns of S that a thread masks and turns into P at a time."""
DS_CHUNK = 16
"""Columns of dP that a thread turns into dS at a time; twice as many spill, beside 64 of P."""
GRADIENT_COLUMNS = 16
"""Columns of dK or dV that a thread has in registers at a time."""
STATS_AT_ONCE = 4
"""Floats of a 16-byte access."""


class AttendPipes(NamedTuple):
    """The ends that the role attend holds."""

    s: PipelineConsumer
    p: PipelineProducer
    dp: PipelineConsumer
    ds: PipelineProducer
    stats: PipelineConsumer
    dv: PipelineConsumer
    dk: PipelineConsumer
    half: PipelineProducer | None = None  # of a pair


class Ends(NamedTuple):
    """Those of ``AttendPipes`` that advance with every query tile."""

    s: PipelineConsumer
    p: PipelineProducer
    dp: PipelineConsumer
    ds: PipelineProducer
    stats: PipelineConsumer


class Key(NamedTuple):
    """What one thread knows of its key, or rather of the key and half the queries of each tile.

    Attributes:
        row: of the tile; a lane of tensor memory.
        first_query: 0, or ``config.half_q``.
        s, dp: loads of 32 and of 16 columns at a time.
        p, ds: stores of as many, two to a word.
        place: in a pair, which of ``Smem.ds_parts`` takes dS.
    """

    row: Int32
    first_query: Int32
    s: primitives.TmemCopy
    p: primitives.TmemCopy
    dp: primitives.TmemCopy
    ds: primitives.TmemCopy
    place: Int32 | None = None


def _make_key(variant: Variant, x: Context) -> Key:
    plan, half_q = variant.plan, variant.config.half_q
    thread = cute.arch.thread_idx()[0] - plan.role("attend").warps.start * edges.WARP
    half = cute.arch.make_warp_uniform(thread // edges.WARPGROUP)
    row, own = thread % edges.WARPGROUP, half * half_q
    s, dp = (
        primitives.tmem_rows(x.tmem + own, plan.columns(name).start, half_q) for name in ("s", "dp")
    )
    p, ds = (_own_words(variant, x, name, half) for name in ("p", "ds"))
    return Key(
        row,
        own,
        primitives.tmem_load(s, CHUNK, row),
        primitives.tmem_store(p, CHUNK // 2, row),
        primitives.tmem_load(dp, DS_CHUNK, row),
        primitives.tmem_store(ds, DS_CHUNK // 2, row),
        None if plan.ctas == 1 else bwd_pair.place_of_ds(variant, own),
    )


def _own_words(variant: Variant, x: Context, name: str, half: Int32) -> cute.Tensor:
    """A half of P or dS in tensor memory."""
    first, second = (variant.plan.columns(f"{name}{i}") for i in range(2))
    own = x.tmem + half * (second.start - first.start)
    return primitives.tmem_rows(own, first.start, first.cols)


@cute.jit
def attend(variant: cutlass.Constexpr, x: Context, pipes: AttendPipes):
    """S -> P, dP -> dS of every query tile; at the end writes dK, dV. Eight warps.

    A thread has one key, and half the queries of each tile.

    waits   s, dp, dv, dk full (mma), stats full (load)
    signals p, ds full, dv, dk empty (mma), stats empty (load)
    """
    key = _make_key(variant, x)
    ends = Ends(pipes.s, pipes.p, pipes.dp, pipes.ds, pipes.stats)
    dv, dk = pipes.dv, pipes.dk
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        if const_expr(variant.config.sweeps == 1):
            ends = _sweep(variant, "p ds", x, key, work, (pipes, ends))
            dv = _write_gradient(variant, x, key, (work, "dv"), dv)
        else:
            ends = _sweep(variant, "p", x, key, work, (pipes, ends))
            dv = _write_gradient(variant, x, key, (work, "dv"), dv)
            ends = _sweep(variant, "ds", x, key, work, (pipes, ends))
        dk = _write_gradient(variant, x, key, (work, "dk"), dk)
        tile = tile_at(variant, x, tile.slot + 1)
    if const_expr(variant.plan.ctas > 1):
        # HAZARD: the CTA may not end while the tensor core still has arrivals to make here.
        ends.ds.tail()


@cute.jit
def _sweep(
    variant: cutlass.Constexpr,
    made: cutlass.Constexpr[str],
    x: Context,
    key: Key,
    work: Work,
    ends: tuple,
) -> Ends:
    """Attends to every query tile; ``made`` says what for, "p", "ds" or both: "p ds".

    ``ends`` is (pipes, their ends that advance); returns the latter, advanced.
    """
    pipes, held = ends
    start, full_start, full_end, end = work.blocks
    leading = end - full_end if work.stride < 0 else full_start - start
    leading, full = leading * work.num_heads, (full_end - full_start) * work.num_heads
    if work.is_partial:
        leading, full = work.num_steps, Int32(0)
    if const_expr(variant.key.mask_mod is not None):
        # Its blocks are all masked, and of the loops below it has the first alone.
        leading = work.num_steps
    at = first_step(work, Int32(0))
    # Loops of their own: if one loop asked each tile whether to mask it, the compiler would issue
    # the instructions of the mask under a predicate for all of them.
    for _ in cutlass.range(leading, unroll=1):
        held = _step(variant, (made, True), x, key, (work, at), (pipes, held))
        at = following(work, at)
    if const_expr(variant.key.mask_mod is None):
        for _ in cutlass.range(full, unroll=1):
            held = _step(variant, (made, False), x, key, (work, at), (pipes, held))
            at = following(work, at)
    if const_expr(variant.key.mask != "full" and variant.key.mask_mod is None):
        for _ in cutlass.range(work.num_steps - leading - full, unroll=1):
            held = _step(variant, (made, True), x, key, (work, at), (pipes, held))
            at = following(work, at)
    return held


@cute.jit
def _signal(slot):
    """One arrival for this warp, after what all its lanes did."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        slot.commit()


@cute.jit
def _step(
    variant: cutlass.Constexpr,
    kind: cutlass.Constexpr[tuple],
    x: Context,
    key: Key,
    where: tuple,
    ends: tuple,
) -> Ends:
    """P and dS of a query tile, or one of them; returns the advanced ends.

    ``kind`` is (what is made, as for ``_sweep``; whether keys are masked), ``where`` (work, step),
    ``ends`` (pipes, their ends that advance).
    """
    made, is_masked = kind
    work, at = where
    pipes, (s, p, dp, ds, stats) = ends
    half_q = variant.config.half_q
    rS = key.s.whole_row()  # (half_q)
    stats_full = stats.wait_and_advance()
    s.wait_and_advance()
    primitives.after_thread_sync()
    # In the first of two sweeps, S takes its own columns and those of dP in turn.
    shift = 0
    if const_expr(made == "p"):
        shift = at.parity * (variant.plan.columns("dp").start - variant.plan.columns("s").start)
    cute.copy(key.s.copy, _shifted(key.s.tmem, shift), rS)
    cute.arch.fence_view_async_tmem_load()
    if const_expr(variant.p_moves):
        # HAZARD: P of the second warpgroup goes where S of the first one was.
        read = variant.plan.barrier("read")
        primitives.before_thread_sync()
        cute.arch.barrier(barrier_id=read.index, number_of_threads=read.threads)
        primitives.after_thread_sync()
    lse2 = x.smem.stats[None, 0, stats_full.index]
    for j in cutlass.range_constexpr(half_q // CHUNK):
        scores = rS[None, None, j]
        if const_expr(variant.key.has_soft_cap):
            softmax.cap(scores, x.scalars.cap_inner_log2)
        if const_expr(is_masked):
            _mask(variant, x, key, scores, work, (at, j * CHUNK))
        words = key.p.piece()  # (16)
        _exponentiate(variant, x, key, scores, (lse2, j * CHUNK), words if "p" in made else None)
        if const_expr("p" in made):
            cute.copy(key.p.copy, words, _shifted(key.p.tmem, shift)[None, None, j])
    if const_expr("p" in made):
        cute.arch.fence_view_async_tmem_store()
        primitives.before_thread_sync()
        _signal(p)
        p.advance()
    if const_expr("ds" in made):
        delta = x.smem.stats[None, 1, stats_full.index]
        dp.wait_and_advance()
        primitives.after_thread_sync()
        pieces: list = []
        factors = cute.make_tensor(rS.iterator, cute.make_layout((DS_CHUNK, half_q // DS_CHUNK)))
        for j in cutlass.range_constexpr(half_q // DS_CHUNK):
            rDp = key.dp.piece()  # (16)
            cute.copy(key.dp.copy, key.dp.tmem[None, None, j], rDp)
            cute.arch.fence_view_async_tmem_load()
            words = _differentiate(variant, key, factors[None, j], rDp, (delta, j * DS_CHUNK))
            cute.copy(key.ds.copy, words, key.ds.tmem[None, None, j])
            rounded = cute.recast_tensor(words, variant.dtype)
            if const_expr(variant.plan.ctas == 1):
                first = key.first_query + j * DS_CHUNK
                primitives.copy_row(rounded, x.smem.ds[key.row, None], first)
            else:
                pieces.append(rounded)
        if const_expr(variant.plan.ctas > 1):
            ds.acquire()
            for j in cutlass.range_constexpr(len(pieces)):
                row = x.smem.ds_parts[key.row, None, key.place]
                primitives.copy_row(pieces[j], row, j * DS_CHUNK)
        # HAZARD: dS in smem was written through the generic proxy, the tensor core reads through
        # the async one; in tensor memory, stores are not complete until waited for.
        cute.arch.fence_view_async_shared()
        cute.arch.fence_view_async_tmem_store()
        primitives.before_thread_sync()
        _signal(ds)
        if const_expr(variant.plan.ctas > 1):
            ds.advance()
            bwd_pair.send_ds(variant, x, key.place, pipes.half)
    stats_full.release()
    return Ends(s, p, dp, ds, stats)


def _shifted(tensor: cute.Tensor, columns: Int32 | int) -> cute.Tensor:
    """``tensor``, which is in tensor memory, some columns further on."""
    if isinstance(columns, int) and columns == 0:
        return tensor
    return cute.make_tensor(tensor.iterator + columns, tensor.layout)


def _four_stats(key: Key, stats: cute.Tensor, first: int) -> cute.Tensor:
    """Statistics of four of this thread's queries; all lanes of a warp read the same."""
    four = cute.make_rmem_tensor((STATS_AT_ONCE,), Float32)
    place = key.first_query // STATS_AT_ONCE + first // STATS_AT_ONCE
    cute.autovec_copy(cute.local_tile(stats, (STATS_AT_ONCE,), (place,)), four)
    return four


@cute.jit
def _exponentiate(
    variant: cutlass.Constexpr,
    x: Context,
    key: Key,
    scores: cute.Tensor,
    stats: tuple,
    words: cute.Tensor | None,
):
    """P of 32 queries, into ``words`` for tensor memory; leaves what dP is multiplied by.

    That is, in ``scores``, P and, where scores are capped, the slope of the cap. ``stats`` is (lse2
    of all queries, first of the 32 queries).
    """
    lse2, first = stats
    p = cute.make_rmem_tensor((CHUNK,), Float32)
    scale = (-x.scalars.score_log2, -x.scalars.score_log2)
    for i in cutlass.range_constexpr(0, CHUNK, STATS_AT_ONCE):
        four = _four_stats(key, lse2, first + i)
        for pair in cutlass.range_constexpr(0, STATS_AT_ONCE, 2):
            at = i + pair
            logits = (scores[at], scores[at + 1])
            y0, y1 = cute.arch.fma_packed_f32x2(logits, scale, (four[pair], four[pair + 1]))
            p[at] = cute.math.exp2(-y0, fastmath=True)
            p[at + 1] = cute.math.exp2(-y1, fastmath=True)
    if const_expr(words is not None):
        primitives.narrow(p, cute.recast_tensor(words, variant.dtype))
    for i in cutlass.range_constexpr(CHUNK):
        if const_expr(variant.key.has_soft_cap):
            # Masked scores are -inf here: their slope is to be 0, for 0 * inf is not.
            slope = cute.arch.fmax(1.0 - scores[i] * scores[i], 0.0)
            scores[i] = p[i] * slope
        else:
            scores[i] = p[i]


@cute.jit
def _differentiate(
    variant: cutlass.Constexpr, key: Key, factors: cute.Tensor, dp: cute.Tensor, stats: tuple
) -> cute.Tensor:
    """Words of dS = P (dP - delta) of 16 queries; ``stats`` is (delta of all, first of the 16)."""
    delta, first = stats
    words = key.ds.piece()  # (8)
    for i in cutlass.range_constexpr(0, DS_CHUNK, STATS_AT_ONCE):
        four = _four_stats(key, delta, first + i)
        for pair in cutlass.range_constexpr(0, STATS_AT_ONCE, 2):
            at = i + pair
            difference = cute.arch.sub_packed_f32x2(
                (dp[at], dp[at + 1]), (four[pair], four[pair + 1]), rnd="rn"
            )
            dp[at], dp[at + 1] = cute.arch.mul_packed_f32x2(
                difference, (factors[at], factors[at + 1])
            )
    primitives.narrow(dp, cute.recast_tensor(words, variant.dtype))
    return words


@cute.jit
def _mask(
    variant: cutlass.Constexpr,
    x: Context,
    key: Key,
    scores: cute.Tensor,
    work: Work,
    where: tuple,
):
    """Hides this thread's key from those of 32 queries that may not see it.

    ``where`` is (step, first of the 32 queries).
    """
    window = work.window
    at, first = where
    number = first_key(variant, work.tile) + key.row
    first_row = at.q_block * variant.config.block_q + key.first_query + first
    rows = row_range(window, number, minimum=cutlass.min, maximum=cutlass.max)
    end = rows.hi if number < window.kv_len else 0
    bits = softmax.visible_bits(softmax.Visible(rows.lo - first_row, end - first_row), 0)
    if const_expr(variant.is_general):
        if tiles.is_present(x.scalars.q_segments):
            present = cutlass.min(number, window.kv_len - 1)
            present += work.tile.batch * x.scalars.keys.q_len + work.kv_start
            segment = tiles.element(x.scalars.kv_segments, present)
            # Beyond the last query nothing may be read; those are invisible anyway.
            query = cutlass.min(first_row, window.q_len - 1)
            ids = work.tile.batch * x.scalars.keys.kv_len + work.q_start + query
            ids, last = x.scalars.q_segments + ids, window.q_len - 1 - query
            bits = bits & softmax.same_segment_bits(segment, ids, last)
    if const_expr(variant.key.mask_mod is not None):
        pair = (first_row + window.shift, number)
        bits = bits & softmax.bits_by_function(variant.key.mask_mod, pair, (1, 0))
    softmax.mask_by_bits(scores, bits, 0)


@cute.jit
def _write_gradient(
    variant: cutlass.Constexpr,
    x: Context,
    key: Key,
    what: tuple,
    end: PipelineConsumer,
) -> PipelineConsumer:
    """Writes this thread's half of its key's row of dK or dV, or of a part of a group's share.

    ``what`` is (work, "dk" or "dv"); returns the advanced ``end`` of that edge.
    """
    work, name = what
    columns = variant.plan.columns(name)
    own = columns.cols // 2
    half = key.first_query // variant.config.half_q
    tGradient = primitives.tmem_rows(x.tmem + half * own, columns.start, own)
    loads = primitives.tmem_load(tGradient, GRADIENT_COLUMNS, key.row)
    if work.num_steps > 0:
        end.wait()
        primitives.after_thread_sync()
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
        _put_gradient(variant, x, key, what, (rGradient, half * own + j * GRADIENT_COLUMNS))
    if work.num_steps > 0:
        primitives.before_thread_sync()
        if const_expr(variant.config.sweeps == 1):
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                end.release()
        end.advance()
    return end


@cute.jit
def _put_gradient(variant: cutlass.Constexpr, x: Context, key: Key, what: tuple, piece: tuple):
    """Writes some columns of a key's row; ``piece`` is (values, first column)."""
    work, name = what
    values, first = piece
    array = x.arrays.dk if const_expr(name == "dk") else x.arrays.dv
    number = first_key(variant, work.tile) + key.row
    if number < work.kv_slot:
        at = (work.kv_start + number, None, work.tile.kv_head, work.tile.batch)
        if x.scalars.splits == 1:
            rounded = cute.make_rmem_tensor((GRADIENT_COLUMNS,), variant.dtype)
            primitives.narrow(values, rounded)
            _write(backward_rows.address_of(array[at]) + first * 2, rounded)
        else:
            part = (work.tile.q_head % x.scalars.splits).to(Int64)
            sums = x.scratch.dkv_sums + part * backward_rows.dkv_elements(x.arrays)
            if const_expr(name == "dv"):
                sums = sums + cute.size(x.arrays.dk.shape)
            row = backward_rows.like(array, sums)[at]
            _write(backward_rows.address_of(row) + first * 4, values)


@cute.jit
def _write(address: Int64, values: cute.Tensor):
    """Stores registers to global memory, 16 bytes at a time."""
    count = backward_rows.VECTOR_BYTES * 8 // values.element_type.width
    for i in cutlass.range_constexpr(cute.size(values) // count):
        place = address + i * backward_rows.VECTOR_BYTES
        target = backward_rows.vector_at(values.element_type, place, backward_rows.VECTOR_BYTES)
        for j in cutlass.range_constexpr(count):
            target[j] = values[i * count + j]
