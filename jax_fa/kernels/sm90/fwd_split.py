"""Hopper forward in parts: several CTAs share the keys of a tile, and heads share tiles."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute

from jax_fa.kernels import combine
from jax_fa.kernels.forward_host import ForwardCall, forward_entry
from jax_fa.kernels.forward_work import Variant
from jax_fa.kernels.packing_host import forward_granules, forward_packing
from jax_fa.kernels.sm90 import fwd
from jax_fa.kernels.sm90.fwd_work import make_layouts
from jax_fa.kernels.sm90.plan import forward_plan
from jax_fa.spec.config_sm90 import HopperForward
from jax_fa.spec.key import KernelKey


def make_entry(key: KernelKey, config: HopperForward) -> Callable:
    """The flat host entry of one variant."""
    return forward_entry(Variant(key, config, forward_plan(key, config)), launch)


@cute.jit
def launch(variant: cutlass.Constexpr, call: ForwardCall) -> None:
    """Launches the kernel, then the one that merges the parts it wrote."""
    packing = forward_packing(variant, call)
    granules = forward_granules(variant, call, make_layouts(variant).q)
    fwd.launch(variant, call, packing, granules)
    combine.merge_parts(variant, call)
