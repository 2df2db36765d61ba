"""What crosses the borders between JAX, C++ and kernels: the one list of arrays and attributes.

Everything that names an operand, a result, scratch or an attribute derives from here: the order of
FFI calls and their checks on both sides, record mode, the structs that C++ kernels take
(``ffi/schema.h``, which ``python ffi/write_schema.py`` writes and a test holds equal), the way
arrays split over devices, what a vmapped dimension joins, and the parameters of host entries.

Dimensions have the letters of ``problem.py``; beyond those::

    M+1  borders of M slots
    P    parts of the keys, each a CTA's; none unless they are split
    R    query rows, those of every sequence padded to whole blocks
    H    parts of a group of query heads; none if there is one
    E    elements of dK and dV together
    Z    parts of the batches and heads that share a bias; none if there is one
    U    blocks of query rows that take turns; none unless the backward is deterministic
    Bm Nm Tm Wm  extents of the mask: 1 where it is broadcast, else B, N, T and the words of S keys
    Tc Wc        stripes of rows, and words, of its map
    Ba Na Ta Sa  extents of the bias, which is added: 1 where it is broadcast, else B, N, T and S
    Bb           bytes of an element of the bias; not a dimension of any array

``scratch.py`` computes P to U, ``extents`` here the last two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from jax_fa.spec import arch
from jax_fa.spec.band import OF_INTS, Extremes, ceil_div
from jax_fa.spec.division import MAP_CELL, map_stripes

VERSION = 4
"""Of the compiled extension; raised whenever operands or attributes change. ``bindings.py`` refuses
an extension that has another."""

Dtype = Literal["element", "float32", "int32", "bias"]
"""Element type of an array; "element" is that of q, k and v, "bias" that or float32, as
``Problem.bias_bytes`` tells."""

Kind = Literal["float32", "int32", "bool", "string"]


Reader = tuple[str, arch.Operation]
"""Kernels of an operation: the folder of ``kernels/`` with their code, or "cpu"."""


class Array(NamedTuple):
    """One array of a call.

    Attributes:
        name: the same on every side.
        dtype: its element type.
        dims: letters of its dimensions.
        note: what it holds.
        is_optional: it may be absent: an array without elements at the FFI, else a null pointer.
        is_aligned: kernels access it 16 bytes at a time, by TMA or otherwise.
        is_differentiable: a backward gives its gradient.
        readers: the kernels that read it; None if all do. Where it is present, no others are
            chosen (``dispatch.py``). An operation does not receive an operand that none of its
            kernels reads; its host entries do not receive one that only the CPU's kernel reads.
        feature: what asks for it, in the words of the support table; "" if that takes more.
    """

    name: str
    dtype: Dtype
    dims: str
    note: str = ""
    is_optional: bool = False
    is_aligned: bool = False
    is_differentiable: bool = False
    readers: tuple[Reader, ...] | None = None
    feature: str = ""

    @property
    def is_hiding(self) -> bool:
        """Is an operand that may hide keys: integers do, others are added to logits."""
        return self.is_optional and self.dtype == "int32"

    @property
    def is_per_sequence(self) -> bool:
        """Has a row for each sequence, packed or not, or for each border of them."""
        return self.dims.split()[0] in ("M", "M+1")

    @property
    def side(self) -> Literal["T", "S"] | None:
        """T if it has a row for each query, in dimension 1; S if for each key; else None."""
        return next((letter for letter in ("T", "S") if letter in self.dims.split()), None)

    @property
    def is_per_token(self) -> bool:
        """Has a row for each query or key."""
        return self.side is not None

    @property
    def is_per_pair(self) -> bool:
        """Has an entry for each pair of a query and a key, or for several of them."""
        return self.dims.split()[0] in ("Bm", "Ba")

    @property
    def is_per_head(self) -> bool:
        """Has an entry for each query head or key/value head."""
        return not {"N", "K"}.isdisjoint(self.dims.split())

    @property
    def gradient(self) -> Array:
        """The result of a backward that belongs to a differentiable operand."""
        return Array(f"d{self.name}", self.dtype, self.dims, "", self.is_optional, self.is_aligned)

    def shape(self, extents: Mapping[str, Any]) -> tuple[Any, ...]:
        """Its shape, given the extent of every letter."""
        return tuple(int(x) if x.isdigit() else extents[x] for x in self.dims.split())


def _whole(name: str, dims: str, **more: Any) -> Array:
    return Array(name, "element", dims, is_aligned=True, **more)


def _ints(name: str, dims: str, note: str, **more: Any) -> Array:
    return Array(name, "int32", dims, note, is_optional=True, **more)


_LENGTHS = "`query_seq_lengths`, `key_value_seq_lengths`"
_SEGMENTS = "segment ids (packed documents)"

_FIRST_OPERANDS = (
    _whole("q", "B T N D", is_differentiable=True),
    _whole("k", "B S K D", is_differentiable=True),
    _whole("v", "B S K Dv", is_differentiable=True),
    _ints("q_lengths", "M", "used query rows of each slot", feature=_LENGTHS),
    _ints("kv_lengths", "M", "used keys of each slot", feature=_LENGTHS),
    _ints("cu_seqlens_q", "M+1", "slot borders of packed queries; present iff packed"),
    _ints("cu_seqlens_k", "M+1", "slot borders of packed keys; present iff packed"),
    _ints("q_segments", "B T", "a query sees only keys of its own segment", feature=_SEGMENTS),
    _ints("kv_segments", "B S", "present iff q_segments is"),
    _ints(
        *("q_offset", "M", "position of query row 0, added to the diagonal"),
        feature="`query_offset`",
    ),
    Array(
        *("sinks", "float32", "M N", "one extra logit per head in the denominator"),
        is_optional=True,
        is_differentiable=True,
        feature="`sinks`",
    ),
)
_BIAS = Array(
    *("bias", "bias", "Ba Na Ta Sa", "added to scale q.k; -inf hides a pair"),
    is_optional=True,
    is_aligned=True,
    is_differentiable=True,
)
_ADDED_OPERANDS = (
    _ints("mask_words", "Bm Nm Tm Wm", "bit i of word w: the row sees key 32 w + i"),
    _ints("mask_map", "Bm Nm 2 Tc Wc", "bit i of word w: 16 rows see some, all of 16 keys"),
    _BIAS,
)
"""Operands that older programs lack: in a call they stand last, behind what was saved."""

OPERANDS = (*_FIRST_OPERANDS, *_ADDED_OPERANDS)
"""Operands of all operations: the fields of ``problem.Operands``, in order."""

OUT = _whole("out", "B T N Dv")
LSE = Array("lse", "float32", "B T N", "natural log")

_DOUT = _whole("dout", "B T N Dv")

SAVED = (
    *(OUT, LSE, _DOUT),
    Array("dlse", "float32", "B T N", "null: zero", is_optional=True),
)
"""What a backward takes beside the operands: results of the forward and their cotangents."""

ROWS = (LSE, _DOUT, Array("delta", "float32", "B T N", "rowsum(dout * out) - dlse"))
"""What the gradient of a bias takes beside the operands."""

GRADIENTS = tuple(array.gradient for array in OPERANDS if array.is_differentiable)
"""The fields of ``problem.Gradients``, in order: the results of a backward."""

WRITERS_OF_DBIAS: tuple[Reader, ...] = (("sm90", "bwd"),)
"""Kernels of a backward that give the gradient of a bias, too, where it is broadcast along nothing
(``Problem.is_bias_whole``). All other gradients of biases are of the operation "dbias"."""


def _sums(name: str, dims: str, note: str) -> Array:
    return Array(name, "float32", dims, note, is_aligned=True)


FORWARD_SCRATCH = (
    _sums("out_parts", "P B T N Dv", "what out would be if a part's keys were all, not rounded"),
    Array("lse_parts", "float32", "P B T N", "likewise lse; -inf where a part shows nothing"),
)
BACKWARD_SCRATCH = (
    _sums("dq_sum", "N R Dq", "dQ before scale and rounding, in the kernels' own order"),
    _sums("row_stats", "2 N R", "log2-sum-exp2, then delta, of every query row"),
    _sums("dkv_sums", "H E", "dK, then dV, before rounding, by part of a group of heads"),
    Array("turns", "int32", "N U", "key blocks that have added to each query block"),
)


DBIAS_SCRATCH = (
    _sums("dbias_parts", "Z Ba Na Ta Sa", "what dbias would be of a part of what shares it"),
)


class Operation(NamedTuple):
    """The arrays of one operation, in call order.

    Attributes:
        operands: what it reads; calls may lack the last ``num_added``.
        results: what it writes for the caller.
        scratch: memory of GPU kernels that nobody reads afterwards, uninitialised; behind the
            results.
        may_lack_scratch: calls without any are valid.
        num_added: operands at the end that older programs lack.
        num_added_results: results at the end that calls on a GPU may lack.
    """

    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    scratch: tuple[Array, ...]
    may_lack_scratch: bool
    num_added: int
    num_added_results: int = 0


def _added(operation: arch.Operation) -> tuple[Array, ...]:
    """Of the operands that older programs lack, those that some kernel of an operation reads."""
    return tuple(
        x for x in _ADDED_OPERANDS if x.readers is None or operation in (y for _, y in x.readers)
    )


OPERATIONS: dict[arch.Operation, Operation] = {
    "fwd": Operation(
        (*_FIRST_OPERANDS, *_added("fwd")),
        (OUT, LSE),
        FORWARD_SCRATCH,
        may_lack_scratch=True,
        num_added=len(_added("fwd")),
    ),
    "bwd": Operation(
        (*_FIRST_OPERANDS, *SAVED, *_added("bwd")),
        *(GRADIENTS, BACKWARD_SCRATCH),
        may_lack_scratch=False,
        num_added=len(_added("bwd")),
        num_added_results=len((_BIAS.gradient,)),
    ),
    "dbias": Operation(
        (*_FIRST_OPERANDS, *ROWS, *_added("dbias")),
        *((_BIAS.gradient,), DBIAS_SCRATCH),
        may_lack_scratch=True,
        num_added=0,
    ),
}

BY_NAME = {
    array.name: array
    for operation in OPERATIONS.values()
    for array in (*operation.operands, *operation.results, *operation.scratch)
}


class Extent(NamedTuple):
    """An extent that a call's shapes tell, a field of ``problem.Problem``."""

    name: str
    letter: str
    note: str = ""


