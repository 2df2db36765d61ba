"""`python -m jax_fa.aot` for the build: before jax_fa's extension exists, and without jax.

An empty package stands in for jax_fa, whose own __init__ needs both. At module level, because every
compiling process of the ahead-of-time step runs this file again.
"""

import sys
import types
from pathlib import Path

stand_in = types.ModuleType("jax_fa")
stand_in.__path__ = [str(Path(__file__).resolve().parent.parent / "jax_fa")]
sys.modules["jax_fa"] = stand_in

if __name__ == "__main__":
    from jax_fa.aot import compiler

    sys.exit(compiler.main())
