"""The operations, forward, backward and the gradient of a bias, as JAX primitives.

As a primitive, one traced program takes the right path on every platform that it is lowered for
(``dispatch.choose``), folds ``vmap`` into the batch, and refuses derivatives that do not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval, xla
from jax.sharding import PartitionSpec

from jax_fa.runtime import bindings, blockwise, emulation, fallback, sharding
from jax_fa.runtime.dispatch import Emulation, Forced, choose
from jax_fa.runtime.partitioning import Call
from jax_fa.runtime.reference import wide
from jax_fa.runtime.sequences import in_one_row, with_slot_in_front
from jax_fa.spec import schema
from jax_fa.spec.problem import Gradients, Operands, Problem, Semantics


def _split(names: tuple[str, ...], arrays: Sequence[Any]) -> tuple[Operands, list[Any]]:
    """Splits a primitive's flat arrays into operands and what follows them (backward only)."""
    values = dict(zip(names, arrays, strict=False))
    return Operands(**values), list(arrays[len(names) :])


def _flat(operands: Operands | Gradients | bindings.Saved) -> list[Any]:
    return [array for array in operands if array is not None]


# ----------------------------------------------------------------------------- public operations


def forward(
    operands: Operands, semantics: Semantics, implementation: Forced = None
) -> tuple[Array, Array]:
    """Output [B, T, N, Dv] and lse float32 [B, T, N]; without a gradient rule (see ``vjp``)."""
    out, lse = forward_p.bind(
        *aligned(_flat(operands)),
        names=operands.present,
        semantics=semantics,
        implementation=implementation,
    )
    return out, lse


def backward(
    operands: Operands,
    semantics: Semantics,
    saved: tuple[Array, Array],
    cotangents: tuple[Array, Array | None],
    implementation: Forced = None,
) -> Gradients:
    """Gradients of ``forward``, of all operands that have one.

    Args:
        operands: those of the forward.
        semantics: those of the forward.
        saved: (out, lse); the LSE may cover more keys than ``operands`` hold (ring attention).
        cotangents: (dout, dlse); dlse is None if it is zero.
        implementation: forced implementation, or None.
    """
    names, gives_dbias = operands.present, Problem.of(operands, semantics).is_bias_whole
    of_call: dict[str, Any] = {
        "names": names,
        "semantics": semantics,
        "implementation": implementation,
    }
    arrays = aligned([*_flat(operands), *_flat(bindings.Saved(*saved, *cotangents))])
    grads = backward_p.bind(*arrays, gives_dbias=gives_dbias, **of_call)
    found = dict(zip(_moving(names, gives_dbias), grads, strict=True))
    if operands.bias is not None and not gives_dbias:
        # A call of its own: XLA deletes it where nobody asks for this gradient.
        rows = bindings.rows_of(bindings.Saved(*arrays[len(names) :]))
        (found["bias"],) = bias_gradient_p.bind(*arrays[: len(names)], *rows, **of_call)
    return Gradients(**found)


def _moving(names: tuple[str, ...], gives_dbias: bool) -> tuple[str, ...]:
    """The operands whose gradients a backward gives, among those of ``names``."""
    left_out = () if gives_dbias else ("bias",)
    moving = (x.name for x in schema.OPERANDS if x.is_differentiable)
    return tuple(name for name in moving if name in names and name not in left_out)


def aligned(arrays: list[Array]) -> list[Array]:
    """Makes every array vary over each mesh axis that any of them varies over (``shard_map``).

    Its gradient sums over the devices that share an operand, as the operand's gradient needs.
    """
    varying = [varying_axes(array) for array in arrays]
    union = frozenset().union(*varying)

    def shared(array: Array, axes: frozenset[Any]) -> Array:
        more = tuple(union - axes)
        if not more:
            return array
        return summed_wide(lambda x: jax.lax.pcast(x, more, to="varying"), array)

    return [shared(array, axes) for array, axes in zip(arrays, varying, strict=True)]


def summed_wide(copied: Callable[[Array], Array], array: Array) -> Array:
    """``copied(array)``, which holds entries several times or on several devices.

    Their gradients are summed in the type of accumulation.
    """
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return copied(array)
    return copied(array.astype(wide(array.dtype))).astype(array.dtype)


def varying_axes(array: Array) -> frozenset[Any]:
    """Mesh axes along which devices hold different parts, as ``shard_map`` knows them."""
    aval = jax.typeof(array)
    manual = getattr(aval, "manual_axis_type", None)
    return manual.varying if manual is not None else getattr(aval, "vma", frozenset())


# ------------------------------------------------------------------------------- shapes and types


