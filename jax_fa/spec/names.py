"""The names of kernels, and what can be told from a name alone, since C++ finds kernels by name."""

from __future__ import annotations

from jax_fa.spec.arch import Kind, Operation
from jax_fa.spec.key import KernelKey

SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
"""Element types that are compiled, and what variant names call them."""

ENDINGS: dict[Kind, str] = {"bias": "_bias", "few": "_few"}
"""How names of kernels of these kinds end, and of no other."""


def kind_of(operation: Operation, stem: str) -> Kind:
    """The kind of the kernels of a ``stem``; C++ (``ffi/kernel_table.cc``) tells it likewise."""
    if operation == "dbias":
        return "bias"
    return next((kind for kind, ending in ENDINGS.items() if stem.endswith(ending)), operation)


def stem(key: KernelKey) -> str:
    """The part of a name that a kernel's variants share, whatever the family and operation."""
    cap = "_cap" if key.has_soft_cap else ""
    split = ENDINGS["few"] if key.is_few else "_split" if key.is_split else ""
    bias = ENDINGS["bias"] if key.has_bias else ""
    dims = short_heads(key.head_dim, key.value_dim)
    return f"{SHORT_DTYPES[key.dtype]}_{dims}_{key.mask}{cap}{split}{bias}"


def short_heads(head_dim: int, value_dim: int) -> str:
    """D and Dv in names."""
    values = "" if value_dim == head_dim else f"v{value_dim}"
    return f"d{head_dim}{values}"
