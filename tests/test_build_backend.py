"""What an installation compiles: JAX_FA_GPU, the GPUs of a driver, and what the DSL allows."""

import json
import os
import shutil
import subprocess
import sys
import tomllib

import pytest
from helpers import stand_in

from jax_fa.aot import compiler
from jax_fa.spec.arch import ARCHS, known_capabilities

FAMILIES = [arch.name for arch in ARCHS]

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
pytest.importorskip("scikit_build_core")


def ask(hook, *, driver=None, settings=None, setup="", **environment):
    """What a hook of the backend returns in a process of its own, and what it says."""
    code = (
        "import json, sys; import build_backend as b\n"
        f"{setup}\n"
        f"try: print(json.dumps({hook}))\n"
        "except b.BuildError as error: print(json.dumps(str(error)))"
    )
    variables = {k: v for k, v in os.environ.items() if k != "JAX_FA_GPU"} | environment
    variables["PYTHONPATH"] = str(stand_in.ROOT / "ffi")
    variables["LD_LIBRARY_PATH"] = str(driver or "")
    variables["CUDA_VISIBLE_DEVICES"] = ""  # of a real driver, which the stand-in does not heed
    process = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True
    )
    return json.loads(process.stdout.splitlines()[-1]), process.stderr


REQUIRES = "b._requires(None)"
REQUESTED = "b.requested(None).families"


@needs_compiler
@pytest.mark.parametrize(
    ("capabilities", "families"),
    [
        ((90,), ["sm90"]),
        ((100,), ["sm100"]),
        ((103,), ["sm103"]),
        ((90, 90, 100), ["sm90", "sm100"]),
        ((80,), ["sm80"]),
        ((86,), ["sm86"]),
        ((121,), ["sm120"]),
        ((75,), []),
    ],
)
def test_the_families_that_the_driver_shows_are_compiled(tmp_path, capabilities, families):
    driver = stand_in.driver(tmp_path, capabilities)
    assert ask(REQUESTED, driver=driver) == (families, "")
    needed, said = ask(REQUIRES, driver=driver)
    assert needed == ([compiler.DSL_REQUIREMENT] if families else [])
    fetched = f"{compiler.DSL_REQUIREMENT} is fetched to compile the GPU kernels of"
    assert (
        said.count("where it cannot be had, JAX_FA_GPU=none builds")
        == said.count(fetched)
        == len(needed)
    )


@needs_compiler
def test_a_gpu_that_no_kernels_exist_for_is_named_once(tmp_path):
    driver = stand_in.driver(tmp_path, (75, 75))
    assert ask(LINKED, driver=driver) == (
        OFF,
        f"jax_fa: Stand-in has compute capability 7.5; kernels exist for {known_capabilities()}\n",
    )


@needs_compiler
def test_a_driver_that_fails_counts_as_none(tmp_path):
    driver = stand_in.driver(tmp_path, (90,), failure=100)
    assert ask(REQUESTED, driver=driver) == ([], "")


@needs_compiler
@pytest.mark.parametrize(
    ("asked", "families"), [("none", []), ("all", FAMILIES), ("sm100, sm90", ["sm100", "sm90"])]
)
def test_the_variable_overrides_the_driver(tmp_path, asked, families):
    driver = stand_in.driver(tmp_path, (90,))
    assert ask(REQUESTED, driver=driver, JAX_FA_GPU=asked) == (families, "")


def test_the_config_setting_overrides_the_variable():
    got, _ = ask("b.requested({'gpu': 'sm110'}).families", JAX_FA_GPU="all")
    assert got == ["sm110"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("sm9", "JAX_FA_GPU=sm9: 'sm9' is no GPU family. Use auto, none, all, one or more of sm90"),
        ("sm90,", "'' is no GPU family"),
        ("./nowhere", "holds no kernel table. Fill it with `python -m jax_fa.aot --output"),
    ],
)
def test_what_names_no_kernels_is_refused(asked, message):
    assert message in ask(REQUESTED, JAX_FA_GPU=asked)[0]


def test_kernels_compiled_elsewhere_are_taken_as_they_are(tmp_path):
    (tmp_path / "kernel_table.gen.cc").touch()
    linked = "list(b._linked({'gpu': %r, 'x': 1}).__enter__().items())" % str(tmp_path)  # noqa: UP031
    got, _ = ask(linked)
    assert got == [["x", 1], ["cmake.define.JAX_FA_GPU_KERNELS", str(tmp_path)]]


