"""What all matrix units share: operand tiles fetched from shared memory as float32."""

from __future__ import annotations

import numpy as np

from jax_fa.emulator.faults import OutOfBoundsError
from jax_fa.emulator.layouts import MatrixDescriptor, Placement, Tile, place
from jax_fa.emulator.memory import CHUNK, SharedMemory
from jax_fa.emulator.numerics import matrix_values

ELEMENT_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


def placed(shared: SharedMemory, descriptor: MatrixDescriptor, tile: Tile) -> Placement:
    """Where a tile lies; it must lie inside the CTA's shared memory."""
    placement = place(descriptor, tile)
    if int(placement.chunks[-1]) >= shared.size // CHUNK:
        raise OutOfBoundsError(f"matrix operand at shared offset {descriptor.start} reaches "
                               f"beyond the CTA's {shared.size} bytes")
    return placement


def fetch(shared: SharedMemory, placement: Placement, type_: str) -> np.ndarray:
    """(rows, cols) float32 values of a tile; kept until shared memory changes."""
    key = (int(placement.elements[0, 0]), int(placement.elements[-1, -1]),
           int(placement.elements[-1, 0]), placement.elements.shape, type_)
    if shared.cache_version != shared.version:
        shared.cache.clear()
        shared.cache_version = shared.version
    found = shared.cache.get(key)
    if found is None:
        bits = shared.views[ELEMENT_BYTES[type_]].take(placement.elements)
        found = shared.cache[key] = operand_values(bits, type_)
    return found


def operand_values(bits: np.ndarray, type_: str) -> np.ndarray:
    """Operand bits as float32; 8-bit integers are exact in it."""
    if type_ == "s8":
        return bits.view(np.int8).astype(np.float32)
    if type_ == "u8":
        return bits.astype(np.float32)
    return matrix_values(bits, type_)
