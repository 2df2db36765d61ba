"""``python -m jax_fa.demo``: trains a small GPT on text, samples from it and checks the losses.

Reading order: ``model`` (the GPT), ``training`` (the jit-compiled step), ``data``, ``checkpoint``,
``meshes`` (several devices), and here the command line.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from tqdm import tqdm

import jax_fa
from jax_fa.analysis import drawing
from jax_fa.demo import data, meshes
from jax_fa.demo.checkpoint import CheckpointError, Checkpoints
from jax_fa.demo.data import Text
from jax_fa.demo.meshes import MeshConfig
from jax_fa.demo.model import GPT, ModelConfig
from jax_fa.demo.training import TrainConfig, loss_fn, make_trainer
from jax_fa.runtime.dispatch import Implementation

_CHECK_STEPS = 10
# Right implementations differ by 5e-7 (float32) and 1.4e-4 (bfloat16); a scale of the logits that
# is wrong by 1 % gives 8e-4 in float32 (two layers, ten steps, CPU).
_CHECK_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-3, "float16": 1e-3}
"""Largest difference of a loss, in nats, over the first steps."""

_PROMPT_LENGTH = 64
_DESCRIPTION = "Trains a small GPT on text, samples from it and checks its losses."


@dataclass(frozen=True)
class RunConfig:
    """Settings of a run beside the model and training configurations.

    Attributes:
        steps: number of steps, those before a resume included.
        text: a file, or None for the sources of Python's standard library.
        output: folder for the loss curve.
        checkpoint: folder to save to and to resume from, or None.
        checkpoint_every: steps between two checkpoints.
        mesh: devices that share the work; None for one. It changes no loss beyond rounding.
    """

    steps: int = 200
    text: Path | None = None
    output: Path = Path("jax_fa_demo")
    checkpoint: Path | None = None
    checkpoint_every: int = 50
    mesh: MeshConfig | None = None

    def __post_init__(self) -> None:
        """Refuses counts that mean nothing."""
        for name in ("steps", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it should be at least 1.")

    @property
    def plot(self) -> Path:
        """File of the loss curve."""
        return self.output / "loss.png"


@contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    """Says whether Ctrl-C was pressed, instead of stopping at once; a second one does stop.

    A step in progress has consumed the state, so that only between steps is there one to save.
    """
    if threading.current_thread() is not threading.main_thread():  # others have no signals
        yield lambda: False
        return
    pressed = False

    def note(*_: object) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True)
class Demo:
    """A run of the demo: its configuration, its text, and the parts of ``main``."""

    model: ModelConfig
    training: TrainConfig
    run: RunConfig
    text: Text

    def __post_init__(self) -> None:
        """Refuses a mesh that does not divide what it shares."""
        if self.run.mesh is not None:
            self.run.mesh.check(self.model, self.training.batch_size)

    def batch(self, step: int) -> np.ndarray:
        """Windows [B, T + 1] of a step."""
        shape = (self.training.batch_size, self.model.context)
        return self.text.batch(step, shape, self.training.seed)

    def train(self, checkpoints: Checkpoints | None = None) -> tuple[GPT, list[float]]:
        """Trains, going on from the latest checkpoint if there is one.

        Returns:
            The model, on one device, and the loss of every step from the first on, those before a
            resume included.

        Raises:
            CheckpointError: a checkpoint cannot be read or written.
            KeyboardInterrupt: Ctrl-C; the last step is saved, and the message says so.
        """
        start = time.perf_counter()
        mesh = None if self.run.mesh is None else self.run.mesh.make()
        trainer, state = make_trainer(self.model, self.training, mesh)
        print(f"Step:      compiled in {time.perf_counter() - start:.1f} s")
        losses: list[float] = []
        if checkpoints is not None:
            state, losses = checkpoints.restore(state)
            print(f"Resuming:  after step {len(losses)}")
        tokens = self.training.batch_size * self.model.context
        with (
            _interruption() as interrupted,
            tqdm(
                desc="Training",
                total=self.run.steps * tokens,
                initial=len(losses) * tokens,
                unit=" tokens",
                unit_scale=True,
            ) as progress,
        ):
            while len(losses) < self.run.steps and not interrupted():
                state, loss = trainer.step(state, self.batch(len(losses)))
                losses.append(float(loss))
                progress.set_postfix(
                    loss=f"{losses[-1]:.3f}", **self._rate(progress, tokens), refresh=False
                )
                progress.update(tokens)
                is_last = len(losses) == self.run.steps or interrupted()
                if checkpoints is not None and (
                    is_last or len(losses) % self.run.checkpoint_every == 0
                ):
                    checkpoints.save(state, losses)
        if len(losses) < self.run.steps:
            kept = "nothing is saved; --checkpoint DIR would save"
            if checkpoints is not None:
                kept = "which is saved; the same command goes on from there"
            raise KeyboardInterrupt(f"after step {len(losses)}, {kept}")
        return trainer.model(state if mesh is None else meshes.whole(mesh, state)), losses

    def _rate(self, progress: tqdm, tokens: int) -> dict[str, str]:
        """The progress bar's text on each of several devices, ``tokens`` after it was drawn."""
        if self.run.mesh is None:
            return {}
        drawn = progress.format_dict
        rate = (drawn["n"] - drawn["initial"] + tokens) / max(drawn["elapsed"], 1e-3)
        return {"each_device": f"{tqdm.format_sizeof(rate / self.run.mesh.size)} tokens/s"}

    def repeated_losses(self, count: int) -> list[float]:
        """Losses of the first steps, with attention on another implementation."""
        other: Implementation | None = None if self.model.implementation == "xla" else "xla"
        trainer, state = make_trainer(replace(self.model, implementation=other), self.training)
        losses = []
        for step in range(count):
            state, loss = trainer.step(state, self.batch(step))
            losses.append(float(loss))
        return losses

    def held_out_loss(self, model: GPT) -> float:
        """Loss on text that training never saw."""
        windows = self.text.held_out_batch((4 * self.training.batch_size, self.model.context))
        return float(nnx.jit(loss_fn)(model, jnp.asarray(windows)))


