"""Mask functions: what they say as a mask; where they come from; what is refused, word for word."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa
from jax_fa import mask_mods
from jax_fa.runtime import mask_functions, masks

B, T, S, N, K = 2, 70, 90, 4, 2
DOCUMENTS = jnp.asarray(np.random.default_rng(7).integers(0, 3, (B, S)), jnp.int32)
FUNCTIONS = {
    "chunked": mask_mods.chunked(16),
    "prefix_lm": mask_mods.prefix_lm(20),
    "strided": lambda b, h, i, j: (j <= i) & ((i - j) % 3 == 0),
    "by_head": lambda b, h, i, j: (h % 2 == 0) | (j <= i),
    "by_batch": lambda b, h, i, j: DOCUMENTS[b, i] == DOCUMENTS[b, j],
    "of_keys": lambda b, h, i, j: j % 3 == 0,
    "of_rows": lambda b, h, i, j: i % 5 != 0,
    "of_heads": lambda b, h, i, j: h != 1,
    "everything": lambda *_: True,
    "of_numbers": jnp.vectorize(lambda b, h, i, j: jnp.where(b == 0, i >= j, i < j)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"is_causal": True},
    "bottom_right": {"causal_alignment": "bottom_right", "local_window_size": (30, 10)},
    "offset": {"query_offset": jnp.asarray([3, 11], jnp.int32)},
    "lengths": {
        "causal_alignment": "bottom_right",
        "query_seq_lengths": jnp.asarray([70, 33], jnp.int32),
        "key_value_seq_lengths": jnp.asarray([90, 41], jnp.int32),
    },
}


def drawn(seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((B, T, N, 16), (B, S, K, 16), (B, S, K, 16))
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def as_mask(function, options):
    """bool [B, N, T, S]: the function, asked about every pair."""
    shift = np.zeros(B, int)
    if "query_offset" in options:
        shift = np.asarray(options["query_offset"])
    elif options.get("causal_alignment") == "bottom_right":
        lengths = [options.get(f"{side}_seq_lengths") for side in ("query", "key_value")]
        rows, keys = (
            n if x is None else np.asarray(x) for x, n in zip(lengths, (T, S), strict=True)
        )
        shift = np.broadcast_to(keys - rows, (B,))
    b, h, i, j = np.ix_(np.arange(B), np.arange(N), np.arange(T), np.arange(S))
    said = function(b, h, i + shift.reshape(-1, 1, 1, 1), j)
    return jnp.broadcast_to(jnp.asarray(said), (B, N, T, S))


def results(*qkv, **options):
    out, pullback = jax.vjp(lambda *qkv: jax_fa.attention(*qkv, **options), *qkv)
    return out, *pullback(jnp.cos(out))


@pytest.mark.parametrize(
    ("name", "how", "implementation"),
    [
        *((name, "alone", None) for name in FUNCTIONS),
        *((name, "causal", "xla") for name in FUNCTIONS),
        *((name, how, None) for name in ("strided", "by_head") for how in OPTIONS),
    ],
)
def test_a_function_is_the_mask_that_it_says(name, how, implementation):
    function, options = FUNCTIONS[name], {**OPTIONS[how], "implementation": implementation}
    mask = as_mask(function, options)
    got = jax.jit(lambda *qkv: results(*qkv, mask_mod=function, **options))(*drawn())
    want = jax.jit(lambda *qkv: results(*qkv, mask=mask, **options))(*drawn())
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def test_built_in_functions_say_what_their_names_do():
    for i in range(20):
        for j in range(20):
            in_chunk = j <= i and i // 7 == j // 7
            assert mask_mods.chunked(7)(0, 0, i, j) == in_chunk
            assert mask_mods.prefix_lm(7)(0, 0, i, j) == (j <= i or j < 7)


@pytest.mark.parametrize("name", ["chunked", "by_batch", "of_heads"])
def test_a_function_and_a_mask_hide_together(name):
    mask = jnp.asarray(np.random.default_rng(1).random((1, N, T, S)) < 0.6)
    both = mask & as_mask(FUNCTIONS[name], {})
    got = results(*drawn(), mask=mask, mask_mod=FUNCTIONS[name])
    for a, b in zip(got, results(*drawn(), mask=both), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.filterwarnings("ignore::jax_fa.FallbackWarning")
def test_a_function_over_packed_sequences_counts_within_them():
    q, k, v = (x[0] for x in drawn())
    cu_q, cu_k = jnp.asarray([0, 30, 70], jnp.int32), jnp.asarray([0, 50, 90], jnp.int32)
    function = mask_mods.chunked(8)
    packing = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "mask_mod": function}
    got = jax.jit(lambda *qkv: jax_fa.attention_varlen(*qkv, **packing))(q, k, v)
    assert "a mask function of packed sequences" in str(jax_fa.explain(q, k, v, **packing))
    for rows, keys in ((slice(0, 30), slice(0, 50)), (slice(30, 70), slice(50, 90))):
        want = jax_fa.attention(q[rows], k[keys], v[keys], mask_mod=function)
        np.testing.assert_allclose(got[rows], want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_blocks_of_rows_make_the_same_words(name, monkeypatch):
    q, k, _ = drawn()
    operands = jax_fa.spec.problem.Operands(q, k, k)
    semantics = jax_fa.spec.problem.Semantics(1.0)
    at = mask_functions.places(operands, semantics, (T, S))
    whole = mask_functions.words(FUNCTIONS[name], at)
    monkeypatch.setattr(mask_functions, "PAIRS", 9 * S)
    np.testing.assert_array_equal(mask_functions.words(FUNCTIONS[name], at), whole)
    pairs = np.broadcast_to(masks.unpacked(whole, T, S), (B, N, T, S))
    np.testing.assert_array_equal(pairs, as_mask(FUNCTIONS[name], {}))


@pytest.mark.parametrize("count", [S, 96])
def test_keys_are_evaluated_in_an_order_that_no_word_shows(count):
    """Also where they fill whole words, and where the function has all of them in an array."""
    array = jnp.asarray(np.random.default_rng(3).random((T, count)) < 0.5)
    q = jnp.zeros((B, T, N, 16))
    operands = jax_fa.spec.problem.Operands(q, q[:, :1].repeat(count, axis=1), q)
    at = mask_functions.places(operands, jax_fa.spec.problem.Semantics(1.0), (T, count))
    for function in (lambda b, h, i, j: array[i, j], lambda *_: array):
        words = mask_functions.words(function, at)
        np.testing.assert_array_equal(masks.unpacked(words, T, count)[0, 0], array)
        np.testing.assert_array_equal(words[0, 0], masks.packed(array))


def test_outside_jit_a_function_may_look_at_numbers():
    """It is refused where it is traced; here, only the order of keys is settled by a trace."""

    def function(batch, q_head, q_position, kv_position):
        return jnp.asarray(np.asarray(kv_position <= q_position))

    got = jax_fa.attention(*drawn(), mask_mod=function)
    wanted = jax_fa.attention(*drawn(), is_causal=True)
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-6)


def test_a_function_is_evaluated_anew_in_every_call():
    class Documents:
        ids = DOCUMENTS

        def same(self, batch, q_head, q_position, kv_position):
            return self.ids[batch, q_position] == self.ids[batch, kv_position]

    documents = Documents()
    first = jax_fa.attention(*drawn(), mask_mod=documents.same)
    documents.ids = DOCUMENTS[:, ::-1]
    q, k, v = drawn()
    want = jax_fa.attention(q, k, v, mask=as_mask(documents.same, {}))
    np.testing.assert_array_equal(jax_fa.attention(q, k, v, mask_mod=documents.same), want)
    assert (first != jax_fa.attention(*drawn(), mask_mod=documents.same)).any()


def test_a_function_reads_traced_arrays_under_transformations():
    def attend(ids, q, k, v):
        return jax_fa.attention(q, k, v, mask_mod=lambda b, h, i, j: ids[b, i] == ids[b, j])

    ids = jnp.stack([DOCUMENTS, DOCUMENTS[:, ::-1], DOCUMENTS * 0])
    got = jax.jit(jax.vmap(attend, (0, None, None, None)))(ids, *drawn())
    for i in range(3):
        np.testing.assert_allclose(got[i], attend(ids[i], *drawn()), rtol=2e-6, atol=2e-6)


def test_no_array_of_all_pairs_exists():
    q = jax.ShapeDtypeStruct((1, 8192, 2, 16), jnp.float32)

    def loss(q, k, v):
        return jax_fa.attention(q, k, v, mask_mod=mask_mods.chunked(512)).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, q, q).compile()
    text = compiled.as_text()
    assert "jax_fa_fwd" in text and "jax_fa_bwd" in text
    # 8 MiB of words, and of gradients; all pairs would be 64 MiB in bool.
    assert compiled.memory_analysis().temp_size_in_bytes < 48 * 2**20


def test_explain_says_how_many_bits():
    text = str(jax_fa.explain(*drawn(), mask_mod=FUNCTIONS["by_head"]))
    assert text.startswith("cpu: cpu (fwd_cpu)") and "Mask: 0.0032 MiB of bits" in text


PLACES = (
    "attention: mask_mod, called with int32 arrays batch [2, 1, 1, 1], q_head [1, 4, 1, 1], "
    "q_position [1, 1, 70, 1], kv_position [1, 1, 1, 90], "
)
ADVICE = (
    " It should be made of operations of jax.numpy on arrays that broadcast; jnp.vectorize makes "
    "such a function of one of single numbers."
)


def of_two(q_position, kv_position):
    """Of too few arguments."""
    return q_position >= kv_position


def of_no_words(*_):
    """Fails without a text."""
    raise AssertionError


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (
            "chunked_3",
            TypeError,
            "attention: mask_mod should be a function (batch, q_head, q_position, kv_position) -> "
            "bool, such as jax_fa.mask_mods.chunked(1024), but is 'chunked_3'.",
        ),
        (
            of_two,
            ValueError,
            f"{PLACES}fails: of_two() takes 2 positional arguments but 4 were given.{ADVICE}",
        ),
        (of_no_words, ValueError, f"{PLACES}fails: AssertionError.{ADVICE}"),
        (
            lambda b, h, i, j: bool(i < j),
            ValueError,
            f"{PLACES}fails: The truth value of an array with more than one element is ambiguous. "
            f"Use a.any() or a.all().{ADVICE}",
        ),
        (
            lambda *_: None,
            ValueError,
            f"{PLACES}should say for each pair whether the query sees the key, in bool, but gives "
            f"None.{ADVICE}",
        ),
        (
            lambda b, h, i, j: i - j,
            ValueError,
            f"{PLACES}should say for each pair whether the query sees the key, in bool, but gives "
            f"int32[1, 1, 70, 90].{ADVICE}",
        ),
        (
            lambda *_: jnp.ones((3, 90), bool),
            ValueError,
            f"{PLACES}should give an array that broadcasts to [B, N, T, S] = [2, 4, 70, 90], but "
            f"gives one of shape [3, 90].{ADVICE}",
        ),
    ],
)
def test_what_is_no_function_is_refused(given, error, words):
    with pytest.raises(error, match=f"^{re.escape(words)}$"):
        jax_fa.attention(*drawn(), mask_mod=given)


def test_implementations_that_have_no_functions_say_so():
    with pytest.raises(NotImplementedError, match="which has no mask_mod. Use"):
        jax_fa.attention(*drawn(), mask_mod=mask_mods.chunked(3), implementation="cudnn")


@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(0, 4, 7), (2, 0, 7), (2, 4, 0)])
def test_a_function_of_nothing_gives_nothing(batch, q_len, kv_len):
    q, k = np.zeros((batch, q_len, 4, 8), np.float32), np.zeros((batch, kv_len, 2, 8), np.float32)
    out = jax_fa.attention(q, k, k, mask_mod=mask_mods.chunked(2))
    np.testing.assert_array_equal(out, np.zeros_like(q))


@pytest.mark.parametrize(
    "given",
    [
        {"mask_mod": mask_mods.chunked(2)},
        {"mask": lambda k: (jnp.arange(k.shape[1]) % 3 != 0)[None, None, None]},
        {"block_mask": np.array([True, False]).reshape(2, 1, 1, 1)},
    ],
    ids=lambda given: next(iter(given)),
)
@pytest.mark.parametrize("extents", ["2,T,4,8;2,7,2,8", "2,5,4,8;2,S,2,8", "2,T,4,8;2,S,2,8"])
@pytest.mark.filterwarnings("ignore::jax_fa.FallbackWarning")
def test_a_call_is_exported_with_open_extents(given, extents):
    scope = jax.export.SymbolicScope()
    shapes = [jax.export.symbolic_shape(x, scope=scope) for x in extents.split(";")]
    q, k = (jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes)

    def attend(q, k):
        options = {name: x(k) if name == "mask" else x for name, x in given.items()}
        return jax_fa.attention(q, k, k, **options)

    checks = jax_fa.export_disabled_checks()
    exported = jax.export.export(jax.jit(attend), disabled_checks=checks)(q, k)
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal(x).astype(np.float32) for x in ((2, 5, 4, 8), (2, 7, 2, 8)))
    np.testing.assert_allclose(exported.call(q, k), attend(q, k), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::jax_fa.FallbackWarning")
def test_a_block_mask_is_exported_with_open_extents():
    scope = jax.export.SymbolicScope()
    q_len, kv_len = (jax.export.symbolic_shape(name, scope=scope)[0] for name in "TS")
    arguments = (
        jax.ShapeDtypeStruct((2, q_len, 4, 8), jnp.float32),
        jax.ShapeDtypeStruct((2, kv_len, 2, 8), jnp.float32),
        jax.ShapeDtypeStruct((2, 1, (q_len + 127) // 128, (kv_len + 127) // 128), bool),
    )

    def attend(q, k, blocks):
        return jax_fa.attention(q, k, k, block_mask=blocks)

    checks = jax_fa.export_disabled_checks()
    exported = jax.export.export(jax.jit(attend), disabled_checks=checks)(*arguments)
    rng = np.random.default_rng(0)
    for q_len, kv_len in ((5, 300), (150, 128)):
        q = rng.standard_normal((2, q_len, 4, 8)).astype(np.float32)
        k = rng.standard_normal((2, kv_len, 2, 8)).astype(np.float32)
        blocks = rng.random((2, 1, -(-q_len // 128), -(-kv_len // 128))) < 0.6
        got = exported.call(q, k, blocks)
        np.testing.assert_allclose(got, attend(q, k, blocks), rtol=1e-5, atol=1e-6)
