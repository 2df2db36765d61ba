"""Calls record mode on seeded hostile problems: fuzz_record.py FOLDER FIRST_SEED COUNT.

FOLDER holds the extension. A call ends in launches or in a ValueError: a signal would be the end of
this process, and what a sanitizer finds (.ci/fuzz) is one. Imports nothing but the extension, so
that nothing else is under test.
"""

import importlib.util
import random
import sys
from pathlib import Path

INTS = (-(2**63), -(2**31), -1, 0, 1, 2, 3, 2**16, 2**29, 2**30 - 1, 2**30, 2**31, 2**40, 2**63 - 1)
FLOATS = (0.0, -1.0, 1e-45, 3e38, 1e300, float("inf"), float("-inf"), float("nan"))
EXTENTS = (
    *("batch", "num_sequences", "q_len", "kv_len", "num_q_heads", "num_kv_heads"),
    *("head_dim", "value_dim", "dq_dim"),
)
OF_MASK = ("mask_batch", "mask_heads", "mask_rows", "mask_width")
POINTERS = ("q", "k", "v", "out", "lse")
OPTIONAL = (
    *("q_lengths", "kv_lengths", "cu_seqlens_q", "cu_seqlens_k", "q_segments", "kv_segments"),
    *("mask_words", "mask_map"),
)
RESULTS = ("dsinks", "dbias")
BACKWARD = ("dout", "dlse", "dq", "dk", "dv", "dq_sum", "row_stats", "dkv_sums", "turns")


def load(folder):
    (path,) = Path(folder).glob("_jax_fa*.so")
    spec = importlib.util.spec_from_file_location("_jax_fa", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problem(rng, variant):
    """A call that ``variant`` may serve, by the words of its name, whatever its extents are."""
    operation, arch, dtype, dims, *_ = variant.split("_")
    head_dim, _, value_dim = dims.removeprefix("d").partition("v")
    large = rng.random() < 0.3
    batch = rng.choice((1, 2, 2**20)) if large else rng.randint(1, 4)
    kv_heads = rng.choice((1, 2**10)) if large else rng.randint(1, 3)
    lengths = (1, 127, 2**20, 2**29, 2**30 - 1) if large else (1, 64, 129, 1000)
    call = {
        "dtype": {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}.get(dtype, dtype),
        "batch": batch,
        "num_sequences": batch,
        "q_len": rng.choice(lengths),
        "kv_len": rng.choice(lengths),
        "num_q_heads": kv_heads * rng.choice((1, 2, 7)),
        "num_kv_heads": kv_heads,
        "head_dim": rng.choice((int(head_dim), int(head_dim), 8, 40, int(head_dim) - 8)),
        "value_dim": rng.choice((int(value_dim or head_dim), 16)),
        "scale": 0.1,
        "soft_cap": 20.0 if "cap" in variant else 0.0,
        "window_left": 100 if "general" in variant else 2**30,
        "window_right": 2**30 if "full" in variant else 0,
        "bottom_right": rng.random() < 0.5,
        "deterministic": operation == "bwd" and rng.random() < 0.5,
        "kernel": variant.split("_", 2)[2],
    }
    if "general" in variant and rng.random() < 0.4:
        full = (batch, call["num_q_heads"], call["q_len"], -(-call["kv_len"] // 32))
        call |= {name: rng.choice((1, x)) for name, x in zip(OF_MASK, full, strict=True)}
        call |= {"mask_words": 0x3000, "mask_map": 0x4000}
    if operation == "bwd" and rng.random() < 0.5:
        call["dq_dim"] = int(head_dim)
    if "split" in variant:
        call |= {
            "num_splits": rng.choice((2, 3, 132, 133, 2**29)),
            "out_parts": 0x1000,
            "lse_parts": 0x2000,
        }
    names = (*POINTERS, *(BACKWARD if operation == "bwd" else ()))
    call |= {name: (i + 1) << 32 for i, name in enumerate(names)}
    return operation, int(arch.removeprefix("sm")), call


def add_fault(rng, call):
    """Changes one field to what no caller of ours would write."""
    name = rng.choice(
        (*call, *EXTENTS, *EXTENTS, *OF_MASK, *OPTIONAL, *RESULTS, "sinks", "mask_mod", "what")
    )
    values = (*INTS, *FLOATS, True, None, "", "x" * 5000, "a\0b", b"bytes", [1])
    if rng.random() < 0.1:
        call.pop(name, None)
    elif name in (*EXTENTS, *OF_MASK) and rng.random() < 0.8:
        call[name] = rng.choice(INTS)
    else:
        call[name] = rng.choice(values)


def main():
    folder, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    extension = load(folder)
    variants = extension.variants()
    recorded = 0
    for seed in range(first, first + count):
        rng = random.Random(seed)
        operation, capability, call = problem(rng, rng.choice(variants))
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            add_fault(rng, call)
        num_sms = rng.choice((1, 3, 4, 132, 132, 132, 2**16, 0, -1, 2**31 - 1))
        capability = capability if rng.random() < 0.95 else rng.choice((0, -1, 75, 2**31 - 1))
        try:
            recorded += bool(extension.record(operation, capability, call, num_sms)["launches"])
        except ValueError as error:
            assert str(error).startswith("record: "), (seed, error)
    print(f"fuzz_record: {count} calls, {recorded} of them recorded, 0 failed")  # noqa: T201


if __name__ == "__main__":
    main()
