"""From what a caller wrote to a problem: argument checks, and the internal form of every array.

Errors carry the class that ``jax.nn.dot_product_attention`` raises for the same mistake, and say
what was asked, what was got and what would work.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_fa import emulated, mask_mods, sequences
from jax_fa.band import UNBOUNDED, Alignment, Band
from jax_fa.choice import IMPLEMENTATIONS, Forced, Implementation
from jax_fa.problem import Operands, Semantics

WindowSize = int | tuple[int | None, int | None] | None


class Options(TypedDict, total=False):
    """Keywords of every public function; ``jax_fa.attention`` documents them."""

    bias: ArrayLike | None
    mask: ArrayLike | None
    scale: Any
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: WindowSize
    implementation: Implementation | None
    query_segment_ids: ArrayLike | None
    key_value_segment_ids: ArrayLike | None
    logits_soft_cap: float | None
    sinks: ArrayLike | None
    causal_alignment: Alignment
    query_offset: ArrayLike | None
    deterministic: bool
    mask_mod: str | None


class Call(NamedTuple):
    """A checked call.

    Attributes:
        operands: arrays in internal form.
        semantics: ``scale`` in it may be a traced scalar, which only the reference path takes.
        implementation: what the caller forced, or None.
        bias: [B|1, N|1, T|1, S|1] or None; only the reference path takes it.
        mask: bool, of the same shapes, or None.
        missing: leading dimensions that the caller's query lacked, so that results lack them too.
    """

    operands: Operands
    semantics: Semantics
    implementation: Forced
    bias: Array | None = None
    mask: Array | None = None
    missing: int = 0

    def as_given(self, result: Array) -> Array:
        """A result with the leading dimensions that the caller's query had."""
        return result.reshape(result.shape[self.missing :])


def dense(qkv: tuple[ArrayLike, ArrayLike, ArrayLike], options: Options) -> Call:
    """Checks a call over [B, T, N, D] (or [T, N, D]) arrays."""
    _check_names(options)
    query, key, value = (jnp.asarray(x) for x in qkv)
    missing = max(4 - query.ndim, 0)
    q, k, v = (_with_rank(x, 4) for x in (query, key, value))
    _check_qkv(q, k, v)
    batch, q_len, num_q_heads, _ = q.shape
    kv_len = k.shape[1]
    given = _Given(options, is_unbatched=missing > 0)
    q_segments = given.ids("query_segment_ids", (batch, q_len))
    kv_segments = given.ids("key_value_segment_ids", (batch, kv_len))
    _check_pair("query_segment_ids", q_segments, "key_value_segment_ids", kv_segments)
    operands = Operands(
        q,
        k,
        v,
        q_lengths=given.int32("query_seq_lengths", (batch,)),
        kv_lengths=given.int32("key_value_seq_lengths", (batch,)),
        q_segments=q_segments,
        kv_segments=kv_segments,
        q_offset=given.offset(batch),
        sinks=given.sinks(batch, num_q_heads),
    )
    full = (batch, num_q_heads, q_len, kv_len)
    return Call(
        operands,
        _semantics(options, q.shape[3]),
        _implementation(options),
        bias=given.pairwise("bias", full),
        mask=given.pairwise("mask", full),
        missing=missing,
    )


def packed(
    qkv: tuple[ArrayLike, ArrayLike, ArrayLike],
    borders: tuple[ArrayLike, ArrayLike],
    used: tuple[ArrayLike | None, ArrayLike | None],
    options: Options,
) -> Call:
    """Checks a call over packed [total, N, D] arrays: ``borders`` are cu_seqlens."""
    _check_names(options, refused=_DENSE_ONLY, advice="use seqused_q, seqused_k and segment ids")
    arrays = [jnp.asarray(x) for x in qkv]
    for name, array in zip(("query", "key", "value"), arrays, strict=True):
        if array.ndim != 3:
            raise ValueError(
                f"attention_varlen: {name} should be [total, heads, head size], but has shape "
                f"{array.shape}."
            )
    q, k, v = (x[None] for x in arrays)
    _check_qkv(q, k, v)
    given = _Given(cast(Options, {**options, "seqused_q": used[0], "seqused_k": used[1]}))
    cu_q, cu_k = (jnp.asarray(x) for x in borders)
    if cu_q.ndim != 1 or cu_q.shape[0] < 1:
        raise ValueError(
            f"attention_varlen: cu_seqlens_q should be int32 [M + 1], but has shape {cu_q.shape}."
        )
    _check_array("cu_seqlens_q", cu_q, cu_q.shape, np.int32)
    _check_array("cu_seqlens_k", cu_k, cu_q.shape, np.int32)
    count = cu_q.shape[0] - 1
    q_segments = given.ids("query_segment_ids", (q.shape[1],))
    kv_segments = given.ids("key_value_segment_ids", (k.shape[1],))
    _check_pair("query_segment_ids", q_segments, "key_value_segment_ids", kv_segments)
    operands = Operands(
        q,
        k,
        v,
        q_lengths=given.int32("seqused_q", (count,)),
        kv_lengths=given.int32("seqused_k", (count,)),
        cu_seqlens_q=sequences.borders(cu_q, q.shape[1]),
        cu_seqlens_k=sequences.borders(cu_k, k.shape[1]),
        q_segments=None if q_segments is None else q_segments[None],
        kv_segments=None if kv_segments is None else kv_segments[None],
        q_offset=given.offset(count),
        sinks=given.sinks(count, q.shape[2]),
    )
    return Call(operands, _semantics(options, q.shape[3]), _implementation(options))


