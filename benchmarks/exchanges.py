"""``python -m benchmarks.exchanges``: a picture of what GPUs that share a sequence do, and when.

Causal self-attention in bfloat16 over all GPUs at hand, traced by JAX's profiler. The picture has
two lines for each GPU: attention kernels and copies; exchanges with other GPUs. The text says how
long no attention kernel ran, and how much of the exchanges was beside one::

    python -m benchmarks.exchanges --length 65536 --strategy all_to_all --output exchanges.svg
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from jax.profiler import ProfileData

from benchmarks import context
from benchmarks.workloads import DIRECTIONS, Workload
from jax_fa.analysis import drawing

Kind = Literal["attention", "copy", "exchange"]
KINDS: tuple[Kind, ...] = ("attention", "copy", "exchange")


@dataclass(frozen=True)
class Event:
    """Something that a GPU did, from ``start`` to ``end`` in microseconds.

    Attributes:
        gpu: number of the GPU.
        kind: a kernel of jax_fa; a copy or rearrangement by XLA; an exchange with another GPU.
        start: since the call began on this GPU.
        end: likewise.
    """

    gpu: int
    kind: Kind
    start: float
    end: float


def kind_of(name: str) -> Kind:
    """The kind of an event of the profiler."""
    if "nccl" in name or "P2P" in name:
        return "exchange"
    return "attention" if "cutlass" in name else "copy"


def read(folder: Path) -> list[Event]:
    """The events of the last call in a trace that holds two."""
    (path,) = folder.rglob("*.xplane.pb")
    found: list[Event] = []
    planes = [
        x for x in ProfileData.from_file(str(path)).planes if x.name.startswith("/device:GPU")
    ]
    for gpu, plane in enumerate(planes):
        streams = [line for line in plane.lines if line.name.startswith("Stream")]
        events = sorted(
            (e.start_ns / 1e3, e.duration_ns / 1e3, e.name) for line in streams for e in line.events
        )
        last = events[len(events) // 2 :]
        found += [
            Event(gpu, kind_of(name), start - last[0][0], start - last[0][0] + duration)
            for start, duration, name in last
        ]
    return found


@dataclass(frozen=True)
class Summary:
    """Microseconds of one GPU.

    Attributes:
        total: of the whole call.
        idle: in which no attention kernel ran.
        exchanged: of exchanges.
        hidden: of those, beside an attention kernel.
    """

    total: float
    idle: float
    exchanged: float
    hidden: float


def summary(events: Sequence[Event], gpu: int) -> Summary:
    """What the events of a GPU add up to."""
    own = [event for event in events if event.gpu == gpu]
    kernels = _merged([event for event in own if event.kind == "attention"])
    exchanges = _merged([event for event in own if event.kind == "exchange"])
    total = max(event.end for event in own) - min(event.start for event in own)
    hidden = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in kernels for b in exchanges)
    return Summary(total, total - _length(kernels), _length(exchanges), hidden)


def _merged(events: Sequence[Event]) -> list[tuple[float, float]]:
    """The times at which any of the events went on."""
    times: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda event: event.start):
        if times and event.start <= times[-1][1]:
            times[-1] = times[-1][0], max(times[-1][1], event.end)
        else:
            times.append((event.start, event.end))
    return times


def _length(times: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in times)


def draw(events: Sequence[Event], title: str, path: Path) -> None:
    """A picture with two lines for each GPU."""
    gpus = sorted({event.gpu for event in events})
    lines: dict[str, tuple[Kind, ...]] = {
        "kernels": ("attention", "copy"),
        "exchanges": ("exchange",),
    }
    colors = dict(zip(KINDS, drawing.COLORS, strict=False))
    with drawing.picture(path, (9.0, 0.8 + 0.8 * len(gpus)), title) as figure:
        axes = figure.subplots()
        names = [f"GPU {gpu}, {line}" for gpu in gpus for line in lines]
        for gpu in gpus:
            for row, kinds in enumerate(lines.values()):
                for kind in kinds:
                    own = [x for x in events if (x.gpu, x.kind) == (gpu, kind)]
                    bars = [(x.start / 1e3, (x.end - x.start) / 1e3) for x in own]
                    place = len(lines) * gpu + row - 0.4
                    axes.broken_barh(
                        bars, (place, 0.8), facecolor=colors[kind], edgecolor="w", linewidth=0.5
                    )
        for x, kind in enumerate(KINDS):
            label = {"attention": "attention", "copy": "copies on a GPU"}.get(kind, "exchanges")
            at = (0.02 + 0.2 * x, -0.7)
            axes.text(*at, label, color=colors[kind], transform=axes.get_yaxis_transform())
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -1.1)
        axes.set_xlabel("ms")


def main(argv: Sequence[str] | None = None) -> int:
    """Traces, prints and draws."""
    parser = argparse.ArgumentParser("python -m benchmarks.exchanges", description=__doc__)
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("N", "K"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--strategy", default="all_to_all", choices=context.STRATEGIES)
    parser.add_argument("--direction", default="forward", choices=DIRECTIONS)
    parser.add_argument("--output", type=Path, default=Path("exchanges.svg"))
    args = parser.parse_args(argv)
    obstacle = drawing.obstacle()
    if obstacle is not None:
        parser.error(obstacle)
    length, (q_heads, kv_heads) = args.length, args.heads
    workload = Workload(f"1x{length}", 1, length, length, q_heads, kv_heads, args.head_dim)
    run, placed = context.compiled(args.strategy, context.arrays_of(workload), args.direction)
    for _ in range(3):
        jax.block_until_ready(run(*placed))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            results: Any = [run(*placed) for _ in range(2)]
            jax.block_until_ready(results)
        events = read(Path(folder))
    if not events:
        print("The profiler saw no GPU.")
        return 1
    device = jax.devices()[0].device_kind
    for gpu in sorted({event.gpu for event in events}):
        x = summary(events, gpu)
        print(
            f"GPU {gpu}: {x.total / 1e3:.2f} ms, {x.idle / 1e3:.2f} without an attention kernel; "
            f"exchanges {x.exchanged / 1e3:.2f} ms, {x.hidden / 1e3:.2f} beside one"
        )
    title = f"{jax.device_count()} x {device}, T = {length}, {args.strategy}, {args.direction}"
    draw(events, title, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
