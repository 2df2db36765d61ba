"""The gradient of a bias by mma.sync: dS, summed over all that the bias is broadcast along.

    all warps    load q k | do v | wait q, k; S | wait do, v; dP | P; sums += P (dP - delta) | ...

One CTA keeps a tile of the gradient in registers and alone writes it: the order of the sums is
always the same, and no array of size [B, N, T, S] is made unless the bias has that size. Products
of one CTA run while another on the same SM waits for its loads. Memory: ``plan_dbias.py``;
conventions: ``jax_fa/spec/problem.py``.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from jax_fa.kernels import edges, fragments, primitives
from jax_fa.kernels.dbias_host import DbiasCall, dbias_entry
from jax_fa.kernels.dbias_rows import (
    add_kept,
    add_products,
    hide,
    keep_bias,
    may_hide,
    row_stats,
    store,
    to_slopes,
)
from jax_fa.kernels.dbias_work import Arrays, RowStats, Tiles, bias_tile, step_at
from jax_fa.kernels.forward_work import Scalars, Variant, Work
from jax_fa.kernels.mma_sync import products
from jax_fa.kernels.mma_sync.bwd_products import multiply_columns
from jax_fa.kernels.mma_sync.fwd_work import load_queries, load_rows
from jax_fa.kernels.mma_sync.panels import ALIGNMENT_BYTES, Panels
from jax_fa.kernels.mma_sync.plan_dbias import dbias_plan
from jax_fa.spec.config_mma_sync import MmaSyncBiasGradient
from jax_fa.spec.key import KernelKey

RESIDENT_CTAS = 2
"""CTAs that an SM works on at a time, if they fit in shared memory."""


class DbiasTiles(NamedTuple):
    """Layouts of the tiles in shared memory."""

    q: Panels
    k: Panels
    v: Panels
    dout: Panels


class DbiasSmem(NamedTuple):
    """Shared memory: addresses of tiles, and tensors."""

    q: Int32
    k: Int32
    v: Int32
    dout: Int32
    words: cute.Tensor  # (4, threads, block_kv / 8): each thread keeps the bias of its own scores
    columns: cute.Tensor  # (block_kv, warps): each warp's sums over its rows
    found: None = None  # nobody scans for segments


class DbiasContext(NamedTuple):
    """The kernel's arguments and shared memory."""

    arrays: Arrays
    scalars: Scalars
    grid: Tiles
    smem: DbiasSmem


class DbiasRows(NamedTuple):
    """16 query rows of a warp: sums of dS, and their bias."""

    sums: cute.Tensor  # accumulator of 16 x block_kv
    bias: cute.Tensor  # words, (block_kv / 2,)
    kept: cute.Tensor  # the same in shared memory, (4, block_kv / 8)
    index: Int32  # which 64 rows
    thread: Int32  # in the four warps


def tiles_of(variant: Variant) -> DbiasTiles:
    """The tiles of a variant."""
    key, config = variant.key, variant.config
    return DbiasTiles(
        q=Panels(config.block_q, key.head_dim),
        k=Panels(config.block_kv, key.head_dim),
        v=Panels(config.block_kv, key.value_dim),
        dout=Panels(config.block_q, key.value_dim),
    )


