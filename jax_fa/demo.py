"""``python -m jax_fa.demo``: trains a small GPT on text, samples from it and checks the result.

Reading order: ``demo_model`` (the GPT), ``demo_training`` (the jit-compiled step), ``demo_data``,
``demo_checkpoint``, and here the command line.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from tqdm import tqdm

import jax_fa
from jax_fa import demo_data
from jax_fa.choice import Implementation
from jax_fa.demo_checkpoint import Checkpoints
from jax_fa.demo_data import Text
from jax_fa.demo_model import GPT, ModelConfig
from jax_fa.demo_training import TrainConfig, Trainer, loss_fn, make_trainer

_CHECK_STEPS = 5
_CHECK_TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 3e-2}
"""Largest difference of a loss, in nats, over the first steps."""

_PROMPT_LENGTH = 64


@dataclass(frozen=True)
class RunConfig:
    """What a run of the demo does besides training.

    Attributes:
        steps: number of steps, those of a resumed checkpoint included.
        text: a file, or None for the standard library's sources.
        output: folder of the loss curve.
        checkpoint: folder to save to and to resume from, or None.
        checkpoint_every: steps between two checkpoints.
    """

    steps: int = 200
    text: Path | None = None
    output: Path = Path("jax_fa_demo")
    checkpoint: Path | None = None
    checkpoint_every: int = 50


def train(trainer: Trainer, text: Text, run: RunConfig, configs: tuple[ModelConfig, TrainConfig]) -> tuple[Any, list[float]]:
    """Trains up to ``run.steps`` steps.

    Returns:
        The final state and the loss of every step from the first, before a resume included.
    """


def sample(model: GPT, prompt: np.ndarray, seed: int, temperature: float = 0.7) -> bytes:
    """Continues ``prompt`` up to the model's context, byte by byte."""
    context = model.config.context
    graph, state = nnx.split(model)

    @jax.jit
    def continue_from(state: nnx.State, tokens: Array, key: Array) -> Array:
        model = nnx.merge(graph, state)

        def next_token(position: Array, tokens: Array) -> Array:
            logits = model(tokens)[0, position - 1] / temperature
            drawn = jax.random.categorical(jax.random.fold_in(key, position), logits)
            return tokens.at[0, position].set(drawn)

        # Later positions hold zeros until their turn; causal attention never looks there.
        return jax.lax.fori_loop(len(prompt), context, next_token, tokens)

    tokens = jnp.zeros((1, context), jnp.int32).at[0, : len(prompt)].set(prompt)
    tokens = continue_from(state, tokens, jax.random.key(seed))
    return np.asarray(tokens[0, len(prompt) :], np.uint8).tobytes()
