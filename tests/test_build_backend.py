"""What an installation compiles: JAX_FA_GPU, the GPUs of a driver, and what the DSL allows."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jax_fa import aot
from jax_fa.variants import ARCHS

ROOT = Path(__file__).parent.parent
FAMILIES = [arch.name for arch in ARCHS]

DRIVER = """
#include <string.h>
static const int capabilities[] = {%s};
int cuInit(unsigned flags) { return %d; }
int cuDeviceGetCount(int* count) { *count = sizeof capabilities / sizeof *capabilities; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char* name, int size, int device) { strncpy(name, "Stand-in", size); return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? capabilities[device] / 10 : capabilities[device] %% 10;
  return attribute != 75 && attribute != 76;
}
"""

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
pytest.importorskip("scikit_build_core")


def stand_in_driver(folder, capabilities, failure=0):
    """A folder with a libcuda.so.1 that shows GPUs of these capabilities, times ten."""
    source = folder / "driver.c"
    source.write_text(DRIVER % (", ".join(map(str, capabilities)), failure))
    library = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return folder


def ask(hook, *, driver=None, settings=None, setup="", **environment):
    """What a hook of the backend returns in a process of its own, and what it says."""
    code = (
        "import json, sys; import build_backend as b\n"
        f"{setup}\n"
        f"try: print(json.dumps({hook}))\n"
        "except b.BuildError as error: print(json.dumps(str(error)))"
    )
    variables = {k: v for k, v in os.environ.items() if k != "JAX_FA_GPU"} | environment
    variables["PYTHONPATH"] = str(ROOT / "ffi")
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
    [((90,), ["sm90"]), ((100,), ["sm100"]), ((90, 90, 100), ["sm90", "sm100"]), ((86,), [])],
)
def test_the_families_that_the_driver_shows_are_compiled(tmp_path, capabilities, families):
    driver = stand_in_driver(tmp_path, capabilities)
    got, said = ask(REQUESTED, driver=driver)
    assert got == families
    assert ("Stand-in has compute capability 8.6; kernels exist for 9.0" in said) == (not families)
    needed, _ = ask(REQUIRES, driver=driver)
    assert needed == ([aot.DSL_REQUIREMENT] if families else [])


@needs_compiler
def test_a_driver_that_fails_counts_as_none(tmp_path):
    driver = stand_in_driver(tmp_path, (90,), failure=100)
    assert ask(REQUESTED, driver=driver) == ([], "")


@needs_compiler
@pytest.mark.parametrize(
    ("asked", "families"), [("none", []), ("all", FAMILIES), ("sm100, sm90", ["sm100", "sm90"])]
)
def test_the_variable_overrides_the_driver(tmp_path, asked, families):
    driver = stand_in_driver(tmp_path, (90,))
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
        (NO_DSL, f"{aot.DSL_REQUIREMENT} is not installed in this build environment"),
    ],
    ids=["no wheels", "no isolation"],
)
def test_without_the_dsl_the_build_goes_on_and_says_so_unless_a_family_was_named(
    tmp_path, setup, reason
):
    driver = stand_in_driver(tmp_path, (90,))
    got, said = ask(LINKED, driver=driver, setup=setup)
    assert got == OFF
    assert said.startswith("jax_fa: building without the GPU kernels of sm90: " + reason)
    assert said.count("\n") == 1
    assert reason in ask(LINKED, setup=setup, JAX_FA_GPU="sm90")[0]


@needs_compiler
def test_a_platform_without_wheels_of_the_dsl_does_not_ask_for_it(tmp_path):
    driver = stand_in_driver(tmp_path, (90,))
    assert ask(REQUIRES, driver=driver, setup=NO_WHEELS)[0] == []
    refused, _ = ask(REQUIRES, setup=NO_WHEELS, JAX_FA_GPU="sm90")
    assert f"but {aot.DSL_REQUIREMENT} has wheels for CPython 3.10 to 3.14" in refused


def test_a_machine_without_a_gpu_compiles_nothing():
    assert ask(REQUIRES) == ([], "")
    assert ask(LINKED) == (OFF, "")


def test_hooks_of_scikit_build_core_do_not_see_the_setting():
    got, _ = ask("b._hook(lambda a, s: s)('wheels', {'gpu': 'none', 'x': 'y'})")
    assert got == {"x": "y"}
