"""`mm.microbatch`: a function over a batch becomes a loop over slices of it.

The loop is a `jax.lax.scan` under a name scope that carries its schedule. Outside `mm.jit` it is just that
scan; inside, `mmnnx.mpmd.ir.equations` recognises the scope and the loop is scheduled over the TaskMeshes.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core as jex

from mmnnx import _compat
from mmnnx.mpmd.ir.loop_spec import LoopSpec, loop_scope
from mmnnx.mpmd.schedule import Action, get_schedule, schedule_names
from mmnnx.sharding import with_sharding_constraint
from mmnnx.sharding.mesh import current_multimesh
from mmnnx.sharding.task import check_remat


def _summed_in(dtype: Any) -> Any:
    """The dtype that a sum is kept in: at least 32 bits wide, for many microbatches may be added up."""
    return _with_float32(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _with_float32(dtype: Any) -> Any:
    with jax.numpy_dtype_promotion("standard"):  # also where the user's own code is held to "strict"
        return jnp.promote_types(dtype, jnp.float32)


def _zeros(x):
    return jnp.zeros_like(x, _summed_in(x.dtype))


def _zeros_for_mean(x):
    return jnp.zeros_like(x, _with_float32(x.dtype))


def _add(acc, out):
    return acc + jnp.asarray(out, acc.dtype)


def _narrowed(acc, x, n):
    return acc.astype(x.dtype)


def _divided(acc, x, n):
    return (acc / n).astype(x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else acc.dtype)


def _lowest(x):
    if x.dtype == jnp.bool_:
        return jnp.zeros_like(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        lowest = jnp.full_like(x, -jnp.inf)  # nan in a type without infinities
        return jnp.where(jnp.isnan(lowest), jnp.finfo(x.dtype).min, lowest)
    return jnp.full_like(x, jnp.iinfo(x.dtype).min)


def _check_reduction(name: str, dtype: Any) -> None:
    """Refuses sums of random keys, and the largest of what has no order, such as complex numbers."""
    numbers = {"sum": jnp.number, "mean": jnp.number, "max": jnp.integer}
    if name in numbers and not any(
        jnp.issubdtype(dtype, kind) for kind in (numbers[name], jnp.floating, jnp.bool_)
    ):
        raise TypeError(f"microbatch: reduce={name!r} has no meaning for {dtype}")


def _last(acc, out):
    return out


def _unchanged(acc, x, n):
    return acc


# name -> (value before the loop, step, value after the loop); "concat" keeps every result instead.
_REDUCTIONS: dict[str, tuple[Callable, Callable, Callable]] = {
    "sum": (_zeros, _add, _narrowed),
    "mean": (_zeros_for_mean, _add, _divided),
    "max": (_lowest, jnp.maximum, _unchanged),
    "last": (jnp.zeros_like, _last, _unchanged),
}
_NAMES = (*_REDUCTIONS, "concat")


def microbatch(
    fun: Callable[..., Any],
    dim: int,
    size: int,
    argnum: int = 0,
    *,
    schedule: str | None = None,
    num_stages: int | None = None,
    interleave: int | None = None,
    unrolling: int | None = None,
    arg_shardings: Any = None,
    custom_schedule: Sequence[Sequence[Any]] | None = None,
    reduce: Any = "sum",
    remat: Any = None,
    memory_limit: int | None = None,
) -> Callable[..., Any]:
    """Runs `fun` over slices of one argument and reduces the results.

    Inside `mm.jit` the loop is a pipeline over the TaskMeshes its body touches, in the order of `schedule`.
    Elsewhere it is an ordinary loop with the same result. State that `fun` updates (BatchNorm statistics,
    RNG counters) is carried from one microbatch to the next.

    Args:
      fun: a pure function or one over NNX objects, such as `nnx.value_and_grad(loss_fn)`.
      dim: the dimension to slice, the same for every leaf of the sliced argument.
      size: size of a microbatch along `dim`; must divide the batch.
      argnum: which positional argument to slice, a pytree of arrays. The others are constant over the loop.
      schedule: the name of a schedule ("gpipe", "1f1b", "zero-bubble-h1", ...; `mmnnx schedule` lists them),
        or "custom". Default: of those of mmnnx that can be used here, the one whose step is shortest in
        simulation with unit costs (and fits `memory_limit`).
      num_stages: number of pipeline stages expected; checked against what is found.
      interleave: number of stages on each TaskMesh expected, for schedules that interleave them.
      unrolling: for "interleaved-1f1b" and "interleaved-zero-bubble", how many microbatches a mesh runs of
        one of its stages before it turns to its next. Default: the number of meshes.
      arg_shardings: PartitionSpec, or a prefix tree of them, for each slice of the argument.
      custom_schedule: the order of work itself, one row for each TaskMesh: of task names (the k-th time a
        name appears is microbatch k), of (microbatch, task name) pairs, or of `mm.Action`. A task that is
        trained has several names: "stage0 forward", "stage0 backward". What no row names follows by
        dependency.
      reduce: "sum" (default; of booleans it is "or"), "mean", "max", "last" or "concat" (along `dim`; scalars
        become a vector of one entry per microbatch), or a prefix tree of these over the results. Sums and
        means of narrow floats are kept in float32 over the loop; means of integers and booleans are float32.
      remat: what the backward of a stage may compute again rather than keep: None for what is cheap, True for
        everything, or a policy of `jax.checkpoint`; or a sequence of one of these for each stage.
      memory_limit: bytes of live arrays that one TaskMesh may hold at a time, by `Program.simulate`.

    Returns:
      A function with the signature of `fun`.

    Raises:
      ValueError: for a size that does not divide the batch, leaves that disagree on the batch size, a
        leaf without dimension `dim`, an NNX object to slice, an unknown schedule or reduction, an option that
        the schedule does not have; and when the loop is cut, for a schedule that is not for such stages or
        does not fit the memory.

    Example:
      >>> grad_fn = nnx.value_and_grad(loss_fn)
      >>> loss, grads = mm.microbatch(grad_fn, dim=0, size=4, argnum=1, reduce="mean")(model, batch)

    The arguments are those of `multimesh.jax.microbatch`, with `reduce` added.
    """
    if not callable(fun):
        raise TypeError(f"microbatch: fun is a function, not {fun!r}")
    given = {"interleave": interleave, "unrolling": unrolling}
    options = {name: _whole(n, name, "a positive int", 1) for name, n in given.items() if n is not None}
    rows = _rows(schedule, custom_schedule)
    _check_options(schedule, options, rows)
    for name in jax.tree.leaves(reduce):
        if name not in _NAMES:
            raise ValueError(f"microbatch: reduce={name!r} is none of {', '.join(map(repr, _NAMES))}")
    dim, argnum = _whole(dim, "dim", "an int"), _whole(argnum, "argnum", "the number of one argument", 0)
    size = _whole(size, "size", "a positive int", 1)
    if num_stages is not None:
        num_stages = _whole(num_stages, "num_stages", "a positive int", 1)
    if memory_limit is not None:
        memory_limit = _whole(memory_limit, "memory_limit", "a number of bytes", 1)
    for each in remat if isinstance(remat, (list, tuple)) else (remat,):
        check_remat(each, "microbatch: remat=")
    spec = LoopSpec(
        None if rows else schedule,
        tuple(options.items()),
        rows,
        num_stages,
        tuple(remat) if isinstance(remat, (list, tuple)) else remat,
        memory_limit,
    )

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        if argnum >= len(args):
            raise ValueError(
                f"microbatch: argnum={argnum}, but the call has {len(args)} positional arguments"
            )
        try:
            count = _count(args[argnum], dim, size)
        except ValueError as error:
            raise ValueError(f"{error} (argument {argnum} is sliced: argnum={argnum})") from None
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
        nodes = tuple(leaf for leaf in leaves if _is_node(leaf))
        graphdef, state = nnx.split(nodes)
        state_leaves, state_def = jax.tree.flatten(state)

        def call(state_leaves, piece):
            """One microbatch: the results of `fun`, and the state leaves after it."""
            fresh = nnx.merge(graphdef, jax.tree.unflatten(state_def, state_leaves))
            merged = iter(fresh)
            inner_args, inner_kwargs = jax.tree.unflatten(
                treedef, [next(merged) if _is_node(leaf) else leaf for leaf in leaves]
            )
            if arg_shardings is not None:
                piece = _constrained(piece, arg_shardings)
            inner_args = (*inner_args[:argnum], piece, *inner_args[argnum + 1 :])
            out = fun(*inner_args, **inner_kwargs)
            graphdef_after, state_after = nnx.split(fresh)
            if not _compat.same_graph(graphdef_after, graphdef):
                raise ValueError(
                    f"microbatch: {getattr(fun, '__name__', fun)!r} adds or removes Variables or submodules "
                    "of its arguments. Every microbatch must leave their structure as it was: "
                    "create them before the loop."
                )
            return out, jax.tree.leaves(state_after)

        pieces = jax.tree.map(lambda x: _pieces(x, dim, size, count), args[argnum])
        changed: list[bool] = []

        def one(state_leaves, piece):
            out, after = call(state_leaves, piece)
            changed[:] = [a is not b for a, b in zip(after, state_leaves)]
            return out, after

        first = jax.eval_shape(lambda pieces: jax.tree.map(lambda x: x[0], pieces), pieces)
        jaxpr, (out_shape, _) = jax.make_jaxpr(one, return_shape=True)(state_leaves, first)
        traced = jex.jaxpr_as_fun(jaxpr)  # `fun` is traced once, for the loop below too
        out_leaves, out_def = jax.tree.flatten(out_shape)
        names = [
            "float0" if o.dtype == jax.dtypes.float0 else n  # gradients of integers hold nothing
            for o, n in zip(out_leaves, _broadcast(reduce, out_shape))
        ]
        for o, n in zip(out_leaves, names):
            _check_reduction(n, o.dtype)
        folded = [(o, _REDUCTIONS[n]) for o, n in zip(out_leaves, names) if n in _REDUCTIONS]

        def body(carry, piece):
            moving, accumulated = carry
            moving_leaf = iter(moving)
            now = [next(moving_leaf) if c else s for c, s in zip(changed, state_leaves)]
            if _compat.jit_is_disabled():  # whoever asks for that wants to see values in `fun`
                found = jax.tree.leaves(call(now, piece))
            else:
                found = traced(*jax.tree.leaves((now, piece)))
            results, after = found[: len(out_leaves)], found[len(out_leaves) :]
            accumulated = [
                step(a, r)
                for a, r, (_, (_, step, _)) in zip(
                    accumulated, (r for r, n in zip(results, names) if n in _REDUCTIONS), folded
                )
            ]
            kept = [r for r, n in zip(results, names) if n == "concat"]
            return ([a for a, c in zip(after, changed) if c], accumulated), kept

        moving = [s for s, c in zip(state_leaves, changed) if c]
        init = [before(o) for o, (before, _, _) in folded]
        try:
            with jax.named_scope(loop_scope(spec)):
                (moving, accumulated), kept = jax.lax.scan(body, (moving, init), pieces, length=count)
        except ValueError as error:
            if "incompatible devices" in str(error):
                error.add_note(
                    "A loop over state on several meshes is for mm.jit: call it, and all that is around it, "
                    "in a function that mm.jit compiles"
                )
            raise
        moving_leaf, accumulated_leaf, kept_leaf = iter(moving), iter(accumulated), iter(kept)
        if nodes:
            after = [next(moving_leaf) if c else s for c, s in zip(changed, state_leaves)]
            nnx.update(nodes, jax.tree.unflatten(state_def, after))
        out: list[Any] = []
        for leaf, name in zip(out_leaves, names):
            if name == "float0":
                out.append(np.zeros(leaf.shape, leaf.dtype))
            elif name == "concat":
                out.append(_joined(next(kept_leaf), dim))
            else:
                out.append(_REDUCTIONS[name][2](next(accumulated_leaf), leaf, count))
        return jax.tree.unflatten(out_def, out)

    return wrapped


def _whole(value: Any, name: str, what: str, least: float = -math.inf) -> int:
    """A whole number, of Python or NumPy.

    Raises:
      ValueError: says what it has to be.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise ValueError(f"microbatch: {name} must be {what}, got {value!r}")
    return number


