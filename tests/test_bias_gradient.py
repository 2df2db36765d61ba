"""Which call gives the gradient of a bias: the backward, where it can, or one of its own."""

import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import BY_NAME
from helpers.harness import data, run, wanted
from helpers.oracle import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa
from jax_fa.runtime import bindings, emulation, primitives
from jax_fa.runtime.dispatch import Emulation, Kernel, Target, gpu_kernel
from jax_fa.runtime.partitioning import Call
from jax_fa.spec import schema, variants
from jax_fa.spec.arch import ARCHS, arch_named
from jax_fa.spec.problem import Operands, Problem, Semantics

B, T, S, N, K, D = 2, 300, 270, 4, 2, 64
WHOLE = (B, N, T, S)
NAMES = ("q", "k", "v", "bias")
SHAPES = {"q": (B, T, N, D), "k": (B, S, K, D), "v": (B, S, K, D)}


@pytest.fixture
def every_kernel(monkeypatch):
    """An installation with every kernel; ``lowering_for`` says for which GPUs."""
    monkeypatch.setattr(bindings, "compiled", lambda: frozenset(variants.BY_NAME))


def structs(bias=WHOLE, dtype=jnp.bfloat16):
    shapes = {**SHAPES, "bias": bias}
    return [jax.ShapeDtypeStruct(shapes[name], dtype) for name in NAMES]


def total(q, k, v, bias):
    return jnp.sin(jax_fa.attention(q, k, v, bias, is_causal=True).astype(jnp.float32)).sum()


def asked(of, *arrays, platform="cuda"):
    """(operation, number of results) of each call of a kernel in the program of a gradient."""
    gradient = jax.jit(jax.grad(total, of))
    text = gradient.trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
    found = re.findall(r"custom_call @jax_fa_(\w+)_v1\(.*-> (\(.*?\)|tensor\S*)$", text, re.M)
    return [(operation, results.count("tensor<")) for operation, results in found]


SCRATCH = len(schema.BACKWARD_SCRATCH)
APART = [("fwd", 2), ("bwd", 4 + SCRATCH), ("dbias", 1)]
TOGETHER = [("fwd", 2), ("bwd", 5 + SCRATCH)]
WITHOUT = APART[:2]


def operations(calls):
    """Without the scratch of a gradient's own call, which is there or not."""
    return [(name, min(count, 1) if name == "dbias" else count) for name, count in calls]


@pytest.mark.usefixtures("every_kernel")
@pytest.mark.parametrize(
    ("families", "bias", "calls"),
    [
        (["sm90"], WHOLE, TOGETHER),
        (["sm90"], (1, N, T, S), APART),
        (["sm90"], (B, 1, T, S), APART),
        (["sm90"], (B, N, 1, S), APART),
        (["sm90"], (B, N, T, 1), APART),
        (["sm80"], WHOLE, APART),
        (["sm90", "sm80"], WHOLE, APART),
        ([arch.name for arch in ARCHS], WHOLE, APART),
    ],
)
def test_the_backward_gives_it_where_it_can(families, bias, calls):
    with jax_fa.lowering_for(*families):
        assert operations(asked((0, 1, 2, 3), *structs(bias))) == calls


@pytest.mark.usefixtures("every_kernel")
def test_the_backward_gives_it_where_nothing_else_is_asked_for():
    with jax_fa.lowering_for("sm90"):
        assert operations(asked(3, *structs())) == TOGETHER
        assert operations(asked(3, *structs((1, N, T, S)))) == [("fwd", 2), ("dbias", 1)]


@pytest.mark.usefixtures("every_kernel")
@pytest.mark.parametrize("bias", [WHOLE, (1, N, T, S)], ids=str)
def test_nobody_writes_what_nobody_asks_for(bias):
    with jax_fa.lowering_for("sm90"):
        assert operations(asked((0, 1, 2), *structs(bias))) == WITHOUT


@pytest.mark.usefixtures("every_kernel")
def test_nor_in_a_loop():
    def in_turn(q, *rest):
        def step(q, _):
            return q - jax.grad(total)(q, *rest).astype(q.dtype), None

        return jax.lax.scan(step, q, length=3)[0]

    with jax_fa.lowering_for("sm90"):
        text = jax.jit(in_turn).trace(*structs()).lower(lowering_platforms=("cuda",)).as_text()
    assert "jax_fa_dbias" not in text and text.count("custom_call @jax_fa_bwd_v1") == 1
    (line,) = (x for x in text.splitlines() if "jax_fa_bwd_v1" in x)
    assert line.split("->")[-1].count("tensor<") == 4 + SCRATCH


