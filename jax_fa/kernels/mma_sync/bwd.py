"""Backward by mma.sync: dq, dk and dv from one more pass over all visible pairs.

    prepare    delta, log2-sum-exp2 by query row; dQ sums = 0                (backward_rows.py)
    main       wait q(n), do(n); barrier; S P dV dP dS dK; barrier; load q(n-1), do(n-1);
               dQ, dQ sums += | wait q(n-1), do(n-1) ...                     one stage
    finish     dQ sums -> dq; dsinks; parts of dK, dV -> dk, dv              (backward_rows.py)

With two stages, loads of the next step start right after the first barrier. If two warps share
columns, the shares of the other's queries in dK and dV, and mostly one more barrier, follow the
second. The method is FlashAttention's (Dao, arXiv:2307.08691). Memory: ``plan_bwd.py``;
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
from jax_fa.kernels.fragment_keys import differentiate, loaded_columns, store
from jax_fa.kernels.mma_sync import bwd_shared, products, shell
from jax_fa.kernels.mma_sync.bwd_part import (
    acquire_dq,
    add_to_sums,
    exponentiate_part,
    load_bias,
    put_words,
    release_dq,
)
from jax_fa.kernels.mma_sync.bwd_products import (
    fetch_other,
    multiply_columns,
    multiply_depth,
    multiply_dq,
    multiply_rows,
)
from jax_fa.kernels.mma_sync.bwd_work import (
    Ahead,
    BackwardContext,
    BackwardSmem,
    BackwardVariant,
    Keys,
    Loaded,
    anew,
    dq_share,
    load_keys,
    load_queries,
    loaded_anew,
    make_keys,
    place_of_rows,
    put_down,
    stage_of,
    taken_up,
    tiles_of,
)
from jax_fa.kernels.mma_sync.panels import ALIGNMENT_BYTES
from jax_fa.kernels.mma_sync.plan_bwd import backward_plan
from jax_fa.spec import division
from jax_fa.spec.config_mma_sync import WARP_ROWS, MmaSyncBackward
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
    p_elements = layout.ds.elements if config.splits_columns else 0

    @cute.struct
    class Storage:
        k: cute.struct.Align[cute.struct.MemRange[dtype, layout.k.elements], align]
        v: cute.struct.Align[cute.struct.MemRange[dtype, layout.v.elements], align]
        q: cute.struct.Align[cute.struct.MemRange[dtype, stages * layout.q.elements], align]
        dout: cute.struct.Align[cute.struct.MemRange[dtype, stages * layout.dout.elements], align]
        p: cute.struct.Align[cute.struct.MemRange[dtype, p_elements], align]
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
        p=(storage.p if config.splits_columns else storage.ds).data_ptr().toint(),
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
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, loaded_anew(x), tile)
        put_down(variant, x, work)
        for i in cutlass.range_constexpr(len(c)):
            c[i].dk.fill(0.0)
            c[i].dv.fill(0.0)
        if work.num_steps > 0:
            if const_expr(variant.config.work_words == 0):
                # HAZARD: warps may still read keys, dS and queries of the previous tile. Otherwise
                # ``put_down`` waits for them.
                cute.arch.sync_threads()
            load_keys(variant, layout.k, x.smem.k, x.arrays.k, work)
            load_keys(variant, layout.v, x.smem.v, x.arrays.v, work)
            at, remaining = first_step(work, Int32(0)), work.num_steps
            load_ahead(variant, x, work, Ahead(Loaded(at, 0), True))
            if x.scalars.deterministic != 0:
                while remaining > 0:
                    remaining = remaining - 1
                    at = step(variant, True, x, c, work, at, remaining > 0)
            else:
                while remaining > 0:
                    remaining = remaining - 1
                    at = step(variant, False, x, c, work, at, remaining > 0)
        work = taken_up(variant, x, work)
        for i in cutlass.range_constexpr(len(c)):
            if const_expr(variant.config.splits_results):
                bwd_shared.store_own(variant, x, anew(variant, c[i]), work)
            else:
                store(variant, x, anew(variant, c[i]), work)
        tile = tile_at(variant, loaded_anew(x), work.tile.slot + 1)


@cute.jit
def step(
    variant: cutlass.Constexpr,
    deterministic: cutlass.Constexpr[bool],
    x: BackwardContext,
    c: list[Keys],
    work: Work,
    at: Step,
    has_next: cutlass.Boolean,
) -> Step:
    """Adds a query block's share of dK and dV to the accumulators and of dQ to global memory.

    Returns the next step. If ``has_next``, its first loads have started.
    """
    loads = variant.config.loads
    following = next_step(variant, x, taken_up(variant, x, work), at)
    if const_expr(loads == 1):
        add_rows(
            variant, deterministic, x, c, work, Loaded(at, 0), Ahead(Loaded(following, 0), has_next)
        )
    else:
        for load in cutlass.range(loads, unroll=1):
            is_last = load == loads - 1
            q_block = following.q_block if is_last else at.q_block
            head = following.head if is_last else at.head
            rows = Loaded(Step(q_block, head, at.parity), (load + 1) % loads)
            ahead = Ahead(rows, has_next | (load < loads - 1))
            add_rows(variant, deterministic, x, c, work, Loaded(at, load), ahead)
    return following


@cute.jit
def add_rows(
    variant: cutlass.Constexpr,
    deterministic: cutlass.Constexpr[bool],
    x: BackwardContext,
    c: list[Keys],
    work: Work,
    now: Loaded,
    ahead: Ahead,
):
    """``step`` for the rows of one load; starts the load ``ahead``."""
    config = variant.config
    cute.arch.cp_async_wait_group(0)
    # HAZARD: all threads' copies of these rows have arrived; all warps are done with the rows and
    # with dS before them.
    cute.arch.sync_threads()
    work = taken_up(variant, x, work)
    if const_expr(config.stages > 1):
        load_ahead(variant, x, work, ahead)
    if const_expr(config.parts == config.loads):
        add_part(variant, x, [one._replace(part=now.load) for one in c], work, now)
    else:
        # A loop, since in unrolled code the compiler reads operands of the next part so early that
        # they spill.
        for part in cutlass.range(config.parts // config.loads, unroll=1):
            add_part(variant, x, [one._replace(part=part) for one in c], work, now)
    # HAZARD: P and dS of all warps are in shared memory. Unless warps share columns, no warp reads
    # Q or dO any more.
    cute.arch.sync_threads()
    if const_expr(config.splits_columns):
        add_other(variant, x, c, "dk", now)
        add_other(variant, x, c, "dv", now)
        # With two stages, nothing needs this barrier; but a causal mask is 2 % faster with it, and
        # none 2 % slower (D = 128, H200, sm_90 build).
        if const_expr(config.stages == 1 or variant.key.mask == "causal"):
            # HAZARD: now no warp reads Q or dO any more.
            cute.arch.sync_threads()
    work = taken_up(variant, x, work)
    if const_expr(config.stages == 1):
        load_ahead(variant, x, work, ahead)
    reduce_dq(variant, deterministic, x, work, now)


@cute.jit
def load_ahead(variant: cutlass.Constexpr, x: BackwardContext, work: Work, ahead: Ahead):
    """Starts the load ``ahead``, if there is any."""
    if ahead.is_there:
        load_queries(variant, x, "q", work, ahead.rows)
        load_queries(variant, x, "dout", work, ahead.rows)
    cute.arch.cp_async_commit_group()


@cute.jit
def add_part(
    variant: cutlass.Constexpr, x: BackwardContext, c: list[Keys], work: Work, now: Loaded
):
    """Adds the share of a part of a query block to dK and dV, and writes dS to shared memory.

    Of two warps that share columns, each adds the share of its own queries, and writes P, too.
    """
    if const_expr(variant.config.splits_results):
        bwd_shared.add_part(variant, x, [anew(variant, one) for one in c], work, now)
    else:
        add_own_part(variant, x, [anew(variant, one) for one in c], work, now)


@cute.jit
def add_own_part(
    variant: cutlass.Constexpr, x: BackwardContext, c: list[Keys], work: Work, now: Loaded
):
    """``add_part`` of warps that compute both dK and dV."""
    layout, first_query, at = tiles_of(variant), c[0].first_query, now.at
    q = place_of_rows(variant, x, "q", now) + first_query * layout.q.width
    dout = place_of_rows(variant, x, "dout", now) + first_query * layout.dout.width
    stage = stage_of(variant, now)
    words = [load_bias(variant, x, one, work, at) for one in c]
    multiply_columns(variant, [one.s for one in c], layout.k, x.smem.k, layout.q, q)
    ps = [cute.make_rmem_tensor_like(one.s, variant.dtype) for one in c]
    lse2 = loaded_columns(c[0], x.smem.lse2[None, stage], c[0].s)
    for i in cutlass.range_constexpr(len(c)):
        exponentiate_part(variant, x, c[i], work, at, words[i], lse2, ps[i])
        if const_expr(variant.config.splits_columns):
            put_words(variant, x.smem.p, anew(variant, c[i]), ps[i])
    column = first_column(variant, c[0], variant.dv_columns)
    multiply_rows(variant, [one.dv for one in c], ps, layout.dout, dout, column)
    dps = [cute.make_rmem_tensor_like(one.s) for one in c]
    multiply_columns(variant, dps, layout.v, x.smem.v, layout.dout, dout)
    dss = [cute.make_rmem_tensor_like(one.s, variant.dtype) for one in c]
    delta = loaded_columns(anew(variant, c[0]), x.smem.delta[None, stage], c[0].s)
    for i in cutlass.range_constexpr(len(c)):
        differentiate(delta, c[i].s, dps[i])
        primitives.narrow(dps[i], dss[i])
        put_words(variant, x.smem.ds, anew(variant, c[i]), dss[i])
    column = first_column(variant, c[0], variant.dk_columns)
    multiply_rows(variant, [one.dk for one in c], dss, layout.q, q, column)


def first_column(variant: BackwardVariant, c: Keys, columns: int) -> Int32 | int:
    """The first of the ``columns`` columns of dK or dV that the warp computes."""
    return anew(variant, c).index * columns if variant.config.splits_columns else 0


@cute.jit
def add_other(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    c: list[Keys],
    name: cutlass.Constexpr[str],
    now: Loaded,
):
    """Adds the share of the other warp's queries to the warp's columns of "dk" or "dv"."""
    own, accs = anew(variant, c[0]), [getattr(one, name) for one in c]
    if const_expr(name == "dk"):
        source, left, columns = "q", x.smem.ds, variant.dk_columns
    else:
        source, left, columns = "dout", x.smem.p, variant.dv_columns
    tile = getattr(tiles_of(variant), source)
    rows = place_of_rows(variant, x, source, now) + own.other_query(variant) * tile.width
    operands = fetch_other(variant, left, own)
    for k in cutlass.range_constexpr(len(operands)):
        at_row = rows + k * (products.DEPTH * tile.width)
        first = first_column(variant, c[0], columns)
        multiply_depth(variant, accs, operands[k], tile, at_row, first)


@cute.jit
def reduce_dq(
    variant: cutlass.Constexpr,
    deterministic: cutlass.Constexpr[bool],
    x: BackwardContext,
    work: Work,
    now: Loaded,
):
    """Computes the warp's share of dQ of the rows of a load, and adds it to the sums."""
    config, columns, at = variant.config, variant.dq_columns, now.at
    four = (work.scratch_row + at.q_block * config.block_q) * (variant.key.head_dim // 4)
    sums = x.scratch.dq_sum[None, four, at.head].iterator.toint()
    if const_expr(deterministic):
        if now.load == 0:
            acquire_dq(variant, x, work, at)
    # Not all columns at once: dK and dV leave no registers for them.
    if const_expr(variant.key.head_dim <= 128 or columns <= 32):
        width = next(w for w in (64, 48, 32) if columns % w == 0)
        for first in cutlass.range_constexpr(0, columns, width):
            add_dq(variant, x, sums, now, Int32(first), width)
    else:
        # A loop, since in unrolled code the compiler reads operands so early that they spill.
        for first in cutlass.range(0, columns, 32, unroll=1):
            add_dq(variant, x, sums, now, first, 32)
    if const_expr(deterministic):
        if now.load == config.loads - 1:
            release_dq(variant, x, work, at)


@cute.jit
def add_dq(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    sums: Int64,
    now: Loaded,
    first: Int32,
    width: cutlass.Constexpr[int],
):
    """Adds ``width`` columns of the warp's dQ, from its ``first`` on, to the sums."""
    share = dq_share(variant, products.thread_index() // edges.WARP)
    share = share._replace(column=share.column + first)
    dq = multiply_dq(variant, x, share, width)
    row_tile = (now.load * variant.config.loaded_rows + share.row) // WARP_ROWS
    for i in cutlass.range_constexpr(len(dq)):
        add_to_sums(variant, sums, row_tile + i, share.column, dq[i])
