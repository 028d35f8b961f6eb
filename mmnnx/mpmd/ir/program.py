"""A program: the ordered list of fragment calls and transfers that one call of a function becomes.

It is data. It can be printed, verified and simulated without running; `mmnnx.mpmd.emit.emit` makes it and
`mmnnx.mpmd.runtime.dispatch` executes it.
"""

from __future__ import annotations

import dataclasses
import functools
import graphlib
import numbers
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from jax.sharding import Mesh

from mmnnx.mpmd.ir.equations import Var, nbytes
from mmnnx.mpmd.ir.timeline import UNIT_COSTS, Costs, Event, Profile, Timeline, peaks
from mmnnx.mpmd.partition.fragments import Fragment, Held
from mmnnx.mpmd.schedule import Action
from mmnnx.mpmd.schedule.base import Phase


@dataclasses.dataclass(frozen=True)
class Call:
    """Runs a fragment: reads the slots `inputs`, fills the slots `outputs`, then drops the slots `frees`.

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
      loops: what its microbatch loops must run.
      successors: for values that may be overwritten when they are not needed any more: the value that takes
        their place, such as the next value of a sum or of donated state.
      notes: what could not be done as it should, in words.
      arguments: for slots of inputs, what they are given, by path: "0.blocks.3.mlp.kernel".
      run: runs it for arguments and measures; see `profile`.
    """

    instructions: tuple[Instruction, ...]
    inputs: dict[int, Held]
    outputs: tuple[tuple[int, ...], ...]
    values: tuple[Held, ...]
    names: dict[Mesh, str]
    loops: tuple[LoopRuns, ...] = ()
    successors: dict[Var, Var] = dataclasses.field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()
    arguments: dict[int, str] = dataclasses.field(default_factory=dict, repr=False)
    run: Callable[..., Profile] | None = dataclasses.field(default=None, repr=False)

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

    @functools.cached_property
    def labels(self) -> dict[Fragment, str]:
        """For each fragment its name, with a number if it is not the first of that name."""
        seen: Counter[str] = Counter()
        labels = {}
        for f in self.fragments:
            seen[f.name] += 1
            labels[f] = f.name if seen[f.name] == 1 else f"{f.name} ({seen[f.name]})"
        return labels

    @functools.cached_property
    def residuals(self) -> frozenset[int]:
        """The slots of what the backward of a stage and microbatch reads of its forward."""
        made_for = {s: i.microbatch for i in self.instructions for s in i.outputs}
        seen: defaultdict[Any, set[int]] = defaultdict(set)  # what forwards make and read
        found: set[int] = set()
        for c in self.calls:
            key = (c.mesh, c.stage, c.microbatch)
            if c.phase == "forward":
                seen[key].update((*c.inputs, *c.outputs))
            elif key in seen and c.phase != "none":
                found.update(s for s in c.inputs if s in seen[key] and made_for.get(s) is not None)
        return frozenset(found)

    @functools.cached_property
    def overwrites(self) -> dict[Fragment, tuple[tuple[int, int], ...]]:
        """For each fragment, the inputs whose memory results take over: (number of the input, of the result).

        An input qualifies if each call of the fragment is its last use. What has a successor gives way to it;
        what else was made by the program, and is no other mesh's as well, to a result of its type.
        """
        # To a mesh of another shape, or with devices of the same, go shards that are there already. With the
        # same devices, those of the source: whichever of the two is last used first, the other is still read.
        shared = {t.outputs[0] for t in self.transfers if not _is_copied(t)}
        shared |= {t.inputs[0] for t in self.transfers if _common_devices(t)}
        dying: dict[Fragment, set[int]] = {}
        given: defaultdict[Fragment, set[int]] = defaultdict(set)  # those that are arguments, in some call
        for c in self.calls:
            given[c.fragment].update(n for n, s in enumerate(c.inputs) if s in self.inputs)
            times, free = Counter(c.inputs), set(c.frees) - shared
            mine = {n for n, s in enumerate(c.inputs) if s in free and times[s] == 1}
            dying[c.fragment] = dying.get(c.fragment, mine) & mine
        nexts, found = set(self.successors.values()), {}
        for f, places in dying.items():
            made = {v: k for k, v in enumerate(f.outvars)}
            after = {n: self.successors.get(f.invars[n]) for n in sorted(places)}
            pairs = [(n, made[v]) for n, v in after.items() if v in made]
            spare: defaultdict[Any, list[int]] = defaultdict(list)
            for v, k in made.items():
                if v not in nexts:
                    spare[v.aval.shape, v.aval.dtype].append(k)
            for n, v in after.items():
                like = spare[f.invars[n].aval.shape, f.invars[n].aval.dtype]
                if v is None and n not in given[f] and like:
                    pairs.append((n, like.pop(0)))
            found[f] = tuple(pairs)
        return found

    def table(self) -> list[list[Action]]:
        """What each mesh runs of the stages of the microbatch loop, in order: one row for each mesh.

        It can be written as CSV (`mm.write_schedule`), and given to `mm.microbatch` as `custom_schedule`.
        """
        rows: dict[Mesh, dict[Action, None]] = {}
        for c in self.calls:
            if c.stage is not None and c.microbatch is not None and c.phase != "none":
                rows.setdefault(c.mesh, {})[Action(c.stage, cast(Phase, c.phase), c.microbatch)] = None
        return [list(row) for row in rows.values()]

    def verify(self) -> None:
        """Checks that the program can run, does all there is to do, and leaves nothing behind.

        Every fragment of a loop runs once for each microbatch. Every value is made before it is read, on the
        mesh where it is read; it is dropped once, after its last use; and every value that is not a result is
        dropped. The order is one for all meshes, so processes that follow it cannot wait for each other.

        Raises:
          VerificationError: names the instruction, the microbatch and the mesh; where meshes wait for each
            other in a circle, every instruction of the circle.
        """
        self._check_loops()
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
                        + self._circle()
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
                if self.values[s][1] not in (mesh_in, mesh_out):
                    raise VerificationError(f"{where}: frees {self._value(s)}, which is on another mesh")
                if live.pop(s, None) is None:
                    raise VerificationError(f"{where}: frees {self._value(s)}, which is not there")
        for s in results - live.keys():
            raise VerificationError(f"the result {self._value(s)} is never made")
        for s in live.keys() - results:
            raise VerificationError(f"{self._value(s)} is never freed")

    def _check_loops(self) -> None:
        counts = Counter((c.fragment, c.microbatch) for c in self.calls)
        for loop in self.loops:
            for f, *elsewhere in loop.fragments:
                for m in range(loop.length):
                    times = sum(counts[g, m] for g in (f, *elsewhere))
                    if times != 1:
                        wrong = "is missing" if times == 0 else f"is there {times} times"
                        raise VerificationError(
                            f"{f.name} of microbatch {m} on {self._mesh(f.mesh)} {wrong} "
                            f"(schedule {loop.schedule!r}, {loop.length} microbatches)"
                        )

    def _circle(self) -> str:
        """The instructions that wait for each other if each mesh keeps its own order, in words."""
        makes = {s: number for number, i in enumerate(self.instructions) for s in i.outputs}
        before: dict[int, list[int]] = {}
        last: dict[Mesh, int] = {}
        for number, i in enumerate(self.instructions):
            before[number] = [makes[s] for s in i.inputs if s in makes]
            for mesh in (i.mesh,) if isinstance(i, Call) else (i.source_mesh, i.target_mesh):
                before[number] += [last[mesh]] if mesh in last else []
                last[mesh] = number
        try:
            graphlib.TopologicalSorter(before).prepare()
        except graphlib.CycleError as error:
            steps = [f"{n}, {self.describe(self.instructions[n])}" for n in error.args[1]]
            return ". Instructions wait for each other: " + " <- ".join(steps)
        return ""

    def simulate(self, costs: Costs | Mapping[str, float] | None = None) -> Timeline:
        """Plays the program through, without running it.

        Args:
          costs: how long fragments and transfers take: a `Costs` (such as `profile(...).costs`), or times by
            the name of a fragment (see `labels`), a phase, or "outside", in place of the default: one unit
            for a forward and for each of the two parts of a backward, nothing for transfers and for what is
            no part of a stage.

        Returns:
          The timeline: `makespan` and `bubble` say how long the step takes and how much of it the meshes
          idle; `peak_bytes`, `residual_bytes` and `in_flight` what is live on each at a time.

        Raises:
          ValueError: for names of what is not there, and for what the costs have no time for.

        Example:
          >>> train_step.program(model, optimizer, batch).simulate({"forward": 1.0, "backward": 1.8}).bubble
        """
        if not isinstance(costs, Costs):
            nothing = {"outside": 0.0, "none": 0.0} if self.loops else {}
            costs = Costs(UNIT_COSTS | nothing | dict(costs or {}))
        for name, cost in costs.calls.items():
            if not (isinstance(cost, numbers.Real) and cost >= 0):
                raise ValueError(f"simulate: the cost of {name!r} is a time of 0 or more, not {cost!r}")
        known = {*UNIT_COSTS, "outside", *self.labels.values(), *(f.name for f in self.labels)}
        if unknown := [name for name in costs.calls if name not in known]:
            raise ValueError(
                f"simulate: there is no {', '.join(map(repr, unknown))}; there are "
                + ", ".join(map(repr, self.labels.values()))
            )
        ready: dict[int, float] = dict.fromkeys(self.inputs, 0.0)
        idle: defaultdict[Any, float] = defaultdict(float)  # of meshes, and of the ways between them
        events, transfers = [], []
        # Falls come before rises at one time, except in a call that takes none: what it holds, it holds.
        moves: list[tuple[Any, int, str]] = [
            ((0.0, 0, -1, 0), nbytes(v), self.names[mesh]) for v, mesh in self.inputs.values()
        ]
        # Moves of residuals alone: to begin with, none.
        kept: list[tuple[Any, int, str]] = [(moment, 0, name) for moment, _, name in moves]
        host = 0.0  # when the next instruction is dispatched
        for n, i in enumerate(self.instructions):
            host += costs.dispatch
            begin = max((ready[s] for s in i.inputs), default=0.0)
            if isinstance(i, Call):
                mesh = self.names[i.mesh]
                start = max(begin, idle[i.mesh], host)
                outside = i.microbatch is None
                took = costs.of_call(self.labels[i.fragment], i.name, i.phase, outside)
                end = idle[i.mesh] = start + took
                events.append(Event(mesh, start, end, i.phase, i.microbatch, i.name, i.stage))
            else:
                way = f"{i.source} -> {i.target}"
                start = max(begin, idle[way], host)
                end = idle[way] = start + costs.of_transfer(i.nbytes)
                transfers.append(Event(way, start, end, "transfer", i.microbatch, "transfer"))
            ready.update(dict.fromkeys(i.outputs, end))
            overwritten = self._overwritten(i)
            changes = [((start, 1, n, 0), 1, s) for s in i.outputs]
            changes += [((end, int(end == start), n, 1), -1, s) for s in i.frees]
            for time, sign, s in changes:
                v, home = self.values[s]
                move = time, sign * nbytes(v), self.names[home]
                if s not in overwritten:
                    moves.append(move)
                if s in self.residuals:
                    kept.append(move)
        return Timeline(tuple(events), tuple(transfers), peaks(moves), peaks(kept))

    def _overwritten(self, i: Instruction) -> set[int]:
        """Slots that an instruction drops and whose memory a result takes over, and those of the results."""
        pairs = self.overwrites[i.fragment] if isinstance(i, Call) else ()
        return {s for n, k in pairs for s in (i.inputs[n], i.outputs[k])}

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Runs the program for arguments like those that it was made for, and measures it.

        It is compiled first. Then the step is run twice on copies of its arguments, as it would run, the
        second time against the clock, and once more one instruction at a time, each of which is timed. The
        last run counts: state is updated as by one call of the function.

        Returns:
          The times of every fragment and transfer, for `simulate`, and the time of the step.

        Raises:
          ValueError: for arguments of other shapes or homes than it was made for.

        Example:
          >>> profile = train_step.program(model, optimizer, batch).profile(model, optimizer, batch)
          >>> profile.seconds, profile.timeline.makespan
        """
        if self.run is None:
            raise ValueError("this program is a description only: profile one that mm.jit(...).program made")
        return self.run(*args, **kwargs)

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
        used = {mesh for _, mesh in self.values}
        for mesh, name in self.names.items():
            if mesh not in used:
                continue
            lines.append(f"  {name}: devices {[d.id for d in mesh.devices.flat]}, {dict(mesh.shape)}")
        for number, i in enumerate(self.instructions):
            line = f"{number:5d}  {self.describe(i)}"
            if isinstance(i, Call):
                line += f": reads {self._slots(i.inputs)}; writes {self._slots(i.outputs)}"
            else:
                line += f": %{i.inputs[0]} -> %{i.outputs[0]}"
            lines.append(line + (f"; frees {self._slots(i.frees)}" if i.frees else ""))
        for mesh, name in self.names.items():
            given = [f"%{s} {path}" for s, path in self.arguments.items() if self.values[s][1] == mesh]
            lines += _wrapped(f"  {name} is given ", given)
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _slots(self, slots: Sequence[int]) -> str:
        return ", ".join(f"%{s}" for s in slots) or "nothing"

    def _type(self, slot: int) -> str:
        aval = self.values[slot][0].aval
        return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"

    def _value(self, slot: int) -> str:
        what = ", ".join([self._type(slot), *([self.arguments[slot]] if slot in self.arguments else [])])
        return f"%{slot} ({what}) of {self._mesh(self.values[slot][1])}"

    def _mesh(self, mesh: Mesh) -> str:
        return f"{self.names.get(mesh, 'mesh')} (devices {[d.id for d in mesh.devices.flat]})"


def _wrapped(intro: str, items: Sequence[str]) -> list[str]:
    """Lines of at most 110 characters, none of which ends within an item."""
    whole = ", ".join(item.replace(" ", "\xa0") for item in items)
    lines = textwrap.wrap(whole, 110 - len(intro), break_long_words=False, break_on_hyphens=False)
    starts = [intro, *(" " * len(intro) for _ in lines[1:])]
    return [start + line.replace("\xa0", " ") for start, line in zip(starts, lines)]


def _is_copied(t: Transfer) -> bool:
    """Whether what a transfer makes shares no memory with what is on another mesh."""
    return t.source_mesh.devices.shape == t.target_mesh.devices.shape and not _common_devices(t)


def _common_devices(t: Transfer) -> set[Any]:
    return set(t.source_mesh.devices.flat) & set(t.target_mesh.devices.flat)
