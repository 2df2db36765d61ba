"""Forward by mma.sync for few query rows, as in decoding, where the keys are the work.

    CTA      wait k(n), v(n); barrier; load k(n-1), v(n-1)  |  wait k(n-1), v(n-1) ...
    warp i   S softmax PV of its share of the block's keys  |  the same for the next
    CTA      statistics and O of every warp to shared memory; barrier; rows of out, and lse

A tile has 16 rows, the fewest that mma.sync multiplies: positions of all heads that share keys, if
they fit. Warps split the keys instead of the rows, so that no warp works on absent rows. Memory is
the bottleneck: several small CTAs on a multiprocessor keep it busy while others begin and end. CTAs
may split the keys of a tile, too, and then write parts (``combine.py``). The idea is
Flash-Decoding's (Dao et al., 2023). Memory: ``plan_few.py``; conventions: ``spec/problem.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from jax_fa.kernels import (
    combine,
    dense_mask,
    edges,
    fragment_softmax,
    fragments,
    primitives,
    softmax,
)
from jax_fa.kernels.forward_host import ForwardCall, forward_entry, forward_order
from jax_fa.kernels.forward_work import (
    Arrays,
    Scalars,
    Variant,
    Work,
    batch_of_part,
    below,
    row_of_tile,
    sink_of,
    work_on,
)
from jax_fa.kernels.fragment_rows import mask_by_place, mask_by_words
from jax_fa.kernels.mma_sync import products, shell
from jax_fa.kernels.mma_sync.fwd_order import (
    CtaOrder,
    cta_order,
    narrow_keys_of_cta,
    tile_of_cta,
)
from jax_fa.kernels.mma_sync.fwd_work import load_rows, multiply_keys, multiply_values
from jax_fa.kernels.mma_sync.loads import address_of_row
from jax_fa.kernels.mma_sync.panels import ALIGNMENT_BYTES, PIECE, PIECE_BYTES, Panels
from jax_fa.kernels.mma_sync.plan_few import few_plan, row_floats, row_of_threads
from jax_fa.kernels.primitives import dense, dense_stats
from jax_fa.kernels.unmasked import hides_pairs
from jax_fa.spec import division
from jax_fa.spec.band import ceil_div
from jax_fa.spec.config_mma_sync import WARP_ROWS, FewQueries
from jax_fa.spec.key import KernelKey

FLOATS = 4
"""Floats in a 16-byte access."""


class FewTiles(NamedTuple):
    """Layouts of the tiles in shared memory."""

    q: Panels
    k: Panels
    v: Panels


class FewSmem(NamedTuple):
    """Shared memory: addresses, and a tensor."""

    q: Int32
    k: Int32  # of the first of ``stages``
    v: Int32  # of the first of ``stages``
    sums: Int32  # float32 [warps, 16, row_floats], in place of keys and values
    stats: Int32  # float32 [warps, 16, 2]: maximum, sum
    found: cute.Tensor  # (FOUND_WORDS,) segments.py, dense_mask.py


class FewContext(NamedTuple):
    """The kernel's arguments and shared memory."""

    arrays: Arrays
    scalars: Scalars
    order: CtaOrder
    smem: FewSmem
    packing: Any  # division.Packing


class Share(NamedTuple):
    """A warp's share of the keys: accumulators and statistics of 16 rows."""

    scores: cute.Tensor  # accumulator of 16 x own_keys
    out: cute.Tensor  # accumulator of 16 x Dv
    state: fragment_softmax.RowState
    index: Int32  # as in ``fragment_rows.py``
    thread: Int32  # likewise: the lane


class Place(NamedTuple):
    """The next block, and how many are left, this one included; that also tells its stage."""

    block: Int32
    remaining: Int32


def tiles_of(variant: Variant) -> FewTiles:
    """The tiles of a variant."""
    key, config = variant.key, variant.config
    return FewTiles(
        q=Panels(config.block_q, key.head_dim),
        k=Panels(config.block_kv, key.head_dim),
        v=Panels(config.block_kv, key.value_dim),
    )


def of_warp(variant: Variant) -> Variant:
    """The variant whose blocks are the warps' shares of blocks."""
    return variant._replace(config=replace(variant.config, block_kv=variant.config.own_keys))


def make_entry(key: KernelKey, config: FewQueries) -> Callable:
    """The flat host entry of one variant."""
    return forward_entry(Variant(key, config, few_plan(key, config)), launch)


@cute.jit
def launch(variant: cutlass.Constexpr, call: ForwardCall) -> None:
    """Launches the kernel, and the one that merges parts."""
    launch_parts(variant, call)
    combine.merge_parts(variant, call)


