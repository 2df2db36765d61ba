"""Merges the results of several CTAs for the same query rows, each over keys of its own.

``lse`` is the log of the sum of all denominators, and ``out`` is the sum of ``exp(lse_i - lse)
out_i`` over the parts i (Dao et al., "Flash-Decoding for long-context inference", 2023). A sink is
already in one of the denominators. A part in which a row sees nothing has lse_i = -inf, and its
out_i is ignored. The code is plain and runs on any GPU: the parts come from the L2 cache.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from jax_fa.kernels import edges, softmax
from jax_fa.spec.band import ceil_div

WARPS = 4
"""Warps of a CTA. Each sums every fourth part of one row."""
FLOATS = 4
"""Floats of a 16-byte access."""


class Results(NamedTuple):
    """Out and lse of all query rows and heads, concatenated; parts have a last mode P."""

    out: cute.Tensor  # (4, Dv / 4, rows[, P])
    lse: cute.Tensor  # (rows[, P])


class Pointers(NamedTuple):
    """Where out and lse are."""

    out: cute.Pointer
    lse: cute.Pointer


@cute.jit
def merge_parts(variant: cutlass.Constexpr, call: Any) -> None:
    """Merges the parts that a forward wrote, if any; ``call`` is its ``ForwardCall``."""
    parts, whole = Pointers(call.out_parts, call.lse_parts), Pointers(call.out, call.lse)
    batch, length, heads = call.queries
    num_splits = call.scalars.num_splits
    if num_splits > 1:
        rows = batch * length * heads
        merge(variant, parts, whole, rows, call.widths.v, num_splits, call.stream)


def merge(
    variant: Any,
    parts: Pointers,
    whole: Pointers,
    rows: Int32,
    width: Int32,
    num_parts: Int32,
    stream: cuda.CUstream,
) -> None:
    """Launches the kernel.

    Args:
        variant: the variant that wrote the parts.
        parts: float32 out [P, rows, Dv] and lse [P, rows].
        whole: out [rows, Dv] and float32 lse [rows].
        rows: query rows of all heads.
        width: Dv.
        num_parts: P.
        stream: the stream to launch on.
    """
    quads = width // FLOATS
    of_part = rows.to(Int64)
    part_results = Results(
        cute.make_tensor(
            parts.out,
            cute.make_layout(
                (FLOATS, quads, rows, num_parts), stride=(1, FLOATS, width, of_part * width)
            ),
        ),
        cute.make_tensor(parts.lse, cute.make_layout((rows, num_parts), stride=(1, of_part))),
    )
    results = Results(
        cute.make_tensor(
            whole.out, cute.make_layout((FLOATS, quads, rows), stride=(1, FLOATS, width))
        ),
        cute.make_tensor(whole.lse, cute.make_layout((rows,))),
    )
    kernel(variant.key.value_dim // FLOATS, part_results, results).launch(
        grid=(rows, 1, 1), block=(WARPS * edges.WARP, 1, 1), stream=stream
    )


@cute.kernel
def kernel(most: cutlass.Constexpr[int], parts: Results, whole: Results):
    """Merges one row of one head: first its lse, in every warp, then the weighted sum of out.

    ``most`` is the largest number of groups of four columns that a row may have.
    """
    row, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    quads = cute.size(whole.out, mode=[1])
    weights = weights_of(parts.lse, row)
    sums = SmemAllocator().allocate_tensor(
        Float32, cute.make_layout((FLOATS, most, WARPS)), byte_alignment=16
    )
    add_parts(parts, weights, row, sums)
    cute.arch.sync_threads()
    for j in cutlass.range_constexpr(ceil_div(most, WARPS * edges.WARP)):
        quad = thread + j * WARPS * edges.WARP
        if quad < quads:
            four = cute.make_rmem_tensor((FLOATS,), Float32)
            four.fill(0.0)
            for i in cutlass.range_constexpr(WARPS):
                four.store(four.load() + sums[None, quad, i].load())
            whole.out[None, quad, row].store(
                (four.load() * weights.factor).to(whole.out.element_type)
            )
    if thread == 0:
        whole.lse[row] = weights.lse


class Weights(NamedTuple):
    """The weight of part i of a row is ``2 ** ((lse_i - reference) * log2 e) * factor``."""

    reference: Float32
    factor: Float32
    lse: Float32


@cute.jit
def weights_of(lse: cute.Tensor, row: Int32) -> Weights:
    """Returns the weights of a row's parts; ``lse`` is (rows, P). A warp reads 32 at a time."""
    lane, num_parts = cute.arch.lane_idx(), cute.size(lse, mode=[1])
    maximum = -Float32.inf
    for i in cutlass.range(lane, num_parts, edges.WARP, unroll=1):
        maximum = cute.arch.fmax(maximum, lse[row, i])
    for step in cutlass.range_constexpr(5):
        maximum = cute.arch.fmax(maximum, cute.arch.shuffle_sync_bfly(maximum, offset=1 << step))
    # (-inf) - (-inf) would be NaN; relative to 0, a part without keys has weight 0.
    reference = Float32(0.0) if maximum == -Float32.inf else maximum
    total = Float32(0.0)
    for i in cutlass.range(lane, num_parts, edges.WARP, unroll=1):
        total += _weight(lse[row, i], reference)
    for step in cutlass.range_constexpr(5):
        total += cute.arch.shuffle_sync_bfly(total, offset=1 << step)
    is_empty = total == 0.0
    merged = reference + cute.math.log2(total, fastmath=True) * softmax.LN_2
    return Weights(
        reference,
        Float32(0.0) if is_empty else cute.arch.rcp_approx(total),
        -Float32.inf if is_empty else merged,
    )


def _weight(lse: Float32, reference: Float32) -> Float32:
    return cute.math.exp2((lse - reference) * softmax.LOG2_E, fastmath=True)


@cute.jit
def add_parts(parts: Results, weights: Weights, row: Int32, sums: cute.Tensor):
    """Writes the weighted sum of every fourth part of a row to this warp's share of ``sums``."""
    warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
    quads, num_parts = cute.size(parts.out, mode=[1]), cute.size(parts.lse, mode=[1])
    for j in cutlass.range_constexpr(ceil_div(cute.size(sums, mode=[1]), edges.WARP)):
        quad = lane + j * edges.WARP
        if quad < quads:
            four = cute.make_rmem_tensor((FLOATS,), Float32)
            part = cute.make_rmem_tensor((FLOATS,), Float32)
            four.fill(0.0)
            for i in cutlass.range(warp, num_parts, WARPS, unroll=4):
                lse = parts.lse[row, i]
                weight = _weight(lse, weights.reference)
                cute.autovec_copy(parts.out[None, quad, row, i], part)
                for k in cutlass.range_constexpr(FLOATS):
                    # Where a row sees nothing, out_i may be NaN.
                    added = Float32(0.0) if lse == -Float32.inf else weight * part[k]
                    four[k] = four[k] + added
            sums[None, quad, warp].store(four.load())
