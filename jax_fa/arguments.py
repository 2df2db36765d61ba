"""From what a caller wrote to a problem: argument checks, and the internal form of every array.

Errors carry the class that ``jax.nn.dot_product_attention`` raises for the same mistake, and say
what was asked, what was got and what would work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict, cast, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_fa import checks, emulated, mask_mods, sequences
from jax_fa.band import Alignment, Band
from jax_fa.checks import Numbers
from jax_fa.choice import IMPLEMENTATIONS, Forced, Implementation
from jax_fa.problem import Operands, Semantics

WindowSize = int | tuple[int | None, int | None] | None
Given = tuple[ArrayLike, ArrayLike, ArrayLike]
"""Query, key and value as the caller wrote them."""


class Keywords(TypedDict, total=False):
    """What every public function takes by keyword; ``jax_fa.attention`` documents them."""

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


class Pairwise(TypedDict, total=False):
    """What some functions also take by position."""

    bias: ArrayLike | None
    mask: ArrayLike | None


class Options(Pairwise, Keywords, total=False):
    """All but query, key and value."""


class Call(NamedTuple):
    """A checked call.

    Attributes:
        operands: arrays in internal form.
        semantics: ``scale`` in it may be a traced scalar, which only the unfused path takes.
        implementation: what the caller forced, or None.
        bias: [B|1, N|1, T|1, S|1] or None; only the unfused path takes it.
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


def dense(qkv: Given, options: Options) -> Call:
    """Checks a call over [B, T, N, D] (or [T, N, D]) arrays."""
    _check_names(options)
    arrays = _arrays(qkv)
    for name, x in arrays.items():
        if x.ndim not in (3, 4):
            raise ValueError(
                f"attention: {name} should be [batch, length, heads, head size] or [length, heads, "
                f"head size], but has shape {x.shape}. Fold several batch dimensions into one, or "
                f"use vmap."
            )
    missing = 4 - arrays["query"].ndim
    q, k, v = (_with_rank(x, 4) for x in arrays.values())
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
        bias=given.bias(full),
        mask=given.mask(full),
        missing=missing,
    )


class Packing(NamedTuple):
    """How sequences are packed, as the caller wrote it; (query, key) each."""

    borders: tuple[ArrayLike, ArrayLike]
    used: tuple[ArrayLike | None, ArrayLike | None]
    longest: tuple[int | None, int | None]


def packed(qkv: Given, packing: Packing, options: Options) -> Call:
    """Checks a call over packed [total, N, D] arrays."""
    _check_names(options, refused=_DENSE_ONLY, advice="use seqused_q, seqused_k and segment ids")
    arrays = _arrays(qkv)
    for name, x in arrays.items():
        if x.ndim != 3:
            raise ValueError(
                f"attention_varlen: {name} should be [total, heads, head size], but has shape "
                f"{x.shape}."
            )
    q, k, v = (x[None] for x in arrays.values())
    _check_qkv(q, k, v)
    cu_q, cu_k = (
        checks.int32(f"cu_seqlens_{side}", x) for side, x in zip("qk", packing.borders, strict=True)
    )
    if cu_q.ndim != 1 or cu_q.shape[0] < 1:
        raise ValueError(
            f"attention_varlen: cu_seqlens_q should be int32 [M + 1], but has shape {cu_q.shape}."
        )
    checks.check_shape("cu_seqlens_k", cu_k, cu_q.shape)
    for i, side in enumerate("qk"):
        _check_borders(side, packing.borders[i], (q, k)[i].shape[1], packing.longest[i])
    count = cu_q.shape[0] - 1
    used = dict(zip(("seqused_q", "seqused_k"), packing.used, strict=True))
    given = _Given({**options, **used})
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


def result(name: str, given: ArrayLike, shape: tuple[int, ...], dtype: Any) -> Array:
    """An array with the shape of a result, batch dimension optional, as ``backward`` takes it."""
    array = checks.array(name, given)
    if array.ndim == len(shape) - 1:
        array = array[None]
    checks.check_shape(name, array, shape)
    checks.check_dtype(name, array, np.dtype(dtype))
    return array


# ------------------------------------------------------------------------------------------- names

_DENSE_ONLY = ("bias", "mask", "query_seq_lengths", "key_value_seq_lengths")


