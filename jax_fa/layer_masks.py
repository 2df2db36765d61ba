"""Masks that layers build, in the form that kernels take instead of T x S entries.

Layers build masks from three parts: causality, padding (hidden queries and keys), and documents (a
query sees only the keys of its own). A product of such parts can be stated as a causal flag and
segment ids.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_fa.runtime import checks

MAX_ENTRIES = 2**24
"""Entries of the largest mask whose values are read: 4096 x 4096, 40 ms on one core."""

_BLOCK = 64
"""Rows that are compared at a time: their temporaries stay in cache."""

# Hidden tokens get segments of their own, with the largest ids, since padding follows documents:
# the ids of a block of keys that holds both then span no earlier document, and kernels skip the
# block for the queries of earlier documents.
_HIDDEN_KEY = 2**31 - 1
_HIDDEN_QUERY = 2**31 - 2


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["visible", "segments"],
    meta_fields=["lengths", "is_causal", "rank", "dtype"],
)
@dataclass(frozen=True)
class Mask:
    """A mask, stored as its parts; ``jnp.asarray`` turns it into an array of 0 and 1.

    Like an array, it may be passed to a jitted function.

    Attributes:
        lengths: T and S.
        rank: of the array.
        is_causal: query i sees no key beyond i.
        visible: bool [batch..., T] and [batch..., S], False where a query or key is hidden; None
            for a side that is visible as a whole.
        segments: integers [batch..., T] and [batch..., S]: a query sees only keys of its own
            segment; None if there is only one segment.
        dtype: of the array.
    """

    lengths: tuple[int, int]
    rank: int
    is_causal: bool = False
    visible: tuple[Array | None, Array | None] = (None, None)
    segments: tuple[Array, Array] | None = None
    dtype: Any = bool

    def ids(self) -> tuple[Array, Array] | None:
        """int32 [batch..., T] and [batch..., S], equal where a query sees a key, causality aside.

        None if they would be equal everywhere.
        """
        if self.segments is None and all(visible is None for visible in self.visible):
            return None
        q, kv = (
            jnp.zeros(length, jnp.int32) if self.segments is None else self.segments[i]
            for i, length in enumerate(self.lengths)
        )
        if all(visible is None for visible in self.visible):
            return q.astype(jnp.int32), kv.astype(jnp.int32)
        q, kv = (jnp.minimum(x.astype(jnp.int32), _HIDDEN_QUERY - 1) for x in (q, kv))
        q_visible, kv_visible = self.visible
        if q_visible is not None:
            q = jnp.where(q_visible, q, _HIDDEN_QUERY)
        if kv_visible is not None:
            kv = jnp.where(kv_visible, kv, _HIDDEN_KEY)
        return q, kv

    def __jax_array__(self) -> Array:
        """[batch..., 1, T, S], as the layer's own library makes it."""
        ids, (q_len, kv_len) = self.ids(), self.lengths
        pairs = jnp.ones((q_len, kv_len), bool)
        if ids is not None:
            pairs = ids[0][..., :, None] == ids[1][..., None, :]
        if self.is_causal:
            pairs &= jnp.tri(q_len, kv_len, dtype=bool)
        pairs = jnp.expand_dims(pairs, -3)
        missing = self.rank - pairs.ndim
        return pairs.reshape((1,) * missing + pairs.shape).astype(self.dtype)


def combined(masks: list[Mask]) -> Mask | None:
    """The product of the masks, or None if no single ``Mask`` can state it."""
    first, *others = masks
    documents: dict[tuple[int, int], Any] = {
        (id(m.segments[0]), id(m.segments[1])): m.segments for m in masks if m.segments is not None
    }
    if len(documents) > 1 or any(m.lengths != first.lengths for m in others):
        return None
    q_visible, kv_visible = (
        functools.reduce(jnp.logical_and, given) if given else None
        for given in (
            [x for x in one_side if x is not None]
            for one_side in zip(*(m.visible for m in masks), strict=True)
        )
    )
    return Mask(
        first.lengths,
        first.rank,
        is_causal=any(m.is_causal for m in masks),
        visible=(q_visible, kv_visible),
        segments=next(iter(documents.values()), None),
    )


def recognised(mask: Any, full: tuple[int, ...]) -> Mask | None:
    """The parts of a mask, if it fits ``full`` = [batch..., N, T, S] and has parts.

    A ``Mask``, or one row of keys for all heads and queries (padding, or a decoding step), is
    recognised without reading values. Other masks are recognised by their values, if reading them
    waits for no device; only while a program is traced, one such wait is accepted.
    """
    if isinstance(mask, Mask):
        arrays = [x for x in jax.tree.leaves(mask) if x.ndim > 1]
        fits = mask.lengths == full[-2:] and all(
            _broadcasts(x.shape[:-1], full[:-3]) for x in arrays
        )
        return mask if fits else None
    if mask.ndim == 0 or not _broadcasts(mask.shape, full):
        return None
    q_len, kv_len = full[-2:]
    if all(size == 1 for size in mask.shape[-3:-1]):
        keys = mask.reshape(*mask.shape[:-3], mask.shape[-1]).astype(bool)
        return Mask((q_len, kv_len), len(full), visible=(None, jnp.asarray(keys)))
    if mask.shape[-2:] != full[-2:] or mask.size > MAX_ENTRIES:
        return None
    values = _values(mask)
    return None if values is None else _parts(values, len(full))


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """True if ``shape`` broadcasts to ``full``."""
    pairs = zip(reversed(shape), reversed(full), strict=False)
    return len(shape) <= len(full) and all(got in (1, wanted) for got, wanted in pairs)


def _values(mask: Any) -> np.ndarray | None:
    """The entries, if reading them costs little."""
    at_hand = checks.at_hand(mask)
    if at_hand is not None or checks.is_traced(mask) or not mask.is_fully_addressable:
        return at_hand
    # On another device. In a program that is being traced it is a constant, read once a trace.
    is_tracing = checks.is_traced(jnp.zeros(()))
    return np.asarray(mask) if is_tracing else None


def _parts(mask: np.ndarray, rank: int) -> Mask | None:
    """The parts of a mask [..., T, S] of any dtype, if it has any."""
    mask = mask.reshape(*(1,) * (3 - mask.ndim), *mask.shape)
    # A product holds exactly the pairs of its rows and columns that are not empty.
    q_visible, kv_visible = (np.asarray(mask[..., 0, :, :].any(axis)) for axis in (-1, -2))
    for is_causal in (False, True):
        if all(
            _is_product(mask[i], q_visible[i[:-1]], kv_visible[i[:-1]], is_causal)
            for i in np.ndindex(mask.shape[:-2])
        ):
            visible = tuple(None if x.all() else jnp.asarray(x) for x in (q_visible, kv_visible))
            lengths = (mask.shape[-2], mask.shape[-1])
            return Mask(lengths, rank, is_causal, (visible[0], visible[1]))
    return None


def _is_product(
    mask: np.ndarray, q_visible: np.ndarray, kv_visible: np.ndarray, is_causal: bool
) -> bool:
    """True if a mask [T, S] lets exactly the visible queries see the visible keys."""
    for start in range(0, mask.shape[0], _BLOCK):
        rows = slice(start, start + _BLOCK)
        seen = q_visible[rows, None] & kv_visible
        if is_causal:
            seen &= np.tri(seen.shape[0], seen.shape[1], k=start, dtype=bool)
        if not np.array_equal(mask[rows] != 0, seen):
            return False
    return True
