"""The compile-time parameters of Hopper's kernel for a bias's gradient, chosen for speed."""

from __future__ import annotations

from dataclasses import dataclass

from jax_fa.spec.key import KernelKey

FLOATS_OF_CHUNK = 32
HALVES_OF_CHUNK = 64
"""Keys of a chunk of the bias, by the size of its elements."""


@dataclass(frozen=True)
class HopperBiasGradient:
    """The tile and resources of a kernel that computes the gradient of a bias.

    Attributes:
        block_kv: keys of a tile.
        stages: depth of the rings of queries and keys, and of dO and values.
        bias_stages: chunks of the bias in shared memory; a tile in float32 fits, too.
        step_stages: steps that are described, with the statistics of their rows, at a time.
        num_consumers: warpgroups that own 64 query rows each.
        consumer_registers: per thread of a consumer, multiple of 8.
        producer_registers: per thread of the producer warpgroup, multiple of 8.
    """

    block_kv: int
    stages: int
    bias_stages: int
    step_stages: int
    num_consumers: int = 2
    consumer_registers: int = 224
    producer_registers: int = 56
    packs_heads: bool = False
    is_persistent: bool = True

    @property
    def block_q(self) -> int:
        """Query rows of one tile."""
        return 64 * self.num_consumers

    @property
    def balances_parts(self) -> bool:
        """Whether parts of a tile are so many that multiprocessors, one tile each, end together."""
        return True

    @property
    def half_chunks(self) -> int:
        """Chunks of a tile of a bias of 16 bits; the last may reach beyond the tile."""
        return -(-self.block_kv // HALVES_OF_CHUNK)

    @property
    def float_chunks(self) -> int:
        """Chunks of a tile of a bias in float32."""
        return self.block_kv // FLOATS_OF_CHUNK


def hopper_bias_gradient(key: KernelKey) -> HopperBiasGradient:
    """The configuration for ``key``: the fastest tile whose S, dP and sums fit without spills.

    Three consumers hide each other's latency. H200, us, D = 64, a bias of 16 bits: 384 x 384 x 4 x
    32 tokens 196 (two, of 96 keys: 205), 64 x 768 137 (144). In float32, with the forward, 16 x
    1024 x 16 x 64 684 (787); but 2 x 4096 1630 (1366), where a tile has two steps and its bias
    fills the ring. With room for two, that of the next tile is loaded while this one's is used,
    which pays where few batches and heads share a tile. D = 128 and 256 fill shared memory to the
    last KB.
    """
    if key.multiplies_bias:  # 2 x 4096 x 16 x 64 tokens: 569 us (three consumers, 64 keys: 655).
        return HopperBiasGradient(128, stages=2, bias_stages=4, step_stages=4)
    if key.head_dim <= 64:
        return HopperBiasGradient(
            64, stages=2, bias_stages=2, step_stages=4, num_consumers=3, consumer_registers=152
        )
    if key.head_dim == 96:
        return HopperBiasGradient(64, stages=2, bias_stages=4, step_stages=4)
    if key.head_dim == 192:
        return HopperBiasGradient(64, stages=1, bias_stages=4, step_stages=4)
    return HopperBiasGradient(
        64, stages=2 if key.head_dim == 128 else 1, bias_stages=2, step_stages=2
    )
