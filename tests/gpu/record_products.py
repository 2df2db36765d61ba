"""Records products by mma.sync on the GPU at hand, any from compute capability 8.0 on.

    python tests/gpu/record_products.py FILE.npz
    python tests/gpu/record_products.py --compare FILE.npz

writes operands and results of m16n8k16, bfloat16 and float16, of every kind of data in
``hardware_units.DATA``, with the GPU's name; or compares such a file with the emulator, for which
no GPU is needed. Needs NumPy and ml_dtypes alone.
"""

from __future__ import annotations

import argparse
import ctypes
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from driver import Driver  # noqa: E402
from helpers import hardware_units  # noqa: E402

from jax_fa.emulator import Launch, Memory, emulate  # noqa: E402

TYPES = ("bf16", "f16")
PRODUCTS = 16
"""Of each kind of data."""


def record(path: Path) -> None:
    """Writes what the GPU computes."""
    driver, name = Driver(), ctypes.create_string_buffer(100)
    driver("cuDeviceGetName", name, 100, 0)
    found: dict[str, Any] = {"gpu": np.array(name.value.decode())}
    for type_ in TYPES:
        for kind in hardware_units.DATA:
            unit = hardware_units.mma(type_, kind, PRODUCTS)
            arrays = (*unit.arrays[:-1], driver.run(unit))
            found |= {f"{type_} {kind} {n}": x for n, x in zip("abcd", arrays, strict=True)}
    np.savez_compressed(path, **found)


def compare(path: Path) -> int:
    """Prints how many elements the emulator computes otherwise; returns that."""
    found, total = np.load(path), 0
    for type_ in TYPES:
        for kind in hardware_units.DATA:
            arrays = [found[f"{type_} {kind} {name}"] for name in "abcd"]
            got, memory = np.zeros_like(arrays[-1]), Memory()
            addresses = [memory.add(n, x) for n, x in zip("abcd", (*arrays[:-1], got), strict=True)]
            params = tuple(struct.pack("<Q", address) for address in addresses)
            unit = hardware_units.mma(type_, kind, PRODUCTS)
            emulate(unit.ptx, Launch((unit.grid, 1, 1), (unit.block, 1, 1), params), memory)
            wrong = int(np.count_nonzero(got != arrays[-1]))
            print(f"{found['gpu']}, {type_} {kind}: {wrong} of {got.size} differ")  # noqa: T201
            total += wrong
    return total


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--compare", action="store_true", help="a recorded file, with the emulator")
    options = parser.parse_args()
    if not options.compare:
        record(options.file)
    elif compare(options.file):
        sys.exit(1)


if __name__ == "__main__":
    main()
