"""The attention function of Flax layers, linen and NNX.

    flax.linen.MultiHeadDotProductAttention(num_heads=8, attention_fn=jax_fa.flax.attention_fn)
    flax.nnx.MultiHeadAttention(..., attention_fn=jax_fa.flax.make_attention_fn(is_causal=True))

Kernels serve any mask, as packed bits. But a mask array takes memory for T x S entries, which
attention itself does not need, and tells kernels less about what is hidden. There are three ways to
avoid one:

* Declare the layer causal, by ``make_attention_fn(is_causal=True)`` (or ``is_causal=True`` in a
  call of an NNX layer), and give no mask.
* Make masks with this module's ``make_causal_mask``, ``make_attention_mask`` and ``combine_masks``:
  Flax's functions, but their results remember the parts they were made of.
* Pass a mask array whose values are known when the program is traced: one that a jitted function
  closes over, not one that it computes. Causal masks, padding masks and products of them are then
  recognised by their values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_fa import layer_masks
from jax_fa.api import attention
from jax_fa.layer_masks import Mask
from jax_fa.runtime import checks
from jax_fa.runtime.arguments import WindowSize
from jax_fa.runtime.dispatch import Implementation
from jax_fa.spec.band import Alignment

_PRECISIONS = (None, "default", "high", "highest", "float32", *jax.lax.Precision)
"""At most what every path computes in: float32 products of float32 operands."""


@dataclass(frozen=True)
class AttentionFn:
    """An attention function for Flax layers, with the properties of one layer.

    Functions with equal properties compare equal, so a layer that is built again is not compiled
    again. ``deterministic`` here is about gradients; Flax's own ``deterministic``, which switches
    dropout off, is an argument of the call.

    Attributes:
        is_causal: as for ``jax_fa.attention``, as are all others but ``rope``.
        local_window_size: w or (left, right).
        causal_alignment: "top_left" or "bottom_right".
        logits_soft_cap: bound on the logits.
        scale: factor applied to the logits; head size ** -0.5 if None.
        implementation: forced implementation, or None.
        deterministic: gradients with the same bits on every run on a GPU of the same kind.
        rope: rotates one head of query or key, [length, D], by positions counted from 0, before
            the product: ``nnx.RoPE``, Equinox's ``RotaryPositionalEmbedding``, or any function.
            Not for decoding steps, since it does not receive their position.
    """

    is_causal: bool = False
    local_window_size: WindowSize = None
    causal_alignment: Alignment = "top_left"
    logits_soft_cap: float | None = None
    scale: float | None = None
    implementation: Implementation | None = None
    deterministic: bool = False
    rope: Callable[[Array], Array] | None = None

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

        A mask and the band of the layer (causal, window) both apply. The exception is a decoding
        step, one query against a cache: only Flax's mask tells the position of the query, so it
        replaces the causal band; a window is refused there.
        A row whose keys are all masked gives 0, where Flax averages all values.

        Args:
            query: [batch..., T, N, D].
            key: [batch..., S, K, D]; N is a multiple of K.
            value: [batch..., S, K, Dv].
            bias: added to the scaled logits, broadcastable to [batch..., N, T, S].
            mask: any dtype, nonzero where a query sees a key; shapes as for bias.
            broadcast_dropout: ignored, since there is no dropout.
            dropout_rng: ignored, since there is no dropout.
            dropout_rate: refused unless 0 or ``deterministic``.
            deterministic: True switches dropout off.
            dtype: of the computation and the output; the operands' common dtype if None.
            precision: accepted up to "highest", which every path keeps anyway.
            module: the layer, if it should sow its attention weights: refused.
            force_fp32_for_softmax: ignored, since the softmax is always in float32.
            is_causal: makes this call causal; the layer may be causal anyway.
            qk_attn_weights_einsum: refused, since the fused product has no einsum to replace.
            attn_weights_value_einsum: likewise.

        Returns:
            [batch..., T, N, Dv].

        Raises:
            NotImplementedError: the call asks for dropout, sown weights, replaced einsums, lowered
                precision, or a window in a decoding step.
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
        keys_seen = self._keys_seen(query.shape, key.shape, mask, is_causal)
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        batch = query.shape[:-3]
        query, key, value = (_fold(x, batch) for x in (query, key, value))
        out = attention(
            self._turned(query).astype(dtype),
            self._turned(key).astype(dtype),
            value.astype(dtype),
            bias=None if bias is None else _fold_pairwise(checks.array("bias", bias), batch),
            **keys_seen,
            logits_soft_cap=self.logits_soft_cap,
            scale=self.scale,
            implementation=self.implementation,
            deterministic=self.deterministic,
        )
        return out.reshape(*batch, *out.shape[1:])

    def _turned(self, x: Array) -> Array:
        """[B, L, H, D], turned by ``rope``."""
        return x if self.rope is None else jax.vmap(jax.vmap(self.rope, 1, 1))(x)

    def _keys_seen(
        self, q_shape: tuple[int, ...], kv_shape: tuple[int, ...], mask: Any, is_causal: bool
    ) -> dict[str, Any]:
        """The keywords of ``attention`` that say which keys a query sees."""
        batch, (q_len, heads), kv_len = q_shape[:-3], q_shape[-3:-1], kv_shape[-3]
        seen = self._band(q_len, kv_len, mask is not None, is_causal)
        if mask is None:
            return seen
        array = None if isinstance(mask, Mask) else checks.reals("mask", mask)
        parts = layer_masks.recognised(
            mask if array is None or isinstance(mask, np.ndarray) else array,
            (*batch, heads, q_len, kv_len),
        )
        # A causal mask starts its diagonal at key 0, the band of a bottom-right layer does not.
        is_top_left = q_len == kv_len or seen.get("causal_alignment") in (None, "top_left")
        if parts is None or (parts.is_causal and not is_top_left):
            array = jnp.asarray(mask) if array is None else array
            return {**seen, "mask": _fold_pairwise(array.astype(bool), batch)}
        if parts.is_causal:
            seen["is_causal"] = True
        ids = parts.ids()
        if ids is not None:
            lengths = (q_len, kv_len)
            q_ids, kv_ids = (
                jnp.broadcast_to(x, (*batch, length)).reshape(math.prod(batch), length)
                for x, length in zip(ids, lengths, strict=True)
            )
            seen |= {"query_segment_ids": q_ids, "key_value_segment_ids": kv_ids}
        return seen

    def _band(self, q_len: int, kv_len: int, has_mask: bool, is_causal: bool) -> dict[str, Any]:
        """The keywords of ``attention`` that state the band."""
        if q_len == 1 < kv_len and has_mask:
            self._check_decoding(kv_len)
            return {}
        return {
            "is_causal": any([checks.flag("is_causal", x) for x in (self.is_causal, is_causal)]),
            "local_window_size": self.local_window_size,
            "causal_alignment": self.causal_alignment,
        }

    def _check_decoding(self, kv_len: int) -> None:
        step = (
            f"with one query, {kv_len} keys and a mask is a step of decoding, whose position only "
            f"the mask knows"
        )
        if self.local_window_size is not None:
            raise NotImplementedError(
                f"attention_fn: local_window_size={self.local_window_size} {step}. Put the window "
                f"into the mask and use a function without it, or call jax_fa.attention with "
                f"query_offset."
            )
        if self.rope is not None:
            raise NotImplementedError(
                f"attention_fn: rope {step}. Turn query and key by their positions before they "
                f"enter the cache, and use a function without rope."
            )


make_attention_fn = AttentionFn
"""The factory: ``make_attention_fn(is_causal=True, local_window_size=(255, 0))``."""

attention_fn = AttentionFn()
"""The attention function of a layer without properties of its own."""


# ------------------------------------------------------------------------------------------- masks


def make_causal_mask(x: Any, extra_batch_dims: int = 0, dtype: Any = jnp.float32) -> Mask:
    """Flax's ``make_causal_mask``, as a ``Mask`` that ``attention_fn`` knows to be causal.

    Args:
        x: [batch..., L]; only its shape matters.
        extra_batch_dims: leading dimensions of 1 of the array.
        dtype: of the array.
    """
    return Mask(
        (x.shape[-1],) * 2, x.ndim + 2 + extra_batch_dims, is_causal=True, dtype=np.dtype(dtype)
    )


def make_attention_mask(
    query_input: Any,
    key_input: Any,
    pairwise_fn: Callable[..., Any] = jnp.multiply,
    extra_batch_dims: int = 0,
    dtype: Any = jnp.float32,
) -> Any:
    """Flax's ``make_attention_mask``, as a ``Mask`` for padding and for documents.

    Args:
        query_input: [batch..., T].
        key_input: [batch..., S].
        pairwise_fn: ``jnp.multiply`` or ``jnp.logical_and`` if inputs are nonzero where a token is
            no padding; ``jnp.equal`` if they are the numbers of documents: integers of up to 32
            bits, below 2 ** 31 - 2. With any other function, Flax's array is returned.
        extra_batch_dims: leading dimensions of 1 of the array.
        dtype: of the array.
    """
    inputs = tuple(
        jnp.expand_dims(x, tuple(range(extra_batch_dims))) for x in (query_input, key_input)
    )
    make = functools.partial(
        Mask,
        (inputs[0].shape[-1], inputs[1].shape[-1]),
        max(x.ndim for x in inputs) + 2,
        dtype=np.dtype(dtype),
    )
    if pairwise_fn in (jnp.multiply, jnp.logical_and):
        return make(visible=(inputs[0] != 0, inputs[1] != 0))
    if pairwise_fn is jnp.equal and all(_fits_int32(x.dtype) for x in inputs):
        return make(segments=(inputs[0], inputs[1]))
    from flax import nnx

    return nnx.make_attention_mask(query_input, key_input, pairwise_fn, extra_batch_dims, dtype)


def combine_masks(*masks: Any, dtype: Any = jnp.float32) -> Any:
    """Flax's ``combine_masks``; gives a ``Mask`` if all are of this class, with equal documents.

    Args:
        *masks: masks of this module, arrays, or None; all of the same rank.
        dtype: of the array.

    Returns:
        A ``Mask``, an array, or None if no masks are given.
    """
    given = [mask for mask in masks if mask is not None]
    by_parts = [mask for mask in given if isinstance(mask, Mask)]
    if given and len(by_parts) == len(given) and len({mask.rank for mask in by_parts}) == 1:
        both = layer_masks.combined(by_parts)
        if both is not None:
            return replace(both, dtype=np.dtype(dtype))
    from flax import nnx

    arrays = [jnp.asarray(mask) if isinstance(mask, Mask) else mask for mask in given]
    return nnx.combine_masks(*arrays, dtype=dtype)


def _fits_int32(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).max <= jnp.iinfo(jnp.int32).max


# ------------------------------------------------------------------------------------------ checks


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
