"""Several GPUs of one host: shards, replicas and devices other than the first."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa

if "cuda" not in os.environ.get("JAX_PLATFORMS", "") or len(jax.devices("cuda")) < 2:
    pytest.skip("needs two GPUs: set JAX_PLATFORMS=cuda,cpu", allow_module_level=True)

GPUS = jax.devices("cuda")[:2]
SHAPE = (4, 512, 8, 128)


def draw(key_heads=4):
    rng = np.random.default_rng(0)
    shapes = (SHAPE, *[(4, 512, key_heads, 128)] * 2, SHAPE)
    return [rng.standard_normal(shape).astype(jnp.bfloat16) for shape in shapes]


def out_and_gradients(q, k, v, dout):
    def attend(q, k, v):
        return jax_fa.attention(q, k, v, is_causal=True, deterministic=True)

    out, pullback = jax.vjp(attend, q, k, v)
    return out, *pullback(dout)


def alone(*arrays, device=GPUS[0]):
    return jax.jit(out_and_gradients)(*jax.device_put(arrays, device))


def assert_same_bits(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_the_second_gpu_gives_the_same_bits():
    arrays = draw()
    second = alone(*arrays, device=GPUS[1])
    assert second[0].devices() == {GPUS[1]}
    assert_same_bits(second, alone(*arrays))


@pytest.mark.parametrize("spec", [jax.P("x"), jax.P(None, None, "x")], ids=["batch", "heads"])
def test_shards_give_the_same_bits_and_stay_where_they_are(spec):
    arrays, mesh = draw(), jax.sharding.Mesh(np.array(GPUS), ("x",))
    sharding = jax.NamedSharding(mesh, spec)
    program = jax.jit(out_and_gradients).lower(*jax.device_put(arrays, sharding)).compile()
    got = program(*jax.device_put(arrays, sharding))
    assert_same_bits(got, alone(*arrays))
    assert all(x.sharding.is_equivalent_to(sharding, x.ndim) for x in got)
    assert "all-gather" not in program.as_text()


def test_shard_map_and_pmap_give_the_same_bits():
    arrays, mesh = draw(), jax.sharding.Mesh(np.array(GPUS), ("x",))
    wanted = alone(*arrays)
    mapped = jax.shard_map(
        out_and_gradients, mesh=mesh, in_specs=(jax.P("x"),) * 4, out_specs=jax.P("x")
    )
    assert_same_bits(jax.jit(mapped)(*arrays), wanted)
    halves = [x.reshape(2, 2, *x.shape[1:]) for x in arrays]
    got = jax.pmap(out_and_gradients, devices=GPUS)(*halves)
    assert_same_bits([x.reshape(-1, *x.shape[2:]) for x in got], wanted)
