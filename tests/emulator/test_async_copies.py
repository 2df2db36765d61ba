"""TMA, bulk copies and cp.async: data, out-of-range elements, swizzle, and what is a hazard."""

import numpy as np
import pytest
from helpers.ptx_kernels import line_of, run, tensor_map

from jax_fa.emulator.faults import (
    AsyncHazardError,
    BarrierError,
    DeadlockError,
    OutOfBoundsError,
    ProxyFenceError,
    UninitializedReadError,
    UnknownInstructionError,
)

POLICIES = pytest.mark.parametrize("completion", ["eager", "lazy", "random"])

# smem: barrier at +0, data at +1024. %r20 barrier, %r21 data, %p20 thread 0.
PROLOGUE = """
  mov.b32 %r20, smem;
  add.s32 %r21, %r20, 1024;
  setp.eq.s32 %p20, %tid, 0;
  @%p20 mbarrier.init.shared.b64 [%r20], 1;
  fence.mbarrier_init.release.cluster;
  bar.sync 0;
  mov.b64 %d20, map0;
"""
EXPECT = "@%p20 mbarrier.arrive.expect_tx.shared.b64 _, [%r20], {};"
WAIT = """{ .reg .pred P; LAB_WAIT:
  mbarrier.try_wait.parity.shared.b64 P, [%r20], 0; @P bra DONE; bra LAB_WAIT; DONE: }
"""
LOAD_2D = """@%p20 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
  [%r21], [%d20, {{{}, {}}}], [%r20];"""
STORE_2D = """@%p20 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group
  [%d20, {{{}, {}}}], [%r21];"""
COMMIT_AND_WAIT = """
  @%p20 cp.async.bulk.commit_group;
  @%p20 cp.async.bulk.wait_group 0;
"""


def copy_out(size):
    """Copies `size` bytes of data (a multiple of 128) to %out, lane by lane."""
    return "".join(
        f"""
      mad.lo.s32 %r1, %lane, 4, %r21;
      ld.shared.b32 %r2, [%r1+{offset}];
      mad.wide.u32 %d1, %lane, 4, %out;
      st.global.b32 [%d1+{offset}], %r2;
    """
        for offset in range(0, size, 128)
    )


def swizzled(block, mode):
    """Bytes of a (rows, 128) block as they lie in a 1024-byte aligned shared buffer."""
    flat = np.zeros_like(block.reshape(-1))
    offsets = np.arange(block.size)
    bits = {0: 0, 1: 1, 2: 2, 3: 3}[mode]
    flat[offsets ^ ((offsets >> 7 & ((1 << bits) - 1)) << 4)] = block.reshape(-1)
    return flat


@POLICIES
@pytest.mark.parametrize("mode", range(4))
def test_tensor_load_swizzles_and_fills(mode, completion):
    """A box that hangs over two edges: zeros there, and the full byte count."""
    x = np.random.default_rng(1).standard_normal((20, 80)).astype(np.float16)
    inner = 64 if mode in (0, 3) else {1: 16, 2: 32}[mode]
    rows = 1024 // inner // 2
    out = np.zeros(1024, np.uint8)
    body = PROLOGUE + EXPECT.format(1024) + LOAD_2D.format(40, -3) + WAIT + copy_out(1024)
    run(
        body,
        {"x": x, "out": out},
        shared=4096,
        completion=completion,
        maps=[tensor_map("x", (80, 20), (160,), (inner, rows), swizzle=mode)],
    )
    box = np.zeros((rows, inner), np.float16)
    for row in range(rows):
        if 0 <= row - 3 < 20:
            part = x[row - 3, 40 : 40 + inner]
            box[row, : len(part)] = part
    np.testing.assert_array_equal(out, swizzled(box.view(np.uint8), mode))


def test_tensor_load_of_four_dimensions():
    x = np.arange(3 * 4 * 5 * 16, dtype=np.float32).reshape(3, 4, 5, 16)
    out = np.zeros(128, np.uint32)
    body = (
        PROLOGUE
        + EXPECT.format(512)
        + """
      @%p20 cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%r21], [%d20, {8, 1, 2, 1}], [%r20];
    """
        + WAIT
        + copy_out(512)
    )
    run(
        body,
        {"x": x, "out": out},
        shared=4096,
        maps=[tensor_map("x", (16, 5, 4, 3), (64, 320, 1280), (8, 2, 2, 4), element=7)],
    )
    box = np.zeros((4, 2, 2, 8), np.float32)
    box[:2] = x[1:3, 2:4, 1:3, 8:16]
    np.testing.assert_array_equal(out.view(np.float32), box.reshape(-1))


