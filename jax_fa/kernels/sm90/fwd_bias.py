"""Hopper forward with a bias: the kernel of ``fwd.py`` plus the steps of ``fragment_bias.py``."""

from collections.abc import Callable

from jax_fa.kernels import fragment_bias
from jax_fa.kernels.forward_host import forward_entry
from jax_fa.kernels.forward_work import Variant
from jax_fa.kernels.sm90 import fwd
from jax_fa.kernels.sm90.plan import forward_plan
from jax_fa.spec.config_sm90 import HopperForward
from jax_fa.spec.key import KernelKey


def make_entry(key: KernelKey, config: HopperForward) -> Callable:
    """The flat host entry of one variant."""
    variant = Variant(key, config, forward_plan(key, config), fragment_bias)
    return forward_entry(variant, fwd.launch)
