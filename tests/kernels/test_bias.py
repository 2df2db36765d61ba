"""Bias in Hopper's kernels, through their host entries: forward, backward and its gradient."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from helpers.cases import Case, Dense, make
from helpers.oracle import ULP, Values, complaint, shown, visible
from helpers.recording import needs_compiler, needs_dsl, prebuilt, record
from helpers.remembered import emulate

from jax_fa.emulator import Memory, Options
from jax_fa.kernels.edges import PlanError
from jax_fa.kernels.sm90.plan_bias import biased_plan
from jax_fa.spec import abi, schema, scratch
from jax_fa.spec.arch import Operation
from jax_fa.spec.config import choose_backward, choose_dbias, choose_forward
from jax_fa.spec.key import KernelKey
from jax_fa.spec.problem import Problem
from jax_fa.spec.variants import can_multiply

pytestmark = [
    needs_dsl,
    needs_compiler,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # of the DSL, within the DSL
    pytest.mark.filterwarnings("default:This static loop"),  # likewise, of heads of 256
]

CHOICES = {"fwd": choose_forward, "bwd": choose_backward, "dbias": choose_dbias}
KEY = KernelKey("sm_90a", "bfloat16", 64, 64, "general", has_bias=True)
MODULES = {"fwd": "sm90.fwd_bias", "bwd": "sm90.bwd", "dbias": "sm90.dbias"}


@dataclass(frozen=True)
class Biased:
    """A case with a bias.

    Attributes:
        case: the rest.
        dims: those of B, N, T, S along which the bias varies.
        dtype: of the bias; None for that of the queries.
        hides: of each row about so many keys in ten have a bias of -inf, of row 3 all.
        least: instead of -inf.
        silences: nothing flows back from row 3.
    """

    case: Case
    dims: str = "BNTS"
    dtype: str | None = None
    hides: float = 0
    least: float = -np.inf
    silences: bool = False

    def __str__(self) -> str:
        return f"{self.case}-{self.dims}-{self.dtype or 'element'}"

    def make(self, element: Any) -> np.ndarray:
        """The bias [B|1, N|1, T|1, S|1]."""
        case = self.case
        rng = np.random.default_rng([case.seed, *case.name.encode(), 2])
        extents = {"B": case.batch, "N": case.heads, "T": case.q_len, "S": case.kv_len}
        shape = tuple(extents[x] if x in self.dims else 1 for x in "BNTS")
        bias = rng.normal(size=shape)
        if self.hides:
            bias = np.where(rng.random(shape) < self.hides / 10, self.least, bias)
            bias[:, :, 3:4] = self.least
        with np.errstate(over="ignore"):
            return bias.astype(self.dtype or element)


class Exact(NamedTuple):
    """Results by formula."""

    out: Any
    lse: Any
    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    size: Any = None  # of dbias: the sum of the absolute values of its terms


def attend(given: Any, bias: np.ndarray, rounding: str | None = None) -> Exact:
    """All results with full score matrices; ``rounding`` as for ``oracle.attend``."""
    (operands, (dout, dlse)), semantics = given.data, given.semantics
    dtype: Any = np.float64 if rounding is None else np.float32
    kind = dtype if rounding is None else getattr(ml_dtypes, rounding, rounding)

    def narrow(x: Any) -> Any:
        return x.astype(kind).astype(dtype)

    group = operands.q.shape[2] // operands.k.shape[2]
    arrays = (operands.q, dout, operands.k, operands.v)
    q, dout, *kv = (np.swapaxes(np.asarray(x, dtype), 1, 2) for x in arrays)
    k, v = (np.repeat(x, group, 1) for x in kv)
    dlse = np.swapaxes(np.asarray(dlse, dtype), 1, 2)[..., None]
    pairs = visible(operands, semantics)[:, None]
    if operands.mask_words is not None:
        pairs = pairs & shown(operands)
    added = np.asarray(bias, dtype)
    pairs = pairs & (added != -np.inf)
    used = pairs.any(1).any(2)[:, None, :, None]
    q, dout, dlse = (np.where(used, x, 0) for x in (q, dout, dlse))
    keys = pairs.any(1).any(1)[:, None, :, None]
    k, v = (np.where(keys, x, 0) for x in (k, v))
    logits = q @ np.swapaxes(k, 2, 3) * dtype(semantics.scale) + np.where(
        added == -np.inf, 0, added
    )
    slope: Any = dtype(1)
    if semantics.soft_cap is not None:
        bounded = np.tanh(logits / dtype(semantics.soft_cap))
        logits, slope = dtype(semantics.soft_cap) * bounded, 1 - bounded**2
    logits = np.where(pairs, logits, -np.inf)
    top = logits.max(3, keepdims=True)
    # What jax_fa/kernels/softmax.py says of logits beyond what 32 bits hold in base 2.
    pairs = pairs & (top > -(2.0**127))
    logits = np.where(pairs, logits, -np.inf)
    top = np.where(pairs.any(3, keepdims=True), top, 0)
    weights = np.exp(logits - top)
    total = weights.sum(3, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    out = narrow(narrow(weights) @ v / np.where(total > 0, total, 1))
    delta = (dout * out).sum(3, keepdims=True) - dlse
    p = np.exp(logits - np.where(np.isneginf(lse), np.inf, lse))
    dlogits = p * (dout @ np.swapaxes(v, 2, 3) - delta) * slope
    axes = tuple(i for i in range(4) if bias.shape[i] == 1)
    ds = narrow(dlogits)

    def by_key(x: Any) -> Any:
        batch, heads, length, dim = x.shape
        return np.swapaxes(x.reshape(batch, heads // group, group, length, dim).sum(2), 1, 2)

    scale = dtype(semantics.scale)
    return Exact(
        np.swapaxes(out, 1, 2),
        np.swapaxes(lse[..., 0], 1, 2),
        narrow(np.swapaxes(ds * scale @ k, 1, 2)),
        narrow(by_key(np.swapaxes(ds * scale, 2, 3) @ q)),
        narrow(by_key(np.swapaxes(narrow(p), 2, 3) @ dout)),
        (ds if rounding else dlogits).sum(axes, keepdims=True),
        abs(dlogits).sum(axes, keepdims=True),
    )


class Given(NamedTuple):
    """A biased case with its arrays and exact results."""

    biased: Biased
    data: Any
    semantics: Any
    bias: np.ndarray

    @property
    def operands(self) -> Any:
        """With the bias."""
        return self.data.operands._replace(bias=self.bias)


def given_of(biased: Biased, dtype: str = "bfloat16") -> Given:
    """The arrays of a case; tokens beyond the sequences are NaN."""
    case, data = biased.case, make(biased.case, dtype)
    x, (dout, dlse) = data
    for lengths, arrays in ((case.q_lengths, (x.q, dout)), (case.kv_lengths, (x.k, x.v))):
        for row, length in enumerate(lengths or ()):
            for array in arrays:
                array[row, length:] = np.nan
    if biased.silences:
        dout[:, 3] = dlse[:, 3] = 0
    return Given(biased, data, case.semantics, biased.make(data.operands.q.dtype))


def call(
    built: Any,
    operation: Operation,
    given: Given,
    *,
    seed: int = 1,
    options: Options | None = None,
    **fields: float,
) -> Any:
    """Results of an entry, by name; what kernels do not write is NaN."""
    operands, semantics = given.operands, given.semantics
    problem, memory = Problem.of(operands, semantics), Memory()
    arrays = {name: x for name, x in operands._asdict().items() if x is not None}
    if operation != "fwd":
        rounded = attend(given, given.bias, problem.dtype)
        dout, dlse = given.data.cotangents
        delta = (np.asarray(dout, np.float32) * rounded.out).sum(3) - dlse
        arrays |= {
            "out": rounded.out.astype(operands.q.dtype),
            "lse": rounded.lse.astype(np.float32),
            "dout": dout,
            "dlse": np.asarray(dlse, np.float32),
            "delta": np.where(np.isneginf(rounded.lse), np.nan, delta).astype(np.float32),
        }
    shapes = {
        "fwd": {"out": operands.q, "lse": None},
        "bwd": {"dq": operands.q, "dk": operands.k, "dv": operands.v},
        "dbias": {"dbias": operands.bias},
    }[operation]
    if operation == "bwd" and problem.is_bias_whole:
        shapes["dbias"] = operands.bias
    rows = operands.q.shape[:3]
    results = {}
    for name, like in shapes.items():
        shape, dtype = (rows, np.float32) if like is None else (like.shape, like.dtype)
        if name == "out":
            shape = (*rows, operands.v.shape[3])
        results[name] = np.full(shape, np.nan, dtype)
    arrays |= results
    compiled_dim = max(problem.head_dim, 64)
    for name, (shape, dtype) in scratch.shapes(operation, problem, 1, compiled_dim).items():
        arrays[name] = np.full(shape, -1 if dtype == "int32" else np.nan, dtype)
    names = {x.name for x in abi.PARAMETERS[operation]}
    values: dict[str, float] = {}
    for name, x in arrays.items():
        if name in names and x.size:
            x = np.ascontiguousarray(x)
            arrays[name] = x
            values[name] = memory.add(name, x.view(np.uint16) if x.itemsize == 2 else x)
            if name in results:
                results[name] = x
    values |= {x.name: getattr(problem, x.name) for x in schema.EXTENTS}
    band = semantics.band
    values |= {"window_left": band.left_bound, "window_right": band.right_bound}
    values |= {"bottom_right": band.alignment == "bottom_right", "num_sms": 2}
    values |= {"scale": semantics.scale, "soft_cap": semantics.soft_cap or 0.0}
    values |= {"deterministic": semantics.deterministic, **fields}
    for launch in record(built, abi.PARAMETERS[operation], values):
        emulate(built.ptx, launch, memory, seed=seed, options=options)
    return results


def check(results: Any, given: Given, dtype: str = "bfloat16") -> None:
    """Asserts the tolerance rule of ``oracle.py``."""
    exact, rounded = attend(given, given.bias), attend(given, given.bias, dtype)
    largest = np.abs(exact.lse[np.isfinite(exact.lse)]).max(initial=0)
    few = ULP["float32"] * max(8, 2 * largest)
    broken = []
    for name, got in results.items():
        kind = "float32" if name == "lse" else str(got.dtype)
        size, relative = None, few
        if name == "dbias" and given.bias.shape[3] == 1:
            # Of all keys, dS cancels but for dlse; delta holds an output that was rounded.
            size, relative = exact.size, ULP[dtype] / 32
        values = Values(got, getattr(exact, name), getattr(rounded, name), relative, size)
        broken += [complaint(name, values, ULP[kind])]
    assert not any(broken), f"{given.biased}: {broken}"


MANY = {"batch": 2, "q_len": 150, "kv_len": 270, "heads": 4, "kv_heads": 2}
EVEN = MANY | {"kv_len": 272}
"""Keys of which TMA can read a bias: its rows are multiples of 16 bytes apart."""
EVERYTHING: dict[str, Any] = {
    "q_lengths": (150, 77),
    "kv_lengths": (100, 270),
    "q_offset": 5,
    "window": (90, 40),
    "dense": Dense("holes", "BNTS"),
    **MANY,
}
CASES = (
    Biased(Case("all", **MANY)),
    Biased(Case("all", **MANY), dtype="float32"),
    Biased(Case("heads", **MANY), "NTS"),
    Biased(Case("heads_causal", is_causal=True, **MANY), "NTS", "float32"),
    Biased(Case("hidden", **MANY), "NTS", hides=5),
    Biased(Case("least", **MANY), "BTS", "float32", hides=5, least=float(np.finfo("float32").min)),
    Biased(Case("odd", q_len=70, kv_len=133), "BNTS"),
    Biased(Case("odd", q_len=70, kv_len=133), "BNTS", "float32"),
    Biased(Case("keys", **MANY), "BS"),
    Biased(Case("rows", **MANY), "NT", "float32"),
    Biased(Case("one", **MANY), "", "float32"),
    Biased(Case("parts", batch=6, q_len=70, kv_len=130, heads=3, kv_heads=1), "TS"),
    Biased(Case("part_of_heads", batch=7, q_len=70, kv_len=35, heads=2), "NTS", "float32"),
    Biased(Case("cap", soft_cap=2.0, window=(40, 3), **MANY), "NTS", hides=2),
    Biased(Case("band", window=(10, 0), q_len=70, kv_len=133), dtype="float32"),
    Biased(Case("band", window=(10, 0), q_len=70, kv_len=133, heads=1, kv_heads=1)),
    Biased(Case("by_tma", is_causal=True, **EVEN), "NTS", "float32"),
    Biased(Case("cap_by_tma", soft_cap=2.0, **EVEN), "BTS", "float32", hides=2),
    Biased(Case("hidden_cap", soft_cap=2.0, **MANY), hides=2),
    Biased(Case("everything_whole", **EVERYTHING)),
    Biased(Case("everything", **EVERYTHING), "TS"),
    Biased(Case("even", **EVEN)),
    Biased(Case("even", **EVEN), dtype="float32"),
    Biased(Case("even_hidden", q_len=200, kv_len=136, heads=2), hides=5),
    Biased(Case("even_floats", q_len=70, kv_len=132), "BNTS", "float32", 5),
    Biased(Case("even_keys", **EVEN), "BS"),
    Biased(Case("even_keys", **EVEN), "NS", "float32"),
    Biased(Case("even_shared", soft_cap=2.0, window=(40, 3), **EVEN), "TS", hides=2),
    Biased(Case("even_everything", **EVERYTHING | {"kv_len": 272})),
    Biased(Case("even_everything", **EVERYTHING | {"kv_len": 272}), "BNTS", "float32"),
)


def in_order(given: Given) -> Given:
    """The same, of a deterministic run."""
    return given._replace(semantics=dataclasses.replace(given.semantics, deterministic=True))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The kernels of the operations, by name."""
    found: dict[Any, Any] = {}

    def get(operation: str, key: KernelKey = KEY) -> Any:
        if (operation, key) not in found:
            folder, chosen = tmp_path_factory.mktemp(operation), CHOICES[operation](key)
            found[operation, key] = prebuilt(folder, MODULES[operation], key, chosen)
        return found[operation, key]

    return get


