"""Clusters of CTAs that share products."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa.kernels import tiles
from jax_fa.kernels.tiles import Order, Tile


def rank_in_cluster(ctas: int) -> Int32 | int:
    """The rank of this CTA among the ``ctas`` of its cluster, which are consecutive in the grid."""
    return 0 if ctas == 1 else cute.arch.block_idx()[0] % ctas


def in_order(order: Order, slot: Int32, ctas: int) -> Tile:
    """The tile at position ``slot`` of this CTA's share, where each CTA has tiles of its own.

    The ``ctas`` CTAs of a cluster work on tiles that sweep the same rows: tiles are ordered by
    key/value head, then by head, then by block. Blocks beyond the last row fill up the last cluster
    of a key/value head.
    """
    cta, *_ = cute.arch.block_idx()
    num_ctas, *_ = cute.arch.grid_dim()
    index, of_group = slot * num_ctas + cta, tiles.tiles_of_group(order, ctas)
    place = index % of_group
    head = cutlass.min(place // order.num_blocks, order.group - 1)
    return tiles.tile_of(
        order,
        slot,
        index < tiles.num_tiles(order, ctas),
        index // of_group * order.group + head,
        place - head * order.num_blocks,
    )
