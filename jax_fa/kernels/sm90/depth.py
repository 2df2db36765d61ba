"""Products over head dimensions, of which narrow heads fill no more than half."""

import cutlass
import cutlass.cute as cute

from jax_fa.kernels import fragments


@cute.jit
def multiply(
    mma: cutlass.Constexpr, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, columns: cutlass.Int32
) -> None:
    """Issues ``acc = A B`` over the first half of the columns, if no more are used, or all."""
    half = cute.size(a, mode=[2]) // 2  # in instructions of 16 columns
    divided, first = (None, None, half), (None, None, (None, 0))
    half_a, half_b = [cute.logical_divide(x, divided)[first] for x in (a, b)]
    if columns > half * 16:
        fragments.multiply(mma, acc, a, b, False)
    else:
        fragments.multiply(mma, acc, half_a, half_b, False)