def _forward_abstract(*arrays: Any, names: tuple[str, ...], **params: Any) -> list[Any]:
    operands, _rest = _split(names, arrays)
    query = operands.q
    batch, q_len, heads, _ = query.shape
    lse_dtype = wide(query.dtype)
    shapes = {"out": (batch, q_len, heads, operands.v.shape[3]), "lse": (batch, q_len, heads)}
    operation = Call("fwd", "", names, params["semantics"]).names
    return [
        query.update(
            shape=shape,
            dtype=lse_dtype if name == "lse" else query.dtype,
            weak_type=False,
            sharding=query.sharding.update(
                spec=sharding.result_spec(operation, name, query.sharding.spec)
            ),
        )
        for name, shape in shapes.items()
    ]


def _backward_abstract(
    *arrays: Any, names: tuple[str, ...], gives_dbias: bool, **_: Any
) -> list[Any]:
    operands, _rest = _split(names, arrays)
    sources = (getattr(operands, name) for name in _moving(names, gives_dbias))
    return [x.update(weak_type=False) for x in sources]


def _bias_gradient_abstract(*arrays: Any, names: tuple[str, ...], **_: Any) -> list[Any]:
    operands, _rest = _split(names, arrays)
    return [operands.bias.update(weak_type=False)]


# --------------------------------------------------------------------------------------- lowering


def _forward_on(
    platform: str, *arrays: Array, names: tuple[str, ...], **params: Any
) -> Sequence[Array]:
    semantics: Semantics = params["semantics"]
    operands, _ = _split(names, arrays)
    problem = Problem.of(operands, semantics)
    forced: Forced = params["implementation"]
    choice = choose(problem, bindings.target(platform, forced), forced)
    if choice.implementation == "xla":
        if choice.is_fallback:
            fallback.warn_once(platform, choice.reason, problem.q_len, problem.kv_len)
        return blockwise.forward(operands, semantics)

    if choice.implementation != "cpu" and operands.is_packed:
        operands = with_slot_in_front(operands)
    if isinstance(forced, Emulation):
        return emulation.forward(forced, choice.chosen, operands, semantics)
    call = Call.on("fwd", platform, operands, semantics, choice.chosen)
    return call.bind(*_flat(operands))


def _backward_on(
    platform: str, *arrays: Array, names: tuple[str, ...], gives_dbias: bool, **params: Any
) -> Sequence[Array]:
    semantics: Semantics = params["semantics"]
    operands, rest = _split(names, arrays)
    saved = bindings.Saved(*rest)
    problem = Problem.of(operands, semantics)
    forced: Forced = params["implementation"]
    choice = choose(problem, bindings.target(platform, forced), forced, "bwd")
    if gives_dbias and not choice.chosen.gives_dbias:
        grads = _backward_on(platform, *arrays, names=names, gives_dbias=False, **params)
        of_bias = (*_flat(operands), *bindings.rows_of(saved))
        return *grads, *_bias_gradient_on(platform, *of_bias, names=names, **params)
    if choice.implementation == "xla":
        if choice.is_fallback:
            fallback.warn_once(
                platform, f"in the gradient, {choice.reason}", problem.q_len, problem.kv_len
            )
        rows = (saved.out, saved.lse, *saved.cotangents)
        return _flat(blockwise.backward(operands, semantics, *rows))

    has_slot_in_front = choice.implementation != "cpu" and operands.is_packed
    if has_slot_in_front:
        operands = with_slot_in_front(operands)
    kernel = choice.chosen._replace(gives_dbias=gives_dbias)
    if isinstance(forced, Emulation):
        grads = _flat(emulation.backward(forced, kernel, operands, semantics, saved))
    else:
        call = Call.on("bwd", platform, operands, semantics, kernel)
        call = call._replace(has_dlse=saved.dlse is not None)
        grads = call.bind(*_flat(operands), *_flat(saved))
    if has_slot_in_front and operands.sinks is not None:
        return *grads[:3], grads[3][1:]
    return grads


def _bias_gradient_on(
    platform: str, *arrays: Array, names: tuple[str, ...], **params: Any
) -> Sequence[Array]:
    semantics: Semantics = params["semantics"]
    operands, (lse, dout, delta) = _split(names, arrays)
    problem = Problem.of(operands, semantics)
    forced: Forced = params["implementation"]
    choice = choose(problem, bindings.target(platform, forced), forced, "dbias")
    if choice.implementation == "xla":
        if choice.is_fallback:
            fallback.warn_once(
                platform,
                f"in the gradient of the bias, {choice.reason}",
                problem.q_len,
                problem.kv_len,
            )
        return [blockwise.bias_gradient(operands, semantics, lse, dout, delta)]
    rows = bindings.Rows(lse, dout, delta)
    if isinstance(forced, Emulation):
        return [emulation.bias_gradient(forced, choice.chosen, operands, semantics, rows)]
    call = Call.on("dbias", platform, operands, semantics, choice.chosen)
    return call.bind(*_flat(operands), *rows)


