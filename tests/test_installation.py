"""``python -m jax_fa``: what it says on a machine without a GPU, and with GPUs of several kinds."""

import json
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jaxlib
import pytest

import jax_fa
from jax_fa import __main__ as main
from jax_fa.runtime import bindings, gpus, installation
from jax_fa.spec.variants import of_families

HOPPER = gpus.Gpu("NVIDIA H200", "9.0")
ULTRA = gpus.Gpu("NVIDIA B300", "10.3")
OLDER = gpus.Gpu("Tesla T4", "7.5")
PACKAGE = "/venv/lib/python3.12/site-packages/jax_fa"

NO_GPU = """\
jax_fa 0.1.0 in /venv/lib/python3.12/site-packages/jax_fa
Python 3.12.4, jax 0.11.2, jaxlib 0.11.2, Linux x86_64
JAX computes on: cpu
GPUs: none (no NVIDIA driver shows one)
GPU kernels installed: none
Runs unfused on the CPU: traced `scale`, float64, `mask_mod` of packed sequences
What runs unfused gives the same results, slower.
"""

GPU_AND_KERNELS = """\
jax_fa 0.1.0 in /venv/lib/python3.12/site-packages/jax_fa
Python 3.12.4, jax 0.11.2, jaxlib 0.11.2, Linux x86_64
JAX computes on: gpu
GPUs: 8 x NVIDIA H200, compute capability 9.0: family sm90
GPU kernels installed: sm90, 152 variants: bfloat16 and float16, D or D/Dv of 64, 96, 128, \
192/128, 256
Runs unfused on the CPU: traced `scale`, float64, `mask_mod` of packed sequences
Runs unfused on NVIDIA H200: float32; D or Dv of more than 256; traced `scale`, float64, \
`mask_mod` of packed sequences
What runs unfused gives the same results, slower.
"""

GPU_AND_NO_KERNELS = """\
jax_fa 0.1.0 in /venv/lib/python3.12/site-packages/jax_fa
Python 3.12.4, jax 0.11.2, jaxlib 0.11.2, Linux x86_64
JAX computes on: gpu
GPUs: 8 x NVIDIA H200, compute capability 9.0: family sm90
GPU kernels installed: none
Runs unfused on the CPU: traced `scale`, float64, `mask_mod` of packed sequences
Runs unfused on NVIDIA H200: everything
What runs unfused gives the same results, slower.
To compile the kernels of sm90 and install them:
  JAX_FA_GPU=sm90 pip install --force-reinstall --no-deps '/src/jax fa'
"""

GPU_OF_AN_UNKNOWN_FAMILY = """\
jax_fa 0.1.0 in /venv/lib/python3.12/site-packages/jax_fa
Python 3.12.4, jax 0.11.2, jaxlib 0.11.2, Linux x86_64
JAX computes on: gpu
GPUs: 1 x Tesla T4, compute capability 7.5: no kernels exist for it, only for 9.0, 10.0, 10.3, \
11.0, 8.0, 8.7, 8.6, 8.9, 12.0, 12.1
GPU kernels installed: none
Runs unfused on the CPU: traced `scale`, float64, `mask_mod` of packed sequences
Runs unfused on Tesla T4: everything
What runs unfused gives the same results, slower.
"""


@pytest.fixture
def report(monkeypatch):
    def text(found, compiled=(), backend="gpu", source="/src/jax fa"):
        monkeypatch.setattr(gpus, "at_hand", lambda: found)
        monkeypatch.setattr(bindings, "compiled", lambda: frozenset(compiled))
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        monkeypatch.setattr(installation, "origin", lambda: installation.Origin(source))
        monkeypatch.setattr(platform, "python_version", lambda: "3.12.4")
        monkeypatch.setattr(platform, "system", lambda: "Linux")
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(jax, "__version__", "0.11.2")
        monkeypatch.setattr(jaxlib, "__version__", "0.11.2")
        monkeypatch.setattr(jax_fa, "__file__", f"{PACKAGE}/__init__.py")
        return main.report()

    return text


def compiled_for(family):
    return [variant.name for variant in of_families([family])]


