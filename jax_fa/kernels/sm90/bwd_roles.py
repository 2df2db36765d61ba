"""The roles consume and hold_dq_semaphore of the Hopper backward; diagram: ``bwd.py``."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.pipeline import PipelineConsumer

from jax_fa.kernels import (
    backward_rows,
    edges,
    fragment_bias_columns,
    fragments,
    primitives,
    softmax,
)
from jax_fa.kernels.backward_work import (
    Step,
    Work,
    await_turn,
    bulk_add,
    first_step,
    next_step,
    pass_turn,
    tile_at,
    work_on,
)
from jax_fa.kernels.fragment_keys import (
    differentiate,
    exponentiate,
    mask_block,
    own_columns,
    store,
)
from jax_fa.kernels.sm90 import (
    bwd_bias,
    bwd_bias_product,
    bwd_dbias,
    bwd_instructions,
    bwd_powers,
    bwd_statistics,
)
from jax_fa.kernels.sm90.bwd_statistics import loaded_early, statistic
from jax_fa.kernels.sm90.bwd_steps import (
    Facts,
    anew,
    begin,
    carried,
    computed_or,
    facts_of,
    first_of,
    leave,
    next_of,
    next_tile,
    parity_of,
    told_or,
)
from jax_fa.kernels.sm90.bwd_work import (
    BackwardConsumer,
    BackwardContext,
    BackwardPipes,
    BackwardVariant,
    QueryPipes,
    place_of_dq,
    release,
    thread_anew,
)
from jax_fa.kernels.sm90.plan import WGMMA_ROWS


@cute.jit
def consume(variant: cutlass.Constexpr, x: BackwardContext, pipes: BackwardPipes):
    """Computes a consumer's share of all five products and of the softmax. One warpgroup."""
    thread = cute.arch.thread_idx()[0] - variant.plan.role("consume").warps.start * edges.WARP
    index = cute.arch.make_warp_uniform(thread // edges.WARPGROUP)
    c = make_consumer(variant, x, index, thread % edges.WARPGROUP)
    k, v, q, dout, bias = pipes
    if const_expr(variant.key.multiplies_bias):
        bias = bwd_bias_product.Ring(bias, Boolean(False))
    start = Int32(0)
    tile = next_tile(variant, x, Int32(0))
    while tile.is_valid:
        work = begin(variant, x, tile)
        if const_expr(variant.key.multiplies_bias):
            bias = bias._replace(is_odd=Boolean(False))
        c.dk.fill(0.0)
        c.dv.fill(0.0)
        if work.num_steps > 0:
            k_full = k.wait_and_advance()
            v_full = v.wait_and_advance()
            if const_expr(variant.is_general):
                if work.is_partial:
                    used = work.window.kv_len - work.tile.block * variant.config.block_kv
                    zero_fill(variant, c, x.smem.k, used)
                    zero_fill(variant, c, x.smem.v, used)
            at = first_of(variant, work, start)
            is_ragged = work.window.q_len % variant.config.block_q != 0
            if const_expr(variant.config.is_lean):
                for i in cutlass.range(work.num_steps, unroll=1):
                    visit = Visit(work, is_ragged, k_full, v_full, i == work.num_steps - 1)
                    q, dout, bias, at = lean_step(
                        variant, x, c, QueryPipes(q, dout, bias), visit, at
                    )
            elif x.scalars.deterministic != 0:
                for i in cutlass.range(work.num_steps, unroll=1):
                    visit = Visit(work, is_ragged, k_full, v_full, i == work.num_steps - 1)
                    q, dout, bias, at = step(
                        variant, True, x, c, QueryPipes(q, dout, bias), visit, at
                    )
            else:
                for i in cutlass.range(work.num_steps, unroll=1):
                    visit = Visit(work, is_ragged, k_full, v_full, i == work.num_steps - 1)
                    q, dout, bias, at = step(
                        variant, False, x, c, QueryPipes(q, dout, bias), visit, at
                    )
            start = carried(at)
        store(variant, x, c, anew(variant, x, work))
        leave(variant, x, tile)
        tile = next_tile(variant, x, tile.slot + 1)
    if const_expr(variant.config.stages_dq != "never"):
        if x.scalars.deterministic != 0:
            primitives.meet(variant, "dq_free")
    if const_expr(variant.config.stages_dq == "always"):
        # HAZARD: the CTA, and with it its shared memory, must outlast the additions of staged dQ.
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def zero_fill_rows(
    variant: cutlass.Constexpr,
    c: BackwardConsumer,
    tile: cute.Tensor,
    facts: Facts,
    is_ragged: Boolean,
):
    """``zero_fill`` for the absent rows of a step's query block.

    ``is_ragged`` says whether some block of the tile has any; it is asked if the step is told.
    """
    if const_expr(variant.is_general):
        if const_expr(variant.config.tells_steps):
            if is_ragged:
                if facts.used < variant.config.block_q:
                    zero_fill(variant, c, tile, facts.used)
        elif facts.used < variant.config.block_q:
            zero_fill(variant, c, tile, facts.used)


@cute.jit
def zero_fill(variant: cutlass.Constexpr, c: BackwardConsumer, tile: cute.Tensor, used: Int32):
    """Sets the rows of a tile from ``used`` on to zero. Called by all consumers.

    P and dS of absent rows are 0, but the rows may hold anything, and 0 * NaN is not 0.
    """
    words = cute.recast_tensor(tile, Int32)
    rows, columns = cute.size(words, mode=[0]), cute.size(words, mode=[1])
    threads = edges.WARPGROUP * variant.config.num_consumers
    first = c.index * edges.WARPGROUP + c.thread
    for i in cutlass.range(
        cutlass.max(used, 0) * columns + first, rows * columns, threads, unroll=1
    ):
        words[i // columns, i % columns] = Int32(0)
    # HAZARD: these writes go through the generic proxy, wgmma reads through the async one.
    cute.arch.fence_view_async_shared()
    primitives.meet(variant, "zero_filled")


class Visit(NamedTuple):
    """A step of a tile.

    Attributes:
        work: the tile's work.
        is_ragged: whether some query block of the tile lacks rows.
        k: handle of the tile's keys.
        v: handle of its values.
        is_last: whether the step is the tile's last, which gives both back once it has used them.
    """

    work: Work
    is_ragged: Boolean
    k: Any
    v: Any
    is_last: Boolean


class Stepped(NamedTuple):
    """The pipes of a consumer, advanced, and its next step (``bwd_steps.first_of``)."""

    q: PipelineConsumer
    dout: PipelineConsumer
    bias: Any
    at: Any


@cute.jit
def step(
    variant: cutlass.Constexpr,
    deterministic: cutlass.Constexpr[bool],
    x: BackwardContext,
    c: BackwardConsumer,
    pipes: QueryPipes,
    visit: Visit,
    at: Any,
) -> Stepped:
    """Adds a query block's part of dK and dV to the accumulators, and reduces dQ to global memory.

    Products retire in the order of issue, so ``wait_group(n)`` leaves the n youngest running. None
    runs across the border of two steps: ptxas would serialise them (C7514, CUDA 13.0). dV is issued
    either early, to run while consumers meet at the barrier of dS, or after dQ, to run while dQ is
    reduced: ``HopperBackward.issues_dv_early``. In a deterministic run dQ always goes first, since
    others wait for it (H100, D = 128, causal, 2 x 8192: 454 TFLOP/s; after dV, 445).
    """
    waits_for_s = not variant.config.overlaps_dp
    c = thread_anew(variant, c)
    q, dout, bias = pipes
    work, is_ragged = visit.work, visit.is_ragged
    fetch_bias(variant, x, c, work, at)
    facts = computed_or(variant, x, work, at, None)
    q_full = q.wait_and_advance()
    # HAZARD: load has written what it tells once the queries are there, not before.
    facts = told_or(variant, x, work, at, facts)
    parity = parity_of(variant, at, q_full)
    zero_fill_rows(variant, c, x.smem.q[None, None, q_full.index], facts, is_ragged)
    lse2 = statistic(variant, c, x.smem.lse2[None, q_full.index])
    bias = start_s(variant, x, c, q_full, bias)
    dp = c.s_mma.make_fragment_C(c.s.shape)
    # Computed from lists before the product, they would delay it.
    facts = computed_or(variant, x, work, at, facts)
    if const_expr(waits_for_s):
        warpgroup.wait_group(0)
    else:
        dout_full = dout.wait_and_advance()
        zero_fill_rows(variant, c, x.smem.dout[None, None, dout_full.index], facts, is_ragged)
        start_dp(variant, x, c, dout_full, dp)
        warpgroup.wait_group(1)
    early = loaded_early(variant, c, x.smem.lse2[None, q_full.index])
    bias = to_logits(variant, x, c, work, at, bias)
    if facts.hides:
        mask_step(variant, x, c, work, at)
    p, ds = (cute.make_rmem_tensor_like(c.s, variant.dtype) for _ in range(2))
    slope = cute.make_rmem_tensor_like(p) if const_expr(variant.config.rounds_slope) else c.s
    to_powers(variant, x, c, bias, lse2, p, slope, early)
    if const_expr(waits_for_s):
        # P and slope have replaced S in registers; dP does not fit beside S.
        dout_full = dout.wait_and_advance()
        zero_fill_rows(variant, c, x.smem.dout[None, None, dout_full.index], facts, is_ragged)
        start_dp(variant, x, c, dout_full, dp)
    delta = statistic(variant, c, x.smem.delta[None, dout_full.index])
    if const_expr(not variant.config.splits_keys):
        if const_expr(variant.rounds_late):
            primitives.narrow(c.s, p)
        cute.copy(c.store, c.store.retile(p), c.p_target[None, None, None, parity])
    if const_expr(variant.config.held_by > 0):
        hold_dp_back(variant, x, c, p)
    warpgroup.wait_group(0)
    give_back_at_last(visit, visit.v)
    bias = mend(variant, x, c, work, facts, bias)
    differentiate(delta, slope, dp)
    bwd_dbias.store(variant, x, c, work, at, dp)
    primitives.narrow(dp, ds)
    cute.copy(c.store, c.store.retile(ds), c.ds_target[None, None, None, parity])
    rounds_p = variant.config.splits_keys and variant.rounds_late
    if const_expr(rounds_p and not variant.config.rounds_p_early):
        primitives.narrow(c.s, p)
    early_dv = variant.config.issues_dv_early and not deterministic
    if const_expr(early_dv):
        add_dv(c, as_operand(variant, c.dv_mma, p), dout_full)
    # HAZARD: stmatrix writes through the generic proxy, wgmma reads through the async one.
    cute.arch.fence_view_async_shared()
    primitives.meet(variant, "ds")

    # If it is told, read again, and here, where dQ hides the latency.
    facts = facts_of(variant, x, work, at)
    dq = c.dq_mma.make_fragment_C(c.dq_mma.partition_shape_C(variant.dq_shape))
    fragments.multiply(c.dq_mma, dq, c.ds[None, None, None, parity], c.k_rows, False)
    if const_expr(variant.config.splits_keys):
        p_keys, ds_keys = as_operand(variant, c.dv_mma, p), as_operand(variant, c.dk_mma, ds)
    else:
        p_keys = c.p_keys[None, None, None, parity]
        ds_keys = c.ds_keys[None, None, None, parity]
    if const_expr(not early_dv):
        add_dv(c, p_keys, dout_full)
    q_rows = c.q_rows[None, None, None, q_full.index]
    fragments.multiply(c.dk_mma, c.dk, ds_keys, q_rows, True)
    if const_expr(early_dv):
        warpgroup.wait_group(1)
        release(variant, "dout", dout_full)
    else:
        warpgroup.wait_group(2)
    give_back_at_last(visit, visit.k)
    reduce_dq(variant, deterministic, x, c, PartOfDq(facts.place, facts.step.head, dq))
    # Computed here, while products run and registers are free, between dQ and the next scores.
    # Before the softmax D = 256 spilled, and where heads share keys full masks were slower (H200,
    # D = 128, 2 x 8192, forward and backward, ms: 32:1 heads 13.4, here 12.4; 16:16 6.50 and 6.59).
    following = next_of(variant, x, work, at)
    if const_expr(not early_dv):
        warpgroup.wait_group(1)
        release(variant, "dout", dout_full)
    warpgroup.wait_group(0)
    release(variant, "q", q_full)
    return Stepped(q, dout, released(variant, bias), following)


@cute.jit
def lean_step(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    c: BackwardConsumer,
    pipes: QueryPipes,
    visit: Visit,
    at: Any,
) -> Stepped:
    """``step`` where dK and dV leave each thread few registers: ``HopperBackward.is_lean``.

    Beside dK and dV there is room for one accumulator at a time: S, then dP beside P in float16,
    then dQ once dV has retired, whose operand P is. dK reads dS from shared memory: its first half
    runs while dQ waits for dV, its second while dQ is reduced. dV runs while consumers meet.
    """
    q, dout = pipes.q, pipes.dout
    work, is_ragged = visit.work, visit.is_ragged
    facts = facts_of(variant, x, work, at)
    q_full = q.wait_and_advance()
    zero_fill_rows(variant, c, x.smem.q[None, None, q_full.index], facts, is_ragged)
    fragments.multiply(c.s_mma, c.s, c.k, c.q[None, None, None, q_full.index], False)
    hides = facts_of(variant, x, work, at).hides
    warpgroup.wait_group(0)
    if hides:
        mask_step(variant, x, c, work, at)
    halves = cute.make_rmem_tensor_like(c.s, Float16)
    lse2 = own_columns(c, x.smem.lse2[None, q_full.index])
    bwd_powers.exponentiate(variant, c.s, lse2, x.scalars.score_log2, halves)

    dout_full = dout.wait_and_advance()
    dp = c.s_mma.make_fragment_C(c.s.shape)
    zero_fill_rows(variant, c, x.smem.dout[None, None, dout_full.index], facts, is_ragged)
    start_dp(variant, x, c, dout_full, dp)
    warpgroup.wait_group(0)
    give_back_at_last(visit, visit.v)
    p, ds = (cute.make_rmem_tensor_like(c.s, variant.dtype) for _ in range(2))
    delta = own_columns(c, x.smem.delta[None, dout_full.index])
    bwd_powers.differentiate(variant, delta, dp, halves, bwd_powers.Rounded(p, ds))
    cute.copy(c.store, c.store.retile(ds), c.ds_target[None, None, None, at.parity])
    add_dv(c, as_operand(variant, c.dv_mma, p), dout_full)
    # HAZARD: stmatrix writes through the generic proxy, wgmma reads through the async one.
    cute.arch.fence_view_async_shared()
    primitives.meet(variant, "ds")

    ds_keys = halves_of(c.ds_keys[None, None, None, at.parity])
    q_rows = halves_of(c.q_rows[None, None, None, q_full.index])
    fragments.multiply(c.dk_mma, c.dk, ds_keys[0], q_rows[0], True)
    # dV must have retired for dQ to have the registers of P; else ptxas serialises all products.
    warpgroup.wait_group(1)
    release(variant, "dout", dout_full)
    dq = c.dq_mma.make_fragment_C(c.dq_mma.partition_shape_C(variant.dq_shape))
    fragments.multiply(c.dq_mma, dq, c.ds[None, None, None, at.parity], c.k_rows, False)
    fragments.multiply(c.dk_mma, c.dk, ds_keys[1], q_rows[1], True)
    warpgroup.wait_group(1)
    give_back_at_last(visit, visit.k)
    # Decided here, not by a constant: with a loop for each kind of run 40 bytes spilled.
    if x.scalars.deterministic != 0:
        primitives.meet(variant, "dq_acquired")
    facts = facts_of(variant, x, work, at)
    add_dq(variant, x, c, PartOfDq(facts.place, facts.step.head, dq))
    if x.scalars.deterministic != 0:
        primitives.arrive(variant, "dq_reduced")
    following = next_of(variant, x, work, at)
    warpgroup.wait_group(0)
    release(variant, "q", q_full)
    return Stepped(q, dout, pipes.bias, following)


@cute.jit
def give_back_at_last(visit: Visit, handle: Any) -> None:
    """Gives keys or values back in the last step of their tile."""
    if visit.is_last:
        handle.release()


def add_dv(c: BackwardConsumer, p: cute.Tensor, dout_full: Any) -> None:
    """Issues ``dV += P^T dO``."""
    rows = c.dout_rows[None, None, None, dout_full.index]
    fragments.multiply(c.dv_mma, c.dv, p, rows, True)


@cute.jit
def mask_step(
    variant: cutlass.Constexpr, x: BackwardContext, c: BackwardConsumer, work: Work, at: Any
):
    """Sets the scores of pairs that a step hides to -inf."""
    if const_expr(variant.config.is_lean or variant.config.tells_steps):
        # Otherwise what masks compare with is kept over all steps, and up to 48 bytes spill.
        c = c._replace(thread=primitives.opaque(c.thread))
    at = facts_of(variant, x, work, at).step
    mask_block(variant, x, c, anew(variant, x, work), at)


def halves_of(operand: cute.Tensor) -> list[cute.Tensor]:
    """The operand of the first half of a product's slabs, and that of the second."""
    half = cute.size(operand, mode=[2]) // 2
    by_half = cute.logical_divide(operand, (None, None, half))
    return [by_half[None, None, (None, i)] for i in range(2)]


def fetch_bias(
    variant: BackwardVariant, x: BackwardContext, c: BackwardConsumer, work: Work, at: Any
) -> None:
    """Starts the loads of a step's bias to registers, where it does not come in chunks."""
    if variant.key.has_bias:
        bwd_bias.fetch(variant, x, c, work, at)


def start_s(
    variant: BackwardVariant, x: BackwardContext, c: BackwardConsumer, q_full: Any, bias: Any
) -> Any:
    """Issues ``S = K Q^T``, with a bias that is multiplied; ``bias`` is then of this step."""
    if variant.key.multiplies_bias:
        return bwd_bias_product.score(variant, x, c, q_full, bias)
    fragments.multiply(c.s_mma, c.s, c.k, c.q[None, None, None, q_full.index], False)
    return bias


def mend(
    variant: BackwardVariant,
    x: BackwardContext,
    c: BackwardConsumer,
    work: Work,
    facts: Facts,
    bias: Any,
) -> Any:
    """Computes P anew where a bias that is multiplied makes that necessary."""
    if variant.key.multiplies_bias:
        return bwd_bias_product.mend(variant, x, c, work, facts, bias)
    return bias


def released(variant: BackwardVariant, bias: Any) -> Any:
    """The ``bias`` for the next step, once dQ has read what took the place of this step's."""
    if variant.key.multiplies_bias:
        bias.full.release()
        return bias.ring
    return bias


@cute.jit
def to_powers(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    c: BackwardConsumer,
    bias: Any,
    lse2: cute.Tensor,
    p: cute.Tensor,
    slope: cute.Tensor,
    early: Any,
):
    """Computes P from the scores, rounded unless ``rounds_late``, and P times a cap's slope."""
    score_log2 = x.scalars.score_log2
    if const_expr(variant.rounds_late):
        bwd_statistics.exponentiate(variant, c.s, lse2, early, score_log2)
        if const_expr(variant.key.multiplies_bias):
            bwd_bias_product.limit(c, bias)
    elif const_expr(variant.config.rounds_slope):
        capped = slope if const_expr(variant.key.has_soft_cap) else None
        exponentiate(variant, c.s, lse2, score_log2, p, capped)
        if const_expr(variant.key.has_bias):
            fragment_bias_columns.to_slopes(variant, x, c, p, slope)
    else:
        fragment_bias_columns.exponentiate_exactly(variant, x, c, lse2, p)


@cute.jit
def hold_dp_back(
    variant: cutlass.Constexpr, x: BackwardContext, c: BackwardConsumer, p: cute.Tensor
):
    """Keeps the wait for dP behind the first ``held_by`` powers, and rounds P if that is early."""
    words = cute.recast_tensor(c.s, Int32)
    number = variant.config.held_by
    if const_expr(variant.config.rounds_p_early):
        primitives.narrow(c.s, p)
        words = cute.recast_tensor(p, Int32)
        number = variant.config.held_by // 2
    bits = words[0]
    for i in cutlass.range_constexpr(1, number):
        bits = bits | words[i]
    primitives.hold_until(bits, x.smem.lse2.iterator)


def start_dp(
    variant: BackwardVariant,
    x: BackwardContext,
    c: BackwardConsumer,
    dout_full: Any,
    dp: cute.Tensor,
) -> None:
    """Issues ``dp = V dO^T``."""
    dout = c.dout[None, None, None, dout_full.index]
    if variant.key.multiplies_bias:
        fragments.multiply_filled(c.s_mma, dp, c.v, dout, cute.size(x.arrays.dv, mode=[1]))
    else:  # H200, D = 64, 2 x 8192: 2217 us; with the choice, here and in S, 2267.
        fragments.multiply(c.s_mma, dp, c.v, dout, False)


def as_operand(variant: BackwardVariant, mma: cute.TiledMma, rounded: cute.Tensor) -> cute.Tensor:
    """Views a rounded accumulator as the A operand of ``mma``, in the same registers."""
    operand = mma.make_fragment_A(mma.partition_shape_A((WGMMA_ROWS, variant.config.block_q)))
    return cute.make_tensor(rounded.iterator, operand.layout)


@cute.jit
def to_logits(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    c: BackwardConsumer,
    work: Work,
    at: Step,
    bias: Any,
) -> Any:
    """Caps the scores if there is a soft cap, and adds the bias if there is one.

    Returns the pipe of a bias, advanced.
    """
    if const_expr(variant.key.has_soft_cap):
        softmax.cap(c.s, x.scalars.cap_inner_log2)
    if const_expr(variant.key.multiplies_bias):
        bwd_bias_product.add_elements(variant, x, c, bias)
    elif const_expr(variant.key.has_bias):
        bias = bwd_bias.add(variant, x, c, work, at, bias)
    return bias


@cute.jit
def hold_dq_semaphore(variant: cutlass.Constexpr, x: BackwardContext):
    """Acquires the dQ semaphore for the consumers and releases it after them. One warp.

    Only in a deterministic run: Note [Turns] in ``backward_work.py``. If consumers stage dQ in
    shared memory, this warp reduces it while they go on; else they reduce it, and this warp waits.
    A second warp that released the semaphore while the first acquired the next was no faster.
    """
    is_staged = const_expr(variant.config.stages_dq != "never")
    if const_expr(is_staged):
        primitives.arrive(variant, "dq_free")
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        at = first_step(work, Int32(0))
        for _ in cutlass.range(work.num_steps, unroll=1):
            await_turn(variant, x, work, at, 1)
            if const_expr(is_staged):
                primitives.meet(variant, "dq_staged")
                reduce_staged(variant, x, work, at)
            else:
                primitives.arrive(variant, "dq_acquired")
                primitives.meet(variant, "dq_reduced")
            # HAZARD: every addition must be visible before the next key block acquires. The
            # consumers add before the barrier, hence before this release.
            pass_turn(variant, x, work, at)
            at = next_step(variant, x, work, at)
        tile = tile_at(variant, x, tile.slot + 1)


@cute.jit
def reduce_staged(variant: cutlass.Constexpr, x: BackwardContext, work: Work, at: Step):
    """Adds the staged dQ of all consumers to the sums, and waits until that is done. One warp."""
    place = place_of_dq(variant, work, at)
    size_bytes = variant.dq_fours * variant.config.num_consumers * backward_rows.VECTOR_BYTES
    target = x.scratch.dq_sum[None, place, at.head].iterator
    bulk_add(x.smem.dq.iterator, target, size_bytes)
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    # HAZARD: one lane issued the addition and waits for it; the others must wait for that lane.
    cute.arch.sync_warp()
    primitives.arrive(variant, "dq_free")
    cute.arch.cp_async_bulk_wait_group(0)
    cute.arch.sync_warp()


class PartOfDq(NamedTuple):
    """A consumer's part of the dQ of a query block, and where the sums of the block are.

    Attributes:
        place: position in ``Scratch.dq_sum``, in fours.
        head: query head.
        values: accumulator.
    """

    place: Int32
    head: Int32
    values: cute.Tensor


@cute.jit
def reduce_dq(
    variant: cutlass.Constexpr,
    deterministic: cutlass.Constexpr[bool],
    x: BackwardContext,
    c: BackwardConsumer,
    part: PartOfDq,
):
    """Adds this consumer's part of dQ to the sums; in a deterministic run, when its turn comes."""
    stages = variant.config.stages_dq
    if const_expr(deterministic and stages == "never"):
        primitives.meet(variant, "dq_acquired")
        add_dq(variant, x, c, part)
        primitives.arrive(variant, "dq_reduced")
    elif const_expr(deterministic):
        # HAZARD: the previous step's part must have been read before this one overwrites it.
        primitives.meet(variant, "dq_free")
        stage_dq(variant, x, c, part.values)
        primitives.arrive(variant, "dq_staged")
    elif const_expr(stages == "always"):
        add_staged(variant, x, c, part)
    else:
        add_dq(variant, x, c, part)


@cute.jit
def add_dq(variant: cutlass.Constexpr, x: BackwardContext, c: BackwardConsumer, part: PartOfDq):
    """Adds a part of dQ from registers; where heads have half the columns or fewer, only these."""
    fours = cute.size(part.values) // backward_rows.FLOATS
    own = backward_rows.fours_of(variant, fours, c.thread)
    place = part.place + c.index * variant.dq_fours + own.first
    first = backward_rows.address_of(x.scratch.dq_sum[None, place, part.head])
    half, is_wide = fours // 2, cute.size(x.arrays.dk, mode=[1]) > variant.key.head_dim // 2
    if const_expr(variant.key.head_dim > 64):
        add_fours(part.values, first, own.step, range(fours))
    elif const_expr(not variant.config.splits_dq_rows):
        if (c.index == 0) | is_wide:
            add_fours(part.values, first, own.step, range(fours))
    elif const_expr(variant.key.mask == "causal"):
        # H200, D = 64, 16 heads, 2 x 8192: 1143 us; as for full masks, 1158.
        if is_wide:
            add_fours(part.values, first, own.step, range(fours))
        else:
            add_fours(part.values, first, own.step, range(half))
    else:
        # Full: 2186 us; as for causal masks, 2236; always all 2219.
        add_fours(part.values, first, own.step, range(half))
        if is_wide:
            add_fours(part.values, first, own.step, range(half, fours))


def add_fours(values: cute.Tensor, first: Int64, step: int, numbers: range) -> None:
    """Adds some fours of a thread's dQ, of which the ``first`` is at that address."""
    for i in numbers:
        four = [values[backward_rows.FLOATS * i + j] for j in range(backward_rows.FLOATS)]
        address = first + i * step * backward_rows.VECTOR_BYTES
        bwd_instructions.add_to_global(address, four)


@cute.jit
def stage_dq(variant: cutlass.Constexpr, x: BackwardContext, c: BackwardConsumer, acc: cute.Tensor):
    """Writes a part of dQ to shared memory, in the order of the sums, for TMA to read."""
    fours = cute.size(acc) // backward_rows.FLOATS
    own = backward_rows.fours_of(variant, fours, c.thread)
    sPart = cute.domain_offset((0, own.first), x.smem.dq[None, None, c.index])
    for i in cutlass.range_constexpr(fours):
        four = cute.make_rmem_tensor((backward_rows.FLOATS,), Float32)
        for j in cutlass.range_constexpr(backward_rows.FLOATS):
            four[j] = acc[backward_rows.FLOATS * i + j]
        cute.autovec_copy(four, sPart[None, i * own.step])
    # HAZARD: these stores go through the generic proxy, the addition reads through the async one.
    cute.arch.fence_view_async_shared()


@cute.jit
def add_staged(variant: cutlass.Constexpr, x: BackwardContext, c: BackwardConsumer, part: PartOfDq):
    """``add_dq`` through shared memory: each warp writes its part there, and TMA adds it."""
    size = cute.size(part.values) // backward_rows.FLOATS * edges.WARP
    of_warp = cute.arch.make_warp_uniform(c.thread // edges.WARP) * size
    # HAZARD: the previous step's part must have been read before this one overwrites it.
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.sync_warp()
    stage_dq(variant, x, c, part.values)
    cute.arch.sync_warp()
    place = part.place + c.index * variant.dq_fours + of_warp
    source = cute.domain_offset((0, of_warp), x.smem.dq[None, None, c.index]).iterator
    target = x.scratch.dq_sum[None, place, part.head].iterator
    bulk_add(source, target, size * backward_rows.VECTOR_BYTES)
    cute.arch.cp_async_bulk_commit_group()


def make_consumer(
    variant: BackwardVariant, x: BackwardContext, index: Int32, thread: Int32
) -> BackwardConsumer:
    """Fragments of consumer ``index``."""
    key, config, dtype, smem = variant.key, variant.config, variant.dtype, x.smem
    owns_keys, k_major, mn_major = config.splits_keys, OperandMajorMode.K, OperandMajorMode.MN
    holds_ds = owns_keys and not config.is_lean
    dk_columns, dv_columns = variant.dk_columns, variant.dv_columns
    dq_rows, dq_columns = variant.dq_shape
    p_major, ds_major = (k_major if holds else mn_major for holds in (owns_keys, holds_ds))
    s_mma = fragments.make_mma(dtype, variant.s_columns, k_major, a_in_registers=False)
    dk_mma = fragments.make_mma(dtype, dk_columns, mn_major, holds_ds, ds_major)
    dv_mma = fragments.make_mma(dtype, dv_columns, mn_major, owns_keys, p_major)
    dq_mma = fragments.make_mma(dtype, dq_columns, mn_major, a_in_registers=False)
    s, dk, dv, dq = (mma.get_slice(0) for mma in (s_mma, dk_mma, dv_mma, dq_mma))
    zero = Int32(0)
    own_keys, own_columns = (index, zero) if owns_keys else (zero, index)

    k = cute.local_tile(smem.k, (WGMMA_ROWS, key.head_dim), (own_keys, 0))
    v = cute.local_tile(smem.v, (WGMMA_ROWS, key.value_dim), (own_keys, 0))
    q = cute.local_tile(smem.q, (variant.s_columns, key.head_dim), (own_columns, 0, None))
    dout = cute.local_tile(smem.dout, (variant.s_columns, key.value_dim), (own_columns, 0, None))
    q_rows = cute.local_tile(smem.q, (config.block_q, dk_columns), (0, own_columns, None))
    dout_rows = cute.local_tile(smem.dout, (config.block_q, dv_columns), (0, own_columns, None))
    by_rows = config.splits_dq_rows
    ds = cute.local_tile(smem.ds, (dq_rows, config.block_kv), (index if by_rows else 0, 0, None))
    k_part = (0, 0 if by_rows else index)
    k_rows = cute.local_tile(smem.k, (config.block_kv, dq_columns), k_part)
    own_part = (own_columns, own_keys, None)
    own_ds, own_p = (
        primitives.transposed(cute.local_tile(tile, (variant.s_columns, WGMMA_ROWS), own_part))
        for tile in (smem.ds, smem.p)
    )
    ds_keys, p_keys = (
        primitives.transposed(
            cute.local_tile(tile, (config.block_q, WGMMA_ROWS), (0, own_keys, None))
        )
        for tile in (smem.ds, smem.p)
    )
    has_words = key.has_bias and config.bias_stages == 0
    store = cute.make_tiled_copy_C(
        cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(True, 4), dtype), s_mma
    ).get_slice(thread)
    return BackwardConsumer(
        s_mma=s_mma,
        dk_mma=dk_mma,
        dv_mma=dv_mma,
        dq_mma=dq_mma,
        k=s_mma.make_fragment_A(s.partition_A(k)),
        v=s_mma.make_fragment_A(s.partition_A(v)),
        q=s_mma.make_fragment_B(s.partition_B(q)),
        dout=s_mma.make_fragment_B(s.partition_B(dout)),
        q_rows=dk_mma.make_fragment_B(dk.partition_B(primitives.transposed(q_rows))),
        dout_rows=dv_mma.make_fragment_B(dv.partition_B(primitives.transposed(dout_rows))),
        ds=dq_mma.make_fragment_A(dq.partition_A(ds)),
        k_rows=dq_mma.make_fragment_B(dq.partition_B(primitives.transposed(k_rows))),
        store=store,
        ds_target=store.partition_D(own_ds),
        p_target=store.partition_D(own_p),
        ds_keys=None if holds_ds else dk_mma.make_fragment_A(dk.partition_A(ds_keys)),
        p_keys=None if owns_keys else dv_mma.make_fragment_A(dv.partition_A(p_keys)),
        s=s_mma.make_fragment_C(s_mma.partition_shape_C((WGMMA_ROWS, variant.s_columns))),
        bias=cute.make_rmem_tensor((variant.s_columns // 2,), Int32) if has_words else None,
        dk=dk_mma.make_fragment_C(dk_mma.partition_shape_C((WGMMA_ROWS, dk_columns))),
        dv=dv_mma.make_fragment_C(dv_mma.partition_shape_C((WGMMA_ROWS, dv_columns))),
        first_key=own_keys * WGMMA_ROWS,
        first_query=own_columns * variant.s_columns,
        index=index,
        thread=thread,
    )
