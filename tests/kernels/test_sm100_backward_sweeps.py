"""The Blackwell backward of two sweeps (D = 256) on the emulator: faults, fixed order, bytes."""

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
    NO_WAIT,
    UNWRITTEN,
    WAIT,
    assert_right_with_the_same_bits,
    call,
    compiles,
    plan_for,
    spoiled,
    with_text,
    without,
)

from jax_fa.analysis import roofline
from jax_fa.emulator import EmulationError, Options
from jax_fa.spec.config import choose_backward
from jax_fa.spec.key import KernelKey

KEY = KernelKey("sm_100f", "bfloat16", 256, 256, "full")
SWEEP = Case("sweep", q_len=230, kv_len=128, heads=1, kv_heads=1, head_dim=256)
"""Four query tiles, the last partly used: every ring goes round in either sweep."""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """The compiled kernel of ``KEY``."""
    return prebuilt(tmp_path_factory.mktemp("bwd"), "sm100.bwd", KEY, choose_backward(KEY))


@needs_dsl
@needs_compiler
@compiles
def test_gradients_are_right_where_everything_hides_keys(tmp_path):
    key = replace(KEY, mask="general")
    built = prebuilt(tmp_path, "sm100.bwd", key, choose_backward(key))
    for deterministic in (False, True):
        case = replace(EVERYTHING, head_dim=256)
        got, wanted, *_ = call(built, case, deterministic=deterministic)
        assert_close(got, wanted, "bfloat16")


@needs_dsl
@needs_compiler
@compiles
def test_deterministic_gradients_have_the_same_bits_under_any_schedule(kernel):
    case, options = replace(SWEEP, q_len=130, kv_len=300), Options(resident=3)
    runs = [
        call(kernel, case, seed=seed, deterministic=True, num_sms=4, options=options)
        for seed in range(3)
    ]
    assert_right_with_the_same_bits(runs)


@needs_dsl
@needs_compiler
@compiles
def test_every_tile_moves_what_the_model_counts(kernel):
    """128 keys, 256 queries: bytes at 128 a cycle."""
    _, _, report, _ = call(kernel, replace(SWEEP, q_len=256))
    gpu, heads = roofline.gpu_of("sm100"), (KEY.head_dim, KEY.value_dim)
    cycles = roofline.backward_smem_cycles(gpu, heads, sweeps=2)
    products = sum(count for what, count in cycles.items() if " reads " in what)
    assert report.counters["bytes tcgen05.mma operands"] == 2 * 128 * products
    assert report.counters["bytes bulk reduction"] == 2 * 128 * cycles["dQ is read"]


# ----------------------------------------------------------------------------------- single faults

WAITS = (
    "dq dq  stats s stats s dv  stats s dp stats s dp dk  "
    "k q  q dout p  dout dout  q q ds dq_empty  "
    "k_empty  q_empty stats_empty dout_empty  q_empty q_empty stats_empty dout_empty dout_empty "
    "q_empty q_empty stats_empty"
).split()
"""The purpose of each wait of the roles reduce (deterministic or not), compute (masked or not, in
both sweeps), mma and load, in the order of the text, but for the last of load."""
PRODUCTS = "s s dv  dp dp s dk dq dq".split()
"""What each product of the role mma is for, in the order of the text."""
PRODUCT = r"(tcgen05\.mma\S*\s+)(\[%r\d+\]), (\[?%rd?\d+\]?),"


def without_wait(name, number):
    """Drops the ``number``-th wait for ``name``."""
    place = [i for i, wait in enumerate(WAITS) if wait == name][number]
    return with_text(WAIT, NO_WAIT, place)


def with_count(data, side, count):
    """Lets a barrier of an edge of one stage wait for ``count`` arrivals."""
    place = plan_for(KEY).first_mbarrier(data) + (side == "empty")
    return with_text(COUNT, rf"\1, {count};", place)


def second_as_first(name, place):
    """The second product of a name gets an operand of the first: 0 for where it adds, 1 for A."""
    first, second = [i for i, product in enumerate(PRODUCTS) if product == name][:2]

    def spoil(built):
        start = re.search(r"\.entry kernel_cutlass_kernel", built.ptx).start()
        products = re.findall(PRODUCT, built.ptx[start:])
        assert len(products) == len(PRODUCTS)
        operands = list(products[second][1:])
        operands[place] = products[first][1 + place]
        return spoiled(built, PRODUCT, rf"\1{', '.join(operands)},", second)

    return spoil


