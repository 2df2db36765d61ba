"""Dense masks: the words of a query row, and the list of blocks that a tile visits.

The arrays are those of ``schema.py``: words of 32 keys for every query row, and a map of cells of
16 rows by 16 keys. The map has two planes: whether a cell shows any pair, and whether it shows all.
From the map, a CTA makes a list in shared memory for each of its tiles. It has two bits for each
block that the tile sweeps: whether to visit it, and whether to mask it.

HAZARD: arrays may hold anything, and rows may lie beyond the last: every index is clamped.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from jax_fa.kernels import edges, segments, tiles
from jax_fa.kernels.tiles import Stretch
from jax_fa.spec.band import ceil_div
from jax_fa.spec.division import LIST_WORDS, MAP_CELL, MASK_BLOCK, WORD_KEYS, map_stripes

LIST_BLOCKS = LIST_WORDS * WORD_KEYS
SHIFT, SHOWN, PARTIAL = segments.WORDS, segments.WORDS + 1, segments.WORDS + 1 + LIST_WORDS
"""Places in ``found``: log2 of a bit's blocks; which blocks show something; which hide some."""


class DenseMask(NamedTuple):
    """A mask. Pointers are null where there is none; an extent of 1 applies to all indices.

    Attributes:
        words: the words, by query row.
        cells: the map.
        batch: 1 or B.
        heads: 1 or N.
        rows: rows of words.
        width: words of a row; a single word says the same of all keys.
        row_shift: log2 of the number of query rows that share a row of words.
        stripes: rows of the map.
    """

    words: cute.Pointer
    cells: cute.Pointer
    batch: Int32
    heads: Int32
    rows: Int32
    width: Int32
    row_shift: Int32
    stripes: Int32


def of_call(
    words: cute.Pointer,
    cells: cute.Pointer,
    batch: Int32,
    heads: Int32,
    rows: Int32,
    width: Int32,
    q_len: Int32,
) -> DenseMask:
    """The mask of a call with ``q_len`` queries."""
    is_by_blocks = (rows != 1) & (rows != q_len)
    row_shift = Int32(is_by_blocks) * (MASK_BLOCK.bit_length() - 1)
    stripes = map_stripes(rows, q_len, tiles.EXTREMES)
    return DenseMask(words, cells, batch, heads, rows, width, row_shift, stripes)


def is_present(mask: DenseMask) -> Boolean:
    """Whether the call has a mask."""
    return tiles.is_present(mask.words)


def narrows(scalars: Any) -> Boolean:
    """Whether segments or a mask say which blocks a tile visits."""
    return tiles.is_present(scalars.q_segments) | is_present(scalars.mask)


def of_head(mask: DenseMask, batch: Int32, head: Int32) -> Int32:
    """The number of a query head among all heads of the mask."""
    own = cutlass.min(batch, mask.batch - 1) * mask.heads
    return own + cutlass.min(head, mask.heads - 1)


def row_of(mask: DenseMask, batch: Int32, head: Int32, position: Int32) -> Int32:
    """The number of a query row among all rows of the mask; it fits 32 bits."""
    return of_head(mask, batch, head) * mask.rows + cutlass.min(
        position >> mask.row_shift, mask.rows - 1
    )


def word_of(mask: DenseMask, row: Int32, number: Int32) -> Int32:
    """Word ``number`` of a row."""
    place = row.to(Int64) * mask.width + cutlass.min(number, mask.width - 1)
    return tiles.element(mask.words + place, 0)


