"""Products of the backward by mma.sync: a warp's keys with queries, and dQ of some queries.

Operands are in shared memory or, if they come from an accumulator, in registers.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa.kernels import edges, fragments
from jax_fa.kernels.mma_sync import products
from jax_fa.kernels.mma_sync.bwd_work import (
    BackwardContext,
    BackwardVariant,
    DqShare,
    Keys,
    tiles_of,
)
from jax_fa.spec.config_mma_sync import WARP_ROWS


def own_row(variant: Any, thread: Int32) -> Int32:
    """The first row of the tile that a thread's warp owns; in a backward, rows are keys."""
    return variant.config.first_row(thread // edges.WARP)


@cute.jit
def multiply_columns(
    variant: cutlass.Constexpr,
    accs: list[cute.Tensor],
    keys: cutlass.Constexpr,
    own: Int32,
    queries: cutlass.Constexpr,
    rows: Int32,
):
    """Sets ``accs`` to the warp's keys times queries transposed; keys and queries may be swapped.

    Args:
        variant: the variant.
        accs: 16 keys by queries, for each 16 keys of the warp.
        keys: the tile of k or v.
        own: the address of that tile.
        queries: the tile of q or dout.
        rows: the address of the first row of ``queries``.
    """
    thread = products.thread_index()
    lane = thread % edges.WARP
    own = own + own_row(variant, thread) * keys.width + products.by_rows(keys, lane)
    rows = rows + products.by_columns(queries, lane)
    for i in cutlass.range_constexpr(len(accs)):
        accs[i].fill(0.0)
    num_queries = cute.size(accs[0]) // 4 * products.COLUMNS
    for k in cutlass.range_constexpr(0, keys.columns, products.DEPTH):
        a = fetch_rows(keys, keys.beside(own, k), len(accs))
        beside = queries.beside(rows, k)
        for n in cutlass.range_constexpr(0, num_queries, 2 * products.COLUMNS):
            b = products.fetch(beside + n * queries.width)
            for i in cutlass.range_constexpr(len(accs)):
                products.multiply(accs[i], n // products.COLUMNS, a[i], b, variant.dtype)


def fetch_rows(tile: Any, place: Int32, number: int) -> list[products.Four]:
    """Fetches ``number`` times 16 rows of a tile, from ``place`` on, as A operands."""
    return [products.fetch(place + i * (WARP_ROWS * tile.width)) for i in range(number)]


def operands_of(rounded: cute.Tensor) -> list[products.Four]:
    """The fragment ``rounded``, keys by queries, as A operands."""
    words = cute.recast_tensor(rounded, Int32)
    steps = range(0, cute.size(words), 4)
    return [products.Four(*(words[k + i] for i in range(4))) for k in steps]


@cute.jit
def multiply_rows(
    variant: cutlass.Constexpr,
    accs: list[cute.Tensor],
    rounded: list[cute.Tensor],
    tile: cutlass.Constexpr,
    rows: Int32,
    first: Int32 | int = 0,
):
    """Adds P or dS times some columns of Q or dO to ``accs``.

    Args:
        variant: the variant.
        accs: 16 keys by columns, for each 16 keys of the warp.
        rounded: P or dS of the same keys: fragments, 16 keys by queries.
        tile: the tile of q or dout.
        rows: the address of the first of the queries.
        first: the first of the columns.
    """
    operands = [operands_of(one) for one in rounded]
    for k in cutlass.range_constexpr(len(operands[0])):
        a = [of_keys[k] for of_keys in operands]
        multiply_depth(variant, accs, a, tile, rows + k * (products.DEPTH * tile.width), first)


@cute.jit
def multiply_depth(
    variant: cutlass.Constexpr,
    accs: list[cute.Tensor],
    a: list[products.Four],
    tile: cutlass.Constexpr,
    rows: Int32,
    first: Int32 | int,
):
    """``multiply_rows`` for 16 queries, whose P or dS are the A operands ``a``."""
    rows = rows + products.by_rows(tile, products.thread_index() % edges.WARP)
    number = cute.size(accs[0]) // 4 * products.COLUMNS
    for n in cutlass.range_constexpr(0, number, 2 * products.COLUMNS):
        b = products.fetch(tile.beside(rows, first + n), is_transposed=True)
        for i in cutlass.range_constexpr(len(accs)):
            products.multiply(accs[i], n // products.COLUMNS, a[i], b, variant.dtype)


def fetch_other(variant: BackwardVariant, left: Int32, c: Keys) -> list[list[products.Four]]:
    """Fetches P or dS of the warp's keys and of the queries of the other warp that owns them.

    ``left`` is the address of P or dS. Returns A operands, by 16 queries and by 16 keys.
    """
    tile = tiles_of(variant).ds
    left = left + c.first_key * tile.width + products.by_rows(tile, c.thread)
    left = tile.beside(left, c.other_query(variant))
    steps = range(0, variant.config.block_q // 2, products.DEPTH)
    return [fetch_rows(tile, tile.beside(left, k), variant.config.row_tiles) for k in steps]


def multiply_dq(
    variant: BackwardVariant, x: BackwardContext, share: DqShare, columns: int
) -> list[cute.Tensor]:
    """Computes dQ of as many queries as a warp owns keys, 16 at a time.

    Only ``columns`` columns, from where ``share`` begins.
    """
    layout, thread = tiles_of(variant), products.thread_index()
    lane = thread % edges.WARP
    dq = [fragments.accumulator(columns) for _ in range(variant.config.row_tiles)]
    for one in dq:
        one.fill(0.0)
    ds = x.smem.ds + products.by_columns(layout.ds, lane)
    own = [layout.ds.beside(ds, share.row + i * WARP_ROWS) for i in range(len(dq))]
    keys = x.smem.k + products.by_rows(layout.k, lane)
    steps = range(0, columns, 2 * products.COLUMNS)
    beside = [layout.k.beside(keys, share.column + n) for n in steps]
    for k in range(0, variant.config.block_kv, products.DEPTH):
        a = [products.fetch(place + k * layout.ds.width, is_transposed=True) for place in own]
        for n, place in enumerate(beside):
            b = products.fetch(place + k * layout.k.width, is_transposed=True)
            for i, one in enumerate(dq):
                products.multiply(one, 2 * n, a[i], b, variant.dtype)
    return dq
