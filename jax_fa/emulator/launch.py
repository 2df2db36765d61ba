"""A kernel launch, as record mode stores it and as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Extent = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
    """One launch.

    Attributes:
      grid, block, cluster: extents in CTAs, threads and CTAs.
      shared_bytes: dynamic shared memory per CTA.
      params: the raw bytes of each kernel parameter.
      kernel: entry to run; None when the PTX has only one.
    """

    grid: Extent
    block: Extent
    params: tuple[bytes, ...]
    shared_bytes: int = 0
    cluster: Extent = (1, 1, 1)
    kernel: str | None = None

    def __post_init__(self) -> None:
        for name in ("grid", "block", "cluster"):
            extent = getattr(self, name)
            if len(extent) != 3 or min(extent) < 1:
                raise ValueError(f"launch: {name} is {extent}; needs three positive extents")
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise ValueError(f"launch: grid {self.grid} is no multiple of cluster {self.cluster}")

    def to_json(self) -> str:
        """The launch as JSON text; parameter bytes in base64."""
        return json.dumps(
            {
                "kernel": self.kernel,
                "grid": self.grid,
                "block": self.block,
                "cluster": self.cluster,
                "shared_bytes": self.shared_bytes,
                "params": [base64.b64encode(p).decode() for p in self.params],
            },
            indent=1,
        )

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Launch:
        """A launch as the extension's record mode returns it."""
        return cls(
            tuple(record["grid"]),
            tuple(record["block"]),
            tuple(record["params"]),
            int(record["shared_bytes"]),
            tuple(record["cluster"]),
            record["kernel"],
        )

    @classmethod
    def from_json(cls, text: str) -> Launch:
        """The inverse of to_json; unknown keys (such as buffers) are ignored."""
        raw = json.loads(text)
        return cls(
            tuple(raw["grid"]),
            tuple(raw["block"]),
            tuple(base64.b64decode(p) for p in raw["params"]),
            int(raw.get("shared_bytes", 0)),
            tuple(raw.get("cluster", (1, 1, 1))),
            raw.get("kernel"),
        )

    @classmethod
    def load(cls, path: str | Path) -> Launch:
        """Reads a JSON file."""
        return cls.from_json(Path(path).read_text())
