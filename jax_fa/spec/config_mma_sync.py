"""The compile-time parameters of the kernels for mma.sync that are chosen for speed.

Tiles, warps and stages. ``chosen_mma_sync.py`` chooses them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax_fa.spec.division import GRANULE

WARP_ROWS = 16
"""Rows of a warp's product: the M of one mma.sync."""


def smem_capacity(target: str) -> int:
    """Bytes of shared memory that a CTA may have on each GPU that code for ``target`` is meant for.

    That is 1 KB less than its SM has: 100 KB on 8.6, 8.9 and 12.x, and 164 KB or more elsewhere.
    """
    return (99 if target in ("sm_86", "sm_120") else 163) * 1024


@dataclass(frozen=True)
class MmaSyncForward:
    """A forward kernel's tile and resources.

    Attributes:
        block_kv: keys per step.
        warps: warps of a CTA.
        row_tiles: tiles of 16 query rows that a warp owns; they share what it reads of K and V.
        stages: blocks of keys that shared memory holds, one or two. With one, keys are loaded while
            values are multiplied.
        value_stages: blocks of values that it holds, at most ``stages``. With one, values are
            loaded while scores are computed.
        q_in_registers: query fragments stay in registers; else each step reads them again.
        packs_heads: query heads of a group share tiles where that saves tiles (``Packing``).
        branches_steps: a step has separate code for blocks that hide keys (general masks only).
        opt_level: the compiler's level. At 1 it reorders little and so needs fewer registers.
    """

    block_kv: int
    warps: int = 4
    row_tiles: int = 2
    stages: int = 2
    value_stages: int = 2
    q_in_registers: bool = False
    packs_heads: bool = False
    branches_steps: bool = False
    opt_level: int = 3

    @property
    def block_q(self) -> int:
        """Query rows of one tile."""
        return WARP_ROWS * self.warps * self.row_tiles

    @property
    def granule(self) -> int:
        """Rows of a head that stay together where heads share a tile."""
        return GRANULE

    @property
    def is_persistent(self) -> bool:
        """Whether CTAs take several tiles: no, but CTAs share an SM: one starts as another ends."""
        return False


@dataclass(frozen=True)
class FewQueries:
    """A forward kernel's tile and resources, for few query rows.

    Attributes:
        block_kv: keys per step, which the warps divide among them.
        warps: warps of a CTA.
        stages: blocks of keys and values that shared memory holds.
        q_in_registers: query fragments stay in registers; else each step reads them again.
        scales_always: each step scales O; else it does so in a loop of one turn or none.
    """

    block_kv: int
    warps: int = 4
    stages: int = 2
    q_in_registers: bool = True
    scales_always: bool = False

    @property
    def block_q(self) -> int:
        """Query rows of one tile."""
        return WARP_ROWS

    @property
    def own_keys(self) -> int:
        """Keys of a block that each warp owns."""
        return self.block_kv // self.warps

    @property
    def packs_heads(self) -> bool:
        """Whether query heads of a group share tiles (``Packing``): they always do."""
        return True

    @property
    def granule(self) -> int:
        """Rows of a head that stay together where heads share a tile: threads copy single rows."""
        return 1

    @property
    def is_persistent(self) -> bool:
        """Whether CTAs take several tiles: no, each takes one."""
        return False


SWEEP_WORDS = 21
"""Words of its work that a backward's sweep uses, at most."""


@dataclass(frozen=True)
class MmaSyncBackward:
    """A backward kernel's tile and resources.

    Attributes:
        warps: warps of a CTA.
        row_tiles: tiles of 16 keys that a warp owns; they share what it reads of Q and dO.
        stages: blocks of queries and of dO that shared memory holds. With one, both are loaded once
            the last product of a step that reads either is done.
        parts: parts of a block of queries; their scores are computed one after the other.
        work_words: words of its work that a sweep reads from shared memory, not from registers.
        splits_columns: two warps own the same keys: each computes the scores of half of the queries
            and half of the columns of dK and dV. P and dS pass through shared memory.
        splits_results: two warps own the same keys: one computes P and dV, the other dS and dK. One
            part of a block is loaded at a time, and ``stages`` counts parts.
        num_consumers: groups of four warps that divide the columns of dQ where it is rounded.
        adds_four: dQ is added to global memory four floats at a time, not one.
        opt_level: the compiler's level. At 1 it reorders little and so needs fewer registers.
    """

    warps: int
    row_tiles: int = 1
    stages: int = 1
    parts: int = 1
    work_words: int = 0
    splits_columns: bool = False
    splits_results: bool = False
    num_consumers: int = 1
    adds_four: bool = False
    opt_level: int = 3

    @property
    def block_kv(self) -> int:
        """Keys of one tile."""
        return self.warp_rows * self.warps // self.sharing

    @property
    def column_shares(self) -> int:
        """Warps that share the columns of dK and dV of the same keys."""
        return 2 if self.splits_columns else 1

    @property
    def sharing(self) -> int:
        """Warps that own the same keys."""
        return 2 if self.splits_columns or self.splits_results else 1

    @property
    def warp_rows(self) -> int:
        """Keys that a warp owns, and queries whose dQ it computes at a time."""
        return WARP_ROWS * self.row_tiles

    def first_row(self, warp: Any) -> Any:
        """The first row of a tile that a warp owns; rows are keys."""
        if self.splits_results:
            return warp * self.warp_rows % self.block_kv
        return warp // self.sharing * self.warp_rows

    @property
    def loads(self) -> int:
        """Loads of a block of queries, one after the other."""
        return self.parts if self.splits_results else 1

    @property
    def loaded_rows(self) -> int:
        """Query rows that are loaded at a time."""
        return self.block_q // self.loads

    @property
    def block_q(self) -> int:
        """Query rows per step."""
        return 64

    @property
    def splits_keys(self) -> bool:
        """Whether warps own keys, with all columns of dK, of dV or of both."""
        return not self.splits_columns

    @property
    def splits_dq_rows(self) -> bool:
        """Whether groups of four warps split the rows of dQ: no, they split its columns."""
        return False


@dataclass(frozen=True)
class MmaSyncBiasGradient:
    """The tile and resources of a kernel that computes the gradient of a bias.

    Attributes:
        block_kv: keys of a tile.
        warps: warps of a CTA; each owns 16 query rows.
    """

    block_kv: int
    warps: int = 4
    packs_heads: bool = False
    is_persistent: bool = True

    @property
    def block_q(self) -> int:
        """Query rows of one tile."""
        return WARP_ROWS * self.warps

    @property
    def balances_parts(self) -> bool:
        """No: how many CTAs share a multiprocessor is not known where parts are chosen."""
        return False

    def first_row(self, warp: Any) -> Any:
        """The first row of a tile that a warp owns; rows are queries."""
        return warp * WARP_ROWS
