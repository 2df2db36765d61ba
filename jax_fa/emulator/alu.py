"""Arithmetic, logic, comparison, conversion and bit instructions: everything without side effects.

Rounding is numpy's (to nearest even) unless a name says otherwise. ex2, lg2 and rcp.approx.ftz are
the hardware's (mufu.py); other approximations give the correctly rounded float32 where hardware
promises an error bound. fma rounds once by way of float64 (the product is exact there, the sum is
rounded twice in rare cases).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jax_fa.emulator import mufu
from jax_fa.emulator.numerics import (
    NARROW,
    Format,
    bf16_bits,
    bf16_values,
    bf16x2_bits,
    directed,
    flush,
    fma4,
    max_float,
    min_float,
    pack_halves,
    round_to_int,
    signed_divide,
    signed_remainder,
    split_halves,
)
from jax_fa.emulator.registry import define
from jax_fa.emulator.values import LANES, identity

U4, I4, F4, U8, I8 = np.uint32, np.int32, np.float32, np.uint64, np.int64
TINY = np.float32(np.finfo(np.float32).tiny)

# Moves and selects.
for _bits in ("b16", "b32", "b64", "u16", "s16", "u32", "s32", "u64", "s64", "f32", "f64", "pred"):
    define(f"mov.{_bits}", "any", "any", identity)
    if _bits != "pred":
        define(f"selp.{_bits}", "any", "any any pred", lambda a, b, p: np.where(p, a, b))
        define(f"slct.{_bits}.s32", "any", "any any i4", lambda a, b, c: np.where(c >= 0, a, b))

# Integer arithmetic. Wrapping arithmetic is the same for both signs.
for _n, _w in (("16", "2"), ("32", "4"), ("64", "8")):
    _u, _i = f"u{_w}", f"i{_w}"
    for _name, _function in (("add", np.add), ("sub", np.subtract)):
        define(f"{_name}.s{_n} {_name}.u{_n} {_name}.b{_n}", _u, f"{_u} {_u}", _function)
    define(f"mul.lo.s{_n} mul.lo.u{_n}", _u, f"{_u} {_u}", np.multiply)
    define(f"mad.lo.s{_n} mad.lo.u{_n}", _u, f"{_u} {_u} {_u}", lambda a, b, c: a * b + c)
    define(f"neg.s{_n}", _u, _u, lambda a: ~a + a.dtype.type(1))
    define(f"abs.s{_n}", _i, _i, np.abs)
    define(f"div.u{_n}", _u, f"{_u} {_u}", lambda a, b: np.where(b == 0, ~b, a // (b | (b == 0))))
    define(f"rem.u{_n}", _u, f"{_u} {_u}", lambda a, b: np.where(b == 0, a, a % (b | (b == 0))))
    define(f"div.s{_n}", _i, f"{_i} {_i}", signed_divide)
    define(f"rem.s{_n}", _i, f"{_i} {_i}", signed_remainder)
    for _kind, _t in ((_i, f"s{_n}"), (_u, f"u{_n}")):
        define(f"min.{_t}", _kind, f"{_kind} {_kind}", np.minimum)
        define(f"max.{_t}", _kind, f"{_kind} {_kind}", np.maximum)
    for _name, _function in (
        ("and", np.bitwise_and),
        ("or", np.bitwise_or),
        ("xor", np.bitwise_xor),
    ):
        define(f"{_name}.b{_n}", _u, f"{_u} {_u}", _function)
    define(f"not.b{_n}", _u, _u, np.invert)
    define(f"cnot.b{_n}", _u, _u, lambda a: (a == 0).astype(a.dtype))


def _shift(bits: int, kind: str, function: Callable, beyond: Callable) -> Callable:
    """A shift whose amounts of `bits` or more give `beyond(value)`."""
    dtype = {"u": f"uint{bits}", "i": f"int{bits}"}[kind]

    def shift(a: np.ndarray, amount: np.ndarray) -> np.ndarray:
        inside = amount < bits
        if np.count_nonzero(inside) == LANES:
            return function(a, amount.astype(dtype))
        return np.where(inside, function(a, np.where(inside, amount, 0).astype(dtype)), beyond(a))

    return shift


for _bits in (16, 32, 64):
    _w = _bits // 8
    define(f"shl.b{_bits}", f"u{_w}", f"u{_w} u4", _shift(_bits, "u", np.left_shift, np.zeros_like))
    define(
        f"shr.u{_bits} shr.b{_bits}",
        f"u{_w}",
        f"u{_w} u4",
        _shift(_bits, "u", np.right_shift, np.zeros_like),
    )
    define(
        f"shr.s{_bits}",
        f"i{_w}",
        f"i{_w} u4",
        _shift(_bits, "i", np.right_shift, lambda a, top=_bits - 1: a >> a.dtype.type(top)),
    )

for _sign, _wide in (("u", "u8"), ("s", "i8")):
    _narrow, _half = ("u4", "u2") if _sign == "u" else ("i4", "i2")
    _w8, _w4 = np.dtype(U8 if _sign == "u" else I8), np.dtype(U4 if _sign == "u" else I4)
    define(
        f"mul.wide.{_sign}32", _wide, f"{_narrow} {_narrow}", lambda a, b, t=_w8: a.astype(t) * b
    )
    define(
        f"mad.wide.{_sign}32",
        _wide,
        f"{_narrow} {_narrow} {_wide}",
        lambda a, b, c, t=_w8: a.astype(t) * b + c,
    )
    define(f"mul.wide.{_sign}16", _narrow, f"{_half} {_half}", lambda a, b, t=_w4: a.astype(t) * b)
    define(
        f"mul.hi.{_sign}16",
        _half,
        f"{_half} {_half}",
        lambda a, b, t=_w4: ((a.astype(t) * b) >> t.type(16)).astype(a.dtype),
    )
    define(
        f"mul.hi.{_sign}32",
        _narrow,
        f"{_narrow} {_narrow}",
        lambda a, b, t=_w8, n=_w4: ((a.astype(t) * b) >> t.type(32)).astype(n),
    )
    define(
        f"mad.hi.{_sign}32",
        _narrow,
        f"{_narrow} {_narrow} {_narrow}",
        lambda a, b, c, t=_w8, n=_w4: ((a.astype(t) * b) >> t.type(32)).astype(n) + c,
    )


def _multiply_high_64(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    product = [(int(x) * int(y)) >> 64 for x, y in zip(a, b, strict=True)]
    return np.array([p & (2**64 - 1) for p in product], dtype=U8)


define("mul.hi.u64", "u8", "u8 u8", _multiply_high_64)
define("mul.hi.s64", "u8", "i8 i8", _multiply_high_64)

for _name, _function in (("min", np.minimum), ("max", np.maximum)):
    define(
        f"{_name}.relu.s32",
        "i4",
        "i4 i4",
        lambda a, b, f=_function: np.maximum(f(a, b), I4(0)),
    )


def _saturating(function: Callable) -> Callable:
    limits = np.iinfo(I4)
    return lambda a, b: np.clip(function(a.astype(I8), b), limits.min, limits.max).astype(I4)


define("add.sat.s32", "i4", "i4 i4", _saturating(np.add))
define("sub.sat.s32", "i4", "i4 i4", _saturating(np.subtract))
define("sad.u32", "u4", "u4 u4 u4", lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c)
define("sad.s32", "u4", "i4 i4 u4", lambda a, b, c: np.abs(a.astype(I8) - b).astype(U4) + c)

# Bits.
define("popc.b32", "u4", "u4", lambda a: np.bitwise_count(a).astype(U4))
define("popc.b64", "u4", "u8", lambda a: np.bitwise_count(a).astype(U4))


def _count_leading(bits: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda a: np.array([bits - int(v).bit_length() for v in a], dtype=U4)


def _find_leading(a: np.ndarray) -> np.ndarray:
    """Position of the highest set bit; all ones when there is none."""
    return np.array([int(v).bit_length() - 1 for v in a], dtype=np.int64).astype(U4)


def _reverse(bits: int, dtype: type) -> Callable[[np.ndarray], np.ndarray]:
    return lambda a: np.array([int(f"{int(v):0{bits}b}"[::-1], 2) for v in a], dtype=dtype)


define("clz.b32", "u4", "u4", _count_leading(32))
define("clz.b64", "u4", "u8", _count_leading(64))
define("bfind.u32", "u4", "u4", _find_leading)
define("bfind.u64", "u4", "u8", _find_leading)
define("bfind.s32", "u4", "i4", lambda a: _find_leading(np.where(a < 0, ~a, a)))
define("brev.b32", "u4", "u4", _reverse(32, U4))
define("brev.b64", "u8", "u8", _reverse(64, U8))


def _extract_unsigned(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    start, length = (start & U4(255)).astype(U8), np.minimum(length & U4(255), U4(32)).astype(U8)
    shifted = np.where(start < 32, a.astype(U8) >> np.minimum(start, U8(63)), U8(0))
    return (shifted & ((U8(1) << length) - U8(1))).astype(U4)


def _extract_signed(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    start, length = (start & U4(255)).astype(I8), (length & U4(255)).astype(I8)
    top = np.minimum(start + length - 1, 31)
    sign = np.where(length == 0, 0, (a.view(I4).astype(I8) >> top) & 1)
    field = _extract_unsigned(a, start.astype(U4), length.astype(U4)).astype(I8)
    kept = np.maximum(np.minimum(length, 32 - np.minimum(start, 32)), 0)
    return (field | np.where(sign == 1, I8(-1) << kept, 0)).astype(U4)


def _insert(a: np.ndarray, b: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    start, length = (start & U4(255)).astype(U8), np.minimum(length & U4(255), U4(32)).astype(U8)
    field = np.where(start < 32, ((U8(1) << length) - U8(1)) << np.minimum(start, U8(32)), U8(0))
    moved = a.astype(U8) << np.minimum(start, U8(32))
    return ((moved & field) | (b.astype(U8) & ~field)).astype(U4)


define("bfe.u32", "u4", "u4 u4 u4", _extract_unsigned)
define("bfe.s32", "u4", "u4 u4 u4", _extract_signed)
define("bfi.b32", "u4", "u4 u4 u4 u4", _insert)


def _bit_mask(a: np.ndarray, b: np.ndarray, *, clamp: bool) -> np.ndarray:
    limit = (lambda v: np.minimum(v, U4(32))) if clamp else (lambda v: v & U4(31))
    start, length = limit(a).astype(U8), limit(b).astype(U8)
    return (((U8(1) << length) - U8(1)) << start).astype(U4)


define("bmsk.clamp.b32", "u4", "u4 u4", lambda a, b: _bit_mask(a, b, clamp=True))
define("bmsk.wrap.b32", "u4", "u4 u4", lambda a, b: _bit_mask(a, b, clamp=False))


def _permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt: byte i of the result is byte (selector >> 4i) & 7 of b:a, bit 3 spreads its sign."""
    both = a.astype(U8) | (b.astype(U8) << U8(32))
    result = np.zeros(LANES, dtype=U4)
    for byte in range(4):
        choice = (selector >> U4(4 * byte)) & U4(15)
        value = ((both >> ((choice & U4(7)).astype(U8) * U8(8))) & U8(255)).astype(U4)
        spread = np.where(value & U4(0x80), U4(0xFF), U4(0))
        result |= np.where(choice & U4(8), spread, value) << U4(8 * byte)
    return result


