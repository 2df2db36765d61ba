"""The flat host entry of a backward, the same for all architectures, and its pieces.

Its parameters are those of ``abi.BACKWARD``, one by one, as the exporter makes a C function of it.
It packs them into a ``BackwardCall`` and leaves the main kernel to the architecture's ``launch``.
The passes over rows before and after it are in ``backward_rows``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from jax_fa.kernels import (
    backward_rows,
    backward_work,
    dense_mask,
    primitives,
    softmax,
    tiles,
)
from jax_fa.kernels import bias as biases
from jax_fa.kernels.primitives import Extents, dense, dense_stats
from jax_fa.spec import backward_division
from jax_fa.spec.band import UNBOUNDED, ceil_div


class BackwardCall(NamedTuple):
    """Arguments of the main kernel of a backward.

    Attributes:
        q: [B, T, N, D].
        k: [B, S, K, D].
        v: [B, S, K, Dv].
        dout: [B, T, N, Dv].
        dk: [B, S, K, D].
        dv: [B, S, K, Dv].
        dbias: with the extents of the bias; null if it is not wanted.
        queries: B, T, N.
        keys: B, S, K.
        widths: D, Dv.
        scratch: sums and statistics by row.
        scalars: what every tile shares.
        num_sms: multiprocessors of the device.
        stream: the stream to launch on.
    """

    q: cute.Pointer
    k: cute.Pointer
    v: cute.Pointer
    dout: cute.Pointer
    dk: cute.Pointer
    dv: cute.Pointer
    dbias: cute.Pointer
    queries: Extents
    keys: Extents
    widths: primitives.Widths
    scratch: backward_rows.Scratch
    scalars: backward_work.Scalars
    num_sms: Int32
    stream: cuda.CUstream


class BackwardViews(NamedTuple):
    """Arrays as TMA and as threads see them."""

    tma: backward_work.Tma
    arrays: backward_work.Arrays


def backward_arrays(variant: Any, call: BackwardCall, layouts: Any, ctas: int = 1) -> BackwardViews:
    """Returns the arrays as the main kernel of a backward sees them.

    ``layouts`` holds shared memory layouts: k and v are of a tile, q and dout of a ring of tiles;
    for a pair of CTAs, k_columns, q_columns and dout_columns are of column halves. ``ctas`` is as
    for ``primitives.tma_load``.
    """
    widths, one = call.widths, (None, None, 0)
    loads = {
        "k": (dense(call.k, call.keys, widths.qk), layouts.k),
        "v": (dense(call.v, call.keys, widths.v), layouts.v),
        "q": (dense(call.q, call.queries, widths.qk), cute.slice_(layouts.q, one)),
        "dout": (dense(call.dout, call.queries, widths.v), cute.slice_(layouts.dout, one)),
    }
    if variant.plan.ctas > 1:
        loads |= {
            "k_columns": (loads["k"][0], layouts.k_columns),
            "q_columns": (loads["q"][0], cute.slice_(layouts.q_columns, one)),
            "dout_columns": (loads["dout"][0], cute.slice_(layouts.dout_columns, one)),
        }
    atoms: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for name, (array, layout) in loads.items():
        shape = cute.product_each(layout.outer.shape)
        atoms[name], arrays[name] = primitives.tma_load(array, layout, shape, ctas)
    arrays |= {
        "dk": dense(call.dk, call.keys, widths.qk),
        "dv": dense(call.dv, call.keys, widths.v),
    }
    return BackwardViews(backward_work.Tma(**atoms), backward_work.Arrays(**arrays))


def plain_arrays(call: BackwardCall) -> backward_work.Arrays:
    """Returns the arrays of a backward without TMA, all as threads see them."""
    widths = call.widths
    return backward_work.Arrays(
        k=dense(call.k, call.keys, widths.qk),
        v=dense(call.v, call.keys, widths.v),
        q=dense(call.q, call.queries, widths.qk),
        dout=dense(call.dout, call.queries, widths.v),
        dk=dense(call.dk, call.keys, widths.qk),
        dv=dense(call.dv, call.keys, widths.v),
    )


@cute.jit
def backward_order(variant: cutlass.Constexpr, call: BackwardCall) -> tiles.Grid:
    """Returns the work order of a backward: Note [Turns] in ``backward_work.py``."""
    scalars, num_sms, ctas = call.scalars, call.num_sms, variant.plan.ctas
    if const_expr(ctas > 1):
        # From here on this counts clusters; the CTAs of a cluster share every tile.
        num_sms = cutlass.max(num_sms // ctas, 1)
    num_kv_heads = call.keys.heads
    num_kv_blocks = ceil_div(call.keys.length, variant.config.block_kv)
    if const_expr(variant.is_general):
        is_packed = tiles.is_present(scalars.sequences.cu_seqlens.own).to(Int32)
        num_kv_blocks = num_kv_blocks + is_packed * (scalars.sequences.num_sequences + 1)
    splits = scalars.splits
    swept_bytes = backward_work.bytes_per_head(variant, call.queries.length, scalars.group)
    if const_expr(variant.key.mask == "causal"):
        if (scalars.deterministic != 0) & ~backward_work.takes_rounds(scalars):
            # Bands of many heads, whatever the cache holds.
            heads_per_band = cutlass.max(num_sms // backward_work.TILES_IN_TURN, 1)
            swept_bytes = tiles.L2_BUDGET_BYTES // heads_per_band
    rounds_per_band = Int32(tiles.ROUNDS_PER_BAND)
    if const_expr(variant.key.has_bias and variant.is_general):
        is_read_once = biases.is_one_per_query(scalars.bias, call.queries)
        if is_read_once & ~backward_work.leaves_blocks_out(scalars):
            # Such a bias leaves the cache room for little else: bands of one round, but where tiles
            # differ in length. H200, us, float32: 4 x 1024 tokens, 16 heads 235 -> 208, of 797 MB
            # through memory 622; 8 x 1024, 8 heads 206 -> 195; 1 x 4096, 16 heads 723 -> 689.
            swept_bytes, rounds_per_band = Int32(tiles.L2_BUDGET_BYTES), Int32(1)
    order = tiles.make_order(
        call.queries.batch * num_kv_heads * splits,
        num_kv_heads * splits,
        splits,
        num_kv_blocks,
        swept_bytes,
        num_sms,
        rounds_per_band,
    )
    num_tiles = order.num_heads * num_kv_blocks
    num_ctas = cutlass.min(num_sms, num_tiles)
    if const_expr(variant.is_general):
        if const_expr(not variant.claims_tiles):
            num_ctas = num_tiles
        elif backward_work.has_fixed_shares(variant, scalars):
            num_ctas = num_tiles
    elif scalars.deterministic != 0:
        num_ctas = num_sms // num_kv_blocks * num_kv_blocks
        share = backward_work.ROUND_SHARE
        if num_ctas * share < num_sms * (share - 1):
            num_ctas = num_tiles
        if const_expr(variant.key.mask == "causal"):
            if ~backward_work.takes_rounds(scalars):
                num_ctas = num_tiles
        num_ctas = cutlass.min(num_ctas, num_tiles)
    return tiles.Grid(order, num_ctas * ctas)


def backward_entry(variant: Any, launch: Callable) -> Callable:
    """Returns the flat host entry of a backward.

    The architecture's ``launch(variant, call)`` launches the main kernel; the passes over rows
    before and after it are in ``backward_rows``.
    """
    key = variant.key

    @cute.jit
    def backward(  # noqa: PLR0913
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        dout: cute.Pointer,
        dlse: cute.Pointer,
        dq: cute.Pointer,
        dk: cute.Pointer,
        dv: cute.Pointer,
        dsinks: cute.Pointer,
        dbias: cute.Pointer,
        dq_sum: cute.Pointer,
        row_stats: cute.Pointer,
        dkv_sums: cute.Pointer,
        turns: cute.Pointer,
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
        deterministic: Int32,
        stream: cuda.CUstream,
    ):
        queries = Extents(batch, q_len, num_q_heads)
        keys = Extents(batch, kv_len, num_kv_heads)
        widths = primitives.widths_of(head_dim, value_dim)
        sequences = tiles.Sequences(
            lengths=tiles.Sides(q_lengths, kv_lengths),
            cu_seqlens=tiles.Sides(cu_seqlens_q, cu_seqlens_k),
            q_offset=q_offset,
            num_sequences=num_sequences,
            rows=tiles.Sides(q_len, kv_len),
        )
        rows = backward_rows.Rows(
            out=dense(out, queries, widths.v),
            dout=dense(dout, queries, widths.v),
            dq=dense(dq, queries, widths.qk),
            lse=dense_stats(lse, queries),
            dlse=dense_stats(dlse, queries),
            sinks=sinks,
            dsinks=dsinks,
            sequences=sequences,
            deterministic=deterministic,
        )
        scratch = backward_rows.make_scratch(
            dq_sum, row_stats, dkv_sums, turns, queries, num_sequences, key.head_dim
        )
        num_tiles = backward_division.kv_tiles(batch, num_sequences, kv_len) * num_kv_heads
        group = num_q_heads // num_kv_heads
        is_banded = Int32((window_left != UNBOUNDED) | (window_right != UNBOUNDED))
        mask = dense_mask.of_call(
            mask_words, mask_map, mask_batch, mask_heads, mask_rows, mask_width, q_len
        )
        score_log2 = (soft_cap if key.has_soft_cap else scale) * softmax.LOG2_E
        added = None
        if const_expr(key.has_bias):
            added = biases.Bias(
                bias, bias_batch, bias_heads, bias_rows, bias_keys, bias_bytes, scale, soft_cap
            )
            if const_expr(not key.multiplies_bias):
                score_log2 = biases.score_log2(added)
        scalars = backward_work.Scalars(
            sequences=tiles.Sequences(
                lengths=tiles.Sides(kv_lengths, q_lengths),
                cu_seqlens=tiles.Sides(cu_seqlens_k, cu_seqlens_q),
                q_offset=q_offset,
                num_sequences=num_sequences,
                rows=tiles.Sides(kv_len, q_len),
            ),
            q_offset=q_offset,
            q_segments=q_segments,
            kv_segments=kv_segments,
            mask=mask,
            window_left=window_left,
            window_right=window_right,
            bottom_right=bottom_right,
            group=group,
            splits=backward_division.head_splits(num_tiles, group, is_banded, tiles.EXTREMES),
            scale=scale,
            score_log2=score_log2,
            cap_inner_log2=scale / soft_cap * (2.0 * softmax.LOG2_E),
            deterministic=deterministic,
            bias=added,
        )
        backward_rows.prepare(variant, rows, scratch, stream)
        call = BackwardCall(
            q=q,
            k=k,
            v=v,
            dout=dout,
            dk=dk,
            dv=dv,
            dbias=dbias,
            queries=queries,
            keys=keys,
            widths=widths,
            scratch=scratch,
            scalars=scalars,
            num_sms=num_sms,
            stream=stream,
        )
        launch(variant, call)
        backward_rows.finish(variant, rows, scratch, scale, stream)
        dk_array, dv_array = dense(dk, keys, widths.qk), dense(dv, keys, widths.v)
        backward_rows.merge(dk_array, dv_array, dkv_sums, scalars.splits, stream)

    return backward
