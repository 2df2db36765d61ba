"""Blackwell backward: the role reduce, which adds dQ to its sums in global memory.

Roles, edges and memory: ``plan_bwd.py``.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.pipeline import PipelineConsumer

from jax_fa.kernels import backward_rows, edges
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
from jax_fa.kernels.sm100 import clusters, umma
from jax_fa.kernels.sm100.bwd_work import BackwardContext, BackwardVariant
from jax_fa.kernels.sm100.plan_bwd import REDUCE_STAGES, REDUCE_WARPS

LOAD_COLUMNS = 32
"""Columns of dQ that a thread loads at a time."""
MOST_DQ_COLUMNS = 128
"""The most columns of dQ that a thread has room for in registers."""


class ReducePipes(NamedTuple):
    """The ends that the role reduce holds."""

    dq: PipelineConsumer


@cute.jit
def reduce(variant: cutlass.Constexpr, x: BackwardContext, pipes: ReducePipes):
    """Adds dQ of every query tile to the sums in global memory. Four warps, 32 lanes each.

    waits   dq full (mma)     signals dq empty (mma)
    """
    dq = pipes.dq
    tile = tile_at(variant, x, Int32(0))
    while tile.is_valid:
        work = work_on(variant, x, tile)
        at = first_step(work, Int32(0))
        if x.scalars.deterministic != 0:
            for _ in cutlass.range(work.num_steps, unroll=1):
                dq = _reduce_tile(variant, True, x, work, at, dq)
                at = next_step(variant, x, work, at)
        else:
            for _ in cutlass.range(work.num_steps, unroll=1):
                dq = _reduce_tile(variant, False, x, work, at, dq)
                at = next_step(variant, x, work, at)
        tile = tile_at(variant, x, tile.slot + 1)
    # HAZARD: the CTA may not end, and free its shared memory, before all of dQ is added.
    cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def _reduce_tile(
    variant: cutlass.Constexpr,
    deterministic: cutlass.Constexpr[bool],
    x: BackwardContext,
    work: Work,
    at: Step,
    dq: PipelineConsumer,
) -> PipelineConsumer:
    """Adds this warp's lanes of a query tile's dQ; returns the advanced end of the edge dq."""
    config, head_dim = variant.config, variant.key.head_dim
    thread, lane = cute.arch.thread_idx()[0] % edges.WARPGROUP, cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(thread // edges.WARP)
    columns = variant.plan.columns("dq")
    at_once = columns.cols if const_expr(columns.cols <= MOST_DQ_COLUMNS) else config.reduce_columns
    # Transposed dQ has block_q columns; those of tmem beyond them hold its next 128 rows.
    width = head_dim if const_expr(variant.dq_order == "rows") else config.block_q
    full = dq.wait_and_advance()
    umma.after_thread_sync()
    fours = config.reduce_columns // backward_rows.FLOATS
    row = work.scratch_row + at.q_block * config.block_q
    sums = _sums_of(variant, x, row, at.head)
    for j in cutlass.range_constexpr(columns.cols // config.reduce_columns):
        first = j * config.reduce_columns
        if const_expr(first % at_once == 0):
            tDq = umma.tmem_rows(x.tmem, columns.start + first, at_once)
            loads = umma.tmem_load(tDq, LOAD_COLUMNS, thread)
            rDq = loads.whole_row()  # (at_once)
            cute.copy(loads.copy, loads.tmem, rDq)
            cute.arch.fence_view_async_tmem_load()
        if const_expr(first + at_once == columns.cols):
            umma.before_thread_sync()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                full.release()
        if const_expr(deterministic and j == 0):
            await_turn(variant, x, work, at, REDUCE_WARPS * variant.plan.ctas)
        stage = j % REDUCE_STAGES
        # The piece before the previous one used this stage; the previous may still be in flight.
        cute.arch.cp_async_bulk_wait_group(REDUCE_STAGES - 1, read=True)
        cute.arch.sync_warp()
        sPiece = x.smem.dq[None, None, None, stage, warp]
        for i in cutlass.range_constexpr(fours):
            four = cute.make_rmem_tensor((backward_rows.FLOATS,), Float32)
            for column in cutlass.range_constexpr(backward_rows.FLOATS):
                four[column] = rDq[first % at_once + i * backward_rows.FLOATS + column]
            cute.autovec_copy(four, sPiece[None, lane, i])
        # HAZARD: these stores went through the generic proxy, but the bulk addition reads through
        # the async proxy.
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        rows, column = first // width * REDUCE_WARPS + warp, first % width
        if const_expr(variant.plan.ctas > 1):
            rows, column = _place_in_pair(variant, warp, first)
        place = (rows * width + column) * (edges.WARP // backward_rows.FLOATS)
        target = sums[None, place].iterator
        size_bytes = edges.WARP * config.reduce_columns * 4
        bulk_add(sPiece.iterator, target, size_bytes)
        cute.arch.cp_async_bulk_commit_group()
    if const_expr(deterministic):
        _pass_turn(variant, x, work, at)
    return dq


@cute.jit
def _pass_turn(variant: cutlass.Constexpr, x: BackwardContext, work: Work, at: Step):
    """Signals that this warp has added its part: Note [Turns] in ``backward_work.py``."""
    # HAZARD: all additions must be complete, not only in flight, before the next block's turn.
    cute.arch.cp_async_bulk_wait_group(0)
    cute.arch.sync_warp()
    cute.arch.fence_acq_rel_gpu()
    pass_turn(variant, x, work, at)


class Place(NamedTuple):
    """A place in a query tile's dQ.

    Attributes:
        rows: index of a block of 32 rows.
        column: column in these rows.
    """

    rows: Int32
    column: Int32


def _place_in_pair(variant: BackwardVariant, warp: Int32, column: int) -> Place:
    """The place of a warp's ``column`` in a pair; two warps share 32 of the CTA's 64 rows.

    Note [dQ overwrites half of S].
    """
    ctas = variant.plan.ctas
    groups = REDUCE_WARPS // ctas
    rows = clusters.rank_in_cluster(ctas) * groups + warp % groups
    return Place(rows, warp // groups * (variant.key.head_dim // ctas) + column)


def _sums_of(variant: BackwardVariant, x: BackwardContext, row: Int32, head: Int32) -> cute.Tensor:
    """The (4, block_q * D / 4) sums of dQ of the query tile at ``row`` of ``Scratch``."""
    fours = variant.key.head_dim // backward_rows.FLOATS
    sums = cute.domain_offset((0, row * fours), x.scratch.dq_sum[None, None, head])
    layout = cute.make_layout((backward_rows.FLOATS, variant.config.block_q * fours))
    return cute.make_tensor(sums.iterator, layout)
