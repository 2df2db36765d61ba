"""The flat host entries, which are the same for all architectures, and what they are made of.

An entry's parameters are those of ``abi.FORWARD`` or ``abi.BACKWARD``, one by one: the exporter
makes a C function of it. It packs them into a ``ForwardCall`` or ``BackwardCall`` and leaves the
rest to the architecture's ``launch``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from jax_fa.band import ceil_div
from jax_fa.kernels import (
    abi,
    backward_rows,
    backward_work,
    combine,
    forward_work,
    primitives,
    softmax,
    tiles,
)
from jax_fa.kernels.backward_rows import dense, dense_stats


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
        queries: (B, T, N).
        keys: (B, S, K).
        scalars: what every tile shares.
        num_sms: multiprocessors of the device.
        stream: to launch on.
    """

    q: cute.Pointer
    k: cute.Pointer
    v: cute.Pointer
    out: cute.Pointer
    lse: cute.Pointer
    out_parts: cute.Pointer
    lse_parts: cute.Pointer
    queries: tuple[Int32, Int32, Int32]
    keys: tuple[Int32, Int32, Int32]
    scalars: forward_work.Scalars
    num_sms: Int32
    stream: cuda.CUstream


class BackwardCall(NamedTuple):
    """Arguments of the main kernel of a backward.

    Attributes:
        q: [B, T, N, D].
        k: [B, S, K, D].
        v: [B, S, K, Dv].
        dout: [B, T, N, Dv].
        dk: [B, S, K, D].
        dv: [B, S, K, Dv].
        queries: (B, T, N).
        keys: (B, S, K).
        scratch: sums and statistics by row.
        scalars: what every tile shares.
        num_sms: multiprocessors of the device.
        stream: to launch on.
    """

    q: cute.Pointer
    k: cute.Pointer
    v: cute.Pointer
    dout: cute.Pointer
    dk: cute.Pointer
    dv: cute.Pointer
    queries: tuple[Int32, Int32, Int32]
    keys: tuple[Int32, Int32, Int32]
    scratch: backward_rows.Scratch
    scalars: backward_work.Scalars
    num_sms: Int32
    stream: cuda.CUstream


def forward_arrays(
    variant: Any, call: ForwardCall, layouts: Any
) -> tuple[forward_work.Tma, forward_work.Arrays]:
    """The arrays as TMA and as threads see them.

    ``layouts`` has a field q, k, v and out each: the shared memory layout of what one TMA
    instruction copies.
    """
    key = variant.key
    gOut = dense(call.out, call.queries, key.value_dim)
    loads = {
        "q": dense(call.q, call.queries, key.head_dim),
        "k": dense(call.k, call.keys, key.head_dim),
        "v": dense(call.v, call.keys, key.value_dim),
    }
    atoms: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for name, array in loads.items():
        layout = getattr(layouts, name)
        shape = cute.product_each(layout.outer.shape)
        atoms[name], arrays[name] = primitives.tma_load(array, layout, shape, variant.plan.ctas)
    out_shape = cute.product_each(layouts.out.outer.shape)
    atoms["out"], arrays["out"] = primitives.tma_store(gOut, layouts.out, out_shape)
    if not key.is_split:
        lse = dense_stats(call.lse, call.queries)
        return forward_work.Tma(**atoms), forward_work.Arrays(**arrays, out_rows=gOut, lse=lse)
    batch, q_len, num_q_heads = call.queries
    queries = (batch * call.scalars.num_splits, q_len, num_q_heads)
    out_parts = dense(call.out_parts, queries, key.value_dim)
    lse_parts = dense_stats(call.lse_parts, queries)
    return forward_work.Tma(**atoms), forward_work.Arrays(
        **arrays, out_rows=out_parts, lse=lse_parts
    )


