"""Emulated launches that passed before are not run again: ``JAX_FA_LAUNCH_CACHE=FOLDER``.

Nor are kernels that a test has made faulty compiled again (``recording.build``).

An emulated launch depends on its PTX, its parameters, the memory that it finds, its schedule, and
the emulator. What it made of memory, and its report, are kept under a hash of all these; whatever
a test then says about the results, it says anew. The names of kernels do not count, so that a
change of sources that compiles to the same text runs nothing. Faults are not kept. Launches of
``implementation="emulated"`` are, and those that tests make by ``emulate`` of this module.

Without the variable every launch runs, and every kernel is compiled.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import platform
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jax_fa.emulator
from jax_fa.aot.compare import without_names
from jax_fa.emulator import Launch, Memory, Options, Report, native

FOLDER = os.environ.get("JAX_FA_LAUNCH_CACHE", "")
FORMAT = 2
"""Of keys and entries; raised when this module would make others of the same launches."""
DAYS = 14
"""After which an entry that no run has used is deleted."""

_ROOT = Path(__file__).parents[2]


class Entry(NamedTuple):
    """What a launch left: its report, and the bytes of arrays that it changed, by address."""

    report: Report
    changed: dict[int, bytes]


class Remembered:
    """``emulate``, with a memory on disk.

    Attributes:
        counts: launches "remembered" and "run".
    """

    def __init__(self, folder: Path, run: Callable[..., Report] = jax_fa.emulator.emulate) -> None:
        self.folder, self.counts = folder, Counter[str]()
        self._run = run

    def __call__(
        self,
        ptx: str,
        launch: Launch,
        memory: Memory,
        *,
        seed: int = 0,
        options: Options | None = None,
    ) -> Report:
        """As ``emulate``, which see."""
        path = self.folder / _key(ptx, launch, memory, seed, options or Options())
        data = {region.base: region.data for region in memory.regions}
        if path.exists():
            self.counts["remembered"] += 1
            entry: Entry = pickle.loads(zlib.decompress(path.read_bytes()))
            for base, content in entry.changed.items():
                data[base][:] = np.frombuffer(content, np.uint8)
            path.touch()
            return entry.report
        self.counts["run"] += 1
        before = {base: content.copy() for base, content in data.items()}
        report = self._run(ptx, launch, memory, seed=seed, options=options)
        if report.findings:
            return report
        changed = {
            base: content.tobytes()
            for base, content in data.items()
            if not np.array_equal(content, before[base])
        }
        _write(path, zlib.compress(pickle.dumps(Entry(report, changed)), 1))
        return report

    def prune(self) -> None:
        """Deletes what no run has used for a while."""
        oldest = time.time() - DAYS * 24 * 3600
        for path in self.folder.glob("*"):
            with contextlib.suppress(FileNotFoundError):  # Another worker was first.
                if path.stat().st_mtime < oldest:
                    path.unlink()


memory = Remembered(Path(FOLDER)) if FOLDER else None
"""That of this process."""

emulate: Callable[..., Report] = memory or jax_fa.emulator.emulate


def make_once(key: str, folder: Path, make: Callable[[], None]) -> None:
    """Has ``make`` leave files in ``folder``, unless what it left is kept under ``key``."""
    path = Path(FOLDER) / f"{key}.files"
    if FOLDER and path.exists():
        for name, content in pickle.loads(zlib.decompress(path.read_bytes())).items():
            (folder / name).write_bytes(content)
        path.touch()
        return
    make()
    if FOLDER:
        contents = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        _write(path, zlib.compress(pickle.dumps(contents), 1))


def _write(path: Path, content: bytes) -> None:
    """At once: another worker may look for the same launch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.replace(path)


def _key(ptx: str, launch: Launch, memory: Memory, seed: int, options: Options) -> str:
    text = _text(ptx)
    kernel = text.kernels.index(launch.kernel) if launch.kernel else 0
    digest = hashlib.sha256(_emulator() + text.digests[kernel])
    parts: list[Any] = [*launch.grid, *launch.block, *launch.cluster, launch.shared_bytes]
    parts += [seed, options, *_values(launch.params, text.reads[kernel])]
    for region in memory.regions:
        parts += [(region.base, region.name), hashlib.sha256(region.data).hexdigest()]
    for part in parts:
        digest.update(repr(part).encode() + b"\0")
    return digest.hexdigest()


class Span(NamedTuple):
    """Bytes of a parameter."""

    parameter: int
    start: int
    end: int


class Text(NamedTuple):
    """Of the kernels of a text: names, hashes without these, and the parameters that they read."""

    kernels: list[str]
    digests: list[bytes]
    reads: list[frozenset[Span]]


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)")
_DECLARED = re.compile(r"([\w$]+)(?:\[\d+\])?\s*(?:,|$)")
_READ = re.compile(r"ld\.param(?:\.v(\d))?\.[bsuf](\d+)\s[^\[\n]*\[([\w$]+)(?:\+(\d+))?\]")
_WORD = re.compile(r"[\w$]+")
_LARGEST = 1 << 16
_TENSOR_MAP_BYTES = 128
_TENSOR_MAP_READ = 64


@functools.lru_cache(maxsize=16)
def _text(ptx: str) -> Text:
    """What the key takes of a text; parameters named elsewhere than in loads count whole."""
    headers = _ENTRY.findall(ptx)
    rest = _READ.sub("", _ENTRY.sub("", ptx))
    loads, words = _READ.findall(ptx), set(_WORD.findall(rest))
    reads = []
    for _, header in headers:
        number = {name: i for i, name in enumerate(_DECLARED.findall(header))}
        spans = {Span(number[name], 0, _LARGEST) for name in number.keys() & words}
        for vector, bits, name, offset in loads:
            if name in number:
                start, size = int(offset or 0), int(vector or 1) * int(bits) // 8
                spans.add(Span(number[name], start, start + size))
        reads.append(frozenset(spans))
    head, *own = re.split(r"^(?=\.visible \.entry)", without_names(ptx), flags=re.M)
    # With the number of its first line: reports and schedules speak of lines.
    first = [ptx[: match.start()].count("\n") for match in _ENTRY.finditer(ptx)]
    texts = zip(own, first, strict=True)
    digests = [hashlib.sha256(f"{head}{text}{line}".encode()).digest() for text, line in texts]
    return Text([kernel for kernel, _ in headers], digests, reads)


def _values(params: Sequence[bytes], spans: frozenset[Span]) -> list[tuple[Span, bytes]]:
    """The bytes that a kernel reads: hosts leave gaps of structs, and of TMA descriptors, unset."""
    found = []
    for span in sorted(spans):
        content = params[span.parameter][span.start : span.end]
        if len(content) == _TENSOR_MAP_BYTES:
            content = content[:_TENSOR_MAP_READ]
        found.append((span, content))
    return found


@functools.cache
def _emulator() -> bytes:
    """Changes with all that may change what a launch does beside its arguments."""
    (package,) = jax_fa.emulator.__path__
    files = [*Path(package).glob("*.py"), *(_ROOT / "ffi").glob("emulator_*.*")]
    versions = (FORMAT, sys.version, np.__version__, platform.machine(), native.core is not None)
    digest = hashlib.sha256(repr(versions).encode())
    for path in sorted(files, key=lambda path: path.name):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()
