"""The roles of the Hopper forward: load, consume; ``fwd.py`` has the diagram."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.kernels import (
    dense_mask,
    edges,
    fragment_softmax,
    fragments,
    loads,
    primitives,
    softmax,
    tiles,
)
from jax_fa.kernels.forward_work import Work, batch_of_part, below, load_granules
from jax_fa.kernels.fragment_rows import (
    finish_rows,
    mask_by_place,
    mask_by_words,
    rows_of_thread,
    store_part,
)
from jax_fa.kernels.sm90.fwd_lists import anew, begin, next_tile, on_list, release
from jax_fa.kernels.sm90.fwd_steps import next_step, step_after, tell
from jax_fa.kernels.sm90.fwd_work import (
    ForwardConsumer,
    ForwardContext,
    ForwardPipes,
    KvPipes,
    make_consumer,
    make_layouts,
    thread_anew,
)
from jax_fa.kernels.sm90.plan import WGMMA_ROWS
from jax_fa.kernels.unmasked import hides_pairs

HELD_BY = 8
"""The register of a probability behind which PV of the block before is waited for. H200,
D = 64, causal, 16 x 1024 tokens: 133 us; wherever ptxas puts the wait 140; behind all 144."""


class LoadedBlocks(NamedTuple):
    """The state of the role load after some blocks of keys and values."""

    k: PipelineProducer
    v: PipelineProducer
    phase: Int32  # of the barrier ``zero_fill``
    number: Int32  # of steps in the tiles before


@cute.jit
def load(variant: cutlass.Constexpr, x: ForwardContext, pipes: ForwardPipes) -> None:
    """Loads each query tile and its key and value blocks, newest first. One warp."""
    q, k, v = pipes
    phase, number = Int32(0), Int32(0)
    tile = next_tile(variant, x, Int32(0))
    if tile.is_valid:
        work = begin(variant, x, tile)
        load_q(variant, x, work, q.acquire_and_advance())
        load_k(x, work, work.blocks.end - 1, k.acquire_and_advance())
        if const_expr(variant.config.is_persistent):
            tile = next_tile(variant, x, work.tile.slot + 1)
            while tile.is_valid:
                # Begun before the long loop, which hides the latency of lengths read from memory.
                next_work = begin(variant, x, tile)
                loaded = LoadedBlocks(k, v, phase, number)
                k, v, phase, number = load_middle(variant, x, work, loaded)
                before, work = work, next_work
                load_q(variant, x, work, q.acquire_and_advance())
                load_k(x, work, work.blocks.end - 1, k.acquire_and_advance())
                slot = v.acquire_and_advance()
                phase = load_v(variant, x, before, before.blocks.start, slot, phase)
                tile = next_tile(variant, x, work.tile.slot + 1)
        k, v, phase, number = load_middle(variant, x, work, LoadedBlocks(k, v, phase, number))
        load_v(variant, x, work, work.blocks.start, v.acquire_and_advance(), phase)
        # HAZARD: the CTA must not exit while consumers still have to arrive at these barriers.
        q.tail()
        k.tail()
        v.tail()


@cute.jit
def load_middle(
    variant: cutlass.Constexpr, x: ForwardContext, work: Work, loaded: LoadedBlocks
) -> LoadedBlocks:
    """Loads keys of all blocks but the newest, each followed by the previous block's values."""
    k, v, phase, number = loaded
    x, block = on_list(variant, x, work), work.blocks.end - 1
    following = below(variant, x, block)
    for _ in cutlass.range(work.num_blocks - 1, unroll=1):
        number = number + 1
        after = tell(variant, x, work, following, number)
        slot = k.acquire_and_advance()
        load_k(x, work, following, slot)
        slot = v.acquire_and_advance()
        phase = load_v(variant, x, work, block, slot, phase)
        block, following = following, after
    release(variant, x, work)
    return LoadedBlocks(k, v, phase, number + 1)


@cute.jit
def load_q(variant: cutlass.Constexpr, x: ForwardContext, work: Work, slot: Any) -> None:
    """Loads the query tile, 64 rows at a time."""
    consumers = variant.config.num_consumers
    rows = loads.Rows(work.span.own_start + work.span.first_row, work.tile.head, work.tile.batch)
    for i in cutlass.range_constexpr(consumers):
        stage = slot.index * consumers + i
        if const_expr(not variant.config.packs_heads):
            loads.load(loads.operand(x, "q", stage), rows, i, slot)
        elif x.packing.heads == 1:
            loads.load(loads.operand(x, "q", stage), rows, i, slot)
        else:
            load_granules(variant, x, work, i * WGMMA_ROWS, stage, slot.barrier)


