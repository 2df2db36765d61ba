"""Ends of a ring of work that no role keeps the state of: it is recomputed from an item's number.

A ring is the pipeline of an edge of kind "threads" (``edges.make_ring``) with a power of two of
stages. Functions are called by whole warps, and elect the lane that arrives.
"""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineAsync, PipelineState


def state_at(ring: PipelineAsync, number: Int32) -> PipelineState:
    """A consumer's state at item ``number``, recomputed since no registers are free to keep it."""
    stages = ring.num_stages
    phase = number >> (stages.bit_length() - 1) & 1
    return PipelineState(stages, number, number & (stages - 1), phase)


def await_item(ring: PipelineAsync, number: Int32) -> None:
    """Waits until item ``number`` is there."""
    ring.consumer_wait(state_at(ring, number))


def await_place(ring: PipelineAsync, number: Int32) -> None:
    """Waits until the stage of item ``number`` is free."""
    state = state_at(ring, number)
    ring.producer_acquire(PipelineState(ring.num_stages, number, state.index, state.phase ^ 1))


@cute.jit
def hand_over(ring: PipelineAsync, number: Int32) -> None:
    """Tells that the calling warp has made item ``number``."""
    # HAZARD: one lane arrives for the warp, so all its lanes must have written before.
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        ring.producer_commit(state_at(ring, number))


@cute.jit
def give_back(ring: PipelineAsync, number: Int32) -> None:
    """Tells that the calling warp is through with item ``number``."""
    # HAZARD: one lane arrives for the warp, so all its lanes must have read before.
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        ring.consumer_release(state_at(ring, number))
