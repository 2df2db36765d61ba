"""The sharding of attention: batch, heads and tokens are split over devices, head sizes are not.

The rule is stated once, as dimension names (``_FACTORS``) of every array; the Shardy rule
for propagation under ``jit``, the parts that devices compute (``partitioner``) and the result
types of explicit sharding all derive from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import PartitionSpec

from jax_fa.spec import schema

# b: sequences or rows of the batch. k, g: key/value heads and query heads per key/value head, so
# that "k g" is the query heads. One letter per other extent. "m" replaces "b" where packed
# sequences are counted; those do not shard, since they all live in one row.
_FACTORS = {
    **{"B": "b", "M": "b", "M+1": "c", "T": "t", "S": "s"},
    **{"N": "kg", "K": "k", "D": "d", "Dv": "e"},
    **{"Bm": "b", "Nm": "kg", "Tm": "u", "Wm": "w", "2": "z", "Tc": "x", "Wc": "y"},
    **{"Ba": "b", "Na": "kg", "Ta": "j", "Sa": "l"},
}
"""Dimension names by letters of ``schema.py``. Every device has all keys of a mask and a bias, but
only its own rows, if each query has a row (``Names.by_token``)."""

BY_TOKEN = ("Tm", "Ta")
"""Rows of a mask or bias: those of the query, or fewer."""

BROADCAST = {"Bm": "p", "Nm": "r", "Ba": "p", "Na": "r"}
"""Of a mask or bias that is the same for all sequences, or heads."""

_SUMMED = {"Ba": (0,), "Na": (1, 2), "Ta": (3,)}
"""Dimensions of ``parts_of`` along which a bias's gradient is summed if the bias is the same."""

PER_KV_HEAD = tuple(x.name for x in schema.GRADIENTS if "K" in x.dims.split())
"""Results that devices which share a key/value head sum."""


class Names(NamedTuple):
    """The arrays of one call, by name, in call order.

    ``broadcast`` has the letters of a mask's and a bias's dimensions that are 1, ``by_token`` those
    of their rows where each query has its own; it is None if tokens do not split beside them.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    broadcast: tuple[str, ...] = ()
    by_token: tuple[str, ...] | None = ()

    @property
    def is_packed(self) -> bool:
        """True if sequences are packed in one row, so that no batch dimension shards."""
        return "cu_seqlens_q" in self.operands

    @property
    def splits_tokens(self) -> bool:
        """True if devices may hold parts of a sequence."""
        return self.by_token is not None or {"mask_words", "bias"}.isdisjoint(self.operands)

    @property
    def summed(self) -> tuple[int, ...]:
        """Dimensions of ``parts_of`` along which the gradient of a bias is summed."""
        if "dbias" not in self.results:
            return ()
        shared = {*self.broadcast, *BY_TOKEN}.difference(self.by_token or ())
        return tuple(axis for letter, axes in _SUMMED.items() if letter in shared for axis in axes)

    def dimensions(self, name: str) -> list[str]:
        """Dimension names of one array."""
        letters = schema.BY_NAME[name].dims.split()
        factors = _FACTORS | {x: BROADCAST[x] for x in self.broadcast}
        factors |= dict.fromkeys(self.by_token or (), "t")
        return ["m" if x == "M" and self.is_packed else factors[x] for x in letters]

    def extents(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Extent of every dimension name, given the shapes of the operands."""
        return {
            dim: extent
            for name, shape in zip(self.operands, shapes, strict=True)
            for dim, extent in zip(self.dimensions(name), shape, strict=True)
        }


class Rule(NamedTuple):
    """Shardy's rule for a call: the dimensions that shard alike, as numbers.

    A dimension is the product of its factors, major to minor; dimensions shard together where they
    share a factor.
    """

    sizes: tuple[int, ...]
    operands: list[list[tuple[int, ...]]]
    results: list[list[tuple[int, ...]]]


