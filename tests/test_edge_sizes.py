"""Sizes at the borders: nothing, one, and more elements than an int32 counts."""

import fcntl
import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa


def free_gib():
    with open("/proc/meminfo") as lines:
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return kib / 2**20


def gradients(q, k, v, **options):
    def loss(q, k, v):
        out, lse = jax_fa.attention_with_lse(q, k, v, **options)
        return jnp.sum(out) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0))

    return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)


def test_one_token_gives_its_value():
    q, k, v = (jnp.full((1, 1, 1, 1), x) for x in (2.0, 3.0, 5.0))
    out, lse = jax_fa.attention_with_lse(q, k, v)
    assert out.item() == 5.0
    # No float is 6 log2(e), the logit in base 2; and probabilities are as exact as the LSE.
    np.testing.assert_array_max_ulp(np.float32(lse.item()), np.float32(6.0), 1)
    ulp = np.spacing(np.float32(6.0))
    np.testing.assert_allclose([g.item() for g in gradients(q, k, v)], [3.0, 2.0, 1.0], rtol=ulp)


@pytest.mark.parametrize(
    ("batch", "q_len", "kv_len", "heads", "kv_heads"),
    [(0, 3, 4, 2, 2), (2, 0, 4, 2, 1), (2, 3, 0, 2, 2), (2, 0, 0, 2, 2), (2, 3, 4, 0, 1)],
)
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_sizes_of_zero(batch, q_len, kv_len, heads, kv_heads, implementation):
    q = jnp.ones((batch, q_len, heads, 8))
    k = v = jnp.ones((batch, kv_len, kv_heads, 8))
    out, lse = jax_fa.attention_with_lse(q, k, v, implementation=implementation)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    assert not np.asarray(out).any() and np.isneginf(lse).all()
    for gradient, x in zip(
        gradients(q, k, v, implementation=implementation), (q, k, v), strict=True
    ):
        assert gradient.shape == x.shape and not np.asarray(gradient).any()


def test_no_keys_with_sinks_gives_the_sink_as_lse():
    q, k = jnp.ones((1, 3, 2, 8)), jnp.ones((1, 0, 2, 8))
    sinks = jnp.array([0.5, -1.0])
    out, lse = jax_fa.attention_with_lse(q, k, k, sinks=sinks)
    assert not np.asarray(out).any()
    np.testing.assert_allclose(lse, np.broadcast_to(sinks, (1, 3, 2)), rtol=1e-6)


@pytest.mark.parametrize("borders", [[0], [0, 0], [0, 0, 0, 0]], ids=len)
def test_packed_without_rows(borders):
    cu = jnp.array(borders, jnp.int32)
    x = jnp.ones((0, 2, 8))
    assert jax_fa.attention_varlen(x, x, x, cu, cu).shape == (0, 2, 8)
    y = jnp.ones((5, 2, 8))
    assert not np.asarray(jax_fa.attention_varlen(y, y, y, cu, cu)).any()


def test_two_batch_dimensions_through_vmap_or_one_after_folding():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 3, 11, 4, 8)), jnp.float32) for _ in range(3))
    folded = jax_fa.attention(*(x.reshape(6, 11, 4, 8) for x in (q, k, v))).reshape(q.shape)
    np.testing.assert_array_equal(jax.vmap(jax_fa.attention)(q, k, v), folded)
    with pytest.raises(ValueError, match="Fold several batch dimensions into one, or use vmap"):
        jax_fa.attention(q, k, v)


# More than 2 ** 31 elements in one array, and a result whose last rows depend on the last elements.

HUGE = 2**31 // 256 + 300
"""Rows of 256 elements."""

OPTIMIZED = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 3})
"""Unlike other tests (conftest.py): here XLA's own loops over the arrays are what takes time."""


@pytest.fixture
def room():
    """14 GiB for one test at a time, whatever the number of test processes."""
    with open(Path(tempfile.gettempdir()) / "jax_fa_huge_arrays.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if free_gib() < 14:
            pytest.skip("arrays of 4.3 GB, several at a time, need 14 GiB of free memory")
        yield


def huge(last):
    """bfloat16 [1, HUGE, 1, 256]: zeros, then the rows of ``last``; filled where it will lie."""

    @OPTIMIZED
    def fill():
        zeros = jnp.zeros((1, HUGE, 1, 256), jnp.bfloat16)
        return jax.lax.dynamic_update_slice(zeros, last[None, :, None], (0, HUGE - len(last), 0, 0))

    return fill()


def rows(count, dim):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.standard_normal((count, dim)), jnp.bfloat16)


@pytest.mark.usefixtures("room")
def test_query_and_its_gradient_beyond_int32():
    """Only the last rows see a key, so that nothing else takes time."""
    last = rows(5, 256)
    k, v = rows(5, 256).reshape(1, 5, 1, 256), rows(5, 1).reshape(1, 5, 1, 1)

    @OPTIMIZED
    def step(q, k, v, offset):
        def value(q):
            return jnp.sum(
                jax_fa.attention(q, k, v, is_causal=True, query_offset=offset)[:, -5:] ** 2
            )

        return jax.value_and_grad(value)(q)

    want, want_gradient = step(last[None, :, None], k, v, 0)
    got, gradient = step(huge(last), k, v, 5 - HUGE)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(gradient[:, -5:], want_gradient)
    assert not np.asarray(gradient[:, 10**6 : 10**6 + 1000]).any()


@pytest.mark.usefixtures("room")
def test_keys_beyond_int32():
    last = rows(64, 256)
    q = rows(1, 256).reshape(1, 1, 1, 256)
    options: dict[str, Any] = {"local_window_size": (20, 0)}
    v = jnp.zeros((1, HUGE, 1, 1), jnp.bfloat16).at[0, -64:, 0, 0].set(rows(64, 1)[:, 0])
    got = jax.jit(lambda *x: jax_fa.attention(*x, query_offset=HUGE - 1, **options))(
        q, huge(last), v
    )
    want = jax_fa.attention(q, last[None, :, None], v[:, -64:], query_offset=63, **options)
    np.testing.assert_array_equal(got, want)


@pytest.mark.usefixtures("room")
def test_values_beyond_int32():
    last = rows(64, 256)
    q, keys = jnp.ones((1, 1, 1, 1), jnp.bfloat16), rows(64, 1)
    k = jnp.zeros((1, HUGE, 1, 1), jnp.bfloat16).at[0, -64:, 0].set(keys)
    options: dict[str, Any] = {"local_window_size": (20, 0)}
    got = jax.jit(lambda *x: jax_fa.attention(*x, query_offset=HUGE - 1, **options))(
        q, k, huge(last)
    )
    want = jax_fa.attention(q, keys[None, :, None], last[None, :, None], query_offset=63, **options)
    np.testing.assert_array_equal(got, want)


@pytest.mark.usefixtures("room")
def test_output_beyond_int32():
    v = rows(1, 256).reshape(1, 1, 1, 256)
    q, k = jnp.zeros((1, HUGE, 1, 1), jnp.bfloat16), jnp.ones((1, 1, 1, 1), jnp.bfloat16)
    last = jax.jit(lambda *x: jax_fa.attention(*x)[:, -1000:])(q, k, v)
    np.testing.assert_array_equal(last, jnp.broadcast_to(v, last.shape))
