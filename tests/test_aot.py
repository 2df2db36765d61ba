"""What is compiled, how it is chosen, and the ahead-of-time build itself."""

import importlib.util
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from jax_fa.analysis import listing, machine_code
from jax_fa.aot import compare, compiler, cubins, kernel_table
from jax_fa.spec import arch, ptx_archives, variants
from jax_fa.spec.arch import ARCHS, KINDS, arch_named, arch_of, arch_of_target
from jax_fa.spec.band import Band
from jax_fa.spec.problem import Problem, Semantics
from jax_fa.spec.variants import BY_NAME, VARIANTS

FFI = Path(__file__).parent.parent / "ffi"
HOPPER = ARCHS[0]

needs_dsl = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason=f"needs {compiler.DSL_REQUIREMENT}"
)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

PACKED = ("cu_seqlens_q", "cu_seqlens_k")


def problem(band=None, soft_cap=None, **fields):
    semantics = Semantics(scale=0.1, band=band or Band(), soft_cap=soft_cap)
    base = Problem("bfloat16", 2, 2, 1024, 1024, 8, 2, 128, 128, semantics)
    return replace(base, **fields)


# ------------------------------------------------------------------------------------ the list


def test_names_are_unique_identifiers():
    assert len(BY_NAME) == len(VARIANTS)
    assert all(name.isidentifier() for name in BY_NAME)


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_an_architecture_has_at_most_152_variants(arch):
    assert 0 < len(variants.of_families([arch.name])) <= 152


def test_every_capability_belongs_to_one_architecture():
    capabilities = [capability for arch in ARCHS for capability in arch.capabilities]
    assert capabilities == [
        "9.0",
        "10.0",
        "10.3",
        "11.0",
        "8.0",
        "8.7",
        "8.6",
        "8.9",
        "12.0",
        "12.1",
    ]
    assert arch_of("9.0") is HOPPER
    assert arch_of("7.5") is None


def test_a_target_of_no_architecture_is_refused_with_those_that_are():
    with pytest.raises(NotImplementedError, match=r"no kernels for sm_75; .* sm_90a, sm_100f, "):
        arch_of_target("sm_75")


BORROWED = [(arch, kind) for arch in ARCHS for kind in KINDS if arch.lender(kind) is not arch]


def test_all_but_the_forward_of_capability_103_is_that_of_100_and_of_86_some_of_that_of_80():
    kinds = {arch.name: [kind for other, kind in BORROWED if other is arch] for arch, _ in BORROWED}
    assert kinds == {"sm103": ["bwd", "bias", "few"], "sm86": ["fwd", "bwd", "bias", "few"]}
    for operation in ("fwd", "bwd"):
        assert arch_named("sm86").own(operation).heads == ((128, 128), (256, 256))


@pytest.mark.parametrize(
    ("arch", "kind"), BORROWED, ids=[f"{arch.name}-{kind}" for arch, kind in BORROWED]
)
def test_an_architecture_borrows_what_it_would_compile_itself(arch, kind):
    owner, own = arch.lender(kind), arch.own(kind)
    assert owner.lender(kind) is owner
    assert owner.target.endswith("f") or arch.capabilities > owner.capabilities, "it runs here too"
    if own is not None:
        assert own.folder == owner.kernels(kind).folder
        assert not {*own.heads} - {*owner.kernels(kind).heads}
    borrowed = [
        v
        for v in VARIANTS
        if (v.arch, v.kind) == (owner.name, kind) and arch.owner(kind, v.heads) is owner
    ]
    assert borrowed
    for variant in borrowed:
        own = replace(variant, key=replace(variant.key, arch=arch.target))
        assert compiler.choose_config(own) == compiler.choose_config(variant)


