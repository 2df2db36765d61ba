"""What targets have in common: the text of kernels that have the same configuration."""

from dataclasses import replace

import pytest
from helpers.recording import needs_compiler, needs_dsl, prebuilt
from helpers.texts import first_difference, kernels, without_names

from jax_fa.aot import compiler
from jax_fa.spec.arch import ARCHS, KINDS, OPERATIONS
from jax_fa.spec.variants import VARIANTS

FIRST = {(v.arch, v.kind, v.operation): v for v in reversed(VARIANTS)}
"""A variant of each kind and operation of a family, of heads that no family has for itself."""
BORROWED = [
    (arch, FIRST[key])
    for arch in ARCHS
    for kind in KINDS
    for operation in OPERATIONS
    if arch.lender(kind) is not arch and (key := (arch.lender(kind).name, kind, operation)) in FIRST
]


@needs_dsl
@needs_compiler
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of the DSL, within the DSL
@pytest.mark.parametrize(
    ("arch", "variant"), BORROWED, ids=[f"{arch.name}-{variant.name}" for arch, variant in BORROWED]
)
def test_an_architecture_borrows_the_text_that_it_would_compile(arch, variant, tmp_path):
    """The compiler makes the same decisions for both targets, of one kernel for all of them."""
    texts = []
    for target in (variant.key.arch, arch.target):
        own = replace(variant, key=replace(variant.key, arch=target))
        folder = tmp_path / target
        folder.mkdir()
        made = prebuilt(folder, variant.module, own.key, compiler.choose_config(own), target)
        assert f".target {target}" in made.ptx
        texts.append(without_names(made.ptx))
    assert not first_difference(*texts)


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
