"""Values outside loops: where they are, and how they come to a mesh that reads them."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import Mesh

from mmnnx.mpmd.emit.writer import Writer
from mmnnx.mpmd.ir.equations import Var
from mmnnx.mpmd.ir.fragments import Fragment, Plan, WhilePlan


class OuterValues:
    """Finds the buffers of values outside loops, and sends a value to a mesh when it is first read there.

    Attributes:
      homes: the mesh where each value is made or given; not of those that every mesh can make or be given.
    """

    def __init__(self, plan: Plan, inputs: Mapping[Var, Mesh | None], writer: Writer):
        self.writer = writer
        self.homes = {v: mesh for v, mesh in inputs.items() if mesh is not None}
        self._moving_makers: dict[Var, Fragment] = {}
        self._enter(plan)

    def enter(self, plan: WhilePlan) -> None:
        """From here on the values of a while are found, too."""
        self.homes |= {v: meshes[0] for v, meshes in zip(plan.loop.carry_in, plan.carried) if meshes}
        self._enter(plan.body)

    def _enter(self, plan: Plan) -> None:
        self.homes |= {v: self.writer.meshes.at(mesh, None) for v, mesh in plan.homes.items()}
        moving = (f for f in plan.steps if isinstance(f, Fragment) and f.mesh in self.writer.meshes.moves)
        self._moving_makers |= {v: f for f in moving for v in f.outvars}

    def buffer(self, var: Var, mesh: Mesh) -> int:
        """The buffer of a value on a mesh. What is not there yet is sent, made or asked of the caller."""
        mesh = self.writer.meshes.at(mesh, None)
        if (var, mesh, None) in self.writer.buffers:
            return self.writer.buffers[var, mesh, None]
        home, maker = self.homes.get(var), self._moving_makers.get(var)
        if maker is not None and (home is None or not maker.invars):
            # A moving task's constants, and what every mesh can make of what it is given, are not sent.
            self.writer.call(maker, mesh, None, [self.buffer(v, mesh) for v in maker.invars])
            return self.writer.buffers[var, mesh, None]
        if home is None or home == mesh:
            return self.writer.new_input(var, mesh)
        return self.writer.send(var, self.buffer(var, home), mesh, None)
