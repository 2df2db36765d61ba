"""Which tile a CTA of a forward has: the order of ``tiles.one_per_cta``, without divisions.

A CTA can load nothing before it knows its tile. Its number was divided four times, each quotient by
the next divisor, at more than a hundred cycles each: 5 % of a warp's time with D = 64 and T = 512
(H200, sm_90 build). Divisors are the same for all CTAs, so the host finds what to multiply by
instead (Granlund and Montgomery, PLDI 1994).
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute

from jax_fa.kernels import tiles
from jax_fa.kernels.forward_work import narrow_keys


class CtaOrder(NamedTuple):
    """The extents of a ``tiles.Order`` with a CTA for each tile; those that divide, as divisors.

    Attributes:
        num_blocks: blocks of a head.
        heads_per_band: heads of each band but the last.
        num_bands: number of bands.
        band: divisor: tiles of each band but the last.
        heads: divisor: heads of each band but the last.
        last_heads: divisor: heads of the last band.
        batch: divisor: heads of a batch.
        group: divisor: heads per key/value head.
    """

    num_blocks: Int32
    heads_per_band: Int32
    num_bands: Int32
    band: Any
    heads: Any
    last_heads: Any
    batch: Any
    group: Any


def cta_order(order: tiles.Order) -> CtaOrder:
    """The order of a grid that has a CTA for each tile of ``order``. The host calls."""
    band = order.heads_per_band * order.num_blocks
    num_bands = cute.ceil_div(order.num_heads, order.heads_per_band)
    last_heads = order.num_heads - (num_bands - 1) * order.heads_per_band
    divisors = (band, order.heads_per_band, last_heads, order.heads_per_batch, order.group)
    return CtaOrder(
        order.num_blocks,
        order.heads_per_band,
        num_bands,
        *map(cute.fast_divmod_create_divisor_v2, divisors),
    )


@cute.jit
def tile_of_cta(order: CtaOrder) -> tiles.Tile:
    """The only tile of this CTA."""
    number, *_ = cute.arch.block_idx()
    band, place = divmod(number, order.band)
    from_last, in_band = divmod(place, order.heads)
    if band == order.num_bands - 1:
        from_last, in_band = divmod(place, order.last_heads)
    batch, head = divmod(band * order.heads_per_band + in_band, order.batch)
    block = order.num_blocks - 1 - from_last
    return tiles.Tile(Boolean(True), Int32(0), block, head, head // order.group, batch)


@cute.jit
def narrow_keys_of_cta(variant: cutlass.Constexpr, x: Any) -> None:
    """``narrow_keys`` of its tile."""
    narrow_keys(variant, x, tile_of_cta(x.order), variant.plan.warps)
