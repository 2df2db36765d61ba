"""Settings of JAX under which jax.nn's attention runs: ours gives its own numbers there too."""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa

rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


QKV = normal(2, 10, 4, 8), normal(2, 12, 2, 8), normal(2, 12, 2, 8)
LENGTHS = jnp.array([7, 3], jnp.int32)
SINKS = normal(4)
BORDERS = jnp.array([0, 3, 10], jnp.int32)
SHIFT = jnp.array([0, 1, 2], jnp.int32)


@contextlib.contextmanager
def setting(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def is_known(mode):
    """Whether this version of JAX has the setting."""
    is_setting = isinstance(mode, partial) and mode.func is setting
    return not is_setting or hasattr(jax.config, mode.args[0])


MODES = {
    "disable_jit": jax.disable_jit,
    "disable_jit everywhere": partial(setting, "jax_disable_jit", True),
    "debug_nans": partial(jax.debug_nans, True),
    "debug_infs": partial(jax.debug_infs, True),
    "debug_key_reuse": partial(jax.debug_key_reuse, True),
    "ensure_compile_time_eval": jax.ensure_compile_time_eval,
    "enable_x64": partial(jax.enable_x64, True),
    "numpy_rank_promotion": partial(jax.numpy_rank_promotion, "raise"),
    "numpy_dtype_promotion": partial(jax.numpy_dtype_promotion, "strict"),
    "transfer_guard": partial(jax.transfer_guard, "log"),
    "checking_leaks": jax.checking_leaks,
    "log_compiles": partial(jax.log_compiles, True),
    "explain_cache_misses": partial(jax.explain_cache_misses, True),
    "default_matmul_precision": partial(jax.default_matmul_precision, "highest"),
    "default_device": lambda: jax.default_device(jax.devices()[1]),
    "softmax_custom_jvp": partial(setting, "jax_softmax_custom_jvp", False),
    "enable_checks": partial(setting, "jax_enable_checks", True),
    "traceback_filtering": partial(setting, "jax_traceback_filtering", "off"),
    "use_direct_linearize": partial(setting, "jax_use_direct_linearize", False),
    "eager_pmap": partial(setting, "jax_eager_pmap", False),
    "remove_size_one_mesh_axis": partial(setting, "jax_remove_size_one_mesh_axis_from_type", True),
    "mesh": lambda: jax.set_mesh(jax.make_mesh((2,), ("x",))),
}


def dense(q, k, v):
    return jax_fa.attention(q, k, v, is_causal=True, key_value_seq_lengths=LENGTHS, sinks=SINKS)


def packed(q, k, v):
    return jax_fa.attention_varlen(q[0], k[0], v[0], BORDERS, BORDERS + SHIFT, local_window_size=3)


def masked(q, k, v):
    seen = np.tril(np.ones((1, 1, 10, 12), bool))
    return jax_fa.attention(q, k, v, mask=jnp.asarray(seen), block_mask=jnp.ones((1, 1), bool))


def short(x):
    return x.astype(jnp.bfloat16)


def output_and_gradients(attend, *arrays):
    out, pull = jax.vjp(attend, *arrays)
    return out, *pull(out)


CASES = {
    "dense": partial(output_and_gradients, dense),
    "packed": partial(output_and_gradients, packed),
    "dense, jit": jax.jit(partial(output_and_gradients, dense)),
    "masked": partial(output_and_gradients, masked),
    "masked, bfloat16": lambda *x: output_and_gradients(masked, *map(short, x)),
    "dense, bfloat16": lambda *x: output_and_gradients(dense, *map(short, x)),
}


@pytest.fixture(scope="module")
def wanted():
    return {name: compute(*QKV) for name, compute in CASES.items()}


@pytest.mark.parametrize("name", [name for name, mode in MODES.items() if is_known(mode)])
def test_a_mode_of_jax_changes_no_number(name, wanted):
    with MODES[name]():
        got = {name: compute(*QKV) for name, compute in CASES.items()}
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), got, wanted)


@pytest.mark.parametrize("attend", [dense, packed])
def test_debug_nans_finds_a_nan(attend):
    """Also in the results of the call itself, where JAX then repeats it without jit."""
    query, key, value = QKV
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        attend(query, key, value.at[0, 0, 0, 0].set(jnp.nan))