def sample(model: GPT, prompt: np.ndarray, seed: int, temperature: float = 0.7) -> bytes:
    """Continues ``prompt`` up to the model's context, byte by byte."""
    context = model.config.context
    graph, state = nnx.split(model)

    @jax.jit
    def continued(state: nnx.State, tokens: Array, key: Array) -> Array:
        model = nnx.merge(graph, state)

        def next_token(position: Array, tokens: Array) -> Array:
            logits = model(tokens)[0, position - 1] / temperature
            token = jax.random.categorical(jax.random.fold_in(key, position), logits)
            return tokens.at[0, position].set(token)

        # Positions after the current one hold zeros, which causal attention does not see.
        return jax.lax.fori_loop(len(prompt), context, next_token, tokens)

    tokens = jnp.zeros((1, context), jnp.int32).at[0, : len(prompt)].set(prompt)
    tokens = continued(state, tokens, jax.random.key(seed))
    return np.asarray(tokens[0, len(prompt) :]).astype(np.uint8).tobytes()


def plot(losses: Sequence[float], repeated: Sequence[float], path: Path) -> None:
    """Draws the loss of every step into a PNG."""
    with drawing.picture(path, (7, 4), "jax_fa.demo: loss over steps") as figure:
        axes = figure.subplots()
        training, repetition, *_ = drawing.COLORS
        axes.plot(range(1, len(losses) + 1), losses, color=training, label="training")
        steps = range(1, len(repeated) + 1)
        axes.plot(steps, repeated, "o", color=repetition, mfc="none", label="repeated check")
        axes.set(xlabel="step", ylabel="nats per byte")
        axes.legend()


def check(losses: Sequence[float], repeated: Sequence[float], tolerance: float) -> bool:
    """Says whether the first losses are those of another implementation of attention."""
    worst = max(abs(a - b) for a, b in zip(losses, repeated, strict=False))
    passed = worst <= tolerance  # False for NaN, too
    relation, verdict = ("<=", "passed") if passed else ("not <=", "FAILED")
    print(
        f"Check:     {verdict}: first {len(repeated)} losses with another implementation of "
        f"attention differ by {worst:.1e} ({relation} {tolerance})"
    )
    return passed


def _readable(data: bytes) -> str:
    text = data.decode(errors="replace")
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


_Config = TypeVar("_Config", ModelConfig, TrainConfig, RunConfig)


def _add_options(parser: argparse.ArgumentParser, title: str, config: type[Any]) -> None:
    """One option for each number of a configuration."""
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(config):
        if isinstance(field.default, int | float) and field.name != "vocab_size":
            flag = "--" + field.name.replace("_", "-")
            kind = type(field.default)
            group.add_argument(flag, type=kind, default=field.default, help="default: %(default)s")


