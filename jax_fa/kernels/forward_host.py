"""The flat host entry of a forward, the same for all architectures, and its pieces.

Its parameters are those of ``abi.FORWARD``, one by one, as the exporter makes a C function of it.
It packs them into a ``ForwardCall`` and leaves the rest to the architecture's ``launch``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from jax_fa.kernels import dense_mask, forward_work, primitives, softmax, tiles
from jax_fa.kernels.primitives import Extents, dense, dense_stats


class ForwardCall(NamedTuple):
    """Arguments of a forward.

    Attributes:
        q: [B, T, N, D].
        k: [B, S, K, D].
        v: [B, S, K, Dv].
        out: [B, T, N, Dv].
        lse: [B, T, N].
        out_parts: float32 [splits, B, T, N, Dv]; null unless keys are split.
        lse_parts: [splits, B, T, N]; null unless keys are split.
        queries: B, T, N.
        keys: B, S, K.
        widths: D, Dv.
        scalars: what every tile shares.
        num_sms: multiprocessors of the device.
        stream: the stream to launch on.
    """

    q: cute.Pointer
    k: cute.Pointer
    v: cute.Pointer
    out: cute.Pointer
    lse: cute.Pointer
    out_parts: cute.Pointer
    lse_parts: cute.Pointer
    queries: Extents
    keys: Extents
    widths: primitives.Widths
    scalars: forward_work.Scalars
    num_sms: Int32
    stream: cuda.CUstream


class ForwardViews(NamedTuple):
    """Arrays as TMA and as threads see them."""

    tma: forward_work.Tma
    arrays: forward_work.Arrays


def forward_arrays(variant: Any, call: ForwardCall, layouts: Any) -> ForwardViews:
    """Returns the arrays as a forward sees them.

    ``layouts`` has the fields q, k, v and out: for each, the shared memory layout of what one TMA
    instruction copies.
    """
    widths = call.widths
    gOut = dense(call.out, call.queries, widths.v)
    loads = {
        "q": dense(call.q, call.queries, widths.qk),
        "k": dense(call.k, call.keys, widths.qk),
        "v": dense(call.v, call.keys, widths.v),
    }
    atoms: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for name, array in loads.items():
        layout = getattr(layouts, name)
        shape = cute.product_each(layout.outer.shape)
        atoms[name], arrays[name] = primitives.tma_load(array, layout, shape, variant.plan.ctas)
    out_shape = cute.product_each(layouts.out.outer.shape)
    atoms["out"], arrays["out"] = primitives.tma_store(gOut, layouts.out, out_shape)
    results = results_of(variant, call, gOut)
    return ForwardViews(forward_work.Tma(**atoms), forward_work.Arrays(**arrays, **results))


def results_of(variant: Any, call: ForwardCall, out: cute.Tensor) -> dict[str, cute.Tensor]:
    """Returns the arrays that threads write: ``out`` and lse, or their parts."""
    if not variant.key.is_split:
        return {"out_rows": out, "lse": dense_stats(call.lse, call.queries)}
    queries = call.queries._replace(batch=call.queries.batch * call.scalars.num_splits)
    return {
        "out_rows": dense(call.out_parts, queries, call.widths.v),
        "lse": dense_stats(call.lse_parts, queries),
    }


@cute.jit
def blocks_of_batch(variant: cutlass.Constexpr, call: ForwardCall, positions: Int32 | int) -> Int32:
    """Returns the number of blocks of ``positions`` queries in a batch."""
    blocks = cute.ceil_div(call.queries.length, positions)
    if const_expr(variant.is_general):
        if tiles.is_present(call.scalars.sequences.cu_seqlens.own):
            # Each sequence, and what lies behind the last, may end in a partly filled block.
            blocks = call.queries.length // positions + call.scalars.sequences.num_sequences + 1
    return blocks


LONG_KEYS = 1 << 16
"""The number of keys from which on tiles take so long that one CTA per tile costs nothing (H100,
32:8 heads of 128, causal: 51.4 and 51.6 ms for 65536 keys, 12.7 and 13.0 for 32768). Other kernels
then find room. While CTAs hold all multiprocessors, an exchange between devices that starts later
waits; one that starts earlier keeps CTAs out as long: kernels of 12 ms took 24 (two H100s)."""


@cute.jit
def forward_order(variant: cutlass.Constexpr, call: ForwardCall, packing: Any = None) -> tiles.Grid:
    """Returns the work order of a forward. The units of a ``Packing`` count as query heads."""
    key, config, ctas = variant.key, variant.config, variant.plan.ctas
    num_splits = call.scalars.num_splits
    batch, num_q_heads, num_kv_heads = call.queries.batch, call.queries.heads, call.keys.heads
    num_heads, group, positions = num_q_heads, num_q_heads // num_kv_heads, config.block_q
    if const_expr(packing is not None):
        group, positions = packing.units, packing.positions
        num_heads = num_kv_heads * group
    if const_expr(key.is_split):
        # Every part of a tile counts as a head of its own: see forward_work.work_on.
        num_heads, group = num_heads * num_splits, group * num_splits
    num_q_blocks = blocks_of_batch(variant, call, positions)
    kv_bytes = call.keys.length * (2 * (key.head_dim + key.value_dim)) // group
    num_ctas = call.num_sms
    if const_expr(ctas > 1):
        num_ctas = cutlass.max(call.num_sms // ctas, 1) * ctas
    order = tiles.make_order(batch * num_heads, num_heads, group, num_q_blocks, kv_bytes, num_ctas)
    num_tiles = tiles.num_tiles(order, ctas)
    if const_expr(config.is_persistent):
        num_ctas = cutlass.min(num_ctas, num_tiles)
        if const_expr(ctas == 1 and key.mask != "general"):
            if call.keys.length >= LONG_KEYS:
                num_ctas = num_tiles
    else:
        num_ctas = num_tiles
    if const_expr(variant.is_general and not variant.lists_ahead):
        if dense_mask.narrows(call.scalars):
            num_ctas = num_tiles
    return tiles.Grid(order, num_ctas)


def forward_entry(variant: Any, launch: Callable) -> Callable:
    """Returns the flat host entry of a forward.

    The architecture's ``launch(variant, call)`` launches the kernel.
    """
    key = variant.key

    @cute.jit
    def forward(  # noqa: PLR0913
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        out_parts: cute.Pointer,
        lse_parts: cute.Pointer,
        num_splits: Int32,
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
        sequences = tiles.Sequences(
            lengths=tiles.Sides(q_lengths, kv_lengths),
            cu_seqlens=tiles.Sides(cu_seqlens_q, cu_seqlens_k),
            q_offset=q_offset,
            num_sequences=num_sequences,
            rows=tiles.Sides(q_len, kv_len),
        )
        mask = dense_mask.of_call(
            mask_words, mask_map, mask_batch, mask_heads, mask_rows, mask_width, q_len
        )
        if const_expr(key.is_split):
            num_splits = cutlass.max(num_splits, 1)
        scale_log2 = (soft_cap if key.has_soft_cap else scale) * softmax.LOG2_E
        added = None
        if const_expr(key.has_bias):
            added = variant.bias.biases.Bias(
                bias, bias_batch, bias_heads, bias_rows, bias_keys, bias_bytes, scale, soft_cap
            )
            if const_expr(not key.multiplies_bias):
                scale_log2 = variant.bias.biases.score_log2(added)
        scalars = forward_work.Scalars(
            sequences,
            window_left,
            window_right,
            bottom_right,
            cap_inner_log2=scale / soft_cap * (2.0 * softmax.LOG2_E),
            scale_log2=scale_log2,
            scale_share=scale_log2 / softmax.SPAN,
            sinks=sinks,
            q_segments=q_segments,
            kv_segments=kv_segments,
            mask=mask,
            num_splits=num_splits,
            bias=added,
        )
        call = ForwardCall(
            q=q,
            k=k,
            v=v,
            out=out,
            lse=lse,
            out_parts=out_parts,
            lse_parts=lse_parts,
            queries=Extents(batch, q_len, num_q_heads),
            keys=Extents(batch, kv_len, num_kv_heads),
            widths=primitives.widths_of(head_dim, value_dim),
            scalars=scalars,
            num_sms=num_sms,
            stream=stream,
        )
        launch(variant, call)

    return forward
