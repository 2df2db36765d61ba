"""The launch seam and the CUDA handlers, as far as a machine without a GPU can see them."""

from dataclasses import replace

import pytest

from jax_fa import _jax_fa
from jax_fa.kernels.edges import SMEM_CAPACITY_BYTES
from jax_fa.runtime.dispatch import Target, choose
from jax_fa.spec import schema, variants
from jax_fa.spec.arch import ARCHS, arch_named, capability_number
from jax_fa.spec.band import UNBOUNDED, Band
from jax_fa.spec.names import stem
from jax_fa.spec.problem import Problem, Semantics

COMPILED = [name for name in _jax_fa.variants() if name in variants.BY_NAME]
# Multiples of what TMA descriptors ask for, and large enough not to be mistaken for extents.
ADDRESSES = {name: 0x7F00_0000_0000 + 0x100_0000 * i for i, name in enumerate(schema.BY_NAME)}

# Operands that are given with an operand, itself first.
TOGETHER: dict[str | None, tuple[str, ...]] = {
    "q_lengths": ("q_lengths",),
    "kv_lengths": ("kv_lengths",),
    "cu_seqlens_q": ("cu_seqlens_q", "cu_seqlens_k"),
    "q_segments": ("q_segments", "kv_segments"),
    "q_offset": ("q_offset",),
    "sinks": ("sinks",),
}

needs_kernels = pytest.mark.skipif(not COMPILED, reason="this build holds no GPU kernels")


def each_of(found):
    return pytest.mark.parametrize("variant", found, ids=lambda variant: variant.name)


BUILT = [variants.BY_NAME[name] for name in COMPILED]
each_variant = each_of(BUILT)
each_backward_with_bias = each_of([x for x in BUILT if x.operation == "bwd" and x.key.has_bias])


def problem_for(variant, **fields):
    """A problem that ``variant`` serves."""
    key = variant.key
    band = {
        "full": Band(),
        "causal": Band(is_causal=True),
        "general": Band() if key.multiplies_bias else Band(is_causal=True, left=200),
    }[key.mask]
    semantics = Semantics(0.1, band, soft_cap=20.0 if key.has_soft_cap else None)
    base = Problem(
        key.dtype, 2, 2, 1000, 1500, 8, 2, key.head_dim, key.value_dim, semantics=semantics
    )
    if key.is_split:
        base = replace(base, q_len=1 if key.is_few else 20)
        assert variants.num_parts(base, key) > 1
    if key.has_bias:
        extents = {"bias_batch": 2, "bias_heads": 8, "bias_rows": 1, "bias_keys": 1}
        base = replace(base, bias_bytes=4, **extents)
    if key.multiplies_bias:
        base = replace(base, bias_bytes=2, kv_len=1504, bias_keys=1504)
    return replace(base, **fields)


def arrays_of(problem, operation, num_splits):
    """The arrays of a call that may not be absent, a cotangent of the LSE, and the bias if any."""
    own, wanted = schema.OPERATIONS[operation], {"dlse"}
    if problem.has_bias:
        wanted |= {"bias"}
    if operation == "dbias" or problem.is_bias_whole:
        wanted |= {"dbias"}
    scratch = own.scratch if num_splits > 1 or not own.may_lack_scratch else ()
    given = (*own.operands, *own.results, *scratch)
    return [x.name for x in given if not x.is_optional or x.name in wanted]


def call_for(problem, operation="fwd", num_splits=1):
    """The fields of an operation's parameters for ``problem``, at addresses that nothing reads."""
    semantics = problem.semantics
    scratch = {"num_splits": num_splits} if num_splits > 1 else {}
    if operation == "bwd":
        scratch = {"dq_dim": problem.head_dim}
    return {
        "dtype": problem.dtype,
        **{extent.name: getattr(problem, extent.name) for extent in schema.EXTENTS},
        "scale": semantics.scale,
        "soft_cap": semantics.soft_cap or 0.0,
        "window_left": semantics.band.left_bound,
        "window_right": semantics.band.right_bound,
        "bottom_right": semantics.band.alignment == "bottom_right",
        "deterministic": semantics.deterministic,
        **{name: ADDRESSES[name] for name in arrays_of(problem, operation, num_splits)},
        **scratch,
    }


def record(variant, **changes):
    problem = problem_for(variant)
    call = call_for(problem, variant.operation, variants.num_parts(problem, variant.key))
    call = {**call, "kernel": stem(variant.key), **changes}
    return _jax_fa.record(variant.operation, capability(variant), call)


