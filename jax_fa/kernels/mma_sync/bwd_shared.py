"""Steps of a backward whose dK and dV of 16 keys are too wide for the registers of one warp.

Two groups of four warps share the 64 keys of a tile. For a part of 16 queries, between barriers:

    group 0    wait q, do | S  P   |      | dV   dQ, dQ sums +=
    group 1    wait q, do | dP     | dS   | dK   dQ, dQ sums +=
    loads                 | q and do of the next part ...
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from jax_fa.kernels import edges, fragments, primitives
from jax_fa.kernels.backward_work import Step, Work, next_step
from jax_fa.kernels.fragment_keys import differentiate, own_columns, store
from jax_fa.kernels.mma_sync import products
from jax_fa.kernels.mma_sync.bwd_part import (
    acquire_dq,
    exponentiate_part,
    load_bias,
    place_of_words,
    put_words,
    release_dq,
)
from jax_fa.kernels.mma_sync.bwd_products import (
    multiply_columns,
    multiply_dq,
    multiply_rows,
    operands_of,
)
from jax_fa.kernels.mma_sync.bwd_work import (
    BackwardContext,
    Keys,
    anew,
    load_queries,
    taken_up,
    tiles_of,
)

DV = 0
"""Group that computes P and dV; the other computes dS and dK."""


@cute.jit
def step(
    variant: cutlass.Constexpr,
    deterministic: cutlass.Constexpr[bool],
    x: BackwardContext,
    c: Keys,
    work: Work,
    at: Step,
    has_next: Boolean,
) -> Step:
    """Adds a query block's share of dK and dV to the accumulators and of dQ to global memory.

    Returns the next step. If ``has_next``, the loads of its first part have started.
    """
    parts = variant.config.parts
    following = next_step(variant, x, taken_up(variant, x, work), at)
    for part in cutlass.range(parts, unroll=1):
        cute.arch.cp_async_wait_group(0)
        # HAZARD: all threads' copies of this part have arrived; all warps are done with the
        # previous part and its dS.
        cute.arch.sync_threads()
        own = taken_up(variant, x, work)
        is_last = part == parts - 1
        if has_next | (part < parts - 1):
            ahead = Step(
                following.q_block if is_last else at.q_block,
                following.head if is_last else at.head,
                at.parity,
            )
            first = (part + 1) % parts * variant.config.loaded_rows
            load_queries(variant, x, "q", own, ahead, (part + 1) % 2, first)
            load_queries(variant, x, "dout", own, ahead, (part + 1) % 2, first)
        cute.arch.cp_async_commit_group()
        add_part(variant, x, c, own, at, part)
        reduce_dq(variant, deterministic, x, c, taken_up(variant, x, work), at, part)
    return following


@cute.jit
def add_part(
    variant: cutlass.Constexpr, x: BackwardContext, c: Keys, work: Work, at: Step, part: Int32
):
    """Adds a part's share of dV or dK to the group's accumulator; writes dS to shared memory."""
    tile, stage = tiles_of(variant).q, part % 2
    q = x.smem.q + stage * tile.size_bytes
    dout = x.smem.dout + stage * tile.size_bytes
    # D = Dv, so the operands of both groups' products have the same layouts.
    has_dv = c.index == DV
    own = x.smem.k if has_dv else x.smem.v
    multiply_columns(variant, c.s, tiles_of(variant).k, own, tile, q if has_dv else dout)
    rounded = cute.make_rmem_tensor_like(c.s, variant.dtype)
    if has_dv:
        of_part = anew(c)._replace(first_query=part * variant.config.loaded_rows)
        words = load_bias(variant, x, of_part, work, at)
        slope = exponentiate_part(variant, x, of_part, work, at, words, stage, rounded)
        put_words(variant, x, slope)
    # HAZARD: P of the other group is in shared memory.
    cute.arch.sync_threads()
    if c.index != DV:
        slope = cute.make_rmem_tensor_like(rounded)
        get_words(variant, x, slope)
        differentiate(own_columns(anew(c), x.smem.delta[None, stage]), slope, c.s)
        primitives.narrow(c.s, rounded)
        put_words(variant, x, rounded)
    # HAZARD: dS of all warps is in shared memory.
    cute.arch.sync_threads()
    multiply_rows(variant, c.dk, operands_of(rounded), tile, dout if has_dv else q)


@cute.jit
def get_words(variant: cutlass.Constexpr, x: BackwardContext, tensor: cute.Tensor):
    """Reads the fragment that the same thread of the other group wrote with ``put_words``."""
    thread, words = products.thread_index(), fragments.pairs_by_row(tensor)
    for r in cutlass.range_constexpr(fragments.ROWS):
        for i in cutlass.range_constexpr(cute.size(words, mode=[1])):
            words[r, i] = products.load_word(place_of_words(variant, x, thread, r, i))


@cute.jit
def reduce_dq(
    variant: cutlass.Constexpr,
    deterministic: cutlass.Constexpr[bool],
    x: BackwardContext,
    c: Keys,
    work: Work,
    at: Step,
    part: Int32,
):
    """Computes the warp's columns of dQ of a part's 16 queries, and adds them to the sums."""
    config, columns = variant.config, variant.dq_shape.columns
    width = columns // edges.WARPS_PER_GROUP
    if const_expr(deterministic):
        if part == 0:
            acquire_dq(variant, x, work, at)
    four = (work.scratch_row + at.q_block * config.block_q) * (variant.key.head_dim // 4)
    sums = x.scratch.dq_sum[None, four, at.head].iterator.toint()
    thread = products.thread_index()
    first = thread % edges.WARPGROUP // edges.WARP * width
    # The place in the sums is as if the warp that reads these rows in ``finish`` had computed dQ.
    own = c.index * (columns // 2 * edges.WARPGROUP) + part * edges.WARP + thread % edges.WARP
    dq = multiply_dq(variant, x, c.index * columns + first, width)
    for i in cutlass.range_constexpr(cute.size(dq)):
        place = sums + (own + (first // 2 + i) * edges.WARPGROUP) * 4
        products.add_to_global(place, dq[i])
    if const_expr(deterministic):
        if part == config.parts - 1:
            release_dq(variant, x, work, at)


@cute.jit
def store_own(variant: cutlass.Constexpr, x: BackwardContext, c: Keys, work: Work):
    """Writes the group's dV, or its dK."""
    if c.index == DV:
        store(variant, x, c, work, ("dv",))
    else:
        store(variant, x, c, work, ("dk",))
