"""Tokens that plain ``jit`` splits over eight virtual devices: shared as under ``shard_map``."""

import itertools
import json
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import oracle
from helpers.cases import make
from helpers.harness import wanted
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_parallel import (
    BIASES,
    CAUSAL,
    EVERYTHING,
    MASKS,
    OTHERS,
    OUT_SPECS,
    PACKED,
    PAIRS,
    SPEC,
    arrays_and_options,
    collectives,
    drawn,
    mesh_of,
    named,
    of_len,
    results,
    specs_of,
)

import jax_fa
from jax_fa.runtime import bindings, sharding
from jax_fa.runtime.partitioning import Call
from jax_fa.spec.problem import Semantics
from jax_fa.spec.variants import BY_NAME

GATHERED = {"heads": 8, "kv_heads": 2}
"""Heads that no axis of four or eight devices divides, so that keys are gathered."""


def place(arrays, mesh, specs=None):
    specs = specs or specs_of(arrays)
    return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}


def check(case, mesh, dtype="float32"):
    """Forward and gradients against the oracle; returns the text of the program."""
    arrays, options = arrays_and_options(case, dtype)
    attend = partial(results, lambda x: jax_fa.attention_with_lse(**x, **options))
    cotangents = tuple(
        jax.device_put(jnp.asarray(x), NamedSharding(mesh, spec))
        for x, spec in zip(make(case, dtype).cotangents, OUT_SPECS, strict=True)
    )
    placed = place(arrays, mesh)
    program = jax.jit(attend).lower(placed, cotangents).compile()
    (out, lse), grads = program(placed, cotangents)
    oracle.assert_close(named(out, lse, grads), wanted(case, dtype), dtype, str(case))
    assert out.sharding.is_equivalent_to(placed["query"].sharding, out.ndim)
    for name in ("query", "key", "value"):
        assert grads[name].sharding.is_equivalent_to(placed[name].sharding, out.ndim)
    return program.as_text()


