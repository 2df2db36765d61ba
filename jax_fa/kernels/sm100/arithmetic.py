"""Arithmetic instructions that the compiler would not choose by itself."""

from cutlass import Float32, Int32, cute


def max3(a: Float32, b: Float32, c: Float32) -> Float32:
    """The largest of three numbers."""
    return cute.arch.inline_ptx(
        "max.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


def minus(a: Float32, b: Float32) -> Float32:
    """``a - b``, which the compiler cannot fuse with a product that ``a`` comes from."""
    return cute.arch.inline_ptx(
        "sub.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def floor(a: Float32) -> Float32:
    """The largest integer not above ``a``, computed at the call: never hoisted out of a loop."""
    return cute.arch.inline_ptx(
        "cvt.rmi.f32.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a]
    )


def fma_saturated(a: Float32, b: Float32, c: Float32) -> Float32:
    """``a * b + c``, clamped to [0, 1]; 0 for NaN."""
    return cute.arch.inline_ptx(
        "fma.rn.sat.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


def bits_from(first: Int32) -> Int32:
    """A word with all bits from number ``first`` >= 0 on set; 0 if ``first`` is 32 or more."""
    return cute.arch.inline_ptx(
        "shl.b32 {$w0}, -1, {$r0};", write_only_types=[Int32], read_only_args=[first]
    )


def add_to_exponent(value: Float32, whole: Float32) -> Float32:
    """``value`` times 2 ** n, where the low bits of ``whole``'s representation hold n."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 shifted; shl.b32 shifted, {$r1}, 23; add.s32 {$w0}, {$r0}, shifted; }",
        write_only_types=[Float32],
        read_only_args=[value, whole],
    )
