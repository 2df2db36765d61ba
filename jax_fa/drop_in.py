"""``jax.nn.dot_product_attention`` served by jax_fa, for code that calls it."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import jax

from jax_fa.api import attention_on_kernels

_ORIGINAL = jax.nn.dot_product_attention

# Part of the key of every jit cache: what was traced with the original is traced again.
_is_active = jax.make_user_context(default_value=False)


class _Replacement(AbstractContextManager[None]):
    """Restores the replaced ``jax.nn.dot_product_attention`` at the end of a ``with`` block."""

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

    For models that call jax.nn, such as layers of ``flax.nnx``, and that you do not want to edit.
    A call that kernels of the default backend serve runs on them, whatever implementation it names;
    every other call (types or head sizes without a kernel, arguments that jax_fa refuses) goes to
    jax.nn unchanged.

    Jitted functions are traced again, in the thread that called this. Code that ran ``from jax.nn
    import dot_product_attention`` before keeps the original. Two things differ from jax.nn: a query
    whose keys are all hidden, by lengths or a mask, gives 0, where jax.nn averages all values (or,
    by a bias of -inf, gives NaN); and kernels have one derivative, in reverse mode.

    Returns:
        A context manager that restores the previous ``jax.nn.dot_product_attention`` on exit.
    """
    return _Replacement()


@functools.wraps(_ORIGINAL)
def _replacement(*arguments: Any, **keywords: Any) -> Any:
    ours = {name: x for name, x in keywords.items() if name != "implementation"}
    try:
        run = attention_on_kernels(*arguments, **ours)
    except (TypeError, ValueError, NotImplementedError):
        run = None
    return _ORIGINAL(*arguments, **keywords) if run is None else run()
