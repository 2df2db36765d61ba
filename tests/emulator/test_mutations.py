"""Single faults in a working kernel, each of them found, with a message that names the place.

A fault is an edit of the Blackwell forward's source that is compiled, an edit of its PTX, or an
edit of a launch. Text to be replaced has to occur exactly once, so that a fault does not silently
cease to be one. Faults that only make values wrong are the oracle's to find.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from helpers.oracle import Results, assert_close, tolerance
from helpers.recording import key_of_build, needs_compiler, needs_dsl, prebuilt, record
from helpers.remembered import emulate, make_once

import jax_fa.kernels
from jax_fa.aot import compiler
from jax_fa.aot.stand_ins import stand_ins
from jax_fa.emulator import Launch, Memory, Options
from jax_fa.emulator.faults import (
    AsyncHazardError,
    DeadlockError,
    EmulationError,
    ProxyFenceError,
    TensorMemoryError,
    UninitializedReadError,
)
from jax_fa.spec import abi
from jax_fa.spec.band import UNBOUNDED, Band
from jax_fa.spec.config import choose_forward
from jax_fa.spec.key import KernelKey
from jax_fa.spec.problem import Operands, Semantics

pytestmark = [
    needs_dsl,
    needs_compiler,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # of the DSL, within the DSL
]

KEY = KernelKey("sm_100f", "bfloat16", 64, 64, "causal")
LENGTH, HEADS = 300, 2  # two tiles of two query blocks for the one CTA; three key blocks
# A warp of each query tile's softmax, and one that corrects, lag behind the others.
SCHEDULES = tuple(
    Options(completion, starved=starved, max_segments=400_000)
    for completion, starved in (("lazy", 3), ("random", 6), ("eager", 9), ("random", None))
)


class Fault(NamedTuple):
    """One edit, and what finds it.

    Attributes:
      name: what is wrong.
      file: of ``kernels/``; "" for the PTX.
      old: text that is replaced; in PTX a regular expression.
      new: text in its place.
      error: class of the emulator's error, or AssertionError where the oracle finds it.
      message: regular expression that is searched for in the message.
      times: how often ``old`` has to occur.
    """

    name: str
    file: str
    old: str
    new: str
    error: type[Exception]
    message: str
    times: int = 1


ROLES, SOFTMAX = "sm100/fwd_roles.py", "sm100/fwd_softmax.py"
# Warps 0-3 and 4-7: softmax of two query tiles; 8-11: correction; 12 mma, 13 store, 14 load.
SOURCE_FAULTS = (
    Fault(
        "mma does not wait for P",
        ROLES,
        "            p_full = p.wait_and_advance()\n",
        "            p_full = p.current_handle()\n            p.advance()\n",
        AsyncHazardError,
        r"tcgen05.st of warp \d overwrites TMEM .* the tcgen05.mma.* warp 12 .* may still read",
    ),
    Fault(
        "P is handed over at one half, taken at three quarters",
        SOFTMAX,
        "if const_expr(j + 1 == HANDED_OVER_FIRST):",
        "if const_expr(j + 2 == HANDED_OVER_FIRST):",
        AsyncHazardError,
        r"tcgen05.st of warp \d overwrites TMEM .* the tcgen05.mma.* warp 12 .* may still read",
    ),
    Fault(
        "P is handed over without waiting for its stores",
        SOFTMAX,
        'so far."""\n    cute.arch.fence_view_async_tmem_store()',
        'so far."""',
        AsyncHazardError,
        r"tcgen05.mma.* warp 12 .* reads TMEM .* warp \d stored without tcgen05.wait::st",
    ),
    Fault(
        "O is read before its commit",
        SOFTMAX,
        "    o.wait_and_advance()\n    umma.after_thread_sync()\n",
        "    o.advance()\n    umma.after_thread_sync()\n",
        AsyncHazardError,
        r"tcgen05.ld.* reads TMEM .* the tcgen05.mma.* may still write .* warp (8|9|10|11),",
    ),
    Fault(
        "O lies over the scores of the other tile",
        ROLES,
        'x.tmem + variant.plan.columns(f"o{index}").start, products.o',
        'x.tmem + variant.plan.columns(f"o{index}").start - 64, products.o',
        AsyncHazardError,
        r"TMEM lane \d+ column \d+ while the tcgen05.mma",
    ),
    Fault(
        "softmax begins in the wrong phase of S",
        SOFTMAX,
        "    row = row_softmax.make_whole_row()\n    tile",
        "    row = row_softmax.make_whole_row()\n    pipes.s.advance()\n    tile",
        UninitializedReadError,
        r"tcgen05.ld.* reads TMEM lane \d+ column \d+, which nothing wrote",
    ),
    Fault(
        "that O is free for the first block is not told",
        SOFTMAX,
        "    with cute.arch.elect_one():\n        scaled.commit()\n",
        "    with cute.arch.elect_one():\n        if const_expr(is_started):\n"
        "            scaled.commit()\n",
        DeadlockError,
        r"warp 12 .* waits for phase with parity 0 .* 4 of 4 arrivals",
    ),
    Fault(
        "both softmax roles take the barriers of one query tile",
        "sm100/shell.py",
        "distance * tile",
        "0 * tile",
        AsyncHazardError,
        r"tcgen05.ld.* reads TMEM lane \d+ column \d+ while the tcgen05.mma.* warp 12 .* may still",
    ),
    Fault(
        "the barriers of the other query tile are sought one further",
        "sm100/shell.py",
        "distance * tile",
        "(distance + 1) * tile",
        DeadlockError,
        "no warp can run",
    ),
    Fault(
        "O is not rescaled",
        SOFTMAX,
        "cute.arch.vote_any_sync(shrink < 1.0)",
        "cute.arch.vote_any_sync(shrink < 0.0)",
        AssertionError,
        "out: error",
    ),
    Fault(
        "the sum of a row is not rescaled",
        "sm100/row_softmax.py",
        "fma_packed_f32x2(total, (shrink, shrink), block)",
        "add_packed_f32x2(total, block)",
        AssertionError,
        "lse: error",
    ),
    Fault(
        "exponents of polynomials are not clamped",
        "sm100/arithmetic.py",
        "fma.rn.sat.f32",
        "fma.rn.f32",
        AssertionError,
        "out: ",
    ),
    Fault(
        "lse is scaled",
        SOFTMAX,
        "at.head, batch] = lse\n",
        "at.head, batch] = lse * Float32(1.01)\n",
        AssertionError,
        "lse: error",
    ),
    Fault(
        "the mask shows one key too many",
        SOFTMAX,
        "tiles.Stretch(keys.lo - first_key, keys.hi - first_key)",
        "tiles.Stretch(keys.lo - first_key, keys.hi - first_key + 1)",
        AssertionError,
        "out: error",
    ),
)
PTX_FAULTS = (
    Fault(
        "barriers of softmax, correction and out expect one arrival more",
        "",
        r"(mov\.b32\s+%r\d+, )4;(\s+mbarrier\.init)",
        r"\g<1>5;\2",
        DeadlockError,
        r"warp +8 .* waits for phase .* mbarrier at offset \d+ .* 1 of 5 arrivals",
        times=11,
    ),
    Fault(
        "barriers of softmax, correction and out expect one arrival less",
        "",
        r"(mov\.b32\s+%r\d+, )4;(\s+mbarrier\.init)",
        r"\g<1>3;\2",
        EmulationError,
        r"line \d+",
        times=11,
    ),
    Fault(
        "loads announce 16 bytes too many",
        "",
        r"(mov\.b32\s+%r\d+, )16384;(\s+mbarrier\.arrive\.expect_tx)",
        r"\g<1>16400;\2",
        DeadlockError,
        r"warp +12 .* waits for phase .* 0 of 1 arrivals and 16 bytes pending",
        times=6,
    ),
    Fault(
        "out is stored without a fence between proxies",
        "",
        r"fence\.proxy\.async\S*;",
        "",
        ProxyFenceError,
        r"the TMA store .* warp 13 .* stored by warp \d+ .* without a later fence.proxy.async",
        times=2,
    ),
    Fault(
        "out is overwritten while it is stored",
        "",
        r"cp\.async\.bulk\.wait_group\.read\s+0;",
        "",
        AsyncHazardError,
        r"is overwritten while the TMA store .* warp 13 at line \d+ may still read it",
        times=2,
    ),
    Fault(
        "tensor memory is not given back",
        "",
        r"tcgen05\.dealloc[^;]*;",
        "",
        TensorMemoryError,
        r"CTA 0 exits with TMEM columns \{0: 512\} allocated",
    ),
    Fault(
        "barriers are used before other proxies know them",
        "",
        r"fence\.mbarrier_init[^;]*;",
        "",
        ProxyFenceError,
        r"signals mbarrier at offset \d+ .* no fence.mbarrier_init .* warp 14",
    ),
)


