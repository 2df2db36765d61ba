"""What the README and its pages say is so: code runs; tables and figures are those of the code."""

import importlib.util
import json
import re
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks import figures
from jax_fa.runtime import dispatch, support
from jax_fa.spec.arch import ARCHS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {"README.md": README} | {
    f"docs/{path.name}": path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))
}
EVERY_PAGE = "\n".join(PAGES.values())
CHECKS = """
import numpy as np
assert y.shape == (2, 1024, 512) and dq.shape == q.shape
def compare(*arrays):
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in arrays), atol=0.02)
document = [x[:, 256:512] for x in (q, k, v)]
compare(packed[:, 256:512], jax_fa.attention(*document, is_causal=True))
document = [x[0, 300:1000] for x in (q, k, v)]
compare(rows[300:1000], jax_fa.attention(*document, is_causal=True))
compare(token, jax_fa.attention(q[:, :1], k[:, :701], v[:, :701]))
"""


def test_examples_run():
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in examples[0].splitlines() if line]) <= 12
    shown = subprocess.run(
        [sys.executable, "-c", "\n".join([*examples, CHECKS])],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr


def test_readme_is_short_and_in_the_order_of_a_first_reading():
    landmarks = [
        "drop-in for",
        "pip install .",
        "**GPU**",
        "```python",
        "## How it differs from `jax.nn",
        "## Which GPUs",
        "<!-- exceptions",
        "## Packed documents and decoding",
        "## What is measured",
        "## How to work here",
    ]
    places = [README.index(landmark) for landmark in landmarks]
    assert places == sorted(places)
    assert len(README.splitlines()) <= 120
    differences = README[places[4] : places[5]]
    assert len(re.findall("^- ", differences, re.MULTILINE)) == 6


def test_readme_names_every_family_and_says_what_no_hardware_has_run():
    (table,) = re.findall(r"## Which GPUs\n(.*?)\n## ", README, re.DOTALL)
    rows = [row for row in table.splitlines() if row.startswith("|")]
    for arch in ARCHS:
        (row,) = (row for row in rows if re.search(rf"\b{arch.name}\b", row))
        assert ("**never run on these**" in row) == (arch.name != "sm90")


@pytest.mark.parametrize(
    ("page", "section"), [("docs/support.md", "support table"), ("README.md", "exceptions")]
)
def test_what_kernels_serve_is_up_to_date(page, section):
    assert all(mark in PAGES[page] for mark in support.marks(section))
    assert support.updated(PAGES[page]) == PAGES[page], (
        f"run: python -m jax_fa.runtime.support {page}"
    )


def test_every_unfused_cell_of_the_table_is_among_the_exceptions():
    heading, _, *rows = (
        [cell.strip() for cell in row.strip("|").split("|")] for row in support.table().splitlines()
    )
    exceptions = support.exceptions().splitlines()
    for feature, *cells in rows:
        places = [name for name, cell in zip(heading[1:], cells, strict=True) if cell != "kernel"]
        listed = [line for line in exceptions if feature in line]
        assert len(listed) == bool(places), feature
        if listed and not listed[0].startswith(("- everywhere: ", "- on GPUs: ")):
            # A name without an operation stands for both.
            named = listed[0].removeprefix("- ").split(": ")[0].split(", ")
            sides = [[f"{x} forward", f"{x} backward"] if " " not in x else [x] for x in named]
            assert [side for family in sides for side in family] == places
        elif listed:
            assert ("CPU" in places) == listed[0].startswith("- everywhere: ")
            assert set(heading[2:]) <= set(places)


def test_tables_of_what_was_measured_are_those_of_the_stored_results():
    page = PAGES[f"docs/{figures.PAGE}"]
    assert figures.renewed(page) == page, "run: python -m benchmarks.figures"


@pytest.mark.parametrize("figure", figures.FIGURES)
def test_pictures_show_the_stored_results(figure):
    contents, missing = figures.load(figures.RESULTS, figures.FIGURES[figure])
    assert not missing
    drawn = (ROOT / "docs" / figure).read_text()
    assert figures.identifier(contents) in drawn, "run: python -m benchmarks.figures"
    assert f"]({figure})" in PAGES[f"docs/{figures.PAGE}"]
    assert f"](docs/{figure})" in README or figure == "h200_fa4.svg"


def test_sentences_about_the_h200_follow_from_the_stored_results():
    def speedups(figure, peer, **wanted):
        (name,) = figures.FIGURES[figure]
        return [
            r["speedup"]
            for r in json.loads((figures.RESULTS / name).read_text())["records"]
            if r["implementation"] == peer
            and all((r | r["workload"])[field] == value for field, value in wanted.items())
        ]

    def mean(direction, head_dim):
        found = speedups("h200_fa4.svg", "fa4", direction=direction, head_dim=head_dim)
        return f"{statistics.geometric_mean(found):.2f}"

    over_cudnn = speedups("h200.svg", "cudnn")
    said = " ".join(README.split())
    assert (
        f"{min(over_cudnn):.2f} to {max(over_cudnn):.2f} times as fast as cuDNN (through "
        f"`jax.nn`) in the {len(over_cudnn)} points above that it takes"
    ) in said
    forward = [mean("forward", head_dim) for head_dim in (64, 128)]
    (both,) = {mean("forward+backward", head_dim) for head_dim in (64, 128)}
    assert (
        f"{forward[0]} (D = 64) and {forward[1]} (D = 128) times as fast forward, {both} with "
        f"backward"
    ) in said


def test_cpu_table_is_that_of_the_stored_results():
    records = json.loads((figures.RESULTS / "cpu_2026_11_21.json").read_text())["records"]
    rows: dict[str, dict[str, str]] = {}
    for record in records:
        direction = record["direction"].replace("+", " + ")
        row = rows.setdefault(f"| {record['dtype']}, {direction} |", {})
        value = record.get("speedup") or record["peak_bytes"] / 2**20
        row[record["implementation"]] = f"{value:.2f}" if "speedup" in record else f"{value:.1f}"
    for start, row in rows.items():
        cells = " | ".join(row[name] for name in ("jax.nn xla", "torch", "jax_fa"))
        assert f"{start} {cells} |" in PAGES[f"docs/{figures.PAGE}"]


def test_support_table_tells_kernels_from_fallbacks():
    rows = {row.split(" | ")[0].strip("| "): row for row in support.table().splitlines()}
    assert "unfused" not in rows["`sinks`"].split(" | ")[1]
    unserved = rows["traced `scale`, float64, `mask_mod` of packed sequences"]
    assert "kernel" not in unserved.split(" | ", 1)[1]


def test_support_cell_may_be_partial(monkeypatch):
    def choose(problem, *_):
        return dispatch.Choice("xla" if problem.num_kv_heads == 1 else "cpu", "", "")

    monkeypatch.setattr(support, "choose", choose)
    assert "| grouped-query, multi-query | in part |" in support.table()


def test_page_without_marks_or_with_one_of_two_is_refused():
    first, last = support.marks("support table")
    for text in ("# jax_fa\n", first, last):
        with pytest.raises(ValueError, match=re.escape(first)):
            support.updated(text)


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m ([\w.]+)", EVERY_PAGE))))
def test_mentioned_module_exists(module):
    assert importlib.util.find_spec(module) is not None


def test_the_command_for_tests_finds_no_two_modules_of_one_name():
    """pytest imports tests by their names alone; CI collects folders apart and would not see it."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py")]
    assert not {name for name in names if names.count(name) > 1}


@pytest.mark.parametrize(
    "extras", sorted(set(re.findall(r"pip install \"\.\[([\w,]+)\]", EVERY_PAGE))), ids=str
)
def test_mentioned_extras_exist(extras):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


@pytest.mark.parametrize(
    "name",
    sorted(
        set(
            re.findall(
                r"`((?:jax_fa|spec|runtime|ffi|tests|benchmarks|\.ci)/[\w./]+|\w+\.(?:py|toml))`",
                EVERY_PAGE,
            )
        )
    ),
)
def test_mentioned_file_exists(name):
    assert any((ROOT / folder / name).exists() for folder in ("", "jax_fa", "ffi"))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    links = [link for link in re.findall(r"\]\(([^)]+)\)", PAGES[page]) if "://" not in link]
    assert links or page != "README.md"
    for link in links:
        assert (ROOT / page).parent.joinpath(link).exists(), link
