"""The origin of this installation, and the command that adds the GPU kernels it lacks."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import shlex
import urllib.parse
import urllib.request
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple


class Origin(NamedTuple):
    """The source of this package, and how it was installed.

    Attributes:
        source: folder or repository, as pip takes it; None if it was a wheel or is gone.
        is_editable: it runs from ``source``.
        installer: "pip", "uv" and so on.
    """

    source: str | None = None
    is_editable: bool = False
    installer: str = "pip"


@functools.cache
def origin() -> Origin:
    """The origin of this package, according to its installer."""
    try:
        distribution = importlib.metadata.distribution("jax_fa")
    except importlib.metadata.PackageNotFoundError:
        # Run from a checkout, beside an extension that was built in place.
        return Origin(_checkout(Path(__file__).resolve().parents[2]))
    record = json.loads(distribution.read_text("direct_url.json") or "{}")
    installer = (distribution.read_text("INSTALLER") or "pip").strip()
    is_editable = record.get("dir_info", {}).get("editable", False)
    return Origin(_source(record), is_editable, installer)


def _source(record: dict[str, Any]) -> str | None:
    """The folder or repository of a direct URL record (PEP 610)."""
    url = urllib.parse.urlsplit(record.get("url", ""))
    if "vcs_info" in record:
        revision = record["vcs_info"]
        return f"{revision['vcs']}+{url.geturl()}@{revision['commit_id']}"
    if url.scheme != "file":
        return None
    return _checkout(Path(urllib.request.url2pathname(url.path)))


def _checkout(folder: Path) -> str | None:
    return str(folder) if (folder / "pyproject.toml").is_file() else None


def command(families: Collection[str]) -> str:
    """The shell command that reinstalls jax_fa with kernels for GPU ``families``.

    To be run at the place that ``where`` names.
    """
    source, is_editable, installer = origin()
    # uv keeps the wheels that it built from a folder, and rebuilds what it is told to reinstall.
    is_uv = installer == "uv"
    again = (
        "uv pip install --reinstall-package jax_fa" if is_uv else "pip install --force-reinstall"
    )
    path = "." if source is None else shlex.quote(source)
    editable = "-e " if is_editable else ""
    return f"JAX_FA_GPU={','.join(families)} {again} --no-deps {editable}{path}"


def where() -> str:
    """The place to run ``command``, as the end of a sentence; empty if any will do."""
    return " in a checkout of jax_fa" if origin().source is None else ""
