"""The masks that Flax's layers build, by name and by value: kernels run, with the same result."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa import flax as named
from jax_fa import layer_masks
from jax_fa.flax import attention_fn, make_attention_fn

B, T, N = 2, 12, 2
Q, K, V = jax.random.normal(jax.random.key(0), (3, B, T, N, 8))
TOKENS = jnp.array([[5, 2, 7, 9, 1, 3, 0, 0, 0, 0, 0, 0], [0, 0, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]])
DOCUMENTS = jnp.array([[0] * 5 + [1] * 7, [3, 3, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3]])


def padding(m, tokens):
    return m.make_attention_mask(tokens > 0, tokens > 0)


# By module (Flax's or ours), tokens and documents. Those with documents have no parts by value.
MASKS = {
    "causal": lambda m, x, _: m.make_causal_mask(x),
    "causal, bool": lambda m, x, _: m.make_causal_mask(x, dtype=bool),
    "causal, extra dimension": lambda m, x, _: m.make_causal_mask(x[0], extra_batch_dims=1),
    "padding": lambda m, x, _: padding(m, x),
    "padding, one example": lambda m, x, _: m.make_attention_mask(x[0] > 0, x[1]),
    "padding of keys": lambda m, x, _: m.make_attention_mask(jnp.ones_like(x), x),
    "causal and padding": lambda m, x, _: m.combine_masks(
        m.make_causal_mask(x), None, padding(m, x), dtype=jnp.bfloat16
    ),
    "documents": lambda m, _, d: m.make_attention_mask(d, d, jnp.equal),
    "causal, padding, documents": lambda m, x, d: m.combine_masks(
        m.make_causal_mask(x), padding(m, x), m.make_attention_mask(d, d, jnp.equal)
    ),
}
BY_VALUE = {name: make for name, make in MASKS.items() if "documents" not in name}
each = pytest.mark.parametrize("make", MASKS.values(), ids=MASKS.keys())
each_by_value = pytest.mark.parametrize("make", BY_VALUE.values(), ids=BY_VALUE.keys())


def custom_calls(function, *arguments):
    text = jax.jit(function).lower(*arguments).as_text()
    return text.count("jax_fa_fwd_v1"), text.count("jax_fa_bwd_v1")


def assert_as_flax(got, mask):
    """Equal to Flax's where a row sees a key, and 0 where Flax averages all values."""
    sees = np.broadcast_to(np.asarray(mask, bool), (B, N, T, T)).any(-1)
    sees = np.swapaxes(sees, 1, 2)[..., None]
    wanted = np.where(sees, nn.dot_product_attention(Q, K, V, mask=mask), 0)
    np.testing.assert_allclose(got, wanted, atol=2e-6, rtol=2e-6)


# ------------------------------------------------------------------------------------------- named


@each
def test_named_mask_is_the_array_that_flax_makes(make):
    mask, array = make(named, TOKENS, DOCUMENTS), make(nn, TOKENS, DOCUMENTS)
    assert isinstance(mask, layer_masks.Mask)
    got = jnp.asarray(mask)
    assert (got.dtype, got.ndim) == (array.dtype, array.ndim)
    np.testing.assert_array_equal(jnp.broadcast_to(got, array.shape), array != 0)


@each
def test_named_mask_of_traced_tokens_runs_kernels(make):
    def loss(q, tokens, documents):
        out = attention_fn(q, K, V, mask=make(named, tokens, documents))
        return out.sum(), out

    step = jax.grad(loss, has_aux=True)
    assert custom_calls(step, Q, TOKENS, DOCUMENTS) == (1, 1)
    assert_as_flax(step(Q, TOKENS, DOCUMENTS)[1], make(nn, TOKENS, DOCUMENTS))


def test_named_mask_is_an_argument_of_jit_and_vmap():
    mask = MASKS["causal, padding, documents"](named, TOKENS, DOCUMENTS)
    batched = jax.jit(lambda mask: attention_fn(Q, K, V, mask=mask))(mask)
    each = jax.vmap(lambda q, k, v, mask: attention_fn(q, k, v, mask=mask))(Q, K, V, mask)
    np.testing.assert_allclose(batched, each, atol=2e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: m.make_attention_mask(DOCUMENTS, DOCUMENTS, jnp.greater_equal),
        lambda m: m.make_attention_mask(DOCUMENTS * 1.0, DOCUMENTS * 1.0, jnp.equal),
        lambda m: m.combine_masks(padding(m, TOKENS), jnp.eye(T)[None, None]),
        lambda m: m.combine_masks(
            *(m.make_attention_mask(x, x, jnp.equal) for x in (DOCUMENTS, TOKENS))
        ),
    ],
    ids=["another function", "equal floats", "with an array", "two numberings"],
)
def test_what_has_no_parts_is_the_array_of_flax(make):
    mask = make(named)
    assert isinstance(mask, jax.Array)
    np.testing.assert_array_equal(mask, make(nn))


def test_masks_of_different_ranks_are_refused_as_by_flax():
    masks = [named.make_causal_mask(TOKENS), named.make_causal_mask(TOKENS[0])]
    with pytest.raises(ValueError, match="same rank"):
        named.combine_masks(*masks)
    assert named.combine_masks(None) is None


def test_named_mask_of_another_length_is_refused():
    with pytest.raises(TypeError, match="mask should broadcast to"):
        attention_fn(Q, K, V, mask=named.make_causal_mask(TOKENS[:, :5]))


def test_largest_documents_stay_apart_from_padding():
    ids = jnp.array([2**31 - 4, 2**31 - 3, 2**31 - 3], jnp.int32)
    mask = named.combine_masks(
        named.make_attention_mask(ids, ids, jnp.equal),
        named.make_attention_mask(jnp.array([1, 1, 0]), jnp.array([1, 0, 1])),
    )
    np.testing.assert_array_equal(jnp.asarray(mask)[0], np.array([[1, 0, 0], [0, 0, 1], [0, 0, 0]]))


