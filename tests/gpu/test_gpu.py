"""The shared cases, and what only a GPU can show. Run with JAX_PLATFORMS=cuda,cpu."""

import concurrent.futures
import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import BY_NAME, CASES
from helpers.harness import (
    computed,
    data,
    in_new_process,
    leave_out_small_tiles,
    on_device,
    run,
    wanted,
)
from helpers.oracle import Results, assert_close

import jax_fa
from jax_fa.runtime import bindings, vjp
from jax_fa.runtime.dispatch import choose
from jax_fa.spec.problem import Operands, Problem

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


@each_dtype
@each_case
def test_case_keeps_the_tolerance_rule_on_large_tiles(case, dtype, monkeypatch):
    """The cases are short; where there are kernels with small tiles, these run them otherwise."""
    problem = Problem.of(data(case, dtype).operands, case.semantics)
    if "_small" not in choose(problem, bindings.target("cuda"), None).kernel:
        pytest.skip("runs on no small tiles")
    leave_out_small_tiles(monkeypatch)
    assert_close(run(case, data(case, dtype), "cuda"), wanted(case, dtype), dtype)


def test_all_head_sizes_of_the_cases_are_served():
    unserved = {case.name for case in CASES if not is_served(case, "bfloat16")}
    assert unserved == {"scale_negative", "scale_zero"}


def test_padded_heads_leave_one_kernel_for_each_operation_and_no_scores():
    """In what XLA compiles: one call of a kernel forward, one backward, and no array of T x S."""
    q = jax.ShapeDtypeStruct((2, 1000, 4, 80), jnp.bfloat16)

    def loss(q, k, v):
        return jax_fa.attention(q, k, v, is_causal=True).astype(jnp.float32).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, q, q).compile()
    text = str(compiled.as_text())
    assert text.count('custom_call_target="jax_fa_fwd_v1"') == 1
    assert text.count('custom_call_target="jax_fa_bwd_v1"') == 1
    assert "1000,1000]" not in text


def test_a_mask_function_is_the_mask_that_it_says_and_no_array_of_all_pairs():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 3000, 4, 128)), jnp.bfloat16) for _ in "qkv")
    documents = jnp.asarray(np.sort(rng.integers(0, 7, (2, 3000))), jnp.int32)

    def function(batch, q_head, q_position, kv_position):
        alike = documents[batch, q_position] == documents[batch, kv_position]
        return alike & ((q_head > 1) | (kv_position <= q_position))

    def loss(q, k, v, **options):
        out = jax_fa.attention(q, k, v, deterministic=True, **options)
        return jnp.vdot(out, out, preferred_element_type=jnp.float32)

    program = jax.jit(jax.grad(lambda *qkv: loss(*qkv, mask_mod=function), (0, 1, 2)))
    compiled = program.lower(q, k, v).compile()
    places = np.ix_(np.arange(2), np.arange(4), np.arange(3000), np.arange(3000))
    mask = function(*places)
    wanted = jax.jit(jax.grad(lambda *qkv: loss(*qkv, mask=mask), (0, 1, 2)))(q, k, v)
    for a, b in zip(compiled(q, k, v), wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    # The mask is 72 MB in bool, 9 MB in words.
    assert compiled.memory_analysis().temp_size_in_bytes < 100e6


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


def test_code_that_calls_jax_nn_runs_kernels_where_it_is_replaced():
    q, k, v = (jnp.ones((2, 256, 4, 64), jnp.bfloat16) for _ in range(3))

    def loss(*qkv):
        return jnp.sum(jax.nn.dot_product_attention(*qkv, is_causal=True).astype(jnp.float32))

    with jax_fa.replace_jax_nn():
        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v).compile().as_text()
    assert "jax_fa_fwd" in program and "jax_fa_bwd" in program
    assert "256,256]" not in program


def test_explain_names_the_kernel():
    q = jax.ShapeDtypeStruct((2, 512, 8, 128), jnp.bfloat16)
    explanation = jax_fa.explain(q, q, q, is_causal=True)
    assert explanation.choice.implementation == "cuda"
    assert explanation.choice.kernel.startswith("fwd_sm")
