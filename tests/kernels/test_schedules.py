"""Every compiled variant under several schedules: no fault, right results, forward bits alike.

One that is the text of another for another target is run as that one (``texts.py``). One whose
instructions come in the order of another's, for bfloat16 or for another family, runs under one
schedule. Biases are float32 for float16, of the queries' type for bfloat16.
"""

from dataclasses import replace

import numpy as np
import pytest
from helpers import texts
from helpers.cases import Bias, Case
from helpers.harness import data, inputs_for, leave_out_small_tiles, wanted
from helpers.oracle import Results, assert_close
from helpers.texts import (
    SAME_SOURCE,
    assert_launched_like_proxy,
    is_distinct,
    order,
    proxy,
    resembled,
    twin,
)

from jax_fa.runtime import bindings
from jax_fa.runtime.dispatch import Emulation
from jax_fa.runtime.emulation import Call, execute
from jax_fa.spec import variants
from jax_fa.spec.arch import arch_named
from jax_fa.spec.config import choose_backward
from jax_fa.spec.problem import Problem
from jax_fa.spec.variants import BY_NAME, find

COMPILED = [BY_NAME[name] for name in sorted(bindings.compiled()) if name in BY_NAME]
DISTINCT = [variant for variant in COMPILED if is_distinct(variant)]
SEEDS = range(2)

# Two query tiles and two key blocks, the second of each partly used, on one multiprocessor.
LENGTHS = 150, 200
# Of a pair's blocks of 256 keys two, and three query tiles: statistics have room for two.
LENGTHS_OF_PAIR = 300, 300
MASKS = {
    "full": {},
    "causal": {"is_causal": True},
    "general": {"window": (150, 20)},
}

if not COMPILED:
    pytest.skip("this build holds no GPU kernels", allow_module_level=True)


def bias_for(key):
    return Bias(is_float32=key.dtype == "float16" and not key.multiplies_bias)


def case_for(variant):
    key = variant.key
    if key.is_split:
        # As many keys as it takes for two parts.
        least = variants.FEW_KEYS if key.is_few else variants.SPLIT_KEYS
        return Case(
            "schedules of few queries" if key.is_few else "schedules of split keys",
            q_len=2 if key.is_few else 17,
            kv_len=2 * least,
            heads=1,
            kv_heads=1,
            head_dim=key.head_dim,
            value_dim=key.value_dim,
            kv_lengths=(2 * least - 10,),
        )
    mask = key.mask if key.mask == "causal" or not key.multiplies_bias else "full"
    is_pair = variant.operation == "bwd" and getattr(choose_backward(key), "ctas", 1) == 2
    q_len, kv_len = LENGTHS_OF_PAIR if is_pair else LENGTHS
    return Case(
        f"schedules of {mask}",
        q_len=q_len,
        kv_len=kv_len,
        heads=1,
        kv_heads=1,
        head_dim=key.head_dim,
        value_dim=key.value_dim,
        soft_cap=5.0 if key.has_soft_cap else None,
        kv_lengths=(kv_len - 10,) if mask == "general" else None,
        bias=bias_for(key) if key.has_bias else None,
        **MASKS[mask],
    )


def problem_for(variant, monkeypatch):
    """One that ``variant`` is chosen for, if large tiles have to do what is short."""
    if not variant.key.is_small:
        leave_out_small_tiles(monkeypatch)
    case = case_for(variant)
    problem = Problem.of(data(case, variant.key.dtype).operands, case.semantics)
    arch = arch_named(variant.arch)
    assert find(problem, arch, variant.operation, bindings.compiled()) == variant
    return problem


def siblings_before(variant):
    """How many variants of the same roles come before this one: of its operation, GPU and heads."""
    key = variant.key
    kind = (variant.operation, variant.arch, key.head_dim, key.value_dim)
    return sum(
        kind == (v.operation, v.arch, v.key.head_dim, v.key.value_dim) and not twin(v)
        for v in DISTINCT[: DISTINCT.index(variant)]
    )


