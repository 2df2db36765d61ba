"""The gradient of a bias with one element per pair: each is one dS of Hopper's backward.

The gradient of a bias that is not broadcast needs no kernel of its own, which would compute S and
dP once more (``sm90/dbias.py``): ``store`` writes the dS that a step has in registers.

A step writes dS of all pairs of its block that exist; hidden ones have dS = 0, since P is 0 and
rows beyond a sequence were zeroed before the products. ``clear`` zeroes blocks that no tile visits.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int16, Int32, Int64, const_expr
from cutlass.pipeline import PipelineConsumer

from jax_fa.kernels import bias as biases
from jax_fa.kernels import fragments, loads, primitives, tiles
from jax_fa.kernels.backward_host import BackwardCall
from jax_fa.kernels.backward_rows import VECTOR_BYTES, vector_at
from jax_fa.kernels.backward_work import (
    Scalars,
    Step,
    Work,
    first_step,
    leaves_blocks_out,
    next_step,
    tile_at,
    work_on,
)
from jax_fa.kernels.bias import Bias
from jax_fa.kernels.sm90 import bias_chunks, bwd_bias
from jax_fa.kernels.sm90.bwd_bias import FLOAT_STAGES

FLOAT_BYTES = 4
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
    if const_expr(variant.key.has_bias and not variant.key.multiplies_bias):
        _store(variant, x, c, work, at, ds)


@cute.jit
def _store(
    variant: cutlass.Constexpr, x: Any, c: Any, work: Work, at: Step, ds: cute.Tensor
) -> None:
    if tiles.is_present(x.scalars.dbias):
        config, bias = variant.config, x.scalars.bias
        if const_expr(config.bias_stages == 0):
            _store_elements(variant, x, c, work, at, ds)
        elif const_expr(not config.keeps_floats):
            if (bias.size_bytes == FLOAT_BYTES) | ~bias_chunks.is_staged(bias):
                _store_elements(variant, x, c, work, at, ds)
        elif ~bias_chunks.is_staged(bias):
            _store_elements(variant, x, c, work, at, ds)
        elif bias.size_bytes == FLOAT_BYTES:
            bwd_bias.keep_floats(variant, x, c, at, ds)


@cute.jit
def _store_elements(
    variant: cutlass.Constexpr, x: Any, c: Any, work: Work, at: Step, ds: cute.Tensor
) -> None:
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
def describe(
    scalars: Scalars, num_rows: Int32, chunk: cutlass.Constexpr[cute.ComposedLayout]
) -> primitives.TmaArray:
    """Describes the gradient to TMA, as ``bias_chunks.describe`` does the bias."""
    bias = scalars.bias
    # A null pointer has no descriptor. That of the bias then stands for it, unused.
    address = bias.array.toint()
    if tiles.is_present(scalars.dbias):
        address = scalars.dbias.toint()
    array = cute.make_ptr(Int16, address, cute.AddressSpace.gmem, assumed_align=VECTOR_BYTES)
    return bias_chunks.describe(bias._replace(array=array), num_rows, chunk, stores=True)


@cute.jit
def store_tiles(variant: cutlass.Constexpr, x: Any, chunks: PipelineConsumer) -> None:
    """Writes dS of each step from shared memory, if TMA can. One warp, which meets at "ds".

    With 16 bits it is that of dQ; in float32 it lies where the bias was, or consumers write it.
    """
    bias, parity = x.scalars.bias, Int32(0)
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        at = first_step(work, parity)
        for _ in cutlass.range(work.num_steps, unroll=1):
            primitives.meet(variant, "ds")
            if bias_chunks.is_staged(bias):
                if tiles.is_present(x.scalars.dbias):
                    if bias.size_bytes == 2:
                        _store_halves(variant, x, work, at)
                    elif const_expr(variant.config.keeps_floats):
                        _store_floats(variant, x, work, at)
                    # HAZARD: dS is overwritten after the next barrier, or once it is released.
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.sync_warp()
                for _ in cutlass.range(bias.size_bytes // 2, unroll=1):
                    stage = chunks.wait_and_advance()
                    stage.release()
            at = next_step(variant, x, work, at)
        parity = at.parity
        tile = tile_at(variant, x, tile.slot + 1)
    # HAZARD: the CTA, and with it its shared memory, must outlast these stores.
    cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def _store_halves(variant: cutlass.Constexpr, x: Any, work: Work, at: Step) -> None:
    config = variant.config
    rows = loads.Rows(at.q_block * config.block_q, at.head, work.tile.batch)
    ds = cute.local_tile(x.smem.ds, (config.block_q, bias_chunks.HALVES), (0, None, None))
    source, target = bias_chunks.views(x.dbias, ds, x.scalars.bias, rows)
    for i in cutlass.range_constexpr(config.bias_chunks):
        chunk = target[None, work.tile.block * config.bias_chunks + i]
        cute.copy(x.dbias.atom, source[None, i, at.parity], chunk)


@cute.jit
def _store_floats(variant: cutlass.Constexpr, x: Any, work: Work, at: Step) -> None:
    config = variant.config
    rows = loads.Rows(at.q_block * config.block_q, at.head, work.tile.batch)
    source, target = bias_chunks.views(x.dbias, x.smem.bias, x.scalars.bias, rows)
    first, of_stage = bwd_bias.first_stage(variant, at), config.bias_chunks
    for i in cutlass.range_constexpr(of_stage):
        for j in cutlass.range_constexpr(FLOAT_STAGES):
            number = (work.tile.block * of_stage + i) * FLOAT_STAGES + j
            place = (first + j) * of_stage + i
            cute.copy(x.dbias.atom, source[None, place], target[None, number])


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
