"""Python interpreters of Debian for any processor, unpacked into a folder; nothing is installed.

A tree holds what ``apt-get`` would install on a machine of that processor, and the headers to build
extensions with. Interpreters start through a script beside them: by the tree's own dynamic linker
on this processor, by qemu's user mode on another one.
"""

import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


@dataclass(frozen=True)
class Machine:
    """A processor as Debian names it.

    Attributes:
        name: as ``uname -m`` has it.
        architecture: of packages.
        triple: prefix of cross compilers, and the folder of libraries.
        loader: the dynamic linker, from the root.
    """

    name: str
    architecture: str
    triple: str
    loader: str

    @property
    def is_native(self) -> bool:
        """True for the processor of this machine."""
        return self.name == platform.machine()


MACHINES = (
    Machine("x86_64", "amd64", "x86_64-linux-gnu", "lib64/ld-linux-x86-64.so.2"),
    Machine("aarch64", "arm64", "aarch64-linux-gnu", "lib/ld-linux-aarch64.so.1"),
)

PYTHONS = {"3.11": "bookworm", "3.13": "trixie"}
"""Versions, and the release that has each."""


def mirror() -> str:
    """Where this machine gets its packages from."""
    form = "$(CREATED_BY) $(LABEL) $(COMPONENT) $(REPO_URI)"
    command = ["apt-get", "indextargets", "--format", form]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    for line in lines:
        if line.startswith("Packages Debian main "):
            return line.split()[-1]
    raise SystemExit("no source of Debian's packages is configured here; Debian is needed")


def unpack(machine: Machine, folder: Path) -> None:
    """Fills ``folder`` with the interpreters ``PYTHONS`` for ``machine``."""
    state, root = folder / "apt", folder / "root"
    for path in (state / "lists/partial", state / "cache/archives/partial", root / "usr/lib"):
        path.mkdir(parents=True)
    (state / "status").touch()
    suites = dict.fromkeys(PYTHONS.values())
    lines = (f"deb [signed-by={KEYRING}] {mirror()} {suite} main\n" for suite in suites)
    (state / "sources.list").write_text("".join(lines))
    options = {
        "Dir::Etc::sourcelist": state / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state / "cache",
        "APT::Architecture": machine.architecture,
        "APT::Architectures": machine.architecture,
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    run([*apt, "update"])
    names = [name for version in PYTHONS for name in _packages(version)]
    run([*apt, "-y", "--no-install-recommends", "--download-only", "install", *names])
    # Without what headers depend on: those of the C library are the compiler's.
    headers = [f"libpython{version}-dev" for version in PYTHONS]
    run([*apt, "download", *headers], cwd=state / "cache/archives")
    # Older packages have /lib, newer ones /usr/lib.
    for name in ("lib", "lib64"):
        (root / "usr" / name).mkdir(exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    for package in sorted((state / "cache/archives").glob("*.deb")):
        run(["dpkg-deb", "-x", package, root])
    for version in PYTHONS:
        _write_starter(machine, root, version)


def _packages(version: str) -> tuple[str, ...]:
    """An interpreter, and what wheels of others take from a system."""
    return f"python{version}-minimal", f"libpython{version}-stdlib", "libstdc++6"


def python(folder: Path, version: str) -> Path:
    """The program that starts an interpreter of the tree in ``folder``."""
    return folder / f"root/usr/bin/start-python{version}"


def library(folder: Path, version: str) -> Path:
    """The folder of an interpreter's standard library."""
    return folder / f"root/usr/lib/python{version}"


def headers(folder: Path) -> Path:
    """The folder of Python's headers in the tree, by version, and those of its processor."""
    return folder / "root/usr/include"


def _write_starter(machine: Machine, root: Path, version: str) -> None:
    program = root / f"usr/bin/python{version}"
    libraries = root / "usr/lib" / machine.triple
    start: list[str | Path]
    if machine.is_native:
        start = [root / machine.loader, "--library-path", libraries]
        start += ["--argv0", root / f"usr/bin/start-python{version}", program]
    else:
        start = [f"qemu-{machine.name}-static", "-L", root]
        start += ["-0", root / f"usr/bin/start-python{version}", program]
    starter = python(root.parent, version)
    starter.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, start))} "$@"\n')
    starter.chmod(0o755)


def run(
    command: Sequence[object],
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs a command; where it fails, its output and the end of everything."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{shlex.join(words)}\n{done.stdout}{done.stderr}")
