"""Which implementation serves a problem on a platform; read by lowering and ``explain``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from jax_fa.runtime import installation
from jax_fa.spec import schema, variants
from jax_fa.spec.arch import ARCHS, Arch, Operation, arch_of, known_capabilities
from jax_fa.spec.band import MAX_LENGTH, ceil_div
from jax_fa.spec.key import HEAD_STEP, KernelKey
from jax_fa.spec.names import kind_of, stem
from jax_fa.spec.problem import KERNEL_DTYPES, Problem
from jax_fa.spec.schema import Reader

Implementation = Literal["cpu", "cuda", "cudnn", "xla", "emulated"]

IMPLEMENTATIONS: tuple[Implementation, ...] = ("cpu", "cuda", "cudnn", "xla", "emulated")
"""Names accepted by ``implementation=``; None lets the platform choose."""

Completion = Literal["random", "lazy", "eager"]


@dataclass(frozen=True)
class Emulation:
    """``implementation="emulated"`` with its settings (``jax_fa.emulation``).

    Attributes:
        arch: name of the ``Arch`` whose GPUs are emulated.
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
        capabilities: compute capabilities of the GPUs at hand (or emulated, or of those that
            ``lowering_for`` names), such as "9.0"; empty where there is none (lowering for another
            machine): then every compiled family has to serve.
    """

    platform: str
    compiled: frozenset[str] = frozenset()
    capabilities: tuple[str, ...] = ()


class Kernel(NamedTuple):
    """The compiled kernel that serves a problem, the same on every family.

    Attributes:
        stem: names of its variants without operation and family: the attribute by which C++ finds
            the one for the GPU at hand. "" on the CPU.
        num_splits: parts into which a forward splits the keys.
        heads: (D, Dv) that it is compiled for, no smaller than those of the problem; None takes
            any.
        gives_dbias: a backward's results have the gradient of the bias among them.
    """

    stem: str = ""
    num_splits: int = 1
    heads: tuple[int, int] | None = None
    gives_dbias: bool = False

    def array_heads(self, own: tuple[int, int]) -> tuple[int, int]:
        """(D, Dv) that arrays have to have in place of ``own``: ``head_sizes`` adds zeros."""
        if self.heads is None:
            return own
        head_dim, value_dim = (ceil_div(x, HEAD_STEP) * HEAD_STEP for x in own)
        return head_dim, value_dim


@dataclass(frozen=True)
class Choice:
    """What will run, and why.

    Attributes:
        implementation: "cpu" and "cuda" are compiled kernels, "emulated" are those of "cuda" on
            the emulator, "xla" is plain jnp, which computes one block of query rows after another.
        kernel: names of the compiled kernels, comma-separated; empty for "xla".
        reason: one sentence.
        is_fallback: True if only the lack of a kernel led here.
        chosen: which kernel ``implementation`` calls, where it has several.
    """

    implementation: Implementation
    kernel: str
    reason: str
    is_fallback: bool = False
    chosen: Kernel = Kernel()


class _Refusal(Exception):
    """No compiled kernel serves the problem; the text says why."""


def _gpu_kernel(problem: Problem, target: Target, operation: Operation) -> tuple[str, Kernel]:
    """Names of the variants that serve ``problem`` on a GPU, and what they have in common."""
    unknown = [c for c in target.capabilities if arch_of(c) is None]
    if unknown:
        raise _Refusal(
            f"no kernels exist for GPUs of compute capability {unknown[0]}, only for "
            f"{known_capabilities()}"
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
    archs = _archs(target)
    held = variants.families(target.compiled)
    for arch in archs:
        if arch not in held:
            raise _Refusal(
                f"this installation holds no GPU kernels of {arch.name}. {_remedy(target)}"
            )
    launched = problem
    if problem.is_packed and problem.num_sequences > 0:  # sequences.with_slot_in_front
        launched = replace(problem, num_sequences=problem.num_sequences + 1)
    if keys := variants.serving(problem, operation):
        for arch in archs:  # the last is of no special case, such as few queries
            _check_read(problem, _reader(arch, operation, keys[-1]), arch.name)
    kernel = gpu_kernel(launched, target, operation)
    names = {arch: variants.run_as(operation, arch, kernel.stem) for arch in archs}
    for arch, name in names.items():
        if name not in target.compiled:
            why = variants.nearest(problem, arch, operation, target.compiled)
            raise _Refusal(why + _alone(launched, target, operation))
    return ", ".join(sorted({*names.values()})), kernel


def _reader(arch: Arch, operation: Operation, key: KernelKey) -> Reader:
    """The code of the kernel that GPUs of a family run for ``key``."""
    return arch.kernels(kind_of(operation, stem(key))).folder, operation


def _check_read(problem: Problem, reader: Reader, whose: str) -> None:
    """Refuses a problem that has what a kernel does not read."""
    if unread := schema.unread(problem, reader):
        raise _Refusal(f"{reader[1]} kernels for {whose} do not take {', '.join(unread)}")


def _alone(problem: Problem, target: Target, operation: Operation) -> str:
    """What a refusal goes on to say where one of several families lacks a kernel."""
    archs = _archs(target)
    able = [a.name for a in archs if variants.find(problem, a, operation, target.compiled)]
    if target.capabilities or not able:
        return ""
    named = ", ".join(f'"{name}"' for name in able)
    return (
        " Lowered where there is no GPU, a program is for all families of this installation; "
        f"`with jax_fa.lowering_for({named})` lowers it for those that have a kernel."
    )


def gpu_kernel(problem: Problem, target: Target, operation: Operation) -> Kernel:
    """The fastest kernel that every family of ``target`` has for ``problem``.

    If every kernel is missing on some family, one that C++ then refuses by name; an empty
    ``Kernel`` if none is written for the problem.

    Args:
        problem: what one device launches: of packed operands, with a slot in front.
        target: what is compiled for which GPUs.
        operation: what is computed.
    """
    archs = _archs(target)
    keys = [
        key
        for key in variants.serving(problem, operation)
        if not any(schema.unread(problem, _reader(arch, operation, key)) for arch in archs)
    ]
    kernels = [
        Kernel(
            stem(key),
            variants.num_parts(problem, key),
            (key.head_dim, key.value_dim),
            _give_dbias(problem, {_reader(arch, operation, key) for arch in archs}),
        )
        for key in keys
    ]
    for kernel in kernels:
        if {variants.run_as(operation, arch, kernel.stem) for arch in archs} <= target.compiled:
            return kernel
    plain = (k for key, k in zip(keys, kernels, strict=True) if not (key.is_split or key.is_small))
    return next(plain, Kernel())


def _give_dbias(problem: Problem, kernels: set[Reader]) -> bool:
    """Whether there are kernels that may run, and all of them give the gradient of a bias."""
    return problem.is_bias_whole and set() != kernels <= {*schema.WRITERS_OF_DBIAS}


def _remedy(target: Target) -> str:
    """What gives this installation the kernels of ``target``."""
    families = [arch.name for arch in _archs(target)] or ["all"]
    return f"This command gives it some{installation.where()}: `{installation.command(families)}`"


def _archs(target: Target) -> list[Arch]:
    """The GPU families that have to serve a computation for ``target``."""
    if not target.capabilities:
        return variants.families(target.compiled)
    at_hand = [arch_of(capability) for capability in target.capabilities]
    return [arch for arch in ARCHS if arch in at_hand]


def _kernels(
    problem: Problem, target: Target, implementation: Implementation | None, operation: Operation
) -> tuple[str, Kernel]:
    """Names of the kernels that serve ``problem``, and which it is."""
    if problem.dtype not in KERNEL_DTYPES:
        raise _Refusal(f"kernels take {', '.join(KERNEL_DTYPES)}, not {problem.dtype}")
    if target.platform == "cuda" or implementation == "emulated":
        return _gpu_kernel(problem, target, operation)
    if target.platform == "cpu":
        _check_read(problem, ("cpu", operation), "the CPU")
        return f"{operation}_cpu", Kernel()
    raise _Refusal(f"no kernels exist for platform {target.platform!r}")


def choose(
    problem: Problem,
    target: Target,
    forced: Forced,
    operation: Operation = "fwd",
) -> Choice:
    """The implementation for a problem.

    Args:
        problem: what is asked.
        target: what the computation is lowered for.
        forced: what the caller asked for, or None.
        operation: what is computed; each is chosen for itself.

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
        names, chosen = _kernels(problem, target, implementation, operation)
    except _Refusal as refusal:
        if implementation is not None:
            raise NotImplementedError(
                f"attention: implementation={implementation!r} does not serve this problem: "
                f"{str(refusal).rstrip('.')}. Use implementation=None or 'xla'."
            ) from None
        return Choice("xla", "", str(refusal), is_fallback=True)
    if isinstance(forced, Emulation):
        reason = f"this kernel runs in the emulator of {forced.arch}"
        return Choice("emulated", names, reason + _padding(problem, chosen), chosen=chosen)
    platform: Implementation = "cpu" if target.platform == "cpu" else "cuda"
    reason = f"compiled kernels serve this problem on {platform}"
    return Choice(platform, names, reason + _padding(problem, chosen), chosen=chosen)


def _padding(problem: Problem, kernel: Kernel) -> str:
    """What a reason goes on to say of heads that are smaller than those of the kernel."""
    asked = (problem.head_dim, problem.value_dim)
    if kernel.heads in (None, asked):
        return ""
    own, theirs = ("/".join(map(str, heads)) for heads in (asked, kernel.heads))
    padded = "" if kernel.array_heads(asked) == asked else ", padded with zeros"
    return f"; head sizes {own} run in the kernel for {theirs}{padded}"
