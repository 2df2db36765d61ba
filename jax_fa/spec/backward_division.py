"""How a backward's work is divided, as far as its kernels and those who call them have to agree.

On ints, on traced values and on names of C++ fields, as ``division.py``.
"""

from __future__ import annotations

from typing import Any

from jax_fa.spec.band import OF_INTS, Extremes, ceil_div
from jax_fa.spec.division import RESIDENT_CTAS

SCRATCH_BLOCK = 128
"""Query rows by which a sequence's place in ``dq_sum`` and ``row_stats`` may be padded; the largest
``block_q`` of any backward kernel."""

TURN_ROWS = 64
"""Query rows per element of ``turns``; the smallest ``block_q`` of any backward kernel."""

KV_SPLIT_BLOCK = 128
"""Keys per tile in ``head_splits``, whatever the ``block_kv`` of the kernel."""


def scratch_rows(batch: Any, num_sequences: Any, q_len: Any) -> Any:
    """Query rows per head of ``dq_sum`` and ``row_stats``.

    Sequence m of start s occupies the rows from ``(s // block_q + m) * block_q`` on, whatever the
    ``block_q`` of the kernel, so that every sequence starts on a block of its own.
    """
    return (ceil_div(batch * q_len, SCRATCH_BLOCK) + num_sequences) * SCRATCH_BLOCK


def head_splits(num_tiles: Any, group: Any, extremes: Extremes = OF_INTS) -> Any:
    """Parts into which the query heads of one key/value head are split, each a CTA of its own.

    ``num_tiles`` counts the key blocks of ``KV_SPLIT_BLOCK`` keys of all sequences and heads. One
    part needs no sums beyond the accumulator; more are taken only while multiprocessors lie idle.
    """
    wanted = RESIDENT_CTAS // extremes.maximum(num_tiles, 1)
    return extremes.maximum(extremes.minimum(wanted, group), 1)


def kv_tiles(batch: Any, num_sequences: Any, kv_len: Any) -> Any:
    """Key blocks per key/value head in ``head_splits``; of packed sequences, an upper bound."""
    return ceil_div(batch * kv_len, KV_SPLIT_BLOCK) + num_sequences - batch