# --------------------------------------------------------------------------------------- batching


def _to_front(array: Array, dim: int | None, size: int) -> Array:
    if dim is None:
        return jnp.broadcast_to(array[None], (size, *array.shape))
    return jnp.moveaxis(array, dim, 0)


class _Fold(NamedTuple):
    """How the vmapped dimension of every array joins its batch (packed: its tokens or slots).

    Attributes:
        size: extent of the vmapped dimension.
        is_inner: it varies faster than the dimension that it joins.
    """

    size: int
    is_inner: bool

    def join(self, array: Array, axis: int) -> Array:
        """Merges the leading vmapped dimension into dimension ``axis`` of the unbatched array."""
        moved = jnp.moveaxis(array, 0, axis + self.is_inner)
        shape = moved.shape
        return moved.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])

    def part(self, array: Array, axis: int, extent: int) -> Array:
        """Inverse of ``join``, given the extent that dimension ``axis`` had."""
        pair = (extent, self.size) if self.is_inner else (self.size, extent)
        split = array.reshape(*array.shape[:axis], *pair, *array.shape[axis + 1 :])
        return jnp.moveaxis(split, axis + self.is_inner, 0)


def _spec(array: Array) -> PartitionSpec:
    return jax.typeof(array).sharding.spec


def _resharded(array: Array, spec: PartitionSpec) -> Array:
    return array if _spec(array) == spec else jax.sharding.reshard(array, spec)


def _sharded_alike(stacked: list[Array], is_packed: bool) -> list[Array]:
    """Shards all stacked arrays alike along the two dimensions that are about to be merged.

    Only explicit sharding shows here. Packed rows do not shard by token, so their vmapped dimension
    becomes whole.
    """
    joined = (None,) if is_packed else (_vmapped_axes(stacked), _spec(stacked[0])[1])
    return [_resharded(x, PartitionSpec(*joined, *_spec(x)[len(joined) :])) for x in stacked]


def _vmapped_axes(stacked: list[Array]) -> Any:
    """Mesh axes that the vmapped dimension is sharded over."""
    return next((_spec(x)[0] for x in stacked if _spec(x)[0] is not None), None)


def _fold_operands(stacked: Operands, fold: _Fold) -> Operands:
    """Operands with a leading vmapped dimension -> operands of one larger problem."""
    token_axis = 1 if stacked.is_packed else 0
    folded = {
        name: fold.join(array, token_axis if schema.BY_NAME[name].is_per_token else 0)
        for name, array in stacked._asdict().items()
        if array is not None and not name.startswith("cu_seqlens")
    }
    if stacked.is_packed:
        for side, tokens in (("q", stacked.q), ("kv", stacked.k)):
            borders = stacked.cu_seqlens_q if side == "q" else stacked.cu_seqlens_k
            lengths = stacked.q_lengths if side == "q" else stacked.kv_lengths
            border_name = "cu_seqlens_q" if side == "q" else "cu_seqlens_k"
            folded[border_name], folded[f"{side}_lengths"] = in_one_row(
                borders, lengths, tokens.shape[2]
            )
    return Operands(**folded)


def _fold_pairwise(array: Array, dim: int | None, like: Array, fold: _Fold) -> Array:
    """A mask's or a bias's array for the larger problem, of stacked queries ``like`` [V, B, ...].

    One that is the same for all sequences stays so.
    """
    if dim is None and array.shape[0] == 1:
        return array
    stacked = _to_front(array, dim, fold.size)
    stacked = jnp.broadcast_to(stacked, (fold.size, like.shape[1], *stacked.shape[2:]))
    spec = PartitionSpec(*_spec(like)[:2], *_spec(stacked)[2:])
    return fold.join(_resharded(stacked, spec), 0)


class _Folded(NamedTuple):
    """A vmapped call as a call of one larger problem.

    Attributes:
        fold: how.
        operands: of the larger problem.
        rest: what follows them.
        stacked: the operands that are not pairwise, with a leading vmapped dimension.
        axis: of each problem's tokens, or sequences, that the vmapped dimension joins.
    """

    fold: _Fold
    operands: Operands
    rest: list[Array]
    stacked: Operands
    axis: int


