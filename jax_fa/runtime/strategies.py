"""How devices share sequences, and how that is chosen: the rule of "auto", refusals, and running.

``docs/parallel.md`` holds the rule in words and the measurements behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_fa.runtime import arguments, checks, context, layouts, masks, primitives, vjp
from jax_fa.runtime.arguments import Call
from jax_fa.runtime.context import Axis, Job, Reach
from jax_fa.runtime.layouts import Layout, Order
from jax_fa.runtime.sharding import Names
from jax_fa.runtime.vjp import Result
from jax_fa.spec import schema
from jax_fa.spec.band import UNBOUNDED
from jax_fa.spec.problem import Gradients, Operands, Problem

Strategy = Literal["auto", "all_gather", "all_to_all", "ring"]

Positions = ArrayLike | tuple[ArrayLike, ArrayLike] | None
"""Positions as a caller gives them: one array for queries and keys, or a pair."""


class Level(NamedTuple):
    """One exchange between the devices along an axis."""

    strategy: Strategy
    axis: Axis


def size_of(axis: Axis) -> int:
    """Devices along an axis that splits sequences."""
    try:
        return jax.lax.axis_size(axis)
    except NameError:
        raise ValueError(
            f"attention: context_axis={axis!r} is no axis here. Call jax_fa.parallel inside "
            f"jax.shard_map over a mesh with that axis, and name it in axis_names if that is given."
        ) from None


def splits_tokens(call: Call) -> bool:
    """Whether explicit sharding splits the query's tokens, in a program of whole arrays."""
    return jax.typeof(call.operands.q).sharding.spec[1] is not None


