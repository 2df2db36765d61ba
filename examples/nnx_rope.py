"""A layer of ``flax.nnx`` with rotary positions, causal and grouped-query, on the kernels."""

import jax
import jax.numpy as jnp
from flax import nnx

import jax_fa
from jax_fa.flax import make_attention_fn

HEADS, KV_HEADS, WIDTH, LENGTH = 4, 2, 64, 128


def rope(x: jax.Array) -> jax.Array:
    """One head, [L, D], turned by its positions; flax after 0.12.8 has ``nnx.RoPE``."""
    a, b = jnp.split(x, 2, axis=-1)
    angles = jnp.arange(x.shape[0])[:, None] * 1e4 ** -jnp.linspace(0, 1, a.shape[1])
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


layer = nnx.MultiHeadAttention(
    HEADS,
    WIDTH,
    num_kv_heads=KV_HEADS,
    attention_fn=make_attention_fn(is_causal=True, rope=rope),
    decode=False,
    rngs=nnx.Rngs(0),
)


@nnx.jit
def step(layer: nnx.MultiHeadAttention, x: jax.Array) -> jax.Array:
    """One step of gradient descent; the loss before it."""
    loss, gradients = nnx.value_and_grad(lambda layer: jnp.mean((layer(x) - x) ** 2))(layer)
    nnx.update(layer, jax.tree.map(lambda p, g: p - g, nnx.state(layer, nnx.Param), gradients))
    return loss


x = jax.random.normal(jax.random.key(0), (2, LENGTH, WIDTH))
program = step.lower(layer, x).as_text()
losses = [float(step(layer, x)) for _ in range(3)]

q = jax.ShapeDtypeStruct((2, LENGTH, HEADS, WIDTH // HEADS), jnp.float32)
kv = jax.ShapeDtypeStruct((2, LENGTH, KV_HEADS, WIDTH // HEADS), jnp.float32)
print("runs", jax_fa.explain(q, kv, kv, is_causal=True))
print("calls in the step:", *(program.count(f"jax_fa_{call}") for call in ("fwd", "bwd")))
print("loss", *(f"{loss:.3f}" for loss in losses))
