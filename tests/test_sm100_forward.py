"""The Blackwell forward: its plan, and one compiled kernel on the emulator."""

import ctypes
import importlib.util
import re
import shutil
import struct
import subprocess
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from oracle import Results, assert_close, tolerance

from jax_fa import aot
from jax_fa.band import UNBOUNDED, Band
from jax_fa.config import BLACKWELL, BLACKWELL_HEADS, KernelKey, choose_forward
from jax_fa.emulator import Launch, Memory, emulate
from jax_fa.emulator.ptx import parse
from jax_fa.kernels import abi
from jax_fa.kernels.edges import REGISTERS_PER_SM, PlanError, TmemRange, check, ledger
from jax_fa.kernels.sm100 import plan
from jax_fa.problem import Operands, Semantics

KEYS = [
    KernelKey(target, "bfloat16", d, dv, mask)
    for target in BLACKWELL
    for d, dv in BLACKWELL_HEADS
    for mask in abi.MASK_CLASSES
]
needs_dsl = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason=f"needs {aot.DSL_REQUIREMENT}"
)
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

# ---------------------------------------------------------------------------------------- the plan


def plan_for(key):
    return plan.forward_plan(key, choose_forward(key))


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_every_plan_fits_the_hardware(key):
    made = plan_for(key)
    assert sum(role.threads * role.registers for role in made.roles) <= REGISTERS_PER_SM
    assert made.edge("kv").stages >= 2
    assert made.smem_bytes <= 227 * 1024


def test_polynomials_are_left_to_targets_with_slow_exponentials():
    shares = {key.arch: choose_forward(key).polynomials for key in KEYS if key.head_dim == 64}
    assert shares["sm_100f"] > 0 and shares["sm_103f"] == 0


def test_a_head_size_without_a_kernel_is_refused_with_those_that_have_one():
    with pytest.raises(NotImplementedError, match="256/256.*128/128"):
        choose_forward(KernelKey("sm_100f", "bfloat16", 256, 256, "full"))


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda p: {"tmem": (*p.tmem, TmemRange("more", 100, 4))}, "overlap"),
        (lambda p: {"tmem": (*p.tmem, TmemRange("more", 510, 4))}, "columns 510 to 514"),
        (lambda p: {"roles": (replace(p.roles[0], registers=208), *p.roles[1:])}, "67584"),
        (lambda p: {"roles": (*p.roles[:3], replace(p.roles[3], registers=40), *p.roles[4:])},
         "share a warpgroup"),
        (lambda p: {"edges": (*p.edges, replace(p.edges[0], data="x", producer="lode"))}, "lode"),
        (lambda p: {"edges": (*p.edges, p.edges[0])}, "twice"),
    ],
)  # fmt: skip
def test_a_plan_that_contradicts_itself_is_refused(change, complaint):
    made = plan_for(KEYS[0])
    with pytest.raises(PlanError, match=complaint):
        check(replace(made, **change(made)))


def test_the_ledger_names_every_edge_and_its_arrivals():
    made = plan_for(KEYS[0])
    text = ledger(made)
    assert all(re.search(rf"^{edge.data} .*full\(\d", text, re.M) for edge in made.edges)
    assert "over s0: Note [P overwrites S]" in text and "Note [P overwrites S]" in plan.__doc__


# -------------------------------------------------------------------------------------- one kernel

# What exported objects call to launch, as in ffi/driver.cc, handing the arguments on instead.
SEAM = """
typedef int (*Take)(const void*, void**);
static Take take;
void set_take(Take f) { take = f; }
int _cudaLibraryLoadData(void** l, void* c) { *l = c; return 0; }
int _cudaLibraryGetKernel(void** k, void* l, char* n) { *k = n; return 0; }
int _cudaGetDevice(int* d) { *d = 0; return 0; }
int _cudaDeviceGetAttribute(int* v, int a, int d) { *v = a == 97 ? 232448 : 10; return 0; }
int _cudaFuncSetAttribute(void* f, int a, int v) { return 0; }
int _cudaKernelSetAttributeForDevice(void* k, int a, int v, int d) { return 0; }
int _cuKernelGetAttribute(int* v, int a, void* k, int d) { *v = 0; return 0; }
int _cudaLaunchKernelEx(void* config, void* k, void** args) { return take(config, args); }
"""
CODES = {"pointer": "<Q", "int32": "<i", "float32": "<f", "stream": "<Q"}