def over_mesh(call: Call) -> Result:
    """(out, lse) of whole arrays whose tokens explicit sharding splits: ``run`` on every device.

    Other operands are brought to the query's sharding. Axes that are not explicit stay as they are.

    Raises:
        ValueError: head sizes are split, or an axis does not divide what it would have to.
    """
    query = jax.typeof(call.operands.q).sharding
    batch, axis, heads, rest = query.spec
    names = Names(call.operands.present, ("out", "lse"))
    split = {"b": batch, "t": axis, "s": axis, "kg": heads, "k": heads}
    sizes = {"s": call.operands.k.shape[1], "k": call.operands.k.shape[2]}
    uneven = [dim for dim, extent in sizes.items() if extent % _extent(query.mesh, split[dim])]
    if rest is not None or uneven:
        wrong = "the head size" if rest is not None else {"s": "S", "k": "K"}[uneven[0]]
        raise ValueError(
            f"attention: the query [B, T, N, D] has sharding {query.spec}, and key has shape "
            f"{call.operands.k.shape}: {wrong} does not split that way. Reshard the query so that "
            f"D is whole, and tokens and heads lie on axes that divide S and K."
        )

    def spec_of(name: str) -> PartitionSpec:
        return PartitionSpec(*(split.get(dim) for dim in names.dimensions(name)))

    def pairwise(x: Array) -> PartitionSpec:
        sides = zip(x.shape, (batch, heads, axis, None), strict=True)
        return PartitionSpec(*(None if extent == 1 else side for extent, side in sides))

    arrays = {name: getattr(call.operands, name) for name in call.operands.present}
    specs = {name: spec_of(name) for name in arrays}
    words = None if call.words is None else masks.by_rows(call.words, call.operands.q.shape[1])
    pairs = {"bias": call.bias, "mask": call.mask, "words": words}
    pairs = {name: x for name, x in pairs.items() if x is not None}
    arrays |= pairs
    specs |= {name: pairwise(x) for name, x in pairs.items()}

    def one_device(arrays: dict[str, Array]) -> Result:
        own = {name: x for name, x in arrays.items() if name not in pairs}
        part: dict[str, Any] = {name: arrays[name] for name in pairs}
        return run(call._replace(operands=Operands(**own), **part), How(axis))

    explicit = {
        name
        for name, kind in zip(query.mesh.axis_names, query.mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    # The mesh is named, since callers need not have set one.
    mapped = jax.shard_map(
        one_device,
        mesh=query.mesh,
        in_specs=(specs,),
        out_specs=(spec_of("out"), spec_of("lse")),
        axis_names=explicit,
    )
    return mapped(
        {
            name: jax.sharding.reshard(x, NamedSharding(query.mesh, specs[name]))
            for name, x in arrays.items()
        }
    )


def _extent(mesh: Any, axis: Any) -> int:
    """Devices along the axes of one dimension."""
    axes = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
    return math.prod(mesh.shape[name] for name in axes)


def gradients(call: Call, axis: Axis, saved: Result, cotangents: Result) -> Gradients:
    """Gradients of ``run`` by "auto", given its results; that of sinks is summed over the axis."""
    names = [name for name in ("q", "k", "v", "sinks") if name in call.operands.present]
    moving = {name: getattr(call.operands, name) for name in names}

    def known(moving: dict[str, Array], bias: Array | None) -> Result:
        operands = call.operands._replace(**moving)
        return run(call._replace(operands=operands, bias=bias), How(axis), saved)

    _, pullback = jax.vjp(known, moving, call.bias)
    grads, bias = pullback(cotangents)
    if "sinks" in grads:
        grads["sinks"] = jax.lax.psum(grads["sinks"], axis)
    return Gradients(**{"sinks": None, **grads}, bias=bias)


class How(NamedTuple):
    """What a caller of ``parallel`` says about devices.

    Attributes:
        axis: the axis that splits sequences, or several.
        strategy: as for ``parallel.attention``.
        layout: which tokens a device holds.
        positions: of this device's tokens, as for ``parallel.attention``; None if ``layout`` tells.
    """

    axis: Axis
    strategy: Any = "auto"
    layout: Any = "contiguous"
    positions: Any = None


def run(call: Call, how: How, saved: Result | None = None) -> Result:
    """(out, lse) of this device's rows; the leading dimensions are those of ``call.operands``.

    Args:
        call: this device's part, checked.
        how: how devices share sequences.
        saved: the results, if they are known: only their gradient is then left to compute.

    Raises:
        ValueError: every device has the same keys, which would count once for each.
    """
    _check_split(call.operands, how.axis)
    reason = arguments.needs_reference(call)
    how = _as_far_as_order_matters(call, how._replace(positions=_positions(call, how)), reason)
    levels = _levels(call, how, reason)
    _check_layout(call, how.layout, levels)
    layout: Layout = how.layout
    *outer, last = levels
    operands, implementation = call.unmapped, call.implementation
    name = "jax_fa_" + "_of_".join(level.strategy for level in levels)
    with jax.named_scope(name if how.positions is None else f"{name}_by_position"):
        if last.strategy == "all_to_all":
            count = size_of(last.axis)
            job = _job(call, outer[0], shards=count) if outer else None

            def attend(heads: Operands, saved: Result | None) -> Result:
                if job is None:
                    mapped = masks.mapped(heads)
                    return vjp.attention(mapped, call.semantics, implementation, saved)
                return context.attention(heads, job, saved)

            orders = _orders(how, last.axis)
            return context.over_heads(operands, last.axis, attend, saved, orders)
        if layout == "striped":
            return _brought_in_order(operands, _job(call, last))
        job = _job(call, last, layout)
        if reason is None and not (implementation == "xla" and last.strategy == "all_gather"):
            return context.attention(operands, job, saved)
        arguments.leave_kernels(call, reason)
        return context.unfused(call.with_words, job, call.bias, call.mask)


def _check_split(operands: Operands, axis: Axis) -> None:
    """Refuses whole keys beside rows that are split, where ``shard_map`` tells (``check_vma``)."""
    for field, array in (("key", operands.k), ("value", operands.v)):
        for name in _whole_axes(operands.q, array, axis):
            raise ValueError(
                f"attention: {field} is the same on every device along axis {name!r}, which "
                f"splits the query, so that each of its tokens would count {size_of(name)} "
                f"times. Split its tokens too, by in_specs such as P(None, {name!r})."
            )


def _whole_axes(query: Array, array: Array, axis: Axis) -> list[Any]:
    """Axes that split the query's tokens, while all devices along them have the same ``array``."""
    names = axis if isinstance(axis, tuple) else (axis,)
    split = primitives.varying_axes(query) - primitives.varying_axes(array)
    return [name for name in names if name in split and size_of(name) > 1]


# ------------------------------------------------------------------------------------------- order


def _positions(call: Call, how: How) -> tuple[Array, Array] | None:
    """Positions of queries and of keys, int32 [B, T] and [B, S]; values checked if known."""
    if how.positions is None:
        return None
    if how.layout != "contiguous":
        raise ValueError(
            f"attention: layout={checks.shown(how.layout)} and positions both say which tokens a "
            f"device holds. Give one of them."
        )
    given, lengths = how.positions, [x.shape[1] for x in call.operands[:2]]
    if not isinstance(given, tuple):
        if lengths[0] != lengths[1]:
            raise ValueError(
                f"attention: there are {lengths[0]} queries and {lengths[1]} keys here, whose "
                f"positions differ. Give them as a pair: positions=(queries, keys)."
            )
        both = _positions_of("queries", given, call, how.axis)
        return both, both
    if len(given) != 2:
        raise ValueError(
            f"attention: positions should be an array, or a pair of those of queries and keys, but "
            f"is a tuple of {len(given)}."
        )
    queries, keys = given
    return (
        _positions_of("queries", queries, call, how.axis),
        _positions_of("keys", keys, call, how.axis),
    )


def _positions_of(side: str, given: Any, call: Call, axis: Axis) -> Array:
    """Positions of one side, int32 with the batch and tokens of its operand."""
    name, operands = f"positions of {side}", call.operands
    values, array = checks.at_hand(given), checks.integers(name, given)
    query, shape = operands.q, (operands.q if side == "queries" else operands.k).shape[:2]
    if array.ndim == 1 and (call.missing or operands.is_packed):
        array = array[None]
    if array.shape != shape:
        raise ValueError(
            f"attention: {name} should have shape {list(shape)}, that of its tokens here, "
            f"but have {list(array.shape)}."
        )
    size = size_of(axis)
    is_alike = values is not None and size > 1
    if is_alike or _whole_axes(query, array, axis):
        raise ValueError(
            f"attention: {name} are the same on every device along axis {axis!r}, which splits "
            f"the tokens, so that they number no sequence. Hand them to shard_map as an argument, "
            f"split as the tokens are: P(None, {axis!r})."
        )
    if values is not None and (np.sort(values, axis=-1) != np.arange(shape[1])).any():
        raise ValueError(
            f"attention: {name} should be the numbers 0 to {shape[1] - 1}, each once a sequence, "
            f"but are not. They count tokens in the order of the whole sequence (a packed row: of "
            f"the row), not of a document."
        )
    return array


def _orders(how: How, axis: Axis) -> tuple[Order, Order]:
    """The order of the query's tokens and that of the keys."""
    if how.positions is None:
        return (Order(how.layout, size_of(axis)),) * 2
    *aligned, _ = primitives.aligned([*how.positions, jax.lax.axis_index(axis)])
    queries, keys = aligned
    rows = Order.by_position(queries, axis)
    return rows, rows if how.positions[0] is how.positions[1] else Order.by_position(keys, axis)


def _as_far_as_order_matters(call: Call, how: How, reason: str | None) -> How:
    """``how``, but contiguous where no mask makes the order of tokens matter."""
    checks.name_among("layout", how.layout, get_args(Layout))
    operands, band = call.operands, call.semantics.band
    has_lengths = operands.q_lengths is not None or operands.kv_lengths is not None
    counts_tokens = not band.is_full or has_lengths or operands.is_packed
    if reason is None and call.is_pairwise:
        reason = "a bias or a mask has rows and keys in the order of the sequence"
    if not (reason or counts_tokens):
        return how._replace(layout="contiguous", positions=None)
    if reason is not None and (how.positions is not None or how.layout != "contiguous"):
        asked = f"layout={how.layout!r}" if how.positions is None else "positions"
        raise NotImplementedError(
            f"attention: {asked} does not serve this call: {reason}. Use tokens in their order, "
            f"layout='contiguous'."
        )
    return how


def _check_layout(call: Call, layout: Layout, levels: tuple[Level, ...]) -> None:
    """Refuses a layout that the exchanges do not serve."""
    if layout == "contiguous":
        return
    if len(levels) > 1:
        raise NotImplementedError(
            f"attention: layout={layout!r} goes with one strategy, not with {len(levels)} levels. "
            f"Use layout='contiguous', or several axes as one: strategy='all_gather'."
        )
    (level,) = levels
    operands, size = call.operands, size_of(level.axis)
    unit = 2 if layout == "zigzag" else 1 if level.strategy == "all_to_all" else size
    otherwise = "" if layout == "zigzag" else ", or use strategy='all_to_all'"
    for side, x in (("T", operands.q), ("S", operands.k)):
        if x.shape[1] % unit:
            raise ValueError(
                f"attention: layout={layout!r} with strategy={level.strategy!r} over {size} "
                f"devices splits the tokens of each in {unit} equal parts, but {side} is "
                f"{x.shape[1]}. Pad the sequences{otherwise}."
            )


def _brought_in_order(operands: Operands, job: Job) -> Result:
    """``context.attention`` on striped tokens, which travel to where they would be contiguous."""

    def moved(x: Array) -> Array:
        return layouts.contiguous(x, job.axis)

    per_token = {
        name: moved(x)
        for name, x in operands._asdict().items()
        if x is not None and schema.BY_NAME[name].is_per_token
    }
    out, lse = context.attention(operands._replace(**per_token), job)
    return layouts.striped(out, job.axis), layouts.striped(lse, job.axis)


def names_of(call: Call, axis: Axis, mesh: Sequence[tuple[Any, int]]) -> str:
    """The strategies that "auto" takes, in words; ``mesh`` is (name, size) of every axis."""
    found: list[str] = []

    def inside() -> int:
        found.append(names_inside(call, How(axis)))
        return 0

    jax.make_jaxpr(inside, axis_env=tuple(mesh))()
    return found[0]


def names_inside(call: Call, how: How) -> str:
    """The strategies that ``run`` takes, in words: the outermost exchange first."""
    reason = arguments.needs_reference(call)
    how = _as_far_as_order_matters(call, how._replace(positions=_positions(call, how)), reason)
    return " of ".join(level.strategy for level in _levels(call, how, reason))


def problems_inside(call: Call, how: How) -> list[Problem]:
    """What ``run`` asks of forward kernels on this device, each once, in order."""
    return primitives.forward_problems(jax.make_jaxpr(lambda: run(call, how))().jaxpr)


def _levels(call: Call, how: How, reason: str | None) -> tuple[Level, ...]:
    """The exchanges that a call needs, outermost first; ``reason`` is why no kernel serves it."""
    axis, strategy = how.axis, how.strategy
    names = strategy if isinstance(strategy, tuple) else (strategy,)
    for name in names:
        checks.name_among("strategy", name, get_args(Strategy))
    if isinstance(strategy, tuple):
        axes = axis if isinstance(axis, tuple) else (axis,)
        is_known = len(names) == 1 or (names[0] in _OUTER and names[1:] == ("all_to_all",))
        if not is_known or len(axes) != len(names):
            raise ValueError(
                f"attention: strategy={strategy} over context_axis={axis!r} is unknown. A tuple "
                f"names one strategy for each axis, such as ('ring', 'all_to_all') over ('hosts', "
                f"'gpus'): the last exchanges heads within groups of neighbours, the first is one "
                f"of {', '.join(map(repr, _OUTER))}."
            )
        levels = tuple(map(Level, names, axes))
    elif strategy == "auto":
        levels = _automatic(call, how, reason)
    else:
        levels = (Level(strategy, axis),)
    for level in levels:
        if how.positions is None:
            _check_level(call, level, reason)
        else:
            _check_level_by_position(call, level)
    return levels


_OUTER = ("ring", "all_gather")


def _automatic(call: Call, how: How, reason: str | None) -> tuple[Level, ...]:
    """The rule of "auto"; docs/parallel.md holds the measurements behind it."""
    axis = how.axis
    if how.positions is not None:
        return (Level("all_to_all", axis),)
    gather = (Level("all_gather", axis),)
    is_near = how.layout == "contiguous" and _reach(call, size_of(axis), 1) is not None
    if reason is not None or is_near or call.is_pairwise:
        return gather
    num_kv_heads = call.operands.k.shape[2]
    if num_kv_heads % size_of(axis) == 0:
        return (Level("all_to_all", axis),)
    outer, last = (axis[:-1], axis[-1]) if isinstance(axis, tuple) else ((), axis)
    if outer and how.layout == "contiguous" and num_kv_heads % size_of(last) == 0:
        return Level("all_gather", outer), Level("all_to_all", last)
    return gather


def _check_level(call: Call, level: Level, reason: str | None) -> None:
    if level.strategy == "all_gather":
        return
    if reason is not None:
        raise NotImplementedError(
            f"attention: strategy={level.strategy!r} does not serve this call: {reason}. Use "
            f"strategy='all_gather'."
        )
    num_kv_heads = call.operands.k.shape[2]
    if level.strategy == "all_to_all" and num_kv_heads % size_of(level.axis):
        raise ValueError(
            f"attention: strategy='all_to_all' gives each of {size_of(level.axis)} devices (axis "
            f"{level.axis!r}) some of the {num_kv_heads} key/value heads, which do not divide "
            f"evenly. Use strategy='all_gather' or 'ring', or ('ring', 'all_to_all') over two axes "
            f"of which the second divides the heads."
        )


def _check_level_by_position(call: Call, level: Level) -> None:
    """As ``_check_level``, of tokens that a device can sort once it has all of them."""
    if level.strategy != "all_to_all":
        raise NotImplementedError(
            f"attention: strategy={level.strategy!r} does not serve positions: its kernels would "
            f"have to read one for each token, and none does. Use strategy='all_to_all', which "
            f"sorts the tokens, or hold them in a layout: 'contiguous', 'zigzag' or 'striped'."
        )
    heads, size = call.operands.q.shape[2], size_of(level.axis)
    if heads % size:
        raise ValueError(
            f"attention: positions need strategy='all_to_all', which gives each of {size} devices "
            f"(axis {level.axis!r}) some of the {heads} query heads, and these do not divide "
            f"evenly. Share sequences between a number of devices that divides them, or hold "
            f"tokens in a layout ('contiguous', 'zigzag' or 'striped'), with "
            f"strategy='all_gather'."
        )


def _job(call: Call, level: Level, layout: Layout = "contiguous", shards: int = 1) -> Job:
    """The job of the devices along the axis of ``level``; each holds ``shards`` times T and S.

    A causal mask is balanced if it hides much and chunks are of equal size, but not beside a bias:
    its rows would have to be sent too, which takes longer than their products.
    """
    size, band = size_of(level.axis), call.semantics.band
    is_gather = level.strategy == "all_gather" and layout == "contiguous"
    reach = _reach(call, size, shards) if is_gather else None
    q_len, kv_len = (x.shape[1] * shards for x in call.operands[:2])
    counts = (q_len, kv_len) if level.strategy == "ring" else (q_len,)
    is_balanced = (
        size > 1
        and layout == "contiguous"
        and reach is None
        and (call.bias is None or call.bias.shape[2] == 1)
        and band.right_bound < kv_len
        and band.left_bound >= size * kv_len // 2
        and all(count % 2 == 0 for count in counts)
    )
    return Job(
        call.semantics,
        call.implementation,
        level.axis,
        cast(Literal["all_gather", "ring"], level.strategy),
        is_balanced,
        reach,
        is_paired=(is_balanced or layout == "zigzag")
        and level.strategy == "ring"
        and (band.left_bound, band.right_bound) == (UNBOUNDED, 0)
        and _starts_at_key_0(call),
        layout=layout,
    )


def _starts_at_key_0(call: Call) -> bool:
    """Whether row i of all is known to stand on key i: the diagonal of a square."""
    operands, band = call.operands, call.semantics.band
    has_lengths = operands.q_lengths is not None or operands.kv_lengths is not None
    return (
        operands.q.shape[1] == operands.k.shape[1]
        and not operands.is_packed
        and operands.q_offset is None
        and (band.alignment == "top_left" or not has_lengths)
    )


def _reach(call: Call, size: int, shards: int) -> Reach | None:
    """How far the rows of one of ``size`` devices see, if known and not the whole sequence."""
    operands, band = call.operands, call.semantics.band
    own = operands.k.shape[1] * shards
    sides = [band.left_bound, band.right_bound]
    if not _starts_at_key_0(call) or call.is_pairwise or UNBOUNDED in sides:
        return None
    reach = Reach(*(max(side, 0) for side in sides))
    return reach if sum(reach) + own < size * own else None
