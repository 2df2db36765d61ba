"""Padding for head sizes that kernels do not take: columns of zeros, to the next multiple of 8.

Zeros behind query and key add nothing to a score; behind values and their cotangents they give
columns of zeros, in the output and in gradients. Scale and LSE do not depend on them. Only the
arrays of a kernel call, on one device, are padded: what a forward saves and what devices send each
other has the caller's head sizes. From the padded size to the one it is compiled for, a kernel
fills in zeros itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

from jax_fa.spec import schema
from jax_fa.spec.arch import Operation
from jax_fa.spec.problem import Operands

Heads = tuple[int, int]
"""(D, Dv)."""


def padded(operation: Operation, arrays: Mapping[str, Array], heads: Heads) -> dict[str, Array]:
    """Inputs of an operation, by name, with columns of zeros added for a kernel of ``heads``."""

    def pad(name: str, x: Array) -> Array:
        more = _extent(name, x, heads) - x.shape[-1]
        if more == 0:
            return x
        if operation != "fwd" and name in Operands._fields:
            # Otherwise XLA merges this with the forward's and keeps the larger array between them
            # (seen on the CPU, which drops barriers).
            x = jax.lax.optimization_barrier(x)
        return jax.lax.pad(x, jnp.zeros((), x.dtype), [*[(0, 0, 0)] * (x.ndim - 1), (0, more, 0)])

    return {name: pad(name, x) for name, x in arrays.items()}


def cut(results: Mapping[str, Array], heads: Heads) -> tuple[Array, ...]:
    """Results of a kernel, by name, for a caller with ``heads``: further columns are left out."""
    return tuple(
        x if extent == x.shape[-1] else jax.lax.slice_in_dim(x, 0, extent, axis=-1)
        for x, extent in ((x, _extent(name, x, heads)) for name, x in results.items())
    )


def _extent(name: str, x: Array, heads: Heads) -> int:
    """Of the last dimension of an array, where head sizes are ``heads``."""
    last = schema.BY_NAME[name].dims.split()[-1]
    return {"D": heads[0], "Dv": heads[1]}.get(last, x.shape[-1])
