"""Mask functions: which keys a query sees, as a function of positions.

    def strided(batch, q_head, q_position, kv_position):
        return (kv_position <= q_position) & ((q_position - kv_position) % 4 == 0)

    attention(query, key, value, mask_mod=strided)

The function is called on whole int32 arrays, which broadcast against each other, not once for each
pair: ``batch`` [B, 1, 1, 1], ``q_head`` [1, N, 1, 1], ``q_position`` [B|1, 1, T, 1] and
``kv_position`` [B|1, 1, 1, S]. (For more than 2 ** 28 pairs T is a part of the rows; keys come in
any order, some of them twice; in packed sequences, ``batch`` is [1, 1, T, 1], the number of each
row's sequence.) It returns a bool array that broadcasts to [B, N, T, S], made by operations of
jax.numpy: no ``if``, no ``and``. What it says of a pair may depend on the pair's four numbers only,
not on its place in the arrays. It may read arrays, traced ones too, such as ``documents[batch,
q_position] == documents[batch, kv_position]``. ``jnp.vectorize`` turns a function of single numbers
into one of arrays. It hides keys in addition to those that the band, segments and lengths hide.

``q_position`` is the diagonal of a query row, its position among the keys, and already includes
query_offset and alignment (``jax_fa/spec/band.py``). ``kv_position`` counts from the sequence's
first key. Either may lie beyond the last token; the function must not rely on what an array gives
there. ``batch`` and ``q_head`` are the numbers of the sequence and of the head; if ``shard_map``
splits the batch or the heads, they count from the first of this device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""(batch, q_head, q_position, kv_position) -> whether the query sees the key."""


def chunked(size: int) -> MaskFunction:
    """Causal within chunks of ``size`` positions; other chunks are hidden (as in Llama 4)."""

    def visible(batch: Any, q_head: Any, q_position: Any, kv_position: Any) -> Any:
        return (q_position // size == kv_position // size) & (kv_position <= q_position)

    return visible


def prefix_lm(length: int) -> MaskFunction:
    """Causal, except for the first ``length`` keys, which every query sees."""

    def visible(batch: Any, q_head: Any, q_position: Any, kv_position: Any) -> Any:
        return (kv_position < length) | (kv_position <= q_position)

    return visible
