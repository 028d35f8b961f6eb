"""What `Program.verify` refuses: each way to break a valid program, by name of the action and the mesh."""

from __future__ import annotations

import dataclasses
import functools
import re

import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import mmnnx as mm
from mmnnx.mpmd.program import Call, Transfer, VerificationError
from tests import models
from tests.models import make
from tests.mpmd.parity import born, pipeline, place, train_step


@functools.cache
def valid() -> mm.Program:
    """A train step over two stages and three microbatches."""
    mesh, tasks = pipeline(2)
    with mesh:
        model = born(make(models.MLP, layers=2), place(tasks, [("layers", 0)], [("layers", 1)]))
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param))(model)
        step = train_step(mm.jit, models.squared_error, microbatch=2)
        return step.program(model, optimizer, models.vectors(rows=6))


@pytest.fixture
def program():
    return valid()


def changed(program, number, *instructions):
    """The program with one instruction replaced by others."""
    before, after = program.instructions[:number], program.instructions[number + 1 :]
    return dataclasses.replace(program, instructions=(*before, *instructions, *after))


def number_of(program, phase, microbatch=1, stage=0):
    """The number of a call."""
    (found,) = (
        n
        for n, i in enumerate(program.instructions)
        if isinstance(i, Call) and i.name == f"stage{stage} {phase}" and i.microbatch == microbatch
    )
    return found


def refused(program, *words):
    """verify() refuses the program, and says all these words, in this order."""
    with pytest.raises(VerificationError, match="(?s)" + ".*".join(map(re.escape, words))):
        program.verify()


def test_what_mm_jit_makes_is_valid(program):
    program.verify()


def test_verification_errors_are_value_errors():
    assert issubclass(VerificationError, ValueError)


def test_a_dropped_call(program):
    """It is named, with its microbatch and mesh."""
    n = number_of(program, "forward")
    refused(changed(program, n), "stage0 forward of microbatch 1 on stage0", "is missing")


def test_a_dropped_transfer(program):
    n = number_of(program, "forward") + 1
    assert isinstance(program.instructions[n], Transfer)
    refused(changed(program, n), "stage1 forward [microbatch 1] on stage1 (devices [1])", "before it is made")


def test_swapped_order(program):
    """A forward before the transfer that brings what it reads."""
    forward = number_of(program, "forward", stage=1)
    call = program.instructions[forward]
    send = next(
        n
        for n, i in enumerate(program.instructions)
        if set(i.outputs) & set(call.inputs) - {0} and isinstance(i, Transfer)
    )
    moved = list(program.instructions)
    moved[send], moved[forward] = moved[forward], moved[send]
    refused(
        dataclasses.replace(program, instructions=tuple(moved)),
        f"instruction {send}, stage1 forward [microbatch 1] on stage1 (devices [1])",
        "before it is made",
    )


def test_a_double_free(program):
    """Freed where it is last read, and once more later."""
    n = number_of(program, "backward")
    call = program.instructions[n]
    assert call.frees
    later = number_of(program, "backward", microbatch=2)
    again = program.instructions[later]
    again = dataclasses.replace(again, frees=(*again.frees, call.frees[0]))
    refused(
        changed(program, later, again),
        "stage0 backward [microbatch 2] on stage0 (devices [0])",
        f"frees %{call.frees[0]} ",
        "not there",
    )


def test_freed_before_its_last_use(program):
    n = number_of(program, "forward")
    call = program.instructions[n]
    weights = next(s for s in call.inputs if s not in call.frees)
    early = dataclasses.replace(call, frees=(*call.frees, weights))
    refused(changed(program, n, early), "on stage0 (devices [0])", f"reads %{weights} ", "after it is freed")


def test_a_result_that_is_freed(program):
    (result,) = program.outputs[0]
    n = next(n for n, i in enumerate(program.instructions) if result in i.outputs)
    i = program.instructions[n]
    refused(
        changed(program, n, dataclasses.replace(i, frees=(*i.frees, result))),
        f"instruction {n}",
        f"(devices {[d.id for d in i.mesh.devices.flat]})",
        f"frees %{result} ",
        "which is a result",
    )


