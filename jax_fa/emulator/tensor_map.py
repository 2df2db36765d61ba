"""The 128-byte TMA descriptor, and boxes of the tensor it describes."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jax_fa.emulator.faults import UnknownInstructionError
from jax_fa.emulator.memory import Memory

_ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 10: 2}
_ELEMENT_TYPE = {
    0: "u8",
    1: "u16",
    2: "u32",
    3: "s32",
    4: "u64",
    5: "s64",
    6: "f16",
    7: "f32",
    10: "bf16",
}
_SWIZZLE = {0: "none", 1: "32B", 2: "64B", 3: "128B"}


class TensorMap(NamedTuple):
    """A decoded descriptor; dimension 0 is the contiguous one.

    Attributes:
      address: of element 0.
      type: element type, as PTX names it.
      element_bytes: size of an element.
      extents, box: elements per dimension, of the tensor and of a box.
      strides: bytes per step in each dimension.
      swizzle: name of the swizzle, see layouts.py.
    """

    address: int
    type: str
    element_bytes: int
    extents: tuple[int, ...]
    box: tuple[int, ...]
    strides: tuple[int, ...]
    swizzle: str

    @property
    def box_bytes(self) -> int:
        """Size of a box, out-of-range elements included."""
        return int(np.prod(self.box)) * self.element_bytes


@lru_cache(maxsize=512)
def decode_tensor_map(raw: bytes) -> TensorMap:
    """Decodes the first 64 bytes of a descriptor (the rest is unused).

    Raises:
      UnknownInstructionError: an element type or feature that is not implemented.
    """
    w = [int(x) for x in np.frombuffer(raw[:64], np.uint32)]
    flags = w[2]
    rank = (flags >> 4 & 7) + 1
    type_ = flags >> 7 & 15
    if type_ not in _ELEMENT_BYTES or rank > 5:
        raise UnknownInstructionError(f"TMA descriptor with element type {type_}, rank {rank}")
    if flags >> 11 & 3 or w[13] & 0x7FFF:
        raise UnknownInstructionError("TMA descriptor with interleave or element strides")
    swizzle = _SWIZZLE[flags >> 13 & 3] + ("/32B" if flags >> 19 & 1 else "")
    size = _ELEMENT_BYTES[type_]
    strides = [size] + [(w[3 + i] | (w[7] >> 4 * i & 15) << 32) * 16 for i in range(rank - 1)]
    box = [(w[13] >> 24) + 1] + [(w[14] >> 8 * i & 255) + 1 for i in range(rank - 1)]
    if box[0] * size % 16:
        raise UnknownInstructionError(
            f"TMA box of {box[0]} elements of {size} bytes: the inner "
            "extent must be a multiple of 16 bytes"
        )
    return TensorMap(
        w[0] | w[1] << 32,
        _ELEMENT_TYPE[type_],
        size,
        tuple(w[8 + i] + 1 for i in range(rank)),
        tuple(box),
        tuple(strides),
        swizzle,
    )


class Part(NamedTuple):
    """The in-range part of a box: a strided view of global memory, and where it sits in the box.

    Both are in bytes along dimension 0, with the outermost dimension first.
    """

    view: np.ndarray
    place: tuple[slice, ...]


def in_range(tensor: TensorMap, corner: tuple[int, ...], memory: Memory) -> Part | None:
    """The part of the box at `corner` that lies in the tensor; None when nothing does."""
    low = [max(c, 0) for c in corner]
    high = [min(c + b, e) for c, b, e in zip(corner, tensor.box, tensor.extents, strict=True)]
    if any(h <= lo for lo, h in zip(low, high, strict=True)):
        return None
    size = tensor.element_bytes
    start = tensor.address + sum(lo * s for lo, s in zip(low, tensor.strides, strict=True))
    last = tensor.address + sum((h - 1) * s for h, s in zip(high, tensor.strides, strict=True))
    region = memory.region(start, last + size)
    counts = [h - lo for lo, h in zip(low, high, strict=True)]
    shape = [*reversed(counts[1:]), counts[0] * size]
    strides = [*reversed(tensor.strides[1:]), 1]
    view = np.lib.stride_tricks.as_strided(region.data[start - region.base :], shape, strides)
    offsets = [lo - c for lo, c in zip(low, corner, strict=True)]
    place = [slice(o, o + n) for o, n in zip(offsets[1:], counts[1:], strict=True)][::-1]
    place.append(slice(offsets[0] * size, (offsets[0] + counts[0]) * size))
    return Part(view, tuple(place))


def box_shape(tensor: TensorMap) -> tuple[int, ...]:
    """Shape of a box in bytes, outermost dimension first."""
    return (*reversed(tensor.box[1:]), tensor.box[0] * tensor.element_bytes)


def load_box(tensor: TensorMap, corner: tuple[int, ...], memory: Memory) -> np.ndarray:
    """The bytes of a box, packed, zero where it leaves the tensor."""
    block = np.zeros(box_shape(tensor), np.uint8)
    part = in_range(tensor, corner, memory)
    if part is not None:
        block[part.place] = part.view
    return block.reshape(-1)