def _rows(schedule: str | None, custom: Sequence[Sequence[Any]] | None) -> tuple[tuple[Any, ...], ...]:
    """The rows of a custom schedule: of Actions, or of (microbatch, name) pairs."""
    if (custom is not None) != (schedule == "custom") and (custom is None or schedule is not None):
        raise ValueError(
            f"microbatch: schedule={schedule!r} with{'' if custom is not None else 'out'} custom_schedule: "
            'give both schedule="custom" and its rows, or neither'
        )
    if isinstance(custom, str):
        raise ValueError("microbatch: custom_schedule is a list of rows: mm.read_schedule(path) reads a file")
    rows = []
    for row in () if custom is None else custom:
        entries: list[Any] = []
        if isinstance(row, str) or not isinstance(row, Sequence):
            raise ValueError(f"microbatch: each row of custom_schedule is a list for one mesh, not {row!r}")
        for entry in row:
            if isinstance(entry, str):
                entries.append((sum(isinstance(e, str) and e == entry for e in row[: len(entries)]), entry))
            elif isinstance(entry, tuple) and len(entry) == 3:
                entries.append(Action(*entry))
            elif isinstance(entry, (tuple, list)) and [type(e) for e in entry] == [int, str]:
                entries.append(tuple(entry))
            else:
                raise ValueError(
                    "microbatch: an entry of custom_schedule is a task name, a pair (microbatch, task name) "
                    f"or an mm.Action, not {entry!r}"
                )
        rows.append(tuple(entries))
    if len({isinstance(entry, Action) for row in rows for entry in row}) > 1:
        raise ValueError("microbatch: custom_schedule has both names and Actions: use one or the other")
    if custom is not None and not any(rows):
        raise ValueError("microbatch: custom_schedule has no entries")
    return tuple(rows)