def _logic3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    result = np.zeros_like(a)
    for index in range(8):
        if int(table[0]) >> index & 1:
            result |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return result


def _funnel(
    a: np.ndarray, b: np.ndarray, amount: np.ndarray, *, left: bool, clamp: bool
) -> np.ndarray:
    amount = (np.minimum(amount, U4(32)) if clamp else amount & U4(31)).astype(U8)
    both = a.astype(U8) | (b.astype(U8) << U8(32))
    return (((both << amount) >> U8(32)) if left else (both >> amount)).astype(U4)


define("prmt.b32", "u4", "u4 u4 u4", _permute)
define("lop3.b32", "u4", "u4 u4 u4 u4", _logic3)
for _left in (True, False):
    for _clamp in (True, False):
        define(
            f"shf.{'l' if _left else 'r'}.{'clamp' if _clamp else 'wrap'}.b32",
            "u4",
            "u4 u4 u4",
            lambda a, b, c, left=_left, clamp=_clamp: _funnel(a, b, c, left=left, clamp=clamp),
        )

# Predicates.
for _name, _function in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)):
    define(f"{_name}.pred", "pred", "pred pred", _function)
define("not.pred", "pred", "pred", np.logical_not)


def _unordered(compare: Callable) -> Callable:
    """The comparison that is also true when an operand is NaN."""
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


