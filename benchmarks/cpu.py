"""``python -m benchmarks.cpu``: attention on the CPU, implementations side by side.

Prints a Markdown table and whether the goals of the CPU platform are met; writes all samples
(cpu.json) and how speed and memory change with the sequence length (cpu.png).
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import figures, implementations, memory, report, workloads
from benchmarks.report import Record
from benchmarks.timing import CPU_PROTOCOL, Protocol, interleaved
from benchmarks.workloads import DIRECTIONS, Direction, Workload

_MIB = 2**20


@dataclass(frozen=True)
class Goal:
    """Requirements on ``workloads.MAIN``, in every dtype.

    Attributes:
        other: the implementation compared with.
        direction: forward, or forward and backward.
        speedup: least speed relative to ``other``.
    """

    other: str
    direction: Direction
    speedup: float


_GOALS = (
    Goal("jax.nn xla", "forward", 4.0),
    Goal("jax.nn xla", "forward+backward", 5.0),
    Goal("torch", "forward", 1 / 1.3),
    Goal("torch", "forward+backward", 1 / 1.3),
)
_MEMORY_GOAL_BYTES = 64 * _MIB


def measure(
    workload: Workload, dtype: str, direction: Direction, protocol: Protocol
) -> list[Record]:
    """Runs every available implementation in turns, then each in a process for its memory."""
    names = [x for x in implementations.RUNNERS if implementations.is_available(x, workload)]
    runners = {name: implementations.RUNNERS[name](workload, dtype, direction) for name in names}
    taken = interleaved(runners, protocol)
    return [
        Record(
            workload,
            dtype,
            direction,
            name,
            taken[name],
            memory.peak_bytes(name, workload, dtype, direction),
        )
        for name in names
    ]


def goals(records: Iterable[Record]) -> list[str]:
    """One line for each goal and dtype that was measured."""
    lines = []
    for group in report.compared(r for r in records if r.workload == workloads.MAIN):
        subject = group[report.SUBJECT]
        what = f"{subject.dtype}, {subject.direction}"
        for goal in _GOALS:
            if goal.direction == subject.direction and goal.other in group:
                speedup = subject.samples.speedup_over(group[goal.other].samples)
                verdict = "met" if speedup >= goal.speedup else "MISSED"
                lines.append(
                    f"{verdict}: {what}: {speedup:.2f} times as fast as {goal.other} "
                    f"(goal: {goal.speedup:.2f})"
                )
        if subject.peak_bytes is not None:
            verdict = "met" if subject.peak_bytes <= _MEMORY_GOAL_BYTES else "MISSED"
            lines.append(
                f"{verdict}: {what}: {subject.peak_bytes / _MIB:.1f} MB above inputs and outputs "
                f"(goal: {_MEMORY_GOAL_BYTES // _MIB})"
            )
    return lines


def machine() -> dict[str, str]:
    """Conditions of the figures besides the code."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    versions = report.about("jax", "jaxlib", "torch")
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return {"cpu": f"{model}, {os.cpu_count()} cores", **versions, "load at the start": load}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns the exit status, 1 if a goal was missed."""
    every = (*workloads.CPU, *workloads.CPU_SCALING)
    parser = argparse.ArgumentParser("python -m benchmarks.cpu", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[w.name for w in every], metavar="WORKLOAD")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=("float32", "bfloat16", "float16"),
        default=["float32", "bfloat16"],
    )
    parser.add_argument("--seconds", type=float, default=CPU_PROTOCOL.seconds, help="per point")
    parser.add_argument("--min-rounds", type=int, default=CPU_PROTOCOL.min_rounds)
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), metavar="DIR")
    args = parser.parse_args(argv)
    protocol = replace(CPU_PROTOCOL, seconds=args.seconds, min_rounds=args.min_rounds)
    about = machine()
    print("\n".join(f"{name}: {value}" for name, value in about.items()), flush=True)
    records: list[Record] = []
    for workload in every:
        if args.only is not None and workload.name not in args.only:
            continue
        dtypes = args.dtypes[:1] if workload in workloads.CPU_SCALING else args.dtypes
        for dtype in dtypes:
            for direction in DIRECTIONS:
                taken = measure(workload, dtype, direction, protocol)
                records += taken
                medians = (f"{r.implementation} {1e3 * r.samples.median:.1f} ms" for r in taken)
                print(
                    f"{workload.name}, {dtype}, {direction}: {', '.join(medians)}",
                    file=sys.stderr,
                    flush=True,
                )
    args.output.mkdir(parents=True, exist_ok=True)
    written = report.write_json(records, about, args.output / "cpu.json")
    lines = [*goals(records), *figures.draw([written], args.output / "cpu.png")]
    print(f"\n{report.markdown(records)}\n", *lines, f"Written to {args.output}.", sep="\n")
    return int(any(line.startswith("MISSED") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
