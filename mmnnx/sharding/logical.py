"""Logical axis names: from the names a model uses for its dimensions to the mesh axes of a task."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mmnnx.sharding.logical_constraint import logical_constraint
from mmnnx.sharding.mesh import current_multimesh
from mmnnx.sharding.task import Task
from mmnnx.sharding.task_scope import current_task, ignoring, scope_mesh, splitting

autosharding: ContextVar[bool | None] = ContextVar("mmnnx_autosharding", default=None)
"""Where names in constraints are logical: None, inside tasks; True, outside as well; False, nowhere."""

# Flax renamed the metadata twice; Variables restored from older checkpoints carry the older names.
_METADATA = ("out_sharding", "sharding_names", "sharding")


def to_spec(
    names: Iterable[Any], task: Task | None, mesh: Mesh, more_rules: Iterable[tuple[str, Any]] = ()
) -> PartitionSpec:
    """Logical axis names, one entry for each dimension, as a PartitionSpec over axes of `mesh`.

    An entry is a name, a tuple of names, None, or `PartitionSpec.UNCONSTRAINED`. For each name: the first
    of the task's `logical_axes`, then `extra_axes`, then `more_rules` that maps it to mesh axes still free
    in this spec; else, if a mesh axis has that name and is free, that axis; else it is replicated.

    Raises:
      ValueError: a rule that applies names an axis the mesh lacks.

    Example:
      >>> mesh = Mesh(jax.devices()[:1], ("model",))
      >>> to_spec(("embed", "mlp"), Task("t", logical_axes=[("mlp", "model")]), mesh)
      P(None, 'model')
    """
    rules = (*(task.axis_rules if task is not None else ()), *more_rules)
    used: set[str] = set()
    entries: list[Any] = []
    for entry in names:
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
            entries.append(entry)
            continue
        axes: list[str] = []
        for name in (entry,) if isinstance(entry, str) else entry:
            found = _mesh_axes(name, rules, task, mesh, used)
            used.update(found)
            axes += found
        entries.append(axes[0] if len(axes) == 1 else tuple(axes) or None)
    return PartitionSpec(*entries)


def _mesh_axes(
    name: str, rules: tuple[tuple[str, Any], ...], task: Task | None, mesh: Mesh, used: set[str]
) -> tuple[str, ...]:
    for logical, target in rules:
        if logical != name:
            continue
        axes = () if target is None else (target,) if isinstance(target, str) else tuple(target)
        lacking = [axis for axis in axes if axis not in mesh.axis_names]
        if lacking:
            raise ValueError(
                f"{task or 'a sharding rule'} maps the logical axis {name!r} to {target!r}, and its mesh has "
                f"no axis {', '.join(map(repr, lacking))}: its axes are {tuple(mesh.axis_names)}"
            )
        if used.isdisjoint(axes):
            return axes
    return (name,) if name in mesh.axis_names and name not in used else ()


def logical_spec(variable: Any, task: Task, mesh: Mesh) -> PartitionSpec | None:
    """The spec that the axis metadata of a Variable stands for on the mesh of `task`; None without metadata.

    The metadata is what `nnx.with_partitioning` or `nnx.Param(..., out_sharding=...)` records, with the
    Variable's own `sharding_rules`, if any, used after those of the task.

    Example:
      >>> mesh = Mesh(jax.devices()[:1], ("model",))
      >>> param = nnx.Param(jax.numpy.ones((2, 3)), out_sharding=(None, "model"), eager_sharding=False)
      >>> logical_spec(param, Task("t"), mesh)
      P(None, 'model')
    """
    names = logical_names(variable)
    if names is None:
        return None
    return to_spec(names, task, mesh, variable.get_metadata().get("sharding_rules") or ())


def logical_names(variable: Any) -> list[Any] | None:
    """The entry (a name, a tuple of them or None) for each dimension of a Variable; None without metadata.

    Example:
      >>> logical_names(nnx.Param(jax.numpy.ones((2, 3)), out_sharding=(None, "mlp"), eager_sharding=False))
      [None, 'mlp']
    """
    if not isinstance(variable, nnx.Variable):
        return None
    metadata = variable.get_metadata()
    names = next((metadata[key] for key in _METADATA if metadata.get(key) is not None), None)
    if isinstance(names, NamedSharding):
        names = names.spec
    return None if names is None else [None if n is PartitionSpec.UNCONSTRAINED else n for n in names]


def with_sharding_constraint(x: Any, spec: Any) -> Any:
    """Constrain how the arrays of `x` are sharded, in the logical axis names of the task around it.

    Inside a task the names in `spec` are translated by its `logical_axes`, then its `extra_axes`; axis names
    of its mesh stand for themselves; a name without a mapping is replicated. Outside `mm.jit` a task may run
    on any one device, so there the constraint does nothing. Outside a task, and for each Sharding in `spec`,
    it is `jax.lax.with_sharding_constraint`.

    Args:
      x: an array or a pytree of arrays.
      spec: a PartitionSpec, or a tree of them (or Shardings, or None: no constraint) that is a prefix of `x`.

    Returns:
      `x` with the constraints applied; same shapes, dtypes and values.

    Raises:
      TypeError: a tuple, a list or a name where an array has a PartitionSpec.
      ValueError: a rule of the task names an axis its mesh lacks; more entries than an array has dimensions,
        of which one beyond stands for a mesh axis; or what `jax.lax.with_sharding_constraint` refuses.

    Example:
      >>> from mmnnx.sharding import task
      >>> constrained = task(lambda x: with_sharding_constraint(x, PartitionSpec("batch")), "stage0")
      >>> constrained(jax.numpy.ones(3)).shape
      (3,)
    """
    if type(spec) in (tuple, list, str) and isinstance(x, jax.Array):
        raise TypeError(f"the sharding of an array is a PartitionSpec, not {spec!r}: write P(...)")
    return jax.tree.map(_constrain, spec, x, is_leaf=lambda s: s is None or isinstance(s, PartitionSpec))


def _constrain(spec: Any, x: Any) -> Any:
    if spec is None or ignoring.get():
        return x
    task, logical = current_task(), autosharding.get()
    if not isinstance(spec, PartitionSpec) or logical is False or (task is None and logical is None):
        try:
            return jax.lax.with_sharding_constraint(x, spec)
        except (ValueError, RuntimeError) as error:
            error.add_note(
                "Outside of tasks mm.with_sharding_constraint is jax.lax.with_sharding_constraint, for which "
                "names are axes of the current mesh. A task translates logical names: mm.task(f, task=...)"
            )
            raise
    return jax.tree.map(functools.partial(_constrain_logically, tuple(spec), task), x)


def _constrain_logically(names: tuple[Any, ...], task: Task | None, x: Any) -> Any:
    if task is None:
        whole = current_multimesh()
        default = None if whole is None else logical_sharding(names, None, whole.mesh, jnp.ndim(x))
        return logical_constraint(x, names, default)
    if not splitting.get():
        return x
    mesh = scope_mesh(task)
    return constrain_on(mesh, x, tuple(logical_sharding(names, task, mesh, jnp.ndim(x)).spec))


def logical_sharding(names: Sequence[Any], task: Task | None, mesh: Mesh, ndim: int) -> NamedSharding:
    """`to_spec` as a sharding of an array of `ndim` dimensions, without those at the end that are whole.

    There may be more names than dimensions, of those that no mesh axis is for; ValueError for others.
    """
    entries = list(to_spec(names, task, mesh))
    for name, axes in zip(names[ndim:], entries[ndim:]):
        if axes is not None and axes is not PartitionSpec.UNCONSTRAINED:
            raise ValueError(
                f"{PartitionSpec(*names)} is too long for an array with ndim={ndim}: there is no dimension "
                f"to shard over {axes!r}, which {name!r} stands for{f' in {task}' if task else ''}"
            )
    entries = entries[:ndim]
    while entries and entries[-1] is None:
        entries.pop()
    return NamedSharding(mesh, PartitionSpec(*entries))


def constrain_on(mesh: Mesh, x: jax.Array, entries: Sequence[Any]) -> jax.Array:
    """An array sharded over a mesh as the entries of a PartitionSpec say.

    Over Explicit axes, where a constraint is an assertion about the type, it is resharded.
    """
    if AxisType.Explicit not in mesh.axis_types:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*entries)))
    own = (*jax.typeof(x).sharding.spec, *[None] * len(entries))
    kept = [own[n] if e is PartitionSpec.UNCONSTRAINED else e for n, e in enumerate(entries)]
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*kept)))
