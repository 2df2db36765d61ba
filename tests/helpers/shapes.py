"""Shape checks during tests: what reaches a kernel or the reference fits together, in and out.

jaxtyping binds each letter to one extent per call, so that a wrong fold of vmap or a wrong shard
fails here, by name, and not as a wrong number somewhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from beartype import beartype
from jax import Array
from jaxtyping import Float, Int32, jaxtyped

from jax_fa.runtime import bindings, reference
from jax_fa.spec.problem import Gradients, Operands

Q = Float[Array, "b t n d"]
K = Float[Array, "b s k d"]
V = Float[Array, "b s k e"]
Out = Float[Array, "b t n e"]
Lse = Float[Array, "b t n"]
Sinks = Float[Array, "m n"] | None
QSegments = Int32[Array, "b t"] | None
KvSegments = Int32[Array, "b s"] | None
PerSequence = Int32[Array, " m"] | None
Borders = Int32[Array, " m_plus_1"] | None
MaskWords = Int32[Array, "#b #n mask_rows words"] | None
MaskMap = Int32[Array, "#b #n 2 stripes map_words"] | None
Bias = Float[Array, "#b #n #t #s"] | None


def forward_shapes(  # noqa: PLR0913 (one letter binds over all of them)
    q: Q,
    k: K,
    v: V,
    q_lengths: PerSequence,
    kv_lengths: PerSequence,
    cu_seqlens_q: Borders,
    cu_seqlens_k: Borders,
    q_segments: QSegments,
    kv_segments: KvSegments,
    q_offset: PerSequence,
    sinks: Sinks,
    mask_words: MaskWords,
    mask_map: MaskMap,
    bias: Bias,
    out: Out,
    lse: Lse,
) -> None:
    """Passes if all shapes fit together."""


def backward_shapes(  # noqa: PLR0913
    q: Q,
    k: K,
    v: V,
    sinks: Sinks,
    out: Out,
    lse: Lse,
    dout: Out,
    dlse: Lse | None,
    dq: Q,
    dk: K,
    dv: V,
    dsinks: Sinks,
) -> None:
    """Passes if all shapes fit together."""


check_forward: Callable[..., None] = jaxtyped(forward_shapes, typechecker=beartype)
check_backward: Callable[..., None] = jaxtyped(backward_shapes, typechecker=beartype)


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(operands: Operands, *rest: Any) -> Any:
        out, lse = function(operands, *rest)
        check_forward(*operands, out, lse)
        return out, lse

    return checked


def _kernel_forward(function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(platform: str, operands: Operands, semantics: Any) -> Any:
        out, lse = function(platform, operands, semantics)
        check_forward(*operands, out, lse)
        return out, lse

    return checked


def _check_gradients(operands: Operands, saved: Any, grads: Gradients) -> Gradients:
    check_backward(*operands[:3], operands.sinks, *saved, *grads[:4])
    return grads


def _kernel_backward(function: Callable[..., Gradients]) -> Callable[..., Gradients]:
    def checked(platform: str, operands: Operands, semantics: Any, saved: Any) -> Gradients:
        grads = function(platform, operands, semantics, saved)
        return _check_gradients(operands, saved, grads)

    return checked


def _reference_backward(function: Callable[..., Gradients]) -> Callable[..., Gradients]:
    def checked(operands: Operands, semantics: Any, *saved: Any) -> Gradients:
        return _check_gradients(operands, saved, function(operands, semantics, *saved))

    return checked


@contextmanager
def checked() -> Iterator[None]:
    """Within it, both implementations of both operations check their shapes."""
    with (
        mock.patch.object(bindings, "forward", _kernel_forward(bindings.forward)),
        mock.patch.object(bindings, "backward", _kernel_backward(bindings.backward)),
        mock.patch.object(reference, "forward", _forward(reference.forward)),
        mock.patch.object(reference, "backward", _reference_backward(reference.backward)),
    ):
        yield
