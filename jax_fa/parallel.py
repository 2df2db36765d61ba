"""Attention over sequences that several devices share, for use inside ``jax.shard_map``.

Each device holds T tokens of the query and S of key and value: its part of a sequence, in token
order over ``context_axis`` or in a ``layout``. ``docs/parallel.md`` shows who holds what at each
step, what it costs, and when to use which strategy.

Sources: Liu et al., "Ring Attention with Blockwise Transformers", arXiv:2310.01889 (ring); Jacobs
et al., "DeepSpeed Ulysses", arXiv:2309.14509 (all-to-all); Llama Team, "The Llama 3 Herd of
Models", arXiv:2407.21783, section 3.3.2 (all-gather, and pairs of chunks that balance a causal
mask).
"""

from __future__ import annotations

from typing import Any, Unpack

import jax
from jax import Array
from jax.typing import ArrayLike

from jax_fa import api
from jax_fa.runtime import arguments, strategies
from jax_fa.runtime.arguments import (
    Call,
    Explained,
    Given,
    Keywords,
    Options,
    PackingKeywords,
    Share,
)
from jax_fa.runtime.context import Axis
from jax_fa.runtime.layouts import Layout
from jax_fa.runtime.strategies import How, Positions, Strategy
from jax_fa.runtime.vjp import Result
from jax_fa.spec.problem import Problem


def attention(  # noqa: PLR0913 (as jax_fa.attention_varlen)
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    context_axis: Axis = "context",
    strategy: Strategy | tuple[Strategy, ...] = "auto",
    layout: Layout = "contiguous",
    positions: Positions = None,
    **options: Unpack[Keywords],
) -> Array:
    """``jax_fa.attention`` over sequences that the devices along ``context_axis`` share.

    Call it inside ``jax.shard_map`` (or ``jax.pmap``). Results and gradients are those of whole
    sequences. Other axes may split batch and heads. An axis that splits the query's heads has to
    split the key/value heads too, if there is more than one: otherwise a device would pair the
    wrong heads, which its shapes do not reveal (``docs/parallel.md`` has ways around it).

    Args:
        query: [B, T, N, D] or [T, N, D]: this device's tokens.
        key: [B, S, K, D] or [S, K, D], likewise. S may differ from T.
        value: [B, S, K, Dv] or [S, K, Dv].
        bias: as for ``jax_fa.attention``, with the rows of this device and all keys: broadcastable
            to [B, N, T, S * devices]. "auto" then gathers keys, so that its rows stay here.
        mask: bool, likewise. It is packed into bits; with ``is_causal``, they travel with the rows.
        context_axis: name of the mesh axis that splits the sequences, or names of several, major
            to minor.
        strategy: "all_gather" brings all keys to every device, or only those within reach of a
            bounded window; "all_to_all" exchanges heads for tokens, so the axis has to divide K;
            "ring" passes keys from device to device and holds nothing of length S * devices. "auto"
            follows the rule of ``docs/parallel.md``. A tuple with one strategy for each of several
            axes makes levels: ("ring", "all_to_all") passes keys along the first axis and exchanges
            heads over the second.
        layout: which tokens of a sequence this device, i of n, holds, the same for query, key,
            value and segment ids: "contiguous", the i-th part; "zigzag", chunks i and 2n - 1 - i of
            2n; "striped", tokens i, i + n, i + 2n, ... Arguments that count tokens (lengths,
            borders, offsets, windows) count them in the order of the sequence, whatever the layout.
            Zigzag tokens stay where they are; striped tokens are exchanged for contiguous ones,
            unless heads are exchanged.
        positions: for tokens in any other order, int32 [B, T]: the place of each token here in its
            sequence, split as the tokens are. A pair, of queries [B, T] and of keys [B, S], where
            the two differ. Over all devices they are 0, 1, 2, ..., each exactly once per sequence;
            in a packed row they count through the whole row. Only all-to-all serves them ("auto"
            takes it), and the number of devices has to divide N. Values that are no such numbering,
            if known only when the program runs, count by their ranks: smaller before larger, equal
            ones in the order in which devices hold them.
        **options: keywords of ``jax_fa.attention`` but for ``return_residual`` and
            ``implementation="cudnn"``. Segment ids are those of this device's tokens. Lengths
            [B] are of whole sequences, ``query_offset`` is of their row 0, ``bottom_right`` aligns
            their ends; sinks [N] are those of the heads here.

    Returns:
        [B, T, N, Dv] (or [T, N, Dv]) in the dtype of query: this device's rows.

    Raises:
        ValueError: as ``jax_fa.attention``; the axis is unknown here; an axis does not divide the
            key/value heads that all-to-all splits over it.
        TypeError: as ``jax_fa.attention``.
        NotImplementedError: as ``jax_fa.attention``; a strategy does not serve what was asked.
    """
    given: Options = {"bias": bias, "mask": mask, **options}
    return _dense((query, key, value), given, How(context_axis, strategy, layout, positions))[0]


