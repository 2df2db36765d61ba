"""Tiles, the order in which they are worked on, and the sequences they belong to.

A tile is a block of rows of one head of one sequence: of queries in the forward, of keys in the
backward. That side is the tile's *own* side; blocks of the other side, the *swept* side, pass by.
Persistent kernels give CTA ``c`` of ``C`` the positions c, c + C, c + 2 C, ... of an order. Every
role walks the order by itself, so no role tells another what comes next.

* ``row_order``: the blocks of a head, then the next head; for work where all tiles cost the same.
* ``longest_first``: bands of heads whose swept sides fit the L2 cache together. Within a band, the
  last block of every head comes first, then the one before it (LPT scheduling; FlashAttention-4
  reports 4 to 14 % from it on H200). See Note [Bands].
* ``one_per_cta``: the order of ``longest_first`` with one tile for each CTA of the grid; the
  hardware balances the load. It is for segments, whose costs only the kernel knows.

# Note [Bands]
Under a causal mask, costs fall along a band, and some CTAs may get no tile in its last round. If
the same CTAs got the longest tiles, or one tile more, in every band, their delays would add up over
all bands. So bands differ by at most one head: no small band occupies only a few CTAs. Every second
round runs backwards, starting with the first round in every second band. After two bands, CTAs move
on by five eighths of their number: multiples of 5/8 lie apart, however few bands there are.
``tests/test_work_order.py`` measures the largest work of a CTA over the mean.

# Note [Packed heads]
A tile of one head with few queries, down to the single query of a decoding step, is nearly empty,
and the next head of the group reads the same keys again. So heads can share a tile: its granules of
8 rows go round the heads. Granule g holds positions 8 (g // heads) to 8 (g // heads) + 7 of head
g % heads. A tile holds as many heads as fit: the whole group for up to 8 (block_q / 8 / group)
queries. The number of tiles falls by that factor, and so do products, exponentials and reads of K
and V. Masks depend on positions only; results are written where position and head say. With one
head, a granule's position is its row, so unpacked tiles are a case of the same arithmetic.

# Note [Borders]
``sequences.borders`` makes borders ascend within the array before any path sees them. A program
that calls the kernels directly may pass anything, so kernels apply the same rule: they read border
m as the largest of borders 0 to m, clamped to the array. Slots then lie in the array and do not
overlap, and every row behind the first border is in one tile. Lengths and offsets are clamped where
they are read. In a search through ascending borders, the rule costs one vote per 32 borders.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute

from jax_fa.kernels import edges, primitives
from jax_fa.spec.band import MAX_OFFSET, Extremes
from jax_fa.spec.division import GRANULE, Packing

L2_BUDGET_BYTES = 32 << 20
"""The most that the swept sides of one band may occupy: most of the 50 MB L2 of an H100."""

ROUNDS_PER_BAND = 2
"""About how many tiles a CTA gets from a band, at least, whatever the cache holds: two tiles of
unequal length balance each other, one cannot."""

EXTREMES = Extremes(cutlass.min, cutlass.max)
"""The minimum and maximum of traced integers, for ``band.py``."""


class Order(NamedTuple):
    """The run-time extents of a work order, the same for all CTAs.

    A head of an order is the unit that is cut into tiles. In the forward, it is a query head, or
    the heads of a group that share packed tiles, once for each part of split keys. In the backward,
    it is a part of the query heads of a key/value head.

    Attributes:
        num_heads: heads of all batches.
        heads_per_batch: heads of one batch.
        group: heads per key/value head.
        num_blocks: blocks of a head.
        heads_per_band: heads of the largest band; the heads of a band share the L2 cache.
        num_bands: number of bands.
        rounds: rounds that a band takes.
    """

    num_heads: Int32
    heads_per_batch: Int32
    group: Int32
    num_blocks: Int32
    heads_per_band: Int32
    num_bands: Int32
    rounds: Int32


def make_order(
    num_heads: Int32,
    heads_per_batch: Int32,
    group: Int32,
    num_blocks: Int32,
    swept_bytes_per_head: Int32,
    num_ctas: Int32,
    rounds_per_band: Int32 | int = ROUNDS_PER_BAND,
) -> Order:
    """The work order of ``num_heads * num_blocks`` tiles on ``num_ctas`` CTAs."""
    in_cache = L2_BUDGET_BYTES // cutlass.max(swept_bytes_per_head, 1)
    # Bands of few tiles leave CTAs idle: short heads that sweep far would run one by one.
    in_rounds = cutlass.max(rounds_per_band * num_ctas // num_blocks, 1)
    num_bands = cute.ceil_div(num_heads, cutlass.max(in_cache, in_rounds))
    heads_per_band = cute.ceil_div(num_heads, num_bands)
    rounds = cute.ceil_div(heads_per_band * num_blocks, num_ctas)
    return Order(num_heads, heads_per_batch, group, num_blocks, heads_per_band, num_bands, rounds)


class Grid(NamedTuple):
    """The work order of a kernel, and how many CTAs to launch for it."""

    order: Order
    num_ctas: Int32


class Tile(NamedTuple):
    """One tile.

    Attributes:
        is_valid: whether the tile exists.
        slot: its position in its CTA's list.
        block: its number among the tiles of its head.
        head: its head within its batch, as the order counts heads.
        kv_head: the key/value head that ``head`` belongs to.
        batch: its batch.
    """

    is_valid: Boolean
    slot: Int32
    block: Int32
    head: Int32
    kv_head: Int32
    batch: Int32


def tile_of(order: Order, slot: Int32, is_valid: Boolean, head: Int32, block: Int32) -> Tile:
    """The tile of a block of ``head``, which counts through all batches."""
    # An invalid tile may lie anywhere, but its sequence must exist, since data of it is read.
    head = cutlass.min(head, order.num_heads - 1)
    in_batch = head % order.heads_per_batch
    kv_head, batch = in_batch // order.group, head // order.heads_per_batch
    return Tile(is_valid, slot, block, in_batch, kv_head, batch)


class Clusters(NamedTuple):
    """The clusters of a grid: the number of this CTA's own cluster, and how many there are."""

    own: Int32
    number: Int32


