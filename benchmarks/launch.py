"""``python -m benchmarks.launch``: what starting up and calling costs, beside an empty custom call.

Compiles ``empty_call.cc`` (needs a C++ compiler). Prints, for a small attention, its gradient and
the empty call, each in a process of its own: seconds to import jax_fa after jax, seconds to the
first result after that, and microseconds of a later call, medians over all but the first tenth.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_CALLS = 2000
_SHAPE = (1, 128, 2, 64)


def compile_empty_call(folder: Path) -> Path:
    """The library with the handler."""
    library = folder / "empty_call.so"
    source = Path(__file__).with_name("empty_call.cc")
    options = ["-std=c++17", "-O2", "-w", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}"]
    subprocess.run(["c++", *options, source, "-o", library], check=True)
    return library


def _empty(library: str) -> Callable[..., Any]:
    capsule = jax.ffi.pycapsule(ctypes.cdll.LoadLibrary(library).EmptyCall)
    platform = "CUDA" if jax.default_backend() == "gpu" else "cpu"
    jax.ffi.register_ffi_target("empty_call", capsule, platform=platform)

    def call(x: jax.Array) -> jax.Array:
        result: jax.Array = jax.ffi.ffi_call("empty_call", jax.ShapeDtypeStruct(x.shape, x.dtype))(
            x
        )
        return result

    return call


def _attention(x: jax.Array) -> jax.Array:
    import jax_fa

    return jax_fa.attention(x, x, x, is_causal=True)


def _gradient(x: jax.Array) -> jax.Array:
    return jax.grad(lambda x: _attention(x).astype(jnp.float32).sum())(x)


def measure(what: str, library: str) -> dict[str, float]:
    """Seconds to import, to the first result, and of a later call, in this process."""
    x = jax.block_until_ready(jnp.ones(_SHAPE, jnp.bfloat16))
    start = time.perf_counter()
    import jax_fa  # noqa: F401 - timed

    imported = time.perf_counter()
    function = {"attention": _attention, "gradient": _gradient, "empty call": _empty(library)}[what]
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(x))
    first = time.perf_counter()
    taken = []
    for _ in range(_CALLS):
        before = time.perf_counter()
        jax.block_until_ready(compiled(x))
        taken.append(time.perf_counter() - before)
    later = float(np.median(taken[_CALLS // 10 :]))
    return {"import": imported - start, "first": first - imported, "later": later}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if the first gradient takes a second more than an empty call."""
    parser = argparse.ArgumentParser("python -m benchmarks.launch", description=__doc__)
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "LIBRARY"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        print(json.dumps(measure(*args.measure)))
        return 0
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = str(compile_empty_call(Path(folder)))
        for what in ("empty call", "attention", "gradient"):
            command = [sys.executable, "-m", "benchmarks.launch", "--measure", what, library]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            results[what] = json.loads(done.stdout)
    print("| | import s | first result s | later call us |\n| --- | ---: | ---: | ---: |")
    for what, row in results.items():
        print(f"| {what} | {row['import']:.3f} | {row['first']:.3f} | {1e6 * row['later']:.1f} |")
    empty = results["empty call"]["first"]
    return int(max(row["import"] + row["first"] for row in results.values()) - empty > 1)


if __name__ == "__main__":
    sys.exit(main())
