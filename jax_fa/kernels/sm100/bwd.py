"""Blackwell backward: dq, dk and dv from one more pass over all visible pairs.

    prepare       delta, log2-sum-exp2 by query row; dQ sums = 0               (backward_rows.py)
    main  load    k q(n) v dO(n) | q(n-1) dO(n-1) | q(n-2) dO(n-2) ...
          mma     S dP(n) dV(n) | S(n-1) dK dQ(n) dP dV(n-1) | S(n-2) dK dQ(n-1) ... | dK dQ(0)
          compute   [P(n)][dS(n)]       [P(n-1)]   [dS(n-1)]       ...              dV dK
          reduce                                [dQ(n) += ]            [dQ(n-1) += ]
    finish        dQ sums -> dq; dsinks; parts of dK, dV -> dk, dv             (backward_rows.py)

A lane of tensor memory, from left to right (D = 96):

    0        64       128          224      288      352          448   512
    |  S^T(t)         |  dV         |  dP^T(t)        |  dK         |
    |P0      |P1      |             |dS0     |dS1     |             |
                                    |  dQ(t)      |

A pair of CTAs (``bwd_pair.py``) exchanges dS before dQ, so dQ overwrites S. Its rings have one
stage, and halves by columns have their own, marked c (k_columns, q_columns, dout_columns):

    load    k q(n) v dO(n) dOc(n) kc | q(n-1) qc(n) dO(n-1) dOc(n-1) | ...
    mma     S dP(n) dV(n) | S(n-1) dK dP dQ(n) dV(n-1) | S(n-2) dK dP dQ(n-1) ... | dK dQ(0)
    compute   [P(n)][dS(n) ->]  [P(n-1)]    [dS(n-1) ->]    ...                     dV dK
    relay                 -> told

    0   32  64       128              256      320      384              512
    |  S^T(t)         |  dV            |  dP^T(t)        |  dK            |
    |P0 |P1 |  dQ(t)  |                |dS0     |dS1     |                |

The exponentials of a query tile overlap with products of the previous tile. This file has the host
entry, the memory and the dispatch of roles. The roles load and mma are in ``bwd_roles.py`` (for two
sweeps ``bwd_sweeps.py``, for a pair ``bwd_pair.py``), compute in ``bwd_compute.py``, reduce in
``bwd_reduce.py``. ``plan_bwd.py`` has roles, edges and memory as data. Conventions:
``jax_fa/spec/problem.py``.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from jax_fa.kernels import primitives, tiles
from jax_fa.kernels.backward_host import (
    BackwardCall,
    backward_arrays,
    backward_entry,
    backward_order,
)
from jax_fa.kernels.backward_rows import Scratch
from jax_fa.kernels.backward_work import Arrays, Scalars, Tma, narrow_rows
from jax_fa.kernels.sm100 import bwd_pair, bwd_roles, bwd_sweeps, clusters, shell, tensor_plan
from jax_fa.kernels.sm100.bwd_compute import ComputePipes, compute
from jax_fa.kernels.sm100.bwd_reduce import ReducePipes, reduce
from jax_fa.kernels.sm100.bwd_work import (
    COLUMN_HALVES,
    BackwardContext,
    BackwardSmem,
    BackwardVariant,
    make_layouts,
)
from jax_fa.kernels.sm100.plan_bwd import backward_plan
from jax_fa.spec.config_sm100 import BlackwellBackward
from jax_fa.spec.key import KernelKey

TMEM_ROLE = "reduce"
"""The role that allocates and frees tensor memory."""


@cute.kernel
def kernel(
    variant: cutlass.Constexpr,
    tma: Tma,
    arrays: Arrays,
    scratch: Scratch,
    scalars: Scalars,
    order: tiles.Order,
    lone_tma: Tma | None,
):
    """Device entry: shared and tensor memory, pipelines, dispatch of roles."""
    layouts, dtype, is_pair = make_layouts(variant), variant.dtype, variant.plan.ctas == 2
    is_swept_once = variant.config.sweeps == 1
    # With two sweeps, the values overwrite dO.
    v_elements = cute.cosize(layouts.v) if const_expr(is_swept_once) else 0
    by_columns = {name: getattr(layouts, name) for name in COLUMN_HALVES if is_pair}
    of_k_columns, of_q_columns, of_dout_columns = (
        map(cute.cosize, by_columns.values()) if is_pair else (0, 0, 0)
    )
    of_ds = cute.cosize(layouts.ds_parts if is_pair else layouts.ds)

    @cute.struct
    class Storage:
        control: cute.struct.Align[shell.control_storage(variant.plan), 8]
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.k)], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, v_elements], 1024]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.q)], 1024]
        dout: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.dout)], 1024]
        k_columns: cute.struct.Align[cute.struct.MemRange[dtype, of_k_columns], 1024]
        q_columns: cute.struct.Align[cute.struct.MemRange[dtype, of_q_columns], 1024]
        dout_columns: cute.struct.Align[cute.struct.MemRange[dtype, of_dout_columns], 1024]
        ds: cute.struct.Align[cute.struct.MemRange[dtype, of_ds], 1024]
        dq: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(layouts.dq)], 128]
        stats: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(layouts.stats)], 128]

    storage = SmemAllocator().allocate(Storage)
    control = shell.control_of(storage.control)
    smem = BackwardSmem(
        k=primitives.smem_tensor(storage.k, layouts.k),
        v=primitives.smem_tensor(storage.v if is_swept_once else storage.dout, layouts.v),
        q=primitives.smem_tensor(storage.q, layouts.q),
        dout=primitives.smem_tensor(storage.dout, layouts.dout),
        ds=primitives.smem_tensor(storage.ds, layouts.ds),
        dq=storage.dq.get_tensor(layouts.dq),
        stats=storage.stats.get_tensor(layouts.stats),
        zero_fill=control.zero_fill,
        found=control.found,
        **{
            name: primitives.smem_tensor(getattr(storage, name), layout)
            for name, layout in by_columns.items()
        },
        ds_parts=primitives.smem_tensor(storage.ds, layouts.ds_parts) if is_pair else None,
    )
    warp, rings, tmem = shell.start(variant, tma, control, TMEM_ROLE)
    x = BackwardContext(tma, arrays, scratch, scalars, order, smem, tmem, lone_tma)
    shell.narrow(variant, x, narrow_rows)
    _dispatch(variant, x, warp, rings)


class Roles(NamedTuple):
    """The roles load and mma, which differ between kernels, and the types of their ends."""

    load: Callable
    load_pipes: type
    mma: Callable
    mma_pipes: type


ONE_SWEEP = Roles(
    bwd_roles.load, bwd_roles.OneSweepLoadPipes, bwd_roles.mma, bwd_roles.OneSweepMmaPipes
)
TWO_SWEEPS = Roles(
    bwd_sweeps.load, bwd_sweeps.TwoSweepLoadPipes, bwd_sweeps.mma, bwd_sweeps.TwoSweepMmaPipes
)
PAIR = Roles(bwd_pair.load, bwd_pair.PairLoadPipes, bwd_pair.mma, bwd_pair.PairMmaPipes)


def _roles(variant: BackwardVariant) -> Roles:
    """The roles load and mma of a variant."""
    if variant.plan.ctas == 2:
        return PAIR
    return ONE_SWEEP if variant.config.sweeps == 1 else TWO_SWEEPS


@cute.jit
def _dispatch(variant: cutlass.Constexpr, x: BackwardContext, warp: Int32, rings: shell.Rings):
    """Sends every warp to its role, with the registers and the ends of edges that the role has."""
    plan, first = variant.plan, {role.name: role.warps.start for role in variant.plan.roles}
    # setmaxnreg works on whole warpgroups, so the four single warps share a register count.
    if warp < first["mma"]:
        if warp < first["compute"]:
            cute.arch.setmaxregister_increase(plan.role("reduce").registers)
            reduce(variant, x, shell.pipes_of(plan, "reduce", ReducePipes, rings))
        else:
            cute.arch.setmaxregister_increase(plan.role("compute").registers)
            compute(variant, x, shell.pipes_of(plan, "compute", ComputePipes, rings))
        shell.free_tmem(variant, x.tmem, warp, TMEM_ROLE)
    else:
        cute.arch.setmaxregister_decrease(plan.role("mma").registers)
        if warp == first["mma"]:
            if clusters.rank_in_cluster(plan.ctas) == tensor_plan.LEADER:
                mma_pipes = shell.pipes_of(plan, "mma", _roles(variant).mma_pipes, rings)
                _roles(variant).mma(variant, x, mma_pipes)
        elif warp == first["load"]:
            load_pipes = shell.pipes_of(plan, "load", _roles(variant).load_pipes, rings)
            _roles(variant).load(variant, x, load_pipes)
        if const_expr(plan.ctas == 2):
            if warp == first["relay"]:
                relay_pipes = shell.pipes_of(plan, "relay", bwd_pair.RelayPipes, rings)
                bwd_pair.relay(variant, x, relay_pipes)


def make_entry(key: KernelKey, config: BlackwellBackward) -> Callable:
    """The flat host entry of one variant."""
    return backward_entry(BackwardVariant(key, config, backward_plan(key, config)), launch)


@cute.jit
def launch(variant: cutlass.Constexpr, call: BackwardCall):
    """Describes the arrays to TMA and launches the main kernel."""
    ctas, layouts, lone_tma = variant.plan.ctas, make_layouts(variant), None
    if const_expr(variant.config.sweeps == 2):
        layouts = layouts._replace(v=cute.slice_(layouts.v, (None, None, 0)))
    tma, arrays = backward_arrays(variant, call, layouts, ctas)
    if const_expr(ctas > 1 and variant.is_general):
        lone_tma, _ = backward_arrays(variant, call, layouts)
    order, num_ctas = backward_order(variant, call)
    made = kernel(variant, tma, arrays, call.scratch, call.scalars, order, lone_tma)
    shell.launch(made, variant, num_ctas, call.stream)
