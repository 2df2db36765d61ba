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

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jax_fa.band import ceil_div

if TYPE_CHECKING:
    from jax_fa.problem import Problem

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

FORWARD_SCRATCH = (*_params("pointer", "out_parts lse_parts"), Param("num_splits", "int32"))
"""Memory of a forward whose keys are split (``forward_scratch_shapes``), uninitialised, and in how
many parts they are; null pointers and 0 where they are not."""

FORWARD: tuple[Param, ...] = (
    *_params("pointer", "q k v out lse"),
    *FORWARD_SCRATCH,
    *EXTRAS,
    *PROBLEM,
    Param("stream", "stream"),
)
"""Parameters of every forward entry. Those that split keys take at least two parts, others none."""

SCRATCH = _params("pointer", "dq_sum row_stats dkv_sums turns")
"""Memory of a backward that nobody reads afterwards (``scratch_shapes``), uninitialised."""

BACKWARD: tuple[Param, ...] = (
    *_params("pointer", "q k v out lse dout dlse dq dk dv dsinks"),
    *SCRATCH,
    *EXTRAS,
    *PROBLEM,
    Param("deterministic", "int32"),
    Param("stream", "stream"),
)
"""Parameters of every backward entry. ``dlse`` may be null, ``dsinks`` is null iff ``sinks`` is."""

SCRATCH_BLOCK = 128
"""Query rows by which a sequence's place in ``dq_sum`` and ``row_stats`` may be padded; the largest
``block_q`` of any backward kernel."""

RESIDENT_CTAS = 132
"""Multiprocessors that are to be filled by splitting keys (forward) or groups of heads (backward):
those of an H100 SXM. Fixed, since it decides sizes of scratch, known before the device is."""


def scratch_rows(batch: Any, num_sequences: Any, q_len: Any) -> Any:
    """Query rows per head of ``dq_sum`` and ``row_stats``.

    Sequence m of start s occupies the rows from ``(s // block_q + m) * block_q`` on, whatever the
    ``block_q`` of the kernel, so that every sequence starts on a block of its own.
    """
    return (ceil_div(batch * q_len, SCRATCH_BLOCK) + num_sequences) * SCRATCH_BLOCK


def head_splits(num_tiles: Any, group: Any, *, minimum: Any = min, maximum: Any = max) -> Any:
    """Parts into which the query heads of one key/value head are split, each a CTA of its own.

    ``num_tiles`` counts the key blocks of ``KV_SPLIT_BLOCK`` keys of all sequences and heads. One
    part needs no sums beyond the accumulator; more are taken only while multiprocessors lie idle.
    """
    wanted = RESIDENT_CTAS // maximum(num_tiles, 1)
    return maximum(minimum(wanted, group), 1)


TURN_ROWS = 64
"""Query rows per element of ``turns``; the smallest ``block_q`` of any backward kernel."""

KV_SPLIT_BLOCK = 128
"""Keys per tile in ``head_splits``, whatever the ``block_kv`` of the kernel."""


def kv_tiles(batch: Any, num_sequences: Any, kv_len: Any) -> Any:
    """Key blocks per key/value head in ``head_splits``; of packed sequences, an upper bound."""
    return ceil_div(batch * kv_len, KV_SPLIT_BLOCK) + num_sequences - batch


