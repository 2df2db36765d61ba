"""Heads that no kernel is compiled for, in programs for GPUs: what is padded, where, and what not.

Nothing runs here; results are those of ``tests/kernels/test_narrow_heads.py``.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa
from jax_fa import parallel
from jax_fa.runtime.partitioning import Call
from jax_fa.spec.problem import Semantics

pytestmark = pytest.mark.usefixtures("all_kernels")


def step_of(heads):
    """Forward and gradients of (out, lse), as text for GPUs."""

    def loss(q, k, v):
        out, lse = jax_fa.attention_with_lse(q, k, v, is_causal=True)
        return out.astype(np.float32).sum() + lse.sum()

    q, v = (jax.ShapeDtypeStruct((2, 512, 8, x), jnp.bfloat16) for x in heads)
    traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(q, q, v)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("heads", "kernel", "pads", "cuts"),
    [
        ((64, 64), "d64", (0, 0), 0),
        ((192, 128), "d192v128", (0, 0), 0),
        ((80, 80), "d96", (0, 0), 0),  # multiples of 8
        ((81, 81), "d96", (3, 5), 4),  # q, k, v; q, k, v, out, dout; out; dq, dk, dv
        ((162, 128), "d192v128", (2, 2), 2),  # q, k; dq, dk
        ((96, 71), "d96", (1, 3), 2),  # v; v, out, dout; out; dv
    ],
)
def test_a_call_pads_each_array_once_and_only_what_is_too_small(heads, kernel, pads, cuts):
    text = step_of(heads)
    assert re.findall(r'custom_call @jax_fa_(\w+)_v1.*kernel = "(\w*)"', text) == [
        ("fwd", f"bf16_{kernel}_causal"),
        ("bwd", f"bf16_{kernel}_causal"),
    ]
    assert not re.search("dot_general|stablehlo.while", text)  # nothing runs unfused
    forward, _, backward = text.partition("@jax_fa_fwd_v1")
    counted = forward.count("stablehlo.pad"), backward.count("stablehlo.pad")
    assert (counted, text.count("stablehlo.slice")) == (pads, cuts)


def test_the_padding_of_a_forward_is_not_kept_for_its_backward():
    """XLA merges equal operations, but for those behind a barrier."""
    forward, _, backward = step_of((81, 81)).partition("@jax_fa_fwd_v1")
    assert "optimization_barrier" not in forward
    for operand in ("%arg0", "%arg1", "%arg2"):
        barred = re.findall(rf"(%\d+) = stablehlo.optimization_barrier {operand} ", backward)
        assert len(barred) == 1
        assert f"stablehlo.pad {barred[0]}," in backward
        assert f"stablehlo.pad {operand}," not in backward


def on_two_devices(attend, kind=AxisType.Auto):
    """A program of two devices, as text for GPUs, whose heads (of D = 81) lie on both."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, P(None, None, "x"))
    x = jax.ShapeDtypeStruct((2, 512, 8, 81), jnp.bfloat16, sharding=sharding)
    traced = jax.jit(partial(attend, mesh)).trace(x, x, x)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_call_that_jit_splits_is_padded_on_each_device(kind):
    text = on_two_devices(lambda mesh, *qkv: jax_fa.attention(*qkv), kind)
    assert "@jax_fa_partitioned_v1" in text
    assert "stablehlo.pad" not in text and "x88x" not in text
    # What XLA's partitioner is told of one device: test_the_part_of_a_device_...
    call = Call("fwd", "cuda", ("q", "k", "v"), Semantics(1.0))
    part = [jax.ShapeDtypeStruct((2, 512, 4, 81), jnp.bfloat16)] * 3
    traced = jax.jit(Call.of(call.text()).compute).trace(*part)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("stablehlo.pad") == 3
    assert [x.shape[-1] for x in jax.tree.leaves(traced.out_info) if x.ndim == 4] == [81]


@pytest.mark.parametrize(
    ("attend", "split", "exchange"),
    [
        (jax_fa.attention, P(None, None, "x"), ""),
        (partial(parallel.attention, context_axis="x", strategy="ring"), P(None, "x"), "permute"),
        (
            partial(parallel.attention, context_axis="x", strategy="all_gather"),
            *(P(None, "x"), "all_gather"),
        ),
    ],
    ids=["heads", "ring", "all_gather"],
)
def test_devices_pad_what_they_hold_and_send_what_is_not_padded(attend, split, exchange):
    def mapped(mesh, *qkv):
        return jax.shard_map(attend, mesh=mesh, in_specs=split, out_specs=split)(*qkv)

    text = on_two_devices(mapped)
    assert "@jax_fa_fwd_v1" in text and "stablehlo.pad" in text
    sent = [line for line in text.splitlines() if exchange and f"{exchange}" in line]
    assert bool(sent) == bool(exchange)
    assert not any("x88x" in line for line in sent)
