"""The compile-time parameters of Hopper's forward kernels; ``chosen_sm90.py`` has their values."""

from __future__ import annotations

from dataclasses import dataclass

from jax_fa.spec.division import GRANULE


@dataclass(frozen=True)
class HopperForward:
    """A forward kernel's tile and resources.

    Attributes:
        block_kv: keys per step.
        num_consumers: warpgroups that own 64 query rows each.
        q_stages: query tiles in shared memory; with several, a CTA works on many tiles. Output lies
            where queries did, until TMA has read it; with four, consumers go on meanwhile.
        stages: depth of the key ring and of the value ring.
        consumer_registers: per thread of a consumer, multiple of 8.
        producer_registers: per thread of the producer warpgroup, multiple of 8.
        q_in_registers: whether the query operand is in registers, not in shared memory.
        packs_heads: whether query heads of a group share tiles if that saves tiles (``Packing``).
        bias_stages: depth of the ring of a bias, in chunks or, multiplied, blocks; a power of two.
        scales_late: whether the accumulator shrinks beside the next product, not between the two.
        columns: scores of a row that one product computes; 0 for all of a step.
    """

    block_kv: int
    num_consumers: int
    q_stages: int
    stages: int = 2
    consumer_registers: int = 240
    producer_registers: int = 24
    q_in_registers: bool = False
    packs_heads: bool = False
    bias_stages: int = 0
    scales_late: bool = False
    columns: int = 0

    @property
    def block_q(self) -> int:
        """Query rows of one tile."""
        return 64 * self.num_consumers

    @property
    def granule(self) -> int:
        """Rows of a head that stay together where heads share a tile."""
        return GRANULE

    @property
    def is_persistent(self) -> bool:
        """Whether a CTA works on many tiles."""
        return self.q_stages > 1
