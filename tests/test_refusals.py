"""Bad inputs, with the class and the words of their errors."""

import warnings
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.harness import in_new_process
from jax.test_util import check_grads

import jax_fa
from jax_fa import mask_mods
from jax_fa.runtime import bindings, fallback, installation


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


Q, K, V = zeros(2, 6, 4, 8), zeros(2, 5, 2, 8), zeros(2, 5, 2, 8)
IDS_Q, IDS_K = zeros(2, 6, dtype=jnp.int32), zeros(2, 5, dtype=jnp.int32)
UNKNOWN_IMPLEMENTATION = (
    "attention: implementation='flash' is unknown; use None or one of 'cpu', 'cuda', 'cudnn', "
    "'xla', 'emulated'."
)

ACCEPTED_SHAPES = "[batch, length, heads, head size] or [length, heads, head size]"
ARRAYS = [
    (
        "query of rank 5",
        (zeros(1, 2, 6, 4, 8), K, V),
        ValueError,
        f"attention: query should be {ACCEPTED_SHAPES}, but has shape (1, 2, 6, 4, 8). Fold "
        "several batch dimensions into one, or use vmap.",
    ),
    (
        "rank 2, which would be one row",
        (Q[0, 0], K[0, 0], V[0, 0]),
        ValueError,
        f"attention: query should be {ACCEPTED_SHAPES}, but has shape (4, 8). Fold several batch "
        "dimensions into one, or use vmap.",
    ),
    (
        "value of rank 1",
        (Q, K, V[0, 0, 0]),
        ValueError,
        f"attention: value should be {ACCEPTED_SHAPES}, but has shape (8,). Fold several batch "
        "dimensions into one, or use vmap.",
    ),
    (
        "batch differs",
        (zeros(3, 6, 4, 8), K, V),
        ValueError,
        "attention: query should have shape [2, 6, 4, 8], but has [3, 6, 4, 8].",
    ),
    (
        "head size differs",
        (zeros(2, 6, 4, 16), K, V),
        ValueError,
        "attention: query should have shape [2, 6, 4, 8], but has [2, 6, 4, 16].",
    ),
    (
        "value heads differ",
        (Q, K, zeros(2, 5, 4, 8)),
        ValueError,
        "attention: value should have shape [2, 5, 2, 8], but has [2, 5, 4, 8].",
    ),
    (
        "value length differs",
        (Q, K, zeros(2, 6, 2, 8)),
        ValueError,
        "attention: value should have shape [2, 5, 2, 8], but has [2, 6, 2, 8].",
    ),
    (
        "dtypes differ",
        (Q.astype(jnp.bfloat16), K, V),
        ValueError,
        "attention: query should be float32, but is bfloat16.",
    ),
    (
        "integers",
        tuple(x.astype(jnp.int8) for x in (Q, K, V)),
        NotImplementedError,
        "attention: query, key and value are int8; use float32, bfloat16, float16 or float64.",
    ),
    (
        "float8",
        tuple(x.astype(jnp.float8_e4m3fn) for x in (Q, K, V)),
        NotImplementedError,
        "attention: query, key and value are float8_e4m3fn; use float32, bfloat16, float16 or "
        "float64.",
    ),
    (
        "heads do not divide",
        (zeros(2, 6, 3, 8), K, V),
        ValueError,
        "attention: query has 3 heads and key 2; query heads must be a multiple of key/value "
        "heads.",
    ),
    (
        "no head size",
        (zeros(2, 6, 4, 0), zeros(2, 5, 2, 0), V),
        ValueError,
        "attention: head sizes must be positive, but are 0 and 8.",
    ),
]

