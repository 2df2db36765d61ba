"""The compile-time parameters of Hopper's kernel for a bias's gradient, chosen for speed."""

from __future__ import annotations

from dataclasses import dataclass

from jax_fa.spec.key import KernelKey


@dataclass(frozen=True)
class HopperBiasGradient:
    """The tile and resources of a kernel that computes the gradient of a bias.

    Attributes:
        block_kv: keys of a tile.
        stages: depth of the rings of queries and keys, and of dO and values.
        num_consumers: warpgroups that own 64 query rows each.
        consumer_registers: per thread of a consumer, multiple of 8.
        producer_registers: per thread of the producer warpgroup, multiple of 8.
    """

    block_kv: int
    stages: int
    num_consumers: int = 2
    consumer_registers: int = 240
    producer_registers: int = 24
    packs_heads: bool = False
    is_persistent: bool = True

    @property
    def block_q(self) -> int:
        """Query rows of one tile."""
        return 64 * self.num_consumers


def hopper_bias_gradient(key: KernelKey) -> HopperBiasGradient:
    """The configuration for ``key``: the largest tile whose S, dP and sums fit without spills.

    D = 64 with 128 keys spills 160 bytes, with 112 keys 56 (DSL 4.8.1).
    """
    return HopperBiasGradient(
        block_kv=96 if key.head_dim <= 64 else 64, stages=2 if key.head_dim <= 128 else 1
    )
