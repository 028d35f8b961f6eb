"""The instructions of a program: calls of fragments, and transfers between meshes."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import Mesh

from mmnnx.mpmd.ir.fragments import Fragment


@dataclasses.dataclass(frozen=True)
class Call:
    """Runs a fragment: reads buffers `inputs`, fills buffers `outputs`, then drops buffers `frees`.

    `microbatch` is the one it works on and `stage` the stage of the loop that it is of; None outside loops.
    """

    fragment: Fragment
    microbatch: int | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...] = ()
    stage: int | None = None

    @property
    def name(self) -> str:
        return self.fragment.name

    @property
    def phase(self) -> str:
        return self.fragment.phase

    @property
    def mesh(self) -> Mesh:
        return self.fragment.mesh


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Copies one array from a TaskMesh to another.

    Attributes:
      source, target: names of the two meshes.
      shape, dtype, nbytes: of the array.
      microbatch: which one it belongs to, None outside the loop.
    """

    source: str
    target: str
    shape: tuple[int, ...]
    dtype: Any
    nbytes: int
    microbatch: int | None
    source_mesh: Mesh = dataclasses.field(repr=False)
    target_mesh: Mesh = dataclasses.field(repr=False)
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...] = ()


Instruction = Call | Transfer


@dataclasses.dataclass(frozen=True)
class LoopRuns:
    """What a microbatch loop must run.

    Attributes:
      schedule: the name of its schedule.
      length: the number of microbatches.
      fragments: what runs once for each: a fragment, or one of several that are alike but for their mesh.
    """

    schedule: str
    length: int
    fragments: tuple[tuple[Fragment, ...], ...]
