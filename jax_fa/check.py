"""``python -m jax_fa.check``: is attention of one shape right on this machine, and how fast is it?

    python -m jax_fa.check --heads 32:8 --q-len 4096 --head-dim 128 --causal

Results and gradients are compared with those of the unfused path on the same values in a wider
type. The unfused path in the type asked for shows the error that rounding alone makes; twice that
is allowed. The exit status is 1 if a result has more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_fa
from jax_fa.analysis import roofline
from jax_fa.spec.problem import Problem

ALLOWED = 2.0
"""Times the error of rounding alone."""
SMALLEST = 1e-6
"""Relative error that is allowed in any case; the LSE is float32 and has no other rounding."""
NAMES = ("out", "lse", "dq", "dk", "dv")
WIDER = {"bfloat16": "float32", "float16": "float32", "float32": "float64"}


@dataclass(frozen=True)
class Shape:
    """The problem: extents as in ``jax_fa.attention``, and the band."""

    batch: int
    q_len: int
    kv_len: int
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    dtype: str
    is_causal: bool
    window: tuple[int | None, int | None]

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of ``jax_fa.attention_with_lse``."""
        return {"is_causal": self.is_causal, "local_window_size": self.window}


class Finding(NamedTuple):
    """Errors of one result, relative in the Euclidean norm: ours, and of rounding alone."""

    name: str
    error: float
    rounding: float

    @property
    def is_right(self) -> bool:
        """Whether the error is allowed; NaN is not."""
        return self.error <= max(ALLOWED * self.rounding, SMALLEST)


def drawn(shape: Shape, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Normally distributed q, k and v, and a cotangent of the output, all in ``shape.dtype``."""
    rng, (heads, kv_heads), (d, dv) = np.random.default_rng(seed), shape.heads, shape.head_dims
    shapes = (
        (shape.batch, shape.q_len, heads, d),
        (shape.batch, shape.kv_len, kv_heads, d),
        (shape.batch, shape.kv_len, kv_heads, dv),
        (shape.batch, shape.q_len, heads, dv),
    )
    *qkv, dout = (rng.standard_normal(s).astype(jnp.dtype(shape.dtype)) for s in shapes)
    return qkv, dout


def findings(shape: Shape, implementation: Any, seed: int = 0) -> list[Finding]:
    """The errors of output, LSE and gradients under ``implementation``."""
    qkv, dout = drawn(shape, seed)

    def results(dtype: str, implementation: Any) -> list[np.ndarray]:
        @jax.jit
        def step(*arrays: Any) -> Any:
            def attend(*moving: Any) -> Any:
                return jax_fa.attention_with_lse(
                    *moving, **shape.options, implementation=implementation
                )

            (out, lse), pullback = jax.vjp(attend, *arrays[:3])
            return out, lse, *pullback((arrays[3], jnp.zeros_like(lse)))

        with jax.enable_x64(dtype == "float64"):
            found = step(*(jnp.asarray(x, dtype) for x in (*qkv, dout)))
            return [np.asarray(x, np.float64) for x in found]

    exact = results(WIDER[shape.dtype], "xla")
    rounded, ours = results(shape.dtype, "xla"), results(shape.dtype, implementation)

    def error(got: np.ndarray, want: np.ndarray) -> float:
        # A row that sees no key has an LSE of -inf on both sides.
        with np.errstate(invalid="ignore"):
            difference = np.where(got == want, 0.0, got - want)
        size = float(np.linalg.norm(np.where(np.isfinite(want), want, 0.0)))
        return float(np.linalg.norm(difference)) / max(size, 1e-30)

    return [
        Finding(name, error(got, want), error(by_rounding, want))
        for name, got, by_rounding, want in zip(NAMES, ours, rounded, exact, strict=True)
    ]


def seconds(run: Callable[[], Any], rounds: int) -> float:
    """Of one call, by the clock: the median of ``rounds``, after two that do not count."""
    took = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        jax.block_until_ready(run())
        took.append(time.perf_counter() - start)
    return statistics.median(took[2:])


def flops(problem: Problem, *, has_backward: bool) -> int:
    """Of the products over visible pairs: two forward, five more backward."""
    forward = roofline.work(problem, "fwd", 1).flops
    return forward + (roofline.work(problem, "bwd", 1).flops if has_backward else 0)


def timings(shape: Shape, problem: Problem, implementation: Any, rounds: int) -> Iterator[str]:
    """A line for the forward, and one for forward and backward."""
    qkv, dout = drawn(shape, 0)
    arrays = [jnp.asarray(x) for x in (*qkv, dout)]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax_fa.attention(q, k, v, **shape.options, implementation=implementation)

    def train(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pullback = jax.vjp(attend, q, k, v)
        return out, pullback(dout)

    forward, both = jax.jit(attend), jax.jit(train)
    for name, run, has_backward in (
        ("forward", lambda: forward(*arrays[:3]), False),
        ("forward and backward", lambda: both(*arrays), True),
    ):
        took = seconds(run, rounds)
        rate = flops(problem, has_backward=has_backward) / took / 1e12
        yield f"{name}: {took * 1e3:.3g} ms, {rate:.3g} TFLOP/s"


def _pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition(":")
    return int(first), int(second or first)


def _window(text: str) -> tuple[int | None, int | None]:
    left, right = (int(side) if side else None for side in text.split(":"))
    return left, right


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m jax_fa.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--batch", type=int, default=2, metavar="B")
    parser.add_argument("--q-len", type=int, default=1024, metavar="T")
    parser.add_argument("--kv-len", type=int, metavar="S", help="default T")
    parser.add_argument(
        "--heads", type=_pair, default=(8, 8), metavar="N[:K]", help="query and key/value heads"
    )
    parser.add_argument("--head-dim", type=_pair, default=(128, 128), metavar="D[:Dv]")
    parser.add_argument("--dtype", choices=WIDER, default="bfloat16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument(
        "--window", type=_window, default=(None, None), metavar="L:R", help="a side may be empty"
    )
    parser.add_argument("--implementation", help="as for jax_fa.attention")
    parser.add_argument(
        "--emulate", metavar="FAMILY", help="run the kernels of sm90, ... on the CPU"
    )
    parser.add_argument("--rounds", type=int, default=20, help="of timing; 0 for none")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what runs, its errors and its times; returns the exit status.

    Raises:
        SystemExit: the call is refused, for the reason that it says.
    """
    args = _parser().parse_args(argv)
    try:
        if args.emulate is None:
            return _check(args)
        args.implementation, args.rounds = "emulated", 0
        with jax_fa.emulation(args.emulate):
            return _check(args)
    except (TypeError, ValueError, NotImplementedError) as refusal:
        raise SystemExit(str(refusal)) from None


def _check(args: argparse.Namespace) -> int:
    kv_len = args.q_len if args.kv_len is None else args.kv_len
    extents = (args.batch, args.q_len, kv_len, args.heads, args.head_dim)
    shape = Shape(*extents, args.dtype, args.causal, args.window)
    write = sys.stdout.write
    qkv, _ = drawn(shape, 0)
    explained = jax_fa.explain(*qkv, **shape.options, implementation=args.implementation)
    write(f"{explained}\n")
    is_right = True
    for found in findings(shape, args.implementation):
        is_right &= found.is_right
        verdict = "ok" if found.is_right else "WRONG"
        write(f"{found.name:4s} error {found.error:.1e}, of rounding {found.rounding:.1e}: ")
        write(f"{verdict}\n")
    if args.rounds > 0:
        for line in timings(shape, explained.problem, args.implementation, args.rounds):
            write(f"{line}\n")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
