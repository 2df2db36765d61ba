"""The compiled core's accesses to memory do what numpy's do, and leave every fault to them."""

import functools

import numpy as np
import pytest

from jax_fa.emulator import Launch, Memory, blocks, emulate, native, run
from jax_fa.emulator.faults import (
    AsyncHazardError,
    EmulationError,
    OutOfBoundsError,
    ProxyFenceError,
    UninitializedReadError,
)
from jax_fa.emulator.memory import SharedMemory

pytestmark = pytest.mark.skipif(native.core is None, reason="needs the extension")

SIZE = 500
"""Not a multiple of what the arrays are padded to."""


def offsets(*numbers):
    return np.array(numbers, np.uint32)


def chunks(*numbers):
    return np.array(numbers, np.int64)


def words(count, first=1):
    """(count, 1), other bits in each."""
    return np.arange(first, first + count, dtype=np.uint32).reshape(-1, 1)


def written(*numbers):
    """A shared memory of which these chunks hold something."""
    shared = SharedMemory(SIZE, 1)
    shared.end(shared.begin_write(chunks(*numbers), "a copy"))
    return shared


def store(shared, *at, warp=3):
    shared.store(offsets(*at), words(len(at)), warp)


def read_chunk_whose_half_was_written(s, at):
    store(s, at, at + 4)
    s.publish(3)
    s.begin_read(chunks(6), "x")


