"""Files with the PTX of compiled kernels, in the folder that a build takes and in an installation.

The texts of a kernel for several element types and several GPUs differ little, so they share a
compressed archive, with 0.4 times the bytes of one file for each.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from jax_fa.spec.arch import OPERATIONS, arch_named
from jax_fa.spec.names import kind_of

SUFFIX = ".tar.xz"
_TEXT = ".ptx"


def archive_of(variant: str) -> str:
    """Name of the archive that contains a variant's text."""
    prefix, arch, _, rest = variant.split("_", 3)
    (operation,) = (known for known in OPERATIONS if known == prefix)
    folder = arch_named(arch).kernels(kind_of(operation, rest)).folder
    return f"{folder}_{operation}_{rest}{SUFFIX}"


def packed(texts: Mapping[str, bytes]) -> bytes:
    """An archive of ``texts``, which are by variant; equal texts give equal bytes."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:xz") as archive:
        for variant, text in sorted(texts.items()):
            member = tarfile.TarInfo(variant + _TEXT)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    return file.getvalue()


def unpacked(archive: bytes) -> dict[str, bytes]:
    """The texts in an archive, by variant."""
    texts: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:xz") as found:
        for member in found:
            file = found.extractfile(member)
            texts[member.name.removesuffix(_TEXT)] = b"" if file is None else file.read()
    return texts


def read(folder: Path, variant: str) -> bytes | None:
    """The text of a variant; None if the folder lacks it."""
    path = folder / archive_of(variant)
    return _texts(path, path.stat().st_mtime_ns).get(variant) if path.exists() else None


def read_all(folder: Path) -> dict[str, bytes]:
    """All texts of a folder, by variant."""
    texts: dict[str, bytes] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        texts |= unpacked(path.read_bytes())
    return texts


@lru_cache(maxsize=8)
def _texts(path: Path, _modified: int) -> dict[str, bytes]:
    return unpacked(path.read_bytes())
