"""``python -m jax_fa``: what this installation is, what it runs here, and how to mend it."""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import jaxlib

import jax_fa
from jax_fa import bindings, gpus, installation, support, variants
from jax_fa.choice import Target


def _versions() -> Iterator[str]:
    yield f"jax_fa {jax_fa.__version__} in {Path(jax_fa.__file__).parent}"
    yield (
        f"Python {platform.python_version()}, jax {jax.__version__}, jaxlib {jaxlib.__version__}, "
        f"{platform.system()} {platform.machine()}"
    )
    yield f"JAX's default platform: {jax.default_backend()}"


def _hardware(found: tuple[gpus.Gpu, ...]) -> Iterator[str]:
    if not found:
        yield "GPUs: none (no NVIDIA driver shows one)"
    for number, gpu in enumerate(found):
        arch = variants.arch_of(gpu.capability)
        family = f"family {arch.name}" if arch else "no kernels exist for it"
        yield f"GPU {number}: {gpu.name}, compute capability {gpu.capability}: {family}"
    if found and jax.default_backend() not in ("gpu", "cuda"):
        yield (
            "JAX does not use a GPU here; `pip install -U 'jax[cuda13]'` gives it CUDA "
            "(JAX_PLATFORMS, if set, has to allow it)"
        )


def _kernels(compiled: frozenset[str]) -> Iterator[str]:
    count = Counter(map(variants.arch_name, compiled))
    listed = ", ".join(f"{name} ({count[name]} variants)" for name in sorted(count)) or "none"
    yield f"GPU kernels in this installation: {listed}"


def _fallbacks(found: tuple[gpus.Gpu, ...], compiled: frozenset[str]) -> Iterator[str]:
    capabilities = sorted({gpu.capability for gpu in found})
    targets = {"CPU": Target("cpu")}
    targets |= {
        f"GPU of capability {capability}": Target("cuda", compiled, (capability,))
        for capability in capabilities
    }
    for name, target in targets.items():
        unfused = support.unfused(target)
        everything = len(unfused) == len(support.features())
        yield f"runs unfused on this {name}: {'everything' if everything else '; '.join(unfused)}"


def report() -> str:
    """The whole text, one fact a line."""
    found, compiled = gpus.at_hand(), bindings.compiled()
    at_hand = [variants.arch_of(gpu.capability) for gpu in found]
    wanted = {arch.name for arch in at_hand if arch is not None}
    missing = sorted(wanted - set(map(variants.arch_name, compiled)))
    lines = [*_versions(), *_hardware(found), *_kernels(compiled), *_fallbacks(found, compiled)]
    if missing:
        lines.append(f"To compile the kernels of {', '.join(missing)} and install them:")
        lines.append(f"  {installation.command(missing)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(report())
