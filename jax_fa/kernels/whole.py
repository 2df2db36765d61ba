"""Which blocks of a tile need no mask, where more than the band hides keys.

The band says which blocks are "full" (``band.Blocks``); segments leave of these the ones that share
the tile's only segment, and a mask function none: nobody knows what it hides.
"""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from jax_fa.band import Blocks
from jax_fa.kernels import segments, tiles


@cute.jit
def whole_blocks(
    variant: cutlass.Constexpr,
    blocks: Blocks,
    ids: cute.Pointer,
    found: cute.Tensor,
    size: cutlass.Constexpr[int],
) -> Blocks:
    """``blocks`` with "full" as all that hides keys leaves it, between ``start`` and ``end``.

    Args:
        variant: the variant, of a forward or a backward.
        blocks: those of the band; ``start`` and ``end`` may have been narrowed since.
        ids: segments of either side, null where there are none.
        found: what ``segments.scan`` found.
        size: elements of a block.
    """
    start, full_start, full_end, end = blocks
    if const_expr(variant.is_general):
        if tiles.is_present(ids):
            first_alike, end_alike = segments.alike(found, size)
            full_start = cutlass.max(full_start, first_alike)
            full_end = cutlass.min(full_end, end_alike)
    if const_expr(variant.key.mask_mod is not None):
        full_start, full_end = start, start
    full_start = cutlass.min(cutlass.max(full_start, start), end)
    full_end = cutlass.min(cutlass.max(full_end, full_start), end)
    return Blocks(start, full_start, full_end, end)