SOFT_CAP = (
    "attention: logits_soft_cap should be a number from 0.0001 to 10000, but is {}. Kernels "
    "compute tanh to 1e-7, which the cap multiplies: a larger one would show in the logits. None "
    "leaves them as they are."
)
SCALE = (
    "attention: scale should be 0 or a number of magnitude 1e-30 to 1e+30, but is {}. float32 "
    "products of scale with operands, log2(e) and 1 / logits_soft_cap would leave its range."
)
OPTIONS = [
    (
        {"query_seq_lengths": jnp.zeros(3, jnp.int32)},
        ValueError,
        "attention: query_seq_lengths should have shape [2], but has [3].",
    ),
    (
        {"key_value_seq_lengths": jnp.zeros(2, jnp.int16)},
        ValueError,
        "attention: key_value_seq_lengths should be int32, but is int16.",
    ),
    (
        {"mask": zeros(2, 4, 6, 5)},
        ValueError,
        "attention: mask should be bool (True: the query sees the key), but got float32. Pass an "
        "additive mask as bias.",
    ),
    (
        {"mask": zeros(2, 3, 6, 5, dtype=bool)},
        TypeError,
        "attention: mask should broadcast to [B, N, T, S] = [2, 4, 6, 5], but has shape "
        "(2, 3, 6, 5).",
    ),
    (
        {"bias": zeros(1, 2, 4, 6, 5)},
        ValueError,
        "attention: bias should broadcast to [B, N, T, S] = [2, 4, 6, 5], but has shape "
        "(1, 2, 4, 6, 5).",
    ),
    (
        {"query_segment_ids": IDS_Q},
        ValueError,
        "attention: query_segment_ids and key_value_segment_ids go together, but "
        "key_value_segment_ids is missing.",
    ),
    (
        {"key_value_segment_ids": IDS_K},
        ValueError,
        "attention: query_segment_ids and key_value_segment_ids go together, but query_segment_ids "
        "is missing.",
    ),
    (
        {"query_segment_ids": IDS_Q, "key_value_segment_ids": IDS_Q},
        ValueError,
        "attention: key_value_segment_ids should have shape [2, 5], but has [2, 6].",
    ),
    (
        {"query_segment_ids": IDS_Q.astype(jnp.float32), "key_value_segment_ids": IDS_K},
        ValueError,
        "attention: query_segment_ids should be integers, but got float32.",
    ),
    ({"logits_soft_cap": 0.0}, ValueError, SOFT_CAP.format("0.0")),
    ({"logits_soft_cap": float("nan")}, ValueError, SOFT_CAP.format("nan")),
    ({"logits_soft_cap": 1e37}, ValueError, SOFT_CAP.format("1e+37")),
    ({"scale": np.float32("inf")}, ValueError, SCALE.format("np.float32(inf)")),
    ({"scale": -1e-40}, ValueError, SCALE.format("-1e-40")),
    (
        {"scale": 10**400},
        ValueError,
        "attention: scale should be 0 or a number of magnitude 1e-30 to 1e+30, but is "
        f"1{'0' * 56}....",
    ),
    (
        {"is_causal": "False"},
        TypeError,
        "attention: is_causal should be True or False, but is 'False'.",
    ),
    (
        {"deterministic": np.array([True, False])},
        ValueError,
        "attention: deterministic should be True or False, but is ndarray of shape (2,).",
    ),
    (
        {"local_window_size": (3, 2.5)},
        TypeError,
        "attention: local_window_size should be an integer, but is 2.5.",
    ),
    (
        {"bias": zeros(6, 5, dtype=jnp.complex64)},
        ValueError,
        "attention: bias should be real numbers, but is complex64.",
    ),
    (
        {"query_offset": 2**31},
        ValueError,
        "attention: query_offset should fit int32, but holds 2147483648.",
    ),
    (
        {"sinks": [0.0, 1e5, -np.inf, np.nan]},
        ValueError,
        "attention: sinks should be at most 10000 (-inf for a head without), but hold 100000. The "
        "LSE has 24 bits: a probability exp(logit - lse) would be wrong by more than 0.1%.",
    ),
    (
        {"sinks": zeros(2)},
        ValueError,
        "attention: sinks should have shape [4], but has [2].",
    ),
    (
        {"sinks": zeros(4, dtype=jnp.int32)},
        ValueError,
        "attention: sinks should be floating point, but got int32.",
    ),
    (
        {"causal_alignment": "middle"},
        ValueError,
        "attention: causal_alignment='middle' is unknown; use one of 'top_left', 'bottom_right'.",
    ),
    (
        {"query_offset": 0.5},
        ValueError,
        "attention: query_offset should be integers, but got float32.",
    ),
    (
        {"query_offset": jnp.zeros(3, jnp.int32)},
        ValueError,
        "attention: query_offset should be a scalar or have one entry per sequence (2), but has "
        "shape (3,).",
    ),
    (
        {"local_window_size": (1, 2, 3)},
        ValueError,
        "attention: local_window_size should be w or (left, right), but is (1, 2, 3).",
    ),
    ({"implementation": "flash"}, ValueError, UNKNOWN_IMPLEMENTATION),
    (
        {"implementation": "cuda"},
        NotImplementedError,
        "attention: implementation='cuda' was asked for, but the computation is lowered for "
        "platform 'cpu'. Use implementation=None (chooses at lowering), or 'xla', which runs "
        "everywhere.",
    ),
    (
        {"implementation": "emulated"},
        NotImplementedError,
        "attention: implementation='emulated' runs compiled GPU kernels, and this build holds "
        "none. Use implementation=None or 'xla', or install kernels of a family that kernels exist "
        f"for: `{installation.command(['sm90'])}`",
    ),
    (
        {"implementation": "cudnn", "logits_soft_cap": 1.0, "sinks": zeros(4)},
        NotImplementedError,
        "attention: implementation='cudnn' delegates to jax.nn.dot_product_attention, which has no "
        "logits_soft_cap, sinks. Use implementation=None.",
    ),
]


