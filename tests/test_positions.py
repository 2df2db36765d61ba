"""Tokens that devices hold in any order, with positions: what whole sequences in order give."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import oracle
from helpers.cases import make
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_layouts import BY_NAME, check_held, in_order_of
from test_parallel import (
    CAUSAL,
    EVERYTHING,
    PACKED,
    assert_as_alone,
    collectives,
    drawn,
    mesh_of,
    program,
)

import jax_fa
from jax_fa import parallel


def shuffled(batch, count, seed=0):
    """Numbers [batch, count] of tokens: another order for every sequence."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(count) for _ in range(batch)])


def check(case, mesh, dtype="float32", **how):
    """Forward and gradients against the oracle, of tokens in no layout."""
    tokens = [shuffled(case.batch, case.q_len), shuffled(case.batch, case.kv_len, 1)]
    positions: Any = tuple(jnp.asarray(x, jnp.int32) for x in tokens)
    if case.q_len == case.kv_len:
        tokens[1], positions = tokens[0], positions[0]
    check_held(case, mesh, tokens, dtype, {"positions": positions}, **how)


@pytest.mark.parametrize("strategy", ["auto", "all_to_all"])
@pytest.mark.parametrize("case", [CAUSAL, EVERYTHING], ids=str)
def test_tokens_in_any_order_give_what_those_in_order_give(case, strategy):
    check(case, mesh_of(4), strategy=strategy)


@pytest.mark.parametrize("name", ["window", "lengths", "segments", "causal_more_rows", "offset"])
def test_what_counts_tokens_counts_them_in_order(name):
    check(BY_NAME[name], mesh_of(2, 2, 2))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype"),
    [(4, 1, "float32"), (8, 2, "bfloat16"), (12, 6, "float32"), (12, 3, "float32")],
)
def test_key_heads_that_do_not_divide_go_to_several_devices(heads, kv_heads, dtype):
    case = EVERYTHING if dtype == "float32" else CAUSAL
    check(replace(case, heads=heads, kv_heads=kv_heads), mesh_of(4), dtype)


def test_one_device():
    check(EVERYTHING, mesh_of(1))


def test_two_axes_as_one():
    mesh = jax.make_mesh((4, 2), ("gpus", "hosts"), axis_types=(AxisType.Auto,) * 2)
    axes, arrays = ("hosts", "gpus"), drawn(heads=8)
    tokens = shuffled(2, 32)
    attend = jax.shard_map(
        partial(parallel.attention_with_lse, context_axis=axes, is_causal=True),
        mesh=mesh,
        in_specs=(P(None, axes),) * 3,
        out_specs=(P(None, axes),) * 2,
    )
    by_position = jax.shard_map(
        lambda x, positions: parallel.attention_with_lse(
            **x, positions=positions, context_axis=axes, is_causal=True
        ),
        mesh=mesh,
        in_specs=P(None, axes),
        out_specs=(P(None, axes),) * 2,
    )
    held = {name: in_order_of(x, tokens) for name, x in arrays.items()}
    got = jax.jit(by_position)(held, tokens.astype(np.int32))
    want = jax.jit(attend)(*arrays.values())
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, in_order_of(b, tokens), rtol=1e-5, atol=1e-5)


def test_a_packed_row():
    case = PACKED[1]
    data = make(case, "float32")
    x = data.operands
    options = case.options(x)
    ids = [options.pop(name) for name in ("query_segment_ids", "key_value_segment_ids")]
    rows, keys = shuffled(1, case.q_len)[0], shuffled(1, case.kv_len, 1)[0]
    spec = P("context")

    @jax.jit
    @partial(jax.shard_map, mesh=mesh_of(4), in_specs=(spec,) * 7, out_specs=spec)
    def attend(q, k, v, q_ids, k_ids, q_positions, k_positions):
        packed: Any = parallel.attention_varlen
        return packed(
            *(q, k, v, x.cu_seqlens_q, x.cu_seqlens_k),
            **options,
            seqused_q=x.q_lengths,
            seqused_k=x.kv_lengths,
            query_segment_ids=q_ids,
            key_value_segment_ids=k_ids,
            positions=(q_positions, k_positions),
        )

    own = (x.q[0][rows], x.k[0][keys], x.v[0][keys], ids[0][rows], ids[1][keys])
    out = attend(*own, rows.astype(np.int32), keys.astype(np.int32))
    alone = oracle.tolerance(x, case.semantics, data.cotangents).exact.out[0]
    np.testing.assert_allclose(out[np.argsort(rows)], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["equal", "extreme", "restarting"])
def test_what_numbers_no_sequence_counts_as_its_ranks(kind):
    """No access outside an array, whatever arrives: these are orders too."""
    info = np.iinfo(np.int32)
    extreme = np.random.default_rng(0).choice([info.min, -1, 0, 31, 32, info.max], (2, 32))
    values = {
        "equal": np.full((2, 32), 7),
        "extreme": extreme,
        "restarting": np.tile(np.arange(8), (2, 4)),
    }[kind]
    tokens = np.argsort(values, axis=1, kind="stable")
    arrays = drawn(kv_heads=4)
    attend = program(mesh_of(4), [*arrays, "positions"], is_causal=True)

    def alone(x):
        in_order = {name: in_order_of(x[name], tokens) for name in arrays}
        results = jax_fa.attention_with_lse(**in_order, is_causal=True)
        return tuple(in_order_of(y, np.argsort(tokens, axis=1)) for y in results)

    assert_as_alone(attend, alone, {**arrays, "positions": jnp.asarray(values, jnp.int32)})


