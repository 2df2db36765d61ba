"""Eight virtual devices share sequences: the results and gradients of one, for every strategy."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import oracle
from helpers.cases import Bias, Case, Dense, documents, make
from helpers.harness import wanted
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa
from jax_fa import mask_mods, parallel
from jax_fa.runtime import masks

STRATEGIES = ("all_gather", "all_to_all", "ring")
HEADS = {"heads": 16, "kv_heads": 8, "head_dim": 8}

SPEC = {
    "query": P("data", "context", "model"),
    "key": P("data", "context", "model"),
    "value": P("data", "context", "model"),
    "query_segment_ids": P("data", "context"),
    "key_value_segment_ids": P("data", "context"),
    "positions": P("data", "context"),
    "query_seq_lengths": P("data"),
    "key_value_seq_lengths": P("data"),
    "query_offset": P("data"),
    "sinks": P("model"),
}
PAIRWISE = ("bias", "mask", "block_mask")
OUT_SPECS = (P("data", "context", "model"), P("data", "context", "model"))
DIFFERENTIABLE = ("query", "key", "value", "sinks", "bias")


def mesh_of(*shape):
    """Of sizes for "context", "model" and "data"; the last ones may be left out."""
    shape = (*shape, 1, 1)[:3]
    return jax.make_mesh(shape, ("context", "model", "data"), axis_types=(AxisType.Auto,) * 3)


def arrays_and_options(case, dtype="float32"):
    """What a caller hands over that devices share, and what is the same for all."""
    operands = make(case, dtype).operands
    given = {"query": operands.q, "key": operands.k, "value": operands.v, **case.options(operands)}
    shared = (*SPEC, *PAIRWISE)
    arrays = {name: jnp.asarray(x) for name, x in given.items() if name in shared}
    return arrays, {name: x for name, x in given.items() if name not in shared}


def pairwise(shape):
    """Of a bias or a mask: it is split like the query, where it is not broadcast."""
    sides = ("data", "model", "context", None)
    return P(*(None if n == 1 else side for n, side in zip(shape, sides, strict=True)))


def specs_of(names):
    """Of arrays by name; where no bias or mask is among them, names are enough."""
    return {name: SPEC[name] if name in SPEC else pairwise(names[name].shape) for name in names}


def program(mesh, names, check_vma=True, attend=parallel.attention_with_lse, **options):
    """``attend`` on whole arrays by name, split over the mesh; ``names`` may hold the arrays."""
    return jax.shard_map(
        lambda arrays: attend(**arrays, **options),
        mesh=mesh,
        in_specs=(specs_of(names),),
        out_specs=OUT_SPECS,
        check_vma=check_vma,
    )


def results(attend, arrays, cotangents):
    """Results of ``attend`` (a dict of arrays) and gradients by name."""
    moving = {name: x for name, x in arrays.items() if name in DIFFERENTIABLE}
    rest = {name: x for name, x in arrays.items() if name not in moving}
    out_and_lse, pullback = jax.vjp(lambda moving: attend({**moving, **rest}), moving)
    return out_and_lse, pullback(cotangents)[0]


def check(case, mesh, dtype="float32", check_vma=True, **how):
    """Forward and gradients against the oracle."""
    arrays, options = arrays_and_options(case, dtype)
    attend = program(mesh, arrays, check_vma, **options, **how)
    cotangents = tuple(map(jnp.asarray, make(case, dtype).cotangents))
    (out, lse), grads = jax.jit(partial(results, attend))(arrays, cotangents)
    oracle.assert_close(named(out, lse, grads), wanted(case, dtype), dtype, f"{case}, {how}")


def named(out, lse, grads):
    """Results and gradients by name, as the oracle has them."""
    moving = (grads.get(name) for name in DIFFERENTIABLE)
    return oracle.Results(out, lse, *moving)


def of_len(name, q_len=64, kv_len=None, **more):
    kv_len = q_len if kv_len is None else kv_len
    return Case(name, q_len=q_len, kv_len=kv_len, **{"batch": 2, **HEADS, **more})


CAUSAL = of_len("causal", is_causal=True)
FULL = of_len("full")
EVERYTHING = of_len(
    "everything",
    q_len=64,
    kv_len=80,
    is_causal=True,
    alignment="bottom_right",
    window=(40, None),
    scale=0.3,
    soft_cap=4.0,
    has_sinks=True,
    q_lengths=(64, 41),
    kv_lengths=(75, 80),
    q_offset=(3, -2),
    segments=(documents(20, 9, 35), documents(30, 5, 45)),
    value_dim=16,
)
OTHERS = (
    of_len("causal_bottom_right", kv_len=128, is_causal=True, alignment="bottom_right"),
    of_len("causal_more_rows", q_len=128, kv_len=64, is_causal=True, alignment="bottom_right"),
    of_len("odd_parts", q_len=20, is_causal=True, has_sinks=True),
    of_len("lengths", q_lengths=(40, 3), kv_lengths=(0, 50), has_sinks=True),
    of_len("window", is_causal=True, window=(11, None), has_sinks=True),
    of_len("window_far", window=(37, 5), soft_cap=3.0),
    of_len("window_ahead", window=(-3, 20)),
    of_len("window_lengths", window=(9, 9), q_lengths=(64, 30), kv_lengths=(64, 30)),
    of_len("segments", is_causal=True, segments=(documents(30, 3, 31), documents(30, 3, 31))),
    of_len("offset", q_len=32, kv_len=128, is_causal=True, q_offset=(90, 60)),
)
MASKS = (
    of_len("mask", dense=Dense("random"), has_sinks=True),
    of_len("mask_per_head_and_causal", dense=Dense("window", "NTS"), is_causal=True),
    of_len("mask_of_keys", kv_len=80, dense=Dense("random", "S"), window=(40, 9)),
    of_len("mask_of_rows", dense=Dense("halves", "NT")),
    of_len("mask_of_one_row_a_device", q_len=4, kv_len=64, dense=Dense("random", "NTS")),
    of_len("mask_per_sequence", kv_len=48, dense=Dense("random", "BTS"), q_offset=(3, 1)),
)
BIASES = (
    of_len("bias", bias=Bias()),
    of_len("bias_and_causal", bias=Bias("distance", "BNTS"), is_causal=True),
    of_len("bias_of_keys", kv_len=80, bias=Bias(dims="S"), is_causal=True, has_sinks=True),
    of_len("bias_of_rows", bias=Bias(dims="BT"), window=(30, 5)),
    of_len("bias_of_one_row_a_device", q_len=4, kv_len=64, bias=Bias(dims="TS")),
    of_len("bias_of_heads", bias=Bias(dims="N"), dense=Dense("random", "TS")),
)
PAIRS = replace(EVERYTHING, name="pairs", bias=Bias("holes", "TS"), dense=Dense("random", "BNTS"))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", [CAUSAL, FULL, EVERYTHING], ids=str)
def test_eight_devices_give_what_one_gives(case, strategy):
    check(case, mesh_of(8), strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_every_feature_with_heads_split_too(case, strategy):
    check(case, mesh_of(4, 2), strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batch_heads_and_tokens_split_together(strategy):
    check(EVERYTHING, mesh_of(2, 2, 2), strategy=strategy)


def test_many_heads_are_exchanged_in_chunks():
    check(EVERYTHING, mesh_of(2), strategy="all_to_all")
    arrays, options = arrays_and_options(EVERYTHING)
    attend = program(mesh_of(2), arrays, strategy="all_to_all", **options)
    text = jax.jit(attend).lower(arrays).as_text()
    assert text.count("stablehlo.all_to_all") == 2 * 5  # q, k, v, and out and lse back


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_keeps_the_tolerance_rule(strategy):
    check(CAUSAL, mesh_of(8), "bfloat16", strategy=strategy, deterministic=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_checks_of_what_varies(strategy):
    check(replace(CAUSAL, has_sinks=True), mesh_of(4, 2), check_vma=False, strategy=strategy)


@pytest.mark.parametrize("strategy", ["auto", "all_gather", "ring"])
def test_one_key_head_for_all(strategy):
    check(replace(CAUSAL, heads=3, kv_heads=1), mesh_of(4), strategy=strategy)


def test_three_devices_of_which_one_is_its_own_mirror():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:3]).reshape(3, 1, 1), mesh_of(8).axis_names)
    for strategy in ("all_gather", "ring"):
        check(of_len("causal", q_len=48, is_causal=True), mesh, strategy=strategy)


# ------------------------------------------------------------- heads and batch, over another axis


def own_head(x):
    """The key/value head of this device's query heads, of whole ones that divide the axis."""
    first = jax.lax.axis_index("model") * x.shape[2] // jax.lax.axis_size("model")
    return jax.lax.dynamic_slice_in_dim(x, first, 1, axis=2)