@cute.jit
def launch_parts(variant: cutlass.Constexpr, call: ForwardCall) -> None:
    """Launches the kernel."""
    config, queries, widths = variant.config, call.queries, call.widths
    parts = queries._replace(batch=queries.batch * call.scalars.num_splits)
    lse = call.lse.toint()
    if call.scalars.num_splits > 1:
        lse = call.lse_parts.toint()
    lse_pointer = cute.make_ptr(Float32, lse, cute.AddressSpace.gmem, assumed_align=4)
    arrays = Arrays(
        q=dense(call.q, queries, widths.qk),
        k=dense(call.k, call.keys, widths.qk),
        v=dense(call.v, call.keys, widths.v),
        out=dense(call.out, queries, widths.v),
        out_rows=dense(call.out_parts, parts, widths.v),
        lse=dense_stats(lse_pointer, parts),
    )
    group = queries.heads // call.keys.heads
    packing = division.packing(config.block_q, group, config.granule)
    order, num_ctas = forward_order(variant, call, packing)
    kernel(variant, arrays, call.scalars, cta_order(order), packing).launch(
        grid=(num_ctas, 1, 1),
        block=(variant.plan.threads, 1, 1),
        stream=call.stream,
        min_blocks_per_mp=1,
    )


@cute.kernel
def kernel(
    variant: cutlass.Constexpr, arrays: Arrays, scalars: Scalars, order: CtaOrder, packing: Any
) -> None:
    """Device entry: shared memory, and the tile of the CTA."""
    layout, config, dtype = tiles_of(variant), variant.config, variant.dtype
    loaded = config.stages * (layout.k.elements + layout.v.elements)

    @cute.struct
    class Storage:
        q: cute.struct.Align[cute.struct.MemRange[dtype, layout.q.elements], ALIGNMENT_BYTES]
        kv: cute.struct.Align[cute.struct.MemRange[dtype, loaded], ALIGNMENT_BYTES]
        stats: cute.struct.Align[cute.struct.MemRange[Float32, 2 * WARP_ROWS * config.warps], 8]
        found: cute.struct.MemRange[Int32, division.FOUND_WORDS]

    storage = SmemAllocator().allocate(Storage)
    kv = storage.kv.data_ptr().toint()
    smem = FewSmem(
        q=storage.q.data_ptr().toint(),
        k=kv,
        v=kv + config.stages * layout.k.size_bytes,
        sums=kv,
        stats=storage.stats.data_ptr().toint(),
        found=storage.found.get_tensor(cute.make_layout(division.FOUND_WORDS)),
    )
    x = FewContext(arrays, scalars, order, smem, packing)
    shell.narrow(variant, x, narrow_keys_of_cta)
    attend(variant, x)


@cute.jit
def attend(variant: cutlass.Constexpr, x: FewContext) -> None:
    """Computes the tile of the CTA."""
    work = work_on(variant, x, tile_of_cta(x.order))
    c = Share(
        scores=fragments.accumulator(variant.config.own_keys),
        out=fragments.accumulator(variant.key.value_dim),
        state=fragment_softmax.make_row_state(),
        index=Int32(0),
        thread=products.thread_index() % edges.WARP,
    )
    at = Place(work.blocks.end - 1, work.num_blocks)
    load_q(variant, x, work)
    load_block(variant, x, work, at)
    fragment_softmax.reset(c.state)
    c.out.fill(0.0)
    queries = None
    if const_expr(variant.config.q_in_registers):
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        place = place_of_queries(variant, x)
        columns = range(0, variant.key.head_dim, products.DEPTH)
        queries = [fetch_q(variant, place, column) for column in columns]
    while at.remaining > 0:
        at = step(variant, x, c, queries, work, at)
    # HAZARD: sums overwrite keys and values, which all warps have multiplied by now.
    cute.arch.sync_threads()
    put_sums(variant, x, c)
    cute.arch.sync_threads()
    store(variant, x, work)


@cute.jit
def load_q(variant: cutlass.Constexpr, x: FewContext, work: Work) -> None:
    """Starts the load of the query tile, with zeros for absent rows, by all threads."""
    tile, span, threads = tiles_of(variant).q, work.span, variant.plan.threads
    in_row = variant.key.head_dim // PIECE
    number = tile.rows * in_row
    for i in cutlass.range_constexpr(ceil_div(number, threads)):
        own = products.thread_index() + i * threads
        if own < number:
            row, piece = own // in_row, own % in_row
            at = row_of_tile(variant, x, work, row)
            is_there = at.is_there & (at.position < span.own_slot)
            rows = x.arrays.q[None, None, at.head, work.tile.batch]
            is_there = is_there & (piece * PIECE < cute.size(rows, mode=[1]))
            source = address_of_row(rows, span.own_start + at.position) + piece * PIECE_BYTES
            place = tile.place(row, piece % tile.pieces) + piece // tile.pieces * tile.panel_bytes
            size_bytes = Int32(PIECE_BYTES) if is_there else Int32(0)
            products.copy_piece(x.smem.q + place, source, size_bytes)


