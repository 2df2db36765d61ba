"""Dense masks as kernels read them: packed words, and a map of blocks that saves reading words.

A boolean mask [B|1, N|1, T|1, S|1] becomes int32 words [B|1, N|1, T|1, W|1] of 32 keys each, an
eighth of its size; a dimension along which it is broadcast stays 1. A mask of 128 x 128 blocks
becomes words with a row for each 128 queries. The map has a bit for each block of 16 rows and 16
keys in two planes: whether any pair of the block is visible, and whether all are. With the map,
kernels skip hidden blocks, and apply no mask to wholly visible ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_fa.spec.band import ceil_div
from jax_fa.spec.division import MAP_CELL, MASK_BLOCK, WORD_KEYS, map_stripes
from jax_fa.spec.problem import Operands

_OCTET = 8
"""Bits of a byte."""


def mapped(operands: Operands) -> Operands:
    """The operands with the map of their mask, if they have one."""
    words = operands.mask_words
    if words is None:
        return operands
    q_len, kv_len = operands.q.shape[1], operands.k.shape[1]
    return operands._replace(mask_map=block_map(words, q_len, kv_len))


def packed(mask: Array) -> Array:
    """int32 words [..., W] of a boolean mask [..., S]; of one [..., 1], one word for all keys.

    Bits beyond key S are 0.
    """
    if mask.shape[-1] == 1:
        return jnp.where(mask, jnp.int32(-1), jnp.int32(0))
    bits = _split(mask, WORD_KEYS, pad=False)
    bits = bits.reshape(*bits.shape[:-1], WORD_KEYS // _OCTET, _OCTET)
    # A sum of slices, by bytes: a GPU then reads a mask as fast as it adds one up (16384 x 16384:
    # on an H100 119 us, by words 136; on an H200 by words 102, by a sum over a dimension 208).
    octets = bits[..., 0].astype(jnp.uint8)
    for i in range(1, _OCTET):
        octets |= bits[..., i].astype(jnp.uint8) << i
    return jax.lax.bitcast_convert_type(octets, jnp.int32)


def spread(keys: Array) -> Array:
    """[..., S] -> [..., 32 W]: the first key of all words, then the second, and so on.

    ``packed_spread`` packs a mask that is computed from these. The last key is repeated.
    """
    widths = [(0, 0)] * (keys.ndim - 1) + [(0, -keys.shape[-1] % WORD_KEYS)]
    filled = jnp.pad(keys, widths, mode="edge")
    by_word = filled.reshape(*keys.shape[:-1], -1, WORD_KEYS)
    return by_word.swapaxes(-1, -2).reshape(filled.shape)


def packed_spread(mask: Array, kv_len: int) -> Array:
    """``packed`` of a mask of ``kv_len`` keys whose last dimension is in the order of ``spread``.

    Threads of a GPU then make words side by side, each from its own keys: XLA takes a sum of fewer
    than 32 elements for no reduction. In the order of keys, it computes a word with several.
    """
    bits = mask.reshape(*mask.shape[:-1], WORD_KEYS // _OCTET, _OCTET, -1)
    values = 1 << _counted(bits.ndim - 1, _OCTET)[..., None]
    octets = jnp.sum(jnp.where(bits, values, 0).astype(jnp.uint8), axis=-2, dtype=jnp.uint8)
    words = octets[..., 0, :].astype(jnp.int32)
    for i in range(1, WORD_KEYS // _OCTET):
        words |= octets[..., i, :].astype(jnp.int32) << (_OCTET * i)
    return words & ~_beyond(words.shape[-1], kv_len) if kv_len % WORD_KEYS else words


def by_blocks(blocks: Array, kv_len: int) -> Array:
    """int32 words [B|1, N|1, rows, W|1] of the mask that 128 x 128 blocks describe.

    Args:
        blocks: bool [B|1, N|1, rows, columns].
        kv_len: S. Bits beyond key S are 0.
    """
    words = jnp.where(blocks, jnp.int32(-1), jnp.int32(0))
    if blocks.shape[3] > 1:
        words = jnp.repeat(words, MASK_BLOCK // WORD_KEYS, axis=3)[
            ..., : ceil_div(kv_len, WORD_KEYS)
        ]
    return words & ~_beyond(words.shape[3], kv_len)


def of_pairs(blocks: Array, q_len: Any, kv_len: Any) -> Array:
    """The mask [B|1, N|1, T|1, S|1] that ``blocks`` describe."""
    for axis, length in ((2, q_len), (3, kv_len)):
        if blocks.shape[axis] != 1:
            blocks = jnp.take(blocks, jnp.arange(length) // MASK_BLOCK, axis=axis, mode="clip")
    return blocks


def both(words: Array, other: Array, q_len: int) -> Array:
    """The words of the pairs that two masks both show."""
    if q_len in (words.shape[2], other.shape[2]):
        words, other = by_rows(words, q_len), by_rows(other, q_len)
    return words & other


def block_map(words: Array, q_len: int, kv_len: int) -> Array:
    """int32 [B|1, N|1, 2, stripes, words]: which 16 x 16 blocks show some pair, and which all.

    Args:
        words: of a mask, [B|1, N|1, rows, W|1].
        q_len: T.
        kv_len: S. Pairs beyond the last row or key count neither as hidden nor as visible.
    """
    width = words.shape[3]
    rows = MAP_CELL if words.shape[2] == q_len else 1
    some = _joined(words, rows, jnp.bitwise_or, 0)
    every = _joined(words | _beyond(width, kv_len), rows, jnp.bitwise_and, -1)
    # Both planes at a time, by a code for each word, so that XLA reads the words once. On an H200,
    # 16384 x 16384, this takes 13 us; one plane after the other, bit by bit, 18.
    codes = _codes(some, every)
    if rows == 1:
        codes = jnp.repeat(codes, MASK_BLOCK // MAP_CELL, axis=2)
    codes = codes[:, :, : map_stripes(words.shape[2], q_len)]
    if width * WORD_KEYS < kv_len:  # one word speaks of all keys
        codes = jnp.broadcast_to(codes, (*codes.shape[:3], WORD_KEYS // _HALVES))
    codes = _split(codes, WORD_KEYS // _HALVES, pad=_BEYOND_ALL)
    planes = []
    for plane in range(2):
        cells = (codes >> (plane * _HALVES)).astype(jnp.int32) & ((1 << _HALVES) - 1)
        shifted = (cells[..., i] << (i * _HALVES) for i in range(cells.shape[-1]))
        planes.append(functools.reduce(jnp.bitwise_or, shifted))
    return jnp.stack(planes, axis=2)


_ALL_KEYS = (1 << MAP_CELL) - 1
_HALVES = WORD_KEYS // MAP_CELL
"""Cells of a word."""
_BEYOND_ALL = ((1 << _HALVES) - 1) << _HALVES
"""The code of cells beyond the last: they show no pair, and hide none."""


def _joined(words: Array, rows: int, join: Callable[[Array, Array], Array], pad: int) -> Array:
    """[B|1, N|1, T, W] -> [B|1, N|1, ceil(T / rows), W]: ``rows`` words joined, bit by bit."""
    # Row by row: where devices split the rows, XLA cannot reduce by these operations.
    stripes = _split(words, rows, axis=2, pad=pad)
    return functools.reduce(join, (stripes[:, :, :, row] for row in range(rows)))


def _codes(some: Array, every: Array) -> Array:
    """uint8 of each word: which of its cells show some pair, then which show all."""
    code = jnp.zeros_like(some)
    for half in range(_HALVES):
        shows_some = (some >> (MAP_CELL * half)) & _ALL_KEYS != 0
        shows_all = (every >> (MAP_CELL * half)) & _ALL_KEYS == _ALL_KEYS
        code |= shows_some.astype(jnp.int32) << half
        code |= shows_all.astype(jnp.int32) << (_HALVES + half)
    return code.astype(jnp.uint8)


def unpacked(words: Array, q_len: int, kv_len: int) -> Array:
    """The boolean mask [B|1, N|1, T|1, S|1] of which ``words`` are made."""
    words = by_rows(words, q_len)
    bits = (words[..., None] >> _counted(words.ndim + 1, WORD_KEYS)) & 1
    pairs = bits.reshape(*words.shape[:-1], words.shape[-1] * WORD_KEYS) != 0
    return pairs[..., : kv_len if pairs.shape[-1] >= kv_len else 1]


def hidden_share(mask: np.ndarray | None, blocks: np.ndarray | None) -> float | None:
    """The share of blocks of 128 x 128 in which mask and block mask hide all; None without any.

    Both are bool of rank 4 at most.
    """
    shown = None if blocks is None else blocks
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        for axis in (2, 3):
            starts = range(0, mask.shape[axis], MASK_BLOCK)
            mask = np.logical_or.reduceat(mask, starts, axis) if mask.size else mask
        shown = mask if shown is None else shown & mask
    return None if shown is None or not shown.size else float(1 - shown.mean())


def rows(operands: Operands, start: Array | int, count: int) -> Operands:
    """Operands whose mask is that of ``count`` rows from ``start`` on; without its map."""
    words = operands.mask_words
    if words is None:
        return operands
    if words.shape[2] == operands.q.shape[1]:
        words = jax.lax.dynamic_slice_in_dim(words, start, count, 2)
    elif words.shape[2] > 1:
        words = rows_of_blocks(words, start, count)
    return operands._replace(mask_words=words, mask_map=None)


def rows_of_blocks(words: Array, start: Array | int, count: int) -> Array:
    """Words with a row for each of ``count`` queries from ``start`` on, of words of blocks."""
    blocks = (start + jnp.arange(count, dtype=jnp.int32)) // MASK_BLOCK
    return jnp.take(words, blocks, axis=2, mode="clip")


def by_rows(words: Array, q_len: int) -> Array:
    """Words with a row for each query, or one for all."""
    if words.shape[2] in (1, q_len):
        return words
    return jnp.repeat(words, MASK_BLOCK, axis=2)[:, :, :q_len]


def of_keys(words: Array, first: Array | int, count: int, kv_len: int) -> Array:
    """The words of ``count`` keys from key ``first`` on, of a mask of ``kv_len`` keys.

    ``first`` is a multiple of ``count``.
    """
    if count == kv_len:
        return words
    width = ceil_div(count, WORD_KEYS)
    if words.shape[3] * WORD_KEYS >= kv_len:  # otherwise one word speaks of all keys
        word, shift = jnp.divmod(jnp.asarray(first, jnp.int32), WORD_KEYS)
        following = jnp.pad(words[..., 1:], [(0, 0)] * 3 + [(0, 1)])
        words = jax.lax.dynamic_slice_in_dim(words, word, width, 3)
        if count % WORD_KEYS:
            following = jax.lax.dynamic_slice_in_dim(following, word, width, 3)
            carried = jnp.left_shift(following, WORD_KEYS - shift)
            words = jax.lax.shift_right_logical(words, jnp.broadcast_to(shift, words.shape))
            words |= jnp.where(shift > 0, carried, 0)
    return words & ~_beyond(words.shape[3], count)


def _beyond(width: int, kv_len: int) -> np.ndarray:
    """int32 [1, 1, 1, width]: bits of keys beyond S; none in a word that speaks of all keys."""
    if width * WORD_KEYS < kv_len:
        return np.zeros((1, 1, 1, width), np.int32)
    keys = np.arange(width * WORD_KEYS).reshape(width, WORD_KEYS)
    bits = np.sum((keys >= kv_len) * (1 << np.arange(WORD_KEYS)), axis=1)
    return bits.astype(np.uint32).astype(np.int32).reshape(1, 1, 1, width)


def _counted(rank: int, count: int) -> Array:
    """int32 0, 1, ... along the last of ``rank`` dimensions; promotes no rank."""
    return jnp.arange(count, dtype=jnp.int32).reshape((1,) * (rank - 1) + (count,))


def _split(x: Array, size: int, *, pad: int, axis: int = -1) -> Array:
    """[..., n, ...] -> [..., ceil(n / size), size, ...], filled up with ``pad``."""
    axis %= x.ndim
    length = x.shape[axis]
    widths = [(0, -length % size if i == axis else 0) for i in range(x.ndim)]
    filled = jnp.pad(x, widths, constant_values=pad) if length % size else x
    return filled.reshape(*x.shape[:axis], ceil_div(length, size), size, *x.shape[axis + 1 :])
