"""Early statistics and elected lanes of the Hopper backward: single faults, each of them found."""

import dataclasses

import pytest
from helpers.cases import Case
from helpers.recording import build, needs_compiler, needs_dsl, prebuilt
from test_sm90_backward import find

from jax_fa.emulator import EmulationError
from jax_fa.kernels.sm90 import plan_bwd
from jax_fa.spec.config import choose_backward
from jax_fa.spec.key import KernelKey

pytestmark = [
    needs_dsl,
    needs_compiler,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # of the DSL, within the DSL
]

KEY = KernelKey("sm_90a", "bfloat16", 64, 64, "general")
CASE = Case("early", q_len=600, kv_len=200, heads=2, head_dim=64, kv_lengths=(170,))
"""More blocks of queries than stages, and keys that are masked."""


def queries_are_kept(bwd_roles, *_):
    """Load waits for a stage that nobody gives back."""
    right = bwd_roles.release

    def wrong(variant, data, full):
        if data != "q":
            right(variant, data, full)

    return {"release": wrong}


def every_lane_gives_queries_back(bwd_roles, cute, *_):
    """One lane of a warp does for all of them."""
    right = bwd_roles.release

    def wrong(variant, data, full):
        if data != "q":
            right(variant, data, full)
        else:
            barrier = full.get_origin().sync_object_empty.get_barrier(full.index)
            cute.arch.mbarrier_arrive(barrier)

    return {"release": wrong}


def early_pairs_are_of_the_next_queries(bwd_roles, cute, *_):
    """They begin a group too late."""
    right = bwd_roles.loaded_early
    return {"loaded_early": lambda *at: right(*at[:2], cute.domain_offset((8,), at[2]))}


FAULTS = (
    (queries_are_kept, EmulationError),
    (every_lane_gives_queries_back, EmulationError),
    (early_pairs_are_of_the_next_queries, AssertionError),
)


def test_the_kernel_with_early_statistics_passes(tmp_path):
    config = choose_backward(KEY)
    assert config.early_statistics > 0 and config.elects
    find(prebuilt(tmp_path, "sm90.bwd", KEY, config), case=CASE)


@pytest.mark.parametrize(("fault", "error"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_fault_of_early_statistics_is_found(tmp_path, monkeypatch, fault, error):
    from cutlass import cute

    from jax_fa.kernels.sm90 import bwd_roles

    for name, wrong in fault(bwd_roles, cute).items():
        monkeypatch.setattr(bwd_roles, name, wrong)
    config = choose_backward(KEY)
    built = build(tmp_path, "sm90.bwd", KEY, config, fault.__name__)
    with pytest.raises(error):
        find(built, case=CASE)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"elects": ("q", "k")}, r"not of \('q', 'k'\)"),
        ({"loads_statistics": True}, "early only where"),
        ({"rounds_slope": True}, "early only where"),
        ({"is_lean": True}, "early only where"),
    ),
)
def test_a_plan_that_contradicts_itself_is_refused(change, message):
    config = dataclasses.replace(choose_backward(KEY), **change)
    with pytest.raises(plan_bwd.PlanError, match=message):
        plan_bwd.backward_plan(KEY, config)


@pytest.mark.parametrize("change", ({"has_soft_cap": True}, {"has_bias": True}))
def test_statistics_are_not_early_where_there_may_be_a_cap(change):
    key, config = dataclasses.replace(KEY, **change), choose_backward(KEY)
    with pytest.raises(plan_bwd.PlanError, match="early only where"):
        plan_bwd.backward_plan(key, config)
