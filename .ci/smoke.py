"""Runs attention and its gradient, and a GPU kernel in the emulator, from an installed jax_fa."""

import jax
import jax.numpy as jnp

import jax_fa

q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 33, 2, 16))


def loss(attention, q, k, v):
    return jnp.sum(attention(q, k, v, is_causal=True) ** 2)


for argument in range(3):
    got = jax.grad(loss, argument + 1)(jax_fa.attention, q, k, v)
    wanted = jax.grad(loss, argument + 1)(jax.nn.dot_product_attention, q, k, v)
    if not jnp.allclose(got, wanted, atol=1e-4):
        raise SystemExit(f"{jax_fa.__file__}: gradient {argument} differs from jax.nn's")

q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 33, 1, 64), jnp.bfloat16)
with jax_fa.emulation("sm90"):
    got = jax_fa.attention(q, k, v, is_causal=True, implementation="emulated")
wanted = jax.nn.dot_product_attention(q, k, v, is_causal=True)
if not jnp.allclose(got, wanted, atol=0.05):
    raise SystemExit(f"{jax_fa.__file__}: the emulated kernel differs from jax.nn's")
