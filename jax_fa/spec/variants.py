"""The one list of what is compiled: the build, the C++ table, tests and error messages read it.

A variant is one operation for one ``KernelKey``. Whether a feature is present is a compile-time
choice only where leaving it out saves measurable time: this holds for three mask classes and the
soft cap; lengths, windows, segments, offsets, alignment, sinks, heads and extents are run-time
values. A soft cap costs a tanh per score, compared to which the general mask is cheap, so it exists
for that class only. So does a bias, whose kernels take the soft cap as a run-time value. Keys are
split only where tiles are few; such kernels are memory-bound, so the general mask serves them all.
With a soft cap or a bias, keys are not split. Where tiles have many rows, there are kernels with
small tiles for short sequences and narrow windows (``small_tiles_pay``).

A kernel also serves smaller heads than it is compiled for: its loads fill the missing columns with
zeros, which change no product, and its stores end where the arrays do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from jax_fa.spec.arch import ARCHS, KINDS, OPERATIONS, Arch, Kernels, Kind, Operation, arch_named
from jax_fa.spec.band import UNBOUNDED, ceil_div, kv_blocks
from jax_fa.spec.config_mma_sync import WARP_ROWS
from jax_fa.spec.division import RESIDENT_CTAS, packing, packing_pays
from jax_fa.spec.key import MASK_CLASSES, KernelKey, MaskClass
from jax_fa.spec.names import SHORT_DTYPES, heads_of, kind_of, short_heads, stem
from jax_fa.spec.problem import Problem


@dataclass(frozen=True)
class Variant:
    """One compiled host entry.

    Attributes:
        operation: what it computes.
        arch: name of the ``Arch`` that it is compiled for.
        key: everything fixed at compile time by the problem.
    """

    operation: Operation
    arch: str
    key: KernelKey

    @property
    def kind(self) -> Kind:
        """The kind of kernels that it is compiled together with."""
        return kind_of(self.operation, stem(self.key))

    @property
    def heads(self) -> tuple[int, int]:
        """(D, Dv) that it is compiled for."""
        return self.key.head_dim, self.key.value_dim

    @property
    def kernels(self) -> str:
        """The directory under ``kernels/`` with its code."""
        return arch_named(self.arch).kernels(self.kind).folder

    @property
    def module(self) -> str:
        """Its module in ``kernels/``, which makes its host entry."""
        name: str = self.operation
        if self.key.is_split:
            name = "few" if self.key.is_few else "fwd_split"
        elif self.key.has_bias and name == "fwd":
            name = "fwd_bias"
        elif self.key.mask == "general" and name == "fwd" and self.kernels == "sm90":
            name = "fwd_sorted"
        return f"{self.kernels}.{name}"

    @property
    def name(self) -> str:
        """Unique name, a C identifier, such as ``fwd_sm90_bf16_d192v128_general_cap``."""
        return full_name(self.operation, self.arch, stem(self.key))


def full_name(operation: Operation, arch: str, stem: str) -> str:
    """Name of a variant; C++ (``ffi/kernel_table.cc``) composes it the same way."""
    return f"{_prefix(operation, arch)}{stem}"


def run_as(operation: Operation, arch: Arch, stem: str) -> str:
    """Name of the variant for ``stem`` that GPUs of ``arch`` run, its own or another family's."""
    return full_name(operation, arch.owner(kind_of(operation, stem), heads_of(stem)).name, stem)


def _prefix(operation: Operation, arch: str) -> str:
    return f"{operation}_{arch}_"


HEADS = tuple(
    dict.fromkeys(heads for arch in ARCHS for kind in KINDS for heads in arch.kernels(kind).heads)
)
"""(D, Dv) of all kernels."""


