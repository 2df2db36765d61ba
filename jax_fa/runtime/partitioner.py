"""Answers to XLA's partitioner: one device's share of a call that plain ``jit`` splits.

XLA hands over the text of a call (``partitioning``) and how its arrays are sharded, and receives
the module that one device runs. In it, devices that hold parts of the same sequences exchange them
as under ``jax.shard_map`` (``strategies``), over axes of a mesh that is derived from the sharding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax._src import xla_bridge  # hazard stated at register
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding
from jaxlib import xla_client

from jax_fa.runtime import arguments, bindings, masks, sharding, strategies
from jax_fa.runtime.partitioning import Call
from jax_fa.runtime.sharding import Names
from jax_fa.runtime.vjp import Result
from jax_fa.spec.arch import Operation
from jax_fa.spec.problem import Operands


class _Mesh(NamedTuple):
    """The mesh that parts of a call are made of; an axis is named by the stride along it.

    Attributes:
        shape: (name, size) of every axis, major to minor.
        axes: names of those of each dimension of ``sharding.parts_of``.
    """

    shape: tuple[tuple[str, int], ...]
    axes: tuple[tuple[str, ...], ...]

    @property
    def groups(self) -> tuple[str, ...]:
        """Axes along which devices share key/value heads."""
        return self.axes[2]

    @property
    def context(self) -> tuple[str, ...]:
        """Axes along which they share sequences."""
        return self.axes[3]

    @classmethod
    def of(cls, parts: np.ndarray) -> _Mesh | None:
        """Of ``sharding.parts_of``; None if they are made of none."""
        axes = sharding.mesh_axes(parts)
        if axes is None:
            return None
        every = sorted((axis for own in axes for axis in own), reverse=True)
        names = tuple(tuple(str(stride) for stride, _ in own) for own in axes)
        return cls(tuple((str(stride), size) for stride, size in every), names)


def _partition(
    arg_shapes: Sequence[Any],
    arg_shardings: Sequence[Any],
    result_shape: Any,
    result_sharding: Any,
    text: bytes,
) -> tuple[bytes, list[Any], Any]:
    """One device's share of a call (``text``): its module, and how the arrays are split."""
    del result_sharding
    call = Call.of(text)
    names = call.names
    parts, mesh = _parts(call, arg_shapes, arg_shardings[0])
    shardings = {name: _hlo(names, name, parts) for name in (*names.operands, *names.results)}
    tiled = [
        shardings[name].tile(shape) for name, shape in zip(names.operands, arg_shapes, strict=True)
    ]
    arrays = [jax.ShapeDtypeStruct(x.dimensions(), x.numpy_dtype()) for x in tiled]
    results = _together(result_shape, [shardings[name] for name in names.results])
    module = _module(call, mesh, arrays)
    return mlir.module_to_bytecode(module), [shardings[name] for name in names.operands], results


def _parts(call: Call, shapes: Sequence[Any], query: Any) -> tuple[np.ndarray, _Mesh]:
    """``sharding.parts_of`` for the query's sharding in XLA's words, and their mesh."""
    alone = np.zeros((1, 1, 1, 1, 1), np.int64)
    if query is None or not query.is_tiled():
        return alone, _NO_MESH
    tiles = np.array(query.tile_assignment_devices(), np.int64)
    tiles = tiles.reshape(query.tile_assignment_dimensions())
    extents = call.names.extents([x.dimensions() for x in shapes])
    parts = sharding.parts_of(call.names, extents, tiles, may_share=call.may_share)
    mesh = _Mesh.of(parts)
    if mesh is None:
        # Devices that no mesh numbers have no names for one another.
        mesh, parts = _NO_MESH, sharding.parts_of(call.names, extents, tiles, may_share=False)
    return parts, mesh


_NO_MESH = _Mesh((), ((),) * 5)


def _hlo(names: Names, name: str, parts: np.ndarray) -> Any:
    """The sharding of one array in XLA's words."""
    tiles = sharding.tiles_of(names, name, parts)
    if tiles.shape[-1] == tiles.size:
        return xla_client.HloSharding.replicate()
    return xla_client.HloSharding.subgroup_with_device_ordering(
        np.ascontiguousarray(tiles), subgroup_types=[xla_client.OpSharding.Type.REPLICATED]
    )


