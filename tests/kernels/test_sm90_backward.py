"""dQ of the Hopper backward on its way through shared memory: single faults, each of them found.

Not among them: a missing barrier of the lanes of a warp, which the emulator runs in step; a turn
passed on before the sums have the block, which changes no bit in the orders that it runs CTAs in.
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
    """One edit of the PTX: of the matches of ``old``, ``times`` in all, number ``which``."""

    name: str
    old: str
    new: str
    error: type[Exception]
    message: str
    which: int = 0
    times: int = 1


READ = r"cp\.async\.bulk\.wait_group\.read\s+0;"
ADDED = r"cp\.async\.bulk\.wait_group\s+0;"
"""Of both, the first is of a deterministic run."""

FAULTS = (
    Fault(
        "a part is staged where the one before is still read",
        READ,
        "",
        AsyncHazardError,
        r"is overwritten while the bulk reduction of 4096 bytes .* may still read it",
        *(1, 2),
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
        ADDED,
        "",
        EmulationError,
        r"exits",
        *(1, 2),
    ),
    Fault(
        "a part is added in the place of the next warp's",
        r"(cp\.reduce\.async\.bulk\.\S+ \[%rd\d+)\](?=, \[%r\d+\], 4096;)",
        r"\1+4096]",
        AssertionError,
        r"dq: ",
    ),
    Fault(
        "half of a part is added",
        r"(cp\.reduce\.async\.bulk[^;]*, )4096;",
        r"\g<1>2048;",
        AssertionError,
        r"dq: ",
    ),
)


FAULTS_OF_TURNS = (
    Fault(
        "a block is staged where the one before is still read",
        READ,
        "",
        AsyncHazardError,
        r"is overwritten while the bulk reduction of 32768 bytes .* may still read it",
        *(0, 2),
    ),
    Fault(
        "a block is staged without asking",
        r"bar\.sync\s+3, 288;(?=\s+st\.shared)",
        "bar.arrive 3, 288;",
        EmulationError,
        r"overwritten|never written|race",
    ),
    Fault(
        "a block is added without a fence between proxies",
        r"fence\.proxy\.async\S*;(?=[^;]*bar\.arrive\s+4, 288;)",
        "",
        ProxyFenceError,
        r"the bulk reduction .* without a later fence.proxy.async",
    ),
    Fault(
        "a block is added before it is staged",
        r"bar\.sync\s+4, 288;",
        "bar.arrive 4, 288;",
        EmulationError,
        r"the bulk reduction of 32768 bytes .* never written",
    ),
    Fault(
        "half of a block is added",
        r"(cp\.reduce\.async\.bulk[^;]*, )32768;",
        r"\g<1>16384;",
        AssertionError,
        r"dq: ",
    ),
)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """The sound kernel."""
    return prebuilt(tmp_path_factory.mktemp("staged"), "sm90.bwd", KEY, choose_backward(KEY))


def find(kernel, deterministic=False, case=CASE):
    """Runs a kernel under several schedules until one finds its fault, and raises that."""
    bits = set()
    for schedule in SCHEDULES:
        got, wanted, _, sums = call(kernel, case, options=schedule, deterministic=deterministic)
        assert_close(got, wanted, KEY.dtype)
        bits.add(sums.tobytes())
    assert not deterministic or len(bits) == 1, "other bits of dQ sums on another schedule"


@pytest.mark.parametrize("deterministic", (False, True))
def test_the_kernel_without_faults_passes(kernel, deterministic):
    find(kernel, deterministic)


def replaced(ptx, fault):
    """The PTX with a fault."""
    matches = list(re.finditer(fault.old, ptx))
    assert len(matches) == fault.times, f"the PTX has {len(matches)} times {fault.old}"
    match = matches[fault.which]
    return ptx[: match.start()] + match.expand(fault.new) + ptx[match.end() :]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(kernel, fault):
    with pytest.raises(fault.error, match=fault.message):
        find(kernel._replace(ptx=replaced(kernel.ptx, fault)))


@pytest.mark.parametrize("fault", FAULTS_OF_TURNS, ids=lambda fault: fault.name)
def test_a_fault_of_a_deterministic_run_is_found(kernel, fault):
    with pytest.raises(fault.error, match=fault.message):
        find(kernel._replace(ptx=replaced(kernel.ptx, fault)), deterministic=True)
