"""``python -m benchmarks.sweep``: jax_fa and cuDNN in turns on random shapes, in search of a cliff.

Self-attention, cross-attention, decoding and a few appended queries; full, causal and windowed
masks; any head count and size. Shapes that cuDNN refuses are named and left out. Prints the worst
shapes, writes all samples (sweep.json) and draws the speed over cuDNN's by the time that a shape
takes (sweep.png). With ``--stored FILE`` it prints and draws what an earlier run wrote.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

import jax_fa
from benchmarks import figures, gpu, implementations, report, timing
from benchmarks.report import SUBJECT, Record
from benchmarks.workloads import DIRECTIONS, Direction, Workload
from jax_fa.analysis import drawing

KINDS = ("self", "cross", "decoding", "appended")
_HEAD_DIMS = (32, 64, 64, 72, 80, 96, 112, 128, 128, 128)
_HEADS = (1, 2, 4, 8, 12, 16, 16, 20, 32)
_TOKENS = 16384
"""Queries, or keys, of all sequences of a shape at most."""
_MOST_ELEMENTS = 2**26
"""Of an array."""
_THREADS, _BATCH = 12, 48
"""Threads that compile, and calls that they compile before these are timed: nothing runs beside."""
_SECONDS = 0.004
"""Of a sample, about: as many calls as take so long."""


def _length(source: random.Random, least: int, most: int) -> int:
    """A length, its logarithm uniform; half of them are multiples of 64."""
    length = round(math.exp(source.uniform(math.log(least), math.log(most))))
    return max(64, length // 64 * 64) if source.random() < 0.5 and length > 64 else length


def shape(source: random.Random, number: int) -> Workload:
    """A random shape, of a head size that cuDNN takes, too."""
    kind = KINDS[number // 2 % len(KINDS)] if number % 2 else "self"
    heads, head_dim = source.choice(_HEADS), source.choice(_HEAD_DIMS)
    kv_heads = source.choice([x for x in range(1, heads + 1) if heads % x == 0])
    kv_len = _length(source, 64, _TOKENS)
    q_len = {
        "self": kv_len,
        "cross": _length(source, 64, _TOKENS),
        "decoding": 1,
        "appended": source.randint(2, 64),
    }[kind]
    most = _MOST_ELEMENTS // (heads * head_dim)
    batch = source.randint(1, max(1, min(_TOKENS, most) // max(q_len, kv_len)))
    mask = source.choice(("full", "causal", "causal", "window")) if kind == "self" else "full"
    window = (_length(source, 64, kv_len + 64), 0) if mask == "window" else None
    name = f"{kind} {batch}x{q_len}x{kv_len} {heads}:{kv_heads} D{head_dim} {mask}"
    sizes = (batch, q_len, kv_len, heads, kv_heads, head_dim)
    return Workload(name, *sizes, is_causal=mask != "full", window=window)


class Compared(NamedTuple):
    """Both implementations of a shape, compiled; why there are none, if one does not take it."""

    workload: Workload
    direction: Direction
    programs: dict[str, implementations.Program]
    obstacle: str


def _inputs(workload: Workload) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        name: jax.random.normal(key, shape, "bfloat16")
        for key, (name, shape) in zip(keys, workload.shapes().items(), strict=True)
    }


def _compiled(workload: Workload, direction: Direction, inputs: dict[str, jax.Array]) -> Compared:
    """Compiles, and runs nothing: what is timed has the GPU to itself."""
    attentions: dict[str, Callable[..., Any]] = {
        SUBJECT: jax_fa.attention,
        gpu.PEER: partial(jax.nn.dot_product_attention, implementation="cudnn"),
    }
    programs = {}
    for name, attention in attentions.items():
        try:
            programs[name] = implementations.jax_runner(
                attention, workload, "bfloat16", direction, inputs
            )
        except Exception as error:  # noqa: BLE001 (whatever a peer raises says what it lacks)
            return Compared(workload, direction, {}, f"{name}: {str(error).splitlines()[0]}")
    return Compared(workload, direction, programs, "")


def _compiled_in_batches(workloads: Sequence[Workload]) -> Iterator[Compared]:
    """Everything to be timed, in order. While it is timed, nothing is compiled."""
    calls = [
        (workload, direction)
        for workload in workloads
        for direction in (DIRECTIONS[:1] if workload.q_len == 1 else DIRECTIONS)
    ]
    with ThreadPoolExecutor(_THREADS) as pool:
        for first in range(0, len(calls), _BATCH):
            batch = calls[first : first + _BATCH]
            compiled = [pool.submit(_compiled, *call, _inputs(call[0])) for call in batch]
            yield from [future.result() for future in compiled]


def measure(compared: Compared, rounds: int) -> list[Record]:
    """Runs both in turns."""
    probe = timing.interleaved(compared.programs, timing.Protocol(2, 1, calls=4))
    slowest = max(samples.median for samples in probe.values())
    calls = min(max(math.ceil(_SECONDS / slowest), 1), 100)
    taken = timing.interleaved(compared.programs, timing.Protocol(calls, rounds, calls=calls))
    workload, direction = compared.workload, compared.direction
    return [Record(workload, "bfloat16", direction, name, taken[name]) for name in taken]


def worst(records: Sequence[Record], least: float) -> list[str]:
    """A line for each direction, and one for each shape that is slower than ``least``."""
    groups = report.compared(records)
    lines = []
    for direction in DIRECTIONS:
        ratios = {
            group[SUBJECT].workload.name: gpu.speedup(group)
            for group in groups
            if group[SUBJECT].direction == direction
        }
        if not ratios:
            continue
        mean = statistics.geometric_mean(ratios.values())
        slower = sorted((ratio, name) for name, ratio in ratios.items() if ratio < least)
        lines.append(
            f"{direction}: {len(ratios)} shapes, {mean:.3f} times {gpu.PEER} in the geometric "
            f"mean, {len(slower)} below {least}"
        )
        lines += [f"  {ratio:.2f}  {name}" for ratio, name in slower]
    return lines


def draw(records: Sequence[Record], about: dict[str, Any], path: Path) -> list[str]:
    """Draws speed over cuDNN's by time, a panel for each direction; a line about it, or why not."""
    if reason := drawing.obstacle():
        return [reason]
    title = f"Speed relative to {figures.name_of(gpu.PEER)} on random shapes"
    source = f"{about['gpu'].partition(',')[0]}  ·  bfloat16  ·  {about['date']}"
    with drawing.picture(path, (7.5, 3.4), title, source) as figure:
        panels = figure.subplots(1, len(DIRECTIONS), sharey=True)
        for panel, direction in zip(panels, DIRECTIONS, strict=True):
            panel.set_title(direction)
            for kind, color in zip(KINDS, drawing.COLORS, strict=False):
                found = [
                    (1e3 * group[gpu.PEER].samples.median, gpu.speedup(group))
                    for group in report.compared(records)
                    if group[SUBJECT].direction == direction
                    and group[SUBJECT].workload.name.startswith(kind)
                ]
                if found:
                    panel.plot(*zip(*found, strict=True), "o", color=color, label=kind)
            panel.axhline(1.0, color=drawing.INK, linewidth=0.8)
            panel.set(xscale="log", yscale="log", xlabel=f"ms in {figures.name_of(gpu.PEER)}")
            panel.set(xticks=(0.1, 0.3, 1, 3), xticklabels=("0.1", "0.3", "1", "3"))
            panel.set(yticks=(0.8, 1, 1.5, 2), yticklabels=("0.8", "1", "1.5", "2"))
            panel.minorticks_off()
        panels[0].set_ylabel("times as fast")
        panels[0].legend(frameon=False)
    return [f"drawn: {path}"]