def _clusters(ctas: int) -> Clusters:
    """The clusters of the grid, of ``ctas`` CTAs each."""
    cta, *_ = cute.arch.block_idx()
    num_ctas, *_ = cute.arch.grid_dim()
    return Clusters(cta, num_ctas) if ctas == 1 else Clusters(cta // ctas, num_ctas // ctas)


def row_order(order: Order, slot: Int32, ctas: int = 1) -> Tile:
    """The tile at position ``slot`` of this CTA's share of all tiles, head by head.

    Where the ``ctas`` CTAs of a cluster share every tile, the share is that of the cluster.
    """
    clusters = _clusters(ctas)
    index = slot * clusters.number + clusters.own
    return tile_of(
        order,
        slot,
        index < order.num_heads * order.num_blocks,
        index // order.num_blocks,
        order.num_blocks - 1 - index % order.num_blocks,
    )


def num_tiles(order: Order, ctas: int = 1) -> Int32:
    """Tiles of all heads; for ``clusters.in_order``, each group is padded to whole clusters."""
    return order.num_heads // order.group * tiles_of_group(order, ctas)


def are_as_many_as_ctas(order: Order) -> Boolean:
    """Whether the grid has a CTA for each tile."""
    return _clusters(1).number == order.num_heads * order.num_blocks


def tiles_of_group(order: Order, ctas: int) -> Int32:
    """Tiles of the heads of a key/value head, padded to whole clusters."""
    return cute.ceil_div(order.group * order.num_blocks, ctas) * ctas


@cute.jit
def longest_first(order: Order, slot: Int32, ctas: cutlass.Constexpr[int] = 1) -> Tile:
    """The tile at position ``slot`` of this CTA's share, longest tiles first within a band.

    A CTA may have no tile in the last rounds of a band; it then goes on to the next band. ``ctas``
    is as for ``row_order``.
    """
    tile = _in_round(order, slot, ctas)
    while not tile.is_valid and tile.slot < order.num_bands * order.rounds:
        tile = _in_round(order, tile.slot + 1, ctas)
    return tile


def _in_round(order: Order, slot: Int32, ctas: int) -> Tile:
    """The tile at position ``slot``, if there is one: Note [Bands]."""
    # Opaque, or values derived from these would be kept in registers from tile to tile.
    rounds, num_bands = primitives.opaque(order.rounds), primitives.opaque(order.num_bands)
    clusters, band, turn = _clusters(ctas), slot // rounds, slot % rounds
    number = primitives.opaque(clusters.number)
    own = (clusters.own + band // 2 * (number * 5 // 8)) % number
    place = turn * number + (own + (turn + band) % 2 * (number - 1 - 2 * own))
    heads, larger = order.num_heads // num_bands, order.num_heads % num_bands
    first_head = band * heads + cutlass.min(band, larger)
    num_heads = heads + cutlass.max(cutlass.min(larger - band, 1), 0)
    tile = _in_band(order, slot, first_head, num_heads, place)
    return tile._replace(is_valid=tile.is_valid & (band < order.num_bands))


def _in_band(order: Order, slot: Int32, first_head: Int32, num_heads: Int32, place: Int32) -> Tile:
    """The tile at ``place`` in a band of ``num_heads`` heads."""
    return tile_of(
        order,
        slot,
        place < num_heads * order.num_blocks,
        first_head + place % num_heads,
        order.num_blocks - 1 - place // num_heads,
    )


@cute.jit
def one_per_cta(order: Order, slot: Int32, ctas: cutlass.Constexpr[int] = 1) -> Tile:
    """The only tile of this CTA, at ``slot`` 0; ``ctas`` is as for ``row_order``."""
    nowhere = Int32(0)
    tile = Tile(Boolean(False), slot, nowhere, nowhere, nowhere, nowhere)
    if slot == 0:
        own = _clusters(ctas).own
        band_size = order.heads_per_band * order.num_blocks
        first_head = own // band_size * order.heads_per_band
        num_heads = cutlass.min(order.heads_per_band, order.num_heads - first_head)
        tile = _in_band(order, slot, first_head, num_heads, own % band_size)
    return tile


class RowAt(NamedTuple):
    """The query that a row of a tile holds: its position in its sequence, and its query head."""

    position: Int32
    head: Int32
    is_there: Boolean  # false for rows of neighbouring tiles


def row_at(
    packing: Packing, tile: Tile, first_position: Int32, row: Int32, rows: int = GRANULE
) -> RowAt:
    """The query in row ``row`` of a tile; ``rows`` is the number of rows of a granule."""
    granule = row // rows
    offset = granule // packing.heads * rows + row % rows
    in_group = tile.head % packing.units * packing.heads + granule % packing.heads
    return RowAt(
        first_position + offset,
        tile.kv_head * packing.group + cutlass.min(in_group, packing.group - 1),
        (offset < packing.positions) & (in_group < packing.group),
    )


class Sides(NamedTuple):
    """One value for each side: that which tiles are cut from, and that which they sweep."""

    own: Any
    swept: Any


class Sequences(NamedTuple):
    """Where sequences lie in the arrays; pointers may be null (``schema.OPERANDS``).

    Attributes:
        lengths: rows in use of each sequence (pointers).
        cu_seqlens: borders of packed sequences (pointers).
        q_offset: position of query row 0 of each sequence.
        num_sequences: number of sequences.
        rows: rows of one batch in an array (Int32).
    """

    lengths: Sides
    cu_seqlens: Sides
    q_offset: cute.Pointer
    num_sequences: Int32
    rows: Sides


class Span(NamedTuple):
    """The sequence of a tile.

    Attributes:
        sequence: its number.
        own_start: its first row in arrays of the own side.
        swept_start: its first row in arrays of the swept side.
        own_slot: rows of the own side that are written.
        own_len: rows of the own side in use.
        swept_len: rows of the swept side in use.
        q_offset: position of query row 0.
        first_row: row of the sequence at which the tile starts.
    """

    sequence: Int32
    own_start: Int32
    swept_start: Int32
    own_slot: Int32
    own_len: Int32
    swept_len: Int32
    q_offset: Int32
    first_row: Int32


def is_present(pointer: cute.Pointer) -> Boolean:
    """Whether an operand was given."""
    return pointer.toint() != 0


def element(pointer: cute.Pointer, index: Int32) -> cute.Numeric:
    """``pointer[index]``."""
    return cute.make_tensor(pointer + index, cute.make_layout(1))[0]


@cute.jit
def element_or(pointer: cute.Pointer, index: Int32, default: Int32) -> Int32:
    """``pointer[index]``, or ``default`` where the operand is absent."""
    value = default
    if is_present(pointer):
        value = element(pointer, index)
    return value


@cute.jit
def used_of(lengths: cute.Pointer, sequence: Int32, slot: Int32) -> Int32:
    """The rows in use of a sequence in a slot of ``slot`` rows, clamped to the slot."""
    return cutlass.max(cutlass.min(element_or(lengths, sequence, slot), slot), 0)


@cute.jit
def offset_of(q_offset: cute.Pointer, sequence: Int32) -> Int32:
    """The position of query row 0 of a sequence, clamped to the range that ``band.py`` allows."""
    offset = element_or(q_offset, sequence, Int32(0))
    return cutlass.max(cutlass.min(offset, MAX_OFFSET), -MAX_OFFSET)


class Stretch(NamedTuple):
    """Rows, other elements, or blocks of them, from ``start`` to before ``end``."""

    start: Int32
    end: Int32


@cute.jit
def slot_at(cu_seqlens: cute.Pointer, number: Int32, length: Int32) -> Stretch:
    """The rows, used or not, of sequence ``number`` in an array of ``length``: Note [Borders].

    All lanes of a warp call.
    """
    highest = Int32(0)
    for i in cutlass.range(cute.arch.lane_idx(), number + 1, edges.WARP, unroll=1):
        highest = cutlass.max(highest, element(cu_seqlens, i))
    start = cutlass.min(cute.arch.warp_redux_sync(highest, "max"), length)
    return Stretch(start, cutlass.max(cutlass.min(element(cu_seqlens, number + 1), length), start))


@cute.jit
def locate(sequences: Sequences, tile: Tile, tile_rows: Int32 | int) -> Span:
    """The sequence of ``tile``, of ``tile_rows`` rows. All lanes of a warp call.

    In packed arrays, the tile's ``block`` counts through the blocks of all sequences. The rows
    behind the last sequence form one more, which sweeps nothing, so that they are written too. A
    tile beyond that one has no rows.
    """
    s = sequences
    span = Span(
        tile.batch,
        Int32(0),
        Int32(0),
        s.rows.own,
        used_of(s.lengths.own, tile.batch, s.rows.own),
        used_of(s.lengths.swept, tile.batch, s.rows.swept),
        offset_of(s.q_offset, tile.batch),
        tile.block * tile_rows,
    )
    if is_present(s.cu_seqlens.own):
        lane = cute.arch.lane_idx()
        found, first, passed, begin = Int32(-1), Int32(0), Int32(0), Int32(0)
        own_start, own_end, highest = Int32(0), Int32(0), Int32(0)
        while (begin <= s.num_sequences) & (found < 0):
            number = cutlass.min(begin + lane, s.num_sequences)
            start = cutlass.min(element(s.cu_seqlens.own, number), s.rows.own)
            start, end = cutlass.max(start, highest), s.rows.own
            if number < s.num_sequences:
                end = cutlass.min(element(s.cu_seqlens.own, number + 1), s.rows.own)
            if cute.arch.vote_any_sync(end < start):
                for i in cutlass.range_constexpr(5):
                    start = cutlass.max(start, cute.arch.shuffle_sync_up(start, 1 << i))
                end = cutlass.max(end, start)
            blocks = Int32(0)
            if begin + lane <= s.num_sequences:
                blocks = cute.ceil_div(end - start, tile_rows)
            upto = blocks
            for i in cutlass.range_constexpr(5):
                below = cute.arch.shuffle_sync_up(upto, 1 << i)
                if lane >= 1 << i:
                    upto = upto + below
            hits = cute.arch.vote_ballot_sync(tile.block < passed + upto)
            if hits != 0:
                source = cute.arch.popc((hits & -hits) - 1)
                found = begin + source
                first = passed + cute.arch.shuffle_sync(upto - blocks, source)
                own_start = cute.arch.shuffle_sync(start, source)
                own_end = cute.arch.shuffle_sync(end, source)
            passed = passed + cute.arch.shuffle_sync(upto, edges.WARP - 1)
            highest = cute.arch.shuffle_sync(end, edges.WARP - 1)
            begin = begin + edges.WARP
        number = cutlass.max(found, 0)
        swept = Stretch(Int32(0), Int32(0))
        if number < s.num_sequences:
            swept = slot_at(s.cu_seqlens.swept, number, s.rows.swept)
        clamped = cutlass.min(number, s.num_sequences - 1)
        own_slot = own_end - own_start
        # Masks read the first swept row even where nothing is swept, so it has to exist.
        span = Span(
            clamped,
            own_start,
            cutlass.min(swept.start, s.rows.swept - 1),
            own_slot,
            used_of(s.lengths.own, clamped, own_slot),
            used_of(s.lengths.swept, clamped, swept.end - swept.start),
            offset_of(s.q_offset, clamped),
            (tile.block - first) * tile_rows,
        )
        if number == s.num_sequences:
            span = span._replace(own_len=Int32(0))
        if found < 0:
            span = span._replace(own_slot=Int32(0), own_len=Int32(0), swept_len=Int32(0))
    return span