@pytest.mark.parametrize("biased", CASES, ids=str)
@pytest.mark.parametrize("operation", ["fwd", "bwd", "dbias"])
def test_kernels_are_right(kernels, operation, biased):
    given = given_of(biased)
    check(call(kernels(operation), operation, given), given)


MULTIPLIED = [
    x for x in CASES if can_multiply(Problem.of(given_of(x).operands, given_of(x).semantics))
]
MULTIPLIED += [
    Biased(Case("least", **EVEN), "BTS", hides=5, least=-3e38),
    Biased(Case("low", **EVEN), "BNTS", hides=5, least=-1e9),
    Biased(Case("larger", **EVEN), "BNTS", hides=5, least=-300.0),
    Biased(Case("odd_once", is_causal=True, **EVEN), "NTS", hides=0.02),
    Biased(Case("inexact", scale=32**-0.5, **EVEN), "NTS"),
    Biased(Case("inexact_odd", scale=32**-0.5, **EVEN), "NTS", hides=5, least=-20.0),
]


@pytest.mark.parametrize("biased", MULTIPLIED, ids=str)
@pytest.mark.parametrize("operation", ["fwd", "bwd", "dbias"])
def test_the_tensor_core_adds_a_bias(kernels, operation, biased):
    given = given_of(biased)
    mask = "causal" if biased.case.is_causal else "full"
    mask = "general" if operation == "dbias" else mask
    key = dataclasses.replace(KEY, mask=mask, multiplies_bias=True)
    check(call(kernels(operation, key), operation, given), given)


