"""Stand-ins for what an installation meets: a driver with GPUs, the DSL, what it compiled.

What stands in for compiled kernels are entries of the cache of ``jax_fa.aot``: their objects define
the functions that the extension links against, and nothing calls them.
"""

import json
import subprocess
import sys
from pathlib import Path

from jax_fa.aot import compiler
from jax_fa.spec.variants import VARIANTS, Variant

ROOT = Path(__file__).resolve().parents[2]

_DRIVER = """
#include <string.h>
static const int capabilities[] = {%s};
int cuInit(unsigned flags) { return %d; }
int cuDeviceGetCount(int* count) { *count = sizeof capabilities / sizeof *capabilities; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char* name, int size, int device) { strncpy(name, "Stand-in", size); return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? capabilities[device] / 10 : capabilities[device] %% 10;
  return attribute != 75 && attribute != 76;
}
"""


def driver(folder, capabilities, failure=0):
    """A folder with a libcuda.so.1 that shows GPUs of these capabilities, times ten."""
    folder.mkdir(exist_ok=True)
    source = folder / "driver.c"
    source.write_text(_DRIVER % (", ".join(map(str, capabilities)), failure))
    _compile(source, folder / "libcuda.so.1", "-shared", "-fPIC")
    return folder


def dsl(folder):
    """A folder for PYTHONPATH where the pinned DSL seems to be installed."""
    name, version = compiler.DSL_REQUIREMENT.split("==")
    record = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "cutlass").mkdir()
    (folder / "cutlass" / "__init__.py").touch()
    return folder


def fill_cache(folder, environment):
    """Entries of the cache ``folder`` for every variant, as builds in ``environment`` look for."""
    folder.mkdir(parents=True)
    code = (
        "import run_aot, json, platform\n"
        "from jax_fa.aot.compiler import content_hash\n"
        "from jax_fa.spec.variants import VARIANTS\n"
        "host = platform.machine()\n"
        "hashes = [f'{v.name}-{host}-{content_hash(v, host)}' for v in VARIANTS]\n"
        "print(json.dumps(hashes))"
    )
    path = f"{ROOT / 'ffi'}:{environment['PYTHONPATH']}"
    command = [sys.executable, "-c", code]
    printed = subprocess.check_output(command, env={**environment, "PYTHONPATH": path})
    objects = _objects(folder)
    for variant, entry in zip(VARIANTS, json.loads(printed), strict=True):
        ptx = f"// {variant.name}".encode()
        kernels = [{"name": "kernel", "param_bytes": [8]}]
        record = {"name": variant.name, "symbol": _functions(variant)[2], "kernels": kernels}
        (folder / f"{entry}.o").write_bytes(objects[variant.name])
        (folder / f"{entry}.h").touch()
        (folder / f"{entry}.ptx").write_bytes(ptx)
        (folder / f"{entry}.json").write_text(json.dumps(record))


def _functions(variant):
    prefix = f"_mlir_{variant.name}"
    return f"{prefix}_cuda_init", f"{prefix}_cuda_load_to_device", f"{prefix}_call"


def _objects(folder):
    """Objects by variant: of those that come together the first defines the functions of all."""
    empty = _object(folder, "")
    objects = {variant.name: empty for variant in VARIANTS}
    kinds: dict[tuple[str, str], list[Variant]] = {}
    for variant in VARIANTS:
        kinds.setdefault((variant.kind, variant.arch), []).append(variant)
    for alike in kinds.values():
        names = [name for variant in alike for name in _functions(variant)]
        objects[alike[0].name] = _object(folder, "".join(f"void {name}() {{}}\n" for name in names))
    return objects


def _object(folder, text):
    source = folder / "stand_in.c"
    source.write_text(text)
    _compile(source, source.with_suffix(".o"), "-c", "-fPIC")
    return source.with_suffix(".o").read_bytes()


def _compile(source, output, *options):
    subprocess.run(["cc", *options, "-o", output, source], check=True)
