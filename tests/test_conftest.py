"""The settings of conftest.py are in place before those read them whom they are for."""

import conftest


def test_numpy_was_loaded_after_the_number_of_its_threads_was_set():
    assert not conftest.NUMPY_CAME_FIRST
