"""Blackwell forward in parts: several CTAs share the keys of a tile."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute

from jax_fa.kernels import combine
from jax_fa.kernels.forward_host import ForwardCall, forward_entry
from jax_fa.kernels.forward_work import Variant
from jax_fa.kernels.sm100 import fwd
from jax_fa.kernels.sm100.plan import forward_plan
from jax_fa.spec.config_sm100 import BlackwellForward
from jax_fa.spec.key import KernelKey


def make_entry(key: KernelKey, config: BlackwellForward) -> Callable:
    """The flat host entry of one variant."""
    return forward_entry(Variant(key, config, forward_plan(key, config)), launch)


@cute.jit
def launch(variant: cutlass.Constexpr, call: ForwardCall) -> None:
    """Launches the forward kernel, and the kernel that merges its partial results."""
    fwd.launch(variant, call)
    combine.merge_parts(variant, call)
