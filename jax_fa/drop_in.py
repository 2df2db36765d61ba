"""``jax.nn.dot_product_attention`` served by jax_fa, for code that calls it."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import jax

from jax_fa.api import attention, explain

_ORIGINAL = jax.nn.dot_product_attention

# Part of the key of every jit cache: what was traced with the original is traced again.
_is_active = jax.make_user_context(default_value=False)


class _Replacement(AbstractContextManager[None]):
    """What ``jax.nn.dot_product_attention`` was, to be put back at the end of a ``with`` block."""

    def __init__(self) -> None:
        self._before = jax.nn.dot_product_attention
        self._context = _is_active(True)
        self._context.__enter__()
        jax.nn.dot_product_attention = _replacement

    def __exit__(self, *_: object) -> None:
        jax.nn.dot_product_attention = self._before
        self._context.__exit__(None, None, None)


def replace_jax_nn() -> AbstractContextManager[None]:
    """Makes ``jax.nn.dot_product_attention`` run the kernels of jax_fa.

    ::

        jax_fa.replace_jax_nn()            # from here on

        with jax_fa.replace_jax_nn():      # or within a block
            step(state, batch)

    For models that call jax.nn, such as layers of ``flax.nnx``, and should not be edited.
    A call that kernels serve on the default backend runs them, whatever implementation it names;
    all others (masks, biases, types or head sizes without a kernel, arguments that jax_fa refuses)
    go to jax.nn as they are.

    Jitted functions are traced anew, in the thread that called this. Code that ran ``from jax.nn
    import dot_product_attention`` before keeps the original. Two things differ from jax.nn: a query
    whose keys are all hidden by lengths gives 0, where jax.nn averages all values; and kernels have
    one derivative, in reverse mode.

    Returns:
        A context manager: leaving it puts back what ``jax.nn.dot_product_attention`` was before.
    """
    return _Replacement()


@functools.wraps(_ORIGINAL)
def _replacement(*arguments: Any, **keywords: Any) -> Any:
    ours = {name: x for name, x in keywords.items() if name != "implementation"}
    if _is_served(*arguments, **{k: x for k, x in ours.items() if k != "return_residual"}):
        return attention(*arguments, **ours)
    return _ORIGINAL(*arguments, **keywords)


def _is_served(*arguments: Any, **keywords: Any) -> bool:
    """Whether kernels serve a call, forward and gradient."""
    try:
        explanation = explain(*arguments, **keywords)
    except (TypeError, ValueError, NotImplementedError):
        return False
    return explanation.choice.implementation != "xla"