def _ordered_not_equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.not_equal(a, b) & ~np.isnan(a) & ~np.isnan(b)


_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _define_compare(name: str, kind: str, compare: Callable) -> None:
    """Defines setp and set in every form, for one comparison and one type."""
    comparison, type_ = name.rsplit(".", 1)
    define(f"setp.{name}", "pred", f"{kind} {kind}", compare)
    define(
        f"set.{comparison}.u32.{type_} set.{comparison}.s32.{type_}",
        "u4",
        f"{kind} {kind}",
        lambda a, b: np.where(compare(a, b), U4(0xFFFFFFFF), U4(0)),
    )
    define(
        f"set.{comparison}.f32.{type_}",
        "f4",
        f"{kind} {kind}",
        lambda a, b: compare(a, b).astype(F4),
    )
    for combine, function in _COMBINE.items():
        base = comparison.removesuffix(".ftz")
        ftz = ".ftz" if comparison.endswith(".ftz") else ""
        define(
            f"setp.{base}.{combine}{ftz}.{type_}",
            "pred",
            f"{kind} {kind} pred",
            lambda a, b, p, function=function: function(compare(a, b), p),
        )


for _name, _compare in _COMPARE.items():
    for _n, _w in (("16", "2"), ("32", "4"), ("64", "8")):
        _define_compare(f"{_name}.s{_n}", f"i{_w}", _compare)
        _define_compare(f"{_name}.u{_n}", f"u{_w}", _compare)
        if _name in ("eq", "ne"):
            _define_compare(f"{_name}.b{_n}", f"u{_w}", _compare)
    for _type, _kind in (("f32", "f4"), ("ftz.f32", "f4"), ("f64", "f8"), ("f16", "f2")):
        # PTX's plain "ne" is false for NaN, unlike numpy's; "neu" is numpy's.
        _define_compare(
            f"{_name}.{_type}", _kind, _ordered_not_equal if _name == "ne" else _compare
        )
        _define_compare(f"{_name}u.{_type}", _kind, _unordered(_compare))
