"""Task scopes: how equations are marked as those of a task, and how the mark is read.

A scope marks its equations through the name stack, the one thing that every JAX transformation carries along
into the gradient.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

import jax
from jax.sharding import AxisType, Mesh

from mmnnx._compat import current_name_stack
from mmnnx.sharding.mesh import MultiMesh, auto_mesh, current_multimesh, resolve_specs_on
from mmnnx.sharding.name_stack import is_backward, scopes
from mmnnx.sharding.registered_tasks import registered_task, warn_unregistered
from mmnnx.sharding.task import Task

splitting: ContextVar[bool] = ContextVar("mmnnx_splitting", default=False)
"""True while `mm.jit` traces a function that it will partition into fragments."""

ignoring: ContextVar[bool] = ContextVar("mmnnx_ignoring", default=False)
"""True inside `mm.ignore_transforms()`."""

_explicit: ContextVar[list[Mesh] | None] = ContextVar("mmnnx_explicit", default=None)
# While a function is traced with shardings in types, the meshes with Explicit axes of task scopes in it.

_ids: dict[Task, int] = {}
_tasks: list[Task] = []  # never forgets: a jaxpr may keep a scope's name for as long as it lives
_lock = threading.Lock()
_current: ContextVar[tuple[Task, ...]] = ContextVar("mmnnx_task", default=())
_rules_around = jax.make_user_context(())  # a key of JAX's caches


def current_task() -> Task | None:
    """The task of the innermost scope where this is called, or None.

    The name stack is read first: it also has registered scopes, and inside the backward rule of a custom_vjp
    the scopes of its forward, which are closed by then. Inside a jitted function it starts empty; there the
    stack of open task scopes is read.
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
def tracing(split: bool, explicit: list[Mesh] | None = None) -> Iterator[None]:
    """Inside, a function of `mm.jit` is traced, to be partitioned or not; a task around it does not count.

    Args:
      split: whether it is to be partitioned.
      explicit: learns the meshes of tasks with Explicit axes; without it such axes count as Auto.
    """
    tokens = splitting.set(split), _current.set(()), _explicit.set(explicit)
    try:
        yield
    finally:
        splitting.reset(tokens[0])
        _current.reset(tokens[1])
        _explicit.reset(tokens[2])


def scope_mesh(task: Task) -> Mesh:
    """The mesh of a task for what is traced in its scope."""
    mesh, explicit = task.to_mesh(), _explicit.get()
    if AxisType.Explicit not in mesh.axis_types:
        return mesh
    if explicit is None:
        return auto_mesh(mesh)
    explicit.append(mesh)
    return mesh


@contextmanager
def task_scope(task: Task) -> Iterator[None]:
    """Equations that are traced inside belong to `task`, or to what a name alone is registered for."""
    multimesh = current_multimesh()
    meant = _meant(task, backward=False, multimesh=multimesh)
    if splitting.get() and meant.is_name:
        warn_unregistered(meant, multimesh)
    token = _current.set((*_current.get(), meant))
    try:
        with ExitStack() as stack:
            stack.enter_context(jax.named_scope(scope_name(task)))
            if splitting.get():
                # Bare PartitionSpecs name axes of the task's mesh. A jitted or checkpointed function that
                # several tasks call is traced once for each of their meshes and rules, not only the first.
                mesh = scope_mesh(meant)
                stack.enter_context(resolve_specs_on(mesh))
                if AxisType.Explicit in mesh.axis_types:
                    stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
                stack.enter_context(_rules_around(meant.axis_rules))
            yield
    finally:
        _current.reset(token)


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
    backward = is_backward(name_stack)
    for name in reversed(scopes(name_stack)):
        mark = re.fullmatch(r"task\[(\d+):[^][()/]*\]", name)
        if mark and int(mark[1]) < len(_tasks):
            return _meant(_tasks[int(mark[1])], backward, multimesh)
        task = registered_task(name, backward, multimesh)
        if task is not None:
            return task
    return None


def _meant(task: Task, backward: bool, multimesh: MultiMesh | None) -> Task:
    """The task that is registered under the name of one that has a name alone; any other itself."""
    found = registered_task(task.name, backward, multimesh) if task.name and task.is_name else None
    return found or task
