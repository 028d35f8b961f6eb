"""How long a call keeps the arrays that it makes, and which it cannot have."""

from __future__ import annotations

import weakref

import jax
import jax.numpy as jnp
import pytest

import mmnnx as mm
from mmnnx import _compat
from mmnnx.mpmd.runtime import dispatch
from mmnnx.mpmd.runtime.steps import make_step
from tests.mpmd.parity import pipeline


def test_arrays_are_dropped_when_nothing_reads_them_any_more(monkeypatch):
    """In a chain over two meshes a step finds what it reads, and nothing that came before that."""
    made: list[weakref.ref] = []
    alive: list[int] = []

    def watched(*args):
        step = make_step(*args)

        def execute(*arrays):
            alive.append(sum(ref() is not None for ref in made))
            results = step.execute(*arrays)
            made.extend(map(weakref.ref, results))
            return results

        return step._replace(execute=execute)

    monkeypatch.setattr(dispatch, "make_step", watched)
    mesh, tasks = pipeline(2)
    first, second = (mm.task(jnp.sin, task=task) for task in tasks)
    with mesh:
        mm.jit(lambda x: second(first(second(first(x)))))(jnp.ones(4))
    assert len(alive) == 7 and max(alive) == 1


def test_types_of_less_than_a_byte():
    """Refused before anything runs, where JAX cannot hand them to what was compiled."""
    ran = []
    mesh = mm.MultiMesh(axis_sizes=(2,), axis_names=("stage",), devices=jax.devices()[:2])
    first, second = (mm.Task(name, mesh_slice={"stage": n}) for n, name in enumerate(("first", "second")))

    def fun(x):
        jax.debug.callback(lambda: ran.append(1))
        rounded = mm.task(lambda x: x.astype(jnp.int4), task=first)(x)
        return mm.task(lambda x: x.astype(jnp.float32) * 2, task=second)(rounded)

    def run():
        return mm.jit(fun, mesh=mesh)(jnp.arange(4.0))

    if _compat.compiled_takes_sub_byte_types():
        assert run().tolist() == [0, 2, 4, 6]
    else:
        with pytest.raises(ValueError, match=r"fun: 'second' reads %\d+ \(int4\[4\]\) .* Keep it as int8"):
            run()
        assert not ran


def test_types_of_less_than_a_byte_in_one_task():
    mesh = mm.MultiMesh(axis_sizes=(2,), axis_names=("stage",), devices=jax.devices()[:2])
    first = mm.Task("first", mesh_slice={"stage": 0})

    def fun(x):
        return mm.task(lambda x: x.astype(jnp.float32) * 2, task=first)(x)

    def run():
        return mm.jit(fun, mesh=mesh)(jnp.arange(4).astype(jnp.int4))

    if _compat.compiled_takes_sub_byte_types():
        assert run().tolist() == [0, 2, 4, 6]
    else:
        with pytest.raises(ValueError, match=r"fun: 'first' reads %\d+ \(int4\[4\].* Keep it as int8"):
            run()
