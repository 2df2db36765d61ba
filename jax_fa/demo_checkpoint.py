"""Saves a training run with orbax and resumes it where it stopped."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import jax
from flax import nnx

from jax_fa.demo_model import ModelConfig
from jax_fa.demo_training import TrainConfig

_KEPT = 2


class Checkpoints:
    """The checkpoints of one run in one folder: state, loss of every step so far, configuration.

    Raises:
        ValueError: the folder holds a run of another configuration.
    """

    def __init__(self, folder: Path, model_config: ModelConfig, train_config: TrainConfig) -> None:
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self._config = {"model": asdict(model_config), "training": asdict(train_config)}
        # Another implementation gives the same run.
        del self._config["model"]["implementation"]
        # HAZARD: a save in the background would read arrays that the next step overwrites, because
        # it is given their memory.
        options = ocp.CheckpointManagerOptions(max_to_keep=_KEPT, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        self._check_config()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def save(self, state: nnx.State, losses: list[float]) -> None:
        """Saves the state after ``len(losses)`` steps, unless that was saved before."""
        if len(losses) == self._manager.latest_step():
            return
        args = self._ocp.args
        self._manager.save(
            len(losses),
            args=args.Composite(
                state=args.StandardSave(nnx.to_pure_dict(state)),
                losses=args.JsonSave(losses),
                config=args.JsonSave(self._config),
            ),
        )

    def restore(self, state: nnx.State) -> tuple[nnx.State, list[float]]:
        """The latest saved state and losses, or ``state`` and none if nothing was saved."""
        step = self._manager.latest_step()
        if step is None:
            return state, []
        args = self._ocp.args
        like = jax.tree.map(self._ocp.utils.to_shape_dtype_struct, nnx.to_pure_dict(state))
        restored = self._manager.restore(
            step, args=args.Composite(state=args.StandardRestore(like), losses=args.JsonRestore())
        )
        nnx.replace_by_pure_dict(state, restored.state)
        return state, restored.losses

    def _check_config(self) -> None:
        step = self._manager.latest_step()
        if step is None:
            return
        args = self._ocp.args
        saved = self._manager.restore(step, args=args.Composite(config=args.JsonRestore())).config
        differences = [
            f"{name} is {value} and was {saved[part].get(name)}"
            for part, wanted in self._config.items()
            for name, value in wanted.items()
            if saved[part].get(name) != value
        ]
        if differences:
            raise ValueError(
                f"the checkpoint in {self._manager.directory} belongs to another run: "
                f"{'; '.join(differences)}. Give the same options, or another --checkpoint folder."
            )
