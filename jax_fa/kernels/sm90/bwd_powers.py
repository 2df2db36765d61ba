"""P in float16 (``half_powers.py``), for as long as a step waits for the registers of dP."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from jax_fa.kernels import fragments, primitives
from jax_fa.kernels.half_powers import SHIFT, TYPE


class Rounded(NamedTuple):
    """What becomes an operand of products, in the element type."""

    p: cute.Tensor
    ds: cute.Tensor


@cute.jit
def exponentiate(
    variant: cutlass.Constexpr,
    s: cute.Tensor,
    lse2: cute.Tensor,
    score_log2: Float32,
    halves: cute.Tensor,
) -> None:
    """Computes ``halves``, P in float16, from the scores.

    Args:
        variant: the variant.
        s: the scores.
        lse2: LSE of this thread's columns in base 2: (2, groups), in shared memory.
        score_log2: factor that turns ``s`` into logits in base 2.
        halves: P times 2 ** ``SHIFT``.
    """
    by_key, words = fragments.by_row(s), cute.recast_tensor(halves, Int32)
    for group in cutlass.range_constexpr(cute.size(by_key, mode=[1]) // 2):
        pair = lse2[None, group].load()
        subtrahends = [pair[i] - SHIFT for i in range(2)]
        for r in cutlass.range_constexpr(fragments.ROWS):
            scores = [by_key[r, 2 * group + i] for i in range(2)]
            low, high = (
                cute.math.exp2(scores[i] * score_log2 - subtrahends[i], fastmath=True)
                for i in range(2)
            )
            words[fragments.ROWS * group + r] = primitives.narrow_pair(low, high, TYPE)


@cute.jit
def differentiate(
    variant: cutlass.Constexpr,
    delta: cute.Tensor,
    dp: cute.Tensor,
    halves: cute.Tensor,
    rounded: Rounded,
) -> None:
    """Computes P and dS = P (dP - delta), both ``rounded``; ``delta`` is as ``lse2`` above."""
    by_key, words = fragments.by_row(dp), cute.recast_tensor(halves, Int32)
    p_words, ds_words = (cute.recast_tensor(tensor, Int32) for tensor in rounded)
    for group in cutlass.range_constexpr(cute.size(by_key, mode=[1]) // 2):
        pair = delta[None, group].load()
        for r in cutlass.range_constexpr(fragments.ROWS):
            word = fragments.ROWS * group + r
            p = [half * 2.0**-SHIFT for half in primitives.widen(words[word], TYPE)]
            ds = [p[i] * (by_key[r, 2 * group + i] - pair[i]) for i in range(2)]
            p_words[word] = primitives.narrow_pair(p[0], p[1], variant.dtype)
            ds_words[word] = primitives.narrow_pair(ds[0], ds[1], variant.dtype)
