"""Arithmetic against numpy and against the PTX ISA's definitions, with edge values in the lanes."""

import numpy as np
import pytest
from helpers.ptx_kernels import apply

from jax_fa.emulator.numerics import NARROW

EDGES = np.array(
    [
        0,
        1,
        2,
        3,
        5,
        31,
        32,
        33,
        0x7F,
        0x80,
        0xFF,
        0x100,
        0x7FFF,
        0x8000,
        0xFFFF,
        0x10000,
        0x7FFFFFFF,
        0x80000000,
        0x80000001,
        0xFFFFFFFE,
        0xFFFFFFFF,
    ],
    np.uint32,
)
RANDOM = np.random.default_rng(0)
A = np.resize(EDGES, 32)
B = np.roll(np.resize(EDGES[::-1], 32), 5)
C = RANDOM.integers(0, 2**32, 32, dtype=np.uint32)
F = np.array(
    [
        0.0,
        -0.0,
        1,
        -1,
        0.5,
        1.5,
        2.5,
        -2.5,
        3e38,
        -3e38,
        1e-38,
        1e-40,
        -1e-40,
        np.inf,
        -np.inf,
        np.nan,
    ]
    * 2,
    np.float32,
)
G = RANDOM.standard_normal(32).astype(np.float32)
H = RANDOM.standard_normal(32).astype(np.float32)


def same(got, expected):
    np.testing.assert_array_equal(got, np.asarray(expected).astype(got.dtype))


