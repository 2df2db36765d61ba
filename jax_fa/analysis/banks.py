"""Bank conflicts: which bytes of shared memory the lanes of a warp meet in, and what that costs.

Shared memory has 32 banks; the words of 4 bytes lie in them in turn. One pass serves one word of
each bank. An access is served in groups of as many lanes as move 128 bytes together (all 32 with 4
bytes each, a quarter of the warp with 16, the 8 rows of a matrix of ldmatrix or stmatrix), and a
group takes as many passes as the busiest bank has different words.

Rows of a tile are 32, 64 or 128 bytes apart, so 16 bytes of the same column of 8 rows would meet in
the same banks 2, 4 or 8 times. Hence the swizzle, applied to the address by TMA, by the matrix
units and by threads alike: the 16-byte pieces of a row change places with the number of the row.
Standard library only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from jax_fa.kernels.mma_sync.plan_few import row_floats, row_of_threads
from jax_fa.kernels.sm100.plan import MMA_ROWS, tiling
from jax_fa.spec.config_mma_sync import (
    FewQueries,
    MmaSyncBackward,
    MmaSyncBiasGradient,
    MmaSyncForward,
)
from jax_fa.spec.config_sm90 import HopperForward
from jax_fa.spec.config_sm90_bwd import HopperBackward
from jax_fa.spec.config_sm90_dbias import HopperBiasGradient
from jax_fa.spec.config_sm100 import BlackwellBackward, BlackwellForward
from jax_fa.spec.key import KernelKey

BANKS = 32
BANK_BYTES = 4
PASS_BYTES = BANKS * BANK_BYTES
WARP = 32
ELEMENT_BYTES = 2
PIECE = 8
"""16-bit elements of 16 bytes, the unit that a swizzle moves."""
SWIZZLE_BITS = {128: 3, 64: 2, 32: 1}
"""Bytes of a row of a swizzled panel -> address bits, from 4 on, that those from 7 on change."""


def passes(addresses: Sequence[int], size_bytes: int) -> int:
    """The number of passes of an access: lane i moves ``size_bytes`` at ``addresses[i]``."""
    lanes = max(1, PASS_BYTES // size_bytes)
    total = 0
    for first in range(0, len(addresses), lanes):
        words: dict[int, set[int]] = defaultdict(set)
        for address in addresses[first : first + lanes]:
            for word in range(address // BANK_BYTES, -(-(address + size_bytes) // BANK_BYTES)):
                words[word % BANKS].add(word)
        total += max(map(len, words.values()))
    return total


def fewest_passes(num_lanes: int, size_bytes: int) -> int:
    """Passes without a conflict."""
    return -(-num_lanes * size_bytes // PASS_BYTES)


def swizzled(address: int, width: int) -> int:
    """The swizzled place of byte ``address`` in a tile with rows of ``width`` bytes."""
    return address ^ (((address >> 7) & ((1 << SWIZZLE_BITS[width]) - 1)) << 4)


@dataclass(frozen=True)
class Tile:
    """Row-major 16-bit tile in shared memory, cut into panels of whole swizzle rows.

    Attributes:
        rows: of the tile.
        columns: of the tile.
        panel: columns at whose multiples it may be cut.
        is_swizzled: False for what would be without.
    """

    rows: int
    columns: int
    panel: int
    is_swizzled: bool = True

    @property
    def width(self) -> int:
        """Bytes of a row of a panel: as wide as a swizzle can be."""
        return next(width for width in SWIZZLE_BITS if self.panel * ELEMENT_BYTES % width == 0)

    def address(self, row: int, column: int) -> int:
        """Of an element; the tile starts at 0."""
        panel, byte = divmod(column * ELEMENT_BYTES, self.width)
        plain = (panel * self.rows + row) * self.width + byte
        return swizzled(plain, self.width) if self.is_swizzled else plain


class Element(NamedTuple):
    """An element of a tile; ``row`` is the word, ``column`` 0, where plain words are accessed."""

    row: int
    column: int


class Access(NamedTuple):
    """One access to shared memory, by a warp or for one matrix of a matrix unit.

    Attributes:
        who: role and data.
        instruction: by which.
        size_bytes: of a lane.
        tile: which is accessed; None for plain words.
        element: lane -> what it accesses.
        lanes: that take part.
    """

    who: str
    instruction: str
    size_bytes: int
    tile: Tile | None
    element: Callable[[int], Element]
    lanes: int = WARP

    def passes(self, *, swizzle: bool = True) -> int:
        """Passes that it takes, with or without the swizzle of its tile."""
        elements = [self.element(lane) for lane in range(self.lanes)]
        if self.tile is None:
            addresses = [BANK_BYTES * element.row for element in elements]
        else:
            tile = Tile(self.tile.rows, self.tile.columns, self.tile.panel, swizzle)
            addresses = [tile.address(element.row, element.column) for element in elements]
        return passes(addresses, self.size_bytes)

    @property
    def fewest(self) -> int:
        """Passes without a conflict."""
        return fewest_passes(self.lanes, self.size_bytes)


def _matrices_by_rows(lane: int) -> Element:
    """Row addresses of four 8 x 8 matrices: 16 rows, then the next 8 columns of them."""
    return Element(lane % 16, lane // 16 * PIECE)


def _matrices_transposed(lane: int) -> Element:
    """The same for a transposed store: 8 rows, the next 8 columns of them, then the next rows."""
    return Element(lane % 8 + lane // 16 * 8, lane // 8 % 2 * PIECE)


def _row_of_lane(lane: int) -> Element:
    return Element(lane, 0)


def _piece_of_lane(lane: int) -> Element:
    return Element(0, lane * PIECE)


def _piece_of_tile(tile: Tile, lane: int) -> Element:
    """Lanes have the pieces of a row of a panel, then those of the next row."""
    pieces = tile.width // (PIECE * ELEMENT_BYTES)
    return Element(lane // pieces, lane % pieces * PIECE)


def _pair_of_fragment(lane: int) -> Element:
    """Eight rows, of each four pairs of columns: an 8 x 8 piece of an accumulator."""
    return Element(lane // 4, lane % 4 * 2)


def _by_units(name: str, tile: Tile, unit: str) -> Iterator[Access]:
    """TMA writes or reads whole rows of panels; matrix units take 8 rows of 16 bytes at a time."""
    pieces = tile.width // (PIECE * ELEMENT_BYTES)
    yield Access(f"TMA, {name}", "cp.async.bulk.tensor", 16, tile, _piece_of_lane, pieces)
    if unit:
        yield Access(f"matrix unit, {name}", unit, 16, tile, _row_of_lane, 8)


def _tile(rows: int, columns: int, panel: int | None = None) -> Tile:
    return Tile(rows, columns, panel or columns)


def blackwell_forward(key: KernelKey, config: BlackwellForward) -> tuple[Access, ...]:
    """Accesses of the Blackwell forward: ``sm100/fwd.py``."""
    cut = tiling(key, config)
    q, out = _tile(MMA_ROWS, key.head_dim), _tile(MMA_ROWS, cut.out_columns)
    return (
        *_by_units("q", q, "tcgen05.mma"),
        *_by_units("k", _tile(config.block_kv // config.ctas, cut.kv_columns), "tcgen05.mma"),
        *_by_units("v", _tile(cut.kv_rows, key.value_dim // config.ctas), "tcgen05.mma"),
        Access("correction, out", "st.shared.v4", 16, out, _row_of_lane),
        *_by_units("out", out, ""),
        Access("softmax and correction, stats", "st/ld.shared.b32", 4, None, _row_of_lane),
    )


def hopper_forward(key: KernelKey, config: HopperForward) -> tuple[Access, ...]:
    """Accesses of the Hopper forward: ``sm90/fwd.py``."""
    q, out = _tile(64, key.head_dim), _tile(64, key.value_dim)
    found = [
        *_by_units("q", q, "" if config.q_in_registers else "wgmma"),
        *_by_units("k", _tile(config.block_kv, key.head_dim), "wgmma"),
        *_by_units("v", _tile(config.block_kv, key.value_dim), "wgmma"),
        Access("consume, out", "stmatrix.x4", 16, out, _matrices_by_rows),
        *_by_units("out", out, ""),
    ]
    if config.q_in_registers:
        found.append(Access("consume, q", "ldmatrix.x4", 16, q, _matrices_by_rows))
    return tuple(found)


def mma_sync_forward(key: KernelKey, config: MmaSyncForward) -> tuple[Access, ...]:
    """Accesses of the forward by mma.sync: ``mma_sync/fwd.py``, ``fwd_results.py``."""
    q, out = _tile(config.block_q, key.head_dim), _tile(config.block_q, key.value_dim)
    k, v = _tile(config.block_kv, key.head_dim), _tile(config.block_kv, key.value_dim)
    return (
        *(
            Access(f"load, {name}", "cp.async", 16, tile, partial(_piece_of_tile, tile))
            for name, tile in (("q", q), ("k", k), ("v", v))
        ),
        Access("products, q", "ldmatrix.x4", 16, q, _matrices_by_rows),
        Access("products, k", "ldmatrix.x4", 16, k, _matrices_transposed),
        Access("products, v", "ldmatrix.x4.trans", 16, v, _matrices_by_rows),
        Access("store, out", "st.shared.b32", 4, out, _pair_of_fragment),
        Access("store again, out", "ld.shared.v4", 16, out, partial(_piece_of_tile, out)),
    )


def mma_sync_few(key: KernelKey, config: FewQueries) -> tuple[Access, ...]:
    """Accesses of the forward for few queries: ``mma_sync/few.py``."""
    q, k = _tile(config.block_q, key.head_dim), _tile(config.block_kv, key.head_dim)
    v = _tile(config.block_kv, key.value_dim)
    row, of_row = row_floats(key), WARP * config.warps // config.block_q

    def sums_of_all(lane: int) -> Element:
        return Element(row_of_threads(lane // of_row, of_row) * row + lane % of_row * 4, 0)

    return (
        *(
            Access(f"load, {name}", "cp.async", 16, tile, partial(_piece_of_tile, tile))
            for name, tile in (("k", k), ("v", v))
        ),
        Access("products, q", "ldmatrix.x4", 16, q, _matrices_by_rows),
        Access("products, k", "ldmatrix.x4", 16, k, _matrices_transposed),
        Access("products, v", "ldmatrix.x4.trans", 16, v, _matrices_by_rows),
        Access(
            "sums of a warp",
            "st.shared.v2",
            8,
            None,
            lambda lane: Element(lane // 4 * row + lane % 4 * 2, 0),
        ),
        Access("sums of all warps", "ld.shared.v4", 16, None, sums_of_all),
    )


def mma_sync_backward(key: KernelKey, config: MmaSyncBackward) -> tuple[Access, ...]:
    """Accesses of the backward by mma.sync: ``mma_sync/bwd.py``."""
    k, v = _tile(config.block_kv, key.head_dim), _tile(config.block_kv, key.value_dim)
    rows = config.loaded_rows
    q, dout = _tile(rows, key.head_dim), _tile(rows, key.value_dim)
    ds = _tile(config.block_kv, rows)
    loaded = (("k", k), ("v", v), ("q", q), ("dout", dout))
    return (
        *(
            Access(f"load, {name}", "cp.async", 16, tile, partial(_piece_of_tile, tile))
            for name, tile in loaded
        ),
        *(
            Access(f"S and dP, {name}", "ldmatrix.x4", 16, tile, access)
            for (name, tile), access in zip(
                loaded, (*[_matrices_by_rows] * 2, *[_matrices_transposed] * 2), strict=True
            )
        ),
        *(
            Access(f"dK, dV and dQ, {name}", "ldmatrix.x4.trans", 16, tile, _matrices_by_rows)
            for name, tile in (("k", k), ("q", q), ("dout", dout))
        ),
        Access("P and dS", "st.shared.b32", 4, ds, _pair_of_fragment),
        Access("dK and dV, P and dS", "ldmatrix.x4", 16, ds, _matrices_by_rows),
        Access("dQ, dS", "ldmatrix.x4.trans", 16, ds, _matrices_transposed),
        Access("lse2 and delta", "ld.shared.v2", 8, None, lambda lane: Element(lane % 4 * 2, 0)),
    )


def mma_sync_bias_gradient(key: KernelKey, config: MmaSyncBiasGradient) -> tuple[Access, ...]:
    """Accesses of the gradient of a bias by mma.sync: ``mma_sync/dbias.py``."""
    q, dout = _tile(config.block_q, key.head_dim), _tile(config.block_q, key.value_dim)
    k, v = _tile(config.block_kv, key.head_dim), _tile(config.block_kv, key.value_dim)
    loaded = (("q", q), ("k", k), ("dout", dout), ("v", v))
    rows = (_matrices_by_rows, _matrices_transposed, _matrices_by_rows, _matrices_transposed)
    return (
        *(
            Access(f"load, {name}", "cp.async", 16, tile, partial(_piece_of_tile, tile))
            for name, tile in loaded
        ),
        *(
            Access(f"S and dP, {name}", "ldmatrix.x4", 16, tile, access)
            for (name, tile), access in zip(loaded, rows, strict=True)
        ),
        *_kept_bias("all"),
    )


def _kept_bias(role: str) -> tuple[Access, ...]:
    """Accesses of a gradient of a bias beside those of products."""
    return (
        # Each thread has four words of its own side by side.
        Access(f"{role}, bias", "st/ld.shared.v4", 16, None, lambda lane: Element(lane * 4, 0)),
        # The first row of a warp's fragment, whose columns are pairs.
        Access(f"{role}, columns", "st.shared", 4, None, lambda lane: Element(lane * 2, 0), 4),
    )


def hopper_backward(key: KernelKey, config: HopperBackward) -> tuple[Access, ...]:
    """Accesses of the Hopper backward: ``sm90/bwd.py``."""
    parts = 1 if config.splits_keys else config.num_consumers
    dq_columns = key.head_dim // (1 if config.splits_dq_rows else config.num_consumers)
    ds = _tile(config.block_q, config.block_kv, 64)
    staged = (Access("consume, dQ", "st.shared.v4", 16, None, _four),)
    return (
        *_by_units("k", _tile(config.block_kv, key.head_dim, dq_columns), "wgmma"),
        *_by_units("v", _tile(config.block_kv, key.value_dim), "wgmma"),
        *_by_units("q", _tile(config.block_q, key.head_dim, key.head_dim // parts), "wgmma"),
        *_by_units("dout", _tile(config.block_q, key.value_dim, key.value_dim // parts), "wgmma"),
        Access("consume, dS", "stmatrix.x4.trans", 16, ds, _matrices_transposed),
        Access("matrix unit, dS", "wgmma", 16, ds, _row_of_lane, 8),
        # Columns of the transposed scores are queries: lane l has those of l % 4, in pairs.
        Access(
            "consume, lse2 and delta",
            "ld.shared.v2",
            8,
            None,
            lambda lane: Element(lane % 4 * 2, 0),
        ),
        *(staged if config.stages_dq != "never" else ()),
        *(_chunk_of_bias(config) if config.bias_stages else ()),
    )


def _chunk_of_bias(config: HopperBackward) -> Iterator[Access]:
    """A chunk has 128 bytes of each query: 64 keys of 16 bits, or 32 in float32."""
    chunk = _tile(config.block_q, 64)
    yield from _by_units("bias", chunk, "")
    yield Access("consume, bias, 16 bits", "ldmatrix.x4.trans", 16, chunk, _matrices_transposed)
    # A float32 has two columns: lane l has key l / 4 of the queries that are its columns.
    yield Access(
        "consume, bias and dS, float32",
        "ld/st.shared",
        4,
        chunk,
        lambda lane: Element(lane % 4 * 2, lane // 4 * 2),
    )


def _four(lane: int) -> Element:
    """The first word of a lane's four, which lie side by side."""
    return Element(lane * 4, 0)


