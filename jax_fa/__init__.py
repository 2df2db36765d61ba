"""Exact fused attention for JAX: a drop-in for ``jax.nn.dot_product_attention``, and more."""

from importlib import import_module as _import_module
from pkgutil import extend_path as _extend_path
from types import ModuleType as _ModuleType

# In a checkout this folder shadows the installed package, which is where the extension is.
__path__ = _extend_path(__path__, __name__)

from jax_fa import parallel as parallel
from jax_fa.api import Explanation as Explanation
from jax_fa.api import attention as attention
from jax_fa.api import attention_varlen as attention_varlen
from jax_fa.api import attention_with_lse as attention_with_lse
from jax_fa.api import backward as backward
from jax_fa.api import explain as explain
from jax_fa.api import forward as forward
from jax_fa.drop_in import replace_jax_nn as replace_jax_nn
from jax_fa.runtime.bindings import export_disabled_checks as export_disabled_checks
from jax_fa.runtime.bindings import register as _register
from jax_fa.runtime.emulation_settings import emulation as emulation
from jax_fa.runtime.fallback import FallbackWarning as FallbackWarning
from jax_fa.runtime.lowering import lowering_for as lowering_for
from jax_fa.runtime.partitioner import register as _register_partitioner

__version__ = "0.1.0"

_register()
_register_partitioner()


def __getattr__(name: str) -> _ModuleType:
    """``jax_fa.flax`` and ``jax_fa.equinox``: imported when asked for, since they need more."""
    if name in ("flax", "equinox"):
        return _import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
