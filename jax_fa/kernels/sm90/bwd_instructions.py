"""Instructions that only the Hopper backward uses."""

from cutlass import Int64, cute


def add_to_global(address: Int64, values: list):
    """Adds four floats to consecutive ones in global memory, each atomically, in no fixed order."""
    cute.arch.inline_ptx(
        "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *values],
    )
