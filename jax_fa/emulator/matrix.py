"""Operand tiles fetched from shared memory, for all matrix units."""

from __future__ import annotations

from jax_fa.emulator.dot import Factors
from jax_fa.emulator.faults import OutOfBoundsError
from jax_fa.emulator.layouts import MatrixDescriptor, Tile, place
from jax_fa.emulator.memory import CHUNK, SharedMemory
from jax_fa.emulator.numerics import matrix_values

ELEMENT_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}


class SharedOperand:
    """A tile of a CTA's shared memory that a matrix unit is going to read.

    Attributes:
      chunks: the 16-byte chunks it lies in.
    """

    def __init__(
        self, shared: SharedMemory, descriptor: MatrixDescriptor, tile: Tile, type_: str
    ) -> None:
        self.shared = shared
        self.type = type_
        self.key = (descriptor, tile, type_)
        placement = place(descriptor, tile)
        if int(placement.chunks[-1]) * CHUNK >= shared.size:
            raise OutOfBoundsError(
                f"matrix operand at shared offset {descriptor.start} reaches "
                f"beyond the CTA's {shared.size} bytes"
            )
        self.elements, self.chunks = placement

    def factors(self) -> Factors:
        """Its (rows, cols); kept until shared memory changes, as several warps read it."""
        shared = self.shared
        if shared.cache_version != shared.version:
            shared.cache.clear()
            shared.cache_version = shared.version
        found = shared.cache.get(self.key)
        if found is None:
            bits = shared.views[ELEMENT_BYTES[self.type]].take(self.elements)
            found = shared.cache[self.key] = Factors.of(matrix_values(bits, self.type), self.type)
        return found
