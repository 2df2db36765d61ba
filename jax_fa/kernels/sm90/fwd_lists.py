"""The role find of the Hopper forward: lists the work of the tiles to come.

The warps that start no loads find ahead of time which tile comes next, its sequence, the keys that
its rows see, and the blocks that a dense mask shows them. Other roles read this, followed by the
tile's ``Work``, in a ring. Where ``plan.finds_ahead`` says no, every role finds it itself.
"""

from itertools import islice
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.pipeline import PipelineAsync

from jax_fa.kernels import dense_mask, edges, primitives, segments, tiles
from jax_fa.kernels.forward_work import (
    Variant,
    Work,
    narrow_keys,
    tile_at,
    work_on,
)
from jax_fa.kernels.rings import state_at
from jax_fa.kernels.sm90.fwd_work import ForwardContext
from jax_fa.kernels.sm90.plan import WORK_WORDS
from jax_fa.spec.band import Blocks, Window
from jax_fa.spec.division import FOUND_WORDS


@cute.jit
def find(variant: cutlass.Constexpr, x: ForwardContext) -> None:
    """Makes a list for each tile, and a last one that says there are no more. Three warps."""
    made, goes_on = x.ring.make_producer(), Boolean(True)
    tile = tile_at(variant, x, Int32(0))
    while goes_on:
        slot = made.acquire_and_advance()
        make_list(variant, with_list(x, slot.index), tile)
        # HAZARD: one lane arrives for the warp, so all its lanes must have written before.
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            slot.commit()
        goes_on = tile.is_valid & variant.config.is_persistent
        tile = tile_at(variant, x, tile.slot + 1)
    # HAZARD: the CTA must not exit while other roles still have to arrive at these barriers. For
    # the last list, which has no tile, they do not arrive.
    for _ in cutlass.range_constexpr(x.ring.num_stages - 1):
        made.acquire_and_advance()


@cute.jit
def make_list(variant: cutlass.Constexpr, x: ForwardContext, tile: tiles.Tile) -> None:
    """Writes a tile's list and work to ``smem.found``. Three warps do it together."""
    tile = variant.sorter.in_order(x, tile) if variant.sorter else tile
    finders = variant.plan.role("find")
    is_first = cute.arch.thread_idx()[0] // edges.WARP == finders.warps.start
    if tile.is_valid:
        if const_expr(variant.is_general):
            if dense_mask.narrows(x.scalars):
                if is_first:
                    with cute.arch.elect_one():
                        segments.reset(x.smem.found)
                primitives.meet(variant, "made")
                narrow_keys(variant, x, tile, finders.warps)
                primitives.meet(variant, "made")
        if is_first:
            work = work_on(variant, x, tile)
            # A 1, which says that there is a tile, and what ``begin`` reads.
            words = (1, *work.tile[2:], *work.span, *work.window, *work.blocks, *work[4:])
            for i in cutlass.range_constexpr(len(words)):
                x.smem.found[FOUND_WORDS + i] = Int32(words[i])
    elif is_first:
        x.smem.found[FOUND_WORDS] = Int32(0)


def with_list(x: ForwardContext, number: Int32) -> ForwardContext:
    """The context with list ``number`` as ``smem.found``."""
    found = x.smem.lists[None, number & (x.ring.num_stages - 1)]
    return x._replace(smem=x.smem._replace(found=found))


def on_list(variant: Variant, x: ForwardContext, work: Work) -> ForwardContext:
    """The context with the list of a tile as ``smem.found``."""
    return with_list(x, work.tile.slot) if variant.lists_ahead else x


def _wait(ring: PipelineAsync, number: Int32) -> None:
    """Waits until list ``number`` is made."""
    ring.consumer_wait(state_at(ring, number))


def _give_back(ring: PipelineAsync, number: Int32) -> None:
    """Tells find that the calling warp has read list ``number``."""
    ring.consumer_release(state_at(ring, number))


def next_tile(variant: Variant, x: ForwardContext, slot: Int32) -> tiles.Tile:
    """The tile at position ``slot``; if it is in a list, ``begin`` reads all but its validity."""
    if variant.key.mask == "full":  # D = 256, 2 x 8192 tokens: 1543 us; in bands of heads 1604
        return tiles.row_order(x.order, slot)
    if not variant.lists_ahead:
        return tile_at(variant, x, slot)
    _wait(x.ring, slot)
    is_valid = with_list(x, slot).smem.found[FOUND_WORDS] != 0
    return tiles.Tile(is_valid, slot, *[Int32(0)] * 4)


def begin(variant: Variant, x: ForwardContext, tile: tiles.Tile) -> Work:
    """The work of ``tile``. Called by whole warps; ``release`` returns its list to find."""
    if not variant.lists_ahead:
        return work_on(variant, x, tile)
    found = with_list(x, tile.slot).smem.found
    words = (found[FOUND_WORDS + 1 + i] for i in range(WORK_WORDS))

    def take(kind: type[Any], *known: Any) -> Any:
        return kind(*known, *islice(words, len(kind._fields) - len(known)))

    # For find, a slot is a place in the order of tiles; here it is the number of the list.
    tile = take(tiles.Tile, tile.is_valid, tile.slot)
    return take(Work, tile, take(tiles.Span), take(Window), take(Blocks))


def anew(variant: Variant, x: ForwardContext, work: Work) -> Work:
    """``work``, if it is in a list, read again from there rather than kept in registers."""
    return begin(variant, x, work.tile) if variant.lists_ahead else work


@cute.jit
def release(variant: cutlass.Constexpr, x: ForwardContext, work: Work) -> None:
    """Returns the list of a tile to find. Called by whole warps."""
    if const_expr(variant.lists_ahead):
        # HAZARD: one lane arrives for the warp, so all its lanes must have read before.
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            _give_back(x.ring, work.tile.slot)
