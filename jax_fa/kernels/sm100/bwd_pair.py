"""Blackwell backward with a pair of CTAs: its roles load, mma and relay, and the sending of dS.

How and why it differs from one CTA: Note [A pair of CTAs] in ``plan_bwd.py``. The roles compute and
reduce are the same as for one CTA (``bwd_compute.py``, ``bwd_reduce.py``).
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.kernels import edges, primitives
from jax_fa.kernels.backward_work import Work, first_step, next_step, tile_at, work_on
from jax_fa.kernels.sm100 import bwd_instructions, clusters, umma
from jax_fa.kernels.sm100.bwd_work import (
    BackwardContext,
    BackwardProducts,
    Loaded,
    Operand,
    Product,
    load_keys,
    load_queries,
    load_stats,
    make_products,
    multiply,
    operand_of,
)


class PairLoadPipes(NamedTuple):
    """The ends that the role load holds."""

    k: PipelineProducer
    q: PipelineProducer
    stats: PipelineProducer
    v: PipelineProducer
    dout: PipelineProducer
    dout_columns: PipelineProducer
    k_columns: PipelineProducer
    q_columns: PipelineProducer


@cute.jit
def load(variant: cutlass.Constexpr, x: BackwardContext, pipes: PairLoadPipes):
    """Loads this CTA's half of each operand, in the order in which mma frees them. One warp.

    signals k, q, v, dout, dout_columns, k_columns, q_columns full (mma), stats full (compute)
    waits   all of them empty
    """
    k, q, stats, v, dout, dout_columns, k_columns, q_columns = pipes
    of_k, of_v, of_k_columns = (operand_of(x, name) for name in ("k", "v", "k_columns"))
    of_q, of_q_columns = (operand_of(x, name) for name in ("q", "q_columns"))
    of_dout, of_dout_columns = (operand_of(x, name) for name in ("dout", "dout_columns"))
    phase = Int32(0)
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        if work.num_steps > 0:
            at = first_step(work, Int32(0))
            k, phase = _load_keys(variant, x, of_k, work, k, phase)
            q, phase = load_queries(variant, x, of_q, work, at, q, phase)
            stats = load_stats(variant, x, work, at, stats)
            v, phase = _load_keys(variant, x, of_v, work, v, phase)
            dout, phase = load_queries(variant, x, of_dout, work, at, dout, phase)
            dout_columns, phase = load_queries(
                variant, x, of_dout_columns, work, at, dout_columns, phase
            )
            k_columns, phase = _load_keys(variant, x, of_k_columns, work, k_columns, phase)
            for _ in cutlass.range(work.num_steps - 1, unroll=1):
                before, at = at, next_step(variant, x, work, at)
                q, phase = load_queries(variant, x, of_q, work, at, q, phase)
                stats = load_stats(variant, x, work, at, stats)
                q_columns, phase = load_queries(
                    variant, x, of_q_columns, work, before, q_columns, phase
                )
                dout, phase = load_queries(variant, x, of_dout, work, at, dout, phase)
                dout_columns, phase = load_queries(
                    variant, x, of_dout_columns, work, at, dout_columns, phase
                )
            q_columns, phase = load_queries(variant, x, of_q_columns, work, at, q_columns, phase)
        tile = tile_at(variant, x, tile.slot + 1)
    # HAZARD: the CTA may not end while the tensor core still has arrivals to make here.
    for end in (k, q, v, dout, dout_columns, k_columns, q_columns):
        end.tail()


@cute.jit
def _load_keys(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    operand: Operand,
    work: Work,
    end: PipelineProducer,
    phase: Int32,
) -> Loaded:
    """Does ``load_keys`` into the next stage of ``end``."""
    slot = end.acquire_and_advance()
    return Loaded(end, load_keys(variant, x, operand, work, slot, phase))


class PairMmaPipes(NamedTuple):
    """The ends that the role mma holds."""

    k: PipelineConsumer
    q: PipelineConsumer
    v: PipelineConsumer
    dout: PipelineConsumer
    dout_columns: PipelineConsumer
    k_columns: PipelineConsumer
    q_columns: PipelineConsumer
    s: PipelineProducer
    p: PipelineConsumer
    dp: PipelineProducer
    ds: PipelineConsumer
    halves: PipelineConsumer
    dq: PipelineProducer
    dv: PipelineProducer
    dk: PipelineProducer


@cute.jit
def mma(variant: cutlass.Constexpr, x: BackwardContext, pipes: PairMmaPipes):
    """Issues all products of every query tile, for both CTAs. One warp of the first CTA.

    waits   k, q, v, dout, dout_columns, k_columns, q_columns full (load), p, ds full (compute),
            halves full (relay), dv, dk empty (compute), dq empty (reduce)
    signals s, dp, dv, dk full, ds empty (compute), dq full (reduce), all that load waits for
    """
    products = make_products(variant, x)
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        if work.num_steps > 0:
            pipes = _sweep(products, work.num_steps, pipes)
        tile = tile_at(variant, x, tile.slot + 1)


@cute.jit
def _sweep(products: BackwardProducts, num_steps: Int32, pipes: PairMmaPipes) -> PairMmaPipes:
    """Issues S dP dV, then (S' dK dP' dQ dV') per query tile, then dK dQ; returns advanced ends.

    While the CTAs exchange dS, the tensor core computes dK and dP'.
    """
    k, q, v, dout, dout_columns, k_columns, q_columns, s, p, dp, ds, halves, dq, dv, dk = pipes
    k_full = k.wait_and_advance()
    q, dq = _multiply_s(products.s, s, q, dq)
    v_full = v.wait_and_advance()
    dout = _multiply_freed(products.dp, dout, False, dp)
    dv.acquire()
    dk.acquire()
    p.wait_and_advance()
    umma.after_thread_sync()
    dout_columns = _multiply_freed(products.dv, dout_columns, False)
    k_columns_full = k_columns.wait_and_advance()
    for i in cutlass.range(num_steps - 1, unroll=1):
        q, dq = _multiply_s(products.s, s, q, dq)
        ds_full = ds.wait_and_advance()
        umma.after_thread_sync()
        q_columns = _multiply_freed(products.dk, q_columns, i > 0)
        dout = _multiply_freed(products.dp, dout, False, dp)
        p.wait_and_advance()
        halves.wait_and_advance()
        umma.after_thread_sync()
        dq = _multiply_dq(products.dq, ds_full, dq)
        dout_columns = _multiply_freed(products.dv, dout_columns, True)
    k_full.release()
    v_full.release()
    dv.commit()
    dv.advance()
    ds_full = ds.wait_and_advance()
    umma.after_thread_sync()
    q_columns = _multiply_freed(products.dk, q_columns, num_steps > 1)
    dk.commit()
    dk.advance()
    halves.wait_and_advance()
    dq.acquire()
    umma.after_thread_sync()
    dq = _multiply_dq(products.dq, ds_full, dq)
    k_columns_full.release()
    return PairMmaPipes(
        k, q, v, dout, dout_columns, k_columns, q_columns, s, p, dp, ds, halves, dq, dv, dk
    )


@cute.jit
def _multiply_freed(
    product: Product,
    end: PipelineConsumer,
    accumulate: Boolean | bool,
    result: Any = None,
) -> PipelineConsumer:
    """Issues a product, the only reader of its B; returns ``end``, which guards B, advanced.

    ``result``, if given, announces the sum, which this product alone completes.
    """
    full = end.wait_and_advance()
    multiply(product, accumulate, full.index)
    if const_expr(result is not None):
        result.commit()
    full.release()
    return end


class SEnds(NamedTuple):
    """The ends that S of a query tile advances."""

    q: PipelineConsumer
    dq: PipelineProducer


@cute.jit
def _multiply_s(
    product: Product, s: PipelineProducer, q: PipelineConsumer, dq: PipelineProducer
) -> SEnds:
    """Issues S, once the dQ that occupies its columns is in registers."""
    dq.acquire()
    umma.after_thread_sync()
    return SEnds(_multiply_freed(product, q, False, s), dq)


@cute.jit
def _multiply_dq(product: Product, ds_full, dq: PipelineProducer) -> PipelineProducer:
    """Issues dQ, which frees both CTAs' dS when it retires; returns the advanced ``dq``."""
    multiply(product, False)
    ds_full.release()
    dq.commit()
    dq.advance()
    return dq


class RelayPipes(NamedTuple):
    """The ends that the role relay holds."""

    half: PipelineConsumer
    halves: PipelineProducer


@cute.jit
def relay(variant: cutlass.Constexpr, x: BackwardContext, pipes: RelayPipes):
    """Tells the first CTA when the half of dS that this CTA receives has arrived. One warp.

    waits   half full (compute of the other CTA)     signals halves full (mma)
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
def part_of_ds(variant: cutlass.Constexpr, first_query: Int32) -> Int32:
    """The part of ``ds_parts`` that a warpgroup writes: this CTA's half of ds, or ds_out."""
    rank = clusters.rank_in_cluster(variant.plan.ctas)
    part = Int32(variant.plan.ctas)
    if first_query == rank * variant.config.half_q:
        part = Int32(rank)
    return part


@cute.jit
def send_ds(variant: cutlass.Constexpr, x: BackwardContext, part: Int32, half: PipelineProducer):
    """Sends ds_out, if that is what this warpgroup wrote, to the other CTA's ds.

    Every thread has fenced its writes. ``acquire`` announces the bytes that the other CTA sends
    here. They may arrive before that, but not before the previous phase is over: the other CTA
    writes them only after the previous dS has been multiplied (edge ds, "empty").
    """
    ctas = variant.plan.ctas
    size_bytes = variant.plan.edge("half").stage_bytes
    rank = clusters.rank_in_cluster(ctas)
    source, target = (x.smem.ds_parts[None, None, i].iterator for i in (ctas, rank))
    if part == ctas:
        primitives.meet(variant, "out")
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp % edges.WARPS_PER_GROUP == 0:
            barrier = half.acquire(Boolean(True)).barrier
            bwd_instructions.bulk_send(source, target, size_bytes, barrier, ctas - 1 - rank)
