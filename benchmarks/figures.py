"""``python -m benchmarks.figures``: draws stored results into docs/, and renews the tables there.

A figure shows what a benchmark's JSON holds of one platform: throughput over the sequence length,
a panel per head size, mask and direction; memory over the length; for workloads of one length, time
relative to jax_fa. ``benchmarks.cpu`` and ``benchmarks.gpu`` draw theirs by the same function.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import SUBJECT
from jax_fa.analysis import drawing
from jax_fa.runtime import support

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parent.parent / "docs"
FIGURES = {
    "h200.svg": ("h200_2026_11_29.json",),
    "h200_fa4.svg": ("h200_2026_11_22.json",),
    "cpu.svg": ("cpu_2026_11_21.json", "cpu_memory_2026_11_22.json"),
}
"""Figure -> the stored results that it shows."""
TABLES = (
    "h200_2026_11_22.json",
    "h200_2026_11_29.json",
    "h200_2026_11_30.json",
    "h200_2026_12_01.json",
)
"""Stored results whose tables ``PAGE`` holds."""
PAGE = "measured.md"

Content = Mapping[str, Any]
"""What ``report.write_json`` writes: the machine, and records. Those of stored results that were
taken from a text have no samples, and may have nothing but what was written there."""

_NAMES = {"cudnn": "cuDNN", "fa4": "FlashAttention-4", "jax.nn xla": "jax.nn", "torch": "PyTorch"}
_ORDER = (SUBJECT, "fa4", "cudnn", "torch", "pallas", "jax.nn xla")
_COLOR = dict(zip(_ORDER, drawing.COLORS, strict=True))
_MARKERS = dict(zip(_ORDER, "os^DvP", strict=True))
_VERSIONS = ("jax_fa", "jax", "cuDNN", "FlashAttention-4", "torch")
MATMUL = "matmul TFLOP/s"
"""Entry of the machine: rates of a large matrix product during the run."""
_DIRECTIONS = {"forward": "forward", "forward+backward": "forward + backward"}
_TITLE = "{mask}, {direction}"
_DOT = "  ·  "
_MIB = 2**20


@dataclass
class Panel:
    """A line for each implementation over the sequence length, or bars for one length.

    Attributes:
        title: problem and direction.
        unit: of the values.
        lines: implementation -> sequence length (or the name of a bar) -> value.
    """

    title: str
    unit: str
    lines: dict[str, dict[Any, float]] = field(default_factory=dict)

    @property
    def xs(self) -> list[Any]:
        """Every length or bar of any line."""
        return list(dict.fromkeys(x for line in self.lines.values() for x in line))

    @property
    def is_bars(self) -> bool:
        """True if there are no lengths."""
        return any(isinstance(x, str) for x in self.xs)

    @property
    def is_rate(self) -> bool:
        """True if more is better."""
        return self.unit.endswith("FLOP/s")

    def missing(self) -> Iterator[tuple[str, list[Any]]]:
        """Implementations that lack some of the points that others have."""
        for name, line in self.lines.items():
            lacking = [x for x in self.xs if x not in line]
            if lacking:
                yield name, lacking


@dataclass
class Row:
    """Panels side by side.

    Attributes:
        name: of what is on their vertical axes.
        panels: of one unit, but for bars.
        matmul: rates of a large matrix product, in their unit.
    """

    name: str
    panels: list[Panel]
    matmul: Sequence[float] = ()

    @property
    def inches(self) -> float:
        """Height of the axes."""
        return 1.45 if not any(panel.is_bars for panel in self.panels) else 2.0


def name_of(implementation: str) -> str:
    """Its name for readers."""
    return _NAMES.get(implementation, implementation)


def _dense(content: Content) -> Iterator[Content]:
    """Records of what differs in length, head size and mask alone."""
    for record in content["records"]:
        w = record["workload"]
        if (
            record["direction"] in _DIRECTIONS
            and w["window"] is None
            and (w["num_documents"], w["is_deterministic"]) == (1, False)
            and w["q_len"] == w["kv_len"]
        ):
            yield record


def _is_of_series(record: Content) -> bool:
    """True if a workload is one of several that differ in length, after which they are named."""
    return record["workload"]["name"].endswith(f"_{record['workload']['q_len']}")


def _panels(
    content: Content, unit: str, value: Callable[[Content], float | None], title: str
) -> dict[str, list[Panel]]:
    """Head size and number of heads -> panels, of what has a value at several lengths.

    ``title`` is a format with the places ``mask`` and ``direction``.
    """
    rows: dict[str, dict[str, Panel]] = {}
    for record in filter(_is_of_series, _dense(content)):
        found, w = value(record), record["workload"]
        if found is None:
            continue
        mask = "causal" if w["is_causal"] else "full"
        name = title.format(mask=mask, direction=_DIRECTIONS[record["direction"]])
        shared = "" if w["num_q_heads"] == w["num_kv_heads"] else f":{w['num_kv_heads']}"
        sizes = "/".join(str(w[size]) for size in ("head_dim", "value_dim") if w.get(size))
        panels = rows.setdefault(f"D = {sizes}, {w['num_q_heads']}{shared} heads", {})
        line = panels.setdefault(name, Panel(name, unit)).lines
        line.setdefault(record["implementation"], {})[w["q_len"]] = found
    kept = {row: [p for p in panels.values() if len(p.xs) > 1] for row, panels in rows.items()}
    return {row: panels for row, panels in kept.items() if panels}


def throughput(content: Content) -> dict[str, list[Panel]]:
    """Panels of useful work per time, a row for each head size."""
    unit, size = ("GFLOP/s", 1.0) if "cpu" in content["machine"] else ("TFLOP/s", 1e3)

    def rate(record: Content) -> float | None:
        gflops = record.get("gflops_per_second")
        return None if gflops is None else gflops / size

    return _panels(content, unit, rate, _TITLE)


def memory(content: Content) -> dict[str, list[Panel]]:
    """Panels of memory above inputs and outputs, of the first head size that was measured."""

    def megabytes(record: Content) -> float | None:
        peak = record.get("peak_bytes")
        # A logarithmic axis has no 0; next to nothing is a page.
        return None if peak is None else max(peak, 4096) / _MIB

    rows = _panels(content, "MB", megabytes, _TITLE)
    return dict(list(rows.items())[:1])


def relative(content: Content) -> Panel | None:
    """A panel of time relative to jax_fa, of the first workload of one length."""
    alone = [r for r in _dense(content) if "speedup" in r and not _is_of_series(r)]
    panel = None
    for record in alone:
        if record["workload"] == alone[0]["workload"]:
            w = record["workload"]
            panel = panel or Panel(f"time at {w['q_len']} tokens, {SUBJECT} = 1", "times as long")
            bar = f"{record['dtype']}, {_DIRECTIONS[record['direction']]}"
            panel.lines.setdefault(record["implementation"], {})[bar] = record["speedup"]
    return panel


def device(content: Content) -> str:
    """The processor."""
    about = content["machine"]
    return about.get("gpu", "").partition(",")[0] or about.get("cpu", "an unknown machine")


def source(content: Content) -> str:
    """Device, versions, element types, size and date, in a line."""
    about = content["machine"]
    dtypes = ", ".join(dict.fromkeys(record["dtype"] for record in content["records"]))
    versions = [f"{name} {about[name]}" for name in _VERSIONS if name in about]
    series = [record["workload"] for record in filter(_is_of_series, _dense(content))]
    tokens = {w["batch"] * w["q_len"] for w in series}
    size = [f"{tokens.pop()} tokens"] if len(tokens) == 1 else []
    when = about.get("date", "date unknown")
    return _DOT.join([device(content), *versions, dtypes, *size, when])


def draw(contents: Sequence[Content], path: Path) -> list[str]:
    """Draws the results of one platform; returns what to say about it, a line each."""
    obstacle = drawing.obstacle()
    if obstacle:
        return [f"No {path.name}: {obstacle}"]
    rows = _rows(contents)
    if not rows:
        return [f"No {path.name}: the results hold nothing over several sequence lengths"]
    columns = max(len(row.panels) for row in rows)
    heights = [row.inches for row in rows]
    size = (max(2.1 * columns + 1.1, 5.0), 0.85 + sum(heights) + 0.55 * len(rows))
    title = f"Attention on {' and '.join(dict.fromkeys(map(device, contents)))}"
    below = "\n".join(_sources(contents))
    with drawing.picture(path, size, title, below, identifier(contents)) as figure:
        grid = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
        for axes_row, row, above in zip(grid, rows, [None, *rows], strict=False):
            for axes in axes_row[len(row.panels) :]:
                axes.set_visible(False)
            _draw_row(axes_row, row, above)
        for axes in grid[-1]:
            if axes.get_xscale() == "log":
                axes.set_xlabel("sequence length")
    return [f"Drawn: {path}", *(f"{path.name}: {line}" for line in _gaps(rows))]


def _sources(contents: Sequence[Content]) -> Iterator[str]:
    """The sources of the panels: of several results, each says what it gave."""
    for content in contents:
        kinds = {"throughput": throughput, "time": relative, "memory": memory}
        given = " and ".join(kind for kind, panels in kinds.items() if panels(content))
        yield f"{given}: {source(content)}" if len(contents) > 1 else source(content)


def identifier(contents: Sequence[Content]) -> str:
    """A digest of results: a figure holds that of the results that it shows."""
    return f"sha256:{hashlib.sha256(json.dumps(contents).encode()).hexdigest()}"


def _rows(contents: Sequence[Content]) -> list[Row]:
    """Throughput, a row for each head size; then whatever else there is."""
    matmul = [rate for c in contents for rate in c["machine"].get(MATMUL, ())]
    rows = [
        Row(f"{name}\n{panels[0].unit}", panels, matmul)
        for c in contents
        for name, panels in throughput(c).items()
    ]
    bars = [panel for c in contents if (panel := relative(c))]
    sizes = [row for c in contents for row in memory(c).items()]
    if bars or sizes:
        names = [f"memory above inputs\nand outputs, MB\n{name}" for name, _ in sizes]
        panels = [panel for _, panels in sizes for panel in panels]
        rows.append(Row("".join(names[:1]), [*bars, *panels]))
    return rows


def _gaps(rows: Iterable[Row]) -> Iterator[str]:
    """Points that are missing here and present in others, a line each."""
    panels = [panel for row in rows for panel in row.panels]
    gaps: dict[str, int] = {}
    for panel in panels:
        for implementation, lacking in panel.missing():
            gap = f"{name_of(implementation)} has nothing at {', '.join(map(str, lacking))}"
            gaps[gap] = gaps.get(gap, 0) + 1
    yield from (f"{gap} in {number} of {len(panels)} panels" for gap, number in gaps.items())
    if {name for panel in panels for name in panel.lines} == {SUBJECT}:
        yield f"the results hold no other implementation than {SUBJECT}"


def _draw_row(axes_row: Sequence[Any], row: Row, above: Row | None) -> None:
    """Draws panels side by side; lines have the same limits, and their names on the right."""
    lines = [panel for panel in row.panels if not panel.is_bars]
    for axes, panel in zip(axes_row, row.panels, strict=False):
        if above is None or [p.title for p in above.panels] != [p.title for p in row.panels]:
            axes.set_title(panel.title, loc="left")
        if panel.is_bars:
            _draw_bars(axes, panel)
            continue
        _draw_lines(axes, panel)
        _limit(axes, row, [y for p in lines for line in p.lines.values() for y in line.values()])
        if panel is not lines[0]:
            axes.tick_params(labelleft=False)
            continue
        axes.set_ylabel(row.name)
        if row.matmul and above is None:
            place = (panel.xs[0], max(row.matmul))
            axes.text(*place, "matmul 8192³", va="bottom", color=drawing.FAINT, fontsize=8)
    if lines:
        ends = [
            drawing.End(list(line.values())[-1], name_of(name), _COLOR.get(name, drawing.INK))
            for name, line in lines[-1].lines.items()
        ]
        drawing.label_ends(axes_row[len(row.panels) - 1], ends, row.inches)


def _limit(axes: Any, row: Row, values: Sequence[float]) -> None:
    """From 0 where the axis is linear; the band is what a matrix product reached."""
    if axes.get_yscale() == "log":
        axes.set_ylim(min(values) / 1.6, max(values) * 1.6)
        drawing.logarithmic(axes.yaxis)
        return
    axes.set_ylim(0, 1.1 * max([*values, *row.matmul]))
    if row.matmul:
        axes.axhspan(min(row.matmul), max(row.matmul), color=drawing.RULE, zorder=0.5)


def _draw_lines(axes: Any, panel: Panel) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("linear" if panel.is_rate else "log")
    axes.minorticks_off()
    lengths = sorted(panel.xs)
    shown = lengths if len(lengths) < 6 else lengths[::-2][::-1]
    axes.set_xticks(shown, [f"{x // 1024}k" if x >= 1024 else str(x) for x in shown])
    axes.set_xlim(lengths[0] / 1.2, lengths[-1] * 1.2)
    for name, line in panel.lines.items():
        axes.plot(
            list(line),
            list(line.values()),
            color=_COLOR.get(name, drawing.INK),
            marker=_MARKERS.get(name, "."),
            markerfacecolor=None if name == SUBJECT else "white",
            zorder=3 if name == SUBJECT else 2,
        )


def _draw_bars(axes: Any, panel: Panel) -> None:
    """A line of text for each group, and under it a bar for each implementation."""
    number = len(panel.lines) + 1.3  # lines of a group, with some room above
    for group, bar in enumerate(panel.xs):
        axes.text(0, group * number, bar, va="center", fontsize=8)
        axes.vlines(1, group * number + 0.5, (group + 1) * number - 0.8, color=_COLOR[SUBJECT])
        there = [(name, line[bar]) for name, line in panel.lines.items() if bar in line]
        for place, (name, value) in enumerate(there, 1):
            y, color = group * number + place, _COLOR.get(name, drawing.INK)
            axes.barh(y, value, 0.8, color=color)
            axes.text(
                value, y, f" {value:.2f} {name_of(name)}", va="center", color=color, fontsize=8
            )
    axes.set_xlim(0, 1.5 * max(x for line in panel.lines.values() for x in line.values()))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_ylim(len(panel.xs) * number - 0.6, -0.7)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(panel.unit)


def table(content: Content) -> str:
    """Work per time of jax_fa as Markdown and, in brackets, how many times as fast as each peer."""
    rates = throughput(content)
    ratios = _panels(content, "", lambda record: record.get("speedup"), _TITLE)
    (unit,) = {panel.unit for panels in rates.values() for panel in panels}
    columns = list(dict.fromkeys(panel.title for panels in rates.values() for panel in panels))
    peers = dict.fromkeys(peer for row in ratios.values() for panel in row for peer in panel.lines)
    lines = [["", "T", *columns], ["---", *["---:"] * (1 + len(columns))]]
    for name, panels in rates.items():
        mine = {panel.title: panel.lines.get(SUBJECT, {}) for panel in panels}
        theirs = {panel.title: panel.lines for panel in ratios.get(name, ())}
        for place, length in enumerate(sorted({x for line in mine.values() for x in line})):
            row = ["" if place else name, str(length)]
            for title in columns:
                rate = mine.get(title, {}).get(length)
                found = [theirs.get(title, {}).get(peer, {}).get(length) for peer in peers]
                times = ", ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in found)
                row.append("" if rate is None else f"{rate:.0f} ({times})")
            lines.append(row)
    others = ", ".join(map(name_of, peers))
    above = f"{source(content)}: {unit} of {SUBJECT}; in brackets, times as fast as {others}"
    return "\n".join([f"{above}:", "", *(f"| {' | '.join(line)} |" for line in lines)])


def marks(name: str) -> tuple[str, str]:
    """The lines around the table of some results in ``PAGE``."""
    return f"<!-- {name}: python -m benchmarks.figures -->", f"<!-- end of {name} -->"


def load(folder: Path, names: Iterable[str]) -> tuple[list[Content], list[str]]:
    """Stored results by file name, and a line for each one that is not there."""
    contents, notes = [], []
    for name in names:
        if (folder / name).exists():
            contents.append(json.loads((folder / name).read_text()))
        else:
            platform = "cpu" if name.startswith("cpu") else "gpu"
            notes.append(
                f"No results {folder / name}: `python -m benchmarks.{platform}` writes such a file"
            )
    return contents, notes


def main(argv: Sequence[str] | None = None) -> int:
    """Draws and renews everything; returns the exit status, 1 if something is not there."""
    parser = argparse.ArgumentParser("python -m benchmarks.figures", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--output", type=Path, default=DOCS, metavar="DIR")
    args = parser.parse_args(argv)
    obstacle = drawing.obstacle()
    if obstacle:
        parser.error(obstacle)
    notes: list[str] = []
    for figure, names in FIGURES.items():
        contents, missing = load(args.results, names)
        notes += missing
        if contents:
            notes += draw(contents, args.output / figure)
    page = args.output / PAGE
    if page.exists():
        page.write_text(renewed(page.read_text(), args.results))
    print(*notes, sep="\n")
    return int(any(note.startswith("No ") for note in notes))


def renewed(text: str, results: Path = RESULTS) -> str:
    """The text of ``PAGE`` with present tables."""
    for name in TABLES:
        contents, _ = load(results, [name])
        if contents:
            text = support.between(text, marks(name), table(contents[0]))
    return text


if __name__ == "__main__":
    sys.exit(main())
