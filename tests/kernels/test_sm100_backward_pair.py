"""The Blackwell backward of two CTAs that share products: its plan, and kernels on the emulator."""

import re
from dataclasses import replace

import pytest
from helpers.cases import Case
from helpers.oracle import assert_close
from helpers.recording import needs_compiler, needs_dsl, prebuilt
from test_sm100_backward import (
    COUNT,
    EVERYTHING,
    HAZARD,
    KEYS,
    NO_WAIT,
    STRANGERS,
    WAIT,
    assert_right_with_the_same_bits,
    call,
    plan_for,
    spoiled,
    with_text,
    without,
)

from jax_fa.analysis import roofline
from jax_fa.emulator import EmulationError, Options
from jax_fa.kernels.edges import PlanError, arrivals
from jax_fa.kernels.sm100 import plan_bwd
from jax_fa.spec.config import choose_backward
from jax_fa.spec.key import KernelKey

KEY = KernelKey("sm_100f", "bfloat16", 128, 128, "full")
HEADS = KEY.head_dim, KEY.value_dim
CONFIG = choose_backward(KEY)

# ---------------------------------------------------------------------------------------- the plan


def test_heads_of_128_are_worked_on_in_pairs_whatever_the_mask():
    paired = {(key.head_dim, key.value_dim) for key in KEYS if plan_for(key).ctas == 2}
    alone = {(key.head_dim, key.value_dim) for key in KEYS if plan_for(key).ctas == 1}
    assert paired == {(128, 128)} and (128, 128) not in alone
    with pytest.raises(PlanError, match=r"128, 128, 128, 256, not \(64, 64"):
        plan_bwd.backward_plan(replace(KEY, head_dim=64, value_dim=64), CONFIG)


def test_shared_memory_takes_no_more_cycles_than_the_tensor_core():
    """By tile and CTA, in 128 bytes a cycle: 2688 are allowed, and one CTA has 3328 (model)."""
    gpu = roofline.gpu_of("sm100")
    cycles = roofline.backward(gpu, HEADS, CONFIG.staged, ctas=CONFIG.ctas)
    assert (cycles.smem, cycles.mma) == (2560, 2560)
    assert cycles.smem <= 2688 < roofline.backward(gpu, HEADS).smem
    parts = roofline.backward_smem_cycles(gpu, HEADS, CONFIG.staged, ctas=CONFIG.ctas)
    assert parts["dS is sent"] == parts["dS is received"] == 128
    assert parts["dQ is written"] == parts["dQ is read"] == 256


def test_edges_of_products_cross_the_pair_and_what_threads_do_counts_for_both_ctas():
    made = plan_for(KEY)
    crossing = {edge.data for edge in made.edges if made.crosses(edge)}
    loaded = {"k", "k_columns", "v", "q", "q_columns", "dout", "dout_columns"}
    assert crossing == loaded | {"s", "p", "dp", "ds", "dq", "dv", "dk", "halves"}
    full = {edge.data: arrivals(made, edge, "full") for edge in made.edges}
    empty = {edge.data: arrivals(made, edge, "empty") for edge in made.edges}
    assert (full["p"], full["ds"], full["halves"], full["half"]) == (16, 16, 2, 1)
    assert (empty["dq"], empty["dv"], empty["ds"], empty["half"]) == (8, 16, 1, 0)


def test_halves_of_a_pair_are_half_of_what_a_tile_needs():
    made = plan_for(KEY)
    sizes = {edge.data: edge.stage_bytes for edge in made.edges}
    tile = 128 * 128 * 2
    assert {sizes[name] for name in ("k", "v", "k_columns")} == {tile}
    halves = ("q", "q_columns", "dout", "dout_columns", "half")
    assert {sizes[name] for name in halves} == {tile // 2}


# ------------------------------------------------------------------------------------- the kernels

compiles = pytest.mark.filterwarnings("default::DeprecationWarning")  # of the DSL, within the DSL


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Compiled kernels, by mask class."""
    built = {}

    def kernel(mask):
        if mask not in built:
            key = replace(KEY, mask=mask)
            folder = tmp_path_factory.mktemp(f"pair_{mask}")
            built[mask] = prebuilt(folder, "sm100.bwd", key, choose_backward(key))
        return built[mask]

    return kernel


def one_head(name, q_len, kv_len, **more):
    return Case(name, q_len=q_len, kv_len=kv_len, heads=1, kv_heads=1, head_dim=128, **more)


GROUPED = Case("grouped", q_len=200, kv_len=300, heads=4, kv_heads=2, has_sinks=True, head_dim=128)
"""Query tiles of two heads; of the last tile of keys, all of the second CTA's do not exist."""
SHORT = one_head("short", 10, 70)
"""One step, and the second CTA has neither keys nor queries."""
DIAGONAL = one_head("diagonal", 300, 300, is_causal=True)
PACKED = Case(
    "packed",
    q_len=300,
    kv_len=420,
    cu_q=(0, 130, 150, 300),
    cu_k=(0, 60, 100, 420),
    heads=1,
    kv_heads=1,
    head_dim=128,
)
"""Sequences of which both, the first, or neither CTA of a pair has keys."""
EMPTY = Case(
    "empty",
    batch=2,
    q_len=150,
    kv_len=260,
    heads=1,
    kv_heads=1,
    head_dim=128,
    q_lengths=(0, 130),
    kv_lengths=(130, 0),
)


@needs_dsl
@needs_compiler
@compiles
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "mask, case", [("full", GROUPED), ("causal", DIAGONAL), ("general", EVERYTHING)], ids=str
)
def test_gradients_are_right_under_any_schedule(kernels, mask, case, seed):
    got, wanted, report, _ = call(kernels(mask), case, seed=seed)
    assert_close(got, wanted, "bfloat16")
    assert not report.notes and not report.findings


