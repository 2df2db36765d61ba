"""Parts of an attention problem: some of its rows against some of its keys, a problem of its own.

Rows that begin later start further down the diagonal, and keys that begin later move it back. So a
part is computed like any problem, with the whole diagonal in its ``q_offset``. Blocks of rows
(``blockwise``), and what each of several devices holds of a sequence (``parallel``), are parts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jax_fa.runtime import reference
from jax_fa.runtime.sequences import offsets
from jax_fa.spec import schema
from jax_fa.spec.problem import Operands, Semantics


class Side(NamedTuple):
    """The places of sequences among all rows, or all keys.

    Attributes:
        borders: int32 [M + 1] of packed sequences, None if each is a row of the batch.
        used: int32 [M], used tokens of each sequence, None if all are.
    """

    borders: Array | None
    used: Array | None

    def part(self, first: Any, count: Any) -> tuple[Side, Any]:
        """The side of tokens ``first .. first + count - 1``; each sequence's tokens before them."""
        if self.borders is None:
            return Side(None, None if self.used is None else self.used - first), first
        skipped = jnp.maximum(first - self.borders[:-1], 0)
        borders = jnp.clip(self.borders - first, 0, count)
        return Side(borders, None if self.used is None else self.used - skipped), skipped


class Whole(NamedTuple):
    """The places of a problem's sequences, however it is cut into parts.

    Attributes:
        rows: the query's side.
        keys: the side of key and value.
        diagonal: int32 [M], key position of row 0 of each sequence; None if none matters.
    """

    rows: Side
    keys: Side
    diagonal: Array | None

    @classmethod
    def of(cls, operands: Operands, semantics: Semantics, extents: tuple[Any, Any]) -> Whole:
        """Of ``extents`` = (T, S) tokens; arrays of ``operands`` may hold only some of them."""
        lengths = reference.lengths(operands, extents)
        return cls(
            Side(operands.cu_seqlens_q, None if operands.q_lengths is None else lengths[0]),
            Side(operands.cu_seqlens_k, None if operands.kv_lengths is None else lengths[1]),
            reference.diagonals(operands, semantics, lengths)
            if not semantics.band.is_full
            else None,
        )

    def part(self, own: Operands, first_row: Any = 0, first_key: Any = 0) -> Operands:
        """The problem of the rows and keys that ``own`` holds; its meaning is ``meaning``'s.

        Args:
            own: what the part has for each of its tokens; sinks for rows whose softmax holds them.
            first_row: number of its first row among all rows.
            first_key: number of its first key among all keys.
        """
        rows, rows_before = self.rows.part(first_row, own.q.shape[1])
        keys, keys_before = self.keys.part(first_key, own.k.shape[1])
        offset = None
        if self.diagonal is not None:
            offset = offsets(self.diagonal + rows_before - keys_before)
        return own._replace(
            q_lengths=rows.used,
            kv_lengths=keys.used,
            cu_seqlens_q=rows.borders,
            cu_seqlens_k=keys.borders,
            q_offset=offset,
        )


def per_token(operands: Operands, side: Literal["T", "S"]) -> dict[str, Array]:
    """The operands that have a row for each query (T) or key (S), in dimension 1, by name."""
    return {x: getattr(operands, x) for x in operands.present if schema.BY_NAME[x].side == side}


def per_pair(operands: Operands) -> dict[str, Array]:
    """The operands that speak of pairs, rows in dimension 2 and keys in 3, by name; no map."""
    names = (x for x in operands.present if schema.BY_NAME[x].is_per_pair and x != "mask_map")
    return {x: getattr(operands, x) for x in names}


def taken(x: Array, start: Any, count: int, axis: int) -> Array:
    """``count`` entries of an array along ``axis``; all of it where that is broadcast."""
    if x.shape[axis] == 1:
        return x
    return jax.lax.dynamic_slice_in_dim(x, start, count, axis)


def meaning(semantics: Semantics) -> Semantics:
    """Semantics of every part: the diagonal begins where ``q_offset`` says."""
    return replace(semantics, band=replace(semantics.band, alignment="top_left"))
