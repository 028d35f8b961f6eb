"""The program that a function becomes, read as data: what crosses between meshes, what each mesh holds and
when.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.mpmd.jit import stages
from tests import models
from tests.models import make
from tests.mpmd.parity import born, pipeline, place, train_step
from tests.slow import all_but

STAGES, MICROBATCH, LENGTH, WIDTH, VOCAB = 4, 2, 6, 16, 32


def transformer_program(microbatches=8, schedule="1f1b", tied=False, dtype=None):
    """The program of a train step of a 4-layer pre-norm transformer over 4 stages, placed by state alone."""
    return _transformer_program(microbatches, schedule, tied, dtype)


@functools.cache
def _transformer_program(microbatches, schedule, tied, dtype):
    mesh, tasks = pipeline(STAGES)
    ends = ["norm"] if tied else ["norm", "head"]
    placement = place(
        tasks, ["embed", ("blocks", 0)], [("blocks", 1)], [("blocks", 2)], [("blocks", 3), *ends]
    )
    with mesh:
        model = born(make(models.Transformer, layers=4, tied=tied, dtype=dtype), placement)
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param))(model)
        step = train_step(mm.jit, models.cross_entropy, microbatch=MICROBATCH, schedule=schedule)
        return mesh, step.program(model, optimizer, models.tokens(rows=microbatches * MICROBATCH))


def stage_of(submesh, mesh):
    """The number of the stage that a mesh is."""
    return list(mesh.devices.reshape(STAGES, -1)[:, 0]).index(submesh.devices.flat[0])


def crossings(program, mesh):
    """The transfers between stages, by (source, target, microbatch)."""
    found = collections.defaultdict(list)
    for transfer in program.transfers:
        source, target = stage_of(transfer.source_mesh, mesh), stage_of(transfer.target_mesh, mesh)
        assert source != target, transfer
        found[source, target, transfer.microbatch].append(transfer)
    return found


@pytest.fixture(scope="module")
def program():
    return transformer_program()


def test_one_activation_and_one_gradient_cross_each_boundary(program):
    """Placed by state alone: one array forward, one back, per boundary and microbatch, nothing else."""
    mesh, program = program
    found = {key: items for key, items in crossings(program, mesh).items() if key[2] is not None}
    expected = {
        (source, target, m): 1
        for m in range(8)
        for s in range(STAGES - 1)
        for source, target in ((s, s + 1), (s + 1, s))
    }
    assert {key: len(items) for key, items in found.items()} == expected
    for items in found.values():
        (transfer,) = items
        assert tuple(transfer.shape) == (MICROBATCH, LENGTH, WIDTH)
        assert transfer.dtype == jnp.float32
        assert transfer.nbytes == MICROBATCH * LENGTH * WIDTH * 4


def test_no_weights_and_no_masks_cross(program):
    """Outside the loop, an untied model sends nothing that is large between stages: parameters stay where
    they are.
    """
    mesh, program = program
    for (source, target, m), items in crossings(program, mesh).items():
        if m is None:
            assert all(transfer.nbytes <= 64 for transfer in items), (source, target, items)


def test_a_tied_embedding_is_sent_once_a_step():
    """The table goes to the last stage once, and its gradient comes home once, however many microbatches
    there are.
    """
    mesh, program = transformer_program(tied=True)
    tables = [
        (source, target, m)
        for (source, target, m), items in crossings(program, mesh).items()
        for transfer in items
        if tuple(transfer.shape) == (VOCAB, WIDTH)
    ]
    assert sorted(tables, key=str) == sorted([(0, 3, None), (3, 0, None)], key=str)


@pytest.mark.slow
def test_casts_of_weights_happen_once():
    """A parameter cast to bfloat16 for use elsewhere is cast and sent before the loop."""
    mesh, program = transformer_program(tied=True, dtype=jnp.bfloat16)
    tables = [
        t for items in crossings(program, mesh).values() for t in items if tuple(t.shape) == (VOCAB, WIDTH)
    ]
    assert len(tables) == 2 and all(t.microbatch is None for t in tables)


def loop_calls(program, mesh, stage):
    """(phase, microbatch) of the calls in the loop that one stage runs, in its order."""
    return [
        (call.phase, call.microbatch)
        for call in program.calls
        if call.microbatch is not None and stage_of(call.mesh, mesh) == stage
    ]


def residuals(program, mesh):
    """For each stage, the largest number of microbatches whose residuals it holds at once.

    A residual is what a forward leaves on its mesh for a backward of the same microbatch to read.
    """
    forward, kept = {}, set()
    for call in program.calls:
        if call.phase == "forward":
            forward.update(dict.fromkeys(call.outputs, (stage_of(call.mesh, mesh), call.microbatch)))
        elif call.phase.startswith("backward"):
            own = {
                buffer for buffer in call.inputs if forward.get(buffer, (None, None))[1] == call.microbatch
            }
            kept |= own
    held = collections.Counter()
    most = collections.Counter()
    for instruction in program.instructions:
        for buffer in set(instruction.outputs) & kept:
            held[forward[buffer]] += 1
        for stage in range(STAGES):
            most[stage] = max(most[stage], sum(1 for (s, _), n in held.items() if s == stage and n))
        for buffer in set(instruction.frees) & kept:
            held[forward[buffer]] -= 1
    assert not any(held.values()), "residuals that are never freed"
    return [most[stage] for stage in range(STAGES)]


@pytest.mark.parametrize("microbatches", [2, 8, pytest.param(4, marks=pytest.mark.slow)])
def test_live_residuals_of_1f1b(microbatches):
    """Stage s of S holds the residuals of at most S - s microbatches."""
    mesh, program = transformer_program(microbatches)
    most = residuals(program, mesh)
    assert all(n <= min(STAGES - s, microbatches) for s, n in enumerate(most)), most
    assert most[0] == min(STAGES, microbatches), "the first stage would wait where it need not"


def test_live_residuals_of_gpipe():
    """GPipe holds those of all microbatches, on every stage but the last, which may do both at once."""
    mesh, program = transformer_program(schedule="gpipe")
    assert residuals(program, mesh)[:-1] == [8] * (STAGES - 1)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_order_of_a_schedule(schedule):
    """Warm-up forwards, then one forward and one backward in turn, then the rest; or all and then all."""
    mesh, program = transformer_program(schedule=schedule)
    for stage in range(STAGES - 1):
        calls = [c for c in loop_calls(program, mesh, stage) if c[0] != "none"]
        ahead = STAGES - stage - 1 if schedule == "1f1b" else 8
        expected = [("forward", m) for m in range(ahead)]
        for m in range(8 - ahead):
            expected += [("forward", ahead + m), ("backward", m)]
        expected += [("backward", m) for m in range(8 - ahead, 8)]
        assert calls == expected, f"stage {stage}"


def test_every_stage_runs_every_microbatch_once(program):
    mesh, program = program
    for stage in range(STAGES):
        calls = loop_calls(program, mesh, stage)
        assert len(calls) == len(set(calls)), (
            f"stage {stage} has a phase of a microbatch in several fragments"
        )
        assert {m for phase, m in calls if phase == "backward"} == set(range(8))


def test_no_more_programs_for_more_microbatches():
    """Fragments per microbatch do not grow with their number, and each is compiled once."""
    counts = {}
    for microbatches in (2, 8):
        _, program = transformer_program(microbatches)
        counts[microbatches] = len(program.fragments)
    assert counts[2] == counts[8]


COMPILED = "/jax/core/compile/backend_compile_duration"


def test_compilations_do_not_grow_with_microbatches(compiled_anew):
    """XLA compiles as many programs for sixteen microbatches as for four, and none in a second step."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    mesh, tasks = pipeline(2)
    placement = place(tasks, [("layers", range(0, 2))], [("layers", range(2, 4))])
    counts = {}
    with mesh:
        for microbatches in (4, 16):
            model = born(make(models.MLP), placement)
            optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param))(model)
            batch = models.vectors(rows=2 * microbatches)
            step = train_step(mm.jit, models.squared_error, microbatch=2)
            compiled.clear()
            step(model, optimizer, batch)
            counts[microbatches] = compiled.count(COMPILED)
            compiled.clear()
            step(model, optimizer, batch)
            assert COMPILED not in compiled
    assert 0 < counts[16] <= counts[4]


