"""Equinox models whose ``MultiheadAttention`` runs the kernels.

    model = jax_fa.equinox.with_kernels(model, is_causal=True)

Equinox layers take no attention function, so ``with_kernels`` replaces the layers themselves; their
parameters, and the way they are called, stay the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import equinox
import jax
from jax import Array

from jax_fa.flax import AttentionFn

Model = TypeVar("Model")


class MultiheadAttention(equinox.nn.MultiheadAttention):
    """Equinox's layer with another attention function, as ``with_kernels`` makes it."""

    attention_fn: AttentionFn = equinox.field(static=True)

    def __call__(  # noqa: PLR0913 (the signature it replaces)
        self,
        query: Array,
        key_: Array,
        value: Array,
        mask: Any = None,
        *,
        key: Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Any = None,
    ) -> Array:
        """Attention with the arguments of ``equinox.nn.MultiheadAttention``.

        Args:
            query: [T, query_size].
            key_: [S, key_size].
            value: [S, value_size].
            mask: [T, S] or [num_heads, T, S], True where a query sees a key; or a mask made by
                ``jax_fa.flax``.
            key: ignored, since there is no dropout.
            inference: True switches dropout off.
            deterministic: as ``inference``.
            process_heads: applied to (query, key, value), each [length, num_heads, head size].

        Returns:
            [T, output_size].

        Raises:
            NotImplementedError: the call asks for dropout.
        """
        del key
        given = (inference, deterministic, self.dropout.inference)
        is_inference = next(flag for flag in given if flag is not None)
        q, k, v = (
            jax.vmap(project)(x).reshape(x.shape[0], self.num_heads, -1)
            for project, x in (
                (self.query_proj, query),
                (self.key_proj, key_),
                (self.value_proj, value),
            )
        )
        if process_heads is not None:
            q, k, v = process_heads(q, k, v)
        out = self.attention_fn(
            q, k, v, mask=mask, dropout_rate=self.dropout.p, deterministic=is_inference
        )
        return jax.vmap(self.output_proj)(out.reshape(query.shape[0], -1))


def with_kernels(model: Model, **properties: Any) -> Model:
    """The model with ``equinox.nn.MultiheadAttention`` layers that run the kernels of jax_fa.

    Args:
        model: a layer, or any tree that contains layers.
        **properties: attributes of ``jax_fa.flax.AttentionFn``, for all its layers.

    Returns:
        A tree with the same leaves in the same order. Dropout of attention weights is refused
        when the layer is called, and a query whose keys are all masked gives 0, where Equinox
        averages all values.
    """
    attention_fn = AttentionFn(**properties)

    def exchanged(node: Any) -> Any:
        if not isinstance(node, equinox.nn.MultiheadAttention):
            return node
        layer = object.__new__(MultiheadAttention)
        for field in dataclasses.fields(equinox.nn.MultiheadAttention):
            object.__setattr__(layer, field.name, getattr(node, field.name))
        object.__setattr__(layer, "attention_fn", attention_fn)
        return layer

    return jax.tree.map(
        exchanged, model, is_leaf=lambda node: isinstance(node, equinox.nn.MultiheadAttention)
    )
