"""What was compiled, and what a GPU allows it: ``python -m jax_fa.inspect [DIR]``.

DIR holds what ``jax_fa.aot`` wrote. Of every variant there: registers, stack (where spilled
registers live), shared and tensor memory; machine code counted by meaning, with a verdict in plain
words; the softmax of a 128 x 128 tile as the machine code has it; bank conflicts; whether the PTX
has the waits and fences that tensor memory needs; and beside all that a *model*, marked as such:
cycles of the units of an SM, the bound, arithmetic intensity.
Without DIR, the model alone, of everything that can be compiled.

Exits with status 1 if a variant spills or fails its verdict. Reading machine code needs
nvidia-cuda-nvdisasm; ``--no-sass`` does without.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import itertools
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jax_fa import aot_audit, aot_sass, roofline
from jax_fa.aot_audit import Lengths, Model, Report
from jax_fa.kernels import banks
from jax_fa.variants import BY_NAME, VARIANTS, Variant

_UNITS = roofline.Cycles._fields
_ALWAYS_SHOWN = ("local memory", "all")


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows of cells as aligned columns; the first row is the heading."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(map(str.rjust, row[1:], widths[1:]))])
        for row in cells
    )


def resource_table(reports: Iterable[Report]) -> str:
    """Registers at launch and by role, memory, code."""
    rows: list[list[object]] = [
        ["variant", "registers", "by role", "stack", "shared", "tensor columns", "code", "banks"]
    ]
    for report in reports:
        columns, allocated = report.tmem_columns
        rows.append(
            [
                report.name,
                _joined(report.launch_registers),
                _joined(dict.fromkeys(report.role_registers.values())) or "?",
                report.stack_bytes,
                _joined(report.shared_bytes) or "?",
                f"{columns} of {allocated}" if allocated else "none",
                report.code_bytes,
                _banks(report),
            ]
        )
    return table(rows)


def _banks(report: Report) -> str:
    if not report.accesses:
        return "?"
    return "conflicts" if report.bank_conflicts else f"{report.accesses} kinds free"


def _joined(values: Iterable[object]) -> str:
    return "/".join(map(str, values))


def model_table(models: Iterable[tuple[str, Model]]) -> str:
    """Cycles of a tile, bound and roofs of variants."""
    rows: list[list[object]] = [
        [
            "variant",
            "GPU",
            *_UNITS,
            "(fill)",
            "bound",
            "cap",
            "FLOP/byte",
            "by CTA",
            "ridge",
            "TFLOP/s",
        ]
    ]
    for name, model in models:
        rows.append(
            [
                name,
                model.gpu,
                *(f"{model.cycles[unit]:.0f}" for unit in _UNITS),
                f"{model.fill_cycles:.0f}",
                model.bound,
                f"{model.efficiency:.0%}",
                f"{model.intensity:.0f}",
                f"{model.cta_intensity:.0f}",
                f"{model.ridge:.0f}",
                f"{model.tflops:.0f}",
            ]
        )
    return table(rows)


def code_table(reports: Sequence[Report]) -> str:
    """Instructions by meaning; meanings that no variant has are left out."""
    meanings = [
        meaning
        for meaning in [*aot_sass.MEANINGS, "all"]
        if meaning in _ALWAYS_SHOWN or any((report.counts or {}).get(meaning) for report in reports)
    ]
    heading: Sequence[object] = ["variant", *meanings]
    rows = [heading]
    for report in reports:
        counts = report.counts or {}
        rows.append([report.name, *(counts.get(meaning, 0) for meaning in meanings)])
    is_tall = len(reports) > len(meanings)
    return table(rows if is_tall else list(zip(*rows, strict=True)))


def softmax_table(reports: Iterable[Report]) -> str:
    """The softmax of a tile: counted, and next to it FlashAttention-4's."""
    heading = "variant|warp instr.|a score|other loops|exp2|packed|scalar|max|convert|polynomials"
    heading += "|special cycles|issue cycles|FA4 instr.|FA4 special|FA4 issue"
    rows: list[Sequence[object]] = [heading.split("|")]
    for report in reports:
        found = report.softmax
        if found is None:
            continue
        rows.append(
            [
                report.name,
                f"{found.instructions:.0f}",
                f"{found.instructions * banks.WARP / roofline.SCORES:.2f}",
                _joined(sorted({round(other) for other in found.other_loops})) or "-",
                *(
                    f"{found.by_meaning.get(meaning, 0):.0f}"
                    for meaning in ("exp2", "packed f32", "scalar f32", "max", "convert")
                ),
                f"{found.polynomials:.1%}",
                f"{found.special_cycles:.0f}",
                f"{found.issue_cycles:.0f}",
                *flash_attention_4(BY_NAME[report.name]),
            ]
        )
    return table(rows)


