"""Steps of both kinds of backward with the scores of a part of a block of queries.

In ``bwd.py`` one warp computes all that its keys need; in ``bwd_shared.py`` two do so together.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from jax_fa.kernels import edges, fragment_bias_columns, fragments, softmax
from jax_fa.kernels.backward_rows import FLOATS, VECTOR_BYTES
from jax_fa.kernels.backward_work import Step, Work, await_turn, pass_turn
from jax_fa.kernels.fragment_keys import exponentiate, mask_block
from jax_fa.kernels.mma_sync import products
from jax_fa.kernels.mma_sync.bwd_work import (
    BackwardContext,
    BackwardVariant,
    Keys,
    anew,
    tiles_of,
)
from jax_fa.kernels.unmasked import hides_pairs

FLOAT_BYTES = 4


@cute.jit
def load_bias(
    variant: cutlass.Constexpr, x: BackwardContext, c: Keys, work: Work, at: Step
) -> cute.Tensor | None:
    """Starts the loads of the bias of a part's scores, if there is a bias."""
    words = None
    if const_expr(variant.key.has_bias):
        words = cute.make_rmem_tensor((cute.size(c.s),), Int32)
        fragment_bias_columns.load(variant, x, anew(variant, c), work, at, words)
    return words


@cute.jit
def exponentiate_part(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    c: Keys,
    work: Work,
    at: Step,
    words: cute.Tensor | None,
    lse2: cute.Tensor,
    p: cute.Tensor,
) -> None:
    """Computes ``p`` from the scores, and replaces these by P times the slope of a cap.

    Args:
        variant: the variant.
        x: the context.
        c: the warp's keys and the part of the queries.
        work: the tile.
        at: the block of queries.
        words: what ``load_bias`` returned.
        lse2: LSE of the thread's columns of scores, in base 2.
        p: the tensor for P, rounded.
    """
    if const_expr(variant.key.has_soft_cap):
        softmax.cap(c.s, x.scalars.cap_inner_log2)
    if const_expr(variant.key.has_bias):
        fragment_bias_columns.add_columns(c.s, words, x.scalars.bias, variant.dtype)
    hides = hides_pairs(variant, x.scalars, work.blocks, x.smem.found, at.q_block)
    for _ in cutlass.range(products.one_if_any(hides | work.is_partial), unroll=1):
        mask_block(variant, x, anew(variant, c), products.hidden_from(work), at)
    score_log2 = x.scalars.score_log2
    if const_expr(variant.key.has_bias):
        fragment_bias_columns.exponentiate_exactly(variant, x, c, lse2, p)
    else:
        exponentiate(variant, c.s, lse2, score_log2, p, c.s)


def as_loaded(variant: BackwardVariant, c: Keys) -> Keys:
    """``c`` with its queries counted from the first one in shared memory."""
    return c._replace(first_query=0) if variant.config.splits_results else c


def place_of_words(variant: BackwardVariant, buffer: Int32, c: Keys, r: int, piece: int) -> Int32:
    """The address, in a buffer of P or dS, of a thread's pair in its row ``r`` and in a piece."""
    tile, first = tiles_of(variant).ds, as_loaded(variant, c).first_query // products.COLUMNS
    row = c.first_key + c.thread // 4 + 8 * r
    return buffer + tile.place(row, first + piece) + c.thread % 4 * 4


@cute.jit
def put_words(variant: cutlass.Constexpr, buffer: Int32, c: Keys, tensor: cute.Tensor) -> None:
    """Writes a fragment, keys by queries, to a buffer of P or dS."""
    words = fragments.pairs_by_row(tensor)
    for r in cutlass.range_constexpr(fragments.ROWS):
        for i in cutlass.range_constexpr(cute.size(words, mode=[1])):
            products.store_word(place_of_words(variant, buffer, c, r, i), words[r, i])


@cute.jit
def add_to_sums(
    variant: cutlass.Constexpr, sums: Int64, row_tile: Int32, column: Int32, dq: cute.Tensor
) -> None:
    """Adds 16 rows of dQ, from ``column`` on, to the sums of a query block at ``sums``.

    Their place is as if the warp that reads these rows in ``finish`` had computed dQ.
    """
    own = row_tile * edges.WARP + products.thread_index() % edges.WARP
    if const_expr(variant.config.adds_four):
        sums = sums + (column // products.COLUMNS * edges.WARPGROUP + own) * VECTOR_BYTES
        for i in cutlass.range_constexpr(0, cute.size(dq), FLOATS):
            place = sums + i // FLOATS * (edges.WARPGROUP * VECTOR_BYTES)
            products.add_four_to_global(place, [dq[i + j] for j in range(FLOATS)])
    else:
        sums = sums + (column // 2 * edges.WARPGROUP + own) * FLOAT_BYTES
        for i in cutlass.range_constexpr(cute.size(dq)):
            products.add_to_global(sums + i * (edges.WARPGROUP * FLOAT_BYTES), dq[i])


@cute.jit
def acquire_dq(variant: cutlass.Constexpr, x: BackwardContext, work: Work, at: Step) -> None:
    """Waits for the CTA's turn to add to dQ of a block of queries. All threads call."""
    if products.thread_index() < edges.WARP:
        await_turn(variant, x, work, at, 1)
    cute.arch.sync_threads()


@cute.jit
def release_dq(variant: cutlass.Constexpr, x: BackwardContext, work: Work, at: Step) -> None:
    """Lets the next key block add to dQ. All threads call."""
    # HAZARD: all additions of the CTA must be visible before the next key block's turn. They come
    # before the barrier, hence before the release.
    cute.arch.sync_threads()
    if products.thread_index() < edges.WARP:
        pass_turn(variant, x, work, at)
