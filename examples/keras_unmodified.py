"""A Keras model on the JAX backend runs the kernels as it is: ``replace_jax_nn``."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import keras
import numpy as np

import jax_fa

HEADS, KV_HEADS, WIDTH, LENGTH = 4, 2, 64, 128

x = keras.Input((LENGTH, WIDTH))
y = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(x, x, use_causal_mask=True)
y = keras.layers.GroupQueryAttention(WIDTH // HEADS, HEADS, KV_HEADS)(y, y, use_causal_mask=True)
model = keras.Model(x, keras.layers.Dense(WIDTH)(y))
model.compile(keras.optimizers.Adam(1e-2), "mse")
numbers = np.random.default_rng(0).standard_normal((2, LENGTH + 1, WIDTH), np.float32)


def predict(x: jax.Array) -> jax.Array:
    """The model without training."""
    return model.stateless_call(model.trainable_variables, model.non_trainable_variables, x)[0]


with jax_fa.replace_jax_nn():
    program = jax.jit(predict).lower(numbers[:, :-1]).as_text()
    history = model.fit(numbers[:, :-1], numbers[:, 1:], batch_size=2, epochs=3, verbose=0)

q = jax.ShapeDtypeStruct((2, LENGTH, HEADS, WIDTH // HEADS), jnp.float32)
print("runs", jax_fa.explain(q, q, q, is_causal=True))
print("calls in the model:", *(program.count(f"jax_fa_{call}") for call in ("fwd", "bwd")))
print("loss", *(f"{loss:.3f}" for loss in history.history["loss"]))