def issue_table(reports: Iterable[Report]) -> str:
    """Instructions between products, and the cycles of the tensor core for the smallest of them."""
    rows: list[Sequence[object]] = [["variant", "by loop", "most", "cycles of the smallest"]]
    for report in reports:
        if not report.mma_spacing:
            continue
        variant = BY_NAME[report.name]
        gpu = roofline.gpu_of(variant.arch)
        rows.append(
            [
                report.name,
                _joined(sorted({round(spacing) for spacing in report.mma_spacing})),
                f"{max(report.mma_spacing):.0f}",
                f"{aot_audit.smallest_product_cycles(variant, gpu):.0f}",
            ]
        )
    return table(rows)


def flash_attention_4(variant: Variant) -> tuple[str, str, str]:
    """Warp instructions, special and issue cycles of FlashAttention-4 for the same, or dashes."""
    heads = (variant.key.head_dim, variant.key.value_dim)
    counted = aot_audit.FLASH_ATTENTION_4.get((heads, variant.key.mask))
    if variant.operation != "fwd" or variant.arch != "sm100" or counted is None:
        return "-", "-", "-"
    instructions, exponentials = counted
    special = exponentials * banks.WARP / roofline.gpu_of(variant.arch).exponentials
    issue = instructions * banks.WARP / roofline.LANES
    return f"{instructions}", f"{special:.0f}", f"{issue:.0f}"


def bank_table(variants: Iterable[Variant]) -> str:
    """Passes of each kind of access to shared memory, with and without the swizzle."""
    rows: list[list[object]] = [["access", "instruction", "fewest", "passes", "without swizzle"]]
    seen = set()
    for variant in variants:
        for access in banks.accesses(variant.key, aot_audit.choose_config(variant)):
            size = "words" if access.tile is None else f"{access.tile.width}-byte rows"
            row = [f"{access.who}, {size}", access.instruction, access.fewest, access.passes()]
            row.append(access.passes(swizzle=False))
            if tuple(row) not in seen:
                seen.add(tuple(row))
                rows.append(row)
    return table(rows)


_MARKERS = "os^vD<>pP*hXd"


def plot(models: Sequence[tuple[str, Model]], path: Path) -> None:
    """Draws the roofs of the GPUs in ``models``, and where each variant is under them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), layout="constrained")
    axes = figure.subplots()
    gpus = {gpu.name: gpu for gpu in roofline.GPUS}
    used = list(dict.fromkeys(model.gpu for _, model in models))
    widest = max([4 * gpus[name].ridge for name in used] + [m.intensity * 2 for _, m in models])
    lowest = min([gpus[name].ridge / 8 for name in used] + [m.intensity / 2 for _, m in models])
    for number, name in enumerate(used):
        gpu, color = gpus[name], f"C{number}"
        corners = [lowest, gpu.ridge, widest]
        roof = [min(gpu.peak_flops, gpu.hbm_bytes * x) / 1e12 for x in corners]
        axes.plot(corners, roof, color=color, label=f"{name}, published rates")
        groups: dict[tuple[int, str], list[tuple[str, float]]] = {}
        for title, model in models:
            if model.gpu == name:
                group = groups.setdefault((round(model.tflops), model.bound), [])
                group.append((title, model.intensity))
        for marker, ((tflops, bound), group) in zip(
            itertools.cycle(_MARKERS), groups.items(), strict=False
        ):
            titles = ", ".join(dict.fromkeys(_short(title) for title, _ in group))
            label = textwrap.fill(f"{tflops} TFLOP/s by {bound} (model): {titles}", 60)
            points = [intensity for _, intensity in group]
            axes.scatter(points, [tflops] * len(points), color=color, marker=marker, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte of memory")
    axes.set_ylabel("TFLOP/s")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=7)
    figure.savefig(path, dpi=120)


def _short(name: str) -> str:
    """A variant's name without architecture and element type."""
    operation, _, _, *rest = name.split("_")
    return " ".join([operation, *rest])


def _gpus_for(variant: Variant, wanted: Sequence[str]) -> list[roofline.Gpu]:
    """The GPUs of a variant's architecture that were asked for, else the first."""
    own = [gpu for gpu in roofline.GPUS if gpu.arch == variant.arch and gpu.name in wanted]
    return own or [roofline.gpu_of(variant.arch)]


