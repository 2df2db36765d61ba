"""The compiled extension seen from JAX: target names, operand order, attributes.

The only user of ``jax.ffi``. ``schema.py`` lists what is handed over, ``ffi/arguments.cc`` takes
it; ``EXTENSION_VERSION`` and a test hold the two together. Target names carry a version and
attributes are only ever added, so that exported programs keep running.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_fa import _jax_fa
from jax_fa.runtime import head_sizes, lowering
from jax_fa.runtime.dispatch import Emulation, Forced, Kernel, Target, gpu_kernel
from jax_fa.runtime.reference import wide
from jax_fa.spec import ptx_archives, schema, scratch
from jax_fa.spec.arch import Operation, arch_named, capability_number
from jax_fa.spec.problem import Gradients, Operands, Problem, Semantics, arrays_of

FORWARD_TARGET = "jax_fa_fwd_v1"
BACKWARD_TARGET = "jax_fa_bwd_v1"
BIAS_GRADIENT_TARGET = "jax_fa_dbias_v1"
_TARGETS: dict[Operation, str] = {
    "fwd": FORWARD_TARGET,
    "bwd": BACKWARD_TARGET,
    "dbias": BIAS_GRADIENT_TARGET,
}
PARTITIONED_TARGET = "jax_fa_partitioned_v1"
"""A call that XLA splits over devices (``partitioning``); it never runs itself."""

EXTENSION_VERSION = schema.VERSION

_KINDS = {"float32": np.float32, "int32": np.int32, "bool": np.bool_, "string": str}


def register() -> None:
    """Registers every handler of the extension with XLA; called once, on import of ``jax_fa``.

    Raises:
        ImportError: the extension on disk belongs to another version of this package.
    """
    if _jax_fa.version() != EXTENSION_VERSION:
        raise ImportError(
            f"jax_fa: the compiled extension has version {_jax_fa.version()}, this package needs "
            f"version {EXTENSION_VERSION}. Reinstall jax_fa so that both come from one build."
        )
    for platform, targets in _jax_fa.registrations().items():
        for name, handler in targets.items():
            jax.ffi.register_ffi_target(name, handler, platform=platform)


def export_disabled_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The ``disabled_checks`` that ``jax.export.export`` needs to export attention.

    JAX refuses to export custom calls whose stability it does not know. The targets of jax_fa are
    versioned and their attributes only grow, so an exported program runs wherever ``jax_fa`` has
    been imported::

        exported = jax.export.export(step, disabled_checks=jax_fa.export_disabled_checks())(x)
        path.write_bytes(exported.serialize())

        import jax_fa  # where the program runs: nothing else tells XLA of the kernels
        step = jax.export.deserialize(bytearray(path.read_bytes()))
        y = step.call(x)

    Without that import the call ends in ``No FFI handler registered for jax_fa_fwd_v1`` (or
    ``jax_fa_bwd_v1``, ``jax_fa_dbias_v1``).
    """
    return [
        jax.export.DisabledSafetyCheck.custom_call(name)
        for name in (*_TARGETS.values(), PARTITIONED_TARGET)
    ]


def compiled() -> frozenset[str]:
    """Names of the GPU variants that this build holds."""
    return frozenset(_jax_fa.variants())


def lowered_platform(name: str | None = None) -> str:
    """What JAX calls a platform when it lowers for it: "cuda" for "gpu"; the default if None."""
    name = jax.default_backend() if name is None else name
    if name != "gpu":
        return name
    try:
        jax.devices("rocm")
    except RuntimeError:
        return "cuda"
    return "rocm"


def target(platform: str, forced: Forced = None) -> Target:
    """The target of a computation for ``platform``: this build, GPUs at hand or named."""
    if isinstance(forced, Emulation):
        return Target(platform, compiled(), arch_named(forced.arch).capabilities[:1])
    if platform != "cuda":
        return Target(platform)
    if named := lowering.capabilities():
        return Target(platform, compiled(), named)
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        devices = []
    capabilities = {str(device.compute_capability) for device in devices}
    return Target(platform, compiled(), tuple(sorted(capabilities)))


def kernel(operation: Operation, platform: str, operands: Operands, semantics: Semantics) -> Kernel:
    """The compiled kernel of ``platform`` for arrays as one device launches it."""
    if platform != "cuda":
        return Kernel()
    return gpu_kernel(Problem.of(operands, semantics), target(platform), operation)


class Saved(NamedTuple):
    """Inputs of the backward beside the operands: forward results and their cotangents."""

    out: Array  # [B, T, N, Dv]
    lse: Array  # [B, T, N]
    dout: Array  # [B, T, N, Dv]
    dlse: Array | None = None  # [B, T, N], or zero

    @property
    def cotangents(self) -> tuple[Array, Array]:
        """(dout, dlse), the latter zeros if it is absent."""
        return self.dout, jnp.zeros_like(self.lse) if self.dlse is None else self.dlse


class Rows(NamedTuple):
    """Inputs of a bias's gradient beside the operands, for each row."""

    lse: Array  # [B, T, N]
    dout: Array  # [B, T, N, Dv]
    delta: Array  # [B, T, N]


def _inputs(operation: Operation, operands: Operands, saved: Saved | Rows | None) -> list[Array]:
    """What an operation reads, in call order; an absent array is one without elements."""
    given = operands._asdict() | (saved._asdict() if saved else {})
    arrays = [(x, given[x.name]) for x in schema.OPERATIONS[operation].operands]
    types = {"bias": operands.q.dtype}
    return [
        jnp.zeros((0,), types.get(x.dtype, x.dtype)) if value is None else value
        for x, value in arrays
    ]


def _attributes(semantics: Semantics, stem: str = "") -> dict[str, Any]:
    values = {x.name: _KINDS[x.kind](x.of(semantics)) for x in schema.ATTRIBUTES if x.of}
    return {**values, "kernel": stem}


