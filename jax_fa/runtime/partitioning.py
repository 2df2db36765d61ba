"""The kernels' calls in programs that XLA splits over devices, as plain text.

A program that plain ``jit`` shards holds one custom call of the whole arrays whose text says what
is computed. While XLA compiles, it asks ``partitioner`` for the computation of one device. Nothing
in the program belongs to the process that wrote it, so it can be exported, serialized and found
in the compilation cache again. (``jax.experimental.custom_partitioning`` puts the address of a
Python object there.)
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy, stablehlo
from jax.interpreters import mlir

from jax_fa.runtime import bindings, sharding
from jax_fa.runtime.dispatch import Kernel
from jax_fa.runtime.sharding import Names
from jax_fa.spec import schema
from jax_fa.spec.arch import Operation
from jax_fa.spec.band import Band
from jax_fa.spec.problem import Operands, Problem, Semantics


class Call(NamedTuple):
    """One call of a compiled kernel: everything but the arrays.

    Attributes:
        operation: forward or backward.
        platform: whose kernel.
        present: names of the operands; a backward takes ``schema.SAVED`` after them, the gradient
            of a bias ``schema.ROWS``.
        semantics: what is computed.
        may_share: whether devices may share a key/value head, a sequence or the gradient of a
            bias: they then exchange keys, or sum gradients.
        broadcast: letters of a mask's and a bias's dimensions that are 1.
        by_token: letters of their rows where each query has its own; None in older programs, whose
            tokens do not split beside a mask or a bias.
        kernel: which one, if it was chosen for these very shapes. ``text`` omits it: the part of
            one device may be served by another kernel.
        gives_dbias: a backward's results have the gradient of the bias among them.
    """

    operation: Operation
    platform: str
    present: tuple[str, ...]
    semantics: Semantics
    may_share: bool = True
    broadcast: tuple[str, ...] = ()
    by_token: tuple[str, ...] | None = None
    kernel: Kernel | None = None
    gives_dbias: bool = False
    has_dlse: bool = True

    @classmethod
    def on(
        cls,
        operation: Operation,
        platform: str,
        operands: Operands,
        semantics: Semantics,
        kernel: Kernel,
    ) -> Call:
        """The call of ``kernel`` on given operands."""
        problem = Problem.of(operands, semantics)
        extents = schema.extents(problem)
        broadcast = tuple(letter for letter in sharding.BROADCAST if extents[letter] == 1)
        by_token = tuple(x for x in sharding.BY_TOKEN if extents[x] == extents["T"])
        return cls(
            *(operation, platform, operands.present, semantics),
            broadcast=broadcast,
            by_token=by_token,
            kernel=kernel,
            gives_dbias=kernel.gives_dbias,
        )

    @property
    def names(self) -> Names:
        """Operands and results in call order."""
        results = tuple(x.name for x in schema.OPERATIONS[self.operation].results)
        if self.operation == "fwd":
            return Names(self.present, results, self.broadcast, self.by_token)
        saved = tuple(x.name for x in (schema.SAVED if self.operation == "bwd" else schema.ROWS))
        is_absent = {
            "dlse": not self.has_dlse,
            "dsinks": "sinks" not in self.present,
            "dbias": self.operation == "bwd" and not self.gives_dbias,
        }
        saved, written = (
            tuple(x for x in names if not is_absent.get(x)) for names in (saved, results)
        )
        return Names((*self.present, *saved), written, self.broadcast, self.by_token)

    def text(self) -> str:
        """The call in words that any later version reads: fields are only ever added."""
        fields = self._asdict() | {"semantics": dataclasses.asdict(self.semantics)}
        del fields["kernel"]
        return json.dumps(fields)

    @classmethod
    def of(cls, text: str | bytes) -> Call:
        """Inverse of ``text``."""
        fields = json.loads(text)
        semantics = fields.pop("semantics")
        band = Band(**semantics.pop("band"))
        for name in ("present", "broadcast"):
            fields[name] = tuple(fields.get(name, ()))
        if fields.get("by_token") is not None:
            fields["by_token"] = tuple(fields["by_token"])
        return cls(**fields, semantics=Semantics(**semantics, band=band))

    def compute(self, *arrays: Array) -> tuple[Array, ...]:
        """Calls the kernel on whole arrays, or on the part of one device."""
        count = len(self.present)
        operands = Operands(**dict(zip(self.present, arrays[:count], strict=True)))
        kernel = self.kernel
        if kernel is None:
            kernel = bindings.kernel(self.operation, self.platform, operands, self.semantics)
        if self.operation == "fwd":
            return bindings.forward(kernel, operands, self.semantics)
        if self.operation == "dbias":
            rows = bindings.Rows(*arrays[count:])
            return (bindings.bias_gradient(kernel, operands, self.semantics, rows),)
        saved, gives_dbias = bindings.Saved(*arrays[count:]), self.gives_dbias
        own = kernel._replace(gives_dbias=gives_dbias and kernel.gives_dbias)
        grads = bindings.backward(own, operands, self.semantics, saved)
        if gives_dbias and not own.gives_dbias:  # lowered for other GPUs than these
            alone = self._replace(operation="dbias", kernel=None, gives_dbias=False)
            (dbias,) = alone.compute(*arrays[:count], *bindings.rows_of(saved))
            grads = grads._replace(bias=dbias)
        return tuple(x for x in grads if x is not None)

    def bind(self, *arrays: Array) -> Sequence[Array]:
        """``compute``, split over devices by the rule of ``sharding`` where a program has many."""
        return _call_p.bind(*arrays, call=self)


def _abstract(*arrays: Any, call: Call) -> list[Any]:
    whole = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in jax.eval_shape(call.compute, *whole)]


# --------------------------------------------------------------------------------------- lowering


def _automatic_axes(context: Any) -> Literal["none", "some", "all"]:
    """How many of the mesh axes XLA's partitioner splits over; ``shard_map`` takes the others.

    On one device there is nothing to split.
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
    # XLA numbers the devices of each manual part anew, so that no exchange can name them.
    shared = call._replace(may_share=automatic == "all")
    out = stablehlo.CustomCallOp(
        [_tensor(x.shape, x.dtype) for x in ctx.avals_out],
        list(values),
        call_target_name=ir.StringAttr.get(bindings.PARTITIONED_TARGET),
        has_side_effect=ir.BoolAttr.get(False),
        backend_config=ir.StringAttr.get(shared.text()),
        api_version=mlir.i32_attr(2),
        called_computations=ir.ArrayAttr.get([]),
    )
    out.attributes["sdy.sharding_rule"] = _shardy(shared, shapes)
    return out.results


def _tensor(shape: Sequence[int], dtype: Any) -> Any:
    return ir.RankedTensorType.get(shape, mlir.dtype_to_ir_type(np.dtype(dtype)))


def _shardy(call: Call, shapes: Sequence[Sequence[int]]) -> Any:
    rule = sharding.rule(call.names, call.names.extents(shapes), may_share=call.may_share)

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
