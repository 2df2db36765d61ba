"""Blackwell backward with two sweeps: its roles load and mma. Note [Two sweeps] in ``plan_bwd.py``.

    load    k q(n) dO(n) | q(n-1) dO(n-1) | ... | q(0) dO(0)
            dO(n) q(n) v | dO(n-1) q(n-1) | ... | dO(0) q(0)
    mma     S(n) S(n-1) dV(n) | S(n-2) dV(n-1) | ... | S(0) dV(1) | dV(0)
            dP S(n) dK dQ(n) | dP S(n-1) dK dQ(n-1) | ... | dP S(0) dK dQ(0)

The roles compute (``bwd_compute.py``) and reduce (``bwd_reduce.py``) are the same as for one sweep.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.kernels.backward_work import Step, Work, first_step, next_step, tile_at, work_on
from jax_fa.kernels.sm100 import umma
from jax_fa.kernels.sm100.bwd_work import (
    BackwardContext,
    BackwardProducts,
    BackwardVariant,
    LoadedWithStats,
    Product,
    halves,
    load_keys,
    load_queries,
    load_with_stats,
    make_products,
    multiply,
    operand_of,
)
from jax_fa.kernels.sm100.plan_bwd import VALUE_HALVES


class TwoSweepLoadPipes(NamedTuple):
    """The ends that the role load holds."""

    k: PipelineProducer
    q: PipelineProducer
    dout: PipelineProducer
    stats: PipelineProducer


@cute.jit
def load(variant: cutlass.Constexpr, x: BackwardContext, pipes: TwoSweepLoadPipes):
    """Loads the keys and values of each tile, and q and dO of its query tiles twice. One warp.

    signals k, q, dout full (mma), stats full (compute)     waits   all of them empty
    """
    k, q, dout, stats = pipes
    of_k, of_v, of_q, of_dout = (operand_of(x, name) for name in ("k", "v", "q", "dout"))
    width = variant.key.value_dim // VALUE_HALVES
    of_halves = tuple(
        of_v._replace(array=cute.domain_offset((0, half * width, 0, 0), of_v.array))
        for half in range(VALUE_HALVES)
    )
    phase = Int32(0)
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        if work.num_steps > 0:
            phase = load_keys(variant, x, of_k, work, k.acquire_and_advance(), phase)
            at = first_step(work, Int32(0))
            for _ in cutlass.range(work.num_steps, unroll=1):
                q, stats, phase = load_with_stats(variant, x, of_q, work, at, q, stats, phase)
                dout, phase = load_queries(variant, x, of_dout, work, at, dout, phase)
                at = next_step(variant, x, work, at)
            at = first_step(work, Int32(0))
            # The ring of queries is filled before the values, whose stages dV still has to free.
            q, stats, phase = _load_both(variant, x, work, at, q, stats, phase)
            for half in cutlass.range_constexpr(VALUE_HALVES):
                slot = dout.acquire_and_advance()
                phase = load_keys(variant, x, of_halves[half], work, slot, phase)
            for _ in cutlass.range(work.num_steps - 1, unroll=1):
                at = next_step(variant, x, work, at)
                q, stats, phase = _load_both(variant, x, work, at, q, stats, phase)
        tile = tile_at(variant, x, tile.slot + 1)
    # HAZARD: the CTA may not end while the tensor core still has arrivals to make here.
    k.tail()
    q.tail()
    dout.tail()


@cute.jit
def _load_both(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    work: Work,
    at: Step,
    q: PipelineProducer,
    stats: PipelineProducer,
    phase: Int32,
) -> LoadedWithStats:
    """Loads dO, then q with its statistics; dO and q go into the ring of queries."""
    of_q = operand_of(x, "q")
    of_dout = operand_of(x, "dout")._replace(ring=of_q.ring)
    q, phase = load_queries(variant, x, of_dout, work, at, q, phase)
    return load_with_stats(variant, x, of_q, work, at, q, stats, phase)


class TwoSweepMmaPipes(NamedTuple):
    """The ends that the role mma holds."""

    k: PipelineConsumer
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
def mma(variant: cutlass.Constexpr, x: BackwardContext, pipes: TwoSweepMmaPipes):
    """Issues all products of every query tile. One warp.

    waits   k, q, dout full (load), p, ds full (compute), dq empty (reduce)
    signals s, dp, dv, dk full (compute), dq full (reduce), k, q, dout empty (load)
    """
    k = pipes.k
    ends = TwoSweepMmaEnds(pipes.q, pipes.dout, pipes.s, pipes.p, pipes.ds, pipes.dq)
    products = make_products(variant, x)
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        if work.num_steps > 0:
            k_full = k.wait_and_advance()
            ends = _sweep_for_dv(variant, x, products, work.num_steps, ends)
            pipes.dv.commit()
            ends = _sweep_for_dk(variant, products, pipes.dp, work.num_steps, ends)
            k_full.release()
            pipes.dk.commit()
        tile = tile_at(variant, x, tile.slot + 1)


class TwoSweepMmaEnds(NamedTuple):
    """The ends of ``TwoSweepMmaPipes`` that advance with every query tile."""

    q: PipelineConsumer
    dout: PipelineConsumer
    s: PipelineProducer
    p: PipelineConsumer
    ds: PipelineConsumer
    dq: PipelineProducer


@cute.jit
def _sweep_for_dv(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    products: BackwardProducts,
    num_steps: Int32,
    ends: TwoSweepMmaEnds,
) -> TwoSweepMmaEnds:
    """Issues S, then (S' dV) per query tile, then dV; returns advanced ends.

    A query tile's exponentials overlap with S of the next and dV of the previous tile.
    """
    q, dout, s, p, ds, dq = ends
    q, s = _multiply_s(variant, products, Int32(0), q, s)
    for i in cutlass.range(num_steps, unroll=1):
        if i + 1 < num_steps:
            q, s = _multiply_s(variant, products, (i + 1) % 2, q, s)
        dout_full = dout.wait_and_advance()
        p.wait_and_advance()
        umma.after_thread_sync()
        shift = i % 2 * _s_columns(variant)
        a = halves(variant, x.tmem + shift, products.dv.mma, "p")
        multiply(products.dv._replace(a=a), i > 0, dout_full.index)
        dout_full.release()
    return TwoSweepMmaEnds(q, dout, s, p, ds, dq)


def _s_columns(variant: BackwardVariant) -> int:
    """The distance from S to dP, whose columns S of every other tile takes in the first sweep."""
    return variant.plan.columns("dp").start - variant.plan.columns("s").start


class SEnds(NamedTuple):
    """The ends that S of a query tile of the first sweep advances."""

    q: PipelineConsumer
    s: PipelineProducer


@cute.jit
def _multiply_s(
    variant: cutlass.Constexpr,
    products: BackwardProducts,
    parity: Int32,
    q: PipelineConsumer,
    s: PipelineProducer,
) -> SEnds:
    """Issues S of a query tile of the first sweep."""
    q_full = q.wait_and_advance()
    acc = products.s.acc
    acc = cute.make_tensor(acc.iterator + parity * _s_columns(variant), acc.layout)
    multiply(products.s._replace(acc=acc), False, q_full.index)
    s.commit()
    s.advance()
    q_full.release()
    return SEnds(q, s)


@cute.jit
def _sweep_for_dk(
    variant: cutlass.Constexpr,
    products: BackwardProducts,
    dp: PipelineProducer,
    num_steps: Int32,
    ends: TwoSweepMmaEnds,
) -> TwoSweepMmaEnds:
    """Issues (dP S dK dQ) per query tile; returns advanced ends.

    dP is issued before S, whose queries arrive later: Note [Two sweeps].
    """
    q, dout, s, p, ds, dq = ends
    first_half, second_half = dout.wait_and_advance(), dout.wait_and_advance()
    for i in cutlass.range(num_steps, unroll=1):
        dout_full = q.wait_and_advance()
        _multiply_dp(products.dp, dout_full.index, first_half.index, second_half.index)
        dp.commit()
        dout_full.release()
        q_full = q.wait_and_advance()
        multiply(products.s, False, q_full.index)
        s.commit()
        s.advance()
        ds.wait_and_advance()
        umma.after_thread_sync()
        multiply(products.dk, i > 0, q_full.index)
        q_full.release()
        dq.acquire()
        umma.after_thread_sync()
        multiply(products.dq, False)
        dq.commit()
        dq.advance()
    first_half.release()
    second_half.release()
    return TwoSweepMmaEnds(q, dout, s, p, ds, dq)


@cute.jit
def _multiply_dp(product: Product, dout_stage: Int32, first_half: Int32, second_half: Int32):
    """Issues dP of dO and the halves of the values, each in the given stage of its ring."""
    mma, acc, a, b = product
    dout = b[None, None, None, dout_stage]
    slabs = cute.size(a, mode=[2])
    for half in cutlass.range_constexpr(VALUE_HALVES):
        v = a[None, None, None, (first_half, second_half)[half]]
        accumulate = Boolean(half > 0)
        umma.issue_umma(mma, acc, v, dout, accumulate, range(slabs), -half * slabs)
