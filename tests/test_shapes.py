"""The shape checks that run beneath every test are in force."""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from jax_fa.runtime import bindings, reference
from jax_fa.spec.problem import Operands, Semantics

X = jnp.zeros((1, 4, 2, 8))
LSE = jnp.zeros((1, 4, 2))


def test_forward_with_lengths_of_another_batch_fails():
    operands = Operands(
        X, X, X, q_lengths=jnp.zeros(1, np.int32), kv_lengths=jnp.zeros(2, np.int32)
    )
    with pytest.raises(TypeCheckError):
        reference.forward(operands, Semantics(1.0))


def test_backward_with_an_lse_of_another_length_fails():
    with pytest.raises(TypeCheckError):
        reference.backward(Operands(X, X, X), Semantics(1.0), X, LSE[:, :1], X, LSE)


def test_kernels_are_checked_like_the_reference():
    for module in (bindings, reference):
        assert module.forward.__module__ == module.backward.__module__ == "helpers.shapes"