@cute.kernel
def kernel(variant: cutlass.Constexpr, arrays: Arrays, scalars: Scalars, grid: Tiles) -> None:
    """Device entry: shared memory, and the tiles of the CTA."""
    layout, config, dtype, align = tiles_of(variant), variant.config, variant.dtype, ALIGNMENT_BYTES
    words_layout = cute.make_layout((4, variant.plan.threads, config.block_kv // 8))
    columns_layout = cute.make_layout((config.block_kv, config.warps))

    @cute.struct
    class Storage:
        q: cute.struct.Align[cute.struct.MemRange[dtype, layout.q.elements], align]
        k: cute.struct.Align[cute.struct.MemRange[dtype, layout.k.elements], align]
        v: cute.struct.Align[cute.struct.MemRange[dtype, layout.v.elements], align]
        dout: cute.struct.Align[cute.struct.MemRange[dtype, layout.dout.elements], align]
        words: cute.struct.Align[cute.struct.MemRange[Int32, cute.cosize(words_layout)], align]
        columns: cute.struct.MemRange[Float32, cute.cosize(columns_layout)]

    storage = SmemAllocator().allocate(Storage)
    smem = DbiasSmem(
        q=storage.q.data_ptr().toint(),
        k=storage.k.data_ptr().toint(),
        v=storage.v.data_ptr().toint(),
        dout=storage.dout.data_ptr().toint(),
        words=storage.words.get_tensor(words_layout),
        columns=storage.columns.get_tensor(columns_layout),
    )
    attend(variant, DbiasContext(arrays, scalars, grid, smem))


def make_entry(key: KernelKey, config: MmaSyncBiasGradient) -> Callable:
    """The flat host entry of one variant."""
    return dbias_entry(Variant(key, config, dbias_plan(key, config)), launch)


@cute.jit
def launch(variant: cutlass.Constexpr, call: DbiasCall) -> None:
    """Launches the main kernel."""
    ctas = cutlass.min(call.num_sms * RESIDENT_CTAS, call.grid.number)
    kernel(variant, call.arrays, call.scalars, call.grid).launch(
        grid=(ctas, 1, 1),
        block=(variant.plan.threads, 1, 1),
        stream=call.stream,
        min_blocks_per_mp=1,
    )


def make_rows(variant: Variant, x: DbiasContext) -> DbiasRows:
    """Returns the rows of the calling warp."""
    thread = cute.arch.thread_idx()[0]
    sums = fragments.accumulator(variant.config.block_kv)
    return DbiasRows(
        sums=sums,
        bias=cute.make_rmem_tensor((cute.size(sums),), Int32),
        kept=x.smem.words[None, thread, None],
        index=thread // edges.WARPGROUP,
        thread=thread % edges.WARPGROUP,
    )


@cute.jit
def attend(variant: cutlass.Constexpr, x: DbiasContext) -> None:
    """Computes the tiles of the CTA."""
    c = make_rows(variant, x)
    number = cute.arch.block_idx()[0]
    while number < x.grid.number:
        tile = bias_tile(variant, x, number)
        pairs, rows = tile.pairs, tile.row_blocks
        c.sums.fill(0.0)
        keep_bias(variant, x, c, tile)
        for pair in cutlass.range(pairs.start, pairs.end, unroll=1):
            for row_block in cutlass.range(rows.start, rows.end, unroll=1):
                work, seen = step_at(variant, x, tile, pair, row_block)
                stats = row_stats(variant, x, c, work)
                for block in cutlass.range(seen.start, seen.end, unroll=1):
                    add_block(variant, x, c, work, stats, block)
        store(variant, x, c, bias_tile(variant, x, primitives.opaque(number)))
        number = number + cute.arch.grid_dim()[0]


@cute.jit
def add_block(
    variant: cutlass.Constexpr,
    x: DbiasContext,
    c: DbiasRows,
    work: Work,
    stats: RowStats,
    block: Int32,
) -> None:
    """Adds dS of a block of keys to the sums."""
    layout, smem, arrays = tiles_of(variant), x.smem, x.arrays
    # HAZARD: all warps are done with the previous block.
    cute.arch.sync_threads()
    load_queries(variant, x, layout.q, smem.q, arrays.q, work)
    load_rows(variant, layout.k, smem.k, arrays.k, work, block)
    cute.arch.cp_async_commit_group()
    load_queries(variant, x, layout.dout, smem.dout, arrays.dout, work)
    load_rows(variant, layout.v, smem.v, arrays.v, work, block)
    cute.arch.cp_async_commit_group()
    scores, dp = (fragments.accumulator(variant.config.block_kv) for _ in range(2))
    hides = may_hide(variant, x, work, block)
    cute.arch.cp_async_wait_group(1)
    # HAZARD: all threads' copies of queries and keys have arrived.
    cute.arch.sync_threads()
    multiply_columns(variant, [scores], layout.q, smem.q, layout.k, smem.k)
    cute.arch.cp_async_wait_group(0)
    # HAZARD: all threads' copies of dO and values have arrived.
    cute.arch.sync_threads()
    multiply_columns(variant, [dp], layout.dout, smem.dout, layout.v, smem.v)
    add_kept(variant, x, c, scores)
    for _ in cutlass.range(products.one_if_any(hides), unroll=1):
        hide(variant, x, c, work, scores, block)
    to_slopes(x, stats, scores)
    add_products(c, stats, scores, dp, True)
