"""Loads by TMA: a block of rows of one sequence and head goes to a tile of shared memory.

The bytes are counted at the ring's barrier that announces the tile. TMA fills with zeros behind the
last row of an array; ``load_zero_filled`` does so behind the last row of a sequence.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from jax_fa.kernels import primitives


class Operand(NamedTuple):
    """An array for TMA to read, and the ring of shared memory that receives blocks of it."""

    tma: cute.CopyAtom
    array: cute.Tensor  # (length, width, heads, B), as TMA sees it
    ring: cute.Tensor  # (rows, columns[, stages])


class Rows(NamedTuple):
    """The rows of one sequence and head in an array; blocks are counted from row ``first``."""

    first: Int32
    head: Int32
    batch: Int32


class Detour(NamedTuple):
    """A barrier that only the loading warp uses, and the phase that its next load completes."""

    barrier: cute.Pointer
    phase: Int32


def operand(x: Any, name: str, stage: Int32 | None = None) -> Operand:
    """The operand ``name`` of context ``x``, with its whole ring or only one ``stage`` of it."""
    ring = getattr(x.smem, name)
    if stage is not None:
        ring = ring[None, None, stage]
    return Operand(getattr(x.tma, name), getattr(x.arrays, name), ring)


def _views(loaded: Operand, rows: Rows) -> primitives.TmaViews:
    """The ring, (tile[, stages]), and the blocks of the array, (tile, blocks)."""
    array = loaded.array[None, None, rows.head, rows.batch]
    array = cute.domain_offset((rows.first, 0), array)
    shape = tuple(cute.size(loaded.ring, mode=[mode]) for mode in (0, 1))
    blocks = cute.local_tile(array, shape, (None, 0))
    return primitives.tma_views(loaded.tma, loaded.ring, blocks)


def load(loaded: Operand, rows: Rows, block: Int32 | int, slot: Any) -> None:
    """Starts the load of a block to the stage of ``slot``, whose barrier counts the bytes.

    A ring without a stage mode holds a single block.
    """
    views = _views(loaded, rows)
    source, target = views.gmem[None, block], views.smem
    if cute.rank(target) > 1:
        target = target[None, slot.index]
    cute.copy(loaded.tma, source, target, tma_bar_ptr=slot.barrier)


@cute.jit
def load_zero_filled(
    loaded: Operand, rows: Rows, block: Int32, num_used: Int32, slot: Any, detour: Detour
) -> Int32:
    """Loads a block, of which only the first ``num_used`` rows belong to the sequence.

    The other rows become zero: their probabilities are 0, but 0 * NaN is not. Only a block that
    reaches beyond the sequence's last row takes the detour over a barrier of its own.

    Returns:
        The phase of the detour for the next call.
    """
    height = cute.size(loaded.ring, mode=[0])
    views, phase = _views(loaded, rows), detour.phase
    if num_used >= height:
        source, target = views.gmem[None, block], views.smem[None, slot.index]
        cute.copy(loaded.tma, source, target, tma_bar_ptr=slot.barrier)
    else:
        source, target = views.gmem[None, block], views.smem[None, slot.index]
        tile = loaded.ring[None, None, slot.index]
        copy_zero_filled(loaded.tma, source, target, tile, num_used, slot, detour)
        phase = phase ^ 1
    return phase


@cute.jit
def copy_zero_filled(
    tma: cute.CopyAtom,
    source: cute.Tensor,
    target: cute.Tensor,
    tile: cute.Tensor,
    num_used: Int32,
    slot: Any,
    detour: Detour,
) -> None:
    """Copies a block, waits for it at the detour, and zeroes its rows from ``num_used`` on.

    Only then are its bytes counted at the barrier of ``slot``.

    Args:
        tma: the copy.
        source: the block in global memory, as the copy takes it.
        target: its place in shared memory, likewise.
        tile: the same place, (rows, columns).
        num_used: rows of the block that belong to the sequence.
        slot: the ring's slot for the block.
        detour: the barrier at which the copy completes.
    """
    height, width = (cute.size(tile, mode=[mode]) for mode in (0, 1))
    size_bytes = height * width * tile.element_type.width // 8
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(detour.barrier, size_bytes)
    cute.copy(tma, source, target, tma_bar_ptr=detour.barrier)
    cute.arch.mbarrier_wait(detour.barrier, detour.phase)
    primitives.zero_fill_rows(tile, num_used)
    with cute.arch.elect_one():
        primitives.complete_tx(slot.barrier, size_bytes)
