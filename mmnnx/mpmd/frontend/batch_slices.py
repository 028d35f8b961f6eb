"""A batch and its microbatches: how many there are, slices of the batch, and results joined again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from mmnnx.mpmd.frontend.graph import is_node
from mmnnx.sharding import with_sharding_constraint
from mmnnx.sharding.mesh import current_multimesh


def divide_batch(batch: Any, dim: int, size: int | None, count: int | None) -> tuple[int, int]:
    """The size of a microbatch along dimension `dim` of a batch, a pytree of arrays, and their number; one of
    the two is given.

    Raises:
      ValueError: for an NNX object, no arrays, an array without that dimension, sizes that differ, an empty
        batch, and a size or number that does not divide it.
    """
    for node in jax.tree.leaves(batch, is_leaf=is_node):
        if is_node(node) and not isinstance(node, nnx.Variable):
            raise ValueError(
                f"microbatch: the sliced argument is or holds a {type(node).__name__}, whose state is no "
                "batch: give the number of the argument that is one as argnum="
            )
    sizes: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        name = jax.tree_util.keystr(path) or "the argument"
        shape = jnp.shape(leaf)
        if not -len(shape) <= dim < len(shape):
            what = f"has shape {shape}" if hasattr(leaf, "shape") else f"is {leaf!r:.40}"
            raise ValueError(f"microbatch: {name} {what}, which has no dimension {dim} to slice")
        sizes[name] = shape[dim]
    if not sizes:
        raise ValueError("microbatch: the sliced argument holds no arrays")
    if len(set(sizes.values())) > 1:
        listing = ", ".join(f"{name}: {n}" for name, n in sizes.items())
        raise ValueError(f"microbatch: leaves of the sliced argument disagree on dimension {dim}: {listing}")
    (total,) = set(sizes.values())
    if total == 0:
        raise ValueError(f"microbatch: the sliced argument is empty: its dimension {dim} has size 0")
    given = size or count or 1
    if total % given:
        raise ValueError(
            f"microbatch: {f'size {size}' if size else f'count {count}'} does not divide dimension {dim} of "
            f"the sliced argument, which is {total}; {_divisors(total, given)} would"
        )
    return (given, total // given) if size else (total // given, given)


def _divisors(total: int, near: int) -> str:
    """The divisors of `total` on both sides of a number: "8 or 16"."""
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    below = [n for n in divisors if n < near][-1:]
    return " or ".join(map(str, below + [n for n in divisors if n > near][:1]))


def slice_batch(x: Any, dim: int, size: int, count: int) -> jax.Array:
    """From one array of a batch to [count, ...]: the slices of `size` along `dim`, stacked."""
    x = jnp.asarray(x)
    dim = dim % x.ndim
    x = x.reshape(*x.shape[:dim], count, size, *x.shape[dim + 1 :])
    return jnp.moveaxis(x, dim, 0)


def join_slices(stack: jax.Array, dim: int) -> jax.Array:
    """From [count, ...] to one array in which the microbatches follow each other along `dim`.

    Results without that dimension, such as scalars, stay stacked.
    """
    ndim = stack.ndim - 1
    if not -ndim <= dim < ndim:
        return stack
    dim = dim % ndim
    stack = jnp.moveaxis(stack, 0, dim)
    count, size = stack.shape[dim : dim + 2]
    return stack.reshape(*stack.shape[:dim], count * size, *stack.shape[dim + 2 :])


def constrain_slice(piece: Any, arg_shardings: Any) -> Any:
    """The slice of one microbatch, sharded as `arg_shardings` says.

    Raises:
      ValueError: if it cannot be.
    """
    try:
        return with_sharding_constraint(piece, arg_shardings)
    except Exception as error:  # JAX has one of its own for an axis that is named twice
        mesh = current_multimesh()
        shapes = jax.tree.map(lambda x: str(jax.typeof(x)), piece)
        if mesh is None:
            help = "it names axes of a MultiMesh: call the function in `with mesh:`, or use mm.jit(mesh=mesh)"
        else:
            help = str(error).rstrip(".")
            if not _axes_of(arg_shardings) <= {*mesh.shape}:
                help += (
                    f". It names axes of the MultiMesh, which has {dict(mesh.shape)}; an axis that only "
                    "TaskMeshes of their own have must be one of it, by name"
                )
        raise ValueError(
            f"microbatch: arg_shardings={arg_shardings} for slices {shapes} of the argument: {help}"
        ) from None


def _axes_of(arg_shardings: Any) -> set[str]:
    """The names of mesh axes in a tree of specs."""
    is_spec = lambda x: isinstance(x, PartitionSpec)
    specs = filter(is_spec, jax.tree.leaves(arg_shardings, is_leaf=is_spec))
    return {axis for axis in jax.tree.leaves([tuple(spec) for spec in specs]) if isinstance(axis, str)}
