"""The compiled core: what takes most of the time, in C++ (ffi/emulator_*.h).

Optional. Without the extension, numpy computes the same bits, several times slower.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def _core() -> Any:
    """The extension, if there is one that finds the data of numpy's arrays where it looks."""
    try:
        from jax_fa import _jax_fa
    except ImportError:
        return None
    probe = np.arange(4)
    is_found = _jax_fa.address_of(probe) == probe.__array_interface__["data"][0]
    return _jax_fa if is_found else None


core: Any = _core()
"""The extension module, or None."""
