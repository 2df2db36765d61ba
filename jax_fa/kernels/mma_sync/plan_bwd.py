"""Backward by mma.sync: shared memory. Read this first.

All warps do the same: each owns 16 or 32 keys of the tile and keeps their dK and dV in registers
while it sweeps the queries. Scores are computed transposed, keys by queries, so that P and dS leave
the accumulators in the order in which dV += P^T dO and dK += dS^T Q need their A operand; only
dQ = dS K, which sums over the keys of all warps, needs dS in shared memory.

If dK and dV of these keys need more registers than a thread has, two warps share them. Either each
has half of the columns of both and computes the scores of half of the queries (``splits_columns``):
it finds P and dS of the other half in shared memory. Or one computes S, P and dV, the other dP, dS
and dK (``splits_results``): P passes to the other warp through the buffer of dS, where each thread
reads the words that it then overwrites.
"""

from __future__ import annotations

from jax_fa.kernels.edges import WARP, Buffer, NamedBarrier, Plan, PlanError, Role, check
from jax_fa.kernels.mma_sync.panels import Panels
from jax_fa.kernels.mma_sync.plan import REGISTERS, check_groups, check_smem
from jax_fa.spec import division
from jax_fa.spec.config_mma_sync import MmaSyncBackward
from jax_fa.spec.key import KernelKey

STAT_BYTES = 4


def backward_plan(key: KernelKey, config: MmaSyncBackward) -> Plan:
    """The checked plan of the backward kernel for ``key`` under ``config``."""
    k, v = Panels(config.block_kv, key.head_dim), Panels(config.block_kv, key.value_dim)
    rows = config.loaded_rows
    q, dout = Panels(rows, key.head_dim), Panels(rows, key.value_dim)
    ds = Panels(config.block_kv, rows)
    plan = Plan(
        roles=(Role("attend", range(config.warps), REGISTERS + 1),),
        edges=(),
        buffers=(
            Buffer("k", k.size_bytes),
            Buffer("v", v.size_bytes),
            Buffer("q", q.size_bytes * config.stages),
            Buffer("dout", dout.size_bytes * config.stages),
            Buffer("p", ds.size_bytes if config.splits_columns else 0),
            Buffer("ds", ds.size_bytes),
            Buffer("lse2", rows * STAT_BYTES * config.stages),
            Buffer("delta", rows * STAT_BYTES * config.stages),
            # What segments and a mask say of a tile, and the words of its work that its sweep uses.
            Buffer("found", 4 * (division.FOUND_WORDS + config.work_words)),
        ),
        barriers=tuple(
            NamedBarrier(f"p{i}", 1 + i, 2 * WARP, "P of the warp with the same keys is in smem")
            for i in range(config.warps // 2 if config.splits_results else 0)
        ),
    )
    check(plan)
    check_groups(config.warps)
    check_smem(plan, key)
    for tile in (k, v, q, dout):
        if tile.rows % tile.rows_of_pass(plan.threads):
            raise PlanError(f"{plan.threads} threads do not share {tile.rows} rows evenly")
    return plan
