"""What a real GPU computed, kept as small files, and the same launches on the emulator.

``tests/gpu/record_hardware.py`` writes the files on a machine with a Hopper GPU:

    recorded/kernels.tar.xz  per case and operation, OPERATION/CASE.json: the kernel's name and
                             launches; NAME.ptx of every kernel, as the machine code was made from
    recorded/results.npz     CASE.ARRAY: some elements of every result, CASE.ARRAY.crc: of all

PTX and launches are part of a recording, so that it stays true whatever becomes of the kernels:
it is about the emulator, not about them. Needs neither compiler nor extension.
"""

from __future__ import annotations

import io
import json
import tarfile
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helpers.cases import Case, documents, make
from jax_fa.emulator import Launch, Memory, emulate
from jax_fa.spec import scratch
from jax_fa.spec.problem import Problem, Semantics

FOLDER = Path(__file__).parents[1] / "emulator" / "recorded"
KEPT = 1000
"""Elements of one result that are kept, at most; those of all are in its checksum."""

_GQA: dict[str, Any] = {"heads": 4, "kv_heads": 2}
_ONE: dict[str, Any] = {"heads": 1, "kv_heads": 1}
_WIDE: dict[str, Any] = {"head_dim": 192, "value_dim": 128}

CASES: tuple[tuple[str, Case], ...] = (
    ("bfloat16", Case("full_64", q_len=200, kv_len=300)),
    ("float16", Case("causal_64", q_len=200, kv_len=200, is_causal=True)),
    ("bfloat16", Case("window_64", q_len=230, kv_len=230, window=(40, 20), **_ONE)),
    ("float16", Case("cap_64", q_len=130, kv_len=130, soft_cap=5.0, magnitude=4.0, **_ONE)),
    ("float16", Case("full_96", q_len=150, kv_len=150, head_dim=96, **_ONE)),
    (
        "bfloat16",
        Case(
            "bottom_right_96",
            q_len=100,
            kv_len=260,
            head_dim=96,
            is_causal=True,
            alignment="bottom_right",
            **_ONE,
        ),
    ),
    (
        "float16",
        Case("offset_96", batch=2, q_len=60, kv_len=150, head_dim=96, q_offset=(90, 20), **_ONE),
    ),
    ("bfloat16", Case("full_128", q_len=140, kv_len=260, head_dim=128, **_ONE)),
    ("bfloat16", Case("gqa_128", q_len=130, kv_len=130, head_dim=128, is_causal=True, **_GQA)),
    (
        "bfloat16",
        Case(
            "lengths_128",
            batch=2,
            q_len=100,
            kv_len=150,
            head_dim=128,
            q_lengths=(77, 100),
            kv_lengths=(150, 65),
            **_ONE,
        ),
    ),
    (
        "float16",
        Case(
            "packed_128",
            q_len=220,
            kv_len=220,
            head_dim=128,
            cu_q=(0, 100, 130, 220),
            cu_k=(0, 100, 130, 220),
            is_causal=True,
            **_ONE,
        ),
    ),
    (
        "bfloat16",
        Case(
            "segments_cap_128",
            q_len=200,
            kv_len=200,
            head_dim=128,
            segments=(documents(60, 1, 100, 39), documents(60, 1, 100, 39)),
            soft_cap=20.0,
            **_ONE,
        ),
    ),
    ("float16", Case("sharp_128", q_len=130, kv_len=190, head_dim=128, magnitude=30.0, **_ONE)),
    (
        "float16",
        Case(
            "sinks_causal_128",
            q_len=150,
            kv_len=150,
            head_dim=128,
            is_causal=True,
            has_sinks=True,
            heads=2,
            kv_heads=1,
        ),
    ),
    ("bfloat16", Case("full_192", q_len=100, kv_len=140, **_ONE, **_WIDE)),
    ("float16", Case("causal_192", q_len=140, kv_len=140, is_causal=True, **_ONE, **_WIDE)),
    ("bfloat16", Case("sinks_window_192", q_len=140, kv_len=140, window=(30, None), has_sinks=True,
                      **_ONE, **_WIDE)),
    ("float16", Case("full_256", q_len=100, kv_len=140, head_dim=256, **_ONE)),
    ("bfloat16", Case("causal_256", q_len=130, kv_len=130, head_dim=256, is_causal=True, **_ONE)),
    (
        "bfloat16",
        Case(
            "decode_256",
            q_len=1,
            kv_len=200,
            head_dim=256,
            q_offset=150,
            is_causal=True,
            heads=2,
            kv_heads=1,
        ),
    ),
)  # fmt: skip
"""Element type and problem; together all head sizes, mask classes and optional operands."""