@pytest.mark.parametrize(
    "name, function",
    [
        ("add.s32", lambda a, b: a + b),
        ("sub.s32", lambda a, b: a - b),
        ("mul.lo.s32", lambda a, b: a * b),
        ("and.b32", lambda a, b: a & b),
        ("or.b32", lambda a, b: a | b),
        ("xor.b32", lambda a, b: a ^ b),
        ("min.u32", np.minimum),
        ("max.u32", np.maximum),
        ("mul.hi.u32", lambda a, b: (a.astype(np.uint64) * b) >> np.uint64(32)),
        ("div.u32", lambda a, b: a // np.maximum(b, 1)),
        ("rem.u32", lambda a, b: a % np.maximum(b, 1)),
    ],
)
def test_unsigned_arithmetic(name, function):
    divisor = np.maximum(B, 1) if name[:3] in ("div", "rem") else B
    same(apply(f"{name} %y, %x0, %x1;", A, divisor, out=np.uint32), function(A, divisor))


@pytest.mark.parametrize(
    "name, function",
    [
        ("min.s32", np.minimum),
        ("max.s32", np.maximum),
        ("mul.hi.s32", lambda a, b: (a.astype(np.int64) * b) >> 32),
        ("div.s32", lambda a, b: np.trunc(a.astype(np.float64) / b)),
        ("rem.s32", lambda a, b: np.fmod(a.astype(np.int64), b)),
    ],
)
def test_signed_arithmetic(name, function):
    divisor = np.where(B == 0, 7, B).astype(np.uint32).view(np.int32)
    divisor = np.where(divisor == -1, 3, divisor).astype(np.int32)
    got = apply(f"{name} %y, %x0, %x1;", A, divisor.view(np.uint32), out=np.int32)
    same(got, function(A.view(np.int32), divisor))


def test_wide_multiplication_keeps_the_sign():
    got = apply("mul.wide.s32 %y, %x0, %x1;", A, B, out=np.int64)
    same(got, A.view(np.int32).astype(np.int64) * B.view(np.int32))
    got = apply("mad.wide.u32 %y, %x0, %x1, %x2;", A, B, C.astype(np.uint64), out=np.uint64)
    same(got, A.astype(np.uint64) * B + C)


def test_the_upper_half_of_a_product_of_16_bits():
    a, b = A.astype(np.uint16), B.astype(np.uint16)
    got = apply("mul.hi.u16 %y, %x0, %x1;", a, b, out=np.uint16)
    same(got, (a.astype(np.uint32) * b) >> np.uint32(16))
    got = apply("mul.hi.s16 %y, %x0, %x1;", a, b, out=np.int16)
    same(got, (a.view(np.int16).astype(np.int32) * b.view(np.int16)) >> 16)


@pytest.mark.parametrize("amount", [0, 1, 31, 32, 33, 255])
def test_shifts_clamp_their_amount(amount):
    """PTX ISA: amounts above the register width are clamped to it."""
    value = [int(a) for a in A]
    signed = [int(a) for a in A.view(np.int32)]
    same(
        apply(f"shl.b32 %y, %x0, {amount};", A, out=np.uint32),
        [(v << amount) & 0xFFFFFFFF for v in value],
    )
    same(apply(f"shr.u32 %y, %x0, {amount};", A, out=np.uint32), [v >> amount for v in value])
    same(apply(f"shr.s32 %y, %x0, {amount};", A, out=np.int32), [v >> amount for v in signed])


def test_funnel_shift_prmt_and_lop3():
    both = [(int(b) << 32) | int(a) for a, b in zip(A, B, strict=True)]
    same(
        apply("shf.r.wrap.b32 %y, %x0, %x1, 37;", A, B, out=np.uint32),
        [(v >> 5) & 0xFFFFFFFF for v in both],
    )
    same(
        apply("shf.l.clamp.b32 %y, %x0, %x1, 12;", A, B, out=np.uint32),
        [(v << 12 >> 32) & 0xFFFFFFFF for v in both],
    )
    byte = [v.to_bytes(8, "little") for v in both]
    same(
        apply("prmt.b32 %y, %x0, %x1, 0x5410;", A, B, out=np.uint32),
        [int.from_bytes(bytes([b[0], b[1], b[4], b[5]]), "little") for b in byte],
    )
    same(
        apply("prmt.b32 %y, %x0, %x1, 0x888A;", A, B, out=np.uint32),
        [
            int.from_bytes(bytes([255 * (b[2] >> 7)] + [255 * (b[0] >> 7)] * 3), "little")
            for b in byte
        ],
    )
    same(
        apply("lop3.b32 %y, %x0, %x1, %x2, 0xE8;", A, B, C, out=np.uint32),
        (A & B) | (B & C) | (A & C),
    )


def test_bit_fields():
    same(apply("bfe.u32 %y, %x0, 4, 7;", C, out=np.uint32), C >> 4 & 127)
    signed = ((C >> 4 & 127).astype(np.int64) ^ 64) - 64
    same(apply("bfe.s32 %y, %x0, 4, 7;", C, out=np.int32), signed)
    same(
        apply("bfi.b32 %y, %x0, %x1, 4, 7;", A, C, out=np.uint32),
        (C & ~np.uint32(127 << 4)) | (A & 127) << 4,
    )
    same(apply("popc.b32 %y, %x0;", C, out=np.uint32), [bin(int(c)).count("1") for c in C])
    same(apply("clz.b32 %y, %x0;", A, out=np.uint32), [32 - int(a).bit_length() for a in A])
    same(
        apply("bfind.u32 %y, %x0;", A, out=np.uint32),
        [(int(a).bit_length() - 1) & 0xFFFFFFFF for a in A],
    )
    same(apply("brev.b32 %y, %x0;", C, out=np.uint32), [int(f"{int(c):032b}"[::-1], 2) for c in C])


@pytest.mark.parametrize(
    "name, function",
    [
        ("eq", np.equal),
        ("ne", lambda a, b: np.not_equal(a, b) & ~np.isnan(a) & ~np.isnan(b)),
        ("lt", np.less),
        ("ge", np.greater_equal),
        ("neu", np.not_equal),
        ("ltu", lambda a, b: ~np.greater_equal(a, b)),
        ("num", lambda a, b: ~np.isnan(a) & ~np.isnan(b)),
    ],
)
def test_float_comparison_and_nan(name, function):
    other = np.roll(F, 1)
    got = apply(f"setp.{name}.f32 %p1, %x0, %x1; selp.b32 %y, 1, 0, %p1;", F, other, out=np.uint32)
    same(got, function(F, other))


def test_signed_and_unsigned_comparison_differ():
    code = "setp.lt.{} %p1, %x0, %x1; selp.b32 %y, 1, 0, %p1;"
    same(apply(code.format("u32"), A, B, out=np.uint32), A < B)
    same(apply(code.format("s32"), A, B, out=np.uint32), A.view(np.int32) < B.view(np.int32))


@pytest.mark.parametrize(
    "name, function",
    [
        ("add.f32", lambda a, b: a + b),
        ("sub.rn.f32", lambda a, b: a - b),
        ("mul.f32", lambda a, b: a * b),
        ("div.rn.f32", lambda a, b: a / b),
        ("max.f32", np.fmax),
        ("min.f32", np.fmin),
        ("max.NaN.f32", np.maximum),
    ],
)
def test_float_arithmetic(name, function):
    with np.errstate(all="ignore"):
        expected = function(F, np.roll(G, 3))
    same(apply(f"{name} %y, %x0, %x1;", F, np.roll(G, 3), out=np.float32), expected)


def test_three_input_maximum():
    same(apply("max.f32 %y, %x0, %x1, %x2;", F, G, H, out=np.float32), np.fmax(np.fmax(F, G), H))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_maximum_of_pairs_keeps_nan(kind):
    # Of a pair, in one half alone; numbers that both types hold exactly.
    a, b = np.full(64, -3, np.float32), np.full(64, 2, np.float32)
    a[::3], b[::5] = np.nan, np.nan
    store = NARROW[kind].store
    words = [store(x).view(np.uint32) for x in (a, b)]
    plain, kept = (
        apply(f"{name}.{kind}x2 %y, %x0, %x1;", *words, out=np.uint32)
        for name in ("max", "max.NaN")
    )
    same(plain, store(np.fmax(a, b)).view(np.uint32))
    same(kept, store(np.maximum(a, b)).view(np.uint32))


def test_fma_rounds_once():
    a = np.full(32, 1 + 2**-12, np.float32)
    c = np.full(32, -1, np.float32)
    exact = np.float32((1 + 2**-12) ** 2 - 1)
    assert np.float32(a[0] * a[0]) + c[0] != exact
    same(apply("fma.rn.f32 %y, %x0, %x0, %x1;", a, c, out=np.float32), np.full(32, exact))


def test_flush_to_zero():
    got = apply("mul.ftz.f32 %y, %x0, %x1;", F, np.full(32, 0.5, np.float32), out=np.float32)
    tiny = np.abs(F) < np.finfo(np.float32).tiny
    assert (got[tiny] == 0).all()
    got = apply(
        "ex2.approx.ftz.f32 %y, %x0;",
        np.linspace(-140, -110, 32).astype(np.float32),
        out=np.float32,
    )
    assert (got[:14] == 0).all() and (got[16:] > 0).all()


def test_approximate_functions():
    x = np.abs(G) + np.float32(0.1)
    for name, function in (
        ("ex2", np.exp2),
        ("lg2", np.log2),
        ("rcp", np.reciprocal),
        ("rsqrt", lambda v: 1 / np.sqrt(v)),
        ("sqrt", np.sqrt),
    ):
        got = apply(f"{name}.approx.f32 %y, %x0;", x, out=np.float32)
        np.testing.assert_allclose(got, function(x.astype(np.float64)), rtol=3e-7)
    np.testing.assert_allclose(
        apply("tanh.approx.f32 %y, %x0;", G, out=np.float32), np.tanh(G), rtol=1e-6
    )


def test_packed_pairs_are_two_floats():
    a, b, c = (RANDOM.standard_normal(64).astype(np.float32) for _ in range(3))
    got = apply(
        "fma.rn.f32x2 %y, %x0, %x1, %x2;",
        a.view(np.uint64),
        b.view(np.uint64),
        c.view(np.uint64),
        out=np.uint64,
    ).view(np.float32)
    same(got, (a.astype(np.float64) * b + c).astype(np.float32))
    got = apply(
        "mov.b64 {%r1, %r2}, %x0; add.f32 %r1, %r1, %r2; mov.b64 %d1, {%r2, %r1};"
        "add.rn.f32x2 %y, %d1, %x1;",
        a.view(np.uint64),
        b.view(np.uint64),
        out=np.uint64,
    ).view(np.float32)
    same(got, np.stack([a[1::2] + b[0::2], a[0::2] + a[1::2] + b[1::2]], 1).reshape(-1))


def test_rounding_down_brackets_the_sum():
    big = np.float32(2.0**23 + 64)
    got = apply("add.rm.f32 %y, %x0, %x1;", G, np.full(32, big), out=np.float32)
    same(got, np.floor(G.astype(np.float64)) + big)


@pytest.mark.parametrize("mode", ["rm", "rp", "rz"])
def test_directed_rounding_brackets_the_exact_result(mode):
    """The neighbour on the other side is never nearer to the exact value."""
    for name, function in (("add", np.add), ("mul", np.multiply)):
        exact = function(G.astype(np.float64), H.astype(np.float64))
        got = apply(f"{name}.{mode}.f32 %y, %x0, %x1;", G, H, out=np.float32)
        far = {"rm": np.inf, "rp": -np.inf, "rz": np.inf * np.sign(got)}[mode]
        assert (np.abs(got - exact) < np.abs(np.nextafter(got, np.float32(far)) - got)).all()
        if mode == "rm":
            assert (got <= exact).all()
        elif mode == "rp":
            assert (got >= exact).all()
        else:
            assert (np.abs(got) <= np.abs(exact)).all()


def test_clamping_and_saturating_integers():
    a, b = A.view(np.int32), B.view(np.int32)
    same(apply("min.relu.s32 %y, %x0, %x1;", A, B, out=np.int32), np.maximum(np.minimum(a, b), 0))
    total = np.clip(a.astype(np.int64) + b, -(2**31), 2**31 - 1)
    same(apply("add.sat.s32 %y, %x0, %x1;", A, B, out=np.int32), total)


def test_float_classes():
    tests = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "notanumber": np.isnan,
        "subnormal": lambda v: (v != 0) & (np.abs(v) < np.finfo(np.float32).tiny),
    }
    for name, function in tests.items():
        got = apply(f"testp.{name}.f32 %p1, %x0; selp.b32 %y, 1, 0, %p1;", F, out=np.uint32)
        same(got, function(F))


