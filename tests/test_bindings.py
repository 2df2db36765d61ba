"""Python and C++ agree on names, order and version; the compiled side checks what it is given."""

import fnmatch
import inspect
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa
from jax_fa import _jax_fa
from jax_fa.runtime import bindings
from jax_fa.runtime.dispatch import Kernel
from jax_fa.runtime.partitioning import Call
from jax_fa.spec import schema, scratch
from jax_fa.spec.band import Band
from jax_fa.spec.problem import Gradients, Operands, Problem, Semantics
from jax_fa.spec.variants import BY_NAME, of_families


def test_version_is_the_one_python_needs():
    assert _jax_fa.version() == bindings.EXTENSION_VERSION


def test_operands_and_results_have_one_order_on_both_sides():
    assert _jax_fa.operand_names("fwd") == [*Operands._fields, "out", "lse"]
    results = [f"d{name}" for name in Gradients._fields]
    *first, words, blocks, bias = Operands._fields
    saved = ["out", "lse", "dout", "dlse"]
    assert _jax_fa.operand_names("bwd") == [*first, *saved, words, blocks, bias, *results]
    rows = bindings.Rows._fields
    assert _jax_fa.operand_names("dbias") == [*first, *rows, words, blocks, bias, "dbias"]


@pytest.mark.parametrize("lacking", [1, 3], ids=["biases", "masks"])
def test_a_program_from_before_biases_or_masks_still_runs(lacking):
    """It hands over fewer operands: those that were added stand last."""
    x = jnp.ones((1, 4, 2, 8))
    results = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((1, 4, 2), x.dtype))
    attributes = bindings._attributes(Semantics(1.0))
    arrays = bindings._inputs("fwd", Operands(x, x, x), None)[:-lacking]
    out, lse = jax.ffi.ffi_call(bindings.FORWARD_TARGET, results)(*arrays, **attributes)
    np.testing.assert_allclose(out, x, rtol=1e-6)
    saved = bindings.Saved(out, lse, x, jnp.zeros_like(lse))
    gradients = [jax.ShapeDtypeStruct(x.shape, x.dtype)] * 3
    gradients.append(jax.ShapeDtypeStruct((0,), x.dtype))
    arrays = bindings._inputs("bwd", Operands(x, x, x), saved)[:-lacking]
    dq, dk, dv, _ = jax.ffi.ffi_call(bindings.BACKWARD_TARGET, gradients)(*arrays, **attributes)
    np.testing.assert_allclose(dv, x, rtol=1e-6)
    assert not np.asarray(dq).any() and not np.asarray(dk).any()


def test_attributes_are_the_same_on_both_sides():
    assert [x.name for x in schema.ATTRIBUTES] == _jax_fa.attribute_names()
    sent = [x.name for x in schema.ATTRIBUTES if x.of is not None]
    assert list(bindings._attributes(Semantics(1.0))) == sent


def test_a_program_that_calls_compiled_mask_functions_is_refused():
    attributes = {**bindings._attributes(Semantics(1.0)), "mask_mod": "chunked_8"}
    with pytest.raises(Exception, match="compiled with the mask function 'chunked_8', which this"):
        call_forward({}, attributes=attributes)
    for older, present in zip(
        call_forward({}, attributes={**attributes, "mask_mod": ""}), call_forward({}), strict=True
    ):
        np.testing.assert_array_equal(older, present)


def test_every_registered_target_is_versioned_and_known_to_export():
    names = {name for targets in _jax_fa.registrations().values() for name in targets}
    assert names == set(bindings._TARGETS.values())
    names.add(bindings.PARTITIONED_TARGET)
    assert all(name.endswith("_v1") for name in names)
    assert len(jax_fa.export_disabled_checks()) == len(names)


def test_kernels_name_their_instruction_set():
    assert _jax_fa.cpu_isa() in ("portable", "avx2", "avx512", "neon")


def inputs():
    x = jnp.zeros((1, 4, 2, 8))
    arrays = bindings._inputs("fwd", Operands(x, x, x), None)
    return dict(zip(Operands._fields, arrays, strict=True))


