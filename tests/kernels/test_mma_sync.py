"""Kernels for mma.sync: their plans, their tiles, and single faults that have to be noticed."""

import re
from dataclasses import replace

import pytest
import test_bias
import test_bias_faults
from helpers.cases import Case, make
from helpers.oracle import assert_close, tolerance
from helpers.recording import needs_compiler, needs_dsl, prebuilt
from test_sm100_backward import call
from test_split_keys import run

from jax_fa.analysis import audit, banks
from jax_fa.emulator import Options
from jax_fa.emulator.faults import EmulationError
from jax_fa.kernels.edges import PlanError
from jax_fa.kernels.mma_sync import plan, plan_bwd, plan_dbias, plan_few
from jax_fa.kernels.mma_sync.panels import Panels
from jax_fa.spec.config import choose_backward, choose_dbias, choose_forward
from jax_fa.spec.key import KernelKey
from jax_fa.spec.variants import VARIANTS

KEY = KernelKey("sm_80", "bfloat16", 64, 64, "causal")
FEW = replace(KEY, mask="general", is_split=True, is_few=True)
COLUMNS = replace(KEY, head_dim=128, value_dim=128)
"""Two warps share columns in its backward, of 128 keys; its forward has one stage of values."""
SMALL = replace(COLUMNS, arch="sm_86")
"""Its backward has 64 keys, and one stage of queries and dO."""
ONE = replace(KEY, head_dim=96, value_dim=96)
"""Its forward has one stage of keys and one of values."""
WIDE = replace(KEY, head_dim=256, value_dim=256)
"""Of two warps, one computes dV and the other dK in its backward."""
PARTS = replace(WIDE, arch="sm_86")
"""Its backward loads a block of queries in parts."""
FOUR = replace(KEY, arch="sm_120")
"""Its backward adds four floats at a time."""
BIASED = replace(KEY, mask="general", has_bias=True)
TWO = replace(KEY, mask="general")
"""Its forward has two stages of both, and a branch for blocks that hide keys."""
OURS = [variant for variant in VARIANTS if variant.kernels == "mma_sync"]
FORWARDS = {"two": TWO, "values": COLUMNS, "one": ONE, "fwd": KEY}
CASE = Case("growing", q_len=200, kv_len=260, heads=2, kv_heads=1, is_causal=True)
"""Two tiles of queries; ragged on both sides."""
COLUMNS_CASE = replace(CASE, name="columns", q_len=130, kv_len=160, head_dim=128)
SMALL_CASE = replace(COLUMNS_CASE, kv_len=100)
"""Both: two tiles of keys and three blocks of queries."""
WIDE_CASE = replace(CASE, name="wide", q_len=90, kv_len=100, head_dim=256)
"""Two tiles of keys and two blocks of queries."""
BACKWARD_CASES = {
    "columns": COLUMNS_CASE,
    "small": SMALL_CASE,
    "wide": WIDE_CASE,
    "parts": WIDE_CASE,
}
FEW_CASE = Case("few", batch=2, q_len=3, kv_len=600, heads=6, kv_heads=2, kv_lengths=(600, 50))
"""Several blocks of keys for one sequence; for the other, some warps see none."""
SCHEDULES = tuple(
    Options(completion, starved=starved, max_segments=400_000)
    for completion, starved in (("lazy", None), ("eager", 0), ("eager", 3), ("random", 1))
)
"""Single warps lag behind the others: what is right only while all keep pace is wrong then."""


# --------------------------------------------------------------------------------------- plans


def plan_of(variant):
    """The checked plan of a variant."""
    if variant.key.is_few:
        return plan_few.few_plan(variant.key, choose_forward(variant.key))
    choose, make_plan = {
        "fwd": (choose_forward, plan.forward_plan),
        "bwd": (choose_backward, plan_bwd.backward_plan),
        "dbias": (choose_dbias, plan_dbias.dbias_plan),
    }[variant.operation]
    return make_plan(variant.key, choose(variant.key))


@pytest.mark.parametrize("variant", OURS, ids=lambda variant: variant.name)
def test_every_plan_fits_the_gpus_that_run_it(variant):
    made = plan_of(variant)
    assert made.smem_bytes <= audit.smem_capacity(variant)
    assert made.threads * 256 <= 65536


KB = 1024
AMPERE, SMALLEST = 164 * KB, 100 * KB
"""Shared memory of an SM of 8.0, and of 8.6, 8.9 and 12.x; a CTA takes 1 KB beside its own."""