@needs_dsl
@needs_compiler
@compiles
@pytest.mark.parametrize("completion", ["lazy", "random"])
@pytest.mark.parametrize(
    "mask, case",
    [("full", SHORT), ("general", PACKED), ("general", STRANGERS), ("general", EMPTY)],
    ids=str,
)
def test_gradients_are_right_where_a_cta_has_little_to_do(kernels, mask, case, completion):
    got, wanted, *_ = call(kernels(mask), case, options=Options(completion=completion))
    assert_close(got, wanted, "bfloat16")


@needs_dsl
@needs_compiler
@compiles
@pytest.mark.parametrize(
    "mask, case",
    [
        ("full", one_head("deep", 130, 900)),
        ("causal", one_head("deep", 300, 600, is_causal=True)),
        ("causal", replace(one_head("group", 300, 600, is_causal=True), heads=2)),
    ],
    ids=str,
)
def test_deterministic_gradients_have_the_same_bits_under_any_schedule(kernels, mask, case):
    options = Options(resident=3, completion="random")
    runs = [
        call(kernels(mask), case, seed=seed, deterministic=True, num_sms=6, options=options)
        for seed in range(10)
    ]
    assert_right_with_the_same_bits(runs)


@needs_dsl
@needs_compiler
@compiles
def test_every_tile_moves_what_the_model_counts(kernels):
    """One tile of keys, two of queries, two CTAs: bytes at 128 a cycle."""
    _, _, report, _ = call(kernels("full"), one_head("count", 256, 256))
    gpu = roofline.gpu_of("sm100")
    cycles = roofline.backward_smem_cycles(gpu, HEADS, CONFIG.staged, ctas=CONFIG.ctas)
    products = sum(count for what, count in cycles.items() if " reads " in what)
    tiles = 2 * 2
    assert report.counters["bytes tcgen05.mma operands"] == tiles * 128 * products
    assert report.counters["bytes bulk reduction"] == tiles * 128 * cycles["dQ is read"]
    assert report.counters["bytes cluster copy"] == tiles * 128 * cycles["dS is sent"]


# ----------------------------------------------------------------------------------- single faults

# A warp of the role reduce, and one of the role compute, lag behind the others.
SCHEDULES = tuple(
    Options(completion, starved=starved)
    for completion, starved in (("lazy", None), ("eager", 0), ("eager", 11), ("random", None))
)
STEP = "stats s dp ds_empty "
WAITS = (
    f"dq dq {STEP * 2} dv dk ds_tail "
    "k dq_empty q v dout dv_empty dk_empty p dout_columns k_columns "
    "dq_empty q ds q_columns dout p halves dout_columns  ds q_columns halves dq_empty "
    "load_k load_q load_stats load_v load_dout load_dout_columns load_k_columns "
    "load_q load_stats load_q_columns load_dout load_dout_columns load_q_columns "
    "tail tail tail tail tail tail tail half"
).split()
"""The purpose of each wait of the roles reduce (deterministic or not), compute (masked or not),
mma, load and relay, in the order of the text of the kernel for full masks."""
COMMITS = (
    "s q dp dout dout_columns  s q q_columns dp dout ds dq dout_columns  "
    "k v dv q_columns dk ds dq k_columns"
).split()
"""What each commit of the role mma tells, in the order of the text."""
SEND = r"cp\.async\.bulk\.shared::cluster\.shared::cta[^;]*;"
REMOTE = r"mbarrier\.arrive\.shared::cluster\.b64"
CLUSTER = r"barrier\.cluster\.arrive;(.*?)barrier\.cluster\.wait;"


def without_wait(name, number=0):
    """Drops the ``number``-th wait for ``name``."""
    place = [i for i, wait in enumerate(WAITS) if wait == name][number]
    return with_text(WAIT, NO_WAIT, place)


