"""``python -m jax_fa.support [README.md]``: what kernels serve, as a Markdown table.

The table is what ``choice.choose`` says about one problem per feature, given a full build with one
mask function. With a file name, the table between the two marks in it is brought up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jax_fa.band import Band
from jax_fa.choice import Target, choose
from jax_fa.problem import Problem, Semantics
from jax_fa.variants import (
    ARCHS,
    BY_NAME,
    HOPPER_HEADS,
    OPERATIONS,
    VARIANTS,
    Operation,
    with_mask_mod,
)

START = "<!-- support table, written by: python -m jax_fa.support README.md -->"
END = "<!-- end of the support table -->"

_MASK_MOD = "chunked_1024"
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


def _banded(band: Band) -> Problem:
    return replace(_PLAIN, semantics=Semantics(scale=1.0, band=band))


_FEATURES: dict[str, Sequence[Problem]] = {
    "bfloat16, float16": [_PLAIN, replace(_PLAIN, dtype="float16")],
    "float32": [replace(_PLAIN, dtype="float32")],
    "D (or D/Dv) of " + ", ".join(f"{d}" if d == v else f"{d}/{v}" for d, v in HOPPER_HEADS): [
        replace(_PLAIN, head_dim=d, value_dim=v) for d, v in HOPPER_HEADS
    ],
    "any other D, Dv": [replace(_PLAIN, head_dim=80, value_dim=72)],
    "grouped-query, multi-query": [replace(_PLAIN, num_kv_heads=n) for n in (2, 1)],
    "`is_causal`, both alignments": [
        _banded(Band(is_causal=True)),
        _banded(Band(is_causal=True, alignment="bottom_right")),
    ],
    "`local_window_size`": [_banded(Band(left=256, right=0)), _banded(Band(left=128, right=128))],
    "`query_seq_lengths`, `key_value_seq_lengths`": [replace(_PLAIN, has_lengths=True)],
    "segment ids (packed documents)": [replace(_PLAIN, has_segments=True)],
    "`attention_varlen`": [replace(_PLAIN, batch=1, is_packed=True)],
    "`query_offset`": [replace(_PLAIN, has_offset=True)],
    "`logits_soft_cap`": [replace(_PLAIN, semantics=Semantics(scale=1.0, soft_cap=30.0))],
    "`sinks`": [replace(_PLAIN, has_sinks=True)],
    "`deterministic`": [replace(_PLAIN, semantics=Semantics(scale=1.0, deterministic=True))],
    "`mask_mod`, compiled with `--mask-mod`": [
        replace(_PLAIN, semantics=Semantics(scale=1.0, mask_mod=_MASK_MOD))
    ],
}


_UNFUSED = "`mask`, `bias`, traced `scale`, float64"
"""What no kernel serves on any platform."""


def features() -> tuple[str, ...]:
    """The rows of the table."""
    return (*_FEATURES, _UNFUSED)


def unfused(target: Target) -> tuple[str, ...]:
    """The features that ``target`` runs unfused, in the forward, the gradient or both."""
    served = {
        feature: all(_cell(problems, target, operation) == "kernel" for operation in OPERATIONS)
        for feature, problems in _FEATURES.items()
    }
    return tuple(name for name in features() if not served.get(name, False))


def _columns() -> dict[str, tuple[Target, Operation]]:
    columns: dict[str, tuple[Target, Operation]] = {"CPU": (Target("cpu"), "fwd")}
    compiled = {*BY_NAME, *(variant.name for variant in with_mask_mod(VARIANTS, _MASK_MOD))}
    for arch in ARCHS:
        target = Target("cuda", frozenset(compiled), (arch.capability,))
        columns[f"{arch.name} forward"] = (target, "fwd")
        columns[f"{arch.name} backward"] = (target, "bwd")
    return columns


def _cell(problems: Sequence[Problem], target: Target, operation: Operation) -> str:
    fused = [choose(p, target, None, operation).implementation != "xla" for p in problems]
    return "kernel" if all(fused) else "in part" if any(fused) else "unfused"


def table() -> str:
    """The table: one row per feature, one column per platform and operation."""
    columns = _columns()
    rows = [["", *columns], ["---"] * (len(columns) + 1)]
    for feature, problems in _FEATURES.items():
        rows.append([feature, *(_cell(problems, *column) for column in columns.values())])
    rows.append([_UNFUSED] + ["unfused"] * len(columns))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def updated(text: str) -> str:
    """``text`` with the present table between its marks.

    Raises:
        ValueError: a mark is missing.
    """
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"no place for the support table; add the lines\n{START}\n{END}")
    return f"{before}{START}\n{table()}\n{END}{after}"


def main(argv: Sequence[str]) -> None:
    """Prints the table, or brings a file up to date."""
    if not argv:
        sys.stdout.write(table() + "\n")
        return
    path = Path(argv[0])
    path.write_text(updated(path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