def load_k(x: ForwardContext, work: Work, block: Int32, slot: Any) -> None:
    """Loads a block of keys."""
    rows = loads.Rows(work.span.swept_start, work.tile.kv_head, work.tile.batch)
    loads.load(loads.operand(x, "k"), rows, block, slot)


@cute.jit
def load_v(
    variant: cutlass.Constexpr, x: ForwardContext, work: Work, block: Int32, slot: Any, phase: Int32
) -> Int32:
    """Loads a block of values, zeros after the sequence's end; returns the detour's phase."""
    rows = loads.Rows(work.span.swept_start, work.tile.kv_head, work.tile.batch)
    if const_expr(variant.is_general):
        num_used = work.span.swept_len - block * variant.config.block_kv
        detour = loads.Detour(x.smem.zero_fill, phase)
        phase = loads.load_zero_filled(loads.operand(x, "v"), rows, block, num_used, slot, detour)
    else:
        loads.load(loads.operand(x, "v"), rows, block, slot)
    return phase


@cute.jit
def fetch_q(variant: cutlass.Constexpr, x: ForwardContext, c: ForwardConsumer, q_index: Int32):
    """Copies 64 query rows to registers, if the product reads them from there."""
    if const_expr(variant.config.q_in_registers):
        atom = cute.make_copy_atom(cute.nvgpu.warp.LdMatrix8x8x16bOp(False, 4), variant.dtype)
        copy = cute.make_tiled_copy_A(atom, c.qk).get_slice(c.thread)
        cute.copy(copy, copy.partition_S(x.smem.q[None, None, q_index]), copy.retile(c.q))


class Scored(NamedTuple):
    """S of a block, and what it was computed from."""

    scores: cute.Tensor
    q_index: Int32
    k_full: Any  # the stage of keys that S reads
    is_odd: Boolean  # fwd_bias_product.py


class Products(NamedTuple):
    """S of a block and PV of the previous one, in flight, and the pipes, advanced."""

    scored: Scored
    v_full: Any  # the stage of values that PV reads
    k: PipelineConsumer
    v: PipelineConsumer


@cute.jit
def score(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    c: ForwardConsumer,
    q_index: Int32,
    k_full: Any,
    follows: cutlass.Constexpr[bool],
) -> Scored:
    """Issues S of a block, with its bias if that is a product."""
    scores = c.qk.make_fragment_C(c.qk.partition_shape_C((WGMMA_ROWS, variant.config.block_kv)))
    keys = c.k[None, None, None, k_full.index]
    rows = c.q if variant.config.q_in_registers else c.q[None, None, None, q_index]
    key = variant.key  # Float32 biases, D = 32, 32 x 384 tokens: 58 us, with the choice 59.
    if const_expr(key.head_dim == 64 and key.multiplies_bias == key.has_bias):
        fragments.multiply_filled(c.qk, scores, rows, keys, cute.size(x.arrays.k, mode=[1]))
    else:
        fragments.multiply(c.qk, scores, rows, keys, False)
    is_odd = Boolean(False)
    if const_expr(variant.key.multiplies_bias):
        is_odd = variant.bias.multiply(variant, x, c, scores, k_full.count, follows)
    return Scored(scores, q_index, k_full, is_odd)


class Place(NamedTuple):
    """A consumer's pipes, and its next step."""

    k: PipelineConsumer
    v: PipelineConsumer
    block: Int32
    hides: Boolean


@cute.jit
def products(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    c: ForwardConsumer,
    q_index: Int32,
    pipes: KvPipes,
    follows: cutlass.Constexpr[bool] = True,
) -> Products:
    """Issues S of the next block, which ``follows`` in the same tile or not, and current PV."""
    k, v = pipes.k, pipes.v
    k_full = k.wait_and_advance()
    if const_expr(variant.key.multiplies_bias):
        variant.bias.wait(variant, x, k_full.count)
    primitives.meet(variant, "pingpong0", c.index)
    scored = score(variant, x, c, q_index, k_full, follows)
    if const_expr(variant.config.scales_late):
        fragment_softmax.scale_rows(c.out, c.shrink)
    v_full = v.wait_and_advance()
    fragments.multiply(c.pv, c.out, c.p, c.v[None, None, None, v_full.index], True)
    primitives.arrive(variant, "pingpong0", (c.index + 1) % variant.config.num_consumers)
    return Products(scored, v_full, k, v)


