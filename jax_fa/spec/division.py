"""How work is divided, as far as kernels and those who call them have to agree.

Arithmetic on extents: on ints where scratch is allocated and kernels are chosen, on traced values
in kernels, on the names of C++ fields in ``schema_cpp``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jax_fa.spec.band import OF_INTS, Extremes, ceil_div

RESIDENT_CTAS = 132
"""Multiprocessors that are to be filled by splitting keys (forward) or groups of heads (backward):
those of an H100 SXM. Fixed, since it decides sizes of scratch, known before the device is."""

GRANULE = 8
"""Rows of a head that stay together where heads share a tile: what a TMA box can put anywhere in
swizzled shared memory, so that every group packs without a kernel of its own."""


class Packing(NamedTuple):
    """How the query heads of a group share tiles: Note [Packed heads] in ``tiles.py``.

    Attributes:
        heads: query heads with rows in one tile; 1 if none are packed.
        positions: query positions of a tile, a multiple of its granule.
        units: tiles by which a group covers these positions; the order counts them as its heads.
        group: query heads per key/value head.
    """

    heads: Any
    positions: Any
    units: Any
    group: Any


def packing(block_q: int, group: Any, granule: int = GRANULE) -> Packing:
    """How the most heads of a group share tiles of ``block_q`` rows, so many of a head together."""
    granules = block_q // granule
    units = ceil_div(group, granules)
    heads = ceil_div(group, units)
    return Packing(heads, granules // heads * granule, units, group)


def packing_pays(packed_tiles: Any, plain_tiles: Any) -> Any:
    """Whether heads are to share tiles: it saves a quarter of the tiles or more.

    For a packed tile, Q is loaded in more, smaller pieces, and out is not stored by TMA.
    """
    return 4 * packed_tiles <= 3 * plain_tiles


WORD_KEYS = 32
"""Keys of a word of ``mask_words``, one bit each; and cells of a word of ``mask_map``."""

MAP_CELL = 16
"""Rows, and keys, of a cell of ``mask_map``; a divisor of every block of every kernel."""

MASK_BLOCK = 128
"""Query rows, and keys, of a block of ``block_mask``; a multiple of ``MAP_CELL``."""


def map_stripes(mask_rows: Any, q_len: Any, extremes: Extremes = OF_INTS) -> Any:
    """Rows of ``mask_map``, whether ``mask_words`` has 1 row, one for each block or all."""
    blocks = extremes.minimum(mask_rows, ceil_div(q_len, MASK_BLOCK))
    return extremes.minimum(blocks * (MASK_BLOCK // MAP_CELL), ceil_div(q_len, MAP_CELL))


LIST_WORDS = 32
"""Words of either part of a tile's list of blocks (``kernels/dense_mask.py``). A bit stands for a
power of two of blocks: enough for the longest sequence, one up to 1024 blocks."""

FOUND_WORDS = 4 + 1 + 2 * LIST_WORDS
"""Words of shared memory for what segments, 4, and a mask tell of a tile."""
