"""Kernels around what CTA pairs rely on, with the words that they have to leave behind.

Each has one cluster of two CTAs, or several, and is a mechanism of Blackwell's pair kernels
(``bwd_pair.py``, ``bwd_instructions.py``) that Hopper has, too. ``tests/gpu/test_mechanisms.py``
runs them on a GPU and ``test_hardware.py`` in the emulator, under every schedule: what hardware
does and what the emulator takes it to do are the same. Needs NumPy alone.

``nanosleep`` makes one side late on a GPU; the emulator's schedules need no such help.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from helpers.ptx_units import Unit, kernel

LANES = np.arange(32, dtype=np.uint32)
PIECE = 512  # bytes: 16 of each lane
WORDS = 4


class Mechanism(NamedTuple):
    """A launch and the result that it must have."""

    unit: Unit
    expected: np.ndarray


_LATE = "nanosleep.u32 100000;"
_CLUSTER_SYNC = "barrier.cluster.arrive; barrier.cluster.wait;"


def _wait(barrier: str, parity: str) -> str:
    return f"""{{ .reg .pred P; LAB_WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 P, [{barrier}], {parity};
    @P bra DONE; bra LAB_WAIT; DONE: }}"""


def _arrive(barrier: str, rank: str) -> str:
    """One arrival at the counterpart of a barrier in a CTA of the cluster."""
    return f"""{{ .reg .b32 remote; mapa.shared::cluster.u32 remote, {barrier}, {rank};
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote]; }}"""


def _complete_tx(barrier: str, rank: str, size: int) -> str:
    return f"""fence.acq_rel.cluster;
    {{ .reg .b32 remote; mapa.shared::cluster.u32 remote, {barrier}, {rank};
    mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [remote], {size}; }}"""


def _send(source: str, target: str, barrier: str, rank: str, size: int) -> str:
    """Copies to the shared memory of another CTA, where they count at its barrier."""
    return f"""{{ .reg .b32 place, remote;
    mapa.shared::cluster.u32 place, {target}, {rank};
    mapa.shared::cluster.u32 remote, {barrier}, {rank};
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
        [place], [{source}], {size}, [remote]; }}"""


def _mechanism(
    body: str,
    expected: np.ndarray,
    counts: tuple[int, ...] = (),
    *,
    block: int = 32,
    grid: int = 2,
    others: dict[str, np.ndarray] | None = None,
) -> Mechanism:
    """A kernel whose CTAs have barriers %bar0, %bar1, ..., awaiting ``counts`` arrivals each.

    Shared memory from %smem on is for ``body``. %leader is true in each cluster's first CTA, %one
    in lane 0. All meet at the end, where label END is, before the result is stored by ``body``'s
    part behind END, if it has one.
    """
    memory = 4096
    setup = "\n".join(
        f".reg .b32 %bar{i}; add.u32 %bar{i}, %smem, {memory + 8 * i};\n"
        f"@%p0 mbarrier.init.shared.b64 [%bar{i}], {count};"
        for i, count in enumerate(counts)
    )
    text = f"""
    .reg .b32 %rank, %peer, %lane, %warp, %smem, %at, %i, %parity, %sum, %word;
    .reg .pred %one, %leader, %again;
    mov.b32 %smem, smem;
    mov.u32 %rank, %cluster_ctarank;
    xor.b32 %peer, %rank, 1;
    and.b32 %lane, %thread, 31;
    shr.u32 %warp, %thread, 5;
    setp.eq.u32 %one, %lane, 0;
    setp.eq.u32 %leader, %rank, 0;
    setp.eq.u32 %p0, %thread, 0;
    mad.lo.u32 %at, %lane, {4 * WORDS}, %smem;
    mov.u32 %i, 0;
    mov.u32 %sum, 0;
    {setup}
    @%p0 fence.mbarrier_init.release.cluster;
    {_CLUSTER_SYNC}
    {body}
    """
    arrays = {**(others or {}), "y": np.zeros_like(expected)}
    ptx = kernel(" ".join(arrays), text, memory + 64, cluster=2)
    return Mechanism(Unit(ptx, tuple(arrays.values()), grid, block, 2), expected)


def _store(index: str) -> str:
    return f"mad.wide.u32 %d0, {index}, 4, %y; st.global.b32 [%d0], %sum;"


_BY_LANE = f"mad.lo.u32 %r60, %cta, 32, %lane; {_store('%r60')}"


def _hashed(terms: list[np.ndarray]) -> np.ndarray:
    """Folds terms in order as the kernels do: sum = 31 sum + term, in 32 bits."""
    total = np.zeros_like(terms[0], np.uint32)
    for term in terms:
        total = total * np.uint32(31) + term.astype(np.uint32)
    return total


_FOLD = "mad.lo.u32 %sum, %sum, 31, %word;"


def _handed_over() -> Mechanism:
    """Pieces change hands in both directions, as halves of dS do, eight times through one buffer.

    The CTA that is late announces bytes that are there already; which one it is alternates.
    """
    steps = 8
    write = "\n".join(
        f"add.u32 %r1, %r0, {word}; st.shared.b32 [%at+{4 * word}], %r1;" for word in range(WORDS)
    )
    read = "\n".join(
        f"ld.shared.b32 %word, [%at+{PIECE + 4 * word}]; {_FOLD}" for word in range(WORDS)
    )
    body = f"""
    .reg .b32 %in;
    add.u32 %in, %smem, {PIECE};
    setp.eq.u32 %p1, %warp, 1;
    @%p1 bra RECEIVE;
