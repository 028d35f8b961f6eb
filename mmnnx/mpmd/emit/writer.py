"""The instructions of a program and the buffers that they fill, as they are written."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import Mesh

from mmnnx.mpmd.emit.moving_meshes import MovingMeshes
from mmnnx.mpmd.ir.equations import Var
from mmnnx.mpmd.ir.fragments import Fragment, PlacedVar, Step
from mmnnx.mpmd.ir.instructions import Call, Instruction, Transfer

Readers = Mapping[Var, Sequence[Mesh]]
"""For variables that are made on one mesh, the other meshes that read them."""

Sends = Sequence[tuple[int, Mesh]]
"""Which results of a fragment go to other meshes: (number of the result, mesh)."""


class Writer:
    """Appends instructions, and numbers the buffers that they fill.

    Attributes:
      names: for each mesh, what messages call it.
      meshes: which mesh a moving one is.
      instructions: what was written so far.
      values: for each buffer, the variable and the mesh.
      inputs: the buffers that are filled before the first instruction.
      buffers: the buffer of each (variable, mesh, microbatch); outside loops the microbatch is None.
    """

    def __init__(self, names: dict[Mesh, str], meshes: MovingMeshes):
        self.names, self.meshes = names, meshes
        self.instructions: list[Instruction] = []
        self.values: list[PlacedVar] = []
        self.inputs: list[int] = []
        self.buffers: dict[tuple[Var, Mesh, int | None], int] = {}

    def new_buffer(self, var: Var, mesh: Mesh, microbatch: int | None) -> int:
        self.values.append((var, mesh))
        self.buffers[var, mesh, microbatch] = len(self.values) - 1
        return len(self.values) - 1

    def new_input(self, var: Var, mesh: Mesh) -> int:
        self.inputs.append(self.new_buffer(var, mesh, None))
        return self.inputs[-1]

    def send(self, var: Var, source: int, to: Mesh, microbatch: int | None) -> int:
        """Copies a buffer to another mesh, where it is the value of `var`; returns the buffer there."""
        mesh = self.values[source][1]
        target = self.new_buffer(var, to, microbatch)
        self.instructions.append(
            Transfer(
                self.names[mesh],
                self.names[to],
                tuple(var.aval.shape),
                var.aval.dtype,
                microbatch,
                mesh,
                to,
                (source,),
                (target,),
            )
        )
        return target

    def call(
        self,
        f: Fragment,
        mesh: Mesh,
        microbatch: int | None,
        inputs: Iterable[int],
        sends: Sends = (),
        stage: int | None = None,
    ) -> None:
        """Calls a fragment on a mesh, and right after it sends what others read of what it made."""
        first = len(self.values)
        outputs = tuple(range(first, first + len(f.outvars)))
        self.values += zip(f.outvars, itertools.repeat(mesh))
        keys = zip(f.outvars, itertools.repeat(mesh), itertools.repeat(microbatch))
        self.buffers.update(zip(keys, outputs))
        fragment = self.meshes.fragment_on(f, mesh)
        self.instructions.append(Call(fragment, microbatch, tuple(inputs), outputs, stage))
        for n, reader in sends:
            v, to = f.outvars[n], self.meshes.at(reader, microbatch)
            if to != mesh and (v, to, microbatch) not in self.buffers:
                self.send(v, outputs[n], to, microbatch)


def remote_readers(steps: Sequence[Step], homes: Mapping[Var, Mesh]) -> dict[Var, list[Mesh]]:
    """For each variable that is made on one mesh, the other meshes that read it."""
    readers: dict[Var, dict[Mesh, None]] = {}
    for step in steps:
        reads = [(v, step.mesh) for v in step.invars] if isinstance(step, Fragment) else step.reads
        for v, mesh in reads:
            if v in homes and homes[v] != mesh:
                readers.setdefault(v, {})[mesh] = None
    return {v: list(meshes) for v, meshes in readers.items()}


def sends_of(f: Fragment, readers: Readers) -> Sends:
    """What a fragment sends to the readers of its results, mesh by mesh."""
    sends = [(n, mesh) for n, v in enumerate(f.outvars) for mesh in readers.get(v, ())]
    order = list(dict.fromkeys(mesh for _, mesh in sends))
    return sorted(sends, key=lambda send: order.index(send[1]))
