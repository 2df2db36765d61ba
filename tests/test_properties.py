"""Semantics over random problems: 1,250 hypothesis examples at the default profile.

Static settings come from small sets so that compiled programs are shared; everything that is data
(lengths, offsets, segments, borders) varies freely.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers.cases import Case, make
from helpers.harness import on_device
from helpers.oracle import Results, assert_close, tolerance
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_fa
from jax_fa.runtime import primitives, vjp

SHAPES = (
    (1, 1, 1, 1, 8),
    (2, 9, 14, 2, 8),
    (2, 40, 33, 4, 16),
    (1, 70, 130, 1, 24),
    (3, 17, 17, 6, 8),
)
"""B, T, S, N, D; K is drawn among the divisors of N."""
BANDS: tuple[dict[str, Any], ...] = (
    {},
    {"is_causal": True},
    {"is_causal": True, "alignment": "bottom_right"},
    {"window": (3, 2)},
    {"window": (None, 4), "alignment": "bottom_right"},
    {"window": (7, None), "is_causal": True},
    {"window": (0, 0)},
)


@cache
def forward(semantics):
    return jax.jit(lambda operands: primitives.forward(operands, semantics))


@cache
def gradients(semantics):
    @jax.jit
    def step(operands, cotangents):
        results, pull = jax.vjp(lambda x: vjp.attention(x, semantics), operands)
        return results, pull(cotangents)[0]

    return step


def lengths(count, longest):
    return st.tuples(*[st.integers(-2, longest + 3)] * count)


@st.composite
def dense_cases(draw):
    batch, q_len, kv_len, heads, head_dim = draw(st.sampled_from(SHAPES))
    kv_heads = draw(st.sampled_from([k for k in (1, 2, 3, 6) if heads % k == 0]))
    more = dict(draw(st.sampled_from(BANDS)))
    if draw(st.booleans()):
        more["q_lengths"] = draw(lengths(batch, q_len))
    if draw(st.booleans()):
        more["kv_lengths"] = draw(lengths(batch, kv_len))
    if draw(st.booleans()):
        more["q_offset"] = draw(st.tuples(*[st.integers(-q_len - 2, kv_len + 2)] * batch))
    if draw(st.booleans()):
        ids = st.integers(0, 3)
        more["segments"] = tuple(draw(st.tuples(*[ids] * n)) for n in (q_len, kv_len))
    return Case(
        "dense",
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        soft_cap=draw(st.sampled_from([None, 2.0])),
        has_sinks=draw(st.booleans()),
        magnitude=draw(st.sampled_from([1.0, 6.0])),
        seed=draw(st.integers(0, 5)),
        **more,
    )


@st.composite
def packed_cases(draw):
    count, q_len, kv_len = draw(st.sampled_from([(1, 8, 8), (3, 40, 44), (5, 64, 90)]))

    def borders(total):
        return tuple(sorted(draw(st.tuples(*[st.integers(0, total)] * (count + 1)))))

    more = dict(draw(st.sampled_from(BANDS)))
    if draw(st.booleans()):
        more["q_lengths"] = draw(lengths(count, q_len))
    if draw(st.booleans()):
        more["kv_lengths"] = draw(lengths(count, kv_len))
    return Case(
        "packed",
        q_len=q_len,
        kv_len=kv_len,
        heads=4,
        kv_heads=2,
        head_dim=8,
        cu_q=borders(q_len),
        cu_k=borders(kv_len),
        has_sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 5)),
        **more,
    )


def check_forward(case, dtype="float32"):
    data = make(case, dtype)
    out, lse = forward(case.semantics)(on_device(data.operands))
    bound = tolerance(data.operands, case.semantics)
    assert_close(Results(out, lse), bound, dtype, label=repr(case))


def check_gradients(case):
    data = make(case, "float32")
    (out, lse), grads = gradients(case.semantics)(on_device(data.operands), data.cotangents)
    dsinks = None if grads.sinks is None else np.sum(grads.sinks, axis=0)
    got = Results(out, lse, grads.q, grads.k, grads.v, dsinks)
    bound = tolerance(data.operands, case.semantics, data.cotangents)
    assert_close(got, bound, "float32", label=repr(case))


@settings(max_examples=500)
@given(dense_cases(), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_dense_forward_equals_the_oracle(case, dtype):
    check_forward(case, dtype)


@settings(max_examples=250)
@given(dense_cases())
def test_dense_gradients_equal_the_oracle(case):
    check_gradients(case)


@settings(max_examples=200)
@given(packed_cases())
def test_packed_forward_equals_the_oracle(case):
    check_forward(case)


@settings(max_examples=100)
@given(packed_cases())
def test_packed_gradients_equal_the_oracle(case):
    check_gradients(case)


@settings(max_examples=100)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(-5, 45)),
    st.one_of(st.none(), st.integers(-5, 45)),
    st.booleans(),
)
def test_any_window_equals_the_oracle(q_len, kv_len, left, right, is_causal):
    check_forward(
        Case(
            "window",
            q_len=q_len,
            kv_len=kv_len,
            heads=1,
            kv_heads=1,
            head_dim=8,
            window=(left, right),
            is_causal=is_causal,
            alignment="bottom_right" if (q_len + kv_len) % 2 else "top_left",
        )
    )


# Laws that need no oracle.

_rng = np.random.default_rng(3)
Q, K, V = (_rng.standard_normal((2, 40, 4, 16)).astype(np.float32) for _ in range(3))


@jax.jit
def causal_with_offset(q, offset):
    return jax_fa.attention(q, K, V, is_causal=True, query_offset=offset)


@settings(max_examples=40)
@given(st.integers(0, 32))
def test_a_slice_of_rows_with_its_offset_is_that_slice_of_the_whole(start):
    whole = jax_fa.attention(Q, K, V, is_causal=True)
    part = causal_with_offset(Q[:, start : start + 8], start)
    np.testing.assert_allclose(part, whole[:, start : start + 8], atol=1e-6)


@jax.jit
def within_segments(q_ids, kv_ids):
    return jax_fa.attention(Q, K, V, query_segment_ids=q_ids, key_value_segment_ids=kv_ids)


@settings(max_examples=30)
@given(st.permutations(range(5)), st.tuples(*[st.integers(0, 4)] * 40))
def test_names_of_segments_do_not_matter(new_names, ids):
    old = np.tile(np.array(ids, np.int32), (2, 1))
    new = np.array(new_names, np.int32)[old] * 1000 - 7
    np.testing.assert_array_equal(within_segments(old, old), within_segments(new, new))


@jax.jit
def permuted_keys(order):
    return jax_fa.attention(Q, jnp.take(K, order, axis=1), jnp.take(V, order, axis=1))


@settings(max_examples=30)
@given(st.permutations(range(40)))
def test_order_of_keys_does_not_matter_without_a_band(order):
    np.testing.assert_allclose(permuted_keys(np.array(order)), jax_fa.attention(Q, K, V), atol=1e-6)