@pytest.mark.parametrize("way", ["repeated", "picked"])
def test_query_heads_split_further_than_key_heads(way):
    """Two key/value heads on four devices, as docs/parallel.md shows."""
    whole, split = P(None, "context"), P(None, "context", "model")

    def attend(x):
        attention = partial(parallel.attention_with_lse, is_causal=True, context_axis="context")
        keys = [x["key"], x["value"]]
        if way == "repeated":
            keys = [jnp.repeat(y, 2, axis=2) for y in keys]
        mapped = jax.shard_map(
            lambda q, k, v: attention(q, *((k, v) if way == "repeated" else map(own_head, (k, v)))),
            mesh=mesh_of(2, 4),
            in_specs=(split, *[split if way == "repeated" else whole] * 2),
            out_specs=(split, split),
        )
        return mapped(x["query"], *keys)

    alone = partial(jax_fa.attention_with_lse, is_causal=True)
    assert_as_alone(attend, lambda x: alone(**x), drawn(heads=8))


def test_a_batch_of_queries_that_share_their_keys():
    """No rule about what varies may refuse it, though heads beside whole keys look alike."""
    arrays = drawn(heads=8)
    arrays = {name: x if name == "query" else x[:1] for name, x in arrays.items()}
    rows, keys = P("data", "context"), P(None, "context")

    def attend(x):
        mapped = jax.shard_map(
            partial(parallel.attention_with_lse, is_causal=True),
            mesh=mesh_of(4, 1, 2),
            in_specs=(rows, keys, keys),
            out_specs=(rows, rows),
        )
        return mapped(x["query"], x["key"], x["value"])

    def alone(x):
        k, v = (jnp.broadcast_to(x[name], (2, *x[name].shape[1:])) for name in ("key", "value"))
        return jax_fa.attention_with_lse(x["query"], k, v, is_causal=True)

    assert_as_alone(attend, alone, arrays)


