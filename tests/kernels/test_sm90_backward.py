"""dQ of the Hopper backward on its way through shared memory: single faults, each of them found.

Not among them: a missing barrier of the lanes of a warp, which the emulator runs in step.
"""

import re
from typing import NamedTuple

import pytest
from helpers.cases import Case
from helpers.oracle import assert_close
from helpers.recording import needs_compiler, needs_dsl, prebuilt
from test_sm100_backward import call

from jax_fa.emulator import EmulationError, Options
from jax_fa.emulator.faults import AsyncHazardError, ProxyFenceError
from jax_fa.spec.config import choose_backward
from jax_fa.spec.key import KernelKey

pytestmark = [
    needs_dsl,
    needs_compiler,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # of the DSL, within the DSL
]

KEY = KernelKey("sm_90a", "bfloat16", 128, 128, "full")
CASE = Case("staged", q_len=200, kv_len=300, heads=2, head_dim=128)
"""Four blocks of queries, the last partly used, and three of keys, on two CTAs."""
SCHEDULES = tuple(
    Options(completion, starved=starved, max_segments=400_000)
    for completion, starved in (("lazy", 5), ("random", None), ("eager", 9))
)


class Fault(NamedTuple):
    """One edit of the PTX: every match of ``old``, of which there are ``times``, is replaced."""

    name: str
    old: str
    new: str
    error: type[Exception]
    message: str
    times: int = 1


FAULTS = (
    Fault(
        "a part is staged where the one before is still read",
        r"cp\.async\.bulk\.wait_group\.read\s+0;",
        "",
        AsyncHazardError,
        r"is overwritten while the bulk reduction of 4096 bytes .* may still read it",
    ),
    Fault(
        "a part is added without a fence between proxies",
        r"fence\.proxy\.async\S*;(?=\s+bar\.warp\.sync[^;]*;(?:(?!fence\.proxy)[\s\S])*?cp\.reduce)",
        "",
        ProxyFenceError,
        r"the bulk reduction .* without a later fence.proxy.async",
    ),
    Fault(
        "a CTA ends while its last parts are being added",
        r"cp\.async\.bulk\.wait_group\s+0;",
        "",
        EmulationError,
        r"exits",
    ),
    Fault(
        "a part is added in the place of the next warp's",
        r"(cp\.reduce\.async\.bulk\.\S+ \[%rd\d+)\]",
        r"\1+4096]",
        AssertionError,
        r"dq: ",
    ),
    Fault(
        "half of a part is added",
        r"(cp\.reduce\.async\.bulk[^;]*, )(%r\d+|4096);",
        r"\g<1>2048;",
        AssertionError,
        r"dq: ",
    ),
)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """The sound kernel."""
    return prebuilt(tmp_path_factory.mktemp("staged"), "sm90.bwd", KEY, choose_backward(KEY))


def find(kernel):
    """Runs a kernel under several schedules until one finds its fault, and raises that."""
    for schedule in SCHEDULES:
        got, wanted, *_ = call(kernel, CASE, options=schedule)
        assert_close(got, wanted, KEY.dtype)


def test_the_kernel_without_faults_passes(kernel):
    find(kernel)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(kernel, fault):
    ptx, count = re.subn(fault.old, fault.new, kernel.ptx)
    assert count == fault.times, f"the PTX has {count} times {fault.old}"
    with pytest.raises(fault.error, match=fault.message):
        find(kernel._replace(ptx=ptx))
