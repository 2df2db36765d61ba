"""wgmma and tcgen05 against numpy, and their hazards."""

import numpy as np
import pytest
from helpers.ptx_kernels import (
    a_words,
    c_fragment,
    line_of,
    load_words,
    registers,
    run,
    store_words,
    tensor_map,
)

from jax_fa.emulator import tcgen05
from jax_fa.emulator.faults import (
    AsyncHazardError,
    DeadlockError,
    ProductOrderError,
    ProxyFenceError,
    TensorMemoryError,
    UninitializedReadError,
    UnknownInstructionError,
)
from jax_fa.emulator.layouts import MatrixDescriptor, Tile, place, swizzle

POLICIES = pytest.mark.parametrize("completion", ["eager", "lazy", "random"])
RANDOM = np.random.default_rng(5)


def halves(*shape):
    """Small integers, so that sums are exact in any order."""
    return RANDOM.integers(-4, 5, shape).astype(np.float16)


def test_swizzle_is_its_own_inverse_and_keeps_chunks():
    offsets = np.arange(4096)
    for mode in ("none", "32B", "64B", "128B", "128B/32B"):
        moved = swizzle(offsets, mode)
        np.testing.assert_array_equal(swizzle(moved, mode), offsets)
        np.testing.assert_array_equal(moved % 16, offsets % 16)
    assert swizzle(np.array([128 * 3]), "128B")[0] == 128 * 3 + 16 * 3


# wgmma: operands are written by the kernel itself, K-major with 128-byte swizzle.

WGMMA_SHARED = 1024 * 3 * 8


