"""Memory that is taken over: state, sums, and what dies in a fragment; and bytes that JAX counts."""

from __future__ import annotations

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mmnnx as mm
from mmnnx.mpmd.runtime.live_bytes import LiveBytes
from tests import models
from tests.models import make
from tests.mpmd.parity import MOMENTUM, assert_parity, assert_same, born, pipeline, place, train_step
from tests.slow import all_but, grid

COUNTERS = 8  # bytes
POSITIONS = 4 * 4  # of four microbatches: constants stay where they are between calls


def spec(per_stage):
    return P(None, "model") if per_stage else P()


def kernels(tasks, per_stage):
    """Of an MLP of three layers one on each stage, kernels divided over its devices."""
    rules = {mm.path("layers", n, "kernel"): (task, spec(per_stage)) for n, task in enumerate(tasks)}
    rules |= {mm.path("layers", n): (task, P()) for n, task in enumerate(tasks)}
    return mm.TaskSharding(rules)


def bytes_of(x):
    """On all of its devices. (To ask for its shards would make more arrays.)"""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize * x.sharding.num_devices


# The schedule decides what dies when, and the devices of a stage in how many pieces.
CASES = [
    ("gpipe", ()),
    ("1f1b", ()),
    ("1f1b", (2,)),
    ("zero-bubble-h1", (2,)),
]


def trainer(per_stage, schedule, donate=(0, 1)):
    mesh, tasks = pipeline(3, *per_stage)
    with mesh:
        model = born(make(models.MLP, layers=3, width=16), kernels(tasks, per_stage))
        optimizer = mm.jit(lambda m: nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param))(model)
    return (
        mesh,
        model,
        optimizer,
        train_step(mm.jit, models.squared_error, microbatch=2, schedule=schedule, donate_argnums=donate),
    )


@pytest.mark.slow
@pytest.mark.parametrize("schedule, per_stage", CASES)
def test_what_dies_is_overwritten_and_all_is_right(per_stage, schedule):
    """A backward writes the gradient that it sends over a residual, or over the one that it received."""
    mesh, tasks = pipeline(3, *per_stage)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # JAX warns of donated buffers that nothing can take over
        program = assert_parity(
            make(models.MLP, layers=3, width=16),
            models.squared_error,
            models.vectors(),
            kernels(tasks, per_stage),
            mesh=mesh,
            microbatch=2,
            schedule=schedule,
        )
    nexts = set(program.successors.values())
    sent = {t.inputs[0] for t in program.transfers}
    dead = {
        (f.name, f.outvars[k])
        for f, pairs in program.overwrites.items()
        for _, k in pairs
        if f.outvars[k] not in nexts
    }
    gradients = {
        (c.name, v) for c in program.calls for v, s in zip(c.fragment.outvars, c.outputs) if s in sent
    }
    # Both halves of a divided backward read all there is, and the gradient is made by the first.
    expected = set() if schedule == "zero-bubble-h1" else {"stage1 backward", "stage2 backward"}
    assert {name for name, _ in dead & gradients} == expected


@pytest.mark.parametrize("schedule, per_stage", all_but([("gpipe", ())], CASES))
def test_no_instruction_leaves_more_alive_than_the_program_says(per_stage, schedule, monkeypatch):
    """After each one JAX itself counts the arrays that are alive on each mesh."""
    mesh, model, optimizer, step = trainer(per_stage, schedule)
    seen = []
    after = LiveBytes.after

    def watched(self, inputs, outputs):
        after(self, inputs, outputs)
        homes = {m: frozenset(m.devices.flat) for m in self.program.names}
        alive = dict.fromkeys(self.program.names.values(), 0)
        for x in jax.live_arrays():
            for m, devices in homes.items():
                if x.sharding.device_set == devices:
                    alive[self.program.names[m]] += bytes_of(x)
        seen.append((dict(self.now), alive))

    monkeypatch.setattr(LiveBytes, "after", watched)
    with mesh:
        program = step.program(model, optimizer, models.vectors())
        profile = program.profile(model, optimizer, models.vectors())
    (counted, alive), *rest = seen
    others = {name: alive[name] - counted[name] for name in counted}  # nothing of the program's
    assert len(rest) == len(program.instructions)
    for now, alive in rest:
        # Copies of the optimizer's counters on each mesh share their buffers with the caller's.
        off = [alive[name] - others[name] - n for name, n in now.items()]
        assert all(abs(n) <= (COUNTERS + POSITIONS) * max(per_stage, default=1) for n in off), off
    assert max(now["stage1"] for now, _ in seen) == profile.peak_bytes["stage1"]