def call_forward(changed, results=None, attributes=None):
    arrays = {**inputs(), **changed}
    results = results or (
        jax.ShapeDtypeStruct((1, 4, 2, 8), np.float32),
        jax.ShapeDtypeStruct((1, 4, 2), np.float32),
    )
    target = jax.ffi.ffi_call(bindings.FORWARD_TARGET, results)
    attributes = attributes or bindings._attributes(Semantics(1.0))
    return jax.block_until_ready(target(*arrays.values(), **attributes))


INT = jnp.int32


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"k": jnp.zeros((1, 4, 2, 9))},
            r"k should be F32\[1, 4, 2, 8\], but is F32\[1, 4, 2, 9\]",
        ),
        ({"v": jnp.zeros((1, 5, 2, 8))}, r"v should be F32\[1, 4, 2, 8\]"),
        ({"v": jnp.zeros((1, 4, 2, 8), jnp.bfloat16)}, "v should be F32.*but is BF16"),
        ({"q": jnp.zeros((4, 2, 8))}, "arrays of rank 4"),
        ({"q": jnp.zeros((1, 4, 3, 8))}, r"query heads \(3\) should be a multiple of .* \(2\)"),
        ({"q_lengths": jnp.zeros(2, INT)}, r"q_lengths should be S32\[1\], but is S32\[2\]"),
        ({"q_offset": jnp.zeros(1)}, r"q_offset should be S32\[1\], but is F32\[1\]"),
        (
            {"cu_seqlens_q": jnp.zeros(2, INT)},
            "cu_seqlens_q and cu_seqlens_k should be given together",
        ),
        (
            {"q_segments": jnp.zeros((1, 4), INT)},
            "q_segments and kv_segments should be given together",
        ),
        (
            {"mask_words": jnp.zeros((1, 1, 3, 1), INT)},
            "mask_words should have 1 or 4 rows, but has 3",
        ),
        (
            {"mask_words": jnp.zeros((1, 4, 1), INT)},
            r"mask_words should have rank 4, but has shape \[1, 4, 1\]",
        ),
        (
            {"mask_words": jnp.zeros((1, 1, 4, 1), INT)},
            "mask_words and mask_map should be given together",
        ),
        (
            {"bias": jnp.zeros((1, 1, 3, 4))},
            "bias should have 1 or 4 rows, but has 3",
        ),
        (
            {"bias": jnp.zeros((1, 2, 4, 5))},
            "bias should have 1 or 4 keys, but has 5",
        ),
        (
            {"bias": jnp.zeros((2, 2, 4, 4))},
            "bias should have 1 batch, but has 2",
        ),
        (
            {"bias": jnp.zeros((1, 4, 4))},
            r"bias should have rank 4, but has shape \[1, 4, 4\]",
        ),
        (
            {"bias": jnp.zeros((1, 2, 4, 4), jnp.bfloat16)},
            r"bias should be F32\[1, 2, 4, 4\], but is BF16",
        ),
        (
            {
                "bias": jnp.zeros((1, 2, 4, 4)),
                "cu_seqlens_q": jnp.array([0, 4], INT),
                "cu_seqlens_k": jnp.array([0, 4], INT),
            },
            r"a bias does not go with packed sequences \(cu_seqlens_q\)",
        ),
        (
            {
                "mask_words": jnp.zeros((1, 1, 4, 1), INT),
                "mask_map": jnp.zeros((1, 1, 2, 2, 1), INT),
            },
            r"mask_map should be S32\[1, 1, 2, 1, 1\], but is S32\[1, 1, 2, 2, 1\]",
        ),
        ({"sinks": jnp.zeros(2)}, r"sinks should be F32\[1, 2\], but is F32\[2\]"),
    ],
)
def test_compiled_side_refuses_arrays_that_do_not_fit(changed, words):
    with pytest.raises(Exception, match=f"jax_fa forward: .*{words}"):
        call_forward(changed)


