"""Timing: candidates take turns in one run, so that drift affects all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np


@dataclass(frozen=True)
class Protocol:
    """The number of times a candidate runs.

    Attributes:
        warmup: untimed runs of each candidate.
        rounds: timed samples of each.
        seconds: no new round begins after this long, once there are ``min_rounds``.
        min_rounds: timed samples of each, however long they take.
        calls: runs per sample. A GPU works them off while the host queues the next, so that a
            sample holds the time of the device, not that of the calls.
    """

    warmup: int = 1
    rounds: int = 32
    seconds: float = 20.0
    min_rounds: int = 3
    calls: int = 1


CPU_PROTOCOL = Protocol()
GPU_PROTOCOL = Protocol(warmup=32, rounds=8, calls=16)


@dataclass(frozen=True)
class Samples:
    """Seconds of each timed run of a candidate, in order."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median in seconds."""
        return float(np.median(self.seconds))

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile in seconds."""
        low, high = np.percentile(self.seconds, (25, 75))
        return float(low), float(high)

    def speedup_over(self, other: Samples) -> float:
        """The speedup over ``other``: the median over rounds that both ran."""
        return float(np.median(np.divide(other.seconds, self.seconds)))


def interleaved(
    candidates: Mapping[str, Callable[[], object]], protocol: Protocol
) -> dict[str, Samples]:
    """Times functions that return their results, finished or on the way, in turns."""

    def work(run: Callable[[], object], times: int) -> None:
        result = None
        for _ in range(times):
            result = run()
        jax.block_until_ready(result)

    for run in candidates.values():
        work(run, protocol.warmup)
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    start = time.perf_counter()
    for round_index in range(protocol.rounds):
        if round_index >= protocol.min_rounds and time.perf_counter() - start > protocol.seconds:
            break
        for name, run in candidates.items():
            before = time.perf_counter()
            work(run, protocol.calls)
            taken[name].append((time.perf_counter() - before) / protocol.calls)
    return {name: Samples(tuple(seconds)) for name, seconds in taken.items()}
