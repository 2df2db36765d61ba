"""The Hopper backward whose accumulators take turns (``lean_step``): single faults, each found.

Not among them: an addition before its turn, which changes no bit in the orders that are run here.
"""

import pytest
from helpers.cases import Case
from helpers.recording import needs_compiler, needs_dsl, prebuilt
from test_sm90_backward import Fault, find, replaced

from jax_fa.emulator import EmulationError
from jax_fa.emulator.faults import AsyncHazardError, ProxyFenceError
from jax_fa.spec.config import choose_backward
from jax_fa.spec.key import KernelKey

pytestmark = [
    needs_dsl,
    needs_compiler,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # of the DSL, within the DSL
]

KEY = KernelKey("sm_90a", "bfloat16", 192, 128, "full")
CASE = Case("lean", q_len=200, kv_len=300, heads=2, head_dim=192, value_dim=128)
"""Four blocks of queries, the last partly used, and three of keys, on two CTAs."""

RETIRED = r"wgmma\.wait_group\.sync\.aligned\s+0;"
"""All products: S; dP; at the end of a step, dK."""
BUT_ONE = r"wgmma\.wait_group\.sync\.aligned\s+1;"
"""All but the youngest: dV, to free registers, which PTX does not show; dQ."""
TOUCHED = r"touches registers of the wgmma"

FAULTS = (
    Fault("S is read while it is computed", RETIRED, "", EmulationError, TOUCHED, *(0, 3)),
    Fault("dP is read while it is computed", RETIRED, "", EmulationError, TOUCHED, *(1, 3)),
    Fault(
        "queries are overwritten while dK may read them",
        RETIRED,
        "",
        AsyncHazardError,
        r"is overwritten by the TMA load .* may still read it",
        *(2, 3),
    ),
    Fault("dQ is added while it is computed", BUT_ONE, "", EmulationError, TOUCHED, *(1, 2)),
    Fault(
        "dS is read before all have written it",
        r"bar\.sync\s+1, 256;",
        "bar.arrive 1, 256;",
        EmulationError,
        r"the wgmma .* never written",
    ),
    Fault(
        "dS is read without a fence between proxies",
        r"fence\.proxy\.async\S*;(?=\s+bar\.sync\s+1, 256;)",
        "",
        ProxyFenceError,
        r"the wgmma .* without a later fence.proxy.async",
    ),
)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """The sound kernel."""
    return prebuilt(tmp_path_factory.mktemp("lean"), "sm90.bwd", KEY, choose_backward(KEY))


@pytest.mark.parametrize("deterministic", (False, True))
def test_the_kernel_without_faults_passes(kernel, deterministic):
    find(kernel, deterministic, CASE)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(kernel, fault):
    with pytest.raises(fault.error, match=fault.message):
        find(kernel._replace(ptx=replaced(kernel.ptx, fault)), case=CASE)
