"""The options of a task for what follows its state and is in no scope."""

from __future__ import annotations

import dataclasses
import itertools

from jax.sharding import Mesh

from mmnnx.mpmd.ir.placement import Placement, Position
from mmnnx.sharding.mesh import MultiMesh
from mmnnx.sharding.registered_tasks import placed_tasks
from mmnnx.sharding.task import Task


def with_task_options(placement: Placement, multimesh: MultiMesh | None) -> Placement:
    """Gives each position that is in no scope the task whose state is there; of several tasks, if it has a
    backward, their options.

    Raises:
      ValueError: if several tasks with other options have state on the same mesh.
    """
    forget = "mm.clear_tasks()" if multimesh is None else "make the MultiMesh anew: it remembers its tasks"
    trained = {
        placement.locations[n].position for n, phase in placement.phases.items() if phase == "backward"
    }

    def task_on(mesh: Mesh, has_backward: bool) -> Task | None:
        tasks = placed_tasks(mesh, multimesh)
        if not has_backward:
            return tasks[0] if len(tasks) == 1 else None
        for a, b in itertools.pairwise(tasks):
            if (a.remat, a.split_backprop) != (b.remat, b.split_backprop):
                raise ValueError(
                    f"{a} and {b} both have state on devices {[d.id for d in mesh.devices.flat]}, but not "
                    "the same remat and split_backprop: say what each computes with mm.task; if one is of a "
                    "model that is no more, " + forget
                )
        return dataclasses.replace(tasks[0], name=None) if len(tasks) > 1 else next(iter(tasks), None)

    positions = [
        Position(p.mesh, task_on(p.mesh, n in trained)) if p.task is None else p
        for n, p in enumerate(placement.positions)
    ]
    bodies = {loop: with_task_options(body, multimesh) for loop, body in placement.bodies.items()}
    return dataclasses.replace(placement, positions=positions, bodies=bodies)
