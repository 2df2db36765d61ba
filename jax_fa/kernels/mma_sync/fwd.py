"""Forward by mma.sync: out = softmax(mask(scale q k^T)) v, and its log-sum-exp, in one pass.

    two, two | wait k(n), v(n); barrier; load k(n-1), v(n-1); S max P PV | wait k(n-1) ...
    two, one | wait k(n); barrier; load v(n), k(n-1); S max; wait v(n); barrier; P PV |
    one, one | wait k(n); barrier; load v(n); S; wait v(n); barrier; load k(n-1); max P PV |

The two words count the stages of keys and of values. Key blocks are visited newest first. All warps
do the same, each for its own query rows: all of them load a block together, all of them read it,
and loads run during products. O is scaled to new maxima before P is computed, so that exponentials
of some keys run beside products of others. Besides, products, exponentials and loads of one warp
overlap with those of others, those of a second CTA on the same SM included, since mma.sync leaves
the warp scheduler free (FlashAttention-2, Dao, arXiv:2307.08691). Memory: ``plan.py``; conventions:
``jax_fa/spec/problem.py``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.memory import SmemAllocator

from jax_fa.kernels import (
    dense_mask,
    edges,
    fragment_softmax,
    fragments,
    softmax,
)
from jax_fa.kernels.forward_host import (
    ForwardCall,
    forward_entry,
    forward_order,
    results_of,
)
from jax_fa.kernels.forward_work import (
    Arrays,
    Scalars,
    Variant,
    Work,
    below,
    work_on,
)
from jax_fa.kernels.fragment_rows import mask_by_place, mask_by_words
from jax_fa.kernels.mma_sync import probabilities, products, shell
from jax_fa.kernels.mma_sync.fwd_order import (
    CtaOrder,
    cta_order,
    narrow_keys_of_cta,
    tile_of_cta,
)
from jax_fa.kernels.mma_sync.fwd_results import store
from jax_fa.kernels.mma_sync.fwd_work import (
    ForwardContext,
    ForwardSmem,
    RowTile,
    first_row,
    load_queries,
    load_rows,
    make_row_tiles,
    multiply_keys,
    multiply_values,
    put_down,
    row_step,
    taken_up,
    tiles_of,
)
from jax_fa.kernels.mma_sync.panels import ALIGNMENT_BYTES
from jax_fa.kernels.mma_sync.plan import TILE_WORDS, forward_plan
from jax_fa.kernels.primitives import dense
from jax_fa.kernels.unmasked import next_hides_pairs
from jax_fa.spec import division
from jax_fa.spec.config_mma_sync import MmaSyncForward
from jax_fa.spec.key import KernelKey


@cute.kernel
def kernel(
    variant: cutlass.Constexpr, arrays: Arrays, scalars: Scalars, order: CtaOrder, packing: Any
) -> None:
    """Device entry: shared memory, and the tile of the CTA."""
    layout, config, dtype = tiles_of(variant), variant.config, variant.dtype

    @cute.struct
    class Storage:
        q: cute.struct.Align[cute.struct.MemRange[dtype, layout.q.elements], ALIGNMENT_BYTES]
        k: cute.struct.Align[
            cute.struct.MemRange[dtype, config.stages * layout.k.elements], ALIGNMENT_BYTES
        ]
        v: cute.struct.Align[
            cute.struct.MemRange[dtype, config.value_stages * layout.v.elements], ALIGNMENT_BYTES
        ]
        found: cute.struct.MemRange[Int32, division.FOUND_WORDS]
        tile: cute.struct.MemRange[Int32, TILE_WORDS]

    storage = SmemAllocator().allocate(Storage)
    smem = ForwardSmem(
        q=storage.q.data_ptr().toint(),
        k=storage.k.data_ptr().toint(),
        v=storage.v.data_ptr().toint(),
        found=storage.found.get_tensor(cute.make_layout(division.FOUND_WORDS)),
        tile=storage.tile.get_tensor(cute.make_layout(TILE_WORDS)),
    )
    x = ForwardContext(arrays, scalars, order, smem, packing)
    shell.narrow(variant, x, narrow_keys_of_cta)
    attend(variant, x)


def make_entry(key: KernelKey, config: MmaSyncForward) -> Callable:
    """The flat host entry of one variant."""
    return forward_entry(Variant(key, config, forward_plan(key, config)), launch)


def plain_arrays(variant: Any, call: ForwardCall) -> Arrays:
    """Returns the arrays of a forward without TMA, all as threads see them."""
    widths = call.widths
    out = dense(call.out, call.queries, widths.v)
    return Arrays(
        q=dense(call.q, call.queries, widths.qk),
        k=dense(call.k, call.keys, widths.qk),
        v=dense(call.v, call.keys, widths.v),
        out=out,
        **results_of(variant, call, out),
    )


@cute.jit
def launch(variant: cutlass.Constexpr, call: ForwardCall, packing: Any = None) -> None:
    """Launches the kernel; ``packing`` as in ``ForwardContext``."""
    order, num_ctas = forward_order(variant, call, packing)
    kernel(variant, plain_arrays(variant, call), call.scalars, cta_order(order), packing).launch(
        grid=(num_ctas, 1, 1),
        block=(variant.plan.threads, 1, 1),
        stream=call.stream,
        min_blocks_per_mp=1,
    )


class Place(NamedTuple):
    """How far the steps over the key blocks of a tile have come.

    Attributes:
        block: the next block.
        remaining: the number of blocks left, this one included; it also tells the block's stage.
        hides: whether the block hides keys, where that is known only at run time.
    """

    block: Int32
    remaining: Int32
    hides: Boolean


def stage_of(stages: int, at: Place) -> Int32:
    """Returns which of one or two stages holds the block of ``at``."""
    return at.remaining & (stages - 1)


@cute.jit
def load_block(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    name: cutlass.Constexpr[str],
    work: Work,
    at: Place,
    is_whole: cutlass.Constexpr[bool] = False,
) -> None:
    """Starts the load of a block of keys ("k") or values ("v"); ``is_whole``: ``load_rows``."""
    tile, config = getattr(tiles_of(variant), name), variant.config
    stages = {"k": config.stages, "v": config.value_stages}[name]
    place = getattr(x.smem, name) + stage_of(stages, at) * tile.size_bytes
    load_rows(variant, tile, place, getattr(x.arrays, name), work, at.block, is_whole)


@cute.jit
def attend(variant: cutlass.Constexpr, x: ForwardContext) -> None:
    """Computes the tile of the CTA."""
    tile = tile_of_cta(x.order)
    work = work_on(variant, x, tile)
    put_down(x, tile)
    rows = make_row_tiles(variant)
    newest = work.blocks.end - 1
    at = Place(newest, work.num_blocks, next_hides_pairs(variant, x, work.blocks, newest))
    load_queries(variant, x, tiles_of(variant).q, x.smem.q, x.arrays.q, work)
    load_block(variant, x, "k", work, at)
    if const_expr(variant.config.value_stages > 1):
        load_block(variant, x, "v", work, at)
    cute.arch.cp_async_commit_group()
    for i in cutlass.range_constexpr(len(rows)):
        fragment_softmax.reset(rows[i].state)
        rows[i].out.fill(0.0)
    queries = None
    if const_expr(variant.config.q_in_registers):
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        queries = fetch_q(variant, x)
    if const_expr(variant.config.branches_steps):
        while at.remaining > 0:
            if at.hides:
                at = step(variant, True, x, rows, queries, work, at)
            else:
                at = step(variant, False, x, rows, queries, work, at)
    elif const_expr(variant.is_general):
        while at.remaining > 0:
            at = step(variant, at.hides, x, rows, queries, work, at)
    else:
        unmasked = cutlass.max(work.blocks.full_end, work.blocks.start) - work.blocks.start
        while at.remaining > unmasked:
            at = step(variant, True, x, rows, queries, work, at)
        while at.remaining > 0:
            at = step(variant, False, x, rows, queries, work, at)
    store(variant, x, [anew(one) for one in rows], work_on(variant, x, taken_up(x)))


def fetch_q(variant: Variant, x: ForwardContext) -> list[list[products.Four]]:
    """The queries of a warp as A operands, by depth and tile."""
    columns = range(0, variant.key.head_dim, products.DEPTH)
    place = place_of_queries(variant, x, products.thread_index())
    return [fetch_q_at(variant, place, column) for column in columns]


def place_of_queries(variant: Variant, x: ForwardContext, thread: Int32) -> Int32:
    """The address from which a thread fetches the first queries of its warp."""
    tile = tiles_of(variant).q
    own = products.by_rows(tile, thread % edges.WARP)
    return x.smem.q + first_row(thread) * tile.width + own


def fetch_q_at(variant: Variant, place: Int32, column: int) -> list[products.Four]:
    """16 columns of a warp's queries, from ``column`` on, as A operands, by tile."""
    tile = tiles_of(variant).q
    place = tile.beside(place, column)
    step = row_step(variant) * tile.width
    return [products.fetch(place + i * step) for i in range(variant.config.row_tiles)]


