"""Chunks of a bias, which TMA copies to shared memory, for forward, backward and its gradient.

A chunk holds 128 bytes, the span of one swizzle, of each row of a block of queries: 64 keys of a
bias of 16 bits, 32 of one in float32. TMA is told of 16-bit halves, so that one descriptor serves
either. It cannot read a bias that is broadcast along keys, or whose rows are no multiples of 16
bytes apart; threads then load its elements to registers.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32, Int64, const_expr

from jax_fa.kernels import bias as biases
from jax_fa.kernels import edges, fragments, loads, primitives
from jax_fa.kernels.backward_rows import vector_at
from jax_fa.kernels.bias import Bias
from jax_fa.kernels.fragment_rows import GROUP_ROWS
from jax_fa.kernels.sm90.plan_bias import ANY, CHUNK_BYTES, FLOAT, HALF

HALVES = CHUNK_BYTES // 2
WORDS = CHUNK_BYTES // 4
UNIT_WORDS = 4
"""A swizzle exchanges units of 16 bytes: unit u of row r lies at unit u XOR r % 8."""
UNIT_BYTES = 4 * UNIT_WORDS
WARP_ROWS = 16
"""Rows of a fragment that one warp holds."""
_STEP_HALVES = 8
"""TMA needs rows that are multiples of 16 bytes apart."""
EVICT_NORMAL, EVICT_FIRST = 0x1000000000000000, 0x12F0000000000000
"""Policies of the L2 cache in the encoding of CUTLASS: ``include/cute/arch/copy_sm90_desc.hpp``."""


def is_staged(bias: Bias) -> Boolean:
    """Whether TMA can read the bias."""
    return (bias.row_bytes % (2 * _STEP_HALVES) == 0) & (bias.keys > 1)


@cute.jit
def eviction_of(bias: Bias) -> Int64:
    """How the L2 cache keeps a bias: what the forward reads once is the first to leave.

    H200, float32, us: 4 x 1024 tokens, 16 heads, one bias each, 97 -> 89; 32 x 384, 4 heads, 34 ->
    29. The backward, with it for reads and writes: 232 -> 237 and 81 -> 76, 1 x 4096 721 -> 742.
    """
    policy = Int64(EVICT_NORMAL)
    if (bias.batch > 1) & (bias.heads > 1):
        policy = Int64(EVICT_FIRST)
    return policy


@cute.jit
def form_of(bias: Bias) -> Int32:
    """The form of steps that a bias takes: ``plan_bias.py``."""
    form = Int32(ANY)
    if is_staged(bias) & (bias.soft_cap == 0.0):
        form = Int32(FLOAT)
        if bias.size_bytes == 2:
            form = Int32(HALF)
    return form


def layout(rows: int, chunks: int) -> cute.ComposedLayout:
    """A ring in shared memory, (rows, halves, chunks)."""
    return primitives.smem_layout(Int16, (rows, HALVES, chunks))


@cute.jit
def describe(
    bias: Bias,
    num_rows: Int32,
    chunk: cutlass.Constexpr[cute.ComposedLayout],
    stores: cutlass.Constexpr[bool] = False,
) -> primitives.TmaArray:
    """Describes the bias to TMA, as (num_rows, halves, heads, batch).

    Args:
        bias: the bias, or its gradient.
        num_rows: number of queries, for each of which a bias of one row is read anew.
        chunk: layout of a chunk, (rows, halves).
        stores: whether TMA writes it.
    """
    # Rounded up, so that a bias that TMA cannot read, and will not, gets a valid descriptor too.
    steps = (bias.keys * (bias.size_bytes // 2) + (_STEP_HALVES - 1)) // _STEP_HALVES
    pitch = steps.to(Int64) * _STEP_HALVES
    head = bias.rows.to(Int64) * pitch
    step = pitch if bias.rows > 1 else Int64(0)
    batch = bias.heads.to(Int64) * head
    step, head, batch = [cute.assume(x, divby=_STEP_HALVES) for x in (step, head, batch)]
    array = cute.make_tensor(
        cute.recast_ptr(bias.array, dtype=Int16),
        cute.make_layout(
            (num_rows, steps * _STEP_HALVES, bias.heads, bias.batch), stride=(step, 1, head, batch)
        ),
    )
    make = primitives.tma_store if const_expr(stores) else primitives.tma_load
    return primitives.TmaArray(*make(array, chunk, cute.product_each(chunk.outer.shape)))


def views(
    described: primitives.TmaArray,
    smem: cute.Tensor,
    bias: Bias,
    rows: loads.Rows,
    first_half: Int32 | int = 0,
) -> primitives.TmaViews:
    """The chunks in shared memory and those of a block of rows, (chunk, number), as TMA sees them.

    ``smem`` is (rows, halves, ...), ``described`` what ``describe`` made of ``bias``; chunks are
    counted from ``first_half`` of a row on.
    """
    head = cutlass.min(rows.head, bias.heads - 1)
    batch = cutlass.min(rows.batch, bias.batch - 1)
    block = cute.domain_offset((rows.first, first_half), described.array[None, None, head, batch])
    shape = (cute.size(smem, mode=[0]), HALVES)
    return primitives.tma_views(described.atom, smem, cute.local_tile(block, shape, (0, None)))


class ChunkOfThread(NamedTuple):
    """A chunk in shared memory, and the word at which the calling thread's first row begins."""

    words: cute.Pointer
    start: Int32