@cute.jit
def _num_q_blocks(variant: cutlass.Constexpr, call: ForwardCall, positions: Int32 | int) -> Int32:
    """Blocks of ``positions`` queries in a batch."""
    blocks = cute.ceil_div(call.queries[1], positions)
    if const_expr(variant.is_general):
        if tiles.is_present(call.scalars.sequences.cu_seqlens_q):
            # Each sequence, and what lies behind the last, may end in a partly filled block.
            blocks = call.queries[1] // positions + call.scalars.sequences.num_sequences + 1
    return blocks


@cute.jit
def forward_packing(variant: cutlass.Constexpr, call: ForwardCall) -> tiles.Packing:
    """How query heads share tiles, if that pays."""
    block_q, group = variant.config.block_q, call.queries[2] // call.keys[2]
    packed = tiles.Packing(*abi.packing(block_q, group), group)
    plain = tiles.Packing(1, block_q, group, group)
    before, after = (
        cute.ceil_div(p.units * _num_q_blocks(variant, call, p.positions), variant.plan.ctas)
        for p in (plain, packed)
    )
    pays = abi.packing_pays(after, before)
    return tiles.Packing(
        packed.heads if pays else Int32(plain.heads),
        packed.positions if pays else Int32(plain.positions),
        packed.units if pays else plain.units,
        group,
    )


def forward_granules(
    variant: Any, call: ForwardCall, layout: cute.ComposedLayout
) -> forward_work.Granules:
    """The query array as TMA copies pieces of a packed tile, to shared memory of ``layout``."""
    head_dim = variant.key.head_dim
    by_granules = cute.select(primitives.by_granules(layout.outer), mode=[0, 1])
    granule = cute.make_composed_layout(layout.inner, 0, by_granules)
    queries, shape = dense(call.q, call.queries, head_dim), (abi.GRANULE, head_dim)
    return forward_work.Granules(*primitives.tma_load(queries, granule, shape, variant.plan.ctas))


