"""The shared cases on the compiled GPU kernels, in the emulator; all architectures of the build.

A kernel that several architectures share runs once, and so does one that is one text for several
targets; the launches of the others are compared with its own (``texts.py``). One that differs from
another in conversions, or in the order of its instructions only, runs one case in three; those of
float16, of another family and of both run different thirds. The cases are short: where there are
kernels with small tiles, those with large ones run one in three, too, forward only. EVERY_CASE=1 in
the environment runs all.
"""

import os

import pytest
from helpers.cases import CASES
from helpers.harness import attend, data, leave_out_small_tiles, run, wanted
from helpers.oracle import Results, assert_close
from helpers.texts import (
    SAME_SOURCE,
    assert_launched,
    assert_launched_like_proxy,
    proxy,
    resembled,
)

from jax_fa.runtime import bindings
from jax_fa.runtime.dispatch import Emulation
from jax_fa.spec.arch import ARCHS, OPERATIONS
from jax_fa.spec.names import SHORT_DTYPES
from jax_fa.spec.problem import Problem
from jax_fa.spec.variants import BY_NAME, find, of_families

COMPILED = [BY_NAME[name] for name in sorted(bindings.compiled()) if name in BY_NAME]

UNSERVED = {"scale_negative", "scale_zero"}
"""Cases that no GPU kernel takes."""

RESEMBLING = 1 if os.environ.get("EVERY_CASE") == "1" else 3
"""A kernel that resembles another runs one case in so many, for want of minutes; test_schedules.py
runs every one of them."""

if not COMPILED:
    pytest.skip("this build holds no GPU kernels", allow_module_level=True)


def is_complete(arch, operation, dtype):
    """Whether this build holds all variants of an operation; samples are for other tests."""
    needed = {v for v in of_families([arch]) if (v.operation, v.key.dtype) == (operation, dtype)}
    return set() != needed <= set(COMPILED)


PLACES = [
    (arch, dtype)
    for arch in ARCHS
    for dtype in SHORT_DTYPES
    if is_complete(arch.name, "fwd", dtype)
]


def chosen_for(run):
    arch, dtype, case = run
    return find(Problem.of(data(case, dtype).operands, case.semantics), arch)


def order(run):
    """Runs of one kernel come together, in all architectures, so that it is decoded once."""
    arch, dtype, case = run
    chosen = chosen_for(run)
    kernel = "" if chosen is None else chosen.name.replace(arch.name, "")
    return dtype, kernel, CASES.index(case), arch.name


RUNS = sorted(((*place, case) for place in PLACES for case in CASES), key=order)
SERVED = [run for run in RUNS if run[2].name not in UNSERVED]
SHORT = [run for run in SERVED if (chosen := chosen_for(run)) and chosen.key.is_small]


def each_of(runs):
    ids = [f"{case}-{arch.name}-{dtype}" for arch, dtype, case in runs]
    return pytest.mark.parametrize(("arch", "dtype", "case"), runs, ids=ids)


def is_served(case, arch, operation):
    heads = arch.kernels(operation if case.bias is None else "bias").heads
    is_held = any(case.head_dim <= d and case.out_dim <= dv for d, dv in heads)
    return case.name not in UNSERVED and is_held


def schedule_of(case):
    return case.seed * len(CASES) + CASES.index(case)


def has_gradients(case, arch, dtype):
    """Whether the backward is part of the case."""
    return is_served(case, arch, "bwd") and is_complete(arch.name, "bwd", dtype)


def is_chosen(kernel, case):
    """Whether a kernel runs a case."""
    if resembled(kernel) is None:
        return True
    third = (kernel.key.dtype == "float16") + 2 * (kernel.arch in SAME_SOURCE)
    return CASES.index(case) % RESEMBLING == third % RESEMBLING


def is_run_elsewhere(kernel, arch):
    """Whether another architecture's run of all cases is a run of this kernel of ``arch``."""
    other = proxy(kernel).arch
    needed = {"fwd", kernel.operation}
    return other != arch.name and all(is_complete(other, x, kernel.key.dtype) for x in needed)


@each_of(SHORT[::RESEMBLING])
def test_case_keeps_the_tolerance_rule_on_large_tiles(arch, dtype, case, monkeypatch):
    leave_out_small_tiles(monkeypatch)
    given = data(case, dtype)
    kernel = find(Problem.of(given.operands, case.semantics), arch, "fwd", bindings.compiled())
    assert not kernel.key.is_small
    out, lse = attend(case, given, Emulation(arch.name, seed=schedule_of(case)))
    assert_close(Results(out, lse), wanted(case, dtype), dtype)


@each_of(RUNS)
def test_case_keeps_the_tolerance_rule_or_is_refused(arch, dtype, case):
    """Each case has a schedule of its own; NaN in the results would be memory left unwritten."""
    emulation = Emulation(arch.name, seed=schedule_of(case))
    given = data(case, dtype)
    if not is_served(case, arch, "fwd"):
        with pytest.raises(NotImplementedError, match="does not serve this problem"):
            attend(case, given, emulation)
        return
    kernels = [
        find(Problem.of(given.operands, case.semantics), arch, operation, bindings.compiled())
        for operation in OPERATIONS[: 2 if case.bias is None else 3]
        if operation == "fwd" or has_gradients(case, arch, dtype)
    ]
    to_run = set()
    for kernel in kernels:
        if is_run_elsewhere(kernel, arch):
            assert_launched_like_proxy(kernel, case)
        elif is_chosen(kernel, case):
            to_run.add(kernel.operation)
        else:
            assert_launched(kernel, case)
    if "bwd" in to_run:
        assert_close(run(case, given, emulation), wanted(case, dtype), dtype)
    elif "fwd" in to_run:
        out, lse = attend(case, given, emulation)
        assert_close(Results(out, lse), wanted(case, dtype), dtype)
    if not is_served(case, arch, "bwd"):
        with pytest.raises(NotImplementedError, match="does not serve this problem"):
            run(case, given, emulation)
