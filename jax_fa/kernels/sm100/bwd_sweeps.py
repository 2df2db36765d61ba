"""Blackwell backward of two sweeps: its roles load and mma. Note [Two sweeps] in ``plan_bwd.py``.

    load    k q(n) dO(n) | q(n-1) dO(n-1) | ... | q(0) dO(0)
            dO(n) q(n) v | dO(n-1) q(n-1) | ... | dO(0) q(0)
    mma     S(n) S(n-1) dV(n) | S(n-2) dV(n-1) | ... | S(0) dV(1) | dV(0)
            dP S(n) dK dQ(n) | dP S(n-1) dK dQ(n-1) | ... | dP S(0) dK dQ(0)

The role add is that of one sweep, and attend has both in ``bwd_attend.py``.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.kernels import primitives
from jax_fa.kernels.backward_work import Step, Work, first_step, following, tile_at, work_on
from jax_fa.kernels.sm100.bwd_roles import (
    load_douts,
    load_keys,
    load_queries,
    load_query_rows,
    multiply,
)
from jax_fa.kernels.sm100.bwd_work import Context, Product, Products, halves, make_products

HALVES = 2
"""Of the values, by columns; each is as large as a query tile."""


class LoadPipes(NamedTuple):
    """The ends that the role load holds."""

    k: PipelineProducer
    q: PipelineProducer
    dout: PipelineProducer
    stats: PipelineProducer


@cute.jit
def load(variant: cutlass.Constexpr, x: Context, pipes: LoadPipes):
    """Fetches a tile's keys and values, and what passes by them, twice. One warp.

    signals k, q, dout full (mma), stats full (attend)     waits   all of them empty
    """
    k, q, dout, stats = pipes
    phase = Int32(0)
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        if work.num_steps > 0:
            slot = k.acquire_and_advance()
            phase = load_keys(variant, (x, x.tma.k, x.arrays.k, x.smem.k), work, slot, phase)
            at = first_step(work, Int32(0))
            for _ in cutlass.range(work.num_steps, unroll=1):
                q, stats, phase = load_queries(variant, x, work, at, (q, stats, phase))
                dout, phase = load_douts(variant, x, work, at, (dout, phase))
                at = following(work, at)
            at = first_step(work, Int32(0))
            # What the ring of queries has room for comes before the values, which wait for dV.
            q, stats, phase = _load_both(variant, x, work, at, (q, stats, phase))
            for half in cutlass.range_constexpr(HALVES):
                slot = dout.acquire_and_advance()
                columns = cute.domain_offset(
                    (0, half * (variant.key.value_dim // HALVES), 0, 0), x.arrays.v
                )
                smem = x.smem.v[None, None, slot.index]
                phase = load_keys(variant, (x, x.tma.v, columns, smem), work, slot, phase)
            for _ in cutlass.range(work.num_steps - 1, unroll=1):
                at = following(work, at)
                q, stats, phase = _load_both(variant, x, work, at, (q, stats, phase))
        tile = tile_at(variant, x, tile.slot + 1)
    # HAZARD: the CTA may not end while the tensor core still has arrivals to make here.
    k.tail()
    q.tail()
    dout.tail()


@cute.jit
def _load_both(variant: cutlass.Constexpr, x: Context, work: Work, at: Step, ends: tuple) -> tuple:
    """dO, then queries, into one ring; ``ends`` are those of ``load_queries``."""
    q, stats, phase = ends
    slot = q.acquire_and_advance()
    copied = (x, x.tma.dout, x.arrays.dout, x.smem.q[None, None, slot.index])
    phase = load_query_rows(variant, copied, (work, at), slot, phase)
    return load_queries(variant, x, work, at, (q, stats, phase))


class MmaPipes(NamedTuple):
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
def mma(variant: cutlass.Constexpr, x: Context, pipes: MmaPipes):
    """Issues all products of every query tile. One warp.

    waits   k, q, dout full (load), p, ds full (attend), dq empty (add)
    signals s, dp, dv, dk full (attend), dq full (add), k, q, dout empty (load)
    """
    k = pipes.k
    ends = Ends(pipes.q, pipes.dout, pipes.s, pipes.p, pipes.ds, pipes.dq)
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


class Ends(NamedTuple):
    """Those of ``MmaPipes`` that advance with every query tile."""

    q: PipelineConsumer
    dout: PipelineConsumer
    s: PipelineProducer
    p: PipelineConsumer
    ds: PipelineConsumer
    dq: PipelineProducer


@cute.jit
def _sweep_for_dv(
    variant: cutlass.Constexpr, x: Context, products: Products, num_steps: Int32, ends: Ends
) -> Ends:
    """Issues S, then (S' dV) per query tile, then dV; returns advanced ends.

    A query tile's exponentials run beside S of the next and dV of the one before.
    """
    q, dout, s, p, ds, dq = ends
    q, s = _multiply_q(variant, products, Int32(0), (q, s))
    for i in cutlass.range(num_steps, unroll=1):
        if i + 1 < num_steps:
            q, s = _multiply_q(variant, products, (i + 1) % 2, (q, s))
        dout_full = dout.wait_and_advance()
        p.wait_and_advance()
        primitives.after_thread_sync()
        shift = i % 2 * _s_columns(variant)
        a = halves(variant, x.tmem + shift, products.dv.mma, "p")
        multiply(products.dv._replace(a=a), dout_full, i > 0)
        dout_full.release()
    return Ends(q, dout, s, p, ds, dq)


def _s_columns(variant) -> int:
    """From the columns of S to those of dP, which S of every other query tile takes."""
    return variant.plan.columns("dp").start - variant.plan.columns("s").start


@cute.jit
def _multiply_q(
    variant: cutlass.Constexpr, products: Products, parity: Int32, ends: tuple
) -> tuple:
    """Issues S of a query tile of the first sweep; returns the ends of q, s."""
    q, s = ends
    q_full = q.wait_and_advance()
    acc = products.s.acc
    acc = cute.make_tensor(acc.iterator + parity * _s_columns(variant), acc.layout)
    multiply(products.s._replace(acc=acc), q_full, False)
    s.commit()
    s.advance()
    q_full.release()
    return q, s


@cute.jit
def _sweep_for_dk(
    variant: cutlass.Constexpr,
    products: Products,
    dp: PipelineProducer,
    num_steps: Int32,
    ends: Ends,
) -> Ends:
    """Issues (dP S dK dQ) per query tile; returns advanced ends.

    dP is issued before S, whose queries arrive later: Note [Two sweeps].
    """
    q, dout, s, p, ds, dq = ends
    v_full = (dout.wait_and_advance(), dout.wait_and_advance())
    for i in cutlass.range(num_steps, unroll=1):
        dout_full = q.wait_and_advance()
        _multiply_v(products.dp, v_full, dout_full)
        dp.commit()
        dout_full.release()
        q_full = q.wait_and_advance()
        multiply(products.s, q_full, False)
        s.commit()
        s.advance()
        ds.wait_and_advance()
        primitives.after_thread_sync()
        multiply(products.dk, q_full, i > 0)
        q_full.release()
        dq.acquire()
        primitives.after_thread_sync()
        mma, acc, a, b = products.dq
        primitives.issue_umma(mma, acc, a, b, False, range(cute.size(a, mode=[2])))
        dq.commit()
        dq.advance()
    for half in v_full:
        half.release()
    return Ends(q, dout, s, p, ds, dq)


@cute.jit
def _multiply_v(product: Product, v_full: tuple, dout_full):
    """Issues dP; ``v_full`` say where the halves of the values are, ``dout_full`` where dO is."""
    mma, acc, a, b = product
    dout = b[None, None, None, dout_full.index]
    slabs = cute.size(a, mode=[2])
    for half in cutlass.range_constexpr(HALVES):
        v = a[None, None, None, v_full[half].index]
        first = Boolean(half > 0)
        primitives.issue_umma(mma, acc, v, dout, first, range(slabs), -half * slabs)
