"""Heads that no kernel is compiled for run in a larger one, in the emulator: results and shapes.

``test_emulated_cases.py`` runs all cases on complete builds; here some, on whatever kernels serve.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from helpers.cases import BY_NAME
from helpers.harness import data, run, wanted
from helpers.oracle import Results, assert_close

import jax_fa
from jax_fa.runtime import bindings, emulation
from jax_fa.runtime.dispatch import Emulation
from jax_fa.spec import variants
from jax_fa.spec.arch import ARCHS
from jax_fa.spec.problem import Problem

CASE = BY_NAME["head_dim_48_of_24_segments"]


def served(case, **held):
    """Emulation of a family that this build holds all kernels for which serve ``case``."""
    problem = Problem.of(data(case, "bfloat16").operands, case.semantics)
    compiled = held.get("compiled", bindings.compiled())
    for arch in ARCHS:
        if all(variants.find(problem, arch, x, compiled) for x in ("fwd", "bwd")):
            return Emulation(arch.name)
    pytest.skip(f"this build holds no kernels for {case}")


@pytest.fixture
def executed(monkeypatch):
    """The (D, Dv) with which every kernel was run, in order."""
    runs = []

    def execute(call, inputs, real=emulation.execute):
        assert inputs["q"].shape[-1] == inputs["k"].shape[-1] == call.problem.head_dim
        assert inputs["v"].shape[-1] == call.problem.value_dim
        runs.append((call.operation, call.heads))
        return real(call, inputs)

    monkeypatch.setattr(emulation, "execute", execute)
    return runs


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("head_dim_1", (64, 64)),
        ("head_dim_8", (64, 64)),
        ("head_dim_40_sinks_causal", (64, 64)),
        ("head_dim_48_of_24_segments", (64, 64)),
        ("head_dim_72_of_96_lengths", (96, 96)),
        ("head_dim_80", (96, 96)),
        ("head_dim_160_of_128_packed", (192, 128)),
    ],
)
def test_padded_heads_keep_the_tolerance_rule(name, heads, executed):
    """Output, LSE and all gradients, with a cotangent of the LSE; their shapes are the caller's."""
    case = BY_NAME[name]
    got = run(case, data(case, "bfloat16"), served(case))
    assert_close(got, wanted(case, "bfloat16"), "bfloat16")
    x = data(case, "bfloat16").operands
    assert (got.dq.shape, got.dk.shape, got.dv.shape) == (x.q.shape, x.k.shape, x.v.shape)
    assert got.out.shape == (*x.q.shape[:3], x.v.shape[3])
    assert executed == [("fwd", heads), ("bwd", heads)]


def test_forward_and_backward_may_run_in_kernels_of_different_sizes(executed, monkeypatch):
    settings = served(CASE)
    without = {x for x in bindings.compiled() if not re.match(r"fwd_\w+_d(64|96)_", x)}
    if served(CASE, compiled=without) != settings:
        pytest.skip("this build holds no kernels of other sizes")
    monkeypatch.setattr(bindings, "compiled", lambda: frozenset(without))
    got = run(CASE, data(CASE, "bfloat16"), settings)
    assert_close(got, wanted(CASE, "bfloat16"), "bfloat16")
    assert executed == [("fwd", (128, 128)), ("bwd", (64, 64))]


def test_vmap_pads_what_it_folded(executed):
    settings = served(CASE)
    given = data(CASE, "bfloat16")
    options = CASE.options(given.operands)

    def attend(q, k, v):
        with jax_fa.emulation(settings.arch):
            return jax_fa.attention_with_lse(q, k, v, implementation="emulated", **options)

    @jax.jit
    @jax.vmap
    def step(q, k, v, dout, dlse):
        results, pull = jax.vjp(attend, q, k, v)
        return *results, *pull((dout, dlse))

    stacked = [jnp.stack([jnp.asarray(x)] * 2) for x in (*given.operands[:3], *given.cotangents)]
    got = step(*stacked)
    for row in range(2):
        assert_close(Results(*(x[row] for x in got)), wanted(CASE, "bfloat16"), "bfloat16")
    assert executed == [("fwd", (64, 64)), ("bwd", (64, 64))]


def test_explain_says_that_heads_are_padded():
    settings = served(BY_NAME["head_dim_80"])
    shape = jax.ShapeDtypeStruct((1, 64, 2, 80), jnp.bfloat16)
    with jax_fa.emulation(settings.arch):
        text = str(jax_fa.explain(shape, shape, shape, implementation="emulated"))
    assert text == (
        f"cpu: emulated (fwd_{settings.arch}_bf16_d96_full): this kernel runs in the emulator of "
        f"{settings.arch}; head sizes 80/80 run in the kernel for 96/96, padded with zeros"
    )
