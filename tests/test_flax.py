"""``jax_fa.flax`` in real Flax layers, against the same layers with Flax's own attention."""

import functools
import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.harness import in_new_process

import jax_fa
from jax_fa.flax import attention_fn, make_attention_fn

FLOAT32_TOLERANCE = 2e-6
HEADS, WIDTH, LENGTH = 4, 32, 12


def inputs(*batch, length=LENGTH, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(0), (*batch, length, WIDTH), dtype)


def assert_close(got, wanted, tolerance=FLOAT32_TOLERANCE):
    assert got.dtype == wanted.dtype
    got, wanted = (np.asarray(x, np.float32) for x in (got, wanted))
    np.testing.assert_allclose(got, wanted, atol=tolerance, rtol=tolerance)


def linen_layers(own, **options):
    """(layer with Flax's attention, layer with ours)."""
    make = nn.MultiHeadDotProductAttention
    return make(num_heads=HEADS, **options), make(num_heads=HEADS, attention_fn=own, **options)


def nnx_layers(own, **options):
    make = nnx.MultiHeadAttention
    options = {"decode": False, **options}
    return tuple(
        make(HEADS, in_features=WIDTH, rngs=nnx.Rngs(0), **options, **more)
        for more in ({}, {"attention_fn": own})
    )


def causal_mask(dtype, shape=(1, 1, LENGTH, LENGTH)):
    return jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), dtype)), shape)


MASKS = {
    "none": None,
    "bool": causal_mask(bool),
    "float": causal_mask(jnp.float32),
    "per batch and head": causal_mask(bool, (2, HEADS, LENGTH, LENGTH)),
    "without batch": causal_mask(bool, (1, LENGTH, LENGTH)),
    "keys alone": (jnp.arange(LENGTH) < 7)[None, None, None],
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_linen_layer_agrees_with_flax(mask):
    x = inputs(2)
    theirs, ours = linen_layers(attention_fn)
    variables = theirs.init(jax.random.key(1), x)
    assert_close(ours.apply(variables, x, mask=mask), theirs.apply(variables, x, mask=mask))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_nnx_layer_agrees_with_flax(mask):
    theirs, ours = nnx_layers(attention_fn)
    assert_close(ours(inputs(2), mask=mask), theirs(inputs(2), mask=mask))


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (2, 3)], ids=str)
def test_mask_broadcasts_over_two_batch_dimensions(shape):
    x = inputs(2, 3)
    mask = jax.random.bernoulli(jax.random.key(2), 0.7, (*shape, 1, LENGTH, LENGTH))
    mask |= jnp.eye(LENGTH, dtype=bool)
    theirs, ours = linen_layers(attention_fn)
    variables = theirs.init(jax.random.key(1), x)
    assert_close(ours.apply(variables, x, mask=mask), theirs.apply(variables, x, mask=mask))


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (2, 1, 3)], ids=str)
def test_any_number_of_batch_dimensions(batch):
    x = inputs(*batch)
    linen = linen_layers(attention_fn)
    variables = linen[0].init(jax.random.key(1), x)
    assert_close(linen[1].apply(variables, x), linen[0].apply(variables, x))
    theirs, ours = nnx_layers(attention_fn)
    assert_close(ours(x, is_causal=True), theirs(x, is_causal=True))


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_heads_agree_with_flax(num_kv_heads):
    theirs, ours = nnx_layers(attention_fn, num_kv_heads=num_kv_heads)
    assert_close(ours(inputs(2), is_causal=True), theirs(inputs(2), is_causal=True))


