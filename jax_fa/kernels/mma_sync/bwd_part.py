"""Steps of both kinds of backward with the scores of a part of a block of queries.

In ``bwd.py`` one warp computes all that its keys need; in ``bwd_shared.py`` two do so together.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from jax_fa.kernels import edges, fragment_bias_columns, fragments, softmax
from jax_fa.kernels.backward_work import Step, Work, await_turn, pass_turn
from jax_fa.kernels.fragment_keys import exponentiate, mask_block, own_columns
from jax_fa.kernels.mma_sync import products
from jax_fa.kernels.mma_sync.bwd_products import own_row
from jax_fa.kernels.mma_sync.bwd_work import (
    BackwardContext,
    BackwardVariant,
    Keys,
    anew,
    tiles_of,
)
from jax_fa.kernels.unmasked import hides_pairs


@cute.jit
def load_bias(
    variant: cutlass.Constexpr, x: BackwardContext, c: Keys, work: Work, at: Step
) -> cute.Tensor | None:
    """Starts the loads of the bias of a part's scores, if there is a bias."""
    words = None
    if const_expr(variant.key.has_bias):
        words = cute.make_rmem_tensor((cute.size(c.s),), Int32)
        fragment_bias_columns.load(variant, x, anew(c), work, at, words)
    return words


@cute.jit
def exponentiate_part(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    c: Keys,
    work: Work,
    at: Step,
    words: cute.Tensor | None,
    stage: Int32,
    p: cute.Tensor,
) -> cute.Tensor:
    """Computes ``p`` from the scores; returns P times the slope of a cap, in float32 or rounded.

    Args:
        variant: the variant.
        x: the context.
        c: the warp's keys and the part of the queries.
        work: the tile.
        at: the block of queries.
        words: what ``load_bias`` returned.
        stage: the stage that holds the queries' statistics.
        p: the tensor for P, rounded.
    """
    if const_expr(variant.key.has_soft_cap):
        softmax.cap(c.s, x.scalars.cap_inner_log2)
    if const_expr(variant.key.has_bias):
        fragment_bias_columns.add_columns(c.s, words, x.scalars.bias, variant.dtype)
    hides = hides_pairs(variant, x.scalars, work.blocks, x.smem.found, at.q_block)
    for _ in cutlass.range(products.one_if_any(hides | work.is_partial), unroll=1):
        mask_block(variant, x, anew(c), products.hidden_from(work), at)
    lse2 = own_columns(as_loaded(variant, c), x.smem.lse2[None, stage])
    score_log2 = x.scalars.score_log2
    if const_expr(variant.rounds_slope):
        slope = cute.make_rmem_tensor_like(p) if const_expr(variant.may_cap) else p
        capped = slope if const_expr(variant.key.has_soft_cap) else None
        exponentiate(variant, c.s, lse2, score_log2, p, capped)
        if const_expr(variant.key.has_bias):
            fragment_bias_columns.to_slopes(variant, x, c, p, slope)
    else:
        slope = c.s
        if const_expr(variant.key.has_bias):
            fragment_bias_columns.exponentiate_exactly(variant, x, c, lse2, p)
        else:
            exponentiate(variant, c.s, lse2, score_log2, p, slope)
    return slope


def as_loaded(variant: BackwardVariant, c: Keys) -> Keys:
    """``c`` with its queries counted from the first one in shared memory."""
    return c._replace(first_query=0) if variant.config.splits_results else c


def place_of_words(
    variant: BackwardVariant, x: BackwardContext, thread: Int32, r: int, piece: int
) -> Int32:
    """The address, in the buffer of dS, of a thread's pair in its row ``r`` and in ``piece``."""
    tile, lane = tiles_of(variant).ds, thread % edges.WARP
    row = own_row(variant, thread) + lane // 4 + 8 * r
    return x.smem.ds + tile.place(row, piece) + lane % 4 * 4


@cute.jit
def put_words(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    tensor: cute.Tensor,
    first_piece: cutlass.Constexpr[int] = 0,
) -> None:
    """Writes a fragment, keys by queries, to the buffer of dS, from piece ``first_piece`` on."""
    thread, words = products.thread_index(), fragments.pairs_by_row(tensor)
    for r in cutlass.range_constexpr(fragments.ROWS):
        for i in cutlass.range_constexpr(cute.size(words, mode=[1])):
            place = place_of_words(variant, x, thread, r, first_piece + i)
            products.store_word(place, words[r, i])


@cute.jit
def acquire_dq(variant: cutlass.Constexpr, x: BackwardContext, work: Work, at: Step) -> None:
    """Waits for the CTA's turn to add to dQ of a block of queries. All threads call."""
    if cute.arch.thread_idx()[0] < edges.WARP:
        await_turn(variant, x, work, at, 1)
    cute.arch.sync_threads()


@cute.jit
def release_dq(variant: cutlass.Constexpr, x: BackwardContext, work: Work, at: Step) -> None:
    """Lets the next key block add to dQ. All threads call."""
    # HAZARD: all additions of the CTA must be visible before the next key block's turn. They come
    # before the barrier, hence before the release.
    cute.arch.sync_threads()
    if cute.arch.thread_idx()[0] < edges.WARP:
        pass_turn(variant, x, work, at)