SEND:
    and.b32 %parity, %i, 1;
    xor.b32 %r2, %parity, %rank;
    xor.b32 %parity, %parity, 1;
    {_wait("%bar1", "%parity")}
    mul.lo.u32 %r0, %rank, 1000000;
    mad.lo.u32 %r0, %i, 10000, %r0;
    mad.lo.u32 %r0, %lane, 100, %r0;
    {write}
    fence.proxy.async.shared::cta;
    bar.warp.sync 0xffffffff;
    setp.eq.u32 %p0, %r2, 0;
    @!%p0 bra PROMPT;
    {_LATE}
PROMPT:
    @!%one bra SENT;
    mbarrier.arrive.expect_tx.shared.b64 _, [%bar0], {PIECE};
    {_send("%smem", "%in", "%bar0", "%peer", PIECE)}
SENT:
    bar.warp.sync 0xffffffff;
    add.u32 %i, %i, 1;
    setp.lt.u32 %again, %i, {steps};
    @%again bra SEND;
    bra END;
RECEIVE:
    and.b32 %parity, %i, 1;
    {_wait("%bar0", "%parity")}
    {read}
    bar.warp.sync 0xffffffff;
    @!%one bra FREED;
    {_arrive("%bar1", "%rank")}
    {_arrive("%bar1", "%peer")}
FREED:
    bar.warp.sync 0xffffffff;
    add.u32 %i, %i, 1;
    setp.lt.u32 %again, %i, {steps};
    @%again bra RECEIVE;
END:
    {_CLUSTER_SYNC}
    @!%p1 bra OUT;
    {_BY_LANE}
OUT:
    """
    terms = [
        np.concatenate([peer * 1000000 + i * 10000 + LANES * 100 + w for peer in (1, 0)])
        for i in range(steps)
        for w in range(WORDS)
    ]
    return _mechanism(body, _hashed(terms), (1, 2), block=64)


def _early(how: str) -> Mechanism:
    """Bytes count at the leader's barrier before it expects them, five phases in a row.

    Its transaction count is negative then, and the phase must not be over. ``how`` they come: by a
    copy of the other CTA, or by ``complete_tx`` behind its stores.
    """
    steps, size = 5, 128
    stored = """{ .reg .b32 place; mapa.shared::cluster.u32 place, %r3, 0;
    st.shared::cluster.b32 [place], %r0; }"""
    by_copy = f"""st.shared.b32 [%r3], %r0;
    fence.proxy.async.shared::cta;
    bar.warp.sync 0xffffffff;
    @!%one bra SENT;
    {_send("%smem", "%smem", "%bar0", "0", size)}"""
    by_stores = f"""{stored}
    bar.warp.sync 0xffffffff;
    @!%one bra SENT;
    {_complete_tx("%bar0", "0", size)}"""
    body = f"""
    mad.lo.u32 %r3, %lane, 4, %smem;
AGAIN:
    @%leader bra SENT;
    mad.lo.u32 %r0, %i, 1000, %lane;
    {by_copy if how == "copy" else by_stores}
SENT:
    bar.warp.sync 0xffffffff;
    {_CLUSTER_SYNC}
    @!%leader bra NEXT;
    {_LATE}
    {_LATE}
    and.b32 %parity, %i, 1;
    mbarrier.test_wait.parity.shared.b64 %p1, [%bar0], %parity;
    selp.u32 %word, 100000, 0, %p1;
    {_FOLD}
    bar.warp.sync 0xffffffff;
    @%one mbarrier.arrive.expect_tx.shared.b64 _, [%bar0], {size};
    {_wait("%bar0", "%parity")}
    ld.shared.b32 %word, [%r3];
    {_FOLD}
