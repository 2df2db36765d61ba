"""Bias of Hopper's forward, added by the tensor core: of 16 bits, where TMA can read it.

``bias_product.py`` tells how. Once a block of a tile is odd, those that follow are not multiplied:
biases that hide pairs by -inf make most blocks odd.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from jax_fa.kernels import bias as biases  # noqa: F401 (read by forward_host.py)
from jax_fa.kernels import edges, fragment_softmax, fragments, primitives
from jax_fa.kernels.forward_host import ForwardCall
from jax_fa.kernels.forward_work import Variant, Work
from jax_fa.kernels.rings import state_at
from jax_fa.kernels.sm90 import bias_chunks, bias_product, fwd_bias_roles
from jax_fa.kernels.sm90.bias_chunks import HALVES
from jax_fa.kernels.sm90.fwd_lists import find
from jax_fa.kernels.sm90.fwd_roles import Scored, mask_block
from jax_fa.kernels.sm90.fwd_work import ForwardConsumer, ForwardContext, thread_anew
from jax_fa.kernels.sm90.plan import WGMMA_ROWS
from jax_fa.kernels.sm90.plan_bias import FACTORS_BYTES, WORDS_IN_TURN, chunks_of_stage, num_words
from jax_fa.spec.config_sm90 import HopperForward


def layout(config: HopperForward) -> cute.ComposedLayout:
    """The ring in shared memory, (block_q, halves, chunks)."""
    chunks = config.bias_stages * config.block_kv // HALVES
    return bias_chunks.layout(config.block_q, chunks)


def num_halves(variant: Variant) -> int:
    """The shared memory of the bias, in halves: the ring, factors, and words."""
    return (
        cute.cosize(layout(variant.config))
        + FACTORS_BYTES // 2
        + 2 * num_words(variant.config, WORDS_IN_TURN)
    )


def describe(variant: Variant, call: ForwardCall) -> primitives.TmaArray:
    """Describes the bias to TMA."""
    chunk = cute.slice_(layout(variant.config), (None, None, 0))
    return bias_chunks.describe(call.scalars.bias, call.queries.length, chunk)


def _behind_ring(variant: Variant, x: ForwardContext) -> Int32:
    """The address of the factors in shared memory."""
    words = cute.recast_ptr(x.smem.bias.iterator, dtype=Int32).toint()
    return words + 2 * cute.cosize(layout(variant.config))


def _factors(variant: Variant, x: ForwardContext) -> cute.Tensor:
    return bias_product.factors_at(variant.dtype, _behind_ring(variant, x))


def _words(variant: Variant, x: ForwardContext) -> cute.Tensor:
    """Words: whether F is rounded; two of each consumer: ``_word``."""
    address = _behind_ring(variant, x) + FACTORS_BYTES
    words = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4)
    return cute.make_tensor(words, cute.make_layout(num_words(variant.config, WORDS_IN_TURN)))


def _word(variant: Variant, x: ForwardContext, c: ForwardConsumer, number: Int32) -> cute.Tensor:
    """A consumer's word on block ``number``, which is that number if it is odd.

    Two take turns, since others may still read that of the block before.
    """
    place = 1 + WORDS_IN_TURN * c.index + (number & 1)
    return cute.make_tensor(_words(variant, x).iterator + place, cute.make_layout(1))


@cute.jit
def load_or_find(variant: cutlass.Constexpr, x: ForwardContext) -> None:
    """The role of a warp that loads no queries, keys and values."""
    loader = variant.plan.role("load_bias").warps.start
    if cute.arch.thread_idx()[0] // edges.WARP == loader:
        bias_product.write_factors(_factors(variant, x), _words(variant, x), x.scalars.bias)
        fwd_bias_roles.load(variant, x)
    elif const_expr(variant.lists_ahead):
        find(variant, x)


@cute.jit
def wait(variant: cutlass.Constexpr, x: ForwardContext, number: Int32) -> None:
    """Waits until block ``number`` may be multiplied."""
    x.chunks.consumer_wait(state_at(x.chunks, number))


@cute.jit
def multiply(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    c: ForwardConsumer,
    scores: cute.Tensor,
    number: Int32,
    follows: cutlass.Constexpr[bool],
) -> Boolean:
    """Issues ``scores += B F``, unless block ``number`` ``follows`` an odd one in its tile.

    ``wait`` comes before, unless the block is a tile's first. Returns whether it is odd already.
    """
    is_odd = Boolean(False)
    if const_expr(not follows):
        wait(variant, x, number)
    else:
        is_odd = _word(variant, x, c, number - 1)[0] == number - 1
    if is_odd == Boolean(False):
        mma = bias_product.make_mma(variant.dtype, OperandMajorMode.K)
        of_stage = chunks_of_stage(variant.key, variant.config)
        chunks = [chunk_of(variant, x, number, i) for i in range(of_stage)]
        slabs = bias_product.slabs_of_rows(variant, x.smem.bias, chunks, c.index)
        bias_product.multiply(mma, scores, slabs, _factors(variant, x), _words(variant, x))
    warpgroup.commit_group()
    return is_odd


def chunk_of(variant: Variant, x: ForwardContext, number: Int32, i: int) -> Int32:
    """The place in the ring of chunk ``i`` of block ``number``."""
    return state_at(x.chunks, number).index * chunks_of_stage(variant.key, variant.config) + i


@cute.jit
def to_probabilities(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    c: ForwardConsumer,
    work: Work,
    block: Int32,
    hides: Boolean,
    scored: Scored,
    form: cutlass.Constexpr[int],
) -> Boolean:
    """Masks a block's scores if it ``hides`` keys, and exponentiates them; releases keys and bias.

    Until the maximum is final, ``c.shrink`` holds the one before.
    """
    merged = cute.make_layout(((2, 2, variant.config.block_kv // 8), 1, 1))
    scored = scored._replace(scores=cute.make_tensor(scored.scores.iterator, merged))
    rows, state, scale_log2 = fragments.by_row(scored.scores), c.state, x.scalars.scale_log2
    before, number = c.shrink, scored.k_full.count
    before.store(state.maximum.load())
    is_odd, rises = scored.is_odd, Boolean(True)
    if is_odd:
        bias_product.tell(_word(variant, x, c, number), number)
    else:
        raised, word = raise_maximum(x, state, rows), _word(variant, x, c, number)
        rises = raised.rises
        is_odd = bias_product.any_of_consumer(variant, "out0", c.index, word, number, raised.is_odd)
        if is_odd:
            multiply_anew(variant, c, scored)
    if is_odd:
        add_elements(variant, x, thread_anew(variant, c), scored)
    # HAZARD: one lane releases for the warp, so all its lanes must have read before.
    cute.arch.sync_warp()
    scored.k_full.release()
    x.chunks.consumer_release(state_at(x.chunks, number))
    if hides:
        mask_block(variant, x, c, work, scored.scores, block)
    tops = cute.make_rmem_tensor_like(state.maximum)
    if is_odd | hides:
        rises = Boolean(True)
        _raise_anew(x, c, rows, tops)
    else:
        for r in cutlass.range_constexpr(fragments.ROWS):
            tops[r] = state.maximum[r] * scale_log2
        if rises:
            for r in cutlass.range_constexpr(fragments.ROWS):
                c.shrink[r] = fragment_softmax.power(before[r], tops[r], scale_log2, False)
        else:
            c.shrink.fill(1.0)
    for r in cutlass.range_constexpr(fragments.ROWS):
        sums = [Float32(0.0) for _ in range(4)]
        for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            rows[r, i] = fragment_softmax.power(rows[r, i], tops[r], scale_log2, False)
            sums[i % 4] = sums[i % 4] + rows[r, i]
        total = (sums[0] + sums[1]) + (sums[2] + sums[3])
        state.total[r] = state.total[r] * c.shrink[r] + total
    return rises


class Raised(NamedTuple):
    """Whether the maximum of a row of the warp may have risen, and whether that of a row is odd."""

    rises: Boolean
    is_odd: Boolean


@cute.jit
def raise_maximum(x: ForwardContext, state: fragment_softmax.RowState, rows: cute.Tensor) -> Raised:
    """Brings the maximum up to date, if a score exceeds it by much or is NaN, or it is odd."""
    scale_log2, keeps = x.scalars.scale_log2, Boolean(True)
    highest = [highest_or_nan(rows, r) for r in range(fragments.ROWS)]
    for r in cutlass.range_constexpr(fragments.ROWS):
        limit = state.maximum[r] + fragment_softmax.tolerance_of(scale_log2)
        keeps = keeps & (highest[r] <= limit) & bias_product.fits(state.maximum[r] * scale_log2)
    rises, fit = Boolean(cute.arch.vote_any_sync(keeps == Boolean(False))), Boolean(True)
    if rises:
        for r in cutlass.range_constexpr(fragments.ROWS):
            maximum = cute.arch.fmax(state.maximum[r], quad_max_or_nan(highest[r]), nan=True)
            state.maximum[r] = maximum
            fit = fit & bias_product.fits(maximum * scale_log2)
    return Raised(rises, fit == Boolean(False))


@cute.jit
def highest_or_nan(rows: cute.Tensor, r: cutlass.Constexpr[int]) -> Float32:
    """The highest of this thread's scores of a row; NaN if there is one."""
    chains = [rows[r, i] for i in range(4)]
    for i in cutlass.range_constexpr(4, cute.size(rows, mode=[1])):
        chains[i % 4] = cute.arch.fmax(chains[i % 4], rows[r, i], nan=True)
    pairs = [cute.arch.fmax(chains[i], chains[i + 1], nan=True) for i in (0, 2)]
    return cute.arch.fmax(pairs[0], pairs[1], nan=True)


