"""Writes ``schema.h``, the C++ side of ``jax_fa/spec/schema.py``: needs no jax and no extension."""

from pathlib import Path

import run_aot  # noqa: F401 (puts an empty package in the place of jax_fa)

from jax_fa.spec import schema_cpp

if __name__ == "__main__":
    (Path(__file__).parent / "schema.h").write_text(schema_cpp.header())
