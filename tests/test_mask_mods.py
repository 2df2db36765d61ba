"""Custom masks: one function on integers, on arrays and in kernels; refusals, word for word."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME, Case, make
from harness import on_device
from oracle import Results, assert_close, tolerance
from recording import build, needs_compiler, needs_dsl
from test_sm100_backward import call
from test_split_keys import run

import jax_fa
from jax_fa import aot, bindings, mask_mods, reference, variants
from jax_fa.choice import Target, choose
from jax_fa.config import KernelKey, choose_backward, choose_forward
from jax_fa.operations import FallbackWarning
from jax_fa.problem import Problem, Semantics

Q, K = jnp.ones((2, 6, 4, 8)), jnp.ones((2, 5, 2, 8))
PROBLEM = Problem.of(
    make(BY_NAME["causal"], "bfloat16").operands, Semantics(0.1, mask_mod="chunked_100")
)
MOD_NAME = "fwd_sm100_bf16_d64_general_mod_chunked_100"
GRADIENT_NAME = "bwd_sm100_bf16_d64_general_mod_chunked_100"


def every_other_head(batch, q_head, q_position, kv_position):
    """A mask that kernels do not serve."""
    return (q_head % 2 == 0) | (kv_position <= q_position)


def strided(batch, q_head, q_position, kv_position):
    """A mask of the kind that a caller brings along."""
    return (kv_position <= q_position) & ((q_position - kv_position) % 3 == 0)


def gapped(batch, q_head, q_position, kv_position):
    """Chunks, and every fifth query sees nothing."""
    return (q_position // 100 == kv_position // 100) & (q_position % 5 != 0)


def of_two(q_position, kv_position):
    """Of too few arguments."""
    return q_position >= kv_position


def of_nothing(*_):
    """Of no result."""


BY_HEAD, STRIDED, GAPPED = (
    f"{__name__}:{name}" for name in ("every_other_head", "strided", "gapped")
)
NUMBER = 1


# ------------------------------------------------------------------------------------ the functions


def test_built_in_functions_mean_what_their_names_say():
    for i in range(-3, 20):
        for j in range(20):
            in_chunk = j <= i and i // 7 == j // 7
            assert mask_mods.resolve("chunked_7")(0, 0, i, j) == in_chunk
            assert mask_mods.resolve("prefix_lm_7")(0, 0, i, j) == (j <= i or j < 7)


def test_what_a_function_depends_on_is_found_out():
    for name in ("chunked_7", "prefix_lm_7", STRIDED):
        assert mask_mods.sees_positions_only(mask_mods.resolve(name))
    assert not mask_mods.sees_positions_only(mask_mods.resolve(BY_HEAD))
    assert not mask_mods.sees_positions_only(lambda b, h, i, j: b == 0)


UNKNOWN = (
    "is unknown; use 'chunked_N', 'prefix_lm_N' with a number N > 0 of at most 9 digits, or "
    "'module:function'."
)
CALLED = "called with (batch, q_head, q_position, kv_position) = (0, 0, 0, 0),"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dense", f"attention: mask_mod='dense' {UNKNOWN}"),
        ("chunked_0", f"attention: mask_mod='chunked_0' {UNKNOWN}"),
        *(
            (name, f"attention: mask_mod={name!r} {UNKNOWN}")
            for name in (
                *("", "chunked_", "chunked_-1", "chunked_1234567890", "prefix_lm_x"),
                *(":f", "m:", ":", "a:b:c", ".relative:f", "a..b:f", "a b:f", "a:f.g", "os.path"),
            )
        ),
        (
            "no_such_module:f",
            "attention: mask_mod='no_such_module:f' cannot be imported: No module named "
            "'no_such_module'.",
        ),
        (
            f"{__name__}:nothing",
            f"attention: mask_mod='{__name__}:nothing' cannot be imported: module '{__name__}' has "
            f"no attribute 'nothing'.",
        ),
        (
            f"{__name__}:NUMBER",
            f"attention: mask_mod='{__name__}:NUMBER' is no function but a int.",
        ),
        (
            f"{__name__}:of_two",
            f"attention: mask_mod='{__name__}:of_two', {CALLED} fails: of_two() takes 2 positional "
            f"arguments but 4 were given.",
        ),
        (
            f"{__name__}:of_nothing",
            f"attention: mask_mod='{__name__}:of_nothing', {CALLED} gives None; it should say "
            f"whether the query sees the key.",
        ),
        (
            every_other_head,
            f"attention: mask_mod should be a name such as 'chunked_1024' or 'module:function', "
            f"but is {every_other_head!r}: kernels are compiled ahead of time, and found by name.",
        ),
    ],
    # Numbers: one name has an address in it, which differs from worker to worker.
    ids=range(22),
)
def test_a_name_without_a_function_is_refused(name, words):
    with pytest.raises(ValueError) as error:
        jax_fa.attention(Q, K, K, mask_mod=name)
    assert str(error.value) == words


# ------------------------------------------------------------------------------------ the reference


@pytest.mark.parametrize("mask_mod", ["chunked_50", STRIDED])
@pytest.mark.parametrize(
    "name",
    ["gqa", "causal_bottom_right_short_q", "offset_each", "packed_gaps_and_used", "segments"],
)
def test_the_reference_agrees_with_the_function_on_integers(name, mask_mod):
    case = BY_NAME[name]
    given = make(case, "float32")
    semantics = replace(case.semantics, mask_mod=mask_mod)
    wanted = tolerance(given.operands, semantics, given.cotangents)
    operands = on_device(given.operands)
    out, lse = reference.forward(operands, semantics)
    grads = reference.backward(operands, semantics, out, lse, *map(jnp.asarray, given.cotangents))
    assert_close(Results(out, lse, *grads[:3]), wanted, "float32")


def test_a_function_of_the_head_is_a_dense_mask():
    """Under jit, vmap and differentiation, without a warning: no kernel was to be expected."""
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.standard_normal((3, 2, 6, 4, 8)), jnp.float32) for _ in range(3))
    heads, rows, keys = np.ogrid[:4, :6, :6]
    mask = jnp.asarray(every_other_head(0, heads, rows, keys))[None]

    def loss(q, **options):
        attend = jax.vmap(lambda *qkv: jax_fa.attention(*qkv, **options))
        return jnp.sum(attend(q, k, v) ** 2)

    got = jax.jit(jax.value_and_grad(lambda q: loss(q, mask_mod=BY_HEAD)))(q)
    wanted = jax.value_and_grad(lambda q: loss(q, mask=mask))(q)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------- where it is served


def test_on_a_cpu_it_falls_back_visibly_and_is_refused_when_forced():
    with pytest.warns(FallbackWarning, match="CPU kernels take no mask_mod such as 'chunked_3'"):
        jax_fa.attention(Q, K, K, mask_mod="chunked_3")
    with pytest.raises(NotImplementedError) as error:
        jax_fa.attention(Q, K, K, mask_mod="chunked_3", implementation="cpu")
    assert str(error.value) == (
        "attention: implementation='cpu' does not serve this problem: CPU kernels take no mask_mod "
        "such as 'chunked_3'. Use implementation=None or 'xla'."
    )
    assert not jax_fa.explain(Q, K, K, mask_mod="chunked_3", implementation="xla").choice.kernel


def test_a_function_of_the_head_is_refused_by_forced_kernels():
    with pytest.raises(NotImplementedError) as error:
        jax_fa.attention(Q, K, K, mask_mod=BY_HEAD, implementation="cpu")
    assert str(error.value) == (
        f"attention: implementation='cpu' does not serve this call: mask_mod='{BY_HEAD}' "
        f"depends on batch or head; kernels take functions of positions. Use implementation=None "
        f"or 'xla'."
    )


def test_cudnn_has_no_mask_functions():
    with pytest.raises(NotImplementedError, match="which has no mask_mod. Use"):
        jax_fa.attention(Q, Q, Q, mask_mod="chunked_3", implementation="cudnn")


def test_the_handler_refuses_what_the_chooser_should_have_kept_away():
    operands = on_device(make(BY_NAME["causal"], "float32").operands)
    with pytest.raises(Exception, match="CPU kernels take no mask_mod such as 'chunked_3'; use"):
        jax.block_until_ready(
            bindings.forward("cpu", operands, Semantics(1.0, mask_mod="chunked_3"))
        )


def test_a_gpu_serves_the_functions_that_were_compiled():
    built = frozenset(variants.BY_NAME) | {MOD_NAME}
    choice = choose(PROBLEM, Target("cuda", built, ("10.0",)), None)
    assert (choice.implementation, choice.kernel) == ("cuda", MOD_NAME)
    other = replace(PROBLEM, semantics=Semantics(0.1, mask_mod="chunked_8"))
    with pytest.raises(NotImplementedError) as error:
        choose(other, Target("cuda", built, ("10.0",)), "cuda")
    assert str(error.value) == (
        "attention: implementation='cuda' does not serve this problem: no fwd kernel for sm100 is "
        "compiled with mask_mod='chunked_8'. Those without a soft cap are, by python -m "
        "jax_fa.aot --mask-mod chunked_8. Use implementation=None or 'xla'."
    )


def test_gradients_are_served_where_the_backward_takes_functions():
    built = frozenset(variants.BY_NAME) | {GRADIENT_NAME}
    gradient = choose(PROBLEM, Target("cuda", built, ("10.0",)), None, "bwd")
    assert (gradient.implementation, gradient.kernel) == ("cuda", GRADIENT_NAME)
    capped = replace(PROBLEM, semantics=replace(PROBLEM.semantics, soft_cap=2.0))
    refused = {
        "10.0": (
            capped,
            "no bwd kernel with a soft cap for sm100 is compiled with mask_mod='chunked_100'. "
            "Those without a soft cap are, by python -m jax_fa.aot --mask-mod chunked_100.",
        ),
        "9.0": (PROBLEM, "bwd kernels for sm90 take no mask_mod such as 'chunked_100'."),
    }
    for capability, (problem, reason) in refused.items():
        choice = choose(problem, Target("cuda", built, (capability,)), None, "bwd")
        assert choice.is_fallback and choice.reason == reason


def test_variants_of_a_function_are_further_ones_of_the_general_mask():
    made = variants.with_mask_mod(variants.VARIANTS, "pkg.masks:f")
    general = [
        v
        for v in variants.VARIANTS
        if v.name.endswith("_general") and not v.name.startswith("bwd_sm90")
    ]
    assert [v.name for v in made] == [f"{v.name}_mod_pkg_masks_f" for v in general]
    assert all(variants.arch_name(v.name) == v.arch for v in made)


def test_aot_lists_them_and_refuses_what_no_kernel_serves(capsys):
    only = ["--variants", "fwd_sm100_bf16_d64_*", "--list"]
    assert aot.main([*only, "--mask-mod", "chunked_100"]) == 0
    assert MOD_NAME in capsys.readouterr().out.split()
    assert aot.main([*only, "--mask-mod", BY_HEAD]) == 1
    assert capsys.readouterr().err == (
        f"jax_fa.aot: --mask-mod {BY_HEAD}: the function depends on batch or head. Kernels see one "
        f"shard of both and serve functions of positions; attention runs this one unfused.\n"
    )
    assert aot.main([*only, "--mask-mod", "dense"]) == 1
    assert capsys.readouterr().err == f"jax_fa.aot: --mask-mod: mask_mod='dense' {UNKNOWN}\n"


# -------------------------------------------------------------------------------------- the kernels

KEYS = {
    "sm90": KernelKey("sm_90a", "float16", 64, 64, "general", mask_mod=STRIDED),
    "sm100": KernelKey("sm_100f", "bfloat16", 64, 64, "general", mask_mod=GAPPED),
}
EVERYTHING = Case(
    "everything",
    batch=2,
    q_len=200,
    kv_len=300,
    heads=2,
    kv_heads=1,
    window=(150, None),
    q_lengths=(200, 130),
    kv_lengths=(270, 120),
    q_offset=(20, -40),
    has_sinks=True,
    mask_mod=GAPPED,
)
"""Of the second sequence, positions from -40 on; some rows' chunks have no key at all."""


