"""``python -m benchmarks.context``: one device against all of them on the same long sequences.

Causal self-attention in bfloat16, forward and with its gradient; candidates take turns in one run.
Prints a Markdown table: milliseconds, how many times as fast as one device, and the bytes that the
compiled program of one device holds beside its operands and results. Writes all samples as JSON.

Options of XLA come from the environment, and are printed::

    XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true python -m benchmarks.context
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa
from benchmarks.timing import Protocol, Samples, interleaved
from benchmarks.workloads import DIRECTIONS, Direction, Workload
from jax_fa.runtime import context
from jax_fa.runtime.strategies import Strategy

ALONE = "one device"
STRATEGIES = ("all_gather", "all_to_all", "ring")
_AXIS = "context"
# Several calls a sample, so that it holds the time of the devices, not that of a call's start.
_PROTOCOL = Protocol(warmup=2, rounds=8, calls=4, seconds=60.0)


@dataclasses.dataclass(frozen=True)
class Row:
    """One candidate on one workload.

    Attributes:
        workload: what was run, on all devices together.
        direction: forward, or forward and backward.
        candidate: ``ALONE`` or a strategy.
        devices: how many of them.
        samples: seconds, taken in turns with the other candidates.
        temporary_bytes: what one device's program holds beside operands and results.
    """

    workload: Workload
    direction: Direction
    candidate: str
    devices: int
    samples: Samples
    temporary_bytes: int


def _work(attend: Callable[..., jax.Array], direction: Direction) -> Callable[..., Any]:
    if direction == "forward":
        return attend

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        out, pullback = jax.vjp(attend, q, k, v)
        return out, pullback(out)

    return both


def arrays_of(workload: Workload) -> list[jax.Array]:
    """Query, key and value, random."""
    shapes = [workload.shapes()[name] for name in "qkv"]
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]


def compiled(
    candidate: str, arrays: Sequence[jax.Array], direction: Direction
) -> tuple[Any, list[jax.Array]]:
    """The program of a candidate, and its operands where it wants them."""
    mesh = Mesh(np.array(jax.devices()), (_AXIS,))
    attend: Any = partial(jax_fa.attention, is_causal=True)
    where: Any = jax.devices()[0]
    if candidate != ALONE:
        spec, how = P(None, _AXIS), cast(Strategy, candidate)
        attend = jax.shard_map(
            partial(jax_fa.parallel.attention, is_causal=True, strategy=how),
            mesh=mesh,
            in_specs=(spec,) * 3,
            out_specs=spec,
        )
        where = NamedSharding(mesh, spec)
    placed = [jax.device_put(x, where) for x in arrays]
    return jax.jit(_work(attend, direction)).lower(*placed).compile(), placed


def measure(
    workload: Workload, direction: Direction, strategies: Sequence[str], protocol: Protocol
) -> list[Row]:
    """One device and the strategies, in turns."""
    arrays = arrays_of(workload)
    programs = {name: compiled(name, arrays, direction) for name in (ALONE, *strategies)}
    runners = {name: partial(run, *placed) for name, (run, placed) in programs.items()}
    taken = interleaved(runners, protocol)
    return [
        Row(
            workload,
            direction,
            name,
            1 if name == ALONE else jax.device_count(),
            samples,
            programs[name][0].memory_analysis().temp_size_in_bytes,
        )
        for name, samples in taken.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """A line per candidate."""
    lines = [
        "| T | direction | | ms | times one device | TFLOP/s a device | temporary MiB |",
        "| ---: | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    alone = {(x.workload, x.direction): x.samples for x in rows if x.candidate == ALONE}
    for row in rows:
        ratio = row.samples.speedup_over(alone[row.workload, row.direction])
        rate = row.workload.flops(row.direction) / row.samples.median / row.devices / 1e12
        lines.append(
            f"| {row.workload.q_len} | {row.direction} | {row.candidate} | "
            f"{1e3 * row.samples.median:.2f} | {ratio:.3f} | {rate:.0f} | "
            f"{row.temporary_bytes / 2**20:.0f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table and writes the samples."""
    parser = argparse.ArgumentParser("python -m benchmarks.context", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 131072])
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("N", "K"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--head-chunks", type=int, default=context.HEAD_CHUNKS)
    parser.add_argument("--rounds", type=int, default=_PROTOCOL.rounds)
    parser.add_argument("--output", type=Path, default=Path("context.json"))
    args = parser.parse_args(argv)
    q_heads, kv_heads = args.heads
    context.HEAD_CHUNKS = args.head_chunks
    device = jax.devices()[0]
    flags = os.environ.get("XLA_FLAGS", "")
    print(
        f"{jax.device_count()} x {device.device_kind}, jax {jax.__version__}, XLA_FLAGS={flags}\n"
    )
    protocol = dataclasses.replace(_PROTOCOL, rounds=args.rounds)
    rows = [
        row
        for length in args.lengths
        for direction in DIRECTIONS
        for row in measure(
            Workload(f"1x{length}", 1, length, length, q_heads, kv_heads, args.head_dim),
            direction,
            args.strategies,
            protocol,
        )
    ]
    print(table(rows))
    run = {"flags": flags, "device": device.device_kind, "jax": jax.__version__}
    samples = [dataclasses.asdict(row) for row in rows]
    args.output.write_text(json.dumps({**run, "rows": samples}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
