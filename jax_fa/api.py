"""The public functions: documentation, and the way from checked arguments to an implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_fa import arguments, bindings, blockwise, checks, mask_mods, operations, vjp
from jax_fa.arguments import Call, Keywords, Options, Packing, WindowSize
from jax_fa.band import Alignment
from jax_fa.choice import Choice, Implementation, choose, name_of
from jax_fa.problem import KERNEL_DTYPES, Problem


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
    mask_mod: str | None = None,
) -> Any:
    """softmax(scale * query key^T over the visible keys) value: exact, without T x S memory.

    A drop-in for ``jax.nn.dot_product_attention``: same arguments, shapes, alignment and error
    classes. Letters: B batch, T query length, S key length, N query heads, K key/value heads
    (N is a multiple of K; query head n reads key/value head n // (N // K)), D and Dv head sizes.

    Args:
        query: [B, T, N, D] or [T, N, D]; float32, bfloat16 or float16 (float64 runs unfused).
        key: [B, S, K, D] or [S, K, D], dtype of query.
        value: [B, S, K, Dv] or [S, K, Dv], dtype of query. Dv may differ from D.
        bias: added to the scaled logits; 4-D (or fewer), broadcastable to [B, N, T, S]. Runs
            unfused; its gradient is supported.
        mask: bool, True takes part; shapes as of bias. Runs unfused: prefer is_causal,
            local_window_size, lengths and segment ids, which skip what they hide.
        scale: factor of the logits; D ** -0.5 if None. 0, or of magnitude 1e-30 to 1e30. A traced
            scalar runs unfused.
        is_causal: a query sees no key beyond its diagonal.
        query_seq_lengths: int32 [B]; rows beyond give 0, and lse = -inf.
        key_value_seq_lengths: int32 [B]; keys beyond are invisible. NaN there does no harm.
        local_window_size: w or (left, right): keys seen before and beyond the diagonal; None on
            one side leaves it unbounded.
        implementation: None picks the fastest that serves the problem on the platform the
            computation is lowered for. "cpu" and "cuda" force compiled kernels, "xla" the unfused
            path (differentiable in any mode), "cudnn" delegates to jax.nn, "emulated" runs the
            kernels of a GPU on the CPU (``jax_fa.emulation`` says of which).
        return_residual: also return the log-sum-exp [B, T, N] in the dtype of key and without
            gradient, as jax.nn does. ``attention_with_lse`` gives it in float32 with gradient.
        query_segment_ids: integers [B, T] that fit int32; a query sees only keys of its own segment
            (packed documents). Of wider types than int32, here and below, values are read, so they
            must not be traced.
        key_value_segment_ids: int32 [B, S]; goes with query_segment_ids.
        logits_soft_cap: c bounds the logits to c * tanh(logits / c), after scale and bias and
            before masking; 1e-4 to 1e4.
        sinks: float32 [N], one extra logit per head in the denominator; differentiable. At most
            1e4, -inf for a head without; NaN makes its head's results NaN.
        causal_alignment: where the diagonal of causal and windowed attention lies: "top_left"
            starts it at key 0, "bottom_right" ends it at the last used key of the last used row.
        query_offset: integer scalar or [B] that fits int32, may be traced: position of query row 0,
            added to the diagonal (context parallelism, decoding). Beyond 2 ** 28 in magnitude it
            counts as that.
        deterministic: identical bits of the gradient on every run.
        mask_mod: name of a function of positions that hides further keys: "chunked_N" (causal
            within chunks of N), "prefix_lm_N" (causal, the first N keys seen by all), or
            "module:function" (``jax_fa.mask_mods``), which imports the module and calls the
            function: executes code. GPU kernels serve those that the build compiled (``python -m
            jax_fa.aot --mask-mod``), but for Hopper's backward; anything else runs unfused.

    Returns:
        [B, T, N, Dv] (or [T, N, Dv]) in the dtype of query; with return_residual a tuple
        (output, residual). A row that sees no key gives 0 and lse = -inf, where jax.nn averages
        all values.

    Arrays may be traced. Everything else decides what is compiled: Python or NumPy values, and in
    a jitted function arguments that ``static_argnames`` lists. Flags are True or False, nothing
    that merely counts as one of them.

    Raises:
        ValueError: arguments contradict each other, or have a wrong shape or value.
        TypeError: an argument is of a wrong type, or traced where it may not be; bias or mask does
            not broadcast.
        NotImplementedError: a forced implementation does not serve the problem, or a derivative
            that does not exist was asked for.

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
    )
    return_residual = checks.flag("return_residual", return_residual)
    call = arguments.dense((query, key, value), options)
    if call.implementation == "cudnn":
        return _cudnn((query, key, value), options, return_residual)
    out, lse = _run(call)
    if return_residual:
        return out, jax.lax.stop_gradient(lse.astype(call.operands.k.dtype))
    return out


