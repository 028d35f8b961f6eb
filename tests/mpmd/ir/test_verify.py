"""What `Program.verify` refuses: each way to break a valid program, by name of the action and the mesh."""

from __future__ import annotations

import collections
import dataclasses
import functools
import graphlib
import re

import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import mmnnx as mm
from mmnnx.mpmd.ir.instructions import Call, Transfer
from mmnnx.mpmd.ir.verify import VerificationError
from tests import models
from tests.models import make
from tests.mpmd.parity import born, pipeline, place, train_step


@functools.cache
def valid(schedule: str = "1f1b", stages: int = 2) -> mm.Program:
    """A train step of one layer a stage, over three microbatches."""
    mesh, tasks = pipeline(stages)
    with mesh:
        model = born(make(models.MLP, layers=stages), place(tasks, *[[("layers", i)] for i in range(stages)]))
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param))(model)
        step = train_step(mm.jit, models.squared_error, microbatch=2, schedule=schedule)
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
    again = again._replace(frees=(*again.frees, call.frees[0]))
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
    early = call._replace(frees=(*call.frees, weights))
    refused(changed(program, n, early), "on stage0 (devices [0])", f"reads %{weights} ", "after it is freed")


def test_a_result_that_is_freed(program):
    (result,) = program.outputs[0]
    n = next(n for n, i in enumerate(program.instructions) if result in i.outputs)
    i = program.instructions[n]
    refused(
        changed(program, n, i._replace(frees=(*i.frees, result))),
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
        wrong = call._replace(fragment=dataclasses.replace(call.fragment, mesh=other))
        refused(changed(program, number, wrong), *words)


def test_a_transfer_from_the_wrong_mesh(program):
    n = number_of(program, "forward") + 1
    send = program.instructions[n]
    back = send._replace(
        source=send.target,
        target=send.source,
        source_mesh=send.target_mesh,
        target_mesh=send.source_mesh,
    )
    refused(changed(program, n, back), "send", "stage1 -> stage0", "which is on stage0", "on stage1")


def test_a_transfer_to_the_wrong_mesh(program):
    n = number_of(program, "forward") + 1
    send = program.instructions[n]
    astray = send._replace(target=send.source, target_mesh=send.source_mesh)
    refused(changed(program, n, astray), "send", "makes", "on stage0 (devices [0])")


def test_made_twice(program):
    n = number_of(program, "forward")
    call = program.instructions[n]
    unfreed = call._replace(frees=())
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
    kept = call._replace(frees=tuple(s for s in call.frees if s != first))
    refused(changed(program, n, kept), f"%{first} ", "never freed")
    refused(changed(program, n, kept), "stage0 (devices [0])")


def test_freed_by_another_mesh(program):
    """A process drops what is on its own devices: it cannot be told to in an instruction of others."""
    n = number_of(program, "backward", stage=1)
    call = program.instructions[n]
    own = next(s for s in call.frees if s in call.inputs)
    later = number_of(program, "backward", microbatch=2)
    instructions = list(program.instructions)
    instructions[n] = call._replace(frees=tuple(s for s in call.frees if s != own))
    instructions[later] = instructions[later]._replace(frees=(*instructions[later].frees, own))
    refused(
        dataclasses.replace(program, instructions=tuple(instructions)),
        "stage0 backward [microbatch 2] on stage0 (devices [0])",
        f"frees %{own} ",
        "stage1 (devices [1])",
    )


# Meshes that wait for each other


def waits(program) -> dict[int, set[int]]:
    """For each instruction those before it, if each mesh keeps its own order and reads what others made."""
    makes = {s: n for n, i in enumerate(program.instructions) for s in i.outputs}
    last, found = {}, {}
    for n, i in enumerate(program.instructions):
        meshes = (i.mesh,) if isinstance(i, Call) else (i.source_mesh, i.target_mesh)
        found[n] = {makes[s] for s in i.inputs if s in makes} | {last[m] for m in meshes if m in last}
        last.update(dict.fromkeys(meshes, n))
    return found


def circle(message: str) -> list[int]:
    """The numbers of the instructions of the circle that a message names; none if it names no circle."""
    _, found, steps = message.partition("Instructions wait for each other: ")
    return [int(step.split(",")[0]) for step in steps.split(" <- ")] if found else []


def reordered(program, *moves: tuple[int, int]):
    """The program with instructions taken out and put in elsewhere, one after the other."""
    instructions = list(program.instructions)
    for source, target in moves:
        instructions.insert(target, instructions.pop(source))
    return dataclasses.replace(program, instructions=tuple(instructions))


def test_a_circle_is_named_whole(program):
    """The first stage asks for a backward before the forward that it comes of: all on the way are named."""
    first, wrong = number_of(program, "forward", 0), number_of(program, "backward", 0)
    broken = reordered(program, (wrong, first))
    with pytest.raises(VerificationError) as error:
        broken.verify()
    message = str(error.value)
    assert f"instruction {first}, stage0 backward [microbatch 0] on stage0 (devices [0])" in message
    numbers = circle(message)
    names = [broken.describe(broken.instructions[n]) for n in numbers]
    assert numbers[0] == numbers[-1] and len(set(numbers)) == len(numbers) - 1
    assert {
        "stage0 backward [microbatch 0] on stage0 (devices [0])",
        "stage0 forward [microbatch 0] on stage0 (devices [0])",
        "stage1 forward [microbatch 0] on stage1 (devices [1])",
        "stage1 backward [microbatch 0] on stage1 (devices [1])",
    } <= set(names)
    assert {name.split(", ")[0].split("] ")[-1] for name in names if name.startswith("send")} == {
        "stage0 -> stage1",
        "stage1 -> stage0",
    }
    assert all(name in message for name in names)


def test_two_meshes_that_each_keep_an_order_of_their_own():
    """Each mesh receives before it sends: neither is wrong alone, and together they stand still."""
    program = valid("gpipe")
    there = number_of(program, "forward", 2) + 1
    back = number_of(program, "backward", 0, stage=1) + 1
    assert all(isinstance(program.instructions[n], Transfer) for n in (there, back))
    broken = reordered(program, (back, there))
    with pytest.raises(VerificationError) as error:
        broken.verify()
    message = str(error.value)
    assert f"instruction {there}, send" in message and "stage1 -> stage0" in message
    described = [broken.describe(broken.instructions[n]) for n in circle(message)]
    assert any("stage0 -> stage1" in d for d in described) or any("stage1 forward" in d for d in described)
    linked = waits(broken)
    numbers = circle(message)
    assert all(a in linked[b] for a, b in zip(numbers[:-1], numbers[1:], strict=True))


def test_what_is_missing_is_no_circle(program):
    """Where the order is right and a transfer is left out, no circle is told of."""
    n = number_of(program, "forward") + 1
    with pytest.raises(VerificationError) as error:
        changed(program, n).verify()
    assert circle(str(error.value)) == []


def test_a_result_that_is_never_made(program):
    values = (*program.values, program.values[program.outputs[0][0]])
    new = len(program.values)
    broken = dataclasses.replace(program, values=values, outputs=((new,), *program.outputs[1:]))
    refused(broken, "the result", f"%{new} ", "never made")


def test_an_input_that_nobody_gives(program):
    buffer = next(iter(program.inputs))
    fewer = {s: held for s, held in program.inputs.items() if s != buffer}
    refused(dataclasses.replace(program, inputs=fewer), f"reads %{buffer} ", "before it is made")


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
    fine = fine and there == {s for buffers in program.outputs for s in buffers}
    if fine:
        shuffled.verify()
        assert len(shuffled.simulate().events) == len(program.calls)
    else:
        with pytest.raises(VerificationError):
            shuffled.verify()


@given(st.data())
def test_mutilated_programs_are_refused(data):
    """One buffer of one instruction, read, made or freed, exchanged for another: always refused."""
    program = valid()
    n = data.draw(st.integers(0, len(program.instructions) - 1))
    i = program.instructions[n]
    field = data.draw(st.sampled_from([f for f in ("inputs", "outputs", "frees") if getattr(i, f)]))
    buffers = list(getattr(i, field))
    k = data.draw(st.integers(0, len(buffers) - 1))
    buffers[k] = data.draw(st.integers(0, len(program.values) - 1).filter(lambda s: s not in buffers))
    broken = changed(program, n, i._replace(**{field: tuple(buffers)}))
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


def meaning(program: mm.Program, terms: dict) -> list[list[int]]:
    """What each result is, as a number that stands for how it was computed: of which inputs, by what.

    `terms` has the numbers; programs that share it can be compared.
    """
    term = lambda *key: terms.setdefault(key, len(terms))
    buffers = {s: term("input", v, mesh) for s, (v, mesh) in program.inputs.items()}
    for i in program.instructions:
        read = [buffers[s] for s in i.inputs]
        if isinstance(i, Call):
            buffers.update({s: term(i.fragment, n, *read) for n, s in enumerate(i.outputs)})
        else:
            buffers[i.outputs[0]] = read[0]
        for s in i.frees:
            del buffers[s]
    return [[buffers[s] for s in held] for held in program.outputs]


PROGRAMS = [("1f1b", 2), ("gpipe", 3), ("zero-bubble-h1", 3)]


@st.composite
def mutations(draw):
    """A program with up to three of its instructions swapped, moved, dropped or there twice."""
    program = valid(*draw(st.sampled_from(PROGRAMS)))
    instructions = list(program.instructions)
    for kind in draw(st.lists(st.sampled_from(["swap", "move", "drop", "double"]), min_size=1, max_size=3)):
        a, b = (draw(st.integers(0, len(instructions) - 1)) for _ in range(2))
        if kind == "swap":
            instructions[a], instructions[b] = instructions[b], instructions[a]
        elif kind == "move":
            instructions.insert(b, instructions.pop(a))
        elif kind == "drop":
            del instructions[a]
        else:
            instructions.insert(b, instructions[a])
    return program, dataclasses.replace(program, instructions=tuple(instructions))


@given(mutations())
def test_what_is_accepted_computes_the_same(pair):
    """A program that was changed is refused, or makes every result in the same way of the same inputs."""
    program, mutant = pair
    try:
        mutant.verify()
    except VerificationError as error:
        assert any(f"stage{i}" in str(error) for i in range(3)), error
    else:
        terms = {}
        assert meaning(mutant, terms) == meaning(program, terms)
        assert collections.Counter(mutant.instructions) == collections.Counter(program.instructions)
        assert len(mutant.simulate().events) == len(program.calls)


@given(mutations())
def test_circles_are_circles(pair):
    """What a message names as a circle is one; and where there is one among the instructions, it is named."""
    mutant = pair[1]
    try:
        mutant.verify()
    except VerificationError as error:
        numbers, linked = circle(str(error)), waits(mutant)
        assert all(a in linked[b] for a, b in zip(numbers[:-1], numbers[1:], strict=True))
        assert not numbers or numbers[0] == numbers[-1]
        if "before it is made" in str(error) and not numbers:
            assert list(graphlib.TopologicalSorter(linked).static_order())
