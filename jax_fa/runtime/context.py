"""How devices that share a sequence compute its attention: who sends what to whom, and when.

Every device holds the rows and keys of its part of a sequence. A ``Job`` says how they meet:

* all-gather: each device receives the keys of all devices, or only those of its neighbours if a
  window reaches no further.
* ring: keys pass by, one device's at a time; outputs merge by their LSE, gradients of keys travel
  with them.

Under a causal mask the last device's rows see the most keys. A balanced job redistributes tokens:
chunk ``2 i`` stays with device i, chunk ``2 i + 1`` goes to device ``n - 1 - i``, so that every
device has an early and a late one. Outputs and gradients go back to where their tokens came from.
Zigzag tokens are distributed like that before the call, and stay where they are.

``over_heads`` exchanges heads for tokens before any of this: all-to-all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jax_fa.runtime import blockwise, layouts, masks, primitives, vjp
from jax_fa.runtime.dispatch import Forced
from jax_fa.runtime.layouts import Layout, Order
from jax_fa.runtime.parts import Whole, meaning, per_pair, per_token, taken
from jax_fa.runtime.reference import wide
from jax_fa.runtime.vjp import Result
from jax_fa.spec import schema
from jax_fa.spec.band import Band
from jax_fa.spec.problem import Gradients, Operands, Semantics

Axis = Hashable | tuple[Hashable, ...]
"""Name of a mesh axis, or names of several that are split as one, major to minor."""

HEAD_CHUNKS = 2
"""The most parts in which a device receives its heads, one after another (all-to-all)."""

MIN_KV_HEADS = 2
"""The fewest key/value heads of such a part: the backward of one takes half as long again (one
H200, T = 16384, D = 128, causal, forward and backward: 32:8 heads 12.5 ms, 32:2 13.0, 32:1 19.4).
"""


class Reach(NamedTuple):
    """Keys that the rows of a device see beyond its own: those before, those after."""

    before: int
    after: int


@dataclass(frozen=True)
class Job:
    """How rows and keys of the devices along one axis meet.

    Attributes:
        semantics: what is asked of whole sequences.
        implementation: what the caller forced, or None.
        axis: the axis that splits the sequences.
        strategy: see the module.
        is_balanced: tokens are redistributed, as described above.
        reach: all-gather from neighbours alone; None gathers everything.
        is_paired: a ring of two chunks a device under a plain causal mask. Two chunks of rows meet
            two of keys at every step; two of those four pairs are wholly visible, and two hidden.
        layout: which tokens a device holds; not striped.
    """

    semantics: Semantics
    implementation: Forced
    axis: Any
    strategy: Literal["all_gather", "ring"]
    is_balanced: bool = False
    reach: Reach | None = None
    is_paired: bool = False
    layout: Layout = "contiguous"

    @property
    def size(self) -> int:
        """Devices along the axis."""
        return jax.lax.axis_size(self.axis)


class _Tokens(NamedTuple):
    """Consecutive rows of the query, or consecutive keys.

    Attributes:
        first: number of the first of them among all.
        arrays: the operands that hold a row for each, by name; with rows of the query those of mask
            and bias, for all keys.
    """

    first: Any
    arrays: dict[str, Array]


# ------------------------------------------------------------------------------------ public parts


def attention(operands: Operands, job: Job, saved: Result | None = None) -> Result:
    """(out, lse) of this device's rows, differentiable once in reverse mode through both.

    Args:
        operands: the per-token ones (``parts.per_token``) of this device's tokens; mask, without
            its map, and bias of its rows and all keys; all others of whole sequences.
        job: how the devices go about it.
        saved: the results, if they are known: only their gradient is then left to compute.
    """
    operands = varying(operands, job.axis)
    moving = {x.name: getattr(operands, x.name) for x in schema.OPERANDS if x.is_differentiable}
    known = {name: vjp.reverse_only(x) for name, x in moving.items() if x is not None}
    return _attention(operands._replace(**known), saved, job)


def unfused(operands: Operands, job: Job, bias: Array | None, mask: Array | None) -> Result:
    """The same by ``blockwise``, with a bias or mask of this device's rows and all keys."""
    operands = varying(operands, job.axis)
    whole = _whole(operands, job)

    keys = per_token(operands, "S")
    gathered = {name: primitives.summed_wide(partial(_of_all, job), x) for name, x in keys.items()}
    own = operands._replace(**gathered)
    first_row = jax.lax.axis_index(job.axis) * operands.q.shape[1]
    part = whole.part(own, first_row, _first_seen(job, operands.k.shape[1]))
    return blockwise.forward(part, meaning(job.semantics), bias, mask)


