"""The role load of the Hopper backward; diagram: ``bwd.py``."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa.kernels import loads
from jax_fa.kernels.backward_work import Step, Work, bulk_load, next_block
from jax_fa.kernels.sm90 import bwd_claims
from jax_fa.kernels.sm90.bwd_steps import begin, leave, next_tile, tell_step
from jax_fa.kernels.sm90.bwd_work import BackwardContext, BackwardPipes


@cute.jit
def load(variant: cutlass.Constexpr, x: BackwardContext, pipes: BackwardPipes):
    """Loads each tile's keys and values, and the query blocks of all its heads. One warp.

    The first query block of a tile is loaded while the last of the tile before is in use, values
    once its dP, and keys once its dQ has been computed.
    """
    k, v, q, dout, _ = pipes
    number = Int32(0)
    tile = next_tile(variant, x, Int32(0))
    while tile.is_valid:
        work = begin(variant, x, tile)
        if work.num_steps > 0:
            keys = loads.Rows(work.kv_start, work.tile.kv_head, work.tile.batch)
            block, left = work.first_block, work.num_steps
            for _ in cutlass.range(work.num_blocks, unroll=1):
                for i in cutlass.range(work.num_heads, unroll=1):
                    head = work.first_head + i
                    bwd_claims.call_next(variant, x, work, left)
                    left = left - 1
                    tell_step(variant, x, work, Step(block, head, number), number)
                    number = number + 1
                    slot = q.acquire_and_advance()
                    load_query_block(variant, x, "q", "lse2", work, head, block, slot)
                    slot = dout.acquire_and_advance()
                    load_query_block(variant, x, "dout", "delta", work, head, block, slot)
                    if left == work.num_steps - 1:
                        slot = v.acquire_and_advance()
                        loads.load(loads.operand(x, "v"), keys, work.tile.block, slot)
                        slot = k.acquire_and_advance()
                        loads.load(loads.operand(x, "k"), keys, work.tile.block, slot)
                block = next_block(variant, x, work, block)
        else:
            bwd_claims.call_next(variant, x, work, work.num_steps)
        leave(variant, x, tile)
        tile = next_tile(variant, x, tile.slot + 1)
    # HAZARD: the CTA must not exit while consumers still have to arrive at these barriers.
    k.tail()
    v.tail()
    q.tail()
    dout.tail()


@cute.jit
def load_query_block(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    rows_of: cutlass.Constexpr[str],
    statistic: cutlass.Constexpr[str],
    work: Work,
    head: Int32,
    block: Int32,
    slot: Any,
):
    """Loads a block of rows of "q" or "dout", and the rows' "lse2" or "delta"."""
    rows = loads.Rows(work.q_start, head, work.tile.batch)
    loads.load(loads.operand(x, rows_of), rows, block, slot)
    row = work.scratch_row + block * variant.config.block_q
    ring = getattr(x.smem, statistic)
    load_statistic(getattr(x.scratch, statistic), ring, head, row, slot)


@cute.jit
def load_statistic(
    statistic: cute.Tensor, ring: cute.Tensor, head: Int32, first: Int32, slot: Any
) -> None:
    """Starts the load of one float per row of a block, from row ``first`` of a head on.

    Args:
        statistic: (rows, heads) in global memory.
        ring: (rows of a block, stages) in shared memory.
        head: query head.
        first: row of the block's first query.
        slot: stage of the ring, whose barrier counts the bytes.
    """
    source = cute.domain_offset((first,), statistic[None, head])
    bulk_load(source, ring[None, slot.index], slot.barrier)
