"""An Equinox model whose attention layers are exchanged for ones that run the kernels."""

import equinox as eqx
import jax
import jax.numpy as jnp

import jax_fa
from jax_fa.equinox import with_kernels

HEADS, WIDTH, LENGTH = 4, 64, 128


class Model(eqx.Module):
    """One block over a row of numbers; whether it is causal is said where layers are exchanged."""

    attention: eqx.nn.MultiheadAttention
    out: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=first)
        self.out = eqx.nn.Linear(WIDTH, WIDTH, key=second)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[LENGTH, WIDTH] of the next numbers."""
        return jax.vmap(self.out)(x + self.attention(x, x, x))


@eqx.filter_jit
def step(model: Model, x: jax.Array) -> tuple[Model, jax.Array]:
    """The model after one step of gradient descent, and the loss before it."""

    def loss(model: Model) -> jax.Array:
        return jnp.mean((jax.vmap(model)(x[:, :-1]) - x[:, 1:]) ** 2)

    value, gradients = eqx.filter_value_and_grad(loss)(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -g, gradients)), value


rope = eqx.nn.RotaryPositionalEmbedding(WIDTH // HEADS)
model = with_kernels(Model(jax.random.key(0)), is_causal=True, rope=rope)
x = jax.random.normal(jax.random.key(1), (2, LENGTH + 1, WIDTH))

program = step.lower(model, x).as_text()
losses = []
for _ in range(3):
    model, loss = step(model, x)
    losses.append(float(loss))

heads = jax.ShapeDtypeStruct((2, LENGTH, HEADS, WIDTH // HEADS), jnp.float32)
print("runs", jax_fa.explain(heads, heads, heads, is_causal=True))
print("calls in the step:", *(program.count(f"jax_fa_{call}") for call in ("fwd", "bwd")))
print("loss", *(f"{loss:.3f}" for loss in losses))
