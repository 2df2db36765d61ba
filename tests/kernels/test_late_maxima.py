"""Maxima that Hopper's forward raises late: single faults, each found (fragment_softmax.py)."""

import numpy as np
import pytest
from helpers.cases import Case, make
from helpers.oracle import assert_close, tolerance
from helpers.recording import build, needs_compiler, needs_dsl, prebuilt
from test_split_keys import run

from jax_fa.spec.config import choose_forward
from jax_fa.spec.key import KernelKey

pytestmark = [
    needs_dsl,
    needs_compiler,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # of the DSL, within the DSL
]

KEY = KernelKey("sm_90a", "bfloat16", 64, 64, "causal")
CONFIG = choose_forward(KEY)
RISING = Case("rising", q_len=300, kv_len=300, heads=1, kv_heads=1, magnitude=150.0, is_causal=True)
"""Maxima of blocks differ by more than exponents can, but for the first of a thread's two rows."""
NEARLY_EQUAL = Case(
    "nearly_equal", q_len=200, kv_len=200, heads=1, kv_heads=1, scale=2.0**-126, is_causal=True
)
"""A scale whose tolerance is infinite; the newest block is hidden from the first rows."""


def check(built, case):
    """Asserts that a kernel is right."""
    operands = make(case, KEY.dtype).operands
    operands.q[:, np.arange(case.q_len) % 16 < 8] *= 2.0**-9
    got = run(built, operands, case.semantics, num_splits=1, seed=1)
    assert_close(got, tolerance(operands, case.semantics), KEY.dtype)


@pytest.mark.parametrize("case", [RISING, NEARLY_EQUAL], ids=str)
def test_the_kernel_without_faults_passes(tmp_path, case):
    check(prebuilt(tmp_path, "sm90.fwd", KEY, CONFIG), case)


def maxima_are_hardly_ever_raised(softmax):
    """Probabilities overflow."""
    return {"RESCALE_LOG2": 1000.0}


def the_tolerance_is_infinite(softmax):
    """The first key that a row sees raises no maximum: -inf plus infinity is NaN."""
    return {"LARGEST_TOLERANCE": np.inf}


def the_first_row_stands_for_both(softmax):
    """What the second exceeds is not noticed."""
    right = softmax.exceed_maximum
    return {"exceed_maximum": lambda highest, *more: right([highest[0]] * 2, *more)}


def maxima_are_those_of_threads(softmax):
    """The threads of a row disagree."""
    return {"quad_max": lambda value: value}


def the_accumulator_does_not_shrink(softmax):
    """Its rows stay relative to the maxima before."""
    right = softmax.update

    def wrong(*given):
        return right(*given) & False

    return {"update": wrong}


def the_sum_does_not_shrink(softmax):
    """It stays relative to the maximum before."""
    right = softmax.update

    def wrong(acc, state, shrink, scale_log2):
        before = softmax.copy(state).total
        shrinks = right(acc, state, shrink, scale_log2)
        for row in range(softmax.ROWS):
            state.total[row] = state.total[row] + before[row] * (1.0 - shrink[row])
        return shrinks

    return {"update": wrong}


FAULTS = (
    (maxima_are_hardly_ever_raised, RISING),
    (the_tolerance_is_infinite, NEARLY_EQUAL),
    (the_first_row_stands_for_both, RISING),
    (maxima_are_those_of_threads, RISING),
    (the_accumulator_does_not_shrink, RISING),
    (the_sum_does_not_shrink, RISING),
)


@pytest.mark.parametrize(("fault", "case"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_fault_is_found(tmp_path, monkeypatch, fault, case):
    from jax_fa.kernels import fragment_softmax

    for name, wrong in fault(fragment_softmax).items():
        monkeypatch.setattr(fragment_softmax, name, wrong)
    built = build(tmp_path, "sm90.fwd", KEY, CONFIG, fault.__name__)
    with pytest.raises(AssertionError):
        check(built, case)
