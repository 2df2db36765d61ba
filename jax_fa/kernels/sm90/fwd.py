"""Hopper forward: out = softmax(mask(scale q k^T)) v, and its log-sum-exp, in one pass over keys.

    find (3 warps)  the work of the tiles to come, unless nothing is masked
    load_bias       bias(n-1) | bias(n-2) | ..., where there is one: fwd_bias_roles.py
    load (1 warp)   q  k(n-1) | k(n-2) v(n-1) | k(n-3) v(n-2) | ... | q' k'(m-1) v(0) | k'(m-2) ...
    consume i          S(n-1) | S(n-2) PV(n-1) softmax(n-2) | ... | S'(m-1) PV(0) softmax'(m-1) ...
    consume j                 |         (its softmax)  S(n-2) PV(n-1) softmax(n-2) | ...

Each consumer warpgroup issues the product S of the next key block before PV of the current one, so
that softmax of the next overlaps PV of the current, also across the border between two tiles. Named
barriers make one consumer compute its softmax while another occupies the tensor cores
("ping-pong": Shah et al., arXiv:2407.08608). Roles, edges, memory: ``plan.py``; conventions:
``jax_fa/spec/problem.py``.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from jax_fa.kernels import edges, primitives, tiles
from jax_fa.kernels.forward_host import ForwardCall, forward_arrays, forward_entry, forward_order
from jax_fa.kernels.forward_work import Arrays, Scalars, Tma, Variant
from jax_fa.kernels.sm90.fwd_lists import find
from jax_fa.kernels.sm90.fwd_roles import consume, load
from jax_fa.kernels.sm90.fwd_work import ForwardContext, ForwardPipes, ForwardSmem, make_layouts
from jax_fa.kernels.sm90.plan import TOLD_WORDS, forward_plan, num_lists, step_slots
from jax_fa.spec.config_sm90 import HopperForward
from jax_fa.spec.key import KernelKey


@cute.kernel
def kernel(
    variant: cutlass.Constexpr,
    tma: Tma,
    arrays: Arrays,
    scalars: Scalars,
    order: tiles.Order,
    packing: Any,
    granules: Any,
    bias: Any,
) -> None:
    """Device entry: shared memory, pipelines, dispatch of roles."""
    plan, layouts, dtype = variant.plan, make_layouts(variant), variant.dtype
    stages, slots = (count(variant.key, variant.config) for count in (num_lists, step_slots))
    bias_halves = variant.bias.num_halves(variant) if variant.key.has_bias else 0
    num_sorted = variant.sorter.MAX_BLOCKS if variant.sorter else 0

    @cute.struct
    class Storage:
        q_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("q").stages]
        k_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("k").stages]
        v_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("v").stages]
        zero_fill: cute.struct.MemRange[Int64, 1]
        list_barriers: cute.struct.MemRange[Int64, 2 * stages]
        lists: cute.struct.MemRange[Int32, TOLD_WORDS * stages]
        steps: cute.struct.MemRange[Int32, slots]
        sorted: cute.struct.MemRange[Int16, num_sorted]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.q)], 1024]
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.k)], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.v)], 1024]
        bias: cute.struct.Align[cute.struct.MemRange[Int16, bias_halves], 1024]
        bias_barriers: cute.struct.MemRange[Int64, 2 * variant.config.bias_stages]

    storage = SmemAllocator().allocate(Storage)
    found = storage.lists.get_tensor(cute.make_layout((TOLD_WORDS, stages)))
    smem = ForwardSmem(
        q=primitives.smem_tensor(storage.q, layouts.q),
        k=primitives.smem_tensor(storage.k, layouts.k),
        v=primitives.smem_tensor(storage.v, layouts.v),
        bias=primitives.smem_tensor(storage.bias, layouts.bias) if bias_halves else None,
        zero_fill=storage.zero_fill.data_ptr(),
        lists=found,
        found=found[None, 0],
        sorted=storage.sorted.get_tensor(cute.make_layout(num_sorted)) if num_sorted else None,
        steps=storage.steps.get_tensor(cute.make_layout(slots)) if slots else None,
    )
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        primitives.prefetch_descriptors((*tma, bias.atom if bias_halves else None))
        if const_expr(variant.is_general):
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(smem.zero_fill, 1)
    q_in, q_out = edges.make_edge(plan, "q", storage.q_barriers.data_ptr())
    k_in, k_out = edges.make_edge(plan, "k", storage.k_barriers.data_ptr())
    v_in, v_out = edges.make_edge(plan, "v", storage.v_barriers.data_ptr())
    ring, chunks, others = None, None, find
    if const_expr(variant.key.has_bias):
        chunks = edges.make_ring(plan, plan.edge("bias"), storage.bias_barriers.data_ptr())
        others = variant.bias.load_or_find
    if const_expr(variant.lists_ahead):
        ring = edges.make_ring(plan, plan.edge("work"), storage.list_barriers.data_ptr())
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    x = ForwardContext(tma, arrays, scalars, order, smem, packing, granules, bias, ring, chunks)
    if const_expr(num_sorted > 0):
        variant.sorter.sort(variant, x)
    if warp < plan.role("consume").warps.start:
        cute.arch.setmaxregister_decrease(plan.role("load").registers)
        if warp == 0:
            load(variant, x, ForwardPipes(q_in, k_in, v_in))
        elif const_expr(variant.lists_ahead or variant.key.has_bias):
            others(variant, x)
    else:
        cute.arch.setmaxregister_increase(plan.role("consume").registers)
        consume(variant, x, ForwardPipes(q_out, k_out, v_out))


def make_entry(key: KernelKey, config: HopperForward) -> Callable:
    """The flat host entry of one variant."""
    return forward_entry(Variant(key, config, forward_plan(key, config)), launch)


@cute.jit
def launch(
    variant: cutlass.Constexpr, call: ForwardCall, packing: Any = None, granules: Any = None
) -> None:
    """Describes the arrays to TMA and launches the kernel. ``ForwardContext`` has the last two."""
    layouts, one = make_layouts(variant), (None, None, 0)
    copied = layouts._replace(**{x: cute.slice_(getattr(layouts, x), one) for x in "qkv"})
    tma, arrays = forward_arrays(variant, call, copied)
    order, num_ctas = forward_order(variant, call, packing)
    bias = variant.bias.describe(variant, call) if variant.key.has_bias else None
    kernel(variant, tma, arrays, call.scalars, order, packing, granules, bias).launch(
        grid=(num_ctas, 1, 1),
        block=(variant.plan.threads, 1, 1),
        stream=call.stream,
        min_blocks_per_mp=1,
    )
