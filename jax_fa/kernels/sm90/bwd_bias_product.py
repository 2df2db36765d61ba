"""Bias of Hopper's backward, added by the tensor core: of 16 bits, where TMA can read it.

``bias_product.py`` tells how, with S and B transposed here. Of a stage of the ring, dS takes the
place of the bias. Before that, consumers learn from P whether the step is odd: 2 or more, or NaN.
Then they compute P anew. In the steps that follow in the tile they add the bias by elements.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.pipeline import PipelineConsumer

from jax_fa.kernels import backward_rows, primitives
from jax_fa.kernels.backward_work import Work
from jax_fa.kernels.fragment_keys import exponentiate, mask_block, own_columns
from jax_fa.kernels.sm90 import bias_product
from jax_fa.kernels.sm90.bias_product import COLUMNS
from jax_fa.kernels.sm90.bwd_steps import Facts
from jax_fa.kernels.sm90.bwd_work import thread_anew
from jax_fa.kernels.sm90.plan import WGMMA_ROWS


class Ring(NamedTuple):
    """A consumer's end of the ring of a bias, and whether a step of the tile has been odd."""

    pipe: PipelineConsumer
    is_odd: Boolean


class Scored(NamedTuple):
    """What S of a step was computed from.

    Attributes:
        ring: the ring, advanced.
        q_full: the stage of queries.
        full: that of the bias, where dS goes.
    """

    ring: Ring
    q_full: Any
    full: Any


@cute.jit
def score(variant: cutlass.Constexpr, x: Any, c: Any, q_full: Any, ring: Ring) -> Scored:
    """Issues S of a step, without its bias if a step before has been odd."""
    pipe, is_odd = ring
    full = pipe.wait_and_advance()
    multiply_keys(variant, x, c, q_full)
    if is_odd == Boolean(False):
        mma = bias_product.make_mma(variant.dtype, OperandMajorMode.MN)
        tile = (variant.s_columns, WGMMA_ROWS)
        own = cute.local_tile(x.smem.ds, tile, (0, c.first_key // WGMMA_ROWS, full.index))
        a = mma.make_fragment_A(mma.get_slice(0).partition_A(primitives.transposed(own)))
        parts = variant.s_columns // COLUMNS
        slabs = cute.logical_divide(a, (None, None, bias_product.SLABS))
        slabs = [slabs[None, None, (None, i)] for i in range(parts)]
        bias_product.multiply(mma, c.s, slabs, x.smem.factors, x.smem.words)
    warpgroup.commit_group()
    return Scored(Ring(pipe, is_odd), q_full, full)


@cute.jit
def multiply_keys(variant: cutlass.Constexpr, x: Any, c: Any, q_full: Any) -> None:
    """Issues ``K Q^T``."""
    columns = cute.size(x.arrays.dk, mode=[1])
    bias_product.multiply_halves(variant.dtype, c.s, c.k, x.smem.q, q_full.index, columns)


@cute.jit
def add_elements(variant: cutlass.Constexpr, x: Any, c: Any, scored: Scored) -> None:
    """Adds each element of the bias, times ``1 / scale``, if a step before has been odd."""
    if scored.ring.is_odd:
        _add_elements(variant, x, thread_anew(variant, c), scored)


@cute.jit
def _add_elements(variant: cutlass.Constexpr, x: Any, c: Any, scored: Scored) -> None:
    matrices = cute.nvgpu.warp.LdMatrix8x8x16bOp(True, 4)
    copy = cute.make_tiled_copy_C(cute.make_copy_atom(matrices, variant.dtype), c.s_mma)
    copy = copy.get_slice(c.thread)
    tile = (variant.s_columns, WGMMA_ROWS)
    own = cute.local_tile(x.smem.ds, tile, (0, c.first_key // WGMMA_ROWS, scored.full.index))
    source = copy.partition_S(primitives.transposed(own))
    factor, pieces = bias_product.factor_of(x.scalars.bias), cute.size(source, mode=[0, 1])
    of_piece = cute.size(c.s) // pieces
    for i in cutlass.range_constexpr(pieces):
        # One at a time: registers have no room for all.
        loaded = cute.make_rmem_tensor((of_piece,), variant.dtype)
        piece = cute.make_tensor(loaded.iterator, cute.make_layout(((of_piece, 1), 1, 1)))
        cute.copy(copy, source[(None, i), None, None], piece)
        words = cute.recast_tensor(loaded, Int32)
        for j in cutlass.range_constexpr(cute.size(words)):
            pair, first = primitives.widen(words[j], variant.dtype), of_piece * i + 2 * j
            for e in cutlass.range_constexpr(2):
                c.s[first + e] = c.s[first + e] + pair[e] * factor


@cute.jit
def limit(c: Any, scored: Scored) -> None:
    """Limits P, in the registers of S, to 1 if a step before has been odd."""
    if scored.ring.is_odd:
        backward_rows.limit(c.s)


@cute.jit
def mend(
    variant: cutlass.Constexpr,
    x: Any,
    c: Any,
    work: Work,
    facts: Facts,
    scored: Scored,
) -> Scored:
    """Computes P anew if the step is the first odd one of its tile.

    Returns ``scored`` with what is known then.
    """
    pipe, q_full = scored.ring.pipe, scored.q_full
    is_odd = scored.ring.is_odd
    if is_odd == Boolean(False):
        # Consumers meet at "ds" before a word is written for another step.
        word, holds = bias_product.word_of(x.smem.words, c.index), bias_product.reaches_two(c.s)
        is_odd = bias_product.any_of_consumer(variant, "odd0", c.index, word, q_full.count, holds)
        if is_odd:
            multiply_keys(variant, x, c, q_full)
            warpgroup.wait_group(0)
            own = thread_anew(variant, c)
            _add_elements(variant, x, own, scored)
            if facts.hides:
                mask_block(variant, x, own, work, facts.step)
            lse2 = own_columns(own, x.smem.lse2[None, q_full.index])
            exponentiate(variant, c.s, lse2, x.scalars.score_log2, None, c.s)
            backward_rows.limit(c.s)
    return scored._replace(ring=Ring(pipe, is_odd))
