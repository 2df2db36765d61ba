"""``python -m benchmarks.launch``: what starting up and calling costs, beside an empty custom call.

Compiles ``empty_call.cc`` (needs a C++ compiler). Prints, for a small attention, its gradient, an
empty call of as many operands, results and attributes as a forward, and on a GPU such a call that
launches an empty kernel: seconds to import jax_fa after jax and seconds to the first result after
that, each in a process of its own; and microseconds of a later call, waited for and in a row of
calls that are waited for together, medians, in turns in one process.
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

_EMPTY, _LAUNCH = "empty call", "empty kernel"
_ROUNDS = 100
_IN_A_ROW = 20
_SHAPE = (1, 128, 2, 64)


def compile_empty_call(folder: Path) -> Path:
    """The library with the handlers."""
    library = folder / "empty_call.so"
    source = Path(__file__).with_name("empty_call.cc")
    options = ["-std=c++17", "-O2", "-w", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}"]
    subprocess.run(["c++", *options, source, "-o", library], check=True)
    return library


def _is_on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _called() -> list[str]:
    """What is timed."""
    return [_EMPTY, *([_LAUNCH] if _is_on_gpu() else []), "attention", "gradient"]


def _empty(what: str, library: str) -> Callable[..., Any]:
    """A call of a handler in ``library``."""
    handlers = ctypes.cdll.LoadLibrary(library)
    stages = {_EMPTY: {"execute": handlers.EmptyCall}}
    stages[_LAUNCH] = {
        "initialize": handlers.InitializeEmptyKernel,
        "execute": handlers.EmptyKernel,
    }
    capsules = {stage: jax.ffi.pycapsule(function) for stage, function in stages[what].items()}
    target = what.replace(" ", "_")
    platform = "CUDA" if _is_on_gpu() else "cpu"
    jax.ffi.register_ffi_target(target, capsules, platform=platform)

    from jax_fa.spec import schema

    absent = [np.zeros(0, np.int32)] * (len(schema.OPERANDS) - 3)
    zeros = {"float32": np.float32(0), "int32": np.int32(0), "bool": False, "string": ""}
    attributes = {x.name: zeros[x.kind] for x in schema.ATTRIBUTES if x.of}

    def call(x: jax.Array) -> jax.Array:
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        lse = jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)
        results: Sequence[jax.Array] = jax.ffi.ffi_call(target, [out, lse])(
            x, x, x, *absent, **attributes
        )
        return results[0]

    return call


def _attention(x: jax.Array) -> jax.Array:
    import jax_fa

    return jax_fa.attention(x, x, x, is_causal=True)


def _gradient(x: jax.Array) -> jax.Array:
    return jax.grad(lambda x: _attention(x).astype(jnp.float32).sum())(x)


def _compiled(what: str, library: str) -> Callable[..., Any]:
    """What is timed, compiled and called once."""
    function = {"attention": _attention, "gradient": _gradient}.get(what) or _empty(what, library)
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(jnp.ones(_SHAPE, jnp.bfloat16)))
    return compiled


def measure_start(what: str, library: str) -> dict[str, float]:
    """Seconds to import and to the first result, in this process."""
    jax.block_until_ready(jnp.ones(_SHAPE, jnp.bfloat16))
    start = time.perf_counter()
    import jax_fa  # noqa: F401 - timed

    imported = time.perf_counter()
    _compiled(what, library)
    return {"import": imported - start, "first": time.perf_counter() - imported}


def measure_calls(library: str) -> dict[str, dict[str, float]]:
    """Seconds of a call, waited for and in a row of calls, in turns in this process."""
    x = jnp.ones(_SHAPE, jnp.bfloat16)
    calls = {what: _compiled(what, library) for what in _called()}
    waited: dict[str, list[float]] = {what: [] for what in calls}
    in_a_row: dict[str, list[float]] = {what: [] for what in calls}
    for _ in range(_ROUNDS):
        for what, call in calls.items():
            for _ in range(_IN_A_ROW):
                before = time.perf_counter()
                jax.block_until_ready(call(x))
                waited[what].append(time.perf_counter() - before)
            before = time.perf_counter()
            results = [call(x) for _ in range(_IN_A_ROW)]
            in_a_row[what].append((time.perf_counter() - before) / _IN_A_ROW)
            jax.block_until_ready(results)
    kinds = {"waited": waited, "in a row": in_a_row}
    return {
        what: {kind: float(np.median(times[what])) for kind, times in kinds.items()}
        for what in calls
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if the first gradient takes a second more than an empty call."""
    parser = argparse.ArgumentParser("python -m benchmarks.launch", description=__doc__)
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "LIBRARY"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        what, library = args.measure
        measured = measure_calls(library) if what == "calls" else measure_start(what, library)
        print(json.dumps(measured))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        library = str(compile_empty_call(Path(folder)))

        def measured_alone(what: str) -> dict[str, Any]:
            command = [sys.executable, "-m", "benchmarks.launch", "--measure", what, library]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            return dict(json.loads(done.stdout))

        calls = measured_alone("calls")
        results = {what: measured_alone(what) for what in calls}
    print(
        "| | import s | first result s | call us | call in a row us |\n"
        "| --- | ---: | ---: | ---: | ---: |"
    )
    for what, row in results.items():
        times = " | ".join(f"{1e6 * calls[what][kind]:.1f}" for kind in ("waited", "in a row"))
        print(f"| {what} | {row['import']:.3f} | {row['first']:.3f} | {times} |")
    empty = results[_EMPTY]["first"]
    return int(max(row["import"] + row["first"] for row in results.values()) - empty > 1)


if __name__ == "__main__":
    sys.exit(main())
