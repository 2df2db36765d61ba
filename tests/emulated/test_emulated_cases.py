"""The shared cases on the compiled GPU kernels, in the emulator; all architectures of the build.

A kernel that is one text for several targets runs once; the launches of the others are compared
with its own (``texts.py``).
"""

import pytest
from cases import CASES
from harness import attend, data, run, wanted
from oracle import Results, assert_close
from texts import assert_launched_like_proxy, proxy

from jax_fa import bindings
from jax_fa.choice import Emulation
from jax_fa.problem import Problem
from jax_fa.variants import ARCHS, BY_NAME, OPERATIONS, SHORT_DTYPES, find

COMPILED = [BY_NAME[name] for name in sorted(bindings.compiled()) if name in BY_NAME]

UNSERVED = {
    "prime_sizes",
    "head_dim_8",
    "head_dim_16",
    "head_dim_32",
    "head_dim_80",
    "head_dim_192",
    "value_dim_larger",
    "odd_head_dim",
    "scale_negative",
    "scale_zero",
    "everything",
    "one_row_sees_one_key",
}
"""Cases with head sizes or scales that no GPU kernel takes."""

FLOAT16_GRADIENTS = 3
"""One case in so many has its float16 gradients emulated, for want of minutes: the kernels are
those of bfloat16 but for conversions, and test_schedules.py runs every one of them."""

if not COMPILED:
    pytest.skip("this build holds no GPU kernels", allow_module_level=True)


def is_complete(arch, operation, dtype):
    """Whether this build holds all variants of an operation; samples are for other tests."""

    def those(variants):
        return {
            v for v in variants if (v.arch, v.operation, v.key.dtype) == (arch, operation, dtype)
        }

    return those(COMPILED) == those(BY_NAME.values()) != set()


PLACES = [
    (arch, dtype)
    for arch in ARCHS
    for dtype in SHORT_DTYPES
    if is_complete(arch.name, "fwd", dtype)
]


def order(run):
    """Runs of one kernel come together, in all architectures, so that it is decoded once."""
    arch, dtype, case = run
    chosen = find(Problem.of(data(case, dtype).operands, case.semantics), arch)
    kernel = "" if chosen is None else chosen.name.replace(arch.name, "")
    return dtype, kernel, CASES.index(case), arch.name


RUNS = sorted(((*place, case) for place in PLACES for case in CASES), key=order)


def is_served(case, arch, operation):
    return case.name not in UNSERVED and (case.head_dim, case.out_dim) in arch.head_dims(operation)


def has_gradients(case, arch, dtype):
    """Whether the backward is part of the case."""
    is_chosen = dtype == "bfloat16" or CASES.index(case) % FLOAT16_GRADIENTS == 0
    return is_chosen and is_served(case, arch, "bwd") and is_complete(arch.name, "bwd", dtype)


def is_run_as_proxy(kernel):
    """Whether another architecture's run of all cases is a run of this kernel."""
    other = proxy(kernel)
    needed = {"fwd", kernel.operation}
    return other != kernel and all(is_complete(other.arch, x, other.key.dtype) for x in needed)


@pytest.mark.parametrize(
    ("arch", "dtype", "case"),
    RUNS,
    ids=[f"{case}-{arch.name}-{dtype}" for arch, dtype, case in RUNS],
)
def test_case_keeps_the_tolerance_rule_or_is_refused(arch, dtype, case):
    """Each case has a schedule of its own; NaN in the results would be memory left unwritten."""
    emulation = Emulation(arch.name, seed=CASES.index(case))
    given = data(case, dtype)
    if not is_served(case, arch, "fwd"):
        with pytest.raises(NotImplementedError, match="does not serve this problem"):
            attend(case, given, emulation)
        return
    kernels = [
        find(Problem.of(given.operands, case.semantics), arch, operation, bindings.compiled())
        for operation in OPERATIONS
        if operation == "fwd" or has_gradients(case, arch, dtype)
    ]
    to_run = [kernel.operation for kernel in kernels if not is_run_as_proxy(kernel)]
    for kernel in kernels:
        if kernel.operation not in to_run:
            assert_launched_like_proxy(kernel, case)
    if "bwd" in to_run:
        assert_close(run(case, given, emulation), wanted(case, dtype), dtype)
    elif "fwd" in to_run:
        out, lse = attend(case, given, emulation)
        assert_close(Results(out, lse), wanted(case, dtype), dtype)
    if not is_served(case, arch, "bwd"):
        with pytest.raises(NotImplementedError, match="does not serve this problem"):
            run(case, given, emulation)
