"""`python -m jax_fa.aot` whose kernels for Hopper are those for mma.sync: for tests on such a GPU.

The kernels of capabilities 8.x, compiled for sm_90, take the names of Hopper's: an extension that
is built with them (JAX_FA_GPU=DIR) runs them on an H100 or H200. Nothing of this is shipped.

    python tests/gpu/mma_sync_on_hopper.py --arch sm90 --variants 'fwd_sm90_bf16_*' --output DIR

At module level, because every compiling process of the ahead-of-time step runs this file again.
"""

import sys
import types
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

stand_in = types.ModuleType("jax_fa")
stand_in.__path__ = [str(ROOT / "jax_fa")]
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

if __name__ == "__main__":
    from jax_fa.aot import compiler

    sys.exit(compiler.main())
