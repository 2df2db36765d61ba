"""Which implementation is chosen, and why not another: no array and no device is needed."""

from dataclasses import replace

import pytest

from jax_fa.runtime.dispatch import Emulation, Target, choose
from jax_fa.spec import schema
from jax_fa.spec.arch import ARCHS
from jax_fa.spec.band import Band
from jax_fa.spec.problem import Problem, Semantics
from jax_fa.spec.variants import BY_NAME, of_families

OPERATIONS = ("fwd", "bwd")
"""Of a problem without a bias."""

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


def test_an_operation_may_run_the_kernels_of_another_family():
    built = frozenset(variant.name for variant in of_families(["sm103"]))
    for compiled in (ALL, built):
        target = Target("cuda", compiled, ("10.3",))
        assert choose(PROBLEM, target, None).kernel == "fwd_sm103_bf16_d128_causal"
        assert choose(PROBLEM, target, None, "bwd").kernel == "bwd_sm100_bf16_d128_causal"
    # Where no GPU is at hand, the families that the build is for have to serve, and no other.
    assert choose(PROBLEM, Target("cuda", built), None).kernel == "fwd_sm103_bf16_d128_causal"
    both = Target("cuda", ALL, ("10.0", "10.3"))
    assert choose(PROBLEM, both, None, "bwd").kernel == "bwd_sm100_bf16_d128_causal"


def test_kernels_of_the_family_that_one_borrows_from_are_not_all_it_needs():
    built = frozenset(variant.name for variant in of_families(["sm100"]))
    for operation in ("fwd", "bwd"):
        choice = choose(PROBLEM, Target("cuda", built, ("10.3",)), None, operation)
        assert choice.reason.startswith("this installation holds no GPU kernels of sm103. ")
        assert "JAX_FA_GPU=sm103 " in choice.reason


def test_a_kernel_of_a_kind_is_that_of_the_family_whose_kind_it_is():
    """Of 10.3, all but plain forwards are those of 10.0."""
    biased = replace(PROBLEM, bias_bytes=2)
    decoded = replace(PROBLEM, q_len=1, kv_len=4096, semantics=Semantics(0.1))
    for problem, operation, served in (
        (biased, "fwd", "fwd_sm100_bf16_d128_general_bias"),
        (biased, "bwd", "bwd_sm100_bf16_d128_general_bias"),
        (biased, "dbias", "dbias_sm100_bf16_d128_general_bias"),
        (decoded, "fwd", "fwd_sm100_bf16_d128_general_few"),
        (PROBLEM, "fwd", "fwd_sm103_bf16_d128_causal"),
    ):
        assert choose(problem, Target("cuda", ALL, ("10.3",)), None, operation).kernel == served
        assert BY_NAME[served].kernels == ("sm100" if problem is PROBLEM else "mma_sync")


@pytest.mark.parametrize(
    ("problem", "operation", "serves"),
    [
        (replace(PROBLEM, bias_bytes=2), "fwd", "sm90,sm80,sm86,sm120"),
        (replace(PROBLEM, bias_bytes=4), "bwd", "sm90,sm80,sm86,sm120"),
    ],
)
def test_without_a_gpu_a_refusal_names_the_families_that_have_a_kernel(problem, operation, serves):
    # A program for another machine is for all families that are built, so one decides for all.
    lacking = {v.name for v in of_families(["sm100", "sm110"]) if v.kind == "bias"}
    refused = choose(problem, Target("cuda", ALL - lacking), None, operation)
    assert refused.is_fallback
    named = ", ".join(f'"{name}"' for name in serves.split(","))
    assert f"`with jax_fa.lowering_for({named})`" in refused.reason
    built = frozenset(variant.name for variant in of_families(serves.split(",")))
    assert not choose(problem, Target("cuda", built), None, operation).is_fallback
    at_hand = choose(problem, Target("cuda", ALL - lacking, ("10.0",)), None, operation)
    assert at_hand.is_fallback and "no GPU" not in at_hand.reason


def test_a_variant_that_was_left_out_of_the_build_is_not_chosen():
    left_out = choose(PROBLEM, Target("cuda", ALL, ("9.0",)), None).kernel
    choice = choose(PROBLEM, Target("cuda", ALL - {left_out}, ("9.0",)), None)
    assert left_out not in choice.kernel


@pytest.mark.parametrize(
    ("heads", "larger", "arrays"),
    [
        ((80, 80), (96, 96), (80, 80)),
        ((1, 8), (64, 64), (8, 8)),
        ((160, 128), (192, 128), (160, 128)),
        ((8, 129), (256, 256), (8, 136)),
    ],
)
def test_heads_without_a_kernel_of_their_own_run_in_the_cheapest_larger_one(heads, larger, arrays):
    problem = replace(PROBLEM, head_dim=heads[0], value_dim=heads[1])
    asked, theirs = ("/".join(map(str, pair)) for pair in (heads, larger))
    padded = "" if arrays == heads else ", padded with zeros"
    for forced in (None, "cuda", Emulation("sm90")):
        target = Target("cpu" if isinstance(forced, Emulation) else "cuda", ALL, ("9.0",))
        for operation in OPERATIONS:
            choice = choose(problem, target, forced, operation)
            assert (choice.is_fallback, choice.chosen.heads) == (False, larger)
            assert choice.chosen.array_heads(heads) == arrays
            key = BY_NAME[choice.kernel].key
            assert (key.head_dim, key.value_dim) == larger
            assert choice.reason.endswith(
                f"; head sizes {asked} run in the kernel for {theirs}{padded}"
            )
    assert choose(problem, CPU, None) == choose(PROBLEM, CPU, None)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_heads_of_a_kernel_are_not_padded(arch, operation):
    for heads in arch.kernels(operation).heads:
        problem = replace(PROBLEM, head_dim=heads[0], value_dim=heads[1])
        choice = choose(problem, Target("cuda", ALL, arch.capabilities), None, operation)
        assert choice.chosen.heads == heads
        assert choice.reason == "compiled kernels serve this problem on cuda"


