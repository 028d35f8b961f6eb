"""The instructions of a program and the buffers that they fill, as they are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import Mesh

from mmnnx.mpmd.emit.moving_meshes import MovingMeshes
from mmnnx.mpmd.ir.equations import Var, nbytes
from mmnnx.mpmd.ir.fragments import Fragment, PlacedVar, Step
from mmnnx.mpmd.ir.instructions import Call, Instruction, Transfer

Readers = Mapping[Var, Sequence[Mesh]]
"""For variables that are made on one mesh, the other meshes that read them."""


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
                nbytes(var),
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
        readers: Readers,
        stage: int | None = None,
    ) -> None:
        """Calls a fragment on a mesh, and right after it sends what it made to its readers, mesh by mesh."""
        first = len(self.values)
        outputs = tuple(range(first, first + len(f.outvars)))
        for v, buffer in zip(f.outvars, outputs):
            self.values.append((v, mesh))
            self.buffers[v, mesh, microbatch] = buffer
        fragment = self.meshes.fragment_on(f, mesh)
        self.instructions.append(Call(fragment, microbatch, tuple(inputs), outputs, (), stage))
        sends: dict[Mesh, dict[Var, int]] = {}
        for v, source in zip(f.outvars, outputs):
            for reader in readers.get(v, ()):
                to = self.meshes.at(reader, microbatch)
                if to != mesh and (v, to, microbatch) not in self.buffers:
                    sends.setdefault(to, {})[v] = source
        for to, sources in sends.items():
            for v, source in sources.items():
                self.send(v, source, to, microbatch)


def remote_readers(steps: Sequence[Step], homes: Mapping[Var, Mesh]) -> dict[Var, list[Mesh]]:
    """For each variable that is made on one mesh, the other meshes that read it."""
    readers: dict[Var, dict[Mesh, None]] = {}
    for step in steps:
        reads = [(v, step.mesh) for v in step.invars] if isinstance(step, Fragment) else step.reads
        for v, mesh in reads:
            if v in homes and homes[v] != mesh:
                readers.setdefault(v, {})[mesh] = None
    return {v: list(meshes) for v, meshes in readers.items()}
