"""Who may import whom. Parses the sources, so nothing has to be importable."""

import ast
import re
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jax_fa"
EXTENSION = "_jax_fa"


@dataclass(frozen=True)
class Layer:
    """Modules that match `pattern`, and the packages outside jax_fa that they may import.

    `lazy` packages only inside functions, so that the module loads without them. The first layer
    that matches a module holds it, one that names it in full before those with a "*".
    """

    pattern: str
    third_party: str = ""
    lazy: str = ""


# Bottom up. A module imports from its own layer, the layers below it in its tower, and the towers
# that BELOW names. `__init__` is what `import jax_fa` runs.
TOWERS = {
    "planning": (
        Layer("band"),
        Layer("mask_mods"),
        Layer("problem"),
        Layer("kernels.abi"),
        Layer("config"),
        Layer("variants"),
        Layer("gpus"),
        Layer("installation"),
        Layer("choice"),
        Layer("support"),
        Layer("roofline"),
    ),
    "kernels": (
        Layer("kernels"),
        Layer("kernels.sm90"),
        Layer("kernels.sm100"),
        Layer("kernels.edges", lazy="cutlass"),
        Layer("kernels.sm*.plan"),
        Layer("kernels.sm*.plan_*"),
        Layer("kernels.banks"),
        Layer("kernels.primitives", "cutlass cuda"),
        Layer("kernels.tiles", "cutlass cuda"),
        Layer("kernels.softmax", "cutlass cuda"),
        Layer("kernels.segments", "cutlass cuda"),
        Layer("kernels.whole", "cutlass cuda"),
        Layer("kernels.forward_work", "cutlass cuda"),
        Layer("kernels.combine", "cutlass cuda"),
        Layer("kernels.backward_rows", "cutlass cuda"),
        Layer("kernels.backward_work", "cutlass cuda"),
        Layer("kernels.host", "cutlass cuda"),
        Layer("kernels.sm*.*_work", "cutlass cuda"),
        Layer("kernels.sm*.*_roles", "cutlass cuda"),
        Layer("kernels.sm*.*", "cutlass cuda"),
        Layer("aot_*"),
        Layer("aot", lazy="cutlass"),
        Layer("inspect", lazy="matplotlib"),
    ),
    "emulator": (
        Layer("emulator.*", "numpy"),
        Layer("emulator"),
        Layer("emulator.__main__", "numpy"),
    ),
    "runtime": (
        Layer("sequences", "jax"),
        Layer("reference", "jax"),
        Layer("blockwise", "jax"),
        Layer("bindings", "jax numpy"),
        Layer("emulated", "jax numpy"),
        Layer("sharding", "jax numpy"),
        Layer("partitioning", "jax jaxlib numpy"),
        Layer("operations", "jax numpy"),
        Layer("vjp", "jax"),
        Layer("checks", "jax numpy"),
        Layer("arguments", "jax numpy"),
        Layer("api", "jax numpy"),
        Layer("drop_in", "jax"),
        Layer("parallel", "jax"),
        Layer("__init__"),
        Layer("__main__", "jax jaxlib"),
        Layer("flax", "jax flax"),
        Layer("demo_*", "jax numpy flax optax orbax"),
        Layer("demo", "jax numpy flax tqdm", lazy="matplotlib"),
    ),
}
BELOW = {
    "planning": (),
    "kernels": ("planning",),
    "emulator": ("planning",),
    "runtime": ("planning", "emulator"),
}


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def place(module):
    """(tower, index of the layer) of a module, or None if no layer matches it."""
    matching = [
        (layer.pattern != module, tower, index)
        for tower, layers in TOWERS.items()
        for index, layer in enumerate(layers)
        if fnmatchcase(module, layer.pattern)
    ]
    return min(matching)[1:] if matching else None


def may_import(module, target):
    """Whether the module `module` of jax_fa may import its module `target`."""
    if target == EXTENSION:
        return module in ("bindings", "emulator.native")
    (tower, index), (target_tower, target_index) = place(module), place(target)
    return target_tower in BELOW[tower] or (target_tower == tower and target_index <= index)


def imports(tree, package):
    """Yields (absolute dotted name, inside a function) for every import in `tree`."""
    lazy = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node in lazy
        elif isinstance(node, ast.ImportFrom):
            outer = package[: len(package) - node.level + 1] if node.level else []
            base = [*outer, *(node.module or "").split(".")]
            for alias in node.names:
                yield ".".join(filter(None, [*base, alias.name])), node in lazy


def internal_module(name):
    """The module of jax_fa that holds the dotted `name`."""
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in (*MODULES, EXTENSION):
        parts.pop()
    return ".".join(parts) or "__init__"


