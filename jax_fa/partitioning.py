"""The kernels' calls in programs that XLA splits over devices, as plain text.

A program that plain ``jit`` shards holds one custom call of the whole arrays whose text says what
is computed. While XLA compiles, it asks ``_partition`` for the computation of one device. Nothing
in the program belongs to the process that wrote it, so it can be exported, serialized and found
in the compilation cache again. (``jax.experimental.custom_partitioning`` puts the address of a
Python object there.)
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import Array
from jax._src import xla_bridge  # hazard stated at register
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy, stablehlo
from jax.interpreters import mlir
from jaxlib import xla_client

from jax_fa import bindings, sharding
from jax_fa.band import Band
from jax_fa.problem import Operands, Semantics
from jax_fa.sharding import Names

_RESULTS = {"fwd": ("out", "lse"), "bwd": ("dq", "dk", "dv")}
_BACKWARD_EXTRAS = ("out", "lse", "dout", "dlse")


class Call(NamedTuple):
    """One call of a compiled kernel: everything but the arrays.

    Attributes:
        operation: forward or backward.
        platform: whose kernel.
        present: names of the operands; a backward takes ``_BACKWARD_EXTRAS`` behind them.
        semantics: what is computed.
        may_share: whether devices may share a key/value head, and sum their gradients of it.
    """

    operation: Literal["fwd", "bwd"]
    platform: str
    present: tuple[str, ...]
    semantics: Semantics
    may_share: bool = True

    @property
    def names(self) -> Names:
        """Operands and results in call order."""
        if self.operation == "fwd":
            return Names(self.present, _RESULTS["fwd"])
        sinks = ("dsinks",) if "sinks" in self.present else ()
        return Names((*self.present, *_BACKWARD_EXTRAS), (*_RESULTS["bwd"], *sinks))

    def text(self) -> str:
        """The call in words that any later version reads: fields are only ever added."""
        return json.dumps(self._asdict() | {"semantics": dataclasses.asdict(self.semantics)})

    @classmethod
    def of(cls, text: str | bytes) -> Call:
        """Inverse of ``text``."""
        fields = json.loads(text)
        semantics = fields.pop("semantics")
        band = Band(**semantics.pop("band"))
        present = tuple(fields.pop("present"))
        return cls(**fields, present=present, semantics=Semantics(**semantics, band=band))

    def compute(self, *arrays: Array) -> tuple[Array, ...]:
        """Calls the kernel on whole arrays, or on the part of one device."""
        count = len(self.present)
        operands = Operands(**dict(zip(self.present, arrays[:count], strict=True)))
        if self.operation == "fwd":
            return bindings.forward(self.platform, operands, self.semantics)
        saved = bindings.Saved(*arrays[count:])
        grads = bindings.backward(self.platform, operands, self.semantics, saved)
        return tuple(x for x in grads if x is not None)

    def bind(self, *arrays: Array) -> Sequence[Array]:
        """``compute``, split over devices by the rule of ``sharding`` where a program has many."""
        return _call_p.bind(*arrays, call=self)


def _abstract(*arrays: Any, call: Call) -> list[Any]:
    whole = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in jax.eval_shape(call.compute, *whole)]


# --------------------------------------------------------------------------------------- lowering


def _automatic_axes(context: Any) -> Literal["none", "some", "all"]:
    """Over how much of the devices XLA's partitioner splits a program; ``shard_map`` leaves less.

    One device is nothing to split.
    """
    if isinstance(context, mlir.ShardingContext) and context.num_devices > 1:
        return "all"
    if isinstance(context, mlir.SPMDAxisContext):
        automatic = set(context.mesh.axis_names) - set(context.manual_axes)
        return "none" if not automatic else "some" if context.manual_axes else "all"
    return "none"


def _lower(ctx: Any, *values: Any, call: Call) -> Any:
    automatic = _automatic_axes(ctx.module_context.axis_context)
    if automatic == "none":
        return mlir.lower_fun(call.compute, multiple_results=True)(ctx, *values)
    shapes = [x.shape for x in ctx.avals_in]
    if not all(isinstance(extent, int) for shape in shapes for extent in shape):
        raise NotImplementedError(
            f"attention: the query has the symbolic shape {shapes[0]} in a program for several "
            f"devices, which jit cannot split. Split it with jax.shard_map, or export it with "
            f"fixed shapes."
        )
    out = stablehlo.CustomCallOp(
        [_tensor(x.shape, x.dtype) for x in ctx.avals_out],
        list(values),
        call_target_name=ir.StringAttr.get(bindings.PARTITIONED_TARGET),
        has_side_effect=ir.BoolAttr.get(False),
        # XLA numbers the devices of each manual part anew, so that no sum can name them.
        backend_config=ir.StringAttr.get(call._replace(may_share=automatic == "all").text()),
        api_version=mlir.i32_attr(2),
        called_computations=ir.ArrayAttr.get([]),
    )
    out.attributes["sdy.sharding_rule"] = _shardy(call.names, shapes)
    return out.results


def _tensor(shape: Sequence[int], dtype: Any) -> Any:
    return ir.RankedTensorType.get(shape, mlir.dtype_to_ir_type(np.dtype(dtype)))


def _shardy(names: Names, shapes: Sequence[Sequence[int]]) -> Any:
    rule = sharding.rule(names, names.extents(shapes))

    def mappings(arrays: list[list[tuple[int, ...]]]) -> list[Any]:
        return [
            sdy.TensorMappingAttr.get([sdy.DimMappingAttr.get(list(factors)) for factors in array])
            for array in arrays
        ]

    return sdy.OpShardingRuleAttr.get(
        list(rule.sizes), mappings(rule.operands), mappings(rule.results), is_custom=True
    )


_call_p = Primitive("jax_fa_call")
_call_p.multiple_results = True
_call_p.def_abstract_eval(_abstract)
mlir.register_lowering(_call_p, _lower)


# ----------------------------------------------------------------------------------- partitioning


def _partition(
    arg_shapes: Sequence[Any],
    arg_shardings: Sequence[Any],
    result_shape: Any,
    result_sharding: Any,
    text: bytes,
) -> tuple[bytes, list[Any], Any]:
    """What one device computes of a call (``text``): its module, and how the arrays are split."""
    del result_sharding
    call = Call.of(text)
    names = call.names
    parts = _parts(names, arg_shapes, arg_shardings[0], may_share=call.may_share)
    shardings = {name: _hlo(names, name, parts) for name in (*names.operands, *names.results)}
    tiled = [
        shardings[name].tile(shape) for name, shape in zip(names.operands, arg_shapes, strict=True)
    ]
    groups = parts.swapaxes(2, 3).reshape(-1, parts.shape[2])

    def one_device(*arrays: Array) -> list[Array]:
        results = call.compute(*arrays)
        if groups.shape[1] == 1:
            return list(results)
        return [
            _sum(x, groups) if name in sharding.PER_KV_HEAD else x
            for name, x in zip(names.results, results, strict=True)
        ]

    arrays = [jax.ShapeDtypeStruct(x.dimensions(), x.numpy_dtype()) for x in tiled]
    # The program of one device knows no mesh, and is one, whatever surrounds the compilation.
    no_mesh = jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(no_mesh), jax.disable_jit(False):
        lowered = jax.jit(one_device, keep_unused=True).lower(*arrays)
    module: Any = lowered.compiler_ir("stablehlo")
    results = xla_client.HloSharding.tuple_sharding(
        result_shape, [shardings[name] for name in names.results]
    )
    return mlir.module_to_bytecode(module), [shardings[name] for name in names.operands], results


def _parts(names: Names, shapes: Sequence[Any], query: Any, *, may_share: bool) -> np.ndarray:
    """``sharding.parts_of`` for the query's sharding in XLA's words."""
    if query is None or not query.is_tiled():
        return np.zeros((1, 1, 1, 1), np.int64)
    tiles = np.array(query.tile_assignment_devices(), np.int64)
    tiles = tiles.reshape(query.tile_assignment_dimensions())
    extents = names.extents([x.dimensions() for x in shapes])
    return sharding.parts_of(names, extents, tiles, may_share=may_share)


def _hlo(names: Names, name: str, parts: np.ndarray) -> Any:
    """The sharding of one array in XLA's words."""
    tiles = sharding.tiles_of(names, name, parts)
    if tiles.shape[-1] == tiles.size:
        return xla_client.HloSharding.replicate()
    return xla_client.HloSharding.subgroup_with_device_ordering(
        np.ascontiguousarray(tiles), subgroup_types=[xla_client.OpSharding.Type.REPLICATED]
    )