def test_cross_attention_agrees_with_flax():
    theirs, ours = nnx_layers(attention_fn)
    x, memory = inputs(2), inputs(2, length=29)
    assert_close(ours(x, memory), theirs(x, memory))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_layer_dtype_is_that_of_the_computation(dtype):
    theirs, ours = nnx_layers(attention_fn, dtype=dtype)
    exact, _ = nnx_layers(attention_fn)
    got = ours(inputs(2), is_causal=True)
    assert got.dtype == dtype
    wanted = np.asarray(exact(inputs(2), is_causal=True), np.float32)
    error, reference_error = (
        np.abs(np.asarray(x, np.float32) - wanted).max()
        for x in (got, theirs(inputs(2), is_causal=True))
    )
    assert error <= 2 * reference_error


def test_dtype_argument_casts_mixed_operands():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 8))
    out = attention_fn(q, k.astype(jnp.bfloat16), v, dtype=jnp.bfloat16)
    wanted = attention_fn(*(x.astype(jnp.bfloat16) for x in (q, k, v)))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, wanted)
    assert attention_fn(q, k.astype(jnp.bfloat16), v).dtype == jnp.float32


def test_bias_agrees_with_flax():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 3, 5, 4, 8))
    bias = jax.random.normal(jax.random.key(1), (3, 4, 5, 5))
    assert_close(attention_fn(q, k, v, bias), nn.dot_product_attention(q, k, v, bias))


def test_gradients_agree_with_flax():
    theirs, ours = nnx_layers(attention_fn, num_kv_heads=2)

    def loss(layer, x):
        return (layer(x, is_causal=True) ** 2).sum()

    got, wanted = (nnx.grad(loss)(layer, inputs(2)) for layer in (ours, theirs))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert_close(a, b, 2e-5)


# ---------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize(
    "own", [attention_fn, make_attention_fn(is_causal=True)], ids=["plain", "causal"]
)
def test_linen_decoding_agrees_with_flax_step_by_step(own):
    x = inputs(2)
    theirs, ours = linen_layers(own, decode=True)
    variables = [layer.init(jax.random.key(1), x) for layer in (theirs, ours)]
    parameters = variables[0]["params"]
    caches = [v["cache"] for v in variables]
    full = linen_layers(own)[0].apply({"params": parameters}, x, mask=causal_mask(bool))
    for position in range(LENGTH):
        step, results = x[:, position : position + 1], []
        for i, layer in enumerate((theirs, ours)):
            state = {"params": parameters, "cache": caches[i]}
            out, updated = layer.apply(state, step, mutable=["cache"])
            caches[i] = updated["cache"]
            results.append(out)
        assert_close(results[1], results[0])
        assert_close(results[1], full[:, position : position + 1])


@pytest.mark.parametrize(
    "own", [attention_fn, make_attention_fn(is_causal=True)], ids=["plain", "causal"]
)
@pytest.mark.parametrize("batch", [(2,), (2, 3)], ids=str)
def test_nnx_decoding_continues_what_the_whole_sequence_gives(own, batch):
    x = inputs(*batch)
    _, ours = nnx_layers(own, num_kv_heads=2, decode=True)
    ours.init_cache(x.shape)
    full = ours(x, is_causal=True, decode=False)
    for position in range(LENGTH):
        out = ours(x[..., position : position + 1, :])
        assert_close(out, full[..., position : position + 1, :])


def test_window_in_a_decoding_step_is_refused():
    _, ours = nnx_layers(make_attention_fn(is_causal=True, local_window_size=(3, 0)), decode=True)
    ours.init_cache((2, LENGTH, WIDTH))
    with pytest.raises(NotImplementedError, match="query_offset"):
        ours(inputs(2, length=1))


# ------------------------------------------------------------------------- properties of one layer


def band_mask(left, right):
    distance = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None, :]
    return ((distance <= left) & (-distance <= right))[None, None]


def test_causal_layer_needs_no_mask():
    x = inputs(2)
    theirs, ours = linen_layers(make_attention_fn(is_causal=True))
    variables = theirs.init(jax.random.key(1), x)
    assert_close(
        ours.apply(variables, x), theirs.apply(variables, x, mask=nn.make_causal_mask(x[..., 0]))
    )


