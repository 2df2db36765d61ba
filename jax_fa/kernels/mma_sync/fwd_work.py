"""Bundles that the steps of the forward share, and the loads of its tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from jax_fa.kernels import edges, fragment_softmax, fragments, primitives, tiles
from jax_fa.kernels.forward_work import Arrays, Scalars, Variant, Work, row_of_tile
from jax_fa.kernels.mma_sync import products
from jax_fa.kernels.mma_sync.fwd_order import CtaOrder
from jax_fa.kernels.mma_sync.loads import Limits, address_of_row, copy_row, piece_of_thread
from jax_fa.kernels.mma_sync.panels import Panels
from jax_fa.spec.config_mma_sync import WARP_ROWS


class ForwardTiles(NamedTuple):
    """Layouts of the tiles in shared memory."""

    q: Panels
    k: Panels
    v: Panels
    out: Panels


class ForwardSmem(NamedTuple):
    """Shared memory: addresses of tiles, and a tensor."""

    q: Int32
    k: Int32  # of the first of ``stages``
    v: Int32  # of the first of ``value_stages``
    found: cute.Tensor  # (FOUND_WORDS,) segments.py, dense_mask.py
    tile: cute.Tensor  # (TILE_WORDS,) which tile the CTA has


class ForwardContext(NamedTuple):
    """The kernel's arguments and shared memory."""

    arrays: Arrays
    scalars: Scalars
    order: CtaOrder
    smem: ForwardSmem
    packing: Any  # division.Packing, or None if the variant does not pack heads


@cute.jit
def put_down(x: ForwardContext, tile: tiles.Tile) -> None:
    """Writes which tile the CTA has to shared memory. It can be read after the next barrier."""
    if cute.arch.thread_idx()[0] == 0:
        words = tile[1:]
        for i in cutlass.range_constexpr(len(words)):
            x.smem.tile[i] = words[i]


def taken_up(x: ForwardContext) -> tiles.Tile:
    """The tile that ``put_down`` wrote: no register holds it through the loop over keys."""
    return tiles.Tile(Boolean(True), *(x.smem.tile[i] for i in range(len(tiles.Tile._fields) - 1)))


def tiles_of(variant: Variant) -> ForwardTiles:
    """The tiles of a variant."""
    key, config = variant.key, variant.config
    return ForwardTiles(
        q=Panels(config.block_q, key.head_dim),
        k=Panels(config.block_kv, key.head_dim),
        v=Panels(config.block_kv, key.value_dim),
        out=Panels(config.block_q, key.value_dim),
    )


class RowTile(NamedTuple):
    """16 query rows of a warp: accumulator and statistics.

    Every 64 rows of the CTA's tile belong to four warps, 16 each, as in a warpgroup.
    """

    scores: cute.Tensor  # accumulator of 16 x block_kv
    out: cute.Tensor  # accumulator of 16 x Dv
    state: fragment_softmax.RowState
    bias: Any  # the bias of the scores, a word each, or None without a bias
    index: Int32  # which 64 rows
    thread: Int32  # in the four warps


def make_row_tiles(variant: Variant) -> list[RowTile]:
    """The row tiles of the calling warp, not yet reset."""
    config = variant.config
    thread = cute.arch.thread_idx()[0]
    groups = config.warps // edges.WARPS_PER_GROUP
    group = Int32(0) if groups == 1 else thread // edges.WARPGROUP
    return [
        RowTile(
            scores=fragments.accumulator(config.block_kv),
            out=fragments.accumulator(variant.key.value_dim),
            state=fragment_softmax.make_row_state(),
            bias=bias_words(variant),
            index=group + i * groups,
            thread=thread % edges.WARPGROUP,
        )
        for i in range(config.row_tiles)
    ]


