"""Tiles and steps of the Hopper backward: computed by each role, or told through shared memory.

Where tiles are claimed and the mask is general, the role claim tells the ``Work`` of each; where
``HopperBackward.tells_steps``, the role load adds what consumers need to know of each step. So
these keep neither in registers, and walk no list of blocks. Elsewhere every role computes both by
itself.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from jax_fa.kernels import kept, rings, tiles
from jax_fa.kernels.backward_work import Step, Work, first_step, next_step, tile_at, work_on
from jax_fa.kernels.sm90 import bwd_claims
from jax_fa.kernels.sm90.bwd_work import BackwardContext, BackwardVariant, place_of_dq
from jax_fa.kernels.sm90.plan_bwd import STEP_WORDS, WORK_WORDS
from jax_fa.kernels.unmasked import hides_pairs


def next_tile(variant: BackwardVariant, x: BackwardContext, slot: Int32) -> tiles.Tile:
    """The tile at position ``slot`` of this CTA's list; if it is claimed, only its validity."""
    if not variant.claims_tiles:
        return tile_at(variant, x, slot)
    rings.await_item(x.work, slot)
    return tiles.Tile(bwd_claims.words_of(x, slot)[0] != 0, slot, *[Int32(0)] * 4)


def begin(variant: BackwardVariant, x: BackwardContext, tile: tiles.Tile) -> Work:
    """The work of ``tile``. Called by whole warps; ``leave`` gives it back."""
    if not variant.claims_tiles:
        return work_on(variant, x, tile)
    words = bwd_claims.words_of(x, tile.slot)
    if not variant.is_general:
        told = kept.read(tiles.Tile, (words[i] for i in range(WORK_WORDS)))
        return work_on(variant, x, told._replace(is_valid=tile.is_valid, slot=tile.slot))
    work = kept.read(Work, (words[i] for i in range(WORK_WORDS)))
    return work._replace(tile=work.tile._replace(is_valid=tile.is_valid, slot=tile.slot))


def anew(variant: BackwardVariant, x: BackwardContext, work: Work) -> Work:
    """``work``, if all of it is told, read again rather than kept in registers."""
    is_told = variant.claims_tiles and variant.is_general
    return begin(variant, x, work.tile) if is_told else work


def leave(variant: BackwardVariant, x: BackwardContext, tile: tiles.Tile) -> None:
    """Tells claim that the calling warp is through with ``tile``."""
    if variant.claims_tiles:
        rings.give_back(x.work, tile.slot)


class ToldStep(NamedTuple):
    """A step that load tells of, by its number in the CTA."""

    number: Int32


def parity_of(variant: BackwardVariant, at: Any, q_full: Any) -> Int32:
    """The buffer of dS that a step uses; if it is told, that of its queries: both alternate."""
    return q_full.index if variant.config.tells_steps else at.parity


def first_of(variant: BackwardVariant, work: Work, start: Int32) -> Any:
    """A tile's first step. ``start`` is 0 in the first tile, then ``carried`` by the one before."""
    return ToldStep(start) if variant.config.tells_steps else first_step(work, start)


def carried(at: Any) -> Int32:
    """What the first step of the next tile starts from, once ``at`` is behind the last of this."""
    return at.number if isinstance(at, ToldStep) else at.parity


@cute.jit
def next_of(variant: cutlass.Constexpr, x: BackwardContext, work: Work, at: Any) -> Any:
    """The step after ``at``."""
    if const_expr(variant.config.tells_steps):
        following = ToldStep(at.number + 1)
    else:
        following = next_step(variant, x, work, at)
    return following


class Facts(NamedTuple):
    """What consumers need to know of a step.

    Attributes:
        step: the step.
        place: position of its block's sums in ``Scratch.dq_sum``, in fours.
        used: rows of the block that the sequence has; may exceed the block.
        hides: whether some pairs are hidden.
    """

    step: Step
    place: Int32
    used: Int32
    hides: Boolean


def facts_of(variant: BackwardVariant, x: BackwardContext, work: Work, at: Any) -> Facts:
    """The facts of a step, told or computed; what is not used of them costs nothing."""
    if not variant.config.tells_steps:
        return _compute(variant, x, work, at)
    words = x.smem.steps[None, at.number & (cute.size(x.smem.steps, mode=[1]) - 1)]
    rest, q_block, head, place = (words[i] for i in reversed(range(STEP_WORDS)))
    # A told step has no use for its parity here.
    return Facts(Step(q_block, head, Int32(0)), place, rest >> 1, (rest & 1) != 0)


def computed_or(
    variant: BackwardVariant, x: BackwardContext, work: Work, at: Any, facts: Any
) -> Any:
    """The facts of a step as computed here, or ``facts`` if they are told."""
    return facts if variant.config.tells_steps else _compute(variant, x, work, at)


def told_or(variant: BackwardVariant, x: BackwardContext, work: Work, at: Any, facts: Any) -> Facts:
    """The facts of a step as told, or ``facts`` if they are computed."""
    return facts_of(variant, x, work, at) if variant.config.tells_steps else facts


def _compute(variant: BackwardVariant, x: BackwardContext, work: Work, at: Step) -> Facts:
    used = work.window.q_len - at.q_block * variant.config.block_q
    hides = hides_pairs(variant, x.scalars, work.blocks, x.smem.found, at.q_block)
    return Facts(at, place_of_dq(variant, work, at), used, hides | work.is_partial)


@cute.jit
def tell_step(
    variant: cutlass.Constexpr, x: BackwardContext, work: Work, at: Step, number: Int32
) -> None:
    """Writes the facts of step ``number``, if consumers are told. Called by a whole warp.

    HAZARD: load must call this before it acquires the stage of the step's queries. Its arrival
    there then says that the words are written. It has acquired the stage of the step before, so
    consumers may still read words of the last ``q_stages + 1`` steps; there is room for twice
    ``q_stages``.
    """
    if const_expr(variant.config.tells_steps):
        facts = _compute(variant, x, work, at)
        used = cutlass.min(facts.used, variant.config.block_q)
        words = (facts.place, at.head, at.q_block, used * 2 + Int32(facts.hides))
        slot = number & (cute.size(x.smem.steps, mode=[1]) - 1)
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(STEP_WORDS):
                x.smem.steps[i, slot] = words[i]
        # HAZARD: one lane arrives for the warp, and it need not be the one that wrote.
        cute.arch.sync_warp()
