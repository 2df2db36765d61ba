"""Which keys a query may see: the only statement of causal, window, alignment and lengths.

Query row ``i`` of a sequence stands on key position ``d(i) = i + shift``, its *diagonal*, and sees
the keys ``j`` of one interval, its *band*:

    lo(i) = max(0,      d(i) - left)
    hi(i) = min(kv_len, d(i) + right + 1)        visible: lo(i) <= j < hi(i)

``left`` and ``right`` count keys on either side of the diagonal; causal attention is ``right = 0``.
The shift is ``query_offset`` for top-left alignment, and ``query_offset + kv_len - q_len`` (the
actual lengths) for bottom-right alignment; offsets are at most ``MAX_OFFSET`` in magnitude. Rows
``i >= q_len`` see nothing.

Everything here is plain arithmetic on values that may be Python ints (tests, plans) or traced
integers (kernels, jnp), for which ``Extremes`` are passed in.
``band_of_keys.py`` states the same rule from the side of keys, as a backward needs it.
``schema_cpp.py`` writes the C++ from both; a test compares them exhaustively.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Alignment = Literal["top_left", "bottom_right"]

MAX_LENGTH = 1 << 28
"""The most rows, or keys, that a sequence may have on a GPU."""

MAX_OFFSET = 1 << 28
"""Query offsets of a larger magnitude count as this one: it already puts every key of a sequence
of ``MAX_LENGTH`` on one side of every diagonal."""

FARTHEST = MAX_OFFSET + 2 * MAX_LENGTH
"""No key is this far from a diagonal: the shift of a bottom-right alignment adds one length, and
the distance from row 0 to the key another. So a side of the band of ``FARTHEST`` or more has no
bound, and one of ``-FARTHEST`` or less hides everything."""

UNBOUNDED = 1 << 30
"""A side of the band that has no bound, as kernels see it.

``row + shift + UNBOUNDED + 1``, with ``row`` less than a block beyond ``MAX_LENGTH``, is below
``FARTHEST + UNBOUNDED + 2 ** 16 < 2 ** 31``, and everything else here is smaller. So 32 bits
suffice; a test evaluates every function at its extremes.
"""


@dataclass(frozen=True)
class Band:
    """The static part of the rule: what the caller wrote, before any length is known.

    Attributes:
        is_causal: no key beyond the diagonal.
        left: keys visible before the diagonal; None is unbounded.
        right: keys visible beyond the diagonal; None is unbounded.
        alignment: whether the diagonal starts at the first key or ends at the last.
    """

    is_causal: bool = False
    left: int | None = None
    right: int | None = None
    alignment: Alignment = "top_left"

    @property
    def left_bound(self) -> int:
        """Keys visible before the diagonal, UNBOUNDED if all are."""
        return _bound(self.left)

    @property
    def right_bound(self) -> int:
        """Keys visible beyond the diagonal, UNBOUNDED if all are; at most 0 when causal."""
        right = _bound(self.right)
        return min(right, 0) if self.is_causal else right

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key, so that no diagonal matters."""
        return self.left_bound == UNBOUNDED and self.right_bound == UNBOUNDED

    def shift(self, q_len: Any, kv_len: Any, query_offset: Any = 0) -> Any:
        """Key position of query row 0's diagonal."""
        if self.alignment == "bottom_right":
            return query_offset + kv_len - q_len
        return query_offset

    def window(self, shift: Any, q_len: Any, kv_len: Any) -> Window:
        """The band of a sequence of these lengths, whose ``shift`` is known."""
        return Window(shift, self.left_bound, self.right_bound, q_len, kv_len)


def _bound(side: int | None) -> int:
    """A side of the band as kernels see it."""
    return UNBOUNDED if side is None or side >= FARTHEST else max(side, -FARTHEST)


class Extremes(NamedTuple):
    """Functions that return the smaller and the larger of two values of some kind."""

    minimum: Callable[[Any, Any], Any]
    maximum: Callable[[Any, Any], Any]


OF_INTS = Extremes(min, max)


class KeyRange(NamedTuple):
    """Keys ``lo <= j < hi``; empty when ``hi <= lo``."""

    lo: Any
    hi: Any


class Blocks(NamedTuple):
    """Block indices of one tile.

    ``[start, end)`` covers every visible pair, ``[full_start, full_end)`` holds only visible pairs;
    ``start <= full_start <= full_end <= end``; blocks in ``[start, full_start)`` and
    ``[full_end, end)`` need the mask.
    """

    start: Any
    full_start: Any
    full_end: Any
    end: Any


class Window(NamedTuple):
    """The band of one sequence once everything is known: run-time integers only.

    Attributes:
        shift: key position of query row 0's diagonal (``Band.shift``).
        left: keys before the diagonal (``Band.left_bound``).
        right: keys beyond the diagonal (``Band.right_bound``).
        q_len: query rows of the sequence.
        kv_len: keys of the sequence.
    """

    shift: Any
    left: Any
    right: Any
    q_len: Any
    kv_len: Any


def ceil_div(a: Any, b: Any) -> Any:
    """Smallest integer not below ``a / b``, for ``a >= 0``, ``b > 0``."""
    return (a + b - 1) // b


def key_range(window: Window, row: Any, extremes: Extremes = OF_INTS) -> KeyRange:
    """Keys that query ``row`` sees, for ``row < q_len``."""
    diagonal = row + window.shift
    return KeyRange(
        extremes.maximum(0, diagonal - window.left),
        extremes.minimum(window.kv_len, diagonal + window.right + 1),
    )


def kv_blocks(
    window: Window,
    first_row: Any,
    block_q: int,
    block_kv: int,
    extremes: Extremes = OF_INTS,
) -> Blocks:
    """Key blocks for the query rows ``first_row .. first_row + block_q - 1`` (q-major loops).

    Rows at or beyond ``q_len`` do not widen the range. The last, partly filled key block is never
    "full": its keys beyond ``kv_len`` need the mask.
    """
    minimum, maximum = extremes
    rows = minimum(block_q, window.q_len - first_row)
    top = key_range(window, first_row, extremes)
    bottom = key_range(window, first_row + rows - 1, extremes)
    start = top.lo // block_kv
    end = maximum(start, ceil_div(maximum(bottom.hi, 0), block_kv))
    full_start = minimum(maximum(start, ceil_div(bottom.lo, block_kv)), end)
    full_end = minimum(maximum(full_start, maximum(top.hi, 0) // block_kv), end)
    return Blocks(start, full_start, full_end, end)


def part_of(
    blocks: Blocks,
    part: Any,
    num_parts: Any,
    extremes: Extremes = OF_INTS,
) -> Blocks:
    """Returns part ``part`` of key blocks that are split into ``num_parts`` parts.

    Parts are consecutive and of equal size, except that the last ones may be smaller or empty. An
    empty part lies behind the last block.
    """
    minimum, maximum = extremes
    size = ceil_div(blocks.end - blocks.start, num_parts)
    start = minimum(blocks.start + part * size, blocks.end)
    end = minimum(start + size, blocks.end)
    full_start = minimum(maximum(blocks.full_start, start), end)
    full_end = minimum(maximum(blocks.full_end, full_start), end)
    return Blocks(start, full_start, full_end, end)
