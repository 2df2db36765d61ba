"""Forward by mma.sync for few query rows: shared memory. Read this first.

All warps load blocks of keys and values together, each multiplies its share of a block by all rows,
and at the end all of them merge their results.
"""

from __future__ import annotations

from typing import Any

from jax_fa.kernels.edges import Buffer, Plan, PlanError, Role, check
from jax_fa.kernels.mma_sync.panels import Panels
from jax_fa.kernels.mma_sync.plan import REGISTERS, check_smem
from jax_fa.spec import division
from jax_fa.spec.config_mma_sync import WARP_ROWS, FewQueries
from jax_fa.spec.key import KernelKey

FLOAT_BYTES = 4
BANKS_OF_ROWS = 8
"""Padding of a row of sums, in words, so that eight rows lie in different banks."""


def row_floats(key: KernelKey) -> int:
    """Floats from one row of a warp's sums to the next."""
    return key.value_dim + BANKS_OF_ROWS


def row_of_threads(number: Any, threads: int) -> Any:
    """The row whose sums the ``number``-th group of ``threads`` threads adds up.

    Eight threads read 16 bytes each at a time, from one row or from two that lie 16 banks apart.
    """
    if threads >= BANKS_OF_ROWS:
        return number
    return number // 4 * 4 + number % 2 * 2 + number // 2 % 2


def few_plan(key: KernelKey, config: FewQueries) -> Plan:
    """The checked plan of the kernel for ``key`` under ``config``."""
    q, k = Panels(config.block_q, key.head_dim), Panels(config.block_kv, key.head_dim)
    v = Panels(config.block_kv, key.value_dim)
    sums = config.warps * WARP_ROWS * row_floats(key) * FLOAT_BYTES
    plan = Plan(
        roles=(Role("attend", range(config.warps), REGISTERS + 1),),
        edges=(),
        buffers=(
            Buffer("q", q.size_bytes),
            Buffer("kv", (k.size_bytes + v.size_bytes) * config.stages),
            Buffer("stats", config.warps * WARP_ROWS * 2 * FLOAT_BYTES),
            Buffer("found", 4 * division.FOUND_WORDS),  # what segments and a mask say of a tile
            Buffer("sums", sums, "kv", "keys and values are dead after the last product"),
        ),
        barriers=(),
    )
    check(plan)
    check_smem(plan, key)
    for tile in (k, v):
        if tile.rows % tile.rows_of_pass(plan.threads):
            raise PlanError(f"{plan.threads} threads do not share {tile.rows} rows evenly")
    if key.value_dim % (plan.threads // WARP_ROWS * 4):
        raise PlanError(f"{plan.threads} threads do not share rows of {key.value_dim} evenly")
    return plan