def capability(variant):
    return capability_number(arch_named(variant.arch).capabilities[0])


def test_cuda_handlers_are_registered_with_a_stage_that_loads():
    for stages in _jax_fa.registrations()["CUDA"].values():
        assert set(stages) == {"initialize", "execute"}
    assert set(_jax_fa.registrations()["CUDA"]) == set(_jax_fa.registrations()["cpu"])


def test_every_compiled_variant_is_in_the_list():
    names = _jax_fa.variants()
    assert all(name in variants.BY_NAME for name in names)
    assert len(set(names)) == len(names)


@needs_kernels
@each_variant
def test_recorded_launches_fit_the_hardware(variant):
    launches = record(variant)["launches"]
    assert launches
    for launch in launches:
        x, y, z = launch["grid"]
        assert 0 < x < 1 << 31 and 0 < y < 1 << 16 and 0 < z < 1 << 16
        threads = launch["block"][0] * launch["block"][1] * launch["block"][2]
        assert 0 < threads <= 1024 and threads % 32 == 0
        assert 1 <= launch["cluster"][0] * launch["cluster"][1] * launch["cluster"][2] <= 16
        assert launch["shared_bytes"] <= SMEM_CAPACITY_BYTES
        assert sum(map(len, launch["params"])) <= 4096


@needs_kernels
@each_variant
def test_arrays_reach_the_kernels(variant):
    """Descriptors and pointers both begin with an address."""
    params = b"".join(p for launch in record(variant)["launches"] for p in launch["params"])
    names = {
        "fwd": ("q", "k", "v", "out", "lse"),
        "bwd": ("q", "k", "v", "dout", "dq", "dk", "dv"),
        "dbias": ("q", "k", "v", "dout", "lse", "delta", "dbias"),
    }[variant.operation]
    names = (*names, "out_parts", "lse_parts") if variant.key.is_split else names
    names = (*names, "bias") if variant.key.has_bias else names
    for name in names:
        assert ADDRESSES[name].to_bytes(8, "little") in params, name


def record_whole(variant, **changes):
    """Of a bias that is broadcast along nothing."""
    p = problem_for(variant)
    whole = {
        "bias_batch": p.batch,
        "bias_heads": p.num_q_heads,
        "bias_rows": p.q_len,
        "bias_keys": p.kv_len,
    }
    return record(variant, **whole, **changes)["launches"]


@needs_kernels
@each_backward_with_bias
def test_the_gradient_of_a_bias_reaches_backwards_that_give_it(variant):
    asked = {"dbias": ADDRESSES["dbias"]}
    with pytest.raises(ValueError, match="only where the bias is broadcast along nothing"):
        record(variant, **asked)
    if (variant.kernels, "bwd") not in schema.WRITERS_OF_DBIAS:
        with pytest.raises(ValueError, match=f"{variant.name} does not give the gradient of a bi"):
            record_whole(variant, **asked)
        return
    unbounded = dict.fromkeys(("window_left", "window_right"), UNBOUNDED)
    without, banded = record_whole(variant), record_whole(variant, **asked)
    everything = record_whole(variant, **asked, **unbounded)
    # What a band leaves out is cleared before.
    cleared = variant.key.mask != "full"
    assert (len(banded), len(everything)) == (len(without) + cleared, len(without))
    address = ADDRESSES["dbias"].to_bytes(8, "little")
    for launches, is_there in ((without, False), (banded, True), (everything, True)):
        assert (address in b"".join(x for y in launches for x in y["params"])) == is_there


@needs_kernels
@each_variant
def test_extents_reach_the_launch_at_run_time(variant):
    """Nothing of the shape is compiled in, so a larger problem changes grid or parameters."""
    larger = {"q_len": 3000, "kv_len": 5000}
    if variant.key.multiplies_bias:
        larger["bias_keys"] = 5000
    assert record(variant) != record(variant, **larger)


@needs_kernels
@each_variant
def test_many_batches_fit_a_grid(variant):
    """Its first extent ends where int32 does, the others at 65535."""
    many = dict.fromkeys(("batch", "num_sequences"), 70_000)
    if variant.key.has_bias:
        many["bias_batch"] = 1
    if variant.operation == "dbias":
        many["dbias_parts"] = 0x1000
    for launch in record(variant, **many)["launches"]:
        _, *others = launch["grid"]
        assert max(others) <= 65535


