"""Segments: which blocks can share a segment with a tile, and which pairs do.

The segments of a tile's own elements (queries in the forward, keys in the backward) lie in a range.
Blocks of the other side are visited from the first element in that range to the last. Documents
longer than a tile leave it one segment or two, each a run of neighbours on the other side. The run
of its own is then all that an element sees, and segments need not be compared pair by pair; in a
tile of one segment, blocks within the run need no mask. All or some warps of a CTA scan for a tile.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from jax_fa.kernels import edges, tiles
from jax_fa.kernels.tiles import Stretch
from jax_fa.spec.band import MAX_LENGTH, ceil_div

WORDS = 8
"""Words of shared memory; the words of ``dense_mask.py`` follow them."""
LOWER, UPPER, NUMBER, KINDS, LOWEST = 0, 2, 4, 5, 6
"""Places of these words: the first match of the lowest segment, and the last + 1; the same of all
others; how many elements are in the lowest or the highest, 0 if the tile has MANY segments; how
many it has; the lowest."""
MANY = 3
"""Stands for any number of segments above two."""
AT_ONCE = 16
"""Segments that a thread waits for together."""
_NONE = 0x7FFFFFFF
"""No segment is larger. Minima start from it, so the range of no elements is empty."""


class Ids(NamedTuple):
    """The range of a tile's segments, from ``lowest`` to ``highest``, and how many: up to MANY."""

    lowest: Int32
    highest: Int32
    kinds: Int32


def reset(found: cute.Tensor) -> None:
    """Resets the result to no matches. One thread calls, before a barrier of those that scan."""
    for i in range(WORDS):
        found[i] = Int32(MAX_LENGTH if i in (LOWER, UPPER) else 0)


@cute.jit
def ids_of(ids: cute.Pointer, first: Int32, last: Int32, rows: cutlass.Constexpr[int]) -> Ids:
    """Those of ``ids[first : first + rows]``, up to ``last`` at most. Whole warps call."""
    lowest, highest, is_between = Int32(_NONE), Int32(-_NONE - 1), Boolean(False)
    own = cute.make_rmem_tensor((ceil_div(rows, edges.WARP),), Int32)
    own.fill(0)
    if last >= 0:
        for i in cutlass.range_constexpr(cute.size(own)):
            at = cutlass.min(first + cute.arch.lane_idx() + i * edges.WARP, last)
            own[i] = tiles.element(ids, at)
            lowest, highest = cutlass.min(lowest, own[i]), cutlass.max(highest, own[i])
    lowest = cute.arch.warp_redux_sync(lowest, "min")
    highest = cute.arch.warp_redux_sync(highest, "max")
    for i in cutlass.range_constexpr(cute.size(own)):
        is_between = is_between | ((own[i] > lowest) & (own[i] < highest))
    kinds = 1 + Int32(lowest != highest) + Int32(cute.arch.vote_any_sync(is_between))
    return Ids(lowest, highest, kinds)


class _Matches(NamedTuple):
    """What a thread has found: the first words of the result."""

    lower: Int32
    lower_end: Int32
    upper: Int32
    upper_end: Int32
    number: Int32


def _joined(run: Stretch, at: Int32, is_found: Boolean) -> Stretch:
    """``run``, and element ``at`` behind it if that ``is_found``."""
    first = cutlass.min(run.start, Int32(cutlass.select_(is_found, at, Int32(MAX_LENGTH))))
    return Stretch(first, Int32(cutlass.select_(is_found, at + 1, run.end)))


def _and(matches: _Matches, at: Int32, segment: Int32, wanted: Ids) -> _Matches:
    """``matches``, and element ``at``, which lies behind them, if its segment is in the range."""
    is_lowest = segment == wanted.lowest
    is_other = (segment > wanted.lowest) & (segment <= wanted.highest)
    lower = _joined(Stretch(matches.lower, matches.lower_end), at, is_lowest)
    upper = _joined(Stretch(matches.upper, matches.upper_end), at, is_other)
    is_counted = is_lowest | (segment == wanted.highest)
    return _Matches(*lower, *upper, matches.number + Int32(is_counted))


@cute.jit
def scan(
    found: cute.Tensor,
    ids: cute.Pointer,
    searched: Stretch,
    wanted: Ids,
    warps: cutlass.Constexpr[range],
) -> None:
    """Looks for segments in the range ``wanted`` among the elements ``searched`` of ``ids``.

    These ``warps`` of the CTA call; a barrier of theirs must follow before ``found`` is read.
    """
    nowhere, end, step = Int32(MAX_LENGTH), searched.end, len(warps) * edges.WARP
    matches = _Matches(nowhere, Int32(0), nowhere, Int32(0), Int32(0))
    thread = cute.arch.thread_idx()[0] - warps.start * edges.WARP
    own = cute.make_rmem_tensor((AT_ONCE,), Int32)
    for first in cutlass.range(searched.start + thread, end, step * AT_ONCE, unroll=1):
        for i in cutlass.range_constexpr(AT_ONCE):
            own[i] = tiles.element(ids, cutlass.min(first + i * step, end - 1))
        for i in cutlass.range_constexpr(AT_ONCE):
            # A branch: most segments lie outside the range.
            if (own[i] >= wanted.lowest) & (own[i] <= wanted.highest) & (first + i * step < end):
                matches = _and(matches, first + i * step, own[i], wanted)
    matches = matches._replace(number=matches.number if wanted.kinds < MANY else 0)
    ways = ("min", "max", "min", "max", "add")
    results = [cute.arch.warp_redux_sync(x, way) for x, way in zip(matches, ways, strict=True)]
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(len(ways)):
            merge = getattr(cute.arch, f"atomic_{ways[i]}")
            merge(found.iterator + i, results[i], scope="cta")
    if thread == 0:
        found[KINDS], found[LOWEST] = wanted.kinds, wanted.lowest


def visited(found: cute.Tensor, size: int) -> Stretch:
    """The range of blocks of ``size`` elements from the first to the last that holds a match."""
    first = cutlass.min(found[LOWER], found[UPPER])
    end = cutlass.max(found[LOWER + 1], found[UPPER + 1])
    return Stretch(first // size, ceil_div(end, size))


def are_runs(found: Any) -> Boolean:
    """Whether elements in each segment of the tile are known to be a run of neighbours."""
    if found is None:
        return Boolean(False)
    lengths = [cutlass.max(found[x + 1] - found[x], 0) for x in (LOWER, UPPER)]
    return found[NUMBER] == lengths[0] + lengths[1]


@cute.jit
def within_run(found: Any, own: Int32, seen: Stretch) -> Stretch:
    """What an element in segment ``own`` sees, without what is not in it, if ``are_runs``."""
    if const_expr(found is not None):
        if are_runs(found):
            place = Int32(cutlass.select_(own == found[LOWEST], LOWER, UPPER))
            first, end = found[place], found[place + 1]
            seen = Stretch(cutlass.max(seen.start, first), cutlass.min(seen.end, end))
    return seen


@cute.jit
def alike(found: cute.Tensor, size: cutlass.Constexpr[int]) -> Stretch:
    """Blocks of ``size`` elements that share one segment with the whole tile; may be empty."""
    first, end = ceil_div(found[LOWER], size), found[LOWER + 1] // size
    is_one_run = are_runs(found) & (found[KINDS] == 1)
    return Stretch(first, cutlass.max(end if is_one_run else first, first))