def violations(module, source):
    if place(module) is None:
        return [f"jax_fa.{module} is in no layer: add it to TOWERS"]
    tower, index = place(module)
    layer = TOWERS[tower][index]
    is_package = MODULES.get(module, PACKAGE).name == "__init__.py"
    package = ["jax_fa", *module.split(".")][: None if is_package else -1]
    found = []
    for name, lazy in imports(ast.parse(source), package):
        top = name.split(".")[0]
        if top == "jax_fa":
            if not may_import(module, internal_module(name)):
                found.append(f"jax_fa.{module} imports jax_fa.{internal_module(name)}")
        elif top not in {*sys.stdlib_module_names, *layer.third_party.split()}:
            if not (lazy and top in layer.lazy.split()):
                found.append(f"jax_fa.{module} imports {name}")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_what_its_layer_may(module):
    assert violations(module, MODULES[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "reported"),
    [
        ("band", "import numpy", "jax_fa.band imports numpy"),
        ("band", "from .problem import Problem", "jax_fa.band imports jax_fa.problem"),
        ("kernels.edges", "import cutlass", "jax_fa.kernels.edges imports cutlass"),
        ("kernels.softmax", "import jax", "jax_fa.kernels.softmax imports jax"),
        ("kernels.softmax", "from jax_fa import vjp", "jax_fa.kernels.softmax imports jax_fa.vjp"),
        ("api", "def f():\n  import cutlass", "jax_fa.api imports cutlass"),
        ("api", "from jax_fa import _jax_fa", "jax_fa.api imports jax_fa._jax_fa"),
        (
            "emulator.dot",
            "from jax_fa import _jax_fa",
            "jax_fa.emulator.dot imports jax_fa._jax_fa",
        ),
        ("vjp", "import jax_fa", "jax_fa.vjp imports jax_fa.__init__"),
        ("new", "", "jax_fa.new is in no layer: add it to TOWERS"),
    ],
)
def test_violation_is_reported(module, source, reported):
    assert violations(module, source) == [reported]


def test_lazy_import_is_allowed_where_declared():
    assert violations("kernels.edges", "def make():\n  from cutlass import pipeline") == []


def test_only_bindings_uses_jax_ffi():
    users = {m for m, path in MODULES.items() if re.search(r"\bjax\.ffi\b", path.read_text())}
    assert users == {"bindings"}


# C++, the same for `#include "..."`: kernels.h -> a platform's kernels -> handlers -> module.
INCLUDES = {
    "band.h": (),
    "kernels.h": (),
    "checks.*": ("checks.h", "kernels.h"),
    "loop*": ("loop.h",),
    "ffi_call.*": ("ffi_call.h",),
    "fuzz.h": ("kernels.h",),
    "attention_cpu_fuzz.cc": ("attention_cpu.h", "checks.h", "fuzz.h"),
    "handlers_fuzz.cc": ("ffi_call.h", "fuzz.h", "handlers_cpu.h", "handlers_cuda.h"),
    "handlers_test.cc": ("ffi_call.h", "handlers_cpu.h", "handlers_cuda.h"),
    "arguments.*": ("arguments.h", "checks.h", "kernels.h"),
    "attention_cpu*": ("attention_cpu*.h", "band.h", "kernels.h"),
    "driver*": ("driver.h",),
    "emulator_block*": ("emulator_block.h",),
    "emulator_dot*": ("emulator_dot.h",),
    "emulator_bindings.*": ("emulator_*.h",),
    "kernel_table*": ("driver.h", "kernel_table.h", "kernels.h"),
    "handlers_cpu.*": ("arguments.h", "attention_cpu.h", "handlers_cpu.h", "kernels.h", "loop.h"),
    "handlers_cuda.*": (
        *("arguments.h", "checks.h", "driver.h", "handlers_cuda.h", "kernel_table.h"),
    ),
    "record.*": ("checks.h", "driver.h", "kernel_table.h", "kernels.h", "record.h"),
    "module.cc": ("*",),
}
CXX_FILES = {p.name: p for p in sorted((ROOT / "ffi").iterdir()) if p.suffix in (".cc", ".h")}


@pytest.mark.parametrize("name", CXX_FILES)
def test_cxx_file_includes_only_what_its_layer_may(name):
    allowed = next((v for pattern, v in INCLUDES.items() if fnmatchcase(name, pattern)), None)
    assert allowed is not None, f"{name} is in no layer: add it to INCLUDES"
    for header in re.findall(r'^#include "([^"]+)"', CXX_FILES[name].read_text(), re.MULTILINE):
        known = header in CXX_FILES and any(fnmatchcase(header, pattern) for pattern in allowed)
        assert known or header.startswith("xla/ffi/"), f"{name} includes {header}"
