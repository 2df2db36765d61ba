"""Calls outside of jit: compiled once, though nothing that a caller may change is frozen."""

import gc
import logging
import weakref
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa
from jax_fa.mask_mods import chunked
from jax_fa.runtime import blockwise, eager, emulation, primitives, vjp
from jax_fa.runtime.dispatch import Choice, Emulation

B, T, N, D = 2, 24, 4, 16
Q, K, V = (jax.random.normal(x, (B, T, N, D)) for x in jax.random.split(jax.random.key(3), 3))
LENGTHS = jnp.array([9, 24], jnp.int32)
BORDERS = jnp.array([0, 7, 24], jnp.int32)
SEEN = jnp.tril(jnp.ones((1, 1, T, T), bool))
BIAS = jnp.linspace(-1, 1, T * T, dtype=jnp.float32).reshape(1, 1, T, T)

attention = jax_fa.attention
PUBLIC = {
    "plain": attention,
    "causal": partial(attention, is_causal=True, local_window_size=(5, 0)),
    "grouped": lambda q, k, v: attention(q, k[:, :, :2], v[:, :, :2]),
    "lengths": lambda q, k, v: attention(q, k, v, key_value_seq_lengths=LENGTHS),
    "unbatched": lambda q, k, v: attention(q[0], k[0], v[0]),
    "mask": lambda q, k, v: attention(q, k, v, mask=SEEN),
    "bias": lambda q, k, v: attention(q, k, v, BIAS),
    "sinks, offset": lambda q, k, v: attention(
        q, k, v, sinks=jnp.zeros(N), query_offset=3, is_causal=True
    ),
    "NumPy": lambda q, k, v: attention(
        q, k, v, scale=np.float32(0.5), is_causal=np.True_, query_seq_lengths=[24, 3]
    ),
    "mask_mod": partial(attention, mask_mod=chunked(5), block_mask=SEEN[..., :1, :1]),
    "residual": lambda q, k, v: attention(q, k, v, return_residual=True)[0],
    "lse": lambda q, k, v: sum(map(jnp.sum, jax_fa.attention_with_lse(q, k, v))),
    "varlen": lambda q, k, v: jax_fa.attention_varlen(
        q[0], k[0], v[0], BORDERS, BORDERS, max_seqlen_q=17
    ),
    "unfused": partial(attention, implementation="xla"),
    "scale in an array": lambda q, k, v: attention(q, k, v, scale=jnp.asarray(0.3)),
}


def gradients(attend, *arrays):
    return jax.grad(lambda *x: jnp.sum(jnp.sin(attend(*x))), (0, 1, 2))(*arrays)


def vmapped(attend, *arrays):
    return jax.vmap(attend)(*(jnp.stack([x, x + 1]) for x in arrays))