def test_on_the_cpu_it_is_a_call_of_its_own():
    arrays = structs(dtype=jnp.float32)
    assert asked((0, 3), *arrays, platform="cpu") == [("fwd", 2), ("bwd", 4), ("dbias", 1)]
    # XLA deletes the call that nobody needs: it is part of the program until then.
    text = jax.jit(jax.grad(total)).lower(*arrays).compile().as_text()
    assert "jax_fa_dbias" not in text and "jax_fa_bwd" in text


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_the_kernels_that_give_it_are_those_of_the_schema(arch):
    """On GPUs that run Hopper's own backward with a bias, and on no others."""
    target = Target("cuda", frozenset(variants.BY_NAME), arch.capabilities)
    q, k, v, whole = structs()
    own, shared = (
        gpu_kernel(Problem.of(Operands(q, k, v, bias=x), Semantics(0.1)), target, "bwd")
        for x in (whole, structs((1, N, T, S))[3])
    )
    is_writer = (arch.kernels("bias").folder, "bwd") in schema.WRITERS_OF_DBIAS
    assert (own.gives_dbias, shared.gives_dbias) == (is_writer, False)
    assert is_writer == (arch == arch_named("sm90"))
    problem = Problem.of(Operands(q, k, v, bias=whole), Semantics(0.1))
    for operation in ("fwd", "dbias"):
        assert not gpu_kernel(problem, target, operation).gives_dbias


def test_a_bias_is_whole_that_says_nothing_twice():
    def is_whole(bias, **shapes):
        q, k, v = (
            jax.ShapeDtypeStruct(shapes.get(name, SHAPES[name]), jnp.float32) for name in NAMES[:3]
        )
        bias = None if bias is None else jax.ShapeDtypeStruct(bias, jnp.float32)
        return Problem.of(Operands(q, k, v, bias=bias), Semantics(1.0)).is_bias_whole

    assert is_whole(WHOLE) and not is_whole(None)
    assert not any(is_whole((*WHOLE[:i], 1, *WHOLE[i + 1 :])) for i in range(4))
    one = {"q": (1, 1, 1, D), "k": (1, 1, 1, D), "v": (1, 1, 1, D)}
    assert is_whole((1, 1, 1, 1), **one)


# ------------------------------------------------------------------------------------------ vmap


def primitives_of(function, *arrays):
    """Names, bias and whether the backward gives its gradient, of every call in a program."""
    found, program = [], jax.make_jaxpr(function)(*arrays).jaxpr
    for equation in primitives.calls(program, primitives.backward_p, primitives.bias_gradient_p):
        bias = equation.invars[equation.params["names"].index("bias")].aval.shape
        gives = equation.params.get("gives_dbias")
        found.append((equation.primitive.name.removeprefix("jax_fa_"), bias, gives))
    return found


SMALL = {"q": (2, 5, 4, 8), "k": (2, 6, 2, 8), "v": (2, 6, 2, 8), "bias": (2, 4, 5, 6)}


def small(dims, size=3):
    """Arrays, with a vmapped dimension where ``dims`` has one."""
    rng, arrays = np.random.default_rng(0), []
    for (name, shape), dim in zip(SMALL.items(), dims, strict=True):
        of_all = shape if dim is None else (*shape[:dim], size, *shape[dim:])
        arrays.append(jnp.asarray(rng.standard_normal(of_all), jnp.float32))
        assert name in NAMES
    return arrays


@pytest.mark.parametrize("dims", [(0, 0, 0, 0), (None, None, None, 0), (0, None, 0, 2)], ids=str)
def test_vmapped_biases_are_one_that_is_whole(dims):
    gradient = jax.vmap(jax.grad(total, (0, 1, 2, 3)), dims)
    (call,) = primitives_of(gradient, *small(dims))
    assert call == ("backward", (6, 4, 5, 6), True)
    assert_like_a_loop(gradient, dims)


@pytest.mark.parametrize("dims", [(0, 0, 0, None), (0, None, None, None)], ids=str)
def test_a_bias_that_vmapped_problems_share_has_a_call_of_its_own(dims):
    gradient = jax.vmap(jax.grad(total, (0, 1, 2, 3)), dims)
    first, *_ = primitives_of(gradient, *small(dims))
    assert first == ("backward", (6, 4, 5, 6), False)
    assert_like_a_loop(gradient, dims)


