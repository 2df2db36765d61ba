"""The GPUs of this machine, as their driver reports them: needs neither CUDA nor JAX."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

# CUdevice_attribute of cuda.h.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


class Gpu(NamedTuple):
    """One GPU.

    Attributes:
        name: as the driver gives it, such as "NVIDIA H200".
        capability: compute capability, such as "9.0".
    """

    name: str
    capability: str


def at_hand() -> tuple[Gpu, ...]:
    """Every GPU that programs on this machine may use; none where there is no driver.

    ``CUDA_VISIBLE_DEVICES`` applies. A driver that fails counts as none: a build continues without
    kernels, and JAX reports what is wrong.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    gpus = (_describe(driver, ordinal) for ordinal in range(count.value))
    return tuple(gpu for gpu in gpus if gpu is not None)


def _describe(driver: ctypes.CDLL, ordinal: int) -> Gpu | None:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    failures = (
        driver.cuDeviceGet(ctypes.byref(device), ordinal),
        driver.cuDeviceGetName(name, len(name), device),
        driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device),
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device),
    )
    if any(failures):
        return None
    return Gpu(name.value.decode(errors="replace"), f"{major.value}.{minor.value}")