def _enumerate() -> Iterator[Variant]:
    masks: list[dict[str, Any]] = [{"mask": mask} for mask in MASK_CLASSES]
    masks.append({"mask": "general", "has_soft_cap": True})
    split: dict[str, Any] = {"mask": "general", "is_split": True}
    few: dict[str, Any] = {**split, "is_few": True}
    small: list[dict[str, Any]] = [{"mask": mask, "is_small": True} for mask in MASK_CLASSES]
    bias: dict[str, Any] = {"mask": "general", "has_bias": True}
    products: list[dict[str, Any]] = [
        {"mask": mask, "has_bias": True, "multiplies_bias": True} for mask in ("full", "causal")
    ]
    forwards = [*masks, *small, split, few, bias, *products]
    of_operation = {
        "fwd": forwards,
        "bwd": [*masks, bias, *products],
        "dbias": [bias, {**bias, "multiplies_bias": True}],
    }
    for arch, operation, dtype, heads in product(ARCHS, OPERATIONS, SHORT_DTYPES, HEADS):
        for fields in of_operation[operation]:
            variant = Variant(operation, arch.name, KernelKey(arch.target, dtype, *heads, **fields))
            own = arch.own(variant.kind)
            if own and heads in _heads_of(own, variant.key):
                yield variant


def _heads_of(kernels: Kernels, key: KernelKey) -> tuple[tuple[int, int], ...]:
    """(D, Dv) for which there are kernels like that for ``key``."""
    if key.multiplies_bias:
        return kernels.multiplied
    return kernels.small if key.is_small else kernels.heads


VARIANTS = tuple(_enumerate())
"""Everything that a full build compiles."""

BY_NAME = {variant.name: variant for variant in VARIANTS}


def of_families(names: Collection[str]) -> list[Variant]:
    """The variants that GPUs of these families run, whichever family they are compiled for."""
    archs = [arch_named(name) for name in names]
    return [variant for variant in VARIANTS if any(_runs(arch, variant) for arch in archs)]


def _runs(arch: Arch, variant: Variant) -> bool:
    return arch.owner(variant.kind, variant.heads).name == variant.arch


def capabilities(variant: Variant) -> list[str]:
    """The compute capabilities of the GPUs that run a variant."""
    return [c for arch in ARCHS if _runs(arch, variant) for c in arch.capabilities]


def run_by(arch: Arch, compiled: Collection[str]) -> frozenset[str]:
    """Those of the names in ``compiled`` whose variants GPUs of a family run."""
    return _names(arch.name) & frozenset(compiled)


@cache
def _names(family: str) -> frozenset[str]:
    return frozenset(variant.name for variant in of_families([family]))


def families(compiled: Collection[str]) -> list[Arch]:
    """The families that a build with the kernels named in ``compiled`` is for.

    A build is not for a family if another one runs all that this one runs of it, and more.
    """
    held = {arch: run_by(arch, compiled) for arch in ARCHS}
    return [
        arch
        for arch, names in held.items()
        if names and not any(names < others for others in held.values())
    ]


def mask_class(problem: Problem) -> MaskClass:
    """The cheapest mask class that serves ``problem``, unless its bias is multiplied."""
    if problem.semantics.soft_cap is not None or problem.has_bias:
        return "general"
    return _class_of_mask(problem)


def _class_of_mask(problem: Problem) -> MaskClass:
    """The cheapest mask class that hides what the band and operands of ``problem`` hide."""
    band = problem.semantics.band
    if problem.has_hiding_operands:
        return "general"
    if band.left_bound != UNBOUNDED:
        return "general"
    if band.right_bound == UNBOUNDED:
        return "full"
    return "causal" if band.right_bound == 0 else "general"


SPLIT_ROWS = 128
"""Query rows per tile in ``kv_splits``: the smallest ``block_q`` of any forward kernel that splits,
so that keys are never split where a kernel of larger tiles would be faster without."""

SPLIT_BLOCK = 128
"""Keys that ``kv_splits`` counts as a block, whatever the ``block_kv`` of the kernel."""

SPLIT_KEYS = 512
"""The fewest keys of a part. Merging takes one more launch and one more pass over the parts, about
as long as a multiprocessor takes for 3 or 4 blocks of 128 keys: splitting must save more."""


