"""Layouts of matrix elements: swizzles, shared-memory matrix descriptors, register fragments.

Swizzles are functions of the absolute shared-memory offset, so a tile's element order repeats
with its offset modulo 1024 bytes; index tables are cached by that.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jax_fa.emulator.faults import UnknownInstructionError

# (bits moved from, bits moved to, number of bits): address[to] ^= address[from].
_XOR = {
    "none": (0, 0, 0),
    "32B": (7, 4, 1),
    "64B": (7, 4, 2),
    "128B": (7, 4, 3),
    "128B/32B": (7, 5, 2),
}
WIDTH = {"none": 16, "32B": 32, "64B": 64, "128B": 128, "128B/32B": 128}
PERIOD = 1024


def swizzle(offsets: np.ndarray, mode: str) -> np.ndarray:
    """Applies a swizzle to byte offsets in shared memory."""
    source, target, bits = _XOR[mode]
    return offsets ^ (((offsets >> source) & ((1 << bits) - 1)) << target)


class MatrixDescriptor(NamedTuple):
    """A shared-memory matrix descriptor: byte offsets."""

    start: int
    leading: int
    stride: int
    swizzle: str


_TCGEN05_LAYOUT = {0: "none", 1: "128B/32B", 2: "128B", 4: "64B", 6: "32B"}
_WGMMA_LAYOUT = {0: "none", 1: "128B", 2: "64B", 3: "32B"}


def matrix_descriptor(bits: int, unit: str) -> MatrixDescriptor:
    """Decodes the 64-bit descriptor of `unit` "wgmma" or "tcgen05"."""
    if bits >> 49 & 7:
        raise UnknownInstructionError(
            f"matrix descriptor {bits:#x}: base offset is not "
            "implemented; align the tile to its swizzle period"
        )
    if unit == "wgmma":
        layout = _WGMMA_LAYOUT[bits >> 62 & 3]
    else:
        if bits >> 46 & 3 != 1:
            raise UnknownInstructionError(f"matrix descriptor {bits:#x}: bits 46-47 must be 1")
        if bits >> 52 & 1:
            raise UnknownInstructionError(
                f"matrix descriptor {bits:#x}: absolute leading dimension is not implemented"
            )
        code = bits >> 61 & 7
        if code not in _TCGEN05_LAYOUT:
            raise UnknownInstructionError(f"matrix descriptor {bits:#x}: layout {code}")
        layout = _TCGEN05_LAYOUT[code]
    return MatrixDescriptor(
        (bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, layout
    )


class Tile(NamedTuple):
    """Elements of an operand tile: `rows` along M or N by `cols` along K."""

    rows: int
    cols: int
    size: int
    mn_major: bool


class Placement(NamedTuple):
    """Element indices (rows, cols) and 16-byte chunks of a tile, relative to a base."""

    elements: np.ndarray
    chunks: np.ndarray


@lru_cache(maxsize=4096)
def _placement(phase: int, leading: int, stride: int, mode: str, tile: Tile) -> Placement:
    """Placement of a tile whose start is `phase` bytes into the swizzle period."""
    r = np.arange(tile.rows)[:, None]
    c = np.arange(tile.cols)[None, :]
    size, width = tile.size, WIDTH[mode]
    if mode == "none" and not tile.mn_major:
        per = 16 // size
        offset = r % 8 * 16 + r // 8 * stride + c // per * leading + c % per * size
    elif mode == "none":
        per = 16 // size
        offset = r % per * size + r // per * stride + c % 8 * 16 + c // 8 * leading
    elif not tile.mn_major:
        offset = r % 8 * width + r // 8 * stride + c * size
    else:
        per, group = width // size, 4 if mode == "128B/32B" else 8
        offset = r % per * size + r // per * leading + c % group * width + c // group * stride
    offset = swizzle(phase + offset, mode)
    elements = np.ascontiguousarray(offset // size)
    return Placement(elements, np.unique(offset // 16))


@lru_cache(maxsize=1024)
def place(descriptor: MatrixDescriptor, tile: Tile) -> Placement:
    """Element indices and chunks of a tile in shared memory.

    Args:
      descriptor: where the tile starts and how it is laid out.
      tile: its extent, element size in bytes and major-ness.

    Returns:
      Indices in elements of the shared memory viewed with the element size, shape
      (rows, cols); chunk numbers, sorted.
    """
    phase = descriptor.start % PERIOD
    base = descriptor.start - phase
    relative = _placement(phase, descriptor.leading, descriptor.stride, descriptor.swizzle, tile)
    placement = Placement(relative.elements + base // tile.size, relative.chunks + base // 16)
    for indices in placement:
        indices.flags.writeable = False
    return placement


@lru_cache(maxsize=256)
def box_chunks(phase: int, count: int, mode: str) -> np.ndarray:
    """Swizzled chunk numbers of `count` consecutive 16-byte chunks, relative to the period."""
    return swizzle(phase + 16 * np.arange(count), mode) // 16


def packed_chunks(offset: int, size: int, mode: str) -> np.ndarray:
    """Chunks in which a packed box of `size` bytes at `offset` lies, in box order."""
    phase = offset % PERIOD
    return box_chunks(phase, -(-size // 16), mode) + (offset - phase) // 16


_LANE = np.arange(32)
ROW, PAIR_COLUMN = _LANE // 4, 2 * (_LANE % 4)


@lru_cache(maxsize=64)
def accumulator_index(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) in a warp's 16 rows of accumulator register i of lane l, as [i, l]."""
    i = np.arange(columns // 2)[:, None]
    return (ROW + 8 * (i // 2 % 2)) + 0 * i, 8 * (i // 4) + PAIR_COLUMN + i % 2
