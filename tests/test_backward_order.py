"""The order of work of deterministic backwards, and of claims, computed as kernels trace it."""

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.harness import in_new_process
from helpers.recording import needs_dsl

from jax_fa.spec.config import choose_backward
from jax_fa.spec.key import MASK_CLASSES, KernelKey

pytestmark = needs_dsl

FAMILIES = {"sm90": ("sm_90a", 1), "sm100": ("sm_100f", 1), "sm100 in pairs": ("sm_100f", 2)}
"""Target, and CTAs of a cluster."""


class Present(int):
    """A truth value as kernels have it."""

    def to(self, _):
        return int(self)


class Grid:
    """``backward_host.backward_order`` and ``backward_work.tile_at`` on ints, for one variant."""

    def __init__(self, monkeypatch, family, mask, has_bias=False):
        from jax_fa.kernels import backward_host, backward_work, primitives, tiles

        target, self.ctas = FAMILIES[family]
        self.mask = mask
        key = KernelKey(target, "bfloat16", 128, 128, mask, has_bias=has_bias)
        self.cluster = self.num_clusters = 0
        self.variant = SimpleNamespace(
            key=key,
            config=choose_backward(key),
            plan=SimpleNamespace(ctas=self.ctas),
            is_general=mask == "general",
            claims_tiles=getattr(choose_backward(key), "claims_tiles", False),
        )
        for module in (backward_host, backward_work, tiles):
            monkeypatch.setattr(module, "Int32", int)
        monkeypatch.setattr(tiles, "Boolean", bool)
        monkeypatch.setattr(primitives, "opaque", int)
        monkeypatch.setattr(tiles, "is_present", Present)
        takes_rounds = backward_work.takes_rounds
        monkeypatch.setattr(  # ~ inverts it, as it does in kernels
            backward_work, "takes_rounds", lambda scalars: np.bool_(takes_rounds(scalars))
        )
        for name in ("longest_first", "one_per_cta"):
            monkeypatch.setattr(tiles, name, getattr(tiles, name).__wrapped__)
        monkeypatch.setattr(
            tiles, "_clusters", lambda _: tiles.Clusters(self.cluster, self.num_clusters)
        )
        monkeypatch.setattr(
            backward_work, "has_fixed_shares", lambda _, scalars: scalars.deterministic != 0
        )
        monkeypatch.setattr(
            backward_work, "leaves_blocks_out", lambda scalars: np.bool_(scalars.leaves_blocks_out)
        )
        self.extents = primitives.Extents
        self.order_of = backward_host.backward_order.__wrapped__
        self.tile_at = backward_work.tile_at.__wrapped__

    def ascends(self, group, slot):
        """Whether steps ascend in a round, with so many query heads per key/value head."""
        return self.mask != "causal" or (group == 1 and slot % 2 == 0)

    def lists(self, num_sms, heads, num_kv_blocks, splits=1, group=1, **further):
        """Of every cluster, the (head, key block) of its tiles in the order it takes them."""
        kv_len = num_kv_blocks * self.variant.config.block_kv - 5
        scalars = SimpleNamespace(
            deterministic=1,
            splits=splits,
            group=group,
            sequences=SimpleNamespace(cu_seqlens=SimpleNamespace(own=0), num_sequences=1),
            **further,
        )
        call = SimpleNamespace(
            scalars=scalars,
            num_sms=num_sms,
            queries=self.extents(1, 1000, heads * splits),
            keys=self.extents(1, kv_len, heads),
        )
        order, num_ctas = self.order_of(self.variant, call)
        assert num_ctas % self.ctas == 0
        self.num_clusters = num_ctas // self.ctas
        x = SimpleNamespace(order=order, scalars=scalars)
        found = []
        for cluster in range(self.num_clusters):
            self.cluster = cluster
            tiles: list[tuple[int, int]] = []
            while (tile := self.tile_at(self.variant, x, len(tiles))).is_valid:
                tiles.append((tile.head, tile.block))
            found.append(tiles)
        return found


def assert_waits_end(made, lists, heads, num_kv_blocks, group=1):
    """Each tile is there once; the key blocks of its head for which it waits, the later ones where
    steps ascend, are tiles of clusters of lower numbers or earlier tiles of its own."""
    place = {tile: (c, slot) for c, tiles in enumerate(lists) for slot, tile in enumerate(tiles)}
    assert len(place) == sum(map(len, lists)) == heads * num_kv_blocks
    for (head, block), (cluster, slot) in place.items():
        neighbour = block + 1 if made.ascends(group, slot) else block - 1
        if 0 <= neighbour < num_kv_blocks:
            # That of the neighbour waits for the others in its turn, in the same direction.
            before = place[head, neighbour]
            assert made.ascends(group, before[1]) == made.ascends(group, slot)
            assert before[0] < cluster or before == (cluster, slot - 1)