NEXT:
    {_CLUSTER_SYNC}
    add.u32 %i, %i, 1;
    setp.lt.u32 %again, %i, {steps};
    @%again bra AGAIN;
    {_BY_LANE}
    """
    terms = [term for i in range(steps) for term in (0 * LANES, 1000 * i + LANES)]
    return _mechanism(body, np.concatenate([_hashed(terms), 0 * LANES]), (1,))


def _counted_for_the_leader() -> Mechanism:
    """The leader waits for bytes of both CTAs: its own copy's, and those the other reports.

    The other has loaded at a barrier of its own and cleared some rows; ``complete_tx`` at the
    leader's barrier follows, before or after that expects it.
    """
    steps, used = 6, 20
    load = """cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"""
    body = f"""
    mad.lo.u32 %r3, %lane, 4, %smem;
AGAIN:
    and.b32 %parity, %i, 1;
    xor.b32 %r2, %parity, 1;
    {_wait("%bar2", "%r2")}
    mad.lo.u32 %r4, %i, 2, %rank;
    mad.wide.u32 %d1, %r4, {PIECE}, %x;
    setp.eq.u32 %p0, %parity, %rank;
    @!%p0 bra PROMPT;
    {_LATE}
PROMPT:
    @%leader bra LEAD;
    @!%one bra LOADING;
    mbarrier.arrive.expect_tx.shared.b64 _, [%bar1], {PIECE};
    {load} [%smem], [%d1], {PIECE}, [%bar1];
LOADING:
    bar.warp.sync 0xffffffff;
    {_wait("%bar1", "%parity")}
    setp.ge.u32 %p1, %lane, {used};
    mov.u32 %r5, 0;
    @%p1 st.shared.b32 [%r3], %r5;
    fence.proxy.async.shared::cta;
    bar.warp.sync 0xffffffff;
    @!%one bra NEXT;
    {_complete_tx("%bar0", "0", PIECE)}
    bra NEXT;
LEAD:
    @!%one bra LEADING;
    mbarrier.arrive.expect_tx.shared.b64 _, [%bar0], {2 * PIECE};
    {load} [%smem], [%d1], {PIECE}, [%bar0];
LEADING:
    bar.warp.sync 0xffffffff;
    {_wait("%bar0", "%parity")}
    ld.shared.b32 %word, [%r3];
    {_FOLD}
    mapa.shared::cluster.u32 %r6, %r3, 1;
    ld.shared::cluster.b32 %word, [%r6];
    {_FOLD}
    bar.warp.sync 0xffffffff;
    @!%one bra NEXT;
    {_arrive("%bar2", "0")}
    {_arrive("%bar2", "1")}
NEXT:
    bar.warp.sync 0xffffffff;
    add.u32 %i, %i, 1;
    setp.lt.u32 %again, %i, {steps};
    @%again bra AGAIN;
    {_CLUSTER_SYNC}
    {_BY_LANE}
    """
    x = np.arange(steps * 2 * PIECE // 4, dtype=np.uint32) * np.uint32(2654435761)
    pieces = x.reshape(steps, 2, PIECE // 4)[:, :, :32]
    terms = [
        term for own, other in pieces for term in (own, np.where(LANES < used, other, np.uint32(0)))
    ]
    expected = np.concatenate([_hashed(terms), 0 * LANES])
    return _mechanism(body, expected, (1, 1, 1), others={"x": x})


def _arrivals_of_both() -> Mechanism:
    """Four warps of each CTA store into the leader's memory and arrive at its barrier."""
    steps = 6
    read = "\n".join(f"ld.shared.b32 %word, [%r3+{128 * i}]; {_FOLD}" for i in range(8))
    body = f"""
    mad.lo.u32 %r3, %lane, 4, %smem;
    setp.eq.u32 %p1, %warp, 4;
    @%p1 bra COLLECT;
PRODUCE:
    and.b32 %parity, %i, 1;
    xor.b32 %r2, %parity, 1;
    {_wait("%bar1", "%r2")}
    mad.lo.u32 %r4, %rank, 4, %warp;
    mad.lo.u32 %r5, %r4, 128, %r3;
    mad.lo.u32 %r6, %r4, 100, %lane;
    mad.lo.u32 %r6, %i, 1000, %r6;
    mapa.shared::cluster.u32 %r5, %r5, 0;
    st.shared::cluster.b32 [%r5], %r6;
    bar.warp.sync 0xffffffff;
    @!%one bra ARRIVED;
    {_arrive("%bar0", "0")}
ARRIVED:
    bar.warp.sync 0xffffffff;
    add.u32 %i, %i, 1;
    setp.lt.u32 %again, %i, {steps};
    @%again bra PRODUCE;
    bra END;
COLLECT:
    @!%leader bra END;
    and.b32 %parity, %i, 1;
    {_wait("%bar0", "%parity")}
    {read}
    bar.warp.sync 0xffffffff;
    @!%one bra FREED;
    {_arrive("%bar1", "0")}
    {_arrive("%bar1", "1")}
FREED:
    bar.warp.sync 0xffffffff;
    add.u32 %i, %i, 1;
    setp.lt.u32 %again, %i, {steps};
    @%again bra COLLECT;
END:
    {_CLUSTER_SYNC}
    @!%p1 bra OUT;
    {_BY_LANE}
OUT:
    """
    terms = [1000 * i + 100 * warp + LANES for i in range(steps) for warp in range(8)]
    expected = np.concatenate([_hashed(terms), 0 * LANES])
    return _mechanism(body, expected, (8, 1), block=160)