def test_packed_half_exponentials():
    halves = np.linspace(-8, 4, 64).astype(np.float16)
    got = apply("ex2.approx.f16x2 %y, %x0;", halves.view(np.uint32), out=np.uint32)
    same(got.view(np.float16), np.exp2(halves.astype(np.float32)).astype(np.float16))


def test_conversions_between_integers_and_floats():
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 3e9, -3e9, np.nan] * 4, np.float32)
    same(
        apply("cvt.rni.s32.f32 %y, %x0;", x, out=np.int32),
        [0, 2, 2, 0, -2, 2**31 - 1, -(2**31), 0] * 4,
    )
    same(apply("cvt.rzi.u32.f32 %y, %x0;", x, out=np.uint32), [0, 1, 2, 0, 0, 3000000000, 0, 0] * 4)
    same(apply("cvt.rn.f32.s32 %y, %x0;", A, out=np.float32), A.view(np.int32).astype(np.float32))
    same(apply("cvt.s64.s32 %y, %x0;", A, out=np.int64), A.view(np.int32))
    same(apply("cvt.u64.u32 %y, %x0;", A, out=np.uint64), A)
    same(apply("cvt.s32.s8 %y, %x0;", A, out=np.int32), A.astype(np.uint8).view(np.int8))


def test_bfloat16_rounds_to_nearest_even():
    bits = np.array(
        [
            0x3F800000,
            0x3F808000,
            0x3F808001,
            0x3F818000,
            0x7F7FFFFF,
            0x7F800000,
            0xFF800000,
            0x00000001,
        ]
        * 4,
        np.uint32,
    )
    expected = np.array([0x3F80, 0x3F80, 0x3F81, 0x3F82, 0x7F80, 0x7F80, 0xFF80, 0] * 4, np.uint16)
    same(apply("cvt.rn.bf16.f32 %y, %x0;", bits.view(np.float32), out=np.uint16), expected)
    got = apply(
        "cvt.rn.bf16x2.f32 %y, %x0, %x1;",
        bits.view(np.float32),
        np.zeros(32, np.float32),
        out=np.uint32,
    )
    same(got, expected.astype(np.uint32) << 16)
    nan = apply("cvt.rn.bf16x2.f32 %y, %x0, %x0;", np.full(32, np.nan, np.float32), out=np.uint32)
    same(nan, np.full(32, 0x7FFF7FFF))


