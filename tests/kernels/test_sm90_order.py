"""The order that a Hopper forward sorts blocks into: what it is, and single faults, each found.

Not among them: a missing fence between reads of costs and TMA's writes to the same place, of which
the emulator does not know that it is needed.
"""

import re

import numpy as np
import pytest
from helpers.cases import BY_NAME, Case, Dense, make, packed
from helpers.oracle import assert_close, tolerance
from helpers.recording import build, needs_compiler, needs_dsl, prebuilt
from test_sm90_lists import KEY, SCHEDULES
from test_split_keys import run

from jax_fa.emulator.faults import UninitializedReadError
from jax_fa.spec.band import ceil_div
from jax_fa.spec.config import choose_forward
from jax_fa.spec.variants import VARIANTS

pytestmark = [
    needs_dsl,
    needs_compiler,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # of the DSL, within the DSL
]

CONFIG = choose_forward(KEY)
CASE = Case("order", q_len=900, kv_len=500, heads=4, kv_heads=2, dense=Dense("blocks"))
"""Ten tiles of five blocks for each of two CTAs."""
TIES = Case("ties", q_len=900, kv_len=900, heads=1, kv_heads=1, dense=Dense("documents"))
"""Blocks that have as much to do as each other."""
SEGMENTS = BY_NAME["mask_blocks_and_segments"]
BATCHES = Case("batches", 2, 900, 900, heads=2, kv_heads=2)
NUM_BLOCKS = ceil_div(CASE.q_len, CONFIG.block_q)
LONG = ((1, 2), (2, 3))
"""For each of two batches, blocks that share a segment."""
COSTLY = (1, 3)
"""Blocks that the mask of ``blocks_in_last_places`` shows most to."""


def check(built, case):
    """Asserts that a kernel is right under several schedules."""
    operands = make(case, KEY.dtype).operands
    wanted = tolerance(operands, case.semantics)
    for schedule in SCHEDULES:
        got = run(built, operands, case.semantics, num_splits=1, seed=1, options=schedule)
        assert_close(got, wanted, KEY.dtype)


def blocks_in_last_places(tmp_path, monkeypatch, name, heads=1):
    """The blocks that a kernel computes if it takes the last two places for all others."""
    built = take_last_places(tmp_path, monkeypatch, name)
    block = np.arange(CASE.q_len) // CONFIG.block_q
    shown = np.where(np.isin(block, COSTLY), 400 - block, 50 + 60 * block)
    mask = np.repeat((np.arange(CASE.kv_len) < shown[:, None])[None, None], heads, axis=1)
    words, cells = packed(mask, CASE.q_len, CASE.kv_len)
    operands = make(CASE, KEY.dtype).operands._replace(mask_words=words, mask_map=cells)
    got = run(built, operands, CASE.semantics, num_splits=1, seed=1)
    return {*block[np.isfinite(got.lse).all(axis=(0, 2))]}


def take_last_places(tmp_path, monkeypatch, name):
    """A kernel that computes no blocks but those in the last two places."""
    from jax_fa.kernels.sm90 import fwd_order

    right = fwd_order.in_order

    def wrong(x, tile):
        place = fwd_order.cutlass.max(tile.block, NUM_BLOCKS - len(COSTLY))
        return right(x, tile._replace(block=place))

    monkeypatch.setattr(fwd_order, "in_order", wrong)
    return build(tmp_path, "sm90.fwd_sorted", KEY, CONFIG, name)


def blocks_of_batches(tmp_path, monkeypatch, name, by):
    """For two batches, the blocks in the last two places by segments or by a mask: ``LONG``."""
    built = take_last_places(tmp_path, monkeypatch, name)
    block = np.arange(BATCHES.q_len) // CONFIG.block_q
    ids = np.stack([np.where(np.isin(block, costly), 5, 10 + block) for costly in LONG])
    ids, operands = ids.astype(np.int32), make(BATCHES, KEY.dtype).operands
    if by == "segments":
        operands = operands._replace(q_segments=ids, kv_segments=ids)
    else:
        mask = ids[:, None, :, None] == ids[:, None, None, :]
        words, cells = packed(mask, BATCHES.q_len, BATCHES.kv_len)
        operands = operands._replace(mask_words=words, mask_map=cells)
    got = run(built, operands, BATCHES.semantics, num_splits=1, seed=1)
    return [{*block[computed]} for computed in np.isfinite(got.lse).all(axis=2)]


@pytest.mark.parametrize("case", [CASE, TIES, SEGMENTS], ids=str)
def test_the_kernel_without_faults_passes(tmp_path, case):
    check(prebuilt(tmp_path, "sm90.fwd_sorted", KEY, CONFIG), case)


