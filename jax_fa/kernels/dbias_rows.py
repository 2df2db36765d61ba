"""Rows of a tile of a bias's gradient, for scores held in fragments (``fragments.py``).

An argument ``c`` is any object with ``sums``, the accumulator of dS; ``bias``, the words of a
thread's part of the bias; ``kept``, the same in shared memory; ``index``, the number of its 64
rows; and ``thread``, the number of the calling thread among those that own these rows.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from jax_fa.kernels import (
    backward_rows,
    dense_mask,
    edges,
    fragment_bias,
    fragment_softmax,
    fragments,
    primitives,
    softmax,
    tiles,
)
from jax_fa.kernels import bias as biases
from jax_fa.kernels.backward_rows import vector_at
from jax_fa.kernels.dbias_work import BiasTile, Place, RowStats
from jax_fa.kernels.forward_work import Variant, Work
from jax_fa.kernels.fragment_rows import (
    GROUP_ROWS,
    mask_by_place,
    mask_by_words,
    rows_of_thread,
)


@cute.jit
def keep_bias(
    variant: cutlass.Constexpr,
    x: Any,
    c: Any,
    tile: BiasTile | Place,
    pieces: cutlass.Constexpr[int] = 1,
) -> None:
    """Copies the bias of a tile to shared memory; each thread copies that of its own scores.

    It does so in ``pieces``, for which ``c.bias`` has room.
    """
    bias, addresses, config = x.scalars.bias, [], variant.config
    first_row = tile.row_block * config.block_q + c.index * GROUP_ROWS
    for r in cutlass.range_constexpr(fragments.ROWS):
        position = first_row + fragments.row_in_tile(c.thread) + 8 * r
        addresses.append(
            biases.address_of(bias, biases.row_of(bias, tile.batch, tile.head, position))
        )
    first_key = tile.key_block * config.block_kv + fragments.first_column(c.thread)
    fours, columns = cute.zipped_divide(c.bias, (4,)), config.block_kv // pieces
    count = cute.size(c.kept, mode=[1]) // pieces
    for piece in cutlass.range_constexpr(pieces):
        fragment_bias.load_rows(c.bias, bias, addresses, first_key + columns * piece, columns)
        # With 16 bits a piece fills half as much, and the next overwrites what is left.
        first = piece * count * bias.size_bytes // 4 if piece else 0
        for i in cutlass.range_constexpr(count):
            cute.autovec_copy(fours[None, i], c.kept[None, first + i])


@cute.jit
def add_kept(variant: cutlass.Constexpr, x: Any, c: Any, scores: cute.Tensor) -> None:
    """Adds the bias that ``keep_bias`` kept to the scores."""
    fours, count = cute.zipped_divide(c.bias, (4,)), cute.size(c.kept, mode=[1])
    if x.scalars.bias.size_bytes == 2:
        for i in cutlass.range_constexpr(count // 2):
            cute.autovec_copy(c.kept[None, i], fours[None, i])
    else:
        for i in cutlass.range_constexpr(count):
            cute.autovec_copy(c.kept[None, i], fours[None, i])
    fragment_bias.add_rows(scores, c.bias, x.scalars.bias, variant.dtype)


@cute.jit
def row_stats(variant: cutlass.Constexpr, x: Any, c: Any, work: Work) -> RowStats:
    """Returns base-2 log-sum-exp and delta of this thread's rows; unused rows get P = 0."""
    lse2s, deltas, last = [], [], work.span.own_slot - 1
    for at in rows_of_thread(variant, x, c, work):
        position = cutlass.min(at.position, last)
        lse = x.arrays.lse[position, at.head, work.tile.batch]
        delta = x.arrays.delta[position, at.head, work.tile.batch]
        is_empty = (at.position >= work.span.own_len) | (lse == -Float32.inf)
        lse2s.append(Float32.inf if is_empty else lse * softmax.LOG2_E)
        deltas.append(Float32(0.0) if is_empty else delta)
    return RowStats(lse2s, deltas)


