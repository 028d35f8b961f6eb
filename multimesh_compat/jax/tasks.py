"""Functions and classes as tasks, and tasks registered by name."""

from __future__ import annotations

import functools
import inspect
import operator
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

from flax import linen, nnx

import mmnnx as mm
from mmnnx._compat import module_is_pytree
from multimesh_compat.jax.flax.modules import module_class
from multimesh_compat.jax.options import divided, make_task, submeshes
from multimesh_compat.jax.unsplit import warn_unsplit


def task(fun: Any, name: str | None = None, *, task: mm.Task | None = None, **kwargs: Any) -> Any:
    """Makes what a function or a class computes, forward and backward, belong to a task (multimesh.jax.task).

    The task runs on one of `mesh` and `devices`; with neither, on the current MultiMesh or on all devices.
    Called outside `parallelize` and `mm.jit` the result computes what `fun` does, unsplit; when JAX
    traces it there, as in `jax.jit`, a warning says so, once.

    Args:
      fun: a function: the result is a function. A class with a `__call__`: the result is a subclass
        called `Task[Name]`, whose `__call__` belongs to the task (and whose `__init__` does, if it is an
        `nnx.Module`). A linen Module class: see `multimesh_compat.jax.flax.task`. An `nnx.Module`: the result
        is another that shares its attributes and Variables.
      name: name of the task. Default: the name of the function or class.
      task: a Task to use, instead of the arguments below.
      **kwargs: fields of `Task`, where `mesh` is a `jax.sharding.Mesh`, a TaskMesh or a MultiMesh, and

        - `devices`: jax devices, or numbers of devices of the program, as a list, or as an array of the
          mesh's shape.
        - `device_axes`: a name for each axis of `mesh` or `devices`. Without it axes of `devices` have no
          names that a constraint could mean, and logical constraints are replication.
        - `logical_axes`: pairs (logical axis, device axis), for the constraints inside. Default: constraints
          name device axes.

    Raises:
      ValueError: `mesh` next to `devices`, or either next to `mesh_slice`; a number of `device_axes` other
        than that of the mesh's axes; `logical_axes` without `mesh`, `device_axes` or `mesh_slice`; devices
        that repeat.
      TypeError: what is neither function nor class, an argument unknown, or `task` next to others.

    Example:
      >>> double = task(lambda x: 2 * x, "double", devices=jax.devices()[:4], device_axes=("x",))
      >>> double(3)
      6
    """
    cls: Any = fun if isinstance(fun, type) else type(fun)
    if isinstance(fun, linen.Module):
        raise TypeError(
            f"a task is made of the linen Module class {cls.__name__}, not of an instance: "
            "give the fields to the class that task returns"
        )
    if not callable(fun) and not isinstance(fun, nnx.Module):
        raise TypeError(f"a task wraps a function or a class with __call__, not {fun!r}")
    made = make_task(getattr(fun, "__name__", cls.__name__), name, task, kwargs)
    if cls is fun:
        if issubclass(cls, linen.Module):
            return module_class(cls, made)
        return _task_class(cls, made)
    if isinstance(fun, nnx.Module):
        wrapped: Any = object.__new__(_task_class(cls, made))
        vars(wrapped).update(vars(fun))
        return wrapped
    return _warning(mm.task(fun, task=made), made)


@functools.cache  # one class for one pair, so that graph definitions of equal modules stay equal
def _task_class(cls: type[Any], task: mm.Task) -> type[Any]:
    if not any("__call__" in vars(base) for base in cls.__mro__):
        raise TypeError(f"a task wraps a class with __call__, and {cls.__name__} has none")
    module = issubclass(cls, nnx.Module)
    body: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    body["__call__"] = _warning(mm.task(cls.__call__, task=task), task)
    if module:
        body["__init__"] = mm.task(cls.__init__, task=task)  # Variables are initialised where they are used
    options = {"pytree": module_is_pytree(cls)} if module else {}
    return types.new_class(f"Task[{cls.__name__}]", (cls,), options, lambda namespace: namespace.update(body))


def _warning(fun: Callable[..., Any], task: mm.Task) -> Callable[..., Any]:
    # The scope is opened under ignore_transforms too, where it is only a name: JAX caches what it traced
    # there, and without the name the function would stay unsplit after the context.
    @functools.wraps(fun)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        warn_unsplit(task)
        return fun(*args, **kwargs)

    return wrapper


# ---------------------------------------------------------------------------------- tasks by their names


