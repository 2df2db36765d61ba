"""What the forward kernels of all architectures share: bundles, and what there is to do for a tile.

A variant is anything with ``key``, ``config``, ``plan``, ``dtype`` and ``is_general``; a context
``x`` anything with ``arrays``, ``scalars``, ``order``, ``smem`` and ``tma``, and, if its config
``packs_heads``, ``packing`` and ``granules``.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from jax_fa.band import UNBOUNDED, Band, Blocks, Window, kv_blocks, part_of
from jax_fa.config import KernelKey
from jax_fa.kernels import abi, edges, primitives, segments, tiles
from jax_fa.kernels.whole import whole_blocks


class Variant(NamedTuple):
    """What is fixed at compile time."""

    key: KernelKey
    config: Any
    plan: edges.Plan

    @property
    def is_general(self) -> bool:
        """Everything that can hide a key may be there."""
        return self.key.mask == "general"

    @property
    def is_split(self) -> bool:
        """Several CTAs share the keys of a tile, and write parts of its result."""
        return self.key.is_split

    @property
    def dtype(self) -> type:
        """Element type of the arrays."""
        return primitives.DTYPES[self.key.dtype]


class Tma(NamedTuple):
    """TMA descriptors."""

    q: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom
    out: cute.CopyAtom


class Arrays(NamedTuple):
    """Global arrays; all but the last two as TMA sees them.

    Where keys are split, the last two are the parts, in float32, with as many times B batches.
    """

    q: cute.Tensor  # (T, D, N, B)
    k: cute.Tensor  # (S, D, K, B)
    v: cute.Tensor  # (S, Dv, K, B)
    out: cute.Tensor  # (T, Dv, N, B)
    out_rows: cute.Tensor  # (T, Dv, N, B)
    lse: cute.Tensor  # (T, N, B)


class Granules(NamedTuple):
    """The query array for TMA to copy ``abi.GRANULE`` rows at a time."""

    tma: cute.CopyAtom
    q: cute.Tensor  # (T, D, N, B)


class Scalars(NamedTuple):
    """Run-time values that every tile shares."""

    sequences: tiles.Sequences
    window_left: Int32
    window_right: Int32
    bottom_right: Int32
    cap_inner_log2: Float32  # factor of a score inside the tanh; see softmax.cap
    scale_log2: Float32
    scale_share: Float32  # scale_log2 / softmax.SPAN
    sinks: cute.Pointer
    q_segments: cute.Pointer
    kv_segments: cute.Pointer
    num_splits: Int32  # parts of the keys; of no meaning where they are not split


class Work(NamedTuple):
    """A tile with all that follows from it; of its key blocks, those of part ``split``."""

    tile: tiles.Tile
    span: tiles.Span
    window: Window
    blocks: Blocks
    split: Int32


@cute.jit
def tile_at(variant: cutlass.Constexpr, x: Any, slot: Int32) -> tiles.Tile:
    """The tile at a position of this CTA's list."""
    if const_expr(not variant.config.is_persistent):
        tile = tiles.one_per_cta(x.order, slot)
    elif const_expr(variant.plan.ctas > 1):
        tile = tiles.cluster_order(x.order, slot, variant.plan.ctas)
    elif const_expr(variant.key.mask == "full"):
        tile = tiles.row_order(x.order, slot)
    elif const_expr(variant.key.mask == "causal"):
        tile = tiles.longest_first(x.order, slot)
    else:
        tile = tiles.longest_first(x.order, slot)
        if tiles.is_present(x.scalars.q_segments):
            tile = tiles.one_per_cta(x.order, slot)
    return tile


def positions_of_tile(variant: Variant, x: Any) -> Int32 | int:
    """Query positions of a tile: its rows, unless heads share them."""
    return x.packing.positions if variant.config.packs_heads else variant.config.block_q


@cute.jit
def span_of(variant: cutlass.Constexpr, x: Any, tile: tiles.Tile) -> tiles.Span:
    """The sequence of a tile. Called by whole warps."""
    sequences, zero = x.scalars.sequences, Int32(0)
    q_len, kv_len = sequences.q_len, sequences.kv_len
    positions = positions_of_tile(variant, x)
    first_row = tile.q_block * positions
    span = tiles.Span(tile.batch, zero, zero, q_len, q_len, kv_len, zero, first_row)
    if const_expr(variant.is_general):
        span = tiles.locate(sequences, tile, positions)
    return span


def band_of(variant: Variant, x: Any, span: tiles.Span) -> tuple[Window, Blocks]:
    """The keys that the rows of a tile see, and the blocks that hold them."""
    scalars, config = x.scalars, variant.config
    left, right = scalars.window_left, scalars.window_right
    if not variant.is_general:
        left, right = UNBOUNDED, 0 if variant.key.mask == "causal" else UNBOUNDED
    aligned = Band(alignment="bottom_right").shift(span.q_len, span.kv_len)
    shift = span.q_offset + scalars.bottom_right * aligned
    window = Window(shift, left, right, span.q_len, span.kv_len)
    blocks = kv_blocks(
        window,
        span.first_row,
        positions_of_tile(variant, x),
        config.block_kv,
        minimum=cutlass.min,
        maximum=cutlass.max,
    )
    return window, blocks


