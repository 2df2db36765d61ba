"""The emulator as a tool: launches as JSON, the command line, the report."""

import json
import subprocess
import sys

import numpy as np
import pytest
from helpers.ptx_kernels import kernel, run

from jax_fa.emulator import Launch, Memory, Options, emulate
from jax_fa.emulator.__main__ import main
from jax_fa.emulator.faults import LaunchError

BODY = """
  setp.eq.s32 %p1, %warp, 0;
  @%p1 bra END;
  mad.wide.u32 %d1, %tid, 4, %x;
  ld.global.b32 %r1, [%d1];
  add.s32 %r1, %r1, 1;
  st.global.b32 [%d1], %r1;
END:
  bar.sync 0;
"""


def launch(address, **changes):
    return Launch(
        **{
            "grid": (1, 1, 1),
            "block": (96, 1, 1),
            "kernel": "test",
            "params": (int(address).to_bytes(8, "little"),),
        }
        | changes
    )


def test_launch_survives_json():
    original = launch(0x1234, cluster=(1, 1, 1), shared_bytes=2048)
    assert Launch.from_json(original.to_json()) == original


def test_launch_from_record_mode():
    record = {
        "kernel": "test",
        "grid": (2, 1, 1),
        "block": (96, 1, 1),
        "cluster": (2, 1, 1),
        "shared_bytes": 16,
        "is_cooperative": False,
        "params": [b"12345678"],
    }
    got = Launch.from_record(record)
    assert got.grid == (2, 1, 1) and got.params == (b"12345678",) and got.kernel == "test"


def test_launch_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="no multiple of cluster"):
        launch(0, grid=(3, 1, 1), cluster=(2, 1, 1))
    with pytest.raises(ValueError, match="three positive extents"):
        launch(0, block=(0, 1, 1))
    with pytest.raises(LaunchError, match="2 parameters, the kernel declares 1"):
        emulate(kernel("", ["x"]), launch(0, params=(b"", b"")), Memory())
    with pytest.raises(LaunchError, match="parameter 0 has 4 bytes .* and 8"):
        emulate(kernel("", ["x"]), launch(0, params=(b"1234",)), Memory())
    with pytest.raises(ValueError, match="completion 'soon'"):
        Options(completion="soon")


def test_memory_at_recorded_addresses():
    x = np.zeros(96, np.uint32)
    memory = Memory()
    assert memory.add("x", x, 0x7F00_1234_0000) == 0x7F00_1234_0000
    emulate(kernel(BODY, ["x"]), launch(0x7F00_1234_0000), memory)
    np.testing.assert_array_equal(x, np.r_[np.zeros(32), np.ones(64)])
    with pytest.raises(ValueError, match="overlaps"):
        memory.add("y", x, 0x7F00_1234_0100)
    with pytest.raises(ValueError, match="not C-contiguous"):
        memory.add("z", np.zeros((4, 4))[:, ::2])


def test_report_counts_by_role_and_path():
    report = run(BODY, {"x": np.zeros(96, np.uint32)}, block=96)
    roles = report.roles()
    assert set(roles) == {(0,), (1, 2)}
    assert roles[1, 2]["ld.global.b32"] == 2 and "ld.global.b32" not in roles[0,]
    assert report.counters["bytes global load"] == 256
    assert report.counters["bytes global store"] == 256
    assert "warps 1, 2:" in str(report)


def test_command_line_prints_counters(tmp_path, capsys):
    (tmp_path / "k.ptx").write_text(kernel(BODY, ["x"]))
    np.save(tmp_path / "x.npy", np.zeros(96, np.uint32))
    described = json.loads(launch(0x10000).to_json())
    described["buffers"] = [{"name": "x", "address": 0x10000, "file": "x.npy"}]
    (tmp_path / "launch.json").write_text(json.dumps(described))
    arguments = [str(tmp_path / "k.ptx"), "--launch", str(tmp_path / "launch.json")]
    assert main(arguments) == 0
    assert "bytes global store: 256" in capsys.readouterr().out
    described["buffers"] = [{"name": "x", "address": 0x10000, "bytes": 16}]
    (tmp_path / "launch.json").write_text(json.dumps(described))
    assert main(arguments) == 1
    assert "OutOfBoundsError: global address" in capsys.readouterr().err


def test_the_emulator_needs_only_numpy():
    code = (
        "import sys, jax_fa.emulator.run as r; "
        "bad = {'cutlass', 'torch', 'scipy'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
