"""``jax_fa.emulation``: the settings of ``implementation="emulated"``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import get_args

import jax

from jax_fa.runtime import bindings, installation
from jax_fa.runtime.dispatch import Completion, Emulation
from jax_fa.spec import variants
from jax_fa.spec.arch import ARCHS

# Part of the key of every jit cache: a function traced under one emulation is traced again under
# another.
_active = jax.make_user_context(default_value=None)

_MOST_WARPS = 32
"""Of a CTA, which has 1024 threads at most."""


def emulation(
    arch: str | None = None,
    *,
    seed: int = 0,
    completion: Completion = "random",
    num_sms: int = 4,
    resident: int = 1,
    starved: int | None = None,
    held: int | None = None,
) -> AbstractContextManager[None]:
    """A context with settings for ``implementation="emulated"``.

    ::

        with jax_fa.emulation("sm100", seed=3):
            out = jax_fa.attention(q, k, v, implementation="emulated")

    The GPU kernels of this build run thread for thread, and races, deadlocks and reads of memory
    that nothing wrote are errors (``jax_fa/emulator/README.md``). Computations that are traced
    within the context keep its settings; in another one, jitted functions are traced again.

    Args:
        arch: GPU family, such as "sm90"; None takes the one that this build holds kernels for.
        seed: determines the order in which warps run; equal seeds give equal runs.
        completion: when asynchronous operations complete: "random", "lazy" (as late as they may)
            or "eager" (at once).
        num_sms: multiprocessors of the GPU; persistent kernels launch that many CTAs, so with few
            of them each CTA works on several tiles.
        resident: CTAs (or clusters, if a kernel launches clusters) that the GPU holds at a time;
            the next one starts when one of them exits.
        starved: a warp, by its index in the CTA, that runs only when no other can. A run with each
            of them starved, and with "eager", finds code that relies on warps keeping pace.
        held: a line of the kernels' PTX whose asynchronous operations complete after all others.
            Faults name such lines, reports count them (``Report.issued``).

    Raises:
        ValueError: an argument is not one of the values above.
        NotImplementedError: ``arch`` is None, and this build does not hold the kernels of exactly
            one family.
    """
    arch = _only_compiled() if arch is None else arch
    return _active(_checked(Emulation(arch, seed, completion, num_sms, resident, starved, held)))


def resolve() -> Emulation:
    """The settings of "emulated" here: those of the innermost ``emulation``, or the defaults."""
    return _active.value or Emulation(_only_compiled())


def _checked(wanted: Emulation) -> Emulation:
    """Refuses invalid settings, and returns valid ones."""
    names = [known.name for known in ARCHS]
    if wanted.arch not in names:
        raise ValueError(
            f"emulation: arch is {wanted.arch!r}; kernels exist for {', '.join(names)}."
        )
    if wanted.completion not in get_args(Completion):
        raise ValueError(
            f"emulation: completion is {wanted.completion!r}; use one of {get_args(Completion)}."
        )
    if wanted.num_sms < 1:
        raise ValueError(f"emulation: num_sms is {wanted.num_sms}; a GPU has at least one.")
    if wanted.resident < 1:
        raise ValueError(f"emulation: resident is {wanted.resident}; a GPU holds at least one CTA.")
    if wanted.starved is not None and wanted.starved not in range(_MOST_WARPS):
        raise ValueError(
            f"emulation: starved is {wanted.starved}; a CTA has warps 0 to {_MOST_WARPS - 1} at "
            f"most."
        )
    if wanted.held is not None and wanted.held < 1:
        raise ValueError(f"emulation: held is {wanted.held}; lines of PTX are counted from 1.")
    return wanted


def _only_compiled() -> str:
    compiled = sorted(arch.name for arch in variants.families(bindings.compiled()))
    if len(compiled) == 1:
        return compiled[0]
    if not compiled:
        raise NotImplementedError(
            "attention: implementation='emulated' runs compiled GPU kernels, and this build holds "
            "none. Use implementation=None or 'xla', or install kernels of a family that kernels "
            f"exist for{installation.where()}: `{installation.command([ARCHS[0].name])}`"
        )
    raise NotImplementedError(
        f"attention: implementation='emulated' needs to know which GPU: this build holds kernels "
        f"of {', '.join(compiled)}. Choose one with jax_fa.emulation({compiled[0]!r})."
    )
