"""What the roles of the Hopper forward share: bundles, and what there is to do for a tile."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.band import UNBOUNDED, Band, Blocks, Window, ceil_div, kv_blocks
from jax_fa.config import FwdConfig, KernelKey
from jax_fa.kernels import edges, primitives, tiles
from jax_fa.kernels.sm90.plan import ROWS

NO_SEGMENT = 0x7FFFFFFF
"""Larger than any segment id, as a minimum to start from."""


class Variant(NamedTuple):
    """What is fixed at compile time."""

    key: KernelKey
    config: FwdConfig
    plan: edges.Plan

    @property
    def is_general(self) -> bool:
        """Everything that can hide a key may be there."""
        return self.key.mask == "general"

    @property
    def dtype(self) -> type:
        """Element type of the arrays."""
        return primitives.DTYPES[self.key.dtype]


class Layouts(NamedTuple):
    """Shared memory layouts, a tile of 64 query rows or one key block in modes 0 and 1."""

    q: cute.ComposedLayout  # (64, D, consumers * q_stages)
    k: cute.ComposedLayout  # (block_kv, D, stages)
    v: cute.ComposedLayout  # (block_kv, Dv, stages)
    out: cute.ComposedLayout  # (64, Dv)


class Tma(NamedTuple):
    """TMA descriptors."""

    q: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom
    out: cute.CopyAtom


class Arrays(NamedTuple):
    """Global arrays; all but the last two as TMA sees them."""

    q: cute.Tensor  # (T, D, N, B)
    k: cute.Tensor  # (S, D, K, B)
    v: cute.Tensor  # (S, Dv, K, B)
    out: cute.Tensor  # (T, Dv, N, B)
    out_rows: cute.Tensor  # (T, Dv, N, B)
    lse: cute.Tensor  # (T, N, B)


class Scalars(NamedTuple):
    """Run-time values that every tile shares."""

    sequences: tiles.Sequences
    window_left: Int32
    window_right: Int32
    bottom_right: Int32
    cap_inner_log2: Float32  # factor of a score inside the tanh; see softmax.cap
    scale_log2: Float32
    sinks: cute.Pointer
    q_segments: cute.Pointer
    kv_segments: cute.Pointer


class Pipes(NamedTuple):
    """One end of each edge."""

    q: PipelineProducer | PipelineConsumer
    k: PipelineProducer | PipelineConsumer
    v: PipelineProducer | PipelineConsumer


class Smem(NamedTuple):
    """Shared memory."""

    q: cute.Tensor  # (64, D, consumers * q_stages)
    k: cute.Tensor  # (block_kv, D, stages)
    v: cute.Tensor  # (block_kv, Dv, stages)
    scrub: cute.Pointer  # one mbarrier
    segment_keys: cute.Tensor  # (2,) first key, and last key + 1, of the tile's segments


class Context(NamedTuple):
    """What both roles work with."""

    tma: Tma
    arrays: Arrays
    scalars: Scalars
    order: tiles.Order
    smem: Smem


class Work(NamedTuple):
    """A tile with all that follows from it."""

    tile: tiles.Tile
    span: tiles.Span
    window: Window
    blocks: Blocks


def make_layouts(variant: Variant) -> Layouts:
    """The layouts of a variant's shared memory."""
    key, config, dtype = variant.key, variant.config, variant.dtype
    q_tiles = config.num_consumers * config.q_stages
    return Layouts(
        q=primitives.smem_layout(dtype, (ROWS, key.head_dim, q_tiles)),
        k=primitives.smem_layout(dtype, (config.block_kv, key.head_dim, config.stages)),
        v=primitives.smem_layout(dtype, (config.block_kv, key.value_dim, config.stages)),
        out=primitives.smem_layout(dtype, (ROWS, key.value_dim)),
    )


@cute.jit
def tile_at(variant: cutlass.Constexpr, x: Context, slot: Int32) -> tiles.Tile:
    """The tile at a position of this CTA's list."""
    if const_expr(not variant.config.is_persistent):
        tile = tiles.one_per_cta(x.order, slot)
    elif const_expr(variant.key.mask == "full"):
        tile = tiles.row_order(x.order, slot)
    elif const_expr(variant.key.mask == "causal"):
        tile = tiles.longest_first(x.order, slot)
    else:
        tile = tiles.longest_first(x.order, slot)
        if tiles.is_present(x.scalars.q_segments):
            tile = tiles.one_per_cta(x.order, slot)
    return tile


