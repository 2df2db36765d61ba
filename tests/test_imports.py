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

SEMANTICS = ("band", "problem")
PLANNING = (*SEMANTICS, "config", "variants", "kernels.abi")
DSL = frozenset({"cutlass", "cuda"})


@dataclass(frozen=True)
class Rule:
    """What the modules that match `pattern` may import; the first rule that matches counts.

    `third_party` and `internal` hold at module level and inside functions; `lazy` names packages
    that only a function may import, so that the module loads without them.
    """

    pattern: str
    third_party: frozenset[str]
    internal: tuple[str, ...]
    lazy: frozenset[str] = frozenset()


def rule(pattern, third_party="", internal=(), lazy=""):
    return Rule(pattern, frozenset(third_party.split()), internal, frozenset(lazy.split()))


RULES = (
    # Semantics and planning: the standard library only.
    rule("band"),
    rule("problem", internal=("band",)),
    rule("kernels.abi", internal=SEMANTICS),
    rule("config", internal=(*SEMANTICS, "kernels.abi")),
    rule("variants", internal=(*SEMANTICS, "kernels.abi", "config")),
    # Kernels and the ahead-of-time step: the DSL, never jax. Declarations load without the DSL.
    rule("kernels"),
    rule("kernels.edges", lazy="cutlass"),
    rule("kernels.sm*.plan", internal=(*PLANNING, "kernels.edges")),
    rule("kernels.sm??"),
    rule("kernels.sm???"),
    rule("kernels.*", "cutlass cuda", (*PLANNING, "kernels.*")),
    rule("aot", internal=(*PLANNING, "kernels.*", "aot_*"), lazy="cutlass"),
    rule("aot_*", internal=(*PLANNING, "kernels.*", "aot_*"), lazy="cutlass"),
    rule("inspect", internal=(*PLANNING, "kernels.*", "aot_*")),
    rule("emulator*", "numpy", ("emulator", "emulator.*")),
    # Run time: jax, never the DSL.
    rule("reference", "jax", SEMANTICS),
    rule("bindings", "jax numpy", (*SEMANTICS, "_jax_fa", "reference")),
    rule("sharding", "jax numpy", (*PLANNING, "bindings", "reference")),
    rule("vjp", "jax numpy", (*PLANNING, "bindings", "reference", "sharding")),
    rule(
        "api", "jax numpy", (*PLANNING, "bindings", "reference", "sharding", "vjp"), lazy="emulator"
    ),
    rule("parallel", "jax numpy", (*PLANNING, "sharding", "vjp", "api")),
    rule("flax", "jax numpy flax", (*SEMANTICS, "api")),
    rule("demo", "jax numpy flax optax tqdm", ("", "api", "flax"), lazy="matplotlib orbax"),
    rule("__init__", internal=("api", "bindings", "parallel", "flax", "problem")),
)


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if len(parts) > 1 and parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(tree, package):
    """Yields (absolute dotted name, inside a function) for every import in `tree`."""
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in lazy
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *base.split(".")])
            for alias in node.names:
                yield f"{base}.{alias.name}".strip("."), id(node) in lazy


def internal_module(name):
    """The module of jax_fa that importing the dotted `name` loads, "" for the package itself."""
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in (*MODULES, "_jax_fa"):
        parts.pop()
    return ".".join(parts)


def violations(module, source):
    own = next((r for r in RULES if fnmatchcase(module, r.pattern)), None)
    if own is None:
        return [f"jax_fa.{module} has no rule: add it to RULES with what it may import"]
    found = []
    package = ["jax_fa", *module.split(".")]
    if not MODULES.get(module, Path("x.py")).name == "__init__.py":
        package.pop()
    for name, lazy in imports(ast.parse(source), package):
        top = name.split(".")[0]
        if top == "jax_fa":
            target = internal_module(name)
            if not any(fnmatchcase(target, pattern) for pattern in own.internal):
                found.append(f"jax_fa.{module} imports jax_fa.{target}")
        elif top not in sys.stdlib_module_names and top not in own.third_party:
            if not (lazy and top in own.lazy):
                found.append(f"jax_fa.{module} imports {name}" + " lazily" * lazy)
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
        ("kernels.primitives", "import jax", "jax_fa.kernels.primitives imports jax"),
        ("api", "def f():\n  import cutlass", "jax_fa.api imports cutlass lazily"),
        ("new", "", "jax_fa.new has no rule: add it to RULES with what it may import"),
    ],
)
def test_violation_is_reported(module, source, reported):
    assert violations(module, source) == [reported]


def test_lazy_import_is_allowed_where_declared():
    assert violations("kernels.edges", "def make():\n  from cutlass import pipeline") == []


def test_run_time_rules_exclude_the_dsl_and_kernel_rules_exclude_jax():
    for r in RULES:
        packages = r.third_party | r.lazy
        assert not (packages & DSL and "jax" in packages), r.pattern
        assert "jax" not in packages or "kernels.*" not in r.internal, r.pattern


# C++: kernels.h -> kernels of a platform -> handlers -> module.
INCLUDES = {
    "band.h": set(),
    "kernels.h": set(),
    "module.cc": {"arguments.h", "attention_cpu.h", "band.h", "handlers_*.h", "record.h"},
    "arguments.*": {"arguments.h", "kernels.h"},
    "attention_cpu*": {"attention_cpu*.h", "band.h", "kernels.h"},
    "driver*": {"driver.h"},
    "handlers_cpu.*": {"arguments.h", "attention_cpu.h", "handlers_cpu.h"},
    "handlers_cuda.*": {"arguments.h", "driver.h", "handlers_cuda.h", "kernel_table.h"},
    "kernel_table*": {"driver.h", "kernel_table.h", "kernels.h"},
    "record.*": {"driver.h", "kernel_table.h", "kernels.h", "record.h"},
}


@pytest.mark.parametrize(
    "path",
    [p for p in sorted((ROOT / "ffi").iterdir()) if p.suffix in (".cc", ".h")],
    ids=lambda p: p.name,
)
def test_cxx_file_includes_only_what_its_layer_may(path):
    allowed = next((v for pattern, v in INCLUDES.items() if fnmatchcase(path.name, pattern)), None)
    assert allowed is not None, f"{path.name} has no rule: add it to INCLUDES"
    for header in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE):
        if "/" in header:
            assert header.startswith("xla/ffi/"), header
        else:
            assert any(fnmatchcase(header, pattern) for pattern in allowed), header