def register_task(
    matcher: Any = None,
    *,
    callback: Callable[..., Any] | None = None,
    task: mm.Task | None = None,
    name: str | None = None,
    regex: str | re.Pattern | None = None,
    mesh: Any = None,
    devices: Any = None,
    dims: Sequence[int] | None = None,
    device_axes: Sequence[str] | None = None,
    logical_axes: Any = None,
    loop_submesh_size: int | None = None,
) -> None:
    """Lets a name scope, as `jax.named_scope` or a linen module opens one, be a task (multimesh.jax).

    Give one of `callback`, `task`, `mesh` and `devices`. The other arguments are those of earlier releases:
    they make a task, named as the scope, of the mesh, of `devices` or of those that `callback` returns. If
    there are more devices than one submesh has, microbatches take the submeshes in turn
    (`Task.loop_dependent_mesh_slice`).

    Args:
      matcher: a name or regex that a whole scope name must match.
      callback: `callback(name, backprop)`, or in the earlier form `callback(name)`: returns a Task, or jax
        devices or device numbers.
      task: the Task.
      name, regex: instead of `matcher`: a name that is no regex, or a regex.
      mesh: a `jax.sharding.Mesh`, a TaskMesh or a MultiMesh.
      devices: jax devices, or numbers of devices of the program, as a list, or as an array of the mesh's
        shape.
      dims: shape of a submesh. Default: that of the devices.
      device_axes: a name for each axis of a submesh. Without it logical constraints are replication, unless
        `mesh` has names.
      logical_axes: pairs (logical axis, device axis).
      loop_submesh_size: how many devices each microbatch has; they divide the first axis.

    Raises:
      ValueError: not exactly one of the four, or of `matcher`, `name` and `regex`; an argument for devices
        next to `task`; `logical_axes` without `device_axes` or `mesh`; names or sizes that do not fit the
        devices (said when a name is matched, for devices of a callback); no regex.
      TypeError: arguments of another type, or a callback that returns neither a Task nor devices.

    Example:
      >>> def stage(name, backprop):
      ...     return Task(name, mesh_slice={"stage": int(name[5:])})
      >>> register_task("layer[0-9]+", callback=stage)
      >>> register_task("head", devices=[6, 7], device_axes=("x",))
    """
    matcher = _matcher(matcher, name, regex)
    ways = {"callback": callback, "task": task, "mesh": mesh, "devices": devices}
    given = [key for key, value in ways.items() if value is not None]
    if len(given) != 1:
        raise ValueError(
            f"register {matcher!r} with one of callback=, task=, mesh= and devices=, not "
            f"{' and '.join(f'{key}=' for key in given) or 'none'}"
        )
    earlier = {
        "dims": dims,
        "device_axes": device_axes,
        "logical_axes": logical_axes,
        "loop_submesh_size": loop_submesh_size,
    }
    unfit = earlier if task is not None else {"dims": dims} if mesh is not None else {}
    if extra := [f"{key}=" for key, value in unfit.items() if value is not None]:
        raise ValueError(
            f"{', '.join(extra)} for matcher {matcher!r} are options of devices, not of {given[0]}="
        )
    if task is not None:
        return mm.register_task(matcher, task=task)
    if logical_axes and device_axes is None and mesh is None:
        raise ValueError(
            f"logical_axes= for matcher {matcher!r} without device_axes= that they could stand for"
        )
    size = None if loop_submesh_size is None else _submesh_size(loop_submesh_size, matcher)

    def of_devices(name: str, devices: Any) -> mm.Task:
        meshes = submeshes(devices, dims, device_axes, size, f"task {name!r}")
        return _in_turn(name, meshes, logical_axes)

    if mesh is not None:
        meshes = divided(mesh, device_axes, size, f"task {matcher!r}")
        return mm.register_task(matcher, callback=lambda name, backprop: _in_turn(name, meshes, logical_axes))
    if devices is not None:
        of_devices(str(matcher), devices)  # raises now if something is wrong
        return mm.register_task(matcher, callback=lambda name, backprop: of_devices(name, devices))
    if not callable(callback):
        raise TypeError(f"callback= for matcher {matcher!r} cannot be called: {callback!r}")
    call = callback if _takes_two(callback) else lambda name, backprop: callback(name)

    def choose(name: str, backprop: bool) -> mm.Task:
        found = call(name, backprop)
        if found is None:
            raise TypeError(f"the callback for matcher {matcher!r} returned no Task or devices for {name!r}")
        return found if isinstance(found, mm.Task) else of_devices(name, found)

    mm.register_task(matcher, callback=choose)


def _matcher(matcher: Any, name: str | None, regex: Any) -> Any:
    given = [m for m in (matcher, name, regex) if m is not None]
    if len(given) != 1:
        raise ValueError(f"register_task takes one of matcher, name= and regex=, not {given or 'none'}")
    return given[0] if name is None else re.compile(re.escape(name))


def _submesh_size(size: Any, matcher: Any) -> int:
    if isinstance(size, bool) or not hasattr(size, "__index__") or operator.index(size) < 1:
        raise TypeError(f"loop_submesh_size= for matcher {matcher!r} is a number of devices, not {size!r}")
    return operator.index(size)


def _in_turn(name: str, meshes: Sequence[Any], logical_axes: Any) -> mm.Task:
    """A task on a mesh, or on several in turn."""
    if len(meshes) == 1:
        return mm.Task(name, mesh=meshes[0], logical_axes=logical_axes)
    return mm.Task(name, loop_dependent_mesh_slice=list(meshes), logical_axes=logical_axes)


def _takes_two(fun: Callable[..., Any]) -> bool:
    """Whether a function can be called with two arguments."""
    try:
        inspect.signature(fun).bind(0, 0)
    except TypeError:
        return False
    except ValueError:  # builtins may have no signature
        return True
    return True
