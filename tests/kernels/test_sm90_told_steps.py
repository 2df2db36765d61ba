"""Steps that the Hopper backward's load tells consumers of: single faults, each of them found."""

import re

import numpy as np
import pytest
import test_sm100_backward
from helpers.cases import Case, Data, Dense, make
from helpers.oracle import assert_close, tolerance
from helpers.recording import needs_compiler, needs_dsl, prebuilt
from test_sm90_backward import SCHEDULES
from test_sm100_backward import call

from jax_fa.emulator import EmulationError
from jax_fa.kernels.sm90 import plan, plan_bwd
from jax_fa.spec.config import choose_backward, choose_forward
from jax_fa.spec.key import KernelKey
from jax_fa.spec.variants import VARIANTS

pytestmark = [
    needs_dsl,
    needs_compiler,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # of the DSL, within the DSL
]

KEY = KernelKey("sm_90a", "bfloat16", 128, 128, "general")
CASES = (
    Case("rows", q_len=500, kv_len=200, heads=2, kv_heads=1, head_dim=128, window=(90, 40)),
    Case("used", 2, q_len=330, kv_len=150, heads=1, kv_heads=1, head_dim=128, q_lengths=(300, 70)),
    Case(
        "mask",
        q_len=400,
        kv_len=140,
        heads=1,
        kv_heads=1,
        head_dim=128,
        dense=Dense("random", "TS"),
    ),
)

# In patterns and in what replaces them, STEP0, STEP1 ... stand for the offsets of a step's words.
FAULTS = {
    "a step is not told": (r"st\.shared\.v4\.b32\s+\[%r\d+\+STEP0\][^;]*;", "", 1),
    "steps have fewer slots than those in work": (r"(and\.b32\s+%r\d+, %r\d+), 48;", r"\1, 16;", 7),
    "whether pairs are hidden is not told": (
        r"or\.b32(\s+%r\d+, %r\d+), %r\d+;(?=\s+st\.shared\.v4\.b32\s+\[%r\d+\+STEP0\])",
        r"or.b32\1, 0;",
        1,
    ),
    "dQ goes to another head": (
        r"ld\.shared\.v2\.b32\s+\{(%r\d+), (%r\d+)\}, (\[%r\d+\+STEP0\]);",
        r"ld.shared.v2.b32 {\1, \2}, \3; xor.b32 \2, \2, 1;",
        1,
    ),
    "masks look at another block": (
        r"(ld\.shared\.b32\s+%r\d+, \[%r\d+)\+STEP2\]",
        r"\1+STEP1]",
        2,
    ),
    "roles do not wait until barriers are made": (
        r"bar\.sync\s+0;(?=(?:(?!bar\.sync)[\s\S])*?setmaxnreg)",
        "",
        1,
    ),
}


ALL_ROWS_USED = (
    r"min\.s32(\s+%r\d+), %r\d+, 64;(?=\s+shl\.b32[^;]*;\s+or\.b32[^;]*;\s+st\.shared\.v4)",
    r"mov.b32\1, 64;",
)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """The sound kernel."""
    return prebuilt(tmp_path_factory.mktemp("told"), "sm90.bwd", KEY, choose_backward(KEY))


def with_places(pattern, ptx):
    """A pattern or replacement with the offsets of a step's words for their names."""
    # Four words at once, first for the work of a tile, at places of their own, then for a step,
    # whose slot is computed.
    first = int(re.search(r"st\.shared\.v4\.b32\s+\[%r(?!1\+)\d+\+(\d+)\]", ptx)[1])
    return re.sub(r"STEP(\d)", lambda match: str(first + 4 * int(match[1])), pattern)


def find(kernel):
    """Runs a kernel in several cases and schedules until one finds its fault, and raises that."""
    for case in CASES:
        for schedule in SCHEDULES:
            got, wanted, *_ = call(kernel, case, options=schedule)
            assert_close(got, wanted, KEY.dtype)


def test_the_kernel_without_faults_passes(kernel):
    find(kernel)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(kernel, name):
    old, new, times = FAULTS[name]
    old, new = with_places(old, kernel.ptx), with_places(new, kernel.ptx)
    faulty, found = re.subn(old, new, kernel.ptx)
    assert found == times, f"the PTX has {found} times {old}"
    with pytest.raises((AssertionError, EmulationError)):
        find(kernel._replace(ptx=faulty))


@pytest.mark.parametrize("is_faulty", (False, True))
def test_absent_rows_may_hold_anything(kernel, monkeypatch, is_faulty):
    case = CASES[1]
    monkeypatch.setattr(test_sm100_backward, "make", with_nan)
    monkeypatch.setattr(test_sm100_backward, "tolerance", lambda *_: wanted_of(case))
    ptx, found = re.subn(*ALL_ROWS_USED, kernel.ptx) if is_faulty else (kernel.ptx, 0)
    assert found == is_faulty
    got, wanted, *_ = call(kernel._replace(ptx=ptx), case)
    if is_faulty:
        with pytest.raises(AssertionError):
            assert_close(got, wanted, KEY.dtype)
    else:
        assert_close(got, wanted, KEY.dtype)


def with_nan(case, dtype):
    """The data of a case, with NaN in the rows that its sequences do not use."""
    operands, (dout, dlse) = make(case, dtype)
    q, dout = operands.q.copy(), dout.copy()
    for batch, used in enumerate(case.q_lengths):
        q[batch, used:] = dout[batch, used:] = np.nan
    return Data(operands._replace(q=q), (dout, dlse))


def wanted_of(case):
    """The results of a case, whatever the unused rows hold."""
    operands, gradients = make(case, KEY.dtype)
    return tolerance(operands, case.semantics, gradients)


def test_the_plan_has_room_for_the_work_of_a_tile():
    from jax_fa.kernels import backward_work, kept

    assert 0 <= plan_bwd.WORK_WORDS - kept.num_words(backward_work.Work) < 4


def test_slots_of_told_steps_are_a_power_of_two():
    """The place of a step is the low bits of its number."""
    variants = [v for v in VARIANTS if v.kernels == "sm90"]
    slots = [
        plan.step_slots(v.key, choose_forward(v.key)) for v in variants if v.operation == "fwd"
    ]
    slots += [plan_bwd.step_slots(choose_backward(v.key)) for v in variants if v.operation == "bwd"]
    assert {4, 8} <= set(slots)
    assert all(count & (count - 1) == 0 for count in slots), sorted(set(slots))


def test_a_list_holds_the_work_of_a_tile_but_its_validity_and_place():
    from jax_fa.kernels import forward_work, kept

    assert kept.num_words(forward_work.Work) - 2 == plan.WORK_WORDS


def test_what_is_kept_is_read_back():
    from jax_fa.kernels import kept, tiles

    span = tiles.Span(*range(8))
    assert list(kept.words_of((span, 8))) == list(range(9))
    assert kept.read(tiles.Span, iter(range(8))) == span
    assert kept.num_words(tiles.Span) == 8


def test_a_told_step_needs_as_many_stages_of_queries_as_of_ds():
    import dataclasses

    config = dataclasses.replace(choose_backward(KEY), q_stages=3)
    with pytest.raises(plan_bwd.PlanError, match="told"):
        plan_bwd.backward_plan(KEY, config)
