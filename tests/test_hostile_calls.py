"""The FFI targets called directly, with arguments that no function of ours would hand over.

A call is refused with a text of ours or gives right results, whatever lengths, borders, offsets and
segments hold. ``ffi/handlers_fuzz.cc`` does the same without XLA, and therefore under sanitizers.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers.oracle import attend

from jax_fa.runtime import bindings
from jax_fa.spec import schema
from jax_fa.spec.band import UNBOUNDED, Band
from jax_fa.spec.problem import Operands, Semantics

NUM_CALLS = 300
ENDS = (-(2**31), -(2**31) + 1, -UNBOUNDED, -1, 0, 1, UNBOUNDED, 2**31 - 1)
Arrays = dict[str, Any]


class Call:
    """One call: results that are asked for, operands and attributes, by name and in order."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.backward = bool(self.rng.integers(2))
        dtype = self.one_of((np.float32, ml_dtypes.bfloat16, np.float16))
        self.dtype = np.dtype(dtype)
        self.is_packed = self.maybe(0.4)
        batch = 1 if self.is_packed else int(self.rng.integers(1, 4))
        self.sequences = int(self.rng.integers(1, 6)) if self.is_packed else batch
        q_len, kv_len = self.one_of((1, 2, 7, 40)), self.one_of((1, 3, 8, 65))
        kv_heads = int(self.rng.integers(1, 3))
        heads = kv_heads * self.one_of((1, 1, 3))
        dim, value_dim = self.one_of((1, 3, 16, 64)), self.one_of((1, 8, 16))
        self.operands = Operands(
            self.normal((batch, q_len, heads, dim)),
            self.normal((batch, kv_len, kv_heads, dim)),
            self.normal((batch, kv_len, kv_heads, value_dim)),
            **self.extras(batch, q_len, kv_len, heads),
        )
        alignment = self.one_of(("top_left", "bottom_right"))
        band = Band(self.maybe(0.4), self.one_of((None, None, 0, 3, -2)), None, alignment)
        self.semantics = Semantics(0.25, band, self.one_of((None, None, 5.0)))
        arrays = bindings._inputs("fwd", self.operands, None)
        self.inputs: Arrays = dict(zip(Operands._fields, arrays, strict=True))
        self.attributes = bindings._attributes(self.semantics)
        out = jax.ShapeDtypeStruct((batch, q_len, heads, value_dim), self.dtype)
        lse = jax.ShapeDtypeStruct((batch, q_len, heads), np.float32)
        self.cotangents = (
            self.normal(out.shape),
            self.normal(lse.shape).astype(np.float32),
        )
        self.results: Arrays = {"out": out, "lse": lse}
        if self.backward:
            saved = attend(self.meant, self.semantics)
            self.inputs["out"] = saved.out.astype(self.dtype)
            self.inputs["lse"] = saved.lse.astype(np.float32)
            self.inputs["dout"], self.inputs["dlse"] = self.cotangents
            order = [array.name for array in schema.OPERATIONS["bwd"].operands]
            self.inputs = {name: self.inputs[name] for name in order}
            names = ("q", "k", "v", "sinks")
            self.results = {
                f"d{name}": jax.ShapeDtypeStruct(self.inputs[name].shape, self.inputs[name].dtype)
                for name in names
            }

    def one_of(self, values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def maybe(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(self.dtype)

    def ints(self, count: int, largest: int) -> np.ndarray:
        """Lengths, borders or offsets: some that fit, some at the ends of int32."""
        ends = self.rng.choice(ENDS, count)
        fitting = self.rng.integers(-2, largest + 3, count)
        return np.where(self.rng.random(count) < 0.3, ends, fitting).astype(np.int32)

    def extras(self, batch: int, q_len: int, kv_len: int, heads: int) -> Arrays:
        extras: Arrays = {}
        sequences = self.sequences
        if self.is_packed:
            order = self.one_of((np.sort, np.asarray))
            extras["cu_seqlens_q"] = order(self.ints(sequences + 1, q_len))
            extras["cu_seqlens_k"] = order(self.ints(sequences + 1, kv_len))
        for name, largest in (("q_lengths", q_len), ("kv_lengths", kv_len), ("q_offset", kv_len)):
            if self.maybe(0.4):
                extras[name] = self.ints(sequences, largest)
        if self.maybe(0.3):
            ids = np.array(self.one_of(((0, 1, 2), ENDS)), np.int32)
            extras["q_segments"] = self.rng.choice(ids, (batch, q_len))
            extras["kv_segments"] = self.rng.choice(ids, (batch, kv_len))
        if self.maybe(0.3):
            extras["sinks"] = self.rng.standard_normal((sequences, heads)).astype(np.float32)
        rng = self.rng.spawn(1)[0]
        if not self.is_packed and rng.random() < 0.3:
            by_blocks = -(-q_len // 128)
            shape = [int(rng.choice((1, x))) for x in (batch, heads)]
            shape.append(int(rng.choice((1, q_len, by_blocks))))
            width = -(-kv_len // 32)
            words = rng.integers(ENDS[0], ENDS[-1], (*shape, width))
            extras["mask_words"] = words.astype(np.int32)
            stripes = min(8 * min(shape[2], by_blocks), -(-q_len // 16))
            blocks = (*shape[:2], 2, stripes, -(-width // 16))
            extras["mask_map"] = np.zeros(blocks, np.int32)
        return extras

    @property
    def meant(self) -> Operands:
        """The same with valid borders: each the largest so far of those clamped to the array."""
        operands = self.operands
        if not self.is_packed:
            return operands
        borders = {
            "cu_seqlens_q": (operands.cu_seqlens_q, operands.q.shape[1]),
            "cu_seqlens_k": (operands.cu_seqlens_k, operands.k.shape[1]),
        }
        return operands._replace(
            **{
                name: np.maximum.accumulate(np.clip(cu, 0, total))
                for name, (cu, total) in borders.items()
            }
        )

    def run(self) -> list[np.ndarray]:
        target = bindings.BACKWARD_TARGET if self.backward else bindings.FORWARD_TARGET
        call = jax.ffi.ffi_call(target, tuple(self.results.values()))
        return [np.asarray(x) for x in call(*self.inputs.values(), **self.attributes)]

    def check(self, got: list[np.ndarray], label: str) -> None:
        """That the results of a call without faults are right."""
        exact = attend(self.meant, self.semantics, self.cotangents if self.backward else None)
        tolerance = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}[self.dtype.name]
        for name, x in zip(self.results, got, strict=True):
            wanted = getattr(exact, name)
            if wanted is None:  # no sinks
                continue
            x = x.astype(np.float64)
            x = x.sum(0) if name == "dsinks" else x
            largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=1)
            np.testing.assert_allclose(
                x, wanted, 0, tolerance * largest, err_msg=f"{label}: {name}"
            )


# ------------------------------------------------------------------------------------------ faults


def _some_array(call: Call) -> tuple[Arrays, str]:
    arrays = call.one_of((call.inputs, call.inputs, call.results))
    return arrays, call.one_of(sorted(arrays))


def _reshaped(array: Any, shape: tuple[int, ...], dtype: Any = None) -> Any:
    dtype = array.dtype if dtype is None else dtype
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, dtype)
    return np.zeros(shape, dtype)


def missing_array(call: Call) -> None:
    arrays, name = _some_array(call)
    if len(arrays) > 1 or arrays is call.inputs:
        del arrays[name]


def extra_array(call: Call) -> None:
    arrays = call.one_of((call.inputs, call.results))
    shape = (call.one_of((0, 3)),)
    one = np.zeros(shape, np.float32)
    arrays["extra"] = one if arrays is call.inputs else jax.ShapeDtypeStruct(shape, np.float32)


def other_rank(call: Call) -> None:
    arrays, name = _some_array(call)
    shape = arrays[name].shape
    arrays[name] = _reshaped(arrays[name], call.one_of(((1, *shape), shape[1:], ())))


def other_type(call: Call) -> None:
    arrays, name = _some_array(call)
    dtypes = (np.int8, np.uint32, np.int32, np.float16, np.float32, np.bool_, np.complex64)
    arrays[name] = _reshaped(arrays[name], arrays[name].shape, call.one_of(dtypes))


def other_extent(call: Call) -> None:
    arrays, name = _some_array(call)
    shape = list(arrays[name].shape)
    if shape:
        shape[call.rng.integers(len(shape))] = call.one_of((0, 0, 1, 2, 5))
    arrays[name] = _reshaped(arrays[name], tuple(shape))


def zero_extents(call: Call) -> None:
    """Shapes that agree with each other: what can be nothing gives nothing, the rest is refused."""
    extents = dict.fromkeys("BTSNKDE", 2)
    zero = call.one_of(("B", "T", "S", "N", "NK", "K", "D", "E", "DE", "TS"))
    extents.update(dict.fromkeys(zero, 0))
    if "T" in zero and call.maybe(0.5):
        extents["B"] = extents["S"] = 0
        extents["T"] = call.one_of((2**20, 2**40))
    shapes = {"q": "BTND", "k": "BSKD", "v": "BSKE", "out": "BTNE", "lse": "BTN"}
    shapes |= {"dout": "BTNE", "dlse": "BTN", "dq": "BTND", "dk": "BSKD", "dv": "BSKE"}
    for arrays in (call.inputs, call.results):
        for name, array in arrays.items():
            shape = tuple(extents[letter] for letter in shapes.get(name, ())) or (0,)
            arrays[name] = _reshaped(array, shape)


def packed_batch(call: Call) -> None:
    """Borders, but not a batch of 1: once a write beyond the end of ``out``."""
    borders = np.array([0, 1, 2, 3], np.int32)
    call.inputs |= {"cu_seqlens_q": borders, "cu_seqlens_k": borders}
    batch = call.one_of((2, 3))  # XLA makes no call whose results are all empty
    for arrays in (call.inputs, call.results):
        for name, array in arrays.items():
            if len(array.shape) > 2:
                arrays[name] = _reshaped(array, (batch, *array.shape[1:]))


def missing_attribute(call: Call) -> None:
    call.attributes.pop(call.one_of(sorted(call.attributes)), None)


def other_attribute(call: Call) -> None:
    name = call.one_of((*call.attributes, "scale2"))
    values = (np.float64(0.5), np.int64(1), np.int8(1), "x" * 5000, np.array([1, 2], np.int32))
    call.attributes[name] = call.one_of(values)


def bad_number(call: Call) -> None:
    name = call.one_of(("scale", "soft_cap"))
    call.attributes[name] = call.one_of(np.array([np.nan, np.inf, -np.inf], np.float32))


FAULTS: tuple[Callable[[Call], None], ...] = (
    *(missing_array, extra_array, other_rank, other_type, other_extent, zero_extents),
    *(packed_batch, missing_attribute, other_attribute, bad_number),
)
ALWAYS_REFUSED = (packed_batch, bad_number, extra_array)


def test_hostile_calls_are_refused_in_our_words_or_right():
    outcomes: collections.Counter[str] = collections.Counter()
    for seed in range(NUM_CALLS):
        call = Call(seed)
        fault = call.one_of(FAULTS) if call.maybe(0.6) else None
        if fault is not None:
            fault(call)
        label = f"seed {seed}, {fault.__name__ if fault else 'no fault'}"
        try:
            got = call.run()
        except Exception as error:
            words = str(error)
            assert "jax_fa" in words and "Index out of range" not in words, f"{label}: {words}"
            assert fault is not None, f"{label}: {words}"
            outcomes["refused"] += 1
        else:
            assert fault not in ALWAYS_REFUSED, label
            if fault is None:
                call.check(got, label)
            outcomes["right" if fault is None else "accepted"] += 1
    assert min(outcomes["refused"], outcomes["right"]) > NUM_CALLS // 4, outcomes


# -------------------------------------------------------------------------------- nothing to do


def gradients_of_nothing(batch, q_len, kv_len, sinks=None):
    """What a backward gives for operands of 0, cotangents of 1 and an LSE of 0.5."""
    q, k = (np.zeros((batch, length, 1, 8), np.float32) for length in (q_len, kv_len))
    lse = np.full((batch, q_len, 1), 0.5, np.float32)
    operands = Operands(q, k, k, sinks=sinks)
    saved = bindings.Saved(q, lse, q, np.ones_like(lse))
    inputs = bindings._inputs("bwd", operands, saved)
    results = [jax.ShapeDtypeStruct(inputs[i].shape, np.float32) for i in (0, 1, 2, 10)]
    call = jax.ffi.ffi_call(bindings.BACKWARD_TARGET, results)
    return jax.block_until_ready(call(*inputs, **bindings._attributes(Semantics(1.0))))


def test_sequences_without_rows_cost_no_time():
    """ffi/handlers_test.cc has more of them: XLA itself is slow with large extents beside a 0."""
    sinks = np.ones((2**20, 1), np.float32)
    gradients_of_nothing(1, 0, 0, sinks[:1])
    start = time.process_time()
    dsinks = gradients_of_nothing(2**20, 0, 0, sinks)[3]
    assert time.process_time() - start < 2
    assert not np.asarray(dsinks).any()


def test_sequences_without_rows_have_gradients_of_0():
    _, dk, dv, dsinks = gradients_of_nothing(1000, 0, 3, np.ones((1000, 1), np.float32))
    assert not any(np.asarray(x).any() for x in (dk, dv, dsinks))


def test_rows_without_keys_have_the_gradient_of_their_sink():
    dq, _, _, dsinks = gradients_of_nothing(3, 4, 0, np.full((3, 1), 0.5, np.float32))
    assert not np.asarray(dq).any()
    np.testing.assert_allclose(dsinks, np.full((3, 1), 4.0))  # lse is the sink: d lse / d sink = 1


@pytest.mark.parametrize("backward", [False, True])
def test_a_missing_operand_is_counted_and_the_names_are_listed(backward):
    call = next(call for call in map(Call, range(99)) if call.backward == backward)
    # Three might be those that older programs lack.
    for name in ("q_lengths", "kv_lengths", "q_offset", "sinks"):
        del call.inputs[name]
    number = 18 if backward else 14
    words = rf"takes {number} operands \(q, k, v, q_lengths, .*\), but got {number - 4}"
    with pytest.raises(Exception, match=words):
        call.run()
