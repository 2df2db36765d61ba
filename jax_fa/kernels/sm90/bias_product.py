"""A bias of 16 bits that the tensor core adds, in Hopper's forward and backward.

Scores are ``S = Q K^T + B F``: the block B of the bias, as it lies in shared memory, times a matrix
F with ``1 / scale`` on its diagonal; what that factor loses where it is rounded, a second product
adds. So consumers need no instruction per element. A slab, 16 columns of B, adds to 16 columns of
scores only, yet products have 64: ptxas lets products overlap only if all that add to an
accumulator have one shape, and narrower ones of Q and K would read Q too often. Where rows of
scores are keys, S is transposed, and so is B.

HAZARD: 0 times an infinity, or times NaN, is NaN, which spreads to other columns of its row; and
scores that are not lowered by their maximum before they are scaled must not be too large. Blocks of
which either is true are *odd*: consumers multiply their Q and K again and add the bias by elements.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from jax_fa.kernels import edges, fragments, primitives
from jax_fa.kernels.bias import Bias
from jax_fa.kernels.sm90.bias_chunks import HALVES, UNIT_BYTES, UNIT_WORDS
from jax_fa.kernels.sm90.plan import WGMMA_ROWS
from jax_fa.kernels.sm90.plan_bias import FACTORS_BYTES

COLUMNS = 64
"""Of scores, that one product computes."""
SLAB = 16
SLABS = COLUMNS // SLAB
MOST = 2.0**13
"""The largest scaled maximum of a row that is not odd. It is rounded, all powers of the row by the
same factor, which leaves probabilities of up to 1.0004."""
TWO = 0x40000000
"""A bit of float32 that is set in what is 2 or more, or NaN."""


def factor_of(bias: Bias) -> Float32:
    """The factor from an element to what it adds to a score that is not scaled yet."""
    return 1.0 / bias.scale


def fits(top: Float32) -> Boolean:
    """Whether a scaled maximum is a number, and no larger than ``MOST``."""
    return cute.arch.fmax(top, -top, nan=True) <= MOST


def factors_at(dtype: type, address: Int32) -> cute.Tensor:
    """F, (64 columns of scores, 16 of a slab, 8): of each slab the factor, then what is lost."""
    ordered = primitives.smem_layout(dtype, (COLUMNS, SLAB, 2 * SLABS))
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=1024)
    return cute.make_tensor(cute.recast_ptr(pointer, ordered.inner), ordered.outer)


def _unit_at(address: Int32) -> cute.Tensor:
    """Four words of shared memory."""
    unit = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=UNIT_BYTES)
    return cute.make_tensor(unit, cute.make_layout((UNIT_WORDS,)))


@cute.jit
def words_of_unit(address: Int32) -> cute.Tensor:
    """Four words of shared memory, in registers."""
    words = cute.make_rmem_tensor((UNIT_WORDS,), Int32)
    cute.autovec_copy(_unit_at(address), words)
    return words


@cute.jit
def write_factors(factors: cute.Tensor, words: cute.Tensor, bias: Bias) -> None:
    """Writes F, and to the first of ``words`` whether it is rounded, to others -1. One warp.

    It does so before its first load of a bias: consumers read both once they have passed a barrier
    of the ring, at which it arrives for each load.
    """
    start, lane, dtype = factors.iterator.toint(), cute.arch.lane_idx(), factors.element_type
    zeros = cute.make_rmem_tensor((UNIT_WORDS,), Int32)
    zeros.fill(0)
    for i in cutlass.range(lane, FACTORS_BYTES // UNIT_BYTES, edges.WARP, unroll=1):
        cute.autovec_copy(zeros, _unit_at(start + i * UNIT_BYTES))
    cute.arch.sync_warp()
    factor = factor_of(bias)
    rounded = factor.to(dtype)
    lost = factor - rounded.to(Float32)
    for i in cutlass.range_constexpr(COLUMNS // edges.WARP):
        column = lane + i * edges.WARP
        factors[column, column % SLAB, column // SLAB] = rounded
        factors[column, column % SLAB, column // SLAB + SLABS] = lost.to(dtype)
    if lane < cute.size(words):
        words[lane] = Int32(lost != 0.0) if lane == 0 else Int32(-1)
    # HAZARD: products read through the async proxy.
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()


def make_mma(dtype: type, major: OperandMajorMode) -> Any:
    """The product of a bias that lies in shared memory with its rows ``major`` or not."""
    return fragments.make_mma(dtype, COLUMNS, OperandMajorMode.K, False, major)


def slabs_of_rows(
    variant: Any, ring: cute.Tensor, chunks: list[Int32], consumer: Int32
) -> list[cute.Tensor]:
    """The slabs of a consumer's 64 rows of ``chunks`` of a ring, (block_q, 64, chunks)."""
    consumers = variant.config.num_consumers
    shape = (WGMMA_ROWS, HALVES, cute.size(ring, mode=[2]) * consumers)
    ordered = primitives.smem_layout(variant.dtype, shape)
    pointer = cute.recast_ptr(ring.iterator, ordered.inner, dtype=variant.dtype)
    mma = make_mma(variant.dtype, OperandMajorMode.K)
    blocks = cute.make_tensor(pointer, ordered.outer)
    a = mma.make_fragment_A(mma.get_slice(0).partition_A(blocks))
    return [a[None, None, None, chunk * consumers + consumer] for chunk in chunks]


