"""Hopper backward: dq, dk and dv from one more pass over all visible pairs.

    prepare            delta, log2-sum-exp2 by query row; dQ sums = 0        (backward_rows.py)
    main   claim       the next tile, from a counter; where a mask makes them unequal: bwd_claims.py
           load        q(n)  do(n)  v  k  q(n-1)  do(n-1) ...
           consume i   S dP(n)  P dS |barrier| dQ dV dK(n)  dQ sums += | S dP(n-1)  P dS | ...
           consume j   the same for 64 other keys
           load_bias   bias(n)  bias(n-1) ...     where there is one: bwd_bias.py
           store_dbias           |barrier| dbias(n) ...        the same: bwd_dbias.py
           hold_dq_semaphore  in deterministic runs, orders the additions to the sums or makes them
    finish             dQ sums -> dq; dsinks; parts of dK, dV -> dk, dv      (backward_rows.py)

With a bias that is not broadcast, consumers also write dS to its gradient, which is cleared before
main if some blocks may not be visited: ``bwd_dbias.py``.

The method is FlashAttention's (Dao, arXiv:2307.08691; Shah et al., arXiv:2407.08608); roles, edges
and memory: ``plan_bwd.py``; conventions: ``jax_fa/spec/problem.py``.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from jax_fa.kernels import dense_mask, edges, primitives, segments, tiles
from jax_fa.kernels.backward_host import (
    BackwardCall,
    backward_arrays,
    backward_entry,
    backward_order,
)
from jax_fa.kernels.backward_rows import FLOATS, Scratch
from jax_fa.kernels.backward_work import Arrays, Scalars, Tma, narrow_rows
from jax_fa.kernels.sm90 import bias_chunks, bias_product, bwd_bias, bwd_claims, bwd_dbias
from jax_fa.kernels.sm90.bwd_load import load
from jax_fa.kernels.sm90.bwd_roles import consume, hold_dq_semaphore
from jax_fa.kernels.sm90.bwd_work import (
    BackwardContext,
    BackwardPipes,
    BackwardSmem,
    BackwardVariant,
    make_layouts,
)
from jax_fa.kernels.sm90.plan import ELEMENT_BYTES
from jax_fa.kernels.sm90.plan_bias import FACTORS_BYTES, num_words
from jax_fa.kernels.sm90.plan_bwd import (
    ITEMS,
    STEP_WORDS,
    WORK_WORDS,
    backward_plan,
    step_slots,
    work_words,
)
from jax_fa.spec import division
from jax_fa.spec.config_sm90_bwd import HopperBackward
from jax_fa.spec.key import KernelKey


@cute.kernel
def kernel(
    variant: cutlass.Constexpr,
    tma: Tma,
    arrays: Arrays,
    scratch: Scratch,
    scalars: Scalars,
    order: tiles.Order,
    bias: Any,
    dbias: Any,
):
    """Device entry: shared memory, pipelines, dispatch of roles."""
    plan, layouts, dtype = variant.plan, make_layouts(variant), variant.dtype
    config = variant.config

    p_elements = 0 if config.splits_keys else cute.cosize(layouts.ds)
    dq_layout = cute.make_layout((FLOATS, variant.dq_fours, config.num_consumers))
    dq_elements = cute.cosize(dq_layout) if config.stages_dq != "never" else 0
    bias_halves = cute.cosize(layouts.bias) if config.bias_stages else 0
    multiplies = variant.key.multiplies_bias
    ds_elements = 0 if multiplies else cute.cosize(layouts.ds)
    factor_elements = FACTORS_BYTES // ELEMENT_BYTES if multiplies else 0
    odd_words = num_words(config) if multiplies else 0
    slots, words = step_slots(config), work_words(config)
    items = ITEMS if config.claims_tiles else 0

    @cute.struct
    class Storage:
        k_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("k").stages]
        v_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("v").stages]
        q_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("q").stages]
        dout_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("dout").stages]
        bias_barriers: cute.struct.MemRange[Int64, 2 * config.bias_stages]
        work_barriers: cute.struct.MemRange[Int64, 2 * items]
        loaded_barriers: cute.struct.MemRange[Int64, 2 * items]
        found: cute.struct.MemRange[Int32, division.FOUND_WORDS]
        work: cute.struct.Align[cute.struct.MemRange[Int32, words], 16]
        steps: cute.struct.Align[cute.struct.MemRange[Int32, STEP_WORDS * slots], 16]
        lse2: cute.struct.Align[
            cute.struct.MemRange[Float32, config.block_q * config.q_stages], 128
        ]
        delta: cute.struct.Align[
            cute.struct.MemRange[Float32, config.block_q * config.dout_stages], 128
        ]
        odd: cute.struct.MemRange[Int32, odd_words]
        bias: cute.struct.Align[cute.struct.MemRange[dtype, bias_halves], 1024]
        factors: cute.struct.Align[cute.struct.MemRange[dtype, factor_elements], 1024]
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.k)], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.v)], 1024]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.q)], 1024]
        dout: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.dout)], 1024]
        ds: cute.struct.Align[cute.struct.MemRange[dtype, ds_elements], 1024]
        p: cute.struct.Align[cute.struct.MemRange[dtype, p_elements], 1024]
        dq: cute.struct.Align[cute.struct.MemRange[Float32, dq_elements], 128]

    storage = SmemAllocator().allocate(Storage)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        primitives.prefetch_descriptors((*tma, *(x.atom for x in (bias, dbias) if x)))
    k_in, k_out = edges.make_edge(plan, "k", storage.k_barriers.data_ptr())
    v_in, v_out = edges.make_edge(plan, "v", storage.v_barriers.data_ptr())
    q_in, q_out = edges.make_edge(plan, "q", storage.q_barriers.data_ptr())
    dout_in, dout_out = edges.make_edge(plan, "dout", storage.dout_barriers.data_ptr())
    bias_in, bias_out, bias_read = None, None, None
    if const_expr(bias_halves > 0):
        ring = edges.make_ring(plan, plan.edge("bias"), storage.bias_barriers.data_ptr())
        bias_in, bias_out = ring.make_participants()
        bias_read = ring.make_consumer()
    claims = bwd_claims.make_rings(variant, storage.work_barriers, storage.loaded_barriers)
    factors = storage.factors.data_ptr().toint() if multiplies else None
    ds = primitives.smem_tensor(storage.bias if multiplies else storage.ds, layouts.ds)
    smem = BackwardSmem(
        k=primitives.smem_tensor(storage.k, layouts.k),
        v=primitives.smem_tensor(storage.v, layouts.v),
        q=primitives.smem_tensor(storage.q, layouts.q),
        dout=primitives.smem_tensor(storage.dout, layouts.dout),
        ds=ds,
        p=ds if config.splits_keys else primitives.smem_tensor(storage.p, layouts.ds),
        lse2=storage.lse2.get_tensor(cute.make_layout((config.block_q, config.q_stages))),
        delta=storage.delta.get_tensor(cute.make_layout((config.block_q, config.dout_stages))),
        dq=storage.dq.get_tensor(dq_layout) if dq_elements else None,
        bias=primitives.smem_tensor(storage.bias, layouts.bias) if bias_halves else None,
        factors=bias_product.factors_at(dtype, factors) if multiplies else None,
        words=storage.odd.get_tensor(cute.make_layout(odd_words)) if multiplies else None,
        steps=storage.steps.get_tensor(cute.make_layout((STEP_WORDS, slots))) if slots else None,
        work=storage.work.get_tensor(cute.make_layout((WORK_WORDS, items))) if items else None,
        found=storage.found.get_tensor(cute.make_layout(division.FOUND_WORDS)),
    )
    if const_expr(variant.is_general):
        if cute.arch.thread_idx()[0] == 0:
            segments.reset(smem.found)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    x = BackwardContext(tma, arrays, scratch, scalars, order, smem, bias, dbias, *claims)
    if const_expr(variant.is_general):
        if dense_mask.narrows(scalars):
            narrow_rows(variant, x)
            cute.arch.sync_threads()
    if warp < plan.role("consume").warps.start:
        cute.arch.setmaxregister_decrease(plan.role("load").registers)
        if warp == 0:
            load(variant, x, BackwardPipes(k_in, v_in, q_in, dout_in, None))
        if (warp == 1) & (scalars.deterministic != 0):
            hold_dq_semaphore(variant, x)
        if const_expr(items > 0):
            if warp == plan.role("claim").warps.start:
                bwd_claims.claim(variant, x)
        if const_expr(bias_halves > 0):
            if warp == plan.role("load_bias").warps.start:
                bwd_bias.load(variant, x, bias_in)
            elif warp == plan.role("store_dbias").warps.start:
                bwd_dbias.store_tiles(variant, x, bias_read)
    else:
        cute.arch.setmaxregister_increase(plan.role("consume").registers)
        consume(variant, x, BackwardPipes(k_out, v_out, q_out, dout_out, bias_out))


def make_entry(key: KernelKey, config: HopperBackward) -> Callable:
    """The flat host entry of one variant."""
    return backward_entry(BackwardVariant(key, config, backward_plan(key, config)), launch)


@cute.jit
def launch(variant: cutlass.Constexpr, call: BackwardCall):
    """Describes the arrays to TMA and launches the main kernel."""
    if const_expr(variant.key.has_bias):
        call = call._replace(scalars=call.scalars._replace(dbias=call.dbias))
        bwd_dbias.clear(call)
    layouts = make_layouts(variant)
    tma, arrays = backward_arrays(variant, call, layouts)
    order, num_ctas = backward_order(variant, call)
    bias, dbias = None, None
    if const_expr(variant.config.bias_stages > 0):
        chunk = cute.slice_(layouts.bias, (None, None, 0))
        bias = bias_chunks.describe(call.scalars.bias, call.queries.length, chunk)
        dbias = bwd_dbias.describe(call.scalars, call.queries.length, chunk)
    kernel(variant, tma, arrays, call.scratch, call.scalars, order, bias, dbias).launch(
        grid=(num_ctas, 1, 1),
        block=(variant.plan.threads, 1, 1),
        stream=call.stream,
        min_blocks_per_mp=1,
    )
