"""The compile-time parameters of a kernel that follow from what the caller asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MaskClass = Literal["full", "causal", "general"]

MASK_CLASSES: tuple[MaskClass, ...] = ("full", "causal", "general")
"""What a variant may mask: nothing; keys beyond the diagonal (either alignment); everything."""

HEAD_STEP = 8
"""What D and Dv are multiples of, for kernels of a GPU: 16 bytes, which a thread loads at once."""


@dataclass(frozen=True)
class KernelKey:
    """The compile-time part of a problem, for one operation on one architecture.

    Attributes:
        arch: target of a family (``jax_fa/spec/arch.py``), "sm_90a" for Hopper.
        dtype: "bfloat16" or "float16".
        head_dim: D, of query and key.
        value_dim: Dv, of value and output.
        mask: mask class.
        has_soft_cap: logits are bounded by a soft cap.
        is_split: several CTAs may share the keys of a query tile (``variants.kv_splits``).
        is_few: query rows are few, so that warps of a CTA share the keys, too.
        is_small: tiles have fewer query rows than is best for long sequences.
        has_bias: a bias is added to the logits; a soft cap is then a run-time value, 0 for none.
        multiplies_bias: the tensor core adds the bias, as a product (``variants.can_multiply``).
    """

    arch: str
    dtype: str
    head_dim: int
    value_dim: int
    mask: MaskClass
    has_soft_cap: bool = False
    is_split: bool = False
    is_few: bool = False
    is_small: bool = False
    has_bias: bool = False
    multiplies_bias: bool = False
