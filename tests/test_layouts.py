"""Tokens that devices hold zigzag or striped: what whole sequences in order give."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import oracle
from helpers.cases import make
from helpers.harness import wanted
from jax.sharding import PartitionSpec as P
from test_parallel import (
    CAUSAL,
    EVERYTHING,
    OTHERS,
    PACKED,
    STRATEGIES,
    arrays_and_options,
    collectives,
    drawn,
    lowered,
    mesh_of,
    program,
    results,
)

from jax_fa import parallel

PER_TOKEN = ("query", "key", "value", "query_segment_ids", "key_value_segment_ids")


def held(layout, size, count):
    """Numbers of the tokens that the first device holds, then of those of the second, ..."""
    if layout == "striped":
        return np.concatenate([np.arange(device, count, size) for device in range(size)])
    chunks = np.split(np.arange(count), 2 * size)
    pairs = [(chunks[i], chunks[2 * size - 1 - i]) for i in range(size)]
    return np.concatenate([chunk for pair in pairs for chunk in pair])


def in_order_of(x, tokens):
    """``x[b, tokens[b]]`` for every sequence b."""
    return jnp.take_along_axis(x, tokens.reshape(*tokens.shape, *[1] * (x.ndim - 2)), 1)


def check_held(case, mesh, tokens, dtype="float32", moving=None, **how):
    """Forward and gradients against the oracle, with arrays permuted there and back.

    ``tokens`` are numbers of the queries [B, T], and of the keys [B, S], in the order in which
    devices hold them; ``moving`` are further arrays, as a caller hands them over.
    """
    arrays, options = arrays_and_options(case, dtype)
    q, k = tokens
    orders = dict(zip(PER_TOKEN, (q, k, k, q, k), strict=True))
    placed = {n: in_order_of(x, orders[n]) if n in orders else x for n, x in arrays.items()}
    placed |= moving or {}
    attend = program(mesh, placed, **options, **how)
    cotangents = tuple(in_order_of(x, q) for x in make(case, dtype).cotangents)
    (out, lse), grads = jax.jit(partial(results, attend))(placed, cotangents)

    def back(x, name="query"):
        return in_order_of(x, np.argsort(orders[name], axis=1))

    dq, dk, dv = (back(grads[name], name) for name in ("query", "key", "value"))
    got = oracle.Results(back(out), back(lse), dq, dk, dv, grads.get("sinks"))
    oracle.assert_close(got, wanted(case, dtype), dtype, f"{case}, {how}")


def check(case, layout, size, **how):
    """As ``check_held``, of tokens in a layout."""
    tokens = [
        np.tile(held(layout, size, count), (case.batch, 1)) for count in (case.q_len, case.kv_len)
    ]
    check_held(case, mesh_of(size), tokens, layout=layout, **how)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", [CAUSAL, EVERYTHING], ids=str)
def test_zigzag_tokens_give_what_those_in_order_give(case, strategy):
    check(case, "zigzag", 4, strategy=strategy)


@pytest.mark.parametrize("strategy", ["all_gather", "all_to_all"])
def test_striped_tokens_give_what_those_in_order_give(strategy):
    check(EVERYTHING, "striped", 4, strategy=strategy)


def test_a_ring_of_striped_tokens():
    check(CAUSAL, "striped", 2, strategy="ring")


BY_NAME = {case.name: case for case in OTHERS}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("window", "zigzag"),
        ("window", "striped"),
        ("lengths", "zigzag"),
        ("causal_bottom_right", "zigzag"),
    ],
)
def test_what_counts_tokens_counts_them_in_order(name, layout):
    check(BY_NAME[name], layout, 4, strategy="all_gather")


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_packed_rows(layout):
    case = PACKED[1]
    data = make(case, "float32")
    x = data.operands
    everywhere: dict[str, Any] = {
        **case.options(x),
        "seqused_q": x.q_lengths,
        "seqused_k": x.kv_lengths,
    }
    ids = [everywhere.pop(name) for name in ("query_segment_ids", "key_value_segment_ids")]
    rows, keys = (held(layout, 4, count) for count in (case.q_len, case.kv_len))

    @partial(jax.shard_map, mesh=mesh_of(4), in_specs=(P("context"),) * 5, out_specs=P("context"))
    def attend(q, k, v, q_ids, k_ids):
        borders = (x.cu_seqlens_q, x.cu_seqlens_k)
        segments = {"query_segment_ids": q_ids, "key_value_segment_ids": k_ids}
        packed: Any = parallel.attention_varlen
        return packed(
            q, k, v, *borders, **everywhere, **segments, layout=layout, strategy="all_gather"
        )

    out = jax.jit(attend)(x.q[0][rows], x.k[0][keys], x.v[0][keys], ids[0][rows], ids[1][keys])
    want = oracle.tolerance(x, case.semantics, data.cotangents)
    alone = want.exact.out[0]
    np.testing.assert_allclose(out[np.argsort(rows)], alone, rtol=1e-5, atol=1e-5)


def test_zigzag_rows_stay_where_they_are():
    how = {"kv_heads": 2, "is_causal": True, "layout": "zigzag"}
    text = lowered("all_gather", **how).compile().as_text()
    assert collectives(text) == ["all-gather"] * 2
    text = lowered("ring", q_len=64, **how).compile().as_text()
    assert set(collectives(text)) == {"collective-permute"}
    assert not re.search(r"\[2,64,", text)


def test_a_layout_matters_where_positions_do():
    """No mask that counts tokens: neither even chunks nor an exchange for them."""
    plain, striped = (
        lowered("all_gather", q_len=24, kv_heads=2, **how).as_text()
        for how in ({}, {"layout": "striped"})
    )
    assert plain == striped


@pytest.mark.parametrize(
    ("error", "match", "how"),
    [
        (ValueError, "layout='spiral' is unknown", {"layout": "spiral"}),
        (
            ValueError,
            "layout='striped' with strategy='all_gather' over 8 devices.*in 8 equal.*T is 4",
            {"layout": "striped", "strategy": "all_gather", "is_causal": True},
        ),
        (
            NotImplementedError,
            "layout='zigzag' does not serve this call: a bias or a mask has rows",
            {"layout": "zigzag", "mask": np.ones((1, 1, 1, 32), bool)},
        ),
    ],
    ids=lambda x: str(x)[:40],
)
def test_refusals_say_what_would_work(error, match, how):
    arrays = drawn()
    with pytest.raises(error, match=match):
        jax.eval_shape(program(mesh_of(8), arrays, **how), arrays)


def test_an_odd_number_of_zigzag_tokens_is_refused():
    arrays = drawn(q_len=24, heads=8, kv_heads=8)
    attend = program(mesh_of(8), arrays, is_causal=True, layout="zigzag", strategy="all_to_all")
    with pytest.raises(ValueError, match=r"in 2 equal parts, but T is 3\. Pad the sequences\."):
        jax.eval_shape(attend, arrays)


def test_levels_take_contiguous_tokens():
    mesh = jax.make_mesh((2, 4), ("hosts", "gpus"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    attend = jax.shard_map(
        partial(
            parallel.attention,
            context_axis=("hosts", "gpus"),
            strategy=("ring", "all_to_all"),
            layout="zigzag",
            is_causal=True,
        ),
        mesh=mesh,
        in_specs=(P(None, ("hosts", "gpus")),) * 3,
        out_specs=P(None, ("hosts", "gpus")),
    )
    with pytest.raises(NotImplementedError, match="goes with one strategy, not with 2 levels"):
        jax.eval_shape(attend, *drawn(kv_heads=4).values())
