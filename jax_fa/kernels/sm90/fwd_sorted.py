"""Hopper forward under a general mask: the kernel of ``fwd.py``, with blocks in another order."""

from collections.abc import Callable

from jax_fa.kernels.forward_host import forward_entry
from jax_fa.kernels.forward_work import Variant
from jax_fa.kernels.sm90 import fwd, fwd_order
from jax_fa.kernels.sm90.plan_sorted import sorted_plan
from jax_fa.spec.config_sm90 import HopperForward
from jax_fa.spec.key import KernelKey


def make_entry(key: KernelKey, config: HopperForward) -> Callable:
    """The flat host entry of one variant."""
    sorter = fwd_order if config.is_persistent else None
    variant = Variant(key, config, sorted_plan(key, config), sorter=sorter)
    return forward_entry(variant, fwd.launch)