@cute.jit
def quad_max_or_nan(value: Float32) -> Float32:
    """Maximum over the four threads of a row; NaN if there is one."""
    value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1), nan=True)
    return cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=2), nan=True)


@cute.jit
def _raise_anew(
    x: ForwardContext, c: ForwardConsumer, rows: cute.Tensor, tops: cute.Tensor
) -> None:
    """Brings maximum and ``c.shrink`` up to date; ``tops`` are the scaled maxima.

    Of scores whose maximum does not fit, it is subtracted, which leaves a maximum of 0.
    """
    before, scale_log2, fit = c.shrink, x.scalars.scale_log2, Boolean(True)
    bases = cute.make_rmem_tensor_like(tops)
    for r in cutlass.range_constexpr(fragments.ROWS):
        highest = fragment_softmax.quad_max(fragment_softmax.row_max(rows, r))
        maximum = cute.arch.fmax(before[r], highest)
        c.state.maximum[r] = maximum
        bases[r] = Float32(0.0) if maximum == -Float32.inf else maximum
        tops[r] = bases[r] * scale_log2
        fit = fit & bias_product.fits(tops[r])
        c.shrink[r] = fragment_softmax.power(before[r], bases[r], scale_log2, True)
    if cute.arch.vote_any_sync(fit == Boolean(False)):
        for r in cutlass.range_constexpr(fragments.ROWS):
            tops[r] = Float32(0.0)
            for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                rows[r, i] = rows[r, i] - bases[r]


@cute.jit
def multiply_anew(variant: cutlass.Constexpr, c: ForwardConsumer, scored: Scored) -> None:
    """Replaces scores by ``Q K^T``."""
    shape = c.qk.partition_shape_C((WGMMA_ROWS, variant.config.block_kv))
    parts = cute.make_tensor(scored.scores.iterator, c.qk.make_fragment_C(shape).layout)
    rows, keys = c.q[None, None, None, scored.q_index], c.k[None, None, None, scored.k_full.index]
    fragments.multiply(c.qk, parts, rows, keys, False)
    warpgroup.wait_group(0)


@cute.jit
def add_elements(
    variant: cutlass.Constexpr, x: ForwardContext, c: ForwardConsumer, scored: Scored
) -> None:
    """Adds each element of the bias, times ``1 / scale``."""
    factor, scores = bias_product.factor_of(x.scalars.bias), scored.scores
    for i in cutlass.range_constexpr(chunks_of_stage(variant.key, variant.config)):
        chunk = bias_chunks.of_thread(x, c, chunk_of(variant, x, scored.k_full.count, i))
        groups = HALVES // 8
        bias_chunks.add_halves(scores, i * groups, groups, chunk, 1.0, factor, variant.dtype)
