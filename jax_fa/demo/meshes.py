"""The mesh that the demo trains on: its devices, and what each of them holds.

Windows of a batch are split over "data", heads and the MLP over "model", tokens over "context".
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fa.demo.model import ModelConfig

# The axis of each dimension, by the layer of a kernel; all else is whole on every device.
_SPLIT = {
    "qkv": P(None, "model"),  # [C, K, N / K + 2, D]
    "out": P("model"),  # [N, D, C]
    "gate": P(None, "model"),  # [C, hidden]
    "up": P(None, "model"),  # [C, hidden]
    "down": P("model"),  # [hidden, C]
}


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis.

    Attributes:
        data: devices that share a batch.
        model: devices that share the heads and the MLP.
        context: devices that share the tokens of a sequence.
    """

    data: int = 1
    model: int = 1
    context: int = 1

    @classmethod
    def of(cls, text: str) -> MeshConfig:
        """Reads ``data=2,model=2,context=2``; an axis that is left out has one device.

        Raises:
            ValueError: the text says something else.
        """
        axes = [field.name for field in fields(cls)]
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = part.partition("=")
            if name not in axes or name in sizes or not size.isdecimal() or int(size) < 1:
                raise ValueError(
                    f"--mesh {text}: {part!r} is not understood. Give each of the axes "
                    f"{', '.join(axes)} at most once, with its number of devices, such as "
                    f"data=2,model=2,context=2."
                )
            sizes[name] = int(size)
        return cls(**sizes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in asdict(self).items())

    @property
    def size(self) -> int:
        """Devices of the mesh."""
        return self.data * self.model * self.context

    def check(self, model: ModelConfig, batch_size: int) -> None:
        """Raises ValueError where an axis does not divide what is split over it."""
        shared = {
            "data": ("batch_size", batch_size),
            "model": ("num_kv_heads", model.num_kv_heads),
            "context": ("context", model.context),
        }
        for axis, size in asdict(self).items():
            name, extent = shared[axis]
            if extent % size:
                fitting = [str(x) for x in range(1, extent + 1) if extent % x == 0]
                raise ValueError(
                    f"--mesh {self}: {name} is {extent}, which {size} devices cannot share evenly. "
                    f"{axis} may be {', '.join(fitting)}; or make {name} a multiple of {size}."
                )

    def make(self) -> Mesh:
        """The mesh, on the first devices; on CPUs of as many virtual ones as it takes.

        Several processes (``jax.distributed``) bring their devices, and use all of them.

        Raises:
            ValueError: there are too few devices, or processes have too many.
        """
        if not jax.distributed.is_initialized():
            with suppress(RuntimeError):  # JAX has started: its devices are those that there are
                jax.config.update("jax_num_cpu_devices", self.size)
        devices = jax.devices()
        if jax.process_count() > 1 and len(devices) != self.size:
            raise ValueError(
                f"--mesh {self} takes {self.size} devices, and the {jax.process_count()} processes "
                f"have {len(devices)}. Give a mesh of {len(devices)}, or start processes that have "
                f"{self.size} devices in all."
            )
        if len(devices) < self.size:
            platform = devices[0].platform
            virtual = f"XLA_FLAGS=--xla_force_host_platform_device_count={self.size}"
            advice = f"Set {virtual} before JAX starts"
            if platform != "cpu":
                advice = "Set JAX_PLATFORMS=cpu for virtual devices"
            raise ValueError(
                f"--mesh {self} takes {self.size} devices, and JAX has started with "
                f"{len(devices)} ({platform}). {advice}, or give a smaller mesh."
            )
        sizes = asdict(self)
        return jax.make_mesh(
            tuple(sizes.values()),
            tuple(sizes),
            axis_types=(AxisType.Auto,) * len(sizes),
            devices=devices[: self.size],
        )


def shardings(mesh: Mesh, state: Any) -> Any:
    """The part of each array of a training state that a device holds."""

    def of_array(path: tuple[Any, ...], _: Any) -> NamedSharding:
        names = {getattr(key, "key", None) for key in path}
        return NamedSharding(mesh, next((_SPLIT[x] for x in _SPLIT if x in names), P()))

    return jax.tree_util.tree_map_with_path(of_array, state)


def placed(mesh: Mesh, windows: np.ndarray) -> Array:
    """Windows [B, T + 1], each on the devices that work on it."""
    split = NamedSharding(mesh, P("data"))
    return jax.make_array_from_callback(windows.shape, split, lambda part: windows[part])


def whole(mesh: Mesh, state: Any) -> Any:
    """A state on one device of each process."""
    gathered = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(state)
    return jax.tree.map(lambda x: x.addressable_data(0), gathered)
