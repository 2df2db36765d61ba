"""Steps of a backward in which two warps own the same keys, each with one of dK and dV.

So they can own more keys, or wider ones, than the registers of one warp allow. For the rows of a
load, between barriers:

    one      S  P          | dV   | dQ, dQ sums +=
    other    dP | dS         dK   | dQ, dQ sums +=

P passes through the buffer of dS, where each thread reads the words that it then overwrites.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa.kernels import edges, fragments, half_powers, primitives
from jax_fa.kernels.backward_work import Work
from jax_fa.kernels.fragment_keys import differentiate, own_columns, store
from jax_fa.kernels.mma_sync import products
from jax_fa.kernels.mma_sync.bwd_part import (
    as_loaded,
    exponentiate_part,
    load_bias,
    place_of_words,
    put_words,
)
from jax_fa.kernels.mma_sync.bwd_products import multiply_columns, multiply_rows
from jax_fa.kernels.mma_sync.bwd_work import (
    BackwardContext,
    BackwardVariant,
    Keys,
    Loaded,
    anew,
    place_of_rows,
    stage_of,
    tiles_of,
)

DV = 0
"""Warps that compute P and dV; the others compute dS and dK."""


@cute.jit
def add_part(
    variant: cutlass.Constexpr, x: BackwardContext, c: list[Keys], work: Work, now: Loaded
):
    """Adds the share of the rows of a load to the warp's dV or dK; writes dS to shared memory."""
    tile, stage = tiles_of(variant).q, stage_of(variant, now)
    q, dout = (place_of_rows(variant, x, name, now) for name in ("q", "dout"))
    # D = Dv, so the operands of both warps' products have the same layouts.
    has_dv = c[0].index == DV
    own = x.smem.k if has_dv else x.smem.v
    scores = [one.s for one in c]
    multiply_columns(variant, scores, tiles_of(variant).k, own, tile, q if has_dv else dout)
    rounded = [cute.make_rmem_tensor_like(one.s, variant.dtype) for one in c]
    if has_dv:
        for i in cutlass.range_constexpr(len(c)):
            give_p(variant, x, c[i], work, now, rounded[i])
        # The warp need not wait, but if it only arrives, racecheck reports races between dS and dQ.
        primitives.meet(variant, "p0", pair_of(variant))
    else:
        primitives.meet(variant, "p0", pair_of(variant))
        for i in cutlass.range_constexpr(len(c)):
            mine = as_loaded(variant, anew(variant, c[i]))
            halves = cute.make_rmem_tensor_like(c[i].s, half_powers.TYPE)
            get_words(variant, x.smem.ds, mine, halves)
            differentiate_halves(variant, x, mine, stage, halves)
            primitives.narrow(c[i].s, rounded[i])
            put_words(variant, x.smem.ds, mine, rounded[i])
    multiply_rows(variant, [one.dk for one in c], rounded, tile, dout if has_dv else q)


def pair_of(variant: BackwardVariant) -> Int32:
    """The number of the calling warp's keys among those of all warps."""
    return products.thread_index() // edges.WARP % (variant.config.warps // 2)


@cute.jit
def give_p(
    variant: cutlass.Constexpr,
    x: BackwardContext,
    c: Keys,
    work: Work,
    now: Loaded,
    p: cute.Tensor,
):
    """Computes ``p`` from the scores, and writes P times the slope of a cap for the other warp."""
    words = load_bias(variant, x, c, work, now.at)
    lse2 = own_columns(as_loaded(variant, c), x.smem.lse2[None, stage_of(variant, now)])
    exponentiate_part(variant, x, c, work, now.at, words, lse2, p)
    halves = cute.make_rmem_tensor_like(c.s, half_powers.TYPE)
    half_powers.pack(c.s, halves)
    put_words(variant, x.smem.ds, anew(variant, c), halves)


@cute.jit
def differentiate_halves(
    variant: cutlass.Constexpr, x: BackwardContext, c: Keys, stage: Int32, halves: cute.Tensor
):
    """Computes dS in place of dP."""
    slope = cute.make_rmem_tensor_like(c.s)
    half_powers.unpack(halves, slope)
    differentiate(own_columns(c, x.smem.delta[None, stage]), slope, c.s)


@cute.jit
def get_words(variant: cutlass.Constexpr, buffer: Int32, c: Keys, tensor: cute.Tensor):
    """Reads the fragment that the same thread of the other warp wrote with ``put_words``."""
    words = fragments.pairs_by_row(tensor)
    for r in cutlass.range_constexpr(fragments.ROWS):
        for i in cutlass.range_constexpr(cute.size(words, mode=[1])):
            words[r, i] = products.load_word(place_of_words(variant, buffer, c, r, i))


@cute.jit
def store_own(variant: cutlass.Constexpr, x: BackwardContext, c: Keys, work: Work):
    """Writes the warp's dV, or its dK."""
    if c.index == DV:
        store(variant, x, c, work, ("dv",))
    else:
        store(variant, x, c, work, ("dk",))