def error_of(call):
    with pytest.raises(Exception) as caught:
        call()
    return caught.type, str(caught.value)


@pytest.mark.parametrize(
    ("qkv", "kind", "words"), [a[1:] for a in ARRAYS], ids=[a[0] for a in ARRAYS]
)
def test_bad_arrays_are_refused(qkv, kind, words):
    assert error_of(lambda: jax_fa.attention(*qkv)) == (kind, words)


@pytest.mark.parametrize(
    ("options", "kind", "words"), OPTIONS, ids=lambda x: "+".join(x) if isinstance(x, dict) else ""
)
@pytest.mark.usefixtures("no_gpu_kernels")
def test_bad_options_are_refused(options, kind, words):
    assert error_of(lambda: jax_fa.attention(Q, K, V, **options)) == (kind, words)


@pytest.mark.parametrize("name", ["attention_with_lse", "forward", "explain"])
def test_unknown_keyword_is_refused_with_the_known_ones(name):
    kind, words = error_of(lambda: getattr(jax_fa, name)(Q, K, V, causal=True))
    assert kind is TypeError
    assert words.startswith("attention: unknown keyword 'causal'; known are bias, mask, scale, ")


@pytest.mark.parametrize("name", ["bias", "mask", "query_seq_lengths", "key_value_seq_lengths"])
@pytest.mark.parametrize("function", [jax_fa.attention_varlen, jax_fa.explain])
def test_dense_keywords_do_not_apply_to_packed_sequences(function, name):
    cu = jnp.array([0, 5], jnp.int32)
    packing = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    kind, words = error_of(lambda: function(K[0], K[0], V[0], **packing, **{name: zeros(1)}))
    assert kind is TypeError
    assert words == (
        f"attention: {name} does not apply to this function; use seqused_q, seqused_k and segment "
        "ids."
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"query": K},
            "attention_varlen: query should be [total, heads, head size], but has shape "
            "(2, 5, 2, 8).",
        ),
        (
            {"cu_seqlens_q": jnp.zeros((1, 2), jnp.int32)},
            "attention_varlen: cu_seqlens_q should be int32 [M + 1], but has shape (1, 2).",
        ),
        (
            {"cu_seqlens_k": jnp.zeros(3, jnp.int32)},
            "attention: cu_seqlens_k should have shape [2], but has [3].",
        ),
        (
            {"cu_seqlens_k": jnp.zeros(2, jnp.float32)},
            "attention: cu_seqlens_k should be int32, but is float32.",
        ),
        (
            {"seqused_k": jnp.zeros(3, jnp.int32)},
            "attention: seqused_k should have shape [1], but has [3].",
        ),
        (
            {"cu_seqlens_q": np.array([3, 2])},
            "attention_varlen: cu_seqlens_q should ascend from at least 0 to at most 5, the "
            "number of tokens, but is [3, 2].",
        ),
        (
            {"cu_seqlens_k": jnp.array([0, 6])},
            "attention_varlen: cu_seqlens_k should ascend from at least 0 to at most 5, the "
            "number of tokens, but is [0, 6].",
        ),
        (
            {"cu_seqlens_q": [0, 2**32 + 5]},
            "attention: cu_seqlens_q should fit int32, but holds 4294967301.",
        ),
        (
            {"max_seqlen_q": -1},
            "attention_varlen: max_seqlen_q should be None or an upper bound of the lengths, but "
            "is -1.",
        ),
        (
            {"max_seqlen_k": 4},
            "attention_varlen: max_seqlen_k=4 is not an upper bound: cu_seqlens_k has a "
            "sequence of 5 tokens. Leave it out; it is not needed.",
        ),
    ],
)
def test_bad_packed_arguments_are_refused(change, words):
    cu = jnp.array([0, 5], jnp.int32)
    given = {"query": K[0], "key": K[0], "value": V[0], "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    call = lambda: jax_fa.attention_varlen(**{**given, **change})  # noqa: E731
    assert error_of(call) == (ValueError, words)


def test_borders_and_bounds_that_nobody_can_read_are_taken():
    attend = jax.jit(lambda cu: jax_fa.attention_varlen(K[0], K[0], V[0], cu, cu, max_seqlen_q=4))
    attend.trace(jnp.array([0, 6], jnp.int32))


STATIC = {
    "is_causal": True,
    "deterministic": True,
    "return_residual": True,
    "local_window_size": 3,
    "logits_soft_cap": 2.0,
    "implementation": 1,
    "causal_alignment": 1,
    "mask_mod": 1,
}


@pytest.mark.parametrize("name", STATIC)
def test_what_decides_the_program_is_static(name):
    def attend(**option):
        return jax_fa.attention(Q, K, V, **option)

    kind, words = error_of(lambda: jax.jit(attend)(**{name: STATIC[name]}))
    assert kind is TypeError
    assert words.startswith(
        f"attention: {name} decides what is compiled and should be a Python value, but is traced ("
    )
    assert words.endswith(
        "Where a jitted function takes it as an argument, list it in static_argnames of jax.jit."
    )
    if not isinstance(STATIC[name], int) or isinstance(STATIC[name], bool):
        jax.jit(attend, static_argnames=name)(**{name: STATIC[name]})


WIDE = [np.int64, np.uint32, np.uint64]


@pytest.mark.parametrize("is_x64", [False, True])
@pytest.mark.parametrize("dtype", WIDE, ids=lambda dtype: dtype.__name__)
def test_integers_of_wide_types_are_taken_if_their_values_fit(dtype, is_x64):
    """Cut to 32 bits, segments 0 and 2**32 would be one."""
    ids = np.array([[0, 0, 1, 1, 2, 2], [0, 1, 2, 3, 4, 2**31 - 1]])
    too_large = 2**32 - 1 if dtype is np.uint32 else 2**32

    def attend(q_ids, **options):
        return jax_fa.attention(
            Q, K, V, query_segment_ids=q_ids, key_value_segment_ids=IDS_K, **options
        )

    with jax.enable_x64(is_x64):
        for make in (np.asarray, jnp.asarray):
            attend(make(ids.astype(dtype)), query_offset=make(dtype(3)))
        makes = (np.asarray, jnp.asarray) if is_x64 or dtype is np.uint32 else (np.asarray,)
        for make in makes:
            wide = make(np.where(ids == 2, too_large, ids).astype(dtype))
            words = f"attention: query_segment_ids should fit int32, but holds {too_large}."
            assert error_of(lambda wide=wide: attend(wide)) == (ValueError, words)
            offset = make(dtype(too_large))
            words = f"attention: query_offset should fit int32, but holds {too_large}."
            assert error_of(lambda x=offset: attend(IDS_Q, query_offset=x)) == (ValueError, words)
        if jnp.asarray(ids.astype(dtype)).dtype != np.int32:
            kind, words = error_of(lambda: jax.jit(attend)(ids.astype(dtype)))
            assert kind is ValueError and "Convert it with .astype(jnp.int32)." in words


def test_lengths_are_not_cut_to_32_bits():
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        for given in (np.array([2**32, 3]), [2**32, 3]):
            assert error_of(lambda x=given, n=name: jax_fa.attention(Q, K, V, **{n: x})) == (
                ValueError,
                f"attention: {name} should fit int32, but holds 4294967296.",
            )
        with jax.enable_x64(True):
            jax_fa.attention(Q, K, V, **{name: np.array([2, 3])})


def test_kernels_that_were_asked_for_are_not_replaced():
    attend = jax.jit(lambda x: jax_fa.attention(Q, K, V, scale=x, implementation="cpu"))
    kind, words = error_of(lambda: attend(0.5))
    assert kind is NotImplementedError
    assert words == (
        "attention: implementation='cpu' does not serve this call: a traced scale runs unfused; a "
        "Python number lets kernels serve the call. Use implementation=None or 'xla'."
    )


def test_operations_alone_run_nothing_unfused():
    forward = jax.jit(lambda scale: jax_fa.forward(Q, K, V, scale=scale))
    kind, words = error_of(lambda: forward(jnp.float32(0.5)))
    assert kind is NotImplementedError
    assert words == (
        "attention: forward is the kernel operation alone, and a traced scale runs unfused; a "
        "Python number lets kernels serve the call. Use jax_fa.attention."
    )


@pytest.mark.parametrize("name", ["attention_with_lse", "forward"])
def test_cudnn_serves_attention_alone(name):
    kind, words = error_of(lambda: getattr(jax_fa, name)(Q, K, V, implementation="cudnn"))
    assert kind is NotImplementedError
    assert words == (
        "attention: implementation='cudnn' is jax.nn.dot_product_attention and serves "
        "jax_fa.attention alone. Use implementation=None."
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lse": zeros(2, 6, 2)}, "attention: lse should have shape [2, 6, 4], but has [2, 6, 2]."),
        (
            {"lse": zeros(2, 6, 4, dtype=jnp.bfloat16)},
            "attention: lse should be float32, but is bfloat16.",
        ),
        (
            {"dout": zeros(2, 6, 4, 9)},
            "attention: dout should have shape [2, 6, 4, 8], but has [2, 6, 4, 9].",
        ),
    ],
)
def test_backward_checks_what_the_forward_gave(change, words):
    given = {"out": Q, "lse": zeros(2, 6, 4), "dout": Q, **change}
    assert error_of(lambda: jax_fa.backward(Q, K, V, **given)) == (ValueError, words)


