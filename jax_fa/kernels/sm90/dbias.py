"""Hopper's gradient of a bias: dS, summed over every dimension that the bias is broadcast along.

    load_bias   bias of a tile | bias of the next tile
    find        step(0) lse delta | step(1) lse delta | ...      of all batches and heads of a tile
    load        q k  dO v (0) | q k  dO v (1) | ...
    consume i   S dP(0)  P  sums += P (dP - delta) | S dP(1) ...      64 rows of the tile
    consume j   the same for 64 other rows

One CTA keeps the gradient of a tile of the bias in registers and alone writes it: the order of the
sums is always the same, and no array of size [B, N, T, S] is made unless the bias is one. Where few
tiles are shared by many batches and heads, each CTA sums over a part of these, and ``merge`` adds
the results. Roles, edges and memory: ``plan_dbias.py``; conventions: ``jax_fa/spec/problem.py``.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Int64
from cutlass.memory import SmemAllocator

from jax_fa.kernels import edges, primitives
from jax_fa.kernels.dbias_host import DbiasCall, dbias_entry
from jax_fa.kernels.dbias_work import Arrays, Tiles
from jax_fa.kernels.forward_work import Scalars, Variant
from jax_fa.kernels.sm90 import bias_chunks, bias_product
from jax_fa.kernels.sm90.dbias_roles import consume, load, load_bias
from jax_fa.kernels.sm90.dbias_steps import STATS, WORDS, find
from jax_fa.kernels.sm90.dbias_work import (
    DbiasContext,
    DbiasPipes,
    DbiasSmem,
    Tma,
    make_layouts,
)
from jax_fa.kernels.sm90.plan import ELEMENT_BYTES
from jax_fa.kernels.sm90.plan_bias import FACTORS_BYTES, num_words
from jax_fa.kernels.sm90.plan_dbias import STATISTICS, STEP_WORDS, dbias_plan
from jax_fa.spec.config_sm90_dbias import HopperBiasGradient
from jax_fa.spec.key import KernelKey


@cute.kernel
def kernel(
    variant: cutlass.Constexpr,
    tma: Tma,
    arrays: Arrays,
    scalars: Scalars,
    grid: Tiles,
    bias: primitives.TmaArray,
) -> None:
    """Device entry: shared memory, pipelines, dispatch of roles."""
    plan, layouts, config = variant.plan, make_layouts(variant), variant.config
    dtype, multiplies = variant.dtype, variant.key.multiplies_bias
    threads = plan.role("consume").threads
    words_layout = cute.make_layout((4, threads, config.block_kv // 8))
    steps_layout = cute.make_layout((STEP_WORDS, config.step_stages))
    stats_layout = cute.make_layout((STATISTICS, config.block_q, config.step_stages))

    factor_elements = FACTORS_BYTES // ELEMENT_BYTES if multiplies else 0
    odd_words = num_words(config) if multiplies else 0

    @cute.struct
    class Storage:
        qk_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("qk").stages]
        dov_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("dov").stages]
        bias_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("bias").stages]
        step_barriers: cute.struct.MemRange[Int64, 2 * plan.edge("steps").stages]
        steps: cute.struct.MemRange[Int32, cute.cosize(steps_layout)]
        stats: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(stats_layout)], 16]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.q)], 1024]
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.k)], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.v)], 1024]
        dout: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.dout)], 1024]
        bias: cute.struct.Align[cute.struct.MemRange[Int16, cute.cosize(layouts.bias)], 1024]
        factors: cute.struct.Align[cute.struct.MemRange[dtype, factor_elements], 1024]
        odd: cute.struct.MemRange[Int32, odd_words]

    storage = SmemAllocator().allocate(Storage)
    words = cute.recast_ptr(storage.bias.data_ptr(), dtype=Int32)
    factors = storage.factors.data_ptr().toint() if multiplies else None
    smem = DbiasSmem(
        q=primitives.smem_tensor(storage.q, layouts.q),
        k=primitives.smem_tensor(storage.k, layouts.k),
        v=primitives.smem_tensor(storage.v, layouts.v),
        dout=primitives.smem_tensor(storage.dout, layouts.dout),
        bias=primitives.smem_tensor(storage.bias, layouts.bias),
        words=cute.make_tensor(words, words_layout),
        columns=None,
        factors=bias_product.factors_at(dtype, factors) if multiplies else None,
        odd=storage.odd.get_tensor(cute.make_layout(odd_words)) if multiplies else None,
        steps=storage.steps.get_tensor(steps_layout),
        stats=storage.stats.get_tensor(stats_layout),
    )
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        primitives.prefetch_descriptors((*tma, bias.atom))
    qk_in, qk_out = edges.make_edge(plan, "qk", storage.qk_barriers.data_ptr())
    dov_in, dov_out = edges.make_edge(plan, "dov", storage.dov_barriers.data_ptr())
    steps = edges.make_ring(plan, plan.edge("steps"), storage.step_barriers.data_ptr())
    chunks = edges.make_ring(plan, plan.edge("bias"), storage.bias_barriers.data_ptr())
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    x = DbiasContext(tma, arrays, scalars, grid, smem, bias, chunks, steps)
    if warp < plan.role("consume").warps.start:
        cute.arch.setmaxregister_decrease(plan.role("load").registers)
        if warp == plan.role("load").warps.start:
            load(variant, x, DbiasPipes(qk_in, dov_in))
        elif warp == plan.role("load_bias").warps.start:
            load_bias(variant, x, chunks.make_producer())
        elif warp == plan.role("find").warps.start:
            find(variant, x, steps.make_producer(), WORDS)
        else:
            find(variant, x, steps.make_producer(), STATS)
    else:
        cute.arch.setmaxregister_increase(plan.role("consume").registers)
        consume(variant, x, DbiasPipes(qk_out, dov_out))


def make_entry(key: KernelKey, config: HopperBiasGradient) -> Callable:
    """The flat host entry of one variant."""
    return dbias_entry(Variant(key, config, dbias_plan(key, config)), launch)


@cute.jit
def launch(variant: cutlass.Constexpr, call: DbiasCall) -> None:
    """Launches the main kernel."""
    layouts, atoms, seen = make_layouts(variant), {}, {}
    for name in Tma._fields:
        layout = cute.slice_(getattr(layouts, name), (None, None, 0))
        shape = cute.product_each(layout.outer.shape)
        atoms[name], seen[name] = primitives.tma_load(getattr(call.arrays, name), layout, shape)
    views = call.arrays._replace(**seen)
    chunk = cute.slice_(layouts.bias, (None, None, 0))
    bias = bias_chunks.describe(call.scalars.bias, call.scalars.sequences.rows.own, chunk)
    kernel(variant, Tma(**atoms), views, call.scalars, call.grid, bias).launch(
        grid=(cutlass.min(call.num_sms, call.grid.number), 1, 1),
        block=(variant.plan.threads, 1, 1),
        stream=call.stream,
        min_blocks_per_mp=1,
    )
