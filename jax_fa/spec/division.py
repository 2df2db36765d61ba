"""How work is divided, as far as kernels and their callers have to agree.

The arithmetic works on extents: on ints where scratch is allocated and kernels are chosen, on
traced values in kernels, and on the names of C++ fields in ``schema_cpp``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jax_fa.spec.band import OF_INTS, Extremes, ceil_div

RESIDENT_CTAS = 132
"""The number of multiprocessors to fill by splitting keys (forward) or groups of heads (backward):
that of an H100 SXM. It is fixed, as scratch is sized by it before the device is known."""

GRANULE = 8
"""Rows of a head that stay together where heads share a tile: a TMA box of 8 rows can go anywhere
in swizzled shared memory, so one kernel can pack groups of any size."""


class Packing(NamedTuple):
    """How the query heads of a group share tiles: Note [Packed heads] in ``tiles.py``.

    Attributes:
        heads: query heads with rows in one tile; 1 if none are packed.
        positions: query positions of a tile, a multiple of its granule.
        units: tiles in which a group covers these positions; the order counts them as its heads.
        group: query heads per key/value head.
    """

    heads: Any
    positions: Any
    units: Any
    group: Any


def packing(block_q: int, group: Any, granule: int = GRANULE) -> Packing:
    """Packs a group in the fewest tiles of ``block_q`` rows, by granules of ``granule`` rows."""
    granules = block_q // granule
    units = ceil_div(group, granules)
    heads = ceil_div(group, units)
    return Packing(heads, granules // heads * granule, units, group)


def packing_pays(packed_tiles: Any, plain_tiles: Any) -> Any:
    """Whether heads should share tiles, which must save at least a quarter of the tiles.

    A packed tile loads Q in more and smaller pieces, and does not store out by TMA.
    """
    return 4 * packed_tiles <= 3 * plain_tiles


WORD_KEYS = 32
"""Keys per word of ``mask_words``, one bit each; also cells per word of ``mask_map``."""

MAP_CELL = 16
"""Rows, and keys, of a cell of ``mask_map``. It divides every block size of every kernel."""

MASK_BLOCK = 128
"""Query rows, and keys, of a block of ``block_mask``; a multiple of ``MAP_CELL``."""


def map_stripes(mask_rows: Any, q_len: Any, extremes: Extremes = OF_INTS) -> Any:
    """The number of rows of ``mask_map``. ``mask_words`` may have 1 row, one per block, or all."""
    blocks = extremes.minimum(mask_rows, ceil_div(q_len, MASK_BLOCK))
    return extremes.minimum(blocks * (MASK_BLOCK // MAP_CELL), ceil_div(q_len, MAP_CELL))


LIST_WORDS = 32
"""Words of each part of a tile's list of blocks (``kernels/dense_mask.py``). A bit stands for one
block up to 1024 blocks, else for a power of two of them: enough for the longest sequence."""

FOUND_WORDS = 8 + 1 + 2 * LIST_WORDS
"""Words of shared memory for what segments (8 words) and a mask tell about a tile."""
