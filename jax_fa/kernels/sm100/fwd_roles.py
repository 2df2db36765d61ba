"""Blackwell forward: the roles load, mma and store.

The roles softmax and correction are in ``fwd_softmax.py``. Every role goes through the same tiles
in the same order on its own. ``plan.py`` describes roles, edges and memory.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.kernels import forward_work, primitives, tiles
from jax_fa.kernels.forward_work import (
    Arrays,
    Scalars,
    Tma,
    Variant,
    Work,
    below,
    load_granules,
    work_on,
)
from jax_fa.kernels.loads import Detour, copy_zero_filled
from jax_fa.kernels.sm100 import clusters, umma
from jax_fa.kernels.sm100.plan import (
    CHUNK,
    HANDED_OVER_FIRST,
    MMA_ROWS,
    SLAB,
    Tiling,
    tiling,
)
from jax_fa.spec import division


class ForwardSmem(NamedTuple):
    """Shared memory; the sizes are those of ``plan.Tiling``."""

    q: cute.Tensor  # (128, D, q_tiles)
    k: cute.Tensor  # (128 / ctas, kv_columns, kv_stages)
    v: cute.Tensor  # (kv_rows, Dv / ctas, kv_stages), the same bytes
    out: cute.Tensor  # (128, out_columns, 2)
    stats: cute.Tensor  # (128, 2, q_tiles) row, {shrink or sum, maximum}, query tile
    zero_fill: cute.Pointer  # one mbarrier
    found: cute.Tensor  # (FOUND_WORDS,) segments.py, dense_mask.py


class ForwardContext(NamedTuple):
    """Operands and memory, the same for all roles."""

    tma: Tma
    arrays: Arrays
    scalars: Scalars
    order: tiles.Order
    packing: division.Packing
    granules: primitives.TmaArray
    smem: ForwardSmem
    tmem: cute.Pointer


@cute.jit
def tile_at(variant: cutlass.Constexpr, x: ForwardContext, slot: Int32) -> tiles.Tile:
    """The tile at a position of this CTA's list."""
    if const_expr(variant.plan.ctas > 1):
        tile = clusters.in_order(x.order, slot, variant.plan.ctas)
    else:
        tile = forward_work.tile_at(variant, x, slot)
    return tile


def tiling_of(variant: Variant) -> Tiling:
    """How a variant's arrays are cut."""
    return tiling(variant.key, variant.config)


class ForwardLoadPipes(NamedTuple):
    """Ends held by the role load."""

    q: PipelineProducer
    kv: PipelineProducer


@cute.jit
def load(variant: cutlass.Constexpr, x: ForwardContext, pipes: ForwardLoadPipes):
    """Loads keys and query tiles, then values and the next keys, newest block first. One warp.

    waits   q, kv empty (mma)     signals q, kv full (mma)
    """
    q, kv = pipes
    cut = tiling_of(variant)
    phase = Int32(0)
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        block = work.blocks.end - 1
        kv = _load_k(variant, x, work, block, kv)
        for i in cutlass.range_constexpr(cut.q_tiles):
            slot = q.acquire_and_advance()
            if x.packing.heads == 1:
                _load_q(variant, x, work, i, slot)
            else:
                load_granules(variant, x, work, i * MMA_ROWS, slot.index, slot.barrier)
        for _ in cutlass.range(work.num_blocks - 1, unroll=1):
            following = below(variant, x, block)
            # Loads follow the order in which mma needs them.
            if const_expr(cut.q_tiles == 1):
                kv = _load_k(variant, x, work, following, kv)
                kv, phase = _load_v(variant, x, work, block, kv, phase)
            else:
                kv, phase = _load_v(variant, x, work, block, kv, phase)
                kv = _load_k(variant, x, work, following, kv)
            block = following
        kv, phase = _load_v(variant, x, work, work.blocks.start, kv, phase)
        tile = tile_at(variant, x, tile.slot + 1)
    # HAZARD: the CTA must not exit while the tensor core still has to arrive at its barriers.
    q.tail()
    kv.tail()


def _blocks(head: cute.Tensor, first: Int32, rows: int, columns: int) -> cute.Tensor:
    """One head's rows from ``first`` on, cut: (rows, columns, row blocks, column blocks)."""
    return cute.local_tile(cute.domain_offset((first, 0), head), (rows, columns), (None, None))


