"""Statistics of a step's queries, as the consumers of the Hopper backward load them."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from jax_fa.kernels import fragment_keys
from jax_fa.kernels.sm90.bwd_work import BackwardConsumer, BackwardVariant


def statistic(variant: BackwardVariant, c: BackwardConsumer, stats: cute.Tensor) -> cute.Tensor:
    """``stats`` of this thread's columns, loaded to registers if there is room, else a view."""
    if variant.config.loads_statistics:
        return fragment_keys.loaded_columns(c, stats, c.s)
    return fragment_keys.own_columns(c, stats)


@cute.jit
def loaded_early(variant: cutlass.Constexpr, c: BackwardConsumer, stats: cute.Tensor) -> Any:
    """The first pairs of this thread's columns of ``stats``, in registers; None if none are early.

    Called once S is there, before it is masked. The compiler moves no load from behind the mask to
    before it, and there, nothing hides the latency of the first.
    """
    early, number = None, variant.config.early_statistics
    if const_expr(number > 0):
        early = fragment_keys.loaded_columns(c, stats, _groups(c.s, 0, number))
    return early


@cute.jit
def exponentiate(
    variant: cutlass.Constexpr, s: cute.Tensor, lse2: cute.Tensor, early: Any, score_log2: Float32
) -> None:
    """Replaces scores by P, in float32.

    Args:
        variant: the variant.
        s: the scores.
        lse2: as for ``fragment_keys.exponentiate``.
        early: ``loaded_early`` of it.
        score_log2: factor that turns ``s`` into logits in base 2.
    """
    number = variant.config.early_statistics
    if const_expr(number > 0):
        first = _groups(s, 0, number)
        fragment_keys.exponentiate(variant, first, early, score_log2, None, first)
        s = _groups(s, number, cute.size(s) // 4)
        lse2 = cute.domain_offset((0, number), lse2)
    fragment_keys.exponentiate(variant, s, lse2, score_log2, None, s)


def _groups(acc: cute.Tensor, first: int, end: int) -> cute.Tensor:
    """The part of an accumulator in groups ``first`` to ``end - 1`` of eight columns."""
    layout = cute.make_layout(((2, 2, end - first), 1, 1))
    return cute.make_tensor(acc.iterator + 4 * first, layout)