def slow_schedules(variant, report):
    """Eager ones in which a role, another role, and the operations of a line lag behind.

    ``report`` on the main kernel of some run tells them. The variants of a kernel take turns, so
    that each of its roles, six at most, lags behind in some of them.
    """
    turn = siblings_before(variant)
    roles, lines = list(report.roles()), sorted(report.issued)
    eager = Emulation(variant.arch, completion="eager", num_sms=1)
    for number in (2 * turn, 2 * turn + 1):
        role = roles[number % len(roles)]
        yield replace(eager, starved=role[number // len(roles) % len(role)])
    yield replace(eager, held=lines[5 * turn % len(lines)])


@pytest.mark.parametrize("variant", DISTINCT, ids=lambda variant: variant.name)
def test_variant_is_right_under_every_schedule(variant, monkeypatch):
    case = case_for(variant)
    dtype = variant.key.dtype
    problem = problem_for(variant, monkeypatch)
    inputs = inputs_for(variant, case)

    def run(settings):
        results, reports = execute(Call(variant.operation, problem, settings), inputs)
        assert not any(report.findings for report in reports)
        got = Results(**{**dict.fromkeys(Results._fields), **results})
        assert_close(got, wanted(case, dtype), dtype, str(settings))
        return results, max(reports, key=lambda report: report.issued.total())

    seeded = [Emulation(variant.arch, seed=seed, num_sms=1) for seed in SEEDS]
    first, report = run(seeded[0])
    if twin(variant):
        return
    for settings in (*seeded[1:], *slow_schedules(variant, report)):
        results, _ = run(settings)
        if variant.operation == "fwd":
            for name, value in results.items():
                np.testing.assert_array_equal(value, first[name], f"{name}, {settings}")


def test_types_share_schedules_only_where_their_instructions_come_in_the_same_order(monkeypatch):
    pairs = [variant for variant in DISTINCT if twin(variant)]
    if not pairs:
        pytest.skip("this build holds no kernel for both types")
    some = pairs[0]
    assert {"bra", "ret"} < {instruction.split(".")[0] for instruction in order(some.name)}
    moved = list(order(some.name))
    place = next(i for i, x in enumerate(moved) if x != moved[0])
    moved[0], moved[place] = moved[place], moved[0]
    given = {some.name: tuple(moved), twin(some).name: order(some.name)}
    monkeypatch.setattr(texts, "order", given.get)
    assert twin(some) is None


def test_a_variant_resembles_one_of_the_same_instructions_only(monkeypatch):
    """Conversions apart; a kernel with an instruction of its own runs all cases."""
    originals = [v for v in DISTINCT if v.key.dtype == "bfloat16"]
    assert all(resembled(v) is None for v in originals if v.arch not in SAME_SOURCE)
    pairs = [variant for variant in DISTINCT if twin(variant)]
    if not pairs:
        pytest.skip("this build holds no kernel for both types")
    some = pairs[0]
    assert resembled(some) == twin(some)
    given = {v.name: order(v.name) for v in DISTINCT} | {some.name: order(some.name)[1:]}
    monkeypatch.setattr(texts, "order", given.get)
    assert resembled(some) is None


def test_variants_of_the_same_text_are_launched_alike():
    for variant in COMPILED:
        with pytest.MonkeyPatch.context() as monkeypatch:
            problem_for(variant, monkeypatch)
        if not is_distinct(variant):
            assert proxy(variant).arch != variant.arch
            assert_launched_like_proxy(variant, case_for(variant))


@pytest.mark.parametrize("change", ["grid", "params"])
def test_a_launch_that_differs_is_noticed(change, monkeypatch):
    same = [variant for variant in COMPILED if not is_distinct(variant)]
    if not same:
        pytest.skip("this build holds no kernel that is the same text for two targets")

    def record(operation, problem, settings, addresses, real=bindings.record):
        recorded = real(operation, problem, settings, addresses)
        launch = recorded["launches"][0]
        if settings.arch == same[0].arch and change == "grid":
            launch["grid"] = tuple(extent + 1 for extent in launch["grid"])
        elif settings.arch == same[0].arch:
            launch["params"] = [bytes(byte ^ 1 for byte in param) for param in launch["params"]]
        return recorded

    assert_launched_like_proxy(same[0], case_for(same[0]))
    monkeypatch.setattr(bindings, "record", record)
    with pytest.raises(AssertionError):
        assert_launched_like_proxy(same[0], case_for(same[0]))
