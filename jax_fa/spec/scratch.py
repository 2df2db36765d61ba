"""How much memory GPU kernels need for one call, besides operands and results.

The arithmetic is that of ``backward_division.py``, on ints here and on the names of C++ fields in
``schema_cpp``, so that C++ checks what Python allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax_fa.spec import backward_division, schema
from jax_fa.spec.arch import Operation
from jax_fa.spec.band import OF_INTS, Extremes, ceil_div
from jax_fa.spec.problem import Problem


class Arithmetic(NamedTuple):
    """The operations that extents are computed with, where they may be other than ints.

    Attributes:
        extremes: the smaller and the larger of two values.
        select: (condition, then, otherwise) -> one of the last two.
        named: (name, value) -> the same value; for one that occurs several times.
    """

    extremes: Extremes
    select: Callable[[Any, Any, Any], Any]
    named: Callable[[str, Any], Any]


ON_INTS = Arithmetic(OF_INTS, lambda if_, then, else_: then if if_ else else_, lambda _, x: x)


class Asked(NamedTuple):
    """What scratch depends on, besides extents.

    Attributes:
        num_splits: parts of the keys in a forward.
        deterministic: whether a backward is deterministic.
        is_banded: 1 where a causal mask or a window hides keys, else 0.
        dq_dim: the D that the kernel of a backward is compiled for, at least that of the problem.
    """

    num_splits: Any
    deterministic: Any
    is_banded: Any
    dq_dim: Any


def extents(given: Mapping[str, Any], asked: Asked, on: Arithmetic = ON_INTS) -> dict[str, Any]:
    """Returns the extents of letters that only scratch has, given those of ``schema.extents``."""
    x = given
    rows = on.named("rows", backward_division.scratch_rows(x["B"], x["M"], x["T"]))
    tiles = backward_division.kv_tiles(x["B"], x["M"], x["S"]) * x["K"]
    group = x["N"] // x["K"]
    parts = backward_division.head_splits(tiles, group, asked.is_banded, on.extremes, on.named)
    parts = on.named("parts", parts)
    bias_heads = x["Ba"] * x["Na"]
    bias_tiles = bias_heads
    for letter in ("Ta", "Sa"):
        bias_tiles = bias_tiles * ceil_div(x[letter], backward_division.DBIAS_TILE)
    pairs = x["B"] * x["N"] // on.extremes.maximum(bias_heads, 1)
    bias_parts = backward_division.dbias_parts(bias_tiles, pairs, on.extremes)
    bias_parts = on.named("bias_parts", bias_parts)
    return {
        "Z": on.select(bias_parts > 1, bias_parts, 0),
        "P": on.select(asked.num_splits > 1, asked.num_splits, 0),
        "R": rows,
        "Dq": asked.dq_dim,
        "H": on.select(parts > 1, parts, 0),
        "E": x["B"] * x["S"] * x["K"] * (x["D"] + x["Dv"]),
        "U": on.select(asked.deterministic, rows // backward_division.TURN_ROWS, 0),
    }


def shapes(
    operation: Operation, problem: Problem, num_splits: int = 1, dq_dim: int | None = None
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns shape and element type of each scratch array of one call, by name in call order.

    Args:
        operation: the operation of the call.
        problem: the problem of the call.
        num_splits: parts into which a forward splits the keys; a single part needs no scratch.
        dq_dim: as for ``Asked``; None for that of the problem.
    """
    if operation == "fwd" and num_splits == 1:
        return {}
    letters = schema.extents(problem)
    semantics = problem.semantics
    is_banded = int(not semantics.band.is_full)
    asked = Asked(num_splits, semantics.deterministic, is_banded, dq_dim or problem.head_dim)
    letters |= extents(letters, asked)
    return {
        array.name: (array.shape(letters), array.dtype)
        for array in schema.OPERATIONS[operation].scratch
    }
