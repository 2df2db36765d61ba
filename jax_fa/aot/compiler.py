"""Compiles every kernel variant ahead of time: ``python -m jax_fa.aot --output DIR``.

Needs nvidia-cutlass-dsl, and no GPU. Leaves in DIR, for every chosen variant of ``variants.py``:

    NAME.o               machine code for the GPU, and the host function that launches it
    NAME.h               what the exporter says about NAME.o; for reading, not compiled
    KIND.tar.xz          what the emulator executes, of several variants; installed beside the
                         extension
    NAME.ptx             with ``--keep-ptx``: the same for reading
    kernel_table.gen.cc  the C++ side of the list: ffi/kernel_table.h
    report.json          registers, stack, shared memory, seconds, bytes of each variant

What a build does with it: compile ``DIR/*.gen.cc`` with ``ffi/`` on the include path, define
``JAX_FA_HAS_GPU_KERNELS`` for ``ffi/kernel_table_empty.cc`` (or leave that file out), and link
``DIR/*.o``. The objects need no CUDA library: ``ffi/driver.cc`` is all that they call. DIR is all
that a machine without the DSL needs to build. ``--variants none`` writes an empty table, for which
no DSL is needed either.

With several ``--host``, each has its objects and all else in a folder of its own, ``DIR/HOST``. One
compilation of a variant makes the objects of all of them: only the host part differs.

A variant is compiled again only if its sources, its configuration, the DSL or the options changed:
results are kept under a content hash (``--cache``). Whether the DSL is there:
``importlib.util.find_spec("cutlass")``.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import fnmatch
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jax_fa.aot import cubins, kernel_table
from jax_fa.aot.stand_ins import stand_ins
from jax_fa.spec import config, ptx_archives
from jax_fa.spec.arch import ARCHS, arch_named
from jax_fa.spec.key import KernelKey
from jax_fa.spec.variants import Variant, of_families

DSL_REQUIREMENT = "nvidia-cutlass-dsl==4.8.1"

# Baselines: by default the DSL compiles host code for the CPU at hand, which would make a wheel
# that crashes on older ones (AVX-512 was seen in the launch code).
HOSTS = {
    "x86_64": "llvm -mtriple=x86_64-unknown-linux-gnu -mcpu=x86-64",
    "aarch64": "linux-aarch64",
}
"""Processors that the host code can be compiled for, as the DSL's ``--host-target`` names them."""

MAX_OPT_LEVEL = 3
"""Of the DSL, and its default."""

_PACKAGE = Path(__file__).parents[1]
_FAMILIES = _PACKAGE / "spec" / "arch.py"
_CHOICES = {"fwd": "choose_forward", "bwd": "choose_backward", "dbias": "choose_dbias"}
_FORMAT = 3  # of cache entries; raised when this file would make others of the same inputs
_CACHE_DAYS = 30


class AotError(Exception):
    """A failure with its remedy, shown without a traceback."""


@dataclass(frozen=True)
class Job:
    """A variant for a host.

    Attributes:
        variant: what to compile.
        host: key of ``HOSTS``.
        stem: path of the cache entry, without suffix; the content hash is part of it.
    """

    variant: Variant
    host: str
    stem: Path

    def path(self, suffix: str) -> Path:
        """A file of the cache entry."""
        return self.stem.with_name(self.stem.name + suffix)

    @property
    def is_done(self) -> bool:
        """True if the cache holds the entry; its record is written last."""
        return self.path(".json").exists() and self.path(".ptx").exists()


def select(globs: Sequence[str], archs: Sequence[str]) -> list[Variant]:
    """The variants whose name matches one of ``globs``, of those that the families ``archs`` run.

    Raises:
        AotError: a glob matches nothing.
    """
    if list(globs) == ["none"]:
        return []
    chosen = of_families(archs)
    for glob in globs:
        if not any(fnmatch.fnmatchcase(variant.name, glob) for variant in chosen):
            names = ", ".join(variant.name for variant in chosen[:3])
            raise AotError(
                f"no variant of {', '.join(archs)} matches '{glob}'. Names look like {names}; "
                f"--list shows all."
            )
    return [v for v in chosen if any(fnmatch.fnmatchcase(v.name, glob) for glob in globs)]


