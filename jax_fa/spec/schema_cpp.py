"""The C++ side of ``schema.py``: the text of ``ffi/schema.h`` (``python ffi/write_schema.py``)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jax_fa.spec import abi, arch, band, band_of_keys, division, schema, scratch
from jax_fa.spec.band import MAX_LENGTH, UNBOUNDED, Band, Extremes
from jax_fa.spec.key import HEAD_STEP
from jax_fa.spec.schema import Array, Operation

_PARAMS: dict[arch.Operation, str] = {
    "fwd": "FwdParams",
    "bwd": "BwdParams",
    "dbias": "DbiasParams",
}
_TITLES: dict[arch.Operation, str] = {
    "fwd": "jax_fa forward",
    "bwd": "jax_fa backward",
    "dbias": "jax_fa gradient of a bias",
}
_ELEMENTS = {"element": "void", "float32": "float", "int32": "int32_t", "bias": "void"}
_KINDS = {
    "float32": "float",
    "int32": "int32_t",
    "bool": "bool",
    "string": "std::string_view",
}
_EXTRAS = tuple(array for array in schema.OPERANDS if array.is_optional)

_HEAD = f"""\
// What crosses the borders between JAX, C++ and kernels: arrays, extents and attributes of all
// operations, what the FFI handlers hand to a kernel of any platform. Written from
// jax_fa/spec/schema.py, and jax_fa/spec/band.py, by `python ffi/write_schema.py`; do not edit.
// Conventions (scale, LSE, empty rows, padding) are stated once, in jax_fa/spec/problem.py.
// clang-format off
#ifndef JAX_FA_SCHEMA_H_
#define JAX_FA_SCHEMA_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace jax_fa {{

// jax_fa/spec/schema.py: VERSION.
inline constexpr int kVersion = {schema.VERSION};

enum class DType : int32_t {{ kF32, kBF16, kF16 }};

// A side of the band without a bound (jax_fa/spec/band.py: UNBOUNDED).
inline constexpr int32_t kUnbounded = {UNBOUNDED};
// Rows, or keys, of a sequence on a GPU at most (jax_fa/spec/band.py: MAX_LENGTH).
inline constexpr int64_t kMaxLength = {MAX_LENGTH};
// Parts into which keys may be split (jax_fa/spec/division.py: RESIDENT_CTAS).
inline constexpr int64_t kMaxSplits = {division.RESIDENT_CTAS};
inline constexpr int64_t kHeadStep = {HEAD_STEP};
// Query rows of a row of mask_words that is about a block (jax_fa/spec/division.py: MASK_BLOCK).
inline constexpr int64_t kMaskBlock = {division.MASK_BLOCK};
// Where aligned arrays start: at multiples of so many bytes.
inline constexpr uintptr_t kAlignmentBytes = {abi.ALIGNMENT_BYTES};
"""


@dataclass(frozen=True)
class _Text:
    """A C++ expression; arithmetic on it writes a longer one.

    ``//`` becomes C++'s ``/``, which is the same as long as nothing divided is negative.
    """

    text: str

    def _with(self, sign: str, other: Any) -> _Text:
        return _Text(f"({self} {sign} {other})")

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: Any) -> _Text:
        return self._with("+", other)

    def __sub__(self, other: Any) -> _Text:
        return self._with("-", other)

    def __mul__(self, other: Any) -> _Text:
        return self._with("*", other)

    def __floordiv__(self, other: Any) -> _Text:
        return self._with("/", other)

    def __radd__(self, other: Any) -> _Text:
        return _Text(f"({other} + {self})")

    def __rsub__(self, other: Any) -> _Text:
        return _Text(f"({other} - {self})")

    def __rmul__(self, other: Any) -> _Text:
        return _Text(f"({other} * {self})")

    def __rfloordiv__(self, other: Any) -> _Text:
        return _Text(f"({other} / {self})")

    def __gt__(self, other: Any) -> _Text:
        return self._with(">", other)


def _call(function: str) -> Any:
    return lambda a, b: _Text(f"std::{function}<int64_t>({a}, {b})")


_EXTREMES = Extremes(_call("min"), _call("max"))


def _extents() -> tuple[dict[str, Any], dict[str, _Text]]:
    """The extent of every letter in terms of a ``Problem p``, and of variables with their values.

    Digits stand for themselves.
    """
    variables: dict[str, _Text] = {}

    def named(name: str, value: _Text) -> _Text:
        variables[name] = value
        return _Text(name)

    on = scratch.Arithmetic(
        _EXTREMES,
        lambda if_, then, else_: _Text(f"({if_} ? {then} : {else_})"),
        named,
    )
    given: dict[str, Any] = {x.letter: _Text(f"p.{x.name}") for x in schema.EXTENTS}
    given |= schema.derived(given, on.extremes)
    bounds = [f"p.window_{side} != kUnbounded" for side in ("left", "right")]
    is_banded = _Text(f"int64_t{{{' || '.join(bounds)}}}")
    of_call = (_Text("p.num_splits"), _Text("p.deterministic"), is_banded, _Text("p.dq_dim"))
    asked = scratch.Asked(*of_call)
    derived = scratch.extents(given, asked, on)
    used = {x for array in schema.BY_NAME.values() for x in array.dims.split()}
    return {**given, **derived, **{x: x for x in sorted(used) if x.isdigit()}}, variables


def _lines(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Lines of code with comments, which may be empty."""
    return [f"  {code}  // {note}" if note else f"  {code}" for code, note in rows]