class LaunchConfig(ctypes.Structure):
    """The start of cudaLaunchConfig_t."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_size_t),
    ]


def build(folder, key):
    """PTX, and the library that launches it."""
    import cutlass.cute as cute

    from jax_fa.kernels.sm100 import fwd

    aot._preload_runtime()
    entry, arguments = fwd.make_entry(key, choose_forward(key))
    options = f"--gpu-arch {key.arch} --keep-ptx --dump-dir {folder}"
    cute.compile(entry, *arguments, options=options).export_to_c(str(folder), "k", "k")
    (folder / "seam.c").write_text(SEAM)
    library = folder / "k.so"
    # -Bsymbolic: the DSL's own runtime, loaded for the export, has functions of the same names.
    options = ["-shared", "-fPIC", "-w", "-Wl,-Bsymbolic"]
    command = ["cc", *options, "-o", library, folder / "k.o", folder / "seam.c"]
    subprocess.run(command, check=True, capture_output=True)
    symbol = re.search(r"^void (_mlir_k__mlir_ciface\w+)", (folder / "k.h").read_text(), re.M)[1]
    (ptx,) = folder.glob("*.ptx")
    return ptx.read_text(), ctypes.CDLL(str(library)), symbol


def record(built, values):
    """The launch that the host entry makes of ``values``, by names of ``abi.FORWARD``."""
    ptx, library, symbol = built
    sizes = [param.size for param in parse(ptx).kernel(None).params]
    launches = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
    def take(config, args):
        config = LaunchConfig.from_address(config)
        params = tuple(ctypes.string_at(args[i], size) for i, size in enumerate(sizes))
        grid, block = tuple(config.grid), tuple(config.block)
        launches.append(Launch(grid, block, params, config.shared_bytes))
        return 0

    library.set_take(take)
    module, status = ctypes.pointer(ctypes.c_void_p()), ctypes.pointer(ctypes.c_int())
    pointers = [ctypes.cast(ctypes.pointer(x), ctypes.c_void_p) for x in (module, status)]
    library._mlir_k_cuda_init((ctypes.c_void_p * 2)(*pointers))
    packed = [struct.pack(CODES[kind], values.get(name, 0)) for name, kind in abi.FORWARD]
    buffers = [ctypes.create_string_buffer(x) for x in (*packed, bytes(4))]
    addresses = (ctypes.c_void_p * len(buffers))(*[ctypes.addressof(b) for b in buffers])
    getattr(library, symbol)(addresses, len(buffers))
    (launch,) = launches
    return ptx, launch


@needs_dsl
@needs_compiler
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of the DSL, within the DSL
def test_a_compiled_kernel_is_right_on_the_emulator(tmp_path):
    """Two query tiles, the second partly used; several key blocks, the last partly used."""
    key = KernelKey("sm_100f", "bfloat16", 64, 64, "full")
    built = build(tmp_path, key)
    (q_len, kv_len), heads = (200, 300), (2, 1)
    random = np.random.default_rng(0)
    q, k, v = (
        random.standard_normal((1, length, n, 64)).astype(ml_dtypes.bfloat16)
        for length, n in ((q_len, heads[0]), (kv_len, heads[1]), (kv_len, heads[1]))
    )
    out, lse = np.full_like(q, np.nan), np.full((1, q_len, heads[0]), np.nan, np.float32)
    memory = Memory()
    arrays = {"q": q, "k": k, "v": v, "out": out}
    values: dict[str, float] = {
        name: memory.add(name, array.view(np.uint16)) for name, array in arrays.items()
    }
    values |= {"lse": memory.add("lse", lse), "scale": 64**-0.5, "soft_cap": 1.0}
    values |= {"batch": 1, "num_sequences": 1, "q_len": q_len, "kv_len": kv_len, "num_sms": 1}
    values |= {"num_q_heads": heads[0], "num_kv_heads": heads[1]}
    values |= {"window_left": UNBOUNDED, "window_right": UNBOUNDED}
    ptx, launch = record(built, values)
    emulate(ptx, launch, memory, seed=1)
    wanted = tolerance(Operands(q, k, v), Semantics(64**-0.5, Band()))
    assert_close(Results(out, lse), wanted, "bfloat16")