def _others_have_exited() -> Mechanism:
    """Warps 0 to 11 meet at cluster barriers; those from 12 on end, early or while others wait."""
    steps, threads = 3, 384
    body = f"""
    setp.lt.u32 %p1, %warp, 12;
    @%p1 bra STAY;
    @%leader bra OUT;
    {_LATE}
    {_LATE}
    bra OUT;
STAY:
    mad.lo.u32 %r3, %thread, 4, %smem;
    mapa.shared::cluster.u32 %r4, %r3, %peer;
AGAIN:
    mad.lo.u32 %r5, %rank, 5000, %thread;
    mad.lo.u32 %r5, %i, 10000, %r5;
    st.shared.b32 [%r3], %r5;
    {_CLUSTER_SYNC}
    ld.shared::cluster.b32 %word, [%r4];
    {_FOLD}
    {_CLUSTER_SYNC}
    add.u32 %i, %i, 1;
    setp.lt.u32 %again, %i, {steps};
    @%again bra AGAIN;
    mad.lo.u32 %r60, %cta, {threads}, %thread;
    {_store("%r60")}
OUT:
    """
    thread = np.arange(threads)
    terms = [
        np.concatenate([i * 10000 + peer * 5000 + thread for peer in (1, 0)]) for i in range(steps)
    ]
    return _mechanism(body, _hashed(terms), block=512)


_ADD = f"""cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%y], [%smem], {PIECE};
    cp.async.bulk.commit_group;"""


def _added() -> Mechanism:
    """Four CTAs add pieces of shared memory to the same global memory, as dQ is added."""
    steps, grid = 4, 4
    write = "\n".join(f"st.shared.b32 [%at+{4 * word}], %r1;" for word in range(WORDS))
    body = f"""
AGAIN:
    mad.lo.u32 %r0, %cta, 1000, %lane;
    mad.lo.u32 %r0, %i, 100, %r0;
    cvt.rn.f32.u32 %r1, %r0;
    {write}
    fence.proxy.async.shared::cta;
    bar.warp.sync 0xffffffff;
    @!%one bra ADDED;
    {_ADD}
    cp.async.bulk.wait_group.read 0;
ADDED:
    bar.warp.sync 0xffffffff;
    add.u32 %i, %i, 1;
    setp.lt.u32 %again, %i, {steps};
    @%again bra AGAIN;
    cp.async.bulk.wait_group 0;
    """
    terms = [1000 * cta + 100 * i + LANES for cta in range(grid) for i in range(steps)]
    sums = np.repeat(np.sum(terms, axis=0), WORDS).astype(np.float32)
    return _mechanism(body, sums.view(np.uint32), grid=grid)


def _turns() -> Mechanism:
    """Clusters add in turn, as deterministic backwards do: rounding tells another order."""
    values = np.array([1, 2**24, -(2**24), 1], np.float32)
    body = f"""
    @!%leader bra END;
    shr.u32 %i, %cta, 1;
    mad.wide.u32 %d1, %i, 4, %values;
    ld.global.b32 %r1, [%d1];
    {"".join(f"st.shared.b32 [%at+{4 * word}], %r1;" for word in range(WORDS))}
    fence.proxy.async.shared::cta;
TURN:
    ld.acquire.gpu.global.b32 %r2, [%turn];
    setp.ne.u32 %again, %r2, %i;
    @%again bra TURN;
    bar.warp.sync 0xffffffff;
    @!%one bra END;
    {_ADD}
    cp.async.bulk.wait_group 0;
    fence.acq_rel.gpu;
    red.release.gpu.global.add.s32 [%turn], 1;
END:
    {_CLUSTER_SYNC}
    """
    total = np.float32(0)
    for value in values:
        total += value
    expected = np.full(PIECE // 4, total).view(np.uint32)
    others = {"values": values.view(np.uint32), "turn": np.zeros(1, np.uint32)}
    return _mechanism(body, expected, grid=2 * len(values), others=others)


MECHANISMS = {
    "pieces of shared memory change hands": _handed_over(),
    "bytes of a copy land before they are expected": _early("copy"),
    "complete_tx of another CTA before it is expected": _early("stores"),
    "complete_tx of another CTA among bytes of a copy": _counted_for_the_leader(),
    "arrivals of both CTAs at one barrier": _arrivals_of_both(),
    "cluster barriers after other warps have exited": _others_have_exited(),
    "additions of shared to global memory": _added(),
    "clusters take turns": _turns(),
}