FAULTS = {
    "load beyond": (lambda s: s.load(offsets(0, SIZE), 4), OutOfBoundsError),
    "load misaligned": (lambda s: s.load(offsets(0, 2), 4), OutOfBoundsError),
    "load unwritten": (lambda s: s.load(offsets(0, 96), 4), UninitializedReadError),
    "load written later": (
        lambda s: (s.begin_write(chunks(1), "x"), s.load(offsets(0, 16), 4)),
        AsyncHazardError,
    ),
    "load of a word written later": (
        lambda s: (s.begin_word_write(chunks(5), "x"), s.load(offsets(16), 4, 2)),
        AsyncHazardError,
    ),
    "store beyond": (lambda s: store(s, 0, SIZE), OutOfBoundsError),
    "store misaligned": (lambda s: store(s, 0, 6), OutOfBoundsError),
    "store to what is read": (
        lambda s: (s.begin_read(chunks(1), "x"), store(s, 0, 20)),
        AsyncHazardError,
    ),
    "store to what is written": (
        lambda s: (s.begin_write(chunks(1), "x"), store(s, 0, 20)),
        AsyncHazardError,
    ),
    "store to a word that is written": (
        lambda s: (s.begin_word_write(chunks(5), "x"), store(s, 0, 20)),
        AsyncHazardError,
    ),
    "read of what no fence published": (
        lambda s: (store(s, 16), s.begin_read(chunks(0, 1), "x")),
        ProxyFenceError,
    ),
    "read of what is written": (
        lambda s: (s.begin_write(chunks(1), "x"), s.begin_read(chunks(0, 1), "x")),
        AsyncHazardError,
    ),
    "read of a word that is written": (
        lambda s: (s.begin_word_write(chunks(7), "x"), s.begin_read(chunks(0, 1), "x")),
        AsyncHazardError,
    ),
    "read of what was never written": (
        lambda s: s.begin_read(chunks(0, 6), "x"),
        UninitializedReadError,
    ),
    **{
        f"read of a chunk whose {half} half was written": (
            functools.partial(read_chunk_whose_half_was_written, at=at),
            UninitializedReadError,
        )
        for half, at in (("first", 96), ("second", 104))
    },
    "read beyond": (lambda s: s.begin_read(chunks(0, 1 << 40), "x"), IndexError),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("has_core", [True, False])
def test_fault_in_shared_memory_is_found(name, has_core):
    act, error = FAULTS[name]
    shared = written(0, 1, SIZE // 16)
    if not has_core:
        shared.core = None
    with pytest.raises(error):
        act(shared)


def state(shared):
    """All that is known about a shared memory."""
    arrays = (shared.data, shared.written, shared.owner, shared.reads, shared.writes)
    touched = {warp: np.concatenate(x).tolist() for warp, x in shared.touched.items()}
    return [array.tobytes() for array in arrays], touched, shared.version


def test_shared_memory_is_the_same_after_accesses_without_the_core():
    def accessed(has_core):
        shared = written(0, 1, 2, 3)
        if not has_core:
            shared.core = None
        found = [state(shared)]
        store(shared, 8, 20, 8)  # of two stores to one place the later one counts
        found += [state(shared), shared.load(offsets(8, 20, 60), 4).tolist()]
        shared.store(offsets(32, 48), np.arange(4, dtype=np.uint64).reshape(2, 2), 1)
        claim = shared.begin_read(chunks(3, 2), "x") if shared.publish(1) is None else None
        found.append(state(shared))
        shared.end(claim)
        return [*found, state(shared), shared.load(offsets(32, 48), 4, 4).tolist()]

    assert accessed(True) == accessed(False)


def test_a_fault_leaves_shared_memory_as_it_was():
    shared = written(0, 1)
    before = state(shared)
    for name in ("store beyond", "store misaligned", "read of what was never written"):
        with pytest.raises(EmulationError):
            FAULTS[name][0](shared)
        assert state(shared) == before


def global_memory(has_core, data):
    memory = Memory({"a": data, "b": np.zeros(7, np.uint8)})
    if not has_core:
        memory._core = None
    return memory


def addresses(memory, region, *places):
    return np.array([memory.regions[region].base + place for place in places], np.uint64)


@pytest.mark.parametrize("has_core", [True, False])
@pytest.mark.parametrize(("region", "place"), [(0, 64), (0, 61), (0, 2), (1, 4), (0, -4)], ids=str)
def test_fault_in_global_memory_is_found(region, place, has_core):
    data = np.arange(16, dtype=np.uint32)
    memory = global_memory(has_core, data)
    at = addresses(memory, region, 0, place)
    with pytest.raises(OutOfBoundsError):
        memory.load(at, 4)
    with pytest.raises(OutOfBoundsError):
        memory.store(at[::-1].copy(), words(2, 50))


@pytest.mark.parametrize("has_core", [True, False])
def test_global_memory_is_loaded_and_stored(has_core):
    data = np.arange(16, dtype=np.uint32)
    memory = global_memory(has_core, data)
    at = np.concatenate([addresses(memory, 0, 8, 60, 8), addresses(memory, 1, 0)])
    memory.store(at, words(4, 50))
    assert (data[2], data[15]) == (52, 51)
    assert memory.load(at, 4)[:, 0].tolist() == [52, 51, 52, 53]
    assert memory.load(addresses(memory, 0, 8), 4, 2).tolist() == [[52, 3]]


@pytest.mark.parametrize("has_core", [True, False])
def test_an_array_that_must_not_change_does_not(has_core):
    data = np.arange(16, dtype=np.uint32)
    data.flags.writeable = False
    memory = global_memory(has_core, data)
    with pytest.raises(ValueError, match="read-only"):
        memory.store(addresses(memory, 0, 8), words(1))
    assert data[2] == 2


TEXT = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 a)
{
    .reg .b32 %r<20>;
    .reg .b64 %d<4>;
    .reg .pred %p<4>;
    .shared .align 16 .b8 s[1024];
    ld.param.u64 %d1, [a];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %d2, %r1, 16;
    add.u64 %d3, %d1, %d2;
    ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%d3];
    shl.b32 %r6, %r1, 4;
    mov.u32 %r7, s;
    add.u32 %r8, %r7, %r6;
    st.shared.v4.b32 [%r8], {%r2, %r3, %r4, %r5};
    bar.warp.sync -1;
    mov.b32 %r9, 0;
    mov.b32 %r10, 0;
    BODY
    st.global.v4.b32 [%d3], {%r2, %r3, %r9, %r10};
    ret;
}
"""
BODIES = {
    **{
        f"shuffle {mode}": f"shfl.sync.{mode}.b32 %r9|%p1, %r2, %r3, %r4, -1;"
        "selp.b32 %r10, %r5, %r1, %p1;"
        for mode in ("up", "down", "bfly", "idx")
    },
    "shuffle without flag": "shfl.sync.bfly.b32 %r9, %r2, 5, 31, -1; add.s32 %r10, %r9, 1;",
    "load": "xor.b32 %r11, %r8, 48; ld.shared.v2.b32 {%r9, %r10}, [%r11+8];",
    "matrices": "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r9, %r10}, [%r8]; add.s32 %r9, %r9, 1;",
    "transposed": "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r9, %r10}, [%r8+16];"
    "add.s32 %r9, %r9, 1;",
    "masked": "setp.gt.s32 %p1, %r2, 0; @%p1 bra $skip; add.s32 %r9, %r2, %r3; mov.b32 %r10, %r9;"
    "xor.b32 %r9, %r9, %r4; ld.shared.b32 %r2, [%r8]; add.s32 %r3, %r2, 1; $skip:",
}


def outcome(body):
    run._program.cache_clear()
    rng = np.random.default_rng(5)
    data = rng.integers(0, 1 << 32, (32, 4), np.uint64).astype(np.uint32)
    memory = Memory()
    address = memory.add("a", data)
    launch = Launch((1, 1, 1), (32, 1, 1), (address.to_bytes(8, "little"),))
    report = emulate(TEXT.replace("BODY", body), launch, memory)
    run._program.cache_clear()
    return data.tolist(), repr(report)


@pytest.mark.parametrize("name", BODIES)
def test_run_does_what_its_steps_do(name, monkeypatch):
    with_core = outcome(BODIES[name])
    monkeypatch.setattr(native, "core", None)
    monkeypatch.setattr(blocks, "CODES", {})
    assert with_core == outcome(BODIES[name])


@pytest.mark.parametrize(
    ("load", "error"),
    [
        ("ld.shared.b32 %r9, [%r8+512];", UninitializedReadError),
        ("ld.shared.b32 %r9, [%r8+2];", OutOfBoundsError),
        ("ld.shared.b32 %r9, [%r8+1048576];", OutOfBoundsError),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r9}, [%r8+8];", OutOfBoundsError),
    ],
    ids=["unwritten", "misaligned", "beyond", "row"],
)
def test_run_is_given_up_where_a_load_is_a_fault(load, error):
    """The place is that of the load, behind other instructions of the run."""
    body = f"add.s32 %r11, %r1, 1;\nxor.b32 %r10, %r11, 5;\n{load}\n"
    with pytest.raises(error) as caught:
        outcome(body)
    lines = TEXT.replace("BODY", body).splitlines()
    assert lines[caught.value.place.line - 1].strip() == load