@cute.jit
def may_hide(variant: cutlass.Constexpr, x: Any, work: Work, block: Int32) -> Boolean:
    """Whether anything but the bias may hide pairs of a block."""
    scalars, blocks = x.scalars, work.blocks
    hides = (block < blocks.full_start) | (block >= blocks.full_end)
    hides = hides | (work.span.first_row + variant.config.block_q > work.span.own_len)
    return hides | tiles.is_present(scalars.q_segments) | dense_mask.is_present(scalars.mask)


@cute.jit
def hide(
    variant: cutlass.Constexpr,
    x: Any,
    c: Any,
    work: Work,
    scores: cute.Tensor,
    block: Int32,
) -> None:
    """Hides what a row does not see, and everything from rows beyond the sequence."""
    mask_by_place(variant, x, c, work, scores, block)
    if dense_mask.is_present(x.scalars.mask):
        mask_by_words(variant, x, c, work, scores, block)
    by_row, rows = fragments.by_row(scores), rows_of_thread(variant, x, c, work)
    for r in cutlass.range_constexpr(fragments.ROWS):
        is_used = rows[r].position < work.span.own_len
        for i in cutlass.range_constexpr(cute.size(by_row, mode=[1])):
            by_row[r, i] = cutlass.select_(is_used, by_row[r, i], -Float32.inf)


@cute.jit
def to_slopes(x: Any, stats: RowStats, scores: cute.Tensor) -> None:
    """Replaces scores by P, times the slope of the soft cap if there is one."""
    if x.scalars.bias.soft_cap != 0.0:
        exponentiate(x, stats, scores, True)
    else:
        exponentiate(x, stats, scores, False)


@cute.jit
def exponentiate(
    x: Any,
    stats: RowStats,
    scores: cute.Tensor,
    has_cap: cutlass.Constexpr[bool],
    is_limited: cutlass.Constexpr[bool] = True,
) -> None:
    """Does the work of ``to_slopes``, with or without a cap, and without a limit unless asked."""
    by_row = fragments.by_row(scores)
    for r in cutlass.range_constexpr(fragments.ROWS):
        for i in cutlass.range_constexpr(cute.size(by_row, mode=[1])):
            score = by_row[r, i]
            exponent = score * x.scalars.scale_log2 - stats.lse2[r]
            p = cute.math.exp2(exponent, fastmath=True)
            if const_expr(is_limited):
                p = backward_rows.probability(p)
            if const_expr(has_cap):
                # Masked scores are -inf here. Their slope must become 0, since 0 * inf is not 0.
                p = p * cute.arch.fmax(1.0 - score * score, 0.0)
            by_row[r, i] = p


@cute.jit
def add_products(
    c: Any,
    stats: RowStats,
    slopes: cute.Tensor,
    dp: cute.Tensor,
    hides: cutlass.Constexpr[bool],
) -> None:
    """Adds dS = slope (dP - delta) to the sums."""
    sums, slopes, dp = (fragments.by_row(x) for x in (c.sums, slopes, dp))
    for r in cutlass.range_constexpr(fragments.ROWS):
        for i in cutlass.range_constexpr(cute.size(sums, mode=[1])):
            slope = slopes[r, i]
            ds = slope * (dp[r, i] - stats.delta[r])
            if const_expr(hides):
                # Rows of dO or values beyond the sequence may be anything, and 0 * NaN is not 0.
                ds = Float32(cutlass.select_(slope == 0.0, Float32(0.0), ds))
            sums[r, i] = sums[r, i] + ds