HOW = {
    "forward": lambda attend, *arrays: attend(*arrays),
    "gradient": gradients,
    "vmap": vmapped,
    "vmap of gradient": lambda attend, *arrays: vmapped(partial(gradients, attend), *arrays),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", PUBLIC)
def test_a_call_is_traced_and_compiled_once(name, how, caplog):
    attend, compute = PUBLIC[name], HOW[how]
    first = compute(attend, Q, K, V)
    compute(attend, Q, K, V)  # what is compiled of JAX's own, at the second time alone
    again = AssertionError("traced again")
    with (
        mock.patch.object(vjp, "attention", side_effect=again),
        mock.patch.object(vjp, "_backward", side_effect=again),
        mock.patch.object(primitives, "forward", side_effect=again),
        mock.patch.object(primitives, "backward", side_effect=again),
        mock.patch.object(blockwise, "forward", side_effect=again),
        mock.patch.object(blockwise, "backward", side_effect=again),
        jax.log_compiles(),
        caplog.at_level(logging.DEBUG, "jax"),
    ):
        other = compute(attend, Q, K, V)
    told = [x.getMessage() for x in caplog.records]
    assert [x for x in told if "Compiling" in x or "jax_fa" in x] == []
    jax.tree.map(np.testing.assert_array_equal, other, first)


def equations(jaxpr):
    """The names of programs that a traced one calls."""
    return [x.params["name"] for x in jaxpr.eqns if x.primitive.name in ("jit", "pjit")]


def test_a_jitted_function_holds_no_program_of_its_own():
    """Where a call is traced, it is part of that program: as it was, and for XLA to see."""
    assert "jax_fa" not in equations(jax.make_jaxpr(attention)(Q, K, V).jaxpr)
    assert "jax_fa" not in equations(jax.make_jaxpr(partial(gradients, attention))(Q, K, V).jaxpr)
    assert "jax_fa" not in equations(jax.make_jaxpr(lambda: attention(Q, K, V))().jaxpr)
    outside, traced = list[bool](), list[bool]()

    def noted(found, x):
        found.append(eager._is_outside())
        return jnp.sum(x)

    jax.vmap(partial(noted, outside))(Q)
    jax.grad(partial(noted, outside))(Q)
    jax.vmap(jax.grad(partial(noted, outside)))(Q)
    jax.jit(jax.vmap(partial(noted, traced)))(Q)
    jax.checkpoint(partial(noted, traced))(Q)
    jax.lax.map(partial(noted, traced), Q)
    jax.jvp(partial(noted, traced), (Q,), (Q,))
    assert (set(outside), set(traced)) == ({True}, {False})


# ------------------------------------------------------------------------------- what is not frozen


def programs():
    """How many are in the cache that serves calls."""
    return getattr(eager._compiled, "_cache_size")()  # noqa: B009 (unknown to type checkers)


def test_equal_arguments_of_another_type_are_refused_as_ever():
    attention(Q, K, V, is_causal=True, scale=1, local_window_size=(1, 1))
    for wrong in ({"is_causal": 1}, {"scale": True}, {"local_window_size": (True, 1)}):
        with pytest.raises(TypeError):
            attention(
                Q, K, V, **{"is_causal": True, "scale": 1, "local_window_size": (1, 1)} | wrong
            )


def test_values_are_checked_in_each_call():
    attention(Q, K, V, sinks=jnp.zeros(N))
    with pytest.raises(ValueError, match="sinks should be at most"):
        attention(Q, K, V, sinks=jnp.full(N, 1e5))
    jax_fa.attention_varlen(Q[0], K[0], V[0], BORDERS, BORDERS, max_seqlen_q=17)
    with pytest.raises(ValueError, match="cu_seqlens_k should ascend"):
        jax_fa.attention_varlen(Q[0], K[0], V[0], BORDERS, BORDERS[::-1])
    with pytest.raises(ValueError, match="max_seqlen_q=16 is not an upper bound"):
        jax_fa.attention_varlen(Q[0], K[0], V[0], BORDERS, BORDERS, max_seqlen_q=16)
    attention(Q, K, V, query_offset=np.int64(3))
    with pytest.raises(ValueError, match="query_offset should fit int32"):
        attention(Q, K, V, query_offset=np.int64(2**40))


def test_numbers_that_change_from_call_to_call_compile_nothing():
    """An offset of decoding, and the bounds of a batch, which may be Python's own integers."""
    attention(Q, K, V, query_offset=3, is_causal=True)
    jax_fa.attention_varlen(Q[0], K[0], V[0], BORDERS, BORDERS, max_seqlen_k=18)
    before = programs()
    attention(Q, K, V, query_offset=4, is_causal=True)
    jax_fa.attention_varlen(Q[0], K[0], V[0], BORDERS, BORDERS, max_seqlen_k=19)
    assert programs() == before


def test_a_function_made_for_one_call_is_not_kept():
    functions, before = [], 0
    for size in range(3, 9):
        function = chunked(size)
        functions.append(weakref.ref(function))
        gradients(partial(attention, mask_mod=function), Q, K, V)
        before = before or programs()
    del function
    gc.collect()
    assert [x() for x in functions] == [None] * len(functions)
    assert programs() == before


def test_what_a_mask_function_reads_may_change():
    seen = {"size": 3}
    function = lambda b, h, i, j: chunked(seen["size"])(b, h, i, j)  # noqa: E731
    attention(Q, K, V, mask_mod=function)
    seen["size"] = 7
    got = attention(Q, K, V, mask_mod=function)
    np.testing.assert_array_equal(got, attention(Q, K, V, mask_mod=chunked(7)))


@pytest.mark.filterwarnings("ignore::jax_fa.FallbackWarning")
def test_a_mask_function_beside_a_traced_scale():
    given = {"mask_mod": chunked(7), "block_mask": SEEN[..., :1, :1]}
    got = jax.grad(lambda x: jnp.sum(attention(Q, K, V, scale=x, **given)))(0.3)
    wanted = jax.jit(jax.grad(lambda x: jnp.sum(attention(Q, K, V, scale=x, **given))))(0.3)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_emulation_has_the_settings_of_its_context(monkeypatch):
    ran = []

    def forward(settings, kernel, operands, semantics):
        ran.append(settings)
        return jnp.zeros_like(operands.q), jnp.zeros(operands.q.shape[:3])

    monkeypatch.setattr(emulation, "forward", forward)
    monkeypatch.setattr(primitives, "choose", lambda *_: Choice("emulated", "", ""))
    for seed in (1, 2):
        with jax_fa.emulation("sm90", seed=seed):
            attention(Q, K, V, implementation="emulated")
    assert ran == [Emulation("sm90", 1), Emulation("sm90", 2)]
    jax.clear_caches()  # of programs that these stand-ins are part of


def test_families_are_those_of_the_context(monkeypatch):
    asked = []
    real = primitives.choose

    def choose(problem, target, *rest):
        asked.append(primitives.bindings.lowering.capabilities())
        return real(problem, target, *rest)

    monkeypatch.setattr(primitives, "choose", choose)
    for family in ("sm90", "sm100"):
        with jax_fa.lowering_for(family):
            attention(Q[:, :5], K, V)
    assert asked == [("9.0",), ("10.0",)]


@pytest.mark.filterwarnings("ignore::jax_fa.FallbackWarning")
def test_modes_of_jax_are_those_of_the_call():
    broken = Q.at[0, 0, 0, 0].set(jnp.nan)
    jax.block_until_ready(attention(broken, K, V))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        attention(broken, K, V)
    with jax.default_device(jax.devices()[1]):
        again = attention(*map(np.asarray, (Q, K, V)))
    assert again.devices() == {jax.devices()[1]}
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in (Q, K, V)]
        assert attention(*wide).dtype == np.float64
    assert attention(*wide).dtype == np.float32


def test_without_jit_the_body_runs_itself():
    attention(Q, K, V)
    with jax.disable_jit(), mock.patch.object(vjp, "attention", wraps=vjp.attention) as ran:
        attention(Q, K, V)
    assert ran.call_count == 1
