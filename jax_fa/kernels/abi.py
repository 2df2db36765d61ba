"""The flat parameter list of every compiled host entry: the contract between kernels and C++.

A host entry takes run-time values only: pointers to dense row-major arrays, 32-bit extents and
scalars, the stream. What is compile-time (head sizes, element type, mask class, soft cap, tile
sizes) is closed over and absent from the list. All entries of one operation share one list, so the
C++ side fills one array of argument addresses per operation, in this order, whatever the variant;
a class of masks that has no use for an operand ignores it (``READS`` says which it looks at).

Absent operands are null pointers. Extents are those of ``FwdParams`` in ``ffi/kernels.h``: for
packed sequences ``batch`` is 1, ``q_len`` and ``kv_len`` are totals, and ``num_sequences`` counts
the sequences; otherwise ``num_sequences == batch``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["pointer", "int32", "float32", "stream"]
MaskClass = Literal["full", "causal", "general"]

MASK_CLASSES: tuple[MaskClass, ...] = ("full", "causal", "general")
"""What a variant may mask: nothing; keys beyond the diagonal (either alignment); everything."""


class Param(NamedTuple):
    """One parameter of a host entry.

    Attributes:
        name: field of ``FwdParams`` / ``BwdParams``, or of their ``problem`` or ``extras``.
        kind: C type: ``void*``, ``int32_t``, ``float``, ``cudaStream_t``.
    """

    name: str
    kind: Kind


def _params(kind: Kind, names: str) -> tuple[Param, ...]:
    return tuple(Param(name, kind) for name in names.split())


EXTRAS = _params(
    "pointer",
    "q_lengths kv_lengths cu_seqlens_q cu_seqlens_k q_segments kv_segments q_offset sinks",
)
"""Operands that may be null (``Extras`` in ``ffi/kernels.h``)."""

PROBLEM = (
    *_params("int32", "batch num_sequences q_len kv_len num_q_heads num_kv_heads"),
    *_params("float32", "scale soft_cap"),
    *_params("int32", "window_left window_right bottom_right num_sms"),
)
"""Run-time extents and scalars: ``bottom_right`` is 0 or 1, bounds are ``band.UNBOUNDED`` at most,
``num_sms`` is the device's multiprocessor count (persistent kernels launch that many CTAs).
"""

FORWARD: tuple[Param, ...] = (
    *_params("pointer", "q k v out lse"),
    *EXTRAS,
    *PROBLEM,
    Param("stream", "stream"),
)
"""Parameters of every forward entry."""

ALIGNMENT_BYTES = 16
"""Every array pointer but those of ``EXTRAS`` and ``lse`` is a multiple of this (a TMA rule)."""

READS: dict[MaskClass, frozenset[str]] = {
    "full": frozenset({"sinks"}),
    "causal": frozenset({"sinks", "bottom_right"}),
    "general": frozenset({param.name for param in EXTRAS})
    | {"window_left", "window_right", "bottom_right"},
}
"""Operands beyond shapes and scale that a forward variant of each mask class looks at."""