@pytest.mark.parametrize("multiplies", [False, True], ids=["by_elements", "product"])
@pytest.mark.parametrize("head_dim", [8, 32, 40])
def test_backwards_serve_narrow_heads(kernels, head_dim, multiplies):
    """Columns of dQ that they do not have are not summed, or by nobody read."""
    key = dataclasses.replace(KEY, mask="full", multiplies_bias=True) if multiplies else KEY
    sizes = {"q_len": 150, "kv_len": 136, "head_dim": head_dim, "value_dim": head_dim}
    given = given_of(Biased(Case("narrow", batch=1, heads=2, kv_heads=2, **sizes)))
    check(call(kernels("bwd", key), "bwd", given), given)


WHOLE = [x for x in CASES if x.dims == "BNTS"]


@pytest.mark.parametrize("biased", WHOLE, ids=str)
def test_deterministic_runs_write_the_gradient_of_the_bias_too(kernels, biased):
    """All bits are those of other runs: a pair is of one step."""
    given, built = given_of(biased), kernels("bwd")
    results = call(built, "bwd", in_order(given), seed=2)
    check(results, given)
    other = call(built, "bwd", given, seed=3)["dbias"]
    np.testing.assert_array_equal(np.float32(results["dbias"]), np.float32(other))


@pytest.mark.parametrize("kv_len", [270, 272], ids=["by_loads", "by_tma"])
@pytest.mark.parametrize("head_dim", [96, 128, 192, 256])
def test_forwards_of_larger_heads_read_the_bias(kernels, head_dim, kv_len):
    """Their rings hold fewer chunks."""
    value_dim = min(head_dim, 128) if head_dim == 192 else head_dim
    key = dataclasses.replace(KEY, head_dim=head_dim, value_dim=value_dim)
    sizes = {"q_len": 150, "kv_len": kv_len, "head_dim": head_dim, "value_dim": value_dim}
    for dtype in (None, "float32"):
        given = given_of(Biased(Case("larger", **sizes), dtype=dtype))
        check(call(kernels("fwd", key), "fwd", given), given)


