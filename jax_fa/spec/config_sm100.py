"""The compile-time parameters of Blackwell's kernels that are chosen for speed.

Shares of polynomials, pairs of CTAs, tiles, stages, registers. Comments give the models behind the
tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jax_fa.spec.arch import arch_of_target
from jax_fa.spec.division import GRANULE
from jax_fa.spec.key import KernelKey

# Cycles per 128 x 128 block and SM at 16 exponentials, 8192 flops and 128 lane instructions a
# cycle: MMA 512, 768, 1024, 1280, 2048 for D = 64, 96, 128, 192/128, 256; exponentials 1024 (1 - f)
# with a share f of polynomials; issue slots 384 + 512 f, and some 45 that are not arithmetic
# (counted, DSL 4.8.1). D = 64 is bound by exponentials up to f = 0.39, where they and issue slots
# both take 630; D = 96 needs f = 0.26 to come down to its MMA; from D = 128 on, a small share keeps
# the exponentials from setting the pace alongside the MMA.
_POLYNOMIALS = {64: 50, 96: 34, 128: 24, 192: 16, 256: 24}
"""How many of 128 exponentials are polynomials, by head size D."""
_MASKED_POLYNOMIALS = {**_POLYNOMIALS, 128: 16, 192: 8}
"""The same under a mask: fewer where the MMA is the bound, since masks take issue slots too."""
_MOST_GENERAL_POLYNOMIALS = 44
"""The most under a general mask: with D = 64, 50 spill (DSL 4.8.1)."""
# Cycles that shared memory is busy for such a block, at 128 bytes a cycle: 2 D for reading Q, 2 D
# for K, 2 Dv for V, and D + Dv for TMA writing K and V, which two query tiles share. A pair of CTAs
# halves all but the first. D = 64: 512 of 630, 96: 768 of 768, 128: 1024 of 1024, in a pair 640;
# 192/128: 1344 of 1280, in a pair 864; 256, where one query tile pays for writing: 2560 of 2048, in
# a pair 1536, with 32 bytes a cycle from the L2 cache instead of 64. So pairs from D = 128 on.
# (Half of 96 columns is no whole panel of a swizzle.) Only under a full mask: else the CTAs of a
# pair see different keys, and both would work on all that either sees. The price: with an odd
# number of query blocks per key/value head, the second CTA of the last pair has nothing to do.
_PAIRED_HEADS = (128, 192, 256)
"""Head sizes D whose kernels for the full mask work in pairs."""
_MODELLED_EXPONENTIALS = 16
"""Exponentials per SM and cycle in the model above; GPUs that do more use no polynomials."""
# For Thor, ptxas takes paired float32 operations apart (its machine code has none; DSL 4.8.1),
# so issue slots are 576 + 896 f: D = 64 and 96 do best at f = 0.22, with 800 cycles for both, and
# from D = 128 on there is little or nothing to gain.
_UNPAIRED_POLYNOMIALS = {64: 28, 96: 28, 128: 8, 192: 0, 256: 0}
"""The same on GPUs without paired operations, under any mask."""
_UNMASKED_REGISTERS, _MASKED_REGISTERS = (192, 80, 48), (200, 64, 48)
"""Of the softmax roles, correction and the others. The first is the least that spills nothing."""
_WIDE_REGISTERS = (208, 152, 144)
"""The same where there is one softmax role, so that no role is short of registers."""


@dataclass(frozen=True)
class BlackwellForward:
    """A forward kernel's tile and resources; its 128 keys per step are fixed.

    Attributes:
        polynomials: how many of 128 exponentials of an unmasked block the multiply-add units
            evaluate as polynomials; the special function unit evaluates the others. Even.
        softmax_registers: per thread of the softmax roles, multiple of 8.
        correction_registers: per thread of the role correction, multiple of 8.
        other_registers: per thread of all others, multiple of 8.
        ctas: CTAs that share their products. Two work on query blocks of one key/value head, and
            each holds half of every key and value block.
        block_q: query rows of a CTA, 128 or 256.
        packs_heads: query heads of a group share tiles where that saves tiles (``Packing``).
    """

    polynomials: int
    softmax_registers: int
    correction_registers: int
    other_registers: int
    ctas: int = 1
    block_q: int = 256
    block_kv: int = 128
    is_persistent: bool = True
    packs_heads: bool = True


def blackwell_forward(key: KernelKey) -> BlackwellForward:
    """The forward configuration for ``key``, chosen by a model, since no GPU was at hand."""
    rates = arch_of_target(key.arch).rates
    paired = _POLYNOMIALS if key.mask == "full" else _MASKED_POLYNOMIALS
    polynomials = (paired if rates.has_pairs else _UNPAIRED_POLYNOMIALS)[key.head_dim]
    if key.mask == "general":
        polynomials = min(polynomials, _MOST_GENERAL_POLYNOMIALS)
    if rates.exponentials > _MODELLED_EXPONENTIALS:
        polynomials = 0
    ctas = 2 if key.mask == "full" and key.head_dim in _PAIRED_HEADS else 1
    if key.value_dim > 128:
        return BlackwellForward(polynomials, *_WIDE_REGISTERS, ctas, block_q=128)
    registers = _UNMASKED_REGISTERS if key.mask == "full" else _MASKED_REGISTERS
    return BlackwellForward(polynomials, *registers, ctas)


@dataclass(frozen=True)
class BlackwellBackward:
    """A backward kernel's tile and resources; its 128 keys per CTA are fixed.

    Attributes:
        q_stages: depth of the ring of query tiles.
        dout_stages: depth of the ring of dO tiles.
        reduce_columns: columns of dQ in a piece that is added to global memory.
        reduce_registers: per thread of the role reduce, multiple of 8.
        compute_registers: per thread of the role compute, multiple of 8.
        other_registers: per thread of all others, multiple of 8.
        block_q: query rows per step.
        sweeps: passes over the queries: 1, or 2 where dV and dK take turns in tensor memory.
        ctas: CTAs that share their products and the keys of a tile (Note [A pair of CTAs] in
            ``kernels/sm100/plan_bwd.py``).
    """

    q_stages: int
    dout_stages: int
    reduce_columns: int
    reduce_registers: int = 152
    compute_registers: int = 152
    other_registers: int = 56
    block_q: int = 128
    block_kv: int = 128
    sweeps: int = 1
    ctas: int = 1

    @property
    def granule(self) -> int:
        """Rows of a head that stay together where heads share a tile."""
        return GRANULE

    @property
    def staged(self) -> tuple[Literal["ds", "dq", "exchange"], ...]:
        """What passes through shared memory (``roofline.backward``)."""
        return ("ds", "exchange", "dq") if self.ctas == 2 else ("ds", "dq")

    @property
    def half_q(self) -> int:
        """Query rows of a step that one warpgroup of the role compute works on."""
        return self.block_q // 2


def blackwell_backward(key: KernelKey) -> BlackwellBackward:
    """The backward configuration for ``key``, chosen by a model, since no GPU was at hand."""
    if key.value_dim > 128:
        # dV and dK of 128 keys would fill tensor memory: Note [Two sweeps] in plan_bwd.py.
        return BlackwellBackward(2, 2, reduce_columns=16, block_q=64, sweeps=2)
    if key.head_dim == 128:
        # In a pair, shared memory is busy for 2560 cycles per 128 x 128 tile, not 3328; the MMA
        # takes 2560 (model). Tiles of 256 keys cost more where masks or ends of sequences cut them:
        # 1024 causal tokens take 40 tiles of 128 x 128 instead of 36.
        return BlackwellBackward(1, 1, reduce_columns=16, block_kv=256, ctas=2)
    # The number of pieces of dQ is even, so that the stage of each is known at compile time.
    reduce_columns = 48 if key.head_dim == 96 else 32
    # With D = 192, shared memory has no room for a second stage.
    stages = 1 if key.head_dim > 128 else 2
    return BlackwellBackward(stages, stages, reduce_columns)
