"""Blackwell forward: the roles load, mma and store; softmax and correct are in ``fwd_softmax.py``.

Every role walks the same tiles in the same order by itself. Roles, edges and memory: ``plan.py``.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.kernels import edges, primitives, tiles
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
    Q_TILES,
    ROWS,
    SLAB,
    out_overlays_q,
)


class Smem(NamedTuple):
    """Shared memory."""

    q: cute.Tensor  # (128, D, 2)
    k: cute.Tensor  # (128 / ctas, D, stages)
    v: cute.Tensor  # (128, Dv / ctas, stages), the same bytes
    out: cute.Tensor  # (128, Dv, 2)
    stats: cute.Tensor  # (128, 2, 2) row, {shrink or sum, maximum}, query tile
    scrub: cute.Pointer  # one mbarrier
    segment_keys: cute.Tensor  # (3,) kernels/segments.py


class Context(NamedTuple):
    """What all roles work with."""

    tma: Tma
    arrays: Arrays
    scalars: Scalars
    order: tiles.Order
    smem: Smem
    tmem: cute.Pointer


@cute.jit
def signal(slot):
    """One arrival for this warp, after what all its lanes did."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        slot.commit()


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
        slot = kv.acquire_and_advance()
        _load_k(variant, x, (work, newest), slot)
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
            _load_k(variant, x, (work, block), slot)
            slot = kv.acquire_and_advance()
            phase = _load_v(variant, x, (work, block), slot, phase)
        tile = tile_at(variant, x, tile.slot + 1)
    # HAZARD: the CTA may not end while the tensor core still has arrivals to make here.
    q.tail()
    kv.tail()


@cute.jit
def _load_rows(atom: cute.CopyAtom, head: cute.Tensor, sRows: cute.Tensor, at: tuple, slot):
    """A stage of rows of one head; ``at`` is (first row of the sequence, number of the stage)."""
    first, number = at
    head = cute.domain_offset((first, 0), head)
    stage = cute.size(sRows, mode=[0]), cute.size(sRows, mode=[1])
    gRows = cute.local_tile(head, stage, (None, 0))
    sRows, gRows = primitives.tma_views(atom, sRows, gRows)
    cute.copy(atom, gRows[None, number], sRows[None, slot.index], tma_bar_ptr=slot.barrier)


@cute.jit
def _load_k(variant: cutlass.Constexpr, x: Context, at: tuple, slot):
    """This CTA's rows of one block of keys; ``at`` is (work, block)."""
    work, block = at
    ctas = variant.plan.ctas
    keys = x.arrays.k[None, None, work.tile.kv_head, work.tile.batch]
    part = block * ctas + tiles.rank_in_cluster(ctas)
    _load_rows(x.tma.k, keys, x.smem.k, (work.span.kv_start, part), slot)


@cute.jit
def _load_v(variant: cutlass.Constexpr, x: Context, at: tuple, slot, phase: Int32) -> Int32:
    """This CTA's columns of one block of values; ``at`` is (work, block).

    Rows beyond the sequence's keys become zero. Returns the scrub barrier's phase after that.
    """
    work, block = at
    key, ctas = variant.key, variant.plan.ctas
    rank = tiles.rank_in_cluster(ctas)
    rows = x.arrays.v[None, None, work.tile.kv_head, work.tile.batch]
    rows = cute.domain_offset((work.span.kv_start, 0), rows)
    gV = cute.local_tile(rows, (BLOCK_KV, key.value_dim // ctas), (None, rank))
    sV, gV = primitives.tma_views(x.tma.v, x.smem.v, gV)
    if const_expr(key.value_dim < key.head_dim):
        # The ring announces a block of keys, which is larger.
        missing = BLOCK_KV * (key.head_dim - key.value_dim) * variant.dtype.width // 8
        if rank == edges.LEADER:
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
    qk = primitives.make_umma(dtype, BLOCK_KV, OperandMajorMode.K, False, plan.ctas)
    pv = primitives.make_umma(dtype, key.value_dim, OperandMajorMode.MN, True, plan.ctas)
    rows = ROWS * plan.ctas
    s = qk.make_fragment_C(qk.partition_shape_C((rows, BLOCK_KV))).layout
    o = pv.make_fragment_C(pv.partition_shape_C((rows, key.value_dim))).layout
    p = pv.make_fragment_A(pv.partition_shape_A((rows, BLOCK_KV))).layout
    both = range(Q_TILES)
    start = {name: [plan.columns(f"{name}{i}").start for i in both] for name in "sop"}
    return Products(
        qk=qk,
        pv=pv,
        q=qk.make_fragment_A(primitives.umma_operand(x.smem.q)),
        k=qk.make_fragment_B(primitives.umma_operand(x.smem.k)),
        v=pv.make_fragment_B(primitives.umma_operand(primitives.transposed(x.smem.v))),
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
        signal(room)
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
            signal(room)
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
