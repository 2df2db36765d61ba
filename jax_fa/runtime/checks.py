"""Converters that check one argument and return the value that attention works with.

Each takes the argument's name; errors say that name, what was given and what would work. A wrong
type raises TypeError; a wrong value, shape or element type raises ValueError: the classes of
``jax.nn.dot_product_attention`` for the same mistakes.

Values are read only where that waits for no device: in Python numbers, lists, NumPy arrays and JAX
arrays on the CPU. For traced arrays, and arrays on a GPU, only shape and type are checked.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

INT32 = np.iinfo(np.int32)


def is_traced(given: Any) -> bool:
    """True if the value is known only when a compiled program runs."""
    return isinstance(given, jax.core.Tracer)


def shown(given: Any) -> str:
    """A short description of an argument: its value, or type and shape of an array."""
    if is_traced(given):
        return f"traced ({given.aval.str_short()})"
    if getattr(given, "shape", ()) != ():
        return f"{type(given).__name__} of shape {given.shape}"
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ----------------------------------------------------------------------------------------- scalars


class Numbers(NamedTuple):
    """The numbers that an argument accepts, and why no others.

    Attributes:
        low: the smallest.
        high: the largest.
        reason: what goes wrong beyond them.
        is_magnitude: the limits apply to the magnitude, and 0 is accepted too.
    """

    low: float
    high: float
    reason: str
    is_magnitude: bool = False

    def hold(self, number: float) -> bool:
        """True if ``number`` is accepted; NaN never is."""
        if self.is_magnitude:
            return number == 0 or self.low <= abs(number) <= self.high
        return self.low <= number <= self.high

    def __str__(self) -> str:
        """In words."""
        kind = "0 or a number of magnitude" if self.is_magnitude else "a number from"
        return f"{kind} {self.low:g} to {self.high:g}"


def flag(name: str, given: Any) -> bool:
    """True or False, from a bool of Python or NumPy or a bool array of rank 0; nothing else."""
    check_static(name, given)
    _check_scalar(name, given, "True or False")
    if not _is_boolean(given):
        raise TypeError(f"attention: {name} should be True or False, but is {shown(given)}.")
    return bool(given)


def integer(name: str, given: Any) -> int:
    """An int: Python's, NumPy's, or an array of rank 0."""
    check_static(name, given)
    _check_scalar(name, given, "an integer")
    try:
        if _is_boolean(given):
            raise TypeError
        return operator.index(given)
    except TypeError:
        raise TypeError(f"attention: {name} should be an integer, but is {shown(given)}.") from None


def number(name: str, given: Any, accepted: Numbers) -> float:
    """A float among the accepted ones, from any real number, also as an array of rank 0."""
    check_static(name, given)
    result = real(name, given, accepted)
    if not accepted.hold(result):
        raise ValueError(
            f"attention: {name} should be {accepted}, but is {shown(given)}. {accepted.reason}"
        )
    return result


def real(name: str, given: Any, wanted: Any = "a number") -> Any:
    """A float, or the traced scalar that was given."""
    _check_scalar(name, given, wanted)
    words = f"attention: {name} should be {wanted}, but is {shown(given)}."
    if isinstance(given, str | bytes):
        raise ValueError(words)
    dtype = getattr(given, "dtype", np.float32)
    if _is_boolean(given) or not _is_real(dtype):
        raise TypeError(words)
    try:
        return given if is_traced(given) else float(given)
    except OverflowError:
        raise ValueError(words) from None
    except (TypeError, ValueError):
        raise TypeError(words) from None


def name_among(name: str, given: Any, known: Sequence[str], otherwise: str = "") -> str:
    """One of the known names; ``otherwise`` says what else the caller may write."""
    check_static(name, given)
    if not isinstance(given, str) or given not in known:
        raise ValueError(
            f"attention: {name}={shown(given)} is unknown; use {otherwise}one of "
            f"{', '.join(map(repr, known))}."
        )
    return given


def check_static(name: str, given: Any) -> None:
    """Refuses traced values."""
    if is_traced(given):
        raise TypeError(
            f"attention: {name} decides what is compiled and should be a Python value, but is "
            f"{shown(given)}. Where a jitted function takes it as an argument, list it in "
            f"static_argnames of jax.jit."
        )


def _check_scalar(name: str, given: Any, wanted: Any) -> None:
    if isinstance(given, list | tuple) or getattr(given, "shape", ()) != ():
        raise ValueError(f"attention: {name} should be {wanted}, but is {shown(given)}.")


def _is_boolean(given: Any) -> bool:
    return isinstance(given, bool) or getattr(given, "dtype", None) == np.dtype(bool)


def _is_real(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer))


# ------------------------------------------------------------------------------------------ arrays


def array(name: str, given: Any) -> Array:
    """A JAX array, from anything that ``jnp.asarray`` takes."""
    if isinstance(given, jax.Array):
        return given
    words = f"attention: {name} should be an array of numbers, but is {shown(given)}."
    try:
        return jnp.asarray(given)
    except (ValueError, OverflowError) as error:
        raise ValueError(words) from error
    except TypeError as error:
        raise TypeError(words) from error


def reals(name: str, given: Any) -> Array:
    """An array of real numbers, or of bools, which count as 0 and 1."""
    result = array(name, given)
    if not (_is_real(result.dtype) or _is_boolean(result)):
        raise ValueError(f"attention: {name} should be real numbers, but is {result.dtype}.")
    return result


def floats(name: str, given: Any) -> Array:
    """An array of floating-point numbers."""
    result = array(name, given)
    if not jnp.issubdtype(result.dtype, jnp.floating):
        raise ValueError(f"attention: {name} should be floating point, but got {result.dtype}.")
    return result


def integers(name: str, given: Any) -> Array:
    """An array of int32, from integers of any type whose values fit."""
    value = _before_conversion(name, given)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise ValueError(f"attention: {name} should be integers, but got {value.dtype}.")
    return _fitting(name, value)


def int32(name: str, given: Any) -> Array:
    """An array of int32; NumPy's and Python's own integers, int64, are taken if they fit."""
    value = _before_conversion(name, given)
    if value.dtype not in (np.int32, np.int64):
        raise ValueError(f"attention: {name} should be int32, but is {value.dtype}.")
    return _fitting(name, value)


def at_hand(given: Any) -> np.ndarray | None:
    """The values, if they can be read without waiting for a device and are not traced; or None."""
    if isinstance(given, jax.Array):
        return np.asarray(given) if _is_on_cpu(given) else None
    try:
        return np.asarray(given)
    except jax.errors.TracerArrayConversionError:
        return None


def check_shape(name: str, value: Array, shape: Sequence[int]) -> None:
    """Refuses any other shape."""
    if tuple(value.shape) != tuple(shape):
        raise ValueError(
            f"attention: {name} should have shape {list(shape)}, but has {list(value.shape)}."
        )


def check_dtype(name: str, value: Array, dtype: Any) -> None:
    """Refuses any other element type."""
    if value.dtype != dtype:
        raise ValueError(f"attention: {name} should be {dtype}, but is {value.dtype}.")


def _is_on_cpu(given: Array) -> bool:
    return (
        not is_traced(given)
        and given.is_fully_addressable
        and all(device.platform == "cpu" for device in given.devices())
    )


def _before_conversion(name: str, given: Any) -> Array | np.ndarray:
    """Integers with all their bits: ``jnp.asarray`` would cut those of NumPy to 32."""
    value = given
    if not isinstance(given, jax.Array):
        try:
            value = np.asarray(given)
        except (TypeError, ValueError):  # among them: a list with traced elements
            return array(name, given)
    return value if jnp.issubdtype(value.dtype, jnp.integer) else array(name, given)


def _fitting(name: str, value: Array | np.ndarray) -> Array:
    """The array as int32; refuses values that do not fit, which would become other numbers."""
    if isinstance(value, jax.Array) and value.dtype == np.int32 and not value.weak_type:
        return value
    info = jnp.iinfo(value.dtype)
    if info.min >= INT32.min and info.max <= INT32.max:
        return jnp.asarray(value, jnp.int32)
    is_readable = not isinstance(value, jax.Array) or (
        not is_traced(value) and value.is_fully_addressable
    )
    if not is_readable:
        raise ValueError(
            f"attention: {name} should be int32, but is {value.dtype}, whose values may not fit "
            f"and are not known before the program runs. Convert it with .astype(jnp.int32)."
        )
    values = np.asarray(value)  # of a type that is rare on a device: worth waiting for
    unfit = values[(values < INT32.min) | (values > INT32.max)]
    if unfit.size:
        raise ValueError(f"attention: {name} should fit int32, but holds {unfit.flat[0]}.")
    return jnp.asarray(value).astype(jnp.int32)
