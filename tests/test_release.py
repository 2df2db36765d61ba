"""A release: its checker finds what a wheel must not hold, and what it lacks."""

import struct
import zipfile
from pathlib import Path

import pytest
import release
import wheels

from jax_fa.spec import ptx_archives

ROOT = Path(__file__).parent.parent

SOURCES = {
    "jax_fa/__init__.py",
    "jax_fa/_jax_fa.pyi",
    "jax_fa/emulator/ptx.py",
    "jax_fa/kernels/sm90/fwd.py",
    "jax_fa/py.typed",
}
INFORMATION = tuple(
    f"jax_fa-0.1.0.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")
)
VARIANTS = {"fwd_sm90_bf16_d64_full", "bwd_sm110_fp16_d192v128_general_cap"}
X86, ARM = (b"\x7fELF".ljust(18, b"\0") + struct.pack("<H", code) for code in (62, 183))

NAMES = {
    "jax_fa-0.1.0-cp311-cp311-manylinux_2_34_x86_64.whl": (
        "jax_fa/_jax_fa.cpython-311-x86_64-linux-gnu.so",
        X86,
    ),
    "jax_fa-0.1.0-cp312-abi3-manylinux_2_34_aarch64.whl": ("jax_fa/_jax_fa.abi3.so", ARM),
}
NAME = "jax_fa-0.1.0-cp312-abi3-manylinux_2_34_x86_64.whl"
EXTENSION = "jax_fa/_jax_fa.abi3.so"


def archive(variant):
    """The file of a wheel with a variant's PTX, and its bytes."""
    name = f"jax_fa/ptx/{ptx_archives.archive_of(variant)}"
    return name, ptx_archives.packed({variant: b""})


@pytest.fixture
def complaints(tmp_path):
    """What the checker says of a wheel, by its name, extension, and what is added or left out."""

    def found(name=NAME, extension=(EXTENSION, X86), *, extra=(), lacks=()):
        files = dict.fromkeys((*SOURCES, *INFORMATION), b"") | dict([extension])
        files |= dict(archive(variant) for variant in VARIANTS)
        files |= dict(extra)
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr("jax_fa/", b"")  # auditwheel lists folders too
            for file in sorted(files.keys() - set(lacks)):
                wheel.writestr(file, files[file])
        return list(wheels.complaints(tmp_path / name, SOURCES, VARIANTS))

    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_wheel_as_it_must_be_passes(complaints, name):
    assert complaints(name, NAMES[name]) == []


@pytest.mark.parametrize(
    "file",
    [
        "tests/test_aot.py",
        "benchmarks/gpu.py",
        "build/cmake/CMakeCache.txt",
        "jax_fa/__pycache__/api.cpython-312.pyc",
        "jax_fa/.mypy_cache/x.json",
        "jax_fa/fwd_sm90_bf16_d64_full.o",
        "jax_fa/ptx/fwd_sm90_bf16_d64_full.ptx",
        "jax_fa/kernel_table.gen.cc",
        "jax_fa/_jax_fa.cpython-313-x86_64-linux-gnu.so",
        "jax_fa/ffi/driver.cc",
        "jax_fa.libs/libstdc++.so.6",
        "jax_fa-0.1.0.dist-info/sboms/other.json",
    ],
)
def test_what_must_never_be_in_a_wheel_is_found(complaints, file):
    assert complaints(extra=[(file, b"")]) == [f"must not hold {file}"]


def test_a_module_that_the_checkout_lacks_is_found(complaints):
    assert complaints(extra=[("jax_fa/old.py", b"")]) == [
        "holds jax_fa/old.py, which the checkout lacks"
    ]


@pytest.mark.parametrize("file", sorted([*SOURCES, EXTENSION]))
def test_what_is_missing_is_found(complaints, file):
    assert complaints(lacks=[file]) == [f"lacks {file}"]


def test_ptx_is_that_of_the_kernels(complaints):
    lost, added = "fwd_sm90_bf16_d64_full", "fwd_sm90_bf16_d64_causal"
    assert complaints(lacks=[archive(lost)[0]]) == [f"lacks the PTX of {lost}"]
    assert complaints(extra=[archive(added)]) == [f"must not hold the PTX of {added}"]


def test_an_extension_for_another_processor_is_found(complaints):
    assert complaints(extension=(EXTENSION, ARM)) == [
        f"{EXTENSION} is for another processor than x86_64"
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("jax_fa-0.1.0-cp312-abi3-linux_x86_64.whl", "not named as"),
        ("jax_fa-0.1.0-cp312-abi3-manylinux_2_36_x86_64.whl", "needs glibc 2.36, and 2.34 has"),
        ("jax_fa-0.1.0-cp313-cp313-manylinux_2_34_x86_64.whl", "of no ABI or processor"),
        ("jax_fa-0.1.0-cp312-abi3-manylinux_2_34_riscv64.whl", "of no ABI or processor"),
    ],
)
def test_a_tag_that_no_release_has_is_found(complaints, name, message):
    (line,) = complaints(name)
    assert line.startswith(message)


def test_sizes_are_bounded(complaints, monkeypatch):
    monkeypatch.setattr(wheels, "INSTALLED_BYTES", 4_000_000)
    large = (EXTENSION, X86.ljust(4_100_000, b"\0"))
    assert complaints(extension=large) == ["installed, it has 4.1 MB, and 4 MB is the limit"]
    monkeypatch.setattr(wheels, "WHEEL_BYTES", 1000)
    first, second = complaints(extension=large)
    assert first.startswith("the wheel has 0.0 MB, and 0 MB")
    assert second.startswith("installed, it has")


def test_sources_of_this_checkout_are_allowed(complaints):
    """The list of what a wheel may hold keeps up with the package."""
    found = wheels.sources(ROOT)
    assert {"jax_fa/__init__.py", "jax_fa/_jax_fa.pyi", "jax_fa/py.typed"} <= found
    extra = [(file, b"") for file in found]
    assert not [line for line in complaints(extra=extra) if line.startswith("must not hold")]


def test_a_wheel_that_is_not_as_it_must_be_ends_the_release(tmp_path):
    path = tmp_path / NAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tests/test_aot.py", b"")
    with pytest.raises(SystemExit, match="must not hold tests/test_aot.py"):
        wheels.check(path, ROOT)


# ------------------------------------------------------------------------------------ the command


def test_a_folder_that_an_interrupted_run_left_is_filled_anew(tmp_path):
    folder = tmp_path / "tree"

    def fill(folder, *, fails):
        (folder / "file").write_text("part" if fails else "whole")
        if fails:
            raise SystemExit

    with pytest.raises(SystemExit):
        release.once(folder, lambda folder: fill(folder, fails=True))
    (folder / "left").touch()
    release.once(folder, lambda folder: fill(folder, fails=False))
    release.once(folder, lambda folder: pytest.fail("filled already"))
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_text() == "whole"


def test_every_tag_of_a_release_is_one_that_the_checker_knows():
    assert set(release.ABIS) == set(wheels.ABIS)
    assert {machine.name for machine in release.debian.MACHINES} == set(wheels.MACHINES)
    assert set(release.ABIS.values()) <= set(release.debian.PYTHONS)
