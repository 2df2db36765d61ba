"""JAX's transformations: same numbers as without them, and nothing computed twice."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.harness import in_new_process
from jax.ad_checkpoint import checkpoint_policies

import jax_fa

rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def ints(*values):
    return jnp.array(values, jnp.int32)


def assert_trees_close(a, b, tolerance=2e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance, rtol=1e-5), a, b)


V_SIZE = 3
BATCHED = {
    "q": normal(V_SIZE, 2, 10, 4, 8),
    "k": normal(V_SIZE, 2, 12, 2, 8),
    "v": normal(V_SIZE, 2, 12, 2, 8),
    "sinks": normal(V_SIZE, 4),
    "query_seq_lengths": jnp.array([[10, 4], [3, 0], [7, 9]], jnp.int32),
    "key_value_seq_lengths": jnp.array([[12, 4], [3, 12], [7, 9]], jnp.int32),
    "query_segment_ids": jnp.asarray(rng.integers(0, 2, (V_SIZE, 2, 10)), jnp.int32),
    "key_value_segment_ids": jnp.asarray(rng.integers(0, 2, (V_SIZE, 2, 12)), jnp.int32),
    "query_offset": jnp.array([[0, 3], [5, 1], [2, 2]], jnp.int32),
    "bias": normal(V_SIZE, 2, 4, 10, 12),
}
SUBSETS = [
    ("q", "k", "v"),
    ("q",),
    ("k", "v"),
    ("v",),
    ("sinks",),
    ("query_seq_lengths", "q"),
    ("key_value_seq_lengths",),
    ("query_segment_ids",),
    ("query_offset", "k"),
    ("bias",),
    tuple(BATCHED),
]


def attend(arrays):
    options = dict(arrays)
    q, k, v = (options.pop(name) for name in ("q", "k", "v"))
    return jax_fa.attention_with_lse(q, k, v, is_causal=True, **options)


def loss(differentiable, rest):
    out, lse = attend({**differentiable, **rest})
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0) ** 2)


def step(arrays):
    names = ("q", "k", "v", "sinks", "bias")
    differentiable = {name: arrays[name] for name in names}
    rest = {name: x for name, x in arrays.items() if name not in names}
    return attend(arrays), jax.grad(loss)(differentiable, rest)


def loop(function, arrays, axes):
    rows = [
        function({n: x if axes[n] is None else jnp.take(x, i, axes[n]) for n, x in arrays.items()})
        for i in range(V_SIZE)
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *rows)


@pytest.mark.parametrize("names", SUBSETS, ids="+".join)
def test_vmap_of_forward_and_gradient_with_some_operands_batched(names):
    axes = {name: 0 if name in names else None for name in BATCHED}
    arrays = {name: x if name in names else x[0] for name, x in BATCHED.items()}
    mapped = jax.jit(jax.vmap(step, in_axes=(axes,)))(arrays)
    assert_trees_close(mapped, loop(jax.jit(step), arrays, axes))


@pytest.mark.parametrize("shape", [(1, 4, 10, 12), (1, 1, 1, 12), (2, 1, 10, 1)], ids=str)
@pytest.mark.parametrize("dim", [None, 1])
def test_vmap_of_the_gradient_of_a_broadcast_bias(shape, dim):
    axes = {name: 0 for name in BATCHED} | {"bias": dim}
    bias = normal(*shape) if dim is None else normal(shape[0], V_SIZE, *shape[1:])
    arrays = {**BATCHED, "bias": bias}
    mapped = jax.jit(jax.vmap(step, in_axes=(axes,)))(arrays)
    assert_trees_close(mapped, loop(jax.jit(step), arrays, axes))


def test_vmap_over_inner_dimensions_and_out_axes():
    axes: dict[str, Any] = {name: None for name in BATCHED} | {"q": 3, "k": 1, "v": 4}
    arrays = {name: x[0] for name, x in BATCHED.items()}
    for name in ("q", "k", "v"):
        arrays[name] = jnp.moveaxis(BATCHED[name], 0, axes[name])
    mapped = jax.vmap(attend, in_axes=(axes,), out_axes=(2, 0))(arrays)
    out, lse = loop(attend, arrays, axes)
    assert_trees_close(mapped, (jnp.moveaxis(out, 0, 2), lse))


def test_nested_vmap_is_two_batch_dimensions():
    q, k, v = normal(2, 3, 4, 9, 2, 8), normal(2, 3, 4, 7, 2, 8), normal(2, 3, 4, 7, 2, 8)
    flat = [x.reshape(6, *x.shape[2:]) for x in (q, k, v)]
    attention = jax_fa.attention
    nested = jax.vmap(jax.vmap(attention))(q, k, v)
    np.testing.assert_array_equal(
        nested.reshape(6, 4, 9, 2, 8), jnp.stack([attention(*x) for x in zip(*flat, strict=True)])
    )
    halfway = jax.vmap(jax.vmap(attention, (0, None, 0)), (0, 0, None))(q, k[:, 0], v[0])
    want = jnp.stack(
        [jnp.stack([attention(q[i, j], k[i, 0], v[0, j]) for j in range(3)]) for i in range(2)]
    )
    np.testing.assert_array_equal(halfway, want)


@pytest.mark.parametrize("batched_borders", [True, False])
@pytest.mark.parametrize("used", [True, False])
def test_vmap_of_packed_sequences(batched_borders, used):
    q, k, v = normal(3, 20, 4, 8), normal(3, 24, 2, 8), normal(3, 24, 2, 8)
    cu_q = jnp.array([[0, 5, 20], [2, 2, 15], [1, 10, 10]], jnp.int32)
    cu_k = jnp.array([[0, 12, 24], [4, 10, 20], [0, 0, 24]], jnp.int32)
    seqused = {"seqused_q": ints(4, 30), "seqused_k": ints(10, 3)} if used else {}
    if not batched_borders:
        cu_q, cu_k = cu_q[0], cu_k[0]

    def step(q, k, v, cu_q, cu_k):
        def value(q, k, v):
            out = jax_fa.attention_varlen(q, k, v, cu_q, cu_k, is_causal=True, **seqused)
            return jnp.sum(jnp.sin(out)), out

        return jax.grad(value, (0, 1, 2), has_aux=True)(q, k, v)

    axis = 0 if batched_borders else None
    mapped = jax.jit(jax.vmap(step, (0, 0, 0, axis, axis)))(q, k, v, cu_q, cu_k)
    one = jax.jit(step)
    rows = [
        one(q[i], k[i], v[i], *((cu_q[i], cu_k[i]) if batched_borders else (cu_q, cu_k)))
        for i in range(3)
    ]
    assert_trees_close(mapped, jax.tree.map(lambda *x: jnp.stack(x), *rows))


def test_vmap_over_nothing_has_results_of_the_right_shapes():
    dense = {name: x[:0] for name, x in BATCHED.items()}
    (out, lse), grads = jax.jit(jax.vmap(step))(dense)
    assert out.shape == (0, 2, 10, 4, 8) and lse.shape == (0, 2, 10, 4)
    assert {name: x.shape for name, x in grads.items()} == {n: dense[n].shape for n in grads}


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_vmap_over_nothing_packed_has_gradients_of_the_right_shapes(implementation):
    def gradient(q, k, v, cu_q, cu_k):
        def total(q, k, v):
            return jnp.sum(
                jax_fa.attention_varlen(q, k, v, cu_q, cu_k, implementation=implementation)
            )

        return jax.grad(total, (0, 1, 2))(q, k, v)

    q, kv, borders = jnp.zeros((0, 20, 4, 8)), jnp.zeros((0, 24, 2, 8)), jnp.zeros((0, 3), int)
    shapes = [x.shape for x in jax.jit(jax.vmap(gradient))(q, kv, kv, borders, borders)]
    assert shapes == [q.shape, kv.shape, kv.shape]


def test_gradient_of_vmap_equals_vmap_of_gradient():
    q, k, v = (BATCHED[name] for name in ("q", "k", "v"))

    def total(q, k, v):
        return jnp.sum(jax_fa.attention(q, k, v) ** 3)

    inside = jax.vmap(jax.grad(total, (0, 1, 2)))(q, k, v)
    outside = jax.grad(lambda *x: jnp.sum(jax.vmap(total)(*x)), (0, 1, 2))(q, k, v)
    assert_trees_close(inside, outside)


def test_jacrev_rows_are_vector_jacobian_products():
    q, k, v = normal(1, 3, 1, 4), normal(1, 5, 1, 4), normal(1, 5, 1, 4)
    by_kernel, by_reference = (
        jax.jit(jax.jacrev(lambda q, i=i: jax_fa.attention(q, k, v, implementation=i)))(q)
        for i in (None, "xla")
    )
    assert_trees_close(by_kernel, by_reference)


def test_jit_gives_the_bits_of_the_eager_call():
    arrays = {name: x[0] for name, x in BATCHED.items()}
    for a, b in zip(attend(arrays), jax.jit(attend)(arrays), strict=True):
        np.testing.assert_array_equal(a, b)


def layers(x, weights, attention):
    def layer(x, w):
        q, k, v = (jnp.einsum("btnd,de->btne", x, w[i]) for i in range(3))
        return x + attention(q, k, v), None

    return jax.lax.scan(layer, x, weights)[0]


def test_scan_over_layers_equals_the_reference():
    x, weights = normal(2, 9, 2, 8), normal(3, 3, 8, 8) * 0.3

    def gradient(implementation):
        def attention(q, k, v):
            return jax_fa.attention(q, k, v, is_causal=True, implementation=implementation)

        return jax.jit(jax.grad(lambda x, w: jnp.sum(layers(x, w, attention) ** 2), (0, 1)))(
            x, weights
        )

    assert_trees_close(gradient(None), gradient("xla"), 2e-4)


def count_calls(function, *args):
    text = jax.jit(function).lower(*args).compile().as_text() or ""
    return tuple(
        len(re.findall(f'custom_call_target="jax_fa_{x}_v1"', text)) for x in ("fwd", "bwd")
    )


@pytest.mark.parametrize(
    ("policy", "calls"),
    [
        (checkpoint_policies.save_only_these_names("jax_fa_out", "jax_fa_lse"), (1, 1)),
        (checkpoint_policies.save_only_these_names("jax_fa_out"), (2, 1)),
        (checkpoint_policies.nothing_saveable, (2, 1)),
        (checkpoint_policies.everything_saveable, (1, 1)),
    ],
    ids=["out and lse", "out alone", "nothing", "everything"],
)
def test_checkpoint_recomputes_the_forward_only_if_its_results_are_not_kept(policy, calls):
    """Counted in a scan over layers, whose two loops XLA cannot merge."""
    x, k, v = normal(1, 16, 2, 8), normal(3, 1, 16, 2, 8), normal(3, 1, 16, 2, 8)

    def gradient(wrap):
        def layer(x, kv):
            return jnp.sin(jax_fa.attention(jnp.sin(x), *kv, is_causal=True)), None

        def value(x, k, v):
            return jnp.sum(jax.lax.scan(wrap(layer), x, (k, v))[0] ** 2)

        return jax.grad(value, (0, 1, 2))

    kept = gradient(lambda layer: jax.checkpoint(layer, policy=policy))
    assert count_calls(kept, x, k, v) == calls
    assert_trees_close(kept(x, k, v), gradient(lambda layer: layer)(x, k, v))


def test_unused_gradient_of_lse_or_sinks_costs_no_extra_call():
    q, k, v = normal(1, 16, 2, 8), normal(1, 16, 2, 8), normal(1, 16, 2, 8)
    value = lambda q: jnp.sum(jax_fa.attention(q, k, v))  # noqa: E731
    assert count_calls(value, q) == (1, 0)
    assert count_calls(jax.grad(value), q) == (1, 1)


def test_donated_operands_are_reused_for_gradients():
    def step(q, k, v):
        return jax.grad(lambda *x: jnp.sum(jax_fa.attention(*x) ** 2), (0, 1, 2))(q, k, v)

    q, k, v = normal(2, 16, 4, 8), normal(2, 16, 2, 8), normal(2, 16, 2, 8)
    want = jax.jit(step)(q, k, v)
    given = [x + 0 for x in (q, k, v)]
    got = jax.jit(step, donate_argnums=(0, 1, 2))(*given)
    assert_trees_close(got, want, 0)
    assert all(x.is_deleted() for x in given)


def test_value_and_grad_inside_while_loop():
    k, v = normal(1, 12, 2, 8), normal(1, 12, 2, 8)

    def descend(q):
        def body(state):
            i, q = state
            return i + 1, q - 0.1 * jax.grad(lambda q: jnp.sum(jax_fa.attention(q, k, v) ** 2))(q)

        return jax.lax.while_loop(lambda s: s[0] < 3, body, (0, q))[1]

    q = normal(1, 6, 2, 8)
    want = q
    for _ in range(3):
        want -= 0.1 * jax.grad(lambda q: jnp.sum(jax_fa.attention(q, k, v) ** 2))(want)
    np.testing.assert_allclose(jax.jit(descend)(q), want, atol=1e-6)


# Export.


def train_step(q, k, v, lengths, sinks):
    def value(q, k, v, sinks):
        out = jax_fa.attention(
            q, k, v, is_causal=True, key_value_seq_lengths=lengths, sinks=sinks, logits_soft_cap=4.0
        )
        return jnp.sum(jnp.sin(out))

    return jax.value_and_grad(value, (0, 1, 2, 3))(q, k, v, sinks)


STEP_ARGS = (normal(2, 9, 4, 8), normal(2, 11, 2, 8), normal(2, 11, 2, 8), ints(11, 5), normal(4))


def exported(**more):
    return jax.export.export(
        jax.jit(train_step), disabled_checks=jax_fa.export_disabled_checks(), **more
    )(*STEP_ARGS)


def test_exported_gradient_step_runs_in_a_new_process(tmp_path):
    (tmp_path / "step").write_bytes(bytes(exported().serialize()))
    np.savez(tmp_path / "args.npz", *STEP_ARGS)
    in_new_process(
        f"""
