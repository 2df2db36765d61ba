"""What the compiled core does to registers has the bits of numpy's functions."""

from functools import partial

import numpy as np
import pytest
from helpers import hardware
from hypothesis import given
from hypothesis import strategies as st

from jax_fa.emulator import Launch, Memory, blocks, emulate, native, run
from jax_fa.emulator.registry import PURE
from jax_fa.emulator.values import DTYPES, LANES, SIZES, UNSIGNED

pytestmark = pytest.mark.skipif(not blocks.CODES, reason="needs the extension")

EDGES: dict[str, list] = {
    "f4": [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, 2.0**-126, 3.4e38],
    "integer": [0, 1, 2, 31, 32, 33, 63, 64, 255, 1 << 31, (1 << 31) - 1, -1, -2, 1 << 63],
}


def operand(rng, kind):
    """Any bits, numbers of usual size, small numbers and edges."""
    if kind == "pred":
        return rng.random(LANES) < 0.5
    size = SIZES[kind]
    unsigned = DTYPES[UNSIGNED[size]]
    found = rng.integers(0, 1 << 8 * size, LANES, np.uint64).astype(unsigned).view(DTYPES[kind])
    which = rng.integers(0, 4, LANES)
    if kind == "f4":
        usual = rng.standard_normal(LANES) * 2.0 ** rng.uniform(-30, 8, LANES)
        edges = rng.choice(np.array(EDGES["f4"]), LANES)
    else:
        usual = rng.integers(0, 70, LANES)
        chosen = [EDGES["integer"][i] % (1 << 8 * size) for i in rng.integers(0, 14, LANES)]
        edges = np.array(chosen, np.uint64).astype(unsigned)
        edges = edges.view(DTYPES[kind])
    usual, edges = usual.astype(DTYPES[kind]), edges.astype(DTYPES[kind])
    return np.where(which == 0, usual, np.where(which == 1, edges, found))


def compiled(operation, result, operands):
    """One operation of the core."""
    offsets = [256 * (1 + number) for number in range(3)]
    inputs = [
        (slot, -1, array.itemsize, offset)
        for slot, (array, offset) in enumerate(zip(operands, offsets, strict=False))
    ]
    group = (partial(np.empty, (1, LANES), DTYPES[result]), SIZES[result], [0])
    slots = [*operands, None]
    block = native.core.Block(
        [(blocks.CODES[operation], 0, *offsets)],
        bytes(1024),
        inputs,
        [group],
        [(0, 0, -1)],
        [(len(operands), 0, -1)],
    )
    assert block.run(slots)
    return slots[-1]


@pytest.mark.parametrize(("opcode", "count"), blocks.OPERATIONS, ids=str)
@given(st.integers(0, 2**32 - 1))
def test_operation_has_the_bits_of_numpy(opcode, count, seed):
    unit = PURE[opcode][count]
    is_pair = unit.result == "pair"
    rng = np.random.default_rng(seed)
    kinds = ["f4" if kind == "pair" else kind for kind in unit.operands]
    operands = [operand(rng, kind) for kind in kinds]
    with np.errstate(all="ignore"):
        if is_pair:
            wanted = unit.function(*((x, x) for x in operands))[1]
        else:
            wanted = unit.function(*operands)
    result = "f4" if is_pair else unit.result
    got = compiled(blocks.OPERATIONS[opcode, count], result, operands)
    bits = DTYPES[UNSIGNED[SIZES[result]]] if result != "pred" else np.bool_
    np.testing.assert_array_equal(got.view(bits), np.asarray(wanted, DTYPES[result]).view(bits))


def outcome(case, dtype):
    """Results and reports of all launches of a recorded problem, as hashable text."""
    reports = []

    def watched(*arguments, **options):
        report = emulate(*arguments, **options)
        reports.append(repr(report))
        return report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "emulate", watched)
        arrays = hardware.emulated(case, dtype)
    return {name: np.asarray(x).tobytes() for name, x in arrays.items()}, reports