# Of the role reduce, loads of dQ where additions have no order, up to the arrival behind them.
LOADS = r"(?s)(tcgen05\.ld\.[^;]*;.*?tcgen05\.wait::ld[^;]*;)(.*?mbarrier\.arrive\.[^;]*;[^:]*:)"
LAZY = Options("lazy")
# A warp of the role reduce, and one of the role compute, lag behind the others.
SLOW_REDUCE, SLOW_COMPUTE = (Options("eager", starved=warp) for warp in (0, 4))
# The third wait for stats_empty is not among them: the queries loaded before take the place of some
# whose dK has retired, and dK waited until everybody had read their statistics.
FAULTS = {
    "dv before p": (LAZY, without_wait("p", 0), HAZARD),
    "dv is read before its commit": (LAZY, without_wait("dv", 0), HAZARD),
    "dk before dv is read and ds made": (
        LAZY,
        without_wait("ds", 0),
        "Uninitialized.*never written",
    ),
    "dq is read before its commit": (LAZY, without_wait("dq", 1), UNWRITTEN),
    "dq overwrites dq that is not read": (SLOW_REDUCE, without_wait("dq_empty", 0), "Deadlock"),
    "dq is given back before it is read": (SLOW_REDUCE, with_text(LOADS, r"\2 \1", 1), "dq: error"),
    "one arrival too few for dq": (SLOW_REDUCE, with_count("dq", "empty", 3), "Deadlock"),
    "a piece of dq too early": (
        LAZY,
        without(r"cp\.async\.bulk\.wait_group\.read"),
        f"{HAZARD}the bulk reduction",
    ),
    "one arrival too few for ds": (
        SLOW_COMPUTE,
        with_count("ds", "full", 7),
        "Uninitialized.*never written",
    ),
    "stats overwrite those of the first sweep": (
        SLOW_COMPUTE,
        without_wait("stats_empty", 0),
        "Deadlock",
    ),
    "stats of the second sweep overwrite the last of the first": (
        SLOW_COMPUTE,
        without_wait("stats_empty", 1),
        "Deadlock",
    ),
    "tensor memory is given back before all is read": (
        SLOW_COMPUTE,
        without(r"bar\.sync\s+1, 384"),
        "TMEM columns .* are not allocated",
    ),
    "half of v is multiplied before it arrives": (LAZY, without_wait("dout", 2), HAZARD),
    "q of the second sweep before it arrives": (LAZY, without_wait("q", 3), HAZARD),
    "v overwrites dout": (LAZY, without_wait("dout_empty", 2), HAZARD),
    "q overwrites the last of the first sweep": (LAZY, without_wait("q_empty", 2), HAZARD),
    "q overwrites q": (LAZY, without_wait("q_empty", 4), HAZARD),
    "halves of v are one": (LAZY, second_as_first("dp", 1), "dq: error"),
    "halves of dq are of one half of k": (LAZY, second_as_first("dq", 1), "dq: error"),
    "halves of dq in the same columns": (LAZY, second_as_first("dq", 0), UNWRITTEN),
    "s of every tile in the same columns": (
        LAZY,
        second_as_first("s", 0),
        f"{HAZARD}|{UNWRITTEN}",
    ),
}
"""How to run, fault, and what the emulator or the oracle says of it."""


@needs_dsl
@needs_compiler
@compiles
def test_every_wait_of_the_kernel_is_known(kernel):
    text = kernel.ptx[re.search(r"\.entry kernel_cutlass_kernel", kernel.ptx).start() :]
    tails = sum(edge.stages for edge in plan_for(KEY).edges if edge.kind == "tma_umma")
    assert len(re.findall(WAIT, text)) == len(WAITS) + tails


@needs_dsl
@needs_compiler
@compiles
def test_the_kernel_without_faults_passes(kernel):
    for options in (LAZY, SLOW_REDUCE, SLOW_COMPUTE):
        got, wanted, *_ = call(kernel, SWEEP, options=options)
        assert_close(got, wanted, "bfloat16")


@needs_dsl
@needs_compiler
@compiles
@pytest.mark.parametrize("fault", FAULTS)
def test_a_single_fault_is_noticed(kernel, fault):
    options, spoil, complaint = FAULTS[fault]
    built = spoil(kernel)
    with pytest.raises((EmulationError, AssertionError)) as caught:
        got, wanted, *_ = call(built, SWEEP, options=options)
        assert_close(got, wanted, "bfloat16")
    text = f"{type(caught.value).__name__} {caught.value}"
    assert re.search(complaint, text, re.S), text
