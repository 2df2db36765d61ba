"""The configurations of Hopper's forward kernels, chosen for speed: tiles, stages, registers.

Each row carries the measurement behind it.
"""

from __future__ import annotations

from jax_fa.spec.config_sm90 import HopperForward
from jax_fa.spec.key import KernelKey


def hopper_forward(key: KernelKey) -> HopperForward:
    """The forward configuration for ``key``.

    Comments give TFLOP/s on an H200, bfloat16, at 16 x 1024 and 2 x 8192 (sequences x tokens);
    slower alternatives are in brackets.
    """
    is_general = key.mask == "general"
    if key.has_bias:
        return _forward_with_bias(key)
    # Where find works beside load, 24 registers are too few and spill.
    consumer_registers, producer_registers = (232, 40) if is_general else (240, 24)
    block_kv, num_consumers, stages = 128, 2, 2
    q_in_registers = scales_late = False
    # H200, us by ncu, 16 heads: D = 64, small tiles, 16 x 1024 tokens, causal, 130 (three: 138),
    # 64 x 256 65 (67). D = 128 has room for three: 64 x 128 49 (two: 58), 192 for two, 256 for one.
    q_stages = 4 if key.head_dim <= 96 else 3
    # Small tiles: ``small_tiles_pay``. With a soft cap or split keys, large ones spill.
    is_large = key.head_dim <= 96 and not (key.is_small or key.has_soft_cap or key.is_split)
    if is_large:
        num_consumers, consumer_registers, producer_registers = 3, 160, 32
    if key.head_dim <= 64:
        # Large, full: 382 / 529 (2 consumers, 192 keys: 326 / 495; 96 keys: 345 / 477). General,
        # H100, 1 x 16384 tokens, causal: 2.51 ms (2 consumers 2.73).
        stages = 4
    elif is_large:
        # us, 16 heads, 2 x 16384 tokens, full and causal: 5384, 2789 (2 consumers 5802, 2938). 2 x
        # 8192: 1399, 730 (96 keys 1434, 733; 2 consumers 1464, 761). 128 keys spill.
        block_kv, q_stages, stages = 112, 2, 3
    elif key.head_dim <= 128:
        # D = 128, full: 614 / 650 with q in registers (without 607 / 646; 160 keys 570 / 635; not
        # persistent 502 / 626). Causal: 453 / 638 without (with 452 / 634).
        q_in_registers = key.mask == "full"
    elif key.head_dim <= 192:
        # Full: 554 / 656 (128 keys, not persistent: 527 / 647).
        block_kv, q_stages = 96, 2
    else:
        # Full: 544 / 682 (48 keys, persistent: 519 / 573). Scaled late, 8 heads, 2 x 8192 tokens:
        # 1622 us (1673), causal 833 (865); D = 64, 96 and 192 are 0 to 3 % slower so.
        block_kv, q_stages, scales_late = 80, 1, True
    return HopperForward(
        block_kv,
        num_consumers,
        q_stages,
        stages,
        consumer_registers=consumer_registers,
        producer_registers=producer_registers,
        q_in_registers=q_in_registers,
        packs_heads=key.is_split,
        scales_late=scales_late,
    )


def _forward_with_bias(key: KernelKey) -> HopperForward:
    """The forward configuration with a bias, of which shared memory holds some chunks."""
    if key.multiplies_bias:
        # H200, us, in brackets added by elements: 1 x 4096 tokens, 16 heads, 217 (232); 4 x 1024 72
        # (91); 384 x 384, 4 heads of 32, one bias for all, 204 (232). Before blocks were checked:
        # 1 x 4096 207, with 2 consumers 214; 384 x 384 174 and 214.
        return HopperForward(
            128,
            num_consumers=3,
            q_stages=2,
            consumer_registers=160,
            producer_registers=32,
            bias_stages=2,
            columns=64,
        )
    if key.head_dim == 64:
        # H200, us, float32: 32 x 384 tokens, 4 heads of 32, 34 (2 consumers, 128 keys: 44); 4 x
        # 1024, 16 heads, 97 (105); 1 x 4096 296 (288): 352 tiles, where CTAs are 132. 96 keys
        # spill, as they do with three consumers at D = 96 (32 bytes) and 128 (8).
        return HopperForward(
            64,
            num_consumers=3,
            q_stages=2,
            consumer_registers=160,
            producer_registers=32,
            bias_stages=4,
        )
    return HopperForward(
        64,  # 128 keys spill at D = 96 and 128 (DSL 4.8.1).
        num_consumers=2,
        q_stages=2 if key.head_dim <= 192 else 1,
        consumer_registers=232,
        producer_registers=40,
        bias_stages={96: 4, 128: 4, 192: 2, 256: 2}[key.head_dim],
    )
