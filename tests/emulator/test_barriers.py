"""mbarriers, named barriers, clusters: what they do, and what is reported when they are misused."""

import re

import numpy as np
import pytest
from helpers.ptx_kernels import line_of, run

from jax_fa.emulator.faults import BarrierError, DeadlockError, RunawayError, TrapError
from jax_fa.emulator.scheduler import TURN

INIT = """
  mov.b32 %r20, smem;
  setp.eq.s32 %p20, %tid, 0;
  @%p20 mbarrier.init.shared.b64 [%r20], {count};
  bar.sync 0;
"""
WAIT = """{{ .reg .pred P; LAB_WAIT:
  mbarrier.try_wait.parity.shared.b64 P, [%r20], {parity}; @P bra DONE; bra LAB_WAIT; DONE: }}
"""
STORE = "mad.wide.u32 %d0, %tid, 4, %out; st.global.b32 [%d0], %r1;"


@pytest.mark.parametrize("completion", ["eager", "lazy", "random"])
@pytest.mark.parametrize("seed", range(4))
def test_producer_and_consumer_through_an_mbarrier(seed, completion):
    """Warp 0 hands a value over to warp 1, four times, through one slot with two barriers."""
    body = (
        INIT.format(count=32)
        + """
      @%p20 mbarrier.init.shared.b64 [%r20+8], 32;
      bar.sync 0;
      mov.b32 %r2, 0;
      mov.b32 %r1, 0;
      mad.lo.s32 %r3, %lane, 4, %r20;
      setp.eq.s32 %p2, %warp, 0;
    LOOP:
      and.b32 %r4, %r2, 1;
      xor.b32 %r5, %r4, 1;
      @!%p2 bra CONSUME;
      { .reg .pred P; LAB_WAIT:
        mbarrier.try_wait.parity.shared.b64 P, [%r20+8], %r5; @P bra DONE; bra LAB_WAIT; DONE: }
      mad.lo.s32 %r6, %r2, 100, %lane;
      st.shared.b32 [%r3+64], %r6;
      mbarrier.arrive.shared.b64 %d1, [%r20];
      bra NEXT;
    CONSUME:
      { .reg .pred P; LAB_WAIT:
        mbarrier.try_wait.parity.shared.b64 P, [%r20], %r4; @P bra DONE; bra LAB_WAIT; DONE: }
      ld.shared.b32 %r7, [%r3+64];
      add.s32 %r1, %r1, %r7;
      mbarrier.arrive.shared.b64 %d1, [%r20+8];
    NEXT:
      add.s32 %r2, %r2, 1;
      setp.lt.s32 %p3, %r2, 4;
      @%p3 bra LOOP;
    """
        + STORE
    )
    out = np.zeros(64, np.uint32)
    run(body, {"out": out}, block=64, shared=256, seed=seed, completion=completion)
    np.testing.assert_array_equal(out[32:], 600 + 4 * np.arange(32))


def test_a_fresh_barrier_passes_parity_one_only():
    body = (
        INIT.format(count=1)
        + """
      mbarrier.test_wait.parity.shared.b64 %p1, [%r20], 1;
      mbarrier.test_wait.parity.shared.b64 %p2, [%r20], 0;
      selp.b32 %r1, 1, 0, %p1;
      selp.b32 %r2, 2, 0, %p2;
      add.s32 %r1, %r1, %r2;
    """
        + STORE
    )
    out = np.zeros(32, np.uint32)
    run(body, {"out": out}, shared=64, completion="lazy")
    assert (out == 1).all()


def test_deadlock_lists_who_waits_for_what():
    body = (
        INIT.format(count=2)
        + """
      setp.eq.s32 %p1, %warp, 1;
      @%p1 bra OTHER;
    """
        + WAIT.format(parity=0)
        + """
      bra END;
    OTHER:
      bar.sync 5, 96;
    END:
    """
    )
    with pytest.raises(DeadlockError) as caught:
        run(body, shared=64, block=64)
    message = str(caught.value)
    line = line_of(body, "mbarrier.try_wait", shared=64)
    assert (
        f"warp  0 (32 lanes) line {line}: waits for phase with parity 0 of mbarrier at offset "
        "1024 of CTA 0 (phase 0, 2 of 2 arrivals and 0 bytes pending)" in message
    )
    assert "warp  1 (32 lanes) line" in message and "named barrier 5 (32 of 96 threads)" in message


