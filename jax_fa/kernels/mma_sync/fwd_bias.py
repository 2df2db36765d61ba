"""Forward by mma.sync with a bias: ``fwd.py`` with the steps of ``fragment_bias.py`` added."""

from collections.abc import Callable

from jax_fa.kernels import fragment_bias
from jax_fa.kernels.forward_host import forward_entry
from jax_fa.kernels.forward_work import Variant
from jax_fa.kernels.mma_sync import fwd
from jax_fa.kernels.mma_sync.plan import forward_plan
from jax_fa.spec.config_mma_sync import MmaSyncForward
from jax_fa.spec.key import KernelKey


def make_entry(key: KernelKey, config: MmaSyncForward) -> Callable:
    """The flat host entry of one variant."""
    variant = Variant(key, config, forward_plan(key, config), fragment_bias)
    return forward_entry(variant, fwd.launch)
