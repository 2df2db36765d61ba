"""The role find of Hopper's gradient of a bias: describes each step of each tile, ahead of time.

A step may take less than 1,000 cycles, and to find out what it multiplies, and to load the
statistics of its rows, takes as long if all is done anew. So warps of their own do that ahead of
the others, and leave it in a ring in shared memory: a few words, and, by a second warp, two floats
per row. The others need no counters of their own; they take what comes until they are told to stop.
"""

from itertools import islice
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.pipeline import PipelineProducer, PipelineState

from jax_fa.kernels import edges, fragments, softmax, tiles
from jax_fa.kernels.backward_rows import vector_at
from jax_fa.kernels.dbias_rows import may_hide
from jax_fa.kernels.dbias_work import (
    BiasTile,
    Pair,
    Place,
    RowStats,
    place_after,
    place_of,
    step_at,
    step_of,
    tile_at,
)
from jax_fa.kernels.forward_work import Variant, Work
from jax_fa.kernels.fragment_rows import GROUP_ROWS
from jax_fa.kernels.sm90 import bias_chunks
from jax_fa.kernels.sm90.plan_dbias import FLOAT_BYTES, STATISTICS, STEP_WORDS
from jax_fa.spec.band import Blocks, Window

PLAIN, HIDES, BEGINS, ENDS, STOPS = range(5)
"""What an entry of the ring says, in its first word.

PLAIN: a step, none of whose pairs is hidden, but by the bias; HIDES: any other step; BEGINS: the
place of a tile whose bias consumers have to load; ENDS: the place of a tile that is complete;
STOPS: there are no more.
"""


WORDS, STATS = range(2)
"""The parts of an entry, each of which a warp of its own writes."""


class Block(NamedTuple):
    """What the products of a step read: blocks of queries and keys."""

    row_block: Int32
    head: Int32
    kv_head: Int32
    batch: Int32
    key_block: Int32


@cute.jit
def find(
    variant: cutlass.Constexpr, x: Any, steps: PipelineProducer, part: cutlass.Constexpr[int]
) -> None:
    """Describes all that this CTA does, in order: one warp in words, one by statistics."""
    number, place, pitch = first_tile(x)
    while number < x.grid.number:
        if ~bias_chunks.is_staged(x.scalars.bias):
            steps = _say(x, steps, part, BEGINS, place)
        tile = tile_at(variant, x, place)
        if tile.pairs.start < tile.pairs.end:
            steps = _steps_of(variant, x, tile, steps, part)
        steps = _say(x, steps, part, ENDS, place)
        number, place = number + cute.arch.grid_dim()[0], place_after(x, place, pitch)
    steps = _say(x, steps, part, STOPS)
    # HAZARD: the CTA must not exit while other roles still have to arrive at these barriers. For
    # the last entry they do not arrive.
    for _ in cutlass.range_constexpr(variant.config.step_stages - 1):
        steps.acquire_and_advance()


class First(NamedTuple):
    """A CTA's first tile, and how far its next one lies behind it, as a place behind the first."""

    number: Int32
    place: Place
    pitch: Place


def first_tile(x: Any) -> First:
    """The first tile of the calling CTA."""
    number = cute.arch.block_idx()[0]
    return First(number, place_of(x, number), place_of(x, cute.arch.grid_dim()[0]))


@cute.jit
def _steps_of(
    variant: cutlass.Constexpr,
    x: Any,
    tile: BiasTile,
    steps: PipelineProducer,
    part: cutlass.Constexpr[int],
) -> PipelineProducer:
    """Adds the steps of a tile."""
    if are_alike(x, tile):
        steps = _like_steps(variant, x, tile, steps, part)
    else:
        for pair in cutlass.range(tile.pairs.start, tile.pairs.end, unroll=1):
            rows = tile.row_blocks
            for row_block in cutlass.range(rows.start, rows.end, unroll=1):
                work, seen = step_at(variant, x, tile, pair, row_block)
                stats = make_stats(variant)
                _load_stats(x, work.tile, row_places(variant, x, work), stats, part)
                for block in cutlass.range(seen.start, seen.end, unroll=1):
                    steps = _describe(variant, x, work, block, stats, steps, part)
    return steps


