"""Bundles and layouts that the roles of the Hopper backward share."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.kernels import backward_rows, edges, primitives, tiles
from jax_fa.kernels.backward_rows import FLOATS
from jax_fa.kernels.backward_work import Arrays, Scalars, Step, Tma, Work
from jax_fa.kernels.sm90 import bias_chunks
from jax_fa.kernels.sm90.plan import GROUP_BITS, WGMMA_ROWS
from jax_fa.kernels.sm90.plan_bwd import DS_STAGES
from jax_fa.spec.config_sm90_bwd import HopperBackward, may_cap
from jax_fa.spec.key import KernelKey


class DqShape(NamedTuple):
    """Rows and columns of a part of dQ."""

    rows: int
    columns: int


class BackwardVariant(NamedTuple):
    """A kernel's compile-time constants."""

    key: KernelKey
    config: HopperBackward
    plan: edges.Plan

    @property
    def dtype(self) -> type:
        """Element type of the arrays."""
        return primitives.DTYPES[self.key.dtype]

    @property
    def is_general(self) -> bool:
        """Whether operands that hide keys may be present."""
        return self.key.mask == "general"

    @property
    def claims_tiles(self) -> bool:
        """Whether CTAs may claim one tile after the other."""
        return self.config.claims_tiles

    @property
    def may_cap(self) -> bool:
        """Whether logits may be bounded by a soft cap."""
        return may_cap(self.key)

    @property
    def dq_order(self) -> str:
        """Order of the sums of dQ (``backward_rows``)."""
        return "warps" if self.config.stages_dq == "always" else "fragments"

    @property
    def rounds_late(self) -> bool:
        """Whether P, being also the slope, is rounded only once dS is computed or P is stored."""
        return not self.may_cap

    @property
    def dq_shape(self) -> DqShape:
        """The part of a query block's dQ that one consumer computes."""
        config, head_dim = self.config, self.key.head_dim
        if config.splits_dq_rows:
            return DqShape(WGMMA_ROWS, head_dim)
        return DqShape(config.block_q, head_dim // config.num_consumers)

    @property
    def dq_fours(self) -> int:
        """The number of fours in ``dq_shape``."""
        rows, columns = self.dq_shape
        return rows * columns // FLOATS

    @property
    def s_columns(self) -> int:
        """The number of queries of a block whose scores one consumer computes."""
        config = self.config
        return config.block_q if config.splits_keys else config.block_q // config.num_consumers

    @property
    def column_parts(self) -> int:
        """The number of consumers that share the columns of dK and dV."""
        return 1 if self.config.splits_keys else self.config.num_consumers

    @property
    def dk_columns(self) -> int:
        """The number of columns of dK that one consumer computes."""
        return self.key.head_dim // self.column_parts

    @property
    def dv_columns(self) -> int:
        """The number of columns of dV that one consumer computes."""
        return self.key.value_dim // self.column_parts


class BackwardLayouts(NamedTuple):
    """Shared memory layouts."""

    k: cute.ComposedLayout  # (block_kv, D)
    v: cute.ComposedLayout  # (block_kv, Dv)
    q: cute.ComposedLayout  # (block_q, D, q_stages)
    dout: cute.ComposedLayout  # (block_q, Dv, dout_stages)
    ds: cute.ComposedLayout  # (block_q, block_kv, DS_STAGES); also the layout of P
    bias: Any  # (block_q, halves, chunks of the ring), or None without a ring


def make_layouts(variant: BackwardVariant) -> BackwardLayouts:
    """The layouts of a variant's shared memory."""
    key, config, dtype = variant.key, variant.config, variant.dtype
    chunks = config.bias_chunks * config.bias_stages
    return BackwardLayouts(
        k=primitives.smem_layout(dtype, (config.block_kv, key.head_dim), variant.dq_shape.columns),
        v=primitives.smem_layout(dtype, (config.block_kv, key.value_dim)),
        q=primitives.smem_layout(
            dtype, (config.block_q, key.head_dim, config.q_stages), variant.dk_columns
        ),
        dout=primitives.smem_layout(
            dtype, (config.block_q, key.value_dim, config.dout_stages), variant.dv_columns
        ),
        ds=primitives.smem_layout(dtype, (config.block_q, config.block_kv, DS_STAGES), WGMMA_ROWS),
        bias=bias_chunks.layout(config.block_q, chunks) if chunks else None,
    )


class BackwardSmem(NamedTuple):
    """Shared memory."""

    k: cute.Tensor  # (block_kv, D)
    v: cute.Tensor  # (block_kv, Dv)
    q: cute.Tensor  # (block_q, D, q_stages)
    dout: cute.Tensor  # (block_q, Dv, dout_stages)
    ds: cute.Tensor  # (block_q, block_kv, DS_STAGES); where the bias is if that is multiplied
    p: cute.Tensor  # as ds; unused, and in the memory of ds, where consumers own keys
    lse2: cute.Tensor  # (block_q, q_stages)
    delta: cute.Tensor  # (block_q, dout_stages)
    dq: Any  # (4, fours of a consumer's part, consumers), or None if it is not staged
    bias: Any  # (block_q, halves, chunks of the ring), or None without a ring
    factors: Any  # F of ``bias_product.py``, or None
    words: Any  # (1 + consumers,) ``bias_product.write_factors``, or None likewise
    steps: Any  # (STEP_WORDS, 2 * q_stages) bwd_steps.py, or None unless steps are told
    work: Any  # (WORK_WORDS, ITEMS) bwd_claims.py, or None unless tiles are claimed
    found: cute.Tensor  # (FOUND_WORDS,) segments.py, dense_mask.py


class BackwardContext(NamedTuple):
    """The kernel's arguments and shared memory, which every role is given."""

    tma: Tma
    arrays: Arrays
    scratch: backward_rows.Scratch
    scalars: Scalars
    order: tiles.Order
    smem: BackwardSmem
    bias: Any  # primitives.TmaArray of the bias, or None without a ring
    dbias: Any  # the same of its gradient
    work: Any = None  # the ring of tiles that load and consumers work on, or None likewise
    loaded: Any = None  # the ring of tiles that load is about to end


class BackwardPipes(NamedTuple):
    """One end of each edge."""

    k: PipelineProducer | PipelineConsumer
    v: PipelineProducer | PipelineConsumer
    q: PipelineProducer | PipelineConsumer
    dout: PipelineProducer | PipelineConsumer
    bias: Any  # None without a ring


class QueryPipes(NamedTuple):
    """A consumer's ends of the edges that carry queries, dO, and the bias if it has a ring."""

    q: PipelineConsumer
    dout: PipelineConsumer
    bias: Any


class BackwardConsumer(NamedTuple):
    """Operands, accumulators and place of one consumer warpgroup.

    Comments give the shapes where consumers own 64 keys each; where they own columns, see
    ``HopperBackward.splits_keys``.
    """

    s_mma: cute.TiledMma  # 64 keys x block_q, both operands in smem
    dk_mma: cute.TiledMma  # 64 keys x D, A in registers unless HopperBackward.is_lean
    dv_mma: cute.TiledMma  # 64 keys x Dv, A in registers
    dq_mma: cute.TiledMma
    k: cute.Tensor  # A of S
    v: cute.Tensor  # A of dP
    q: cute.Tensor  # B of S
    dout: cute.Tensor  # B of dP
    q_rows: cute.Tensor  # B of dK
    dout_rows: cute.Tensor  # B of dV
    ds: cute.Tensor  # A of dQ
    k_rows: cute.Tensor  # B of dQ
    store: cute.TiledCopy  # of P or dS to smem
    ds_target: cute.Tensor  # where dS goes
    p_target: cute.Tensor  # where P goes if consumers own columns
    ds_keys: cute.Tensor  # A of dK if it is in smem
    p_keys: cute.Tensor  # A of dV if consumers own columns
    s: cute.Tensor  # accumulator of 64 x block_q
    dk: cute.Tensor  # accumulator of 64 x D
    dv: cute.Tensor  # accumulator of 64 x Dv
    bias: Any  # words of a bias without a ring, one per score, or None
    first_key: Int32  # of this consumer in the tile
    first_query: Int32  # of this consumer's scores in the block
    index: Int32
    thread: Int32


def thread_anew(variant: BackwardVariant, c: BackwardConsumer) -> BackwardConsumer:
    """``c``; with a ring of a bias, steps keep nothing derived from its ``thread`` in registers."""
    if not variant.config.bias_stages:
        return c
    # Were it possibly negative, addresses in chunks would take 85 instructions, not 22.
    return c._replace(thread=primitives.opaque(c.thread) & GROUP_BITS)


def place_of_dq(variant: BackwardVariant, work: Work, at: Step) -> Int32:
    """The position of a query block in ``Scratch.dq_sum``, in fours."""
    row = work.scratch_row + at.q_block * variant.config.block_q
    return row * (variant.key.head_dim // FLOATS)


def release(variant: BackwardVariant, data: str, handle: Any) -> None:
    """Gives a stage of the edge ``data`` back. Called by whole warps, as one.

    The handle's own ``release`` asks for the number of the thread. The answer comes the way of
    accesses to shared memory, and waits behind them; that of an election does not.
    """
    if data in variant.config.elects:
        barrier = handle.get_origin().sync_object_empty.get_barrier(handle.index)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)
    else:
        handle.release()
