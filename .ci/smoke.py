"""Runs attention and its gradient, and a GPU kernel in the emulator, from an installed jax_fa.

Results are compared with the tests' oracle, which is numpy: under qemu, XLA compiles for minutes.
"""

import argparse
import functools
import sys
from pathlib import Path

import jax
import numpy as np

import jax_fa
from jax_fa import _jax_fa
from jax_fa.runtime import bindings
from jax_fa.spec.band import Band
from jax_fa.spec.problem import Operands, Semantics

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from helpers import oracle  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--variants", type=int, help="GPU kernels that the extension has to hold")
parser.add_argument("--isa", help="instructions that the CPU kernels have to choose")
parser.add_argument("--no-ptx", action="store_true", help="the build left PTX out")
options = parser.parse_args()


def check(is_right, text):
    if not is_right:
        raise SystemExit(f"{jax_fa.__file__}: {text}")


compiled, isa = bindings.compiled(), _jax_fa.cpu_isa()
check(options.variants in (None, len(compiled)), f"holds {len(compiled)} kernels of GPUs")
check(options.isa in (None, isa), f"runs {isa} on this CPU")

causal = functools.partial(jax_fa.attention, is_causal=True)
semantics = Semantics(scale=0.125, band=Band(is_causal=True))
random = np.random.default_rng(0)

q, k, v, dout = random.standard_normal((4, 1, 33, 2, 64), np.float32)
out, pull_back = jax.vjp(causal, q, k, v)
got = oracle.Results(out, None, *pull_back(dout))
wanted = oracle.tolerance(Operands(q, k, v), semantics, (dout, np.zeros((1, 33, 2))))
oracle.assert_close(got, wanted, "float32", "CPU kernels")

q, k, v = random.standard_normal((3, 1, 33, 1, 64)).astype(jax.numpy.bfloat16)
try:
    with jax_fa.emulation("sm90"):
        got = oracle.Results(causal(q, k, v, implementation="emulated"), None)
except NotImplementedError as error:
    check(options.no_ptx and "JAX_FA_PTX=OFF" in str(error), error)
else:
    check(not options.no_ptx, "holds PTX")
    wanted = oracle.tolerance(Operands(q, k, v), semantics)
    oracle.assert_close(got, wanted, "bfloat16", "emulated kernel")
print(f"{jax_fa.__file__}: runs, with {len(compiled)} GPU kernels; {isa} on this CPU")
