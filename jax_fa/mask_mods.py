"""Custom masks: which keys a query sees, as a plain function that every platform evaluates.

    def strided(batch, q_head, q_position, kv_position):
        return (kv_position <= q_position) & ((q_position - kv_position) % 4 == 0)

    attention(query, key, value, mask_mod="my_package.masks:strided")

The name is code: jax_fa imports the module and calls the function, here and wherever a program is
traced or built with that name. Take names only from where you would take code.

The same function runs on Python integers in a test, on arrays in the reference, and on the values
of a kernel that ``python -m jax_fa.aot --mask-mod my_package.masks:strided`` compiles. So it is
made of arithmetic and comparisons, joined by ``&`` and ``|``: no ``if``, no ``and``. What it hides
is hidden in addition to the band, segments and lengths.

``q_position`` is the diagonal of a query row, its position among the keys (``jax_fa/band.py``:
query_offset and alignment are in it); ``kv_position`` counts from the sequence's first key.
``batch`` is the sequence's number. Kernels see one shard of a batch and of the heads, so they serve
functions of positions only; with others attention runs unfused.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from typing import Any

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""(batch, q_head, q_position, kv_position) -> whether the query sees the key."""


def chunked(size: int) -> MaskFunction:
    """Causal within chunks of ``size`` positions, blind beyond (as in Llama 4)."""

    def visible(batch: Any, q_head: Any, q_position: Any, kv_position: Any) -> Any:
        return (q_position // size == kv_position // size) & (kv_position <= q_position)

    return visible


def prefix_lm(length: int) -> MaskFunction:
    """Causal, but for the first ``length`` keys, which everyone sees."""

    def visible(batch: Any, q_head: Any, q_position: Any, kv_position: Any) -> Any:
        return (kv_position < length) | (kv_position <= q_position)

    return visible


BUILT_IN = {"chunked": chunked, "prefix_lm": prefix_lm}
"""By name; ``NAME_N`` is the function for the number N."""

_BUILT_IN_NAME = re.compile(rf"({'|'.join(BUILT_IN)})_([1-9][0-9]{{0,8}})")
_OWN_NAME = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*)")


@functools.cache
def resolve(name: str) -> MaskFunction:
    """The function called ``NAME_N`` (built in) or ``module:function``.

    The latter imports the module and calls the function: it executes code that the name chooses. So
    a name must not come from where code would not be taken from.

    Raises:
        ValueError: there is none.
    """
    if built_in := _BUILT_IN_NAME.fullmatch(name):
        return BUILT_IN[built_in[1]](int(built_in[2]))
    own = _OWN_NAME.fullmatch(name)
    if own is None:
        known = ", ".join(f"'{known}_N'" for known in BUILT_IN)
        raise ValueError(
            f"attention: mask_mod={name!r} is unknown; use {known} with a number N > 0 of at most "
            f"9 digits, or 'module:function'."
        )
    try:
        function = getattr(importlib.import_module(own[1]), own[2])
    except Exception as error:  # whatever the module raises as it runs
        raise ValueError(f"attention: mask_mod={name!r} cannot be imported: {error}.") from error
    if not callable(function):
        raise ValueError(
            f"attention: mask_mod={name!r} is no function but a {type(function).__name__}."
        )
    _try(name, function)
    return function


def _try(name: str, function: MaskFunction) -> None:
    """Refuses a function that does not serve the first query and key."""
    call = f"attention: mask_mod={name!r}, called with (batch, q_head, q_position, kv_position) = "
    try:
        visible = function(0, 0, 0, 0)
    except Exception as error:  # whatever the function raises
        raise ValueError(f"{call}(0, 0, 0, 0), fails: {error}.") from error
    if not isinstance(visible, int) and not hasattr(visible, "dtype"):
        raise ValueError(
            f"{call}(0, 0, 0, 0), gives {visible!r}; it should say whether the query sees the key."
        )


def identifier(name: str) -> str:
    """The name as a part of C identifiers."""
    return re.sub(r"\W", "_", name)


class _Probe:
    """Stands for a number and remembers whether anybody computed with it."""

    def __init__(self) -> None:
        self.is_used = False


def _use(probe: _Probe, *_: Any) -> _Probe:
    probe.is_used = True
    return probe


for _operator in (
    "add sub mul floordiv truediv mod pow and or xor lshift rshift radd rsub rmul rfloordiv "
    "rtruediv rmod rpow rand ror rxor rlshift rrshift lt le gt ge eq ne neg pos abs invert"
).split():
    setattr(_Probe, f"__{_operator}__", _use)


def sees_positions_only(function: MaskFunction) -> bool:
    """Whether the result depends on neither batch nor head."""
    probe = _Probe()
    function(probe, probe, 0, 0)
    return not probe.is_used