def _together(shape: Any, shardings: list[Any]) -> Any:
    """The sharding of all results of a call; several are a tuple."""
    if not shape.is_tuple():
        return shardings[0]
    return xla_client.HloSharding.tuple_sharding(shape, shardings)


def _propagate_from_result(result_sharding: Any, *_: Any) -> Any:
    return result_sharding


def _propagate_from_operands(
    arg_shapes: Sequence[Any], arg_shardings: Sequence[Any], result_shape: Any, text: bytes
) -> Any:
    call = Call.of(text)
    names = call.names
    parts, _ = _parts(call, arg_shapes, arg_shardings[0])
    # A key/value head that devices share has no sharding in terms of a mesh: results must have one.
    whole = parts
    if parts.shape[2] > 1:
        whole = np.moveaxis(parts, 3, 1).reshape(len(parts), 1, 1, parts.shape[3], -1)
    shardings = [
        _hlo(names, name, whole if name in sharding.PER_KV_HEAD else parts)
        for name in names.results
    ]
    return _together(result_shape, shardings)


def register() -> None:
    """Tells XLA, on every platform, who splits ``bindings.PARTITIONED_TARGET``.

    HAZARD: JAX has no public name for either call (jax 0.10 to 0.12); ``custom_partitioning``
    registers itself by the same two.
    """
    ask = partial(
        xla_client.register_custom_call_partitioner,
        name=bindings.PARTITIONED_TARGET,
        prop_user_sharding=_propagate_from_result,
        partition=_partition,
        infer_sharding_from_operands=_propagate_from_operands,
        can_side_effecting_have_replicated_sharding=True,
    )
    ask()
    xla_bridge.register_plugin_callbacks(ask)


# ----------------------------------------------------------------------------------------- explain


def explained(call: arguments.Call, query: Any, *, on_kernels: bool) -> str:
    """The way devices share the sequences of a call; empty if they do not.

    Args:
        call: the call, of whole arrays.
        query: sharding of the query as the caller gave it.
        on_kernels: whether kernels serve the call.
    """
    if not isinstance(query, NamedSharding) or query.mesh.size == 1:
        return ""
    lead = call.missing + call.operands.is_packed
    spec = [None] * lead + [x if isinstance(x, str | tuple) else None for x in query.spec]
    axes = [() if x is None else x if isinstance(x, tuple) else (x,) for x in spec]
    axes += [()] * (4 - len(axes))
    if not axes[1]:
        return ""
    sizes = dict(query.mesh.shape)
    kinds = dict(zip(query.mesh.axis_names, query.mesh.axis_types, strict=True))
    count = math.prod(sizes[name] for name in axes[1])
    where = f"tokens over {', '.join(map(repr, axes[1]))} ({count} devices)"
    if kinds[axes[1][0]] == AxisType.Explicit:
        part = _part(call, heads=math.prod(sizes[name] for name in axes[2]), context=count)
        axis = axes[1] if len(axes[1]) > 1 else axes[1][0]
        return f"{where}: {strategies.names_of(part, axis, tuple(sizes.items()))}"
    if not on_kernels:
        return f"{where}: as XLA splits what runs unfused"
    split = [name for dim in axes for name in dim]
    rest = [name for name in sizes if name not in split]
    order = [query.mesh.axis_names.index(name) for name in (*split, *rest)]
    devices = np.arange(query.mesh.size).reshape(tuple(sizes.values())).transpose(order)
    tiles = devices.reshape(*(math.prod(sizes[name] for name in dim) for dim in axes), -1)
    names = Names(call.operands.present, ("out", "lse"))
    extents = names.extents([getattr(call.operands, name).shape for name in names.operands])
    parts = sharding.parts_of(names, extents, tiles, may_share=True)
    mesh = _Mesh.of(parts)
    if mesh is None or not mesh.context:
        return f"{where}: gathered"
    part = _part(call, heads=parts.shape[1], context=parts.shape[3])
    return f"{where}: {strategies.names_of(part, mesh.context, mesh.shape)}"