@cute.jit
def span_of(variant: cutlass.Constexpr, x: Context, tile: tiles.Tile) -> tiles.Span:
    """The sequence of a tile. Called by whole warps."""
    sequences, zero = x.scalars.sequences, Int32(0)
    q_len, kv_len = sequences.q_len, sequences.kv_len
    first_row = tile.q_block * variant.config.block_q
    span = tiles.Span(tile.batch, zero, zero, q_len, q_len, kv_len, zero, first_row)
    if const_expr(variant.is_general):
        span = tiles.locate(sequences, tile, variant.config.block_q)
    return span


def band_of(variant: Variant, x: Context, span: tiles.Span) -> tuple[Window, Blocks]:
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
        config.block_q,
        config.block_kv,
        minimum=cutlass.min,
        maximum=cutlass.max,
    )
    return window, blocks


@cute.jit
def work_on(variant: cutlass.Constexpr, x: Context, tile: tiles.Tile) -> Work:
    """What there is to do for ``tile``. Called by whole warps."""
    block_kv = variant.config.block_kv
    span = span_of(variant, x, tile)
    window, blocks = band_of(variant, x, span)
    start, full_start, full_end, end = blocks
    if const_expr(variant.is_general):
        if tiles.is_present(x.scalars.q_segments):
            start = cutlass.max(start, x.smem.segment_keys[0] // block_kv)
            end = cutlass.min(end, ceil_div(x.smem.segment_keys[1], block_kv))
            full_start, full_end = start, start
    # A tile without keys works on one block, all of it masked: no path of its own.
    end = cutlass.max(end, start + 1)
    return Work(tile, span, window, Blocks(start, full_start, full_end, end))


@cute.jit
def find_segment_keys(variant: cutlass.Constexpr, x: Context) -> None:
    """Narrows the tile's keys to those whose segment lies in the range of its queries' segments.

    All threads of the CTA share the scan; the result goes to ``smem.segment_keys``.
    """
    scalars, sequences = x.scalars, x.scalars.sequences
    thread = cute.arch.thread_idx()[0]
    threads, lane = variant.plan.threads, cute.arch.lane_idx()
    tile = tile_at(variant, x, Int32(0))
    span = span_of(variant, x, tile)
    _, blocks = band_of(variant, x, span)
    lowest, highest = Int32(NO_SEGMENT), Int32(-NO_SEGMENT - 1)
    for i in cutlass.range_constexpr(ceil_div(variant.config.block_q, edges.WARP)):
        row = cutlass.min(span.first_row + lane + i * edges.WARP, span.q_slot - 1)
        base = tile.batch * sequences.q_len + span.q_start
        segment = tiles.element(scalars.q_segments, base + cutlass.max(row, 0))
        lowest, highest = cutlass.min(lowest, segment), cutlass.max(highest, segment)
    lowest = cute.arch.warp_redux_sync(lowest, "min")
    highest = cute.arch.warp_redux_sync(highest, "max")
    first, end = Int32(UNBOUNDED), Int32(0)
    base = tile.batch * sequences.kv_len + span.kv_start
    begin = blocks.start * variant.config.block_kv + thread
    beyond = cutlass.min(blocks.end * variant.config.block_kv, span.kv_len)
    for key in cutlass.range(begin, beyond, threads, unroll=8):
        segment = tiles.element(scalars.kv_segments, base + key)
        if (segment >= lowest) & (segment <= highest):
            first, end = cutlass.min(first, key), key + 1
    first = cute.arch.warp_redux_sync(first, "min")
    end = cute.arch.warp_redux_sync(end, "max")
    if lane == 0:
        cute.arch.atomic_min(x.smem.segment_keys.iterator, first, scope="cta")
        cute.arch.atomic_max(x.smem.segment_keys.iterator + 1, end, scope="cta")
