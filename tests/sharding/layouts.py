"""Small models, and what their placements say."""

from __future__ import annotations

from flax import nnx

import mmnnx as mm


def layout(placement: mm.TaskSharding) -> list[str]:
    """The rules, one line each."""
    return [f"{filter} {task.name}" for filter, (task, _) in zip(placement.filters, placement.rules)]


def stages_of(model, placement: mm.TaskSharding) -> dict[str, str]:
    """The task of each Variable, by path, asked of the TaskSharding as `mm.jit` does."""
    return {
        ".".join(map(str, path)): placement.lookup(path, variable).task.name
        for path, variable in nnx.to_flat_state(nnx.state(model))
    }


def tasks(number: int) -> list[mm.Task]:
    return [mm.Task(f"t{i}", mesh=mm.TaskMesh(devices=[i], axis_names=("model",))) for i in range(number)]


def linear(width: int, seed: int = 0, out: int | None = None) -> nnx.Linear:
    return nnx.Linear(width, out or width, use_bias=False, rngs=nnx.Rngs(seed))


def real_abstract_and_jitted(make_model):
    return [make_model(), nnx.eval_shape(make_model), nnx.jit(make_model)()]
