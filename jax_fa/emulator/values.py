"""Register values: 32 lanes of one of a few kinds, and the conversions between kinds.

A PTX register is untyped bits. Every register gets one home kind when the program is decoded
(the kind most of its uses want), so that no conversion happens on the common path. Arrays in
registers are never modified in place: an instruction always makes a new one.

Kinds: pred (bool), u2 u4 u8 (unsigned, size in bytes), i2 i4 i8, f2 (float16), f4, f8, and pair:
a 64-bit register that holds two float32, kept as a tuple of two arrays (f32x2 instructions).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

LANES = 32
FULL = np.ones(LANES, dtype=np.bool_)
FULL.flags.writeable = False

DTYPES = {"pred": np.bool_, "u1": np.uint8, "u2": np.uint16, "u4": np.uint32, "u8": np.uint64,
          "i1": np.int8, "i2": np.int16, "i4": np.int32, "i8": np.int64, "f2": np.float16,
          "f4": np.float32, "f8": np.float64}  # fmt: skip
SIZES = {kind: np.dtype(dtype).itemsize for kind, dtype in DTYPES.items()} | {"pair": 8}
UNSIGNED = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}

Value = np.ndarray | tuple[np.ndarray, np.ndarray]
Convert = Callable[[Value], Value]


def pack_pair(pair: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Two 32-bit halves (low first) -> uint64."""
    both = np.empty((LANES, 2), dtype=np.uint32)
    both[:, 0] = pair[0].view(np.uint32)
    both[:, 1] = pair[1].view(np.uint32)
    return both.view(np.uint64).reshape(LANES)


def unpack_pair(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint64 -> two float32 halves, low first."""
    both = value.view(np.float32).reshape(LANES, 2)
    return both[:, 0].copy(), both[:, 1].copy()


def converter(have: str, want: str) -> Convert | None:
    """The function from kind `have` to kind `want`; None when nothing need be done.

    Same-sized kinds share bits. A wider register read as a narrower kind loses its high bits; a
    narrower value widens by its own signedness.
    """
    if have == want:
        return None
    if have == "pair":
        rest = converter("u8", want)
        return pack_pair if rest is None else lambda v: rest(pack_pair(v))
    if want == "pair":
        first = converter(have, "u8")
        return unpack_pair if first is None else lambda v: unpack_pair(first(v))
    dtype = DTYPES[want]
    if "pred" in (have, want):
        return lambda v: v.astype(dtype)
    if SIZES[have] == SIZES[want]:
        return lambda v: v.view(dtype)
    source = DTYPES[("i" if have[0] == "i" else "u") + have[1]]
    middle = DTYPES["u" + want[1]]
    return lambda v: v.view(source).astype(middle).view(dtype)


def identity(value: Value) -> Value:
    """The function of a plain move."""
    return value


def merge(mask: np.ndarray, new: Value, old: Value) -> Value:
    """`new` in the lanes of `mask`, `old` elsewhere."""
    if type(new) is tuple:
        return np.where(mask, new[0], old[0]), np.where(mask, new[1], old[1])
    return np.where(mask, new, old)


def constant(bits: int, kind: str) -> Value:
    """The same bits in every lane."""
    if kind == "pred":
        return np.full(LANES, bool(bits))
    size = SIZES[kind]
    raw = np.full(LANES, bits & ((1 << (8 * size)) - 1), dtype=DTYPES[UNSIGNED[size]])
    return unpack_pair(raw) if kind == "pair" else raw.view(DTYPES[kind])


# What a register holds before anything is written to it: all ones (NaN as a float).
POISON = {
    kind: constant(0 if kind == "pred" else -1, kind)
    for kind in ("pred", "u2", "u4", "f4", "u8", "f8", "pair")
}
