"""Dense masks: packed words and their map, and the ways by which they reach kernels."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import BY_NAME, CASES, Case, Dense, packed
from helpers.harness import data, wanted
from helpers.oracle import Results, assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa
from jax_fa.runtime import masks
from jax_fa.spec.problem import Problem

MASKED = [case for case in CASES if case.dense is not None]
SHAPES = {
    (1, 1, 100, 1100): 1100,
    (2, 1, 33, 31): 31,
    (1, 2, 1, 700): 700,
    (2, 1, 40, 1): 700,
    (1, 1, 1, 1): 20,
    (1, 1, 50, 32): 32,
    (1, 1, 16, 33): 33,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_words_and_map_are_those_of_the_mask(shape):
    rng = np.random.default_rng(0)
    mask = rng.random(shape) < 0.5
    mask[:, :, 16:48, 100:400] = True
    mask[:, :, :32, 500:590] = False
    words, blocks = packed(mask, SHAPES[shape])
    np.testing.assert_array_equal(masks.packed(jnp.asarray(mask)), words)
    np.testing.assert_array_equal(masks.block_map(jnp.asarray(words), SHAPES[shape]), blocks)
    whole = np.broadcast_to(mask, (*shape[:3], SHAPES[shape]))
    got = np.asarray(masks.unpacked(jnp.asarray(words), SHAPES[shape]))
    np.testing.assert_array_equal(np.broadcast_to(got, whole.shape), whole)


@pytest.mark.parametrize("case", MASKED, ids=str)
def test_unfused_and_kernels_agree(case):
    given = data(case, "float32").operands
    options = case.options(given)
    out, lse = jax_fa.attention_with_lse(*given[:3], implementation="xla", **options)
    assert_close(Results(out, lse), wanted(case, "float32"), "float32")


def problem(*shape):
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(3))
    return q, k, v


def loss(q, k, v, mask):
    return (jax_fa.attention(q, k, v, mask=mask) ** 2).sum()


@pytest.mark.parametrize("over", ["queries", "mask", "both"])
@pytest.mark.parametrize("batch", [1, 2])
def test_vmap_gives_the_results_of_a_loop(over, batch):
    q, k, v = problem(3, 2, 40, 4, 16)
    mask = jnp.asarray(np.random.default_rng(2).random((3, batch, 1, 40, 40)) < 0.6)
    axes = {"queries": (0, None), "mask": (None, 0), "both": (0, 0)}[over]
    q = q if axes[0] == 0 else q[0]
    mask = mask if axes[1] == 0 else mask[0]
    step = jax.grad(lambda q, mask: loss(q, k[0], v[0], mask))
    got = jax.vmap(step, axes)(q, mask)
    for i in range(3):
        one = step(q[i] if axes[0] == 0 else q, mask[i] if axes[1] == 0 else mask)
        np.testing.assert_allclose(got[i], one, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dims", ["TS", "BTS", "NTS", "BNS", "BNT"])
def test_plain_jit_splits_a_mask_with_batch_and_heads(dims):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    case = Case("split", batch=4, q_len=40, kv_len=40, heads=4, kv_heads=4, dense=Dense("random"))
    mask = jnp.asarray(Dense("random", dims).make(case))
    arrays = problem(4, 40, 4, 16)
    sharding = NamedSharding(mesh, P("data", None, "model"))
    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    wanted_value, wanted_gradients = step(*arrays, mask)
    split = [jax.device_put(x, sharding) for x in arrays]
    value, gradients = step(*split, mask)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-5)
    for got, one in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(got, one, rtol=1e-4, atol=1e-5)
    text = step.lower(*split, mask).compile().as_text()
    assert "jax_fa_fwd" in text and "all-gather" not in text


def test_a_mask_that_hides_everything_gives_zeros():
    q, k, v = problem(1, 20, 2, 16)
    mask = jnp.zeros((20, 20), bool)
    out, lse = jax_fa.attention_with_lse(q, k, v, mask=mask)
    assert not np.asarray(out).any() and np.isneginf(np.asarray(lse)).all()
    for gradient in jax.grad(loss, (0, 1, 2))(q, k, v, mask):
        assert not np.asarray(gradient).any()


def test_empty_arrays_need_no_mask():
    q = jnp.zeros((1, 0, 2, 16))
    k = jnp.zeros((1, 5, 2, 16))
    assert jax_fa.attention(q, k, k, mask=jnp.ones((1, 1, 0, 5), bool)).shape == (1, 0, 2, 16)
    out = jax_fa.attention(k, q, q, mask=jnp.ones((1, 1, 5, 0), bool))
    assert not np.asarray(out).any()


def test_a_broadcast_mask_is_not_expanded():
    q, k, v = problem(4, 64, 8, 16)
    case = BY_NAME["batch_and_heads"]
    given = data(case, "float32").operands
    operands = masks.with_words(given, masks.packed(jnp.ones((1, 1, 1, case.kv_len), bool)))
    assert operands.mask_words.shape == (1, 1, 1, 3)
    asked = Problem.of(operands, case.semantics)
    assert asked.has_mask and asked.has_hiding_operands
    text = jax.jit(partial(loss, mask=jnp.ones((64, 64), bool))).lower(q, k, v).as_text()
    assert "jax_fa_fwd" in text


def test_explain_tells_the_size_of_a_mask():
    q = jax.ShapeDtypeStruct((2, 1024, 8, 64), jnp.float32)
    mask = jax.ShapeDtypeStruct((2, 1, 1024, 1024), bool)
    text = str(jax_fa.explain(q, q, q, mask=mask))
    assert text.startswith("cpu: cpu") and text.endswith("Mask: 0.25 MiB of bits")


def test_forward_and_backward_alone_take_a_mask():
    q, k, v = problem(1, 40, 2, 16)
    mask = jnp.asarray(np.random.default_rng(2).random((40, 40)) < 0.6)
    out, lse = jax_fa.forward(q, k, v, mask=mask)
    _, pull = jax.vjp(lambda q, k, v: jax_fa.attention(q, k, v, mask=mask), q, k, v)
    dout = jnp.ones_like(out)
    got = jax_fa.backward(q, k, v, out, lse, dout, mask=mask)
    for one, other in zip(got, pull(dout), strict=True):
        np.testing.assert_array_equal(one, other)
