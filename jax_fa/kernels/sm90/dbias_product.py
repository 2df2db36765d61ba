"""Steps of Hopper's gradient of a bias that the tensor core adds: ``bias_product.py`` tells how.

All steps of a tile have the same bias. So consumers read it once to learn whether the tile is odd;
then all its steps add the bias by elements.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from jax_fa.kernels import backward_rows, edges, fragments, primitives, softmax
from jax_fa.kernels.dbias_rows import add_products, exponentiate, hide
from jax_fa.kernels.sm90 import bias_chunks, bias_product
from jax_fa.kernels.sm90.bias_chunks import HALVES, UNIT_BYTES, UNIT_WORDS
from jax_fa.kernels.sm90.dbias_steps import HIDES, block_at, kind_at, stats_at, work_at
from jax_fa.kernels.sm90.dbias_work import DbiasConsumer, DbiasContext, DbiasPipes
from jax_fa.kernels.sm90.plan import WGMMA_ROWS


@cute.jit
def take_step(
    variant: cutlass.Constexpr,
    x: DbiasContext,
    c: DbiasConsumer,
    entry: Int32,
    first: Int32,
    pipes: DbiasPipes,
    is_odd: Boolean,
) -> DbiasPipes:
    """Adds dS of the step of an ``entry`` to the sums; ``first`` is the tile's first chunk."""
    qk, dov = pipes
    scores, dp = (c.s_mma.make_fragment_C(c.sums.shape) for _ in range(2))
    qk_full = qk.wait_and_advance()
    queries, index = c.q[None, None, None, qk_full.index], qk_full.index
    widths = primitives.Widths(*(cute.size(array, mode=[1]) for array in (x.arrays.k, x.arrays.v)))
    bias_product.multiply_halves(variant.dtype, scores, queries, x.smem.k, index, widths.qk)
    if is_odd == Boolean(False):
        multiply_bias(variant, x, c, scores, first)
    warpgroup.commit_group()
    dov_full = dov.wait_and_advance()
    place = (None, None, None, dov_full.index)
    fragments.multiply_filled(c.s_mma, dp, c.dout[place], c.v[place], widths.v)
    stats, hides = stats_at(x, c, entry), kind_at(x, entry) == HIDES
    warpgroup.wait_group(1)
    qk_full.release()
    if is_odd:
        add_elements(variant, x, c, scores, first)
    if hides:
        hide(variant, x, c, work_at(x, entry), scores, block_at(x, entry).key_block)
    exponentiate(x, stats, scores, False, is_limited=False)
    if is_odd:
        backward_rows.limit(scores)
    warpgroup.wait_group(0)
    dov_full.release()
    if hides:
        add_products(c, stats, scores, dp, True)
    else:
        add_products(c, stats, scores, dp, False)
    return DbiasPipes(qk, dov)


@cute.jit
def multiply_bias(
    variant: cutlass.Constexpr, x: DbiasContext, c: DbiasConsumer, scores: cute.Tensor, first: Int32
) -> None:
    """Issues ``scores += B F``."""
    chunks = [first + i for i in range(variant.config.half_chunks)]
    slabs = bias_product.slabs_of_rows(variant, x.smem.bias, chunks, c.index)
    mma = bias_product.make_mma(variant.dtype, OperandMajorMode.K)
    bias_product.multiply(mma, scores, slabs, x.smem.factors, x.smem.odd)


@cute.jit
def add_elements(
    variant: cutlass.Constexpr, x: DbiasContext, c: DbiasConsumer, scores: cute.Tensor, first: Int32
) -> None:
    """Adds each element of the bias, times ``1 / scale``."""
    factor = bias_product.factor_of(x.scalars.bias)
    for i in cutlass.range_constexpr(variant.config.half_chunks):
        chunk = bias_chunks.of_thread(x, c, first + i)
        groups = HALVES // 8
        bias_chunks.add_halves(scores, i * groups, groups, chunk, 1.0, factor, variant.dtype)


def largest_of(words: list[Int32], dtype: type) -> Float32:
    """The largest magnitude among pairs of 16-bit elements; NaN if one of them is."""
    kind = "bf16x2" if dtype is BFloat16 else "f16x2"
    code = f"{{ .reg .b32 own; abs.{kind} own, {{$r1}}; max.NaN.{kind} {{$w0}}, {{$r0}}, own; }}"
    largest = words[0]  # With its sign, which its magnitude overrules.
    for word in words:
        largest = cute.arch.inline_ptx(
            code, write_only_types=[Int32], read_only_args=[largest, word]
        )
    low, high = primitives.widen(largest, dtype)
    return cute.arch.fmax(low, high, nan=True)


@cute.jit
def is_odd_tile(
    variant: cutlass.Constexpr, x: DbiasContext, c: DbiasConsumer, first: Int32, number: Int32
) -> Boolean:
    """Whether an element of a consumer's part of a tile is NaN, or too large to be multiplied.

    ``number`` is that of an entry, and differs from one tile to the next.
    """
    units = WGMMA_ROWS * HALVES * 2 // UNIT_BYTES
    words: list[Int32] = []
    for i in cutlass.range_constexpr(variant.config.half_chunks):
        address = x.smem.bias[None, None, first + i].iterator.toint()
        address = address + (c.index * units + c.thread) * UNIT_BYTES
        # Each thread reads some of the consumer's units, whatever their swizzle.
        for j in cutlass.range_constexpr(units // edges.WARPGROUP):
            unit = bias_product.words_of_unit(address + j * edges.WARPGROUP * UNIT_BYTES)
            words.extend(unit[k] for k in range(UNIT_WORDS))
    holds = bias_product.fits(largest_of(words, variant.dtype) * softmax.LOG2_E) == Boolean(False)
    word = bias_product.word_of(x.smem.odd, c.index)
    is_odd = bias_product.any_of_consumer(variant, "tile0", c.index, word, number, holds)
    # HAZARD: for the next tile the word is written again, but not before all have read it.
    primitives.meet(variant, "tile0", c.index)
    return is_odd
