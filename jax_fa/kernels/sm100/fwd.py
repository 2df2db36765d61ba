"""Blackwell forward: softmax(mask(scale q k^T)) v and its log-sum-exp, in one pass over the keys.

    load      k(n-1) q0 q1 v(n-1) | k(n-2) v(n-2) | k(n-3) v(n-3) | ...
    mma          S0   S1 | PV0(n-1) S0(n-2)  PV1(n-1) S1(n-2) | PV0(n-2) S0(n-3) ...
    softmax0          [  P0(n-1)  ]        [  P0(n-2)  ]
    softmax1               [  P1(n-1)  ]          [  P1(n-2)  ]
    correction                             [O0]     [O1]                      ... out0 out1
    store                                                                         ... out0 out1

With heads of 256 there is one query tile, and S is a block of keys ahead of PV:

    load      k(n-1) q0 k(n-2) v(n-1) | k(n-3) v(n-2) | ...
    mma          S0 S0(n-2) | PV0(n-1) S0(n-3) | PV0(n-2) S0(n-4) | ...
    softmax0       [ P0(n-1) ]   [ P0(n-2) ]   [ P0(n-3) ]
    correction                          [O0]          [O0]

The tensor core multiplies for one query tile, or key block, while the softmax of another is
computed. This file has the host entry, the memory and the dispatch of roles. The roles are in
``fwd_roles.py`` and ``fwd_softmax.py``; ``plan.py`` describes roles, edges and memory as data.
Conventions: ``jax_fa/spec/problem.py``.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from jax_fa.kernels import edges, primitives, tiles
from jax_fa.kernels.forward_host import (
    ForwardCall,
    forward_arrays,
    forward_entry,
    forward_order,
)
from jax_fa.kernels.forward_work import Arrays, Scalars, Tma, Variant, narrow_keys, tile_at
from jax_fa.kernels.packing_host import forward_granules, forward_packing
from jax_fa.kernels.sm100 import clusters, fwd_softmax, shell, tensor_plan
from jax_fa.kernels.sm100 import fwd_roles as roles
from jax_fa.kernels.sm100.fwd_roles import ForwardContext, ForwardSmem
from jax_fa.kernels.sm100.plan import MMA_ROWS, OUT_STAGES, forward_plan, tiling
from jax_fa.spec import division
from jax_fa.spec.config_sm100 import BlackwellForward
from jax_fa.spec.key import KernelKey

TMEM_ROLE = "correction"
"""The role that allocates and frees tensor memory: it is the last to read it."""


class Layouts(NamedTuple):
    """Shared memory layouts; the sizes are those of ``plan.Tiling``.

    In a pair, each CTA has half the rows of k and half the columns of v.
    """

    q: cute.ComposedLayout  # (128, D, q_tiles)
    k: cute.ComposedLayout  # (128 / ctas, kv_columns, kv_stages)
    v: cute.ComposedLayout  # (kv_rows, Dv / ctas, kv_stages), a stage is as large as one of k
    out: cute.ComposedLayout  # (128, out_columns, 2)


def make_layouts(variant: Variant) -> Layouts:
    """The layouts of a variant's shared memory."""
    key, cut, ctas = variant.key, tiling(variant.key, variant.config), variant.plan.ctas
    shapes = {
        "q": (MMA_ROWS, key.head_dim, cut.q_tiles),
        "k": (variant.config.block_kv // ctas, cut.kv_columns, cut.kv_stages),
        "v": (cut.kv_rows, key.value_dim // ctas, cut.kv_stages),
        "out": (MMA_ROWS, cut.out_columns, OUT_STAGES),
    }
    return Layouts(
        **{name: primitives.smem_layout(variant.dtype, shape) for name, shape in shapes.items()}
    )


@cute.jit
def narrow_own_keys(variant: cutlass.Constexpr, x: ForwardContext) -> None:
    """``narrow_keys`` of the CTA's only tile."""
    narrow_keys(variant, x, tile_at(variant, x, Int32(0)), variant.plan.warps)


@cute.kernel
def kernel(
    variant: cutlass.Constexpr,
    tma: Tma,
    arrays: Arrays,
    scalars: Scalars,
    order: tiles.Order,
    packing: division.Packing,
    granules: primitives.TmaArray,
):
    """Device entry: shared and tensor memory, pipelines, dispatch of roles."""
    layouts, dtype = make_layouts(variant), variant.dtype
    cut = tiling(variant.key, variant.config)
    out_elements = 0 if variant.is_split else cute.cosize(layouts.out)

    @cute.struct
    class Storage:
        control: cute.struct.Align[shell.control_storage(variant.plan), 8]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.q)], 1024]
        kv: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.k)], 1024]
        out: cute.struct.Align[cute.struct.MemRange[dtype, out_elements], 1024]
        stats: cute.struct.MemRange[Float32, MMA_ROWS * 2 * cut.q_tiles]

    storage = SmemAllocator().allocate(Storage)
    control = shell.control_of(storage.control)
    smem = ForwardSmem(
        q=primitives.smem_tensor(storage.q, layouts.q),
        k=primitives.smem_tensor(storage.kv, layouts.k),
        v=primitives.smem_tensor(storage.kv, layouts.v),
        # Unused where keys are split.
        out=primitives.smem_tensor(storage.q if variant.is_split else storage.out, layouts.out),
        stats=storage.stats.get_tensor(cute.make_layout((MMA_ROWS, 2, cut.q_tiles))),
        zero_fill=control.zero_fill,
        found=control.found,
    )
    warp, rings, tmem = shell.start(variant, tma, control, TMEM_ROLE)
    x = ForwardContext(tma, arrays, scalars, order, packing, granules, smem, tmem)
    shell.narrow(variant, x, narrow_own_keys)
    _dispatch(variant, x, warp, rings)