def _check_names(options: Options, refused: Sequence[str] = (), advice: str = "") -> None:
    known = [name for name in Options.__annotations__ if name not in refused]
    for name in options:
        if name in refused and cast(dict[str, Any], options)[name] is not None:
            raise TypeError(f"attention: {name} does not apply to this function; {advice}.")
        if name not in Options.__annotations__:
            raise TypeError(f"attention: unknown keyword {name!r}; known are {', '.join(known)}.")


# ------------------------------------------------------------------------------------------ arrays

_SINKS_LIMIT = 1e4


class _Given(NamedTuple):
    """Reads optional arrays out of the options, by name."""

    options: Any
    is_unbatched: bool = False

    def int32(self, name: str, shape: tuple[int, ...]) -> Array | None:
        if self.options.get(name) is None:
            return None
        array = checks.int32(name, self.options[name])
        checks.check_shape(name, array, shape)
        return array

    def ids(self, name: str, shape: tuple[int, ...]) -> Array | None:
        if self.options.get(name) is None:
            return None
        array = checks.integers(name, self.options[name])
        if self.is_unbatched and array.ndim == len(shape) - 1:
            array = array[None]
        checks.check_shape(name, array, shape)
        return array

    def offset(self, count: int) -> Array | None:
        if self.options.get("query_offset") is None:
            return None
        offset = checks.integers("query_offset", self.options["query_offset"])
        if offset.shape not in ((), (count,)):
            raise ValueError(
                f"attention: query_offset should be a scalar or have one entry per sequence "
                f"({count}), but has shape {offset.shape}."
            )
        return jnp.broadcast_to(sequences.offsets(offset), (count,))

    def sinks(self, count: int, num_q_heads: int) -> Array | None:
        given = self.options.get("sinks")
        if given is None:
            return None
        sinks = checks.floats("sinks", given)
        checks.check_shape("sinks", sinks, (num_q_heads,))
        values = checks.at_hand(given)
        if values is not None and (values > _SINKS_LIMIT).any():
            raise ValueError(
                f"attention: sinks should be at most {_SINKS_LIMIT:g} (-inf for a head without), "
                f"but hold {np.nanmax(values):g}. The LSE has 24 bits: a probability exp(logit - "
                f"lse) would be wrong by more than 0.1%."
            )
        return jnp.broadcast_to(sinks.astype(jnp.float32), (count, num_q_heads))

    def bias(self, full: tuple[int, ...]) -> Array | None:
        given = self.options.get("bias")
        return None if given is None else _pairwise("bias", checks.reals("bias", given), full)

    def mask(self, full: tuple[int, ...]) -> Array | None:
        given = self.options.get("mask")
        if given is None:
            return None
        mask = checks.array("mask", given)
        if mask.dtype != np.dtype(bool):
            raise ValueError(
                f"attention: mask should be bool (True takes part), but got {mask.dtype}. Give an "
                f"additive mask as bias."
            )
        return _pairwise("mask", mask, full)


def _pairwise(name: str, given: Array, full: tuple[int, ...]) -> Array:
    array = _with_rank(given, 4)
    fits = array.ndim == 4 and all(
        got in (1, want) for got, want in zip(array.shape, full, strict=True)
    )
    if not fits:
        kind = ValueError if array.ndim > 4 else TypeError  # as jax.nn
        raise kind(
            f"attention: {name} should broadcast to [B, N, T, S] = {list(full)}, but has shape "
            f"{given.shape}."
        )
    return array


def _with_rank(array: Array, rank: int) -> Array:
    """Leading dimensions of 1 up to ``rank``."""
    missing = rank - array.ndim
    return array.reshape((1,) * missing + array.shape) if missing > 0 else array


def _check_pair(name_a: str, a: Array | None, name_b: str, b: Array | None) -> None:
    if (a is None) != (b is None):
        missing = name_a if a is None else name_b
        raise ValueError(f"attention: {name_a} and {name_b} go together, but {missing} is missing.")


def _arrays(qkv: Given) -> dict[str, Array]:
    names = ("query", "key", "value")
    return {name: checks.array(name, x) for name, x in zip(names, qkv, strict=True)}


