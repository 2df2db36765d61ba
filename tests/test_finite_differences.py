"""Gradients against float64 central differences of the reference, feature by feature.

The directional derivative of a random linear functional of (out, lse) along one random direction
per differentiable operand; the library's own gradient is taken in float32.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import Case, documents, make
from helpers.harness import on_device, run

from jax_fa.runtime import reference

_SMALL: dict[str, Any] = {
    "batch": 2,
    "q_len": 19,
    "kv_len": 23,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
}

FEATURES = (
    Case("plain", **_SMALL),
    Case("value_dim", value_dim=12, **_SMALL),
    Case("causal", is_causal=True, **_SMALL),
    Case("causal_bottom_right", is_causal=True, alignment="bottom_right", **_SMALL),
    Case("window", window=(4, 3), **_SMALL),
    Case("soft_cap", soft_cap=1.5, magnitude=2.0, **_SMALL),
    Case("sinks", has_sinks=True, **_SMALL),
    Case("sinks_and_empty_rows", has_sinks=True, is_causal=True, q_offset=-6, **_SMALL),
    Case("segments", segments=(documents(9, 10), documents(5, 18)), **_SMALL),
    Case("lengths", q_lengths=(19, 7), kv_lengths=(11, 0), **_SMALL),
    Case("offset", is_causal=True, q_offset=(3, 0), **_SMALL),
    Case(
        "packed",
        q_len=30,
        kv_len=33,
        heads=2,
        kv_heads=1,
        head_dim=8,
        cu_q=(0, 12, 12, 30),
        cu_k=(0, 20, 24, 33),
        q_lengths=(12, 0, 15),
        is_causal=True,
        has_sinks=True,
    ),
    Case(
        "everything",
        q_lengths=(19, 12),
        kv_lengths=(20, 23),
        segments=(documents(9, 10), documents(8, 15)),
        window=(9, 2),
        soft_cap=2.0,
        has_sinks=True,
        q_offset=2,
        alignment="bottom_right",
        **_SMALL,
    ),
)
DIFFERENTIABLE = ("q", "k", "v", "sinks")
STEP = 1e-5


@cache
def functional(case):
    """float64 sum of out * dout + lse * dlse over rows with an LSE, as a function of operands."""

    @jax.jit
    def value(operands, cotangents):
        out, lse = reference.forward(operands, case.semantics)
        dout, dlse = cotangents
        return jnp.sum(out * dout) + jnp.sum(jnp.where(jnp.isfinite(lse), lse * dlse, 0))

    return value


PAIRS = [
    (case, name)
    for case in FEATURES
    for name in DIFFERENTIABLE
    if name != "sinks" or case.has_sinks
]


@pytest.mark.parametrize(("case", "name"), PAIRS, ids=lambda x: str(x))
def test_gradient_is_the_slope_of_the_reference(case, name):
    given = make(case, "float32")
    got = run(case, given)
    gradient = np.asarray(got.dsinks if name == "sinks" else getattr(got, f"d{name}"), np.float64)
    start = np.asarray(getattr(given.operands, name), np.float64)
    direction = np.random.default_rng(7).standard_normal(gradient.shape)
    slope_here = np.sum(gradient * direction)
    direction = np.broadcast_to(direction, start.shape)
    with jax.enable_x64(True):
        wide = [None if x is None else np.asarray(x) for x in given.operands]
        wide = [x.astype(np.float64) if x is not None and x.dtype.kind == "f" else x for x in wide]
        operands = on_device(type(given.operands)(*wide))
        cotangents = tuple(np.asarray(x, np.float64) for x in given.cotangents)
        ahead, behind = (
            float(functional(case)(operands._replace(**{name: start + h * direction}), cotangents))
            for h in (STEP, -STEP)
        )
    slope = (ahead - behind) / (2 * STEP)
    terms = np.sqrt(np.sum(gradient**2) * np.sum(direction[0] ** 2))
    assert abs(slope_here - slope) <= 1e-5 * max(abs(slope), terms, 1.0), (slope_here, slope)
