"""``python -m benchmarks.gpu``: attention on a GPU, jax_fa and its peers in turns in one run.

Prints a Markdown table with TFLOP/s and the share of a large matrix product measured in the same
run, and whether the goals are met; writes all samples (gpu.json) and draws speed and memory over
the sequence length (gpu.png). Inputs are 64 MB each at 16384 tokens, more than the L2 cache of an
H200 holds (60 MB): it is not flushed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import figures, implementations, report, workloads
from benchmarks.report import SUBJECT, Record
from benchmarks.timing import GPU_PROTOCOL, Protocol, interleaved
from benchmarks.workloads import Direction, Workload

PEER = "cudnn"
"""The peer that goals are about."""
PALLAS = "pallas"
ANY_ORDER = "jax_fa any order"
"""jax_fa without ``deterministic``."""
PEERS = (PEER, PALLAS, ANY_ORDER)
_MATMUL_SIZE = 8192
_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "forward+backward")

_FA4_RATIOS: dict[tuple[str, Direction], float] = {
    ("gqa_causal_8192", "forward"): 625 / 504,
    ("gqa_causal_8192", "forward+backward"): 542 / 459,
    ("gqa_full_8192", "forward"): 643 / 583,
    ("gqa_full_8192", "forward+backward"): 600 / 509,
    ("window1k_causal_16384", "forward"): 465 / 371,
    ("window1k_causal_16384", "forward+backward"): 428 / 335,
    ("d96_full_8192", "forward"): 588 / 444,
    ("d96_full_8192", "forward+backward"): 544 / 408,
    ("d96_full_2048", "forward"): 505 / 415,
    ("d96_full_2048", "forward+backward"): 488 / 363,
    ("d96_causal_8192", "forward"): 581 / 377,
    ("d96_causal_8192", "forward+backward"): 528 / 366,
    ("d96_causal_2048", "forward"): 417 / 322,
    ("d96_causal_2048", "forward+backward"): 405 / 280,
    ("d256_full_8192", "forward"): 710 / 599,
    ("d256_full_8192", "forward+backward"): 410 / 389,
    ("d256_full_2048", "forward"): 650 / 557,
    ("d256_full_2048", "forward+backward"): 375 / 367,
    ("d256_causal_8192", "forward"): 696 / 516,
    ("d256_causal_8192", "forward+backward"): 401 / 405,
    ("d256_causal_2048", "forward"): 541 / 431,
    ("d256_causal_2048", "forward+backward"): 331 / 307,
}
"""FlashAttention-4 (4.0.0b36) over cuDNN, TFLOP/s of one H200 run of 2026-11-22, where the stored
results of that run have none."""
_LEADS: dict[Direction, float] = {"forward": 1.02, "forward+backward": 1.03}
"""How much faster than FlashAttention-4 each point should be, by the speed of both over cuDNN."""

# (head size, direction) -> least geometric mean of the speed relative to the peer, over lengths
# from 1024, causal and full.
_GOALS: dict[tuple[int, Direction], float] = {
    (128, "forward"): 1.25,
    (128, "forward+backward"): 1.27,
    (64, "forward"): 1.22,
    (64, "forward+backward"): 1.34,
}
_SHARE_OF_MATMUL_GOAL = 0.88
_DETERMINISTIC_GOAL = 1.12
_GROUPED_GOAL = 0.97


def matmul_flops_per_second(protocol: Protocol) -> float:
    """Rate of a square bfloat16 matrix product of random numbers."""
    a, b = (
        jax.random.normal(key, (_MATMUL_SIZE, _MATMUL_SIZE), jnp.bfloat16)
        for key in jax.random.split(jax.random.key(0))
    )
    product = jax.jit(jnp.matmul)
    taken = interleaved({"matmul": lambda: product(a, b)}, protocol)["matmul"]
    return 2 * _MATMUL_SIZE**3 / taken.median


def _runners(
    workload: Workload, dtype: str, direction: Direction
) -> dict[str, implementations.Program]:
    """jax_fa and the peers that take ``workload``."""
    made = {SUBJECT: implementations.jax_fa_runner(workload, dtype, direction)}
    if workload.is_deterministic:
        any_order = replace(workload, is_deterministic=False)
        made[ANY_ORDER] = implementations.jax_fa_runner(any_order, dtype, direction)
    elif workload.num_documents == 1 and workload.value_dim is None:
        made[PEER] = implementations.CUDNN(workload, dtype, direction)
        if workload.window is None:
            try:
                made[PALLAS] = implementations.pallas_runner(workload, dtype, direction)
            except (ValueError, NotImplementedError, ImportError) as error:
                reason = str(error).partition("\n")[0]
                print(f"{PALLAS} does not take {workload.name}: {reason}", file=sys.stderr)
    return made


def measure(
    workload: Workload, dtype: str, direction: Direction, protocol: Protocol
) -> list[Record]:
    """Runs jax_fa and its peers in turns."""
    runners = _runners(workload, dtype, direction)
    taken = interleaved(runners, protocol)
    return [
        Record(workload, dtype, direction, name, taken[name], runner.temporary_bytes)
        for name, runner in runners.items()
    ]


def speedup(group: dict[str, Record], peer: str = PEER) -> float:
    """Speed of jax_fa relative to a peer."""
    return group[SUBJECT].samples.speedup_over(group[peer].samples)


def table(records: Iterable[Record], matmul: float) -> str:
    """One row per workload and direction."""
    heading = ["workload", "direction", f"{SUBJECT} ms", "TFLOP/s", "% of matmul"]
    heading += [text for peer in PEERS for text in (f"{peer} TFLOP/s", "ratio")]
    rows = [heading, ["---"] * 2 + ["---:"] * (len(heading) - 2)]
    for group in report.compared(records):
        ours = group[SUBJECT]
        rate = 1e9 * ours.gflops_per_second
        row = [ours.workload.name, ours.direction, f"{1e3 * ours.samples.median:.3f}"]
        row += [f"{rate / 1e12:.0f}", f"{100 * rate / matmul:.0f}"]
        for peer in PEERS:
            there = group.get(peer)
            row += (
                [f"{there.gflops_per_second / 1e3:.0f}", f"{speedup(group, peer):.2f}"]
                if there
                else ["", ""]
            )
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def goals(records: Sequence[Record], matmul: float) -> list[str]:
    """One line per goal whose workloads were measured."""
    groups = [g for g in report.compared(records) if g[SUBJECT].workload in workloads.GPU]
    lines = []
    for (head_dim, direction), least_mean in _GOALS.items():
        ratios = {
            g[SUBJECT].workload.name: speedup(g)
            for g in groups
            if g[SUBJECT].direction == direction
            and g[SUBJECT].workload.head_dim == head_dim
            and g[SUBJECT].workload.q_len >= 1024
        }
        if not ratios:
            continue
        mean = statistics.geometric_mean(ratios.values())
        verdict = "met" if mean >= least_mean else "MISSED"
        lines.append(
            f"{verdict}: D = {head_dim}, {direction}: {mean:.3f} times {PEER} in the geometric "
            f"mean of {len(ratios)} points (goal {least_mean})"
        )
    for group in groups:
        ours = group[SUBJECT]
        w = ours.workload
        if ours.direction == "forward" and (w.head_dim, w.q_len) == (128, 16384):
            share = 1e9 * ours.gflops_per_second / matmul
            verdict = "met" if share >= _SHARE_OF_MATMUL_GOAL else "MISSED"
            lines.append(f"{verdict}: {w.name}: {share:.2f} of matmul ({_SHARE_OF_MATMUL_GOAL})")
    return lines + _leads_over_fa4(records) + _relative_costs(records)


def _fa4_ratios() -> dict[tuple[str, Direction], float]:
    """The recorded speed of FlashAttention-4 over the peer, by workload and direction."""
    rates: dict[tuple[str, Direction], dict[str, float]] = {}
    (content,), _ = figures.load(figures.RESULTS, figures.FIGURES["h200_fa4.svg"])
    for record in content["records"]:
        point = rates.setdefault((record["workload"]["name"], record["direction"]), {})
        point[record["implementation"]] = record["gflops_per_second"]
    return _FA4_RATIOS | {key: rate["fa4"] / rate[PEER] for key, rate in rates.items()}


def _leads_over_fa4(records: Sequence[Record]) -> list[str]:
    """One line per point at which FlashAttention-4 was measured beside the peer, another day."""
    recorded, lines = _fa4_ratios(), []
    for group in report.compared(records):
        ours = group[SUBJECT]
        there = recorded.get((ours.workload.name, ours.direction))
        if there is None or ours.direction not in _LEADS or PEER not in group:
            continue
        ratio, goal = speedup(group), _LEADS[ours.direction]
        verdict = "met" if ratio / there >= goal else "MISSED"
        lines.append(
            f"{verdict}: {ours.workload.name}, {ours.direction}: {ratio:.2f} times {PEER}, "
            f"{ratio / there:.3f} of FlashAttention-4's lead (goal {goal})"
        )
    return lines


def _relative_costs(records: Sequence[Record]) -> list[str]:
    """The cost of determinism, grouping, windows and packing."""
    lines = []
    ours = {(r.workload.name, r.direction): r for r in records if r.implementation == SUBJECT}
    for group in report.compared(records):
        record = group[SUBJECT]
        workload, direction = record.workload, record.direction
        if ANY_ORDER in group:
            cost = 1 / speedup(group, ANY_ORDER)
            verdict = "met" if cost <= _DETERMINISTIC_GOAL else "MISSED"
            lines.append(
                f"{verdict}: {workload.name}, {direction}: {cost:.2f} of the time without "
                f"determinism ({_DETERMINISTIC_GOAL})"
            )
        alike = ours.get((workload.name.replace("gqa", "mha"), direction))
        if workload.name.startswith("gqa") and alike:
            ratio = alike.samples.median / record.samples.median
            verdict = "met" if ratio >= _GROUPED_GOAL else "MISSED"
            lines.append(
                f"{verdict}: {workload.name}, {direction}: {ratio:.3f} times as fast as with as "
                f"many key/value heads ({_GROUPED_GOAL})"
            )
        dense = ours.get((f"d128_causal_{workload.q_len}", direction))
        if (workload.window or workload.num_documents > 1) and dense:
            sequences = dense.workload.batch / workload.batch
            time = record.samples.median / dense.samples.median * sequences
            pairs = workload.visible_pairs() / dense.workload.visible_pairs()
            lines.append(
                f"{workload.name}, {direction}: {100 * time:.1f} % of the time without, for "
                f"{100 * pairs:.1f} % of the visible pairs"
            )
    return lines


def machine() -> dict[str, str]:
    """The GPU, its driver and the clocks at this moment."""
    fields = "name,driver_version,clocks.sm,clocks.mem,power.draw"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {"gpu": done.stdout.strip() or "nvidia-smi gave nothing"}


def _selected(args: argparse.Namespace) -> list[Workload]:
    every = (
        *workloads.GPU,
        *workloads.GPU_SIZES,
        *workloads.GPU_GROUPED,
        *workloads.GPU_WINDOWED,
        *workloads.GPU_PACKED,
        *workloads.GPU_SHORT,
        *workloads.GPU_DECODE,
        *workloads.GPU_DETERMINISTIC,
    )
    return [w for w in every if w.name.startswith(tuple(args.only) or "")]


def _directions(workload: Workload, asked: Sequence[Direction]) -> list[Direction]:
    """The forward is deterministic anyway; nobody differentiates decoding."""
    if workload in workloads.GPU_DECODE:
        return [d for d in asked if d == "forward"]
    return [d for d in asked if not (workload.is_deterministic and d == "forward")]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns the exit status, 1 if a goal was missed."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="PREFIX", help="of workloads")
    parser.add_argument("--directions", nargs="+", choices=_DIRECTIONS, default=list(_DIRECTIONS))
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=GPU_PROTOCOL.rounds)
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), metavar="DIR")
    args = parser.parse_args(argv)
    protocol = replace(GPU_PROTOCOL, rounds=args.rounds)
    about: dict[str, Any] = {**machine(), **report.about("jax")}
    matmul = matmul_flops_per_second(protocol)
    about[figures.MATMUL] = [round(matmul / 1e12)]
    print("\n".join(f"{name}: {value}" for name, value in about.items()), flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    written = args.output / "gpu.json"
    records: list[Record] = []
    for workload in _selected(args):
        for direction in _directions(workload, args.directions):
            taken = measure(workload, args.dtype, direction, protocol)
            records += taken
            print(table(taken, matmul).splitlines()[-1], file=sys.stderr, flush=True)
            report.write_json(records, about, written)  # A run that is cut off loses one point.
    about["after the run"] = machine()["gpu"]
    content = report.write_json(records, about, written)
    lines = [*goals(records, matmul), *figures.draw([content], args.output / "gpu.png")]
    print(f"\n{table(records, matmul)}\n", *lines, f"Written to {args.output}.", sep="\n")
    return int(any(line.startswith("MISSED") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
