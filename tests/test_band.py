"""The band against a dense mask, exhaustively: rows, block ranges and the C++ twin."""

import itertools

import numpy as np
import pytest

from jax_fa import _jax_fa
from jax_fa.spec.band import (
    FARTHEST,
    MAX_LENGTH,
    MAX_OFFSET,
    UNBOUNDED,
    Band,
    Window,
    ceil_div,
    key_range,
    kv_blocks,
)
from jax_fa.spec.band_of_keys import last_kv_block, q_blocks, row_range

LENGTHS = (0, 1, 2, 5, 8, 13)
SIDES = (-3, -1, 0, 1, 4, UNBOUNDED)
SHIFTS = (-7, -1, 0, 3, 9, 40)
BLOCKS = ((1, 1), (2, 3), (4, 4), (8, 4), (4, 16))

WINDOWS = [
    Window(shift, left, right, q_len, kv_len)
    for shift, left, right, q_len, kv_len in itertools.product(
        SHIFTS, SIDES, SIDES, LENGTHS, LENGTHS
    )
]


def dense(window):
    """bool [q_len, kv_len] from the definition."""
    beyond = np.arange(window.kv_len)[None, :] - (np.arange(window.q_len)[:, None] + window.shift)
    return (-beyond <= window.left) & (beyond <= window.right)


def mask_of(ranges, length):
    lo, hi = np.array(ranges, int).reshape(-1, 2, 1).swapaxes(0, 1)
    columns = np.arange(length)
    return (lo <= columns) & (columns < hi)


def test_key_range_of_every_row_is_its_dense_row():
    for window in WINDOWS:
        ranges = [key_range(window, row) for row in range(window.q_len)]
        np.testing.assert_array_equal(mask_of(ranges, window.kv_len), dense(window), str(window))


def test_cxx_twin_gives_the_same_keys_and_the_transposed_rows():
    for window in WINDOWS:
        rows = range(window.q_len)
        assert [_jax_fa.keys_of(window, r) for r in rows] == [key_range(window, r) for r in rows]
        ranges = [_jax_fa.rows_of(window, key) for key in range(window.kv_len)]
        np.testing.assert_array_equal(mask_of(ranges, window.q_len), dense(window).T, str(window))


def check_blocks(blocks, tile, step, window):
    """``tile`` [steps of a loop] against a dense tile whose columns are walked in ``step``."""
    assert blocks.start <= blocks.full_start <= blocks.full_end <= blocks.end, window
    seen = np.flatnonzero(tile.any(0))
    if len(seen):
        assert blocks.start <= seen[0] // step and seen[-1] // step < blocks.end, window
    for block in range(blocks.full_start, blocks.full_end):
        assert tile[:, block * step : (block + 1) * step].all(), (window, block)


@pytest.mark.parametrize(("block_q", "block_kv"), BLOCKS)
def test_key_blocks_cover_what_is_visible_and_full_blocks_hold_nothing_else(block_q, block_kv):
    for window in WINDOWS:
        mask = dense(window)
        for first in range(0, window.q_len, block_q):
            blocks = kv_blocks(window, first, block_q, block_kv)
            check_blocks(blocks, mask[first : first + block_q], block_kv, window)
            assert (
                blocks.full_end * block_kv <= window.kv_len or blocks.full_start == blocks.full_end
            )


@pytest.mark.parametrize(("block_q", "block_kv"), BLOCKS)
def test_query_blocks_cover_what_is_visible_and_full_blocks_hold_nothing_else(block_q, block_kv):
    for window in WINDOWS:
        mask = dense(window).T
        for first in range(0, window.kv_len, block_kv):
            blocks = q_blocks(window, first, block_kv, block_q)
            check_blocks(blocks, mask[first : first + block_kv], block_q, window)


def test_row_range_of_every_key_is_its_dense_column():
    for window in WINDOWS:
        ranges = [row_range(window, key) for key in range(window.kv_len)]
        np.testing.assert_array_equal(mask_of(ranges, window.q_len), dense(window).T, str(window))


@pytest.mark.parametrize(("block_q", "block_kv"), BLOCKS)
def test_key_blocks_of_a_query_block_are_numbered_from_its_last(block_q, block_kv):
    for window in WINDOWS:
        users: dict[int, list[int]] = {}
        for kv_block in range(ceil_div(window.kv_len, block_kv)):
            blocks = q_blocks(window, kv_block * block_kv, block_kv, block_q)
            for q_block in range(blocks.start, blocks.end):
                users.setdefault(q_block, []).append(kv_block)
        for q_block, kv_blocks_of_it in users.items():
            last = last_kv_block(window, q_block, block_kv, block_q)
            turns = [last - kv_block for kv_block in reversed(kv_blocks_of_it)]
            assert turns == list(range(len(turns))), window


