"""Sums of products as tensor cores form them, bit for bit.

One instruction takes an accumulator and K exact products (16 of 16-bit elements). All are cut off,
towards zero, at a number of binary digits below the largest of their exponents; the sum of what is
left is exact, and is rounded to the accumulator's type: towards zero to float32, to nearest even to
float16. A product's exponent is the sum of its factors' exponents, so its significand is below 4.

Evidence: this rule is that of Xie et al., "MMA-Sim" (arXiv 2511.10909) and of Khattak and Mikaitis,
"Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004), who compared it with V100 to B200; here
it gives every bit of what an H200 computed (``tests/emulator/test_hardware.py``).

``ffi/emulator_dot.cc`` computes the same bits, faster, where the extension is there.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from jax_fa.emulator import native

U4, F4, I2 = np.uint32, np.float32, np.int16
_ZERO = I2(-1000)  # exponent of a factor that is zero: below all others, also in a sum of two
_LEAST = I2(-400)  # below the exponent of every product that is not zero
_SAFE = 90  # sums whose exponent is within +-_SAFE: nothing that counts leaves float32's range
_MIN_EXPONENT = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14}
_NAN = U4(0x7FFFFFFF).view(F4)
_ROWS = 32  # that are computed at a time, so that intermediates stay in a cache
_TO_F4 = np.int64(-1 << 29)  # bits of a float64 that a float32 has room for


class Rule(NamedTuple):
    """The rounding rule of one instruction's sum.

    Attributes:
      type: of the factors.
      result: of the sum: "f32", or "f16".
      digits: binary digits kept below the largest exponent.
      cut: binary digits of a float32 result.
    """

    type: str
    result: str
    digits: int = 25
    cut: int = 23


def hopper_rule(type_: str, result: str) -> Rule:
    """The rule of wgmma: 8-bit factors have a narrow adder."""
    return Rule(type_, result, 13, 13) if type_ in ("e4m3", "e5m2") else Rule(type_, result)


class Factors:
    """One operand. K comes first: sums over it are then sums of whole planes.

    Attributes:
      planes: (K, rows) float32.
      type: of the elements.
    """

    def __init__(self, planes: np.ndarray, type_: str) -> None:
        self.planes = planes
        self.type = type_

    @classmethod
    def of(cls, values: np.ndarray, type_: str) -> Factors:
        """Factors of an operand (rows, K)."""
        return cls(np.ascontiguousarray(values.T), type_)

    @classmethod
    def side_by_side(cls, parts: list[Factors]) -> Factors:
        """Rows of one after those of the other."""
        if len(parts) == 1:
            return parts[0]
        return cls(np.concatenate([part.planes for part in parts], 1), parts[0].type)

    @cached_property
    def exponents(self) -> np.ndarray:
        """(K, rows) int16."""
        field = (self.planes.view(U4) >> U4(23)).astype(I2) & I2(0xFF)
        exponents = np.maximum(field - I2(127), self.least_exponent)
        exponents[self.planes == 0] = _ZERO
        return exponents

    @property
    def least_exponent(self) -> np.int16:
        """Of the element type's numbers."""
        return I2(_MIN_EXPONENT[self.type])

    @cached_property
    def is_finite(self) -> bool:
        """True if all of it is."""
        return bool(np.isfinite(self.planes).all())

    def rows(self, which: slice) -> Factors:
        """Some of the rows."""
        return Factors(self.planes[:, which], self.type)

    def finite(self) -> Factors:
        """The same with infinities and NaN replaced by zeros."""
        return Factors(np.where(np.isfinite(self.planes), self.planes, F4(0)), self.type)

    def negated(self) -> Factors:
        """The same with the other sign."""
        return Factors(-self.planes, self.type)


def multiply_add(a: Factors, b: Factors, c: np.ndarray | None, rule: Rule) -> np.ndarray:
    """The sum c + a b^T as one instruction computes it.

    Args:
      a: (M, K).
      b: (N, K).
      c: (M, N) float32; None for zero.
      rule: of the instruction.

    Returns:
      (M, N) float32, of values that fit float16 where the result is of that type.
    """
    if native.core is None or rule.result != "f32":
        return multiply_add_in_numpy(a, b, c, rule)
    if c is not None and c.strides[1] != c.itemsize:
        c = np.ascontiguousarray(c)
    result = np.empty((a.planes.shape[1], b.planes.shape[1]), F4)
    least = (int(a.least_exponent), int(b.least_exponent))
    native.core.multiply_add(a.planes, b.planes, c, least, (rule.digits, rule.cut), result)
    return result


