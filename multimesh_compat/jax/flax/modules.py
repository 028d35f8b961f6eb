"""Tasks made of linen modules."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, cast

import jax
from flax import linen as nn
from flax.core import Scope, unfreeze

from mmnnx.sharding.task import Task
from mmnnx.sharding.task_scope import task_scope
from multimesh_compat.jax.options import make_task
from multimesh_compat.jax.unsplit import warn_unsplit


def task(model: type[nn.Module], name: str | None = None, *, task: Task | None = None, **kwargs: Any) -> Any:
    """A linen Module class whose instances compute, forward and backward, in a task (`multimesh.jax.flax`).

    Args:
      model: a linen Module class.
      name: name of the task. Default: the name of the class.
      task: a Task to use. Without it one is made of the name and the other arguments.
      **kwargs: as for `multimesh.jax.task`: fields of `Task`, `mesh=` or `devices=`, `device_axes=`,
        `logical_axes=`.

    Returns:
      A class with the fields and methods of `model`, called `Task[Dense]` for Dense. The variables of `model`
      are all under "mod", by collection: `variables["params"]["mod"]["params"]["kernel"]`, and
      `variables["batch_stats"]["mod"]["batch_stats"]["mean"]`. From equal keys they are initialised equal to
      those of `model`. A module given as a field is part of the task, unless another module made it: then it
      is shared, and its variables stay where they are.

    Raises:
      TypeError: `model` is no linen Module class.
      TypeError, ValueError: as `multimesh.jax.task` does for the other arguments.

    Example:
      >>> from flax import linen as nn
      >>> DenseTask = task(nn.Dense, devices=jax.devices()[:1], device_axes=("x",))
      >>> layer, x = DenseTask(features=16), jnp.ones((2, 8))
      >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
      (2, 16)
    """
    if not (isinstance(model, type) and issubclass(model, nn.Module)):
        given = f"an instance, {model!r}" if isinstance(model, nn.Module) else repr(model)
        raise TypeError(
            f"flax.task takes a linen Module class, such as nn.Dense, not {given}: the class that it returns "
            "takes the fields. For functions and NNX modules there is multimesh.jax.task"
        )
    made = make_task(model.__name__, name, task, kwargs)
    return module_class(cast(Any, model), made)


@functools.cache  # one class for each pair, so that modules with equal fields are equal
def module_class(cls: Any, task: Task) -> Any:
    """The class that `task` returns for a linen Module class and a Task that is made already.

    Example:
      >>> module_class(nn.Dense, Task("dense")).__name__
      'Task[Dense]'
    """
    about = {"__module__": cls.__module__, "__doc__": cls.__doc__}

    def __init_subclass__(subclass: Any, **kwargs: Any) -> None:
        super(made, subclass).__init_subclass__(**kwargs)
        if not subclass.is_in_task:
            for name, method in _own_methods(subclass, vars(subclass)).items():
                if not hasattr(method, "is_of_task"):  # a lifted transformation copies this attribute
                    setattr(subclass, name, _in_task(method, task))

    def __reduce__(self: nn.Module) -> Any:
        how = (_unpickled, (cls, task)) if type(self) is made else (object.__new__, (type(self),))
        return (*how, vars(self))

    inherited = {name: value for base in reversed(_bases(cls)) for name, value in vars(base).items()}
    names = _own_methods(cls, inherited)
    body: dict[str, Any] = {name: _in_task(getattr(cls, name), task) for name in names}
    body |= {"__init_subclass__": classmethod(__init_subclass__), "__reduce__": nn.nowrap(__reduce__)}
    body["is_in_task"] = False
    made: Any = types.new_class(f"Task[{cls.__name__}]", (cls,), {}, lambda space: space.update(about | body))
    return made


def _unpickled(cls: Any, task: Task) -> nn.Module:
    return object.__new__(module_class(cls, task))


def _bases(cls: type[nn.Module]) -> list[type]:
    return [base for base in cls.__mro__ if base not in nn.Module.__mro__]


def _own_methods(cls: Any, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The public methods in a namespace of a module class, and `setup`."""
    others = {field.name for field in fields(cls)}  # a field may have a function as default
    return {
        name: value
        for name, value in namespace.items()
        if inspect.isfunction(value) and name not in others and not hasattr(value, "nowrap")
        if name == "__call__" or not name.startswith("_")
    }


def _in_task(method: Any, task: Task) -> Callable[..., Any]:
    """A method that runs `method` in the task, on a copy of its module whose variables are under "mod"."""

    @functools.wraps(method)
    def in_task(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_in_task:
            return method(self, *args, **kwargs)
        if method.__name__ == "setup":  # runs on the copy
            return None
        if self.scope is None:
            return method(self, *args, **kwargs)  # Flax raises if it needs variables
        if not self.is_initializing():  # initialisation is often traced only for shapes
            warn_unsplit(task)
        with task_scope(task), _scope_under_mod(self.scope) as scope:
            copy = _copy_class(cast(Any, type(self)))(parent=scope, **_free_fields(self, self.scope, {}))
            return method(copy, *args, **kwargs)

    made: Any = in_task
    made.is_of_task = True
    return made


@functools.cache  # as the task class is
def _copy_class(cls: Any) -> Any:
    """The class of the copies that compute for the modules of a task class."""
    about = {"__module__": cls.__module__, "__doc__": cls.__doc__, "is_in_task": True}
    return types.new_class(cls.__name__, (cls,), {}, lambda space: space.update(about))


def _free_fields(module: nn.Module, scope: Scope, freed: dict[int, nn.Module]) -> dict[str, Any]:
    """The fields of a module. Modules that `scope`, or a scope below it, has adopted are copied, so that the
    copies can be adopted under "mod"; a module in several fields has one copy.
    """

    def free(value: Any) -> Any:
        if not isinstance(value, nn.Module) or not _is_within(value.scope, scope):
            return value
        if id(value) not in freed:
            freed[id(value)] = value.clone(**_free_fields(value, scope, freed) | {"name": None})
        return freed[id(value)]

    values = {
        f.name: getattr(module, f.name) for f in fields(cast(Any, module)) if f.init and f.name != "parent"
    }
    return jax.tree.map(free, values)


def _is_within(inner: Scope | None, outer: Scope) -> bool:
    return inner is not None and (inner.parent == outer or _is_within(inner.parent, outer))


@contextlib.contextmanager
def _scope_under_mod(outer: Scope) -> Iterator[Scope]:
    """A scope like `outer`, with the same keys, whose collections are those under "mod"."""
    found = {name: unfreeze(tree["mod"][name]) for name, tree in outer.variables().items() if "mod" in tree}
    scope = Scope(found, outer.rngs, outer.name, outer.mutable, path=outer.path, flags=outer.flags)
    scope.rng_counters = outer.rng_counters
    with scope.temporary():
        yield scope
        for name, tree in scope.mutable_variables().items():
            if tree:
                outer.put_variable(name, "mod", {name: tree})
