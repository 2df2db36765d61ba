"""What wheels of a release must hold and must not, how large they may be, and what they run on.

``python .ci/wheels.py WHEEL...`` prints a line for each, and fails where one is not as it must be.
"""

import re
import struct
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

WHEEL_BYTES = 60_000_000  # the package index takes 100 MB
INSTALLED_BYTES = 154_000_000  # 150 MB is the aim; tiles of two sizes take 5, products of a bias 2
GLIBC = (2, 34)  # dlopen moved into libc.so.6 with it, and Debian 12 links that one

MACHINES = {"x86_64": 62, "aarch64": 183}
"""Processors of a release, and what an ELF file calls them (``e_machine``)."""

ABIS = {"cp311-cp311": ".cpython-311-{machine}-linux-gnu.so", "cp312-abi3": ".abi3.so"}
"""Tags of a release, and how names of the extension end."""

# All that a wheel may hold beside the extension.
_CONTENTS = (
    r"jax_fa/([a-z]\w*/){0,2}\w+\.py",
    r"jax_fa/(emulator|kernels)/README\.md",
    r"jax_fa/(_jax_fa\.pyi|py\.typed)",
    r"jax_fa/ptx/(sm\d+|mma_sync)_(fwd|bwd|dbias)_\w+\.tar\.xz",
    r"jax_fa-[\w.]+\.dist-info/(METADATA|WHEEL|RECORD|licenses/LICENSE)",
)
_NAME = re.compile(
    r"jax_fa-(?P<version>[\w.]+)-(?P<abi>cp\d+-\w+)-"
    r"manylinux_(?P<major>\d+)_(?P<minor>\d+)_(?P<machine>\w+)\.whl"
)


def sources(root: Path) -> set[str]:
    """The files of the package in a checkout: Python, stubs and their marker."""
    found = (
        path for end in ("*.py", "*.pyi", "py.typed") for path in root.glob(f"jax_fa/**/{end}")
    )
    return {path.relative_to(root).as_posix() for path in found}


def complaints(wheel: Path, wanted: set[str], variants: set[str] | None = None) -> Iterator[str]:
    """What is wrong with a wheel, a line each.

    Args:
        wheel: its path.
        wanted: files of the package that it must hold, and no others of their kind.
        variants: names of the kernels whose PTX it must hold; None for any.
    """
    name = _NAME.fullmatch(wheel.name)
    if name is None:
        yield f"not named as jax_fa's wheels for manylinux are: {wheel.name}"
        return
    if (glibc := (int(name["major"]), int(name["minor"]))) > GLIBC:
        yield f"needs glibc {glibc[0]}.{glibc[1]}, and {GLIBC[0]}.{GLIBC[1]} has to do"
    if name["abi"] not in ABIS or name["machine"] not in MACHINES:
        yield f"of no ABI or processor of a release: {wheel.name}"
        return
    sizes = contents(wheel)
    with zipfile.ZipFile(wheel) as archive:
        extension = "jax_fa/_jax_fa" + ABIS[name["abi"]].format(machine=name["machine"])
        start = archive.read(extension)[:20] if extension in sizes else b""
    if not start:
        yield f"lacks {extension}"
    elif struct.unpack_from("<H", start, 18)[0] != MACHINES[name["machine"]]:
        yield f"{extension} is for another processor than {name['machine']}"
    allowed = re.compile("|".join([*_CONTENTS, re.escape(extension)]))
    for file in sorted(sizes):
        if not allowed.fullmatch(file):
            yield f"must not hold {file}"
    held = {file for file in sizes if re.search(r"^jax_fa/.*(\.pyi?|py\.typed)$", file)}
    for file in sorted(wanted ^ held):
        yield f"lacks {file}" if file in wanted else f"holds {file}, which the checkout lacks"
    if variants is not None:
        for variant in sorted(variants ^ ptx(wheel)):
            yield f"{'lacks' if variant in variants else 'must not hold'} the PTX of {variant}"
    for what, size, limit in (
        ("the wheel", wheel.stat().st_size, WHEEL_BYTES),
        ("installed, it", sum(sizes.values()), INSTALLED_BYTES),
    ):
        if size > limit:
            yield f"{what} has {size / 1e6:.1f} MB, and {limit / 1e6:.0f} MB is the limit"


def contents(wheel: Path) -> dict[str, int]:
    """The files in a wheel, and their bytes."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            entry.filename: entry.file_size for entry in archive.infolist() if not entry.is_dir()
        }


def ptx(wheel: Path) -> set[str]:
    """The variants whose PTX is in a wheel."""
    found = set()
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if name.startswith("jax_fa/ptx/") and name.endswith(".tar.xz"):
                with files.open(name) as file, tarfile.open(fileobj=file, mode="r|xz") as archive:
                    found |= {Path(text).stem for text in archive.getnames()}
    return found


def summary(wheel: Path) -> str:
    """Name and sizes in one line."""
    sizes = contents(wheel)
    texts = sum(size for file, size in sizes.items() if file.startswith("jax_fa/ptx/"))
    return (
        f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, installed "
        f"{sum(sizes.values()) / 1e6:.1f} MB, of which PTX of {len(ptx(wheel))} variants "
        f"{texts / 1e6:.1f} MB"
    )


def check(wheel: Path, root: Path, variants: set[str] | None = None) -> None:
    """Prints what a wheel is, and ends everything where it is not as it must be."""
    print(summary(wheel), flush=True)
    found = list(complaints(wheel, sources(root), variants))
    if found:
        raise SystemExit("\n".join(f"{wheel.name}: {line}" for line in found))


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        check(path, Path(__file__).parent.parent)
