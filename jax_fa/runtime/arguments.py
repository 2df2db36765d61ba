"""Argument checks, and the internal form of every array.

Errors have the class that ``jax.nn.dot_product_attention`` raises for the same mistake, and say
what was expected, what was found and what would work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, cast, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_fa.mask_mods import MaskFunction
from jax_fa.runtime import (
    checks,
    emulation_settings,
    fallback,
    mask_functions,
    masks,
    sequences,
)
from jax_fa.runtime.checks import Numbers
from jax_fa.runtime.dispatch import IMPLEMENTATIONS, Forced, Implementation, name_of
from jax_fa.runtime.reference import wide
from jax_fa.spec.band import Alignment, Band, ceil_div
from jax_fa.spec.division import MASK_BLOCK
from jax_fa.spec.problem import KERNEL_DTYPES, Operands, Semantics

WindowSize = int | tuple[int | None, int | None] | None
Given = tuple[ArrayLike, ArrayLike, ArrayLike]
"""Query, key and value as the caller wrote them."""


class Keywords(TypedDict, total=False):
    """Keywords of every public function; ``jax_fa.attention`` documents them."""

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
    mask_mod: MaskFunction | None
    block_mask: ArrayLike | None


class PackingKeywords(TypedDict, total=False):
    """Borders of packed sequences: arguments of ``attention_varlen``, keywords of ``explain``."""

    cu_seqlens_q: ArrayLike
    cu_seqlens_k: ArrayLike
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_q: ArrayLike | None
    seqused_k: ArrayLike | None


class Explained(Keywords, PackingKeywords, total=False):
    """Keywords of ``jax_fa.explain``."""


class Pairwise(TypedDict, total=False):
    """Arguments that some functions also take by position."""

    bias: ArrayLike | None
    mask: ArrayLike | None


class Options(Pairwise, Keywords, total=False):
    """All arguments except query, key and value."""


class Call(NamedTuple):
    """A checked call.

    Attributes:
        operands: arrays in internal form.
        semantics: ``scale`` in it may be a traced scalar, which only the unfused path takes.
        implementation: what the caller forced, or None.
        bias: [B|1, N|1, T|1, S|1] or None.
        mask: bool, of the same shapes, or None.
        words: packed words of a mask function and a block mask, int32 [B|1, N|1, rows, W|1]
            (``masks.py``), or None.
        missing: number of leading dimensions that the caller's query lacked, and results lack too.
    """

    operands: Operands
    semantics: Semantics
    implementation: Forced
    bias: Array | None = None
    mask: Array | None = None
    words: Array | None = None
    missing: int = 0

    @property
    def masked(self) -> Operands:
        """The operands with all masks and the bias among them, as kernels read them."""
        return masks.mapped(self.unmapped)

    @property
    def unmapped(self) -> Operands:
        """``masked`` without the map of the mask, which is made for what one kernel computes."""
        if not all(self.operands.q.shape[:3]) or not self.operands.k.shape[1]:
            return self.operands
        words, bias = self.words, self.bias
        if self.mask is not None:
            words = _both_words(words, masks.packed(self.mask), self.operands)
        if bias is not None and bias.dtype != self.operands.q.dtype:
            bias = bias.astype(jnp.float32)
        return self.operands._replace(mask_words=words, bias=bias)

    @property
    def with_words(self) -> Operands:
        """The operands with ``words`` as their mask, without the boolean mask."""
        return self.operands._replace(mask_words=self.words)

    @property
    def is_pairwise(self) -> bool:
        """Whether a bias or a mask has entries for pairs of tokens."""
        return any(x is not None for x in (self.bias, self.mask, self.words))

    def as_given(self, result: Array) -> Array:
        """A result with the leading dimensions that the caller's query had."""
        return result.reshape(result.shape[self.missing :])


def _both(mask: Array | None, other: Array) -> Array:
    return other if mask is None else jnp.logical_and(mask, other)


