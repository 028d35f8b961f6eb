"""Contenders over processes of one device each: a pipeline written by hand, and SPMD programs of them all."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
from contenders.by_hand import Part, Stage, one_f_one_b
from contenders.contender import Contender, by_path
from contenders.nnx_jit import nnx_jit
from contenders.problem import Problem
from contenders.spmd_pipeline import spmd_pipeline
from flax import nnx
from jax.experimental import multihost_utils, transfer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

HOST = "127.0.0.1"


class Neighbours:
    """Arrays to and from the processes before and after this one, in the order in which they are sent."""

    def __init__(self) -> None:
        client = jax.local_devices()[0].client
        self.server = transfer.start_transfer_server(client, f"{HOST}:0", [f"{HOST}:0"])
        port = int(self.server.address().rpartition(":")[2])
        ports = np.asarray(multihost_utils.process_allgather(np.int32(port))).tolist()
        here = jax.process_index()
        near = [p for p in (here - 1, here + 1) if 0 <= p < len(ports)]
        self.connections = {p: self.server.connect(f"{HOST}:{ports[p]}") for p in near}
        # What a process sends has a number: even ones go to the process before it, odd ones to that after it.
        self.sent = {p: itertools.count(int(p > here), 2) for p in near}
        self.received = {p: itertools.count(int(p < here), 2) for p in near}

    def send(self, process: int, arrays: Any) -> None:
        self.server.await_pull(next(self.sent[process]), arrays)

    def receive(self, process: int, types: Any) -> Any:
        return self.connections[process].pull(next(self.received[process]), types)


def by_hand_across(problem: Problem) -> Contender:
    """`contenders.by_hand` with a stage in each process, which dispatches its own programs alone."""
    here, last = jax.process_index(), problem.stages - 1
    device = jax.local_devices()[0]
    model = problem.make()
    depth = len(model.blocks) // problem.stages
    attributes = (problem.before if here == 0 else ()) + (problem.after if here == last else ())
    part = Part(model, list(model.blocks)[here * depth : (here + 1) * depth], attributes)
    stage = Stage(problem, part, device, is_first=here == 0)
    # The input of a block is transferred, and its gradient, of the same shape and dtype.
    slice_ = jax.tree.map(lambda x: x[0], problem.slices(problem.batch))
    crossing = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device)),
        nnx.eval_shape(problem.first, model, slice_),
    )
    neighbours = Neighbours()
    order = [
        (phase, i)
        for s, phase, i in one_f_one_b(problem.stages, problem.microbatches)
        if s == here and (s, phase) != (last, "forward")  # the last stage does both at once
    ]

    def step(batch):
        leaves, tree = jax.tree.flatten(batch)
        slices = zip(*(np.split(leaf, problem.microbatches) for leaf in leaves))
        inputs = [tree.unflatten(slice) for slice in slices]
        residuals: dict[int, Any] = {}
        totals: Any = None
        for phase, i in order:
            if phase == "forward":
                x = inputs[i] if here == 0 else neighbours.receive(here - 1, crossing)
                y, residuals[i] = stage.forward(stage.params, x)
                neighbours.send(here + 1, y)
                continue
            if here == last:
                x = neighbours.receive(here - 1, crossing)
                dx, totals = stage.both(stage.params, x, inputs[i], totals)
            else:
                dy = neighbours.receive(here + 1, crossing)
                dx, totals = stage.backward(stage.params, residuals.pop(i), dy, totals)
            if here > 0:
                neighbours.send(here - 1, dx[0])
        loss = None
        if here == last:
            loss, totals = totals
        stage.params, stage.moments = stage.update(stage.params, stage.moments, totals)
        return loss

    def moment():
        mu = stage.treedef.unflatten(stage.moments[0].mu)
        return by_path(nnx.to_flat_state(mu), shift=here * depth)

    return Contender("by hand", step, lambda: jax.tree.leaves((stage.params, stage.moments)), moment)


def data_parallel(problem: Problem) -> Contender:
    """Every process takes some of the microbatches; gradients meet in collectives (gloo on CPU)."""
    return divided(nnx_jit(problem, "data parallel", jax.devices()), "data")


def pipeline_in_one_program(problem: Problem) -> Contender:
    """A stage in each process, all in one SPMD program."""
    return divided(spmd_pipeline(problem, jax.devices()), "stage")


def divided(contender: Contender, axis: str) -> Contender:
    """The contender for batches of which each process puts its rows on its device.

    `jax.device_put` of host arrays on the devices of several processes compares them first, at every step.
    """
    mesh = jax.make_mesh(
        (jax.device_count(),), (axis,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()
    )
    rows = NamedSharding(mesh, PartitionSpec(axis))

    def put(x):
        return jax.make_array_from_callback(x.shape, rows, lambda index: x[index])

    return dataclasses.replace(contender, step=lambda batch: contender.step(jax.tree.map(put, batch)))