def _check_options(schedule: str | None, options: dict[str, int], rows: Sequence[Any]) -> None:
    """Options must be of a schedule that has them."""
    if schedule not in (None, "custom"):
        known = get_schedule(schedule).options  # an unknown name fails here, not in the first step
        for name in options.keys() - set(known):
            others = [other for other in schedule_names() if name in get_schedule(other).options]
            raise ValueError(
                f"microbatch: {name}={options[name]} means nothing to schedule {schedule!r}; it is for "
                f"{', '.join(map(repr, others))}"
            )
    elif rows and options:
        raise ValueError(
            f"microbatch: {', '.join(options)} means nothing to a custom schedule, which says all"
        )


def _is_node(x: Any) -> bool:
    return nnx.graph.is_graph_node(x) or isinstance(x, nnx.Variable)


def _count(tree: Any, dim: int, size: int) -> int:
    """Number of microbatches in the sliced argument, after checking all of its leaves."""
    for node in jax.tree.leaves(tree, is_leaf=_is_node):
        if _is_node(node) and not isinstance(node, nnx.Variable):
            raise ValueError(
                f"microbatch: the sliced argument is or holds a {type(node).__name__}, whose state is no "
                "batch: give the number of the argument that is one as argnum="
            )
    sizes: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path) or "the argument"
        shape = jnp.shape(leaf)
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"microbatch: {name} has shape {shape}, which has no dimension {dim} to slice")
        sizes[name] = shape[dim]
    if not sizes:
        raise ValueError("microbatch: the sliced argument holds no arrays")
    if len(set(sizes.values())) > 1:
        listing = ", ".join(f"{name}: {n}" for name, n in sizes.items())
        raise ValueError(f"microbatch: leaves of the sliced argument disagree on dimension {dim}: {listing}")
    (total,) = set(sizes.values())
    if total == 0:
        raise ValueError(f"microbatch: the sliced argument is empty: its dimension {dim} has size 0")
    if total % size:
        raise ValueError(
            f"microbatch: size {size} does not divide dimension {dim} of the sliced argument, "
            f"which is {total}"
        )
    return total // size