def scratch_shapes(problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and element type of each array of ``SCRATCH``, for one call.

    * ``dq_sum``: dQ before scale and rounding, in an order that only the kernels know.
    * ``row_stats``: log2-sum-exp2 and delta of every query row.
    * ``dkv_sums``: dK, then dV, before rounding, by part of a group (``head_splits``); empty if
      there is one part.
    * ``turns``: how many key blocks have added to each query block; empty unless deterministic.
    """
    p = problem
    rows = scratch_rows(p.batch, p.num_sequences, p.q_len)
    tiles = kv_tiles(p.batch, p.num_sequences, p.kv_len) * p.num_kv_heads
    splits = head_splits(tiles, p.group)
    kv_rows = p.batch * p.kv_len * p.num_kv_heads * (p.head_dim + p.value_dim)
    return {
        "dq_sum": ((p.num_q_heads, rows, p.head_dim), "float32"),
        "row_stats": ((2, p.num_q_heads, rows), "float32"),
        "dkv_sums": ((splits if splits > 1 else 0, kv_rows), "float32"),
        "turns": ((p.num_q_heads, rows // TURN_ROWS if p.semantics.deterministic else 0), "int32"),
    }


GRANULE = 8
"""Rows of a head that stay together where heads share a tile: what a TMA box can put anywhere in
swizzled shared memory, so that every group packs without a kernel of its own."""


def packing(block_q: int, group: Any) -> tuple[Any, Any, Any]:
    """How the most heads of a group share tiles of ``block_q`` rows.

    Returns:
        Heads with rows in one tile, query positions of a tile, tiles by which a group covers them.
    """
    granules = block_q // GRANULE
    units = ceil_div(group, granules)
    heads = ceil_div(group, units)
    return heads, granules // heads * GRANULE, units


def packing_pays(packed_tiles: Any, plain_tiles: Any) -> Any:
    """Whether heads are to share tiles: it saves a quarter of the tiles or more.

    For a packed tile, Q is loaded in more, smaller pieces, and out is not stored by TMA.
    """
    return 4 * packed_tiles <= 3 * plain_tiles


SPLIT_ROWS = 128
"""Query rows per tile in ``kv_splits``: the smallest ``block_q`` of any forward kernel that splits,
so that keys are never split where a kernel of larger tiles would do better without."""

SPLIT_KEYS = 512
"""Keys that a part has at least. Merging is one more launch and one more pass over the parts, about
as long as one multiprocessor takes for 3 or 4 blocks of 128 keys: it must save more than that."""


def kv_splits(problem: Problem) -> int:
    """Parts into which the keys of a query tile are to be split, each a CTA of its own.

    1 unless at least half of ``RESIDENT_CTAS`` would lie idle and there are keys for two parts:
    short queries over long keys, as in decoding. Packed sequences count with their mean length.
    """
    p = problem
    _, positions, units = packing(SPLIT_ROWS, max(p.group, 1))
    plain, packed = _q_tiles(p, SPLIT_ROWS, p.group), _q_tiles(p, positions, units)
    q_tiles = packed if packing_pays(packed, plain) else plain
    kv_len = p.kv_len * p.batch // max(p.num_sequences, 1)
    wanted = RESIDENT_CTAS // max(q_tiles, 1)
    return max(min(wanted, kv_len // SPLIT_KEYS), 1)


def _q_tiles(problem: Problem, positions: int, units: int) -> int:
    """Tiles of all sequences and key/value heads, each of which has ``units`` by ``positions``."""
    p = problem
    blocks = p.batch * ceil_div(p.q_len, positions)
    if p.is_packed:
        blocks = ceil_div(p.batch * p.q_len, positions) + p.num_sequences - p.batch
    return blocks * p.num_kv_heads * units


def forward_scratch_shapes(
    problem: Problem, num_splits: int
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and element type of each array of ``FORWARD_SCRATCH``; none if keys are not split.

    * ``out_parts``: what ``out`` would be if a part's keys were all there are, not rounded.
    * ``lse_parts``: likewise for ``lse``; -inf where nothing is visible in a part.
    """
    if num_splits == 1:
        return {}
    p = problem
    rows = (num_splits, p.batch, p.q_len, p.num_q_heads)
    return {"out_parts": ((*rows, p.value_dim), "float32"), "lse_parts": (rows, "float32")}


ALIGNMENT_BYTES = 16
"""The arrays named in ``ALIGNED`` start at multiples of this (a TMA rule)."""

ALIGNED = frozenset("q k v out out_parts dout dq dk dv dq_sum row_stats dkv_sums".split())
"""Arrays that kernels read or write 16 bytes at a time."""

READS: dict[MaskClass, frozenset[str]] = {
    "full": frozenset({"sinks"}),
    "causal": frozenset({"sinks", "bottom_right"}),
    "general": frozenset({param.name for param in EXTRAS})
    | {"window_left", "window_right", "bottom_right"},
}
"""Operands beyond shapes and scale that a forward variant of each mask class looks at."""