def test_an_architecture_needs_its_own_kernels_and_those_that_it_borrows():
    names = {variant.name for variant in variants.of_families(["sm103"])}
    assert names == variants.run_by(arch_named("sm103"), BY_NAME)
    kinds = {re.match("[a-z]+_[a-z0-9]+", name)[0] for name in names}
    assert kinds == {"fwd_sm103", "fwd_sm100", "bwd_sm100", "dbias_sm100"}
    assert all(
        ("sm100" in name) == name.endswith(("_bias", "_few")) for name in names if "fwd" in name
    )
    assert variants.of_families(["sm100", "sm103"]) == [
        v for v in VARIANTS if v.arch in ("sm100", "sm103")
    ]


def test_heads_of_its_own_take_the_place_of_those_that_an_architecture_would_borrow():
    names = variants.run_by(arch_named("sm86"), BY_NAME)
    replaced = {name.replace("sm86", "sm80") for name in names if "sm86" in name}
    masks = ["full", "causal", "general", "general_cap"]
    assert replaced == {
        f"{operation}_sm80_{dtype}_{heads}_{mask}"
        for operation in ("fwd", "bwd")
        for heads in ("d128", "d256")
        for mask in masks + ["general_split"] * (operation == "fwd")
        for dtype in ("bf16", "fp16")
    }
    assert names == (
        variants.run_by(arch_named("sm80"), BY_NAME) - replaced
        | {name.replace("sm80", "sm86") for name in replaced}
    )
    assert variants.capabilities(BY_NAME["fwd_sm80_bf16_d128_full"]) == ["8.0", "8.7"]
    assert variants.capabilities(BY_NAME["bwd_sm80_bf16_d96_full"]) == ["8.0", "8.7", "8.6", "8.9"]
    for heads in ("d128", "d256"):
        assert variants.capabilities(BY_NAME[f"bwd_sm80_bf16_{heads}_full"]) == ["8.0", "8.7"]
    assert len(variants.capabilities(BY_NAME["bwd_sm80_bf16_d256_general_bias"])) == 4


@pytest.mark.parametrize(
    "asked",
    [
        *(["sm90"], ["sm100"], ["sm103"], ["sm90", "sm103"], ["sm100", "sm103"]),
        *(["sm80"], ["sm86"], ["sm80", "sm86"]),
    ],
    ids=" ".join,
)
def test_a_build_is_for_the_architectures_that_were_asked_for(asked):
    compiled = [variant.name for variant in variants.of_families(asked)]
    assert [arch.name for arch in variants.families(compiled)] == asked