PART_BLOCKS, MERGED_BLOCKS, LAUNCH_BLOCKS = 2, 18, 4
"""The costs of starting a part, of writing and merging 128 of its rows in float32, and of starting
the merging kernel, in units of the time that a multiprocessor takes for a block of keys. Fitted to
17 shapes on an H200: sharing tiles made 13 faster, up to 6 times, and 3 slower, which these refuse
(64 x 1 query, 5038 keys, 64:8 heads, D = 64: 1839 us apart, 301 shared; 64 x 64, 2048 keys, 64:8,
D = 128: 898 and 974)."""


def kv_splits(problem: Problem) -> int:
    """Parts into which the keys of a query tile are to be split, each a CTA of its own.

    More than 1 for short queries over long keys, as in decoding, for one of two reasons. Either at
    least half of ``RESIDENT_CTAS`` would lie idle, and there are keys for two parts; or query heads
    that share keys fit one tile, which splitting allows, and that saves a third of the time or
    more. Packed sequences count with their mean length.
    """
    p = problem
    sharing = packing(SPLIT_ROWS, max(p.group, 1))
    plain = _q_tiles(p, SPLIT_ROWS, p.group)
    packed = _q_tiles(p, sharing.positions, sharing.units)
    q_tiles = packed if packing_pays(packed, plain) else plain
    kv_len = p.kv_len * p.batch // max(p.num_sequences, 1)
    wanted = RESIDENT_CTAS // max(q_tiles, 1)
    parts = max(min(wanted, kv_len // SPLIT_KEYS), 1)
    band = p.semantics.band
    blocks = ceil_div(min(kv_len, band.left_bound + band.right_bound + p.q_len), SPLIT_BLOCK)
    merged = p.batch * p.q_len * p.num_q_heads * MERGED_BLOCKS // SPLIT_ROWS
    shared = packed * (blocks + PART_BLOCKS) + merged + RESIDENT_CTAS * LAUNCH_BLOCKS
    return max(parts, 2) if blocks > 1 and 3 * shared <= 2 * plain * blocks else parts


FEW_CTAS = 2 * RESIDENT_CTAS
"""CTAs that kernels for few queries aim at by splitting keys: two per SM. For 65536 keys, 32:8
heads, D = 128 and one query, an H200 took 64 us, and 7 more to merge; with three per SM, whose
number did not divide evenly, 71 + 9; with one, 74 + 4."""

FEW_KEYS = 256
"""The fewest keys of a part of a kernel for few queries."""


def few_tiles(problem: Problem) -> int:
    """The number of tiles of a kernel for few queries."""
    sharing = packing(WARP_ROWS, max(problem.group, 1), 1)
    return _q_tiles(problem, sharing.positions, sharing.units)


def has_few_queries(problem: Problem) -> bool:
    """Whether a kernel for few queries is the fastest.

    It takes as long for a block of keys as the other kernels, since all are memory-bound, and its
    tiles begin and end sooner. So it is the fastest where it has no more tiles than they have.
    """
    return few_tiles(problem) <= _q_tiles(problem, SPLIT_ROWS, problem.group)


def few_parts(problem: Problem) -> int:
    """Parts into which a kernel for few queries is to split the keys of its tiles."""
    p = problem
    kv_len = p.kv_len * p.batch // max(p.num_sequences, 1)
    return max(min(FEW_CTAS // max(few_tiles(p), 1), kv_len // FEW_KEYS, RESIDENT_CTAS), 1)


def _q_tiles(problem: Problem, positions: int, units: int) -> int:
    """Tiles of all sequences and key/value heads: ``units`` for every ``positions`` queries."""
    p = problem
    blocks = p.batch * ceil_div(p.q_len, positions)
    if p.is_packed:
        blocks = ceil_div(p.batch * p.q_len, positions) + p.num_sequences - p.batch
    return blocks * p.num_kv_heads * units


def num_parts(problem: Problem, key: KernelKey) -> int:
    """Parts into which a forward for ``key`` is to split the keys of ``problem``."""
    if key.is_few:
        return few_parts(problem)
    return kv_splits(problem) if key.is_split else 1


HEADS_OF_SMALL = frozenset(heads for arch in ARCHS for heads in arch.kernels("fwd").small)
"""(D, Dv) of which some family has forward kernels with small tiles."""

LARGE_ROWS, SMALL_ROWS = 192, 128
"""Query rows of the tiles of kernels that have small ones as well, and of these."""

LARGE_COST = {64: 0.88, 96: 0.93}
"""By D, the time of a block of keys for a row of a large tile, where that of a small tile is 1.
H200, 2 x 16384 tokens, 16 heads, bfloat16, us with small and large tiles: D = 64 5607 and 4882,
causal 2913 and 2581; D = 96 5802 and 5384, 2938 and 2789."""


@cache
def small_tiles_pay(problem: Problem, head_dim: int) -> bool:
    """Whether kernels for ``head_dim`` with small tiles are done sooner than those with large ones.

    Rows and keys that nobody needs are fewer in small tiles: behind the end of a short sequence,
    and beside the diagonal or a window. Packed sequences count with their mean length.
    """
    small = SMALL_ROWS * _blocks_of_a_cta(problem, SMALL_ROWS)
    return small < LARGE_COST[head_dim] * LARGE_ROWS * _blocks_of_a_cta(problem, LARGE_ROWS)


def _blocks_of_a_cta(problem: Problem, rows: int) -> float:
    """Blocks of 128 keys that the busiest CTA visits, with tiles of so many query rows."""
    p, band = problem, problem.semantics.band
    slots = max(p.num_sequences, 1)
    q_len, kv_len = ceil_div(p.q_len * p.batch, slots), ceil_div(p.kv_len * p.batch, slots)
    window = band.window(band.shift(q_len, kv_len), q_len, kv_len)
    tiles = [kv_blocks(window, row, rows, SPLIT_BLOCK) for row in range(0, q_len, rows)]
    visited = [max(blocks.end - blocks.start, 1) for blocks in tiles]
    heads, most = slots * p.num_q_heads, max(visited)
    if min(visited) == most:
        return float(ceil_div(len(visited) * heads, RESIDENT_CTAS) * most)
    return max(sum(visited) * heads / RESIDENT_CTAS, most)


HEADS_MULTIPLIED = frozenset(heads for arch in ARCHS for heads in arch.kernels("bias").multiplied)
"""(D, Dv) of which some family has kernels that multiply a bias."""


@cache
def can_multiply(problem: Problem) -> bool:
    """Whether the tensor core can add the bias: a product of it and ``1 / scale``, on a diagonal.

    TMA has to be able to read it (rows that are multiples of 16 bytes apart); it and that factor
    have to be operands of the tensor core. No registers are free for other masks than causal ones.
    """
    p, semantics = problem, problem.semantics
    if semantics.soft_cap is not None or _class_of_mask(p) == "general":
        return False
    by_tma = p.bias_bytes == 2 and p.bias_keys > 1 and p.bias_keys % 8 == 0
    return by_tma and 2.0**-10 <= semantics.scale <= 4.0


MULTIPLIED_PAIRS = 16
"""The most pairs of a batch and a head that share a bias whose gradient's kernel multiplies it.

Its tiles have 128 keys instead of 96, so there are fewer to begin and to write, but steps of them
divide less evenly among multiprocessors. H200, us, in brackets by elements: 2 pairs, 4096 tokens,
16 heads, 573 (627); 4, 1024 71 (127); 64, 768, 4 heads of 32, 187 (155); 384, 384 210 (213).
"""


def _few_share(problem: Problem) -> bool:
    """Whether the gradient of a bias is the sum of few scores' gradients for each element."""
    p = problem
    return p.batch * p.num_q_heads <= MULTIPLIED_PAIRS * p.bias_batch * p.bias_heads


def _is_empty(problem: Problem) -> bool:
    return 0 in (problem.batch, problem.num_sequences, problem.q_len, problem.kv_len)


def heads_for(
    problem: Problem, operation: Operation, archs: Iterable[Arch] = ARCHS
) -> list[tuple[int, int]]:
    """(D, Dv) of the kernels with heads at least as large as ``problem`` has; the cheapest first.

    A score costs D multiplications, and weighting its value another Dv.
    """
    kind = _kind(problem, operation)
    every = {heads for arch in archs for heads in arch.kernels(kind).heads}
    wide = [heads for heads in every if _hold(heads, problem)]
    return sorted(wide, key=lambda heads: (sum(heads), heads))


def _kind(problem: Problem, operation: Operation) -> Kind:
    """The kind of the kernels that serve ``problem``, other than those for few queries."""
    return "bias" if problem.has_bias or operation == "dbias" else operation


def _hold(heads: tuple[int, int], problem: Problem) -> bool:
    return heads[0] >= problem.head_dim and heads[1] >= problem.value_dim


def serving(problem: Problem, operation: Operation) -> list[KernelKey]:
    """Keys, without a family, of kernels that serve ``problem``, compiled or not; fastest first."""
    if problem.dtype not in SHORT_DTYPES or _is_empty(problem):
        return []
    has_bias = problem.has_bias
    has_soft_cap = problem.semantics.soft_cap is not None and not has_bias
    keys = []
    for heads in heads_for(problem, operation):
        mask = mask_class(problem)
        key = KernelKey("", problem.dtype, *heads, mask, has_soft_cap, has_bias=has_bias)
        if operation == "fwd" and not has_bias:
            split = replace(key, mask="general", is_split=True)
            if has_few_queries(problem):
                keys.append(replace(split, is_few=True))
            if kv_splits(problem) > 1:
                keys.append(split)
            if heads in HEADS_OF_SMALL and not has_soft_cap and small_tiles_pay(problem, heads[0]):
                keys.append(replace(key, is_small=True))
        if heads in HEADS_MULTIPLIED and can_multiply(problem):
            if operation != "dbias":
                keys.append(replace(key, mask=_class_of_mask(problem), multiplies_bias=True))
            elif _few_share(problem):
                keys.append(replace(key, multiplies_bias=True))
        keys.append(key)
    return keys


def find(
    problem: Problem,
    arch: Arch,
    operation: Operation = "fwd",
    compiled: Collection[str] = BY_NAME.keys(),
) -> Variant | None:
    """The fastest variant that serves ``problem``, of those with a name in ``compiled``."""
    names = (run_as(operation, arch, stem(key)) for key in serving(problem, operation))
    return next((BY_NAME[name] for name in names if name in compiled), None)


def nearest(
    problem: Problem,
    arch: Arch,
    operation: Operation = "fwd",
    compiled: Collection[str] = BY_NAME.keys(),
) -> str:
    """One or two sentences on why ``find`` gave None: what is compiled, and what would work."""
    kind = _kind(problem, operation)
    here = [
        variant
        for variant in of_families([arch.name])
        if variant.name in compiled and variant.operation == operation
    ]
    if not here:
        return (
            f"this build holds no {operation} kernels for {arch.name}. Build with the variants "
            f"'{_prefix(operation, arch.lender(kind).name)}*'."
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
    asked = f"{problem.head_dim}/{problem.value_dim}"
    wide = [v for v in here if _hold((v.key.head_dim, v.key.value_dim), problem)]
    if not wide:
        listed = sorted({(variant.key.head_dim, variant.key.value_dim) for variant in here})
        advice = "implementation='xla' takes heads of any size."
        if known := heads_for(problem, operation, [arch]):
            owner = arch.owner(kind, known[0]).name
            wanted = f"{_prefix(operation, owner)}*_{short_heads(*known[0])}_*"
            advice = f"Build with the variants '{wanted}', too."
        return (
            f"kernels for {arch.name} have D/Dv {', '.join(f'{d}/{dv}' for d, dv in listed)}, none "
            f"as large as {asked}. {advice}"
        )
    cap = " with a soft cap" if problem.semantics.soft_cap is not None else ""
    bias = " with a bias" if problem.has_bias else ""
    same = [variant.name for variant in wide if variant.key.dtype == problem.dtype]
    return (
        f"the {mask_class(problem)} mask{cap}{bias} is not compiled for {problem.dtype}, "
        f"D/Dv {asked} or larger on {arch.name}. Compiled: {', '.join(same) or 'none'}."
    )
