"""A traced function on its way into the compiler, and what is known of it before its calls are inlined."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from mmnnx.mpmd.frontend.graph import Path
from mmnnx.mpmd.frontend.in_out_shardings import InOutShardings, find_in_out_shardings
from mmnnx.mpmd.frontend.meshes import Meshes
from mmnnx.mpmd.frontend.over_arrays import OverArrays
from mmnnx.mpmd.frontend.record import Record
from mmnnx.mpmd.ir.dump import Dump
from mmnnx.mpmd.ir.equations import Flat, Var, scopes_in
from mmnnx.mpmd.ir.listing import Names
from mmnnx.mpmd.ir.shardings import constrains, mesh_of, shard_map_mesh
from mmnnx.sharding.division import Division
from mmnnx.sharding.mesh import MultiMesh
from mmnnx.sharding.registered_tasks import explain_placement, place_task, task_of_state
from mmnnx.sharding.task import Task
from mmnnx.sharding.task_scope import find_task

TaskOf = Callable[[str], tuple[Task, Mesh] | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """A traced function with arguments, and what is known of both.

    Attributes:
      traced, record: what the trace showed.
      leaves: the flat arguments.
      multimesh: the current MultiMesh, if there is one.
      task_of: from a name stack to the task scope that it lies in, if any, and that task's mesh.
      meshes: the meshes that it touches.
      task_meshes: those that it is partitioned over; one at least.
      shardings: where its arguments live and its results go.
      is_placed: whether an argument, a result or a task scope names a mesh.
      dump: where the stages write what they hand on.
    """

    traced: OverArrays
    record: Record
    leaves: Sequence[Any]
    multimesh: MultiMesh | None
    task_of: TaskOf
    meshes: Meshes
    task_meshes: list[Mesh]
    shardings: InOutShardings
    is_placed: bool
    dump: Dump

    @property
    def jaxpr(self) -> Any:
        """What it computes."""
        return self.traced.jaxpr

    @property
    def only_mesh(self) -> Mesh | None:
        """The mesh that it touches, if there is only one."""
        alone = len(self.task_meshes) == 1 and not self.meshes.moving
        return self.task_meshes[0] if alone else None

    def mesh_name(self, sharding: NamedSharding) -> str:
        """What messages call the mesh of a sharding."""
        return self.meshes.names().get(mesh_of(sharding), "several meshes")

    def task_mesh(self, scope: str) -> Mesh | None:
        """The mesh of the task scope that a name stack lies in, if any."""
        found = self.task_of(scope)
        return found[1] if found is not None else None

    @functools.cached_property
    def state_tasks(self) -> list[Task | None]:
        """For each input, the task whose state it is, where its mesh has state of several."""
        return [
            None if leaf is None or home is None else task_of_state(leaf.within, home, self.multimesh)
            for leaf, home in zip(self.record.inputs, self.shardings.homes)
        ]

    @property
    def donated(self) -> list[bool]:
        """Whether each argument is donated."""
        return self.traced.donated

    def given(self, flat: Flat) -> dict[Var, NamedSharding | None]:
        """The shardings that the inputs have."""
        return dict(zip(flat.invars, self.shardings.in_shardings))


def register_tasks(traced: OverArrays, record: Record) -> None:
    """Registers the tasks to which the rules of a function give state, on the current MultiMesh.

    Programs depend on what is registered. Two functions may name the tasks of one mesh differently.
    """
    for (task, mesh), paths in _placing(record, traced.jaxpr).items():
        place_task(task, mesh, paths)
    for leaf in (*record.inputs, *record.results):
        if leaf is not None and leaf.rule is not None and leaf.rule.text and leaf.rule.own:
            explain_placement(leaf.rule.path, leaf.rule.sharding, leaf.rule.text)


def enter(
    traced: OverArrays,
    record: Record,
    leaves: Sequence[Any],
    multimesh: MultiMesh | None,
    dump: Dump,
    inputs_in_pieces: bool = True,
) -> Function:
    """Finds out what a traced function touches, for arguments that live where `leaves` do.

    Args:
      dump: where the stages are written to.
      inputs_in_pieces: whether an argument that is no state of an NNX object, and that is sharded over an
        axis of tasks, counts as divided between them.

    Raises:
      PlacementError, ValueError: for what `mm.jit` refuses before it looks inside.
    """
    if len(traced.jaxpr.in_avals) > len(leaves):  # JAX hands it over as an argument
        raise ValueError(
            f"{traced.fun_name} reads a value of another trace, which has ended or is around this call. An "
            "array that a Module made inside of a jit and keeps as a plain attribute: make it a Variable, or "
            "a number. One that was kept from inside of a loop or mm.microbatch: return it from there. One "
            "of a jax.grad around mm.jit: put mm.jit around all of it"
        )
    meshes = Meshes(multimesh)
    task_of = functools.cache(functools.partial(_task_of, multimesh, meshes))
    for scope in scopes_in(traced.jaxpr):
        task_of(scope)  # from here on the mesh of its task is known
    types, typed = traced.jaxpr.out_avals, traced.result_shardings
    shardings = find_in_out_shardings(record, leaves, types, typed, meshes, inputs_in_pieces)
    is_placed = bool(meshes.names())
    if not is_placed:
        own = multimesh.mesh if multimesh is not None and constrains(traced.jaxpr) else None
        if (whole := own or shard_map_mesh(traced.jaxpr)) is not None:
            meshes.canonical(whole)
    task_meshes, around = meshes.tasks(), jax.sharding.get_abstract_mesh()
    if len(task_meshes) > 1 and not around.empty:
        raise ValueError(
            f"mm.jit under jax.set_mesh, of a mesh with axes {dict(around.shape)}: that would be the mesh of "
            f"every task, and they have {len(task_meshes)} of their own. Leave jax.set_mesh, and use the "
            "MultiMesh in its place (`with mesh:`, or mm.jit(mesh=mesh))"
        )
    function = Function(
        traced, record, leaves, multimesh, task_of, meshes, task_meshes, shardings, is_placed, dump
    )
    dump.write("frontend", functools.partial(function_text, function))
    return function


def check_device(function: Function, device: jax.Device | None) -> None:
    """Raises ValueError if a function that JAX alone cannot run shall run on a device, and is of others."""
    meshes = function.meshes.names()
    if device is None or all(list(mesh.devices.flat) == [device] for mesh in meshes):
        return
    raise ValueError(
        f"{function.traced.fun_name} has device= (or backend=), which means {device}, and state, shardings "
        f"or tasks on {', '.join(meshes.values())}: computation follows these. Leave it out. To have all of "
        "it on one device, put its state there: in_shardings= and out_shardings= of mm.jit take a "
        "jax.sharding.SingleDeviceSharding, and mm.Task takes mesh=mm.TaskMesh(devices=[number])"
    )


def _task_of(multimesh: MultiMesh | None, meshes: Meshes, scope: str) -> tuple[Task, Mesh] | None:
    task = find_task(scope, multimesh)
    try:
        return None if task is None else (task, meshes.of_task(task))
    except ValueError as error:
        raise ValueError(f"{error} (in the scope {scope!r})") from None


def _placing(record: Record, jaxpr: Any) -> dict[tuple[Task, Mesh], list[Path]]:
    """The tasks of the rules that place arguments and results, with their meshes; the state paths of each."""
    found: dict[tuple[Task, Mesh], list[Path]] = {}
    placed = zip((*record.inputs, *record.results), (*jaxpr.in_avals, *jaxpr.out_avals))
    for leaf, aval in placed:
        if leaf is None or leaf.rule is None:
            continue
        task, sharding = leaf.rule.task, leaf.rule.sharding
        path = None if leaf.is_optimizer_state else leaf.rule.path  # it is known by its parameter
        if isinstance(task, Division):
            for key, one in task.tasks_by_key(aval.shape[task.dim]):
                own = found.setdefault((one, one.to_mesh()), [])
                own += [] if path is None else [(*path, key)]
        elif task is not None and isinstance(sharding, NamedSharding):
            own = found.setdefault((task, mesh_of(sharding)), [])
            own += [] if path is None else [path]
    return found


def function_text(function: Function, _: Names) -> str:
    """The meshes that a function touches, where its arguments live, and where its results go."""
    shardings, record = function.shardings, function.record
    labels = record.names()
    lines = [
        f"mesh {name}: devices {[d.id for d in m.devices.flat]}"
        for m, name in function.meshes.names().items()
    ]
    lines.append("arguments:")
    for label, aval, given in zip(labels, function.jaxpr.in_avals, shardings.in_shardings):
        where = f"{given.spec} on {function.mesh_name(given)}" if given is not None else "unplaced"
        lines.append(f"  {label}: {aval.str_short()}, {where}")
    lines.append("results:")
    results = zip(record.results, function.jaxpr.out_avals, shardings.out_shardings, shardings.follows)
    for n, (leaf, aval, asked, follows) in enumerate(results):
        name = str(leaf) if leaf is not None else f"result {n}"
        where = (
            f"{asked.spec} on {function.mesh_name(asked)}" if asked is not None else "where it is computed"
        )
        like = f", follows {labels[follows]}" if follows is not None else ""
        lines.append(f"  {name}: {aval.str_short()}, {where}{like}")
    return "\n".join(lines)
