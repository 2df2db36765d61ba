"""Instructions that only the Hopper backward uses."""

from cutlass import BFloat16, Float32, Int32, Int64, cute


def add_to_global(address: Int64, values: list):
    """Adds four consecutive floats to global memory, each atomically, in no order."""
    cute.arch.inline_ptx(
        "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *values],
    )


def widen(word: Int32, dtype: type) -> tuple[Float32, Float32]:
    """The two elements of type ``dtype`` in a word, the low half first."""
    if dtype is BFloat16:
        code = "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000;"
    else:
        code = (
            "{ .reg .f16 low, high; mov.b32 {low, high}, {$r0}; "
            "cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }"
        )
    return cute.arch.inline_ptx(code, write_only_types=[Float32, Float32], read_only_args=[word])
