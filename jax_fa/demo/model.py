"""A small GPT in Flax NNX whose attention is ``jax_fa.attention``. Made to be copied.

Pre-norm blocks, rotary positions, grouped-query attention, a gated MLP, tied embeddings.
Letters in shapes: B batch, T length, N query heads, K key/value heads, D head size, C model width.

Under ``jax.set_mesh`` with the axes of ``MeshConfig``, devices share the batch, the tokens and the
heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

import jax_fa
from jax_fa.runtime.dispatch import Implementation


@dataclass(frozen=True)
class ModelConfig:
    """Size of a GPT, and what its attention runs on.

    Attributes:
        vocab_size: number of tokens; 256 for bytes.
        context: T, the longest sequence.
        num_layers: number of blocks.
        d_model: C, a multiple of 2 * num_heads.
        num_heads: N.
        num_kv_heads: K, a divisor of N.
        dtype: of activations and products; parameters and the loss are float32.
        implementation: of attention, as in ``jax_fa.attention``.
    """

    vocab_size: int = 256
    context: int = 256
    num_layers: int = 4
    d_model: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    dtype: str = "float32"
    implementation: Implementation | None = None

    def __post_init__(self) -> None:
        """Refuses sizes that do not go together."""
        for name in ("context", "num_layers", "d_model", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it should be at least 1.")
        if self.d_model % (2 * self.num_heads):
            raise ValueError(
                f"d_model is {self.d_model} and num_heads {self.num_heads}; rotary positions need "
                f"an even head size, so d_model should be a multiple of {2 * self.num_heads}."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads} and num_kv_heads {self.num_kv_heads}; num_heads "
                f"should be a multiple of num_kv_heads."
            )

    @property
    def head_dim(self) -> int:
        """D."""
        return self.d_model // self.num_heads

    @property
    def hidden(self) -> int:
        """Width of the MLP: 8 / 3 of C, rounded up so that it splits wherever heads do."""
        return math.ceil(8 * self.d_model / 3 / self.num_heads) * self.num_heads


def rotate(x: Array) -> Array:
    """Rotary positions: turns each pair of features of [B, T, N, D] by its position.

    Source: Su et al., "RoFormer", arXiv:2104.09864.
    """
    length, half = x.shape[1], x.shape[3] // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(length)[:, None, None] * frequency  # [T, 1, D / 2]
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def attend(q: Array, k: Array, v: Array, implementation: Implementation | None) -> Array:
    """Causal attention, [B, T, N, D]; on a mesh, each device attends for its rows and heads."""
    if jax.sharding.get_abstract_mesh().empty:
        return jax_fa.attention(q, k, v, is_causal=True, implementation=implementation)
    attend = partial(jax_fa.parallel.attention, is_causal=True, implementation=implementation)
    split = P("data", "context", "model")
    return jax.shard_map(attend, in_specs=(split, split, split), out_specs=split)(q, k, v)


class CausalSelfAttention(nnx.Module):
    """Each position looks at itself and at those before it."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        width, dtype = config.d_model, config.dtype
        # By key/value head: the query heads that share it, its keys, its values.
        heads = (config.num_kv_heads, config.num_heads // config.num_kv_heads + 2)
        self.qkv = nnx.LinearGeneral(
            width, (*heads, config.head_dim), use_bias=False, dtype=dtype, rngs=rngs
        )
        self.out = nnx.LinearGeneral(
            (config.num_heads, config.head_dim),
            width,
            axis=(-2, -1),
            use_bias=False,
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(self, x: Array) -> Array:
        """[B, T, C] -> [B, T, C]."""
        config = self.config
        qkv = self.qkv(x)  # [B, T, K, N / K + 2, D]
        q = qkv[..., :-2, :].reshape(*x.shape[:2], config.num_heads, config.head_dim)
        k, v = qkv[..., -2, :], qkv[..., -1, :]  # [B, T, K, D]
        return self.out(attend(rotate(q), rotate(k), v, config.implementation))


class GatedMLP(nnx.Module):
    """SwiGLU: silu(x W) * (x V), projected back. Source: Shazeer, arXiv:2002.05202."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        width, dtype = config.d_model, config.dtype
        self.gate = nnx.Linear(width, config.hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, config.hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(config.hidden, width, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """[B, T, C] -> [B, T, C]."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention, then MLP, each added to what came in."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(config.d_model, dtype=config.dtype, rngs=rngs)
        self.attention = CausalSelfAttention(config, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(config.d_model, dtype=config.dtype, rngs=rngs)
        self.mlp = GatedMLP(config, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """[B, T, C] -> [B, T, C]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nnx.Module):
    """Logits of the next token at every position."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = nnx.Embed(
            config.vocab_size,
            config.d_model,
            embedding_init=nnx.initializers.normal(0.02),
            dtype=config.dtype,
            rngs=rngs,
        )
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.d_model, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        """Tokens, int [B, T] -> logits, float32 [B, T, vocab_size]."""
        x = self.embed(tokens)
        if not jax.sharding.get_abstract_mesh().empty:
            x = jax.lax.with_sharding_constraint(x, P("data", "context"))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x)).astype(jnp.float32)