def _both_words(words: Array | None, other: Array, operands: Operands) -> Array:
    return other if words is None else masks.both(words, other, operands.q.shape[1])


class Share(NamedTuple):
    """One device's part of sequences that several share.

    Attributes:
        shards: devices that share each sequence; T and S count the tokens of one part.
        number: which part it is.
    """

    shards: int = 1
    number: Any = 0


WHOLE = Share()
"""Sequences that no devices share."""


def dense(qkv: Given, options: Options, share: Share = WHOLE) -> Call:
    """Checks a call over [B, T, N, D] (or [T, N, D]) arrays.

    Args:
        qkv: query, key and value.
        options: everything else.
        share: the part of the sequences that is here. Bias and mask hold its rows and all keys.
    """
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
        sinks=given.sinks(batch, q),
    )
    full = (batch, num_q_heads, q_len, kv_len * share.shards)
    call = Call(
        operands,
        _semantics(options, q.shape[3]),
        _implementation(options),
        bias=given.bias(full),
        mask=given.mask(full),
        missing=missing,
    )
    return _with_blocks(_with_function(call, options, share), given.block_mask(full), share)


def named(qkv: Given, options: Mapping[str, Any], share: Share = WHOLE) -> Call:
    """Checks a call whose options are all named: a packed one if borders are among them."""
    names = PackingKeywords.__annotations__.keys() & options.keys()
    packing: Any = {name: options[name] for name in names}
    rest: Any = {name: x for name, x in options.items() if name not in names}
    return packed(qkv, packing, rest, share) if packing else dense(qkv, rest, share)