# ------------------------------------------------------------------------------------------ levels


@pytest.mark.parametrize(
    "strategy", [("ring", "all_to_all"), ("all_gather", "all_to_all"), *STRATEGIES, "auto"]
)
@pytest.mark.parametrize("case", [replace(CAUSAL, kv_heads=4), EVERYTHING], ids=str)
def test_two_axes_are_two_levels_or_one(case, strategy):
    if strategy == "all_to_all" and case.kv_heads == 4:
        pytest.skip("refused: eight devices, four heads")
    mesh = jax.make_mesh((2, 4), ("hosts", "gpus"), axis_types=(AxisType.Auto,) * 2)
    axes = ("hosts", "gpus")
    arrays, options = arrays_and_options(case)

    def spec(name):
        renamed = {"context": axes, "data": None, "model": None}
        return P(*(renamed.get(axis) for axis in SPEC[name]))

    attend = jax.shard_map(
        lambda arrays: parallel.attention_with_lse(
            **arrays, **options, context_axis=axes, strategy=strategy
        ),
        mesh=mesh,
        in_specs=({name: spec(name) for name in arrays},),
        out_specs=(P(None, axes),) * 2,
    )
    cotangents = tuple(map(jnp.asarray, make(case, "float32").cotangents))
    (out, lse), grads = jax.jit(partial(results, attend))(arrays, cotangents)
    want = wanted(case, "float32")
    oracle.assert_close(named(out, lse, grads), want, "float32", str(strategy))


