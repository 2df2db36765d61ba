"""Borders and offsets known at run time, in the form that every path relies on.

A value that is known only on the device cannot be refused. So borders and offsets outside their
range have a meaning, the same everywhere; it is applied here, before any path sees them. CPU and
GPU kernels that a program calls by itself read borders by the same rule.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jax_fa.spec import schema
from jax_fa.spec.band import MAX_OFFSET
from jax_fa.spec.problem import Operands

_WHOLE_SLOT = jnp.iinfo(jnp.int32).max
"""A length that uses all of any slot."""


def borders(cu_seqlens: Array, total: int) -> Array:
    """``cu_seqlens`` as every path reads them: ascending, from 0 to ``total``.

    Border m becomes the largest of the borders up to m, clamped to the array. So slots lie in the
    array and do not overlap, and a border that descends makes its slot empty.
    """
    return jax.lax.cummax(jnp.clip(cu_seqlens, 0, total))


def offsets(q_offset: Array) -> Array:
    """``query_offset`` as every path reads it: int32, at most ``MAX_OFFSET`` in magnitude."""
    return jnp.clip(q_offset, -MAX_OFFSET, MAX_OFFSET).astype(jnp.int32)


def with_slot_in_front(operands: Operands) -> Operands:
    """Packed operands with an unused sequence in front, whose slot ends where the first begins.

    GPU kernels write the rows of every slot and those behind the last one; rows before the first
    slot belong to none. The slot in front also ensures that there is at least one sequence.
    """
    assert operands.is_packed

    def extended(x: Array | None) -> Array | None:
        return None if x is None else jnp.pad(x, [(1, 0), *[(0, 0)] * (x.ndim - 1)])

    def used(cu_seqlens: Array, lengths: Array | None) -> Array | None:
        return extended(jnp.full_like(cu_seqlens[1:], _WHOLE_SLOT) if lengths is None else lengths)

    given = operands._asdict()
    more = {x.name: extended(given[x.name]) for x in schema.OPERANDS if x.is_per_sequence}
    more["q_lengths"] = used(operands.cu_seqlens_q, operands.q_lengths)
    more["kv_lengths"] = used(operands.cu_seqlens_k, operands.kv_lengths)
    return operands._replace(**more)


def in_one_row(cu_seqlens: Array, lengths: Array | None, total: int) -> tuple[Array, Array]:
    """[V, M + 1] borders of V packed rows -> borders and lengths of one row V times as long.

    The last slot of a row now reaches to the next row, so its old extent becomes its length.
    """
    size = cu_seqlens.shape[0]
    slots = cu_seqlens[:, 1:] - cu_seqlens[:, :-1]
    lengths = slots if lengths is None else jnp.minimum(lengths, slots)
    starts = cu_seqlens[:, :-1] + total * jnp.arange(size, dtype=jnp.int32)[:, None]
    ends = jnp.array([size * total], jnp.int32)
    return jnp.concatenate([starts.reshape(-1), ends]), lengths.reshape(-1)