class Kernel(NamedTuple):
    """The sound kernel and one call of it."""

    ptx: str
    launch: Launch
    memory: dict[str, tuple[int, np.ndarray]]
    operands: Operands


def call_of(kernel: Kernel, ptx: str, launch: Launch, schedule: Options) -> Results:
    """Runs a kernel on the call's memory, results filled with NaN."""
    memory = Memory()
    arrays = {name: array.copy() for name, (_, array) in kernel.memory.items()}
    for name, (address, _) in kernel.memory.items():
        array = arrays[name]
        memory.add(name, array.view(np.uint16) if array.itemsize == 2 else array, address)
    emulate(ptx, replace(launch, kernel=None), memory, seed=1, options=schedule)
    return Results(arrays["out"], arrays["lse"])


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> Kernel:
    """Keys grow with their distance, so that maxima are raised: the newest come first.

    The others' exponents are then below the smallest.
    """
    random = np.random.default_rng(3)
    shape = (1, LENGTH, HEADS, KEY.head_dim)
    q, k, v = (random.standard_normal(shape) for _ in "qkv")
    k[:, :128] *= 32
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in (q, k, v))
    lse = np.full(shape[:3], np.nan, np.float32)
    arrays = {"q": q, "k": k, "v": v, "out": np.full_like(q, np.nan), "lse": lse}
    memory = Memory()
    held = {
        name: (memory.add(name, x.view(np.uint16) if x.itemsize == 2 else x), x)
        for name, x in arrays.items()
    }
    values: dict[str, float] = {name: address for name, (address, _) in held.items()}
    values |= {"scale": KEY.head_dim**-0.5, "soft_cap": 1.0, "batch": 1, "num_sequences": 1}
    values |= {"q_len": LENGTH, "kv_len": LENGTH, "num_q_heads": HEADS, "num_kv_heads": HEADS}
    values |= {"head_dim": KEY.head_dim, "value_dim": KEY.value_dim}
    values |= {"window_left": UNBOUNDED, "window_right": 0, "num_sms": 1}
    built = prebuilt(tmp_path_factory.mktemp("sound"), "sm100.fwd", KEY, choose_forward(KEY))
    (launch,) = record(built, abi.FORWARD, values)
    return Kernel(built.ptx, launch, held, Operands(q, k, v))


