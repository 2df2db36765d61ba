"""Blackwell backward with one CTA and one sweep: its roles load and mma.

The roles compute and reduce are in ``bwd_compute.py`` and ``bwd_reduce.py``. Each role iterates
over the same tiles and query tiles in the same order. Roles, edges and memory: ``plan_bwd.py``.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.kernels.backward_work import first_step, next_step, tile_at, work_on
from jax_fa.kernels.sm100 import umma
from jax_fa.kernels.sm100.bwd_work import (
    BackwardContext,
    BackwardProducts,
    load_keys,
    load_queries,
    load_with_stats,
    make_products,
    multiply,
    operand_of,
)
from jax_fa.kernels.sm100.plan_bwd import dq_overlays


class OneSweepLoadPipes(NamedTuple):
    """The ends that the role load holds."""

    k: PipelineProducer
    v: PipelineProducer
    q: PipelineProducer
    dout: PipelineProducer
    stats: PipelineProducer


@cute.jit
def load(variant: cutlass.Constexpr, x: BackwardContext, pipes: OneSweepLoadPipes):
    """Loads the keys and values of each tile, and q and dO of its query tiles. One warp.

    signals k, v, q, dout full (mma), stats full (compute)     waits   all of them empty
    """
    k, v, q, dout, stats = pipes
    of_k, of_v, of_q, of_dout = (operand_of(x, name) for name in ("k", "v", "q", "dout"))
    phase = Int32(0)
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        if work.num_steps > 0:
            at = first_step(work, Int32(0))
            phase = load_keys(variant, x, of_k, work, k.acquire_and_advance(), phase)
            q, stats, phase = load_with_stats(variant, x, of_q, work, at, q, stats, phase)
            phase = load_keys(variant, x, of_v, work, v.acquire_and_advance(), phase)
            dout, phase = load_queries(variant, x, of_dout, work, at, dout, phase)
            for _ in cutlass.range(work.num_steps - 1, unroll=1):
                at = next_step(variant, x, work, at)
                q, stats, phase = load_with_stats(variant, x, of_q, work, at, q, stats, phase)
                dout, phase = load_queries(variant, x, of_dout, work, at, dout, phase)
        tile = tile_at(variant, x, tile.slot + 1)
    # HAZARD: the CTA may not end while the tensor core still has arrivals to make here.
    k.tail()
    v.tail()
    q.tail()
    dout.tail()


class OneSweepMmaPipes(NamedTuple):
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
def mma(variant: cutlass.Constexpr, x: BackwardContext, pipes: OneSweepMmaPipes):
    """Issues all products of every query tile. One warp.

    waits   k, v, q, dout full (load), p, ds full, dv, dk empty (compute), dq empty (reduce)
    signals s, dp, dv, dk full (compute), dq full (reduce), k, v, q, dout empty (load)
    """
    k, dv, dk = pipes.k, pipes.dv, pipes.dk
    ends = OneSweepMmaEnds(pipes.v, pipes.q, pipes.dout, pipes.p, pipes.ds, pipes.dq)
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


class OneSweepMmaEnds(NamedTuple):
    """The ends of ``OneSweepMmaPipes`` that advance with every query tile, and v."""

    v: PipelineConsumer
    q: PipelineConsumer
    dout: PipelineConsumer
    p: PipelineConsumer
    ds: PipelineConsumer
    dq: PipelineProducer


@cute.jit
def _sweep(
    variant: cutlass.Constexpr,
    products: BackwardProducts,
    pipes: OneSweepMmaPipes,
    num_steps: Int32,
    ends: OneSweepMmaEnds,
) -> OneSweepMmaEnds:
    """Issues S dP dV, then (S' dK dQ dP' dV') per query tile, then dK dQ; returns advanced ends.

    A query tile's exponentials overlap with dK and dQ of the previous tile, the computation of its
    dS with dV and the next S.
    """
    v, q, dout, p, ds, dq = ends
    q_full = q.wait_and_advance()
    multiply(products.s, False, q_full.index)
    pipes.s.commit()
    v_full = v.wait_and_advance()
    pipes.dv.acquire()
    pipes.dk.acquire()
    umma.after_thread_sync()
    dout, p, dq = _multiply_dp_dv(variant, products, pipes.dp, False, dout, p, dq)
    for i in cutlass.range(num_steps - 1, unroll=1):
        q_next = q.wait_and_advance()
        multiply(products.s, False, q_next.index)
        pipes.s.commit()
        ds, dq = _multiply_dk_dq(variant, products, i > 0, q_full, ds, dq)
        dout, p, dq = _multiply_dp_dv(variant, products, pipes.dp, True, dout, p, dq)
        q_full = q_next
    v_full.release()
    pipes.dv.commit()
    ds, dq = _multiply_dk_dq(variant, products, num_steps > 1, q_full, ds, dq)
    return OneSweepMmaEnds(v, q, dout, p, ds, dq)


@cute.jit
def _sweep_in_turn(
    variant: cutlass.Constexpr,
    products: BackwardProducts,
    pipes: OneSweepMmaPipes,
    num_steps: Int32,
    ends: OneSweepMmaEnds,
) -> OneSweepMmaEnds:
    """Issues S dP dV dK dQ per query tile; returns advanced ends. Note [In turn]."""
    v, q, dout, p, ds, dq = ends
    v_full = v.wait_and_advance()
    pipes.dv.acquire()
    pipes.dk.acquire()
    for i in cutlass.range(num_steps, unroll=1):
        q_full = q.wait_and_advance()
        dq.acquire()
        umma.after_thread_sync()
        multiply(products.s, False, q_full.index)
        pipes.s.commit()
        dout_full = dout.wait_and_advance()
        p.wait_and_advance()
        umma.after_thread_sync()
        multiply(products.dp, False, dout_full.index)
        pipes.dp.commit()
        multiply(products.dv, i > 0, dout_full.index)
        dout_full.release()
        ds, dq = _multiply_dk_dq(variant, products, i > 0, q_full, ds, dq)
    v_full.release()
    pipes.dv.commit()
    return OneSweepMmaEnds(v, q, dout, p, ds, dq)


class DpDvEnds(NamedTuple):
    """The ends that dP and dV of a query tile advance."""

    dout: PipelineConsumer
    p: PipelineConsumer
    dq: PipelineProducer


@cute.jit
def _multiply_dp_dv(
    variant: cutlass.Constexpr,
    products: BackwardProducts,
    dp: PipelineProducer,
    accumulate: Boolean | bool,
    dout: PipelineConsumer,
    p: PipelineConsumer,
    dq: PipelineProducer,
) -> DpDvEnds:
    """Issues dP and, once P is ready, dV of a query tile."""
    dout_full = dout.wait_and_advance()
    if const_expr(dq_overlays(variant.key) == "dp"):
        dq.acquire()
        umma.after_thread_sync()
    multiply(products.dp, False, dout_full.index)
    dp.commit()
    p.wait_and_advance()
    umma.after_thread_sync()
    multiply(products.dv, accumulate, dout_full.index)
    dout_full.release()
    return DpDvEnds(dout, p, dq)


class DkDqEnds(NamedTuple):
    """The ends that dK and dQ of a query tile advance."""

    ds: PipelineConsumer
    dq: PipelineProducer


@cute.jit
def _multiply_dk_dq(
    variant: cutlass.Constexpr,
    products: BackwardProducts,
    accumulate: Boolean | bool,
    q_full,
    ds: PipelineConsumer,
    dq: PipelineProducer,
) -> DkDqEnds:
    """Issues dK and dQ of a query tile, once dS is ready."""
    ds.wait_and_advance()
    umma.after_thread_sync()
    multiply(products.dk, accumulate, q_full.index)
    q_full.release()
    if const_expr(dq_overlays(variant.key) == ""):
        dq.acquire()
        umma.after_thread_sync()
    multiply(products.dq, False)
    dq.commit()
    dq.advance()
    return DkDqEnds(ds, dq)