def test_one_mesh_is_one_fragment():
    """What touches one mesh only is one XLA program, and moves nothing."""
    mesh, tasks = pipeline(2)
    placement = place(tasks[:1], ["layers"])
    with mesh:
        model = born(make(models.MLP), placement)
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param))(model)
        batch = jax.device_put(models.vectors(), NamedSharding(mesh.slice(stage=0), P()))
        for microbatch in (None, 2):
            step = train_step(mm.jit, models.squared_error, microbatch=microbatch)
            program = step.program(model, optimizer, batch)
            assert len(program.calls) == len(program.fragments) == 1, str(program)
            assert not program.transfers, str(program)


def test_one_mesh_without_any_placement():
    program = train_step(mm.jit, models.squared_error, microbatch=2).program(
        make(models.MLP)(), nnx.Optimizer(make(models.MLP)(), optax.sgd(0.1), wrt=nnx.Param), models.vectors()
    )
    assert len(program.calls) == 1 and not program.transfers


def test_a_program_prints_line_by_line(program):
    """Which fragment runs where and for which microbatch, each transfer with its shape, dtype and bytes."""
    text = str(program[1])
    for i in range(STAGES):
        assert f"stage{i}" in text
    assert "forward" in text and "backward" in text
    calls = len(program[1].calls) + len(program[1].transfers)
    assert len(text.splitlines()) >= calls
    transfers = [line for line in text.splitlines() if re.search(rf"\[{MICROBATCH},{LENGTH},{WIDTH}\]", line)]
    assert len(transfers) >= 2 * 8 * (STAGES - 1)
    assert any(str(MICROBATCH * LENGTH * WIDTH * 4) in line for line in transfers)
    assert "free" in text


