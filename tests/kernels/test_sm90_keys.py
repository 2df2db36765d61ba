"""When the Hopper backward gives the keys and values of a tile back: single faults, each found."""

import pytest
from helpers.cases import Case
from helpers.recording import build, needs_compiler, needs_dsl, prebuilt
from test_sm90_claims import find

from jax_fa.emulator import EmulationError
from jax_fa.emulator.faults import DeadlockError
from jax_fa.spec.config import choose_backward
from jax_fa.spec.key import KernelKey

pytestmark = [
    needs_dsl,
    needs_compiler,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # of the DSL, within the DSL
    pytest.mark.filterwarnings("default:This static loop"),  # likewise, of heads of 192
]

FULL = KernelKey("sm_90a", "bfloat16", 64, 64, "full")
LEAN = KernelKey("sm_90a", "bfloat16", 192, 128, "causal")
CASES = {
    FULL: Case("full", q_len=300, kv_len=400, heads=3, kv_heads=3),
    LEAN: Case(
        "lean", 1, 150, 260, heads=2, kv_heads=2, head_dim=192, value_dim=128, is_causal=True
    ),
}
"""Twelve and six tiles, on two CTAs."""


@pytest.mark.parametrize("key", CASES, ids=lambda key: key.mask)
def test_the_kernel_without_faults_passes(tmp_path, key):
    find(prebuilt(tmp_path, "sm90.bwd", key, choose_backward(key)), key, CASES)


def nothing_is_given_back(give_back):
    """Load waits for ever."""
    return lambda visit, handle: None


def keys_are_given_back_with_values(give_back):
    """Those of the next tile come while dQ is yet to read these."""

    def wrong(visit, handle):
        if handle is visit.v:
            give_back(visit, handle)
            give_back(visit, visit.k)

    return wrong


FAULTS = (
    (nothing_is_given_back, DeadlockError),
    (keys_are_given_back_with_values, (AssertionError, EmulationError)),
)


@pytest.mark.parametrize("key", CASES, ids=lambda key: key.mask)
@pytest.mark.parametrize(("fault", "error"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_fault_is_found(tmp_path, monkeypatch, key, fault, error):
    from jax_fa.kernels.sm90 import bwd_roles

    monkeypatch.setattr(bwd_roles, "give_back_at_last", fault(bwd_roles.give_back_at_last))
    built = build(tmp_path, "sm90.bwd", key, choose_backward(key), fault.__name__)
    with pytest.raises(error):
        find(built, key, CASES)