@POLICIES
def test_tensor_store_leaves_out_what_is_out_of_range(completion):
    y = np.full((6, 48), -1, np.float16)
    body = (
        PROLOGUE
        + """
      mad.lo.s32 %r1, %lane, 4, %r21;
    """
        + "".join(f"add.s32 %r2, %tid, {i}; st.shared.b32 [%r1+{i * 128}], %r2;" for i in range(4))
        + """
      fence.proxy.async.shared::cta;
      bar.sync 0;
    """
        + STORE_2D.format(16, 3)
        + COMMIT_AND_WAIT
    )
    run(
        body,
        {"y": y},
        shared=4096,
        completion=completion,
        maps=[tensor_map("y", (48, 6), (96,), (64, 4))],
    )
    words = (np.arange(32)[None] + np.arange(4)[:, None]).astype(np.uint32)
    box = words.view(np.float16).reshape(4, 64)
    expected = np.full((6, 48), -1, np.float16)
    expected[3:6, 16:48] = box[:3, :32]
    np.testing.assert_array_equal(y.view(np.uint16), expected.view(np.uint16))


@POLICIES
@pytest.mark.parametrize("kind", ["bulk", "tensor"])
def test_reductions_add_to_memory(kind, completion):
    y = np.arange(128, dtype=np.float32)
    body = (
        PROLOGUE
        + "cvt.rn.f32.u32 %r3, %tid; mad.lo.s32 %r1, %lane, 4, %r21;"
        + "".join(f"st.shared.b32 [%r1+{i * 128}], %r3;" for i in range(4))
        + """
      fence.proxy.async.shared::cta;
      bar.sync 0;
    """
        + {
            "bulk": "@%p20 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
            "[%y], [%r21], 512;",
            "tensor": "@%p20 cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group "
            "[%d20, {0, 0}], [%r21];",
        }[kind]
        + COMMIT_AND_WAIT
    )
    run(
        body,
        {"y": y},
        shared=4096,
        completion=completion,
        maps=[tensor_map("y", (32, 4), (128,), (32, 4), element=7)],
    )
    np.testing.assert_array_equal(y, np.arange(128) + np.tile(np.arange(32), 4))


@POLICIES
def test_bulk_load_and_store(completion):
    x, y = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    body = (
        PROLOGUE
        + EXPECT.format(256)
        + """
      @%p20 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r21], [%x], 256, [%r20];
    """
        + WAIT
        + "@%p20 cp.async.bulk.global.shared::cta.bulk_group [%y], [%r21], 256;"
        + COMMIT_AND_WAIT
    )
    run(
        body.replace("mov.b64 %d20, map0;", ""),
        {"x": x, "y": y},
        shared=4096,
        completion=completion,
    )
    np.testing.assert_array_equal(y, x)


@POLICIES
def test_multicast_writes_and_signals_every_cta_of_the_mask(completion):
    x = np.arange(256, dtype=np.uint16)
    out = np.zeros((2, 128), np.uint32)
    load = LOAD_2D.format(0, 0).replace("shared::cta", "shared::cluster").replace("%p20", "%p2")
    load = load.replace("::bytes", "::bytes.multicast::cluster").replace("[%r20]", "[%r20], %h1")
    body = (
        PROLOGUE
        + EXPECT.format(512)
        + """
      barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
      mov.u32 %r5, %cluster_ctarank;
      setp.eq.s32 %p2, %r5, 1;
      and.pred %p2, %p2, %p20;
      mov.b16 %h1, 3;
    """
        + load
        + WAIT
        + "mad.wide.u32 %out, %r5, 512, %out;"
        + copy_out(512)
        + """
      barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    )
    run(
        body,
        {"x": x, "out": out},
        grid=2,
        cluster=2,
        shared=4096,
        completion=completion,
        maps=[tensor_map("x", (64, 4), (128,), (64, 4))],
    )
    np.testing.assert_array_equal(out, np.stack([x.view(np.uint32)] * 2))


@POLICIES
def test_copy_to_the_shared_memory_of_another_cta(completion):
    out = np.zeros(64, np.uint32)
    body = (
        PROLOGUE.replace("mov.b64 %d20, map0;", "")
        + EXPECT.format(128)
        + """
      mov.u32 %r5, %cluster_ctarank;
      xor.b32 %r6, %r5, 1;
      mad.lo.s32 %r7, %r5, 1000, %tid;
      mad.lo.s32 %r1, %lane, 4, %r21;
      st.shared.b32 [%r1+128], %r7;
      fence.proxy.async;
      bar.warp.sync -1;
      barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
      mapa.shared::cluster.u32 %r8, %r21, %r6;
      mapa.shared::cluster.u32 %r9, %r20, %r6;
      add.s32 %r10, %r21, 128;
      @%p20 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
        [%r8], [%r10], 128, [%r9];
    """
        + WAIT
        + "mad.wide.u32 %out, %r5, 128, %out;"
        + copy_out(128)
        + """
      barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    )
    run(body, {"out": out}, grid=2, cluster=2, shared=4096, completion=completion)
    np.testing.assert_array_equal(out, np.r_[np.arange(1000, 1032), np.arange(32)])