def result(name: str, array: ArrayLike, shape: tuple[int, ...], dtype: Any) -> Array:
    """An array with the shape of a result, batch dimension optional, as ``backward`` takes it."""
    checked = _with_rank(jnp.asarray(array), len(shape))
    _check_array(name, checked, shape, dtype)
    return checked


_DENSE_ONLY = ("bias", "mask", "query_seq_lengths", "key_value_seq_lengths")


def _check_names(options: Options, refused: Sequence[str] = (), advice: str = "") -> None:
    known = [name for name in Options.__annotations__ if name not in refused]
    for name in options:
        if name in refused and cast(dict[str, Any], options)[name] is not None:
            raise TypeError(f"attention: {name} does not apply to this function; {advice}.")
        if name not in Options.__annotations__:
            raise TypeError(f"attention: unknown keyword {name!r}; known are {', '.join(known)}.")


class _Given(NamedTuple):
    """Reads optional arrays out of the options, by name."""

    options: Any
    is_unbatched: bool = False

    def int32(self, name: str, shape: tuple[int, ...]) -> Array | None:
        if self.options.get(name) is None:
            return None
        array = jnp.asarray(self.options[name])
        _check_array(name, array, shape, np.int32)
        return array

    def ids(self, name: str, shape: tuple[int, ...]) -> Array | None:
        if self.options.get(name) is None:
            return None
        array = jnp.asarray(self.options[name])
        if self.is_unbatched and array.ndim == len(shape) - 1:
            array = array[None]
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"attention: {name} should be integers, but got {array.dtype}.")
        _check_array(name, array, shape, None)
        return array.astype(jnp.int32)

    def offset(self, count: int) -> Array | None:
        offset = self.options.get("query_offset")
        if offset is None:
            return None
        offset = jnp.asarray(offset)
        if not jnp.issubdtype(offset.dtype, jnp.integer):
            raise ValueError(
                f"attention: query_offset should be an integer, but got {offset.dtype}."
            )
        if offset.shape not in ((), (count,)):
            raise ValueError(
                f"attention: query_offset should be a scalar or have one entry per sequence "
                f"({count}), but has shape {offset.shape}."
            )
        return jnp.broadcast_to(sequences.offsets(offset), (count,))

    def sinks(self, count: int, num_q_heads: int) -> Array | None:
        sinks = self.options.get("sinks")
        if sinks is None:
            return None
        sinks = jnp.asarray(sinks)
        if not jnp.issubdtype(sinks.dtype, jnp.floating):
            raise ValueError(f"attention: sinks should be floating point, but got {sinks.dtype}.")
        _check_array("sinks", sinks, (num_q_heads,), None)
        return jnp.broadcast_to(sinks.astype(jnp.float32), (count, num_q_heads))

    def pairwise(self, name: str, full: tuple[int, ...]) -> Array | None:
        if self.options.get(name) is None:
            return None
        array = _with_rank(jnp.asarray(self.options[name]), 4)
        if name == "mask" and array.dtype != np.dtype(bool):
            raise ValueError(
                f"attention: mask should be bool (True takes part), but got {array.dtype}. Give an "
                f"additive mask as bias."
            )
        fits = array.ndim == 4 and all(
            got in (1, want) for got, want in zip(array.shape, full, strict=True)
        )
        if not fits:
            raise ValueError(
                f"attention: {name} should broadcast to [B, N, T, S] = {list(full)}, but has shape "
                f"{array.shape}."
            )
        return array


