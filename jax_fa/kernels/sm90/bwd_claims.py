"""The role claim of the Hopper backward: takes tiles from a counter, and tells others of them.

Where a mask makes tiles differ in length, a warp claims the next tile from a counter in global
memory, which the kernel ``prepare`` has cleared, and tells load and consumers of it through the
ring "work". With a general mask it tells the whole ``Work``, whose computation takes long. It
claims when few loads of the tile before are left: early enough for load to go on without a pause,
late enough for CTAs to end at about the same time.

Shares are fixed in a deterministic run, which counts on an order, and where segments or a mask
given as an array narrow what a tile visits: all warps of a CTA find that out for its only tile.
Claim then tells of the tiles of ``backward_work.tile_at``.

Forward and backward, H200, share of the time with fixed shares under a causal mask, and with one
CTA for each tile under others:

    tokens              32 x 512    16 x 1024    8 x 2048
    D = 64, causal          0.97         0.98        0.99
            lengths                      0.95        0.97    (of 1 to T, causal)
            window                       0.93        0.95    (T / 4)
    D = 128, causal         0.95         0.98        1.00
            lengths                      0.99        0.98
            window                       0.98        0.98
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from jax_fa.kernels import edges, kept, rings, tiles
from jax_fa.kernels.backward_rows import claims_of
from jax_fa.kernels.backward_work import Work, has_fixed_shares, tile_at, tile_of_number, work_on
from jax_fa.kernels.sm90.bwd_work import BackwardContext, BackwardVariant
from jax_fa.kernels.sm90.plan_bwd import ITEMS, WORK_WORDS

STEPS_AHEAD = 4
"""The next tile is claimed when so many steps of a tile are still to be loaded."""


class ClaimRings(NamedTuple):
    """The rings of ``BackwardContext``; None unless tiles are claimed."""

    work: Any
    loaded: Any


def make_rings(variant: BackwardVariant, work: Any, loaded: Any) -> ClaimRings:
    """The rings whose barriers are at ``work`` and ``loaded``."""
    if not variant.claims_tiles:
        return ClaimRings(None, None)
    plan, storage = variant.plan, (work.data_ptr(), loaded.data_ptr())
    pairs = zip(ClaimRings._fields, storage, strict=True)
    return ClaimRings(*[edges.make_ring(plan, plan.edge(data), place) for data, place in pairs])


@cute.jit
def claim(variant: cutlass.Constexpr, x: BackwardContext):
    """Tells of one tile after the other, and at last that there are no more. One warp."""
    slot, goes_on = Int32(0), Boolean(True)
    is_fixed = has_fixed_shares(variant, x.scalars)
    while goes_on:
        rings.await_place(x.work, slot)
        tile = tile_at(variant, x, slot)
        if ~is_fixed:
            tile = tile_of_number(x.order, slot, take_number(x))
        tell(variant, x, tile)
        rings.hand_over(x.work, slot)
        goes_on = tile.is_valid
        if goes_on:
            await_loads(x, slot)
        slot = slot + 1
    # HAZARD: the CTA must not exit while other roles still have to arrive at these barriers. For
    # what says that there are no more tiles, they do not arrive.
    for i in cutlass.range_constexpr(ITEMS - 1):
        rings.await_place(x.work, slot + i)


@cute.jit
def take_number(x: BackwardContext) -> Int32:
    """Claims the next tile: returns its number, the same in all lanes of the warp."""
    taken = Int32(0)
    if cute.arch.lane_idx() == 0:
        taken = cute.arch.atomic_add(claims_of(x.scratch), Int32(1), sem="relaxed", scope="gpu")
    return cute.arch.shuffle_sync(taken, 0)


@cute.jit
def tell(variant: cutlass.Constexpr, x: BackwardContext, tile: tiles.Tile) -> None:
    """Writes ``tile``, or all its work if the mask is general, to shared memory."""
    words = words_of(x, tile.slot)
    if tile.is_valid:
        values = kept.words_of(work_on(variant, x, tile) if variant.is_general else tile)
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(WORK_WORDS):
                words[i] = values[i] if i < len(values) else Int32(0)
    else:
        with cute.arch.elect_one():
            words[0] = Int32(0)


def words_of(x: BackwardContext, slot: Int32) -> cute.Tensor:
    """The words that tell of the CTA's tile ``slot``."""
    return x.smem.work[None, slot & (ITEMS - 1)]


def await_loads(x: BackwardContext, slot: Int32) -> None:
    """Waits until load has few steps of tile ``slot`` left."""
    rings.await_item(x.loaded, slot)
    rings.give_back(x.loaded, slot)


@cute.jit
def call_next(variant: cutlass.Constexpr, x: BackwardContext, work: Work, left: Int32) -> None:
    """Has the next tile claimed if just so few of a tile's steps are left; called before each."""
    if const_expr(variant.claims_tiles):
        if left == cutlass.min(work.num_steps, STEPS_AHEAD):
            rings.await_place(x.loaded, work.tile.slot)
            rings.hand_over(x.loaded, work.tile.slot)
