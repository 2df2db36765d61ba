"""Bundles that the steps of the backward share, and the loads of its tiles."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

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
    def is_general(self) -> bool:
        """Whether operands that hide keys may be present."""
        return self.key.mask == "general"

    @property
    def may_cap(self) -> bool:
        """Whether there may be a soft cap, whose slope is a factor of dS."""
        return self.key.has_soft_cap or self.key.has_bias

    @property
    def rounds_slope(self) -> bool:
        """Whether P times the slope of a cap is rounded before dS is computed from it."""
        return self.config.splits_results

    @property
    def dq_order(self) -> str:
        """Order of the sums of dQ (``backward_rows``)."""
        return "words"

    @property
    def dq_shape(self) -> DqShape:
        """The part of a query block's dQ that four warps compute."""
        return DqShape(self.config.block_q, self.key.head_dim // self.config.num_consumers)

    @property
    def dk_columns(self) -> int:
        """Columns of dK that a warp computes."""
        return self.key.head_dim

    @property
    def dv_columns(self) -> int:
        """Columns of dV that a warp computes."""
        return self.key.value_dim


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

    Four warps own 64 keys of the tile, 16 each, as in a warpgroup. With ``splits_results``, ``dk``
    and ``dv`` are one accumulator, which holds dV in four of the warps and dK in the other four.
    """

    s: cute.Tensor  # accumulator of 16 keys x queries of a part
    dk: cute.Tensor  # accumulator of 16 x D
    dv: cute.Tensor  # accumulator of 16 x Dv
    first_key: Int32  # of the four warps, counted in the tile
    first_query: int  # of the part, counted in the block
    index: Int32  # which four warps
    thread: Int32  # in the four warps


def make_keys(variant: BackwardVariant) -> Keys:
    """Returns the keys of the calling warp."""
    config, key = variant.config, variant.key
    thread = cute.arch.thread_idx()[0]
    index = Int32(0)
    if config.num_consumers > 1:
        index = cute.arch.make_warp_uniform(thread // edges.WARPGROUP)
    dk = fragments.accumulator(key.head_dim)
    first_key = index * (WARP_ROWS * edges.WARPS_PER_GROUP)
    return Keys(
        s=fragments.accumulator(config.block_q // config.parts),
        dk=dk,
        dv=dk if config.splits_results else fragments.accumulator(key.value_dim),
        first_key=Int32(0) if config.splits_results else first_key,
        first_query=0,
        index=index,
        thread=thread % edges.WARPGROUP,
    )


def _words_of(work: Work) -> list:
    """The words of its work that a sweep uses; an int among them is a compile-time constant."""
    rest = (work.kv_start, work.kv_slot, work.q_start, work.scratch_row)
    heads = (work.first_head, work.num_heads, work.stride)
    return [*work.tile[2:], *work.window, *work.blocks, *rest, *heads]


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
    tile, window, blocks, rest = read[:4], read[4:9], read[9:13], read[13:]
    names = ("kv_start", "kv_slot", "q_start", "scratch_row", "first_head", "num_heads", "stride")
    first_key = tile[0] * variant.config.block_kv
    return work._replace(
        is_partial=first_key + variant.config.block_kv > window[4],
        tile=tiles.Tile(work.tile.is_valid, work.tile.slot, *tile),
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


def anew(c: Keys) -> Keys:
    """``c`` with its thread index computed anew, so that no register of the loop holds it."""
    return c._replace(thread=products.thread_index() % edges.WARPGROUP)


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


@cute.jit
def load_queries(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    name: cutlass.Constexpr[str],
    work: Work,
    at: Step,
    stage: Int32,
    first: Int32 | int = 0,
) -> None:
    """Starts the load of rows of "q" with lse2, or of "dout" with delta, by all threads.

    These are ``loaded_rows`` rows of a block, from its row ``first`` on.
    """
    tile, array = getattr(tiles_of(variant), name), getattr(x.arrays, name)
    target = getattr(x.smem, name) + stage * tile.size_bytes
    mine = piece_of_thread(tile, variant.plan.threads)
    step = tile.rows_of_pass(variant.plan.threads)
    rows = array[None, None, at.head, work.tile.batch]
    there = Limits(work.window.q_len, cute.size(rows, mode=[1]))
    for i in cutlass.range_constexpr(tile.rows // step):
        row = mine.row + i * step
        query = at.q_block * variant.config.block_q + first + row
        source = address_of_row(rows, work.q_start + query) + mine.column_bytes(tile)
        copy_row(tile, mine, target + mine.place(tile, row), source, query, there)
    statistic, ring = x.scratch.lse2, x.smem.lse2
    if const_expr(name == "dout"):
        statistic, ring = x.scratch.delta, x.smem.delta
    thread = cute.arch.thread_idx()[0]
    if thread < tile.rows * 4 // PIECE_BYTES:
        # ``prepare`` has written whole blocks, so no row needs a check.
        place = work.scratch_row + at.q_block * variant.config.block_q + first + thread * 4
        source = statistic[None, at.head].iterator.toint() + place.to(Int64) * 4
        target = ring[None, stage].iterator.toint() + thread * PIECE_BYTES
        products.copy_piece(target, source, Int32(PIECE_BYTES))
