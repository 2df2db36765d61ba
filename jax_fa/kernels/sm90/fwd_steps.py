"""Steps of the Hopper forward: which block of keys comes next, and whether it hides pairs."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from jax_fa.kernels.forward_work import Variant, Work, below
from jax_fa.kernels.sm90.fwd_work import ForwardContext
from jax_fa.kernels.unmasked import next_hides_pairs


class Step(NamedTuple):
    """A block of keys, and whether some of its pairs are hidden."""

    block: Int32
    hides: Boolean


def step_after(variant: Variant, x: ForwardContext, work: Work, block: Int32) -> Step:
    """The step after that of ``block``; meaningless after the last."""
    following = below(variant, x, block)
    return Step(following, next_hides_pairs(variant, x, work.blocks, following))


def next_step(variant: Variant, x: ForwardContext, block: Int32, number: Int32) -> Step:
    """The step after that of ``block``, which is step ``number`` of the CTA; told, if general."""
    if not variant.is_general:
        return Step(block - 1, Boolean(False))
    word = x.smem.steps[number & (cute.size(x.smem.steps) - 1)]
    return Step(word >> 1, (word & 1) != 0)


@cute.jit
def tell(
    variant: cutlass.Constexpr, x: ForwardContext, work: Work, block: Int32, number: Int32
) -> Int32:
    """Tells consumers what follows ``block``, which is step ``number``. A whole warp calls.

    HAZARD: load must call this before it acquires the stage of the step's keys. Its arrival there
    then says that the word is written. It has acquired the stage of the step before, so consumers
    may still read words of the last ``stages + 1`` steps; there is room for twice ``stages``.
    """
    following, hides = step_after(variant, x, work, block)
    if const_expr(variant.is_general):
        with cute.arch.elect_one():
            x.smem.steps[number & (cute.size(x.smem.steps) - 1)] = following * 2 + Int32(hides)
        # HAZARD: one lane arrives for the warp, and it need not be the one that wrote.
        cute.arch.sync_warp()
    return following