def _struct(name: str, note: str, lines: list[str]) -> str:
    return "\n".join([f"// {note}", f"struct {name} {{", *lines, "};\n"])


def _visitor(name: str, note: str, calls: list[str]) -> list[str]:
    """A static member that visits some of the members of ``Self``, constant or not."""
    parameters = "Self& self, Visit&& visit" if calls else "Self&, Visit&&"
    return [
        f"  // {note}",
        "  template <typename Self, typename Visit>",
        f"  static void {name}({parameters}) {{",
        *(f"    {call};" for call in calls),
        "  }",
    ]


def _problem() -> str:
    fields = [("DType dtype;", "of q, k, v, out and their gradients")]
    for extent in schema.EXTENTS:
        note = f"{extent.letter}: {extent.note}" if extent.note else extent.letter
        fields.append((f"int64_t {extent.name};", note))
    fields.append(("int64_t num_splits;", "forward only: parts of the keys; 0 or 1: not split"))
    fields.append(("int64_t dq_dim;", "backward only: D that the kernel is compiled for"))
    fields.append(("bool gives_dbias;", "backward only: the gradient of the bias is a result, too"))
    fields += [(f"{_KINDS[x.kind]} {x.name};", x.note) for x in schema.ATTRIBUTES]
    attributes = [
        f'visit("{x.name}", self.{x.name}, {str(x.is_required).lower()})' for x in schema.ATTRIBUTES
    ]
    of_shapes = [f'visit("{x.name}", self.{x.name})' for x in schema.EXTENTS]
    sides = [f'visit("{x.name}", self.{x.name})' for x in schema.ATTRIBUTES if x.window]
    return _struct(
        "Problem",
        "Static semantics and extents, shared by all operations. Arrays are dense and row-major.",
        [
            *_lines(fields),
            "",
            *_visitor("Extents", "visit(name, extent) for those that shapes tell.", of_shapes),
            *_visitor("Attributes", "visit(name, value, is_required) for each.", attributes),
            *_visitor("Sides", "visit(name, value) for the attributes of the band.", sides),
        ],
    )