@cute.jit
def store(variant: cutlass.Constexpr, x: Any, c: Any, tile: BiasTile | Place) -> None:
    """Writes a tile of the gradient, summed over the axes that the bias is broadcast along."""
    dbias, config = x.arrays.dbias, variant.config
    base, size_bytes = dbias.array.toint(), dbias.size_bytes
    if x.grid.parts > 1:
        elements = (dbias.batch * dbias.heads).to(Int64) * dbias.rows * dbias.keys
        base, size_bytes = x.arrays.parts.toint() + tile.part * elements * 4, Int32(4)
    sums = fragments.by_row(c.sums)
    columns = cute.size(sums, mode=[1])
    if dbias.keys == 1:
        for r in cutlass.range_constexpr(fragments.ROWS):
            total = Float32(0.0)
            for i in cutlass.range_constexpr(columns):
                total = total + sums[r, i]
            sums[r, 0] = fragment_softmax.quad_sum(total)
    if dbias.rows == 1:
        sum_rows(variant, x, c, sums)
    first_row = tile.row_block * config.block_q + c.index * GROUP_ROWS
    first_key = tile.key_block * config.block_kv + fragments.first_column(c.thread)
    for r in cutlass.range_constexpr(fragments.ROWS):
        row = first_row + fragments.row_in_tile(c.thread) + 8 * r
        if row < dbias.rows:
            start = biases.row_of(dbias, tile.batch, tile.head, row) * dbias.keys
            target = RowTarget(base + start * size_bytes, size_bytes, dbias.keys)
            store_row(variant, target, first_key, [sums[r, i] for i in range(columns)])


class RowTarget(NamedTuple):
    """A row of the gradient, or of a part of it; ``size_bytes`` is that of one key."""

    address: Int64
    size_bytes: Int32
    keys: Int32


@cute.jit
def store_row(variant: cutlass.Constexpr, row: RowTarget, first_key: Int32, values: list) -> None:
    """Writes a thread's part of a row, starting at key ``first_key``."""
    dtype = variant.dtype
    for g in cutlass.range_constexpr(len(values) // 2):
        key = first_key + 8 * g
        pair = [values[2 * g + i] for i in range(2)]
        if (key + 1 < row.keys) & (row.keys % 2 == 0):
            if row.size_bytes == 2:
                word = vector_at(Int32, row.address + key.to(Int64) * 2, 4)
                word[0] = primitives.narrow_pair(pair[0], pair[1], dtype)
            else:
                floats = vector_at(Float32, row.address + key.to(Int64) * 4, 8)
                for i in cutlass.range_constexpr(2):
                    floats[i] = pair[i]
        else:
            for i in cutlass.range_constexpr(2):
                if key + i < row.keys:
                    if row.size_bytes == 2:
                        half = vector_at(dtype, row.address + (key + i).to(Int64) * 2, 2)
                        half[0] = pair[i].to(dtype)
                    else:
                        word = vector_at(Float32, row.address + (key + i).to(Int64) * 4, 4)
                        word[0] = pair[i]


@cute.jit
def sum_rows(variant: cutlass.Constexpr, x: Any, c: Any, sums: cute.Tensor) -> None:
    """Sums all rows of a tile into the first, always in the same order. All consumers call."""
    columns = cute.size(sums, mode=[1])
    warps = variant.config.block_q // GROUP_ROWS * edges.WARPS_PER_GROUP
    warp = c.index * (edges.WARPGROUP // edges.WARP) + c.thread // edges.WARP
    first = fragments.first_column(c.thread)
    for i in cutlass.range_constexpr(columns):
        total = sums[0, i] + sums[1, i]
        for step in cutlass.range_constexpr(2, 5):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        if c.thread % edges.WARP < 4:
            x.smem.columns[first + fragments.column_of(i), warp] = total
    meet(variant, "columns")
    for i in cutlass.range_constexpr(columns):
        total = Float32(0.0)
        for other in cutlass.range_constexpr(warps):
            total = total + x.smem.columns[first + fragments.column_of(i), other]
        sums[0, i] = total
    # HAZARD: the next tile's sums must not overwrite what other threads still read.
    meet(variant, "summed")


def meet(variant: Variant, name: str) -> None:
    """Waits for all threads that own rows, at a barrier of the plan or else of the CTA."""
    if variant.plan.barriers:
        primitives.meet(variant, name)
    else:
        cute.arch.sync_threads()
