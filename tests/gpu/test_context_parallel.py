"""Several GPUs of one host share sequences: what one GPU computes, forward and gradients."""

import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa

if "cuda" not in os.environ.get("JAX_PLATFORMS", "") or len(jax.devices("cuda")) < 2:
    pytest.skip("needs two GPUs: set JAX_PLATFORMS=cuda,cpu", allow_module_level=True)

GPUS = jax.devices("cuda")
MESH = jax.sharding.Mesh(np.array(GPUS), ("context",))
SPEC = jax.P(None, "context")
LENGTH = 2048
HEADS = {"query": 4 * len(GPUS), "key": len(GPUS), "value": len(GPUS)}
SEGMENTS = jnp.asarray(np.searchsorted([700, 1500], np.arange(LENGTH))[None], jnp.int32)

OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (300, 0)},
    "bottom_right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "sinks": {"is_causal": True, "sinks": jnp.linspace(-1, 3, HEADS["query"])},
    "cap": {"is_causal": True, "logits_soft_cap": 20.0},
    "lengths": {
        "is_causal": True,
        "query_seq_lengths": jnp.array([1900], jnp.int32),
        "key_value_seq_lengths": jnp.array([1500], jnp.int32),
    },
    "offset": {"is_causal": True, "query_offset": jnp.int32(77)},
}
STRATEGIES = ("all_gather", "all_to_all", "ring")


def draw(batch=1):
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.standard_normal((batch, LENGTH, count, 128)), jnp.bfloat16)
        for count in HEADS.values()
    ]


def step(attend, *arrays):
    """Output, LSE and gradients through both."""
    (out, lse), pullback = jax.vjp(attend, *arrays)
    return out, lse, *pullback((jnp.cos(out), jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0)))


def assert_as_alone(attend, alone, *arrays):
    got = jax.jit(partial(step, attend))(*arrays)
    want = jax.jit(partial(step, alone))(*jax.device_put(arrays, GPUS[0]))
    names = ("out", "lse", "dq", "dk", "dv", "dbias")[: len(arrays) + 2]
    for name, a, b in zip(names, got, want, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert (np.isneginf(a) == np.isneginf(b)).all(), name
        a, b = (np.where(np.isfinite(x), x, 0) for x in (a, b))
        # Both round partial sums to bfloat16, in different places.
        assert np.abs(a - b).max() <= 2.0**-6 * np.abs(b).max(), name
        rms = np.sqrt(np.mean(np.square(a - b)) / np.mean(np.square(b)))
        assert rms <= 2.0**-7, f"{name}: {rms}"


def sharded(**options):
    return jax.shard_map(
        partial(jax_fa.parallel.attention_with_lse, **options),
        mesh=MESH,
        in_specs=(SPEC,) * 3,
        out_specs=(SPEC, SPEC),
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", OPTIONS)
def test_gpus_that_share_a_sequence_compute_what_one_does(name, strategy):
    options = OPTIONS[name]
    alone = partial(jax_fa.attention_with_lse, **options)
    assert_as_alone(sharded(strategy=strategy, **options), alone, *draw())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_segments_that_gpus_share(strategy):
    def options(ids) -> dict[str, Any]:
        return {"is_causal": True, "query_segment_ids": ids, "key_value_segment_ids": ids}

    def attend(q, k, v, ids):
        how = {**options(ids), "strategy": strategy}
        return jax_fa.parallel.attention_with_lse(q, k, v, **how)

    mapped: Any = jax.shard_map(attend, mesh=MESH, in_specs=(SPEC,) * 4, out_specs=(SPEC, SPEC))
    alone = partial(jax_fa.attention_with_lse, **options(SEGMENTS))
    assert_as_alone(lambda *qkv: mapped(*qkv, SEGMENTS), alone, *draw())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("has_bias", [False, True], ids=["mask", "mask_and_bias"])
def test_masks_and_biases_that_gpus_share(has_bias, strategy):
    rng = np.random.default_rng(1)
    mask = jnp.asarray(rng.random((1, 1, LENGTH, LENGTH)) < 0.7)
    bias = jnp.asarray(rng.standard_normal((1, HEADS["query"], LENGTH, LENGTH)), jnp.bfloat16)
    rows = jax.P(None, None, "context")

    def attend(q, k, v, mask, bias=None):
        how = {"is_causal": True, "strategy": strategy}
        return jax_fa.parallel.attention_with_lse(q, k, v, bias, mask, **how)

    def alone(q, k, v, bias=None):
        return jax_fa.attention_with_lse(q, k, v, bias, mask, is_causal=True)

    given = (bias,) if has_bias else ()
    specs = (SPEC, SPEC, SPEC, rows, *[rows] * len(given))
    mapped: Any = jax.shard_map(attend, mesh=MESH, in_specs=specs, out_specs=(SPEC, SPEC))
    assert_as_alone(lambda q, k, v, *bias: mapped(q, k, v, mask, *bias), alone, *draw(), *given)


def test_exchanged_heads_give_the_bits_of_one_gpu():
    attend = sharded(strategy="all_to_all", is_causal=True, deterministic=True)
    alone = partial(jax_fa.attention_with_lse, is_causal=True, deterministic=True)
    # With fewer sequences a device has so few tiles that it splits keys or heads, and one GPU not.
    got = jax.jit(partial(step, attend))(*draw(32))
    want = jax.jit(partial(step, alone))(*jax.device_put(draw(32), GPUS[0]))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