def attention_with_lse(  # noqa: PLR0913 (as jax_fa.attention_varlen)
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    context_axis: Axis = "context",
    strategy: Strategy | tuple[Strategy, ...] = "auto",
    layout: Layout = "contiguous",
    positions: Positions = None,
    **options: Unpack[Keywords],
) -> tuple[Array, Array]:
    """``attention`` that also returns the log-sum-exp: float32 [B, T, N], differentiable.

    Args:
        query: as for ``attention``, like all other arguments.
        key: this device's tokens.
        value: this device's tokens.
        bias: rows of this device, all keys.
        mask: likewise.
        context_axis: the axis that splits the sequences.
        strategy: how.
        layout: which tokens this device holds.
        positions: the places of its tokens, if they are in no layout.
        **options: keywords of ``attention``.
    """
    given: Options = {"bias": bias, "mask": mask, **options}
    return _dense((query, key, value), given, How(context_axis, strategy, layout, positions))


def attention_varlen(  # noqa: PLR0913 (as jax_fa.attention_varlen)
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    context_axis: Axis = "context",
    strategy: Strategy | tuple[Strategy, ...] = "auto",
    layout: Layout = "contiguous",
    positions: Positions = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    **options: Unpack[Options],
) -> Array:
    """``jax_fa.attention_varlen`` over a row of tokens that several devices share.

    Args:
        query: [tokens, N, D]: this device's part of the row.
        key: [tokens, K, D].
        value: [tokens, K, Dv].
        cu_seqlens_q: int32 [M + 1], borders within the whole row, the same on every device. A
            sequence may span several devices.
        cu_seqlens_k: int32 [M + 1], likewise.
        context_axis: as for ``attention``.
        strategy: as for ``attention``.
        layout: as for ``attention``, of the whole row of tokens.
        positions: int32 [tokens], or a pair: as for ``attention``, in the whole row of tokens.
        max_seqlen_q: as for ``jax_fa.attention_varlen``, like all that follow.
        max_seqlen_k: not needed.
        seqused_q: int32 [M].
        seqused_k: int32 [M].
        **options: segment ids are those of this device's tokens.

    Returns:
        [tokens, N, Dv] in the dtype of query: this device's rows.

    Raises:
        ValueError: as ``attention`` of this module, and as ``jax_fa.attention_varlen``.
        TypeError: likewise.
        NotImplementedError: likewise.
    """
    packing: PackingKeywords = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
    }
    call = arguments.packed((query, key, value), packing, options, _share(context_axis))
    return strategies.run(api.without_cudnn(call), How(context_axis, strategy, layout, positions))[
        0
    ][0]


def explain(  # noqa: PLR0913 (as attention)
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    context_axis: Axis = "context",
    strategy: Strategy | tuple[Strategy, ...] = "auto",
    layout: Layout = "contiguous",
    positions: Positions = None,
    platform: str | None = None,
    **options: Unpack[Explained],
) -> api.Explanation:
    """Explains what a call of ``attention`` here would run on each device; computes nothing.

    Call it where ``attention`` is called, inside ``jax.shard_map``, while that is traced::

        print(jax_fa.parallel.explain(q, k, v, is_causal=True))

    It names the strategy, and the kernels that devices run between the exchanges; these see other
    parts of the sequences and heads than the operands hold. With ``cu_seqlens_q`` and
    ``cu_seqlens_k`` the call is that of ``attention_varlen``.

    Args:
        query: as for ``attention``, or a ``jax.ShapeDtypeStruct`` of its shape, like all arrays.
        key: likewise.
        value: likewise.
        bias: likewise.
        mask: likewise.
        context_axis: as for ``attention``.
        strategy: as for ``attention``.
        layout: as for ``attention``.
        positions: as for ``attention``.
        platform: as for ``jax_fa.explain``.
        **options: keywords of ``attention`` or ``attention_varlen``.

    Returns:
        An ``Explanation`` whose ``choice`` and ``problem`` are those of the first kernel, and whose
        ``sharing`` names the strategy and, if there are several kernels, all of them.

    Raises:
        ValueError: the call would raise it, or the platform is unknown.
        TypeError: the call would raise it.
        NotImplementedError: the call would raise it.
    """
    platform = api.platform_asked(platform)
    how = How(context_axis, strategy, layout, positions)
    given = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **options}

    def look(call: Call) -> api.Explanation:
        call = api.without_cudnn(call)
        problems = strategies.problems_inside(call, how) or [
            Problem.of(call.operands, call.semantics)
        ]
        choices = [api.choice_for(call, problem, platform) for problem in problems]
        size = strategies.size_of(context_axis)
        sharing = (
            f"tokens over {context_axis!r} ({size} devices): {strategies.names_inside(call, how)}"
        )
        kernels = dict.fromkeys(choice.kernel for choice in choices if choice.kernel)
        if len(kernels) > 1:
            sharing = f"{sharing}, with {' and '.join(kernels)}"
        return api.Explanation(platform, choices[0], problems[0], sharing)

    return api.look_at(given, look, _share(context_axis))


def _dense(qkv: Given, options: Options, how: How) -> Result:
    call = arguments.dense(qkv, options, _share(how.axis))
    out, lse = strategies.run(api.without_cudnn(call), how)
    return call.as_given(out), call.as_given(lse)


def _share(axis: Axis) -> Share:
    """This device's part of sequences that lie along ``axis``."""
    size = strategies.size_of(axis)
    return Share(size, jax.lax.axis_index(axis) if size > 1 else 0)
