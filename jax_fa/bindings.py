"""The compiled extension seen from JAX: target names, operand order, attributes.

The only user of ``jax.ffi``. ``ffi/arguments.h`` is the other side of this agreement;
``EXTENSION_VERSION`` and a test hold the two together. Target names carry a version and attributes
are only ever added, so that exported programs keep running.
"""

from __future__ import annotations

import hashlib
import lzma
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_fa import _jax_fa
from jax_fa.choice import Emulation, Forced, Target, kv_splits
from jax_fa.kernels import abi
from jax_fa.problem import Gradients, Operands, Problem, Semantics
from jax_fa.variants import ARCHS, Operation

FORWARD_TARGET = "jax_fa_fwd_v1"
BACKWARD_TARGET = "jax_fa_bwd_v1"
PARTITIONED_TARGET = "jax_fa_partitioned_v1"
"""A call that XLA splits over devices (``partitioning``); it never runs itself."""

EXTENSION_VERSION = 1

_OPTIONAL_DTYPES = {"sinks": np.float32}
_EXTENTS = (
    *("batch", "num_sequences", "q_len", "kv_len"),
    *("num_q_heads", "num_kv_heads", "head_dim", "value_dim"),
)


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
    """What ``jax.export.export(..., disabled_checks=...)`` needs to export attention.

    JAX refuses to export custom calls whose stability it does not know. The targets of jax_fa are
    versioned and their attributes only grow, so an exported program runs wherever ``jax_fa`` has
    been imported::

        exported = jax.export.export(step, disabled_checks=jax_fa.export_disabled_checks())(x)
        path.write_bytes(exported.serialize())

        import jax_fa  # where the program runs: nothing else tells XLA of the kernels
        step = jax.export.deserialize(bytearray(path.read_bytes()))
        y = step.call(x)

    Without that import the call ends in ``No FFI handler registered for jax_fa_fwd_v1`` (or
    ``jax_fa_bwd_v1``).
    """
    return [
        jax.export.DisabledSafetyCheck.custom_call(name)
        for name in (FORWARD_TARGET, BACKWARD_TARGET, PARTITIONED_TARGET)
    ]


def compiled() -> frozenset[str]:
    """Names of the GPU variants that this build holds."""
    return frozenset(_jax_fa.variants())


def target(platform: str, forced: Forced = None) -> Target:
    """What a computation for ``platform`` may count on: kernels of this build, GPUs at hand."""
    if isinstance(forced, Emulation):
        arch = next(arch for arch in ARCHS if arch.name == forced.arch)
        return Target(platform, compiled(), (arch.capability,))
    if platform != "cuda":
        return Target(platform)
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        devices = []
    capabilities = {str(device.compute_capability) for device in devices}
    return Target(platform, compiled(), tuple(sorted(capabilities)))


def _inputs(operands: Operands) -> list[Array]:
    """All operands in call order; an absent one is an array without elements."""
    return [
        jnp.zeros((0,), _OPTIONAL_DTYPES.get(name, np.int32)) if array is None else array
        for name, array in operands._asdict().items()
    ]


def _attributes(semantics: Semantics) -> dict[str, Any]:
    band = semantics.band
    return {
        "scale": np.float32(semantics.scale),
        "soft_cap": np.float32(semantics.soft_cap or 0.0),
        "window_left": np.int32(band.left_bound),
        "window_right": np.int32(band.right_bound),
        "bottom_right": np.bool_(band.alignment == "bottom_right"),
        "deterministic": np.bool_(semantics.deterministic),
        "mask_mod": semantics.mask_mod or "",
    }


def _scratch(shapes: dict[str, tuple[tuple[int, ...], str]]) -> list[jax.ShapeDtypeStruct]:
    """Further results of a call, which a GPU kernel uses as memory."""
    return [jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for shape, dtype in shapes.values()]


def forward(platform: str, operands: Operands, semantics: Semantics) -> tuple[Array, Array]:
    """Calls the forward kernel of ``platform``: out [B, T, N, Dv], lse float32 [B, T, N]."""
    batch, q_len, heads, _ = operands.q.shape
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    if platform == "cuda":
        problem = Problem.of(operands, semantics)
        shapes = abi.forward_scratch_shapes(problem, kv_splits(problem, target(platform)))
    results = (
        jax.ShapeDtypeStruct((batch, q_len, heads, operands.v.shape[-1]), operands.q.dtype),
        jax.ShapeDtypeStruct((batch, q_len, heads), np.float32),
        *_scratch(shapes),
    )
    call = jax.ffi.ffi_call(FORWARD_TARGET, results)
    out, lse, *_ = call(*_inputs(operands), **_attributes(semantics))
    return out, lse


class Saved(NamedTuple):
    """What the backward takes beside the operands: forward results and their cotangents."""

    out: Array  # [B, T, N, Dv]
    lse: Array  # [B, T, N]
    dout: Array  # [B, T, N, Dv]
    dlse: Array  # [B, T, N]


def backward(platform: str, operands: Operands, semantics: Semantics, saved: Saved) -> Gradients:
    """Calls the backward kernels of ``platform``; those of a GPU get scratch as extra results."""
    sinks_shape = (0,) if operands.sinks is None else operands.sinks.shape
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    if platform == "cuda":
        shapes = abi.scratch_shapes(Problem.of(operands, semantics))
    results = (
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:3]),
        jax.ShapeDtypeStruct(sinks_shape, np.float32),
        *_scratch(shapes),
    )
    call = jax.ffi.ffi_call(BACKWARD_TARGET, results)
    dq, dk, dv, dsinks, *_ = call(*_inputs(operands), *saved, **_attributes(semantics))
    return Gradients(dq, dk, dv, None if operands.sinks is None else dsinks)


# ---------------------------------------------------------------------------- without a GPU


def record(
    operation: Operation, problem: Problem, emulation: Emulation, addresses: dict[str, int]
) -> dict[str, Any]:
    """The launches that one call would make on a GPU: see ``ffi/record.h``.

    Args:
        operation: forward or backward.
        problem: what is asked; its compiled variant must exist.
        emulation: architecture and multiprocessors of that GPU.
        addresses: of every array of the call, by its name in ``ffi/kernels.h``; and of a forward
            ``num_splits``.
    """
    shape = {name: getattr(problem, name) for name in ("dtype", *_EXTENTS)}
    attributes = {
        name: x if isinstance(x, str) else x.item()
        for name, x in _attributes(problem.semantics).items()
    }
    capability = int(emulation.arch.removeprefix("sm"))
    call = {**shape, **attributes, **addresses}
    return _jax_fa.record(operation, capability, call, emulation.num_sms)


@lru_cache(maxsize=16)
def ptx(variant: str, sha256: str) -> str:
    """The PTX that the object of a compiled variant was assembled from.

    Raises:
        NotImplementedError: it is not installed, or belongs to another build.
    """
    path = Path(_jax_fa.__file__).parent / "ptx" / f"{variant}.ptx.xz"
    text = lzma.decompress(path.read_bytes()) if path.exists() else None
    if text is None or hashlib.sha256(text).hexdigest() != sha256:
        raise NotImplementedError(
            f"attention: {path} {'is not there' if text is None else 'is of another build'}, but "
            f"the emulator runs the PTX of the compiled kernels. Reinstall jax_fa, which puts "
            f"extension and PTX there together."
        )
    return text.decode()
