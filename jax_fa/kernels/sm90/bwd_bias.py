"""Bias of Hopper's backward: TMA copies chunks of it to shared memory (``bias_chunks.py``).

A stage of the ring has a chunk for every 64 keys of the tile. With 16 bits that is a step's bias;
in float32, the first stage of a step has the first 32 keys of every 64, the second has the others.
Where TMA cannot read the bias, and where there is no ring, consumers load its elements to registers
(``fragment_bias_columns.py``).
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.pipeline import PipelineProducer

from jax_fa.kernels import bias as biases
from jax_fa.kernels import fragment_bias_columns, fragments, loads, primitives
from jax_fa.kernels.backward_work import Step, Work, first_step, next_step, tile_at, work_on
from jax_fa.kernels.sm90 import bias_chunks, bias_product
from jax_fa.kernels.sm90.bias_chunks import UNIT_WORDS, WORDS
from jax_fa.kernels.sm90.bwd_work import thread_anew
from jax_fa.kernels.sm90.plan import WGMMA_ROWS

FLOAT_STAGES = 2
"""Stages of a step's bias in float32."""


@cute.jit
def load(variant: cutlass.Constexpr, x: Any, chunks: PipelineProducer) -> None:
    """Loads the bias of each tile's steps, if TMA can read it. One warp."""
    if const_expr(variant.key.multiplies_bias):
        bias_product.write_factors(x.smem.factors, x.smem.words, x.scalars.bias)
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        if bias_chunks.is_staged(x.scalars.bias):
            at = first_step(work, Int32(0))
            for _ in cutlass.range(work.num_steps, unroll=1):
                chunks = load_step(variant, x, work, at, chunks)
                at = next_step(variant, x, work, at)
        tile = tile_at(variant, x, tile.slot + 1)
    # HAZARD: the CTA must not exit while consumers still have to arrive at these barriers.
    chunks.tail()


@cute.jit
def load_step(
    variant: cutlass.Constexpr, x: Any, work: Work, at: Step, chunks: PipelineProducer
) -> PipelineProducer:
    """Starts the loads of a step's chunks. One warp."""
    config = variant.config
    rows = loads.Rows(at.q_block * config.block_q, at.head, work.tile.batch)
    target, source = bias_chunks.views(x.bias, x.smem.bias, x.scalars.bias, rows)
    stages, of_stage = x.scalars.bias.size_bytes // 2, config.bias_chunks
    for i in cutlass.range(stages, unroll=1):
        slot = chunks.acquire_and_advance()
        for j in cutlass.range_constexpr(of_stage):
            chunk = source[None, (work.tile.block * of_stage + j) * stages + i]
            place = target[None, slot.index * of_stage + j]
            cute.copy(x.bias.atom, chunk, place, tma_bar_ptr=slot.barrier)
    return chunks


@cute.jit
def fetch(variant: cutlass.Constexpr, x: Any, c: Any, work: Work, at: Step) -> None:
    """Starts the loads of the bias for a step's scores to registers, if there is no ring."""
    if const_expr(variant.config.bias_stages == 0):
        fragment_bias_columns.load(variant, x, c, work, at, c.bias)


@cute.jit
def add(variant: cutlass.Constexpr, x: Any, c: Any, work: Work, at: Step, chunks: Any) -> Any:
    """Replaces each score of a step by ``scale`` times it plus its bias, capped.

    Returns the pipe of chunks, advanced; None without a ring.
    """
    bias = x.scalars.bias
    if const_expr(variant.config.bias_stages == 0):
        fragment_bias_columns.add_uncapped(c.s, c.bias, bias, variant.dtype)
    elif bias_chunks.is_staged(bias):
        chunks = _add_staged(variant, x, c, at, chunks)
    else:
        _add_loaded(variant, x, c, work, at)
    biases.cap(bias, c.s)
    return chunks


@cute.jit
def _add_staged(variant: cutlass.Constexpr, x: Any, c: Any, at: Step, chunks: Any) -> Any:
    # Waited for before the branch: with a first wait on either side of it, ptxas keeps the stages
    # of all rings per thread, and describes what products read in some 60 instructions more.
    first = chunks.wait_and_advance()
    if x.scalars.bias.size_bytes == 2:
        _add_halves(variant, x, c, first.index)
    else:
        second = chunks.wait_and_advance()
        _add_floats(variant, x, c, at)
        cute.arch.sync_warp()  # HAZARD: as below.
        second.release()
    # HAZARD: one lane releases for the warp, so all its lanes must have read before.
    cute.arch.sync_warp()
    first.release()
    return chunks


