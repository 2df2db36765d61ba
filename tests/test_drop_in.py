"""``replace_jax_nn``: code that calls jax.nn runs our kernels where they serve, else jax.nn."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_fa

ORIGINAL = jax.nn.dot_product_attention
Q, K, V = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 8))


def custom_calls(function, *arguments):
    """Names of our FFI targets in a program, as often as they stand there."""
    text = jax.jit(function).lower(*arguments).as_text()
    return text.count("jax_fa_fwd_v1"), text.count("jax_fa_bwd_v1")


def loss(q, k, v, **keywords):
    return jnp.sum(jax.nn.dot_product_attention(q, k, v, **keywords) ** 2)


@pytest.mark.parametrize("implementation", [None, "xla", "cudnn"])
def test_a_call_that_kernels_serve_runs_them_whatever_it_names(implementation):
    with jax_fa.replace_jax_nn():
        count = custom_calls(
            jax.value_and_grad(lambda *x: loss(*x, is_causal=True, implementation=implementation)),
            *(Q, K, V),
        )
        masked = custom_calls(
            jax.value_and_grad(lambda *x: loss(*x, mask=jnp.ones((16, 16), bool))), *(Q, K, V)
        )
    assert count == masked == (1, 1)


@pytest.mark.parametrize("bias", [None, jnp.sin(jnp.arange(64.0)).reshape(1, 4, 1, 16)])
@pytest.mark.parametrize("mask", [None, jnp.tril(jnp.ones((1, 1, 16, 16), bool), 3)])
def test_results_and_gradients_are_those_of_jax_nn(mask, bias):
    lengths = jnp.array([5, 16], jnp.int32)
    keywords = {"key_value_seq_lengths": lengths, "local_window_size": (16, 2), "scale": 0.3}
    keywords |= {"mask": mask, "bias": bias}
    wanted = jax.value_and_grad(loss, (0, 1, 2))(Q, K, V, **keywords)
    with jax_fa.replace_jax_nn():
        got = jax.value_and_grad(loss, (0, 1, 2))(Q, K, V, **keywords)
        out, residual = jax.nn.dot_product_attention(Q, K, V, return_residual=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, wanted)
    assert (out.shape, residual.shape) == (Q.shape, Q.shape[:3])


def test_what_no_kernel_serves_goes_to_jax_nn_as_it_is(monkeypatch):
    from jax_fa import drop_in

    given = []

    def original(*arguments, **keywords):
        given.append((arguments, keywords))
        return ORIGINAL(*arguments, **keywords)

    monkeypatch.setattr(drop_in, "_ORIGINAL", original)
    with jax_fa.replace_jax_nn():
        jax.jit(lambda s: jax.nn.dot_product_attention(Q, K, V, scale=s))(jnp.float32(0.5))
    ((_, passed),) = given
    assert passed.keys() == {"scale"}


def test_errors_are_those_of_jax_nn():
    with jax_fa.replace_jax_nn(), pytest.raises(Exception) as ours:
        jax.nn.dot_product_attention(Q, K[..., :4], V)
    with pytest.raises(Exception) as theirs:
        jax.nn.dot_product_attention(Q, K[..., :4], V)
    assert (ours.type, str(ours.value)) == (theirs.type, str(theirs.value))


def test_the_original_comes_back_also_after_an_error_and_from_within_another_block():
    with pytest.raises(RuntimeError), jax_fa.replace_jax_nn():
        assert jax.nn.dot_product_attention is not ORIGINAL
        with jax_fa.replace_jax_nn():
            pass
        assert jax.nn.dot_product_attention is not ORIGINAL
        raise RuntimeError
    assert jax.nn.dot_product_attention is ORIGINAL


def test_as_a_function_it_lasts_until_it_is_left():
    replacement = jax_fa.replace_jax_nn()
    try:
        assert custom_calls(loss, Q, K, V) == (1, 0)
    finally:
        replacement.__exit__(None, None, None)
    assert custom_calls(loss, Q, K, V) == (0, 0)


class Model(nnx.Module):
    """As a user may have written it, with no word of jax_fa."""

    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.out = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x):
        return self.out(x + self.attention(x, is_causal=True))


LENGTH = 77


@nnx.jit
def train(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def trained(x):
    """Compiled program of a step, its loss, and the parameters after it."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    text = train.lower(model, optimizer, x).compile().as_text()
    loss = train(model, optimizer, x)
    return text, (loss, jax.tree.leaves(nnx.state(model, nnx.Param)))


def kernels_and_score_matrices(text):
    """Calls of our targets, forward and backward, and arrays of LENGTH x LENGTH, compiled."""
    calls = [text.count(f'custom_call_target="jax_fa_{name}_v1"') for name in ("fwd", "bwd")]
    return *calls, len(re.findall(rf"\[(?:\d+,)*{LENGTH},{LENGTH}[],]", text))


def test_an_unmodified_nnx_model_trains_on_kernels_without_a_score_matrix():
    x = jax.random.normal(jax.random.key(1), (2, LENGTH, 32))
    their_text, wanted = trained(x)
    with jax_fa.replace_jax_nn():
        our_text, got = trained(x)
    assert kernels_and_score_matrices(our_text) == (1, 1, 0)
    forward, backward, matrices = kernels_and_score_matrices(their_text)
    assert forward == backward == 0 < matrices  # what the line before would find
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, wanted)
