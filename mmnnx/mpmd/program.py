"""A program: the ordered list of fragment calls and transfers that one call of a function becomes.

It is data. It can be printed, verified and simulated without running; `mmnnx.mpmd.run` executes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from mmnnx.mpmd.fragments import Fragment, Held, LoopPlan, Plan
from mmnnx.mpmd.order import order_loop
from mmnnx.mpmd.trace import Var, nbytes


@dataclasses.dataclass(frozen=True)
class Call:
    """Runs a fragment: reads the slots `inputs`, fills the slots `outputs`, then drops the slots `frees`."""

    fragment: Fragment
    microbatch: int | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
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
class Event:
    """One instruction on a simulated timeline; times in units of the cost of one fragment."""

    mesh: str
    start: float
    end: float
    phase: str
    microbatch: int | None
    name: str


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What each TaskMesh does when. `makespan` is the time from the first start to the last end."""

    events: tuple[Event, ...]

    @property
    def makespan(self) -> float:
        return max((e.end for e in self.events), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of mesh time, over all meshes, in which nothing runs."""
        meshes = {e.mesh for e in self.events}
        busy = sum(e.end - e.start for e in self.events)
        return 1 - busy / (self.makespan * len(meshes)) if self.makespan else 0.0


class VerificationError(ValueError):
    """A program that would read what is not there, or keep what nobody needs."""


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The instructions of one call, over numbered slots that each hold one array on one mesh.

    Attributes:
      instructions: fragment calls and transfers, in the order in which they are dispatched.
      inputs: slots filled before the first instruction: slot -> (variable, mesh).
      outputs: for each result of the function: the slots that hold it (several for a value that is kept on
        every mesh), none for a result that is an input or a constant.
      values: for each slot, the variable and the mesh.
      names: for each mesh, what messages call it.
    """

    instructions: tuple[Instruction, ...]
    inputs: dict[int, Held]
    outputs: tuple[tuple[int, ...], ...]
    values: tuple[Held, ...]
    names: dict[Mesh, str]

    @property
    def calls(self) -> list[Call]:
        """Every fragment call, in order: the same fragment once for each microbatch."""
        return [i for i in self.instructions if isinstance(i, Call)]

    @property
    def fragments(self) -> list[Fragment]:
        """The distinct programs; each is compiled once, however many microbatches there are."""
        return list(dict.fromkeys(c.fragment for c in self.calls))

    @property
    def transfers(self) -> list[Transfer]:
        """Every array that moves between meshes, in order."""
        return [i for i in self.instructions if isinstance(i, Transfer)]

    def verify(self) -> None:
        """Checks that the program can run and leaves nothing behind.

        Every value is made before it is read, on the mesh where it is read; it is dropped once, after its
        last use; and every value that is not a result is dropped.

        Raises:
          VerificationError: names the instruction, the microbatch and the mesh.
        """
        live = dict(self.inputs)
        results = {s for slots in self.outputs for s in slots}
        for number, i in enumerate(self.instructions):
            where = f"instruction {number}, {self.describe(i)}"
            mesh_in = i.mesh if isinstance(i, Call) else i.source_mesh
            mesh_out = i.mesh if isinstance(i, Call) else i.target_mesh
            for s in i.inputs:
                if s not in live:
                    raise VerificationError(
                        f"{where}: reads {self._value(s)} before it is made or after it is freed"
                    )
                if live[s][1] != mesh_in:
                    raise VerificationError(
                        f"{where}: reads {self._value(s)}, which is on {self._mesh(live[s][1])}, "
                        f"on {self._mesh(mesh_in)}"
                    )
            for s in i.outputs:
                if s in live:
                    raise VerificationError(f"{where}: makes {self._value(s)} a second time")
                if self.values[s][1] != mesh_out:
                    raise VerificationError(f"{where}: makes {self._value(s)} on {self._mesh(mesh_out)}")
                live[s] = self.values[s]
            for s in i.frees:
                if s in results:
                    raise VerificationError(f"{where}: frees {self._value(s)}, which is a result")
                if live.pop(s, None) is None:
                    raise VerificationError(f"{where}: frees {self._value(s)}, which is not there")
        for s in results - live.keys():
            raise VerificationError(f"the result {self._value(s)} is never made")
        for s in live.keys() - results:
            raise VerificationError(f"{self._value(s)} is never freed")

    def simulate(self) -> Timeline:
        """Plays the program through: one unit of time for each fragment call, none for transfers."""
        ready: dict[int, float] = dict.fromkeys(self.inputs, 0.0)
        idle: dict[Mesh, float] = {}
        events = []
        for i in self.instructions:
            start = max((ready[s] for s in i.inputs), default=0.0)
            end = start
            if isinstance(i, Call):
                start = max(start, idle.get(i.mesh, 0.0))
                end = idle[i.mesh] = start + 1.0
                events.append(Event(self.names[i.mesh], start, end, i.phase, i.microbatch, i.name))
            ready.update(dict.fromkeys(i.outputs, end))
        return Timeline(tuple(events))

    def describe(self, i: Instruction) -> str:
        """One instruction in words."""
        batch = "" if i.microbatch is None else f" [microbatch {i.microbatch}]"
        if isinstance(i, Call):
            return f"{i.name}{batch} on {self._mesh(i.mesh)}"
        return f"send {self._type(i.inputs[0])}{batch} {i.source} -> {i.target}, {i.nbytes:,} bytes"

    def __str__(self) -> str:
        lines = [
            f"Program: {len(self.fragments)} fragments, {len(self.calls)} calls, "
            f"{len(self.transfers)} transfers ({sum(t.nbytes for t in self.transfers):,} bytes)"
        ]
        for mesh, name in self.names.items():
            lines.append(f"  {name}: devices {[d.id for d in mesh.devices.flat]}, {dict(mesh.shape)}")
        for number, i in enumerate(self.instructions):
            line = f"{number:5d}  {self.describe(i)}"
            if isinstance(i, Call):
                line += f": reads {self._slots(i.inputs)}; writes {self._slots(i.outputs)}"
            else:
                line += f": %{i.inputs[0]} -> %{i.outputs[0]}"
            lines.append(line + (f"; frees {self._slots(i.frees)}" if i.frees else ""))
        return "\n".join(lines)

    def _slots(self, slots: Sequence[int]) -> str:
        return ", ".join(f"%{s}" for s in slots) or "nothing"

    def _type(self, slot: int) -> str:
        aval = self.values[slot][0].aval
        return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"

    def _value(self, slot: int) -> str:
        return f"%{slot} ({self._type(slot)}) of {self._mesh(self.values[slot][1])}"

    def _mesh(self, mesh: Mesh) -> str:
        return f"{self.names.get(mesh, 'mesh')} (devices {[d.id for d in mesh.devices.flat]})"


def build(
    plan: Plan,
    inputs: dict[Var, Mesh | None],
    results: Sequence[Sequence[Held]],
    names: dict[Mesh, str],
) -> Program:
    """Turns a plan into instructions.

    Args:
      plan: fragments and loops in order.
      inputs: every input of the function with its home, None for one that every mesh can be given.
      results: for each result of the function, the values that hold it.
      names: for each mesh, what messages call it.
    """
    builder = _Builder(inputs, names)
    builder.emit(plan)
    outputs = tuple(tuple(builder.slot(v, m) for v, m in held) for held in results)
    return Program(
        tuple(_free(builder.instructions, {s for slots in outputs for s in slots})),
        {s: builder.values[s] for s in builder.inputs},
        outputs,
        tuple(builder.values),
        names,
    )


def _free(instructions: Sequence[Instruction], results: set[int]) -> list[Instruction]:
    """Has every slot dropped at its last use; what nobody reads, where it is made."""
    dead: dict[int, set[int]] = {}
    seen = set(results)
    for number in reversed(range(len(instructions))):
        i = instructions[number]
        for s in (*i.inputs, *i.outputs):
            if s not in seen:
                seen.add(s)
                dead.setdefault(number, set()).add(s)
    return [dataclasses.replace(i, frees=tuple(sorted(dead.get(n, ())))) for n, i in enumerate(instructions)]


class _Builder:
    """Walks a plan and writes instructions. A value of a loop body is keyed by its microbatch as well."""

    def __init__(self, inputs: dict[Var, Mesh | None], names: dict[Mesh, str]):
        self.given = inputs
        self.names = names
        self.instructions: list[Instruction] = []
        self.values: list[Held] = []
        self.inputs: list[int] = []
        self.slots: dict[tuple[Var, Mesh, int | None], int] = {}

    def emit(self, plan: Plan) -> None:
        readers = _readers(plan.steps, plan.homes)
        self.homes = {v: m for v, m in self.given.items() if m is not None} | plan.homes
        for step in plan.steps:
            if isinstance(step, Fragment):
                inputs = tuple(self.slot(v, step.mesh) for v in step.invars)
                self._call(step, None, inputs, readers)
            else:
                self._loop(step)

    def _new(self, var: Var, mesh: Mesh, m: int | None) -> int:
        self.values.append((var, mesh))
        self.slots[var, mesh, m] = len(self.values) - 1
        return len(self.values) - 1

    def slot(self, var: Var, mesh: Mesh) -> int:
        """The slot of a value outside loops; sends or asks for it where it is not there yet."""
        if (var, mesh, None) in self.slots:
            return self.slots[var, mesh, None]
        home = self.homes.get(var)
        if home is None or home == mesh:
            self.inputs.append(self._new(var, mesh, None))
            return self.inputs[-1]
        return self._send(var, self.slot(var, home), home, mesh, None)

    def _send(self, var: Var, source: int, home: Mesh, mesh: Mesh, m: int | None) -> int:
        """Sends a value of microbatch m from the slot that holds it at home; returns the slot it fills."""
        target = self._new(var, mesh, m)
        self.instructions.append(
            Transfer(
                self.names[home],
                self.names[mesh],
                tuple(var.aval.shape),
                var.aval.dtype,
                nbytes(var),
                m,
                home,
                mesh,
                (source,),
                (target,),
            )
        )
        return target

    def _call(
        self, f: Fragment, m: int | None, inputs: tuple[int, ...], readers: dict[Var, list[Mesh]]
    ) -> None:
        """Writes a call, and right after it the transfers of what it made."""
        outputs = tuple(self._new(v, f.mesh, m) for v in f.outvars)
        self.instructions.append(Call(f, m, inputs, outputs))
        for v, s in zip(f.outvars, outputs):
            for mesh in readers.get(v, ()):
                if (v, mesh, m) not in self.slots:
                    self._send(v, s, f.mesh, mesh, m)

    def _loop(self, plan: LoopPlan) -> None:
        loop, body = plan.loop, plan.body
        for v, mesh in plan.reads:
            self.slot(v, mesh)
        placed = {v: meshes[0] for v, meshes in zip(loop.carry_in, plan.carried) if meshes}
        starts = dict(zip(loop.carry_in, loop.init))
        leaves = dict(zip(loop.carry_in, loop.carry_out))
        slices = dict(zip(loop.slice_vars, loop.slices))
        # Placed carries return to their home after each microbatch; results that are kept, to theirs.
        readers = _readers(body.fragments, body.homes)
        for out, meshes in zip(loop.carry_out, plan.carried):
            if out in body.homes:
                readers.setdefault(out, []).extend(m for m in meshes if m != body.homes[out])

        def find(var: Var, mesh: Mesh, m: int) -> int:
            if var in starts:
                if m == 0:
                    return self.slot(starts[var], mesh) if mesh in carried[var] else send_on(var, mesh, m)
                key = (leaves[var], mesh, m - 1)
                return self.slots[key] if mesh in carried[var] else send_on(var, mesh, m)
            if var in slices:
                return self.slot(slices[var][m], mesh)
            if (var, mesh, m) in self.slots:
                return self.slots[var, mesh, m]
            return self.slot(var, mesh)

        def send_on(var: Var, mesh: Mesh, m: int) -> int:
            """A carry read away from its home."""
            if (var, mesh, m) not in self.slots:
                home = placed[var]
                self._send(var, find(var, home, m), home, mesh, m)
            return self.slots[var, mesh, m]

        carried = dict(zip(loop.carry_in, plan.carried))
        for index, m in order_loop(plan):
            f = body.fragments[index]
            self._call(f, m, tuple(find(v, f.mesh, m) for v in f.invars), readers)
        last = loop.spec.length - 1
        for out, after, meshes in zip(loop.carry_out, loop.carries, plan.carried):
            for mesh in meshes:
                self.slots[after, mesh, None] = self.slots[out, mesh, last]
        for y, row, meshes in zip(loop.ys, loop.stacks, plan.kept):
            for m, v in enumerate(row):
                for mesh in meshes:
                    self.slots[v, mesh, None] = self.slots[y, mesh, m]


def _readers(steps: Sequence[Fragment | LoopPlan], homes: dict[Var, Mesh]) -> dict[Var, list[Mesh]]:
    """For each variable that is made on one mesh, the other meshes that read it."""
    readers: dict[Var, dict[Mesh, None]] = {}
    for step in steps:
        reads = step.reads if isinstance(step, LoopPlan) else [(v, step.mesh) for v in step.invars]
        for v, mesh in reads:
            if v in homes and homes[v] != mesh:
                readers.setdefault(v, {})[mesh] = None
    return {v: list(meshes) for v, meshes in readers.items()}
