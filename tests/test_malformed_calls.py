"""Hundreds of malformed calls of every public function: each is refused, in our words.

A table of bad values per argument, tried in each function that has the argument.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import jax_fa

Q, K, V = np.zeros((2, 6, 4, 8), np.float32), *(np.zeros((2, 5, 2, 8), np.float32),) * 2
LSE, CU = np.zeros((2, 6, 4), np.float32), np.array([0, 2, 5], np.int32)
IDS_Q, IDS_K = np.zeros((2, 6), np.int32), np.zeros((2, 5), np.int32)
LONG, UNSIGNED = np.array([2**32, 1]), np.array([2**32 - 1, 1], np.uint32)
DENSE = {"query": Q, "key": K, "value": V}
PACKED = {"query": V[0], "key": K[0], "value": V[0], "cu_seqlens_q": CU, "cu_seqlens_k": CU}

FUNCTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "attention": (jax_fa.attention, DENSE),
    "attention_with_lse": (jax_fa.attention_with_lse, DENSE),
    "attention_varlen": (jax_fa.attention_varlen, PACKED),
    "forward": (jax_fa.forward, DENSE),
    "backward": (jax_fa.backward, {**DENSE, "out": Q, "lse": LSE, "dout": Q, "dlse": LSE}),
    "explain": (jax_fa.explain, DENSE),
    "explain, packed": (jax_fa.explain, PACKED),
}


class Traced(NamedTuple):
    """The argument of a jitted function, where it is not static."""

    value: Any


class Thing:
    """What nothing can be made of."""

    def __repr__(self):
        return "Thing()"


STRUCT = jax.ShapeDtypeStruct((2, 6, 4, 8), jnp.float32)
NO_ARRAYS = [
    *("x", b"x", Thing(), {}, {1.0}, lambda: 0, [[1.0], [1.0, 2.0]], [None], range),
    *(np.array([Thing()]), np.array(["a"]), np.zeros((2, 5), "datetime64[s]"), [10**400]),
    *(np.zeros(2, [("a", "f4")]), sparse.BCOO.fromdense(jnp.ones((2, 5)))),
]
KEYS = jax.random.split(jax.random.key(0), Q.shape)
NO_QKV = [
    *(None, *NO_ARRAYS, 1.0, Q[0, 0, 0], Q[0, 0], Q[None], Q.astype(complex), Q.astype(int)),
    *(jax.random.key(0), KEYS, Traced(Q[0, 0]), Q.astype(np.float16), Q[:, :, :3, :4]),
]
NO_INTEGERS = [
    *(*NO_ARRAYS, 1.5, [1.5, 2.5], np.ones(2), np.ones(2, complex), True, [True, False]),
    *(2**31, -(2**31) - 1, [2**40, 1], [10**30, 1], LONG, UNSIGNED, np.zeros((3, 3), np.int32)),
    *(Traced(UNSIGNED), Traced(np.ones(2, np.float32)), jnp.asarray(UNSIGNED), jax.random.key(0)),
]
NO_FLAG = [
    *("False", "yes", "", b"", 0, 1, 1.0, None, [], [True], (), {}, Thing(), np.float32(1)),
    *(np.int64(1), np.array([True, False]), jnp.ones(1, bool), jnp.int32(1), Traced(True)),
]
NO_NUMBER = [
    *("x", "0.5", b"1", "", 1j, np.complex64(1), float("nan"), float("inf"), -np.inf, 10**400),
    *(1e-40, 1e31, -1e31, np.float64("nan"), np.float32("inf"), jnp.float32("nan"), True),
    *(np.bool_(1), [1.0], (), {}, Thing(), np.ones(3), jnp.ones(1), "nan", max),
    *(Traced(np.ones(3, np.float32)), Traced(np.complex64(1)), Traced(True)),
]
NO_NAME = [
    *("", "flash", 0, 1, 1.0, b"xla", ["xla"], ("xla",), {}, Thing(), True, np.array(["xla"])),
    *(np.ones(2), jnp.int32(0), Traced(1), Traced(np.ones(2))),
]
NO_INTEGER = [
    *("3", 3.0, (1.0, 2), (1,), (1, 2, 3), [], True, (True, False), Thing(), {1, 2}, {}),
    *(np.ones((2, 2), int), np.float32(3), ("a", "b"), ("1", "2"), np.ones(2), jnp.ones(3, int)),
    *(1j, np.array([1, 2, 3]), Traced(3), Traced(np.array([1, 2])), float("inf"), max),
]
BAD: dict[str, list[Any]] = {
    "query": NO_QKV,
    "key": NO_QKV,
    "value": NO_QKV,
    "bias": [*NO_ARRAYS, np.zeros((2, 3, 6, 5)), np.zeros((2, 4, 6, 5), complex), Q[None], KEYS],
    "mask": [*NO_ARRAYS, np.ones((2, 3, 6, 5), bool), np.ones((2, 4, 6, 5)), 1, [1.0], KEYS],
    "block_mask": [*NO_ARRAYS, np.ones((2, 3, 1, 1), bool), np.ones((2, 4, 1, 1)), 1, KEYS],
    "query_seq_lengths": [*NO_INTEGERS, 1, [1], [1, 2, 3], np.ones(2, np.int16)],
    "key_value_seq_lengths": [*NO_INTEGERS, Traced(np.ones(3, np.int32))],
    "query_segment_ids": [*NO_INTEGERS, 0, IDS_Q[:, :3], IDS_Q.astype(np.float32), IDS_Q],
    "key_value_segment_ids": [*NO_INTEGERS, IDS_K, Traced(IDS_K.astype(np.uint32))],
    "query_offset": [*(x for x in NO_INTEGERS if not isinstance(x, np.ndarray) or x.size > 1)],
    "sinks": [
        *NO_ARRAYS,
        1.0,
        np.zeros(3),
        np.zeros(4, int),
        np.zeros(4, complex),
        np.full(4, 1e5),
    ],
    "scale": NO_NUMBER,
    "logits_soft_cap": [*NO_NUMBER, 0, -1.0, 1e5, 1e-5, Traced(np.float32(1))],
    "is_causal": NO_FLAG,
    "deterministic": NO_FLAG,
    "return_residual": NO_FLAG,
    "local_window_size": NO_INTEGER,
    "implementation": NO_NAME,
    "causal_alignment": [*NO_NAME, "Top_left", None],
    "mask_mod": [
        *("chunked_8", 3, True, np.ones((4, 4), bool), jnp.ones(4), Traced(np.int32(1)), []),
        *(lambda: True, lambda i, j: i < j, lambda b, h, i, j: None, lambda b, h, i, j: i - j),
        *(lambda b, h, i, j: jnp.ones((7, 1), bool), lambda b, h, i, j: bool(i < j)),
    ],
    "cu_seqlens_q": [
        *(None, *NO_INTEGERS, 0, [], [0, 3, 2], [-1, 2, 5], [0, 2, 6], [0, 5], CU.astype(np.int16)),
        *(jnp.array([0, 4, 3]), Traced(CU.astype(np.float32)), Traced(CU[None])),
    ],
    "cu_seqlens_k": [*NO_INTEGERS, [0, 3, 2], [-1, 2, 5], [0, 2, 6], [0, 2, 2**31 - 1]],
    "max_seqlen_q": [*NO_INTEGER, -1, 2],
    "max_seqlen_k": [*NO_INTEGER, -(10**30), 0],
    "seqused_q": NO_INTEGERS,
    "seqused_k": NO_INTEGERS,
    "out": [None, *NO_ARRAYS, Q[0], Q[..., :4], Q.astype(np.float16)],
    "lse": [None, *NO_ARRAYS, 0.0, LSE[0], LSE.astype(np.float16)],
    "dout": [None, *NO_ARRAYS, 0.0, Q[0], Q.astype(int)],
    "dlse": [*NO_ARRAYS, 0.0, LSE[0], LSE.astype(bool)],
    "platform": [*NO_NAME, "CUDA", "gpus"],
    "causal": [True],
    "dropout_rate": [0.1],
}
"""What no function takes, by argument."""

PACKING = {
    *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k")
}
ONLY = {
    "attention": {"return_residual"},
    "attention_varlen": PACKING,
    "backward": {"out", "lse", "dout", "dlse"},
    "explain": {"platform"},
    "explain, packed": {"platform", *PACKING},
}
"""Arguments of one function; Python itself refuses those of `attention` that nobody knows."""
DENSE_ONLY = {"bias", "mask", "query_seq_lengths", "key_value_seq_lengths"}
NOT = {
    "attention": {"causal", "dropout_rate"},
    "attention_varlen": DENSE_ONLY,
    "explain, packed": DENSE_ONLY,
}
FOR_ONE = set().union(*ONLY.values())


def calls(function):
    """(argument, bad value) of a function."""
    for name, values in BAD.items():
        if name in ONLY.get(function, ()) or name not in FOR_ONE | NOT.get(function, set()):
            yield from ((name, value) for value in values)


def call(function, name, value):
    """Calls with one bad value; a traced one comes from the argument of a traced function."""
    run, given = FUNCTIONS[function]
    if not isinstance(value, Traced):
        return run(**{**given, name: value})
    return jax.eval_shape(lambda x: (run(**{**given, name: x}), None)[1], value.value)


def complaint(function, name, value):
    """What is wrong with the answer to a call; None if it is ours."""
    try:
        call(function, name, value)
    except (ValueError, TypeError, NotImplementedError) as error:
        words = str(error)
        is_ours = type(error) in (ValueError, TypeError, NotImplementedError)
        is_ours &= words.startswith(("attention: ", "attention_varlen: ")) and len(words) < 400
        return None if is_ours and ("\n" not in words) else f"{type(error).__name__}: {words[:200]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "accepted"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_malformed_call_is_refused_in_our_words(function):
    answers = {
        (name, repr(value)[:80]): complaint(function, name, value)
        for name, value in calls(function)
    }
    assert {what: words for what, words in answers.items() if words is not None} == {}


def test_the_table_holds_many_calls():
    assert sum(len(list(calls(function))) for function in FUNCTIONS) >= 500
