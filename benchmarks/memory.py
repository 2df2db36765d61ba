"""Memory that an implementation needs above inputs and outputs, measured in a new process.

``python -m benchmarks.memory`` is that process; ``peak_bytes`` starts it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import math
import subprocess
import sys
from pathlib import Path

import jax

from benchmarks.implementations import RUNNERS
from benchmarks.workloads import Direction, Workload

_KIB = 1024


def peak_bytes(name: str, workload: Workload, dtype: str, direction: Direction) -> int | None:
    """Peak resident memory of one run above what was resident before it, without the results.

    The process has compiled and holds its inputs when counting starts, but has not run before: an
    allocator that keeps memory for later runs shows what it took.

    Returns:
        None if the process died, as it does when memory runs out.
    """
    question = json.dumps([name, dataclasses.asdict(workload), dtype, direction])
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", question],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    )
    return int(process.stdout) if process.returncode == 0 else None


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * _KIB
    raise OSError(f"/proc/self/status has no {field}; memory is measured on Linux only")


def _measure(name: str, workload: Workload, dtype: str, direction: Direction) -> int:
    run = RUNNERS[name](workload, dtype, direction)
    gc.collect()
    # Free memory that stays resident would hide as much of what the run takes.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    # Resets the peak (VmHWM) to the present: Linux, Documentation/filesystems/proc.rst.
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_bytes("VmRSS")
    jax.block_until_ready(run())
    peak = _resident_bytes("VmHWM")
    itemsize = 4 if dtype == "float32" else 2
    shapes = workload.shapes()
    results = ["q"] if direction == "forward" else ["q", "q", "k", "v"]
    size = sum(itemsize * math.prod(shapes[result]) for result in results)
    return max(peak - before - size, 0)


if __name__ == "__main__":
    name, fields, dtype, direction = json.loads(sys.argv[1])
    if fields["window"] is not None:
        fields["window"] = tuple(fields["window"])
    print(_measure(name, Workload(**fields), dtype, direction))
