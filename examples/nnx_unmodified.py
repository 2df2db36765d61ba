"""A model of ``flax.nnx`` that knows nothing of jax_fa runs its kernels: ``replace_jax_nn``."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jax_fa

HEADS, WIDTH, LENGTH = 4, 64, 128


class Model(nnx.Module):
    """One causal block over a row of numbers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, LENGTH, WIDTH] of the next numbers."""
        return self.out(x + self.attention(x, is_causal=True))


@nnx.jit
def step(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    """One step of training; the loss before it."""

    def loss(model: Model) -> jax.Array:
        return jnp.mean((model(x[:, :-1]) - x[:, 1:]) ** 2)

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


model = Model(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
x = jax.random.normal(jax.random.key(0), (2, LENGTH + 1, WIDTH))

with jax_fa.replace_jax_nn():
    program = step.lower(model, optimizer, x).as_text()
    losses = [float(step(model, optimizer, x)) for _ in range(3)]

heads = jax.ShapeDtypeStruct((2, LENGTH, HEADS, WIDTH // HEADS), jnp.float32)
print("runs", jax_fa.explain(heads, heads, heads, is_causal=True))
print("calls in the step:", *(program.count(f"jax_fa_{call}") for call in ("fwd", "bwd")))
print("loss", *(f"{loss:.3f}" for loss in losses))
