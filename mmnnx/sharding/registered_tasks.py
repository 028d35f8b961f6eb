"""Tasks that name scopes are registered for, and tasks that have state on a mesh."""

from __future__ import annotations

import difflib
import functools
import warnings
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from jax.sharding import Mesh, Sharding

from mmnnx.sharding.mesh import MultiMesh, current_multimesh, devices_key
from mmnnx.sharding.path_filter import Path
from mmnnx.sharding.registry import Matcher, Registry, Rule
from mmnnx.sharding.task import Task

global_registry = Registry()


def register_task(
    matcher: Matcher, *, callback: Callable[[str, bool], Task] | None = None, task: Task | None = None
) -> None:
    """Let a name scope, as `jax.named_scope` or a linen module opens one, be a task.

    Args:
      matcher: a name or regex that a whole scope name must match (one component, without slashes).
      callback: `callback(name, backprop) -> Task`, called with the scope name and whether the equations are
        of a backward pass. It should return the same Task for the same arguments.
      task: the Task, instead of a callback.

    Of several matchers the first registered wins, those of the current MultiMesh before the global ones. The
    innermost scope that is a task or matches decides. What `mm.task(f, name)` opens, without more than a
    name, may match as well. A warning says if a matcher is registered twice with different tasks.

    Raises:
      ValueError: neither or both of `callback` and `task`, or not a regex.

    Example:
      >>> register_task("decoder_[0-9]+", task=Task("decoder", mesh_slice={"stage": 1}))
      >>> clear_tasks()
    """
    global_registry.add(matcher, callback, task)


def clear_tasks() -> None:
    """Forget what was registered with `register_task`, and the tasks of placed state; not on a MultiMesh.

    Example:
      >>> _ = mm.register_task("head", task=stages[3])
      >>> clear_tasks()
    """
    global_registry.clear()


def place_task(task: Task, mesh: Mesh, paths: Iterable[Path]) -> None:
    """Remember that rules of a TaskSharding have put the state of these paths on the mesh of a task."""
    multimesh = current_multimesh()
    registry = global_registry if multimesh is None else multimesh.registry
    registry.place(_devices(mesh), task, map(_text, paths))


def explain_placement(path: Path, sharding: Sharding, rule: str) -> None:
    """Remember, for `rule_of_state`, which rule has given the state of a path a sharding."""
    multimesh = current_multimesh()
    registry = global_registry if multimesh is None else multimesh.registry
    registry.explain(_text(path), frozenset(sharding.device_set), rule)


def rule_of_state(path: Path, sharding: Sharding, multimesh: MultiMesh | None) -> tuple[Path, str] | None:
    """The rule that has put the state of a path, or of a part of it, on the devices of a sharding.

    Returns:
      the path that was placed, such as that of a parameter, and the rule; None if that is not known.
    """
    registry = global_registry if multimesh is None else multimesh.registry
    return registry.reason(_text(path), frozenset(sharding.device_set))


def placed_tasks(mesh: Mesh, multimesh: MultiMesh | None) -> tuple[Task, ...]:
    """The tasks that have state on a mesh, without those that have a `loop_dependent_mesh_slice`."""
    registry = _registry_of(mesh, multimesh)
    tasks = registry.placed(_devices(mesh)) if registry is not None else ()
    return tuple(t for t in tasks if t.loop_dependent_mesh_slice is None)


def task_of_state(path: Path, mesh: Mesh, multimesh: MultiMesh | None) -> Task | None:
    """The one of several tasks with state on a mesh that has the state of a path; None if that is not known.

    State is known by the path that it was placed by, whatever it is in by now: an optimizer, a tuple, a copy
    that was restored.
    """
    tasks = placed_tasks(mesh, multimesh)
    registry = _registry_of(mesh, multimesh) if len(tasks) > 1 else None
    task = registry.owner(_devices(mesh), _text(path)) if registry is not None else None
    return task if task in tasks else None


def _registry_of(mesh: Mesh, multimesh: MultiMesh | None) -> Registry | None:
    """The registry that has the tasks with state on a mesh: that of the MultiMesh, else the global one."""
    devices = _devices(mesh)
    if multimesh is not None and multimesh.registry.placed(devices):
        return multimesh.registry
    # A task of all devices, perhaps of an earlier program, says nothing about the whole MultiMesh.
    return None if multimesh is not None and devices == _devices(multimesh.mesh) else global_registry


def _text(path: Path) -> Path:
    return tuple(map(str, path))


def _devices(mesh: Mesh) -> tuple[Any, ...]:
    return mesh.devices.shape, *devices_key(mesh)


def registered_rules() -> Hashable:
    """A key for caches: while it is equal, `find_task` finds the same tasks."""
    return tuple(registry.rules for registry in _registries())


def registrations() -> Hashable:
    """A key for caches: while it is equal, so are all answers about tasks and placed state."""
    return tuple(registry.content for registry in _registries())


def registrations_for(paths: Iterable[Path]) -> Hashable:
    """A key for caches: while it is equal, so are all answers about tasks and about state of these paths."""
    texts = {_text(path) for path in paths}
    return tuple(registry.content_for(texts) for registry in _registries())


def _registries() -> tuple[Registry, ...]:
    multimesh = current_multimesh()
    return (global_registry,) if multimesh is None else (global_registry, multimesh.registry)


def registered_task(name: str, backward: bool, multimesh: MultiMesh | None) -> Task | None:
    """The task that is registered for a name scope, if any.

    Args:
      name: of the scope.
      backward: whether the equation in it is part of a backward pass.
      multimesh: its matchers come before the global ones.

    Raises:
      TypeError: a registered callback gave something that is not a Task.
    """
    for registry in (global_registry,) if multimesh is None else (multimesh.registry, global_registry):
        rule = registry.find(name)
        if rule is not None:
            return _apply(rule, name, backward)
    return None


def warn_unregistered(task: Task, multimesh: MultiMesh | None) -> None:
    """Warns, once, of a task with a name alone that is not registered, where that looks like a mistake."""
    registries = [global_registry] if multimesh is None else [multimesh.registry, global_registry]
    patterns = [pattern for registry in registries for pattern in registry.patterns()]
    whole = "on all devices" if multimesh is None else "on the whole MultiMesh"
    if registries[0].places_another(task):
        _say_once(
            f"{task} of mm.task has a name alone, and so runs {whole}, not where the task of this name in a "
            "TaskSharding has its state. Give that one as task="
        )
    elif patterns:
        (nearest,) = difflib.get_close_matches(str(task.name), patterns, 1, cutoff=0)
        _say_once(
            f"{task} of mm.task has a name alone, which is not registered, and so runs {whole}. The nearest "
            f"registered name is {nearest!r}. Give it mesh= or mesh_slice=, or register it with "
            "mm.register_task"
        )


@functools.cache
def _say_once(text: str) -> None:
    warnings.warn(text, stacklevel=7)  # the caller of what mm.task made


@functools.lru_cache(maxsize=16384)
def _apply(rule: Rule, name: str, backprop: bool) -> Task:
    found = rule.apply(name, backprop)
    if not isinstance(found, Task):
        raise TypeError(
            f"the matcher {rule.matcher!r} must give a Task for scope {name!r}, and gave {found!r}: "
            "return a Task from its callback"
        )
    return found