EXTENTS = (
    Extent("batch", "B", "1 when packed"),
    Extent("num_sequences", "M", "B, or the number of packed sequences"),
    Extent("q_len", "T", "or total_q when packed"),
    Extent("kv_len", "S", "or total_kv when packed"),
    Extent("num_q_heads", "N"),
    Extent("num_kv_heads", "K", "divides N"),
    Extent("head_dim", "D"),
    Extent("value_dim", "Dv"),
    Extent("mask_batch", "Bm", "1 or B; 0 without a mask, as the following"),
    Extent("mask_heads", "Nm", "1 or N"),
    Extent("mask_rows", "Tm", "1, T or blocks of 128 rows"),
    Extent("mask_width", "Wm", "1 or words of 32 keys"),
    Extent("bias_batch", "Ba", "1 or B; 0 without a bias, as the following"),
    Extent("bias_heads", "Na", "1 or N"),
    Extent("bias_rows", "Ta", "1 or T"),
    Extent("bias_keys", "Sa", "1 or S"),
    Extent("bias_bytes", "Bb", "of an element: 4, or 2"),
)


def extents(problem: Any) -> dict[str, Any]:
    """The extent of every letter that is no scratch's, given a ``problem.Problem``."""
    found = {extent.letter: getattr(problem, extent.name) for extent in EXTENTS}
    return {**found, **derived(found)}


