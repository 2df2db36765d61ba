"""The settings of conftest.py are in place before those read them whom they are for."""

import gc
import weakref
from pathlib import Path

import conftest
import pytest


class Node:
    """Something that can be in a circle."""

    itself: "Node"


LEFT = Node()


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


def test_what_tests_left_is_not_looked_through_again():
    assert not any(x is LEFT for x in gc.get_objects())


def test_garbage_is_collected_once_a_process_has_grown(monkeypatch):
    garbage = Node()
    garbage.itself, seen = garbage, weakref.ref(garbage)
    del garbage
    gc.freeze()
    gc.collect()
    assert seen() is not None
    monkeypatch.setattr(conftest, "_resident", conftest._resident_bytes() - conftest.GROWTH - 1)
    conftest.set_aside_what_is_left()
    assert seen() is None
