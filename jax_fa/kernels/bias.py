"""Bias: an array that is added to the logits, and where its elements lie.

HAZARD: rows and keys of a tile may lie beyond the array's end; every index is clamped here.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fa.kernels import softmax


class Bias(NamedTuple):
    """A bias; an extent of 1 is broadcast.

    Attributes:
        array: its elements, of ``size_bytes`` each.
        batch: 1 or B.
        heads: 1 or N.
        rows: 1 or T.
        keys: 1 or S.
        size_bytes: 4 for float32, 2 for the type of the queries.
        scale: the scale of the scores that it is added to.
        soft_cap: the soft cap of the sums; 0 for none.
    """

    array: cute.Pointer
    batch: Int32
    heads: Int32
    rows: Int32
    keys: Int32
    size_bytes: Int32
    scale: Float32
    soft_cap: Float32

    @property
    def row_bytes(self) -> Int64:
        """The number of bytes from one row to the next."""
        return self.keys.to(Int64) * self.size_bytes


def is_one_per_query(bias: Bias, queries: Any) -> Boolean:
    """Whether no two queries, of whatever batch and head, share a row of the bias."""
    return (bias.batch * bias.heads == queries.batch * queries.heads) & (bias.rows > 1)


@cute.jit
def score_log2(bias: Bias) -> Float32:
    """Returns the factor from a sum, capped or not, to a logit in base 2."""
    factor = Float32(softmax.LOG2_E)
    if bias.soft_cap != 0.0:
        factor = bias.soft_cap * softmax.LOG2_E
    return factor


def clamped_row(bias: Bias, position: Int32) -> Int32:
    """Returns the row of a query among those of a head of the bias."""
    return cutlass.max(cutlass.min(position, bias.rows - 1), 0)


def row_of(bias: Bias, batch: Int32, head: Int32, position: Int32) -> Int64:
    """Returns the number of a query's row among all rows of the bias."""
    own = cutlass.min(batch, bias.batch - 1) * bias.heads + cutlass.min(head, bias.heads - 1)
    return own.to(Int64) * bias.rows + clamped_row(bias, position)


def address_of(bias: Bias, row: Int64) -> Int64:
    """Returns the address of a row's first element."""
    return bias.array.toint() + row * bias.row_bytes


def key_of(bias: Bias, key: Int32) -> Int32:
    """Returns the index of a key in a row."""
    return cutlass.max(cutlass.min(key, bias.keys - 1), 0)


def load_half(address: Int64) -> Int32:
    """Loads 16 bits of read-only global memory; the upper half of the word is zero."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 half; ld.global.nc.b16 half, [{$r0}]; cvt.u32.u16 {$w0}, half; }",
        write_only_types=[Int32],
        read_only_args=[address],
    )


def load_word(address: Int64) -> Int32:
    """Loads 32 bits of read-only global memory."""
    return cute.arch.inline_ptx(
        "ld.global.nc.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
    )


def load_pair(address: Int64) -> tuple[Int32, ...]:
    """Loads 64 bits of read-only global memory, at a multiple of 8 bytes, as two words."""
    return cute.arch.inline_ptx(
        "ld.global.nc.v2.b32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Int32, Int32],
        read_only_args=[address],
    )


def as_float(word: Int32) -> Float32:
    """Reinterprets the bits of ``word`` as a float."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word]
    )


@cute.jit
def cap(bias: Bias, acc: cute.Tensor) -> None:
    """Applies ``softmax.cap`` to sums if there is a cap. A sum of -inf hides a pair and stays."""
    if bias.soft_cap != 0.0:
        inner_log2 = 2.0 * softmax.LOG2_E / bias.soft_cap
        for i in cutlass.range_constexpr(cute.size(acc)):
            power = cute.math.exp2(acc[i] * inner_log2, fastmath=True)
            bounded = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + power)
            acc[i] = cutlass.select_(acc[i] == -Float32.inf, acc[i], bounded)
