"""The order of a Hopper forward's blocks under segments or a dense mask: the longest first.

Under a causal mask, neighbouring blocks of rows are as long as each other, and a CTA's share of
tiles by position is as long as that of the next. Documents may have any length, and a mask array
may hide anything. So CTAs first estimate what each block of rows has to do, and sort the blocks by
that: those of every batch by its segments, or by a mask that serves all heads. Their order changes
no result. H200, us, 16384 tokens, 16 heads, D = 128, causal: eight even documents 306 by position,
263 sorted; 4 x 4096 tokens of six documents each 329 and 264.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32, Int64

from jax_fa.kernels import dense_mask, edges, primitives, tiles
from jax_fa.kernels.forward_work import Variant, seen_from, span_of
from jax_fa.kernels.sm90.fwd_work import ForwardContext
from jax_fa.kernels.sm90.plan_sorted import MAX_BLOCKS
from jax_fa.spec.band import ceil_div
from jax_fa.spec.division import MAP_CELL


@cute.jit
def num_orders(x: ForwardContext) -> Int32:
    """How many orders there are: one for each batch, or one if a single mask serves them all.

    Zero, if blocks stay in their places.
    """
    mask, order = x.scalars.mask, x.order
    has_segments, has_mask = tiles.is_present(x.scalars.q_segments), dense_mask.is_present(mask)
    is_told = has_segments | (has_mask & (mask.heads == 1) & (mask.rows > 1))
    num_batches = order.num_heads // order.heads_per_batch
    number = num_batches if has_segments else mask.batch
    # Opaque, or values derived from it would be kept in registers from tile to tile.
    is_fit = number * primitives.opaque(order.num_blocks) <= MAX_BLOCKS
    has_several = order.num_bands * order.rounds > 1
    return number * Int32(is_told & is_fit & has_several)


@cute.jit
def sort(variant: cutlass.Constexpr, x: ForwardContext) -> None:
    """Writes ``smem.sorted``: for each order, numbers of blocks, that with the least to do first.

    Costs lie where values will, which nobody loads before roles start. All threads call.
    """
    thread, num_blocks = cute.arch.thread_idx()[0], x.order.num_blocks
    number = num_orders(x) * num_blocks
    if number > 0:
        costs = cute.make_tensor(
            cute.recast_ptr(x.smem.v.iterator, dtype=Int32), cute.make_layout(MAX_BLOCKS)
        )
        warps = len(variant.plan.warps)
        # Where nobody sorts, code to skip costs, too: 8 x 1024 tokens 65 us, unrolled by two 66.
        for at in cutlass.range(thread // edges.WARP, number, warps, unroll=1):
            batch, block = at // num_blocks, at % num_blocks
            cost = cute.arch.warp_redux_sync(_share_of_cost(variant, x, batch, block), "add")
            if cute.arch.lane_idx() == 0:
                costs[at] = _distinct(cost, block)
        cute.arch.sync_threads()
        if thread < number:
            first = thread // num_blocks * num_blocks
            place = _place(costs, first, thread, num_blocks)
            x.smem.sorted[first + place] = Int16(thread - first)
        # HAZARD: TMA writes values where costs were.
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()


@cute.jit
def _share_of_cost(
    variant: cutlass.Constexpr, x: ForwardContext, batch: Int32, block: Int32
) -> Int32:
    """This lane's share of what a block of rows has to do."""
    share = Int32(0)
    if tiles.is_present(x.scalars.q_segments):
        share = _seen_blocks(variant, x, batch, block)
    else:
        share = _shown_cells(variant, x, batch, block)
    return share


@cute.jit
def _seen_blocks(
    variant: cutlass.Constexpr, x: ForwardContext, batch: Int32, block: Int32
) -> Int32:
    """This lane's share of the blocks of keys in the segments of a block of rows.

    Its first and its last row, and the first key of each block, stand for all.
    """
    scalars, config, nowhere, share = x.scalars, variant.config, Int32(0), Int32(0)
    tile = tiles.Tile(Boolean(True), nowhere, block, nowhere, nowhere, batch)
    span = span_of(variant, x, tile)
    rows, first = scalars.sequences.rows, span.own_start + span.first_row
    last = cutlass.min(first + config.block_q, rows.own) - 1
    own = scalars.q_segments + batch * rows.own
    ends = [tiles.element(own, cutlass.min(at, last)) for at in (first, last)]
    blocks = seen_from(variant, x, span).blocks
    for at in cutlass.range(blocks.start + cute.arch.lane_idx(), blocks.end, edges.WARP, unroll=4):
        key = cutlass.min(span.swept_start + at * config.block_kv, rows.swept - 1)
        segment = tiles.element(scalars.kv_segments + batch * rows.swept, key)
        is_seen = (segment >= cutlass.min(*ends)) & (segment <= cutlass.max(*ends))
        share = share + Int32(is_seen)
    return share


def _shown_cells(variant: Variant, x: ForwardContext, batch: Int32, block: Int32) -> Int32:
    """This lane's share of the cells of keys that the mask shows to some rows of a block.

    Of long rows, 32 words stand for all.
    """
    mask, rows = x.scalars.mask, variant.config.block_q
    width, shown = ceil_div(mask.width, MAP_CELL), Int32(0)
    word = cutlass.min(cute.arch.lane_idx() * ceil_div(width, edges.WARP), width)
    plane = dense_mask.of_head(mask, batch, Int32(0)) * 2 * mask.stripes
    first = block * rows // MAP_CELL
    for i in range(ceil_div(rows, MAP_CELL)):
        stripe = plane + cutlass.min(first + i, mask.stripes - 1)
        place = stripe.to(Int64) * width + cutlass.min(word, width - 1)
        shown = shown | tiles.element(mask.cells + place, 0)
    return Int32(cute.arch.popc(shown)) * Int32(word < width)


def _distinct(cost: Int32, block: Int32) -> Int32:
    """A number in the order of costs, no two of which are equal."""
    return cost * MAX_BLOCKS + block


@cute.jit
def _place(costs: cute.Tensor, first: Int32, own: Int32, num_blocks: Int32) -> Int32:
    """How many of the blocks from ``first`` on cost less than block ``own``."""
    place, cost = Int32(0), costs[own]
    for other in cutlass.range(num_blocks, unroll=4):
        place = place + Int32(costs[first + other] < cost)
    return place


@cute.jit
def in_order(x: ForwardContext, tile: tiles.Tile) -> tiles.Tile:
    """The tile in the place of ``tile``, a tile of find's walk."""
    block, number = tile.block, num_orders(x)
    if (number > 0) & tile.is_valid:
        first = cutlass.min(tile.batch, number - 1) * x.order.num_blocks
        block = Int32(x.smem.sorted[first + block])
    return tile._replace(block=cute.arch.make_warp_uniform(block))
