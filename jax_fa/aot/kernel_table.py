"""Writes the C++ side of the variant list: ``kernel_table.gen.cc`` for ``ffi/kernel_table.h``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jax_fa.spec import schema
from jax_fa.spec.abi import PARAMETERS
from jax_fa.spec.arch import ARCHS, OPERATIONS, Arch, Operation, capability_number
from jax_fa.spec.names import ENDINGS, kind_of, short_heads
from jax_fa.spec.variants import Variant

_C_TYPES = {
    "pointer": "void*",
    "int32": "int32_t",
    "float32": "float",
    "stream": "cudaStream_t",
}
_DTYPES = {"bfloat16": "DType::kBF16", "float16": "DType::kF16"}


class Signature(NamedTuple):
    """A kernel that a variant launches, and the sizes of its parameters."""

    kernel: str
    param_bytes: tuple[int, ...]


class Row(NamedTuple):
    """One compiled variant.

    Attributes:
        variant: which.
        symbol: C name of its host entry.
        kernels: what it launches.
        ptx_sha256: of the PTX that its object was assembled from.
    """

    variant: Variant
    symbol: str
    kernels: tuple[Signature, ...]
    ptx_sha256: str = ""


def c_parameters(operation: Operation) -> list[tuple[str, str]]:
    """(C type, name) of every parameter, as an exported header writes them."""
    return [(_C_TYPES[param.kind], param.name) for param in PARAMETERS[operation]]


def table(rows: Sequence[Row]) -> str:
    """The text of ``kernel_table.gen.cc``."""
    parts = [
        "// Written by python -m jax_fa.aot. Do not edit.",
        '#include "kernel_table.h"\n',
        _declarations(rows),
        "namespace jax_fa {",
        "namespace {\n",
        *(_signatures(row) for row in rows),
        _variants(rows),
        _capabilities(),
        "}  // namespace\n",
        _accessor(rows),
        "}  // namespace jax_fa",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _object_functions(row: Row) -> tuple[str, str, str]:
    prefix = f"_mlir_{row.variant.name}_cuda"
    return f"{prefix}_init", f"{prefix}_load_to_device", row.symbol


def _declarations(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        init, load, call = _object_functions(row)
        lines += [f"void {init}(void**);", f"void {load}(void**);"]
        lines += [f"void {call}(void**, int32_t);"]
    return "\n".join(['extern "C" {', *lines, '}  // extern "C"\n']) if lines else ""


def _signatures(row: Row) -> str:
    name = row.variant.name
    lines = []
    entries = []
    for i, kernel in enumerate(row.kernels):
        sizes = ", ".join(map(str, kernel.param_bytes))
        lines.append(f"constexpr int32_t {name}_params{i}[] = {{{sizes}}};")
        entries.append(f'{{"{kernel.kernel}", {name}_params{i}, {len(kernel.param_bytes)}}}')
    lines.append(f"constexpr KernelSignature {name}_kernels[] = {{{', '.join(entries)}}};\n")
    return "\n".join(lines)


def _variants(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = ["const Variant variants[] = {"]
    for row in rows:
        name, key = row.variant.name, row.variant.key
        dims = f"{_DTYPES[key.dtype]}, {key.head_dim}, {key.value_dim}"
        parts = "kAny" if key.is_few else "kSeveral" if key.is_split else "kOne"
        reader = row.variant.kernels, row.variant.operation
        gives_dbias = key.has_bias and reader in schema.WRITERS_OF_DBIAS
        flags = f"{key.has_bias}, {gives_dbias}".lower()
        lines.append(f"    {{{{{dims}, Parts::{parts}, {flags}}},")
        functions = ", ".join(_object_functions(row))
        lines.append(f'     {{"{name}", {functions}, {name}_kernels, {len(row.kernels)}}},')
        lines.append(f'     "{row.ptx_sha256}"}},')
    return "\n".join([*lines, "};\n"])


def _capability_rows() -> list[str]:
    return [
        f'    {{{capability_number(capability)}, "{operation}", "{part}", "{family}"}},'
        for arch in ARCHS
        for capability in arch.capabilities
        for operation in OPERATIONS
        for part, family in _families(arch, operation).items()
    ]


def _families(arch: Arch, operation: Operation) -> dict[str, str]:
    """Parts of the names of kernels -> the family whose kernels GPUs run; the first that fits."""
    found = {ending: arch.lender(kind_of(operation, ending)).name for ending in ENDINGS.values()}
    kind = kind_of(operation, "")
    own, lender = arch.own(kind), arch.lender(kind)
    if own and lender is not arch:
        found |= {f"_{short_heads(*heads)}_": arch.name for heads in own.heads}
    return {**found, "": lender.name}


def _capabilities() -> str:
    return "\n".join(["constexpr Capability capabilities[] = {", *_capability_rows(), "};\n"])


def _accessor(rows: Sequence[Row]) -> str:
    variants = "variants" if rows else "nullptr"
    fields = f"{variants}, {len(rows)}, capabilities, {len(_capability_rows())}"
    return (
        "const Table& KernelTable() {\n"
        f"  static const Table table{{{fields}}};\n"
        "  return table;\n"
        "}\n"
    )