def semantics(case: Case) -> Semantics:
    """What is asked; the backward in the mode that gives the same bits every time."""
    return replace(case.semantics, deterministic=True)


class Recorded(NamedTuple):
    """One result of a GPU: some of its elements, and the checksum of all."""

    some: np.ndarray
    crc: int

    @staticmethod
    def places(size: int) -> np.ndarray:
        """Which elements are kept; the step is odd, so that all columns occur."""
        step = -(-size // KEPT) | 1
        return np.arange(0, size, step)

    @classmethod
    def of(cls, array: np.ndarray) -> Recorded:
        """What is kept of a result. Elements of 16 bits are kept as their bits."""
        flat = np.ascontiguousarray(array).reshape(-1)
        flat = flat.view(np.uint16) if flat.itemsize == 2 else flat
        return cls(flat[cls.places(len(flat))], zlib.crc32(flat.tobytes()))


@cache
def archive() -> dict[str, bytes]:
    """The members of ``kernels.tar.xz``."""
    with tarfile.open(FOLDER / "kernels.tar.xz") as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def write_archive(members: dict[str, bytes]) -> None:
    """Writes ``kernels.tar.xz``; equal members give equal bytes."""
    with tarfile.open(FOLDER / "kernels.tar.xz", "w:xz", preset=9) as tar:
        for name, content in sorted(members.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


RESULTS = {"fwd": ("out", "lse"), "bwd": ("dq", "dk", "dv", "dsinks")}
"""Arrays that each operation leaves behind."""


def inputs(case: Case, dtype: str) -> dict[str, np.ndarray]:
    """Operands and cotangents, by names of ``spec/abi.py``; 16-bit elements as their bits."""
    data = make(case, dtype)
    arrays = {**data.operands._asdict(), "dout": data.cotangents[0], "dlse": data.cotangents[1]}
    present = {name: np.array(x) for name, x in arrays.items() if x is not None}
    return {name: x.view(np.uint16) if x.itemsize == 2 else x for name, x in present.items()}


def checksum() -> np.uint32:
    """Of all inputs."""
    crc = 0
    for dtype, case in CASES:
        for array in inputs(case, dtype).values():
            crc = zlib.crc32(np.ascontiguousarray(array).tobytes(), crc)
    return np.uint32(crc)


def buffers(
    operation: str, case: Case, dtype: str, forward: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Arrays of a call; results and scratch hold a pattern.

    ``forward`` has what the forward left behind, for the backward.
    """
    arrays = inputs(case, dtype)
    rows, heads = arrays["q"].shape[:2], arrays["q"].shape[2]
    if operation == "fwd":
        del arrays["dout"], arrays["dlse"]
        out = np.full((*rows, heads, case.out_dim), 0xFFFF, np.uint16)
        return {**arrays, "out": out, "lse": np.full((*rows, heads), np.nan, np.float32)}
    arrays |= forward
    for name in ("q", "k", "v"):
        arrays[f"d{name}"] = np.full_like(arrays[name], 0xFFFF)
    if "sinks" in arrays:
        arrays["dsinks"] = np.full_like(arrays["sinks"], np.nan)
    problem = Problem.of(make(case, dtype).operands, semantics(case))
    for name, (extent, kind) in scratch.shapes("bwd", problem).items():
        arrays[name] = np.full(extent, -1 if kind == "int32" else np.nan, kind)
    return arrays


def emulated(case: Case, dtype: str) -> dict[str, np.ndarray]:
    """All results of a case, forward and backward, from the recorded launches."""
    results: dict[str, np.ndarray] = {}
    for operation, names in RESULTS.items():
        record = json.loads(archive()[f"{operation}/{case.name}.json"])
        ptx = archive()[record["kernel"] + ".ptx"].decode()
        arrays = buffers(operation, case, dtype, results)
        memory = Memory()
        for name, address in record["addresses"].items():
            memory.add(name, arrays[name], address)
        for launch in record["launches"]:
            emulate(ptx, Launch.from_json(json.dumps(launch)), memory, seed=1)
        results |= {name: arrays[name] for name in names if name in arrays}
    return results