import jax, numpy as np, pathlib, jax_fa
folder = pathlib.Path({str(tmp_path)!r})
step = jax.export.deserialize(bytearray((folder / "step").read_bytes()))
results = jax.tree.leaves(step.call(*np.load(folder / "args.npz").values()))
np.savez(folder / "results.npz", *results)
"""
    )
    got = list(np.load(tmp_path / "results.npz").values())
    want = jax.tree.leaves(jax.jit(train_step)(*STEP_ARGS))
    assert len(got) == len(want) == 5
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_export_without_the_disabled_checks_is_refused():
    with pytest.raises(ValueError, match="jax_fa_fwd_v1"):
        jax.export.export(jax.jit(train_step))(*STEP_ARGS)


@pytest.mark.usefixtures("no_gpu_kernels")
def test_one_export_takes_the_right_path_on_each_platform():
    with pytest.warns(jax_fa.FallbackWarning) as record:
        both = exported(platforms=["cpu", "cuda"])
    assert len({str(w.message) for w in record}) == len(record) <= 2  # forward and gradient
    assert both.platforms == ("cpu", "cuda")
    again = jax.export.deserialize(both.serialize())
    assert_trees_close(again.call(*STEP_ARGS), jax.jit(train_step)(*STEP_ARGS))


@pytest.mark.usefixtures("no_gpu_kernels")
def test_lowering_for_cuda_alone_holds_no_cpu_kernel():
    with pytest.warns(jax_fa.FallbackWarning):
        text = exported(platforms=["cuda"]).mlir_module()
    assert "jax_fa_fwd_v1" not in text
    assert "jax_fa_fwd_v1" in exported(platforms=["cpu"]).mlir_module()


def test_export_with_symbolic_batch():
    (b,) = jax.export.symbolic_shape("b")
    spec = jax.ShapeDtypeStruct((b, 9, 4, 8), jnp.float32)
    step = jax.export.export(
        jax.jit(lambda q, k, v: jax_fa.attention(q, k, v)),
        disabled_checks=jax_fa.export_disabled_checks(),
    )(spec, spec, spec)
    q = STEP_ARGS[0]
    np.testing.assert_allclose(step.call(q, q, q), jax_fa.attention(q, q, q), atol=1e-6)
