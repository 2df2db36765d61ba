"""``implementation="emulated"``: the compiled GPU kernels, run on the CPU by ``jax_fa.emulator``.

The launches are those that the extension would make on a GPU (record mode), the code is the PTX
that the linked objects were assembled from. JAX calls both through a host callback.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, get_args

import jax
import numpy as np
from jax import Array

from jax_fa import bindings, installation
from jax_fa.choice import Completion, Emulation, kv_splits
from jax_fa.kernels import abi
from jax_fa.problem import Gradients, Operands, Problem, Semantics
from jax_fa.variants import ARCHS, Operation, arch_name

if TYPE_CHECKING:
    from jax_fa.emulator import Report

# Part of the key of every jit cache: a function traced under one emulation is traced again under
# another.
_active = jax.make_user_context(default_value=None)

_MOST_WARPS = 32
"""Of a CTA, which has 1024 threads at most."""
_POISON = 0xFF
"""Byte that fills what kernels have to write: a NaN in every element type, -1 in an integer."""


def emulation(
    arch: str | None = None,
    *,
    seed: int = 0,
    completion: Completion = "random",
    num_sms: int = 4,
    resident: int = 1,
    starved: int | None = None,
    held: int | None = None,
) -> AbstractContextManager[None]:
    """A context that says what ``implementation="emulated"`` runs.

    ::

        with jax_fa.emulation("sm100", seed=3):
            out = jax_fa.attention(q, k, v, implementation="emulated")

    The GPU kernels of this build run thread for thread, and races, deadlocks and reads of memory
    that nothing wrote are errors (``jax_fa/emulator/README.md``). Computations that are traced
    within the context keep its settings; jitted functions are traced anew in another one.

    Args:
        arch: GPU family, such as "sm90"; None takes the one that this build holds kernels for.
        seed: of the order in which warps run; equal seeds give equal runs.
        completion: when asynchronous operations complete: "random", "lazy" (as late as they may)
            or "eager" (at once).
        num_sms: multiprocessors of the GPU; kernels that stay resident launch that many CTAs, so
            that few of them make each CTA work on several tiles.
        resident: CTAs, or clusters where a kernel launches those, that the GPU holds at a time;
            the next one starts when one of them exits.
        starved: a warp, counted within its CTA, that runs only when no other can: what is right
            only while warps keep pace is found with each of them once, and with "eager".
        held: a line of the kernels' PTX: the asynchronous operations issued there complete later
            than all others. Faults name such lines, reports count them (``Report.issued``).

    Raises:
        ValueError: an argument is not one of the values above.
        NotImplementedError: ``arch`` is None, and this build holds kernels of no family, or of
            several.
    """
    arch = _only_compiled() if arch is None else arch
    return _active(_checked(Emulation(arch, seed, completion, num_sms, resident, starved, held)))


def resolve() -> Emulation:
    """What "emulated" means here: the innermost ``emulation``, or the defaults."""
    return _active.value or Emulation(_only_compiled())


def _checked(wanted: Emulation) -> Emulation:
    """``wanted``, unless something is wrong with it."""
    names = [known.name for known in ARCHS]
    if wanted.arch not in names:
        raise ValueError(
            f"emulation: arch is {wanted.arch!r}; kernels exist for {', '.join(names)}."
        )
    if wanted.completion not in get_args(Completion):
        raise ValueError(
            f"emulation: completion is {wanted.completion!r}; use one of {get_args(Completion)}."
        )
    if wanted.num_sms < 1:
        raise ValueError(f"emulation: num_sms is {wanted.num_sms}; a GPU has at least one.")
    if wanted.resident < 1:
        raise ValueError(f"emulation: resident is {wanted.resident}; a GPU holds at least one CTA.")
    if wanted.starved is not None and wanted.starved not in range(_MOST_WARPS):
        raise ValueError(
            f"emulation: starved is {wanted.starved}; warps of a CTA are 0 to {_MOST_WARPS - 1}, "
            f"at most."
        )
    if wanted.held is not None and wanted.held < 1:
        raise ValueError(f"emulation: held is {wanted.held}; lines of PTX are counted from 1.")
    return wanted


def _only_compiled() -> str:
    compiled = sorted({arch_name(name) for name in bindings.compiled()})
    if len(compiled) == 1:
        return compiled[0]
    if not compiled:
        raise NotImplementedError(
            "attention: implementation='emulated' runs compiled GPU kernels, and this build holds "
            "none. Use implementation=None or 'xla', or install kernels of a family that kernels "
            f"exist for: `{installation.command([ARCHS[0].name])}`"
        )
    raise NotImplementedError(
        f"attention: implementation='emulated' needs to know which GPU: this build holds kernels "
        f"of {', '.join(compiled)}. Say it with jax_fa.emulation({compiled[0]!r})."
    )


# -------------------------------------------------------------------------------- the operations


def forward(settings: Emulation, operands: Operands, semantics: Semantics) -> tuple[Array, Array]:
    """Emulates the forward kernel: out [B, T, N, Dv], lse float32 [B, T, N]."""
    problem = Problem.of(operands, semantics)
    call = Call("fwd", problem, settings)
    arrays = {name: x for name, x in operands._asdict().items() if x is not None}
    out, lse = _on_host(call, arrays)
    return out, lse


def backward(
    settings: Emulation, operands: Operands, semantics: Semantics, saved: bindings.Saved
) -> Gradients:
    """Emulates the backward kernels."""
    problem = Problem.of(operands, semantics)
    call = Call("bwd", problem, settings)
    arrays = {name: x for name, x in operands._asdict().items() if x is not None}
    grads = _on_host(call, {**arrays, **saved._asdict()})
    return Gradients(*grads, *([] if problem.has_sinks else [None]))


class Call(NamedTuple):
    """One operation to emulate."""

    operation: Operation
    problem: Problem
    settings: Emulation

    @property
    def results(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What the kernels write for the caller, by name."""
        p = self.problem
        q, out = (p.batch, p.q_len, p.num_q_heads, p.head_dim), (p.batch, p.q_len, p.num_q_heads)
        kv = (p.batch, p.kv_len, p.num_kv_heads)
        element, float32 = np.dtype(p.dtype), np.dtype(np.float32)
        if self.operation == "fwd":
            return {
                "out": jax.ShapeDtypeStruct((*out, p.value_dim), element),
                "lse": jax.ShapeDtypeStruct(out, float32),
            }
        sinks = jax.ShapeDtypeStruct((p.num_sequences, p.num_q_heads), float32)
        return {
            "dq": jax.ShapeDtypeStruct(q, element),
            "dk": jax.ShapeDtypeStruct((*kv, p.head_dim), element),
            "dv": jax.ShapeDtypeStruct((*kv, p.value_dim), element),
            **({"dsinks": sinks} if p.has_sinks else {}),
        }

    @property
    def num_splits(self) -> int:
        """Parts into which the keys of a forward are split."""
        return kv_splits(self.problem, bindings.target("cpu", self.settings))

    @property
    def scratch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What they write for themselves."""
        if self.operation == "fwd":
            shapes = abi.forward_scratch_shapes(self.problem, self.num_splits)
        else:
            shapes = abi.scratch_shapes(self.problem)
        return {
            name: jax.ShapeDtypeStruct(shape, np.dtype(dtype))
            for name, (shape, dtype) in shapes.items()
        }


def _on_host(call: Call, arrays: Mapping[str, Array]) -> tuple[Array, ...]:
    def run(*given: np.ndarray) -> tuple[np.ndarray, ...]:
        inputs = dict(zip(arrays, map(np.asarray, given), strict=True))
        return tuple(execute(call, inputs)[0].values())

    results = jax.pure_callback(run, tuple(call.results.values()), *arrays.values())
    return tuple(results)


def execute(
    call: Call, inputs: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], list[Report]]:
    """Runs the kernels of ``call``.

    Args:
        call: what to run.
        inputs: the present operands, and for a backward out, lse, dout and dlse.

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
    if call.operation == "fwd":
        addresses["num_splits"] = call.num_splits
    recorded = bindings.record(call.operation, call.problem, settings, addresses)
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