def test_a_build_of_some_head_sizes_pads_to_those_that_it_has():
    """Forward and backward each to their own."""
    held = ["fwd_sm90_bf16_d256_causal", "fwd_sm90_bf16_d128_causal", "bwd_sm90_bf16_d96_causal"]
    target = Target("cuda", frozenset(held), ("9.0",))
    problem = replace(PROBLEM, head_dim=64, value_dim=64)
    chosen = [choose(problem, target, None, operation) for operation in OPERATIONS]
    assert [choice.kernel for choice in chosen] == held[1:]
    assert [choice.chosen.heads for choice in chosen] == [(128, 128), (96, 96)]


def test_every_family_pads_to_the_same_size():
    """A program names one kernel for all of them."""
    lacking = "fwd_sm100_bf16_d96_causal"
    problem = replace(PROBLEM, head_dim=80, value_dim=80)
    choice = choose(problem, Target("cuda", ALL - {lacking}), None)
    assert choice.chosen.heads == (128, 128)
    assert {BY_NAME[name].key.head_dim for name in choice.kernel.split(", ")} == {128}


def test_heads_larger_than_any_kernel_run_unfused():
    target = Target("cuda", ALL, ("9.0",))
    for heads in ((257, 64), (64, 257)):
        problem = replace(PROBLEM, head_dim=heads[0], value_dim=heads[1])
        choice = choose(problem, target, None)
        assert choice.is_fallback and f"none as large as {heads[0]}/{heads[1]}" in choice.reason
        with pytest.raises(NotImplementedError, match="Use implementation=None or 'xla'.$"):
            choose(problem, target, "cuda")


def test_xla_is_no_fallback_when_asked_for():
    assert not choose(PROBLEM, Target("cuda"), "xla").is_fallback


def test_forced_platform_that_is_not_the_one_lowered_for_is_refused():
    with pytest.raises(NotImplementedError, match="lowered for platform 'cpu'"):
        choose(PROBLEM, CPU, "cuda")


@pytest.fixture
def segments_for_hopper(monkeypatch):
    """As if only the code of Hopper's forward read segments."""
    for name in ("q_segments", "kv_segments"):
        row = schema.BY_NAME[name]._replace(readers=(("sm90", "fwd"),), feature="`segment_ids`")
        monkeypatch.setitem(schema.BY_NAME, name, row)


WITH_SEGMENTS = replace(PROBLEM, present=("q_segments", "kv_segments"))


@pytest.mark.usefixtures("segments_for_hopper")
@pytest.mark.parametrize(
    ("target", "operation", "whose"),
    [
        (CPU, "fwd", "fwd kernels for the CPU"),
        (Target("cuda", ALL, ("9.0",)), "bwd", "bwd kernels for sm90"),
        (Target("cuda", ALL, ("10.3",)), "fwd", "fwd kernels for sm103"),
        (Target("cuda", ALL), "fwd", "fwd kernels for sm100"),
    ],
)
def test_kernels_that_do_not_read_an_operand_are_not_chosen_where_it_is(target, operation, whose):
    choice = choose(WITH_SEGMENTS, target, None, operation)
    assert (choice.implementation, choice.is_fallback) == ("xla", True)
    assert choice.reason == f"{whose} do not take segment_ids"
    assert choose(PROBLEM, target, None, operation).implementation != "xla"


def test_of_several_kernels_one_that_reads_the_operand_is_chosen(request):
    """Though it is not the fastest: that for few queries is of other code."""
    decoding = replace(WITH_SEGMENTS, q_len=1, kv_len=4096)
    hopper = Target("cuda", ALL, ("9.0",))
    assert choose(decoding, hopper, None).kernel.endswith("_few")
    request.getfixturevalue("segments_for_hopper")
    assert choose(decoding, hopper, None).kernel == "fwd_sm90_bf16_d128_general_split"
    assert choose(WITH_SEGMENTS, hopper, None).kernel == "fwd_sm90_bf16_d128_general"


def test_an_attribute_that_a_kernel_does_not_read_may_be_0_there(monkeypatch):
    rows = {x.name: x for x in schema.ATTRIBUTES}
    rows["deterministic"] = rows["deterministic"]._replace(readers=(("sm90", "bwd"),))
    monkeypatch.setattr(schema, "ATTRIBUTES", (*rows.values(),))
    asked = replace(PROBLEM, semantics=replace(PROBLEM.semantics, deterministic=True))
    refused = choose(asked, CPU, None, "bwd")
    assert refused.reason == "bwd kernels for the CPU do not take deterministic"
    assert choose(PROBLEM, CPU, None, "bwd").implementation == "cpu"
    assert choose(asked, Target("cuda", ALL, ("9.0",)), None, "bwd").implementation == "cuda"
