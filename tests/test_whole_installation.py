"""``pip install .`` from end to end, in an environment of its own, on machines with several GPUs.

pip, the backend, the ahead-of-time step with its cache, CMake and the linker are real. A driver,
the DSL and what it compiled are stand-ins (``stand_in``). Nothing is downloaded: build tools and
jax are those of this environment, and its C++ compiler does not optimize, which saves most of the
time.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from helpers import stand_in

from jax_fa.spec.arch import ARCHS
from jax_fa.spec.variants import families, of_families

pytest.importorskip("scikit_build_core")
pytest.importorskip("nanobind")

FAMILIES = [arch.name for arch in ARCHS]

INSTALLED = """
import json, pathlib, jax_fa
from jax_fa import _jax_fa
from jax_fa.runtime import bindings
from jax_fa.spec import ptx_archives
extension = pathlib.Path(_jax_fa.__file__)
ptx = ptx_archives.read_all(extension.parent / "ptx")
print(json.dumps([jax_fa.api.__file__, str(extension), sorted(bindings.compiled()), sorted(ptx)]))
"""


@pytest.fixture
def environment(tmp_path):
    """Variables of a build, whose ``python`` is that of a fresh virtual environment."""
    venv.create(tmp_path / "venv", symlinks=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    ours = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "of_the_tests.pth").write_text("\n".join(ours))
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')
    compiler.chmod(0o755)
    variables = {name: x for name, x in os.environ.items() if not name.startswith("JAX_FA")} | {
        "PATH": f"{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}",
        "CXX": str(compiler),
        "CUDA_VISIBLE_DEVICES": "",  # of a real driver, which the stand-in does not heed
        "LD_LIBRARY_PATH": "",
        "PYTHONPATH": str(stand_in.dsl(tmp_path / "dsl")),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    stand_in.fill_cache(tmp_path / "cache" / "jax_fa" / "aot", variables)
    return variables


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_pip_installs_the_kernels_of_the_gpus_at_hand(environment, tmp_path):
    hopper, blackwell, ultra, ampere, older = (
        {"LD_LIBRARY_PATH": str(stand_in.driver(tmp_path / f"{capability}", (capability,)))}
        for capability in (90, 100, 103, 86, 75)
    )
    pip = ["python", "-m", "pip", "install", "-v", "--no-index", "--no-deps"]
    pip += ["--no-build-isolation", f"--config-settings=build-dir={tmp_path / 'build'}"]

    def install(machine, *options):
        """Families of the kernels of a new installation, which are there with their PTX."""
        done = subprocess.run(
            [*pip, *options, str(stand_in.ROOT)],
            env={**environment, **machine},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        found = subprocess.check_output(
            ["python", "-c", INSTALLED], env={**environment, "PYTHONPATH": ""}, cwd=tmp_path
        )
        python_file, extension, compiled, ptx = json.loads(found)
        assert Path(extension).is_relative_to(tmp_path / "venv")
        assert Path(python_file).is_relative_to(
            stand_in.ROOT / "jax_fa" if "-e" in options else tmp_path / "venv"
        )
        assert ptx == compiled
        names = [arch.name for arch in families(compiled)]
        whole = sorted(variant.name for variant in of_families(names))
        assert compiled == whole
        told = f"jax_fa: compiled the {len(whole)} GPU kernels of {', '.join(names)} in "
        assert (told in done.stdout) == bool(names), done.stdout
        return names

    assert install(hopper) == ["sm90"]
    assert install(blackwell, "-e") == ["sm100"]
    assert install(ultra) == ["sm103"]
    assert install(ampere) == ["sm86"]
    assert install(older) == install({}) == []
    assert install(hopper | {"JAX_FA_GPU": "none"}) == []
    assert install(hopper | {"JAX_FA_GPU": "none"}, "--config-settings=gpu=all") == FAMILIES