NO_WHEELS = "b.platform.machine = lambda: 'riscv64'"
NO_DSL = "b.importlib.util.find_spec = lambda name: None"
LINKED = "b._linked(None).__enter__()"
OFF = {"cmake.define.JAX_FA_GPU_KERNELS": "OFF"}


@needs_compiler
@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        (f"{NO_WHEELS}; {NO_DSL}", f"jaxlib runs here (cpython 3.{sys.version_info.minor}"),
        (NO_DSL, f"{compiler.DSL_REQUIREMENT} is not installed in this build environment"),
    ],
    ids=["no wheels", "no isolation"],
)
def test_without_the_dsl_the_build_goes_on_and_says_so_unless_a_family_was_named(
    tmp_path, setup, reason
):
    driver = stand_in.driver(tmp_path, (90,))
    got, said = ask(LINKED, driver=driver, setup=setup)
    assert got == OFF
    assert said.startswith("jax_fa: building without the GPU kernels of sm90: " + reason)
    assert said.count("\n") == 1
    assert reason in ask(LINKED, setup=setup, JAX_FA_GPU="sm90")[0]


@needs_compiler
def test_a_platform_without_wheels_of_the_dsl_does_not_ask_for_it(tmp_path):
    driver = stand_in.driver(tmp_path, (90,))
    assert ask(REQUIRES, driver=driver, setup=NO_WHEELS)[0] == []
    refused, _ = ask(REQUIRES, setup=NO_WHEELS, JAX_FA_GPU="sm90")
    assert f"but {compiler.DSL_REQUIREMENT} has wheels for CPython 3.10 to 3.14" in refused


def test_a_machine_without_a_gpu_compiles_nothing():
    assert ask(REQUIRES) == ([], "")
    assert ask(LINKED) == (OFF, "")


def test_tests_build_with_what_an_installation_builds_with():
    text = (stand_in.ROOT / "pyproject.toml").read_text()
    declared = tomllib.loads(text)
    needed = [x for x in declared["build-system"]["requires"] if not x.startswith("jaxlib")]
    assert set(needed) <= set(declared["project"]["optional-dependencies"]["test"])
    assert declared["project"]["optional-dependencies"]["aot"] == [compiler.DSL_REQUIREMENT]


def test_hooks_of_scikit_build_core_do_not_see_the_setting():
    got, _ = ask("b._hook(lambda a, s: s)('wheels', {'gpu': 'none', 'x': 'y'})")
    assert got == {"x": "y"}


def on_a_terminal(code):
    """What a terminal and a log show of code whose error output goes to the log."""
    relay = f"import pty, sys; pty.spawn([sys.executable, '-c', {code!r}])"
    process = subprocess.run(
        [sys.executable, "-c", relay],
        env={**os.environ, "PYTHONPATH": str(stand_in.ROOT / "ffi")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    return process.stdout.replace("\r\n", "\n")


def test_what_the_user_should_know_reaches_a_terminal_past_the_frontend(tmp_path):
    log = tmp_path / "log"
    to_log = f"import os, sys; os.dup2(os.open({str(log)!r}, os.O_CREAT | os.O_WRONLY), 2)"
    lines = [f"[{done}/20] fwd_sm90: 3.1 s\n" for done in range(1, 21)]
    code = (
        f"{to_log}; import build_backend as b, time; b._tell('compiling'); "
        f"b._relay({lines!r}, time.monotonic())"
    )
    shown = on_a_terminal(code)
    assert log.read_text() == "jax_fa: compiling\n" + "".join(lines)
    told = [f"jax_fa: {done} of 20 kernels after 0 s  " for done in range(2, 21, 2)]
    assert shown.split("\n")[1:] == ["jax_fa: compiling  ", *told]


def test_a_refusal_has_no_traceback():
    code = "import build_backend as b; b.requested({'gpu': 'sm9'})"
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(stand_in.ROOT / "ffi")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert process.stderr.startswith("JAX_FA_GPU=sm9: 'sm9' is no GPU family.")
    assert process.stderr.count("\n") == 1
