"""The Blackwell backward: its plan, and compiled kernels on the emulator."""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from helpers.cases import Case, make
from helpers.oracle import Results, assert_close, tolerance
from helpers.recording import build, needs_compiler, needs_dsl, prebuilt, record
from helpers.remembered import emulate

from jax_fa.analysis import roofline
from jax_fa.analysis.plan_ledger import ledger
from jax_fa.emulator import EmulationError, Memory, Options
from jax_fa.kernels.edges import (
    SMEM_CAPACITY_BYTES,
    Edge,
    PlanError,
    arrivals,
)
from jax_fa.kernels.sm100 import plan_bwd
from jax_fa.kernels.sm100.plan import FIRST_PAGE_BYTES
from jax_fa.kernels.sm100.tensor_plan import TmemRange, check
from jax_fa.spec import abi, backward_division, schema
from jax_fa.spec.arch import ARCHS
from jax_fa.spec.config import choose_backward
from jax_fa.spec.key import MASK_CLASSES, KernelKey
from jax_fa.spec.problem import Problem

KEYS = [
    KernelKey(arch.target, "bfloat16", d, dv, mask)
    for arch in ARCHS
    if arch.kernels("bwd").folder == "sm100" and arch.lender("bwd") is arch
    for d, dv in arch.kernels("bwd").heads
    for mask in MASK_CLASSES
]
WIDEST = KernelKey("sm_100f", "bfloat16", 96, 96, "full")
"""The largest heads whose CTAs work alone with dQ over dP."""

# ---------------------------------------------------------------------------------------- the plan


def plan_for(key):
    return plan_bwd.backward_plan(key, choose_backward(key))


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_every_plan_fits_the_hardware(key):
    made = plan_for(key)
    assert sum(role.threads * role.registers for role in made.roles) <= 65536
    assert made.smem_bytes <= SMEM_CAPACITY_BYTES
    assert max(columns.end for columns in made.tmem) <= 512


def test_a_head_size_without_a_kernel_is_refused_with_those_that_have_one():
    with pytest.raises(NotImplementedError, match="256/128.*192/128, 256/256"):
        choose_backward(KernelKey("sm_100f", "bfloat16", 256, 128, "full"))


def test_shared_memory_takes_no_more_cycles_than_the_design_allows():
    """Of one CTA; of a pair, test_sm100_backward_pair.py."""
    cycles = roofline.backward(roofline.gpu_of("sm100"), (128, 128))
    assert (cycles.smem, cycles.mma) == (3328, 2560)


def test_dq_has_columns_of_its_own_where_they_are_free():
    overlaid = {64: "", 96: "dp", 192: "s", 256: ""}
    for key in (key for key in KEYS if plan_for(key).ctas == 1):
        made = plan_for(key)
        dq, dp, s = (made.columns(name) for name in ("dq", "dp", "s"))
        wanted = overlaid[key.head_dim]
        assert plan_bwd.dq_overlays(key) == wanted
        assert (dq.start < dp.end and dp.start < dq.end) == (wanted != "")
        assert (dq.start < s.end and s.start < dq.end) == (wanted == "s")


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda p: {"tmem": (*p.tmem, TmemRange("more", 40, 4))}, "overlap"),
        (lambda p: {"tmem": tuple(replace(c, alias_of=None) for c in p.tmem)}, "overlap"),
        (lambda p: {"tmem": tuple(
            replace(c, start=c.start + 64) if c.name == "dq" else c for c in p.tmem)}, "dk and dq"),
        (lambda p: {"roles": (replace(p.roles[0], registers=160), *p.roles[1:])}, "66560"),
        (lambda p: {"edges": (*p.edges, replace(p.edges[0], data="x", consumer="atend"))}, "atend"),
        (lambda p: {"edges": (*p.edges, Edge("x", "mma", "compute"))}, "x: .* promise something"),
        (lambda p: {"buffers": (*p.buffers, replace(p.buffers[0], name="more"))}, "bytes of smem"),
    ],
)  # fmt: skip
def test_a_plan_that_contradicts_itself_is_refused(change, complaint):
    made = plan_for(WIDEST)
    with pytest.raises(PlanError, match=complaint):
        check(replace(made, **change(made)))


