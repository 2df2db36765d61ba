"""One of several processes on this machine: ``python worker.py PORT COUNT INDEX JOB [ARGUMENT]``.

They speak over the loopback interface alone; ``test_processes.py`` starts and ends them.
"""

import json
import os
import runpy
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib import _jax

import jax_fa

SPLIT = P(None, "context")


def stay_on_loopback():
    """JAX leaves Gloo to listen on whatever address the name of this machine has."""
    everywhere = _jax.make_gloo_tcp_collectives
    _jax.make_gloo_tcp_collectives = partial(everywhere, hostname="127.0.0.1")


def begin(port, count, index, heartbeat):
    """Joins the others, of whom one that is silent for ``heartbeat`` seconds counts as dead."""
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        count,
        index,
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=heartbeat,
    )


def attention_and_gradient(attend, q, k, v):
    return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(attend(*x))), (0, 1, 2)))(q, k, v)


def shared(strategy):
    """Causal attention over tokens that all devices of all processes share; and their mesh."""
    mesh = jax.make_mesh((jax.device_count(),), ("context",), axis_types=(AxisType.Auto,))
    attend = partial(jax_fa.parallel.attention, is_causal=True, strategy=strategy)
    return jax.shard_map(attend, mesh=mesh, in_specs=(SPLIT,) * 3, out_specs=SPLIT), mesh


def placed(mesh, x):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, SPLIT), lambda part: x[part])


def inputs():
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, 32, 4, 8), np.float32) for _ in range(3)]


def attention(strategies):
    """Every strategy gives what one device gives."""
    want = attention_and_gradient(partial(jax_fa.attention, is_causal=True), *inputs())
    for strategy in strategies:
        attend, mesh = shared(strategy)
        got = attention_and_gradient(attend, *(placed(mesh, x) for x in inputs()))
        assert {x.process_index for x in mesh.devices.flat} == set(range(jax.process_count()))
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            for part in x.addressable_shards:
                np.testing.assert_allclose(
                    part.data, y[part.index], rtol=1e-5, atol=1e-5, err_msg=strategy
                )


def train(folder, steps):
    """Losses up to a step, going on from what is in the folder; saved there."""
    from jax_fa.demo.checkpoint import Checkpoints
    from jax_fa.demo.data import Text
    from jax_fa.demo.meshes import MeshConfig
    from jax_fa.demo.model import ModelConfig
    from jax_fa.demo.program import Demo, RunConfig
    from jax_fa.demo.training import TrainConfig

    model = ModelConfig(context=16, num_layers=1, d_model=16, num_heads=4, num_kv_heads=2)
    training = TrainConfig(batch_size=2, warmup_steps=2)
    text = Text(np.arange(500, dtype=np.uint8), np.arange(50, dtype=np.uint8), "numbers")
    mesh = None if folder is None else MeshConfig(model=2, context=2)
    run = Demo(model, training, RunConfig(steps, mesh=mesh), text)
    if folder is None:
        return run.train()[1]
    with Checkpoints(Path(folder), model, training, text) as checkpoints:
        return run.train(checkpoints)[1]


def fall(victim, how):
    """Computes until the process ``victim`` is killed, or stopped, in the middle of a step."""
    attend, mesh = shared("ring")
    given = [placed(mesh, x) for x in inputs()]
    step = jax.jit(attend)
    jax.block_until_ready(step(*given))
    if jax.process_index() == victim:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.Signals[how])).start()
    while True:
        jax.block_until_ready(step(*given))


if __name__ == "__main__":
    port, count, index, job, *arguments = sys.argv[1:]
    stay_on_loopback()
    if job == "script":
        sys.argv[1:] = [f"127.0.0.1:{port}", count, index]
        runpy.run_path(arguments[0])
        sys.exit()
    begin(int(port), int(count), int(index), heartbeat=10 if job == "fall" else 100)
    if job == "fall":
        fall(int(arguments[0]), arguments[1])
    folder, steps, *strategies = arguments
    attention(strategies)
    sys.stdout.write(f"LOSSES {json.dumps(train(folder, int(steps)))}\n")
