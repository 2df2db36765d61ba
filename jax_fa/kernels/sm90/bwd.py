"""Hopper backward: dq, dk and dv from one more pass over all visible pairs.

    prepare            delta, log2-sum-exp2 by query row; dQ sums = 0        (bwd_rows.py)
    main   load        k  v  q(n)  do(n)  q(n-1)  do(n-1) ...
           attend i    S dP(n)  P dS |barrier| dQ dV dK(n)  dQ sums += | S dP(n-1)  P dS | ...
           attend j    the same for 64 other keys
           keep_turns  in a deterministic run, says when the sums may be added to
    finish             dQ sums -> dq; dsinks; parts of dK, dV -> dk, dv      (bwd_rows.py)

The method is FlashAttention's (Dao, arXiv:2307.08691; Shah et al., arXiv:2407.08608); roles, edges
and memory: ``plan_bwd.py``; conventions: ``jax_fa/problem.py``.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from jax_fa.band import UNBOUNDED, ceil_div
from jax_fa.config import BwdConfig, KernelKey
from jax_fa.kernels import abi, edges, primitives, softmax, tiles
from jax_fa.kernels.sm90 import bwd_rows
from jax_fa.kernels.sm90.bwd_roles import attend, keep_turns, load
from jax_fa.kernels.sm90.bwd_work import (
    Arrays,
    Context,
    Pipes,
    Scalars,
    Smem,
    Tma,
    Variant,
    bytes_per_head,
    exchanged,
    find_segment_rows,
    make_layouts,
)
from jax_fa.kernels.sm90.plan_bwd import backward_plan


@cute.kernel
def kernel(
    variant: cutlass.Constexpr,
    tma: Tma,
    arrays: Arrays,
    scratch: bwd_rows.Scratch,
    scalars: Scalars,
    order: tiles.Order,
):
    """Device entry: shared memory, pipelines, dispatch of roles."""
    plan, layouts, dtype = variant.plan, make_layouts(variant), variant.dtype
    config = variant.config

    p_elements = 0 if config.splits_keys else cute.cosize(layouts.ds)

    @cute.struct
    class Storage:
        k_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("k").stages]
        v_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("v").stages]
        q_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("q").stages]
        dout_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("dout").stages]
        segment_rows: cute.struct.MemRange[Int32, 2]
        lse2: cute.struct.Align[
            cute.struct.MemRange[Float32, config.block_q * config.q_stages], 128
        ]
        delta: cute.struct.Align[
            cute.struct.MemRange[Float32, config.block_q * config.dout_stages], 128
        ]
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.k)], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.v)], 1024]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.q)], 1024]
        dout: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.dout)], 1024]
        ds: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.ds)], 1024]
        p: cute.struct.Align[cute.struct.MemRange[dtype, p_elements], 1024]

    storage = SmemAllocator().allocate(Storage)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        for atom in tma:
            cpasync.prefetch_descriptor(atom)
    k_in, k_out = edges.make_edge(plan, "k", storage.k_barriers.data_ptr())
    v_in, v_out = edges.make_edge(plan, "v", storage.v_barriers.data_ptr())
    q_in, q_out = edges.make_edge(plan, "q", storage.q_barriers.data_ptr())
    dout_in, dout_out = edges.make_edge(plan, "dout", storage.dout_barriers.data_ptr())
    smem = Smem(
        k=primitives.smem_tensor(storage.k, layouts.k),
        v=primitives.smem_tensor(storage.v, layouts.v),
        q=primitives.smem_tensor(storage.q, layouts.q),
        dout=primitives.smem_tensor(storage.dout, layouts.dout),
        ds=primitives.smem_tensor(storage.ds, layouts.ds),
        p=primitives.smem_tensor(storage.ds if config.splits_keys else storage.p, layouts.ds),
        lse2=storage.lse2.get_tensor(cute.make_layout((config.block_q, config.q_stages))),
        delta=storage.delta.get_tensor(cute.make_layout((config.block_q, config.dout_stages))),
        segment_rows=storage.segment_rows.get_tensor(cute.make_layout(2)),
    )
    if const_expr(variant.is_general):
        if cute.arch.thread_idx()[0] == 0:
            smem.segment_rows[0] = Int32(UNBOUNDED)
            smem.segment_rows[1] = Int32(0)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    x = Context(tma, arrays, scratch, scalars, order, smem)
    if const_expr(variant.is_general):
        if tiles.is_present(scalars.q_segments):
            find_segment_rows(variant, x)
            cute.arch.sync_threads()
    if warp < plan.role("attend").warps.start:
        cute.arch.setmaxregister_decrease(plan.role("load").registers)
        if warp == 0:
            load(variant, x, Pipes(k_in, v_in, q_in, dout_in))
        if (warp == 1) & (scalars.deterministic != 0):
            keep_turns(variant, x)
    else:
        cute.arch.setmaxregister_increase(plan.role("attend").registers)
        attend(variant, x, Pipes(k_out, v_out, q_out, dout_out))


def make_entry(key: KernelKey, config: BwdConfig):
    """The flat host entry of one variant, and the stand-in arguments it is compiled with.

    The entry's parameters are those of ``abi.BACKWARD``.
    """
    variant = Variant(key, config, backward_plan(key, config))

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
        d = key.head_dim
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
        rows = bwd_rows.Rows(
            out=bwd_rows.dense(out, queries, key.value_dim),
            dout=bwd_rows.dense(dout, queries, key.value_dim),
            dq=bwd_rows.dense(dq, queries, d),
            lse=bwd_rows.dense_stats(lse, queries),
            dlse=bwd_rows.dense_stats(dlse, queries),
            sinks=sinks,
            dsinks=dsinks,
            sequences=sequences,
            deterministic=deterministic,
        )
        scratch = bwd_rows.make_scratch(
            (dq_sum, row_stats, dkv_sums, turns), (batch, num_sequences, q_len, num_q_heads), d
        )
        num_tiles = abi.kv_tiles(batch, num_sequences, kv_len) * num_kv_heads
        group = num_q_heads // num_kv_heads
        scalars = Scalars(
            keys=exchanged(sequences),
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
        bwd_rows.prepare(variant, rows, scratch, stream)
        arrays = (q, k, v, dout, dk, dv)
        launch_main(variant, arrays, scratch, scalars, (queries, keys), (num_sms, stream))
        bwd_rows.finish(variant, rows, scratch, scale, stream)
        gradients = (
            bwd_rows.dense(dk, keys, d),
            bwd_rows.dense(dv, keys, key.value_dim),
        )
        bwd_rows.merge(gradients, dkv_sums, scalars.splits, stream)

    return backward, fake_arguments(variant.dtype)


@cute.jit
def launch_main(
    variant: cutlass.Constexpr,
    pointers: tuple,
    scratch: bwd_rows.Scratch,
    scalars: Scalars,
    extents: tuple,
    launch: tuple,
):
    """Describes the arrays to TMA and launches the main kernel."""
    key, config = variant.key, variant.config
    q, k, v, dout, dk, dv = pointers
    queries, keys = extents
    num_sms, stream = launch
    (batch, q_len, _), (_, kv_len, num_kv_heads) = queries, keys
    layouts = make_layouts(variant)
    one = (None, None, 0)
    loads = {
        "k": (bwd_rows.dense(k, keys, key.head_dim), layouts.k),
        "v": (bwd_rows.dense(v, keys, key.value_dim), layouts.v),
        "q": (bwd_rows.dense(q, queries, key.head_dim), cute.slice_(layouts.q, one)),
        "dout": (bwd_rows.dense(dout, queries, key.value_dim), cute.slice_(layouts.dout, one)),
    }
    made = {
        name: primitives.tma_load(array, layout, cute.product_each(layout.outer.shape))
        for name, (array, layout) in loads.items()
    }
    arrays = Arrays(
        **{name: tensor for name, (_, tensor) in made.items()},
        dk=bwd_rows.dense(dk, keys, key.head_dim),
        dv=bwd_rows.dense(dv, keys, key.value_dim),
    )
    num_kv_blocks = ceil_div(kv_len, config.block_kv)
    if const_expr(variant.is_general):
        is_packed = tiles.is_present(scalars.keys.cu_seqlens_q).to(Int32)
        num_kv_blocks = num_kv_blocks + is_packed * (scalars.keys.num_sequences + 1)
    splits = scalars.splits
    order = tiles.make_order(
        batch * num_kv_heads * splits,
        num_kv_heads * splits,
        splits,
        num_kv_blocks,
        bytes_per_head(variant, (q_len, scalars.group, num_kv_blocks), num_sms),
        num_sms,
    )
    if const_expr(variant.key.mask == "full"):
        # In a deterministic run the key blocks of a head follow each other, a step apart. Whole
        # heads on the CTAs of a round keep every CTA at its distance from the others.
        if (scalars.deterministic != 0) & (num_kv_blocks < num_sms):
            num_sms = num_sms // num_kv_blocks * num_kv_blocks
    num_ctas = cutlass.min(num_sms, order.num_heads * num_kv_blocks)
    if const_expr(variant.is_general):
        num_ctas = order.num_heads * num_kv_blocks
    kernel(
        variant,
        Tma(**{name: atom for name, (atom, _) in made.items()}),
        arrays,
        scratch,
        scalars,
        order,
    ).launch(
        grid=(num_ctas, 1, 1),
        block=(variant.plan.threads, 1, 1),
        stream=stream,
        min_blocks_per_mp=1,
    )


def fake_arguments(dtype: type) -> tuple:
    """Stand-ins for the parameters of ``abi.BACKWARD``, in its order."""
    wide = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
    floats = ("lse", "dlse", "sinks", "dsinks", "dq_sum", "row_stats", "dkv_sums")
    element = {**dict.fromkeys(floats, Float32), **dict.fromkeys(wide, dtype)}
    return primitives.stand_ins(abi.BACKWARD, element)
