"""Tasks: named pieces of a computation with a submesh, and the scopes that mark what belongs to them.

A task marks its equations through the name stack, the one thing that every JAX transformation carries along
into the gradient: `find_task` reads the mark off an equation again.
"""

from __future__ import annotations

import functools
import operator
import re
import threading
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmnnx._compat import current_name_stack, module_is_pytree
from mmnnx.sharding.mesh import MultiMesh, TaskMesh, auto_mesh, current_multimesh, resolve_specs_on
from mmnnx.sharding.registry import Matcher, Registry, Rule

AxisRules = Mapping[str, Any] | Iterable[tuple[str, str | Sequence[str] | None]]

splitting: ContextVar[bool] = ContextVar("mmnnx_splitting", default=False)
"""True while `mm.jit` traces a function that it will cut into fragments."""

ignoring: ContextVar[bool] = ContextVar("mmnnx_ignoring", default=False)
"""True inside `mm.ignore_transforms()`."""


@dataclass(frozen=True)
class Task:
    """All options of a task. Equal options make equal tasks; a Task can be hashed.

    Args:
      name: what messages, programs and pictures call it.
      mesh: its submesh: a `TaskMesh` or a `jax.sharding.Mesh`.
      logical_axes: pairs (logical axis, mesh axis or tuple of them or None), or a mapping. Of the pairs for
        one logical axis the first whose mesh axes are still free in a spec is used; None replicates.
      mesh_slice: index along each sliced axis of the current MultiMesh, `{"stage": 0}`, instead of `mesh`.
        With neither, the task runs on the whole current MultiMesh, or on all devices if there is none.
      extra_axes: more pairs, asked after `logical_axes`.
      split_backprop: two names: the backward is cut in two, into the part that other tasks wait for and the
        gradients that nobody waits for, and these are their names.
      loop_dependent_mesh_slice: in a `mm.microbatch` loop the task runs on another slice for each microbatch.
        An axis of the current MultiMesh to go along; `{"stage": (0, 2)}` for some of its indices, in turn; or
        a function from the microbatch to a `mesh_slice`. The slices must be of one shape. The task's state
        is copied to each, once a step, and gradients are summed at its home.
      remat: what the backward of the task may compute again rather than keep: None for what is cheap, True
        for everything, or a policy of `jax.checkpoint`. It comes before that of `mm.microbatch`.

    `split_backprop` and `remat` also hold for what follows state that a TaskSharding gave to the task, on a
    mesh where no other task has state. A task that moves is one of computation: scope it with `mm.task`.

    Raises:
      ValueError: more than one of `mesh`, `mesh_slice` and `loop_dependent_mesh_slice`, or malformed options.
      TypeError: a `remat` that is no policy.

    Example:
      >>> Task("stage0", mesh_slice={"stage": 0}, logical_axes=[("mlp", "model")]).name
      'stage0'
    """

    name: str | None = None
    mesh: Mesh | TaskMesh | None = None
    logical_axes: AxisRules | None = None
    mesh_slice: Mapping[str, int] | Iterable[tuple[str, int]] | None = None
    extra_axes: AxisRules | None = None
    split_backprop: Any = None
    loop_dependent_mesh_slice: Any = None
    remat: Any = None

    def __post_init__(self) -> None:
        if self.name is not None and not isinstance(self.name, str):
            raise TypeError(f"the name of a Task is a string, not {self.name!r}")
        where = ("mesh", "mesh_slice", "loop_dependent_mesh_slice")
        given = [name for name in where if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                f"{self} has both {given[0]}= and {given[1]}=: give its own mesh, or its slice of the "
                "MultiMesh"
            )
        mesh = self.mesh
        if isinstance(mesh, MultiMesh):
            mesh = mesh.mesh
        if not isinstance(mesh, Mesh | TaskMesh | None):
            raise TypeError(f"mesh= of {self} is a TaskMesh or a jax.sharding.Mesh, not {mesh!r}")
        object.__setattr__(self, "mesh", mesh)
        check_remat(self.remat, f"remat= of {self}")
        object.__setattr__(self, "mesh_slice", self._normal_slice())
        object.__setattr__(self, "split_backprop", self._normal_halves())
        object.__setattr__(self, "loop_dependent_mesh_slice", self._normal_moves())
        object.__setattr__(self, "logical_axes", self._normal_rules("logical_axes"))
        object.__setattr__(self, "extra_axes", self._normal_rules("extra_axes"))

    @property
    def axis_rules(self) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
        """The pairs of `logical_axes`, then those of `extra_axes`."""
        return (*_items(self.logical_axes or ()), *_items(self.extra_axes or ()))

    def to_mesh(self, microbatch: int = 0) -> Mesh:
        """The `jax.sharding.Mesh` the task runs on, with Auto axes.

        Args:
          microbatch: for which microbatch, if that makes a difference.

        Raises:
          ValueError: the task needs a current MultiMesh and there is none, or lacks the axis, index or
            device it names; or a slice for a microbatch is of another shape than that for the first.

        Example:
          >>> Task("t", mesh=TaskMesh(devices=[0], axis_names=("model",))).to_mesh().size
          1
        """
        try:
            if isinstance(self.mesh, TaskMesh):
                return self.mesh.to_mesh()
            if self.mesh is not None:
                return auto_mesh(self.mesh)
            multimesh = current_multimesh()
            sliced = self.mesh_slice or self.loop_dependent_mesh_slice
            if multimesh is None and sliced:
                raise ValueError(
                    "it is a slice of the current MultiMesh, and none is current: "
                    "use it inside `with MultiMesh(...):`, or give it mesh="
                )
            if multimesh is None:
                return Mesh(np.array(jax.devices()), ("device",))
            if self.loop_dependent_mesh_slice is None:
                return multimesh.slice(**dict(self.mesh_slice)) if self.mesh_slice else multimesh.mesh
            first, mesh = (multimesh.slice(**self._slice_for(m, multimesh)) for m in (0, microbatch))
            if first.devices.shape != mesh.devices.shape:
                raise ValueError(
                    f"its slice for microbatch {microbatch} is {dict(mesh.shape)}, and that for microbatch 0 "
                    f"is {dict(first.shape)}: slices must be of one shape"
                )
            return mesh
        except ValueError as error:
            raise ValueError(f"{self}: {error}") from None

    def _slice_for(self, microbatch: int, multimesh: MultiMesh) -> dict[str, int]:
        moves = self.loop_dependent_mesh_slice
        if callable(moves):
            return dict(moves(microbatch))
        if isinstance(moves, str):
            if moves not in multimesh.shape:
                axes = ", ".join(map(repr, multimesh.shape))
                raise ValueError(f"cannot slice along {moves!r}: the MultiMesh has the axes {axes}")
            return {moves: microbatch % multimesh.shape[moves]}
        return {axis: indices[microbatch % len(indices)] for axis, indices in moves}

    def __str__(self) -> str:
        return f"task {self.name!r}" if self.name is not None else "an unnamed task"

    def __repr__(self) -> str:
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        return f"Task({', '.join(f'{name}={value!r}' for name, value in given if value not in (None, ()))})"

    def _normal_slice(self) -> tuple[tuple[str, int], ...] | None:
        if self.mesh_slice is None:
            return None
        try:
            pairs = [(axis, operator.index(index)) for axis, index in _items(self.mesh_slice)]
            if not all(isinstance(axis, str) for axis, _ in pairs):
                raise TypeError
            return tuple(sorted(pairs))
        except (TypeError, ValueError):
            raise ValueError(
                f'mesh_slice= of {self} is an index for each axis, like {{"stage": 0}}, '
                f"not {self.mesh_slice!r}"
            ) from None

    def _normal_halves(self) -> tuple[str, str] | None:
        halves = self.split_backprop
        if halves is None:
            return None
        names = () if isinstance(halves, (str, bool)) else tuple(halves)
        if len(names) != 2 or not all(isinstance(name, str) for name in names) or len(set(names)) < 2:
            raise ValueError(
                f"split_backprop= of {self} is two names, of the part of the backward that others wait for "
                f"and of the rest, not {halves!r}"
            )
        return names

    def _normal_moves(self) -> Any:
        moves = self.loop_dependent_mesh_slice
        if moves is None or isinstance(moves, str) or callable(moves):
            return moves
        try:
            normal = tuple(
                sorted((str(a), tuple(operator.index(i) for i in indices)) for a, indices in _items(moves))
            )
        except TypeError:
            normal = ()
        if not normal or not all(indices for _, indices in normal):
            raise ValueError(
                f"loop_dependent_mesh_slice= of {self} is an axis of the MultiMesh, indices along axes such "
                f'as {{"stage": (0, 1)}}, or a function from the microbatch to a mesh_slice, not {moves!r}'
            )
        return normal

    def _normal_rules(self, field: str) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
        rules = getattr(self, field)
        normal = []
        try:
            for logical, axes in _items(rules or ()):
                axes = axes if axes is None or isinstance(axes, str) else tuple(axes)
                if not all(isinstance(name, str) for name in (logical, *(axes or ()))):
                    raise TypeError
                normal.append((logical, axes))
        except (TypeError, ValueError):
            raise ValueError(
                f"{field}= of {self} is a list of pairs (logical axis, mesh axis | tuple of them | None), "
                f"not {rules!r}"
            ) from None
        return tuple(normal)


