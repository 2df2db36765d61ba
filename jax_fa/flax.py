"""The attention function of Flax layers, linen and NNX.

    flax.linen.MultiHeadDotProductAttention(num_heads=8, attention_fn=jax_fa.flax.attention_fn)
    flax.nnx.MultiHeadAttention(..., attention_fn=jax_fa.flax.make_attention_fn(is_causal=True))

A mask array has T x S entries and runs unfused, whatever it holds. Say "this layer is causal"
instead, by ``make_attention_fn(is_causal=True)`` (or ``is_causal=True`` in a call of an NNX layer),
and give no mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jax_fa import checks
from jax_fa.api import attention
from jax_fa.arguments import WindowSize
from jax_fa.band import Alignment
from jax_fa.choice import Implementation

_PRECISIONS = (None, "default", "high", "highest", "float32", *jax.lax.Precision)
"""At most what every path computes in: float32 products of float32 operands."""


@dataclass(frozen=True)
class AttentionFn:
    """An attention function for Flax layers, with the properties of one layer.

    Functions with equal properties are equal: a layer that is built again does not compile again.
    Flax's own ``deterministic``, which switches dropout, belongs to the call; the one here is of
    the gradient.

    Attributes:
        is_causal: as of ``jax_fa.attention``, as are all of these.
        local_window_size: w or (left, right).
        causal_alignment: "top_left" or "bottom_right".
        logits_soft_cap: bound of the logits.
        scale: factor of the logits; head size ** -0.5 if None.
        implementation: forced implementation, or None.
        deterministic: identical bits of the gradient on every run.
    """

    is_causal: bool = False
    local_window_size: WindowSize = None
    causal_alignment: Alignment = "top_left"
    logits_soft_cap: float | None = None
    scale: float | None = None
    implementation: Implementation | None = None
    deterministic: bool = False

    # HAZARD: linen passes only the keywords that it finds in this signature, and drops the mask
    # itself without a word if it is not among them. Every parameter has to be named.
    def __call__(  # noqa: PLR0913 (the parameters that Flax passes)
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        is_causal: bool = False,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> Array:
        """Attention over any number of batch dimensions, as Flax layers call it.

        A mask and the band of the layer (causal, window) both apply. The exception is a step of
        decoding, one query against a cache: Flax's mask ends at the position of the query, which
        nothing else in the call tells, so it replaces the causal band; a window is refused there.
        A row whose keys are all masked gives 0, where Flax averages all values.

        Args:
            query: [batch..., T, N, D].
            key: [batch..., S, K, D]; N is a multiple of K.
            value: [batch..., S, K, Dv].
            bias: added to the scaled logits, broadcastable to [batch..., N, T, S]; runs unfused.
            mask: of any dtype, nonzero takes part; shapes as of bias; runs unfused.
            broadcast_dropout: of no effect without dropout.
            dropout_rng: of no effect without dropout.
            dropout_rate: refused unless 0 or ``deterministic``.
            deterministic: True switches dropout off.
            dtype: of the computation and the output; the common dtype of the operands if None.
            precision: accepted up to "highest", which every path keeps anyway.
            module: the layer, if it should sow its attention weights: refused.
            force_fp32_for_softmax: of no effect, the softmax is always in float32.
            is_causal: of this call; the layer may be causal by itself.
            qk_attn_weights_einsum: refused, the fused product has no einsum to replace.
            attn_weights_value_einsum: likewise.

        Returns:
            [batch..., T, N, Dv].

        Raises:
            NotImplementedError: dropout, sown weights, replaced einsums, a lowered precision, or a
                window in a step of decoding.
            ValueError: shapes do not fit.
        """
        del broadcast_dropout, dropout_rng, force_fp32_for_softmax
        if dropout_rate > 0 and not deterministic:
            raise NotImplementedError(
                f"attention_fn: dropout_rate={dropout_rate} asks for dropout of attention weights, "
                f"which fused attention never forms. Use dropout_rate=0 and drop out the layer's "
                f"output, or pass deterministic=True."
            )
        if module is not None:
            raise NotImplementedError(
                "attention_fn: sow_weights asks for the attention weights, which fused attention "
                "never forms. Leave attention_fn at Flax's default for a layer whose weights you "
                "want to see."
            )
        if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
            raise NotImplementedError(
                "attention_fn: replaced einsums (quantized products) would have no effect on fused "
                "attention. Leave attention_fn at Flax's default for that layer."
            )
        _check_precision(precision)
        query, key, value = (
            _checked(name, x) for name, x in (("query", query), ("key", key), ("value", value))
        )
        band = self._band(query.shape[-3], key.shape[-3], mask is not None, is_causal)
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        batch = query.shape[:-3]
        query, key, value = (_fold(x.astype(dtype), batch) for x in (query, key, value))
        out = attention(
            query,
            key,
            value,
            bias=None if bias is None else _fold_pairwise(checks.array("bias", bias), batch),
            mask=None
            if mask is None
            else _fold_pairwise(checks.reals("mask", mask).astype(bool), batch),
            **band,
            logits_soft_cap=self.logits_soft_cap,
            scale=self.scale,
            implementation=self.implementation,
            deterministic=self.deterministic,
        )
        return out.reshape(*batch, *out.shape[1:])

    def _band(self, q_len: int, kv_len: int, has_mask: bool, is_causal: bool) -> dict[str, Any]:
        """Keywords of ``attention`` for which keys a query sees."""
        if q_len == 1 < kv_len and has_mask:
            if self.local_window_size is not None:
                raise NotImplementedError(
                    f"attention_fn: local_window_size={self.local_window_size} with one query, "
                    f"{kv_len} keys and a mask is a step of decoding, whose position only the mask "
                    f"knows. Put the window into the mask and use a function without it, or call "
                    f"jax_fa.attention with query_offset."
                )
            return {}
        return {
            "is_causal": any([checks.flag("is_causal", x) for x in (self.is_causal, is_causal)]),
            "local_window_size": self.local_window_size,
            "causal_alignment": self.causal_alignment,
        }


make_attention_fn = AttentionFn
"""The factory: ``make_attention_fn(is_causal=True, local_window_size=(255, 0))``."""

attention_fn = AttentionFn()
"""The attention function of a layer without properties of its own."""


def _checked(name: str, given: Any) -> Array:
    array = checks.array(name, given)
    if array.ndim < 3:
        raise ValueError(
            f"attention_fn: {name} should be [batch..., length, heads, head size], but has shape "
            f"{array.shape}."
        )
    return array


def _check_precision(precision: Any) -> None:
    sides = precision if isinstance(precision, tuple | list) else (precision,)
    for side in sides:
        if side not in _PRECISIONS:
            raise NotImplementedError(
                f"attention_fn: precision={precision!r} would have no effect on fused attention, "
                f"which multiplies at full precision. Use None, or 'highest' for the rest of the "
                f"layer."
            )


def _fold(x: Array, batch: tuple[int, ...]) -> Array:
    """[batch..., L, H, D] -> [B, L, H, D]."""
    if x.shape[:-3] != batch:
        raise ValueError(
            f"attention_fn: query has batch dimensions {list(batch)}, but key or value has "
            f"{list(x.shape[:-3])}; they should be equal."
        )
    return x.reshape(math.prod(batch), *x.shape[-3:])


def _fold_pairwise(x: Array, batch: tuple[int, ...]) -> Array:
    """Anything broadcastable to [batch..., N, T, S] -> [B|1, N|1, T|1, S|1]."""
    rank = len(batch) + 3
    if x.ndim > rank:
        raise ValueError(
            f"attention_fn: mask or bias has shape {list(x.shape)}, but should broadcast to batch "
            f"dimensions {list(batch)}, heads, query and key length."
        )
    x = x.reshape(*(1,) * (rank - x.ndim), *x.shape)
    if math.prod(x.shape[:-3]) == 1:
        return x.reshape(1, *x.shape[-3:])
    return jnp.broadcast_to(x, (*batch, *x.shape[-3:])).reshape(math.prod(batch), *x.shape[-3:])