def test_a_call_on_the_wrong_mesh(program):
    """Work of the first stage run on the second: in the loop it is missing, elsewhere it cannot read."""
    n = number_of(program, "forward")
    other = program.instructions[number_of(program, "forward", stage=1)].mesh
    for number, words in ((n, ["is missing"]), (0, ["which is on stage0", "on stage1"])):
        call = program.instructions[number]
        wrong = dataclasses.replace(call, fragment=dataclasses.replace(call.fragment, mesh=other))
        refused(changed(program, number, wrong), *words)


def test_a_transfer_from_the_wrong_mesh(program):
    n = number_of(program, "forward") + 1
    send = program.instructions[n]
    back = dataclasses.replace(
        send,
        source=send.target,
        target=send.source,
        source_mesh=send.target_mesh,
        target_mesh=send.source_mesh,
    )
    refused(changed(program, n, back), "send", "stage1 -> stage0", "which is on stage0", "on stage1")


def test_a_transfer_to_the_wrong_mesh(program):
    n = number_of(program, "forward") + 1
    send = program.instructions[n]
    astray = dataclasses.replace(send, target=send.source, target_mesh=send.source_mesh)
    refused(changed(program, n, astray), "send", "makes", "on stage0 (devices [0])")


def test_made_twice(program):
    n = number_of(program, "forward")
    call = program.instructions[n]
    unfreed = dataclasses.replace(call, frees=())
    refused(
        changed(program, n, unfreed, call),
        "stage0 forward of microbatch 1 on stage0 (devices [0])",
        "is there 2 times",
    )


def test_never_freed(program):
    """What is left behind, and on which mesh."""
    n = number_of(program, "backward")
    call = program.instructions[n]
    (first, *_) = call.frees
    kept = dataclasses.replace(call, frees=tuple(s for s in call.frees if s != first))
    refused(changed(program, n, kept), f"%{first} ", "never freed")
    refused(changed(program, n, kept), "stage0 (devices [0])")


def test_a_result_that_is_never_made(program):
    values = (*program.values, program.values[program.outputs[0][0]])
    new = len(program.values)
    broken = dataclasses.replace(program, values=values, outputs=((new,), *program.outputs[1:]))
    refused(broken, "the result", f"%{new} ", "never made")


def test_an_input_that_nobody_gives(program):
    slot = next(iter(program.inputs))
    fewer = {s: held for s, held in program.inputs.items() if s != slot}
    refused(dataclasses.replace(program, inputs=fewer), f"reads %{slot} ", "before it is made")


@given(st.data())
def test_shuffled_programs_are_valid_or_refused(data):
    """Any order either runs (each reads what is there) or is refused; there is no third way to end."""
    program = valid()
    numbers = list(range(len(program.instructions)))
    if data.draw(st.booleans(), label="all"):
        numbers = data.draw(st.permutations(numbers))
    else:
        for a, b in data.draw(st.lists(st.tuples(*[st.sampled_from(numbers)] * 2), max_size=3)):
            numbers[a], numbers[b] = numbers[b], numbers[a]
    shuffled = dataclasses.replace(program, instructions=tuple(program.instructions[n] for n in numbers))
    there, fine = set(program.inputs), True
    for i in shuffled.instructions:
        fine = fine and set(i.inputs) <= there
        there = (there | set(i.outputs)) - set(i.frees)
    fine = fine and there == {s for slots in program.outputs for s in slots}
    if fine:
        shuffled.verify()
        assert len(shuffled.simulate().events) == len(program.calls)
    else:
        with pytest.raises(VerificationError):
            shuffled.verify()


@given(st.data())
def test_mutilated_programs_are_refused(data):
    """One slot of one instruction, read, made or freed, exchanged for another: always refused."""
    program = valid()
    n = data.draw(st.integers(0, len(program.instructions) - 1))
    i = program.instructions[n]
    field = data.draw(st.sampled_from([f for f in ("inputs", "outputs", "frees") if getattr(i, f)]))
    slots = list(getattr(i, field))
    k = data.draw(st.integers(0, len(slots) - 1))
    slots[k] = data.draw(st.integers(0, len(program.values) - 1).filter(lambda s: s not in slots))
    broken = changed(program, n, dataclasses.replace(i, **{field: tuple(slots)}))
    if field == "inputs":  # it may read another value that is there; a value without a reader is still freed
        try:
            broken.verify()
        except VerificationError:
            pass
        else:
            broken.simulate()
    else:
        with pytest.raises(VerificationError):
            broken.verify()
