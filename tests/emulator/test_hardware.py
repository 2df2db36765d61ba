"""The emulator against a recorded H200: every bit of every result is the same."""

import struct

import numpy as np
import pytest
from helpers import hardware, hardware_units
from helpers.hardware import Recorded
from helpers.mechanisms import MECHANISMS

from jax_fa.emulator import Launch, Memory, Options, emulate

RESULTS = np.load(hardware.FOLDER / "results.npz")
UNITS = np.load(hardware.FOLDER / "units.npz")


def difference(got, wanted):
    """How many of the elements differ, and by how much of the largest."""
    got, wanted = (x.view(np.int16) if x.itemsize == 2 else x.view(np.int32) for x in (got, wanted))
    apart = got.astype(np.int64) - wanted
    first = np.flatnonzero(apart)[:3]
    places = ", ".join(f"{got[i]:#x} instead of {wanted[i]:#x} at {i}" for i in first)
    return f"{np.mean(apart != 0):.2%} of the elements differ, such as {places}"


@pytest.mark.parametrize("dtype, case", hardware.CASES, ids=lambda x: str(x))
def test_kernels_compute_the_same_bits(dtype, case):
    for name, array in hardware.emulated(case, dtype).items():
        got = Recorded.of(array)
        wanted = Recorded(RESULTS[f"{case}.{name}"], int(RESULTS[f"{case}.{name}.crc"]))
        assert got.crc == wanted.crc, f"{name}: {difference(got.some, wanted.some)}"


def emulated(unit, seed=0, options=None):
    """The result of one launch."""
    arrays = [array.copy() for array in unit.arrays]
    memory = Memory()
    addresses = [memory.add(str(index), array) for index, array in enumerate(arrays)]
    params = tuple(struct.pack("<Q", address) for address in addresses)
    launch = Launch((unit.grid, 1, 1), (unit.block, 1, 1), params, cluster=(unit.cluster, 1, 1))
    emulate(unit.ptx, launch, memory, seed=seed, options=options or Options())
    return arrays[-1]


@pytest.mark.parametrize("name", hardware_units.UNITS)
def test_instructions_compute_the_same_bits(name):
    got, wanted = emulated(hardware_units.UNITS[name]).reshape(-1), UNITS[name].reshape(-1)
    assert np.array_equal(got, wanted), difference(got, wanted)


@pytest.mark.parametrize("name", MECHANISMS)
def test_mechanisms_of_cta_pairs_work_under_every_schedule(name):
    """``tests/gpu/test_mechanisms.py`` is the same on a GPU."""
    unit, expected = MECHANISMS[name]
    warps = unit.block // 32
    for completion in ("eager", "lazy", "random"):
        for starved in (None, *range(0, warps, warps // 6 + 1)):
            options = Options(completion=completion, starved=starved, resident=unit.grid)
            np.testing.assert_array_equal(emulated(unit, 7, options), expected)


def test_inputs_are_those_of_the_recording():
    """Generators may change with numpy; then the recording has to be made anew."""
    assert hardware.checksum() == RESULTS["inputs.crc"]
