"""Eight virtual devices: the single-device result and gradient, and no gather of q, k or v."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa

rng = np.random.default_rng(0)

B, T, S, N, D = 8, 12, 16, 8, 8


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def arrays(kv_heads, extras):
    everything = {
        "query_seq_lengths": jnp.asarray(rng.integers(0, T + 1, B), jnp.int32),
        "key_value_seq_lengths": jnp.asarray(rng.integers(0, S + 1, B), jnp.int32),
        "query_segment_ids": jnp.asarray(rng.integers(0, 2, (B, T)), jnp.int32),
        "key_value_segment_ids": jnp.asarray(rng.integers(0, 2, (B, S)), jnp.int32),
        "query_offset": jnp.asarray(rng.integers(0, 4, B), jnp.int32),
        "sinks": normal(N),
    }
    qkv = {
        "query": normal(B, T, N, D),
        "key": normal(B, S, kv_heads, D),
        "value": normal(B, S, kv_heads, D),
    }
    return {**qkv, **{name: everything[name] for name in extras}}


LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")
SEGMENTS = ("query_segment_ids", "key_value_segment_ids")
EXTRAS = {
    "nothing": (),
    "lengths": LENGTHS,
    "segments": SEGMENTS,
    "sinks": ("sinks",),
    "everything": (*LENGTHS, *SEGMENTS, "query_offset", "sinks"),
}
DIFFERENTIABLE = ("query", "key", "value", "sinks")


def attend(inputs):
    return jax_fa.attention_with_lse(is_causal=True, **inputs)


def step(inputs, attend=attend):
    """Results and gradients."""
    inputs = dict(inputs)
    moving = {name: inputs.pop(name) for name in DIFFERENTIABLE if name in inputs}

    def loss(moving):
        out, lse = attend({**moving, **inputs})
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse > -1e30, lse, 0) ** 2), (out, lse)

    grads, results = jax.grad(loss, has_aux=True)(moving)
    return results, grads


SPEC = {
    "query": P("data", None, "model", None),
    "key": P("data", None, "model", None),
    "value": P("data", None, "model", None),
    "query_seq_lengths": P("data"),
    "key_value_seq_lengths": P("data"),
    "query_segment_ids": P("data", None),
    "key_value_segment_ids": P("data", None),
    "query_offset": P("data"),
    "sinks": P("model"),
}


def mesh_of(shape, kind):
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind,) * 2)


def place(inputs, mesh, spec=SPEC):
    return {name: jax.device_put(x, NamedSharding(mesh, spec[name])) for name, x in inputs.items()}


def assert_same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), got, want)


def hlo(compiled):
    return compiled.as_text()


def test_there_are_eight_devices():
    assert jax.device_count() == 8


@pytest.mark.parametrize("shape", [(8, 1), (1, 8), (4, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("extras", EXTRAS.values(), ids=EXTRAS)
def test_jit_splits_batch_and_heads_without_gathering(shape, extras):
    inputs = arrays(8, extras)
    mesh = mesh_of(shape, AxisType.Auto)
    compiled = jax.jit(step).lower(place(inputs, mesh)).compile()
    text = hlo(compiled)
    assert "all-gather" not in text
    assert "all-to-all" not in text and "collective-permute" not in text
    got = compiled(place(inputs, mesh))
    assert_same(got, jax.jit(step)(inputs))
    for x in (got[0][0], got[1]["key"]):
        shard = (B // shape[0], x.shape[1], x.shape[2] // shape[1], D)
        assert x.sharding.shard_shape(x.shape) == shard


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_grouped_heads_split_where_key_heads_divide(kv_heads):
    inputs = arrays(kv_heads, EXTRAS["everything"])
    mesh = mesh_of((4, 2), AxisType.Auto)
    compiled = jax.jit(step).lower(place(inputs, mesh)).compile()
    assert "all-gather" not in hlo(compiled)
    assert_same(compiled(place(inputs, mesh)), jax.jit(step)(inputs))


def test_one_key_head_stays_whole_while_query_heads_split():
    inputs = arrays(1, ("sinks",))
    mesh = mesh_of((2, 4), AxisType.Auto)
    spec = {**SPEC, "key": P("data"), "value": P("data")}
    compiled = jax.jit(step).lower(place(inputs, mesh, spec)).compile()
    assert "all-gather" not in hlo(compiled)
    assert_same(compiled(place(inputs, mesh, spec)), jax.jit(step)(inputs))


def test_key_heads_that_the_axis_does_not_divide_still_give_the_result():
    inputs = arrays(2, ("sinks",))
    mesh = mesh_of((2, 4), AxisType.Auto)
    spec = {**SPEC, "key": P("data"), "value": P("data")}
    assert_same(jax.jit(step)(place(inputs, mesh, spec)), jax.jit(step)(inputs))


@pytest.mark.parametrize(
    "q_spec", [P(None, "data"), P("data", "model"), P(None, None, None, "model")]
)
def test_sharded_length_or_head_size_still_gives_the_result_under_auto(q_spec):
    inputs = arrays(8, ())
    mesh = mesh_of((4, 2), AxisType.Auto)
    spec = {**SPEC, "query": q_spec}
    compiled = jax.jit(step).lower(place(inputs, mesh, spec)).compile()
    # Also the proof that the other tests would see a gather.
    assert "all-gather" in hlo(compiled) or "all-to-all" in hlo(compiled)
    assert_same(compiled(place(inputs, mesh, spec)), jax.jit(step)(inputs))


def test_replicated_lengths_and_sinks_with_sharded_arrays():
    inputs = arrays(8, EXTRAS["everything"])
    mesh = mesh_of((4, 2), AxisType.Auto)
    spec = {name: SPEC[name] if name in ("query", "key", "value") else P() for name in SPEC}
    compiled = jax.jit(step).lower(place(inputs, mesh, spec)).compile()
    assert_same(compiled(place(inputs, mesh, spec)), jax.jit(step)(inputs))


@pytest.mark.parametrize("extras", EXTRAS.values(), ids=EXTRAS)
def test_explicit_mesh(extras):
    inputs = arrays(4, extras)
    mesh = mesh_of((4, 2), AxisType.Explicit)
    with jax.set_mesh(mesh):
        placed = place(inputs, mesh)
        out, lse = jax.jit(attend)(placed)
        assert jax.typeof(out).sharding.spec == P("data", None, "model", None)
        assert jax.typeof(lse).sharding.spec == P("data", None, "model")
        compiled = jax.jit(step).lower(placed).compile()
        assert "all-gather" not in hlo(compiled)
        got = compiled(placed)
    assert_same(got, jax.jit(step)(inputs))


def test_explicit_mesh_refuses_a_sharded_length():
    inputs = arrays(4, ())
    mesh = mesh_of((4, 2), AxisType.Explicit)
    with jax.set_mesh(mesh):
        placed = place(inputs, mesh, {**SPEC, "query": P(None, "data", None, None)})
        with pytest.raises(ValueError, match="batch and heads may be sharded, but the query"):
            jax.jit(attend)(placed)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("extras", EXTRAS.values(), ids=EXTRAS)
def test_shard_map(extras, check_vma):
    inputs = arrays(4, extras)
    mesh = mesh_of((4, 2), AxisType.Auto)
    mapped = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=({name: SPEC[name] for name in inputs},),
        out_specs=(SPEC["query"], P("data", None, "model")),
        check_vma=check_vma,
    )
    compiled = jax.jit(partial(step, attend=mapped)).lower(place(inputs, mesh)).compile()
    assert "all-gather" not in hlo(compiled)
    assert_same(compiled(place(inputs, mesh)), jax.jit(step)(inputs))


def test_shard_map_with_gradient_inside():
    inputs = arrays(4, ("sinks",))
    mesh = mesh_of((8, 1), AxisType.Auto)

    def inside(inputs):
        _, grads = step(inputs)
        return grads

    specs = {name: SPEC[name] for name in inputs}
    mapped = jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=(specs,), out_specs=specs))
    assert_same(mapped(inputs), jax.jit(step)(inputs)[1])


def test_pmap_over_the_batch():
    inputs = arrays(4, EXTRAS["everything"])
    sinks = inputs.pop("sinks")
    split = {name: x.reshape(8, 1, *x.shape[1:]) for name, x in inputs.items()}
    step_of = lambda x: step({**x, "sinks": sinks})  # noqa: E731
    (out, lse), grads = jax.pmap(step_of)(split)
    (want_out, want_lse), want = jax.jit(step)({**inputs, "sinks": sinks})
    assert_same((out[:, 0], lse[:, 0]), (want_out, want_lse))
    assert_same(grads["sinks"].sum(0), want["sinks"])
    assert_same(grads["query"][:, 0], want["query"])
    assert_same(grads["key"][:, 0], want["key"])


def test_packed_sequences_split_by_heads():
    q, k, v = normal(40, 8, D), normal(40, 4, D), normal(40, 4, D)
    cu = jnp.array([0, 13, 13, 40], jnp.int32)

    def step(q, k, v):
        def value(q, k, v):
            out = jax_fa.attention_varlen(q, k, v, cu, cu)
            return jnp.sum(jnp.sin(out)), out

        return jax.grad(value, (0, 1, 2), has_aux=True)(q, k, v)

    mesh = mesh_of((4, 2), AxisType.Auto)
    placed = [jax.device_put(x, NamedSharding(mesh, P(None, "model"))) for x in (q, k, v)]
    compiled = jax.jit(step).lower(*placed).compile()
    assert "all-gather" not in hlo(compiled)
    assert_same(compiled(*placed), jax.jit(step)(q, k, v))