@cute.jit
def _load_q(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    work: Work,
    index: cutlass.Constexpr[int],
    slot,
):
    """Starts the load of query tile ``index``, whose rows all belong to one head."""
    first = work.span.first_row
    head = tiles.row_at(x.packing, work.tile, first, 0).head
    queries = x.arrays.q[None, None, head, work.tile.batch]
    gQ = _blocks(queries, work.span.own_start + first, MMA_ROWS, variant.key.head_dim)
    sQ, gQ = primitives.tma_views(x.tma.q, x.smem.q, gQ)
    cute.copy(x.tma.q, gQ[None, index, 0], sQ[None, slot.index], tma_bar_ptr=slot.barrier)


@cute.jit
def _load_k(
    variant: cutlass.Constexpr, x: ForwardContext, work: Work, block: Int32, kv: PipelineProducer
):
    """Loads this CTA's rows of a key block, some columns per stage; returns the advanced end."""
    cut, ctas = tiling_of(variant), variant.plan.ctas
    keys = x.arrays.k[None, None, work.tile.kv_head, work.tile.batch]
    gK = _blocks(keys, work.span.swept_start, variant.config.block_kv // ctas, cut.kv_columns)
    number = block * ctas + clusters.rank_in_cluster(ctas)
    sK, gK = primitives.tma_views(x.tma.k, x.smem.k, gK)
    for part in cutlass.range_constexpr(cut.k_parts):
        slot = kv.acquire_and_advance()
        cute.copy(x.tma.k, gK[None, number, part], sK[None, slot.index], tma_bar_ptr=slot.barrier)
    return kv


@cute.jit
def _load_v(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    work: Work,
    block: Int32,
    kv: PipelineProducer,
    phase: Int32,
):
    """Loads this CTA's columns of one block of values, some rows per stage.

    Rows beyond the sequence's keys become zero. ``phase`` is the phase of the barrier for
    zero-filled loads. Returns the advanced end and phase.
    """
    cut, ctas = tiling_of(variant), variant.plan.ctas
    rank = clusters.rank_in_cluster(ctas)
    rows = x.arrays.v[None, None, work.tile.kv_head, work.tile.batch]
    gV = _blocks(rows, work.span.swept_start, cut.kv_rows, variant.key.value_dim // ctas)
    sV, gV = primitives.tma_views(x.tma.v, x.smem.v, gV)
    for part in cutlass.range_constexpr(cut.v_parts):
        slot = kv.acquire_and_advance()
        number = block * cut.v_parts + part
        source, target = gV[None, number, rank], sV[None, slot.index]
        if const_expr(not variant.is_general):
            # TMA itself fills rows beyond the array's last with zeros.
            cute.copy(x.tma.v, source, target, tma_bar_ptr=slot.barrier)
        else:
            used = work.span.swept_len - number * cut.kv_rows
            if used >= cut.kv_rows:
                cute.copy(x.tma.v, source, target, tma_bar_ptr=slot.barrier)
            else:
                tile, detour = x.smem.v[None, None, slot.index], Detour(x.smem.zero_fill, phase)
                copy_zero_filled(x.tma.v, source, target, tile, used, slot, detour)
                phase = phase ^ 1
    return kv, phase


class Answers(NamedTuple):
    """The ends at which PV of one query tile waits."""

    scaled: PipelineConsumer
    p: PipelineConsumer
    p_rest: PipelineConsumer


class ForwardMmaPipes(NamedTuple):
    """Ends held by the role mma, except those of single query tiles."""

    q: PipelineConsumer
    kv: PipelineConsumer
    o: PipelineProducer


class ForwardMmaTilePipes(NamedTuple):
    """Ends held by the role mma for one query tile."""

    s: PipelineProducer
    scaled: PipelineConsumer
    p: PipelineConsumer
    p_rest: PipelineConsumer

    @property
    def answers(self) -> Answers:
        """The ends at which PV waits."""
        return Answers(self.scaled, self.p, self.p_rest)


class Products(NamedTuple):
    """Both products: instructions, operands in shared memory, layouts in tensor memory."""

    qk: cute.TiledMma
    pv: cute.TiledMma
    q: cute.Tensor  # A descriptors, (_, 1, D / 16, q_tiles)
    k: cute.Tensor  # B descriptors, (_, 1, kv_columns / 16, kv_stages)
    v: cute.Tensor  # B descriptors, (_, 1, kv_rows / 16, kv_stages)
    s: cute.Layout  # (_, 1, 1)
    p: cute.Layout  # A in TMEM, (_, 1, 128 / 16)
    o: cute.Layout  # (_, 1, 1)


def _make_products(variant: Variant, x: ForwardContext) -> Products:
    key, dtype, ctas = variant.key, variant.dtype, variant.plan.ctas
    block_kv = variant.config.block_kv
    qk = umma.make_umma(dtype, block_kv, OperandMajorMode.K, False, ctas)
    pv = umma.make_umma(dtype, key.value_dim, OperandMajorMode.MN, True, ctas)
    rows = MMA_ROWS * ctas
    return Products(
        qk=qk,
        pv=pv,
        q=qk.make_fragment_A(umma.umma_operand(x.smem.q)),
        k=qk.make_fragment_B(umma.umma_operand(x.smem.k)),
        v=pv.make_fragment_B(umma.umma_operand(primitives.transposed(x.smem.v))),
        s=qk.make_fragment_C(qk.partition_shape_C((rows, block_kv))).layout,
        p=pv.make_fragment_A(pv.partition_shape_A((rows, block_kv))).layout,
        o=pv.make_fragment_C(pv.partition_shape_C((rows, key.value_dim))).layout,
    )


def scores_at(variant: Variant, name: str, index: Int32 | int, stage: Int32) -> Int32:
    """The first column of "s" or "p" of a query tile, at ``stage`` of its edge s.

    The blocks of S in tensor memory are one of each query tile, or two stages of a single tile.
    """
    number = index if tiling_of(variant).s_stages == 1 else stage
    return variant.plan.columns(f"{name}0").start + number * variant.config.block_kv


@cute.jit
def mma(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    pipes: ForwardMmaPipes,
    of_tiles: Sequence[ForwardMmaTilePipes],
):
    """Issues all products in an order that keeps two blocks of S in flight. One warp.

    With two query tiles: S0 S1, then (PV0 S0 PV1 S1) per block, then PV0 PV1. With one: S, then
    (S PV) per block, then PV, so that S is one block ahead.

    waits   q, kv full (load), p, p_rest full (softmax), scaled full (correction)
    signals s full (softmax), o full (correction), q, kv empty (load)
    """
    q, kv, o = pipes
    cut = tiling_of(variant)
    s0, s1 = of_tiles[0].s, of_tiles[-1].s
    answers0, answers1 = of_tiles[0].answers, of_tiles[-1].answers
    products = _make_products(variant, x)
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        q0_full = q.wait_and_advance()
        kv, s0, k_full = _multiply_qk(variant, x, products, 0, kv, s0, ())
        if const_expr(cut.q_tiles == 2):
            q1_full = q.wait_and_advance()
            kv, s1, _ = _multiply_qk(variant, x, products, 1, kv, s1, k_full)
        steps = work.num_blocks - 1
        for i in cutlass.range(steps, unroll=1):
            if const_expr(cut.q_tiles == 1):
                kv, s0, _ = _multiply_qk(variant, x, products, 0, kv, s0, ())
                kv, answers0, _ = _multiply_pv(variant, x, products, 0, i > 0, kv, answers0, ())
                o.commit()
                o.advance()
            else:
                kv, answers0, v_full = _multiply_pv(
                    variant, x, products, 0, i > 0, kv, answers0, ()
                )
                kv, s0, k_next = _multiply_qk(variant, x, products, 0, kv, s0, ())
                kv, answers1, _ = _multiply_pv(variant, x, products, 1, i > 0, kv, answers1, v_full)
                kv, s1, _ = _multiply_qk(variant, x, products, 1, kv, s1, k_next)
        q0_full.release()
        if const_expr(cut.q_tiles == 2):
            q1_full.release()
        kv, answers0, v_full = _multiply_pv(variant, x, products, 0, steps > 0, kv, answers0, ())
        o.commit()
        o.advance()
        if const_expr(cut.q_tiles == 2):
            kv, answers1, _ = _multiply_pv(variant, x, products, 1, steps > 0, kv, answers1, v_full)
            o.commit()
            o.advance()
        tile = tile_at(variant, x, tile.slot + 1)


@cute.jit
def _multiply_qk(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    products: Products,
    index: cutlass.Constexpr[int],
    kv: PipelineConsumer,
    s: PipelineProducer,
    k_parts: Sequence[Any],
):
    """Issues S of query tile ``index``; returns the advanced ends, and the stages with the keys.

    The first query tile waits for these stages, ``k_parts`` passes them to the next, and the last
    releases them.
    """
    cut = tiling_of(variant)
    s_slot = s.current_handle()
    s.advance()
    acc = cute.make_tensor(x.tmem + scores_at(variant, "s", index, s_slot.index), products.s)
    q, slabs, in_hand = products.q[None, None, None, index], cut.kv_columns // SLAB, []
    for part in cutlass.range_constexpr(cut.k_parts):
        k_full = kv.wait_and_advance() if index == 0 else k_parts[part]
        k = products.k[None, None, None, k_full.index]
        begin = part * slabs
        umma.issue_umma(products.qk, acc, q, k, False, range(begin, begin + slabs), begin)
        if const_expr(index + 1 == cut.q_tiles):
            k_full.release()
        in_hand.append(k_full)
    s_slot.commit()
    return kv, s, tuple(in_hand)


@cute.jit
def _multiply_pv(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    products: Products,
    index: cutlass.Constexpr[int],
    accumulate: Boolean,
    kv: PipelineConsumer,
    answers: Answers,
    v_parts: Sequence[Any],
):
    """Issues PV of query tile ``index``: over three quarters of the keys, then over the rest.

    Returns the advanced ends, and the stages with the values. These are waited for, passed on and
    released like the stages with the keys in ``_multiply_qk``.
    """
    scaled, p, p_rest = answers
    cut = tiling_of(variant)
    pv, slabs, in_hand = products.pv, cut.kv_rows // SLAB, []
    acc = cute.make_tensor(x.tmem + variant.plan.columns(f"o{index}").start, products.o)
    first = HANDED_OVER_FIRST * CHUNK // SLAB
    for part in cutlass.range_constexpr(cut.v_parts):
        v_full = kv.wait_and_advance() if index == 0 else v_parts[part]
        if const_expr(part == 0):
            scaled.wait_and_advance()
            p_full = p.wait_and_advance()
            umma.after_thread_sync()
            start = x.tmem + scores_at(variant, "p", index, p_full.index)
            a = cute.make_tensor(cute.recast_ptr(start, dtype=variant.dtype), products.p)
        b = products.v[None, None, None, v_full.index]
        begin, end = part * slabs, (part + 1) * slabs
        early, late = range(begin, min(end, first)), range(max(begin, first), end)
        if const_expr(len(early) > 0):
            umma.issue_umma(pv, acc, a, b, accumulate, early, begin)
        if const_expr(begin <= first < end):
            p_rest.wait_and_advance()
            umma.after_thread_sync()
        if const_expr(len(late) > 0):
            umma.issue_umma(pv, acc, a, b, accumulate, late, begin)
        if const_expr(index + 1 == cut.q_tiles):
            v_full.release()
        in_hand.append(v_full)
    return kv, Answers(scaled, p, p_rest), tuple(in_hand)


def stores_whole_tile(variant: Variant, x: ForwardContext, work: Work, index: int) -> Boolean:
    """Whether TMA can store all 128 rows of a query tile.

    The rows must belong to one head, and each to the sequence, or lie beyond the array's end, where
    TMA stores nothing. Otherwise threads store their rows, but not those of the next sequence.
    """
    is_whole = x.packing.heads == 1
    if variant.is_general:
        end = work.span.first_row + (index + 1) * MMA_ROWS
        is_packed = x.scalars.sequences.cu_seqlens.own.toint() != 0
        is_whole &= (end <= work.span.own_slot) | ~is_packed
    return is_whole


class StorePipes(NamedTuple):
    """The end held by the role store."""

    out: PipelineConsumer


@cute.jit
def store(variant: cutlass.Constexpr, x: ForwardContext, pipes: StorePipes):
    """Writes finished tiles to global memory by TMA. One warp.

    waits   out full (correction)     signals out empty (correction)
    """
    cut, out = tiling_of(variant), pipes.out
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        for i in cutlass.range_constexpr(cut.q_tiles * cut.out_parts):
            index, part = divmod(i, cut.out_parts)
            full = out.wait_and_advance()
            if stores_whole_tile(variant, x, work, index):
                _store_part(variant, x, work, index, part, full)
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            with cute.arch.elect_one():
                full.release()
        tile = tile_at(variant, x, tile.slot + 1)


@cute.jit
def _store_part(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    work: Work,
    index: cutlass.Constexpr[int],
    part: cutlass.Constexpr[int],
    full,
):
    """Stores part ``part`` of the columns of query tile ``index``.

    TMA does not store rows beyond the array's last.
    """
    first = work.span.first_row
    head = tiles.row_at(x.packing, work.tile, first, 0).head
    rows = x.arrays.out[None, None, head, work.tile.batch]
    columns = tiling_of(variant).out_columns
    gOut = _blocks(rows, work.span.own_start + first, MMA_ROWS, columns)
    sOut, gOut = primitives.tma_views(x.tma.out, x.smem.out, gOut)
    cute.copy(x.tma.out, sOut[None, full.index], gOut[None, index, part])
    cute.arch.cp_async_bulk_commit_group()
