"""Training of the demo's GPT: optimizer, jit-compiled step, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jax_fa.demo import meshes
from jax_fa.demo.model import GPT, ModelConfig


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run; together with a ModelConfig and a text it fixes every loss.

    Attributes:
        batch_size: B, windows per step.
        learning_rate: its peak, at the end of the warm-up.
        warmup_steps: steps over which the learning rate rises; then it falls as step ** -0.5, which
            needs no number of steps, so that a finished run can go on.
        weight_decay: of AdamW.
        max_gradient_norm: longer gradients are shortened to it.
        seed: of the initial parameters and of the batches, 32 bits.
    """

    batch_size: int = 8
    learning_rate: float = 3e-3
    warmup_steps: int = 40
    weight_decay: float = 0.1
    max_gradient_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses sizes that cannot be trained."""
        for name in ("batch_size", "warmup_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it should be at least 1.")
        for name in ("learning_rate", "weight_decay", "max_gradient_norm"):
            if not 0 <= getattr(self, name) < math.inf:  # refuses NaN, too
                raise ValueError(f"{name} is {getattr(self, name)}; it should be finite and >= 0.")
        if not 0 <= self.seed < 1 << 32:  # jax drops the bits above these without 64-bit types
            raise ValueError(f"seed is {self.seed}; it should be from 0 to {(1 << 32) - 1}.")


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW with clipped gradients and the schedule that ``TrainConfig`` describes."""

    def learning_rate(step: Array) -> Array:
        progress = (step + 1) / config.warmup_steps
        return config.learning_rate * jnp.minimum(progress, progress**-0.5)

    return optax.chain(
        optax.clip_by_global_norm(config.max_gradient_norm),
        optax.adamw(learning_rate, b2=0.98, weight_decay=config.weight_decay),
    )


def loss_fn(model: GPT, windows: Array) -> Array:
    """Mean cross-entropy, in nats per token, of predicting each next token of [B, T + 1]."""
    logits = model(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


class Trainer(NamedTuple):
    """A training step, and what puts a model together again from the state it works on.

    Attributes:
        graph: the static structure of (model, optimizer); their arrays are the state.
        step: (state, windows [B, T + 1]) -> (state, loss), compiled. It consumes the state that it
            is given.
    """

    graph: nnx.GraphDef[Any]
    step: Callable[[nnx.State, Any], tuple[nnx.State, Array]]

    def model(self, state: nnx.State) -> GPT:
        """The model of a state."""
        return nnx.merge(self.graph, state)[0]


def make_trainer(
    model_config: ModelConfig, train_config: TrainConfig, mesh: Mesh | None = None
) -> tuple[Trainer, nnx.State]:
    """Compiles the step; returns it with the initial state of model and optimizer.

    Args:
        model_config: the model.
        train_config: its training.
        mesh: as ``MeshConfig.make`` makes it, whose devices share the work; every process passes
            whole windows.
    """

    def initial() -> tuple[nnx.GraphDef[Any], nnx.State]:
        model = GPT(model_config, rngs=nnx.Rngs(train_config.seed))
        optimizer = nnx.Optimizer(model, make_optimizer(train_config), wrt=nnx.Param)
        return nnx.split((model, optimizer))

    graph, like = jax.eval_shape(initial)
    parts = None if mesh is None else meshes.shardings(mesh, like)

    # Donated: the new state takes the memory of the old one.
    @partial(jax.jit, donate_argnums=0, out_shardings=(parts, None))
    def step(state: nnx.State, windows: Array) -> tuple[nnx.State, Array]:
        model, optimizer = nnx.merge(graph, state)
        loss, gradient = nnx.value_and_grad(loss_fn)(model, windows)
        optimizer.update(model, gradient)
        return nnx.state((model, optimizer)), loss

    state = jax.jit(lambda: initial()[1], out_shardings=parts)()
    windows = np.zeros((train_config.batch_size, model_config.context + 1), np.int32)
    if mesh is None:
        return Trainer(graph, step.lower(state, windows).compile()), state
    with jax.set_mesh(mesh):
        compiled = step.lower(state, meshes.placed(mesh, windows)).compile()
    return Trainer(graph, lambda s, w: compiled(s, meshes.placed(mesh, w))), state