def test_a_build_of_some_kernels_is_for_those_that_run_them():
    some = [name for name in BY_NAME if name.startswith(("fwd_sm90_bf16_d64", "bwd_sm100_bf16"))]
    assert [arch.name for arch in variants.families(some)] == ["sm90", "sm100", "sm103"]
    assert variants.families([]) == []


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        (problem(), "fwd_sm90_bf16_d128_full"),
        (problem(dtype="float16"), "fwd_sm90_fp16_d128_full"),
        (problem(head_dim=192), "fwd_sm90_bf16_d192v128_full"),
        (problem(head_dim=80, value_dim=80), "fwd_sm90_bf16_d96_full_small"),
        (problem(head_dim=80, value_dim=80, q_len=16384), "fwd_sm90_bf16_d96_full"),
        (problem(head_dim=1, value_dim=1), "fwd_sm90_bf16_d64_full_small"),
        (problem(head_dim=1, value_dim=1, q_len=4096), "fwd_sm90_bf16_d64_full"),
        (problem(head_dim=72, value_dim=96), "fwd_sm90_bf16_d96_full_small"),
        (problem(head_dim=160, value_dim=128), "fwd_sm90_bf16_d192v128_full"),
        (problem(head_dim=129, value_dim=1), "fwd_sm90_bf16_d192v128_full"),
        (problem(head_dim=1, value_dim=129), "fwd_sm90_bf16_d256_full"),
        (problem(head_dim=256, value_dim=8), "fwd_sm90_bf16_d256_full"),
        (problem(head_dim=80, present=PACKED), "fwd_sm90_bf16_d128_general"),
        (problem(head_dim=40, q_len=1, value_dim=24), "fwd_sm90_bf16_d64_general_few"),
        (problem(head_dim=40, q_len=20, value_dim=24), "fwd_sm90_bf16_d64_general_split"),
        (problem(present=("sinks",)), "fwd_sm90_bf16_d128_full"),
        (problem(Band(is_causal=True)), "fwd_sm90_bf16_d128_causal"),
        (problem(Band(right=0)), "fwd_sm90_bf16_d128_causal"),
        (
            problem(Band(is_causal=True, alignment="bottom_right")),
            "fwd_sm90_bf16_d128_causal",
        ),
        (problem(Band(is_causal=True, left=256)), "fwd_sm90_bf16_d128_general"),
        (problem(Band(right=7)), "fwd_sm90_bf16_d128_general"),
        (problem(present=("q_lengths",)), "fwd_sm90_bf16_d128_general"),
        (problem(present=("q_segments", "kv_segments")), "fwd_sm90_bf16_d128_general"),
        (problem(present=("q_offset",)), "fwd_sm90_bf16_d128_general"),
        (problem(present=PACKED), "fwd_sm90_bf16_d128_general"),
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
        (
            problem(head_dim=257, value_dim=64),
            BY_NAME,
            "have D/Dv 64/64, 96/96, 128/128, 192/128, 256/256, none as large as 257/64. "
            "implementation='xla' takes heads of any size.",
        ),
        (
            problem(head_dim=80, value_dim=72),
            ["fwd_sm90_bf16_d64_full", "bwd_sm90_bf16_d96_full"],
            "have D/Dv 64/64, none as large as 80/72. "
            "Build with the variants 'fwd_sm90_*_d96_*', too.",
        ),
        (problem(kv_len=0), BY_NAME, "take no empty arrays"),
        (problem(q_len=0), BY_NAME, "the batch is 2, with 0 queries and 1024 keys"),
        (problem(), [], "holds no fwd kernels for sm90. Build with the variants 'fwd_sm90_*'"),
        (
            problem(Band(left=5)),
            ["fwd_sm90_bf16_d128_full"],
            "the general mask is not compiled for bfloat16, D/Dv 128/128 or larger on "
            "sm90. Compiled: fwd_sm90_bf16_d128_full.",
        ),
        (
            problem(Band(left=5), head_dim=80, value_dim=96),
            ["fwd_sm90_bf16_d64_general", "fwd_sm90_bf16_d96_full", "fwd_sm90_bf16_d256_causal"],
            "the general mask is not compiled for bfloat16, D/Dv 80/96 or larger on sm90. "
            "Compiled: fwd_sm90_bf16_d96_full, fwd_sm90_bf16_d256_causal.",
        ),
    ],
)
def test_what_is_not_compiled_is_refused_with_what_is(asked, compiled, message):
    assert variants.find(asked, HOPPER, compiled=compiled) is None
    assert message in variants.nearest(asked, HOPPER, compiled=compiled)


# ------------------------------------------------------------------------------- the command line


def test_globs_restrict_the_variants():
    chosen = compiler.select(["fwd_sm90_bf16_d128_*", "fwd_sm90_fp16_d64_full"], ["sm90"])
    assert [v.name for v in chosen] == [
        "fwd_sm90_bf16_d128_full",
        "fwd_sm90_bf16_d128_causal",
        "fwd_sm90_bf16_d128_general",
        "fwd_sm90_bf16_d128_general_cap",
        "fwd_sm90_bf16_d128_general_split",
        "fwd_sm90_bf16_d128_general_few",
        "fwd_sm90_bf16_d128_general_bias",
        "fwd_sm90_fp16_d64_full",
    ]


def test_a_family_is_compiled_with_what_it_borrows():
    chosen = compiler.select(["*_bf16_d64_full"], ["sm103"])
    assert [v.name for v in chosen] == ["bwd_sm100_bf16_d64_full", "fwd_sm103_bf16_d64_full"]


def test_a_glob_without_a_match_is_an_error():
    with pytest.raises(
        compiler.AotError, match="no variant of sm90 matches 'typo'. Names look like"
    ):
        compiler.select(["fwd_*", "typo"], ["sm90"])


