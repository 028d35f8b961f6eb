"""A program, and what ties it to its function."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, NamedSharding

from mmnnx.mpmd.frontend.over_arrays import OverArrays
from mmnnx.mpmd.frontend.record import Record
from mmnnx.mpmd.ir.dump import Dump
from mmnnx.mpmd.ir.equations import Flat, Var
from mmnnx.mpmd.ir.fragments import PlacedVar
from mmnnx.mpmd.ir.program import Program
from mmnnx.sharding.mesh import MultiMesh


@dataclasses.dataclass(frozen=True)
class BoundProgram:
    """A program, and what ties it to its function.

    Attributes:
      program: the program.
      flat: the equations that it was made of.
      fixed: shardings that are decided; those of inputs are added.
      in_shardings: for each argument, the sharding that it has or is given; None if it is unplaced.
      next_shardings: for some unplaced arguments, by their number, the sharding in which a call leaves their
        new value. The next call may be given that value.
      out_shardings: for each result, the sharding that it must have; None for one that stays where it is
        computed.
      results: for each result, the values of the program that hold it; none for an argument or a constant.
      record, traced: what the trace showed.
      multimesh: whose devices values that are kept on every mesh are spread over.
      explicit: for some meshes, the same with Explicit axes, which results are on for the caller.
      dump: where stages write what they hand on.
    """

    program: Program
    flat: Flat
    fixed: dict[PlacedVar, NamedSharding]
    in_shardings: Sequence[NamedSharding | None]
    next_shardings: Mapping[int, NamedSharding]
    out_shardings: Sequence[NamedSharding | None]
    results: Sequence[Sequence[PlacedVar]]
    record: Record
    traced: OverArrays
    multimesh: MultiMesh | None
    explicit: Mapping[Mesh, Mesh]
    dump: Dump

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.traced.fun_name

    @property
    def donated(self) -> list[bool]:
        """Whether each argument is donated."""
        return self.traced.donated

    @property
    def number(self) -> dict[Var, int]:
        """Of each argument and constant, in this order."""
        return {v: n for n, v in enumerate((*self.flat.invars, *(v for v, _ in self.flat.constants)))}
