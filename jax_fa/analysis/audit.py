"""Judges compiled variants: resources, machine code, and the model of what their GPU allows.

``audit`` makes one ``Report`` of an object that ``jax_fa.aot`` wrote. What it says comes from three
sources, which it keeps apart: *compiled* (read from the object and its PTX), *planned*
(``kernels/*/plan.py`` and ``spec/config_*.py``, which the object was made from) and *model*
(``roofline.py``).
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jax_fa.analysis import banks, machine_code, ptx_text, roofline
from jax_fa.analysis.occupancy import LIMITS, SYSTEM_BYTES, Launch, Occupancy, occupancy
from jax_fa.aot import cubins
from jax_fa.kernels.edges import Plan, PlanError
from jax_fa.kernels.sm100.tensor_plan import TMEM_COLS
from jax_fa.spec import config
from jax_fa.spec.arch import MMA, Operation
from jax_fa.spec.band import Band
from jax_fa.spec.config_mma_sync import MmaSyncBackward
from jax_fa.spec.config_sm90_bwd import HopperBackward
from jax_fa.spec.key import KernelKey
from jax_fa.spec.problem import Problem, Semantics
from jax_fa.spec.variants import Variant, capabilities

FLASH_ATTENTION_4 = {
    ((64, 64), "full"): (2032, 452),
    ((64, 64), "causal"): (2056, 452),
    ((96, 96), "full"): (2072, 452),
    ((128, 128), "full"): (2160, 420),
    ((128, 128), "causal"): (2056, 452),
    ((192, 128), "full"): (2164, 420),
    ((192, 128), "causal"): (1928, 484),
}
"""Heads and mask -> warp instructions, and exponentials among them, that FlashAttention-4's forward
takes for a tile that is not masked: counted like ours, in what its release 4.0.0b36 compiles to for
``FLASH_ATTENTION_4_CAPABILITY`` (DSL 4.8.1, quack-kernels 0.5.3)."""
FLASH_ATTENTION_4_CAPABILITY = "10.0"
MMA_DEPTH = 16
"""Of one tensor core instruction for 16-bit elements."""
_PLANS = {
    "fwd": ("plan", "forward_plan"),
    "fwd_bias": ("plan", "forward_plan"),
    "fwd_split": ("plan", "forward_plan"),
    "fwd_sorted": ("plan_sorted", "sorted_plan"),
    "few": ("plan_few", "few_plan"),
    "bwd": ("plan_bwd", "backward_plan"),
    "dbias": ("plan_dbias", "dbias_plan"),
}


class Lengths(NamedTuple):
    """Sizes of the problem that arithmetic intensity is given for."""

    batch: int = 2
    q_len: int = 8192
    kv_len: int = 8192
    num_q_heads: int = 16
    num_kv_heads: int = 16


@dataclass(frozen=True)
class Model:
    """The limits that a GPU sets a variant, all of them computed.

    Attributes:
        gpu: name.
        cycles: of one SM for a tile of 128 x 128 scores, by unit.
        fill_cycles: of shared memory, for what TMA writes; not among those of the unit.
        bound: the unit that takes longest.
        efficiency: share of the tensor core's peak that this leaves.
        intensity: FLOP per byte of memory, every array crossing once.
        cta_intensity: FLOP per byte that CTAs move.
        ridge: FLOP per byte from which memory is no bound.
        tflops: the lower of both roofs, 1e12 FLOP/s.
    """

    gpu: str
    cycles: dict[str, float]
    fill_cycles: float
    bound: str
    efficiency: float
    intensity: float
    cta_intensity: float
    ridge: float
    tflops: float


@dataclass(frozen=True)
class Softmax:
    """The softmax of a tile of 128 x 128 scores, as its loop in the machine code has it.

    Attributes:
        instructions: warp instructions.
        by_meaning: the same by meaning.
        scores_per_thread: of one iteration.
        polynomials: share of exponentials that are none of the special function unit's.
        special_cycles: of the special function unit, all its functions at the rate of exponentials.
        issue_cycles: of the schedulers.
        other_loops: warp instructions of the other loops of the kind: masked blocks, other roles.
    """

    instructions: float
    by_meaning: dict[str, float]
    scores_per_thread: int
    polynomials: float
    special_cycles: float
    issue_cycles: float
    other_loops: tuple[float, ...]


@dataclass
class Report:
    """The facts about one compiled variant; see the module for the three sources.

    Attributes:
        name: of the variant.
        launch_registers: compiled, per thread and kernel.
        stack_bytes: compiled, the most of any kernel.
        shared_bytes: compiled, dynamic shared memory by launch; empty if there is no report.
        code_bytes: compiled, of all kernels.
        role_registers: planned, by role, after setmaxnreg.
        tmem_columns: planned, used of those allocated.
        occupancy: of the main kernel, by compute capability; empty if there is no report.
        counts: compiled, instructions by meaning in all kernels; None without a disassembler.
        softmax: compiled; None without a disassembler.
        mma_spacing: compiled, instructions from one tcgen05.mma to the next, by loop around them.
        bank_conflicts: planned, kinds of access that take more passes than they need.
        accesses: planned, kinds of access that were looked at.
        problems: what is wrong, in words; empty if nothing is.
        praise: what is right, in words.
    """

    name: str
    launch_registers: tuple[int, ...]
    stack_bytes: int
    shared_bytes: tuple[int, ...]
    code_bytes: int
    role_registers: dict[str, int] = field(default_factory=dict)
    tmem_columns: tuple[int, int] = (0, 0)
    occupancy: dict[str, Occupancy] = field(default_factory=dict)
    counts: dict[str, int] | None = None
    softmax: Softmax | None = None
    mma_spacing: tuple[float, ...] = ()
    bank_conflicts: tuple[str, ...] = ()
    accesses: int = 0
    problems: list[str] = field(default_factory=list)
    praise: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """One line in plain words."""
        praise = ", ".join(self.praise) or "resources"
        return "; ".join(self.problems) if self.problems else f"{praise}: ok"


_Needs = Mapping[str, tuple[tuple[str, ...], ...]]


class _Expectation(NamedTuple):
    """Requirements on the machine code of a variant.

    Attributes:
        mma: the tensor core instruction; no other.
        needed: praise -> one meaning of each of these groups.
    """

    mma: str
    needed: _Needs


_REDUCTIONS = ("tma reduce", "bulk reduce", "red.global.v4")
_IN: _Needs = {"TMA in": (("tma load",),)}
_BOTH_WAYS: _Needs = {"TMA both ways": (("tma load",), ("tma store",))}
_REDUCING: _Needs = {"TMA in, vector reductions out": (("tma load",), _REDUCTIONS)}
_TENSOR_MEMORY: _Needs = {"tensor memory read and written": (("tcgen05.ld",), ("tcgen05.st",))}
_BY_THREADS: _Needs = {"cp.async in": (("cp.async",),), "operands by ldmatrix": (("ldmatrix",),)}
_COPIES: dict[Operation, _Needs] = {"fwd": _BOTH_WAYS, "bwd": _REDUCING, "dbias": _IN}
_MMAS = ("tcgen05.mma", "wgmma", "mma.sync")


def choose_config(variant: Variant) -> Any:
    """The configuration that ``variant`` has now."""
    choose: dict[Operation, Callable[[KernelKey], Any]] = {
        "fwd": config.choose_forward,
        "bwd": config.choose_backward,
        "dbias": config.choose_dbias,
    }
    return choose[variant.operation](variant.key)


def plan_of(variant: Variant) -> Plan:
    """The checked plan of ``variant``.

    Raises:
        PlanError: it contradicts itself or the hardware.
    """
    module, function = _PLANS[variant.module.split(".")[-1]]
    plans = importlib.import_module(f"jax_fa.kernels.{variant.kernels}.{module}")
    return getattr(plans, function)(variant.key, choose_config(variant))


def smem_capacity(variant: Variant) -> int:
    """The most shared memory, in bytes, that a CTA of ``variant`` may have on all its GPUs."""
    smallest = min(LIMITS[capability].shared_bytes for capability in capabilities(variant))
    return smallest - SYSTEM_BYTES


def running(variant: Variant, gpu: roofline.Gpu) -> roofline.Gpu:
    """``gpu`` as ``variant`` finds it."""
    return roofline.running(gpu, MMA[variant.kernels])


def cycles_of(variant: Variant, gpu: roofline.Gpu) -> roofline.Cycles:
    """Cycles of one SM for a tile (model)."""
    chosen = choose_config(variant)
    heads = (variant.key.head_dim, variant.key.value_dim)
    if variant.operation == "fwd":
        return roofline.forward(
            gpu,
            heads,
            planned_polynomials(chosen),
            has_soft_cap=variant.key.has_soft_cap,
            q_in_registers=getattr(chosen, "q_in_registers", False),
            ctas=getattr(chosen, "ctas", 1),
        )
    if variant.operation == "dbias":
        return roofline.bias_gradient(gpu, heads)
    if isinstance(chosen, (HopperBackward, MmaSyncBackward)):
        # dQ goes from registers to global memory.
        hopper: tuple[roofline.Staged, ...] = ("ds",) if chosen.splits_keys else ("p", "ds")
        return roofline.backward(gpu, heads, hopper)
    return roofline.backward(gpu, heads, chosen.staged, ctas=chosen.ctas, sweeps=chosen.sweeps)


def expectation(variant: Variant) -> _Expectation:
    """The requirements on the machine code of ``variant``."""
    mma = MMA[variant.kernels]
    # Where keys are split, parts of results go from registers to memory, in float32.
    copies = _IN if variant.key.is_split else _COPIES[variant.operation]
    if mma == "mma.sync":
        copies = _BY_THREADS
    tensor_memory = _TENSOR_MEMORY if mma == "tcgen05.mma" else {}
    return _Expectation(mma, {**copies, **tensor_memory})


def planned_polynomials(chosen: Any) -> float:
    """Share of the exponentials of an unmasked block that are polynomials."""
    return getattr(chosen, "polynomials", 0) / roofline.TILE


def smallest_product_cycles(variant: Variant, gpu: roofline.Gpu) -> float:
    """Cycles of the tensor core for its smallest instruction, 16 deep, of a variant (model)."""
    tile = min(choose_config(variant).block_q, roofline.TILE)
    columns = min(variant.key.head_dim, variant.key.value_dim, tile)
    return 2 * gpu.rates.mma_rows * columns * MMA_DEPTH / gpu.rates.mma_flops


def model(variant: Variant, gpu: roofline.Gpu, lengths: Lengths) -> Model:
    """The limits that ``gpu`` sets ``variant`` on a problem of these lengths."""
    key, chosen, gpu = variant.key, choose_config(variant), running(variant, gpu)
    problem = Problem(
        key.dtype,
        lengths.batch,
        lengths.batch,
        *lengths[1:],
        key.head_dim,
        key.value_dim,
        Semantics(1.0, Band(is_causal=key.mask == "causal")),
    )
    ctas = getattr(chosen, "ctas", 1)
    if variant.operation == "fwd":
        sharing = chosen.block_q / roofline.TILE * ctas
        asked = roofline.work(problem, "fwd", chosen.block_q)
    elif variant.operation == "dbias":
        sharing = 1 / (roofline.TILE / chosen.block_kv + roofline.TILE / chosen.block_q)
        asked = roofline.work(problem, "dbias", chosen.block_q)
    else:
        # A pair's CTAs have halves by rows and by columns, twice half of everything.
        copies = ctas * getattr(chosen, "sweeps", 1)
        sharing = chosen.block_kv / roofline.TILE / copies
        asked = roofline.work(problem, "bwd", chosen.block_kv, copies)
    cycles = cycles_of(variant, gpu)
    return Model(
        gpu=gpu.name,
        cycles=cycles._asdict(),
        fill_cycles=roofline.fill_cycles((key.head_dim, key.value_dim), sharing),
        bound=cycles.bound,
        efficiency=cycles.efficiency,
        intensity=asked.intensity,
        cta_intensity=asked.cta_intensity,
        ridge=gpu.ridge,
        tflops=roofline.attainable_flops(gpu, cycles, asked.intensity) / 1e12,
    )


def resources(variant: Variant, path: Path, shared_bytes: Sequence[int]) -> Report:
    """Facts from the object at ``path`` and from the plan, with the problems they show."""
    kernels = cubins.kernels(path)
    report = Report(
        variant.name,
        tuple(kernel.registers for kernel in kernels),
        max(kernel.stack_bytes for kernel in kernels),
        tuple(shared_bytes),
        sum(kernel.code_bytes for kernel in kernels),
    )
    if report.stack_bytes:
        report.problems.append(f"spills: {report.stack_bytes} bytes of stack")
    shared, capacity = max(report.shared_bytes, default=0), smem_capacity(variant)
    if shared > capacity:
        report.problems.append(f"shared memory of {shared} bytes is more than {capacity}")
    try:
        plan = plan_of(variant)
    except PlanError as error:
        report.problems.append(str(error))
    else:
        report.role_registers = {role.name: role.registers for role in plan.roles}
        if shared:
            # The kernels around the main one take less of everything.
            launch = Launch(plan.threads, max(report.launch_registers), shared)
            report.occupancy = {name: occupancy(name, launch) for name in capabilities(variant)}
        if plan.tmem:
            report.tmem_columns = (max(cols.end for cols in plan.tmem), TMEM_COLS)
    found = banks.accesses(variant.key, choose_config(variant))
    report.accesses = len(found)
    report.bank_conflicts = tuple(
        f"{access.who} ({access.instruction}): {access.passes()} passes for {access.fewest}"
        for access in banks.conflicts(found)
    )
    if report.bank_conflicts:
        report.problems.append(f"bank conflicts: {', '.join(report.bank_conflicts)}")
    return report


def audit_code(report: Report, variant: Variant, code: Sequence[machine_code.Code]) -> None:
    """Adds to ``report`` what the machine code of all kernels of ``variant`` shows."""
    total: Counter[str] = Counter()
    for kernel in code:
        total.update(machine_code.count(kernel.instructions))
    counts = {meaning: total[meaning] for meaning in [*machine_code.MEANINGS, "all"]}
    report.counts = counts
    expected = expectation(variant)
    _judge_instructions(report, expected, counts)
    mma = expected.mma
    main = max(code, key=lambda kernel: machine_code.count(kernel.instructions)[mma])
    if mma == "tcgen05.mma":
        report.mma_spacing = machine_code.instructions_per(main, mma)
    chosen = choose_config(variant)
    shares_keys = getattr(chosen, "splits_results", False)
    is_branched = variant.key.has_bias and (
        getattr(chosen, "parts", 1) > 2 or getattr(chosen, "splits_columns", False)
    )
    if variant.operation == "dbias" or shares_keys or is_branched or variant.key.is_few:
        # By what is rounded its loop would be known: nothing there, or by half of the warps; or by
        # a branch for each part of a block, with a cap or without; or a few scores of each warp.
        return
    found = machine_code.softmax_loops(main, rounded=1 if variant.operation == "fwd" else 2)
    if not found:
        report.problems.append("no loop that takes exponentials of scores")
        return
    report.softmax = _softmax(found, roofline.gpu_of(variant.arch))
    planned = planned_polynomials(choose_config(variant))
    if report.softmax.polynomials != planned:
        report.problems.append(
            f"polynomials for {report.softmax.polynomials:.1%} of exponentials, not {planned:.1%}"
        )


def audit_ptx(report: Report, variant: Variant, ptx: bytes | None) -> None:
    """Adds to ``report`` how the PTX hands tensor memory over (``ptx_text.py``)."""
    if expectation(variant).mma != "tcgen05.mma":
        return
    if ptx is None:
        report.problems.append("no PTX to check the use of tensor memory in")
        return
    found = ptx_text.complaints(ptx.decode())
    report.problems.extend(found)
    if not found:
        report.praise.append("tensor memory handed over in order")


def _judge_instructions(report: Report, expected: _Expectation, counts: dict[str, int]) -> None:
    if counts[expected.mma]:
        report.praise.append(expected.mma)
    else:
        report.problems.append(f"no {expected.mma}")
    for other in _MMAS:
        if other != expected.mma and counts[other]:
            report.problems.append(f"{counts[other]} {other}, which {expected.mma} should replace")
    for praise, groups in expected.needed.items():
        missing = [group for group in groups if not any(counts[meaning] for meaning in group)]
        report.problems += [f"no {' or '.join(group)}" for group in missing]
        if not missing:
            report.praise.append(praise)
    if counts["cp.async"] and expected.mma != "mma.sync":
        report.problems.append(f"{counts['cp.async']} cp.async, which TMA should replace")
    if counts["local memory"]:
        report.problems.append(f"{counts['local memory']} instructions use local memory")
    else:
        report.praise.append("no local memory")


def _softmax(found: Sequence[machine_code.MainLoop], gpu: roofline.Gpu) -> Softmax:
    main, *others = found
    of_tile = {
        meaning: main.per_tile(meaning, roofline.SCORES)
        for meaning, number in main.counts.items()
        if number
    }
    special = of_tile["exp2"] + of_tile.get("other special", 0.0)
    return Softmax(
        instructions=of_tile["all"],
        by_meaning=of_tile,
        scores_per_thread=main.scores,
        polynomials=main.polynomials,
        special_cycles=special * banks.WARP / gpu.rates.exponentials,
        issue_cycles=of_tile["all"] * banks.WARP / roofline.LANES,
        other_loops=tuple(other.per_tile("all", roofline.SCORES) for other in others),
    )