def chunk_of(variant: Any, c: Any, stage: Int32) -> Int32:
    """The number, in the ring, of a consumer's chunk of a stage."""
    return stage * variant.config.bias_chunks + c.first_key // WGMMA_ROWS


@cute.jit
def _add_halves(variant: cutlass.Constexpr, x: Any, c: Any, stage: Int32) -> None:
    """Adds the bias of 64 keys, which is read as dS is written: by matrices, transposed."""
    part = (variant.s_columns, WGMMA_ROWS)
    own = cute.local_tile(x.smem.bias, part, (c.first_query // variant.s_columns, 0, None))
    matrices = cute.nvgpu.warp.LdMatrix8x8x16bOp(True, 4)
    copy = cute.make_tiled_copy_C(cute.make_copy_atom(matrices, variant.dtype), c.s_mma)
    copy = copy.get_slice(c.thread)
    source = copy.partition_S(primitives.transposed(own))
    loaded = cute.make_rmem_tensor_like(c.s, variant.dtype)
    chunk = chunk_of(variant, c, stage)
    cute.copy(copy, source[None, None, None, chunk], copy.retile(loaded))
    words, scale = cute.recast_tensor(loaded, Int32), x.scalars.bias.scale
    for i in cutlass.range_constexpr(cute.size(words)):
        pair = primitives.widen(words[i], variant.dtype)
        for j in cutlass.range_constexpr(2):
            c.s[2 * i + j] = c.s[2 * i + j] * scale + pair[j]


@cute.jit
def _add_floats(variant: cutlass.Constexpr, x: Any, c: Any, at: Step) -> None:
    floats, start = floats_of(variant, x, c, at)
    scale = x.scalars.bias.scale
    for i in cutlass.range_constexpr(cute.size(c.s)):
        c.s[i] = c.s[i] * scale + floats[place_of_float(start, i)]


class Floats(NamedTuple):
    """A chunk of float32, and where in it the first of a thread's elements lies."""

    chunk: cute.Pointer
    start: Int32


def floats_of(variant: Any, x: Any, c: Any, at: Step) -> Floats:
    """The chunk of a step that has the calling thread's keys: of a consumer's 64, 32."""
    stage = first_stage(variant, at) + c.thread // WGMMA_ROWS
    chunk = x.smem.bias[None, None, chunk_of(variant, c, stage)]
    key, column = fragments.row_in_tile(c.thread) % WORDS, fragments.first_column(c.thread)
    unit = (key // UNIT_WORDS) ^ column
    start = (c.first_query + column) * WORDS + unit * UNIT_WORDS + key % UNIT_WORDS
    return Floats(cute.recast_ptr(chunk.iterator, dtype=Float32), start)


def place_of_float(start: Int32, i: int) -> Int32:
    """Where element ``i`` of a thread's scores lies, if its first lies at ``start``."""
    group, row, column = i // 4, i // 2 % 2, i % 2
    # The next query exchanges neighbouring units, 8 keys further are 2 units.
    return (start ^ ((2 * row + column) * UNIT_WORDS)) + (8 * group + column) * WORDS


def first_stage(variant: Any, at: Step) -> Int32:
    """The first stage of a step, if in float32: the ring has room for one step or for two."""
    return at.parity * FLOAT_STAGES % variant.config.bias_stages


@cute.jit
def keep_floats(variant: cutlass.Constexpr, x: Any, c: Any, at: Step, ds: cute.Tensor) -> None:
    """Writes dS of a step over the bias that was added, in float32."""
    # Anew, or these addresses stay in registers from the addition on.
    floats, start = floats_of(variant, x, thread_anew(variant, c), at)
    for i in cutlass.range_constexpr(cute.size(ds)):
        floats[place_of_float(start, i)] = ds[i]


@cute.jit
def _add_loaded(variant: cutlass.Constexpr, x: Any, c: Any, work: Work, at: Step) -> None:
    # With the bias of 64 queries in registers at once, D = 128 spills 40 bytes.
    columns = 32 if variant.key.head_dim == 128 else variant.s_columns
    of_piece = columns // 4 * fragments.ROWS
    words = cute.make_rmem_tensor((of_piece,), Int32)
    for i in cutlass.range_constexpr(variant.s_columns // columns):
        part = c._replace(first_query=c.first_query + i * columns)
        scores = cute.make_tensor(c.s.iterator + i * of_piece, cute.make_layout((of_piece,)))
        fragment_bias_columns.load(variant, x, part, work, at, words)
        fragment_bias_columns.add_uncapped(scores, words, x.scalars.bias, variant.dtype)
