"""What the forward kernels of all architectures share: data bundles, and the work of a tile.

A variant is any object with ``key``, ``config``, ``plan``, ``dtype`` and ``is_general``. A context
``x`` is any object with ``arrays``, ``scalars``, ``order``, ``smem`` and ``tma``. If the config
``packs_heads``, a context also has ``packing`` and ``granules``; the latter is the query array,
which TMA then copies ``division.GRANULE`` rows at a time.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from jax_fa.kernels import dense_mask, edges, primitives, segments, tiles
from jax_fa.kernels.dense_mask import DenseMask
from jax_fa.kernels.unmasked import unmasked_blocks
from jax_fa.spec import division
from jax_fa.spec.band import UNBOUNDED, Band, Blocks, Window, kv_blocks, part_of
from jax_fa.spec.key import KernelKey


class Variant(NamedTuple):
    """What is fixed at compile time."""

    key: KernelKey
    config: Any
    plan: edges.Plan
    bias: Any = None  # the module fragment_bias, if there is a bias
    sorter: Any = None  # the module sm90.fwd_order, where blocks are sorted

    @property
    def is_general(self) -> bool:
        """Whether anything that can hide a key may be present."""
        return self.key.mask == "general"

    @property
    def lists_ahead(self) -> bool:
        """Whether a role finds what tiles visit ahead of those that use it."""
        return any(edge.producer == "find" for edge in self.plan.edges)

    @property
    def is_split(self) -> bool:
        """Whether several CTAs share the keys of a tile, and each writes a part of its result."""
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
    """Global arrays; where the family has TMA, all but the last two are as TMA sees them.

    Where keys are split, the last two hold the parts, in float32, with ``num_splits * B`` batches.
    """

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
    scale_share: Float32  # scale_log2 / softmax.SPAN
    sinks: cute.Pointer
    q_segments: cute.Pointer
    kv_segments: cute.Pointer
    mask: DenseMask
    num_splits: Int32  # parts of the keys; meaningless where they are not split
    bias: Any  # bias.Bias, or None if the variant has none


class Work(NamedTuple):
    """A tile and all that follows from it; its key blocks are those of part ``split``.

    Attributes:
        tile: the tile.
        span: its sequence.
        window: the band of that sequence.
        blocks: its key blocks; the first and the last are visited.
        num_blocks: the number of key blocks that are visited, at least one.
        split: the number of the part of the keys.
    """

    tile: tiles.Tile
    span: tiles.Span
    window: Window
    blocks: Blocks
    num_blocks: Int32
    split: Int32


@cute.jit
def tile_at(variant: cutlass.Constexpr, x: Any, slot: Int32) -> tiles.Tile:
    """Returns the tile at position ``slot`` of a persistent CTA's list; it shares no products."""
    if const_expr(variant.key.mask == "full"):
        tile = tiles.row_order(x.order, slot)
    elif const_expr(variant.key.mask == "causal"):
        tile = tiles.longest_first(x.order, slot)
        if tiles.are_as_many_as_ctas(x.order):
            tile = tiles.one_per_cta(x.order, slot)
    else:
        tile = tiles.longest_first(x.order, slot)
        if const_expr(not variant.lists_ahead):
            if dense_mask.narrows(x.scalars):
                tile = tiles.one_per_cta(x.order, slot)
    return tile


def positions_of_tile(variant: Variant, x: Any) -> Int32 | int:
    """Returns the number of query positions of a tile: its rows, unless heads share the tile."""
    return x.packing.positions if variant.config.packs_heads else variant.config.block_q


@cute.jit
def span_of(variant: cutlass.Constexpr, x: Any, tile: tiles.Tile) -> tiles.Span:
    """Returns the sequence of a tile. Called by whole warps."""
    sequences, zero = x.scalars.sequences, Int32(0)
    own_len, swept_len = sequences.rows
    positions = positions_of_tile(variant, x)
    first_row = tile.block * positions
    span = tiles.Span(tile.batch, zero, zero, own_len, own_len, swept_len, zero, first_row)
    if const_expr(variant.is_general):
        span = tiles.locate(sequences, tile, positions)
    return span


