"""The limits of a GPU: cycles per tile of scores, arithmetic intensity, and the bound that follows.

Everything here is a model, arithmetic on published rates, and knows nothing of compiled kernels;
``jax_fa.analysis`` puts beside it what the machine code of a kernel really has.

A *tile* is 128 x 128 scores of one head: what one SM does between two key blocks for 128 query
rows. Four units of an SM work on it at the same time, each for a number of cycles that follows from
the tile alone:

    mma     tensor core: the products
    exp2    special function unit: one exponential a score, but for those that are polynomials
    issue   the four schedulers: instructions of the softmax
    smem    shared memory: operands of products, and what kernels stage there, 128 bytes a cycle

The largest is the bound, and mma over it the efficiency that a perfectly overlapped kernel reaches.
Between SM and memory, work per byte decides: ``intensity`` times bandwidth is the other roof
(Williams et al., doi:10.1145/1498765.1498785). The rates of SMs are those of the roofline section
of FlashAttention-4 (arXiv:2603.05451), whose table for D = 128 the tests reproduce. As in that
table, smem leaves out what TMA writes; ``fill_cycles`` tells how much that is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from jax_fa.spec.arch import ARCHS, MMA, Operation, Rates, arch_named
from jax_fa.spec.band import key_range
from jax_fa.spec.problem import Problem

TILE = 128
SCORES = TILE * TILE
LANES = 128
"""Lane instructions that the schedulers of an SM issue in a cycle: four warps."""
SMEM_BYTES = 128
"""That shared memory moves in a cycle."""
ELEMENT_BYTES = 2
FLOAT_BYTES = 4

Staged = Literal["p", "ds", "dq", "exchange"]


@dataclass(frozen=True)
class Gpu:
    """Rates of a GPU (``arch.py``).

    Attributes:
        name, sms, clock_hertz, hbm_bytes, caveat: of the ``Product``.
        arch: name of its family.
        rates: of one SM.
    """

    name: str
    sms: int
    clock_hertz: float
    hbm_bytes: float
    caveat: str
    arch: str
    rates: Rates

    @property
    def peak_flops(self) -> float:
        """Tensor core operations per second."""
        return self.sms * self.clock_hertz * self.rates.mma_flops

    @property
    def ridge(self) -> float:
        """Operations per byte of memory at which both roofs meet."""
        return self.peak_flops / self.hbm_bytes


GPUS = tuple(
    Gpu(*product[:-1], arch.name, product.rates or arch.rates)
    for arch in ARCHS
    for product in arch.products
)


def gpu_of(arch: str) -> Gpu:
    """The first GPU of an architecture.

    Raises:
        ValueError: none is known.
    """
    for gpu in GPUS:
        if gpu.arch == arch:
            return gpu
    known = ", ".join(sorted({gpu.arch for gpu in GPUS}))
    raise ValueError(f"no GPU of architecture {arch} is known; there are {known}")


def running(gpu: Gpu, mma: str) -> Gpu:
    """``gpu`` as kernels with the tensor core instruction ``mma`` find it.

    Its rates are those of its forward's. Where that is another, ``mma`` is mma.sync, whose pace
    nobody has published for such GPUs: that of an A100, SM by SM and cycle by cycle, stands for it.
    """
    if mma == MMA[arch_named(gpu.arch).kernels("fwd").folder]:
        return gpu
    assumed = arch_named("sm80").rates
    rates = gpu.rates._replace(mma_flops=assumed.mma_flops, mma_rows=assumed.mma_rows)
    return replace(gpu, rates=rates, caveat=f"{mma} assumed to be as fast as an A100's")


class Cycles(NamedTuple):
    """Cycles of one SM for a tile, by unit."""

    mma: float
    exp2: float
    issue: float
    smem: float
    repeated: float = 0.0
    """Of mma, what is computed a second time."""

    @property
    def bound(self) -> str:
        """The unit that takes longest; of equals, the first."""
        return max(self._fields, key=lambda unit: getattr(self, unit))

    @property
    def efficiency(self) -> float:
        """Share of the tensor core's peak that is left when all units overlap."""
        return (self.mma - self.repeated) / max(self)


_SLOTS = {True: 3.0, False: 4.5}
"""Lane instructions for a score, by ``Rates.has_pairs``: its part in the maximum (half an
instruction with three operands, else one), scaling and adding up (half each, or one each), the
exponential, half a conversion."""
_BACKWARD_SLOTS = {True: 3.5, False: 5.0}
"""The same in a backward: scaling, exponential and conversion of P; difference, product and
conversion of dS."""
_DBIAS_SLOTS = 6.0
"""Likewise: adding the bias, scaling and exponential of P; difference, product and sum of dS."""
_SECOND_SWEEP_SLOTS = {True: 1.5, False: 2.0}
"""More of them where P is made twice: scaling and exponential."""
_POLYNOMIAL_SLOTS = {True: 4.0, False: 7.0}
"""More of them if the exponential is a polynomial: scaling clamps, hence is not paired; floor and
fraction, then four multiply-adds for degree 4, are; the exponent is added one at a time. Without
pairs scaling costs no more than for other scores, the rest twice as much."""
_SOFT_CAP_SLOTS = 5.0
"""More of them for tanh by an exponential and a reciprocal."""
_SOFT_CAP_FUNCTIONS = 2


