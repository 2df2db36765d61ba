"""How a backward's work is divided: parts of the query heads that share keys."""

import pytest

from jax_fa.spec.backward_division import ROUNDS, head_splits
from jax_fa.spec.band import ceil_div
from jax_fa.spec.division import RESIDENT_CTAS


def rounds(num_tiles, parts):
    """Rounds of all multiprocessors, in units of a tile with all heads."""
    return ceil_div(num_tiles * parts, RESIDENT_CTAS) / parts


@pytest.mark.parametrize("is_banded", [0, 1])
@pytest.mark.parametrize("group", [1, 2, 5, 8, 32])
def test_parts_are_some_heads_each_and_not_more_than_rounds_of_tiles(group, is_banded):
    for num_tiles in range(2000):
        parts = head_splits(num_tiles, group, is_banded)
        assert 1 <= parts <= group
        assert parts == 1 or num_tiles * parts <= ROUNDS * RESIDENT_CTAS


def test_heads_stay_together_where_tiles_are_equal_and_fill_their_rounds():
    for num_tiles in (120, 128, 132, 256, 264, 1000, 5000):
        assert head_splits(num_tiles, 32, 0) == 1
    assert head_splits(64, 32, 0) == 2 and head_splits(16, 8, 0) == 8


def test_a_nearly_empty_round_is_avoided():
    for num_tiles in (70, 133, 160, 170):
        parts = head_splits(num_tiles, 32, 0)
        assert rounds(num_tiles, parts) <= 0.9 * rounds(num_tiles, 1)


def test_unequal_tiles_get_several_rounds():
    assert [head_splits(n, 32, 1) for n in (66, 128, 132, 256, 400, 528, 1024)] == [
        *(8, 4, 4, 2, 1, 1, 1)
    ]
    assert head_splits(128, 2, 1) == 2
