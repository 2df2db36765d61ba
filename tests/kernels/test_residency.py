"""GPUs that do not hold all CTAs of a launch at a time, as beside the kernels of others."""

from dataclasses import replace

import pytest
from helpers.cases import Case
from helpers.harness import data, inputs_for, wanted
from helpers.oracle import Results, assert_close

from jax_fa.runtime import bindings
from jax_fa.runtime.dispatch import Emulation
from jax_fa.runtime.emulation import Call, execute
from jax_fa.spec.problem import Problem
from jax_fa.spec.variants import BY_NAME

CLUSTERS = 2
DEEP = {
    "bwd_sm90_bf16_d64_full": 1,
    "bwd_sm90_bf16_d128_full": 1,
    "bwd_sm100_bf16_d64_full": 1,
    "bwd_sm100_bf16_d128_full": 2,
}
"""Variants, and CTAs of a cluster."""


@pytest.mark.parametrize("resident", [1, CLUSTERS])
@pytest.mark.parametrize("name", DEEP)
def test_a_head_of_more_key_blocks_than_clusters_waits_for_none_that_cannot_start(name, resident):
    """Deterministic, full: three key blocks that wait for each other, on two clusters."""
    if name not in bindings.compiled():
        pytest.skip(f"this build lacks {name}")
    variant, ctas = BY_NAME[name], DEEP[name]
    size = variant.key.head_dim
    case = Case("deep", q_len=70, kv_len=300 * ctas, heads=1, kv_heads=1, head_dim=size)
    semantics = replace(case.semantics, deterministic=True)
    problem = Problem.of(data(case, "bfloat16").operands, semantics)
    settings = Emulation(variant.arch, num_sms=CLUSTERS * ctas, resident=resident)
    results, _ = execute(Call("bwd", problem, settings), inputs_for(variant, case))
    got = Results(**{**dict.fromkeys(Results._fields), **results})
    assert_close(got, wanted(case, "bfloat16"), "bfloat16")
