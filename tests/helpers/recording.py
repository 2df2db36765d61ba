"""Compiles one variant, calls its host entry without a GPU, hands over the launches it makes."""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import importlib
import importlib.util
import os
import platform
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers import remembered
from jax_fa.aot import compiler
from jax_fa.aot.stand_ins import stand_ins
from jax_fa.emulator import Launch
from jax_fa.emulator.ptx import parse
from jax_fa.spec.abi import Param
from jax_fa.spec.arch import arch_of_target
from jax_fa.spec.key import KernelKey
from jax_fa.spec.variants import VARIANTS

TESTS = Path(__file__).parents[1]

needs_dsl = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason=f"needs {compiler.DSL_REQUIREMENT}"
)
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

# What exported objects call to launch, as in ffi/driver.cc, handing the arguments on instead.
SEAM = """
#include <string.h>
typedef int (*Take)(const void*, const char*, void**);
static Take take;
void set_take(Take f) { take = f; }
int _cudaLibraryLoadData(void** l, void* c) { *l = c; return 0; }
int _cudaLibraryGetKernel(void** k, void* l, char* n) { *k = strdup(n); return 0; }
int _cudaGetDevice(int* d) { *d = 0; return 0; }
int _cudaDeviceGetAttribute(int* v, int a, int d) { *v = a == 97 ? 232448 : 10; return 0; }
int _cudaFuncSetAttribute(void* f, int a, int v) { return 0; }
int _cudaKernelSetAttributeForDevice(void* k, int a, int v, int d) { return 0; }
int _cuKernelGetAttribute(int* v, int a, void* k, int d) { *v = 0; return 0; }
int _cudaLaunchKernelEx(void* config, void* k, void** args) { return take(config, k, args); }
"""
CODES = {"pointer": "<Q", "int32": "<i", "float32": "<f", "stream": "<Q"}
CLUSTER_DIMENSION = 4
"""Of cudaLaunchAttributeID."""


class LaunchAttribute(ctypes.Structure):
    """cudaLaunchAttribute."""

    _fields_ = [
        ("id", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
        ("value", ctypes.c_uint32 * 16),
    ]


class LaunchConfig(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint32),
    ]

    @property
    def cluster(self) -> tuple[int, ...]:
        """Extents of a cluster."""
        attributes = self.attributes[: self.num_attributes]
        found = [tuple(x.value[:3]) for x in attributes if x.id == CLUSTER_DIMENSION]
        return found[0] if found else (1, 1, 1)


class Built(NamedTuple):
    """A compiled variant: its PTX, its library, and the host entry and prefix of names in there."""

    ptx: str
    library: ctypes.CDLL
    entry: str
    prefix: str


def build(
    folder: Path, module: str, key: KernelKey, config: Any, remember_as: str | None = None
) -> Built:
    """Compiles the variant ``key`` of a kernel module such as "sm100.fwd".

    What a test has changed in that may depend on the test and on ``remember_as`` only: under both,
    the result is remembered (``remembered.py``).
    """
    make = functools.partial(_compile, folder, module, key, config)
    if remember_as is None:
        make()
    else:
        remembered.make_once(key_of_build(module, key, config, remember_as), folder, make)
    return _linked(folder, "k")


