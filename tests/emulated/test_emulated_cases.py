"""The shared cases on the compiled GPU kernels, in the emulator; all architectures of the build."""

import pytest
from cases import CASES
from harness import attend, data, run, wanted
from oracle import Results, assert_close

from jax_fa import bindings
from jax_fa.choice import Emulation
from jax_fa.problem import Problem
from jax_fa.variants import ARCHS, BY_NAME, SHORT_DTYPES, find

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
    has_backward = is_served(case, arch, "bwd") and is_complete(arch.name, "bwd", dtype)
    if has_backward and (dtype == "bfloat16" or CASES.index(case) % FLOAT16_GRADIENTS == 0):
        assert_close(run(case, given, emulation), wanted(case, dtype), dtype)
        return
    out, lse = attend(case, given, emulation)
    assert_close(Results(out, lse), wanted(case, dtype), dtype)
    if not is_served(case, arch, "bwd"):
        with pytest.raises(NotImplementedError, match="does not serve this problem"):
            run(case, given, emulation)
