"""What targets have in common: the text of kernels that have the same configuration."""

from itertools import combinations

import pytest
from texts import first_difference, kernels, siblings, text, without_names

from jax_fa import aot, bindings
from jax_fa.variants import BY_NAME

FAMILY = ("sm100", "sm103")
"""Targets for which the compiler makes the same decisions. For sm110 it orders some loads of short
kernels otherwise (DSL 4.8.1); such variants are emulated for themselves."""
COMPILED = [BY_NAME[name] for name in sorted(bindings.compiled()) if name in BY_NAME]
PAIRS = [
    (one, other)
    for one, other in combinations([v for v in COMPILED if v.arch in FAMILY], 2)
    if siblings(one.name) == siblings(other.name)
    and aot.choose_config(one) == aot.choose_config(other)
]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda variant: variant.name)
def test_the_same_configuration_is_the_same_text(one, other):
    """Of the main kernel, the longest. Without it the suite would run both, and take longer."""
    mine, its = (max(kernels(text(variant.name)), key=len) for variant in (one, other))
    assert not first_difference(mine, its)


PTX = """
.version 8.8
.target sm_100f
.visible .entry kernel_of_sm_100f_1(
	.param .b8 kernel_of_sm_100f_1_param_0
)
.visible .entry kernel_of_sm_100f_10(
)
"""


def test_names_and_target_do_not_count():
    other = PTX.replace("sm_100f", "sm_103f")
    assert without_names(PTX) == without_names(other) != PTX
    first, second = kernels(without_names(PTX))
    assert "kernel0_param_0" in first
    assert "kernel1(" in second


def test_everything_else_counts():
    other = without_names(PTX.replace(".b8", ".b16"))
    found = first_difference(without_names(PTX), other)
    assert found == "line 5: '.param .b8 kernel0_param_0' and '.param .b16 kernel0_param_0'"
    assert first_difference(PTX, PTX) == ""
    assert "(the end)" in first_difference(PTX, PTX + "ret;")
