"""The warning that a call runs unfused although nobody asked for that."""

from __future__ import annotations

import warnings
from typing import Any


class FallbackWarning(UserWarning):
    """A call runs unfused because no kernel serves it."""


_warned: set[tuple[str, str]] = set()


def warn_once(platform: str, reason: str, q_len: Any, kv_len: Any) -> None:
    """Warns that a call runs unfused, the first time for ``reason`` on ``platform``.

    Args:
        platform: the platform that lacks a kernel; "" if all do.
        reason: why none serves the call.
        q_len: T; symbolic in a program that is exported with open extents.
        kv_len: S.
    """
    if (platform, reason) in _warned:
        return
    _warned.add((platform, reason))
    warnings.warn(
        f"attention: {reason.removesuffix('.')}. Running the unfused path, which computes the "
        f"{q_len} x {kv_len} scores in blocks of rows. jax_fa.explain(...) tells what runs where; "
        f"implementation='xla' asks for this path without the warning.",
        FallbackWarning,
        stacklevel=2,
    )
