"""A step of the demo's training, its attention on Blackwell's kernels in the emulator."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

import jax_fa
from jax_fa.demo.model import GPT, ModelConfig
from jax_fa.demo.training import TrainConfig, loss_fn, make_trainer
from jax_fa.runtime import bindings

NEEDED = {"fwd_sm100_bf16_d64_causal", "bwd_sm100_bf16_d64_causal"}
TINY = ModelConfig(
    context=160, num_layers=2, d_model=128, num_heads=2, num_kv_heads=1, dtype="bfloat16"
)
TRAINING = TrainConfig(batch_size=1)
WINDOWS = np.random.default_rng(0).integers(0, 256, (1, TINY.context + 1))

pytestmark = pytest.mark.skipif(
    not bindings.compiled() >= NEEDED, reason=f"this build lacks {', '.join(sorted(NEEDED))}"
)


def loss_and_gradients(implementation):
    model = GPT(replace(TINY, implementation=implementation), rngs=nnx.Rngs(0))
    loss, gradients = nnx.jit(nnx.value_and_grad(loss_fn))(model, WINDOWS)
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return float(loss), {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def test_loss_and_gradients_are_those_of_the_cpu_kernels():
    """Different orders of bfloat16 rounding; a wrong gradient is off by its own size."""
    with jax_fa.emulation("sm100", seed=1):
        loss, gradients = loss_and_gradients("emulated")
    wanted_loss, wanted = loss_and_gradients("cpu")
    assert loss == pytest.approx(wanted_loss, abs=2e-3)
    for name, gradient in gradients.items():
        error = np.linalg.norm(gradient - wanted[name]) / np.linalg.norm(wanted[name])
        assert error < 0.03, name


def test_a_whole_training_step_runs():
    losses: dict[str, list[float]] = {}
    for implementation in ("emulated", "cpu"):
        with jax_fa.emulation("sm100"):
            trainer, state = make_trainer(replace(TINY, implementation=implementation), TRAINING)
            losses[implementation] = []
            for _ in range(2):
                state, loss = trainer.step(state, WINDOWS)
                losses[implementation].append(float(loss))
    np.testing.assert_allclose(losses["emulated"], losses["cpu"], atol=5e-3)
    assert losses["emulated"][1] < losses["emulated"][0]