def check_values(given: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Refuses invalid values of arrays, which shapes and types do not reveal, if they can be read.

    Args:
        given: all arguments of a call by name, as the caller wrote them.
        arrays: those in ``ARRAYS``, converted; their shapes are not checked yet.
    """
    if "sinks" in arrays:
        _check_sinks(given["sinks"])
    for side, tokens in (("q", "query"), ("k", "key")):
        borders = arrays.get(f"cu_seqlens_{side}")
        if borders is not None and borders.ndim == 1 and borders.size and arrays[tokens].ndim:
            total = arrays[tokens].shape[0]
            longest = given.get(f"max_seqlen_{side}")
            _check_borders(side, given[f"cu_seqlens_{side}"], total, longest)


ARRAYS: Mapping[str, Callable[[str, Any], Array]] = {
    **dict.fromkeys(("query", "key", "value", "mask", "block_mask"), checks.array),
    "bias": checks.reals,
    "sinks": checks.floats,
    **dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), checks.integers),
    "query_offset": checks.integers,
    **dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), checks.int32),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"), checks.int32),
}
"""The arguments that may be traced, with their converters."""

ONLY_CHECKED = ("max_seqlen_q", "max_seqlen_k")
"""Arguments that no result depends on."""


def needs_reference(call: Call) -> str | None:
    """Why no kernel of any platform can serve a call; None if one may."""
    extents = (*call.operands.q.shape, *call.operands.k.shape)
    is_open = not all(isinstance(n, int) for n in extents)
    if call.bias is not None and is_open:
        return "a dense bias of open extents runs unfused"
    if call.mask is not None and is_open:
        return "a dense mask of open extents runs unfused"
    if call.words is not None and call.operands.is_packed:
        return "a mask function of packed sequences runs unfused"
    if checks.is_traced(call.semantics.scale):
        return "a traced scale runs unfused; a Python number lets kernels serve the call"
    if str(call.operands.q.dtype) not in KERNEL_DTYPES:
        return f"kernels take {', '.join(KERNEL_DTYPES)}, not {call.operands.q.dtype}"
    return None


def check_unfused(call: Call, reason: str | None) -> None:
    """Refuses a call that asks for kernels if, for ``reason``, none can serve it."""
    if reason is None or call.implementation in (None, "xla"):
        return
    asked = name_of(call.implementation)
    raise NotImplementedError(
        f"attention: implementation={asked!r} does not serve this call: {reason}. "
        f"Use implementation=None or 'xla'."
    )


def leave_kernels(call: Call, reason: str | None) -> None:
    """``check_unfused``, and a warning if the caller did not ask for the unfused path."""
    check_unfused(call, reason)
    if reason is not None and call.implementation is None:
        fallback.warn_once("", reason, call.operands.q.shape[1], call.operands.k.shape[1])


def packed(qkv: Given, packing: PackingKeywords, options: Options, share: Share = WHOLE) -> Call:
    """Checks a call over packed [total, N, D] arrays; see ``dense``. Borders are of all tokens."""
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
    borders = (packing.get("cu_seqlens_q"), packing.get("cu_seqlens_k"))
    longest = (packing.get("max_seqlen_q"), packing.get("max_seqlen_k"))
    cu_q, cu_k = (
        checks.int32(f"cu_seqlens_{side}", x) for side, x in zip("qk", borders, strict=True)
    )
    if cu_q.ndim != 1 or cu_q.shape[0] < 1:
        raise ValueError(
            f"attention_varlen: cu_seqlens_q should be int32 [M + 1], but has shape {cu_q.shape}."
        )
    checks.check_shape("cu_seqlens_k", cu_k, cu_q.shape)
    totals = (q.shape[1] * share.shards, k.shape[1] * share.shards)
    for i, side in enumerate("qk"):
        _check_borders(side, borders[i], totals[i], longest[i])
    count = cu_q.shape[0] - 1
    given = _Given({**options, **packing})
    q_segments = given.ids("query_segment_ids", (q.shape[1],))
    kv_segments = given.ids("key_value_segment_ids", (k.shape[1],))
    _check_pair("query_segment_ids", q_segments, "key_value_segment_ids", kv_segments)
    operands = Operands(
        q,
        k,
        v,
        q_lengths=given.int32("seqused_q", (count,)),
        kv_lengths=given.int32("seqused_k", (count,)),
        cu_seqlens_q=sequences.borders(cu_q, totals[0]),
        cu_seqlens_k=sequences.borders(cu_k, totals[1]),
        q_segments=None if q_segments is None else q_segments[None],
        kv_segments=None if kv_segments is None else kv_segments[None],
        q_offset=given.offset(count),
        sinks=given.sinks(count, q),
    )
    call = Call(operands, _semantics(options, q.shape[3]), _implementation(options))
    return _with_function(call, options, share)


def _with_function(call: Call, options: Options, share: Share) -> Call:
    """The call with what ``mask_mod`` says."""
    function = options.get("mask_mod")
    if function is None:
        return call
    checks.check_static("mask_mod", function)
    if not callable(function):
        raise TypeError(
            f"attention: mask_mod should be a function (batch, q_head, q_position, kv_position) -> "
            f"bool, such as jax_fa.mask_mods.chunked(1024), but is {checks.shown(function)}."
        )
    operands = call.operands
    own = (operands.q.shape[1], operands.k.shape[1])
    extents = (own[0] * share.shards, own[1] * share.shards)
    if not all(isinstance(n, int) and n for n in (*operands.q.shape[:3], *extents)):
        at = mask_functions.places(operands, call.semantics, extents)
        return call._replace(mask=_both(call.mask, mask_functions.evaluated(function, at)))
    at = mask_functions.places(operands, call.semantics, extents, share.number * own[0])
    return call._replace(words=mask_functions.words(function, at))


def _with_blocks(call: Call, blocks: Array | None, share: Share) -> Call:
    """The call with what ``block_mask`` says."""
    if blocks is None:
        return call
    operands = call.operands
    q_len, kv_len = operands.q.shape[1], operands.k.shape[1] * share.shards
    if not all(isinstance(n, int) for n in (*operands.q.shape, kv_len)):
        return call._replace(mask=_both(call.mask, masks.of_pairs(blocks, q_len, kv_len)))
    words = masks.by_blocks(blocks, kv_len)
    if share.shards > 1:
        words = masks.by_rows(words, q_len)
        if q_len <= MASK_BLOCK:  # the only row of blocks is this device's, not one for all devices
            words = jnp.broadcast_to(words, (*words.shape[:2], q_len, words.shape[3]))
    return call._replace(words=_both_words(call.words, words, operands))


def result(name: str, given: ArrayLike, shape: tuple[int, ...], dtype: Any) -> Array:
    """An array with the shape of a result, batch dimension optional, as ``backward`` takes it."""
    array = checks.array(name, given)
    if array.ndim == len(shape) - 1:
        array = array[None]
    checks.check_shape(name, array, shape)
    checks.check_dtype(name, array, np.dtype(dtype))
    return array


# ------------------------------------------------------------------------------------------- names

_DENSE_ONLY = ("bias", "mask", "block_mask", "query_seq_lengths", "key_value_seq_lengths")


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

    def sinks(self, count: int, q: Array) -> Array | None:
        given = self.options.get("sinks")
        if given is None:
            return None
        sinks = checks.floats("sinks", given)
        num_q_heads = q.shape[2]
        checks.check_shape("sinks", sinks, (num_q_heads,))
        _check_sinks(given)
        return jnp.broadcast_to(sinks.astype(wide(q.dtype)), (count, num_q_heads))

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
                f"attention: mask should be bool (True: the query sees the key), but got "
                f"{mask.dtype}. Pass an additive mask as bias."
            )
        return _pairwise("mask", mask, full)

    def block_mask(self, full: tuple[int, ...]) -> Array | None:
        given = self.options.get("block_mask")
        if given is None:
            return None
        blocks = checks.array("block_mask", given)
        if blocks.dtype != np.dtype(bool):
            raise ValueError(
                f"attention: block_mask should be bool (True: the queries of the block see its "
                f"keys), but got {blocks.dtype}. Compare indices or scores, as scores > 0."
            )
        columns = tuple(ceil_div(length, MASK_BLOCK) for length in full[2:])
        return _pairwise("block_mask", blocks, (*full[:2], *columns))


_PAIRWISE = {
    "bias": "[B, N, T, S]",
    "mask": "[B, N, T, S]",
    "block_mask": f"[B, N, ceil(T / {MASK_BLOCK}), ceil(S / {MASK_BLOCK})]",
}


def _pairwise(name: str, given: Array, full: tuple[int, ...]) -> Array:
    array = _with_rank(given, 4)
    fits = array.ndim == 4 and all(
        got in (1, want) for got, want in zip(array.shape, full, strict=True)
    )
    if not fits:
        kind = ValueError if array.ndim > 4 else TypeError  # as jax.nn
        raise kind(
            f"attention: {name} should broadcast to {_PAIRWISE[name]} = {list(full)}, but has "
            f"shape {given.shape}."
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


def _check_sinks(given: Any) -> None:
    values = checks.at_hand(given)
    if values is not None and (values > _SINKS_LIMIT).any():
        raise ValueError(
            f"attention: sinks should be at most {_SINKS_LIMIT:g} (-inf for a head without), "
            f"but hold {np.nanmax(values):g}. The LSE has 24 bits: a probability exp(logit - "
            f"lse) would be wrong by more than 0.1%."
        )


def _check_borders(side: str, given: Any, total: int, longest: Any) -> None:
    """Refuses borders that describe no packing, and a wrong bound, if borders can be read."""
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
            f"attention_varlen: {name} should ascend from at least 0 to at most {total}, the "
            f"number of tokens, but is {checks.shown(borders.tolist())}."
        )
    actual = int(np.diff(borders).max(initial=0))
    if longest is not None and longest < actual:
        raise ValueError(
            f"attention_varlen: max_seqlen_{side}={longest} is not an upper bound: {name} has a "
            f"sequence of {actual} tokens. Leave it out; it is not needed."
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
    return emulation_settings.resolve() if implementation == "emulated" else implementation


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
    )


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