def key_of_build(module: str, key: KernelKey, config: Any, name: str) -> str:
    """Changes with all that a build by the test that runs depends on, and with ``name``."""
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    options = (compiler.options_of(key, config), compiler.dsl_distributions(), platform.machine())
    row = arch_of_target(key.arch)
    digest = hashlib.sha256(repr((test, name, module, key, config, row, options)).encode())
    own = TESTS.parent / test.partition("::")[0]
    for path in (*compiler.sources(module), *sources_of_test(own)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def sources_of_test(own: Path) -> list[Path]:
    """The file of a test, and those of ``tests`` that it imports."""
    found, pending = set[Path](), {own}
    while pending:
        path = pending.pop()
        found.add(path)
        parts = [name.split(".") for name in compiler.imported_names(path)]
        files = {
            home.joinpath(*x).with_suffix(".py") for x in parts for home in (own.parent, TESTS)
        }
        pending |= {file for file in files if file.exists()} - found
    return sorted(found)


def _compile(folder: Path, module: str, key: KernelKey, config: Any) -> None:
    """Leaves the object, header and PTX of a variant in ``folder``."""
    import cutlass.cute as cute

    compiler._preload_runtime()
    kernels = importlib.import_module(f"jax_fa.kernels.{module}")
    entry = kernels.make_entry(key, config)
    # Of the same PTX, which is what runs here, the assembler makes machine code in less time.
    options = f"{compiler.options_of(key, config)} --opt-level 1 --dump-dir {folder}"
    operation = "fwd" if key.is_split else module.split(".")[1].partition("_")[0]
    arguments = stand_ins(operation, key.dtype)
    cute.compile(entry, *arguments, options=options).export_to_c(str(folder), "k", "k")
    gc.collect()  # few objects, but of the compiler's memory


def prebuilt(
    folder: Path, module: str, key: KernelKey, config: Any, remember_as: str | None = None
) -> Built:
    """As ``build``, from the cache of ``jax_fa.aot`` if it is a variant of the wheel."""
    same = (variant for variant in VARIANTS if (variant.module, variant.key) == (module, key))
    variant, host = next(same, None), platform.machine()
    if variant is None or host not in compiler.HOSTS or config != compiler.choose_config(variant):
        return build(folder, module, key, config, remember_as)
    cache = Path(os.environ.get("JAX_FA_AOT_CACHE") or compiler.default_cache())
    cache.mkdir(parents=True, exist_ok=True)
    job = compiler.job_of(variant, host, cache)
    compiler.run([job], 1)
    for suffix in (".h", ".o", ".ptx"):
        shutil.copyfile(job.path(suffix), folder / (variant.name + suffix))
    return _linked(folder, variant.name)


def _linked(folder: Path, name: str) -> Built:
    """A variant whose object, header and PTX lie in ``folder``."""
    (folder / "seam.c").write_text(SEAM)
    library = folder / "k.so"
    # -Bsymbolic: the DSL's own runtime, loaded for the export, has functions of the same names.
    flags = ["-shared", "-fPIC", "-w", "-Wl,-Bsymbolic"]
    command = ["cc", *flags, "-o", str(library), str(folder / f"{name}.o"), str(folder / "seam.c")]
    subprocess.run(command, check=True, capture_output=True)
    header = (folder / f"{name}.h").read_text()
    found = re.search(rf"^void (_mlir_{name}__mlir_ciface\w+)", header, re.M)
    assert found is not None
    (ptx,) = folder.glob("*.ptx")
    return Built(ptx.read_text(), ctypes.CDLL(str(library)), found[1], f"_mlir_{name}")


def _pointers(*objects: Any) -> Any:
    addresses = [ctypes.cast(ctypes.pointer(x), ctypes.c_void_p) for x in objects]
    return (ctypes.c_void_p * len(addresses))(*addresses)


def record(built: Built, params: tuple[Param, ...], values: dict[str, float]) -> list[Launch]:
    """The launches that the host entry makes of ``values``, by names of ``params``; else 0."""
    library, module = built.library, parse(built.ptx)
    launches: list[Launch] = []

    @ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)
    )
    def take(config: int, name: bytes, args: Any) -> int:
        made = LaunchConfig.from_address(config)
        kernel = module.kernel(name.decode())
        raw = tuple(ctypes.string_at(args[i], x.size) for i, x in enumerate(kernel.params))
        grid, block = tuple(made.grid), tuple(made.block)
        shared, cluster = made.shared_bytes, made.cluster
        launches.append(Launch(grid, block, raw, shared, cluster, kernel=kernel.name))
        return 0

    library.set_take(take)
    handle, status, device = (
        ctypes.pointer(x) for x in (ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int())
    )
    getattr(library, f"{built.prefix}_cuda_init")(_pointers(handle, status))
    load = getattr(library, f"{built.prefix}_cuda_load_to_device")
    load(_pointers(handle, device.contents, status))
    packed = [struct.pack(CODES[kind], values.get(name, 0)) for name, kind in params]
    buffers = [ctypes.create_string_buffer(x) for x in (*packed, bytes(4))]
    addresses = (ctypes.c_void_p * len(buffers))(*[ctypes.addressof(b) for b in buffers])
    getattr(library, built.entry)(addresses, len(buffers))
    return launches