def _folded(arrays: Sequence[Array], dims: Sequence[int | None], names: tuple[str, ...]) -> _Folded:
    size = next(a.shape[d] for a, d in zip(arrays, dims, strict=True) if d is not None)
    per_pair = {x for x in names if schema.BY_NAME[x].is_per_pair}
    pairwise = {x: (arrays[i], dims[i]) for i, x in enumerate(names) if x in per_pair}
    kept = [i for i in range(len(arrays)) if i >= len(names) or names[i] not in per_pair]
    arrays, dims = [arrays[i] for i in kept], [dims[i] for i in kept]
    names = tuple(x for x in names if x not in per_pair)
    stacked = [_to_front(a, d, size) for a, d in zip(arrays, dims, strict=True)]
    is_packed = "cu_seqlens_q" in names
    operands, rest = _split(names, _sharded_alike(stacked, is_packed))
    # Dimensions merge without moving data where only the outer one is sharded.
    vmapped, batch, *_ = _spec(operands.q)
    fold = _Fold(size, is_inner=vmapped is None and batch is not None)
    axis = 1 if is_packed else 0
    folded = _fold_operands(operands, fold)._replace(
        **{x: _fold_pairwise(*given, operands.q, fold) for x, given in pairwise.items()}
    )
    originals, _ = _split(names, stacked)
    return _Folded(fold, folded, [fold.join(r, axis) for r in rest], originals, axis)


def _batch(
    bind: Any,
    arrays: Sequence[Array],
    dims: Sequence[int | None],
    names: tuple[str, ...],
    **params: Any,
) -> tuple[list[Array], list[int]]:
    fold, folded, rest, stacked, axis = _folded(arrays, dims, names)
    results = bind(*_flat(folded), *rest, names=folded.present, **params)
    parted = [fold.part(result, axis, stacked.q.shape[1 + axis]) for result in results]
    vmapped = _vmapped_axes([x for x in stacked if x is not None])
    parted = [_resharded(x, PartitionSpec(vmapped, *_spec(x)[1:])) for x in parted]
    return parted, [0] * len(parted)


def _batch_backward(
    bind: Any,
    arrays: Sequence[Array],
    dims: Sequence[int | None],
    names: tuple[str, ...],
    gives_dbias: bool,
    **params: Any,
) -> tuple[list[Array], list[int]]:
    if gives_dbias and dims[names.index("bias")] is None:
        return _batch_with_shared_bias(bind, arrays, dims, names, **params)
    fold, folded, rest, stacked, axis = _folded(arrays, dims, names)
    results = bind(*_flat(folded), *rest, names=folded.present, gives_dbias=gives_dbias, **params)
    if gives_dbias:
        at = names.index("bias")
        stacked = stacked._replace(bias=_to_front(arrays[at], dims[at], fold.size))
    # Results have the extents and the types of their operands.
    moving = _moving(names, gives_dbias)
    likes = [getattr(stacked, name) for name in moving]
    joined = [axis if schema.BY_NAME[name].is_per_token else 0 for name in moving]
    parted = [
        _resharded(fold.part(result, at, like.shape[1 + at]), _spec(like))
        for result, at, like in zip(results, joined, likes, strict=True)
    ]
    return parted, [0] * len(parted)


def _batch_with_shared_bias(
    bind: Any,
    arrays: Sequence[Array],
    dims: Sequence[int | None],
    names: tuple[str, ...],
    **params: Any,
) -> tuple[list[Array], list[int]]:
    """A backward, and as a call of its own the gradient of a bias that all problems have."""
    grads, _ = _batch_backward(bind, arrays, dims, names, gives_dbias=False, **params)
    count = len(names)
    size = next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)
    saved = [_to_front(x, d, size) for x, d in zip(arrays[count:], dims[count:], strict=True)]
    rows = bindings.rows_of(bindings.Saved(*saved))
    given, their_dims = (*arrays[:count], *rows), (*dims[:count], *(0 for _ in rows))
    (dbias,), _ = _batch_bias_gradient(bias_gradient_p.bind, given, their_dims, names, **params)
    return [*grads, dbias], [0] * (len(grads) + 1)