@cute.jit
def middle(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    c: ForwardConsumer,
    work: Work,
    q_index: Int32,
    pipes: KvPipes,
) -> KvPipes:
    """Processes all blocks but the newest, except PV of the oldest; returns the pipes, advanced."""
    x, work = on_list(variant, x, work), anew(variant, x, work)
    blocks, newest = work.blocks, work.blocks.end - 1
    at = Place(pipes.k, pipes.v, *step_after(variant, x, work, newest))
    if const_expr(variant.key.has_bias and variant.is_general):
        at = variant.bias.steps(variant, step, x, c, work, q_index, at)
    elif const_expr(variant.is_general and variant.config.is_persistent):
        # One step of each kind. Three loops, over masked, full and masked blocks, spill. Where a
        # CTA has one tile (D = 256), two kinds are slower.
        for _ in cutlass.range(work.num_blocks - 1, unroll=1):
            if at.hides:
                at = step(variant, True, x, c, work, q_index, at)
            else:
                at = step(variant, False, x, c, work, q_index, at)
    elif const_expr(variant.is_general):
        for _ in cutlass.range(work.num_blocks - 1, unroll=1):
            at = step(variant, at.hides, x, c, work, q_index, at)
    else:
        if const_expr(variant.key.mask == "causal"):
            for i in cutlass.range(newest - blocks.full_end, unroll=1):
                at = at._replace(block=newest - 1 - i)
                at = step(variant, True, x, c, work, q_index, at)
        last = cutlass.min(newest, blocks.full_end)
        for i in cutlass.range(last - blocks.full_start, unroll=1):
            at = at._replace(block=last - 1 - i)
            at = step(variant, False, x, c, work, q_index, at)
    return KvPipes(at.k, at.v)


@cute.jit
def step(
    variant: cutlass.Constexpr,
    hides: Boolean,
    x: ForwardContext,
    c: ForwardConsumer,
    work: Work,
    q_index: Int32,
    at: Place,
    form: cutlass.Constexpr[int] = 0,  # of a bias: plan_bias.py
) -> Place:
    """Computes S and softmax of a block, masked if it ``hides`` keys, and PV of the one before."""
    scored, v_full, k, v = products(variant, x, c, q_index, KvPipes(at.k, at.v))
    # Found here, while products run: between two steps, the latency would not be hidden.
    following = next_step(variant, x, at.block, scored.k_full.count)
    warpgroup.wait_group(1)  # for S
    if const_expr(not variant.key.multiplies_bias):
        scored.k_full.release()
    shrinks = to_probabilities(variant, x, c, work, at.block, hides, scored, form)
    if const_expr(variant.config.is_persistent):  # D = 256, causal, 2 x 8192: 1761 us without, 1810
        primitives.hold_until(cute.recast_tensor(scored.scores, Int32)[HELD_BY], x.smem.zero_fill)
    warpgroup.wait_group(0)
    v_full.release()
    # HAZARD: P is the A operand of PV until the wait above; rewriting it earlier corrupts PV.
    primitives.narrow(scored.scores, c.p)
    if const_expr(not variant.config.scales_late):
        if shrinks:
            fragment_softmax.scale_rows(c.out, c.shrink)
    return Place(k, v, *following)


@cute.jit
def to_probabilities(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    c: ForwardConsumer,
    work: Work,
    block: Int32,
    hides: Boolean,
    scored: Scored,
    form: cutlass.Constexpr[int] = 0,
) -> Boolean:
    """Caps a block's scores, masks them if the block ``hides`` keys, and exponentiates them.

    Returns whether the accumulator has to shrink, by ``c.shrink``.
    """
    shrinks = Boolean(True)
    if const_expr(variant.key.has_bias):
        shrinks = variant.bias.to_probabilities(variant, x, c, work, block, hides, scored, form)
    else:
        if const_expr(variant.key.has_soft_cap):
            softmax.cap(scored.scores, x.scalars.cap_inner_log2)
        if hides:
            mask_block(variant, x, c, work, scored.scores, block)
        scale_log2 = x.scalars.scale_log2
        shrinks = fragment_softmax.update(scored.scores, c.state, c.shrink, scale_log2)
    return shrinks