def exp2_cycles(gpu: Gpu, polynomials: float) -> float:
    """Of the special function unit, if a share ``polynomials`` of a tile is not left to it."""
    return SCORES * (1.0 - polynomials) / gpu.rates.exponentials


def issue_cycles(gpu: Gpu, polynomials: float) -> float:
    """Of the schedulers, for the softmax of a tile."""
    has_pairs = gpu.rates.has_pairs
    slots = _SLOTS[has_pairs] + _POLYNOMIAL_SLOTS[has_pairs] * polynomials
    return SCORES * slots / LANES


def _operand_cycles(columns: float) -> float:
    """Of shared memory, for 16-bit rows of a tile."""
    return TILE * columns * ELEMENT_BYTES / SMEM_BYTES


def forward(
    gpu: Gpu,
    heads: tuple[int, int],
    polynomials: float = 0.0,
    *,
    has_soft_cap: bool = False,
    q_in_registers: bool = False,
    ctas: int = 1,
) -> Cycles:
    """Cycles of the forward for a tile: S = Q K^T, P = exp2(S), O += P V.

    Args:
        gpu: whose rates count.
        heads: (D, Dv).
        polynomials: share of exponentials that multiply-adds evaluate.
        has_soft_cap: a tanh comes before each exponential.
        q_in_registers: queries are no operand in shared memory; P never is.
        ctas: that hold a share of keys and values each and multiply together.
    """
    d, dv = heads
    reads = TILE / gpu.rates.mma_rows / ctas
    queries = 0.0 if q_in_registers else _operand_cycles(d)
    functions, slots = (_SOFT_CAP_FUNCTIONS, _SOFT_CAP_SLOTS) if has_soft_cap else (0, 0.0)
    return Cycles(
        mma=2 * SCORES * (d + dv) / gpu.rates.mma_flops,
        exp2=exp2_cycles(gpu, polynomials) + SCORES * functions / gpu.rates.exponentials,
        issue=issue_cycles(gpu, polynomials) + SCORES * slots / LANES,
        smem=queries + reads * _operand_cycles(d + dv),
    )


def backward_smem_cycles(
    gpu: Gpu,
    heads: tuple[int, int],
    staged: Collection[Staged] = ("ds", "dq"),
    *,
    ctas: int = 1,
    sweeps: int = 1,
) -> dict[str, float]:
    """Cycles of shared memory in the backward for a tile, by what they are for; see ``backward``.

    An operand of a product that is in shared memory is read once for each product; those of two
    sweeps have 64 queries, so keys and values are read twice for a tile.
    """
    d, dv = heads
    reads = TILE / gpu.rates.mma_rows / ctas  # of second operands
    square = _operand_cycles(TILE)  # P or dS
    # After an exchange, dQ of fewer rows is the sum over the keys of all CTAs.
    sums = ctas if "exchange" in staged else 1
    dq = TILE * d * FLOAT_BYTES / SMEM_BYTES / sums
    cycles = {
        "S reads k, q": sweeps * (sweeps + reads) * _operand_cycles(d),
        "dP reads v, dO": (sweeps + reads) * _operand_cycles(dv),
        "dV reads dO": reads * _operand_cycles(dv),
        "dK reads q": reads * _operand_cycles(d),
        "dQ reads k": sweeps * sums * reads * _operand_cycles(d),
    }
    if "ds" in staged:
        # As second operand of dQ transposed, dS is read for every 128 rows of the result.
        ds_reads = d / gpu.rates.mma_rows if sweeps == 2 else 1
        cycles |= {"dS is written": square, "dQ reads dS": ds_reads * square}
    if "p" in staged:
        cycles |= {"P is written": square, "dV reads P": square, "dK reads dS": square}
    if "exchange" in staged:
        sent = square * (1 - 1 / ctas)
        cycles |= {"dS is sent": sent, "dS is received": sent}
    if "dq" in staged:
        cycles |= {"dQ is written": dq, "dQ is read": dq}
    return cycles


def backward(
    gpu: Gpu,
    heads: tuple[int, int],
    staged: Collection[Staged] = ("ds", "dq"),
    *,
    ctas: int = 1,
    sweeps: int = 1,
) -> Cycles:
    """Cycles of the backward for a tile: S, dP = dO V^T, dV += P^T dO, dK += dS^T Q, dQ = dS K.

    Args:
        gpu: whose rates count.
        heads: (D, Dv).
        staged: what passes through shared memory: "p" and "ds" as operands, "dq" in float32 on its
            way to global memory. What does not, stays in registers or tensor memory. "exchange":
            each CTA gets from the others their dS of a share of the queries, and computes dQ of
            these alone; "ds" is staged too.
        ctas: that hold a share of each second operand and multiply together.
        sweeps: 2 where S and P are made once for dV and once for the others.
    """
    d, dv = heads
    repeated = (sweeps - 1) * 2 * SCORES * d / gpu.rates.mma_flops
    has_pairs = gpu.rates.has_pairs
    slots = _BACKWARD_SLOTS[has_pairs] + (sweeps - 1) * _SECOND_SWEEP_SLOTS[has_pairs]
    smem = backward_smem_cycles(gpu, heads, staged, ctas=ctas, sweeps=sweeps)
    return Cycles(
        mma=2 * SCORES * (3 * d + 2 * dv) / gpu.rates.mma_flops + repeated,
        exp2=sweeps * exp2_cycles(gpu, 0.0),
        issue=SCORES * slots / LANES,
        smem=sum(smem.values()),
        repeated=repeated,
    )


