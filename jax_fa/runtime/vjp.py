"""Attention with its gradient: what the forward saves and what the backward does with it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_fa.runtime import primitives
from jax_fa.runtime.dispatch import Forced
from jax_fa.runtime.primitives import no_further_derivative
from jax_fa.spec import schema
from jax_fa.spec.problem import Operands, Semantics

OUT_NAME = "jax_fa_out"
LSE_NAME = "jax_fa_lse"


Result = tuple[Array, Array]
"""Output and LSE."""


def attention(
    operands: Operands,
    semantics: Semantics,
    implementation: Forced = None,
    saved: Result | None = None,
) -> Result:
    """(out, lse), differentiable once in reverse mode through both.

    Args:
        operands: the arrays.
        semantics: what is asked.
        implementation: what the caller forced, or None.
        saved: the results, if they are known: only their gradient is then left to compute.
    """
    arrays = primitives.aligned([x for x in operands if x is not None])
    operands = Operands(**dict(zip(operands.present, arrays, strict=True)))
    moving = {x.name: getattr(operands, x.name) for x in schema.OPERANDS if x.is_differentiable}
    operands = operands._replace(
        **{name: None if x is None else reverse_only(x) for name, x in moving.items()}
    )
    return _attention(operands, saved, semantics, implementation)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _attention(
    operands: Operands, saved: Result | None, semantics: Semantics, implementation: Forced
) -> Result:
    return saved or primitives.forward(operands, semantics, implementation)


_Residuals = tuple[Operands, Array, Array]


def _forward(
    operands: Operands, saved: Result | None, semantics: Semantics, implementation: Forced
) -> tuple[Result, _Residuals]:
    operands, saved = jax.tree.map(_value, (operands, saved), is_leaf=_is_primal)
    out, lse = saved or primitives.forward(operands, semantics, implementation)
    # Named so that a remat policy can keep them: recomputing them costs a whole forward pass.
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse), (operands, out, lse)


def _is_primal(x: Any) -> bool:
    return isinstance(x, CustomVJPPrimal)


def _value(x: CustomVJPPrimal) -> Array:
    return x.value


def _backward(
    semantics: Semantics,
    implementation: Forced,
    residuals: _Residuals,
    cotangents: tuple[Array | SymbolicZero, Array | SymbolicZero],
) -> tuple[Operands, None]:
    operands, out, lse = residuals
    dout, dlse = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
    given = (jnp.zeros_like(out) if dout is None else dout, dlse)
    grads = primitives.backward(operands, semantics, (out, lse), given, implementation)
    return Operands(grads.q, grads.k, grads.v, sinks=grads.sinks, bias=grads.bias), None


# Mostly nobody asks for a gradient through the LSE. An array of zeros would take a kernel to fill.
_attention.defvjp(_forward, _backward, symbolic_zeros=True)


# A custom_vjp answers forward mode with JAX's own error, which cannot say what to do instead. This
# identity lets reverse mode through (its tangent is transposed away) and refuses when a tangent is
# really computed.


def reverse_only(x: Array) -> Array:
    """Identity whose forward-mode derivative raises an error that names the alternatives."""
    return _reverse_only_p.bind(x)


def _jvp(primals: Any, tangents: Any) -> Any:
    (tangent,) = tangents
    if isinstance(tangent, ad.Zero):
        return primals[0], tangent
    return primals[0], _tangent_p.bind(tangent)


_reverse_only_p = Primitive("jax_fa_reverse_only")
_tangent_p = Primitive("jax_fa_reverse_only_tangent")
for _primitive in (_reverse_only_p, _tangent_p):
    _primitive.def_abstract_eval(lambda x: x)
    batching.defvectorized(_primitive)
_reverse_only_p.def_impl(lambda x: x)
mlir.register_lowering(_reverse_only_p, lambda _, x: [x])
ad.primitive_jvps[_reverse_only_p] = _jvp
_tangent_p.def_impl(no_further_derivative)
mlir.register_lowering(_tangent_p, no_further_derivative)
ad.deflinear(_tangent_p, lambda cotangent: [cotangent])