class Seen(NamedTuple):
    """The keys that the rows of a tile see, and the blocks that hold them."""

    window: Window
    blocks: Blocks


def seen_from(variant: Variant, x: Any, span: tiles.Span) -> Seen:
    """Returns what the band lets the tile of ``span`` see."""
    scalars, config = x.scalars, variant.config
    left, right = scalars.window_left, scalars.window_right
    if not variant.is_general:
        left, right = UNBOUNDED, 0 if variant.key.mask == "causal" else UNBOUNDED
    aligned = Band(alignment="bottom_right").shift(span.own_len, span.swept_len)
    shift = span.q_offset + scalars.bottom_right * aligned
    window = Window(shift, left, right, span.own_len, span.swept_len)
    blocks = kv_blocks(
        window, span.first_row, positions_of_tile(variant, x), config.block_kv, tiles.EXTREMES
    )
    return Seen(window, blocks)


@cute.jit
def work_on(variant: cutlass.Constexpr, x: Any, tile: tiles.Tile) -> Work:
    """Returns the work of ``tile``. Called by whole warps."""
    block_kv, scalars = variant.config.block_kv, x.scalars
    span = span_of(variant, x, tile)
    window, blocks = seen_from(variant, x, span)
    start, full_start, full_end, end = blocks
    if const_expr(variant.is_general):
        if tiles.is_present(scalars.q_segments):
            visited = segments.visited(x.smem.found, block_kv)
            start, end = cutlass.max(start, visited.start), cutlass.min(end, visited.end)
        if dense_mask.is_present(scalars.mask):
            start, end = dense_mask.narrowed(x.smem.found, tiles.Stretch(start, end))
    blocks = Blocks(start, full_start, full_end, end)
    blocks = unmasked_blocks(variant, scalars, blocks, x.smem.found, block_kv)
    start, full_start, full_end, end = blocks
    split = Int32(0)
    if const_expr(variant.is_split):
        # The order counts every part of a tile as a head of its own.
        split = tile.head % x.scalars.num_splits
        tile = tile._replace(head=tile.head // x.scalars.num_splits)
        start, full_start, full_end, end = part_of(
            Blocks(start, full_start, full_end, end), split, x.scalars.num_splits, tiles.EXTREMES
        )
        if dense_mask.is_present(scalars.mask):
            start, end = dense_mask.narrowed(x.smem.found, tiles.Stretch(start, end))
    num_blocks = end - start
    if const_expr(variant.is_general):
        if dense_mask.is_present(scalars.mask):
            num_blocks = dense_mask.count_shown(x.smem.found, start, end)
    # A tile without keys visits one fully masked block, so it needs no path of its own.
    end, num_blocks = cutlass.max(end, start + 1), cutlass.max(num_blocks, 1)
    blocks = Blocks(start, full_start, full_end, end)
    return Work(tile, span, window, blocks, num_blocks, split)


@cute.jit
def below(variant: cutlass.Constexpr, x: Any, block: Int32) -> Int32:
    """Returns the block that is visited after ``block``; meaningless after the last."""
    following = block - 1
    if const_expr(variant.is_general):
        if dense_mask.is_present(x.scalars.mask):
            following = dense_mask.last_shown(x.smem.found, following)
    return following


@cute.jit
def sink_of(variant: cutlass.Constexpr, x: Any, work: Work, q_head: Int32) -> Float32:
    """Returns the sink of a query head, or -inf; only the first part of the keys counts it."""
    sink = -Float32.inf
    if tiles.is_present(x.scalars.sinks):
        num_q_heads = cute.size(x.arrays.lse, mode=[1])
        sink = tiles.element(x.scalars.sinks, work.span.sequence * num_q_heads + q_head)
    if const_expr(variant.is_split):
        sink = sink if work.split == 0 else -Float32.inf
    return sink


def batch_of_part(variant: Variant, x: Any, work: Work) -> Int32:
    """The tile's index in the last mode of ``Arrays.out_rows`` and ``Arrays.lse``."""
    if not variant.is_split:
        return work.tile.batch
    num_batches = cute.size(x.arrays.k, mode=[3])
    return work.tile.batch + work.split * num_batches


@cute.jit
def narrow_keys(
    variant: cutlass.Constexpr, x: Any, tile: tiles.Tile, warps: cutlass.Constexpr[range]
) -> None:
    """Narrows a tile's keys by segments and mask, in ``smem.found``. All of ``warps`` call."""
    scalars, config = x.scalars, variant.config
    span = span_of(variant, x, tile)
    blocks = seen_from(variant, x, span).blocks
    if tiles.is_present(scalars.q_segments):
        rows, last = scalars.sequences.rows, span.own_slot - 1
        if const_expr(config.packs_heads):
            last = cutlass.min(last, span.first_row + x.packing.positions - 1)
        own = scalars.q_segments + (tile.batch * rows.own + span.own_start)
        wanted = segments.ids_of(own, span.first_row, last, config.block_q)
        keys = scalars.kv_segments + (tile.batch * rows.swept + span.swept_start)
        end = cutlass.min(blocks.end * config.block_kv, span.swept_len)
        searched = tiles.Stretch(blocks.start * config.block_kv, end)
        segments.scan(x.smem.found, keys, searched, wanted, warps)
    if dense_mask.is_present(scalars.mask):
        _list_blocks(variant, x, tile, span, blocks, warps)


@cute.jit
def _list_blocks(
    variant: cutlass.Constexpr,
    x: Any,
    tile: tiles.Tile,
    span: tiles.Span,
    blocks: Blocks,
    warps: cutlass.Constexpr[range],
) -> None:
    """Writes a tile's list to ``smem.found``; ``blocks`` are those that the band shows."""
    scalars, config, head = x.scalars, variant.config, tile.head
    if const_expr(variant.is_split):
        head = head // scalars.num_splits
    heads = dense_mask.Heads(tile.batch, head, head + 1)
    if const_expr(config.packs_heads):
        first = tile.kv_head * x.packing.group + head % x.packing.units * x.packing.heads
        heads = dense_mask.Heads(tile.batch, first, first + x.packing.heads)
    rows = tiles.Stretch(span.first_row, span.first_row + positions_of_tile(variant, x))
    swept = tiles.Stretch(blocks.start, blocks.end)
    sweep = dense_mask.Sweep(True, config.block_kv, config.block_q, warps)
    dense_mask.find_blocks(x.smem.found, scalars.mask, heads, rows, swept, sweep)


def row_of_tile(variant: Variant, x: Any, work: Work, row: Int32) -> tiles.RowAt:
    """Returns the query position and the head of row ``row`` of a tile."""
    if variant.config.packs_heads:
        granule = variant.config.granule
        return tiles.row_at(x.packing, work.tile, work.span.first_row, row, granule)
    return tiles.RowAt(work.span.first_row + row, work.tile.head, Boolean(True))


@cute.jit
def load_granules(
    variant: cutlass.Constexpr, x: Any, work: Work, first: int, stage: Int32, barrier: cute.Pointer
) -> None:
    """Starts the loads of a stage of queries of several heads, one granule at a time.

    ``first`` is the tile's row at which the stage starts. TMA fills with zeros beyond the array.
    """
    sQ = cute.make_tensor(x.smem.q.iterator, primitives.by_granules(x.smem.q.layout))
    shape = (division.GRANULE, variant.key.head_dim)
    for g in cutlass.range(cute.size(sQ, mode=[2]), unroll=1):
        row = tiles.row_at(x.packing, work.tile, work.span.first_row, first + g * division.GRANULE)
        rows = x.granules.array[None, None, row.head, work.tile.batch]
        rows = cute.domain_offset((work.span.own_start + row.position, 0), rows)
        target, source = primitives.tma_views(
            x.granules.atom, sQ, cute.local_tile(rows, shape, (None, 0))
        )
        cute.copy(x.granules.atom, source[None, 0], target[None, g, stage], tma_bar_ptr=barrier)
