"""Heads that no kernel is compiled for run in a larger one, in the emulator: results and shapes.

Arrays have the heads that ``Kernel.array_heads`` says; behind those, kernels fill with zeros.

``test_emulated_cases.py`` runs all cases on complete builds; here some, on whatever kernels serve.
"""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from helpers.cases import BY_NAME, Case, make
from helpers.harness import data, run, wanted
from helpers.oracle import Results, assert_close, tolerance
from helpers.recording import build, needs_compiler, needs_dsl
from test_sm100_backward import call
from test_split_keys import run as run_built

import jax_fa
from jax_fa.emulator.faults import EmulationError
from jax_fa.runtime import bindings, emulation
from jax_fa.runtime.dispatch import Emulation
from jax_fa.spec import variants
from jax_fa.spec.arch import ARCHS, arch_named
from jax_fa.spec.config import choose_backward, choose_forward
from jax_fa.spec.key import KernelKey
from jax_fa.spec.problem import Problem

CASE = BY_NAME["head_dim_48_of_24_segments"]


def served(case, **held):
    """Emulation of a family that this build holds all kernels for which serve ``case``."""
    problem = Problem.of(data(case, "bfloat16").operands, case.semantics)
    compiled = held.get("compiled", bindings.compiled())
    for arch in ARCHS:
        if all(variants.find(problem, arch, x, compiled) for x in ("fwd", "bwd")):
            return Emulation(arch.name)
    pytest.skip(f"this build holds no kernels for {case}")


@pytest.fixture
def executed(monkeypatch):
    """Of every kernel that was run, (D, Dv) of the arrays, and what it is compiled for."""
    runs = []

    def execute(call, inputs, real=emulation.execute):
        assert inputs["q"].shape[-1] == inputs["k"].shape[-1] == call.problem.head_dim
        assert inputs["v"].shape[-1] == call.problem.value_dim
        runs.append((call.operation, call.heads, call.kernel.heads))
        return real(call, inputs)

    monkeypatch.setattr(emulation, "execute", execute)
    return runs


@pytest.mark.parametrize(
    ("name", "heads", "compiled"),
    [
        ("head_dim_1", (8, 8), (64, 64)),
        ("head_dim_8", (8, 8), (64, 64)),
        ("head_dim_40_sinks_causal", (40, 40), (64, 64)),
        ("head_dim_48_of_24_segments", (48, 24), (64, 64)),
        ("head_dim_72_of_96_lengths", (72, 96), (96, 96)),
        ("head_dim_80", (80, 80), (96, 96)),
        ("head_dim_160_of_128_packed", (160, 128), (192, 128)),
    ],
)
def test_narrow_heads_keep_the_tolerance_rule(name, heads, compiled, executed):
    """Output, LSE and all gradients, with a cotangent of the LSE; their shapes are the caller's."""
    case = BY_NAME[name]
    got = run(case, data(case, "bfloat16"), served(case))
    assert_close(got, wanted(case, "bfloat16"), "bfloat16")
    x = data(case, "bfloat16").operands
    assert (got.dq.shape, got.dk.shape, got.dv.shape) == (x.q.shape, x.k.shape, x.v.shape)
    assert got.out.shape == (*x.q.shape[:3], x.v.shape[3])
    assert executed == [("fwd", heads, compiled), ("bwd", heads, compiled)]


def test_forward_and_backward_may_run_in_kernels_of_different_sizes(executed, monkeypatch):
    settings = served(CASE)
    without = {x for x in bindings.compiled() if not re.match(r"fwd_\w+_d(64|96)_", x)}
    if served(CASE, compiled=without) != settings:
        pytest.skip("this build holds no kernels of other sizes")
    monkeypatch.setattr(bindings, "compiled", lambda: frozenset(without))
    got = run(CASE, data(CASE, "bfloat16"), settings)
    assert_close(got, wanted(CASE, "bfloat16"), "bfloat16")
    (*forward, compiled), backward = executed
    assert forward == ["fwd", (48, 24)] and min(compiled) >= 128
    assert backward == ("bwd", (48, 24), (64, 64))


def test_vmap_pads_what_it_folded(executed):
    settings = served(CASE)
    given = data(CASE, "bfloat16")
    options = CASE.options(given.operands)

    def attend(q, k, v):
        with jax_fa.emulation(settings.arch):
            return jax_fa.attention_with_lse(q, k, v, implementation="emulated", **options)

    @jax.jit
    @jax.vmap
    def step(q, k, v, dout, dlse):
        results, pull = jax.vjp(attend, q, k, v)
        return *results, *pull((dout, dlse))

    stacked = [jnp.stack([jnp.asarray(x)] * 2) for x in (*given.operands[:3], *given.cotangents)]
    got = step(*stacked)
    for row in range(2):
        assert_close(Results(*(x[row] for x in got)), wanted(CASE, "bfloat16"), "bfloat16")
    assert executed == [("fwd", (48, 24), (64, 64)), ("bwd", (48, 24), (64, 64))]


def test_explain_says_in_which_kernel_heads_run():
    settings = served(BY_NAME["head_dim_80"])
    shape = jax.ShapeDtypeStruct((1, 64, 2, 80), jnp.bfloat16)
    with jax_fa.emulation(settings.arch):
        text = str(jax_fa.explain(shape, shape, shape, implementation="emulated"))
    form = "_small" if arch_named(settings.arch).kernels("fwd").small else ""
    assert text == (
        f"cpu: emulated (fwd_{settings.arch}_bf16_d96_full{form}): this kernel runs in the "
        f"emulator of {settings.arch}; head sizes 80/80 run in the kernel for 96/96"
    )


# --------------------------------------------------------------------------------- single faults

