"""What is compiled, how it is chosen, and the ahead-of-time build itself."""

import importlib.util
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from jax_fa import aot, aot_cubin, aot_sass, aot_table, inspect, variants
from jax_fa.band import Band
from jax_fa.kernels import abi
from jax_fa.problem import Problem, Semantics
from jax_fa.variants import ARCHS, BY_NAME, VARIANTS

FFI = Path(__file__).parent.parent / "ffi"
HOPPER = ARCHS[0]

needs_dsl = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason=f"needs {aot.DSL_REQUIREMENT}"
)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def problem(band=None, soft_cap=None, **fields):
    semantics = Semantics(scale=0.1, band=band or Band(), soft_cap=soft_cap)
    base = Problem("bfloat16", 2, 2, 1024, 1024, 8, 2, 128, 128, semantics)
    return replace(base, **fields)


# ------------------------------------------------------------------------------------ the list


def test_names_are_unique_identifiers():
    assert len(BY_NAME) == len(VARIANTS)
    assert all(name.isidentifier() for name in BY_NAME)


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_an_architecture_has_fewer_than_100_variants(arch):
    assert 0 < sum(variant.arch == arch.name for variant in VARIANTS) < 100


def test_every_capability_belongs_to_one_architecture():
    assert len({arch.capability for arch in ARCHS}) == len(ARCHS)
    assert [arch.capability for arch in ARCHS] == ["9.0", "10.0", "10.3", "11.0"]
    assert variants.arch_of("9.0") is HOPPER
    assert variants.arch_of("7.5") is None


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        (problem(), "fwd_sm90_bf16_d128_full"),
        (problem(dtype="float16"), "fwd_sm90_fp16_d128_full"),
        (problem(head_dim=192), "fwd_sm90_bf16_d192v128_full"),
        (problem(has_sinks=True), "fwd_sm90_bf16_d128_full"),
        (problem(Band(is_causal=True)), "fwd_sm90_bf16_d128_causal"),
        (problem(Band(right=0)), "fwd_sm90_bf16_d128_causal"),
        (
            problem(Band(is_causal=True, alignment="bottom_right")),
            "fwd_sm90_bf16_d128_causal",
        ),
        (problem(Band(is_causal=True, left=256)), "fwd_sm90_bf16_d128_general"),
        (problem(Band(right=7)), "fwd_sm90_bf16_d128_general"),
        (problem(has_lengths=True), "fwd_sm90_bf16_d128_general"),
        (problem(has_segments=True), "fwd_sm90_bf16_d128_general"),
        (problem(has_offset=True), "fwd_sm90_bf16_d128_general"),
        (problem(is_packed=True), "fwd_sm90_bf16_d128_general"),
        (problem(soft_cap=30.0), "fwd_sm90_bf16_d128_general_cap"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_problem_finds_the_cheapest_variant_that_serves_it(asked, name):
    assert variants.find(asked, HOPPER).name == name


@pytest.mark.parametrize(
    ("asked", "compiled", "message"),
    [
        (problem(dtype="float32"), BY_NAME, "take bfloat16 or float16, not float32. Cast"),
        (problem(head_dim=80, value_dim=80), BY_NAME, "Pad the heads with zeros to 96/96"),
        (problem(head_dim=512, value_dim=512), BY_NAME, "256/256, not 512/512."),
        (problem(kv_len=0), BY_NAME, "take no empty arrays"),
        (problem(q_len=0), BY_NAME, "the batch is 2, with 0 queries and 1024 keys"),
        (problem(), [], "holds no fwd kernels for sm90. Build with the variants 'fwd_sm90_*'"),
        (
            problem(Band(left=5)),
            ["fwd_sm90_bf16_d128_full"],
            "the general mask is not compiled for bfloat16, D/Dv 128/128 on sm90. "
            "Compiled: fwd_sm90_bf16_d128_full.",
        ),
    ],
)
def test_what_is_not_compiled_is_refused_with_what_is(asked, compiled, message):
    assert variants.find(asked, HOPPER, compiled=compiled) is None
    assert message in variants.nearest(asked, HOPPER, compiled=compiled)


# ------------------------------------------------------------------------------- the command line


def test_globs_restrict_the_variants():
    chosen = aot.select(["fwd_sm90_bf16_d128_*", "fwd_sm90_fp16_d64_full"], ["sm90"])
    assert [v.name for v in chosen] == [
        "fwd_sm90_bf16_d128_full",
        "fwd_sm90_bf16_d128_causal",
        "fwd_sm90_bf16_d128_general",
        "fwd_sm90_bf16_d128_general_cap",
        "fwd_sm90_bf16_d128_general_split",
        "fwd_sm90_fp16_d64_full",
    ]


def test_a_glob_without_a_match_is_an_error():
    with pytest.raises(aot.AotError, match="no variant of sm90 matches 'typo'. Names look like"):
        aot.select(["fwd_*", "typo"], ["sm90"])


def test_an_empty_table_needs_no_dsl(tmp_path, monkeypatch):
    monkeypatch.setattr(aot, "_check_dsl", lambda: pytest.fail("asked for the DSL"))
    assert aot.main(["--output", str(tmp_path), "--variants", "none"]) == 0
    assert "table{nullptr, 0," in (tmp_path / "kernel_table.gen.cc").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["variants"] == []


def test_a_missing_dsl_is_named_with_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(aot, "_dsl_version", lambda: None)
    assert aot.main(["--output", str(tmp_path), "--variants", "fwd_sm90_bf16_d64_full"]) == 1
    assert f"pip install {aot.DSL_REQUIREMENT}" in capsys.readouterr().err


# ----------------------------------------------------------------------------- the generated table

HEADER = """
void _mlir_x__mlir_ciface_f(void **args, int32_t num_args);
static inline int32_t cute_dsl_x_wrapper(x_Kernel_Module_t *module, {parameters}) {{
"""


def header(parameters):
    text = ", ".join(f"{c_type.replace('*', ' *')} {name}" for c_type, name in parameters)
    return HEADER.format(parameters=text.replace("* ", "*"))


def test_entry_is_found_in_the_exported_header():
    text = header(aot_table.c_parameters("fwd"))
    assert aot.entry_symbol(VARIANTS[0], text) == "_mlir_x__mlir_ciface_f"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p[1:], "parameter 0 of the entry is 'void* k', kernels/abi.py says 'void* q'"),
        (lambda p: p[:-1], "the entry has 28 parameters, kernels/abi.py has 29"),
        (lambda p: [*p[:16], ("float", "batch"), *p[17:]], "is 'float batch'"),
    ],
)
def test_an_entry_with_other_parameters_is_refused(change, message):
    text = header(change(aot_table.c_parameters("fwd")))
    with pytest.raises(aot.AotError, match=re.escape(message)):
        aot.entry_symbol(VARIANTS[0], text)