def smem_image(matrix, start):
    """(indices, words): where a K-major 128B-swizzled matrix of 64 halves per row lies."""
    tile = Tile(matrix.shape[0], 64, 2, False)
    elements = place(MatrixDescriptor(start, 16, 1024, "128B"), tile).elements
    image = np.zeros(matrix.size, np.float16)
    image[(elements - start // 2).reshape(-1)] = matrix.reshape(-1)
    return image.view(np.uint32)


def fill(name, offset, words, threads=128):
    """Copies a buffer of words to shared memory at smem + offset."""
    code = (
        f"add.s32 %r21, %r20, {offset}; mad.lo.s32 %r22, %tid, 4, %r21;"
        f"mad.wide.u32 %d1, %tid, 4, %{name};"
    )
    for i in range(0, words, threads):
        code += f"ld.global.b32 %r23, [%d1+{4 * i}]; st.shared.b32 [%r22+{4 * i}], %r23;"
    return code


def descriptor(register, offset, high):
    """Matrix descriptor of smem + offset in a 64-bit register."""
    return (
        f"add.s32 %r24, %r20, {offset}; and.b32 %r24, %r24, 0x3FFFF; shr.u32 %r24, %r24, 4;"
        f"or.b32 %r24, %r24, 0x10000; mov.b64 {register}, {{%r24, {high}}};"
    )


WGMMA_HIGH = 0x40000040
TCGEN_HIGH = 0x40004040
FENCE = "fence.proxy.async.shared::cta; bar.sync 0;"
ZEROS = "".join(f"mov.b32 %r{100 + i}, 0;" for i in range(8))


def wgmma(d, a, b, accumulate="%p5", tail="1, 1, 0, 0"):
    return (
        f"wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {registers(d, 8)}, {a}, {b}, "
        f"{accumulate}, {tail};"
    )


def wgmma_setup():
    return (
        "mov.b32 %r20, smem; setp.eq.s32 %p5, %tid, %tid;"
        + fill("a", 0, 2048)
        + fill("b", 8192, 512)
        + FENCE
        + descriptor("%d10", 0, WGMMA_HIGH)
        + descriptor("%d11", 8192, WGMMA_HIGH)
        + descriptor("%d12", 32, WGMMA_HIGH)
        + descriptor("%d13", 8192 + 32, WGMMA_HIGH)
        + ZEROS
        + "wgmma.fence.sync.aligned;"
    )


FINISH = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"


def wgmma_buffers():
    a, b = halves(64, 64), halves(16, 64)
    return (
        a,
        b,
        {"a": smem_image(a, 1024), "b": smem_image(b, 1024), "out": np.zeros((8, 128), np.float32)},
    )


@POLICIES
@pytest.mark.parametrize("from_registers", [False, True])
def test_wgmma(from_registers, completion):
    a, b, buffers = wgmma_buffers()
    first = "%d10"
    body = wgmma_setup()
    if from_registers:
        buffers["frag"] = np.concatenate(
            [a_words(a[16 * w : 16 * w + 16, :16]) for w in range(4)], 1
        )
        body += (
            load_words(60, 4, "frag", 512)
            + "wgmma.fence.sync.aligned;"
            + wgmma(100, registers(60, 4), "%d11", tail="1, 1, 0")
        )
    else:
        body += wgmma(100, first, "%d11")
    body += wgmma(100, "%d12", "%d13") + FINISH + store_words(100, 8, "out", 512)
    run(body, buffers, block=128, shared=WGMMA_SHARED, completion=completion)
    expected = a[:, :32].astype(np.float32) @ b[:, :32].astype(np.float32).T
    for warp in range(4):
        np.testing.assert_array_equal(
            buffers["out"][:, 32 * warp : 32 * warp + 32],
            c_fragment(expected[16 * warp : 16 * warp + 16]),
        )


def wgmma_fails(error, message, body, **options):
    _, _, buffers = wgmma_buffers()
    with pytest.raises(error, match=message) as caught:
        run(body, buffers, block=128, shared=WGMMA_SHARED, completion="lazy", **options)
    return caught.value


def test_wgmma_results_are_not_there_before_the_wait():
    body = (
        wgmma_setup()
        + wgmma(100, "%d10", "%d11")
        + "wgmma.commit_group.sync.aligned;"
        + "add.f32 %r1, %r100, %r101;"
        + FINISH
    )
    error = wgmma_fails(
        AsyncHazardError,
        r"add.f32 \(line \d+\) touches registers of the wgmma "
        r"issued by CTA 0 warp \d at line \d+ before wgmma.wait_group",
        body,
    )
    assert error.place.line == line_of(body, "add.f32", ["a", "b", "out"], WGMMA_SHARED)


def test_wgmma_operand_registers_may_not_change_before_the_wait():
    body = (
        wgmma_setup()
        + wgmma(100, registers(60, 4), "%d11", tail="1, 1, 0")
        + "mov.b32 %r61, 0;"
        + FINISH
    )
    wgmma_fails(AsyncHazardError, "mov.b32 .* touches registers of the wgmma", body)


def test_wgmma_operands_in_shared_memory_may_not_change_before_the_wait():
    body = (
        wgmma_setup()
        + wgmma(100, "%d10", "%d11")
        + "wgmma.commit_group.sync.aligned;"
        + "st.shared.b32 [%r20+8192], %tid;"
        + FINISH
    )
    wgmma_fails(AsyncHazardError, "is overwritten while the wgmma", body)


def test_wgmma_reads_only_what_a_fence_published():
    wgmma_fails(
        ProxyFenceError,
        "the wgmma issued by",
        wgmma_setup().replace("fence.proxy.async.shared::cta;", "")
        + wgmma(100, "%d10", "%d11")
        + FINISH,
    )
    wgmma_fails(
        UninitializedReadError,
        "the wgmma issued by .* never written",
        wgmma_setup().replace(fill("b", 8192, 512), "") + wgmma(100, "%d10", "%d11") + FINISH,
    )


def test_wgmma_registers_need_a_fence_after_they_were_computed():
    body = wgmma_setup() + "add.f32 %r100, %r101, %r102;" + wgmma(100, "%d10", "%d11") + FINISH
    error = wgmma_fails(AsyncHazardError, "registers written since the last wgmma.fence", body)
    assert error.place.line == line_of(body, "wgmma.mma_async", ["a", "b", "out"], WGMMA_SHARED)


@pytest.mark.parametrize("mn_major", [False, True])
def test_wgmma_reads_what_tensor_loads_place(mn_major):
    """B through TMA, whose swizzle is tested by itself: (N, K) rows, or (K, N) rows with 32B."""
    a, b, buffers = wgmma_buffers()
    del b
    b = halves(16, 16) if mn_major else halves(16, 64)
    buffers["b"] = b
    if mn_major:
        # 16 rows of K, each of 16 elements of N: 32 bytes a row, 8 rows a swizzle atom.
        box, swizzle_code, high = (16, 16), 1, 0xC0000010
        expected = a[:, :16].astype(np.float32) @ b.astype(np.float32)
    else:
        box, swizzle_code, high = (64, 16), 3, WGMMA_HIGH
        expected = a[:, :16].astype(np.float32) @ b[:, :16].astype(np.float32).T
    size = 2 * b.size
    body = (
        wgmma_setup().replace(fill("b", 8192, 512), "")
        + f"""
      setp.eq.s32 %p20, %tid, 0;
      @%p20 mbarrier.init.shared.b64 [%r20+16384], 1;
      fence.mbarrier_init.release.cluster;
      bar.sync 0;
      mov.b64 %d20, map0;
      mov.b32 %r30, 0;
      @%p20 mbarrier.arrive.expect_tx.shared.b64 _, [%r20+16384], {size};
      @%p20 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [%r20+8192], [%d20, {{%r30, %r30}}], [%r20+16384];
      {{ .reg .pred P; LAB_WAIT:
        mbarrier.try_wait.parity.shared.b64 P, [%r20+16384], 0; @P bra DONE; bra LAB_WAIT; DONE: }}
    """
        + descriptor("%d11", 8192, high)
    )
    body += wgmma(100, "%d10", "%d11", tail=f"1, 1, 0, {int(mn_major)}") + FINISH
    strides = (2 * b.shape[1],)
    run(
        body + store_words(100, 8, "out", 512),
        buffers,
        block=128,
        shared=WGMMA_SHARED,
        maps=[tensor_map("b", b.shape[::-1], strides, box, swizzle=swizzle_code)],
    )
    for warp in range(4):
        np.testing.assert_array_equal(
            buffers["out"][:, 32 * warp : 32 * warp + 32],
            c_fragment(expected[16 * warp : 16 * warp + 16]),
        )


# tcgen05.

ALLOCATE = """
  mov.b32 %r20, smem;
  setp.eq.s32 %p20, %tid, 0;
  setp.eq.s32 %p21, %warp, 0;
  setp.eq.s32 %p5, %tid, %tid;
  @%p20 mbarrier.init.shared.b64 [%r20], 1;
  fence.mbarrier_init.release.cluster;
  @%p21 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r20+8], 64;
  bar.sync 0;
  ld.shared.b32 %r30, [%r20+8];
  shl.b32 %r31, %warp, 21;
  add.s32 %r31, %r31, %r30;
"""
FREE = """
  bar.sync 0;
  @%p21 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
  @%p21 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 64;
"""
COMMIT = "@%p20 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r20];"
WAIT = """{ .reg .pred P; LAB_WAIT:
  mbarrier.try_wait.parity.shared.b64 P, [%r20], 0; @P bra DONE; bra LAB_WAIT; DONE: }
"""
# 128 x 32 from f16 operands, both K-major.
IDESC = 1 << 4 | (32 // 8) << 17 | (128 // 16) << 24
TCGEN_SHARED = 1024 + 16384 + 4096


def tcgen_setup():
    return (
        ALLOCATE
        + fill("a", 1024, 4096)
        + fill("b", 1024 + 16384, 1024)
        + FENCE
        + descriptor("%d10", 1024, TCGEN_HIGH)
        + descriptor("%d11", 1024 + 16384, TCGEN_HIGH)
        + descriptor("%d12", 1024 + 32, TCGEN_HIGH)
        + descriptor("%d13", 1024 + 16384 + 32, TCGEN_HIGH)
    )


def mma(a, b, accumulate):
    return f"@%p20 tcgen05.mma.cta_group::1.kind::f16 [%r30], {a}, {b}, {IDESC}, {accumulate};"


LOAD_D = (
    f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {registers(100, 32)}, [%r31];"
    "tcgen05.wait::ld.sync.aligned;"
)


def tcgen_buffers():
    a, b = halves(128, 64), halves(32, 64)
    return (
        a,
        b,
        {
            "a": smem_image(a, 2048),
            "b": smem_image(b, 2048),
            "out": np.zeros((32, 128), np.float32),
        },
    )


def tcgen_run(body, buffers=None, **options):
    run(body, buffers or tcgen_buffers()[2], block=128, shared=TCGEN_SHARED, **options)


@POLICIES
def test_tcgen05_multiply_from_shared_memory(completion):
    a, b, buffers = tcgen_buffers()
    body = tcgen_setup() + mma("%d10", "%d11", 0) + mma("%d12", "%d13", 1) + COMMIT + WAIT + LOAD_D
    tcgen_run(
        body + store_words(100, 32, "out", 512) + FREE,
        buffers,
        completion=completion,
        strict_ld=True,
    )
    expected = a[:, :32].astype(np.float32) @ b[:, :32].astype(np.float32).T
    np.testing.assert_array_equal(buffers["out"], expected.T)


STORE_A = (
    "mad.wide.u32 %d1, %tid, 4, %p;"
    + "".join(f"ld.global.b32 %r{60 + i}, [%d1+{512 * i}];" for i in range(8))
    + "add.s32 %r32, %r31, 32;"
    + f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r32], {registers(60, 8)};"
)


@POLICIES
def test_tcgen05_multiply_from_tensor_memory(completion):
    _, b, buffers = tcgen_buffers()
    p = halves(128, 16)
    buffers["p"] = np.ascontiguousarray(p.view(np.uint32).T)
    body = (
        tcgen_setup()
        + STORE_A
        + """
      tcgen05.wait::st.sync.aligned;
      bar.sync 0;
      add.s32 %r33, %r30, 32;
    """
        + mma("[%r33]", "%d11", 0)
        + COMMIT
        + WAIT
        + LOAD_D
    )
    tcgen_run(body + store_words(100, 32, "out", 512) + FREE, buffers, completion=completion)
    expected = p.astype(np.float32) @ b[:, :16].astype(np.float32).T
    np.testing.assert_array_equal(buffers["out"], expected.T)


@pytest.mark.parametrize(
    "shape, repeat, count", [("16x64b", 4, 4), ("16x128b", 2, 4), ("16x256b", 1, 4)]
)
def test_tmem_loads_are_the_inverse_of_stores(shape, repeat, count):
    x, out = np.arange(128, dtype=np.uint32).reshape(4, 32), np.zeros((4, 32), np.uint32)
    run(
        ALLOCATE
        + load_words(60, count, "x")
        + f"tcgen05.st.sync.aligned.{shape}.x{repeat}.b32 [%r31], {registers(60, count)};"
        "tcgen05.wait::st.sync.aligned;"
        f"tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32 {registers(70, count)}, [%r31];"
        "tcgen05.wait::ld.sync.aligned;" + store_words(70, count, "out") + FREE,
        {"x": x, "out": out},
        shared=64,
    )
    np.testing.assert_array_equal(out, x)


@POLICIES
def test_copy_from_shared_to_tensor_memory(completion):
    """128x128b: row r is 16 bytes at 16 (r % 8) + 128 (r / 8), without swizzle."""
    words = np.arange(512, dtype=np.uint32)
    out = np.zeros((4, 128), np.uint32)
    high = 1 << 14 | 128 >> 4
    body = (
        ALLOCATE
        + fill("x", 1024, 512)
        + FENCE
        + descriptor("%d10", 1024, high)
        + "@%p20 tcgen05.cp.cta_group::1.128x128b [%r30], %d10;"
        + COMMIT
        + WAIT
        + f"tcgen05.ld.sync.aligned.32x32b.x4.b32 {registers(100, 4)}, [%r31];"
        + "tcgen05.wait::ld.sync.aligned;"
        + store_words(100, 4, "out", 512)
        + FREE
    )
    tcgen_run(body, {"x": words, "out": out}, completion=completion)
    np.testing.assert_array_equal(out.T, words.reshape(128, 4))


def tcgen_fails(error, message, body, **options):
    options.setdefault("completion", "lazy")
    with pytest.raises(error, match=message) as caught:
        tcgen_run(body, **options)
    return caught.value


MULTIPLY = mma("%d10", "%d11", 0)


def test_reading_tmem_before_the_commit_is_observed():
    error = tcgen_fails(
        AsyncHazardError,
        r"tcgen05.ld.* reads TMEM lane \d+ column 0 while the "
        r"tcgen05.mma.* issued by CTA 0 warp 0 at line \d+ may still write it",
        tcgen_setup() + MULTIPLY + COMMIT + "bar.sync 0;" + LOAD_D + WAIT + FREE,
    )
    assert error.place is not None


def test_accumulating_in_tmem_that_nothing_wrote():
    tcgen_fails(
        UninitializedReadError,
        "accumulating.* reads TMEM lane 0 column 0",
        tcgen_setup() + mma("%d10", "%d11", 1) + COMMIT + WAIT + FREE,
    )


def test_tmem_store_without_wait_st():
    _, _, buffers = tcgen_buffers()
    buffers["p"] = np.zeros((8, 128), np.uint32)
    with pytest.raises(AsyncHazardError, match="stored without tcgen05.wait::st"):
        tcgen_run(
            tcgen_setup()
            + STORE_A
            + "bar.sync 0; add.s32 %r33, %r30, 32;"
            + mma("[%r33]", "%d11", 0)
            + COMMIT
            + WAIT
            + FREE,
            buffers,
        )


def mma_into(d, a, accumulate=0, idesc=IDESC):
    return f"@%p20 tcgen05.mma.cta_group::1.kind::f16 [{d}], {a}, %d11, {idesc}, {accumulate};"


# P in columns 32 to 39; D in columns 0 to 31 or 32 to 63.
READS_P = mma_into("%r30", "[%r33]")
OVERWRITES_P = mma_into("%r33", "%d10")
NARROW = 1 << 4 | (16 // 8) << 17 | (128 // 16) << 24


def two_products(first, second, between=""):
    """A body that stores P, issues two products and loads both D; its buffers, and P's product."""
    a, b, buffers = tcgen_buffers()
    p = halves(128, 16)
    buffers["p"] = np.ascontiguousarray(p.view(np.uint32).T)
    buffers["out"] = np.zeros((64, 128), np.float32)
    last = WAIT.replace("[%r20], 0", "[%r20], 1") if between else WAIT
    body = tcgen_setup() + STORE_A + "tcgen05.wait::st.sync.aligned; bar.sync 0;"
    body += "add.s32 %r33, %r30, 32;\n" + first + "\n" + between + second + COMMIT + last + LOAD_D
    body += LOAD_D.replace("[%r31]", "[%r32]").replace("%r1", "%r2")
    body += "".join(f"mov.b32 %r{132 + i}, %r{200 + i};" for i in range(32))
    products = [x.astype(np.float32) @ b[:, :16].T for x in (p, a[:, :16])]
    return body + store_words(100, 64, "out", 512) + FREE, buffers, np.concatenate(products, 1).T


@pytest.mark.parametrize(
    "first, second, told",
    [
        (READS_P, OVERWRITES_P, "may write TMEM cells before the tcgen05.mma.* reads them"),
        (mma_into("%r33", "%d10"), READS_P, "may read TMEM cells before the tcgen05.mma.* writes"),
        (READS_P, mma_into("%r30", "%d10", 0, NARROW), "may write TMEM cells before .* writes"),
        (READS_P, mma_into("%r30", "%d10", 1), None),
        (READS_P, READS_P, None),
    ],
)
def test_only_products_of_one_accumulator_and_shape_keep_their_order(first, second, told):
    body, buffers, _ = two_products(first, second)
    body = body[: body.index(LOAD_D)] + FREE
    tcgen_run(body, buffers, completion="lazy")
    if told is None:
        tcgen_run(body, buffers, completion="lazy", ordered_products=False)
    else:
        with pytest.raises(ProductOrderError, match=told):
            tcgen_run(body, buffers, completion="lazy", ordered_products=False)
    body, buffers, _ = two_products(first, second, COMMIT + WAIT)
    body = body[: body.index(LOAD_D)] + FREE
    tcgen_run(body, buffers, completion="lazy", ordered_products=False)


@POLICIES
@pytest.mark.parametrize("seed", range(5))
def test_products_that_may_overtake_are_collected_and_wait(seed, completion):
    body, buffers, expected = two_products(READS_P, OVERWRITES_P)
    report = run(
        body,
        buffers,
        block=128,
        shared=TCGEN_SHARED,
        seed=seed,
        completion=completion,
        strict=False,
        ordered_products=False,
    )
    np.testing.assert_array_equal(buffers["out"], expected)
    if completion == "lazy":
        (found,) = report.findings
        at = [line_of(body, each, buffers, TCGEN_SHARED) for each in (READS_P, OVERWRITES_P)]
        assert [found.first.line, found.second.line] == at
        assert (found.first.a, found.second.a) == (32, None)


@pytest.mark.parametrize("ordered", [True, False])
def test_products_that_share_nothing_complete_in_any_order_unless_ordered(ordered, monkeypatch):
    body, buffers, _ = two_products(mma_into("%r30", "%d10"), mma_into("%r33", "%d10"))
    done = []

    def write(cta, cells, values, half, real=tcgen05._write_accumulator):
        done.append(cells[0][1].start)
        real(cta, cells, values, half)

    monkeypatch.setattr(tcgen05, "_write_accumulator", write)
    orders = set()
    for seed in range(12):
        done.clear()
        tcgen_run(body, buffers, seed=seed, ordered_products=ordered)
        orders.add(tuple(done))
    assert orders == ({(0, 32)} if ordered else {(0, 32), (32, 0)})


def test_overwriting_an_operand_before_the_commit_is_observed():
    tcgen_fails(
        AsyncHazardError,
        "is overwritten while the tcgen05.mma",
        tcgen_setup()
        + MULTIPLY
        + COMMIT
        + "bar.sync 0; st.shared.b32 [%r20+1024], %tid;"
        + WAIT
        + FREE,
    )


def test_operands_need_a_proxy_fence():
    tcgen_fails(
        ProxyFenceError,
        "the tcgen05.mma",
        tcgen_setup().replace("fence.proxy.async.shared::cta;", "")
        + MULTIPLY
        + COMMIT
        + WAIT
        + FREE,
    )


def test_a_forgotten_commit_is_a_deadlock():
    tcgen_fails(DeadlockError, "waits for phase with parity 0", tcgen_setup() + MULTIPLY + WAIT)


def test_strict_ld_wants_wait_ld():
    body = (
        tcgen_setup()
        + MULTIPLY
        + COMMIT
        + WAIT
        + LOAD_D.replace("tcgen05.wait::ld.sync.aligned;", "add.f32 %r1, %r100, %r101;")
        + FREE
    )
    tcgen_run(body)
    tcgen_fails(
        AsyncHazardError,
        "touches registers of tcgen05.ld at line .* before tcgen05.wait::ld",
        body,
        strict_ld=True,
    )


def test_allocation_faults():
    tcgen_fails(TensorMemoryError, r"exits with TMEM columns \{0: 64\} allocated", ALLOCATE)
    tcgen_fails(
        TensorMemoryError, "not allocated", ALLOCATE + f"add.s32 %r31, %r31, 64; {LOAD_D}" + FREE
    )
    tcgen_fails(
        TensorMemoryError,
        r"at TMEM lane \d+: the warp reaches lanes",
        ALLOCATE + f"add.s32 %r31, %r31, 0x100000; {LOAD_D}" + FREE,
    )
    tcgen_fails(TensorMemoryError, "dealloc of 32 columns", ALLOCATE + FREE.replace("64;", "32;"))
    tcgen_fails(TensorMemoryError, "power of two", ALLOCATE.replace("64;", "48;"))
    tcgen_fails(
        DeadlockError,
        "waits for 512 free TMEM columns",
        ALLOCATE + "@%p21 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r20+16], 512;",
    )
    tcgen_fails(UninitializedReadError, "reads TMEM lane", ALLOCATE + LOAD_D + FREE)


def test_unknown_descriptors_are_named():
    tcgen_fails(
        UnknownInstructionError,
        "instruction descriptor 0x.*types",
        tcgen_setup() + MULTIPLY.replace(str(IDESC), str(IDESC | 7 << 7)) + COMMIT + WAIT,
    )


# Two CTAs: each holds half the rows of A and half the columns of B.


@POLICIES
@pytest.mark.parametrize("rows", [256, 128])
def test_tcgen05_multiply_over_two_ctas(rows, completion):
    """The even CTA issues, and its commit signals both."""
    a, b = halves(rows, 64), halves(32, 64)
    half = rows // 2
    buffers = {
        "a": np.stack([smem_image(a[half * r : half * r + half], 2048) for r in (0, 1)]),
        "b": np.stack([smem_image(b[16 * r : 16 * r + 16], 2048) for r in (0, 1)]),
        "out": np.zeros((2, 32, 128), np.float32),
    }
    idesc = 1 << 4 | (32 // 8) << 17 | (rows // 16) << 24
    columns = 32 if rows == 256 else 16
    load = LOAD_D.replace(".x32", f".x{columns}").replace(
        registers(100, 32), registers(100, columns)
    )
    body = (
        ALLOCATE.replace("cta_group::1", "cta_group::2")
        + f"""
      mov.u32 %r40, %cluster_ctarank;
      mad.wide.u32 %a, %r40, {half * 128}, %a;
      mad.wide.u32 %b, %r40, 2048, %b;
      mad.wide.u32 %out, %r40, 16384, %out;
    """
        + fill("a", 1024, half * 32)
        + fill("b", 1024 + 16384, 512)
        + FENCE
        + """
      barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
      and.b32 %r20, %r20, 0xFFFFFF;
    """
        + descriptor("%d10", 1024, TCGEN_HIGH)
        + descriptor("%d11", 1024 + 16384, TCGEN_HIGH)
        + """
      setp.eq.s32 %p22, %r40, 0;
      and.pred %p22, %p22, %p20;
      mov.b16 %h1, 3;
    """
        + f"""
      @%p22 tcgen05.mma.cta_group::2.kind::f16 [%r30], %d10, %d11, {idesc}, {registers(0, 8)}, 0;
      @%p22 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64
        [%r20], %h1;
    """
        + "mov.b32 %r41, smem; mov.b32 %r20, %r41;"
        + WAIT
        + load
        + store_words(100, columns, "out", 512)
        + """
      barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
        + FREE.replace("cta_group::1", "cta_group::2")
    )
    body = "".join(f"mov.b32 %r{i}, 0;" for i in range(8)) + body
    run(body, buffers, block=128, grid=2, cluster=2, shared=TCGEN_SHARED, completion=completion)
    product = a[:, :16].astype(np.float32) @ b[:, :16].astype(np.float32).T
    for rank in (0, 1):
        mine, got = product[half * rank : half * rank + half], buffers["out"][rank]
        if rows == 128:
            # 64 rows per CTA: columns 16.. lie in lanes 64..
            got = np.concatenate([got[:16, :64], got[:16, 64:]])
        np.testing.assert_array_equal(got, mine.T)