NO_DERIVATIVE = (
    "attention: the fused kernels have one derivative, in reverse mode (jax.grad, jax.vjp). For "
    "forward mode (jax.jvp, jax.jacfwd) and for derivatives of derivatives (jax.hessian) use "
    "implementation='xla', which differentiates any number of times in any mode."
)


def scalar(q, implementation=None):
    return jnp.sum(jax_fa.attention(q, K, V, implementation=implementation) ** 2)


DERIVATIVES = {
    "jvp": lambda f: jax.jvp(f, (Q,), (Q,)),
    "jvp under jit": lambda f: jax.jit(lambda q: jax.jvp(f, (q,), (q,)))(Q),
    "jacfwd": lambda f: jax.jacfwd(f)(Q),
    "hessian": lambda f: jax.hessian(f)(Q),
    "grad of grad": lambda f: jax.grad(lambda q: jnp.sum(jax.grad(f)(q) ** 2))(Q),
    "hessian-vector product": lambda f: jax.jvp(jax.grad(f), (Q,), (Q,)),
    "linearize": lambda f: jax.linearize(f, Q)[1](Q),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_derivative_that_does_not_exist_says_what_to_do(derivative):
    assert error_of(lambda: derivative(scalar)) == (NotImplementedError, NO_DERIVATIVE)


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_what_the_error_recommends_works(derivative):
    derivative(jax.jit(lambda q: scalar(q, "xla")))


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_operations_alone_have_no_derivative(name):
    def operation(q):
        more = () if name == "forward" else (Q, zeros(2, 6, 4), Q)
        return jnp.sum(getattr(jax_fa, name)(q, K, V, *more)[0])

    assert error_of(lambda: jax.grad(operation)(Q)) == (NotImplementedError, NO_DERIVATIVE)


def test_extension_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(bindings, "EXTENSION_VERSION", 10**6)
    kind, words = error_of(bindings.register)
    assert kind is ImportError
    assert words.endswith(
        "this package needs version 1000000. Reinstall jax_fa so that both come from one build."
    )


def test_an_exported_program_ends_as_documented_where_nobody_imported_jax_fa(tmp_path):
    checks = jax_fa.export_disabled_checks()
    exported = jax.export.export(
        jax.jit(lambda q: jax_fa.attention(q, K, V)), disabled_checks=checks
    )
    path = tmp_path / "program"
    path.write_bytes(exported(Q).serialize())
    call = f"""
import jax, numpy as np, pathlib
program = jax.export.deserialize(bytearray(pathlib.Path({str(path)!r}).read_bytes()))
try:
    print(program.call(np.zeros((2, 6, 4, 8), np.float32)).shape)
except jax.errors.JaxRuntimeError as error:
    print(error)
"""
    words = "No FFI handler registered for jax_fa_fwd_v1"
    assert words in in_new_process(call)
    assert in_new_process(f"import jax_fa{call}") == "(2, 6, 4, 8)\n"
    documentation = jax_fa.export_disabled_checks.__doc__
    assert "import jax_fa  #" in documentation and words in documentation


# Fallbacks are visible, and say why.


def lowered_for_cuda(**options):
    attend = jax.jit(lambda q: jax_fa.attention(q, K, V, **options))
    return attend.trace(Q).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("no_gpu_kernels")
def test_fallback_warns_once_per_reason():
    with pytest.warns(jax_fa.FallbackWarning, match="installation holds no GPU kernels") as record:
        lowered_for_cuda()
        jax.clear_caches()
        lowered_for_cuda()
    assert len(record) == 1
    assert "computes the 6 x 5 scores in blocks of rows" in str(record[0].message)


def test_reference_that_was_asked_for_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered_for_cuda(implementation="xla")
    assert not fallback._warned


def test_explain_tells_what_would_run():
    shape = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.bfloat16)
    on_cpu = jax_fa.explain(shape, shape, shape, platform="cpu", is_causal=True)
    assert (on_cpu.choice.implementation, on_cpu.choice.is_fallback) == ("cpu", False)
    on_gpu = jax_fa.explain(shape, shape, shape, platform="gpu")
    assert on_gpu.platform == "cuda"
    mask = cast(Any, jax.ShapeDtypeStruct((1, 1, 128, 128), bool))
    masked = jax_fa.explain(shape, shape, shape, platform="cpu", mask=mask)
    assert masked.choice.implementation == "cpu" and "MiB of bits" in str(masked)
    assert jax_fa.explain(shape, shape, shape, None, mask, platform="cpu") == masked
    elsewhere = jax_fa.explain(Q, K, V, platform="tpu").choice
    assert (elsewhere.implementation, elsewhere.is_fallback) == ("xla", True)


