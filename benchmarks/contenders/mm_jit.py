"""The ordinary NNX train step under `mm.jit`: the stages follow from where the state lives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

import mmnnx as mm
from contenders.contender import Contender, arrays_of, by_path
from contenders.problem import OPTIMIZER, Problem


def mm_jit(
    problem: Problem, stages: int | Sequence[mm.Task], mesh: mm.MultiMesh | None = None, **loop: Any
) -> tuple[Contender, Callable[[Any], tuple[mm.Program, tuple[Any, ...]]]]:
    """The contender, and a function from a batch to the program of a step and the arguments it is of.

    Args:
      problem: what to train.
      stages, mesh: where, as for `mm.pipeline_sharding`.
      **loop: options of `mm.microbatch`.
    """
    placement = mm.pipeline_sharding(nnx.eval_shape(problem.make), stages)

    @mm.jit(donate_argnums=(0, 1), mesh=mesh)
    def train_step(model, optimizer, batch):
        grad_fn = nnx.value_and_grad(problem.loss)
        loss, gradients = mm.microbatch(grad_fn, dim=0, size=problem.rows, argnum=1, reduce="mean", **loop)(
            model, batch
        )
        optimizer.update(model, gradients)
        return loss

    with mesh or contextlib.nullcontext():
        model = mm.jit(problem.make, out_shardings=placement)()
        optimizer = mm.jit(lambda model: nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param))(model)

    def program(batch: Any) -> tuple[mm.Program, tuple[Any, ...]]:
        arguments = (model, optimizer, batch)
        return train_step.program(*arguments), arguments

    contender = Contender(
        "mm.jit",
        lambda batch: train_step(model, optimizer, batch),
        arrays_of(model, optimizer),
        lambda: by_path(nnx.to_flat_state(optimizer.opt_state[0].mu)),
    )
    return contender, program