@cute.jit
def _dispatch(variant: cutlass.Constexpr, x: ForwardContext, warp: Int32, rings: shell.Rings):
    """Sends every warp to its role, with the registers and the ends of edges of that role."""
    plan, first = variant.plan, {role.name: role.warps.start for role in variant.plan.roles}
    # setmaxnreg works on warpgroups: the four single warps share a value.
    if warp < first["correction"]:
        cute.arch.setmaxregister_increase(plan.role("softmax0").registers)
        # The softmax roles run the same instructions, which halves their share of the code.
        tile = warp // edges.WARPS_PER_GROUP
        of_tile = shell.rings_of_tile(plan, rings, tile)
        softmax = shell.pipes_of(plan, "softmax0", fwd_softmax.SoftmaxPipes, of_tile, 0)
        fwd_softmax.softmax_role(variant, x, tile, softmax)
    elif warp < first["mma"]:
        cute.arch.setmaxregister_decrease(plan.role("correction").registers)
        of_tiles = _pipes_by_tile(variant, "correction", fwd_softmax.CorrectionTilePipes, rings)
        fwd_softmax.correction(
            variant,
            x,
            shell.pipes_of(plan, "correction", fwd_softmax.CorrectionPipes, rings),
            of_tiles,
        )
        shell.free_tmem(variant, x.tmem, warp, TMEM_ROLE)
    else:
        cute.arch.setmaxregister_decrease(plan.role("mma").registers)
        if warp == first["mma"]:
            if clusters.rank_in_cluster(plan.ctas) == tensor_plan.LEADER:
                of_tiles = _pipes_by_tile(variant, "mma", roles.ForwardMmaTilePipes, rings)
                roles.mma(
                    variant, x, shell.pipes_of(plan, "mma", roles.ForwardMmaPipes, rings), of_tiles
                )
        elif warp == first["store"]:
            if const_expr(not variant.is_split):
                roles.store(variant, x, shell.pipes_of(plan, "store", roles.StorePipes, rings))
        elif warp == first["load"]:
            roles.load(variant, x, shell.pipes_of(plan, "load", roles.ForwardLoadPipes, rings))


def _pipes_by_tile(
    variant: Variant, role: str, bundle: type, rings: shell.Rings
) -> tuple[NamedTuple, ...]:
    """The ends that ``role`` holds for each query tile."""
    tiles_of_cta = range(tiling(variant.key, variant.config).q_tiles)
    return tuple(shell.pipes_of(variant.plan, role, bundle, rings, i) for i in tiles_of_cta)


def make_entry(key: KernelKey, config: BlackwellForward) -> Callable:
    """The flat host entry of one variant."""
    return forward_entry(Variant(key, config, forward_plan(key, config)), launch)


@cute.jit
def launch(variant: cutlass.Constexpr, call: ForwardCall):
    """Describes the arrays to TMA and launches the kernel."""
    one = (None, None, 0)
    layouts = make_layouts(variant)
    copied = Layouts(*[cute.slice_(layout, one) for layout in layouts])
    tma, arrays = forward_arrays(variant, call, copied)
    granules = forward_granules(variant, call, layouts.q)
    packing = forward_packing(variant, call)
    order, num_ctas = forward_order(variant, call, packing)
    made = kernel(variant, tma, arrays, call.scalars, order, packing, granules)
    shell.launch(made, variant, num_ctas, call.stream)