@pytest.fixture(scope="module", params=KEYS, ids=str)
def kernel(request, tmp_path_factory):
    """(compiled kernel, its key)"""
    key = KEYS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return build(folder, f"{request.param}.fwd", key, choose_forward(key)), key


@needs_dsl
@needs_compiler
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of the DSL, within the DSL
@pytest.mark.parametrize("name", ["causal_bottom_right_short_q", "window_left_only"])
def test_a_kernel_evaluates_the_function_on_the_emulator(kernel, name):
    built, key = kernel
    case = BY_NAME[name]
    semantics = replace(case.semantics, mask_mod=key.mask_mod)
    operands = make(case, key.dtype).operands
    got = run(built, operands, semantics, num_splits=1, seed=1)
    assert_close(got, tolerance(operands, semantics), key.dtype)


@pytest.fixture(scope="module")
def backward(tmp_path_factory):
    """The compiled Blackwell backward."""
    key = KEYS["sm100"]
    return build(tmp_path_factory.mktemp("bwd"), "sm100.bwd", key, choose_backward(key))


@needs_dsl
@needs_compiler
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of the DSL, within the DSL
def test_a_forward_evaluates_the_function_beside_everything_else(kernel):
    built, key = kernel
    case = replace(EVERYTHING, mask_mod=key.mask_mod)
    operands = make(case, key.dtype).operands
    wanted = tolerance(operands, case.semantics)
    assert_close(run(built, operands, case.semantics, num_splits=1, seed=2), wanted, key.dtype)


