"""What lies in padding never reaches a result; a genuine NaN does."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import BY_NAME
from helpers.harness import data, run
from helpers.oracle import Results, side

import jax_fa

PADDED = (
    "lengths",
    "lengths_zero",
    "kv_lengths_only",
    "lengths_causal_bottom_right",
    "sinks_empty_rows",
    "packed_gaps_and_used",
    "packed_everything",
    "everything",
)


def poison(given, value):
    """``value`` in every padding row of q, k, v and the cotangents."""
    x = given.operands
    rows = ~side(x.q.shape[:2], x.cu_seqlens_q, x.q_lengths).used
    keys = ~side(x.k.shape[:2], x.cu_seqlens_k, x.kv_lengths).used
    assert rows.any() or keys.any()

    def spoil(array, padding):
        return np.where(
            padding.reshape(padding.shape + (1,) * (array.ndim - 2)), value, array
        ).astype(array.dtype)

    operands = x._replace(q=spoil(x.q, rows), k=spoil(x.k, keys), v=spoil(x.v, keys))
    return given._replace(
        operands=operands, cotangents=tuple(spoil(c, rows) for c in given.cotangents)
    ), (rows, keys)


KERNELS: list[tuple[str, str, str | None]] = [
    (name, dtype, None) for name in PADDED for dtype in ("float32", "bfloat16")
]
REFERENCE: list[tuple[str, str, str | None]] = [
    (name, "float32", "xla") for name in ("packed_everything", "everything")
]


@pytest.mark.parametrize(("name", "dtype", "implementation"), KERNELS + REFERENCE)
def test_padding_does_not_leak(name, dtype, implementation):
    case = BY_NAME[name]
    clean = run(case, poison(data(case, dtype), 0.0)[0], implementation)
    for value in (np.nan, np.inf):
        spoiled, (rows, keys) = poison(data(case, dtype), value)
        got = run(case, spoiled, implementation)
        for field in Results._fields:
            a, b = getattr(got, field), getattr(clean, field)
            if b is not None:
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b), field)
        assert not np.asarray(got.dq, np.float32)[rows].any()
        assert not np.asarray(got.dk, np.float32)[keys].any()
        assert not np.asarray(got.dv, np.float32)[keys].any()


def test_padding_of_saved_results_does_not_leak_into_the_backward_operation():
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, 8, 2, 8)).astype(np.float32) for _ in range(4))
    lengths: dict[str, Any] = {"query_seq_lengths": jnp.array([5], jnp.int32)}
    out, lse = (np.array(x) for x in jax_fa.forward(q, k, v, **lengths))
    clean = jax_fa.backward(q, k, v, out, lse, dout, **lengths)
    out[:, 5:], lse[:, 5:], dout[:, 5:] = np.nan, np.nan, np.nan
    for a, b in zip(jax_fa.backward(q, k, v, out, lse, dout, **lengths), clean, strict=True):
        np.testing.assert_array_equal(a, b)


def test_keys_that_a_window_or_segment_hides_from_every_row_do_not_leak():
    """Values of hidden keys: kernels may multiply them by a probability of 0, NaN they must not."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 40, 2, 8)).astype(np.float32) for _ in range(3))
    clean = jax_fa.attention(q[:, :10], k, v, is_causal=True)
    k[:, 10:], v[:, 10:] = 1e30, 1e30
    np.testing.assert_array_equal(jax_fa.attention(q[:, :10], k, v, is_causal=True), clean)


@pytest.mark.parametrize("array", ["q", "k", "v"])
def test_nan_in_used_rows_reaches_exactly_the_rows_that_see_it(array):
    rng = np.random.default_rng(0)
    x = {name: rng.standard_normal((1, 60, 2, 8)).astype(np.float32) for name in "qkv"}
    x[array][0, 30, 1, 3] = np.nan
    out = np.asarray(jax_fa.attention(x["q"], x["k"], x["v"], is_causal=True))
    wrong = np.isnan(out).any(-1)[0]
    assert not wrong[:, 0].any()
    assert not wrong[:30, 1].any() and wrong[30, 1]
    assert wrong[31:, 1].all() == (array != "q")


def test_nan_in_the_cotangent_reaches_the_gradient():
    case = BY_NAME["gqa"]
    given = data(case, "float32")
    dout = given.cotangents[0].copy()
    dout[0, 3, 0, 0] = np.nan
    got = run(case, given._replace(cotangents=(dout, given.cotangents[1])))
    assert np.isnan(got.dq[0, 3, 0]).all() and not np.isnan(got.dq[0, 4]).any()
    assert np.isnan(got.dv[0, :, 0, 0]).all() and not np.isnan(got.dv[1]).any()


def test_infinite_logits_give_nan_not_a_wrong_number():
    q = jnp.full((1, 2, 1, 8), jnp.inf)
    k = v = jnp.ones((1, 3, 1, 8))
    assert jnp.isnan(jax_fa.attention(q, k, v)).all()