def _with_rank(array: Array, rank: int) -> Array:
    """Leading dimensions of 1 up to ``rank``."""
    missing = rank - array.ndim
    return array.reshape((1,) * missing + array.shape) if missing > 0 else array


def _check_array(name: str, array: Array, shape: Sequence[int], dtype: Any) -> None:
    if tuple(array.shape) != tuple(shape):
        raise ValueError(
            f"attention: {name} should have shape {list(shape)}, but has {list(array.shape)}."
        )
    if dtype is not None and array.dtype != np.dtype(dtype):
        raise ValueError(
            f"attention: {name} should be {np.dtype(dtype).name}, but is {array.dtype}."
        )


def _check_pair(name_a: str, a: Array | None, name_b: str, b: Array | None) -> None:
    if (a is None) != (b is None):
        missing = name_a if a is None else name_b
        raise ValueError(f"attention: {name_a} and {name_b} go together, but {missing} is missing.")


def _check_qkv(q: Array, k: Array, v: Array) -> None:
    for name, array in (("query", q), ("key", k), ("value", v)):
        if array.ndim != 4:
            raise ValueError(
                f"attention: {name} should be [batch, length, heads, head size] or without batch, "
                f"but has shape {array.shape}. Fold several batch dimensions into one, or use vmap."
            )
    batch, kv_len, num_kv_heads, head_dim = k.shape
    _check_array("value", v, (batch, kv_len, num_kv_heads, v.shape[3]), k.dtype)
    _check_array("query", q, (batch, q.shape[1], q.shape[2], head_dim), k.dtype)
    if not jnp.issubdtype(q.dtype, jnp.floating) or jnp.finfo(q.dtype).bits < 16:
        raise NotImplementedError(
            f"attention: query, key and value are {q.dtype}; use float32, bfloat16, float16 or "
            f"float64."
        )
    if head_dim == 0 or v.shape[3] == 0:
        raise ValueError(
            f"attention: head sizes must be positive, but are {head_dim} and {v.shape[3]}."
        )
    if num_kv_heads == 0 or q.shape[2] % num_kv_heads:
        raise ValueError(
            f"attention: query has {q.shape[2]} heads and key {num_kv_heads}; query heads must be "
            f"a multiple of key/value heads."
        )


def _implementation(options: Options) -> Forced:
    implementation = options.get("implementation")
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention: implementation={implementation!r} is unknown; use None or one of "
            f"{', '.join(map(repr, IMPLEMENTATIONS))}."
        )
    return emulated.resolve() if implementation == "emulated" else implementation


def _semantics(options: Options, head_dim: int) -> Semantics:
    scale = options.get("scale")
    if scale is None:
        scale = head_dim**-0.5
    elif not isinstance(scale, jax.core.Tracer):
        scale = float(scale)
    soft_cap = options.get("logits_soft_cap")
    if soft_cap is not None:
        soft_cap = float(soft_cap)
        if not soft_cap > 0:
            raise ValueError(
                f"attention: logits_soft_cap must be positive or None, but is {soft_cap}."
            )
    return Semantics(
        cast(float, scale),
        _band(options),
        soft_cap,
        bool(options.get("deterministic", False)),
        _mask_mod(options),
    )


def _mask_mod(options: Options) -> str | None:
    name = options.get("mask_mod")
    if name is not None and not isinstance(name, str):
        raise ValueError(
            f"attention: mask_mod should be a name such as 'chunked_1024' or 'module:function', "
            f"but is {name!r}: kernels are compiled ahead of time, and found by name."
        )
    if name is not None:
        mask_mods.resolve(name)
    return name


def _band(options: Options) -> Band:
    alignment = options.get("causal_alignment", "top_left")
    if alignment not in ("top_left", "bottom_right"):
        raise ValueError(
            f"attention: causal_alignment={alignment!r} is unknown; use 'top_left' or "
            f"'bottom_right'."
        )
    size = options.get("local_window_size")
    sides = size if isinstance(size, tuple | list) else (size, size)
    if len(sides) != 2:
        raise ValueError(
            f"attention: local_window_size should be w or (left, right), but is {size}."
        )
    left, right = (
        None if side is None else max(-UNBOUNDED, min(operator.index(side), UNBOUNDED))
        for side in sides
    )
    return Band(bool(options.get("is_causal", False)), left, right, alignment)
