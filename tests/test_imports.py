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
    "spec": (
        Layer("spec"),
        Layer("mask_mods"),
        Layer("spec.band"),
        Layer("spec.band_of_keys"),
        Layer("spec.arch"),
        Layer("spec.division"),
        Layer("spec.backward_division"),
        Layer("spec.schema"),
        Layer("spec.problem"),
        Layer("spec.key"),
        Layer("spec.names"),
        Layer("spec.ptx_archives"),
        Layer("spec.abi"),
        Layer("spec.scratch"),
        Layer("spec.schema_cpp"),
        Layer("spec.config_*"),
        Layer("spec.chosen_*"),
        Layer("spec.config"),
        Layer("spec.variants"),
    ),
    "kernels": (
        Layer("kernels"),
        Layer("kernels.sm90"),
        Layer("kernels.sm100"),
        Layer("kernels.mma_sync"),
        Layer("kernels.mma_sync.panels"),
        Layer("kernels.edges", lazy="cutlass"),
        Layer("kernels.mma_sync.plan"),
        Layer("kernels.sm100.tensor_plan", lazy="cutlass"),
        Layer("kernels.sm*.plan"),
        Layer("kernels.sm*.plan_*"),
        Layer("kernels.kept", "cutlass cuda"),
        Layer("kernels.rings", "cutlass cuda"),
        Layer("kernels.primitives", "cutlass cuda"),
        Layer("kernels.loads", "cutlass cuda"),
        Layer("kernels.tiles", "cutlass cuda"),
        Layer("kernels.segments", "cutlass cuda"),
        Layer("kernels.dense_mask", "cutlass cuda"),
        Layer("kernels.dense_mask_columns", "cutlass cuda"),
        Layer("kernels.fragments", "cutlass cuda"),
        Layer("kernels.softmax", "cutlass cuda"),
        Layer("kernels.bias", "cutlass cuda"),
        Layer("kernels.sm100.clusters", "cutlass cuda"),
        Layer("kernels.sm100.umma", "cutlass cuda"),
        Layer("kernels.sm100.arithmetic", "cutlass cuda"),
        Layer("kernels.sm*.bwd_instructions", "cutlass cuda"),
        Layer("kernels.fragment_softmax", "cutlass cuda"),
        Layer("kernels.sm100.row_softmax", "cutlass cuda"),
        Layer("kernels.unmasked", "cutlass cuda"),
        Layer("kernels.forward_work", "cutlass cuda"),
        Layer("kernels.fragment_rows", "cutlass cuda"),
        Layer("kernels.fragment_bias", "cutlass cuda"),
        Layer("kernels.combine", "cutlass cuda"),
        Layer("kernels.backward_rows", "cutlass cuda"),
        Layer("kernels.backward_work", "cutlass cuda"),
        Layer("kernels.fragment_keys", "cutlass cuda"),
        Layer("kernels.fragment_bias_columns", "cutlass cuda"),
        Layer("kernels.half_powers", "cutlass cuda"),
        Layer("kernels.dbias_work", "cutlass cuda"),
        Layer("kernels.dbias_rows", "cutlass cuda"),
        Layer("kernels.*_host", "cutlass cuda"),
        Layer("kernels.mma_sync.products", "cutlass cuda"),
        Layer("kernels.mma_sync.probabilities", "cutlass cuda"),
        Layer("kernels.mma_sync.loads", "cutlass cuda"),
        Layer("kernels.mma_sync.fwd_order", "cutlass cuda"),
        Layer("kernels.mma_sync.*_work", "cutlass cuda"),
        Layer("kernels.mma_sync.*", "cutlass cuda"),
        Layer("kernels.sm*.shell", "cutlass cuda"),
        Layer("kernels.sm90.bias_chunks", "cutlass cuda"),
        Layer("kernels.sm90.bias_product", "cutlass cuda"),
        Layer("kernels.sm*.*_work", "cutlass cuda"),
        Layer("kernels.sm90.bwd_claims", "cutlass cuda"),
        Layer("kernels.sm90.bwd_steps", "cutlass cuda"),
        Layer("kernels.sm90.fwd_steps", "cutlass cuda"),
        Layer("kernels.sm90.bwd_load", "cutlass cuda"),
        Layer("kernels.sm90.bwd_bias", "cutlass cuda"),
        Layer("kernels.sm90.bwd_bias_product", "cutlass cuda"),
        Layer("kernels.sm90.bwd_dbias", "cutlass cuda"),
        Layer("kernels.sm90.bwd_powers", "cutlass cuda"),
        Layer("kernels.sm90.bwd_statistics", "cutlass cuda"),
        Layer("kernels.sm90.dbias_steps", "cutlass cuda"),
        Layer("kernels.sm90.dbias_product", "cutlass cuda"),
        Layer("kernels.sm*.*_lists", "cutlass cuda"),
        Layer("kernels.sm*.*_roles", "cutlass cuda"),
        Layer("kernels.sm*.*", "cutlass cuda"),
    ),
    "aot": (
        Layer("aot"),
        Layer("aot.cubins"),
        Layer("aot.kernel_table"),
        Layer("aot.compare"),
        Layer("aot.stand_ins", lazy="cutlass"),
        Layer("aot.compiler", lazy="cutlass"),
        Layer("aot.__main__"),
    ),
    "analysis": (
        Layer("analysis"),
        Layer("analysis.drawing", lazy="matplotlib"),
        Layer("analysis.roofline"),
        Layer("analysis.timeline"),
        Layer("analysis.banks"),
        Layer("analysis.occupancy"),
        Layer("analysis.ptx_text"),
        Layer("analysis.machine_code"),
        Layer("analysis.audit"),
        Layer("analysis.plan_ledger"),
        Layer("analysis.backward_ledger"),
        Layer("analysis.listing"),
        Layer("analysis.__main__"),
    ),
    "emulator": (
        Layer("emulator.*", "numpy"),
        Layer("emulator"),
        Layer("emulator.__main__", "numpy"),
    ),
    "runtime": (
        Layer("runtime"),
        Layer("runtime.gpus"),
        Layer("runtime.installation"),
        Layer("runtime.dispatch"),
        Layer("runtime.support"),
        Layer("runtime.fallback"),
        Layer("runtime.sequences", "jax"),
        Layer("runtime.masks", "jax numpy"),
        Layer("runtime.head_sizes", "jax"),
        Layer("runtime.reference", "jax"),
        Layer("runtime.parts", "jax"),
        Layer("runtime.blockwise", "jax"),
        Layer("runtime.lowering", "jax"),
        Layer("runtime.bindings", "jax numpy"),
        Layer("runtime.emulation_settings", "jax"),
        Layer("runtime.emulation", "jax numpy"),
        Layer("runtime.sharding", "jax numpy"),
        Layer("runtime.partitioning", "jax numpy"),
        Layer("runtime.primitives", "jax numpy"),
        Layer("runtime.vjp", "jax"),
        Layer("runtime.layouts", "jax"),
        Layer("runtime.context", "jax numpy"),
        Layer("runtime.checks", "jax numpy"),
        Layer("runtime.mask_functions", "jax numpy"),
        Layer("runtime.arguments", "jax numpy"),
        Layer("runtime.eager", "jax numpy"),
        Layer("runtime.strategies", "jax numpy"),
        Layer("runtime.partitioner", "jax jaxlib numpy"),
    ),
    "interface": (
        Layer("api", "jax numpy"),
        Layer("drop_in", "jax"),
        Layer("parallel", "jax"),
        Layer("__init__"),
        Layer("__main__", "jax jaxlib"),
        Layer("layer_masks", "jax numpy"),
        Layer("flax", "jax numpy", lazy="flax"),
        Layer("equinox", "jax equinox"),
    ),
    "check": (Layer("check", "jax numpy"),),
    "demo": (
        Layer("demo"),
        Layer("demo.data", "jax numpy flax optax orbax"),
        Layer("demo.model", "jax numpy flax optax orbax"),
        Layer("demo.meshes", "jax numpy flax optax orbax"),
        Layer("demo.training", "jax numpy flax optax orbax"),
        Layer("demo.checkpoint", "jax numpy flax optax orbax"),
        Layer("demo.program", "jax numpy flax tqdm"),
        Layer("demo.__main__"),
    ),
}
BELOW = {
    "spec": (),
    "kernels": ("spec",),
    "aot": ("spec",),
    "analysis": ("spec", "kernels", "aot"),
    "emulator": ("spec",),
    "runtime": ("spec", "emulator"),
    "interface": ("spec", "runtime"),
    "check": ("spec", "interface", "analysis"),
    "demo": ("spec", "runtime", "interface", "analysis"),
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
        return module in ("runtime.bindings", "emulator.native")
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


def package_of(module):
    is_package = MODULES.get(module, PACKAGE).name == "__init__.py"
    return ["jax_fa", *module.split(".")][: None if is_package else -1]


def violations(module, source):
    if place(module) is None:
        return [f"jax_fa.{module} is in no layer: add it to TOWERS"]
    tower, index = place(module)
    layer = TOWERS[tower][index]
    found = []
    for name, lazy in imports(ast.parse(source), package_of(module)):
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
        ("spec.band", "import numpy", "jax_fa.spec.band imports numpy"),
        (
            "spec.band",
            "from .problem import Problem",
            "jax_fa.spec.band imports jax_fa.spec.problem",
        ),
        ("kernels.edges", "import cutlass", "jax_fa.kernels.edges imports cutlass"),
        ("kernels.softmax", "import jax", "jax_fa.kernels.softmax imports jax"),
        (
            "kernels.softmax",
            "from jax_fa.runtime import vjp",
            "jax_fa.kernels.softmax imports jax_fa.runtime.vjp",
        ),
        ("api", "def f():\n  import cutlass", "jax_fa.api imports cutlass"),
        ("api", "from jax_fa import _jax_fa", "jax_fa.api imports jax_fa._jax_fa"),
        (
            "emulator.dot",
            "from jax_fa import _jax_fa",
            "jax_fa.emulator.dot imports jax_fa._jax_fa",
        ),
        ("runtime.vjp", "import jax_fa", "jax_fa.runtime.vjp imports jax_fa.__init__"),
        ("new", "", "jax_fa.new is in no layer: add it to TOWERS"),
    ],
)
def test_violation_is_reported(module, source, reported):
    assert violations(module, source) == [reported]


