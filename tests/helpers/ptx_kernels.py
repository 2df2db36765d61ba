"""Small hand-written PTX kernels for the emulator's tests."""

import struct

import numpy as np

from jax_fa.emulator import Launch, Memory, Options, Report, emulate

REGISTERS = """
  .reg .pred %p<32>;
  .reg .b16 %h<64>;
  .reg .b32 %r<640>;
  .reg .b64 %d<128>;
"""


def kernel(body, buffers=(), shared=0, maps=0):
    """PTX of one kernel: %NAME holds the address of each buffer, %tid the thread, smem the shared
    memory; parameter map0, map1, ... are TMA descriptors."""
    params = [f".param .u64 p_{name}" for name in buffers]
    params += [f".param .align 64 .b8 map{i}[128]" for i in range(maps)]
    loads = "\n".join(f"  .reg .b64 %{n};\n  ld.param.u64 %{n}, [p_{n}];" for n in buffers)
    memory = f"  .shared .align 1024 .b8 smem[{shared}];" if shared else ""
    return f""".version 8.8
.target sm_100a
.address_size 64
.visible .entry test({", ".join(params)})
{{
{REGISTERS}
{memory}
  .reg .b32 %tid, %lane, %warp;
  mov.u32 %tid, %tid.x;
  and.b32 %lane, %tid, 31;
  shr.u32 %warp, %tid, 5;
{loads}
{body}
  ret;
}}
"""


def run(body, buffers=None, block=32, grid=1, cluster=1, shared=0, maps=(), seed=0, **options):
    """Runs a kernel body; buffers are modified in place. Returns the report."""
    buffers = buffers or {}
    memory = Memory()
    addresses = {name: memory.add(name, array) for name, array in buffers.items()}
    params = [struct.pack("<Q", address) for address in addresses.values()]
    params += [m(addresses) for m in maps]
    text = kernel(body, buffers, shared, len(maps))
    launch = Launch((grid, 1, 1), (block, 1, 1), tuple(params), cluster=(cluster, 1, 1))
    report = emulate(text, launch, memory, seed=seed, options=Options(**options))
    assert isinstance(report, Report)
    return report


def line_of(body, part, buffers=(), shared=0, maps=0):
    """PTX line on which `part` stands, to be found in messages."""
    text = kernel(body, buffers, shared, maps)
    return text[: text.index(part)].count("\n") + 1


def apply(instruction, *operands, out, types=None):
    """What `instruction` makes of operand arrays of 32 lanes, as an array of dtype `out`.

    %x0, %x1, ... are the operands and %y the result; sizes follow the arrays' item sizes.
    """
    names = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}
    lines = []
    buffers = {"out": np.zeros(32, out)}
    for index, operand in enumerate(operands):
        size = operand.dtype.itemsize
        buffers[f"in{index}"] = operand
        lines.append(f"  .reg .{names[max(size, 2)]} %x{index};")
        lines.append(f"  .reg .b64 %a{index};")
        lines.append(f"  mad.wide.u32 %a{index}, %tid, {size}, %in{index};")
        lines.append(f"  ld.global.{names[size]} %x{index}, [%a{index}];")
    size = np.dtype(out).itemsize
    lines.append(f"  .reg .{names[max(size, 2)]} %y;")
    lines.append(f"  {instruction}")
    lines.append(f"  mad.wide.u32 %d0, %tid, {size}, %out;")
    lines.append(f"  st.global.{names[size]} [%d0], %y;")
    run("\n".join(lines), buffers)
    return buffers["out"]


def tensor_map(name, shape, strides, box, element=6, swizzle=0):
    """A TMA descriptor of buffer `name`; dimensions innermost first, strides in bytes from 1 on."""

    def encode(addresses):
        w = [0] * 16
        w[0], w[1] = addresses[name] & 0xFFFFFFFF, addresses[name] >> 32
        w[2] = 2 | (len(shape) - 1) << 4 | element << 7 | swizzle << 13 | 1 << 18
        for i, stride in enumerate(strides):
            w[3 + i] = stride // 16
        for i, extent in enumerate(shape):
            w[8 + i] = extent - 1
        w[13] = (box[0] - 1) << 24
        for i, extent in enumerate(box[1:]):
            w[14] |= (extent - 1) << 8 * i
        return struct.pack("<16I", *w) + bytes(64)

    return encode


def registers(first, count):
    """{%rFIRST, ...}."""
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def load_words(first, count, name, stride=128):
    """Words i * stride + 4 * tid of buffer `name` into %r<first + i>."""
    return f"mad.wide.u32 %d1, %tid, 4, %{name};" + "".join(
        f"ld.global.b32 %r{first + i}, [%d1+{i * stride}];" for i in range(count)
    )


def store_words(first, count, name, stride=128):
    """%r<first + i> to words i * stride + 4 * tid of buffer `name`."""
    return f"mad.wide.u32 %d1, %tid, 4, %{name};" + "".join(
        f"st.global.b32 [%d1+{i * stride}], %r{first + i};" for i in range(count)
    )


def c_fragment(matrix):
    """Registers (i, lane) of a 16 x N float32 accumulator, from the PTX ISA's figure."""
    lane = np.arange(32)
    rows = []
    for i in range(matrix.shape[1] // 2):
        rows.append(matrix[lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + lane % 4 * 2 + i % 2])
    return np.array(rows, np.float32)


def a_words(matrix):
    """Registers (i, lane) of a 16 x 16 half operand, from the PTX ISA's figure."""
    lane = np.arange(32)
    return np.array(
        [
            np.stack(
                [matrix[lane // 4 + 8 * (i % 2), lane % 4 * 2 + 8 * (i // 2) + e] for e in (0, 1)],
                1,
            )
            .copy()
            .view(np.uint32)
            .reshape(-1)
            for i in range(4)
        ]
    )
