"""Products by mma.sync, their operands by ldmatrix, and copies to shared memory by cp.async.

A warp multiplies 16 rows by 8 columns, 16 deep, in registers. Accumulators are the fragments of
``fragments.py``: thread t of a warp holds rows t // 4 and t // 4 + 8, and of each 8 columns the two
from 2 (t % 4) on. An A operand of 16 columns is four registers in that very order, so probabilities
never move. A B operand of 16 columns by 16 deep is four registers too, two for each 8 columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64

from jax_fa.kernels import edges, primitives
from jax_fa.kernels.mma_sync.panels import PIECE_BYTES, Panels

DEPTH = 16
"""Depth of a product: the K of one mma.sync."""
COLUMNS = 8
"""Columns of a product: the N of one mma.sync."""
MAX_WARPS = 32
"""Warps of a CTA, at most, on any GPU."""


class Four(NamedTuple):
    """Four registers: an A operand, or the B operands of two products beside each other."""

    r0: Int32
    r1: Int32
    r2: Int32
    r3: Int32


def by_rows(tile: Panels, lane: Int32) -> Int32:
    """The place from which a lane fetches 16 rows as an A operand.

    A transposed fetch from it gives 16 rows as the depth of B operands.
    """
    return tile.place(lane % 16, lane // 16)


def by_columns(tile: Panels, lane: Int32) -> Int32:
    """The place from which a lane fetches 16 rows as the columns of B operands.

    A transposed fetch from it gives 16 rows as the depth of an A operand.
    """
    return tile.place(lane % 8 + lane // 16 * 8, lane // 8 % 2)


def fetch(address: Int32, is_transposed: bool = False) -> Four:
    """Loads four 8 x 8 matrices; each lane addresses a row of one of them."""
    transposed = ".trans" if is_transposed else ""
    return Four(
        *cute.arch.inline_ptx(
            f"ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 "
            "{{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[address],
        )
    )


def multiply(acc: cute.Tensor, group: int, a: Four, b: Four, dtype: type) -> None:
    """Adds ``a b`` to 16 columns of ``acc``, from its ``group``-th group of 8 columns on."""
    kind = "bf16" if dtype is BFloat16 else "f16"
    for half in range(2):
        first = 4 * (group + half)
        sums = cute.arch.inline_ptx(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
            "{{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b[2 * half : 2 * half + 2], *(acc[first + i] for i in range(4))],
        )
        for i in range(4):
            acc[first + i] = sums[i]


def rounded_operand(acc: cute.Tensor, column: int, dtype: type) -> Four:
    """16 columns of an accumulator, from ``column`` on, rounded, as an A operand."""
    first = column // COLUMNS * 4
    pairs = (
        primitives.narrow_pair(acc[first + 2 * i], acc[first + 2 * i + 1], dtype) for i in range(4)
    )
    return Four(*pairs)


def one_if_any(condition: Boolean) -> Int32:
    """1 if ``condition`` holds in any lane of the warp, else 0; opaque to the compiler."""
    lanes = cute.arch.vote_ballot_sync(condition)
    return cute.arch.inline_ptx(
        "min.u32 {$w0}, {$r0}, 1;", write_only_types=[Int32], read_only_args=[lanes]
    )


def thread_index() -> Int32:
    """The calling thread's index in its CTA.

    Values derived from it are computed where they are used: in a loop, they take one register.
    """
    # Masked to few bits, or the compiler would divide as if it might be negative.
    return primitives.opaque(cute.arch.thread_idx()[0]) & (edges.WARP * MAX_WARPS - 1)


def hidden_from(work: Any) -> Any:
    """A tile's ``work`` with an opaque window: nothing is computed from it ahead of the loop."""
    shift = primitives.opaque(work.window.shift)
    return work._replace(window=work.window._replace(shift=shift))


def copy_piece(target: Int32, source: Int64, size_bytes: Int32) -> None:
    """Starts the copy of a piece to shared memory: ``size_bytes`` bytes, then zeros."""
    cute.arch.inline_ptx(
        f"cp.async.cg.shared.global.L2::128B [{{$r0}}], [{{$r1}}], {PIECE_BYTES}, {{$r2}};",
        read_only_args=[target, source, size_bytes],
    )


def add_to_global(address: Int64, value: Float32) -> None:
    """Adds a float to global memory atomically, with relaxed ordering."""
    cute.arch.inline_ptx(
        "red.relaxed.gpu.global.add.f32 [{$r0}], {$r1};", read_only_args=[address, value]
    )


def add_four_to_global(address: Int64, values: list[Float32]) -> None:
    """Adds four floats to global memory, each atomically, with relaxed ordering."""
    cute.arch.inline_ptx(
        "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *values],
    )


def store_word(address: Int32, word: Int32) -> None:
    """Writes a word to shared memory."""
    cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, word])


def load_word(address: Int32) -> Int32:
    """Reads a word from shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
    )


def load_piece(address: Int32) -> Four:
    """Reads a piece from shared memory."""
    return Four(
        *cute.arch.inline_ptx(
            "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[address],
        )
    )


def store_piece(address: Int64, piece: Four) -> None:
    """Writes a piece to global memory."""
    cute.arch.inline_ptx(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *piece]
    )
