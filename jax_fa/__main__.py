"""``python -m jax_fa``: reports the installation, what runs here and how to add what is missing."""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import jaxlib

import jax_fa
from jax_fa.runtime import bindings, gpus, installation, support
from jax_fa.runtime.dispatch import Target
from jax_fa.spec import variants
from jax_fa.spec.arch import arch_of, known_capabilities


def _versions() -> Iterator[str]:
    yield f"jax_fa {jax_fa.__version__} in {Path(jax_fa.__file__).parent}"
    yield (
        f"Python {platform.python_version()}, jax {jax.__version__}, jaxlib {jaxlib.__version__}, "
        f"{platform.system()} {platform.machine()}"
    )
    yield f"JAX computes on: {jax.default_backend()}"


def _hardware(found: tuple[gpus.Gpu, ...]) -> Iterator[str]:
    if not found:
        yield "GPUs: none (no NVIDIA driver shows one)"
    for gpu, count in Counter(found).items():
        arch = arch_of(gpu.capability)
        known = known_capabilities()
        family = f"family {arch.name}" if arch else f"no kernels exist for it, only for {known}"
        yield f"GPUs: {count} x {gpu.name}, compute capability {gpu.capability}: {family}"
    if found and jax.default_backend() not in ("gpu", "cuda"):
        yield (
            "JAX does not use a GPU here; `pip install -U 'jax[cuda13]'` gives it CUDA "
            "(JAX_PLATFORMS, if set, has to allow it)"
        )


def _kernels(compiled: frozenset[str]) -> Iterator[str]:
    if not compiled:
        yield "GPU kernels installed: none"
    for arch in variants.families(compiled):
        names = variants.run_by(arch, compiled)
        keys = [variant.key for variant in variants.VARIANTS if variant.name in names]
        dtypes = " and ".join(dict.fromkeys(key.dtype for key in keys))
        heads = ", ".join(
            f"{d}" if d == dv else f"{d}/{dv}"
            for d, dv in sorted({(key.head_dim, key.value_dim) for key in keys})
        )
        yield (
            f"GPU kernels installed: {arch.name}, {len(names)} variants: {dtypes}, "
            f"D or D/Dv of {heads}"
        )


def _fallbacks(found: tuple[gpus.Gpu, ...], compiled: frozenset[str]) -> Iterator[str]:
    targets = [("the CPU", Target("cpu"))]
    for gpu in dict.fromkeys(found):
        targets.append((gpu.name, Target("cuda", compiled, (gpu.capability,))))
    for name, target in targets:
        unfused = support.unfused(target)
        everything = len(unfused) == len(support.features())
        yield f"Runs unfused on {name}: {'everything' if everything else '; '.join(unfused)}"
    yield "What runs unfused gives the same results, slower."


def report() -> str:
    """The whole text, one fact a line; tests/test_installation.py shows an example."""
    found, compiled = gpus.at_hand(), bindings.compiled()
    at_hand = [arch_of(gpu.capability) for gpu in found]
    wanted = {arch.name for arch in at_hand if arch is not None}
    missing = sorted(wanted - {arch.name for arch in variants.families(compiled)})
    lines = [*_versions(), *_hardware(found), *_kernels(compiled), *_fallbacks(found, compiled)]
    if missing:
        families, place = ", ".join(missing), installation.where()
        lines.append(f"To compile the kernels of {families} and install them{place}:")
        lines.append(f"  {installation.command(missing)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(report())
