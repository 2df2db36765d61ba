"""Pictures are drawn from results, and what is missing is said in a sentence."""

import importlib.util
import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import figures, report
from benchmarks.report import Record
from benchmarks.timing import Samples
from benchmarks.workloads import Workload
from jax_fa.analysis import drawing, listing

HAS_MATPLOTLIB = drawing.obstacle() is None
draws = pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")

SERIES = [Workload("series", 1, 0, 0, 2, 2, 64).with_length(length) for length in (512, 1024)]
ALONE = Workload("causal_4k", 1, 4096, 4096, 8, 8, 64)


def records(*names, workloads=SERIES, peak_bytes=None):
    return [
        Record(workload, "float32", "forward", name, Samples((1e-6 * (1 + i),) * 3), peak_bytes)
        for workload in workloads
        for i, name in enumerate(names)
    ]


def written(tmp_path, taken, **machine):
    """What a benchmark hands to ``draw``, as it comes back from the file."""
    path = tmp_path / "out.json"
    content = report.write_json(taken, machine, path)
    assert json.loads(path.read_text()) == json.loads(json.dumps(content))
    return json.loads(path.read_text())


@pytest.fixture
def without_matplotlib(monkeypatch):
    found = importlib.util.find_spec

    def find_spec(name, *more):
        return None if name == "matplotlib" else found(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@draws
def test_one_command_draws_the_stored_results(tmp_path, capsys):
    (tmp_path / figures.PAGE).write_text(
        "\n".join(mark for name in figures.TABLES for mark in figures.marks(name))
    )
    assert figures.main(["--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for figure in figures.FIGURES:
        assert f"Drawn: {tmp_path / figure}\n" in printed
        assert "<svg" in (tmp_path / figure).read_text()
    assert (
        "| D = 128, 16 heads | 1024 | 553 (1.15, 1.12) |" in (tmp_path / figures.PAGE).read_text()
    )


@draws
def test_a_missing_platform_is_a_sentence(tmp_path, capsys):
    assert figures.main(["--results", str(tmp_path), "--output", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(map(len, figures.FIGURES.values()))
    assert lines[0] == (
        f"No results {tmp_path / 'h200_2026_11_29.json'}: `python -m benchmarks.gpu` writes such a "
        f"file"
    )


@draws
def test_a_missing_peer_is_a_sentence(tmp_path):
    path = tmp_path / "one.png"
    taken = records("jax_fa", "torch", peak_bytes=2**20)
    only = written(tmp_path, [r for r in taken if r.implementation == "jax_fa"], cpu="A")
    assert figures.draw([only], path) == [
        f"Drawn: {path}",
        "one.png: the results hold no other implementation than jax_fa",
    ]
    some = written(tmp_path, taken[:-1], cpu="A")
    assert figures.draw([some], path) == [
        f"Drawn: {path}",
        "one.png: PyTorch has nothing at 1024 in 2 of 2 panels",
    ]
    assert path.read_bytes().startswith(b"\x89PNG")
    assert figures.draw([written(tmp_path, taken[:2], cpu="A")], path) == [
        "No one.png: the results hold nothing over several sequence lengths"
    ]


def test_panels_hold_what_was_measured(tmp_path):
    taken = records("jax_fa", "torch", peak_bytes=3 * 2**20)
    taken += records("jax_fa", "torch", workloads=[ALONE, replace(ALONE, name="other")])
    taken += records("jax_fa", workloads=[replace(w, num_kv_heads=1) for w in SERIES])
    content = written(tmp_path, taken, gpu="H200, driver 1", date="2026-01-02", jax="0.10")
    (panel,) = figures.throughput(content)["D = 64, 2 heads"]
    assert (panel.title, panel.unit) == ("causal, forward", "TFLOP/s")
    rates = {
        record.workload.q_len: record.gflops_per_second / 1e3
        for record in taken
        if record.implementation == "torch" and record.workload in SERIES
    }
    assert panel.lines["torch"] == rates
    (sizes,) = figures.memory(content)["D = 64, 2 heads"]
    assert sizes.lines["jax_fa"] == {512: 3.0, 1024: 3.0}
    bars = figures.relative(content)
    assert bars is not None and bars.title == "time at 4096 tokens, jax_fa = 1"
    assert "D = 64, 2:1 heads" in figures.throughput(content)
    assert bars.lines == {"torch": {"float32, forward": 2.0}}
    assert figures.source(content) == "  ·  ".join(["H200", "jax 0.10", "float32", "2026-01-02"])
    assert f"|  | 1024 | {rates[1024] * 2:.0f} (2.00) |" in figures.table(content)


def test_stored_results_say_on_what_and_when():
    for path in figures.RESULTS.glob("*.json"):
        content = json.loads(path.read_text())
        about = content["machine"]
        assert about.keys() >= {"date", "jax_fa", "jax", "source"}
        assert about["date"].replace("-", "_") in path.name
        assert len(content["records"]) > 0


def test_without_matplotlib_the_error_says_what_to_install(without_matplotlib, tmp_path, capsys):
    told = "drawing needs matplotlib, which is not installed: pip install matplotlib"
    content = written(tmp_path, records("jax_fa", "torch"), cpu="A")
    assert figures.draw([content], tmp_path / "one.png") == [f"No one.png: {told}"]
    for command in (figures.main, listing.main):
        with pytest.raises(SystemExit):
            command(
                ["--output" if command is figures.main else "--plot", str(tmp_path / "two.png")]
            )
        assert told in capsys.readouterr().err
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    ("heights", "wanted"),
    [
        ([], []),
        ([0.2, 0.5], [0.2, 0.5]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.1, 0.5, 0.55, 0.6], [0.1, 0.45, 0.55, 0.65]),
        ([0.4, 0.5, 0.5], [0.4 - 1 / 30, 0.5 - 1 / 30, 0.6 - 1 / 30]),
    ],
    ids=str,
)
def test_labels_keep_apart_and_near_their_lines(heights, wanted):
    np.testing.assert_allclose(drawing._apart(heights, 0.1), wanted)
