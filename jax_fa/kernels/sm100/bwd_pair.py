"""Blackwell backward of a pair of CTAs: its roles load, mma and relay, and the sending of dS.

What differs from one CTA, and why: Note [A pair of CTAs] in ``plan_bwd.py``. The roles add
and attend are those of one CTA (``bwd_roles.py``, ``bwd_attend.py``).
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.kernels import edges, primitives, tiles
from jax_fa.kernels.backward_work import Work, first_step, following, tile_at, work_on
from jax_fa.kernels.sm100.bwd_work import (
    Context,
    Product,
    Products,
    Variant,
    accumulator,
    halves,
)
from jax_fa.kernels.sm100.plan_bwd import ROWS

BY_COLUMNS = ("kt", "qt", "dout_t")
"""Copies that CTAs have halves of by columns; of the others, by rows."""


def make_products(variant: Variant, x: Context) -> Products:
    """The products of a pair, as the first CTA issues them for both.

    Sizes of operands are those of one CTA; a stage is the last mode of ``b`` where there is one.
    """
    key, dtype, smem, ctas = variant.key, variant.dtype, x.smem, variant.plan.ctas
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    scores = primitives.make_umma(dtype, ROWS, k_major, ctas=ctas)
    dv = primitives.make_umma(dtype, key.value_dim, mn_major, a_in_tmem=True, ctas=ctas)
    dk = primitives.make_umma(dtype, key.head_dim, mn_major, a_in_tmem=True, ctas=ctas)
    dq = primitives.make_umma(
        dtype, key.head_dim, mn_major, ctas=ctas, a_major=mn_major, rows=ROWS // ctas
    )

    def by_columns(tensor: cute.Tensor) -> cute.Tensor:
        return primitives.umma_operand(primitives.transposed(tensor))

    rows, of_dq = ROWS * ctas, ROWS
    return Products(
        Product(
            scores,
            accumulator(variant, x, scores, ("s", rows, ROWS)),
            scores.make_fragment_A(primitives.umma_operand(smem.k)),
            scores.make_fragment_B(primitives.umma_operand(smem.q)),
        ),
        Product(
            scores,
            accumulator(variant, x, scores, ("dp", rows, ROWS)),
            scores.make_fragment_A(primitives.umma_operand(smem.v)),
            scores.make_fragment_B(primitives.umma_operand(smem.dout)),
        ),
        Product(
            dv,
            accumulator(variant, x, dv, ("dv", rows, key.value_dim)),
            halves(variant, x.tmem, dv, "p"),
            dv.make_fragment_B(by_columns(smem.dout_t)),
        ),
        Product(
            dk,
            accumulator(variant, x, dk, ("dk", rows, key.head_dim)),
            halves(variant, x.tmem, dk, "ds"),
            dk.make_fragment_B(by_columns(smem.qt)),
        ),
        Product(
            dq,
            accumulator(variant, x, dq, ("dq", of_dq, key.head_dim)),
            dq.make_fragment_A(by_columns(smem.ds)),
            dq.make_fragment_B(by_columns(smem.kt)),
        ),
    )


class LoadPipes(NamedTuple):
    """The ends that the role load holds."""

    k: PipelineProducer
    q: PipelineProducer
    stats: PipelineProducer
    v: PipelineProducer
    dout: PipelineProducer
    dout_t: PipelineProducer
    kt: PipelineProducer
    qt: PipelineProducer


@cute.jit
def load(variant: cutlass.Constexpr, x: Context, pipes: LoadPipes):
    """Fetches this CTA's half of everything, in the order in which mma is done with it. One warp.

    signals k, q, v, dout, dout_t, kt, qt full (mma), stats full (attend)
    waits   all of them empty
    """
    k, q, stats, v, dout, dout_t, kt, qt = pipes
    phase = Int32(0)
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        if work.num_steps > 0:
            at = first_step(work, Int32(0))
            k, phase = _load_keys(variant, x, work, "k", (k, phase))
            q, phase = _load_queries(variant, x, (work, at), "q", (q, phase))
            stats = _load_stats(variant, x, (work, at), stats)
            v, phase = _load_keys(variant, x, work, "v", (v, phase))
            dout, phase = _load_queries(variant, x, (work, at), "dout", (dout, phase))
            dout_t, phase = _load_queries(variant, x, (work, at), "dout_t", (dout_t, phase))
            kt, phase = _load_keys(variant, x, work, "kt", (kt, phase))
            for _ in cutlass.range(work.num_steps - 1, unroll=1):
                before, at = at, following(work, at)
                q, phase = _load_queries(variant, x, (work, at), "q", (q, phase))
                stats = _load_stats(variant, x, (work, at), stats)
                qt, phase = _load_queries(variant, x, (work, before), "qt", (qt, phase))
                dout, phase = _load_queries(variant, x, (work, at), "dout", (dout, phase))
                dout_t, phase = _load_queries(variant, x, (work, at), "dout_t", (dout_t, phase))
            qt, phase = _load_queries(variant, x, (work, at), "qt", (qt, phase))
        tile = tile_at(variant, x, tile.slot + 1)
    # HAZARD: the CTA may not end while the tensor core still has arrivals to make here.
    for end in (k, q, v, dout, dout_t, kt, qt):
        end.tail()


@cute.jit
def _load_keys(
    variant: cutlass.Constexpr, x: Context, work: Work, name: cutlass.Constexpr[str], ends: tuple
) -> tuple:
    """The CTA's keys or values, or its columns of all keys of the tile.

    ``ends`` are (the edge's, phase of the barrier ``scrub``), returned as they are then.
    """
    end, phase = ends
    rows = getattr(x.arrays, name)[None, None, work.tile.kv_head, work.tile.batch]
    rows = cute.domain_offset((work.kv_start, 0), rows)
    slot = end.acquire_and_advance()
    copied, at = (rows, getattr(x.smem, name)), (work.tile.q_block, work.window.kv_len)
    phase = _load_half(variant, x, name, copied, at, slot, phase)
    return end, phase


@cute.jit
def _load_queries(
    variant: cutlass.Constexpr, x: Context, where: tuple, name: cutlass.Constexpr[str], ends: tuple
) -> tuple:
    """Half the rows or half the columns of q or dO; ``ends`` as for ``_load_keys``."""
    work, at = where
    end, phase = ends
    rows = getattr(x.arrays, name)[None, None, at.head, work.tile.batch]
    rows = cute.domain_offset((work.q_start, 0), rows)
    slot = end.acquire_and_advance()
    copied = rows, getattr(x.smem, name)[None, None, slot.index]
    phase = _load_half(variant, x, name, copied, (at.q_block, work.window.q_len), slot, phase)
    return end, phase


@cute.jit
def _load_half(
    variant: cutlass.Constexpr,
    x: Context,
    name: cutlass.Constexpr[str],
    copied: tuple,
    at: tuple,
    slot,
    phase: Int32,
) -> Int32:
    """This CTA's half of a block; rows that the sequence does not use become zero.

    A half by columns is as high as the block. Behind the array's last row TMA fills with zeros by
    itself; for why and how of others see ``bwd_roles._load_rows``.

    Args:
        variant: the variant.
        x: the context.
        name: of TMA descriptor, array and smem.
        copied: (rows of the sequence, smem).
        at: number of the block, and rows of the sequence that are used.
        slot: of the edge that announces it.
        phase: of the barrier ``scrub``.

    Returns:
        The phase of the barrier ``scrub`` then.
    """
    rows, smem = copied
    block, length = at
    ctas, rank = variant.plan.ctas, tiles.rank_in_cluster(variant.plan.ctas)
    height, width = cute.product_each(smem.shape)
    place = (block, rank)
    if const_expr(name not in BY_COLUMNS):
        place = (block * ctas + rank, 0)
    used = length - place[0] * height
    tiled = cute.local_tile(rows, (height, width), (None, None))
    tma = getattr(x.tma, name)
    target, source = primitives.tma_views(tma, smem, tiled)
    if const_expr(not variant.is_general):
        cute.copy(tma, source[None, *place], target, tma_bar_ptr=slot.barrier)
    else:
        if used >= height:
            cute.copy(tma, source[None, *place], target, tma_bar_ptr=slot.barrier)
        else:
            lone = getattr(x.lone_tma, name)
            target, source = primitives.tma_views(lone, smem, tiled)
            size_bytes = height * width * variant.dtype.width // 8
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(x.smem.scrub, size_bytes)
            cute.copy(lone, source[None, *place], target, tma_bar_ptr=x.smem.scrub)
            cute.arch.mbarrier_wait(x.smem.scrub, phase)
            phase = phase ^ 1
            primitives.scrub_rows(smem, used)
            with cute.arch.elect_one():
                primitives.complete_tx_of(edges.LEADER, slot.barrier, size_bytes)
    return phase


@cute.jit
def _load_stats(
    variant: cutlass.Constexpr, x: Context, where: tuple, stats: PipelineProducer
) -> PipelineProducer:
    """Statistics of 128 query rows, for each CTA; the advanced ``stats``."""
    work, at = where
    slot = stats.acquire_and_advance()
    row = work.scratch_row + at.q_block * variant.config.block_q
    for i, array in enumerate((x.scratch.lse2, x.scratch.delta)):
        source = cute.domain_offset((row,), array[None, at.head])
        primitives.bulk_load(source, x.smem.stats[None, i, slot.index], slot.barrier)
    return stats


class MmaPipes(NamedTuple):
    """The ends that the role mma holds."""

    k: PipelineConsumer
    q: PipelineConsumer
    v: PipelineConsumer
    dout: PipelineConsumer
    dout_t: PipelineConsumer
    kt: PipelineConsumer
    qt: PipelineConsumer
    s: PipelineProducer
    p: PipelineConsumer
    dp: PipelineProducer
    ds: PipelineConsumer
    halves: PipelineConsumer
    dq: PipelineProducer
    dv: PipelineProducer
    dk: PipelineProducer


@cute.jit
def mma(variant: cutlass.Constexpr, x: Context, pipes: MmaPipes):
    """Issues all products of every query tile, for both CTAs. One warp of the first.

    waits   k, q, v, dout, dout_t, kt, qt full (load), p, ds full (attend), halves full (relay),
            dv, dk empty (attend), dq empty (add)
    signals s, dp, dv, dk full, ds empty (attend), dq full (add), what load waits for
    """
    products = make_products(variant, x)
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        if work.num_steps > 0:
            pipes = _sweep(products, work.num_steps, pipes)
        tile = tile_at(variant, x, tile.slot + 1)


@cute.jit
def _sweep(products: Products, num_steps: Int32, pipes: MmaPipes) -> MmaPipes:
    """Issues S dP dV, then (S' dK dP' dQ dV') per query tile, then dK dQ; returns advanced ends.

    While dS changes hands, the tensor core has dK and dP' to do.
    """
    k, q, v, dout, dout_t, kt, qt, s, p, dp, ds, halves, dq, dv, dk = pipes
    k_full = k.wait_and_advance()
    q, dq = _multiply_s(products.s, s, (q, dq))
    v_full = v.wait_and_advance()
    dout = _multiply_freed(products.dp, dout, False, dp)
    dv.acquire()
    dk.acquire()
    p.wait_and_advance()
    primitives.after_thread_sync()
    dout_t = _multiply_freed(products.dv, dout_t, False)
    kt_full = kt.wait_and_advance()
    for i in cutlass.range(num_steps - 1, unroll=1):
        q, dq = _multiply_s(products.s, s, (q, dq))
        ds_full = ds.wait_and_advance()
        primitives.after_thread_sync()
        qt = _multiply_freed(products.dk, qt, i > 0)
        dout = _multiply_freed(products.dp, dout, False, dp)
        p.wait_and_advance()
        halves.wait_and_advance()
        primitives.after_thread_sync()
        dq = _multiply_dq(products.dq, ds_full, dq)
        dout_t = _multiply_freed(products.dv, dout_t, True)
    k_full.release()
    v_full.release()
    dv.commit()
    dv.advance()
    ds_full = ds.wait_and_advance()
    primitives.after_thread_sync()
    qt = _multiply_freed(products.dk, qt, num_steps > 1)
    dk.commit()
    dk.advance()
    halves.wait_and_advance()
    dq.acquire()
    primitives.after_thread_sync()
    dq = _multiply_dq(products.dq, ds_full, dq)
    kt_full.release()
    return MmaPipes(k, q, v, dout, dout_t, kt, qt, s, p, dp, ds, halves, dq, dv, dk)


@cute.jit
def _issue(product: Product, b: cute.Tensor, accumulate: Boolean | bool):
    """Issues all slabs of a product."""
    slabs = range(cute.size(product.a, mode=[2]))
    primitives.issue_umma(product.mma, product.acc, product.a, b, accumulate, slabs)


@cute.jit
def _multiply_freed(
    product: Product,
    end: PipelineConsumer,
    accumulate: Boolean | bool,
    result: Any = None,
) -> PipelineConsumer:
    """Issues a product, the only one that reads its B; the advanced ``end`` that guards it.

    ``result`` announces a sum that is complete at once.
    """
    full = end.wait_and_advance()
    _issue(product, product.b[None, None, None, full.index], accumulate)
    if const_expr(result is not None):
        result.commit()
    full.release()
    return end


@cute.jit
def _multiply_s(product: Product, s: PipelineProducer, ends: tuple) -> tuple:
    """Issues S, once dQ in its place is in registers; the ends of q and dq."""
    q, dq = ends
    dq.acquire()
    primitives.after_thread_sync()
    return _multiply_freed(product, q, False, s), dq


@cute.jit
def _multiply_dq(product: Product, ds_full, dq: PipelineProducer) -> PipelineProducer:
    """Issues dQ, which frees both CTAs' dS; the advanced ``dq``."""
    _issue(product, product.b, False)
    ds_full.release()
    dq.commit()
    dq.advance()
    return dq


class RelayPipes(NamedTuple):
    """The ends that the role relay holds."""

    half: PipelineConsumer
    halves: PipelineProducer


@cute.jit
def relay(variant: cutlass.Constexpr, x: Context, pipes: RelayPipes):
    """Tells the first CTA that the other's half of dS has come here. One warp.

    waits   half full (attend of the other CTA)     signals halves full (mma)
    """
    half = pipes.half
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        for _ in cutlass.range(work.num_steps, unroll=1):
            half.wait_and_advance()
            with cute.arch.elect_one():
                pipes.halves.commit()
        tile = tile_at(variant, x, tile.slot + 1)


@cute.jit
def place_of_ds(variant: cutlass.Constexpr, first_query: Int32) -> Int32:
    """Which part of ``Smem.ds_parts`` a warpgroup writes: this CTA's half of ds, or ds_out."""
    rank = tiles.rank_in_cluster(variant.plan.ctas)
    place = Int32(variant.plan.ctas)
    if first_query == rank * variant.config.half_q:
        place = Int32(rank)
    return place


@cute.jit
def send_ds(variant: cutlass.Constexpr, x: Context, place: Int32, half: PipelineProducer):
    """Sends ds_out, if that is what this warpgroup wrote, to the other CTA's ds.

    Every thread has fenced what it wrote. The bytes that come from there in turn are announced
    here: they may arrive before that, but not before the phase of the last ones is over, since
    those were multiplied (edge ds, "empty") before the other CTA wrote these.
    """
    ctas, out = variant.plan.ctas, variant.plan.barrier("out")
    size_bytes = variant.plan.edge("half").stage_bytes
    rank = tiles.rank_in_cluster(ctas)
    source, target = (x.smem.ds_parts[None, None, part].iterator for part in (ctas, rank))
    if place == ctas:
        cute.arch.barrier(barrier_id=out.index, number_of_threads=out.threads)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp % edges.WARPS_PER_GROUP == 0:
            barrier = half.acquire(Boolean(True)).barrier
            primitives.bulk_send((source, target), size_bytes, barrier, ctas - 1 - rank)