def _part(call: arguments.Call, *, heads: int, context: int) -> arguments.Call:
    """Shapes of the part of one device."""

    def part(x: Any, heads: int) -> Any:
        batch, tokens, count, size = x.shape
        return jax.ShapeDtypeStruct((batch, tokens // context, count // heads, size), x.dtype)

    q, k, v = (part(x, heads) for x in call.operands[:3])
    return call._replace(operands=call.operands._replace(q=q, k=k, v=v))


# -------------------------------------------------------------------------------------- one device


def _one_device(call: Call, mesh: _Mesh, *arrays: Array) -> list[Array]:
    """Results of a call on the part of one device, inside the axes of ``mesh``."""
    if not mesh.context:
        results = call.compute(*arrays)
    else:
        count = len(call.present)
        operands = Operands(**dict(zip(call.present, arrays, strict=False)))
        part = _own_part(call, operands, mesh)
        if call.operation == "fwd":
            results = strategies.run(part, strategies.How(mesh.context))
        else:
            saved, cotangents = _about_rows(call.operation, part, arrays[count:])
            grads = strategies.gradients(part, mesh.context, saved, cotangents)
            by_name = {f"d{name}": x for name, x in grads._asdict().items()}
            results = tuple(by_name[name] for name in call.names.results)
    names = call.names
    over = dict.fromkeys(sharding.PER_KV_HEAD, mesh.groups)
    over["dbias"] = tuple(name for axis in names.summed for name in mesh.axes[axis])
    return [
        jax.lax.psum(x.astype(np.float32), over[name]).astype(x.dtype) if over.get(name) else x
        for name, x in zip(names.results, results, strict=True)
    ]


def _own_part(call: Call, operands: Operands, mesh: _Mesh) -> arguments.Call:
    """The call of this device's tokens; of a block mask, which has all rows, it takes its own."""
    words, count = operands.mask_words, operands.q.shape[1]
    if words is not None and words.shape[2] > 1 and "Tm" not in (call.by_token or ()):
        words = masks.rows_of_blocks(words, jax.lax.axis_index(mesh.context) * count, count)
    own = operands._replace(mask_words=None, mask_map=None, bias=None)
    return arguments.Call(own, call.semantics, None, bias=operands.bias, words=words)


def _about_rows(
    operation: Operation, part: arguments.Call, arrays: Sequence[Array]
) -> tuple[Result, Result]:
    """(out, lse), (dout, dlse) of a call for gradients; ``arrays`` are its inputs for each row."""
    if operation == "bwd":
        saved = bindings.Saved(*arrays)
        return (saved.out, saved.lse), saved.cotangents
    lse, dout, delta = arrays  # delta = rowsum(dout * out) - dlse
    return (jnp.zeros_like(dout), lse), (dout, -delta)


def _module(call: Call, mesh: _Mesh, arrays: Sequence[jax.ShapeDtypeStruct]) -> Any:
    """``_one_device`` for ``arrays``, as StableHLO of a device that knows the others by number."""
    # The program of one device knows no mesh, and is one, whatever surrounds the compilation.
    nothing = jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(nothing), jax.disable_jit(False):
        body = jax.make_jaxpr(partial(_one_device, call, mesh), axis_env=mesh.shape)(*arrays)
        bound = partial(_on_mesh_p.bind, body=body, mesh=mesh)
        traced = jax.jit(bound, keep_unused=True).trace(*arrays)
        return traced.lower(lowering_platforms=(call.platform,)).compiler_ir("stablehlo")


def _lower_on_mesh(ctx: Any, *values: Any, body: Any, mesh: _Mesh) -> Any:
    names = tuple(name for name, _ in mesh.shape)
    abstract: Any = jax.sharding.AbstractMesh(tuple(size for _, size in mesh.shape), names)
    context = mlir.SPMDAxisContext(abstract, frozenset(names))
    inner = ctx.replace(module_context=ctx.module_context.replace(axis_context=context))
    return mlir.core_call_lowering(inner, *values, name="one_device", call_jaxpr=body)


_on_mesh_p = Primitive("jax_fa_on_mesh")
_on_mesh_p.multiple_results = True
_on_mesh_p.def_abstract_eval(lambda *_, body, mesh: body.out_avals)
mlir.register_lowering(_on_mesh_p, _lower_on_mesh)
