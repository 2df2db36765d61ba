"""NaN and infinities reach the rows that see them, and no others; large logits and sinks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.oracle import Results, assert_close, tolerance

import jax_fa
from jax_fa import mask_mods
from jax_fa.runtime import vjp
from jax_fa.spec.band import Band
from jax_fa.spec.problem import Operands, Semantics

IMPLEMENTATIONS = ("cpu", "xla")
LENGTH, HIDDEN = 6, 4
"""Keys from ``HIDDEN`` on hold what is not finite; the rows before it do not see them."""
SEGMENTS = jnp.array([[0] * HIDDEN + [1] * (LENGTH - HIDDEN)], jnp.int32)

HIDING = {
    "causal": {"is_causal": True},
    "causal_capped": {"is_causal": True, "logits_soft_cap": 5.0},
    "segments": {"query_segment_ids": SEGMENTS, "key_value_segment_ids": SEGMENTS},
    "window": {"local_window_size": (None, 0)},
}
UNFUSED = {
    "mask": {"mask": jnp.tril(jnp.ones((LENGTH, LENGTH), bool))},
    "mask_and_bias": {
        "mask": jnp.tril(jnp.ones((LENGTH, LENGTH), bool)),
        "bias": jnp.arange(36.0).reshape(6, 6) / 9,
    },
    "mask_mod": {"mask_mod": mask_mods.chunked(8)},
    "block_mask": {"block_mask": jnp.ones((1, 2, 1, 1), bool), "is_causal": True},
}


def operands():
    rng = np.random.default_rng(1)
    return tuple(jnp.asarray(rng.standard_normal((1, LENGTH, 2, 8)), jnp.float32) for _ in "qkv")


def spoilt(x, value):
    """``x`` with ``value`` in some columns of its last rows."""
    return x.at[:, HIDDEN, :, 2].set(value).at[:, HIDDEN + 1, 0, 5].set(-value)


def seen(x):
    return x[:, :HIDDEN]


PATHS = [(x, options) for x in IMPLEMENTATIONS for options in HIDING.values()]
PATHS += [("xla", options) for options in UNFUSED.values()]
IDS = [f"{x}-{name}" for x in IMPLEMENTATIONS for name in HIDING] + list(UNFUSED)


@pytest.mark.parametrize(("implementation", "options"), PATHS, ids=IDS)
def test_hidden_keys_may_hold_anything(implementation, options):
    """Output, LSE and dq of the rows that do not see them are those of clean keys."""

    @jax.jit
    def step(q, k, v):
        def loss(q):
            out, lse = jax_fa.attention_with_lse(q, k, v, **options, implementation=implementation)
            return jnp.sum(seen(out) ** 2) + jnp.sum(jnp.sin(seen(lse))), (seen(out), seen(lse))

        return jax.grad(loss, has_aux=True)(q)

    q, k, v = operands()
    (dq, results) = step(q, k, v)
    for value in (jnp.nan, jnp.inf):
        for other in ((k, spoilt(v, value)), (spoilt(k, value), v)):
            other_dq, other_results = step(q, *other)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6),
                (seen(other_dq), other_results),
                (seen(dq), results),
            )


def test_gradients_of_any_order_are_those_of_clean_keys():
    q, k, v = (x[0, :, :1, :2] for x in operands())
    hole = jnp.array([jnp.nan, jnp.inf])
    spoilt_k, spoilt_v = k.at[HIDDEN:].set(hole), v.at[HIDDEN:].set(-hole)

    def loss(q, k, v):
        out = jax_fa.attention(q, k, v, is_causal=True, implementation="xla")
        return jnp.sum(out[:HIDDEN] ** 3)

    for derivative in (jax.jacfwd(loss), jax.hessian(loss), jax.jacrev(jax.jacrev(loss))):
        wanted, got = jax.jit(derivative)(q, k, v), jax.jit(derivative)(q, spoilt_k, spoilt_v)
        if got.ndim > q.ndim:
            wanted, got = wanted[..., :HIDDEN, :, :], got[..., :HIDDEN, :, :]
        np.testing.assert_allclose(got[:HIDDEN], wanted[:HIDDEN], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_visible_values_that_are_not_finite_reach_their_columns_alone(implementation, value):
    q, k, v = operands()
    v = v.at[:, HIDDEN, :, 2].set(value)

    @jax.jit
    def attend(q, k, v):
        return jax_fa.attention(q, k, v, is_causal=True, implementation=implementation)

    out = attend(q, k, v)
    wanted = np.zeros(out.shape)
    wanted[:, HIDDEN:, :, 2] = value
    np.testing.assert_array_equal(np.where(np.isfinite(out), 0, out), wanted)


def steep(top, sink):
    """Three rows of logits up to ``top`` in magnitude, and a sink."""
    rng = np.random.default_rng(2)
    q, k = np.zeros((1, 3, 1, 8), np.float32), np.zeros((1, 4, 1, 8), np.float32)
    q[..., 0] = np.sqrt(top) * np.array([1, -1, 0.5])[:, None]
    k[..., 0] = np.sqrt(top) * np.array([1, 0.5, 0.75, 0.25])[:, None]
    v = rng.standard_normal(k.shape).astype(np.float32)
    return Operands(q, k, v, sinks=np.full((1, 1), sink, np.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("top", "sink"),
    [(2.0**126, -np.inf), (2.0**127, 0.0), (1.0, 2.0**127), (1.0, -(2.0**127))],
)
def test_logits_and_sinks_up_to_two_to_the_127_are_exact(implementation, top, sink):
    x, semantics = steep(top, sink), Semantics(1.0, Band())
    got = vjp.attention(
        Operands(*(None if a is None else jnp.asarray(a) for a in x)), semantics, implementation
    )
    assert_close(Results(*got), tolerance(x, semantics), "float32")


@pytest.mark.parametrize(("top", "sink"), [(3.0e38, 0.0), (1.0, 3.0e38)])
def test_larger_ones_are_exact_in_the_reference_and_nan_in_kernels(top, sink):
    x, semantics = steep(top, sink), Semantics(1.0, Band())
    arrays = Operands(*(None if a is None else jnp.asarray(a) for a in x))
    assert_close(
        Results(*vjp.attention(arrays, semantics, "xla")), tolerance(x, semantics), "float32"
    )
    out, lse = vjp.attention(arrays, semantics, "cpu")
    assert np.isnan(out).any() and np.isnan(lse).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["bias", "shared bias", "mask"])
def test_a_merge_of_rows_that_see_nothing_has_finite_gradients(name, implementation):
    """Where two parts of the keys are hidden from a row, logaddexp has NaN for a derivative."""
    q, k, v = (jnp.concatenate([x, x[:, ::-1]]) for x in operands())
    is_hidden = np.zeros((1 if name == "shared bias" else 2, 2, LENGTH, LENGTH), bool)
    is_hidden[:, :, 0] = True
    bias = jnp.where(is_hidden, -jnp.inf, 0.5)

    def loss(q, k, v, bias):
        parts = []
        for keys in (slice(0, HIDDEN), slice(HIDDEN, None)):
            hides = {"mask": ~is_hidden[..., keys]}
            if name != "mask":
                hides = {"bias": bias[..., keys]}
            parts.append(
                jax_fa.attention_with_lse(
                    q, k[:, keys], v[:, keys], **hides, implementation=implementation
                )
            )
        (out, lse), (other, other_lse) = parts
        whole = jnp.logaddexp(lse, other_lse)
        weights = [jnp.where(jnp.isneginf(whole), 0, jnp.exp(x - whole)) for x in (lse, other_lse)]
        return jnp.sum(jnp.sin(out * weights[0][..., None] + other * weights[1][..., None]))

    def at_once(q, k, v, bias):
        out = jax_fa.attention(q, k, v, jnp.where(is_hidden, 0, bias), mask=~is_hidden)
        return jnp.sum(jnp.sin(out))

    got = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, bias)
    wanted = jax.jit(jax.grad(at_once, (0, 1, 2, 3)))(q, k, v, bias)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        got if name != "mask" else got[:3],
        wanted if name != "mask" else wanted[:3],
    )


@pytest.mark.filterwarnings("ignore::jax_fa.FallbackWarning")
def test_the_gradient_of_a_scale_is_that_of_clean_keys():
    q, k, v = operands()
    mask = np.arange(k.shape[1]) < HIDDEN

    def gradient(k, v):
        def loss(scale):
            return jnp.sum(jax_fa.attention(q, k, v, mask=mask, scale=scale) ** 2)

        return jax.jit(jax.grad(loss))(0.3)

    spoilt = gradient(k.at[:, HIDDEN:].set(jnp.nan), v.at[:, HIDDEN:].set(jnp.inf))
    np.testing.assert_allclose(spoilt, gradient(k, v), rtol=1e-5)
