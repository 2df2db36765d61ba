"""The Blackwell backward: its plan, and compiled kernels on the emulator."""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from cases import Case, make
from oracle import Results, assert_close, tolerance
from recording import build, needs_compiler, needs_dsl, record

from jax_fa import roofline
from jax_fa.config import BLACKWELL, BLACKWELL_BACKWARD_HEADS, KernelKey, choose_backward
from jax_fa.emulator import Memory, Options, emulate
from jax_fa.kernels import abi
from jax_fa.kernels.edges import PlanError, TmemRange, arrivals, check, ledger
from jax_fa.kernels.sm100 import plan_bwd

KEYS = [
    KernelKey(target, "bfloat16", d, dv, mask)
    for target in BLACKWELL
    for d, dv in BLACKWELL_BACKWARD_HEADS
    for mask in abi.MASK_CLASSES
]
WIDEST = KernelKey("sm_100f", "bfloat16", 128, 128, "full")

# ---------------------------------------------------------------------------------------- the plan


def plan_for(key):
    return plan_bwd.backward_plan(key, choose_backward(key))


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_every_plan_fits_the_hardware(key):
    made = plan_for(key)
    assert sum(role.threads * role.registers for role in made.roles) <= 65536
    assert made.smem_bytes <= 227 * 1024
    assert max(columns.end for columns in made.tmem) <= 512


@pytest.mark.parametrize("heads", [(192, 128), (256, 256)])
def test_head_sizes_without_a_kernel_are_refused_with_those_that_have_one(heads):
    with pytest.raises(NotImplementedError, match=f"{heads[0]}/{heads[1]}.*128/128"):
        choose_backward(KernelKey("sm_100f", "bfloat16", *heads, "full"))


def test_shared_memory_takes_no_more_cycles_than_the_design_allows():
    cycles = roofline.backward(roofline.gpu_of("sm100"), (WIDEST.head_dim, WIDEST.value_dim))
    assert (cycles.smem, cycles.mma) == (3328, 2560)


def test_dq_has_columns_of_its_own_where_they_are_free():
    for key in KEYS:
        dq, dp = plan_for(key).columns("dq"), plan_for(key).columns("dp")
        is_apart = dq.start >= dp.end
        assert is_apart == (key.head_dim == 64) == (not plan_bwd.dq_overlays_dp(key))


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda p: {"tmem": (*p.tmem, TmemRange("more", 40, 4))}, "overlap"),
        (lambda p: {"tmem": tuple(replace(c, alias_of=None) for c in p.tmem)}, "overlap"),
        (lambda p: {"tmem": tuple(
            replace(c, start=c.start + 64) if c.name == "dq" else c for c in p.tmem)}, "dk and dq"),
        (lambda p: {"roles": (replace(p.roles[0], registers=160), *p.roles[1:])}, "66560"),
        (lambda p: {"edges": (*p.edges, replace(p.edges[0], data="x", consumer="atend"))}, "atend"),
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


def test_the_ledger_names_every_edge_and_the_notes_that_excuse_an_overlap():
    made = plan_for(WIDEST)
    text = ledger(made)
    assert all(re.search(rf"^{edge.data} .*full\(\d", text, re.M) for edge in made.edges)
    for columns in made.tmem:
        assert columns.alias_of is None or f"# {columns.why}" in plan_bwd.__doc__