@cute.jit
def forward_order(variant: cutlass.Constexpr, call: ForwardCall, packing: Any = None) -> tuple:
    """(work order, CTAs to launch); units of a ``tiles.Packing``, if any, count as query heads."""
    key, config, ctas = variant.key, variant.config, variant.plan.ctas
    num_splits = call.scalars.num_splits
    (batch, _, num_q_heads), (_, kv_len, num_kv_heads) = call.queries, call.keys
    num_heads, group, positions = num_q_heads, num_q_heads // num_kv_heads, config.block_q
    if const_expr(packing is not None):
        group, positions = packing.units, packing.positions
        num_heads = num_kv_heads * group
    if const_expr(key.is_split):
        # Every part of a tile counts as a head of its own: work_on in forward_work.
        num_heads, group = num_heads * num_splits, group * num_splits
    num_q_blocks = _num_q_blocks(variant, call, positions)
    kv_bytes = kv_len * (2 * (key.head_dim + key.value_dim)) // group
    num_ctas = call.num_sms
    if const_expr(ctas > 1):
        num_ctas = cutlass.max(call.num_sms // ctas, 1) * ctas
    order = tiles.make_order(batch * num_heads, num_heads, group, num_q_blocks, kv_bytes, num_ctas)
    num_tiles = tiles.num_tiles(order, ctas)
    if const_expr(config.is_persistent):
        num_ctas = cutlass.min(num_ctas, num_tiles)
    else:
        num_ctas = num_tiles
    if const_expr(variant.is_general):
        if tiles.is_present(call.scalars.q_segments):
            num_ctas = num_tiles
    return order, num_ctas


def backward_arrays(
    variant: Any, call: BackwardCall, layouts: Any, ctas: int = 1
) -> tuple[backward_work.Tma, backward_work.Arrays]:
    """The arrays as TMA and as threads see them.

    ``layouts`` has the shared memory layouts k and v of a tile, q and dout of a ring of tiles; of a
    pair of CTAs, also kt, qt and dout_t. ``ctas`` as for ``primitives.tma_load``.
    """
    key, one = variant.key, (None, None, 0)
    loads = {
        "k": (dense(call.k, call.keys, key.head_dim), layouts.k),
        "v": (dense(call.v, call.keys, key.value_dim), layouts.v),
        "q": (dense(call.q, call.queries, key.head_dim), cute.slice_(layouts.q, one)),
        "dout": (dense(call.dout, call.queries, key.value_dim), cute.slice_(layouts.dout, one)),
    }
    if variant.plan.ctas > 1:
        loads |= {
            "kt": (loads["k"][0], layouts.kt),
            "qt": (loads["q"][0], cute.slice_(layouts.qt, one)),
            "dout_t": (loads["dout"][0], cute.slice_(layouts.dout_t, one)),
        }
    atoms: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for name, (array, layout) in loads.items():
        shape = cute.product_each(layout.outer.shape)
        atoms[name], arrays[name] = primitives.tma_load(array, layout, shape, ctas)
    return backward_work.Tma(**atoms), backward_work.Arrays(
        **arrays,
        dk=dense(call.dk, call.keys, key.head_dim),
        dv=dense(call.dv, call.keys, key.value_dim),
    )


@cute.jit
def backward_order(variant: cutlass.Constexpr, call: BackwardCall) -> tuple:
    """(work order, CTAs to launch); see Note [Turns] in ``backward_work.py``."""
    scalars, num_sms, ctas = call.scalars, call.num_sms, variant.plan.ctas
    if const_expr(ctas > 1):
        # From here on a cluster, whose CTAs share every tile, is one.
        num_sms = cutlass.max(num_sms // ctas, 1)
    (batch, q_len, _), (_, kv_len, num_kv_heads) = call.queries, call.keys
    num_kv_blocks = ceil_div(kv_len, variant.config.block_kv)
    if const_expr(variant.is_general):
        is_packed = tiles.is_present(scalars.keys.cu_seqlens_q).to(Int32)
        num_kv_blocks = num_kv_blocks + is_packed * (scalars.keys.num_sequences + 1)
    splits = scalars.splits
    order = tiles.make_order(
        batch * num_kv_heads * splits,
        num_kv_heads * splits,
        splits,
        num_kv_blocks,
        backward_work.bytes_per_head(variant, (q_len, scalars.group, num_kv_blocks), num_sms),
        num_sms,
    )
    if const_expr(variant.key.mask == "full"):
        # In a deterministic run the key blocks of a head follow each other, a turn apart. Whole
        # heads on the CTAs of a round keep every CTA at its distance from the others. Of a head
        # for which a round is too short, a CTA of the next round would wait for a higher index.
        if scalars.deterministic != 0:
            heads_per_round = num_sms // num_kv_blocks
            if heads_per_round == 0:
                heads_per_round = order.num_heads
            num_sms = heads_per_round * num_kv_blocks
    num_ctas = cutlass.min(num_sms, order.num_heads * num_kv_blocks)
    if const_expr(variant.is_general):
        num_ctas = order.num_heads * num_kv_blocks
    if const_expr(variant.key.mask == "causal"):
        if scalars.deterministic != 0:
            num_ctas = order.num_heads * num_kv_blocks
    return order, num_ctas * ctas


def forward_entry(variant: Any, launch: Callable) -> tuple[Callable, tuple]:
    """The flat host entry of a forward, and the stand-in arguments it is compiled with.

    ``launch(variant, call)``, of the architecture, launches the kernel.
    """
    key = variant.key

    @cute.jit
    def forward(
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
        batch: Int32,
        num_sequences: Int32,
        q_len: Int32,
        kv_len: Int32,
        num_q_heads: Int32,
        num_kv_heads: Int32,
        scale: Float32,
        soft_cap: Float32,
        window_left: Int32,
        window_right: Int32,
        bottom_right: Int32,
        num_sms: Int32,
        stream: cuda.CUstream,
    ):
        sequences = tiles.Sequences(
            q_lengths,
            kv_lengths,
            cu_seqlens_q,
            cu_seqlens_k,
            q_offset,
            num_sequences,
            q_len,
            kv_len,
        )
        scale_log2 = (soft_cap if key.has_soft_cap else scale) * softmax.LOG2_E
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
            num_splits=num_splits,
        )
        queries, keys = (batch, q_len, num_q_heads), (batch, kv_len, num_kv_heads)
        parts, whole = (out_parts, lse_parts), (out, lse)
        launch(
            variant, ForwardCall(q, k, v, *whole, *parts, queries, keys, scalars, num_sms, stream)
        )
        if const_expr(key.is_split):
            extents = (batch * q_len * num_q_heads, key.value_dim, num_splits)
            combine.merge(parts, whole, extents, stream)

    element = dict.fromkeys(("q", "k", "v", "out"), variant.dtype)
    floats = dict.fromkeys(("lse", "sinks", "out_parts", "lse_parts"), Float32)
    return forward, primitives.stand_ins(abi.FORWARD, {**element, **floats})


def backward_entry(variant: Any, launch: Callable) -> tuple[Callable, tuple]:
    """The flat host entry of a backward, and the stand-in arguments it is compiled with.

    ``launch(variant, call)``, of the architecture, launches the main kernel; the passes over rows
    around it are ``backward_rows``.
    """
    key = variant.key

    @cute.jit
    def backward(
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
        batch: Int32,
        num_sequences: Int32,
        q_len: Int32,
        kv_len: Int32,
        num_q_heads: Int32,
        num_kv_heads: Int32,
        scale: Float32,
        soft_cap: Float32,
        window_left: Int32,
        window_right: Int32,
        bottom_right: Int32,
        num_sms: Int32,
        deterministic: Int32,
        stream: cuda.CUstream,
    ):
        queries, keys = (batch, q_len, num_q_heads), (batch, kv_len, num_kv_heads)
        sequences = tiles.Sequences(
            q_lengths,
            kv_lengths,
            cu_seqlens_q,
            cu_seqlens_k,
            q_offset,
            num_sequences,
            q_len,
            kv_len,
        )
        rows = backward_rows.Rows(
            out=dense(out, queries, key.value_dim),
            dout=dense(dout, queries, key.value_dim),
            dq=dense(dq, queries, key.head_dim),
            lse=dense_stats(lse, queries),
            dlse=dense_stats(dlse, queries),
            sinks=sinks,
            dsinks=dsinks,
            sequences=sequences,
            deterministic=deterministic,
        )
        scratch = backward_rows.make_scratch(
            (dq_sum, row_stats, dkv_sums, turns),
            (batch, num_sequences, q_len, num_q_heads),
            key.head_dim,
        )
        num_tiles = abi.kv_tiles(batch, num_sequences, kv_len) * num_kv_heads
        group = num_q_heads // num_kv_heads
        scalars = backward_work.Scalars(
            keys=backward_work.exchanged(sequences),
            q_offset=q_offset,
            q_segments=q_segments,
            kv_segments=kv_segments,
            window_left=window_left,
            window_right=window_right,
            bottom_right=bottom_right,
            group=group,
            splits=abi.head_splits(num_tiles, group, minimum=cutlass.min, maximum=cutlass.max),
            scale=scale,
            score_log2=(soft_cap if key.has_soft_cap else scale) * softmax.LOG2_E,
            cap_inner_log2=scale / soft_cap * (2.0 * softmax.LOG2_E),
            deterministic=deterministic,
        )
        backward_rows.prepare(variant, rows, scratch, stream)
        launch(
            variant,
            BackwardCall(q, k, v, dout, dk, dv, queries, keys, scratch, scalars, num_sms, stream),
        )
        backward_rows.finish(variant, rows, scratch, scale, stream)
        gradients = dense(dk, keys, key.head_dim), dense(dv, keys, key.value_dim)
        backward_rows.merge(gradients, dkv_sums, scalars.splits, stream)

    wide = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
    floats = ("lse", "dlse", "sinks", "dsinks", "dq_sum", "row_stats", "dkv_sums")
    element = {**dict.fromkeys(floats, Float32), **dict.fromkeys(wide, variant.dtype)}
    return backward, primitives.stand_ins(abi.BACKWARD, element)