@pytest.mark.parametrize("name", ["causal_64", "window_64", "lengths_128"])
def test_without_the_core_results_and_reports_are_the_same(name, monkeypatch):
    dtype, case = next(x for x in hardware.CASES if x[1].name == name)
    run._program.cache_clear()
    with_core = outcome(case, dtype)
    monkeypatch.setattr(native, "core", None)
    monkeypatch.setattr(blocks, "CODES", {})
    run._program.cache_clear()
    without = outcome(case, dtype)
    run._program.cache_clear()
    assert with_core == without


def test_a_register_that_is_no_array_of_lanes_is_left_to_numpy():
    """The core refuses what it cannot read, and has changed nothing then."""
    lanes = np.arange(LANES, dtype=np.uint32)
    group = (partial(np.empty, (1, LANES), np.uint32), 4, [0])
    block = native.core.Block(
        [(blocks.CODES["not.u4"], 0, 128, 0, 0)],
        bytes(256),
        [(0, -1, 4, 128)],
        [group],
        [(0, 0, -1)],
        [(0, 0, -1)],
    )
    for other in (lanes[:16], lanes.astype(np.int64), np.arange(2 * LANES)[::2], 5, None):
        slots = [other]
        assert not block.run(slots) and slots[0] is other
    slots = [lanes]
    assert block.run(slots)
    np.testing.assert_array_equal(slots[0], ~lanes)


LOOP = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 a)
{
    .reg .b32 %r<12>;
    .reg .f32 %f<8>;
    .reg .b64 %d<4>;
    .reg .pred %p<4>;
    mov.u32 %r1, %tid.x;
    ld.param.u64 %d1, [a];
    mul.wide.u32 %d2, %r1, 4;
    add.u64 %d3, %d1, %d2;
    mov.b32 %r2, 0;
    mov.b32 %r3, 1;
    mov.b32 %r4, 2;
$loop:
    add.s32 %r5, %r3, %r4;
    mov.b32 %r3, %r4;
    mov.b32 %r4, %r5;
    xor.b32 %r6, %r5, %r1;
    add.s32 %r2, %r2, 1;
    and.b32 %r7, %r1, 7;
    setp.lt.s32 %p1, %r2, 9;
    setp.gt.s32 %p2, %r7, 3;
    @%p2 bra $odd;
    shl.b32 %r8, %r6, 1;
    add.s32 %r9, %r8, %r3;
    sub.s32 %r6, %r9, %r2;
    bra $next;
$odd:
    shr.u32 %r8, %r6, 1;
    mad.lo.s32 %r9, %r8, 3, %r4;
    xor.b32 %r6, %r9, %r2;
$next:
    @%p1 bra $loop;
    add.s32 %r10, %r6, %r3;
    add.s32 %r10, %r10, %r4;
    add.s32 %r10, %r10, %r9;
    st.global.u32 [%d3], %r10;
    ret;
}
"""


def test_values_live_across_loops_and_diverged_lanes(monkeypatch):
    def outputs():
        run._program.cache_clear()
        out = np.zeros(64, np.uint32)
        memory = Memory()
        address = memory.add("a", out)
        emulate(LOOP, Launch((1, 1, 1), (64, 1, 1), (address.to_bytes(8, "little"),)), memory)
        return out

    def expected(lane):
        a, b, count = 1, 2, 0
        while True:
            value = a + b
            a, b = b, value
            count += 1
            mixed = value ^ lane
            if lane & 7 > 3:
                other = (mixed >> 1) * 3 + b
                mixed = other ^ count
            else:
                other = (mixed << 1) + a
                mixed = other - count
            if count >= 9:
                return (mixed + a + b + other) % 2**32

    wanted = [expected(lane) for lane in range(64)]
    np.testing.assert_array_equal(outputs(), wanted)
    monkeypatch.setattr(blocks, "CODES", {})
    np.testing.assert_array_equal(outputs(), wanted)
    run._program.cache_clear()