def _config(config: type[_Config], args: argparse.Namespace) -> _Config:
    given = vars(args)
    return config(**{f.name: given[f.name] for f in dataclasses.fields(config) if f.name in given})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m jax_fa.demo", description=_DESCRIPTION)
    add = parser.add_argument
    default = "default: %(default)s"
    add("--text", type=Path, metavar="FILE", help="default: sources of Python's standard library")
    add("--output", type=Path, metavar="DIR", default=RunConfig.output, help=default)
    add("--checkpoint", type=Path, metavar="DIR", help="save there, and go on from what is there")
    add("--mesh", metavar="AXES", help="devices that share the work: data=2,model=2,context=2")
    add("--implementation", choices=("cpu", "cuda", "xla"), help="of attention; default: fastest")
    add("--dtype", choices=tuple(_CHECK_TOLERANCE), default=ModelConfig.dtype, help=default)
    _add_options(parser, "run", RunConfig)
    _add_options(parser, "training", TrainConfig)
    _add_options(parser, "model", ModelConfig)
    return parser


def _describe(demo: Demo) -> None:
    """Says what will be trained, on what, through which implementation of attention."""
    model = demo.model
    shape = (demo.training.batch_size, model.context)
    query = jax.ShapeDtypeStruct((*shape, model.num_heads, model.head_dim), model.dtype)
    key = jax.ShapeDtypeStruct((*shape, model.num_kv_heads, model.head_dim), model.dtype)
    chosen = jax_fa.explain(query, key, key, is_causal=True, implementation=model.implementation)
    print(f"Text:      {demo.text.source}, {len(demo.text.training):,} bytes")
    print(f"Attention: {chosen}")


def _check_writable(path: Path) -> None:
    """Raises OSError if ``path`` cannot be written; leaves no new file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise OSError(f"--output: {path} cannot be written: {error.strerror}.") from error


def _prepare(args: argparse.Namespace) -> tuple[Demo, Checkpoints | None]:
    """Everything that can be refused before a long run."""
    args.mesh = None if args.mesh is None else MeshConfig.of(args.mesh)
    configs = _config(ModelConfig, args), _config(TrainConfig, args), _config(RunConfig, args)
    demo = Demo(*configs, data.read(args.text, args.context))
    if demo.run.mesh is not None:
        devices = demo.run.mesh.make().devices  # before anything else starts JAX
        print(f"Mesh:      {demo.run.mesh}, {devices.size} devices ({devices.flat[0].platform})")
    _describe(demo)
    _check_writable(demo.run.plot)
    if demo.run.checkpoint is None:
        return demo, None
    return demo, Checkpoints(demo.run.checkpoint, demo.model, demo.training, demo.text)


def _run(demo: Demo, checkpoints: Checkpoints | None) -> int:
    """Trains, samples, plots and checks; returns the exit status."""
    model, losses = demo.train(checkpoints)
    held_out = demo.held_out_loss(model)
    print(f"Loss:      {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte, held out {held_out:.3f}")
    prompt = demo.text.held_out[: min(_PROMPT_LENGTH, demo.model.context // 2)]
    continuation = sample(model, prompt, demo.training.seed)
    print(f"Prompt:    {_readable(prompt.tobytes())}\nSample:    {_readable(continuation)}")
    repeated = demo.repeated_losses(min(_CHECK_STEPS, len(losses)))
    plot(losses, repeated, demo.run.plot)
    print(f"Plot:      {demo.run.plot}")
    return 0 if check(losses, repeated, _CHECK_TOLERANCE[demo.model.dtype]) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo.

    Returns:
        The exit status: 0, 1 for a run that failed, 130 for Ctrl-C. A run that cannot begin exits
        with 2.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        try:
            demo, checkpoints = _prepare(args)
        except (ValueError, NotImplementedError, OSError, CheckpointError) as error:
            parser.exit(2, f"{parser.prog}: error: {error}\n")
        with checkpoints or nullcontext():
            return _run(demo, checkpoints)
    except (OSError, CheckpointError) as error:
        status, message = 1, f"error: {error}"
    except KeyboardInterrupt as error:
        status, message = 130, f"interrupted {error}".rstrip()
    print(f"{parser.prog}: {message}", file=sys.stderr)
    return status