@POLICIES
def test_cp_async_groups_and_zero_fill(completion):
    x = np.arange(128, dtype=np.uint32)
    out = np.zeros(128, np.uint32)
    body = """
      mov.b32 %r21, smem;
      mad.lo.s32 %r1, %tid, 16, %r21;
      mad.wide.u32 %d1, %tid, 16, %x;
      setp.lt.u32 %p1, %tid, 20;
      selp.b32 %r2, 16, 0, %p1;
      setp.eq.u32 %p2, %tid, 20;
      selp.b32 %r2, 8, %r2, %p2;
      cp.async.cg.shared.global.L2::128B [%r1], [%d1], 16, %r2;
      cp.async.commit_group;
      cp.async.wait_group 0;
      bar.sync 0;
    """ + copy_out(512)
    run(body, {"x": x, "out": out}, shared=512, completion=completion)
    np.testing.assert_array_equal(out, np.where(np.arange(128) < 82, x, 0))


# cp.async of %r2 bytes at most: lane l copies SIZE bytes from %x + SIZE l to smem + SIZE l.
SMALL = """
  mov.b32 %r21, smem;
  mad.lo.s32 %r1, %tid, {size}, %r21;
  mad.wide.u32 %d1, %tid, {size}, %x;
  cp.async.{level}.shared.global [%r1], [%d1], {size}{tail};
"""
COMMIT, WAIT_0 = "cp.async.commit_group;", "cp.async.wait_group 0;"


@POLICIES
@pytest.mark.parametrize("wait", [COMMIT + WAIT_0, "cp.async.wait_all;"])
@pytest.mark.parametrize("level, size", [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)])
def test_cp_async_of_every_size(level, size, wait, completion):
    """Lane l reads l % (size + 1) bytes; zeros follow."""
    x = np.random.default_rng(3).integers(1, 256, 32 * size).astype(np.uint8)
    out = np.zeros(32 * size, np.uint8)
    limit = f"rem.u32 %r2, %tid, {size + 1};"
    body = limit + SMALL.format(level=level, size=size, tail=", %r2") + wait + "bar.sync 0;"
    run(body + copy_out(32 * size), {"x": x, "out": out}, shared=32 * size, completion=completion)
    read = np.arange(32)[:, None] % (size + 1)
    wanted = np.where(np.arange(size) < read, x.reshape(32, size), 0)
    np.testing.assert_array_equal(out.reshape(32, size), wanted)


def test_cp_async_that_ignores_its_source():
    """By a predicate, with a cache policy behind it; nothing is read where it holds."""
    x, out = np.arange(1, 65, dtype=np.uint32), np.ones(128, np.uint32)
    copy = SMALL.format(level="cg", size=16, tail=", %p1, %d9")
    copy = copy.replace("global ", "global.L2::cache_hint ")
    body = "setp.ge.u32 %p1, %tid, 16;" + copy + COMMIT + WAIT_0 + "bar.sync 0;"
    run(body + copy_out(512), {"x": x, "out": out}, shared=512)
    np.testing.assert_array_equal(out, np.r_[x, np.zeros(64, np.uint32)])


