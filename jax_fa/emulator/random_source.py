"""Seeded choices of the scheduler, cheaper than numpy's generators for single draws."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


class RandomSource:
    """Draws that depend on the seed alone."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed).random

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._draw() < probability

    def choice(self, items: Sequence[Item]) -> Item:
        """One of the items."""
        return items[int(self._draw() * len(items))]
