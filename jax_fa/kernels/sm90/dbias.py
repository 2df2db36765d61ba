"""Hopper's gradient of a bias: dS, summed over all that the bias is broadcast along.

    load        q k  dO v (0) | q k  dO v (1) | ...      of all batches and heads of a tile
    consume i   S dP(0)  P  sums += P (dP - delta) | S dP(1) ...      64 rows of the tile
    consume j   the same for 64 other rows

A tile of the bias is in the registers of one CTA, which alone writes it: the order of the sums is
always the same, and nothing of size [B, N, T, S] is made unless the bias is. Where tiles are few
and shared by many, parts of those have a CTA each, and ``merge`` sums what they wrote. Roles,
edges and memory: ``plan_dbias.py``; conventions: ``jax_fa/spec/problem.py``.
"""

from collections.abc import Callable

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from jax_fa.kernels import bias as biases
from jax_fa.kernels import dense_mask, edges, primitives, softmax, tiles
from jax_fa.kernels.backward_rows import vector_at
from jax_fa.kernels.bias import Bias
from jax_fa.kernels.forward_work import Scalars, Variant
from jax_fa.kernels.primitives import Extents, dense, dense_stats
from jax_fa.kernels.sm90.dbias_roles import consume, load
from jax_fa.kernels.sm90.dbias_work import (
    Arrays,
    DbiasContext,
    DbiasPipes,
    DbiasSmem,
    Tiles,
    Tma,
    make_layouts,
    make_tiles,
)
from jax_fa.kernels.sm90.plan_dbias import dbias_plan
from jax_fa.spec.config_sm90_dbias import HopperBiasGradient
from jax_fa.spec.key import KernelKey

MERGE_THREADS = 256


@cute.kernel
def kernel(
    variant: cutlass.Constexpr, tma: Tma, arrays: Arrays, scalars: Scalars, grid: Tiles
) -> None:
    """Device entry: shared memory, pipelines, dispatch of roles."""
    plan, layouts, config = variant.plan, make_layouts(variant), variant.config
    dtype = variant.dtype
    threads = plan.role("consume").threads
    words_layout = cute.make_layout((4, threads, config.block_kv // 8))
    columns_layout = cute.make_layout((config.block_kv, threads // edges.WARP))

    @cute.struct
    class Storage:
        qk_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("qk").stages]
        dov_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("dov").stages]
        columns: cute.struct.MemRange[Float32, cute.cosize(columns_layout)]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.q)], 1024]
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.k)], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.v)], 1024]
        dout: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.dout)], 1024]
        words: cute.struct.Align[cute.struct.MemRange[Int32, cute.cosize(words_layout)], 1024]

    storage = SmemAllocator().allocate(Storage)
    smem = DbiasSmem(
        q=primitives.smem_tensor(storage.q, layouts.q),
        k=primitives.smem_tensor(storage.k, layouts.k),
        v=primitives.smem_tensor(storage.v, layouts.v),
        dout=primitives.smem_tensor(storage.dout, layouts.dout),
        words=storage.words.get_tensor(words_layout),
        columns=storage.columns.get_tensor(columns_layout),
    )
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        primitives.prefetch_descriptors(tma)
    qk_in, qk_out = edges.make_edge(plan, "qk", storage.qk_barriers.data_ptr())
    dov_in, dov_out = edges.make_edge(plan, "dov", storage.dov_barriers.data_ptr())
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    x = DbiasContext(tma, arrays, scalars, grid, smem)
    if warp < plan.role("consume").warps.start:
        cute.arch.setmaxregister_decrease(plan.role("load").registers)
        if warp == 0:
            load(variant, x, DbiasPipes(qk_in, dov_in))
    else:
        cute.arch.setmaxregister_increase(plan.role("consume").registers)
        consume(variant, x, DbiasPipes(qk_out, dov_out))


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
    """Sums the parts of an element in their order, a thread each.

    32 bits count the elements: there are ``ROUNDS`` tiles for each multiprocessor at most.
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


def make_entry(key: KernelKey, config: HopperBiasGradient) -> Callable:
    """The flat host entry of one variant."""
    variant = Variant(key, config, dbias_plan(key, config))

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
        arrays = {
            "q": dense(q, queries, key.head_dim),
            "k": dense(k, keys, key.head_dim),
            "v": dense(v, keys, key.value_dim),
            "dout": dense(dout, queries, key.value_dim),
        }
        layouts, atoms, seen = make_layouts(variant), {}, {}
        for name, array in arrays.items():
            layout = cute.slice_(getattr(layouts, name), (None, None, 0))
            shape = cute.product_each(layout.outer.shape)
            atoms[name], seen[name] = primitives.tma_load(array, layout, shape)
        grid = make_tiles(variant, added, batch, num_q_heads, num_kv_heads)
        views = Arrays(
            **seen,
            lse=dense_stats(lse, queries),
            delta=dense_stats(delta, queries),
            dbias=added._replace(array=dbias),
            parts=dbias_parts,
        )
        kernel(variant, Tma(**atoms), views, scalars, grid).launch(
            grid=(cutlass.min(num_sms, grid.number), 1, 1),
            block=(variant.plan.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )
        merge(views.dbias, dbias_parts, grid.parts, stream)

    return gradient
