"""What always follows each other on a mesh runs as one program: which calls, and which not."""

from __future__ import annotations

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mmnnx as mm
from mmnnx import _compat
from mmnnx.mpmd.emit.merge import merge
from mmnnx.mpmd.ir.fragments import Fragment
from mmnnx.mpmd.ir.instructions import Call, Control, Transfer
from tests import models
from tests.models import make
from tests.mpmd.parity import ADAMW, assert_parity, born_with_optimizer, pipeline, place
from tests.slow import few


@functools.cache
def program_of(schedule: str, stages: int = 3, **loop) -> mm.Program:
    """The program of a train step of a chain, a layer a stage, which is right as it runs."""
    mesh, tasks = pipeline(stages)
    return assert_parity(
        make(models.MLP, layers=stages),
        models.squared_error,
        models.vectors(),
        place(tasks, *[[("layers", n)] for n in range(stages)]),
        mesh=mesh,
        microbatch=2,
        schedule=schedule,
        steps=1,
        **loop,
    )


def calls(program: mm.Program) -> Counter[str]:
    return Counter(c.name for c in program.calls if c.microbatch is not None)


def test_a_while_has_no_call_for_counters_alone():
    """Its iterations follow each other anyway."""
    mesh, tasks = pipeline(2)

    def train(model, optimizer, batch):
        graph, state = nnx.split((model, optimizer))

        def one(carry):
            model, optimizer = nnx.merge(graph, carry[1], copy=True)
            loss, grads = nnx.value_and_grad(models.squared_error)(model, batch)
            optimizer.update(model, grads)
            return carry[0] + 1, nnx.state((model, optimizer)), loss

        goes_on = lambda carry: (carry[0] < 3) & (carry[2] > 1e-6)
        _, state, _ = jax.lax.while_loop(goes_on, one, (0, state, jnp.float32(1)))
        nnx.update((model, optimizer), state)

    with mesh:
        model, optimizer = born_with_optimizer(
            make(models.MLP), place(tasks, [("layers", range(2))], [("layers", range(2, 4))]), ADAMW
        )
        program = mm.jit(train).program(model, optimizer, models.vectors())
    instructions = merge(program)[0].instructions
    first, last = (n for n, i in enumerate(instructions) if isinstance(i, Control) and i.kind != "repeat")
    iteration = [i for i in instructions[first:last] if isinstance(i, Call)]
    assert len(iteration) == 4


@few(1)
@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b"])
def test_the_last_stage_runs_forward_and_backward_at_once(schedule):
    program = program_of(schedule)
    merged, numbers = merge(program)
    merged.verify()
    count = calls(program)["stage0 forward"]
    assert count > 2 and calls(merged) == {
        "stage0 forward": count,
        "stage0 backward": count,
        "stage1 forward": count,
        "stage1 backward": count,
        "stage2 forward and stage2 backward": count,
    }
    assert [program.describe(program.instructions[n]) for n in numbers if n not in seconds(program)] == [
        program.describe(i).replace(" and stage2 backward", "") for i in merged.instructions
    ]


def seconds(program: mm.Program) -> set[int]:
    return {
        n for n, i in enumerate(program.instructions) if isinstance(i, Call) and i.name == "stage2 backward"
    }


def test_nothing_is_kept_between_them():
    """What the backward alone reads of the forward is no result of the one program, and in no buffer."""
    program = program_of("1f1b")
    last = [s for s in program.residuals if program.names[program.values[s][1]] == "stage2"]
    made = {s for c in program.calls for s in c.outputs}
    merged, _ = merge(program)
    used = {s for i in merged.instructions for s in (*i.inputs, *i.outputs, *i.frees)}
    assert (made & set(last)) and not (made & set(last) & used)
    inside = {v for c in merged.calls for e in c.fragment.jaxpr.eqns for v in e.outvars}
    assert all(program.values[s][0] in inside for s in made & set(last))


def test_work_of_both_is_done_once():
    """Equations that are copied into both are there once, and no variable is made twice."""
    merged, _ = merge(program_of("1f1b"))
    for fragment in merged.fragments:
        made = [v for e in fragment.jaxpr.eqns for v in e.outvars]
        assert len(made) == len(set(made)) and not set(made) & set(fragment.invars)


def test_under_gpipe_all_forwards_come_first():
    program = program_of("gpipe")
    merged, numbers = merge(program)
    assert merged.instructions == program.instructions and numbers == list(range(len(numbers)))


@pytest.mark.parametrize("sent", [False, True])
def test_what_is_sent_is_not_kept_back(sent):
    """Two calls side by side are one, unless another mesh waits for what the first one makes."""
    here, there = (jax.sharding.Mesh(jax.devices()[n : n + 1], ("x",)) for n in range(2))
    jaxpr = jax.make_jaxpr(lambda x: jnp.cos(jnp.sin(x)))(1.0).jaxpr
    x, y, z = *jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)
    one, other = (
        Fragment(name, "task", here, "forward", 0, _compat.close_jaxpr([read], [made], [e]), (read,), (made,))
        for name, read, made, e in zip(("one", "other"), (x, y), (y, z), jaxpr.eqns)
    )
    first, second = Call(one, 0, (0,), (1,)), Call(other, 0, (1,), (2,))
    transfer = Transfer("here", "there", (), jnp.dtype("float32"), 0, here, there, (1,), (3,))
    program = mm.Program(
        instructions=(first, *[transfer] * sent, second),
        inputs={0: (x, here)},
        outputs=((1,), (2,)),
        values=((x, here), (y, here), (z, here), (y, there)),
        names={here: "here", there: "there"},
    )
    merged, _ = merge(program)
    assert [c.name for c in merged.calls] == (["one", "other"] if sent else ["one and other"])


def test_two_parts_of_a_backward_and_their_forward():
    """With zero bubble the last stage's forward and input half are one where each weight half comes later."""
    program = program_of("zero-bubble-h1")
    merged, _ = merge(program)
    merged.verify()
    names = calls(merged)
    assert sum(calls(program).values()) - sum(names.values()) == calls(program)["stage2 forward"]
    assert "stage2 forward and stage2 backward-input" in names


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble-h1"])
def test_after_the_loop_each_mesh_runs_one_program(schedule):
    """The optimizer's work on all arrays of a mesh, and no transfer; before the loop it is one as well."""
    program = program_of(schedule)
    inside = [n for n, i in enumerate(program.instructions) if i.microbatch is not None]
    for outside in (program.instructions[: inside[0]], program.instructions[inside[-1] + 1 :]):
        assert all(isinstance(i, Call) for i in outside)
        assert sorted(program.names[i.mesh] for i in outside) == ["stage0", "stage1", "stage2"]


@pytest.mark.slow
def test_a_profile_is_of_the_program_as_it_prints():
    mesh, tasks = pipeline(2)
    with mesh:
        placement = place(tasks, [("layers", 0)], [("layers", 1)])
        model = mm.jit(make(models.MLP, layers=2), out_shardings=placement)()
        step = mm.jit(
            mm.microbatch(nnx.value_and_grad(models.squared_error), dim=0, size=2, argnum=1, schedule="1f1b")
        )
        program = step.program(model, models.vectors())
        costs = program.profile(model, models.vectors()).costs
    assert {"stage1 forward", "stage1 backward"} <= set(costs.calls)