def test_blocks_with_the_most_to_do_come_last(tmp_path, monkeypatch):
    """The walk goes from the last place to the first."""
    assert blocks_in_last_places(tmp_path, monkeypatch, "sorted") == {*COSTLY}


@pytest.mark.parametrize("by", ["segments", "mask"])
def test_each_batch_has_an_order_of_its_own(tmp_path, monkeypatch, by):
    found = blocks_of_batches(tmp_path, monkeypatch, "batches", by)
    assert found == [{*blocks} for blocks in LONG]


def the_first_batch_is_counted(order):
    """A block is sorted by what that of another batch has to do."""
    right = order._share_of_cost
    return {"_share_of_cost": lambda variant, x, batch, block: right(variant, x, batch * 0, block)}


def the_order_of_the_first_batch_is_taken(order):
    """A block is in the place of that of another batch."""
    right = order.in_order

    def wrong(x, tile):
        return right(x, tile._replace(batch=tile.batch * 0))._replace(batch=tile.batch)

    return {"in_order": wrong}


BATCH_FAULTS = [the_first_batch_is_counted, the_order_of_the_first_batch_is_taken]


@pytest.mark.parametrize("by", ["segments", "mask"])
@pytest.mark.parametrize("fault", BATCH_FAULTS)
def test_the_order_of_another_batch_is_noticed(tmp_path, monkeypatch, fault, by):
    from jax_fa.kernels.sm90 import fwd_order

    for name, wrong in fault(fwd_order).items():
        monkeypatch.setattr(fwd_order, name, wrong)
    found = blocks_of_batches(tmp_path, monkeypatch, fault.__name__, by)
    assert found != [{*blocks} for blocks in LONG]


@pytest.mark.parametrize("is_by_head", [False, True])
def test_blocks_stay_in_their_places(tmp_path, monkeypatch, is_by_head):
    """Where heads have masks of their own, or blocks are more than there is room for."""
    from jax_fa.kernels.sm90 import fwd_order

    if not is_by_head:
        monkeypatch.setattr(fwd_order, "MAX_BLOCKS", NUM_BLOCKS - 1)
    heads = CASE.heads if is_by_head else 1
    found = blocks_in_last_places(tmp_path, monkeypatch, "by place", heads)
    assert found == {NUM_BLOCKS - 2, NUM_BLOCKS - 1}


def blocks_are_sorted_the_other_way(order):
    """That with the least to do comes last."""
    right = order._place
    return {"_place": lambda *at: at[-1] - 1 - right(*at)}


def the_next_block_is_counted(order):
    """A block is sorted by what another has to do."""
    right = order._shown_cells
    return {"_shown_cells": lambda *at: right(*at[:-1], at[-1] + 1)}


@pytest.mark.parametrize("fault", [blocks_are_sorted_the_other_way, the_next_block_is_counted])
def test_another_order_is_noticed(tmp_path, monkeypatch, fault):
    from jax_fa.kernels.sm90 import fwd_order

    for name, wrong in fault(fwd_order).items():
        monkeypatch.setattr(fwd_order, name, wrong)
    assert blocks_in_last_places(tmp_path, monkeypatch, fault.__name__) != {*COSTLY}


def test_ties_are_broken(tmp_path, monkeypatch):
    """All but one of the blocks that share a place are never computed."""
    from jax_fa.kernels.sm90 import fwd_order

    monkeypatch.setattr(fwd_order, "_distinct", lambda cost, block: cost)
    built = build(tmp_path, "sm90.fwd_sorted", KEY, CONFIG, "ties")
    with pytest.raises((AssertionError, UninitializedReadError)):
        check(built, TIES)


@pytest.mark.parametrize("number", [1, 2], ids=["costs", "places"])
def test_what_is_not_yet_written_is_awaited(tmp_path, number):
    """The CTA's first barrier is that of the mbarriers."""
    built = prebuilt(tmp_path, "sm90.fwd_sorted", KEY, CONFIG)
    found = list(re.finditer(r"bar\.sync\s+0;", built.ptx))[number]
    with pytest.raises(UninitializedReadError):
        check(built._replace(ptx=built.ptx[: found.start()] + built.ptx[found.end() :]), CASE)


def test_a_cta_has_a_thread_for_each_block_that_it_sorts():
    from jax_fa.kernels.sm90 import plan_sorted

    of_forward = (v for v in VARIANTS if v.module == "sm90.fwd_sorted")
    plans = [plan_sorted.sorted_plan(v.key, choose_forward(v.key)) for v in of_forward]
    sort = [plan for plan in plans if any(buffer.name == "sorted" for buffer in plan.buffers)]
    assert sort
    assert all(plan.threads >= plan_sorted.MAX_BLOCKS for plan in sort)