@pytest.mark.parametrize(
    ("strategy", "window"), [("ring", None), ("all_gather", (5, 0)), ("all_to_all", None)]
)
def test_axes_in_another_order_than_those_of_the_mesh(strategy, window):
    mesh = jax.make_mesh((4, 2), ("gpus", "hosts"), axis_types=(AxisType.Auto,) * 2)
    axes, how = ("hosts", "gpus"), {"is_causal": True, "local_window_size": window}
    attend = jax.shard_map(
        lambda x: parallel.attention_with_lse(**x, **how, context_axis=axes, strategy=strategy),
        mesh=mesh,
        in_specs=(P(None, axes),),
        out_specs=(P(None, axes),) * 2,
    )
    assert_as_alone(
        attend, lambda x: jax_fa.attention_with_lse(**x, **how), drawn(kv_heads=8, heads=8)
    )


# ------------------------------------------------------------------------------- explicit sharding


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        (replace(CAUSAL, kv_heads=2, heads=4), (4, 2, 1)),
        (EVERYTHING, (2, 2, 2)),
        (PAIRS, (2, 2, 2)),
    ],
    ids=["gathered", "exchanged", "mask and bias"],
)
def test_explicit_sharding_of_tokens_needs_no_other_call(case, shape):
    arrays, options = arrays_and_options(case)
    kinds = (AxisType.Explicit,) * 3
    mesh = jax.make_mesh(shape, ("context", "model", "data"), axis_types=kinds)
    attend = partial(results, lambda x: jax_fa.attention_with_lse(**x, **options))
    cotangents = tuple(map(jnp.asarray, make(case, "float32").cotangents))
    with jax.set_mesh(mesh):
        specs = specs_of(arrays)
        placed = {name: jax.device_put(x, specs[name]) for name, x in arrays.items()}
        cotangents = jax.device_put(cotangents, OUT_SPECS)
        program = jax.jit(attend).lower(placed, cotangents).compile()
        (out, lse), grads = program(placed, cotangents)
        assert out.sharding.spec == P("data", "context", "model", None)
        for name, x in grads.items():
            assert x.sharding.is_equivalent_to(placed[name].sharding, x.ndim)
    assert ("all-to-all" in collectives(program.as_text())) == (case is EVERYTHING)
    oracle.assert_close(named(out, lse, grads), wanted(case, "float32"), "float32", str(case))


def test_explicit_sharding_of_tokens_needs_no_mesh_that_is_set():
    mesh = jax.make_mesh((4, 2), ("context", "model"), axis_types=(AxisType.Explicit,) * 2)
    sharding = NamedSharding(mesh, P(None, "context", "model"))
    arrays = drawn(heads=4, kv_heads=2)
    step = jax.value_and_grad(
        lambda x: jnp.sum(jnp.sin(jax_fa.attention(**x, is_causal=True))), allow_int=True
    )
    got = jax.jit(step)(jax.device_put(arrays, sharding))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, step(arrays))


def test_explicit_sharding_that_does_not_fit_is_refused():
    mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Explicit,))
    arrays = drawn()
    with jax.set_mesh(mesh):
        query = jax.device_put(arrays["query"], P(None, "context"))
        with pytest.raises(ValueError, match="S does not split that way. Reshard the query"):
            jax_fa.attention(query, arrays["key"][:, :30], arrays["value"][:, :30])