def _check_qkv(q: Array, k: Array, v: Array) -> None:
    batch, kv_len, num_kv_heads, head_dim = k.shape
    for name, array, shape in (
        ("value", v, (batch, kv_len, num_kv_heads, v.shape[3])),
        ("query", q, (batch, q.shape[1], q.shape[2], head_dim)),
    ):
        checks.check_shape(name, array, shape)
        checks.check_dtype(name, array, k.dtype)
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


def _check_borders(side: str, given: ArrayLike, total: int, longest: Any) -> None:
    """Refuses borders that describe no packing, and a bound that does not hold, where at hand."""
    name = f"cu_seqlens_{side}"
    if longest is not None:
        longest = checks.integer(f"max_seqlen_{side}", longest)
        if longest < 0:
            raise ValueError(
                f"attention_varlen: max_seqlen_{side} should be None or an upper bound of the "
                f"lengths, but is {longest}."
            )
    borders = checks.at_hand(given)
    if borders is None or not isinstance(total, int):
        return
    if borders[0] < 0 or borders[-1] > total or (np.diff(borders) < 0).any():
        raise ValueError(
            f"attention_varlen: {name} should ascend from 0 or more to {total} (the tokens there "
            f"are) or less, but is {checks.shown(borders.tolist())}."
        )
    actual = int(np.diff(borders).max(initial=0))
    if longest is not None and longest < actual:
        raise ValueError(
            f"attention_varlen: max_seqlen_{side}={longest} is no upper bound: by {name} a "
            f"sequence has {actual} tokens. Leave it out, it is not needed."
        )


# -------------------------------------------------------------------------------------- semantics

SCALES = Numbers(
    1e-30,
    1e30,
    "float32 products of scale with operands, log2(e) and 1 / logits_soft_cap would leave its "
    "range.",
    is_magnitude=True,
)
"""Of ``scale``, if it is not traced; measured in tests/test_accepted_numbers.py, as are caps."""

SOFT_CAPS = Numbers(
    1e-4,
    1e4,
    "Kernels compute tanh to 1e-7, which the cap multiplies: a larger one would show in the "
    "logits. None leaves them as they are.",
)
"""Of ``logits_soft_cap``."""


def _implementation(options: Options) -> Forced:
    implementation = options.get("implementation")
    if implementation is None:
        return None
    checks.name_among("implementation", implementation, IMPLEMENTATIONS, "None or ")
    return emulated.resolve() if implementation == "emulated" else implementation


def _semantics(options: Options, head_dim: int) -> Semantics:
    scale, soft_cap = options.get("scale"), options.get("logits_soft_cap")
    if scale is None:
        scale = head_dim**-0.5
    elif checks.is_traced(scale):
        scale = checks.real("scale", scale)
    else:
        scale = checks.number("scale", scale, SCALES)
    if soft_cap is not None:
        soft_cap = checks.number("logits_soft_cap", soft_cap, SOFT_CAPS)
    return Semantics(
        scale,
        _band(options),
        soft_cap,
        checks.flag("deterministic", options.get("deterministic", False)),
        _mask_mod(options),
    )


def _mask_mod(options: Options) -> str | None:
    name = options.get("mask_mod")
    if name is None:
        return None
    checks.check_static("mask_mod", name)
    if not isinstance(name, str):
        raise ValueError(
            f"attention: mask_mod should be a name such as 'chunked_1024' or 'module:function', "
            f"but is {name!r}: kernels are compiled ahead of time, and found by name."
        )
    mask_mods.resolve(name)
    return name


def _band(options: Options) -> Band:
    alignment = options.get("causal_alignment", "top_left")
    checks.name_among("causal_alignment", alignment, get_args(Alignment))
    left, right = _window(options.get("local_window_size"))
    return Band(
        checks.flag("is_causal", options.get("is_causal", False)),
        left,
        right,
        alignment,
    )


def _window(size: Any) -> list[int | None]:
    """Keys before and beyond the diagonal."""
    name = "local_window_size"
    is_pair = isinstance(size, tuple | list) or getattr(size, "ndim", 0) == 1
    if is_pair and len(size) != 2:
        raise ValueError(f"attention: {name} should be w or (left, right), but is {size}.")
    sides = size if is_pair else (size, size)
    return [None if side is None else checks.integer(name, side) for side in sides]