def find(kernel: Kernel, ptx: str, launch: Launch) -> None:
    """Runs a faulty kernel under several schedules until one finds the fault, and raises that."""
    semantics = Semantics(KEY.head_dim**-0.5, Band(is_causal=True))
    wanted = tolerance(kernel.operands, semantics)
    for schedule in SCHEDULES:
        assert_close(call_of(kernel, ptx, launch, schedule), wanted, KEY.dtype)


def test_the_kernel_without_faults_passes(kernel):
    find(kernel, kernel.ptx, kernel.launch)


@contextmanager
def edited_kernels(folder: Path, fault: Fault) -> Iterator[None]:
    """``jax_fa.kernels`` with the fault in it; unlike patches, the compiler sees edited sources."""
    shutil.copytree(Path(jax_fa.kernels.__file__).parent, folder / "kernels")
    path = folder / "kernels" / fault.file
    text = path.read_text()
    assert text.count(fault.old) == 1, f"{fault.file} has {text.count(fault.old)} times {fault.old}"
    path.write_text(text.replace(fault.old, fault.new))
    ours = {name: x for name, x in sys.modules.items() if name.startswith("jax_fa.kernels")}
    for name in ours:
        del sys.modules[name]
    spec = importlib.util.spec_from_file_location(
        "jax_fa.kernels", path.parents[fault.file.count("/")] / "__init__.py"
    )
    assert spec is not None and spec.loader is not None
    package = sys.modules["jax_fa.kernels"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(package)
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith("jax_fa.kernels")]:
            del sys.modules[name]
        sys.modules.update(ours)


def compiled(folder: Path, fault: Fault) -> str:
    """PTX of the kernel with a fault in its source."""
    import cutlass.cute as cute

    config = choose_forward(KEY)

    def make() -> None:
        compiler._preload_runtime()
        with edited_kernels(folder, fault):
            forward = importlib.import_module("jax_fa.kernels.sm100.fwd")
            entry = forward.make_entry(KEY, config)
            options = f"{compiler.options_of(KEY, config)} --dump-dir {folder}"
            cute.compile(entry, *stand_ins("fwd", KEY.dtype), options=options)

    make_once(key_of_build("sm100.fwd", KEY, config, fault.name), folder, make)
    (ptx,) = folder.glob("*.ptx")
    return ptx.read_text()


@pytest.mark.parametrize("fault", SOURCE_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_in_the_source_is_found(kernel, tmp_path, fault):
    ptx = compiled(tmp_path, fault)
    with pytest.raises(fault.error, match=fault.message):
        find(kernel, ptx, kernel.launch)


@pytest.mark.parametrize("fault", PTX_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_in_the_ptx_is_found(kernel, fault):
    ptx, count = re.subn(fault.old, fault.new, kernel.ptx)
    assert count == fault.times, f"the PTX has {count} times {fault.old}"
    with pytest.raises(fault.error, match=fault.message):
        find(kernel, ptx, kernel.launch)


def test_a_tma_box_that_is_off_is_found(kernel):
    """The second descriptor is that of the keys; bits 0 to 7 of word 14 are its rows, less one."""
    params = list(kernel.launch.params)
    index = [i for i, x in enumerate(params) if len(x) == 128][1]
    descriptor = np.frombuffer(params[index], np.uint32).copy()
    assert descriptor[14] & 0xFF == 127
    descriptor[14] -= 1
    params[index] = descriptor.tobytes()
    launch = replace(kernel.launch, params=tuple(params))
    with pytest.raises(DeadlockError, match=r"warp +12 .* 0 of 1 arrivals and 128 bytes pending"):
        find(kernel, kernel.ptx, launch)
