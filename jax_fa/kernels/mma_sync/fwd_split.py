"""Forward by mma.sync in parts: several CTAs split the keys of a tile, and heads share tiles."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute

from jax_fa.kernels import combine
from jax_fa.kernels.forward_host import ForwardCall, forward_entry
from jax_fa.kernels.forward_work import Variant
from jax_fa.kernels.mma_sync import fwd
from jax_fa.kernels.mma_sync.plan import forward_plan
from jax_fa.kernels.packing_host import forward_packing
from jax_fa.spec.config_mma_sync import MmaSyncForward
from jax_fa.spec.key import KernelKey


def make_entry(key: KernelKey, config: MmaSyncForward) -> Callable:
    """The flat host entry of one variant."""
    return forward_entry(Variant(key, config, forward_plan(key, config)), launch)


@cute.jit
def launch(variant: cutlass.Constexpr, call: ForwardCall) -> None:
    """Launches the kernel, and the one that merges the parts that it writes."""
    fwd.launch(variant, call, forward_packing(variant, call))
    combine.merge_parts(variant, call)
