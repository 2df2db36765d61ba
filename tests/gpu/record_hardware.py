"""Records what the Hopper GPU at hand computes, for the emulator's tests to compare with.

    python -m jax_fa.aot --arch sm90 --keep-ptx --output KERNELS  # and an install made of it
    JAX_PLATFORMS=cuda,cpu python tests/gpu/record_hardware.py KERNELS

Writes ``tests/emulator/recorded/``. ``--plan`` writes PTX and launches alone, for which no GPU is
needed, and leaves the results as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS))

from driver import Driver  # noqa: E402
from helpers import hardware, hardware_units  # noqa: E402
from helpers.cases import Case, make  # noqa: E402

from jax_fa import _jax_fa  # noqa: E402
from jax_fa.emulator import Launch, Memory  # noqa: E402
from jax_fa.runtime import bindings, primitives  # noqa: E402
from jax_fa.runtime.dispatch import Target, gpu_kernel  # noqa: E402
from jax_fa.spec.problem import Operands, Problem  # noqa: E402

CAPABILITY = 90


def plan(operation: str, case: Case, dtype: str) -> dict[str, Any]:
    """Variant, buffer addresses and launches of one call, in terms of the emulator."""
    semantics, operands = hardware.semantics(case), make(case, dtype).operands
    problem = Problem.of(operands, semantics)
    arrays = hardware.buffers("fwd", case, dtype, {})
    if operation == "bwd":
        forward = {name: arrays[name] for name in hardware.RESULTS["fwd"]}
        arrays = hardware.buffers("bwd", case, dtype, forward)
    memory = Memory()
    addresses = {name: memory.add(name, x) for name, x in arrays.items() if x.size}
    band = semantics.band
    call = {
        **addresses,
        **{name: getattr(problem, name) for name in "dtype batch num_sequences".split()},
        **{name: getattr(problem, name) for name in "q_len kv_len head_dim value_dim".split()},
        "num_q_heads": problem.num_q_heads,
        "num_kv_heads": problem.num_kv_heads,
        "scale": semantics.scale,
        "soft_cap": semantics.soft_cap or 0.0,
        "window_left": band.left_bound,
        "window_right": band.right_bound,
        "bottom_right": band.alignment == "bottom_right",
        "deterministic": semantics.deterministic,
        "kernel": gpu_kernel(
            problem, Target("cuda", bindings.compiled(), ("9.0",)), operation
        ).stem,
    }
    recorded = _jax_fa.record(operation, CAPABILITY, call)
    launches = [json.loads(Launch.from_record(launch).to_json()) for launch in recorded["launches"]]
    return {"kernel": recorded["variant"], "addresses": addresses, "launches": launches}


def measure(case: Case, dtype: str) -> dict[str, np.ndarray]:
    """Forward and gradients on the GPU."""
    import jax
    import jax.numpy as jnp

    data, semantics = make(case, dtype), hardware.semantics(case)

    @jax.jit
    def step(operands: Operands, cotangents: Any) -> Any:
        out, lse = primitives.forward(operands, semantics, "cuda")
        grads = primitives.backward(operands, semantics, (out, lse), cotangents, "cuda")
        return out, lse, grads

    operands = Operands(*(None if x is None else jnp.asarray(x) for x in data.operands))
    out, lse, grads = step(operands, data.cotangents)
    results = {"out": out, "lse": lse, "dq": grads.q, "dk": grads.k, "dv": grads.v}
    if grads.sinks is not None:
        results["dsinks"] = grads.sinks
    return {name: np.asarray(x) for name, x in results.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kernels", type=Path, help="folder with NAME.ptx of the installed kernels")
    parser.add_argument("--plan", action="store_true", help="PTX and launches alone")
    options = parser.parse_args()
    hardware.FOLDER.mkdir(exist_ok=True)
    members: dict[str, bytes] = {}
    results: dict[str, Any] = {"inputs.crc": hardware.checksum()}
    for dtype, case in hardware.CASES:
        for operation in hardware.RESULTS:
            planned = plan(operation, case, dtype)
            members[f"{operation}/{case.name}.json"] = json.dumps(planned).encode()
            name = planned["kernel"] + ".ptx"
            members[name] = (options.kernels / name).read_bytes()
        if not options.plan:
            for name, array in measure(case, dtype).items():
                kept = hardware.Recorded.of(array)
                results[f"{case.name}.{name}"] = kept.some
                results[f"{case.name}.{name}.crc"] = np.uint32(kept.crc)
    hardware.write_archive(members)
    if not options.plan:
        driver = Driver()
        units = {name: driver.run(unit) for name, unit in hardware_units.UNITS.items()}
        np.savez_compressed(hardware.FOLDER / "results.npz", **results)
        np.savez_compressed(hardware.FOLDER / "units.npz", **units)


if __name__ == "__main__":
    main()