@cute.jit
def step(
    variant: cutlass.Constexpr,
    hides: Boolean,
    x: ForwardContext,
    rows: list[RowTile],
    queries: Any,
    work: Work,
    at: Place,
) -> Place:
    """Computes S, softmax and PV of a block, starts to load the next one, and returns its place.

    ``hides`` says whether the block hides keys; ``queries`` is what ``fetch_q`` returned, or None.
    """
    config, block = variant.config, below(variant, x, at.block)
    # Without lengths and borders, a block that hides nothing is whole, and so are those below it.
    # (D = 64: 1 % faster. D = 128, with two stages: 0.5 % slower. H200, sm_90 build.)
    is_whole = hides is False and not variant.is_general and config.stages == 1
    following = Place(block, at.remaining - 1, next_hides_pairs(variant, x, work.blocks, block))
    cute.arch.cp_async_wait_group(0)
    # HAZARD: all threads' copies of this block have arrived, and all warps are done with the
    # previous block, which the next copies overwrite.
    cute.arch.sync_threads()
    if const_expr(config.value_stages == 1):
        load_block(variant, x, "v", work, at, is_whole)
        cute.arch.cp_async_commit_group()
    if const_expr(config.stages > 1):
        if following.remaining > 0:
            load_block(variant, x, "k", work, following)
            if const_expr(config.value_stages > 1):
                load_block(variant, x, "v", work, following)
        cute.arch.cp_async_commit_group()
    if const_expr(variant.key.has_bias):
        for i in cutlass.range_constexpr(len(rows)):
            variant.bias.load(variant, x, anew(rows[i]), work, at.block, rows[i].bias)
    multiply_qk(variant, x, rows, queries, stage_of(config.stages, at))
    if const_expr(config.stages == 1):
        await_copies(0)
        # All warps have met, so none reads these keys any more.
        if following.remaining > 0:
            load_block(variant, x, "k", work, following, is_whole)
        cute.arch.cp_async_commit_group()
    rises = raise_maxima(variant, x, rows, work, at.block, hides)
    if const_expr(config.stages > config.value_stages):
        await_copies(1)
    accumulate(variant, x, rows, rises, stage_of(config.value_stages, at))
    return following


