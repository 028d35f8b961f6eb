"""Processes that trace the same function have the same program, whatever order their sets have."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx.mpmd.runtime.prepare import _in_full
from tests.environment import environment

NAMES = ["left", "right", "up", "down", "in", "out"]  # more, for two orders may be the same by chance


class Two(nnx.Module):
    def __init__(self):
        self.a, self.b, self.c = (nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(n)) for n in range(3))


@jax.custom_vjp
def passed_on(x, a, b):
    """The state of two meshes is read by the backward alone."""
    return x


passed_on.defvjp(
    lambda x, a, b: (x, (a, b)),
    lambda read, g: (g * (jnp.sin(read[0]) * jnp.cos(read[1])).sum(), *map(jnp.zeros_like, read)),
)


def of_two_meshes(model, x):
    return passed_on(model.c(x), model.a.kernel[...], model.b.kernel[...])


def of_two_tasks(model, x):
    """One value is made of as much state of each."""
    return model.c(x @ (model.a.kernel[...] + model.b.kernel[...]))


def described(name: str, forward, slices) -> str:
    """The program of a gradient, with tasks and an axis that have names of their own."""
    with mm.MultiMesh(axis_sizes=(3,), axis_names=(name,), devices=jax.devices()[:3]):
        tasks = [mm.Task(f"{name}{n}", mesh_slice={name: s}) for n, s in enumerate(slices)]
        rules = mm.TaskSharding(dict(zip(map(mm.path, "abc"), tasks)))
        model = mm.jit(Two, out_shardings=rules)()
        grad = mm.jit(nnx.grad(lambda model, x: (forward(model, x) ** 2).sum()))
        return str(grad.program(model, jnp.ones((2, 4))))


def digests() -> list[str]:
    programs = [described(name, of_two_meshes, (0, 1, 2)) for name in NAMES]
    programs += [described(name, of_two_tasks, (0, 0, 1)) for name in NAMES]
    return [hashlib.sha256(text.encode()).hexdigest() for text in programs]


def test_whatever_strings_hash_to():
    """As they do in each process otherwise."""
    program = "from tests.environment import compile_fast\ncompile_fast()\n"
    program += "from tests.mpmd.test_same_program import digests\nprint(*digests())"
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment() | {"PYTHONHASHSEED": seed},
        )
        for seed in "12"
    ]
    (one, said), (other, also_said) = (run.communicate(timeout=120) for run in runs)
    assert one, said
    assert one == other, also_said


class Averages(nnx.Module):
    """A layer whose averages are read as they were before the microbatch."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 4, rngs=rngs)
        self.averages = nnx.List([nnx.BatchStat(jnp.ones(4)) for _ in range(6)])

    def __call__(self, x):
        x = self.layer(x)
        for average in self.averages:
            before = average[...]
            average[...] = 0.9 * before + 0.1 * jax.lax.stop_gradient(x.mean(0))
            x = jnp.sin(x * before)
        return x


@pytest.mark.parametrize("per_call", [1, 2])
def test_whatever_variables_hash_to(per_call):
    """As they do with each trace: their addresses."""
    stages = [mm.Task(f"stage{n}", mesh_slice={"stage": n}) for n in range(2)]
    with mm.MultiMesh(axis_sizes=(2,), axis_names=("stage",), devices=jax.devices()[:2]):
        placement = mm.TaskSharding({mm.path(n): stage for n, stage in enumerate(stages)})
        make = lambda: nnx.List([Averages(nnx.Rngs(n)) for n in range(2)])
        model = mm.jit(make, out_shardings=placement)()

        def grads(model, x):
            grad_fn = nnx.grad(lambda model, x: (model[1](model[0](x)) ** 2).sum())
            loop = dict(dim=0, size=2, argnum=1, schedule="1f1b", per_call=per_call)
            return mm.microbatch(grad_fn, **loop)(model, x)

        programs = [mm.jit(lambda *args: grads(*args)).program(model, jnp.ones((8, 4))) for _ in range(4)]
    assert len({_in_full(program, []) for program in programs}) == 1