def test_half_precision():
    got = apply("cvt.rn.f16x2.f32 %y, %x0, %x1;", G, H, out=np.uint32)
    halves = np.stack([H, G], 1).astype(np.float16)
    same(got, halves.view(np.uint32).reshape(-1))
    same(
        apply("fma.rn.f16x2 %y, %x0, %x0, %x0;", got, out=np.uint32).view(np.float16),
        (halves.astype(np.float64) ** 2 + halves).astype(np.float16).reshape(-1),
    )
    same(
        apply("cvt.f32.f16 %y, %x0;", G.astype(np.float16).view(np.uint16), out=np.float32),
        G.astype(np.float16),
    )


def test_float8_round_trips_and_saturates():
    x = np.array([0, 1, -1.5, 448, 1000, -1000, 0.0625, 17] * 4, np.float32)
    got = apply(
        "cvt.rn.satfinite.e4m3x2.f32 %y, %x0, %x1;", x, np.zeros(32, np.float32), out=np.uint16
    )
    back = apply("cvt.rn.f16x2.e4m3x2 %y, %x0;", got, out=np.uint32).view(np.float16)[1::2]
    same(back, np.array([0, 1, -1.5, 448, 448, -448, 0.0625, 16] * 4, np.float16))


def test_predicate_logic_and_guards():
    got = apply(
        "setp.gt.s32 %p1, %tid, 7; setp.lt.s32 %p2, %tid, 20; and.pred %p3, %p1, %p2;"
        "mov.b32 %y, %x0; @%p3 mov.b32 %y, 5; @!%p1 add.s32 %y, %y, 1;",
        np.arange(100, 132, dtype=np.uint32),
        out=np.uint32,
    )
    tid = np.arange(32)
    same(got, np.where((tid > 7) & (tid < 20), 5, np.where(tid <= 7, tid + 101, tid + 100)))
