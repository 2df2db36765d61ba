"""How attention splits over devices: batch and heads shard freely, lengths and head sizes do not.

The rule is stated once, as the dimension names of every array (``_DIMENSIONS``); the Shardy rule
for propagation under ``jit``, the parts that devices compute (``partitioning``) and the result
types of explicit sharding all derive from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import PartitionSpec

# b: sequences or rows of the batch. k, g: key/value heads and query heads per key/value head, so
# that "k g" is the query heads. One letter per other extent. "m" replaces "b" where packed
# sequences are counted; those do not shard, since they all live in one row.
_DIMENSIONS = {
    "q": "b t kg d",
    "k": "b s k d",
    "v": "b s k e",
    "q_lengths": "b",
    "kv_lengths": "b",
    "cu_seqlens_q": "c",
    "cu_seqlens_k": "c",
    "q_segments": "b t",
    "kv_segments": "b s",
    "q_offset": "b",
    "sinks": "b kg",
    "out": "b t kg e",
    "lse": "b t kg",
    "dout": "b t kg e",
    "dlse": "b t kg",
    "dq": "b t kg d",
    "dk": "b s k d",
    "dv": "b s k e",
    "dsinks": "b kg",
}
PER_KV_HEAD = ("dk", "dv")
"""Results that devices which share a key/value head sum."""

_PER_SEQUENCE = ("q_lengths", "kv_lengths", "q_offset", "sinks", "dsinks")


class Names(NamedTuple):
    """The arrays of one call, by name, in call order."""

    operands: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def is_packed(self) -> bool:
        """True if sequences are packed in one row, so that no batch dimension shards."""
        return "cu_seqlens_q" in self.operands

    def dimensions(self, name: str) -> list[str]:
        """Dimension names of one array."""
        dims = _DIMENSIONS[name].split()
        if self.is_packed and name in _PER_SEQUENCE:
            return ["m" if dim == "b" else dim for dim in dims]
        return dims

    def extents(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Extent of every dimension name, given the shapes of the operands."""
        return {
            dim: extent
            for name, shape in zip(self.operands, shapes, strict=True)
            for dim, extent in zip(self.dimensions(name), shape, strict=True)
        }


class Rule(NamedTuple):
    """Which dimensions of a call shard alike: Shardy's rule, in numbers.

    A dimension is the product of its factors, major to minor; dimensions shard together where they
    share a factor.
    """

    sizes: tuple[int, ...]
    operands: list[list[tuple[int, ...]]]
    results: list[list[tuple[int, ...]]]


def rule(names: Names, extents: Mapping[str, int]) -> Rule:
    """The rule of one call, given the extent of every dimension name (``Names.extents``)."""
    group = extents["kg"] // extents["k"]
    # Shardy wants a factor of size 1 left out of a compound dimension.
    heads = "k" if group == 1 else "g" if extents["k"] == 1 else "kg"
    factors = {name: size for name, size in extents.items() if name != "kg"}
    if group > 1:
        factors["g"] = group
    order = {name: index for index, name in enumerate(factors)}

    def mapping(name: str) -> list[tuple[int, ...]]:
        dims = [heads if dim == "kg" else dim for dim in names.dimensions(name)]
        return [tuple(order[factor] for factor in dim) for dim in dims]

    return Rule(
        tuple(factors.values()),
        [mapping(name) for name in names.operands],
        [mapping(name) for name in names.results],
    )


def parts_of(
    names: Names, extents: Mapping[str, int], tiles: np.ndarray, *, may_share: bool
) -> np.ndarray:
    """Which part each device computes: devices as [batch, kv_heads, groups, copies].

    Query heads may be split further than key/value heads: then several devices share one
    key/value head, split its group and sum their gradients of that head. A split that the extents
    do not allow is left out.

    Args:
        names: arrays of the call.
        extents: by dimension name.
        tiles: devices by the part of the query they hold, [B, T, N, D] and copies.
        may_share: whether devices may share a key/value head.
    """
    tiles = np.moveaxis(tiles, 2, 1)  # [B, N, ...]
    batch, heads = tiles.shape[:2]
    if names.is_packed or extents["b"] % batch:
        tiles, batch = np.moveaxis(tiles, 0, -1), 1
    kv_heads = math.gcd(extents["k"], heads)
    groups = heads // kv_heads
    if not may_share or extents["kg"] // extents["k"] % groups:
        groups = 1
    return tiles.reshape(batch, kv_heads, groups, -1)


_PART_AXES = {"b": (0,), "k": (1,), "kg": (1, 2)}


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
            f"{query_spec}. Reshard T and D to None, or split the sequence with jax.shard_map and "
            f"query_offset."
        )
    by_dimension = {"b": spec[0], "kg": spec[2], "k": spec[2]}
    return PartitionSpec(*(by_dimension.get(dim) for dim in names.dimensions(name)))
