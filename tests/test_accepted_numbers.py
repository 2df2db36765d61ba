"""The ends of the ranges of scale, soft cap and sinks are right on every path, gradients too."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import Case
from helpers.harness import data, run, wanted
from helpers.oracle import Results, assert_close

from jax_fa.runtime import arguments, bindings
from jax_fa.runtime.dispatch import Emulation
from jax_fa.spec.arch import ARCHS, arch_named
from jax_fa.spec.problem import Problem
from jax_fa.spec.variants import find

LARGEST_CAP, SMALLEST_CAP = arguments.SOFT_CAPS.high, arguments.SOFT_CAPS.low
LARGEST_SCALE, SMALLEST_SCALE = arguments.SCALES.high, arguments.SCALES.low

SHAPE = Case("ends", q_len=40, kv_len=70, heads=2, kv_heads=1, head_dim=64)
ENDS = [
    replace(SHAPE, name="largest_cap", soft_cap=LARGEST_CAP),
    replace(SHAPE, name="smallest_cap", soft_cap=SMALLEST_CAP),
    replace(
        SHAPE,
        name="smallest_scale_largest_cap",
        scale=SMALLEST_SCALE,
        soft_cap=LARGEST_CAP,
        magnitude=0.125 / SMALLEST_SCALE,
    ),
    replace(
        SHAPE,
        name="largest_scale_smallest_cap",
        scale=LARGEST_SCALE,
        soft_cap=SMALLEST_CAP,
        magnitude=0.125 / LARGEST_SCALE,
    ),
    replace(SHAPE, name="smallest_scale", scale=SMALLEST_SCALE, magnitude=0.125 / SMALLEST_SCALE),
    replace(SHAPE, name="largest_scale", scale=LARGEST_SCALE, magnitude=0.125 / LARGEST_SCALE),
]
PATHS = {"cpu": "cpu", "xla": "xla"} | {arch.name: Emulation(arch.name) for arch in ARCHS}
DTYPE = "bfloat16"


def skip_unless_compiled(path, case):
    """GPU kernels are there in some builds only."""
    if isinstance(path, Emulation):
        arch = arch_named(path.arch)
        problem = Problem.of(data(case, DTYPE).operands, case.semantics)
        for operation in ("fwd", "bwd"):
            if find(problem, arch, operation, bindings.compiled()) is None:
                pytest.skip("this build lacks the kernel")


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("case", ENDS, ids=str)
def test_the_end_of_a_range_is_right(case, path):
    """Of the LSE, GPU kernels keep what tanh leaves: 1e-7 of the cap (kernels/softmax.py: cap)."""
    skip_unless_compiled(path, case)
    got, tolerance = run(case, data(case, DTYPE), path), wanted(case, DTYPE)
    if case.soft_cap == LARGEST_CAP and isinstance(path, Emulation):
        np.testing.assert_allclose(got.lse, tolerance.exact.lse, rtol=0, atol=1e-7 * LARGEST_CAP)
        got = got._replace(lse=None)
    assert_close(got, tolerance, DTYPE)


SINKS = replace(SHAPE, name="sinks", has_sinks=True)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_sink_far_below_is_none_and_nan_stays_in_its_head(path):
    """One far above is refused, or, where its value is not known, gives 0 or NaN."""
    skip_unless_compiled(path, SINKS)
    given = data(SINKS, DTYPE)

    def results(*sinks):
        operands = given.operands._replace(sinks=np.array([sinks], np.float32))
        got = run(SINKS, given._replace(operands=operands), path)
        return [None if x is None else np.asarray(x, np.float32) for x in got]

    none = given._replace(operands=given.operands._replace(sinks=None))
    without = run(replace(SINKS, has_sinks=False), none, path)
    for sink in (-np.inf, np.finfo(np.float32).min):
        got = results(sink, sink)
        for a, b in zip(got, without, strict=False):
            if b is not None:
                np.testing.assert_array_equal(a, jnp.asarray(b, jnp.float32))
        assert not got[Results._fields.index("dsinks")].any()
    out, lse, *_ = results(0.0, np.nan)
    assert np.isfinite(out[:, :, 0]).all() and np.isfinite(lse[:, :, 0]).all()
    assert np.isnan(out[:, :, 1]).all() and np.isnan(lse[:, :, 1]).all()