def test_compiled_side_refuses_results_that_do_not_fit():
    results = (
        jax.ShapeDtypeStruct((1, 4, 2, 8), np.float32),
        jax.ShapeDtypeStruct((1, 4, 2), jnp.bfloat16),
    )
    with pytest.raises(
        Exception, match=r"jax_fa forward: lse should be F32\[1, 4, 2\], but is BF16"
    ):
        call_forward({}, results)


def test_a_program_from_before_an_attribute_was_added_runs():
    attributes = bindings._attributes(Semantics(1.0))
    del attributes["kernel"]
    for older, present in zip(
        call_forward({}, attributes=attributes), call_forward({}), strict=True
    ):
        np.testing.assert_array_equal(older, present)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"scale": None}, "jax_fa: no attribute scale"),
        ({"scale": np.int32(2)}, "jax_fa: attribute scale: Wrong scalar data type"),
        (
            {"dropout": np.float32(0.5)},
            "jax_fa: the program was made by a newer release, whose attributes are .*dropout",
        ),
    ],
)
def test_compiled_side_refuses_attributes_that_it_cannot_honor(changed, words):
    attributes = {**bindings._attributes(Semantics(1.0)), **changed}
    given = {name: x for name, x in attributes.items() if x is not None}
    with pytest.raises(Exception, match=words):
        call_forward({}, attributes=given)


def test_scratch_has_the_same_shapes_on_both_sides():
    rng = np.random.default_rng(0)
    for _ in range(300):
        kv_heads, group = (int(x) for x in rng.integers(1, 9, 2))
        batch, sequences = (1, int(rng.integers(0, 9))) if rng.random() < 0.5 else [3, 3]
        q_len, kv_len = (int(x) for x in rng.choice([0, 1, 63, 64, 128, 129, 5000], 2))
        extents = (batch, sequences, q_len, kv_len, kv_heads * group, kv_heads, 64, 128)
        deterministic = bool(rng.integers(2))
        band = Band(bool(rng.integers(2)), *rng.choice([None, 7], 2))
        problem = Problem("float32", *extents, Semantics(1.0, band, deterministic=deterministic))
        dq_dim = int(rng.choice([64, 96, 256]))
        asked = (deterministic, band.left_bound, band.right_bound)
        for num_splits, shapes in (
            (0, scratch.shapes("bwd", problem, dq_dim=dq_dim)),
            (5, scratch.shapes("fwd", problem, 5)),
        ):
            wanted = [(name, [*shape], dtype) for name, (shape, dtype) in shapes.items()]
            given = [getattr(problem, x.name) for x in schema.EXTENTS]
            assert _jax_fa.scratch_shapes(given, *asked, num_splits, dq_dim) == wanted