EVERY_CASE = {
    "no GPU": ((), (), "cpu", NO_GPU),
    "GPU and kernels": ((HOPPER,) * 8, compiled_for("sm90"), "gpu", GPU_AND_KERNELS),
    "GPU and no kernels": ((HOPPER,) * 8, (), "gpu", GPU_AND_NO_KERNELS),
    "GPU of an unknown family": ((OLDER,), (), "gpu", GPU_OF_AN_UNKNOWN_FAMILY),
}


@pytest.mark.parametrize("case", EVERY_CASE)
def test_the_whole_output(report, case):
    found, compiled, backend, text = EVERY_CASE[case]
    assert report(found, compiled, backend) == text


def test_kernels_of_another_family_are_none_for_this_gpu(report):
    text = report((HOPPER, OLDER), compiled_for("sm100"))
    assert "GPU kernels installed: sm100, 130 variants" in text
    assert "Runs unfused on NVIDIA H200: everything\n" in text
    assert "To compile the kernels of sm90 and install them:\n  JAX_FA_GPU=sm90 pip" in text


def test_a_family_that_borrows_kernels_is_installed_with_them(report):
    text = report((ULTRA,), compiled_for("sm103"))
    assert (
        "compute capability 10.3: family sm103\nGPU kernels installed: sm103, 130 variants" in text
    )
    assert "sm100" not in text and "To compile" not in text
    assert "JAX_FA_GPU=sm103 pip" in report((ULTRA,), compiled_for("sm100"))


def test_without_the_sources_the_command_is_for_a_checkout(report):
    text = report((HOPPER,), source=None)
    assert "install them in a checkout of jax_fa:\n" in text
    assert text.endswith("pip install --force-reinstall --no-deps .\n")


def test_a_gpu_that_jax_does_not_use_is_pointed_out(report):
    assert "pip install -U 'jax[cuda13]'" in report((HOPPER,), compiled_for("sm90"), "cpu")


def test_it_runs_as_a_command():
    process = subprocess.run(
        [sys.executable, "-m", "jax_fa"], capture_output=True, text=True, check=True
    )
    assert process.stdout.startswith("jax_fa 0.1.0 in ")
    assert process.stderr == ""


ROOT = Path(__file__).resolve().parent.parent
FOLDER = f"file://{ROOT}"
REPOSITORY = {"url": "https://host/jax_fa", "vcs_info": {"vcs": "git", "commit_id": "3c1"}}
PIP, UV = "pip install --force-reinstall", "uv pip install --reinstall-package jax_fa"


@pytest.mark.parametrize(
    ("record", "installer", "command"),
    [
        ({"url": FOLDER, "dir_info": {}}, "pip", f"{PIP} --no-deps {ROOT}"),
        ({"url": FOLDER, "dir_info": {"editable": True}}, "pip", f"{PIP} --no-deps -e {ROOT}"),
        ({"url": FOLDER, "dir_info": {}}, "uv", f"{UV} --no-deps {ROOT}"),
        (REPOSITORY, "pip", f"{PIP} --no-deps git+https://host/jax_fa@3c1"),
        ({"url": f"{FOLDER}/jax_fa.whl", "archive_info": {}}, "pip", f"{PIP} --no-deps ."),
        ({"url": "https://host/jax_fa.whl", "archive_info": {}}, "pip", f"{PIP} --no-deps ."),
        (None, "pip", f"{PIP} --no-deps ."),
    ],
    ids=["folder", "editable", "uv", "repository", "file", "URL", "index"],
)
def test_the_command_installs_again_as_it_was_installed(monkeypatch, record, installer, command):
    files = {"direct_url.json": record and json.dumps(record), "INSTALLER": f"{installer}\n"}
    distribution = SimpleNamespace(read_text=files.get)
    monkeypatch.setattr(installation.importlib.metadata, "distribution", lambda _: distribution)
    installation.origin.cache_clear()
    try:
        assert installation.command(["sm90", "sm100"]) == f"JAX_FA_GPU=sm90,sm100 {command}"
        place = " in a checkout of jax_fa" if command.endswith(" .") else ""
        assert installation.where() == place
    finally:
        installation.origin.cache_clear()