def test_a_printed_program_says_which_slot_is_given_what(program):
    """Every array of the arguments, by its path, and the mesh where it is read."""
    text = str(program[1])
    given = text[text.index("  stage0 is given %") :]
    for buffer, name in program[1].arguments.items():
        assert f"%{buffer} {name}" in " ".join(given.split())
    assert max(map(len, given.splitlines())) <= 110
    names = set(program[1].arguments.values())
    assert {"0.blocks.1.norm1.scale", "a constant", "1.step"} < names and len(names) > 20, names
    assert any(name.split(".")[0] == "2" for name in names), names


def test_a_program_is_made_without_running(program):
    """program() neither runs nor changes anything, and verify() finds nothing wrong."""
    mesh, tasks = pipeline(2)
    placement = place(tasks, [("layers", range(0, 2))], [("layers", range(2, 4))])
    with mesh:
        model = born(make(models.MLP), placement)
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param))(model)
        before = jax.tree.leaves(nnx.state(model))
        step = train_step(mm.jit, models.squared_error, microbatch=2)
        step.program(model, optimizer, models.vectors()).verify()
        after = jax.tree.leaves(nnx.state(model))
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert int(optimizer.step[...]) == 0
    program[1].verify()


def without(items, index):
    return (*items[:index], *items[index + 1 :])


def broken_programs(program):
    """Programs that each have one thing wrong, and what verify() should say of it."""
    instructions = program.instructions
    first_send = next(n for n, i in enumerate(instructions) if i in program.transfers)
    yield "reads", without(instructions, first_send)
    reader = next(
        n for n, i in enumerate(instructions) if set(i.inputs) & set(instructions[first_send].outputs)
    )
    moved = list(instructions)
    moved.insert(first_send, moved.pop(reader))
    yield "reads", tuple(moved)
    frees = next(n for n, i in enumerate(instructions) if i.frees and set(i.frees) & set(i.inputs))
    keeps = instructions[frees]._replace(frees=())
    yield "never freed", (*instructions[:frees], keeps, *instructions[frees + 1 :])
    twice = instructions[-1]._replace(frees=(*instructions[-1].frees, *instructions[frees].frees))
    yield "free", (*instructions[:-1], twice)
    yield "second time", (*instructions[: frees + 1], *instructions[frees:])