NUMPY = {
    "scale": [np.float32(0.5), np.float64(0.5), np.array(0.5), np.int32(1), jnp.float32(0.5)],
    "logits_soft_cap": [np.float32(2.0), np.int64(2), jnp.float32(2.0)],
    "is_causal": [np.bool_(True), np.array(True), jnp.array(True)],
    "deterministic": [np.bool_(True)],
    "local_window_size": [np.int32(2), (np.int64(2), None), np.array([2, 1]), jnp.int32(2), [2, 0]],
    "causal_alignment": [np.str_("bottom_right")],
    "query_offset": [np.int64(3), np.array([3, 4]), 3, [3, 4]],
    "key_value_seq_lengths": [np.array([3, 4]), [3, 4]],
    "sinks": [np.zeros(4), [0.0, -np.inf, 1.0, 2.0]],
}


@pytest.mark.parametrize("name", NUMPY)
def test_values_of_numpy_are_the_same_to_explain_as_to_attention(name):
    for value in NUMPY[name]:
        explained = jax_fa.explain(Q, K, V, **{name: value})
        assert explained.choice.implementation == "cpu", (value, str(explained))
        jax_fa.attention(Q, K, V, implementation="cpu", **{name: value})


def test_explain_takes_a_shape_for_every_array():
    shape = jax.ShapeDtypeStruct
    q, k, v = (shape(x.shape, x.dtype) for x in (Q, K, V))
    explained = jax_fa.explain(
        q,
        k,
        v,
        shape((2, 1, 6, 5), jnp.float32),
        shape((6, 5), bool),
        query_seq_lengths=shape((2,), jnp.int32),
        query_segment_ids=shape((2, 6), jnp.int32),
        key_value_segment_ids=shape((2, 5), jnp.int32),
        query_offset=shape((), jnp.int32),
        sinks=shape((4,), jnp.float32),
        scale=0.5,
    )
    assert explained.choice.implementation == "cpu" and explained.problem.has_bias
    traced = jax_fa.explain(Q, K, V, scale=shape((), jnp.float32))
    assert "a traced scale runs unfused" in str(traced)