def over_heads(
    operands: Operands,
    axis: Axis,
    attend: Callable[[Operands, Result | None], Result],
    saved: Result | None = None,
    orders: tuple[Order, Order] | None = None,
) -> Result:
    """(out, lse) by ``attend``, which is given some heads and all tokens along ``axis``.

    Heads are exchanged in chunks, so that XLA can copy one beside the products of another.

    Args:
        operands: as for ``attention``; the axis divides the query heads. Key/value heads that it
            does not divide are sent to several devices.
        axis: devices that exchange heads for tokens.
        attend: attention over tokens in their order, given its results if known.
        saved: as for ``attention``.
        orders: of the query's tokens, and of the keys; None if devices hold them in order.
    """
    operands = varying(operands, axis)
    size = jax.lax.axis_size(axis)
    rows, keys = orders or (Order("contiguous", size),) * 2
    operands = _divisible(operands, size)
    exchange = _Exchange(axis, size, _num_chunks(operands.k.shape[2] // size), operands.q.shape[1])
    whole: dict[str, Array] = {}
    tokens: dict[str, tuple[Array, Order]] = {}
    pairs: dict[str, Array] = {}
    split: dict[str, Array] = {}
    for name in operands.present:
        x, array = getattr(operands, name), schema.BY_NAME[name]
        order = {"T": rows, "S": keys, None: None}[array.side]
        if array.is_per_pair and x.shape[1] > 1:
            pairs[name] = x
        elif array.is_per_pair:
            whole[name] = exchange.all_rows(x)
        elif order is None:
            (split if array.is_per_head else whole)[name] = x
        elif array.is_per_head:
            tokens[name] = x, order
        else:
            whole[name] = order.in_order(jax.lax.all_gather(x, axis, axis=1, tiled=True))
    results = []
    for index in range(exchange.chunks):
        heads = {
            name: exchange.all_tokens(x, order, index)
            if schema.BY_NAME[name].side == "T"
            else exchange.all_keys(x, order, index)
            for name, (x, order) in tokens.items()
        }
        known = None
        if saved is not None:
            out, lse = saved[0], saved[1][..., None]
            lse = exchange.all_tokens(lse, rows, index)[..., 0]
            known = exchange.all_tokens(out, rows, index), lse
        # The next chunk sets out when this one has arrived: else XLA copies all of them first.
        sent = {name: x for name, (x, _) in tokens.items()}
        sent = _after(sent, heads)
        tokens = {name: (x, tokens[name][1]) for name, x in sent.items()}
        heads |= {name: exchange.own_heads(x, 1, index) for name, x in split.items()}
        heads |= {name: exchange.rows_of_heads(x, index) for name, x in pairs.items()}
        out, lse = attend(Operands(**whole, **heads), known)
        results.append([exchange.own_tokens(x, rows) for x in (out, lse[..., None])])
    out, lse = (exchange.joined(list(parts)) for parts in zip(*results, strict=True))
    return out, lse[..., 0]


class _Exchange(NamedTuple):
    """Heads for tokens: the devices along an axis, each of which gets its heads in chunks.

    Where a dimension counts the devices, it is the first one when arrays are sent: then XLA moves
    data once before an exchange, and once after it where results join.

    Attributes:
        axis: the axis.
        size: devices along it.
        chunks: parts of a device's heads.
        num_rows: rows of the query that a device holds.
    """

    axis: Axis
    size: int
    chunks: int
    num_rows: int

    def _sent(self, x: Array) -> Array:
        """[size, ...] by receiving device -> [size, ...] by sending device."""
        return jax.lax.all_to_all(x, self.axis, 0, 0, tiled=True)

    def _chunk(self, x: Array, dim: int, index: int) -> Array:
        """[..., N, ...] -> [..., size, heads, ...]: of dimension ``dim`` a chunk of each device."""
        split = x.reshape(*x.shape[:dim], self.size, self.chunks, -1, *x.shape[dim + 1 :])
        return jax.lax.index_in_dim(split, index, dim + 1, keepdims=False)

    def own_heads(self, x: Array, dim: int, index: int) -> Array:
        """[..., N, ...] -> [..., heads, ...]: a chunk of this device's."""
        here = jax.lax.axis_index(self.axis)
        split = self._chunk(x, dim, index)
        return jax.lax.dynamic_index_in_dim(split, here, dim, keepdims=False)

    def all_tokens(self, x: Array, order: Order, index: int) -> Array:
        """[B, L, N, D] -> [B, size * L, heads, D]: a chunk of this device's heads, in order."""
        came = self._sent(jnp.moveaxis(self._chunk(x, 2, index), 2, 0))  # [size, B, L, heads, D]
        joined = jnp.moveaxis(came, 0, 1)
        return order.in_order(joined.reshape(x.shape[0], -1, *came.shape[3:]))

    def all_keys(self, x: Array, order: Order, index: int) -> Array:
        """As ``all_tokens``, but on arrival there is something left to do before a kernel starts.

        HAZARD: XLA does that while the exchange of the next chunk starts. A kernel that started at
        once would occupy all multiprocessors: an exchange that is late on one device would wait
        for the kernel to end, while the other device's kernel would lack the multiprocessors that
        the exchange holds (two H100s, T = 65536: 33 ms instead of 28).
        """
        sent = self._chunk(x, 2, index)
        sent = sent.reshape(*x.shape[:2], -1, x.shape[3])
        return order.in_order(jax.lax.all_to_all(sent, self.axis, 2, 1, tiled=True))

    def own_tokens(self, x: Array, order: Order) -> Array:
        """[B, size * L, heads, D] -> [B, L, size, heads, D]: inverse of ``all_tokens``."""
        held = order.as_held(x)
        split = held.reshape(x.shape[0], self.size, -1, *x.shape[2:])
        return jnp.moveaxis(self._sent(jnp.moveaxis(split, 1, 0)), 0, 2)

    def joined(self, parts: list[Array]) -> Array:
        """The chunks that ``own_tokens`` gave -> [B, L, N, D]."""
        stacked = jnp.stack(parts, axis=3)  # [B, L, size, chunks, heads, D]
        return stacked.reshape(*stacked.shape[:2], -1, stacked.shape[5])

    def _is_for_all_rows(self, x: Array) -> bool:
        return x.shape[2] == 1 < self.num_rows

    def all_rows(self, x: Array) -> Array:
        """[.., .., L|1, S] of a mask or bias -> [.., .., size * L|1, S]."""
        if self._is_for_all_rows(x):
            return x

        def gathered(x: Array) -> Array:
            return jax.lax.all_gather(x, self.axis, axis=2, tiled=True)

        return primitives.summed_wide(gathered, x)

    def rows_of_heads(self, x: Array, index: int) -> Array:
        """[B, N, L|1, S] of a mask or bias -> [B, heads, size * L|1, S]: a chunk of heads."""
        if self._is_for_all_rows(x):
            return self.own_heads(x, 1, index)
        came = self._sent(jnp.moveaxis(self._chunk(x, 1, index), 1, 0))  # [size, B, heads, L, S]
        joined = jnp.moveaxis(came, 0, 2)
        return joined.reshape(*joined.shape[:2], -1, x.shape[3])


def _num_chunks(own_heads: int) -> int:
    """Chunks in which a device receives its ``own_heads`` key/value heads and their query heads."""
    most = max(min(HEAD_CHUNKS, own_heads // MIN_KV_HEADS), 1)
    return max(count for count in range(1, most + 1) if own_heads % count == 0)


@jax.custom_jvp
def _after(later: Any, sooner: Any) -> Any:
    """``later``, which cannot be used before ``sooner`` is there; its gradient is not held up."""
    return jax.lax.optimization_barrier((later, sooner))[0]


@_after.defjvp
def _after_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return _after(*primals), tangents[0]


def _divisible(operands: Operands, size: int) -> Operands:
    """Repeats key/value heads, where needed, until ``size`` divides their number."""
    copies = size // math.gcd(size, operands.k.shape[2])
    if copies == 1:
        return operands

    def repeated(x: Array) -> Array:
        return primitives.summed_wide(partial(jnp.repeat, repeats=copies, axis=2), x)

    per_key_head = [x for x in operands.present if "K" in schema.BY_NAME[x].dims.split()]
    return operands._replace(**{name: repeated(getattr(operands, name)) for name in per_key_head})


def varying(operands: Operands, axis: Axis) -> Operands:
    """Operands that all vary over ``axis`` and over whatever any of them varies over.

    What devices share, such as sinks, then has the sum of their gradients.
    """
    arrays = [x for x in operands if x is not None]
    *aligned, _ = primitives.aligned([*arrays, jax.lax.axis_index(axis)])
    return Operands(**dict(zip(operands.present, aligned, strict=True)))


# ---------------------------------------------------------------------------- forward and backward


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attention(operands: Operands, saved: Result | None, job: Job) -> Result:
    return _forward(operands, saved, job)[0]


class _Residuals(NamedTuple):
    """What the backward needs: O(T / n), in the order in which the forward used it."""

    whole: Whole
    rows: list[_Tokens]
    keys: list[_Tokens]
    results: list[Result]
    sinks: Array | None


def _forward(operands: Operands, saved: Result | None, job: Job) -> tuple[Result, _Residuals]:
    whole = _whole(operands, job)
    rows, keys = _dealt_rows(operands, job), _dealt_keys(operands, job)
    if saved is not None:
        dealt = list(zip(*(_dealt(job, x) for x in saved), strict=True))
        return saved, _Residuals(whole, rows, keys, dealt, operands.sinks)
    seen = _gathered(job, keys)
    if job.is_balanced:
        # A device that waits for rows between its products waits for the slowest device: on two
        # GPUs, the exchange between the two calls turned 28 ms of products into 40.
        rows, seen = jax.lax.optimization_barrier((rows, seen))
    results: list[Any] = [None] * len(rows)
    for step, visiting in enumerate(_visits(job, seen)):
        for pair in _pairs(job, step, len(rows), len(visiting)):
            sinks = operands.sinks if pair.is_first else None
            part = _part(job, whole, _pick(rows, pair.rows), _pick(visiting, pair.keys), sinks)
            new = primitives.forward(part, pair.semantics, job.implementation)
            for index in range(len(rows)):
                results[index] = _merged(results[index], _given(pair.rows, index, new, _NOTHING))
    dtype = operands.q.dtype
    done = [
        (checkpoint_name(x[0].astype(dtype), vjp.OUT_NAME), checkpoint_name(x[1], vjp.LSE_NAME))
        for x in results
    ]
    returned = jax.lax.optimization_barrier(done) if job.is_balanced else done
    out, lse = (_collected(job, list(x)) for x in zip(*returned, strict=True))
    return (out, lse), _Residuals(whole, rows, keys, done, operands.sinks)


def _backward(job: Job, residuals: _Residuals, cotangents: Result) -> tuple[Operands, None]:
    whole, rows, keys, results, all_sinks = residuals
    dresults = list(zip(*(_dealt(job, x) for x in cotangents), strict=True))
    # Keys are tied to the cotangents, to be gathered again: XLA would keep the forward's, O(T).
    keys, dresults = jax.lax.optimization_barrier((keys, dresults))
    seen = _gathered(job, keys)
    if job.is_balanced:
        seen, dresults = jax.lax.optimization_barrier((seen, dresults))
    dq: list[Any] = [None] * len(rows)
    dkv: list[Any] = [None] * len(seen)
    dbias: list[Any] = [None] * len(rows)
    dsinks = None
    for step, visiting in enumerate(_visits(job, seen)):
        # Summed apart from what travels with the keys, which may then arrive late.
        own: list[Any] = [None] * len(visiting)
        for pair in _pairs(job, step, len(rows), len(visiting)):
            sinks = all_sinks if pair.is_first else None
            keys_here = _pick(visiting, pair.keys)
            part = _part(job, whole, _pick(rows, pair.rows), keys_here, sinks)
            saved, cotangent = _pick(results, pair.rows), _pick(dresults, pair.rows)
            grads = primitives.backward(part, pair.semantics, saved, cotangent, job.implementation)
            dsinks = _sum(dsinks, grads.sinks)
            for index in range(len(rows)):
                dq[index] = _sum(dq[index], _given(pair.rows, index, grads.q, 0))
            if grads.bias is not None:
                for index, chunk in enumerate(rows):
                    own_rows = _given(pair.rows, index, grads.bias, 0)
                    dbias[index] = _with_keys(
                        dbias[index], own_rows, keys_here.first, chunk.arrays["bias"]
                    )
            for index in range(len(visiting)):
                own[index] = _sum(own[index], _given(pair.keys, index, (grads.k, grads.v), 0))
        dkv = [_sum(total, new) for total, new in zip(dkv, own, strict=True)]
        if job.strategy == "ring":
            dkv = _passed_on(job, dkv)
    k, v = (keys[0].arrays[name] for name in ("k", "v"))
    dtypes = results[0][0].dtype, k.dtype, v.dtype
    rounded = [x.astype(dtypes[0]) for x in dq]
    if job.is_balanced:
        rounded, dkv = jax.lax.optimization_barrier((rounded, dkv))
    dk, dv = (
        _returned(job, list(x), k.shape[1]).astype(dtype)
        for x, dtype in zip(zip(*dkv, strict=True), dtypes[1:], strict=True)
    )
    grads = Gradients(_collected(job, rounded), dk, dv, dsinks)
    bias = None if dbias[0] is None else _collected_bias(job, dbias, rows[0].arrays["bias"])
    return Operands(grads.q, grads.k, grads.v, sinks=grads.sinks, bias=bias), None


_attention.defvjp(_forward, _backward)


def _whole(operands: Operands, job: Job) -> Whole:
    extents = (operands.q.shape[1] * job.size, operands.k.shape[1] * job.size)
    whole = Whole.of(operands, job.semantics, extents)
    return whole._replace(diagonal=None) if job.is_paired else whole


class _Pair(NamedTuple):
    """A chunk of rows that meets a chunk of keys.

    Attributes:
        rows: which of this device's chunks of rows; may be known at run time only.
        keys: which of the visiting chunks of keys, likewise.
        semantics: what is asked of the pair.
        is_first: the rows meet their first keys, so that here their sinks count.
    """

    rows: Any
    keys: Any
    semantics: Semantics
    is_first: bool


def _pairs(job: Job, step: int, num_rows: int, num_keys: int) -> list[_Pair]:
    """Which chunks of rows and keys meet at a step.

    Of chunks that are in pairs, this device has those numbered ``2 i`` and ``2 (n - 1 - i) + 1``,
    the visitors come from device j. The first rows see the first keys if ``j < i`` and otherwise
    the last rows see the last keys; the first rows see the last keys if ``i + j >= n`` and
    otherwise the last rows see the first keys. So kernels need no offsets, and none runs idle.

    Of zigzag chunks, ``i`` and ``2 n - 1 - i``, the last rows see the first keys whatever j is.
    """
    if not job.is_paired:
        part = meaning(job.semantics)
        every = [(rows, keys) for keys in range(num_keys) for rows in range(num_rows)]
        return [_Pair(*pair, part, (step, pair[1]) == (0, 0)) for pair in every]
    here = jax.lax.axis_index(job.axis)
    source = (here - step) % job.size
    diagonal = meaning(job.semantics)
    seen = replace(job.semantics, band=Band())
    across = _Pair(1, 0, seen, is_first=False)
    if job.layout == "contiguous":
        is_late = (here + source >= job.size).astype(jnp.int32)
        across = _Pair(1 - is_late, is_late, seen, is_first=False)
    if step == 0:
        return [_Pair(i, i, diagonal, is_first=True) for i in (0, 1)] + [across]
    alike = (source > here).astype(jnp.int32)
    return [_Pair(alike, alike, seen, is_first=False), across]


def _pick(chunks: Any, which: Any) -> Any:
    """One of the chunks."""
    if isinstance(which, int):
        return chunks[which]
    return jax.tree.map(lambda a, b: jnp.where(which == 0, a, b), *chunks)


_NOTHING = (0, -jnp.inf)
"""Output and LSE over no key."""


def _given(which: Any, index: int, new: Any, otherwise: Any) -> Any:
    """``new`` if it is of chunk ``index``, else None; ``otherwise`` if run time has to tell."""
    if isinstance(which, int):
        return new if which == index else None
    if not isinstance(otherwise, tuple):
        otherwise = jax.tree.map(lambda _: otherwise, new)
    return jax.tree.map(
        lambda x, y: jnp.where(which == index, x, y).astype(x.dtype), new, otherwise
    )


def _part(job: Job, whole: Whole, rows: _Tokens, keys: _Tokens, sinks: Array | None) -> Operands:
    count = keys.arrays["k"].shape[1]
    own = Operands(**rows.arrays, **keys.arrays, sinks=sinks)
    if job.strategy == "ring":
        # All-gather has all keys here, if there are a mask or a bias.
        kv_len = count * len(_firsts(job, 0, count)) * job.size
        if own.mask_words is not None:
            words = masks.of_keys(own.mask_words, keys.first, count, kv_len)
            own = own._replace(mask_words=words)
        if own.bias is not None:
            own = own._replace(bias=taken(own.bias, keys.first, count, 3))
    return masks.mapped(whole.part(own, rows.first, keys.first))


def _with_keys(total: Array | None, new: Array | None, first: Any, bias: Array) -> Array | None:
    """Adds the gradient of a bias from some keys, ``first`` and on, to that from others."""
    if new is None or new.shape[3] == bias.shape[3]:
        return _sum(total, new)
    if total is None:
        total = jnp.zeros((*new.shape[:3], bias.shape[3]), wide(new.dtype))
        total, new = primitives.aligned([total, new])
    before = taken(total, first, new.shape[3], 3)
    return jax.lax.dynamic_update_slice_in_dim(total, _sum(before, new), first, 3)


def _collected_bias(job: Job, chunks: list[Array], bias: Array) -> Array:
    """The gradient of this device's rows of a bias, from those of chunks of them."""
    whole = sum(chunks[1:], chunks[0]) if bias.shape[2] == 1 else _collected(job, chunks, axis=2)
    return whole.astype(bias.dtype)


def _merged(old: Result | None, new: Result | None) -> Result | None:
    """Results over disjoint keys -> those over all of them, the output in the type of the LSE."""
    if old is None or new is None:
        return new if old is None else old
    top = jnp.maximum(old[1], new[1])
    top = jnp.where(jnp.isneginf(top), 0, top)
    weights = [jnp.exp(lse - top) for _, lse in (old, new)]
    total = weights[0] + weights[1]
    some = jnp.where(total == 0, 1, total)
    a, b = (
        x.astype(total.dtype) * (weight / some)[..., None]
        for (x, _), weight in zip((old, new), weights, strict=True)
    )
    return a + b, jnp.where(total == 0, -jnp.inf, jnp.log(some) + top)


def _sum(total: Any, new: Any) -> Any:
    """Sums of gradients, in the type of accumulation; None counts as 0."""
    if new is None:
        return total
    new = jax.tree.map(lambda x: x.astype(wide(x.dtype)), new)
    return new if total is None else jax.tree.map(jnp.add, total, new)


# ------------------------------------------------------------------------------------------- tokens


def _sent(job: Job, x: Array, pairs: list[tuple[int, int]]) -> Array:
    """Sends ``x`` from device to device, as ``pairs`` (from, to) of numbers along the axis say.

    HAZARD: where an axis is several, ``ppermute`` numbers devices in the order of the mesh, unlike
    ``axis_index`` and every other collective (jax 0.10 to 0.12).
    """
    names = job.axis if isinstance(job.axis, tuple) else (job.axis,)
    mesh = jax.sharding.get_abstract_mesh().axis_names
    order = sorted(range(len(names)), key=lambda i: mesh.index(names[i]) if names[i] in mesh else i)
    sizes = [jax.lax.axis_size(name) for name in names]
    number = np.argsort(np.arange(job.size).reshape(sizes).transpose(order).ravel())
    permutation = [(int(number[i]), int(number[j])) for i, j in pairs]
    return jax.lax.ppermute(x, tuple(names[i] for i in order), permutation)


def _mirrored(job: Job, x: Array) -> Array:
    last = job.size - 1
    return _sent(job, x, [(i, last - i) for i in range(job.size)])


def _dealt(job: Job, x: Array, axis: int = 1) -> list[Array]:
    """This device's tokens, along ``axis`` -> those that it works on, in chunks."""
    if job.layout == "contiguous" and not job.is_balanced:
        return [x]
    first, last = jnp.split(x, 2, axis)
    return [first, _mirrored(job, last) if job.is_balanced else last]


def _collected(job: Job, chunks: list[Array], axis: int = 1) -> Array:
    """Inverse of ``_dealt``."""
    if len(chunks) == 1:
        return chunks[0]
    first, last = chunks
    return jnp.concatenate([first, _mirrored(job, last) if job.is_balanced else last], axis)


def _firsts(job: Job, device: Any, count: int) -> list[Any]:
    """First token of each chunk that ``device`` works on, of ``count`` tokens."""
    if not job.is_balanced:
        return layouts.firsts(job.layout, device, job.size, count)
    half = count // 2
    return [2 * device * half, (2 * (job.size - 1 - device) + 1) * half]


def _dealt_rows(operands: Operands, job: Job) -> list[_Tokens]:
    rows = _dealt_tokens(job, per_token(operands, "T"), operands.q.shape[1])
    for name, x in per_pair(operands).items():
        chunks = [x] * len(rows) if x.shape[2] == 1 else _dealt(job, x, axis=2)
        for chunk, part in zip(rows, chunks, strict=True):
            chunk.arrays[name] = part
    return rows


def _dealt_keys(operands: Operands, job: Job) -> list[_Tokens]:
    """The keys that pass by others; all-gather leaves them where they are."""
    arrays, count = per_token(operands, "S"), operands.k.shape[1]
    if job.strategy == "all_gather":
        return [_Tokens(jax.lax.axis_index(job.axis) * count, arrays)]
    return _dealt_tokens(job, arrays, count)


def _dealt_tokens(job: Job, arrays: dict[str, Array], count: int) -> list[_Tokens]:
    firsts = _firsts(job, jax.lax.axis_index(job.axis), count)
    dealt = {name: _dealt(job, x) for name, x in arrays.items()}
    return [
        _Tokens(first, {name: chunks[i] for name, chunks in dealt.items()})
        for i, first in enumerate(firsts)
    ]


def _gathered(job: Job, keys: list[_Tokens]) -> list[_Tokens]:
    """The keys that this device's rows meet first."""
    if job.strategy == "ring":
        return keys
    ((_, own),) = keys
    first = _first_seen(job, own["k"].shape[1])
    return [_Tokens(first, {name: _of_all(job, x) for name, x in own.items()})]


def _visits(job: Job, keys: list[_Tokens]) -> Iterator[list[_Tokens]]:
    """The keys of each step; the next are on their way before those of this step are used."""
    if job.strategy == "all_gather":
        yield keys
        return
    here = jax.lax.axis_index(job.axis)
    count = sum(x.arrays["k"].shape[1] for x in keys)
    for step in range(job.size):
        following = _passed_on(job, [x.arrays for x in keys]) if step + 1 < job.size else []
        yield keys
        firsts = _firsts(job, (here - step - 1) % job.size, count)
        keys = list(map(_Tokens, firsts, following))


def _passed_on(job: Job, arrays: Any) -> Any:
    """What the device before held."""
    around = [(i, (i + 1) % job.size) for i in range(job.size)]
    return jax.tree.map(lambda x: _sent(job, x, around), arrays)


def _returned(job: Job, chunks: list[Array], count: int) -> Array:
    """Gradients of keys as this device saw them -> those of its own ``count`` keys, summed."""
    if job.strategy == "ring":
        return _collected(job, chunks)
    (gradient,) = chunks
    zeros = jnp.zeros((gradient.shape[0], count, *gradient.shape[2:]), gradient.dtype)
    _, own = primitives.aligned([gradient, zeros])
    _, transposed = jax.vjp(partial(_of_all, job), own)
    return transposed(gradient)[0]


def _of_all(job: Job, x: Array) -> Array:
    """The tokens of all devices, or those within reach; linear, so that it has a transpose."""
    if job.reach is None:
        whole = jax.lax.all_gather(x, job.axis, axis=1, tiled=True)
        return layouts.in_order(whole, job.layout, job.size)
    before, after = job.reach
    own = x.shape[1]
    earlier = [_from(job, x[:, own - count :], distance) for distance, count in _hops(before, own)]
    later = [_from(job, x[:, :count], -distance) for distance, count in _hops(after, own)]
    near = jnp.concatenate([*reversed(earlier), x, *later], axis=1)
    # At the ends of the sequence there are fewer neighbours: there the tokens at hand come first,
    # or last, and zeros fill a part that no row sees.
    padding = [(0, 0), (after, before), *[(0, 0)] * (x.ndim - 2)]
    first = jax.lax.axis_index(job.axis) * own - before
    start = _first_seen(job, own) - first + after
    return jax.lax.dynamic_slice_in_dim(jnp.pad(near, padding), start, near.shape[1], axis=1)


def _first_seen(job: Job, own: int) -> Any:
    """Number of the first token of ``_of_all``, where each device holds ``own``."""
    if job.reach is None:
        return 0
    first = jax.lax.axis_index(job.axis) * own - job.reach.before
    return jnp.clip(first, 0, job.size * own - own - sum(job.reach))


def _hops(reach: int, own: int) -> list[tuple[int, int]]:
    """(distance, tokens) of each neighbour on one side within ``reach``, nearest first."""
    return [(1 + start // own, min(own, reach - start)) for start in range(0, reach, own)]


def _from(job: Job, x: Array, distance: int) -> Array:
    """What the device ``distance`` before this one holds; zeros if there is none."""
    pairs = [(i, i + distance) for i in range(job.size) if 0 <= i + distance < job.size]
    return _sent(job, x, pairs)
