"""The work of a tile of the gradient of a bias.

A context ``x`` has the ``scalars`` of a forward; its ``grid`` and ``arrays`` are of types below.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from jax_fa.kernels import tiles
from jax_fa.kernels.bias import Bias
from jax_fa.kernels.forward_work import Work, seen_from
from jax_fa.spec import backward_division
from jax_fa.spec.band import ceil_div


class Arrays(NamedTuple):
    """Global arrays. On Hopper, the first four are as TMA sees them."""

    q: cute.Tensor  # (T, D, N, B)
    k: cute.Tensor  # (S, D, K, B)
    v: cute.Tensor  # (S, Dv, K, B)
    dout: cute.Tensor  # (T, Dv, N, B)
    lse: cute.Tensor  # (T, N, B)
    delta: cute.Tensor  # (T, N, B)
    dbias: Bias  # with the extents of the bias
    parts: cute.Pointer  # float32, with the same extents for each part


class Tiles(NamedTuple):
    """The tiles of a bias.

    Attributes:
        heads: query heads.
        group: query heads per key/value head.
        row_blocks: blocks of rows per head of the bias.
        key_blocks: blocks of keys per row of the bias.
        parts: parts of the batches and heads that share a tile; each counts as a tile of its own.
        number: tiles of all heads and parts.
    """

    heads: Int32
    group: Int32
    row_blocks: Int32
    key_blocks: Int32
    parts: Int32
    number: Int32


class Range(NamedTuple):
    """Numbers from ``start`` to before ``end``."""

    start: Int32
    end: Int32


class Place(NamedTuple):
    """Where a tile of the bias lies: the first attributes of a ``BiasTile``."""

    batch: Int32
    head: Int32
    row_block: Int32
    key_block: Int32
    part: Int32


class BiasTile(NamedTuple):
    """A tile of the bias, and everything that it is added to.

    Attributes:
        batch: of the bias.
        head: of the bias.
        row_block: of the bias.
        key_block: of the bias.
        part: number of a part of the batches and heads that share it.
        pairs: (batch, head) pairs of that part, as ``batch * heads + head`` of those that share it.
        heads: how many heads of a batch share it.
        row_blocks: blocks of queries that it is added to.
        key_blocks: blocks of keys that it is added to.
    """

    batch: Int32
    head: Int32
    row_block: Int32
    key_block: Int32
    part: Int32
    pairs: Range
    heads: Int32
    row_blocks: Range
    key_blocks: Range


TILE_STEPS = 4
"""Steps that take about as long as to write and merge a part's sums of a tile: an estimate."""


@cute.jit
def balanced_parts(number: Int32, pairs: Int32, most: Int32, num_sms: Int32) -> Int32:
    """Returns into how many parts, ``most`` or fewer, to split what shares a tile.

    Each of ``num_sms`` multiprocessors takes one of ``number`` tiles per part at a time, and with
    so many parts the last one is done first. In 14 parts, 48 tiles of 384 pairs are 672 of 28,
    which 132 multiprocessors take in six rounds; in 8 parts they are 384 of 48, taken in three.
    """
    chosen, least = Int32(1), ceil_div(number, num_sms) * (pairs + TILE_STEPS)
    for parts in cutlass.range(2, most + 1, unroll=1):
        steps = ceil_div(number * parts, num_sms) * (ceil_div(pairs, parts) + TILE_STEPS)
        if steps < least:
            chosen, least = parts, steps
    return chosen


@cute.jit
def make_tiles(
    variant: cutlass.Constexpr,
    bias: Bias,
    batch: Int32,
    num_q_heads: Int32,
    num_kv_heads: Int32,
    num_sms: Int32,
) -> Tiles:
    """Returns the tiles of a call."""
    row_blocks = ceil_div(bias.rows, variant.config.block_q)
    key_blocks = ceil_div(bias.keys, variant.config.block_kv)
    own_heads, size = bias.batch * bias.heads, backward_division.DBIAS_TILE
    pairs = batch * num_q_heads // own_heads
    parts = backward_division.dbias_parts(
        own_heads * ceil_div(bias.rows, size) * ceil_div(bias.keys, size), pairs, tiles.EXTREMES
    )
    number = own_heads * row_blocks * key_blocks
    if const_expr(variant.config.balances_parts):
        parts = balanced_parts(number, pairs, parts, num_sms)
    number = number * parts
    group = num_q_heads // num_kv_heads
    return Tiles(num_q_heads, group, row_blocks, key_blocks, parts, number)


@cute.jit
def _swept(block: Int32, extent: Int32, length: Int32, size: cutlass.Constexpr[int]) -> Range:
    """Returns the blocks of a sequence that a block of the bias, along one extent, is added to."""
    start, end = block, block + 1
    if extent == 1:
        start, end = Int32(0), ceil_div(length, size)
    return Range(start, end)