def _dynamic_shared_bytes(folder: Path) -> dict[str, list[int]]:
    """Variant -> dynamic shared memory of its launches, as the report has it."""
    report = folder / "report.json"
    if not report.exists():
        return {}
    records = json.loads(report.read_text())["variants"]
    return {record["name"]: record["dynamic_shared_bytes"] for record in records}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_fa.inspect", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", help="output folder of python -m jax_fa.aot"
    )
    parser.add_argument("--variants", default="*", metavar="GLOB", help="only these")
    parser.add_argument("--no-sass", action="store_true", help="do not read machine code")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parallel readers")
    parser.add_argument("--banks", action="store_true", help="list accesses to shared memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the roofline there")
    names = [gpu.name for gpu in roofline.GPUS]
    parser.add_argument(
        "--gpu", nargs="+", choices=names, default=[], help="of those that a variant runs on"
    )
    for name, default in Lengths()._asdict().items():
        option = f"--{name.removeprefix('num_').replace('_', '-')}"
        parser.add_argument(option, dest=name, type=int, default=default, metavar="N")
    return parser


def _audited(options: argparse.Namespace, variants: Sequence[Variant]) -> list[Report]:
    """Reports of what ``options.folder`` holds of ``variants``, without the model."""
    nvdisasm = None if options.no_sass else aot_sass.find_nvdisasm()
    dynamic = _dynamic_shared_bytes(options.folder)

    def audited(variant: Variant) -> Report:
        path = options.folder / f"{variant.name}.o"
        report = aot_audit.resources(variant, path, dynamic.get(variant.name, ()))
        if nvdisasm is not None:
            aot_audit.audit_code(report, variant, aot_sass.disassemble(path, nvdisasm))
        aot_audit.audit_ptx(report, variant, path.with_suffix(".ptx.xz"))
        return report

    # Most of the time is the disassembler's, a process of its own.
    with ThreadPoolExecutor(options.jobs) as pool:
        return list(pool.map(audited, variants))


def _print_reports(reports: Sequence[Report]) -> None:
    print("\nResources: compiled, but for registers by role and tensor memory, which are planned")
    print(resource_table(reports))
    if any(report.counts for report in reports):
        print("\nMachine code: instructions of all kernels of a variant, by meaning")
        print(code_table(reports))
        print(
            "\nSoftmax of a tile of 128 x 128 scores: warp instructions of its loop, and what they"
            "\ntake at published rates. FA4: FlashAttention-4 4.0.0b36, counted likewise"
        )
        print(softmax_table(reports))
    if any(report.mma_spacing for report in reports):
        print(
            "\nProducts: instructions of a warp from one tcgen05.mma to the next, by loop around"
            "\nthem, and what the tensor core takes for the smallest one at the published rate"
        )
        print(issue_table(reports))
    print("\nVerdicts")
    for report in reports:
        print(f"{report.name}: {report.verdict}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    variants = [v for v in VARIANTS if fnmatch.fnmatchcase(v.name, options.variants)]
    reports: list[Report] = []
    if options.folder is not None:
        variants = [v for v in variants if (options.folder / f"{v.name}.o").exists()]
        if not options.no_sass and aot_sass.find_nvdisasm() is None:
            parser.error(
                f"reading machine code needs a disassembler: pip install "
                f"{aot_sass.NVDISASM_REQUIREMENT}, or --no-sass to do without"
            )
    if not variants:
        where = options.folder or "the list of variants"
        parser.error(f"{where} has no '{options.variants}'; python -m jax_fa.aot writes objects")
    if options.folder is not None:
        reports = _audited(options, variants)
    lengths = Lengths(*(getattr(options, name) for name in Lengths._fields))
    models = [
        (variant.name, aot_audit.model(variant, gpu, lengths))
        for variant in variants
        for gpu in _gpus_for(variant, options.gpu)
    ]
    print(
        "Model, computed from published rates: cycles of an SM for a 128 x 128 tile of scores "
        "(fill:\nmore of shared memory, for what TMA writes), and both roofs for batch "
        f"{lengths.batch}, {lengths.q_len} queries in\n{lengths.num_q_heads} heads, "
        f"{lengths.kv_len} keys in {lengths.num_kv_heads} heads"
    )
    print(model_table(models))
    for gpu in roofline.GPUS:
        if gpu.caveat and any(model.gpu == gpu.name for _, model in models):
            print(f"{gpu.name}: {gpu.caveat}")
    if reports:
        _print_reports(reports)
    if options.banks:
        print("\nShared memory: passes of each kind of access (model of 32 banks)")
        print(bank_table(variants))
    if options.json:
        _write_json(options.json, reports, models, lengths)
    if options.plot:
        plot(models, options.plot)
    return 1 if any(report.problems for report in reports) else 0


def _write_json(
    path: Path, reports: Sequence[Report], models: Sequence[tuple[str, Model]], lengths: Lengths
) -> None:
    """Writes all that was found out; what is a model is under that name."""
    by_name: dict[str, dict[str, Any]] = {
        report.name: {**dataclasses.asdict(report), "verdict": report.verdict} for report in reports
    }
    for name, model in models:
        by_name.setdefault(name, {"name": name})
        by_name[name].setdefault("models", []).append(dataclasses.asdict(model))
    content = {"lengths": lengths._asdict(), "variants": list(by_name.values())}
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
