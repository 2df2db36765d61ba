"""The kernels for mma.sync on a Hopper GPU: those of capabilities 8.x, compiled for sm_90.

They take the names of Hopper's, so that an extension that is built with them (JAX_FA_GPU=DIR) runs
them on an H100 or H200. Nothing of this is shipped. As a program it is `python -m jax_fa.aot`:

    python tests/gpu/mma_sync_on_hopper.py --arch sm90 --variants 'fwd_sm90_bf16_*' --output DIR

As a plugin of pytest it tells the installed jax_fa whose kernels these are:

    PYTHONPATH=tests/gpu JAX_PLATFORMS=cuda,cpu python -m pytest -p mma_sync_on_hopper tests/gpu

Both change the table of families before any module has read it. That is at module level, because
every compiling process of the ahead-of-time step runs this file again.
"""

import importlib
import importlib.util
import sys
import types
from dataclasses import replace
from pathlib import Path

IS_PLUGIN = __name__ == Path(__file__).stem

# Instead of jax_fa, whose own __init__ needs the extension, and reads the table.
stand_in = types.ModuleType("jax_fa")
if IS_PLUGIN:
    installed = importlib.util.find_spec("jax_fa")
    stand_in.__path__ = list(installed.submodule_search_locations)
else:
    stand_in.__path__ = [str(Path(__file__).resolve().parents[2] / "jax_fa")]
assert "jax_fa" not in sys.modules, "too late: jax_fa has read the table of families"
sys.modules["jax_fa"] = stand_in

from jax_fa.spec import arch  # noqa: E402

_PLAIN = arch.arch_named("sm80")
arch.ARCHS = tuple(
    replace(
        one,
        target="sm_90",
        fwd=_PLAIN.fwd,
        bwd=_PLAIN.bwd,
        bias=_PLAIN.bias,
    )
    if one.name == "sm90"
    else one
    for one in arch.ARCHS
)

if IS_PLUGIN:
    del sys.modules["jax_fa"]
    importlib.import_module("jax_fa")

if __name__ == "__main__":
    from jax_fa.aot import compiler

    sys.exit(compiler.main())
