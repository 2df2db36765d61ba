"""The one oracle of the tests: exact results, tolerance rule and comparison.

Nothing here calls the library's own arithmetic, so that no mistake is on both sides. The list of
cases is in ``cases.py``.

The tolerance rule: the error against float64 is at most twice that of the same formula computed in
float32 with the roundings that a fused kernel may make (probabilities and dS to the element type
before the second matrix product, results to their type), plus a few ulp. It is applied to
the largest error and to the root mean square error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jax_fa.spec.problem import Operands, Semantics

ULP = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Distance from 1 to the next number, by dtype."""


class Results(NamedTuple):
    """Everything that forward and backward compute.

    ``dsinks`` is None where there are no sinks, and summed over sequences: [N]. ``dbias`` has the
    shape of the bias.
    """

    out: Any
    lse: Any
    dq: Any = None
    dk: Any = None
    dv: Any = None
    dsinks: Any = None
    dbias: Any = None


class Tolerance(NamedTuple):
    """What is exact, and what a fused kernel may make of it.

    ``dsinks_size`` [N] is the sum of the absolute values of the terms of dsinks, which cancel, as
    is ``dbias_size`` of dbias.
    ``few`` is the relative error that float32 logits and LSE alone may cause: exp(z - lse)
    multiplies their rounding by their size, whatever the element type.
    """

    exact: Results
    rounded: Results
    few: float
    dsinks_size: Any = None
    dbias_size: Any = None


class Values(NamedTuple):
    """One result: computed, exact and rounded; what ``few`` is relative to, if not the result."""

    got: Any
    exact: Any
    rounded: Any
    few: float
    size: Any = None


# ------------------------------------------------------------------------------------ who sees whom


class Side(NamedTuple):
    """Sequence, position in it and whether it is used, for every token of one side: [B, L]."""

    sequence: np.ndarray
    position: np.ndarray
    used: np.ndarray
    lengths: np.ndarray  # [M]


def side(shape: tuple[int, int], cu_seqlens: Any, lengths: Any) -> Side:
    """Where every token stands; tokens of no sequence have sequence -1."""
    batch, length = shape
    sequence = np.full(shape, -1)
    position = np.zeros(shape, int)
    slots = [(m, 0, length) for m in range(batch)]
    if cu_seqlens is not None:
        slots = [(0, int(a), int(b)) for a, b in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)]
    used_lengths = []
    for m, (row, first, end) in enumerate(slots):
        sequence[row, first:end] = m
        position[row, first:end] = np.arange(end - first)
        used = end - first if lengths is None else min(max(int(lengths[m]), 0), end - first)
        used_lengths.append(used)
    count = np.array(used_lengths, int)
    used = np.zeros(shape, bool)
    inside = sequence >= 0
    used[inside] = position[inside] < count[sequence[inside]]
    return Side(sequence, position, used, count)


def visible(operands: Operands, semantics: Semantics) -> np.ndarray:
    """bool [B, T, S], straight from the words of the contract."""
    rows = side(operands.q.shape[:2], operands.cu_seqlens_q, operands.q_lengths)
    keys = side(operands.k.shape[:2], operands.cu_seqlens_k, operands.kv_lengths)
    band = semantics.band
    pairs = rows.sequence[:, :, None] == keys.sequence[:, None, :]
    pairs &= rows.used[:, :, None] & keys.used[:, None, :]
    shift = np.zeros(len(rows.lengths), int)
    if operands.q_offset is not None:
        shift += np.asarray(operands.q_offset, int)
    if band.alignment == "bottom_right":
        shift += keys.lengths - rows.lengths
    shift = np.append(shift, 0)  # sequence -1
    diagonal = (rows.position + shift[rows.sequence])[:, :, None]
    # How far a key lies beyond the diagonal of a query.
    beyond = keys.position[:, None, :] - diagonal
    if band.is_causal:
        pairs &= beyond <= 0
    if band.left is not None:
        pairs &= -beyond <= band.left
    if band.right is not None:
        pairs &= beyond <= band.right
    if operands.q_segments is not None:
        q_segments, kv_segments = np.asarray(operands.q_segments), np.asarray(operands.kv_segments)
        pairs &= q_segments[:, :, None] == kv_segments[:, None, :]
    return pairs