# ------------------------------------------------------------------------------------------ packed

PACKED = (
    Case(
        "packed_causal",
        q_len=64,
        kv_len=64,
        cu_q=(0, 5, 5, 40, 64),
        cu_k=(0, 5, 5, 40, 64),
        is_causal=True,
        has_sinks=True,
        **HEADS,
    ),
    Case(
        "packed_everything",
        q_len=64,
        kv_len=96,
        cu_q=(2, 20, 50, 60),
        cu_k=(0, 31, 80, 96),
        q_lengths=(18, 22, 10),
        kv_lengths=(30, 49, 9),
        q_offset=(1, 0, -2),
        is_causal=True,
        alignment="bottom_right",
        window=(25, None),
        soft_cap=4.0,
        has_sinks=True,
        segments=(documents(30, 34), documents(40, 56)),
        **HEADS,
    ),
)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed_sequences_may_lie_on_several_devices(case, strategy):
    data = make(case, "float32")
    x, spec = data.operands, P("context", "model")
    everywhere: dict[str, Any] = {
        **case.options(x),
        "seqused_q": x.q_lengths,
        "seqused_k": x.kv_lengths,
    }
    ids = {name: everywhere.pop(name) for name in list(everywhere) if "segment" in name}

    def attend(moving, ids):
        borders = (x.cu_seqlens_q, x.cu_seqlens_k)
        packed: Any = parallel.attention_varlen
        return packed(*moving, *borders, **everywhere, **ids, strategy=strategy)

    mapped = jax.shard_map(
        attend,
        mesh=mesh_of(4),
        in_specs=((spec,) * 3, dict.fromkeys(ids, P("context"))),
        out_specs=spec,
    )

    @jax.jit
    def step(*moving):
        out, pullback = jax.vjp(lambda *moving: mapped(moving, ids), *moving)
        return out, *pullback(jnp.asarray(data.cotangents[0][0]))

    out, *grads = (y[None] for y in step(x.q[0], x.k[0], x.v[0]))
    no_dlse = np.zeros_like(data.cotangents[1])
    want = oracle.tolerance(x, case.semantics, (data.cotangents[0], no_dlse))
    got = oracle.Results(out, want.exact.lse, *grads)
    oracle.assert_close(got, want, "float32", f"{case} {strategy}")


def drawn(seed=0, q_len=32, heads=4, kv_heads=2):
    rng = np.random.default_rng(seed)
    shapes = {"query": heads, "key": kv_heads, "value": kv_heads}
    return {
        name: jnp.asarray(rng.standard_normal((2, q_len, count, 8)), jnp.float32)
        for name, count in shapes.items()
    }


def assert_as_alone(attend, alone, arrays):
    cotangents = jnp.cos(arrays["query"]), jnp.sin(arrays["query"][..., 0])
    got = jax.jit(partial(results, attend))(arrays, cotangents)
    want = jax.jit(partial(results, alone))(arrays, cotangents)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.filterwarnings("ignore::jax_fa.FallbackWarning")
