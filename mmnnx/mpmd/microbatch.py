"""`mm.microbatch`: a function over a batch becomes a loop over slices of it.

The loop is a `jax.lax.scan` under a name scope that carries its schedule. Outside `mm.jit` it is just that
scan; inside, `mmnnx.mpmd.trace` recognises the scope and the loop is scheduled over the TaskMeshes.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mmnnx.mpmd.schedule import get_schedule
from mmnnx.sharding import with_sharding_constraint


@dataclasses.dataclass(frozen=True)
class LoopSpec:
    """What a loop keeps of the call of `mm.microbatch` that made it."""

    schedule: str
    num_stages: int | None = None
    length: int = 0  # number of microbatches, filled in when traced


_specs: list[LoopSpec] = []


def _scope_name(spec: LoopSpec) -> str:
    if spec not in _specs:
        _specs.append(spec)
    return f"microbatch[{_specs.index(spec)}]"


def loop_spec(scope: str) -> LoopSpec | None:
    """The spec of the loop whose own scope ends the given name stack, None for any other equation."""
    found = re.search(r"(?:^|/)microbatch\[(\d+)\]$", scope)
    return _specs[int(found[1])] if found else None


def _sum(acc, out, n):
    return acc + out


def _last(acc, out, n):
    return out


def _max(acc, out, n):
    return jnp.maximum(acc, out)


def _lowest(x):
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.full(x.shape, -jnp.inf, x.dtype)
    return jnp.full(x.shape, jnp.iinfo(x.dtype).min, x.dtype)


def _zeros(x):
    return jnp.zeros(x.shape, x.dtype)


def _identity(x, n):
    return x


def _divide(x, n):
    return x / n


# name -> (value before the loop, step, value after the loop); "concat" keeps every result instead.
_REDUCTIONS: dict[str, tuple[Callable, Callable, Callable]] = {
    "sum": (_zeros, _sum, _identity),
    "mean": (_zeros, _sum, _divide),
    "max": (_lowest, _max, _identity),
    "last": (_zeros, _last, _identity),
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
    unrolling: str | None = None,
    arg_shardings: Any = None,
    custom_schedule: Any = None,
    reduce: Any = "sum",
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
      schedule: "1f1b" (default) or "gpipe".
      num_stages: number of pipeline stages expected; checked against what is found.
      arg_shardings: PartitionSpec, or a prefix tree of them, for each slice of the argument.
      interleave, unrolling, custom_schedule: of schedules that this release does not have; must be None.
      reduce: "sum" (default), "mean", "max", "last" or "concat" (along `dim`; scalars become a vector of
        one entry per microbatch), or a prefix tree of these over the results.

    Returns:
      A function with the signature of `fun`.

    Raises:
      ValueError: for a size that does not divide the batch, leaves that disagree on the batch size, a
        leaf without dimension `dim`, an unknown schedule or reduction.

    Example:
      >>> grad_fn = nnx.value_and_grad(loss_fn)
      >>> loss, grads = mm.microbatch(grad_fn, dim=0, size=4, argnum=1, reduce="mean")(model, batch)

    The arguments are those of `multimesh.jax.microbatch`, with `reduce` added.
    """
    for name, value in (
        ("interleave", interleave),
        ("unrolling", unrolling),
        ("custom_schedule", custom_schedule),
    ):
        if value is not None:
            raise ValueError(
                f"microbatch: {name}={value!r} belongs to schedules that this release does not have; "
                "leave it out"
            )
    schedule = schedule or "1f1b"
    get_schedule(schedule)  # an unknown name fails here, not in the first step
    for name in jax.tree.leaves(reduce):
        if name not in _NAMES:
            raise ValueError(f"microbatch: reduce={name!r} is none of {', '.join(map(repr, _NAMES))}")
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"microbatch: size must be a positive int, got {size!r}")
    spec = LoopSpec(schedule, num_stages)

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        if not 0 <= argnum < len(args):
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
                piece = with_sharding_constraint(piece, arg_shardings)
            inner_args = (*inner_args[:argnum], piece, *inner_args[argnum + 1 :])
            out = fun(*inner_args, **inner_kwargs)
            graphdef_after, state_after = nnx.split(fresh)
            if graphdef_after != graphdef:
                raise ValueError(
                    f"microbatch: {getattr(fun, '__name__', fun)!r} adds or removes Variables or submodules "
                    "of its arguments. Every microbatch must leave their structure as it was: "
                    "create them before the loop."
                )
            return out, jax.tree.leaves(state_after)

        pieces = jax.tree.map(lambda x: _pieces(x, dim, size, count), args[argnum])
        changed: list[bool] = []

        def probe(state_leaves, piece):
            out, after = call(state_leaves, piece)
            changed[:] = [a is not b for a, b in zip(after, state_leaves)]
            return out

        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), pieces)
        out_shape = jax.eval_shape(probe, state_leaves, first)
        out_leaves, out_def = jax.tree.flatten(out_shape)
        names = _broadcast(reduce, out_shape)
        folded = [(o, _REDUCTIONS[n]) for o, n in zip(out_leaves, names) if n != "concat"]

        def body(carry, piece):
            moving, accumulated = carry
            moving_leaf = iter(moving)
            now = [next(moving_leaf) if c else s for c, s in zip(changed, state_leaves)]
            out, after = call(now, piece)
            results = jax.tree.leaves(out)
            accumulated = [
                step(a, r, count)
                for a, r, (_, (_, step, _)) in zip(
                    accumulated, (r for r, n in zip(results, names) if n != "concat"), folded
                )
            ]
            kept = [r for r, n in zip(results, names) if n == "concat"]
            return ([a for a, c in zip(after, changed) if c], accumulated), kept

        moving = [s for s, c in zip(state_leaves, changed) if c]
        init = [before(o) for o, (before, _, _) in folded]
        with jax.named_scope(_scope_name(spec)):
            (moving, accumulated), kept = jax.lax.scan(body, (moving, init), pieces, length=count)
        moving_leaf, accumulated_leaf, kept_leaf = iter(moving), iter(accumulated), iter(kept)
        if nodes:
            after = [next(moving_leaf) if c else s for c, s in zip(changed, state_leaves)]
            nnx.update(nodes, jax.tree.unflatten(state_def, after))
        out = [
            _joined(next(kept_leaf), dim)
            if name == "concat"
            else _REDUCTIONS[name][2](next(accumulated_leaf), count)
            for name in names
        ]
        return jax.tree.unflatten(out_def, out)

    return wrapped


def _is_node(x: Any) -> bool:
    return nnx.graph.is_graph_node(x) or isinstance(x, nnx.Variable)


def _count(tree: Any, dim: int, size: int) -> int:
    """Number of microbatches in the sliced argument, after checking all of its leaves."""
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
    if total == 0 or total % size:
        raise ValueError(
            f"microbatch: size {size} does not divide dimension {dim} of the sliced argument, "
            f"which is {total}"
        )
    return total // size


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
    return stack.reshape(*stack.shape[:dim], -1, *stack.shape[dim + 2 :])


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