def bias_gradient(gpu: Gpu, heads: tuple[int, int]) -> Cycles:
    """Cycles of the gradient of a bias for a tile: S, dP = dO V^T, and the sums of dS.

    ``heads`` are (D, Dv). The bias of the tile is read from shared memory, in float32.
    """
    d, dv = heads
    reads = 1 + TILE / gpu.rates.mma_rows
    return Cycles(
        mma=2 * SCORES * (d + dv) / gpu.rates.mma_flops,
        exp2=exp2_cycles(gpu, 0.0),
        issue=SCORES * _DBIAS_SLOTS / LANES,
        smem=reads * _operand_cycles(d + dv) + SCORES * FLOAT_BYTES / SMEM_BYTES,
    )


def fill_cycles(heads: tuple[int, int], sharing: float) -> float:
    """Of shared memory, while TMA writes what passes by: 128 rows of D and Dv columns.

    ``sharing`` counts the tiles, in all CTAs that share their halves, that use them.
    """
    return _operand_cycles(sum(heads)) / sharing


class Work(NamedTuple):
    """The work of a problem, and the bytes that must pass between memory and chip for it.

    Attributes:
        flops: of the products over visible pairs, a multiply-add counting as two.
        hbm_bytes: if every array crosses once, whatever the L2 cache makes of it.
        cta_bytes: that CTAs fetch and write, if the L2 cache served none of it.
    """

    flops: int
    hbm_bytes: int
    cta_bytes: int

    @property
    def intensity(self) -> float:
        """FLOP per byte of memory: how far right on the roofline a problem is at best."""
        return self.flops / self.hbm_bytes

    @property
    def cta_intensity(self) -> float:
        """FLOP per byte that CTAs move; what the L2 cache must make up is the ratio of the two."""
        return self.flops / self.cta_bytes


def visible_pairs(problem: Problem) -> int:
    """(query, key) pairs of one head of one sequence that are computed."""
    band, q_len, kv_len = problem.semantics.band, problem.q_len, problem.kv_len
    if band.is_full:
        return q_len * kv_len
    window = band.window(band.shift(q_len, kv_len), q_len, kv_len)
    ranges = (key_range(window, row) for row in range(q_len))
    return sum(max(keys.hi - keys.lo, 0) for keys in ranges)


def work(problem: Problem, operation: Operation, block: int, copies: int = 1) -> Work:
    """FLOP and bytes of a problem with one length.

    A forward CTA keeps ``block`` query rows and has the keys that they see pass by; a backward CTA
    keeps ``block`` keys, and queries, dO, their statistics and sums of dQ pass by, all but the last
    in some ``copies``: two in two sweeps, or in a pair, which counts as one CTA with the keys of
    both.
    """
    batch, d, dv = problem.batch, problem.head_dim, problem.value_dim
    pairs = visible_pairs(problem) * batch * problem.num_q_heads
    rows = batch * problem.q_len * problem.num_q_heads
    keys = batch * problem.kv_len * problem.num_kv_heads
    head_bytes = (d + dv) * ELEMENT_BYTES
    if operation == "fwd":
        statistics = rows * FLOAT_BYTES  # lse
        return Work(
            flops=2 * pairs * (d + dv),
            hbm_bytes=(rows + keys) * head_bytes + statistics,
            cta_bytes=rows * head_bytes + statistics + pairs * head_bytes // block,
        )
    if operation == "dbias":
        # A bias that all batches share, in float32; queries and keys pass by tiles of it.
        return Work(
            flops=2 * pairs * (d + dv),
            hbm_bytes=(rows + keys) * head_bytes + 2 * rows * FLOAT_BYTES,
            cta_bytes=2 * pairs * head_bytes // block,
        )
    # q, out, dout, dq by row; lse, delta and lse2 written and read; the float32 sums of dQ too.
    row_bytes = (2 * d + 2 * dv) * ELEMENT_BYTES + (5 + 2 * d) * FLOAT_BYTES
    passing = copies * (head_bytes + 2 * FLOAT_BYTES) + d * FLOAT_BYTES
    return Work(
        flops=2 * pairs * (3 * d + 2 * dv),
        hbm_bytes=rows * row_bytes + 2 * keys * head_bytes,
        cta_bytes=2 * keys * head_bytes + pairs * passing // block,
    )


def attainable_flops(gpu: Gpu, cycles: Cycles, intensity: float) -> float:
    """Operations per second under both roofs: SMs at their bound, and memory."""
    return min(gpu.peak_flops * cycles.efficiency, gpu.hbm_bytes * intensity)