@needs_kernels
@each_variant
def test_lookup_in_cxx_agrees_with_python(variant):
    arch = arch_named(variant.arch)
    problem = problem_for(variant)
    # Large tiles serve a short problem where there are no small ones.
    held = [x for x in COMPILED if variants.BY_NAME[x].key.is_small <= variant.key.is_small]
    found = variants.find(problem, arch, variant.operation, held)
    assert record(variant)["variant"] == variant.name == found.name


@needs_kernels
@pytest.mark.parametrize("left", [None, 0, 3])
@pytest.mark.parametrize("right", [None, 0, 3])
@pytest.mark.parametrize(
    "extra", [None, "q_lengths", "kv_lengths", "cu_seqlens_q", "q_segments", "q_offset", "sinks"]
)
def test_the_kernel_that_lowering_names_is_found(left, right, extra):
    """And what is not compiled is not named."""
    variant = variants.BY_NAME[COMPILED[0]]
    band = Band(left=left, right=right)
    problem = problem_for(variant, semantics=Semantics(0.1, band))
    if extra is not None:
        problem = replace(problem, present=(extra,))
    if extra == "cu_seqlens_q":
        problem = replace(problem, batch=1)
    call = call_for(problem, variant.operation) | dict.fromkeys(TOGETHER.get(extra, ()), 0x1000)
    if extra == "sinks" and variant.operation == "bwd":
        call["dsinks"] = 0x2000
    arch = arch_named(variant.arch)
    launched = problem
    if extra == "cu_seqlens_q":  # sequences.with_slot_in_front
        launched = replace(problem, num_sequences=problem.num_sequences + 1)
    found = variants.find(launched, arch, variant.operation, COMPILED)
    target = Target("cuda", frozenset(COMPILED), arch.capabilities)
    chosen = choose(problem, target, None, variant.operation)
    assert (chosen.implementation == "cuda") == (found is not None)
    if found is not None:
        call["kernel"] = chosen.chosen.stem
        call |= dict(zip(("head_dim", "value_dim"), chosen.chosen.heads, strict=True))
        recorded = _jax_fa.record(variant.operation, capability(variant), call)
        assert recorded["variant"] == found.name == chosen.kernel


@needs_kernels
def test_a_kernel_that_is_not_in_this_build_is_refused():
    """A program lowered by an installation that has it."""
    variant = variants.BY_NAME[COMPILED[0]]
    name = variants.full_name(variant.operation, variant.arch, "bf16_d80_full")
    with pytest.raises(ValueError, match=rf"{name}, which is not among the \d+ .* Lower it again"):
        record(variant, kernel="bf16_d80_full")


@needs_kernels
@pytest.mark.parametrize(
    "changes", [{"head_dim": 81}, {"value_dim": 264}, {"dtype": "float32"}, {"num_splits": 2}]
)
def test_a_kernel_is_called_with_what_it_was_compiled_for(changes):
    plain = next(variants.BY_NAME[x] for x in COMPILED if x.startswith("fwd") and "split" not in x)
    with pytest.raises(ValueError, match=rf"{plain.name} takes .*, but is called with"):
        record(plain, **changes, out_parts=0x1000, lse_parts=0x2000)


@needs_kernels
def test_a_program_from_before_kernels_were_named_says_so():
    words = "names no kernel: a release of jax_fa wrote it whose extension had version 1. Lower"
    with pytest.raises(ValueError, match=words):
        record(variants.BY_NAME[COMPILED[0]], kernel="")


@needs_kernels
@pytest.mark.parametrize(
    ("operation", "ending"),
    [
        ("fwd", "full"),
        ("fwd", "general_few"),
        ("fwd", "general_bias"),
        ("bwd", "full"),
        ("bwd", "general_bias"),
        ("dbias", "general_bias"),
    ],
)
@pytest.mark.parametrize("heads", ["d64", "d128", "d192v128"])
@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_every_capability_runs_the_kernels_that_its_row_says(arch, heads, operation, ending):
    """C++ picks the family of a device from the table that the build wrote of ``ARCHS``."""
    served = variants.run_as(operation, arch, f"bf16_{heads}_{ending}")
    problem = problem_for(variants.BY_NAME[served])
    wanted = served.replace("bf16", "e4m3")
    call = call_for(problem, operation) | {"kernel": f"e4m3_{heads}_{ending}"}
    for capability in map(capability_number, arch.capabilities):
        with pytest.raises(ValueError, match=f"calls the kernel {wanted}, which is not among"):
            _jax_fa.record(operation, capability, call)


