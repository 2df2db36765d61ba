"""Attention in plain jnp, one block of query rows after another: what runs where no kernel serves.

A block of rows is an attention problem of its own, whose rows stand further down the diagonal
(``_rows``), so the arithmetic is that of ``reference``. Only the scores of one block exist at a
time: memory is O(block x S), in the gradient too, because the gradient recomputes each block.
Differentiable any number of times in any mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array

from jax_fa.runtime import masks, reference
from jax_fa.runtime.parts import Whole, meaning, per_token, taken
from jax_fa.spec.problem import Gradients, Operands, Semantics

SCORE_BYTES = {"cpu": 4 * 2**20}
"""Size of a block's scores by default backend, where it is not ``SCORE_BYTES_ELSEWHERE``. The
gradient holds six arrays of that size at a time; a CPU is fastest where its caches hold them."""

SCORE_BYTES_ELSEWHERE = 16 * 2**20

MIN_ROWS = 32
"""Rows of a block at least: with fewer, reading keys and values and adding up their gradients would
cost more than the scores."""


def rows_per_block(operands: Operands) -> int:
    """Rows that are computed at a time: T where the whole matrix is small.

    Blocks are of equal size but for the last one. Extents that an export leaves open count as 1; an
    open T is not split, nor is one that devices share under explicit sharding.
    """
    batch, q_len, heads, _ = operands.q.shape
    spec = jax.typeof(operands.q).sharding.spec
    if not isinstance(q_len, int) or (len(spec) > 1 and spec[1] is not None):
        return q_len
    width = math.prod(n for n in (batch, heads, operands.k.shape[1]) if isinstance(n, int))
    itemsize = max(4, operands.q.dtype.itemsize)
    score_bytes = SCORE_BYTES.get(jax.default_backend(), SCORE_BYTES_ELSEWHERE)
    rows = max(score_bytes // max(width * itemsize, 1), MIN_ROWS)
    return -(-q_len // max(-(-q_len // rows), 1))


def forward(
    operands: Operands, semantics: Semantics, bias: Array | None = None, mask: Array | None = None
) -> tuple[Array, Array]:
    """``reference.forward`` with the scores of one block of rows at a time."""
    if operands.bias is not None:
        bias, operands = operands.bias, operands._replace(bias=None)
    scale = None
    if isinstance(cast(Any, semantics.scale), jax.core.Tracer):
        semantics, scale = replace(semantics, scale=1.0), semantics.scale
    rows = rows_per_block(operands)
    return _forward(operands, scale, bias, mask, semantics=semantics, rows=rows)


# Jitted even if the caller is not: otherwise each call would trace and compile the loop again, and
# jax_debug_infs would report the infinities that masks use on purpose.
@partial(jax.jit, static_argnames=("semantics", "rows"), inline=True)
def _forward(
    operands: Operands,
    scale: Array | None,
    bias: Array | None,
    mask: Array | None,
    *,
    semantics: Semantics,
    rows: int,
) -> tuple[Array, Array]:
    def with_scale(semantics: Semantics) -> Semantics:
        return semantics if scale is None else replace(semantics, scale=cast(float, scale))

    if rows == operands.q.shape[1]:
        return reference.forward(operands, with_scale(semantics), bias, mask)
    # Wide, so that gradients of what all blocks share add up in the type of accumulation.
    k, v = _wide(operands.k), _wide(operands.v)
    by_row = {"q": operands.q}
    if bias is not None and bias.shape[2] > 1:
        by_row["bias_tangent"] = _tangent(bias)
    elif bias is not None:
        bias = _wide(bias)

    @partial(jax.checkpoint, prevent_cse=False)  # nothing is merged across the border of a loop
    def one_block(start: Any, block: dict[str, Array]) -> tuple[Array, Array]:
        own = _rows(operands, semantics, start, block["q"])
        own = own._replace(k=k.astype(operands.k.dtype), v=v.astype(operands.v.dtype))
        count = block["q"].shape[1]
        own_mask = None if mask is None else taken(mask, start, count, 2)
        own_bias = None if bias is None else taken(bias, start, count, 2)
        if "bias_tangent" in block:
            own_bias = _with_tangent(own_bias, block["bias_tangent"])
        return reference.forward(own, with_scale(meaning(semantics)), own_bias, own_mask)

    _, results = _scan(lambda _, *block: (None, one_block(*block)), None, by_row, rows)
    return cast(tuple[Array, Array], results)


def backward(
    operands: Operands, semantics: Semantics, out: Array, lse: Array, dout: Array, dlse: Array
) -> Gradients:
    """``reference.backward`` with the scores of one block of rows at a time."""
    rows = rows_per_block(operands)
    if rows == operands.q.shape[1]:
        return reference.backward(operands, semantics, out, lse, dout, dlse)

    def one_block(
        sums: tuple[Array, ...], start: Any, block: dict[str, Array]
    ) -> tuple[tuple[Array, ...], Array]:
        own = _rows(operands, semantics, start, block["q"])
        rest = (block[name] for name in ("out", "lse", "dout", "dlse"))
        grads = reference.wide_gradients(own, meaning(semantics), *rest)
        shared = [x for x in grads[1:] if x is not None]
        return tuple(map(jnp.add, sums, shared)), grads.q.astype(operands.q.dtype)

    shared = (operands.k, operands.v, operands.sinks)
    zeros = tuple(jnp.zeros_like(_wide(x)) for x in shared if x is not None)
    by_row = {"q": operands.q, "out": out, "lse": lse, "dout": dout, "dlse": dlse}
    (dk, dv, *dsinks), dq = _scan(one_block, zeros, by_row, rows)
    return reference.in_types_of(operands, Gradients(dq, dk, dv, *dsinks))


def bias_gradient(
    operands: Operands, semantics: Semantics, lse: Array, dout: Array, delta: Array
) -> Array:
    """``reference.bias_gradient`` with the scores of one block of rows at a time, in its type."""
    rows, bias = rows_per_block(operands), operands.bias
    if rows == operands.q.shape[1]:
        return reference.bias_gradient(operands, semantics, lse, dout, delta).astype(bias.dtype)
    has_rows = bias.shape[2] > 1

    def one_block(
        total: Array, start: Any, block: dict[str, Array]
    ) -> tuple[Array, tuple[Array, ...]]:
        own = _rows(operands, semantics, start, block["q"])
        rest = (block[name] for name in ("lse", "dout", "delta"))
        part = reference.bias_gradient(own, meaning(semantics), *rest)
        if not has_rows:
            return total + part, ()
        return total, (jnp.swapaxes(part.astype(bias.dtype), 1, 2),)  # rows in dimension 1

    by_row = {"q": operands.q, "lse": lse, "dout": dout, "delta": delta}
    zeros = jnp.zeros((), jnp.float32) if has_rows else jnp.zeros_like(_wide(bias))
    total, by_blocks = _scan(one_block, zeros, by_row, rows)
    return jnp.swapaxes(by_blocks[0], 1, 2) if has_rows else total.astype(bias.dtype)


# Blocks read the rows of a bias in place. JAX would add up the gradient of such reads in an array
# as large as the bias, a new one for each block; so derivatives take another path, as rows that are
# handed out block by block.


@jax.custom_jvp
def _tangent(x: Array) -> Array:
    """Carries the derivative of ``x``, and no value."""
    return jnp.zeros_like(x)


@_tangent.defjvp
def _tangent_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _tangent(*primals), tangents[0]


@jax.custom_jvp
def _with_tangent(x: Array, tangent: Array) -> Array:
    """The value of ``x`` with the derivative that ``_tangent`` carried here."""
    del tangent
    return x


@_with_tangent.defjvp
def _with_tangent_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    return _with_tangent(*primals), tangents[1]


def _wide(x: Array) -> Array:
    return x.astype(reference.wide(x.dtype))


# ------------------------------------------------------------------------------------------ blocks


def _rows(operands: Operands, semantics: Semantics, start: Any, q: Array) -> Operands:
    """The problem of the rows ``q`` [B, rows, N, D], which begin at row ``start`` of ``operands``.

    Its meaning is ``parts.meaning(semantics)``.
    """
    whole = Whole.of(operands, semantics, (operands.q.shape[1], operands.k.shape[1]))
    count = q.shape[1]
    own = {name: taken(x, start, count, 1) for name, x in per_token(operands, "T").items()}
    operands = masks.rows(operands, start, count)
    if operands.bias is not None:
        operands = operands._replace(bias=taken(operands.bias, start, count, 2))
    return whole.part(operands._replace(**{**own, "q": q}), first_row=start)


_Carry = TypeVar("_Carry")
_Block = Callable[[_Carry, Any, dict[str, Array]], tuple[_Carry, Any]]


def _scan(
    one_block: _Block[_Carry], carry: _Carry, by_row: dict[str, Array], rows: int
) -> tuple[_Carry, Any]:
    """``lax.scan`` over blocks of rows; the last block may be smaller.

    Args:
        one_block: function of the carry, the block's first row and its part of ``by_row``; returns
            the carry, and results whose axis 1 is the block's rows.
        carry: of the first block.
        by_row: arrays that are split along their rows.
        rows: of all blocks but the last.

    Returns:
        The last carry, and the results for all rows.
    """
    q_len = by_row["q"].shape[1]
    count = q_len // rows
    even, rest = {}, {}
    for name, x in by_row.items():
        axis = 2 if name == "bias_tangent" else 1
        even[name], rest[name] = jnp.split(x, [count * rows], axis)
        shape = x.shape[:axis], x.shape[axis + 1 :]
        even[name] = jnp.moveaxis(even[name].reshape(*shape[0], count, rows, *shape[1]), axis, 0)
    starts = jnp.arange(0, count * rows, rows, dtype=jnp.int32)
    carry, results = jax.lax.scan(lambda carry, x: one_block(carry, *x), carry, (starts, even))

    def joined(x: Array) -> Array:  # [count, B, rows, ...] -> [B, count * rows, ...]
        moved = jnp.moveaxis(x, 0, 1)
        return moved.reshape(moved.shape[0], count * rows, *moved.shape[3:])

    results = jax.tree.map(joined, results)
    if count * rows == q_len:
        return carry, results
    carry, last = one_block(carry, count * rows, rest)
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), results, last)
