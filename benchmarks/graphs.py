"""``python -m benchmarks.graphs``: jax_fa beside PyTorch's FlashAttention-2 in CUDA graphs.

The points of ``kernel_times`` as a program runs them, at the clock that the card keeps under load:
``CHAIN`` calls one after the other, in one compiled program of jax_fa and in one CUDA graph of
PyTorch, so that short sequences do not wait for the host. Both take turns in one process. Needs
PyTorch and a GPU, and ``XLA_PYTHON_CLIENT_PREALLOCATE=false`` in the environment, since both need
its memory. Prints the table of ``kernel_times``, with medians of microseconds a call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_fa
from benchmarks.kernel_times import POINTS, TOKENS, Point, Times, table
from benchmarks.timing import Protocol, interleaved

CHAIN = 8


class Runs(NamedTuple):
    """Functions that start ``CHAIN`` calls: forward; forward and backward."""

    forward: Callable[[], object]
    both: Callable[[], object]


class Queued:
    """Work of PyTorch's that may not be finished."""

    def block_until_ready(self) -> None:
        """Waits for it, as JAX waits for its arrays."""
        import torch

        torch.cuda.synchronize()


def runs_of_jax_fa(point: Point) -> Runs:
    """Queries differ from call to call: XLA would make one of equal calls."""
    size = (TOKENS // point.length, point.length, point.heads, point.head_dim)
    keys = jax.random.split(jax.random.key(0), CHAIN + 3)
    *queries, k, v, dout = (jax.random.normal(key, size, jnp.bfloat16) for key in keys)
    attend = functools.partial(jax_fa.attention, is_causal=point.is_causal)

    def forward(queries: Any, k: Any, v: Any, _: Any) -> Any:
        return [attend(q, k, v) for q in queries]

    def both(queries: Any, k: Any, v: Any, dout: Any) -> Any:
        return [jax.vjp(attend, q, k, v)[1](dout) for q in queries]

    x = queries, k, v, dout
    return Runs(*(functools.partial(jax.jit(function), *x) for function in (forward, both)))


def runs_of_torch(point: Point) -> Runs:
    """The same calls."""
    import torch
    from torch.nn import attention
    from torch.nn.functional import scaled_dot_product_attention

    size = (TOKENS // point.length, point.heads, point.length, point.head_dim)
    every: Any = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(CHAIN + 3)]
    *queries, k, v, dout = every
    for operand in (*queries, k, v):
        operand.requires_grad_()
    attend = functools.partial(scaled_dot_product_attention, is_causal=point.is_causal)

    def forward() -> None:
        with torch.no_grad():
            for q in queries:
                attend(q, k, v)

    def both() -> None:
        for q in queries:
            torch.autograd.grad(attend(q, k, v), (q, k, v), dout)

    def captured(function: Callable[[], None]) -> Callable[[], object]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function()  # what is allocated or loaded at the first call cannot be captured
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()

        def run() -> Queued:
            graph.replay()
            return Queued()

        return run

    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        return Runs(captured(forward), captured(both))


def measure(point: Point) -> tuple[Times, Times]:
    """Microseconds of a call of jax_fa, and of PyTorch."""
    # A sample takes a tenth of a second or more: a run's start costs up to a millisecond.
    calls = 2 * TOKENS // point.length
    protocol = Protocol(warmup=calls, calls=calls, rounds=8, seconds=2.0)
    found = []
    for candidates in zip(runs_of_jax_fa(point), runs_of_torch(point), strict=True):
        samples = interleaved(dict(zip(("jax_fa", "torch"), candidates, strict=True)), protocol)
        found.append([one.median / CHAIN * 1e6 for one in samples.values()])
    ours, theirs = zip(*found, strict=True)
    jax.clear_caches()
    return Times(*ours), Times(*theirs)


def main() -> int:
    """The command line."""
    times = []
    for number, point in enumerate(POINTS, 1):
        print(f"{number} of {len(POINTS)}", end="\r", file=sys.stderr, flush=True)
        times.append(measure(point))
    print(table(POINTS, *zip(*times, strict=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