def import_graph(sources):
    """The modules of jax_fa that each module imports, for type checkers or in functions too."""
    return {
        module: {
            internal_module(name)
            for name, _ in imports(ast.parse(source), package_of(module))
            if name.split(".")[0] == "jax_fa"
        }
        - {module}
        for module, source in sources.items()
    }


def reached(graph, module):
    """The modules that `module` imports, directly or through others."""
    found, new = set[str](), {module}
    while new:
        new = {target for m in new for target in graph.get(m, ())} - found
        found |= new
    return found


def test_no_module_imports_itself_through_others():
    graph = import_graph({module: path.read_text() for module, path in MODULES.items()})
    assert [module for module in graph if module in reached(graph, module)] == []


def test_import_circle_is_found_among_imports_for_type_checkers():
    below = "if TYPE_CHECKING:\n  from jax_fa.emulator.wgmma import a_fragment"
    graph = import_graph(
        {
            "emulator.wgmma": "from jax_fa.emulator import mma",
            "emulator.mma": "from jax_fa.emulator.values import LANES",
            "emulator.values": below,
        }
    )
    assert reached(graph, "emulator.mma") == set(graph)


@pytest.mark.parametrize("module", ["runtime.arguments", "runtime.dispatch", "runtime.bindings"])
def test_argument_checks_and_choice_need_no_emulator(module):
    graph = import_graph({module: path.read_text() for module, path in MODULES.items()})
    behind = {m for m in reached(graph, module) if m.startswith("emulator")}
    assert behind | (reached(graph, module) & {"runtime.emulation"}) == set()


