"""What the roles of the Hopper backward share beyond ``kernels/backward_work.py``."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from jax_fa.config import HopperBackward, KernelKey
from jax_fa.kernels import backward_rows, edges, primitives, tiles
from jax_fa.kernels.backward_work import Arrays, Scalars, Tma
from jax_fa.kernels.sm90.plan import ROWS
from jax_fa.kernels.sm90.plan_bwd import DS_STAGES


class Variant(NamedTuple):
    """What is fixed at compile time."""

    key: KernelKey
    config: HopperBackward
    plan: edges.Plan

    @property
    def dtype(self) -> type:
        """Element type of the arrays."""
        return primitives.DTYPES[self.key.dtype]

    @property
    def is_general(self) -> bool:
        """Everything that can hide a key may be there."""
        return self.key.mask == "general"

    @property
    def dq_order(self) -> str:
        """Order of the sums of dQ (``backward_rows``)."""
        return "fragments"

    @property
    def dq_shape(self) -> tuple[int, int]:
        """Rows and columns of dQ that one consumer computes."""
        config, head_dim = self.config, self.key.head_dim
        if config.splits_dq_rows:
            return ROWS, head_dim
        return config.block_q, head_dim // config.num_consumers

    @property
    def s_columns(self) -> int:
        """Queries of a block whose scores one consumer computes."""
        config = self.config
        return config.block_q if config.splits_keys else config.block_q // config.num_consumers

    @property
    def dkv_columns(self) -> tuple[int, int]:
        """Columns of dK and of dV that one consumer computes."""
        parts = 1 if self.config.splits_keys else self.config.num_consumers
        return self.key.head_dim // parts, self.key.value_dim // parts


class Layouts(NamedTuple):
    """Shared memory layouts."""

    k: cute.ComposedLayout  # (block_kv, D)
    v: cute.ComposedLayout  # (block_kv, Dv)
    q: cute.ComposedLayout  # (block_q, D, q_stages)
    dout: cute.ComposedLayout  # (block_q, Dv, dout_stages)
    ds: cute.ComposedLayout  # (block_q, block_kv, DS_STAGES), and of P


def make_layouts(variant: Variant) -> Layouts:
    """The layouts of a variant's shared memory."""
    key, config, dtype = variant.key, variant.config, variant.dtype
    q_panel, dout_panel = variant.dkv_columns
    return Layouts(
        k=primitives.smem_layout(dtype, (config.block_kv, key.head_dim), variant.dq_shape[1]),
        v=primitives.smem_layout(dtype, (config.block_kv, key.value_dim)),
        q=primitives.smem_layout(dtype, (config.block_q, key.head_dim, config.q_stages), q_panel),
        dout=primitives.smem_layout(
            dtype, (config.block_q, key.value_dim, config.dout_stages), dout_panel
        ),
        ds=primitives.smem_layout(dtype, (config.block_q, config.block_kv, DS_STAGES), ROWS),
    )


class Smem(NamedTuple):
    """Shared memory."""

    k: cute.Tensor  # (block_kv, D)
    v: cute.Tensor  # (block_kv, Dv)
    q: cute.Tensor  # (block_q, D, q_stages)
    dout: cute.Tensor  # (block_q, Dv, dout_stages)
    ds: cute.Tensor  # (block_q, block_kv, DS_STAGES)
    p: cute.Tensor  # the same; the memory of ds where consumers own keys, and unused
    lse2: cute.Tensor  # (block_q, q_stages)
    delta: cute.Tensor  # (block_q, dout_stages)
    segment_rows: cute.Tensor  # (4,) kernels/segments.py


class Context(NamedTuple):
    """What both roles work with."""

    tma: Tma
    arrays: Arrays
    scratch: backward_rows.Scratch
    scalars: Scalars
    order: tiles.Order
    smem: Smem


class Pipes(NamedTuple):
    """One end of each edge."""

    k: PipelineProducer | PipelineConsumer
    v: PipelineProducer | PipelineConsumer
    q: PipelineProducer | PipelineConsumer
    dout: PipelineProducer | PipelineConsumer


class Consumer(NamedTuple):
    """What one consumer warpgroup works with, beside its pipes.

    Comments give the shapes where consumers own 64 keys each; where they own columns, see
    ``HopperBackward.splits_keys``.
    """

    s_mma: cute.TiledMma  # 64 keys x block_q, both operands in smem
    dk_mma: cute.TiledMma  # 64 keys x D, A in registers
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
    ds_keys: cute.Tensor  # A of dK if consumers own columns
    p_keys: cute.Tensor  # A of dV if consumers own columns
    s: cute.Tensor  # accumulator of 64 x block_q
    dk: cute.Tensor  # accumulator of 64 x D
    dv: cute.Tensor  # accumulator of 64 x Dv
    first_key: Int32  # of this consumer in the tile
    first_query: Int32  # of this consumer's scores in the block
    index: Int32
    thread: Int32
