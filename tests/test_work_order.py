"""How evenly ``tiles.longest_first`` shares out work, computed on ints by what kernels trace.

Most over mean work of a CTA cannot be bounded by itself: a tile is one CTA's, so that 133 equal
tiles take 132 CTAs twice as long as one. It is compared with the least that whole tiles allow.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from helpers.harness import in_new_process
from helpers.recording import needs_dsl

from jax_fa.spec.band import ceil_div

pytestmark = needs_dsl

SHAPES = 1000

# (tiles a CTA, blocks a head), at least -> the most by which the order exceeds the least possible:
# at worst, in all but a twentieth of the shapes, and in the mean.
#
# 1.05 from 4 tiles a CTA on, and 1.15 below, are not kept by all. 1.05 is kept by nineteen shapes
# in twenty with 8 tiles a CTA, of heads of 16 blocks; 1.15 by nineteen in twenty with fewer than 4
# tiles. Others miss them where a window makes tiles alike, of which a CTA has one more or not (1.13
# with 8 tiles a CTA); where three bands of one or two heads are one round and a half each (1.25
# with 4); where heads of two to seven blocks have few kinds of tiles (1.25, and of two blocks 1.34
# with one tile and a half a CTA). 1.31 is 5 heads of 9 blocks on 16 CTAs: bands of backwards count
# what they take of the cache twice, before which it was 1.20, and 1.10 was 1.09.
BOUNDS = {
    (8, 16): (1.13, 1.05, 1.02),
    (4, 8): (1.25, 1.10, 1.04),
    (4, 1): (1.25, 1.17, 1.05),
    (0, 8): (1.31, 1.13, 1.03),
    (0, 1): (1.34, 1.17, 1.03),
}


class Shape(NamedTuple):
    """Tiles of one call: the queries of every block of keys, or the other way round."""

    num_ctas: int
    heads: int
    block: int
    num_blocks: int
    bytes_per_head: int
    window: int | None

    def costs(self):
        """Work of the blocks of a head, in rows that pass by."""
        ends = [(i + 0.5) * self.block for i in range(self.num_blocks)]
        return ends if self.window is None else [min(end, self.window) for end in ends]

    @property
    def num_tiles(self):
        return self.heads * self.num_blocks


def draw_shape(draw):
    """One of a forward or a backward, of any GPU; a causal mask, or one with a window."""
    while True:
        head_dim, value_dim = draw.choice(((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)))
        block = draw.choice((64, 128, 192))
        length = draw.choice((draw.randint(128, 2048), 2 ** draw.randint(7, 15)))
        of_tokens = 2 * (head_dim + value_dim)
        bytes_per_row = draw.choice((of_tokens, 2 * (of_tokens + 4 * head_dim)))
        shape = Shape(
            num_ctas=draw.choice((132, 78, 36, 16)),
            heads=draw.choice((1, 2, 3, 5, 8, 12, 16, 20, 32, 64)) * draw.choice((1, 1, 2, 4, 16)),
            block=block,
            num_blocks=ceil_div(length, block),
            bytes_per_head=length * bytes_per_row,
            window=draw.choice((None, None, 2 ** draw.randint(7, 13))),
        )
        if shape.num_tiles <= 12 * shape.num_ctas:
            return shape


def least_work(shape):
    """No CTA gets less than this of the CTA with the most, however whole tiles are shared out."""
    costs = sorted(shape.costs() * shape.heads, reverse=True)
    # Of the first n C + 1 tiles one CTA has n + 1.
    crowded = (
        (n + 1) * costs[n * shape.num_ctas] for n in range(ceil_div(len(costs), shape.num_ctas))
    )
    return max(sum(costs) / shape.num_ctas, *crowded)


class Orders:
    """``tiles.make_order`` and ``tiles.longest_first`` on ints."""

    def __init__(self, monkeypatch):
        from jax_fa.kernels import primitives, tiles

        self.cta = self.num_ctas = 0
        monkeypatch.setattr(tiles, "Int32", int)
        monkeypatch.setattr(primitives, "opaque", int)
        monkeypatch.setattr(tiles, "_clusters", lambda _: tiles.Clusters(self.cta, self.num_ctas))
        self.make_order, self.tile_at = tiles.make_order, tiles.longest_first.__wrapped__

    def lists(self, shape):
        """Of every CTA, the (head, block) of its tiles in the order it takes them."""
        order = self.make_order(
            shape.heads, shape.heads, 1, shape.num_blocks, shape.bytes_per_head, shape.num_ctas
        )
        self.num_ctas = min(shape.num_ctas, shape.num_tiles)
        found: list[list[tuple[int, int]]] = []
        for cta in range(self.num_ctas):
            self.cta = cta
            found.append([])
            tile = self.tile_at(order, 0)
            while tile.is_valid:
                found[-1].append((tile.head, tile.block))
                tile = self.tile_at(order, tile.slot + 1)
        return found


def excess(shape, lists):
    """The work of the CTA that has the most, over the least possible."""
    costs = shape.costs()
    return max(sum(costs[block] for _, block in tiles) for tiles in lists) / least_work(shape)


def check_random_shapes():
    draw = random.Random(0)
    found: dict[str, list[float]] = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        orders = Orders(monkeypatch)
        for _ in range(SHAPES):
            shape = draw_shape(draw)
            lists = orders.lists(shape)
            tiles = [tile for of_cta in lists for tile in of_cta]
            assert len(set(tiles)) == len(tiles) == shape.num_tiles
            per_cta = shape.num_tiles // shape.num_ctas
            kind = next(x for x in BOUNDS if per_cta >= x[0] and shape.num_blocks >= x[1])
            found.setdefault(kind, []).append(excess(shape, lists))
    assert found.keys() == BOUNDS.keys()
    for kind, values in found.items():
        values.sort()
        reached = values[-1], values[len(values) * 19 // 20], sum(values) / len(values)
        for value, bound in zip(reached, BOUNDS[kind], strict=True):
            assert value <= bound, (kind, reached)


def check_shapes_of_models():
    """Causal, 32 heads of 8192 tokens and 128 of 2048; bands once left ragged rounds (to 1.21)."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        orders = Orders(monkeypatch)
        for heads, length in ((32, 8192), (128, 2048)):
            for bytes_per_row in (4 * 96, 2 * (4 * 96 + 4 * 96), 2 * (192 + 128), 4 * 128, 4 * 64):
                blocks = length // 128
                shape = Shape(132, heads, 128, blocks, length * bytes_per_row, None)
                assert excess(shape, orders.lists(shape)) <= 1.05