@pytest.mark.parametrize(
    ("arch", "operation", "head_dim", "capacity"),
    [
        ("sm_80", "fwd", 64, SMALLEST),
        ("sm_80", "fwd", 96, SMALLEST),
        ("sm_80", "fwd", 128, AMPERE),
        ("sm_80", "fwd", 192, AMPERE),
        ("sm_80", "bwd", 64, AMPERE),
        ("sm_80", "bwd", 96, SMALLEST),
        ("sm_80", "bwd", 128, AMPERE),
        ("sm_80", "fwd", 256, AMPERE),
        ("sm_80", "bwd", 256, AMPERE),
        ("sm_86", "fwd", 128, SMALLEST),
        ("sm_86", "fwd", 256, SMALLEST),
        ("sm_86", "bwd", 256, SMALLEST),
        ("sm_120", "fwd", 64, SMALLEST),
        ("sm_120", "fwd", 96, SMALLEST),
        ("sm_120", "fwd", 128, SMALLEST),
    ],
)
def test_an_sm_holds_eight_warps(arch, operation, head_dim, capacity):
    """Else a scheduler has one warp, which waits for products and exponentials in turn."""
    found = [
        plan_of(variant)
        for variant in OURS
        if (variant.key.arch, variant.operation, variant.key.head_dim)
        == (arch, operation, head_dim)
        and not (variant.key.is_few or variant.key.has_bias)
    ]
    assert found
    for made in found:
        ctas = capacity // ((-(-made.smem_bytes // KB) + 1) * KB)
        assert ctas * made.threads >= 8 * 32


@pytest.mark.parametrize("target", ["sm_86", "sm_120"])
def test_tiles_of_an_a100_do_not_fit_where_an_sm_has_100_kb(target):
    key = replace(WIDE, arch=target)
    with pytest.raises(PlanError, match="bytes of smem of 101376"):
        plan.forward_plan(key, choose_forward(WIDE))
    for roomy in (WIDE, COLUMNS):
        with pytest.raises(PlanError, match="bytes of smem of 101376"):
            plan_bwd.backward_plan(replace(roomy, arch=target), choose_backward(roomy))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"block_kv": 256}, "bytes of smem of 166912"),
        ({"stages": 3}, "1 stages of values, 3 of keys"),
        ({"stages": 1, "value_stages": 2}, "2 stages of values, 1 of keys"),
        ({"block_kv": 24}, "128 threads do not share 24 rows evenly"),
        ({"warps": 3}, "warpgroups"),
    ],
)
def test_a_forward_that_does_not_fit_is_refused(change, complaint):
    key = replace(KEY, head_dim=128, value_dim=128)
    with pytest.raises(PlanError, match=complaint):
        plan.forward_plan(key, replace(choose_forward(key), **change))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [({"stages": 4}, "bytes of smem of 166912"), ({"warps": 2}, "warpgroups")],
)
def test_a_backward_that_does_not_fit_is_refused(change, complaint):
    key = replace(KEY, head_dim=128, value_dim=128)
    with pytest.raises(PlanError, match=complaint):
        plan_bwd.backward_plan(key, replace(choose_backward(key), **change))


@needs_dsl
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of the DSL, within the DSL
def test_shared_memory_holds_all_of_a_tile_but_that_there_is_one():
    from jax_fa.kernels import tiles

    assert plan.TILE_WORDS == len(set(tiles.Tile._fields) - {"is_valid"})