def _window() -> str:
    """The band of a sequence: ``band.Window``, with its functions, and what makes one."""
    window = band.Window(*map(_Text, band.Window._fields))
    fields = [f'visit("{name}", self.{name})' for name in band.Window._fields]
    member = "  Range {}(int64_t {}) const {{ return {{{}}}; }}"
    keys = band.key_range(window, _Text("row"), _EXTREMES)
    rows = band_of_keys.row_range(window, _Text("key"), _EXTREMES)
    lengths = (_Text("q_len"), _Text("kv_len"), _Text("query_offset"))
    top_left, bottom_right = (
        Band(alignment=alignment).shift(*lengths) for alignment in ("top_left", "bottom_right")
    )
    values: dict[str, Any] = {x.window: f"side(p.{x.name})" for x in schema.ATTRIBUTES if x.window}
    values |= {"q_len": "q_len", "kv_len": "kv_len", "shift": "shift"}
    return "\n".join(
        [
            "// [lo, hi), empty when hi <= lo.",
            "struct Range {",
            "  int64_t lo;",
            "  int64_t hi;",
            "};\n",
            _struct(
                "Window",
                "The band of one sequence, everything known; jax_fa/spec/band.py explains it.",
                [
                    *(f"  int64_t {name};" for name in band.Window._fields),
                    "",
                    "  // Keys that query `row` sees, for row < q_len.",
                    member.format("KeysOf", "row", ", ".join(map(str, keys))),
                    "  // Query rows that see `key`, for key < kv_len.",
                    member.format("RowsOf", "key", ", ".join(map(str, rows))),
                    *_visitor("Fields", "visit(name, value) for each.", fields),
                ],
            ),
            "// That of a sequence of these lengths.",
            "inline Window WindowOf(const Problem& p, int64_t q_len, int64_t kv_len,",
            "                       int64_t query_offset) {",
            "  // Without a bound a side is farther than any query_offset reaches.",
            "  const auto side = [](int32_t x) { return x >= kUnbounded ? int64_t{1} << 40 : x; };",
            f"  const int64_t shift = p.bottom_right ? {bottom_right} : {top_left};",
            f"  return {{{', '.join(values[name] for name in band.Window._fields)}}};",
            "}\n",
        ]
    )


def _letter(letter: str) -> str:
    """A letter as a C++ name."""
    return f"x{letter}" if letter.isdigit() else letter.replace("+", "_plus_")


def _letters() -> str:
    letters, variables = _extents()
    names = ", ".join(map(_letter, letters))
    return "\n".join(
        [
            "// Letters of dimensions; jax_fa/spec/schema.py explains them.",
            "namespace letters {",
            f"enum Letter : size_t {{ {names} }};",
            "}",
            f"inline constexpr size_t kNumLetters = {len(letters)};\n",
            "// The extent of each, of a problem that CheckProblem (checks.h) has passed.",
            "using Extents = std::array<int64_t, kNumLetters>;",
            "inline Extents ExtentsOf(const Problem& p) {",
            *(f"  const int64_t {name} = {value};" for name, value in variables.items()),
            "  return {",
            *(f"      {extent},  // {letter}" for letter, extent in letters.items()),
            "  };",
            "}\n",
        ]
    )


def _arrays() -> str:
    lines = []
    for array in schema.BY_NAME.values():
        dims = array.dims.split()
        flags = f"{array.is_optional}, {array.is_aligned}".lower()
        letters = ", ".join(map(_letter, dims))
        lines.append(
            f'inline constexpr Array {array.name}{{"{array.name}", Element::k{array.dtype.title()},'
            f" {flags}, {len(dims)}, {{{letters}}}}};"
        )
    operands = ([x.name for x in y.operands] for y in schema.OPERATIONS.values())
    places = ", ".join(x[0] for x in zip(*operands, strict=False) if len(set(x)) == 1)
    rank = max(len(array.dims.split()) for array in schema.BY_NAME.values())
    return "\n".join(
        [
            "// kElement: Problem::dtype; kBias: that, or float32 if Problem::bias_bytes is 4.",
            "enum class Element { kElement, kFloat32, kInt32, kBias };\n",
            "// An array of a call, as jax_fa/spec/schema.py describes it.",
            "struct Array {",
            "  const char* name;",
            "  Element element;",
            "  bool is_optional;  // absent: no elements at the FFI, a null pointer here",
            "  bool is_aligned;   // starts at a multiple of kAlignmentBytes on a GPU",
            "  size_t rank;",
            f"  letters::Letter dims[{rank}];",
            "};\n",
            "namespace arrays {",
            "using namespace letters;",
            *lines,
            "}  // namespace arrays\n",
            "// Places of the operands that all operations have at the same place.",
            "namespace places {",
            f"enum Place : size_t {{ {places} }};",
            "}\n",
        ]
    )


