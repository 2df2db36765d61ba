"""What host entries are compiled with: arguments that stand in for those of a call."""

from __future__ import annotations

from typing import Any

from jax_fa.spec import abi, schema
from jax_fa.spec.arch import Operation


def stand_ins(operation: Operation, element: str) -> tuple[Any, ...]:
    """One for each parameter of an entry (``abi.PARAMETERS``), for arrays of type ``element``."""
    from cutlass import BFloat16, Float16, Float32, Int32, cute
    from cutlass.cute.runtime import make_fake_stream, nullptr

    elements = {"bfloat16": BFloat16, "float16": Float16}
    types = {"element": elements[element], "float32": Float32, "int32": Int32}
    types["bias"] = types["element"]  # a float32 bias is known as such at run time only
    arguments: list[Any] = []
    for name, kind in abi.PARAMETERS[operation]:
        if kind == "pointer":
            array = schema.BY_NAME[name]
            align = abi.ALIGNMENT_BYTES if array.is_aligned else 4
            dtype = types[array.dtype]
            arguments.append(nullptr(dtype, cute.AddressSpace.gmem, assumed_align=align))
        elif kind == "stream":
            arguments.append(make_fake_stream())
        else:
            arguments.append(Float32(1.0) if kind == "float32" else Int32(1))
    return tuple(arguments)