@pytest.mark.parametrize("size", [4, 8, 16])
def test_what_cp_async_has_not_copied_yet_is_not_read(size):
    """Nor overwritten; what lies beside it may be."""
    x = np.zeros(128, np.uint32)
    fill = "mov.b32 %r21, smem; mad.lo.s32 %r1, %tid, 16, %r21;" + "".join(
        f"st.shared.b32 [%r1+{4 * i}], %tid;" for i in range(4)
    )
    place = f"mad.lo.s32 %r1, %tid, {size}, %r21;"
    copy = fill + "bar.sync 0;" + SMALL.format(level="ca", size=size, tail="")
    beside = f"@%p1 ld.shared.b32 %r3, [%r21+{32 * size}];" if size < 16 else ""
    group = f"setp.eq.u32 %p1, %tid, 0;{beside}" + COMMIT + "cp.async.wait_group 1;" + place
    message = r"{}.* while the cp.async issued by CTA 0 warp 0 at line \d+ may still write it"
    run(
        copy + group + WAIT_0 + "ld.shared.b32 %r3, [%r1];", {"x": x}, shared=512, completion="lazy"
    )
    for touch, found in (
        ("ld.shared.b32 %r3, [%r1];", "is read"),
        ("st.shared.b32 [%r1], %r3;", "is overwritten"),
        (SMALL.format(level="ca", size=4, tail=""), "is overwritten by the cp.async issued"),
    ):
        with pytest.raises(AsyncHazardError, match=message.format(found)):
            run(copy + group + touch, {"x": x}, shared=512, completion="lazy")


@pytest.mark.parametrize("some, others", [("%p1", "!%p1"), ("!%p1", "%p1")])
def test_each_lane_has_groups_of_its_own(some, others):
    """Some lanes commit once more than others: the newest group of the others may be under way."""
    x, out = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    copy = SMALL.format(level="ca", size=4, tail="")
    copies = "".join(copy.replace("cp.async", f"@{lanes} cp.async") for lanes in (some, others))
    body = "setp.lt.u32 %p1, %tid, 16; mov.b32 %r2, 0;" + copies + COMMIT + f"@{some} {COMMIT}"
    body += "cp.async.wait_group 1;"
    read = "@{} ld.shared.b32 %r2, [%r1]; mad.wide.u32 %d1, %tid, 4, %out;"
    read += "st.global.b32 [%d1], %r2;" + WAIT_0
    run(body + read.format(some), {"x": x, "out": out}, shared=128, completion="lazy")
    has_read = (x < 16) == (some == "%p1")
    np.testing.assert_array_equal(out, np.where(has_read, x, 0))
    with pytest.raises(AsyncHazardError, match="is read while the cp.async issued"):
        run(body + read.format(others), {"x": x, "out": out}, shared=128, completion="lazy")


@pytest.mark.parametrize(
    "before, level, size, tail, error, message",
    [
        ("", "cg", 8, "", UnknownInstructionError, "copies of 8 bytes do not exist"),
        ("", "ca", 12, "", UnknownInstructionError, "copies of 12 bytes do not exist"),
        ("mov.b32 %r2, 17;", "cg", 16, ", %r2", OutOfBoundsError, "of 16 bytes reads 17"),
        ("add.u64 %x, %x, 8;", "cg", 16, "", OutOfBoundsError, "of 16 bytes is misaligned"),
        ("add.u64 %x, %x, 4096;", "cg", 16, "", OutOfBoundsError, "no buffer|'x'"),
    ],
)
def test_cp_async_that_does_not_exist_or_leaves_its_arrays(
    before, level, size, tail, error, message
):
    body = before + SMALL.format(level=level, size=size, tail=tail) + COMMIT + WAIT_0
    with pytest.raises(error, match=message):
        run(body, {"x": np.zeros(256, np.uint32)}, shared=512)


def test_cp_async_to_a_place_that_is_not_aligned():
    body = SMALL.format(level="ca", size=8, tail="") + COMMIT + WAIT_0
    with pytest.raises(OutOfBoundsError, match="of 8 bytes is misaligned"):
        run(
            body.replace("cp.async.ca", "add.s32 %r1, %r1, 4; cp.async.ca"),
            {"x": np.zeros(256, np.uint32)},
            shared=512,
        )


