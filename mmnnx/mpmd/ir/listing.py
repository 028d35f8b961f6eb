"""Listings of what stages hand on: equations with their mesh, phase and reason, fragments, timetables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from mmnnx import _compat
from mmnnx.mpmd.ir.equations import Atom, Equation, Flat, Node, Var, While, is_var
from mmnnx.mpmd.ir.fragments import Fragment, Plan, WhilePlan
from mmnnx.mpmd.ir.placement import Placed, Placement
from mmnnx.mpmd.ir.timetable import LETTERS, Action, Timetable

_LONGEST = 60  # characters of a parameter


class Names:
    """Names of variables, in the order in which they are met."""

    def __init__(self) -> None:
        self._numbers: dict[Var, int] = {}

    def of(self, atom: Atom) -> str:
        """The name of a variable; the value of a literal."""
        if is_var(atom):
            return f"v{self._numbers.setdefault(atom, len(self._numbers))}"
        return str(atom.val) if not atom.aval.shape else f"{atom.aval.str_short()} constant"

    def typed(self, v: Var) -> str:
        """A name with its type."""
        return f"{self.of(v)}:{v.aval.str_short()}"

    def all(self, atoms: Iterable[Atom]) -> str:
        """Names in a row."""
        return " ".join(map(self.of, atoms))

    def all_typed(self, atoms: Iterable[Var]) -> str:
        """Names with types in a row."""
        return " ".join(map(self.typed, atoms))


def flat_text(flat: Flat, names: Names) -> str:
    """A flat list of equations."""
    return "\n".join(
        [
            f"inputs: {names.all_typed(flat.invars)}",
            f"constants: {names.all_typed(v for v, _ in flat.constants)}",
            *_nodes(flat.nodes, None, {}, names),
            f"results: {names.all(flat.outvars)}",
        ]
    )


def placed_text(placed: Placed, mesh_names: Mapping[Mesh, str], names: Names) -> str:
    """Equations with the mesh, the phase and the position of each."""
    return "\n".join(_nodes(placed.nodes, placed.placement, mesh_names, names))


def plan_text(plan: Plan, mesh_names: Mapping[Mesh, str], names: Names) -> str:
    """Fragments with their equations, and loops of them."""
    lines: list[str] = []
    for step in plan.steps:
        if isinstance(step, Fragment):
            lines += [*_fragment(step, mesh_names, names), ""]
            continue
        loop = step.loop
        if isinstance(step, WhilePlan):
            lines.append(f"while {names.of(loop.carry_in[0])}")
        else:
            lines.append(f"loop over {step.loop.spec.length} microbatches")
        carries = zip(loop.carry_in, loop.carry_out, step.carried)
        lines += [
            f"  carries {names.typed(enters)} -> {names.of(leaves)} on {_meshes(meshes, mesh_names)}"
            for enters, leaves, meshes in carries
        ]
        if isinstance(step, WhilePlan):
            inner = plan_text(step.body, mesh_names, names).splitlines()
            lines += [*(f"  {line}".rstrip() for line in inner), ""]
            continue
        lines += [
            f"  keeps {names.typed(y)} of each microbatch on {_meshes(meshes, mesh_names)}"
            for y, _, meshes in step.kept
        ]
        for f in step.body.fragments:
            lines += [f"  {line}" for line in _fragment(f, mesh_names, names)]
        lines.append("")
    return "\n".join(lines)


def timetables_text(plan: Plan) -> str:
    """What the schedule of each loop asks of each mesh."""
    return "\n\n".join(_timetable(step.timetable) for step in plan.loops) or "no loops"


def _nodes(
    nodes: Sequence[Node], placement: Placement | None, mesh_names: Mapping[Mesh, str], names: Names
) -> Iterator[str]:
    if placement is not None:
        for n, p in enumerate(placement.positions):
            task = f", {p.task}" if p.task is not None else ""
            yield f"position {n}: {mesh_names[p.mesh]}{task}"
    for node in nodes:
        if isinstance(node, Equation):
            yield _equation(node.eqn, names) + _where(node, placement, mesh_names) + _scope(node)
            continue
        if isinstance(node, While):
            yield f"while {names.of(node.carry_in[0])}:"
        else:
            spec = node.spec
            yield f"loop over {spec.length} microbatches, schedule {spec.schedule or 'chosen by simulation'}:"
        for start, enters in zip(node.init, node.carry_in):
            yield f"  carry {names.typed(enters)} from {names.of(start)}"
        if not isinstance(node, While):
            for v, row in zip(node.slice_vars, node.slices):
                yield f"  slice {names.typed(v)} of {names.all(row)}"
        inside = placement.bodies[node] if placement is not None else None
        yield from (f"  {line}" for line in _nodes(node.body, inside, mesh_names, names))
        for leaves, after in zip(node.carry_out, node.carries):
            yield f"  carry {names.of(leaves)} to {names.typed(after)}"
        if isinstance(node, While):
            continue
        for y, row in zip(node.ys, node.stacks):
            yield f"  keep {names.of(y)} as {names.all_typed(row)}"


def _where(node: Node, placement: Placement | None, mesh_names: Mapping[Mesh, str]) -> str:
    if placement is None:
        return ""
    location = placement.locations.get(node)
    if location is None:
        return "  @ wherever it is read"
    position = "" if location.position is None else f" {location.position}"
    where = f"{mesh_names[location.mesh]}, {placement.phases[node]}{position}"
    return f"  @ {where} ({placement.reasons[node].value})"


def _scope(node: Equation) -> str:
    return f"  # {node.scope}" if node.scope else ""


def _equation(eqn: Any, names: Names) -> str:
    made, read = names.all_typed(eqn.outvars), names.all(eqn.invars)
    shown = [f"{key}={text}" for key, value in eqn.params.items() if (text := _parameter(value))]
    parameters = f"[{' '.join(shown)}]" if shown else ""
    return f"{made or '_'} = {eqn.primitive.name}{parameters} {read}".rstrip()


def _parameter(value: Any) -> str:
    """A parameter of an equation; "" for what says nothing."""
    if isinstance(value, _compat.JAXPR_TYPES):
        return f"<{len(_compat.open_jaxpr(value)[2])} equations>"
    if value is None or callable(value) or (isinstance(value, tuple) and not value):
        return ""
    text = " ".join(str(value).split())
    return text if len(text) <= _LONGEST and " at 0x" not in text else "..."


def _fragment(f: Fragment, mesh_names: Mapping[Mesh, str], names: Names) -> Iterator[str]:
    position = "" if f.position is None else f", position {f.position}"
    yield f"fragment {f.name!r} on {mesh_names[f.mesh]}{position}"
    yield f"  reads {names.all_typed(f.invars)}"
    yield from (f"    {_equation(e, names)}" for e in f.jaxpr.eqns)
    yield f"  makes {names.all(f.outvars)}"


def _meshes(meshes: Iterable[Mesh], mesh_names: Mapping[Mesh, str]) -> str:
    return ", ".join(mesh_names[m] for m in meshes) or "no mesh"


def _timetable(times: Timetable) -> str:
    lines = [f"schedule {times.schedule}"]
    for n, (mesh, reads) in enumerate(zip(times.stages.meshes, times.stages.reads)):
        after = f", reads stage {', '.join(map(str, reads))}" if reads else ""
        split = ", backward in two parts" if times.positions[n] in times.split else ""
        lines.append(f"stage {n}: mesh {mesh}, position {times.positions[n]}{after}{split}")
    return "\n".join(
        [*lines, *(f"row {n} (stage, phase, microbatch): {_row(row)}" for n, row in enumerate(times.table))]
    )


def _row(row: Sequence[Action]) -> str:
    return " ".join(f"{a.stage}{LETTERS[a.phase]}{a.microbatch}" for a in row)