for _name, _unsigned in (
    ("lo", np.less),
    ("ls", np.less_equal),
    ("hi", np.greater),
    ("hs", np.greater_equal),
):
    for _n, _w in (("16", "2"), ("32", "4"), ("64", "8")):
        _define_compare(f"{_name}.u{_n}", f"u{_w}", _unsigned)
for _type, _kind in (("f32", "f4"), ("f64", "f8")):
    _define_compare(f"num.{_type}", _kind, lambda a, b: ~(np.isnan(a) | np.isnan(b)))
    _define_compare(f"nan.{_type}", _kind, lambda a, b: np.isnan(a) | np.isnan(b))

# Floating point.


def _define_float(name: str, operands: str, function: Callable) -> None:
    """One operation in f32 with and without .rn and .ftz, and in f64."""
    define(f"{name}.f32 {name}.rn.f32", "f4", operands, function)
    define(
        f"{name}.ftz.f32 {name}.rn.ftz.f32",
        "f4",
        operands,
        lambda *values: flush(function(*map(flush, values))),
    )
    if name != "fma":
        define(f"{name}.f64 {name}.rn.f64", "f8", operands.replace("4", "8"), function)


_define_float("add", "f4 f4", np.add)
_define_float("sub", "f4 f4", np.subtract)
_define_float("mul", "f4 f4", np.multiply)
_define_float("div", "f4 f4", np.divide)
_define_float("fma", "f4 f4 f4", fma4)
_define_float("mad", "f4 f4 f4", fma4)
# No PTX: what contract.py makes of a product and what is subtracted from it, or it from.
_define_float("fms", "f4 f4 f4", lambda a, b, c: fma4(a, b, -c))
_define_float("fnma", "f4 f4 f4", lambda a, b, c: fma4(-a, b, c))
_define_float("min", "f4 f4", min_float)
_define_float("max", "f4 f4", max_float)
_define_float("neg", "f4", np.negative)
_define_float("abs", "f4", np.abs)
_define_float("sqrt", "f4", np.sqrt)
_define_float("rcp", "f4", lambda a: F4(1) / a if a.dtype == F4 else 1 / a)
define("fma.rn.f64", "f8", "f8 f8 f8", lambda a, b, c: a * b + c)
define("max.f32 max.ftz.f32", "f4", "f4 f4", max_float)
define("min.f32 min.ftz.f32", "f4", "f4 f4", min_float)
define("max.NaN.f32", "f4", "f4 f4", np.maximum)
define("min.NaN.f32", "f4", "f4 f4", np.minimum)
for _extreme, _one in (("max", max_float), ("min", min_float)):
    define(
        f"{_extreme}.f32 {_extreme}.ftz.f32",
        "f4",
        "f4 f4 f4",
        lambda a, b, c, one=_one: one(one(a, b), c),
    )