def _pointer(array: Array, is_read: bool) -> tuple[str, str]:
    """Declaration and comment of a pointer to an array."""
    const = "const " if is_read else ""
    shape = f"[{', '.join(array.dims.split())}]"
    code = f"{const}{_ELEMENTS[array.dtype]}* {array.name};"
    return code, f"{shape} {array.note}".rstrip()


def _extras() -> str:
    fields = [_pointer(array, is_read=True) for array in _EXTRAS]
    return _struct(
        "Extras", "Operands that may be absent, of all operations: null pointers.", _lines(fields)
    )


def _params(name: arch.Operation, operation: Operation) -> str:
    members = {
        **{array.name: f"self.{array.name}" for array in (*operation.operands, *operation.results)},
        **{array.name: f"self.extras.{array.name}" for array in _EXTRAS},
        **{array.name: f"self.scratch.{array.name}" for array in operation.scratch},
    }

    def visits(arrays: tuple[Array, ...]) -> list[str]:
        return [f"visit(arrays::{array.name}, {members[array.name]})" for array in arrays]

    reads = [_pointer(x, is_read=True) for x in operation.operands if x not in _EXTRAS]
    writes = [_pointer(x, is_read=False) for x in operation.results]
    scratch_fields = [_pointer(x, is_read=False) for x in operation.scratch]
    may_lack = str(operation.may_lack_scratch).lower()
    each = "visit(array, pointer) for each, in call order."
    parameters = [
        "  // visit(argument) for each parameter of a host entry, in order (spec/abi.py).",
        "  // Extents must fit 32 bits.",
        "  template <typename Visit>",
        "  void Parameters(int32_t num_sms, void* stream, Visit&& visit) const {",
        f"    const {_PARAMS[name]}& self = *this;",
        *(f"    visit({_argument(param, members)});" for param in abi.PARAMETERS[name]),
        "  }",
    ]
    return _struct(
        _PARAMS[name],
        f"A {_TITLES[name].removeprefix('jax_fa ')} on given arrays.",
        [
            f'  static constexpr const char* kTitle = "{_TITLES[name]}";',
            f'  static constexpr const char* kOperation = "{name}";  // begins names of variants',
            f"  static constexpr bool kMayLackScratch = {may_lack};",
            f"  static constexpr size_t kNumOperands = {len(operation.operands)};",
            "  // Of these at the end, older programs lack some.",
            f"  static constexpr size_t kNumAddedOperands = {operation.num_added};",
            f"  static constexpr size_t kNumResults = {len(operation.results)};",
            "  // Of these at the end, calls on GPUs may lack some, and others have none.",
            f"  static constexpr size_t kNumAddedResults = {operation.num_added_results};",
            f"  static constexpr size_t kNumScratch = {len(operation.scratch)};",
            f"  static constexpr int32_t kNumParameters = {len(abi.PARAMETERS[name])};\n",
            "  Problem problem;",
            "  Extras extras;",
            *_lines([*reads, *writes]),
            "  // Memory of GPU kernels that nobody reads afterwards, uninitialised; else null.",
            "  struct {",
            *(f"  {line}" for line in _lines(scratch_fields)),
            "  } scratch;\n",
            *_visitor("Operands", each, visits(operation.operands)),
            *_visitor("Results", each, visits(operation.results)),
            *_visitor("Scratch", each, visits(operation.scratch)),
            *parameters,
        ],
    )


def _argument(param: abi.Param, members: dict[str, str]) -> str:
    """Where the value of a parameter is."""
    if param.kind == "pointer":
        return f"static_cast<const void*>({members[param.name]})"
    if param.kind == "stream":
        return "static_cast<const void*>(stream)"
    if param.name == "num_sms":
        return "num_sms"
    return f"static_cast<{_KINDS[param.kind]}>(self.problem.{param.name})"


def header() -> str:
    """The text of ``ffi/schema.h``."""
    return "\n".join(
        [
            _HEAD,
            _problem(),
            _window(),
            _letters(),
            _arrays(),
            _extras(),
            *(_params(name, operation) for name, operation in schema.OPERATIONS.items()),
            "}  // namespace jax_fa\n",
            "#endif  // JAX_FA_SCHEMA_H_\n",
        ]
    )
