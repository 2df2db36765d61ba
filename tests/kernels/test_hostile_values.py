"""Run-time integers of any value, on the compiled GPU kernels in the emulator.

The emulator raises on any access outside an array. Kernels are called with what was sent, so that
it is their own clamps that hold; ``tests/test_sequences.py`` has the other paths. ``HOSTILE_SETS``
in the environment is the number of problems a family, 150 for a thorough run.
"""

import os

import pytest
from helpers import hostile
from helpers.oracle import assert_close

from jax_fa.runtime import bindings
from jax_fa.runtime.dispatch import Emulation
from jax_fa.spec.arch import ARCHS, OPERATIONS
from jax_fa.spec.problem import Problem
from jax_fa.spec.variants import find

SETS = int(os.environ.get("HOSTILE_SETS", "20"))
FAMILIES = [arch for arch in ARCHS if arch.name in ("sm90", "sm100")]
"""The others run the sources of these, but for what sm80 and sm120 do without a bias for many
queries, which shares its clamps with the rest."""


@pytest.mark.parametrize("seed", range(SETS))
@pytest.mark.parametrize("arch", FAMILIES, ids=[arch.name for arch in FAMILIES])
def test_values_of_any_int32_stay_within_arrays_and_give_what_they_mean(arch, seed):
    given = hostile.problem(seed)
    asked = Problem.of(given.sent.operands, given.case.semantics)
    operations = OPERATIONS if asked.has_bias else OPERATIONS[:2]
    if not all(find(asked, arch, x, bindings.compiled()) for x in operations):
        pytest.skip(f"this build lacks a kernel of {arch.name}")
    emulation = Emulation(arch.name, seed=len(given.case.name))
    results = hostile.run(given.sent.operands, given, emulation)
    assert_close(results, given.wanted, "bfloat16", f"{given.case} {given.sent.operands[3:10]}")
