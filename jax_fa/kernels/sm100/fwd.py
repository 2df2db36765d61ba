"""Blackwell forward: out = softmax(mask(scale q k^T)) v, and its log-sum-exp, in one pass over keys.

    load      k(n-1) q0 q1 v(n-1) | k(n-2) v(n-2) | k(n-3) v(n-3) | ...
    mma          S0   S1 | PV0(n-1) S0(n-2)  PV1(n-1) S1(n-2) | PV0(n-2) S0(n-3) ...
    softmax0          [  P0(n-1)  ]        [  P0(n-2)  ]
    softmax1               [  P1(n-1)  ]          [  P1(n-2)  ]
    correct                                [O0]     [O1]                      ... out0 out1
    store                                                                         ... out0 out1

The tensor core multiplies for one query tile while the softmax of the other is computed. Host
entry, memory, dispatch of roles; the roles are in ``fwd_roles.py``, roles, edges and memory as data
in ``plan.py``. Conventions: ``jax_fa/problem.py``.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from jax_fa.band import UNBOUNDED
from jax_fa.config import KernelKey
from jax_fa.kernels import abi, edges, primitives, softmax, tiles
from jax_fa.kernels.sm100 import fwd_roles as roles
from jax_fa.kernels.sm100.fwd_roles import Arrays, Context, Scalars, Smem, Tma, Variant
from jax_fa.kernels.sm100.plan import BLOCK_KV, Q_TILES, ROWS, Config, forward_plan


class Layouts(NamedTuple):
    """Shared memory layouts, 128 rows in mode 0."""

    q: cute.ComposedLayout  # (128, D, 2)
    k: cute.ComposedLayout  # (128, D, stages)
    v: cute.ComposedLayout  # (128, Dv, stages), a stage as large as one of k
    out: cute.ComposedLayout  # (128, Dv, 2)


def make_layouts(variant: Variant) -> Layouts:
    """The layouts of a variant's shared memory."""
    key, stages, dtype = variant.key, variant.config.kv_stages, variant.dtype
    v = primitives.smem_layout(dtype, (BLOCK_KV, key.value_dim, stages))
    if key.value_dim < key.head_dim:
        rows, columns, _ = v.outer.shape
        row_stride, column_stride, _ = v.outer.stride
        outer = cute.make_layout(
            (rows, columns, stages),
            stride=(row_stride, column_stride, BLOCK_KV * key.head_dim),
        )
        v = cute.make_composed_layout(v.inner, 0, outer)
    return Layouts(
        q=primitives.smem_layout(dtype, (ROWS, key.head_dim, Q_TILES)),
        k=primitives.smem_layout(dtype, (BLOCK_KV, key.head_dim, stages)),
        v=v,
        out=primitives.smem_layout(dtype, (ROWS, key.value_dim, Q_TILES)),
    )


def _view(like: cute.Tensor, layout: cute.ComposedLayout) -> cute.Tensor:
    """Other data in the bytes of ``like``."""
    pointer = cute.recast_ptr(like.iterator, layout.inner)
    return cute.make_tensor(pointer, layout.outer)


@cute.kernel
def kernel(
    variant: cutlass.Constexpr,
    tma: Tma,
    arrays: Arrays,
    scalars: Scalars,
    order: tiles.Order,
):
    """Device entry: shared and tensor memory, pipelines, dispatch of roles."""
    plan, layouts, dtype = variant.plan, make_layouts(variant), variant.dtype
    out_buffer = next(buffer for buffer in plan.buffers if buffer.name == "out")
    out_elements = 0 if out_buffer.alias_of else cute.cosize(layouts.out)

    @cute.struct
    class Storage:
        mbarriers: cute.struct.MemRange[Int64, plan.num_mbarriers]
        scrub: cute.struct.MemRange[Int64, 1]
        tmem: cute.struct.MemRange[Int32, 1]
        segment_keys: cute.struct.MemRange[Int32, 2]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.q)], 1024]
        kv: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.k)], 1024]
        out: cute.struct.Align[cute.struct.MemRange[dtype, out_elements], 1024]
        stats: cute.struct.MemRange[Float32, ROWS * 2 * Q_TILES]

    storage = SmemAllocator().allocate(Storage)
    sQ = primitives.smem_tensor(storage.q, layouts.q)
    sK = primitives.smem_tensor(storage.kv, layouts.k)
    sOut = _view(sQ, layouts.out)
    if const_expr(out_elements > 0):
        sOut = primitives.smem_tensor(storage.out, layouts.out)
    smem = Smem(
        q=sQ,
        k=sK,
        v=primitives.smem_tensor(storage.kv, layouts.v),
        out=sOut,
        stats=storage.stats.get_tensor(cute.make_layout((ROWS, 2, Q_TILES))),
        scrub=storage.scrub.data_ptr(),
        segment_keys=storage.segment_keys.get_tensor(cute.make_layout(2)),
    )
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        for atom in tma:
            cpasync.prefetch_descriptor(atom)
        if const_expr(variant.is_general):
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(smem.scrub, 1)
                smem.segment_keys[0] = Int32(UNBOUNDED)
                smem.segment_keys[1] = Int32(0)
    pipes = {
        edge.data: edges.make_edge(
            plan, edge.data, storage.mbarriers.data_ptr() + plan.first_mbarrier(edge.data)
        )
        for edge in plan.edges
    }
    tmem_address = storage.tmem.data_ptr()
    if warp == plan.role("correct").warps.start:
        cute.arch.alloc_tmem(edges.TMEM_COLS, tmem_address)
        cute.arch.relinquish_tmem_alloc_permit()
    cute.arch.mbarrier_init_fence()
    primitives.before_thread_sync()
    cute.arch.sync_threads()
    primitives.after_thread_sync()

    tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_address)
    x = Context(tma, arrays, scalars, order, smem, tmem)
    if const_expr(variant.is_general):
        if tiles.is_present(scalars.q_segments):
            roles.find_segment_keys(variant, x)
            cute.arch.sync_threads()
    dispatch(variant, x, pipes, warp)


def ends(pipes: dict, names: tuple[str, ...], side: int) -> list:
    """The producer (0) or consumer (1) ends of some edges; "s*" is the pair of s0 and s1."""
    found = []
    for name in names:
        if name.endswith("*"):
            found.append(tuple(pipes[f"{name[:-1]}{tile}"][side] for tile in range(Q_TILES)))
        else:
            found.append(pipes[name][side])
    return found


@cute.jit
def dispatch(
    variant: cutlass.Constexpr, x: Context, pipes: cutlass.Constexpr[dict], warp: Int32
):
    """Sends every warp to its role, with as many registers as that has."""


def make_entry(key: KernelKey, config: Config):
    """The flat host entry of one variant, and the stand-in arguments it is compiled with.

    The entry's parameters are those of ``abi.FORWARD``.
    """