def blind_rows(operands: Operands, semantics: Semantics) -> np.ndarray:
    """bool [B, T, N]: rows that see no key."""
    pairs = visible(operands, semantics)[:, None]
    if operands.mask_words is not None:
        pairs = pairs & shown(operands)
    if operands.bias is not None:
        pairs = pairs & ~np.isneginf(operands.bias)
    blind = ~np.broadcast_to(pairs, (*pairs.shape[:3], operands.k.shape[1])).any(3)  # [B, N|1, T]
    heads = operands.q.shape[2]
    return np.swapaxes(np.broadcast_to(blind, (blind.shape[0], heads, blind.shape[2])), 1, 2)


def shown(operands: Operands) -> np.ndarray:
    """bool [B|1, N|1, T|1, S|1] of a dense mask's words, which may have a row for 128 queries."""
    q_len, kv_len = operands.q.shape[1], operands.k.shape[1]
    bytes_ = np.ascontiguousarray(operands.mask_words).view(np.uint8)
    bits = np.unpackbits(bytes_, axis=-1, bitorder="little").astype(bool)
    if bits.shape[2] not in (1, q_len):
        bits = np.repeat(bits, 128, axis=2)[:, :, :q_len]
    return bits[..., : kv_len if bits.shape[-1] >= kv_len else 1]


# ----------------------------------------------------------------------------------------- formulas


def _to_float(dtype: str) -> Callable[[Any], np.ndarray]:
    """Rounds an array to ``dtype`` and returns it as float64 again."""
    kind = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    return lambda x: np.asarray(x).astype(kind).astype(np.float64)


def _heads_first(x: Any, group: int, dtype: Any) -> np.ndarray:
    """[B, L, H, D] -> [B, H * group, L, D]."""
    return np.repeat(np.swapaxes(np.asarray(x).astype(dtype), 1, 2), group, axis=1)


