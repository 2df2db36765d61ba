"""Dense masks: packed words and their map, and the ways by which they reach kernels."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import BY_NAME, CASES, Case, Dense, make, packed
from helpers.harness import data, wanted
from helpers.oracle import Results, assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa
from jax_fa.runtime import masks
from jax_fa.spec.problem import Problem

MASKED = [case for case in CASES if case.dense is not None or case.block_dims is not None]
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
    lengths = (shape[2] if shape[2] > 1 else 300, SHAPES[shape])
    words, blocks = packed(mask, *lengths)
    np.testing.assert_array_equal(masks.packed(jnp.asarray(mask)), words)
    np.testing.assert_array_equal(masks.block_map(jnp.asarray(words), *lengths), blocks)
    whole = np.broadcast_to(mask, (*shape[:3], SHAPES[shape]))
    got = np.asarray(masks.unpacked(jnp.asarray(words), *lengths))
    np.testing.assert_array_equal(np.broadcast_to(got, whole.shape), whole)


@pytest.mark.parametrize("lengths", [(300, 410), (128, 128), (129, 20), (1, 257), (20, 1)])
def test_words_and_map_are_those_of_a_block_mask(lengths):
    case = Case("blocks", 2, q_len=lengths[0], kv_len=lengths[1], block_dims="BNTS")
    blocks = jnp.asarray(case.blocks())
    words = masks.by_blocks(blocks, lengths[1])
    operands = make(case, "float32").operands
    np.testing.assert_array_equal(words, operands.mask_words)
    np.testing.assert_array_equal(masks.block_map(words, *lengths), operands.mask_map)
    np.testing.assert_array_equal(
        np.broadcast_to(masks.unpacked(words, *lengths), (2, 2, *lengths)),
        np.broadcast_to(masks.of_pairs(blocks, *lengths), (2, 2, *lengths)),
    )


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
    operands = masks.mapped(
        given._replace(mask_words=masks.packed(jnp.ones((1, 1, 1, case.kv_len), bool)))
    )
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


@pytest.mark.parametrize("length", [256, 300])
def test_explain_tells_the_share_of_blocks_that_masks_hide(length):
    q, *_ = problem(1, length, 2, 16)
    rows = np.arange(length)
    causal = jnp.asarray(rows[None] <= rows[:, None])
    count = -(-length // 128)
    blocks = jnp.ones((1, 2, count, count), bool).at[0, 1, -1].set(False)
    for options, hidden in (
        ({"mask": causal}, (count - 1) / 2 / count),
        ({"block_mask": blocks}, 0.5 / count),
        ({"mask": causal, "block_mask": blocks}, 0.5),
        ({"mask": jnp.ones((length,), bool)}, 0.0),
        ({"mask_mod": lambda b, h, i, j: i >= j}, None),
    ):
        explained = jax_fa.explain(q, q, q, **options)
        assert explained.hidden == (hidden if hidden is None else pytest.approx(hidden)), options
        skipped = "" if hidden is None else f", {hidden:.0%} of blocks skipped"
        assert str(explained).endswith(f"MiB of bits{skipped}")


def test_forward_and_backward_alone_take_a_mask():
    q, k, v = problem(1, 40, 2, 16)
    mask = jnp.asarray(np.random.default_rng(2).random((40, 40)) < 0.6)
    out, lse = jax_fa.forward(q, k, v, mask=mask)
    _, pull = jax.vjp(lambda q, k, v: jax_fa.attention(q, k, v, mask=mask), q, k, v)
    dout = jnp.ones_like(out)
    got = jax_fa.backward(q, k, v, out, lse, dout, mask=mask)
    for one, other in zip(got, pull(dout), strict=True):
        np.testing.assert_array_equal(one, other)


# -------------------------------------------------------------------------------------- block masks


def blocks_of(lengths, leading=(1, 1), seed=3):
    rows, columns = (-(-n // 128) for n in lengths)
    return jnp.asarray(np.random.default_rng(seed).random((*leading, rows, columns)) < 0.6)


def test_a_block_mask_is_never_expanded_to_pairs():
    q, k, v = problem(1, 1024, 2, 16)
    blocks = blocks_of((1024, 1024), (1, 2))

    def step(q, k, v):
        return (jax_fa.attention(q, k, v, block_mask=blocks) ** 2).sum()

    program = str(jax.make_jaxpr(jax.grad(step, (0, 1, 2)))(q, k, v))
    assert "[1,2,8,32]" in program and "1024,1024]" not in program and "1024,32]" not in program
    text = str(jax_fa.explain(q, k, v, block_mask=blocks))
    assert "Mask: 0.00195 MiB of bits, " in text


@pytest.mark.parametrize("more", ["mask", "mask_mod", "bias", "unfused"])
def test_a_block_mask_adds_to_everything_else(more):
    q, k, v = problem(2, 300, 2, 16)
    blocks = blocks_of((300, 300), (2, 1))
    pairs = masks.of_pairs(blocks, 300, 300)
    rng = np.random.default_rng(4)
    every: dict[str, dict[str, Any]] = {
        "mask": {"mask": jnp.asarray(rng.random((1, 2, 300, 300)) < 0.5)},
        "mask_mod": {"mask_mod": lambda b, h, i, j: (i + h) % 3 != j % 3},
        "bias": {"bias": jnp.asarray(rng.standard_normal((1, 2, 300, 1)), jnp.float32)},
        "unfused": {"is_causal": True, "implementation": "xla"},
    }
    options = every[more]
    got = jax_fa.attention(q, k, v, block_mask=blocks, **options)
    given = options.pop("mask", True)
    want = jax_fa.attention(q, k, v, mask=pairs & given, **options)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_a_block_mask_may_be_traced_and_mapped():
    q, k, v = problem(3, 2, 260, 4, 16)
    blocks = blocks_of((260, 260), (3, 2, 4))
    attend = jax.jit(lambda q, blocks: jax_fa.attention(q, k[0], v[0], block_mask=blocks))
    for axes in ((0, 0), (None, 0), (0, None)):
        given = [x if axis == 0 else x[0] for x, axis in zip((q, blocks), axes, strict=True)]
        got = jax.vmap(attend, axes)(*given)
        for i in range(3):
            one = attend(*(x[i] if axis == 0 else x for x, axis in zip(given, axes, strict=True)))
            np.testing.assert_allclose(got[i], one, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("length", [384, 1])
def test_a_block_mask_of_sequences_that_devices_share(length):
    mesh = jax.make_mesh((2,), ("context",), axis_types=(AxisType.Auto,))
    q, k, v = problem(2, 2 * length, 2, 16)
    blocks = blocks_of((2 * length,) * 2)
    want = jax_fa.attention(q, k, v, block_mask=blocks)
    split = jax.device_put(q, NamedSharding(mesh, P(None, "context")))
    got = jax.jit(lambda *x: jax_fa.attention(*x, block_mask=blocks))(split, k, v)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_a_wrong_block_mask_is_refused():
    q, k, v = problem(2, 300, 2, 16)
    extents = re.escape("[B, N, ceil(T / 128), ceil(S / 128)] = [2, 2, 3, 3], but has shape")
    with pytest.raises(TypeError, match=f"block_mask should broadcast to {extents}"):
        jax_fa.attention(q, k, v, block_mask=jnp.ones((300, 300), bool))
    with pytest.raises(ValueError, match="block_mask should be bool"):
        jax_fa.attention(q, k, v, block_mask=jnp.ones((3, 3)))
    with pytest.raises(TypeError, match="block_mask does not apply to this function"):
        borders = jnp.asarray([0, 100, 300])
        jax_fa.attention_varlen(
            q[0], k[0], v[0], borders, borders, block_mask=jnp.ones((3, 3), bool)
        )
