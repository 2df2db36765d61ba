"""What mma.sync kernels of every kind do before they start on their tiles."""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from jax_fa.kernels import dense_mask, segments


@cute.jit
def narrow(
    variant: cutlass.Constexpr, x: Any, scan: cutlass.Constexpr[Callable[..., None]]
) -> None:
    """Runs ``scan(variant, x)`` if it is of use; its result is visible to the whole CTA."""
    if const_expr(variant.is_general):
        if dense_mask.narrows(x.scalars):
            if cute.arch.thread_idx()[0] == 0:
                segments.reset(x.smem.found)
            cute.arch.sync_threads()
            scan(variant, x)
            cute.arch.sync_threads()
