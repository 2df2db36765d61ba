"""The one list of what is compiled: the build, the C++ table, tests and error messages read it.

A variant is one operation for one ``KernelKey``. Presence of a feature is compiled in only where
its absence buys measurable time, which leaves three mask classes and the soft cap; lengths,
windows, segments, offsets, alignment, sinks, heads and extents are run-time values. A soft cap
costs a tanh per score, next to which the general mask is cheap, so it exists for that class only.
Split keys are a matter of few tiles, whose pace memory sets: the general mask serves them all. With
a soft cap they are not split.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from jax_fa import mask_mods
from jax_fa.band import UNBOUNDED
from jax_fa.config import BLACKWELL, BLACKWELL_HEADS, KernelKey
from jax_fa.kernels.abi import MASK_CLASSES, MaskClass, kv_splits
from jax_fa.problem import Problem

Operation = Literal["fwd", "bwd"]
OPERATIONS: tuple[Operation, ...] = ("fwd", "bwd")

SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
"""Element types that are compiled, and what variant names call them."""

HOPPER_HEADS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
"""(D, Dv) that are compiled for Hopper."""


@dataclass(frozen=True)
class Arch:
    """A GPU family that has kernels of its own.

    Attributes:
        name: part of variant names: "sm", then the compute capability without its dot.
        target: what the compiler is asked for.
        kernels: directory under ``kernels/``.
        forward_heads: (D, Dv) for which a forward is compiled.
        backward_heads: the same for the backward.
    """

    name: str
    target: str
    kernels: str
    forward_heads: tuple[tuple[int, int], ...]
    backward_heads: tuple[tuple[int, int], ...]

    def head_dims(self, operation: Operation) -> tuple[tuple[int, int], ...]:
        """The (D, Dv) that are compiled for an operation."""
        return self.forward_heads if operation == "fwd" else self.backward_heads

    @property
    def capability(self) -> str:
        """Compute capability of the GPUs that run its code, such as "9.0"."""
        digits = self.name.removeprefix("sm")
        return f"{digits[:-1]}.{digits[-1]}"


def _blackwell(name: str, target: str) -> Arch:
    return Arch(name, target, "sm100", BLACKWELL_HEADS, BLACKWELL_HEADS)


ARCHS = (
    Arch("sm90", "sm_90a", "sm90", HOPPER_HEADS, HOPPER_HEADS),
    *(_blackwell(target[:2] + target[3:-1], target) for target in BLACKWELL),
)


@dataclass(frozen=True)
class Variant:
    """One compiled host entry.

    Attributes:
        operation: what it computes.
        arch: name of the ``Arch`` that it runs on.
        key: everything fixed at compile time by the problem.
    """

    operation: Operation
    arch: str
    key: KernelKey

    @property
    def kernels(self) -> str:
        """Directory under ``kernels/`` that it is made of."""
        return next(arch.kernels for arch in ARCHS if arch.name == self.arch)

    @property
    def name(self) -> str:
        """Unique name, a C identifier, such as ``fwd_sm90_bf16_d192v128_general_cap``."""
        key = self.key
        values = "" if key.value_dim == key.head_dim else f"v{key.value_dim}"
        cap = "_cap" if key.has_soft_cap else ""
        split = "_split" if key.is_split else ""
        mod = "" if key.mask_mod is None else f"_mod_{mask_mods.identifier(key.mask_mod)}"
        return (
            f"{self.operation}_{self.arch}_{SHORT_DTYPES[key.dtype]}_d{key.head_dim}{values}"
            f"_{key.mask}{cap}{split}{mod}"
        )


def _enumerate() -> Iterator[Variant]:
    masks: list[dict[str, Any]] = [{"mask": mask} for mask in MASK_CLASSES]
    masks.append({"mask": "general", "has_soft_cap": True})
    split: dict[str, Any] = {"mask": "general", "is_split": True}
    for arch in ARCHS:
        for operation in OPERATIONS:
            all_fields = [*masks, *([split] if operation == "fwd" else [])]
            for dtype in SHORT_DTYPES:
                for head_dim, value_dim in arch.head_dims(operation):
                    for fields in all_fields:
                        key = KernelKey(arch.target, dtype, head_dim, value_dim, **fields)
                        yield Variant(operation, arch.name, key)


VARIANTS = tuple(_enumerate())
"""Everything that a full build compiles."""

BY_NAME = {variant.name: variant for variant in VARIANTS}


def _takes_mask_mod(kernels: str, operation: Operation) -> bool:
    """Whether the kernels of a directory are written for mask functions."""
    return operation == "fwd" or kernels == "sm100"


def with_mask_mod(chosen: Iterable[Variant], mask_mod: str) -> list[Variant]:
    """The variants that serve a mask function where ``chosen`` serve none."""
    return [
        replace(variant, key=replace(variant.key, mask_mod=mask_mod))
        for variant in chosen
        if _takes_mask_mod(variant.kernels, variant.operation)
        and variant.key.mask == "general"
        and not (variant.key.is_split or variant.key.has_soft_cap)
    ]


def arch_name(name: str) -> str:
    """The family that the variant of this name runs on."""
    return name.split("_")[1]


def arch_of(capability: str) -> Arch | None:
    """The family whose kernels a GPU of compute capability such as "9.0" runs; None if none."""
    return next((arch for arch in ARCHS if arch.capability == capability), None)


def mask_class(problem: Problem) -> MaskClass:
    """The cheapest mask class that serves ``problem`` (its C++ twin: ``MaskClassOf``)."""
    band = problem.semantics.band
    has_extras = (
        problem.has_lengths or problem.has_segments or problem.has_offset or problem.is_packed
    )
    semantics = problem.semantics
    if has_extras or semantics.soft_cap is not None or semantics.mask_mod is not None:
        return "general"
    if band.left_bound != UNBOUNDED:
        return "general"
    if band.right_bound == UNBOUNDED:
        return "full"
    return "causal" if band.right_bound == 0 else "general"


def _is_empty(problem: Problem) -> bool:
    return 0 in (problem.batch, problem.num_sequences, problem.q_len, problem.kv_len)


def find(
    problem: Problem,
    arch: Arch,
    operation: Operation = "fwd",
    compiled: Collection[str] = BY_NAME.keys(),
) -> Variant | None:
    """The fastest variant that serves ``problem``, of those with a name in ``compiled``."""
    if problem.dtype not in SHORT_DTYPES or _is_empty(problem):
        return None
    key = KernelKey(
        arch.target,
        problem.dtype,
        problem.head_dim,
        problem.value_dim,
        mask_class(problem),
        problem.semantics.soft_cap is not None,
        mask_mod=problem.semantics.mask_mod,
    )
    candidates = [Variant(operation, arch.name, key)]
    if operation == "fwd" and kv_splits(problem) > 1:
        split = replace(key, mask="general", is_split=True)
        candidates.insert(0, Variant(operation, arch.name, split))
    is_extra = key.mask_mod is not None
    known = (v for v in candidates if v.name in compiled and (is_extra or v.name in BY_NAME))
    return next(known, None)


def nearest(
    problem: Problem,
    arch: Arch,
    operation: Operation = "fwd",
    compiled: Collection[str] = BY_NAME.keys(),
) -> str:
    """One or two sentences on why ``find`` gave None: what is compiled, and what would work."""
    here = [
        variant
        for variant in VARIANTS
        if variant.name in compiled and (variant.operation, variant.arch) == (operation, arch.name)
    ]
    if not here:
        return (
            f"this build holds no {operation} kernels for {arch.name}. Build with the variants "
            f"'{operation}_{arch.name}_*'."
        )
    if _is_empty(problem):
        return (
            f"kernels for {arch.name} take no empty arrays (TMA has none); the batch is "
            f"{problem.batch}, with {problem.q_len} queries and {problem.kv_len} keys. "
            f"implementation='xla' takes them."
        )
    dtypes = sorted({variant.key.dtype for variant in here})
    if problem.dtype not in dtypes:
        return (
            f"kernels for {arch.name} take {' or '.join(dtypes)}, not {problem.dtype}. "
            f"Cast query, key and value to {dtypes[0]}."
        )
    asked = (problem.head_dim, problem.value_dim)
    dims = sorted({(variant.key.head_dim, variant.key.value_dim) for variant in here})
    if asked not in dims:
        listed = ", ".join(f"{d}/{dv}" for d, dv in dims)
        wider = [(d, dv) for d, dv in dims if d >= asked[0] and dv >= asked[1]]
        advice = (
            f" Pad the heads with zeros to {wider[0][0]}/{wider[0][1]} and keep the scale."
            if wider
            else ""
        )
        return f"kernels for {arch.name} have D/Dv {listed}, not {asked[0]}/{asked[1]}.{advice}"
    cap = " with a soft cap" if problem.semantics.soft_cap is not None else ""
    mask_mod = problem.semantics.mask_mod
    if mask_mod is not None and not _takes_mask_mod(arch.kernels, operation):
        return f"{operation} kernels for {arch.name} take no mask_mod such as {mask_mod!r}."
    if mask_mod is not None:
        return (
            f"no {operation} kernel{cap} for {arch.name} is compiled with mask_mod={mask_mod!r}. "
            f"Those without a soft cap are, by python -m jax_fa.aot --mask-mod {mask_mod}."
        )
    same = [
        variant.name
        for variant in here
        if (variant.key.dtype, variant.key.head_dim, variant.key.value_dim)
        == (problem.dtype, *asked)
    ]
    return (
        f"the {mask_class(problem)} mask{cap} is not compiled for {problem.dtype}, "
        f"D/Dv {asked[0]}/{asked[1]} on {arch.name}. Compiled: {', '.join(same) or 'none'}."
    )
