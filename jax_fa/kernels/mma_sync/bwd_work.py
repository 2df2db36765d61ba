"""Bundles that the steps of the backward share, and the loads of its tiles."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from jax_fa.kernels import backward_rows, edges, fragments, primitives, tiles
from jax_fa.kernels.backward_work import Arrays, Scalars, Step, Work
from jax_fa.kernels.mma_sync import products
from jax_fa.kernels.mma_sync.loads import Limits, address_of_row, copy_row, piece_of_thread
from jax_fa.kernels.mma_sync.panels import PIECE_BYTES, Panels
from jax_fa.spec.band import Blocks, Window
from jax_fa.spec.config_mma_sync import WARP_ROWS, MmaSyncBackward
from jax_fa.spec.key import KernelKey


class DqShape(NamedTuple):
    """Rows and columns of a part of dQ."""

    rows: int
    columns: int


class BackwardVariant(NamedTuple):
    """A kernel's compile-time constants."""

    key: KernelKey
    config: MmaSyncBackward
    plan: edges.Plan

    @property
    def dtype(self) -> type:
        """Element type of the arrays."""
        return primitives.DTYPES[self.key.dtype]

    @property
    def claims_tiles(self) -> bool:
        """Whether CTAs may claim one tile after the other."""
        return False

    @property
    def is_general(self) -> bool:
        """Whether operands that hide keys may be present."""
        return self.key.mask == "general"

    @property
    def dq_order(self) -> str:
        """Order of the sums of dQ (``backward_rows``): by what one instruction adds."""
        return "fragments" if self.config.adds_four else "words"

    @property
    def dq_shape(self) -> DqShape:
        """The part of a query block's dQ that four warps round."""
        return DqShape(self.config.block_q, self.key.head_dim // self.config.num_consumers)

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that a warp computes, of as many queries as it owns keys."""
        config = self.config
        shares = config.warps // (config.loaded_rows // config.warp_rows)
        return self.key.head_dim // shares

    @property
    def dk_columns(self) -> int:
        """Columns of dK that a warp computes."""
        return self.key.head_dim // self.config.column_shares

    @property
    def dv_columns(self) -> int:
        """Columns of dV that a warp computes."""
        return self.key.value_dim // self.config.column_shares

    @property
    def own_queries(self) -> int:
        """Queries of a part of a block whose scores a warp computes at a time."""
        return self.config.block_q // self.config.parts // self.config.column_shares


class DqShare(NamedTuple):
    """Where a warp's share of dQ begins, among the rows that are loaded and all columns."""

    row: Int32
    column: Int32


def dq_share(variant: BackwardVariant, warp: Int32) -> DqShare:
    """The share of a warp."""
    groups = variant.config.loaded_rows // variant.config.warp_rows
    row = warp % groups * variant.config.warp_rows
    return DqShare(row, warp // groups * variant.dq_columns)


class BackwardTiles(NamedTuple):
    """Layouts of the tiles in shared memory."""

    k: Panels
    v: Panels
    q: Panels
    dout: Panels
    ds: Panels  # keys by queries


def tiles_of(variant: BackwardVariant) -> BackwardTiles:
    """The tiles of a variant."""
    key, config = variant.key, variant.config
    return BackwardTiles(
        k=Panels(config.block_kv, key.head_dim),
        v=Panels(config.block_kv, key.value_dim),
        q=Panels(config.loaded_rows, key.head_dim),
        dout=Panels(config.loaded_rows, key.value_dim),
        ds=Panels(config.block_kv, config.loaded_rows),
    )


class BackwardSmem(NamedTuple):
    """Shared memory: addresses of tiles, and tensors."""

    k: Int32
    v: Int32
    q: Int32  # of the first of ``stages``
    dout: Int32  # of the first of ``stages``
    p: Int32  # with ``splits_columns``; else that of dS
    ds: Int32
    lse2: cute.Tensor  # (loaded_rows, stages)
    delta: cute.Tensor  # (loaded_rows, stages)
    found: cute.Tensor  # (FOUND_WORDS,) segments.py, dense_mask.py
    work: cute.Pointer  # (config.work_words,) put_down


class BackwardContext(NamedTuple):
    """The kernel's arguments and shared memory."""

    arrays: Arrays
    scratch: backward_rows.Scratch
    scalars: Scalars
    order: tiles.Order
    smem: BackwardSmem


class Keys(NamedTuple):
    """16 keys of a warp: their accumulators, and their place.

    With ``splits_results``, ``dk`` and ``dv`` are one accumulator, which holds dV in the first half
    of the warps and dK in the others.
    """

    s: cute.Tensor  # accumulator of 16 keys x queries of a part
    dk: cute.Tensor  # accumulator of 16 x dk_columns
    dv: cute.Tensor  # accumulator of 16 x dv_columns
    number: int  # which 16 of the warp's keys
    part: Int32 | int  # whose scores ``s`` holds
    first_key: Int32  # counted in the tile
    first_query: Int32 | int  # of the scores, counted in the block
    index: Int32  # of the warp among those that own the same keys
    thread: Int32  # in the warp

    def other_query(self, variant: BackwardVariant) -> Int32:
        """With ``splits_columns``, the first query of the other warp that owns the same keys."""
        return (1 - self.index) * (variant.config.block_q // 2)


def make_keys(variant: BackwardVariant) -> list[Keys]:
    """Returns the keys of the calling warp, 16 at a time."""
    keys, zero = [], Int32(0)
    for number in range(variant.config.row_tiles):
        s = fragments.accumulator(variant.own_queries)
        dk = fragments.accumulator(variant.dk_columns)
        dv = dk if variant.config.splits_results else fragments.accumulator(variant.dv_columns)
        keys.append(anew(variant, Keys(s, dk, dv, number, 0, zero, 0, zero, zero)))
    return keys


def index_of(variant: BackwardVariant, warp: Int32) -> Int32:
    """The number of a warp among those that own the same keys."""
    if variant.config.splits_columns:
        return warp % 2
    if not variant.config.splits_results:
        return Int32(0)
    return cute.arch.make_warp_uniform(warp // (variant.config.warps // 2))


def anew(variant: BackwardVariant, c: Keys) -> Keys:
    """``c`` with its place computed anew, so that no register of the loop holds it."""
    config, thread = variant.config, products.thread_index()
    warp = thread // edges.WARP
    index, first_query = index_of(variant, warp), c.part * variant.own_queries
    if config.splits_columns:
        first_query = first_query + index * (config.block_q // 2)
    return c._replace(
        first_key=config.first_row(warp) + c.number * WARP_ROWS,
        first_query=first_query,
        index=index,
        thread=thread % edges.WARP,
    )


def _words_of(work: Work) -> list:
    """The words of its work that a sweep uses; an int among them is a compile-time constant."""
    rest = (work.kv_start, work.kv_slot, work.q_start, work.scratch_row)
    heads = (work.first_head, work.num_heads, work.stride)
    return [*work.tile[1:], *work.window, *work.blocks, *rest, *heads]


@cute.jit
def put_down(variant: cutlass.Constexpr, x: BackwardContext, work: Work) -> None:
    """Writes the words that a sweep uses to shared memory, if so configured. All threads call."""
    if const_expr(variant.config.work_words > 0):
        words = _words_of(work)
        kept = cute.make_tensor(x.smem.work, cute.make_layout(len(words)))
        # HAZARD: warps may still read the words of the previous tile.
        cute.arch.sync_threads()
        if cute.arch.thread_idx()[0] == 0:
            for i in cutlass.range_constexpr(len(words)):
                kept[i] = Int32(words[i])
        cute.arch.sync_threads()


def taken_up(variant: BackwardVariant, x: BackwardContext, work: Work) -> Work:
    """``work`` read back as ``put_down`` wrote it: no register holds it across a barrier before."""
    if variant.config.work_words == 0:
        return work
    words = _words_of(work)
    kept = cute.make_tensor(x.smem.work, cute.make_layout(len(words)))
    read = [word if isinstance(word, int) else kept[i] for i, word in enumerate(words)]
    tile, window, blocks, rest = read[:5], read[5:10], read[10:14], read[14:]
    names = ("kv_start", "kv_slot", "q_start", "scratch_row", "first_head", "num_heads", "stride")
    first_key = tile[1] * variant.config.block_kv
    return work._replace(
        is_partial=first_key + variant.config.block_kv > window[4],
        tile=tiles.Tile(work.tile.is_valid, *tile),
        window=Window(*window),
        blocks=Blocks(*blocks),
        **dict(zip(names, rest, strict=True)),
    )


def loaded_anew(x: BackwardContext) -> BackwardContext:
    """``x`` with opaque extents: nothing is computed from them ahead of the CTA's tiles."""
    order, scalars = x.order, x.scalars
    order = order._replace(
        num_heads=primitives.opaque(order.num_heads), num_blocks=primitives.opaque(order.num_blocks)
    )
    rows = type(scalars.sequences.rows)(*map(primitives.opaque, scalars.sequences.rows))
    scalars = scalars._replace(
        sequences=scalars.sequences._replace(rows=rows),
        group=primitives.opaque(scalars.group),
        splits=primitives.opaque(scalars.splits),
    )
    return x._replace(order=order, scalars=scalars)


@cute.jit
def load_keys(
    variant: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    target: Int32,
    array: cute.Tensor,
    work: Work,
) -> None:
    """Starts the load of the keys or values of a tile, by all threads.

    Rows after the sequence's last are zeros: their P and dS are 0, but 0 * NaN is not 0.
    """
    mine = piece_of_thread(tile, variant.plan.threads)
    step = tile.rows_of_pass(variant.plan.threads)
    rows = array[None, None, work.tile.kv_head, work.tile.batch]
    there = Limits(work.window.kv_len, cute.size(rows, mode=[1]))
    for i in cutlass.range_constexpr(tile.rows // step):
        row = mine.row + i * step
        key = work.tile.block * tile.rows + row
        source = address_of_row(rows, work.kv_start + key) + mine.column_bytes(tile)
        copy_row(tile, mine, target + mine.place(tile, row), source, key, there)


class Loaded(NamedTuple):
    """Rows of Q and dO that are loaded at a time: a block, and which of its loads."""

    at: Step
    load: Int32 | int


class Ahead(NamedTuple):
    """What is to be loaded next, if anything."""

    rows: Loaded
    is_there: Boolean | bool


def stage_of(variant: BackwardVariant, rows: Loaded) -> Int32:
    """The stage that holds rows."""
    config = variant.config
    if config.stages == 1:
        return Int32(0)
    # Two stages: if a block takes an even number of loads, each begins with the same.
    return rows.at.parity if config.loads == 1 else rows.load % 2


def place_of_rows(variant: BackwardVariant, x: BackwardContext, name: str, rows: Loaded) -> Int32:
    """The address in shared memory of rows of "q" or "dout"."""
    tile = getattr(tiles_of(variant), name)
    return getattr(x.smem, name) + stage_of(variant, rows) * tile.size_bytes


@cute.jit
def load_queries(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    name: cutlass.Constexpr[str],
    work: Work,
    rows: Loaded,
) -> None:
    """Starts the load of rows of "q" with lse2, or of "dout" with delta, by all threads."""
    tile, array = getattr(tiles_of(variant), name), getattr(x.arrays, name)
    at, stage = rows.at, stage_of(variant, rows)
    first_row = at.q_block * variant.config.block_q + rows.load * variant.config.loaded_rows
    target = place_of_rows(variant, x, name, rows)
    mine = piece_of_thread(tile, variant.plan.threads)
    step = tile.rows_of_pass(variant.plan.threads)
    array = array[None, None, at.head, work.tile.batch]
    there = Limits(work.window.q_len, cute.size(array, mode=[1]))
    for i in cutlass.range_constexpr(tile.rows // step):
        row = mine.row + i * step
        query = first_row + row
        source = address_of_row(array, work.q_start + query) + mine.column_bytes(tile)
        copy_row(tile, mine, target + mine.place(tile, row), source, query, there)
    statistic, ring = x.scratch.lse2, x.smem.lse2
    if const_expr(name == "dout"):
        statistic, ring = x.scratch.delta, x.smem.delta
    thread = products.thread_index()
    if thread < tile.rows * 4 // PIECE_BYTES:
        # ``prepare`` has written whole blocks, so no row needs a check.
        place = work.scratch_row + first_row + thread * 4
        source = statistic[None, at.head].iterator.toint() + place.to(Int64) * 4
        target = ring[None, stage].iterator.toint() + thread * PIECE_BYTES
        products.copy_piece(target, source, Int32(PIECE_BYTES))
