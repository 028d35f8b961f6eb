"""A while in a program: what is in its iterations, what it keeps and drops, and who overwrites what."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.mpmd.compile import donation
from mmnnx.mpmd.emit.merge import merge
from mmnnx.mpmd.ir.instructions import Call, Control, Transfer
from mmnnx.mpmd.ir.verify import VerificationError
from tests.mpmd.parity import assert_same, pipeline

ROWS = 64


def fill(a, b, cache, x, n):
    """Both tasks compute one row, which the first keeps."""

    def body(c):
        i, x, cache = c
        x = jnp.tanh(jnp.tanh(x @ a) @ b)
        return i + 1, x, lax.dynamic_update_index_in_dim(cache, x @ a, i, 0)

    i, x, cache[...] = lax.while_loop(lambda c: c[0] < n, body, (0, x, cache[...]))
    return i, x


def arguments(mesh, n=0):
    here, there = (NamedSharding(mesh.slice(stage=i), P()) for i in range(2))
    a, b = np.random.default_rng(0).normal(size=(2, 4, 4)).astype(np.float32)
    cache = nnx.Variable(jax.device_put(np.zeros((ROWS, 4), np.float32), here))
    return jax.device_put(a, here), jax.device_put(b, there), cache, np.ones(4, np.float32), np.int32(n)


@functools.cache
def program_of(fun, **options):
    mesh, _ = pipeline(2)
    with mesh:
        return mm.jit(fun, **options).program(*arguments(mesh))


def controls(program):
    """The numbers of the instructions of the one while: where it begins, goes back, and ends."""
    found = {i.kind: n for n, i in enumerate(program.instructions) if isinstance(i, Control)}
    return found["while"], found["repeat"], found["end"]


# What an iteration does


def test_what_does_not_change_is_sent_once():
    """What the body reads of before the loop is there when it begins, also if it never runs."""

    first = mm.task(lambda a, b, x: jnp.tanh(x @ a) @ b, mesh_slice={"stage": 0})

    def run(a, b, cache, x, n):  # `b` lives on the second mesh, and is read by the first
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, first(a, b, c[1])), (0, x))

    program = program_of(run)
    begin, back, _ = controls(program)
    before, inside = program.instructions[:begin], program.instructions[begin : back + 1]
    changing = {s for i in inside for s in i.outputs}  # carries too
    assert any(isinstance(i, Transfer) for i in before)
    assert changing.issuperset(s for i in inside if isinstance(i, Transfer) for s in i.inputs)


def test_what_does_not_change_is_computed_once():
    def run(a, b, cache, x, n):
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] @ (a @ a.T) @ b), (0, x))

    program = program_of(run)
    begin, back, _ = controls(program)
    sides = [
        [e.primitive.name for i in part if isinstance(i, Call) for e in i.fragment.jaxpr.eqns].count(
            "dot_general"
        )
        for part in (program.instructions[:begin], program.instructions[begin:back])
    ]
    assert sides == [1, 2]


def test_calls_that_follow_each_other_are_one():
    """In an iteration, but not across its ends."""

    def run(a, b, cache, x, n):
        body = lambda c: (c[0] + 1, jnp.tanh(c[1] @ a) @ b)
        i, x = lax.while_loop(lambda c: c[0] < n, body, (0, jnp.tanh(x @ b)))
        return i, x @ b.T

    program = program_of(run)
    merged, _ = merge(program)
    begin, back, end = controls(merged)
    made = [
        {v.aval.shape for v in i.fragment.outvars}
        for i in merged.instructions[begin:back]
        if isinstance(i, Call)
    ]
    assert {(), (4,)} in made  # the second half of the body, and the counter there
    assert merged.instructions[:begin] == program.instructions[:begin]
    assert merged.instructions[end:] == program.instructions[controls(program)[2] :]
    assert len(program.calls) - len(merged.calls) == 1


def test_it_prints():
    program = program_of(fill)
    begin, back, end = controls(program)
    text = str(program).splitlines()
    lines = {int(line[:5]): line[7:] for line in text if line[:5].strip().isdigit()}
    condition = program.instructions[begin].inputs[0]
    assert lines[begin].startswith(f"while %{condition} of stage")
    assert lines[back].startswith("back to the while: %") and f"-> %{condition}" in lines[back]
    assert lines[end].startswith("end of the while; frees %")


# Memory


@pytest.mark.parametrize("donated", [False, True])
def test_carries_are_overwritten(donated):
    """A new value of a carry takes the place of the old one, and where it is donated that of the argument."""
    program = program_of(fill, **({"donate_argnums": 2} if donated else {}))
    _, back, _ = controls(program)
    large = {s for s, (v, _) in enumerate(program.values) if v.aval.shape == (ROWS, 4)}
    argument = {s for s in program.inputs if s in large}
    (moved,) = [
        pair
        for pair in zip(*[getattr(program.instructions[back], k) for k in ("inputs", "outputs")])
        if pair[0] in large
    ]
    pairs = {(c.inputs[n], c.outputs[k]) for c in program.calls for n, k in program.overwrites[c.fragment]}
    assert moved[::-1] in pairs
    assert large == {*argument, *moved}
    assert ((next(iter(argument)), moved[1]) in pairs) == donated
    extra = program.simulate().peak_bytes["stage0"] - ROWS * 16 * (1 if donated else 2)
    assert 0 < extra < ROWS * 16 / 2


def test_memory_does_not_grow():
    mesh, _ = pipeline(2)
    with mesh:
        run = mm.jit(fill)
        peaks = [run.program(*arguments(mesh)).profile(*arguments(mesh, n)).peak_bytes for n in (2, 20)]
        assert peaks[0] == peaks[1]
        alive = []
        for n in (2, 20, 5):
            out = run(*arguments(mesh, n))
            alive.append(len(jax.live_arrays()))
            assert int(out[0]) == n
    assert len(set(alive)) == 1


def test_nothing_is_dropped_too_early():
    """The same arguments again, after they were read in loops of several lengths."""
    mesh, _ = pipeline(2)
    whole = [np.asarray(x) for x in arguments(mesh)[:2]]
    with mesh:
        run, (a, b, cache, x, _) = mm.jit(fill), arguments(mesh)
        expected = nnx.Variable(jnp.zeros((ROWS, 4)))
        for n in (3, 0, 7, 3):
            got, want = run(a, b, cache, x, np.int32(n)), nnx.jit(fill)(*whole, expected, x, np.int32(n))
            assert_same((*got, cache[...]), (*want, expected[...]))


def test_what_another_process_fetches_is_not_overwritten(monkeypatch):
    """Not under the name of a carry either, in the iteration after that."""

    def run(a, b, cache, x, n):  # what is sent is the next value, and nothing else reads that
        return lax.while_loop(
            lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.tanh(c[1] @ a), c[1] @ b), (0, x, x)
        )

    program = program_of(run)
    _, back, _ = controls(program)
    moves = dict(zip(program.instructions[back].inputs, program.instructions[back].outputs))
    (sent,) = [
        t.inputs[0] for t in program.transfers if t.shape == (4,) and t.inputs[0] in {*moves, *moves.values()}
    ]
    assert program.moved([sent]) == program.moved([moves.get(sent, sent)])

    def given_away():
        donations = donation.find_donations(program, {}, set())
        return {c.inputs[n] for c in program.calls for n, _ in donations[c.fragment]}

    alone = given_away()
    monkeypatch.setattr(donation, "span_processes", lambda *_: True)
    assert given_away() < alone | {sent} and given_away().isdisjoint(program.moved([sent]))


# What is said of it before it runs


def changed(program, n, **fields):
    own = list(program.instructions)
    own[n] = own[n]._replace(**fields)
    return dataclasses.replace(program, instructions=tuple(own))


def test_verify():
    program = program_of(fill)
    begin, back, end = controls(program)
    repeat = program.instructions[back]
    program.verify()
    for broken, message in [
        (changed(program, back, frees=repeat.frees[1:]), "is not there before an iteration, there after it"),
        (changed(program, end, frees=()), "never freed"),
        (changed(program, back, outputs=repeat.outputs[::-1]), "moves %.* into %"),
        (changed(program, begin, inputs=(repeat.inputs[0],)), "before it is made"),
    ]:
        with pytest.raises(VerificationError, match=message):
            broken.verify()


def test_simulate():
    """One iteration, and the host waits for the condition before it dispatches anything after it."""

    def run(a, b, cache, x, n):
        y = lax.while_loop(lambda y: y.sum() < n, lambda y: jnp.tanh(y @ a) @ b, x)
        return y, jnp.tanh(x @ a.T)  # the latter waits for nothing, but comes later

    program = program_of(run)
    _, _, end = controls(program)
    timeline = program.simulate({"none": 1.0})
    after = sum(isinstance(i, Call) for i in program.instructions[end:])
    before = [e.end for e in timeline.events[: len(timeline.events) - after]]
    assert timeline.makespan >= max(before) + (1.0 if after else 0.0)
    assert len(timeline.events) == len(program.calls)


def test_profile_without_an_iteration():
    """What never ran has no time."""
    mesh, _ = pipeline(2)
    with mesh:
        program = mm.jit(fill).program(*arguments(mesh))
        profile = program.profile(*arguments(mesh))
    begin, back, _ = controls(program)
    inside = {program.labels[i.fragment] for i in program.instructions[begin:back] if isinstance(i, Call)}
    assert inside == {label for label, seconds in profile.costs.calls.items() if seconds == 0}
