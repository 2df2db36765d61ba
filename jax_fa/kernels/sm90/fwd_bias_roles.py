"""Bias of Hopper's forward: TMA copies chunks of it to a ring (``bias_chunks.py``).

What TMA cannot read, consumers load from global memory when they need it.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.pipeline import PipelineProducer

from jax_fa.kernels import bias as biases
from jax_fa.kernels import edges, fragment_softmax, fragments, loads, primitives
from jax_fa.kernels.forward_host import ForwardCall
from jax_fa.kernels.forward_work import Variant, Work, below
from jax_fa.kernels.fragment_rows import rows_of_thread
from jax_fa.kernels.rings import state_at
from jax_fa.kernels.sm90 import bias_chunks
from jax_fa.kernels.sm90.bias_chunks import HALVES, WORDS
from jax_fa.kernels.sm90.fwd_lists import anew, begin, find, next_tile, on_list, release
from jax_fa.kernels.sm90.fwd_roles import Scored, mask_block
from jax_fa.kernels.sm90.fwd_work import ForwardContext, thread_anew
from jax_fa.kernels.sm90.plan_bias import ANY, CHUNK_BYTES, FLOAT, HALF, chunks_of_stage
from jax_fa.spec.config_sm90 import HopperForward


def layout(config: HopperForward) -> cute.ComposedLayout:
    """The ring of chunks in shared memory, (block_q, halves, bias_stages)."""
    return bias_chunks.layout(config.block_q, config.bias_stages)


def describe(variant: Variant, call: ForwardCall) -> primitives.TmaArray:
    """Describes the bias to TMA."""
    chunk = cute.slice_(layout(variant.config), (None, None, 0))
    return bias_chunks.describe(call.scalars.bias, call.queries.length, chunk)


def num_halves(variant: Variant) -> int:
    """The shared memory of the bias, in halves."""
    return cute.cosize(layout(variant.config))


@cute.jit
def load_or_find(variant: cutlass.Constexpr, x: ForwardContext) -> None:
    """The role of a warp that loads no queries, keys and values: ``load`` or ``find``."""
    if cute.arch.thread_idx()[0] // edges.WARP == variant.plan.role("load_bias").warps.start:
        load(variant, x)
    elif const_expr(variant.lists_ahead):
        find(variant, x)


@cute.jit
def load(variant: cutlass.Constexpr, x: ForwardContext) -> None:
    """Loads the bias of each tile's key blocks, newest first, if TMA can read it. One warp."""
    chunks, bias = x.chunks.make_producer(), x.scalars.bias
    tile = next_tile(variant, x, Int32(0))
    while tile.is_valid:
        work = begin(variant, x, tile)
        if bias_chunks.is_staged(bias):
            chunks = _load_tile(variant, on_list(variant, x, work), work, chunks)
        release(variant, x, work)
        tile = work.tile._replace(is_valid=Boolean(False))
        if const_expr(variant.config.is_persistent):
            tile = next_tile(variant, x, work.tile.slot + 1)
    # HAZARD: the CTA must not exit while consumers still have to arrive at these barriers.
    chunks.tail()


@cute.jit
def _load_tile(
    variant: cutlass.Constexpr, x: ForwardContext, work: Work, chunks: PipelineProducer
) -> PipelineProducer:
    """Loads the chunks of a tile: in a block, first keys first."""
    block = work.blocks.end - 1
    count = variant.config.block_kv * x.scalars.bias.size_bytes // CHUNK_BYTES
    in_stage = chunks_of_stage(variant.key, variant.config)
    for _ in cutlass.range(work.num_blocks, unroll=1):
        for i in cutlass.range(0, count, in_stage, unroll=1):
            slot = chunks.acquire_and_advance()
            for j in cutlass.range_constexpr(in_stage):
                number, place = block * count + i + j, slot.index * in_stage + j
                copy_chunk(variant, x, work, number, place, slot)
        block = below(variant, x, block)
    return chunks


@cute.jit
def copy_chunk(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    work: Work,
    number: Int32,
    place: Int32,
    slot: Any,
) -> None:
    """Starts the copy of chunk ``number`` of a tile's rows to a ``place``, by TMA."""
    rows = loads.Rows(work.span.first_row, work.tile.head, work.tile.batch)
    target, source = bias_chunks.views(x.bias, x.smem.bias, x.scalars.bias, rows)
    cute.copy(
        x.bias.atom,
        source[None, number],
        target[None, place],
        tma_bar_ptr=slot.barrier,
        cache_policy=bias_chunks.eviction_of(x.scalars.bias),
    )


