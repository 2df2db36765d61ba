"""The unfused path in blocks of query rows: the results of the whole matrix, and no T x S array.

Blocks are forced to be tiny, so that there are several; some tests have a smaller last one.
"""

import re
import warnings
from functools import cache
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import BY_NAME
from helpers.harness import MOVING, data, on_device, wanted
from helpers.oracle import Results, assert_close, side
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa
from jax_fa.runtime import bindings, blockwise, reference
from jax_fa.runtime.dispatch import Target
from jax_fa.spec.problem import Operands, Semantics

ROWS = 24
rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


B, T, S, N, K, D = 2, 72, 40, 4, 2, 8
Q, KEY, V = normal(B, T, N, D), normal(B, S, K, D), normal(B, S, K, D)
MASK = jnp.asarray(rng.random((1, 1, T, S)) < 0.7)


@pytest.fixture(autouse=True)
def _tiny_blocks(monkeypatch):
    def rows(operands):
        return min(ROWS, operands.q.shape[1])

    monkeypatch.setattr(blockwise, "rows_per_block", rows)


@pytest.fixture
def no_kernels(monkeypatch):
    """A platform that has none, without the warning that every call on it gives."""
    monkeypatch.setattr(bindings, "target", lambda platform, forced=None: Target("other"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jax_fa.FallbackWarning)
        yield


def assert_trees_close(a, b, tolerance=2e-5):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance), a, b
    )


def both_gradients(operands, semantics, cotangents):
    """Results with the gradients that JAX derives, and with those of ``backward``."""

    def forward(*moving):
        return blockwise.forward(
            operands._replace(**dict(zip(MOVING, moving, strict=True))), semantics
        )

    (out, lse), pull = jax.vjp(forward, *(getattr(operands, name) for name in MOVING))
    written = blockwise.backward(operands, semantics, out, lse, *cotangents)
    if operands.bias is not None:
        dout, dlse = cotangents
        delta = jnp.sum(out * dout, axis=-1) - dlse
        dbias = blockwise.bias_gradient(operands, semantics, lse, dout, delta)
        written = written._replace(bias=dbias)
    found = [Results(out, lse, *grads) for grads in (pull(cotangents), written)]
    return [x if x.dsinks is None else x._replace(dsinks=x.dsinks.sum(0)) for x in found]


SPLIT = (
    *("prime_sizes", "packed_everything", "everything"),
    *("bias_of_TS", "bias_of_BS", "bias_soft_cap", "bias_and_everything"),
)
"""Between them: a length, a segment, an offset, a slot, a diagonal and a bias of each row."""


def with_nan_where_unused(operands):
    rows = side(operands.q.shape[:2], operands.cu_seqlens_q, operands.q_lengths)
    keys = side(operands.k.shape[:2], operands.cu_seqlens_k, operands.kv_lengths)
    poisoned = {
        name: np.where(tokens.used[..., None, None], getattr(operands, name), np.float32(np.nan))
        for name, tokens in (("q", rows), ("k", keys), ("v", keys))
    }
    return operands._replace(**poisoned)


@pytest.mark.parametrize("name", SPLIT)
def test_blocks_keep_the_tolerance_rule_whatever_padding_holds(name):
    case = BY_NAME[name]
    given = data(case, "float32")
    operands = on_device(with_nan_where_unused(given.operands))
    step = jax.jit(both_gradients, static_argnums=1)
    for got in step(operands, case.semantics, given.cotangents):
        assert_close(got, wanted(case, "float32"), "float32")


def test_gradients_of_what_blocks_share_add_up_in_float32(monkeypatch):
    """With one row per block a sum in bfloat16 would be off by several units."""
    monkeypatch.setattr(blockwise, "rows_per_block", lambda operands: 1)
    case = BY_NAME["many_queries_one_key"]
    given = data(case, "bfloat16")
    step = jax.jit(both_gradients, static_argnums=1)
    for got in step(on_device(given.operands), case.semantics, given.cotangents):
        assert_close(got, wanted(case, "bfloat16"), "bfloat16")