def test_an_empty_table_needs_no_dsl(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "_check_dsl", lambda: pytest.fail("asked for the DSL"))
    assert compiler.main(["--output", str(tmp_path), "--variants", "none"]) == 0
    assert "table{nullptr, 0," in (tmp_path / "kernel_table.gen.cc").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["variants"] == []


def test_a_missing_dsl_is_named_with_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiler, "_dsl_version", lambda: None)
    assert compiler.main(["--output", str(tmp_path), "--variants", "fwd_sm90_bf16_d64_full"]) == 1
    assert f"pip install {compiler.DSL_REQUIREMENT}" in capsys.readouterr().err


# ----------------------------------------------------------------------------- the generated table

HEADER = """
void _mlir_x__mlir_ciface_f(void **args, int32_t num_args);
static inline int32_t cute_dsl_x_wrapper(x_Kernel_Module_t *module, {parameters}) {{
"""


def header(parameters):
    text = ", ".join(f"{c_type.replace('*', ' *')} {name}" for c_type, name in parameters)
    return HEADER.format(parameters=text.replace("* ", "*"))


def test_entry_is_found_in_the_exported_header():
    text = header(kernel_table.c_parameters("fwd"))
    assert compiler.entry_symbol(VARIANTS[0], text) == "_mlir_x__mlir_ciface_f"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p[1:], "parameter 0 of the entry is 'void* k', spec/abi.py says 'void* q'"),
        (lambda p: p[:-1], "the entry has 42 parameters, spec/abi.py has 43"),
        (lambda p: [*p[:18], ("float", "batch"), *p[19:]], "is 'float batch'"),
    ],
)
def test_an_entry_with_other_parameters_is_refused(change, message):
    text = header(change(kernel_table.c_parameters("fwd")))
    with pytest.raises(compiler.AotError, match=re.escape(message)):
        compiler.entry_symbol(VARIANTS[0], text)


def rows():
    kernels = (kernel_table.Signature("k0", (128, 4)), kernel_table.Signature("k1", (8,)))
    return [kernel_table.Row(variant, f"call_{variant.name}", kernels) for variant in VARIANTS]


