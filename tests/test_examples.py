"""Each file of examples/ runs, says so, and has kernels in its program."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.filterwarnings("default")  # those of other libraries are not ours
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_trains_on_kernels(path, capsys, monkeypatch):
    text = path.read_text()
    for library in re.findall(r"^import (equinox|keras)\b", text, re.MULTILINE):
        monkeypatch.setenv("KERAS_BACKEND", "jax")
        pytest.importorskip(library)
    assert len(text.splitlines()) <= 60
    runpy.run_path(str(path))
    runs, calls, losses = capsys.readouterr().out.splitlines()[-3:]
    assert "compiled kernels serve this problem" in runs
    forward, backward = map(int, calls.split(":")[1].split())
    assert forward > 0 and (backward > 0 or "predict" in text)
    first, *_, last = map(float, losses.split()[1:])
    assert last < first
