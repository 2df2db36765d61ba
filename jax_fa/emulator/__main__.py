"""`python -m jax_fa.emulator FILE.ptx --launch launch.json`: runs a launch, prints counters."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from jax_fa.emulator import EmulationError, Launch, Memory, Options, emulate
from jax_fa.emulator.machine import COMPLETIONS


def load_memory(description: list[dict], folder: Path) -> Memory:
    """Registers the buffers a launch file lists.

    Args:
      description: entries with "name", "address" and either "file" (an .npy file or raw bytes,
        relative to `folder`) or "bytes" (zeros).
      folder: of the launch file.
    """
    memory = Memory()
    for entry in description:
        if "file" in entry:
            path = folder / entry["file"]
            data = np.load(path) if path.suffix == ".npy" else np.fromfile(path, np.uint8)
        else:
            data = np.zeros(int(entry["bytes"]), np.uint8)
        memory.add(entry["name"], np.ascontiguousarray(data), int(entry["address"]))
    return memory


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status: 1 for a fault of the program."""
    parser = argparse.ArgumentParser(prog="python -m jax_fa.emulator", description=__doc__)
    parser.add_argument("ptx", type=Path)
    parser.add_argument(
        "--launch",
        type=Path,
        required=True,
        help='JSON of Launch.to_json; may also list "buffers", each with name, '
        "address and file or bytes",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the scheduler")
    parser.add_argument(
        "--completion",
        choices=COMPLETIONS,
        default="random",
        help="when asynchronous operations complete",
    )
    parser.add_argument(
        "--strict-ld", action="store_true", help="tcgen05.ld results need tcgen05.wait::ld"
    )
    parsed = parser.parse_args(arguments)
    text = parsed.launch.read_text()
    memory = load_memory(json.loads(text).get("buffers", []), parsed.launch.parent)
    options = Options(completion=parsed.completion, strict_ld=parsed.strict_ld)
    try:
        report = emulate(
            parsed.ptx.read_text(),
            Launch.from_json(text),
            memory,
            seed=parsed.seed,
            options=options,
        )
    except EmulationError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write(f"{report}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