def test_arguments_that_are_not_given_up_stay():
    """Whatever dies in the program, what the caller did not donate is his."""
    mesh, model, optimizer, step = trainer((), "1f1b", donate=())
    old = jax.tree.leaves(nnx.state((model, optimizer)))
    batch = jax.tree.map(jax.numpy.asarray, models.vectors())
    with mesh:
        for _ in range(2):
            step(model, optimizer, batch)
    assert not any(x.is_deleted() for x in (*old, *jax.tree.leaves(batch)))


@pytest.mark.slow
def test_what_came_from_a_mesh_of_another_shape_is_left_alone():
    """A replicated array is sent there by way of shards, of which some may be those of the sender."""
    devices = np.array(jax.devices()[:3])
    meshes = [jax.sharding.Mesh(part, ("x",)) for part in (devices[:2], devices[2:])]
    tasks = [mm.Task(f"stage{n}", mesh=mesh) for n, mesh in enumerate(meshes)]
    program = assert_parity(
        make(models.MLP, layers=2),
        models.squared_error,
        models.vectors(),
        place(tasks, [("layers", 0)], [("layers", 1)]),
        optimizer=MOMENTUM,
        microbatch=2,
        schedule="1f1b",
    )
    received = {t.outputs[0] for t in program.transfers}
    taken = {c.inputs[n] for c in program.calls for n, _ in program.overwrites[c.fragment]}
    dropped = {s for c in program.calls for s in c.frees}
    assert received & dropped and not received & taken


def test_a_counter_of_meshes_that_share_a_device():
    """What one mesh is given holds the buffers that the other is given: it is not overwritten."""
    devices = jax.devices()[:4]
    multimesh = mm.MultiMesh(global_mesh=jax.sharding.Mesh(np.array(devices), ("x",)))
    tasks = [mm.Task(f"on{n}", mesh=mm.TaskMesh(devices=n, axis_names=("x",))) for n in ([0, 1, 2, 3], [2])]

    def decay(params, count):
        wide, narrow = params
        wide.kernel[...] /= 1 + count[...]
        narrow.kernel[...] = narrow.kernel[...] * jnp.abs(wide.kernel[...]).sum() / count[...]
        count[...] += 1

    def make():
        return nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(n)) for n in range(2)]), nnx.Variable(np.float32(1))

    reference, alone, step = make(), nnx.jit(decay), mm.jit(decay, donate_argnums=(0, 1))
    with multimesh:
        sharding = place(tasks, [(0,)], [(1,)])
        params, count = mm.jit(make, out_shardings=(sharding, None))()
        for _ in range(3):
            step(params, count)
            alone(*reference)
    assert_same(nnx.state((params, count)), nnx.state(reference))


@pytest.mark.parametrize(
    "schedule, devices", grid([None, "gpipe"], [([0, 1], [0], [2]), ([0, 1, 2, 3], [0, 1], [2, 3])])
)
def test_activations_of_meshes_that_share_devices(devices, schedule):
    """What is sent to a mesh with some of the same devices is there already: nothing is written over it while
    one of the two is still to be read."""

    class Model(nnx.Module):
        def __init__(self):
            self.p, self.q, self.r, self.s = (nnx.Linear(4, 4, rngs=nnx.Rngs(n)) for n in range(4))

        def __call__(self, x):
            h = self.p(x)
            return self.s(self.r(mm.task(lambda h: self.q(jnp.sin(h)), task=tasks[1])(h)) + h)

    def step(model, x):
        grad_fn = nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean())
        if schedule is not None:
            grad_fn = mm.microbatch(grad_fn, 0, 4, argnum=1, schedule=schedule)
        return grad_fn(model, x)

    tasks = [mm.Task(name, mesh=mm.TaskMesh(devices=n, axis_names=("x",))) for name, n in zip("abc", devices)]
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    split = born(Model, place(tasks, ["p", "r"], ["q"], ["s"]))
    assert_same(mm.jit(step)(split, x), nnx.jit(step)(Model(), x))
