"""Output and LSE of every case and dtype against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import BY_NAME, CASES, DTYPES
from helpers.harness import computed, data, on_device, public, wanted
from helpers.oracle import Results, assert_close, blind_rows, side

import jax_fa
from jax_fa.runtime import primitives, sequences
from jax_fa.spec.problem import Operands

each_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.mark.parametrize("dtype", DTYPES)
@each_case
def test_output_and_lse_keep_the_tolerance_rule(case, dtype):
    got = computed(case, dtype)
    assert got.out.dtype == jnp.dtype(dtype)
    assert got.lse.dtype == jnp.float32
    assert_close(Results(got.out, got.lse), wanted(case, dtype), dtype)


@each_case
def test_public_function_gives_the_bits_of_the_internal_one(case):
    given = data(case, "float32").operands
    np.testing.assert_array_equal(public(case, given), computed(case, "float32").out)


@each_case
def test_rows_without_keys_are_exactly_zero(case):
    given = data(case, "float32").operands
    got = computed(case, "float32")
    blind = blind_rows(given, case.semantics)
    assert not np.asarray(got.out)[blind].any()
    used = side(given.q.shape[:2], given.cu_seqlens_q, given.q_lengths).used
    assert np.isneginf(np.asarray(got.lse)[~used]).all()
    if not case.has_sinks:
        assert np.isneginf(np.asarray(got.lse)[blind]).all()


def test_lse_of_a_row_without_keys_is_the_sink():
    case = BY_NAME["sinks_empty_rows"]
    given = data(case, "float32").operands
    used = side(given.q.shape[:2], None, given.q_lengths).used
    blind = blind_rows(given, case.semantics) & used[..., None]
    assert blind.any()
    lse = np.asarray(computed(case, "float32").lse)
    sinks = np.broadcast_to(given.sinks[0], lse.shape)
    np.testing.assert_allclose(lse[blind], sinks[blind], rtol=1e-6)


def test_list_of_cases_reaches_every_operand_and_every_switch():
    present = {name for case in CASES for name in data(case, "float32").operands.present}
    assert present == set(Operands._fields)
    for feature in (
        "is_causal",
        "window",
        "soft_cap",
        "has_sinks",
        "segments",
        "q_offset",
        "value_dim",
    ):
        assert any(getattr(case, feature) for case in CASES), feature
    assert {case.alignment for case in CASES} == {"top_left", "bottom_right"}


def test_attention_with_lse_gives_out_and_float32_lse():
    case = BY_NAME["everything"]
    given = data(case, "bfloat16").operands
    out, lse = jax_fa.attention_with_lse(*given[:3], **case.options(given))
    assert_close(Results(out, lse), wanted(case, "bfloat16"), "bfloat16")


def test_forward_operation_equals_attention_with_lse():
    case = BY_NAME["everything"]
    given = data(case, "float32").operands
    options = case.options(given)
    for a, b in zip(
        jax_fa.forward(*given[:3], **options),
        jax_fa.attention_with_lse(*given[:3], **options),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", [(4, 50, 50), (50,)], ids=str)
def test_backward_operation_gives_the_gradient_of_a_bias_in_its_own_form(shape):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 50, 4, 32)), jnp.float32) for _ in range(3))
    bias = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    out, lse = jax_fa.forward(q, k, v, bias=bias)
    dbias = jax_fa.backward(q, k, v, out, lse, jnp.cos(out), bias=bias)[-1]
    attend = lambda x: jnp.sum(jnp.sin(jax_fa.attention(q, k, v, x)))  # noqa: E731
    wanted = jax.grad(attend)(bias)
    assert (dbias.shape, dbias.dtype) == (shape, jnp.bfloat16)
    np.testing.assert_array_equal(dbias, wanted)


@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(0, 4, 7), (2, 0, 7), (2, 4, 0)])
def test_the_gradient_of_a_bias_of_no_pairs_is_0(batch, q_len, kv_len):
    q, k = jnp.zeros((batch, q_len, 4, 8)), jnp.zeros((batch, kv_len, 2, 8))
    bias = jnp.ones((4, 1, kv_len))
    out, lse = jax_fa.forward(q, k, k, bias=bias)
    dbias = jax_fa.backward(q, k, k, out, lse, out, bias=bias)[-1]
    np.testing.assert_array_equal(dbias, jnp.zeros_like(bias))


def test_partial_results_over_disjoint_keys_merge_by_their_lse():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 50, 4, 32)).astype(np.float32) for _ in range(3))
    halves = [jax_fa.attention_with_lse(q, k[:, a], v[:, a]) for a in (slice(0, 20), slice(20, 50))]
    (out_a, lse_a), (out_b, lse_b) = halves
    lse = jnp.logaddexp(lse_a, lse_b)
    merged = out_a * jnp.exp(lse_a - lse)[..., None] + out_b * jnp.exp(lse_b - lse)[..., None]
    out, whole = jax_fa.attention_with_lse(q, k, v)
    np.testing.assert_allclose(merged, out, atol=2e-6)
    np.testing.assert_allclose(lse, whole, atol=2e-6)


@pytest.mark.parametrize("case", [case for case in CASES if case.is_packed], ids=str)
def test_unused_slot_in_front_changes_nothing(case):
    given = data(case, "float32")
    x = sequences.with_slot_in_front(on_device(given.operands))
    assert x.num_sequences == given.operands.num_sequences + 1
    out, lse = primitives.forward(x, case.semantics)
    np.testing.assert_array_equal(out, computed(case, "float32").out)
    np.testing.assert_array_equal(lse, computed(case, "float32").lse)
    grads = primitives.backward(x, case.semantics, (out, lse), given.cotangents)
    for name in ("q", "k", "v"):
        np.testing.assert_array_equal(
            getattr(grads, name), getattr(computed(case, "float32"), "d" + name)
        )
