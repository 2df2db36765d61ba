"""How attention splits over devices: batch and heads shard freely, lengths and head sizes do not.

The rule is stated once, as the dimension names of every array (``_DIMENSIONS``); the Shardy rule
for propagation under ``jit``, the per-device computation and the result types of explicit
sharding all derive from it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax._src import dispatch  # hazard stated at require_devices
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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
_PER_KV_HEAD = ("dk", "dv")
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


def require_devices(primitive: Primitive) -> None:
    """Declares that lowering ``primitive`` needs the devices, as custom_partitioning does.

    HAZARD: JAX looks for custom_partitioning in the traced program to decide this, and a primitive
    that expands to it at lowering hides it. Without the declaration lowering over several devices
    fails. There is no public name for the set (jax 0.10 to 0.12).
    """
    dispatch.prim_requires_devices_during_lowering.add(primitive)  # pyright: ignore


def _axes_of(query: Any, mesh: Mesh) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Mesh axes that split the batch and the heads of a query; none if it is split otherwise."""
    shard = query.sharding.shard_shape(query.shape)
    parts = [whole // part if part else 1 for whole, part in zip(query.shape, shard, strict=True)]
    names = [name for name in mesh.axis_names if mesh.shape[name] > 1]
    axes = [a for n in range(len(names) + 1) for a in itertools.permutations(names, n)]
    fitting = [[a for a in axes if _size(mesh, a) == part] for part in parts]
    for spec in itertools.product(*fitting):
        used = list(itertools.chain(*spec))
        if len(used) > len(set(used)):
            continue
        if NamedSharding(mesh, PartitionSpec(*spec)).is_equivalent_to(query.sharding, 4):
            return spec[0], spec[2]
    return (), ()


def _size(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in axes)


def _regroup(mesh: Mesh, query: Any, num_kv_heads: int, is_packed: bool) -> Mesh:
    """The devices of ``mesh`` as (batch, kv_heads, groups, copies): the only axes the rule needs.

    Query heads may be split further than key/value heads: then several devices share one
    key/value head and split its group.
    """
    batch, heads = _axes_of(query, mesh)
    if is_packed or query.shape[0] % _size(mesh, batch):
        batch = ()
    kv_parts = math.gcd(num_kv_heads, _size(mesh, heads))
    group_parts = _size(mesh, heads) // kv_parts
    if (query.shape[2] // num_kv_heads) % group_parts:
        heads, kv_parts, group_parts = (), 1, 1
    order = [*batch, *heads, *(n for n in mesh.axis_names if n not in (*batch, *heads))]
    devices = np.transpose(mesh.devices, [mesh.axis_names.index(name) for name in order])
    shape = (_size(mesh, batch), kv_parts, group_parts, -1)
    return Mesh(devices.reshape(shape), ("batch", "kv_heads", "groups", "copies"))


_PLACEMENT = {"b": "batch", "k": "kv_heads", "kg": ("kv_heads", "groups")}


def partitioned(
    names: Names, call: Callable[..., tuple[Array, ...]]
) -> Callable[..., tuple[Array, ...]]:
    """``call`` over the arrays of ``names``, split over devices by the rule of this module.

    Args:
        names: operands and results of ``call``.
        call: computes one shard; takes and returns flat arrays.
    """

    def partition(
        mesh: Mesh, arg_shapes: Sequence[Any], result_shape: Any
    ) -> tuple[Mesh, Callable[..., Any], Any, Any]:
        del result_shape
        regrouped = _regroup(mesh, arg_shapes[0], arg_shapes[1].shape[2], names.is_packed)

        def shardings(group: tuple[str, ...]) -> tuple[NamedSharding, ...]:
            specs = [map(_PLACEMENT.get, names.dimensions(name)) for name in group]
            return tuple(NamedSharding(regrouped, PartitionSpec(*spec)) for spec in specs)

        def one_shard(*arrays: Array) -> tuple[Array, ...]:
            results = call(*arrays)
            if regrouped.shape["groups"] == 1:
                return results
            return tuple(
                _summed_over_groups(x) if name in _PER_KV_HEAD else x
                for name, x in zip(names.results, results, strict=True)
            )

        return regrouped, one_shard, shardings(names.results), shardings(names.operands)

    def rule(mesh: Mesh, operand_types: Sequence[Any], result_types: Sequence[Any]) -> Any:
        del mesh, result_types
        num_q_heads = operand_types[0].shape[2]
        num_kv_heads = operand_types[1].shape[2]
        return _shardy_rule(names, num_kv_heads, num_q_heads // num_kv_heads)

    split = custom_partitioning(call)
    # Shardings stay undecoded: a key/value head shared by several devices has no PartitionSpec.
    split.def_partition(partition=partition, sharding_rule=rule, decode_shardings=False)
    return split


def _summed_over_groups(gradient: Array) -> Array:
    """The gradient of a key/value head that several devices share."""
    return jax.lax.psum(gradient.astype(jnp.float32), "groups").astype(gradient.dtype)


def _shardy_rule(names: Names, num_kv_heads: int, group: int) -> Any:
    """Einsum-like rule; Shardy wants a factor of size 1 left out of a compound dimension."""
    heads, sizes = "(k g)", {"g": group}
    if group == 1:
        heads, sizes = "k", {}
    elif num_kv_heads == 1:
        heads, sizes = "g", {}

    def dims(name: str) -> str:
        return " ".join(heads if dim == "kg" else dim for dim in names.dimensions(name))

    text = ", ".join(map(dims, names.operands)) + " -> " + ", ".join(map(dims, names.results))
    return text, sizes


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
