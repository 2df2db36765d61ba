"""Drop-in for jax.nn.dot_product_attention: both are called, for every argument it has.

Rows that see no key are left out where values are compared: there jax_fa gives 0 and -inf on
purpose.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa

theirs, ours = jax.nn.dot_product_attention, jax_fa.attention

rng = np.random.default_rng(0)


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


Q, K, V = normal(2, 20, 4, 16), normal(2, 30, 2, 16), normal(2, 30, 2, 16)
MASK = jnp.asarray(rng.random((2, 4, 20, 30)) < 0.7).at[..., 0].set(True)
LENGTHS_Q, LENGTHS_K = jnp.array([20, 7], jnp.int32), jnp.array([30, 11], jnp.int32)

SAME_RESULT: dict[str, dict[str, Any]] = {
    "nothing": {},
    "scale": {"scale": 0.5},
    "scale numpy": {"scale": np.float32(0.5)},
    "scale array": {"scale": jnp.float32(0.5)},
    "is_causal": {"is_causal": True},
    "query_seq_lengths": {"query_seq_lengths": LENGTHS_Q},
    "key_value_seq_lengths": {"key_value_seq_lengths": LENGTHS_K},
    "lengths as numpy int64": {"key_value_seq_lengths": np.array([30, 11])},
    "both lengths causal": {
        "query_seq_lengths": LENGTHS_Q,
        "key_value_seq_lengths": LENGTHS_K,
        "is_causal": True,
    },
    "window int": {"local_window_size": 5},
    "window pair": {"local_window_size": (5, 2)},
    "window zero": {"local_window_size": 0},
    "window causal": {"local_window_size": (5, 2), "is_causal": True},
    "implementation xla": {"implementation": "xla"},
    "implementation None": {"implementation": None},
    "mask": {"mask": MASK},
    "mask one head": {"mask": MASK[:, :1]},
    "mask one batch": {"mask": MASK[:1]},
    "mask rank 3": {"mask": MASK[0]},
    "mask rank 2": {"mask": MASK[0, 0]},
    "mask causal lengths": {"mask": MASK, "is_causal": True, "query_seq_lengths": LENGTHS_Q},
    "bias": {"bias": normal(2, 4, 20, 30)},
    "bias one batch and head": {"bias": normal(1, 1, 20, 30)},
    "bias one row": {"bias": normal(2, 4, 1, 30)},
    "bias bfloat16": {"bias": normal(2, 4, 20, 30, dtype=jnp.bfloat16)},
    "bias and mask": {"bias": normal(1, 4, 20, 30), "mask": MASK},
    "residual": {"return_residual": True},
    "residual causal lengths": {
        "return_residual": True,
        "is_causal": True,
        "key_value_seq_lengths": LENGTHS_K,
    },
}


def assert_same(got, want, options, tolerance):
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        if "query_seq_lengths" in options and a.shape[1] == 20 and a.ndim == 3:
            used = np.arange(20) < np.asarray(LENGTHS_Q)[:, None]
            a, b = a[used], b[used]  # the LSE of unused rows: -inf here, -2e38 there
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__
)
@pytest.mark.parametrize("options", SAME_RESULT.values(), ids=SAME_RESULT)
def test_same_result(options, dtype):
    qkv = [x.astype(dtype) for x in (Q, K, V)]
    tolerance = {jnp.float32: 3e-6, jnp.bfloat16: 3e-2, jnp.float16: 4e-3}[dtype]
    assert_same(ours(*qkv, **options), theirs(*qkv, **options), options, tolerance)


@pytest.mark.parametrize("options", SAME_RESULT.values(), ids=SAME_RESULT)
def test_same_gradient(options):
    def gradient(function):
        def loss(q, k, v):
            out = function(q, k, v, **options)
            return jnp.sum(jnp.sin(out[0] if isinstance(out, tuple) else out))

        return jax.jit(jax.grad(loss, (0, 1, 2)))(Q, K, V)

    for a, b in zip(gradient(ours), gradient(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_same_gradient_of_bias():
    bias = SAME_RESULT["bias"]["bias"]
    for shape in ((2, 4, 20, 30), (1, 4, 20, 30), (1, 1, 1, 30)):
        part = bias[tuple(slice(0, n) for n in shape)]
        a, b = (
            jax.jit(jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(Q, K, V, bias=x)))))(part)
            for f in (ours, theirs)
        )
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_positions_of_arguments_are_the_same():
    bias = SAME_RESULT["bias"]["bias"]
    np.testing.assert_allclose(ours(Q, K, V, bias, MASK), theirs(Q, K, V, bias, MASK), atol=3e-6)
    mine = inspect.signature(ours).parameters
    for name, parameter in inspect.signature(theirs).parameters.items():
        assert mine[name].kind is parameter.kind, name
        assert mine[name].default == parameter.default, name
    for name, parameter in mine.items():
        if name not in inspect.signature(theirs).parameters:
            assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"return_residual": True},
        {"mask": MASK[0]},
        {"key_value_seq_lengths": LENGTHS_K[1:]},
    ],
    ids=lambda x: "+".join(x),
)
def test_without_batch_dimension(options):
    got, want = (f(Q[0], K[0], V[0], **options) for f in (ours, theirs))
    assert_same(got, want, {}, 3e-6)


def test_numpy_and_nested_lists_are_taken():
    q, k, v = (np.asarray(x) for x in (Q, K, V))
    np.testing.assert_allclose(ours(q, k, v), theirs(q, k, v), atol=3e-6)
    small = np.asarray(Q[:1, :2, :1, :4]).tolist()
    np.testing.assert_allclose(ours(small, small, small), theirs(small, small, small), atol=3e-6)


@pytest.mark.parametrize("function", [ours, theirs])
def test_residual_has_the_dtype_of_key_and_no_gradient(function):
    def residual(q):
        _, lse = function(q, K.astype(q.dtype), V.astype(q.dtype), return_residual=True)
        return jnp.sum(lse.astype(jnp.float32))

    q = Q.astype(jnp.bfloat16)
    _, lse = function(q, K.astype(q.dtype), V.astype(q.dtype), return_residual=True)
    assert lse.dtype == jnp.bfloat16
    assert not np.any(jax.grad(residual)(q))


@pytest.mark.parametrize("function", [ours, theirs])
@pytest.mark.filterwarnings("ignore::jax_fa.FallbackWarning")
def test_scale_may_be_traced(function):
    traced = jax.jit(lambda scale: function(Q, K, V, scale=scale))(jnp.float32(0.3))
    np.testing.assert_allclose(traced, function(Q, K, V, scale=0.3), atol=3e-6)


@pytest.mark.filterwarnings("ignore::jax_fa.FallbackWarning")
def test_gradient_of_traced_scale_is_the_same():
    a, b = (
        jax.jit(jax.grad(lambda s, f=f: jnp.sum(jnp.sin(f(Q, K, V, scale=s)))))(0.3)
        for f in (ours, theirs)
    )
    np.testing.assert_allclose(a, b, rtol=1e-4)


SAME_ERROR = {
    "value shape": lambda f: f(Q, K, V[:, :20]),
    "value dtype": lambda f: f(Q, K, V.astype(jnp.bfloat16)),
    "query batch": lambda f: f(Q[:1], K, V),
    "query head size": lambda f: f(Q[..., :8], K, V),
    "query dtype": lambda f: f(Q.astype(jnp.bfloat16), K, V),
    "key rank 5": lambda f: f(Q, K[None], V[None]),
    "query rank 5": lambda f: f(Q[None], K, V),
    "heads": lambda f: f(Q[:, :, :3], K, V),
    "mask dtype": lambda f: f(Q, K, V, mask=MASK.astype(jnp.float32)),
    "mask shape": lambda f: f(Q, K, V, mask=MASK[..., :3]),
    "bias shape": lambda f: f(Q, K, V, bias=normal(2, 4, 20, 29)),
    "bias list": lambda f: f(Q, K, V, bias=[1.0, 2.0]),
    "query none": lambda f: f(None, K, V),
    "query text": lambda f: f("x", K, V),
    "query ragged": lambda f: f([[1.0], [1.0, 2.0]], K, V),
    "query of objects": lambda f: f(np.array([object()]), K, V),
    "query of keys": lambda f: f(jax.random.split(jax.random.key(0), Q.shape), K, V),
    "scale text": lambda f: f(Q, K, V, scale="x"),
    "scale complex": lambda f: f(Q, K, V, scale=1j),
    "scale object": lambda f: f(Q, K, V, scale=object()),
    "scale array": lambda f: f(Q, K, V, scale=np.ones(3)),
    "causal array": lambda f: f(Q, K, V, is_causal=np.array([True, False])),
    "window float": lambda f: f(Q, K, V, local_window_size=2.0),
    "window text": lambda f: f(Q, K, V, local_window_size=("a", "b")),
    "lengths uint32": lambda f: f(Q, K, V, query_seq_lengths=np.array([20, 7], np.uint32)),
    "lengths bool": lambda f: f(Q, K, V, query_seq_lengths=[True, True]),
    "lengths text": lambda f: f(Q, K, V, query_seq_lengths="x"),
    "mask rank": lambda f: f(Q, K, V, mask=MASK[None]),
    "bias rank": lambda f: f(Q, K, V, bias=normal(1, 2, 4, 20, 30)),
    "query lengths shape": lambda f: f(Q, K, V, query_seq_lengths=jnp.zeros(3, jnp.int32)),
    "query lengths dtype": lambda f: f(Q, K, V, query_seq_lengths=jnp.zeros(2, jnp.int16)),
    "key lengths shape": lambda f: f(Q, K, V, key_value_seq_lengths=jnp.zeros((2, 1), jnp.int32)),
    "key lengths dtype": lambda f: f(Q, K, V, key_value_seq_lengths=jnp.zeros(2)),
    "implementation": lambda f: f(Q, K, V, implementation="flash"),
    "cudnn without a GPU": lambda f: f(Q, K, V, implementation="cudnn"),
    "cudnn right window": lambda f: f(
        Q, K, V, implementation="cudnn", local_window_size=(3, 3), is_causal=False
    ),
    "window of three": lambda f: f(Q, K, V, local_window_size=(1, 2, 3)),
    "options by position": lambda f: f(Q, K, V, None, None, 0.5),
    "unknown keyword": lambda f: f(Q, K, V, causal=True),
}


@pytest.mark.parametrize("call", SAME_ERROR.values(), ids=SAME_ERROR)
def test_same_error_class(call):
    kinds = []
    for function in (theirs, ours):
        with pytest.raises(Exception) as caught:
            call(function)
        kinds.append(caught.type)
    assert kinds[0] is kinds[1], kinds


def test_difference_on_purpose_row_without_keys():
    """jax.nn averages all values there; jax_fa gives 0 and -inf."""
    lengths: dict[str, Any] = {
        "key_value_seq_lengths": jnp.array([0, 30], jnp.int32),
        "return_residual": True,
    }
    out, lse = ours(Q, K, V, **lengths)
    assert not np.any(out[0]) and np.isneginf(lse[0]).all()
    np.testing.assert_allclose(
        theirs(Q, K, V, **lengths)[0][0, 0, 0], V[0, :, 0].mean(0), atol=1e-5
    )
    np.testing.assert_allclose(out[1], theirs(Q, K, V, **lengths)[0][1], atol=3e-6)
