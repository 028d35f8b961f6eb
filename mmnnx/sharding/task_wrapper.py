"""`mm.task`: a function or an NNX module whose computation belongs to a task."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar, overload

from flax import nnx

from mmnnx._compat import module_is_pytree
from mmnnx.sharding.incompatible_devices import advising
from mmnnx.sharding.task import Task
from mmnnx.sharding.task_scope import task_scope

T = TypeVar("T")


@overload
def task(fun_or_module: T, name: str | None = None, *, task: Task | None = None, **kwargs: Any) -> T: ...


@overload
def task(*, name: str | None = None, task: Task | None = None, **kwargs: Any) -> Callable[[T], T]: ...


def task(
    fun_or_module: Any = None, name: str | None = None, *, task: Task | None = None, **kwargs: Any
) -> Any:
    """Make the computation of a function or an NNX module, forward and backward, belong to a task.

    Outside `mm.jit` the result computes what `fun_or_module` does.

    Args:
      fun_or_module: a function: the result is a function. An `nnx.Module` class: the result is a subclass,
        called `Task[Name]`, whose `__init__` and `__call__` belong to the task. A Module instance: the
        result is a new object of such a subclass that shares the instance's attributes and Variables. Without
        one, the result is a decorator.
      name: name of the task. Default: the name of the function or class.
      task: a Task to use. Without it one is made of the name and the other arguments. Of a name alone it is
        what `register_task` has under it, and else a task of the whole current MultiMesh.
      **kwargs: fields of `Task`.

    Raises:
      TypeError: something that cannot be called, a field that Task lacks, or `task` next to fields.

    Example:
      >>> double = task(lambda x: 2 * x, "double")
      >>> double(3)
      6
      >>> @task(name="double")
      ... def double(x):
      ...     return 2 * x
    """
    if fun_or_module is None:
        return lambda given: _in_task(given, name, task, kwargs)
    return _in_task(fun_or_module, name, task, kwargs)


def _in_task(fun_or_module: Any, name: str | None, given: Task | None, kwargs: dict[str, Any]) -> Any:
    chosen = _choose_task(fun_or_module, name, given, kwargs)
    if isinstance(fun_or_module, type) and issubclass(fun_or_module, nnx.Module):
        return _task_class(fun_or_module, chosen)
    if isinstance(fun_or_module, nnx.Module):
        made = object.__new__(_task_class(type(fun_or_module), chosen))
        vars(made).update(vars(fun_or_module))
        return made
    return _in_scope(fun_or_module, chosen)


def _choose_task(fun_or_module: Any, name: str | None, given: Task | None, kwargs: dict[str, Any]) -> Task:
    if not callable(fun_or_module) and not isinstance(fun_or_module, nnx.Module):
        raise TypeError(f"a task wraps a function, an nnx.Module class or a Module, not {fun_or_module!r}")
    if isinstance(name, Task):
        raise TypeError("the second argument is a name: give a Task as task=")
    if given is None:
        unknown = set(kwargs) - {f.name for f in fields(Task)}
        if unknown:
            raise TypeError(f"Task has no field {', '.join(sorted(unknown))}")
        default = getattr(fun_or_module, "__name__", type(fun_or_module).__name__)
        return Task(name if name is not None else default, **kwargs)
    if not isinstance(given, Task):
        raise TypeError(f"task= is a Task, not {given!r}")
    if kwargs:
        raise TypeError(f"give either task= or fields of one, not both: {', '.join(sorted(kwargs))}")
    return given if name is None else replace(given, name=name)


def _in_scope(fun: Callable[..., Any], task: Task) -> Callable[..., Any]:
    @advising
    @functools.wraps(fun)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with task_scope(task):
            return fun(*args, **kwargs)

    return wrapper


@functools.cache  # one class for each pair, so that graph definitions of equal modules stay equal
def _task_class(cls: type[nnx.Module], task: Task) -> type[nnx.Module]:
    body: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    body["__init__"] = _in_scope(cls.__init__, task)
    if any("__call__" in vars(base) for base in cls.__mro__):
        body["__call__"] = _in_scope(cls.__call__, task)
    options = {"pytree": module_is_pytree(cls)}
    return types.new_class(f"Task[{cls.__name__}]", (cls,), options, lambda namespace: namespace.update(body))
