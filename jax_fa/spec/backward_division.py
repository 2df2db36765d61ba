"""How a backward's work is divided, as far as its kernels and their callers have to agree.

Computed on ints, on traced values and on names of C++ fields, as in ``division.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax_fa.spec.band import OF_INTS, Extremes, ceil_div
from jax_fa.spec.division import RESIDENT_CTAS

SCRATCH_BLOCK = 128
"""Most query rows by which a sequence may be padded in ``dq_sum`` and ``row_stats``; the largest
``block_q`` of any backward kernel."""

ROUNDS = 4
"""The most tiles that a multiprocessor gets when heads are split further than filling all needs."""

TURN_ROWS = 64
"""Query rows per element of ``turns``; the smallest ``block_q`` of any backward kernel."""

KV_SPLIT_BLOCK = 128
"""Keys per tile in ``head_splits``, whatever the ``block_kv`` of the kernel."""


def scratch_rows(batch: Any, num_sequences: Any, q_len: Any) -> Any:
    """Query rows per head of ``dq_sum`` and ``row_stats``.

    Sequence m, which starts at s, occupies the rows from ``(s // block_q + m) * block_q`` on,
    whatever the ``block_q`` of the kernel, so that every sequence starts on a block of its own.
    """
    return (ceil_div(batch * q_len, SCRATCH_BLOCK) + num_sequences) * SCRATCH_BLOCK


def head_splits(
    num_tiles: Any,
    group: Any,
    is_banded: Any,
    extremes: Extremes = OF_INTS,
    named: Callable[[str, Any], Any] = lambda _, value: value,
) -> Any:
    """Parts into which the query heads of one key/value head are split, each a CTA of its own.

    With more than one part, sums go through memory, which costs up to a tenth of the time. It pays

    * while multiprocessors lie idle;
    * where a band makes tiles unequal: with one tile per multiprocessor, the longest takes twice
      the mean (H200, D = 128, causal, 32:1 heads, 1 x 16384 tokens, forward and backward: 19.8 ms
      with one part, 13.0 with four);
    * where the last round is so empty that finer tiles save a tenth.

    Args:
        num_tiles: key blocks of ``KV_SPLIT_BLOCK`` keys of all sequences and heads.
        group: query heads of a key/value head.
        is_banded: 1 where a causal mask or a window hides keys, else 0.
        extremes: what finds the smaller and the larger of two values.
        named: (name, value) -> the value; gives a name to one that occurs several times.
    """
    least, most = extremes
    some_tiles = most(num_tiles, 1)
    filling = named("filling", most(RESIDENT_CTAS // some_tiles, 1))
    filled = named("filled", some_tiles * filling)
    rounds, finer_rounds = (ceil_div(filled * n, RESIDENT_CTAS) for n in (1, ROUNDS))
    saves_a_tenth = least(most(rounds * (10 * ROUNDS) - finer_rounds * 11, 0), 1)
    finer = most(least(ROUNDS * RESIDENT_CTAS // filled, ROUNDS), 1)
    parts = filling * (most(is_banded, saves_a_tenth) * (finer - 1) + 1)
    return most(least(parts, group), 1)


DBIAS_TILE = 128
"""Rows, and keys, of a tile in ``dbias_parts``, whatever the tile of the kernel."""

PART_PAIRS = 4
"""The fewest pairs of a batch and a head in a part of a tile of a bias's gradient: they must take
much longer than writing and merging the part's sums."""


def dbias_parts(tiles: Any, pairs: Any, extremes: Extremes = OF_INTS) -> Any:
    """Parts into which batches and heads that share a bias are split, each a CTA of its own.

    As many as ``ROUNDS`` tiles per multiprocessor and ``PART_PAIRS`` pairs per part allow.

    Args:
        tiles: the bias's tiles of ``DBIAS_TILE`` rows and keys.
        pairs: pairs of a batch and a head that share each tile.
        extremes: what finds the smaller and the larger of two values.
    """
    least, most = extremes
    return most(least(ROUNDS * RESIDENT_CTAS // most(tiles, 1), pairs // PART_PAIRS), 1)


def kv_tiles(batch: Any, num_sequences: Any, kv_len: Any) -> Any:
    """Key blocks per key/value head in ``head_splits``; for packed sequences, an upper bound."""
    return ceil_div(batch * kv_len, KV_SPLIT_BLOCK) + num_sequences - batch