def rows():
    kernels = (aot_table.Signature("k0", (128, 4)), aot_table.Signature("k1", (8,)))
    return [aot_table.Row(variant, f"call_{variant.name}", kernels) for variant in VARIANTS]


@needs_compiler
@pytest.mark.parametrize("entries", [[], rows()], ids=["empty", "all"])
def test_generated_table_compiles_against_the_header(entries, tmp_path):
    source = tmp_path / "kernel_table.gen.cc"
    source.write_text(aot_table.table(entries))
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{FFI}"]
    done = subprocess.run([*command, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_generated_table_lists_every_variant_and_fills_every_parameter():
    text = aot_table.table(rows())
    assert re.findall(r'^     \{"(\w+)",', text, re.M) == [v.name for v in VARIANTS]
    assert text.count("arguments->Add(") == len(abi.FORWARD) + len(abi.BACKWARD)


# ------------------------------------------------------------------------------ a real compilation


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("aot")
    arguments = ["--output", str(folder / "out"), "--cache", str(folder / "cache"), "--keep-ptx"]
    assert aot.main([*arguments, "--variants", "fwd_sm90_bf16_d64_full"]) == 0
    return folder


@needs_dsl
def test_compiling_leaves_object_header_ptx_table_and_report(compiled):
    out = compiled / "out"
    assert {path.name for path in out.iterdir()} == {
        "fwd_sm90_bf16_d64_full.h",
        "fwd_sm90_bf16_d64_full.o",
        "fwd_sm90_bf16_d64_full.ptx",
        "fwd_sm90_bf16_d64_full.ptx.xz",
        "kernel_table.gen.cc",
        "report.json",
    }
    (record,) = json.loads((out / "report.json").read_text())["variants"]
    (kernel,) = record["kernels"]
    assert record["object_bytes"] == (out / "fwd_sm90_bf16_d64_full.o").stat().st_size < 1 << 20
    assert kernel["stack_bytes"] == 0
    assert 0 < record["dynamic_shared_bytes"][0] <= 227 * 1024
    assert 0 < kernel["registers"] <= 255
    assert f'"{kernel["name"]}"' in (out / "kernel_table.gen.cc").read_text()
    assert kernel["name"] in (out / "fwd_sm90_bf16_d64_full.ptx").read_text()


@needs_dsl
def test_object_is_made_for_any_x86_64_processor(compiled):
    """The exporter compiles for the CPU at hand unless told otherwise."""
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump")
    path = compiled / "out" / "fwd_sm90_bf16_d64_full.o"
    code = subprocess.run(["objdump", "-d", path], capture_output=True, text=True, check=True)
    assert not re.search(r"%[yz]mm\d", code.stdout)


@needs_dsl
def test_parameter_sizes_in_the_object_are_those_of_the_ptx(compiled):
    path = compiled / "out" / "fwd_sm90_bf16_d64_full.o"
    ptx = path.with_suffix(".ptx").read_text()
    entry = ptx[ptx.index(".entry") : ptx.index("\n)")]
    scalars = {"u64": 8, "u32": 4, "f32": 4, "b64": 8, "b32": 4, "s32": 4, "b8": 1}
    sizes = []
    for line in re.findall(r"\.param ([^,\n]+)", entry):
        array = re.search(r"\[(\d+)\]", line)
        kind = re.search(r"\.([usfb]\d+)", line)[1]
        sizes.append(int(array[1]) if array else scalars[kind])
    (kernel,) = aot_cubin.kernels(path)
    assert list(kernel.param_bytes) == sizes


@needs_dsl
def test_an_unchanged_variant_is_not_compiled_again(compiled, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(aot, "ProcessPoolExecutor", lambda *_, **__: pytest.fail("compiles"))
    arguments = ["--output", str(tmp_path), "--cache", str(compiled / "cache")]
    assert aot.main([*arguments, "--variants", "fwd_sm90_bf16_d64_full"]) == 0
    assert "1 of 1 variants are unchanged" in capsys.readouterr().err


def test_an_entry_that_lacks_its_compressed_ptx_is_not_done(tmp_path):
    job = aot.Job(VARIANTS[0], "x86_64", tmp_path / "entry")
    job.path(".json").touch()
    assert not job.is_done
    job.path(".ptx.xz").touch()
    assert job.is_done


def test_sources_are_what_the_kernel_module_imports():
    names = {
        path.relative_to(Path(aot.__file__).parent).as_posix() for path in aot.sources(VARIANTS[0])
    }
    assert {"band.py", "config.py", "kernels/abi.py", "kernels/sm90/fwd.py"} <= names
    assert "kernels/sm90/bwd.py" not in names
    assert "aot.py" not in names


@needs_dsl
def test_another_configuration_has_another_hash(monkeypatch):
    before = aot.content_hash(VARIANTS[0], "x86_64")
    assert aot.content_hash(VARIANTS[0], "aarch64") != before
    chosen = aot.choose_config(VARIANTS[0])
    monkeypatch.setattr(aot, "choose_config", lambda _: (chosen, "changed"))
    assert aot.content_hash(VARIANTS[0], "x86_64") != before


@needs_dsl
def test_a_second_run_removes_what_it_did_not_make(compiled, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(compiled / "out", out)
    assert aot.main(["--output", str(out), "--variants", "none"]) == 0
    assert {path.name for path in out.iterdir()} == {"kernel_table.gen.cc", "report.json"}


needs_nvdisasm = pytest.mark.skipif(
    aot_sass.find_nvdisasm() is None, reason=f"needs {aot_sass.NVDISASM_REQUIREMENT}"
)


@needs_dsl
def test_inspect_reports_resources_of_what_was_compiled(compiled, capsys):
    assert inspect.main([str(compiled / "out"), "--no-sass"]) == 0
    assert re.search(r"fwd_sm90_bf16_d64_full +\d+ +32/160 +0 ", capsys.readouterr().out)


@needs_dsl
@needs_nvdisasm
def test_inspect_approves_of_the_machine_code(compiled, capsys):
    assert inspect.main([str(compiled / "out")]) == 0
    verdict = "fwd_sm90_bf16_d64_full: wgmma, TMA both ways, no local memory: ok"
    assert verdict in capsys.readouterr().out.splitlines()


@needs_dsl
@needs_nvdisasm
def test_the_softmax_loop_in_machine_code_has_the_tile_of_the_configuration(compiled):
    path = compiled / "out" / "fwd_sm90_bf16_d64_full.o"
    (code,) = aot_sass.disassemble(path, aot_sass.find_nvdisasm())
    main = aot_sass.softmax_loops(code, rounded=1)[0]
    keys = aot.choose_config(BY_NAME["fwd_sm90_bf16_d64_full"]).block_kv
    # A warpgroup's 64 rows over 128 threads; one factor for each of a thread's two rows.
    assert main.scores == 64 * keys // 128
    assert main.counts["exp2"] == main.scores + 2
    assert main.counts["wgmma"] == keys // 16 + 64 // 16