def assert_like_a_loop(gradient, dims, size=3):
    arrays = small(dims, size)
    got = jax.jit(gradient)(*arrays)
    for i in range(size):
        own = [
            x if dim is None else jnp.take(x, i, dim) for x, dim in zip(arrays, dims, strict=True)
        ]
        want = jax.jit(jax.grad(total, (0, 1, 2, 3)))(*own)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one[i], other, rtol=2e-5, atol=2e-5)


# -------------------------------------------------------------------------------------- sharding

SPECS = (
    *(P("data", None, "model", None),) * 3,
    P("data", "model", None, None),
)
TOKENS = (*(P(None, "data", None, None),) * 3, P(None, None, "data", None))


def placed(specs, kind=AxisType.Auto):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    return [NamedSharding(mesh, spec) for spec in specs]


@pytest.mark.usefixtures("every_kernel")
@pytest.mark.parametrize("specs", [SPECS, TOKENS], ids=["batch and heads", "tokens"])
def test_a_program_for_several_gpus_asks_the_backward(specs):
    """Its text says so; the kernel is chosen for the part of a device."""
    arrays = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        for x, place in zip(structs(), placed(specs), strict=True)
    ]
    with jax_fa.lowering_for("sm90"):
        traced = jax.jit(jax.grad(total, (0, 3))).trace(*arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(r"\22gives_dbias\22: true") == 1
    assert r"\22operation\22: \22dbias" not in text


def backward_call():
    """A backward of the CPU, whose kernels do not give that gradient."""
    return Call("bwd", "cpu", NAMES, Semantics(0.3), by_token=("Ta",), gives_dbias=True)


@pytest.mark.parametrize("specs", [SPECS, TOKENS], ids=["batch and heads", "tokens"])
def test_parts_of_devices_give_parts_of_the_gradient(specs):
    """Also where the kernel of a part does not, of a program that was lowered elsewhere."""
    rng = np.random.default_rng(1)
    shapes = {"q": (2, 8, 4, 8), "k": (2, 8, 2, 8), "v": (2, 8, 2, 8), "bias": (2, 4, 8, 8)}
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes.values()]
    operands = Operands(**dict(zip(NAMES, arrays, strict=True)))
    out, lse = jax.jit(partial(primitives.forward, semantics=Semantics(0.3)))(operands)
    saved = [out, lse, jnp.cos(out), jnp.sin(lse)]
    want = jax.jit(backward_call().compute)(*arrays, *saved)
    rows = bindings.rows_of(bindings.Saved(*saved))
    alone = bindings.bias_gradient(Kernel(), operands, Semantics(0.3), rows)
    assert len(want) == 4
    np.testing.assert_array_equal(want[3], alone)
    places = placed(specs)
    split = [jax.device_put(x, place) for x, place in zip(arrays, places, strict=True)]
    like_q = NamedSharding(places[0].mesh, specs[0])
    lse_like = NamedSharding(places[0].mesh, P(*specs[0][:3]))
    split += [jax.device_put(x, like_q if x.ndim == 4 else lse_like) for x in saved]
    got = jax.jit(backward_call().bind)(*split)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


def test_text_from_before_backwards_gave_it_asks_for_none():
    fields = json.loads(backward_call().text())
    assert fields.pop("gives_dbias")
    assert not Call.of(json.dumps(fields)).gives_dbias


# -------------------------------------------------------------------------------------- emulated

CASE = BY_NAME["whole_bias_of_prime_sizes"]
NEEDED = {f"{operation}_sm90_bf16_d64_general_bias" for operation in ("fwd", "bwd")}


@pytest.mark.skipif(not NEEDED <= bindings.compiled(), reason="this build lacks the kernels")
def test_the_gradient_of_a_program_comes_from_the_backward(monkeypatch):
    """No other kernel is asked."""

    def refused(*_):
        raise AssertionError("a call of its own")

    monkeypatch.setattr(emulation, "bias_gradient", refused)
    results = run(CASE, data(CASE, "bfloat16"), Emulation("sm90", seed=7))
    assert results.dbias.shape == (2, 3, 101, 211)
    assert_close(results, wanted(CASE, "bfloat16"), "bfloat16")