def stored(path: Path) -> tuple[list[Record], dict[str, Any]]:
    """Records that an earlier run wrote, and what they are about."""
    content = json.loads(path.read_text())
    records = []
    for x in content["records"]:
        window = x["workload"].pop("window")
        workload = Workload(**x["workload"], window=window and tuple(window))
        samples = timing.Samples(tuple(x["samples"]["seconds"]))
        records.append(Record(workload, x["dtype"], x["direction"], x["implementation"], samples))
    return records, content["machine"]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes and draws; returns the exit status, 1 if a shape is too slow."""
    parser = argparse.ArgumentParser("python -m benchmarks.sweep", description=__doc__)
    parser.add_argument("--shapes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--least", type=float, default=0.97, help="speed relative to cuDNN's")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), metavar="DIR")
    parser.add_argument("--stored", type=Path, metavar="FILE", help="of an earlier run")
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    if args.stored:
        records, about = stored(args.stored)
    else:
        records, about = _taken(args)
        report.write_json(records, about, args.output / "sweep.json")
    lines = worst(records, args.least)
    print(*lines, *draw(records, about, args.output / "sweep.png"), sep="\n")
    return int(any(line.startswith("  ") for line in lines))


def _taken(args: argparse.Namespace) -> tuple[list[Record], dict[str, Any]]:
    source = random.Random(args.seed)
    workloads = [shape(source, number) for number in range(args.shapes)]
    about: dict[str, Any] = {**gpu.machine(), **report.about("jax"), "seed": args.seed}
    records: list[Record] = []
    for number, compared in enumerate(_compiled_in_batches(workloads)):
        if compared.obstacle:
            print(f"{compared.workload.name}: {compared.obstacle}", file=sys.stderr)
            continue
        records += measure(compared, args.rounds)
        print(f"{number + 1}: {compared.workload.name}", file=sys.stderr, flush=True)
    return records, about


if __name__ == "__main__":
    sys.exit(main())
