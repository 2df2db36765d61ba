"""The GPU families, one row each: the one place that says what a GPU is, can do and runs.

A family is a set of GPUs that run the same kernels. Its row says which they are, what their kernels
are compiled for and cover, and what the hardware does. Tile sizes are in ``chosen_*.py`` and
``config_*.py``. Each kind of kernel names the folder with its code, which families may share. If a
kind, or its kernels for some heads, would compile to the same PTX as another family's, and that
family's target serves these GPUs too, they run its kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Operation = Literal["fwd", "bwd", "dbias"]
OPERATIONS: tuple[Operation, ...] = ("fwd", "bwd", "dbias")
"""Forward; backward; the gradient of a bias, which most backwards leave out
(``schema.WRITERS_OF_DBIAS``)."""

Kind = Literal["fwd", "bwd", "bias", "few"]
"""Kernels that a family has together: forward; backward; with a bias, whatever the operation;
forward for few queries."""
KINDS: tuple[Kind, ...] = ("fwd", "bwd", "bias", "few")

MMA = {"sm90": "wgmma", "sm100": "tcgen05.mma", "mma_sync": "mma.sync"}
"""Folder of kernels -> their tensor core instruction, as ``machine_code.py`` calls it."""


class Kernels(NamedTuple):
    """What is compiled of one kind for a family.

    Attributes:
        folder: under ``kernels/``, with the code.
        heads: (D, Dv).
        small: of which there are kernels with small tiles, too (``KernelKey.is_small``).
        multiplied: of which there are kernels that multiply a bias (``KernelKey``), too.
    """

    folder: str
    heads: tuple[tuple[int, int], ...]
    small: tuple[tuple[int, int], ...] = ()
    multiplied: tuple[tuple[int, int], ...] = ()


class SomeKernels(NamedTuple):
    """What is compiled of one kind for a family that runs another's kernels for other heads.

    Attributes:
        own: its own kernels.
        others: the family whose kernels its GPUs run for all other heads.
    """

    own: Kernels
    others: str


class Rates(NamedTuple):
    """What one SM does in a cycle.

    Attributes:
        mma_flops: dense 16-bit tensor core operations, a multiply-add counting as two.
        mma_rows: query (or key) rows that share one read of the other operand.
        exponentials: of the special function units.
        has_pairs: one lane instruction does two float32 operations.
    """

    mma_flops: int
    mma_rows: int
    exponentials: int
    has_pairs: bool


class Product(NamedTuple):
    """A GPU that can be bought.

    Attributes:
        name: as it is sold.
        sms: streaming multiprocessors.
        clock_hertz: at which SMs reach the published peak.
        hbm_bytes: of memory, per second.
        caveat: what of its rates is not published.
        rates: of one SM, where they are not those of the family.
    """

    name: str
    sms: int
    clock_hertz: float
    hbm_bytes: float
    caveat: str = ""
    rates: Rates | None = None


@dataclass(frozen=True)
class Arch:
    """A family.

    Attributes:
        name: in names of variants, in JAX_FA_GPU and in messages.
        capabilities: compute capabilities of its GPUs, such as "9.0".
        target: what the compiler is asked for; code for it runs on all of ``capabilities``.
        fwd: its kernels of this kind; or the name of the family whose kernels of it these GPUs run;
            or both, by heads.
        bwd: the same.
        bias: the same.
        few: the same.
        rates: of one SM, for the instruction of its forward.
        products: its GPUs; the first stands for the family.
    """

    name: str
    capabilities: tuple[str, ...]
    target: str
    fwd: Kernels | SomeKernels | str
    bwd: Kernels | SomeKernels | str
    bias: Kernels | str
    few: Kernels | str
    rates: Rates
    products: tuple[Product, ...]

    def own(self, kind: Kind) -> Kernels | None:
        """What is compiled of a kind for this family alone."""
        held = getattr(self, kind)
        if isinstance(held, SomeKernels):
            return held.own
        return held if isinstance(held, Kernels) else None

    def lender(self, kind: Kind) -> Arch:
        """The family whose kernels of a kind these GPUs run for heads that ``own`` lacks.

        This one, if there are none.
        """
        held = getattr(self, kind)
        if isinstance(held, SomeKernels):
            return arch_named(held.others)
        return arch_named(held) if isinstance(held, str) else self

    def owner(self, kind: Kind, heads: tuple[int, int]) -> Arch:
        """The family whose kernels of a kind for ``heads`` (D, Dv) these GPUs run."""
        own = self.own(kind)
        return self if own is not None and heads in own.heads else self.lender(kind)

    def kernels(self, kind: Kind) -> Kernels:
        """What these GPUs run of a kind, whosever it is."""
        own, lender = self.own(kind), self.lender(kind)
        if lender is self:
            assert own is not None
            return own
        return lender.kernels(kind)


# SMs of half the A100's products with float32 sums, and of a quarter.
_MMA_SYNC_HALF = Rates(mma_flops=1024, mma_rows=32, exponentials=16, has_pairs=False)
_MMA_SYNC_QUARTER = Rates(mma_flops=512, mma_rows=32, exponentials=16, has_pairs=False)

_HEADS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
_CLOCK = "clock computed from the published peak"
_THOR = "exponentials assumed; no paired float32, since ptxas takes pairs apart for it"

ARCHS: tuple[Arch, ...] = (
    Arch(
        name="sm90",
        capabilities=("9.0",),
        target="sm_90a",
        fwd=Kernels("sm90", _HEADS, small=((64, 64), (96, 96))),
        bwd=Kernels("sm90", _HEADS),
        bias=Kernels("sm90", _HEADS, multiplied=((64, 64),)),
        few=Kernels("mma_sync", _HEADS),
        rates=Rates(mma_flops=4096, mma_rows=64, exponentials=16, has_pairs=False),
        products=(
            Product("H100", 132, 1.83e9, 3.35e12, _CLOCK),
            Product("H200", 132, 1.83e9, 4.8e12, _CLOCK),
        ),
    ),
    Arch(
        name="sm100",
        capabilities=("10.0",),
        target="sm_100f",
        fwd=Kernels("sm100", _HEADS),
        bwd=Kernels("sm100", _HEADS),
        bias=Kernels("mma_sync", _HEADS),
        few=Kernels("mma_sync", _HEADS),
        rates=Rates(mma_flops=8192, mma_rows=128, exponentials=16, has_pairs=True),
        products=(
            Product("B200", 148, 1.856e9, 7.67e12, _CLOCK),
            Product("GB200", 148, 2.062e9, 8e12, _CLOCK),
        ),
    ),
    Arch(
        name="sm103",
        capabilities=("10.3",),
        target="sm_103f",
        # Its exponentials are faster, so its forward has no polynomials. Its backward would be the
        # PTX of sm100, which as family-specific code ("f") runs on 10.3 too. For sm_103f ptxas
        # schedules the main kernel differently (DSL 4.8.1); whether that would be faster is not
        # known, since no GPU was at hand.
        fwd=Kernels("sm100", _HEADS),
        bwd="sm100",
        bias="sm100",
        few="sm100",
        rates=Rates(mma_flops=8192, mma_rows=128, exponentials=32, has_pairs=True),
        products=(Product("B300", 148, 2.062e9, 8e12, f"{_CLOCK}; SMs unconfirmed"),),
    ),
    Arch(
        name="sm110",
        capabilities=("11.0",),
        target="sm_110f",
        fwd=Kernels("sm100", _HEADS),
        bwd=Kernels("sm100", _HEADS),
        bias=Kernels("mma_sync", _HEADS),
        few=Kernels("mma_sync", _HEADS),
        rates=Rates(mma_flops=8192, mma_rows=128, exponentials=16, has_pairs=False),
        products=(Product("Thor", 20, 1.575e9, 273e9, _THOR),),
    ),
    Arch(
        name="sm80",
        capabilities=("8.0", "8.7"),
        target="sm_80",
        fwd=Kernels("mma_sync", _HEADS),
        bwd=Kernels("mma_sync", _HEADS),
        bias=Kernels("mma_sync", _HEADS),
        few=Kernels("mma_sync", _HEADS),
        rates=Rates(mma_flops=2048, mma_rows=32, exponentials=16, has_pairs=False),
        products=(Product("A100", 108, 1.41e9, 2.039e12),),
    ),
    Arch(
        name="sm86",
        capabilities=("8.6", "8.9"),
        target="sm_86",
        # Their SMs have 100 KB of shared memory, not 164: D = 128 and 256 need other tiles.
        fwd=SomeKernels(Kernels("mma_sync", ((128, 128), (256, 256))), others="sm80"),
        bwd=SomeKernels(Kernels("mma_sync", ((128, 128), (256, 256))), others="sm80"),
        bias="sm80",
        few="sm80",
        rates=_MMA_SYNC_HALF,
        products=(
            Product("A10", 72, 1.695e9, 600e9),
            Product("L4", 58, 2.04e9, 300e9, _CLOCK),
            Product("L40S", 142, 2.49e9, 864e9, _CLOCK),
            Product("RTX 3090", 82, 1.691e9, 936e9, _CLOCK, _MMA_SYNC_QUARTER),
            Product("RTX 4090", 128, 2.52e9, 1.008e12, rates=_MMA_SYNC_QUARTER),
        ),
    ),
    Arch(
        name="sm120",
        capabilities=("12.0", "12.1"),
        target="sm_120",
        fwd=Kernels("mma_sync", _HEADS),
        bwd=Kernels("mma_sync", _HEADS),
        bias=Kernels("mma_sync", _HEADS),
        few=Kernels("mma_sync", _HEADS),
        rates=_MMA_SYNC_QUARTER,
        products=(Product("RTX 5090", 170, 2.407e9, 1.792e12),),
    ),
)
"""Thor: 20 SMs, and 2070 TFLOP/s of sparse 4-bit products; an eighth of that is dense 16-bit, which
at 8192 operations a cycle gives the clock. The others: NVIDIA's data sheets and, for GeForce, its
white papers; bfloat16 with float32 sums, dense, which on an L4 is half of the sparse figure."""


def arch_named(name: str) -> Arch:
    """The family of a name that is known to be one."""
    return next(arch for arch in ARCHS if arch.name == name)


def arch_of(capability: str) -> Arch | None:
    """The family of GPUs of a compute capability such as "9.0"; None if no kernels are for them."""
    return next((arch for arch in ARCHS if capability in arch.capabilities), None)


def arch_of_target(target: str) -> Arch:
    """The family that kernels are compiled for by a target such as "sm_90a".

    Raises:
        NotImplementedError: it is that of none.
    """
    for arch in ARCHS:
        if arch.target == target:
            return arch
    known = ", ".join(arch.target for arch in ARCHS)
    raise NotImplementedError(f"no kernels for {target}; they are written for {known}")


def known_capabilities() -> str:
    """The compute capabilities that kernels exist for, for a sentence."""
    return ", ".join(capability for arch in ARCHS for capability in arch.capabilities)


def capability_number(capability: str) -> int:
    """What C++ calls a compute capability: ten times the major, plus the minor."""
    major, minor = capability.split(".")
    return 10 * int(major) + int(minor)
