"""Text as bytes: training batches from its first part, a held-out rest."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

_HELD_OUT = 0.05
"""Fraction of the text, at its end, that training never sees."""


class Text(NamedTuple):
    """A text as uint8 tokens.

    Attributes:
        training: what batches are drawn from.
        held_out: the rest.
        source: where it came from, for people.
    """

    training: np.ndarray
    held_out: np.ndarray
    source: str

    def digest(self) -> str:
        """sha256 of the bytes and of the border between the two parts."""
        digest = hashlib.sha256(f"{len(self.training)} ".encode())
        digest.update(self.training.tobytes())
        digest.update(self.held_out.tobytes())
        return digest.hexdigest()

    def batch(self, step: int, shape: tuple[int, int], seed: int) -> np.ndarray:
        """Random windows [B, T + 1] for one step: inputs and, shifted by one, what follows them.

        A function of its arguments alone, so that a resumed run sees what an uninterrupted one
        would have seen.
        """
        return _windows(self.training, shape, np.random.default_rng((seed, step)))

    def held_out_batch(self, shape: tuple[int, int]) -> np.ndarray:
        """Windows [B, T + 1] of the held-out part, always the same."""
        return _windows(self.held_out, shape, np.random.default_rng(0))


def _windows(
    tokens: np.ndarray, shape: tuple[int, int], generator: np.random.Generator
) -> np.ndarray:
    batch_size, length = shape
    starts = generator.integers(0, len(tokens) - length, size=(batch_size, 1))
    return tokens[starts + np.arange(length + 1)].astype(np.int32)


def read(path: Path | None, context: int) -> Text:
    """Reads ``path``, or the Python standard library's own sources if None.

    Raises:
        ValueError: too little text for windows of ``context`` tokens.
        OSError: ``path`` cannot be read.
    """
    if path is None:
        folder = Path(sysconfig.get_path("stdlib"))
        files = sorted(folder.glob("*.py"))
        data = b"".join(file.read_bytes() for file in files)
        source = f"{len(files)} files of Python's standard library"
        advice = f"{folder} holds no sources; give a text by --text FILE"
    else:
        data, source = path.read_bytes(), str(path)
        advice = "give a longer text or a smaller --context"
    border = int(len(data) * (1 - _HELD_OUT))
    needed = context + 2
    if len(data) - border < needed:
        raise ValueError(
            f"{source}: {len(data)} bytes are too few. The last {_HELD_OUT:.0%} are held out and "
            f"need {needed} for --context {context}, so the text needs about "
            f"{int(needed / _HELD_OUT)}; {advice}."
        )
    tokens = np.frombuffer(data, np.uint8)
    return Text(tokens[:border], tokens[border:], source)
