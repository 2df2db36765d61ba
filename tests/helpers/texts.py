"""Which compiled variants are one text for several targets: emulating it once serves them all.

The emulator executes PTX and takes no notice of ``.target``. Where the text for two targets
differs in nothing but that line and the names of kernels, and the host code of both launches it
alike, a run of one is a run of the other. For sm110 the compiler orders some loads of short kernels
otherwise than for sm100, and for sm120 it holds pairs of floats in one register where it does not
for sm80 (DSL 4.8.1); such variants are emulated for themselves. What sm100, sm110 and sm120 compile
of ``mma_sync/`` is one text, but for few queries with D = 256.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

from helpers.cases import Case
from helpers.harness import data
from jax_fa import _jax_fa
from jax_fa.aot import compare
from jax_fa.aot.compare import first_difference as first_difference
from jax_fa.runtime import bindings
from jax_fa.runtime.dispatch import Emulation
from jax_fa.runtime.emulation import Call
from jax_fa.spec import ptx_archives
from jax_fa.spec.arch import Operation
from jax_fa.spec.problem import Problem
from jax_fa.spec.schema import OPERANDS, OPERATIONS
from jax_fa.spec.variants import BY_NAME, Variant


def without_names(ptx: str) -> str:
    """PTX with numbers for the names of its kernels, which spell the family, and any target."""
    return re.sub(r"^\.target .*$", ".target", compare.without_names(ptx), flags=re.M)


def text(name: str) -> str:
    """``without_names`` of the installed PTX of a variant."""
    return _texts(ptx_archives.archive_of(name))[name]


@cache
def _texts(archive: str) -> dict[str, str]:
    path = Path(_jax_fa.__file__).parent / "ptx" / archive
    texts = ptx_archives.unpacked(path.read_bytes())
    return {name: without_names(ptx.decode()) for name, ptx in texts.items()}


_ORDERED = re.compile(
    r"^\s*(?:@!?%p\d+\s+)?((?:atom|bar|barrier|bra|cp|elect|exit|fence|griddepcontrol|ld|ldmatrix"
    r"|mapa|mbarrier|membar|mma|red|ret|setmaxnreg|st|stmatrix|tcgen05|wgmma)\b[\w.:]*)",
    re.M,
)


@cache
def order(name: str) -> tuple[str, ...]:
    """What schedules can tell apart: a variant's instructions that access memory, wait or branch.

    In order, without their operands, and whichever of the 16-bit types they are for.
    """
    return tuple(x.replace("bf16", "f16") for x in _ORDERED.findall(text(name)))


SAME_SOURCE = {"sm110": "sm100", "sm86": "sm120", "sm120": "sm80"}
"""Families compiled from the sources of another."""


def _relatives(variant: Variant) -> list[Variant]:
    """Distinct compiled variants of the same source: for bfloat16, for another family, or both."""
    name = variant.name
    elsewhere = name.replace(variant.arch, SAME_SOURCE.get(variant.arch, variant.arch))
    names = (name.replace("_fp16_", "_bf16_"), elsewhere, elsewhere.replace("fp16", "bf16"))
    there = (BY_NAME[other] for other in names if other in bindings.compiled() - {name})
    return [other for other in there if is_distinct(other)]


def twin(variant: Variant) -> Variant | None:
    """A relative of the same ``order``."""
    same = (x for x in _relatives(variant) if order(x.name) == order(variant.name))
    return next(same, None)


def resembled(variant: Variant) -> Variant | None:
    """A relative of the same instructions that access memory, wait or branch, in whichever order.

    But for conversions and the place of some instructions, the kernels are the same.
    """
    own = sorted(order(variant.name))
    return next((x for x in _relatives(variant) if sorted(order(x.name)) == own), None)


def kernels(ptx: str) -> list[str]:
    """The text of each kernel, the first with what comes before it."""
    first, *others = re.split(r"^(?=\.visible \.entry)", ptx, flags=re.M)
    return [first + "".join(others[:1]), *others[1:]]


def siblings(name: str) -> str:
    """The name of a variant with * for its target."""
    operation, _, rest = name.split("_", 2)
    return f"{operation}_*_{rest}"


@cache
def _first_of_text() -> dict[str, str]:
    found: dict[tuple[str, str], str] = {}
    first = {}
    for name in sorted(bindings.compiled() & BY_NAME.keys()):
        digest = hashlib.sha256(text(name).encode()).hexdigest()
        first[name] = found.setdefault((siblings(name), digest), name)
    return first


def proxy(variant: Variant) -> Variant:
    """The variant whose runs count for ``variant``: the first compiled one of the same text."""
    return BY_NAME[_first_of_text()[variant.name]]


def is_distinct(variant: Variant) -> bool:
    """True if no other compiled variant runs in place of this one."""
    return proxy(variant) == variant


def _recorded(operation: Operation, arch: str, case: Case, dtype: str) -> dict[str, Any]:
    """The launches of a case for ``arch``, all arrays at addresses that depend on nothing."""
    operands = data(case, dtype).operands
    call = Call(operation, Problem.of(operands, case.semantics), Emulation(arch)).padded
    given = [name for name, x in operands._asdict().items() if x is not None]
    saved = [x.name for x in OPERATIONS[operation].operands if x not in OPERANDS]
    names = [*given, *saved, *call.results, *call.scratch]
    addresses = {name: place << 20 for place, name in enumerate(dict.fromkeys(names), 1)}
    return bindings.record(operation, call.problem, call.settings, {**addresses, **call.fields})


@cache
def _bytes_read(name: str, sha256: str) -> dict[str, frozenset[int]]:
    """Which bytes of its parameters a variant's kernels read; padding between fields is noise.

    Of a TMA descriptor, which is passed on by its address, the first half: the rest is unused.
    """
    ptx = bindings.ptx(name, sha256)
    found: dict[str, set[int]] = {}
    loads = r"ld\.param(?:\.v(\d))?\.[bfsu](\d+)[^\[;]*\[([\w$]+)(?:\+(\d+))?\]"
    for count, bits, param, offset in re.findall(loads, ptx):
        first, size = int(offset or 0), int(count or 1) * int(bits) // 8
        found.setdefault(param, set()).update(range(first, first + size))
    for param in re.findall(r"\.param \.align 64 \.b8 ([\w$]+)\[128\]", ptx):
        found[param] = set(range(64))
    return {param: frozenset(read) for param, read in found.items()}


def _as_read(launch: dict[str, Any], read: dict[str, frozenset[int]]) -> dict[str, Any]:
    """A launch without its kernel's name and without what the kernel does not read."""
    params = []
    for number, param in enumerate(launch["params"]):
        places = sorted(read.get(f"{launch['kernel']}_param_{number}", ()))
        params.append(bytes(param[place] for place in places))
    return {**launch, "kernel": None, "params": params}


@cache
def _difference(name: str, sha256: str, other: str, other_sha256: str) -> str:
    one, another = bindings.ptx(name, sha256), bindings.ptx(other, other_sha256)
    return first_difference(without_names(one), without_names(another))


def assert_launched(variant: Variant, case: Case) -> None:
    """The host code of ``variant`` takes ``case``."""
    recorded = _recorded(variant.operation, variant.arch, case, variant.key.dtype)
    assert recorded["variant"] == variant.name
    assert recorded["launches"]


def assert_launched_like_proxy(variant: Variant, case: Case) -> None:
    """``variant`` has the text of its proxy, and makes the same launches for ``case``."""
    other = proxy(variant)
    mine, its = (_recorded(v.operation, v.arch, case, v.key.dtype) for v in (variant, other))
    assert (mine["variant"], its["variant"]) == (variant.name, other.name)
    of_mine, of_its = ((each["variant"], each["ptx_sha256"]) for each in (mine, its))
    assert not _difference(*of_mine, *of_its)
    for launch, its_launch in zip(mine["launches"], its["launches"], strict=True):
        assert _as_read(launch, _bytes_read(*of_mine)) == _as_read(its_launch, _bytes_read(*of_its))
