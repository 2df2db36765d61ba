"""Runs the library on the shared cases; what several test files need."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa
from helpers.cases import Case, Data, make
from helpers.oracle import Results, Tolerance, tolerance
from jax_fa.runtime import bindings, vjp
from jax_fa.runtime.dispatch import Forced
from jax_fa.spec.problem import Operands
from jax_fa.spec.schema import OPERANDS, OPERATIONS
from jax_fa.spec.variants import BY_NAME, Variant

ROOT = Path(__file__).parents[2]
MOVING = tuple(array.name for array in OPERANDS if array.is_differentiable)


def on_device(operands: Operands) -> Operands:
    """The same operands as JAX arrays."""
    return Operands(*(None if x is None else jnp.asarray(x) for x in operands))


def public(case: Case, operands: Operands, **more: Any) -> Any:
    """Calls the public function that a user would call for ``case``; only the output."""
    options = {**case.options(operands), **more}
    q, k, v = operands[:3]
    if not case.is_packed:
        return jax_fa.attention(q, k, v, **options)
    return jax_fa.attention_varlen(
        q[0],
        k[0],
        v[0],
        operands.cu_seqlens_q,
        operands.cu_seqlens_k,
        seqused_q=operands.q_lengths,
        seqused_k=operands.kv_lengths,
        **options,
    )[None]


@cache
def data(case: Case, dtype: str) -> Data:
    """``make``, once."""
    return make(case, dtype)


@cache
def wanted(case: Case, dtype: str) -> Tolerance:
    """Exact results of a case, forward and backward, and the tolerance."""
    return tolerance(data(case, dtype).operands, case.semantics, data(case, dtype).cotangents)


def inputs_for(variant: Variant, case: Case) -> dict[str, Any]:
    """Operands by name, and for a backward what a forward would have saved."""
    given = data(case, variant.key.dtype)
    inputs = {name: x for name, x in given.operands._asdict().items() if x is not None}
    if variant.operation == "fwd":
        return inputs
    forward = wanted(case, variant.key.dtype).rounded
    saved = {
        "out": forward.out.astype(inputs["q"].dtype),
        "lse": forward.lse.astype(np.float32),
        **dict(zip(("dout", "dlse"), given.cotangents, strict=True)),
    }
    out, dout = (saved[name].astype(np.float32) for name in ("out", "dout"))
    saved["delta"] = (out * dout).sum(3) - saved["dlse"]
    taken = {array.name for array in OPERATIONS[variant.operation].operands}
    return {**inputs, **{name: x for name, x in saved.items() if name in taken}}


@cache
def computed(case: Case, dtype: str, implementation: Forced = None) -> Results:
    """Forward and gradients of a case through the library's ``custom_vjp``."""
    return run(case, data(case, dtype), implementation)


def run(case: Case, given: Data, implementation: Forced = None) -> Results:
    """The same for other data."""
    semantics = case.semantics

    @jax.jit
    def step(differentiable: tuple[Any, ...], rest: Operands, cotangents: tuple[Any, Any]) -> Any:
        def attend(*moving: Any) -> Any:
            operands = rest._replace(**dict(zip(MOVING, moving, strict=True)))
            return vjp.attention(operands, semantics, implementation)

        results, pull = jax.vjp(attend, *differentiable)
        return *results, *pull(cotangents)

    x = on_device(given.operands)
    rest = x._replace(**dict.fromkeys(MOVING))
    moving = tuple(getattr(x, name) for name in MOVING)
    results = Results(*step(moving, rest, given.cotangents))
    if results.dsinks is None:
        return results
    return results._replace(dsinks=np.sum(results.dsinks, axis=0))


def attend(case: Case, given: Data, implementation: Forced = None) -> tuple[Any, Any]:
    """Output and LSE alone, of an implementation that may have no gradient."""
    compute = jax.jit(lambda x: vjp.attention(x, case.semantics, implementation))
    return compute(on_device(given.operands))


def leave_out_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, kernels of large tiles also run what is short."""
    small = {name for name, variant in BY_NAME.items() if variant.key.is_small}
    held = bindings.compiled() - small
    monkeypatch.setattr(bindings, "compiled", lambda: held)


def in_new_process(code: str, **environment: str) -> str:
    """Runs Python code in a fresh interpreter that sees this package; returns its output."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, **environment}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
