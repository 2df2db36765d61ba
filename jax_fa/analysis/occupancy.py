"""Occupancy: how many CTAs of a kernel one SM holds at a time. Computed from a table of limits."""

from __future__ import annotations

from typing import NamedTuple

from jax_fa.kernels.edges import REGISTERS_PER_SM, WARP
from jax_fa.spec.band import ceil_div


class Limits(NamedTuple):
    """The limits of one SM.

    Attributes:
        warps: resident at a time.
        ctas: resident at a time.
        shared_bytes: shared memory of all CTAs, with what the system takes of it.
    """

    warps: int
    ctas: int
    shared_bytes: int


LIMITS = {
    "8.0": Limits(64, 32, 164 * 1024),
    "8.6": Limits(48, 16, 100 * 1024),
    "8.7": Limits(48, 16, 164 * 1024),
    "8.9": Limits(48, 24, 100 * 1024),
    "9.0": Limits(64, 32, 228 * 1024),
    "10.0": Limits(64, 32, 228 * 1024),
    "10.3": Limits(64, 32, 228 * 1024),
    "11.0": Limits(48, 24, 228 * 1024),
    "12.0": Limits(48, 24, 100 * 1024),
    "12.1": Limits(48, 24, 100 * 1024),
}
"""By compute capability: CUDA Programming Guide, "Compute Capabilities", technical
specifications."""

REGISTER_UNIT = 8
"""A thread is given a multiple of so many registers."""
SYSTEM_BYTES = 1024
"""Shared memory that the system takes for each CTA."""


class Launch(NamedTuple):
    """What one CTA takes.

    Attributes:
        threads: threads.
        registers: registers of a thread.
        shared_bytes: static and dynamic shared memory.
    """

    threads: int
    registers: int
    shared_bytes: int


class Occupancy(NamedTuple):
    """What an SM holds.

    Attributes:
        ctas: CTAs at a time.
        bound: what keeps it from holding more: "warps", "CTAs", "shared memory" or "registers".
    """

    ctas: int
    bound: str


def occupancy(capability: str, launch: Launch) -> Occupancy:
    """The CTAs of ``launch`` that an SM of a key of ``LIMITS`` holds."""
    limits = LIMITS[capability]
    registers = ceil_div(launch.registers, REGISTER_UNIT) * REGISTER_UNIT
    by_limit = {
        "shared memory": limits.shared_bytes // (launch.shared_bytes + SYSTEM_BYTES),
        "registers": REGISTERS_PER_SM // (registers * launch.threads),
        "warps": limits.warps // (launch.threads // WARP),
        "CTAs": limits.ctas,
    }
    bound = min(by_limit, key=by_limit.__getitem__)
    return Occupancy(by_limit[bound], bound)