def multiply_add_in_numpy(a: Factors, b: Factors, c: np.ndarray | None, rule: Rule) -> np.ndarray:
    """multiply_add without the extension."""
    rows = a.planes.shape[1]
    if rows > _ROWS:
        parts = [slice(first, first + _ROWS) for first in range(0, rows, _ROWS)]
        return np.concatenate(
            [multiply_add_in_numpy(a.rows(p), b, None if c is None else c[p], rule) for p in parts]
        )
    top = (a.exponents[:, :, None] + b.exponents[:, None, :]).max(0)
    is_finite = a.is_finite and b.is_finite
    if c is not None:
        field = (c.view(U4) >> U4(23)).astype(I2) & I2(0xFF)
        is_finite = is_finite and int(field.max()) < 0xFF
        own = np.maximum(field, I2(1)) - I2(127)
        own[c == 0] = _ZERO
        np.maximum(top, own, out=top)
    if not is_finite:
        return _with_specials(a, b, c, rule)
    top[top < _LEAST] = 0  # nothing but zeros
    if rule.result == "f32" and -_SAFE <= top.min() and top.max() <= _SAFE:
        # 2 ** (digits - top), and its inverse.
        scale = ((rule.digits + 127 - top).astype(U4) << U4(23)).view(F4)
        products = a.planes[:, :, None] * b.planes[:, None, :]
        products *= scale
        total = _sum(products, None if c is None else c * scale)
        total *= ((top - I2(rule.digits - 127)).astype(U4) << U4(23)).view(F4)
        total = (total.view(np.int64) & (_TO_F4 << np.int64(23 - rule.cut))).view(np.float64)
        return total.astype(F4)
    return _far(a, b, c, rule, top.astype(np.int32))


def _sum(products: np.ndarray, addend: np.ndarray | None) -> np.ndarray:
    """Adds what lies before the point; (K, M, N) and (M, N) -> (M, N) float64."""
    # 16 significands below 4, of 25 digits, fit a 32-bit sum.
    wide = np.int32 if len(products) <= 16 else np.int64
    total = products.astype(np.int32).sum(0, dtype=wide).astype(np.float64)
    if addend is not None:
        total += np.trunc(addend)
    return total


def _far(a: Factors, b: Factors, c: np.ndarray | None, rule: Rule, top: np.ndarray) -> np.ndarray:
    """The same in float64, for exponents that float32 lacks and for results of other types."""
    scale = np.ldexp(1.0, rule.digits - top)
    products = a.planes.astype(np.float64)[:, :, None] * b.planes[:, None, :]
    exact = np.ldexp(_sum(products * scale, None if c is None else c * scale), top - rule.digits)
    if rule.result == "f16":
        return exact.astype(np.float16).astype(F4) + F4(0)  # no negative zeros
    nearest = exact.astype(F4)
    beyond = (np.abs(nearest) > np.abs(exact)) & np.isfinite(nearest)
    bits = (nearest.view(U4) - beyond) & U4(-1 << 23 - rule.cut & 0xFFFFFFFF)
    return bits.astype(U4).view(F4) + F4(0)


def _with_specials(a: Factors, b: Factors, c: np.ndarray | None, rule: Rule) -> np.ndarray:
    """The same where some values are infinite or NaN; rare."""
    with np.errstate(invalid="ignore"):
        plain = a.planes.T.astype(np.float64) @ b.planes.astype(np.float64)
        plain = plain if c is None else plain + c
        special = np.where(np.isnan(plain), _NAN, plain.astype(F4))
    addend = None if c is None else np.where(np.isfinite(c), c, F4(0))
    usual = multiply_add_in_numpy(a.finite(), b.finite(), addend, rule)
    return np.where(np.isfinite(plain), usual, special)