def test_windowed_layer():
    theirs, ours = nnx_layers(make_attention_fn(local_window_size=(3, 1)))
    assert_close(ours(inputs(2)), theirs(inputs(2), mask=band_mask(3, 1)))


def test_mask_and_band_of_a_layer_both_apply():
    theirs, ours = nnx_layers(make_attention_fn(is_causal=True, local_window_size=(5, 0)))
    mask = (jnp.arange(LENGTH) % 3 != 1) | jnp.eye(LENGTH, dtype=bool)
    mask = mask[None, None]
    assert_close(ours(inputs(2), mask=mask), theirs(inputs(2), mask=mask & band_mask(5, 0)))


def test_other_properties_reach_attention():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 8))
    own = make_attention_fn(logits_soft_cap=0.5, scale=2.0, implementation="xla")
    logits = jnp.einsum("btnd,bsnd->bnts", 2.0 * q, k)
    weights = jax.nn.softmax(0.5 * jnp.tanh(logits / 0.5))
    assert_close(own(q, k, v), jnp.einsum("bnts,bsnd->btnd", weights, v))
    with pytest.raises(NotImplementedError, match="'cuda'"):
        make_attention_fn(implementation="cuda")(q, k, v, bias=jnp.ones((5, 5)))


def test_row_without_visible_keys_gives_zero():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 8))
    mask = jnp.ones((5, 5), bool).at[2].set(False)
    assert not attention_fn(q, k, v, mask=mask)[:, 2].any()


def test_equal_properties_are_equal_functions():
    assert make_attention_fn(is_causal=True) == make_attention_fn(is_causal=True)
    assert hash(make_attention_fn(scale=1.0)) == hash(make_attention_fn(scale=1.0))
    assert make_attention_fn() == attention_fn != make_attention_fn(is_causal=True)


@pytest.mark.parametrize("own", [attention_fn, make_attention_fn(is_causal=True)])
def test_kernel_runs_without_a_mask(own):
    _, ours = linen_layers(own)
    x = inputs(2)
    layer = jax.jit(ours.apply)
    compiled = layer.lower(ours.init(jax.random.key(1), x), x).compile()
    assert "jax_fa_fwd" in str(compiled.as_text())


# -------------------------------------------------------------------------------------------- rope