def test_deadlock_of_some_lanes_of_a_warp():
    body = (
        INIT.format(count=1)
        + "setp.lt.u32 %p1, %tid, 3; @!%p1 bra JOIN;"
        + WAIT.format(parity=0)
        + "JOIN: mov.b32 %r1, 1;"
    )
    with pytest.raises(DeadlockError) as caught:
        run(body, shared=64)
    message = str(caught.value)
    assert "warp  0 (3 lanes)" in message
    assert "warp  0 (29 lanes)" in message and "waits for the warp's other lanes" in message


def test_a_polling_loop_without_an_end_is_a_deadlock_too():
    body = (
        INIT.format(count=1)
        + """
    LOOP:
      mbarrier.test_wait.parity.shared.b64 %p1, [%r20], 0;
      @!%p1 bra LOOP;
    """
    )
    with pytest.raises(DeadlockError, match="polls mbarrier"):
        run(body, shared=64)


def test_too_many_arrivals():
    body = INIT.format(count=1) + "mbarrier.arrive.shared.b64 _, [%r20];"
    with pytest.raises(BarrierError, match="32 more arrivals than the phase expects") as caught:
        run(body, shared=64)
    assert caught.value.place.line == line_of(body, "mbarrier.arrive", shared=64)


def test_an_uninitialised_barrier():
    with pytest.raises(BarrierError, match="no mbarrier is initialised at .* offset 1024"):
        run("mov.b32 %r1, smem; mbarrier.arrive.shared.b64 _, [%r1];", shared=64)


def test_named_barriers_for_some_of_the_warps():
    body = """
      mov.b32 %r1, 7;
      mad.lo.s32 %r3, %lane, 4, smem;
      setp.eq.s32 %p1, %warp, 2;
      @%p1 bra STORE;
      setp.eq.s32 %p2, %warp, 1;
      @%p2 bra PRODUCE;
      bar.sync 3, 64;
      ld.shared.b32 %r1, [%r3];
      bra STORE;
    PRODUCE:
      st.shared.b32 [%r3], %tid;
      bar.arrive 3, 64;
    STORE:
    """.replace("4, smem;", "4, %r9;").replace(
        "mov.b32 %r1, 7;", "mov.b32 %r1, 7; mov.b32 %r9, smem;"
    )
    for seed in range(5):
        out = np.zeros(96, np.uint32)
        run(body + STORE, {"out": out}, block=96, shared=128, seed=seed)
        np.testing.assert_array_equal(out, np.r_[np.arange(32, 64), np.full(64, 7)])


def test_named_barrier_participants_must_agree_on_the_count():
    body = """
      setp.eq.s32 %p1, %warp, 1;
      @%p1 bra OTHER;
      bar.sync 1, 64;
    OTHER:
      bar.sync 1, 96;
    """
    with pytest.raises(
        BarrierError,
        match="named barrier 1 .* for 96 threads, others for 64|"
        "named barrier 1 .* for 64 threads, others for 96",
    ):
        run(body, block=64)


def test_cluster_barrier_and_distributed_shared_memory():
    body = """
      mov.b32 %r20, smem;
      mov.u32 %r1, %cluster_ctarank;
      mad.lo.s32 %r2, %tid, 4, %r20;
      mad.lo.s32 %r3, %r1, 1000, %tid;
      st.shared.b32 [%r2], %r3;
      barrier.cluster.arrive.release.aligned;
      barrier.cluster.wait.acquire.aligned;
      xor.b32 %r4, %r1, 1;
      mapa.shared::cluster.u32 %r5, %r2, %r4;
      ld.shared::cluster.b32 %r6, [%r5];
      barrier.cluster.arrive.aligned;
      barrier.cluster.wait.aligned;
      mov.u32 %r7, %ctaid.x;
      mad.lo.s32 %r7, %r7, 32, %tid;
      mad.wide.u32 %d0, %r7, 4, %out;
      st.global.b32 [%d0], %r6;
    """
    out = np.zeros(128, np.uint32)
    run(body, {"out": out}, grid=4, cluster=2, shared=128)
    lanes = np.arange(32)
    np.testing.assert_array_equal(out, np.r_[1000 + lanes, lanes, 1000 + lanes, lanes])


def test_waiting_at_the_cluster_barrier_without_arriving():
    with pytest.raises(BarrierError, match="without barrier.cluster.arrive"):
        run("barrier.cluster.wait.aligned;")


