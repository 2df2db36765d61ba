"""Tiles and the order in which they are worked on.

A tile is ``block_q`` query rows of one head of one sequence. Persistent kernels give CTA ``c`` of
``C`` the positions c, c + C, c + 2 C, ... of an order; every role walks it by itself, so no role
tells another what comes next.

* ``row_order``: the q blocks of a head, then the next head: for work where all tiles cost the same.
* ``longest_first``: heads in groups whose keys and values fit the L2 cache together; in a group,
  the last q block of every head, then the one before it. Under a causal mask costs fall along this
  order, so every second round runs backwards: the CTA with the longest tile of one round has the
  shortest of the next (LPT scheduling; FlashAttention-4 reports 4 to 14 % from it on H200).
"""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute

L2_BUDGET_BYTES = 32 << 20
"""Keys and values that one group of heads may occupy: most of the 50 MB L2 of an H100."""


class Order(NamedTuple):
    """The run-time extents of a work order, the same for all CTAs.

    Attributes:
        num_heads: query heads of all batches.
        num_q_heads: query heads of one batch.
        group: query heads per key/value head.
        num_q_blocks: q blocks of a head.
        heads_per_band: heads that share the L2 cache.
        rounds: rounds that a full band of heads takes.
        num_slots: rounds of all bands.
    """

    num_heads: Int32
    num_q_heads: Int32
    group: Int32
    num_q_blocks: Int32
    heads_per_band: Int32
    rounds: Int32
    num_slots: Int32


def make_order(
    num_heads: Int32,
    num_q_heads: Int32,
    group: Int32,
    num_q_blocks: Int32,
    kv_bytes_per_head: Int32,
    num_ctas: Int32,
) -> Order:
    """The work order of ``num_heads * num_q_blocks`` tiles on ``num_ctas`` CTAs."""
    in_cache = cutlass.max(L2_BUDGET_BYTES // cutlass.max(kv_bytes_per_head, 1), 1)
    heads_per_band = cutlass.min(num_heads, in_cache)
    rounds = cute.ceil_div(heads_per_band * num_q_blocks, num_ctas)
    num_slots = cute.ceil_div(num_heads, heads_per_band) * rounds
    return Order(
        num_heads, num_q_heads, group, num_q_blocks, heads_per_band, rounds, num_slots
    )


class Tile(NamedTuple):
    """One tile: where it is, and its position in its CTA's list."""

    is_valid: Boolean
    slot: Int32
    q_block: Int32
    q_head: Int32
    kv_head: Int32
    batch: Int32


def _tile(order: Order, slot: Int32, is_valid: Boolean, head: Int32, q_block: Int32) -> Tile:
    q_head = head % order.num_q_heads
    return Tile(
        is_valid, slot, q_block, q_head, q_head // order.group, head // order.num_q_heads
    )


def row_order(order: Order, slot: Int32) -> Tile:
    """The tile at position ``slot`` of this CTA's share of all tiles, head by head."""
    cta, *_ = cute.arch.block_idx()
    num_ctas, *_ = cute.arch.grid_dim()
    index = slot * num_ctas + cta
    return _tile(
        order,
        slot,
        index < order.num_heads * order.num_q_blocks,
        index // order.num_q_blocks,
        order.num_q_blocks - 1 - index % order.num_q_blocks,
    )


@cute.jit
def longest_first(order: Order, slot: Int32) -> Tile:
    """The tile at position ``slot`` of this CTA's share, longest tiles first within a band.

    A CTA may have no tile in the last round of a band; it then goes on to the next band.
    """
    tile = _in_band(order, slot)
    if not tile.is_valid:
        tile = _in_band(order, slot + 1)
    return tile


def _in_band(order: Order, slot: Int32) -> Tile:
    cta, *_ = cute.arch.block_idx()
    num_ctas, *_ = cute.arch.grid_dim()
    first_head = slot // order.rounds * order.heads_per_band
    num_heads = cutlass.min(order.heads_per_band, order.num_heads - first_head)
    turn = slot % order.rounds
    place = turn * num_ctas + (cta + turn % 2 * (num_ctas - 1 - 2 * cta))
    return _tile(
        order,
        slot,
        (slot < order.num_slots) & (place < num_heads * order.num_q_blocks),
        first_head + place % cutlass.max(num_heads, 1),
        order.num_q_blocks - 1 - place // cutlass.max(num_heads, 1),
    )
