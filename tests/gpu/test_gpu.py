"""The shared cases, and what only a GPU can show. Run with JAX_PLATFORMS=cuda,cpu."""

import concurrent.futures
import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME, CASES
from harness import computed, data, in_new_process, on_device, run, wanted
from oracle import Results, assert_close

import jax_fa
from jax_fa import bindings, vjp
from jax_fa.choice import choose
from jax_fa.problem import Operands, Problem

if "cuda" not in os.environ.get("JAX_PLATFORMS", ""):
    pytest.skip("needs a GPU: set JAX_PLATFORMS=cuda,cpu", allow_module_level=True)

DTYPES = ("bfloat16", "float16")
each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def is_served(case, dtype):
    problem = Problem.of(data(case, dtype).operands, case.semantics)
    target = bindings.target("cuda")
    return not any(choose(problem, target, None, op).is_fallback for op in ("fwd", "bwd"))


@each_dtype
@each_case
def test_case_keeps_the_tolerance_rule_or_is_refused(case, dtype):
    if is_served(case, dtype):
        assert_close(computed(case, dtype, "cuda"), wanted(case, dtype), dtype)
        return
    with pytest.raises(NotImplementedError, match="does not serve this problem"):
        computed(case, dtype, "cuda")


def test_common_head_sizes_are_served():
    served = {case.head_dim for case in CASES if is_served(case, "bfloat16")}
    assert {64, 128} <= served


@each_case
def test_forward_gives_the_same_bits_twice(case):
    if not is_served(case, "bfloat16"):
        pytest.skip("no kernel for this case")
    first, second = (run(case, data(case, "bfloat16"), "cuda") for _ in range(2))
    np.testing.assert_array_equal(first.out, second.out)
    np.testing.assert_array_equal(first.lse, second.lse)


def test_deterministic_backward_gives_the_same_bits_twice():
    rng = np.random.default_rng(0)
    q, k, v, w = (jnp.asarray(rng.standard_normal((2, 2048, 8, 128)), jnp.bfloat16) for _ in "qkvw")

    @jax.jit
    def gradients(q, k, v):
        def loss(q, k, v):
            out = jax_fa.attention(q, k, v, is_causal=True, deterministic=True)
            return jnp.vdot(out.astype(jnp.float32), w)

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    first = gradients(q, k, v)
    for _ in range(5):
        for a, b in zip(first, gradients(q, k, v), strict=True):
            np.testing.assert_array_equal(a, b)


def _attend(case, given):
    x = on_device(given.operands)
    return jax.jit(lambda operands: vjp.attention(operands, case.semantics, "cuda")), x


def test_calls_from_several_threads_keep_apart():
    cases = [BY_NAME[name] for name in ("causal", "one_block", "two_and_a_bit_blocks")]
    assert all(is_served(case, "bfloat16") for case in cases)

    def work(i):
        case = cases[i % len(cases)]
        attend, x = _attend(case, data(case, "bfloat16"))
        return case, [np.asarray(attend(x)[0]) for _ in range(20)]

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for case, outs in pool.map(work, range(12)):
            for out in outs:
                np.testing.assert_array_equal(out, outs[0])
            assert_close(Results(outs[0], None), wanted(case, "bfloat16"), "bfloat16")


def test_command_buffer_replay_reads_fresh_inputs():
    code = """
import jax, jax.numpy as jnp, numpy as np, jax_fa
rng = np.random.default_rng(0)
def draw(): return jnp.asarray(rng.standard_normal((1, 256, 2, 128)), jnp.bfloat16)
def step(q, k, v):
    for _ in range(3):
        q = jax_fa.attention(q, k, v, is_causal=True, implementation="cuda")
    f = lambda q: jax_fa.attention(q, k, v, is_causal=True)
    return jax.grad(lambda q: f(q).astype(jnp.float32).sum())(q)
def plain(q, k, v):
    for _ in range(3):
        q = jax_fa.attention(q, k, v, is_causal=True, implementation="xla")
    f = lambda q: jax_fa.attention(q, k, v, is_causal=True, implementation="xla")
    return jax.grad(lambda q: f(q).astype(jnp.float32).sum())(q)
step, plain = jax.jit(step), jax.jit(plain)
for _ in range(6):
    a = draw(), draw(), draw()
    got, want = (np.asarray(f(*a), np.float32) for f in (step, plain))
    assert np.abs(got - want).max() <= 0.05 * np.abs(want).max() + 0.02, np.abs(got - want).max()
print("done")
"""
    flags = "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=+CUSTOM_CALL"
    assert "done" in in_new_process(code, XLA_FLAGS=flags)


def test_padding_with_nan_does_not_leak():
    case = BY_NAME["causal"]
    lengths = np.array([100], np.int32)
    padded = dataclasses.replace(case, q_lengths=(100,), kv_lengths=(100,))
    given = data(padded, "bfloat16")
    q, k, v, dout = (np.array(x) for x in (*given.operands[:3], given.cotangents[0]))
    for x in (q, k, v, dout):
        x[:, 100:] = np.nan
    operands = Operands(q, k, v, q_lengths=lengths, kv_lengths=lengths)
    got = run(
        padded, given._replace(operands=operands, cotangents=(dout, given.cotangents[1])), "cuda"
    )
    assert_close(got, wanted(padded, "bfloat16"), "bfloat16")


def test_explain_names_the_kernel():
    q = jax.ShapeDtypeStruct((2, 512, 8, 128), jnp.bfloat16)
    explanation = jax_fa.explain(q, q, q, is_causal=True)
    assert explanation.choice.implementation == "cuda"
    assert explanation.choice.kernel.startswith("fwd_sm")