@pytest.mark.parametrize("head_dim", [96, 128, 192, 256])
def test_kernels_of_larger_heads_write_the_gradient_of_the_bias(kernels, head_dim):
    value_dim = min(head_dim, 128) if head_dim == 192 else head_dim
    key = dataclasses.replace(KEY, head_dim=head_dim, value_dim=value_dim)
    sizes = {"head_dim": head_dim, "value_dim": value_dim}
    for kv_len in (133, 136):
        for dtype in (None, "float32"):
            case = Case("larger", q_len=70, kv_len=kv_len, window=(10, 0), **sizes)
            given = given_of(Biased(case, dtype=dtype))
            check(call(kernels("bwd", key), "bwd", given), given)


def test_a_gradient_that_is_not_asked_for_is_not_written(kernels):
    """A null pointer: the emulator lets nobody write there."""
    given = given_of(Biased(Case("band", window=(10, 0), q_len=70, kv_len=133)))
    results = call(kernels("bwd"), "bwd", given, dbias=0)
    assert np.isnan(np.float32(results.pop("dbias"))).all()
    check(results, given)


@pytest.mark.parametrize("stages", [0, 3, 5, 6])
def test_the_ring_of_a_forward_holds_a_power_of_two(stages):
    """Of other rings, consumers would wait for stages that nobody fills."""
    config = dataclasses.replace(choose_forward(KEY), bias_stages=stages)
    with pytest.raises(PlanError, match="power of two"):
        biased_plan(KEY, config)
