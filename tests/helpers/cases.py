"""The one list of cases that CPU, emulator and GPU tests share.

Sizes are small enough for an emulator; ``CASES`` covers every feature alone and the combinations
where features meet. Lengths, offsets and segments are data, so that one case is one compilation.
CASE_SEED=N in the environment draws other values, and other schedules in the emulator.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jax_fa.spec.band import Alignment, Band
from jax_fa.spec.problem import Operands, Semantics

DTYPES = ("float32", "bfloat16", "float16")

Ints = tuple[int, ...]

SEED = int(os.environ.get("CASE_SEED", "0"))


@dataclass(frozen=True)
class Dense:
    """A dense boolean mask.

    Attributes:
        kind: "random" shows most pairs; "causal", "window" and "documents" are what their names
            say, as arrays; "halves" shows heads the first half of the rows or the
            second by turns; "holes" hides some rows, some keys and some blocks altogether;
            "blocks" shows a quarter of the squares of 100 rows and keys.
        dims: those of B, N, T, S along which it varies.
    """

    kind: str
    dims: str = "TS"

    def make(self, case: Case) -> np.ndarray:
        """bool [B|1, N|1, T|1, S|1]."""
        rng = np.random.default_rng([case.seed, *case.name.encode(), 1])
        extents = {"B": case.batch, "N": case.heads, "T": case.q_len, "S": case.kv_len}
        shape = tuple(extents[x] if x in self.dims else 1 for x in "BNTS")
        rows, keys = np.arange(shape[2])[:, None], np.arange(shape[3])
        # Another one for each sequence and head.
        shift = 7 * np.arange(shape[0] * shape[1]).reshape(*shape[:2], 1, 1)
        if self.kind == "random":
            return rng.random(shape) < 0.7
        if self.kind == "causal":
            return np.broadcast_to(keys <= rows + shift, shape)
        if self.kind == "window":
            return np.broadcast_to(abs(keys - rows - shift) <= 20, shape)
        if self.kind == "documents":
            return np.broadcast_to((rows + shift) // 50 == (keys + shift) // 50, shape)
        if self.kind == "halves":
            return np.broadcast_to(rows * 2 // case.q_len == shift // 7 % 2, shape)
        if self.kind == "blocks":
            squares = rng.random((*shape[:2], shape[2] // 100 + 1, shape[3] // 100 + 1)) < 0.25
            return squares[:, :, rows // 100, keys // 100]
        shown = np.ones(shape, bool)
        shown[:, :, 5:9] = False
        shown[..., 40:75] &= shift > 0
        shown[:, :, 64:128, 128:] = False
        shown[:, :, 17:] &= keys % 48 != 13
        return shown


@dataclass(frozen=True)
class Bias:
    """A bias.

    Attributes:
        kind: "random"; "distance" falls off from the diagonal, by head; "holes" is random, but
            hides some rows, some keys and some pairs, by -inf.
        dims: those of B, N, T, S along which it varies.
        is_float32: whatever the type of the query.
    """

    kind: str = "random"
    dims: str = "NTS"
    is_float32: bool = False

    def make(self, case: Case, kind: np.dtype) -> np.ndarray:
        """[B|1, N|1, T|1, S|1]."""
        rng = np.random.default_rng([case.seed, *case.name.encode(), 3])
        extents = {"B": case.batch, "N": case.heads, "T": case.q_len, "S": case.kv_len}
        shape = tuple(extents[x] if x in self.dims else 1 for x in "BNTS")
        values = rng.standard_normal(shape)
        rows, keys = np.arange(shape[2])[:, None], np.arange(shape[3])
        if self.kind == "distance":
            slopes = 0.5 ** np.arange(1, shape[1] + 1).reshape(1, -1, 1, 1)
            values = np.broadcast_to(-abs(rows - keys) * slopes, shape).copy()
        if self.kind == "holes":
            values[:, :, 5:9] = -np.inf
            values[..., 40:75] = -np.inf
            values[rng.random(shape) < 0.1] = -np.inf
        return values.astype(np.float32 if self.is_float32 else kind)


@dataclass(frozen=True)
class Case:
    """One attention problem with its data, as a test names it.

    Attributes:
        name: what the case is about.
        batch: B; 1 where ``cu_q`` is given.
        q_len: T, or the total of packed rows.
        kv_len: S, or the total of packed keys.
        heads: N.
        kv_heads: K.
        head_dim: D.
        value_dim: Dv; D if None.
        window: local_window_size as a caller writes it.
        q_lengths: query_seq_lengths, or seqused_q where packed.
        kv_lengths: key_value_seq_lengths, or seqused_k where packed.
        cu_q: cu_seqlens_q of a packed case.
        cu_k: cu_seqlens_k of a packed case.
        segments: (query ids, key ids) of one row, used for every row of the batch; None for none.
        q_offset: one for all sequences, or one each.
        dense: the boolean mask, None for none.
        bias: None for none.
        block_dims: those of B, N, T, S along which a block mask varies; None for none.
        magnitude: factor of the random queries, for sharp softmax rows.
    """

    name: str
    batch: int = 1
    q_len: int = 64
    kv_len: int = 64
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    is_causal: bool = False
    alignment: Alignment = "top_left"
    window: int | tuple[int | None, int | None] | None = None
    scale: float | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    q_lengths: Ints | None = None
    kv_lengths: Ints | None = None
    cu_q: Ints | None = None
    cu_k: Ints | None = None
    segments: tuple[Ints, Ints] | None = None
    q_offset: int | Ints | None = None
    dense: Dense | None = None
    bias: Bias | None = None
    block_dims: str | None = None
    magnitude: float = 1.0
    seed: int = SEED

    def __str__(self) -> str:
        return self.name

    @property
    def is_packed(self) -> bool:
        return self.cu_q is not None

    @property
    def num_sequences(self) -> int:
        return self.batch if self.cu_q is None else len(self.cu_q) - 1

    @property
    def out_dim(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def semantics(self) -> Semantics:
        """What is asked, in the library's own words."""
        sides = self.window if isinstance(self.window, tuple) else (self.window, self.window)
        band = Band(self.is_causal, sides[0], sides[1], self.alignment)
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return Semantics(scale, band, self.soft_cap)

    def blocks(self) -> np.ndarray:
        """The block mask, bool [B|1, N|1, rows|1, columns|1]: two thirds of the blocks."""
        rng = np.random.default_rng([self.seed, *self.name.encode(), 2])
        columns = {"T": -(-self.q_len // 128), "S": -(-self.kv_len // 128)}
        extents = {"B": self.batch, "N": self.heads, **columns}
        return rng.random([extents[x] if x in self.block_dims else 1 for x in "BNTS"]) < 0.67

    def words(self) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
        """Words and map of mask and block mask together."""
        if self.block_dims is None and self.dense is None:
            return None, None
        blocks = self.blocks() if self.block_dims is not None else np.ones((1, 1, 1, 1), bool)
        keys = np.repeat(blocks, 128, axis=3)[..., : self.kv_len] if blocks.shape[3] > 1 else blocks
        if self.dense is None:
            return packed(keys, self.q_len, self.kv_len)
        rows = np.repeat(keys, 128, axis=2)[:, :, : self.q_len] if keys.shape[2] > 1 else keys
        return packed(self.dense.make(self) & rows, self.q_len, self.kv_len)

    def options(self, operands: Operands) -> dict[str, Any]:
        """Keywords of the public functions; lengths of packed sequences are not among them."""
        options: dict[str, Any] = {}
        if self.is_causal:
            options["is_causal"] = True
        if self.window is not None:
            options["local_window_size"] = self.window
        if self.alignment != "top_left":
            options["causal_alignment"] = self.alignment
        if self.scale is not None:
            options["scale"] = self.scale
        if self.soft_cap is not None:
            options["logits_soft_cap"] = self.soft_cap
        if self.dense is not None:
            options["mask"] = self.dense.make(self)
        if self.bias is not None:
            options["bias"] = operands.bias
        if self.block_dims is not None:
            options["block_mask"] = self.blocks()
        if self.has_sinks:
            options["sinks"] = operands.sinks[0]
        if self.q_offset is not None:
            scalar = isinstance(self.q_offset, int)
            options["query_offset"] = operands.q_offset[0] if scalar else operands.q_offset
        if self.segments is not None:
            drop = 0 if self.is_packed else slice(None)
            options["query_segment_ids"] = operands.q_segments[drop]
            options["key_value_segment_ids"] = operands.kv_segments[drop]
        if not self.is_packed and self.q_lengths is not None:
            options["query_seq_lengths"] = operands.q_lengths
        if not self.is_packed and self.kv_lengths is not None:
            options["key_value_seq_lengths"] = operands.kv_lengths
        return options


class Data(NamedTuple):
    """Arrays of a case, in numpy.

    Attributes:
        operands: as the library's internal form has them.
        cotangents: (dout, dlse).
    """

    operands: Operands
    cotangents: tuple[np.ndarray, np.ndarray]


def make(case: Case, dtype: str) -> Data:
    """The data of ``case`` in an element type; the same on every call."""
    rng = np.random.default_rng([case.seed, *case.name.encode()])
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def normal(*shape: int, factor: float = 1.0) -> np.ndarray:
        return (factor * rng.standard_normal(shape)).astype(kind)

    def ints(values: Any) -> np.ndarray | None:
        return None if values is None else np.asarray(values, np.int32)

    count = case.num_sequences
    rows, keys = (case.batch, case.q_len), (case.batch, case.kv_len)
    per_head = rng.standard_normal(case.heads).astype(np.float32)
    q_ids, kv_ids = (None, None) if case.segments is None else map(ints, case.segments)
    offset = ints(case.q_offset)
    words, blocks = case.words()
    operands = Operands(
        q=normal(*rows, case.heads, case.head_dim, factor=case.magnitude),
        k=normal(*keys, case.kv_heads, case.head_dim),
        v=normal(*keys, case.kv_heads, case.out_dim),
        q_lengths=ints(case.q_lengths),
        kv_lengths=ints(case.kv_lengths),
        cu_seqlens_q=ints(case.cu_q),
        cu_seqlens_k=ints(case.cu_k),
        q_segments=None if q_ids is None else np.tile(q_ids, (case.batch, 1)),
        kv_segments=None if kv_ids is None else np.tile(kv_ids, (case.batch, 1)),
        q_offset=None if offset is None else np.broadcast_to(offset, (count,)).copy(),
        sinks=np.tile(per_head, (count, 1)) if case.has_sinks else None,
        mask_words=words,
        mask_map=blocks,
        bias=None if case.bias is None else case.bias.make(case, kind),
    )
    dout = normal(*rows, case.heads, case.out_dim)
    dlse = rng.standard_normal((*rows, case.heads)).astype(np.float32)
    return Data(operands, (dout, dlse))


def packed(mask: np.ndarray, q_len: int, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Words and map of a boolean mask [B|1, N|1, rows, S|1], as ``schema.py`` describes them.

    There are T rows, one for each 128, or 1.
    """

    def words(bits: np.ndarray, fill: bool) -> np.ndarray:
        missing = -bits.shape[-1] % 32
        bits = np.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, missing)], constant_values=fill)
        return np.packbits(bits, axis=-1, bitorder="little").view(np.int32)

    whole = np.broadcast_to(mask, (*mask.shape[:3], kv_len))
    of_rows = np.repeat(whole, 1 if mask.shape[2] == q_len else 128, axis=2)[:, :, :q_len]
    stripes, cells = -(-of_rows.shape[2] // 16), -(-kv_len // 16)
    planes = np.zeros((*mask.shape[:2], 2, stripes, cells), bool)
    for stripe in range(stripes):
        for cell in range(cells):
            block = of_rows[:, :, 16 * stripe : 16 * stripe + 16, 16 * cell : 16 * cell + 16]
            planes[:, :, 0, stripe, cell] = block.any((2, 3))
            planes[:, :, 1, stripe, cell] = block.all((2, 3))
    by_word = words(whole, fill=False)
    by_block = np.concatenate(
        [words(planes[:, :, :1], fill=False), words(planes[:, :, 1:], fill=True)], axis=2
    )
    if mask.shape[3] == 1 < by_word.shape[3]:
        first = by_word[..., :1] != 0
        by_word = np.where(first, -1, 0).astype(np.int32)
        by_block = np.where(by_block[..., :1] & 1 != 0, -1, 0).astype(np.int32)
    return by_word, by_block


def documents(*lengths: int) -> Ints:
    """Segment ids 1, 2, ... of consecutive documents; a negative length is padding with id 0."""
    ids: list[int] = []
    for index, length in enumerate(lengths, start=1):
        ids += [index if length > 0 else 0] * abs(length)
    return tuple(ids)


def _self(name: str, length: int, **more: Any) -> Case:
    return Case(name, q_len=length, kv_len=length, **more)


_RETURNING: Ints = (*[1] * 90, *[2] * 80, *[1] * 70, *[2] * 90)
_ONE_AND_THREE: Ints = (*[1] * 50, *[3] * 50)
_GQA: dict[str, Any] = {"heads": 6, "kv_heads": 2}
_SMALL: dict[str, Any] = {"head_dim": 32}
_EVERYTHING: dict[str, Any] = {
    "batch": 2,
    "q_len": 130,
    "kv_len": 170,
    "q_lengths": (120, 130),
    "kv_lengths": (170, 99),
    "q_offset": (20, 3),
    "is_causal": True,
    "window": (90, None),
    "alignment": "bottom_right",
    "soft_cap": 6.0,
    "has_sinks": True,
    "segments": (documents(60, 70), documents(80, 90)),
    **_GQA,
}
"""All features of sequences that are not packed; of masks and unequal heads, none."""

CASES: tuple[Case, ...] = (
    # Shapes.
    Case("single_token_and_key", q_len=1, kv_len=1, heads=1, kv_heads=1),
    _self("one_block", 128, heads=1, kv_heads=1),
    _self("two_and_a_bit_blocks", 300, heads=1, kv_heads=1),
    Case("batch_and_heads", batch=3, q_len=48, kv_len=80, heads=4, kv_heads=4),
    Case("prime_sizes", batch=2, q_len=101, kv_len=211, heads=3, kv_heads=1, head_dim=40),
    Case("one_query_many_keys", q_len=1, kv_len=257),
    Case("many_queries_one_key", q_len=257, kv_len=1),
    Case("more_queries_than_keys", q_len=200, kv_len=70),
    Case("more_keys_than_queries", q_len=70, kv_len=200),
    *(_self(f"head_dim_{d}", 72, head_dim=d) for d in (8, 16, 32, 80, 96, 128, 192, 256)),
    _self("value_dim_128_of_192", 100, head_dim=192, value_dim=128),
    _self("value_dim_larger", 100, head_dim=32, value_dim=96),
    _self("odd_head_dim", 33, head_dim=23, value_dim=7),
    # Head grouping.
    Case("gqa", batch=2, q_len=96, kv_len=130, **_GQA),
    Case("mqa", batch=2, q_len=130, kv_len=96, heads=5, kv_heads=1),
    _self("gqa_causal", 130, is_causal=True, heads=8, kv_heads=2, head_dim=128),
    # Causal and alignment.
    _self("causal", 256, is_causal=True),
    _self("causal_odd", 197, is_causal=True, **_GQA),
    Case("causal_top_left_short_q", q_len=70, kv_len=200, is_causal=True),
    Case("causal_top_left_long_q", q_len=200, kv_len=70, is_causal=True),
    Case(
        "causal_bottom_right_short_q",
        q_len=70,
        kv_len=200,
        is_causal=True,
        alignment="bottom_right",
    ),
    Case(
        "causal_bottom_right_empty_rows",
        q_len=200,
        kv_len=70,
        is_causal=True,
        alignment="bottom_right",
    ),
    # Windows.
    _self("window_symmetric", 260, window=37),
    _self("window_zero", 140, window=0),
    _self("window_left_only", 260, window=(50, None)),
    _self("window_right_only", 260, window=(None, 50)),
    _self("window_left_zero_right", 260, window=(64, 0)),
    _self("window_causal", 260, window=(100, 100), is_causal=True, **_GQA),
    Case("window_bottom_right", q_len=90, kv_len=250, window=(40, 20), alignment="bottom_right"),
    Case("window_beyond_the_keys", q_len=250, kv_len=90, window=(16, 16)),
    _self("window_ahead_of_diagonal", 150, window=(-3, 20)),
    # Lengths.
    Case(
        "lengths", batch=3, q_len=130, kv_len=150, q_lengths=(130, 1, 77), kv_lengths=(64, 150, 65)
    ),
    Case("lengths_zero", batch=3, q_len=64, kv_len=64, q_lengths=(0, 64, 5), kv_lengths=(64, 0, 1)),
    Case(
        "lengths_beyond_slot",
        batch=2,
        q_len=50,
        kv_len=60,
        q_lengths=(99, -3),
        kv_lengths=(500, 60),
    ),
    Case("kv_lengths_only", batch=2, q_len=80, kv_len=140, kv_lengths=(129, 3), **_GQA),
    Case(
        "lengths_causal_bottom_right",
        batch=3,
        q_len=90,
        kv_len=160,
        q_lengths=(90, 40, 70),
        kv_lengths=(160, 100, 30),
        is_causal=True,
        alignment="bottom_right",
    ),
    Case(
        "lengths_window_bottom_right",
        batch=2,
        q_len=120,
        kv_len=120,
        q_lengths=(31, 120),
        kv_lengths=(120, 64),
        window=(20, 10),
        alignment="bottom_right",
    ),
    # Segments.
    _self("segments", 200, segments=(documents(60, 1, 100, 39), documents(60, 1, 100, 39))),
    _self(
        "segments_causal",
        256,
        is_causal=True,
        segments=(documents(100, 28, 120, -8), documents(100, 28, 120, -8)),
        **_GQA,
    ),
    Case(
        "segments_without_partner",
        q_len=90,
        kv_len=70,
        segments=(documents(30, 30, 30), documents(50, -20)),
    ),
    _self(
        "segments_interleaved",
        96,
        segments=(tuple(i % 3 for i in range(96)), tuple(i % 4 for i in range(96))),
    ),
    _self("segments_that_return", 330, segments=(_RETURNING, _RETURNING)),
    Case(
        "segments_between", q_len=100, kv_len=130, segments=(_ONE_AND_THREE, documents(40, 30, 60))
    ),
    _self(
        "segments_of_many_tiles",
        700,
        heads=4,
        kv_heads=2,
        is_causal=True,
        segments=(documents(90, 410, 200), documents(90, 410, 200)),
    ),
    _self(
        "segments_and_lengths",
        100,
        batch=2,
        segments=(documents(50, 50), documents(30, 70)),
        q_lengths=(100, 60),
        kv_lengths=(20, 90),
    ),
    # Soft cap, scale, sinks.
    _self("soft_cap", 130, soft_cap=5.0, magnitude=4.0),
    _self("soft_cap_tight_causal", 130, soft_cap=0.5, is_causal=True, **_GQA),
    _self("scale_large", 300, scale=1.5),
    _self("scale_negative", 60, scale=-0.2),
    _self("scale_zero", 60, scale=0.0),
    _self("sharp_rows", 160, magnitude=30.0),
    _self("sinks", 140, has_sinks=True, heads=4, kv_heads=4),
    _self(
        "sinks_gqa_causal_window", 200, has_sinks=True, is_causal=True, window=(30, None), **_GQA
    ),
    Case(
        "sinks_empty_rows",
        batch=2,
        q_len=90,
        kv_len=40,
        has_sinks=True,
        is_causal=True,
        alignment="bottom_right",
        q_lengths=(90, 60),
        kv_lengths=(40, 0),
    ),
    _self("sinks_soft_cap", 100, has_sinks=True, soft_cap=3.0, magnitude=3.0),
    # Offsets.
    Case("offset_scalar", q_len=60, kv_len=220, is_causal=True, q_offset=100),
    Case("offset_negative", q_len=120, kv_len=80, is_causal=True, q_offset=-40),
    Case("offset_beyond_the_keys", q_len=40, kv_len=60, window=(10, 0), q_offset=1000),
    Case("offset_each", batch=3, q_len=64, kv_len=190, is_causal=True, q_offset=(0, 126, 63)),
    Case("decode", batch=3, q_len=1, kv_len=256, q_offset=(0, 100, 255), is_causal=True, **_GQA),
    Case(
        "few_queries_many_keys",
        q_len=3,
        kv_len=1200,
        kv_lengths=(1100,),
        kv_heads=1,
        is_causal=True,
        alignment="bottom_right",
    ),
    Case(
        "decode_long",  # long enough for GPU kernels to split the keys
        batch=2,
        q_len=1,
        kv_len=1100,
        heads=4,
        kv_heads=2,
        kv_lengths=(1100, 300),
        has_sinks=True,
    ),
    # Packed.
    Case("packed", q_len=200, kv_len=200, cu_q=(0, 70, 71, 200), cu_k=(0, 70, 71, 200)),
    Case(
        "packed_causal_gqa",
        q_len=256,
        kv_len=256,
        cu_q=(0, 100, 130, 256),
        cu_k=(0, 100, 130, 256),
        is_causal=True,
        **_GQA,
    ),
    Case(
        "packed_cross_zero_length",
        q_len=150,
        kv_len=170,
        cu_q=(0, 0, 50, 50, 120, 150),
        cu_k=(0, 30, 30, 90, 160, 170),
    ),
    Case(
        "packed_gaps_and_used",
        q_len=160,
        kv_len=180,
        cu_q=(5, 60, 100, 150),
        cu_k=(10, 90, 90, 170),
        q_lengths=(40, 99, 0),
        kv_lengths=(80, 5, 33),
    ),
    Case(
        "packed_segments_and_empty_slots",
        q_len=150,
        kv_len=140,
        cu_q=(0, 0, 90, 150, 150),
        cu_k=(0, 60, 140, 140, 140),
        segments=(documents(50, 100), documents(100, 40)),
    ),
    Case(
        "packed_bottom_right_window",
        q_len=140,
        kv_len=220,
        cu_q=(0, 60, 140),
        cu_k=(0, 150, 220),
        window=(30, 5),
        alignment="bottom_right",
    ),
    Case(
        "packed_everything",
        q_len=180,
        kv_len=200,
        cu_q=(0, 50, 110, 180),
        cu_k=(0, 80, 120, 200),
        q_lengths=(50, 30, 70),
        kv_lengths=(70, 40, 64),
        q_offset=(10, 0, -5),
        is_causal=True,
        window=(60, None),
        soft_cap=4.0,
        has_sinks=True,
        segments=(documents(100, 80), documents(90, 110)),
        **_GQA,
    ),
    # Dense masks.
    *(
        _self(f"mask_{kind}", 260, dense=Dense(kind))
        for kind in ("random", "causal", "window", "documents", "holes")
    ),
    *(
        Case(f"mask_of_{dims}", batch=2, q_len=90, kv_len=150, dense=Dense("holes", dims), **_GQA)
        for dims in ("S", "T", "BS", "NTS", "BNTS", "BT")
    ),
    *(
        _self(f"mask_head_dim_{d}", 270, heads=1, kv_heads=1, head_dim=d, dense=Dense("holes"))
        for d in (96, 128, 256)
    ),
    _self("mask_value_dim_128_of_192", 150, head_dim=192, value_dim=128, dense=Dense("window")),
    Case("mask_of_few_keys", q_len=140, kv_len=20, dense=Dense("random")),
    Case("mask_of_one_query", q_len=1, kv_len=1100, kv_heads=1, dense=Dense("random", "NS")),
    Case("mask_blocks", q_len=330, kv_len=700, kv_heads=1, dense=Dense("blocks", "NTS")),
    _self(
        "mask_blocks_and_segments",
        580,
        heads=2,
        kv_heads=1,
        dense=Dense("blocks"),
        segments=(documents(90, 310, 180), documents(90, 310, 180)),
    ),
    Case("mask_and_everything", dense=Dense("holes", "BNTS"), **_EVERYTHING),
    # Block masks.
    *(
        Case(f"block_mask_of_{dims}", 2, 150, 270, block_dims=dims, **_GQA)
        for dims in ("TS", "BNTS", "BS", "NT")
    ),
    *(
        _self(f"block_mask_head_dim_{d}", 390, heads=1, kv_heads=1, head_dim=d, block_dims="TS")
        for d in (96, 128, 256)
    ),
    _self("block_mask_causal", 520, heads=1, kv_heads=1, is_causal=True, block_dims="TS"),
    Case("block_mask_and_everything", block_dims="BNTS", **_EVERYTHING),
    _self("block_mask_and_mask", 270, block_dims="NTS", dense=Dense("causal")),
    # Biases.
    *(
        Case(f"bias_of_{dims}", batch=2, q_len=90, kv_len=150, bias=Bias(dims=dims), **_GQA)
        for dims in ("TS", "NTS", "BTS", "BNTS", "S", "BS", "NS", "T", "BNT", "N")
    ),
    Case("bias_of_nothing", batch=2, q_len=20, kv_len=30, bias=Bias(dims="")),
    Case("bias_blocks", q_len=300, kv_len=410, bias=Bias(), **_GQA),
    _self("bias_distance_causal", 260, is_causal=True, bias=Bias("distance")),
    *(
        _self(f"bias_head_dim_{d}", 150, heads=1, kv_heads=1, head_dim=d, bias=Bias())
        for d in (40, 96, 128, 256)
    ),
    _self("bias_value_dim_128_of_192", 150, head_dim=192, value_dim=128, bias=Bias()),
    Case("bias_holes", batch=2, q_len=140, kv_len=170, bias=Bias("holes", "BNTS"), **_GQA),
    _self("bias_float32", 150, bias=Bias("holes", is_float32=True)),
    _self("bias_soft_cap", 150, soft_cap=3.0, bias=Bias("holes"), magnitude=2.0),
    _self("bias_and_mask", 150, bias=Bias(dims="TS"), dense=Dense("random", "NTS")),
    Case("bias_of_one_query", q_len=1, kv_len=1100, kv_heads=1, bias=Bias()),
    Case("bias_and_everything", bias=Bias("holes", "BNTS"), **_EVERYTHING),
    # Biases whose rows are multiples of 16 bytes apart: TMA reads them.
    *(
        Case(f"bias_tiles_of_{dims}", 2, 200, 264, bias=Bias("holes", dims), **_GQA)
        for dims in ("TS", "NTS", "BNTS", "BS")
    ),
    _self("bias_tiles_float32", 264, bias=Bias("holes", is_float32=True)),
    _self("bias_tiles_soft_cap", 264, soft_cap=3.0, bias=Bias("holes"), magnitude=2.0),
    _self("bias_tiles_window", 392, window=(40, 10), bias=Bias(is_float32=True)),
    # Biases with an element for each pair, whose gradient Hopper's backward writes.
    Case("whole_bias_of_one_key", q_len=257, kv_len=1, bias=Bias()),
    Case("whole_bias_of_one_pair", batch=2, q_len=1, kv_len=1, bias=Bias(dims="BN")),
    Case("whole_bias_of_prime_sizes", 2, 101, 211, 3, 1, 32, bias=Bias(dims="BNTS")),
    *(
        _self(
            f"whole_bias_causal_head_dim_{d}",
            200,
            heads=1,
            kv_heads=1,
            head_dim=d,
            is_causal=True,
            bias=Bias(is_float32=d != 96),
        )
        for d in (96, 128, 192, 256)
    ),
    _self("whole_bias_window", 330, window=(20, 10), bias=Bias(is_float32=True)),
    Case(
        "whole_bias_lengths",
        *(3, 130, 270),
        q_lengths=(0, 130, 7),
        kv_lengths=(270, 100, 0),
        bias=Bias(dims="BNTS"),
        **_GQA,
    ),
    _self(
        "whole_bias_segments",
        330,
        segments=(documents(130, 150, 50), documents(30, 200, -100)),
        bias=Bias(),
    ),
    _self("whole_bias_mask", 330, bias=Bias("holes"), dense=Dense("blocks")),
    Case("bias_of_keys_and_everything", bias=Bias(dims="S", is_float32=True), **_EVERYTHING),
    # Everything at once, and rows that see nothing.
    Case("everything", value_dim=48, **_EVERYTHING),
    Case("all_rows_masked", q_len=70, kv_len=90, window=(0, 0), q_offset=500),
    Case("one_row_sees_one_key", q_len=65, kv_len=65, is_causal=True, q_offset=-64, **_SMALL),
    # Heads that GPU kernels pad, where features meet.
    _self("head_dim_1", 70, head_dim=1),
    _self("head_dim_40_sinks_causal", 90, head_dim=40, has_sinks=True, is_causal=True),
    Case(
        "head_dim_72_of_96_lengths",
        batch=2,
        q_len=70,
        kv_len=90,
        head_dim=72,
        value_dim=96,
        q_lengths=(70, 33),
        kv_lengths=(81, 90),
        has_sinks=True,
        is_causal=True,
        **_GQA,
    ),
    _self(
        "head_dim_48_of_24_segments",
        96,
        head_dim=48,
        value_dim=24,
        is_causal=True,
        segments=(documents(30, 40, 26), documents(30, 40, 26)),
    ),
    Case(
        "head_dim_160_of_128_packed",
        q_len=90,
        kv_len=100,
        head_dim=160,
        value_dim=128,
        cu_q=(0, 40, 90),
        cu_k=(0, 30, 100),
        has_sinks=True,
        soft_cap=4.0,
        **_GQA,
    ),
    # Tiles of queries and of keys that a mask leaves something, and segments nothing.
    Case(
        "mask_segments_apart",
        q_len=280,
        kv_len=400,
        segments=(documents(120, 160), (*documents(130), *[3] * 270)),
        dense=Dense("blocks", "NTS"),
        **_GQA,
    ),
    Case(
        "block_mask_segments_apart",
        batch=2,
        q_len=7,
        kv_len=500,
        segments=((9,) * 7, documents(100, 200, 200)),
        block_dims="BNTS",
        **_GQA,
    ),
)

BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "two cases share a name"
