"""mma.sync, ldmatrix and stmatrix against numpy, and what is refused."""

import ml_dtypes
import numpy as np
import pytest
from helpers.ptx_kernels import a_words, c_fragment, load_words, registers, run, store_words

from jax_fa.emulator import blocks, mma, native
from jax_fa.emulator import run as emulation
from jax_fa.emulator.faults import DivergenceError, OutOfBoundsError, UnknownInstructionError

RANDOM = np.random.default_rng(5)


def integers(*shape, dtype):
    """Small ones, so that sums are exact in any order."""
    return RANDOM.integers(-4, 5, shape).astype(dtype)


def b_words(matrix):
    """Registers (i, lane) of a 16 x 8 half operand, from the PTX ISA's figure."""
    lane = np.arange(32)
    return np.array(
        [
            np.stack([matrix[lane % 4 * 2 + 8 * i + e, lane // 4] for e in (0, 1)], 1)
            .copy()
            .view(np.uint32)
            .reshape(-1)
            for i in range(2)
        ]
    )


@pytest.mark.parametrize("type_, dtype", [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_mma_sync(type_, dtype):
    a, b = integers(16, 16, dtype=dtype), integers(16, 8, dtype=dtype)
    c = RANDOM.integers(-9, 9, (16, 8)).astype(np.float32)
    out = np.zeros((4, 32), np.float32)
    run(
        load_words(0, 4, "a")
        + load_words(4, 2, "b")
        + load_words(8, 4, "c")
        + f"mma.sync.aligned.m16n8k16.row.col.f32.{type_}.{type_}.f32 {registers(12, 4)}, "
        f"{registers(0, 4)}, {registers(4, 2)}, {registers(8, 4)};" + store_words(12, 4, "out"),
        {"a": a_words(a), "b": b_words(b), "c": c_fragment(c), "out": out},
    )
    expected = a.astype(np.float32) @ b.astype(np.float32) + c
    np.testing.assert_array_equal(out, c_fragment(expected))


def factors(spread):
    """Words of 16-bit factors: of all values, or with exponents close to each other."""
    bits = RANDOM.integers(0, 2**16, (6, 64), np.uint16)
    kept = {"all": 0xFFFF, "near": 0x83FF}[spread]
    return (bits & np.uint16(kept) | np.uint16(0x3C00 & ~kept)).view(np.uint32)


@pytest.mark.parametrize("type_", ["f16", "bf16"])
@pytest.mark.parametrize("spread", ["all", "near"])
@pytest.mark.skipif(native.core is None, reason="needs the extension")
def test_compiled_mma_sync_has_the_bits_of_numpy(type_, spread, monkeypatch):
    text = (
        load_words(0, 6, "ab")
        + load_words(8, 4, "c")
        + f"mma.sync.aligned.m16n8k16.row.col.f32.{type_}.{type_}.f32 {registers(12, 4)}, "
        f"{registers(0, 4)}, {registers(4, 2)}, {registers(8, 4)};" + store_words(12, 4, "out")
    )
    for _ in range(20):
        words = factors(spread)
        addend = RANDOM.standard_normal((4, 32)).astype(np.float32)
        addend[RANDOM.random((4, 32)) < 0.1] = RANDOM.choice([0, -0.0, np.inf, np.nan, 3e38])
        found = []
        for core in (native.core, None):
            monkeypatch.setattr(native, "core", core)
            monkeypatch.setattr(blocks, "CODES", blocks.CODES if core else {})
            if core is not None:  # and does all of it
                monkeypatch.delattr(mma, "multiply_add")
            emulation._program.cache_clear()
            out = np.zeros((4, 32), np.float32)
            run(text, {"ab": words, "c": addend, "out": out})
            found.append(out.view(np.uint32))
            monkeypatch.undo()
        np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("num_a, num_b", [(2, 2), (4, 1)])
def test_mma_sync_with_too_few_registers(num_a, num_b):
    with pytest.raises(UnknownInstructionError, match="needs 4 registers of A and 2 of B"):
        run(
            f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {registers(12, 4)}, "
            f"{registers(0, num_a)}, {registers(4, num_b)}, {registers(8, 4)};"
        )


def test_mma_sync_by_a_part_of_the_warp():
    with pytest.raises(DivergenceError):
        run(
            "setp.lt.u32 %p1, %tid, 16; @!%p1 bra END;"
            f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {registers(12, 4)}, "
            f"{registers(0, 4)}, {registers(4, 2)}, {registers(8, 4)}; END:"
        )


def test_mma_sync_tf32_drops_low_bits():
    a = RANDOM.standard_normal((16, 8)).astype(np.float32)
    cut = (a.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    b = np.eye(8, dtype=np.float32)
    lane = np.arange(32)
    a_reg = np.array([a[lane // 4 + 8 * (i % 2), lane % 4 + 4 * (i // 2)] for i in range(4)])
    b_reg = np.array([b[lane % 4 + 4 * i, lane // 4] for i in range(2)])
    out = np.zeros((4, 32), np.float32)
    run(
        load_words(0, 4, "a")
        + load_words(4, 2, "b")
        + "".join(f"mov.b32 %r{i}, 0;" for i in range(8, 12))
        + f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {registers(12, 4)}, "
        f"{registers(0, 4)}, {registers(4, 2)}, {registers(8, 4)};" + store_words(12, 4, "out"),
        {"a": a_reg, "b": b_reg, "out": out},
    )
    np.testing.assert_array_equal(out, c_fragment(cut))


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_and_ldmatrix(transposed):
    """stmatrix writes rows, ldmatrix.trans reads columns: x -> x or its transpose."""
    x = RANDOM.integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    lane = np.arange(32)
    words = x[:, lane // 4][:, lane, :].reshape(4, 32, 8)
    words = np.stack([words[:, lane, lane % 4 * 2], words[:, lane, lane % 4 * 2 + 1]], 2)
    words = np.ascontiguousarray(words).view(np.uint32).reshape(4, 32)
    out = np.zeros((4, 32), np.uint32)
    trans = ".trans" if transposed else ""
    run(
        "mov.b32 %r20, smem; mad.lo.s32 %r21, %tid, 16, %r20;"
        + load_words(0, 4, "x")
        + f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r21], {registers(0, 4)}; bar.warp.sync -1;"
        + f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {registers(4, 4)}, [%r21];"
        + store_words(4, 4, "out"),
        {"x": words, "out": out},
        shared=512,
    )
    got = out.view(np.uint16).reshape(4, 8, 4, 2).reshape(4, 8, 8)
    np.testing.assert_array_equal(got, x.transpose(0, 2, 1) if transposed else x)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count, transposed):
    """Lane l gets two elements of row l // 4 of each matrix, from 2 (l % 4) on, or of that column.

    Rows lie in no order; lanes that address none hold what is no address.
    """
    x = RANDOM.integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    order = RANDOM.permutation(32)
    rows = np.zeros((32, 8), np.uint16)
    rows[order] = x.reshape(32, 8)
    places = np.where(np.arange(32) < 8 * count, 16 * order, 7).astype(np.uint32)
    out = np.zeros((count, 32), np.uint32)
    trans = ".trans" if transposed else ""
    run(
        "mov.b32 %r20, smem; mad.lo.s32 %r21, %tid, 16, %r20; mad.wide.u32 %d1, %tid, 16, %rows;"
        "ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%d1];"
        "st.shared.v4.b32 [%r21], {%r0, %r1, %r2, %r3}; bar.warp.sync -1;"
        "mad.wide.u32 %d1, %tid, 4, %places; ld.global.b32 %r22, [%d1]; add.s32 %r22, %r22, %r20;"
        f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {registers(4, count)}, [%r22];"
        + store_words(4, count, "out"),
        {"rows": rows, "places": places, "out": out},
        shared=512,
    )
    wanted = x[:count].transpose(0, 2, 1) if transposed else x[:count]
    np.testing.assert_array_equal(out.view(np.uint16).reshape(count, 8, 8), wanted)


def test_ldmatrix_of_rows_that_are_not_aligned():
    fill = "mov.b32 %r20, smem; mad.lo.s32 %r21, %tid, 16, %r20;" + "".join(
        f"st.shared.b32 [%r21+{4 * i}], %tid;" for i in range(4)
    )
    move = "bar.warp.sync -1; add.s32 %r21, %r21, {}; ldmatrix.sync.aligned.m8n8.x1.shared.b16 "
    move += "{{%r4}}, [%r21];"
    run(fill + move.format(16), shared=512)
    with pytest.raises(OutOfBoundsError, match="rows of a matrix lie at multiples of 16 bytes"):
        run(fill + move.format(8), shared=512)
