"""Layouts: the tokens of a sequence that each of several devices holds.

With ``n`` devices that hold ``L`` tokens each, device ``i`` has

* contiguous: tokens ``i L .. (i + 1) L - 1``;
* zigzag: of ``2 n`` chunks, chunk ``i`` and chunk ``2 n - 1 - i``;
* striped: tokens ``i, i + n, i + 2 n, ...``.

Tokens that are held in no such layout have positions, which only a program that runs knows.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

Layout = Literal["contiguous", "zigzag", "striped"]


def in_order(x: Array, layout: Layout, size: int) -> Array:
    """Tokens of ``size`` devices one after another [B, size * L, ...] -> in their order."""
    if layout == "contiguous":
        return x
    batch, count, *rest = x.shape
    if layout == "striped":
        return jnp.swapaxes(x.reshape(batch, size, -1, *rest), 1, 2).reshape(x.shape)
    chunks = x.reshape(batch, size, 2, -1, *rest)
    both = jnp.stack([chunks[:, :, 0], chunks[:, ::-1, 1]], axis=1)  # [B, 2, size, L / 2, ...]
    return both.reshape(batch, count, *rest)


def as_held(x: Array, layout: Layout, size: int) -> Array:
    """Inverse of ``in_order``."""
    if layout == "contiguous":
        return x
    batch, count, *rest = x.shape
    if layout == "striped":
        return jnp.swapaxes(x.reshape(batch, -1, size, *rest), 1, 2).reshape(x.shape)
    both = x.reshape(batch, 2, size, -1, *rest)
    chunks = jnp.stack([both[:, 0], both[:, 1, ::-1]], axis=2)  # [B, size, 2, L / 2, ...]
    return chunks.reshape(batch, count, *rest)


class Order(NamedTuple):
    """In which order several devices hold the tokens of a sequence.

    Attributes:
        layout: which tokens a device holds, unless positions say so.
        size: devices.
        sources: int32 [B, tokens]: for each place in a sequence the token that belongs there, among
            those of all devices one after another; None if ``layout`` tells.
        places: int32 [B, tokens], the inverse.
    """

    layout: Layout
    size: int
    sources: Array | None = None
    places: Array | None = None

    @classmethod
    def by_position(cls, positions: Array, axis: Any) -> Order:
        """Of tokens that stand in the order of their positions [B, L], of this device's tokens.

        Whatever integers positions hold, this is an order: equal ones stand as devices hold them.
        """
        every = jax.lax.all_gather(positions, axis, axis=1, tiled=True)
        sources = jnp.argsort(every, axis=1, stable=True)
        return cls("contiguous", jax.lax.axis_size(axis), sources, jnp.argsort(sources, axis=1))

    def in_order(self, x: Array) -> Array:
        """Tokens of the devices one after another [B, tokens, ...] -> in their order."""
        if self.sources is None:
            return in_order(x, self.layout, self.size)
        return _rearranged(x, self.sources)

    def as_held(self, x: Array) -> Array:
        """Inverse of ``in_order``."""
        if self.places is None:
            return as_held(x, self.layout, self.size)
        return _rearranged(x, self.places)


def _rearranged(x: Array, sources: Array) -> Array:
    """``x[b, sources[b]]`` for every b; each of ``sources`` is a permutation."""

    def one(x: Array, sources: Array) -> Array:
        return x.at[sources].get(mode="promise_in_bounds", unique_indices=True)

    return jax.vmap(one)(x, sources)


def contiguous(x: Array, axis: Any) -> Array:
    """Striped tokens of this device [B, L, ...] -> contiguous ones: all-to-all; n divides L."""
    size = jax.lax.axis_size(axis)
    return in_order(jax.lax.all_to_all(x, axis, 1, 1, tiled=True), "striped", size)


def striped(x: Array, axis: Any) -> Array:
    """Inverse of ``contiguous``."""
    size = jax.lax.axis_size(axis)
    return jax.lax.all_to_all(as_held(x, "striped", size), axis, 1, 1, tiled=True)


def firsts(layout: Layout, device: Any, size: int, count: int) -> list[Any]:
    """First token of each run of tokens in order that ``device`` holds, of ``count`` in all."""
    if layout == "contiguous":
        return [device * count]
    assert layout == "zigzag"
    half = count // 2
    return [device * half, (2 * size - 1 - device) * half]
