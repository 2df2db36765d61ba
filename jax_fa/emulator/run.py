"""emulate(): parse, decode, run, report."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache

import numpy as np

# Imported for their registrations: the instruction set is spread over these files.
from jax_fa.emulator import alu, async_copy, lanes, loadstore, mma, sync, tcgen05, wgmma
from jax_fa.emulator.decode import decode
from jax_fa.emulator.launch import Launch
from jax_fa.emulator.machine import Options
from jax_fa.emulator.memory import Memory
from jax_fa.emulator.program import Program
from jax_fa.emulator.ptx import Module, parse
from jax_fa.emulator.report import Report
from jax_fa.emulator.scheduler import Scheduler

INSTRUCTION_FILES = (alu, async_copy, lanes, loadstore, mma, sync, tcgen05, wgmma)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Without cyclic garbage collection.

    A decoded program is many objects and no garbage; looking for some takes half of the time of
    decoding. A machine collects the garbage of its run itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@lru_cache(maxsize=16)
def _module(ptx: str) -> Module:
    return parse(ptx)


@lru_cache(maxsize=32)
def _program(ptx: str, kernel: str | None) -> Program:
    with _garbage_kept():
        return decode(_module(ptx).kernel(kernel))


def emulate(
    ptx: str,
    launch: Launch,
    memory: Memory | Mapping[str, np.ndarray],
    *,
    seed: int = 0,
    options: Options | None = None,
) -> Report:
    """Runs one kernel launch; stores go into the registered buffers.

    Args:
      ptx: PTX text.
      launch: grid, block, cluster, shared memory and raw parameter bytes. Addresses in the
        parameters (and in TMA descriptors) are device addresses of registered buffers.
      memory: the buffers, see Memory.add.
      seed: of the scheduler; equal seeds give equal runs.
      options: see Options.

    Returns:
      Counters.

    Raises:
      EmulationError: a subclass per kind of fault; the message names kernel, CTA, warp and line.
      ValueError: launch and options contradict each other.
    """
    memory = memory if isinstance(memory, Memory) else Memory(memory)
    program = _program(ptx, launch.kernel)
    with np.errstate(all="ignore"):
        scheduler = Scheduler(program, launch, memory, seed, options or Options())
        with _garbage_kept():
            scheduler.run()
    return Report(
        scheduler.instructions(),
        scheduler.counters,
        scheduler.waits,
        scheduler.registers,
        tuple(scheduler.findings),
        scheduler.notes,
        scheduler.issued,
    )