define("copysign.f32", "f4", "f4 f4", lambda a, b: np.copysign(b, a))


def _mul_sat(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.clip(np.nan_to_num(a * b, nan=0.0), F4(0), F4(1))


define("mul.sat.f32", "f4", "f4 f4", _mul_sat)
define(
    "add.sat.f32", "f4", "f4 f4", lambda a, b: np.clip(np.nan_to_num(a + b, nan=0.0), F4(0), F4(1))
)
define(
    "fma.rn.sat.f32",
    "f4",
    "f4 f4 f4",
    lambda a, b, c: np.clip(np.nan_to_num(fma4(a, b, c), nan=0.0), F4(0), F4(1)),
)
for _mode in ("rm", "rp", "rz"):
    for _name, _kinds, _function in (
        ("add", "f4 f4", np.add),
        ("sub", "f4 f4", np.subtract),
        ("mul", "f4 f4", np.multiply),
        ("div", "f4 f4", np.divide),
        ("fma", "f4 f4 f4", lambda a, b, c: a * b + c),
    ):
        _rounded = directed(_function, _mode)
        define(f"{_name}.{_mode}.f32 {_name}.{_mode}.ftz.f32", "f4", _kinds, _rounded)
        define(
            f"{_name}.{_mode}.f32x2 {_name}.{_mode}.ftz.f32x2",
            "pair",
            _kinds.replace("f4", "pair"),
            lambda *pairs, f=_rounded: (f(*(p[0] for p in pairs)), f(*(p[1] for p in pairs))),
        )
define("div.full.f32 div.approx.f32", "f4", "f4 f4", np.divide)
define(
    "div.full.ftz.f32 div.approx.ftz.f32",
    "f4",
    "f4 f4",
    lambda a, b: flush(flush(a) / flush(b)),
)


_APPROXIMATE = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda a: F4(1) / a,
    "rsqrt": lambda a: F4(1) / np.sqrt(a),
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
}
for _name, _function in _APPROXIMATE.items():
    define(f"{_name}.approx.f32", "f4", "f4", _function)
    define(
        f"{_name}.approx.ftz.f32",
        "f4",
        "f4",
        lambda a, function=_function: flush(function(flush(a))),
    )
define("ex2.approx.ftz.f32", "f4", "f4", mufu.exp2)
define("lg2.approx.ftz.f32", "f4", "f4", mufu.log2)
define("rcp.approx.ftz.f32", "f4", "f4", mufu.reciprocal)
define("tanh.approx.f32", "f4", "f4", np.tanh)

for _name, _function in (
    ("finite", np.isfinite),
    ("infinite", np.isinf),
    ("number", lambda a: ~np.isnan(a)),
    ("notanumber", np.isnan),
    ("subnormal", lambda a: (a != 0) & (np.abs(a) < TINY)),
    ("normal", lambda a: np.isfinite(a) & (np.abs(a) >= TINY)),
):
    define(f"testp.{_name}.f32", "pred", "f4", _function)

