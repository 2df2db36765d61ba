"""A layer of ``flax.linen`` over padded sequences, with masks whose parts kernels know."""

import flax.linen as nn
import jax
import jax.numpy as jnp

import jax_fa
from jax_fa.flax import attention_fn, combine_masks, make_attention_mask, make_causal_mask

HEADS, WIDTH, LENGTH, PAD = 4, 64, 128, 0


class Model(nn.Module):
    """Embeddings and one causal block; padding sees nothing and is not seen."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[B, LENGTH, 32] logits of the tokens."""
        used = tokens != PAD
        mask = combine_masks(make_causal_mask(tokens), make_attention_mask(used, used))
        x = nn.Embed(32, WIDTH)(tokens)
        layer = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn)
        return nn.Dense(32)(x + layer(x, mask=mask))


model = Model()
lengths = jnp.array([[100], [37]])
tokens = jax.random.randint(jax.random.key(0), (2, LENGTH), 1, 32)
tokens = jnp.where(jnp.arange(LENGTH) < lengths, tokens, PAD)


@jax.jit
def step(parameters: dict, tokens: jax.Array) -> tuple[dict, jax.Array]:
    """Parameters after one step of gradient descent, and the loss before it."""

    def loss(parameters: dict) -> jax.Array:
        chances = jax.nn.log_softmax(model.apply(parameters, tokens[:, :-1]))
        hits = jnp.take_along_axis(chances, tokens[:, 1:, None], axis=-1)[..., 0]
        return -jnp.mean(hits, where=tokens[:, 1:] != PAD)

    value, gradients = jax.value_and_grad(loss)(parameters)
    return jax.tree.map(lambda p, g: p - g, parameters, gradients), value


parameters = model.init(jax.random.key(1), tokens)
program = step.lower(parameters, tokens).as_text()
losses = []
for _ in range(3):
    parameters, loss = step(parameters, tokens)
    losses.append(float(loss))

heads = jax.ShapeDtypeStruct((2, LENGTH - 1, HEADS, WIDTH // HEADS), jnp.float32)
ids = jax.ShapeDtypeStruct((2, LENGTH - 1), jnp.int32)
segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
print("runs", jax_fa.explain(heads, heads, heads, is_causal=True, **segments))
print("calls in the step:", *(program.count(f"jax_fa_{call}") for call in ("fwd", "bwd")))
print("loss", *(f"{loss:.3f}" for loss in losses))