def place_of(x: Any, number: Int32) -> Place:
    """The place of tile ``number``: parts vary slowest, key blocks of a row of the bias fastest."""
    bias, grid = x.scalars.bias, x.grid
    tiles_of_part = grid.number // grid.parts
    part = number // tiles_of_part
    number = number - part * tiles_of_part
    key_block = number % grid.key_blocks
    rows = number // grid.key_blocks
    row_block = rows % grid.row_blocks
    head = rows // grid.row_blocks % bias.heads
    batch = rows // grid.row_blocks // bias.heads
    return Place(batch, head, row_block, key_block, part)


@cute.jit
def place_after(x: Any, place: Place, steps: Place) -> Place:
    """Returns the place whose number is the sum of those of ``place`` and ``steps``."""
    batch, head, row_block, key_block, part = [a + b for a, b in zip(place, steps, strict=True)]
    if key_block >= x.grid.key_blocks:
        key_block, row_block = key_block - x.grid.key_blocks, row_block + 1
    if row_block >= x.grid.row_blocks:
        row_block, head = row_block - x.grid.row_blocks, head + 1
    if head >= x.scalars.bias.heads:
        head, batch = head - x.scalars.bias.heads, batch + 1
    if batch >= x.scalars.bias.batch:
        batch, part = batch - x.scalars.bias.batch, part + 1
    return Place(batch, head, row_block, key_block, part)


@cute.jit
def bias_tile(variant: cutlass.Constexpr, x: Any, number: Int32) -> BiasTile:
    """Returns tile ``number``."""
    return tile_at(variant, x, place_of(x, number))


@cute.jit
def tile_at(variant: cutlass.Constexpr, x: Any, place: Place) -> BiasTile:
    """Returns the tile at ``place``."""
    bias, grid, config = x.scalars.bias, x.grid, variant.config
    q_len, kv_len = x.scalars.sequences.rows
    heads, batches = Int32(1), Int32(1)
    if bias.heads == 1:
        heads = grid.heads
    if bias.batch == 1:
        batches = cute.size(x.arrays.k, mode=[3])
    pairs = batches * heads
    size = ceil_div(pairs, grid.parts)
    start = cutlass.min(place.part * size, pairs)
    return BiasTile(
        *place,
        Range(start, cutlass.min(start + size, pairs)),
        heads,
        _swept(place.row_block, bias.rows, q_len, config.block_q),
        _swept(place.key_block, bias.keys, kv_len, config.block_kv),
    )


class Step(NamedTuple):
    """A block of queries of one head that a tile of the bias is added to.

    Attributes:
        work: the block, as a forward sees it.
        blocks: the key blocks that belong to the tile and that a query of the block sees.
    """

    work: Work
    blocks: Range


class Pair(NamedTuple):
    """A batch and a head that a tile is added to; a key/value head that is None is derived."""

    batch: Int32
    head: Int32
    kv_head: Int32 | None = None


@cute.jit
def step_at(
    variant: cutlass.Constexpr, x: Any, tile: BiasTile, pair: Int32, row_block: Int32
) -> Step:
    """Returns the step for a block of queries of pair ``pair`` of a tile."""
    # A tile is added to every batch or head if that extent of the bias is 1, else to its own.
    batch, head = tile.batch + pair // tile.heads, tile.head + pair % tile.heads
    return step_of(variant, x, tile, Pair(batch, head), row_block)


@cute.jit
def step_of(
    variant: cutlass.Constexpr, x: Any, tile: BiasTile, pair: Pair, row_block: Int32
) -> Step:
    """Returns the step for a block of queries of a batch and a head that a tile is added to."""
    sequences, batch = x.scalars.sequences, pair.batch
    q_len, kv_len = sequences.rows
    zero, first_row = Int32(0), row_block * variant.config.block_q
    span = tiles.Span(
        batch,
        zero,
        zero,
        q_len,
        tiles.used_of(sequences.lengths.own, batch, q_len),
        tiles.used_of(sequences.lengths.swept, batch, kv_len),
        tiles.offset_of(sequences.q_offset, batch),
        first_row,
    )
    window, blocks = seen_from(variant, x, span)
    start = cutlass.max(blocks.start, tile.key_blocks.start)
    end = cutlass.min(blocks.end, tile.key_blocks.end)
    if first_row >= span.own_len:
        end = start
    kv_head = pair.head // x.grid.group if const_expr(pair.kv_head is None) else pair.kv_head
    place = tiles.Tile(Boolean(True), zero, row_block, pair.head, kv_head, batch)
    work = Work(place, span, window, blocks, end - start, zero)
    return Step(work, Range(start, end))


class RowStats(NamedTuple):
    """The statistics of a thread's two rows."""

    lse2: list[Float32]
    delta: list[Float32]
