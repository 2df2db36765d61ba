"""Calls outside of jitted programs: compiled once, and from then on found in JAX's caches.

Run operation by operation, such a call costs a multiple of what its kernel takes: JAX starts the
operations one by one, and traces the rules of the derivative in each call. As one jitted function
it starts one program, and its gradient another. The cache key of that program is everything that
determines it: shapes and types of arrays, the other arguments with their types, and contexts
(including this package's own, which are part of the key of every jit). The values in arrays are
checked in each call, before the program starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.extend.core import take_current_trace

from jax_fa.runtime import arguments, checks
from jax_fa.runtime.arguments import Call, Given

Reader = Callable[[Given, Any], Call]
"""``arguments.dense`` or ``arguments.named``."""

Body = Callable[..., Any]
"""Computes something of a checked call. A function of a module, as it is part of the key."""

_Setting = tuple[str, type, Any]
"""An argument that decides what is compiled. Its type tells True from 1, which are equal."""


def run(body: Body, read: Reader, qkv: Given, options: Mapping[str, Any], *more: bool) -> Any:
    """``body(read(qkv, options), *more)``; inside a jitted function it becomes a part of that.

    Args:
        body: what to compute of the call.
        read: what checks the arguments, and makes a call of them.
        qkv: query, key and value as the caller wrote them.
        options: all other arguments.
        more: further arguments of the body.
    """
    if not _is_outside():
        return body(read(qkv, options), *more)
    known: Mapping[str, Any] = options
    call, words = None, None
    if options.get("mask_mod") is not None:
        # Evaluated in each call: a function may be made for one, and what it reads may change.
        call = read(qkv, options)
        known, words = {**options, "mask_mod": None, "block_mask": None}, call.words
    try:
        given = _given(qkv, known)
    except (TypeError, ValueError):
        given = None  # `read` refuses it too, and says of several faults the first
    if given is None or (call is not None and words is None):
        return body(read(qkv, options) if call is None else call, *more)
    return _compiled(body, read, more, given.settings, given.arrays, words)


def _traced(
    body: Body,
    read: Reader,
    more: tuple[bool, ...],
    settings: tuple[_Setting, ...],
    arrays: Mapping[str, Array],
    words: Array | None,
) -> Any:
    options = {name: value for name, _, value in settings} | {**arrays}
    qkv = (options.pop("query"), options.pop("key"), options.pop("value"))
    call = read(qkv, options)
    return body(call if words is None else call._replace(words=words), *more)


_traced.__name__ = "jax_fa"  # that of the program, in profiles and dumps
_compiled = jax.jit(_traced, static_argnums=(0, 1, 2, 3))


class _Given(NamedTuple):
    settings: tuple[_Setting, ...]
    arrays: dict[str, Array]


def _given(qkv: Given, options: Mapping[str, Any]) -> _Given | None:
    """The arguments with their values checked; None if one that has to be a constant is not."""
    settings, arrays = [], {}
    every = {"query": qkv[0], "key": qkv[1], "value": qkv[2], **options}
    for name, x in every.items():
        if name in arguments.ARRAYS and (x is not None or name in ("query", "key", "value")):
            arrays[name] = arguments.ARRAYS[name](name, x)
        elif name not in arguments.ONLY_CHECKED:
            constant = _constant(x)
            if constant is _NO_CONSTANT:
                return None
            settings.append((name, type(constant), constant))
    arguments.check_values(every, arrays)
    return _Given(tuple(settings), arrays)


_NO_CONSTANT = object()


def _constant(x: Any) -> Any:
    """A value that has a hash: of Python or NumPy, or out of an array of rank 0."""
    if x is None or type(x) in (bool, int, float, str):
        return x
    if type(x) is tuple:
        return x if all(type(side) in (int, NoneType) for side in x) else _NO_CONSTANT
    is_number = isinstance(x, np.generic | np.ndarray | Array) and x.dtype.kind in "biuf"
    if not is_number or x.shape != () or checks.is_traced(x):
        return _NO_CONSTANT
    return np.asarray(x)[()]


_AROUND = ("LinearizeTrace", "BatchTrace")
"""Traces of ``grad`` and ``vmap`` around a call: JAX caches the gradient of a jitted function, and
its vmapped form, too. ``jvp`` is not among them: our own rules have to see it to say what to do."""


def _is_outside() -> bool:
    """Whether operations run as they are called, perhaps differentiated or vmapped.

    HAZARD: not all of these classes have public names. What JAX renames, or adds, counts as a
    jitted program: slower, and as right (``tests/test_eager.py`` sees it).
    """
    with take_current_trace() as found:
        trace: Any = found
    while type(trace).__name__ in _AROUND:
        trace = trace.parent_trace
    return type(trace).__name__ == "EvalTrace"