# ------------------------------------------------------------------------------------ what is moved


def text_of(arrays, **how):
    return jax.jit(program(mesh_of(4), arrays, **how)).lower(arrays)


def test_heads_are_exchanged_and_positions_alone_gathered():
    arrays = {**drawn(kv_heads=4), "positions": jnp.asarray(shuffled(2, 32), jnp.int32)}
    program_text = text_of(arrays, is_causal=True)
    text = program_text.compile().as_text()
    assert sorted(collectives(text)) == ["all-gather"] + ["all-to-all"] * 5
    assert "s32[2,32]" in next(line for line in text.splitlines() if " all-gather(" in line)
    assert "jax_fa_all_to_all_by_position" in program_text.as_text(debug_info=True)


@pytest.mark.parametrize("strategy", ["all_gather", "ring"])
def test_positions_matter_where_a_mask_counts_tokens(strategy):
    arrays = drawn(kv_heads=2)
    with_positions = {**arrays, "positions": jnp.asarray(shuffled(2, 32), jnp.int32)}
    texts = [text_of(x, strategy=strategy).compile().as_text() for x in (arrays, with_positions)]
    assert collectives(texts[0]) == collectives(texts[1])
    assert "sort(" not in texts[1]


# ---------------------------------------------------------------------------------------- refusals

ANY = jnp.asarray(shuffled(2, 32), jnp.int32)


@pytest.mark.parametrize(
    ("error", "match", "how"),
    [
        (
            NotImplementedError,
            "strategy='ring' does not serve positions.*Use strategy='all_to_all'.*'zigzag'",
            {"strategy": "ring"},
        ),
        (
            NotImplementedError,
            "positions does not serve this call: a bias or a mask has rows.*layout='contiguous'",
            {"mask": np.ones((1, 1, 1, 32), bool)},
        ),
        (ValueError, "layout='zigzag' and positions both say", {"layout": "zigzag"}),
        (ValueError, r"positions of queries should have shape \[2, 4\]", {"positions": ANY[:1]}),
        (
            ValueError,
            r"positions of keys should have shape \[2, 4\]",
            {"positions": (ANY, ANY[:1])},
        ),
        (ValueError, "or a pair .* but is a tuple of 3", {"positions": (ANY,) * 3}),
        (ValueError, "positions of queries should be integers", {"positions": ANY * 0.5}),
    ],
    ids=lambda x: str(x)[:40],
)
def test_refusals_say_what_would_work(error, match, how):
    how = {"is_causal": True, "positions": ANY, **how}
    arrays = {**drawn(heads=8), "positions": how.pop("positions")}
    specs = jax.tree.map(lambda x: P(None if x.shape[0] == 1 else "data", "context"), arrays)
    attend = jax.shard_map(
        lambda x: parallel.attention(**x, **how),
        mesh=mesh_of(8),
        in_specs=(specs,),
        out_specs=P("data", "context"),
    )
    with pytest.raises(error, match=match):
        jax.eval_shape(attend, arrays)


def test_query_heads_that_do_not_divide_are_refused():
    arrays = {**drawn(heads=6), "positions": ANY}
    match = "some of the 6 query heads.*strategy='all_gather'"
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(program(mesh_of(4), arrays, is_causal=True), arrays)


def test_more_keys_than_queries_have_positions_of_their_own():
    arrays = {**drawn(heads=8), "positions": ANY}
    arrays["query"] = arrays["query"][:, :16]
    with pytest.raises(ValueError, match=r"2 queries and 4 keys here.*positions=\(queries, keys\)"):
        jax.eval_shape(program(mesh_of(8), arrays, is_causal=True), arrays)


def test_positions_that_are_the_same_on_every_device_are_refused():
    arrays = drawn(heads=8)
    match = r"positions of queries are the same on every device along axis 'context'.*shard_map"
    closed_over = program(mesh_of(8), arrays, is_causal=True, positions=ANY[:, :4])
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(closed_over, arrays)
    attend = jax.shard_map(
        lambda x, positions: parallel.attention(**x, is_causal=True, positions=positions),
        mesh=mesh_of(8),
        in_specs=(P(None, "context"), P()),
        out_specs=P(None, "context"),
    )
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(attend, arrays, ANY[:, :4])


@pytest.mark.parametrize("wrong", [ANY + 1, ANY // 2], ids=["from_1", "twice"])
def test_numbers_at_hand_that_number_no_sequence_are_refused(wrong):
    arrays = drawn()
    attend = program(mesh_of(1), arrays, is_causal=True, positions=wrong)
    with pytest.raises(ValueError, match="should be the numbers 0 to 31, each once a sequence"):
        jax.eval_shape(attend, arrays)


def test_numbers_at_hand_that_number_a_sequence_are_taken():
    arrays = drawn()
    attend = program(mesh_of(1), arrays, is_causal=True, positions=np.tile(np.arange(32), (2, 1)))
    assert_as_alone(attend, lambda x: jax_fa.attention_with_lse(**x, is_causal=True), arrays)
