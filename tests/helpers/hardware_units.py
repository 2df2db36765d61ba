"""Small kernels around one instruction each, with data: what a GPU and the emulator are given.

``UNITS`` maps names to ``Unit``; ``tests/gpu/record_hardware.py`` keeps what a Hopper GPU makes of
them in ``recorded/units.npz``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

from helpers.ptx_units import Unit, kernel
from jax_fa.emulator.layouts import swizzle

ELEMENTS = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "tf32": np.dtype(np.float32),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
THREADS = {"function": 256, "wgmma": 128, "mma": 32}
COLUMNS = 16  # N of wgmma


def registers(first: int, count: int) -> str:
    """{%rFIRST, ...}."""
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def words(operation: str, name: str, first: int, count: int, block: int) -> str:
    """Moves ``count`` words of every thread between buffer and registers; lanes are innermost."""
    lines = [
        f"mad.lo.s32 %r60, %cta, {count * block}, %thread;",
        f"mad.wide.u32 %d0, %r60, 4, %{name};",
    ]
    for i in range(count):
        place, register = f"[%d0+{4 * block * i}]", f"%r{first + i}"
        operands = f"{register}, {place}" if operation == "ld" else f"{place}, {register}"
        lines.append(f"{operation}.global.b32 {operands};")
    return "\n".join(lines)


# --------------------------------------------------------------------------------------- functions


def arguments() -> np.ndarray:
    """Bits of floats: any, every size near 1 of both signs, and special ones."""
    random = np.random.default_rng(11)
    anything = random.integers(0, 1 << 32, 4096, dtype=np.uint64).astype(np.uint32)
    sizes = 2.0 ** np.repeat(np.arange(-32, 9), 48)
    floats = np.float32(sizes * random.uniform(1, 2, len(sizes)))
    near = np.float32(1) + np.arange(-100, 100, dtype=np.float32) * np.float32(2.0**-23)
    special = np.float32([0, 1, 2, 4, 0.5, 0.25, 126, 127, 128, 149, 150, 2.0**-126, 2.0**-127])
    more = np.float32([np.inf, np.nan, 2.0**126, 2.0**127, 3.0e38, 1.0e-45])
    known = np.concatenate([floats, near, special, more])
    bits = np.concatenate([anything, known.view(np.uint32), (-known).view(np.uint32)])
    return bits[::4][: 8 * THREADS["function"]]


def function(body: str) -> Unit:
    """Maps %r0 to %r1."""
    block = THREADS["function"]
    body = f"{words('ld', 'x', 0, 1, block)}\n{body}\n{words('st', 'y', 1, 1, block)}"
    x = arguments()
    return Unit(kernel("x y", body), (x, np.zeros_like(x)), len(x) // block, block)


FUNCTIONS = {name: f"{name} %r1, %r0;" for name in ("ex2.approx.ftz.f32", "lg2.approx.ftz.f32")}
FUNCTIONS["rcp.approx.ftz.f32"] = "rcp.approx.ftz.f32 %r1, %r0;"
_ONLY_FINITE = (
    "abs.f32 %r4, %r0; setp.lt.f32 %p0, %r4, 0f7F800000; selp.b32 %r0, %r0, 0f3F800000, %p0;"
)
FUNCTIONS["product less factor"] = f"{_ONLY_FINITE} mul.f32 %r2, %r0, %r0; sub.f32 %r1, %r2, %r0;"
FUNCTIONS["factor less product"] = f"{_ONLY_FINITE} mul.f32 %r2, %r0, %r0; sub.f32 %r1, %r0, %r2;"
FUNCTIONS["product used twice"] = (
    f"{_ONLY_FINITE} mul.f32 %r2, %r0, %r0; add.f32 %r3, %r2, %r0; xor.b32 %r1, %r2, %r3;"
)
FUNCTIONS["sum of two products"] = (
    f"{_ONLY_FINITE} mul.f32 %r2, %r0, %r0; mul.f32 %r3, %r0, 0f40490FDB; add.f32 %r1, %r2, %r3;"
)


# ------------------------------------------------------------------------------------ matrix units

# Type modifiers, and what follows the predicate.
WGMMA = {
    "bf16": ("f32.bf16.bf16", 16, "1, 1, 0, 0"),
    "f16": ("f32.f16.f16", 16, "1, 1, 0, 0"),
    "f16 to f16": ("f16.f16.f16", 16, "1, 1, 0, 0"),
    "tf32": ("f32.tf32.tf32", 8, "1, 1"),
    "e4m3": ("f32.e4m3.e4m3", 32, "1, 1"),
    "e5m2": ("f32.e5m2.e5m2", 32, "1, 1"),
}
# Shape, type modifiers, registers of A and B.
MMA = {
    "bf16": ("m16n8k16", "f32.bf16.bf16.f32", 4, 2),
    "f16": ("m16n8k16", "f32.f16.f16.f32", 4, 2),
    "tf32": ("m16n8k8", "f32.tf32.tf32.f32", 4, 2),
}
DATA: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda random, shape: random.standard_normal(shape),
    "wide": lambda random, shape: (
        random.standard_normal(shape) * 2.0 ** random.integers(-12, 13, shape)
    ),
    "subnormal": lambda random, shape: (
        random.standard_normal(shape) * 2.0 ** random.integers(-18, -10, shape)
    ),
    "tiny": lambda random, shape: random.standard_normal(shape) * 2.0**-70,
    "special": lambda random, shape: random.choice(
        [0.0, 1.0, -1.5, np.inf, -np.inf, np.nan], shape, p=[0.3, 0.3, 0.393, 0.003, 0.003, 0.001]
    ),
}


def draw(random: np.random.Generator, kind: str, type_: str, shape: tuple[int, ...]) -> np.ndarray:
    """Elements of a type, as uint32 words along the last dimension."""
    with np.errstate(all="ignore"):
        values = DATA[kind](random, shape).astype(ELEMENTS[type_])
    return values.view(np.uint32)


def wgmma(name: str, kind: str, steps: int) -> Unit:
    """D = C + A B of 64 x 16, over some of the four K steps that rows of 128 bytes hold.

    Operands are K-major with the 128-byte swizzle, which the host applies.
    """
    modifiers, depth, tail = WGMMA[name]
    type_, is_half = name.split()[0], name.endswith("to f16")
    count = COLUMNS // (4 if is_half else 2)
    block, sizes = THREADS["wgmma"], (64 * 128, COLUMNS * 128)
    lines = ["mov.b32 %r40, smem;", "setp.eq.s32 %p0, %thread, %thread;"]
    for buffer, offset, size in (("a", 0, sizes[0]), ("b", sizes[0], sizes[1])):
        lines += [
            f"mad.lo.s32 %r60, %cta, {size // 4}, %thread;",
            f"mad.wide.u32 %d0, %r60, 4, %{buffer};",
            "mad.lo.s32 %r41, %thread, 4, %r40;",
        ]
        for at in range(0, size, 4 * block):
            lines.append(
                f"ld.global.b32 %r42, [%d0+{at}]; st.shared.b32 [%r41+{offset + at}], %r42;"
            )
    lines += ["fence.proxy.async.shared::cta; bar.sync 0;", words("ld", "c", 0, count, block)]
    lines.append("wgmma.fence.sync.aligned;")
    for step in range(steps):
        for register, offset in (("%d1", 0), ("%d2", sizes[0])):
            lines += [
                f"add.s32 %r43, %r40, {offset + 32 * step}; and.b32 %r43, %r43, 0x3FFFF;",
                "shr.u32 %r43, %r43, 4; or.b32 %r43, %r43, 0x10000;",
                f"mov.b64 {register}, {{%r43, 0x40000040}};",
            ]
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{COLUMNS}k{depth}.{modifiers} "
            f"{registers(0, count)}, %d1, %d2, %p0, {tail};"
        )
    lines.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;")
    lines.append(words("st", "d", 0, count, block))
    random = np.random.default_rng([steps, *f"{name} {kind}".encode()])
    elements = 128 // ELEMENTS[type_].itemsize
    a, b = (_swizzled(draw(random, kind, type_, (rows, elements))) for rows in (64, COLUMNS))
    shape = (count, block, 2) if is_half else (count, block)
    c = draw(random, kind, "f16" if is_half else "tf32", shape)
    return Unit(
        kernel("a b c d", "\n".join(lines), sum(sizes)), (a, b, c, np.zeros_like(c)), 1, block
    )


def _swizzled(rows: np.ndarray) -> np.ndarray:
    """Rows of 128 bytes, as words, at their places in shared memory."""
    image = np.zeros(rows.size, np.uint32)
    image[swizzle(4 * np.arange(rows.size), "128B") // 4] = rows.reshape(-1)
    return image


def mma(name: str, kind: str, grid: int = 4) -> Unit:
    """mma.sync, ``grid`` of them; for any GPU that has it."""
    shape, modifiers, num_a, num_b = MMA[name]
    block = THREADS["mma"]
    body = "\n".join(
        [
            words("ld", "a", 0, num_a, block),
            words("ld", "b", 8, num_b, block),
            words("ld", "c", 16, 4, block),
            f"mma.sync.aligned.{shape}.row.col.{modifiers} {registers(24, 4)}, "
            f"{registers(0, num_a)}, {registers(8, num_b)}, {registers(16, 4)};",
            words("st", "d", 24, 4, block),
        ]
    )
    random = np.random.default_rng([*f"{name} {kind}".encode()])
    per_word = 4 // ELEMENTS[name].itemsize
    a, b = (draw(random, kind, name, (grid, n, block, per_word)) for n in (num_a, num_b))
    c = draw(random, kind, "tf32", (grid, 4, block))
    ptx = kernel("a b c d", body, target="sm_80")
    return Unit(ptx, (a, b, c, np.zeros_like(c)), grid, block)


def _units() -> Iterator[tuple[str, Unit]]:
    for name, body in FUNCTIONS.items():
        yield name, function(body)
    for name in WGMMA:
        for kind in DATA:
            if kind not in ("tiny", "wide") or name[0] != "e" and (kind, name[0]) != ("tiny", "f"):
                yield f"wgmma {name} {kind}", wgmma(name, kind, 1)
        yield f"wgmma {name} four steps", wgmma(name, "normal", 4)
    for name in MMA:
        for kind in ("normal", "wide"):
            yield f"mma.sync {name} {kind}", mma(name, kind)


UNITS = dict(_units())
