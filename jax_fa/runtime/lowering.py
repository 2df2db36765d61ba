"""``jax_fa.lowering_for``: the GPUs that programs are lowered for."""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax

from jax_fa.spec.arch import ARCHS, arch_named

# Part of the key of every jit cache: a function lowered for some families is lowered again for
# others.
_active = jax.make_user_context(default_value=())


def lowering_for(*families: str) -> AbstractContextManager[None]:
    """A context in which programs for CUDA are lowered for some GPU families.

    ::

        with jax_fa.lowering_for("sm90"):
            exported = jax.export.export(step, platforms=["cuda"])(params, batch)

    Outside of this context, a program is lowered for the GPUs of this machine; if it has none, for
    all families that this installation holds kernels for, and a call for which one of them has no
    kernel runs unfused on all of them. On a GPU of any other family, a program lowered within the
    context ends with an error that names the kernel. ``explain`` answers for the families given.

    Args:
        *families: names such as "sm90" (``python -m jax_fa`` lists those installed).

    Raises:
        ValueError: no family is named, or one that no kernels exist for.
    """
    known = [arch.name for arch in ARCHS]
    unknown = [name for name in families if name not in known]
    if unknown or not families:
        what = f"families are {families}" if families else "no family is named"
        raise ValueError(f"lowering_for: {what}; kernels exist for {', '.join(known)}.")
    return _active(families)


def capabilities() -> tuple[str, ...]:
    """A compute capability of each family of the innermost ``lowering_for``; empty outside."""
    return tuple(arch_named(name).capabilities[0] for name in _active.value)