def test_verify_refuses_broken_programs(program):
    """A missing transfer, a call before its input, a leak, a double free: each is named."""
    for words, instructions in broken_programs(program[1]):
        with pytest.raises(ValueError, match=rf"{words}|before|made"):
            dataclasses.replace(program[1], instructions=tuple(instructions)).verify()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_simulation(schedule):
    """Simulated with unit costs, no mesh does two things at once, and microbatches pass in order."""
    _, program = transformer_program(microbatches=8, schedule=schedule)
    events = list(program.simulate().events)
    by_mesh = collections.defaultdict(list)
    for event in events:
        assert event.start <= event.end
        by_mesh[event.mesh].append(event)
    assert len(by_mesh) == STAGES
    for row in by_mesh.values():
        row.sort(key=lambda event: (event.start, event.end))
        assert all(a.end <= b.start for a, b in zip(row[:-1], row[1:], strict=True))
    loop = [event for event in events if event.microbatch is not None]
    assert {event.phase for event in loop} >= {"forward", "backward"}
    assert {event.microbatch for event in loop} == set(range(8))
    # A microbatch reaches a stage only after it left the one before.
    ends = {(e.mesh, e.microbatch): e.end for e in loop if e.phase == "forward"}
    order = sorted({mesh for mesh, m in ends}, key=lambda mesh: ends[mesh, 0])
    for before, after in zip(order[:-1], order[1:], strict=True):
        assert all(ends[before, m] < ends[after, m] for m in range(8))
    # 8 microbatches over 4 stages: 8 forwards and 8 backwards a stage, and bubbles of 3 of each.
    span = max(e.end for e in loop) - min(e.start for e in loop)
    assert span == 3 * (8 + STAGES - 1)


@pytest.mark.parametrize("per_stage", all_but([2], [1, 2]))
def test_a_residual_chain_sends_one_array_each_way(per_stage):
    """What a block adds to is added to where the block is: nothing skips a stage."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.RMSNorm(8, rngs=rngs)
            self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.relu(self.up(self.norm(x))))

    def loss_fn(blocks, batch):
        x, y = batch
        for block in blocks:
            x = block(x)
        return ((x - y) ** 2).mean()

    mesh, tasks = pipeline(4, 1)
    make = lambda: nnx.List(Block(rngs) for rngs in [nnx.Rngs(0)] for _ in range(4 * per_stage))
    rules = {mm.path(n): (tasks[n // per_stage], P()) for n in range(4 * per_stage)}
    with mesh:
        blocks = born(make, mm.TaskSharding(rules))
        grad_fn = mm.microbatch(nnx.value_and_grad(loss_fn), 0, 2, argnum=1, schedule="1f1b")
        program = mm.jit(lambda m, b: grad_fn(m, b)).program(blocks, (np.ones((6, 8), np.float32),) * 2)
    crossings = Counter((t.source, t.target) for t in program.transfers)
    there = {(f"stage{n}", f"stage{n + 1}"): 3 for n in range(3)}
    assert crossings == there | {(b, a): n for (a, b), n in there.items()}


def test_the_program_of_a_call_that_was_made_is_at_hand(monkeypatch):
    """To look at it cuts nothing again; arguments of other types, and abstract ones, have their own."""
    mesh, tasks = pipeline(2)
    double = mm.jit(lambda model, x: model(x), mesh=mesh)
    with mesh:
        model = born(make(models.MLP, layers=2), place(tasks, [("layers", 0)], [("layers", 1)]))
    x = models.vectors()["x"]
    made = []
    split = stages.split
    monkeypatch.setattr(stages, "split", lambda *args: made.append(args) or split(*args))
    double(model, x)
    program = double.program(model, x)
    assert len(made) == 1 and len(program.calls) == 2
    double.program(model, x[:1])
    assert len(made) == 2
    double.program(model, jax.ShapeDtypeStruct(x.shape, x.dtype))
    assert len(made) == 3
    double(model, x)
    assert len(made) == 3
