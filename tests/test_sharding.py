"""Eight virtual devices: the single-device result and gradient, and no gather of q, k or v."""

import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.harness import in_new_process
from jax.experimental import serialize_executable
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa
from jax_fa.runtime.partitioning import Call
from jax_fa.spec.band import Band
from jax_fa.spec.problem import Semantics

rng = np.random.default_rng(0)

B, T, S, N, D = 8, 12, 16, 8, 8


@pytest.fixture(autouse=True)
def _the_same_numbers_in_whatever_order_tests_run():
    rng.bit_generator.state = np.random.default_rng(0).bit_generator.state


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
        "bias": normal(B, N, T, S),
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
    "bias": ("bias",),
    "everything": (*LENGTHS, *SEGMENTS, "query_offset", "sinks", "bias"),
}
DIFFERENTIABLE = ("query", "key", "value", "sinks", "bias")


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
    "bias": P("data", "model", None, None),
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


BROADCAST = [(1, N, T, S), (B, 1, 1, S), (1, 1, T, S), (1, N, T, 1), (1, 1, 1, 1)]


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("shape", BROADCAST, ids=str)
def test_the_gradient_of_a_shared_bias_is_summed_over_devices(shape, kind, kv_heads):
    if kind == AxisType.Explicit and kv_heads == 1:
        pytest.skip("key heads that an axis does not divide have no explicit sharding")
    inputs = arrays(kv_heads, ("sinks",)) | {"bias": normal(*shape)}
    mesh = mesh_of((4, 2), kind)
    kv = P("data") if kv_heads == 1 else SPEC["key"]
    names = [name if n > 1 else None for name, n in zip(("data", "model"), shape, strict=False)]
    spec = {**SPEC, "key": kv, "value": kv, "bias": P(*names)}
    with jax.set_mesh(mesh):
        placed = place(inputs, mesh, spec)
        compiled = jax.jit(step).lower(placed).compile()
        assert "all-gather" not in hlo(compiled)
        got = compiled(placed)
    assert_same(got, jax.jit(step)(inputs))


@pytest.mark.parametrize("manual", ["data", "model"])
@pytest.mark.parametrize("shape", BROADCAST[:3], ids=str)
def test_a_shared_bias_under_shard_map_over_one_axis(shape, manual):
    """Devices that have no names for one another sum nothing: each holds all of what is summed."""
    inputs = arrays(8, ()) | {"bias": normal(*shape)}
    mesh = mesh_of((2, 4), AxisType.Auto)
    at = 0 if manual == "data" else 2
    spec = P(*[None] * at, manual)
    own = [None] * 4
    own[at // 2] = manual if shape[at // 2] > 1 else None
    mapped = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=({name: P(*own) if name == "bias" else spec for name in inputs},),
        out_specs=(spec, spec),
        axis_names={manual},
    )
    got = jax.jit(partial(step, attend=mapped))(place(inputs, mesh, {**SPEC, "bias": P()}))
    assert_same(got, jax.jit(step)(inputs))


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


@pytest.mark.parametrize(("q_heads", "kv_heads", "size"), [(40, 10, 4), (6, 3, 2), (12, 6, 4)])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_heads_whose_numbers_have_only_a_part_in_common(q_heads, kv_heads, size, kind):
    """No device's query heads are those of a number of key heads of its own."""
    mesh = jax.make_mesh((size,), ("model",), axis_types=(kind,), devices=jax.devices()[:size])
    q, k, v = normal(1, T, q_heads, D), normal(1, S, kv_heads, D), normal(1, S, kv_heads, D)
    loss = jax.jit(jax.value_and_grad(lambda *x: jnp.sum(jax_fa.attention(*x) ** 2), (0, 1, 2)))
    specs = P(None, None, "model"), P(), P()
    placed = (
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((q, k, v), specs, strict=True)
    )
    want = loss(q, k, v)
    with jax.set_mesh(mesh):
        assert_same(loss(*placed), want)


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


def test_rows_of_a_mask_split_where_those_of_the_query_do_not():
    """The map of the mask joins 16 rows at a time, of which a device has 6."""
    inputs = arrays(8, ())
    inputs["mask"] = jnp.asarray(rng.random((1, 1, T, S)) < 0.7)
    mesh = mesh_of((4, 2), AxisType.Auto)
    spec = {**SPEC, "mask": P(None, None, "model")}
    assert_same(jax.jit(step)(place(inputs, mesh, spec)), jax.jit(step)(inputs))


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


V = 2


