"""Partitioning a function into fragments."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

import mmnnx as mm
from mmnnx.mpmd.partition import fragments
from tests.mpmd.parity import pipeline


class Counted(tuple):
    """A tuple that counts walks through it."""

    walks = 0

    def __iter__(self):
        Counted.walks += 1
        return super().__iter__()


def test_a_loop_of_many_carries_takes_no_more_walks(monkeypatch):
    """Through what its body needs: each weight has a gradient, which is carried."""
    mesh, tasks = pipeline(2)
    plan = fragments._plan
    counted = lambda plan: dataclasses.replace(plan, needs=Counted(plan.needs))
    monkeypatch.setattr(fragments, "_plan", lambda *args, **kwargs: counted(plan(*args, **kwargs)))

    def loss(weights, x):
        for w, task in zip(weights, tasks * (len(weights) // 2)):
            x = mm.task(lambda w, x: w * x, task=task)(w, x)
        return x.sum()

    step, walks = mm.jit(mm.microbatch(jax.grad(loss), 0, 2, argnum=1), mesh=mesh), []
    for count in (2, 8):
        Counted.walks = 0
        step.program([jnp.ones(2)] * count, jnp.ones((4, 2)))
        walks.append(Counted.walks)
    assert 0 < walks[0] == walks[1]
