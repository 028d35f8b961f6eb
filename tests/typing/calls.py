"""Calls of mmnnx as type checkers see them. It is checked, and never run: see test_types.py."""

from __future__ import annotations

from typing import assert_type

import jax
from flax import nnx

import mmnnx as mm


@mm.jit
def step(model: nnx.Module, rate: float = 0.1) -> jax.Array:
    raise NotImplementedError


@mm.jit(donate_argnums=0, mesh=None)
def scaled(x: jax.Array, *, by: int) -> tuple[jax.Array, int]:
    raise NotImplementedError


class Layer(nnx.Module):
    @mm.jit
    def twice(self, x: int) -> str:
        raise NotImplementedError

    @mm.jit(static_argnames="flag")
    def maybe(self, x: int, *, flag: bool = False) -> str | None:
        raise NotImplementedError

    @mm.task
    def in_a_task(self, x: int) -> str:
        raise NotImplementedError


def use(model: nnx.Module, layer: Layer, x: jax.Array) -> None:
    assert_type(step(model), jax.Array)
    assert_type(step(model, rate=1.0), jax.Array)
    assert_type(scaled(x, by=2), tuple[jax.Array, int])
    assert_type(layer.twice(3), str)
    assert_type(layer.maybe(3, flag=True), str | None)
    assert_type(Layer.twice(layer, 3), str)
    assert_type(mm.jit(lambda: 3)(), int)
    assert_type(step.program(model), mm.Program)
    assert_type(step.eval_shape(model), jax.Array)
    assert_type(step.tasks(model), list[mm.Task])

    step("model")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    scaled(x)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    layer.twice("3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mm.jit(step, no_such_option=1)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


def whole(x: jax.Array, n: int) -> dict[str, jax.Array]:
    raise NotImplementedError


def names(model: nnx.Module) -> None:
    assert_type(mm.__version__, str)
    assert_type(mm.microbatch(whole, dim=0, count=8)(jax.numpy.ones(2), n=3), dict[str, jax.Array])
    assert_type(mm.task(whole, "name")(jax.numpy.ones(2), 3), dict[str, jax.Array])
    assert_type(mm.task(name="name")(whole)(jax.numpy.ones(2), 3), dict[str, jax.Array])
    assert_type(mm.task(Layer(), task=mm.Task("a")).twice(3), str)
    assert_type(Layer().in_a_task(3), str)
    assert_type(mm.MultiMesh(axis_sizes=(4,), axis_names=("stage",)).slice(stage=0), jax.sharding.Mesh)
    assert_type(mm.tabulate(model), mm.ModelTable)
    assert_type(mm.show_placement(model).title, str)
    assert_type(mm.show_transfers(mm.jit(step).program(model)).rows[0].nbytes, int)
    assert_type(mm.plan(step, model), mm.Plan)
    assert_type(len(mm.target("v5e:2x4")), int)
    assert_type(mm.modules.lora(model, rank=4), nnx.Module)
    print(mm.no_such_name)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
