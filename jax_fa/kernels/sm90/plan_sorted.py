"""What sorting blocks of rows adds to the plan of the Hopper forward: places for their numbers."""

from __future__ import annotations

from dataclasses import replace

from jax_fa.kernels.edges import Buffer, Plan, check
from jax_fa.kernels.sm90.plan import forward_plan
from jax_fa.spec.config_sm90 import HopperForward
from jax_fa.spec.key import KernelKey

MAX_BLOCKS = 256
"""Blocks of a head that there is room to sort; a thread sorts one."""


def sorted_plan(key: KernelKey, config: HopperForward) -> Plan:
    """The checked plan of the kernel, which sorts if a CTA works on many tiles."""
    plan = forward_plan(key, config)
    if config.is_persistent:
        plan = replace(plan, buffers=(*plan.buffers, Buffer("sorted", 2 * MAX_BLOCKS)))
    check(plan)
    return plan
