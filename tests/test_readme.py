"""What the README says is so: its example runs; its table and commands are those of the code."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jax_fa import choice, support

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in example.splitlines() if line]) <= 12
    shown = subprocess.run(
        [sys.executable, "-c", example + "\nprint(layer(q.reshape(2, 1024, 512)).shape)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[-1] == "(2, 1024, 512)"


def test_support_table_is_up_to_date():
    assert support.updated(README) == README, "run: python -m jax_fa.support README.md"


def test_support_table_tells_kernels_from_fallbacks():
    rows = {row.split(" | ")[0].strip("| "): row for row in support.table().splitlines()}
    assert "unfused" not in rows["`sinks`"].split(" | ")[1]
    assert "kernel" not in rows["`mask`, `bias`, traced `scale`, float64"].split(" | ", 1)[1]


def test_support_cell_may_be_partial(monkeypatch):
    def choose(problem, *_):
        return choice.Choice("xla" if problem.num_kv_heads == 1 else "cpu", "", "")

    monkeypatch.setattr(support, "choose", choose)
    assert "| grouped-query, multi-query | in part |" in support.table()


def test_readme_without_marks_is_refused():
    with pytest.raises(ValueError, match=re.escape(support.START)):
        support.updated("# jax_fa\n")


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m ([\w.]+)", README))))
def test_mentioned_module_exists(module):
    assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize(
    "extras", sorted(set(re.findall(r"pip install \"\.\[([\w,]+)\]", README))), ids=str
)
def test_mentioned_extras_exist(extras):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


@pytest.mark.parametrize(
    "name",
    sorted(set(re.findall(r"`((?:jax_fa|ffi|tests|\.ci)/[\w./]+|\w+\.(?:py|toml))`", README))),
)
def test_mentioned_file_exists(name):
    assert any((ROOT / folder / name).exists() for folder in ("", "jax_fa", "ffi"))