@needs_dsl
@needs_compiler
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of the DSL, within the DSL
def test_a_backward_evaluates_the_function_beside_everything_else(backward):
    """Without and with a fixed order; the latter has the same bits under any schedule."""
    got, wanted, *_ = call(backward, EVERYTHING)
    assert_close(got, wanted, "bfloat16")
    runs = [call(backward, EVERYTHING, seed=seed, deterministic=True)[0] for seed in (1, 2)]
    assert_close(runs[0], wanted, "bfloat16")
    for name in ("dq", "dk", "dv"):
        assert getattr(runs[0], name).tobytes() == getattr(runs[1], name).tobytes(), name


@needs_dsl
@needs_compiler
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of the DSL, within the DSL
def test_a_backward_that_walks_along_the_wrong_side_is_noticed(tmp_path, monkeypatch):
    """One key and 32 queries, not one query and 32 keys."""
    from jax_fa.kernels import softmax

    right = softmax.bits_by_function
    monkeypatch.setattr(softmax, "bits_by_function", lambda *x: right(*x[:2], x[2][::-1]))
    key = KEYS["sm100"]
    got, wanted, *_ = call(build(tmp_path, "sm100.bwd", key, choose_backward(key)), EVERYTHING)
    with pytest.raises(AssertionError, match="dq: error"):
        assert_close(got, wanted, "bfloat16")
