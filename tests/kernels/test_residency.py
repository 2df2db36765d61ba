"""GPUs that do not hold all CTAs of a launch at a time, as beside the kernels of others."""

from dataclasses import replace
from typing import Any

import jax
import pytest
from helpers.cases import Case
from helpers.harness import data, inputs_for, wanted
from helpers.oracle import Results, assert_close

from jax_fa.emulator import Launch
from jax_fa.runtime import bindings
from jax_fa.runtime.dispatch import Emulation
from jax_fa.runtime.emulation import Call, execute
from jax_fa.spec.config import choose_forward
from jax_fa.spec.problem import Operands, Problem
from jax_fa.spec.variants import BY_NAME

CLUSTERS = 2
DEEP = {
    "bwd_sm90_bf16_d64_causal": 1,
    "bwd_sm90_bf16_d64_full": 1,
    "bwd_sm90_bf16_d128_full": 1,
    "bwd_sm100_bf16_d64_causal": 1,
    "bwd_sm100_bf16_d64_full": 1,
    "bwd_sm100_bf16_d128_full": 2,
}
"""Variants, and CTAs of a cluster."""


def check_in_turns(name, case, resident):
    """A deterministic backward gives right gradients with so many clusters held at a time."""
    variant = BY_NAME[name]
    semantics = replace(case.semantics, deterministic=True)
    problem = Problem.of(data(case, "bfloat16").operands, semantics)
    settings = Emulation(variant.arch, num_sms=CLUSTERS * DEEP[name], resident=resident)
    results, _ = execute(Call("bwd", problem, settings), inputs_for(variant, case))
    got = Results(**{**dict.fromkeys(Results._fields), **results})
    assert_close(got, wanted(case, "bfloat16"), "bfloat16")


@pytest.mark.parametrize("resident", [1, CLUSTERS])
@pytest.mark.parametrize("name", DEEP)
def test_a_head_of_more_key_blocks_than_clusters_waits_for_none_that_cannot_start(name, resident):
    """Deterministic: three key blocks that wait for each other, on two clusters.

    With a full mask, the first waits for the others; with a causal one, where a key/value head has
    two query heads, the last does.
    """
    if name not in bindings.compiled():
        pytest.skip(f"this build lacks {name}")
    key, ctas = BY_NAME[name].key, DEEP[name]
    size, is_causal = key.head_dim, key.mask == "causal"
    case = Case("deep", q_len=70, kv_len=300 * ctas, heads=1, kv_heads=1, head_dim=size)
    if is_causal:
        case = replace(case, q_len=300, heads=2, is_causal=True)
    check_in_turns(name, case, resident)


@pytest.mark.parametrize("resident", [1, CLUSTERS])
@pytest.mark.parametrize("name", [name for name in DEEP if BY_NAME[name].key.mask == "causal"])
def test_rounds_of_whole_heads_wait_for_none_that_cannot_start(name, resident):
    """Deterministic: three heads of two key blocks, on two clusters. The last block comes first in
    the first and third round, the first in the second."""
    if name not in bindings.compiled():
        pytest.skip(f"this build lacks {name}")
    key, ctas = BY_NAME[name].key, DEEP[name]
    case = Case("rounds", q_len=300, kv_len=250 * ctas, heads=3, kv_heads=3, is_causal=True)
    case = replace(case, head_dim=key.head_dim)
    check_in_turns(name, case, resident)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize(("length", "is_long"), [(65408, False), (65536, True)])
def test_tiles_over_many_keys_have_a_cta_each(length, is_long, mask):
    """So that an exchange between devices beside the kernel need not wait for its end."""
    name = f"fwd_sm90_bf16_d64_{mask}"
    if name not in bindings.compiled():
        pytest.skip(f"this build lacks {name}")
    array = jax.ShapeDtypeStruct((1, length, 2, 64), "bfloat16")
    semantics = Case("long", is_causal=mask == "causal").semantics
    problem = Problem.of(Operands(array, array, array), semantics)
    names = ("q", "k", "v", "out", "lse")
    addresses: dict[str, Any] = {name: (i + 1) << 32 for i, name in enumerate(names)}
    fields = {**addresses, "kernel": name.removeprefix("fwd_sm90_"), "num_splits": 1}
    recorded = bindings.record("fwd", problem, Emulation("sm90", num_sms=CLUSTERS), fields)
    (launch,) = map(Launch.from_record, recorded["launches"])
    tiles = 2 * -(-length // choose_forward(BY_NAME[name].key).block_q)
    assert launch.grid[0] == (tiles if is_long else CLUSTERS)
