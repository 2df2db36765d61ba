"""The roles of Hopper's gradient of a bias but find: load, load_bias, consume.

``dbias.py`` has the diagram, ``dbias_steps.py`` tells these roles what to do.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineProducer, PipelineState

from jax_fa.kernels import bias as biases
from jax_fa.kernels import edges, fragments, loads, primitives
from jax_fa.kernels.bias import Bias
from jax_fa.kernels.dbias_rows import (
    add_kept,
    add_products,
    exponentiate,
    hide,
    keep_bias,
    store,
    to_slopes,
)
from jax_fa.kernels.dbias_work import Place, place_after
from jax_fa.kernels.forward_work import Variant
from jax_fa.kernels.fragment_rows import GROUP_ROWS
from jax_fa.kernels.sm90 import bias_chunks, bias_product, dbias_product
from jax_fa.kernels.sm90.dbias_steps import (
    BEGINS,
    ENDS,
    HIDES,
    STOPS,
    await_entry,
    block_at,
    first_tile,
    give_back,
    kind_at,
    place_at,
    stats_at,
    work_at,
)
from jax_fa.kernels.sm90.dbias_work import (
    DbiasConsumer,
    DbiasContext,
    DbiasPipes,
    columns_at,
    make_consumer,
    thread_anew,
)
from jax_fa.kernels.sm90.plan_bias import ANY, CHUNK_BYTES, FLOAT, HALF
from jax_fa.spec.config_sm90_dbias import HopperBiasGradient


@cute.jit
def load(variant: cutlass.Constexpr, x: DbiasContext, pipes: DbiasPipes) -> None:
    """Loads the blocks that each step multiplies. One warp."""
    qk, dov, entry = pipes.qk, pipes.dov, Int32(0)
    kind = await_entry(x, entry)
    while kind != STOPS:
        if kind <= HIDES:
            at = block_at(x, entry)
            queries = loads.Rows(Int32(0), at.head, at.batch)
            keys = loads.Rows(Int32(0), at.kv_head, at.batch)
            slot = qk.acquire_and_advance()
            loads.load(loads.operand(x, "q"), queries, at.row_block, slot)
            loads.load(loads.operand(x, "k"), keys, at.key_block, slot)
            slot = dov.acquire_and_advance()
            loads.load(loads.operand(x, "dout"), queries, at.row_block, slot)
            loads.load(loads.operand(x, "v"), keys, at.key_block, slot)
        give_back(x, entry)
        entry = entry + 1
        kind = await_entry(x, entry)
    # HAZARD: the CTA must not exit while consumers still have to arrive at these barriers.
    qk.tail()
    dov.tail()


def chunks_of(config: HopperBiasGradient, bias: Bias) -> Int32:
    """The number of chunks of a tile of the bias."""
    return config.half_chunks + (config.float_chunks - config.half_chunks) * (
        bias.size_bytes // 2 - 1
    )


@cute.jit
def load_bias(variant: cutlass.Constexpr, x: DbiasContext, chunks: PipelineProducer) -> None:
    """Loads the bias of each tile, if TMA can read it. One warp."""
    if const_expr(variant.key.multiplies_bias):
        bias_product.write_factors(x.smem.factors, x.smem.odd, x.scalars.bias)
    number, place, pitch = first_tile(x)
    while number < x.grid.number:
        if bias_chunks.is_staged(x.scalars.bias):
            chunks = _load_tile(variant, x, place, chunks)
        number, place = number + cute.arch.grid_dim()[0], place_after(x, place, pitch)
    # HAZARD: the CTA must not exit while consumers still have to arrive at these barriers.
    chunks.tail()


@cute.jit
def _load_tile(
    variant: cutlass.Constexpr, x: DbiasContext, place: Place, chunks: PipelineProducer
) -> PipelineProducer:
    config, bias = variant.config, x.scalars.bias
    rows = loads.Rows(place.row_block * config.block_q, place.head, place.batch)
    first_half = place.key_block * config.block_kv * (bias.size_bytes // 2)
    target, source = bias_chunks.views(x.bias, x.smem.bias, bias, rows, first_half)
    for i in cutlass.range(chunks_of(config, bias), unroll=1):
        slot = chunks.acquire_and_advance()
        chunk = source[None, i]
        cute.copy(x.bias.atom, chunk, target[None, slot.index], tma_bar_ptr=slot.barrier)
    return chunks


@cute.jit
def consume(variant: cutlass.Constexpr, x: DbiasContext, pipes: DbiasPipes) -> None:
    """Sums dS of 64 rows of each tile of the bias. One warpgroup of several."""
    c, bias, config = make_consumer(variant, x), x.scalars.bias, variant.config
    qk, dov, entry = pipes.qk, pipes.dov, Int32(0)
    form, first, parity = bias_chunks.form_of(bias), Int32(0), Int32(0)
    is_staged, stages = bias_chunks.is_staged(bias), config.bias_stages
    multiplies = variant.key.multiplies_bias
    kind = await_entry(x, entry)
    while kind != STOPS:
        if is_staged:
            await_chunks(variant, x, first, parity)
        if kind == BEGINS:
            pieces = config.float_chunks
            own = with_words(thread_anew(c), pieces)
            keep_bias(variant, x, own, place_at(x, entry), pieces)
            give_back(x, entry)
            entry = entry + 1
            kind = await_entry(x, entry)
        c.sums.fill(0.0)
        is_odd = Boolean(False)
        if const_expr(multiplies):
            is_odd = dbias_product.is_odd_tile(variant, x, c, first, entry)
        while kind != ENDS:
            if const_expr(multiplies):
                qk, dov = dbias_product.take_step(
                    variant, x, c, entry, first, DbiasPipes(qk, dov), is_odd
                )
            elif (kind == HIDES) | (form == ANY):
                qk, dov = take_step(variant, ANY, x, c, entry, first, qk, dov)
            elif form == HALF:
                qk, dov = take_step(variant, HALF, x, c, entry, first, qk, dov)
            else:
                qk, dov = take_step(variant, FLOAT, x, c, entry, first, qk, dov)
            give_back(x, entry)
            entry = entry + 1
            kind = await_entry(x, entry)
        place = place_at(x, entry)
        give_back(x, entry)
        if const_expr(multiplies):
            # HAZARD: sums go where the bias is, which products of other warps may still read.
            primitives.meet(variant, "tile0", c.index)
        if is_written_by_rows(x):
            store_staged(variant, x, thread_anew(c), place, first)
        else:
            if bias.rows == 1:
                # HAZARD: sums of columns go where the bias is, which other warps may still add.
                primitives.meet(variant, "read")
            store(variant, columns_at(variant, x, first), thread_anew(c), place)
        if is_staged:
            # HAZARD: TMA overwrites what was written there through the generic proxy.
            cute.arch.fence_view_async_shared()
            release_chunks(variant, x, first, parity)
            first = first + chunks_of(config, bias)
            if first == stages:
                first, parity = Int32(0), parity ^ 1
        entry = entry + 1
        kind = await_entry(x, entry)


def _chunk_state(variant: Variant, stage: Int32, parity: Int32) -> PipelineState:
    """A consumer's state at a ``stage`` of the bias's ring, in a round of ``parity``."""
    return PipelineState(variant.config.bias_stages, Int32(0), stage, parity)


@cute.jit
def await_chunks(variant: cutlass.Constexpr, x: DbiasContext, first: Int32, parity: Int32) -> None:
    """Waits for the bias of a tile."""
    ring = x.chunks
    for i in cutlass.range(chunks_of(variant.config, x.scalars.bias), unroll=1):
        ring.consumer_wait(_chunk_state(variant, first + i, parity))


@cute.jit
def release_chunks(
    variant: cutlass.Constexpr, x: DbiasContext, first: Int32, parity: Int32
) -> None:
    """Returns the bias of a tile to load_bias. Called by whole warps."""
    ring = x.chunks
    # HAZARD: one lane releases for the warp, so all its lanes must have read before.
    cute.arch.sync_warp()
    for i in cutlass.range(chunks_of(variant.config, x.scalars.bias), unroll=1):
        ring.consumer_release(_chunk_state(variant, first + i, parity))


def is_written_by_rows(x: DbiasContext) -> Boolean:
    """Whether tiles are written as TMA reads those of the bias: each once, and row by row."""
    bias = x.scalars.bias
    return bias_chunks.is_staged(bias) & (bias.rows > 1) & (x.grid.parts == 1)


@cute.jit
def store_staged(
    variant: cutlass.Constexpr, x: DbiasContext, c: DbiasConsumer, place: Place, first: Int32
) -> None:
    """Writes a tile of the gradient of a bias that TMA reads, by way of the place of the bias.

    There a warp has 16 rows of its own, of which it writes 16 bytes a thread to global memory.
    """
    if x.scalars.bias.size_bytes == 2:
        _store_chunks(variant, HALF, x, c, place, first)
    else:
        _store_chunks(variant, FLOAT, x, c, place, first)


@cute.jit
def _store_chunks(
    variant: cutlass.Constexpr,
    form: cutlass.Constexpr[int],
    x: DbiasContext,
    c: DbiasConsumer,
    place: Place,
    first: Int32,
) -> None:
    dbias, config, size_bytes = x.arrays.dbias, variant.config, 2 if form == HALF else 4
    groups, of_chunk = config.block_kv // 8, CHUNK_BYTES // (8 * size_bytes)
    own_row = c.index * GROUP_ROWS + c.thread // edges.WARP * bias_chunks.WARP_ROWS
    row = place.row_block * config.block_q + own_row
    first_key = place.key_block * config.block_kv
    address = biases.address_of(dbias, biases.row_of(dbias, place.batch, place.head, row))
    for i in cutlass.range_constexpr(0, groups, of_chunk):
        stage, own = first + i // of_chunk, min(groups - i, of_chunk)
        chunk = bias_chunks.of_thread(x, c, stage)
        if const_expr(form == HALF):
            bias_chunks.put_halves(c.sums, i, own, chunk, variant.dtype)
        else:
            bias_chunks.put_floats(c.sums, i, chunk)
        # HAZARD: the lanes of a warp read what others of them wrote.
        cute.arch.sync_warp()
        key = first_key + 8 * i
        target = bias_chunks.Rows(
            address + key.to(Int64) * size_bytes,
            dbias.row_bytes,
            dbias.rows - row,
            (dbias.keys - key).to(Int64) * size_bytes,
        )
        units = 8 * own * size_bytes // bias_chunks.UNIT_BYTES
        bias_chunks.copy_rows(x, stage, own_row, units, target)


def with_words(c: DbiasConsumer, pieces: int = 1) -> DbiasConsumer:
    """The consumer with registers for the words of a bias, or of one of several pieces of it."""
    words = cute.make_rmem_tensor((cute.size(c.sums) // pieces,), Int32)
    # With 16 bits, half of them stay as they are; unwritten, they would be kept from the start on.
    words.fill(0)
    return c._replace(bias=words)


def multiply(
    variant: Variant,
    c: DbiasConsumer,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    columns: Int32,
) -> None:
    """Issues ``acc = A B^T`` for heads of so many columns."""
    if variant.key.head_dim == 64:
        fragments.multiply_filled(c.s_mma, acc, a, b, columns)
    else:
        fragments.multiply(c.s_mma, acc, a, b, False)


@cute.jit
def take_step(
    variant: cutlass.Constexpr,
    form: cutlass.Constexpr[int],
    x: DbiasContext,
    c: DbiasConsumer,
    entry: Int32,
    first: Int32,
    qk: Any,
    dov: Any,
) -> DbiasPipes:
    """Adds dS of the step of an ``entry`` to the sums.

    ``form`` is as in ``plan_bias.py``, and not ANY only if the step hides nothing; ``first`` is the
    stage of the tile's first chunk. Returns the pipes, advanced.
    """
    scores, dp = (c.s_mma.make_fragment_C(c.sums.shape) for _ in range(2))
    qk_full = qk.wait_and_advance()
    place = (None, None, None, qk_full.index)
    multiply(variant, c, scores, c.q[place], c.k[place], cute.size(x.arrays.k, mode=[1]))
    dov_full = dov.wait_and_advance()
    place = (None, None, None, dov_full.index)
    multiply(variant, c, dp, c.dout[place], c.v[place], cute.size(x.arrays.v, mode=[1]))
    stats = stats_at(x, c, entry)
    warpgroup.wait_group(1)
    qk_full.release()
    if const_expr(form == ANY):
        add_any(variant, x, c, scores, first)
        if kind_at(x, entry) == HIDES:
            work = work_at(x, entry)
            hide(variant, x, c, work, scores, block_at(x, entry).key_block)
        to_slopes(x, stats, scores)
    else:
        add_staged(variant, form, x, c, scores, first)
        exponentiate(x, stats, scores, False)
    warpgroup.wait_group(0)
    dov_full.release()
    add_products(c, stats, scores, dp, form == ANY)
    return DbiasPipes(qk, dov)


@cute.jit
def add_any(
    variant: cutlass.Constexpr, x: DbiasContext, c: DbiasConsumer, scores: cute.Tensor, first: Int32
) -> None:
    """Replaces each score of a step by ``scale`` times it plus its bias, capped."""
    bias = x.scalars.bias
    if bias_chunks.is_staged(bias):
        if bias.size_bytes == 2:
            add_staged(variant, HALF, x, c, scores, first)
        else:
            add_staged(variant, FLOAT, x, c, scores, first)
        biases.cap(bias, scores)
    else:
        add_kept(variant, x, with_words(c), scores)


@cute.jit
def add_staged(
    variant: cutlass.Constexpr,
    form: cutlass.Constexpr[int],
    x: DbiasContext,
    c: DbiasConsumer,
    scores: cute.Tensor,
    first: Int32,
) -> None:
    """Replaces each score of a step by ``scale`` times it plus its bias, from chunks."""
    bias, groups = x.scalars.bias, variant.config.block_kv // 8
    for i in cutlass.range_constexpr(0, groups, 8 if form == HALF else 4):
        chunk = bias_chunks.of_thread(x, c, first + i // (8 if form == HALF else 4))
        if const_expr(form == HALF):
            own = min(groups - i, 8)
            bias_chunks.add_halves(scores, i, own, chunk, bias.scale, 1.0, variant.dtype)
        else:
            bias_chunks.add_floats(scores, i, chunk, bias)
