"""A launch is remembered if nothing differs that it depends on, and only then."""

import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import recording
from helpers import remembered as remembered_module
from helpers.ptx_kernels import kernel
from helpers.recording import key_of_build
from helpers.remembered import Remembered

from jax_fa.aot import compiler
from jax_fa.emulator import EmulationError, Launch, Memory, Options, emulate
from jax_fa.spec.arch import arch_of_target
from jax_fa.spec.config import choose_forward
from jax_fa.spec.key import KernelKey

# Takes x to y, 32 words; of its parameters it leaves one, and the last bytes of another, unread.
BODY = """
  .reg .b64 %from, %to;
  .reg .b32 %value, %more;
  mad.wide.u32 %from, %tid, 4, %x;
  mad.wide.u32 %to, %tid, 4, %y;
  ld.global.u32 %value, [%from];
  ld.param.u32 %more, [p_more];
  add.u32 %value, %value, %more;
  st.global.u32 [%to], %value;
"""
PTX = (
    kernel(BODY, ["x", "y", "more", "unread"])
    .replace("  .reg .b64 %more;\n  ld.param.u64 %more, [p_more];\n", "")
    .replace("  .reg .b64 %unread;\n  ld.param.u64 %unread, [p_unread];\n", "")
)
OTHER = PTX[PTX.index(".visible") :].replace("test", "other")
FAULTY = PTX.replace("st.global.u32 [%to]", "st.global.u32 [%to+4]")


class Run:
    """Two arrays, and a launch over them."""

    def __init__(self, text=PTX, x=1, more=5, unread=7, tail=0):
        self.text, self.memory = text, Memory()
        self.x, self.y = np.full(32, x, np.uint32), np.zeros(32, np.uint32)
        addresses = [self.memory.add(*named) for named in (("x", self.x), ("y", self.y))]
        words = [struct.pack("<Q", value) for value in (*addresses, more + (tail << 32), unread)]
        self.launch = Launch((1, 1, 1), (32, 1, 1), tuple(words), kernel="test")

    def by(self, run, seed=0, options=None, **changes):
        launch = replace(self.launch, **changes)
        return run(self.text, launch, self.memory, seed=seed, options=options)


@pytest.fixture
def remembered(tmp_path):
    found = Remembered(tmp_path / "launches")
    Run().by(found)
    assert found.counts == {"run": 1}
    return found


@pytest.mark.parametrize(
    "run",
    [
        *(Run(), Run(unread=8), Run(tail=9), Run(PTX.replace("test", "other_name"))),
        Run(PTX + OTHER),
    ],
    ids=["equal", "parameter unread", "bytes unread", "name", "a kernel behind it"],
)
def test_equal_launch_is_not_run_again(remembered, run):
    name = "other_name" if "other_name" in run.text else "test"
    report = run.by(remembered, kernel=name)
    assert remembered.counts == {"run": 1, "remembered": 1}
    np.testing.assert_array_equal(run.y, np.full(32, 6))
    assert report == Run().by(emulate)


@pytest.mark.parametrize(
    ("run", "changes"),
    [
        (Run(PTX.replace("add.u32 %value", "sub.u32 %value")), {}),
        (Run(PTX.replace(".visible", OTHER + ".visible", 1)), {}),
        (Run(x=2), {}),
        (Run(more=6), {}),
        (Run(), {"seed": 1}),
        (Run(), {"options": Options("lazy")}),
        (Run(), {"shared_bytes": 16}),
        (Run(), {"block": (16, 1, 1)}),
    ],
    ids=[
        "text",
        "a kernel before it",
        "memory",
        "parameter",
        "seed",
        "options",
        "shared memory",
        "block",
    ],
)
def test_what_differs_is_run(remembered, run, changes):
    run.by(remembered, **changes)
    assert remembered.counts == {"run": 2}


def test_another_emulator_runs_everything(remembered, monkeypatch):
    monkeypatch.setattr("helpers.remembered._emulator", lambda: b"another")
    Run().by(remembered)
    assert remembered.counts == {"run": 2}


def test_a_fault_is_found_every_time(remembered):
    for _ in range(2):
        with pytest.raises(EmulationError):
            Run(FAULTY).by(remembered)
    assert remembered.counts == {"run": 3}


def test_a_fault_that_a_run_survives_is_found_every_time(tmp_path):
    found = EmulationError("a finding")

    def survive(*arguments, **options):
        return replace(emulate(*arguments, **options), findings=(found,))

    remembered = Remembered(tmp_path, survive)
    for _ in range(2):
        assert Run().by(remembered).findings == (found,)
    assert remembered.counts == {"run": 2}


def test_what_no_run_used_for_long_is_deleted(remembered, monkeypatch):
    remembered.prune()
    assert len(list(remembered.folder.iterdir())) == 1
    monkeypatch.setattr("helpers.remembered.DAYS", -1)
    remembered.prune()
    assert not list(remembered.folder.iterdir())


def test_files_are_made_once(tmp_path, monkeypatch):
    def make_file(key):
        folder = tmp_path / f"{key}{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        calls = []

        def make():
            calls.append(key)
            (folder / "k.o").write_bytes(b"code of " + key.encode())

        remembered_module.make_once(key, folder, make)
        assert (folder / "k.o").read_bytes() == b"code of " + key.encode()
        return bool(calls)

    monkeypatch.setattr(remembered_module, "FOLDER", str(tmp_path / "kept"))
    assert [make_file(key) for key in ("one", "one", "other", "one")] == [True, False, True, False]
    monkeypatch.setattr(remembered_module, "FOLDER", "")
    assert make_file("one")


def row_with_another_sm(target):
    """The row of a family, whose first GPU has one multiprocessor more."""
    row = arch_of_target(target)
    first, *rest = row.products
    return replace(row, products=(first._replace(sms=first.sms + 1), *rest))


def test_a_build_is_remembered_of_its_sources_and_its_test(tmp_path, monkeypatch):
    key = KernelKey("sm_90a", "bfloat16", 64, 64, "full")
    source, config = tmp_path / "source.py", choose_forward(key)
    source.write_text("as it was")
    monkeypatch.setattr(compiler, "sources", lambda module: [source])

    def of_build(name="fault", module="sm90.fwd", key=key, config=config):
        return key_of_build(module, key, config, name)

    first = of_build()
    others = [of_build("another"), of_build(module="sm90.bwd")]
    others += [of_build(key=replace(key, dtype="float16")), of_build(config=None)]
    source.write_text("changed")
    others.append(of_build())
    source.write_text("as it was")
    assert of_build() == first
    with monkeypatch.context() as other_row:
        other_row.setattr(recording, "arch_of_target", row_with_another_sm)
        others.append(of_build())
    ours = os.environ["PYTEST_CURRENT_TEST"]
    for test in ("test_remembered.py::test_other (call)", "test_barriers.py::test (call)"):
        monkeypatch.setenv("PYTEST_CURRENT_TEST", f"tests/emulator/{test}")
        others.append(of_build())
    monkeypatch.setenv("PYTEST_CURRENT_TEST", ours)
    assert len({first, *others}) == 1 + len(others)


def test_a_build_is_remembered_of_what_its_test_imports(tmp_path):
    """Such as a helper, and what that imports, but nothing of another folder."""
    files = recording.sources_of_test(Path(__file__))
    names = {path.relative_to(recording.TESTS).as_posix() for path in files}
    assert {"emulator/test_remembered.py", "helpers/recording.py"} <= names
    assert {"helpers/remembered.py", "helpers/ptx_kernels.py"} <= names
    assert not [name for name in names if name.startswith("kernels/")]
