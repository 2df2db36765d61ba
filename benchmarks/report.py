"""What was measured: records, and what people and programs read of them (Markdown, JSON, PNG)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def write_json(records: Sequence[Record], machine: Mapping[str, Any], path: Path) -> None:
    """Writes all samples, and the machine that they were taken on."""
    content = {"machine": dict(machine), "records": [record.as_json() for record in records]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def plot_growth(records: Iterable[Record], path: Path) -> None:
    """Draws time and memory over length, a line per implementation and direction, if any."""
    from matplotlib.figure import Figure

    lines: dict[tuple[str, Direction], list[Record]] = {}
    for record in records:
        lines.setdefault((record.implementation, record.direction), []).append(record)
    if not lines:
        return
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    colors = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(name for name, _ in lines))}
    for (name, direction), line in lines.items():
        style = {
            "label": f"{name}, {direction}",
            "color": colors[name],
            "linestyle": "-" if direction == "forward" else "--",
            "marker": ".",
        }
        lengths = [record.workload.q_len for record in line]
        time_axes.plot(lengths, [1e3 * record.samples.median for record in line], **style)
        measured = [r for r in line if r.peak_bytes is not None]
        memory_axes.plot(
            [r.workload.q_len for r in measured],
            [max(r.peak_bytes or 0, 2**16) / 2**20 for r in measured],
            **style,
        )
    time_axes.set(title="time", ylabel="ms")
    memory_axes.set(title="memory above inputs and outputs", ylabel="MB")
    for axes in (time_axes, memory_axes):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("sequence length")
        axes.grid(alpha=0.3)
    time_axes.legend()
    figure.savefig(path, dpi=120)