def moved(kind, text):
    """Shapes of the results of the collectives of a kind, sorted."""
    shapes = re.findall(rf"\w+\[([\d,]+)\]\S* {kind}(?:-start)?\(", text)
    return sorted(tuple(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.parametrize("shape", [(8, 1, 1), (4, 2, 1), (2, 2, 2)], ids=str)
def test_keys_and_values_are_gathered_once_a_pass_and_no_query(shape):
    context, model, data = shape
    case = replace(CAUSAL, heads=4 * model, kv_heads=model, batch=4)
    text = check(case, mesh_of(*shape))
    kv = (4 // data, 64, 1, 8)
    assert moved("all-gather", text) == [kv] * 4
    assert moved("reduce-scatter", text) == [(kv[0], 64 // context, 1, 8)] * 2
    assert "all-to-all" not in collectives(text)


@pytest.mark.parametrize("case", [CAUSAL, EVERYTHING], ids=str)
def test_heads_are_exchanged_where_they_divide(case):
    text = check(case, mesh_of(4, 2))
    assert "all-to-all" in collectives(text)
    tokens = [shape for shape in moved("all-gather", text) if len(shape) > 2]
    assert tokens == []  # segment ids alone are gathered


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_every_feature_with_keys_gathered(case):
    text = check(replace(case, **GATHERED), mesh_of(4, 2))
    assert not any(shape[2:] == (4, 8) for shape in moved("all-gather", text))


@pytest.mark.parametrize("case", [*MASKS, *BIASES], ids=str)
def test_masks_and_biases_split_with_the_query(case):
    text = check(case, mesh_of(4, 2))
    heads = {case.heads // 2, case.kv_heads // 2}
    gathered = [shape for shape in moved("all-gather", text) if len(shape) == 4]
    assert all(shape[2] in heads and shape[3] == 8 for shape in gathered), gathered  # k and v


def test_masks_and_biases_with_everything_else():
    check(PAIRS, mesh_of(2, 2, 2))


def test_a_mask_of_blocks_has_all_its_rows_on_every_device():
    blocks = np.random.default_rng(0).random((2, 4, 2, 2)) < 0.7
    arrays, mesh = drawn(q_len=192), mesh_of(8)

    def attend(x):
        return jax_fa.attention_with_lse(**x, block_mask=blocks, is_causal=True)

    cotangents = jnp.cos(arrays["query"]), jnp.sin(arrays["query"][..., 0])
    got = jax.jit(partial(results, attend))(place(arrays, mesh), cotangents)
    want = jax.jit(partial(results, attend))(arrays, cotangents)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)
    assert got[0][0].sharding.spec[1] == "context"


def test_programs_of_before_do_not_split_tokens_beside_a_mask():
    call = Call("fwd", "cpu", ("q", "k", "v", "mask_words", "mask_map"), Semantics(1.0))
    fields = json.loads(call.text())
    del fields["by_token"]
    assert not Call.of(json.dumps(fields)).names.splits_tokens
    new = call._replace(by_token=("Tm",))
    assert Call.of(new.text()) == new and new.names.splits_tokens


def test_everything_at_once_with_batch_heads_and_tokens_split():
    check(replace(EVERYTHING, heads=4, kv_heads=2), mesh_of(2, 2, 2))


def test_a_window_moves_only_what_it_reaches():
    case = of_len("window", q_len=208, is_causal=True, window=(30, 0))
    text = check(case, mesh_of(8))
    assert set(collectives(text)) == {"collective-permute"}
    assert not re.search(r"\[2,208,", text)


def test_devices_that_share_a_key_head_and_a_sequence_sum_both():
    """Two key/value heads on four devices, each pair of which shares one, and tokens over two."""
    mesh = jax.make_mesh((2, 4), ("context", "model"), axis_types=(AxisType.Auto,) * 2)
    arrays, options = arrays_and_options(replace(EVERYTHING, **GATHERED))
    specs = {
        name: P(None, "context", None if "key" in name or name == "value" else "model")
        if name in ("query", "key", "value")
        else P(None, *SPEC[name][1:2])
        for name in arrays
    }
    attend = partial(results, lambda x: jax_fa.attention_with_lse(**x, **options))
    cotangents = tuple(map(jnp.asarray, make(EVERYTHING, "float32").cotangents))
    cotangents = cotangents[0][:, :, :8], cotangents[1][:, :, :8]
    got = jax.jit(attend)(place(arrays, mesh, specs), cotangents)
    want = jax.jit(attend)(arrays, cotangents)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_bfloat16_keeps_the_tolerance_rule_and_sums_in_float32():
    text = check(replace(CAUSAL, **GATHERED), mesh_of(8), "bfloat16")
    assert re.findall(r"(\w+)\[\S* reduce-scatter\(", text) == ["f32"] * 2


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed_sequences_may_lie_on_several_devices(case):
    data = make(case, "float32")
    x, mesh = data.operands, mesh_of(4, 2)
    more = {**case.options(x), "seqused_q": x.q_lengths, "seqused_k": x.kv_lengths}

    @jax.jit
    def step(moving, dout):
        packed = partial(
            jax_fa.attention_varlen, cu_seqlens_q=x.cu_seqlens_q, cu_seqlens_k=x.cu_seqlens_k
        )
        out, pullback = jax.vjp(lambda *moving: packed(*moving, **more), *moving)
        return out, *pullback(dout)

    spec = NamedSharding(mesh, P("context", "model"))
    placed = jax.device_put((x.q[0], x.k[0], x.v[0]), spec)
    dout = jax.device_put(jnp.asarray(data.cotangents[0][0]), spec)
    program = step.lower(placed, dout).compile()
    assert "all-to-all" in collectives(program.as_text())
    out, *grads = (y[None] for y in program(placed, dout))
    no_dlse = np.zeros_like(data.cotangents[1])
    want = oracle.tolerance(x, case.semantics, (data.cotangents[0], no_dlse))
    got = oracle.Results(out, want.exact.lse, *grads)
    oracle.assert_close(got, want, "float32", str(case))


def test_recomputed_inside_a_scan_over_layers():
    arrays = drawn(heads=4, kv_heads=4)

    @jax.checkpoint
    def layer(x, key):
        return x + jax_fa.attention(x, key, key, is_causal=True), None

    def loss(x, keys):
        return jnp.sum(jnp.sin(jax.lax.scan(layer, x, keys)[0]))

    keys = jnp.stack([arrays["key"], arrays["value"]])
    step = jax.jit(jax.grad(loss, (0, 1)))
    mesh = mesh_of(8)
    placed = (
        jax.device_put(arrays["query"], NamedSharding(mesh, P(None, "context"))),
        jax.device_put(keys, NamedSharding(mesh, P(None, None, "context"))),
    )
    program = step.lower(*placed).compile()
    assert "reduce-scatter" in collectives(program.as_text())
    want = step(arrays["query"], keys)
    for a, b in zip(program(*placed), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------- what splits otherwise is gathered, as ever


def forward(arrays, specs, mesh, **how):
    """Output of a causal call whose arrays are sharded by ``specs``; checks it."""
    attend = jax.jit(partial(jax_fa.attention, is_causal=True, **how))
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays.values(), specs, strict=True)
    ]
    program = attend.lower(*placed).compile()
    want = attend(*arrays.values())
    np.testing.assert_allclose(program(*placed), want, rtol=1e-5, atol=1e-5)
    return program.as_text()


def test_the_partitioner_before_shardy():
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        text = forward(drawn(), [P(None, "context")] * 3, mesh_of(8))
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    assert moved("all-gather", text) == [(2, 32, 2, 8)] * 2


@pytest.mark.parametrize(
    "specs",
    [
        (P(None, "context"), P(), P()),
        (P(), P(None, "context"), P(None, "context")),
        (P(None, ("model", "context")),) * 3,
        (P(None, ("context", "model")),) * 3,
        (P(None, "context", None, "model"),) * 3,
        (P(None, "context"), P(None, "model"), P("model")),
    ],
    ids=str,
)
def test_any_sharding_gives_the_result(specs):
    forward(drawn(), specs, mesh_of(4, 2))


def test_keys_that_do_not_split_give_the_result():
    arrays = drawn()
    arrays = {name: x if name == "query" else x[:, :30] for name, x in arrays.items()}
    forward(arrays, (P(None, "context"), P(), P()), mesh_of(8))


def test_under_shard_map_over_another_axis_tokens_are_gathered():
    mesh = mesh_of(4, 1, 2)
    attend = jax.shard_map(
        partial(jax_fa.attention, is_causal=True),
        mesh=mesh,
        axis_names={"data"},
        in_specs=(P("data"),) * 3,
        out_specs=P("data"),
    )
    arrays = list(drawn().values())
    placed = jax.device_put(arrays, NamedSharding(mesh, P("data", "context")))
    want = jax_fa.attention(*arrays, is_causal=True)
    np.testing.assert_allclose(jax.jit(attend)(*placed), want, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------- meshes of devices


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_parts_are_read_as_the_axes_of_a_mesh(order):
    """Two of four axes split tokens: in their order, or no mesh is found."""
    sizes = np.array([2, 3, 4, 5])
    strides = np.array([60, 20, 5, 1])
    parts = np.arange(120).reshape(sizes).transpose(order)
    batch, major, minor, copies = zip(strides[list(order)], sizes[list(order)], strict=True)
    axes = sharding.mesh_axes(parts.reshape(batch[1], 1, 1, -1, copies[1]))
    if order[1] > order[2]:
        assert axes is None
        return
    context = [major, minor]
    if major[0] == minor[0] * minor[1]:
        context = [(minor[0], minor[1] * major[1])]
    assert axes == [[batch], [], [], context, [copies]]


@pytest.mark.parametrize("ids", [[1, 0, 2, 3], [0, 3, 1, 2], [0, 1, 3, 2], [3, 2, 1, 0]])
def test_devices_that_no_mesh_numbers(ids):
    assert sharding.mesh_axes(np.array(ids).reshape(1, 1, 1, 4, 1)) is None
    assert sharding.mesh_axes(np.array(ids).reshape(2, 1, 1, 2, 1)) is None


# ----------------------------------------------------------------------------------------- explain


@pytest.mark.parametrize(
    ("kind", "spec", "kv_heads", "sharing"),
    [
        ("Auto", P(None, "context", "model"), 2, "'context' (4 devices): all_gather"),
        ("Auto", P(None, "context", "model"), 8, "'context' (4 devices): all_to_all"),
        ("Auto", P(None, ("context", "model")), 8, "'context', 'model' (8 devices): all_to_all"),
        ("Auto", P(None, ("model", "context")), 8, "'model', 'context' (8 devices): gathered"),
        ("Auto", P("context", None, "model"), 8, ""),
        ("Explicit", P(None, "context"), 8, "'context' (4 devices): all_to_all"),
        (
            *("Explicit", P(None, ("context", "model")), 2),
            "'context', 'model' (8 devices): all_gather of all_to_all",
        ),
    ],
    ids=str,
)
def test_explain_names_the_strategy(kind, spec, kv_heads, sharing):
    kinds = (AxisType[kind],) * 2
    mesh = jax.make_mesh((4, 2), ("context", "model"), axis_types=kinds)
    q, k = (
        jax.ShapeDtypeStruct((4, 64, heads, 8), jnp.float32, sharding=NamedSharding(mesh, spec))
        for heads in (16, kv_heads)
    )
    explained = jax_fa.explain(q, k, k, is_causal=True)
    assert explained.sharing.endswith(sharing) and bool(explained.sharing) == bool(sharing)
    assert not sharing or str(explained).endswith(f". Shared: {explained.sharing}")


def test_explain_of_a_packed_call_and_of_arrays_at_hand():
    mesh = mesh_of(8)
    q, k, v = (jax.device_put(x[0], NamedSharding(mesh, P("context"))) for x in drawn().values())
    text = "tokens over 'context' (8 devices): all_gather"
    assert jax_fa.explain(q, k, v).sharing == text
    unfused = jax_fa.explain(q, k, v, implementation="xla").sharing
    assert unfused.endswith(": as XLA splits what runs unfused")
    borders = jnp.array([0, 20, 32])
    assert jax_fa.explain(q, k, v, cu_seqlens_q=borders, cu_seqlens_k=borders).sharing == text


@pytest.mark.parametrize(
    ("options", "kernels", "sharing"),
    [
        ({}, ["d64_causal"], "all_to_all"),
        ({"strategy": "all_gather"}, ["d64_general"], "all_gather"),
        ({"strategy": "ring"}, ["d64_causal", "d64_full"], "ring, with "),
        ({"strategy": "ring", "is_causal": False}, ["d64_full"], "ring"),
        ({"local_window_size": (9, 0), "logits_soft_cap": 5.0}, ["d64_general_cap"], "all_gather"),
        ({"mask_mod": lambda b, h, q, k: q >= k}, ["d64_general"], "all_gather"),
        ({"scale": jnp.float32}, [], "all_gather"),
    ],
    ids=["auto", "all_gather", "ring", "ring full", "window and cap", "mask function", "scale"],
)
@pytest.mark.filterwarnings("ignore::jax_fa.FallbackWarning")
def test_explain_inside_shard_map_names_strategy_and_kernels(
    options, kernels, sharing, monkeypatch
):
    monkeypatch.setattr(bindings, "compiled", lambda: frozenset(BY_NAME))
    found = []

    def inside(q):
        given = {"is_causal": True, "platform": "gpu", **options}
        if "scale" in given:  # traced
            given["scale"] = jnp.sum(q).astype(given["scale"])
        found.append(jax_fa.parallel.explain(q, q, q, **given))
        return q

    q = jax.ShapeDtypeStruct((64, 1024, 8, 64), jnp.bfloat16)
    spec = P(None, "context")
    jax.eval_shape(jax.shard_map(inside, mesh=mesh_of(8), in_specs=spec, out_specs=spec), q)
    (explained,) = found
    assert explained.sharing.startswith(f"tokens over 'context' (8 devices): {sharing}")
    named = [f"fwd_sm90_bf16_{kernel}" for kernel in kernels]
    if named:
        assert named[0] in explained.choice.kernel.split(", ")
    else:
        assert explained.choice.implementation == "xla"
    assert all(name in explained.sharing for name in named[len(named) == 1 :])


def test_explain_of_shards_wants_their_axis():
    q = jax.ShapeDtypeStruct((2, 64, 8, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="Call jax_fa.parallel inside jax.shard_map"):
        jax_fa.parallel.explain(q, q, q)
