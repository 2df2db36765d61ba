"""Segments: which blocks can share a segment with a tile, and which need no comparison.

The segments of a tile's own elements (queries in the forward, keys in the backward) lie in a range.
Blocks of the other side are visited from the first element in that range to the last. If the tile
has a single segment, and everything between these two elements belongs to it, as with documents
longer than a tile, the blocks in between need no comparison of segments at all.

All threads of the CTA scan, once for its tile. The result is ``WORDS`` integers in shared memory:
first match, last match + 1, number of matches (0 if the tile has several segments), and a 0.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa.kernels import edges, tiles
from jax_fa.kernels.tiles import Stretch
from jax_fa.spec.band import MAX_LENGTH, ceil_div

WORDS = 4
"""Words of shared memory; the words of ``dense_mask.py`` follow them."""
_NONE = 0x7FFFFFFF
"""No segment is larger. Minima start from it, so the range of no elements is empty."""


class Ids(NamedTuple):
    """The range of segments from ``lowest`` to ``highest``."""

    lowest: Int32
    highest: Int32


def reset(found: cute.Tensor) -> None:
    """Resets the result to no matches. One thread calls, before a barrier of the CTA."""
    found[0] = Int32(MAX_LENGTH)
    for i in range(1, WORDS):
        found[i] = Int32(0)


@cute.jit
def lowest_and_highest(
    ids: cute.Pointer, first: Int32, last: Int32, rows: cutlass.Constexpr[int]
) -> Ids:
    """The range of ``ids[first : first + rows]``, up to ``last`` at most. Whole warps call."""
    lowest, highest = Int32(_NONE), Int32(-_NONE - 1)
    if last >= 0:
        for i in cutlass.range_constexpr(ceil_div(rows, edges.WARP)):
            at = cutlass.min(first + cute.arch.lane_idx() + i * edges.WARP, last)
            segment = tiles.element(ids, at)
            lowest, highest = cutlass.min(lowest, segment), cutlass.max(highest, segment)
    return Ids(cute.arch.warp_redux_sync(lowest, "min"), cute.arch.warp_redux_sync(highest, "max"))


@cute.jit
def scan(
    found: cute.Tensor,
    ids: cute.Pointer,
    searched: Stretch,
    wanted: Ids,
    threads: cutlass.Constexpr[int],
) -> None:
    """Looks for segments in the range ``wanted`` among the elements ``searched`` of ``ids``.

    All ``threads`` of the CTA call; a barrier must follow before ``found`` is read.
    """
    lowest, highest = wanted
    first, end, number = Int32(MAX_LENGTH), Int32(0), Int32(0)
    start = searched.start + cute.arch.thread_idx()[0]
    for at in cutlass.range(start, searched.end, threads, unroll=8):
        segment = tiles.element(ids, at)
        if (segment >= lowest) & (segment <= highest):
            first, end, number = cutlass.min(first, at), at + 1, number + 1
    first = cute.arch.warp_redux_sync(first, "min")
    end = cute.arch.warp_redux_sync(end, "max")
    number = cute.arch.warp_redux_sync(number if lowest == highest else Int32(0), "add")
    if cute.arch.lane_idx() == 0:
        cute.arch.atomic_min(found.iterator, first, scope="cta")
        cute.arch.atomic_max(found.iterator + 1, end, scope="cta")
        cute.arch.atomic_add(found.iterator + 2, number, scope="cta")


def visited(found: cute.Tensor, size: int) -> Stretch:
    """The range of blocks of ``size`` elements from the first to the last that holds a match."""
    return Stretch(found[0] // size, ceil_div(found[1], size))


@cute.jit
def alike(found: cute.Tensor, size: cutlass.Constexpr[int]) -> Stretch:
    """Blocks of ``size`` elements that share one segment with the whole tile; may be empty."""
    first, end = ceil_div(found[0], size), found[1] // size
    is_one_run = found[2] == found[1] - found[0]
    return Stretch(first, cutlass.max(end if is_one_run else first, first))
