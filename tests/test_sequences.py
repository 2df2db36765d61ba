"""Borders, lengths, offsets and segments of any value: one meaning on CPU and reference.

``tests/kernels/test_hostile_values.py`` has the GPU kernels.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import hostile
from helpers.oracle import assert_close

import jax_fa
from jax_fa.runtime import sequences
from jax_fa.spec.band import MAX_OFFSET

SETS = 4 * len(hostile.KINDS)
IMPLEMENTATIONS = ("cpu", "xla")


@pytest.mark.parametrize("seed", range(SETS))
def test_borders_and_offsets_become_what_they_mean(seed):
    given = hostile.problem(seed)
    sent, meant = given.sent.operands, given.meant
    if sent.is_packed:
        for got, wanted, array in (
            (sent.cu_seqlens_q, meant.cu_seqlens_q, sent.q),
            (sent.cu_seqlens_k, meant.cu_seqlens_k, sent.k),
        ):
            np.testing.assert_array_equal(sequences.borders(got, array.shape[1]), wanted)
    if sent.q_offset is not None:
        np.testing.assert_array_equal(sequences.offsets(sent.q_offset), meant.q_offset)


@pytest.mark.parametrize("seed", range(SETS))
def test_reference_gives_what_values_mean(seed):
    given = hostile.problem(seed)
    assert_close(hostile.run(given.meant, given, "xla"), given.wanted, "bfloat16", str(given.case))


@pytest.mark.parametrize("seed", range(SETS))
def test_cpu_kernels_give_what_values_mean_though_called_with_what_was_sent(seed):
    given = hostile.problem(seed)
    got = hostile.run(given.sent.operands, given, "cpu")
    assert_close(got, given.wanted, "bfloat16", str(given.case))


BORDERS = (
    ((0, 6, 3, 6), (0, 6, 6, 6)),
    ((-5, 2, 9, 4), (0, 2, 6, 6)),
    ((2, -(2**31), 2**31 - 1, 3), (2, 2, 6, 6)),
)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_borders_that_come_as_traced_values_mean_ascending_ones(implementation):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((6, 2, 8)), jnp.float32) for _ in range(3))

    @jax.jit
    def loss(qkv, borders):
        q, k, v = qkv
        out = jax_fa.attention_varlen(q, k, v, borders, borders, implementation=implementation)
        return jnp.sum(out**2), out

    for sent, meant in BORDERS:
        got, wanted = (
            jax.grad(loss, has_aux=True)((q, k, v), jnp.array(x, jnp.int32)) for x in (sent, meant)
        )
        jax.tree.map(np.testing.assert_array_equal, got, wanted)
    batched = jax.vmap(lambda x: loss((q, k, v), x)[1])(jnp.array([x for x, _ in BORDERS]))
    wanted = jnp.stack([loss((q, k, v), jnp.array(x, jnp.int32))[1] for _, x in BORDERS])
    np.testing.assert_allclose(batched, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_offsets_of_any_int32_show_everything_or_nothing(implementation, alignment):
    q, k, v = (jnp.ones((1, 5, 1, 8)) * x for x in (1, 2, 3))

    @jax.jit
    def attend(offset):
        return jax_fa.attention(
            *(q, k, v),
            is_causal=True,
            query_offset=offset,
            causal_alignment=alignment,
            implementation=implementation,
        )

    for offset in (-(2**31), -(2**30), -MAX_OFFSET - 1, -MAX_OFFSET):
        np.testing.assert_array_equal(attend(jnp.int32(offset)), 0, str(offset))
    for offset in (MAX_OFFSET, MAX_OFFSET + 1, 2**30, 2**31 - 1):
        np.testing.assert_allclose(attend(jnp.int32(offset)), 3, err_msg=str(offset))


@pytest.mark.parametrize("implementation", (*IMPLEMENTATIONS, None))
@pytest.mark.parametrize("batch", [None, 3])
def test_tokens_without_any_sequence_give_zeros(implementation, batch):
    shape = (7, 2, 8) if batch is None else (batch, 7, 2, 8)
    qkv = tuple(jnp.full(shape, jnp.nan) for _ in range(3))
    borders, sinks = jnp.array([3], jnp.int32), jnp.zeros(2)

    def attend(q, k, v):
        return jax_fa.attention_varlen(
            *(q, k, v, borders, borders),
            sinks=sinks,
            query_offset=5,
            is_causal=True,
            implementation=implementation,
        )

    attend = attend if batch is None else jax.vmap(attend)

    @jax.jit
    def step(*qkv):
        out, pull = jax.vjp(attend, *qkv)
        return out, *pull(jnp.ones_like(out))

    for x in step(*qkv):
        np.testing.assert_array_equal(x, np.zeros(shape))