def test_lazy_import_is_allowed_where_declared():
    assert violations("kernels.edges", "def make():\n  from cutlass import pipeline") == []


def closure(module):
    """Modules of jax_fa that `module` imports, directly or not, and itself."""
    found, pending = set(), {module}
    while pending:
        found |= pending
        trees = (ast.parse(MODULES[name].read_text()) for name in pending)
        names = {name for tree in trees for name, _ in imports(tree, []) if "jax_fa." in name}
        pending = {internal_module(name) for name in names} - found
    return found


def test_what_a_newcomer_reads_for_the_hopper_forward_is_short():
    read = closure("kernels.sm90.fwd")
    assert {"kernels.sm90.fwd_roles", "spec.band"} <= read
    assert sum(len(MODULES[name].read_text().splitlines()) for name in read) <= 4180


@pytest.mark.parametrize(("family", "other"), [("sm90", "sm100"), ("sm100", "sm90")])
def test_a_forward_imports_nothing_of_the_backward_or_of_another_family(family, other):
    read = closure(f"kernels.{family}.fwd")
    assert not [name for name in read if re.search(rf"backward|bwd|{other}(?!\d)", name)]


def test_only_bindings_uses_jax_ffi():
    users = {m for m, path in MODULES.items() if re.search(r"\bjax\.ffi\b", path.read_text())}
    assert users == {"runtime.bindings"}


