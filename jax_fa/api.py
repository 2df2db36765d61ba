"""The public functions: their documentation, and the choice of an implementation."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_fa.mask_mods import MaskFunction
from jax_fa.runtime import (
    arguments,
    bindings,
    blockwise,
    checks,
    eager,
    masks,
    partitioner,
    primitives,
    strategies,
    vjp,
)
from jax_fa.runtime.arguments import (
    WHOLE,
    Call,
    Explained,
    Keywords,
    Options,
    Share,
    WindowSize,
)
from jax_fa.runtime.dispatch import Choice, Implementation, choose
from jax_fa.spec.band import Alignment
from jax_fa.spec.problem import Problem

T = TypeVar("T")


def attention(  # noqa: PLR0913 (a drop-in keeps the signature it replaces)
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: WindowSize = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    causal_alignment: Alignment = "top_left",
    query_offset: ArrayLike | None = None,
    deterministic: bool = False,
    mask_mod: MaskFunction | None = None,
    block_mask: ArrayLike | None = None,
) -> Any:
    """Exact attention, softmax(scale * query key^T) value over the visible keys, in O(T) memory.

    A drop-in for ``jax.nn.dot_product_attention``: same arguments, shapes, alignment and error
    classes. Letters: B batch, T query length, S key length, N query heads, K key/value heads
    (N is a multiple of K; query head n reads key/value head n // (N // K)), D and Dv head sizes.

    Args:
        query: [B, T, N, D] or [T, N, D]; float32, bfloat16 or float16 (float64 runs unfused).
        key: [B, S, K, D] or [S, K, D], dtype of query.
        value: [B, S, K, Dv] or [S, K, Dv], dtype of query. Dv may differ from D. GPU kernels take
            both up to 256; arrays whose head size is not a multiple of 8 are copied and padded
            with zeros (``explain`` says so).
        bias: added to the scaled logits; 4-D (or fewer), broadcastable to [B, N, T, S]. Kernels
            read it in the dtype of query or in float32 (other dtypes are converted to float32),
            and give its gradient in its own shape. -inf hides a pair, as a mask does, but what the
            key holds has to be finite. Rows whose logits all exceed 1e4 in magnitude have inexact
            gradients: the LSE has 24 bits.
        mask: bool, True where a query sees a key; shapes as for bias. Kernels read it as packed
            bits and skip the blocks that it hides. is_causal, local_window_size, lengths and
            segment ids take less memory, where they can express the same mask.
        scale: factor applied to the logits; D ** -0.5 if None. 0, or a magnitude from 1e-30 to
            1e30. A traced scalar runs unfused.
        is_causal: a query sees no key beyond its diagonal.
        query_seq_lengths: int32 [B]; rows beyond the length give 0, and lse = -inf.
        key_value_seq_lengths: int32 [B]; keys beyond the length are hidden, and may be NaN.
        local_window_size: w or (left, right): keys seen before and beyond the diagonal; None on
            one side leaves it unbounded.
        implementation: None picks the fastest one for the platform the computation is lowered for.
            "cpu" and "cuda" force compiled kernels, "xla" the unfused path (differentiable in any
            mode), "cudnn" delegates to jax.nn, and "emulated" runs GPU kernels on the CPU
            (``jax_fa.emulation`` chooses the GPU).
        return_residual: also return the log-sum-exp [B, T, N], in the dtype of key and without a
            gradient, as jax.nn does. ``attention_with_lse`` returns it in float32, with one.
        query_segment_ids: integers [B, T] that fit int32; a query sees only keys of its own segment
            (packed documents). Arrays of integer types that hold more than int32 (int64, uint32),
            here and below, must not be traced, since their values are checked.
        key_value_segment_ids: integers [B, S], likewise; go with query_segment_ids.
        logits_soft_cap: c bounds the logits to c * tanh(logits / c), after scale and bias and
            before masking; 1e-4 to 1e4.
        sinks: float32 [N], one extra logit per head in the denominator; differentiable. At most
            1e4; -inf for a head without a sink. NaN makes the results of its head NaN.
        causal_alignment: where the diagonal of causal and windowed attention lies: "top_left"
            starts it at key 0, "bottom_right" ends it at the last used key of the last used row.
        query_offset: integer scalar or [B] that fits int32, may be traced: position of query row 0,
            added to the diagonal (context parallelism, decoding). Clamped to 2 ** 28 in magnitude.
        deterministic: gradients with the same bits on every run on a GPU of the same kind.
        mask_mod: function (batch, q_head, q_position, kv_position) -> bool, of int32 arrays that
            broadcast; it hides further keys where it is False. ``jax_fa.mask_mods`` has examples.
            It is evaluated into the packed bits of a mask, without an array of all pairs; outside
            jit, in each call again (and compiled, for more than 2 ** 28 pairs).
        block_mask: bool [B|1, N|1, ceil(T / 128), ceil(S / 128)], True where the 128 queries of a
            block may see its 128 keys: block-sparse attention. May be traced. It hides keys in
            addition to everything else, such as is_causal; kernels skip the blocks it hides.

    Returns:
        [B, T, N, Dv] (or [T, N, Dv]) in the dtype of query; with return_residual a tuple
        (output, residual). A row that sees no key gives 0 and lse = -inf, where jax.nn averages
        all values.

    Arrays may be traced. All other arguments decide what is compiled: they are Python or NumPy
    values, which a jitted function lists in ``static_argnames``. Flags are True or False, not
    merely truthy values.

    Raises:
        ValueError: arguments contradict each other, or have a wrong shape or value.
        TypeError: an argument is of a wrong type, or traced where it may not be; bias or mask does
            not broadcast.
        NotImplementedError: a forced implementation does not serve the problem, or the requested
            derivative does not exist.

    Source: Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with
    IO-Awareness", arXiv:2205.14135; Dao, "FlashAttention-2", arXiv:2307.08691.
    """
    options = Options(
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        implementation=implementation,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        causal_alignment=causal_alignment,
        query_offset=query_offset,
        deterministic=deterministic,
        mask_mod=mask_mod,
        block_mask=block_mask,
    )
    return_residual = checks.flag("return_residual", return_residual)
    qkv = (query, key, value)
    if isinstance(implementation, str) and implementation == "cudnn":
        return _cudnn(qkv, options, return_residual)
    return eager.run(_as_jax_nn, arguments.dense, qkv, options, return_residual)


def attention_on_kernels(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    return_residual: bool = False,
    **options: Unpack[Keywords],
) -> Callable[[], Any] | None:
    """A function that runs ``attention``, or None if no kernel of the default backend serves it.

    Arguments and errors are those of ``attention``; the function returned raises none of them.
    """
    return_residual = checks.flag("return_residual", return_residual)
    qkv = (query, key, value)
    given: Options = {"bias": bias, "mask": mask, **options}
    call = without_cudnn(arguments.dense(qkv, given))
    problem = _problem(call)
    if choice_for(call, problem, bindings.lowered_platform()).implementation == "xla":
        return None
    return functools.partial(eager.run, _as_jax_nn, arguments.dense, qkv, given, return_residual)


def attention_with_lse(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    **options: Unpack[Keywords],
) -> tuple[Array, Array]:
    """``attention`` that also returns the log-sum-exp, in float32 and differentiable.

    Args:
        query: [B, T, N, D] or [T, N, D].
        key: [B, S, K, D] or [S, K, D].
        value: [B, S, K, Dv] or [S, K, Dv].
        bias: as for ``attention``.
        mask: as for ``attention``.
        **options: keywords of ``attention`` except ``return_residual`` and
            ``implementation="cudnn"``.

    Returns:
        out [B, T, N, Dv] and lse [B, T, N], float32 (float64 for float64): the natural log of the
        whole denominator, sinks included; -inf for a row that sees no key. Both are differentiable:
        partial results over disjoint keys can be merged by their LSE, and gradients flow through
        the merge.

    Raises:
        ValueError: as ``attention``.
        TypeError: as ``attention``.
        NotImplementedError: as ``attention``; ``implementation="cudnn"``, which has no LSE.
    """
    given: Options = {"bias": bias, "mask": mask, **options}
    return eager.run(_run, arguments.dense, (query, key, value), given)


def attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    **options: Unpack[Options],
) -> Array:
    """Attention over M sequences of different lengths, packed one after another.

    Args:
        query: [total_q, N, D].
        key: [total_k, K, D].
        value: [total_k, K, Dv].
        cu_seqlens_q: int32 [M + 1], ascending: sequence m holds the rows
            ``cu_seqlens_q[m] .. cu_seqlens_q[m + 1]``. Rows of no sequence give 0. Borders outside
            0 to total_q are refused if their values can be read here (not traced, not on a GPU);
            otherwise each is clamped to the array, and to be no smaller than those before it.
        cu_seqlens_k: int32 [M + 1], likewise for key and value.
        max_seqlen_q: an upper bound of the query lengths; accepted for compatibility, not needed.
            A bound that does not hold is refused if cu_seqlens_q can be read.
        max_seqlen_k: likewise for keys.
        seqused_q: int32 [M], rows used of each sequence, if fewer than its slot holds.
        seqused_k: int32 [M], keys used of each sequence.
        **options: keywords of ``attention`` except bias, mask, block_mask, lengths,
            return_residual and ``implementation="cudnn"``. ``sinks`` is [N], ``query_offset`` a
            scalar or [M], segment ids [total_q] and [total_k].

    Returns:
        [total_q, N, Dv] in the dtype of query.

    Raises:
        ValueError: as ``attention``; an array has a batch dimension; borders describe no packing,
            and can be read.
        TypeError: as ``attention``.
        NotImplementedError: as ``attention``.
    """
    given: dict[str, Any] = {
        **options,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
    }
    return eager.run(_packed_out, arguments.named, (query, key, value), given)


def forward(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Unpack[Options]
) -> tuple[Array, Array]:
    """The forward operation alone: (out, lse), without a gradient rule.

    For code that combines partial results itself (ring attention, split keys); see ``backward``.

    Args:
        query: as for ``attention_with_lse``.
        key: as for ``attention_with_lse``.
        value: as for ``attention_with_lse``.
        **options: as for ``attention_with_lse``, and ``bias`` and ``mask``.

    Returns:
        out and lse, as ``attention_with_lse``.

    Raises:
        ValueError: as ``attention``.
        TypeError: as ``attention``.
        NotImplementedError: as ``attention``; kernels cannot serve the call on any platform (a
            traced scale, float64).
    """
    return eager.run(_forward_alone, arguments.dense, (query, key, value), options)


def backward(  # noqa: PLR0913 (operands and results of one mathematical operation)
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    dout: ArrayLike,
    dlse: ArrayLike | None = None,
    **options: Unpack[Options],
) -> tuple[Array, ...]:
    """The backward operation alone, from a given LSE.

    If ``key`` and ``value`` are one part of the keys, pass ``out`` and ``lse`` over all keys: the
    gradients of the parts then add up (ring attention).

    Args:
        query: as for ``forward``.
        key: as for ``forward``.
        value: as for ``forward``.
        out: output of the forward, [B, T, N, Dv] or [T, N, Dv].
        lse: float32 [B, T, N] or [T, N].
        dout: cotangent of out.
        dlse: cotangent of lse; zero if None.
        **options: as for ``forward``.

    Returns:
        (dquery, dkey, dvalue), then dsinks float32 [N] if ``sinks`` was given, then dbias, of the
        shape and dtype of ``bias`` (float32 if that is no floating type), if ``bias`` was given.

    Raises:
        ValueError: as ``forward``; out, lse, dout or dlse has a wrong shape or dtype.
        TypeError: as ``forward``.
        NotImplementedError: as ``forward``.
    """
    call = _for_operations("backward", arguments.dense((query, key, value), options))
    operands = call.masked
    out_shape = (*operands.q.shape[:3], operands.v.shape[3])
    saved = (
        arguments.result("out", out, out_shape, operands.q.dtype),
        arguments.result("lse", lse, out_shape[:3], jnp.float32),
    )
    cotangents = (
        arguments.result("dout", dout, out_shape, operands.q.dtype),
        None if dlse is None else arguments.result("dlse", dlse, out_shape[:3], jnp.float32),
    )
    grads = primitives.backward(operands, call.semantics, saved, cotangents, call.implementation)
    found = [call.as_given(g) for g in grads[:3]]
    if grads.sinks is not None:
        found.append(jnp.sum(grads.sinks, axis=0))
    if call.bias is not None:
        bias = jnp.asarray(options["bias"])
        # Of no pairs, kernels are not asked for it.
        dbias = jnp.zeros(bias.shape) if grads.bias is None else grads.bias
        is_real = jnp.issubdtype(bias.dtype, jnp.floating)
        found.append(dbias.astype(bias.dtype if is_real else jnp.float32).reshape(bias.shape))
    return tuple(found)


@dataclass(frozen=True)
class Explanation:
    """The implementation that a call would run; ``str()`` gives one readable line.

    Attributes:
        platform: the platform asked about.
        choice: the implementation, its kernel and the reason.
        problem: what was asked, as kernels see it.
        sharing: the mesh axes that split sequences, their size and the strategy by which devices
            share them (``jax_fa.parallel``); empty if the query's sharding splits none.
        hidden: the share of the 128 x 128 blocks that mask and block_mask hide and kernels skip;
            None without masks, or where only their shapes are given.
    """

    platform: str
    choice: Choice
    problem: Problem
    sharing: str = ""
    hidden: float | None = None

    def __str__(self) -> str:
        """Platform, implementation, kernel and reason; what is packed, and who shares it."""
        kernel = f" ({self.choice.kernel})" if self.choice.kernel else ""
        text = f"{self.platform}: {self.choice.implementation}{kernel}: {self.choice.reason}"
        problem = self.problem
        if problem.is_packed:
            text = (
                f"{text.rstrip('.')}. Packed: {problem.num_sequences} sequences in "
                f"{problem.q_len} rows of query, and in {problem.kv_len} of key and value"
            )
        if problem.has_mask:
            shape = (problem.mask_batch, problem.mask_heads, problem.mask_rows, problem.mask_width)
            text = f"{text.rstrip('.')}. Mask: {math.prod(shape) / 2**18:.3g} MiB of bits"
            if self.hidden is not None:
                text = f"{text}, {self.hidden:.0%} of blocks skipped"
        if self.sharing:
            text = f"{text.rstrip('.')}. Shared: {self.sharing}"
        return text


_PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")


def explain(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    platform: str | None = None,
    **options: Unpack[Explained],
) -> Explanation:
    """Explains which implementation a call would use, and why; computes nothing.

    The call is that of ``attention``, or of ``attention_varlen`` where ``cu_seqlens_q`` and
    ``cu_seqlens_k`` are given, by keyword: query, key and value are then packed::

        print(jax_fa.explain(q, k, v, cu_seqlens_q=borders, cu_seqlens_k=borders, is_causal=True))

    Args:
        query: an array or a ``jax.ShapeDtypeStruct``, as are all array arguments. If its sharding
            splits tokens, the answer names the strategy by which devices share them.
        key: as for ``attention``.
        value: as for ``attention``.
        bias: as for ``attention``.
        mask: as for ``attention``.
        platform: "cpu", "cuda" (or "gpu"), "rocm", "tpu"; the default backend's if None.
        **options: keywords of ``attention`` except ``return_residual``, or those of
            ``attention_varlen`` (which takes no bias, mask or block_mask).

    Raises:
        ValueError: the call would raise it, or the platform is unknown.
        TypeError: the call would raise it.
        NotImplementedError: the call would raise it.
    """
    platform = platform_asked(platform)
    given = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **options}
    call, problem = look_at(given, lambda call: (call, _problem(call)))
    choice = choice_for(call, problem, platform)
    at_hand = query if not isinstance(query, jax.core.Tracer) else jax.typeof(query)
    sharing = partitioner.explained(
        call, getattr(at_hand, "sharding", None), on_kernels=choice.implementation != "xla"
    )
    masks_given = (_value(x) for x in (mask, options.get("block_mask")))
    return Explanation(platform, choice, problem, sharing, masks.hidden_share(*masks_given))


def platform_asked(given: str | None) -> str:
    """What JAX calls the platform that a caller of ``explain`` named.

    Raises:
        ValueError: there is none of that name.
    """
    known = sorted({*_PLATFORMS, jax.default_backend()})
    if given is not None:
        checks.name_among("platform", given, known, "None or ")
    return bindings.lowered_platform(given)


def look_at(given: Mapping[str, Any], look: Callable[[Call], T], share: Share = WHOLE) -> T:
    """What ``look`` says of a call, some of whose arrays may be shapes; computes nothing."""
    # Values stay values: what is a number to `attention` has to be one here.
    shapes = {name: x for name, x in given.items() if isinstance(x, jax.ShapeDtypeStruct)}
    found: list[T] = []

    def check(arrays: dict[str, Any]) -> None:
        rest = {**given, **arrays}
        qkv = (rest.pop("query"), rest.pop("key"), rest.pop("value"))
        found.append(look(arguments.named(qkv, rest, share)))

    jax.eval_shape(check, shapes)
    return found[0]


def _value(given: Any) -> np.ndarray | None:
    """An array's values, None if there are none or they are not known yet."""
    if given is None or isinstance(given, jax.ShapeDtypeStruct | jax.core.Tracer):
        return None
    return np.asarray(given)


# ---------------------------------------------------------------------------------------- running


def _problem(call: Call) -> Problem:
    """The problem that kernels are asked to solve."""
    operands = call.operands if arguments.needs_reference(call) else call.masked
    return Problem.of(operands, call.semantics)


def choice_for(call: Call, problem: Problem, platform: str) -> Choice:
    """The implementation that serves the ``problem`` of ``call`` on ``platform``, and why."""
    reason = arguments.needs_reference(call)
    if reason is None:
        target = bindings.target(platform, call.implementation)
        return choose(problem, target, call.implementation)
    arguments.check_unfused(call, reason)
    return Choice("xla", "", reason)


def _run(call: Call) -> tuple[Array, Array]:
    reason = arguments.needs_reference(without_cudnn(call))
    if strategies.splits_tokens(call):
        out, lse = strategies.over_mesh(call)
    elif call.implementation == "xla" or reason is not None:
        arguments.leave_kernels(call, reason)
        out, lse = blockwise.forward(call.with_words, call.semantics, call.bias, call.mask)
    else:
        out, lse = vjp.attention(call.masked, call.semantics, call.implementation)
    return call.as_given(out), call.as_given(lse)


def _as_jax_nn(call: Call, return_residual: bool) -> Any:
    """Runs a call, with the result in the form of ``jax.nn.dot_product_attention``."""
    out, lse = _run(call)
    if return_residual:
        return out, jax.lax.stop_gradient(lse.astype(call.operands.k.dtype))
    return out


def _packed_out(call: Call) -> Array:
    """Runs a call of packed sequences: the output, which has no batch."""
    return _run(call)[0][0]


def _forward_alone(call: Call) -> tuple[Array, Array]:
    """Runs the operation, without a gradient rule."""
    operands = _for_operations("forward", call).masked
    out, lse = primitives.forward(operands, call.semantics, call.implementation)
    return call.as_given(out), call.as_given(lse)


def without_cudnn(call: Call) -> Call:
    """The call itself; refused if it asks for cuDNN, which only ``attention`` offers."""
    if call.implementation == "cudnn":
        raise NotImplementedError(
            "attention: implementation='cudnn' is jax.nn.dot_product_attention and serves "
            "jax_fa.attention alone. Use implementation=None."
        )
    return call


def _for_operations(name: str, call: Call) -> Call:
    reason = arguments.needs_reference(without_cudnn(call))
    if reason is not None:
        raise NotImplementedError(
            f"attention: {name} is the kernel operation alone, and {reason}. Use jax_fa.attention."
        )
    return call


_OF_JAX_NN = (
    *("bias", "mask", "scale", "is_causal", "query_seq_lengths", "key_value_seq_lengths"),
    *("local_window_size", "implementation"),
)
"""Options of ``attention`` that ``jax.nn.dot_product_attention`` has, too."""


def _cudnn(
    qkv: tuple[ArrayLike, ArrayLike, ArrayLike], options: Options, return_residual: bool
) -> Any:
    arguments.dense(qkv, options)
    given = cast(dict[str, Any], options)
    ours = {
        name: parameter.default
        for name, parameter in inspect.signature(attention).parameters.items()
        if name in given and name not in _OF_JAX_NN
    }
    used = [
        name
        for name, default in ours.items()
        if (given[name] is not None if default is None else given[name] != default)
    ]
    if used:
        raise NotImplementedError(
            f"attention: implementation='cudnn' delegates to jax.nn.dot_product_attention, which "
            f"has no {', '.join(used)}. Use implementation=None."
        )
    theirs = {name: value for name, value in given.items() if name not in ours}
    delegate: Any = jax.nn.dot_product_attention
    return delegate(*qkv, **theirs, return_residual=return_residual)