def _sum_groups(x: np.ndarray, group: int) -> np.ndarray:
    """[B, N, S, D] -> [B, S, K, D]."""
    batch, heads, length, dim = x.shape
    return np.swapaxes(x.reshape(batch, heads // group, group, length, dim).sum(2), 1, 2)


def attend(
    operands: Operands,
    semantics: Semantics,
    cotangents: tuple[Any, Any] | None = None,
    *,
    rounding: str | None = None,
) -> Results:
    """Attention and its gradients with full score matrices.

    Args:
        operands: numpy or JAX arrays.
        semantics: what is asked.
        cotangents: (dout, dlse), or None for the forward alone.
        rounding: None computes in float64; a dtype computes in float32 and rounds intermediate
            matrices and results as a kernel for that dtype may.
    """
    dtype = np.float64 if rounding is None else np.float32
    element = (lambda x: np.asarray(x, dtype)) if rounding is None else _to_float(rounding)

    def narrow(x: Any) -> Any:
        return element(x).astype(dtype)

    group = operands.q.shape[2] // operands.k.shape[2]
    pairs = visible(operands, semantics)[:, None]  # [B, 1, T, S]
    if operands.mask_words is not None:
        pairs = pairs & shown(operands)  # [B, N|1, T, S]
    if operands.bias is not None:
        pairs = pairs & ~np.isneginf(operands.bias)
    rows = side(operands.q.shape[:2], operands.cu_seqlens_q, operands.q_lengths)
    keys = side(operands.k.shape[:2], operands.cu_seqlens_k, operands.kv_lengths)
    used_rows, used_keys = rows.used[:, None, :, None], keys.used[:, None, :, None]
    q = np.where(used_rows, _heads_first(operands.q, 1, dtype), 0)
    k = np.where(used_keys, _heads_first(operands.k, group, dtype), 0)
    v = np.where(used_keys, _heads_first(operands.v, group, dtype), 0)

    logits = (q @ np.swapaxes(k, 2, 3)) * dtype(semantics.scale)  # [B, N, T, S]
    if operands.bias is not None:
        logits = np.where(pairs, logits + np.asarray(operands.bias).astype(dtype), 0)
    slope: Any = dtype(1)
    if semantics.soft_cap is not None:
        bounded = np.tanh(logits / dtype(semantics.soft_cap))
        logits, slope = dtype(semantics.soft_cap) * bounded, 1 - bounded**2
    logits = np.where(pairs, logits, -np.inf)
    sinks = np.full((*q.shape[:3], 1), -np.inf, dtype)
    if operands.sinks is not None:
        per_row = np.asarray(operands.sinks, dtype)[rows.sequence]  # [B, T, N]
        sinks = np.where(used_rows, np.swapaxes(per_row, 1, 2)[..., None], -np.inf).astype(dtype)
    top = np.max(np.concatenate([logits, sinks], 3), axis=3, keepdims=True)
    top = np.where(np.isneginf(top), 0, top)
    weights = np.exp(logits - top)
    total = weights.sum(3, keepdims=True) + np.exp(sinks - top)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, np.log(total) + top, -np.inf)  # [B, N, T, 1]
    total = np.where(total > 0, total, 1)
    out = (narrow(weights) @ v) / total
    out = narrow(out)
    results = Results(np.swapaxes(out, 1, 2), np.swapaxes(lse[..., 0], 1, 2))
    if cotangents is None:
        return results

    dout = np.where(used_rows, _heads_first(cotangents[0], 1, dtype), 0)
    dlse = np.where(used_rows[..., 0], np.swapaxes(np.asarray(cotangents[1], dtype), 1, 2), 0)
    delta = (dout * out).sum(3, keepdims=True) - dlse[..., None]
    # A row without denominator has no probabilities.
    bounded_lse = np.where(np.isneginf(lse), np.inf, lse)
    p = np.exp(logits - bounded_lse)
    ds_wide = p * (dout @ np.swapaxes(v, 2, 3) - delta) * slope
    ds = narrow(ds_wide) * dtype(semantics.scale)
    dbias = None
    if operands.bias is not None:
        dbias = over_broadcast(ds_wide, operands.bias.shape)
        dbias = dbias if rounding is None else dbias.astype(operands.bias.dtype)
    dsinks = None
    if operands.sinks is not None:
        dsinks = -(np.exp(sinks - bounded_lse) * delta).sum((0, 2, 3))
    return results._replace(
        dq=narrow(np.swapaxes(ds @ k, 1, 2)),
        dk=narrow(_sum_groups(np.swapaxes(ds, 2, 3) @ q, group)),
        dv=narrow(_sum_groups(np.swapaxes(narrow(p), 2, 3) @ dout, group)),
        dsinks=dsinks,
        dbias=dbias,
    )


def over_broadcast(pairs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The sum of [B, N, T, S] over the dimensions in which ``shape`` is 1."""
    axes = tuple(axis for axis in range(4) if shape[axis] == 1)
    return np.sum(pairs, axis=axes, keepdims=True)


def tolerance(
    operands: Operands, semantics: Semantics, cotangents: tuple[Any, Any] | None = None
) -> Tolerance:
    """Exact results for the operands as they are, and what rounding may make of them."""
    dtype = str(operands.q.dtype)
    exact = attend(operands, semantics, cotangents)
    rounded = attend(operands, semantics, cotangents, rounding=dtype)
    few = ULP["float32"] * max(8, 2 * np.abs(exact.lse[np.isfinite(exact.lse)]).max(initial=0))
    if cotangents is None:
        return Tolerance(exact, rounded, few)
    dbias_size = None
    if operands.bias is not None:
        shape = (*operands.q.shape[:3:2], operands.q.shape[1], operands.k.shape[1])
        full = operands._replace(bias=np.broadcast_to(operands.bias, shape))
        terms = np.abs(attend(full, semantics, cotangents).dbias)
        dbias_size = over_broadcast(terms, operands.bias.shape)
    if operands.sinks is None:
        return Tolerance(exact, rounded, few, dbias_size=dbias_size)
    rows = side(operands.q.shape[:2], operands.cu_seqlens_q, operands.q_lengths)
    dout, dlse = (np.asarray(x, np.float64) for x in cotangents)
    delta = np.abs((dout * exact.out).sum(3) - dlse)
    lse = np.where(np.isneginf(exact.lse), np.inf, exact.lse)
    terms = np.exp(np.asarray(operands.sinks, np.float64)[rows.sequence] - lse) * delta
    sinks_size = np.where(rows.used[:, :, None], terms, 0).sum((0, 1))
    return Tolerance(exact, rounded, few, sinks_size, dbias_size)


# --------------------------------------------------------------------------------------- comparison


def complaint(name: str, values: Values, ulp: float) -> str | None:
    """Why ``got`` breaks the tolerance rule, with the worst coordinate; None if it keeps it."""
    got, exact, rounded = (np.asarray(x).astype(np.float64) for x in values[:3])
    if got.shape != exact.shape:
        return f"{name}: shape {got.shape} instead of {exact.shape}"
    for kind, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = np.argwhere(test(got) != test(exact))
        if len(wrong):
            at = tuple(map(int, wrong[0]))
            return (
                f"{name}: {kind} where it should not be or missing, in {len(wrong)} places, first "
                f"at {at}: got {got[at]}, exact {exact[at]}"
            )
    finite = np.isfinite(exact)
    if not finite.any():
        return None
    got, exact, rounded = (np.where(finite, x, 0) for x in (got, exact, rounded))
    error, allowed_error, size = np.abs(got - exact), np.abs(rounded - exact), np.abs(exact)
    largest = size.max() if values.size is None else np.max(values.size)
    limits = 2 * allowed_error.max() + 2 * ulp * size + values.few * largest
    worst = tuple(map(int, np.unravel_index(np.argmax(error - limits), error.shape)))
    if error[worst] > limits[worst]:
        return (
            f"{name}: error {error[worst]:.3g} at {worst} is more than {limits[worst]:.3g}: got "
            f"{got[worst]:.6g}, exact {exact[worst]:.6g}"
        )
    rms, rms_allowed, rms_size = (
        float(np.sqrt(np.mean(x[finite] ** 2))) for x in (error, allowed_error, size)
    )
    limit = (
        2 * rms_allowed
        + ulp * rms_size
        + values.few * (rms_size if values.size is None else largest)
    )
    if rms > limit:
        return f"{name}: root mean square error {rms:.3g} is more than {limit:.3g}"
    return None


def assert_close(got: Results, wanted: Tolerance, dtype: str, label: str = "") -> None:
    """Asserts the tolerance rule for every result that ``got`` holds."""
    broken = []
    for name in Results._fields:
        value = getattr(got, name)
        if value is None:
            continue
        ulp = ULP["float32"] if name in ("lse", "dsinks") else ULP[dtype]
        few, size = wanted.few, None
        if name == "dbias":  # likewise
            few, size = max(few, ULP[dtype] / 4), wanted.dbias_size
            ulp = ULP[str(value.dtype)]
        if name == "dsinks":  # holds delta, whose output factor is rounded
            few, size = max(few, ULP[dtype] / 4), wanted.dsinks_size
        exact, rounded = getattr(wanted.exact, name), getattr(wanted.rounded, name)
        text = complaint(name, Values(value, exact, rounded, few, size), ulp)
        if text:
            broken.append(text)
    assert not broken, "\n".join([label, *broken])