def hopper_bias_gradient(key: KernelKey, config: HopperBiasGradient) -> tuple[Access, ...]:
    """Accesses of Hopper's gradient of a bias: ``sm90/dbias.py``."""
    return (
        *_by_units("q", _tile(config.block_q, key.head_dim), "wgmma"),
        *_by_units("k", _tile(config.block_kv, key.head_dim), "wgmma"),
        *_by_units("dout", _tile(config.block_q, key.value_dim), "wgmma"),
        *_by_units("v", _tile(config.block_kv, key.value_dim), "wgmma"),
        *_kept_bias("consume"),
        Access("find, statistics", "st.shared.v2", 8, None, lambda lane: Element(lane * 2, 0)),
        Access(
            "consume, statistics", "ld.shared.v2", 8, None, lambda lane: Element(lane // 4 * 2, 0)
        ),
        *_rows_of_bias(config),
    )


def _rows_of_bias(config: HopperBiasGradient) -> Iterator[Access]:
    """A chunk whose rows are those of a fragment; the gradient is put where the bias was."""
    chunk = _tile(config.block_q, 64)
    yield from _by_units("bias", chunk, "")
    yield Access("consume, bias, 16 bits", "ld/st.shared", 4, chunk, _pair_of_fragment)
    yield Access(
        "consume, rows of dbias", "ld.shared.v4", 16, chunk, partial(_piece_of_tile, chunk)
    )


def blackwell_backward(key: KernelKey, config: BlackwellBackward) -> tuple[Access, ...]:
    """Accesses of the Blackwell backward: ``sm100/bwd.py``. Each CTA of a pair has a half."""
    ctas, keys = config.ctas, config.block_kv // config.ctas
    ds = _tile(config.block_kv, config.block_q // ctas)
    loaded = {
        "k": (keys, key.head_dim),
        "v": (keys, key.value_dim),
        "q": (config.block_q // ctas, key.head_dim),
        "dout": (config.block_q // ctas, key.value_dim),
    }
    if ctas > 1:
        loaded |= {
            "k_columns": (config.block_kv, key.head_dim // ctas),
            "q_columns": (config.block_q, key.head_dim // ctas),
            "dout_columns": (config.block_q, key.value_dim // ctas),
        }
    return (
        *(
            access
            for name, shape in loaded.items()
            for access in _by_units(name, _tile(*shape), "tcgen05.mma")
        ),
        Access("compute, dS", "st.shared.v4", 16, ds, _row_of_lane),
        Access("matrix unit, dS", "tcgen05.mma", 16, ds, _row_of_lane, 8),
        Access("compute, lse2 and delta", "ld.shared.v4", 16, None, lambda lane: Element(0, 0)),
        Access("reduce, dQ", "st.shared.v4", 16, None, lambda lane: Element(lane * 4, 0)),
    )


_CATALOGUE: dict[type, Callable[..., tuple[Access, ...]]] = {
    BlackwellForward: blackwell_forward,
    BlackwellBackward: blackwell_backward,
    FewQueries: mma_sync_few,
    MmaSyncForward: mma_sync_forward,
    MmaSyncBackward: mma_sync_backward,
    MmaSyncBiasGradient: mma_sync_bias_gradient,
    HopperForward: hopper_forward,
    HopperBackward: hopper_backward,
    HopperBiasGradient: hopper_bias_gradient,
}


def accesses(key: KernelKey, config: object) -> tuple[Access, ...]:
    """Every kind of access of the kernel for ``key`` under ``config``, but for set-up code.

    None of a kernel that is not listed here. Where keys are split, out does not pass through.
    """
    listed = _CATALOGUE.get(type(config))
    found = listed(key, config) if listed else ()
    if key.is_split:
        return tuple(access for access in found if not access.who.endswith(", out"))
    return found


def conflicts(found: Sequence[Access]) -> list[Access]:
    """Those that take more passes than their bytes need."""
    return [access for access in found if access.passes() > access.fewest]