def rule(names: Names, extents: Mapping[str, int], *, may_share: bool) -> Rule:
    """The rule of one call.

    Args:
        names: its arrays.
        extents: extent of every dimension name (``Names.extents``).
        may_share: whether devices may share a sequence, so that T and S split alike.
    """
    # h: tokens of the query, and of the keys, that split alike; t and s: of each of those parts.
    splits_tokens = may_share and names.splits_tokens
    alike = math.gcd(extents["t"], extents["s"]) if splits_tokens else 1
    sizes = {**extents, "g": extents["kg"] // extents["k"], "h": alike}
    sizes |= {dim: extents[dim] // alike for dim in ("t", "s")}
    compound = {"kg": "kg", "t": "ht", "s": "hs"}

    def factors_of(dim: str) -> str:
        # Shardy wants a factor of size 1 left out of a compound dimension.
        return "".join(x for x in compound.get(dim, dim) if sizes[x] > 1) or dim[0]

    mapped = {
        name: [factors_of(dim) for dim in names.dimensions(name)]
        for name in (*names.operands, *names.results)
    }
    used = dict.fromkeys(factor for dims in mapped.values() for dim in dims for factor in dim)
    factors = {name: sizes[name] for name in used}
    order = {name: index for index, name in enumerate(factors)}

    def mapping(name: str) -> list[tuple[int, ...]]:
        return [tuple(order[factor] for factor in dim) for dim in mapped[name]]

    return Rule(
        tuple(factors.values()),
        [mapping(name) for name in names.operands],
        [mapping(name) for name in names.results],
    )


def parts_of(
    names: Names, extents: Mapping[str, int], tiles: np.ndarray, *, may_share: bool
) -> np.ndarray:
    """The part that each device computes: devices as [batch, kv_heads, groups, context, copies].

    Query heads may be split further than key/value heads: then several devices share one
    key/value head, split its group and sum their gradients of that head. Where tokens are split,
    those along ``context`` share sequences. A split that the extents do not allow is left out.

    Args:
        names: arrays of the call.
        extents: by dimension name.
        tiles: devices by the part of the query they hold, [B, T, N, D] and copies.
        may_share: whether devices may share a key/value head, a sequence or a sum.
    """
    batch, context, heads = tiles.shape[:3]
    kv_heads = math.gcd(extents["k"], heads)
    groups = heads // kv_heads
    # A device with several key/value heads may have query heads that belong to fewer of them.
    splits_groups = kv_heads == extents["k"] and extents["kg"] // extents["k"] % groups == 0
    parts = np.moveaxis(tiles, 1, 2).reshape(batch, kv_heads, groups, context, -1)
    splits_tokens = may_share and names.splits_tokens
    fits = {
        0: not names.is_packed and extents["b"] % batch == 0,
        2: may_share and splits_groups,
        3: splits_tokens and extents["t"] % context == 0 and extents["s"] % context == 0,
    }
    if not may_share:
        fits |= dict.fromkeys(names.summed, False)
    for axis in (axis for axis, is_split in fits.items() if not is_split):
        moved = np.expand_dims(np.moveaxis(parts, axis, -2), axis)  # [..., 1, ..., copies, copies]
        parts = moved.reshape(*moved.shape[:4], -1)
    return parts


def mesh_axes(parts: np.ndarray) -> list[list[tuple[int, int]]] | None:
    """The mesh that ``parts`` are made of: for each dimension its axes, major to minor.

    An axis is (stride, size): devices along it are numbered ``stride`` apart. None where devices
    are numbered otherwise than those of a mesh, or along a dimension not in ascending order.
    """
    axes, numbers = [], np.zeros((), np.int64)
    for dim in range(parts.ndim):
        own = _strides(np.moveaxis(parts, dim, 0).reshape(parts.shape[dim], -1)[:, 0])
        axes.append(own)
        for stride, size in own:
            numbers = np.add.outer(numbers, stride * np.arange(size))
    is_mesh = np.array_equal(numbers.ravel(), parts.ravel())
    is_ascending = all(own == sorted(own, reverse=True) for own in axes)
    return axes if is_mesh and is_ascending else None


def _strides(ids: np.ndarray) -> list[tuple[int, int]]:
    """(stride, size) of the digits that count up ``ids``, major to minor, if any do."""
    digits: list[tuple[int, int]] = []
    while len(ids) > 1:
        stride = int(ids[1] - ids[0])
        is_next = ids == ids[0] + stride * np.arange(len(ids))
        size = len(ids) if is_next.all() else int(is_next.argmin())
        digits.insert(0, (stride, size))
        ids = ids[::size]
    return digits


_PART_AXES = {"b": (0,), "k": (1,), "kg": (1, 2), "t": (3,), "s": (3,)}


def tiles_of(names: Names, name: str, parts: np.ndarray) -> np.ndarray:
    """Devices by the part of one array they hold: a dimension per dimension, and copies last."""
    axes = [_PART_AXES.get(dim, ()) for dim in names.dimensions(name)]
    split = [axis for dim in axes for axis in dim]
    copies = [axis for axis in range(parts.ndim) if axis not in split]
    shape = [math.prod(parts.shape[axis] for axis in dim) for dim in axes]
    return parts.transpose(*split, *copies).reshape(*shape, -1)


def result_spec(names: Names, name: str, query_spec: PartitionSpec) -> PartitionSpec:
    """Explicit-sharding type of a result of rank 3 or 4, from that of the query.

    Raises:
        ValueError: the query's length or head size is sharded.
    """
    spec = (*query_spec, *(None,) * (4 - len(query_spec)))
    if spec[1] is not None or spec[3] is not None:
        raise ValueError(
            f"attention: batch and heads may be sharded, but the query [B, T, N, D] has sharding "
            f"{query_spec}. Reshard T and D to None, or split T alone with jax_fa.attention or "
            f"jax_fa.parallel."
        )
    by_dimension = {"b": spec[0], "kg": spec[2], "k": spec[2]}
    return PartitionSpec(*(by_dimension.get(dim) for dim in names.dimensions(name)))
