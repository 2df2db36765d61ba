"""Who is measured: each implementation of attention as a function that runs a workload once."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fa
from benchmarks.workloads import Direction, Workload

Runner = Callable[[], Any]
"""Runs once and returns the results; those of JAX may still be on the way."""


@dataclass(frozen=True)
class Program:
    """A ``Runner``: what XLA compiled, and what it is called with."""

    compiled: Any
    arguments: tuple[Any, ...]

    def __call__(self) -> Any:
        """Runs once."""
        return self.compiled(*self.arguments)

    @property
    def temporary_bytes(self) -> int | None:
        """Memory above inputs and outputs as XLA laid it out; None where it does not say.

        On a GPU that is all of it: kernels get their scratch from XLA.
        """
        planned = self.compiled.memory_analysis()
        return None if planned is None else planned.temp_size_in_bytes


def arrays(workload: Workload) -> dict[str, np.ndarray]:
    """Inputs and the output's cotangent, float32, the same for every implementation."""
    generator = np.random.default_rng(0)
    return {
        name: generator.standard_normal(shape, np.float32)
        for name, shape in workload.shapes().items()
    }


def jax_runner(
    attention: Callable[..., Any],
    workload: Workload,
    dtype: str,
    direction: Direction,
    inputs: dict[str, Any] | None = None,
) -> Program:
    """A runner of anything with the signature of ``jax.nn.dot_product_attention``.

    ``inputs`` are instead of ``arrays``.
    """
    if inputs is None:
        inputs = {name: jnp.asarray(x, dtype) for name, x in arrays(workload).items()}
    apply = partial(attention, is_causal=workload.is_causal, local_window_size=workload.window)

    def forward(q: Any, k: Any, v: Any, dout: Any) -> Any:
        return apply(q, k, v)

    def forward_backward(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pullback = jax.vjp(apply, q, k, v)
        return out, pullback(dout)

    if direction == "backward":
        dout = inputs.pop("dout")
        _, pullback = jax.jit(lambda q, k, v: jax.vjp(apply, q, k, v))(**inputs)
        pull = jax.jit(lambda pullback, dout: pullback(dout)).lower(pullback, dout).compile()
        return Program(pull, (pullback, dout))
    function = forward if direction == "forward" else forward_backward
    arguments = tuple(inputs.values())
    return Program(jax.jit(function).lower(*arguments).compile(), arguments)


def torch_runner(workload: Workload, dtype: str, direction: Direction) -> Runner:
    """A runner of PyTorch's fused attention on the CPU, on arrays in the layout that it prefers."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    q, k, v, dout = (
        torch.from_numpy(x).to(getattr(torch, dtype)).transpose(1, 2).contiguous()
        for x in arrays(workload).values()
    )
    apply = partial(
        torch.nn.functional.scaled_dot_product_attention,
        is_causal=workload.is_causal,
        enable_gqa=workload.num_kv_heads != workload.num_q_heads,
    )
    if direction == "forward":
        return lambda: apply(q, k, v)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def forward_backward() -> Any:
        out = apply(q, k, v)
        return out, torch.autograd.grad(out, inputs, dout)

    return forward_backward


def jax_fa_runner(workload: Workload, dtype: str, direction: Direction) -> Program:
    """A runner of ``jax_fa.attention``."""
    keywords: dict[str, Any] = {"deterministic": workload.is_deterministic}
    if workload.num_documents > 1:
        length = workload.q_len // workload.num_documents
        ids = jnp.tile(jnp.arange(workload.q_len) // length, (workload.batch, 1))
        keywords |= {"query_segment_ids": ids, "key_value_segment_ids": ids}
    return jax_runner(partial(jax_fa.attention, **keywords), workload, dtype, direction)


def pallas_runner(workload: Workload, dtype: str, direction: Direction) -> Program:
    """A runner of JAX's Pallas attention for Hopper, in the block sizes of its own benchmark.

    It does not scale logits, which costs nothing either way. Raises ValueError for what it does
    not take.
    """
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    backward: dict[str, Any] = {}
    if direction != "forward":
        backward = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
    config = attention_mgpu.TuningConfig(
        block_q=64,
        block_kv=128 if workload.head_dim <= 128 else 64,
        max_concurrent_steps=2,
        causal=workload.is_causal,
        **backward,
    )

    def attention(q: Any, k: Any, v: Any, is_causal: bool, local_window_size: Any) -> Any:
        del is_causal, local_window_size
        return attention_mgpu.attention(q, k, v, config)

    return jax_runner(attention, workload, dtype, direction)


CUDNN = partial(jax_runner, partial(jax.nn.dot_product_attention, implementation="cudnn"))

RUNNERS: dict[str, Callable[[Workload, str, Direction], Runner]] = {
    "jax_fa": jax_fa_runner,
    "jax.nn xla": partial(jax_runner, partial(jax.nn.dot_product_attention, implementation="xla")),
    "torch": torch_runner,
}


def is_available(name: str, workload: Workload) -> bool:
    """True if an implementation is installed and can run a workload without a T x S mask array."""
    if name != "torch":
        return True
    return workload.window is None and importlib.util.find_spec("torch") is not None