@cute.jit
def words_of_block(
    mask: DenseMask, row: Int32, block: Int32, block_kv: cutlass.Constexpr[int]
) -> list:
    """The words that tell which keys of a block of ``block_kv``, a multiple of 16, a row sees."""
    first = block * block_kv
    words = [word_of(mask, row, first // WORD_KEYS + i) for i in range(block_kv // WORD_KEYS + 1)]
    if const_expr(block_kv % WORD_KEYS != 0):
        # Blocks begin at the start of a word or in its middle.
        halves = [(word >> MAP_CELL) & ((1 << MAP_CELL) - 1) for word in words]
        is_aligned = first % WORD_KEYS == 0
        for i in cutlass.range_constexpr(len(words) - 1):
            words[i] = words[i] if is_aligned else halves[i] | (words[i + 1] << MAP_CELL)
        words[-1] = words[-1] if is_aligned else halves[-1]
    return words


class Heads(NamedTuple):
    """Query heads ``first`` to ``end - 1`` of a batch."""

    batch: Int32
    first: Int32
    end: Int32


def read_heads(mask: DenseMask, heads: Heads) -> Heads:
    """Those of ``heads`` whose masks differ."""
    return heads._replace(end=cutlass.min(heads.end, heads.first + mask.heads))


class Pairs(NamedTuple):
    """What the map says of a rectangle: whether it shows some pair, and whether it hides some."""

    shows: Boolean
    hides: Boolean


def _bits_between(first: Int32, end: Int32) -> Int32:
    """A word whose bits ``first`` to ``end - 1`` are set, as far as it has them; at least one."""
    below_end = ((Int32(1) << (cutlass.min(end, WORD_KEYS) - 1)) - 1) * 2 + 1
    return below_end & (Int32(-1) << cutlass.max(first, 0))


@cute.jit
def look(
    mask: DenseMask, heads: Heads, rows: Stretch, keys: Stretch, max_rows: cutlass.Constexpr[int]
) -> Pairs:
    """What the map says of ``rows``, at most ``max_rows``, by ``keys``; neither is empty."""
    stripes, width = mask.stripes, ceil_div(mask.width, MAP_CELL)
    first_stripe = cutlass.min(rows.start // MAP_CELL, stripes - 1)
    end_stripe = cutlass.min((rows.end - 1) // MAP_CELL, stripes - 1) + 1
    first_cell, end_cell = keys.start // MAP_CELL, ceil_div(keys.end, MAP_CELL)
    shown, missing = Int32(0), Int32(0)
    for word in cutlass.range(first_cell // WORD_KEYS, ceil_div(end_cell, WORD_KEYS), unroll=1):
        own = _bits_between(first_cell - word * WORD_KEYS, end_cell - word * WORD_KEYS)
        column = cutlass.min(word, width - 1)
        for head in cutlass.range(heads.first, heads.end, unroll=1):
            plane = of_head(mask, heads.batch, head) * 2 * stripes
            # Unrolled, so that all loads are in flight at once; the last word is read repeatedly.
            for i in cutlass.range_constexpr(max_rows // MAP_CELL + 1):
                stripe = cutlass.min(first_stripe + i, end_stripe - 1)
                place = (plane + stripe).to(Int64) * width + column
                shown = shown | (tiles.element(mask.cells + place, 0) & own)
                place = place + stripes.to(Int64) * width
                missing = missing | (~tiles.element(mask.cells + place, 0) & own)
    return Pairs(shown != 0, missing != 0)


class Sweep(NamedTuple):
    """What a tile sweeps.

    Attributes:
        of_keys: True in a forward, False in a backward, whose tiles sweep rows.
        size: elements of a block.
        max_rows: rows of a tile in a forward, of a block in a backward.
        warps: numbers, in the CTA, of the warps that look.
    """

    of_keys: bool
    size: int
    max_rows: int
    warps: range


@cute.jit
def find_blocks(
    found: cute.Tensor,
    mask: DenseMask,
    heads: Heads,
    own: Stretch,
    swept: Stretch,
    sweep: cutlass.Constexpr[Sweep],
) -> None:
    """Makes a tile's list. All ``sweep.warps`` call; a barrier must follow.

    Args:
        found: words of shared memory.
        mask: the mask.
        heads: heads of the tile.
        own: rows of the tile in a forward, its keys in a backward.
        swept: the blocks of the other side that the band shows to the tile.
        sweep: the kind of these blocks, and the warps that look.
    """
    heads = read_heads(mask, heads)
    shift = Int32(0)
    while ((swept.end - 1) >> shift) >= LIST_BLOCKS:
        shift = shift + 1
    thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
    if thread == sweep.warps.start * edges.WARP:
        found[SHIFT] = shift
    warp = thread // edges.WARP - sweep.warps.start
    for number in cutlass.range(warp, LIST_WORDS, len(sweep.warps), unroll=1):
        first = (number * WORD_KEYS + lane) << shift
        shows, hides = Int32(0), Int32(0)
        start = cutlass.max(first, swept.start)
        end = cutlass.min(first + (Int32(1) << shift), swept.end)
        for block in cutlass.range(start, end, unroll=1):
            first_element = block * sweep.size
            elements = Stretch(first_element, first_element + sweep.size)
            rows, keys = elements, own
            if const_expr(sweep.of_keys):
                rows, keys = own, elements
            pairs = look(mask, heads, rows, keys, sweep.max_rows)
            shows = shows | Int32(pairs.shows)
            hides = hides | Int32(pairs.hides)
        shown = cute.arch.vote_ballot_sync(shows != 0)
        partial = cute.arch.vote_ballot_sync(hides != 0)
        if lane == 0:
            found[SHOWN + number] = shown
            found[PARTIAL + number] = partial


@cute.jit
def last_shown(found: cute.Tensor, block: Int32) -> Int32:
    """The last block to visit up to ``block``; -1 if there is none."""
    last = Int32(-1)
    if block >= 0:
        shift = found[SHIFT]
        # HAZARD: if segments leave a tile nothing to visit, ``block`` may be any number.
        bit = cutlass.min(block >> shift, LIST_BLOCKS - 1)
        word = bit // WORD_KEYS
        shown = found[SHOWN + word] & _bits_between(0, bit % WORD_KEYS + 1)
        while (shown == 0) & (word > 0):
            word = word - 1
            shown = found[SHOWN + word]
        if shown != 0:
            bit = word * WORD_KEYS + (WORD_KEYS - 1 - Int32(cute.arch.clz(shown)))
            last = cutlass.min(((bit + 1) << shift) - 1, block)
    return last


@cute.jit
def first_shown(found: cute.Tensor, block: Int32, end: Int32) -> Int32:
    """The first block to visit from ``block`` to ``end - 1``; ``end`` if there is none."""
    first = end
    if block < end:
        shift = found[SHIFT]
        bit, last_word = block >> shift, ((end - 1) >> shift) // WORD_KEYS
        word = bit // WORD_KEYS
        shown = found[SHOWN + word] & (Int32(-1) << (bit % WORD_KEYS))
        while (shown == 0) & (word < last_word):
            word = word + 1
            shown = found[SHOWN + word]
        if shown != 0:
            lowest = Int32(cute.arch.popc((shown & -shown) - 1))
            first = cutlass.max((word * WORD_KEYS + lowest) << shift, block)
    return cutlass.min(first, end)


@cute.jit
def count_shown(found: cute.Tensor, start: Int32, end: Int32) -> Int32:
    """The number of blocks to visit from ``start`` to ``end - 1``, a range that is ``narrowed``."""
    count = Int32(0)
    if start < end:
        shift = found[SHIFT]
        first, last = start >> shift, (end - 1) >> shift
        for word in cutlass.range(first // WORD_KEYS, last // WORD_KEYS + 1, unroll=1):
            own = _bits_between(first - word * WORD_KEYS, last + 1 - word * WORD_KEYS)
            count = count + Int32(cute.arch.popc(found[SHOWN + word] & own))
        before, behind = start - (first << shift), ((last + 1) << shift) - end
        count = (count << shift) - before - behind
    return count


@cute.jit
def narrowed(found: cute.Tensor, blocks: Stretch) -> Stretch:
    """``blocks`` without the blocks at either end that are not visited; may be empty."""
    end = cutlass.max(last_shown(found, blocks.end - 1) + 1, blocks.start)
    return Stretch(first_shown(found, blocks.start, end), end)


def hides(found: cute.Tensor, block: Int32) -> Boolean:
    """Whether a block hides something."""
    # HAZARD: as in ``last_shown``.
    bit = cutlass.min(block >> found[SHIFT], LIST_BLOCKS - 1)
    return ((found[PARTIAL + bit // WORD_KEYS] >> (bit % WORD_KEYS)) & 1) != 0