@cute.jit
def _like_steps(
    variant: cutlass.Constexpr,
    x: Any,
    tile: BiasTile,
    steps: PipelineProducer,
    part: cutlass.Constexpr[int],
) -> PipelineProducer:
    """Adds the steps of a tile that are alike; statistics are loaded a step ahead of use."""
    pairs = tile.pairs
    work, seen = step_of(variant, x, tile, first_pair(x, tile), tile.row_blocks.start)
    at, places = work.tile, row_places(variant, x, work)
    stats, following = make_stats(variant), make_stats(variant)
    _load_stats(x, at, places, stats, part)
    for pair in cutlass.range(pairs.start, pairs.end, unroll=1):
        further = _next_pair(x, tile, at)
        if pair + 1 == pairs.end:
            further = at
        _load_stats(x, further, places, following, part)
        for block in cutlass.range(seen.start, seen.end, unroll=1):
            steps = _describe(variant, x, work._replace(tile=at), block, stats, steps, part)
        at = further
        stats.store(following.load())
    return steps


@cute.jit
def first_pair(x: Any, tile: BiasTile) -> Pair:
    """Returns the first batch and head of a tile, with divisions only where there are several."""
    start = tile.pairs.start
    batch, head = tile.batch + start, tile.head
    if tile.heads > 1:
        batch, head = tile.batch + start // tile.heads, tile.head + start % tile.heads
    return Pair(batch, head, _kv_head(x, head))


@cute.jit
def _kv_head(x: Any, head: Int32) -> Int32:
    kv_head = head
    if x.grid.group > 1:
        kv_head = head // x.grid.group
    return kv_head


def are_alike(x: Any, tile: BiasTile) -> Any:
    """Whether all batches and heads that share a tile have one step, with the same blocks."""
    sequences, rows = x.scalars.sequences, tile.row_blocks
    lengths = sequences.lengths
    varies = tiles.is_present(lengths.own) | tiles.is_present(lengths.swept)
    varies = varies | tiles.is_present(sequences.q_offset)
    return ~(varies | (rows.end - rows.start != 1))


@cute.jit
def _next_pair(x: Any, tile: BiasTile, at: tiles.Tile) -> tiles.Tile:
    """Returns the next batch and head that share a tile, likewise."""
    batch, head, kv_head = at.batch, at.head + 1, at.kv_head
    if head - tile.head == tile.heads:
        head, batch = tile.head, batch + 1
    if tile.heads > 1:
        kv_head = _kv_head(x, head)
    return at._replace(batch=batch, head=head, kv_head=kv_head)


@cute.jit
def _say(
    x: Any,
    steps: PipelineProducer,
    part: cutlass.Constexpr[int],
    kind: cutlass.Constexpr[int],
    place: Any = None,
) -> PipelineProducer:
    """Adds an entry that is no step."""
    slot = steps.acquire_and_advance()
    if const_expr(part == WORDS):
        x.smem.steps[0, slot.index] = Int32(kind)
        if const_expr(place is not None):
            for i in cutlass.range_constexpr(len(place)):
                x.smem.steps[1 + i, slot.index] = place[i]
    _hand_over(slot)
    return steps


@cute.jit
def _hand_over(slot: Any) -> None:
    # HAZARD: one lane arrives for the warp, so all its lanes must have written before.
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        slot.commit()


