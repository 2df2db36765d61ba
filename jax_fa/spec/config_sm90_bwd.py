"""The compile-time parameters of Hopper's backward kernels that are chosen for speed.

Tiles, stages, registers. Each row carries the measurement behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from jax_fa.spec.key import KernelKey


@dataclass(frozen=True)
class HopperBackward:
    """A backward kernel's tile and resources.

    Attributes:
        block_q: query rows per step.
        splits_keys: whether consumers own 64 keys each, with P and dS as operands in registers.
            Else all work on the same 64 keys: each computes the scores of a share of the queries,
            passes P and dS through shared memory, and owns a share of the columns of dK and dV.
        num_consumers: warpgroups.
        q_stages: depth of the ring of query tiles.
        dout_stages: depth of the ring of dO tiles.
        consumer_registers: per thread of a consumer, multiple of 8.
        producer_registers: per thread of the producer warpgroup, multiple of 8.
        overlaps_dp: whether dP is computed alongside S; else after P has replaced S in registers.
        stages_dq: when dQ goes through shared memory, from which TMA adds it; else it is added from
            registers. "turns" means in deterministic runs only.
        issues_dv_early: whether dV is issued before the barrier of dS, to run while consumers wait
            for each other; else after dQ, to run while dQ is reduced.
        rounds_slope: whether P times the slope of a cap is rounded before dS is computed from it;
            else it stays in float32, in the registers of S.
        held_by: how many of a thread's powers are computed before it waits for dP, which they are
            meant to run beside; 0: ptxas decides, and mostly waits first.
        rounds_p_early: whether P is rounded before dP is waited for; else once dS is stored.
        elects: the edges whose stages an elected lane of each warp gives back; those of others its
            first lane does, for which all ask their numbers (``bwd_work.release``).
        loads_statistics: whether a thread loads lse2 and delta of its queries before it waits for S
            and dP.
        early_statistics: where ``loads_statistics`` is False, of how many pairs of its queries a
            thread loads lse2 before S is masked; it loads the others as it needs them. Only where
            P, not rounded, takes the place of S.
        is_lean: whether dK and dV leave room for one more accumulator at a time. S, dP and dQ then
            take turns, P waits for dP in float16, and dK reads dS from shared memory. Consumers own
            keys; dQ is not staged, and dV early; there is no cap and no bias.
        bias_stages: depth of the ring of chunks of a bias, a stage of which holds 16-bit
            elements of all keys of a step or float32 ones of half of them; 0 without a bias, or
            where shared memory has no room. With two, dS takes the place of a bias that is
            multiplied.
        tells_steps: whether consumers read from shared memory what tile they work on and what is
            special about each step, rather than keep or compute it. Only with a general mask,
            where tiles are claimed.
        claims_tiles: whether a warp claims tiles for its CTA, one after the other, and tells the
            other roles (``bwd_claims.py``). Only without a bias, which that warp would load.
    """

    block_q: int
    splits_keys: bool = True
    num_consumers: int = 2
    q_stages: int = 2
    dout_stages: int = 2
    consumer_registers: int = 240
    producer_registers: int = 24
    overlaps_dp: bool = True
    stages_dq: Literal["never", "turns", "always"] = "never"
    issues_dv_early: bool = False
    rounds_slope: bool = False
    held_by: int = 0
    rounds_p_early: bool = False
    loads_statistics: bool = False
    early_statistics: int = 0
    elects: tuple[str, ...] = ()
    is_lean: bool = False
    bias_stages: int = 0
    tells_steps: bool = False
    claims_tiles: bool = False

    @property
    def block_kv(self) -> int:
        """Keys of one tile."""
        return 64 * self.num_consumers if self.splits_keys else 64

    @property
    def bias_chunks(self) -> int:
        """Chunks of a stage of the bias: one for every 64 keys."""
        return self.block_kv // 64

    @property
    def keeps_floats(self) -> bool:
        """Whether dS in float32 takes the place of the bias in the ring, for TMA to store it.

        That of one step does while the ring has room for the bias of the next.
        """
        return self.bias_stages >= 4

    @property
    def splits_dq_rows(self) -> bool:
        """Whether each consumer computes 64 rows of dQ; else each has some columns of all rows."""
        return self.block_q == 64 * self.num_consumers


def hopper_backward(key: KernelKey) -> HopperBackward:
    """The backward configuration for ``key``."""
    # Full: tiles are equal, and claims 1 to 4 % slower.
    claims_tiles = key.mask != "full" and not key.has_bias
    return replace(_of_sizes(key), claims_tiles=claims_tiles)


def _of_sizes(key: KernelKey) -> HopperBackward:
    """The configuration for ``key``, but for ``claims_tiles``.

    Comments give TFLOP/s of the backward alone on an H100, bfloat16, full and causal, at 1 x 16384
    tokens, D = 96 and 192 at 2 x 8192; slower alternatives are in brackets, full mask only.
    """
    if key.head_dim <= 64:
        # 526 and 507 (dV after dQ -4 %; with dQ staged -1 %; with statistics loaded early, which
        # spills, -10 %). With a bias, 128 rows spill 200 bytes, without overlap 56.
        block_q = 64 if key.has_bias and not key.multiplies_bias else 128
        held_by = _held_by(key)
        return HopperBackward(
            block_q,
            overlaps_dp=not key.has_soft_cap,
            stages_dq="turns",
            issues_dv_early=True,
            rounds_slope=key.has_soft_cap,
            held_by=held_by,
            # Behind a mask, a load's latency shows. Backward, 8 x 2048, 32 heads, share of the time
            # without, full, causal, and both with lengths (H200): q elected 0.98, 1.00, 0.99, 0.99;
            # and four pairs early 0.98, 1.00, 0.97, 0.96 (six: 0.98, 1.00, 0.97, 0.96; eight spill;
            # dO elected too: 1.00, 0.99 without lengths).
            early_statistics=4 if held_by > 0 else 0,
            elects=("q",),
            rounds_p_early=held_by > 0 and not key.has_bias,
            bias_stages=_bias_stages(key),
        )
    # dK and dV of 64 keys fill (D + Dv) / 2 registers of each thread of a warpgroup.
    if key.head_dim == 192 and not (key.has_soft_cap or key.has_bias):
        # Of 240 registers 160 are taken: S and dP do not fit at the same time. With a cap or a bias
        # P and its slope would have to wait for dP, with a bias its words too, which do not fit.
        # 507 and 443, where consumers that share 64 keys reach 361 and 341.
        return HopperBackward(
            block_q=64,
            overlaps_dp=False,
            issues_dv_early=True,
            is_lean=True,
            # Backward, 8 x 2048, 16 heads, full and causal: 0.98, 0.99 of the time without (H200).
            elects=("q", "dout"),
        )
    # D = 128: 621 and 577 (dV after dQ -3 %, with dQ not staged too -7 %). D = 96: 520 and 501 (dV
    # early -3 %, dQ not staged -7 %).
    splits_keys = key.head_dim + key.value_dim <= 256
    bias_stages = _bias_stages(key)
    is_tight = key.head_dim == 128 and key.has_bias
    stages_dq = splits_keys and (bias_stages > 0 or not is_tight)
    # With a bias and a slope in float32, D = 128 spills 72 bytes; with dS kept in the ring, 16.
    rounds_slope = key.has_soft_cap or is_tight
    held_by = _held_by(key)
    return HopperBackward(
        block_q=64,
        splits_keys=splits_keys,
        # With a bias, D = 96 spills 64 bytes and D = 128 spills 112 where both products overlap.
        overlaps_dp=not (key.has_soft_cap or (key.has_bias and key.head_dim != 192)),
        stages_dq="always" if stages_dq else "never",
        issues_dv_early=key.head_dim == 128 and stages_dq,
        rounds_slope=rounds_slope,
        held_by=held_by,
        rounds_p_early=held_by > 0 and key.head_dim == 128,
        # With a bias, D = 128 spills 24 bytes if they are loaded early.
        loads_statistics=key.head_dim in (96, 192) or not key.has_bias,
        # Backward, 8 x 2048, 8 heads, share of the time without (H200), D = 256: with lengths 0.99,
        # else 1.00. D = 128: 1.00, of q and dO both 1.03; D = 96: 1.00.
        elects=("q",) if key.head_dim == 256 else (),
        bias_stages=bias_stages,
        # A causal mask by way of lengths, D = 128: 5.60 ms without, 4.98 to 5.17 with (H200, ncu).
        # D = 64, 96 and 192 are up to 8 % slower with it, but for masks given as arrays.
        tells_steps=key.mask == "general" and key.head_dim in (128, 256) and not key.has_bias,
    )


def may_cap(key: KernelKey) -> bool:
    """Whether logits may be bounded by a soft cap."""
    return key.has_soft_cap or (key.has_bias and not key.multiplies_bias)


def _held_by(key: KernelKey) -> int:
    """``HopperBackward.held_by`` for ``key``.

    Of 64 powers at D = 64, else of 32. Forward and backward on an H200, share of the time without,
    2 x 8192 full and 1 x 16384 causal: D = 64 0.96 and 0.96 (16: 0.97, 0.97; 32: 0.98, 0.97; 48
    spills), D = 96 0.97 and 1.00 (16: 0.97, 1.02), D = 128 0.99 and 0.98 (12: 1.01, 0.98; 20
    spills). P rounded late: D = 64 (32) 1.00 and 0.98, D = 128 1.00 and 0.98, better at D = 96.
    """
    if may_cap(key):  # Not measured.
        return 0
    return {64: 24, 96: 24, 128: 16}.get(key.head_dim, 0)


def _bias_stages(key: KernelKey) -> int:
    """``HopperBackward.bias_stages`` for ``key``.

    Shared memory of D = 256 has no room for a ring. D = 128 spills 16 bytes in float16 with one.
    """
    if not key.has_bias or (key.head_dim, key.dtype) == (128, "float16"):
        return 0
    if key.multiplies_bias:
        return 2
    return {128: 2, 256: 0}.get(key.head_dim, 4)
