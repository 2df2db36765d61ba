"""Products of the backward by mma.sync: a warp's 16 keys with queries, and dQ of 16 queries.

Operands are in shared memory or, if they come from an accumulator, in registers.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa.kernels import edges, fragments
from jax_fa.kernels.mma_sync import products
from jax_fa.kernels.mma_sync.bwd_work import BackwardContext, BackwardVariant, tiles_of
from jax_fa.spec.config_mma_sync import WARP_ROWS


def own_row(variant: Any, thread: Int32) -> Int32:
    """The first row of the tile that a thread's warp owns; in a backward, rows are keys."""
    row, config = thread // edges.WARP * WARP_ROWS, variant.config
    return row % config.own_rows if config.own_rows < WARP_ROWS * config.warps else row


@cute.jit
def multiply_columns(
    variant: cutlass.Constexpr,
    acc: cute.Tensor,
    keys: cutlass.Constexpr,
    own: Int32,
    queries: cutlass.Constexpr,
    rows: Int32,
):
    """Sets ``acc`` to the warp's keys times queries transposed; keys and queries may be swapped.

    Args:
        variant: the variant.
        acc: 16 keys by queries.
        keys: the tile of k or v.
        own: the address of that tile.
        queries: the tile of q or dout.
        rows: the address of the first row of ``queries``.
    """
    thread = products.thread_index()
    lane = thread % edges.WARP
    own = own + own_row(variant, thread) * keys.width + products.by_rows(keys, lane)
    rows = rows + products.by_columns(queries, lane)
    acc.fill(0.0)
    num_queries = cute.size(acc) // 4 * products.COLUMNS
    for k in cutlass.range_constexpr(0, keys.columns, products.DEPTH):
        a = products.fetch(keys.beside(own, k))
        beside = queries.beside(rows, k)
        for n in cutlass.range_constexpr(0, num_queries, 2 * products.COLUMNS):
            b = products.fetch(beside + n * queries.width)
            products.multiply(acc, n // products.COLUMNS, a, b, variant.dtype)


def operands_of(rounded: cute.Tensor) -> list[products.Four]:
    """The fragment ``rounded``, keys by queries, as A operands."""
    words = cute.recast_tensor(rounded, Int32)
    steps = range(0, cute.size(words), 4)
    return [products.Four(*(words[k + i] for i in range(4))) for k in steps]


def fetch_ds(variant: BackwardVariant, x: BackwardContext, first_query: int) -> list[products.Four]:
    """Fetches dS of the warp's keys and of a part of a block of queries, as A operands."""
    tile, thread = tiles_of(variant).ds, products.thread_index()
    place = (
        x.smem.ds
        + own_row(variant, thread) * tile.width
        + products.by_rows(tile, thread % edges.WARP)
    )
    queries = variant.config.block_q // variant.config.parts
    steps = range(first_query, first_query + queries, products.DEPTH)
    return [products.fetch(tile.beside(place, k)) for k in steps]


@cute.jit
def multiply_rows(
    variant: cutlass.Constexpr,
    acc: cute.Tensor,
    operands: list[products.Four],
    tile: cutlass.Constexpr,
    rows: Int32,
):
    """Adds ``operands``, 16 keys by queries, times the rows of ``tile`` at ``rows`` to ``acc``."""
    rows = rows + products.by_rows(tile, products.thread_index() % edges.WARP)
    for k in cutlass.range_constexpr(len(operands)):
        a = operands[k]
        for n in cutlass.range_constexpr(0, tile.columns, 2 * products.COLUMNS):
            place = tile.beside(rows, n) + k * (products.DEPTH * tile.width)
            b = products.fetch(place, is_transposed=True)
            products.multiply(acc, n // products.COLUMNS, a, b, variant.dtype)


def multiply_dq(
    variant: BackwardVariant, x: BackwardContext, first: Int32, columns: int
) -> cute.Tensor:
    """Computes dQ of the warp's 16 queries, ``columns`` columns from ``first`` on.

    With ``splits_results``, all warps have the same queries.
    """
    layout, thread = tiles_of(variant), products.thread_index()
    lane = thread % edges.WARP
    dq = fragments.accumulator(columns)
    dq.fill(0.0)
    ds = x.smem.ds + products.by_columns(layout.ds, lane)
    if not variant.config.splits_results:
        ds = layout.ds.beside(ds, own_row(variant, thread) % variant.config.block_q)
    keys = x.smem.k + products.by_rows(layout.k, lane)
    steps = range(0, columns, 2 * products.COLUMNS)
    beside = [layout.k.beside(keys, first + n) for n in steps]
    for k in range(0, variant.config.block_kv, products.DEPTH):
        a = products.fetch(ds + k * layout.ds.width, is_transposed=True)
        for n, place in enumerate(beside):
            b = products.fetch(place + k * layout.k.width, is_transposed=True)
            products.multiply(dq, 2 * n, a, b, variant.dtype)
    return dq
