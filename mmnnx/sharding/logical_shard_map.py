"""`jax.shard_map` in logical axis names, for a Module whose mesh is not known yet where it is traced.

Outside of a task the mesh of a Module is the one where its weights live, which `mm.jit` finds later. Until
then a call is one equation, of the primitive here, and from then on a shard_map over that mesh
(`mpmd/place/logical_shard_maps.py`). Compiled by JAX alone it is the plain function.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import batching, mlir
from jax.sharding import Mesh, PartitionSpec

from mmnnx.sharding.logical import constrain_on, to_spec
from mmnnx.sharding.task import Task

Function = Callable[..., tuple[jax.Array, ...]]
Dims = tuple[str | None, ...]  # the name of each dimension of an array
FREE = PartitionSpec.UNCONSTRAINED
Axes = Mapping[str, tuple[str, ...]]  # the mesh axes that each name is divided over


@dataclasses.dataclass(frozen=True)
class Layout:
    """The names of the dimensions of arrays; None is never divided.

    Attributes:
      names: all names; those in front take their mesh axes first.
      operands: for each operand the names of its dimensions. `fun` gets all of one whose name is not among
        `names`, and it is divided as the name says before.
      results: for each result the same, and after.
      free: the names that may be divided over mesh axes which none stands for, in this order.
    """

    names: tuple[str, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    free: tuple[str, ...]


def logical_shard_map(fun: Function, layout: Layout, *args: jax.Array) -> tuple[jax.Array, ...]:
    """`fun(*args)`, of which each device computes a part, by the mesh and the axis rules of its task.

    `fun` must make parts of its results of parts of its operands, and a result that lacks a name must be the
    sum of those made of the parts along that name. So it is in a product of x ("rows", "in") and w ("in",
    None), with the result ("rows", None).

    A name is divided over the mesh axes that it stands for, as in `to_spec`, if they divide every dimension
    of that name. A mesh axis that is left divides the first of the `free` names that it can: parts that all
    devices along an axis have would be computed by each of them.

    The devices may send to each other, if `fun` has a method `over`. Then they run `fun.over(axes)`, with the
    mesh axes of each name, in which `jax.lax.ppermute` and the like work. `fun` itself is for one device.
    What they run may have attributes: `unread`, the numbers of operands that it does without, and gets None
    for; and `unmade`, the numbers of results that are NaN, as nothing reads them.

    The backward computes `fun` again instead of keeping what it saved. Forward-mode differentiation is
    refused by JAX, as of every `jax.custom_vjp`.

    Args:
      fun: from arrays to a tuple of arrays. It should equal another that computes the same, as an instance of
        a frozen dataclass does: then layers that are alike are compiled once.
      layout: the names of its operands and results.
      *args: the operands.

    Returns:
      The results of `fun`.

    Example:
      >>> layout = Layout(("in", "rows"), (("rows", "in"), ("in", None)), (("rows", None),), ("rows",))
      >>> x, w = jnp.ones((4, 6)), jnp.ones((6, 2))
      >>> logical_shard_map(lambda x, w: (x @ w,), layout, x, w)[0].shape
      (4, 2)
    """
    return _differentiable(fun, layout, args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(fun: Function, layout: Layout, args: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(logical_shard_map_p.bind(*args, fun=fun, layout=layout))


def _forward(fun: Function, layout: Layout, args: tuple[jax.Array, ...]) -> tuple[Any, Any]:
    return _differentiable(fun, layout, args), args


def _backward(fun: Function, layout: Layout, args: tuple[jax.Array, ...], cts: Any) -> tuple[Any]:
    floats = tuple(n for n, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.inexact))
    operands, results = (*layout.operands, *layout.results), tuple(layout.operands[n] for n in floats)
    gradient = _Gradient(fun, len(args), floats)
    backward = dataclasses.replace(layout, operands=operands, results=results)
    found = dict(zip(floats, _differentiable(gradient, backward, (*args, *cts))))
    return (tuple(found.get(n) for n in range(len(args))),)


_differentiable.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """The gradients of `floats`, some of the `count` operands of `fun`; of these and those of the results."""

    fun: Function
    count: int
    floats: tuple[int, ...]

    def __call__(self, *args: jax.Array) -> tuple[jax.Array, ...]:
        own, cts = list(args[: self.count]), args[self.count :]

        def of_floats(*values: jax.Array) -> tuple[jax.Array, ...]:
            for n, value in zip(self.floats, values):
                own[n] = value
            return self.fun(*own)

        return jax.vjp(of_floats, *(args[n] for n in self.floats))[1](tuple(cts))

    def over(self, axes: Axes) -> _Gradient:
        return dataclasses.replace(self, fun=_over(self.fun, axes))


@dataclasses.dataclass(frozen=True)
class _Batched:
    """`fun` over one more dimension of some operands, by their numbers in `dims`, and of all results."""

    fun: Function
    dims: tuple[int | None, ...]

    def __call__(self, *args: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vmap(self.fun, self.dims)(*args)

    def over(self, axes: Axes) -> _Batched:
        return dataclasses.replace(self, fun=_over(self.fun, axes))

    @property
    def unread(self) -> tuple[int, ...]:
        return getattr(self.fun, "unread", ())

    @property
    def unmade(self) -> tuple[int, ...]:
        return getattr(self.fun, "unmade", ())


def _over(fun: Function, axes: Axes) -> Function:
    """What the devices run, where names are divided over these axes."""
    over: Callable[[Axes], Function] | None = getattr(fun, "over", None)
    return fun if over is None else over(axes)


def divided(
    fun: Function, layout: Layout, shapes: Sequence[tuple[int, ...]], task: Task | None, mesh: Mesh
) -> Function:
    """`fun` as a shard_map over a mesh, with sums over the parts of what it has in parts.

    Args:
      fun, layout: as in `logical_shard_map`.
      shapes: of the operands.
      task: whose rules map names to axes of the mesh.
      mesh: the mesh.

    Raises:
      ValueError: a rule of the task names an axis that the mesh lacks.
    """
    axes = _axes(layout, shapes, task, mesh)
    if not any(axes.values()):
        return fun
    of_device = _over(fun, axes)

    def spec(dims: Dims) -> list[Any]:
        return [axes.get(name or "") for name in dims]

    unread, unmade = (getattr(of_device, name, ()) for name in ("unread", "unmade"))
    count = len(layout.operands)
    read = [n for n in range(count) if n not in unread]
    made = {n: dims for n, dims in enumerate(layout.results) if n not in unmade}
    summed = {
        n: tuple(a for name in layout.names if name not in dims for a in axes[name])
        for n, dims in made.items()
    }

    def outside(x: jax.Array, dims: Dims) -> jax.Array:
        others = [name for name in dims if name is not None and name not in layout.names]
        if not others:
            return x
        names = (*layout.names, *others)  # those of the map take their axes first here, too
        found = dict(zip(names, to_spec(names, task, mesh)))
        entries = [
            entry if entry and size % math.prod(mesh.shape[axis] for axis in _tuple(entry)) == 0 else FREE
            for entry, size in zip([found.get(name or "") for name in dims], x.shape)
        ]
        return constrain_on(mesh, x, entries)

    def parts(*args: jax.Array) -> list[jax.Array]:
        given = dict(zip(read, args))
        results = of_device(*(given.get(n) for n in range(count)))
        return [results[n][None] if over else results[n] for n, over in summed.items()]

    mapped = jax.shard_map(
        parts,
        mesh=mesh,
        in_specs=tuple(PartitionSpec(*spec(layout.operands[n])) for n in read),
        out_specs=[
            PartitionSpec(*([summed[n]] if summed[n] else []), *spec(dims)) for n, dims in made.items()
        ],
        check_vma=False,  # parts that are summed up differ
    )

    def whole(*args: jax.Array) -> tuple[jax.Array, ...]:
        found = dict(zip(made, mapped(*(outside(args[n], layout.operands[n]) for n in read))))
        for n, over in summed.items():
            # Not psum: sums over examples can leave the microbatch loop (`mpmd/hoist/reductions.py`).
            if over:
                found[n] = jax.lax.reduce(found[n], found[n].dtype.type(0), jax.lax.add, (0,))
        if unmade:
            types = jax.eval_shape(fun, *args)
            found |= {n: jnp.full(types[n].shape, jnp.nan, types[n].dtype) for n in unmade}
        return tuple(outside(found[n], dims) for n, dims in enumerate(layout.results))

    return whole


def _axes(
    layout: Layout, shapes: Sequence[tuple[int, ...]], task: Task | None, mesh: Mesh
) -> dict[str, tuple[str, ...]]:
    """The mesh axes that each name is divided over."""
    sizes: dict[str | None, set[int]] = {name: set() for name in layout.names}
    for dims, shape in zip(layout.operands, shapes):
        for name, size in zip(dims, shape):
            if name in sizes:
                sizes[name].add(size)

    def divide(name: str, axes: tuple[str, ...]) -> bool:
        parts = math.prod(mesh.shape[axis] for axis in axes)
        return all(size % parts == 0 for size in sizes[name])

    axes: dict[str, tuple[str, ...]] = {}
    for name, entry in zip(layout.names, to_spec(layout.names, task, mesh)):
        own = _tuple(entry)
        axes[name] = own if divide(name, own) else ()
    for axis in mesh.axis_names:
        if not any(axis in own for own in axes.values()):
            for name in layout.free:
                if divide(name, (*axes[name], axis)):
                    axes[name] = (*axes[name], axis)
                    break
    return axes


def _tuple(entry: Any) -> tuple[str, ...]:
    """The axes of an entry of a spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _types(*types: Any, fun: Function, layout: Layout) -> Any:
    return jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types)).out_avals


def _batch(args: Any, dims: tuple[int | None, ...], *, fun: Function, layout: Layout) -> Any:
    operands = tuple(
        names if dim is None else (*names[:dim], None, *names[dim:])
        for names, dim in zip(layout.operands, dims)
    )
    results = tuple((None, *names) for names in layout.results)
    batched = dataclasses.replace(layout, operands=operands, results=results)
    made = logical_shard_map_p.bind(*args, fun=_Batched(fun, tuple(dims)), layout=batched)
    return made, [0] * len(made)


@functools.lru_cache(maxsize=256)
def _compiled(fun: Function) -> Function:
    return jax.jit(fun)


logical_shard_map_p = jex.Primitive("logical_shard_map")
logical_shard_map_p.multiple_results = True
logical_shard_map_p.def_impl(lambda *args, fun, layout: _compiled(fun)(*args))
logical_shard_map_p.def_abstract_eval(_types)
batching.primitive_batchers[logical_shard_map_p] = _batch
mlir.register_lowering(
    logical_shard_map_p, mlir.lower_fun(lambda *args, fun, layout: fun(*args), multiple_results=True)
)
