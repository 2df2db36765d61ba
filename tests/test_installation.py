"""``python -m jax_fa``: what it says on a machine without a GPU, and with GPUs of several kinds."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jax_fa import __main__ as main
from jax_fa import bindings, gpus, installation
from jax_fa.variants import BY_NAME

HOPPER = gpus.Gpu("NVIDIA H200", "9.0")
OLDER = gpus.Gpu("Tesla T4", "7.5")


@pytest.fixture
def report(monkeypatch):
    def text(found, compiled=(), backend="gpu"):
        monkeypatch.setattr(gpus, "at_hand", lambda: found)
        monkeypatch.setattr(bindings, "compiled", lambda: frozenset(compiled))
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        monkeypatch.setattr(installation, "checkout", lambda: Path("/src/jax fa"))
        return main.report()

    return text


def compiled_for(family):
    return [name for name in BY_NAME if f"_{family}_" in name]


def test_without_a_gpu_nothing_is_missing(report):
    text = report((), backend="cpu")
    assert "GPUs: none" in text
    assert "GPU kernels in this installation: none" in text
    assert "runs unfused on this CPU: `mask_mod`" in text
    assert "pip install" not in text


def test_a_gpu_with_its_kernels_lists_what_falls_back(report):
    text = report((HOPPER,), compiled_for("sm90"))
    assert "GPU 0: NVIDIA H200, compute capability 9.0: family sm90" in text
    assert "GPU kernels in this installation: sm90 (90 variants)" in text
    assert re.search("runs unfused on this GPU of capability 9.0: float32; any other D, Dv;", text)
    assert "pip install" not in text


def test_a_gpu_without_its_kernels_gets_the_command_that_compiles_them(report):
    text = report((HOPPER, HOPPER), compiled_for("sm100"))
    assert "runs unfused on this GPU of capability 9.0: everything" in text
    command = "JAX_FA_GPU=sm90 pip install --force-reinstall --no-deps '/src/jax fa'"
    assert text.endswith(f"To compile the kernels of sm90 and install them:\n  {command}\n")


def test_a_gpu_of_an_unknown_family_has_no_command(report):
    text = report((OLDER,), compiled_for("sm90"))
    assert "GPU 0: Tesla T4, compute capability 7.5: no kernels exist for it" in text
    assert "runs unfused on this GPU of capability 7.5: everything" in text
    assert "pip install" not in text


def test_a_gpu_that_jax_does_not_use_is_pointed_out(report):
    assert "pip install -U 'jax[cuda13]'" in report((HOPPER,), compiled_for("sm90"), "cpu")


def test_it_runs_as_a_command():
    process = subprocess.run(
        [sys.executable, "-m", "jax_fa"], capture_output=True, text=True, check=True
    )
    assert process.stdout.startswith("jax_fa 0.1.0 in ")
    assert process.stderr == ""


@pytest.mark.parametrize(
    ("url", "known"),
    [
        ('{"url": "file://%s", "dir_info": {}}', True),
        ('{"url": "file://%s/jax_fa-0.1.0.whl", "archive_info": {}}', False),
        ('{"url": "https://example.org/%s"}', False),
        (None, False),
    ],
)
def test_the_checkout_is_where_pip_was_pointed(monkeypatch, url, known):
    root = Path(__file__).resolve().parent.parent

    class Distribution:
        def read_text(self, name):
            assert name == "direct_url.json"
            return url and url % root

    monkeypatch.setattr(installation.importlib.metadata, "distribution", lambda _: Distribution())
    installation.checkout.cache_clear()
    try:
        assert installation.checkout() == (root if known else None)
    finally:
        installation.checkout.cache_clear()
