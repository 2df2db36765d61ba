"""The build backend (PEP 517 and 660): scikit-build-core, and the GPU kernels of this machine.

``--config-settings=gpu=...`` or else the environment variable JAX_FA_GPU says which:

    auto       (default) those of the GPU families that the driver shows; none without a driver
    none       none
    all        every family
    sm90,...   these families (jax_fa/spec/arch.py)
    DIR        what ``python -m jax_fa.aot --output DIR`` left there, on this machine or another

``--config-settings=cmake.define.JAX_FA_PTX=OFF`` leaves out the PTX of the kernels (15 MB with all
families), without which ``implementation="emulated"`` does not run.

Kernels are compiled by the CuTe DSL, a build requirement where it is needed and has wheels. Where
it has none, ``auto`` builds without kernels and says so; a named family is an error. An index that
lacks the DSL is another matter: pip and uv fail before they ask anything else of us, so the line
that comes before says what builds without it. CMAKE_BUILD_PARALLEL_LEVEL bounds how many kernels
are compiled at a time, as it does for C++.

Frontends show what a build prints only if it fails, or with ``-v``. What its user should know goes
to the terminal as well, where there is one; ``-v`` shows a line for each kernel.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scikit_build_core import build as _scikit_build

# The list of families, from the checkout, without the extension that is about to be built.
sys.path.insert(0, str(Path(__file__).resolve().parent))
import run_aot  # noqa: E402, F401 (puts an empty package in the place of jax_fa)

from jax_fa.aot import compiler  # noqa: E402
from jax_fa.runtime import gpus  # noqa: E402
from jax_fa.spec import variants  # noqa: E402
from jax_fa.spec.arch import ARCHS, arch_of, known_capabilities  # noqa: E402

Settings = Mapping[str, Any]

_SETTING = "gpu"
_VARIABLE = "JAX_FA_GPU"
_DEFINE = "cmake.define.JAX_FA_GPU_KERNELS"

# What the DSL has wheels for (aot.DSL_REQUIREMENT).
_DSL_PYTHONS = ((3, 10), (3, 14))
_DSL_MACHINES = ("x86_64", "aarch64")
_DSL_GLIBC = (2, 28)


class BuildError(SystemExit):
    """What was asked for and cannot be built, and what would work; shown without a traceback."""


@dataclass(frozen=True)
class Kernels:
    """The kernels that a build links.

    Attributes:
        families: names of families to compile.
        folder: compiled kernels to take as they are; None to compile.
        is_automatic: the families are those of the machine; nobody named them.
    """

    families: tuple[str, ...] = ()
    folder: Path | None = None
    is_automatic: bool = False


def requested(settings: Settings | None) -> Kernels:
    """What JAX_FA_GPU or its config setting asks for.

    Raises:
        BuildError: it names neither a family nor a folder with kernels.
    """
    text = str((settings or {}).get(_SETTING, os.environ.get(_VARIABLE) or "auto")).strip()
    known = tuple(arch.name for arch in ARCHS)
    if text in ("none", "all"):
        return Kernels(known if text == "all" else ())
    if text == "auto":
        return Kernels(_families_at_hand(), is_automatic=True)
    if os.sep in text:
        folder = Path(text).resolve()
        if not (folder / "kernel_table.gen.cc").exists():
            raise BuildError(
                f"{_VARIABLE}={text}: {folder} holds no kernel table. Fill it with "
                f"`python -m jax_fa.aot --output {folder}`."
            )
        return Kernels(folder=folder)
    families = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in families if name not in known]
    if unknown:
        raise BuildError(
            f"{_VARIABLE}={text}: {unknown[0]!r} is no GPU family. Use auto, none, all, one or "
            f"more of {', '.join(known)} with commas between, or the path of a folder (with a '/') "
            f"that `python -m jax_fa.aot` filled."
        )
    return Kernels(families)


def _families_at_hand() -> tuple[str, ...]:
    found = (arch_of(gpu.capability) for gpu in gpus.at_hand())
    return tuple(dict.fromkeys(arch.name for arch in found if arch is not None))


def _tell_of_unserved_gpus() -> None:
    for gpu in dict.fromkeys(gpus.at_hand()):
        if arch_of(gpu.capability) is None:
            _tell(
                f"{gpu.name} has compute capability {gpu.capability}; kernels exist for "
                f"{known_capabilities()}"
            )


def dsl_obstacle() -> str | None:
    """Why the DSL cannot be installed here, in one line; None if it can."""
    first, last = _DSL_PYTHONS
    libc, version = platform.libc_ver()
    glibc = tuple(int(part) for part in version.split(".")[:2]) if libc == "glibc" else ()
    fits = (
        sys.platform == "linux"
        and sys.implementation.name == "cpython"
        and not sysconfig.get_config_var("Py_GIL_DISABLED")
        and first <= sys.version_info[:2] <= last
        and platform.machine() in _DSL_MACHINES
        and glibc >= _DSL_GLIBC
    )
    if fits:
        return None
    threading = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    here = (
        f"{sys.implementation.name} {platform.python_version()}{threading}, {sys.platform} "
        f"{platform.machine()}, {libc or 'libc'} {version or 'unknown'}"
    )
    return (
        f"jaxlib runs here ({here}), but {compiler.DSL_REQUIREMENT} has wheels for CPython "
        f"{first[0]}.{first[1]} to {last[0]}.{last[1]} (not free-threaded) on Linux "
        f"{' and '.join(_DSL_MACHINES)} with glibc {_DSL_GLIBC[0]}.{_DSL_GLIBC[1]} or newer only"
    )


def _requires(settings: Settings | None) -> list[str]:
    """The DSL, if kernels are to be compiled and it can be had."""
    kernels = requested(settings)
    if not kernels.families:
        return []
    obstacle = dsl_obstacle()
    if obstacle is None:
        _tell(
            f"{compiler.DSL_REQUIREMENT} is fetched to compile the GPU kernels of "
            f"{', '.join(kernels.families)}; where it cannot be had, {_VARIABLE}=none builds "
            f"without them"
        )
        return [compiler.DSL_REQUIREMENT]
    if not kernels.is_automatic:
        raise BuildError(f"{obstacle}. Use {_VARIABLE}=none, or kernels compiled elsewhere.")
    return []


@contextlib.contextmanager
def _linked(settings: Settings | None) -> Iterator[dict[str, Any]]:
    """Settings for scikit-build-core under which the requested kernels are linked."""
    kernels = requested(settings)
    if kernels.is_automatic:
        _tell_of_unserved_gpus()
    passed_on = {name: value for name, value in (settings or {}).items() if name != _SETTING}
    if kernels.folder is not None:
        yield {**passed_on, _DEFINE: str(kernels.folder)}
    elif not kernels.families or not _can_compile(kernels):
        yield {**passed_on, _DEFINE: "OFF"}
    else:
        with tempfile.TemporaryDirectory(prefix="jax_fa-kernels-") as folder:
            _compile(kernels.families, folder)
            yield {**passed_on, _DEFINE: folder}


def _can_compile(kernels: Kernels) -> bool:
    if importlib.util.find_spec("cutlass") is not None:
        return True
    reason = dsl_obstacle() or (
        f"{compiler.DSL_REQUIREMENT} is not installed in this build environment; pip install it "
        f"first, or build without --no-build-isolation"
    )
    if not kernels.is_automatic:
        raise BuildError(f"GPU kernels of {', '.join(kernels.families)}: {reason}.")
    _tell(f"building without the GPU kernels of {', '.join(kernels.families)}: {reason}")
    return False


def _compile(families: tuple[str, ...], folder: str) -> None:
    start = time.monotonic()
    names = ", ".join(families)
    count = len(variants.of_families(families))
    command = [sys.executable, str(Path(run_aot.__file__)), "--output", folder]
    command += [word for name in families for word in ("--arch", name)]
    if jobs := os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL"):
        command += ["--jobs", jobs]
    _tell(f"compiling the {count} GPU kernels of {names}; {_VARIABLE}=none builds without them")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        _relay(process.stderr, start)
    if process.returncode != 0:
        raise BuildError(
            f"the GPU kernels of {names} did not compile (see above). {_VARIABLE}=none builds "
            f"without them."
        )
    _tell(f"compiled the {count} GPU kernels of {names} in {time.monotonic() - start:.0f} s")


def _relay(lines: Iterable[str], start: float) -> None:
    """Passes on what the compiling process says; the terminal is told every tenth of the way."""
    tenth = 0
    for line in lines:
        sys.stderr.write(line)
        sys.stderr.flush()
        done = re.match(r"\[(\d+)/(\d+)\]", line)
        if done and (reached := 10 * int(done[1]) // int(done[2])) > tenth:
            tenth = reached
            _show(f"{done[1]} of {done[2]} kernels after {time.monotonic() - start:.0f} s")


def _tell(line: str) -> None:
    """One line for the log of the build, and for the terminal."""
    print(f"jax_fa: {line}", file=sys.stderr, flush=True)  # noqa: T201
    _show(line)


def _show(line: str) -> None:
    """One line for the terminal, past a frontend that keeps the log to itself."""
    if sys.stderr.isatty():
        return
    with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
        # The cursor stands behind a spinner, which goes on in the place of the last space.
        terminal.write(f"\njax_fa: {line}  ")


def _hook(delegate: Callable[..., Any]) -> Callable[..., Any]:
    """``delegate``, a hook of scikit-build-core, without the setting that it does not know."""

    @functools.wraps(delegate)
    def hook(*arguments: Any, **keywords: Any) -> Any:
        def strip(value: Any) -> Any:
            is_settings = isinstance(value, Mapping)
            return {k: v for k, v in value.items() if k != _SETTING} if is_settings else value

        return delegate(*map(strip, arguments), **{k: strip(v) for k, v in keywords.items()})

    return hook


build_sdist = _hook(_scikit_build.build_sdist)
get_requires_for_build_sdist = _hook(_scikit_build.get_requires_for_build_sdist)
prepare_metadata_for_build_wheel = _hook(_scikit_build.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = _hook(_scikit_build.prepare_metadata_for_build_editable)


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    """Build tools, and the DSL where kernels are to be compiled."""
    base = _hook(_scikit_build.get_requires_for_build_wheel)(config_settings)
    return [*base, *_requires(config_settings)]


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    """As for a wheel."""
    base = _hook(_scikit_build.get_requires_for_build_editable)(config_settings)
    return [*base, *_requires(config_settings)]


def build_wheel(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Compiles the kernels, then the wheel; returns its name."""
    with _linked(config_settings) as settings:
        return _scikit_build.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    """The same for an editable installation."""
    with _linked(config_settings) as settings:
        return _scikit_build.build_editable(wheel_directory, settings, metadata_directory)
