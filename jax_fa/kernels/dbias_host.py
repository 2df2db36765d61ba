"""The host side of the gradient of a bias, the same for all families."""

from collections.abc import Callable
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from jax_fa.kernels import bias as biases
from jax_fa.kernels import dense_mask, softmax, tiles
from jax_fa.kernels.backward_rows import vector_at
from jax_fa.kernels.bias import Bias
from jax_fa.kernels.dbias_work import Arrays, Tiles, make_tiles
from jax_fa.kernels.forward_work import Scalars, Variant
from jax_fa.kernels.primitives import Extents, dense, dense_stats, widths_of

MERGE_THREADS = 256


class DbiasCall(NamedTuple):
    """Arguments of a launch of the main kernel."""

    arrays: Arrays
    scalars: Scalars
    grid: Tiles
    num_sms: Int32
    stream: cuda.CUstream


@cute.jit
def merge(dbias: Bias, parts: cute.Pointer, num_parts: Int32, stream: cuda.CUstream) -> None:
    """Launches ``merge_kernel`` if there are several parts."""
    if num_parts > 1:
        elements = dbias.batch * dbias.heads * dbias.rows * dbias.keys
        merge_kernel(dbias, parts, num_parts, elements).launch(
            grid=(cute.ceil_div(elements, MERGE_THREADS), 1, 1),
            block=(MERGE_THREADS, 1, 1),
            stream=stream,
        )


@cute.kernel
def merge_kernel(dbias: Bias, parts: cute.Pointer, num_parts: Int32, elements: Int32) -> None:
    """Sums the parts of one element per thread, in the order of parts.

    32 bits suffice to count elements: each multiprocessor gets at most ``ROUNDS`` tiles.
    """
    at = cute.arch.block_idx()[0] * MERGE_THREADS + cute.arch.thread_idx()[0]
    if at < elements:
        total = Float32(0.0)
        for part in cutlass.range(num_parts, unroll=4):
            place = part.to(Int64) * elements + at
            total = total + vector_at(Float32, parts.toint() + place * 4, 4)[0]
        if dbias.size_bytes == 4:
            word = vector_at(Float32, dbias.array.toint() + at.to(Int64) * 4, 4)
            word[0] = total
        else:
            dtype = dbias.array.dtype
            half = vector_at(dtype, dbias.array.toint() + at.to(Int64) * 2, 2)
            half[0] = total.to(dtype)


def dbias_entry(variant: Variant, launch: Callable) -> Callable:
    """Returns the flat host entry of a variant. It calls ``launch`` with a ``DbiasCall``."""

    @cute.jit
    def gradient(  # noqa: PLR0913
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        lse: cute.Pointer,
        dout: cute.Pointer,
        delta: cute.Pointer,
        dbias: cute.Pointer,
        dbias_parts: cute.Pointer,
        q_lengths: cute.Pointer,
        kv_lengths: cute.Pointer,
        cu_seqlens_q: cute.Pointer,
        cu_seqlens_k: cute.Pointer,
        q_segments: cute.Pointer,
        kv_segments: cute.Pointer,
        q_offset: cute.Pointer,
        sinks: cute.Pointer,
        mask_words: cute.Pointer,
        mask_map: cute.Pointer,
        bias: cute.Pointer,
        batch: Int32,
        num_sequences: Int32,
        q_len: Int32,
        kv_len: Int32,
        num_q_heads: Int32,
        num_kv_heads: Int32,
        head_dim: Int32,
        value_dim: Int32,
        mask_batch: Int32,
        mask_heads: Int32,
        mask_rows: Int32,
        mask_width: Int32,
        bias_batch: Int32,
        bias_heads: Int32,
        bias_rows: Int32,
        bias_keys: Int32,
        bias_bytes: Int32,
        scale: Float32,
        soft_cap: Float32,
        window_left: Int32,
        window_right: Int32,
        bottom_right: Int32,
        num_sms: Int32,
        stream: cuda.CUstream,
    ):
        queries = Extents(batch, q_len, num_q_heads)
        keys = Extents(batch, kv_len, num_kv_heads)
        added = biases.Bias(
            bias, bias_batch, bias_heads, bias_rows, bias_keys, bias_bytes, scale, soft_cap
        )
        scale_log2 = scale * softmax.LOG2_E
        if const_expr(not variant.key.multiplies_bias):
            scale_log2 = biases.score_log2(added)
        scalars = Scalars(
            sequences=tiles.Sequences(
                lengths=tiles.Sides(q_lengths, kv_lengths),
                cu_seqlens=tiles.Sides(cu_seqlens_q, cu_seqlens_k),
                q_offset=q_offset,
                num_sequences=num_sequences,
                rows=tiles.Sides(q_len, kv_len),
            ),
            window_left=window_left,
            window_right=window_right,
            bottom_right=bottom_right,
            cap_inner_log2=Float32(0.0),
            scale_log2=scale_log2,
            scale_share=scale_log2 / softmax.SPAN,
            sinks=sinks,
            q_segments=q_segments,
            kv_segments=kv_segments,
            mask=dense_mask.of_call(
                mask_words, mask_map, mask_batch, mask_heads, mask_rows, mask_width, q_len
            ),
            num_splits=Int32(1),
            bias=added,
        )
        grid = make_tiles(variant, added, batch, num_q_heads, num_kv_heads, num_sms)
        widths = widths_of(head_dim, value_dim)
        arrays = Arrays(
            q=dense(q, queries, widths.qk),
            k=dense(k, keys, widths.qk),
            v=dense(v, keys, widths.v),
            dout=dense(dout, queries, widths.v),
            lse=dense_stats(lse, queries),
            delta=dense_stats(delta, queries),
            dbias=added._replace(array=dbias),
            parts=dbias_parts,
        )
        launch(variant, DbiasCall(arrays, scalars, grid, num_sms, stream))
        merge(arrays.dbias, dbias_parts, grid.parts, stream)

    return gradient
