"""Hopper forward with a bias: the kernel of ``fwd.py`` with what ``fwd_bias_roles.py`` adds."""

from collections.abc import Callable

from jax_fa.kernels.forward_host import forward_entry
from jax_fa.kernels.forward_work import Variant
from jax_fa.kernels.sm90 import fwd, fwd_bias_roles
from jax_fa.kernels.sm90.plan_bias import biased_plan
from jax_fa.spec.config_sm90 import HopperForward
from jax_fa.spec.key import KernelKey


def make_entry(key: KernelKey, config: HopperForward) -> Callable:
    """The flat host entry of one variant."""
    variant = Variant(key, config, biased_plan(key, config), fwd_bias_roles)
    return forward_entry(variant, fwd.launch)
