"""Which queries see a key: the rule of ``band.py``, solved for rows.

A key ``j`` is seen by one interval of rows, ``j - right - shift <= i <= j + left - shift``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jax_fa.spec.band import OF_INTS, Blocks, Extremes, Window, ceil_div


class RowRange(NamedTuple):
    """Query rows ``lo <= i < hi``; empty when ``hi <= lo``."""

    lo: Any
    hi: Any


def q_blocks(
    window: Window,
    first_key: Any,
    block_kv: int,
    block_q: int,
    extremes: Extremes = OF_INTS,
) -> Blocks:
    """Query blocks for the keys ``first_key .. first_key + block_kv - 1`` (kv-major loops).

    Key ``j`` is seen by the rows ``j - right - shift .. j + left - shift``. Rows at or beyond
    ``q_len`` and keys at or beyond ``kv_len`` do not affect whether a block is full: a kernel
    gives absent rows ``lse = +inf`` and does not store absent keys.
    """
    minimum, maximum = extremes
    last_key = minimum(first_key + block_kv, window.kv_len) - 1
    lo_first = maximum(0, first_key - window.right - window.shift)
    lo_last = maximum(0, last_key - window.right - window.shift)
    num_blocks = ceil_div(window.q_len, block_q)
    hi_first = minimum(num_blocks * block_q, first_key + window.left - window.shift + 1)
    hi_last = minimum(window.q_len, last_key + window.left - window.shift + 1)
    start = lo_first // block_q
    end = maximum(start, ceil_div(maximum(hi_last, 0), block_q))
    full_start = minimum(maximum(start, ceil_div(lo_last, block_q)), end)
    full_end = minimum(maximum(full_start, maximum(hi_first, 0) // block_q), end)
    return Blocks(start, full_start, full_end, end)


def row_range(
    window: Window,
    key: Any,
    extremes: Extremes = OF_INTS,
) -> RowRange:
    """Query rows that see ``key``, for ``key < kv_len``."""
    return RowRange(
        extremes.maximum(0, key - window.right - window.shift),
        extremes.minimum(window.q_len, key + window.left - window.shift + 1),
    )


def last_kv_block(
    window: Window,
    q_block: Any,
    block_kv: int,
    block_q: int,
    extremes: Extremes = OF_INTS,
) -> Any:
    """The last key block whose ``q_blocks`` include ``q_block``, if any do.

    Such key blocks are consecutive, so counting back from the last gives each one its turn.
    """
    last_row = q_block * block_q + (block_q - 1)
    return extremes.minimum(last_row + window.right + window.shift, window.kv_len - 1) // block_kv
