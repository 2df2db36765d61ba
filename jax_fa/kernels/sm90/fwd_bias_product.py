"""Bias of Hopper's forward, added by the tensor core: of 16 bits, where TMA can read it.

Scores are ``S = Q K^T + B F``: the block B of the bias, as it lies in shared memory, times a matrix
F with ``1 / scale`` on its diagonal; what that factor loses where it is rounded, a second product
adds. So consumers need no instruction per element. Of 16 columns of B, only 16 columns of scores
take anything, yet products have 64: ptxas lets products overlap only if all that add to an
accumulator have one shape, and narrower ones of Q and K would read Q too often.

HAZARD: 0 times an infinity, or times NaN, is NaN, which spreads to other columns of its row; and
scores that are not lowered by their maximum before they are scaled must not be too large. The
maximum of a row tells of either: it is NaN, or beyond ``MOST``. Such a block is *odd*. A consumer
multiplies its Q and K again and adds the bias element by element, which it does at once for the
blocks of the tile that follow: biases that hide pairs by -inf make most blocks odd.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from jax_fa.kernels import bias as biases
from jax_fa.kernels import edges, fragment_softmax, fragments, primitives
from jax_fa.kernels.forward_host import ForwardCall
from jax_fa.kernels.forward_work import Variant, Work
from jax_fa.kernels.sm90 import bias_chunks, fwd_bias_roles
from jax_fa.kernels.sm90.bias_chunks import HALVES, UNIT_BYTES, UNIT_WORDS, WORDS
from jax_fa.kernels.sm90.fwd_lists import find, state_at
from jax_fa.kernels.sm90.fwd_roles import Scored, mask_block
from jax_fa.kernels.sm90.fwd_work import ForwardConsumer, ForwardContext, thread_anew
from jax_fa.kernels.sm90.plan import WGMMA_ROWS
from jax_fa.kernels.sm90.plan_bias import FACTORS_BYTES, chunks_of_stage, num_words
from jax_fa.spec.config_sm90 import HopperForward

MMA_COLUMNS = 64
MMA_K = 16
MOST = 2.0**13
"""The largest scaled maximum of a row that is not odd. It is rounded, all powers of the row by the
same factor, which leaves probabilities of up to 1.0004."""


def layout(config: HopperForward) -> cute.ComposedLayout:
    """The ring in shared memory, (block_q, halves, chunks)."""
    chunks = config.bias_stages * config.block_kv // HALVES
    return bias_chunks.layout(config.block_q, chunks)


def num_halves(variant: Variant) -> int:
    """The shared memory of the bias, in halves: the ring, factors, and words."""
    return cute.cosize(layout(variant.config)) + FACTORS_BYTES // 2 + 2 * num_words(variant.config)


def describe(variant: Variant, call: ForwardCall) -> primitives.TmaArray:
    """Describes the bias to TMA."""
    chunk = cute.slice_(layout(variant.config), (None, None, 0))
    return bias_chunks.describe(call.scalars.bias, call.queries.length, chunk)


def _behind_ring(variant: Variant, x: ForwardContext) -> Int32:
    """The address of the factors in shared memory."""
    words = cute.recast_ptr(x.smem.bias.iterator, dtype=Int32).toint()
    return words + 2 * cute.cosize(layout(variant.config))


def _factors(variant: Variant, x: ForwardContext) -> cute.Tensor:
    """F, (64 columns of scores, 16 of the bias, 8): which of them the 16 are, and what is lost."""
    shape = (MMA_COLUMNS, MMA_K, 2 * MMA_COLUMNS // MMA_K)
    ordered, address = primitives.smem_layout(variant.dtype, shape), _behind_ring(variant, x)
    pointer = cute.make_ptr(variant.dtype, address, cute.AddressSpace.smem, assumed_align=1024)
    return cute.make_tensor(cute.recast_ptr(pointer, ordered.inner), ordered.outer)


def _words(variant: Variant, x: ForwardContext) -> cute.Pointer:
    """Words: whether ``1 / scale`` had to be rounded; two of each consumer: ``_place_of``."""
    address = _behind_ring(variant, x) + FACTORS_BYTES
    return cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4)


def _word(variant: Variant, x: ForwardContext, place: Int32) -> cute.Tensor:
    """The word at a ``place``."""
    return cute.make_tensor(_words(variant, x) + place, cute.make_layout(1))


def _place_of(c: ForwardConsumer, number: Int32) -> Int32:
    """The place of a consumer's word on block ``number``, which is that number if it is odd.

    HAZARD: while a warp writes it, others may still read that of the block before.
    """
    return 1 + 2 * c.index + (number & 1)


def _blocks(variant: Variant, x: ForwardContext) -> cute.Tensor:
    """What is multiplied, (64 rows, 64 columns, chunks * consumers)."""
    config = variant.config
    chunks = config.bias_stages * config.block_kv // HALVES
    shape = (WGMMA_ROWS, HALVES, chunks * config.num_consumers)
    ordered = primitives.smem_layout(variant.dtype, shape)
    pointer = cute.recast_ptr(x.smem.bias.iterator, ordered.inner, dtype=variant.dtype)
    return cute.make_tensor(pointer, ordered.outer)


@cute.jit
def load_or_find(variant: cutlass.Constexpr, x: ForwardContext) -> None:
    """The role of a warp that loads no queries, keys and values."""
    loader = variant.plan.role("load_bias").warps.start
    if cute.arch.thread_idx()[0] // edges.WARP == loader:
        _write_factors(variant, x)
        fwd_bias_roles.load(variant, x)
    elif const_expr(variant.lists_ahead):
        find(variant, x)


def factor_of(bias: biases.Bias) -> Float32:
    """The factor from an element to what it adds to a score that is not scaled yet."""
    return 1.0 / bias.scale


@cute.jit
def _write_factors(variant: cutlass.Constexpr, x: ForwardContext) -> None:
    """Writes the factors, and whether they are rounded. One warp, before its first load.

    Consumers read them once they have passed a barrier of the ring: it arrives there for each load.
    """
    start, lane = _behind_ring(variant, x), cute.arch.lane_idx()
    zeros = cute.make_rmem_tensor((UNIT_WORDS,), Int32)
    zeros.fill(0)
    for i in cutlass.range(lane, FACTORS_BYTES // UNIT_BYTES, edges.WARP, unroll=1):
        address = start + i * UNIT_BYTES
        unit = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=UNIT_BYTES)
        cute.autovec_copy(zeros, cute.make_tensor(unit, zeros.layout))
    cute.arch.sync_warp()
    factor = factor_of(x.scalars.bias)
    rounded = factor.to(variant.dtype)
    lost = factor - rounded.to(Float32)
    factors = _factors(variant, x)
    for i in cutlass.range_constexpr(MMA_COLUMNS // edges.WARP):
        column = lane + i * edges.WARP
        part = column // MMA_K
        factors[column, column % MMA_K, part] = rounded
        factors[column, column % MMA_K, part + MMA_COLUMNS // MMA_K] = lost.to(variant.dtype)
    if lane < num_words(variant.config):
        word = _word(variant, x, lane)
        word[0] = Int32(lost != 0.0) if lane == 0 else Int32(-1)
    # HAZARD: products read through the async proxy.
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()


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
        is_odd = _word(variant, x, _place_of(c, number - 1))[0] == number - 1
    if is_odd == Boolean(False):
        multiply_by(variant, x, c, scores, number, 0)
        if _word(variant, x, Int32(0))[0] != 0:
            multiply_by(variant, x, c, scores, number, MMA_COLUMNS // MMA_K)
    warpgroup.commit_group()
    return is_odd


@cute.jit
def multiply_by(
    variant: cutlass.Constexpr,
    x: ForwardContext,
    c: ForwardConsumer,
    scores: cute.Tensor,
    number: Int32,
    first: cutlass.Constexpr[int],
) -> None:
    """Issues the product with the factors from the ``first`` on."""
    mma = fragments.make_mma(variant.dtype, MMA_COLUMNS, OperandMajorMode.K, a_in_registers=False)
    part, in_stage = mma.get_slice(0), chunks_of_stage(variant.key, variant.config)
    a = mma.make_fragment_A(part.partition_A(_blocks(variant, x)))
    b = mma.make_fragment_B(part.partition_B(_factors(variant, x)))
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    for i in cutlass.range_constexpr(in_stage):
        at = chunk_of(variant, x, number, i) * variant.config.num_consumers + c.index
        columns = scores.iterator + i * (MMA_COLUMNS // 2)
        own = cute.make_tensor(columns, cute.make_layout(((2, 2, MMA_COLUMNS // 8), 1, 1)))
        for k in cutlass.range_constexpr(MMA_COLUMNS // MMA_K):
            cute.gemm(atom, own, a[None, None, k, at], b[None, None, 0, first + k], own)


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
) -> None:
    """Masks a block's scores if it ``hides`` keys, and exponentiates them; releases keys and bias.

    Until the maximum is final, ``c.shrink`` holds the one before.
    """
    merged = cute.make_layout(((2, 2, variant.config.block_kv // 8), 1, 1))
    scored = scored._replace(scores=cute.make_tensor(scored.scores.iterator, merged))
    rows, state, scale_log2 = fragments.by_row(scored.scores), c.state, x.scalars.scale_log2
    before, fits = c.shrink, Boolean(True)
    for r in cutlass.range_constexpr(fragments.ROWS):
        before[r] = state.maximum[r]
        state.maximum[r] = cute.arch.fmax(before[r], highest_or_nan(rows, r), nan=True)
        top = state.maximum[r] * scale_log2
        fits = fits & (cute.arch.fmax(top, -top, nan=True) <= MOST)
    holds = scored.is_odd | (fits == Boolean(False))
    is_odd = any_of_consumer(variant, x, c, scored.k_full.count, holds)
    if is_odd:
        if scored.is_odd == Boolean(False):
            multiply_anew(variant, c, scored)
        add_elements(variant, x, thread_anew(variant, c), scored)
    # HAZARD: one lane releases for the warp, so all its lanes must have read before.
    cute.arch.sync_warp()
    scored.k_full.release()
    x.chunks.consumer_release(state_at(x.chunks, scored.k_full.count))
    if hides:
        mask_block(variant, x, c, work, scored.scores, block)
    are_lowered = is_odd | hides
    if are_lowered:
        _lower(x, c, rows)
    else:
        for r in cutlass.range_constexpr(fragments.ROWS):
            top = state.maximum[r] * scale_log2
            c.shrink[r] = fragment_softmax.power(before[r], top, scale_log2, False)
    for r in cutlass.range_constexpr(fragments.ROWS):
        top, sums = state.maximum[r] * scale_log2, [Float32(0.0) for _ in range(4)]
        top = Float32(0.0) if are_lowered else top
        for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            rows[r, i] = fragment_softmax.power(rows[r, i], top, scale_log2, False)
            sums[i % 4] = sums[i % 4] + rows[r, i]
        total = (sums[0] + sums[1]) + (sums[2] + sums[3])
        state.total[r] = state.total[r] * c.shrink[r] + total


@cute.jit
def highest_or_nan(rows: cute.Tensor, r: cutlass.Constexpr[int]) -> Float32:
    """The highest score of a row, in all four threads that share it; NaN if there is one."""
    chains = [rows[r, i] for i in range(4)]
    for i in cutlass.range_constexpr(4, cute.size(rows, mode=[1])):
        chains[i % 4] = cute.arch.fmax(chains[i % 4], rows[r, i], nan=True)
    pairs = [cute.arch.fmax(chains[i], chains[i + 1], nan=True) for i in (0, 2)]
    value = cute.arch.fmax(pairs[0], pairs[1], nan=True)
    value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1), nan=True)
    return cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=2), nan=True)


@cute.jit
def _lower(x: ForwardContext, c: ForwardConsumer, rows: cute.Tensor) -> None:
    """Brings maximum and ``c.shrink`` up to date, and lowers scores by the maximum."""
    for r in cutlass.range_constexpr(fragments.ROWS):
        highest = fragment_softmax.quad_max(fragment_softmax.row_max(rows, r))
        maximum = cute.arch.fmax(c.shrink[r], highest)
        base = Float32(0.0) if maximum == -Float32.inf else maximum
        c.shrink[r] = fragment_softmax.power(c.shrink[r], base, x.scalars.scale_log2, True)
        c.state.maximum[r] = maximum
        for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            rows[r, i] = rows[r, i] - base


@cute.jit
def any_of_consumer(
    variant: cutlass.Constexpr, x: ForwardContext, c: ForwardConsumer, number: Int32, holds: Boolean
) -> Boolean:
    """Whether something ``holds`` for any thread of a consumer, asked once for block ``number``."""
    told = _word(variant, x, _place_of(c, number))
    if cute.arch.vote_any_sync(holds):
        with cute.arch.elect_one():
            told[0] = number
    primitives.meet(variant, "out0", c.index)
    return told[0] == number


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
    factor, scores = factor_of(x.scalars.bias), scored.scores
    for i in cutlass.range_constexpr(chunks_of_stage(variant.key, variant.config)):
        chunk = bias_chunks.of_thread(x, c, chunk_of(variant, x, scored.k_full.count, i))
        start = chunk.start + cute.arch.lane_idx() % 4
        for g in cutlass.range_constexpr(HALVES // 8):
            for r in cutlass.range_constexpr(fragments.ROWS):
                word = chunk.words[(start ^ (g * UNIT_WORDS)) + r * 8 * WORDS]
                pair, first = primitives.widen(word, variant.dtype), i * HALVES // 2 + 4 * g + 2 * r
                for e in cutlass.range_constexpr(2):
                    scores[first + e] = scores[first + e] + pair[e] * factor