# ------------------------------------------------------------------------------------- the kernels


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Compiled kernels, by head size and mask class."""
    built = {}

    def kernel(head_dim, mask):
        if (head_dim, mask) not in built:
            key = KernelKey("sm_100f", "bfloat16", head_dim, head_dim, mask)
            folder = tmp_path_factory.mktemp(f"bwd{head_dim}{mask}")
            built[head_dim, mask] = build(folder, "sm100.bwd", key, choose_backward(key))
        return built[head_dim, mask]

    return kernel


def scratch_for(operands, num_sequences, deterministic):
    """Arrays of ``abi.SCRATCH`` that hold nothing of use."""
    (batch, q_len, num_heads, head_dim), (_, kv_len, num_kv_heads, _) = (
        operands.q.shape,
        operands.k.shape,
    )
    rows = abi.scratch_rows(batch, num_sequences, q_len)
    tiles = abi.kv_tiles(batch, num_sequences, kv_len) * num_kv_heads
    splits = abi.head_splits(tiles, num_heads // num_kv_heads)
    sums = (splits, operands.k.size + operands.v.size)
    scratch = {"dq_sum": (num_heads, rows, head_dim), "row_stats": (2, num_heads, rows)}
    scratch |= {"dkv_sums": sums} if splits > 1 else {}
    arrays = {name: np.full(shape, np.nan, np.float32) for name, shape in scratch.items()}
    if deterministic:
        arrays["turns"] = np.full((num_heads, rows // abi.TURN_ROWS), -7, np.int32)
    return arrays


def call(built, case, *, seed=0, deterministic=False, num_sms=2, options=None):
    """Gradients of a case, what they may be, and the report of the main kernel."""
    operands, (dout, dlse) = make(case, "bfloat16")
    wanted = tolerance(operands, case.semantics, (dout, dlse))
    results = {
        name: np.full(array.shape, np.nan, array.dtype)
        for name, array in (("dq", operands.q), ("dk", operands.k), ("dv", operands.v))
    }
    arrays = {
        **operands._asdict(),
        **results,
        **scratch_for(operands, case.num_sequences, deterministic),
        "out": np.asarray(wanted.rounded.out).astype(ml_dtypes.bfloat16),
        "lse": np.asarray(wanted.rounded.lse, np.float32),
        "dout": dout,
        "dlse": np.asarray(dlse, np.float32),
    }
    if operands.sinks is not None:
        arrays["dsinks"] = results["dsinks"] = np.full_like(operands.sinks, np.nan)
    memory, band = Memory(), case.semantics.band
    arrays = {x: np.ascontiguousarray(y) for x, y in arrays.items() if y is not None}
    values = {
        name: memory.add(name, array.view(np.uint16) if array.itemsize == 2 else array)
        for name, array in arrays.items()
    }
    values |= {"batch": case.batch, "num_sequences": case.num_sequences, "num_sms": num_sms}
    values |= {"q_len": case.q_len, "kv_len": case.kv_len, "deterministic": int(deterministic)}
    values |= {"num_q_heads": case.heads, "num_kv_heads": case.kv_heads}
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
    return got, wanted, reports[1]


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
@pytest.mark.parametrize("seed", range(5))
def test_gradients_of_grouped_heads_are_right_under_any_schedule(kernels, seed):
    got, wanted, report = call(kernels(64, "full"), GROUPED, seed=seed)
    assert_close(got, wanted, "bfloat16")
    assert not report.notes and not report.findings


@needs_dsl
@needs_compiler
@compiles
@pytest.mark.parametrize("completion", ["lazy", "random"])
def test_gradients_are_right_where_dq_overwrites_dp(kernels, completion):
    case = Case("causal", q_len=300, kv_len=300, heads=1, kv_heads=1, head_dim=128, is_causal=True)
    built = kernels(128, "causal")
    got, wanted, _ = call(built, case, options=Options(completion=completion))
    assert_close(got, wanted, "bfloat16")


@needs_dsl
@needs_compiler
@compiles
def test_gradients_are_right_where_everything_hides_keys(kernels):
    got, wanted, _ = call(kernels(128, "general"), EVERYTHING)
    assert_close(got, wanted, "bfloat16")


@needs_dsl
@needs_compiler
@compiles
def test_deterministic_gradients_have_the_same_bits_under_any_schedule(kernels):
    case = Case("deep", q_len=130, kv_len=500, heads=1, kv_heads=1)
    options = Options(resident=3)
    runs = [
        call(kernels(64, "full"), case, seed=seed, deterministic=True, num_sms=4, options=options)
        for seed in range(10)
    ]
    first, wanted, _ = runs[0]
    assert_close(first, wanted, "bfloat16")
    for got, _, _ in runs[1:]:
        for name in ("dq", "dk", "dv"):
            assert getattr(got, name).tobytes() == getattr(first, name).tobytes(), name


@needs_dsl
@needs_compiler
@compiles
def test_every_tile_moves_what_the_model_counts(kernels):
    """One tile of keys, two of queries, D = 128: bytes at 128 a cycle."""
    case = Case("count", q_len=256, kv_len=128, heads=1, kv_heads=1, head_dim=128, is_causal=True)
    _, _, report = call(kernels(128, "causal"), case)
    heads = WIDEST.head_dim, WIDEST.value_dim
    cycles = roofline.backward_smem_cycles(roofline.gpu_of("sm100"), heads)
    products = sum(count for what, count in cycles.items() if " reads " in what)
    assert report.counters["bytes tcgen05.mma operands"] == 2 * 128 * products
    assert report.counters["bytes bulk reduction"] == 2 * 128 * cycles["dQ is read"]