def choose_config(variant: Variant) -> Any:
    """The configuration that ``variant`` is compiled with."""
    return getattr(config, _CHOICES[variant.operation])(variant.key)


def sources(module: str) -> list[Path]:
    """The files of this package that the variants of a kernel module are made of.

    The module, what makes the arguments that it is compiled with, and imports of both; but for the
    list of families, of which they read one row.
    """
    found: set[Path] = set()
    entry = _PACKAGE.joinpath("kernels", *module.split(".")).with_suffix(".py")
    pending = {entry, _PACKAGE / "aot" / "stand_ins.py"}
    while pending:
        path = pending.pop()
        found.add(path)
        pending |= _imports(path, path.stat().st_mtime_ns) - found
    return sorted(found - {_FAMILIES})


@functools.lru_cache(maxsize=256)
def _imports(path: Path, _modified: int) -> frozenset[Path]:
    """Files of this package that the file at ``path`` imports."""
    names = imported_names(path)
    ours = (name.split(".")[1:] for name in names if name.startswith("jax_fa."))
    files = {_PACKAGE.joinpath(*parts).with_suffix(".py") for parts in ours}
    return frozenset(file for file in files if file.exists())


def imported_names(path: Path) -> set[str]:
    """Modules that the file at ``path`` imports, and what it imports of them, with dots between."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {f"{node.module}"}
    return names


def content_hash(variant: Variant, host: str) -> str:
    """Changes with everything that the object of ``variant`` depends on."""
    digest = hashlib.sha256()
    for path in sources(variant.module):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    row = arch_named(variant.arch)
    digest.update(repr((_FORMAT, variant, row, choose_config(variant), HOSTS[host])).encode())
    digest.update(repr(dsl_distributions()).encode())
    return digest.hexdigest()[:20]


@dataclass(frozen=True)
class DeviceCode:
    """Artefacts that the hosts of a variant share: PTX, seconds to compile."""

    ptx: bytes
    seconds: float


def options_of(key: KernelKey, chosen: Any) -> str:
    """What the DSL is asked for, whatever the host, for ``key`` under the configuration chosen."""
    level = getattr(chosen, "opt_level", MAX_OPT_LEVEL)
    return f"--gpu-arch {key.arch} --opt-level {level} --keep-ptx"


def compile_variant(jobs: Sequence[Job]) -> None:
    """Compiles one variant, for the hosts of ``jobs``, into the cache.

    Runs in a process of its own: the DSL keeps state.
    """
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import HostTarget

    _preload_runtime()
    variant = jobs[0].variant
    _name_kernels(variant.name)
    start = time.perf_counter()
    module = importlib.import_module(f"jax_fa.kernels.{variant.module}")
    chosen = choose_config(variant)
    entry = module.make_entry(variant.key, chosen)
    arguments = stand_ins(variant.operation, variant.key.dtype)
    with tempfile.TemporaryDirectory(dir=jobs[0].stem.parent) as folder:
        options = f"{options_of(variant.key, chosen)} --host-target '{HOSTS[jobs[0].host]}'"
        compiled = cute.compile(entry, *arguments, options=f"{options} --dump-dir {folder}")
        (ptx,) = (path.read_bytes() for path in Path(folder).glob("*.ptx"))
        code = DeviceCode(ptx, time.perf_counter() - start)
        for job in jobs:
            # Read when the host part is translated, after everything of the GPU.
            compiled.host_target = HostTarget(HOSTS[job.host])
            compiled.export_to_c(folder, variant.name, variant.name)
            _store(job, Path(folder), code, _host_code(compiled.ir_module))


def _store(job: Job, made: Path, code: DeviceCode, host_code: str) -> None:
    """Moves what was exported for ``job`` from the folder ``made`` into the cache."""
    variant = job.variant
    header, machine_code = made / f"{variant.name}.h", made / f"{variant.name}.o"
    record = {
        "name": variant.name,
        "symbol": entry_symbol(variant, header.read_text()),
        "config": repr(choose_config(variant)),
        "compile_seconds": round(code.seconds, 2),
        "object_bytes": machine_code.stat().st_size,
        "dynamic_shared_bytes": dynamic_shared_bytes(host_code),
        "kernels": [asdict(kernel) for kernel in cubins.kernels(machine_code)],
    }
    if content_hash(variant, job.host) not in job.stem.name:
        raise AotError(f"{variant.name}: sources changed while it was compiled; run again")
    job.path(".ptx").write_bytes(code.ptx)
    header.replace(job.path(".h"))
    machine_code.replace(job.path(".o"))
    (made / "record").write_text(json.dumps(record))
    (made / "record").replace(job.path(".json"))


def _preload_runtime() -> None:
    """Makes the DSL's runtime library visible to the exporter.

    It resolves the launch functions even though it only writes an object, and does not look into
    the library that it ships them in ("Symbols not found: [ _cudaLaunchKernelEx, ..."; DSL 4.8.1).
    """
    from cutlass.cutlass_dsl import CuTeDSL

    for library in CuTeDSL._get_dsl().get_shared_libs():
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)


def _name_kernels(name: str) -> None:
    """Makes the DSL name kernels of this process after their functions and ``name``.

    By default it spells out their arguments: 180 characters, up to twenty times in a cubin.
    """
    from cutlass.cutlass_dsl import CuTeDSL

    def mangle_name(_dsl: Any, function: str, _arguments: Any, _signature: Any) -> str:
        return f"cutlass_{function}_{name}"

    CuTeDSL.mangle_name = mangle_name


def entry_symbol(variant: Variant, header: str) -> str:
    """The C name of the host entry in an exported header.

    Raises:
        AotError: its parameters are not those that the C++ side fills in.
    """
    entry = re.search(r"^void (_mlir_\w+)\(void \*\*args, int32_t num_args\);", header, re.M)
    wrapper = re.search(r"_wrapper\(\w+ \*module, ([^)]*)\)", header)
    if entry is None or wrapper is None:
        raise AotError(f"{variant.name}: the exported header has no entry in the form expected")
    found = re.findall(r"(\w+ ?\*?) ?(\w+)(?:,|$)", wrapper[1])
    got = [(c_type.replace(" ", ""), name) for c_type, name in found]
    want = kernel_table.c_parameters(variant.operation)
    for position, (have, need) in enumerate(zip(got, want, strict=False)):
        if have != need:
            raise AotError(
                f"{variant.name}: parameter {position} of the entry is '{' '.join(have)}', "
                f"spec/abi.py says '{' '.join(need)}'"
            )
    if len(got) != len(want):
        raise AotError(
            f"{variant.name}: the entry has {len(got)} parameters, spec/abi.py has {len(want)}"
        )
    return entry[1]


def _host_code(module: Any) -> str:
    """The functions of a compiled module as MLIR text, without the machine code beside them."""
    operations = (op.operation for op in module.body.operations)
    return "\n".join(str(op) for op in operations if op.name == "llvm.func")


def dynamic_shared_bytes(host_code: str) -> list[int]:
    """The constant launch parameters in the host part (MLIR text), in program order.

    Field 2 of the launch configuration; the objects themselves do not tell.
    """
    config = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
    found = []
    for field in re.findall(rf"(%\d+) = llvm\.getelementptr %\d+\[0, 2\] :.*{config}", host_code):
        stored = re.search(rf"llvm\.store (%\d+), {field} : i64", host_code)
        value = stored and re.search(
            rf"{stored[1]} = llvm\.mlir\.constant\((\d+) : i64\)", host_code
        )
        if value:
            found.append(int(value[1]))
    return found


def job_of(variant: Variant, host: str, cache: Path) -> Job:
    """The entry of ``cache`` for a variant and a host."""
    return Job(variant, host, cache / f"{variant.name}-{host}-{content_hash(variant, host)}")


def run(jobs: Sequence[Job], num_processes: int) -> None:
    """Compiles what the cache lacks, in parallel, and tells how it goes.

    Raises:
        AotError: some variants do not compile; all others were tried.
    """
    missing = [job for job in jobs if not job.is_done]
    if len(missing) < len(jobs):
        _tell(f"{len(jobs) - len(missing)} of {len(jobs)} objects are unchanged")
    if not missing:
        return
    failures = []
    together: dict[Variant, list[Job]] = {}
    for job in missing:
        together.setdefault(job.variant, []).append(job)
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(num_processes, len(together)))
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {pool.submit(compile_variant, group): group[0] for group in together.values()}
        for count, future in enumerate(as_completed(futures), 1):
            job = futures[future]
            error = future.exception()
            if error is None:
                outcome = _summary(json.loads(job.path(".json").read_text()))
            else:
                is_ours = isinstance(error, AotError)
                failures.append(str(error if is_ours else error.__cause__ or error).strip())
                outcome = f"FAILED: {failures[-1].splitlines()[-1][:200]}"
            _tell(f"[{count}/{len(together)}] {job.variant.name}: {outcome}")
    if failures:
        raise AotError("\n\n".join([*failures, f"{len(failures)} variants do not compile"]))


def _summary(record: dict[str, Any]) -> str:
    kernels = record["kernels"]
    registers = "/".join(str(kernel["registers"]) for kernel in kernels)
    stack = max(kernel["stack_bytes"] for kernel in kernels)
    spills = f", {stack} bytes of stack" if stack else ""
    return (
        f"{record['compile_seconds']:.1f} s, {registers} registers{spills}, "
        f"object {record['object_bytes'] / 1024:.0f} KB"
    )


def write_output(jobs: Sequence[Job], output: Path, keep_ptx: bool) -> None:
    """Copies the results out of the cache and writes the table and the report."""
    _remove_previous(output)
    records, rows, digests = [], [], {}
    for job in jobs:
        job.path(".json").touch()
        for suffix in (".o", ".h", *([".ptx"] if keep_ptx else [])):
            shutil.copyfile(job.path(suffix), output / (job.variant.name + suffix))
        record = json.loads(job.path(".json").read_text())
        digest = digests[job] = hashlib.sha256(job.path(".ptx").read_bytes()).hexdigest()
        records.append(record)
        rows.append(kernel_table.Row(job.variant, record["symbol"], _signatures(record), digest))
    _write_archives(digests, output)
    (output / "kernel_table.gen.cc").write_text(kernel_table.table(rows))
    report = {
        "dsl": dict(dsl_distributions()),
        "hosts": sorted({job.host for job in jobs}),
        "variants": records,
    }
    (output / "report.json").write_text(json.dumps(report, indent=1) + "\n")


def _write_archives(digests: Mapping[Job, str], output: Path) -> None:
    """Writes the PTX of all jobs; what the cache has of archives is not compressed again."""
    together: dict[str, list[Job]] = {}
    for job in digests:
        together.setdefault(ptx_archives.archive_of(job.variant.name), []).append(job)

    def write(name: str) -> None:
        jobs = together[name]
        members = ((job.variant.name, digests[job]) for job in jobs)
        key = hashlib.sha256(repr(sorted(members)).encode()).hexdigest()[:16]
        kept = jobs[0].stem.with_name(f"{name.removesuffix(ptx_archives.SUFFIX)}-{key}.archive")
        if not kept.exists():
            texts = {job.variant.name: job.path(".ptx").read_bytes() for job in jobs}
            with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as made:
                made.write(ptx_archives.packed(texts))
            Path(made.name).replace(kept)
        kept.touch()
        shutil.copyfile(kept, output / name)

    # Compression leaves the interpreter to other threads.
    with ThreadPoolExecutor(_num_cores()) as pool:
        list(pool.map(write, together))


def _signatures(record: dict[str, Any]) -> tuple[kernel_table.Signature, ...]:
    return tuple(
        kernel_table.Signature(kernel["name"], tuple(kernel["param_bytes"]))
        for kernel in record["kernels"]
    )


def _remove_previous(output: Path) -> None:
    """Deletes what an earlier run left in ``output``, so that nothing stale is linked."""
    report = output / "report.json"
    if not report.exists():
        return
    for record in json.loads(report.read_text())["variants"]:
        for suffix in (".o", ".h", ".ptx"):
            (output / (record["name"] + suffix)).unlink(missing_ok=True)
    for archive in output.glob(f"*{ptx_archives.SUFFIX}"):
        archive.unlink()
    report.unlink()


def _prune(cache: Path) -> None:
    """Deletes cache entries that no run has used for a while."""
    oldest = time.time() - _CACHE_DAYS * 24 * 3600
    for record in cache.glob("*.json"):
        if record.stat().st_mtime < oldest:
            for path in cache.glob(record.stem + ".*"):
                path.unlink(missing_ok=True)
    for archive in cache.glob("*.archive"):
        if archive.stat().st_mtime < oldest:
            archive.unlink(missing_ok=True)


def _dsl_version() -> str | None:
    try:
        return importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def dsl_distributions() -> list[tuple[str, str]]:
    """(name, version) of the parts of the DSL; code generators of CUDA 12 and 13 are among them."""
    found = importlib.metadata.distributions()
    parts = ((part.metadata["Name"], part.version) for part in found)
    return sorted({part for part in parts if part[0].startswith("nvidia-cutlass-dsl")})


def _check_dsl() -> None:
    version = _dsl_version()
    if version is None or importlib.util.find_spec("cutlass") is None:
        raise AotError(
            f"compiling GPU kernels needs the CuTe DSL, which is not installed. "
            f"Install it with: pip install {DSL_REQUIREMENT}"
        )
    if f"nvidia-cutlass-dsl=={version}" != DSL_REQUIREMENT:
        _tell(f"nvidia-cutlass-dsl {version} is installed; tested with {DSL_REQUIREMENT}")


def default_cache() -> Path:
    """Where entries are kept unless said otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jax_fa" / "aot"


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def _parser() -> argparse.ArgumentParser:
    archs = [arch.name for arch in ARCHS]
    parser = argparse.ArgumentParser(
        prog="python -m jax_fa.aot", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--output", type=Path, help="folder for objects, table and report")
    parser.add_argument(
        "--variants",
        action="append",
        metavar="GLOB",
        help="compile the names that match; may be repeated; 'none' for an empty table (default *)",
    )
    parser.add_argument(
        "--arch", action="append", choices=archs, help="GPU family; may be repeated (default all)"
    )
    parser.add_argument(
        "--host",
        action="append",
        choices=HOSTS,
        help="processor that the extension will run on; may be repeated "
        f"(default {platform.machine()})",
    )
    parser.add_argument("--jobs", type=int, default=_num_cores(), help="parallel compilations")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="%(default)s")
    parser.add_argument("--keep-ptx", action="store_true", help="leave NAME.ptx beside NAME.o")
    parser.add_argument("--list", action="store_true", help="show the names and stop")
    return parser


def build(variants: Iterable[Variant], options: argparse.Namespace) -> None:
    """Compiles ``variants`` and fills the output folders."""
    chosen = list(variants)
    hosts = list(dict.fromkeys(options.host or [platform.machine()]))
    jobs: dict[str, list[Job]] = {}
    if chosen:
        _check_dsl()
        options.cache.mkdir(parents=True, exist_ok=True)
        _prune(options.cache)
    for host in hosts:
        jobs[host] = [job_of(variant, host, options.cache) for variant in chosen]
    run([job for group in jobs.values() for job in group], options.jobs)
    for host, group in jobs.items():
        output = options.output / host if len(hosts) > 1 else options.output
        output.mkdir(parents=True, exist_ok=True)
        write_output(group, output, options.keep_ptx)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    archs = options.arch or [arch.name for arch in ARCHS]
    try:
        variants = select(options.variants or ["*"], archs)
        if options.list:
            print("\n".join(variant.name for variant in variants))  # noqa: T201
            return 0
        if options.output is None:
            parser.error("--output DIR is needed")
        build(variants, options)
    except AotError as error:
        _tell(f"jax_fa.aot: {error}")
        return 1
    return 0
