"""The compiled extension, ffi/module.cc; what its functions return is explained there."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

def version() -> int: ...
def registrations() -> dict[str, dict[str, Any]]: ...
def operand_names(backward: bool) -> list[str]: ...
def attribute_names() -> list[str]: ...
def variants() -> list[str]: ...
def record(
    operation: str, capability: int, call: dict[str, Any], num_sms: int = 132
) -> dict[str, Any]: ...
def scratch_shapes(
    extents: Sequence[int],
    deterministic: bool,
    window_left: int,
    window_right: int,
    num_splits: int,
    dq_dim: int,
) -> list[tuple[str, list[int], str]]: ...
def cpu_isa() -> str: ...
def keys_of(window: Sequence[int], row: int) -> tuple[int, int]: ...
def rows_of(window: Sequence[int], key: int) -> tuple[int, int]: ...
def multiply_add(
    a: np.ndarray,
    b: np.ndarray,
    addend: np.ndarray | None,
    least_exponents: tuple[int, int],
    digits_and_cut: tuple[int, int],
    sum: np.ndarray,
) -> None: ...
def block_operations() -> list[str]: ...
def set_interpolation(
    name: str,
    first: Sequence[int],
    slope: Sequence[int],
    curve: Sequence[int],
    square: Sequence[int],
) -> None: ...
def address_of(array: np.ndarray) -> int: ...

class Block:
    def __init__(
        self,
        steps: Sequence[Sequence[int]],
        scratch: bytes,
        inputs: Sequence[tuple[int, int, int, int]],
        groups: Sequence[tuple[Callable[[], np.ndarray], int, Sequence[int]]],
        leaves: Sequence[tuple[int, int, int]],
        outputs: Sequence[tuple[int, int, int]],
    ) -> None: ...
    def run(self, slots: list[Any], shared: SharedLoads | None = None) -> bool: ...