NARROW = Case("narrow", q_len=70, kv_len=90, heads=2, kv_heads=2, head_dim=40)
MANY = 1 << 20
"""Columns, more than there are."""


def heads_end_where_tiles_do(monkeypatch):
    """Copies to shared memory go on into the columns of the next head."""
    from jax_fa.kernels.mma_sync import bwd_work, fwd_work
    from jax_fa.kernels.mma_sync.loads import Limits

    def wrong(rows, columns):
        return Limits(rows, columns + MANY)

    for module in (fwd_work, bwd_work):
        monkeypatch.setattr(module, "Limits", wrong)


def all_columns_are_stored(monkeypatch):
    """What is stored goes on likewise."""
    from jax_fa.kernels import backward_rows

    right = backward_rows.store_rows

    def wrong(acc, factor, to):
        right(acc, factor, to._replace(num_columns=to.num_columns + MANY))

    monkeypatch.setattr(backward_rows, "store_rows", wrong)


def columns_of_out_end_where_tiles_do(monkeypatch):
    """What the forward stores goes on into the columns of the next head."""
    from jax_fa.kernels.mma_sync import fwd_results

    monkeypatch.setattr(fwd_results, "PIECE", 0)


def with_more_rows(monkeypatch, name):
    """A step of the forward's results takes its tile's rows for queries, all of them."""
    from jax_fa.kernels.forward_work import Work
    from jax_fa.kernels.mma_sync import fwd_results

    right = getattr(fwd_results, name)

    def wrong(variant, x, *rest):
        changed = [
            one._replace(span=one.span._replace(own_slot=one.span.own_slot + MANY))
            if isinstance(one, Work)
            else one
            for one in rest
        ]
        right(variant, x, *changed)

    monkeypatch.setattr(fwd_results, name, wrong)


def rows_of_out_end_where_tiles_do(monkeypatch):
    """Out is stored for rows behind the last query."""
    with_more_rows(monkeypatch, "copy_rows")


def rows_of_lse_end_where_tiles_do(monkeypatch):
    """Lse is stored for rows behind the last query."""
    with_more_rows(monkeypatch, "finish_rows")


def half_of_the_columns_suffice(monkeypatch):
    """Heads of 40 columns are taken for heads of 32."""
    from jax_fa.kernels import fragments

    right = fragments.multiply_filled
    wrong = lambda *x: right(*x[:-1], x[-1] - 8)  # noqa: E731
    monkeypatch.setattr(fragments, "multiply_filled", wrong)


def check(module, built):
    """Asserts that a kernel is right with narrow heads."""
    if module.endswith("bwd"):
        got, expected, *_ = call(built, NARROW, dq_dim=64)
    else:
        operands = make(NARROW, "bfloat16").operands
        expected = tolerance(operands, NARROW.semantics)
        got = run_built(built, operands, NARROW.semantics, num_splits=1, seed=1)
    assert_close(got, expected, "bfloat16")


TARGETS = {"mma_sync": "sm_80", "sm90": "sm_90a", "sm100": "sm_100f"}


def made(folder, module, fault, mask="full"):
    """The kernel of a module for heads of 64, with what is wrong in it."""
    key = KernelKey(TARGETS[module.split(".")[0]], "bfloat16", 64, 64, mask)
    choose = choose_backward if module.endswith("bwd") else choose_forward
    return build(folder, module, key, choose(key), fault)


@needs_dsl
@needs_compiler
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of the DSL, within the DSL
@pytest.mark.parametrize(
    ("module", "fault"),
    [
        ("mma_sync.fwd", heads_end_where_tiles_do),
        ("mma_sync.fwd", columns_of_out_end_where_tiles_do),
        ("mma_sync.fwd", rows_of_out_end_where_tiles_do),
        ("mma_sync.fwd", rows_of_lse_end_where_tiles_do),
        ("mma_sync.bwd", heads_end_where_tiles_do),
        ("mma_sync.bwd", all_columns_are_stored),
        ("sm90.bwd", all_columns_are_stored),
        ("sm90.fwd", half_of_the_columns_suffice),
    ],
)
def test_a_fault_is_noticed(tmp_path, monkeypatch, module, fault):
    with monkeypatch.context() as patch:
        fault(patch)
        built = made(tmp_path, module, fault.__name__)
    with pytest.raises((AssertionError, EmulationError)):
        check(module, built)


@needs_dsl
@needs_compiler
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.parametrize("module", ["mma_sync.fwd", "mma_sync.bwd", "sm90.fwd", "sm90.bwd"])
def test_kernels_without_a_fault_are_right(tmp_path, module):
    check(module, made(tmp_path, module, "none"))


@needs_dsl
@needs_compiler
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.parametrize("mask", ["full", "causal", "general"])
def test_hoppers_products_end_where_heads_do(tmp_path, mask):
    module = "sm90.fwd_sorted" if mask == "general" else "sm90.fwd"
    built = made(tmp_path, module, "none", mask)
    for head_dim in (8, 32, 40, 64):
        case = replace(NARROW, head_dim=head_dim, is_causal=mask == "causal")
        operands = make(case, "bfloat16").operands
        got = run_built(built, operands, case.semantics, num_splits=1, seed=1)
        assert_close(got, tolerance(operands, case.semantics), "bfloat16")


@needs_dsl
@needs_compiler
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.parametrize("mask", ["full", "causal", "general"])
@pytest.mark.parametrize("folder", TARGETS)
def test_sums_of_dq_end_where_heads_do(tmp_path, folder, mask):
    built = made(tmp_path, f"{folder}.bwd", "none", mask)
    for head_dim in (8, 32, 40):
        case = replace(NARROW, head_dim=head_dim, is_causal=mask == "causal", q_len=150)
        got, expected, *_ = call(built, case, dq_dim=64)
        assert_close(got, expected, "bfloat16")
