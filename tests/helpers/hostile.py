"""Problems whose run-time integers are whatever an outsider may send: seeded, of few shapes.

Borders, lengths, offsets and segments are plausible or any int32. Shapes and features come from
``KINDS``, so that all problems of a kind are one compilation.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np

from helpers.cases import Bias, Case, Data, Dense, make
from helpers.harness import on_device
from helpers.oracle import Results, Tolerance, tolerance
from jax_fa.runtime import vjp
from jax_fa.runtime.dispatch import Forced
from jax_fa.spec.band import MAX_OFFSET
from jax_fa.spec.problem import Operands, Semantics

_INT32 = np.iinfo(np.int32)
_ANY = (0,)
"""In a case: to be drawn."""

_PACKED: dict[str, Any] = {
    "q_len": 70,
    "kv_len": 90,
    "heads": 2,
    "kv_heads": 1,
    "cu_q": _ANY * 4,
    "cu_k": _ANY * 4,
}
_DENSE: dict[str, Any] = {"batch": 2, "q_len": 70, "kv_len": 140, "heads": 1, "kv_heads": 1}

KINDS = (
    Case("borders", **_PACKED),
    Case("lengths", q_lengths=_ANY * 2, kv_lengths=_ANY * 2, **_DENSE),
    Case(
        "borders_everything",
        q_lengths=_ANY * 3,
        kv_lengths=_ANY * 3,
        segments=(_ANY * 70, _ANY * 90),
        q_offset=_ANY * 3,
        has_sinks=True,
        is_causal=True,
        alignment="bottom_right",
        **_PACKED,
    ),
    Case("offset_window", q_offset=_ANY * 2, window=(20, 9), **_DENSE),
    Case(
        "mask_offset_lengths",
        dense=Dense("holes", "BNTS"),
        q_lengths=_ANY * 2,
        kv_lengths=_ANY * 2,
        q_offset=_ANY * 2,
        window=(50, 20),
        **_DENSE,
    ),
    Case("block_mask_offset", q_offset=_ANY * 2, window=(50, 20), block_dims="BNTS", **_DENSE),
    Case("borders_offset_causal", q_offset=_ANY * 3, is_causal=True, has_sinks=True, **_PACKED),
    Case(
        "segments_offset_lengths",
        segments=(_ANY * 70, _ANY * 140),
        q_offset=_ANY * 2,
        kv_lengths=_ANY * 2,
        window=(None, 30),
        **_DENSE,
    ),
    Case(
        "bias_offset_lengths",
        bias=Bias("holes", "BNTS"),
        q_lengths=_ANY * 2,
        kv_lengths=_ANY * 2,
        q_offset=_ANY * 2,
        window=(50, 20),
        **_DENSE,
    ),
    Case(
        "few_offset_lengths",
        batch=2,
        q_len=3,
        kv_len=600,
        heads=6,
        kv_heads=2,
        q_lengths=_ANY * 2,
        kv_lengths=_ANY * 2,
        q_offset=_ANY * 2,
        is_causal=True,
    ),
)


class Hostile(NamedTuple):
    """A problem of kind ``case`` as it was sent, and as it is meant."""

    case: Case
    sent: Data
    meant: Operands

    @property
    def wanted(self) -> Tolerance:
        """Exact results."""
        return tolerance(self.meant, self.case.semantics, self.sent.cotangents)


def _number(rng: np.random.Generator, limit: int) -> int:
    special = (_INT32.min, _INT32.min + 1, -(2**30), -1000, -1, 0, 1, limit - 1, limit, limit + 1)
    special += (2**28, 2**30 - 1, 2**30, _INT32.max - 1, _INT32.max)
    draw = rng.integers(4)
    if draw == 0:
        return int(rng.integers(_INT32.min, _INT32.max, endpoint=True))
    return int(rng.choice(special)) if draw == 1 else int(rng.integers(0, limit, endpoint=True))


def problem(seed: int) -> Hostile:
    """Problem number ``seed``."""
    rng = np.random.default_rng(seed)
    case = KINDS[seed % len(KINDS)]
    given = make(case, "bfloat16")

    def numbers(like: Any, limit: int) -> Any:
        if like is None:
            return None
        drawn = [_number(rng, limit) for _ in range(like.size)]
        return np.array(drawn, np.int32).reshape(like.shape)

    def ids(like: Any) -> Any:
        if like is None:
            return None
        known = [_number(rng, 3) for _ in range(3)]
        return rng.choice(np.array(known, np.int32), like.shape)

    x = given.operands
    sent = x._replace(
        q_lengths=numbers(x.q_lengths, case.q_len),
        kv_lengths=numbers(x.kv_lengths, case.kv_len),
        cu_seqlens_q=numbers(x.cu_seqlens_q, case.q_len),
        cu_seqlens_k=numbers(x.cu_seqlens_k, case.kv_len),
        q_offset=numbers(x.q_offset, case.kv_len),
    )
    if x.q_segments is not None:
        both = ids(np.concatenate([x.q_segments, x.kv_segments], axis=1))
        sent = sent._replace(q_segments=both[:, : case.q_len], kv_segments=both[:, case.q_len :])
    return Hostile(case, given._replace(operands=sent), meant(sent))


def meant(sent: Operands) -> Operands:
    """What the words of the contract make of values as they were sent; lengths are the oracle's."""

    def borders(cu_seqlens: Any, length: int) -> Any:
        if cu_seqlens is None:
            return None
        highest, result = 0, []
        for border in cu_seqlens.tolist():
            highest = max(highest, min(border, length))
            result.append(highest)
        return np.array(result, np.int32)

    offset = sent.q_offset
    return sent._replace(
        cu_seqlens_q=borders(sent.cu_seqlens_q, sent.q.shape[1]),
        cu_seqlens_k=borders(sent.cu_seqlens_k, sent.k.shape[1]),
        q_offset=None if offset is None else np.clip(offset, -MAX_OFFSET, MAX_OFFSET),
    )


@cache
def _step(semantics: Semantics, implementation: Forced) -> Any:
    def step(operands: Operands, cotangents: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, sinks: Any, bias: Any) -> Any:
            x = operands._replace(q=q, k=k, v=v, sinks=sinks, bias=bias)
            return vjp.attention(x, semantics, implementation)

        results, pull = jax.vjp(attend, *operands[:3], operands.sinks, operands.bias)
        return *results, *pull(cotangents)

    return jax.jit(step)


def run(operands: Operands, given: Hostile, implementation: Forced) -> Results:
    """Forward and gradients of ``operands``; cotangents and the rest are those of ``given``."""
    step = _step(given.case.semantics, implementation)
    results = Results(*step(on_device(operands), given.sent.cotangents))
    if results.dsinks is None:
        return results
    return results._replace(dsinks=np.sum(results.dsinks, axis=0))
