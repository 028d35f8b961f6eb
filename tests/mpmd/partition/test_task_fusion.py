"""Neighbouring tasks on one TaskMesh: apart, or one (`mm.enable_task_fusion`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import mmnnx as mm
from tests.mpmd.parity import assert_same, pipeline

NAMES = ["a", "b", "c", "d"]
WEIGHTS = {name: jnp.eye(4) * (n + 1) / 3 for n, name in enumerate(NAMES)}
X = jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)


def four_tasks(slices=(0, 0, 1, 1), **options):
    """A loss through four tasks, with the stage of the MultiMesh that each runs on."""
    layers = {
        name: mm.task(lambda w, x: jnp.tanh(x @ w), name, mesh_slice={"stage": at}, **options.get(name, {}))
        for name, at in zip(NAMES, slices)
    }

    def loss(weights, x):
        for name, layer in layers.items():
            x = layer(weights[name], x)
        return (x**2).sum()

    return loss


def names(program):
    return [fragment.name for fragment in program.fragments]


def test_tasks_stay_apart_unless_they_are_fused():
    mesh, _ = pipeline(2)
    step = mm.jit(jax.value_and_grad(four_tasks()), mesh=mesh)
    expected = step(WEIGHTS, X)
    forward = ["a forward", "b forward", "c forward", "d forward"]
    assert [n for n in names(step.program(WEIGHTS, X)) if "forward" in n] == forward
    with mm.enable_task_fusion():
        fused = names(step.program(WEIGHTS, X))
        assert fused == ["a+b forward", "c+d forward", "c+d backward", "a+b backward"]
        assert_same(step(WEIGHTS, X), expected)
        with mm.enable_task_fusion(False):
            assert [n for n in names(step.program(WEIGHTS, X)) if "forward" in n] == forward
    assert [n for n in names(step.program(WEIGHTS, X)) if "forward" in n] == forward  # as it was before


def test_tasks_of_one_mesh_are_one_program_unless_they_are_to_stay_apart():
    mesh, _ = pipeline(2)
    step = mm.jit(jax.value_and_grad(four_tasks((1, 1, 1, 1))), mesh=mesh)
    expected = step(WEIGHTS, X)
    assert len(step.program(WEIGHTS, X).fragments) == 1
    with mm.enable_task_fusion(False):
        assert names(step.program(WEIGHTS, X))[:4] == [f"{name} forward" for name in NAMES]
        assert_same(step(WEIGHTS, X), expected)
    with mm.enable_task_fusion():
        assert len(step.program(WEIGHTS, X).fragments) == 1


def test_stages_of_a_loop_on_one_mesh():
    mesh, _ = pipeline(2)
    grad_fn = mm.microbatch(jax.value_and_grad(four_tasks((0, 0, 0, 0))), 0, 2, argnum=1, schedule="gpipe")
    step = mm.jit(grad_fn, mesh=mesh)
    expected = step(WEIGHTS, X)
    with mm.enable_task_fusion(False):
        assert len([n for n in names(step.program(WEIGHTS, X)) if "forward" in n]) == 4
        assert_same(step(WEIGHTS, X), expected)


@pytest.mark.parametrize("fuse, stages", [(False, 4), (True, 2)])
def test_stages_of_a_loop_are_tasks_or_what_they_fuse_into(fuse, stages):
    mesh, _ = pipeline(2)
    grad_fn = mm.microbatch(jax.value_and_grad(four_tasks()), 0, 2, argnum=1, num_stages=stages)
    step = mm.jit(grad_fn, mesh=mesh)
    with mm.enable_task_fusion(not fuse), pytest.raises(ValueError, match="num_stages="):
        step(WEIGHTS, X)
    with mm.enable_task_fusion(fuse):
        assert_same(step(WEIGHTS, X), jax.value_and_grad(four_tasks())(WEIGHTS, X))


def test_fusion_in_loops_alone_leaves_the_rest_apart():
    mesh, _ = pipeline(2)
    loss = four_tasks()

    def both(weights, x):
        return mm.microbatch(jax.value_and_grad(loss), 0, 2, argnum=1)(weights, x), loss(weights, x)

    step = mm.jit(both, mesh=mesh)
    with mm.enable_task_fusion(loops_only=True):
        tasks = {f.task for f in step.program(WEIGHTS, X).fragments}
        assert tasks >= {"a", "b", "c", "d", "a+b", "c+d"}
        assert_same(step(WEIGHTS, X), both(WEIGHTS, X))


def test_a_mesh_in_between_keeps_tasks_apart():
    mesh, _ = pipeline(2)
    step = mm.jit(four_tasks((0, 1, 0, 1)), mesh=mesh)
    with mm.enable_task_fusion():
        assert names(step.program(WEIGHTS, X)) == NAMES
        assert_same(step(WEIGHTS, X), four_tasks()(WEIGHTS, X))


def test_tasks_with_other_options_stay_apart():
    mesh, _ = pipeline(2)
    loss = four_tasks(b={"remat": True})
    with mm.enable_task_fusion():
        program = mm.jit(jax.grad(loss), mesh=mesh).program(WEIGHTS, X)
    assert {f.task for f in program.fragments} == {"a", "b", "c+d"}
