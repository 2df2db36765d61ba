"""An attention problem: its semantics, its shapes and the conventions every platform keeps.

Letters, as in ``jax.nn.dot_product_attention``: B batch, T query length, S key length, N query
heads, K key/value heads, G = N // K query heads per key/value head (query head ``n`` reads
key/value head ``n // G``), D head size of query and key, Dv head size of value and output.

Conventions
-----------
* Logits are ``z = scale * (q . k) + bias``, in float32; with a soft cap ``c``, ``z = c * tanh(z /
  c)``. The cap is applied after scale and bias and before masking.
* A bias of -inf hides a pair, as a mask does, whatever the soft cap; a value that it hides is
  multiplied by a probability of 0.
* The probability of key j is ``exp(z_j - lse)`` with ``lse = log(sum of exp(z_j) over the visible
  keys, plus exp(sink))``: natural logarithm, float32, the whole denominator, sinks included.
  Kernels work in base 2 internally and convert at their inputs and outputs.
* A row below its query length that sees no key has output 0 and ``lse = -inf`` (the sink, where
  there is one). A row at or beyond its query length has output 0 and ``lse = -inf``, always.
  Neither contributes to any gradient but the sink's own.
* The gradient through the softmax is ``dz = p * (dp - delta)`` with
  ``delta = rowsum(dO * O) - dLSE``, and ``d sink = -sum over rows of exp(sink - lse) * delta``.
  The gradient of a bias is that of the logits before the cap, summed where the bias is broadcast.
* A sequence is a slot of an array: row b of [B, T, ...], or ``cu_seqlens[b] .. cu_seqlens[b+1]`` of
  a packed [1, total, ...] array. Lengths shorter than the slot leave padding rows, whose content
  (NaN included) never reaches a result and whose gradients are 0. Bottom-right alignment uses the
  used lengths.
* Every run-time value has a defined meaning, the same on every platform. Lengths are clamped to
  0 .. slot. Borders are clamped to the array, and a border counts as no smaller than those before
  it, so that slots do not overlap; rows in no slot give output 0 and ``lse = -inf``, keys in no
  slot are seen by no row and have gradients of 0. Offsets are clamped to ``MAX_OFFSET`` (2 ** 28)
  in magnitude: if no length is larger and every window is shorter, this does not change the
  result. Every int32 is a valid segment id. (``sequences.py``, ``band.py``)
* On the CPU and in the reference, the content of a hidden key, NaN included, does not reach a row
  that does not see it. GPU kernels guarantee this for padding only: elsewhere they multiply a
  hidden key's value by a probability of 0, and 0 * NaN is NaN.
* Logits and sinks of more than 2 ** 127 in magnitude are not supported: kernels work in base 2 and
  give NaN where ``z * log2(e)`` is beyond float32. Nor are biases that are beyond float32 once they
  are divided by the scale; below -2 ** 127 they hide their pair.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax_fa.spec import schema
from jax_fa.spec.band import Band

KERNEL_DTYPES = ("float32", "bfloat16", "float16")
"""Element types of query, key, value and output that compiled kernels take (CPU: all three)."""


@dataclass(frozen=True)
class Semantics:
    """The part of a problem that does not depend on shapes.

    Attributes:
        scale: factor of ``q . k``.
        band: which keys a query may see.
        soft_cap: logits are bounded to ``(-soft_cap, soft_cap)``; None leaves them.
        deterministic: the backward gives identical bits on every run.
    """

    scale: float
    band: Band = field(default_factory=Band)
    soft_cap: float | None = None
    deterministic: bool = False


class Operands(NamedTuple):
    """The arrays of one problem, in the order every platform reads them; None where absent.

    M is the number of sequences: B, or the number of slots when packed (then B is 1 and T, S are
    totals). This is the internal form: public functions bring their arguments into it.

    Attributes:
        q: [B, T, N, D].
        k: [B, S, K, D].
        v: [B, S, K, Dv].
        q_lengths: int32 [M], used query rows of each slot.
        kv_lengths: int32 [M], used keys of each slot.
        cu_seqlens_q: int32 [M + 1], slot borders of packed queries; ascending, within the array
            (``sequences.borders``).
        cu_seqlens_k: int32 [M + 1], likewise of packed keys.
        q_segments: int32 [B, T]; a query sees only keys of its own segment.
        kv_segments: int32 [B, S].
        q_offset: int32 [M], position of query row 0, added to the diagonal; at most
            ``band.MAX_OFFSET`` in magnitude (``sequences.offsets``).
        sinks: float32 [M, N], one extra logit per head in the denominator.
        mask_words: int32 [B|1, N|1, rows, W|1] with W words of 32 keys: bit i of word w says
            whether the row sees key 32 w + i (``masks.py``). There are T rows, one for each
            ``MASK_BLOCK`` of them, or 1. Not with packed sequences.
        mask_map: int32 [B|1, N|1, 2, stripes, words], which 16 x 16 cells of the mask show some
            pair, and which show all; present iff mask_words is.
        bias: [B|1, N|1, T|1, S|1], added to ``scale * (q . k)``; of the type of q, or float32. Not
            with packed sequences.
    """

    q: Any
    k: Any
    v: Any
    q_lengths: Any = None
    kv_lengths: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    q_segments: Any = None
    kv_segments: Any = None
    q_offset: Any = None
    sinks: Any = None
    mask_words: Any = None
    mask_map: Any = None
    bias: Any = None

    @property
    def is_packed(self) -> bool:
        """True if sequences lie one after another in a single row."""
        return self.cu_seqlens_q is not None

    @property
    def num_sequences(self) -> int:
        """The number of sequences, M."""
        return self.cu_seqlens_q.shape[0] - 1 if self.is_packed else self.q.shape[0]

    @property
    def present(self) -> tuple[str, ...]:
        """Names of the operands that are not None."""
        return tuple(arrays_of(self))


def arrays_of(bundle: Any) -> dict[str, Any]:
    """The fields of a named tuple that are not None, by name in order."""
    return {name: x for name, x in bundle._asdict().items() if x is not None}


class Gradients(NamedTuple):
    """Cotangents of the differentiable operands; None where ``sinks`` or ``bias`` is None.

    Attributes:
        q: [B, T, N, D].
        k: [B, S, K, D].
        v: [B, S, K, Dv].
        sinks: float32 [M, N].
        bias: has the shape and the type of the bias.
    """

    q: Any
    k: Any
    v: Any
    sinks: Any = None
    bias: Any = None


@dataclass(frozen=True)
class Problem:
    """One complete attention problem: everything that the choice of a kernel may depend on.

    Shapes are those of one launch: for packed sequences ``batch`` is 1 and ``num_sequences`` counts
    the slots that ``cu_seqlens`` describes; otherwise both are B.

    Attributes:
        semantics: what does not depend on shapes.
        present: names of the optional operands that are present.
    """

    dtype: str
    batch: int
    num_sequences: int
    q_len: int
    kv_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    semantics: Semantics
    present: tuple[str, ...] = ()
    mask_batch: int = 0
    mask_heads: int = 0
    mask_rows: int = 0
    mask_width: int = 0
    bias_batch: int = 0
    bias_heads: int = 0
    bias_rows: int = 0
    bias_keys: int = 0
    bias_bytes: int = 0

    @classmethod
    def of(cls, operands: Operands, semantics: Semantics) -> Problem:
        """The problem given by arrays (or anything with a shape and a dtype) and semantics."""
        batch, q_len, num_q_heads, head_dim = operands.q.shape
        _, kv_len, num_kv_heads, value_dim = operands.v.shape
        mask_shape = (0, 0, 0, 0) if operands.mask_words is None else operands.mask_words.shape
        mask_batch, mask_heads, mask_rows, mask_width = mask_shape
        bias = operands.bias
        bias_shape = (0, 0, 0, 0) if bias is None else bias.shape
        bias_batch, bias_heads, bias_rows, bias_keys = bias_shape
        return cls(
            dtype=str(operands.q.dtype),
            batch=batch,
            num_sequences=operands.num_sequences,
            q_len=q_len,
            kv_len=kv_len,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            semantics=semantics,
            present=tuple(x for x in operands.present if schema.BY_NAME[x].is_optional),
            mask_batch=mask_batch,
            mask_heads=mask_heads,
            mask_rows=mask_rows,
            mask_width=mask_width,
            bias_batch=bias_batch,
            bias_heads=bias_heads,
            bias_rows=bias_rows,
            bias_keys=bias_keys,
            bias_bytes=0 if bias is None else bias.dtype.itemsize,
        )

    @property
    def has_hiding_operands(self) -> bool:
        """True if operands, and not the band alone, decide which keys a query sees."""
        return self.has_mask or any(schema.BY_NAME[name].is_hiding for name in self.present)

    @property
    def is_packed(self) -> bool:
        """True if sequences lie one after another in a single row."""
        return "cu_seqlens_q" in self.present

    @property
    def has_lengths(self) -> bool:
        """True if some sequences may be shorter than their slots."""
        return "q_lengths" in self.present or "kv_lengths" in self.present

    @property
    def has_sinks(self) -> bool:
        """True if the denominator has an extra logit per head."""
        return "sinks" in self.present

    @property
    def has_mask(self) -> bool:
        """True if a dense mask hides keys."""
        return self.mask_width > 0

    @property
    def has_bias(self) -> bool:
        """True if a bias is added to the logits."""
        return self.bias_bytes > 0

    @property
    def is_bias_whole(self) -> bool:
        """True if a bias is not broadcast: it has an element for each batch, head, query, key."""
        whole = (self.batch, self.num_q_heads, self.q_len, self.kv_len)
        own = (self.bias_batch, self.bias_heads, self.bias_rows, self.bias_keys)
        return self.has_bias and own == whole

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_q_heads // self.num_kv_heads