def without_commit(name, number=0):
    """Drops the ``number``-th commit that tells ``name``."""
    place = [i for i, commit in enumerate(COMMITS) if commit == name][number]
    return without(r"tcgen05\.commit", place)


def with_count(data, side, count):
    """Lets a barrier of an edge of one stage wait for ``count`` arrivals."""
    place = plan_for(KEY).first_mbarrier(data) + (side == "empty")
    return with_text(COUNT, rf"\1, {count};", place)


def without_cluster_barrier(number):
    """Drops the barrier of the cluster at the start, or at the end."""
    return lambda built: spoiled(
        built, re.compile(CLUSTER, re.S).pattern.replace("(.*?)", r"([^;]*)"), r"\1", number
    )


FAULTS = {
    "the relay tells nobody": (without(REMOTE, -1), "Deadlock"),
    "the relay does not wait": (without_wait("half"), f"{HAZARD}|Uninitialized"),
    "mma waits for one half": (with_count("halves", "full", 1), f"{HAZARD}|Deadlock"),
    "the last dQ before the exchange": (without_wait("halves", 1), f"{HAZARD}|d[qk]: error"),
    "the first dS is not waited for": (
        without_wait("ds", 0),
        "Deadlock|without tcgen05.wait::st",
    ),
    "dS is not waited for": (without_wait("ds", 1), "overwrites TMEM|without tcgen05.wait::st"),
    "stats are read before they arrive": (without_wait("stats", 1), HAZARD),
    "stats overwrite some that are not read": (without_wait("load_stats", 1), "d[qk]: error"),
    "ds is overwritten": (without_wait("ds_empty", 1), HAZARD),
    "ds is never given back": (without_commit("ds"), "Deadlock"),
    "dQ over S that is not read": (without_wait("p", 1), HAZARD),
    "S over dQ that is not read": (without_wait("dq_empty", 1), HAZARD),
    "the last dQ over the one before": (without_wait("dq_empty", 2), f"{HAZARD}|Deadlock|dq: err"),
    "P over S that is not read": (without(r"bar\.sync\s+1, 256"), f"{HAZARD}|d[vqk]: error"),
    "dS is sent before it is there": (without(r"bar\.sync\s+2, 128"), "while|Fence|Uninit"),
    "dS without fence": (without(r"fence\.proxy\.async", -1), "ProxyFence"),
    "dS goes to the wrong half": (
        with_text(SEND, r"add.s32 target, target, 16384; \g<0>"),
        "while|d[qk]: error|Uninit",
    ),
    "dS stays at home": (
        with_text(r"(mapa\.shared::cluster\.u32 (?:target|barrier), %r\d+), %r\d+;", r"\1, 0;"),
        f"{HAZARD}|Deadlock|more arrivals|Uninit",
    ),
    "too few bytes are expected": (
        with_text(r"(\[target\], \[%r\d+\]), 16384", r"\1, 8192"),
        "Deadlock",
    ),
    "two arrivals too few for p": (
        with_count("p", "full", 14),
        "while|without|d[vqk]: (error|NaN)",
    ),
    "two arrivals too few for ds": (with_count("ds", "full", 14), "while|without|d[qk]: error"),
    "one arrival too few for dq": (with_count("dq", "empty", 7), "while|Deadlock"),
    "no barrier of the cluster at the start": (
        without_cluster_barrier(0),
        "no mbarrier is initialised|Fence|deallocated|TMEM",
    ),
    "tensor memory is given back before all is read": (
        without_cluster_barrier(-1),
        "TMEM columns .* are not allocated",
    ),
}
"""Fault, and what the emulator or the oracle says of it."""


@needs_dsl
@needs_compiler
@compiles
def test_every_wait_and_commit_of_the_kernel_is_known(kernels):
    text = kernels("full").ptx
    text = text[re.search(r"\.entry kernel_cutlass_kernel", text).start() :]
    text = text[: text.find(".entry", 10)]
    assert len(re.findall(WAIT, text)) == len(WAITS)
    assert len(re.findall(r"tcgen05\.commit", text)) == len(COMMITS)


def find(built):
    """Runs a kernel under several schedules until one finds a fault, and raises that."""
    for seed, options in enumerate(SCHEDULES):
        got, wanted, *_ = call(built, one_head("sweep", 384, 256), seed=seed, options=options)
        assert_close(got, wanted, "bfloat16")


@needs_dsl
@needs_compiler
@compiles
def test_the_kernel_without_faults_passes(kernels):
    find(kernels("full"))


@needs_dsl
@needs_compiler
@compiles
@pytest.mark.parametrize("fault", FAULTS)
def test_a_single_fault_is_noticed(kernels, fault):
    spoil, complaint = FAULTS[fault]
    built = spoil(kernels("full"))
    with pytest.raises((EmulationError, AssertionError)) as caught:
        find(built)
    text = f"{type(caught.value).__name__} {caught.value}"
    assert re.search(complaint, text, re.S), text
