"""What surrounds the main backward kernel: everything that is one pass over rows.

``prepare`` runs before it: ``delta = rowsum(dO * O) - dLSE`` and the log-sum-exp in base 2 of each
query row, and dQ sums of zero. ``finish`` runs after it and rounds the sums to dq.

Sums of dQ stay in the order of the accumulators that they come from (``dq_shape`` of the variant):
for each query block and consumer, four floats of each of 128 threads, then the next four. Every
access is then 16 bytes a thread, side by side.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode

from jax_fa.band import ceil_div
from jax_fa.kernels import abi, edges, primitives, softmax, tiles

PREPARE_THREADS = 128
VECTOR_BYTES = 16
FLOATS = 4
"""Floats of a 16-byte access."""


class Scratch(NamedTuple):
    """Sums and statistics by row; ``abi.scratch_shapes``."""

    dq_sum: cute.Tensor  # (4, D / 4 * rows, N)
    lse2: cute.Tensor  # (rows, N)
    delta: cute.Tensor  # (rows, N)
    turns: cute.Pointer
    q_len: Int32

    def first_row(self, block_q: int, sequence: Int32) -> Int32:
        """Row at which a sequence starts."""
        return (sequence * self.q_len // block_q + sequence) * block_q


class Rows(NamedTuple):
    """Global arrays of query rows."""

    out: cute.Tensor  # (T, Dv, N, B)
    dout: cute.Tensor  # (T, Dv, N, B)
    dq: cute.Tensor  # (T, D, N, B)
    lse: cute.Tensor  # (T, N, B)
    dlse: cute.Tensor  # (T, N, B), or null
    sinks: cute.Pointer
    dsinks: cute.Pointer


def dense(pointer: cute.Pointer, heads: tuple, width: int) -> cute.Tensor:
    """A dense [batch, length, heads, width] array as (length, width, heads, batch)."""
    batch, length, num_heads = heads
    row = num_heads.to(Int64) * width
    return cute.make_tensor(
        pointer,
        cute.make_layout(
            (length, width, num_heads, batch), stride=(row, 1, width, row * length)
        ),
    )


def dense_stats(pointer: cute.Pointer, heads: tuple) -> cute.Tensor:
    """A dense [batch, length, heads] array as (length, heads, batch)."""
    batch, length, num_heads = heads
    row = num_heads.to(Int64)
    return cute.make_tensor(
        pointer, cute.make_layout((length, num_heads, batch), stride=(row, 1, row * length))
    )


def make_scratch(pointers: tuple, extents: tuple, head_dim: int) -> Scratch:
    """Views of scratch: ``pointers`` are (dq_sum, row_stats, turns)."""
    dq_sum, row_stats, turns = pointers
    batch, num_sequences, q_len, num_q_heads = extents
    rows = abi.scratch_rows(batch, num_sequences, q_len)
    fours = rows.to(Int64) * (head_dim // FLOATS)
    stats = cute.make_layout((rows, num_q_heads), stride=(1, rows.to(Int64)))
    return Scratch(
        cute.make_tensor(
            dq_sum,
            cute.make_layout((FLOATS, fours, num_q_heads), stride=(1, FLOATS, fours * FLOATS)),
        ),
        cute.make_tensor(row_stats, stats),
        cute.make_tensor(row_stats + rows.to(Int64) * num_q_heads, stats),
        turns,
        q_len,
    )


def vector_at(dtype: type, address: Int64, size_bytes: int) -> cute.Tensor:
    """``size_bytes`` of global memory at ``address``, a multiple of that, as one vector."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=size_bytes)
    return cute.make_tensor(pointer, cute.make_layout(size_bytes * 8 // dtype.width))


def address_of(tensor: cute.Tensor) -> Int64:
    """Address of the first element."""
    return tensor.iterator.toint()


@cute.jit
def store_rows(acc: cute.Tensor, factor: Float32, rows: cute.Tensor, at: tuple):
    """Writes the 64 rows of a warpgroup's accumulator times ``factor``, rounded.

    Args:
        acc: accumulator.
        factor: of every element.
        rows: (64, columns) view of global memory.
        at: the thread in its warpgroup, and how many of the rows exist.
    """
    thread, limit = at
    rounded = cute.make_rmem_tensor_like(acc, rows.element_type)
    for i in cutlass.range_constexpr(cute.size(acc)):
        acc[i] = acc[i] * factor
    primitives.narrow(acc, rounded)
    words = primitives.pairs_by_row(rounded)
    groups = cute.size(words, mode=[1])
    width = 4 if groups % 4 == 0 else 2
    for r in cutlass.range_constexpr(softmax.ROWS):
        row = primitives.row_in_tile(thread) + 8 * r
        address = address_of(rows[row, None]) + thread % width * 16 + thread % 4 // width * 8
        for group in cutlass.range_constexpr(0, groups, width):
            own = [words[r, group + i] for i in range(width)]
            gathered = primitives.gather_columns(own, width)
            if row < limit:
                target = vector_at(Int32, address + group * 16, 4 * width)
                for i in cutlass.range_constexpr(width):
                    target[i] = gathered[i]


@cute.jit
def prepare(variant: cutlass.Constexpr, rows: Rows, scratch: Scratch, stream: cuda.CUstream):
    """Launches ``prepare_kernel`` for every query block."""
    q_len, num_heads, batch = rows.lse.shape
    prepare_kernel(variant, rows, scratch).launch(
        grid=(ceil_div(q_len, variant.config.block_q), num_heads, batch),
        block=(PREPARE_THREADS, 1, 1),
        stream=stream,
    )


@cute.kernel
def prepare_kernel(variant: cutlass.Constexpr, rows: Rows, scratch: Scratch):
    """Statistics of a query block of one head, and its dQ sums of zero."""
    block_q, head_dim = variant.config.block_q, variant.key.head_dim
    block, head, sequence = cute.arch.block_idx()
    thread = cute.arch.thread_idx()[0]
    first = scratch.first_row(block_q, sequence) + block * block_q
    q_len = rows.lse.shape[0]

    pieces = variant.key.value_dim // 8
    lanes = min(pieces & -pieces, 8)
    rows_per_pass = PREPARE_THREADS // lanes
    for i in cutlass.range_constexpr(block_q // rows_per_pass):
        row = thread // lanes + i * rows_per_pass
        q_row = block * block_q + row
        is_present = q_row < q_len
        delta, lse2 = Float32(0.0), Float32.inf
        if is_present:
            place = (q_row, None, head, sequence)
            for j in cutlass.range_constexpr(pieces // lanes):
                offset = (thread % lanes + j * lanes) * VECTOR_BYTES
                out = vector_at(
                    variant.dtype, address_of(rows.out[place]) + offset, VECTOR_BYTES
                ).load()
                dout = vector_at(
                    variant.dtype, address_of(rows.dout[place]) + offset, VECTOR_BYTES
                ).load()
                product = out.to(Float32) * dout.to(Float32)
                delta += product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        for step in cutlass.range_constexpr(lanes.bit_length() - 1):
            delta += cute.arch.shuffle_sync_bfly(delta, offset=1 << step)
        if (thread % lanes == 0) & is_present:
            lse = rows.lse[q_row, head, sequence]
            if tiles.is_present(rows.dlse.iterator):
                delta -= rows.dlse[q_row, head, sequence]
            if lse == -Float32.inf:
                # No key to see: P is 2 ** (-inf) = 0, whatever came in as cotangent.
                delta = Float32(0.0)
            else:
                lse2 = lse * softmax.LOG2_E
        if thread % lanes == 0:
            scratch.delta[first + row, head] = delta
            scratch.lse2[first + row, head] = lse2

    sums = cute.domain_offset((0, first * (head_dim // FLOATS)), scratch.dq_sum[None, None, head])
    zero = cute.make_rmem_tensor((FLOATS,), Float32)
    zero.fill(0.0)
    for i in cutlass.range_constexpr(block_q * head_dim // FLOATS // PREPARE_THREADS):
        cute.autovec_copy(zero, sums[None, thread + i * PREPARE_THREADS])


@cute.jit
def finish(
    variant: cutlass.Constexpr,
    rows: Rows,
    scratch: Scratch,
    scale: Float32,
    stream: cuda.CUstream,
):
    """Launches ``finish_kernel`` for every query block."""
    q_len, _, num_heads, batch = rows.dq.shape
    finish_kernel(variant, rows, scratch, scale).launch(
        grid=(ceil_div(q_len, variant.config.block_q), num_heads, batch),
        block=(edges.WARPGROUP * variant.config.num_consumers, 1, 1),
        stream=stream,
    )


@cute.kernel
def finish_kernel(variant: cutlass.Constexpr, rows: Rows, scratch: Scratch, scale: Float32):
    """dq of a query block of one head. A warpgroup reads what the same consumer has added."""
    block_q, head_dim = variant.config.block_q, variant.key.head_dim
    block, head, sequence = cute.arch.block_idx()
    consumer = cute.arch.thread_idx()[0] // edges.WARPGROUP
    thread = cute.arch.thread_idx()[0] % edges.WARPGROUP
    first = scratch.first_row(block_q, sequence) + block * block_q
    dq_rows, dq_columns = variant.dq_shape
    mma = primitives.make_mma(variant.dtype, dq_columns, OperandMajorMode.MN, a_in_registers=False)
    acc = mma.make_fragment_C(mma.partition_shape_C(variant.dq_shape))
    fours = cute.size(acc) // FLOATS
    sums = cute.domain_offset((0, first * (head_dim // FLOATS)), scratch.dq_sum[None, None, head])
    for i in cutlass.range_constexpr(fours):
        four = sums[None, (consumer * fours + i) * edges.WARPGROUP + thread].load()
        for j in cutlass.range_constexpr(FLOATS):
            acc[FLOATS * i + j] = four[j]
    row, column = block * block_q, consumer * dq_columns
    if const_expr(variant.config.splits_dq_rows):
        row, column = block * block_q + consumer * dq_rows, Int32(0)
    target = cute.domain_offset((row, column), rows.dq[None, None, head, sequence])
    store_rows(acc, scale, target, (thread, rows.dq.shape[0] - row))
