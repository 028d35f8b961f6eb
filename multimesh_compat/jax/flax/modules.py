"""Tasks made of linen modules."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, cast

import jax
from flax import linen as nn
from flax.core import Scope, unfreeze

from mmnnx.sharding.task import Task, task_scope
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
      >>> DenseTask = task(nn.Dense, mesh=Mesh(jax.devices()[:1], ("x",)))
      >>> DenseTask(features=16).apply(DenseTask(features=16).init(jax.random.key(0), x), x).shape
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


@functools.cache  # one class for one pair, so that modules with equal fields are equal
def module_class(cls: Any, task: Task) -> Any:
    """The class that `task` returns for a linen Module class and a Task that is made already.

    Example:
      >>> module_class(nn.Dense, Task("dense")).__name__
      'Task[Dense]'
    """
    name = f"Task[{cls.__name__}]"
    about = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    inner = types.new_class(name, (cls,), {}, lambda body: body.update(about))
    body: dict[str, Any] = {method: _in_task(inner, method, task) for method in _methods(cls)}
    body["setup"] = nn.Module.setup  # that of the class is called inside the task alone
    body["__reduce__"] = nn.nowrap(lambda self: (_unpickled, (cls, task), vars(self)))
    return types.new_class(name, (cls,), {}, lambda namespace: namespace.update(about | body))


def _unpickled(cls: Any, task: Task) -> nn.Module:
    return object.__new__(module_class(cls, task))


def _methods(cls: type[nn.Module]) -> set[str]:
    """The names of the public methods that a module class and its bases define."""
    bases = [base for base in cls.__mro__ if base not in nn.Module.__mro__]
    defined = {name for base in bases for name, value in vars(base).items() if inspect.isfunction(value)}
    others = {"setup", *(field.name for field in fields(cls))}  # a field may have a function as default
    return {
        name
        for name in defined - others
        if (name == "__call__" or not name.startswith("_")) and not hasattr(getattr(cls, name), "nowrap")
    }


def _in_task(inner: type[nn.Module], name: str, task: Task) -> Callable[..., Any]:
    method = getattr(inner, name)

    @functools.wraps(method)
    def in_task(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.scope is None:
            return method(self, *args, **kwargs)  # Flax says what is wrong, if it needs variables
        if not self.is_initializing():  # which is often traced, for shapes alone
            warn_unsplit(task)
        with task_scope(task), _scope_under_mod(self.scope) as scope:
            values = {f.name: getattr(self, f.name) for f in fields(self) if f.init and f.name != "parent"}
            values = jax.tree.map(functools.partial(_free, self.scope), values)
            return method(inner(parent=scope, **values), *args, **kwargs)

    return in_task


def _free(scope: Scope, value: Any) -> Any:
    """A module that `scope` has adopted, as nn.remat makes it do, is free again: its place is under "mod"."""
    adopted = isinstance(value, nn.Module) and value.scope is not None and value.scope.parent == scope
    return value.clone(name=None) if adopted else value


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
