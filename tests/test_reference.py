"""The jnp reference against the oracle's float64 softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import BY_NAME, CASES, Case
from helpers.harness import data, on_device, wanted
from helpers.oracle import Results, assert_close, attend, tolerance

from jax_fa.runtime import reference


def reference_results(operands, semantics, cotangents):
    out, lse = reference.forward(operands, semantics)
    grads = reference.backward(operands, semantics, out, lse, *cotangents)
    sinks = None if grads.sinks is None else grads.sinks.sum(0)
    return Results(out, lse, grads.q, grads.k, grads.v, sinks)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_reference_keeps_the_tolerance_rule(case):
    given = data(case, "float32")
    step = jax.jit(reference_results, static_argnums=1)
    got = step(on_device(given.operands), case.semantics, given.cotangents)
    assert_close(got, wanted(case, "float32"), "float32")


@pytest.mark.parametrize("name", ["gqa", "everything", "packed_everything"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_reference_keeps_the_tolerance_rule(name, dtype):
    case = BY_NAME[name]
    given = data(case, dtype)
    step = jax.jit(reference_results, static_argnums=1)
    got = step(on_device(given.operands), case.semantics, given.cotangents)
    assert_close(got, wanted(case, dtype), dtype)


@pytest.mark.parametrize("name", ["everything", "packed_everything", "sinks_empty_rows"])
def test_float64_reference_is_exact_to_float64(name):
    case = BY_NAME[name]
    given = data(case, "float64")
    sinks = given.operands.sinks.astype(np.float64)
    step = jax.jit(reference_results, static_argnums=1)
    with jax.enable_x64(True):
        operands = on_device(given.operands._replace(sinks=sinks))
        got = step(operands, case.semantics, given.cotangents)
        assert got.out.dtype == got.lse.dtype == jnp.float64
    exact = attend(given.operands, case.semantics, given.cotangents)
    for name in Results._fields:
        if name != "dbias":
            of_ours, wanted = getattr(got, name), getattr(exact, name)
            np.testing.assert_allclose(of_ours, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["everything", "packed_everything", "all_rows_masked"])
def test_written_gradient_equals_automatic_differentiation(name):
    case = BY_NAME[name]
    given = data(case, "float32")

    @jax.jit
    def both(operands, cotangents):
        def forward(q, k, v, sinks):
            x = operands._replace(q=q, k=k, v=v, sinks=sinks)
            return reference.forward(x, case.semantics)

        differentiable = (operands.q, operands.k, operands.v, operands.sinks)
        (out, lse), pull = jax.vjp(forward, *differentiable)
        written = reference.backward(operands, case.semantics, out, lse, *cotangents)
        return pull(cotangents), written[:4]

    for a, b in zip(*both(on_device(given.operands), given.cotangents), strict=True):
        if b is not None:
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def masked_softmax(given, bias, mask):
    """float64 attention with a dense mask and bias, full heads, scale D ** -0.5."""
    q, k, v = (np.swapaxes(x, 1, 2).astype(np.float64) for x in given[:3])
    logits = q @ np.swapaxes(k, 2, 3) * q.shape[-1] ** -0.5 + bias
    weights = np.where(mask, np.exp(logits - logits.max(3, keepdims=True)), 0)
    return np.swapaxes(weights @ v / weights.sum(3, keepdims=True), 1, 2)


@pytest.mark.parametrize("shape", [(2, 4, 30, 40), (1, 4, 1, 40), (2, 1, 30, 1), (1, 1, 30, 40)])
def test_bias_and_mask_broadcast(shape):
    case = Case("bias", batch=2, q_len=30, kv_len=40, heads=4, kv_heads=4, head_dim=16)
    operands = data(case, "float32").operands
    rng = np.random.default_rng(1)
    bias = rng.standard_normal(shape).astype(np.float32)
    mask = rng.random(shape) < 0.6
    mask[..., 0] = True
    forward = jax.jit(reference.forward, static_argnums=1)
    out, _ = forward(on_device(operands), case.semantics, bias, mask)
    np.testing.assert_allclose(out, masked_softmax(operands, bias, mask), rtol=1e-5, atol=1e-6)


def test_tolerance_rule_rejects_small_but_wrong_results():
    """The rule itself: what it accepts and what it must not."""
    case = BY_NAME["gqa"]
    given = data(case, "bfloat16")
    bound = tolerance(given.operands, case.semantics, given.cotangents)
    assert_close(bound.rounded, bound, "bfloat16")
    for wrong in (
        bound.rounded._replace(out=bound.rounded.out * 1.02),
        bound.rounded._replace(lse=bound.rounded.lse + 1e-4),
        bound.rounded._replace(dk=np.roll(bound.rounded.dk, 1, axis=1)),
        bound.rounded._replace(out=np.where(np.arange(64) == 3, np.nan, bound.rounded.out)),
    ):
        with pytest.raises(AssertionError):
            assert_close(wrong, bound, "bfloat16")
