"""The passes over rows that surround the main backward kernel.

``prepare`` runs before it: it computes ``delta = rowsum(dO * O) - dLSE`` and the log-sum-exp in
base 2 of each query row, and clears the dQ sums, and the counter from which tiles are claimed, if
they are. ``finish`` runs after it and rounds these to dq.

Sums of dQ stay in the order of the accumulators that they come from. Neighbouring threads access
neighbouring pieces of 16 bytes, or single floats where the order is "words". A variant's
``dq_order`` is "fragments" (``dq_shape``): for each query block and consumer, four floats of each
of 128 threads, then the next four; "warps": the same for each warp of a consumer and its 32
threads; "words": as "fragments", with one float instead of four, for additions of single floats;
"rows": for each 32 rows, four columns of every row, then the next four columns; or "columns": for
each query block and 32 columns, four rows of every column, then the next four rows.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from jax_fa.kernels import edges, fragments, primitives, softmax, tiles
from jax_fa.spec import backward_division
from jax_fa.spec.band import ceil_div

PREPARE_THREADS = 128
PREPARE_ROWS = 64
"""Query rows of a CTA of ``prepare``. H200, 4 x 1024 tokens, 16 heads, D = 64: 10.7 us, 128 rows
13.7."""
MERGE_THREADS = 256
VECTOR_BYTES = 16
FLOATS = 4
"""Floats of a 16-byte access."""


class Scratch(NamedTuple):
    """Sums and statistics by row; ``schema.BACKWARD_SCRATCH``."""

    dq_sum: cute.Tensor  # (4, D / 4 * rows, N)
    lse2: cute.Tensor  # (rows, N)
    delta: cute.Tensor  # (rows, N)
    dkv_sums: cute.Pointer
    turns: cute.Tensor  # (rows / 64, N)


def claims_of(scratch: Scratch) -> cute.Pointer:
    """The counter of the tiles that CTAs have claimed, in a row behind those of all sequences."""
    last = cute.size(scratch.lse2, mode=[0]) - 1
    return cute.recast_ptr(scratch.lse2.iterator + last, dtype=Int32)


def probability(power: Float32) -> Float32:
    """Returns ``power``, which is 2 ** (logit - its row's LSE), limited to 1.

    With a bias, logits may be so large that the rounding error of the LSE exceeds the differences
    between them: at -1e9 it is 32.
    """
    return cute.arch.fmin(power, Float32(1.0), nan=True)


@cute.jit
def limit(powers: cute.Tensor) -> None:
    """Replaces powers by their ``probability``."""
    for i in cutlass.range_constexpr(cute.size(powers)):
        powers[i] = probability(powers[i])


class Rows(NamedTuple):
    """Global arrays of query rows, and whatever else the passes over them need."""

    out: cute.Tensor  # (T, Dv, N, B)
    dout: cute.Tensor  # (T, Dv, N, B)
    dq: cute.Tensor  # (T, D, N, B)
    lse: cute.Tensor  # (T, N, B)
    dlse: cute.Tensor  # (T, N, B), or null
    sinks: cute.Pointer
    dsinks: cute.Pointer
    sequences: tiles.Sequences
    deterministic: Int32


class RowBlock(NamedTuple):
    """``block_q`` query rows of one head.

    Attributes:
        head: query head.
        batch: batch in the arrays.
        row: first row in the arrays.
        num_written: rows from the first on that exist; may exceed ``block_q``.
        num_used: rows from the first on that the sequence uses; may exceed ``block_q``.
        scratch_row: first row in ``Scratch``.
    """

    head: Int32
    batch: Int32
    row: Int32
    num_written: Int32
    num_used: Int32
    scratch_row: Int32


def first_row(block_q: int, sequence: Int32, q_start: Int32) -> Int32:
    """The first row in ``Scratch`` of a sequence that starts at ``q_start`` among all queries."""
    return (q_start // block_q + sequence) * block_q


def make_scratch(
    dq_sum: cute.Pointer,
    row_stats: cute.Pointer,
    dkv_sums: cute.Pointer,
    turns: cute.Pointer,
    queries: primitives.Extents,
    num_sequences: Int32,
    head_dim: int,
) -> Scratch:
    """Returns views of the scratch arrays."""
    rows = backward_division.scratch_rows(queries.batch, num_sequences, queries.length)
    num_q_heads = queries.heads
    fours = rows.to(Int64) * (head_dim // FLOATS)
    stats = cute.make_layout((rows, num_q_heads), stride=(1, rows.to(Int64)))
    blocks = rows // backward_division.TURN_ROWS
    return Scratch(
        cute.make_tensor(
            dq_sum,
            cute.make_layout((FLOATS, fours, num_q_heads), stride=(1, FLOATS, fours * FLOATS)),
        ),
        cute.make_tensor(row_stats, stats),
        cute.make_tensor(row_stats + rows.to(Int64) * num_q_heads, stats),
        dkv_sums,
        cute.make_tensor(turns, cute.make_layout((blocks, num_q_heads), stride=(1, blocks))),
    )


def vector_at(dtype: type, address: Int64, size_bytes: int) -> cute.Tensor:
    """Returns ``size_bytes`` of global memory at ``address``, a multiple of that, as a vector."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=size_bytes)
    return cute.make_tensor(pointer, cute.make_layout(size_bytes * 8 // dtype.width))


def four_at(scratch: Scratch, place: Int32, head: Int32) -> cute.Tensor:
    """Returns a four of the dQ sums for an access of 16 bytes; their array does not tell that."""
    return vector_at(Float32, address_of(scratch.dq_sum[None, place, head]), VECTOR_BYTES)


def address_of(tensor: cute.Tensor) -> Int64:
    """Address of the first element."""
    return tensor.iterator.toint()


@cute.jit
def gather_columns(words: list, width: cutlass.Constexpr[int]) -> list:
    """Transposes ``width`` words across the ``width`` neighbouring lanes of a quad.

    Word i of a lane is its pair of columns in column group i of a row. Afterwards the lane holds
    the words of group ``lane % width``, in column order.
    """
    lane = cute.arch.lane_idx()
    step = 1
    while const_expr(step < width):
        is_high = (lane & step) != 0
        for i in cutlass.range_constexpr(width):
            if const_expr(i & step == 0):
                low, high = words[i], words[i | step]
                sent = Int32(cutlass.select_(is_high, low, high))
                received = cute.arch.shuffle_sync_bfly(sent, offset=step)
                words[i] = Int32(cutlass.select_(is_high, received, low))
                words[i | step] = Int32(cutlass.select_(is_high, high, received))
        step = step * 2
    return words


class Destination(NamedTuple):
    """Where an accumulator goes.

    Attributes:
        rows: (64, columns) view of global memory.
        thread: number of the calling thread in its warpgroup.
        num_rows: how many of the rows exist.
        num_columns: how many of the columns.
    """

    rows: cute.Tensor
    thread: Int32
    num_rows: Int32
    num_columns: Int32


@cute.jit
def store_rows(acc: cute.Tensor, factor: Float32, to: Destination):
    """Writes the 64 rows of a warpgroup's accumulator, times ``factor`` and rounded."""
    rows, thread, num_rows, num_columns = to
    rounded = cute.make_rmem_tensor_like(acc, rows.element_type)
    for i in cutlass.range_constexpr(cute.size(acc)):
        acc[i] = acc[i] * factor
    primitives.narrow(acc, rounded)
    words = fragments.pairs_by_row(rounded)
    groups = cute.size(words, mode=[1])
    width = 4 if groups % 4 == 0 else 2
    for r in cutlass.range_constexpr(fragments.ROWS):
        row = fragments.row_in_tile(thread) + 8 * r
        address = address_of(rows[row, None]) + thread % width * 16 + thread % 4 // width * 8
        for group in cutlass.range_constexpr(0, groups, width):
            own = [words[r, group + i] for i in range(width)]
            gathered = gather_columns(own, width)
            if (row < num_rows) & ((group + thread % width) * 8 < num_columns):
                target = vector_at(Int32, address + group * 16, 4 * width)
                for i in cutlass.range_constexpr(width):
                    target[i] = gathered[i]


@cute.jit
def store_floats(acc: cute.Tensor, factor: Float32, to: Destination):
    """As ``store_rows``, but without rounding: two floats of a row at a time."""
    rows, thread, num_rows, num_columns = to
    by_row = fragments.by_row(acc)
    for r in cutlass.range_constexpr(fragments.ROWS):
        row = fragments.row_in_tile(thread) + 8 * r
        if row < num_rows:
            address = address_of(rows[row, None]) + fragments.first_column(thread) * 4
            for group in cutlass.range_constexpr(cute.size(by_row, mode=[1]) // 2):
                if group * 8 < num_columns:
                    target = vector_at(Float32, address + group * 32, 8)
                    for i in cutlass.range_constexpr(2):
                        target[i] = by_row[r, 2 * group + i] * factor


def like(array: cute.Tensor, sums: cute.Pointer) -> cute.Tensor:
    """Returns a view of the floats at ``sums`` in the layout of ``array``."""
    return cute.make_tensor(sums, array.layout)


def dkv_elements(arrays: object) -> Int64:
    """The number of elements of dk and dv together."""
    return cute.size(arrays.dk.shape).to(Int64) + cute.size(arrays.dv.shape).to(Int64)


@cute.jit
def row_block(
    variant: cutlass.Constexpr, rows: Rows, parts: cutlass.Constexpr[int] = 1
) -> RowBlock:
    """Returns the query block of this CTA, one of ``parts`` that share it."""
    block_q = variant.config.block_q
    block, head, batch = number_of_cta(variant, rows, parts)
    sequences = rows.sequences
    left = sequences.rows.own - block * block_q
    found = RowBlock(
        head,
        batch,
        block * block_q,
        left,
        left,
        first_row(block_q, batch, batch * sequences.rows.own) + block * block_q,
    )
    if const_expr(variant.key.mask == "general"):
        zero = Int32(0)
        tile = tiles.Tile(block >= 0, zero, block, head, zero, batch)
        span = tiles.locate(sequences, tile, block_q)
        written = span.own_slot - span.first_row
        start = span.own_start + batch * sequences.rows.own
        found = RowBlock(
            head,
            batch,
            span.own_start + span.first_row,
            written,
            cutlass.min(span.own_len - span.first_row, written),
            first_row(block_q, span.sequence, start) + span.first_row,
        )
    return found


def num_row_blocks(variant: object, sequences: tiles.Sequences) -> Int32:
    """The number of query blocks per head and batch; for packed sequences, an upper bound."""
    blocks = ceil_div(sequences.rows.own, variant.config.block_q)
    if variant.key.mask == "general":
        # Each sequence, and the rows behind the last, may have a block that is partly filled.
        blocks = blocks + tiles.is_present(sequences.cu_seqlens.own).to(Int32) * (
            sequences.num_sequences + 1
        )
    return blocks


def grid_of_rows(variant: object, rows: Rows) -> primitives.Shape:
    """One CTA per query block and head. Batches are in x, as y and z of a grid end at 65535."""
    _, num_heads, batch = rows.lse.shape
    return (num_row_blocks(variant, rows.sequences) * batch, num_heads, 1)


class RowCta(NamedTuple):
    """What a CTA of ``grid_of_rows`` works on."""

    block: Int32
    head: Int32
    batch: Int32


def number_of_cta(variant: object, rows: Rows, parts: int = 1) -> RowCta:
    """Returns what the calling thread's CTA works on, one of ``parts`` that share a block.

    From the last batch to the first: the main kernel goes from the first to the last, and the L2
    cache holds what was used last. H200, 32 x 512 tokens, 16 heads of 128: ``prepare`` 71.5 us from
    the first batch to the last, 68.8 as it is, ``finish`` 51.1 and 49.1.
    """
    number = (launched() - 1 - place_of_launch()) // parts
    _, num_heads, _ = rows.lse.shape
    blocks, head = num_row_blocks(variant, rows.sequences), number % num_heads
    number = number // num_heads
    return RowCta(number % blocks, head, number // blocks)


def launched() -> Int32:
    """CTAs of ``grid_of_rows``."""
    x, y, _ = cute.arch.grid_dim()
    return x * y


def place_of_launch() -> Int32:
    """The number of the calling thread's CTA among them, in the order of launches."""
    x, y, _ = cute.arch.block_idx()
    width, _, _ = cute.arch.grid_dim()
    return y * width + x


@cute.jit
def prepare(variant: cutlass.Constexpr, rows: Rows, scratch: Scratch, stream: cuda.CUstream):
    """Launches ``prepare_kernel`` for every part of a query block."""
    num_blocks, num_heads, _ = grid_of_rows(variant, rows)
    prepare_kernel(variant, rows, scratch).launch(
        grid=(num_blocks * parts_of(variant), num_heads, 1),
        block=(PREPARE_THREADS, 1, 1),
        stream=stream,
    )


@cute.kernel
def prepare_kernel(variant: cutlass.Constexpr, rows: Rows, scratch: Scratch):
    """Writes statistics of rows of a query block of one head; zeros to its dQ sums and turns."""
    parts, thread = parts_of(variant), cute.arch.thread_idx()[0]
    part = place_of_launch() % parts
    at = row_block(variant, rows, parts)
    if const_expr(variant.claims_tiles):
        cta = cute.arch.block_idx()
        if (cta[0] == 0) & (cta[1] == 0) & (thread == 0):
            cute.arch.store(claims_of(scratch), Int32(0))
    if at.num_used > 0:
        write_stats(variant, rows, scratch, at, part)
        write_zeros(variant, rows, scratch, at, part)
        if (rows.deterministic != 0) & (part == 0) & (thread == 0):
            scratch.turns[at.scratch_row // variant.config.block_q, at.head] = Int32(0)


def parts_of(variant: object) -> int:
    """The number of CTAs of ``prepare`` that share a query block."""
    return max(variant.config.block_q // PREPARE_ROWS, 1)


def rows_of_part(variant: object) -> int:
    """The rows of a query block that one of them prepares."""
    return variant.config.block_q // parts_of(variant)


@cute.jit
def write_stats(
    variant: cutlass.Constexpr, rows: Rows, scratch: Scratch, at: RowBlock, part: Int32
):
    """Writes statistics of a part of the rows of a block that has at least one in use.

    All loads start before the first of them is waited for. Rows that are not in use load the last
    that is.
    """
    num_rows, threads, thread = rows_of_part(variant), PREPARE_THREADS, cute.arch.thread_idx()[0]
    pieces = variant.key.value_dim // 8
    lanes = min(pieces & -pieces, 8)
    passes, per_lane = num_rows * lanes // threads, pieces // lanes
    lane, own = thread % lanes, part * num_rows + thread // lanes
    last_piece = cute.size(rows.out, mode=[1]) // 8 - 1
    outs, douts, lses = [], [], []
    for i in cutlass.range_constexpr(passes):
        row = at.row + cutlass.min(own + i * (threads // lanes), at.num_used - 1)
        out, dout = (address_of(x[row, None, at.head, at.batch]) for x in (rows.out, rows.dout))
        for j in cutlass.range_constexpr(per_lane):
            offset = cutlass.min(lane + j * lanes, last_piece) * VECTOR_BYTES
            outs.append(vector_at(variant.dtype, out + offset, VECTOR_BYTES).load())
            douts.append(vector_at(variant.dtype, dout + offset, VECTOR_BYTES).load())
        lses.append(rows.lse[row, at.head, at.batch])
    for i in cutlass.range_constexpr(passes):
        row = own + i * (threads // lanes)
        delta = Float32(0.0)
        for j in cutlass.range_constexpr(per_lane):
            number = i * per_lane + j
            product = outs[number].to(Float32) * douts[number].to(Float32)
            part = product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            if lane + j * lanes <= last_piece:
                delta += part
        for step in cutlass.range_constexpr(lanes.bit_length() - 1):
            delta += cute.arch.shuffle_sync_bfly(delta, offset=1 << step)
        if lane == 0:
            store_stats(rows, scratch, at, row, delta, lses[i])


@cute.jit
def store_stats(
    rows: Rows, scratch: Scratch, at: RowBlock, row: Int32, delta: Float32, lse: Float32
):
    """Stores the statistics of a row, given the sum of dO * O and its LSE."""
    lse2 = Float32.inf
    if (row < at.num_used) & (lse != -Float32.inf):
        lse2 = lse * softmax.LOG2_E
        if tiles.is_present(rows.dlse.iterator):
            delta -= rows.dlse[at.row + row, at.head, at.batch]
    else:
        # It sees no key, or is not used: P is 2 ** (-inf) = 0, whatever the cotangent is.
        delta = Float32(0.0)
    scratch.delta[at.scratch_row + row, at.head] = delta
    scratch.lse2[at.scratch_row + row, at.head] = lse2


@cute.jit
def write_zeros(
    variant: cutlass.Constexpr, rows: Rows, scratch: Scratch, at: RowBlock, part: Int32
):
    """Writes zeros to the dQ sums of a part of the rows of a block."""
    threads, head_dim = PREPARE_THREADS, variant.key.head_dim
    fours = rows_of_part(variant) * head_dim // FLOATS
    width = cute.size(rows.dq, mode=[1])
    zero = cute.make_rmem_tensor((FLOATS,), Float32)
    zero.fill(0.0)
    first = part * fours + cute.arch.thread_idx()[0]
    place = at.scratch_row * (head_dim // FLOATS)
    if width == head_dim:
        for i in cutlass.range_constexpr(fours // threads):
            four_at(scratch, place + first + i * threads, at.head).store(zero.load())
    else:
        for i in cutlass.range(first, first + fours, threads):
            if column_of_four(variant, i) < width:
                four_at(scratch, place + i, at.head).store(zero.load())


@cute.jit
def finish(
    variant: cutlass.Constexpr,
    rows: Rows,
    scratch: Scratch,
    scale: Float32,
    stream: cuda.CUstream,
):
    """Launches ``finish_kernel`` for every query block."""
    threads = variant.config.block_q
    if const_expr(variant.dq_order in ("fragments", "warps", "words")):
        threads = edges.WARPGROUP * variant.config.num_consumers
    elif const_expr(variant.dq_order == "columns"):
        threads = variant.key.head_dim // 2
    finish_kernel(variant, rows, scratch, scale).launch(
        grid=grid_of_rows(variant, rows),
        block=(threads, 1, 1),
        stream=stream,
    )


@cute.kernel
def finish_kernel(variant: cutlass.Constexpr, rows: Rows, scratch: Scratch, scale: Float32):
    """Rounds the dQ sums of a query block to dq; sums the gradients of sinks, if any."""
    at = row_block(variant, rows)
    if const_expr(variant.dq_order in ("fragments", "warps", "words")):
        round_fragments(variant, rows, scratch, at, scale)
    elif const_expr(variant.dq_order == "columns"):
        round_columns(variant, rows, scratch, at, scale)
    else:
        round_rows(variant, rows, scratch, at, scale)
    if tiles.is_present(rows.sinks):
        sum_sinks(variant, rows, scratch)


class Fours(NamedTuple):
    """The fours of a thread in its consumer's dQ: the first, and the distance to the next."""

    first: Int32
    step: int


def fours_of(variant: object, number: int, thread: Int32) -> Fours:
    """Returns where the ``number`` fours of ``thread`` are in its consumer's part."""
    if variant.dq_order == "warps":
        first = thread // edges.WARP * (number * edges.WARP) + thread % edges.WARP
        return Fours(first, edges.WARP)
    return Fours(thread, edges.WARPGROUP)


def column_of_four(variant: object, four: Int32) -> Int32:
    """The first column that a four belongs to, by its number among those of a query block.

    Columns that dq does not have are neither zeroed nor read.
    """
    head_dim, order = variant.key.head_dim, variant.dq_order
    if order == "rows":
        return four // edges.WARP % (head_dim // FLOATS) * FLOATS
    if order == "columns":
        of_warp = variant.config.block_q // FLOATS * edges.WARP
        return four // of_warp * edges.WARP + four % edges.WARP
    dq_rows, dq_columns = variant.dq_shape
    size = edges.WARP if order == "warps" else edges.WARPGROUP
    column = four // size % (dq_columns // 8) * 8
    if variant.config.splits_dq_rows:
        return column
    return column + four // (dq_rows * dq_columns // FLOATS) * dq_columns


@cute.jit
def round_fragments(
    variant: cutlass.Constexpr, rows: Rows, scratch: Scratch, at: RowBlock, scale: Float32
):
    """Rounds dq of a query block. Each warpgroup reads the sums of the same-numbered consumer."""
    head_dim = variant.key.head_dim
    consumer = cute.arch.thread_idx()[0] // edges.WARPGROUP
    thread = cute.arch.thread_idx()[0] % edges.WARPGROUP
    dq_rows, dq_columns = variant.dq_shape
    acc = fragments.accumulator(dq_columns)
    acc.fill(0.0)
    fours = cute.size(acc) // FLOATS
    place = at.scratch_row * (head_dim // FLOATS) + consumer * fours * edges.WARPGROUP
    own = fours_of(variant, fours, thread)
    row, column = Int32(0), consumer * dq_columns
    if const_expr(variant.config.splits_dq_rows):
        row, column = consumer * dq_rows, Int32(0)
    dq = rows.dq[None, None, at.head, at.batch]
    target = cute.domain_offset((at.row + row, column), dq)
    left = cute.size(dq, mode=[1]) - column
    for i in cutlass.range_constexpr(fours):
        if (at.num_used > 0) & (8 * i < left):
            if const_expr(variant.dq_order == "words"):
                for j in cutlass.range_constexpr(FLOATS):
                    word = edges.WARPGROUP * j + thread
                    from_four = place + i * edges.WARPGROUP + word // FLOATS
                    acc[FLOATS * i + j] = scratch.dq_sum[word % FLOATS, from_four, at.head]
            else:
                four = four_at(scratch, place + own.first + i * own.step, at.head).load()
                for j in cutlass.range_constexpr(FLOATS):
                    acc[FLOATS * i + j] = four[j]
    store_rows(acc, scale, Destination(target, thread, at.num_written - row, left))


@cute.jit
def round_rows(
    variant: cutlass.Constexpr, rows: Rows, scratch: Scratch, at: RowBlock, scale: Float32
):
    """Rounds dq of a query block, one row per thread, eight columns at a time."""
    fours = variant.key.head_dim // FLOATS
    row = cute.arch.thread_idx()[0]
    place = at.scratch_row * fours + row // edges.WARP * (edges.WARP * fours) + row % edges.WARP
    for i in cutlass.range_constexpr(0, fours, 2):
        values = cute.make_rmem_tensor((2 * FLOATS,), Float32)
        values.fill(0.0)
        is_there = i * FLOATS < cute.size(rows.dq, mode=[1])
        if (at.num_used > 0) & is_there:
            for j in cutlass.range_constexpr(2):
                four = four_at(scratch, place + (i + j) * edges.WARP, at.head).load()
                for column in cutlass.range_constexpr(FLOATS):
                    values[j * FLOATS + column] = four[column] * scale
        rounded = cute.make_rmem_tensor((2 * FLOATS,), variant.dtype)
        primitives.narrow(values, rounded)
        if (row < at.num_written) & is_there:
            address = address_of(rows.dq[at.row + row, None, at.head, at.batch])
            address = address + i * VECTOR_BYTES // 2
            vector_at(variant.dtype, address, VECTOR_BYTES).store(rounded.load())


@cute.jit
def round_columns(
    variant: cutlass.Constexpr, rows: Rows, scratch: Scratch, at: RowBlock, scale: Float32
):
    """Rounds dq of a query block, two columns per thread, four rows at a time."""
    fours, column = variant.config.block_q // FLOATS, 2 * cute.arch.thread_idx()[0]
    place = at.scratch_row * (variant.key.head_dim // FLOATS) + column % edges.WARP
    place = place + column // edges.WARP * (edges.WARP * fours)
    is_there = column < cute.size(rows.dq, mode=[1])
    for i in cutlass.range_constexpr(fours):
        values = cute.make_rmem_tensor((2, FLOATS), Float32)
        values.fill(0.0)
        if (at.num_used > 0) & is_there:
            for j in cutlass.range_constexpr(2):
                four = four_at(scratch, place + i * edges.WARP + j, at.head).load()
                for row in cutlass.range_constexpr(FLOATS):
                    values[j, row] = four[row] * scale
        for row in cutlass.range_constexpr(FLOATS):
            if (i * FLOATS + row < at.num_written) & is_there:
                target = rows.dq[at.row + i * FLOATS + row, None, at.head, at.batch]
                word = primitives.narrow_pair(values[0, row], values[1, row], variant.dtype)
                vector_at(Int32, address_of(target) + column * 2, 4)[0] = word


@cute.jit
def sum_sinks(variant: cutlass.Constexpr, rows: Rows, scratch: Scratch):
    """Sums -p_sink * delta over one sequence and head. One of the head's CTAs does it."""
    block, head, batch = number_of_cta(variant, rows)
    thread = cute.arch.thread_idx()[0]
    sequences = rows.sequences
    sequence, q_start, q_len = batch, batch * sequences.rows.own, sequences.rows.own
    is_mine = block == 0
    if const_expr(variant.key.mask == "general"):
        if tiles.is_present(sequences.cu_seqlens.own):
            is_mine = block < sequences.num_sequences
            sequence = cutlass.min(block, sequences.num_sequences - 1)
            slot = tiles.slot_at(sequences.cu_seqlens.own, sequence, q_len)
            q_start, q_len = slot.start, slot.end - slot.start
        q_len = tiles.used_of(sequences.lengths.own, sequence, q_len)
    if is_mine:
        first = first_row(variant.config.block_q, sequence, q_start)
        place = sequence * cute.size(scratch.lse2, mode=[1]) + head
        sink_log2 = tiles.element(rows.sinks, place) * softmax.LOG2_E
        total = Float32(0.0)
        for row in cutlass.range(thread, q_len, cute.arch.block_dim()[0], unroll=1):
            z = sink_log2 - scratch.lse2[first + row, head]
            total += cute.math.exp2(z, fastmath=True) * scratch.delta[first + row, head]
        for step in cutlass.range_constexpr(5):
            total += cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        parts = SmemAllocator().allocate_tensor(Float32, cute.make_layout(32))
        if thread % edges.WARP == 0:
            parts[thread // edges.WARP] = total
        cute.arch.sync_threads()
        if thread == 0:
            for i in cutlass.range(1, cute.arch.block_dim()[0] // edges.WARP, unroll=1):
                total += parts[i]
            cute.make_tensor(rows.dsinks + place, cute.make_layout(1))[0] = -total


@cute.jit
def merge(
    dk: cute.Tensor, dv: cute.Tensor, sums: cute.Pointer, splits: Int32, stream: cuda.CUstream
):
    """Launches ``merge_kernel`` if groups of heads were split."""
    if splits > 1:
        fours = (cute.size(dk.shape) + cute.size(dv.shape)) // FLOATS
        merge_kernel(dk, dv, sums, splits).launch(
            grid=(ceil_div(fours, MERGE_THREADS), 1, 1), block=(MERGE_THREADS, 1, 1), stream=stream
        )


@cute.kernel
def merge_kernel(dk: cute.Tensor, dv: cute.Tensor, sums: cute.Pointer, splits: Int32):
    """Sums the parts of dk and dv in the order of parts, four elements per thread."""
    block, _, _ = cute.arch.block_idx()
    at = (block * MERGE_THREADS + cute.arch.thread_idx()[0]) * FLOATS
    num_dk = cute.size(dk.shape)
    total = num_dk + cute.size(dv.shape)
    if at < total:
        four = cute.make_rmem_tensor((FLOATS,), Float32)
        four.fill(0.0)
        for part in cutlass.range(splits, unroll=1):
            offset = part.to(Int64) * total + at
            piece = vector_at(Float32, sums.toint() + offset * 4, VECTOR_BYTES)
            four.store(four.load() + piece.load())
        address = address_of(dk) + at.to(Int64) * 2
        if at >= num_dk:
            address = address_of(dv) + (at - num_dk).to(Int64) * 2
        vector_at(dk.element_type, address, VECTOR_BYTES // 2).store(
            four.load().to(dk.element_type)
        )