@cute.jit
def await_copies(later: cutlass.Constexpr[int]) -> None:
    """Waits for all threads' copies but those of the ``later`` last groups."""
    cute.arch.cp_async_wait_group(later)
    # HAZARD: a thread waits for its own copies only, and reads those of all others.
    cute.arch.sync_threads()


@cute.jit
def multiply_qk(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    rows: list[RowTile],
    queries: Any,
    stage: Int32,
) -> None:
    """Computes the scores of all rows of a warp."""
    config, tile = variant.config, tiles_of(variant).k
    thread = products.thread_index()
    keys = x.smem.k + stage * tile.size_bytes + products.by_columns(tile, thread % edges.WARP)
    place = place_of_queries(variant, x, thread)
    for i in cutlass.range_constexpr(len(rows)):
        rows[i].scores.fill(0.0)
    for k in cutlass.range_constexpr(0, variant.key.head_dim, products.DEPTH):
        if const_expr(queries is None):
            a = fetch_q_at(variant, place, k)
        else:
            a = queries[k // products.DEPTH]
        multiply_keys(variant, rows, a, tile, tile.beside(keys, k), config.block_kv)


@cute.jit
def raise_maxima(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    rows: list[RowTile],
    work: Work,
    block: Int32,
    hides: Boolean,
) -> list[list[fragment_softmax.Rise]]:
    """Caps a block's scores, masks them if it ``hides`` keys, and brings maxima and O up to date.

    Returns what remains to be done, by tile and row.
    """
    rises, shrinking = [], Boolean(False)
    for i in cutlass.range_constexpr(len(rows)):
        one = rows[i]
        if const_expr(variant.key.has_soft_cap):
            softmax.cap(one.scores, x.scalars.cap_inner_log2)
        if const_expr(variant.key.has_bias):
            variant.bias.add_rows(one.scores, one.bias, x.scalars.bias, variant.dtype)
        if hides:
            mask_block(variant, x, anew(one), products.hidden_from(work), one.scores, block)
        scores, scale_log2 = fragments.by_row(one.scores), x.scalars.scale_log2
        rises.append(
            [
                fragment_softmax.raise_maximum(
                    fragment_softmax.row_max(scores, row),
                    one.state,
                    row,
                    scale_log2,
                    variant.key.has_bias,
                )
                for row in range(fragments.ROWS)
            ]
        )
        for rise in rises[i]:
            shrinking = shrinking | (rise.shrink != 1.0)
    # Each warp decides for itself. Scaling only when a maximum has grown by much (FlashAttention-4)
    # was 1 to 3 % slower (H200, sm_90 build, D = 64 and 128). This is a loop of one turn or none,
    # since the compiler turns a branch into predicated multiplications, which take their time even
    # when they are not executed (DSL 4.8.1).
    for _ in cutlass.range(products.one_if_any(shrinking), unroll=1):
        for i in cutlass.range_constexpr(len(rows)):
            fragment_softmax.scale_rows(rows[i].out, [rise.shrink for rise in rises[i]])
    return rises


@cute.jit
def mask_block(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    c: RowTile,
    work: Work,
    scores: cute.Tensor,
    block: Int32,
) -> None:
    """Hides the keys of a block that a row does not see."""
    mask_by_place(variant, x, c, work, scores, block)
    if const_expr(variant.is_general):
        if dense_mask.is_present(x.scalars.mask):
            if dense_mask.hides(x.smem.found, block):
                mask_by_words(variant, x, c, work, scores, block)


def anew(rows: RowTile) -> RowTile:
    """``rows`` with its thread index computed anew, so that no register of the loop holds it."""
    return rows._replace(thread=products.thread_index() % edges.WARPGROUP)


@cute.jit
def accumulate(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    rows: list[RowTile],
    rises: list[list[fragment_softmax.Rise]],
    stage: Int32,
) -> None:
    """Exponentiates a block's scores, and adds its values, weighted with the results, to O.

    By 16 keys, without a branch, so that exponentials run beside the products of keys before them.
    """
    config, tile = variant.config, tiles_of(variant).v
    lane = products.thread_index() % edges.WARP
    values = x.smem.v + stage * tile.size_bytes + products.by_rows(tile, lane)
    scale_log2, is_wide = x.scalars.scale_log2, variant.key.has_bias
    sums = [[probabilities.no_sums() for _ in of_tile] for of_tile in rises]
    for first in cutlass.range_constexpr(0, config.block_kv, products.DEPTH):
        elements = probabilities.elements_of(first, products.DEPTH)
        for i in cutlass.range_constexpr(len(rows)):
            scores = fragments.by_row(rows[i].scores)
            for row in cutlass.range_constexpr(fragments.ROWS):
                probabilities.exponentiate(
                    scores, row, elements, rises[i][row], sums[i][row], scale_log2, is_wide
                )
        multiply_values(variant, rows, tile, values, first)
    for i in cutlass.range_constexpr(len(rows)):
        for row in cutlass.range_constexpr(fragments.ROWS):
            probabilities.add_sums(rows[i].state, row, rises[i][row], sums[i][row])
