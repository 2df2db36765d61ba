"""The order of a Hopper forward's blocks under a dense mask: that with the most to do first.

Under a causal mask, neighbouring blocks of rows are as long as each other, and a CTA's share of
tiles by position is as long as that of the next. A mask array may hide anything. So if one serves
all heads, CTAs first count what it shows to each block of rows, and sort the blocks by that. Their
order changes no result. H200, us, 16384 tokens, 16 heads, D = 128: a causal mask in two chunks 865
-> 804, random blocks 1276 -> 981; causal, which gains nothing, 1531 -> 1537.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32

from jax_fa.kernels import dense_mask, edges, primitives, tiles
from jax_fa.kernels.forward_work import Variant
from jax_fa.kernels.sm90.fwd_work import ForwardContext
from jax_fa.kernels.sm90.plan_sorted import MAX_BLOCKS
from jax_fa.spec.band import ceil_div
from jax_fa.spec.division import MAP_CELL


@cute.jit
def are_sorted(x: ForwardContext) -> Boolean:
    """Whether blocks are sorted: if CTAs have several tiles, and all heads one mask of rows.

    HAZARD: with segments, a CTA has scanned those of its only tile by position.
    """
    mask, order, is_sorted = x.scalars.mask, x.order, Boolean(False)
    if dense_mask.is_present(mask):
        is_one = (mask.batch * mask.heads == 1) & (mask.rows > 1)
        is_fit = primitives.opaque(order.num_blocks) <= MAX_BLOCKS
        has_several = (order.num_bands * order.rounds > 1) & ~dense_mask.narrows(x.scalars, True)
        is_sorted = is_one & is_fit & has_several
    return is_sorted


@cute.jit
def sort(variant: cutlass.Constexpr, x: ForwardContext) -> None:
    """Writes ``smem.sorted``: numbers of blocks, that with the least to do first.

    Costs lie where values will, which nobody loads before roles start. All threads call.
    """
    if are_sorted(x):
        thread, num_blocks = cute.arch.thread_idx()[0], x.order.num_blocks
        costs = cute.make_tensor(
            cute.recast_ptr(x.smem.v.iterator, dtype=Int32), cute.make_layout(MAX_BLOCKS)
        )
        warps = variant.plan.threads // edges.WARP
        # Where nobody sorts, code to skip costs, too: 8 x 1024 tokens 65 us, unrolled by two 66.
        for block in cutlass.range(thread // edges.WARP, num_blocks, warps, unroll=1):
            cost = cute.arch.warp_redux_sync(_shown_cells(variant, x, block), "add")
            if cute.arch.lane_idx() == 0:
                costs[block] = _distinct(cost, block)
        cute.arch.sync_threads()
        if thread < num_blocks:
            x.smem.sorted[_place(costs, thread, num_blocks)] = Int16(thread)
        # HAZARD: TMA writes values where costs were.
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()


def _shown_cells(variant: Variant, x: ForwardContext, block: Int32) -> Int32:
    """This lane's share of the cells of keys that the mask shows to some rows of a block.

    Of long rows, 32 words stand for all.
    """
    mask, rows = x.scalars.mask, variant.config.block_q
    width, shown = ceil_div(mask.width, MAP_CELL), Int32(0)
    word = cutlass.min(cute.arch.lane_idx() * ceil_div(width, edges.WARP), width)
    first = block * rows // MAP_CELL
    for i in range(ceil_div(rows, MAP_CELL)):
        stripe = cutlass.min(first + i, mask.stripes - 1)
        shown = shown | tiles.element(mask.cells, stripe * width + cutlass.min(word, width - 1))
    return Int32(cute.arch.popc(shown)) * Int32(word < width)


def _distinct(cost: Int32, block: Int32) -> Int32:
    """A number in the order of costs, no two of which are equal."""
    return cost * MAX_BLOCKS + block


@cute.jit
def _place(costs: cute.Tensor, block: Int32, num_blocks: Int32) -> Int32:
    """How many blocks cost less than ``block``."""
    place, own = Int32(0), costs[block]
    for other in cutlass.range(num_blocks, unroll=4):
        place = place + Int32(costs[other] < own)
    return place


@cute.jit
def in_order(x: ForwardContext, tile: tiles.Tile) -> tiles.Tile:
    """The tile in the place of ``tile``, a tile of find's walk."""
    block = tile.block
    if are_sorted(x):
        if tile.is_valid:
            block = Int32(x.smem.sorted[block])
    return tile._replace(block=cute.arch.make_warp_uniform(block))
