"""``implementation="emulated"``: the compiled GPU kernels, run on the CPU by ``jax_fa.emulator``.

The launches are those that the extension would make on a GPU (record mode), the code is the PTX
that the linked objects were assembled from. JAX calls both through a host callback.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax import Array

from jax_fa.runtime import bindings, head_sizes, installation
from jax_fa.runtime.dispatch import Emulation, Kernel, gpu_kernel
from jax_fa.spec.arch import Operation
from jax_fa.spec.problem import Gradients, Operands, Problem, Semantics, arrays_of

if TYPE_CHECKING:
    from jax_fa.emulator import Report

_POISON = 0xFF
"""Byte that fills what kernels have to write: a NaN in every element type, -1 in an integer."""


def forward(
    settings: Emulation, kernel: Kernel, operands: Operands, semantics: Semantics
) -> tuple[Array, Array]:
    """Emulates a forward kernel: out [B, T, N, Dv], lse float32 [B, T, N]."""
    call = Call("fwd", Problem.of(operands, semantics), settings, kernel)
    out, lse = _on_host(call, arrays_of(operands))
    return out, lse


def backward(
    settings: Emulation,
    kernel: Kernel,
    operands: Operands,
    semantics: Semantics,
    saved: bindings.Saved,
) -> Gradients:
    """Emulates the kernels of a backward; with the bias's gradient if ``kernel`` gives it."""
    call = Call("bwd", Problem.of(operands, semantics), settings, kernel)
    grads = _on_host(call, {**arrays_of(operands), **arrays_of(saved)})
    return Gradients(
        **{name.removeprefix("d"): x for name, x in zip(call.results, grads, strict=True)}
    )


def bias_gradient(
    settings: Emulation,
    kernel: Kernel,
    operands: Operands,
    semantics: Semantics,
    rows: bindings.Rows,
) -> Array:
    """Emulates the kernel of a bias's gradient."""
    call = Call("dbias", Problem.of(operands, semantics), settings, kernel)
    (dbias,) = _on_host(call, {**arrays_of(operands), **arrays_of(rows)})
    return dbias


class Call(NamedTuple):
    """One operation to emulate, by ``kernel`` or else by the one that serves the problem."""

    operation: Operation
    problem: Problem
    settings: Emulation
    kernel: Kernel | None = None

    @property
    def results(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The results that the kernels write for the caller, by name."""
        written = bindings.results(self.operation, self.problem, self.served_by)
        return {
            name: x for name, x in written.items() if name != "dsinks" or self.problem.has_sinks
        }

    @property
    def served_by(self) -> Kernel:
        """The kernel that runs."""
        at_hand = bindings.target("cpu", self.settings)
        return self.kernel or gpu_kernel(self.problem, at_hand, self.operation)

    @property
    def heads(self) -> head_sizes.Heads:
        """(D, Dv) of the arrays."""
        return self.problem.head_dim, self.problem.value_dim

    @property
    def padded(self) -> Call:
        """The call with the heads that arrays have to have."""
        head_dim, value_dim = self.served_by.array_heads(self.heads)
        problem = dataclasses.replace(self.problem, head_dim=head_dim, value_dim=value_dim)
        return self._replace(problem=problem)

    @property
    def fields(self) -> dict[str, int | str]:
        """The fields of the recorded call that name the kernel."""
        kernel = self.served_by
        head_dim, _ = kernel.heads or self.heads
        numbers = {"fwd": {"num_splits": kernel.num_splits}, "bwd": {"dq_dim": head_dim}}
        return {"kernel": kernel.stem, **numbers.get(self.operation, {})}

    @property
    def scratch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The scratch arrays that they write for themselves."""
        return bindings.scratch_of(self.operation, self.problem, self.served_by)


def _on_host(call: Call, arrays: Mapping[str, Array]) -> tuple[Array, ...]:
    if not bindings.has_ptx():
        raise NotImplementedError(
            "attention: implementation='emulated' runs the PTX of the compiled GPU kernels, and "
            "this installation was built without it (JAX_FA_PTX=OFF). Use implementation=None or "
            f"'xla', or install one that has it: `{installation.command([call.settings.arch])}`"
        )

    padded = call.padded
    taken = head_sizes.padded(call.operation, arrays, padded.heads)

    def run(*given: np.ndarray) -> tuple[np.ndarray, ...]:
        inputs = dict(zip(taken, map(np.asarray, given), strict=True))
        return tuple(execute(padded, inputs)[0].values())

    written = jax.pure_callback(run, tuple(padded.results.values()), *taken.values())
    results = dict(zip(padded.results, written, strict=True))
    return head_sizes.cut(results, call.heads)


def execute(
    call: Call, inputs: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], list[Report]]:
    """Runs the kernels of ``call``.

    Args:
        call: what to run.
        inputs: the present operands, and what the operation takes beside them.

    Returns:
        The results by name, and the emulator's report on each launch.

    Raises:
        EmulationError: a fault of the kernel, with the settings under which to meet it again.
    """
    # Here, so that importing jax_fa does not load an instruction set.
    from jax_fa.emulator import EmulationError, Launch, Memory, Options, emulate

    written = {
        name: np.frombuffer(bytearray([_POISON]) * _num_bytes(x), x.dtype).reshape(x.shape)
        for name, x in {**call.results, **call.scratch}.items()
    }
    memory = Memory()
    arrays = {**{name: np.ascontiguousarray(x) for name, x in inputs.items()}, **written}
    addresses = {name: memory.add(name, x) for name, x in arrays.items() if x.size}
    settings = call.settings
    fields = {**addresses, **call.fields}
    recorded = bindings.record(call.operation, call.problem, settings, fields)
    ptx = bindings.ptx(recorded["variant"], recorded["ptx_sha256"])
    options = Options(
        settings.completion,
        starved=settings.starved,
        held=settings.held,
        resident=settings.resident,
    )
    reports = []
    for launch in map(Launch.from_record, recorded["launches"]):
        try:
            reports.append(emulate(ptx, launch, memory, seed=settings.seed, options=options))
        except EmulationError as error:
            error.message = f"{recorded['variant']} as {settings}: {error.message}"
            raise
    return {name: written[name] for name in call.results}, reports


def _num_bytes(array: jax.ShapeDtypeStruct) -> int:
    return array.size * array.dtype.itemsize
