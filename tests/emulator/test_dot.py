"""The compiled sums of products give the bits of numpy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_fa.emulator import native
from jax_fa.emulator.dot import Factors, Rule, hopper_rule, multiply_add, multiply_add_in_numpy
from jax_fa.emulator.numerics import NARROW

pytestmark = pytest.mark.skipif(native.core is None, reason="needs the extension")

DEPTHS = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}
SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-39, 2.0**-126, 3.4e38]


def values(rng, shape, spread, specials):
    """Float32 of `spread` binary exponents to each side of 1, some of them special."""
    exponents = rng.uniform(-spread, spread, shape)
    with np.errstate(over="ignore"):
        found = (rng.standard_normal(shape) * 2.0**exponents).astype(np.float32)
    found[rng.random(shape) < 0.1] = 0
    places = rng.random(shape) < specials
    found[places] = rng.choice(np.array(SPECIAL, np.float32), np.count_nonzero(places))
    return found


def as_type(array, type_):
    """The same rounded to an element type."""
    if type_ == "tf32":
        return (array.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    with np.errstate(over="ignore"):
        return NARROW[type_].load(NARROW[type_].store(array))


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(sorted(DEPTHS)),
    st.sampled_from([0, 3, 12, 40, 60, 126]),
    st.sampled_from([0.0, 0.0, 0.002, 0.1]),
    st.booleans(),
    st.booleans(),
)
def test_compiled_sums_have_the_bits_of_numpy(seed, type_, spread, specials, adds, narrow):
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(1, 70, 2)
    a, b = (
        Factors.of(as_type(values(rng, (n, DEPTHS[type_]), spread, specials), type_), type_)
        for n in (rows, columns)
    )
    c = values(rng, (rows, columns + 3), 2 * spread, specials)[:, 3:] if adds else None
    rule = hopper_rule(type_, "f32") if narrow else Rule(type_, "f32")
    with np.errstate(all="ignore"):
        got = multiply_add(a, b, c, rule)
        wanted = multiply_add_in_numpy(a, b, c, rule)
    np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))


def test_operands_may_be_parts_of_others():
    """Rows of an operand, and an accumulator stored by columns."""
    rng = np.random.default_rng(0)
    a, b = (Factors.of(values(rng, (48, 16), 3, 0), "bf16") for _ in range(2))
    c = values(rng, (48, 16), 3, 0).T
    got = multiply_add(a.rows(slice(16, 32)), b, c, Rule("bf16", "f32"))
    wanted = multiply_add_in_numpy(a.rows(slice(16, 32)), b, c, Rule("bf16", "f32"))
    np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))


def test_numpy_serves_without_the_extension(monkeypatch):
    rng = np.random.default_rng(0)
    a, b = (Factors.of(values(rng, (8, 16), 3, 0), "f16") for _ in range(2))
    compiled = multiply_add(a, b, None, Rule("f16", "f32"))
    monkeypatch.setattr(native, "core", None)
    np.testing.assert_array_equal(multiply_add(a, b, None, Rule("f16", "f32")), compiled)