def test_mask_functions_of_packed_sequences():
    case = PACKED[0]
    x = make(case, "float32").operands
    how: dict[str, Any] = {"mask_mod": mask_mods.chunked(12), "is_causal": True}
    how |= {"cu_seqlens_q": x.cu_seqlens_q, "cu_seqlens_k": x.cu_seqlens_k}
    given: Any = tuple(map(jnp.asarray, (x.q[0], x.k[0], x.v[0])))
    attend = jax.shard_map(
        lambda q, k, v: parallel.attention_varlen(q, k, v, **how),
        mesh=mesh_of(4),
        in_specs=P("context"),
        out_specs=P("context"),
    )
    want = jax_fa.attention_varlen(*given, **how)
    np.testing.assert_allclose(jax.jit(attend)(*given), want, rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------------- masks and biases


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", [*MASKS, *BIASES], ids=str)
def test_masks_and_biases_are_split_like_the_query(case, strategy):
    check(case, mesh_of(4, 2), strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", [(8,), (2, 2, 2)], ids=str)
def test_masks_and_biases_with_everything_else(shape, strategy):
    check(PAIRS, mesh_of(*shape), strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_bias_in_bfloat16(strategy):
    case = of_len("bias_in_bfloat16", bias=Bias("random", "S"), is_causal=True)
    check(case, mesh_of(4, 2), "bfloat16", strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mask_functions_count_from_the_first_key(strategy):
    how = {"mask_mod": mask_mods.chunked(12), "is_causal": True}
    arrays = drawn(kv_heads=4)
    attend = program(mesh_of(4), arrays, strategy=strategy, **how)
    assert_as_alone(attend, lambda x: jax_fa.attention_with_lse(**x, **how), arrays)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_block_masks_are_of_this_devices_rows(strategy):
    blocks = [[True, False], [True, True]], [[False, True], [True, False]]
    arrays = {**drawn(q_len=256), "block_mask": jnp.asarray(blocks)[None].repeat(2, axis=1)}
    attend = program(mesh_of(2), arrays, strategy=strategy)
    assert_as_alone(attend, lambda x: jax_fa.attention_with_lse(**x), arrays)


@pytest.mark.parametrize("count", [5, 32, 96, 33])
@pytest.mark.parametrize("varies", [True, False], ids=["keys", "broadcast"])
def test_words_of_some_keys(varies, count):
    mask = np.random.default_rng(count).random((2, 1, 3, 3 * count if varies else 1)) < 0.5
    whole = np.broadcast_to(mask, (2, 1, 3, 3 * count))
    words = masks.packed(jnp.asarray(mask))
    for first in range(0, 3 * count, count):
        got = jax.jit(partial(masks.of_keys, count=count, kv_len=3 * count))(words, first)
        part = whole[..., first : first + count]
        shown = np.broadcast_to(masks.unpacked(got, 3, count), part.shape)
        np.testing.assert_array_equal(shown, part)
        if got.shape[3] * 32 >= count:
            np.testing.assert_array_equal(got, masks.packed(jnp.asarray(part)))


def test_a_mask_that_devices_share_is_never_unpacked():
    arrays = {**drawn(q_len=208), "mask": jnp.ones((1, 1, 208, 208), bool)}
    for strategy in STRATEGIES:
        attend = program(mesh_of(2), arrays, strategy=strategy)
        text = jax.jit(attend).lower(arrays).as_text()
        assert "jax_fa_fwd" in text
        assert not re.search(r"tensor<\d+x\d+x104x(208|104)xf32>", text), strategy


@pytest.mark.filterwarnings("ignore::jax_fa.FallbackWarning")
def test_a_traced_scale_and_the_unfused_path():
    arrays = drawn()
    attend = program(mesh_of(4), arrays, is_causal=True, implementation="xla")
    alone = partial(jax_fa.attention_with_lse, is_causal=True)
    assert_as_alone(attend, lambda x: alone(**x), arrays)

    def scaled(scale):
        return program(mesh_of(4), arrays, is_causal=True, scale=scale)(arrays)[0]

    want = jax.jit(lambda scale: alone(**arrays, scale=scale)[0])(0.7)
    np.testing.assert_allclose(jax.jit(scaled)(0.7), want, rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------------------------- transforms


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_recomputed_inside_a_scan_over_layers(strategy):
    arrays = drawn(heads=4, kv_heads=4)

    def model(attend):
        @jax.checkpoint
        def layer(x, key):
            return x + attend({"query": x, "key": key, "value": x})[0], None

        return lambda x, keys: jnp.sum(jnp.sin(jax.lax.scan(layer, x, keys)[0]))

    keys = jnp.stack([arrays["key"], arrays["value"]])
    sharded = model(program(mesh_of(4), arrays, strategy=strategy, is_causal=True))
    alone = model(lambda x: jax_fa.attention_with_lse(**x, is_causal=True))
    got, want = (jax.jit(jax.grad(f, (0, 1)))(arrays["query"], keys) for f in (sharded, alone))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def test_pmap_and_arrays_without_a_batch():
    arrays = {name: x[0] for name, x in drawn().items()}
    parts = {name: x.reshape(8, -1, *x.shape[1:]) for name, x in arrays.items()}
    attend = partial(parallel.attention, context_axis="devices", strategy="ring", is_causal=True)
    got = jax.pmap(lambda x: attend(**x), axis_name="devices")(parts)
    want = jax_fa.attention(**arrays, is_causal=True)
    np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------ what is moved


def lowered(strategy, q_len=208, heads=8, kv_heads=8, forward_only=True, dtype=None, **options):
    arrays = drawn(q_len=q_len, heads=heads, kv_heads=kv_heads)
    arrays = {name: x.astype(dtype or x.dtype) for name, x in arrays.items()}
    attend = program(mesh_of(8), arrays, strategy=strategy, **options)
    if forward_only:
        return jax.jit(attend).lower(arrays)
    cotangents = (arrays["query"], arrays["query"][..., 0].astype(jnp.float32))
    return jax.jit(partial(results, attend)).lower(arrays, cotangents)


def collectives(text):
    """Names of the collectives in a compiled program, in order."""
    kinds = "all-gather|all-to-all|collective-permute|reduce-scatter|all-reduce"
    return [m[1] for m in re.finditer(rf" ({kinds})(?:-start)?\(", text)]


def test_all_gather_moves_keys_and_values_once_and_no_query():
    text = lowered("all_gather", kv_heads=2).compile().as_text()
    assert collectives(text) == ["all-gather"] * 2
    moved = re.findall(r"f32\[([\d,]+)\]\S* all-gather\(", text)
    assert len(moved) == 2 and all(",2,8" in shape or ",16" in shape for shape in moved)


def test_gradients_of_keys_are_summed_in_float32():
    text = lowered("all_gather", forward_only=False, dtype=jnp.bfloat16).as_text()
    types = re.findall(r"reduce_scatter.*?\}\) : \(tensor<\S*x(\w+)>\)", text, re.DOTALL)
    assert types == ["f32", "f32"]


def test_a_window_moves_only_what_it_reaches():
    text = lowered("auto", is_causal=True, local_window_size=(30, 0)).compile().as_text()
    assert set(collectives(text)) == {"collective-permute"}
    # Two neighbours before: all of one and four tokens of the other, of K and of V.
    assert len(collectives(text)) == 4
    assert not re.search(r"\[2,208,", text)


def test_all_to_all_moves_every_array_once_and_gathers_nothing():
    text = lowered("all_to_all", is_causal=True).compile().as_text()
    assert set(collectives(text)) == {"all-to-all"}
    assert len(collectives(text)) == 5  # q, k, v, and out and lse back


@pytest.mark.parametrize("is_causal", [False, True])
def test_ring_holds_no_array_of_all_tokens(is_causal):
    text = lowered("ring", forward_only=False, is_causal=is_causal).compile().as_text()
    assert set(collectives(text)) == {"collective-permute"}
    assert not re.search(r"[\[,]208[,\]]", text)


def test_auto_exchanges_heads_where_they_divide_and_gathers_elsewhere():
    assert "all-to-all" in collectives(lowered("auto").compile().as_text())
    assert "all-gather" in collectives(lowered("auto", kv_heads=2).compile().as_text())


def test_the_program_names_the_strategy():
    assert "jax_fa_ring" in lowered("ring").as_text(debug_info=True)


# ------------------------------------------------------------------------------------------ export


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["shard_map", "explicit"])
def test_programs_whose_devices_share_tokens_are_exported(kind):
    arrays = drawn()
    mesh = jax.make_mesh((8, 1, 1), ("context", "model", "data"), axis_types=(kind,) * 3)
    attend = program(mesh, arrays, is_causal=True)
    if kind == AxisType.Explicit:
        attend = lambda x: jax_fa.attention_with_lse(**x, is_causal=True)  # noqa: E731
    with jax.set_mesh(mesh):
        placed = {n: jax.device_put(x, NamedSharding(mesh, SPEC[n])) for n, x in arrays.items()}
        checks = jax_fa.export_disabled_checks()
        exported = jax.export.export(jax.jit(attend), disabled_checks=checks)(placed)
        again = jax.export.deserialize(exported.serialize())
        out, _ = jax.jit(again.call)(placed)
    want = jax_fa.attention(**arrays, is_causal=True)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("error", "match", "how"),
    [
        (ValueError, "2 key/value heads.*Use strategy='all_gather'", {"strategy": "all_to_all"}),
        (ValueError, "strategy='best' is unknown; use one of 'auto'", {"strategy": "best"}),
        (ValueError, "context_axis='tokens' is no axis here", {"context_axis": "tokens"}),
        (ValueError, "one strategy for each axis", {"strategy": ("all_to_all", "ring")}),
        (
            NotImplementedError,
            "layout='zigzag' does not serve this call: a bias or a mask has rows.*'contiguous'",
            {"layout": "zigzag", "mask_mod": mask_mods.chunked(8)},
        ),
        (NotImplementedError, "serves jax_fa.attention alone", {"implementation": "cudnn"}),
        (TypeError, "unknown keyword 'colour'", {"colour": 1}),
        (
            NotImplementedError,
            "layout='striped' does not serve this call: a bias or a mask has rows.*'contiguous'",
            {"layout": "striped", "mask": np.ones((1, 1, 1, 32), bool)},
        ),
        (TypeError, r"mask should broadcast to .*\[2, 4, 4, 32\]", {"mask": np.ones((9, 9), bool)}),
    ],
    ids=lambda x: str(x)[:40],
)
def test_refusals_say_what_would_work(error, match, how):
    arrays = drawn()
    with pytest.raises(error, match=match):
        jax.eval_shape(program(mesh_of(8), arrays, **how), arrays)


def test_shards_that_do_not_fit_are_refused():
    arrays = drawn()
    arrays["value"] = arrays["value"][:, :16]
    with pytest.raises(ValueError, match=r"value should have shape \[2, 4, 2, 8\], but has"):
        jax.eval_shape(program(mesh_of(8), arrays), arrays)


@pytest.mark.parametrize("name", ["key", "value"])
def test_keys_that_are_not_split_are_refused(name, monkeypatch):
    arrays = drawn()
    arrays[name] = arrays[name][:, :4]  # as many as each device has of the other
    monkeypatch.setitem(SPEC, name, P("data"))
    match = rf"{name} is the same on every device along axis 'context'.*P\(None, 'context'\)"
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(program(mesh_of(8), arrays), arrays)


@pytest.mark.parametrize(("cut", "shape"), [("tokens", (8,)), ("heads", (2, 4))])
def test_axes_that_do_not_divide_are_refused_by_shard_map(cut, shape):
    arrays = drawn(q_len=30 if cut == "tokens" else 32)  # two key/value heads
    with pytest.raises(ValueError, match="evenly divisible"):
        jax.eval_shape(program(mesh_of(*shape), arrays), arrays)


def test_outside_shard_map_there_is_no_axis():
    with pytest.raises(ValueError, match="inside jax.shard_map"):
        parallel.attention(**drawn())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forward_mode_is_refused_with_what_would_work(strategy):
    arrays = drawn(kv_heads=4)
    attend = program(mesh_of(4), arrays, strategy=strategy)
    with pytest.raises(NotImplementedError, match="implementation='xla'"):
        jax.jvp(lambda q: attend({**arrays, "query": q})[0], (arrays["query"],), (arrays["query"],))
