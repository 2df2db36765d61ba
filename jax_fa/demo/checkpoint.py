"""Saves a training run with orbax and resumes it where it stopped."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jax_fa.demo.data import Text
from jax_fa.demo.model import ModelConfig
from jax_fa.demo.training import TrainConfig

_KEPT = 2
_DIGESTS = "SHA256SUMS"
"""File of a step with the digests of its other files, as ``sha256sum --check`` reads it."""

_MARGIN = 1 << 20
"""Bytes for all files of a step but those of its arrays, many times over."""


class CheckpointError(Exception):
    """A checkpoint cannot be used or written; the message is one line and says what to do."""


class Checkpoints:
    """The checkpoints of one run in one folder: state, loss of every step so far, configuration.

    Processes that train together save and restore together, in a folder that all of them see.

    Raises:
        CheckpointError: the folder cannot be written, or holds another run or a damaged one.
    """

    def __init__(
        self, folder: Path, model_config: ModelConfig, train_config: TrainConfig, text: Text
    ) -> None:
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self._folder = folder.absolute()
        self._config: dict[str, dict[str, Any]] = {
            "model": asdict(model_config),
            "training": asdict(train_config),
            "data": {"text": f"sha256:{text.digest()}"},
        }
        # Another implementation gives the same run.
        del self._config["model"]["implementation"]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._folder).close()
        except OSError as error:
            raise CheckpointError(
                f"--checkpoint {folder}: {error.strerror}. Give a folder that can be written."
            ) from error
        self._check_files()
        # HAZARD: a save in the background would read arrays that the next step overwrites, because
        # it is given their memory.
        options = ocp.CheckpointManagerOptions(max_to_keep=_KEPT, enable_async_checkpointing=False)
        with self._one_line("cannot be read", "Give another --checkpoint folder."):
            self._manager = ocp.CheckpointManager(self._folder, options=options)
        self._check_run()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def save(self, state: nnx.State, losses: list[float]) -> None:
        """Saves the state after ``len(losses)`` steps, unless that was saved before.

        Raises:
            CheckpointError: it cannot be written. What was saved before is still there.
        """
        if len(losses) == self._manager.latest_step():
            return
        arrays = nnx.to_pure_dict(state)
        args, folder = self._ocp.args, self._folder / str(len(losses))
        advice = "Make room there; the same command goes on from the last step that was saved."
        with self._one_line(f"step {len(losses)} was not saved", advice), _whole(folder):
            # Out of room in the middle of an array, orbax would say more than one line.
            if shutil.disk_usage(self._folder).free < 2 * _size(arrays) + _MARGIN:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._manager.save(
                len(losses),
                args=args.Composite(
                    state=args.StandardSave(arrays),
                    losses=args.JsonSave(losses),
                    config=args.JsonSave(self._config),
                ),
            )
            if jax.process_index() == 0:  # the folder is whole: processes have waited for it
                (folder / _DIGESTS).write_text("\n".join(_digests(folder)))

    def restore(self, state: nnx.State) -> tuple[nnx.State, list[float]]:
        """The latest saved state and losses, or ``state`` and none if nothing was saved."""
        step = self._manager.latest_step()
        if step is None:
            return state, []
        args = self._ocp.args
        like = jax.tree.map(self._ocp.utils.to_shape_dtype_struct, nnx.to_pure_dict(state))
        with self._reading(step):
            restored = self._manager.restore(
                step,
                args=args.Composite(state=args.StandardRestore(like), losses=args.JsonRestore()),
            )
            nnx.replace_by_pure_dict(state, restored.state)
        return state, restored.losses

    def _check_files(self) -> None:
        """Refuses damaged files, about which orbax would say more than one line."""
        steps = [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]
        if not steps:
            return
        folder = self._folder / str(max(steps))
        with self._reading(max(steps)):
            changed = set((folder / _DIGESTS).read_text().splitlines()) ^ set(_digests(folder))
            if changed:
                raise ValueError(f"{min(changed).split()[-1]} is not what was saved")

    def _check_run(self) -> None:
        step = self._manager.latest_step()
        if step is None:
            return
        args = self._ocp.args
        with self._reading(step):
            saved = self._manager.restore(
                step, args=args.Composite(config=args.JsonRestore(), losses=args.JsonRestore())
            )
            if len(saved.losses) != step:
                raise ValueError(f"it holds {len(saved.losses)} losses")
            differences = [
                f"{name} is {value} and was {saved.config[part].get(name)}"
                for part, wanted in self._config.items()
                for name, value in wanted.items()
                if saved.config[part].get(name) != value
            ]
        if differences:
            raise CheckpointError(
                f"the checkpoint in {self._folder} belongs to another run: "
                f"{'; '.join(differences)}. Give the same options, or another --checkpoint folder."
            )

    def _reading(self, step: int) -> Any:
        advice = f"Remove {self._folder / str(step)} to go on from what was saved before it."
        return self._one_line(f"step {step} is damaged", advice)

    @contextmanager
    def _one_line(self, what: str, advice: str) -> Iterator[None]:
        """Turns whatever is raised into one line; damaged files make orbax raise anything."""
        try:
            yield
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0][:200].rstrip(".")
            raise CheckpointError(
                f"the checkpoint in {self._folder}: {what} ({type(error).__name__}: {reason}). "
                f"{advice}"
            ) from error


def _size(arrays: Any) -> int:
    """Bytes of all arrays."""
    return sum(array.nbytes for array in jax.tree.leaves(arrays))


@contextmanager
def _whole(folder: Path) -> Iterator[None]:
    """Removes ``folder`` if writing it fails, at its last file or by Ctrl-C, too."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _digests(folder: Path) -> list[str]:
    """Lines of sha256 and name, of all files in ``folder`` but ``_DIGESTS``."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _DIGESTS)
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    return [f"{d}  {path.relative_to(folder)}" for d, path in zip(digests, files, strict=True)]