def make_stats(variant: Variant) -> cute.Tensor:
    """Registers for lse and delta of each 32nd row from a lane's on."""
    return cute.make_rmem_tensor((STATISTICS, variant.config.block_q // edges.WARP), Float32)


def row_places(variant: Variant, x: Any, work: Work) -> list[Int64]:
    """How far such rows of a block, or the last there is, lie behind the first of their head."""
    first, last = work.span.first_row + cute.arch.lane_idx(), work.span.own_slot - 1
    pitch, rows = x.arrays.lse.stride[0], range(0, variant.config.block_q, edges.WARP)
    return [cutlass.min(first + row, last).to(Int64) * pitch * FLOAT_BYTES for row in rows]


@cute.jit
def _load_stats(
    x: Any,
    at: tiles.Tile,
    places: list[Int64],
    stats: cute.Tensor,
    part: cutlass.Constexpr[int],
) -> None:
    """Starts the loads of lse, not yet in base 2, and delta, in the warp that has them."""
    if const_expr(part == STATS):
        own = (None, at.head, at.batch)
        for i, array in enumerate((x.arrays.lse, x.arrays.delta)):
            start = array[own].iterator.toint()
            for j in cutlass.range_constexpr(len(places)):
                stats[i, j] = vector_at(Float32, start + places[j], FLOAT_BYTES)[0]


@cute.jit
def _describe(
    variant: cutlass.Constexpr,
    x: Any,
    work: Work,
    block: Int32,
    stats: cute.Tensor,
    steps: PipelineProducer,
    part: cutlass.Constexpr[int],
) -> PipelineProducer:
    """Adds a step."""
    slot = steps.acquire_and_advance()
    if const_expr(part == WORDS):
        _put_words(variant, x, work, block, slot.index)
    else:
        _put_stats(variant, x, work, stats, slot.index)
    _hand_over(slot)
    return steps


@cute.jit
def _put_words(variant: cutlass.Constexpr, x: Any, work: Work, block: Int32, index: Int32) -> None:
    hides, words = may_hide(variant, x, work, block), x.smem.steps[None, index]
    words[0] = Int32(HIDES) if hides else Int32(PLAIN)
    read = (*work.tile[2:], block)
    for i in cutlass.range_constexpr(len(read)):
        words[1 + i] = read[i]
    if hides:
        further = (*work.span, *work.window, *work.blocks, *work[4:])
        for i in cutlass.range_constexpr(len(further)):
            words[1 + len(read) + i] = Int32(further[i])


@cute.jit
def _put_stats(
    variant: cutlass.Constexpr, x: Any, work: Work, stats: cute.Tensor, index: Int32
) -> None:
    target = x.smem.stats[None, None, index]
    for i in cutlass.range_constexpr(variant.config.block_q // edges.WARP):
        row = cute.arch.lane_idx() + edges.WARP * i
        is_empty = is_unused(work, row, stats[0, i])
        # An unused row gets exponentials of 0.
        target[0, row] = Float32.inf if is_empty else stats[0, i] * softmax.LOG2_E
        target[1, row] = Float32(0.0) if is_empty else stats[1, i]


def is_unused(work: Work, row: Int32, lse: Float32) -> Boolean:
    """Whether a row of a block is beyond its sequence or sees no key; its delta may be anything."""
    return (work.span.first_row + row >= work.span.own_len) | (lse == -Float32.inf)


def _state_at(x: Any, entry: Int32) -> PipelineState:
    """The state of a role that reads the ring at ``entry``, a number that counts all entries."""
    stages = x.steps.num_stages
    phase = entry >> (stages.bit_length() - 1) & 1
    return PipelineState(stages, entry, entry & (stages - 1), phase)


def await_entry(x: Any, entry: Int32) -> Int32:
    """Waits for an entry and returns what it says."""
    x.steps.consumer_wait(_state_at(x, entry))
    return kind_at(x, entry)


@cute.jit
def give_back(x: Any, entry: Int32) -> None:
    """Tells find that the calling warp has read an entry. Called by whole warps."""
    # HAZARD: one lane arrives for the warp, so all its lanes must have read before.
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        x.steps.consumer_release(_state_at(x, entry))


def _word(x: Any, entry: Int32, number: int) -> Int32:
    return x.smem.steps[number, entry & (x.steps.num_stages - 1)]


def kind_at(x: Any, entry: Int32) -> Int32:
    """What an entry says."""
    return _word(x, entry, 0)


def block_at(x: Any, entry: Int32) -> Block:
    """What the step of an entry multiplies."""
    return Block(*(_word(x, entry, 1 + i) for i in range(len(Block._fields))))


def place_at(x: Any, entry: Int32) -> Place:
    """The tile that an entry is about."""
    return Place(*(_word(x, entry, 1 + i) for i in range(len(Place._fields))))


def work_at(x: Any, entry: Int32) -> Work:
    """The work of the step of an entry, which HIDES."""
    row_block, head, kv_head, batch, _ = block_at(x, entry)
    words = (_word(x, entry, i) for i in range(1 + len(Block._fields), STEP_WORDS))

    def take(kind: type[Any], *known: Any) -> Any:
        return kind(*known, *islice(words, len(kind._fields) - len(known)))

    tile = tiles.Tile(Boolean(True), Int32(0), row_block, head, kv_head, batch)
    return take(Work, tile, take(tiles.Span), take(Window), take(Blocks))


def stats_at(x: Any, c: Any, entry: Int32) -> RowStats:
    """The statistics of the calling thread's rows in the step of an entry."""
    row = c.index * GROUP_ROWS + fragments.row_in_tile(c.thread)
    stats = x.smem.stats[None, None, entry & (x.steps.num_stages - 1)]
    loaded = [stats[None, row + 8 * r].load() for r in range(fragments.ROWS)]
    return RowStats([x[0] for x in loaded], [x[1] for x in loaded])