@POLICIES
def test_cp_async_can_arrive_on_a_barrier(completion):
    x, out = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    body = (
        PROLOGUE.replace("[%r20], 1;", "[%r20], 32;").replace("mov.b64 %d20, map0;", "")
        + """
      mad.lo.s32 %r1, %lane, 4, %r21;
      mad.wide.u32 %d1, %tid, 4, %x;
      cp.async.ca.shared.global [%r1], [%d1], 4;
      cp.async.mbarrier.arrive.noinc.shared.b64 [%r20];
    """
        + WAIT
        + copy_out(128)
    )
    run(body, {"x": x, "out": out}, shared=4096, completion=completion)
    np.testing.assert_array_equal(out, x)


# Faults.

X = {"x": np.zeros((32, 64), np.float16)}
MAP = [tensor_map("x", (64, 32), (128,), (64, 8))]


def fails(error, message, body, **options):
    options.setdefault("completion", "lazy")
    with pytest.raises(error, match=message) as caught:
        run(PROLOGUE + body, dict(X), shared=4096, maps=MAP, **options)
    return caught.value


def test_reading_before_the_load_has_landed():
    error = fails(
        AsyncHazardError,
        r"is read while the TMA load of box \(0, 0\) issued by CTA 0 "
        r"warp 0 at line \d+ may still write it",
        EXPECT.format(1024) + LOAD_2D.format(0, 0) + "ld.shared.b32 %r1, [%r21];" + WAIT,
    )
    assert error.place.warp == 0


def test_overwriting_before_the_load_has_landed():
    fails(
        AsyncHazardError,
        "is overwritten while the TMA load",
        EXPECT.format(1024) + LOAD_2D.format(0, 0) + "@%p20 st.shared.b32 [%r21], 0;" + WAIT,
    )


def test_loading_twice_into_the_same_place():
    fails(
        AsyncHazardError,
        "is overwritten by the TMA load .* while the TMA load",
        EXPECT.format(2048) + LOAD_2D.format(0, 0) + LOAD_2D.format(0, 8) + WAIT,
    )


FILL = "".join(
    f"mad.lo.s32 %r1, %lane, 4, %r21; st.shared.b32 [%r1+{128 * i}], %tid;" for i in range(8)
)


def test_store_without_a_proxy_fence():
    body = FILL + "bar.sync 0;" + STORE_2D.format(0, 0) + COMMIT_AND_WAIT
    error = fails(
        ProxyFenceError, "stored by warp 0 of the CTA without a later fence.proxy.async", body
    )
    assert error.place.line == line_of(PROLOGUE + body, "@%p20 cp.async.bulk.tensor", X, 4096, 1)


def test_a_proxy_fence_covers_only_the_warp_that_executes_it():
    body = (
        "setp.eq.s32 %p1, %warp, 1; @%p1 bra W1; bra JOIN; W1:"
        + FILL
        + "JOIN: bar.sync 0; setp.eq.s32 %p2, %warp, 0; @%p2 fence.proxy.async.shared::cta;"
        + STORE_2D.format(0, 0)
        + COMMIT_AND_WAIT
    )
    fails(ProxyFenceError, "stored by warp 1", body, block=64)


def test_only_what_is_stored_must_have_been_written():
    """Rows beyond the tensor may be left unwritten in shared memory, rows inside may not."""
    y = np.zeros((4, 64), np.float16)
    half = "".join(f"st.shared.b32 [%r1+{128 * i}], %tid;" for i in range(4))
    body = (
        PROLOGUE
        + "mad.lo.s32 %r1, %lane, 4, %r21;"
        + half
        + "fence.proxy.async.shared::cta; bar.sync 0;"
        + STORE_2D.format(0, 0)
        + COMMIT_AND_WAIT
    )
    run(body, {"y": y}, shared=4096, maps=[tensor_map("y", (64, 4), (128,), (64, 8))])
    np.testing.assert_array_equal(y.view(np.uint32), np.tile(np.arange(32), (4, 1)))
    with pytest.raises(UninitializedReadError, match="TMA store .* never written"):
        more = np.zeros((8, 64), np.float16)
        run(body, {"y": more}, shared=4096, maps=[tensor_map("y", (64, 8), (128,), (64, 8))])