CU_Q, CU_K = np.array([0, 2, 6], np.int32), np.array([0, 4, 5], np.int32)
PACKED = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "seqused_k": [3, 1]}])
def test_explain_tells_what_a_packed_call_runs_and_what_is_packed(options):
    explained = jax_fa.explain(Q[0], K[0], V[0], platform="cpu", **PACKED, **options)
    assert str(explained) == (
        "cpu: cpu (fwd_cpu): compiled kernels serve this problem on cpu. Packed: 2 sequences in 6 "
        "rows of query, and in 5 of key and value"
    )
    problem = explained.problem
    assert (problem.is_packed, problem.num_sequences, problem.has_lengths) == (
        *(True, 2),
        "seqused_k" in options,
    )
    text = jax.jit(lambda: jax_fa.attention_varlen(Q[0], K[0], V[0], **PACKED, **options)).lower()
    assert "jax_fa_fwd_v1" in text.as_text()


def test_explain_of_a_packed_call_takes_a_shape_for_every_array():
    def shape(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    packing = {name: shape(x) for name, x in PACKED.items()}
    used = jax.ShapeDtypeStruct((2,), jnp.int32)
    explained = jax_fa.explain(
        *(shape(x[0]) for x in (Q, K, V)), **packing, seqused_q=used, seqused_k=used, max_seqlen_q=4
    )
    assert explained.choice.kernel == "fwd_cpu" and explained.problem.is_packed


@pytest.mark.usefixtures("no_gpu_kernels")
def test_a_packed_call_without_gpu_kernels_prints_the_command_that_explain_prints():
    attend = jax.jit(lambda q: jax_fa.attention_varlen(q, K[0], V[0], **PACKED))
    with pytest.warns(jax_fa.FallbackWarning) as record:
        attend.trace(Q[0]).lower(lowering_platforms=("cuda",))
    explained = str(jax_fa.explain(Q[0], K[0], V[0], platform="cuda", **PACKED))
    for text in (str(record[0].message), explained):
        assert f"`{installation.command(['all'])}`" in text
    assert ". Packed: 2 sequences" in explained and ".." not in explained


@pytest.mark.parametrize("missing", PACKED)
def test_explain_of_a_packed_call_needs_the_borders_of_both(missing):
    given = {name: x for name, x in PACKED.items() if name != missing}
    kind, words = error_of(lambda: jax_fa.explain(Q[0], K[0], V[0], **given))
    assert kind is ValueError
    assert words.startswith(f"attention: {missing} should be ") and words.endswith("is None.")


def test_bias_and_mask_have_the_same_positions_everywhere():
    bias, mask = zeros(6, 5) + jnp.arange(5.0), jnp.arange(5) < 3
    want = jax_fa.attention(Q, K, V, bias, mask, return_residual=True)
    got = jax_fa.attention_with_lse(Q, K, V, bias, mask)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_explain_knows_the_platforms():
    assert error_of(lambda: jax_fa.explain(Q, K, V, platform="nvidia")) == (
        ValueError,
        "attention: platform='nvidia' is unknown; use None or one of 'cpu', 'cuda', 'gpu', "
        "'rocm', 'tpu'.",
    )


def test_explain_refuses_what_attention_refuses():
    with pytest.raises(ValueError, match="go together"):
        jax_fa.explain(Q, K, V, query_segment_ids=IDS_Q)
    with pytest.raises(NotImplementedError, match="implementation='cuda'"):
        jax_fa.explain(Q, K, V, platform="cpu", implementation="cuda")


@pytest.mark.filterwarnings("ignore::jax_fa.FallbackWarning")
def test_float64_runs_unfused_and_exact():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).standard_normal((1, 5, 2, 8))
        out, lse = jax_fa.attention_with_lse(x, x, x)
        assert out.dtype == jnp.float64
        assert "not float64" in str(jax_fa.explain(x, x, x, platform="cpu"))
        with pytest.raises(NotImplementedError, match="not float64"):
            jax_fa.attention(x, x, x, implementation="cpu")