BROADCAST = (
    ((B, N, T, S), (B, 1, T, S), 30),  # a smaller block at the end
    ((1, N, 1, S), (1, N, T, 1), ROWS),
)


@pytest.mark.parametrize(("bias_shape", "mask_shape", "rows"), BROADCAST, ids=str)
def test_mask_bias_and_scale_with_their_gradients(bias_shape, mask_shape, rows, monkeypatch):
    monkeypatch.setattr(blockwise, "rows_per_block", lambda operands: rows)
    bias, mask = normal(*bias_shape), jnp.asarray(rng.random(mask_shape) < 0.7)
    weights = normal(B, T, N, D)

    def gradients(forward):
        def total(q, k, v, bias, scale):
            out, lse = forward(Operands(q, k, v), Semantics(scale), bias, mask)
            return jnp.sum(out * weights) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0)), out

        step = jax.value_and_grad(total, argnums=range(5), has_aux=True)
        return jax.jit(step)(Q, KEY, V, bias, 0.3)

    assert_trees_close(gradients(blockwise.forward), gradients(reference.forward))


def test_forward_mode_and_second_derivatives():
    bias = normal(1, N, T, S)
    tangents = normal(*Q.shape), normal(*KEY.shape), normal(*bias.shape)

    def derivatives(forward):
        def total(q, k, bias):
            out, _ = forward(Operands(q, k, V), Semantics(0.3), bias, MASK)
            return jnp.sum(jnp.sin(out))

        twice = jax.jit(lambda *x: jax.jvp(jax.grad(total, (0, 1, 2)), x, tangents))
        return twice(Q, KEY, bias)

    assert_trees_close(derivatives(blockwise.forward), derivatives(reference.forward))


def test_eager_calls_trace_the_loop_once():
    operands = Operands(Q, KEY, V)
    first = blockwise.forward(operands, Semantics(0.7))
    with mock.patch.object(reference, "forward", side_effect=AssertionError("traced again")):
        again = blockwise.forward(operands, Semantics(0.7))
    assert_trees_close(first, again, 0)


# ------------------------------------------------------------------------- what callers do with it


def masked(q, k, v):
    """Through JAX's own derivatives."""
    return jax_fa.attention_with_lse(q, k, v, mask=MASK, is_causal=True)


def unmasked(q, k, v):
    """Through the two primitives."""
    return jax_fa.attention_with_lse(q, k, v, is_causal=True)


PATHS = pytest.mark.parametrize("attend", [masked, unmasked])


def step_of(attend):
    def step(q, k, v):
        def value(q, k, v):
            out, lse = attend(q, k, v)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse > -1e30, lse, 0) ** 2)

        return jax.value_and_grad(value, (0, 1, 2))(q, k, v)

    return step


@cache
def wanted_of(attend):
    """Value and gradients in one block."""
    with mock.patch.object(blockwise, "rows_per_block", lambda operands: operands.q.shape[1]):
        return jax.jit(step_of(attend))(Q, KEY, V)


def test_vmap():
    mapped = jax.jit(jax.vmap(step_of(masked), (0, None, None)))
    got = mapped(jnp.stack([Q, Q + 1]), KEY, V)
    assert_trees_close(jax.tree.map(lambda x: x[0], got), wanted_of(masked))


SPEC = P("data", None, "model", None)


def placed(mesh):
    return [jax.device_put(x, NamedSharding(mesh, SPEC)) for x in (Q, KEY, V)]


@pytest.mark.parametrize(
    ("attend", "kind"),
    [(unmasked, AxisType.Auto), (masked, AxisType.Explicit)],
)
@pytest.mark.usefixtures("no_kernels")
def test_sharded_batch_and_heads_are_not_gathered(attend, kind):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        args = placed(mesh)
        compiled = jax.jit(step_of(attend)).lower(*args).compile()
        assert "all-gather" not in compiled.as_text()
        got = compiled(*args)
    assert_trees_close(got, wanted_of(attend))


