"""``python -m benchmarks.training``: the demo's training step at a real size, jax_fa and cuDNN.

Both train the same model on the same text from the same parameters, one step each in turns. Prints
the time of a step, the ratio and how far the losses are apart; writes training.json and a plot.

Rounding differences grow from step to step, whatever makes them. How fast, a third run tells: cuDNN
again, from parameters that differ by less than bfloat16 can tell.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gpu
from benchmarks.timing import Protocol, Samples, interleaved
from jax_fa.demo import data
from jax_fa.demo.model import ModelConfig
from jax_fa.demo.training import TrainConfig, make_trainer
from jax_fa.runtime.dispatch import Implementation

_MODEL = ModelConfig(
    context=4096, num_layers=16, d_model=2048, num_heads=16, num_kv_heads=16, dtype="bfloat16"
)
_TRAINING = TrainConfig(batch_size=4, learning_rate=5e-5)
_PROTOCOL = Protocol(warmup=3, rounds=20, seconds=120, calls=1)
_CONTROL = "cudnn, perturbed"
_IMPLEMENTATIONS: dict[str, Implementation | None] = {
    "jax_fa": None,
    "cudnn": "cudnn",
    _CONTROL: "cudnn",
}
_PERTURBATION = 2.0**-10
"""Relative change of each parameter of the control; bfloat16 has 8 bits."""
_LOSS_TOLERANCE = 2.0
"""Largest difference of a loss, relative to the largest of the control, or to 0.01 nats."""
_LEAST_DIFFERENCE = 0.01


class Run:
    """A model in training: each call is one step, and its loss is kept."""

    def __init__(
        self, implementation: Implementation | None, text: data.Text, perturbation: float = 0
    ) -> None:
        model = replace(_MODEL, implementation=implementation)
        self._trainer, self._state = make_trainer(model, _TRAINING)
        if perturbation:
            self._state = jax.tree.map(partial(_perturbed, perturbation), self._state)
        self._text = text
        self.losses: list[jax.Array] = []

    def __call__(self) -> jax.Array:
        """Trains one step; returns its loss."""
        shape = (_TRAINING.batch_size, _MODEL.context)
        windows = self._text.batch(len(self.losses), shape, _TRAINING.seed)
        self._state, loss = self._trainer.step(self._state, windows)
        self.losses.append(loss)
        return loss


def _perturbed(relative: float, x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x * (1 + relative * jax.random.uniform(jax.random.key(x.size), x.shape, minval=-1))


def plot(losses: dict[str, list[float]], path: Path) -> None:
    """Draws the loss of every step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for (name, values), style in zip(losses.items(), ("-", "--", ":"), strict=True):
        axes.plot(range(1, len(values) + 1), values, style, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="the same step, two attentions")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, prints and writes; returns 1 if jax_fa is slower or the losses differ."""
    parser = argparse.ArgumentParser("python -m benchmarks.training", description=__doc__)
    parser.add_argument("--rounds", type=int, default=_PROTOCOL.rounds)
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), metavar="DIR")
    args = parser.parse_args(argv)
    text = data.read(None, _MODEL.context)
    runs = {
        name: Run(implementation, text, _PERTURBATION if name == _CONTROL else 0)
        for name, implementation in _IMPLEMENTATIONS.items()
    }
    taken: dict[str, Samples] = interleaved(runs, replace(_PROTOCOL, rounds=args.rounds))
    losses = {name: [float(x) for x in run.losses] for name, run in runs.items()}
    apart, control = (
        float(np.max(np.abs(np.subtract(losses[name], losses["cudnn"]))))
        for name in ("jax_fa", _CONTROL)
    )
    speedup = taken["jax_fa"].speedup_over(taken["cudnn"])
    tokens = _TRAINING.batch_size * _MODEL.context
    print(f"{gpu.machine()['gpu']}; {asdict(_MODEL)}, batch size {_TRAINING.batch_size}")
    for name, samples in taken.items():
        print(
            f"{name}: {1e3 * samples.median:.1f} ms a step, {tokens / samples.median:,.0f} "
            f"tokens/s, loss {losses[name][0]:.3f} -> {losses[name][-1]:.3f}"
        )
    print(
        f"jax_fa is {speedup:.3f} times as fast; losses differ by at most {apart:.1e}, "
        f"those of cudnn by {control:.1e} when its parameters are perturbed"
    )
    args.output.mkdir(parents=True, exist_ok=True)
    seconds = {name: samples.seconds for name, samples in taken.items()}
    content = {"model": asdict(_MODEL), "seconds": seconds, "losses": losses}
    (args.output / "training.json").write_text(json.dumps(content, indent=1) + "\n")
    plot(losses, args.output / "training.png")
    allowed = _LOSS_TOLERANCE * max(control, _LEAST_DIFFERENCE)
    return int(speedup < 1 or not apart <= allowed)


if __name__ == "__main__":
    sys.exit(main())