@pytest.mark.filterwarnings("ignore::jax_fa.FallbackWarning")
def test_types_in_64_bit_mode():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).standard_normal((1, 5, 2, 8))
        narrow = x.astype(np.float32)
        attend = jax.jit(
            lambda scale: jax_fa.attention_with_lse(narrow, narrow, narrow, scale=scale)
        )
        out, lse = attend(np.float64(0.3))
        assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)

        def loss(sinks):
            return jnp.sum(jax_fa.attention(x, x, x, sinks=sinks) ** 2)

        check_grads(loss, (np.array([0.1, -0.7]),), 1, modes=["rev"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("reason", ["a traced scale", "not float64", "mask function of packed"])
def test_what_no_kernel_serves_runs_unfused_with_a_warning(reason):
    """Also where kernels of the platform serve other calls, such as on the CPU."""

    def attend(scale):
        if reason == "not float64":
            with jax.enable_x64(True):
                x = np.zeros((1, 4, 2, 8))
                return jax_fa.attention(x, x, x)
        if reason == "a traced scale":
            return jax_fa.attention(Q, K, V, scale=scale)
        seen = mask_mods.chunked(2)
        return jax_fa.attention_varlen(Q[0], K[0], V[0], **PACKED, mask_mod=seen)

    with pytest.warns(jax_fa.FallbackWarning, match=reason) as record:
        for _ in range(2):
            jax.jit(attend)(0.5)
            jax.clear_caches()
    assert len(record) == 1