def attention_with_lse(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    **options: Unpack[Keywords],
) -> tuple[Array, Array]:
    """As ``attention``, returning also the log-sum-exp: float32, with gradient.

    Args:
        query: [B, T, N, D] or [T, N, D].
        key: [B, S, K, D] or [S, K, D].
        value: [B, S, K, Dv] or [S, K, Dv].
        bias: as of ``attention``.
        mask: as of ``attention``.
        **options: keywords of ``attention`` but for ``return_residual`` and
            ``implementation="cudnn"``.

    Returns:
        out [B, T, N, Dv] and lse float32 [B, T, N] (natural log of the whole denominator, sinks
        included; -inf for a row without). Both are differentiable: partial results over disjoint
        keys merge by their LSE, and gradients flow through the merge.
    """
    given: Options = {"bias": bias, "mask": mask, **options}
    return _run(_without_cudnn(arguments.dense((query, key, value), given)))


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
            ``cu_seqlens_q[m] .. cu_seqlens_q[m + 1]``. Rows of no sequence give 0. Others than
            from 0 to total_q are refused where their values are at hand: not traced, and not on a
            GPU. Elsewhere a border counts as within the array and as no smaller than those before
            it.
        cu_seqlens_k: int32 [M + 1], likewise for key and value.
        max_seqlen_q: an upper bound of the query lengths; accepted for compatibility, not needed.
            One that does not hold is refused where cu_seqlens_q is at hand.
        max_seqlen_k: likewise for keys.
        seqused_q: int32 [M], used rows of each sequence, if fewer than its slot holds.
        seqused_k: int32 [M], used keys of each sequence.
        **options: keywords of ``attention`` but for bias, mask, lengths and return_residual.
            ``sinks`` is [N], ``query_offset`` a scalar or [M], segment ids [total_q] and [total_k].

    Returns:
        [total_q, N, Dv] in the dtype of query.
    """
    packing = Packing(
        borders=(cu_seqlens_q, cu_seqlens_k),
        used=(seqused_q, seqused_k),
        longest=(max_seqlen_q, max_seqlen_k),
    )
    call = arguments.packed((query, key, value), packing, options)
    return _run(_without_cudnn(call))[0][0]


def forward(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Unpack[Options]
) -> tuple[Array, Array]:
    """The forward operation alone: (out, lse), without a gradient rule.

    Takes the arguments of ``attention_with_lse`` but for bias and mask. For code that combines
    operations itself (ring attention, split keys); see ``backward``.
    """
    call = _for_operations("forward", arguments.dense((query, key, value), options))
    out, lse = operations.forward(call.operands, call.semantics, call.implementation)
    return call.as_given(out), call.as_given(lse)


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

    Where ``key`` and ``value`` are one part of all keys, ``out`` and ``lse`` are those over all of
    them: the gradients of the parts then add up (ring attention).

    Args:
        query: as of ``forward``.
        key: as of ``forward``.
        value: as of ``forward``.
        out: output of the forward, [B, T, N, Dv] or [T, N, Dv].
        lse: float32 [B, T, N] or [T, N].
        dout: cotangent of out.
        dlse: cotangent of lse; zero if None.
        **options: those of the forward.

    Returns:
        (dquery, dkey, dvalue), and dsinks float32 [N] where ``sinks`` was given.
    """
    call = _for_operations("backward", arguments.dense((query, key, value), options))
    operands = call.operands
    out_shape = (*operands.q.shape[:3], operands.v.shape[3])
    dlse = jnp.zeros(out_shape[:3], jnp.float32) if dlse is None else dlse
    saved = (
        arguments.result("out", out, out_shape, operands.q.dtype),
        arguments.result("lse", lse, out_shape[:3], jnp.float32),
    )
    cotangents = (
        arguments.result("dout", dout, out_shape, operands.q.dtype),
        arguments.result("dlse", dlse, out_shape[:3], jnp.float32),
    )
    grads = operations.backward(operands, call.semantics, saved, cotangents, call.implementation)
    dqkv = tuple(call.as_given(g) for g in grads[:3])
    return dqkv if grads.sinks is None else (*dqkv, jnp.sum(grads.sinks, axis=0))


@dataclass(frozen=True)
class Explanation:
    """What ``attention`` would run; ``str()`` of it is one readable line.

    Attributes:
        platform: the platform asked about.
        choice: the implementation, its kernel and the reason.
        problem: what was asked, as kernels see it.
    """

    platform: str
    choice: Choice
    problem: Problem

    def __str__(self) -> str:
        """Platform, implementation, kernel and reason."""
        kernel = f" ({self.choice.kernel})" if self.choice.kernel else ""
        return f"{self.platform}: {self.choice.implementation}{kernel}: {self.choice.reason}"


_PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")


def explain(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    platform: str | None = None,
    **options: Unpack[Keywords],
) -> Explanation:
    """Which implementation ``attention`` would use for these arguments, and why; computes nothing.

    Args:
        query: an array or a ``jax.ShapeDtypeStruct``, as are all array arguments.
        key: as of ``attention``.
        value: as of ``attention``, as are the following two.
        bias: added to the scaled logits.
        mask: bool, True takes part.
        platform: "cpu", "cuda" (or "gpu"), "rocm", "tpu"; the default backend's if None.
        **options: keywords of ``attention``, but for ``return_residual``.

    Raises:
        ValueError: as ``attention`` would, or the platform is unknown.
        TypeError: as ``attention`` would.
        NotImplementedError: as ``attention`` would.
    """
    default = jax.default_backend()
    if platform is None:
        platform = default
    checks.name_among("platform", platform, sorted({*_PLATFORMS, default}), "None or ")
    platform = "cuda" if platform == "gpu" else platform
    given = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **options}
    # Values stay values: what is a number to `attention` has to be one here.
    shapes = {name: x for name, x in given.items() if isinstance(x, jax.ShapeDtypeStruct)}
    calls: list[Call] = []

    def check(arrays: dict[str, Any]) -> None:
        rest = {**given, **arrays}
        qkv = (rest.pop("query"), rest.pop("key"), rest.pop("value"))
        calls.append(arguments.dense(qkv, cast(Options, rest)))

    jax.eval_shape(check, shapes)
    (call,) = calls
    problem = Problem.of(call.operands, call.semantics)
    return Explanation(platform, _choice(call, problem, platform), problem)


# ---------------------------------------------------------------------------------------- running


def _needs_reference(call: Call) -> str | None:
    """Why no kernel of any platform can serve a call; None if one may."""
    if call.bias is not None or call.mask is not None:
        return "a dense mask or bias is a T x S array already, and runs unfused"
    if isinstance(cast(Any, call.semantics.scale), jax.core.Tracer):
        return "a traced scale runs unfused; a Python number lets kernels serve the call"
    name = call.semantics.mask_mod
    if name is not None and not mask_mods.sees_positions_only(mask_mods.resolve(name)):
        return f"mask_mod={name!r} depends on batch or head; kernels take functions of positions"
    if str(call.operands.q.dtype) not in KERNEL_DTYPES:
        return f"kernels take {', '.join(KERNEL_DTYPES)}, not {call.operands.q.dtype}"
    return None


def _choice(call: Call, problem: Problem, platform: str) -> Choice:
    reason = _needs_reference(call)
    if reason is None:
        target = bindings.target(platform, call.implementation)
        return choose(problem, target, call.implementation)
    if call.implementation in (None, "xla"):
        return Choice("xla", "", reason)
    asked = name_of(call.implementation)
    raise NotImplementedError(
        f"attention: implementation={asked!r} does not serve this call: {reason}. "
        f"Use implementation=None or 'xla'."
    )


def _run(call: Call) -> tuple[Array, Array]:
    if call.implementation == "xla" or _needs_reference(call) is not None:
        _choice(call, Problem.of(call.operands, call.semantics), "any")
        out, lse = blockwise.forward(call.operands, call.semantics, call.bias, call.mask)
    else:
        out, lse = vjp.attention(call.operands, call.semantics, call.implementation)
    return call.as_given(out), call.as_given(lse)


def _without_cudnn(call: Call) -> Call:
    if call.implementation == "cudnn":
        raise NotImplementedError(
            "attention: implementation='cudnn' is jax.nn.dot_product_attention and serves "
            "jax_fa.attention alone. Use implementation=None."
        )
    return call


def _for_operations(name: str, call: Call) -> Call:
    reason = _needs_reference(_without_cudnn(call))
    if reason is not None:
        raise NotImplementedError(
            f"attention: {name} is the kernel operation alone, and {reason}. Use jax_fa.attention."
        )
    return call


def _cudnn(
    qkv: tuple[ArrayLike, ArrayLike, ArrayLike], options: Options, return_residual: bool
) -> Any:
    ours = {
        "query_segment_ids": None,
        "key_value_segment_ids": None,
        "logits_soft_cap": None,
        "sinks": None,
        "causal_alignment": "top_left",
        "query_offset": None,
        "deterministic": False,
        "mask_mod": None,
    }
    given = cast(dict[str, Any], options)
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
