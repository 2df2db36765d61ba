"""The gradient of a bias with one element per pair: each is one dS of Hopper's backward.

The gradient of a bias that is not broadcast needs no kernel of its own, which would compute S and
dP once more (``sm90/dbias.py``): ``store`` writes the dS that a step has in registers.

A step writes dS of all pairs of its block that exist; hidden ones have dS = 0, since P is 0 and
rows beyond a sequence were zeroed before the products. ``clear`` zeroes blocks that no tile visits.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr

from jax_fa.kernels import bias as biases
from jax_fa.kernels import dense_mask, fragments, primitives, tiles
from jax_fa.kernels.backward_host import BackwardCall
from jax_fa.kernels.backward_rows import VECTOR_BYTES, vector_at
from jax_fa.kernels.backward_work import Scalars, Step, Work
from jax_fa.kernels.bias import Bias
from jax_fa.spec.band import UNBOUNDED

CLEAR_THREADS = 256
CLEAR_CTAS = 8
"""The maximum per multiprocessor."""


def of_call(x: Any) -> Bias:
    """The gradient as a ``Bias``: it has the extents of the bias."""
    return x.scalars.bias._replace(array=x.scalars.dbias)


@cute.jit
def store(
    variant: cutlass.Constexpr, x: Any, c: Any, work: Work, at: Step, ds: cute.Tensor
) -> None:
    """Rounds and writes a step's ``ds``, if there is a bias whose gradient is asked for.

    ``c`` is as for ``fragment_bias_columns.load``, which reads the bias of the same pairs.
    """
    if const_expr(variant.key.has_bias):
        _store(variant, x, c, work, at, ds)


@cute.jit
def _store(
    variant: cutlass.Constexpr, x: Any, c: Any, work: Work, at: Step, ds: cute.Tensor
) -> None:
    if tiles.is_present(x.scalars.dbias):
        dbias, config = of_call(x), variant.config
        head = biases.address_of(dbias, biases.row_of(dbias, work.tile.batch, at.head, Int32(0)))
        first_row = at.q_block * config.block_q + c.first_query + fragments.first_column(c.thread)
        first_key = work.tile.block * config.block_kv + c.first_key
        first_key = first_key + fragments.row_in_tile(c.thread)
        if dbias.size_bytes == 2:
            store_columns(variant.dtype, dbias, head, first_row, first_key, ds)
        else:
            store_columns(Float32, dbias, head, first_row, first_key, ds)


@cute.jit
def store_columns(
    dtype: cutlass.Constexpr,
    dbias: Bias,
    head: Int64,
    first_row: Int32,
    first_key: Int32,
    ds: cute.Tensor,
) -> None:
    """Writes a fragment whose rows are keys and whose columns are queries.

    Args:
        dtype: type of the elements written.
        dbias: the gradient that receives them.
        head: address of the gradient of the query head.
        first_row: query of the thread's first column.
        first_key: key of the thread's first row.
        ds: the fragment.
    """
    # As for fragment_bias_columns.load_columns: no address may be computed ahead of the steps.
    first_row, first_key, own_rows, own_keys = (
        primitives.opaque(value) for value in (first_row, first_key, dbias.rows, dbias.keys)
    )
    dbias = dbias._replace(rows=own_rows, keys=own_keys)
    size_bytes, by_key = dtype.width // 8, fragments.by_row(ds)
    first = head + first_row.to(Int64) * dbias.row_bytes + first_key.to(Int64) * size_bytes
    left = [rows_left(dbias, first_row, first_key + 8 * r) for r in range(fragments.ROWS)]
    for i in cutlass.range_constexpr(cute.size(by_key, mode=[1])):
        column = fragments.column_of(i)
        address = first + column * dbias.row_bytes
        for r in cutlass.range_constexpr(fragments.ROWS):
            is_there = column < left[r]
            store_element(dtype, address + 8 * r * size_bytes, by_key[r, i], is_there)


def rows_left(dbias: Bias, first_row: Int32, key: Int32) -> Int32:
    """The number of rows from ``first_row`` on; 0 if ``key`` is beyond the last."""
    return (dbias.rows - first_row) * Int32(key < dbias.keys)


def store_element(dtype: type, address: Int64, value: Float32, is_there: Boolean) -> None:
    """Writes ``value``, rounded to ``dtype``, to global memory if ``is_there``."""
    rounding = {BFloat16: "cvt.rn.bf16.f32", Float32: "mov.b32"}.get(dtype, "cvt.rn.f16.f32")
    bits = f"b{dtype.width}"
    cute.arch.inline_ptx(
        f"{{ .reg .pred there; .reg .{bits} element; setp.ne.s32 there, {{$r2}}, 0; "
        f"{rounding} element, {{$r1}}; @there st.global.{bits} [{{$r0}}], element; }}",
        read_only_args=[address, value, Int32(is_there)],
    )


def leaves_blocks_out(scalars: Scalars) -> Boolean:
    """Whether there may be blocks of pairs that no step processes."""
    bounds = (scalars.window_left != UNBOUNDED) | (scalars.window_right != UNBOUNDED)
    lengths = scalars.sequences.lengths
    used = tiles.is_present(lengths.own) | tiles.is_present(lengths.swept)
    segments = tiles.is_present(scalars.q_segments)
    return bounds | used | segments | dense_mask.is_present(scalars.mask)


@cute.jit
def clear(call: BackwardCall) -> None:
    """Launches ``clear_kernel`` if steps may leave elements of the gradient unwritten."""
    scalars = call.scalars
    if tiles.is_present(scalars.dbias) & leaves_blocks_out(scalars):
        bias = scalars.bias
        size_bytes = bias.batch.to(Int64) * bias.heads * bias.rows * bias.row_bytes
        needed = cute.ceil_div(size_bytes, VECTOR_BYTES * CLEAR_THREADS)
        most = call.num_sms.to(Int64) * CLEAR_CTAS
        clear_kernel(scalars.dbias.toint(), size_bytes).launch(
            grid=(cutlass.min(needed, most).to(Int32), 1, 1),
            block=(CLEAR_THREADS, 1, 1),
            stream=call.stream,
        )


@cute.kernel
def clear_kernel(address: Int64, size_bytes: Int64) -> None:
    """Sets an even number of bytes to zero, 16 per thread at a time."""
    thread, num_ctas = cute.arch.thread_idx()[0], cute.arch.grid_dim()[0]
    at = (cute.arch.block_idx()[0].to(Int64) * CLEAR_THREADS + thread) * VECTOR_BYTES
    step = num_ctas.to(Int64) * (CLEAR_THREADS * VECTOR_BYTES)
    while at + VECTOR_BYTES <= size_bytes:
        words = vector_at(Int32, address + at, VECTOR_BYTES)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = Int32(0)
        at = at + step
    while at < size_bytes:  # the end of the array, in one thread
        half = vector_at(BFloat16, address + at, 2)
        half[0] = BFloat16(0.0)
        at = at + 2