@cute.jit
def load_block(variant: cutlass.Constexpr, x: FewContext, work: Work, at: Place) -> None:
    """Starts the loads of a block of keys and values, by all threads."""
    layout = tiles_of(variant)
    stage = at.remaining & (variant.config.stages - 1)  # stages are one or two
    k, v = x.smem.k + stage * layout.k.size_bytes, x.smem.v + stage * layout.v.size_bytes
    load_rows(variant, layout.k, k, x.arrays.k, work, at.block)
    load_rows(variant, layout.v, v, x.arrays.v, work, at.block)
    cute.arch.cp_async_commit_group()


def place_of_queries(variant: Variant, x: FewContext) -> Int32:
    """The address from which a lane fetches the queries."""
    return x.smem.q + products.by_rows(tiles_of(variant).q, products.thread_index() % edges.WARP)


def fetch_q(variant: Variant, place: Int32, column: int) -> products.Four:
    """16 columns of the queries, from ``column`` on, as an A operand."""
    return products.fetch(tiles_of(variant).q.beside(place, column))


@cute.jit
def step(
    variant: cutlass.Constexpr,
    x: FewContext,
    c: Share,
    queries: Any,
    work: Work,
    at: Place,
) -> Place:
    """Adds the warp's share of a block to its sums, and loads the next one; returns its place.

    ``queries`` is what ``fetch_q`` returned for each 16 columns, or None.
    """
    config = variant.config
    stage = at.remaining & (config.stages - 1)
    following = Place(below(variant, x, at.block), at.remaining - 1)
    cute.arch.cp_async_wait_group(0)
    # HAZARD: all threads' copies of this block have arrived, and all warps are done with the
    # previous block, which the next copies overwrite.
    cute.arch.sync_threads()
    if following.remaining > 0:
        load_block(variant, x, work, following)
    warp = products.thread_index() // edges.WARP
    multiply_qk(variant, x, c, queries, stage, warp)
    if hides_pairs(variant, x.scalars, work.blocks, x.smem.found, at.block):
        hide(variant, x, c, work, at.block, warp)
    shrink = cute.make_rmem_tensor((fragments.ROWS,), Float32)
    shrinks = fragment_softmax.update(c.scores, c.state, shrink, x.scalars.scale_log2)
    if const_expr(config.scales_always):
        fragment_softmax.scale_rows(c.out, shrink)
    else:
        for _ in cutlass.range(products.one_if_any(shrinks), unroll=1):
            fragment_softmax.scale_rows(c.out, shrink)
    multiply_pv(variant, x, c, stage, warp)
    return following


@cute.jit
def hide(
    variant: cutlass.Constexpr, x: FewContext, c: Share, work: Work, block: Int32, warp: Int32
) -> None:
    """Hides, in the warp's share of a block, the keys that a row does not see."""
    own, share = of_warp(variant), block * variant.config.warps + warp
    mask_by_place(own, x, c, work, c.scores, share)
    if dense_mask.is_present(x.scalars.mask):
        if dense_mask.hides(x.smem.found, block):
            mask_by_words(own, x, c, work, c.scores, share)


