"""Memory, divergence, lanes, atomics: what one CTA of warps can do."""

import numpy as np
import pytest
from helpers.ptx_kernels import line_of, run

from jax_fa.emulator.faults import DivergenceError, OutOfBoundsError, UninitializedReadError

STORE = "mad.wide.u32 %d0, %tid, 4, %out; st.global.b32 [%d0], %r1;"


def result(body, threads=32, **options):
    out = np.zeros(threads, np.uint32)
    run(body + STORE, {"out": out}, block=threads, **options)
    return out


def test_divergent_branches_join_again():
    got = result("""
      setp.lt.u32 %p1, %tid, 10;
      @%p1 bra SMALL;
      mov.b32 %r1, 100;
      bra JOIN;
    SMALL:
      mov.b32 %r1, 200;
    JOIN:
      activemask.b32 %r2;
      popc.b32 %r2, %r2;
      add.s32 %r1, %r1, %r2;
    """)
    np.testing.assert_array_equal(got, np.where(np.arange(32) < 10, 232, 132))


def test_loops_whose_lanes_leave_one_by_one():
    got = result("""
      mov.b32 %r1, 0;
      mov.b32 %r2, 0;
    LOOP:
      add.s32 %r1, %r1, %r2;
      add.s32 %r2, %r2, 1;
      setp.le.u32 %p1, %r2, %tid;
      @%p1 bra LOOP;
      vote.sync.ballot.b32 %r3, %p1, -1;
      add.s32 %r1, %r1, %r3;
    """)
    lanes = np.arange(32)
    np.testing.assert_array_equal(got, lanes * (lanes + 1) // 2)


def test_nested_divergence_and_early_exit():
    out = np.zeros(32, np.uint32)
    run(
        """
      setp.ge.u32 %p1, %tid, 16;
      @%p1 bra HIGH;
      and.b32 %r2, %tid, 1;
      setp.eq.s32 %p2, %r2, 1;
      @%p2 exit;
      mov.b32 %r1, 1;
      bra JOIN;
    HIGH:
      mov.b32 %r1, 2;
    JOIN:
      activemask.b32 %r3;
      popc.b32 %r3, %r3;
      shl.b32 %r3, %r3, 8;
      or.b32 %r1, %r1, %r3;
    """
        + STORE,
        {"out": out},
    )
    tid = np.arange(32)
    expected = np.where(tid >= 16, 2 + (24 << 8), np.where(tid % 2 == 0, 1 + (24 << 8), 0))
    np.testing.assert_array_equal(out, expected)


def test_shuffles_follow_the_definition():
    lane = np.arange(32)
    shuffle = "add.s32 %r2, %tid, 1000; shfl.sync.{} %r1|%p1, %r2, {}, {}, -1;"
    for mode, b, c, source in [
        ("idx.b32", 3, 31, np.full(32, 3)),
        ("bfly.b32", 5, 31, lane ^ 5),
        ("down.b32", 4, 31, np.where(lane + 4 < 32, lane + 4, lane)),
        ("up.b32", 4, 0, np.where(lane >= 4, lane - 4, lane)),
        ("idx.b32", 1, 0x1C1F, lane & 28 | 1),
        ("down.b32", 2, 0x181F, np.where((lane & 7) + 2 < 8, lane + 2, lane)),
    ]:
        np.testing.assert_array_equal(result(shuffle.format(mode, b, c)), source + 1000)


def test_votes_elect_and_reductions():
    test = "and.b32 %r2, %tid, 4; setp.ne.s32 %p1, %r2, 0;"
    ballot = sum(1 << lane for lane in range(32) if lane & 4)
    assert (result(test + "vote.sync.ballot.b32 %r1, %p1, -1;") == ballot).all()
    assert (result(test + "vote.sync.any.pred %p2, %p1, -1; selp.b32 %r1, 1, 0, %p2;") == 1).all()
    assert (result(test + "vote.sync.all.pred %p2, %p1, -1; selp.b32 %r1, 1, 0, %p2;") == 0).all()
    assert (result("elect.sync %r1|%p1, 0xFFFFFFF0;") == 4).all()
    assert result("elect.sync _|%p1, -1; selp.b32 %r1, 1, 0, %p1;").tolist() == [1] + [0] * 31
    assert (result("redux.sync.add.s32 %r1, %tid, -1;") == 496).all()
    assert (result("redux.sync.max.u32 %r1, %tid, -1;") == 31).all()
    same = result("shr.u32 %r2, %tid, 3; match.any.sync.b32 %r1, %r2, -1;")
    np.testing.assert_array_equal(same, 255 << (np.arange(32) // 8 * 8))


def test_shared_memory_and_generic_addresses():
    got = result(
        """
      mov.b32 %r2, smem;
      mad.lo.s32 %r3, %tid, 4, %r2;
      st.shared.b32 [%r3], %tid;
      bar.sync 0;
      xor.b32 %r4, %tid, 37;
      mad.lo.s32 %r3, %r4, 4, %r2;
      cvt.u64.u32 %d1, %r3;
      cvta.shared.u64 %d1, %d1;
      ld.b32 %r1, [%d1];
    """,
        threads=64,
        shared=256,
    )
    np.testing.assert_array_equal(got, np.arange(64) ^ 37)


def test_vector_loads_and_stores():
    x = np.arange(128, dtype=np.uint32)
    out = np.zeros(128, np.uint32)
    run(
        """
      mad.wide.u32 %d1, %tid, 16, %x;
      ld.global.nc.L1::no_allocate.v4.b32 {%r1, %r2, %r3, %r4}, [%d1];
      mad.wide.u32 %d2, %tid, 16, %out;
      st.global.v4.b32 [%d2], {%r4, %r3, %r2, %r1};
    """,
        {"x": x, "out": out},
    )
    np.testing.assert_array_equal(out.reshape(-1, 4), x.reshape(-1, 4)[:, ::-1])


def test_atomics_return_the_old_value_and_serialise():
    counter = np.zeros(4, np.uint32)
    out = np.zeros(64, np.uint32)
    run(
        """
      atom.global.add.u32 %r1, [%counter], 2;
      red.global.max.u32 [%counter+4], %tid;
      and.b32 %r2, %tid, 1;
      atom.global.cas.b32 %r3, [%counter+8], 0, 77;
      red.global.add.f32 [%counter+12], 0f3F000000;
    """
        + STORE,
        {"counter": counter, "out": out},
        block=64,
    )
    assert sorted(out.tolist()) == list(range(0, 128, 2))
    assert counter[:3].tolist() == [128, 63, 77] and counter.view(np.float32)[3] == 32


def test_local_memory_is_per_thread():
    got = result("""
      .local .align 4 .b8 frame[16];
      mov.b64 %d1, frame;
      cvta.local.u64 %d2, %d1;
      st.local.b32 [%d1+4], %tid;
      ld.b32 %r1, [%d2+4];
    """)
    np.testing.assert_array_equal(got, np.arange(32))


def test_out_of_bounds_names_buffer_line_and_warp():
    body = "mad.wide.u32 %d1, %tid, 4, %x; ld.global.b32 %r1, [%d1+4];"
    with pytest.raises(OutOfBoundsError, match=r"into 'x', which has 256 bytes") as caught:
        run(body, {"x": np.zeros(64, np.uint32)}, block=64)
    assert caught.value.place.line == line_of(body, "ld.global.b32 %r1", ["x"])
    assert caught.value.place.warp == 1
    with pytest.raises(OutOfBoundsError, match="shared offset"):
        run("mov.b32 %r2, smem; st.shared.b32 [%r2+64], %tid;", shared=64)
    with pytest.raises(OutOfBoundsError, match="misaligned"):
        run("mov.b32 %r2, smem; st.shared.b32 [%r2+2], %tid;", shared=64)


def test_reading_unwritten_shared_memory_is_a_fault():
    body = "mov.b32 %r2, smem; st.shared.b32 [%r2], %tid; ld.shared.b32 %r1, [%r2+4];"
    with pytest.raises(UninitializedReadError, match="offset 1028") as caught:
        run(body, shared=64)
    assert caught.value.place.line == line_of(body, "ld.shared.b32", shared=64)


def test_sync_instructions_need_their_members():
    for instruction in (
        "shfl.sync.idx.b32 %r1, %r2, 0, 31, -1;",
        "elect.sync _|%p2, -1;",
        "wgmma.fence.sync.aligned;",
        "bar.sync 0;",
    ):
        with pytest.raises(DivergenceError, match=r"executed by"):
            run(f"setp.lt.u32 %p1, %tid, 8; @%p1 bra OVER; {instruction} OVER:")


def test_equal_seeds_give_equal_runs():
    body = "atom.global.add.u32 %r1, [%c], 1; bar.sync 0;" + STORE

    def order(seed):
        out, counter = np.zeros(256, np.uint32), np.zeros(1, np.uint32)
        run(body, {"c": counter, "out": out}, block=256, seed=seed)
        return out.tolist()

    assert order(3) == order(3)
    assert len({tuple(order(seed)) for seed in range(6)}) > 1
