"""Blackwell backward: its roles as data flows, load, mma, add; attend is in ``bwd_attend.py``.

Every role walks the same tiles and query tiles in the same order by itself. Roles, edges and
memory: ``plan_bwd.py``.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.kernels import backward_rows, edges, primitives
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
from jax_fa.kernels.sm100.bwd_work import (
    Context,
    Product,
    Products,
    make_products,
    place_of_dq,
    slot_of,
)
from jax_fa.kernels.sm100.plan_bwd import ADD_STAGES, ADD_WARPS, ROWS, dq_overlays

LOAD_COLUMNS = 32
"""Columns of dQ that a thread loads at a time."""
MOST_DQ_COLUMNS = 128
"""Columns of dQ that the role add has room for in registers."""


class LoadPipes(NamedTuple):
    """The ends that the role load holds."""

    k: PipelineProducer
    v: PipelineProducer
    q: PipelineProducer
    dout: PipelineProducer
    stats: PipelineProducer


@cute.jit
def load(variant: cutlass.Constexpr, x: Context, pipes: LoadPipes):
    """Fetches a tile's keys and values, and all that passes by them. One warp.

    signals k, v, q, dout full (mma), stats full (attend)     waits   all of them empty
    """
    k, v, q, dout, stats = pipes
    phase = Int32(0)
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        if work.num_steps > 0:
            at = first_step(work, Int32(0))
            slot = k.acquire_and_advance()
            phase = load_keys(variant, (x, x.tma.k, x.arrays.k, x.smem.k), work, slot, phase)
            q, stats, phase = load_queries(variant, x, work, at, (q, stats, phase))
            slot = v.acquire_and_advance()
            phase = load_keys(variant, (x, x.tma.v, x.arrays.v, x.smem.v), work, slot, phase)
            dout, phase = load_douts(variant, x, work, at, (dout, phase))
            for _ in cutlass.range(work.num_steps - 1, unroll=1):
                at = following(work, at)
                q, stats, phase = load_queries(variant, x, work, at, (q, stats, phase))
                dout, phase = load_douts(variant, x, work, at, (dout, phase))
        tile = tile_at(variant, x, tile.slot + 1)
    # HAZARD: the CTA may not end while the tensor core still has arrivals to make here.
    k.tail()
    v.tail()
    q.tail()
    dout.tail()


@cute.jit
def load_keys(variant: cutlass.Constexpr, copied: tuple, work: Work, slot, phase: Int32) -> Int32:
    """The tile's keys, or values; ``copied`` is (x, TMA, array, smem). Returns scrub's phase."""
    x, tma, array, smem = copied
    rows = array[None, None, work.tile.kv_head, work.tile.batch]
    rows = cute.domain_offset((work.kv_start, 0), rows)
    block = work.tile.q_block
    used = work.window.kv_len - block * ROWS
    return _load_rows(variant, (x, tma, rows, smem), (block, used), slot, phase)


@cute.jit
def load_queries(
    variant: cutlass.Constexpr, x: Context, work: Work, at: Step, ends: tuple
) -> tuple:
    """Queries, and the statistics of their rows; ``ends`` are (q, stats, scrub's phase)."""
    q, stats, phase = ends
    slot = q.acquire_and_advance()
    smem = x.smem.q[None, None, slot.index]
    phase = load_query_rows(variant, (x, x.tma.q, x.arrays.q, smem), (work, at), slot, phase)
    slot = stats.acquire_and_advance()
    row = work.scratch_row + at.q_block * variant.config.block_q
    for i, array in enumerate((x.scratch.lse2, x.scratch.delta)):
        source = cute.domain_offset((row,), array[None, at.head])
        primitives.bulk_load(source, x.smem.stats[None, i, slot.index], slot.barrier)
    return q, stats, phase


@cute.jit
def load_douts(variant: cutlass.Constexpr, x: Context, work: Work, at: Step, ends: tuple) -> tuple:
    """Rows of dO; ``ends`` are (dout, scrub's phase)."""
    dout, phase = ends
    slot = dout.acquire_and_advance()
    smem = x.smem.dout[None, None, slot.index]
    copied = (x, x.tma.dout, x.arrays.dout, smem)
    phase = load_query_rows(variant, copied, (work, at), slot, phase)
    return dout, phase


@cute.jit
def load_query_rows(
    variant: cutlass.Constexpr, copied: tuple, where: tuple, slot, phase: Int32
) -> Int32:
    """A query tile of one head; ``copied`` is (x, TMA, array, smem), ``where`` (work, step)."""
    x, tma, array, smem = copied
    work, at = where
    rows = cute.domain_offset((work.q_start, 0), array[None, None, at.head, work.tile.batch])
    used = work.window.q_len - at.q_block * variant.config.block_q
    return _load_rows(variant, (x, tma, rows, smem), (at.q_block, used), slot, phase)


@cute.jit
def _load_rows(variant: cutlass.Constexpr, copied: tuple, at: tuple, slot, phase: Int32) -> Int32:
    """A tile's rows; those that the sequence does not use become zero.

    Their P and dS are 0, but 0 * NaN is not. Behind the array's last row TMA fills with zeros by
    itself; what lies between goes over a barrier of its own, for the last rows of a sequence.

    Args:
        variant: the variant.
        copied: (x, TMA, rows of the sequence, tile in smem).
        at: number of the tile, and how many of its rows are used.
        slot: of the edge that announces them.
        phase: of the barrier ``scrub``.

    Returns:
        The phase of the barrier ``scrub`` then.
    """
    x, tma, rows, smem = copied
    block, used = at
    height, width = (cute.size(smem, mode=[i]) for i in range(2))
    tiled = cute.local_tile(rows, (height, width), (None, 0))
    target, source = primitives.tma_views(tma, smem, tiled)
    if const_expr(not variant.is_general):
        cute.copy(tma, source[None, block], target, tma_bar_ptr=slot.barrier)
    else:
        if used >= height:
            cute.copy(tma, source[None, block], target, tma_bar_ptr=slot.barrier)
        else:
            size_bytes = height * width * variant.dtype.width // 8
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(x.smem.scrub, size_bytes)
            cute.copy(tma, source[None, block], target, tma_bar_ptr=x.smem.scrub)
            cute.arch.mbarrier_wait(x.smem.scrub, phase)
            phase = phase ^ 1
            primitives.scrub_rows(smem, used)
            with cute.arch.elect_one():
                primitives.complete_tx(slot.barrier, size_bytes)
    return phase


class MmaPipes(NamedTuple):
    """The ends that the role mma holds."""

    k: PipelineConsumer
    v: PipelineConsumer
    q: PipelineConsumer
    dout: PipelineConsumer
    s: PipelineProducer
    p: PipelineConsumer
    dp: PipelineProducer
    ds: PipelineConsumer
    dq: PipelineProducer
    dv: PipelineProducer
    dk: PipelineProducer


@cute.jit
def mma(variant: cutlass.Constexpr, x: Context, pipes: MmaPipes):
    """Issues all products of every query tile. One warp.

    waits   k, v, q, dout full (load), p, ds full, dv, dk empty (attend), dq empty (add)
    signals s, dp, dv, dk full (attend), dq full (add), k, v, q, dout empty (load)
    """
    k, dv, dk = pipes.k, pipes.dv, pipes.dk
    ends = Ends(pipes.v, pipes.q, pipes.dout, pipes.p, pipes.ds, pipes.dq)
    products = make_products(variant, x)
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        if work.num_steps > 0:
            k_full = k.wait_and_advance()
            here = pipes._replace(dv=dv, dk=dk)
            if const_expr(dq_overlays(variant.key) == "s"):
                ends = _sweep_in_turn(variant, products, here, work.num_steps, ends)
            else:
                ends = _sweep(variant, products, here, work.num_steps, ends)
            k_full.release()
            dv.advance()
            dk.commit()
            dk.advance()
        tile = tile_at(variant, x, tile.slot + 1)


class Ends(NamedTuple):
    """Those of ``MmaPipes`` that advance with every query tile, and v."""

    v: PipelineConsumer
    q: PipelineConsumer
    dout: PipelineConsumer
    p: PipelineConsumer
    ds: PipelineConsumer
    dq: PipelineProducer


@cute.jit
def _sweep(
    variant: cutlass.Constexpr, products: Products, pipes: MmaPipes, num_steps: Int32, ends: Ends
) -> Ends:
    """Issues S dP dV, then (S' dK dQ dP' dV') per query tile, then dK dQ; returns advanced ends.

    A query tile's exponentials run beside dK and dQ of the tile before, its dS beside dV and the
    next S.
    """
    v, q, dout, p, ds, dq = ends
    q_full = q.wait_and_advance()
    multiply(products.s, q_full, False)
    pipes.s.commit()
    v_full = v.wait_and_advance()
    pipes.dv.acquire()
    pipes.dk.acquire()
    primitives.after_thread_sync()
    dout, p, dq = _multiply_dout(variant, products, pipes.dp, False, (dout, p, dq))
    for i in cutlass.range(num_steps - 1, unroll=1):
        q_next = q.wait_and_advance()
        multiply(products.s, q_next, False)
        pipes.s.commit()
        ds, dq = _multiply_ds(variant, products, i > 0, q_full, (ds, dq))
        dout, p, dq = _multiply_dout(variant, products, pipes.dp, True, (dout, p, dq))
        q_full = q_next
    v_full.release()
    pipes.dv.commit()
    ds, dq = _multiply_ds(variant, products, num_steps > 1, q_full, (ds, dq))
    return Ends(v, q, dout, p, ds, dq)


@cute.jit
def _sweep_in_turn(
    variant: cutlass.Constexpr, products: Products, pipes: MmaPipes, num_steps: Int32, ends: Ends
) -> Ends:
    """Issues S dP dV dK dQ per query tile; returns advanced ends. Note [In turn]."""
    v, q, dout, p, ds, dq = ends
    v_full = v.wait_and_advance()
    pipes.dv.acquire()
    pipes.dk.acquire()
    for i in cutlass.range(num_steps, unroll=1):
        q_full = q.wait_and_advance()
        dq.acquire()
        primitives.after_thread_sync()
        multiply(products.s, q_full, False)
        pipes.s.commit()
        dout_full = dout.wait_and_advance()
        p.wait_and_advance()
        primitives.after_thread_sync()
        multiply(products.dp, dout_full, False)
        pipes.dp.commit()
        multiply(products.dv, dout_full, i > 0)
        dout_full.release()
        ds, dq = _multiply_ds(variant, products, i > 0, q_full, (ds, dq))
    v_full.release()
    pipes.dv.commit()
    return Ends(v, q, dout, p, ds, dq)


@cute.jit
def multiply(product: Product, b_full, accumulate: Boolean | bool):
    """Issues a product; ``b_full`` says which stage its B is in."""
    b = product.b[None, None, None, b_full.index]
    slabs = range(cute.size(product.a, mode=[2]))
    primitives.issue_umma(product.mma, product.acc, product.a, b, accumulate, slabs)


@cute.jit
def _multiply_dout(
    variant: cutlass.Constexpr,
    products: Products,
    dp: PipelineProducer,
    accumulate: Boolean | bool,
    ends: tuple,
) -> tuple:
    """Issues dP and, once P is there, dV of a query tile; returns the ends of dout, p, dq."""
    dout, p, dq = ends
    dout_full = dout.wait_and_advance()
    if const_expr(dq_overlays(variant.key) == "dp"):
        dq.acquire()
        primitives.after_thread_sync()
    multiply(products.dp, dout_full, False)
    dp.commit()
    p.wait_and_advance()
    primitives.after_thread_sync()
    multiply(products.dv, dout_full, accumulate)
    dout_full.release()
    return dout, p, dq


@cute.jit
def _multiply_ds(
    variant: cutlass.Constexpr,
    products: Products,
    accumulate: Boolean | bool,
    q_full,
    ends: tuple,
) -> tuple:
    """Issues dK and dQ of a query tile, once dS is there; returns the ends of ds, dq."""
    ds, dq = ends
    ds.wait_and_advance()
    primitives.after_thread_sync()
    multiply(products.dk, q_full, accumulate)
    q_full.release()
    if const_expr(dq_overlays(variant.key) == ""):
        dq.acquire()
        primitives.after_thread_sync()
    mma, acc, a, b = products.dq
    primitives.issue_umma(mma, acc, a, b, False, range(cute.size(a, mode=[2])))
    dq.commit()
    dq.advance()
    return ds, dq


@cute.jit
def add(variant: cutlass.Constexpr, x: Context, dq: PipelineConsumer):
    """Adds dQ of every query tile to the sums in global memory. Four warps, 32 queries each.

    waits   dq full (mma)     signals dq empty (mma)
    """
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        at = first_step(work, Int32(0))
        if x.scalars.deterministic != 0:
            for _ in cutlass.range(work.num_steps, unroll=1):
                dq = _add_tile(variant, True, x, (work, at), dq)
                at = following(work, at)
        else:
            for _ in cutlass.range(work.num_steps, unroll=1):
                dq = _add_tile(variant, False, x, (work, at), dq)
                at = following(work, at)
        tile = tile_at(variant, x, tile.slot + 1)
    # HAZARD: the CTA may not end, and its shared memory go, before all of it has been added.
    cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def _add_tile(
    variant: cutlass.Constexpr,
    deterministic: cutlass.Constexpr[bool],
    x: Context,
    where: tuple,
    dq: PipelineConsumer,
) -> PipelineConsumer:
    """Adds this warp's lanes of dQ of a query tile; returns the advanced end of dq."""
    work, at = where
    config, head_dim = variant.config, variant.key.head_dim
    thread, lane = cute.arch.thread_idx()[0] % edges.WARPGROUP, cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(thread // edges.WARP)
    columns = variant.plan.columns("dq")
    at_once = columns.cols if const_expr(columns.cols <= MOST_DQ_COLUMNS) else config.add_columns
    # Of dQ transposed, all rows that there are; the columns beyond those are another 128 rows.
    width = head_dim if const_expr(variant.dq_order == "rows") else config.block_q
    full = dq.wait_and_advance()
    primitives.after_thread_sync()
    fours = config.add_columns // backward_rows.FLOATS
    row = work.scratch_row + at.q_block * config.block_q
    sums = slot_of(variant, x.scratch, row, at.head)
    for j in cutlass.range_constexpr(columns.cols // config.add_columns):
        first = j * config.add_columns
        if const_expr(first % at_once == 0):
            tDq = primitives.tmem_rows(x.tmem, columns.start + first, at_once)
            loads = primitives.tmem_load(tDq, LOAD_COLUMNS, thread)
            rDq = loads.whole_row()  # (at_once)
            cute.copy(loads.copy, loads.tmem, rDq)
            cute.arch.fence_view_async_tmem_load()
        if const_expr(first + at_once == columns.cols):
            primitives.before_thread_sync()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                full.release()
        if const_expr(deterministic and j == 0):
            await_turn(variant, x, work, at, ADD_WARPS * variant.plan.ctas)
        stage = j % ADD_STAGES
        # The piece before last was in the same place; the last one may still be on its way.
        cute.arch.cp_async_bulk_wait_group(ADD_STAGES - 1, read=True)
        cute.arch.sync_warp()
        sPiece = x.smem.dq[None, None, None, stage, warp]
        for i in cutlass.range_constexpr(fours):
            four = cute.make_rmem_tensor((backward_rows.FLOATS,), Float32)
            for column in cutlass.range_constexpr(backward_rows.FLOATS):
                four[column] = rDq[first % at_once + i * backward_rows.FLOATS + column]
            cute.autovec_copy(four, sPiece[None, lane, i])
        # HAZARD: these stores went through the generic proxy, the addition reads through the async
        # one.
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        rows, column = first // width * ADD_WARPS + warp, first % width
        if const_expr(variant.plan.ctas > 1):
            rows, column = place_of_dq(variant, warp, first)
        place = (rows * width + column) * (edges.WARP // backward_rows.FLOATS)
        target = sums[None, place].iterator
        size_bytes = edges.WARP * config.add_columns * 4
        primitives.bulk_add(sPiece.iterator, target, size_bytes)
        cute.arch.cp_async_bulk_commit_group()
    if const_expr(deterministic):
        _pass_turn(variant, x, work, at)
    return dq


@cute.jit
def _pass_turn(variant: cutlass.Constexpr, x: Context, work: Work, at: Step):
    """Tells the next key block that this warp has added: Note [Turns] in ``backward_work.py``."""
    # HAZARD: all that was added must be there, not only on its way, before the next one's turn.
    cute.arch.cp_async_bulk_wait_group(0)
    cute.arch.sync_warp()
    cute.arch.fence_acq_rel_gpu()
    pass_turn(variant, x, work, at)
