"""Number formats and roundings that numpy does not have ready made."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

U4, F4 = np.uint32, np.float32
_TINY = np.float32(np.finfo(np.float32).tiny)


def flush(a: np.ndarray) -> np.ndarray:
    """Subnormal float32 values become zero of the same sign (.ftz)."""
    return np.where(np.abs(a) < _TINY, np.copysign(F4(0), a), a)


def fma4(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns a * b + c, the product exact."""
    return (a.astype(np.float64) * b + c).astype(a.dtype)


_BEYOND = {
    "rm": lambda nearest, exact: nearest > exact,
    "rp": lambda nearest, exact: nearest < exact,
    "rz": lambda nearest, exact: np.abs(nearest) > np.abs(exact),
}
_TOWARDS = {"rm": F4(-np.inf), "rp": F4(np.inf), "rz": F4(0)}


def directed(function: Callable, mode: str) -> Callable:
    """A float32 operation rounded down (rm), up (rp) or towards zero (rz) by way of float64.

    Exact for sums and products of two; an fma may be off in its last bit in rare cases.
    """

    def rounded(*operands: np.ndarray) -> np.ndarray:
        exact = function(*(o.astype(np.float64) for o in operands))
        nearest = exact.astype(F4)
        beyond = _BEYOND[mode](nearest, exact)
        return np.where(beyond, np.nextafter(nearest, _TOWARDS[mode]), nearest)

    return rounded


max_float = np.fmax
min_float = np.fmin


def signed_divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Division that truncates; a divisor of zero gives all ones."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    # As unsigned, so that the magnitude of the most negative number is right.
    unsigned = a.dtype.str.replace("i", "u")
    quotient = (np.abs(a).view(unsigned) // np.abs(safe).view(unsigned)).view(a.dtype)
    quotient = np.where((a < 0) != (safe < 0), -quotient, quotient)
    return np.where(b == 0, b.dtype.type(-1), quotient)


def signed_remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Remainder with the sign of the dividend; a divisor of zero gives the dividend."""
    return np.where(b == 0, a, a - signed_divide(a, b) * b)


def round_to_int(mode: str, dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    """Float to integer: NaN gives 0, values outside the range the nearest end."""
    rounding = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    limits = np.iinfo(dtype)

    def convert(a: np.ndarray) -> np.ndarray:
        rounded = rounding(a.astype(np.float64))
        inside = np.where(
            np.isnan(rounded) | (rounded >= limits.max) | (rounded <= limits.min), 0, rounded
        ).astype(dtype)
        inside = np.where(rounded >= limits.max, np.array(limits.max, dtype), inside)
        return np.where(rounded <= limits.min, np.array(limits.min, dtype), inside)

    return convert


def bf16_bits(a: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 bits, to nearest even."""
    bits = a.view(U4)
    rounded = (bits + (U4(0x7FFF) + ((bits >> U4(16)) & U4(1)))) >> U4(16)
    nan = np.isnan(a)
    if nan.any():
        rounded = np.where(nan, U4(0x7FFF), rounded)
    return rounded.astype(np.uint16)


def bf16x2_bits(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Two float32 -> packed bfloat16 pair; both halves in one pass, as this is a hot spot."""
    both = np.empty((len(low), 2), F4)
    both[:, 0], both[:, 1] = low, high
    bits = both.view(U4)
    rounded = (bits + (((bits >> U4(16)) & U4(1)) + U4(0x7FFF))) >> U4(16)
    if np.isnan(both).any():
        rounded = np.where(np.isnan(both), U4(0x7FFF), rounded)
    return rounded.astype(np.uint16).view(U4).reshape(-1)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) -> float32."""
    return (bits.astype(U4) << U4(16)).view(F4)


def pack_halves(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two uint16 -> uint32."""
    return low.astype(U4) | (high.astype(U4) << U4(16))


def split_halves(both: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint32 -> low and high uint16."""
    return both.astype(np.uint16), (both >> U4(16)).astype(np.uint16)


class Format(NamedTuple):
    """A storage format narrower than float32: conversions of arrays of its bits."""

    bytes: int
    load: Callable[[np.ndarray], np.ndarray]
    store: Callable[[np.ndarray], np.ndarray]
    truncate: Callable[[np.ndarray], np.ndarray] | None


def _truncate_f16(a: np.ndarray) -> np.ndarray:
    half = a.astype(np.float16)
    beyond = np.abs(half.astype(F4)) > np.abs(a)
    return (half.view(np.uint16) - beyond.astype(np.uint16)).astype(np.uint16)


def _float8(exponent_bits: int, *, infinities: bool) -> Format:
    """e4m3 (no infinities, one NaN per sign) and e5m2, by a table of all 256 values."""
    mantissa_bits = 7 - exponent_bits
    bias = (1 << (exponent_bits - 1)) - 1
    codes = np.arange(128)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    scale = 2.0 ** (np.maximum(exponent, 1) - bias - mantissa_bits)
    values = np.where(exponent == 0, mantissa, mantissa + (1 << mantissa_bits)) * scale
    if infinities:
        values[exponent == (1 << exponent_bits) - 1] = np.nan
        values[0x7C] = np.inf
    else:
        values[0x7F] = np.nan
    table = np.concatenate([values, -values]).astype(F4)
    finite = table[:128][np.isfinite(table[:128])].astype(np.float64)
    largest = len(finite) - 1
    middles = (finite[1:] + finite[:-1]) / 2

    def store(a: np.ndarray) -> np.ndarray:
        size = np.minimum(np.abs(a.astype(np.float64)), finite[-1])
        above = np.searchsorted(middles, size, side="right")
        tie = (above > 0) & (middles[np.maximum(above, 1) - 1] == size)
        code = np.where(tie & (above % 2 == 1), above - 1, above)
        code = np.where(np.isnan(a), 0x7F, np.minimum(code, largest))
        return (code | (np.signbit(a).astype(np.int64) << 7)).astype(np.uint8)

    return Format(1, lambda bits: table[bits], store, None)


NARROW = {
    "f16": Format(
        2,
        lambda bits: bits.view(np.float16).astype(F4),
        lambda a: a.astype(np.float16).view(np.uint16),
        _truncate_f16,
    ),
    "bf16": Format(2, bf16_values, bf16_bits, lambda a: (a.view(U4) >> U4(16)).astype(np.uint16)),
    "e4m3": _float8(4, infinities=False),
    "e5m2": _float8(5, infinities=True),
}


def matrix_values(bits: np.ndarray, type_: str) -> np.ndarray:
    """Operand bits of a matrix instruction as float32 (tf32 drops 13 low bits)."""
    if type_ == "tf32":
        return (bits & U4(0xFFFFE000)).view(F4)
    if type_ == "f32":
        return bits.view(F4)
    return NARROW[type_].load(bits)
