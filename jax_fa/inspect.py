"""What was compiled: ``python -m jax_fa.inspect DIR``, DIR holding what ``jax_fa.aot`` wrote.

Prints registers per thread, bytes of stack, of shared memory (all launches of the variant) and of
code of every kernel, and, with ``--sass``, how many instructions of each interesting kind its
machine code has (needs nvidia-cuda-nvdisasm). Exits with status 1 if a kernel uses stack memory,
which is where spilled registers live.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jax_fa import aot_cubin

NVDISASM_REQUIREMENT = "nvidia-cuda-nvdisasm"

AUDIT = {
    "mma": r"[HQIUB]G?MMA|UTC[A-Z]*MMA",
    "tma": r"UTMA(LDG|STG|REDG)",
    "exp2": r"MUFU\.EX2",
    "fma": r"FFMA2?",
    "cvt": r"F2FP?",
    "shuffle": r"SHFL",
    "barrier": r"BAR|SYNCS",
    "local": r"LDL|STL",
}
"""Kinds of instructions, as regular expressions over opcodes; ``local`` is spilling."""

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_.]*)", re.M)


def find_nvdisasm() -> Path | None:
    """NVIDIA's disassembler: on the PATH, or in the wheel of that name."""
    on_path = shutil.which("nvdisasm")
    if on_path:
        return Path(on_path)
    try:
        files = importlib.metadata.files(NVDISASM_REQUIREMENT) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(file.locate()) for file in files if file.name == "nvdisasm"), None)


def opcodes(path: Path, nvdisasm: Path) -> Counter[str]:
    """Opcode, modifiers included -> how often the machine code in an object has it."""
    counts: Counter[str] = Counter()
    for image in aot_cubin.cubins(path):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(image)
            cubin.flush()
            done = subprocess.run(
                [nvdisasm, "-c", cubin.name], capture_output=True, text=True, check=True
            )
        counts.update(_INSTRUCTION.findall(done.stdout))
    return counts


def audit(counts: Counter[str]) -> dict[str, int]:
    """Number of instructions of each kind of ``AUDIT``, and of all."""
    kinds = {
        kind: sum(n for opcode, n in counts.items() if re.match(rf"({pattern})(\.|$)", opcode))
        for kind, pattern in AUDIT.items()
    }
    return {**kinds, "all": counts.total()}


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows of cells as aligned columns; the first row is the heading."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(map(str.rjust, row[1:], widths[1:]))])
        for row in cells
    )


def _dynamic_shared_bytes(folder: Path) -> dict[str, list[int]]:
    """Variant -> dynamic shared memory of its launches, as the report has it."""
    report = folder / "report.json"
    if not report.exists():
        return {}
    records = json.loads(report.read_text())["variants"]
    return {record["name"]: record["dynamic_shared_bytes"] for record in records}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_fa.inspect", description=__doc__.split("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="output folder of python -m jax_fa.aot")
    parser.add_argument("--sass", action="store_true", help="count instructions by kind")
    options = parser.parse_args(arguments)
    objects = sorted(options.folder.glob("*.o"))
    if not objects:
        parser.error(f"{options.folder} holds no objects; python -m jax_fa.aot writes them")
    nvdisasm = find_nvdisasm() if options.sass else None
    if options.sass and nvdisasm is None:
        parser.error(f"--sass needs a disassembler: pip install {NVDISASM_REQUIREMENT}")

    kinds = [*AUDIT, "all"] if nvdisasm else []
    rows: list[list[object]] = [["variant", "registers", "stack", "shared", "code", *kinds]]
    spilling = []
    dynamic = _dynamic_shared_bytes(options.folder)
    for path in objects:
        counts = audit(opcodes(path, nvdisasm)) if nvdisasm else {}
        shared = "/".join(map(str, dynamic.get(path.stem, ["?"])))
        for kernel in aot_cubin.kernels(path):
            row = [path.stem, kernel.registers, kernel.stack_bytes, shared, kernel.code_bytes]
            rows.append([*row, *(counts[kind] for kind in kinds)])
            if kernel.stack_bytes:
                spilling.append(path.stem)
    print(table(rows))  # noqa: T201
    if spilling:
        print(f"stack memory is used by: {', '.join(spilling)}")  # noqa: T201
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
