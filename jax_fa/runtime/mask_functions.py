"""Mask functions (``jax_fa/mask_mods.py``) evaluated: into packed words, or into a boolean mask."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_fa.mask_mods import MaskFunction
from jax_fa.runtime import masks, reference
from jax_fa.spec.band import ceil_div
from jax_fa.spec.problem import Operands, Semantics

PAIRS = 2**28
"""Pairs that are evaluated at a time. Where XLA fuses a function with the packing, a loop has only
cost: on an H200, 0.3 ms for four blocks of 2**26 pairs, which take 0.14 ms all at once."""


class Places(NamedTuple):
    """Arguments of a mask function: int32 arrays that broadcast to [B, N, T, S]."""

    batch: Array
    q_head: Array
    q_position: Array
    kv_position: Array


def places(
    operands: Operands, semantics: Semantics, extents: tuple[Any, Any], first_row: Any = 0
) -> Places:
    """The places of all pairs of the rows that ``operands`` hold and of all keys.

    Args:
        operands: what is per token may be a part of the whole.
        semantics: see ``Semantics``.
        extents: (T, S) of the whole.
        first_row: number of the first row that the query holds, among all T.
    """
    operands = reference.with_a_sequence(operands)
    batch, count, heads, _ = operands.q.shape
    q_head = jnp.arange(heads, dtype=jnp.int32).reshape(1, -1, 1, 1)
    lengths = reference.lengths(operands, extents)
    shift = reference.diagonals(operands, semantics, lengths)
    if operands.is_packed:
        rows, keys = reference.tokens_of(operands, extents)
        sequence, position = (
            jax.lax.dynamic_slice_in_dim(x, first_row, count, 1)
            for x in (rows.sequence, rows.position)
        )
        diagonal, kv_position = position + shift[sequence], keys.position
    else:
        has_lengths = operands.q_lengths is not None or operands.kv_lengths is not None
        reads_lengths = has_lengths and semantics.band.alignment == "bottom_right"
        if operands.q_offset is None and not reads_lengths:
            shift = shift[:1]  # the same for all sequences
        sequence = jnp.arange(batch, dtype=jnp.int32)[:, None]
        diagonal = jnp.arange(count, dtype=jnp.int32)[None] + (first_row + shift[:, None])
        kv_position = jnp.arange(extents[1], dtype=jnp.int32)[None]
    return Places(
        sequence[:, None, :, None],
        q_head,
        diagonal[:, None, :, None],
        kv_position[:, None, None, :],
    )


def evaluated(function: MaskFunction, at: Places) -> Array:
    """Bool [B|1, N|1, T|1, S|1]: the function's values, extent 1 where it ignores a dimension.

    Raises:
        ValueError: the function fails, or does not return such an array.
    """
    shapes = {name: list(x.shape) for name, x in at._asdict().items()}
    called = "attention: mask_mod, called with int32 arrays " + ", ".join(
        f"{name} {shape}" for name, shape in shapes.items()
    )
    advice = (
        "It should be made of operations of jax.numpy on arrays that broadcast; jnp.vectorize "
        "makes such a function of one of single numbers."
    )
    try:
        visible = function(*at)
    except Exception as error:  # whatever the function raises
        reason, *_ = (*str(error).splitlines(), type(error).__name__)
        raise ValueError(f"{called}, fails: {reason.rstrip('.')}. {advice}") from error
    full = jnp.broadcast_shapes(*(x.shape for x in at))
    shape = getattr(visible, "shape", None)
    kind = getattr(visible, "dtype", None)
    if isinstance(visible, bool):
        visible, shape, kind = jnp.asarray(visible), (), np.dtype(bool)
    if shape is None or kind != np.dtype(bool):
        given = visible if shape is None else f"{kind}{list(shape)}"
        raise ValueError(
            f"{called}, should say for each pair whether the query sees the key, in bool, but "
            f"gives {given}. {advice}"
        )
    fits = len(shape) <= 4 and all(
        got in (1, want) for got, want in zip(shape[::-1], full[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"{called}, should give an array that broadcasts to [B, N, T, S] = {list(full)}, but "
            f"gives one of shape {list(shape)}. {advice}"
        )
    return jnp.reshape(visible, (1,) * (4 - len(shape)) + tuple(shape))


def words(function: MaskFunction, at: Places) -> Array:
    """int32 words [B|1, N|1, T|1, W|1] (``masks.py``) of the mask that the function describes.

    Rows are evaluated block by block: where XLA fuses a function with the packing, no array of all
    pairs exists; where it does not, there is no array of more than ``PAIRS`` pairs. H200, us, 16384
    x 16384: chunks 82 (keys in their order 109), a prefix 90 (89), a table of blocks 116 (222).
    """
    pack = masks.packed
    if _computes_on_keys(function, at):
        pack = partial(masks.packed_spread, kv_len=at.kv_position.shape[3])
        # An array, or XLA computes the place of a key anew for each pair: a prefix took 783 us.
        keys = jax.lax.optimization_barrier(masks.spread(at.kv_position))
        at = at._replace(kv_position=keys)
    if math.prod(np.broadcast_shapes(*(x.shape for x in at))) <= PAIRS:
        return pack(evaluated(function, at))
    shape = _shape(function, at)
    count = shape[2]
    rows = max(PAIRS // max(shape[0] * shape[1] * shape[3], 1), 1)
    if count <= rows:
        return pack(evaluated(function, at))
    blocks = ceil_div(count, rows)
    rows = ceil_div(count, blocks)

    def block(start: Array) -> Array:
        own = Places(*(_rows(x, start, rows) for x in at))
        return pack(evaluated(function, own))

    # The last block ends with the last row, and repeats some of the one before.
    starts = np.minimum(np.arange(blocks, dtype=np.int32) * rows, count - rows)
    made = jax.lax.map(block, jnp.asarray(starts))  # [blocks, B|1, N|1, rows, W|1]
    whole = jnp.moveaxis(made[:-1], 0, 2).reshape(*made.shape[1:3], -1, made.shape[4])
    rest = count - (blocks - 1) * rows
    return jnp.concatenate([whole, made[-1, :, :, rows - rest :]], axis=2)


def _shape(function: MaskFunction, at: Places) -> tuple[int, ...]:
    """Extents of ``evaluated``. Raised here: in a trace, JAX adds its own words to errors."""
    errors: list[ValueError] = []

    def visible() -> Array:
        try:
            return evaluated(function, at)
        except ValueError as error:
            errors.append(error)
            return jnp.zeros((), bool)

    found = jax.eval_shape(visible)
    if errors:
        raise errors[0]
    return tuple(found.shape)


def _computes_on_keys(function: MaskFunction, at: Places) -> bool:
    """Whether the function takes any keys; it may return an array of its own, or ignore them."""
    keys = at.kv_position
    doubled = at._replace(kv_position=jnp.concatenate([keys, keys], axis=3))
    try:
        return _shape(function, doubled)[3] == 2 * keys.shape[3]
    except ValueError:
        return False


def _rows(x: Array, start: Any, count: int) -> Array:
    return x if x.shape[2] == 1 else jax.lax.dynamic_slice_in_dim(x, start, count, 2)
