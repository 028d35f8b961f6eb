"""The instructions of a program: calls of fragments, transfers between meshes, and whiles, over buffers."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from jax.sharding import Mesh

from mmnnx.mpmd.ir.equations import Var, nbytes_of
from mmnnx.mpmd.ir.fragments import Fragment, PlacedVar

# There are hundreds of thousands of them: a NamedTuple is made four times as fast as a frozen dataclass. What
# each frees is known last, and comes last in all.


class Call(NamedTuple):
    """Runs a fragment: reads buffers `inputs`, fills buffers `outputs`, then drops buffers `frees`.

    `microbatch` is the one it works on and `stage` the stage of the loop that it is of; None outside loops.
    """

    fragment: Fragment
    microbatch: int | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    stage: int | None = None
    frees: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.fragment.name

    @property
    def phase(self) -> str:
        return self.fragment.phase

    @property
    def mesh(self) -> Mesh:
        return self.fragment.mesh


class Transfer(NamedTuple):
    """Copies one array from a TaskMesh to another.

    Attributes:
      source, target: names of the two meshes.
      shape, dtype: of the array.
      microbatch: which one it belongs to, None outside the loop.
      source_mesh, target_mesh: the meshes.
      inputs, outputs, frees: the buffer that is copied, the one that is filled, and those then dropped.
    """

    source: str
    target: str
    shape: tuple[int, ...]
    dtype: Any
    microbatch: int | None
    source_mesh: Mesh
    target_mesh: Mesh
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return nbytes_of(self.shape, self.dtype)

    def __repr__(self) -> str:
        """All but the meshes, which are long and have names."""
        shown = (f"{name}={x!r}" for name, x in self._asdict().items() if not name.endswith("_mesh"))
        return f"Transfer({', '.join(shown)})"


class Control(NamedTuple):
    """Where a while begins, where its body ends, or where it ends itself.

    Attributes:
      kind: "while" reads whether an iteration follows, on one mesh of each process, and if none does goes to
        "end". "repeat" moves what the body made into the buffers of the carries, and goes back to "while".
        "end" does nothing, but drop buffers that the whole loop reads.
      inputs, outputs: for "repeat", what is moved, and where to.
    """

    kind: Literal["while", "repeat", "end"]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()

    @property
    def microbatch(self) -> None:
        return None


Instruction = Call | Transfer | Control


@dataclasses.dataclass(frozen=True, repr=False)
class LoopRuns:
    """What a microbatch loop must run.

    Attributes:
      schedule: the name of its schedule.
      length: the number of microbatches, several that share a call being one.
      fragments: what runs once for each: a fragment, or one of several that are alike but for their mesh.
      per_call: how many share a call.
    """

    schedule: str
    length: int
    fragments: tuple[tuple[Fragment, ...], ...]
    per_call: int = 1

    def __repr__(self) -> str:
        """All but the fragments, which are long."""
        return f"LoopRuns(schedule={self.schedule!r}, length={self.length}, per_call={self.per_call})"

    def __str__(self) -> str:
        together = f" of {self.per_call} microbatches a call" if self.per_call > 1 else ""
        return f"{self.schedule}{together}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ProgramData:
    """The instructions of one call, over numbered buffers that each hold one array on one mesh.

    Attributes:
      instructions: fragment calls, transfers and whiles, in the order in which they are dispatched.
      inputs: buffers filled before the first instruction: buffer -> (variable, mesh).
      outputs: for each result of the function: the buffers that hold it (several for a value that is kept on
        every mesh), none for a result that is an input or a constant.
      values: for each buffer, the variable and the mesh.
      names: for each mesh, what messages call it.
      loops: what its microbatch loops must run.
      successors: for values that may be overwritten when they are not needed any more: the value that takes
        their place, such as the next value of a sum or of donated state.
      notes: what could not be done as it should, in words.
      arguments: for buffers of inputs, what they are given, by path: "0.blocks.3.mlp.kernel".
      updates: for gradients of arguments, and what is made of them, the path of the argument.
    """

    instructions: tuple[Instruction, ...]
    inputs: dict[int, PlacedVar]
    outputs: tuple[tuple[int, ...], ...]
    values: tuple[PlacedVar, ...]
    names: dict[Mesh, str]
    loops: tuple[LoopRuns, ...] = ()
    successors: dict[Var, Var] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    arguments: dict[int, str] = dataclasses.field(default_factory=dict)
    updates: dict[Var, str] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.summary})"

    @property
    def schedule(self) -> str:
        """The schedule of its microbatch loop, of several loops those of all; "" without one. It says so, if
        several microbatches run in one call."""
        return ", ".join(dict.fromkeys(map(str, self.loops)))

    @property
    def summary(self) -> str:
        """Its schedule, and how much of what there is."""
        return f"{self.schedule}, {self.counts}" if self.schedule else self.counts

    @property
    def counts(self) -> str:
        """How much of what there is."""
        return (
            f"{len(self.fragments)} fragments, {len(self.calls)} calls, "
            f"{len(self.transfers)} transfers ({sum(t.nbytes for t in self.transfers):,} bytes)"
        )

    @property
    def calls(self) -> list[Call]:
        """Every fragment call, in order: the same fragment once for each microbatch."""
        return [i for i in self.instructions if isinstance(i, Call)]

    @property
    def fragments(self) -> list[Fragment]:
        """The distinct fragments; each is compiled once, however many microbatches there are."""
        return list(dict.fromkeys(c.fragment for c in self.calls))

    @property
    def transfers(self) -> list[Transfer]:
        """Every array that moves between meshes, in order."""
        return [i for i in self.instructions if isinstance(i, Transfer)]

    @functools.cached_property
    def repeated(self) -> frozenset[Fragment]:
        """The fragments that are in whiles."""
        depth, found = 0, set()
        for i in self.instructions:
            if isinstance(i, Control):
                depth += {"while": 1, "repeat": 0, "end": -1}[i.kind]
            elif isinstance(i, Call) and depth:
                found.add(i.fragment)
        return frozenset(found)

    def moved(self, buffers: Iterable[int]) -> set[int]:
        """Buffers, and those that whiles move their arrays to or from."""
        repeats = [i for i in self.instructions if isinstance(i, Control)]
        pairs = [{*pair} for i in repeats for pair in zip(i.inputs, i.outputs)]
        found, before = set(buffers), -1
        while len(found) != before:
            before = len(found)
            found.update(*(pair for pair in pairs if pair & found))
        return found

    @functools.cached_property
    def labels(self) -> dict[Fragment, str]:
        """For each fragment its name, with a number if it is not the first of that name."""
        seen: Counter[str] = Counter()
        labels = {}
        for f in self.fragments:
            seen[f.name] += 1
            labels[f] = f.name if seen[f.name] == 1 else f"{f.name} ({seen[f.name]})"
        return labels
