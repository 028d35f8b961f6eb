"""`parallelize`: from a function with logical constraints to one with shardings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import mmnnx as mm
from mmnnx.sharding.logical import autosharding
from mmnnx.sharding.mesh import current_multimesh
from mmnnx.sharding.task_scope import ignoring
from multimesh_compat.jax.constraints import logical_names
from multimesh_compat.jax.contexts import default_contexts, fast_path
from multimesh_compat.jax.jitted import Parallelized
from multimesh_compat.jax.unsplit import tracing_shapes


def parallelize(
    fun: Callable[..., Any],
    init_params: Callable[[], Any] | None = None,
    get_input_batch: Callable[[], Any] | None = None,
    *,
    initial_batch: Any = None,
    devices: Sequence[jax.Device] | np.ndarray | None = None,
) -> tuple[Any, ...]:
    """Makes a function with logical sharding constraints one whose arguments live where they are used.

    Each parameter and each input goes to the submesh of the task that reads it first, sharded as the
    constraints inside the function and its tasks imply.

    Args:
      fun: a pure function of parameters, then an input batch; either may be missing. Both are pytrees.
      init_params: makes the parameters. It is traced, and the parameters are made sharded.
      get_input_batch: makes an input batch. It is called again for each batch, outside any trace; the first
        time right away, for shapes and dtypes: the returned function gives that batch first.
      initial_batch: an input batch, instead of a function that makes one. An array that is committed to
        devices stays there; any other goes where it is read.
      devices: those to run on, and what device numbers count. Default: those of the current MultiMesh, else
        all of `jax.devices()`, as one axis without a name; of a function without tasks also those of
        `jax.set_mesh`.

    Returns:
      (fun, init_params, get_input_batch), sharded; without `get_input_batch`, (fun, init_params); None stands
      for an `init_params` that was not given. The function takes arguments of any sharding, and moves those
      that are elsewhere. It has the methods of a `mmnnx.jit` over several TaskMeshes; if no task is in it,
      those of a plain `jax.jit`, unless `enable_fast_path(False)`. And it has the attributes of a
      `jax.stages.Compiled` for the arguments that `init_params` and the batch are.

    Raises:
      TypeError: for something that cannot be called.
      ValueError: for both `get_input_batch` and `initial_batch`, and as `mmnnx.jit` does.

    Example:
      >>> def f(w, x):
      ...     return x @ with_sharding_constraint(w, P(None, "x"))
      >>> f = task(f, devices=jax.devices()[:4], device_axes=("x",))
      >>> sharded_f, init, batch = parallelize(f, lambda: jnp.ones((4, 8)), lambda: jnp.ones((2, 4)))
      >>> sharded_f(init(), batch()).shape
      (2, 8)

    The arguments are those of `multimesh.jax.parallelize`, which documents those after `fun` as keywords only
    and gives them by position in its example.
    """
    return parallelized(fun, init_params, get_input_batch, initial_batch, devices)


def parallelized(
    fun: Callable[..., Any],
    init_params: Callable[[], Any] | None,
    get_input_batch: Callable[[], Any] | None,
    initial_batch: Any = None,
    devices: Any = None,
    adjusted: Callable[[Any], Any] = lambda shardings: shardings,
) -> tuple[Any, ...]:
    """`parallelize`; `adjusted` maps the derived shardings of the parameters to those that are used."""
    for name, given in (("fun", fun), ("init_params", init_params), ("get_input_batch", get_input_batch)):
        if not callable(given) and (given is not None or name == "fun"):
            raise TypeError(f"parallelize: {name} is a function, not {given!r}")
    if get_input_batch is not None and initial_batch is not None:
        raise ValueError("parallelize: give get_input_batch= or initial_batch=, not both")
    mesh = _whole(devices)
    logical = autosharding.get() is not False

    @functools.wraps(fun)
    def constrained(*args: Any) -> Any:
        with logical_names(logical):
            return fun(*args)

    with mesh, tracing_shapes():
        operands = [jax.eval_shape(init_params)] if init_params is not None else []
    if get_input_batch is not None:
        made = [get_input_batch()]  # returned first: a loader may not give it twice
        operands.append(jax.eval_shape(lambda batch: batch, *made))
    elif initial_batch is not None:
        operands.append(initial_batch)
    with default_contexts():
        scoped, divided, shardings = _derived(fun, constrained, mesh, operands)
    if init_params is not None:
        shardings = (adjusted(shardings[0]), *shardings[1:])
    jitted: Any = mm.jit(scoped, mesh=mesh, in_shardings=shardings)
    if not divided and fast_path():
        jitted = _Plain(constrained, shardings, mesh, jitted)
    sharded = Parallelized(fun, jitted, _placed(tuple(operands), shardings))
    init = None
    if init_params is not None:
        init = _sharded_init(init_params, shardings[0], mesh, operands[0])
    if get_input_batch is None:
        return sharded, init

    def get_batch() -> Any:
        return jax.device_put(made.pop() if made else get_input_batch(), shardings[-1])

    return sharded, init, get_batch


def _placed(operands: Any, shardings: Any) -> Any:
    """The operands as types alone, with shardings, which are as many: a Variable has one."""
    avals, tree = map(jax.typeof, jax.tree.leaves(operands)), jax.tree.structure(operands)
    made = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=a.weak_type)
        for a, s in zip(avals, jax.tree.leaves(shardings))
    ]
    return jax.tree.unflatten(tree, made)


def _derived(
    fun: Callable[..., Any], constrained: Callable[..., Any], mesh: mm.MultiMesh, operands: Sequence[Any]
) -> tuple[Callable[..., Any], bool, Any]:
    """The function, in a task if it has none; whether it has; and where its arguments would best live."""
    try:
        scoped, traced = constrained, mm.jit(constrained, mesh=mesh)
        divided = bool(traced.tasks(*operands))
        if not divided:  # a function without tasks is one task, on all devices
            scoped = mm.task(constrained, getattr(fun, "__name__", "parallelize"))
            traced = mm.jit(scoped, mesh=mesh)
        shardings, _ = traced.input_shardings(*operands)
    except ValueError as error:
        if "cannot slice along" in str(error) and mesh is not current_multimesh():
            raise ValueError(f"{error}. Call parallelize inside `with MultiMesh(...):`") from None
        raise
    return scoped, divided, shardings


def _sharded_init(
    init_params: Callable[[], Any], shardings: Any, mesh: mm.MultiMesh, shapes: Any
) -> Callable[[], Any]:
    """A function that initialises the parameters on their devices. Leaves that are not arrays, such as an
    optimizer, are those of `shapes`: made again in another trace they would not be equal.
    """
    made = mm.jit(lambda: jax.tree.leaves(init_params()), mesh=mesh, out_shardings=jax.tree.leaves(shardings))
    return functools.wraps(init_params)(lambda: jax.tree.unflatten(jax.tree.structure(shapes), made()))


def _whole(devices: Any) -> mm.MultiMesh:
    """The devices of the program as a MultiMesh; axes without names get names that no program uses."""
    multimesh = current_multimesh()
    if devices is None and multimesh is not None:
        return multimesh
    if devices is None and not jax.sharding.get_mesh().empty:  # that of jax.set_mesh
        return mm.MultiMesh(global_mesh=jax.sharding.get_mesh())
    array = np.asarray(jax.devices() if devices is None else devices, dtype=object)
    return mm.MultiMesh(devices=array, axis_names=[f"device axis {n}" for n in range(array.ndim)])


class _Plain:
    """A plain `jax.jit` that moves arguments which arrive with other shardings."""

    def __init__(self, fun: Callable[..., Any], shardings: Any, mesh: mm.MultiMesh, ignored: Any):
        self.jitted, self.shardings, self.mesh = jax.jit(fun, in_shardings=shardings), shardings, mesh
        self.ignored = ignored  # what runs under ignore_transforms

    def __call__(self, *args: Any) -> Any:
        if ignoring.get():
            return self.ignored(*args)
        with self.mesh:
            return self.jitted(*jax.device_put(args, self.shardings))

    def trace(self, *args: Any) -> Any:
        with self.mesh:
            return self.jitted.trace(*args)

    def lower(self, *args: Any) -> Any:
        with self.mesh:
            return self.jitted.lower(*args)

    def eval_shape(self, *args: Any) -> Any:
        with self.mesh:
            return self.jitted.eval_shape(*args)