def _propagate_from_result(result_sharding: Any, *_: Any) -> Any:
    return result_sharding


def _propagate_from_operands(
    arg_shapes: Sequence[Any], arg_shardings: Sequence[Any], result_shape: Any, text: bytes
) -> Any:
    call = Call.of(text)
    names = call.names
    parts = _parts(names, arg_shapes, arg_shardings[0], may_share=call.may_share)
    # A key/value head that devices share has no sharding in terms of a mesh: results must have one.
    whole = parts if parts.shape[2] == 1 else parts.reshape(len(parts), 1, 1, -1)
    shardings = [
        _hlo(names, name, whole if name in sharding.PER_KV_HEAD else parts)
        for name in names.results
    ]
    return xla_client.HloSharding.tuple_sharding(result_shape, shardings)


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


# ------------------------------------------------------------------------------ sums over devices


def _sum(gradient: Array, groups: np.ndarray) -> Array:
    """The gradient of a key/value head that the devices of each row of ``groups`` share."""
    rows = tuple(map(tuple, groups.tolist()))
    return _sum_p.bind(gradient.astype(np.float32), groups=rows).astype(gradient.dtype)


def _lower_sum(ctx: Any, value: Any, *, groups: tuple[tuple[int, ...], ...]) -> Any:
    (aval,) = ctx.avals_in
    devices: Any = np.array(groups, np.int64)
    out = stablehlo.AllReduceOp(
        [value.type],
        [value],
        replica_groups=ir.DenseIntElementsAttr.get(devices),
        channel_handle=stablehlo.ChannelHandle.get(1, 1),
        use_global_device_ids=True,
    )
    scalar = _tensor((), aval.dtype)
    block = out.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        stablehlo.return_([stablehlo.add(*block.arguments)])
    return out.results


_sum_p = Primitive("jax_fa_sum_over_groups")
_sum_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_sum_p, _lower_sum)
