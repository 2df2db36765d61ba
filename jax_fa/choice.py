"""Which implementation serves a problem on a platform; read by lowering and ``explain``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jax_fa.problem import KERNEL_DTYPES, Problem

Implementation = Literal["cpu", "cuda", "cudnn", "xla"]

IMPLEMENTATIONS: tuple[Implementation, ...] = ("cpu", "cuda", "cudnn", "xla")
"""Names accepted by ``implementation=``; None lets the platform choose."""


@dataclass(frozen=True)
class Choice:
    """What will run, and why.

    Attributes:
        implementation: "cpu" and "cuda" are compiled kernels, "xla" is the jnp reference, which
            builds the T x S score matrix.
        kernel: name of the compiled kernel; empty for "xla".
        reason: one sentence.
        is_fallback: True if a faster implementation exists but does not serve this problem.
    """

    implementation: Implementation
    kernel: str
    reason: str
    is_fallback: bool = False


def kernel_refusal(problem: Problem, platform: str) -> str | None:
    """Why no compiled kernel serves ``problem`` on ``platform``; None if one does."""
    if platform not in ("cpu", "cuda"):
        return f"no kernels are compiled for platform {platform!r}; they exist for 'cpu'"
    if platform == "cuda":
        return "this build holds no GPU kernels"
    if problem.dtype not in KERNEL_DTYPES:
        return f"kernels take {', '.join(KERNEL_DTYPES)}, not {problem.dtype}"
    return None


def choose(problem: Problem, platform: str, implementation: Implementation | None) -> Choice:
    """The implementation for a problem without dense mask or bias.

    Args:
        problem: what is asked.
        platform: the platform the computation is lowered for, as JAX names it.
        implementation: what the caller forced, or None.

    Raises:
        NotImplementedError: the forced implementation does not serve the problem.
    """
    if implementation == "xla":
        return Choice("xla", "", "implementation='xla' was asked for")
    if implementation is not None and implementation != platform:
        raise NotImplementedError(
            f"attention: implementation={implementation!r} was asked for, but the computation is "
            f"lowered for platform {platform!r}. Use implementation=None (chooses at lowering), "
            f"or 'xla', which runs everywhere."
        )
    refusal = kernel_refusal(problem, platform)
    if refusal is None:
        return Choice(
            "cpu", "jax_fa_fwd_v1", "the CPU kernels serve every problem without mask or bias"
        )
    if implementation is not None:
        raise NotImplementedError(
            f"attention: implementation={implementation!r} does not serve this problem: {refusal}. "
            f"Use implementation=None or 'xla'."
        )
    return Choice("xla", "", refusal, is_fallback=True)
