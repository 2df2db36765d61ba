"""The gradient of a bias by mma.sync: shared memory. Read this first.

All warps do the same: each owns 16 query rows of a tile of the bias, and keeps their gradient in
registers while it sweeps the batches and heads (and tiles of rows and keys) that share the tile.
"""

from __future__ import annotations

from jax_fa.kernels.edges import Buffer, Plan, PlanError, Role, check
from jax_fa.kernels.mma_sync.panels import Panels
from jax_fa.kernels.mma_sync.plan import REGISTERS, check_smem
from jax_fa.spec.config_mma_sync import MmaSyncBiasGradient
from jax_fa.spec.key import KernelKey

FLOAT_BYTES = 4


def dbias_plan(key: KernelKey, config: MmaSyncBiasGradient) -> Plan:
    """The checked plan of the kernel for ``key`` under ``config``."""
    q, dout = Panels(config.block_q, key.head_dim), Panels(config.block_q, key.value_dim)
    k, v = Panels(config.block_kv, key.head_dim), Panels(config.block_kv, key.value_dim)
    plan = Plan(
        roles=(Role("attend", range(config.warps), REGISTERS + 1),),
        edges=(),
        buffers=(
            Buffer("q", q.size_bytes),
            Buffer("k", k.size_bytes),
            Buffer("v", v.size_bytes),
            Buffer("dout", dout.size_bytes),
            Buffer("words", config.block_q * config.block_kv * FLOAT_BYTES),
            Buffer("columns", config.warps * config.block_kv * FLOAT_BYTES),
        ),
        barriers=(),
    )
    check(plan)
    check_smem(plan, key)
    for tile in (q, k, v, dout):
        if tile.rows % tile.rows_of_pass(plan.threads):
            raise PlanError(f"{plan.threads} threads do not share {tile.rows} rows evenly")
    return plan
