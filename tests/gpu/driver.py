"""Launches small kernels through the driver, which compiles their PTX. Needs NumPy alone.

    python tests/gpu/driver.py RUNS NAME...

runs kernels of ``mechanisms`` that often and ends with 1 at the first result that is not expected.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent.parent))

from helpers.mechanisms import MECHANISMS  # noqa: E402
from helpers.ptx_units import Unit  # noqa: E402

_CAPABILITY_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR


def generation() -> int:
    """Major compute capability of the first GPU, 0 if there is none."""
    major = ctypes.c_int(0)
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    if library.cuInit(0) or library.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, 0):
        return 0
    return major.value


class Driver:
    """As much of libcuda as launches of a ``Unit`` take."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self("cuCtxSetCurrent", context)

    def __call__(self, name: str, *arguments: Any) -> None:
        """Calls a function of the driver."""
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} answered {status}")

    def run(self, unit: Unit) -> np.ndarray:
        """The result of one launch."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuModuleLoadData", ctypes.byref(module), unit.ptx.encode())
        self("cuModuleGetFunction", ctypes.byref(function), module, b"test")
        pointers = []
        for array in unit.arrays:
            pointer, size = ctypes.c_uint64(), ctypes.c_size_t(array.nbytes)
            self("cuMemAlloc_v2", ctypes.byref(pointer), size)
            self("cuMemcpyHtoD_v2", pointer, array.ctypes.data_as(ctypes.c_void_p), size)
            pointers.append(pointer)
        addresses = [ctypes.cast(ctypes.byref(p), ctypes.c_void_p) for p in pointers]
        packed = (ctypes.c_void_p * len(addresses))(*addresses)
        extents = (unit.grid, 1, 1, unit.block, 1, 1, 0)
        self("cuLaunchKernel", function, *extents, None, packed, None)
        result = np.zeros_like(unit.arrays[-1])
        size = ctypes.c_size_t(result.nbytes)
        self("cuMemcpyDtoH_v2", result.ctypes.data_as(ctypes.c_void_p), pointers[-1], size)
        for pointer in pointers:
            self("cuMemFree_v2", pointer)
        self("cuModuleUnload", module)
        return result


def main() -> None:
    """The command line."""
    driver, runs = Driver(), int(sys.argv[1])
    for name in sys.argv[2:]:
        unit, expected = MECHANISMS[name]
        for run in range(runs):
            got = driver.run(unit)
            if not np.array_equal(got, expected):
                wrong = np.flatnonzero(got != expected)
                first = [(int(i), int(got[i]), int(expected[i])) for i in wrong[:4]]
                sys.exit(
                    f"{name}, run {run}: {len(wrong)} of {got.size} words differ; (place, got, "
                    f"expected): {first}"
                )


if __name__ == "__main__":
    main()
