"""``jax_fa.equinox``: Equinox's layers on our kernels, against the same layers as they were."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

eqx = pytest.importorskip("equinox")

from jax_fa.equinox import with_kernels  # noqa: E402

HEADS, WIDTH, LENGTH = 4, 32, 29
LAYER = eqx.nn.MultiheadAttention(
    HEADS, WIDTH, qk_size=8, vo_size=16, use_query_bias=True, key=jax.random.key(0)
)
X = jax.random.normal(jax.random.key(1), (2, LENGTH, WIDTH))
CAUSAL = jnp.tri(LENGTH, dtype=bool)


def loss(layer, x, **keywords):
    return jnp.sum(jax.vmap(lambda x: layer(x, x, x, **keywords))(x) ** 2)


@pytest.mark.parametrize(
    ("properties", "keywords"),
    [({"is_causal": True}, {}), ({}, {"mask": CAUSAL})],
    ids=["property", "mask"],
)
def test_values_and_gradients_are_those_of_equinox_without_a_score_matrix(properties, keywords):
    layer = with_kernels(LAYER, **properties)
    step = eqx.filter_value_and_grad(functools.partial(loss, **keywords))
    got = step(layer, X)
    wanted = eqx.filter_value_and_grad(functools.partial(loss, mask=CAUSAL))(LAYER, X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    text = eqx.filter_jit(step).lower(layer, X).as_text()
    assert text.count("jax_fa_fwd_v1") == text.count("jax_fa_bwd_v1") == 1
    assert f"{LENGTH}x{LENGTH}x" not in text


def test_layers_are_exchanged_anywhere_in_a_model():
    model = {"first": [LAYER, eqx.nn.Linear(2, 2, key=jax.random.key(0))], "second": LAYER}
    exchanged = with_kernels(model)
    assert type(exchanged["first"][0]) is type(exchanged["second"]) is not type(LAYER)
    assert type(exchanged["first"][1]) is eqx.nn.Linear
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (model, exchanged)), strict=True))


def test_rope_and_process_heads_turn_the_same_heads():
    rope = eqx.nn.RotaryPositionalEmbedding(8)

    def turned(q, k, v):
        turn = jax.vmap(rope, 1, 1)
        return turn(q), turn(k), v

    x = X[0]
    wanted = LAYER(x, x, x, process_heads=turned)
    for got in (
        with_kernels(LAYER, rope=rope)(x, x, x),
        with_kernels(LAYER)(x, x, x, process_heads=turned),
    ):
        np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_mask_per_head_and_cross_attention_agree_with_equinox():
    mask = jax.random.bernoulli(jax.random.key(2), 0.5, (HEADS, 7, LENGTH)).at[..., 0].set(True)
    x = X[0]
    got, wanted = (layer(x[:7], x, x, mask) for layer in (with_kernels(LAYER), LAYER))
    np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_dropout_is_refused_but_for_inference():
    layer = with_kernels(
        eqx.nn.MultiheadAttention(HEADS, WIDTH, dropout_p=0.5, key=jax.random.key(0))
    )
    x = X[0]
    with pytest.raises(NotImplementedError, match="dropout_rate=0.5"):
        layer(x, x, x, key=jax.random.key(0))
    np.testing.assert_array_equal(
        layer(x, x, x, inference=True), eqx.nn.inference_mode(layer)(x, x, x)
    )
