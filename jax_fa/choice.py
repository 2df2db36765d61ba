"""Which implementation serves a problem on a platform; read by lowering and ``explain``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from jax_fa import installation, variants
from jax_fa.band import MAX_LENGTH
from jax_fa.kernels import abi
from jax_fa.problem import KERNEL_DTYPES, Problem
from jax_fa.variants import Arch, Operation

Implementation = Literal["cpu", "cuda", "cudnn", "xla", "emulated"]

IMPLEMENTATIONS: tuple[Implementation, ...] = ("cpu", "cuda", "cudnn", "xla", "emulated")
"""Names accepted by ``implementation=``; None lets the platform choose."""

Completion = Literal["random", "lazy", "eager"]


@dataclass(frozen=True)
class Emulation:
    """``implementation="emulated"`` with its settings (``jax_fa.emulation``).

    Attributes:
        arch: name of the ``variants.Arch`` whose kernels run.
        seed: of the schedule of warps; equal seeds give equal runs.
        completion: when asynchronous copies and matrix products complete.
        num_sms: multiprocessors of the GPU that launches are made for.
        resident: CTAs, or clusters of them, that it holds at a time.
        starved: warp of every CTA that lags behind the others; None for none.
        held: line of the PTX whose asynchronous operations complete last; None for none.
    """

    arch: str
    seed: int = 0
    completion: Completion = "random"
    num_sms: int = 4
    resident: int = 1
    starved: int | None = None
    held: int | None = None


Forced = Implementation | Emulation | None
"""What a call asks for once its settings are read: never the mere name "emulated"."""


def name_of(forced: Forced) -> Implementation | None:
    """What the caller wrote as ``implementation=``."""
    return "emulated" if isinstance(forced, Emulation) else forced


class Target(NamedTuple):
    """What a computation is lowered for.

    Attributes:
        platform: as JAX names it.
        compiled: names of the GPU variants this build holds.
        capabilities: compute capabilities of the GPUs at hand (or emulated), such as "9.0"; empty
            where there is none (lowering for another machine): then every compiled family has to
            serve.
    """

    platform: str
    compiled: frozenset[str] = frozenset()
    capabilities: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """What will run, and why.

    Attributes:
        implementation: "cpu" and "cuda" are compiled kernels, "emulated" are those of "cuda" on
            the emulator, "xla" is plain jnp, which computes one block of query rows after another.
        kernel: names of the compiled kernels, comma-separated; empty for "xla".
        reason: one sentence.
        is_fallback: True if only the lack of a kernel led here.
    """

    implementation: Implementation
    kernel: str
    reason: str
    is_fallback: bool = False


class _Refusal(Exception):
    """No compiled kernel serves the problem; the text says why."""


def _cuda_kernels(problem: Problem, target: Target, operation: Operation) -> str:
    unknown = [c for c in target.capabilities if variants.arch_of(c) is None]
    if unknown:
        known = ", ".join(arch.capability for arch in variants.ARCHS)
        raise _Refusal(
            f"no kernels exist for GPUs of compute capability {unknown[0]}, only for {known}"
        )
    if not target.compiled:
        raise _Refusal(f"this installation holds no GPU kernels. {_remedy(target)}")
    if not problem.semantics.scale > 0:
        # The row maximum is taken of unscaled scores.
        raise _Refusal(f"GPU kernels take a positive scale, not {problem.semantics.scale}")
    if max(problem.q_len, problem.kv_len) > MAX_LENGTH:
        raise _Refusal(
            f"GPU kernels count positions in 32 bits and take up to {MAX_LENGTH} tokens in a row, "
            f"not {problem.q_len} and {problem.kv_len}"
        )
    names = set()
    for arch in _archs(target):
        if arch.name not in map(variants.arch_name, target.compiled):
            raise _Refusal(
                f"this installation holds no GPU kernels of {arch.name}. {_remedy(target)}"
            )
        variant = variants.find(problem, arch, operation, target.compiled)
        if variant is None:
            raise _Refusal(variants.nearest(problem, arch, operation, target.compiled))
        names.add(variant.name)
    return ", ".join(sorted(names))


def _remedy(target: Target) -> str:
    """What gives this installation the kernels of ``target``."""
    families = [arch.name for arch in _archs(target)] or ["all"]
    return f"This command gives it some: `{installation.command(families)}`"


def _archs(target: Target) -> list[Arch]:
    """The GPU families that have to serve a computation for ``target``."""
    at_hand = [variants.arch_of(capability) for capability in target.capabilities]
    compiled = {variants.arch_name(name) for name in target.compiled}
    return [
        arch
        for arch in variants.ARCHS
        if arch in at_hand or (not at_hand and arch.name in compiled)
    ]


def kv_splits(problem: Problem, target: Target) -> int:
    """Parts into which a forward on ``target`` splits the keys: 1 if a kernel for more is missing.

    ``problem`` is that of one device, whereas names of kernels are chosen for all devices together.
    """
    found = [variants.find(problem, arch, "fwd", target.compiled) for arch in _archs(target)]
    can_split = bool(found) and all(variant and variant.key.is_split for variant in found)
    return abi.kv_splits(problem) if can_split else 1


def _kernels(
    problem: Problem, target: Target, implementation: Implementation | None, operation: Operation
) -> str:
    """Names of the kernels that serve ``problem``."""
    if problem.dtype not in KERNEL_DTYPES:
        raise _Refusal(f"kernels take {', '.join(KERNEL_DTYPES)}, not {problem.dtype}")
    if target.platform == "cuda" or implementation == "emulated":
        return _cuda_kernels(problem, target, operation)
    if target.platform == "cpu":
        if problem.semantics.mask_mod is not None:
            raise _Refusal(f"CPU kernels take no mask_mod such as {problem.semantics.mask_mod!r}")
        return f"{operation}_cpu"
    raise _Refusal(f"no kernels exist for platform {target.platform!r}")


def choose(
    problem: Problem,
    target: Target,
    forced: Forced,
    operation: Operation = "fwd",
) -> Choice:
    """The implementation for a problem without dense mask or bias.

    Args:
        problem: what is asked.
        target: what the computation is lowered for.
        forced: what the caller asked for, or None.
        operation: forward or backward; each is chosen for itself.

    Raises:
        NotImplementedError: the forced implementation does not serve the problem.
    """
    implementation = name_of(forced)
    if implementation == "xla":
        return Choice("xla", "", "implementation='xla' was asked for")
    needed = "cpu" if implementation == "emulated" else implementation
    if needed is not None and needed != target.platform:
        raise NotImplementedError(
            f"attention: implementation={implementation!r} was asked for, but the computation is "
            f"lowered for platform {target.platform!r}. Use implementation=None (chooses at "
            f"lowering), or 'xla', which runs everywhere."
        )
    try:
        kernels = _kernels(problem, target, implementation, operation)
    except _Refusal as refusal:
        if implementation is not None:
            raise NotImplementedError(
                f"attention: implementation={implementation!r} does not serve this problem: "
                f"{str(refusal).rstrip('.')}. Use implementation=None or 'xla'."
            ) from None
        return Choice("xla", "", str(refusal), is_fallback=True)
    if isinstance(forced, Emulation):
        return Choice("emulated", kernels, f"this kernel runs in the emulator of {forced.arch}")
    platform: Implementation = "cpu" if target.platform == "cpu" else "cuda"
    return Choice(platform, kernels, f"compiled kernels serve this problem on {platform}")
