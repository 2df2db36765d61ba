"""The compiled core: what takes most of the time, in C++ (ffi/emulator_*.h).

Optional. Without the extension, numpy computes the same bits, several times slower.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

core: Any = None
"""The extension module, or None."""

with suppress(ImportError):
    from jax_fa import _jax_fa

    core = _jax_fa
