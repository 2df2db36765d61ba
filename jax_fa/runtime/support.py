"""``python -m jax_fa.runtime.support [FILE.md ...]``: what kernels serve, as Markdown.

The table is what ``dispatch.choose`` says about one problem per feature, given a full build with
one mask function; the exceptions are what it says of unfused features. With file names, the texts
between their marks in these files are brought up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax_fa.runtime.dispatch import Target, choose
from jax_fa.spec import schema
from jax_fa.spec.arch import ARCHS, Operation
from jax_fa.spec.band import Band
from jax_fa.spec.problem import Problem, Semantics
from jax_fa.spec.variants import BY_NAME, HEADS

_LARGEST = max(min(heads) for heads in HEADS)
_PLAIN = Problem(
    dtype="bfloat16",
    batch=2,
    num_sequences=2,
    q_len=1024,
    kv_len=1024,
    num_q_heads=8,
    num_kv_heads=8,
    head_dim=128,
    value_dim=128,
    semantics=Semantics(scale=1.0),
)


def _named(sizes: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{d}" if d == v else f"{d}/{v}" for d, v in sizes)


def _of_heads(sizes: Sequence[tuple[int, int]]) -> list[Problem]:
    return [replace(_PLAIN, head_dim=d, value_dim=v) for d, v in sizes]


def _banded(band: Band) -> Problem:
    return replace(_PLAIN, semantics=Semantics(scale=1.0, band=band))


def _of_schema() -> dict[str, list[Problem]]:
    """One problem for each operand and each side of the band that is a feature by itself."""
    found: dict[str, list[Problem]] = {}
    for side in schema.ATTRIBUTES:
        if side.feature:
            sides: dict[str, Any] = {side.window: 128}
            found.setdefault(side.feature, []).append(_banded(Band(**sides)))
    for array in schema.OPERANDS:
        if array.feature:
            with_it = replace(_PLAIN, present=(array.name,))
            found.setdefault(array.feature, []).append(with_it)
    return found


_FEATURES: dict[str, Sequence[Problem]] = {
    "bfloat16, float16": [_PLAIN, replace(_PLAIN, dtype="float16")],
    "float32": [replace(_PLAIN, dtype="float32")],
    f"D (or D/Dv) of {_named(HEADS)}": _of_heads(HEADS),
    f"any other D, Dv up to {_LARGEST}": _of_heads(
        [(80, 80), (1, 1), (1, _LARGEST), (_LARGEST, 1)]
    ),
    f"D or Dv of more than {_LARGEST}": _of_heads([(_LARGEST + 1, 1), (1, _LARGEST + 1)]),
    "grouped-query, multi-query": [replace(_PLAIN, num_kv_heads=n) for n in (2, 1)],
    "`is_causal`, both alignments": [
        _banded(Band(is_causal=True)),
        _banded(Band(is_causal=True, alignment="bottom_right")),
    ],
    **_of_schema(),
    "`attention_varlen`": [replace(_PLAIN, batch=1, present=("cu_seqlens_q", "cu_seqlens_k"))],
    "`logits_soft_cap`": [replace(_PLAIN, semantics=Semantics(scale=1.0, soft_cap=30.0))],
    "`mask`, `mask_mod`, `block_mask`": [
        replace(_PLAIN, mask_batch=1, mask_heads=1, mask_rows=1024, mask_width=32)
    ],
    "`bias` and its gradient": [
        replace(_PLAIN, bias_batch=1, bias_heads=8, bias_rows=1024, bias_keys=1024, bias_bytes=n)
        for n in (2, 4)
    ],
    "`deterministic`": [replace(_PLAIN, semantics=Semantics(scale=1.0, deterministic=True))],
}


_UNFUSED = "traced `scale`, float64, `mask_mod` of packed sequences"
"""Features that no kernel serves on any platform."""


def features() -> tuple[str, ...]:
    """The rows of the table."""
    return (*_FEATURES, _UNFUSED)


def unfused(target: Target) -> tuple[str, ...]:
    """The features that ``target`` runs unfused, in the forward, the gradient or both."""
    served = {
        feature: all(_cell(problems, target, operation) == "kernel" for operation in ("fwd", "bwd"))
        for feature, problems in _FEATURES.items()
    }
    return tuple(name for name in features() if not served.get(name, False))


def _columns() -> dict[str, tuple[Target, Operation]]:
    columns: dict[str, tuple[Target, Operation]] = {"CPU": (Target("cpu"), "fwd")}
    for arch in ARCHS:
        target = Target("cuda", frozenset(BY_NAME), arch.capabilities[:1])
        columns[f"{arch.name} forward"] = (target, "fwd")
        columns[f"{arch.name} backward"] = (target, "bwd")
    return columns


def _cell(problems: Sequence[Problem], target: Target, operation: Operation) -> str:
    asked = [(p, operation) for p in problems]
    if operation == "bwd":  # a gradient that another operation gives belongs to it
        asked += [(p, "dbias") for p in problems if p.has_bias]
    fused = [choose(p, target, None, x).implementation != "xla" for p, x in asked]
    return "kernel" if all(fused) else "in part" if any(fused) else "unfused"


def table() -> str:
    """The table: one row per feature, one column per platform and operation."""
    columns = _columns()
    rows = [["", *columns], ["---"] * (len(columns) + 1)]
    for feature, problems in _FEATURES.items():
        rows.append([feature, *(_cell(problems, *column) for column in columns.values())])
    rows.append([_UNFUSED] + ["unfused"] * len(columns))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def exceptions() -> str:
    """Features that run unfused despite kernels: a line per set of platforms and operations."""
    columns = _columns()
    lines: dict[str, list[str]] = {"everywhere": [_UNFUSED]}
    for feature, problems in _FEATURES.items():
        cells = {name: _cell(problems, *column) for name, column in columns.items()}
        where = [name for name, cell in cells.items() if cell != "kernel"]
        if where:
            place = "on GPUs" if where == [*columns][1:] else ", ".join(_joined(where))
            lines.setdefault(place, []).append(feature)
    return "\n".join(f"- {place}: {'; '.join(names)}" for place, names in lines.items())


def _joined(columns: Sequence[str]) -> list[str]:
    """The columns, a family without its operations where both of them are among these."""
    of_family: dict[str, list[str]] = {}
    for column in columns:
        of_family.setdefault(column.split()[0], []).append(column)
    return [x for family, own in of_family.items() for x in ([family] if len(own) > 1 else own)]


SECTIONS = {"support table": table, "exceptions": exceptions}
"""The texts between the marks of a file, by the name in the marks."""


def marks(section: str) -> tuple[str, str]:
    """The lines around a section in a file."""
    return f"<!-- {section}: python -m jax_fa.runtime.support -->", f"<!-- end of {section} -->"


def between(text: str, marks: tuple[str, str], new: str) -> str:
    """``text`` with ``new`` between two lines.

    Raises:
        ValueError: a line is missing.
    """
    before, first, rest = text.partition(marks[0])
    _, last, after = rest.partition(marks[1])
    if not (first and last):
        raise ValueError("no place for what is written here; add the lines\n" + "\n".join(marks))
    return f"{before}{first}\n{new}\n{last}{after}"


def updated(text: str) -> str:
    """``text`` with the present sections between their marks.

    Raises:
        ValueError: it has the marks of no section, or one of two.
    """
    named = [section for section in SECTIONS if any(mark in text for mark in marks(section))]
    for section in named or SECTIONS:
        text = between(text, marks(section), SECTIONS[section]())
    return text


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table, or brings files up to date."""
    parser = argparse.ArgumentParser("python -m jax_fa.runtime.support", description=__doc__)
    parser.add_argument("files", metavar="FILE.md", type=Path, nargs="*")
    files: list[Path] = parser.parse_args(argv).files
    if not files:
        sys.stdout.write(table() + "\n")
    for path in files:
        path.write_text(updated(path.read_text()))


if __name__ == "__main__":
    main()