@PATHS
@pytest.mark.usefixtures("no_kernels")
def test_shard_map(attend):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = SPEC, P("data", None, "model")
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=SPEC, out_specs=specs)
    assert_trees_close(jax.jit(step_of(mapped))(*placed(mesh)), wanted_of(attend))


@pytest.mark.parametrize(
    ("attend", "platform"), [(masked, "tpu"), (unmasked, "tpu"), (unmasked, "rocm")]
)
@pytest.mark.filterwarnings("ignore::jax_fa.FallbackWarning")
def test_no_array_of_a_platform_without_kernels_has_t_x_s_scores(attend, platform):
    """Only the mask, which is bool."""
    lowered = jax.export.export(jax.jit(step_of(attend)), platforms=[platform])(Q, KEY, V)
    arrays = re.findall(r"tensor<([0-9x]+)x(f32|i1)>", lowered.mlir_module())
    scores = {(shape, kind) for shape, kind in arrays if f"{T}x{S}" in shape}
    assert ("2x2x2x24x40", "f32") in arrays  # a block's: B, K, G, rows, S
    assert scores == ({(f"1x1x{T}x{S}", "i1")} if attend is masked else set())


# --------------------------------------------------------------------------------------- block size


ROWS_PER_BLOCK = blockwise.rows_per_block


def rows_of(batch, q_len, kv_len, heads):
    operands = Operands(
        jax.ShapeDtypeStruct((batch, q_len, heads, 64), jnp.float32),
        jax.ShapeDtypeStruct((batch, kv_len, heads, 64), jnp.float32),
        None,
    )
    return ROWS_PER_BLOCK(operands)


def test_small_problems_are_one_block():
    assert rows_of(2, 256, 256, 8) == 256
    assert rows_of(0, 100, 100, 4) == 100
    assert rows_of(1, 0, 100, 4) == 0
    assert rows_of(1, 100, 0, 4) == 100


def test_blocks_are_of_one_size_and_no_larger_than_the_budget():
    assert rows_of(1, 4096, 4096, 8) * 8 * 4096 * 4 == blockwise.SCORE_BYTES["cpu"]
    assert rows_of(1, 4097, 4096, 8) == -(-4097 // 129)


def test_blocks_keep_as_many_rows_as_a_head_has_elements():
    assert rows_of(8, 16384, 16384, 32) == blockwise.MIN_ROWS


MIB = 2**20


def temporary_bytes(forward, mask_or_bias):
    """What the gradient of T = S = 16384, N = 8, D = 64 holds beside arguments and results."""
    qkv = [jax.ShapeDtypeStruct((1, 16384, 8, 64), jnp.float32)] * 3

    def value(q, k, v, x):
        bias, mask = (None, x) if x.dtype == bool else (x, None)
        return jnp.sum(forward(Operands(q, k, v), Semantics(0.125), bias, mask)[0])

    step = jax.jit(jax.value_and_grad(value, (0, 1, 2)))
    compiled = step.lower(*qkv, mask_or_bias).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(("heads", "dtype"), [(1, bool), (8, jnp.float32)], ids=["mask", "bias"])
def test_memory_is_that_of_blocks_and_no_copy_of_mask_or_bias(heads, dtype, monkeypatch):
    monkeypatch.setattr(blockwise, "rows_per_block", ROWS_PER_BLOCK)
    given = jax.ShapeDtypeStruct((1, heads, 16384, 16384), dtype)
    assert temporary_bytes(blockwise.forward, given) < 440 * MIB


def test_memory_of_the_whole_matrix_is_seen():
    mask = jax.ShapeDtypeStruct((1, 1, 16384, 16384), bool)
    assert temporary_bytes(reference.forward, mask) > 8192 * MIB
