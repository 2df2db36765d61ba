"""Tiles that the Hopper backward claims: single faults, each of them found.

Not among them: a missing barrier of the lanes of a warp, which the emulator runs in step; a tile
that is claimed early, which is only slower.
"""

from dataclasses import replace

import pytest
from helpers.cases import Case
from helpers.oracle import assert_close
from helpers.recording import build, needs_compiler, needs_dsl, prebuilt
from test_sm90_backward import SCHEDULES
from test_sm100_backward import call

from jax_fa.emulator import EmulationError
from jax_fa.emulator.faults import DeadlockError, UninitializedReadError
from jax_fa.spec.backward_division import SCRATCH_BLOCK, scratch_rows
from jax_fa.spec.config import choose_backward
from jax_fa.spec.key import KernelKey

pytestmark = [
    needs_dsl,
    needs_compiler,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # of the DSL, within the DSL
]

GENERAL = KernelKey("sm_90a", "bfloat16", 96, 96, "general")
CAUSAL = KernelKey("sm_90a", "bfloat16", 64, 64, "causal")
CASES = {
    GENERAL: Case("window", 1, 200, 450, heads=4, kv_heads=2, head_dim=96, window=(90, 40)),
    CAUSAL: Case("causal", q_len=300, kv_len=400, heads=3, kv_heads=3, is_causal=True),
}
"""Eight and twelve tiles, on two CTAs."""


def find(built, key, cases=CASES):
    """Runs a kernel under several schedules until one finds its fault, and raises that."""
    for schedule in SCHEDULES:
        got, wanted, *_ = call(built, cases[key], options=schedule)
        assert_close(got, wanted, key.dtype)


@pytest.mark.parametrize("key", CASES, ids=lambda key: key.mask)
def test_the_kernel_without_faults_passes(tmp_path, key):
    find(prebuilt(tmp_path, "sm90.bwd", key, choose_backward(key)), key)


def nobody_waits_for_a_tile(claims, rings):
    """Roles read words that are yet to be written."""
    return {(rings, "await_item"): lambda ring, number: None}


def nobody_gives_a_tile_back(claims, rings):
    """Claim waits for ever."""
    return {(rings, "give_back"): lambda ring, number: None}


def claim_does_not_wait_for_its_place(claims, rings):
    """Words are written over while roles read them."""
    return {(rings, "await_place"): lambda ring, number: None}


def turns_of_the_ring_are_taken_for_each_other(claims, rings):
    """The parity of the other turn."""
    right = rings.state_at
    return {(rings, "state_at"): lambda ring, number: right(ring, number + ring.num_stages)}


def the_counter_is_elsewhere(claims, rings):
    """Claims are counted where nothing has been cleared."""
    right = claims.claims_of
    return {(claims, "claims_of"): lambda scratch: right(scratch) - 1}


def a_tile_is_left_out(claims, rings):
    """The first number is 1."""
    right = claims.take_number
    return {(claims, "take_number"): lambda x: right(x) + 1}


def every_tile_has_the_number_of_its_slot(claims, rings):
    """All CTAs work on the same tiles, and add twice to dQ."""
    right = claims.tile_of_number
    return {(claims, "tile_of_number"): lambda order, slot, number: right(order, slot, slot)}


def the_next_tile_is_never_called_for(claims, rings):
    """Claim waits for ever."""
    return {(claims, "call_next"): lambda variant, x, work, left: None}


FAULTS = (
    (nobody_waits_for_a_tile, UninitializedReadError),
    (nobody_gives_a_tile_back, DeadlockError),
    (claim_does_not_wait_for_its_place, (AssertionError, EmulationError)),
    (turns_of_the_ring_are_taken_for_each_other, (UninitializedReadError, DeadlockError)),
    (the_counter_is_elsewhere, (AssertionError, EmulationError)),
    (a_tile_is_left_out, AssertionError),
    (every_tile_has_the_number_of_its_slot, (AssertionError, EmulationError)),
    (the_next_tile_is_never_called_for, DeadlockError),
)


@pytest.mark.parametrize("key", CASES, ids=lambda key: key.mask)
@pytest.mark.parametrize(("fault", "error"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_fault_is_found(tmp_path, monkeypatch, key, fault, error):
    from jax_fa.kernels import rings
    from jax_fa.kernels.sm90 import bwd_claims

    for (module, name), wrong in fault(bwd_claims, rings).items():
        monkeypatch.setattr(module, name, wrong)
    built = build(tmp_path, "sm90.bwd", key, choose_backward(key), fault.__name__)
    with pytest.raises(error):
        find(built, key)


@pytest.mark.parametrize("resident", [1, 2])
@pytest.mark.parametrize("key", CASES, ids=lambda key: key.mask)
def test_few_ctas_at_a_time_share_all_tiles(tmp_path, key, resident):
    """No CTA waits for another."""
    built = prebuilt(tmp_path, "sm90.bwd", key, choose_backward(key))
    for schedule in SCHEDULES:
        options = replace(schedule, resident=resident)
        got, wanted, *_ = call(built, CASES[key], num_sms=3, options=options)
        assert_close(got, wanted, key.dtype)


@pytest.mark.parametrize("block_q", [64, SCRATCH_BLOCK])
def test_the_counter_is_behind_the_rows_of_all_sequences(block_q):
    """It is in the last row: where sequence m begins, ``scratch_rows`` says."""
    for lengths in ([1], [64], [65], [128], [129], [1, 1, 1], [127, 1, 128], [5, 0, 300], [64] * 7):
        rows = scratch_rows(1, len(lengths), sum(lengths))
        for m, length in enumerate(lengths):
            first = (sum(lengths[:m]) // block_q + m) * block_q
            assert first + -(-length // block_q) * block_q < rows