@cute.jit
def work_on(variant: cutlass.Constexpr, x: Any, tile: tiles.Tile) -> Work:
    """What there is to do for ``tile``. Called by whole warps."""
    block_kv, ids = variant.config.block_kv, x.scalars.q_segments
    span = span_of(variant, x, tile)
    window, blocks = band_of(variant, x, span)
    start, full_start, full_end, end = blocks
    if const_expr(variant.is_general):
        if tiles.is_present(ids):
            first_seen, end_seen = segments.visited(x.smem.segment_keys, block_kv)
            start, end = cutlass.max(start, first_seen), cutlass.min(end, end_seen)
    blocks = Blocks(start, full_start, full_end, end)
    blocks = whole_blocks(variant, blocks, ids, x.smem.segment_keys, block_kv)
    start, full_start, full_end, end = blocks
    split = Int32(0)
    if const_expr(variant.is_split):
        # The order counts every part of a tile as a head of its own.
        split = tile.q_head % x.scalars.num_splits
        tile = tile._replace(q_head=tile.q_head // x.scalars.num_splits)
        start, full_start, full_end, end = part_of(
            Blocks(start, full_start, full_end, end),
            split,
            x.scalars.num_splits,
            minimum=cutlass.min,
            maximum=cutlass.max,
        )
    # A tile without keys works on one block, all of it masked: no path of its own.
    end = cutlass.max(end, start + 1)
    return Work(tile, span, window, Blocks(start, full_start, full_end, end), split)


@cute.jit
def sink_of(variant: cutlass.Constexpr, x: Any, work: Work, q_head: Int32) -> Float32:
    """The sink of a query head, -inf for none; the first part of the keys alone counts it."""
    sink = -Float32.inf
    if tiles.is_present(x.scalars.sinks):
        num_q_heads = cute.size(x.arrays.lse, mode=[1])
        sink = tiles.element(x.scalars.sinks, work.span.sequence * num_q_heads + q_head)
    if const_expr(variant.is_split):
        sink = sink if work.split == 0 else -Float32.inf
    return sink


def batch_of_part(variant: Variant, x: Any, work: Work) -> Int32:
    """Where the last mode of ``Arrays.out_rows`` and ``Arrays.lse`` has the tile's results."""
    if not variant.is_split:
        return work.tile.batch
    num_batches = cute.size(x.arrays.k, mode=[3])
    return work.tile.batch + work.split * num_batches


@cute.jit
def find_segment_keys(variant: cutlass.Constexpr, x: Any) -> None:
    """Narrows the tile's keys by segments, into ``smem.segment_keys``. The whole CTA calls."""
    scalars, sequences, config = x.scalars, x.scalars.sequences, variant.config
    tile = tile_at(variant, x, Int32(0))
    span = span_of(variant, x, tile)
    _, blocks = band_of(variant, x, span)
    rows = scalars.q_segments + (tile.batch * sequences.q_len + span.q_start)
    keys = scalars.kv_segments + (tile.batch * sequences.kv_len + span.kv_start)
    last = span.q_slot - 1
    if const_expr(config.packs_heads):
        last = cutlass.min(last, span.first_row + x.packing.positions - 1)
    wanted = segments.lowest_and_highest(rows, span.first_row, last, config.block_q)
    end = cutlass.min(blocks.end * config.block_kv, span.kv_len)
    searched = (blocks.start * config.block_kv, end)
    segments.scan(x.smem.segment_keys, keys, searched, wanted, variant.plan.threads)


def row_of_tile(variant: Variant, x: Any, work: Work, row: Int32) -> tiles.RowAt:
    """What row ``row`` of a tile is about."""
    if variant.config.packs_heads:
        return tiles.row_at(x.packing, work.tile, work.span.first_row, row)
    return tiles.RowAt(work.span.first_row + row, work.tile.q_head, Boolean(True))


@cute.jit
def load_granules(
    variant: cutlass.Constexpr, x: Any, work: Work, at: tuple, barrier: cute.Pointer
) -> None:
    """A stage of queries of several heads, piece by piece; beyond the array TMA fills with zeros.

    ``at`` is (first row of the tile, stage).
    """
    first, stage = at
    sQ = cute.make_tensor(x.smem.q.iterator, primitives.by_granules(x.smem.q.layout))
    shape = (abi.GRANULE, variant.key.head_dim)
    for g in cutlass.range(cute.size(sQ, mode=[2]), unroll=1):
        row = tiles.row_at(x.packing, work.tile, work.span.first_row, first + g * abi.GRANULE)
        rows = x.granules.q[None, None, row.head, work.tile.batch]
        rows = cute.domain_offset((work.span.q_start + row.position, 0), rows)
        target, source = primitives.tma_views(
            x.granules.tma, sQ, cute.local_tile(rows, shape, (None, 0))
        )
        cute.copy(x.granules.tma, source[None, 0], target[None, g, stage], tma_bar_ptr=barrier)


@cute.jit
def load_partial_v(
    variant: cutlass.Constexpr, x: Any, copied: tuple, used: Int32, slot: Any, phase: Int32
) -> None:
    """A stage of values, of which only the first ``used`` rows are the sequence's.

    The others become zero: P is 0 for absent keys, but 0 * NaN is not. The detour over a barrier of
    its own is taken for the newest block of a tile at most.
    """
    rows = cute.size(x.smem.v, mode=[0])
    size_bytes = rows * variant.key.value_dim * variant.dtype.width // 8
    source, target = copied
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(x.smem.scrub, size_bytes)
    cute.copy(x.tma.v, source, target, tma_bar_ptr=x.smem.scrub)
    cute.arch.mbarrier_wait(x.smem.scrub, phase)
    primitives.scrub_rows(x.smem.v[None, None, slot.index], used)
    with cute.arch.elect_one():
        primitives.complete_tx(slot.barrier, size_bytes)