def check_random_shapes():
    for family in FAMILIES:
        for mask in MASK_CLASSES:
            draw = random.Random(mask)
            with pytest.MonkeyPatch.context() as monkeypatch:
                made = Grid(monkeypatch, family, mask)
                for _ in range(40):
                    num_sms, heads = draw.randint(1, 9), draw.randint(1, 4)
                    num_kv_blocks, splits = draw.randint(1, 14), draw.choice((1, 1, 2))
                    group = splits * draw.choice((1, 2))
                    lists = made.lists(num_sms, heads, num_kv_blocks, splits, group)
                    assert_waits_end(made, lists, heads * splits, num_kv_blocks, group)


def check_idle():
    for family in FAMILIES:
        for mask in ("full", "causal"):
            with pytest.MonkeyPatch.context() as monkeypatch:
                made = Grid(monkeypatch, family, mask)
                clusters = 64 // made.ctas
                # Of 64: one head, or two, a round; then too many or too long ones for rounds.
                for num_kv_blocks, wanted in (
                    (clusters, clusters),
                    (clusters * 7 // 16, clusters * 7 // 8),
                    (clusters * 7 // 8 - 1, 3 * (clusters * 7 // 8 - 1)),
                    (clusters + 1, 3 * (clusters + 1)),
                ):
                    lists = made.lists(64, 3, num_kv_blocks)
                    assert len(lists) == wanted
                    assert_waits_end(made, lists, 3, num_kv_blocks)


def check_balance():
    for family in FAMILIES:
        with pytest.MonkeyPatch.context() as monkeypatch:
            made = Grid(monkeypatch, family, "causal")
            clusters = 64 // made.ctas
            lists = made.lists(64, 8, clusters // 2)
            assert {len(tiles) for tiles in lists} == {4}
            assert len({sum(block for _, block in tiles) for tiles in lists}) == 1


def check_bands():
    from jax_fa.kernels.backward_work import TILES_IN_TURN

    for family in FAMILIES:
        with pytest.MonkeyPatch.context() as monkeypatch:
            made = Grid(monkeypatch, family, "causal")
            clusters = 132 // made.ctas
            heads = [head for ((head, _),) in made.lists(132, 64, 40, group=4)]
            for first in range(len(heads) - clusters):
                together = Counter(heads[first : first + clusters])
                assert max(together.values()) <= TILES_IN_TURN + 1


def check_bias():
    """CTAs of a round have few heads where no two read the same bias and no tile is shorter."""
    for family in FAMILIES:
        with pytest.MonkeyPatch.context() as monkeypatch:
            made = Grid(monkeypatch, family, "general", has_bias=True)
            bias = SimpleNamespace(batch=1, heads=64, rows=1000)
            clusters = 128 // made.ctas

            def heads_of_round(bias, leaves_blocks_out, made=made, clusters=clusters):
                lists = made.lists(132, 64, 8, bias=bias, leaves_blocks_out=leaves_blocks_out)
                return len({head for ((head, _),) in lists[:clusters]})

            least, most = clusters // 8, 2 * clusters // 8
            assert heads_of_round(bias, False) == least
            assert heads_of_round(bias, True) == most
            assert len(made.lists(made.ctas, 64, 8, bias=bias, leaves_blocks_out=False)) == 512
            for shared in ("heads", "rows"):
                assert heads_of_round(SimpleNamespace(**vars(bias) | {shared: 1}), False) == most


def check_claims():
    """Numbers from 0 on are all tiles, each once; in a band of heads, the longest come first."""
    from jax_fa.kernels import backward_work, tiles

    draw = random.Random(0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        Grid(monkeypatch, "sm90", "causal")
        for _ in range(300):
            batch, heads, blocks = (draw.randint(1, most) for most in (5, 9, 12))
            size, num_ctas = draw.choice((1 << 18, 1 << 23, 1 << 26)), draw.randint(1, 40)
            order = tiles.make_order(batch * heads, heads, 1, blocks, size, num_ctas)
            total = batch * heads * blocks
            claimed = [backward_work.tile_of_number(order, 0, number) for number in range(total)]
            assert len({(x.batch, x.head, x.block) for x in claimed}) == total
            assert all(x.is_valid for x in claimed)
            assert not backward_work.tile_of_number(order, 0, total).is_valid
            band = [x.block for x in claimed[: order.heads_per_band * blocks]]
            assert band == sorted(band)


def in_own_process(check):
    # Where the DSL compiled these functions before, they are no longer those of ints.
    folder = str(Path(__file__).parent)
    in_new_process(
        f"import sys, warnings; sys.path.insert(0, {folder!r}); warnings.simplefilter('ignore')\n"
        f"import test_backward_order; test_backward_order.{check}()"
    )


def test_no_tile_waits_for_a_cluster_that_may_not_have_started():
    in_own_process("check_random_shapes")


def test_every_tile_is_claimed_once():
    in_own_process("check_claims")


def test_rounds_of_whole_heads_leave_few_clusters_idle():
    """Elsewhere each tile has a cluster."""
    in_own_process("check_idle")


def test_who_had_the_longest_tile_has_the_shortest_in_the_next_round():
    in_own_process("check_balance")


def test_where_steps_descend_few_key_blocks_of_a_head_are_under_way_at_a_time():
    in_own_process("check_bands")


def test_a_bias_that_is_read_once_makes_bands_of_one_round():
    in_own_process("check_bias")
