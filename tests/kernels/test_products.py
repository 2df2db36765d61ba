"""What the Blackwell kernels rely on in the order of products, beyond what PTX promises.

The kernels' README states it (The order of products); here each kernel is emulated with products
that may overtake each other, and what it relied on is compared with the table there.
"""

import functools
import re
from pathlib import Path

import pytest
from helpers.cases import Case
from helpers.harness import data, inputs_for, wanted
from helpers.oracle import Results, assert_close

import jax_fa.emulator
from jax_fa.analysis import audit
from jax_fa.emulator.faults import ProductOrderError
from jax_fa.runtime import bindings
from jax_fa.runtime.dispatch import Emulation
from jax_fa.runtime.emulation import Call, execute
from jax_fa.spec.problem import Problem
from jax_fa.spec.variants import BY_NAME, VARIANTS

README = Path(jax_fa.emulator.__file__).parent.parent / "kernels" / "README.md"
ROW = re.compile(
    r"^\| (forward|backward)[^|]*\| ([\d/, ]+?) +\| ((?:\w+ -> \w+(?:, )?)+) +\|", re.M
)
NAMES = {"s": "S", "o": "PV", "dv": "dV", "dp": "dP", "dk": "dK", "dq": "dQ"}

# One variant for each way to issue products: masks change no more than which tiles there are.
ISSUERS = [
    variant
    for name in sorted(bindings.compiled())
    if (variant := BY_NAME.get(name)) is not None
    and (variant.arch, variant.key.dtype) == ("sm100", "bfloat16")
    and not variant.key.has_soft_cap
    and variant.key.mask in ("full", "causal" if variant.operation == "fwd" else "full")
]

if not ISSUERS:
    pytest.skip("this build holds no Blackwell kernels", allow_module_level=True)


def stated():
    """(operation, head sizes) -> the pairs of products of the README's table."""
    found = {}
    for operation, sizes, pairs in ROW.findall(README.read_text()):
        for size in sizes.split(", "):
            d, _, dv = size.partition("/")
            found[operation[:1], (int(d), int(dv or d))] = set(pairs.split(", "))
    return found


def pairs_of(findings, plan):
    """Products that keep an order that nothing promises, by name, as (first, second)."""
    columns = {columns.name: columns for columns in plan.tmem}
    seen: dict[int, set[tuple[int, int, int | None]]] = {}
    for issued in (each for found in findings for each in (found.first, found.second)):
        _, (_, width, _), address = issued.stream
        seen.setdefault(issued.line, set()).add((address & 0xFFFF, width, issued.a))
    names = {line: name_of(places, columns) for line, places in seen.items()}
    return {(names[found.first.line], names[found.second.line]) for found in findings}


def name_of(places, columns):
    """The product of an instruction that has its accumulator, and A, at these places.

    Of what starts in the same column: the one as wide; S rather than dP, if the instruction is
    seen at both; dV if its A is P.
    """
    starts = {start for start, _, _ in places}
    widths = {width for _, width, _ in places}
    fitting = [
        name
        for name, place in columns.items()
        if place.start in starts and name.rstrip("01") in NAMES
    ]
    fitting = [name for name in fitting if columns[name].cols in widths] or fitting
    if {"dv", "dk"} <= set(fitting):
        p = range(columns["p0"].start, columns["p1"].end)
        fitting = ["dv" if any(a in p for _, _, a in places) else "dk"]
    order = list(NAMES)
    return NAMES[min((name.rstrip("01") for name in fitting), key=order.index)]


@pytest.mark.parametrize("variant", ISSUERS, ids=lambda variant: variant.name)
def test_a_kernel_relies_on_the_order_that_the_readme_states_and_no_other(variant, monkeypatch):
    key = variant.key
    case = Case(
        "order of products",
        q_len=290,
        kv_len=290,
        heads=1,
        kv_heads=1,
        head_dim=key.head_dim,
        value_dim=key.value_dim,
        is_causal=key.mask == "causal",
    )
    unordered = functools.partial(jax_fa.emulator.Options, ordered_products=False, strict=False)
    monkeypatch.setattr(jax_fa.emulator, "Options", unordered)
    problem = Problem.of(data(case, key.dtype).operands, case.semantics)
    settings = Emulation(variant.arch, seed=0, completion="lazy", num_sms=1)
    results, reports = execute(
        Call(variant.operation, problem, settings), inputs_for(variant, case)
    )
    got = Results(**{**dict.fromkeys(Results._fields), **results})
    assert_close(got, wanted(case, key.dtype), key.dtype)
    findings = [found for report in reports for found in report.findings]
    assert {type(found) for found in findings} == {ProductOrderError}
    relied_upon = {" -> ".join(pair) for pair in pairs_of(findings, audit.plan_of(variant))}
    assert relied_upon == stated()[variant.operation[:1], (key.head_dim, key.value_dim)]


def test_the_readme_names_every_kernel_once():
    keys = {
        (v.operation[:1], (v.key.head_dim, v.key.value_dim))
        for v in VARIANTS
        if v.kernels == "sm100"
    }
    assert set(stated()) == keys