# Packed float32 pairs.
for _name, _function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
    define(
        f"{_name}.rn.f32x2 {_name}.f32x2",
        "pair",
        "pair pair",
        lambda a, b, f=_function: (f(a[0], b[0]), f(a[1], b[1])),
    )
    define(
        f"{_name}.rn.ftz.f32x2 {_name}.ftz.f32x2",
        "pair",
        "pair pair",
        lambda a, b, f=_function: (
            flush(f(flush(a[0]), flush(b[0]))),
            flush(f(flush(a[1]), flush(b[1]))),
        ),
    )
define(
    "fma.rn.f32x2",
    "pair",
    "pair pair pair",
    lambda a, b, c: (fma4(a[0], b[0], c[0]), fma4(a[1], b[1], c[1])),
)
define(
    "fma.rn.ftz.f32x2",
    "pair",
    "pair pair pair",
    lambda a, b, c: (flush(fma4(a[0], b[0], c[0])), flush(fma4(a[1], b[1], c[1]))),
)

# Half precision: f16 through numpy, bf16 through float32.
for _name, _function in (
    ("add", np.add),
    ("sub", np.subtract),
    ("mul", np.multiply),
    ("min", np.fmin),
    ("max", np.fmax),
    ("max.NaN", np.maximum),
):
    for _type, _load, _store in (
        ("f16", NARROW["f16"].load, NARROW["f16"].store),
        ("bf16", bf16_values, bf16_bits),
    ):

        def _single(
            a: np.ndarray,
            b: np.ndarray,
            f: Callable = _function,
            load: Callable = _load,
            store: Callable = _store,
        ) -> np.ndarray:
            return store(f(load(a), load(b)))

        def _double(a: np.ndarray, b: np.ndarray, one: Callable = _single) -> np.ndarray:
            (a0, a1), (b0, b1) = split_halves(a), split_halves(b)
            return pack_halves(one(a0, b0), one(a1, b1))

        define(f"{_name}.{_type} {_name}.rn.{_type}", "u2", "u2 u2", _single)
        define(f"{_name}.{_type}x2 {_name}.rn.{_type}x2", "u4", "u4 u4", _double)
for _type in ("f16", "bf16"):

    def _fma_half(a: np.ndarray, b: np.ndarray, c: np.ndarray, t: str = _type) -> np.ndarray:
        load, store = NARROW[t].load, NARROW[t].store
        return store((load(a).astype(np.float64) * load(b) + load(c)).astype(F4))

    def _fma_halves(
        a: np.ndarray, b: np.ndarray, c: np.ndarray, one: Callable = _fma_half
    ) -> np.ndarray:
        (a0, a1), (b0, b1), (c0, c1) = split_halves(a), split_halves(b), split_halves(c)
        return pack_halves(one(a0, b0, c0), one(a1, b1, c1))

    define(f"fma.rn.{_type}", "u2", "u2 u2 u2", _fma_half)
    define(f"fma.rn.{_type}x2", "u4", "u4 u4 u4", _fma_halves)
    define(f"neg.{_type}", "u2", "u2", lambda a: a ^ np.uint16(0x8000))
    define(f"neg.{_type}x2", "u4", "u4", lambda a: a ^ U4(0x80008000))
    define(f"abs.{_type}", "u2", "u2", lambda a: a & np.uint16(0x7FFF))
    define(f"abs.{_type}x2", "u4", "u4", lambda a: a & U4(0x7FFF7FFF))
    define(
        f"fma.rn.f32.{_type}",
        "f4",
        "u2 u2 f4",
        lambda a, b, c, load=NARROW[_type].load: fma4(load(a), load(b), c),
    )

for _type in ("f16", "bf16"):
    for _name, _function in (("ex2.approx", np.exp2), ("tanh.approx", np.tanh)):

        def _approximate(
            a: np.ndarray, f: Callable = _function, half: Format = NARROW[_type]
        ) -> np.ndarray:
            return half.store(f(half.load(a)).astype(F4))

        define(f"{_name}.{_type} {_name}.ftz.{_type}", "u2", "u2", _approximate)
        define(
            f"{_name}.{_type}x2 {_name}.ftz.{_type}x2",
            "u4",
            "u4",
            lambda a, one=_approximate: pack_halves(*(one(h) for h in split_halves(a))),
        )