@pytest.mark.parametrize("columns", [16, 32, 64, 96, 128, 192, 256])
def test_pieces_lie_where_the_count_of_bank_conflicts_has_them(columns):
    tile, counted = Panels(48, columns), banks.Tile(48, columns, columns)
    pieces = [
        (row, column, tile.beside(tile.place(row, column // 8 % 2), column // 16 * 16))
        for row in range(48)
        for column in range(0, columns, 8)
    ]
    assert all(place == counted.address(row, column) for row, column, place in pieces)
    assert len({place for _, _, place in pieces}) == len(pieces)


# -------------------------------------------------------------------------------------- faults


@pytest.fixture(scope="module")
def faultless(tmp_path_factory):
    """The kernels without a fault."""
    kinds = {
        "few": ("mma_sync.few", FEW, choose_forward(FEW)),
        "fwd": ("mma_sync.fwd", KEY, choose_forward(KEY)),
        "two": ("mma_sync.fwd", TWO, choose_forward(TWO)),
        "values": ("mma_sync.fwd", COLUMNS, choose_forward(COLUMNS)),
        "one": ("mma_sync.fwd", ONE, choose_forward(ONE)),
        "bwd": ("mma_sync.bwd", KEY, choose_backward(KEY)),
        "columns": ("mma_sync.bwd", COLUMNS, choose_backward(COLUMNS)),
        "small": ("mma_sync.bwd", SMALL, choose_backward(SMALL)),
        "wide": ("mma_sync.bwd", WIDE, choose_backward(WIDE)),
        "parts": ("mma_sync.bwd", PARTS, choose_backward(PARTS)),
        "four": ("mma_sync.bwd", FOUR, choose_backward(FOUR)),
        "dbias": ("mma_sync.dbias", BIASED, choose_dbias(BIASED)),
    }
    return {name: prebuilt(tmp_path_factory.mktemp(name), *kind) for name, kind in kinds.items()}


def growing(head_dim):
    """Operands whose scores grow along the way, so that maxima are raised by much."""
    operands = make(replace(CASE, head_dim=head_dim), "bfloat16").operands
    operands.k[:, :128] *= 32
    return operands


def check(operation, built):
    """Asserts that a kernel is right under every schedule."""
    for options in SCHEDULES:
        if operation == "few":
            operands = make(FEW_CASE, "bfloat16").operands
            got = run(built, operands, FEW_CASE.semantics, num_splits=1, seed=1, options=options)
            assert_close(got, tolerance(operands, FEW_CASE.semantics), "bfloat16")
        elif operation == "dbias":
            for biased in (test_bias_faults.SHARED, test_bias_faults.BY_KEY):
                given = test_bias.given_of(biased)
                got = test_bias.call(built, operation, given, options=options)
                test_bias.check(got, given)
        elif operation not in FORWARDS:
            got, wanted, *_ = call(built, BACKWARD_CASES.get(operation, CASE), options=options)
            assert_close(got, wanted, "bfloat16")
        else:
            operands = growing(FORWARDS[operation].head_dim)
            got = run(built, operands, CASE.semantics, num_splits=1, seed=1, options=options)
            assert_close(got, tolerance(operands, CASE.semantics), "bfloat16")


def without(pattern, number, text):
    """``text`` without the instruction that matches for the time ``number``."""
    found = list(re.finditer(pattern + r"[^;]*;", text))
    at = found[number]
    return text[: at.start()] + text[at.end() :]


def everywhere(pattern, replacement, text):
    """``text`` with a replacement, which there has to be."""
    changed, number = re.subn(pattern, replacement, text)
    assert number
    return changed


# In backwards, those of the steps of a deterministic run come first, in "bwd" and "columns" last.
WAIT, BARRIER = r"cp\.async\.wait_group", r"bar\.sync"
FAULTS = {
    "two-queries are not awaited": ("two", lambda t: without(WAIT, 0, t)),
    "two-masked keys are not awaited": ("two", lambda t: without(WAIT, 1, t)),
    "two-keys are not awaited": ("two", lambda t: without(WAIT, 2, t)),
    "two-queries of other warps are not awaited": ("two", lambda t: without(BARRIER, 2, t)),
    "two-masked keys of other warps are not awaited": ("two", lambda t: without(BARRIER, 3, t)),
    "fwd-values are not transposed": (
        "fwd",
        lambda t: everywhere(r"\.x4\.trans\.", ".x4.", t),
    ),
    "fwd-rows behind the last are read": (
        "fwd",
        lambda t: everywhere(r"(cp\.async\.cg[^;]*, 16), %r\d+;", r"\1;", t),
    ),
    "fwd-out is not rescaled": (
        "fwd",
        lambda t: everywhere(r"min\.u32 (%r\d+), (%r\d+), 1;", r"min.u32 \1, \2, 0;", t),
    ),
    "fwd-one lane's maximum stands for the row": (
        "fwd",
        lambda t: everywhere(r"(shfl\.sync\.bfly\.b32[^;]*), 2, 31,", r"\1, 0, 31,", t),
    ),
    "values-masked keys are not awaited": ("values", lambda t: without(WAIT, 0, t)),
    "values-masked values are not awaited": ("values", lambda t: without(WAIT, 1, t)),
    "values-keys are not awaited": ("values", lambda t: without(WAIT, 2, t)),
    "values-values are not awaited": ("values", lambda t: without(WAIT, 3, t)),
    "values-keys of other warps are not awaited": ("values", lambda t: without(BARRIER, 2, t)),
    "values-values of other warps are not awaited": ("values", lambda t: without(BARRIER, 3, t)),
    "one-keys are not awaited": ("one", lambda t: without(WAIT, 2, t)),
    "one-values are not awaited": ("one", lambda t: without(WAIT, 3, t)),
    "one-keys of other warps are not awaited": ("one", lambda t: without(BARRIER, 2, t)),
    "one-values of other warps are not awaited, keys replaced": (
        "one",
        lambda t: without(BARRIER, 3, t),
    ),
    "bwd-queries are not awaited": ("bwd", lambda t: without(WAIT, 0, t)),
    "bwd-queries of other warps are not awaited": ("bwd", lambda t: without(BARRIER, 2, t)),
    "bwd-dS of other warps is not awaited": ("bwd", lambda t: without(BARRIER, 3, t)),
    "bwd-words of a tile are replaced while they are read": (
        "bwd",
        lambda t: without(BARRIER, 0, t),
    ),
    "bwd-words of a tile are not awaited": ("bwd", lambda t: without(BARRIER, 1, t)),
    "four-keys are replaced while they are read": ("four", lambda t: without(BARRIER, 0, t)),
    "bwd-additions overwrite": (
        "bwd",
        lambda t: everywhere(r"red\.relaxed\.gpu\.global\.add\.f32", "st.global.f32", t),
    ),
    "bwd-dS is not transposed": (
        "bwd",
        lambda t: everywhere(r"\.x4\.trans\.", ".x4.", t),
    ),
    "columns-queries are not awaited": ("columns", lambda t: without(WAIT, 0, t)),
    "columns-queries of other warps are not awaited": ("columns", lambda t: without(BARRIER, 2, t)),
    "columns-P and dS of others are not awaited": ("columns", lambda t: without(BARRIER, 3, t)),
    "small-queries are not awaited": ("small", lambda t: without(WAIT, 1, t)),
    "small-queries of other warps are not awaited": ("small", lambda t: without(BARRIER, 7, t)),
    "small-P and dS of others are not awaited": ("small", lambda t: without(BARRIER, 8, t)),
    "small-queries are replaced while they are read": ("small", lambda t: without(BARRIER, 9, t)),
    "four-additions overwrite": (
        "four",
        lambda t: everywhere(r"red\.relaxed\.gpu\.global\.add\.v4\.f32", "st.global.v4.f32", t),
    ),
    "few-queries are not awaited": ("few", lambda t: without(WAIT, 0, t)),
    "few-queries of other warps are not awaited": ("few", lambda t: without(BARRIER, 2, t)),
    "few-a block is not awaited": ("few", lambda t: without(WAIT, 1, t)),
    "few-a block of other warps is not awaited": ("few", lambda t: without(BARRIER, 3, t)),
    "few-sums go where keys are still read": ("few", lambda t: without(BARRIER, 4, t)),
    "few-sums of other warps are not awaited": ("few", lambda t: without(BARRIER, 5, t)),
    "dbias-queries are not awaited": ("dbias", lambda t: without(WAIT, 0, t)),
    "dbias-dO is not awaited": ("dbias", lambda t: without(WAIT, 1, t)),
    "dbias-keys are replaced while they are read": ("dbias", lambda t: without(BARRIER, 0, t)),
    "dbias-keys of other warps are not awaited": ("dbias", lambda t: without(BARRIER, 1, t)),
    "dbias-values of other warps are not awaited": ("dbias", lambda t: without(BARRIER, 2, t)),
}
FAULTS_OF_TWO_RESULTS = {
    "queries are not awaited": lambda t: without(WAIT, 1, t),
    "queries of other warps are not awaited": lambda t: without(BARRIER, 8, t),
    "P of the other warp is not awaited": lambda t: without(BARRIER, 10, t),
    "dS of other warps is not awaited": lambda t: without(BARRIER, 11, t),
}
FAULTS |= {
    f"{operation}-{fault}": (operation, edit)
    for operation in ("wide", "parts")
    for fault, edit in FAULTS_OF_TWO_RESULTS.items()
}


@pytest.mark.parametrize("operation", ["few", *FORWARDS, "bwd", *BACKWARD_CASES, "four", "dbias"])
@pytest.mark.filterwarnings("default::DeprecationWarning")
@needs_dsl
@needs_compiler
def test_kernels_without_a_fault_are_right(faultless, operation):
    check(operation, faultless[operation])


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.filterwarnings("default::DeprecationWarning")
@needs_dsl
@needs_compiler
def test_a_fault_is_noticed(faultless, name):
    operation, edit = FAULTS[name]
    built = faultless[operation]
    with pytest.raises((EmulationError, AssertionError)):
        check(operation, built._replace(ptx=edit(built.ptx)))
