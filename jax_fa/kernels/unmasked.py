"""Which blocks of a tile need no mask if more than the band hides keys.

The band determines which blocks are "full" (``band.Blocks``). Of these, segments leave only those
that share the tile's only segment. A dense mask hides pairs in any block; its list tells in which.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from jax_fa.kernels import dense_mask, segments, tiles
from jax_fa.spec.band import Blocks


@cute.jit
def unmasked_blocks(
    variant: cutlass.Constexpr,
    scalars: Any,
    blocks: Blocks,
    found: cute.Tensor,
    size: cutlass.Constexpr[int],
) -> Blocks:
    """``blocks`` with the full range that band and segments leave, within ``start`` and ``end``.

    Args:
        variant: the variant, of a forward or a backward.
        scalars: the run-time values of the variant, with segments.
        blocks: the blocks of the band; ``start`` and ``end`` may have been narrowed since.
        found: what the scan of ``segments.py`` found.
        size: elements of a block.
    """
    start, full_start, full_end, end = blocks
    if const_expr(variant.is_general):
        if tiles.is_present(scalars.q_segments):
            alike = segments.alike(found, size)
            full_start = cutlass.max(full_start, alike.start)
            full_end = cutlass.min(full_end, alike.end)
    full_start = cutlass.min(cutlass.max(full_start, start), end)
    full_end = cutlass.min(cutlass.max(full_end, full_start), end)
    return Blocks(start, full_start, full_end, end)


@cute.jit
def hides_pairs(
    variant: cutlass.Constexpr, scalars: Any, blocks: Blocks, found: cute.Tensor, block: Int32
) -> Boolean:
    """Whether a block has to be masked; ``blocks`` are those of ``unmasked_blocks``."""
    hides = (block >= blocks.full_end) | (block < blocks.full_start)
    if const_expr(variant.is_general):
        if dense_mask.is_present(scalars.mask):
            hides = hides | dense_mask.hides(found, block)
    return hides


@cute.jit
def next_hides_pairs(variant: cutlass.Constexpr, x: Any, blocks: Blocks, block: Int32) -> Boolean:
    """``hides_pairs`` of the next step's block; after the last step, of some other block."""
    return hides_pairs(variant, x.scalars, blocks, x.smem.found, cutlass.max(block, 0))