@cute.jit
def multiply_qk(
    variant: cutlass.Constexpr,
    x: FewContext,
    c: Share,
    queries: Any,
    stage: Int32,
    warp: Int32,
) -> None:
    """Computes the scores of all rows for the warp's share of the keys."""
    config, tile, lane = variant.config, tiles_of(variant).k, products.thread_index() % edges.WARP
    keys = x.smem.k + stage * tile.size_bytes + warp * (config.own_keys * tile.width)
    keys = keys + products.by_columns(tile, lane)
    place = place_of_queries(variant, x)
    c.scores.fill(0.0)
    for k in cutlass.range_constexpr(0, variant.key.head_dim, products.DEPTH):
        if const_expr(queries is None):
            a = fetch_q(variant, place, k)
        else:
            a = queries[k // products.DEPTH]
        multiply_keys(variant, [c], [a], tile, tile.beside(keys, k), config.own_keys)


@cute.jit
def multiply_pv(
    variant: cutlass.Constexpr, x: FewContext, c: Share, stage: Int32, warp: Int32
) -> None:
    """Adds the warp's share of the values, weighted by the probabilities, to O."""
    config, tile, lane = variant.config, tiles_of(variant).v, products.thread_index() % edges.WARP
    values = x.smem.v + stage * tile.size_bytes + warp * (config.own_keys * tile.width)
    values = values + products.by_rows(tile, lane)
    for first in cutlass.range_constexpr(0, config.own_keys, products.DEPTH):
        multiply_values(variant, [c], tile, values, first)


@cute.jit
def put_sums(variant: cutlass.Constexpr, x: FewContext, c: Share) -> None:
    """Writes O and the statistics of the warp to shared memory."""
    thread = products.thread_index()
    lane, warp = thread % edges.WARP, thread // edges.WARP
    values, first = fragments.by_row(c.out), fragments.first_column(lane)
    for r in cutlass.range_constexpr(fragments.ROWS):
        row = warp * WARP_ROWS + lane // 4 + 8 * r
        total = fragment_softmax.quad_sum(c.state.total[r])
        if first == 0:
            store_floats(x.smem.stats + row * 8, c.state.maximum[r], total)
        place = x.smem.sums + (row * row_floats(variant.key) + first) * 4
        for i in cutlass.range_constexpr(0, cute.size(values, mode=[1]), 2):
            store_floats(place + fragments.column_of(i) * 4, values[r, i], values[r, i + 1])


@cute.jit
def store(variant: cutlass.Constexpr, x: FewContext, work: Work) -> None:
    """Merges the results of all warps, and writes out and lse, or a part of them.

    The same number of threads works on each row; together they write a stretch of it at a time.
    """
    config, span = variant.config, work.span
    thread, of_row = products.thread_index(), variant.plan.threads // WARP_ROWS
    row, own = row_of_threads(thread // of_row, of_row), thread % of_row
    stats = [load_two(x.smem.stats + (w * WARP_ROWS + row) * 8) for w in range(config.warps)]
    maximum = -Float32.inf
    for w in cutlass.range_constexpr(config.warps):
        maximum = cute.arch.fmax(maximum, stats[w].first)
    # (-inf) - (-inf) would be NaN; relative to 0, a warp that saw no keys has weight 0.
    reference = Float32(0.0) if maximum == -Float32.inf else maximum
    weights, total = [], Float32(0.0)
    for w in cutlass.range_constexpr(config.warps):
        exponent = (stats[w].first - reference) * x.scalars.scale_log2
        weights.append(cute.math.exp2(exponent, fastmath=True))
        total = total + weights[w] * stats[w].second
    at = row_of_tile(variant, x, work, row)
    sink = sink_of(variant, x, work, at.head)
    factor, lse = softmax.finish_whole_row(maximum * x.scalars.scale_log2, total, sink)
    is_used = at.position < span.own_len
    lse = lse if is_used else -Float32.inf
    if at.is_there & (at.position < span.own_slot):
        place, batch = span.own_start + at.position, batch_of_part(variant, x, work)
        if own == 0:
            x.arrays.lse[place, at.head, batch] = lse
        whole = address_of_elements(x.arrays.out[place, None, at.head, work.tile.batch])
        part = address_of_elements(x.arrays.out_rows[place, None, at.head, batch])
        for j in cutlass.range_constexpr(variant.key.value_dim // FLOATS // of_row):
            four = own + j * of_row
            sums = [Float32(0.0)] * FLOATS
            for w in cutlass.range_constexpr(config.warps):
                in_row = (w * WARP_ROWS + row) * row_floats(variant.key) + four * FLOATS
                loaded = load_four(x.smem.sums + in_row * 4)
                sums = [sums[i] + weights[w] * loaded[i] for i in range(FLOATS)]
            # The query of a row that is not used may hold anything, even NaN.
            sums = [one * factor if is_used else Float32(0.0) for one in sums]
            if four * FLOATS < cute.size(x.arrays.out, mode=[1]):
                if x.scalars.num_splits > 1:
                    store_four(part + four * (FLOATS * 4), *sums)
                else:
                    words = [
                        primitives.narrow_pair(sums[i], sums[i + 1], variant.dtype) for i in (0, 2)
                    ]
                    store_words(whole + four * (FLOATS * 2), *words)


def address_of_elements(row: cute.Tensor) -> Int64:
    """The address of a row's first element."""
    return row.iterator.toint()


class Two(NamedTuple):
    """Two neighbouring floats in memory."""

    first: Float32
    second: Float32


def store_floats(address: Int32, first: Float32, second: Float32) -> None:
    """Writes two floats to shared memory."""
    cute.arch.inline_ptx(
        "st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, first, second]
    )


def load_two(address: Int32) -> Two:
    """Reads two floats from shared memory."""
    return Two(
        *cute.arch.inline_ptx(
            "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
            write_only_types=[Float32] * 2,
            read_only_args=[address],
        )
    )


def load_four(address: Int32) -> tuple[Float32, ...]:
    """Reads four floats from shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * FLOATS,
        read_only_args=[address],
    )


def store_four(address: Int64, *floats: Float32) -> None:
    """Writes four floats to global memory."""
    cute.arch.inline_ptx(
        "st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *floats]
    )


def store_words(address: Int64, *words: Int32) -> None:
    """Writes two words to global memory."""
    cute.arch.inline_ptx(
        "st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, *words]
    )