@pytest.mark.parametrize(
    ("vmapped", "batch", "whole"),
    [
        (None, "data", ()),
        ("vmapped", None, ()),
        ("vmapped", "data", ()),
        ("vmapped", "data", ("query",)),
        (None, "data", ("key", "sinks", "query_offset")),
    ],
)
def test_vmap_under_an_explicit_mesh(vmapped, batch, whole):
    """``whole``: operands that vmap hands to every instance."""
    drawn = [arrays(4, EXTRAS["everything"]) for _ in range(V)]
    inputs = {
        name: drawn[0][name] if name in whole else jnp.stack([x[name] for x in drawn])
        for name in drawn[0]
    }
    mesh = jax.make_mesh(
        (2, 2, 2), ("vmapped", "data", "model"), axis_types=(AxisType.Explicit,) * 3
    )

    def placed(name, x):
        spec = [batch if axis == "data" else axis for axis in SPEC[name]]
        return jax.device_put(x, P(*spec) if name in whole else P(vmapped, *spec))

    mapped = jax.vmap(attend, in_axes=({name: None if name in whole else 0 for name in inputs},))
    want = jax.jit(partial(step, attend=mapped))(inputs)
    with jax.set_mesh(mesh):
        sharded_inputs = {name: placed(name, x) for name, x in inputs.items()}
        got = jax.jit(partial(step, attend=mapped))(sharded_inputs)
        assert got[0][0].sharding.spec == P(vmapped, batch, None, "model", None)
        for name, gradient in got[1].items():
            assert gradient.sharding == sharded_inputs[name].sharding
    assert_same(got, want)


@pytest.mark.parametrize("vmapped", [None, "data"])
def test_vmap_of_packed_sequences_under_an_explicit_mesh(vmapped):
    q, k, v = normal(2, 40, 8, D), normal(2, 40, 4, D), normal(2, 40, 4, D)
    cu = jnp.array([[0, 13, 13, 40], [2, 9, 11, 30]], jnp.int32)

    def step(*arrays):
        *qkv, cu = arrays
        attend = partial(jax.vmap(jax_fa.attention_varlen), cu_seqlens_q=cu, cu_seqlens_k=cu)
        out, pullback = jax.vjp(attend, *qkv)
        return out, pullback(jnp.cos(out))

    want = jax.jit(step)(q, k, v, cu)
    with jax.set_mesh(mesh_of((2, 4), AxisType.Explicit)):
        placed = [jax.device_put(x, P(vmapped, None, "model")) for x in (q, k, v)]
        got = jax.jit(step)(*placed, jax.device_put(cu, P(vmapped)))
    assert_same(got, want)


@pytest.mark.parametrize("axis", [1, 3], ids=["length", "head size"])
def test_explicit_mesh_refuses_what_one_kernel_cannot_split(axis):
    inputs = arrays(4, ())
    query = P(*("data" if i == axis else None for i in range(4)))
    mesh = mesh_of((4, 2), AxisType.Explicit)
    with jax.set_mesh(mesh):
        placed = place(inputs, mesh, {**SPEC, "query": query})
        with pytest.raises(ValueError, match="batch and heads may be sharded, but the query"):
            jax.jit(lambda inputs: jax_fa.forward(**inputs))(placed)


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


@pytest.mark.parametrize(("manual", "key_heads"), [("data", 8), ("data", 2), ("model", 8)])
def test_shard_map_over_one_axis_leaves_the_other_to_jit(manual, key_heads):
    inputs = arrays(key_heads, ("key_value_seq_lengths",))
    mesh = mesh_of((2, 4), AxisType.Auto)
    spec = {**SPEC, "key": P("data"), "value": P("data")} if key_heads == 2 else SPEC

    def left_out(x):
        return P(*(axis if axis == manual else None for axis in x))

    mapped = jax.shard_map(
        attend,
        mesh=mesh,
        axis_names={manual},
        in_specs=({name: left_out(SPEC[name]) for name in inputs},),
        out_specs=(left_out(SPEC["query"]), left_out(P("data", None, "model"))),
    )
    compiled = jax.jit(partial(step, attend=mapped)).lower(place(inputs, mesh, spec)).compile()
    assert_same(compiled(place(inputs, mesh, spec)), jax.jit(step)(inputs))
    if key_heads == 8:
        assert "all-gather" not in hlo(compiled)


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


# Programs that plain jit shards hold nothing of the process that wrote them.

SHARED_HEADS = {**SPEC, "key": P("data"), "value": P("data")}
"""Two key/value heads on four devices: devices share a head and sum its gradient."""