def _constrained(piece: Any, arg_shardings: Any) -> Any:
    try:
        return with_sharding_constraint(piece, arg_shardings)
    except Exception as error:  # JAX has one of its own for an axis that is named twice
        mesh = current_multimesh()
        shapes = jax.tree.map(lambda x: str(jax.typeof(x)), piece)
        help = (
            f"{str(error).rstrip('.')}. It names axes of the MultiMesh, which has {dict(mesh.shape)}; an "
            "axis that only TaskMeshes of their own have must be one of it, by name"
            if mesh is not None
            else "it names axes of a MultiMesh: call the function in `with mesh:`, or give mm.jit(mesh=mesh)"
        )
        raise ValueError(
            f"microbatch: arg_shardings={arg_shardings} for slices {shapes} of the argument: {help}"
        ) from None


def _pieces(x: Any, dim: int, size: int, count: int) -> jax.Array:
    x = jnp.asarray(x)
    dim = dim % x.ndim
    x = x.reshape(*x.shape[:dim], count, size, *x.shape[dim + 1 :])
    return jnp.moveaxis(x, dim, 0)


def _joined(stack: jax.Array, dim: int) -> jax.Array:
    """From [count, ...] to one array in which the microbatches follow each other along `dim`."""
    ndim = stack.ndim - 1
    if not -ndim <= dim < ndim:
        return stack
    dim = dim % ndim
    stack = jnp.moveaxis(stack, 0, dim)
    count, size = stack.shape[dim : dim + 2]
    return stack.reshape(*stack.shape[:dim], count * size, *stack.shape[dim + 2 :])


def _broadcast(prefix: Any, tree: Any) -> Sequence[str]:
    """The reduction of every leaf of `tree` under a prefix tree of names."""
    names: list[str] = []
    try:
        jax.tree.map(lambda name, sub: names.extend([name] * len(jax.tree.leaves(sub))), prefix, tree)
    except ValueError as error:
        raise ValueError(
            f"microbatch: reduce={prefix!r} is no prefix of the results of fun: {error}"
        ) from None
    return names