def _batch_bias_gradient(
    bind: Any,
    arrays: Sequence[Array],
    dims: Sequence[int | None],
    names: tuple[str, ...],
    **params: Any,
) -> tuple[list[Array], list[int]]:
    at = names.index("bias")
    bias, dim = arrays[at], dims[at]
    split = [_spec(x)[d] for x, d in zip(arrays, dims, strict=True) if d is not None]
    is_per_sequence = dim is not None and _leading(bias, dim) == _leading(arrays[0], dims[0])
    if not is_per_sequence and not any(split):
        return _one_by_one(bind, arrays, dims, names, **params)
    size = next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)
    stacked = _to_front(bias, dim, size)
    arrays, dims = [*arrays], [*dims]
    arrays[at], dims[at] = stacked, 0
    fold, folded, rest, others, _ = _folded(arrays, dims, names)
    (result,) = bind(*_flat(folded), *rest, names=folded.present, **params)
    result = fold.part(result, 0, others.q.shape[1])
    if stacked.shape[1] == 1:
        result = jnp.sum(result.astype(wide(result.dtype)), axis=1, keepdims=True)
    return [_resharded(result.astype(bias.dtype), _spec(stacked))], [0]


def _leading(array: Array, dim: int | None) -> int:
    """The first extent that is not vmapped."""
    return array.shape[1 if dim == 0 else 0]


def _one_by_one(
    bind: Any,
    arrays: Sequence[Array],
    dims: Sequence[int | None],
    names: tuple[str, ...],
    **params: Any,
) -> tuple[list[Array], list[int]]:
    """Each problem of a vmapped dimension for itself, so that none has a bias for each sequence."""
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(arrays, dims, strict=True)]

    def one_problem(own: list[Array]) -> list[Array]:
        rest = iter(own)
        given = [x if d is None else next(rest) for x, d in zip(moved, dims, strict=True)]
        return bind(*given, names=names, **params)

    vmapped = [x for x, d in zip(moved, dims, strict=True) if d is not None]
    results = jax.lax.map(one_problem, vmapped)
    return results, [0] * len(results)


# --------------------------------------------------------------------------------- differentiation


def no_further_derivative(*_: Any, **__: Any) -> NoReturn:
    """The derivative rule of what has no derivative: says what to use instead."""
    raise NotImplementedError(
        "attention: the fused kernels have one derivative, in reverse mode (jax.grad, jax.vjp). "
        "For forward mode (jax.jvp, jax.jacfwd) and for derivatives of derivatives (jax.hessian) "
        "use implementation='xla', which differentiates any number of times in any mode."
    )


def _drop_unused_dbias(used: Sequence[bool], *given: Any) -> tuple[list[bool], Any]:
    """The rule of dead code for a backward: where nobody asks for dbias, no kernel writes it.

    ``given`` ends in the equation; since JAX 0.11 there is something before it.
    """
    equation = given[-1]
    if not any(used):
        return [False] * len(equation.invars), None
    if equation.params["gives_dbias"] and not used[-1]:
        params = {**equation.params, "gives_dbias": False}
        equation = equation.replace(outvars=equation.outvars[:-1], params=params)
    return [True] * len(equation.invars), equation


def _make_primitive(name: str, abstract: Any, on_platform: Any, batch: Any = _batch) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(abstract)
    primitive.def_impl(partial(xla.apply_primitive, primitive))
    ad.primitive_jvps[primitive] = no_further_derivative
    batching.primitive_batchers[primitive] = partial(batch, primitive.bind)
    for platform in (None, "cpu", "cuda"):
        rule = mlir.lower_fun(partial(on_platform, platform or "other"), multiple_results=True)
        mlir.register_lowering(primitive, rule, platform=platform)
    return primitive


forward_p = _make_primitive("jax_fa_forward", _forward_abstract, _forward_on)
backward_p = _make_primitive("jax_fa_backward", _backward_abstract, _backward_on, _batch_backward)
partial_eval.dce_rules[backward_p] = _drop_unused_dbias
bias_gradient_p = _make_primitive(
    "jax_fa_bias_gradient", _bias_gradient_abstract, _bias_gradient_on, _batch_bias_gradient
)


def forward_problems(jaxpr: Any) -> list[Problem]:
    """What a traced program asks of forward kernels: each problem once, in order."""
    found: dict[Problem, None] = {}
    for equation in calls(jaxpr, forward_p):
        params = equation.params
        operands, _ = _split(params["names"], [x.aval for x in equation.invars])
        found[Problem.of(operands, params["semantics"])] = None
    return [*found]


def calls(jaxpr: Any, *wanted: Primitive) -> Iterator[Any]:
    """The calls of some primitives in a traced program, and in those within it: equations."""
    for equation in jaxpr.eqns:
        if equation.primitive in wanted:
            yield equation
        params = [*equation.params.values()]
        for part in jax.tree.leaves(params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = part if hasattr(part, "eqns") else getattr(part, "jaxpr", None)
            if hasattr(inner, "eqns"):
                yield from calls(inner, *wanted)
