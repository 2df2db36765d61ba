"""Reads what a compiled object says of its kernels: registers, stack, shared memory, parameters.

An exported object holds its device code as an uncompressed "fat binary" around ELF images
("cubins"). Section ``.nv.info`` lists per-kernel register counts and stack sizes by symbol index,
``.nv.info.<kernel>`` the kernel's parameters. The attribute numbers are those that NVIDIA's
``cuobjdump -elf`` prints by name; the values found here were compared with its output.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
_ELF_MAGIC = b"\x7fELF"
_SYMBOL_TABLE = 2

_FRAME_SIZE = 0x11
_MIN_STACK_SIZE = 0x12
_KPARAM_INFO = 0x17
_PARAMS_BYTES = 0x19
_REGCOUNT = 0x2F
_SIZED_VALUE = 4
_ATTRIBUTE_OF_KERNEL = struct.Struct("<II")


@dataclass(frozen=True)
class Kernel:
    """Resources of one kernel.

    Attributes:
        name: its symbol.
        registers: per thread, at launch (``setmaxnreg`` moves them between warps afterwards).
        stack_bytes: local memory per thread; spills live there, so 0 means that nothing spills.
        static_shared_bytes: shared memory known at compile time, reserved bytes included.
        code_bytes: machine code.
        param_bytes: size of each parameter, in order.
    """

    name: str
    registers: int
    stack_bytes: int
    static_shared_bytes: int
    code_bytes: int
    param_bytes: tuple[int, ...]


class _Section(NamedTuple):
    name: str
    kind: int
    data: bytes
    size: int


def cubins(path: Path) -> Iterator[bytes]:
    """The device images in the object (or cubin) at ``path``."""
    data = path.read_bytes()
    if data.startswith(_ELF_MAGIC) and _FATBIN_MAGIC not in data:
        yield data
        return
    at = data.find(_FATBIN_MAGIC)
    while at >= 0:
        _, _, header_bytes, size = struct.unpack_from("<IHHQ", data, at)
        entry, end = at + header_bytes, at + header_bytes + size
        while entry < end:
            _, _, entry_header_bytes, entry_bytes = struct.unpack_from("<HHIQ", data, entry)
            image = data[entry + entry_header_bytes : entry + entry_header_bytes + entry_bytes]
            if image.startswith(_ELF_MAGIC):
                yield image
            entry += entry_header_bytes + entry_bytes
        at = data.find(_FATBIN_MAGIC, end)


def kernels(path: Path) -> tuple[Kernel, ...]:
    """Every kernel in the object (or cubin) at ``path``.

    Raises:
        ValueError: there is none.
    """
    found = tuple(kernel for image in cubins(path) for kernel in _kernels_of(image))
    if not found:
        raise ValueError(f"{path} holds no readable device code")
    return found


def _kernels_of(image: bytes) -> Iterator[Kernel]:
    sections = {section.name: section for section in _sections(image)}
    symbols = _symbol_names(sections)
    by_symbol: dict[str, dict[int, int]] = {}
    for attribute, _, payload in _attributes(sections[".nv.info"].data):
        if len(payload) == _ATTRIBUTE_OF_KERNEL.size:
            symbol, value = _ATTRIBUTE_OF_KERNEL.unpack(payload)
            by_symbol.setdefault(symbols[symbol], {})[attribute] = value
    for name, section in sections.items():
        if not name.startswith(".text."):
            continue
        kernel = name.removeprefix(".text.")
        resources = by_symbol[kernel]
        shared = sections.get(f".nv.shared.{kernel}")
        yield Kernel(
            name=kernel,
            registers=resources[_REGCOUNT],
            stack_bytes=max(resources.get(_FRAME_SIZE, 0), resources.get(_MIN_STACK_SIZE, 0)),
            static_shared_bytes=shared.size if shared else 0,
            code_bytes=section.size,
            param_bytes=_param_bytes(sections[f".nv.info.{kernel}"].data),
        )


def _sections(image: bytes) -> Iterator[_Section]:
    (table,) = struct.unpack_from("<Q", image, 40)
    count, names = struct.unpack_from("<HH", image, 60)
    headers = [struct.unpack_from("<IIQQQQ", image, table + 64 * i) for i in range(count)]
    strings = headers[names][4]
    for name, kind, _, _, offset, size in headers:
        text = _string(image, strings + name)
        yield _Section(text, kind, image[offset : offset + size], size)


def _symbol_names(sections: dict[str, _Section]) -> list[str]:
    strings = sections[".strtab"].data
    table = next(s.data for s in sections.values() if s.kind == _SYMBOL_TABLE)
    return [_string(strings, name) for (name, *_) in struct.iter_unpack("<IBBHQQ", table)]


def _string(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def _attributes(info: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(attribute, value, payload) of an ``.nv.info`` section; sized attributes have a payload."""
    at = 0
    while at < len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        payload_bytes = value if form == _SIZED_VALUE else 0
        yield attribute, value, info[at + 4 : at + 4 + payload_bytes]
        at += 4 + payload_bytes


def _param_bytes(info: bytes) -> tuple[int, ...]:
    sizes: dict[int, int] = {}
    total = 0
    for attribute, value, payload in _attributes(info):
        if attribute == _KPARAM_INFO:
            _, ordinal, _, packed = struct.unpack("<IHHI", payload)
            sizes[ordinal] = packed >> 18
        elif attribute == _PARAMS_BYTES:
            total = value
    if total and not sizes:
        raise ValueError(f"{total} bytes of parameters, listed in a form this reader does not know")
    return tuple(sizes[ordinal] for ordinal in range(len(sizes)))
