"""Where this installation came from, and the command that gives it the GPU kernels it lacks."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import shlex
import urllib.parse
import urllib.request
from collections.abc import Collection
from pathlib import Path


@functools.cache
def checkout() -> Path | None:
    """The folder that pip installed this package from; None if it was a wheel or is gone."""
    try:
        text = importlib.metadata.distribution("jax_fa").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        # Run from a checkout, beside an extension that was built in place.
        folder = Path(__file__).resolve().parent.parent
    else:
        url = urllib.parse.urlsplit(json.loads(text)["url"] if text else "")
        if url.scheme != "file":
            return None
        folder = Path(urllib.request.url2pathname(url.path))
    return folder if (folder / "pyproject.toml").is_file() else None


def command(families: Collection[str]) -> str:
    """The shell command that builds and installs jax_fa again, with kernels of GPU ``families``.

    Where the sources are not known, it is to be run in a checkout.
    """
    source = checkout()
    where = "." if source is None else shlex.quote(str(source))
    return f"JAX_FA_GPU={','.join(families)} pip install --force-reinstall --no-deps {where}"
