"""The host side of Note [Packed heads] in ``tiles.py``: how a forward's heads share tiles."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa.kernels import primitives
from jax_fa.kernels.forward_host import ForwardCall, blocks_of_batch
from jax_fa.spec import division


@cute.jit
def forward_packing(variant: cutlass.Constexpr, call: ForwardCall) -> division.Packing:
    """Returns how query heads share tiles, if that pays."""
    block_q, group = variant.config.block_q, call.queries.heads // call.keys.heads
    packed = division.packing(block_q, group)
    plain = division.Packing(1, block_q, group, group)
    before, after = (
        cute.ceil_div(p.units * blocks_of_batch(variant, call, p.positions), variant.plan.ctas)
        for p in (plain, packed)
    )
    pays = division.packing_pays(after, before)
    return division.Packing(
        packed.heads if pays else Int32(plain.heads),
        packed.positions if pays else Int32(plain.positions),
        packed.units if pays else plain.units,
        group,
    )


def forward_granules(
    variant: Any, call: ForwardCall, layout: cute.ComposedLayout
) -> primitives.TmaArray:
    """The query array for TMA to copy granules of a packed tile to shared memory (``layout``)."""
    by_granules = cute.select(primitives.by_granules(layout.outer), mode=[0, 1])
    granule = cute.make_composed_layout(layout.inner, 0, by_granules)
    queries = primitives.dense(call.q, call.queries, call.widths.qk)
    shape = (division.GRANULE, variant.key.head_dim)
    return primitives.tma_load(queries, granule, shape, variant.plan.ctas)
