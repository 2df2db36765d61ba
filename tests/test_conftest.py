"""The settings of conftest.py are in place before those read them whom they are for."""

from pathlib import Path

import conftest
import pytest


def test_numpy_was_loaded_after_the_number_of_its_threads_was_set():
    assert not conftest.NUMPY_CAME_FIRST


@pytest.mark.parametrize(
    "name, kept",
    [
        ("test_forward", True),
        ("test_sharding", False),
        ("test_parallel", False),
        ("test_modes", False),
        ("test_demo", False),
        ("test_eager", False),
    ],
)
def test_programs_of_several_devices_are_compiled_anew(name, kept):
    source = (Path(__file__).parent / f"{name}.py").read_text()
    assert kept == (conftest.SEVERAL_DEVICES.search(source) is None)
