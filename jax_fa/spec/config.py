"""The choice of a kernel's configuration by its key, whatever the family."""

from __future__ import annotations

from collections.abc import Callable

from jax_fa.spec.arch import Operation, arch_of_target
from jax_fa.spec.chosen_mma_sync import (
    few_queries,
    mma_sync_backward,
    mma_sync_bias_gradient,
    mma_sync_forward,
)
from jax_fa.spec.chosen_sm90 import hopper_forward
from jax_fa.spec.config_mma_sync import (
    FewQueries,
    MmaSyncBackward,
    MmaSyncBiasGradient,
    MmaSyncForward,
)
from jax_fa.spec.config_sm90 import HopperForward
from jax_fa.spec.config_sm90_bwd import HopperBackward, hopper_backward
from jax_fa.spec.config_sm90_dbias import HopperBiasGradient, hopper_bias_gradient
from jax_fa.spec.config_sm100 import (
    BlackwellBackward,
    BlackwellForward,
    blackwell_backward,
    blackwell_forward,
)
from jax_fa.spec.key import KernelKey
from jax_fa.spec.names import kind_of, stem

ForwardConfig = FewQueries | MmaSyncForward | HopperForward | BlackwellForward
BackwardConfig = MmaSyncBackward | HopperBackward | BlackwellBackward
BiasGradientConfig = MmaSyncBiasGradient | HopperBiasGradient


def _folder(key: KernelKey, operation: Operation) -> str:
    """The folder with the code of the kernel for ``key``.

    Raises:
        NotImplementedError: no kernel is written for its architecture or head sizes.
    """
    kernels = arch_of_target(key.arch).kernels(kind_of(operation, stem(key)))
    if (key.head_dim, key.value_dim) not in kernels.heads:
        known = ", ".join(f"{d}/{dv}" for d, dv in kernels.heads)
        raise NotImplementedError(
            f"no {operation} kernel for D/Dv {key.head_dim}/{key.value_dim} on {key.arch}; "
            f"there are {known}"
        )
    return kernels.folder


def choose_forward(key: KernelKey) -> ForwardConfig:
    """The forward configuration for ``key``.

    Raises:
        NotImplementedError: no kernel is written for its architecture or head sizes.
    """
    folder = _folder(key, "fwd")
    return few_queries(key) if key.is_few else _FORWARDS[folder](key)


def choose_backward(key: KernelKey) -> BackwardConfig:
    """The backward configuration for ``key``.

    Raises:
        NotImplementedError: no kernel is written for its architecture or head sizes.
    """
    return _BACKWARDS[_folder(key, "bwd")](key)


def choose_dbias(key: KernelKey) -> BiasGradientConfig:
    """The configuration of the gradient of a bias for ``key``.

    Raises:
        NotImplementedError: no kernel is written for its architecture or head sizes.
    """
    return _BIAS_GRADIENTS[_folder(key, "dbias")](key)


_FORWARDS: dict[str, Callable[[KernelKey], ForwardConfig]] = {
    "mma_sync": mma_sync_forward,
    "sm90": hopper_forward,
    "sm100": blackwell_forward,
}
_BACKWARDS: dict[str, Callable[[KernelKey], BackwardConfig]] = {
    "mma_sync": mma_sync_backward,
    "sm90": hopper_backward,
    "sm100": blackwell_backward,
}
_BIAS_GRADIENTS: dict[str, Callable[[KernelKey], BiasGradientConfig]] = {
    "mma_sync": mma_sync_bias_gradient,
    "sm90": hopper_bias_gradient,
}
"""The functions that choose a configuration, by the folder of the kernels."""