def bias_words(variant: Variant) -> cute.Tensor | None:
    """Registers for the bias of 16 rows' scores, if there is one."""
    if not variant.key.has_bias:
        return None
    return cute.make_rmem_tensor((variant.config.block_kv // 2,), Int32)


def first_row(thread: Int32) -> Int32:
    """The first row of a thread's warp in the CTA's tile; the next is ``row_step`` rows on."""
    return thread // edges.WARP * WARP_ROWS


def row_step(variant: Variant) -> int:
    """Rows from one tile of a warp to the next."""
    return variant.config.warps * WARP_ROWS


@cute.jit
def load_queries(
    variant: cutlass.Constexpr,
    x: Any,
    tile: cutlass.Constexpr,
    target: Int32,
    array: cute.Tensor,
    work: Work,
) -> None:
    """Starts the load of a tile of queries, or of an array with the same rows, by all threads.

    Args:
        variant: the variant.
        x: the context.
        tile: the layout in shared memory.
        target: the tile's address there.
        array: (T, width, N, B).
        work: the work whose queries they are.
    """
    span = work.span
    mine = piece_of_thread(tile, variant.plan.threads)
    step = tile.rows_of_pass(variant.plan.threads)
    for i in cutlass.range_constexpr(tile.rows // step):
        row = mine.row + i * step
        at = row_of_tile(variant, x, work, row)
        rows = array[None, None, at.head, work.tile.batch]
        there = Limits(span.own_slot if at.is_there else Int32(0), cute.size(rows, mode=[1]))
        source = address_of_row(rows, span.own_start + at.position) + mine.column_bytes(tile)
        copy_row(tile, mine, target + mine.place(tile, row), source, at.position, there)


@cute.jit
def load_rows(
    variant: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    target: Int32,
    array: cute.Tensor,
    work: Work,
    block: Int32,
    is_whole: cutlass.Constexpr[bool] = False,
) -> None:
    """Starts the load of a block of keys or values, by all threads.

    Rows after the sequence's last are zeros: their probabilities are 0, but 0 * NaN is not 0.

    Args:
        variant: the variant.
        tile: the layout in shared memory.
        target: the tile's address there.
        array: (S, width, K, B).
        work: the work whose keys they are.
        block: the number of the key block.
        is_whole: whether all of the block's rows are known to be there.
    """
    mine, span = piece_of_thread(tile, variant.plan.threads), work.span
    step = tile.rows_of_pass(variant.plan.threads)
    # Two registers in the loop; addresses of the head's keys and values would take four.
    kv_head, batch = (primitives.opaque(i) for i in (work.tile.kv_head, work.tile.batch))
    rows = array[None, None, kv_head, batch]
    # Opaque, or the limits of a row's panels would take registers in the loop over blocks. A row of
    # a whole block counts as the first of one, which saves a comparison.
    num_rows = Int32(1) if is_whole else primitives.opaque(span.swept_len)
    there = Limits(num_rows, cute.size(rows, mode=[1]))
    # HAZARD: if segments leave a tile without keys, ``block`` may be any number.
    first = block * tile.rows + mine.row
    place = target + mine.place(tile, mine.row)
    for i in cutlass.range_constexpr(tile.rows // step):
        row = first + i * step
        source = address_of_row(rows, span.swept_start + row) + mine.column_bytes(tile)
        counted = Int32(0) if is_whole else row
        copy_row(tile, mine, place + i * step * tile.width, source, counted, there)


@cute.jit
def multiply_keys(
    variant: cutlass.Constexpr,
    rows: list,
    a: list,
    tile: cutlass.Constexpr,
    place: Int32,
    number: cutlass.Constexpr[int],
) -> None:
    """Adds the product of 16 columns of queries and keys to the scores.

    Args:
        variant: the variant.
        rows: the holders of the scores, one for each tile of 16 query rows.
        a: the queries, an A operand for each of ``rows``.
        tile: the layout of the keys.
        place: the address from which the lane fetches the first keys.
        number: the number of keys.
    """
    for n in cutlass.range_constexpr(0, number, 2 * products.COLUMNS):
        b = products.fetch(place + n * tile.width)
        for i in cutlass.range_constexpr(len(rows)):
            products.multiply(rows[i].scores, n // products.COLUMNS, a[i], b, variant.dtype)


@cute.jit
def multiply_values(
    variant: cutlass.Constexpr,
    rows: list,
    tile: cutlass.Constexpr,
    place: Int32,
    first: cutlass.Constexpr[int],
) -> None:
    """Adds the values of 16 keys, weighted by their probabilities, to O.

    Args:
        variant: the variant.
        rows: the holders of the probabilities and of O, one for each tile of 16 query rows.
        tile: the layout of the values.
        place: the address from which the lane fetches the block's first values.
        first: the first of the keys in the block.
    """
    a = [products.rounded_operand(one.scores, first, variant.dtype) for one in rows]
    for n in cutlass.range_constexpr(0, variant.key.value_dim, 2 * products.COLUMNS):
        b = products.fetch(tile.beside(place, n) + first * tile.width, is_transposed=True)
        for i in cutlass.range_constexpr(len(rows)):
            products.multiply(rows[i].out, n // products.COLUMNS, a[i], b, variant.dtype)
