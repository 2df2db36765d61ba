"""Which problems run kernels in which the tensor core adds the bias."""

from dataclasses import replace

import pytest

from jax_fa.spec import variants
from jax_fa.spec.arch import ARCHS, arch_named
from jax_fa.spec.band import Band
from jax_fa.spec.problem import Problem, Semantics

EXTENTS = {"bias_batch": 2, "bias_heads": 4, "bias_rows": 96, "bias_keys": 96}
PAIR = Problem(
    "bfloat16", 2, 2, 96, 96, 4, 4, 64, 64, semantics=Semantics(0.125), bias_bytes=2, **EXTENTS
)


def names(problem, operation="fwd"):
    """The kernels that serve a problem on Hopper, the fastest first."""
    return [
        f"{key.mask}{'_product' if key.multiplies_bias else ''}"
        for key in variants.serving(problem, operation)
        if (key.head_dim, key.value_dim) == (64, 64)
    ]


@pytest.mark.parametrize(
    ("fields", "mask"),
    [
        ({}, "full"),
        ({"semantics": Semantics(0.125, Band(is_causal=True))}, "causal"),
        ({"head_dim": 32, "value_dim": 32, "semantics": Semantics(32**-0.5)}, "full"),
        ({"dtype": "float16"}, "full"),
        ({"bias_batch": 1, "bias_heads": 1, "bias_rows": 1}, "full"),
        ({"kv_len": 104, "bias_keys": 104}, "full"),
    ],
)
def test_products_add_a_bias_that_tma_reads(fields, mask):
    problem = replace(PAIR, **fields)
    assert names(problem) == names(problem, "bwd") == [f"{mask}_product", "general"]
    assert names(problem, "dbias") == ["general_product", "general"]


@pytest.mark.parametrize(
    "fields",
    [
        {"bias_bytes": 4},
        {"bias_keys": 1},
        {"kv_len": 100, "bias_keys": 100},
        {"semantics": Semantics(0.125, soft_cap=30.0)},
        {"semantics": Semantics(0.125, Band(is_causal=True, left=50))},
        {"semantics": Semantics(8.0)},
        {"semantics": Semantics(2.0**-11)},
        {"present": ("kv_lengths",)},
    ],
)
def test_others_are_added_by_elements(fields):
    problem = replace(PAIR, **fields)
    assert names(problem) == names(problem, "bwd") == names(problem, "dbias") == ["general"]


def test_a_gradient_that_many_pairs_share_is_that_of_elements():
    shared = {"bias_batch": 1, "bias_heads": 1}
    assert names(replace(PAIR, batch=4, **shared), "dbias") == ["general_product", "general"]
    assert names(replace(PAIR, batch=5, **shared), "dbias") == ["general"]


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_only_hopper_multiplies(arch):
    found = variants.find(PAIR, arch)
    assert found.key.multiplies_bias == (arch.name == "sm90")


def test_without_its_kernel_the_bias_is_added_by_elements():
    held = {name for name, v in variants.BY_NAME.items() if not v.key.multiplies_bias}
    found = variants.find(PAIR, arch_named("sm90"), compiled=held)
    assert found.name == "fwd_sm90_bf16_d64_general_bias"


def test_products_of_larger_heads_are_not_compiled():
    assert not variants.find(replace(PAIR, head_dim=128), arch_named("sm90")).key.multiplies_bias