def _items(pairs: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(pairs, Mapping):
        return pairs.items()
    if isinstance(pairs, str):
        raise TypeError
    pairs = tuple(pairs)
    if any(isinstance(pair, str) for pair in pairs):  # ("ab", "cd") would unpack into letters
        raise TypeError
    return pairs


# ---------------------------------------------------------------------------------------------- scopes

_ids: dict[Task, int] = {}
_tasks: list[Task] = []  # never forgets: a jaxpr may keep a scope's name for as long as it lives
_lock = threading.Lock()
_current: ContextVar[tuple[Task, ...]] = ContextVar("mmnnx_task", default=())
_rules_around = jax.make_user_context(())  # a key of JAX's caches


def current_task() -> Task | None:
    """The task whose scope is innermost where this is called, or None.

    The name stack knows also about registered scopes, and about the backward rule of a custom_vjp, which runs
    when the scopes of its forward are closed; but it begins anew inside a jitted function.
    """
    stack = _current.get()
    return find_task(current_name_stack()) or (stack[-1] if stack else None)


def scope_name(task: Task) -> str:
    """The name scope that marks equations of `task`; equal tasks share one."""
    with _lock:
        if task not in _ids:
            _ids[task] = len(_tasks)
            _tasks.append(task)
        number = _ids[task]
    return f"task[{number}:{re.sub(r'[][()/]', '_', task.name or '')}]"


@contextmanager
def tracing(split: bool) -> Iterator[None]:
    """What is traced inside is a function of `mm.jit`, to be split or not; a task around it is not its."""
    tokens = splitting.set(split), _current.set(())
    try:
        yield
    finally:
        splitting.reset(tokens[0])
        _current.reset(tokens[1])


@contextmanager
def task_scope(task: Task) -> Iterator[None]:
    """What is traced inside belongs to `task`."""
    token = _current.set((*_current.get(), task))
    try:
        with ExitStack() as stack:
            stack.enter_context(jax.named_scope(scope_name(task)))
            if splitting.get():
                # Bare PartitionSpecs mean the task's axes, and a jitted or checkpointed function that several
                # tasks call is traced once for each of their meshes and rules, not for the first only.
                stack.enter_context(resolve_specs_on(task.to_mesh()))
                stack.enter_context(_rules_around(task.axis_rules))
            yield
    finally:
        _current.reset(token)


def task(fun_or_module: Any, name: str | None = None, *, task: Task | None = None, **kwargs: Any) -> Any:
    """Make what a function or an NNX module computes, forward and backward, belong to a task.

    Outside `mm.jit` the result computes exactly what `fun_or_module` does.

    Args:
      fun_or_module: a function: the result is a function. An `nnx.Module` class: the result is a subclass,
        called `Task[Name]`, whose `__init__` and `__call__` belong to the task. A Module instance: the
        result is a new object of such a subclass that shares the instance's attributes and Variables.
      name: name of the task. Default: the name of the function or class.
      task: a Task to use. Without it one is made of the name and the other arguments.
      **kwargs: fields of `Task`.

    Raises:
      TypeError: something that cannot be called, a field that Task lacks, or `task` next to fields.

    Example:
      >>> double = task(lambda x: 2 * x, "double")
      >>> double(3)
      6
    """
    chosen = _choose_task(fun_or_module, name, task, kwargs)
    if isinstance(fun_or_module, type) and issubclass(fun_or_module, nnx.Module):
        return _task_class(fun_or_module, chosen)
    if isinstance(fun_or_module, nnx.Module):
        wrapped = object.__new__(_task_class(type(fun_or_module), chosen))
        vars(wrapped).update(vars(fun_or_module))
        return wrapped
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
    @functools.wraps(fun)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with task_scope(task):
            return fun(*args, **kwargs)

    return wrapper


def check_remat(remat: Any, what: str) -> None:
    """Checks that it is None, a bool, or can be called as a policy.

    Raises:
      TypeError: if it is neither.
    """
    if not (remat is None or isinstance(remat, bool) or callable(remat)):
        raise TypeError(
            f"{what} is True, or a policy such as jax.checkpoint_policies.dots_saveable itself, not {remat!r}"
        )


@functools.cache  # one class for one pair, so that graph definitions of equal modules stay equal
def _task_class(cls: type[nnx.Module], task: Task) -> type[nnx.Module]:
    body: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    body["__init__"] = _in_scope(cls.__init__, task)
    if any("__call__" in vars(base) for base in cls.__mro__):
        body["__call__"] = _in_scope(cls.__call__, task)
    options = {"pytree": module_is_pytree(cls)}
    return types.new_class(f"Task[{cls.__name__}]", (cls,), options, lambda namespace: namespace.update(body))


# ------------------------------------------------------------------------- from name scopes back to tasks

_registry = Registry()


def register_task(
    matcher: Matcher, *, callback: Callable[[str, bool], Task] | None = None, task: Task | None = None
) -> None:
    """Let a name scope, as `jax.named_scope` or a linen module opens one, be a task.

    Args:
      matcher: a name or regex that a whole scope name must match (one component, without slashes).
      callback: `callback(name, backprop) -> Task`, asked with the scope name and whether the equations are
        of a backward pass. It should always answer the same for the same arguments.
      task: the Task, instead of a callback.

    Of several matchers the first registered wins, those of the current MultiMesh before the global ones. The
    innermost scope that is a task or matches decides.

    Raises:
      ValueError: neither or both of `callback` and `task`, or not a regex.

    Example:
      >>> register_task("decoder_[0-9]+", task=Task("decoder", mesh_slice={"stage": 1}))
      >>> clear_tasks()
    """
    _registry.add(matcher, callback, task)


def clear_tasks() -> None:
    """Forget what was registered with `register_task`, and the tasks of placed state; not on a MultiMesh."""
    _registry.clear()


def place_task(task: Task, mesh: Mesh) -> None:
    """Remember that a rule of a TaskSharding has put state of a task on a mesh."""
    multimesh = current_multimesh()
    (_registry if multimesh is None else multimesh.registry).place(_devices(mesh), task)


def placed_tasks(mesh: Mesh, multimesh: MultiMesh | None) -> tuple[Task, ...]:
    """The tasks that have state on a mesh, but for those that move."""
    devices = _devices(mesh)
    tasks = () if multimesh is None else multimesh.registry.placed(devices)
    # A task of all devices, of an earlier program perhaps, does not make a place of the whole MultiMesh.
    if not tasks and (multimesh is None or devices != _devices(multimesh.mesh)):
        tasks = _registry.placed(devices)
    return tuple(t for t in tasks if t.loop_dependent_mesh_slice is None)


def _devices(mesh: Mesh) -> tuple[Any, ...]:
    return mesh.devices.shape, *(d.id for d in mesh.devices.flat)


def registrations() -> Hashable:
    """What is equal as long as what `find_task` would say is the same, for caches."""
    multimesh = current_multimesh()
    return _registry.content, () if multimesh is None else multimesh.registry.content


def find_task(name_stack: str, multimesh: MultiMesh | None = None) -> Task | None:
    """The task of an equation, from `str(eqn.source_info.name_stack)`.

    Args:
      name_stack: such as "transpose(jvp(task[3:stage 0]))/dense".
      multimesh: whose registered matchers come first. Default: the current one.

    Returns:
      The task of the innermost scope that is a task's or matches a registered matcher, else None.

    Raises:
      TypeError: a registered callback gave something that is not a Task.

    Example:
      >>> find_task("jvp(dense)") is None
      True
    """
    multimesh = current_multimesh() if multimesh is None else multimesh
    registries = (_registry,) if multimesh is None else (multimesh.registry, _registry)
    for name in reversed(scopes(name_stack)):
        mark = re.fullmatch(r"task\[(\d+):[^][()/]*\]", name)
        if mark and int(mark[1]) < len(_tasks):
            return _tasks[int(mark[1])]
        for registry in registries:
            rule = registry.find(name)
            if rule is not None:
                return _apply(rule, name, is_backward(name_stack))
    return None


def is_backward(name_stack: str, outermost: bool = False) -> bool:
    """Whether an equation with this name stack is part of a backward pass.

    Args:
      name_stack: as for `find_task`.
      outermost: whether it is part of that of the outermost derivative. "jvp(layer)/transpose(jvp())" is the
        gradient that a layer takes, in the forward of one that is taken of the layer.
    """
    if outermost:
        mark = re.search(r"jvp\(|transpose\(", name_stack)
        return mark is not None and mark[0] == "transpose("
    return "transpose(" in name_stack


@functools.lru_cache(maxsize=16384)
def scopes(name_stack: str) -> tuple[str, ...]:
    """The names in a name stack, outermost first, without the marks of transformations around them."""
    names: list[str] = []
    depth = start = 0
    for end, char in enumerate(name_stack + "/"):
        depth += (char == "(") - (char == ")")
        if char == "/" and (depth <= 0 or end == len(name_stack)):
            part = name_stack[start:end]
            start = end + 1
            wrapped = re.fullmatch(r"(?:jvp|transpose|vmap)\((.*)\)", part)
            names += scopes(wrapped[1]) if wrapped else [part] if part else []
    return tuple(names)


@functools.lru_cache(maxsize=16384)
def _apply(rule: Rule, name: str, backprop: bool) -> Task:
    found = rule.apply(name, backprop)
    if not isinstance(found, Task):
        raise TypeError(
            f"the matcher {rule.matcher!r} must give a Task for scope {name!r}, and gave {found!r}: "
            "return a Task from its callback"
        )
    return found
