"""The flat parameter list of every compiled host entry: the contract between kernels and C++.

A host entry takes run-time values only: pointers to dense row-major arrays, 32-bit extents and
scalars, the stream. What is compile-time (the largest head sizes, element type, mask class, soft
cap, tile sizes) is closed over and absent from the list. All entries of one operation share one
list, so the C++ side fills one array of argument addresses per operation, in this order, whatever
the variant; an entry that has no use for an operand ignores it.

Arrays, extents and attributes are those of ``schema.py``. Absent operands are null pointers. For
packed sequences ``batch`` is 1, ``q_len`` and ``kv_len`` are totals, and ``num_sequences`` counts
the sequences; otherwise ``num_sequences == batch``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from jax_fa.spec import schema
from jax_fa.spec.arch import Operation
from jax_fa.spec.schema import Array, Attribute

Kind = Literal["pointer", "int32", "float32", "stream"]


class Param(NamedTuple):
    """One parameter of a host entry.

    Attributes:
        name: of an array, an extent or an attribute.
        kind: C type: ``void*``, ``int32_t``, ``float``, ``cudaStream_t``.
    """

    name: str
    kind: Kind


def _pointers(arrays: Iterable[Array]) -> tuple[Param, ...]:
    return tuple(Param(array.name, "pointer") for array in arrays)


def _scalars(attributes: Iterable[Attribute]) -> tuple[Param, ...]:
    """Attributes that are known at run time only; flags are 0 or 1."""
    kinds: dict[str, Kind] = {"float32": "float32", "int32": "int32", "bool": "int32"}
    return tuple(Param(x.name, kinds[x.kind]) for x in attributes if x.kind in kinds)


_REQUIRED = _pointers(array for array in schema.OPERANDS if not array.is_optional)


def is_read(row: Array | Attribute, operation: Operation) -> bool:
    """Whether some GPU kernel of ``operation`` reads ``row``."""
    return row.readers is None or any(
        folder != "cpu" and of == operation for folder, of in row.readers
    )


def _extras(operation: Operation) -> tuple[Param, ...]:
    """Operands that may be null."""
    return _pointers(x for x in schema.OPERANDS if x.is_optional and is_read(x, operation))


def _problem(operation: Operation) -> tuple[Param, ...]:
    """Run-time extents and scalars.

    Bounds are at most ``band.UNBOUNDED``; ``num_sms`` is the device's multiprocessor count
    (persistent kernels launch that many CTAs).
    """
    read = (x for x in schema.ATTRIBUTES if is_read(x, operation) and not x.is_backward_only)
    return (
        *(Param(extent.name, "int32") for extent in schema.EXTENTS),
        *_scalars(read),
        Param("num_sms", "int32"),
    )


FORWARD: tuple[Param, ...] = (
    *_REQUIRED,
    *_pointers((*schema.OPERATIONS["fwd"].results, *schema.FORWARD_SCRATCH)),
    Param("num_splits", "int32"),
    *_extras("fwd"),
    *_problem("fwd"),
    Param("stream", "stream"),
)
"""Parameters of every forward entry. Entries that split keys take at least two parts; others take
none, that is null pointers and 0."""

BACKWARD: tuple[Param, ...] = (
    *_REQUIRED,
    *_pointers((*schema.SAVED, *schema.OPERATIONS["bwd"].results, *schema.BACKWARD_SCRATCH)),
    *_extras("bwd"),
    *_problem("bwd"),
    *_scalars(attribute for attribute in schema.ATTRIBUTES if attribute.is_backward_only),
    Param("stream", "stream"),
)
"""Parameters of every backward entry. ``dlse`` may be null; ``dsinks`` is null iff ``sinks`` is."""

BIAS_GRADIENT: tuple[Param, ...] = (
    *_REQUIRED,
    *_pointers((*schema.ROWS, *schema.OPERATIONS["dbias"].results, *schema.DBIAS_SCRATCH)),
    *_extras("dbias"),
    *_problem("dbias"),
    Param("stream", "stream"),
)
"""Parameters of every entry that computes the gradient of a bias; the bias is never null."""

PARAMETERS: dict[Operation, tuple[Param, ...]] = {
    "fwd": FORWARD,
    "bwd": BACKWARD,
    "dbias": BIAS_GRADIENT,
}
"""The parameters of the entries of each operation."""

ALIGNMENT_BYTES = 16
"""Arrays that kernels access 16 bytes at a time start at multiples of this (a TMA rule)."""
