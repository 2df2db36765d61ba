"""``implementation="emulated"`` and ``jax_fa.emulation`` as callers meet them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import BY_NAME
from helpers.harness import data, public, wanted
from helpers.oracle import Results, assert_close

import jax_fa
from jax_fa.emulator import EmulationError, emulate
from jax_fa.runtime import bindings, emulation
from jax_fa.runtime.dispatch import Emulation
from jax_fa.spec import variants
from jax_fa.spec.problem import Problem

ARCHS = sorted(arch.name for arch in variants.families(bindings.compiled()))
needs_kernels = pytest.mark.skipif(not ARCHS, reason="this build holds no GPU kernels")
SHAPE = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
CASE = BY_NAME["one_block"]


@pytest.fixture
def arch():
    """One that holds the forward kernels of CASE."""
    names = (name for name in bindings.compiled() if name.startswith("fwd_"))
    served = [n.split("_")[1] for n in names if n.endswith("_bf16_d64_full")]
    if not served:
        pytest.skip("this build lacks fwd_*_bf16_d64_full")
    return min(served)


@pytest.fixture
def executed(monkeypatch):
    """The settings of every run, in order."""
    runs = []

    def execute(call, inputs, real=emulation.execute):
        runs.append(call.settings)
        return real(call, inputs)

    monkeypatch.setattr(emulation, "execute", execute)
    return runs


def attend(q, k, v):
    return jax_fa.attention(q, k, v, implementation="emulated")


# ------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("name", ["one_block", "packed_causal_gqa"])
def test_public_function_in_a_context(name, arch):
    case = BY_NAME[name]
    given = data(case, "bfloat16").operands
    with jax_fa.emulation(arch):
        out = public(case, given, implementation="emulated")
    assert_close(Results(out, None), wanted(case, "bfloat16"), "bfloat16")


def test_vmap_folds_into_one_launch(arch, executed):
    q, k, v = (jnp.stack([jnp.asarray(x)] * 2) for x in data(CASE, "bfloat16").operands[:3])
    with jax_fa.emulation(arch):
        out = jax.jit(jax.vmap(attend))(q, k, v)
    for row in out:
        assert_close(Results(row, None), wanted(CASE, "bfloat16"), "bfloat16")
    assert len(executed) == 1


def test_sharded_operands_give_the_same(arch):
    q, k, v = (jnp.concatenate([jnp.asarray(x)] * 2) for x in data(CASE, "bfloat16").operands[:3])
    mesh = jax.make_mesh((2,), ("batch",))
    sharding = jax.NamedSharding(mesh, jax.P("batch"))
    with jax_fa.emulation(arch):
        out = jax.jit(attend)(*(jax.device_put(x, sharding) for x in (q, k, v)))
    for row in np.asarray(out):
        assert_close(Results(row[None], None), wanted(CASE, "bfloat16"), "bfloat16")


# ------------------------------------------------------------------------------------ settings


def test_a_jitted_function_is_traced_anew_under_another_emulation(arch, executed):
    step = jax.jit(attend)
    qkv = data(CASE, "bfloat16").operands[:3]
    for seed in (1, 2, 1):
        with jax_fa.emulation(arch, seed=seed, completion="lazy", num_sms=2):
            jax.block_until_ready(step(*qkv))
    assert executed == [Emulation(arch, seed, "lazy", 2) for seed in (1, 2, 1)]


def test_gradients_keep_the_settings_of_the_forward(executed):
    if "bwd_sm90_bf16_d64_full" not in bindings.compiled():
        pytest.skip("this build lacks bwd_sm90_bf16_d64_full")
    q, k, v = data(CASE, "bfloat16").operands[:3]
    with jax_fa.emulation("sm90", seed=7):
        _, pull = jax.vjp(attend, q, k, v)
    jax.block_until_ready(pull(jnp.ones_like(q)))
    assert executed == [Emulation("sm90", 7)] * 2


def test_schedules_are_settings(arch, executed):
    """A warp that lags, a line whose operations do, and how many CTAs there are at a time."""
    qkv = data(CASE, "bfloat16").operands[:3]
    with jax_fa.emulation(arch, completion="eager", resident=2, starved=1, held=7):
        jax.block_until_ready(attend(*qkv))
    assert executed == [Emulation(arch, completion="eager", resident=2, starved=1, held=7)]


@pytest.mark.parametrize(
    "settings, complaint",
    [
        ({"resident": 0}, "resident is 0; a GPU holds at least one CTA"),
        ({"starved": -1}, "starved is -1; a CTA has warps 0 to 31 at most"),
        ({"starved": 32}, "starved is 32; a CTA has warps 0 to 31 at most"),
        ({"held": 0}, "held is 0; lines of PTX are counted from 1"),
    ],
)
def test_schedules_that_cannot_be_are_refused(arch, settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        jax_fa.emulation(arch, **settings)


def test_explain_names_kernel_and_architecture(arch):
    with jax_fa.emulation(arch):
        text = str(jax_fa.explain(SHAPE, SHAPE, SHAPE, implementation="emulated"))
    assert text == (
        f"cpu: emulated (fwd_{arch}_bf16_d64_full): this kernel runs in the emulator of {arch}"
    )


def test_equal_settings_give_equal_bits(arch, monkeypatch):
    monkeypatch.setattr("jax_fa.emulator.emulate", emulate)
    x = data(CASE, "bfloat16").operands
    call = emulation.Call("fwd", Problem.of(x, CASE.semantics), Emulation(arch, seed=5))
    inputs = {"q": x.q, "k": x.k, "v": x.v}
    (first, a), (second, b) = (emulation.execute(call, inputs) for _ in range(2))
    np.testing.assert_array_equal(first["out"], second["out"])
    assert [report.waits for report in a] == [report.waits for report in b]


# -------------------------------------------------------------------------------------- faults


def test_faults_of_a_kernel_are_errors_with_the_words_of_the_emulator(arch, monkeypatch):
    def broken(*_, **__):
        raise EmulationError("a fault")

    monkeypatch.setattr("jax_fa.emulator.emulate", broken)
    with jax_fa.emulation(arch, seed=11):
        with pytest.raises(jax.errors.JaxRuntimeError, match="a fault") as caught:
            jax.block_until_ready(attend(*data(CASE, "bfloat16").operands[:3]))
    text = str(caught.value)
    assert f"fwd_{arch}_bf16_d64_full as Emulation(arch='{arch}', seed=11" in text


def test_what_a_kernel_leaves_unwritten_is_nan(arch, monkeypatch):
    monkeypatch.setattr("jax_fa.emulator.emulate", lambda *_, **__: None)
    x = data(CASE, "bfloat16").operands
    call = emulation.Call("fwd", Problem.of(x, CASE.semantics), Emulation(arch))
    results, _ = emulation.execute(call, {"q": x.q, "k": x.k, "v": x.v})
    assert all(np.isnan(value.astype(np.float32)).all() for value in results.values())


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arch": "sm70"}, r"arch is 'sm70'; kernels exist for sm90, "),
        ({"arch": "sm90", "completion": "late"}, r"completion is 'late'; use one of \('random'"),
        ({"arch": "sm90", "num_sms": 0}, "num_sms is 0; a GPU has at least one"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        jax_fa.emulation(**arguments)


@pytest.mark.parametrize("names", [[], ["fwd_sm90_bf16_d64_full", "fwd_sm100_bf16_d64_full"]])
def test_an_architecture_that_cannot_be_guessed_has_to_be_said(names, monkeypatch):
    monkeypatch.setattr(bindings, "compiled", lambda: frozenset(names))
    message = (
        "needs to know which GPU.* of sm100, sm90. Choose one" if names else "build holds none"
    )
    with pytest.raises(NotImplementedError, match=message):
        jax_fa.attention(*[jnp.zeros(SHAPE.shape, SHAPE.dtype)] * 3, implementation="emulated")


def test_the_only_compiled_architecture_needs_no_context(monkeypatch):
    monkeypatch.setattr(bindings, "compiled", lambda: frozenset({"fwd_sm90_bf16_d64_full"}))
    text = str(jax_fa.explain(SHAPE, SHAPE, SHAPE, implementation="emulated"))
    assert text.startswith("cpu: emulated (fwd_sm90_bf16_d64_full)")


@pytest.mark.usefixtures("no_gpu_kernels")
def test_a_build_without_kernels_says_how_to_get_them():
    with jax_fa.emulation("sm90"):
        with pytest.raises(NotImplementedError, match="holds no GPU kernels. This command gives"):
            jax_fa.explain(SHAPE, SHAPE, SHAPE, implementation="emulated")


@needs_kernels
@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((1, 64, 2, 257), {}, "have D/Dv .*, none as large as 257/257. implementation='xla'"),
        ((1, 64, 2, 64), {"scale": -1.0}, "take a positive scale, not -1.0"),
        ((1, 0, 2, 64), {}, "take no empty arrays"),
    ],
)
def test_what_kernels_do_not_serve_is_refused(shape, options, message):
    q = jnp.zeros(shape, jnp.bfloat16)
    with jax_fa.emulation(ARCHS[0]):
        with pytest.raises(NotImplementedError, match=message):
            jax_fa.attention(q, q, q, implementation="emulated", **options)


def test_another_platform_is_refused():
    with jax_fa.emulation("sm90"):
        with pytest.raises(NotImplementedError, match="lowered for platform 'cuda'"):
            jax_fa.explain(SHAPE, SHAPE, SHAPE, platform="cuda", implementation="emulated")


def test_ptx_that_is_missing_or_of_another_build_is_refused(arch, tmp_path, monkeypatch):
    name = f"fwd_{arch}_bf16_d64_full"
    with pytest.raises(NotImplementedError, match=f"the PTX of {name} is of another build"):
        bindings.ptx(name, "0" * 64)
    monkeypatch.setattr(bindings._jax_fa, "__file__", str(tmp_path / "_jax_fa.so"))
    with pytest.raises(NotImplementedError, match=f"the PTX of {name} is not there"):
        bindings.ptx(name, "1" * 64)


def test_a_build_that_left_ptx_out_says_how_to_get_it(arch, monkeypatch):
    monkeypatch.setattr(bindings, "has_ptx", lambda: False)
    message = rf"built without it \(JAX_FA_PTX=OFF\).*JAX_FA_GPU={arch} pip install"
    with jax_fa.emulation(arch), pytest.raises(NotImplementedError, match=message):
        attend(*[jnp.zeros(SHAPE.shape, SHAPE.dtype)] * 3)