@cute.jit
def multiply(
    mma: cutlass.Constexpr,
    scores: cute.Tensor,
    slabs: list[cute.Tensor],
    factors: cute.Tensor,
    words: cute.Tensor,
) -> None:
    """Issues ``scores += B F``; ``slabs`` are A operands, of 64 columns of scores each."""
    issue(mma, scores, slabs, factors, 0)
    if words[0] != 0:
        issue(mma, scores, slabs, factors, SLABS)


def issue(
    mma: Any, scores: cute.Tensor, slabs: list[cute.Tensor], factors: cute.Tensor, first: int
) -> None:
    """Issues the product with the factors from the ``first`` on."""
    b = mma.make_fragment_B(mma.get_slice(0).partition_B(factors))
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    for i, a in enumerate(slabs):
        columns = scores.iterator + i * (COLUMNS // 2)
        own = cute.make_tensor(columns, cute.make_layout(((2, 2, COLUMNS // 8), 1, 1)))
        for k in range(SLABS):
            cute.gemm(atom, own, a[None, None, k], b[None, None, 0, first + k], own)


@cute.jit
def multiply_halves(
    dtype: cutlass.Constexpr,
    scores: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    index: Int32,
    columns: Int32,
) -> None:
    """Issues ``scores = A B^T``, by products of the shape of those of a bias.

    Args:
        dtype: the element type.
        scores: accumulator of 64 rows.
        a: A operand.
        b: ring in shared memory, (columns of scores, K, stages).
        index: its stage.
        columns: of K, that heads have.
    """
    mma = make_mma(dtype, OperandMajorMode.K)
    shape = mma.partition_shape_C((WGMMA_ROWS, cute.size(b, mode=[0])))
    parts = cute.make_tensor(scores.iterator, mma.make_fragment_C(shape).layout)
    operand = mma.make_fragment_B(mma.get_slice(0).partition_B(b))
    fragments.multiply_filled(mma, parts, a, operand[None, None, None, index], columns)


@cute.jit
def any_of_consumer(
    variant: cutlass.Constexpr,
    barrier: cutlass.Constexpr[str],
    consumer: Int32,
    word: cute.Tensor,
    number: Int32,
    holds: Boolean,
) -> Boolean:
    """Whether something ``holds`` for any thread of a consumer, which meets at a ``barrier``.

    Then its ``word`` is the ``number`` of what is asked about. HAZARD: it must not be written for
    another number before all warps have read it.
    """
    if cute.arch.vote_any_sync(holds):
        tell(word, number)
    primitives.meet(variant, barrier, consumer)
    return word[0] == number


def word_of(words: cute.Tensor, consumer: Int32) -> cute.Tensor:
    """The word of a consumer that has one of ``words``, behind the first."""
    return cute.make_tensor(words.iterator + (1 + consumer), cute.make_layout(1))


@cute.jit
def tell(word: cute.Tensor, number: Int32) -> None:
    """Writes a ``word``. Called by whole warps."""
    with cute.arch.elect_one():
        word[0] = number


@cute.jit
def reaches_two(powers: cute.Tensor) -> Boolean:
    """Whether one of a thread's powers is 2 or more, or NaN."""
    words = cute.recast_tensor(powers, Int32)
    bits = words[0]
    for i in cutlass.range_constexpr(1, cute.size(words)):
        bits = bits | words[i]
    return (bits & TWO) != 0
