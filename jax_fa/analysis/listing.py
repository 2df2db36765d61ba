"""Compiled kernels, and the limits that a GPU sets them: ``python -m jax_fa.analysis [DIR]``.

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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jax_fa.analysis import audit, banks, drawing, machine_code, roofline
from jax_fa.analysis.audit import Lengths, Model, Report
from jax_fa.spec import ptx_archives
from jax_fa.spec.arch import arch_named
from jax_fa.spec.variants import BY_NAME, VARIANTS, Variant

_UNITS = roofline.Cycles._fields
_ALWAYS_SHOWN = ("local memory", "all")
_OF_SOFTMAX = ("exp2", "packed f32", "scalar f32", "max", "convert", "to uniform")


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
        [
            *("variant", "registers", "by role", "stack", "shared", "CTAs by SM"),
            *("tensor columns", "code", "banks"),
        ]
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
                _ctas(report),
                f"{columns} of {allocated}" if allocated else "none",
                report.code_bytes,
                _banks(report),
            ]
        )
    return table(rows)


def _ctas(report: Report) -> str:
    """Where GPUs differ, with their capabilities."""
    found = {name: f"{x.ctas} ({x.bound})" for name, x in report.occupancy.items()}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return ", ".join(f"{name}: {text}" for name, text in found.items()) or "?"


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
        for meaning in [*machine_code.MEANINGS, "all"]
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
    heading = "variant|warp instr.|a score|other loops|exp2|packed|scalar|max|convert|to uniform"
    heading += "|polynomials|special cycles|issue cycles|FA4 instr.|FA4 special|FA4 issue"
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
                *(f"{found.by_meaning.get(meaning, 0):.0f}" for meaning in _OF_SOFTMAX),
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
                f"{audit.smallest_product_cycles(variant, gpu):.0f}",
            ]
        )
    return table(rows)


def flash_attention_4(variant: Variant) -> tuple[str, str, str]:
    """Warp instructions, special and issue cycles of FlashAttention-4 for the same, or dashes."""
    heads = (variant.key.head_dim, variant.key.value_dim)
    counted = audit.FLASH_ATTENTION_4.get((heads, variant.key.mask))
    is_same = audit.FLASH_ATTENTION_4_CAPABILITY in arch_named(variant.arch).capabilities
    if variant.operation != "fwd" or not is_same or counted is None:
        return "-", "-", "-"
    instructions, exponentials = counted
    special = exponentials * banks.WARP / roofline.gpu_of(variant.arch).rates.exponentials
    issue = instructions * banks.WARP / roofline.LANES
    return f"{instructions}", f"{special:.0f}", f"{issue:.0f}"


def bank_table(variants: Iterable[Variant]) -> str:
    """Passes of each kind of access to shared memory, with and without the swizzle."""
    rows: list[list[object]] = [["access", "instruction", "fewest", "passes", "without swizzle"]]
    seen = set()
    for variant in variants:
        for access in banks.accesses(variant.key, audit.choose_config(variant)):
            size = "words" if access.tile is None else f"{access.tile.width}-byte rows"
            row = [f"{access.who}, {size}", access.instruction, access.fewest, access.passes()]
            row.append(access.passes(swizzle=False))
            if tuple(row) not in seen:
                seen.add(tuple(row))
                rows.append(row)
    return table(rows)


_BOUND_COLORS = dict(zip((*_UNITS, "memory"), itertools.cycle(drawing.COLORS), strict=False))
_MARKERS = {"fwd": "o", "bwd": "s", "dbias": "^"}
_ROOF_INCHES = 2.2


def plot(models: Sequence[tuple[str, Model]], lengths: Lengths, path: Path) -> None:
    """Draws the roofs of each GPU in ``models``, and how near to them its variants may come."""
    gpus = list(dict.fromkeys(model.gpu for _, model in models))
    size = (8.6, 0.9 + (_ROOF_INCHES + 0.4) * len(gpus))
    source = (
        "A model from published rates, nothing measured. Circles forward, squares backward, "
        f"triangles gradients of a bias; colours: the bound.\nBatch {lengths.batch}, "
        f"{lengths.q_len} queries in {lengths.num_q_heads} heads, "
        f"{lengths.kv_len} keys in {lengths.num_kv_heads} heads"
    )
    title = "Roofline of attention kernels: TFLOP/s over FLOP per byte of memory"
    with drawing.picture(path, size, title, source) as figure:
        grid = figure.subplots(len(gpus), 1, squeeze=False)
        for (axes,), name in zip(grid, gpus, strict=True):
            _draw_roof(axes, name, [each for each in models if each[1].gpu == name])
        axes.set_xlabel("FLOP per byte of memory")


def _draw_roof(axes: Any, name: str, models: Sequence[tuple[str, Model]]) -> None:
    (gpu,) = (gpu for gpu in roofline.GPUS if gpu.name == name)
    axes.set_title(
        f"{name}: {gpu.peak_flops / 1e12:.0f} TFLOP/s, {gpu.hbm_bytes / 1e12:.3g} TB/s", loc="left"
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    corners = [
        min(gpu.ridge / 8, *(model.intensity / 2 for _, model in models)),
        gpu.ridge,
        max(gpu.ridge * 4, *(model.intensity * 2 for _, model in models)),
    ]
    roof = [min(gpu.peak_flops, gpu.hbm_bytes * x) / 1e12 for x in corners]
    axes.plot(corners, roof, color=drawing.INK)
    axes.set_xlim(corners[0], corners[-1])
    axes.set_ylim(min(roof[0], *(model.tflops / 1.5 for _, model in models)), roof[1] * 1.5)
    axes.set_ylabel("TFLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        drawing.logarithmic(axis)
    groups: dict[tuple[int, str], list[Variant]] = {}
    for title, model in models:
        variant, color = BY_NAME[title], _BOUND_COLORS[model.bound]
        groups.setdefault((round(model.tflops), model.bound), []).append(variant)
        axes.plot(
            model.intensity, model.tflops, _MARKERS[variant.operation], color=color, mfc="white"
        )
    everything = [variant for group in groups.values() for variant in group]
    ends = [
        drawing.End(
            tflops, f"{tflops} by {bound}: {_summary(group, everything)}", _BOUND_COLORS[bound]
        )
        for (tflops, bound), group in groups.items()
    ]
    drawing.label_ends(axes, ends, _ROOF_INCHES)


def _summary(group: Sequence[Variant], everything: Sequence[Variant]) -> str:
    """Names variants in few words: operations, and heads and masks where not all of them."""

    def of(variants: Iterable[Variant], *fields: str) -> dict[str, None]:
        return dict.fromkeys(
            " ".join(filter(None, (_FIELDS[field](variant) for field in fields)))
            for variant in variants
        )

    texts = []
    for kind in of(group, "kind"):
        own = [variant for variant in group if _FIELDS["kind"](variant) == kind]
        every = [variant for variant in everything if _FIELDS["kind"](variant) == kind]
        whole = of(every, "heads", "mask").keys() == of(own, "heads", "mask").keys()
        heads = []
        for head in of(own, "heads"):
            mine, theirs = (
                of((v for v in some if _FIELDS["heads"](v) == head), "mask")
                for some in (own, every)
            )
            heads.append(head if mine == theirs else f"{head} {'/'.join(mine)}")
        texts.append(kind if whole else f"{kind} {', '.join(heads)}")
    return "; ".join(texts)


def _mask(variant: Variant) -> str:
    key = variant.key
    forms = {
        "few": key.is_few,
        "split": key.is_split,
        "small": key.is_small,
        "product": key.multiplies_bias,
    }
    form = next((name for name, is_so in forms.items() if is_so), "")
    return f"{key.mask} {form}".rstrip()


_FIELDS: dict[str, Callable[[Variant], str]] = {
    "kind": lambda v: f"{v.operation} cap" if v.key.has_soft_cap else v.operation,
    "heads": lambda v: "/".join(str(d) for d in dict.fromkeys((v.key.head_dim, v.key.value_dim))),
    "mask": _mask,
}


def _gpus_for(variant: Variant, wanted: Sequence[str]) -> list[roofline.Gpu]:
    """The GPUs that run a variant and were asked for, else the first of its family."""
    asked = [gpu for gpu in roofline.GPUS if gpu.name in wanted]
    owners = [arch_named(gpu.arch).owner(variant.kind, variant.heads).name for gpu in asked]
    own = [gpu for gpu, owner in zip(asked, owners, strict=True) if owner == variant.arch]
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
        prog="python -m jax_fa.analysis", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", help="output folder of python -m jax_fa.aot"
    )
    parser.add_argument("--variants", default="*", metavar="GLOB", help="only these")
    parser.add_argument("--no-sass", action="store_true", help="do not read machine code")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parallel readers")
    parser.add_argument("--banks", action="store_true", help="list accesses to shared memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the roofline there (.png, .svg)"
    )
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
    nvdisasm = None if options.no_sass else machine_code.find_nvdisasm()
    dynamic = _dynamic_shared_bytes(options.folder)

    def audited(variant: Variant) -> Report:
        path = options.folder / f"{variant.name}.o"
        report = audit.resources(variant, path, dynamic.get(variant.name, ()))
        if nvdisasm is not None:
            audit.audit_code(report, variant, machine_code.disassemble(path, nvdisasm))
        audit.audit_ptx(report, variant, ptx_archives.read(options.folder, variant.name))
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
        if not options.no_sass and machine_code.find_nvdisasm() is None:
            parser.error(
                f"reading machine code needs a disassembler: pip install "
                f"{machine_code.NVDISASM_REQUIREMENT}, or --no-sass to do without"
            )
    obstacle = drawing.obstacle()
    if options.plot and obstacle:
        parser.error(f"--plot: {obstacle}")
    if not variants:
        where = options.folder or "the list of variants"
        parser.error(f"{where} has no '{options.variants}'; python -m jax_fa.aot writes objects")
    if options.folder is not None:
        reports = _audited(options, variants)
    lengths = Lengths(*(getattr(options, name) for name in Lengths._fields))
    runs = [(variant, gpu) for variant in variants for gpu in _gpus_for(variant, options.gpu)]
    models = [(variant.name, audit.model(variant, gpu, lengths)) for variant, gpu in runs]
    print(
        "Model, computed from published rates: cycles of an SM for a 128 x 128 tile of scores "
        "(fill:\nmore of shared memory, for what TMA writes), and both roofs for batch "
        f"{lengths.batch}, {lengths.q_len} queries in\n{lengths.num_q_heads} heads, "
        f"{lengths.kv_len} keys in {lengths.num_kv_heads} heads"
    )
    print(model_table(models))
    for gpu in dict.fromkeys(audit.running(variant, gpu) for variant, gpu in runs):
        if gpu.caveat:
            print(f"{gpu.name}: {gpu.caveat}")
    if reports:
        _print_reports(reports)
    if options.banks:
        print("\nShared memory: passes of each kind of access (model of 32 banks)")
        print(bank_table(variants))
    if options.json:
        _write_json(options.json, reports, models, lengths)
    if options.plot:
        plot(models, lengths, options.plot)
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
