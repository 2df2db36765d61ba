"""Backward by mma.sync: dq, dk and dv from one more pass over all visible pairs.

    prepare    delta, log2-sum-exp2 by query row; dQ sums = 0                (backward_rows.py)
    main       wait q(n), do(n); barrier; S P dV dP dS; barrier; load do(n-1); dK; barrier;
               load q(n-1); dQ, dQ sums += | wait q(n-1), do(n-1) ...        one stage
    finish     dQ sums -> dq; dsinks; parts of dK, dV -> dk, dv              (backward_rows.py)

With two stages, loads of the next step start right after the first barrier, and the third barrier
is not needed. The method is FlashAttention's (Dao, arXiv:2307.08691). Memory: ``plan_bwd.py``;
conventions: ``jax_fa/spec/problem.py``.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from jax_fa.kernels import (
    edges,
    primitives,
    tiles,
)
from jax_fa.kernels.backward_host import (
    BackwardCall,
    backward_entry,
    backward_order,
    plain_arrays,
)
from jax_fa.kernels.backward_rows import Scratch
from jax_fa.kernels.backward_work import (
    Arrays,
    Scalars,
    Step,
    Work,
    first_step,
    narrow_rows,
    next_step,
    tile_at,
    work_on,
)
from jax_fa.kernels.fragment_keys import differentiate, own_columns, store
from jax_fa.kernels.mma_sync import bwd_shared, products, shell
from jax_fa.kernels.mma_sync.bwd_part import (
    acquire_dq,
    exponentiate_part,
    load_bias,
    put_words,
    release_dq,
)
from jax_fa.kernels.mma_sync.bwd_products import (
    fetch_ds,
    multiply_columns,
    multiply_dq,
    multiply_rows,
    operands_of,
)
from jax_fa.kernels.mma_sync.bwd_work import (
    BackwardContext,
    BackwardSmem,
    BackwardVariant,
    Keys,
    anew,
    load_keys,
    load_queries,
    loaded_anew,
    make_keys,
    put_down,
    taken_up,
    tiles_of,
)
from jax_fa.kernels.mma_sync.panels import ALIGNMENT_BYTES
from jax_fa.kernels.mma_sync.plan_bwd import backward_plan
from jax_fa.spec import division
from jax_fa.spec.config_mma_sync import MmaSyncBackward
from jax_fa.spec.key import KernelKey

RESIDENT_WARPS = 8
"""Warps that an SM holds when each thread has the most registers that it can have."""


@cute.kernel
def kernel(
    variant: cutlass.Constexpr,
    arrays: Arrays,
    scratch: Scratch,
    scalars: Scalars,
    order: tiles.Order,
):
    """Device entry: shared memory, and the tiles of the CTA."""
    layout, config, dtype = tiles_of(variant), variant.config, variant.dtype
    stages, align = config.stages, ALIGNMENT_BYTES

    @cute.struct
    class Storage:
        k: cute.struct.Align[cute.struct.MemRange[dtype, layout.k.elements], align]
        v: cute.struct.Align[cute.struct.MemRange[dtype, layout.v.elements], align]
        q: cute.struct.Align[cute.struct.MemRange[dtype, stages * layout.q.elements], align]
        dout: cute.struct.Align[cute.struct.MemRange[dtype, stages * layout.dout.elements], align]
        ds: cute.struct.Align[cute.struct.MemRange[dtype, layout.ds.elements], align]
        lse2: cute.struct.Align[cute.struct.MemRange[Float32, config.loaded_rows * stages], 128]
        delta: cute.struct.Align[cute.struct.MemRange[Float32, config.loaded_rows * stages], 128]
        found: cute.struct.MemRange[Int32, division.FOUND_WORDS + config.work_words]

    storage = SmemAllocator().allocate(Storage)
    statistics = cute.make_layout((config.loaded_rows, stages))
    smem = BackwardSmem(
        k=storage.k.data_ptr().toint(),
        v=storage.v.data_ptr().toint(),
        q=storage.q.data_ptr().toint(),
        dout=storage.dout.data_ptr().toint(),
        ds=storage.ds.data_ptr().toint(),
        lse2=storage.lse2.get_tensor(statistics),
        delta=storage.delta.get_tensor(statistics),
        found=storage.found.get_tensor(cute.make_layout(division.FOUND_WORDS)),
        work=storage.found.data_ptr() + division.FOUND_WORDS,
    )
    x = BackwardContext(arrays, scratch, scalars, order, smem)
    shell.narrow(variant, x, narrow_rows)
    attend(variant, x)


def make_entry(key: KernelKey, config: MmaSyncBackward) -> Callable:
    """The flat host entry of one variant."""
    return backward_entry(BackwardVariant(key, config, backward_plan(key, config)), launch)


@cute.jit
def launch(variant: cutlass.Constexpr, call: BackwardCall):
    """Launches the main kernel."""
    resident = RESIDENT_WARPS // variant.config.warps
    order, num_ctas = backward_order(variant, call._replace(num_sms=call.num_sms * resident))
    kernel(variant, plain_arrays(call), call.scratch, call.scalars, order).launch(
        grid=(num_ctas, 1, 1),
        block=(variant.plan.threads, 1, 1),
        stream=call.stream,
        min_blocks_per_mp=1,
    )


@cute.jit
def attend(variant: cutlass.Constexpr, x: BackwardContext):
    """Computes the tiles of the CTA."""
    c, layout = make_keys(variant), tiles_of(variant)
    shares = variant.config.splits_results
    next_of, store_results = (bwd_shared.step, bwd_shared.store_own) if shares else (step, store)
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, loaded_anew(x), tile)
        put_down(variant, x, work)
        c.dk.fill(0.0)
        c.dv.fill(0.0)
        if work.num_steps > 0:
            # HAZARD: warps may still read keys, dS and queries of the previous tile.
            cute.arch.sync_threads()
            load_keys(variant, layout.k, x.smem.k, x.arrays.k, work)
            load_keys(variant, layout.v, x.smem.v, x.arrays.v, work)
            at, remaining = first_step(work, Int32(0)), work.num_steps
            load_queries(variant, x, "q", work, at, Int32(0))
            load_queries(variant, x, "dout", work, at, Int32(0))
            cute.arch.cp_async_commit_group()
            if x.scalars.deterministic != 0:
                while remaining > 0:
                    remaining = remaining - 1
                    at = next_of(variant, True, x, c, work, at, remaining > 0)
            else:
                while remaining > 0:
                    remaining = remaining - 1
                    at = next_of(variant, False, x, c, work, at, remaining > 0)
        store_results(variant, x, anew(c), taken_up(variant, x, work))
        tile = tile_at(variant, loaded_anew(x), tile.slot + 1)


@cute.jit
def step(
    variant: cutlass.Constexpr,
    deterministic: cutlass.Constexpr[bool],
    x: BackwardContext,
    c: Keys,
    work: Work,
    at: Step,
    has_next: cutlass.Boolean,
) -> Step:
    """Adds a query block's share of dK and dV to the accumulators and of dQ to global memory.

    Returns the next step, whose loads it has started if ``has_next``.
    """
    config = variant.config
    stage, next_stage = Int32(0), Int32(0)
    cute.arch.cp_async_wait_group(0)
    # HAZARD: all threads' copies of this block have arrived; all warps are done with the block
    # and the dS of the previous step.
    cute.arch.sync_threads()
    work = taken_up(variant, x, work)
    following = next_step(variant, x, work, at)
    if const_expr(config.stages > 1):
        stage, next_stage = at.parity, following.parity
        if has_next:
            load_queries(variant, x, "q", work, following, next_stage)
            load_queries(variant, x, "dout", work, following, next_stage)
        cute.arch.cp_async_commit_group()
    roundeds = []
    for part in cutlass.range_constexpr(config.parts):
        own = anew(c)._replace(first_query=part * (config.block_q // config.parts))
        roundeds.append(differentiate_part(variant, x, own, work, at, stage))
    # HAZARD: dS of all warps is in shared memory, and no warp reads dO any more.
    cute.arch.sync_threads()
    work = taken_up(variant, x, work)
    if const_expr(config.stages == 1):
        if has_next:
            load_queries(variant, x, "dout", work, following, next_stage)
    tile = tiles_of(variant).q
    for part in cutlass.range_constexpr(config.parts):
        first = part * (config.block_q // config.parts)
        rows = x.smem.q + stage * tile.size_bytes + first * tile.width
        if const_expr(config.parts > 1):
            # In registers, dS of the other parts would have to wait while the last is computed.
            operands = fetch_ds(variant, x, first)
        else:
            operands = operands_of(roundeds[part])
        multiply_rows(variant, c.dk, operands, tile, rows)
    if const_expr(config.stages == 1):
        # HAZARD: no warp reads Q any more.
        cute.arch.sync_threads()
        work = taken_up(variant, x, work)
        if has_next:
            load_queries(variant, x, "q", work, following, next_stage)
        cute.arch.cp_async_commit_group()
    reduce_dq(variant, deterministic, x, c, work, at)
    return following


@cute.jit
def differentiate_part(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    c: Keys,
    work: Work,
    at: Step,
    stage: Int32,
) -> cute.Tensor:
    """Computes P and dS of a part of a query block, and adds its share of dV; returns dS, rounded.

    Writes dS to shared memory as well.
    """
    layout = tiles_of(variant)
    q = x.smem.q + stage * layout.q.size_bytes + c.first_query * layout.q.width
    dout = x.smem.dout + stage * layout.dout.size_bytes + c.first_query * layout.dout.width
    words = load_bias(variant, x, c, work, at)
    multiply_columns(variant, c.s, layout.k, x.smem.k, layout.q, q)
    p, ds = (cute.make_rmem_tensor_like(c.s, variant.dtype) for _ in range(2))
    slope = exponentiate_part(variant, x, c, work, at, words, stage, p)
    multiply_rows(variant, c.dv, operands_of(p), layout.dout, dout)
    dp = c.s if const_expr(variant.rounds_slope) else cute.make_rmem_tensor_like(c.s)
    multiply_columns(variant, dp, layout.v, x.smem.v, layout.dout, dout)
    differentiate(own_columns(c, x.smem.delta[None, stage]), slope, dp)
    primitives.narrow(dp, ds)
    put_words(variant, x, ds, c.first_query // products.COLUMNS)
    return ds


@cute.jit
def reduce_dq(
    variant: cutlass.Constexpr,
    deterministic: cutlass.Constexpr[bool],
    x: BackwardContext,
    c: Keys,
    work: Work,
    at: Step,
):
    """Computes dQ of 16 queries, all columns or the warp's share, and adds it to the sums."""
    columns, block_q = variant.dq_shape.columns, variant.config.block_q
    four = (work.scratch_row + at.q_block * block_q) * (variant.key.head_dim // 4)
    sums = x.scratch.dq_sum[None, four, at.head].iterator.toint()
    own = c.index * (columns // 2 * edges.WARPGROUP) + anew(c).thread
    sums = sums + own * 4
    if const_expr(deterministic):
        acquire_dq(variant, x, work, at)
    # Not all columns at once: dK and dV leave no registers for them.
    if const_expr(variant.key.head_dim <= 128):
        width = next(w for w in (64, 48, 32) if columns % w == 0)
        for first in cutlass.range_constexpr(0, columns, width):
            add_dq(variant, x, sums, c.index * columns, first, width)
    else:
        # A loop, since in unrolled code the compiler reads operands so early that they spill.
        for first in cutlass.range(0, columns, 32, unroll=1):
            add_dq(variant, x, sums, c.index * columns, first, 32)
    if const_expr(deterministic):
        release_dq(variant, x, work, at)


@cute.jit
def add_dq(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    sums: Int64,
    start: Int32,
    first: Int32,
    width: cutlass.Constexpr[int],
):
    """Adds ``width`` columns of dQ, from ``start + first`` on, to sums that begin at ``start``."""
    dq = multiply_dq(variant, x, start + first, width)
    for i in cutlass.range_constexpr(cute.size(dq)):
        products.add_to_global(sums + (first // 2 + i) * (edges.WARPGROUP * 4), dq[i])