def rows_of(saved: Saved) -> Rows:
    """Those inputs of a backward that the gradient of a bias takes."""
    dtype = wide(saved.out.dtype)
    products = saved.out.astype(dtype) * saved.dout.astype(dtype)
    delta = jnp.sum(products, axis=-1) - saved.cotangents[1]
    # A row that sees nothing has P = 0, but 0 times a cotangent that is not finite is NaN.
    return Rows(saved.lse, saved.dout, jnp.where(jnp.isneginf(saved.lse), 0, delta))


Struct = jax.ShapeDtypeStruct


def results(operation: Operation, problem: Problem, kernel: Kernel) -> dict[str, Struct]:
    """The results of a call of ``kernel``, by name in call order; an absent dsinks is [0]."""
    extents = schema.extents(problem)
    arrays = schema.OPERATIONS[operation].results
    if operation == "bwd" and not kernel.gives_dbias:
        arrays = tuple(array for array in arrays if array.name != "dbias")
    absent = () if problem.has_sinks else ("dsinks",)
    of_bias = "float32" if problem.bias_bytes == 4 else problem.dtype
    types = {"element": problem.dtype, "bias": of_bias}
    return {
        array.name: Struct(
            (0,) if array.name in absent else array.shape(extents),
            np.dtype(types.get(array.dtype, array.dtype)),
        )
        for array in arrays
    }


def scratch_of(operation: Operation, problem: Problem, kernel: Kernel) -> dict[str, Struct]:
    """Further results of a call of ``kernel`` on a GPU, used as memory, by name."""
    dq_dim = kernel.heads[0] if kernel.heads else None
    shapes = scratch.shapes(operation, problem, kernel.num_splits, dq_dim)
    return {name: Struct(shape, np.dtype(dtype)) for name, (shape, dtype) in shapes.items()}


def _call(
    operation: Operation,
    kernel: Kernel,
    operands: Operands,
    semantics: Semantics,
    saved: Saved | Rows | None = None,
) -> tuple[Array, ...]:
    """The results of one custom call; kernels of a GPU are given scratch, too."""
    own = (operands.q.shape[-1], operands.v.shape[-1])
    heads = kernel.array_heads(own)
    operands = Operands(**head_sizes.padded(operation, arrays_of(operands), heads))
    if saved is not None:
        saved = type(saved)(**head_sizes.padded(operation, arrays_of(saved), heads))
    problem = Problem.of(operands, semantics)
    given = results(operation, problem, kernel)
    memory = scratch_of(operation, problem, kernel) if kernel.stem else {}
    call = jax.ffi.ffi_call(_TARGETS[operation], (*given.values(), *memory.values()))
    inputs = _inputs(operation, operands, saved)
    written = call(*inputs, **_attributes(semantics, kernel.stem))
    return head_sizes.cut(dict(zip(given, written, strict=False)), own)


def forward(kernel: Kernel, operands: Operands, semantics: Semantics) -> tuple[Array, Array]:
    """Calls a forward kernel: out [B, T, N, Dv], lse float32 [B, T, N]."""
    out, lse = _call("fwd", kernel, operands, semantics)
    return out, lse


def backward(kernel: Kernel, operands: Operands, semantics: Semantics, saved: Saved) -> Gradients:
    """Calls the kernels of a backward; with the bias's gradient if ``kernel`` gives it."""
    dq, dk, dv, dsinks, *dbias = _call("bwd", kernel, operands, semantics, saved)
    return Gradients(dq, dk, dv, None if operands.sinks is None else dsinks, *dbias)


def bias_gradient(kernel: Kernel, operands: Operands, semantics: Semantics, rows: Rows) -> Array:
    """Calls the kernel of a bias's gradient, which has the bias's shape and type."""
    (dbias,) = _call("dbias", kernel, operands, semantics, rows)
    return dbias


# ---------------------------------------------------------------------------- without a GPU


def record(
    operation: Operation, problem: Problem, emulation: Emulation, fields: dict[str, int | str]
) -> dict[str, Any]:
    """The launches that one call would make on a GPU: see ``ffi/record.h``.

    Args:
        operation: what is computed.
        problem: what is asked.
        emulation: architecture and multiprocessors of that GPU.
        fields: the address of every array of the call, by its name in ``schema.py``; ``kernel``,
            the stem of a compiled variant; and of a forward ``num_splits``.
    """
    shape = {name: getattr(problem, name) for name in ("dtype", *(x.name for x in schema.EXTENTS))}
    attributes = {x.name: x.of(problem.semantics) for x in schema.ATTRIBUTES if x.of}
    capability = capability_number(arch_named(emulation.arch).capabilities[0])
    call = {**shape, **attributes, **fields}
    return _jax_fa.record(operation, capability, call, emulation.num_sms)


def _ptx_folder() -> Path:
    return Path(_jax_fa.__file__).parent / "ptx"


def has_ptx() -> bool:
    """True if the PTX of the compiled kernels is installed, which a build may leave out."""
    return _ptx_folder().is_dir()


@lru_cache(maxsize=16)
def ptx(variant: str, sha256: str) -> str:
    """The PTX that the object of a compiled variant was assembled from.

    Raises:
        NotImplementedError: it is not installed, or belongs to another build.
    """
    text = ptx_archives.read(_ptx_folder(), variant)
    if text is None or hashlib.sha256(text).hexdigest() != sha256:
        raise NotImplementedError(
            f"attention: in {_ptx_folder()} the PTX of {variant} is "
            f"{'not there' if text is None else 'of another build'}, but the emulator runs the PTX "
            f"of the compiled kernels. Reinstall jax_fa, which puts extension and PTX there."
        )
    return text.decode()
