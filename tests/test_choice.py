"""Which implementation is chosen, and why not another: no array and no device is needed."""

from dataclasses import replace

import pytest

from jax_fa.band import Band
from jax_fa.choice import Target, choose
from jax_fa.problem import Problem, Semantics
from jax_fa.variants import BY_NAME

PROBLEM = Problem(
    dtype="bfloat16",
    batch=2,
    num_sequences=2,
    q_len=256,
    kv_len=256,
    num_q_heads=8,
    num_kv_heads=2,
    head_dim=128,
    value_dim=128,
    semantics=Semantics(128**-0.5, Band(is_causal=True)),
)
CPU = Target("cpu")
ALL = frozenset(BY_NAME)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_cpu_kernels_serve_every_kernel_dtype(dtype):
    choice = choose(replace(PROBLEM, dtype=dtype), CPU, None)
    assert (choice.implementation, choice.is_fallback) == ("cpu", False)


@pytest.mark.parametrize(
    ("problem", "target", "reason"),
    [
        (replace(PROBLEM, dtype="float64"), CPU, "not float64"),
        (PROBLEM, Target("tpu"), "no kernels exist for platform 'tpu'"),
        (
            PROBLEM,
            Target("cuda"),
            "This command gives it some: `JAX_FA_GPU=all pip install --force-reinstall",
        ),
        (PROBLEM, Target("cuda", ALL, ("1.0",)), "GPUs of compute capability 1.0"),
        (
            replace(PROBLEM, kv_len=2**28 + 1),
            Target("cuda", ALL),
            "up to 268435456 tokens in a row",
        ),
        (replace(PROBLEM, dtype="float32"), Target("cuda", ALL), ""),
    ],
)
def test_fallback_names_its_reason_and_the_same_problem_forced_is_refused(problem, target, reason):
    choice = choose(problem, target, None)
    assert (choice.implementation, choice.kernel, choice.is_fallback) == ("xla", "", True)
    assert choice.reason and reason in choice.reason
    with pytest.raises(NotImplementedError) as refusal:
        choose(problem, target, "cpu" if target.platform == "cpu" else "cuda")
    if target.platform != "tpu":
        assert f"does not serve this problem: {choice.reason}" in str(refusal.value)
        assert str(refusal.value).endswith("Use implementation=None or 'xla'.")


def test_gpu_at_hand_gets_the_kernel_that_was_compiled_for_it():
    choice = choose(PROBLEM, Target("cuda", ALL, ("9.0",)), None)
    assert (choice.implementation, choice.is_fallback) == ("cuda", False)
    assert choice.kernel in BY_NAME
    assert choose(PROBLEM, Target("cuda", ALL, ("9.0",)), "cuda") == choice


def test_a_variant_that_was_left_out_of_the_build_is_not_chosen():
    left_out = choose(PROBLEM, Target("cuda", ALL, ("9.0",)), None).kernel
    choice = choose(PROBLEM, Target("cuda", ALL - {left_out}, ("9.0",)), None)
    assert left_out not in choice.kernel


def test_xla_is_no_fallback_when_asked_for():
    assert not choose(PROBLEM, Target("cuda"), "xla").is_fallback


def test_forced_platform_that_is_not_the_one_lowered_for_is_refused():
    with pytest.raises(NotImplementedError, match="lowered for platform 'cpu'"):
        choose(PROBLEM, CPU, "cuda")
