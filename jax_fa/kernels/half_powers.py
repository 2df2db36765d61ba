"""P in pairs of float16, for as long as a backward waits for dP.

They take half the room of floats. Rounded to bfloat16, P would raise the errors of dq and dk from
2.4e-3 to 2.9e-3 (relative, in the Euclidean norm). Float16 has three bits more; so that they also
serve small numbers, P is held times 2 ** ``SHIFT``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Int32

from jax_fa.kernels import primitives

TYPE = Float16
SHIFT = 12.0
"""P down to 2 ** -26 is a normal number. Scores so large that their rounding errors show make P
exceed 1; it may reach 16."""


@cute.jit
def pack(powers: cute.Tensor, halves: cute.Tensor) -> None:
    """Rounds ``powers``, in float32, to ``halves``, which hold 2 ** ``SHIFT`` times as much."""
    words = cute.recast_tensor(halves, Int32)
    for i in cutlass.range_constexpr(cute.size(words)):
        low, high = (powers[2 * i + j] * 2.0**SHIFT for j in range(2))
        words[i] = primitives.narrow_pair(low, high, TYPE)


@cute.jit
def unpack(halves: cute.Tensor, powers: cute.Tensor) -> None:
    """Does the opposite of ``pack``."""
    words = cute.recast_tensor(halves, Int32)
    for i in cutlass.range_constexpr(cute.size(words)):
        pair = primitives.widen(words[i], TYPE)
        for j in cutlass.range_constexpr(2):
            powers[2 * i + j] = pair[j] * 2.0**-SHIFT
