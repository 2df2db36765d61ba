"""Hopper forward with a bias: the kernel of ``fwd.py`` with what another module adds.

``fwd_bias_product.py`` where the tensor core adds the bias, otherwise ``fwd_bias_roles.py``.
"""

from collections.abc import Callable

from jax_fa.kernels.forward_host import forward_entry
from jax_fa.kernels.forward_work import Variant
from jax_fa.kernels.sm90 import fwd, fwd_bias_product, fwd_bias_roles
from jax_fa.kernels.sm90.plan_bias import biased_plan
from jax_fa.spec.config_sm90 import HopperForward
from jax_fa.spec.key import KernelKey


def make_entry(key: KernelKey, config: HopperForward) -> Callable:
    """The flat host entry of one variant."""
    bias = fwd_bias_product if key.multiplies_bias else fwd_bias_roles
    return forward_entry(Variant(key, config, biased_plan(key, config), bias), fwd.launch)
