"""Forward by mma.sync: shared memory. Read this first.

All warps do the same: each owns some tiles of 16 query rows, computes both of their products and
the softmax between them, and loads its share of every block of keys and values by cp.async. There
is one role and there are no edges: warps synchronise only by barriers of the CTA.
"""

from __future__ import annotations

from jax_fa.kernels.edges import WARPS_PER_GROUP, Buffer, Plan, PlanError, Role, check
from jax_fa.kernels.mma_sync.panels import Panels
from jax_fa.spec import division
from jax_fa.spec.config_mma_sync import MmaSyncForward, smem_capacity
from jax_fa.spec.key import KernelKey

REGISTERS = 255
"""Registers of a thread, at most."""

TILE_WORDS = 5
"""Words that describe the tile of a CTA."""


def check_groups(warps: int) -> None:
    """Raises unless warps come in groups of four, by which fragments count rows or keys."""
    if warps % WARPS_PER_GROUP:
        raise PlanError(f"{warps} warps are no warpgroups")


def check_smem(plan: Plan, key: KernelKey) -> None:
    """Raises unless a CTA may have as much shared memory as ``plan`` takes."""
    if plan.smem_bytes > smem_capacity(key.arch):
        raise PlanError(f"{plan.smem_bytes} bytes of smem of {smem_capacity(key.arch)}")


def forward_plan(key: KernelKey, config: MmaSyncForward) -> Plan:
    """The checked plan of the forward kernel for ``key`` under ``config``."""
    q, k, v = (
        Panels(config.block_q, key.head_dim),
        Panels(config.block_kv, key.head_dim),
        Panels(config.block_kv, key.value_dim),
    )
    out = Panels(config.block_q, key.value_dim)
    plan = Plan(
        roles=(Role("attend", range(config.warps), REGISTERS + 1),),
        edges=(),
        buffers=(
            Buffer("q", q.size_bytes),
            Buffer("k", k.size_bytes * config.stages),
            Buffer("v", v.size_bytes * config.value_stages),
            Buffer("found", 4 * division.FOUND_WORDS),  # what segments and a mask say of a tile
            Buffer("tile", 4 * TILE_WORDS),  # which one it is, to be read again after the keys
            Buffer("out", out.size_bytes, "q", "a warp's rows of q are dead after its last S"),
        ),
        barriers=(),
    )
    check(plan)
    check_groups(config.warps)
    if not 1 <= config.value_stages <= config.stages <= 2:
        raise PlanError(f"{config.value_stages} stages of values, {config.stages} of keys")
    check_smem(plan, key)
    if out.width != q.width:
        raise PlanError("rows of out lie over rows of q of the same warp only if as wide")
    for tile in (q, k, v):
        if tile.rows % tile.rows_of_pass(plan.threads):
            raise PlanError(f"{plan.threads} threads do not share {tile.rows} rows evenly")
    return plan
