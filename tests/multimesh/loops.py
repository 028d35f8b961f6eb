"""Layers and loops for tests of microbatch, and what they are compared with."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np

import mmnnx as mm
from multimesh_compat.jax import (
    MultiMesh,
    Task,
    microbatch,
    register_task,
    task,
)

RNG = np.random.default_rng(0)
START = RNG.bit_generator.state
TWO, FOUR = (2, 2, 2), (4, 2, 1)  # stage, batch, model
MESHES = {
    TWO: [(0, 1, 2, 3), (4, 5, 6, 7)],
    FOUR: [(0, 1), (2, 3), (4, 5), (6, 7)],
}
SCHEDULES = ["gpipe", "1f1b", "wavefront", "zero-bubble-h2"]
WHOLE_AND_CUT = ["1f1b", "zero-bubble-h2"]  # what they do to a backward


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def multimesh(sizes):
    return MultiMesh(axis_sizes=sizes, axis_names=("stage", "batch", "model"))


def in_stage(fun, stage, **options):
    """A task on one slice of the MultiMesh."""
    return task(fun, task=Task(f"stage{stage}", mesh_slice={"stage": stage}, **options))


def unsplit(fun, stage, **options):
    """What `in_stage` is compared with."""
    return fun


def by_hand(fun, *args, argnum=0, dim=0, size=2):
    """The sum of what `fun` returns for slices of one argument, in plain JAX."""
    outs = []
    for start in range(0, jax.tree.leaves(args[argnum])[0].shape[dim], size):
        rows = slice(start, start + size)
        piece = jax.tree.map(lambda x: x[(*[slice(None)] * (dim % x.ndim), rows)], args[argnum])  # noqa: B023
        outs.append(jax.jit(fun)(*args[:argnum], piece, *args[argnum + 1 :]))
    return jax.tree.map(lambda *leaves: functools.reduce(operator.add, leaves), *outs)


def assert_same(got, expected, rtol=1e-5):
    """The same tree, shapes and dtypes, and values up to `rtol` of the largest entry of each leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, g), e in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected)):
        where, e = jax.tree_util.keystr(path), jnp.asarray(e)
        assert (g.dtype, g.shape) == (e.dtype, e.shape), where
        g, e = np.asarray(g, np.float64), np.asarray(e, np.float64)
        np.testing.assert_allclose(g, e, rtol=0, atol=rtol * max(1, np.abs(e).max()), err_msg=where)


def meshes_of(program):
    """Device numbers of every mesh on which a program runs something."""
    return sorted({tuple(d.id for d in call.mesh.devices.flat) for call in program.calls})


def check(fun, expected, *args, sizes=TWO, meshes=None, rtol=1e-5, **jit_options):
    """Runs `fun(*args)` twice under mm.jit on a MultiMesh; returns what it ran."""
    with multimesh(sizes):
        jitted = mm.jit(fun, **jit_options)
        program = jitted.program(*args)
        for _ in range(2):
            assert_same(jitted(*args), expected, rtol)
    assert meshes_of(program) == (MESHES[sizes] if meshes is None else meshes)
    return program


def check_loop(fun, plain, *args, argnum, dim=0, size=2, schedule="1f1b", **options):
    """`check` of a loop over `fun`, against `plain` by hand; returns what it ran."""
    loop = microbatch(fun, dim, size, argnum, schedule=schedule)
    program = check(loop, by_hand(plain, *args, argnum=argnum, dim=dim, size=size), *args, **options)
    assert [each.schedule for each in program.loops] == [schedule]
    return program


def register_layers(**options):
    """Scopes layer0, layer1, ... are tasks of the stages of these numbers."""
    register_task(
        r"layer\d+",
        callback=lambda name, backprop: Task(mesh_slice={"stage": int(name[5:])}, **options),
    )


def layers(params, x):
    for i, (w, b) in enumerate(params):
        with jax.named_scope(f"layer{i}"):
            x = jnp.tanh(x @ w + b)
    return x


def loss_fn(params, batch):
    x, y = batch
    return jnp.sum((layers(params, x) - y) ** 2)


GRAD = jax.value_and_grad(loss_fn)


def make_params(count):
    return [(normal(4, 4), normal(4)) for _ in range(count)]


def make_batch(rows=8):
    return normal(rows, 4), normal(rows, 4)