@cute.jit
def mask_block(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    c: ForwardConsumer,
    work: Work,
    scores: cute.Tensor,
    block: Int32,
) -> None:
    """Masks, for each row, the scores of those keys of a block that it does not see."""
    hides_by_place = True
    if const_expr(variant.is_general):
        if dense_mask.is_present(x.scalars.mask):
            if dense_mask.hides(x.smem.found, block):
                own, at = thread_anew(variant, c), primitives.opaque(block)
                mask_by_words(variant, x, own, anew(variant, x, work), scores, at)
        _, full_start, full_end, _ = anew(variant, x, work).blocks
        hides_by_place = (block >= full_end) | (block < full_start)
    if hides_by_place:
        mask_by_place(variant, x, thread_anew(variant, c), anew(variant, x, work), scores, block)


@cute.jit
def first_probabilities(
    variant: cutlass.Constexpr, x: ForwardContext, c: ForwardConsumer, work: Work, scored: Scored
) -> None:
    """Resets the statistics and applies ``to_probabilities`` to a tile's newest block."""
    x, newest = on_list(variant, x, work), work.blocks.end - 1
    fragment_softmax.reset(c.state)
    hides = hides_pairs(variant, x.scalars, work.blocks, x.smem.found, newest)
    to_probabilities(variant, x, c, work, newest, hides, scored)


@cute.jit
def consume(variant: cutlass.Constexpr, x: ForwardContext, pipes: ForwardPipes) -> None:
    """Computes both products and the softmax of 64 query rows. One warpgroup of several."""
    config = variant.config
    stores_late = config.q_stages > 3
    tile = next_tile(variant, x, Int32(0))
    if tile.is_valid:
        c = make_consumer(variant, x)
        q, k, v = pipes
        work = begin(variant, x, tile)
        if c.index == config.num_consumers - 1:
            primitives.arrive(variant, "pingpong0", (c.index + 1) % config.num_consumers)
        q_full = q.wait_and_advance()
        k_full = k.wait_and_advance()
        q_index = q_full.index * config.num_consumers + c.index
        fetch_q(variant, x, c, q_index)
        scored = score(variant, x, c, q_index, k_full, False)
        warpgroup.wait_group(0)
        if const_expr(not variant.key.multiplies_bias):
            k_full.release()
        first_probabilities(variant, x, c, work, scored)
        primitives.narrow(scored.scores, c.p)
        c.out.fill(0.0)
        if const_expr(config.is_persistent):
            stored = q_full  # of the tile before, whose output TMA may still read
            tile = next_tile(variant, x, work.tile.slot + 1)
            while tile.is_valid:
                # Begun early: at the border, between two products, the latency would not be hidden.
                next_work = begin(variant, x, tile)
                k, v = middle(variant, x, c, work, q_index, KvPipes(k, v))
                before, before_index, work = work, q_index, anew(variant, x, next_work)
                q_next = q.wait_and_advance()
                q_index = q_next.index * config.num_consumers + c.index
                fetch_q(variant, x, c, q_index)
                scored, v_full, k, v = products(variant, x, c, q_index, KvPipes(k, v), False)
                warpgroup.wait_group(1)  # for S
                if const_expr(not variant.key.multiplies_bias):
                    scored.k_full.release()
                finished = fragment_softmax.copy(c.state)
                first_probabilities(variant, x, c, work, scored)
                bits = cute.recast_tensor(scored.scores, Int32)[HELD_BY]
                primitives.hold_until(bits, x.smem.zero_fill)
                warpgroup.wait_group(0)
                v_full.release()
                primitives.narrow(scored.scores, c.p)
                if const_expr(stores_late):
                    release_stored(c, stored, q_full)
                store(variant, x, c._replace(state=finished), before, before_index)
                release(variant, x, before)
                c.out.fill(0.0)
                if const_expr(not stores_late):
                    release_q(c, q_full)
                stored, q_full = q_full, q_next
                tile = next_tile(variant, x, work.tile.slot + 1)
        k, v = middle(variant, x, c, work, q_index, KvPipes(k, v))
        v_full = v.wait_and_advance()
        if const_expr(config.scales_late):
            fragment_softmax.scale_rows(c.out, c.shrink)
        primitives.meet(variant, "pingpong0", c.index)
        fragments.multiply(c.pv, c.out, c.p, c.v[None, None, None, v_full.index], True)
        primitives.arrive(variant, "pingpong0", (c.index + 1) % config.num_consumers)
        warpgroup.wait_group(0)
        v_full.release()
        if const_expr(stores_late):
            release_stored(c, stored, q_full)
        store(variant, x, c, work, q_index)
        release(variant, x, work)
        release_q(c, q_full)
        # The last consumer has arrived once more for the first; this wait completes that phase.
        if c.index == 0:
            primitives.meet(variant, "pingpong0", c.index)