def rope(x):
    """[L, D], pairs of features turned by their position; as of NNX and Equinox."""
    angles = jnp.arange(x.shape[0])[:, None] / 100.0 ** jnp.linspace(0, 1, x.shape[1] // 2)
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def nnx_attention_with_rope(query, key, value, **keywords):
    """As NNX's ``dot_product_attention_with_rope``, of releases after 0.12.8."""
    turn = jax.vmap(jax.vmap(rope, 1, 1))
    return nnx.dot_product_attention(turn(query), turn(key), value, **keywords)


def test_rope_turns_query_and_key_before_the_product():
    theirs, ours = (
        nnx_layers(own, num_kv_heads=2)[1]
        for own in (nnx_attention_with_rope, make_attention_fn(rope=rope))
    )
    x = inputs(2)
    assert_close(ours(x, is_causal=True), theirs(x, is_causal=True))
    assert make_attention_fn(rope=rope) == make_attention_fn(rope=rope) != attention_fn


def test_rope_in_a_decoding_step_is_refused():
    _, ours = nnx_layers(make_attention_fn(rope=rope), decode=True)
    ours.init_cache((2, LENGTH, WIDTH))
    with pytest.raises(NotImplementedError, match="rope with one query, 12 keys and a mask"):
        ours(inputs(2, length=1))


@pytest.mark.skipif(not hasattr(nnx, "RoPE"), reason="flax 0.12.8 and older have no nnx.RoPE")
def test_rope_of_nnx_is_that_of_its_own_attention_function():
    newer: Any = nnx
    turn = newer.RoPE()
    with_rope = functools.partial(newer.dot_product_attention_with_rope, rope=turn)
    theirs, ours = (nnx_layers(own)[1] for own in (with_rope, make_attention_fn(rope=turn)))
    assert_close(ours(inputs(2)), theirs(inputs(2)))


# ---------------------------------------------------------------------------------------- refusals


def test_every_keyword_of_flax_layers_is_named():
    # linen filters keywords by the signature: what is not named here would be dropped in silence.
    named = set(inspect.signature(attention_fn).parameters)
    not_passed_by_layers = {"einsum_dot_general", "promote_dtype"}
    for theirs in (nn.dot_product_attention, nnx.dot_product_attention):
        assert set(inspect.signature(theirs).parameters) - named <= not_passed_by_layers


def qkv():
    return jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 8))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"dropout_rate": 0.1}, "drop out the layer's output"),
        ({"module": object()}, "sow_weights"),
        ({"qk_attn_weights_einsum": jnp.einsum}, "replaced einsums"),
        ({"attn_weights_value_einsum": jnp.einsum}, "replaced einsums"),
        ({"precision": "BF16_BF16_F32"}, "full precision"),
        ({"precision": jax.lax.DotAlgorithmPreset.TF32_TF32_F32}, "full precision"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_would_be_ignored_is_refused(keywords, message):
    with pytest.raises(NotImplementedError, match=message):
        attention_fn(*qkv(), **keywords)


@pytest.mark.parametrize(
    "keywords",
    [
        {"dropout_rate": 0.1, "deterministic": True},
        {"precision": "highest"},
        {"precision": jax.lax.Precision.HIGH},
        {"precision": (jax.lax.Precision.DEFAULT, None)},
        {"force_fp32_for_softmax": True},
        {"broadcast_dropout": False, "dropout_rng": None},
    ],
    ids=lambda x: next(iter(x)),
)
def test_what_changes_nothing_is_accepted(keywords):
    np.testing.assert_array_equal(attention_fn(*qkv(), **keywords), attention_fn(*qkv()))


def test_layers_with_dropout_or_sown_weights_are_refused():
    x = inputs(2)
    _, ours = linen_layers(attention_fn, dropout_rate=0.5, deterministic=False)
    with pytest.raises(NotImplementedError, match="dropout_rate=0.5"):
        ours.init({"params": jax.random.key(1), "dropout": jax.random.key(2)}, x)
    _, ours = nnx_layers(attention_fn)
    with pytest.raises(NotImplementedError, match="sow_weights"):
        ours(x, sow_weights=True)


def test_shapes_that_do_not_fit_are_refused():
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"batch dimensions \[1\], but key or value has \[2\]"):
        attention_fn(q, jnp.concatenate([k, k]), v)
    with pytest.raises(ValueError, match=r"mask or bias has shape \[1, 1, 1, 5, 5\]"):
        attention_fn(q, k, v, mask=jnp.ones((1, 1, 1, 5, 5), bool))
    with pytest.raises(ValueError, match=r"key should be \[batch..., length, heads, head size\]"):
        attention_fn(q, k[0, 0], v)


@pytest.mark.parametrize("own", [attention_fn, make_attention_fn(is_causal=True)])
def test_arguments_are_checked_as_those_of_attention(own):
    q, k, v = qkv()
    with pytest.raises(TypeError, match="is_causal should be True or False, but is 'no'"):
        own(q, k, v, is_causal="no")
    with pytest.raises(TypeError, match="value should be an array of numbers, but is 'v'"):
        own(q, k, "v")
    with pytest.raises(ValueError, match="mask should be real numbers, but is complex64"):
        own(q, k, v, mask=jnp.ones((5, 5), jnp.complex64))


def test_modules_for_other_libraries_are_imported_when_asked_for():
    in_new_process(
        "import sys, jax_fa\n"
        "assert not {'flax', 'equinox'} & sys.modules.keys()\n"
        "assert jax_fa.flax.attention_fn and jax_fa.equinox.with_kernels\n"
    )
    assert not hasattr(jax_fa, "torch")
