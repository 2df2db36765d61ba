"""How a problem is answered: tile sizes, stages, registers. ``choose_*`` picks them.

A ``KernelKey`` holds everything about a kernel that is fixed at compile time because the caller
asked for it; a config holds everything that is fixed at compile time because it is fast. Each row
of a table below carries the measurement behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jax_fa.kernels.abi import MaskClass

BLACKWELL = ("sm_100f", "sm_103f", "sm_110f")
"""Targets: B200 and GB200; B300 and GB300; Thor."""
BLACKWELL_HEADS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
"""(D, Dv) that are compiled for Blackwell."""
_WRITTEN = f"kernels are written for sm_90a, {', '.join(BLACKWELL)}"

# Cycles per 128 x 128 block and SM at 16 exponentials, 8192 flops and 128 lane instructions a
# cycle: MMA 512, 768, 1024, 1280, 2048 for D = 64, 96, 128, 192/128, 256; exponentials 1024 (1 - f)
# with a share f of polynomials; issue slots 384 + 512 f, and some 45 that are no arithmetic
# (counted, DSL 4.8.1). D = 64 is bound by exponentials until f = 0.39, where both take 630; D = 96
# needs f = 0.26 to come down to its MMA; from D = 128 on a small share keeps the exponentials from
# setting the pace together with the MMA.
_POLYNOMIALS = {64: 50, 96: 34, 128: 24, 192: 16, 256: 24}
"""Of 128 exponentials, by head size D."""
_MASKED_POLYNOMIALS = {**_POLYNOMIALS, 128: 16, 192: 8}
"""The same under a mask: fewer where the MMA is the bound, since schedulers have masks to do."""
_MOST_GENERAL_POLYNOMIALS = 44
"""Of a general mask: with D = 64, 50 spill (DSL 4.8.1)."""
# Cycles that shared memory is busy for such a block, at 128 bytes a cycle: reading Q 2 D, K 2 D, V
# 2 Dv, and D + Dv for TMA writing K and V, which two query tiles share. A pair of CTAs halves all
# but the first. D = 64: 512 of 630, 96: 768 of 768, 128: 1024 of 1024, in a pair 640; 192/128: 1344
# of 1280, in a pair 864; 256, where one query tile pays for writing: 2560 of 2048, in a pair 1536,
# with 32 bytes a cycle from the L2 cache instead of 64. So pairs from D = 128 on. (Half of 96
# columns is no whole panel of a swizzle.) Only under a full mask: elsewhere the two CTAs of a pair
# see different keys, and both would work on all that either sees. The price: of an odd number of
# query blocks by key/value head, one is left to a pair of which the second CTA has nothing to do.
_PAIRED_HEADS = (128, 192, 256)
"""Head sizes D whose kernels for the full mask work in pairs."""
_FAST_EXPONENTIALS = ("sm_103f",)
"""Targets that exponentiate twice as fast as others, and use no polynomials."""
# For Thor, ptxas takes paired float32 operations apart (its machine code has none; DSL 4.8.1),
# so issue slots are 576 + 896 f: D = 64 and 96 do best at f = 0.22, with 800 cycles for both, and
# from D = 128 on there is little or nothing to gain.
_UNPAIRED_POLYNOMIALS = {"sm_110f": {64: 28, 96: 28, 128: 8, 192: 0, 256: 0}}
"""Those of targets without paired operations, under any mask."""
_BLACKWELL_REGISTERS = {"full": (192, 80, 48), "causal": (200, 64, 48), "general": (200, 64, 48)}
"""Of the softmax roles, correct and the others; the smallest of the first that spill nothing."""
_WIDE_REGISTERS = (208, 152, 144)
"""The same where there is one softmax role, so that nobody is short of registers."""


@dataclass(frozen=True)
class KernelKey:
    """The compile-time part of a problem, for one operation on one architecture.

    Attributes:
        arch: target, "sm_90a" for Hopper.
        dtype: "bfloat16" or "float16".
        head_dim: D, of query and key.
        value_dim: Dv, of value and output.
        mask: mask class (``kernels/abi.py``).
        has_soft_cap: logits are bounded by a soft cap.
        is_split: several CTAs share the keys of a query tile (``abi.kv_splits``).
        mask_mod: name of a function that hides further keys (``jax_fa/mask_mods.py``).
    """

    arch: str
    dtype: str
    head_dim: int
    value_dim: int
    mask: MaskClass
    has_soft_cap: bool = False
    is_split: bool = False
    mask_mod: str | None = None


@dataclass(frozen=True)
class HopperForward:
    """A forward kernel's tile and resources.

    Attributes:
        block_kv: keys per step.
        num_consumers: warpgroups that own 64 query rows each.
        is_persistent: a CTA works on many tiles, and starts the next while it finishes one; this
            needs room for two query tiles.
        stages: depth of the key ring and of the value ring.
        consumer_registers: per thread of a consumer, multiple of 8.
        producer_registers: per thread of the producer warpgroup, multiple of 8.
        q_in_registers: the query fragment is an operand in registers, not in shared memory.
        packs_heads: query heads of a group share tiles where that saves some (``tiles.Packing``).
    """

    block_kv: int
    num_consumers: int
    is_persistent: bool
    stages: int = 2
    consumer_registers: int = 240
    producer_registers: int = 24
    q_in_registers: bool = False
    packs_heads: bool = False

    @property
    def block_q(self) -> int:
        """Query rows of one tile."""
        return 64 * self.num_consumers

    @property
    def q_stages(self) -> int:
        """Query tiles in shared memory."""
        return 2 if self.is_persistent else 1


@dataclass(frozen=True)
class HopperBackward:
    """A backward kernel's tile and resources.

    Attributes:
        block_q: query rows per step.
        splits_keys: consumers own 64 keys each, and hand P and dS on in registers. Else all work
            on the same 64 keys: each computes the scores of a share of the queries, passes P and
            dS on through shared memory, and owns a share of the columns of dK and dV.
        num_consumers: warpgroups.
        q_stages: depth of the ring of query tiles.
        dout_stages: depth of the ring of dO tiles.
        consumer_registers: per thread of a consumer, multiple of 8.
        producer_registers: per thread of the producer warpgroup, multiple of 8.
    """

    block_q: int
    splits_keys: bool = True
    num_consumers: int = 2
    q_stages: int = 2
    dout_stages: int = 2
    consumer_registers: int = 240
    producer_registers: int = 24

    @property
    def block_kv(self) -> int:
        """Keys of one tile."""
        return 64 * self.num_consumers if self.splits_keys else 64

    @property
    def splits_dq_rows(self) -> bool:
        """True if each consumer computes 64 rows of dQ; else each has some columns of all rows."""
        return self.block_q == 64 * self.num_consumers


@dataclass(frozen=True)
class BlackwellForward:
    """A forward kernel's tile and resources; its 128 keys by step are fixed.

    Attributes:
        polynomials: of 128 exponentials of an unmasked block, how many are evaluated as polynomials
            by the multiply-add units, the special function unit doing the others. Even.
        softmax_registers: per thread of the softmax roles, multiple of 8.
        correct_registers: per thread of the role correct, multiple of 8.
        other_registers: per thread of all others, multiple of 8.
        ctas: that share their products; two on query blocks of one key/value head keep one half of
            every key and value block each.
        block_q: query rows of a CTA, 128 or 256.
        packs_heads: query heads of a group share tiles where that saves some (``tiles.Packing``).
    """

    polynomials: int
    softmax_registers: int
    correct_registers: int
    other_registers: int
    ctas: int = 1
    block_q: int = 256
    block_kv: int = 128
    is_persistent: bool = True
    packs_heads: bool = True


@dataclass(frozen=True)
class BlackwellBackward:
    """A backward kernel's tile and resources; its 128 keys by CTA are fixed.

    Attributes:
        q_stages: depth of the ring of query tiles.
        dout_stages: depth of the ring of dO tiles.
        add_columns: columns of dQ in a piece that is added to global memory.
        add_registers: per thread of the role add, multiple of 8.
        attend_registers: per thread of the role attend, multiple of 8.
        other_registers: per thread of all others, multiple of 8.
        block_q: query rows by step.
        sweeps: passes over the queries: 1, or 2 where dV and dK take turns in tensor memory.
        ctas: that share their products, and the keys of a tile (Note [A pair of CTAs] in
            ``kernels/sm100/plan_bwd.py``).
    """

    q_stages: int
    dout_stages: int
    add_columns: int
    add_registers: int = 152
    attend_registers: int = 152
    other_registers: int = 56
    block_q: int = 128
    block_kv: int = 128
    sweeps: int = 1
    ctas: int = 1

    @property
    def staged(self) -> tuple[Literal["ds", "dq", "exchange"], ...]:
        """What passes through shared memory (``roofline.backward``)."""
        return ("ds", "exchange", "dq") if self.ctas == 2 else ("ds", "dq")

    @property
    def half_q(self) -> int:
        """Query rows of a step that one warpgroup of the role attend works on."""
        return self.block_q // 2


def choose_forward(key: KernelKey) -> HopperForward | BlackwellForward:
    """The forward configuration for ``key``.

    Raises:
        NotImplementedError: no kernel is written for its architecture or head sizes.
    """
    if key.arch == "sm_90a":
        return hopper_forward(key)
    if key.arch in BLACKWELL:
        return blackwell_forward(key)
    raise NotImplementedError(f"no forward kernel for {key.arch}; {_WRITTEN}")


def hopper_forward(key: KernelKey) -> HopperForward:
    """``choose_forward`` for Hopper.

    Rows say TFLOP/s on an H200, bfloat16, at 16 x 1024 and 2 x 8192 tokens x sequences;
    alternatives that lost are in brackets.
    """
    is_general = key.mask == "general"
    # Loading is more than starting TMA where lengths are decoded: 24 registers spill at D = 96.
    consumer_registers, producer_registers = (232, 40) if is_general else (240, 24)
    block_kv, num_consumers, is_persistent, q_in_registers = 128, 2, True, False
    if key.head_dim <= 64:
        # General, causal: 237 / 427 (3 consumers 204 / 485, but their 160 registers spill).
        if not is_general:
            # Full: 382 / 529 (2 consumers, 192 keys: 326 / 495; 96 keys: 345 / 477).
            num_consumers, consumer_registers, producer_registers = 3, 160, 32
    elif key.head_dim <= 128:
        # D = 128, full: 614 / 650 with q in registers (without 607 / 646; 160 keys 570 / 635; not
        # persistent 502 / 626). Causal: 453 / 638 without (with 452 / 634).
        q_in_registers = key.mask == "full"
    elif key.head_dim <= 192:
        # Full: 554 / 656 (128 keys, not persistent: 527 / 647).
        block_kv = 96
    else:
        # Full: 544 / 682 (48 keys, persistent: 519 / 573).
        block_kv, is_persistent = 80, False
    return HopperForward(
        block_kv,
        num_consumers,
        is_persistent,
        consumer_registers=consumer_registers,
        producer_registers=producer_registers,
        q_in_registers=q_in_registers,
        packs_heads=key.is_split,
    )


def blackwell_forward(key: KernelKey) -> BlackwellForward:
    """``choose_forward`` for Blackwell; rows follow from a model, since no GPU was at hand."""
    if (key.head_dim, key.value_dim) not in BLACKWELL_HEADS:
        known = ", ".join(f"{d}/{dv}" for d, dv in BLACKWELL_HEADS)
        raise NotImplementedError(
            f"no forward kernel for D/Dv {key.head_dim}/{key.value_dim} on {key.arch}; "
            f"there are {known}"
        )
    paired = _POLYNOMIALS if key.mask == "full" else _MASKED_POLYNOMIALS
    polynomials = _UNPAIRED_POLYNOMIALS.get(key.arch, paired)[key.head_dim]
    if key.mask == "general":
        polynomials = min(polynomials, _MOST_GENERAL_POLYNOMIALS)
    if key.arch in _FAST_EXPONENTIALS:
        polynomials = 0
    ctas = 2 if key.mask == "full" and key.head_dim in _PAIRED_HEADS else 1
    if key.value_dim > 128:
        return BlackwellForward(polynomials, *_WIDE_REGISTERS, ctas, block_q=128)
    return BlackwellForward(polynomials, *_BLACKWELL_REGISTERS[key.mask], ctas)


def choose_backward(key: KernelKey) -> HopperBackward | BlackwellBackward:
    """The backward configuration for ``key``.

    Raises:
        NotImplementedError: no kernel is written for its architecture or head sizes.
    """
    if key.arch == "sm_90a":
        return hopper_backward(key)
    if key.arch in BLACKWELL:
        return blackwell_backward(key)
    raise NotImplementedError(f"no backward kernel for {key.arch}; {_WRITTEN}")


def hopper_backward(key: KernelKey) -> HopperBackward:
    """``choose_backward`` for Hopper.

    TFLOP/s on an H200, bfloat16, at 16 x 1024 and 1 x 16384 tokens, causal; cuDNN in brackets.
    """
    if key.head_dim <= 64:
        # Reached: 275 and 511 (203 and 418).
        return HopperBackward(block_q=128)
    # dK and dV of 64 keys fill (D + Dv) / 2 registers of each thread of a warpgroup.
    # D = 128 reaches 324 and 578 (247 and 515), D = 256 without splitting keys 259 and 412 (207
    # and 373).
    return HopperBackward(block_q=64, splits_keys=key.head_dim + key.value_dim <= 256)


def blackwell_backward(key: KernelKey) -> BlackwellBackward:
    """``choose_backward`` for Blackwell; rows follow from a model, since no GPU was at hand."""
    if (key.head_dim, key.value_dim) not in BLACKWELL_HEADS:
        known = ", ".join(f"{d}/{dv}" for d, dv in BLACKWELL_HEADS)
        raise NotImplementedError(
            f"no backward kernel for D/Dv {key.head_dim}/{key.value_dim} on {key.arch}; "
            f"there are {known}"
        )
    if key.value_dim > 128:
        # dV and dK of 128 keys would be all of tensor memory: Note [Two sweeps] in plan_bwd.py.
        return BlackwellBackward(2, 2, add_columns=16, block_q=64, sweeps=2)
    if key.head_dim == 128:
        # Shared memory is busy for 2560 cycles by 128 x 128 tile, not 3328, against 2560 of MMA
        # (model). Tiles of 256 keys cost more where masks or ends of sequences cut them: of 1024
        # causal tokens, 40 tiles of 128 x 128 instead of 36.
        return BlackwellBackward(1, 1, add_columns=16, block_kv=256, ctas=2)
    # An even number of pieces of dQ, so that a piece knows its stage at compile time.
    add_columns = 48 if key.head_dim == 96 else 32
    # With D = 192 shared memory is full.
    stages = 1 if key.head_dim > 128 else 2
    return BlackwellBackward(stages, stages, add_columns)