def derived(found: Mapping[str, Any], extremes: Extremes = OF_INTS) -> dict[str, Any]:
    """Extents of the letters that follow from those of ``EXTENTS``."""
    return {
        "M+1": found["M"] + 1,
        "Tc": map_stripes(found["Tm"], found["T"], extremes),
        "Wc": ceil_div(found["Wm"], MAP_CELL),
    }


class Attribute(NamedTuple):
    """A value that is fixed when a program is compiled.

    Attributes:
        name: the same on every side.
        kind: its type.
        of: its value for given ``problem.Semantics``, where they tell; None if only older programs
            have it.
        note: what it says.
        is_required: False if it was added later: older programs lack it, which means 0 or "".
        is_backward_only: forward kernels do without.
        window: the field of ``band.Band`` that tells it, and of ``band.Window`` that it is; "" if
            none. It is from -UNBOUNDED to UNBOUNDED, which is no bound.
        readers: as for an ``Array``, where its value is not 0.
        feature: as for an ``Array``, where ``window`` has a value.
    """

    name: str
    kind: Kind
    of: Callable[[Any], Any] | None
    note: str = ""
    is_required: bool = True
    is_backward_only: bool = False
    window: str = ""
    readers: tuple[Reader, ...] | None = None
    feature: str = ""


ATTRIBUTES = (
    Attribute("scale", "float32", lambda s: s.scale),
    Attribute("soft_cap", "float32", lambda s: s.soft_cap or 0.0, "0: none"),
    Attribute(
        *("window_left", "int32", lambda s: s.band.left_bound),
        "keys before the diagonal, or kUnbounded",
        window="left",
        feature="`local_window_size`",
    ),
    Attribute(
        *("window_right", "int32", lambda s: s.band.right_bound),
        "keys beyond the diagonal, or kUnbounded; causal is 0",
        window="right",
        feature="`local_window_size`",
    ),
    Attribute(
        *("bottom_right", "bool", lambda s: s.band.alignment == "bottom_right"),
        "alignment of the diagonal",
    ),
    Attribute(
        *("deterministic", "bool", lambda s: s.deterministic),
        "gradients are the same bits on every run",
        is_backward_only=True,
    ),
    Attribute(
        *("mask_mod", "string", None),
        'of older programs: a function that their kernels were compiled with; "": none',
        is_required=False,
    ),
    Attribute(
        *("kernel", "string", lambda _: ""),
        "compiled kernel: its name without operation and family (jax_fa/spec/variants.py); on GPUs",
        is_required=False,
    ),
)
"""Attributes of all operations. They are only ever added, at the end, not required."""


def unread(problem: Any, reader: Reader) -> list[str]:
    """Features of a ``problem.Problem`` that a kernel does not read, by the callers' names."""
    asked: list[Array | Attribute] = [BY_NAME[name] for name in problem.present]
    asked += [x for x in ATTRIBUTES if x.readers and x.of and x.of(problem.semantics)]
    unread = [x for x in asked if x.readers is not None and reader not in x.readers]
    return [*dict.fromkeys(x.feature.replace("`", "") or x.name for x in unread)]