@needs_kernels
def test_an_architecture_without_kernels_is_refused():
    with pytest.raises(ValueError, match="compiled for GPUs of compute capability 7.5"):
        _jax_fa.record("fwd", 75, call_for(problem_for(variants.BY_NAME[COMPILED[0]])))


def test_a_misspelt_field_is_refused():
    with pytest.raises(ValueError, match="fields that this operation does not"):
        _jax_fa.record("fwd", 90, {"dtype": "bfloat16", "windowleft": UNBOUNDED})


def test_unknown_operations_and_dtypes_are_refused():
    with pytest.raises(ValueError, match="operation is 'both', not 'fwd', 'bwd' or 'dbias'"):
        _jax_fa.record("both", 90, {})
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        _jax_fa.record("fwd", 90, {"dtype": "int8"})


@needs_kernels
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 0}, "number of sequences should be the batch|batch is 0; GPU kernels take 1 to"),
        ({"num_kv_heads": 0}, "key/value heads should be at least 1, but is 0"),
        ({"head_dim": 0}, "head size of q and k should be at least 1, but is 0"),
        ({"q_len": 0}, "query length is 0; GPU kernels take 1 to"),
        ({"kv_len": 2**31}, "key length is 2147483648; GPU kernels take 1 to"),
        ({"num_q_heads": 65536}, "query heads is 65536; GPU kernels take 1 to 65535"),
        (
            {"batch": 2**9, "num_sequences": 2**9, "q_len": 2**23},
            "batch times query length is 4294967296; GPU kernels take 1 to 2147483647",
        ),
        (
            {"batch": 2**9, "num_sequences": 2**9, "kv_len": 2**23},
            "batch times key length is 4294967296; GPU kernels take 1 to 2147483647",
        ),
        (
            {
                **{"batch": 1, "num_sequences": 2**28, "num_q_heads": 16},
                **{"cu_seqlens_q": 0x1000, "cu_seqlens_k": 0x2000},
            },
            "sequences times query heads times parts of the keys is 4294967296; GPU kernels take",
        ),
        ({"batch": 2**62}, r"extents of each array should multiply to 2\^50 at most"),
        ({"kv_len": 2**63 - 1}, r"extents of each array should multiply to 2\^50 at most"),
        ({"num_q_heads": 7}, r"query heads \(7\) should be a multiple of key/value heads \(2\)"),
        ({"num_sequences": 5}, "number of sequences should be the batch, 2, but is 5"),
        ({"scale": float("nan")}, "scale should be finite, but is nan"),
        ({"scale": 0.0}, "scale is 0; GPU kernels take a positive one"),
        ({"soft_cap": float("inf")}, "soft_cap should be positive and finite"),
        ({"window_left": 2**31 - 1}, "window_left should be between"),
        ({"window_left": 2**40}, "window_left is 1099511627776, which its C.. type does not hold"),
        ({"q_len": "many"}, "q_len is 'many', which its C.. type does not hold"),
        ({"k": 0}, "k should have an address, but has none"),
        ({"cu_seqlens_k": 0x1000}, "cu_seqlens_q and cu_seqlens_k should be given together"),
    ],
)
def test_what_would_divide_by_zero_or_overflow_is_refused(changes, words):
    with pytest.raises(ValueError, match=f"record: .*({words})"):
        record(variants.BY_NAME[COMPILED[0]], **changes)


@needs_kernels
@pytest.mark.parametrize("num_sms", [0, -1, -(2**31), 2**31 - 1])
def test_a_gpu_has_multiprocessors(num_sms):
    variant = variants.BY_NAME[COMPILED[0]]
    call = call_for(problem_for(variant), variant.operation)
    with pytest.raises(ValueError, match=f"num_sms is {num_sms}; a GPU has 1 to"):
        _jax_fa.record(variant.operation, capability(variant), call, num_sms)


@needs_kernels
@pytest.mark.parametrize("name", [x.name for x in schema.BACKWARD_SCRATCH[:2]])
def test_a_backward_has_its_scratch(name):
    backward = next(v for v in map(variants.BY_NAME.get, COMPILED) if v.operation == "bwd")
    with pytest.raises(ValueError, match=f"record: {name} should have an address"):
        record(backward, **{name: 0})
