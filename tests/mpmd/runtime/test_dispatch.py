"""How long a call keeps the arrays that it makes."""

from __future__ import annotations

import weakref

import jax.numpy as jnp

import mmnnx as mm
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