@cute.jit
def steps(
    variant: cutlass.Constexpr,
    step: cutlass.Constexpr,
    x: ForwardContext,
    c: Any,
    work: Work,
    q_index: Int32,
    at: Any,
) -> Any:
    """Takes the ``step`` of ``fwd_roles.py`` from ``at`` over all blocks of a tile but the newest.

    The instructions of a step that need not mask are few and lie side by side: those of one step
    for all cases would not fit the instruction cache.
    """
    form = bias_chunks.form_of(x.scalars.bias)
    for _ in cutlass.range(work.num_blocks - 1, unroll=1):
        if at.hides | (form == ANY):
            at = step(variant, at.hides, x, c, work, q_index, at, ANY)
        elif form == HALF:
            at = step(variant, False, x, c, work, q_index, at, HALF)
        else:
            at = step(variant, False, x, c, work, q_index, at, FLOAT)
    return at


@cute.jit
def to_probabilities(
    variant: cutlass.Constexpr,
    x: Any,
    c: Any,
    work: Work,
    block: Int32,
    hides: Boolean,
    scored: Scored,
    form: cutlass.Constexpr[int],
) -> Boolean:
    """Adds the bias, and does what ``to_probabilities`` of ``fwd_roles.py`` does."""
    add(variant, x, c, work, block, scored, form)
    if hides:
        mask_block(variant, x, c, work, scored.scores, block)
    scale_log2 = x.scalars.scale_log2
    return fragment_softmax.update(scored.scores, c.state, c.shrink, scale_log2, are_wide=True)


@cute.jit
def add(
    variant: cutlass.Constexpr,
    x: Any,
    c: Any,
    work: Work,
    block: Int32,
    scored: Scored,
    form: cutlass.Constexpr[int],
) -> None:
    """Replaces each score of a block by ``scale`` times it plus its bias, capped.

    ``form`` is as in ``plan_bias.py``.
    """
    scores, number = scored.scores, scored.k_full.count
    bias, c = x.scalars.bias, thread_anew(variant, c)
    if const_expr(form != ANY):
        _add_staged(variant, x, c, scores, number, form)
    else:
        if bias_chunks.is_staged(bias):
            if bias.size_bytes == 2:
                _add_staged(variant, x, c, scores, number, HALF)
            else:
                _add_staged(variant, x, c, scores, number, FLOAT)
        else:
            _add_loaded(variant, x, c, anew(variant, x, work), primitives.opaque(block), scores)
        biases.cap(bias, scores)


@cute.jit
def _add_staged(
    variant: cutlass.Constexpr,
    x: Any,
    c: Any,
    scores: cute.Tensor,
    number: Int32,
    form: cutlass.Constexpr[int],
) -> None:
    bias, ring, size_bytes = x.scalars.bias, x.chunks, 2 if form == HALF else 4
    count = variant.config.block_kv * size_bytes // CHUNK_BYTES
    for i in cutlass.range_constexpr(count):
        chunk = state_at(ring, number * count + i)
        ring.consumer_wait(chunk)
        if const_expr(form == HALF):
            groups, own = HALVES // 8, bias_chunks.of_thread(x, c, chunk.index)
            bias_chunks.add_halves(scores, groups * i, groups, own, bias.scale, 1.0, variant.dtype)
        else:
            own = bias_chunks.of_thread(x, c, chunk.index)
            bias_chunks.add_floats(scores, WORDS // 8 * i, own, bias)
        # HAZARD: one lane releases for the warp, so all its lanes must have read before.
        cute.arch.sync_warp()
        ring.consumer_release(chunk)


@cute.jit
def _add_loaded(
    variant: cutlass.Constexpr, x: Any, c: Any, work: Work, block: Int32, scores: cute.Tensor
) -> None:
    """Adds a bias from global memory, element by element."""
    bias, by_row = x.scalars.bias, fragments.by_row(scores)
    first_key = block * variant.config.block_kv + fragments.first_column(c.thread)
    rows = [
        biases.address_of(bias, biases.row_of(bias, work.tile.batch, at.head, at.position))
        for at in rows_of_thread(variant, x, c, work)
    ]
    if bias.size_bytes == 2:
        for i in cutlass.range_constexpr(cute.size(by_row, mode=[1])):
            key = biases.key_of(bias, first_key + fragments.column_of(i)).to(Int64)
            for r in cutlass.range_constexpr(fragments.ROWS):
                half = biases.load_half(rows[r] + 2 * key)
                added = primitives.widen(half, variant.dtype)[0]
                by_row[r, i] = by_row[r, i] * bias.scale + added
    else:
        first_key = primitives.opaque(first_key)  # Otherwise D = 256 spills 8 bytes.
        for i in cutlass.range_constexpr(cute.size(by_row, mode=[1])):
            key = biases.key_of(bias, first_key + fragments.column_of(i)).to(Int64)
            for r in cutlass.range_constexpr(fragments.ROWS):
                added = biases.as_float(biases.load_word(rows[r] + 4 * key))
                by_row[r, i] = by_row[r, i] * bias.scale + added