def test_blocks_outside_the_band_are_skipped():
    window = Window(0, 10, 0, 1000, 1000)
    blocks = kv_blocks(window, 512, 64, 64)
    assert (blocks.start, blocks.end) == (502 // 64, 9)
    blocks = q_blocks(window, 512, 64, 64)
    assert (blocks.start, blocks.end) == (8, ceil_div(575 + 10 + 1, 64))


def test_band_bounds():
    assert Band().is_full and not Band(is_causal=True).is_full
    assert Band(is_causal=True, right=5).right_bound == 0
    assert Band(is_causal=True, right=-2).right_bound == -2
    assert Band(left=3).right_bound == UNBOUNDED and Band(left=3).left_bound == 3


@pytest.mark.parametrize(("alignment", "shift"), [("top_left", 7), ("bottom_right", 7 + 20 - 5)])
def test_alignment_places_the_diagonal(alignment, shift):
    assert Band(alignment=alignment).shift(5, 20, 7) == shift


class Int32(int):
    """An integer that refuses to leave 32 bits."""

    def __new__(cls, value):
        assert -(2**31) <= value < 2**31, value
        return super().__new__(cls, value)

    def __neg__(self):
        return Int32(-int(self))

    def __add__(self, other):
        return Int32(int(self) + int(other))

    def __sub__(self, other):
        return Int32(int(self) - int(other))

    def __mul__(self, other):
        return Int32(int(self) * int(other))

    def __floordiv__(self, other):
        return Int32(int(self) // int(other))

    def __rsub__(self, other):
        return Int32(int(other) - int(self))

    __radd__, __rmul__ = __add__, __mul__


EXTREME_LENGTHS = (1, 300, MAX_LENGTH)
EXTREME_OFFSETS = (-MAX_OFFSET, 0, MAX_OFFSET)
EXTREME_SIDES = (-(2**31), 1 - FARTHEST, 0, FARTHEST - 1, FARTHEST, None)


def extreme_windows():
    for left, right, alignment, is_causal in itertools.product(
        EXTREME_SIDES, EXTREME_SIDES, ("top_left", "bottom_right"), (False, True)
    ):
        band = Band(is_causal, left, right, alignment)
        for offset, q_len, kv_len in itertools.product(
            EXTREME_OFFSETS, EXTREME_LENGTHS, EXTREME_LENGTHS
        ):
            shift = Int32(band.shift(Int32(q_len), Int32(kv_len), Int32(offset)))
            bounds = map(Int32, (band.left_bound, band.right_bound, q_len, kv_len))
            yield band, Window(shift, *bounds)


def test_32_bits_hold_everything_at_the_extremes():
    """Also what kernels make of ranges: columns from the first key of a block that they visit."""
    for _, window in extreme_windows():
        for first in {0, 128, window.q_len // 128 * 128, window.q_len + 128}:
            blocks = kv_blocks(window, Int32(first), 128, 128)
            for row in (first, first + 127):
                keys = key_range(window, Int32(row))
                for block in (blocks.start, max(blocks.end - 1, blocks.start)):
                    for key in keys:
                        _ = key - (block * 128 + 127)
        for first in {0, window.kv_len // 128 * 128}:
            blocks = q_blocks(window, Int32(first), 128, 128)
            last_kv_block(window, blocks.start, 128, 128)
            for row in row_range(window, Int32(first)):
                _ = row - (blocks.end * 128 + 127)


def test_sides_and_offsets_at_the_extremes_show_what_unlimited_ones_show():
    for band, window in extreme_windows():
        rows = {0, int(window.q_len) // 2, int(window.q_len) - 1}
        for row in rows:
            diagonal = row + int(window.shift)
            right = int(window.kv_len) if band.right is None else diagonal + band.right + 1
            right = min(right, diagonal + 1) if band.is_causal else right
            left = 0 if band.left is None else max(diagonal - band.left, 0)
            wanted = (left, min(int(window.kv_len), right))
            got = key_range(window, Int32(row))
            assert tuple(got) == wanted or got.hi <= got.lo and wanted[1] <= wanted[0]