def test_remote_arrivals():
    """Both CTAs arrive at the barrier of CTA 0, which alone waits for it."""
    body = (
        INIT.format(count=2)
        + """
      barrier.cluster.arrive.aligned;
      barrier.cluster.wait.aligned;
      mov.b32 %r3, 0;
      mapa.shared::cluster.u32 %r4, %r20, %r3;
      @%p20 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];
      mov.u32 %r5, %cluster_ctarank;
      setp.ne.s32 %p2, %r5, 0;
      @%p2 bra END;
    """
        + WAIT.format(parity=0)
        + "mov.b32 %r1, 9;"
        + STORE
        + """
    END:
      barrier.cluster.arrive.aligned;
      barrier.cluster.wait.aligned;
    """
    )
    out = np.zeros(32, np.uint32)
    run(body, {"out": out}, grid=2, cluster=2, shared=64)
    assert (out == 9).all()


LATER = """
      mov.u32 %r2, %ctaid.x;
      mad.wide.u32 %d1, %r2, 4, %done;
      setp.eq.s32 %p1, %r2, 3;
      @%p1 bra READY;
    WAIT:
      ld.acquire.gpu.global.b32 %r3, [%d1+4];
      setp.eq.s32 %p2, %r3, 0;
      @%p2 bra WAIT;
    READY:
      setp.eq.s32 %p20, %tid, 0;
      @%p20 atom.global.add.u32 %r4, [%order], 1;
      add.s32 %r4, %r4, 1;
      @%p20 st.global.b32 [%d1], %r4;
"""
"""CTA i waits for CTA i + 1 through memory; the last of four waits for none."""


@pytest.mark.parametrize("starved", [None, 0])
def test_ctas_that_wait_for_later_ones_run_where_all_are_resident(starved):
    done, order = np.zeros(4, np.uint32), np.zeros(1, np.uint32)
    run(LATER, {"done": done, "order": order}, grid=4, resident=4, starved=starved)
    assert done.tolist() == [4, 3, 2, 1]


@pytest.mark.parametrize("resident", [1, 3])
def test_a_cta_that_is_waited_for_and_not_admitted_is_a_deadlock(resident):
    memory = {"done": np.zeros(4, np.uint32), "order": np.zeros(1, np.uint32)}
    with pytest.raises(DeadlockError) as caught:
        run(LATER, memory, grid=4, resident=resident)
    text = str(caught.value)
    for cta in range(resident):
        assert re.search(rf"CTA {cta} warp +0 \(32 lanes\) line \d+: spins", text), text
    assert f"{4 - resident} clusters are not admitted before one of the {resident} resident" in text


def test_a_loop_that_ends_by_itself_is_no_deadlock():
    """Of more segments without any event than a warp is left to itself."""
    count = np.zeros(1, np.uint32)
    body = f"""
      mov.u32 %r2, 0;
    MORE:
      add.s32 %r2, %r2, 1;
      setp.lt.s32 %p1, %r2, {9 * TURN};
      @%p1 bra MORE;
      st.global.b32 [%count], %r2;
    """
    run(body, {"count": count})
    assert count == 9 * TURN


def test_spinning_with_plain_loads_lets_others_run():
    body = """
      setp.eq.s32 %p1, %warp, 0;
      @%p1 bra WAIT;
      st.global.b32 [%flag], 1;
      bra END;
    WAIT:
      ld.global.b32 %r3, [%flag];
      setp.eq.s32 %p2, %r3, 0;
      @%p2 bra WAIT;
    END:
    """
    for seed in range(4):
        run(body, {"flag": np.zeros(1, np.uint32)}, block=64, seed=seed)


def test_endless_loops_and_traps():
    with pytest.raises(RunawayError, match="more than 1000 segments"):
        run("LOOP: add.s32 %r1, %r1, 1; bra LOOP;", max_segments=1000)
    with pytest.raises(DeadlockError, match=r"warp +0 \(32 lanes\) line \d+: spins"):
        run("LOOP: bra LOOP;")
    with pytest.raises(TrapError):
        run("setp.eq.s32 %p1, %tid, 5; @%p1 trap;")


def test_notes_tell_of_barriers_left_half_way():
    report = run("bar.arrive 4, 64;")
    assert report.notes["named barrier 4 is left with 32 of 64 arrivals"] == 1