@needs_compiler
@pytest.mark.parametrize("entries", [[], rows()], ids=["empty", "all"])
def test_generated_table_compiles_against_the_header(entries, tmp_path):
    source = tmp_path / "kernel_table.gen.cc"
    source.write_text(kernel_table.table(entries))
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{FFI}"]
    done = subprocess.run([*command, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_generated_table_lists_every_variant():
    text = kernel_table.table(rows())
    assert re.findall(r'^     \{"(\w+)",', text, re.M) == [v.name for v in VARIANTS]


# ------------------------------------------------------------------------------ a real compilation


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("aot")
    arguments = ["--cache", str(folder / "cache"), "--variants", "fwd_sm90_bf16_d64_full"]
    hosts = [f"--host={host}" for host in compiler.HOSTS]
    assert compiler.main([*arguments, "--output", str(folder / "hosts"), *hosts]) == 0
    assert compiler.main([*arguments, "--output", str(folder / "out"), "--keep-ptx"]) == 0
    return folder


@needs_dsl
def test_compiling_leaves_object_header_ptx_table_and_report(compiled):
    out = compiled / "out"
    assert {path.name for path in out.iterdir()} == {
        "fwd_sm90_bf16_d64_full.h",
        "fwd_sm90_bf16_d64_full.o",
        "fwd_sm90_bf16_d64_full.ptx",
        "sm90_fwd_d64_full.tar.xz",
        "kernel_table.gen.cc",
        "report.json",
    }
    (record,) = json.loads((out / "report.json").read_text())["variants"]
    (kernel,) = record["kernels"]
    assert record["object_bytes"] == (out / "fwd_sm90_bf16_d64_full.o").stat().st_size < 1 << 20
    assert kernel["name"] == "kernel_cutlass_kernel_fwd_sm90_bf16_d64_full_0"
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
def test_one_compilation_makes_the_objects_of_every_host(compiled):
    machines = {"x86_64": 62, "aarch64": 183}  # e_machine of an ELF file
    assert set(machines) == set(compiler.HOSTS)
    objects = {host: compiled / "hosts" / host / "fwd_sm90_bf16_d64_full.o" for host in machines}
    found = {host: path.read_bytes()[18] for host, path in objects.items()}
    assert found == machines
    images = [list(cubins.cubins(path)) for path in objects.values()]
    assert images[0] == images[1] != []
    records = [json.loads(path.read_text()) for path in (compiled / "cache").glob("*.json")]
    assert len({record["compile_seconds"] for record in records}) == 1 < len(records)
    tables = [path.with_name("kernel_table.gen.cc").read_text() for path in objects.values()]
    assert tables[0] == tables[1]


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
    (kernel,) = cubins.kernels(path)
    assert list(kernel.param_bytes) == sizes


@needs_dsl
def test_an_unchanged_variant_is_not_compiled_again(compiled, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiler, "ProcessPoolExecutor", lambda *_, **__: pytest.fail("compiles"))
    arguments = ["--output", str(tmp_path), "--cache", str(compiled / "cache")]
    assert compiler.main([*arguments, "--variants", "fwd_sm90_bf16_d64_full"]) == 0
    assert "1 of 1 objects are unchanged" in capsys.readouterr().err


def test_an_entry_that_lacks_its_ptx_is_not_done(tmp_path):
    job = compiler.Job(VARIANTS[0], "x86_64", tmp_path / "entry")
    job.path(".json").touch()
    assert not job.is_done
    job.path(".ptx").touch()
    assert job.is_done


def test_sources_are_what_the_kernel_module_imports():
    names = {
        path.relative_to(Path(compiler.__file__).parents[1]).as_posix()
        for path in compiler.sources(VARIANTS[0].module)
    }
    assert {"spec/band.py", "spec/config_sm90.py", "spec/abi.py", "kernels/sm90/fwd.py"} <= names
    assert {"aot/stand_ins.py", "spec/schema.py"} <= names
    assert "kernels/sm90/bwd.py" not in names
    assert "spec/config_sm100.py" not in names
    assert not names & {"aot/compiler.py", "spec/arch.py"}


@needs_dsl
def test_of_the_list_of_families_kernels_depend_on_their_row(monkeypatch):
    own, other = (BY_NAME[f"fwd_{name}_bf16_d64_full"] for name in ("sm100", "sm90"))
    before = [compiler.content_hash(variant, "x86_64") for variant in (own, other)]
    changed = replace(arch_named("sm100"), capabilities=("10.0", "10.7"))
    rows = tuple(changed if row.name == changed.name else row for row in ARCHS)
    monkeypatch.setattr(arch, "ARCHS", rows)
    after = [compiler.content_hash(variant, "x86_64") for variant in (own, other)]
    assert [x == y for x, y in zip(before, after, strict=True)] == [False, True]


@needs_dsl
def test_another_configuration_has_another_hash(monkeypatch):
    before = compiler.content_hash(VARIANTS[0], "x86_64")
    assert compiler.content_hash(VARIANTS[0], "aarch64") != before
    chosen = compiler.choose_config(VARIANTS[0])
    monkeypatch.setattr(compiler, "choose_config", lambda _: (chosen, "changed"))
    assert compiler.content_hash(VARIANTS[0], "x86_64") != before


@needs_dsl
def test_a_second_run_removes_what_it_did_not_make(compiled, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(compiled / "out", out)
    assert compiler.main(["--output", str(out), "--variants", "none"]) == 0
    assert {path.name for path in out.iterdir()} == {"kernel_table.gen.cc", "report.json"}


needs_nvdisasm = pytest.mark.skipif(
    machine_code.find_nvdisasm() is None, reason=f"needs {machine_code.NVDISASM_REQUIREMENT}"
)


@needs_dsl
def test_inspect_reports_resources_of_what_was_compiled(compiled, capsys):
    assert listing.main([str(compiled / "out"), "--no-sass"]) == 0
    assert re.search(r"fwd_sm90_bf16_d64_full +\d+ +32/160 +0 ", capsys.readouterr().out)


@needs_dsl
@needs_nvdisasm
def test_inspect_approves_of_the_machine_code(compiled, capsys):
    assert listing.main([str(compiled / "out")]) == 0
    verdict = "fwd_sm90_bf16_d64_full: wgmma, TMA both ways, no local memory: ok"
    assert verdict in capsys.readouterr().out.splitlines()


@needs_dsl
@needs_nvdisasm
def test_the_softmax_loop_in_machine_code_has_the_tile_of_the_configuration(compiled):
    path = compiled / "out" / "fwd_sm90_bf16_d64_full.o"
    (code,) = machine_code.disassemble(path, machine_code.find_nvdisasm())
    main = machine_code.softmax_loops(code, rounded=1)[0]
    keys = compiler.choose_config(BY_NAME["fwd_sm90_bf16_d64_full"]).block_kv
    # A warpgroup's 64 rows over 128 threads. What it takes to raise a maximum is beside the loop.
    assert main.scores == 64 * keys // 128
    assert (main.counts["exp2"], main.counts["shuffle"]) == (main.scores, 0)
    # PV; S reads all of D or, of narrow heads, half: a branch each (``multiply_filled``).
    assert main.counts["wgmma"] == keys // 16
    counts = [
        machine_code.count(code.instructions[at] for at in loop.own)["wgmma"]
        for loop in machine_code.loops(code)
    ]
    assert keys // 16 + (64 + 32) // 16 in counts


def powers_before_waits(code):
    """For each loop with products and powers: how many powers lie before its last such wait."""
    for loop in machine_code.loops(code):
        found = [code.instructions[at] for at in sorted(loop.own)]
        counts = machine_code.count(found)
        if not (counts["wgmma"] and counts["exp2"]):
            continue
        powers = [at for at, one in enumerate(found) if machine_code.count([one])["exp2"]]
        waits = [at for at, one in enumerate(found) if "DEPBAR" in one.opcode and at < powers[-1]]
        yield sum(at < waits[-1] for at in powers)


@needs_dsl
@needs_nvdisasm
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_hopper_backward_waits_for_dp_behind_powers(head_dim, tmp_path):
    """Left alone, ptxas waits ahead of nearly all of them (``primitives.hold_until``)."""
    name = f"bwd_sm90_bf16_d{head_dim}_causal"
    assert compiler.main(["--output", str(tmp_path), "--variants", name]) == 0
    held_by = compiler.choose_config(BY_NAME[name]).held_by
    codes = machine_code.disassemble(tmp_path / f"{name}.o", machine_code.find_nvdisasm())
    behind = [number for code in codes for number in powers_before_waits(code)]
    assert len(behind) >= 2  # A loop each of deterministic runs and of others.
    assert min(behind) >= held_by > 0


# ----------------------------------------------------------------------------- two builds compared


def folder_of(path, **texts):
    path.mkdir()
    for name, ptx in texts.items():
        archive = path / ptx_archives.archive_of(name)
        archive.write_bytes(ptx_archives.packed({name: ptx.encode()}))
    return str(path)


def test_builds_are_equal_but_for_names_of_kernels(tmp_path, capsys):
    ptx = ".visible .entry {0}(.param .b64 {0}_param_0) {{ ret; }}"
    one, two = "bwd_sm90_bf16_d64_full", "fwd_sm90_bf16_d64_full"
    texts = {one: ptx.format("k_of_ForwardCall"), two: ptx.format("x")}
    before = folder_of(tmp_path / "before", **texts)
    renamed = folder_of(tmp_path / "renamed", **texts | {one: ptx.format("k")})
    assert compare.main([before, renamed]) == 0
    assert capsys.readouterr().out == "2 variants, 0 of them different\n"
    other = folder_of(tmp_path / "other", **{one: ptx.format("k").replace("ret", "exit")})
    assert compare.main([before, other]) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{one}: line 1: '.visible .entry kernel0") and "exit; }'" in first
    assert second == f"{two}: is not in {other}" and last == "2 variants, 2 of them different"
