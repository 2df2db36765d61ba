"""What the backward kernels of all architectures share: data bundles, and the work of a tile.

A tile is ``block_kv`` keys of one key/value head. Its work is a sweep over the query blocks of the
group's query heads, or of a part of them, from the last to the first; in some deterministic runs
from the first to the last. ``kernels/forward_work.py`` describes variants and contexts.

Note [Turns]
In a deterministic run, key blocks add to the dQ of a query block in a fixed order, and
``Scratch.turns`` counts the additions. One addition follows another after about the time of a step
(on an H200, D = 256, about 3 us), so each key block has to be that far behind its predecessor.
There are two orders, and ``ascends`` chooses:
* Steps ascend, and the last key block of a head comes first: under a causal mask it has the fewest
  queries, which makes room for the next, and it begins with a query block that the next does not
  begin with. So key blocks keep their distance, but under a causal mask they read different queries
  at a time, which do not all fit the L2 cache if a key/value head has several query heads.
* Steps descend, as in other runs, and the first key block comes first. The key blocks of a head
  read the same queries at about the same time, and each waits for the one before it.
CTAs take rounds of whole heads, so that each has the same place in all of them. Under a causal mask
the two orders alternate: who had the longest tile has the shortest in the next round. Where rounds
would leave many CTAs idle, each CTA has one tile. If query heads share keys, all steps descend,
each CTA has one tile, and bands have many heads, so that few key blocks of a head are under way at
a time: ``TILES_IN_TURN``. General masks ascend: with a choice they spill.

Forward + backward, causal, H200, microseconds:

    heads, tokens               any order    in turns, rounds    in turns, one tile per CTA
    D = 64, 32, 16 x 1024             784                 793                          1196
                 2 x 8192            3660                3860                          4292
    D = 128, 16, 16 x 1024            663                 701                           792
                  2 x 8192           3204                3348                          3504

HAZARD: a tile waits only for tiles of CTAs of a lower index, which the hardware starts no later,
and for earlier tiles of its own CTA. So no tile waits for one that cannot start, however few CTAs
the GPU holds at a time. Rounds of persistent CTAs obey this if a round holds whole heads. So if a
head has more key blocks than a round has CTAs, the hardware assigns its tiles too.
``tests/test_backward_order.py`` computes this, ``tests/kernels/test_residency.py`` runs it.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from jax_fa.kernels import backward_rows, dense_mask, segments, tiles
from jax_fa.kernels.dense_mask import DenseMask
from jax_fa.kernels.unmasked import unmasked_blocks
from jax_fa.spec.band import UNBOUNDED, Band, Blocks, Window, ceil_div
from jax_fa.spec.band_of_keys import last_kv_block, q_blocks

TILES_IN_TURN = 4
"""Key blocks of a head that are under way at a time where steps descend in turns."""
ROUND_SHARE = 8
"""Rounds of whole heads leave at most one in so many CTAs idle; else each CTA has one tile."""


class Tma(NamedTuple):
    """TMA descriptors; the last three load halves of columns of k, q, dout for a pair of CTAs."""

    k: cute.CopyAtom
    v: cute.CopyAtom
    q: cute.CopyAtom
    dout: cute.CopyAtom
    k_columns: cute.CopyAtom | None = None
    q_columns: cute.CopyAtom | None = None
    dout_columns: cute.CopyAtom | None = None


class Arrays(NamedTuple):
    """Global arrays; where the family has TMA, all but dk and dv are as TMA sees them."""

    k: cute.Tensor  # (S, D, K, B)
    v: cute.Tensor  # (S, Dv, K, B)
    q: cute.Tensor  # (T, D, N, B)
    dout: cute.Tensor  # (T, Dv, N, B)
    dk: cute.Tensor  # (S, D, K, B)
    dv: cute.Tensor  # (S, Dv, K, B)
    k_columns: cute.Tensor | None = None  # k
    q_columns: cute.Tensor | None = None  # q
    dout_columns: cute.Tensor | None = None  # dout


class Scalars(NamedTuple):
    """Run-time values that every tile shares."""

    sequences: tiles.Sequences  # tiles are cut from keys and sweep queries
    q_offset: cute.Pointer
    q_segments: cute.Pointer
    kv_segments: cute.Pointer
    mask: DenseMask
    window_left: Int32
    window_right: Int32
    bottom_right: Int32
    group: Int32
    splits: Int32
    scale: Float32
    score_log2: Float32  # factor from a score, capped or not, to a logit in base 2
    cap_inner_log2: Float32  # factor of a score inside the tanh; see softmax.cap
    deterministic: Int32
    bias: Any  # bias.Bias, or None if the variant has none
    dbias: Any = None  # pointer to its gradient, null if not wanted; None: never written


class Work(NamedTuple):
    """A tile and all that follows from it.

    Attributes:
        tile: ``block`` counts key blocks of the sequence.
        window: the band of the sequence.
        blocks: its query blocks; the first and the last are visited.
        num_blocks: the number of query blocks that are visited.
        is_partial: whether it has keys beyond the sequence.
        kv_start: first key of the sequence in the array.
        kv_slot: the number of keys of the sequence whose gradients are written.
        q_start: first query of the sequence in the array.
        scratch_row: first row of the sequence in ``Scratch``.
        first_head: its first query head.
        num_heads: the number of its query heads.
        num_steps: the number of query blocks that are visited, over all its heads.
        first_block: the query block that its sweep begins with.
        stride: from one query block to the next, 1 or -1.
    """

    tile: tiles.Tile
    window: Window
    blocks: Blocks
    num_blocks: Int32
    is_partial: Boolean
    kv_start: Int32
    kv_slot: Int32
    q_start: Int32
    scratch_row: Int32
    first_head: Int32
    num_heads: Int32
    num_steps: Int32
    first_block: Int32
    stride: Int32


class Step(NamedTuple):
    """Where in a tile's work a consumer is.

    Attributes:
        q_block: query block.
        head: query head.
        parity: which of two buffers the step uses, for dS and others.
    """

    q_block: Int32
    head: Int32
    parity: Int32


@cute.jit
def tile_at(variant: cutlass.Constexpr, x: Any, slot: Int32) -> tiles.Tile:
    """Returns the tile at position ``slot`` of this CTA's list.

    The first key block comes first: with a causal mask it has the most queries. Where steps ascend,
    the last key block comes first: Note [Turns].
    """
    ctas = variant.plan.ctas
    tile = tiles.row_order(x.order, slot, ctas)
    if const_expr(variant.key.mask == "causal"):
        tile = tiles.longest_first(x.order, slot, ctas)
        if x.scalars.deterministic != 0:
            tile = tiles.one_per_cta(x.order, slot, ctas)
            if takes_rounds(x.scalars):
                tile = tiles.row_order(x.order, slot, ctas)
    if const_expr(variant.is_general):
        tile = tiles.one_per_cta(x.order, slot, ctas)
    block = x.order.num_blocks - 1 - tile.block
    if ascends(variant, x.scalars, slot):
        block = tile.block
    return tile._replace(block=block)


def tile_of_number(order: tiles.Order, slot: Int32, number: Int32) -> tiles.Tile:
    """Tile ``number`` of all, in bands of heads, as the tile at ``slot`` of a CTA's list."""
    band_size = order.heads_per_band * order.num_blocks
    first_head = number // band_size * order.heads_per_band
    num_heads = cutlass.max(cutlass.min(order.heads_per_band, order.num_heads - first_head), 1)
    place = number % band_size
    is_valid = number < order.num_heads * order.num_blocks
    return tiles.tile_of(order, slot, is_valid, first_head + place % num_heads, place // num_heads)


def has_fixed_shares(variant: Any, scalars: Scalars) -> Boolean:
    """Whether each CTA has a list of tiles that is fixed ahead, even where tiles can be claimed."""
    fixed = scalars.deterministic != 0
    if variant.is_general:
        fixed = fixed | dense_mask.narrows(scalars)
    return fixed


class Seen(NamedTuple):
    """A tile, its sequence, the band of that sequence, and the query blocks that see the tile."""

    tile: tiles.Tile
    span: tiles.Span
    window: Window
    blocks: Blocks


def seen_by(variant: Any, x: Any, tile: tiles.Tile) -> Seen:
    """Returns which query blocks see ``tile`` according to the band."""
    config, scalars = variant.config, x.scalars
    sequences, zero = scalars.sequences, Int32(0)
    own_len, swept_len = sequences.rows
    left, right = UNBOUNDED, 0 if variant.key.mask == "causal" else UNBOUNDED
    span = tiles.Span(tile.batch, zero, zero, own_len, own_len, swept_len, zero, zero)
    if const_expr(variant.is_general):
        span = tiles.locate(sequences, tile, config.block_kv)
        tile = tile._replace(block=span.first_row // config.block_kv)
        left, right = scalars.window_left, scalars.window_right
    q_len, kv_len = span.swept_len, span.own_len
    aligned = Band(alignment="bottom_right").shift(q_len, kv_len)
    offset = span.q_offset
    if const_expr(not variant.is_general):
        offset = tiles.element_or(scalars.q_offset, span.sequence, zero)
    window = Window(offset + scalars.bottom_right * aligned, left, right, q_len, kv_len)
    blocks = q_blocks(
        window,
        tile.block * config.block_kv,
        config.block_kv,
        config.block_q,
        tiles.EXTREMES,
    )
    return Seen(tile, span, window, blocks)


@cute.jit
def work_on(variant: cutlass.Constexpr, x: Any, tile: tiles.Tile) -> Work:
    """Returns the work of ``tile``. Called by whole warps."""
    config, scalars = variant.config, x.scalars
    tile, span, window, blocks = seen_by(variant, x, tile)
    first_key = tile.block * config.block_kv
    zero = Int32(0)
    if first_key >= window.kv_len:
        blocks = Blocks(zero, zero, zero, zero)
    if const_expr(variant.is_general):
        if tiles.is_present(scalars.q_segments):
            start, full_start, full_end, end = blocks
            if scalars.deterministic == 0:
                # The count of turns follows the band, so a deterministic run visits all its blocks.
                visited = segments.visited(x.smem.found, config.block_q)
                start, end = cutlass.max(start, visited.start), cutlass.min(end, visited.end)
            blocks = Blocks(start, full_start, full_end, cutlass.max(start, end))
        if dense_mask.is_present(scalars.mask):
            start, full_start, full_end, end = blocks
            if scalars.deterministic == 0:
                end = cutlass.max(start, end)
                start, end = dense_mask.narrowed(x.smem.found, tiles.Stretch(start, end))
            blocks = Blocks(start, full_start, full_end, cutlass.max(start, end))
    num_blocks = blocks.end - blocks.start
    if const_expr(variant.is_general):
        if is_listed(x):
            num_blocks = dense_mask.count_shown(x.smem.found, blocks.start, blocks.end)
    blocks = unmasked_blocks(variant, scalars, blocks, x.smem.found, config.block_q)
    per_part = ceil_div(scalars.group, scalars.splits)
    first = tile.head % scalars.splits * per_part
    num_heads = cutlass.max(cutlass.min(per_part, scalars.group - first), 0)
    q_start = span.swept_start
    first_block, stride = blocks.end - 1, Int32(-1)
    if ascends(variant, scalars, tile.slot):
        first_block, stride = blocks.start, Int32(1)
    return Work(
        tile,
        window,
        blocks,
        num_blocks,
        first_key + config.block_kv > window.kv_len,
        span.own_start,
        span.own_slot,
        q_start,
        backward_rows.first_row(
            config.block_q, span.sequence, q_start + tile.batch * scalars.sequences.rows.swept
        ),
        tile.kv_head * scalars.group + first,
        num_heads,
        num_heads * num_blocks,
        first_block,
        stride,
    )


def is_listed(x: Any) -> Boolean:
    """Whether a list of ``dense_mask.py`` tells which query blocks to visit.

    A deterministic run visits all blocks that the band shows, since it counts turns by them.
    """
    return dense_mask.is_present(x.scalars.mask) & (x.scalars.deterministic == 0)


@cute.jit
def narrow_rows(variant: cutlass.Constexpr, x: Any) -> None:
    """Narrows the tile's queries by segments and mask, in ``smem.found``. All threads call."""
    scalars, config = x.scalars, variant.config
    seen = seen_by(variant, x, tile_at(variant, x, Int32(0)))
    end = cutlass.min(seen.blocks.end * config.block_q, seen.window.q_len)
    searched = tiles.Stretch(seen.blocks.start * config.block_q, end)
    if tiles.is_present(scalars.q_segments):
        _find_segment_rows(variant, x, seen, searched)
    if dense_mask.is_present(scalars.mask):
        first_head = seen.tile.kv_head * scalars.group
        heads = dense_mask.Heads(seen.tile.batch, first_head, first_head + scalars.group)
        first_key = seen.tile.block * config.block_kv
        keys = tiles.Stretch(first_key, first_key + config.block_kv)
        swept = tiles.Stretch(seen.blocks.start, seen.blocks.end)
        sweep = dense_mask.Sweep(False, config.block_q, config.block_q, variant.plan.warps)
        dense_mask.find_blocks(x.smem.found, scalars.mask, heads, keys, swept, sweep)


@cute.jit
def _find_segment_rows(
    variant: cutlass.Constexpr, x: Any, seen: Seen, searched: tiles.Stretch
) -> None:
    """Finds which of the queries ``searched`` share a segment with the tile."""
    scalars, config = x.scalars, variant.config
    tile, span, window = seen.tile, seen.span, seen.window
    keys = scalars.kv_segments + (tile.batch * scalars.sequences.rows.own + span.own_start)
    rows = scalars.q_segments + (tile.batch * scalars.sequences.rows.swept + span.swept_start)
    first_key = tile.block * config.block_kv
    wanted = segments.ids_of(keys, first_key, window.kv_len - 1, config.block_kv)
    segments.scan(x.smem.found, rows, searched, wanted, variant.plan.warps)


def first_step(work: Work, parity: Int32) -> Step:
    """Returns the first step of a tile."""
    return Step(work.first_block, work.first_head, parity)


@cute.jit
def next_block(variant: cutlass.Constexpr, x: Any, work: Work, q_block: Int32) -> Int32:
    """Returns the query block that is visited after ``q_block``; meaningless after the last."""
    following = q_block + work.stride
    if const_expr(variant.is_general):
        if is_listed(x):
            following = dense_mask.last_shown(x.smem.found, q_block - 1)
    return following


@cute.jit
def next_step(variant: cutlass.Constexpr, x: Any, work: Work, at: Step) -> Step:
    """Returns the step after ``at``: the next head, or the first head of the next query block."""
    head = at.head + 1
    is_last = head == work.first_head + work.num_heads
    q_block = at.q_block + work.stride if is_last else at.q_block
    if const_expr(variant.is_general):
        if is_last & is_listed(x):
            q_block = next_block(variant, x, work, at.q_block)
    return Step(q_block, work.first_head if is_last else head, 1 - at.parity)


def _turns_of(variant: Any, x: Any, work: Work, at: Step) -> cute.Pointer:
    """Returns the counter of what has been added to the dQ of a query block."""
    row = work.scratch_row // variant.config.block_q + at.q_block
    return x.scratch.turns.iterator + (at.head * cute.size(x.scratch.turns, mode=[0]) + row)


@cute.jit
def await_turn(
    variant: cutlass.Constexpr, x: Any, work: Work, at: Step, parts: cutlass.Constexpr[int]
):
    """Waits until all ``parts`` of every key block before this one are added: Note [Turns]."""
    config = variant.config
    last = last_kv_block(work.window, at.q_block, config.block_kv, config.block_q, tiles.EXTREMES)
    counter = _turns_of(variant, x, work, at)
    before = last - work.tile.block
    if const_expr(variant.key.mask == "causal"):
        if work.stride < 0:
            before = work.tile.block  # Every query block that sees it sees all keys before it.
    before = before * parts
    taken = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    while taken < before:
        taken = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")


@cute.jit
def pass_turn(variant: cutlass.Constexpr, x: Any, work: Work, at: Step):
    """Counts one more part as added, after all that this warp did. Called by whole warps."""
    if cute.arch.lane_idx() == 0:
        counter = _turns_of(variant, x, work, at)
        cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


def ascends(variant: Any, scalars: Scalars, slot: Int32) -> Boolean:
    """Whether steps ascend in a CTA's tile at position ``slot``: Note [Turns]."""
    in_turn = scalars.deterministic != 0
    if variant.key.mask == "causal":
        return in_turn & takes_rounds(scalars) & (slot % 2 == 0)
    return in_turn


def takes_rounds(scalars: Scalars) -> Boolean:
    """Whether CTAs take rounds in a deterministic run under a causal mask: Note [Turns]."""
    return scalars.group == 1


def bytes_per_head(variant: Any, q_len: Int32, group: Int32) -> Int32:
    """Bytes of the L2 cache that Q, dO and the sums of dQ of one key/value head take.

    Twice their size: the cache has two halves, and seems to keep in both what is read through both.
    Backward, causal, H200, us, with once their size and with twice: D = 64, 64 x 512 tokens, 16
    heads 312, 283; 128 x 256 255, 235; 16 x 1024, 32 heads 417, 414; D = 128, 16 heads, 16 x 1024
    370, 369; 32 x 512 278, 280.
    """
    key = variant.key
    of_row = 2 * (2 * (key.head_dim + key.value_dim) + 4 * key.head_dim)
    # No more rows than the cache has room for, and one: the bytes of others may exceed an int32.
    return cutlass.min(q_len * group, tiles.L2_BUDGET_BYTES // of_row + 1) * of_row


def leaves_blocks_out(scalars: Scalars) -> Boolean:
    """Whether there may be blocks of pairs that no step processes."""
    bounds = (scalars.window_left != UNBOUNDED) | (scalars.window_right != UNBOUNDED)
    lengths = scalars.sequences.lengths
    used = tiles.is_present(lengths.own) | tiles.is_present(lengths.swept)
    segments = tiles.is_present(scalars.q_segments)
    return bounds | used | segments | dense_mask.is_present(scalars.mask)


@cute.jit
def bulk_load(source: cute.Tensor, target: cute.Tensor, barrier: cute.Pointer):
    """Starts the copy of a contiguous piece of global memory to ``target``, which sets its size.

    The bytes count on ``barrier``. Called by a whole warp; addresses are multiples of 16 bytes.
    """
    size_bytes = cute.size(target) * target.element_type.width // 8
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[
                target.iterator.toint(),
                source.iterator.toint(),
                Int32(size_bytes),
                barrier.toint(),
            ],
        )


@cute.jit
def bulk_add(source: cute.Pointer, target: cute.Pointer, size_bytes: cutlass.Constexpr[int]):
    """Starts the addition of floats in shared memory to as many in global memory.

    Each float is added atomically. The addition joins the bulk group of the elected lane. Called by
    a whole warp; addresses and size are multiples of 16 bytes.
    """
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
            read_only_args=[target.toint(), source.toint(), Int32(size_bytes)],
        )