# ---------------------------------------------------------------------------------------- by value


@each_by_value
def test_constant_mask_is_recognised(make):
    mask = make(nn, TOKENS, DOCUMENTS)
    for given in (mask, np.asarray(mask), jnp.broadcast_to(mask, (B, N, T, T))):
        assert layer_masks.recognised(given, (B, N, T, T)) is not None
    assert custom_calls(lambda q: attention_fn(q, K, V, mask=mask), Q) == (1, 0)
    assert_as_flax(attention_fn(Q, K, V, mask=mask), mask)


def test_mask_that_differs_from_a_causal_one_in_one_entry_is_not_recognised():
    causal = np.asarray(nn.make_causal_mask(TOKENS[:1]))
    kept = []
    for at in np.ndindex(T, T):
        other = causal.copy()
        other[0, 0][at] = 1 - other[0, 0][at]
        parts = layer_masks.recognised(other, (B, N, T, T))
        if parts is not None:
            np.testing.assert_array_equal(jnp.asarray(parts), other)
            kept.append(at)
    # Without its one key the first query is padding, and so is the last key without its one query.
    assert kept == [(0, 0), (T - 1, T - 1)]


def test_mask_with_one_other_entry_runs_a_kernel_as_it_is():
    mask = nn.make_causal_mask(TOKENS[:1]).at[0, 0, 3, 7].set(1)
    assert layer_masks.recognised(mask, (B, N, T, T)) is None
    assert custom_calls(lambda q: attention_fn(q, K, V, mask=mask), Q) == (1, 0)
    assert_as_flax(attention_fn(Q, K, V, mask=mask), mask)


def test_heads_that_differ_are_not_recognised():
    causal = np.broadcast_to(np.tri(T, dtype=bool), (1, N, T, T)).copy()
    assert layer_masks.recognised(causal, (B, N, T, T)) is not None
    causal[0, 1] = True
    assert layer_masks.recognised(causal, (B, N, T, T)) is None


def test_traced_mask_is_not_recognised_and_runs_a_kernel_as_it_is():
    def layer(q, tokens):
        return attention_fn(q, K, V, mask=nn.make_causal_mask(tokens))

    assert custom_calls(layer, Q, TOKENS) == (1, 0)
    assert_as_flax(layer(Q, TOKENS), nn.make_causal_mask(TOKENS))
    trained = jax.grad(lambda q, tokens: layer(q, tokens).sum())
    assert custom_calls(trained, Q, TOKENS) == (1, 1)


def test_values_on_a_device_are_read_while_tracing_alone(monkeypatch):
    # As if the CPU were a device that one waits for.
    monkeypatch.setattr(layer_masks.checks, "at_hand", lambda _: None)
    mask = nn.make_causal_mask(TOKENS)
    seen = []

    def layer(q):
        seen.append(layer_masks.recognised(mask, (B, N, T, T)) is not None)
        return q

    layer(Q)
    jax.grad(lambda q: layer(q).sum())(Q)
    jax.jit(layer)(Q)
    assert seen == [False, False, True]


def test_large_masks_are_not_read(monkeypatch):
    monkeypatch.setattr(layer_masks, "MAX_ENTRIES", T * T - 1)
    assert layer_masks.recognised(np.tri(T), (B, N, T, T)) is None


# ------------------------------------------------------------------------------------- keys alone


@pytest.mark.parametrize("batch", [(), (1,), (B,)], ids=str)
def test_mask_of_keys_alone_runs_kernels_even_if_traced(batch):
    keys = jax.random.bernoulli(jax.random.key(1), 0.6, (*batch, 1, 1, T)).at[..., 0].set(True)

    def layer(q, keys):
        return attention_fn(q, K, V, mask=keys)

    assert custom_calls(layer, Q, keys) == (1, 0)
    assert_as_flax(layer(Q, keys), keys)


def test_step_of_decoding_runs_a_kernel():
    layer = nn.MultiHeadDotProductAttention(N, decode=True, attention_fn=attention_fn)
    x = jnp.ones((B, T, 16))
    variables = layer.init(jax.random.key(0), x)
    step = jax.jit(lambda v, x: layer.apply(v, x, mutable=["cache"]))
    assert "jax_fa_fwd_v1" in step.lower(variables, x[:, :1]).as_text()


# --------------------------------------------------------------------------- with a layer's band


def test_recognised_mask_and_window_of_the_layer_both_apply():
    band = np.tri(T, dtype=bool) & ~np.tri(T, k=-4, dtype=bool)
    own = make_attention_fn(local_window_size=(3, 3))
    for mask in (nn.make_causal_mask(TOKENS), named.make_causal_mask(TOKENS)):
        assert_as_flax(own(Q, K, V, mask=mask), band[None, None])


def test_causal_mask_and_a_band_aligned_elsewhere_both_apply():
    q, mask = Q[:, :7], np.tri(7, T, dtype=bool)
    own = make_attention_fn(causal_alignment="bottom_right", local_window_size=(4, 4))
    assert custom_calls(lambda q: own(q, K, V, mask=mask), q) == (1, 0)
    distance = np.arange(7)[:, None] + T - 7 - np.arange(T)
    both = mask & (abs(distance) <= 4)
    sees = both.any(-1)[None, :, None, None]
    wanted = np.where(sees, nn.dot_product_attention(q, K, V, mask=both[None, None]), 0)
    np.testing.assert_allclose(own(q, K, V, mask=mask), wanted, atol=2e-6)
