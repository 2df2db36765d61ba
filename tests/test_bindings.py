"""Python and C++ agree on names, order and version; the compiled side checks what it is given."""

import inspect
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa
from jax_fa import _jax_fa, bindings
from jax_fa.kernels import abi
from jax_fa.problem import Gradients, Operands, Problem, Semantics


def test_version_is_the_one_python_needs():
    assert _jax_fa.version() == bindings.EXTENSION_VERSION


def test_operands_and_results_have_one_order_on_both_sides():
    assert _jax_fa.operand_names(False) == [*Operands._fields, "out", "lse"]
    results = [f"d{name}" for name in Gradients._fields]
    assert _jax_fa.operand_names(True) == [
        *Operands._fields,
        "out",
        "lse",
        "dout",
        "dlse",
        *results,
    ]


def test_attributes_are_the_same_on_both_sides():
    assert list(bindings._attributes(Semantics(1.0))) == _jax_fa.attribute_names()


def test_every_registered_target_is_versioned_and_known_to_export():
    names = {name for targets in _jax_fa.registrations().values() for name in targets}
    assert names == {bindings.FORWARD_TARGET, bindings.BACKWARD_TARGET}
    names.add(bindings.PARTITIONED_TARGET)
    assert all(name.endswith("_v1") for name in names)
    assert len(jax_fa.export_disabled_checks()) == len(names)


def test_kernels_name_their_instruction_set():
    assert _jax_fa.cpu_isa() in ("portable", "avx2", "avx512", "neon")


def inputs():
    x = jnp.zeros((1, 4, 2, 8))
    return dict(zip(Operands._fields, bindings._inputs(Operands(x, x, x)), strict=True))


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
    del attributes["mask_mod"]
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
        problem = Problem("float32", *extents, Semantics(1.0, deterministic=deterministic))
        for num_splits, shapes in (
            (0, abi.scratch_shapes(problem)),
            (5, abi.forward_scratch_shapes(problem, 5)),
        ):
            wanted = [(name, [*shape], dtype) for name, (shape, dtype) in shapes.items()]
            assert _jax_fa.scratch_shapes(extents, deterministic, num_splits) == wanted


def test_no_symbol_is_bound_after_loading():
    """-z now: the table of addresses is read-only from then on (-z relro)."""
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("needs readelf")
    command = [readelf, "--dynamic", "--program-headers", "--wide", _jax_fa.__file__]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "BIND_NOW" in text and "GNU_RELRO" in text


def test_only_bindings_uses_the_ffi():
    users = [
        module.__name__
        for module in (jax_fa.api, jax_fa.operations, jax_fa.vjp, jax_fa.partitioning, bindings)
        if "jax.ffi." in inspect.getsource(module)
    ]
    assert users == ["jax_fa.bindings"]