def check_ctas_of_one_tile():
    """``fwd_order`` finds the tiles of ``tiles.one_per_cta``, which divides."""
    from jax_fa.kernels import tiles
    from jax_fa.kernels.mma_sync import fwd_order

    draw = random.Random(0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        orders, number = Orders(monkeypatch), 0
        dsl = SimpleNamespace(
            ceil_div=ceil_div,
            fast_divmod_create_divisor_v2=int,
            arch=SimpleNamespace(block_idx=lambda: (number, 0, 0)),
        )
        for name, value in {"cute": dsl, "Int32": int, "Boolean": bool}.items():
            monkeypatch.setattr(fwd_order, name, value)
        monkeypatch.setattr(tiles, "Boolean", bool)
        is_uneven = set()
        for _ in range(200):
            group = draw.choice((1, 1, 3, 4))
            shape = draw_shape(draw)
            heads = group * draw.randint(1, 8)
            num_heads, num_blocks = heads * draw.randint(1, 5), min(shape.num_blocks, 20)
            order = orders.make_order(
                num_heads, heads, group, num_blocks, shape.bytes_per_head, shape.num_ctas
            )
            is_uneven.add(num_heads % order.heads_per_band > 0)
            own = fwd_order.cta_order(order)
            for number in range(num_heads * num_blocks):
                orders.cta = number
                found = fwd_order.tile_of_cta.__wrapped__(own)
                assert found == tiles.one_per_cta.__wrapped__(order, 0)
        assert is_uneven == {False, True}


def in_own_process(check):
    # Where the DSL compiled these functions before, they are no longer those of ints.
    folder = str(Path(__file__).parent)
    in_new_process(
        f"import sys, warnings; sys.path.insert(0, {folder!r}); warnings.simplefilter('ignore')\n"
        f"import test_work_order; test_work_order.{check}()"
    )


@pytest.mark.long
def test_work_is_even_and_every_tile_is_there_once():
    in_own_process("check_random_shapes")


def test_work_of_long_causal_heads_is_even_to_a_twentieth():
    in_own_process("check_shapes_of_models")


def test_ctas_of_one_tile_find_it_without_dividing():
    in_own_process("check_ctas_of_one_tile")
