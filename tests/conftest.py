"""Settings that must be in place before JAX and NumPy start, for every test."""

import gc
import inspect
import os
import re
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # Most of the time of a test is compilation of code that runs once. Custom calls are
        # compiled already: this changes nothing in them.
        "--xla_backend_optimization_level=0",
    ]
).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Workers are as many as cores: threads of each that wait for work are in the way of all others.
NUMPY_CAME_FIRST = "numpy" in sys.modules
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Within a test; ``set_aside_what_is_left`` is about the tests before.
gc.set_threshold(20_000, 10, 5)

import hypothesis  # noqa: E402 (after the environment, like everything that may import JAX)
import pytest  # noqa: E402

hypothesis.settings.register_profile(
    "default",
    deadline=None,  # the first example of a shape compiles
    derandomize=True,  # a red build must be red again tomorrow
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=5000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(items):
    """Moves tests marked ``long`` to the front."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


GROWTH = 1 << 30
"""Bytes by which a process grows before the garbage of all its tests is collected."""
_resident = 0
"""Bytes of this process, when that was done last."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    set_aside_what_is_left()
    return (yield)


def set_aside_what_is_left():
    """Has the garbage collector leave alone what tests left, until it is worth a look.

    Decoded programs, and what was traced, are millions of objects that live for long: looking at
    all of them again and again took a fifth of the time of emulated tests. Garbage may be few
    objects, but large: what JAX compiled, and the memory of emulated machines.
    """
    global _resident
    if _resident_bytes() - _resident > GROWTH:
        gc.unfreeze()
        gc.collect()
        _resident = _resident_bytes()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # Python looks for garbage once more when it ends; nanobind reports what is left.


def _resident_bytes():
    _, pages, *_ = Path("/proc/self/statm").read_text().split()
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def _fallback_warnings_start_over():
    """A fallback is reported once per process; a test must not depend on who ran before it."""
    from jax_fa.runtime import fallback

    fallback._warned.clear()


@pytest.fixture
def no_gpu_kernels(monkeypatch):
    """A build without GPU kernels, whatever this build holds."""
    from jax_fa.runtime import bindings
    from jax_fa.runtime.dispatch import Target

    monkeypatch.setattr(bindings, "target", lambda platform, forced=None: Target(platform))
    monkeypatch.setattr(bindings, "compiled", frozenset)


@pytest.fixture
def all_kernels(monkeypatch):
    """An installation with every kernel, and no GPU: every family has to serve."""
    from jax_fa.runtime import bindings
    from jax_fa.runtime.dispatch import Target
    from jax_fa.spec import variants

    names = {"cuda": frozenset(variants.BY_NAME)}
    monkeypatch.setattr(
        bindings,
        "target",
        lambda platform, forced=None: Target(platform, names.get(platform, set())),
    )
    return names


@pytest.fixture(autouse=True, scope="session")
def _shapes_are_checked():
    """Every call that reaches a kernel or the reference has shapes that fit together."""
    from helpers import shapes

    with shapes.checked():
        yield


PROGRAMS = os.environ.get("JAX_FA_PROGRAM_CACHE", "")
"""The folder that keeps what XLA compiles; "" for none."""
SEVERAL_DEVICES = re.compile(r"mesh|shard|pmap|devices\(", re.IGNORECASE)
"""One of these stands in every test file that has programs of several devices."""


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_are_kept(request):
    """Those of test files that use one device, where a folder for them is given.

    HAZARD: in programs of several devices that are read from it, collectives run out of order, and
    results are wrong (jaxlib 0.10.2).
    """
    if not PROGRAMS or SEVERAL_DEVICES.search(inspect.getsource(request.module)):
        yield
        return
    _keep_programs(PROGRAMS)
    yield
    _keep_programs(None)


def _keep_programs(folder):
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()  # What it knows is whether there was a folder before.


@pytest.fixture(autouse=True, scope="session")
def _launches_are_remembered(request):
    """Those of ``implementation="emulated"``, where a folder for them is given."""
    from helpers.remembered import memory

    if memory is None:
        yield
        return
    memory.prune()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("jax_fa.emulator.emulate", memory)
        yield
    output = getattr(request.config, "workeroutput", None)
    if output is not None:
        output["launches"] = dict(memory.counts)


_launches = pytest.StashKey[dict[str, int]]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    counts = node.config.stash.setdefault(_launches, {})
    for what, count in getattr(node, "workeroutput", {}).get("launches", {}).items():
        counts[what] = counts.get(what, 0) + count


def pytest_terminal_summary(terminalreporter, config):
    counts = config.stash.get(_launches, {})
    if counts:
        words = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
        terminalreporter.write_line(f"emulated launches: {words}")
