"""Writes the C++ side of the variant list: ``kernel_table.gen.cc`` for ``ffi/kernel_table.h``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jax_fa.kernels import abi
from jax_fa.variants import ARCHS, Operation, Variant

PARAMETERS: dict[Operation, tuple[abi.Param, ...]] = {"fwd": abi.FORWARD, "bwd": abi.BACKWARD}
"""Parameter list of each operation's host entries."""

_C_TYPES = {
    "pointer": "void*",
    "int32": "int32_t",
    "float32": "float",
    "stream": "cudaStream_t",
}
_OPERATIONS = {"fwd": "Operation::kForward", "bwd": "Operation::kBackward"}
_PARAMS = {"fwd": "FwdParams", "bwd": "BwdParams"}
_DTYPES = {"bfloat16": "DType::kBF16", "float16": "DType::kF16"}
_MASKS = {
    "full": "MaskClass::kFull",
    "causal": "MaskClass::kCausal",
    "general": "MaskClass::kGeneral",
}


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
        *(_fill(operation) for operation in PARAMETERS),
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
        fields = (
            _OPERATIONS[row.variant.operation],
            _arch_number(row.variant.arch),
            _DTYPES[key.dtype],
            key.head_dim,
            key.value_dim,
            _MASKS[key.mask],
            str(key.has_soft_cap).lower(),
            str(key.is_split).lower(),
            f'"{key.mask_mod or ""}"',
        )
        lines.append(f"    {{{{{', '.join(map(str, fields))}}},")
        functions = ", ".join(_object_functions(row))
        lines.append(f'     {{"{name}", {functions}, {name}_kernels, {len(row.kernels)}}},')
        lines.append(f'     "{row.ptx_sha256}"}},')
    return "\n".join([*lines, "};\n"])


def _capabilities() -> str:
    numbers = [_arch_number(arch.name) for arch in ARCHS]
    pairs = ", ".join(f"{{{number}, {number}}}" for number in numbers)
    return f"constexpr Capability capabilities[] = {{{pairs}}};\n"


def _arch_number(arch: str) -> int:
    return int(arch.removeprefix("sm"))


def _accessor(rows: Sequence[Row]) -> str:
    fields = f"{'variants' if rows else 'nullptr'}, {len(rows)}, capabilities, {len(ARCHS)}"
    return (
        "const Table& KernelTable() {\n"
        f"  static const Table table{{{fields}}};\n"
        "  return table;\n"
        "}\n"
    )


def _fill(operation: Operation) -> str:
    params = PARAMETERS[operation]
    signature = (
        f"void FillArguments([[maybe_unused]] const {_PARAMS[operation]}& params,\n"
        "                   [[maybe_unused]] const Device& device, [[maybe_unused]] void* stream,\n"
        "                   [[maybe_unused]] Arguments* arguments) {"
    )
    check = f"  static_assert({len(params)} <= Arguments::kMax);"
    adds = [f"  arguments->Add({_value(param)});" for param in params]
    return "\n".join([signature, check, *adds, "}\n"])


def _value(param: abi.Param) -> str:
    """Where the C++ side finds a parameter."""
    if param.kind == "stream":
        return "stream"
    if param.name == "num_sms":
        return "device.num_sms"
    if param in abi.EXTRAS:
        return f"params.extras.{param.name}"
    is_scratch = param in (*abi.FORWARD_SCRATCH, *abi.SCRATCH)
    if param.kind == "pointer":
        return f"params.scratch.{param.name}" if is_scratch else f"params.{param.name}"
    home = "scratch" if is_scratch else "problem"
    return f"static_cast<{_C_TYPES[param.kind]}>(params.{home}.{param.name})"