def test_overwriting_the_source_of_a_store_before_wait_group_read():
    body = (
        FILL
        + "fence.proxy.async.shared::cta; bar.sync 0;"
        + STORE_2D.format(0, 0)
        + "@%p20 cp.async.bulk.commit_group;"
    )
    fails(
        AsyncHazardError,
        "is overwritten while the TMA store",
        body + "@%p20 st.shared.b32 [%r21], 1;",
    )
    run(
        PROLOGUE + body + "@%p20 cp.async.bulk.wait_group.read 0; @%p20 st.shared.b32 [%r21], 1;",
        dict(X),
        shared=4096,
        maps=MAP,
        completion="lazy",
    )


def test_leaving_before_the_store_has_read_its_source():
    fails(
        AsyncHazardError,
        "exits and nothing waited for the TMA store .* to read its shared memory",
        FILL
        + "fence.proxy.async.shared::cta; bar.sync 0;"
        + STORE_2D.format(0, 0)
        + "@%p20 cp.async.bulk.commit_group;",
    )


def test_wait_group_keeps_the_newest_groups():
    """With one newer group allowed, only the older store's source may be overwritten."""
    two = (
        FILL
        + """
      fence.proxy.async.shared::cta; bar.sync 0;
    """
        + STORE_2D.format(0, 0)
        + "@%p20 cp.async.bulk.commit_group; add.s32 %r22, %r21, 1024;"
        + FILL.replace("%r21", "%r22")
        + "fence.proxy.async.shared::cta; bar.sync 0;"
        + STORE_2D.format(0, 8).replace("%r21", "%r22")
        + """
      @%p20 cp.async.bulk.commit_group;
      @%p20 cp.async.bulk.wait_group.read 1;
      @%p20 st.shared.b32 [%r21], 1;
    """
    )
    run(
        PROLOGUE + two + "@%p20 cp.async.bulk.wait_group 0;",
        dict(X),
        shared=4096,
        maps=MAP,
        completion="lazy",
    )
    fails(AsyncHazardError, "is overwritten while", two + "@%p20 st.shared.b32 [%r22], 1;")


def test_wait_group_may_allow_more_groups_than_there_are():
    body = (
        FILL
        + "fence.proxy.async.shared::cta; bar.sync 0;"
        + (STORE_2D.format(0, 0) + "@%p20 cp.async.bulk.commit_group;") * 2
        + "@%p20 cp.async.bulk.wait_group.read 3; @%p20 st.shared.b32 [%r21], 1;"
    )
    fails(AsyncHazardError, "is overwritten while the TMA store", body)


def test_barriers_need_a_fence_before_asynchronous_units_signal_them():
    body = PROLOGUE.replace("fence.mbarrier_init.release.cluster;", "") + EXPECT.format(1024)
    with pytest.raises(ProxyFenceError, match="offset 1024 .* no fence.mbarrier_init"):
        run(body + LOAD_2D.format(0, 0) + WAIT, dict(X), shared=4096, maps=MAP)


def test_wrong_byte_counts():
    fails(
        DeadlockError,
        "0 of 1 arrivals and 16 bytes pending",
        EXPECT.format(1040) + LOAD_2D.format(0, 0) + WAIT,
    )
    fails(
        BarrierError,
        "more bytes landed than were announced",
        LOAD_2D.format(0, 0) + "bar.sync 0;",
        completion="eager",
    )


def test_tensor_that_reaches_beyond_its_buffer():
    with pytest.raises(OutOfBoundsError, match="into 'x'"):
        run(
            PROLOGUE + EXPECT.format(1024) + LOAD_2D.format(0, 32) + WAIT,
            dict(X),
            shared=4096,
            maps=[tensor_map("x", (64, 40), (128,), (64, 8))],
        )


def test_unaligned_bulk_sizes_and_unknown_descriptors():
    with pytest.raises(OutOfBoundsError, match="multiples of 16"):
        run(
            PROLOGUE.replace("mov.b64 %d20, map0;", "")
            + """
          @%p20 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
            [%r21], [%x], 24, [%r20];""",
            dict(X),
            shared=4096,
        )
    with pytest.raises(UnknownInstructionError, match="element type 12"):
        run(
            PROLOGUE + EXPECT.format(1024) + LOAD_2D.format(0, 0),
            dict(X),
            shared=4096,
            maps=[tensor_map("x", (64, 32), (128,), (64, 8), element=12)],
        )