# C++, the same for `#include "..."`: schema.h -> a platform's kernels -> handlers -> module.
INCLUDES = {
    "schema.h": (),
    "testing.h": (),
    "guarded.h": (),
    "driver_test.cc": ("driver.h", "testing.h"),
    "emulator_block_test.cc": ("emulator_block.h", "testing.h"),
    "kernel_table_test.cc": ("kernel_table.h", "testing.h"),
    "loop_test.cc": ("loop.h", "testing.h"),
    "checks.*": ("checks.h", "schema.h"),
    "loop*": ("loop.h",),
    "ffi_call.*": ("ffi_call.h",),
    "fuzz.h": ("schema.h",),
    "attention_cpu_fuzz.cc": ("attention_cpu.h", "checks.h", "fuzz.h"),
    "handlers_fuzz.cc": ("ffi_call.h", "fuzz.h", "handlers_cpu.h", "handlers_cuda.h", "schema.h"),
    "handlers_test.cc": (
        *("ffi_call.h", "handlers_cpu.h", "handlers_cuda.h", "schema.h", "testing.h"),
    ),
    "arguments.*": ("arguments.h", "checks.h", "schema.h"),
    "attention_cpu*": ("attention_cpu*.h", "schema.h"),
    "driver*": ("driver.h",),
    "emulator_block*": ("emulator_block.h", "emulator_dot.h"),
    "emulator_dot*": ("emulator_dot.h",),
    "emulator_bindings.*": ("emulator_*.h",),
    "kernel_table*": ("driver.h", "kernel_table.h", "schema.h"),
    "handlers_cpu.*": (
        *("arguments.h", "attention_cpu.h", "guarded.h", "handlers_cpu.h", "loop.h", "schema.h"),
    ),
    "handlers_cuda.*": (
        *("arguments.h", "checks.h", "driver.h", "guarded.h", "handlers_cuda.h"),
        *("kernel_table.h", "schema.h"),
    ),
    "record.*": ("checks.h", "driver.h", "kernel_table.h", "schema.h", "record.h"),
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
