"""The names of kernels, and what a name alone tells, since C++ finds kernels by name."""

from __future__ import annotations

import re

from jax_fa.spec.arch import Kind, Operation
from jax_fa.spec.key import KernelKey

SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
"""Element types that are compiled, and what variant names call them."""

ENDINGS: dict[Kind, str] = {"bias": "_bias", "few": "_few"}
"""Endings of the names of these kinds of kernels, and of no others."""


def kind_of(operation: Operation, stem: str) -> Kind:
    """The kind of the kernels of a ``stem``; C++ (``ffi/kernel_table.cc``) does the same."""
    if operation == "dbias":
        return "bias"
    return next((kind for kind, ending in ENDINGS.items() if stem.endswith(ending)), operation)


def stem(key: KernelKey) -> str:
    """The part of a name that does not depend on the family and the operation."""
    cap = "_cap" if key.has_soft_cap else ""
    split = ENDINGS["few"] if key.is_few else "_split" if key.is_split else ""
    bias = ("_product" if key.multiplies_bias else "") + ENDINGS["bias"] if key.has_bias else ""
    small = "_small" if key.is_small else ""
    dims = short_heads(key.head_dim, key.value_dim)
    return f"{SHORT_DTYPES[key.dtype]}_{dims}_{key.mask}{cap}{split}{small}{bias}"


def heads_of(stem: str) -> tuple[int, int]:
    """(D, Dv) of the kernels of a ``stem``; of none, (0, 0)."""
    found = re.search(r"_d(\d+)(?:v(\d+))?_", stem)
    return (int(found[1]), int(found[2] or found[1])) if found else (0, 0)


def short_heads(head_dim: int, value_dim: int) -> str:
    """D and Dv as names spell them."""
    values = "" if value_dim == head_dim else f"v{value_dim}"
    return f"d{head_dim}{values}"