@cute.jit
def release_stored(c: ForwardConsumer, stored: Any, q_full: Any) -> None:
    """Releases the query tile before that of ``q_full``, if there is one."""
    if q_full.count > 0:
        release_q(c, stored)


@cute.jit
def release_q(c: ForwardConsumer, q_full: Any) -> None:
    """Releases the query tile once the output staged in it has been read."""
    if c.thread < edges.WARP:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    q_full.release()


@cute.jit
def store(
    variant: cutlass.Constexpr, x: ForwardContext, c: ForwardConsumer, work: Work, q_index: Int32
) -> None:
    """Normalises and writes 64 rows, by TMA from where queries were unless a sequence ends here."""
    c, work = thread_anew(variant, c), anew(variant, x, work)
    rows = rows_of_thread(variant, x, c, work)
    finish_rows(variant, x, [c], work, [rows])
    if const_expr(variant.is_split):
        store_part(x, c, work, rows, batch_of_part(variant, x, work))
    else:
        rounded = cute.make_rmem_tensor_like(c.out, variant.dtype)
        primitives.narrow(c.out, rounded)
        is_cut = False
        if const_expr(variant.is_general):
            end_of_rows = work.span.first_row + (c.index + 1) * WGMMA_ROWS
            is_packed = tiles.is_present(x.scalars.sequences.cu_seqlens.own)
            is_cut = is_packed & (end_of_rows > work.span.own_slot)
        if is_cut:
            store_rows(x, c, work, rows, rounded)
        else:
            store_tile(variant, x, c, work, q_index, rounded)


@cute.jit
def store_rows(
    x: ForwardContext, c: ForwardConsumer, work: Work, rows: list[tiles.RowAt], rounded: cute.Tensor
) -> None:
    """Writes rows one by one, leaving those of the next packed sequence alone."""
    span, tile = work.span, work.tile
    gOut = cute.recast_tensor(x.arrays.out_rows[None, None, tile.head, tile.batch], Int32)
    pairs = fragments.pairs_by_row(rounded)
    first = fragments.first_column(c.thread) // 2
    for r in cutlass.range_constexpr(fragments.ROWS):
        position = rows[r].position
        if position < span.own_slot:
            for i in cutlass.range_constexpr(cute.size(pairs, mode=[1])):
                if 4 * i < cute.size(gOut, mode=[1]):
                    gOut[span.own_start + position, first + 4 * i] = pairs[r, i]


@cute.jit
def store_tile(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    c: ForwardConsumer,
    work: Work,
    q_index: Int32,
    rounded: cute.Tensor,
) -> None:
    """Writes 64 rows through shared memory; TMA skips those beyond the array's end."""
    layout = make_layouts(variant).out
    sOut = cute.make_tensor(x.smem.q[None, None, q_index].iterator, layout.outer)
    atom = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(False, 4), variant.dtype)
    copy = cute.make_tiled_copy_C(atom, c.pv).get_slice(c.thread)
    # HAZARD: out overwrites rows of q, so all four warps must be done with their products.
    primitives.meet(variant, "out0", c.index)
    cute.copy(copy, copy.retile(rounded), copy.partition_D(sOut))
    # HAZARD: stmatrix writes through the generic proxy, TMA reads through the async one.
    cute.arch.fence_view_async_shared()
    primitives.meet(variant, "out0", c.index)
    if c.thread < edges.WARP:
        rows = x.arrays.out[None, None, work.tile.head, work.tile.batch]
        rows = cute.domain_offset((work.span.own_start + work.span.first_row, 0), rows)
        gOut = cute.local_tile(rows, (WGMMA_ROWS, variant.key.value_dim), (None, 0))
        tile_smem, tiles_gmem = primitives.tma_views(x.tma.out, sOut, gOut)
        cute.copy(x.tma.out, tile_smem, tiles_gmem[None, c.index])
        cute.arch.cp_async_bulk_commit_group()