def lowered(function, *shapes):
    """The kernels that a program for GPUs names."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    anew = jax.jit(lambda *x: function(*x))
    text = anew.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    kernels = re.findall(r'custom_call @jax_fa_\w+\(.*kernel = "(\w*)"', text)
    return kernels


@pytest.mark.usefixtures("all_kernels")
def test_a_program_names_kernels_but_no_family():
    """So that it can be exported to any."""

    def step(q, k, v):
        return jax_fa.attention(q, k, v, is_causal=True).astype(np.float32).sum()

    shape = (2, 512, 8, 128)
    kernels = lowered(jax.grad(step, (0, 1, 2)), shape, shape, shape)
    assert kernels == ["bf16_d128_causal"] * 2


@pytest.mark.filterwarnings("ignore::jax_fa.FallbackWarning")
def test_a_program_is_lowered_for_the_families_that_are_named(monkeypatch):
    """In a build whose Blackwell kernels read no bias."""
    biased = {v.name for v in of_families(["sm100", "sm110"]) if v.kind == "bias"}
    monkeypatch.setattr(bindings, "compiled", lambda: frozenset(BY_NAME) - biased)

    @jax.jit
    def gradient(q, k, v, bias):
        def total(q, k, v):
            return jax_fa.attention(q, k, v, bias).astype(np.float32).sum()

        return jax.grad(total)(q, k, v)

    x = jax.ShapeDtypeStruct((2, 512, 8, 128), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, 8, 512, 512), jnp.bfloat16)

    def num_kernels():
        text = gradient.trace(x, x, x, bias).lower(lowering_platforms=("cuda",)).as_text()
        call = r'custom_call @jax_fa_\w+\(.*kernel = "bf16_d128_general_bias"'
        return len(re.findall(call, text))

    assert num_kernels() == 0
    with jax_fa.lowering_for("sm90", "sm80"):
        assert num_kernels() == 2
        names = jax_fa.explain(x, x, x, bias, platform="cuda").choice.kernel
        assert names == "fwd_sm80_bf16_d128_general_bias, fwd_sm90_bf16_d128_general_bias"
        with jax_fa.lowering_for("sm90", "sm100"):
            assert bindings.target("cuda").capabilities == ("9.0", "10.0")
            names = jax_fa.explain(x, x, x, platform="cuda").choice.kernel
            assert names == "fwd_sm100_bf16_d128_full, fwd_sm90_bf16_d128_full"
            assert num_kernels() == 0
        assert num_kernels() == 2
    assert bindings.target("cuda").capabilities == ()


@pytest.mark.parametrize("families", [(), ("sm75",), ("sm90", "9.0")])
def test_families_that_nobody_knows_are_refused(families):
    with pytest.raises(ValueError, match="lowering_for: .*; kernels exist for sm90, "):
        jax_fa.lowering_for(*families)


@pytest.mark.parametrize(
    ("lacking", "kernel"),
    [
        ("", "bf16_d128_general_few"),
        ("fwd_sm100_bf16_d128_general_few", "bf16_d128_general_split"),
        ("fwd_sm100_bf16_d128_general_*", "bf16_d128_full"),
        ("bwd_sm100_bf16_d128_general", "bf16_d128_general_few"),
    ],
)
def test_the_kernel_is_one_that_every_family_has(lacking, kernel, all_kernels):
    all_kernels["cuda"] -= {*fnmatch.filter(all_kernels["cuda"], lacking)}
    kv = (1, 16384, 2, 128)
    assert lowered(jax_fa.attention, (1, 1, 8, 128), kv, kv) == [kernel]


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize(
    ("q_len", "kernel"), [(300, "bf16_d128_full"), (1, "bf16_d128_general_few")]
)
def test_the_part_of_a_device_has_a_kernel_of_its_own(q_len, kernel):
    """Of a call that is split: ``Call.text`` names none."""
    call = Call("fwd", "cuda", ("q", "k", "v"), Semantics(1.0), kernel=Kernel("bf16_d128_causal"))
    kv = (64, 16384, 8, 128)
    kernels = lowered(Call.of(call.text()).compute, (64, q_len, 8, 128), kv, kv)
    assert kernels == [kernel]


def readelf(*options):
    """What readelf tells of the extension, in lines as wide as need be."""
    program = shutil.which("readelf")
    if program is None:
        pytest.skip("needs readelf")
    command = [program, *options, "--wide", _jax_fa.__file__]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_no_symbol_is_bound_after_loading():
    """-z now: the table of addresses is read-only from then on (-z relro)."""
    text = readelf("--dynamic", "--program-headers")
    assert "BIND_NOW" in text and "GNU_RELRO" in text


def test_nothing_is_exported_but_the_entry():
    """Objects of GPU kernels define many global symbols, for a loader of their compiler's own."""
    lines = (line.split() for line in readelf("--dyn-syms").splitlines())
    symbols = [x for x in lines if len(x) == 8 and x[0][:-1].isdigit()]
    exported = [name for *_, bind, _, place, name in symbols if bind != "LOCAL" and place != "UND"]
    assert exported == ["PyInit__jax_fa"]


def test_only_bindings_uses_the_ffi():
    users = [
        module.__name__
        for module in (
            jax_fa.api,
            jax_fa.runtime.primitives,
            jax_fa.runtime.vjp,
            jax_fa.runtime.partitioning,
            bindings,
        )
        if "jax.ffi." in inspect.getsource(module)
    ]
    assert users == ["jax_fa.runtime.bindings"]
