"""``python -m benchmarks.pairs``: what has an element for each pair of tokens: biases and masks.

A bias, its gradient included, beside cuDNN, which takes it in the type of the queries; a mask as an
array, packing included, beside the same mask by name; a mask function beside a causal mask. Prints
milliseconds, forward / forward and backward, of candidates in turns, and writes all samples.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_fa
from benchmarks.timing import Protocol, Samples, interleaved

_PROTOCOL = Protocol(warmup=3, rounds=5, calls=10)
_MASKED = (1, 16384, 16, 128)
"""B, T, N and D of the masks."""
_WINDOW = 1024
_DOCUMENTS = 8


class Biased(NamedTuple):
    """Self-attention with a bias [B or 1, N, T, T]."""

    batch: int
    length: int
    heads: int
    head_dim: int
    is_shared: bool = False
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """As the table has it."""
        first = "1" if self.is_shared else "B"
        sizes = " x ".join(str(size) for size in self[:4])
        return f"[{first}, N, T, T] {self.dtype}, {sizes}"


BIASED = (
    *(Biased(*sizes) for sizes in ((32, 384, 4, 32), (4, 1024, 16, 64), (1, 4096, 16, 64))),
    Biased(1, 4096, 16, 128),
    *(
        Biased(*sizes, dtype="float32")
        for sizes in ((32, 384, 4, 32), (8, 1024, 8, 32), (4, 1024, 16, 64), (1, 4096, 16, 64))
    ),
    *(
        Biased(*sizes, is_shared=True)
        for sizes in ((384, 384, 4, 32), (64, 768, 4, 32), (4, 1024, 16, 64), (2, 4096, 16, 64))
    ),
    Biased(4, 1022, 16, 64, dtype="float32"),
    Biased(4, 1021, 16, 64),
)
"""The last two have rows that TMA cannot read."""


class Row(NamedTuple):
    """Candidates by name, each with its samples forward, and forward and backward."""

    name: str
    forward: Mapping[str, Samples]
    both: Mapping[str, Samples]


Attend = Callable[..., jax.Array]
"""Attention of the operands that follow it: query, key, value, and what else it takes."""


def normal(seed: int, shape: tuple[int, ...], dtype: str = "bfloat16") -> jax.Array:
    """Random numbers."""
    return jax.random.normal(jax.random.key(seed), shape, dtype)


class Candidate(NamedTuple):
    """Attention and its operands, floating ones first; those are differentiated."""

    attend: Attend
    operands: tuple[jax.Array, ...]

    def forward(self) -> Callable[[], Any]:
        """What runs it."""
        return partial(jax.jit(self.attend), *self.operands)

    def both(self) -> Callable[[], Any]:
        """What runs it with its gradient."""
        floats = [x for x in self.operands if jnp.issubdtype(x.dtype, jnp.floating)]
        others = self.operands[len(floats) :]

        def run(dout: jax.Array, *given: jax.Array) -> Any:
            out, pullback = jax.vjp(lambda *given: self.attend(*given, *others), *given)
            return out, pullback(dout)

        shape = jax.eval_shape(self.attend, *self.operands).shape
        return partial(jax.jit(run), normal(9, shape), *floats)


def timed(name: str, candidates: Mapping[str, Candidate]) -> Row:
    """Times candidates in turns."""
    forward = {label: candidate.forward() for label, candidate in candidates.items()}
    both = {label: candidate.both() for label, candidate in candidates.items()}
    return Row(name, interleaved(forward, _PROTOCOL), interleaved(both, _PROTOCOL))


def bias_row(case: Biased, peer: Attend | None) -> Row:
    """Ours, and ``peer`` with the bias in the type of the queries."""
    shape = (case.batch, case.length, case.heads, case.head_dim)
    qkv = [normal(seed, shape) for seed in range(3)]
    batch = 1 if case.is_shared else case.batch
    bias = normal(3, (batch, case.heads, case.length, case.length), case.dtype)
    candidates = {"jax_fa": Candidate(_taking("bias", jax_fa.attention), (*qkv, bias))}
    if peer is not None and case.length % 8 == 0:
        others = (*qkv, bias.astype(jnp.bfloat16))
        candidates["cuDNN"] = Candidate(_taking("bias", peer), others)
    return timed(case.name, candidates)


def _taking(option: str, attention: Attend) -> Attend:
    """``attention`` whose fourth operand is an ``option``."""
    return lambda q, k, v, x: attention(q, k, v, **{option: x})


def mask_rows(sizes: tuple[int, int, int, int]) -> Iterator[Row]:
    """Masks as arrays beside the same by name, and functions beside a causal mask."""
    length = sizes[1]
    qkv = tuple(normal(seed, sizes) for seed in range(3))
    at = jnp.arange(length)
    causal = at[None] <= at[:, None]
    document = at * _DOCUMENTS // length
    ids = jnp.tile(document, (sizes[0], 1))
    window = {"is_causal": True, "local_window_size": (_WINDOW, 0)}
    segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
    masks: dict[str, tuple[jax.Array, dict[str, Any]]] = {
        "causal": (causal, {"is_causal": True}),
        f"window {_WINDOW}": (causal & (at[:, None] - at <= _WINDOW), window),
        f"{_DOCUMENTS} documents": (document[:, None] == document, segments),
    }
    for name, (mask, options) in masks.items():
        by_array = Candidate(_taking("mask", jax_fa.attention), (*qkv, mask[None, None]))
        by_name = Candidate(partial(jax_fa.attention, **options), qkv)
        yield timed(name, {"array": by_array, "name": by_name})
    half = length // 2
    functions: dict[str, Callable[..., Any]] = {
        f"prefix of {half}": lambda b, h, q, k: (k <= q) | (k < half),
        f"chunks of {half}": lambda b, h, q, k: (k <= q) & (k // half == q // half),
    }
    for name, function in functions.items():
        by_function = Candidate(partial(jax_fa.attention, mask_mod=function), qkv)
        whole = Candidate(partial(jax_fa.attention, is_causal=True), qkv)
        yield timed(name, {"function": by_function, "causal": whole})


def line(row: Row) -> str:
    """A row of the table: the first candidate, the second if there is one, and their ratio."""
    shown = []
    for label in row.forward:
        pair = (1e3 * x[label].median for x in (row.forward, row.both))
        shown.append(f"{label} " + " / ".join(f"{ms:.3f}" for ms in pair))
    ratios = "-"
    if len(row.forward) > 1:
        first, second = row.forward
        pair = (x[first].speedup_over(x[second]) for x in (row.forward, row.both))
        ratios = " / ".join(f"{ratio:.2f}" for ratio in pair)
    return f"| {row.name} | {'; '.join(shown)} | {ratios} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table and writes the samples."""
    parser = argparse.ArgumentParser("python -m benchmarks.pairs", description=__doc__)
    parser.add_argument("--only", choices=("biases", "masks"))
    parser.add_argument("--shrink", type=int, default=1, help="divides lengths and batches")
    parser.add_argument("--output", type=Path, default=Path("pairs.json"))
    args = parser.parse_args(argv)
    device = jax.devices()[0]
    peer = None
    if device.platform == "gpu":
        peer = partial(jax.nn.dot_product_attention, implementation="cudnn")
    print(f"{device.device_kind}, jax {jax.__version__}\n")
    print("| | ms, forward / forward and backward | times as fast as the second |")
    print("| --- | --- | ---: |")
    rows = []

    def show(row: Row) -> None:
        print(line(row), flush=True)
        rows.append(row)

    if args.only != "masks":
        for case in BIASED:
            smaller = (max(case.batch // args.shrink, 1), case.length // args.shrink)
            show(bias_row(case._replace(batch=smaller[0], length=smaller[1]), peer))
    if args.only != "biases":
        batch, length, heads, head_dim = _MASKED
        for row in mask_rows((batch, length // args.shrink, heads, head_dim)):
            show(row)
    samples = [
        {
            "name": row.name,
            **{
                direction: {label: dataclasses.asdict(x) for label, x in taken.items()}
                for direction, taken in (("forward", row.forward), ("both", row.both))
            },
        }
        for row in rows
    ]
    run = {"device": device.device_kind, "jax": jax.__version__}
    args.output.write_text(json.dumps({**run, "rows": samples}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
