"""The roles of Hopper's gradient of a bias: load, consume; ``dbias.py`` has the diagram."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from jax_fa.kernels import fragments, loads, primitives
from jax_fa.kernels.dbias_rows import (
    add_kept,
    add_products,
    hide,
    keep_bias,
    may_hide,
    row_stats,
    store,
    to_slopes,
)
from jax_fa.kernels.dbias_work import bias_tile, step_at
from jax_fa.kernels.sm90.dbias_work import DbiasContext, DbiasPipes, make_consumer


@cute.jit
def load(variant: cutlass.Constexpr, x: DbiasContext, pipes: DbiasPipes) -> None:
    """Loads, for each tile of the bias, the blocks whose scores it is added to. One warp."""
    qk, dov = pipes.qk, pipes.dov
    number = cute.arch.block_idx()[0]
    while number < x.grid.number:
        tile = bias_tile(variant, x, number)
        pairs, rows = tile.pairs, tile.row_blocks
        for pair in cutlass.range(pairs.start, pairs.end, unroll=1):
            for row_block in cutlass.range(rows.start, rows.end, unroll=1):
                work, seen = step_at(variant, x, tile, pair, row_block)
                at = work.tile
                for block in cutlass.range(seen.start, seen.end, unroll=1):
                    queries = loads.Rows(Int32(0), at.head, at.batch)
                    keys = loads.Rows(Int32(0), at.kv_head, at.batch)
                    slot = qk.acquire_and_advance()
                    loads.load(loads.operand(x, "q"), queries, row_block, slot)
                    loads.load(loads.operand(x, "k"), keys, block, slot)
                    slot = dov.acquire_and_advance()
                    loads.load(loads.operand(x, "dout"), queries, row_block, slot)
                    loads.load(loads.operand(x, "v"), keys, block, slot)
        number = number + cute.arch.grid_dim()[0]
    # HAZARD: the CTA must not exit while consumers still have to arrive at these barriers.
    qk.tail()
    dov.tail()


@cute.jit
def consume(variant: cutlass.Constexpr, x: DbiasContext, pipes: DbiasPipes) -> None:
    """Sums dS of 64 rows of each tile of the bias. One warpgroup of two."""
    c = make_consumer(variant, x)
    qk, dov = pipes.qk, pipes.dov
    number = cute.arch.block_idx()[0]
    while number < x.grid.number:
        tile = bias_tile(variant, x, number)
        pairs, rows = tile.pairs, tile.row_blocks
        c.sums.fill(0.0)
        keep_bias(variant, x, c, tile)
        for pair in cutlass.range(pairs.start, pairs.end, unroll=1):
            for row_block in cutlass.range(rows.start, rows.end, unroll=1):
                work, seen = step_at(variant, x, tile, pair, row_block)
                stats = row_stats(variant, x, c, work)
                for block in cutlass.range(seen.start, seen.end, unroll=1):
                    scores, dp = (c.s_mma.make_fragment_C(c.sums.shape) for _ in range(2))
                    qk_full = qk.wait_and_advance()
                    place = (None, None, None, qk_full.index)
                    fragments.multiply(c.s_mma, scores, c.q[place], c.k[place], False)
                    dov_full = dov.wait_and_advance()
                    place = (None, None, None, dov_full.index)
                    fragments.multiply(c.s_mma, dp, c.dout[place], c.v[place], False)
                    hides = may_hide(variant, x, work, block)
                    warpgroup.wait_group(1)
                    qk_full.release()
                    add_kept(variant, x, c, scores)
                    if hides:
                        hide(variant, x, c, work, scores, block)
                    to_slopes(x, stats, scores)
                    warpgroup.wait_group(0)
                    dov_full.release()
                    if hides:
                        add_products(c, stats, scores, dp, True)
                    else:
                        add_products(c, stats, scores, dp, False)
        # The tile is computed again, not kept in registers until here: D = 64 spilled 8 bytes.
        store(variant, x, c, bias_tile(variant, x, primitives.opaque(number)))
        number = number + cute.arch.grid_dim()[0]