def of_thread(x: Any, c: Any, stage: Int32) -> ChunkOfThread:
    """The chunk of a ``stage``, as a thread whose scores have queries as rows reads it."""
    row = c.index * GROUP_ROWS + fragments.row_in_tile(c.thread)
    words = cute.recast_ptr(x.smem.bias[None, None, stage].iterator, dtype=Int32)
    return ChunkOfThread(words, row * WORDS + row % 8 * UNIT_WORDS)


@cute.jit
def add_halves(
    scores: cute.Tensor,
    first_group: cutlass.Constexpr[int],
    groups: cutlass.Constexpr[int],
    chunk: ChunkOfThread,
    scale: Float32 | float,
    factor: Float32 | float,
    dtype: cutlass.Constexpr,
) -> None:
    """Adds ``factor`` times a chunk of 16 bits to ``scale`` times ``groups`` of 8 columns."""
    start = chunk.start + cute.arch.lane_idx() % 4
    for g in cutlass.range_constexpr(groups):
        for r in cutlass.range_constexpr(fragments.ROWS):
            word = chunk.words[(start ^ (g * UNIT_WORDS)) + r * 8 * WORDS]
            pair = primitives.widen(word, dtype)
            first = 4 * (first_group + g) + 2 * r
            for i in cutlass.range_constexpr(2):
                scores[first + i] = scores[first + i] * scale + pair[i] * factor


@cute.jit
def add_floats(
    scores: cute.Tensor,
    first_group: cutlass.Constexpr[int],
    chunk: ChunkOfThread,
    bias: Bias,
) -> None:
    """Adds a chunk of float32 to ``scale`` times four groups of 8 columns."""
    start = chunk.start ^ (cute.arch.lane_idx() % 4 * 2)
    for g in cutlass.range_constexpr(WORDS // 8):
        for r in cutlass.range_constexpr(fragments.ROWS):
            at = (start ^ (g * 2 * UNIT_WORDS)) + r * 8 * WORDS
            first = 4 * (first_group + g) + 2 * r
            for i in cutlass.range_constexpr(2):
                added = biases.as_float(chunk.words[at + i])
                scores[first + i] = scores[first + i] * bias.scale + added


@cute.jit
def put_halves(
    values: cute.Tensor,
    first_group: cutlass.Constexpr[int],
    groups: cutlass.Constexpr[int],
    chunk: ChunkOfThread,
    dtype: cutlass.Constexpr,
) -> None:
    """Rounds ``groups`` groups of 8 columns to where ``add_halves`` finds those of a bias."""
    start = chunk.start + cute.arch.lane_idx() % 4
    for g in cutlass.range_constexpr(groups):
        for r in cutlass.range_constexpr(fragments.ROWS):
            first = 4 * (first_group + g) + 2 * r
            word = primitives.narrow_pair(values[first], values[first + 1], dtype)
            chunk.words[(start ^ (g * UNIT_WORDS)) + r * 8 * WORDS] = word


@cute.jit
def put_floats(
    values: cute.Tensor, first_group: cutlass.Constexpr[int], chunk: ChunkOfThread
) -> None:
    """Writes four groups of 8 columns to where ``add_floats`` finds those of a bias."""
    floats = cute.recast_ptr(chunk.words, dtype=Float32)
    start = chunk.start ^ (cute.arch.lane_idx() % 4 * 2)
    for g in cutlass.range_constexpr(WORDS // 8):
        for r in cutlass.range_constexpr(fragments.ROWS):
            at = (start ^ (g * 2 * UNIT_WORDS)) + r * 8 * WORDS
            for i in cutlass.range_constexpr(2):
                floats[at + i] = values[4 * (first_group + g) + 2 * r + i]


class Rows(NamedTuple):
    """Rows of a warp in global memory: the first one's address, their pitch and their extents."""

    address: Int64
    pitch: Int64
    num_rows: Int32
    size_bytes: Int64


@cute.jit
def copy_rows(
    x: Any,
    stage: Int32,
    first_row: Int32,
    units: cutlass.Constexpr[int],
    target: Rows,
) -> None:
    """Copies 16 rows of a chunk, from ``first_row`` on, ``units`` of 16 bytes each. One warp."""
    words = cute.recast_ptr(x.smem.bias[None, None, stage].iterator, dtype=Int32).toint()
    lane, of_row = cute.arch.lane_idx(), 4 * WORDS
    for i in cutlass.range_constexpr(WARP_ROWS * units // edges.WARP):
        row, unit = lane // units + i * (edges.WARP // units), lane % units
        at = (first_row + row) * of_row + (unit ^ (row % 8)) * UNIT_BYTES
        piece = cute.make_rmem_tensor((UNIT_WORDS,), Int32)
        shared = cute.make_ptr(Int32, words + at, cute.AddressSpace.smem, assumed_align=UNIT_BYTES)
        cute.autovec_copy(cute.make_tensor(shared, piece.layout), piece)
        if (row < target.num_rows) & (unit * UNIT_BYTES < target.size_bytes):
            address = target.address + row * target.pitch + unit * UNIT_BYTES
            cute.autovec_copy(piece, vector_at(Int32, address, UNIT_BYTES))