def test_warps_arrive_once_for_what_they_finish_and_hardware_once_for_all():
    made = plan_for(WIDEST)
    full = {edge.data: arrivals(made, edge, "full") for edge in made.edges}
    assert (full["s"], full["p"], full["dp"], full["ds"], full["dq"]) == (1, 8, 1, 8, 1)
    assert arrivals(made, made.edge("dq"), "empty") == 4
    assert arrivals(made, made.edge("stats"), "empty") == 8


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_the_ledger_names_every_edge_and_the_notes_that_excuse_an_overlap(key):
    made = plan_for(key)
    text = ledger(made)
    assert all(re.search(rf"^{edge.data} .*full\(\d", text, re.M) for edge in made.edges)
    for columns in made.tmem:
        assert columns.alias_of is None or f"# {columns.why}\n" in plan_bwd.__doc__


# ------------------------------------------------------------------------------------- the kernels


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Compiled kernels, by head size and mask class."""
    built = {}

    def kernel(head_dim, mask):
        if (head_dim, mask) not in built:
            value_dim = 128 if head_dim == 192 else head_dim
            key = KernelKey("sm_100f", "bfloat16", head_dim, value_dim, mask)
            folder = tmp_path_factory.mktemp(f"bwd{head_dim}{mask}")
            built[head_dim, mask] = prebuilt(folder, "sm100.bwd", key, choose_backward(key))
        return built[head_dim, mask]

    return kernel


def scratch_for(operands, case, deterministic, dq_dim):
    """Arrays of ``abi.SCRATCH`` that hold nothing of use, for a kernel of D = ``dq_dim``."""
    (batch, q_len, num_heads, _), (_, kv_len, num_kv_heads, _) = (
        operands.q.shape,
        operands.k.shape,
    )
    num_sequences, is_banded = case.num_sequences, int(not case.semantics.band.is_full)
    rows = backward_division.scratch_rows(batch, num_sequences, q_len)
    tiles = backward_division.kv_tiles(batch, num_sequences, kv_len) * num_kv_heads
    splits = backward_division.head_splits(tiles, num_heads // num_kv_heads, is_banded)
    sums = (splits, operands.k.size + operands.v.size)
    scratch: dict[str, tuple[int, ...]] = {
        "dq_sum": (num_heads, rows, dq_dim),
        "row_stats": (2, num_heads, rows),
    }
    scratch |= {"dkv_sums": sums} if splits > 1 else {}
    arrays = {name: np.full(shape, np.nan, np.float32) for name, shape in scratch.items()}
    if deterministic:
        arrays["turns"] = np.full((num_heads, rows // backward_division.TURN_ROWS), -7, np.int32)
    return arrays


def call(built, case, *, seed=0, deterministic=False, num_sms=2, options=None, dq_dim=None):
    """Gradients of a case, what they may be, the report of the main kernel, and sums of dQ.

    ``dq_dim`` is D that the kernel is compiled for, if it is more than the case's.
    """
    operands, (dout, dlse) = make(case, "bfloat16")
    wanted = tolerance(operands, case.semantics, (dout, dlse))
    results = {
        name: np.full(array.shape, np.nan, array.dtype)
        for name, array in (("dq", operands.q), ("dk", operands.k), ("dv", operands.v))
    }
    arrays = {
        **operands._asdict(),
        **results,
        **scratch_for(operands, case, deterministic, dq_dim or case.head_dim),
        "out": np.asarray(wanted.rounded.out).astype(ml_dtypes.bfloat16),
        "lse": np.asarray(wanted.rounded.lse, np.float32),
        "dout": dout,
        "dlse": np.asarray(dlse, np.float32),
    }
    if operands.sinks is not None:
        arrays["dsinks"] = results["dsinks"] = np.full_like(operands.sinks, np.nan)
    memory, band = Memory(), case.semantics.band
    arrays = {x: np.ascontiguousarray(y) for x, y in arrays.items() if y is not None}
    values: dict[str, float] = {
        name: memory.add(name, array.view(np.uint16) if array.itemsize == 2 else array)
        for name, array in arrays.items()
    }
    problem = Problem.of(operands, case.semantics)
    values |= {x.name: getattr(problem, x.name) for x in schema.EXTENTS}
    values |= {"num_sms": num_sms, "deterministic": int(deterministic)}
    values |= {"scale": case.semantics.scale, "soft_cap": case.semantics.soft_cap or 1.0}
    values |= {"window_left": band.left_bound, "window_right": band.right_bound}
    values |= {"bottom_right": int(band.alignment == "bottom_right")}
    reports = [
        emulate(built.ptx, launch, memory, seed=seed, options=options)
        for launch in record(built, abi.BACKWARD, values)
    ]
    got = Results(None, None, *(arrays[name] for name in ("dq", "dk", "dv")))
    if operands.sinks is not None:
        got = got._replace(dsinks=arrays["dsinks"].sum(0))
    return got, wanted, reports[1], arrays["dq_sum"]


def assert_right_with_the_same_bits(runs):
    """Of results of ``call``, the first are right, and all others equal them to the last bit."""
    first, wanted, _, sums = runs[0]
    assert_close(first, wanted, "bfloat16")
    for got, _, _, other in runs[1:]:
        assert other.tobytes() == sums.tobytes()
        for name in ("dq", "dk", "dv"):
            assert getattr(got, name).tobytes() == getattr(first, name).tobytes(), name


compiles = pytest.mark.filterwarnings("default::DeprecationWarning")  # of the DSL, within the DSL

GROUPED = Case("grouped", q_len=200, kv_len=300, heads=4, kv_heads=2, has_sinks=True)
"""Two query tiles, the second partly used, of two heads that share keys; the last of three key
blocks partly used; parts of dK and dV that are merged."""
EVERYTHING = Case(
    "everything",
    q_len=260,
    kv_len=280,
    cu_q=(0, 130, 150, 260),
    cu_k=(0, 100, 140, 280),
    q_lengths=(120, 20, 110),
    kv_lengths=(90, 40, 135),
    q_offset=(10, 0, -5),
    is_causal=True,
    window=(60, None),
    segments=((1,) * 100 + (2,) * 160, (1,) * 90 + (2,) * 190),
    has_sinks=True,
    kv_heads=1,
    head_dim=128,
)


@needs_dsl
@needs_compiler
@compiles
@pytest.mark.parametrize("seed", range(10))
def test_gradients_of_grouped_heads_are_right_under_any_schedule(kernels, seed):
    got, wanted, report, _ = call(kernels(64, "full"), GROUPED, seed=seed)
    assert_close(got, wanted, "bfloat16")
    assert not report.notes and not report.findings


@needs_dsl
@needs_compiler
@compiles
@pytest.mark.parametrize("completion", ["lazy", "random"])
def test_gradients_are_right_where_dq_overwrites_dp(kernels, completion):
    case = Case("causal", q_len=300, kv_len=300, heads=1, kv_heads=1, head_dim=96, is_causal=True)
    built = kernels(96, "causal")
    got, wanted, *_ = call(built, case, options=Options(completion=completion))
    assert_close(got, wanted, "bfloat16")


STRANGERS = Case(
    "strangers",
    q_len=300,
    kv_len=300,
    heads=1,
    kv_heads=1,
    segments=((1,) * 300, (1,) * 128 + (2,) * 172),
    head_dim=128,
)
"""The later key blocks have no query of their segment."""
IN_TURN = Case("in_turn", q_len=300, kv_len=300, heads=1, kv_heads=1, head_dim=192, value_dim=128)


@needs_dsl
@needs_compiler
@compiles
@pytest.mark.parametrize("completion", ["lazy", "random"])
def test_gradients_are_right_where_products_take_turns(kernels, completion):
    got, wanted, *_ = call(kernels(192, "full"), IN_TURN, options=Options(completion=completion))
    assert_close(got, wanted, "bfloat16")


SWEPT_TWICE = Case("swept_twice", q_len=230, kv_len=200, heads=2, kv_heads=1, head_dim=256)
"""An even number of query tiles of two heads, by a whole block of keys and part of another."""


@needs_dsl
@needs_compiler
@compiles
@pytest.mark.parametrize("completion", ["lazy", "random"])
@pytest.mark.parametrize("q_len", [230, 150])
def test_gradients_are_right_where_queries_are_swept_twice(kernels, completion, q_len):
    case, options = replace(SWEPT_TWICE, q_len=q_len), Options(completion=completion)
    got, wanted, report, _ = call(kernels(256, "full"), case, num_sms=1, options=options)
    assert_close(got, wanted, "bfloat16")
    assert not report.notes and not report.findings


@needs_dsl
@needs_compiler
@compiles
@pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "in_turn"])
@pytest.mark.parametrize("case", [EVERYTHING, STRANGERS], ids=str)
def test_gradients_are_right_where_everything_hides_keys(kernels, case, deterministic):
    case = replace(case, head_dim=96)
    got, wanted, *_ = call(kernels(96, "general"), case, deterministic=deterministic)
    assert_close(got, wanted, "bfloat16")


@needs_dsl
@needs_compiler
@compiles
@pytest.mark.parametrize(
    "case",
    [
        Case("deep", q_len=130, kv_len=500, heads=1, kv_heads=1),
        Case("causal", q_len=260, kv_len=400, heads=1, kv_heads=1, head_dim=96, is_causal=True),
        Case("group", q_len=260, kv_len=400, heads=2, kv_heads=1, head_dim=96, is_causal=True),
    ],
    ids=str,
)
def test_deterministic_gradients_have_the_same_bits_under_any_schedule(kernels, case):
    """On fewer multiprocessors than there are tiles that wait for each other."""
    built = kernels(case.head_dim, "causal" if case.is_causal else "full")
    options = Options(resident=3)
    runs = [
        call(built, case, seed=seed, deterministic=True, num_sms=4, options=options)
        for seed in range(10)
    ]
    assert_right_with_the_same_bits(runs)


@needs_dsl
@needs_compiler
@compiles
def test_every_tile_moves_what_the_model_counts(kernels):
    """One tile of keys, two of queries, D = 96: bytes at 128 a cycle."""
    case = Case("count", q_len=256, kv_len=128, heads=1, kv_heads=1, head_dim=96, is_causal=True)
    _, _, report, _ = call(kernels(96, "causal"), case)
    heads = WIDEST.head_dim, WIDEST.value_dim
    cycles = roofline.backward_smem_cycles(roofline.gpu_of("sm100"), heads)
    products = sum(count for what, count in cycles.items() if " reads " in what)
    assert report.counters["bytes tcgen05.mma operands"] == 2 * 128 * products
    assert report.counters["bytes bulk reduction"] == 2 * 128 * cycles["dQ is read"]


# ----------------------------------------------------------------------------------- single faults

WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[[^\]]*\], %r\d+, \d+;"
COMPUTE = "stats s dp "
WAITS = {
    64: (
        f"dq dq {COMPUTE * 2} dv dk "
        "k q v dv_empty dk_empty dout p  q ds dq_empty dout p  ds dq_empty"
    ).split(),
    96: (
        f"dq dq {COMPUTE * 3} dv dk "
        "k q v dv_empty dk_empty dout dq_empty p  q ds dout dq_empty p  ds"
    ).split(),
}
"""The purpose of each wait of the roles reduce (deterministic or not), compute (masked, not,
masked) and mma, in the order of the text: the kernels of D = 64, full, and of D = 96, causal."""
COMMITS = "s dp dout  s q dq dp dout  v dv  q dq k dk".split()
"""What each commit of the role mma tells, in the order of the text."""
COUNT = r"(mbarrier\.init\.shared\.b64\s+\[[^\]]*\]), [^;]*;"
NO_WAIT = "setp.eq.u32 P1, 0, 0;"
FULL, CAUSAL = (64, "full"), (96, "causal")
HAZARD, UNWRITTEN = "AsyncHazard.* while ", "Uninitialized.*nothing wrote"


def spoiled(built, pattern, replacement, which=None):
    """``built`` with matches number ``which`` of a pattern in the main kernel replaced; or all."""
    start = re.search(r"\.entry kernel_cutlass_kernel", built.ptx).start()
    end = built.ptx.find(".entry", start + 1)
    end = len(built.ptx) if end < 0 else end
    text = built.ptx[start:end]
    matches = list(re.finditer(pattern, text))
    chosen = matches if which is None else [matches[which]]
    assert chosen, pattern
    for match in reversed(chosen):
        new = replacement(match) if callable(replacement) else match.expand(replacement)
        text = text[: match.start()] + new + text[match.end() :]
    return built._replace(ptx=built.ptx[:start] + text + built.ptx[end:])


def without_wait(head_dim, name, number):
    """Drops the ``number``-th wait for ``name``."""
    place = [i for i, wait in enumerate(WAITS[head_dim]) if wait == name][number]
    return lambda built: spoiled(built, WAIT, NO_WAIT, place)


def without(pattern, which=None):
    """Drops an instruction."""
    return lambda built: spoiled(built, rf"{pattern}[^;]*;", "", which)


def without_commit(name, number):
    """Drops the ``number``-th commit that tells ``name``."""
    place = [i for i, commit in enumerate(COMMITS) if commit == name][number]
    return without(r"tcgen05\.commit", place)


def with_count(head_dim, data, side, count):
    """Lets a barrier of an edge of one stage wait for ``count`` arrivals."""
    first = plan_for(KernelKey("sm_100f", "bfloat16", head_dim, head_dim, "full"))
    place = first.first_mbarrier(data) + (side == "empty")
    return lambda built: spoiled(built, COUNT, rf"\1, {count};", place)


def with_text(pattern, replacement, which=None):
    """Replaces a pattern."""
    return lambda built: spoiled(built, pattern, replacement, which)


def delta_of_next_stage(built):
    """Reads all of delta one stage further on."""
    made = plan_for(KernelKey("sm_100f", "bfloat16", 64, 64, "full"))
    before = [x.size_bytes for x in made.buffers if x.name not in ("stats", "words")]
    first = FIRST_PAGE_BYTES + sum(before) + 4 * 128
    loads = r"(ld\.shared\.v2\.b64\s+\{[^}]*\}, \[%r\d+\+)(\d+)"

    def moved(match):
        offset = int(match[2])
        return f"{match[1]}{offset + made.edge('stats').stage_bytes * (offset >= first)}"

    return spoiled(built, loads, moved)


FAULTS = {
    "s is read before its commit": (FULL, without_wait(64, "s", 1), UNWRITTEN),
    "dp is read before its commit": (FULL, without_wait(64, "dp", 1), HAZARD),
    "dq is read before its commit": (FULL, without_wait(64, "dq", 1), UNWRITTEN),
    "dk is read before its commit": (FULL, without_wait(64, "dk", 0), HAZARD),
    "stats are read before they arrive": (FULL, without_wait(64, "stats", 1), HAZARD),
    "q is multiplied before it arrives": (FULL, without_wait(64, "q", 0), HAZARD),
    "dv before p": (FULL, without_wait(64, "p", 1), HAZARD),
    "dq before ds": (FULL, without_wait(64, "ds", 0), "Uninitialized.*never written"),
    "dp overwrites dq": (CAUSAL, without_wait(96, "dq_empty", 1), HAZARD),
    "p without wait::st": (FULL, without(r"tcgen05\.wait::st", 2), "without tcgen05.wait::st"),
    "ds without wait::st": (FULL, without(r"tcgen05\.wait::st", 3), "without tcgen05.wait::st"),
    "ds without fence": (FULL, without(r"fence\.proxy\.async", -1), "ProxyFence.*mma"),
    "dq without fence": (FULL, without(r"fence\.proxy\.async", 2), "ProxyFence.*bulk reduction"),
    "a piece of dq too early": (FULL, without(r"cp\.async\.bulk\.wait_group\.read"), HAZARD),
    "additions outlive the CTA": (
        FULL,
        without(r"cp\.async\.bulk\.wait_group\s+0", -1),
        "nothing waited for the bulk reduction",
    ),
    "dq is never told": (FULL, without_commit("dq", 0), "Deadlock.*no warp can run"),
    "v is never given back": (FULL, without_commit("v", 0), "Deadlock.*no warp can run"),
    "one arrival too many for p": (FULL, with_count(64, "p", "full", 9), "Deadlock"),
    "one arrival too few for ds": (
        CAUSAL,
        with_count(96, "ds", "full", 7),
        f"{HAZARD}|without tcgen05.wait::st",
    ),
    "one arrival too few for dq": (CAUSAL, with_count(96, "dq", "empty", 3), HAZARD),
    "too few bytes of stats": (
        FULL,
        with_text(r"(complete_tx::bytes \[%r\d+\], \[%rd\d+\]), 512", r"\1, 256", 0),
        "Deadlock",
    ),
    "tensor memory is kept": (FULL, without(r"tcgen05\.dealloc"), "exits with TMEM columns"),
    "half of a piece": (
        FULL,
        with_text(r"(add\.f32 \[%rd\d+\], \[%r\d+\]), 4096", r"\1, 2048", 2),
        "dq: error",
    ),
    "delta of another stage": (FULL, delta_of_next_stage, HAZARD),
    "sign of delta": (FULL, with_text(r"sub\.rn\.f32x2", "add.rn.f32x2"), "dq: error.*dk: error"),
}
"""Kernel, fault, and what the emulator or the oracle says of it."""


@needs_dsl
@needs_compiler
@compiles
def test_every_wait_and_commit_of_the_kernels_is_known(kernels):
    for (head_dim, mask), waits in zip((FULL, CAUSAL), WAITS.values(), strict=True):
        text = kernels(head_dim, mask).ptx
        text = text[re.search(r"\.entry kernel_cutlass_kernel", text).start() :]
        assert len(re.findall(r"tcgen05\.commit", text)) == len(COMMITS)
        # The others are those of the role load: for a tile, for a query tile, at the end.
        made = plan_for(KernelKey("sm_100f", "bfloat16", head_dim, head_dim, mask))
        tails = sum(made.edge(data).stages for data in ("k", "v", "q", "dout"))
        assert len(re.findall(WAIT, text)) == len(waits) + 5 + 3 + tails


@needs_dsl
@needs_compiler
@compiles
@pytest.mark.parametrize("fault", FAULTS)
def test_a_single_fault_is_noticed(kernels, fault):
    (head_dim, mask), spoil, complaint = FAULTS[fault]
    case = Case("sweep", q_len=384, kv_len=128, heads=1, kv_heads=1, head_dim=head_dim)
    if mask == "causal":
        case = replace(case, q_len=640, is_causal=True)
    built = spoil(kernels(head_dim, mask))
    with pytest.raises((EmulationError, AssertionError)) as caught:
        got, wanted, *_ = call(built, case, options=Options(completion="lazy"))
        assert_close(got, wanted, "bfloat16")
    text = f"{type(caught.value).__name__} {caught.value}"
    assert re.search(complaint, text, re.S), text


@needs_dsl
@needs_compiler
@compiles
@pytest.mark.parametrize(
    "pattern, replacement",
    [(r"bar\.sync\s+2, 256;", ""), (COUNT, r"\1, 3;")],
    ids=["p overwrites s that is not read", "one arrival too few for dq"],
)
def test_a_single_fault_where_products_take_turns_is_noticed(kernels, pattern, replacement):
    made = plan_for(KernelKey("sm_100f", "bfloat16", 192, 128, "full"))
    which = made.first_mbarrier("dq") + 1 if pattern is COUNT else None
    built = spoiled(kernels(192, "full"), pattern, replacement, which)
    with pytest.raises((EmulationError, AssertionError), match="dq: error|while"):
        for seed in range(4):
            got, wanted, *_ = call(built, IN_TURN, seed=seed)
            assert_close(got, wanted, "bfloat16")


@needs_dsl
@needs_compiler
@compiles
def test_additions_out_of_turn_change_bits(kernels):
    """Without its wait a deterministic run differs from schedule to schedule."""
    wait = r"(ld\.acquire\.gpu[^;]*;\s*)setp\.ge\.s32\s+(%p\d+), [^;]*;"
    built = spoiled(kernels(64, "full"), wait, r"\1setp.eq.u32 \2, 0, 0;")
    case = Case("deep", q_len=130, kv_len=500, heads=1, kv_heads=1)
    options = Options(resident=4)
    runs = (
        call(built, case, seed=seed, deterministic=True, num_sms=4, options=options)
        for seed in range(8)
    )
    assert len({sums.tobytes() for *_, sums in runs}) > 1


@needs_dsl
@needs_compiler
@compiles
def test_overlapping_columns_of_tensor_memory_spoil_the_result(tmp_path, monkeypatch):
    """A plan that skipped its own check: dQ over the upper half of dK."""
    from jax_fa.kernels.sm100 import bwd

    key = KernelKey("sm_100f", "bfloat16", 64, 64, "full")
    made = plan_for(key)
    dq = replace(made.columns("dq"), start=made.columns("dk").start + 32)
    spoilt = replace(made, tmem=tuple(dq if x.name == "dq" else x for x in made.tmem))
    with pytest.raises(PlanError, match="dk and dq overlap"):
        check(spoilt)
    monkeypatch.setattr(bwd, "backward_plan", lambda *_: spoilt)
    built = build(tmp_path, "sm100.bwd", key, choose_backward(key), "overlap")
    case = Case("sweep", q_len=256, kv_len=128, heads=1, kv_heads=1)
    with pytest.raises((EmulationError, AssertionError), match="dk: error|while"):
        got, wanted, *_ = call(built, case)
        assert_close(got, wanted, "bfloat16")