def sharded_step():
    """A gradient step, and its operands on a mesh of eight devices."""

    def step(q, k, v):
        def value(q, k, v):
            return jnp.sum(jnp.sin(jax_fa.attention(q, k, v, is_causal=True)))

        return jax.value_and_grad(value, (0, 1, 2))(q, k, v)

    inputs = place(arrays(2, ()), mesh_of((2, 4), AxisType.Auto), SHARED_HEADS)
    return jax.jit(step), list(inputs.values())


def exported(step, *operands, **more):
    checks = jax_fa.export_disabled_checks()
    return jax.export.export(step, disabled_checks=checks, **more)(*operands)


COMPILED_ONCE = """
import jax, jax.numpy as jnp, jax_fa
from jax.sharding import NamedSharding, PartitionSpec as P

events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.split("/")[-1]))
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

def of(heads, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct((8, 12, heads, 8), jnp.float32, sharding=sharding)

step = jax.grad(lambda *x: jnp.sum(jax_fa.attention(*x)), (0, 1, 2))
jax.jit(step).lower(of(8, "data", None, "model"), of(2, "data"), of(2, "data")).compile()
print(events.count("cache_hits"), events.count("cache_misses"))
"""


def test_a_second_process_finds_the_program_in_the_compilation_cache(tmp_path):
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    assert in_new_process(COMPILED_ONCE, **cache).split() == ["0", "1"]
    assert in_new_process(COMPILED_ONCE, **cache).split() == ["1", "0"]


def test_exported_and_serialized_programs_run_in_a_new_process(tmp_path):
    step, operands = sharded_step()
    (tmp_path / "export").write_bytes(bytes(exported(step, *operands).serialize()))
    program = serialize_executable.serialize(step.lower(*operands).compile())
    (tmp_path / "executable").write_bytes(pickle.dumps(program))
    np.savez(tmp_path / "operands.npz", *operands)
    in_new_process(
        f"""
import jax, numpy as np, pathlib, pickle, jax_fa
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding, PartitionSpec as P
folder = pathlib.Path({str(tmp_path)!r})
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
specs = P("data", None, "model"), P("data"), P("data")
arrays = np.load(folder / "operands.npz").values()
operands = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs)]
exported = jax.export.deserialize(bytearray((folder / "export").read_bytes()))
executable = pickle.loads((folder / "executable").read_bytes())
for name, call in (
    ("export", jax.jit(exported.call)),
    ("executable", serialize_executable.deserialize_and_load(*executable)),
):
    np.savez(folder / f"{{name}}.npz", *jax.tree.leaves(call(*operands)))
"""
    )
    want = jax.tree.leaves(step(*operands))
    for name in ("export", "executable"):
        assert_same(list(np.load(tmp_path / f"{name}.npz").values()), want)


def test_export_for_a_mesh_without_devices():
    step, operands = sharded_step()
    mesh = operands[0].sharding.mesh.abstract_mesh
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec))
        for x in operands
    ]
    again = jax.export.deserialize(exported(step, *shapes, platforms=["cpu"]).serialize())
    assert_same(jax.jit(again.call)(*operands), step(*operands))


def test_symbolic_shapes_over_several_devices_are_refused():
    step, operands = sharded_step()
    (b,) = jax.export.symbolic_shape("b")
    shapes = [
        jax.ShapeDtypeStruct((8 * b, *x.shape[1:]), x.dtype, sharding=x.sharding) for x in operands
    ]
    with pytest.raises(NotImplementedError, match=r"\(8\*b, 12, 8, 8\).*jax\.shard_map"):
        exported(step, *shapes)


def test_the_text_of_a_call_says_everything():
    semantics = Semantics(
        scale=0.1,
        band=Band(is_causal=True, left=3, right=0, alignment="bottom_right"),
        soft_cap=2.5,
        deterministic=True,
    )
    for call in (
        Call("fwd", "cpu", ("q", "k", "v"), Semantics(1.0)),
        Call("bwd", "cuda", ("q", "k", "v", "sinks"), semantics, may_share=False),
        Call("bwd", "cuda", ("q", "k", "v", "bias"), semantics, gives_dbias=True),
    ):
        assert Call.of(call.text().encode()) == call


def test_programs_of_the_partitioner_before_shardy():
    step, operands = sharded_step()
    want = step(*operands)
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        compiled = step.lower(*operands).compile()
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    assert_same(compiled(*operands), want)