# Conversions between integers: truncation and extension.
for _to in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"):
    for _from in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"):
        _kinds = [("i" if t[0] == "s" else "u") + str(int(t[1:]) // 8) for t in (_to, _from)]
        _dtype = f"{'int' if _to[0] == 's' else 'uint'}{_to[1:]}"
        define(f"cvt.{_to}.{_from}", _kinds[0], _kinds[1], lambda a, dtype=_dtype: a.astype(dtype))
        _range = np.iinfo(_dtype)
        if np.dtype(_dtype).itemsize < 8:
            define(
                f"cvt.sat.{_to}.{_from}",
                _kinds[0],
                _kinds[1],
                lambda a, dtype=_dtype, lo=_range.min, hi=_range.max: np.array(
                    [min(max(int(v), lo), hi) for v in a], dtype=dtype
                ),
            )
    _kind = ("i" if _to[0] == "s" else "u") + str(int(_to[1:]) // 8)
    for _type, _float in (("f32", "f4"), ("f64", "f8")):
        _float_type = F4 if _type == "f32" else np.float64
        define(f"cvt.rn.{_type}.{_to}", _float, _kind, lambda a, dtype=_float_type: a.astype(dtype))
        for _mode in ("rni", "rzi", "rmi", "rpi"):
            define(
                f"cvt.{_mode}.{_to}.{_type} cvt.{_mode}.ftz.{_to}.{_type}",
                _kind,
                _float,
                round_to_int(_mode, f"{'int' if _to[0] == 's' else 'uint'}{_to[1:]}"),
            )

# Conversions between floats.
define("cvt.f64.f32", "f8", "f4", lambda a: a.astype(np.float64))
define("cvt.rn.f32.f64", "f4", "f8", lambda a: a.astype(F4))
for _mode, _function in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
    define(f"cvt.{_mode}.f32.f32 cvt.{_mode}.ftz.f32.f32", "f4", "f4", _function)
define("cvt.ftz.f32.f32", "f4", "f4", flush)
define("cvt.sat.f32.f32", "f4", "f4", lambda a: np.clip(np.nan_to_num(a, nan=0.0), F4(0), F4(1)))
for _type, _half in NARROW.items():
    if _half.bytes == 2:
        define(f"cvt.f32.{_type}", "f4", "u2", _half.load)
        define(f"cvt.rn.{_type}.f32", "u2", "f4", _half.store)
        define(
            f"cvt.rn.{_type}x2.f32",
            "u4",
            "f4 f4",
            lambda a, b, store=_half.store: pack_halves(store(b), store(a)),
        )
        define(
            f"cvt.rn.relu.{_type}x2.f32",
            "u4",
            "f4 f4",
            lambda a, b, store=_half.store: pack_halves(
                store(np.fmax(b, F4(0))), store(np.fmax(a, F4(0)))
            ),
        )
        define(
            f"cvt.rz.{_type}x2.f32",
            "u4",
            "f4 f4",
            lambda a, b, cut=_half.truncate: pack_halves(cut(b), cut(a)),
        )
        define(f"cvt.rz.{_type}.f32", "u2", "f4", _half.truncate)
    else:
        define(
            f"cvt.rn.satfinite.{_type}x2.f32",
            "u2",
            "f4 f4",
            lambda a, b, store=_half.store: (
                store(b).astype(np.uint16) | (store(a).astype(np.uint16) << np.uint16(8))
            ),
        )
        define(
            f"cvt.rn.f16x2.{_type}x2",
            "u4",
            "u2",
            lambda a, load=_half.load: pack_halves(
                load((a & np.uint16(255)).astype(np.uint8)).astype(np.float16).view(np.uint16),
                load((a >> np.uint16(8)).astype(np.uint8)).astype(np.float16).view(np.uint16),
            ),
        )
define("cvt.rn.bf16x2.f32", "u4", "f4 f4", bf16x2_bits)
define("cvt.rna.tf32.f32", "u4", "f4", lambda a: (a.view(U4) + U4(0x1000)) & U4(0xFFFFE000))
define(
    "cvt.rn.tf32.f32",
    "u4",
    "f4",
    lambda a: (a.view(U4) + U4(0xFFF) + ((a.view(U4) >> U4(13)) & U4(1))) & U4(0xFFFFE000),
)
