"""Gradients of every case and dtype against the oracle, and against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import CASES, DTYPES
from helpers.harness import computed, wanted
from helpers.oracle import assert_close

import jax_fa
from jax_fa.runtime import primitives

each_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.mark.parametrize("dtype", DTYPES)
@each_case
def test_gradients_keep_the_tolerance_rule(case, dtype):
    got = computed(case, dtype)
    assert (got.dsinks is not None) == case.has_sinks
    assert (got.dbias is not None) == (case.bias is not None)
    assert_close(got, wanted(case, dtype), dtype)


def of_both(query, out_weight, lse_weight):
    """A loss of the output, of its LSE, or of both."""
    out, lse = jax_fa.attention_with_lse(query, query, query)
    terms = [x * jnp.sum(y * y) for x, y in ((out_weight, out), (lse_weight, lse)) if x]
    return sum(terms)


@pytest.mark.parametrize(
    "wrapped", [lambda f: f, jax.checkpoint, jax.jit], ids=["", "remat", "jit"]
)
@pytest.mark.parametrize(("weights", "count"), [((1, 0), 3), ((1, 2), 4), ((0, 1), 4)])
def test_a_cotangent_of_the_lse_is_given_only_if_there_is_one(wrapped, weights, count):
    """Else zeros would be written for each call. An absent cotangent of the output is zeros."""
    query = jnp.asarray(np.random.default_rng(3).standard_normal((1, 40, 2, 8)), jnp.float32)
    program = jax.make_jaxpr(jax.grad(wrapped(lambda q: of_both(q, *weights))))(query)
    (call,) = primitives.calls(program.jaxpr, primitives.backward_p)
    assert len(call.invars) == len(call.params["names"]) + count


def test_gradients_of_output_and_lse_add_up():
    query = jnp.asarray(np.random.default_rng(4).standard_normal((1, 40, 2, 8)), jnp.float32)
    of_out, of_lse, together = (
        jax.grad(of_both)(query, *weights) for weights in ((1.0, 0), (0, 2.0), (1.0, 2.0))
    )
    np.testing.assert_allclose(of_out + of_lse, together, rtol=1e-4, atol=1e-5)
    assert jnp.abs(of_lse).max() > 1e-2
