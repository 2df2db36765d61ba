"""Chunks of a bias, which TMA copies to shared memory: ``fwd_bias_roles.py``, ``bwd_bias.py``.

A chunk holds 128 bytes, the span of one swizzle, of each row of a block of queries: 64 keys of a
bias of 16 bits, 32 of one in float32. TMA is told of 16-bit halves, so that one descriptor serves
either. It cannot read a bias that is broadcast along keys, or whose rows are no multiples of 16
bytes apart; threads then load its elements to registers.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32, Int64, const_expr

from jax_fa.kernels import loads, primitives
from jax_fa.kernels.bias import Bias
from jax_fa.kernels.sm90.plan_bias import CHUNK_BYTES

HALVES = CHUNK_BYTES // 2
WORDS = CHUNK_BYTES // 4
UNIT_WORDS = 4
"""A swizzle exchanges units of 16 bytes: unit u of row r lies at unit u XOR r % 8."""
_STEP_HALVES = 8
"""TMA needs rows that are multiples of 16 bytes apart."""


def is_staged(bias: Bias) -> Boolean:
    """Whether TMA can read the bias."""
    return (bias.row_bytes % (2 * _STEP_HALVES) == 0) & (bias.keys > 1)


def layout(rows: int, chunks: int) -> cute.ComposedLayout:
    """A ring in shared memory, (rows, halves, chunks)."""
    return primitives.smem_layout(Int16, (rows, HALVES, chunks))


@cute.jit
def describe(
    bias: Bias,
    num_rows: Int32,
    chunk: cutlass.Constexpr[cute.ComposedLayout],
    stores: cutlass.Constexpr[bool] = False,
) -> primitives.TmaArray:
    """Describes the bias to TMA, as (num_rows, halves, heads, batch).

    Args:
        bias: the bias, or its gradient.
        num_rows: number of queries, for each of which a bias of one row is read anew.
        chunk: layout of a chunk, (rows, halves).
        stores: whether TMA writes it.
    """
    # Rounded up, so that a bias that TMA cannot read, and will not, gets a valid descriptor too.
    steps = (bias.keys * (bias.size_bytes // 2) + (_STEP_HALVES - 1)) // _STEP_HALVES
    pitch = steps.to(Int64) * _STEP_HALVES
    head = bias.rows.to(Int64) * pitch
    step = pitch if bias.rows > 1 else Int64(0)
    batch = bias.heads.to(Int64) * head
    step, head, batch = [cute.assume(x, divby=_STEP_HALVES) for x in (step, head, batch)]
    array = cute.make_tensor(
        cute.recast_ptr(bias.array, dtype=Int16),
        cute.make_layout(
            (num_rows, steps * _STEP_HALVES, bias.heads, bias.batch), stride=(step, 1, head, batch)
        ),
    )
    make = primitives.tma_store if const_expr(stores) else primitives.tma_load
    return primitives.TmaArray(*make(array, chunk, cute.product_each(chunk.outer.shape)))


def views(
    described: primitives.TmaArray, smem: cute.Tensor, bias: Bias, rows: loads.Rows
) -> primitives.TmaViews:
    """The chunks in shared memory and those of a block of rows, (chunk, number), as TMA sees them.

    ``smem`` is (rows, halves, ...), ``described`` what ``describe`` made of ``bias``.
    """
    head = cutlass.min(rows.head, bias.heads - 1)
    batch = cutlass.min(rows.batch, bias.batch - 1)
    block = cute.domain_offset((rows.first, 0), described.array[None, None, head, batch])
    shape = (cute.size(smem, mode=[0]), HALVES)
    return primitives.tma_views(described.atom, smem, cute.local_tile(block, shape, (0, None)))
