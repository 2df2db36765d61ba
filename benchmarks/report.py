"""Records of measurements, and their forms for people and programs (Markdown, JSON)."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax_fa
from benchmarks.timing import Samples
from benchmarks.workloads import Direction, Workload

SUBJECT = "jax_fa"
"""The implementation that the others are compared with."""


@dataclass(frozen=True)
class Record:
    """One implementation on one workload.

    Attributes:
        workload: what was run.
        dtype: of inputs and output.
        direction: forward, or forward and backward.
        implementation: who ran it.
        samples: seconds; those of one workload, dtype and direction were taken in turns.
        peak_bytes: memory above inputs and outputs, or None if not measured.
    """

    workload: Workload
    dtype: str
    direction: Direction
    implementation: str
    samples: Samples
    peak_bytes: int | None = None

    @property
    def gflops_per_second(self) -> float:
        """Useful work per time: products over visible pairs alone."""
        return self.workload.flops(self.direction) / self.samples.median / 1e9

    def as_json(self) -> dict[str, Any]:
        """Every field, and what follows from them."""
        return {
            **dataclasses.asdict(self),
            "median_seconds": self.samples.median,
            "quartiles_seconds": self.samples.quartiles,
            "gflops_per_second": self.gflops_per_second,
        }


def compared(records: Iterable[Record]) -> list[dict[str, Record]]:
    """Groups records that were taken in turns: one dictionary by implementation for each."""
    groups: dict[Any, dict[str, Record]] = {}
    for record in records:
        key = (record.workload, record.dtype, record.direction)
        groups.setdefault(key, {})[record.implementation] = record
    return list(groups.values())


def markdown(records: Iterable[Record]) -> str:
    """A table: times, the speed of the subject relative to the others, memory."""
    rows = [
        ["workload", "dtype", "direction", "implementation", "median (quartiles) ms"]
        + ["GFLOP/s", f"{SUBJECT} is faster by", "memory MB"],
    ]
    for group in compared(records):
        for record in group.values():
            low, high = (f"{1e3 * x:.1f}" for x in record.samples.quartiles)
            memory = "" if record.peak_bytes is None else f"{record.peak_bytes / 2**20:.0f}"
            ratio = group[SUBJECT].samples.speedup_over(record.samples)
            rows.append(
                [record.workload.name, record.dtype, record.direction, record.implementation]
                + [f"{1e3 * record.samples.median:.1f} ({low} to {high})"]
                + [f"{record.gflops_per_second:.1f}"]
                + ["" if record.implementation == SUBJECT else f"{ratio:.2f} x", memory]
            )
    rows.insert(1, ["---"] * 4 + ["---:"] * 4)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def about(*packages: str) -> dict[str, str]:
    """The date, and versions of jax_fa and of those ``packages`` that are installed."""
    found = {name: metadata.version(name) for name in packages if find_spec(name) is not None}
    return {"date": datetime.date.today().isoformat(), "jax_fa": jax_fa.__version__, **found}


def write_json(records: Sequence[Record], machine: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Writes all samples, and the machine that they were taken on; returns what it wrote.

    Records of peers say, as "speedup", how many times as fast the subject is.
    """
    written = []
    for group in compared(records):
        for name, record in group.items():
            found = record.as_json()
            if name != SUBJECT and SUBJECT in group:
                found["speedup"] = group[SUBJECT].samples.speedup_over(record.samples)
            written.append(found)
    lines = ",\n".join(f"  {json.dumps(record)}" for record in written)
    head = json.dumps({"machine": dict(machine)}, indent=1).removesuffix("\n}")
    path.write_text(f'{head},\n "records": [\n{lines}\n ]\n}}\n')
    return {"machine": dict(machine), "records": written}
