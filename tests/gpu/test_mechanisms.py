"""What the kernels of CTA pairs rely on, on the GPU at hand: ``tests/helpers/mechanisms.py``.

Needs a GPU of Hopper or later and its driver, but neither JAX nor the extension:

    python -m pytest --noconftest tests/gpu/test_mechanisms.py
"""

import subprocess
import sys

import driver
import pytest

RUNS = 50

if driver.generation() < 9:
    pytest.skip("needs a GPU of Hopper or later", allow_module_level=True)


@pytest.mark.parametrize("name", driver.MECHANISMS)
def test_mechanism_works_on_the_gpu(name):
    command = [sys.executable, driver.__file__, str(RUNS), name]
    # A process of its own: a kernel that hangs ends with it.
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
