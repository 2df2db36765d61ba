"""Attention in plain jnp with a T x S score matrix: the oracle, and what ``blockwise`` splits.

Differentiable any number of times in any mode. Accumulates in float32 (float64 for float64 inputs);
with float32 inputs this is the oracle every kernel is measured against.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jax_fa.runtime import masks
from jax_fa.runtime.sequences import with_slot_in_front
from jax_fa.spec.band import Extremes, key_range
from jax_fa.spec.problem import Gradients, Operands, Semantics, arrays_of


class _Tokens(NamedTuple):
    """The sequence and position of each row of one side: [B, L] arrays."""

    sequence: Array
    position: Array
    used: Array


def with_a_sequence(operands: Operands) -> Operands:
    """Operands with at least one sequence, so that every token has a sequence number."""
    is_without = operands.is_packed and operands.num_sequences == 0
    return with_slot_in_front(operands) if is_without else operands


def _tokens(shape: tuple[int, int], cu_seqlens: Array | None, lengths: Array | None) -> _Tokens:
    batch, length = shape
    if cu_seqlens is None:
        sequence = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], shape)
        position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], shape)
        limit = length if lengths is None else jnp.clip(lengths, 0, length)[sequence]
        return _Tokens(sequence, position, position < limit)
    token = jnp.arange(length, dtype=jnp.int32)
    last = cu_seqlens.shape[0] - 2
    sequence = jnp.searchsorted(cu_seqlens, token, side="right").astype(jnp.int32) - 1
    inside = (sequence >= 0) & (sequence <= last)
    sequence = jnp.clip(sequence, 0, last)
    position = token - cu_seqlens[sequence]
    used = inside & (position < used_lengths(cu_seqlens, lengths)[sequence])
    return _Tokens(sequence[None], position[None], used[None])


def tokens_of(operands: Operands, extents: tuple[Any, Any]) -> tuple[_Tokens, _Tokens]:
    """The sequence and place of all T rows and all S keys, whatever part of them operands hold."""
    batch = operands.q.shape[0]
    return (
        _tokens((batch, extents[0]), operands.cu_seqlens_q, operands.q_lengths),
        _tokens((batch, extents[1]), operands.cu_seqlens_k, operands.kv_lengths),
    )


def used_rows(operands: Operands) -> Array:
    """Bool [B, T]: the rows that belong to a sequence."""
    return _tokens(operands.q.shape[:2], operands.cu_seqlens_q, operands.q_lengths).used


def used_lengths(cu_seqlens: Array, lengths: Array | None) -> Array:
    """[M] used tokens of each packed sequence."""
    slots = cu_seqlens[1:] - cu_seqlens[:-1]
    return slots if lengths is None else jnp.clip(lengths, 0, slots)


def _sequence_lengths(
    num_sequences: int, length: int, cu_seqlens: Array | None, lengths: Array | None
) -> Array:
    if cu_seqlens is not None:
        return used_lengths(cu_seqlens, lengths)
    if lengths is not None:
        return jnp.clip(lengths, 0, length)
    return jnp.full((num_sequences,), length, jnp.int32)


class _Visibility(NamedTuple):
    """The visible pairs; ``pairs`` [B, T, S] is None if every pair of used rows is visible."""

    rows: Array  # [B, T]
    keys: Array  # [B, S]
    pairs: Array | None


def _visibility(operands: Operands, semantics: Semantics) -> _Visibility:
    q_shape, kv_shape = operands.q.shape[:2], operands.k.shape[:2]
    rows = _tokens(q_shape, operands.cu_seqlens_q, operands.q_lengths)
    keys = _tokens(kv_shape, operands.cu_seqlens_k, operands.kv_lengths)
    band = semantics.band
    if band.is_full and not operands.is_packed and operands.q_segments is None:
        if operands.kv_lengths is None:
            return _Visibility(rows.used, keys.used, None)
        return _Visibility(
            rows.used, keys.used, jnp.broadcast_to(keys.used[:, None, :], (*q_shape, kv_shape[1]))
        )
    q_len, kv_len = lengths(operands, (q_shape[1], kv_shape[1]))
    shift = diagonals(operands, semantics, (q_len, kv_len))
    window = band.window(shift[rows.sequence], q_len[rows.sequence], kv_len[rows.sequence])
    seen = key_range(window, rows.position, Extremes(jnp.minimum, jnp.maximum))
    position = keys.position[:, None, :]  # [B, 1, S]
    pairs = (position >= seen.lo[:, :, None]) & (position < seen.hi[:, :, None])
    pairs &= keys.used[:, None, :]
    if operands.is_packed:
        pairs &= rows.sequence[:, :, None] == keys.sequence[:, None, :]
    if operands.q_segments is not None:
        pairs &= operands.q_segments[:, :, None] == operands.kv_segments[:, None, :]
    return _Visibility(rows.used, keys.used, pairs)


def lengths(operands: Operands, extents: tuple[Any, Any]) -> tuple[Array, Array]:
    """[M] used rows and [M] used keys of each sequence, among ``extents`` = (T, S) tokens."""
    count = operands.num_sequences
    return (
        _sequence_lengths(count, extents[0], operands.cu_seqlens_q, operands.q_lengths),
        _sequence_lengths(count, extents[1], operands.cu_seqlens_k, operands.kv_lengths),
    )


def diagonals(operands: Operands, semantics: Semantics, lengths: tuple[Array, Array]) -> Array:
    """[M] key position of query row 0 of each sequence, given ``lengths`` of the whole."""
    offset = 0 if operands.q_offset is None else operands.q_offset
    shift = semantics.band.shift(*lengths, offset)
    return jnp.broadcast_to(jnp.asarray(shift, jnp.int32), (operands.num_sequences,))


def _sinks_per_row(operands: Operands) -> Array | None:
    """[B, K, G, T] logits of the sinks, or None."""
    if operands.sinks is None:
        return None
    batch, q_len, num_q_heads, _ = operands.q.shape
    num_kv_heads = operands.k.shape[2]
    rows = _tokens((batch, q_len), operands.cu_seqlens_q, operands.q_lengths)
    per_row = operands.sinks[rows.sequence]  # [B, T, N]
    return jnp.transpose(
        per_row.reshape(batch, q_len, num_kv_heads, num_q_heads // num_kv_heads), (0, 2, 3, 1)
    )


def _grouped(x: Array, num_kv_heads: int) -> Array:
    """[B, T, N, D] -> [B, T, K, G, D]."""
    batch, length, heads, dim = x.shape
    return x.reshape(batch, length, num_kv_heads, heads // num_kv_heads, dim)


def _per_head(x: Array, num_kv_heads: int) -> Array:
    """A [B|1, N|1, T|1, S|1] mask or bias -> [.., K|1, G|1, T|1, S|1]."""
    batch, heads, q_len, kv_len = x.shape
    split = (1, 1) if heads == 1 else (num_kv_heads, heads // num_kv_heads)
    return x.reshape(batch, *split, q_len, kv_len)


def wide(dtype: Any) -> Any:
    """The type in which sums over elements of ``dtype`` are formed, and the LSE given."""
    # Said without promotion of types, which users may make strict.
    return dtype if dtype == jnp.float64 else jnp.dtype(jnp.float32)


def _einsum(spec: str, a: Array, b: Array) -> Array:
    dtype = wide(a.dtype)
    return jnp.einsum(spec, a, b, preferred_element_type=dtype, precision=jax.lax.Precision.HIGHEST)


def _where(visible: Array | None, x: Array, otherwise: float = 0.0) -> Array:
    """``x`` with something else for hidden pairs; ``visible`` is None if there are none."""
    return x if visible is None else jnp.where(visible, x, otherwise)


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, 0)


_PRODUCTS = "btkgd,bskd->bkgts"


@jax.custom_jvp
def _products(q: Array, k: Array) -> Array:
    """Logits before scale [B, K, G, T, S], of [B, T, K, G, D] and [B, S, K, D]."""
    return _einsum(_PRODUCTS, q, k)


@_products.defjvp
def _products_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> Any:
    # The cotangent of a hidden pair is 0, which must not meet NaN.
    (q, k), (dq, dk) = primals, tangents
    tangent = _einsum(_PRODUCTS, dq, _finite(k)) + _einsum(_PRODUCTS, _finite(q), dk)
    return _products(q, k), tangent


def _weighted(weights: Array, v: Array, visible: Array | None) -> Array:
    """Weights [B, K, G, T, S] times v [B, S, K, Dv], summed over visible keys: [B, T, K, G, Dv].

    What a hidden key holds must not matter: its weight is 0, but 0 * NaN is NaN. So sums are over
    finite values, and a second product finds the other values that a row sees.
    """
    if visible is None:
        return _einsum("bkgts,bskd->btkgd", weights, v)
    sums = _einsum("bkgts,bskd->btkgd", weights, _finite(v))
    value_dim = v.shape[3]
    above, below = (jnp.isnan(v) | (v == infinity) for infinity in (jnp.inf, -jnp.inf))
    seen = _einsum(
        "bkgts,bskd->btkgd",
        _where(visible, jnp.ones_like(weights, jnp.bfloat16)),
        jnp.concatenate([above, below], axis=-1).astype(jnp.bfloat16),
    )
    sums += jnp.where(seen[..., :value_dim] > 0, jnp.inf, 0).astype(sums.dtype)
    return sums - jnp.where(seen[..., value_dim:] > 0, jnp.inf, 0).astype(sums.dtype)


class _Scores(NamedTuple):
    logits: Array  # [B, K, G, T, S], -inf where invisible
    visible: Array | None  # bool [B|1, K|1, G|1, T|1, S|1], None if nothing is hidden
    slope: Array | None  # d logits / d (scale * q.k + bias), None if 1
    rows: Array  # [B, T]
    q: Array  # operands with padding rows zeroed: NaN there must not meet a zero probability
    k: Array
    v: Array


def _scores(
    operands: Operands, semantics: Semantics, bias: Array | None = None, mask: Array | None = None
) -> _Scores:
    seen = _visibility(operands, semantics)
    num_kv_heads = operands.k.shape[2]
    hides = [] if seen.pairs is None else [seen.pairs[:, None, None]]
    if operands.mask_words is not None:
        dense = masks.unpacked(operands.mask_words, operands.q.shape[1], operands.k.shape[1])
        hides.append(_per_head(dense, num_kv_heads))
    if mask is not None:
        hides.append(_per_head(mask, num_kv_heads))
    visible = reduce(jnp.logical_and, hides) if hides else None
    q = jnp.where(seen.rows[:, :, None, None], operands.q, 0)
    k = jnp.where(seen.keys[:, :, None, None], operands.k, 0)
    v = jnp.where(seen.keys[:, :, None, None], operands.v, 0)
    products = _products(_grouped(q, num_kv_heads), k)
    # A traced scale has a gradient, which what hidden keys hold must not reach.
    logits = _where(visible, products) * jnp.asarray(semantics.scale, products.dtype)
    bias = operands.bias if bias is None else bias
    if bias is not None:
        bias = _per_head(bias, num_kv_heads)
        logits = logits + bias.astype(logits.dtype)
    slope = None
    if semantics.soft_cap is not None:
        bounded = jnp.tanh(_where(visible, logits) / semantics.soft_cap)
        logits, slope = semantics.soft_cap * bounded, 1 - bounded**2
    if bias is not None:  # where it hides, the cap does not bound, nor does a NaN show
        logits = _where(~jnp.isneginf(bias), logits, -jnp.inf)
    return _Scores(_where(visible, logits, -jnp.inf), visible, slope, seen.rows, q, k, v)


def forward(
    operands: Operands, semantics: Semantics, bias: Array | None = None, mask: Array | None = None
) -> tuple[Array, Array]:
    """softmax(logits) v and the log of the softmax's denominator.

    Args:
        operands: see ``Operands``.
        semantics: see ``Semantics``; ``scale`` may also be a traced scalar here.
        bias: added to the scaled logits; [B|1, N|1, T|1, S|1]. None: that of the operands, if any.
        mask: bool, True takes part; [B|1, N|1, T|1, S|1].

    Returns:
        out [B, T, N, Dv] in the dtype of q, and lse [B, T, N], float32 (float64 for float64).
    """
    operands = with_a_sequence(operands)
    x = _scores(operands, semantics, bias, mask)
    batch, q_len, heads, _ = operands.q.shape
    value_dim = operands.v.shape[-1]
    sinks = _sinks_per_row(operands)
    top = jnp.max(x.logits, axis=-1, initial=-jnp.inf)  # [B, K, G, T]
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    # A row without keys has top = -inf; any finite reference keeps exp(-inf - top) at 0.
    top = jax.lax.stop_gradient(jnp.where(jnp.isneginf(top), 0.0, top))
    weights = _where(x.visible, jnp.exp(x.logits - top[..., None]))
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    is_empty = total == 0
    total = jnp.where(is_empty, 1.0, total)
    probabilities = (weights / total[..., None]).astype(operands.v.dtype)
    out = _weighted(probabilities, x.v, x.visible).reshape(batch, q_len, heads, value_dim)
    lse = jnp.where(is_empty, -jnp.inf, jnp.log(total) + top)
    lse = jnp.transpose(lse, (0, 3, 1, 2)).reshape(batch, q_len, heads)
    used = x.rows[:, :, None]
    out = jnp.where(used[..., None], out, 0).astype(operands.q.dtype)
    return out, jnp.where(used, lse, -jnp.inf)


def backward(
    operands: Operands, semantics: Semantics, out: Array, lse: Array, dout: Array, dlse: Array
) -> Gradients:
    """Gradients from a given LSE, which may cover more keys than these operands hold.

    Args:
        operands: as for ``forward``.
        semantics: as for ``forward``.
        out: [B, T, N, Dv], the output that belongs to ``lse``.
        lse: float32 [B, T, N].
        dout: cotangent of ``out``.
        dlse: cotangent of ``lse``.
    """
    return in_types_of(operands, wide_gradients(operands, semantics, out, lse, dout, dlse))


def in_types_of(operands: Operands, grads: Gradients) -> Gradients:
    """Gradients rounded to the types of their operands."""
    given = arrays_of(grads).items()
    return Gradients(**{name: x.astype(getattr(operands, name).dtype) for name, x in given})


class _ScoreGradients(NamedTuple):
    scores: _Scores
    probabilities: Array  # [B, K, G, T, S]
    ds: Array  # likewise, of scale * q.k + bias


def _score_gradients(
    operands: Operands, semantics: Semantics, lse: Array, dout: Array, delta: Array
) -> _ScoreGradients:
    """What the cotangents mean for the scores.

    ``dout`` and ``delta`` are 0 for unused rows, and ``delta`` for rows without a denominator.
    """
    x = _scores(operands, semantics)
    num_kv_heads = operands.k.shape[2]
    used = x.rows[:, :, None]  # [B, T, 1]
    # A row without denominator has lse = -inf; +inf instead makes all its probabilities 0.
    lse = jnp.where(used & ~jnp.isneginf(lse), lse, jnp.inf)

    def per_row(a: Array) -> Array:  # [B, T, N] -> [B, K, G, T, 1]
        return jnp.transpose(_grouped(a[..., None], num_kv_heads), (0, 2, 3, 1, 4))

    probabilities = _where(x.visible, jnp.exp(x.logits - per_row(lse)))
    dp = _einsum("btkgd,bskd->bkgts", _grouped(dout, num_kv_heads), x.v.astype(dout.dtype))
    ds = probabilities * (dp - per_row(delta))
    if x.slope is not None:
        ds = ds * x.slope
    return _ScoreGradients(x, probabilities, _where(x.visible, ds))


def wide_gradients(
    operands: Operands, semantics: Semantics, out: Array, lse: Array, dout: Array, dlse: Array
) -> Gradients:
    """``backward`` in the type of accumulation, for sums over parts of the rows."""
    given, operands = operands, with_a_sequence(operands)
    num_kv_heads = operands.k.shape[2]
    dtype = wide(operands.q.dtype)
    used = used_rows(operands)[:, :, None]  # [B, T, 1]
    out, dout = (jnp.where(used[..., None], a, 0).astype(dtype) for a in (out, dout))
    delta = jnp.sum(dout * out, axis=-1) - dlse  # [B, T, N]
    delta = jnp.where(used & ~jnp.isneginf(lse), delta, 0)
    x, probabilities, ds = _score_gradients(operands, semantics, lse, dout, delta)
    ds = ds * semantics.scale
    # Where an operand is not finite, neither is ds of a pair that is visible.
    q, k = _finite(x.q.astype(dtype)), _finite(x.k.astype(dtype))
    dq = _einsum("bkgts,bskd->btkgd", ds, k).reshape(operands.q.shape)
    dk = _einsum("bkgts,btkgd->bskd", ds, _grouped(q, num_kv_heads))
    dv = _einsum("bkgts,btkgd->bskd", probabilities, _grouped(dout, num_kv_heads))
    dsinks = None
    if given.sinks is not None:
        dsinks = _sink_gradients(operands, lse, delta, given.num_sequences)
    return Gradients(dq, dk, dv, dsinks)


def bias_gradient(
    operands: Operands, semantics: Semantics, lse: Array, dout: Array, delta: Array
) -> Array:
    """The gradient of ``operands.bias``, in the type of accumulation.

    Args:
        operands: as for ``forward``.
        semantics: as for ``forward``.
        lse: float32 [B, T, N].
        dout: cotangent of the output.
        delta: [B, T, N], rowsum(dout * out) less the cotangent of the LSE, 0 where ``lse`` is -inf.
    """
    used = used_rows(operands)[:, :, None]
    dout = jnp.where(used[..., None], dout, 0).astype(wide(dout.dtype))
    delta = jnp.where(used, delta, 0)
    ds = _score_gradients(operands, semantics, lse, dout, delta).ds
    shape = operands.bias.shape
    ds = ds.reshape(ds.shape[0], -1, *ds.shape[3:])  # [B, N, T, S]
    same = [axis for axis in range(4) if shape[axis] == 1]
    return jnp.sum(ds, axis=same, keepdims=True)


def _sink_gradients(operands: Operands, lse: Array, delta: Array, count: int) -> Array:
    """[count, N]: those of the last ``count`` sequences."""
    rows = _tokens(operands.q.shape[:2], operands.cu_seqlens_q, operands.q_lengths)
    lse = jnp.where(rows.used[:, :, None] & ~jnp.isneginf(lse), lse, jnp.inf)
    per_row = -jnp.exp(operands.sinks[rows.sequence] - lse) * delta  # [B, T, N]
    heads = operands.sinks.shape[1]
    flat = jnp.zeros_like(operands.sinks)
    flat = flat.at[rows.sequence.reshape(-1)].add(per_row.reshape(-1, heads).astype(flat.dtype))
    return flat[flat.shape[0] - count :]
